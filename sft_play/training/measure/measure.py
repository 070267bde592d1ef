"""What is measured during a run: memory, signs of life, and the figures before its first step."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import psutil
from transformers import TrainerCallback

from sft_play.planner.plan import Plan
from sft_play.process.heap import give_back_free_memory
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.measure.evaluate import EvalSet, Figures, evaluate_before
from sft_play.training.measure.peaks import Highest, LoadMemory, LoadMeter, Peaks
from sft_play.training.ranks.engine_check import EngineCheck, check_engine, engine_check_of_one
from sft_play.training.ranks.heartbeat import Heartbeat

logger = logging.getLogger(__name__)


class MemoryMeter:
    """Predicted and measured peaks of a run: torch's counters on a GPU, resident memory on a CPU."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        on_gpu = plan.hardware.device == "cuda"
        if not on_gpu:
            # What an earlier run in this process freed and the C library kept is resident already. This run would take
            # from it without the process growing, and its measured peak would be 0.
            gc.collect()
            give_back_free_memory()
        self.level = psutil.Process().memory_info().rss
        """Resident bytes before anything of the run was loaded."""
        self.peaks = Peaks(on_gpu=on_gpu, level_bytes=self.level)

    def peak(self) -> dict[str, int | None]:
        """`peak_bytes` of the summary: of the training steps only."""
        return {
            "predicted_allocated": self._plan.memory.allocated,
            "measured_allocated": None,
            "predicted_reserved": self._plan.memory.reserved,
            "measured_reserved": None,
            **self._measured(self.peaks.highest("training")),
        }

    def by_moment(self) -> dict[str, dict[str, int | None]]:
        """`peak_bytes_by_moment` of the summary: predicted bytes of tensors and measured bytes of each moment."""
        moments = self._plan.memory.moments
        steps = [size for name, size in moments.items() if name not in ("evaluation", "saving")]
        predicted = {**moments, "training": max(steps, default=None)}
        return {
            moment: {"predicted_allocated": predicted.get(moment), **self._measured(highest)}
            for moment, highest in self.peaks.by_moment().items()
        }

    def _measured(self, highest: Highest | None) -> dict[str, int | None]:
        if not self.peaks.on_gpu:
            return {"measured_rss": highest.allocated if highest else None, "level_rss": self.level}
        if highest is None:
            return {}
        return {"measured_allocated": highest.allocated, "measured_reserved": highest.reserved}


@dataclass(frozen=True)
class Watch:
    """What is tracked during a run: memory peaks, signs of life, and its start (seconds since 1970)."""

    memory: MemoryMeter
    beat: Heartbeat
    started: float


class BeforeTraining(TrainerCallback):
    """Measures before the first step: what the engine holds, what loading took, the figures of the held-out rows.

    An engine wraps the model when training begins, so with one this is a callback. Without one, `measure` is called
    before training.
    """

    def __init__(
        self, job: RunJob, trainer: PlannedLoop, eval_set: EvalSet, loading: LoadMeter, *, is_resumed: bool
    ) -> None:
        self._job, self._trainer, self._eval_set, self._loading = job, trainer, eval_set, loading
        self._is_resumed = is_resumed
        self._engine_check: EngineCheck | None = None
        self.figures: Figures | None = None
        self.loading: LoadMemory | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check the engine, then measure; raises TrainingError if it is not what the plan says."""
        self._engine_check = check_engine(self._trainer, self._job.plan)
        logger.info("%s", self._engine_check.line)
        self.measure()

    def measure(self) -> None:
        """Measure what loading took, and the figures of the held-out rows."""
        self.loading = self._loading.stop()
        self.figures = evaluate_before(self._job, self._trainer, self._eval_set, resumed=self._is_resumed)

    @property
    def engine_check(self) -> EngineCheck:
        """What each rank holds; without an engine, what the one process holds now."""
        return self._engine_check or engine_check_of_one(self._trainer)
