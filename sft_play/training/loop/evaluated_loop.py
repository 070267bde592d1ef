"""The evaluation of a run: transformers' Trainer with a mean over trained tokens that no layout
changes, and exact match of generated answers."""

import contextlib
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sft_play.data.masks.token_row import IGNORED
from sft_play.planner.plan import Plan
from sft_play.process.waiting import WaitProgress, report_wait
from sft_play.training import distributed
from sft_play.training.class_checks.replaced_code import CompileMonitor
from sft_play.training.loop.loop_checkpoints import CheckpointedLoop
from sft_play.training.loop.out_of_memory import StepMemory
from sft_play.training.loop.rows import (
    balanced_batch_size,
    longest_first_order,
    pad_to_multiple,
    split_batch,
    trained_tokens,
)
from sft_play.training.measure.exact_match import GeneratedAnswer, Question, generate_answers
from sft_play.training.measure.monitor import head_metrics, scored_labels, source_losses
from sft_play.training.model import attention_functions
from sft_play.training.model.streamed_base import BlockStream
from sft_play.training.model.vision import Vision

logger = logging.getLogger(__name__)


class EvaluatedLoop(CheckpointedLoop):
    """A Trainer that evaluates every row once, as a mean over trained tokens, whatever the number
    of ranks. `questions`: asked while training; `evaluates_blocks`: held-out rows have one length.
    Other options go to `CheckpointedLoop` and the Trainer."""

    # Of compiled blocks; None for plain ones.
    compile_monitor: CompileMonitor | None = None
    step_memory: StepMemory
    # The whole class around the model, which answers rows with images; None for rows of text.
    vision: Vision | None = None

    def __init__(
        self,
        *,
        plan: Plan,
        questions: Sequence[Question] = (),
        stop_ids: Sequence[int] = (),
        max_new_tokens: int = 0,
        evaluates_blocks: bool = False,
        **options: Any,
    ) -> None:
        self.plan, self._layout = plan, plan.choice.layout
        self._questions, self._stop_ids, self._max_new_tokens = (
            list(questions),
            list(stop_ids),
            max_new_tokens,
        )
        self._evaluates_blocks = evaluates_blocks
        self._trained_tokens_per_eval_row = 1.0
        # Becomes a tensor of the device, which nothing waits for.
        self._tokens_seen: torch.Tensor | int = 0
        # What the batches of an evaluation add up to on the device: `head` and `sources`.
        self._eval_sums: dict[str, torch.Tensor] = {}
        self.last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self.last_answers: list[GeneratedAnswer] = []
        self._max_eval_rows: int | None = None
        # What brings the blocks of a streamed base to the device.
        self.block_stream: BlockStream | None = None
        self._eval_progress: WaitProgress | None = None
        super().__init__(**options)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not self._layout.is_streamed:  # whose blocks stay in RAM
            super()._move_model_to_device(model, device)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule; where the warmup is all of the run, as of a single step, there is none: its
        rates would be zero."""
        if self.args.get_warmup_steps(num_training_steps) >= num_training_steps:
            self.args.warmup_steps = 0
        return super().create_scheduler(num_training_steps, optimizer)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of an evaluation, the longest rows first."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        # the rows are reordered, not their sampler replaced: that is a private method of the
        # Trainer
        order = longest_first_order(
            dataset,
            batch_size=self.args.per_device_eval_batch_size,
            repeats=self._layout.context_parallel,
        )
        return super().get_eval_dataloader(dataset.select(order))

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate as the Trainer does, but count a row once: every rank of a context-parallel
        group gets it."""
        output = super().evaluation_loop(*args, **options)
        return output._replace(num_samples=output.num_samples // self._layout.context_parallel)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """One evaluation batch, its loss weighted so that the mean over rows is the mean over
        trained tokens."""
        self.heartbeat.note(self.state.global_step, "evaluating")
        rows = len(inputs["labels"])
        if self._max_eval_rows is not None and rows > self._max_eval_rows:
            losses = [  # each part's loss counts for as many rows as it has
                self.prediction_step(model, batch, *args, **options)[0] * len(batch["labels"])
                for batch in split_batch(inputs, self._max_eval_rows)
            ]
            return torch.stack(losses).sum() / rows, None, None
        compute = functools.partial(super().prediction_step, model, inputs, *args, **options)
        # pixels are of no row by their place, so that their batch cannot be cut
        result = compute() if self.vision else self.step_memory.try_batch(compute, rows)
        if result is not None:
            if self._eval_progress is not None:  # all ranks evaluate as many
                self._eval_progress.add(rows * self._layout.data_parallel)
            # the Trainer repeats this number for each row of the batch, and takes the mean over all
            # rows
            tokens = (scored_labels(inputs) != IGNORED).sum()
            counted_rows = rows / self._layout.context_parallel  # every rank of a group counts them
            loss = result[0] * tokens / (counted_rows * self._trained_tokens_per_eval_row)
            # a batch may be masked whole: 0 / 0 is nan
            loss = torch.where(tokens > 0, loss, torch.zeros_like(loss))
            return loss, *result[1:]
        self._max_eval_rows = rows // 2
        return self.prediction_step(model, inputs, *args, **options)

    def plain_blocks(self) -> AbstractContextManager[Any]:
        """Run compiled blocks as plain code: they would be compiled once more for passes without
        gradients, and for rows of which there is one."""
        if self.compile_monitor is None:
            return contextlib.nullcontext()
        stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return stance

    def evaluate(
        self,
        eval_dataset: Any = None,
        *args: Any,
        questions: Sequence[Question] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Return the loss over trained tokens and, if there are questions (None: those asked while
        training), the exact match of generated answers. Every row counts once. The random state is
        restored, so that evaluating changes no number of the training."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        configured_batch_size = self.args.per_device_eval_batch_size
        ranks = self.args.world_size
        batch_size = balanced_batch_size(len(dataset), max_size=configured_batch_size, ranks=ranks)
        # else accelerate would fill the last pass with rows from the beginning; one process needs
        # no full batches
        dataset = pad_to_multiple(dataset, multiple=batch_size * ranks if ranks > 1 else 1)
        self._trained_tokens_per_eval_row = max(1, trained_tokens(dataset)) / max(1, len(dataset))
        self._eval_sums = {}
        # blocks of text are not asked for answers, which have a new length for every token
        attention_context = (
            contextlib.nullcontext()
            if self._evaluates_blocks
            else attention_functions.without_cudnn()
        )
        prefix = str(options.get("metric_key_prefix", "eval"))
        with (
            torch.random.fork_rng(distributed.rng_devices()),
            self._monitor.timed_part("evaluation", label=prefix),
            self.plain_blocks(),
            attention_context,
        ):
            # the Trainer has no argument for the batch size of one evaluation
            self.args.per_device_eval_batch_size = batch_size
            try:
                with report_wait(
                    "Evaluating", unit="rows", count_total=lambda: len(dataset)
                ) as self._eval_progress:
                    metrics: dict[str, float] = super().evaluate(dataset, *args, **options)
            finally:
                self.args.per_device_eval_batch_size = configured_batch_size
            active_questions = self._questions if questions is None else questions
            if active_questions:
                metrics |= self._measure_exact_match(active_questions, prefix=prefix)
        if eval_dataset is None:
            self.last_metrics = (self.state.global_step, metrics)
            figures = f"loss {metrics['eval_loss']:.4f}"
            if "eval_exact_match" in metrics:
                figures += (
                    f", exact match {metrics['eval_exact_match']:.1%}"
                    f" of {len(active_questions):,} rows"
                )
            logger.info("Validation at step %d: %s", self.state.global_step, figures)
        return metrics

    def answer_samples(self, questions: Sequence[Question]) -> list[GeneratedAnswer]:
        """Answer some questions for a person to read; no figure is made of them."""
        if not questions:
            return []
        with (
            torch.random.fork_rng(distributed.rng_devices()),
            self.plain_blocks(),
            attention_functions.without_cudnn(),
        ):
            return self._generate_answers(questions)

    def _generate_answers(self, questions: Sequence[Question]) -> list[GeneratedAnswer]:
        with (
            attention_functions.full_rows_attention(self.model),
            self._monitor.peaks.during("generation"),
            report_wait(
                "Generating answers", unit="answers", count_total=lambda: len(questions)
            ) as progress,
        ):
            return list(
                generate_answers(
                    self.model,
                    self.processing_class,
                    questions,
                    stop_ids=self._stop_ids,
                    max_new_tokens=self._max_new_tokens,
                    max_tokens=self.plan.answer_tokens,
                    try_batch=self.step_memory.try_batch,
                    on_batch_end=progress.add,
                    on_batch_start=lambda: self.heartbeat.note(
                        self.state.global_step, "generating answers"
                    ),
                )
            )

    def _measure_exact_match(
        self, questions: Sequence[Question], *, prefix: str
    ) -> dict[str, float]:
        self.last_answers = self._generate_answers(questions)
        metrics = {
            f"{prefix}_exact_match": (
                sum(answer.is_correct for answer in self.last_answers) / len(self.last_answers)
            ),
            f"{prefix}_generated_rows": len(self.last_answers),
        }
        self.log(metrics)
        return metrics

    def _add_scores(self, sums: dict[str, torch.Tensor]) -> None:
        if self.model.training:
            self._monitor.add(**sums)
            return
        for name, value in sums.items():
            self._eval_sums[name] = self._eval_sums.get(name, 0) + value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; beside the loss of an evaluation what the head and the sources add up to over all
        ranks."""
        prefix = next(
            (
                key.removesuffix("loss")
                for key in logs
                if key.endswith("_loss") and key != "train_loss"
            ),
            None,
        )
        if prefix is not None and self._eval_sums:
            own_sums = {name: value.flatten().tolist() for name, value in self._eval_sums.items()}
            sums_by_rank = distributed.gather_values((own_sums, int(self._tokens_seen)))
            self._eval_sums = {}
            logs |= head_metrics([sums["head"] for sums, _ in sums_by_rank], prefix=prefix)
            if "sources" in own_sums:
                logs |= source_losses(
                    [sums["sources"] for sums, _ in sums_by_rank],
                    self._monitor.sources,
                    prefix=prefix,
                )
            tokens_seen = sum(tokens for _, tokens in sums_by_rank[:: self._layout.tensor_parallel])
            logs[f"{prefix}num_tokens"] = self._monitor.tokens_before_start + tokens_seen
        super().log(logs, start_time)
