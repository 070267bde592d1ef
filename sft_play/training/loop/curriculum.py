"""A run with stages: all are prepared first, then each is trained on the weights of the one before.

A stage is a run of its own in its own folder (`stages/NAME`), with a new optimizer, schedule and engine; it hands its
weights on by disk, so every layout and `resume` go the same way.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sft_play.config.schema import RunConfig
from sft_play.errors import Interrupted
from sft_play.runs.files import read_summary
from sft_play.runs.folder import DEEPSPEED_FILE
from sft_play.training.checkpoints import checkpoints
from sft_play.training.checkpoints.last_checkpoint import find_last_checkpoint
from sft_play.training.job import RunJob, resume_command
from sft_play.training.measure.peaks import Watch
from sft_play.training.prepare.prepare import Prepared, log_rows
from sft_play.training.prepare.run_folder import layout_facts
from sft_play.training.ranks import distributed

logger = logging.getLogger(__name__)

STOPPED = "stopped"


class Stages:
    """The stages of a job, to be trained one after the other."""

    def __init__(
        self, job: RunJob, prepared: Sequence[Prepared], watch: Watch, train: Callable[..., dict[str, Any]]
    ) -> None:
        """`train`: trains one stage, as `run.train_stage` does."""
        self._job, self._prepared, self._watch, self._train_one = job, prepared, watch, train
        self._summaries: list[dict[str, Any]] = []
        self._steps = 0
        """Optimizer steps since this process started."""

    def train(self) -> dict[str, Any]:
        """Train every stage that is not finished yet; returns the summary of the whole run. Raises RunFolderError: a
        node would not see the weights of the stage before; Interrupted: the user stopped the run."""
        is_adapter, manifest = self._prepared[0].trains_adapter, self._job.folder.manifest_path
        distributed.require_all(
            manifest.is_file(),
            f"{manifest} does not exist, and every rank reads the weights of the stage before: set output.dir to a "
            "disk that all nodes share",
        )
        begins_from = self._prepared[0].base_adapter_folder
        status = "finished"
        for number, (stage, prepared) in enumerate(zip(self._job.stages, self._prepared, strict=True), start=1):
            # rank 0 decides for all: another node may not see the files yet
            if distributed.of_first(stage.folder.has_finished(adapter=is_adapter) if distributed.is_first() else None):
                logger.info("Stage %d of %d, %s, is finished", number, len(self._job.stages), stage.folder.stage)
                summary = read_summary(stage.folder.path) if distributed.is_first() else {}
                self._summaries.append({"name": stage.folder.stage, **_UNKNOWN, **distributed.of_first(summary)})
            elif self._left() == 0:
                status = STOPPED
                break
            else:
                self._say(number, stage)
                log_rows(stage, prepared)
                status = self._train(stage, prepared, begins_from)
                if status != "finished":
                    break
            begins_from = stage.folder.model_path(adapter=is_adapter)
        return self._finish(status)

    def _left(self) -> int | None:
        most = self._job.loaded.config.train.stop_after_steps
        return None if most is None else max(0, most - self._steps)

    def _train(self, stage: RunJob, prepared: Prepared, begins_from: Path | None) -> str:
        begun = distributed.of_first(stage.folder.has_begun if distributed.is_first() else None)
        last = find_last_checkpoint(stage.folder.checkpoints, self._watch.beat) if begun else None
        before = checkpoints.checkpoint_step(last) if last is not None else 0
        if distributed.is_first():
            stage.folder.begin_stage(layout_facts(stage.plan), plan=stage.plan.as_json(), config=stage.loaded.config)
            if stage.deepspeed is not None:
                stage.folder.write_json(DEEPSPEED_FILE, stage.deepspeed)
        distributed.barrier()
        config = stage.loaded.config
        settings = config.train.model_copy(update={"stop_after_steps": self._left()})
        loaded = replace(stage.loaded, config=config.model_copy(update={"train": settings}))
        part = replace(stage, resume=bool(begun), loaded=loaded)
        try:
            watch = replace(self._watch, started=time.time())
            summary = self._train_one(part, prepared, watch, begins_from=begins_from)
        except Interrupted:
            self._record(STOPPED, exit_code=Interrupted.exit_code)
            raise
        self._summaries.append({"name": stage.folder.stage, **summary})
        self._steps += summary["steps"] - before
        gc.collect()  # model, optimizer and engine of this stage are in reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return str(summary["status"])

    def _say(self, number: int, stage: RunJob) -> None:
        train = stage.loaded.config.train
        length = f"{train.max_steps:,} steps" if train.max_steps else f"{train.epochs:g} epochs"
        logger.info("Stage %d of %d, %s: %s, learning rate %g, rows of at most %d tokens, micro %d x accum %d",
                    number, len(self._job.stages), stage.folder.stage, length, stage.loaded.config.learning_rate,
                    stage.plan.max_seq_len, stage.plan.batch.micro_batch, stage.plan.batch.grad_accum)  # fmt: skip

    def _finish(self, status: str) -> dict[str, Any]:
        summary = self._record(status, exit_code=0)
        if distributed.is_first():
            logger.info("Written to: %s", self._job.folder.path)
            if status == STOPPED:
                logger.info("Stopped early; resume with: %s", resume_command(self._job))
            else:
                logger.info("Trained weights: %s", summary["model_path"])
        distributed.barrier()
        return summary

    def _record(self, status: str, *, exit_code: int) -> dict[str, Any]:
        job = self._job
        summary = _whole(self._summaries, [stage.loaded.config for stage in job.stages])
        summary |= {"status": status, "exit": exit_code, "wall_s": round(time.time() - self._watch.started, 2)}
        if distributed.is_first():
            job.folder.write_json("summary.json", summary)
            job.folder.update_manifest(status=status, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        return summary


# Figures of a stage whose summary is damaged.
_UNKNOWN: dict[str, Any] = {"before": None, "wall_s": 0.0, "peak_bytes": {}, "tokens_per_s": 0.0, "steps": 0}


def _whole(stages: Sequence[dict[str, Any]], configs: Sequence[RunConfig]) -> dict[str, Any]:
    """`before` is the first stage's if the last is evaluated on the same rows; speed is weighted by time."""
    last = stages[-1] if stages else {}
    same = _evaluated_on(configs[0]) == _evaluated_on(configs[-1])
    wall = sum(stage["wall_s"] for stage in stages)
    figures = ("measured_reserved", "measured_rss")
    highest = max(stages, key=lambda stage: max(stage["peak_bytes"].get(key) or 0 for key in figures), default=None)
    return {
        "split": last.get("split"),
        "before": stages[0]["before"] if stages and same else None,
        "after": last.get("after") if len(stages) == len(configs) else None,
        "samples": last.get("samples", []) if len(stages) == len(configs) else [],
        "peak_bytes": highest["peak_bytes"] if highest else None,
        "peak_bytes_by_moment": highest.get("peak_bytes_by_moment") if highest else None,
        "tokens_per_s": round(sum(one["tokens_per_s"] * one["wall_s"] for one in stages) / wall, 2) if wall else 0,
        "steps": sum(stage["steps"] for stage in stages),
        "engine_proof": last.get("engine_proof"),
        "evaluations": [{"stage": stage["name"], **one} for stage in stages for one in stage.get("evaluations", ())],
        "model_path": last.get("model_path") if len(stages) == len(configs) else None,
        "stages": [
            {key: value for key, value in stage.items() if key not in ("evaluations", "samples")} for stage in stages
        ],
    }


def _evaluated_on(config: RunConfig) -> tuple[Any, ...]:
    data = config.data
    held = [(source.path, source.val_path) for source in data.sources]
    return data.test_path, data.val_path, data.val_fraction, data.train_path if data.val_fraction else "", held
