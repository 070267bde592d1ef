"""Which kernel sdpa runs: one table for plan, trace, self-test and run, against PyTorch's own dispatch, written a
second time from its C++ source; and where cuDNN's kernel is switched on."""

import contextlib
import dataclasses
import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from sft_play.config.load import config_from_text
from sft_play.machine import software
from sft_play.machine.hardware import parse_hardware
from sft_play.machine.software import CudaLibraries
from sft_play.models.config_json import load_model_shape, parse_model_shape
from sft_play.planner.candidates import PlanInputs
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.kernels import SdpaCall, prefers_cudnn, sdpa_kernel
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.plan import plan_from_json
from sft_play.planner.precision import Precision
from sft_play.trace import kernels
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.step import trace_step
from sft_play.trace.storages import StorageLog
from sft_play.training import run
from sft_play.training.loop.rows import CHAT_LENGTHS, Collator
from sft_play.training.loop.trainer import PlannedTrainer
from sft_play.training.model import attention_functions
from tests.conftest import chat, write_rows, write_run

pytestmark = pytest.mark.build

LLAMA = "meta-llama/Llama-3.1-8B"
WHEELS = {"cu130": CudaLibraries((13, 0), 92000), "cu126": CudaLibraries((12, 6), 91002)}
"""What the two builds of torch 2.13.0 bring (nvidia-cudnn-cu13 9.20.0.48, nvidia-cudnn-cu12 9.10.2.21)."""


@dataclasses.dataclass
class Machine:
    """A GPU and a build of torch. `choose` is `select_sdp_backend` for dense inputs without dropout."""

    sm: tuple[int, int]
    wheel: CudaLibraries = WHEELS["cu130"]
    cudnn_enabled: bool = True

    def choose(self, call: SdpaCall, *, heads: int = 8, kv_heads: int = 8) -> str:
        fits = {
            "cudnn": self.cudnn(call, heads, kv_heads), "flash": self.flash(call, heads, kv_heads),
            "efficient": self.efficient(call, heads == kv_heads), "math": True,
        }  # fmt: skip
        prefers = self.wheel.cudnn > 91500 and self.sm[0] in (9, 10)
        if self.wheel.cuda < (13, 0):
            prefers = prefers and (self.sm[1] == 0 or self.sm[1] == 3)
        order = ("cudnn", "flash", "efficient", "math") if prefers else ("flash", "efficient", "math", "cudnn")
        return next(name for name in order if fits[name])

    def cudnn(self, call: SdpaCall, heads: int, kv_heads: int) -> bool:
        if not self.cudnn_enabled or not (8, 0) <= self.sm <= (12, 1) or not call.half_precision or heads % kv_heads:
            return False
        limit = 128
        if self.wheel.cudnn >= 91000 and self.sm == (9, 0):
            limit = 256
        if self.wheel.cudnn >= 91100 and self.sm[0] == 10 and (call.head_dim, call.value_head_dim) == (192, 128):
            limit = 192
        return max(call.head_dim, call.value_head_dim) <= limit and call.head_dim % 8 == call.value_head_dim % 8 == 0

    def flash(self, call: SdpaCall, heads: int, kv_heads: int) -> bool:
        if call.masked or not call.half_precision or call.head_dim != call.value_head_dim:
            return False
        if call.head_dim > 256 or heads % kv_heads or not (8, 0) <= self.sm <= (12, 1):
            return False
        small = (8, 6) <= self.sm <= (8, 9) or (12, 0) <= self.sm <= (12, 1)
        return not (call.needs_gradient and small and 192 < call.head_dim <= 224)

    def efficient(self, call: SdpaCall, same_heads: bool) -> bool:
        if not (5, 0) <= self.sm <= (12, 1) or not same_heads:
            return False
        major = self.sm[0]
        alignment = 4 if major >= 8 else 1
        if major >= 8 or (major >= 7 and call.half_precision):
            alignment = max(alignment, 128 // (16 if call.half_precision else 32))
        return call.head_dim % alignment == call.value_head_dim % alignment == 0


CAPABILITIES = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (12, 0), (12, 1)]
WIDTHS = [4, 16, 20, 64, 72, 80, 96, 100, 128, 136, 160, 192, 193, 200, 224, 225, 240, 256, 257, 288, 512]
CUDNNS = [0, 90100, 91002, 91100, 91499, 91500, 91501, 91900, 92000, 92400]


def drawn(draw: random.Random) -> tuple[SdpaCall, tuple[int, int], CudaLibraries]:
    """A random call, GPU and build of torch."""
    width = draw.choice(WIDTHS)
    value = draw.choice([width, width, width, 128, 96])
    call = SdpaCall(width, value, *(draw.random() < 0.5 for _ in range(4)))
    wheel = CudaLibraries(draw.choice([(12, 6), (12, 8), (13, 0), (13, 2)]), draw.choice(CUDNNS))
    return call, draw.choice(CAPABILITIES), wheel


def test_the_table_is_pytorch_s_dispatch():
    """With the switch as a run sets it: on only where the table takes cuDNN's kernel."""
    draw, met = random.Random(16), set()
    for _ in range(10_000):
        call, capability, wheel = drawn(draw)
        takes = sdpa_kernel(call, capability, uses_cudnn=prefers_cudnn(capability, wheel)) == "cudnn"
        for on in {takes, False}:
            machine = Machine(capability, wheel, cudnn_enabled=on)
            found = sdpa_kernel(call, capability, uses_cudnn=on)
            assert found == machine.choose(call, kv_heads=2 if call.has_grouped_heads else 8), (call, machine)
            met.add(found)
        # what is left to cuDNN by PyTorch and not by the table: heads wider than 128, or of two widths
        wide = max(call.head_dim, call.value_head_dim) > 128 or call.head_dim != call.value_head_dim
        full = Machine(capability, wheel).choose(call, kv_heads=2 if call.has_grouped_heads else 8)
        assert takes == (full == "cudnn" and not wide), (call, capability, wheel)
    assert met == {"cudnn", "flash", "efficient", "math"}


@pytest.mark.parametrize(("built", "packages", "found"), [
    ("13.0", {"nvidia-cudnn-cu13": "9.20.0.48"}, ((13, 0), 92000)),
    ("12.6", {"nvidia-cudnn-cu12": "9.10.2.21"}, ((12, 6), 91002)),
    ("12.8", {}, ((12, 8), 0)),  # conda's, or a container's: not known, so not counted on
    (None, {}, ((13, 0), 92000)),  # a build for CPUs: the plan is for another machine
])  # fmt: skip
def test_the_libraries_are_those_of_the_installed_torch(monkeypatch, built, packages, found):
    monkeypatch.setattr(software, "torch_build_version", lambda _: built)
    monkeypatch.setattr(software, "installed_version", packages.get)
    assert software.cuda_libraries() == CudaLibraries(*found)


BLOCKS, MASKED_PACKS = ("task_mode=cpt",), ("data.packing=best_fit", "model.attn_implementation=sdpa")


@pytest.mark.parametrize(
    ("machine", "words", "model", "wheel", "takes"),
    [
        ("1xH100", BLOCKS, LLAMA, "cu130", True),
        ("1xB200", MASKED_PACKS, LLAMA, "cu130", True),
        ("1xH100", (), LLAMA, "cu130", False),
        ("1xH100", ("train.batch_by=rows", "model.attn_implementation=sdpa"), LLAMA, "cu130", False),
        ("1xH100", ("data.packing=best_fit",), LLAMA, "cu130", False),  # by boundaries: flash attention
        ("1xH100", BLOCKS, LLAMA, "cu126", False),
        ("1xH100", (*BLOCKS, "train.bf16=false"), LLAMA, "cu130", False),
        ("1xH100", (*BLOCKS, "model.attn_implementation=eager"), LLAMA, "cu130", False),
        ("1xH100", (*BLOCKS, "tuning.backend=unsloth", "tuning.mode=qlora"), LLAMA, "cu130", False),
        ("1xA100-80GB", BLOCKS, LLAMA, "cu130", False),
        ("1xMI300X", BLOCKS, LLAMA, "cu130", False),
        ("1xH100", BLOCKS, "google/gemma-2-9b", "cu130", False),
    ],
)  # fmt: skip
def test_cudnn_s_kernel_is_planned_where_all_batches_have_one_shape(machine, words, model, wheel, takes):
    config = config_from_text(f"model: {{name: {model}}}", name="x", overrides=["tuning.mode=lora", *words])
    hardware, shape = parse_hardware(machine), load_model_shape(model)
    plan = make_plan(PlanRequest(config, shape, hardware, libraries=WHEELS[wheel]))
    assert plan.choice.step.cudnn == any("cuDNN's kernel" in reason for reason in plan.reasons) == takes
    written = json.loads(json.dumps(plan.as_json()))
    assert written["step"].get("cudnn", False) == plan_from_json(written).choice.step.cudnn == takes


@pytest.mark.parametrize("seed", range(60))
def test_the_trace_calls_the_operator_of_the_table(seed):
    call, capability, wheel = drawn(random.Random(seed))
    ran = []

    class Names(StorageLog):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func.overloadpacket.__name__)
            return super().__torch_dispatch__(func, types, args, kwargs)

    dtype = torch.bfloat16 if call.half_precision else torch.float32
    on = prefers_cudnn(capability, wheel)
    attention = kernels.CudaAttention(capability, lambda: on)
    with FakeTensorMode(), Names():
        kv_heads = 2 if call.has_grouped_heads else 4
        sizes = ((4, call.head_dim), (kv_heads, call.head_dim), (kv_heads, call.value_head_dim))
        made = {"dtype": dtype, "requires_grad": call.needs_gradient}
        query, key, value = (torch.zeros(1, heads, 24, width, **made) for heads, width in sizes)
        mask = torch.zeros(1, 1, 24, 24, dtype=torch.bool) if call.masked else None
        kernel = sdpa_kernel(call, capability, uses_cudnn=on)
        with pytest.raises(TraceUnavailable) if kernel == "math" else contextlib.nullcontext():
            attention(query, key, value, mask, is_causal=mask is None, enable_gqa=call.has_grouped_heads)
    named = [name for name in ran if name.startswith("_scaled_dot_product")]
    assert named == ([] if kernel == "math" else [f"_scaled_dot_product_{kernel}_attention"])


def test_the_buffer_of_cudnn_s_backward_pass():
    # Two rows, 4 heads of queries and 2 of keys, 10 tokens, heads of 8: dO * O (4 bytes for each of 80 places) and dq
    # (8 times as much), and dk and dv of all heads in bf16 (2 x 2 bytes for each of 640 elements) where grouped.
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    for kv_heads, more in ((4, 0), (2, 2560)):
        query, key = (torch.zeros(2, heads, 10, 8, dtype=torch.bfloat16) for heads in (4, kv_heads))
        assert kernels.workspace_sizes(backward, (query, query, key, key), {}, None) == (320 + 2560 + more,)


MODEL = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_and_trace_count_cudnn_s_kernel_alike(dtype, masked, checkpointing):
    """Four layers of a grouped model, two rows of 1,024 tokens: 1% at most apart, with checkpointing 3%; fp32
    has no kernel of cuDNN."""
    half = dtype == "bfloat16"
    precision = Precision(compute=dtype, load=dtype, reason="")
    base = StepSettings(
        model=MODEL, mode="full", peft=None, micro_batch=2, seq_len=1024, weights=dtype, autocast=None,
        checkpointing=checkpointing, loss="logits", attention="sdpa", mask="packed" if masked else "ones",
        repeats_kv=not half, capability=(9, 0), clip=False, optimizer="adamw_foreach",
    )  # fmt: skip
    traced = {on: trace_step(dataclasses.replace(base, cudnn="training" if on else "never")) for on in (True, False)}
    config = config_from_text(
        "model: {name: m}\ntuning: {mode: full}\ntrain: {optim: adamw_torch}\ndata: {packing: best_fit}", name="x"
    )
    step = Step(2, 1, 1024, checkpointed_layers=None if checkpointing else 0, loss="logits", padded=masked, saves=False)
    shape = parse_model_shape(MODEL, name="m")
    planned = {}
    for on in (True, False):
        planned[on] = estimate_memory(config, shape, precision, dataclasses.replace(step, cudnn=on))
        assert planned[on].allocated == pytest.approx(traced[on].allocated, rel=0.03 if checkpointing else 0.01)
    for found in (traced, planned):
        assert half or found[True].allocated == found[False].allocated


@pytest.fixture
def switched():
    """The switch as it was before the test."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_before_a_plan_decides_it_is_off_and_the_switch_is_put_back_whatever_happens(monkeypatch, switched):
    attention_functions.enable_cudnn(enabled=True)
    monkeypatch.setattr(run, "explain_out_of_memory", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train_stage(SimpleNamespace(plan=None), None, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    for before in (True, False):
        attention_functions.enable_cudnn(enabled=before)
        with contextlib.suppress(KeyError), attention_functions.without_cudnn():
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            raise KeyError
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(("words", "evaluates_on"), [(BLOCKS, True), (MASKED_PACKS, False)])
def test_evaluation_and_generation_switch_it_off(
    succeed, monkeypatch, tmp_path, tiny_llama, switched, words, evaluates_on
):
    monkeypatch.setattr(PlanInputs, "uses_cudnn", lambda *_: True)
    seen: dict[str, set[bool]] = {}
    shapes = set()
    real = F.scaled_dot_product_attention

    def watched(query, *rest, **options):
        kind = "answers" if query.shape[2] != 32 else "training" if torch.is_grad_enabled() else "evaluation"
        seen.setdefault(kind, set()).add(torch.backends.cuda.cudnn_sdp_enabled())
        shapes.add(tuple(query.shape)) if kind == "training" else None
        return real(query, *rest, **options)

    def stepped(self, *rest, **options):
        monkeypatch.setattr(F, "scaled_dot_product_attention", watched)  # proofs before it run other shapes
        return step(self, *rest, **options)

    step = PlannedTrainer.training_step
    monkeypatch.setattr(PlannedTrainer, "training_step", stepped)
    rows = [{"text": "a b c d " * 40}] * 8 if evaluates_on else [chat(f"{number}", "yes") for number in range(40)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    train = {"effective_batch_size": 2, "batch_size": 2, "bf16": False, "gradient_checkpointing": False}
    sections = {"model": {"max_seq_len": 32}, "data": {"val_fraction": 0.25}, "train": {**train, "device": "cpu"}}
    path = write_run(tmp_path, tiny_llama, data, **sections, eval={"generate_rows": 2, "max_new_tokens": 2})
    succeed("train", "--config", str(path), *words)
    assert (seen["training"], len(shapes)) == ({True}, 1)
    assert seen.get("answers") == (None if evaluates_on else {False})
    assert seen.get("evaluation", {False}) == {evaluates_on}


def test_packs_are_padded_to_full_rows_where_that_gives_batches_one_shape():
    packs = [{"input_ids": [5] * 7, "labels": [5] * 7, CHAT_LENGTHS: [3, 4]}]
    batch = Collator(0, min_tokens=10)(packs)
    assert {name: batch[name].tolist() for name in ("input_ids", "labels", "position_ids")} == {
        "input_ids": [[5] * 7 + [0] * 3], "labels": [[5] * 7 + [-100] * 3],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0, 0, 0]],
    }  # fmt: skip
    assert int(batch["token_count"]) == 7
    rows = [{"input_ids": [5] * 4, "labels": [5] * 4}]  # of an evaluation
    assert Collator(0, min_tokens=10)(rows)["input_ids"].shape == (1, 4)
