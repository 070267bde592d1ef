"""Runs on Unsloth, from this side: whether they can, what is handed over, the processes, and the adapter read back.

Unsloth's process trains rows that are made, masked and looked at here, in the loop of every other run, and writes into
the run's own folder. What it does not carry is refused by name before anything loads.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sft_play
from sft_play import endings, errors, failures
from sft_play.config.leaves import leaves
from sft_play.config.load import resolved
from sft_play.config.schema import RunConfig
from sft_play.errors import BackendError, Interrupted, ModelError, SftPlayError
from sft_play.facts.architecture import local_folder
from sft_play.log import one_line
from sft_play.plan.plan import Plan
from sft_play.plan.precision import Precision
from sft_play.train import handover
from sft_play.train.model import Blueprint, check_saved_weights, whole_shapes
from sft_play.train.unsloth_environment import WORKER, Answer, ask, find_python, worker_environment

logger = logging.getLogger(__name__)

WORK = "unsloth"
"""In a run folder: what was handed over. The rows and the tokenizer are removed once Unsloth's process has ended."""
SETUP = "make setup-unsloth builds .venv-unsloth, and UNSLOTH_VENV= names another"
LAYOUTS = ("single", "ddp")
"""What Unsloth's processes run: each holds the whole model (unslothai/unsloth#2425, #3248)."""
PEER_S = 20.0
"""Seconds that the other processes have to end once one has failed."""
_MADE_HERE = ("data.", "runs", "start", "plan.", "trace.", "train.tokenizer")
"""How the owners of options begin whose effect is there before anything is handed over."""
_CARRIED = frozenset(
    {
        *("model.name", "model.revision", "model.trust_remote_code"),
        *("tuning.mode", "tuning.backend", "tuning.backend_fallback"),
        *("tuning.lora.r", "tuning.lora.alpha", "tuning.lora.dropout", "tuning.lora.target_modules"),
        "tuning.lora.use_rslora",
        *("train.epochs", "train.max_steps", "train.stop_after_steps", "train.learning_rate"),
        *(
            "train.lr_scheduler_type",
            "train.warmup_steps",
            "train.weight_decay",
            "train.adam_beta2",
            "train.max_grad_norm",
        ),
        *("train.optim", "train.logging_steps", "train.save_steps", "train.save_total_limit"),
        *("train.load_best_model_at_end", "train.metric_for_best_model", "train.early_stopping_patience", "train.seed"),
        *("train.profile_steps", "train.report_to", "train.group_by_length", "train.dataloader_num_workers"),
        "train.dataloader_pin_memory",
        *("eval.steps", "eval.generate_rows", "eval.max_new_tokens", "eval.before_training"),
    }
)
"""Options that Unsloth's process is told; one that is neither here nor made here, and is not at its default, is
refused, so that an option which is added elsewhere is not lost here."""
_NOT_CARRIED = frozenset({"curriculum", "data.sources", "data.packing", "tuning.lora.dtype"})
"""Options that are looked at while training, whoever owns them."""


# --- whether it can ---------------------------------------------------------------------------------------------------


def problem(config: RunConfig, *, layout: str, nodes: int, launched: bool) -> str | None:
    """Why Unsloth cannot run this here; None where it can. What costs seconds, importing Unsloth, is asked last.

    Args:
        launched: whether this process is a rank that a launcher started.
    """
    has_gpu = torch.cuda.is_available()
    try:
        python = find_python(os.environ)
    except BackendError as error:
        return str(error)
    if python is None and not has_gpu:
        return (
            "its kernels need a CUDA GPU, and torch sees none; on a CPU it trains without them, in an environment of "
            f"its own, and there is none: {SETUP}"
        )
    if python is None:
        return f"it needs an environment of its own, and there is none: {SETUP}"
    refused = not_carried(config)
    if refused:
        return f"it does not carry {'; '.join(refused)}"
    if layout not in LAYOUTS or nodes > 1:
        what = f"{nodes} nodes" if nodes > 1 else f"STRATEGY={layout}"
        return f"its processes each hold the whole model on one node, and {what} was asked for: STRATEGY=ddp"
    if launched:
        return (
            "a launcher started this process as a rank, and Unsloth's processes are started by make train (one GPU) "
            "and make train-distributed (several)"
        )
    try:
        answer = ask(python)
    except BackendError as error:
        return str(error)
    if has_gpu != (answer.device != "cpu"):
        here, there = ("a GPU", "none") if has_gpu else ("none", "one")
        return (
            f"torch sees {here} here and {there} in {python} (Unsloth chose {answer.device}; {answer.words}): build "
            "its environment again, or hide the GPU from both with CUDA_VISIBLE_DEVICES="
        )
    return None


def not_carried(config: RunConfig) -> list[str]:
    """Options of the run that Unsloth's process is not told, with their values and reasons."""
    found = []
    if config.tuning.mode == "full":
        found.append("tuning.mode=full (it trains adapters here: qlora, lora)")
    if config.task_mode == "cpt_mixed":
        found.append("task_mode=cpt_mixed (the losses of chats and texts are told apart by TRL's)")
    if type(config.train.gradient_checkpointing) is int:
        layers = config.train.gradient_checkpointing
        found.append(f"train.gradient_checkpointing={layers} (Unsloth checkpoints all layers or none)")
    reasons = {
        "data.packing": "Unsloth's attention is not told where the chats of a row begin",
        "tuning.lora.use_dora": "its kernels compute plain LoRA",
        "tuning.lora.modules_to_save": "Unsloth stores and ties such modules in a way of its own",
        "model.attn_implementation": "Unsloth chooses the attention",
    }
    for path, (value, is_default) in _values(config).items():
        owner = leaves()[path].owner
        is_told = path in _CARRIED or (path not in _NOT_CARRIED and owner.startswith(_MADE_HERE))
        if not is_default and not is_told:
            why = f" ({reasons[path]})" if path in reasons else ""
            found.append(f"{path}={one_line(json.dumps(value))}{why}")
    return found


def _values(config: RunConfig) -> dict[str, tuple[Any, bool]]:
    """Every option's value as plain data, and whether it is the default."""
    data = config.model_dump(mode="json")
    found = {}
    for path, leaf in leaves().items():
        value: Any = data
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        default = list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        found[path] = (value, value == default)
    return found


def model_problem(blueprint: Blueprint, precision: Precision) -> str | None:
    """Why Unsloth cannot train this model, from its class and precision; None where that says nothing."""
    if blueprint.is_text_tower:
        return "the model is an image-text model, whose text tower alone is trained here"
    if blueprint.peft_config is not None and blueprint.peft_config.fan_in_fan_out:
        return "the model's linear layers are transposed (Conv1D), which Unsloth's are not"
    if blueprint.resize_to is not None:
        return "the tokenizer is larger than the model's embeddings"
    if precision.load != precision.compute:
        return (
            f"it loads and computes in one dtype, and the run loads {precision.load} and computes in "
            f"{precision.compute} (model.dtype=auto)"
        )
    return None


def answer_here() -> tuple[Path, Answer]:
    """The environment that `problem` found, and what it says of itself.

    Raises:
        BackendError: there is none.
    """
    python = find_python(os.environ)
    if python is None:
        raise BackendError(f"Unsloth needs an environment of its own, and there is none: {SETUP}")
    return python, ask(python)


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HandedOver:
    """What a start hands over: the questions of both evaluations, and the tokens that end an answer."""

    held_out: str
    asked: Sequence[Any]
    asked_while_training: Sequence[Any]
    stop_ids: Sequence[int]


def train(job: Any, prepared: Any, exam: HandedOver, *, started: float) -> dict[str, Any]:
    """Train in Unsloth's processes what was prepared here; returns the run's summary.

    Args:
        job: the run's `Job`; `prepared`: its `Prepared`.
        started: when the run started, in seconds since 1970.

    Raises:
        SftPlayError: as Unsloth's process raised it.
        ModelError: the adapter that it wrote is not the run's.
        RuntimeError: Unsloth's process ended with a fault of ours; its traceback has been printed.
    """
    python, answer = answer_here()
    job.folder.update_manifest(unsloth={"python": str(python), "device": answer.device, **answer.versions})
    logger.info("Unsloth: %s; its process is %s on %s", answer.words, python, answer.device)
    if answer.device == "cpu":
        logger.warning("Unsloth trains on the CPU without its kernels, as transformers and PEFT do")
    document = _document(job, prepared, exam, started)
    work = job.folder.path.absolute() / WORK
    try:
        path = work / handover.DOCUMENT
        document.write(path)
        _run(python, path, job.plan)
    except Interrupted:
        if job.folder.manifest().get("status") == "running":  # told before it could write so
            job.folder.update_manifest(status="stopped")
        raise
    finally:
        for name in ("rows", "tokenizer", "ranks"):
            shutil.rmtree(work / name, ignore_errors=True)
    summary: dict[str, Any] = json.loads((job.folder.path / "summary.json").read_text(encoding="utf-8"))
    if "model_path" in summary:  # else it was stopped before its end
        read_back(job.folder.model_path(adapter=True), document, tokenizer=prepared.tokenizer, steps=summary["steps"])
    summary["backend"] = "unsloth"
    job.folder.write_json("summary.json", summary)
    return summary


def _document(job: Any, prepared: Any, exam: HandedOver, started: float) -> handover.Document:
    """Everything that Unsloth's process is told; the rows and the tokenizer are written beside it."""
    config, plan = job.loaded.config, job.plan
    work = job.folder.path.absolute() / WORK
    shutil.rmtree(work, ignore_errors=True)
    (work / "rows").mkdir(parents=True)
    prepared.tokenizer.tokenizer.save_pretrained(work / "tokenizer")
    parts = {"train": prepared.splits.train, "val": prepared.splits.val, "test": prepared.splits.test}
    folder = local_folder(config.model.name)
    peft = prepared.blueprint.peft_config
    return handover.Document(
        schema_version=handover.SCHEMA,
        sft_play=sft_play.__version__,
        folder=str(job.folder.path.absolute()),
        config_path=str(job.loaded.path),
        overrides=list(job.loaded.overrides),
        config=resolved(config, effective_batch=plan.batch.effective_batch),
        plan=plan.as_json(),
        resume=job.resume,
        started=started,
        timeout_s=job.timeout_s,
        tokenizer=str(work / "tokenizer"),
        own_template=prepared.tokenizer.own_template,
        splits={
            name: handover.write_rows(part.rows, work / "rows" / f"{name}.arrow")
            for name, part in parts.items()
            if part is not None
        },
        held_out=exam.held_out,
        asked=_asked(exam.asked),
        asked_while_training=_asked(exam.asked_while_training),
        stop_ids=list(exam.stop_ids),
        model=handover.Model(
            path=str(folder.absolute()) if folder is not None else config.model.name,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            dtype=plan.precision.compute,
            four_bit=config.tuning.mode == "qlora",
            max_seq_len=plan.max_seq_len,
        ),
        adapter=handover.Adapter(
            r=peft.r,
            lora_alpha=peft.lora_alpha,
            lora_dropout=float(peft.lora_dropout),
            target_modules=sorted(peft.target_modules),
            use_rslora=peft.use_rslora,
            tensors={
                name: list(shape)
                for name, shape in adapter_shapes(
                    prepared.blueprint, trust_remote_code=config.model.trust_remote_code
                ).items()
            },
        ),
    )


def _asked(questions: Sequence[Any]) -> list[handover.Asked]:
    return [handover.Asked(prompt_ids=list(one.prompt_ids), shown=one.shown, answer=one.answer) for one in questions]


def adapter_shapes(blueprint: Blueprint, *, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the adapter's file will hold, from a model without weights."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(blueprint.hf_config, trust_remote_code=trust_remote_code)
        return whole_shapes(get_peft_model(model, copy.deepcopy(blueprint.peft_config)))


def read_back(path: Path, document: handover.Document, *, tokenizer: Any, steps: int) -> None:
    """Look that the adapter is whole and the run's own, as PEFT here reads it, and write this side's tokenizer to it.

    Raises:
        ModelError: a tensor is missing, of another shape, not finite or never trained, or PEFT reads other settings.
    """
    from peft import PeftConfig

    adapter = document.adapter
    expected = {name: tuple(shape) for name, shape in adapter.tensors.items()}
    check_saved_weights(path, expected=expected, must_have_learned=steps > 1)
    read = PeftConfig.from_pretrained(str(path))
    wanted = {
        "r": adapter.r, "lora_alpha": adapter.lora_alpha, "use_rslora": adapter.use_rslora,
        "base_model_name_or_path": document.model.path,
    }  # fmt: skip
    differing = [f"{name}={getattr(read, name)!r} and not {value!r}" for name, value in wanted.items()
                 if getattr(read, name) != value]  # fmt: skip
    if differing:
        raise ModelError(f"{path}: the adapter that Unsloth wrote is not the run's: {'; '.join(differing)}")
    if tokenizer.own_template is not None:
        tokenizer.tokenizer.chat_template = tokenizer.own_template
    tokenizer.tokenizer.save_pretrained(path)


# --- the processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    error_file: Path


def _run(python: Path, document: Path, plan: Plan) -> None:
    """Start Unsloth's processes, wait for all, and raise how the first of them failed.

    The first signal is passed on, and they save and stop; a second one ends them at once.
    """
    workers: list[_Worker] = []
    asked: list[int] = []

    def pass_on(number: int) -> None:
        asked.append(number)
        logger.warning("%s: saving at the end of this step, then stopping", signal.Signals(number).name)
        _tell(workers, signal.SIGTERM)

    def end(number: int) -> None:
        asked.append(number)
        _tell(workers, signal.SIGKILL)

    with endings.StopSignals(pass_on, end):
        for number, place in enumerate(_places(plan)):
            workers.append(_start(python, document, number, place))
            if asked:
                _tell(workers[-1:], signal.SIGTERM)
        _wait(workers)
    _raise_first(workers, stopped=len(asked))


def _places(plan: Plan) -> Iterator[dict[str, str]]:
    """The variables of each process: those of torch's launcher, where there are several."""
    ranks = plan.choice.layout.ranks
    if ranks == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if not plan.hardware.gpus:
        common["OMP_NUM_THREADS"] = max(1, plan.hardware.cpu_cores // ranks)
    for rank in range(ranks):
        yield {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}


def _start(python: Path, document: Path, number: int, place: dict[str, str]) -> _Worker:
    error_file = document.parent / "ranks" / str(number) / "error.json"
    error_file.parent.mkdir(parents=True, exist_ok=True)
    told = {**worker_environment(os.environ), **place, failures.ERROR_FILE_VARIABLE: str(error_file)}
    environment = endings.ends_with_me(told, number=signal.SIGTERM)
    words = [str(python), str(WORKER), str(document)]
    return _Worker(subprocess.Popen(words, env=environment, start_new_session=True), error_file)


def _tell(workers: Sequence[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(number)


def _wait(workers: Sequence[_Worker]) -> None:
    """Until all have ended; those that one has left behind by failing are ended after PEER_S."""
    deadline: float | None = None
    while any(worker.process.poll() is None for worker in workers):
        failed = [worker for worker in workers if worker.process.poll() not in (None, 0, Interrupted.exit_code)]
        if deadline is None and failed:
            deadline = time.monotonic() + PEER_S
        if deadline is not None and time.monotonic() > deadline:
            _tell(workers, signal.SIGKILL)
        time.sleep(0.05)


def _raise_first(workers: Sequence[_Worker], *, stopped: int) -> None:
    """Raises what the first process that failed ended with; nothing where all ended well.

    A process whose connection broke, or that was ended, follows from another as long as there is another.
    """
    ended = [(worker.process.returncode, failures.read(worker.error_file)) for worker in workers]
    failed = [(code, own) for code, own in ended if code]
    if not failed:
        return
    code, own = min(failed, key=lambda one: (one[1] is None or one[1].kind == "peer", one[1].time if one[1] else 0.0))
    if stopped > 1 or (stopped and own is None):
        raise Interrupted("ended at once; what was saved until then is kept")
    if own is None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no word"
        more = " (out of memory? see dmesg)" if code == -signal.SIGKILL else ""
        raise BackendError(f"Unsloth's process {how}{more}; what was saved until then is kept")
    if own.kind == "stopped":
        raise Interrupted(own.message or "stopped by the user; what was saved until then is kept")
    kind = getattr(errors, own.name, None)
    if isinstance(kind, type) and issubclass(kind, SftPlayError):
        raise kind(own.message)
    raise RuntimeError(f"Unsloth's process ended with {own.name}: {own.message}; its traceback is above")
