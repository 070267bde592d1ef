"""What a run is to do: settings, plan, data and run folder, of the whole run and of each of its stages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import OutputConfig
from sft_play.data.sources.files import DataPaths, find_data_paths
from sft_play.planner.plan import Plan, PlanWithDeepSpeed
from sft_play.runs.folder import RunFolder, kept_overrides, remote_code_keys
from sft_play.runs.lookup import RunLock


@dataclass(frozen=True)
class RunJob:
    """A run, or one stage of it."""

    loaded: LoadedConfig
    plan: Plan
    data_paths: DataPaths
    folder: RunFolder
    resume: bool
    log_buffer: MemoryHandler | None = None
    # Whether the parent that launched this rank has created the folder.
    folder_exists: bool = False
    # The folder's lock, if this process has it already.
    lock: RunLock | None = None
    # Else the part of the lock to take (`role` of `lock_run`): the parent that launched this rank
    # holds one too.
    lock_role: int | None = None
    # DeepSpeed's config, every value resolved.
    deepspeed: Mapping[str, Any] | None = None
    # Seconds that ranks wait for each other before they give up.
    timeout_s: float = 1800.0
    # The date for chat templates that write one.
    today: date = field(default_factory=date.today)
    # The stages, if the run has any, each with its own settings, plan and folder.
    stages: tuple[RunJob, ...] = ()

    @property
    def stage_jobs(self) -> tuple[RunJob, ...]:
        """The jobs that are trained, in order: the stages, or the run itself."""
        return self.stages or (self,)

    @property
    def largest_stage(self) -> RunJob:
        """The stage that needs the most memory."""
        return max(self.stage_jobs, key=lambda stage: stage.plan.memory.reserved + stage.plan.memory.margin)


def build_run_job(
    loaded: LoadedConfig, plans: Sequence[PlanWithDeepSpeed], folder: RunFolder, **options: Any
) -> RunJob:
    """Build the job of a run, with its stages if it has any, from its plan, or one per stage; `options`: the other
    fields of `RunJob`. Raises DataError: a file of its rows is missing."""
    plan, deepspeed = plans[0]
    job = RunJob(loaded, plan, find_data_paths(loaded.runs[0].config.data), folder, deepspeed=deepspeed, **options)
    stages = [
        replace(
            job, loaded=loaded.for_stage(stage), plan=plan, data_paths=find_data_paths(stage.config.data),
            deepspeed=deepspeed,
            folder=folder.stage_folder(stage.name, is_last_stage=stage is loaded.stages[-1]),
        )
        for stage, (plan, deepspeed) in zip(loaded.stages, plans, strict=bool(loaded.stages))
    ]  # fmt: skip
    return replace(job, stages=tuple(stages))


def resume_command(job: RunJob) -> str:
    """The command that resumes this run; its name alone is enough in the folder where every run is looked for."""
    folder, settings = job.folder.whole_run.path, kept_overrides(job.loaded.overrides)
    # a run folder does not allow code that comes with a model, so that the command has to
    if folder.parent == Path(OutputConfig().dir) and not remote_code_keys(job.loaded.config.model):
        return shlex.join(["make", "resume", f"RUN={folder.name}"])
    words = ["make", "resume", f"CONFIG={job.loaded.path}", f"RUN={folder.name}"]
    return shlex.join([*words, f"SET={shlex.join(settings)}"] if settings else words)
