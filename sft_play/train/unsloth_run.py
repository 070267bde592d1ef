"""A run on Unsloth: its model and adapters in this project's own training loop, on the rows that were handed over.

Runs in Unsloth's environment, with Unsloth imported already. The loop is `PlannedLoop` on transformers' Trainer, not on
TRL's: order of rows, filling, evaluation, checkpoints and metrics are those of every other run.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback, TrainingArguments

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.dataset import Split, Splits
from sft_play.errors import BackendError, ConfigError
from sft_play.log import one_line, write_log_to
from sft_play.plan.plan import Plan, plan_from_json
from sft_play.runs import RunFolder
from sft_play.train import engine, handover
from sft_play.train import run as running
from sft_play.train.checkpoints import step_of
from sft_play.train.exact_match import Question
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.model import Backend, Blueprint, keep_4bit_trainable, whole_shapes
from sft_play.train.monitor import Monitor, expected_of
from sft_play.train.tokenizer import LoadedTokenizer
from sft_play.train.trainer import PlannedLoop, build_trainer, check_trackers, training_arguments

_MADE_BEFORE: Any = None
"""In the place of what only preparing looks at: data files, reports, attention, renderer."""


def train(path: Path) -> None:
    """Train what the document says; the run folder then holds what every run writes.

    Raises:
        BackendError: the document or the rows are not what was written, or Unsloth would train something else.
        SftPlayError: as any run.
    """
    document = handover.read(path)
    running.quiet_libraries()
    job = _job(document)
    running.check_device(job.plan, job.loaded.config)
    try:
        check_trackers(job.loaded.config)
    except ConfigError as error:
        raise ConfigError(f"in Unsloth's environment ({sys.prefix}): {error}") from None
    running.check_free_memory(job.plan, job.loaded.config)
    memory = running.MemoryMeter(job.plan)
    with engine.process_group(job.plan, timeout_s=job.timeout_s), Heartbeat(job.timeout_s) as beat:
        watch = running.Watch(memory, beat, document.started)
        log_file = write_log_to(job.folder.log_path) if engine.is_first() else None
        try:
            running.until_memory_ends(job, _prepared(document), watch)
        finally:
            if log_file is not None:
                logging.getLogger().removeHandler(log_file)
                log_file.close()


def _job(document: handover.Document) -> running.Job:
    config = RunConfig.model_validate_json(json.dumps(document.config))
    loaded = LoadedConfig(config, Path(document.config_path), "", tuple(document.overrides))
    folder = RunFolder(Path(document.folder))
    plan = plan_from_json(document.plan)
    return running.Job(
        loaded, plan, _MADE_BEFORE, folder, resume=document.resume, made=True, timeout_s=document.timeout_s
    )


def _prepared(document: handover.Document) -> running.Prepared:
    """What other runs work out for themselves, as it was handed over."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(document.tokenizer, trust_remote_code=document.model.trust_remote_code)
    splits = {name: Split(handover.read_rows(rows), _MADE_BEFORE) for name, rows in document.splits.items()}
    held_out = splits.get(document.held_out)
    asked, while_training = (
        [Question(one.prompt_ids, one.shown, one.answer) for one in questions]
        for questions in (document.asked, document.asked_while_training)
    )
    adapter = document.adapter
    peft = LoraConfig(task_type="CAUSAL_LM", r=adapter.r, target_modules=adapter.target_modules)
    return running.Prepared(
        Backend("unsloth", ""),
        LoadedTokenizer(tokenizer, (), "", document.own_template),
        Splits(splits["train"], splits.get("val"), splits.get("test")),
        Blueprint(None, _MADE_BEFORE, False, peft, 0, None, "", ()),
        _MADE_BEFORE,
        exam=running._Exam(held_out, document.held_out, asked, while_training),
        build=_Builder(document),
    )


class UnslothLoop(PlannedLoop):
    """The loop of every run; answers are generated in the mode that Unsloth wants for it."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """The loss; in an evaluation the mean over this rank's batch, which is weighted afterwards. The Trainer would
        divide by the tokens of all ranks' batches, as TRL's does not."""
        if not model.training:
            options["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **options)

    def _exact_match(self, prefix: str) -> dict[str, float]:
        from unsloth import FastLanguageModel

        model = self.accelerator.unwrap_model(self.model)
        FastLanguageModel.for_inference(model)
        try:
            return super()._exact_match(prefix)
        finally:
            FastLanguageModel.for_training(model)


class _Builder:
    """Makes the trainer of a run from what was handed over."""

    def __init__(self, document: handover.Document) -> None:
        self._document = document

    def __call__(
        self,
        job: running.Job,
        prepared: running.Prepared,
        exam: Any,
        watch: Any,
        *,
        callbacks: list[TrainerCallback],
        checkpoint: Path | None,
    ) -> PlannedLoop:
        config, plan, document = job.loaded.config, job.plan, self._document
        arguments = _arguments(config, plan, job.folder, has_eval=prepared.splits.val is not None)
        model = load(document, seed=config.train.seed, checkpointing=plan.checkpointed_layers > 0)
        return build_trainer(
            config,
            plan,
            job.folder,
            arguments=arguments,
            model=model,
            tokenizer=prepared.tokenizer.tokenizer,
            peft_config=None,
            train=prepared.splits.train,
            evaluation=prepared.splits.val,
            callbacks=callbacks,
            resume_step=step_of(checkpoint) if checkpoint else 0,
            kind=UnslothLoop,
            questions=exam.asked_while_training,
            stop_ids=sorted({*document.stop_ids, *_own_stops(model)}),
            max_new_tokens=config.eval.max_new_tokens,
            answer_tokens=plan.answer_tokens,
            beat=watch.beat,
            monitor=Monitor(
                expected_of(plan),
                on_gpu=plan.hardware.device == "cuda",
                level_bytes=watch.memory.level,
                peaks=watch.memory.peaks,
            ),
        )


def _own_stops(model: Any) -> list[int]:
    """The tokens that the model's generation config ends with."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = found if isinstance(found, list) else [found]
    return [token for token in listed if token is not None]


def _arguments(config: RunConfig, plan: Plan, folder: RunFolder, *, has_eval: bool) -> TrainingArguments:
    """The Trainer's arguments. Checkpointing is left out: Unsloth turns its own on, which the Trainer would replace.

    Raises:
        BackendError: Unsloth changed one of them, so that the run would not be the one that was asked for.
    """
    given: dict[str, Any] = {}

    def make(**words: Any) -> TrainingArguments:
        for name in list(words):
            if name.removesuffix("_kwargs") in ("gradient_checkpointing", "activation_checkpointing"):
                del words[name]
        given.update(words)
        return TrainingArguments(**words)

    on = engine.engine_arguments(plan, config, layer_class="", deepspeed=None)
    made: TrainingArguments = training_arguments(config, plan, folder, has_eval=has_eval, engine=on, make=make)
    changed = [f"{name}={one_line(str(given[name]))} to {one_line(str(_plain(getattr(made, name))))}"
               for name in given if _is_changed(given[name], _plain(getattr(made, name)))]  # fmt: skip
    if changed:
        raise BackendError(
            f"Unsloth would change what the run asks for on this machine: {', '.join(changed)}; set the keys of the "
            "run to what it changes them to (train.optim, train.bf16, train.fp16), or use tuning.backend=bnb"
        )
    return made


def _plain(value: Any) -> Any:
    """An option as it was written: the value of an enumeration."""
    return getattr(value, "value", value)


def _is_changed(given: Any, found: Any) -> bool:
    return isinstance(given, (bool, int, float, str)) and given != found


def load(document: handover.Document, *, seed: int, checkpointing: bool) -> Any:
    """Unsloth's model with the adapters of the document.

    Raises:
        BackendError: Unsloth cannot load it, or puts adapters elsewhere than the run says.
    """
    from unsloth import FastLanguageModel

    model, adapter = document.model, document.adapter
    words: Any = "unsloth" if checkpointing else False
    try:
        loaded, _ = FastLanguageModel.from_pretrained(
            model_name=model.path,
            revision=model.revision,
            max_seq_length=model.max_seq_len,
            dtype=getattr(torch, model.dtype),
            load_in_4bit=model.four_bit,
            load_in_8bit=False,
            full_finetuning=False,
            trust_remote_code=model.trust_remote_code,
            use_gradient_checkpointing=words,
            use_exact_model_name=True,  # else the hub's quantised copies of Unsloth's would be trained
            fix_tokenizer=False,
            random_state=seed,
        )
        made = FastLanguageModel.get_peft_model(
            loaded,
            r=adapter.r,
            target_modules=list(adapter.target_modules),
            lora_alpha=adapter.lora_alpha,
            lora_dropout=adapter.lora_dropout,
            bias="none",
            use_gradient_checkpointing=words,
            random_state=seed,
            use_rslora=adapter.use_rslora,
            max_seq_length=model.max_seq_len,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Unsloth checks models and options in many ways
        raise BackendError(
            f"Unsloth cannot load {one_line(model.path)}: {type(error).__name__}: {one_line(str(error), limit=300)}"
        ) from error
    check_loaded(made, document)
    keep_4bit_trainable(made)
    made.config.use_cache = False
    return made


def check_loaded(model: Any, document: handover.Document) -> None:
    """Raises BackendError where the model is not quantised as asked, or its adapters are not those of the run."""
    has_4bit = any(type(module).__name__ == "Linear4bit" for module in model.modules())
    if has_4bit != document.model.four_bit:
        found, wanted = ("4-bit" if flag else "unquantised" for flag in (has_4bit, document.model.four_bit))
        raise BackendError(f"Unsloth loaded {found} weights, and the run asks for {wanted} ones; nothing was trained")
    shapes = {name: list(shape) for name, shape in whole_shapes(model).items()}
    wanted_shapes = document.adapter.tensors
    differing = [name for name in {**wanted_shapes, **shapes} if shapes.get(name) != wanted_shapes.get(name)]
    if differing:
        name = differing[0]
        raise BackendError(
            f"Unsloth's adapters are not those of the run: {name} has the shape {shapes.get(name)} and not "
            f"{wanted_shapes.get(name)} ({len(differing)} differ); nothing was trained; use tuning.backend=bnb"
        )
