"""TRL's SFTTrainer, set up from a plan: its arguments, rows, dtypes and callbacks.

TRL's names are known here, in `prepare.tokenizer` (chat templates), `model.fused_head` and `trace`,
which measures what TRL's loss holds. `loop` has what the trainer does differently from TRL's,
`loop_checkpoints` how it saves.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from sft_play.config.options import optimizer_options
from sft_play.config.schema import RunConfig
from sft_play.data.build.packing import Packs, concatenate_packs, is_packing_enabled, pack_best_fit
from sft_play.data.build.splits import DataSplit, MixedSources
from sft_play.log import one_line
from sft_play.machine.host_speed import save_host_speed
from sft_play.planner.kernels import CountedKernels, groups_adapters
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.plan import Plan
from sft_play.planner.precision import adapter_dtype
from sft_play.runs.folder import RunFolder
from sft_play.text import plural
from sft_play.training import distributed, engines
from sft_play.training.checkpoints.full_state_dict import load_adapter_weights
from sft_play.training.class_checks.adapter_trial import freeze_parameters
from sft_play.training.class_checks.replaced_code import (
    ActiveKernels,
    activate_grouped_adapters,
    activate_kernels,
    compile_blocks,
    verify_compiled_blocks,
    verify_varlen_kernel,
)
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.optimizers import (
    MuonWithAdamW,
    muon_matrices,
    stochastic_rounding_class,
)
from sft_play.training.loop.rows import (
    COUNT_KEYS,
    DEFAULT_SOURCES,
    SOURCE,
    row_lengths,
    without_pictures,
)
from sft_play.training.measure.board import TensorBoardWriter, build_hparams
from sft_play.training.measure.exact_match import collect_stop_ids, configured_eos_token_ids
from sft_play.training.measure.monitor import Monitor, RunMonitors, head_sums, source_sums
from sft_play.training.measure.profile import build_profile_window
from sft_play.training.measure.summary import EvalSet
from sft_play.training.model import attention_functions, model_loading, tensor_parallel
from sft_play.training.model.fused_head import set_backbone_prefix, use_class_logits
from sft_play.training.model.model_loading import (
    SourceWeights,
    load_for_sharding,
    load_model,
    read_model,
    shard_model,
)
from sft_play.training.model.streamed_base import measure_bus_rate, slow_bus_warning, stream_base
from sft_play.training.model.vision import Vision, load_vision
from sft_play.training.model.vision_parts import VISION_NAME
from sft_play.training.prepare.lora_config import freeze_unmatched
from sft_play.training.prepare.model_spec import (
    ModelSpec,
    decoder_layers,
    model_location,
    resized_spec,
)
from sft_play.training.prepare.prepare import Prepared

logger = logging.getLogger(__name__)


def training_arguments(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    *,
    has_eval: bool,
    engine_options: Mapping[str, Any] | None = None,
    arguments_class: Callable[..., Any] | None = None,
) -> Any:
    """The arguments of TRL's trainer, or of what `arguments_class` makes; `engine_options`: those
    that turn on its layout."""
    train = config.train
    eval_strategy, eval_steps = (
        ("epoch", None) if config.eval.steps is None else ("steps", config.eval.steps)
    )
    if not has_eval or eval_steps == 0:
        eval_strategy, eval_steps = "no", None
    save_strategy, save_steps = ("steps", train.save_steps) if train.save_steps else ("epoch", None)
    loads_best = train.load_best_model_at_end and eval_strategy != "no"
    if loads_best:  # the best model is one of the checkpoints: each evaluation needs one
        save_strategy, save_steps = eval_strategy, eval_steps
    optimizer_arguments: dict[str, Any] = {}
    if train.optim == "muon":
        # `build_trainer` makes it, transformers knows no such name
        optimizer_arguments["optim"] = "adamw_torch_fused"
    elif train.optim.startswith("lion_"):
        optimizer_arguments["adam_beta2"] = 0.99  # Lion's own, under the name of AdamW's
    # rows are tokenised and cut already, so TRL must not do either
    trl_only = (
        {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        if arguments_class is None
        else {}
    )
    checkpointing_kwargs = {"use_reentrant": False} | (
        {"offload": True} if plan.choice.step.offloads else {}
    )
    return (arguments_class or SFTConfig)(
        output_dir=str(folder.checkpoints_path),
        # as the Trainer counts: where micro-batches are cut by tokens, a step has as many slots as
        # it may ever need
        per_device_train_batch_size=plan.trainer_batch.micro_batch,
        per_device_eval_batch_size=plan.eval_batch,
        gradient_accumulation_steps=plan.trainer_batch.grad_accum,
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,  # -1: num_train_epochs decides
        **{option.external_names.trainer: option.value(config) for option in optimizer_options()}
        | optimizer_arguments,
        bf16=plan.precision.compute == "bfloat16",
        fp16=plan.precision.compute == "float16",
        activation_checkpointing=plan.choice.checkpointed_layers > 0,
        activation_checkpointing_kwargs=checkpointing_kwargs,
        logging_strategy="steps",
        logging_steps=train.logging_steps,
        logging_first_step=True,
        # it would hide a loss of nan from MetricsFile, which stops the run
        logging_nan_inf_filter=False,
        eval_strategy=eval_strategy,
        eval_steps=eval_steps,
        save_strategy=save_strategy,
        save_steps=save_steps or 1,
        load_best_model_at_end=loads_best,
        metric_for_best_model=f"eval_{train.metric_for_best_model}",
        greater_is_better=train.metric_for_best_model == "exact_match",
        # that is in plan_callbacks
        report_to=[name for name in train.report_to if name != "tensorboard"],
        dataloader_num_workers=train.dataloader_num_workers,
        # WSL page-locks so little that data loaders have run out of it (microsoft/WSL#8447, #14078)
        dataloader_pin_memory=train.dataloader_pin_memory
        and plan.hardware.device == "cuda"
        and not plan.hardware.pages,
        # they draw no seed at an epoch's start; a resumed run's do
        dataloader_persistent_workers=False,
        disable_tqdm=True,
        label_names=["labels"],
        remove_unused_columns=False,  # the collator needs columns that no model takes
        **trl_only,
        **{"use_cpu": plan.hardware.device == "cpu", **(engine_options or {})},
    )


class PlannedTrainer(PlannedLoop, SFTTrainer):
    """The loop with TRL's loss, which never holds whole logits, and with the adapters that TRL
    makes."""

    upstream = SFTTrainer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss, with its figures, and the losses by source, summed on the device and gathered
        once per log: TRL's own method waits for the device and all ranks in every micro-step."""
        has_balance = self.aux_loss_enabled  # of a mixture of experts: its routers' balancing loss
        options = {"output_router_logits": True} if has_balance else {}
        outputs = model(
            **{name: value for name, value in inputs.items() if name not in (SOURCE, *COUNT_KEYS)},
            **options,
            use_cache=False,
            fused_lm_head=True,
        )
        # the tokens of the whole step, so that every token weighs the same whatever micro-batch it
        # is in
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        # at least 1: a batch without a trained token has a loss of zero
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # the tokens are those of all ranks, and DDP takes the mean over ranks
            loss = loss * (self.args.world_size // self._layout.tensor_parallel)
        if has_balance:  # a mean over the micro-step, so it is divided by the micro-steps of a step
            micro_steps = (
                self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            )
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / micro_steps
        sums = {"head": head_sums(outputs)}
        if SOURCE in inputs:
            sums["sources"] = source_sums(
                outputs.log_probs,
                outputs.label_mask,
                inputs[SOURCE],
                count=len(self._monitor.sources),
            )
        self._add_scores(sums)
        return (loss, outputs) if return_outputs else loss


# Turns checkpointing off in the layers after the first `count`: the Trainer can only turn on all of
# them.
class _SelectiveCheckpointing(TrainerCallback):
    def __init__(self, count: int) -> None:
        self._count = count

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        checkpoint_first_layers(model, self._count)


def checkpoint_first_layers(model: torch.nn.Module, count: int) -> None:
    """Keep gradient checkpointing, already turned on, in the first `count` layers only."""
    for layer in decoder_layers(model)[count:]:
        layer.gradient_checkpointing = False


def set_adapter_dtype(model: Any, config: RunConfig, plan: Plan) -> None:
    """Cast everything that trains beside a frozen base to its dtype, before an engine shards it:
    TRL makes adapters of a quantised base bf16, in which most of lora_A would not move. Under
    DeepSpeed all compute in its compute dtype.
    """
    is_zero = plan.choice.layout.is_zero
    dtype = getattr(
        torch, plan.precision.compute if is_zero else adapter_dtype(config, plan.precision)
    )
    for name, parameter in model.named_parameters():
        # with it, ZeRO-3 has sharded it already
        if parameter.requires_grad and not hasattr(parameter, "ds_id"):
            is_magnitude = "lora_magnitude_vector" in name and not is_zero
            parameter.data = parameter.data.to(torch.float32 if is_magnitude else dtype)


def build_trainer(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    *,
    model: Any,
    tokenizer: Any,
    peft_config: Any,
    train_split: DataSplit,
    eval_split: DataSplit | None,
    monitor: Monitor | None = None,
    arguments: SFTConfig | None = None,
    trainer_class: type[PlannedLoop] | None = None,
    sources: MixedSources | None = None,
    **options: Any,
) -> PlannedLoop:
    """The trainer of a run; `build_plan_callbacks` gives its callbacks. `trainer_class`: its class;
    one that is not TRL's gets a model with its model_loading, and None as `peft_config`. `options`:
    others of `PlannedLoop`. Raises DataError: weights of `sources` leave one of them without a row
    in an epoch."""
    arguments = arguments or training_arguments(
        config, plan, folder, has_eval=eval_split is not None
    )
    rows = train_split.rows
    packs, sizes = None, tuple(sources.sizes) if sources else (len(rows),)
    if is_packing_enabled(config):
        packs, sizes = _pack_by_source(rows, sizes, config, plan)
    mix = sources.mix(seed=config.train.seed, sizes=sizes) if sources else None
    # optimizers that transformers knows by no name
    if config.train.optim == "muon" or plan.precision.updates == "stochastic":
        optimizer, optimizer_kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        if config.train.optim == "muon":
            optimizer = MuonWithAdamW
            optimizer_kwargs["matrices"] = muon_matrices(model)
        if plan.precision.updates == "stochastic":
            optimizer = stochastic_rounding_class(optimizer)
            optimizer_kwargs["rounding_seed"] = arguments.seed
        options["optimizer_cls_and_kwargs"] = optimizer, optimizer_kwargs
    trainer = (trainer_class or PlannedTrainer)(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        **({"peft_config": peft_config} if peft_config is not None else {}),
        train_dataset=without_pictures(rows),
        token_rows=rows,
        packs=packs,
        plan=plan,
        sorts_by_length=config.train.group_by_length,
        adds_sources=config.task_mode == "cpt_mixed" or sources is not None,
        mix=mix,
        eval_dataset=eval_split.rows if eval_split is not None else None,
        checkpoint_limit=config.train.save_total_limit,
        async_save=config.train.async_save,
        patience=config.train.early_stopping_patience,
        monitor=monitor,
        evaluates_blocks=config.task_mode == "cpt",
        on_nan=config.train.on_nan,
        loraplus_lr_ratio=(
            1.0 if config.tuning.mode == "full" else config.tuning.lora.loraplus_lr_ratio
        ),
        **options,
    )
    if peft_config is not None:
        set_adapter_dtype(trainer.model, config, plan)
        model_loading.cast_outside_autocast(trainer.model)
        set_backbone_prefix(trainer.model.get_base_model())
    if trainer_class is None and plan.choice.step.loss == "logits":
        use_class_logits(trainer.model if peft_config is None else trainer.model.get_base_model())
    engines.set_gradient_reduction(trainer, plan, config)
    trainer.remove_callback(PrinterCallback)  # `callbacks.Progress` shows the same
    return trainer


# Packs of chats of one source each, and their number by source.
def _pack_by_source(
    rows: Any, sizes: Sequence[int], config: RunConfig, plan: Plan
) -> tuple[Packs, tuple[int, ...]]:
    packs_by_source = [
        pack_best_fit(lengths, plan.max_seq_len)
        for lengths in np.split(row_lengths(rows), np.cumsum(sizes)[:-1])
    ]
    packs = concatenate_packs(packs_by_source)
    logger.debug(
        "Packing: %d chats in %d rows, %.1f a row", len(rows), len(packs), len(rows) / len(packs)
    )
    if len(packs) < plan.batch.effective_batch and distributed.is_first():
        logger.warning(
            "Packing: %d rows are fewer than one effective batch of %d, so each step sees every"
            " chat; set a smaller %s",
            len(packs),
            plan.batch.effective_batch,
            config.train.effective_batch_options,
        )
    return packs, tuple(map(len, packs_by_source))


def build_plan_callbacks(
    config: RunConfig,
    plan: Plan,
    folder: RunFolder,
    trainer: PlannedLoop,
    *,
    resume_step: int | None = None,
    metric_tags: Sequence[str] = (),
) -> list[TrainerCallback]:
    """The callbacks that follow from plan and config alone: selective checkpointing, TensorBoard
    (its curves end at `resume_step`; `metric_tags` are the tags of held-out figures), a profile."""
    callbacks: list[TrainerCallback] = []
    if plan.choice.checkpointing == "selective":
        callbacks.append(_SelectiveCheckpointing(plan.choice.checkpointed_layers))
    if "tensorboard" in config.train.report_to and distributed.is_first():
        board = TensorBoardWriter(
            folder,
            hparams=build_hparams(config, plan),
            metric_tags=metric_tags,
            answers=lambda: trainer.last_answers,
            resume_step=resume_step,
        )
        callbacks.append(board)
        trainer.step_memory.on_oom.append(board.write_oom)
    profile_window = build_profile_window(config, plan, folder.path / "profile", trainer)
    return [*callbacks, profile_window] if profile_window is not None else callbacks


# --------------------------------------------------------------------------------------------------
# The trainer of a run with its model loaded: filled, frozen and sharded as the plan says.


def load_trainer(
    job: RunJob,
    prepared: Prepared,
    eval_set: EvalSet,
    monitors: RunMonitors,
    *,
    begins_from: Path | None,
    saves_shards: bool,
) -> PlannedLoop:
    """Build the trainer with its model. `begins_from`: the folder of the weights of the stage
    before, or of the adapter that the run continues; None: the model's own. `saves_shards`: every
    rank writes its part of a checkpoint.
    """
    config, plan, model_spec = job.loaded.config, job.plan, prepared.model_spec
    arguments = training_arguments(
        config,
        plan,
        job.folder,
        has_eval=prepared.splits.val is not None,
        engine_options=engines.engine_arguments(
            plan,
            config,
            layer_class=model_spec.layer_class,
            deepspeed=job.deepspeed,
            # the tower has none on a rank whose rows have no picture
            has_late_gradients=config.tuning.trains_vision_parts
            or any(model_spec.late_gradients.values()),
        ),
    )
    if plan.choice.layout.is_fsdp and plan.hardware.device == "cpu":
        # accelerate would choose DDP for CPU ranks; the trainer reads its state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    attention_functions.join_context_parallel_group(plan.choice.layout, arguments.device)
    model, source = _load_model(job, model_spec, begins_from, arguments.device)
    set_backbone_prefix(model)
    vision = _load_vision(job, prepared, model, begins_from, arguments.device)
    # before there are adapters: Liger's functions take a model of transformers, not one of PEFT;
    # compiled blocks have no use for them
    active_kernels = ActiveKernels()
    if not (compiles := verify_compiled_blocks(model, plan, device=arguments.device)):
        active_kernels = activate_kernels(model, config, plan, device=arguments.device)
    # before the trainer: whether its collator tells the chats' lengths depends on it
    verify_varlen_kernel(model_spec, plan, device=arguments.device)
    attention_functions.enable_cudnn(enabled=plan.choice.step.cudnn)
    stop_ids: Sequence[int] = ()
    if eval_set.questions or eval_set.training_questions:
        stop_ids = collect_stop_ids(
            config.task_mode,
            prepared.tokenizer.tokenizer,
            prepared.renderer,
            configured_eos_token_ids(model),
        )
    trainer = build_run_trainer(
        job,
        prepared,
        eval_set,
        monitors,
        arguments=arguments,
        model=model,
        peft_config=model_spec.peft_config,
        stop_ids=stop_ids,
        saves_shards=saves_shards,
    )
    trainer.kernels, trainer.vision = active_kernels, vision
    if prepared.trains_adapter:
        _fill_adapter(trainer, job, model_spec, source, begins_from)
    freeze_unmatched(trainer.model, config.tuning.trainable)
    freeze_parameters(trainer.model, model_spec.untrained_parameters)
    if compiles:
        trainer.compile_monitor = compile_blocks(trainer.model)
    # comes last: only whole tensors can be filled
    _divide_weights(trainer, job, model_spec, source)
    if prepared.trains_adapter:
        model_loading.freeze_pissa_half(
            trainer.model,
            config.tuning.lora,
            is_sharded_later=plan.choice.layout.is_fsdp and source is None,
        )
    _group_adapters(trainer, job, trains_adapter=prepared.trains_adapter)
    return trainer


# LoRA layers train in groups where the plan counts on it, and blocks are not compiled.
def _group_adapters(trainer: PlannedLoop, job: RunJob, *, trains_adapter: bool) -> None:
    config, plan, is_plain = job.loaded.config, job.plan, trainer.compile_monitor is None
    counts_groups = trains_adapter and groups_adapters(config, plan.precision, plan.choice.layout)
    if counts_groups and is_plain:
        trainer.grouped_adapters = activate_grouped_adapters(
            trainer.model, plan, device=trainer.args.device
        )
    counted_kernels = (plan.kernels or CountedKernels()).speed
    trainer.runs_planned_code = (
        is_plain
        # whose short passes wait for the bus, and say nothing of the host
        and not plan.choice.layout.is_streamed
        and counts_groups == (trainer.grouped_adapters is not None)
        and (counted_kernels == "liger") == bool(trainer.kernels.replaced)
    )


# An adapter that is continued has its weights. A new one begins as `tuning.lora.init` says, with a
# source on the first rank alone, whose weights are sent to the others.
def _fill_adapter(
    trainer: PlannedLoop,
    job: RunJob,
    model_spec: ModelSpec,
    source: SourceWeights | None,
    begins_from: Path | None,
) -> None:
    config = job.loaded.config

    def read_weights() -> Mapping[str, torch.Tensor] | None:
        if source is not None or config.tuning.lora.init != "loftq":
            return source
        model = read_model(config, job.plan.precision, model_spec)
        return dict(model.named_parameters(remove_duplicate=False))

    if begins_from is not None:
        load_adapter_weights(trainer.model, begins_from)
    elif source is None or distributed.is_first():
        model_loading.initialize_adapters(
            trainer.model,
            config.tuning.lora,
            seed=config.train.seed,
            device=trainer.args.device,
            read_base_weights=read_weights,
        )


# Along a tensor-parallel axis, then by FSDP where a source fills units one after the other; or into
# RAM.
def _divide_weights(
    trainer: PlannedLoop, job: RunJob, model_spec: ModelSpec, source: SourceWeights | None
) -> None:
    needs_fp32_masters = job.plan.precision.compute != "float32"
    if model_spec.tensor_parallel_plan:
        tensor_parallel.divide_model(
            trainer.model,
            model_spec.tensor_parallel_plan,
            trainer.accelerator.torch_device_mesh["tp"],
            device=trainer.args.device,
            fp32_master_weights=needs_fp32_masters,
        )
    if source is not None:
        shard_model(
            trainer,
            source,
            layer_class=model_spec.layer_class,
            fp32_master_weights=needs_fp32_masters and job.loaded.config.tuning.mode != "qlora",
        )
    if job.plan.choice.layout.is_streamed:
        trainer.block_stream = stream_base(trainer.model, trainer.args.device)
        if job.plan.hardware.gpus and distributed.is_first():
            rate = measure_bus_rate(trainer.args.device)
            save_host_speed(
                job.plan.hardware.gpus[0].name, measured_by="a run", bus_bytes_per_s=rate
            )
            if warning := slow_bus_warning(job.plan, trainer.block_stream.host_bytes, rate):
                logger.warning("%s", warning)


def build_run_trainer(
    job: RunJob,
    prepared: Prepared,
    eval_set: EvalSet,
    monitors: RunMonitors,
    *,
    arguments: Any,
    model: Any,
    stop_ids: Sequence[int],
    **options: Any,
) -> PlannedLoop:
    """The trainer of a run on its rows and questions; `options` are other ones of
    `build_trainer`."""
    plan, splits = job.plan, prepared.splits
    return build_trainer(
        job.loaded.config,
        plan,
        job.folder,
        arguments=arguments,
        model=model,
        tokenizer=prepared.tokenizer.tokenizer,
        train_split=splits.train,
        sources=splits.sources,
        eval_split=splits.val,
        questions=eval_set.training_questions,
        stop_ids=stop_ids,
        max_new_tokens=job.loaded.config.eval.max_new_tokens,
        adds_masks=prepared.model_spec.uses_masks,
        images=prepared.image_source,
        heartbeat=monitors.heartbeat,
        monitor=Monitor(
            plan,
            tensor_parallel=plan.choice.layout.tensor_parallel,
            sources=splits.sources.names if splits.sources else DEFAULT_SOURCES,
            peaks=monitors.peaks,
        ),
        **options,
    )


# The tower and projector are the base's, or those of the whole model that a stage before has saved.
def _load_vision(
    job: RunJob, prepared: Prepared, model: Any, begins_from: Path | None, device: torch.device
) -> Vision | None:
    config, images = job.loaded.config, prepared.image_source
    if images is None:
        return None
    location = model_location(config)
    if begins_from is not None and config.tuning.mode == "full":
        location = str(begins_from)
    vision = load_vision(
        model,
        name=config.model.name,
        location=location,
        revision=config.model.revision if location == model_location(config) else None,
        images=images,
        dtype=model_loading.TORCH_DTYPES[job.plan.precision.load],
        device=device,
    )
    if config.tuning.train_vision:
        getattr(model, VISION_NAME).requires_grad_(requires_grad=True)
        unread_names = vision.freeze_unread_weights()
        if unread_names:
            logger.info(
                "Vision tower: %s stay as they are, since no image depends on them: %s",
                plural(len(unread_names), "tensor"),
                one_line(", ".join(unread_names), limit=200),
            )
    return vision


def _load_model(
    job: RunJob, model_spec: ModelSpec, begins_from: Path | None, training_device: torch.device
) -> tuple[Any, SourceWeights | None]:
    config, plan = job.loaded.config, job.plan
    if begins_from is not None and model_spec.peft_config is None:
        config = config.model_copy(
            update={
                "model": config.model.model_copy(
                    update={"name": str(begins_from), "revision": None}
                )
            }
        )
        model_spec = resized_spec(model_spec)
    device, quant_storage = engines.load_device(plan, config), engines.quant_storage(plan, config)
    if (
        loads_by_unit(config, plan.choice.layout)
        and getattr(model_spec.hf_config, "quantization_config", None) is None
    ):
        return load_for_sharding(
            config,
            plan.precision,
            model_spec,
            quant_storage=quant_storage,
            read=lambda: read_model(config, plan.precision, model_spec),
        )
    model = load_model(
        config,
        plan.precision,
        model_spec,
        device=device,
        quant_storage=quant_storage,
        # whose blocks are in RAM, but are far quicker packed on the card
        packs_on=training_device if plan.choice.layout.is_streamed else None,
    )
    return model, None
