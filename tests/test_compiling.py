"""train.compile: compiled blocks train what plain ones train, at any length without compiling again, or stay plain.

Most tests stop before inductor: dynamo, autograd's partitioner and its decompositions run, and no C++ compiler does.
"""

import contextlib
import copy
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import AutoModelForCausalLM, LlamaConfig

from sft_play.process.environment import compile_cache_variables
from sft_play.training.class_checks import replaced_code
from sft_play.training.model import attention_functions, model_loading
from sft_play.training.prepare import model_spec
from tests.conftest import write_run
from tests.test_adapter_inputs import adapted, held_bytes
from tests.test_train import logged

pytestmark = pytest.mark.build
CPU = torch.device("cpu")
LENGTHS = (23, 31, 40, 57, 5)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    """No C++ compiler, unless a test says so, and nothing that another test has compiled."""
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "aot_eager_decomp_partition")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def llama(**sizes: Any) -> LlamaConfig:
    given = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**{**given, **sizes}, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=False)


def model_of(folder: Path, kind: str, *, checkpointing: bool) -> Any:
    """A model in training as the trainer sets one up: full in fp32, else fp32 adapters on a bf16 or NF4 base."""
    torch.manual_seed(0)
    if kind == "full":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    else:
        model = adapted(folder, kind)
        model_loading.cast_outside_autocast(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def passed(model: Any, *, length: int, rows: int = 2, half: bool = False) -> tuple[float, torch.Tensor]:
    """Loss and all gradients of a pass."""
    ids = torch.randint(3, 290, (rows, length), generator=torch.Generator().manual_seed(length))
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = [one.grad.flatten().float() for one in model.parameters() if one.grad is not None]
    return float(loss.detach()), torch.cat(grads)


def plan_of(compute: str) -> Any:
    return SimpleNamespace(precision=SimpleNamespace(compute=compute), compiled=True)


def graphs() -> int:
    return replaced_code._dynamo_counts()[0]


SLOW_KINDS = [pytest.param(kind, False, marks=pytest.mark.slow) for kind in ("full", "qlora")]


@pytest.mark.parametrize(("kind", "checkpointing"), [("lora", True), *SLOW_KINDS])
def test_passes_of_every_length_are_those_of_the_plain_code_from_one_graph(tiny_llama, kind, checkpointing):
    half = kind != "full"
    model = model_of(tiny_llama, kind, checkpointing=checkpointing)
    names = list(model.state_dict())
    plain = [passed(model, length=length, half=half) for length in LENGTHS]
    before = graphs()
    assert replaced_code.compile_in_place(model) == 2
    found = []
    for place, length in enumerate(LENGTHS):
        found.append(passed(model, length=length, half=half))
        if place == 0:
            first = graphs()
            # the first block's input needs no gradient under adapters without checkpointing
            assert first - before == (2 if half and not checkpointing else 1)
    assert graphs() == first
    for (loss, grads), (loss_plain, grads_plain) in zip(found, plain, strict=True):
        assert loss == pytest.approx(loss_plain, rel=1e-3 if half else 1e-5)
        assert float((grads - grads_plain).norm() / grads_plain.norm()) < (1e-2 if half else 1e-5)
    assert (len({loss for loss, _ in found}), list(model.state_dict())) == (len(LENGTHS), names)
    assert not any("_orig_mod" in name for name in names)


def test_rows_one_behind_the_other_compile_once_whatever_their_number_and_length(monkeypatch):
    """On CUDA attention between boundaries is an operator that torch knows; here one of the test's stands for it."""

    tensor = torch.Tensor

    @torch.library.custom_op("sft_play_tests::between", mutates_args=())
    def between(query: tensor, key: tensor, value: tensor, ends: tensor, longest: int, scale: float) -> tensor:
        return attention_functions.attention_per_chat(query, key, value, ends.diff().tolist(), scale=scale, window=None)

    between.register_fake(lambda query, key, value, ends, longest, scale: torch.empty_like(query))
    kernel = attention_functions.packed_attention

    def standing_in(*given, scale, **options):
        return between(*given, scale) if torch.compiler.is_compiling() else kernel(*given, scale=scale, **options)

    monkeypatch.setattr(attention_functions, "packed_attention", standing_in)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(attn_implementation=attention_functions.VARLEN_ATTENTION)).eval()
    rows = [(17, 9), (3, 5, 8), (21,), (11, 2), (4, 4, 4, 4), (1, 2, 3, 4, 5)]
    with torch.no_grad():
        plain = [packed(model, lengths) for lengths in rows]
        before = graphs()
        replaced_code.compile_in_place(model)
        found = [packed(model, lengths) for lengths in rows]
    assert (graphs() - before, sum(torch._dynamo.utils.counters["graph_break"].values())) == (1, 0)
    for one, other in zip(found, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def packed(model: Any, lengths: tuple[int, ...]) -> torch.Tensor:
    total = sum(lengths)
    ids = torch.randint(3, 290, (1, total), generator=torch.Generator().manual_seed(total))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    longest = {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **longest}
    return model(input_ids=ids, position_ids=places, use_cache=False, **boundaries).logits


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_compiled_block_keeps_less_for_its_backward_pass_than_the_plain_one_that_the_plan_counts(tiny_llama, kind):
    model = model_of(tiny_llama, kind, checkpointing=False)
    block = model_spec.decoder_layers(model)[1]
    ids, states = torch.arange(64)[None], torch.randn(1, 64, 64, requires_grad=True)
    angles = next(one for name, one in model.named_modules() if name.endswith("rotary_emb"))(states, ids)
    kept = []
    for is_compiled in (False, True):
        if is_compiled:
            block.compile(backend=replaced_code.COMPILE_BACKEND, dynamic=True)
        with held_bytes(model) as held, torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "lora"):
            output = block(states + 0, position_embeddings=angles, attention_mask=None, position_ids=ids)
        kept.append(sum(held.values()))
        output.float().sum().backward()
    assert 0.5 * kept[0] < kept[1] < 0.9 * kept[0]


def test_generation_and_evaluation_run_the_plain_code(monkeypatch):
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "eager")
    model = AutoModelForCausalLM.from_config(llama())
    ids = torch.arange(3, 20)[None]
    model.eval()
    answer = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist()
    replaced_code.compile_in_place(model)
    before = graphs()
    with torch.compiler.set_stance("force_eager"):
        assert model.generate(input_ids=ids, max_new_tokens=6, do_sample=False).tolist() == answer
        assert graphs() == before
    model(input_ids=ids, use_cache=False)
    assert graphs() == before + 1
    assert all(one._compiled_call_impl is None for one in copy.deepcopy(model).modules())


def test_checkpointing_is_inside_what_is_compiled(monkeypatch, tiny_llama):
    """torchtitan's order: checkpointing, then compile; FSDP2's hooks come around both (two ranks, below)."""
    seen: list[str] = []
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", lambda graph, _: seen.append(graph.code) or graph)
    model = model_of(tiny_llama, "full", checkpointing=True)
    replaced_code.compile_in_place(model)
    passed(model, length=9)
    assert len(seen) == 1
    assert "tag_activation_checkpoint" in seen[0]


def test_what_is_compiled_is_kept_where_a_restart_finds_it(tmp_path):
    kept = compile_cache_variables({"SFT_PLAY_CACHE": str(tmp_path)})
    assert kept == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert compile_cache_variables({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {}


def rounded(graph: Any, inputs: Any) -> Any:
    """Exact in fp32; in 16 bits a multiple of 1/8."""
    near = lambda one: one + ((one * 8).round() / 8 - one).detach()  # noqa: E731
    return lambda *given: tuple(one if one.dtype == torch.float32 else near(one) for one in graph(*given))


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(("backend", "words"), [
    (rounded, "a small model of this class computes something else compiled: "),
    (failing, "not proven: BackendCompilerFailed: "),
])  # fmt: skip
def test_what_is_not_proven_stays_plain_with_one_warning(monkeypatch, caplog, backend, words):
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", backend)
    model = AutoModelForCausalLM.from_config(llama())
    assert not replaced_code.verify_compiled_blocks(model, plan_of("bfloat16"), device=CPU)
    (record,) = [one for one in caplog.records if "Compiled blocks" in one.message]
    assert record.levelno == logging.WARNING
    assert words in record.message
    assert all(one._compiled_call_impl is None for one in model.modules())


@pytest.mark.parametrize("backend", [
    failing, aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=failing),
])  # fmt: skip
def test_a_block_at_which_the_compiler_fails_leaves_all_plain_with_one_warning(monkeypatch, caplog, backend):
    """At the forward pass, or at the backward one, which is compiled with it."""
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", backend)
    model = AutoModelForCausalLM.from_config(llama()).train()
    plain = passed(model, length=9)
    with contextlib.closing(replaced_code.compile_blocks(model)) as monitor:
        loss, gradients = passed(model, length=9)
        monitor.on_step_end()
    assert (loss, monitor.figures()["graphs"]) == (plain[0], 0)
    assert torch.equal(gradients, plain[1])
    (line,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.startswith("Compiled blocks: none, the plain code runs: backend=")
    assert line.endswith(" raised: RuntimeError: no such instruction")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_computes_the_same_is_proven_and_leaves_nothing_behind(dtype):
    state = torch.get_rng_state()
    found = replaced_code.check_compiled_blocks(llama(), attention="sdpa", device=CPU, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert (found.is_rounding, found.fp32_difference < 1e-5) == (True, True)
    assert (found.half_precision_ratio == 0) == (dtype == torch.float32)
    assert found.half_precision_ratio < replaced_code.MAX_HALF_ERROR_RATIO


def test_a_class_that_does_not_compile_and_ranks_beside_one_that_cannot_stay_plain(monkeypatch, caplog):
    model = AutoModelForCausalLM.from_config(llama())
    layer = type(model.model.layers[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "forward", torch.compiler.disable(layer.forward))
        assert not replaced_code.verify_compiled_blocks(model, plan_of("float32"), device=CPU)
    assert "not proven: ValueError: none of its blocks compiles" in caplog.text
    monkeypatch.setattr(replaced_code, "_compare_on_small_models", lambda *_, **__: (object(), ""))
    monkeypatch.setattr(replaced_code.distributed, "any_rank", lambda mine: True)
    assert not replaced_code.verify_compiled_blocks(model, plan_of("float32"), device=CPU)
    assert "the plain code runs: another rank cannot" in caplog.text


def test_seconds_and_graphs_are_told(caplog, monkeypatch):
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "eager")
    caplog.set_level(logging.DEBUG)
    handler = torch._dynamo.callback.callback_handler
    listening = len(handler.start_callbacks), len(handler.end_callbacks), torch._dynamo.config.optimize_ddp
    model = AutoModelForCausalLM.from_config(llama())
    replaced_code.compile_in_place(model)
    compiler = replaced_code.CompileMonitor()
    waited: list[float] = []
    compiler.on_compiled.append(waited.append)
    for length in (9, 12):
        passed(model, length=length)
        compiler.on_step_end()
    facts = compiler.figures()
    assert (facts["graphs"], facts["breaks"], facts["seconds"]) == (1, 0, pytest.approx(sum(waited), abs=0.01))
    assert "WARNING" not in caplog.text
    passed(model, length=9, rows=1)  # one row is a graph of its own
    assert compiler.figures()["graphs"] == 2
    compiler.close()
    assert (len(handler.start_callbacks), len(handler.end_callbacks), torch._dynamo.config.optimize_ddp) == listening


def test_what_is_not_compiled_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "eager")
    model = AutoModelForCausalLM.from_config(llama(num_hidden_layers=4))
    forward = type(model.model.layers[0].mlp).forward

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", broken)
    replaced_code.compile_in_place(model)
    with contextlib.closing(replaced_code.CompileMonitor()) as compiler:
        for length in (9, 12):
            passed(model, length=length)
            compiler.on_step_end()
    assert compiler.figures()["breaks"] > 0
    assert caplog.text.count("plain code runs at ") == 1


@pytest.fixture
def run_yaml(tmp_path, tiny_llama, sums):
    train = {"max_steps": 4, "learning_rate": 1e-2, "warmup_steps": 0, "gradient_checkpointing": True, "save_steps": 2}
    judged, data = {"steps": 2, "generate_rows": 2, "max_new_tokens": 4}, {"val_fraction": 0.2}
    return write_run(tmp_path, tiny_llama, sums, tuning={"mode": "full"}, data=data, train=train, eval=judged)


def test_a_run_trains_what_the_plain_one_trains_and_says_what_it_cost(succeed, run_yaml, tmp_path):
    folders = {}
    for name, words in (("plain", []), ("compiled", ["train.compile=true"])):
        succeed("train", "--config", str(run_yaml), f"output.name={name}", *words)
        folders[name] = tmp_path / "outputs" / name
    summary = json.loads((folders["compiled"] / "summary.json").read_text())
    assert json.loads((folders["plain"] / "summary.json").read_text())["compile"] is None
    # evaluations and answers in between compiled nothing
    assert (summary["compile"]["graphs"], summary["compile"]["breaks"]) == (1, 0)
    for key in ("loss", "eval_loss"):
        assert logged(folders["compiled"], key) == pytest.approx(logged(folders["plain"], key), rel=1e-5)
    plain, compiled = (load_file(folder / "model/model.safetensors") for folder in folders.values())
    assert plain.keys() == compiled.keys()
    steps = [json.loads(line) for line in (folders["compiled"] / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in steps if "time_compile_s" in line)
    assert first["time_compile_s"] == pytest.approx(summary["compile"]["seconds"], abs=0.1)
    assert first["step_time_s"] < first["time_compile_s"]  # which the step and its speed leave out
    assert sum("time_compile_s" in line for line in steps) == 1


@pytest.mark.slow
def test_a_stopped_run_with_adapters_goes_on_compiled_and_not_otherwise(refuse, succeed, run_yaml, tmp_path):
    words = ["--config", str(run_yaml), "tuning.mode=lora", "train.compile=true"]
    succeed("train", *words, "output.name=whole")
    succeed("train", *words, "output.name=parts", "train.stop_after_steps=2")
    assert "train.compile" in refuse("resume", *words, "output.name=parts", "train.compile=false")
    succeed("resume", *words, "output.name=parts")
    found, whole = (logged(tmp_path / "outputs" / name, "loss") for name in ("parts", "whole"))
    assert (found, len(found)) == (pytest.approx(whole, rel=1e-5), 4)


@pytest.mark.slow
def test_inductor_itself_is_proven_and_trains_the_same(monkeypatch, tiny_llama):
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "inductor")
    assert replaced_code.check_compiled_blocks(llama(), attention="sdpa", device=CPU, dtype=torch.bfloat16).is_rounding
    model = model_of(tiny_llama, "lora", checkpointing=True)
    names = list(get_peft_model_state_dict(model))
    plain = [passed(model, length=length) for length in LENGTHS]
    replaced_code.compile_in_place(model)
    before = graphs()
    for length, (loss, grads) in zip(LENGTHS, plain, strict=True):
        found, found_grads = passed(model, length=length)
        assert found == pytest.approx(loss, rel=1e-2)  # a bf16 base without autocast
        assert float((found_grads - grads).norm() / grads.norm()) < 5e-2
    assert (graphs() - before, list(get_peft_model_state_dict(model))) == (1, names)


@pytest.mark.slow
def test_two_ranks_compile_and_lose_what_plain_ones_lose(succeed, run_yaml, tmp_path):
    runs = {"plain": ("ddp", "false"), "ddp": ("ddp", "true"), "fsdp": ("fsdp", "true"), "again": ("fsdp", "true")}
    words = ("train-distributed", "--config", str(run_yaml), "--nproc", "2", "eval.generate_rows=0")
    for name, (strategy, is_compiled) in runs.items():
        succeed(*words, "--strategy", strategy, f"output.name={name}", f"train.compile={is_compiled}")
        plain = logged(tmp_path / "outputs" / "plain", "loss")
        assert logged(tmp_path / "outputs" / name, "loss") == pytest.approx(plain, rel=1e-5)
        summary = json.loads((tmp_path / "outputs" / name / "summary.json").read_text())
        if is_compiled == "true":
            assert (summary["compile"]["graphs"], summary["compile"]["breaks"]) == (1, 0)
    assert summary["compile"]["cached"] == 2  # forwards and backwards, of the start before
