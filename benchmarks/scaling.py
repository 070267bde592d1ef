"""How published runs scale with GPUs, and how the plan says that they would.

Each point is one model and method on few GPUs and on more, from one source. The plan's one-GPU speed is set to the
published one where that is known (through the share of the peak that matrix products reach), so that a ratio judges
communication and waiting alone. `make -C benchmarks benchmark-speed` prints them.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.published_speeds import named_hardware, shape, speed_config
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.planner.speed import find_rates, predict_speed


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
        few = f"{self.few} {self.few_layout}" if self.few_layout else str(self.few)
        machine = self.machine.replace("{n}x", "", 1)
        return f"{self.model} {self.mode} {self.layout} {self.micro}x{self.length} {machine} {few} -> {self.more}"


# Published points with their sources. Exxact states no batch: 2 rows of 2048 tokens a step are assumed.
# TITAN RTX at 16 GB/s: two cards on a desktop board that gives each 8 lanes, with NCCL_P2P_DISABLE=1; at 100 bridged.
_POINTS = json.loads(Path(__file__).with_name("scaling_points.json").read_text(encoding="utf-8"))
SCALING_POINTS = tuple(ScalingPoint(**point) for point in _POINTS)


def speed(point: ScalingPoint, gpus: int, *, layout: str, micro: int, share: float | None) -> float:
    """Predicted tokens per second and GPU; `share`: what matrix products reach of the peak, if not the plan's."""
    machine_text = point.machine.format(n=gpus if gpus <= 8 else f"{gpus // 8}x8")
    precision = Precision(point.precision, point.precision, "")
    ranks = SINGLE
    if gpus > 1:
        ranks = Layout("ddp", gpus) if layout == "ddp" else Layout("fsdp", gpus, gpus)
    layers = None if point.checkpointing else 0
    step = Step(micro, 1, point.length, layout=ranks, checkpointed_layers=layers, casts_inputs=True)
    rates = find_rates(named_hardware(machine_text), precision)
    rates = rates if share is None else replace(rates, matrix_share=share)
    config = speed_config(point.mode)
    return predict_speed(config, shape(point.model), precision, step, rates).tokens_per_s / gpus


def _fitted_share(point: ScalingPoint) -> float | None:
    """The share of the peak with which the prediction on few GPUs is the published speed; None where none is."""
    if not point.in_tokens:
        return None
    low, high = 0.01, 2.0
    if not _few_speed(point, low) < point.few_speed < _few_speed(point, high):
        return None
    for _ in range(20):  # halved to 2e-6 of the peak; speeds grow with the share
        middle = (low + high) / 2
        if _few_speed(point, middle) < point.few_speed:
            low = middle
        else:
            high = middle
    return low


def _few_speed(point: ScalingPoint, share: float | None) -> float:
    micro = point.few_micro or point.micro
    return speed(point, point.few, layout=point.few_layout or point.layout, micro=micro, share=share)


def compare_scaling(point: ScalingPoint) -> dict[str, Any]:
    """How many times faster `more` GPUs are than `few` are, predicted and published, and the quotient of both."""
    share = _fitted_share(point)
    more = speed(point, point.more, layout=point.layout, micro=point.micro, share=share)
    grown = point.more / point.few
    published = grown * point.more_speed / point.few_speed
    predicted = grown * more / _few_speed(point, share)
    row = {"source": point.source, "few": point.few, "more": point.more}
    row |= {"published": round(published, 3), "predicted": round(predicted, 3)}
    return row | {"ratio": predicted / published}
