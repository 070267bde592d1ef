"""The run folder during a run: the first rank creates or checks it, holds its lock, writes its log
and any failure."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import Interrupted, OutOfMemory, RunFolderError, SftPlayError
from sft_play.log import escape_control, start_log_file
from sft_play.planner.plan import Plan
from sft_play.planner.precision import DTYPE_SHORT_NAMES
from sft_play.runs.folder import (
    DEEPSPEED_FILE,
    END_ENTRIES,
    OOM_ENTRY,
    RESTARTS_ENTRY,
    check_same_run,
    explain_disk_refusals,
    new_manifest,
)
from sft_play.runs.lookup import RunLock, create_run, discard_run, lock_run, write_initial_files
from sft_play.training import distributed
from sft_play.training.checkpoints import checkpoints
from sft_play.training.job import RunJob
from sft_play.training.prepare.prepare import Prepared

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_run_folder(
    job: RunJob, prepared_stages: Sequence[Prepared], facts: Mapping[str, Any]
) -> Iterator[None]:
    """The first rank creates the run folder or checks the one to resume, and writes its log; the
    others wait. Raises RunFolderError: another process is writing it, or its run had other
    settings."""
    if not distributed.is_first():
        distributed.barrier()  # rank 0 creates the folder, or fails and says why
        yield
        return
    with explain_disk_refusals(), _claim_folder(job, prepared_stages, facts):
        log_handler = start_log_file(job.folder.log_path, buffer=job.log_buffer)
        try:
            distributed.barrier()
            with explain_disk_refusals():
                yield
        except BaseException as error:
            if isinstance(error, Exception) and not job.folder.manifest_path.is_file():
                raise RunFolderError(
                    f"{job.folder.path} was removed or renamed while the run trained in it, so it"
                    " ends here; under another name it can be resumed (make resume RUN=PATH)"
                ) from error
            failure = error
            if isinstance(error, OutOfMemory) and error.__cause__ is not None:
                failure = error.__cause__
            # only for the user's mistakes: a fault of ours keeps its folder and log for a report
            is_unused = (
                not job.resume
                and isinstance(failure, SftPlayError)
                and not job.folder.metrics_path.exists()
            )
            try:
                if isinstance(failure, Interrupted):
                    pass  # its state was saved, and `finish_run` has written so
                elif is_unused:
                    discard_run(job.folder)
                else:
                    job.folder.update_manifest(
                        status="stopped" if isinstance(failure, KeyboardInterrupt) else "failed",
                        error=escape_control(f"{type(failure).__name__}: {failure}"),
                    )
            except OSError as write_error:  # it must not hide what went wrong
                logger.warning(
                    "The manifest could not be written: %s", write_error.strerror or write_error
                )
            raise
        finally:
            log_handler.close()


def log_start(job: RunJob, prepared: Prepared, checkpoint: Path | None) -> None:
    """Log what begins, or goes on from a checkpoint: the backend, its precision, where it runs, and
    its folder."""
    ranks = job.plan.choice.layout.ranks
    device = f"{ranks} GPU{'s' * (ranks != 1)}"
    if not job.plan.hardware.gpus:
        device = "the CPU" + (f" ({ranks} ranks)" if ranks > 1 else "")
    precision = DTYPE_SHORT_NAMES[job.plan.precision.compute]
    backend = f"{prepared.backend.name}{' distributed' * (ranks > 1)}"
    if checkpoint is not None:
        logger.info(
            "Resuming %s run from step %d with %s precision on %s",
            backend,
            checkpoints.checkpoint_step(checkpoint),
            precision,
            device,
        )
    elif job.resume:
        logger.info("%s has no checkpoint: starting again from the first step", job.folder.path)
    else:
        logger.info("Starting new %s run with %s precision on %s", backend, precision, device)
    logger.info("Run folder: %s", job.folder.path)
    logger.debug(
        "Learning rate: %g (%s)",
        job.loaded.config.learning_rate,
        job.loaded.config.train.lr_scheduler_type,
    )


def layout_facts(plan: Plan) -> dict[str, Any]:
    """How a run is spread, for the manifest: the batch arithmetic that a resumed run must share,
    and `processes`, which are more than `ranks` where some share rows."""
    return {
        "batch": {
            "micro_batch": plan.batch.micro_batch,
            "grad_accum": plan.batch.grad_accum,
            "ranks": plan.batch.ranks,
        },
        "layout": plan.layout,
        "processes": plan.choice.layout.ranks,
    }


def _claim_folder(
    job: RunJob, prepared_stages: Sequence[Prepared], facts: Mapping[str, Any]
) -> RunLock:
    if job.resume:
        run_lock = job.lock or lock_run(job.folder, role=job.lock_role)
        if job.folder.has_trained:
            spread, backend = layout_facts(job.plan), prepared_stages[0].backend.name
            check_same_run(
                job.folder, job.loaded, data=dict(facts), batch=spread["batch"], backend=backend
            )
            resume_times = job.folder.read_manifest().get("resumed", [])
            resume_times.append(datetime.now(UTC).isoformat(timespec="seconds"))
            # how the stopped run ended is not how this one does
            job.folder.update_manifest(
                status="running", resumed=resume_times, **dict.fromkeys(END_ENTRIES), **spread
            )
            return run_lock
        logger.info(
            "%s: no step was trained, so the run starts from the beginning", job.folder.path
        )
    manifest = {
        **new_manifest(job.loaded, hardware=job.plan.hardware.as_json(), data=dict(facts)),
        **layout_facts(job.plan),
        # what sums on a CPU are rounded by
        "cpu": {
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
    }
    if job.resume:  # no step was trained, since memory ran out or a process died
        previous_manifest = job.folder.read_manifest()
        manifest |= {
            name: previous_manifest[name]
            for name in (OOM_ENTRY, RESTARTS_ENTRY)
            if name in previous_manifest
        }
    manifest["backend"] = prepared_stages[0].backend.name
    manifest["choices"] = [  # everything that was decided for the user
        choice
        for stage_job, prepared in zip(job.stage_jobs, prepared_stages, strict=True)
        for choice in (
            f"Backend: {prepared.backend.reason}",
            *stage_job.plan.reasons,
            *prepared.tokenizer.notes,
            *prepared.splits.notes,
            *prepared.model_spec.notes,
        )
    ]
    if prepared_stages[0].renderer.tokenizer_parts.writes_date:
        manifest["template_date"] = str(prepared_stages[0].renderer.today)
    if job.resume:
        write_initial_files(job.folder, job.loaded, manifest=manifest, plan=job.plan.as_json())
    elif job.folder_exists:
        run_lock = lock_run(job.folder, role=job.lock_role)
        job.folder.update_manifest(**manifest)
        return run_lock
    else:
        run_lock = create_run(job.folder, job.loaded, manifest=manifest, plan=job.plan.as_json())
    if job.deepspeed is not None:
        job.folder.write_json(DEEPSPEED_FILE, job.deepspeed)
    return run_lock
