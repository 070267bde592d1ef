"""A run from its plan to its summary: tokenizer, data, model, trainer, before, training, after."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from sft_play import runs
from sft_play.config.load import LoadedConfig, resolved
from sft_play.config.schema import RunConfig
from sft_play.data.build import content_digest_of
from sft_play.data.dataset import Split, Splits, build_splits
from sft_play.data.files import DataPaths
from sft_play.data.judge import first_lines
from sft_play.data.render import Renderer, show_row
from sft_play.environment import allocator_words
from sft_play.errors import BackendError, ConfigError, DoesNotFit, HardwareError, Interrupted, SftPlayError, in_stage
from sft_play.facts.architecture import check_available
from sft_play.facts.unseen import ON_CPU, torch_is_blind
from sft_play.log import escape_control, one_line, write_log_to
from sft_play.plan.margins import DESKTOP_BYTES
from sft_play.plan.plan import Plan
from sft_play.plan.show import precision_name
from sft_play.plan.states import loads_by_unit
from sft_play.runs import Lock, RunFolder
from sft_play.starter.names import CONFIG
from sft_play.train import checkpoints, context_parallel, engine, fsdp_loading, tensor_parallel
from sft_play.train.callbacks import GradientCheck, LossScaleCheck, MetricsFile, Progress, StopAfter, stopping
from sft_play.train.exact_match import Answer, Question, questions, stop_ids
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.load_memory import LoadMemory, LoadMeter
from sft_play.train.model import (
    Backend,
    Blueprint,
    choose_backend,
    draw_blueprint,
    fall_back,
    grown,
    load_model,
    read_model,
    save_model,
    weights_facts,
)
from sft_play.train.monitor import Monitor, expected_of
from sft_play.train.peaks import Highest, Peaks
from sft_play.train.portable import fill_adapter
from sft_play.train.rows import SOURCES, to_dataset
from sft_play.train.tokenizer import LoadedTokenizer, load_tokenizer
from sft_play.train.trainable import train_only, trainable_note
from sft_play.train.trainer import (
    PlannedLoop,
    build_trainer,
    check_trackers,
    training_arguments,
)
from sft_play.train.updates import Found, UpdateCheck

logger = logging.getLogger(__name__)

GIB = 2**30
SAMPLE_ANSWERS = 3
_OF_THE_MODEL = ("weights", "tokenizer")
"""Facts that all stages of a run share."""
_MUST_AGREE = ("sft_play", "torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")
"""Packages that compute on every rank: two versions would train two models."""
_NOT_FOR_RESUMING = ("output.name=", "output.if_exists=", "train.stop_after_steps=")
"""Overrides of a start that a command to go on with it leaves out."""


@dataclass(frozen=True)
class Job:
    """What a start was asked to do: the config, its plan, where its data is, its folder, whether it goes on."""

    loaded: LoadedConfig
    plan: Plan
    paths: DataPaths
    folder: RunFolder
    resume: bool
    log_buffer: MemoryHandler | None = None
    made: bool = False
    """Whether the folder was made by the parent that launched this rank."""
    mark: Lock | None = None
    """The folder's lock, where the start has it already."""
    by: int | None = None
    """Whose lock is taken otherwise: a parent that launched this rank has one too (`runs.lock`)."""
    deepspeed: Mapping[str, Any] | None = None
    """DeepSpeed's config, every value resolved."""
    timeout_s: float = 1800.0
    """Seconds after which ranks give up waiting for each other."""
    today: date = field(default_factory=date.today)
    """The day that a chat template is told which writes the date."""
    begins_from: Path | None = None
    """The folder of the weights that the stage before has trained; None begins from the model's own."""
    stages: tuple[Job, ...] = ()
    """The stages of a run that has some, each with settings, plan and folder of its own."""


@dataclass(frozen=True)
class Prepared:
    """Everything checked before a weight is read."""

    backend: Backend
    tokenizer: LoadedTokenizer
    splits: Splits
    blueprint: Blueprint
    renderer: Renderer
    exam: _Exam | None = None
    """What is judged, where another process has worked it out."""
    build: Callable[..., PlannedLoop] | None = None
    """What makes the trainer in place of `_trainer`."""


@dataclass
class Judged:
    """One evaluation of the held-out rows."""

    loss: float | None = None
    exact_match: float | None = None
    rows: int = 0
    answers: tuple[Answer, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """`before` or `after` of the summary."""
        return {"loss": self.loss, "exact_match": self.exact_match, "rows": self.rows}


def run(job: Job) -> dict[str, Any]:
    """Train as the job says and return its summary.

    Raises:
        SftPlayError: what the user can mend; a run folder that this start made and never used is removed again.
        Interrupted: the user stopped the run, and its state was saved.
    """
    return in_folder(job, (job,), lambda prepared, watch: until_memory_ends(job, prepared[0], watch))


Work = Callable[[Sequence[Prepared], "Watch"], dict[str, Any]]
"""What is done once everything is prepared and the run's folder is there: it returns the summary."""


def in_folder(job: Job, parts: Sequence[Job], work: Work) -> dict[str, Any]:
    """Prepare every part of a job, open its folder and do the work; raises as `run` does."""
    started = time.time()
    memory = MemoryMeter(job.plan)
    quiet_libraries()
    for part in parts:
        check_device(part.plan, part.loaded.config)
    largest = max(parts, key=lambda part: part.plan.memory.reserved + part.plan.memory.margin)
    if job.loaded.config.tuning.backend == "bnb":
        check_free_memory(largest.plan, largest.loaded.config)
    prepared = [_prepared(part) for part in parts]
    facts: dict[str, Any] = {}
    for part, made in zip(parts, prepared, strict=True):
        named = f"stage {part.folder.stage} " if part.folder.stage else ""
        found = _data_facts(part.paths, made, part.loaded.config.model.name)
        facts |= {name if name in _OF_THE_MODEL else f"{named}{name}": fact for name, fact in found.items()}
    if prepared[0].backend.name == "unsloth":  # its own process looks at the GPU
        alone = Watch(memory, Heartbeat(0.0), started)
        return _first_rank(job, prepared, facts, lambda: _on_unsloth(job, prepared[0], alone))
    if prepared[0].backend.fallback_from:
        check_free_memory(largest.plan, largest.loaded.config)
    with (
        engine.process_group(job.plan, timeout_s=job.timeout_s, deepspeed=job.deepspeed is not None),
        Heartbeat(job.timeout_s) as beat,
    ):
        engine.require_alike(_digests(job, facts, writes_date=prepared[0].renderer.writes_date))
        watch = Watch(memory, beat, started)
        if not engine.is_first():
            engine.barrier()  # rank 0 makes the folder, or says why it cannot
            return work(prepared, watch)
        return _first_rank(job, prepared, facts, lambda: work(prepared, watch))


def _prepared(part: Job) -> Prepared:
    """A part of a job, prepared; what is refused of a stage names it."""
    if part.folder.stage is not None:
        logger.info("Stage %s:", part.folder.stage)
    with in_stage(part.folder.stage):
        return prepare(part)


@dataclass(frozen=True)
class Watch:
    """What is kept while a run goes on: the peak of memory, signs of life, when it started (seconds since 1970)."""

    memory: MemoryMeter
    beat: Heartbeat
    started: float


def _first_rank(job: Job, prepared: Sequence[Prepared], facts: dict[str, Any], work: Callable[[], Any]) -> Any:
    """The run as the only process, or rank 0, sees it: it owns the folder and the log."""
    with _open_folder(job, prepared, facts):
        log_file = write_log_to(job.folder.log_path, buffer=job.log_buffer)
        try:
            engine.barrier()
            return work()
        except BaseException as error:
            ran_out = isinstance(error.__cause__, torch.OutOfMemoryError)
            _record_failure(job, error.__cause__ if ran_out and error.__cause__ else error)
            raise
        finally:
            logging.getLogger().removeHandler(log_file)
            log_file.close()


def _on_unsloth(job: Job, prepared: Prepared, watch: Watch) -> dict[str, Any]:
    """Train in Unsloth's own process what was prepared here."""
    from sft_play.train import bridge

    exam = _exam(job, prepared)
    asks = exam.asked or exam.asked_while_training
    stops = stop_ids(prepared.tokenizer.tokenizer, None, prepared.renderer) if asks else []
    handed = bridge.HandedOver(exam.name, exam.asked, exam.asked_while_training, stops)
    return bridge.train(job, prepared, handed, started=watch.started)


def until_memory_ends(job: Job, prepared: Prepared, watch: Watch) -> dict[str, Any]:
    """Train; raises DoesNotFit where the GPU's memory runs out on the way."""
    try:
        return _train_and_judge(job, prepared, watch)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(_out_of_memory_message(job, error)) from error


def _out_of_memory_message(job: Job, error: BaseException) -> str:
    """What ran out, what had been predicted, and what to do: the plan was wrong, or the memory is someone else's."""
    batch = job.plan.batch.micro_batch
    smaller = f"train.batch_size={batch // 2}" if batch > 1 else "a shorter model.max_seq_len"
    return (
        f"the GPU's memory ran out ({one_line(str(error), limit=300)}); predicted were "
        f"{job.plan.memory.required / GIB:.1f} of {job.plan.budget_bytes / GIB:.1f} GiB with micro-batch {batch}. "
        f"See with nvidia-smi whether another process took memory meanwhile; try {smaller}"
    )


def prepare(job: Job) -> Prepared:
    """Tokenizer, data and the model's shapes, every choice logged; nothing is written."""
    config, plan = job.loaded.config, job.plan
    backend = choose_backend(
        config,
        layout=plan.layout,
        nodes=plan.hardware.nodes,
        launched="RANK" in os.environ,
        staged=job.folder.stage is not None,
    )
    if backend.fallback_from:
        logger.warning("Backend: %s", backend.reason)
    if backend.name == "bnb":
        check_trackers(config)
    check_available(config.model.name, revision=config.model.revision)
    tokenizer = load_tokenizer(config)
    _say(tokenizer.notes)
    blueprint = draw_blueprint(
        config, plan.precision, tokenizer_size=len(tokenizer.tokenizer), layout=plan.choice.layout,
        repeats_kv=plan.repeats_kv,
    )  # fmt: skip
    backend = _for_model(backend, blueprint, job)
    splits = build_splits(
        config,
        job.paths,
        tokenizer.tokenizer,
        max_seq_len=plan.max_seq_len,
        positions=_positions(blueprint.hf_config),
        today=job.today,
    )
    _say(splits.notes)
    if config.train.load_best_model_at_end and splits.val is None:
        raise ConfigError("train.load_best_model_at_end=true needs validation rows: give data.val_path or val_fraction")
    for name, split in (("train", splits.train), ("val", splits.val), ("test", splits.test)):
        _say(split.report.lines(name) if split else [])
    count, effective = len(splits.train.rows), plan.batch.effective_batch
    if count < effective:
        logger.warning(
            "Data train: %d rows are fewer than one effective batch of %d: a step sees them all", count, effective
        )
    row = one_line(show_row(splits.train.first(), tokenizer.tokenizer), limit=2_000)
    logger.info("First training row, trained part in [[ ]]: %s", row)
    trained = trainable_note(config, blueprint)
    blueprint = replace(blueprint, notes=(*blueprint.notes, *([trained] if trained else [])))
    _say(blueprint.notes)
    renderer = Renderer(tokenizer.tokenizer, config.data, max_seq_len=plan.max_seq_len, today=job.today)
    for source in job.paths.sources or (None,):
        path = job.paths.train if source is None else source.train
        lines = first_lines(path, renderer, tokenizer.tokenizer, task_mode=config.task_mode)
        _say(lines if source is None else [f"Source {source.name}: {line}" for line in lines])
    return Prepared(backend, tokenizer, splits, blueprint, renderer)


def _for_model(backend: Backend, blueprint: Blueprint, job: Job) -> Backend:
    """The backend once the model's class is known; raises BackendError like `choose_backend`."""
    if backend.name != "unsloth":
        return backend
    from sft_play.train import bridge

    problem = bridge.model_problem(blueprint, job.plan.precision)
    if problem is None:
        return backend
    if job.plan.choice.layout.ranks > 1:  # this process would have to be one of several
        raise BackendError(f"tuning.backend=unsloth cannot run here: {problem}; use tuning.backend=bnb")
    backend = fall_back(job.loaded.config, problem)
    logger.warning("Backend: %s", backend.reason)
    check_trackers(job.loaded.config)
    return backend


def _positions(hf_config: Any) -> int | None:
    """The most positions that the model has; None where it has no limit."""
    found = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _say(lines: Any) -> None:
    for line in lines:
        logger.info("%s", line)


def _data_facts(paths: DataPaths, prepared: Prepared, model: str) -> dict[str, Any]:
    """Path, digest and report of each file that is used, and digests of the base weights and the tokenizer."""
    hf_config = prepared.blueprint.hf_config
    facts: dict[str, Any] = {}
    for name, path in paths.files():
        facts[name] = {"path": str(path), "sha256": content_digest_of(path)}
    for name, split in (
        ("train", prepared.splits.train),
        ("val", prepared.splits.val),
        ("test", prepared.splits.test),
    ):
        if split is not None:
            facts.setdefault(name, {})["report"] = vars(split.report)
    facts["weights"] = weights_facts(model, hf_config)
    facts["tokenizer"] = {"path": "tokenizer", "sha256": prepared.tokenizer.sha256}
    return facts


def _digests(job: Job, facts: dict[str, Any], *, writes_date: bool) -> dict[str, str]:
    """What has to be alike on every rank, since each reads it from its own disk, as short texts."""
    versions = runs.versions()
    files = {name: str(fact.get("sha256"))[:12] for name, fact in facts.items() if "sha256" in fact}
    settings = _without_paths(resolved(job.loaded.config))
    return {
        **{
            f"the {name}" if name in _OF_THE_MODEL else f"the content of the {name} file": text
            for name, text in files.items()
        },
        **({"the day that the chat template writes": str(job.today)} if writes_date else {}),
        "the settings of the run": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
        **{f"the version of {name}": str(versions[name]) for name in _MUST_AGREE},
    }


def _without_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without where things lie: nodes may keep the same files in different places."""
    kept = {key: value for key, value in settings.items() if key != "output"}
    kept["model"] = {key: value for key, value in kept["model"].items() if key != "name"}
    kept["data"] = _data_without_paths(kept["data"])
    kept["curriculum"] = [{**stage, "data": _data_without_paths(stage["data"])} for stage in kept["curriculum"]]
    return kept


def _data_without_paths(data: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if not key.endswith("_path")}
    sources = [
        {key: value for key, value in one.items() if not key.endswith("path")} for one in data.get("sources", ())
    ]
    return {**kept, "sources": sources}


def batch_facts(plan: Plan) -> dict[str, int]:
    """The batch arithmetic that a resumed run must share."""
    return {"micro_batch": plan.batch.micro_batch, "grad_accum": plan.batch.grad_accum, "ranks": plan.batch.ranks}


def spread_facts(plan: Plan) -> dict[str, Any]:
    """What a manifest says of how a run is spread: batch, layout, and processes, those that share rows too."""
    return {"batch": batch_facts(plan), "layout": plan.layout, "processes": plan.choice.layout.ranks}


def _open_folder(job: Job, prepared: Sequence[Prepared], facts: dict[str, Any]) -> Lock:
    """Make the run folder, or check that the one to go on with was made with the same settings; returns its lock."""
    if job.resume:
        mark = job.mark or runs.lock(job.folder, by=job.by)
        runs.check_same_run(
            job.folder, job.loaded, data=facts, batch=batch_facts(job.plan), backend=prepared[0].backend.name
        )
        resumed = [*job.folder.manifest().get("resumed", []), datetime.now(UTC).isoformat(timespec="seconds")]
        job.folder.update_manifest(status="running", resumed=resumed, **spread_facts(job.plan))
        return mark
    manifest = runs.new_manifest(job.loaded, hardware=job.plan.hardware.as_json(), data=facts)
    manifest |= spread_facts(job.plan)
    manifest["backend"] = prepared[0].backend.name
    parts = job.stages or (job,)
    manifest["choices"] = [
        line for part, made in zip(parts, prepared, strict=True) for line in _choices(part, made)
    ]  # fmt: skip
    if prepared[0].renderer.writes_date:
        manifest["template_date"] = str(prepared[0].renderer.today)
    if job.made:
        mark = runs.lock(job.folder, by=job.by)
        job.folder.update_manifest(**manifest)
        return mark
    mark = runs.create(job.folder, job.loaded, manifest=manifest, plan=job.plan.as_json())
    if job.deepspeed is not None:
        job.folder.write_json(runs.DEEPSPEED_FILE, job.deepspeed)
    return mark


def _choices(job: Job, prepared: Prepared) -> list[str]:
    """Everything that was chosen for the user, for the record."""
    fallback = [f"Backend: {prepared.backend.reason}"]
    return [*fallback, *job.plan.reasons, *prepared.tokenizer.notes, *prepared.splits.notes, *prepared.blueprint.notes]


@dataclass(frozen=True)
class _Exam:
    """What is judged: the held-out split before and after, by loss and by the answers to questions."""

    split: Split | None
    name: str
    asked: list[Question]
    asked_while_training: list[Question]


def _train_and_judge(job: Job, prepared: Prepared, watch: Watch) -> dict[str, Any]:
    checkpoint = _checkpoint(job)
    watch.memory.peaks.forget()
    shared = engine.require_disk(job.folder.manifest_path, job.plan)
    _announce(job, prepared, checkpoint)
    exam = prepared.exam or _exam(job, prepared)
    if engine.is_first():
        kept = checkpoints.step_of(checkpoint) if checkpoint else -1
        runs.keep_metrics_until(job.folder.metrics_path, kept, stage=job.folder.stage)
    stop = StopAfter(job.loaded.config.train.stop_after_steps)
    progress = Progress(tokens=lambda: trainer.tokens_seen)
    loading = LoadMeter(job.plan)
    proof = engine.ProveEngine(job.plan, loading.stop) if job.plan.layout != "single" or job.deepspeed else None
    judging = _JudgeBefore(lambda: _before(job, trainer, exam, resumed=checkpoint is not None))
    updates = UpdateCheck(job.plan.precision.updates)
    watching = [GradientCheck(), LossScaleCheck(), updates, _metrics_of(job, watch), progress, stop]
    if proof is not None:
        watching = [proof, judging, *watching]  # judged before the clock starts
    with loading:
        trainer = (prepared.build or _trainer)(job, prepared, exam, watch, callbacks=watching, checkpoint=checkpoint)
    trainer.in_parts = shared and job.plan.memory.checkpoint == "sharded"
    _say_parameters(trainer.model)
    updates.trainer = trainer
    if proof is None:
        loading.stop()
        judging.judge()
    else:  # what an engine makes of the model is there once training has begun
        proof.trainer = trainer
    try:
        with stopping(stop):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        progress.close()
    speed = engine.total(trainer.tokens_seen) / job.plan.choice.layout.tensor_parallel / progress.training_s
    measured = watch.memory.peak()
    watch.memory.peaks.end()
    after = None if stop.stopped_early else _judge(trainer, exam.split, exam.name, exam.asked)
    watch.beat.note(trainer.state.global_step, "saving what was trained")
    result = _Result(
        judging.found, after, measured, watch.memory.by_moment(), speed, trainer.state.global_step,
        time.time() - watch.started, stop, exam.name, proof.proof if proof else engine.proof_of_one(trainer),
        updates.found, loading.found,
    )  # fmt: skip
    summary = _finish(job, prepared, trainer, result, watch.memory)
    if job.folder.stage is not None:  # another model is loaded into this process
        engine.release(trainer)
    return summary


def _metrics_of(job: Job, watch: Watch) -> MetricsFile:
    return MetricsFile(job.folder.metrics_path, started=watch.started, stage=job.folder.stage)


def _exam(job: Job, prepared: Prepared) -> _Exam:
    split, name = _held_out(prepared.splits)
    asked = _questions(job, prepared, split)
    return _Exam(split, name, asked, asked if name == "val" else _questions(job, prepared, prepared.splits.val))


def _trainer(
    job: Job,
    prepared: Prepared,
    exam: _Exam,
    watch: Watch,
    *,
    callbacks: list[TrainerCallback],
    checkpoint: Path | None,
) -> PlannedLoop:
    """The trainer with its model loaded; the arguments come first, since they make the process group's devices."""
    config, plan, blueprint = job.loaded.config, job.plan, prepared.blueprint
    tokenizer = prepared.tokenizer.tokenizer
    arguments = training_arguments(
        config,
        plan,
        job.folder,
        has_eval=prepared.splits.val is not None,
        engine=engine.engine_arguments(plan, config, layer_class=blueprint.layer_class, deepspeed=job.deepspeed),
    )
    engine.allow_fsdp_on_cpu(plan)
    context_parallel.join_group(plan.choice.layout, arguments.device)
    model, source = _model(job, blueprint)
    asks = bool(exam.asked or exam.asked_while_training)
    trainer = build_trainer(
        config,
        plan,
        job.folder,
        arguments=arguments,
        model=model,
        tokenizer=tokenizer,
        peft_config=blueprint.peft_config,
        train=prepared.splits.train,
        sources=prepared.splits.sources,
        evaluation=prepared.splits.val,
        callbacks=callbacks,
        resume_step=checkpoints.step_of(checkpoint) if checkpoint else 0,
        questions=exam.asked_while_training,
        stop_ids=stop_ids(tokenizer, model, prepared.renderer) if asks else (),
        max_new_tokens=config.eval.max_new_tokens,
        answer_tokens=plan.answer_tokens,
        beat=watch.beat,
        monitor=Monitor(
            expected_of(plan),
            on_gpu=plan.hardware.device == "cuda",
            level_bytes=watch.memory.level,
            copies=plan.choice.layout.tensor_parallel,
            sources=prepared.splits.sources.names if prepared.splits.sources else SOURCES,
            peaks=watch.memory.peaks,
        ),
    )
    _fit_model(job, blueprint, trainer, source)
    return trainer


def _fit_model(job: Job, blueprint: Blueprint, trainer: PlannedLoop, source: fsdp_loading.Source | None) -> None:
    """What is done to a model that has its adapters: filled, frozen, and divided last, since only whole tensors can be
    filled."""
    widens = job.plan.precision.compute != "float32"
    if job.begins_from is not None and blueprint.peft_config is not None:
        fill_adapter(trainer.model, job.begins_from)
    train_only(trainer.model, job.loaded.config.tuning.trainable)
    if blueprint.tensor_plan:
        tensor_parallel.divide(
            trainer.model,
            blueprint.tensor_plan,
            trainer.accelerator.torch_device_mesh["tp"],
            device=trainer.args.device,
            masters=widens,
        )
    if source is not None:
        in_fp32 = widens and job.loaded.config.tuning.mode != "qlora"
        fsdp_loading.shard(trainer, source, layer_class=blueprint.layer_class, in_fp32=in_fp32)


def _model(job: Job, blueprint: Blueprint) -> tuple[Any, fsdp_loading.Source | None]:
    """The model with its weights, or without them and their source, where it is divided as they arrive: the base, or
    every weight as the stage before has left it."""
    config, plan = job.loaded.config, job.plan
    if job.begins_from is not None and blueprint.peft_config is None:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"name": str(job.begins_from), "revision": None})}
        )
        blueprint = grown(blueprint)
    device, storage = engine.device_of(plan, config), engine.quant_storage(plan, config)
    if loads_by_unit(config, plan.choice.layout) and getattr(blueprint.hf_config, "quantization_config", None) is None:
        return fsdp_loading.load_for_sharding(
            config, plan.precision, blueprint, storage=storage,
            read=lambda: read_model(config, plan.precision, blueprint),
        )  # fmt: skip
    return load_model(config, plan.precision, blueprint, device=device, storage=storage), None


def _checkpoint(job: Job) -> Path | None:
    """The checkpoint to go on from: the last complete one that rank 0 sees, which every rank has to see too."""
    if not job.resume:
        return None
    folder = job.folder.checkpoints
    _say(checkpoints.damage(folder))
    name = engine.of_first([path.name for path in checkpoints.complete_ones(folder)][-1:])
    found = folder / name[0] if name else None
    engine.require_all(
        found is None or checkpoints.is_complete(found),
        f"the checkpoint {found} is not there, or not whole; every node reads it: copy the run folder to this node, or "
        "write to a disk that all nodes share",
    )
    return found


class _JudgeBefore(TrainerCallback):
    """The figures before training: at once, or when training begins."""

    def __init__(self, judge: Callable[[], Judged | None]) -> None:
        self._judge = judge
        self.found: Judged | None = None

    def judge(self) -> None:
        """Take the figures."""
        self.found = self._judge()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Take them now."""
        self.judge()


def _announce(job: Job, prepared: Prepared, checkpoint: Path | None) -> None:
    ranks = job.plan.choice.layout.ranks
    cpu = job.plan.hardware.shared_gpu or "the CPU"
    where = f"{ranks} GPU{'s' if ranks != 1 else ''}" if job.plan.hardware.gpus else cpu
    where += f" ({ranks} ranks, {job.plan.layout})" if ranks > 1 else ""
    precision, backend = precision_name(job.plan), prepared.backend.name
    if checkpoint is not None:
        logger.info("Resuming %s run from step %d with %s precision on %s",
                    backend, checkpoints.step_of(checkpoint), precision, where)  # fmt: skip
    elif job.resume:
        logger.info("%s has no complete checkpoint: starting it again from the first step", job.folder.path)
    else:
        logger.info("Starting new %s run with %s precision on %s", backend, precision, where)
    logger.info("Run folder: %s", job.folder.path)
    logger.info("Learning rate: %g (%s)", job.loaded.config.learning_rate, job.loaded.config.train.lr_scheduler_type)


def _say_parameters(model: Any) -> None:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("Trainable parameters: %s", f"{trained:,}")


def _held_out(splits: Splits) -> tuple[Split | None, str]:
    """The split of the figures before and after: test where there is one, else validation."""
    return (splits.test, "test") if splits.test is not None else (splits.val, "val")


def _questions(job: Job, prepared: Prepared, split: Split | None) -> list[Question]:
    config = job.loaded.config.eval
    if split is None or config.generate_rows == 0:
        return []
    asked = questions(split, prepared.renderer, config, max_seq_len=job.plan.max_seq_len)
    if not asked:
        logger.info("No held-out row ends with an answer that could be generated: exact match is not measured")
    return asked


def _before(job: Job, trainer: PlannedLoop, exam: _Exam, *, resumed: bool) -> Judged | None:
    """The figures before training; a run that goes on from a checkpoint has those of its first start."""
    if not job.loaded.config.eval.before_training or exam.split is None:
        return None
    if resumed:
        kept = engine.of_first(job.folder.manifest().get("before") if engine.is_first() else None)
        return Judged(kept["loss"], kept["exact_match"], kept["rows"]) if kept else None
    before = _judge(trainer, exam.split, exam.name, exam.asked)
    assert before is not None
    if engine.is_first():
        job.folder.update_manifest(before=before.as_json())
    return before


def _judge(trainer: PlannedLoop, split: Split | None, name: str, asked: list[Question]) -> Judged | None:
    """Loss and exact match of the held-out rows as the model stands."""
    if split is None:
        return None
    prefix = "test" if name == "test" else "eval"
    if name == "val" and _was_just_judged(trainer):
        metrics = trainer.last_metrics[1]
        return Judged(
            metrics["eval_loss"], metrics.get("eval_exact_match"), len(split.rows), tuple(trainer.last_answers)
        )
    answers_too = f", with {len(asked):,} answers generated" if asked else ""
    logger.info("Evaluation on %s: %s rows%s", name, f"{len(split.rows):,}", answers_too)
    own = trainer.ask(asked)
    metrics = trainer.evaluate(to_dataset(split.rows), metric_key_prefix=prefix)
    answers = tuple(trainer.last_answers) if asked else ()
    trainer.ask(own)
    return Judged(metrics[f"{prefix}_loss"], metrics.get(f"{prefix}_exact_match"), len(split.rows), answers)


def _was_just_judged(trainer: PlannedLoop) -> bool:
    """Whether training ended with an evaluation of the validation rows by the very weights that are kept."""
    step, _ = trainer.last_metrics
    return step == trainer.state.global_step > 0 and not trainer.args.load_best_model_at_end


@dataclass(frozen=True)
class _Result:
    """What a start came to."""

    before: Judged | None
    after: Judged | None
    peak_bytes: dict[str, int | None]
    by_moment: dict[str, dict[str, int | None]]
    tokens_per_s: float
    steps: int
    wall_s: float
    stop: StopAfter
    split: str
    proof: engine.Proof | None = None
    updates: Found | None = None
    loading: LoadMemory | None = None

    @property
    def exit_code(self) -> int:
        """130 where a signal stopped it."""
        return Interrupted.exit_code if self.stop.signal is not None and self.stop.stopped_early else 0

    @property
    def status(self) -> str:
        """How the manifest says that it ended."""
        return "stopped" if self.stop.stopped_early else "finished"


def _finish(job: Job, prepared: Prepared, trainer: PlannedLoop, result: _Result, memory: MemoryMeter) -> dict[str, Any]:
    """Save what was trained, write and say the summary; raises Interrupted where the user stopped the run."""
    summary = _summary(result)
    summary["engine_proof"] = result.proof.as_json() if result.proof else None
    summary["updates"] = result.updates.as_json() if result.updates else None
    summary["loading"] = result.loading.as_json() if result.loading else None
    summary["evaluations"] = []
    if engine.is_first():
        summary["evaluations"] = runs.evaluations(job.folder.metrics_path, stage=job.folder.stage)
    summary["predicted_tokens_per_s"] = round(job.plan.speed.tokens_per_s, 2) if job.plan.speed_known else None
    if result.status == "finished":
        path = job.folder.model_path(adapter=prepared.blueprint.peft_config is not None)
        with memory.peaks.during("saving"):
            _save_trained(prepared, trainer, path, steps=result.steps)
        summary["peak_bytes_by_moment"] = memory.by_moment()
        summary["model_path"] = str(path)
    if not engine.is_first():
        engine.barrier()  # rank 0 has written how the run ended: an early leave would have the launcher end it
        if result.exit_code:
            raise Interrupted(f"stopped at step {result.steps}, state saved by rank 0")
        return summary
    job.folder.write_json("summary.json", summary)
    job.folder.update_manifest(status=result.status, ended=datetime.now(UTC).isoformat(timespec="seconds"))
    _say(summary_lines(job, result, summary))
    engine.barrier()
    if result.exit_code:
        raise Interrupted(f"stopped at step {result.steps}, state saved; go on with: {resume_command(job)}")
    return summary


def _save_trained(prepared: Prepared, trainer: PlannedLoop, path: Path, *, steps: int) -> None:
    """Save the adapter or the whole model on the first rank; the others help to gather it, and wait for the disk."""
    is_adapter = prepared.blueprint.peft_config is not None
    native = prepared.blueprint.is_text_tower and not is_adapter
    dtype = None if is_adapter else prepared.blueprint.dtype
    model = trainer.accelerator.unwrap_model(trainer.model)
    with trainer.writing(path.parent):
        one_by_one = trainer.is_fsdp_enabled and not is_adapter
        tensors = engine.whole_tensors(trainer.model) if one_by_one else None
        state = None if one_by_one else engine.whole_state(trainer, in_fp32=dtype is torch.float32)
        if engine.is_first():
            if prepared.tokenizer.own_template is not None:
                prepared.tokenizer.tokenizer.chat_template = prepared.tokenizer.own_template
            learns = any(weight.requires_grad for name, weight in model.named_parameters() if "lora_B" in name)
            save_model(
                model, prepared.tokenizer.tokenizer, path, native_names=native, state_dict=state, tensors=tensors,
                dtype=dtype, steps=steps if learns else 0, moved=trainer.beat.moved,
            )  # fmt: skip
        else:
            for _ in tensors or ():
                pass
    trainer.wait_for_disk()


def _summary(result: _Result) -> dict[str, Any]:
    return {
        "status": result.status,
        "split": result.split,
        "before": result.before.as_json() if result.before else None,
        "after": result.after.as_json() if result.after else None,
        "peak_bytes": result.peak_bytes,
        "peak_bytes_by_moment": result.by_moment,
        "tokens_per_s": round(result.tokens_per_s, 2),
        "steps": result.steps,
        "wall_s": round(result.wall_s, 2),
        "exit": result.exit_code,
    }


def summary_lines(job: Job, result: _Result, summary: dict[str, Any]) -> list[str]:
    """The end of a run in words: figures before and after, sample answers, memory, speed, where, what next."""
    predicted = f" ({job.plan.speed.tokens_per_s:,.0f} predicted)" if job.plan.speed_known else ""
    lines = [
        f"Steps: {result.steps} in {result.wall_s:.0f} s; {result.tokens_per_s:,.0f} tokens/s in training{predicted}"
    ]
    lines += _judged_lines(result)
    lines += _answer_lines(result.before, result.after)
    lines += [_memory_line(result.peak_bytes), _moments_line(result.by_moment)]
    lines.append(f"Written to: {job.folder.path}")
    if result.status == "stopped":
        return [*lines, f"Stopped early; go on with: {resume_command(job)}"]
    lines.append(f"Trained weights: {summary['model_path']}")
    return lines if job.folder.run is not None else [*lines, *_next_lines(job)]


def _judged_lines(result: _Result) -> list[str]:
    lines = []
    for what, attribute, form in (("loss", "loss", "{:.4f}"), ("exact match", "exact_match", "{:.1%}")):
        values = [getattr(judged, attribute) if judged else None for judged in (result.before, result.after)]
        if any(value is not None for value in values):
            shown = [form.format(value) if value is not None else "not measured" for value in values]
            rows = (result.after or result.before or Judged()).rows
            lines.append(f"Held-out {what} ({result.split}, {rows} rows): {shown[0]} before, {shown[1]} after")
    return lines


def _answer_lines(before: Judged | None, after: Judged | None) -> list[str]:
    lines = []
    old = {answer.question.shown: answer.said for answer in before.answers} if before else {}
    for answer in (after.answers if after else ())[:SAMPLE_ANSWERS]:
        lines.append(f"Asked: {one_line(answer.question.shown)}")
        if answer.question.shown in old:
            lines.append(f"  before: {one_line(old[answer.question.shown])}")
        mark = "right" if answer.right else f"expected: {one_line(answer.question.answer)}"
        lines.append(f"  after:  {one_line(answer.said)}  ({mark})")
    return lines


def _memory_line(peak: dict[str, int | None]) -> str:
    def show(value: int | None) -> str:
        return f"{value / GIB:.2f} GiB" if value is not None else "not measured"

    if "measured_rss" in peak:
        return (
            f"Peak memory: {show(peak['predicted_allocated'])} of tensors predicted, "
            f"{show(peak['predicted_reserved'])} resident; {show(peak['measured_rss'])} resident measured"
        )
    return (
        f"Peak memory: {show(peak['predicted_allocated'])} predicted, {show(peak['measured_allocated'])} measured "
        f"(allocated); {show(peak['predicted_reserved'])} predicted, {show(peak['measured_reserved'])} measured "
        "(reserved)"
    )


def _moments_line(found: Mapping[str, Mapping[str, int | None]]) -> str:
    """The measured peak of each moment, beside its prediction where there is one of the same kind."""
    said = []
    for moment, peak in found.items():
        measured, predicted = peak.get("measured_allocated"), peak["predicted_allocated"]
        beside = f" ({predicted / GIB:.2f} predicted)" if measured is not None and predicted is not None else ""
        measured = peak.get("measured_rss") if measured is None else measured
        said.append(f"{moment} " + (f"{measured / GIB:.2f} GiB{beside}" if measured is not None else "not measured"))
    return f"Peak memory by moment: {', '.join(said)}"


def resume_command(job: Job) -> str:
    """The command that goes on with this run, with the settings that it was started with."""
    words = ["make", "resume", f"CONFIG={job.loaded.path}", f"RUN={job.folder.whole.path.name}"]
    kept = [word for word in job.loaded.overrides if not word.startswith(_NOT_FOR_RESUMING)]
    if kept:
        words.append(f"SET={shlex.join(kept)}")
    return shlex.join(words)


def _next_lines(job: Job) -> list[str]:
    """What to try next."""
    lines = []
    if "tensorboard" in job.loaded.config.train.report_to:
        lines.append(f"See the curves: make tensorboard RUN={job.folder.path}")
    if Path(job.loaded.path).name == Path(CONFIG).name:
        lines.append('Try next: make train CONFIG=configs/run_bnb.yaml SET="data.train_path=…" (your own data)')
    return lines


def _record_failure(job: Job, error: BaseException) -> None:
    """Note in the manifest how the run broke; remove a new folder in which nothing was trained."""
    if isinstance(error, Interrupted):
        return
    unused = not job.resume and isinstance(error, SftPlayError) and not job.folder.metrics_path.exists()
    if unused:
        runs.discard(job.folder)
        return
    kind = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    job.folder.update_manifest(status=kind, error=escape_control(f"{type(error).__name__}: {error}"))


class MemoryMeter:
    """Predicted and measured peaks of a run: torch's counters on a GPU, resident memory on a CPU."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.level = psutil.Process().memory_info().rss
        """Resident bytes before anything of the run was loaded."""
        self.peaks = Peaks(on_gpu=plan.hardware.device == "cuda", level_bytes=self.level)

    def peak(self) -> dict[str, int | None]:
        """`peak_bytes` of the summary: the training steps' own."""
        return {
            "predicted_allocated": self._plan.memory.allocated,
            "measured_allocated": None,
            "predicted_reserved": self._plan.memory.reserved,
            "measured_reserved": None,
            **self._measured(self.peaks.highest("training")),
        }

    def by_moment(self) -> dict[str, dict[str, int | None]]:
        """`peak_bytes_by_moment` of the summary: predicted bytes of tensors and measured ones of each moment."""
        predicted = self._plan.memory.moments
        steps = [size for name, size in predicted.items() if name not in ("evaluation", "saving")]
        known = {**predicted, "training": max(steps, default=None)}
        return {
            moment: {"predicted_allocated": known.get(moment), **self._measured(highest)}
            for moment, highest in self.peaks.by_moment().items()
        }

    def _measured(self, highest: Highest | None) -> dict[str, int | None]:
        if not self.peaks.on_gpu:
            return {"measured_rss": highest.allocated if highest else None}
        if highest is None:
            return {}
        return {"measured_allocated": highest.allocated, "measured_reserved": highest.reserved}


def check_device(plan: Plan, config: RunConfig) -> None:
    """Raises HardwareError where the driver shows a GPU that torch cannot use, or torch one that nobody planned for."""
    planned = plan.hardware.device
    if planned == "cuda" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if planned == "cuda" and not torch.cuda.is_available():
        raise HardwareError(torch_is_blind(plan.hardware.gpus[0].name, _said_by_torch()))
    if planned == "mps" and not torch.backends.mps.is_available():
        raise HardwareError(
            f"this Mac has {plan.hardware.shared_gpu}, and torch {torch.__version__} cannot use it (a build without "
            f"MPS, Python for Intel, or macOS before 14): take a Python for arm64, then make setup; or {ON_CPU}"
        )
    if planned == "cpu" and config.train.device == "auto" and torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        raise HardwareError(
            f"torch {torch.__version__} sees an accelerator ({found}), and the run was planned for the CPU, since no "
            f"driver's tool shows a GPU that runs are planned for (make gpu-info): {ON_CPU}"
        )


def _said_by_torch() -> str:
    """Why torch cannot use a GPU, in its own words."""
    try:
        torch.cuda.init()
    except Exception as error:  # its kinds differ between builds
        return str(error)
    return "it finds none"


def check_free_memory(plan: Plan, config: RunConfig) -> None:
    """Look at what the driver says is free once this process's CUDA context is there, before anything is loaded.

    Raises:
        DoesNotFit: less is free than the plan needs, and the batch was left to the plan.
    """
    if plan.hardware.device != "cuda":
        return
    torch.zeros(1, device="cuda")  # makes the context
    free, total = torch.cuda.mem_get_info()
    need = plan.memory.reserved + plan.memory.margin
    logger.info("GPU memory: %.1f GiB free after the CUDA context, %.1f planned", free / GIB, need / GIB)
    if plan.hardware.pages:
        _stop_at(min(free + torch.cuda.memory_reserved(), plan.budget_bytes) - DESKTOP_BYTES, total)
    logger.info("%s", allocator_words(os.environ))
    if need <= free:
        return
    message = (
        f"{need / GIB:.1f} GiB are planned and {free / GIB:.1f} are free on the GPU now: another process took memory "
        "since the plan was made; end it (nvidia-smi lists them) and start again"
    )
    if config.train.batch_size == "auto" and config.train.grad_accum == "auto":
        raise DoesNotFit(message)
    logger.warning("%s; going on because the batch was given", message)


def _stop_at(limit: int, total: int) -> None:
    """Have torch raise its out-of-memory error at so many bytes of `total`: Windows' driver would move GPU memory to
    the host's, where a step takes many times as long, and say nothing."""
    limit = max(0, min(limit, total))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    logger.info(
        "WSL: this process may take %.1f GiB of the GPU and runs out of memory there; beyond it Windows' driver would "
        "go on in the host's memory, many times as slow (%.1f GiB of what is free are left to the desktop)",
        limit / GIB, DESKTOP_BYTES / GIB,
    )  # fmt: skip


def quiet_libraries() -> None:
    """Silence what a user cannot act on: renamings inside the libraries, bars where there is no terminal."""
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    for kind in (FutureWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category=kind)
    warnings.filterwarnings("ignore", message="Slicing a flattened dim")  # accelerate's way to its mesh, for torch 2.11
    disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
