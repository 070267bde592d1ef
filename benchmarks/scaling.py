"""How published runs scale with GPUs, and how the plan says that they would.

Each point is one model and method on few GPUs and on more, from one source. The plan's one-GPU speed is set to the
published one where that is known (through the share of the peak that matrix products reach), so that a ratio judges
communication and waiting alone. `make -C benchmarks benchmark-speed` prints them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_config_json
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed import find_rates, predict_speed
from sft_play.trace.confirm import load_planned_shape

FMS = (
    "https://github.com/foundation-model-stack/fms-acceleration/blob/876e2ed6fc4e/scripts/benchmarks/refs/"
    "a100_80gb_liger.csv"
)
TITAN = "https://github.com/huggingface/transformers/issues/9371 (2021-01-27; batch 4 a GPU, fp32)"
EXXACT = "https://www.exxactcorp.com/blog/benchmark/lora-fine-tuning-benchmark-on-nvidia-gpus (2026-06-04)"
"""It states no batch that was found: 2 rows of 2048 tokens a step are assumed."""
FSDP_QLORA = "https://github.com/AnswerDotAI/fsdp_qlora/blob/main/benchmarks_03_2024.md"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0/benchmarks"


@dataclass(frozen=True)
class ScalingPoint:
    """Published speeds of `few` and `more` GPUs (of the machine's form `{n}xNAME`), tokens per second and GPU.

    A speed that is given as seconds of the same work counts as its inverse: only quotients are used. `few_micro` is
    the micro-batch on few GPUs where it differs.
    """

    machine: str
    model: str
    mode: Literal["full", "lora", "qlora"]
    layout: Literal["ddp", "fsdp"]
    few: int
    more: int
    few_speed: float
    more_speed: float
    micro: int
    length: int
    source: str
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    checkpointing: bool = True
    few_layout: Literal["ddp", "fsdp"] | None = None
    few_micro: int | None = None
    in_tokens: bool = True

    @property
    def name(self) -> str:
        """What it is, in one line."""
        few = f"{self.few} {self.few_layout}" if self.few_layout else str(self.few)
        machine = self.machine.replace("{n}x", "", 1)
        return f"{self.model} {self.mode} {self.layout} {self.micro}x{self.length} {machine} {few} -> {self.more}"


MISTRAL, LLAMA, GPT2 = "mistralai/Mistral-7B-v0.1", "meta-llama/Meta-Llama-3-8B", "gpt2"
A100 = "{n}xA100-80GB"
NVLINK, HOST = "{n}xTITAN RTX,link=100GB/s", "{n}xTITAN RTX,link=16GB/s"
"""Two bridged cards; the same with NCCL_P2P_DISABLE=1, on a desktop board that gives each of two cards 8 lanes."""
SCALING_POINTS = (
    ScalingPoint("{n}xRTX PRO 4500", "meta-llama/Llama-3.1-8B", "lora", "ddp", 1, 4, 2777, 2679, 2, 2048, EXXACT),
    ScalingPoint("{n}xRTX PRO 6000", "meta-llama/Llama-3.1-8B", "lora", "ddp", 1, 2, 4962, 9541 / 2, 2, 2048, EXXACT),
    ScalingPoint(A100, MISTRAL, "full", "fsdp", 1, 2, 3420, 3252, 4, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "full", "fsdp", 1, 4, 3420, 3325, 4, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "full", "fsdp", 1, 4, 3567, 3522, 16, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "lora", "fsdp", 1, 2, 3900, 3670, 4, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "lora", "fsdp", 1, 4, 3900, 3674, 4, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "lora", "fsdp", 1, 4, 3943, 3777, 8, 4096, FMS),
    ScalingPoint(A100, MISTRAL, "qlora", "fsdp", 1, 4, 4063, 3957, 4, 4096, FMS),
    ScalingPoint(A100, LLAMA, "full", "fsdp", 1, 4, 3294, 3202, 4, 4096, FMS),
    ScalingPoint(A100, LLAMA, "lora", "fsdp", 1, 4, 3844, 3606, 4, 4096, FMS),
    ScalingPoint(A100, LLAMA, "lora", "fsdp", 1, 4, 3892, 3766, 16, 4096, FMS),
    ScalingPoint(A100, LLAMA, "qlora", "fsdp", 1, 4, 4092, 4019, 8, 4096, FMS),
    *(
        ScalingPoint(machine, GPT2 + size, "full", "ddp", 1, 2, 1600 * length / one, 800 * length / two, 4, length,
        TITAN,
              precision="float32", checkpointing=False)
        for size, length, one, linked, not_linked in (
            ("", 128, 19.5621, 13.5368, 30.0181), ("", 256, 30.423, 18.6943, 35.4208),
            ("", 512, 58.0856, 32.3616, 49.1999), ("-medium", 128, 49.3823, 33.4365, 74.9924),
            ("-medium", 256, 79.6724, 47.7543, 89.3616), ("-medium", 512, 152.6255, 82.1935, 124.1163),
            ("-large", 128, 98.5939, 65.7918, 152.2178),
        )
        for machine, two in ((NVLINK, linked), (HOST, not_linked))
    ),
    ScalingPoint("{n}xRTX 4090", "meta-llama/Llama-2-7b-hf", "lora", "fsdp", 2, 2, 1 / 437, 1 / 481, 6, 2048,
    FSDP_QLORA,
          few_layout="ddp", few_micro=4, in_tokens=False),
    ScalingPoint("{n}xRTX 4090", "meta-llama/Llama-2-7b-hf", "qlora", "fsdp", 2, 2, 1 / 450, 1 / 466, 10, 2048,
    FSDP_QLORA,
          few_layout="ddp", few_micro=8, in_tokens=False),
    ScalingPoint("{n}xRTX A5000", "meta-llama/Llama-2-70b-hf", "qlora", "fsdp", 4, 8, 1 / 4829 / 4, 1 / 2613 / 8, 1,
    2048,
          FSDP_QLORA, in_tokens=False),
    ScalingPoint("{n}xA100-40GB", "meta-llama/Llama-2-70b-hf", "qlora", "fsdp", 4, 8, 1 / 1266 / 4, 1 / 672 / 8, 4,
    2048,
          FSDP_QLORA, in_tokens=False),
    ScalingPoint("{n}xH100,network=3200Gbps", "meta-llama/Llama-3.1-8B", "full", "fsdp", 8, 128, 5762, 5605, 2, 8192,
          f"{TORCHTITAN}/llama3_h100_202412_torchtitan.md", checkpointing=False),
    ScalingPoint("{n}xH200,network=3200Gbps", "meta-llama/Llama-3.1-8B", "full", "fsdp", 32, 64, 10938, 10753, 2, 8192,
          f"{TORCHTITAN}/llama3-8b_h200_202506_trainy-whitefiber.md (float8)", checkpointing=False),
)  # fmt: skip


def speed(point: ScalingPoint, gpus: int, *, layout: str, micro: int, share: float | None = None) -> float:
    """Predicted tokens per second and GPU; `share`: what matrix products reach of the peak, if not the plan's."""
    machine_text = point.machine.format(n=gpus if gpus <= 8 else f"{gpus // 8}x8")
    hardware, config = _named_hardware(machine_text), _config(point.mode)
    shape = load_planned_shape(load_config_json(point.model), name=point.model)
    precision = Precision(point.precision, point.precision, "")
    step = Step(
        micro_batch=micro,
        grad_accum=1,
        seq_len=point.length,
        layout=SINGLE if gpus == 1 else Layout("ddp", gpus) if layout == "ddp" else Layout("fsdp", gpus, gpus),
        checkpointed_layers=None if point.checkpointing else 0,
        casts_inputs=True,
    )
    rates = find_rates(hardware, precision)
    rates = rates if share is None else replace(rates, matrix_share=share)
    return predict_speed(config, shape, precision, step, rates).tokens_per_s / gpus


_named_hardware = functools.cache(parse_hardware)


@functools.cache
def _config(mode: str) -> RunConfig:
    return config_from_text(f"model: {{name: x}}\ntuning: {{mode: {mode}}}", name="point")


def _fitted_share(point: ScalingPoint) -> float | None:
    """The share of the peak with which the prediction on few GPUs is the published speed; None where none is."""
    if not point.in_tokens:
        return None
    low, high = 0.01, 2.0

    def at(share: float) -> float:
        micro = point.few_micro or point.micro
        return speed(point, point.few, layout=point.few_layout or point.layout, micro=micro, share=share)

    if not at(low) < point.few_speed < at(high):
        return None
    for _ in range(20):  # halved to 2e-6 of the peak; speeds grow with the share
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) < point.few_speed else (low, middle)
    return low


def compare_scaling(point: ScalingPoint) -> dict[str, Any]:
    """How many times faster `more` GPUs are than `few` are, predicted and published, and the quotient of both."""
    share = _fitted_share(point)
    few_layout, few_micro = point.few_layout or point.layout, point.few_micro or point.micro
    few = speed(point, point.few, layout=few_layout, micro=few_micro, share=share)
    more = speed(point, point.more, layout=point.layout, micro=point.micro, share=share)
    grown = point.more / point.few
    published = grown * point.more_speed / point.few_speed
    predicted = grown * more / few
    return {
        "source": point.source,
        "few": point.few,
        "more": point.more,
        "published": round(published, 3),
        "predicted": round(predicted, 3),
        "ratio": predicted / published,
    }


def compare_scaling_points() -> dict[str, dict[str, Any]]:
    """Every point by its name."""
    return {point.name: compare_scaling(point) for point in SCALING_POINTS}
