"""flash-linear-attention's gated delta rule in a trace: against the package's own Python, and in a plan."""

import dataclasses
import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.trace.confirm import step_settings
from sft_play.trace.kernels import CHUNK, chunk_gated_delta_rule
from sft_play.trace.step import record_step
from sft_play.trace.storages import StorageLog
from tests.test_measured_blocks import BF16, WIDE, measured_shape, run, step_of, wide
from tests.test_trace import phase_peaks

WAYS = [("lora", 0), ("full", None)]
CASES = []
draw = random.Random(3)
for group, normalised, dtype in itertools.product((1, 2, 4), (True, False), (torch.bfloat16, torch.float32)):
    rows, tokens, heads = draw.choice([1, 3]), draw.randint(1, 700), draw.choice([1, 2, 4])
    key, value = draw.choice([64, 128]), draw.choice([64, 96])
    CASES.append((rows, tokens, heads, heads * group, key, value, normalised, dtype))


def bytes_of(rule, case) -> dict[str, int]:
    """Live bytes at most in a forward pass, after it, and in the backward pass."""
    rows, tokens, heads, value_heads, key, value, normalised, dtype = case
    log = StorageLog(workspace_sizes=lambda *_, **__: 0)
    with FakeTensorMode(allow_non_fake_inputs=True), log:
        mixed = torch.empty(rows, tokens, 2 * heads * key + value_heads * value, dtype=dtype, requires_grad=True)
        parts = (mixed * 1).split([heads * key, heads * key, value_heads * value], -1)
        q, k, v = (part.reshape(rows, tokens, -1, width) for part, width in zip(parts, (key, key, value), strict=True))
        g = torch.empty(rows, tokens, value_heads, requires_grad=True)
        beta = torch.empty(rows, tokens, value_heads, dtype=dtype, requires_grad=True)
        before = log.current
        log.start_phase("forward")
        out, _ = rule(q, k, v, g=g * 1, beta=beta * 1, use_qk_l2norm_in_kernel=normalised)
        assert (out.shape, out.dtype) == (v.shape, dtype)
        kept = log.current - before
        log.start_phase("backward")
        out.sum().backward()
        for one in (mixed, g, beta):
            assert (one.grad.shape, one.grad.dtype) == (one.shape, one.dtype)
    peaks = phase_peaks(log)
    return {"forward": peaks["forward 0"], "kept": kept, "backward": peaks["backward 0"]}


@pytest.mark.filterwarnings("ignore")
def test_it_allocates_what_the_package_does(monkeypatch):
    """The package's own Python, whose kernels are not launched: equal bytes (seen with fla-core 0.6.0)."""
    reason = f"{LINEAR_ATTENTION_PACKAGE} is not installed"
    pytest.importorskip("fla.ops.gated_delta_rule", reason=reason, exc_type=ImportError)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as theirs
    from triton.runtime import autotuner
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        monkeypatch.setattr(kind, "run", lambda *_, **__: None)
    for case in CASES:
        assert bytes_of(chunk_gated_delta_rule, case) == bytes_of(theirs, case), case


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_what_the_backward_pass_reads(case):
    """Normalised keys and queries with a number each, values, decay in fp32, beta, a matrix of 64 columns a chunk, and
    the output; keys that are not normalised are copies as well, since the model gives parts of one tensor."""
    rows, tokens, heads, value_heads, key, value, normalised, dtype = case
    size, places = dtype.itemsize, rows * tokens
    keys = 2 * heads * (key * size + 4 * normalised)
    values = value_heads * (2 * value * size + 4 + size + CHUNK * size)
    assert bytes_of(chunk_gated_delta_rule, case)["kept"] == places * (keys + values)


@pytest.mark.parametrize(
    ("kind", "mode", "layers"),
    [("qwen3_5_text", "lora", 0), *(pytest.param("qwen3_next", *way, marks=pytest.mark.slow) for way in WAYS)],
)
def test_a_plan_counts_the_kernels_where_they_are_installed(kind, mode, layers):
    """Blocks that are measured are those of the whole step, and need less than the class's own code."""
    fields = wide(kind)
    shape = measured_shape(fields)
    assert LINEAR_ATTENTION_PACKAGE in shape.kernel_packages
    step = step_of(shape, checkpointed_layers=layers, fla=True)
    found = estimate_memory(run(mode), shape, BF16, step).allocated
    peaks = phase_peaks(record_step(step_settings(run(mode), fields, shape, BF16, step)))
    assert found == pytest.approx(max(peaks.values()), rel=0.01)
    assert found < estimate_memory(run(mode), shape, BF16, dataclasses.replace(step, fla=False)).allocated


def test_only_a_gpu_with_the_package_runs_its_kernels():
    """The step that a plan chooses says so: every way of the three conditions."""
    shape = parse_model_shape({**WIDE, "model_type": "llama"}, name="m")
    for machine in ("1xA100", "cpu,ram=64GiB"):
        for without in (frozenset(), frozenset({LINEAR_ATTENTION_PACKAGE})):
            for packages in ((), (LINEAR_ATTENTION_PACKAGE,)):
                asked = dataclasses.replace(shape, kernel_packages=packages)
                request = PlanRequest(run(), asked, parse_hardware(machine), (), False, missing_packages=without)
                fla = make_plan(request).choice.step.fla
                assert fla == (machine == "1xA100" and not without and bool(packages))
