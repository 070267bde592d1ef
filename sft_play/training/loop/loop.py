"""The training loop: transformers' Trainer with an order of rows and a loss that no layout
changes."""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_utils import seed_worker

from sft_play.data.build.packing import Packs
from sft_play.data.build.splits import SourceMix
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.data.masks.token_row import IGNORED
from sft_play.planner.batching import MicroBatches
from sft_play.planner.plan import Plan
from sft_play.process.waiting import WaitProgress
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import last_checkpoint
from sft_play.training.class_checks.replaced_code import ActiveKernels
from sft_play.training.loop.callbacks import RowsAndSeeds
from sft_play.training.loop.evaluated_loop import EvaluatedLoop
from sft_play.training.loop.loop_checkpoints import RestoredCounters
from sft_play.training.loop.optimizers import loraplus_groups
from sft_play.training.loop.out_of_memory import TRAINING, StepMemory
from sft_play.training.loop.rows import (
    COUNT_KEYS,
    Collator,
    EpochOrder,
    StepBatches,
    TrainingRows,
    complete_boundaries,
    count_pixel_workers,
    row_lengths,
)
from sft_play.training.loop.upstream import require_upstream_names
from sft_play.training.measure.monitor import count_tokens
from sft_play.training.model import attention_functions
from sft_play.training.model.grouped_adapters import GroupedAdapters


class PlannedLoop(EvaluatedLoop):
    """A Trainer that trains on every row once, on a mean over tokens, whatever the number of ranks.
    `packs`: chats that share a training row; `sorts_by_length`: sort the rows of a step by length;
    `adds_sources`: report the loss of each of the monitor's sources; `adds_masks`: give padded rows
    a mask; `mix`: what an epoch takes from each source; `loraplus_lr_ratio`: lora_B's learning rate
    divided by the others'. Other options go to `EvaluatedLoop` and the Trainer."""

    # The library's class that the loop refines.
    upstream: type[Trainer] = Trainer
    # What the model computes norms, gated activations and rotations with.
    kernels = ActiveKernels()
    # LoRA layers that train in groups; None: by PEFT's own forward.
    grouped_adapters: GroupedAdapters | None = None
    # Whether passes run the code whose operators the plan counts, plain: what they take the host
    # is then known of it.
    runs_planned_code = True
    # Micro-steps after which ranks reduce gradients, where the Trainer would after each.
    micro_steps_per_reduction = 1

    def __init__(
        self,
        *,
        plan: Plan,
        token_rows: Any = None,
        patience: int | None = None,
        packs: Packs | None = None,
        sorts_by_length: bool = True,
        adds_sources: bool = False,
        adds_masks: bool = True,
        mix: SourceMix | None = None,
        images: ImageProcessorSource | None = None,
        loraplus_lr_ratio: float = 1.0,
        **options: Any,
    ) -> None:
        require_upstream_names(self.upstream)
        self._early_stopping = (
            None if patience is None else EarlyStoppingCallback(early_stopping_patience=patience)
        )
        self._loraplus_lr_ratio = loraplus_lr_ratio
        self._last_logged_step = 0
        self._micro_steps, self._micro_step = 1, 0
        # The wait for a step, which counts its passes.
        self.step_progress: WaitProgress | None = None
        self._slot_batches: list[Any] = []
        super().__init__(plan=plan, **options)
        rows, attention = (
            token_rows,
            str(self.model.config.get_text_config()._attn_implementation),
        )
        micro_batches, effective_batch = plan.micro_batches, plan.batch.effective_batch
        # the class was measured, and needs a mask
        if not micro_batches.padded and attention != attention_functions.VARLEN_ATTENTION:
            micro_batches = MicroBatches(micro_batches.rows)
        lengths = row_lengths(rows) if packs is None else packs.tokens
        has_boundaries = "flash" in attention or attention == attention_functions.VARLEN_ATTENTION
        # packs of one shape for cuDNN
        min_tokens = plan.choice.step.seq_len if packs is not None and plan.choice.step.cudnn else 0
        self.epoch_order = EpochOrder(
            len(lengths),
            seed=self.args.seed,
            lengths=lengths if sorts_by_length else None,
            effective_batch=effective_batch,
            mix=mix,
        )
        context_parallel = self._layout.context_parallel
        # ranks of a tensor-parallel group get the same rows
        row_rank = distributed.rank() // self._layout.tensor_parallel
        data_parallel_rank, context_parallel_rank = divmod(row_rank, context_parallel)
        self._step_batches = StepBatches(
            self.epoch_order,
            lengths,
            micro_batches,
            effective_batch=effective_batch,
            rank=data_parallel_rank,
            ranks=self._layout.data_parallel,
        )
        self.step_memory = StepMemory(self, micro_batches)
        self.train_dataset: Any = TrainingRows(rows, packs=packs, joined=not micro_batches.padded)
        self.data_collator: Any = Collator(
            int(self.processing_class.pad_token_id),  # TRL makes sure that there is one
            flat=not micro_batches.padded or (packs is not None and has_boundaries),
            adds_sources=adds_sources,
            adds_masks=adds_masks,
            adds_chat_lengths=attention_functions.needs_chat_lengths(attention),
            min_tokens=min_tokens,
            context_parallel_rank=context_parallel_rank,
            context_parallel_size=context_parallel,
            images=images,
        )

    # --- rows -------------------------------------------------------------------------------------
    def get_train_dataloader(self) -> Any:
        """The batches of an epoch, cut for this rank, where accelerate would give out batches of
        one size in turn."""
        workers = self.args.dataloader_num_workers
        if not workers and self.vision is not None:
            workers = count_pixel_workers(
                self._layout.ranks, on_gpu=self.args.device.type == "cuda"
            )
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self._step_batches,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=functools.partial(
                seed_worker, num_workers=workers, rank=self.args.process_index
            ),
        )
        accelerator = self.accelerator
        # as for one process, whatever the ranks: else accelerate would give this rank only a share
        # of its own batches
        return prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            # each batch as it is computed, where pixels of a whole step would take much memory
            put_on_device=accelerator.device_placement and self.data_collator.images is None,
            # page-locked memory is kept until its copy has ended
            non_blocking=self.args.dataloader_pin_memory,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **options: Any
    ) -> Any:
        """The batches of the next step, empty ones included, and its trained tokens; the wait for
        them is timed."""
        with self._monitor.timed_part("data"):
            self._slot_batches = batches = list(itertools.islice(epoch_iterator, num_batches))
            filled_batches = [batch for batch in batches if batch]
            self._micro_steps, self._micro_step = len(filled_batches), 0
            if self.step_memory.has_halved:  # cut anew: all in the last slot
                filled_batches = self.step_memory.collate_step()
                batches[:] = [*({} for _ in batches[1:]), filled_batches]
            # the Trainer counts only where the first batch has labels, and StepBatches puts the
            # empty ones first
            _, token_count = super().get_batch_samples(
                iter(filled_batches), len(filled_batches), *args, **options
            )
        return batches, token_count

    def _prepare_inputs(self, inputs: Any) -> Any:
        return complete_boundaries(super()._prepare_inputs(inputs))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """None are counted: the Trainer would walk all modules for each batch."""
        return 0

    # --- training ---------------------------------------------------------------------------------
    @property
    def tokens_seen(self) -> int:
        """Tokens in the training batches since this process started, without padding."""
        return int(self._tokens_seen)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train. Early stopping watches only here: evaluations before and after training do not
        count for it."""
        # the longest rows are tried before the monitor begins to measure
        callbacks: list[TrainerCallback] = [
            RowsAndSeeds(self.epoch_order, self._layout),
            self.step_memory,
            self._monitor,
            self.non_finite_guard,
        ]
        checkpoint = options.get("resume_from_checkpoint")
        if self._early_stopping is not None:
            callbacks.append(self._early_stopping)
        if checkpoint:
            callbacks.append(RestoredCounters(self, self._early_stopping, Path(checkpoint)))
        if self.compile_monitor is not None:
            self.compile_monitor.on_compiled.append(self._monitor.exclude_wait)
            callbacks.append(self.compile_monitor)
        for callback in callbacks:
            self.add_callback(callback)
        try:
            if checkpoint:
                with (
                    last_checkpoint.forbid_pickled_code(Path(checkpoint)),
                    last_checkpoint.readable_checkpoint(self, Path(checkpoint)) as path,
                ):
                    output = super().train(
                        *args, **{**options, "resume_from_checkpoint": str(path)}
                    )
            else:
                output = super().train(*args, **options)
            self.finish_saving()
            return output
        finally:
            self.abandon_saving()
            for callback in callbacks:
                self.remove_callback(callback)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer without empty parameter groups, such as that of an adapter's biases:
        DeepSpeed drops one, and a schedule made for two then fails
        (https://github.com/OpenRLHF/OpenRLHF/issues/1225)."""
        is_new = self.optimizer is None  # under DeepSpeed the Trainer asks twice for the same one
        optimizer = super().create_optimizer(model)
        groups = optimizer.param_groups
        if self._loraplus_lr_ratio != 1 and is_new:
            groups = loraplus_groups(groups, model or self.model, ratio=self._loraplus_lr_ratio)
        optimizer.param_groups = [group for group in groups if group["params"]]
        return optimizer

    def _run_epoch(self, model: Any, *args: Any, **options: Any) -> None:
        # resumed after its last step the Trainer would train one more: it looks only after each
        stopping = self._early_stopping
        has_stopped = (
            stopping
            and stopping.early_stopping_patience_counter >= stopping.early_stopping_patience
        )
        if has_stopped or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        self._stepped_parameters = _SteppedParameters(engines.stepped_parameters(self))
        with _replaced_module_walks(model, self._stepped_parameters):
            super()._run_epoch(model, *args, **options)

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Train one micro-batch, or a list of them, and return the sum of their losses; an empty
        batch trains nothing. If memory runs out, the whole optimizer step is repeated with smaller
        micro-batches."""
        self.heartbeat.note(self.state.global_step + 1, TRAINING)
        if not inputs:
            # on all ranks at once, and never in a step's last micro-step, which reduces the
            # gradients: StepBatches puts the empty ones first
            return torch.zeros((), device=self.args.device)

        def compute(is_retry: bool) -> Any:
            batches = inputs
            if is_retry:
                batches = self.step_memory.collate_step()
            elif not isinstance(inputs, list):
                batches = [inputs]
            *earlier_batches, last_batch = batches
            for batch in earlier_batches:
                self._tr_loss += self._train_micro_step(model, batch, *args, **options)
            return self._train_micro_step(model, last_batch, *args, **options)

        return self.step_memory.run_with_retry(compute)

    def _train_micro_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        # a batch that was cut anew is on the host
        inputs = send_to_device(inputs, self.args.device)
        # the Trainer's own number counts the empty ones
        self.current_gradient_accumulation_steps = self._micro_steps
        self._tokens_seen = self._tokens_seen + count_tokens(inputs)
        self._monitor.count_batch(inputs, ignored_label=IGNORED)
        if not self._micro_step:
            self.refresh_adapter_copies()
        self._micro_step += 1
        defers_reduction = (
            self._micro_step % self.micro_steps_per_reduction
            and self._micro_step < self._micro_steps
        )
        reduction_context = (
            self.accelerator.no_sync(model) if defers_reduction else contextlib.nullcontext()
        )
        with self._monitor.timed_part("forward_backward"), reduction_context:
            loss = self.compute_micro_step(model, inputs, *args, **options)
        if self.step_progress is not None:
            self.step_progress.add()
        step_tokens = next(iter(args), options.get("num_items_in_batch"))
        if step_tokens is not None:
            # the loss was scaled up for DDP's mean over ranks; tensor-parallel ranks are not among
            # those
            ranks = self.args.world_size // self._layout.tensor_parallel
            self._monitor.add(loss=loss.detach() * step_tokens / ranks)
        return loss

    def count_passes(self) -> int:
        """The passes of this step."""
        return self._micro_steps

    def refresh_adapter_copies(self) -> None:
        """Let the passes of a step read the adapters as they are now."""
        if self.grouped_adapters is not None:
            self.grouped_adapters.refresh_copies()

    def compute_micro_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Forward and backward pass of a micro-step, not counted."""
        # no model takes them
        inputs = {name: value for name, value in inputs.items() if name not in COUNT_KEYS}
        return super().training_step(model, inputs, *args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(self._with_gradients(model))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # overridden since no callback is told the norm, or could keep the optimizer from stepping
        norm = super()._get_grad_norm(self._with_gradients(model), grad_norm=grad_norm)
        self.non_finite_guard.check_step(norm)
        return norm

    # What has the parameters whose gradients are clipped: of a model that accelerate shards the
    # model itself, since accelerate compares them with its own.
    def _with_gradients(self, model: Any) -> Any:
        return model if self.is_fsdp_enabled else self._stepped_parameters

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what the monitor measured since the last log beside the loss."""
        if "loss" in logs:
            logs = self.non_finite_guard.correct_mean_loss(logs)
            logs |= self._monitor.take_metrics(
                steps=self.state.global_step - self._last_logged_step, device=self.args.device
            )
            self._last_logged_step = self.state.global_step
        if "train_loss" in logs:
            # to the means logged so far the Trainer has added this rank's own sum since the last
            # log, and divided by the steps of this process (transformers 5.23), or by all steps of
            # the run (older versions)
            total_loss = self._total_loss_scalar + self._mean_loss_sum() - self._tr_loss.item()
            logs["train_loss"] = total_loss / max(1, self.state.global_step)
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """No card: PEFT writes the adapter's own, and this one would ask trackers for links."""


class _SteppedParameters:
    """The parameters that the optimizer steps, with those two methods of a module that the Trainer
    calls in every step. A module would look for them among its own."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


@contextlib.contextmanager
def _replaced_module_walks(model: nn.Module, stepped: _SteppedParameters) -> Iterator[None]:
    """While open, a model's `train` and `zero_grad` go through lists that are made once: all
    modules, and the parameters that the optimizer steps. The Trainer calls the one in every
    micro-step and the other in every step, and torch's own visit each module: 8 and 4 ms where
    there are 3,000."""
    model.train()
    modules, is_training = [*model.modules()], operator.attrgetter("training")

    def train(mode: bool = True) -> nn.Module:
        # an evaluation, or a library, may have left any of them in the other mode
        if {*map(is_training, modules)} != {mode}:
            type(model).train(model, mode)
        return model

    model.train, model.zero_grad = train, stepped.zero_grad
    try:
        yield
    finally:
        del model.train, model.zero_grad
