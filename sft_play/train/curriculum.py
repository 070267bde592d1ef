"""A run with stages: every stage is prepared first, then each is trained on the weights of the one before.

A stage is a run of its own in a folder of its own (`stages/NAME`: plan, checkpoints, weights, summary): a new
optimizer, a new schedule, and an engine made anew, so that it is the same under every layout. What goes from one to the
next are the weights on disk, as `resume` finds them. All stages share one process group, log and metrics.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sft_play import runs
from sft_play.config.schema import RunConfig
from sft_play.errors import Interrupted
from sft_play.train import checkpoints, engine
from sft_play.train.run import Job, Prepared, Watch, in_folder, resume_command, spread_facts, until_memory_ends

logger = logging.getLogger(__name__)

STOPPED = "stopped"


def run_stages(job: Job) -> dict[str, Any]:
    """Train the stages of a job one after the other and return the summary of the whole run.

    Raises:
        SftPlayError: what the user can mend, in any stage before the first begins.
        Interrupted: the user stopped the run, and its state was saved.
    """
    return in_folder(job, job.stages, lambda prepared, watch: _Stages(job, prepared, watch).train())


class _Stages:
    """The stages of a run as they are trained."""

    def __init__(self, job: Job, prepared: Sequence[Prepared], watch: Watch) -> None:
        self._job, self._prepared, self._watch = job, prepared, watch
        self._summaries: list[dict[str, Any]] = []
        self._steps = 0
        """Steps that this start has taken."""

    def train(self) -> dict[str, Any]:
        """Every stage that is not finished yet, and what the whole run came to."""
        is_adapter = self._prepared[0].blueprint.peft_config is not None
        self._require_disk()
        if engine.is_first():  # of all, so that a stage that begins after a stop has the file that the first start had
            for stage in self._job.stages:
                if stage.deepspeed is not None:
                    stage.folder.write_json(runs.DEEPSPEED_FILE, stage.deepspeed)
        begins_from: Path | None = None
        status = "finished"
        for number, (stage, made) in enumerate(zip(self._job.stages, self._prepared, strict=True), start=1):
            path = stage.folder.model_path(adapter=is_adapter)
            if engine.of_first(stage.folder.has_finished(adapter=is_adapter) if engine.is_first() else None):
                logger.info("Stage %d of %d, %s, is finished", number, len(self._job.stages), stage.folder.stage)
                self._summaries.append(_summary_of(stage))
            elif self._left() == 0:
                status = STOPPED
                break
            else:
                self._say(number, stage)
                status = self._train(replace(stage, begins_from=begins_from), made)
                if status != "finished":
                    break
            begins_from = path
        return self._finish(status)

    def _left(self) -> int | None:
        """Steps that this start may still take; None for any number."""
        most = self._job.loaded.config.train.stop_after_steps
        return None if most is None else max(0, most - self._steps)

    def _train(self, stage: Job, made: Prepared) -> str:
        """One stage, from its last checkpoint where it has one; how it ended."""
        begun = engine.of_first(stage.folder.has_begun if engine.is_first() else None)
        last = checkpoints.last_complete(stage.folder.checkpoints) if begun and engine.is_first() else None
        before = engine.of_first(checkpoints.step_of(last) if last is not None else 0)
        if engine.is_first():
            stage.folder.begin_stage(spread_facts(stage.plan), plan=stage.plan.as_json(), config=stage.loaded.config)
        engine.barrier()
        part = replace(stage, resume=bool(begun), loaded=_ending_after(stage, self._left()))
        try:
            summary = until_memory_ends(part, made, replace(self._watch, started=time.time()))
        except Interrupted:
            self._record(STOPPED, exit_code=Interrupted.exit_code)
            raise
        self._summaries.append({"name": stage.folder.stage, **summary})
        self._steps += summary["steps"] - before
        _let_go()
        return str(summary["status"])

    def _say(self, number: int, stage: Job) -> None:
        train = stage.loaded.config.train
        length = f"{train.max_steps:,} steps" if train.max_steps else f"{train.epochs:g} epochs"
        logger.info("Stage %d of %d, %s: %s, learning rate %g, rows of at most %d tokens, micro %d x accum %d",
                    number, len(self._job.stages), stage.folder.stage, length, stage.loaded.config.learning_rate,
                    stage.plan.max_seq_len, stage.plan.batch.micro_batch, stage.plan.batch.grad_accum)  # fmt: skip

    def _require_disk(self) -> None:
        """Raises RunFolderError where a node would not see the weights that the stage before has written."""
        if self._job.plan.hardware.nodes > 1:
            manifest = self._job.folder.manifest_path
            engine.require_all(
                manifest.is_file(),
                f"{manifest} is not there, and every rank reads the weights of the stage before: set output.dir to a "
                "disk that all nodes share",
            )

    def _finish(self, status: str) -> dict[str, Any]:
        """Write and say what the whole run came to."""
        summary = self._record(status, exit_code=0)
        if engine.is_first():
            for one in self._summaries:
                logger.info("Stage %s: %s", one["name"], _in_words(one))
            logger.info("Written to: %s", self._job.folder.path)
            if status == STOPPED:
                logger.info("Stopped early; go on with: %s", resume_command(self._job))
            else:
                logger.info("Trained weights: %s", summary["model_path"])
        engine.barrier()
        return summary

    def _record(self, status: str, *, exit_code: int) -> dict[str, Any]:
        """The summary of the whole run, written by the first rank."""
        job = self._job
        summary = _whole(self._summaries, [stage.loaded.config for stage in job.stages])
        summary |= {"status": status, "exit": exit_code, "wall_s": round(time.time() - self._watch.started, 2)}
        if engine.is_first():
            job.folder.write_json("summary.json", summary)
            job.folder.update_manifest(status=status, ended=datetime.now(UTC).isoformat(timespec="seconds"))
        return summary


def _ending_after(stage: Job, steps: int | None) -> Any:
    """The settings of a stage whose start ends after so many steps."""
    config = stage.loaded.config
    train = config.train.model_copy(update={"stop_after_steps": steps})
    return replace(stage.loaded, config=config.model_copy(update={"train": train}))


def _summary_of(stage: Job) -> dict[str, Any]:
    """What a stage that an earlier start has finished came to, as the first rank reads it."""
    found: dict[str, Any] = {}
    if engine.is_first():
        found = json.loads((stage.folder.path / "summary.json").read_text(encoding="utf-8"))
    found = engine.of_first(found)
    return {"name": stage.folder.stage, **found}


def _whole(stages: Sequence[dict[str, Any]], configs: Sequence[RunConfig]) -> dict[str, Any]:
    """The summary of a run from those of its stages.

    The figures before are those of the first stage, where the last one is judged on the same rows; speed is the mean of
    the stages, weighted by their time.
    """
    last = stages[-1] if stages else {}
    same = _judged_on(configs[0]) == _judged_on(configs[-1])
    wall = sum(stage["wall_s"] for stage in stages)
    highest = max(stages, key=lambda stage: _measured(stage["peak_bytes"]), default=None)
    return {
        "split": last.get("split"),
        "before": stages[0]["before"] if stages and same else None,
        "after": last.get("after") if len(stages) == len(configs) else None,
        "peak_bytes": highest["peak_bytes"] if highest else None,
        "peak_bytes_by_moment": highest.get("peak_bytes_by_moment") if highest else None,
        "tokens_per_s": round(sum(stage["tokens_per_s"] * stage["wall_s"] for stage in stages) / wall, 2)
        if wall
        else 0,
        "steps": sum(stage["steps"] for stage in stages),
        "engine_proof": last.get("engine_proof"),
        "evaluations": [
            {"stage": stage["name"], **found} for stage in stages for found in stage.get("evaluations", ())
        ],
        "model_path": last.get("model_path") if len(stages) == len(configs) else None,
        "stages": [{key: value for key, value in stage.items() if key != "evaluations"} for stage in stages],
    }


def _measured(peak: dict[str, Any]) -> int:
    return int(peak.get("measured_reserved") or peak.get("measured_rss") or 0)


def _judged_on(config: RunConfig) -> tuple[Any, ...]:
    """What says which rows a stage is judged on."""
    data = config.data
    held = [(source.path, source.val_path) for source in data.sources]
    return data.test_path, data.val_path, data.val_fraction, data.train_path if data.val_fraction else "", held


def _in_words(summary: dict[str, Any]) -> str:
    losses = [summary[when] and summary[when]["loss"] for when in ("before", "after")]
    said = [f"{loss:.4f}" if loss is not None else "not measured" for loss in losses]
    judged = f"; held-out loss {said[0]} before, {said[1]} after" if any(loss is not None for loss in losses) else ""
    return f"{summary['steps']:,} steps in {summary['wall_s']:.0f} s{judged}"


def _let_go() -> None:
    """Give back what the stage before has held: its model, optimizer and engine hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
