"""`tuning.lora.init`: PiSSA and LoftQ start where they should, and what they train is a plain adapter of the base."""

import copy
import random

import pytest
import torch

from sft_play.config.schema import LoraConfig
from sft_play.training.class_checks import replaced_code
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.model.model_loading import freeze_pissa_half, initialize_adapters, low_rank_factors
from sft_play.training.model.nf4_experts import nf4_roundtrip
from tests.models import make_llama
from tests.test_distributed import succeed, world  # noqa: F401
from tests.test_train import assert_resumes, losses, run_yaml, train, trained, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build


def adapted(base, *, rank: int, alpha: int, **options):
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", **options)
    return get_peft_model(copy.deepcopy(base), config)


def started(base, lora: LoraConfig, whole_weights=None):
    model = adapted(base, rank=lora.stored_rank, alpha=lora.stored_alpha)
    initialize_adapters(model, lora, seed=1, device=torch.device("cpu"), read_base_weights=lambda: whole_weights)
    freeze_pissa_half(model, lora)
    return model


def steps(model, rows, *, bf16: bool) -> list[float]:
    """Losses of AdamW's steps, each clipped by its norm."""
    params = [one for one in model.parameters() if one.requires_grad]
    optimizer, found = torch.optim.AdamW(params, lr=2e-3, weight_decay=0.0), []
    for ids in rows:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture(params=["float32", "bfloat16"])
def base(request, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_llama(tmp_path / "base", vocab_size=64, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, request.param))


def test_pissa_trains_as_pefts_does_and_leaves_the_base_alone(base):
    bf16 = base.dtype == torch.bfloat16
    rows = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(3)).repeat(4, 1, 1)
    before = copy.deepcopy(base.state_dict())
    lora = LoraConfig(r=3, alpha=5, init="pissa")
    ours, theirs = started(base, lora), adapted(base, rank=3, alpha=5, init_lora_weights="pissa")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain = base(input_ids=rows[0], labels=rows[0]).loss.item()
    frozen = [one.detach().clone()[3:] for name, one in ours.named_parameters() if "lora_A" in name]
    at_start = {name: one.detach().clone() for name, one in ours.named_parameters() if one.requires_grad}
    mine, wanted = steps(ours, rows, bf16=bf16), steps(theirs, rows, bf16=bf16)
    for name, one in ours.named_parameters():
        if one.requires_grad:  # one half of it moves
            dim = 0 if "lora_A" in name else 1
            moved, stayed = map(torch.equal, one.split(3, dim), at_start[name].split(3, dim))
            assert (moved, stayed) == (False, True)
    assert mine[0] == pytest.approx(plain, abs=2e-5 if bf16 else 1e-6)
    assert mine[-1] < mine[0]
    assert mine == pytest.approx(wanted, rel=2e-3 if bf16 else 1e-5)  # in bf16 PEFT rounds its base once more
    after = ours.unload().state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = [one.detach()[3:] for name, one in started(base, lora).named_parameters() if "lora_A" in name]
    assert all(map(torch.equal, frozen, again))  # the same on every rank


def test_dropout_and_weight_decay_act_on_what_was_learned_alone(base):
    model = started(base, LoraConfig(r=3, alpha=5, init="pissa"))
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)
    optimizer.step()
    with torch.no_grad():
        found = model.train()(input_ids=ids).logits
        with model.disable_adapter():
            plain = model(input_ids=ids).logits
    bf16 = base.dtype == torch.bfloat16
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_start_is_the_best_approximation_of_its_rank(seed):
    draw = random.Random(seed)
    rows, columns = draw.randint(20, 90), draw.randint(20, 90)
    rank, scale = draw.randint(1, 12), draw.choice([0.5, 1.0, 2.0, 8.0])
    torch.manual_seed(seed)
    matrix = torch.randn(rows, columns) @ torch.randn(columns, columns)
    b, a = low_rank_factors(matrix, rank, scale=scale)
    assert (b.shape, a.shape) == ((rows, rank), (rank, columns))
    best = torch.linalg.svdvals(matrix)[rank:].norm()  # Eckart and Young
    assert (matrix - scale * b @ a).norm() == pytest.approx(best.item(), rel=1e-2)


@pytest.mark.parametrize("seed", range(2))
def test_loftq_starts_closer_to_the_base_than_nf4_is(seed):
    """For every scale; PEFT's start, which is not divided by it, is farther off than NF4 alone where it is above 2."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weight = torch.randn(draw.randint(40, 90), 64) * torch.rand(64).exp()
    lost, scale = weight - nf4_roundtrip(weight), draw.choice([0.5, 2.0, 4.0])
    b, a = low_rank_factors(lost, 8, scale=scale)
    assert (lost - scale * b @ a).norm() < 0.9 * lost.norm()
    theirs_b, theirs_a = low_rank_factors(lost, 8, scale=1.0)
    assert (lost - 4.0 * theirs_b @ theirs_a).norm() > lost.norm()


def test_loftq_takes_what_the_loaded_nf4_weights_lost(tmp_path):
    from peft.utils.integrations import dequantize_module_weight
    from transformers import AutoModelForCausalLM

    from sft_play.planner.precision import Precision
    from sft_play.training.model.model_loading import quantization_config

    folder = make_llama(tmp_path / "base", vocab_size=64)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    options = quantization_config(Precision("bfloat16", "bfloat16", ""))
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=options)
    own = dict(plain.named_parameters())
    model = started(packed, LoraConfig(r=8, alpha=32, init="loftq"), own)
    layers = {path: one for path, one in model.named_modules() if hasattr(one, "lora_A")}
    assert len(layers) == 14
    for path, layer in layers.items():
        weight = own[path.removeprefix("base_model.model.") + ".weight"].float()
        lost = weight - dequantize_module_weight(layer.base_layer).float()
        assert (lost - layer.get_delta_weight("default").float()).norm() < 0.9 * lost.norm()


RUNS = {
    "pissa": ("tuning.mode=lora", "tuning.lora.init=pissa"),
    "pissa on nf4": ("tuning.mode=qlora", "tuning.lora.init=pissa"),
    "loftq": ("tuning.mode=qlora", "tuning.lora.init=loftq"),
}


@pytest.mark.parametrize(("kind", "bf16"), [("pissa", "true"), ("pissa", "false"), ("loftq", "true")])
def test_a_run_resumes_to_the_same_bits(trained, bf16, kind):  # noqa: F811
    words = ("tuning.lora.r=4", f"train.bf16={bf16}", "train.max_steps=4", "train.save_steps=2")
    assert_resumes(trained, *RUNS[kind], *words)


def test_half_of_pissa_stays_where_blocks_are_compiled(trained, monkeypatch):  # noqa: F811
    monkeypatch.setattr(replaced_code, "COMPILE_BACKEND", "eager")
    changed, real = [], PlannedLoop.train

    def compared(self, *args, **options):
        before = {name: one.detach().clone() for name, one in self.model.named_parameters() if "lora_A" in name}
        found = real(self, *args, **options)
        weights = dict(self.model.named_parameters())
        changed.extend((weights[name].detach() - one).abs().amax(dim=1) > 0 for name, one in before.items())
        assert self.compile_monitor is not None
        assert self.grouped_adapters is None
        return found

    monkeypatch.setattr(PlannedLoop, "train", compared)
    trained("half", *RUNS["pissa"], "tuning.lora.r=4", "train.compile=true", "train.max_steps=2")
    assert all(one[:4].any() and not one[4:].any() for one in changed)
    assert len(changed) == 14


@pytest.mark.parametrize("kind", RUNS)
def test_what_was_trained_is_a_plain_adapter_of_the_base(trained, command, tiny_llama, kind):  # noqa: F811
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from sft_play.finished.respond import load_trained_model
    from sft_play.finished.run import find_finished_run

    given = ("tuning.lora.r=4", "train.bf16=false", "model.dtype=float32")
    folder = trained("run", *RUNS[kind], *given)
    if "loftq" not in kind:  # which begins closer to the 16-bit base
        plain = trained("plain", RUNS[kind][0], *given)
        assert losses(folder)[0] == pytest.approx(losses(plain)[0], abs=2e-5)
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(3))
    model = load_trained_model(find_finished_run(folder.parent, folder.name))
    assert command("merge", "--run", str(folder))[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        if RUNS[kind][0] == "tuning.mode=lora":
            opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), folder / "adapter")
            torch.testing.assert_close(opened.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "strategy"), [
    ("pissa", "ddp"), *(pytest.param("pissa", name, marks=pytest.mark.slow) for name in ("fsdp", "zero2", "zero3")),
    *(pytest.param("loftq", name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "zero2")),
])  # fmt: skip
def test_ranks_lose_what_one_process_does(world, kind, strategy):  # noqa: F811
    words = (*RUNS[kind], "tuning.lora.r=4")
    succeed(world, "train", *words, f"output.name=one-{kind}-{strategy}")
    succeed(world, "train-distributed", *words, f"output.name=many-{kind}-{strategy}", STRATEGY=strategy, NPROC="2")
    one, many = (losses(world / "outputs" / f"{name}-{kind}-{strategy}") for name in ("one", "many"))
    assert (len(one), many) == (5, pytest.approx(one, rel=2e-5))
    saved = weights(world / "outputs" / f"many-{kind}-{strategy}")
    for name, a in saved.items():
        if "lora_A" in name and kind == "pissa":  # the frozen half is that of the start: A0 and B0 with equal lengths
            b = saved[name.replace("lora_A", "lora_B")]
            torch.testing.assert_close(a[4:].norm(dim=1), b[:, 4:].norm(dim=0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("words", "said"), [
    ("init=loftq tuning.mode=lora", "loftq starts at what NF4 lost, and tuning.mode is lora"),
    ("init=loftq use_dora=true", "loftq changes what DoRA's magnitudes were taken from"),
    ("init=loftq target_parameters=auto", "target_parameters adapts experts"),
    ("init=pissa use_rslora=true", "set tuning.lora.alpha instead"),
    ("init=pissa r=65", "has 32 singular directions, and tuning.lora.r is 65"),
])  # fmt: skip
def test_what_cannot_be_is_refused(command, run_yaml, words, said):  # noqa: F811
    settings = [word if "." in word.partition("=")[0] else f"tuning.lora.{word}" for word in words.split()]
    code, printed = command("train", "--config", str(run_yaml), *settings)
    assert code in (2, 3), printed
    assert said in printed.replace("\n", " ")


@pytest.mark.parametrize(("strategy", "words", "said"), [
    ("zero3", "tuning.mode=qlora tuning.lora.init=loftq", "whole 16-bit weights are read for it"),
    ("fsdp", "tuning.mode=lora tuning.lora.init=pissa tuning.lora.use_dora=true", "half of an adapter"),
    ("tp", "tuning.mode=lora tuning.lora.init=pissa", "whole 16-bit weights are read for it"),
])  # fmt: skip
def test_layouts_that_cannot_are_refused_by_name(command, refuse, run_yaml, monkeypatch, strategy, words, said):  # noqa: F811
    monkeypatch.setenv("STRATEGY", strategy)
    asked = ("plan", "--config", str(run_yaml), "--hardware", "2xH100")
    assert said in refuse(*asked, *words.split())
    assert command(*asked, words.split()[0])[0] == 0


def test_a_loftq_adapter_stays_on_nf4(train, trained, refuse):  # noqa: F811
    folder = trained("run", *RUNS["loftq"], "train.max_steps=1")
    assert "started at what NF4 lost" in refuse("merge", "--run", str(folder), "--base", "original")
    code, printed, _ = train("more", f"model.adapter={folder / 'adapter'}", "tuning.mode=lora")
    assert code == 2, printed
    assert "started at what NF4 lost of" in printed.replace("\n", " ") or "use qlora" in printed


def test_a_pissa_adapter_is_continued_with_its_whole_rank(trained):  # noqa: F811
    folder = trained("run", *RUNS["pissa"], "tuning.lora.r=4", "train.max_steps=1")
    more = trained("more", f"model.adapter={folder / 'adapter'}", "train.max_steps=1")
    before, after = weights(folder), weights(more)
    assert all(one.shape == before[name].shape for name, one in after.items())
    assert all(not torch.equal(one[4:], before[name][4:]) for name, one in after.items() if "lora_A" in name)
