"""Runs on Unsloth, from this side: what is handed over, the processes, and the adapter read back.

Unsloth's process trains rows that are built and masked here, in the loop of every other run, and writes into the run's
own folder; both run the code of this checkout. `planner.backend` decides whether Unsloth can.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict

from sft_play import errors
from sft_play.config.load import resolved_config
from sft_play.config.schema import LoraConfig
from sft_play.errors import BackendError, Interrupted, ModelError, SftPlayError
from sft_play.machine.software import WORKER_SCRIPT, worker_environment
from sft_play.models.config_json import find_model_folder
from sft_play.planner.plan import Plan
from sft_play.process import failures, signals
from sft_play.process.failures import Failure
from sft_play.runs.files import write_text
from sft_play.training.checkpoints.checkpoints import record_digests
from sft_play.training.checkpoints.model_saving import check_saved_weights, saved_shapes
from sft_play.training.job import RunJob
from sft_play.training.measure.evaluate import EvalSet
from sft_play.training.measure.exact_match import Question, collect_stop_ids
from sft_play.training.measure.summary import write_model_card
from sft_play.training.prepare.model_spec import build_meta_model
from sft_play.training.prepare.prepare import Prepared

logger = logging.getLogger(__name__)

# In a run folder: what was handed over. The rows and the tokenizer are removed once Unsloth's process has ended.
WORK_FOLDER = "unsloth"
# Seconds that the other processes have to end once one has failed.
PEER_TIMEOUT_S = 20.0
_BATCH_ROWS = 10_000
_ROW_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())])


# --- what is handed over ----------------------------------------------------------------------------------------------
class Handover(BaseModel):
    """All that the worker needs beside the settings and the plan; times are in seconds, `started` since 1970."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    folder: str
    config_path: str
    overrides: list[str]
    config: dict[str, Any]
    plan: dict[str, Any]
    resume: bool
    started: float
    timeout_s: float
    tokenizer: str
    own_template: str | None
    splits: dict[str, str]
    """The file of each split's rows."""
    held_out: str
    asked: list[Question]
    asked_while_training: list[Question]
    stop_ids: list[int]
    model_path: str
    """The folder of the base weights, or their name on the hub."""
    target_modules: list[str]
    tensors: dict[str, list[int]]
    """Name and shape of every tensor that the adapter's file will hold."""


def write_rows(dataset: Any, path: Path) -> str:
    """Write a `datasets.Dataset` of token rows as an Arrow stream, which `Dataset.from_file` reads; rows without a
    source are chats. Returns the path."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _ROW_SCHEMA) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            columns = {name: table[name] for name in table.column_names}
            columns.setdefault("source", pa.array([0] * table.num_rows, type=pa.int8()))
            stream.write_table(pa.table({name: columns[name] for name in _ROW_SCHEMA.names}).cast(_ROW_SCHEMA))
    return str(path)


# --- the run ----------------------------------------------------------------------------------------------------------
def train_with_unsloth(job: RunJob, prepared: Prepared, eval_set: EvalSet, *, start_time: float) -> dict[str, Any]:
    """Train in Unsloth's processes with what was prepared here; returns the run's summary. Raises SftPlayError: as
    Unsloth's process raised it; ModelError: the adapter that it wrote is not the run's; RuntimeError: another error,
    whose traceback was printed."""
    python, info = prepared.backend.python, prepared.backend.unsloth_info
    assert python is not None
    assert info is not None
    job.folder.update_manifest(unsloth={"python": str(python), "device": info.device, **info.versions})
    logger.info("Unsloth: %s; its process is %s on %s", info.versions_text, python, info.device)
    if info.device == "cpu":
        logger.warning("Unsloth trains on the CPU without its kernels, as transformers and PEFT do")
    handover = _build_handover(job, prepared, eval_set, start_time)
    work_folder = job.folder.path.absolute() / WORK_FOLDER
    try:
        path = work_folder / "handover.json"
        write_text(path, handover.model_dump_json(indent=1) + "\n")
        _run_workers(python, path, job.plan)
    except Interrupted:
        if job.folder.read_manifest().get("status") == "running":  # stopped before it could record so
            job.folder.update_manifest(status="stopped")
        raise
    finally:
        for name in ("rows", "tokenizer", "ranks"):
            shutil.rmtree(work_folder / name, ignore_errors=True)
    summary: dict[str, Any] = json.loads((job.folder.path / "summary.json").read_text(encoding="utf-8"))
    if "model_path" in summary:  # else it was stopped before its end
        path, lora = job.folder.model_path(is_adapter=True), job.loaded.config.tuning.lora
        check_adapter(path, lora, handover, tokenizer=prepared.tokenizer, steps=summary["steps"])
        write_model_card(job, prepared, summary)
    summary["backend"] = "unsloth"
    job.folder.write_json("summary.json", summary)
    return summary


def _build_handover(job: RunJob, prepared: Prepared, eval_set: EvalSet, start_time: float) -> Handover:
    config, plan = job.loaded.config, job.plan
    has_questions = bool(eval_set.questions or eval_set.training_questions)
    work_folder = job.folder.path.absolute() / WORK_FOLDER
    shutil.rmtree(work_folder, ignore_errors=True)
    (work_folder / "rows").mkdir(parents=True)
    prepared.tokenizer.tokenizer.save_pretrained(work_folder / "tokenizer")
    named_splits = {"train": prepared.splits.train, "val": prepared.splits.val, "test": prepared.splits.test}
    folder = find_model_folder(config.model.name)
    # never None: Unsloth trains only adapters (`unsupported_options`)
    peft_config: Any = prepared.model_spec.peft_config
    shapes = saved_shapes(build_meta_model(prepared.model_spec, trust_remote_code=config.model.trust_remote_code))
    return Handover(
        folder=str(job.folder.path.absolute()),
        config_path=str(job.loaded.path),
        overrides=list(job.loaded.overrides),
        config=resolved_config(config, effective_batch=plan.batch.effective_batch),
        plan=plan.as_json(),
        resume=job.resume,
        started=start_time,
        timeout_s=job.timeout_s,
        tokenizer=str(work_folder / "tokenizer"),
        own_template=prepared.tokenizer.original_template,
        splits={
            name: write_rows(split.rows, work_folder / "rows" / f"{name}.arrow")
            for name, split in named_splits.items()
            if split is not None
        },
        held_out=eval_set.name,
        asked=eval_set.questions,
        asked_while_training=eval_set.training_questions,
        stop_ids=collect_stop_ids(config.task_mode, prepared.tokenizer.tokenizer, prepared.renderer, None)
        if has_questions
        else [],
        model_path=str(folder.absolute()) if folder is not None else config.model.name,
        target_modules=sorted(peft_config.target_modules),
        tensors={name: list(shape) for name, shape in shapes.items()},
    )


def check_adapter(path: Path, lora: LoraConfig, handover: Handover, *, tokenizer: Any, steps: int) -> None:
    """Check that the adapter is complete and the run's own, as PEFT reads it here, and save our tokenizer beside it.
    Raises ModelError: a tensor is missing, not finite, never trained, or of other settings."""
    from peft import PeftConfig

    expected_shapes = {name: tuple(shape) for name, shape in handover.tensors.items()}
    check_saved_weights(path, expected_shapes=expected_shapes, must_have_learned=steps > 1)
    adapter_config = PeftConfig.from_pretrained(str(path))
    settings = {
        "r": lora.r, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora,
        "base_model_name_or_path": handover.model_path,
    }  # fmt: skip
    differing = [f"{name}={getattr(adapter_config, name)!r} and not {value!r}" for name, value in settings.items()
                 if getattr(adapter_config, name) != value]  # fmt: skip
    if differing:
        raise ModelError(f"{path}: the adapter that Unsloth wrote is not the run's: {'; '.join(differing)}")
    if tokenizer.original_template is not None:
        tokenizer.tokenizer.chat_template = tokenizer.original_template
    tokenizer.tokenizer.save_pretrained(path)
    record_digests(path)


# --- the processes ----------------------------------------------------------------------------------------------------
def _run_workers(python: Path, handover: Path, plan: Plan) -> None:
    """Run the workers to their end. The first signal is passed on (they save and stop); a second ends them at once."""
    processes: list[subprocess.Popen[Any]] = []
    rank_environments = list(_rank_environments(plan))
    error_files = [handover.parent / "ranks" / str(index) / "error.json" for index in range(len(rank_environments))]

    def log_stop(signal_number: int) -> None:
        logger.warning("%s: saving at the end of this step, then stopping", signal.Signals(signal_number).name)

    with signals.supervise(processes, on_stop=log_stop) as received_signals:
        for rank_environment, error_file in zip(rank_environments, error_files, strict=True):
            processes.append(_start_worker(python, handover, error_file, rank_environment))
            if received_signals:
                processes[-1].terminate()
        deadline: float | None = None
        while any(process.poll() is None for process in processes):
            failed = [process for process in processes if process.poll() not in (None, 0, Interrupted.exit_code)]
            if deadline is None and failed:
                deadline = time.monotonic() + PEER_TIMEOUT_S  # the others wait for it in a collective, and would hang
            if deadline is not None and time.monotonic() > deadline:
                break  # which ends them
            time.sleep(0.05)
    exits = [
        (process.returncode, failures.read_failure(error_file))
        for process, error_file in zip(processes, error_files, strict=True)
    ]
    _raise_first_failure(exits, signal_count=len(received_signals))


def _rank_environments(plan: Plan) -> Iterator[dict[str, str]]:
    ranks = plan.choice.layout.ranks
    if ranks == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # free again until rank 0 listens on it: nothing reserves a port
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if not plan.hardware.gpus:
        shared["OMP_NUM_THREADS"] = max(1, plan.hardware.cpu_cores // ranks)
    for rank in range(ranks):
        yield {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}


def _start_worker(
    python: Path, handover: Path, error_file: Path, rank_environment: dict[str, str]
) -> subprocess.Popen[Any]:
    error_file.parent.mkdir(parents=True, exist_ok=True)
    variables = {**worker_environment(os.environ), **rank_environment, failures.ERROR_FILE_VARIABLE: str(error_file)}
    return signals.start_child([str(python), str(WORKER_SCRIPT), str(handover)], environment=variables)


def _raise_first_failure(exits: Sequence[tuple[int, Failure | None]], *, signal_count: int) -> None:
    """Raise the first failure of processes that ended with these exit codes, and recorded this; a broken connection or
    a killed process counts only where there is no other."""
    failed = [(code, failure) for code, failure in exits if code]
    if not failed:
        return
    code, failure = min(
        failed, key=lambda result: (result[1] is None or result[1].kind == "peer", result[1].time if result[1] else 0.0)
    )
    if signal_count > 1 or (signal_count and failure is None):
        raise Interrupted("ended at once; what was saved until then is kept")
    if failure is None:
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise BackendError(f"Unsloth's process {ending} (out of memory? see dmesg); what was saved until then is kept")
    if failure.kind == "stopped":
        raise Interrupted(failure.message or "stopped by the user; what was saved until then is kept")
    error_class = getattr(errors, failure.name, None)
    if isinstance(error_class, type) and issubclass(error_class, SftPlayError):
        raise error_class(failure.message)
    raise RuntimeError(f"Unsloth's process ended with {failure.name}: {failure.message}; its traceback is above")
