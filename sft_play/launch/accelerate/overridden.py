"""What an accelerate configuration says and the plan, the run YAML or the machine overrides, for the log."""

from __future__ import annotations

from sft_play.launch.accelerate.reading import AccelerateConfig
from sft_play.launch.deepspeed.fill import same_numbers


def overridden_lines(
    accelerate: AccelerateConfig,
    *,
    mixed_precision: str,
    grad_accum: int | None = None,
    max_grad_norm: float | None = None,
    has_gpus: bool = True,
    with_count: bool = True,
) -> list[str]:
    """Lines for the log: how the file's process count is read, and where the run YAML or the machine overrides the
    file.

    `mixed_precision` is the run's (`no`, `fp16`, `bf16`). `with_count` is False for the variables that `accelerate
    launch` sets for a rank, which do not include the count.
    """
    name, total, machines = accelerate.path.name, accelerate.num_processes, accelerate.num_machines
    lines = []
    if with_count and total is None:
        lines.append(f"{name} names no num_processes: one process for each GPU of each machine")
    elif with_count and total is not None:
        where = f"{machines} machines, {total // machines} on each" if machines > 1 else "one machine"
        lines.append(f"{name}: num_processes: {total} is accelerate's total over machines ({where})")
    theirs = accelerate.mixed_precision
    if theirs is not None and theirs != mixed_precision:
        lines.append(
            f"{name} says mixed_precision: {theirs}, the run YAML asks for {mixed_precision}: the run YAML wins"
        )
    lines += _block_lines(accelerate, name, grad_accum, max_grad_norm)
    if not has_gpus and accelerate.distributed_type == "MULTI_GPU":
        lines.append(
            f"{name} says distributed_type: MULTI_GPU and this machine has no GPU: CPU ranks (gloo) are started"
        )
    if has_gpus and accelerate.use_cpu:
        lines.append(f"{name} says use_cpu: true: CPU ranks (gloo) are started beside idle GPUs")
    return lines


def _block_lines(
    accelerate: AccelerateConfig, name: str, grad_accum: int | None, max_grad_norm: float | None
) -> list[str]:
    """Values of the engine's block that the plan decides."""
    lines = []
    if accelerate.distributed_type == "DEEPSPEED":
        compared = {"gradient_accumulation_steps": grad_accum, "gradient_clipping": max_grad_norm}
        for key, ours in compared.items():
            theirs = accelerate.deepspeed.get(key)
            if theirs not in (None, "auto") and ours is not None and not same_numbers(theirs, ours):
                lines.append(f"{name} says deepspeed_config.{key}: {theirs}, the plan {ours:g}: the plan wins")
    if accelerate.distributed_type == "FSDP" and str(accelerate.fsdp.get("fsdp_version", 1)) != "2":
        lines.append(f"{name} asks for FSDP's first version: FSDP2 (fully_shard) is used")
    offloads = str(accelerate.fsdp.get("fsdp_offload_params")).lower() in ("true", "yes", "on")
    if accelerate.distributed_type == "FSDP" and offloads:
        lines.append(
            f"{name} says fsdp_offload_params: true, which is not supported: use zero3_offload for weights in RAM"
        )
    return lines
