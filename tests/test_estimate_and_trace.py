"""The estimate and a trace of the whole step count the same bytes, whatever trains and whichever optimizer steps it."""

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.registry import wide_config
from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.models.families import MODEL_FAMILIES
from sft_play.planner.layout import Layout
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.model_states import resident_bytes
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import element_bytes
from sft_play.planner.precision import Precision
from sft_play.trace.confirm import load_planned_shape, step_settings
from sft_play.trace.step import record_step

pytestmark = pytest.mark.build

OPTIMIZERS = (
    *("adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adamw_8bit"),
    *("lion_32bit", "lion_8bit", "adafactor", "muon"),
)
PRECISIONS = (Precision("bfloat16", "bfloat16", ""), Precision("float32", "float32", ""))
TOLERANCE = 0.015
"""The model is small: a table of it, counted once too often or too seldom, is 5% of the peak."""

QUICK = (2, 4, 7, 12, 22, 46, 57, 58)
"""One of each optimizer and mode, tied tables that add up gradients among them."""


def fields(kind: str, *, tied: bool) -> dict[str, object]:
    """A config.json whose embedding outweighs its blocks, as in small models of large vocabularies."""
    return {
        "model_type": kind, "architectures": [""], "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 60_000,
        "max_position_embeddings": 512, "tie_word_embeddings": tied,
    }  # fmt: skip


def tuning(draw: random.Random) -> str:
    """Everything, or adapters of some rank with copies of embedding and head or without."""
    mode = draw.choice(("full", "full", "lora", "qlora"))
    if mode == "full":
        return "{mode: full}"
    copies = draw.choice(("", "embed_tokens", "lm_head", "embed_tokens, lm_head"))
    return f"{{mode: {mode}, lora: {{r: {draw.choice((4, 64, 256))}, modules_to_save: [{copies}]}}}}"


def run_of(words: str, more: str = "") -> RunConfig:
    """A run with these settings of its tuning."""
    return config_from_text(f"model: {{name: m}}\ntuning: {words}\n{more}", name="x")


def apart(model: dict[str, object], words: str, optim: str, precision: Precision, step: Step) -> float:
    """The estimate's peak over the trace's, less one."""
    config = run_of(words, f"train: {{optim: {optim}}}\n")
    shape = load_planned_shape(model, name="m")
    predicted = estimate_memory(config, shape, precision, step).allocated
    return predicted / record_step(step_settings(config, model, shape, precision, step)).peak - 1


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in range(60)])
def test_the_peak_is_the_traces(seed: int) -> None:
    draw = random.Random(seed)
    model = fields(draw.choice(("llama", "qwen3", "gemma3_text")), tied=draw.random() < 0.5)
    words, optim = tuning(draw), OPTIMIZERS[seed % len(OPTIMIZERS)]
    if "full" not in words and optim == "muon":
        words = "{mode: full}"  # only whole matrices are its
    precision = PRECISIONS["qlora" not in words and draw.random() < 0.4]
    rows, passes, checkpointed = draw.choice((1, 3)), draw.choice((1, 2)), draw.choice((0, None))
    step = Step(rows, passes, draw.choice((64, 512)), masks=False, saves=False, checkpointed_layers=checkpointed)
    found = apart(model, words, optim, precision, step)
    assert abs(found) < TOLERANCE, (model["model_type"], words, optim, precision, step)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_an_embedding_that_trains_beside_4_bit_layers_hands_its_dtype_on(kind: str) -> None:
    """bitsandbytes' layers give back the dtype of their input: behind a copy in fp32 every activation is fp32."""
    words = "{mode: qlora, lora: {r: 4, modules_to_save: [embed_tokens]}}"
    step = Step(2, 1, 1024, masks=False, saves=False, checkpointed_layers=0)
    assert abs(apart(fields(kind, tied=True), words, "lion_8bit", PRECISIONS[0], step)) < TOLERANCE


MIXTURES, MODES = ("qwen3_moe", "gpt_oss", "mixtral"), ("lora", "qlora")
KERNELS = (("float32", (9, 0)), ("float16", (7, 5)), ("bfloat16", (8, 0)))


@pytest.mark.parametrize(
    ("kind", "mode", "kernel"),
    [
        pytest.param(kind, mode, KERNELS[other], marks=[] if (place + turn) % 3 == other else [pytest.mark.slow])
        for place, kind in enumerate(MIXTURES)
        for turn, mode in enumerate(MODES)
        for other in range(3)
    ],
    ids=str,
)
def test_grouped_experts_take_what_their_kernel_takes(kind: str, mode: str, kernel: Any) -> None:
    """GPUs before Ampere run transformers' own loop, which makes the gradients of frozen experts too."""
    dtype, capability = kernel
    model = fields(kind, tied=True) | {
        "vocab_size": 512, "num_local_experts": 32, "num_experts": 32, "num_experts_per_tok": 4,
        "intermediate_size": 512, "moe_intermediate_size": 512,
    }  # fmt: skip
    at = "eager" if kind == "gpt_oss" else "sdpa"
    for checkpointed in (0, None):
        options = {"attention": at, "masks": False, "saves": False, "capability": capability}
        step = Step(2, 1, 256, checkpointed_layers=checkpointed, **options)
        tuning = f"{{mode: {mode}, lora: {{r: 8}}}}"
        found = apart(model, tuning, "adamw_torch_fused", Precision(dtype, dtype, ""), step)
        assert abs(found) < TOLERANCE, checkpointed


FEW = ("llama", "gpt_oss", "opt", "trocr")
FURTHER = ("opt", "llama4_text", "nemotron", "seed_oss", "cohere2", "qwen3_5_text", "gpt_neox", "trocr")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one in FEW else pytest.mark.slow) for one in (*sorted(MODEL_FAMILIES), *FURTHER)],
)
def test_blocks_of_a_real_width_take_what_the_trace_takes(kind: str) -> None:
    """By formulas for a class of the table, measured for another."""
    model = wide_config(kind) | {"vocab_size": 4096}
    shape = load_planned_shape(model, name="m")
    assert (shape.block_meter is None) == (kind in MODEL_FAMILIES)
    for words, checkpointed in (("{mode: lora, lora: {r: 8}}", 0), ("{mode: full}", None)):
        at = "sdpa" if shape.has_sdpa else "eager"
        step = Step(8, 1, 512, attention=at, masks=False, saves=False, checkpointed_layers=checkpointed)
        found = apart(model, words, "adamw_torch_fused", PRECISIONS[0], step)
        assert -0.01 < found < 0.02, (words, found)


def test_what_a_class_gives_no_gradient_counts_as_weights_alone() -> None:
    """TrOCR's attention to an image runs in no pass of text."""
    model = wide_config("trocr") | {"vocab_size": 512}
    shape = load_planned_shape(model, name="m")
    assert 0.1 * shape.params < shape.untrained_params < 0.5 * shape.params
    for optim, accumulated, precision in zip(("adamw_torch_fused", "adamw_torch"), (1, 2), PRECISIONS, strict=True):
        step = Step(2, accumulated, 256, attention="eager", masks=False, saves=False, checkpointed_layers=None)
        assert abs(apart(model, "{mode: full}", optim, precision, step)) < TOLERANCE


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "zero2", "zero3", "zero3_offload"])
def test_a_rank_holds_its_part_of_it(name: str) -> None:
    config = run_of("{mode: full}")
    layout = Layout(name) if name == "single" else Layout(name, 4, 1 if name == "ddp" else 4)
    shape = load_planned_shape(fields("llama", tied=False), name="m")
    part = replace(shape, untrained_params=40_000_000)
    widths = element_bytes(config, PRECISIONS[0], layout)
    whole, found = resident_bytes(config, shape, widths, layout), resident_bytes(config, part, widths, layout)
    learns = 1 - 40_000_000 / shape.params
    for of in ("gradients", "optimizer", "master_weights", "gradient_buckets"):
        assert getattr(found, of) == pytest.approx(learns * getattr(whole, of), rel=0.01), of
    if name == "zero3_offload":
        assert learns * whole.host < found.host < whole.host
    else:
        narrower = 2 * 40_000_000 / 4 if name == "fsdp" else 0  # what trains is held in fp32 there
        assert 0 <= whole.weights - found.weights <= narrower + 0.001 * whole.weights
