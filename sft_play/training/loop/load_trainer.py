"""The trainer of a run with its model loaded: filled, frozen and sharded as the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sft_play.config.schema import RunConfig
from sft_play.planner.memory.model_states import loads_by_unit
from sft_play.planner.precision import Precision
from sft_play.training import distributed, engines
from sft_play.training.checkpoints.full_state_dict import load_adapter_weights
from sft_play.training.class_checks.adapter_trial import freeze_parameters
from sft_play.training.class_checks.compiling import compile_blocks
from sft_play.training.class_checks.kernels import activate_kernels
from sft_play.training.class_checks.proof import verify_varlen_kernel
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.rows import DEFAULT_SOURCES
from sft_play.training.loop.trainer import build_trainer, training_arguments
from sft_play.training.measure.evaluate import EvalSet
from sft_play.training.measure.exact_match import collect_stop_ids, configured_eos_token_ids
from sft_play.training.measure.monitor import Monitor
from sft_play.training.measure.peaks import RunMonitors
from sft_play.training.model import adapter_start, context_parallel, fsdp_loading, sdpa, tensor_parallel
from sft_play.training.model.fused_head import set_backbone_prefix
from sft_play.training.model.model_loading import load_model, read_model
from sft_play.training.prepare.lora_config import freeze_unmatched
from sft_play.training.prepare.model_spec import ModelSpec, resized_spec
from sft_play.training.prepare.prepare import Prepared


def load_trainer(
    job: RunJob,
    prepared: Prepared,
    eval_set: EvalSet,
    monitors: RunMonitors,
    *,
    begins_from: Path | None,
    saves_shards: bool,
) -> PlannedLoop:
    """Build the trainer with its model. `begins_from`: the folder of the weights of the stage before, or of the adapter
    that the run continues; None: the model's own. `saves_shards`: every rank writes its part of a checkpoint."""
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
            has_late_gradients=any(model_spec.late_gradients.values()),
        ),
    )
    engines.allow_fsdp_on_cpu(plan)  # after the arguments, which create accelerate's state, before the trainer reads it
    context_parallel.join_context_parallel_group(plan.choice.layout, arguments.device)
    model, source = _load_model(job, model_spec, begins_from)
    set_backbone_prefix(model)
    # before there are adapters: Liger's functions take a model of transformers, not one of PEFT
    active_kernels = activate_kernels(model, config, plan, device=arguments.device)
    # before the trainer: whether its collator tells the chats' lengths depends on it
    verify_varlen_kernel(model_spec, plan, device=arguments.device)
    sdpa.enable_cudnn(enabled=plan.choice.step.cudnn)
    stop_ids: Sequence[int] = ()
    if eval_set.questions or eval_set.training_questions:
        stop_ids = collect_stop_ids(
            config.task_mode, prepared.tokenizer.tokenizer, prepared.renderer, configured_eos_token_ids(model)
        )
    trainer = build_run_trainer(
        job, prepared, eval_set, monitors, arguments=arguments, model=model, peft_config=model_spec.peft_config,
        stop_ids=stop_ids, saves_shards=saves_shards,
    )  # fmt: skip
    trainer.kernels = active_kernels
    if begins_from is not None and prepared.trains_adapter:
        load_adapter_weights(trainer.model, begins_from)
    # with a source the first rank's are sent
    elif prepared.trains_adapter and (source is None or distributed.is_first()):
        read_weights = partial(_base_weights, config, plan.precision, model_spec, source)
        adapter_start.initialize_adapters(
            trainer.model,
            config.tuning.lora,
            seed=config.train.seed,
            device=trainer.args.device,
            read_base_weights=read_weights,
        )
    freeze_unmatched(trainer.model, config.tuning.trainable)
    freeze_parameters(trainer.model, model_spec.untrained_parameters)
    trainer.compile_monitor = compile_blocks(trainer.model, config, plan, device=arguments.device)
    # sharding comes last: only whole tensors can be filled
    needs_fp32_masters = plan.precision.compute != "float32"
    if model_spec.tensor_parallel_plan:
        mesh = trainer.accelerator.torch_device_mesh["tp"]
        tensor_parallel.divide_model(
            trainer.model,
            model_spec.tensor_parallel_plan,
            mesh,
            device=trainer.args.device,
            fp32_master_weights=needs_fp32_masters,
        )
    if source is not None:
        in_fp32 = needs_fp32_masters and config.tuning.mode != "qlora"
        fsdp_loading.shard_model(trainer, source, layer_class=model_spec.layer_class, fp32_master_weights=in_fp32)
    if prepared.trains_adapter:
        is_sharded_later = plan.choice.layout.is_fsdp and source is None
        adapter_start.freeze_pissa_half(trainer.model, config.tuning.lora, is_sharded_later=is_sharded_later)
    return trainer


def _base_weights(
    config: RunConfig, precision: Precision, model_spec: ModelSpec, source: fsdp_loading.SourceWeights | None
) -> Mapping[str, torch.Tensor] | None:
    if source is not None or config.tuning.lora.init != "loftq":
        return source
    return dict(read_model(config, precision, model_spec).named_parameters(remove_duplicate=False))


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
    """The trainer of a run on its rows and questions; `options` are other ones of `build_trainer`."""
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
        heartbeat=monitors.heartbeat,
        monitor=Monitor(
            plan,
            tensor_parallel=plan.choice.layout.tensor_parallel,
            sources=splits.sources.names if splits.sources else DEFAULT_SOURCES,
            peaks=monitors.memory.peaks,
        ),
        **options,
    )


def _load_model(
    job: RunJob, model_spec: ModelSpec, begins_from: Path | None
) -> tuple[Any, fsdp_loading.SourceWeights | None]:
    config, plan = job.loaded.config, job.plan
    if begins_from is not None and model_spec.peft_config is None:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"name": str(begins_from), "revision": None})}
        )
        model_spec = resized_spec(model_spec)
    device, quant_storage = engines.load_device(plan, config), engines.quant_storage(plan, config)
    if loads_by_unit(config, plan.choice.layout) and getattr(model_spec.hf_config, "quantization_config", None) is None:
        return fsdp_loading.load_for_sharding(
            config, plan.precision, model_spec, quant_storage=quant_storage,
            read=lambda: read_model(config, plan.precision, model_spec),
        )  # fmt: skip
    return load_model(config, plan.precision, model_spec, device=device, quant_storage=quant_storage), None
