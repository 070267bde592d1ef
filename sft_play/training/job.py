"""What a run is to do: settings, plan, data and run folder, of the whole run and of each of its
stages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import OutputConfig, RunConfig
from sft_play.data.sources.files import DataPaths, find_data_paths
from sft_play.planner import calibration
from sft_play.planner.kernels import CountedKernels, KernelsName
from sft_play.planner.plan import Plan, PlanWithDeepSpeed
from sft_play.runs.folder import RunFolder, installed_versions, kept_overrides, remote_code_keys
from sft_play.runs.lookup import RunLock
from sft_play.variables import spell_commands


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
        return max(
            self.stage_jobs, key=lambda stage: stage.plan.memory.reserved + stage.plan.memory.margin
        )


def build_run_job(
    loaded: LoadedConfig, plans: Sequence[PlanWithDeepSpeed], folder: RunFolder, **options: Any
) -> RunJob:
    """Build the job of a run, with its stages if it has any, from its plan, or one per stage;
    `options`: the other fields of `RunJob`. Raises DataError: a file of its rows is missing."""
    plan, deepspeed = plans[0]
    job = RunJob(
        loaded,
        plan,
        find_data_paths(loaded.runs[0].config.data),
        folder,
        deepspeed=deepspeed,
        **options,
    )
    stages = tuple(
        replace(
            job,
            loaded=loaded.for_stage(stage),
            plan=plan,
            data_paths=find_data_paths(stage.config.data),
            deepspeed=deepspeed,
            folder=folder.stage_folder(stage.name, is_last_stage=stage is loaded.stages[-1]),
        )
        for stage, (plan, deepspeed) in zip(loaded.stages, plans, strict=bool(loaded.stages))
    )
    return replace(job, stages=stages)


def resume_command(job: RunJob) -> str:
    """The command that resumes this run; its name alone is enough in the folder where every run is
    looked for."""
    folder, settings = job.folder.whole_run.path, kept_overrides(job.loaded.overrides)
    # a run folder does not allow code that comes with a model, so that the command has to
    if folder.parent == Path(OutputConfig().dir) and not remote_code_keys(job.loaded.config.model):
        return spell_commands(shlex.join(["make", "resume", f"RUN={folder.name}"]))
    words = ["make", "resume", f"CONFIG={job.loaded.path}", f"RUN={folder.name}"]
    words += [f"SET={shlex.join(settings)}"] if settings else []
    return spell_commands(shlex.join(words))


# --- what later plans on this machine remember of a run -------------------------------------------
def measured_run(config: RunConfig, plan: Plan, **measurements: Any) -> calibration.MeasuredRun:
    """Build the record of a run, or of a step that ran out of memory; `measurements`: other fields
    of `MeasuredRun`."""
    return calibration.MeasuredRun(
        device=plan.hardware.gpus[0].name if plan.hardware.gpus else "cpu",
        mode=config.tuning.mode,
        layout=plan.layout,
        model=config.model.name,
        micro_batch=plan.batch.micro_batch,
        seq_len=plan.max_seq_len,
        versions=" ".join(
            f"{name} {version}" for name, version in sorted(installed_versions().items())
        ),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        **{
            "predicted_allocated": plan.memory.allocated,
            "measured_allocated": 0,
            "predicted_reserved": plan.choice.uncorrected.reserved,
            "measured_reserved": 0,
            "predicted_tokens_per_s": 0.0,
            "measured_tokens_per_s": 0.0,
            "kernels": (plan.kernels or CountedKernels()).memory,
            "compiled": plan.compiled,
            **measurements,
        },
    )


def record_measurements(
    configs_and_plans: Sequence[tuple[RunConfig, Plan]], summary: Mapping[str, Any]
) -> None:
    """Record memory and speed for later plans; of stages only on GPUs: a CPU's peak is of the whole
    process."""
    stage_summaries = summary.get("stages")
    for (config, plan), figures in zip(
        configs_and_plans, stage_summaries or [summary], strict=False
    ):
        # plans predict the other backend, and the speed of compiled blocks where they choose them
        is_predicted = (
            figures.get("backend") != "unsloth"
            and bool((figures.get("compile") or {}).get("graphs")) == plan.compiled
        )
        if not is_predicted or not (plan.hardware.gpus or not stage_summaries):
            continue
        # The highest peak, predicted and measured, over the phases whose batch the plan chooses: a
        # plan compares this one. The peaks of loading and saving say nothing about a batch.
        peaks = figures.get("peak_bytes_by_moment") or {}  # none in a stage's damaged summary
        phases = [name for name in peaks if name in ("training", "evaluation")]
        predicted_peaks = [
            plan.memory.by_moment[name] for name in phases if name in plan.memory.by_moment
        ]
        peak_key = "measured_reserved" if plan.hardware.gpus else "measured_rss"
        reserved_bytes = max((peaks[name][peak_key] or 0 for name in phases), default=0)
        if (
            not reserved_bytes
            or not predicted_peaks
            or not figures["tokens_per_s"]
            or figures.get("ran_out")
        ):
            # it stopped before a step was measured, or its steps were smaller than planned
            continue
        used_kernels: KernelsName = (
            "liger" if (figures.get("kernels") or {}).get("used") else "plain"
        )
        measurements = {
            "measured_allocated": max(peaks[name]["measured_allocated"] or 0 for name in phases),
            "measured_reserved": reserved_bytes,
            "measured_tokens_per_s": figures["tokens_per_s"],
            "kernels": used_kernels,
            "predicted_allocated": 0,
            "predicted_reserved": 0,
        }
        # What was predicted for other kernels is no prediction of this run: 0 leaves it out of the
        # calibration. The plain ones' memory is one, an upper bound of Liger's.
        counted_kernels = plan.kernels or CountedKernels()
        uncorrected, pass_times = plan.choice.uncorrected, figures.get("pass_times")
        if counted_kernels.speed == used_kernels:
            measurements["predicted_tokens_per_s"] = uncorrected.tokens_per_s
        if pass_times and uncorrected.pass_times and counted_kernels.speed == used_kernels:
            measurements |= {
                "measured_pass_s": pass_times["pass_s"],
                "measured_token_s": pass_times["token_s"],
                "predicted_pass_s": uncorrected.pass_times.host_s,
                "predicted_token_s": uncorrected.pass_times.token_s,
            }
        if counted_kernels.memory in ("plain", used_kernels):
            measurements["memory_kernels"] = counted_kernels.memory
            measurements["predicted_allocated"] = max(allocated for allocated, _ in predicted_peaks)
            measurements["predicted_reserved"] = max(
                bytes_reserved for _, bytes_reserved in predicted_peaks
            )
        calibration.add_measured_run(measured_run(config, plan, **measurements))
