"""The keys that DeepSpeed's configuration knows, those it has renamed, and those it has removed.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on every rank; in all
others, the top level first, an unknown key is ignored without a word. So the keys are listed here, from DeepSpeed
0.19 (https://github.com/deepspeedai/DeepSpeed: `deepspeed/runtime/config.py`, `runtime/constants.py`,
`runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/precision_config.py`, `monitor/config.py`, and
`docs/_pages/config-json.md`). Fields that an installed DeepSpeed has beyond them are known too: its source is read,
never imported.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

Sections = dict[str, frozenset[str]]
"""Section's dotted path ("" is the top level): the keys that it knows."""

TOP = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler communication_data_type seq_parallel_communication_data_type prescale_gradients "
    "gradient_predivide_factor gradient_allreduce_op gradient_clipping fp16 bf16 torch_autocast zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown memory_breakdown "
    "dump_state disable_python_gc disable_allgather vocabulary_size dataloader_drop_last log_level "
    "activation_checkpointing flops_profiler comms_logger tensorboard wandb csv_monitor comet autotuning "
    "data_efficiency hybrid_engine pipeline checkpoint data_types aio compile timers tensor_parallel expert_parallel "
    "use_data_before_expert_parallelism weight_quantization datastates_ckpt sequence_parallel_size inference"
)
_OFFLOAD = "device nvme_path buffer_count pin_memory "
_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
)
"""Known with and without the prefix `stage3_` (pydantic's `populate_by_name`)."""

SHIPPED: Sections = {
    section: frozenset(keys.split())
    for section, keys in {
        "": TOP,
        "optimizer": "type params legacy_fusion",
        "scheduler": "type params",
        "zero_optimization": (
            "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
            "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
            "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size ignore_unused_parameters "
            "legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
            "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
            "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
            f"save_muon_momentum_buffer_in_memory leaf_module {_STAGE3} "
        )
        + " ".join(f"stage3_{key}" for key in _STAGE3.split()),
        "zero_optimization.offload_param": _OFFLOAD + "buffer_size max_in_cpu",
        "zero_optimization.offload_optimizer": _OFFLOAD
        + "pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc",
        "zero_optimization.zenflow": (
            "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
            "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch"
        ),
        "zero_optimization.leaf_module": "classes names name_suffixes",
        "bf16": (
            "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
        ),
        "fp16": (
            "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
            "min_loss_scale fp16_master_weights_and_grads"
        ),
        "torch_autocast": "enabled dtype lower_precision_safe_modules",
        "activation_checkpointing": (
            "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
            "profile cpu_checkpointing"
        ),
        "flops_profiler": ("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
        "comms_logger": "enabled prof_all prof_ops verbose debug",
        "tensorboard": "enabled output_path job_name",
        "csv_monitor": "enabled output_path job_name",
        "wandb": "enabled group team project",
        "comet": ("enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"),
        "hybrid_engine": (
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
            "tp_gather_partition_size enable_cuda_graph"
        ),
        "checkpoint": (
            "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer"
        ),
        "checkpoint.parallel_write": "pipeline_stage",
        "checkpoint.writer": (
            "type io_buffer_size io_buffer_double io_multiplier show_statistics data_parallel decoupled"
        ),
        "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
        "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
        "compile": (
            "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
            "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
            "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
            "keep_int_input_tensors keep_all_input_tensors passes"
        ),
        "timers": "throughput",
        "timers.throughput": "enabled synchronized",
        "tensor_parallel": (
            "dtype autotp_size tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tensor_parallel tp "
            "injection_policy_tuple partition_config preset_model keep_module_on_host kernel_inject "
            "replace_with_kernel_inject"
        ),
        "tensor_parallel.tp": "tp_size tp_grain_size mpu tp_group",
    }.items()
}
"""`optimizer.params`, `scheduler.params`, `data_efficiency`, `autotuning`, `pipeline`, `expert_parallel`,
`weight_quantization`, `datastates_ckpt` and `inference` are open: what they may contain depends on their values.
`sequence_parallel_size` and `inference` are read by transformers and by DeepSpeed's ZeRO-3 loading."""

MODELS: dict[str, tuple[str, str]] = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.zenflow": ("runtime/zenflow/zenflow_config.py", "ZenFlowConfig"),
    "zero_optimization.leaf_module": ("runtime/zero/leaf_module_config.py", "DeepSpeedZeroLeafModuleConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "timers.throughput": ("utils/config.py", "DeepSpeedThroughputTimerConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "tensor_parallel.tp": ("runtime/tensor_parallel/config.py", "TPConfig"),
}
"""Sections that DeepSpeed reads with pydantic: file and class, under the package's folder."""

RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "fp32_allreduce": "communication_data_type",
    "allreduce_always_fp32": "communication_data_type",
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "bf16.check_overflow": "bf16.check_grad_overflow",
    "aio.thread_count": "aio.intra_op_parallelism",
    "activation_checkpointing.partitioned_activations": "activation_checkpointing.partition_activations",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Old keys that guides teach, and their current names."""

REMOVED: dict[str, str] = {
    "nebula": "checkpoints are written without it",
    "compression_training": "the compression library is gone",
    "amp": "use bf16 or fp16",
    "quantize_training": "mixture-of-quantization is gone",
    "sparse_gradients": "gradients of an embedding with sparse=True are reduced sparsely anyway",
    "eigenvalue": "mixture-of-quantization is gone",
    "sparse_attention": "sparse attention is gone",
    "elasticity": "elastic training is gone",
    "graph_harvesting": "graph harvesting is gone",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning replaced it",
    "progressive_layer_drop": "progressive layer dropping is gone",
    "zero_optimization.mics_shard_size": "MiCS is gone; zero_hpz_partition_size shards inside a node",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS is gone",
    "zero_optimization.zeropp_loco_param": "LoCo is gone; zero_quantized_gradients works without it",
    "zero_optimization.grad_hooks": "stage 1 needs no hooks of its own",
    "compile.enabled": "the engine's compile() takes its place",
    "compile.disable": "the engine's compile() takes its place",
    "compile.backend": "the engine's compile() takes it as an argument",
    "compile.kwargs": "the engine's compile() takes them as arguments",
}
"""Keys that DeepSpeed once knew: `_reject_removed_config_keys` in `runtime/config.py` (its reasons:
https://github.com/deepspeedai/DeepSpeed/issues/8489), `grad_hooks` of `docs/_pages/config-json.md`, and an earlier form
of `compile`; today's classes refuse both."""

LOSS_SCALING = SHIPPED["fp16"] - {"enabled", "fp16_master_weights_and_grads"}
"""Keys of fp16 that old guides put into bf16 too, where they never had an effect and are rejected today."""

AUTO_IS_A_VALUE = (
    "zero_optimization.zenflow",
    "expert_parallel",
    "data_types.keep_in_fp32_modules",
    "pipeline",
    "autotuning",
    "data_efficiency",
    "inference",
)
"""Paths where DeepSpeed itself understands "auto"."""


@functools.cache
def known() -> Sections:
    """The shipped table, and what an installed DeepSpeed's sections have beyond it."""
    folder = installed_folder()
    if folder is None:
        return SHIPPED
    return {section: keys | fields_of(section, folder) for section, keys in SHIPPED.items()}


def installed_folder() -> Path | None:
    """The folder of the installed DeepSpeed, found without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec("deepspeed")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def fields_of(section: str, folder: Path) -> frozenset[str]:
    """Field names and aliases of the pydantic class that reads a section, from its source; empty if there is none.

    Fields that the class marks as deprecated are left out: `RENAMED` has them.
    """
    if section not in MODELS:
        return frozenset()
    file, name = MODELS[section]
    try:
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            names |= {key for field in node.body if isinstance(field, ast.AnnAssign) for key in _names(field)}
    return frozenset(names)


def _names(field: ast.AnnAssign) -> set[str]:
    """The names that a field may have in a file."""
    if not isinstance(field.target, ast.Name):
        return set()
    keywords = {item.arg: item.value for item in field.value.keywords} if isinstance(field.value, ast.Call) else {}
    extra = keywords.get("json_schema_extra")  # where DeepSpeed's models mark a field as deprecated
    if extra is not None and "'deprecated'" in ast.dump(extra):
        return set()
    alias = keywords.get("alias")
    return {field.target.id} | ({str(alias.value)} if isinstance(alias, ast.Constant) else set())
