"""TRL's SFTTrainer, set up from a plan. This module alone knows TRL's names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from sft_play.config.schema import RunConfig
from sft_play.data.dataset import Split
from sft_play.data.mixing import Mix, Sources, mix_table
from sft_play.data.packing import Packs, best_fit, joined, wants_packing
from sft_play.endings import leave_with
from sft_play.errors import ConfigError, TrainingError
from sft_play.log import one_line
from sft_play.plan.gradients import adapter_dtype
from sft_play.plan.layout import SINGLE, Layout
from sft_play.plan.memory import GIB
from sft_play.plan.plan import Plan
from sft_play.runs import RunFolder
from sft_play.train import checkpoints, context_parallel, portable, sharded_checkpoints
from sft_play.train import engine as engine_module
from sft_play.train.board import Board, hparams_of
from sft_play.train.collate import COUNTS, SOURCE, Collator
from sft_play.train.exact_match import Answer, Question, answers
from sft_play.train.heartbeat import Heartbeat
from sft_play.train.monitor import Monitor, scored_labels, source_losses, source_sums, tokens_in
from sft_play.train.profile import window_of
from sft_play.train.rounding import rounding
from sft_play.train.rows import (
    MASKED,
    EpochOrder,
    LongestFirst,
    SharedOrder,
    TellEpoch,
    TrainingRows,
    evened,
    filled,
    lengths_of,
    to_dataset,
    trained_tokens,
)

logger = logging.getLogger(__name__)

"""Usual peaks for fine-tuning: the QLoRA paper's for adapters, a tenth to a twentieth of it for all weights."""


def training_template(tokenizer: Any) -> str | None:
    """TRL's training variant of the tokenizer's chat template, which writes every turn as it is generated; the
    template itself where it needs none, None where TRL knows no variant of it."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        found = get_training_chat_template(tokenizer)
    except ValueError:
        return None
    return tokenizer.chat_template if found is None else str(found)


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError for a tracker whose package is not installed."""
    for name in config.train.report_to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"train.report_to: {name} is not installed here; pip install {name}, or leave it out")


def training_arguments(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    *,
    has_eval: bool,
    engine: Mapping[str, Any] | None = None,
    make: Callable[..., Any] | None = None,
) -> Any:
    """The arguments of TRL's trainer for this run and plan; `engine` turns its layout on.

    `make`: what they are made with in SFTConfig's place, for a trainer that is not TRL's.
    """
    train = config.train
    eval_strategy, eval_steps = _eval_schedule(config, has_eval)
    save_strategy: str
    save_steps: int | None
    save_strategy, save_steps = ("steps", train.save_steps) if train.save_steps else ("epoch", None)
    if train.load_best_model_at_end and eval_strategy != "no":
        save_strategy, save_steps = eval_strategy, eval_steps
    own = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}} if make is None else {}
    return (make or SFTConfig)(
        output_dir=str(folder.checkpoints),
        per_device_train_batch_size=plan.batch.micro_batch,
        per_device_eval_batch_size=plan.eval_batch,
        gradient_accumulation_steps=plan.batch.grad_accum,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        learning_rate=config.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        adam_beta2=train.adam_beta2,
        max_grad_norm=train.max_grad_norm,
        optim=train.optim,
        bf16=plan.precision.compute == "bfloat16",
        fp16=plan.precision.compute == "float16",
        **_checkpointing(plan.checkpointed_layers > 0, offload=plan.choice.step.offloads),
        logging_strategy="steps",
        logging_steps=train.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        eval_strategy=eval_strategy,
        eval_steps=eval_steps,
        save_strategy=save_strategy,
        save_steps=save_steps or 1,
        load_best_model_at_end=train.load_best_model_at_end and eval_strategy != "no",
        metric_for_best_model=f"eval_{train.metric_for_best_model}",
        greater_is_better=train.metric_for_best_model == "exact_match",
        seed=train.seed,
        report_to=[name for name in train.report_to if name != "tensorboard"],
        dataloader_num_workers=train.dataloader_num_workers,
        dataloader_pin_memory=train.dataloader_pin_memory and _pins(plan),
        dataloader_persistent_workers=False,  # kept workers draw no seed at an epoch's start; resumed ones do
        disable_tqdm=True,
        label_names=["labels"],
        remove_unused_columns=False,  # the collator takes what it knows
        **own,
        **{"use_cpu": plan.hardware.device == "cpu", **(engine or {})},
    )


PIN_TRIED = 64 * 2**20
"""Bytes that are page-locked for a try: more than the batches that wait."""


def _pins(plan: Plan) -> bool:
    """Whether batches are page-locked on their way to a GPU; under WSL where the driver still gives a little.

    Windows' driver gives WSL so little in all that others ran out of it in their loaders
    (https://github.com/microsoft/WSL/issues/8447; 500 MB in a container: /issues/14078).
    """
    if plan.hardware.device != "cuda" or not plan.hardware.pages:
        return plan.hardware.device == "cuda"
    try:
        torch.empty(PIN_TRIED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # CUDA's errors are of this kind
        logger.info(
            "WSL: memory cannot be page-locked (%s): batches go to the GPU without (train.dataloader_pin_memory=false)",
            one_line(str(error), limit=120),
        )
        return False
    return True


def _checkpointing(on: bool, *, offload: bool) -> dict[str, Any]:
    """Gradient checkpointing in the words of the installed transformers, which renamed it in version 5."""
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    word = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {word: on, f"{word}_kwargs": {"use_reentrant": False, **({"offload": True} if offload else {})}}


def _eval_schedule(config: RunConfig, has_eval: bool) -> tuple[str, int | None]:
    """Evaluation strategy and steps, in transformers' words."""
    steps = config.eval.steps
    if not has_eval or steps == 0:
        return "no", None
    return ("epoch", None) if steps is None else ("steps", steps)


LOGGING_STATE = "logging_state.json"
"""In a checkpoint: the losses summed since the last log, so that the next logged mean is the unbroken run's."""


class _GoOnLogging(TrainerCallback):
    """Puts the sum of losses since the last log back, once the Trainer has set it to zero.

    The sum is the ranks' mean, which does not depend on their number.
    """

    def __init__(self, trainer: Any, checkpoint: Path) -> None:
        self._trainer, self._path = trainer, checkpoint / LOGGING_STATE

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Restore what the checkpoint says."""
        state = json.loads(self._path.read_text(encoding="utf-8"))
        self._trainer._tr_loss += state["loss_sum"]
        self._trainer._globalstep_last_logged = state["last_logged"]


class _OwnDropout(TrainerCallback):
    """Gives every rank random numbers of its own for dropout, weights and data order aside.

    The Trainer seeds all ranks alike, so that their dropout masks would be the same. A run that goes on under the ranks
    that it was stopped with has its states put back after this; under others, each rank begins a stream of its own.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seed by rank and step; the first rank of a new run goes on with the numbers of one process. Ranks of a
        tensor-parallel group compute the same tokens, and drop the same."""
        rank = engine_module.batch_rank(self._layout)
        if rank or state.global_step:
            set_seed((args.seed + rank + 100_003 * state.global_step) % 2**32)


class PlannedLoop(Trainer):
    """A Trainer that trains on every row once and evaluates a mean over tokens, whatever the ranks.

    Its checkpoints are whole or absent, and one process, DDP and FSDP read each other's.
    """

    def __init__(
        self,
        *,
        questions: Sequence[Question] = (),
        stop_ids: Sequence[int] = (),
        max_new_tokens: int = 0,
        answer_tokens: int = 1,
        checkpoint_limit: int | None = None,
        patience: int | None = None,
        beat: Heartbeat | None = None,
        monitor: Monitor | None = None,
        packs: Packs | None = None,
        group_window: int | None = None,
        by_source: bool = False,
        mix: Mix | None = None,
        layout: Layout = SINGLE,
        **options: Any,
    ) -> None:
        """`packs`: chats that share a training row; `group_window`: rows of an optimizer step, which are then sorted by
        length; `by_source`: tell the losses of the monitor's sources apart; `mix`: what an epoch has of each; `layout`:
        which ranks share rows. The other options are the Trainer's."""
        self._questions = list(questions)
        self._stop_ids = list(stop_ids)
        self._max_new_tokens, self._answer_tokens = max_new_tokens, answer_tokens
        self._checkpoint_limit = checkpoint_limit
        self._patience = patience
        self._staging: Path | None = None
        self._tokens_per_eval_row = self._tokens_per_eval_pass = 1.0
        self._tokens_seen: torch.Tensor | int = 0
        self._monitor = monitor or Monitor()
        self._logged_step = 0
        self._group_window = group_window
        self._layout = layout
        self._mix = mix
        self._eval_sources: torch.Tensor | None = None
        self.order: EpochOrder | None = None
        self.in_parts = False
        """Whether every rank writes its own part of a checkpoint (FSDP alone)."""
        self.beat = beat or Heartbeat(0.0)  # one that was never opened tells nobody
        self.last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self.last_answers: list[Answer] = []
        super().__init__(**options)
        self._lengths = None
        if group_window is not None:
            self._lengths = lengths_of(options["train_dataset"]) if packs is None else packs.tokens
        unit = self._unit(self.args.per_device_train_batch_size, ranks=layout.data_parallel)
        self.train_dataset: Any = TrainingRows(
            options["train_dataset"], packs=packs, unit=unit, per_epoch=mix.total if mix else None
        )
        attention = str(self.model.config.get_text_config()._attn_implementation)
        is_flash = packs is not None and "flash" in attention
        pad_id = int(self.processing_class.pad_token_id)  # TRL has seen to it that there is one
        parts = layout.context_parallel
        part = engine_module.batch_rank(layout) % parts
        self.data_collator: Any = Collator(pad_id, flat=is_flash, by_source=by_source, part=part, parts=parts)
        self.add_callback(TellEpoch(self))
        self.add_callback(_OwnDropout(layout))
        self.add_callback(_TimeOptimizer(self._monitor))

    def _unit(self, batch: int, *, ranks: int) -> int:
        """Rows of one pass over `ranks` that see rows of their own; one process needs no equal batches."""
        return batch * ranks if self.args.world_size > 1 else 1

    def _shared(self, order: Any, *, batch: int) -> Any:
        """The order of rows as it is handed out: to every rank of a group that shares rows the same ones."""
        times = self._layout.context_parallel
        return order if times == 1 else SharedOrder(order, batch=batch, times=times)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset
        self.order = EpochOrder(
            rows.count, total=len(rows), seed=self.args.seed, lengths=self._lengths, window=self._group_window or 1,
            mix=self._mix,
        )  # fmt: skip
        return self._shared(self.order, batch=self.args.per_device_train_batch_size)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return self._shared(LongestFirst(eval_dataset), batch=self.args.per_device_eval_batch_size)

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """Its worker processes end with this one, also where it is killed in the midst of a step."""
        made = super()._get_dataloader(*args, **options)
        loader = getattr(made, "base_dataloader", made)  # accelerate's wraps the one that starts them
        if loader.num_workers:
            loader.worker_init_fn = functools.partial(_begin_worker, os.getpid(), loader.worker_init_fn)
            if multiprocessing.get_start_method() == "forkserver":  # Python 3.14's: it would be the workers' parent
                loader.multiprocessing_context = "fork"
        return made

    @property
    def tokens_seen(self) -> int:
        """Tokens of this start's training batches, padding not counted."""
        return int(self._tokens_seen)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, watched for early stopping only here: evaluations before and after are not counted."""
        watching: list[TrainerCallback] = []
        if self._patience is not None:
            watching.append(EarlyStoppingCallback(early_stopping_patience=self._patience))
        if options.get("resume_from_checkpoint"):
            watching.append(_GoOnLogging(self, Path(options["resume_from_checkpoint"])))
        for callback in watching:
            self.add_callback(callback)
        try:
            return super().train(*args, **options)
        finally:
            for callback in watching:
                self.remove_callback(callback)

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """One forward and backward pass; its tokens are counted on the device, without waiting for it."""
        self.beat.note(self.state.global_step + 1, "training")
        self._tokens_seen = self._tokens_seen + tokens_in(inputs)
        self._monitor.saw(inputs, masked=MASKED)
        inputs = {name: value for name, value in inputs.items() if name not in COUNTS}
        with self._monitor.part("forward_backward"):
            loss = super().training_step(model, inputs, *args, **options)
        in_step = args[0] if args else options.get("num_items_in_batch")
        if in_step is not None:
            ranks = self.args.world_size // self._layout.tensor_parallel
            self._monitor.lost(loss, in_step=in_step, ranks=ranks)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """The Trainer's loss; where sources are told apart, the losses of its tokens are added up for each on the way.

        They are what the loss itself is the sum of, so that it costs neither a second pass nor logits.
        """
        sources = inputs.pop(SOURCE, None)
        if sources is None:
            return super().compute_loss(model, inputs, *args, **options)
        with _overheard(model) as said:
            loss = super().compute_loss(model, inputs, *args, **options)
        sums = source_sums(said[0].log_probs, said[0].label_mask, sources, count=len(self._monitor.sources))
        if model.training:
            self._monitor.by_source(sums)
        else:
            self._eval_sources = sums if self._eval_sources is None else self._eval_sources + sums
        return loss

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The rows of the next step; the wait for them is timed."""
        with self._monitor.part("data"):
            return super().get_batch_samples(*args, **options)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and beside the loss what was measured since the last one."""
        if "loss" in logs:
            logs |= self._monitor.take(steps=self.state.global_step - self._logged_step, device=self.args.device)
            self._logged_step = self.state.global_step
            if hasattr(self, "_metrics"):  # TRL's, which counts a pack as one row
                self._metrics["train"]["num_tokens"] = [self._monitor.tokens_seen]
        prefix = next((key.removesuffix("loss") for key in logs if key.endswith("_loss") and key != "train_loss"), None)
        if prefix is not None and self._eval_sources is not None:
            sums = engine_module.gathered_numbers(self._eval_sources.flatten())
            logs |= source_losses(sums, self._monitor.sources, prefix=prefix)
            self._eval_sources = None
        if "train_loss" in logs and self.state.global_step:  # the Trainer adds this rank's sum since the last log
            logs["train_loss"] += (self._mean_loss_sum() - self._tr_loss.item()) / self.state.global_step
        super().log(logs, start_time)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """One evaluation batch, its loss weighted so that the mean over rows is the mean over trained tokens."""
        self.beat.note(self.state.global_step, "evaluating")
        loss, logits, labels = super().prediction_step(model, inputs, *args, **options)
        if loss is not None:
            tokens = (scored_labels(inputs) != MASKED).sum()
            rows = inputs["labels"].shape[0] / self._layout.context_parallel  # every rank of a group counts them
            loss = loss * tokens / (rows * self._tokens_per_eval_row)
            loss = torch.where(tokens > 0, loss, torch.zeros_like(loss))  # a rank's last batch may be masked whole
            self._weigh_figures(tokens)
        return loss, logits, labels

    def _weigh_figures(self, tokens: torch.Tensor) -> None:
        """Weight TRL's own figures of an evaluation batch by its tokens: it logs their mean over batches, and those of
        rows of like length have tokens of their own number."""
        found = getattr(self, "_metrics", {}).get("eval", {})
        everywhere = self.accelerator.gather(tokens.reshape(1)).sum().item() / self._layout.tensor_parallel
        for name in ("entropy", "mean_token_accuracy"):
            if found.get(name):
                found[name][-1] *= everywhere / self._tokens_per_eval_pass

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> dict[str, float]:
        """Loss over trained tokens and, where rows are given for it, generated exact match; every row counts once.

        Batches have rows of like length, and no more rows than make the ranks' work even. The random state is left as
        it was, so that evaluating changes no number of the training.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        most = self.args.per_device_eval_batch_size
        batch = evened(len(dataset), most=most, ranks=self.args.world_size)
        dataset = filled(dataset, unit=self._unit(batch, ranks=self.args.world_size))
        prefix = str(options.get("metric_key_prefix", "eval"))
        tokens, passes = max(1, trained_tokens(dataset)), -(-len(dataset) // (batch * self._layout.data_parallel))
        self._tokens_per_eval_row, self._tokens_per_eval_pass = tokens / max(1, len(dataset)), tokens / max(1, passes)
        self._eval_sources = None
        with torch.random.fork_rng(), self._monitor.part("evaluation"):
            self.args.per_device_eval_batch_size = batch
            try:
                metrics = super().evaluate(dataset, *args, **options)
            finally:
                self.args.per_device_eval_batch_size = most
            if self._questions:
                metrics |= self._exact_match(prefix)
        if eval_dataset is None:
            self.last_metrics = (self.state.global_step, metrics)
            logger.info("Validation at step %d: %s", self.state.global_step, _held_out_words(metrics))
        return metrics

    def _exact_match(self, prefix: str) -> dict[str, float]:
        with context_parallel.whole_rows(self.model), self._monitor.generating():
            self.last_answers = answers(
                self.model,
                self.processing_class,
                self._questions,
                stop=self._stop_ids,
                max_new_tokens=self._max_new_tokens,
                most_tokens=self._answer_tokens,
                began=lambda: self.beat.note(self.state.global_step, "generating answers"),
            )
        share = sum(answer.right for answer in self.last_answers) / len(self.last_answers)
        found = {f"{prefix}_exact_match": share}
        self.log(found)
        return found

    def ask(self, questions: Sequence[Question]) -> list[Question]:
        """Take other questions for the next evaluations; returns those asked until now."""
        old, self._questions = self._questions, list(questions)
        return old

    def _mean_loss_sum(self) -> float:
        """Sum of losses since the last log, the mean over ranks; all ranks call it."""
        return float(self.accelerator.gather(self._tr_loss.detach().reshape(1)).mean().item())

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """None: the adapter's own card is written by PEFT; this one would ask trackers for links."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder, step = Path(self.args.output_dir), self.state.global_step
        self.beat.note(step, "saving a checkpoint")
        loss_sum = self._mean_loss_sum()
        if engine_module.is_first():
            checkpoints.staging(folder)
        engine_module.barrier()
        with self._monitor.part("checkpoint"), self._writing_to(checkpoints.staging_path(folder)) as aside:
            with contextlib.nullcontext() if self.in_parts else self.writing(aside):
                super()._save_checkpoint(model, trial)
            self.wait_for_disk()
        if not engine_module.is_first():
            self.wait_for_disk()
            return
        written = checkpoints.path_of(aside, step)
        state = {"loss_sum": loss_sum, "last_logged": self._globalstep_last_logged}
        (written / LOGGING_STATE).write_text(json.dumps(state), encoding="utf-8")
        if self.state.best_global_step:
            best = checkpoints.path_of(folder, self.state.best_global_step)
            is_there = best.exists() or self.state.best_global_step == step
            self.state.best_model_checkpoint = str(best) if is_there else None
            self.state.save_to_json(str(written / "trainer_state.json"))
        checkpoints.commit(written, folder, needed=engine_module.checkpoint_files(self))
        best_path = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        checkpoints.rotate(folder, keep=self._checkpoint_limit, best=best_path)
        self.wait_for_disk()

    @contextlib.contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """While open, the heartbeat sees that what libraries write into a folder gets on, and that the other ranks wait
        for the first to write it. Parts are counted by their own writer: one that hangs is told from others that
        write."""
        with self.beat.watching(folder), contextlib.ExitStack() as waiting:
            if not engine_module.is_first():
                waiting.enter_context(self.beat.waiting())
            yield

    def wait_for_disk(self) -> None:
        """Wait for all ranks, as long as bytes move on any of them; nothing for one process."""
        with self.beat.waiting():
            engine_module.barrier(engine_module.patient())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights; of an adapter over ranks what trains is gathered, and nothing of its base. Weights in
        parts are written with the optimizer's states."""
        if self.in_parts and self._staging is not None:
            self._save(output_dir, state_dict={})
        elif is_peft_model(self.model) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            self._save(output_dir, state_dict=engine_module.whole_state(self))
        else:
            super().save_model(output_dir, _internal_call)
        self.wait_for_disk()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights under the names that the model has in memory.

        The Trainer resumes by plain `load_state_dict`, which skips names it does not know without an error; those of
        the hub's layout differ for models that transformers converts while loading (experts, text towers).
        """
        if self._staging is None or is_peft_model(self.model):
            super()._save(output_dir, state_dict)
            return
        self.model.save_pretrained = functools.partial(self.model.save_pretrained, save_original_format=False)
        try:
            super()._save(output_dir, state_dict)
        finally:
            del self.model.save_pretrained

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer without groups that hold nothing.

        Adapters have no biases or norms, so that the group without decay is empty. DeepSpeed from 0.18 drops such a
        group, and a schedule that was made for two then fails in torch from 2.10
        (https://github.com/OpenRLHF/OpenRLHF/issues/1225).
        """
        made = super().create_optimizer(model)
        made.param_groups = [group for group in made.param_groups if group["params"]]
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        path = Path(output_dir)
        if self.in_parts:
            self._save_parts(path)
        else:
            states = portable.whole_optimizer(self.model, self.optimizer.optimizer)
            if engine_module.is_first():
                torch.save(states, path / "optimizer.pt")
        if engine_module.is_first():
            torch.save(self.lr_scheduler.state_dict(), path / "scheduler.pt")
        self.wait_for_disk()

    def _save_parts(self, path: Path) -> None:
        """Write weights and optimizer states, every rank its part; all are there when it returns."""
        step, began = self.state.global_step, time.monotonic()
        with contextlib.ExitStack() as waiting:

            def done() -> None:
                self.beat.note(step, "waiting for the parts of a checkpoint")
                waiting.enter_context(self.beat.waiting())

            self.beat.note(step, "writing its part of a checkpoint")
            mine = sharded_checkpoints.save(
                self.model, self.optimizer.optimizer, path,
                group=engine_module.patient(), moved=self.beat.moved, done=done,
            )  # fmt: skip
        size, seconds = engine_module.total(mine), time.monotonic() - began
        logger.info(
            "Checkpoint of step %d: %.2f GiB in %d parts, %.0f s",
            step, size / GIB, engine_module.world_size(), seconds,
        )  # fmt: skip

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = Path(checkpoint) if checkpoint is not None else None
        if path is not None and sharded_checkpoints.is_sharded(path):
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            group = engine_module.patient()
            sharded_checkpoints.load_optimizer(self.model, optimizer, path, group=group, moved=self.beat.moved)
        elif path is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        else:
            states = torch.load(path / "optimizer.pt", weights_only=True) if engine_module.is_first() else None
            portable.fill_optimizer(self.model, self.optimizer.optimizer, states)
        self.lr_scheduler.load_state_dict(torch.load(path / "scheduler.pt", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint)
        if sharded_checkpoints.is_sharded(path):
            sharded_checkpoints.load_weights(self.model, path, group=engine_module.patient(), moved=self.beat.moved)
        elif not self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            weights = portable.read_weights(path, self.model) if engine_module.is_first() else {}
            portable.fill_weights(self.model, weights)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.is_fsdp_enabled or sharded_checkpoints.is_sharded(Path(best)):
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states of all ranks where the first rank writes: other nodes may have another disk."""
        if self.args.world_size <= 1:
            super()._save_rng_state(output_dir)
            return
        with tempfile.TemporaryDirectory() as aside:
            super()._save_rng_state(aside)
            mine = {item.name: item.read_bytes() for item in Path(aside).iterdir()}
        for name, content in engine_module.gathered(mine):
            (Path(output_dir) / name).write_bytes(content)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raises TrainingError when a checkpoint's weights did not all find their place."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = sorted(set(load_result.missing_keys) - tied)
        if missing or load_result.unexpected_keys:
            names = ", ".join([*missing, *load_result.unexpected_keys][:4])
            raise TrainingError(f"the checkpoint does not fill the model: {names}; it was written by another version")

    @contextlib.contextmanager
    def _writing_to(self, aside: Path) -> Iterator[Path]:
        self._staging = aside
        try:
            yield aside
        finally:
            self._staging = None


class PlannedTrainer(PlannedLoop, SFTTrainer):
    """The same with TRL's loss, which computes no whole logits, and the adapters that TRL makes."""


def _held_out_words(metrics: Mapping[str, float]) -> str:
    """Loss and, where answers were asked for, exact match of an evaluation."""
    match = metrics.get("eval_exact_match")
    return f"loss {metrics['eval_loss']:.4f}" + (f", exact match {match:.1%}" if match is not None else "")


@contextlib.contextmanager
def _overheard(model: torch.nn.Module) -> Iterator[list[Any]]:
    """What the model answers meanwhile."""
    said: list[Any] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: said.append(output))
    try:
        yield said
    finally:
        hook.remove()


def _begin_worker(parent: int, then: Callable[[int], None] | None, worker: int) -> None:
    """A data loader's process: it ends with the trainer, and goes on as the loader would have it."""
    leave_with(parent, signal.SIGKILL)
    if then is not None:
        then(worker)


class _TimeOptimizer(TrainerCallback):
    """Tells the monitor when the optimizer steps, and when training begins."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Count from here."""
        self._monitor.start()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """It begins."""
        self._monitor.before_optimizer()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """It has ended."""
        self._monitor.after_optimizer()


class _CheckpointFirstLayers(TrainerCallback):
    """Leaves the layers beyond the planned number with their activations, once the Trainer has turned all on."""

    def __init__(self, count: int) -> None:
        self._count = count

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        """Turn checkpointing off in the later layers."""
        checkpoint_first_layers(model, self._count)


def checkpoint_first_layers(model: torch.nn.Module, count: int) -> None:
    """Keep gradient checkpointing, already turned on, in the first `count` layers only."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers[count:]:
        layer.gradient_checkpointing = False


def set_adapter_dtype(model: Any, config: RunConfig, plan: Plan) -> None:
    """Give everything that trains beside a frozen base its dtype, before an engine divides it.

    TRL makes adapters of a quantised base bf16, and AdamW's states follow: at usual learning rates most elements of
    lora_A would not move, and the second moment could not decay. DoRA's magnitudes stay fp32: their updates are smaller
    still. DeepSpeed computes with all of them in the dtype of the computation, and steps fp32 copies.
    """
    is_zero = plan.choice.layout.is_zero
    dtype = getattr(torch, plan.precision.compute if is_zero else adapter_dtype(config, plan.precision))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            is_magnitude = "lora_magnitude_vector" in name and not is_zero
            parameter.data = parameter.data.to(torch.float32 if is_magnitude else dtype)


def _optimizer_of(plan: Plan, arguments: Any, model: Any) -> dict[str, Any]:
    """The Trainer's argument for an optimizer that rounds stochastically, where the plan says so."""
    if plan.precision.updates != "stochastic":
        return {}
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    return {"optimizer_cls_and_kwargs": (rounding(kind), options | {"rounding_seed": arguments.seed})}


def build_trainer(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    *,
    model: Any,
    tokenizer: Any,
    peft_config: Any,
    train: Split,
    evaluation: Split | None,
    callbacks: Sequence[TrainerCallback],
    resume_step: int = 0,
    monitor: Monitor | None = None,
    arguments: SFTConfig | None = None,
    kind: type[PlannedLoop] | None = None,
    sources: Sources | None = None,
    **evaluating: Any,
) -> PlannedLoop:
    """The trainer of a run, ready for `train()`; `evaluating` holds questions, stop_ids, max_new_tokens, answer_tokens.

    `kind`: its class where it is not PlannedTrainer; one that is not TRL's is given a model with its adapters, and
    takes no `peft_config`.

    Raises:
        DataError: `sources` whose weights leave one of them without a row of an epoch.
    """
    arguments = arguments or training_arguments(config, plan, folder, has_eval=evaluation is not None)
    more = _own_callbacks(config, plan, folder, resume_step=resume_step, answers=lambda: trainer.last_answers)
    window = window_of(config, plan, folder.path / "profile")
    more += [window] if window is not None else []
    rows = to_dataset(train.rows)
    packs, packed = _packs_of(rows, config, plan, sizes=sources.sizes if sources else (len(rows),))
    mix = sources.mix(seed=config.train.seed, sizes=packed) if sources else None
    for line in mix_table(mix, shown="packed") if mix is not None and packs is not None else ():
        logger.info("Packing: %s", line)
    trainer = (kind or PlannedTrainer)(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        **({"peft_config": peft_config} if peft_config is not None else {}),
        train_dataset=rows,
        packs=packs,
        group_window=plan.batch.effective_batch if config.train.group_by_length else None,
        by_source=config.task_mode == "cpt_mixed" or sources is not None,
        mix=mix,
        eval_dataset=to_dataset(evaluation.rows) if evaluation is not None else None,
        callbacks=[*callbacks, *more],
        checkpoint_limit=config.train.save_total_limit,
        patience=config.train.early_stopping_patience,
        monitor=monitor,
        layout=plan.choice.layout,
        **_optimizer_of(plan, arguments, model),
        **evaluating,
    )
    if peft_config is not None:
        set_adapter_dtype(trainer.model, config, plan)
    if window is not None:
        window.trainer = trainer
    engine_module.tell_accumulation(trainer, plan)
    engine_module.set_dtypes(trainer, plan, config)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _own_callbacks(
    config: RunConfig, plan: Plan, folder: RunFolder, *, resume_step: int, answers: Callable[[], Sequence[Answer]]
) -> list[TrainerCallback]:
    """Those that follow from plan and config alone."""
    found: list[TrainerCallback] = []
    if plan.gradient_checkpointing == "selective":
        found.append(_CheckpointFirstLayers(plan.checkpointed_layers))
    if "tensorboard" in config.train.report_to and engine_module.is_first():
        found += _boards(config, plan, folder, resume_step=resume_step, answers=answers)
    return found


def _boards(
    config: RunConfig, plan: Plan, folder: RunFolder, *, resume_step: int, answers: Callable[[], Sequence[Answer]]
) -> list[TrainerCallback]:
    """TensorBoard's own callback and ours, which write to one place; a resumed run drops what follows its step."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(folder.tensorboard), purge_step=resume_step + 1 if resume_step else None)
    board = TensorBoardCallback(writer)
    board.logging_dir = str(folder.tensorboard)  # where it writes what is logged after training too
    hparams = hparams_of(config, plan)
    return [board, Board(writer, folder, hparams=hparams, answers=answers)]


def _packs_of(
    rows: Any, config: RunConfig, plan: Plan, *, sizes: Sequence[int]
) -> tuple[Packs | None, tuple[int, ...]]:
    """Which rows share a place in a batch, and how many packs each source has: no pack holds rows of two sources.

    None where rows are not packed, with their numbers as they are.
    """
    if wants_packing(config):
        lengths = np.split(lengths_of(rows), np.cumsum(sizes)[:-1])
        parts = [best_fit(part, plan.max_seq_len) for part in lengths]
        packs = joined(parts)
        _say_packs(packs, config, rows=len(rows), plan=plan)
        return packs, tuple(map(len, parts))
    if config.data.packing != "none":
        logger.info("Packing: task_mode=%s trains full blocks of text, which leave nothing to pack", config.task_mode)
    return None, tuple(sizes)


def _say_packs(packs: Packs, config: RunConfig, *, rows: int, plan: Plan) -> None:
    """How many chats a row and a step hold: the effective batch counts rows."""
    effective, setting = plan.batch.effective_batch, config.train.effective_words
    per_row = rows / len(packs)
    logger.info(
        "Packing: %s chats in %s rows of at most %d tokens (%.1f%% of their places stay empty); a step of %d rows sees "
        "%.1f chats on average, %.1f a row",
        f"{rows:,}", f"{len(packs):,}", plan.max_seq_len, 100 * (1 - packs.tokens.mean() / plan.max_seq_len), effective,
        min(effective, len(packs)) * per_row, per_row,
    )  # fmt: skip
    if len(packs) < effective and engine_module.is_first():
        logger.warning(
            "Packing: %d rows are fewer than one effective batch of %d: a step sees every chat; a smaller "
            "%s keeps the chats per step as they were without packing (%d rows hold %d)",
            len(packs), effective, setting, max(1, round(effective / per_row)), effective,
        )  # fmt: skip
