"""Liger's kernels: taken only where a measurement shows that they compute what the class computes.

The package is not installed here; a stand-in with its interface replaces norms, MLPs and rotations by plain torch code
that follows its formulas, or by code that is wrong in one way.
"""

import contextlib
import gc
import itertools
import logging
import sys
import weakref
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from sft_play.config.load import config_from_text
from sft_play.errors import ConfigError
from sft_play.planner.layout import SINGLE, Layout
from sft_play.training.class_checks import replaced_code
from sft_play.training.class_checks.replaced_code import FP32_TOLERANCE, MAX_HALF_ERROR_RATIO, _kernel_cases
from sft_play.training.model import attention_functions

pytestmark = pytest.mark.build
CPU = torch.device("cpu")


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As Liger's "llama" mode: the mean in fp32, the product in x's dtype."""
    wide = x.float()
    return module.weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + module.variance_epsilon)).to(x)


def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """silu in fp32, then in x's dtype times up."""
    gate = module.gate_proj(x)
    return module.down_proj(torch.nn.functional.silu(gate.float()).to(gate) * module.up_proj(x))


class _Changed(torch.autograd.Function):
    """The values rounded to 1/8 in 16 bits, four bits short of bf16 at 1, or the gradient wrong by 1%."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounds: bool, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return (x * 8).round() / 8 if rounds and x.dtype != torch.float32 else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.scale, None, None


FORMULAS = {
    "right": norm, "wrong by 1%": lambda module, x: norm(module, x) * 1.01,
    "wrong gradient": lambda module, x: _Changed.apply(norm(module, x), False, 1.01),
    "worse in 16 bits": lambda module, x: _Changed.apply(norm(module, x), True, 1.0),
    "not a number": lambda module, x: norm(module, x) * float("nan"),
}  # fmt: skip


def stand_in(monkeypatch, formula: str) -> list[dict[str, bool]]:
    """Put the package in place; returns what it was asked to replace, each time."""
    asked: list[dict[str, bool]] = []

    def swap(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None):
        asked.append({"loss": cross_entropy or fused_linear_cross_entropy, "norm": rms_norm, "mlp": swiglu})
        module = sys.modules[type(model).__module__]
        module.apply_rotary_pos_emb = rotated
        module.LlamaMLP = "Liger's"
        for one in model.modules():
            if type(one).__name__ == "LlamaRMSNorm":
                one.forward = MethodType(FORMULAS[formula], one)  # as Liger does: a copy of the model keeps it
            elif type(one).__name__ == "LlamaMLP":
                one.forward = MethodType(mlp, one)

    from transformers.models.llama import modeling_llama

    plain = modeling_llama.apply_rotary_pos_emb

    def rotated(*args: Any, **options: Any) -> Any:
        return plain(*args, **options)

    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers.monkey_patch")
    inner.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": swap}  # type: ignore[attr-defined]
    package.__spec__ = SimpleNamespace(name="liger_kernel")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", inner)
    monkeypatch.setattr(replaced_code, "_kernels_of_run", contextlib.ExitStack())
    return asked


def llama(**sizes: int) -> LlamaConfig:
    given = {"hidden_size": 96, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaConfig(**{**given, **sizes}, num_key_value_heads=2, vocab_size=300)


def plan(device: str = "cuda", layout: Layout = SINGLE) -> Any:
    parts = {"hardware": SimpleNamespace(device=device), "choice": SimpleNamespace(layout=layout)}
    return SimpleNamespace(**parts, precision=SimpleNamespace(compute="bfloat16"), kernels=None)


def config(kernels: str) -> Any:
    return config_from_text(f"model: {{name: x}}\ntrain: {{kernels: {kernels}}}\n", name="run.yaml")


@pytest.mark.parametrize("formula", ["right", "wrong by 1%"])
def test_only_what_computes_the_same_is_taken(monkeypatch, caplog, formula):
    caplog.set_level(logging.DEBUG)
    asked = stand_in(monkeypatch, formula)
    model = AutoModelForCausalLM.from_config(llama())
    module = sys.modules[type(model).__module__]
    names, forwards = dict(vars(module)), [one.forward for one in model.modules()]
    taken = replaced_code.activate_kernels(model, config("auto"), plan(), device=CPU)
    assert all(one == {"loss": False, "norm": True, "mlp": True} for one in asked)
    if formula == "right":
        assert taken == replaced_code.ActiveKernels(("rms_norm", "swiglu", "rope"))
        assert len(asked) == 5  # two small models, each in fp32 and in 16 bits, and this one
        assert "Kernels: Liger's rms_norm, swiglu, rope (on small models of this class: " in caplog.text
        assert module.apply_rotary_pos_emb is not names["apply_rotary_pos_emb"]
        reference = weakref.ref(model)
        del model, forwards  # as a stage that has ended
        gc.collect()
        assert reference() is None
        replaced_code.activate_kernels(None, config("none"), plan(), device=CPU)  # of the next stage
    else:
        assert taken.replaced == ()
        assert taken.reason.startswith("they differ on a small model of this class")
        assert [one.forward for one in model.modules()] == forwards
        assert "Kernels: the plain ones; train.kernels=auto: they differ on a small model of this class" in caplog.text
    assert all(getattr(module, name) is value for name, value in names.items())


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_measurement_tells_rounding_from_another_formula(monkeypatch, formula):
    stand_in(monkeypatch, formula)
    state = torch.get_rng_state()
    proof = replaced_code.check_liger_kernels(llama(), attention="sdpa", device=CPU, dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert proof.is_rounding == (formula == "right")
    if formula in ("right", "worse in 16 bits"):
        assert proof.fp32_difference < 1e-5
    if formula == "right":
        assert 0.5 < proof.half_precision_ratio < 1.3
    elif formula == "worse in 16 bits":
        assert proof.half_precision_ratio > 2 * MAX_HALF_ERROR_RATIO
    elif formula.startswith("wrong"):
        assert proof.fp32_difference > 5 * FP32_TOLERANCE


def test_the_small_models_are_as_wide_as_the_real_rows(monkeypatch):
    stand_in(monkeypatch, "right")
    seen = []
    monkeypatch.setattr(replaced_code, "check_replaced_code", lambda small, *_, **__: seen.extend(small))
    replaced_code.check_liger_kernels(llama(), attention="sdpa", device=CPU, dtype=torch.float32)
    assert [(one.hidden_size, one.intermediate_size) for one in seen] == [(96, 64), (64, 320)]


@pytest.mark.parametrize(("given", "words"), [
    ({"device": "cpu"}, "need a CUDA GPU"),
    ({"layout": Layout("tp", 2, tensor_parallel=2)}, "tensor-parallel ranks replace the same forwards"),
])  # fmt: skip
def test_what_cannot_run_is_refused_if_it_is_asked_for_by_name(monkeypatch, caplog, given, words):
    caplog.set_level(logging.DEBUG)
    asked = stand_in(monkeypatch, "right")
    replaced_code.check_kernels(config("auto"), plan(**given))
    replaced_code.check_kernels(config("liger"), plan())
    with pytest.raises(ConfigError, match=rf"train.kernels: liger: .*{words}.*; use train.kernels=auto, or none"):
        replaced_code.check_kernels(config("liger"), plan(**given))
    model = AutoModelForCausalLM.from_config(llama(num_hidden_layers=1))
    taken = replaced_code.activate_kernels(model, config("auto"), plan(**given), device=CPU)
    assert not taken.replaced
    assert not asked
    assert all(words in said for said in (taken.reason, caplog.text))
    assert caplog.records[-1].levelno == (logging.DEBUG if "device" in given else logging.INFO)  # a GPU's is a line


def test_a_package_that_is_not_installed_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr(replaced_code, "LIGER_MODULE", "liger_kernel_that_is_not_there")
    with pytest.raises(
        ConfigError, match=r"liger-kernel is not installed here \(\S*pip install liger-kernel==0\.8\.5\)"
    ):
        replaced_code.check_kernels(config("liger"), plan())


def test_a_class_without_kernels_and_kernels_that_fail_leave_the_plain_ones_or_stop_the_run(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    stand_in(monkeypatch, "right")
    model = AutoModelForCausalLM.from_config(llama(num_hidden_layers=1))
    monkeypatch.setitem(FORMULAS, "right", lambda _, x: x[99])
    for kind, why in (("nothing", "it has no kernels for nothing"), ("llama", "not proven: IndexError")):
        model.config.model_type = kind
        assert not replaced_code.activate_kernels(model, config("auto"), plan(), device=CPU).replaced
        assert why in caplog.text
        with pytest.raises(ConfigError, match=f"train.kernels: liger: .*{why}.*use train.kernels=auto, or none"):
            replaced_code.activate_kernels(model, config("liger"), plan(), device=CPU)


# --- which kernel is trusted ------------------------------------------------------------------------------------------
def prepared(**changes: Any) -> tuple[Any, Any]:
    """A model's spec and a plan, as far as `verify_varlen_kernel` reads them."""
    usual = {"name": attention_functions.VARLEN_ATTENTION, "one_by_one": False, "compute": "bfloat16", "parts": 1}
    read = SimpleNamespace(**usual | changes)
    hf_config = MistralConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=4096)
    spec = SimpleNamespace(hf_config=hf_config, attention=SimpleNamespace(name=read.name))
    step, layout = SimpleNamespace(one_by_one=read.one_by_one), SimpleNamespace(tensor_parallel=read.parts)
    choice = SimpleNamespace(step=step, layout=layout)
    return spec, SimpleNamespace(choice=choice, precision=SimpleNamespace(compute=read.compute))


def right(query: Any, key: Any, value: Any, ends: Any, longest: int, *, scale: float, window: int | None) -> Any:
    assert longest == max(ends.diff().tolist())
    return attention_functions.attention_per_chat(query, key, value, ends.diff().tolist(), scale=scale, window=window)


def wrong(**changes: Any) -> Any:
    def kernel(query: Any, key: Any, value: Any, ends: Any, longest: int, *, scale: float, window: int | None) -> Any:
        lengths = ends.diff().tolist()
        if "joins" in changes:
            lengths = [lengths[0] + lengths[1], *lengths[2:]]
        if "window" in changes and window is not None:
            window += changes["window"]
        found = attention_functions.attention_per_chat(query, key, value, lengths, scale=scale, window=window)
        if "nan" in changes:
            found = torch.where(torch.arange(len(found))[:, None, None] == changes["nan"], torch.nan, found)
        if "gradient" in changes:
            found.register_hook(lambda grad: grad * changes["gradient"])
        return found

    return kernel


def refused(*_: Any, **__: Any) -> Any:
    raise RuntimeError("FlashAttention only supports\nAmpere GPUs or newer")


@pytest.fixture(autouse=True)
def _reset():
    yield
    attention_functions.enable_flash(enabled=False)


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_kernel_that_is_right_is_used(monkeypatch, caplog, compute):
    asked = []

    def watched(*given: Any, **options: Any) -> Any:
        asked.append((given[0].dtype, given[0].shape[1:], given[1].shape[1:], options["window"]))
        return right(*given, **options)

    monkeypatch.setattr(attention_functions, "flash_attention", watched)
    caplog.set_level(logging.DEBUG)
    state = torch.get_rng_state()
    replaced_code.verify_varlen_kernel(*prepared(compute=compute), device=CPU)
    assert attention_functions._uses_flash
    assert not attention_functions.needs_chat_lengths(attention_functions.VARLEN_ATTENTION)
    assert torch.equal(torch.get_rng_state(), state)
    assert asked == [(getattr(torch, compute), (4, 32), (2, 32), window) for window in (None, 48)]
    assert "PyTorch's varlen kernel is within" in caplog.text
    # ranks that share a layer's heads have a part of them; and nothing is tried where the plan does not count on it
    asked.clear()
    replaced_code.verify_varlen_kernel(*prepared(parts=2), device=CPU)
    assert {shape for _, *shapes, _ in asked for shape in shapes} == {(2, 32), (1, 32)}
    asked.clear()
    for changes in ({"name": "sdpa"}, {"one_by_one": True}):
        attention_functions.enable_flash(enabled=True)
        replaced_code.verify_varlen_kernel(*prepared(**changes), device=CPU)
        assert not attention_functions._uses_flash
        assert attention_functions.needs_chat_lengths(attention_functions.VARLEN_ATTENTION)
        assert not attention_functions.needs_chat_lengths("sdpa")
    assert not asked


@pytest.mark.parametrize(
    ("kernel", "says"),
    [(wrong(joins=True), "is wrong on cpu"), (wrong(window=1), "window 48: 0."), (wrong(nan=100), "window None: nan"),
     (wrong(gradient=1.05), "window None"), (refused, "not proven: RuntimeError: FlashAttention only supports")],
    ids=["joins", "wide", "nan", "gradient", "raises"],
)  # fmt: skip
def test_a_kernel_that_is_wrong_or_raises_is_left_with_one_warning(monkeypatch, caplog, kernel, says):
    monkeypatch.setattr(attention_functions, "flash_attention", kernel)
    replaced_code.verify_varlen_kernel(*prepared(), device=CPU)
    assert not attention_functions._uses_flash
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("Attention: falls back to one call of sdpa for each chat")
    assert says in line


def test_a_trusted_kernel_runs_on_the_gpu_and_nowhere_else(monkeypatch):
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(attention_functions, "flash_attention", lambda *_, **__: "one call")
    monkeypatch.setattr(attention_functions, "attention_per_chat", lambda *_, **__: "each chat")
    for device, used in itertools.product(("cuda", "cpu"), (True, False)):
        attention_functions.enable_flash(enabled=used)
        with FakeTensorMode():
            heads = torch.empty(7, 2, 8, device=device)
            ends = {"lengths": (3, 4), "scale": 1.0, "window": None}
            found = attention_functions.packed_attention(heads, heads, heads, heads, 7, **ends)
        assert found == ("one call" if used and device == "cuda" else "each chat")


def test_the_heads_that_are_tried_are_the_models():
    assert _kernel_cases(GPT2Config(n_head=12, n_embd=768), 1) == [((12, 12, 64), None)]
    grouped = LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    assert _kernel_cases(grouped, 4) == [((2, 1, 8), None)]  # a quarter of 2 key heads is one
    short = MistralConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=9)
    assert _kernel_cases(short, 1) == list(itertools.product([(4, 2, 32)], [None, 9]))
    for none in (0, -1):  # as configs of some models say that there is none
        short.sliding_window = none
        assert _kernel_cases(short, 1) == [((4, 2, 32), None)]
    wide = LlamaConfig(head_dim=32, num_attention_heads=8, num_key_value_heads=4)
    wide.global_head_dim, wide.num_global_key_value_heads = 64, 1  # Gemma 4's names
    heads = [of for of, _ in _kernel_cases(wide, 1)]
    assert heads == [(8, 1, 32), (8, 1, 64), (8, 4, 32), (8, 4, 64)]
