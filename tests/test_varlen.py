"""Attention between boundaries: exact against one chat at a time, the call on CUDA, what it refuses, and its runs."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen as torchs
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError, ModelError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner import kernels
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.training.class_checks import masking, small_model
from sft_play.training.loop import trainer
from sft_play.training.loop.rows import Collator
from sft_play.training.measure.monitor import count_tokens
from sft_play.training.model import attention_functions
from sft_play.training.model.attention_functions import full_rows_attention
from sft_play.training.prepare import model_spec
from tests.test_packing import metrics, run_yaml

pytestmark = pytest.mark.build


def heads(draw: Any, tokens: int, *, groups: int = 2, times: int = 2, width: int = 16, dtype: Any = None) -> list[Any]:
    """Random queries [1, H, T, D], keys and values [1, G, T, D] that ask for gradients."""
    counts = (groups * times, groups, groups)
    made = [torch.from_numpy(draw.standard_normal((1, count, tokens, width))) for count in counts]
    return [one.to(dtype or torch.float32).requires_grad_() for one in made]


def alone(q: Any, k: Any, v: Any, lengths: list[int], *, window: int | None, scale: float | None = None) -> Any:
    """The same, one chat at a time, in fp64 and by hand: softmax of the scores that are seen."""
    q, k, v = (one.double() for one in (q, k, v))
    times = q.shape[1] // k.shape[1]
    parts, begin = [], 0
    for length in lengths:
        own = slice(begin, begin + length)
        scores = q[0, :, own] @ k[0, :, own].repeat_interleave(times, 0).mT * (scale or q.shape[-1] ** -0.5)
        back = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (back >= 0) & (back < (window or length))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(weights @ v[0, :, own].repeat_interleave(times, 0))
        begin += length
    return torch.cat(parts, 1).transpose(0, 1)[None]  # [1, T, H, D]


def attended(q: Any, k: Any, v: Any, lengths: list[int], **options: Any) -> Any:
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    module = SimpleNamespace(is_causal=True, training=True, num_key_value_groups=q.shape[1] // k.shape[1])
    boundaries = {"cu_seq_lens_q": ends, "max_length_q": max(lengths), "chat_lengths": tuple(lengths)}
    return attention_functions.varlen_attention(module, q, k, v, None, **boundaries, **options)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_exact_against_one_chat_at_a_time(dtype):
    draw = np.random.default_rng(11)
    # bf16 has 8 bits; outputs are means of values of about 1
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for _ in range(25):
        lengths = draw.integers(1, 20, size=int(draw.integers(1, 6))).tolist()
        groups, times = int(draw.choice([1, 2])), int(draw.choice([1, 3]))
        window = None if draw.random() < 0.5 else int(draw.integers(1, 12))
        scale = None if draw.random() < 0.5 else 0.3
        given = heads(draw, sum(lengths), groups=groups, times=times, width=int(draw.choice([8, 20])),
                      dtype=getattr(torch, dtype))  # fmt: skip
        if draw.random() < 0.3:  # latent attention: values of another width than keys
            given[2] = given[2][..., :6].detach().requires_grad_()
        ours = attended(*given, lengths, sliding_window=window, scaling=scale)
        theirs = alone(*given, lengths, window=window, scale=scale)
        weight = torch.from_numpy(draw.standard_normal(tuple(ours.shape)))
        own = torch.autograd.grad((ours.double() * weight).sum(), given)
        expected = torch.autograd.grad((theirs * weight).sum(), given)
        assert ours.dtype == getattr(torch, dtype)
        for one, other in zip((ours.detach(), *own), (theirs.detach(), *expected), strict=True):
            assert float((one.double() - other.double()).abs().max()) <= tolerance * (1 + float(other.abs().max()))


@pytest.mark.parametrize(("window", "width", "is_told"), [(None, 16, True), (4, 20, True), (4, 16, False)])
def test_cuda_is_asked_for_what_a_cpu_computes(monkeypatch, window, width, is_told):
    draw, lengths, asked = np.random.default_rng(3), [5, 9, 1], []

    def documented(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, scale: float,
        window_size: tuple[int, int], **of_later: Any,
    ) -> Any:  # fmt: skip
        assert (query.shape[-1] % 8, cu_seq_q is cu_seq_k, max_q, max_k) == (0, True, 9, 9)
        assert window_size[1] == 0  # causal
        assert of_later == ({"enable_gqa": True} if is_told else {})
        asked.append(window_size[0])
        seen = None if window_size[0] == -1 else window_size[0] + 1  # left of the query, and itself
        given = (one.transpose(0, 1)[None] for one in (query, key, value))
        return alone(*given, cu_seq_q.diff().tolist(), window=seen, scale=scale)[0].float()

    monkeypatch.setattr(torchs, "varlen_attn", documented)
    monkeypatch.setattr(attention_functions, "_HAS_GQA_ARGUMENT", is_told)
    q, k, v = heads(draw, sum(lengths), width=width)
    expected = attended(q, k, v, lengths, sliding_window=window)
    monkeypatch.setattr(attention_functions, "attention_per_chat", None)
    flash = attention_functions.flash_attention
    monkeypatch.setattr(attention_functions, "packed_attention", lambda *one, lengths, **more: flash(*one, **more))
    torch.testing.assert_close(attended(q, k, v, lengths, sliding_window=window), expected, rtol=1e-5, atol=1e-5)
    assert asked == [-1 if window is None else window - 1]


def test_rows_that_are_not_packed_are_sdpas_and_windows_need_no_mask():
    draw = np.random.default_rng(4)
    module = SimpleNamespace(is_causal=True, training=False, num_key_value_groups=2)
    q, k, v = (torch.cat([one, one.flip(2)]) for one in heads(draw, 12))
    expected = sdpa_attention_forward(module, q, k, v, None)[0]
    assert torch.equal(attention_functions.varlen_attention(module, q, k, v, None)[0], expected)
    assert torch.equal(attention_functions.varlen_attention(module, q, k, v, None, sliding_window=12)[0], expected)
    slid = attention_functions.varlen_attention(module, q, k, v, None, sliding_window=5)[0]
    for row in (0, 1):
        theirs = alone(*(one[row : row + 1] for one in (q, k, v)), [12], window=5)
        torch.testing.assert_close(slid[row : row + 1], theirs.float(), rtol=1e-5, atol=1e-5)
    # one token after others, as in generation: the cache has only what the window sees
    last = attention_functions.varlen_attention(module, q[:, :, -1:], k, v, None, sliding_window=5)[0]
    assert torch.equal(last, sdpa_attention_forward(module, q[:, :, -1:], k, v, None)[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [({"softcap": 50.0}, "softcap"), ({"s_aux": 1.0}, "s_aux"), ({"dropout": 0.1}, "dropout"),
     ({"is_causal": False}, "is_causal=False")],
)  # fmt: skip
def test_what_it_does_not_compute_is_refused(options, says):
    with pytest.raises(ValueError, match=f"varlen attention has no {says}"):
        attended(*heads(np.random.default_rng(0), 6), [4, 2], **options)


PADDING, BOUNDARIES = partial(masking.check_padding, attention="sdpa"), masking.check_boundaries


@pytest.mark.parametrize(
    ("check", "kind"),
    [*((PADDING, kind) for kind in ("llama", "mistral", "phi3", "gemma3_text", "gpt2", "opt")),
     *((BOUNDARIES, kind) for kind in ("llama", "mistral", "gemma3_text", "qwen3_moe"))],
)  # fmt: skip
def test_a_class_that_computes_the_same_without_a_mask_needs_none(check, kind):
    state = torch.random.get_rng_state()
    found = check(CONFIG_MAPPING[kind]())
    assert not found.is_needed, found.reason
    assert f"on a small model of {kind}'s class logits differ by" in found.reason
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("check", "config", "says"), [
    (PADDING, CONFIG_MAPPING["mixtral"](), "gradients by"),  # the balance loss of its experts
    (partial(masking.check_padding, attention="eager"), CONFIG_MAPPING["bert"](), "logits differ by"),
    (BOUNDARIES, CONFIG_MAPPING["opt"](), "logits differ by"),
    (BOUNDARIES, CONFIG_MAPPING["falcon"](), "cannot be measured"),
    (BOUNDARIES, LlamaConfig(attention_dropout=0.1), "varlen attention has no dropout"),
], ids=lambda value: getattr(value, "model_type", None) or "")  # fmt: skip
def test_a_class_that_reads_the_mask_keeps_it_and_says_why(check, config, says):
    found = check(config)
    assert (found.is_needed, says in found.reason) == (True, True), found.reason


@pytest.mark.parametrize("kind", ["padding", "boundaries"])
def test_what_is_more_than_rounding_or_cannot_be_measured_keeps_its_mask(monkeypatch, kind):
    check, name = {"padding": PADDING, "boundaries": BOUNDARIES}[kind], f"measure_{kind}"

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("heads\x1b[31m and tails")

    monkeypatch.setattr(masking, name, refuse)
    found = check(LlamaConfig())
    assert (found.is_needed, "\x1b" in found.reason) == (True, False)
    tolerance, nan = {"padding": 2e-6, "boundaries": 1e-4}[kind], float("nan")
    more = 2 * tolerance
    for *numbers, is_needed in (
        (0, 0, 1, False), (tolerance / 2, tolerance / 2, 1, False), (more, 0, 1, True), (0, more, 1, True),
        (nan, 0, 1, True), (0, nan, 1, True), (0, 0, 1e-3, True), (0, 0, nan, True),
    ):  # fmt: skip
        difference = masking.MaskDifference(*numbers, tolerance)
        monkeypatch.setattr(masking, name, lambda *_, difference=difference, **__: difference)
        assert check(LlamaConfig()).is_needed == is_needed, numbers


def test_a_class_is_measured_once_a_process_for_each_config_and_attention():
    seen = []

    def ask(config: Any, **options: Any) -> Any:
        return small_model.measure_small_model(config, look, **options)

    def look(small: Any, **options: Any) -> int:
        seen.append(options)
        return len(seen)

    assert ask(LlamaConfig(), attention="sdpa") == ask(LlamaConfig(), attention="sdpa") == (1, "")
    assert ask(LlamaConfig(rope_theta=5.0), attention="sdpa") == (2, "")
    assert ask(LlamaConfig(), attention="eager") == (3, "")
    assert ask(LlamaConfig(), attention="sdpa", trust_remote_code=True) == (4, "")
    assert ask(LlamaConfig(of_its_own=object()), attention="sdpa") == (5, ""), "an object that JSON cannot hold"


def test_runs_on_packs_learn_the_same_with_a_mask_and_without(tmp_path, tiny_llama, succeed, monkeypatch):
    calls: list[int] = []
    real = attention_functions.packed_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(args[3]) - 1)
        return real(*args, **options)

    monkeypatch.setattr(attention_functions, "packed_attention", counted)
    tried: list[str] = []
    monkeypatch.setattr(trainer, "verify_varlen_kernel", lambda spec, *_, **__: tried.append(spec.attention.name))
    path = run_yaml(tmp_path, tiny_llama)
    for name, attention, is_apart in (("masked", "sdpa", False), ("apart", "auto", True)):
        calls.clear()
        words = (f"output.name={name}", "data.packing=best_fit", f"model.attn_implementation={attention}")
        said = succeed("train", "--config", str(path), *words)
        assert ("Attention: chats of one row need no mask" in said) == any(count > 1 for count in calls) == is_apart
        step = json.loads((tmp_path / "outputs" / name / "plan.json").read_text())["step"]
        assert (step["varlen"], step["one_by_one"], step["padded"]) == (is_apart, is_apart, not is_apart)
    assert tried == ["sdpa", attention_functions.VARLEN_ATTENTION]
    for key in ("loss", "grad_norm", "eval_loss", "num_tokens", "samples_seen"):
        apart, masked = ([line[key] for line in metrics(tmp_path, name) if key in line] for name in ("apart", "masked"))
        assert apart
        assert apart == pytest.approx(masked, rel=1e-4), key


def test_a_batch_without_a_mask_has_positions_and_its_counts():
    draw = np.random.default_rng(5)
    for _ in range(20):
        lengths = draw.integers(1, 12, size=int(draw.integers(1, 5)))
        rows = [{"input_ids": draw.integers(5, 90, size=n), "labels": draw.choice([-100, 7], size=n)} for n in lengths]
        plain, masked = (Collator(pad_id=0, adds_masks=masks)(rows) for masks in (False, True))
        assert all((plain[name] == masked[name]).all() for name in ("input_ids", "labels"))
        assert ("attention_mask" in plain, plain["position_ids"].tolist()) == (False, [list(range(max(lengths)))])
        assert count_tokens(plain) == count_tokens(masked) == sum(lengths)
        assert plain["sample_count"] == sum(7 in row["labels"] for row in rows)


def test_a_run_without_masks_learns_what_the_run_with_them_does(tmp_path, tiny_llama, succeed, monkeypatch):
    from sft_play.training.loop import rows

    given: list[set[str]] = []
    real, figures = rows.Collator.__call__, {}

    def watched(self: Any, micro_rows: Any) -> Any:
        batch = real(self, micro_rows)
        given.append({"attention_mask", "position_ids"} & set(batch))
        return batch

    monkeypatch.setattr(rows.Collator, "__call__", watched)
    path, needed = run_yaml(tmp_path, tiny_llama, rows=12), masking.MaskRequirement(True, "a test says so")
    for name in ("plain", "masked"):
        given.clear()
        if name == "masked":
            monkeypatch.setattr(model_spec, "check_padding", lambda *_, **__: needed)
        words = (f"output.name={name}", "train.effective_batch_size=6", "train.batch_size=3", "train.max_steps=3")
        said = succeed("train", "--config", str(path), *words, "train.group_by_length=false", "eval.steps=2")
        figures[name] = metrics(tmp_path, name)
        # training and evaluation; the measurement's own batches are of both kinds
        assert given[-8:] == [{"attention_mask" if name == "masked" else "position_ids"}] * 8
        is_plain = name == "plain"
        assert ("padded rows need no mask" in said, "the plan left out masks" in said) == (is_plain, not is_plain)
    for key in ("loss", "grad_norm", "eval_loss", "num_tokens", "samples_seen", "padding_share"):
        plain, masked = ([line[key] for line in figures[name] if key in line] for name in ("plain", "masked"))
        assert plain
        assert plain == pytest.approx(masked, rel=1e-5), key


def test_a_model_generates_with_its_usual_attention(tiny_llama):
    """Prompts are padded on the left there, which boundaries do not say."""
    own, usual = (
        AutoModelForCausalLM.from_pretrained(tiny_llama, attn_implementation=name, dtype=torch.float32)
        for name in (attention_functions.VARLEN_ATTENTION, "sdpa")
    )
    ids = torch.tensor([[0, 0, 0, 7, 9], [5, 6, 8, 7, 9]])
    mask = (ids > 0).long()
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with full_rows_attention(own):
        assert torch.equal(own.generate(**asked), usual.generate(**asked))
    assert own.config._attn_implementation == attention_functions.VARLEN_ATTENTION


HUB = f"kernels-community/flash-attn2@{'0123456789' * 4}"


@pytest.mark.parametrize(
    "wanted",
    ["kernels-community/flash-attn2", "kernels-community/flash-attn2@main", "kernels-community/flash-attn2@v1",
     f"kernels-community/activation@{'a' * 40}", f"flash-attn2@{'a' * 40}", "flash"],
)  # fmt: skip
def test_a_kernel_of_the_hub_is_pinned_to_a_commit(wanted):
    with pytest.raises(ConfigError, match=r"a flash attention kernel of the hub with its commit") as error:
        config_from_text(f"model: {{name: x, attn_implementation: '{wanted}'}}", name="run")
    assert wanted in str(error.value)


def test_a_kernel_of_the_hub_runs_as_flash_attention_2(monkeypatch):
    def config(wanted: str) -> Any:
        text = f"model: {{name: Qwen/Qwen2.5-0.5B, attn_implementation: '{wanted}'}}\ndata: {{packing: best_fit}}\n"
        return config_from_text(text, name="run")

    shape, card = load_model_shape("Qwen/Qwen2.5-0.5B"), parse_hardware("H100")
    plans = [make_plan(PlanRequest(config(wanted), shape, card)) for wanted in (HUB, "flash_attention_2")]
    assert plans[0].choice == plans[1].choice
    assert plans[0].choice.step.attention == "flash_attention_2"
    with pytest.raises(ModelError, match=r"needs the package kernels, which is not installed; .*pip install kernels"):
        model_spec.choose_attention(config(HUB), LlamaForCausalLM)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name == "kernels")
    assert model_spec.choose_attention(config(HUB), LlamaForCausalLM).name == HUB
    with pytest.raises(ModelError, match="GptOssForCausalLM"):
        model_spec.choose_attention(config(HUB), GptOssForCausalLM)
