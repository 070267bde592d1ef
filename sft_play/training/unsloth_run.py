"""Runs on Unsloth: what is handed over, its processes, and the adapter read back, on this side; on
that side Unsloth's model and adapters in this project's training loop (on transformers' Trainer,
not TRL's).

Unsloth's process trains rows that are built and masked here, and writes into the run's own folder;
both sides run the code of this checkout. `planner.backend` decides whether Unsloth can.
"""

import contextlib
import functools
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig
from transformers import AutoTokenizer, TrainingArguments

from sft_play import errors
from sft_play.config.load import LoadedConfig, resolved_config
from sft_play.config.schema import RunConfig
from sft_play.data.build.splits import DataSplit, DataSplits
from sft_play.errors import BackendError, Interrupted, ModelError, SftPlayError
from sft_play.log import one_line, start_log_file
from sft_play.machine.software import WORKER_SCRIPT, worker_environment
from sft_play.models.config_json import find_model_folder
from sft_play.planner.backend import Backend, check_trackers
from sft_play.planner.plan import Plan, plan_from_json
from sft_play.process import failures, signals
from sft_play.runs.folder import RunFolder, write_text
from sft_play.training import distributed, engines
from sft_play.training.checkpoints.checkpoints import record_digests
from sft_play.training.checkpoints.model_saving import check_saved_weights, saved_shapes
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.trainer import build_run_trainer, training_arguments
from sft_play.training.measure.exact_match import (
    GeneratedAnswer,
    Question,
    collect_stop_ids,
    configured_eos_token_ids,
)
from sft_play.training.measure.monitor import RunMonitors, start_memory_peaks
from sft_play.training.measure.summary import EvalSet, write_model_card
from sft_play.training.model.model_loading import keep_4bit_trainable
from sft_play.training.prepare.device_checks import check_device, check_gpu
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.model_spec import ModelSpec, build_meta_model
from sft_play.training.prepare.prepare import Prepared
from sft_play.training.prepare.tokenizer import LoadedTokenizer

logger = logging.getLogger(__name__)

# In a run folder: what was handed over. The rows and the tokenizer are removed once Unsloth's
# process has ended.
WORK_FOLDER, HANDOVER_FILE = "unsloth", "handover.json"
_BATCH_ROWS = 10_000
_ROW_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("source", pa.int8())]
)


# --- what is handed over --------------------------------------------------------------------------
# The settings, the plan, and where rows, tokenizer and base weights are: `unsloth/handover.json`,
# written by `_write_handover` and read by `train_handover`. `tensors` are the names and shapes of
# all that the adapter's file will hold.
Handover = dict[str, Any]


def write_rows(dataset: Any, path: Path) -> str:
    """Write a `datasets.Dataset` of token rows as an Arrow stream, which `Dataset.from_file` reads;
    rows without a source are chats. Returns the path."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _ROW_SCHEMA) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            columns = {name: table[name] for name in table.column_names}
            columns.setdefault("source", pa.array([0] * table.num_rows, type=pa.int8()))
            stream.write_table(
                pa.table({name: columns[name] for name in _ROW_SCHEMA.names}).cast(_ROW_SCHEMA)
            )
    return str(path)


# --- the run --------------------------------------------------------------------------------------
def train_with_unsloth(
    job: RunJob, prepared: Prepared, eval_set: EvalSet, *, start_time: float
) -> dict[str, Any]:
    """Train in Unsloth's processes with what was prepared here; returns the run's summary. Raises
    SftPlayError: as Unsloth's process raised it; ModelError: the adapter that it wrote is not the
    run's; RuntimeError: another error, whose traceback was printed."""
    python: Any = prepared.backend.python
    info: Any = prepared.backend.unsloth_info
    job.folder.update_manifest(
        unsloth={"python": str(python), "device": info.device, **info.versions}
    )
    logger.info("Unsloth: %s; its process is %s on %s", info.versions_text, python, info.device)
    if info.device == "cpu":
        logger.warning("Unsloth trains on the CPU without its kernels, as transformers and PEFT do")
    work_folder = job.folder.path.absolute() / WORK_FOLDER
    handover = _write_handover(job, prepared, eval_set, start_time, work_folder)
    try:
        _run_workers(python, work_folder / HANDOVER_FILE, job.plan)
    except Interrupted:
        # stopped before it could record so
        if job.folder.read_manifest().get("status") == "running":
            job.folder.update_manifest(status="stopped")
        raise
    finally:
        for name in ("rows", "tokenizer", "ranks"):
            shutil.rmtree(work_folder / name, ignore_errors=True)
    summary: dict[str, Any] = json.loads(
        (job.folder.path / "summary.json").read_text(encoding="utf-8")
    )
    if "model_path" in summary:  # else it was stopped before its end
        # complete and the run's own, as PEFT reads it here; our tokenizer is saved beside it
        path, lora = job.folder.model_path(is_adapter=True), job.loaded.config.tuning.lora
        check_saved_weights(
            path,
            expected_shapes={name: tuple(shape) for name, shape in handover["tensors"].items()},
            must_have_learned=summary["steps"] > 1,
        )
        adapter_config, tokenizer = PeftConfig.from_pretrained(str(path)), prepared.tokenizer
        for name, value in {
            "r": lora.r,
            "lora_alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "base_model_name_or_path": handover["model_path"],
        }.items():
            saved = getattr(adapter_config, name)
            if saved != value:
                raise ModelError(
                    f"{path}: the adapter that Unsloth wrote is not"
                    f" the run's: {name}={saved!r} and not {value!r}"
                )
        if tokenizer.original_template is not None:
            tokenizer.tokenizer.chat_template = tokenizer.original_template
        tokenizer.tokenizer.save_pretrained(path)
        record_digests(path)
        write_model_card(job, prepared, summary)
    summary["backend"] = "unsloth"
    job.folder.write_json("summary.json", summary)
    return summary


def _write_handover(
    job: RunJob, prepared: Prepared, eval_set: EvalSet, start_time: float, work_folder: Path
) -> Handover:
    config, plan, tokenizer = job.loaded.config, job.plan, prepared.tokenizer.tokenizer
    shutil.rmtree(work_folder, ignore_errors=True)
    (work_folder / "rows").mkdir(parents=True)
    tokenizer.save_pretrained(work_folder / "tokenizer")
    folder = find_model_folder(config.model.name)
    stop_ids: Sequence[int] = ()
    if eval_set.questions or eval_set.training_questions:
        stop_ids = collect_stop_ids(config.task_mode, tokenizer, prepared.renderer, None)
    # never None: Unsloth trains only adapters (`unsupported_options`)
    peft_config: Any = prepared.model_spec.peft_config
    shapes = saved_shapes(
        build_meta_model(prepared.model_spec, trust_remote_code=config.model.trust_remote_code)
    )
    handover = {
        "folder": str(job.folder.path.absolute()),
        "config_path": str(job.loaded.path),
        "overrides": list(job.loaded.overrides),
        "config": resolved_config(config, effective_batch=plan.batch.effective_batch),
        "plan": plan.as_json(),
        "resume": job.resume,
        "started": start_time,  # seconds since 1970
        "timeout_s": job.timeout_s,
        "tokenizer": str(work_folder / "tokenizer"),
        "own_template": prepared.tokenizer.original_template,
        "splits": {
            name: write_rows(split.rows, work_folder / "rows" / f"{name}.arrow")
            for name, split in prepared.splits.named.items()
        },
        "held_out": eval_set.name,
        "asked": list(map(asdict, eval_set.questions)),
        "asked_while_training": list(map(asdict, eval_set.training_questions)),
        "asked_as_samples": list(map(asdict, eval_set.samples)),
        "stop_ids": list(stop_ids),
        # a folder, or a name on the hub
        "model_path": str(folder.absolute()) if folder is not None else config.model.name,
        "target_modules": sorted(peft_config.target_modules),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
    }
    write_text(work_folder / HANDOVER_FILE, json.dumps(handover, indent=1) + "\n")
    return handover


# --- the processes --------------------------------------------------------------------------------
def _run_workers(python: Path, handover_path: Path, plan: Plan) -> None:
    # the first signal is passed on (they save and stop); a second ends them at once
    ranks = plan.choice.layout.ranks
    variables = worker_environment(os.environ)
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            # free again until rank 0 listens on it: nothing reserves a port
            port = probe.getsockname()[1]
        variables |= {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    error_files = [
        handover_path.parent / "ranks" / str(rank) / "error.json" for rank in range(ranks)
    ]
    processes: list[subprocess.Popen[Any]] = []

    def log_stop(signal_number: int) -> None:
        logger.warning(
            "%s: saving at the end of this step, then stopping", signal.Signals(signal_number).name
        )

    with signals.supervise(processes, on_stop=log_stop) as received_signals:
        for rank, error_file in enumerate(error_files):
            error_file.parent.mkdir(parents=True, exist_ok=True)
            variables |= {failures.ERROR_FILE_VARIABLE: str(error_file)}
            if ranks > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                signals.start_child(
                    [str(python), str(WORKER_SCRIPT), str(handover_path)], environment=variables
                )
            )
            if received_signals:
                processes[-1].terminate()
        deadline = math.inf
        while (
            None in (codes := [process.poll() for process in processes])
            and time.monotonic() < deadline
        ):
            if deadline == math.inf and set(codes) - {None, 0, Interrupted.exit_code}:
                # the others wait for it in a collective, and would hang
                deadline = time.monotonic() + 20.0
            time.sleep(0.05)
    exits = [
        (process.returncode, failures.read_failure(file))
        for process, file in zip(processes, error_files, strict=True)
    ]
    _raise_first_failure(exits, signal_count=len(received_signals))


def _raise_first_failure(
    exits: Sequence[tuple[int, failures.Failure | None]], *, signal_count: int
) -> None:
    # a broken connection or a killed process counts only where there is no other failure
    failed = [(code, failure) for code, failure in exits if code]
    if not failed:
        return
    recorded = [failure for _, failure in failed if failure is not None]
    recorded.sort(key=lambda failure: (failure.kind == "peer", failure.time))
    if signal_count > 1 or (signal_count and not recorded):
        raise Interrupted("ended at once; what was saved until then is kept")
    if not recorded:
        code = failed[0][0]
        ending = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        raise BackendError(
            f"Unsloth's process {ending} (out of memory? see"
            " dmesg); what was saved until then is kept"
        )
    failure = recorded[0]
    if failure.kind == "stopped":
        raise Interrupted(
            failure.message or "stopped by the user; what was saved until then is kept"
        )
    error_class = getattr(errors, failure.name, None)
    if isinstance(error_class, type) and issubclass(error_class, SftPlayError):
        raise error_class(failure.message)
    raise RuntimeError(
        f"Unsloth's process ended with {failure.name}: {failure.message}; its traceback is above"
    )


# --- in Unsloth's process -------------------------------------------------------------------------
# Stands for what only `prepare` needs: data files, reports, attention, renderer.
_NOT_HANDED_OVER: Any = None


def train_handover(path: Path, train_stage: Callable[..., dict[str, Any]]) -> None:
    """Train as the document at `path` says, by `training.run.train_stage`; the run folder then
    holds what every run writes. Raises BackendError: Unsloth would train something else;
    SftPlayError: as any run."""
    handover = json.loads(path.read_text(encoding="utf-8"))
    quiet_libraries()
    config, plan = (
        RunConfig.model_validate_json(json.dumps(handover["config"])),
        plan_from_json(handover["plan"]),
    )
    loaded = LoadedConfig(config, Path(handover["config_path"]), "", tuple(handover["overrides"]))
    job = RunJob(
        loaded,
        plan,
        _NOT_HANDED_OVER,
        RunFolder(Path(handover["folder"])),
        resume=handover["resume"],
        folder_exists=True,
        timeout_s=handover["timeout_s"],
    )
    check_device(plan, config)
    # `prepare` has looked in the other environment, whose packages are not these
    check_trackers(config)
    check_gpu(plan, config)
    memory_peaks, prepared = start_memory_peaks(plan), _build_prepared(handover, config)
    with (
        distributed.process_group(plan, timeout_s=job.timeout_s),
        Heartbeat(job.timeout_s) as heartbeat,
        contextlib.ExitStack() as stack,
    ):
        if distributed.is_first():
            stack.callback(start_log_file(job.folder.log_path).close)
        train_stage(
            job,
            prepared,
            RunMonitors(memory_peaks, heartbeat, handover["started"]),
            build_eval_set=functools.partial(_build_eval_set, handover),
            load_trainer=functools.partial(_build_trainer, handover),
        )


def _build_prepared(handover: Handover, config: RunConfig) -> Prepared:
    tokenizer = AutoTokenizer.from_pretrained(
        handover["tokenizer"], trust_remote_code=config.model.trust_remote_code
    )
    splits = {
        name: DataSplit(Dataset.from_file(file), _NOT_HANDED_OVER)
        for name, file in handover["splits"].items()
    }
    peft_config = LoraConfig(
        task_type="CAUSAL_LM", r=config.tuning.lora.r, target_modules=handover["target_modules"]
    )
    return Prepared(
        Backend("unsloth", ""),
        LoadedTokenizer(tokenizer, (), "", handover["own_template"]),
        DataSplits(splits["train"], splits.get("val"), splits.get("test")),
        ModelSpec(None, _NOT_HANDED_OVER, None, peft_config, 0, None, "", ()),
        _NOT_HANDED_OVER,
    )


def _build_eval_set(handover: Handover, _: RunJob, prepared: Prepared) -> EvalSet:
    questions, training_questions, samples = (
        [Question(**fields) for fields in handover[name]]
        for name in ("asked", "asked_while_training", "asked_as_samples")
    )
    name = handover["held_out"]
    return EvalSet(
        getattr(prepared.splits, name), name, questions, training_questions, tuple(samples)
    )


class UnslothLoop(PlannedLoop):
    """The loop of every run, which generates answers in Unsloth's inference mode."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """In an evaluation the mean over this rank's batch; the Trainer would divide by all ranks'
        tokens."""
        if not model.training:
            options["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **options)

    def _generate_answers(self, questions: Sequence[Question]) -> list[GeneratedAnswer]:
        from unsloth import FastLanguageModel

        model = self.accelerator.unwrap_model(self.model)
        FastLanguageModel.for_inference(model)
        try:
            return super()._generate_answers(questions)
        finally:
            FastLanguageModel.for_training(model)


def _build_trainer(
    handover: Handover,
    job: RunJob,
    prepared: Prepared,
    eval_set: EvalSet,
    monitors: RunMonitors,
    **_: Any,
) -> PlannedLoop:
    config, plan = job.loaded.config, job.plan
    arguments = _build_arguments(config, plan, job.folder, has_eval=prepared.splits.val is not None)
    model = load_unsloth_model(handover, config, plan)
    eos_ids = configured_eos_token_ids(model)
    stop_ids = {*handover["stop_ids"], *(eos_ids if isinstance(eos_ids, list) else [eos_ids])}
    return build_run_trainer(
        job,
        prepared,
        eval_set,
        monitors,
        arguments=arguments,
        model=model,
        peft_config=None,
        trainer_class=UnslothLoop,
        stop_ids=sorted(stop_ids - {None}),
    )


def _build_arguments(
    config: RunConfig, plan: Plan, folder: RunFolder, *, has_eval: bool
) -> TrainingArguments:
    options = training_arguments(
        config,
        plan,
        folder,
        has_eval=has_eval,
        engine_options=engines.engine_arguments(plan, config, layer_class="", deepspeed=None),
        arguments_class=dict,
    )
    # without checkpointing: the Trainer would replace Unsloth's own with its
    requested = {name: value for name, value in options.items() if "_checkpointing" not in name}
    arguments = TrainingArguments(**requested)
    actual = {
        name: getattr(getattr(arguments, name), "value", getattr(arguments, name))
        for name in requested
    }
    changes = [
        f"{name}={one_line(str(value))} to {one_line(str(actual[name]))}"
        for name, value in requested.items()
        if isinstance(value, (bool, int, float, str)) and value != actual[name]
    ]
    if changes:
        raise BackendError(
            f"Unsloth would change what the run asks for on this machine: {', '.join(changes)}; set"
            " these to Unsloth's values, or use tuning.backend=bnb"
        )
    return arguments


def load_unsloth_model(handover: Handover, config: RunConfig, plan: Plan) -> Any:
    """Unsloth's model with the document's adapters; raises BackendError where they differ, or it
    cannot load."""
    from unsloth import FastLanguageModel

    model, lora = config.model, config.tuning.lora
    is_4bit = config.tuning.mode == "qlora"
    # "unsloth": its own, which offloads activations
    shared_options: dict[str, Any] = {
        "use_gradient_checkpointing": "unsloth" if plan.choice.checkpointed_layers > 0 else False,
        "max_seq_length": plan.max_seq_len,
        "random_state": config.train.seed,
    }
    try:
        loaded, _ = FastLanguageModel.from_pretrained(
            model_name=handover["model_path"],
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            use_exact_model_name=True,  # else it would train its own quantised copy from the hub
            dtype=getattr(torch, plan.precision.compute),
            load_in_4bit=is_4bit,
            load_in_8bit=False,
            full_finetuning=False,
            fix_tokenizer=False,
            **shared_options,
        )
        peft_model = FastLanguageModel.get_peft_model(
            loaded,
            r=lora.r,
            target_modules=handover["target_modules"],
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            bias="none",
            use_rslora=lora.use_rslora,
            **shared_options,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Unsloth checks models and options in many ways
        raise BackendError(
            f"Unsloth cannot load {one_line(handover['model_path'])}:"
            f" {type(error).__name__}: {one_line(str(error), limit=300)}"
        ) from error
    check_loaded_model(peft_model, handover["tensors"], is_4bit=is_4bit)
    keep_4bit_trainable(peft_model)
    peft_model.config.use_cache = False
    return peft_model


def check_loaded_model(model: Any, expected_shapes: dict[str, list[int]], *, is_4bit: bool) -> None:
    """Raises BackendError where the model is not quantised as asked, or its adapters are not those
    of the run."""
    has_4bit = any(type(module).__name__ == "Linear4bit" for module in model.modules())
    if has_4bit != is_4bit:
        loaded, requested = ("4-bit" if flag else "unquantised" for flag in (has_4bit, is_4bit))
        raise BackendError(
            f"Unsloth loaded {loaded} weights, and the run"
            f" asks for {requested} ones; nothing was trained"
        )
    shapes = {name: list(shape) for name, shape in saved_shapes(model).items()}
    differing = [
        name
        for name in {**expected_shapes, **shapes}
        if shapes.get(name) != expected_shapes.get(name)
    ]
    if differing:
        name = differing[0]
        raise BackendError(
            f"Unsloth's adapters are not those of the run: {name} has shape {shapes.get(name)}"
            f" instead of {expected_shapes.get(name)} ({len(differing)} differ); nothing was"
            " trained"
        )
