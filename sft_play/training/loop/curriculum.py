"""A run with stages: all are prepared first, then each is trained on the weights of the one before.

A stage is a run of its own in its own folder (`stages/NAME`), with a new optimizer, schedule and
engine; it hands its weights on by disk, so every layout and `resume` go the same way.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import Interrupted
from sft_play.runs.folder import DEEPSPEED_FILE, read_summary
from sft_play.training import distributed
from sft_play.training.checkpoints import checkpoints
from sft_play.training.checkpoints.last_checkpoint import find_last_checkpoint
from sft_play.training.job import RunJob, resume_command
from sft_play.training.measure.monitor import RunMonitors
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.prepare import Prepared, log_rows
from sft_play.training.prepare.run_folder import layout_facts

logger = logging.getLogger(__name__)

STOPPED = "stopped"


class StageSequence:
    """The stages of a job, to be trained one after the other. `train_stage`: trains one stage, as
    `run.train_stage` does."""

    def __init__(
        self,
        job: RunJob,
        prepared_stages: Sequence[Prepared],
        monitors: RunMonitors,
        train_stage: Callable[..., dict[str, Any]],
    ) -> None:
        self._job, self._prepared_stages = job, prepared_stages
        self._monitors, self._train_stage = monitors, train_stage
        self._summaries: list[dict[str, Any]] = []
        # Optimizer steps since this process started.
        self._steps_trained = 0

    def train(self) -> dict[str, Any]:
        """Train every stage that is not finished yet; returns the summary of the whole run. Raises
        RunFolderError: a node would not see the weights of the stage before; Interrupted: the user
        stopped the run.
        """
        manifest = self._job.folder.manifest_path
        is_adapter = self._prepared_stages[0].trains_adapter
        distributed.require_all(
            manifest.is_file(),
            f"{manifest} does not exist, and every rank reads the weights of the stage before: set"
            " output.dir to a disk that all nodes share",
        )
        begins_from = self._prepared_stages[0].base_adapter_folder
        status = "finished"
        for stage_number, (stage, prepared) in enumerate(
            zip(self._job.stages, self._prepared_stages, strict=True), start=1
        ):
            name, stage_count = stage.folder.stage_name, len(self._job.stages)
            # rank 0 decides for all: another node may not see the files yet
            if distributed.broadcast_value(
                distributed.is_first() and stage.folder.has_finished(is_adapter=is_adapter)
            ):
                logger.info("Stage %d of %d, %s, is finished", stage_number, stage_count, name)
                summary = distributed.broadcast_value(read_summary(stage.folder.path))
                self._summaries.append(
                    {  # figures of a stage whose summary is damaged come first
                        "name": name,
                        "before": None,
                        "wall_s": 0.0,
                        "peak_bytes": {},
                        "tokens_per_s": 0.0,
                        "steps": 0,
                        **summary,
                    }
                )
            elif self._remaining_steps() == 0:
                status = STOPPED
                break
            else:
                train, batch = stage.loaded.config.train, stage.plan.batch
                length = (
                    f"{train.max_steps:,} steps" if train.max_steps else f"{train.epochs:g} epochs"
                )
                logger.info(
                    "Stage %d of %d, %s: %s, learning rate %g, rows"
                    " of at most %d tokens, micro %d x accum %d",
                    stage_number,
                    stage_count,
                    name,
                    length,
                    stage.loaded.config.learning_rate,
                    stage.plan.max_seq_len,
                    batch.micro_batch,
                    batch.grad_accum,
                )
                log_rows(stage, prepared)
                status = self._train_prepared_stage(stage, prepared, begins_from)
                if status != "finished":
                    break
            begins_from = stage.folder.model_path(is_adapter=is_adapter)
        summary = self._write_summary(status, exit_code=0)
        if distributed.is_first():
            logger.info("Written to: %s", self._job.folder.path)
            if status == STOPPED:
                logger.info("Stopped early; resume with: %s", resume_command(self._job))
            else:
                logger.info("Trained weights: %s", summary["model_path"])
        distributed.barrier()
        return summary

    def _remaining_steps(self) -> int | None:
        max_steps = self._job.loaded.config.train.stop_after_steps
        return None if max_steps is None else max(0, max_steps - self._steps_trained)

    def _train_prepared_stage(
        self, stage: RunJob, prepared: Prepared, begins_from: Path | None
    ) -> str:
        self._monitors.heartbeat.stop_clock()
        has_begun = distributed.broadcast_value(stage.folder.has_begun)
        checkpoint = find_last_checkpoint(stage.folder.checkpoints_path) if has_begun else None
        resumed_step = checkpoints.checkpoint_step(checkpoint) if checkpoint is not None else 0
        if distributed.is_first():
            stage.folder.begin_stage(
                layout_facts(stage.plan), plan=stage.plan.as_json(), config=stage.loaded.config
            )
            if stage.deepspeed is not None:
                stage.folder.write_json(DEEPSPEED_FILE, stage.deepspeed)
        distributed.barrier()
        config = stage.loaded.config
        train_config = config.train.model_copy(update={"stop_after_steps": self._remaining_steps()})
        loaded = replace(stage.loaded, config=config.model_copy(update={"train": train_config}))
        try:
            summary = self._train_stage(
                replace(stage, resume=bool(has_begun), loaded=loaded),
                prepared,
                replace(self._monitors, start_time=time.time()),
                begins_from=begins_from,
            )
        except Interrupted:
            self._write_summary(STOPPED, exit_code=Interrupted.exit_code)
            raise
        self._summaries.append({"name": stage.folder.stage_name, **summary})
        self._steps_trained += summary["steps"] - resumed_step
        free_memory()  # model, optimizer and engine of this stage are in reference cycles
        return str(summary["status"])

    def _write_summary(self, status: str, *, exit_code: int) -> dict[str, Any]:
        job = self._job
        summary = {
            **_merge_summaries(self._summaries, [stage.loaded.config for stage in job.stages]),
            "status": status,
            "exit": exit_code,
            "wall_s": round(time.time() - self._monitors.start_time, 2),
        }
        if distributed.is_first():
            job.folder.write_json("summary.json", summary)
            job.folder.update_manifest(
                status=status, ended=datetime.now(UTC).isoformat(timespec="seconds")
            )
        return summary


def _merge_summaries(
    stages: Sequence[dict[str, Any]], configs: Sequence[RunConfig]
) -> dict[str, Any]:
    # `before` is the first stage's if the last is evaluated on the same rows; speed is weighted by
    # time
    last_stage = stages[-1] if stages else {}
    result = last_stage if len(stages) == len(configs) else {}
    is_same_split = _eval_data(configs[0]) == _eval_data(configs[-1])
    peak_sizes = [
        stage["peak_bytes"].get("measured_reserved") or stage["peak_bytes"].get("measured_rss") or 0
        for stage in stages
    ]
    highest = stages[peak_sizes.index(max(peak_sizes))] if stages else {}
    wall_s = sum(stage["wall_s"] for stage in stages)
    tokens = sum(stage["tokens_per_s"] * stage["wall_s"] for stage in stages)
    return {
        "split": last_stage.get("split"),
        "before": stages[0]["before"] if stages and is_same_split else None,
        "after": result.get("after"),
        "samples": result.get("samples", []),
        "peak_bytes": highest.get("peak_bytes"),
        "peak_bytes_by_moment": highest.get("peak_bytes_by_moment"),
        "tokens_per_s": round(tokens / wall_s, 2) if wall_s else 0,
        "steps": sum(stage["steps"] for stage in stages),
        "engine_proof": last_stage.get("engine_proof"),
        "evaluations": [
            {"stage": stage["name"], **entry}
            for stage in stages
            for entry in stage.get("evaluations", ())
        ],
        "model_path": result.get("model_path"),
        "stages": [
            {key: value for key, value in stage.items() if key not in ("evaluations", "samples")}
            for stage in stages
        ],
    }


def _eval_data(config: RunConfig) -> tuple[Any, ...]:
    data = config.data
    source_paths = [(source.path, source.val_path) for source in data.sources]
    split_path = data.train_path if data.val_fraction else ""
    return data.test_path, data.val_path, data.val_fraction, split_path, source_paths
