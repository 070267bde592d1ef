"""How far a predicted speed may be off, by the kind of run, from published speeds that the constants were not fitted
to.

Four of five of those lie within the share of the prediction that a class names. `benchmarks/published_speeds.py` has
the runs, and `benchmarks/speed.json` how many of each class there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from sft_play.facts.hardware import Hardware
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision

DATA_CENTRE = {(8, 0), (9, 0)}
"""Compute capabilities of A100 and H100 with their kin, on which most published runs were made."""
OTHER_CARDS = {(8, 6), (8, 9), (12, 0)}
"""Those of workstation and gaming cards."""
SMALL_PARAMS = 5e9
LONG_ROW = 8192


@dataclass(frozen=True)
class SpeedError:
    """The share of a predicted speed within which four of five comparable published runs lie; None where none of its
    kind was compared."""

    share: float | None
    of: str

    @property
    def words(self) -> str:
        """`±15%, bf16 on data-centre cards`."""
        return self.of if self.share is None else f"±{self.share:.0%}, {self.of}"

    def is_within(self, ratio: float) -> bool:
        """Whether two speeds of this quotient cannot be told apart by the prediction."""
        return self.share is not None and abs(ratio - 1) <= self.share


PLAIN = SpeedError(0.15, "bf16 on data-centre cards")
LONG = SpeedError(0.40, "rows above 8,192 tokens")
WORKSTATION = SpeedError(0.25, "bf16 on workstation and gaming cards")
SMALL = SpeedError(0.60, "models below 5B, or cards without bf16")
CLASSES = (PLAIN, LONG, WORKSTATION, SMALL)
"""Largest shares and smallest are those of `benchmarks/speed.json`, rounded up to 5%."""


def speed_error(shape: ModelShape, precision: Precision, hardware: Hardware, step: Step) -> SpeedError:
    """The class of a run's predicted speed."""
    kinds = {gpu.capability for gpu in hardware.gpus}
    without = {
        "on a CPU": not hardware.gpus,
        "on AMD cards": any(gpu.is_amd for gpu in hardware.gpus),
        "that offloads": step.layout.offloads_states or step.offloads,
        "of mixtures of experts": any(kind.num_experts for kind in shape.layers),
        # V100 and T4 have no bf16, and fall into SMALL below
        "on these cards": not kinds <= DATA_CENTRE | OTHER_CARDS | {(7, 0), (7, 5)},
    }
    if (kind := next((words for words, applies in without.items() if applies), None)) is not None:
        return SpeedError(None, f"no published run {kind} was compared")
    if shape.params < SMALL_PARAMS or precision.compute != "bfloat16":
        return SMALL
    if not kinds <= DATA_CENTRE:
        return WORKSTATION
    return LONG if step.seq_len > LONG_ROW else PLAIN
