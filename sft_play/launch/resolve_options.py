"""How a run is spread where several places say it: flags, an accelerate configuration, the mesh of the run YAML."""

from __future__ import annotations

import dataclasses
import logging
import os

from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.facts.hardware import Hardware, detect
from sft_play.launch.accelerate.launched import accelerate_choices, drop_accelerate
from sft_play.launch.accelerate.reading import AccelerateConfig, find_accelerate_file, read_found_file
from sft_play.launch.deepspeed.fill import same_numbers
from sft_play.launch.launch_options import LaunchOptions, with_accelerate
from sft_play.log import one_line
from sft_play.planner.mesh import mesh_of, mesh_words
from sft_play.planner.plan import Plan

logger = logging.getLogger(__name__)


def take_choices() -> AccelerateConfig | None:
    """The choices of `accelerate launch`, removed from this process's environment: the Trainer's arguments set engine
    and precision, and accelerate would act on its variables as well."""
    choices = accelerate_choices(os.environ)
    drop_accelerate(os.environ)
    return choices


def log_choices(choices: AccelerateConfig, plan: Plan, *, max_grad_norm: float, with_count: bool = False) -> None:
    """Log where the plan and the run YAML win over a file of accelerate, or over `accelerate launch`.

    Args:
        max_grad_norm: the run's, which such a file may contradict.
        with_count: whether the choices hold a number of processes.
    """
    for line in overridden_lines(
        choices,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}.get(plan.precision.compute, "no"),
        grad_accum=plan.batch.grad_accum,
        max_grad_norm=max_grad_norm,
        has_gpus=bool(plan.hardware.gpus),
        with_count=with_count,
    ):
        logger.info("%s", line)


def as_accelerate_says(options: LaunchOptions, config: RunConfig) -> tuple[LaunchOptions, AccelerateConfig | None]:
    """The options with what an accelerate configuration adds, and that configuration; what it adds is logged."""
    file, accelerate, notes = find_accelerate_file(os.environ), None, options.notes
    if file is not None:
        accelerate, of_file = read_found_file(file, os.environ)
        notes += of_file
    for note in notes:
        logger.info("%s", note)
    return (with_choices(options, accelerate, config) if accelerate else options), accelerate


def with_choices(options: LaunchOptions, accelerate: AccelerateConfig, config: RunConfig) -> LaunchOptions:
    """The options with accelerate's choices; where the run YAML has a mesh, FSDP in accelerate's file means that mesh,
    not a layout."""
    mesh = mesh_of(config.model.mesh_shape)
    # a mesh of copies only (dp) shards nothing, so there FSDP is a layout of its own
    if mesh is not None and mesh.ranks > mesh.dp and accelerate.distributed_type == "FSDP":
        accelerate = dataclasses.replace(accelerate, mesh=mesh)
    return with_accelerate(options, accelerate)


def with_mesh_of(accelerate: AccelerateConfig, loaded: LoadedConfig) -> LoadedConfig:
    """The run YAML with the mesh of a file of accelerate, where it has none itself; logs which one is used."""
    own, name = mesh_of(loaded.config.model.mesh_shape), one_line(str(accelerate.path))
    if accelerate.mesh is None or own == accelerate.mesh:
        return loaded
    if own is not None:
        logger.info("%s says parallelism_config %s, the run YAML model.mesh_shape=%s: the run YAML wins",
                    name, accelerate.mesh, mesh_words(loaded.config.model.mesh_shape))  # fmt: skip
        return loaded
    logger.info("%s: its parallelism_config is model.mesh_shape=%s", name, accelerate.mesh)
    return load_config(loaded.path, overrides=(*loaded.overrides, f"model.mesh_shape={accelerate.mesh}"))


def machine_of_mesh(config: RunConfig, hardware: Hardware) -> Hardware:
    """The machine as a run would use it for the mesh of its YAML: as many CPU processes, or as many of its GPUs.

    GPUs that are only named are all used, and too few stay too few: the plan says what the mesh would take.
    """
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is None:
        return hardware
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=mesh.ranks)
    return hardware if hardware.named or mesh.ranks >= hardware.ranks else hardware.first(mesh.ranks)


def as_the_mesh_says(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """The options with as many processes as a mesh has, where no number was given.

    Raises:
        ConfigError: they do not divide over the nodes, or there are fewer GPUs than the mesh has processes.
    """
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is None or options.processes or options.gpus:
        return options
    where, nodes = f"model.mesh_shape={mesh_words(config.model.mesh_shape)}", options.nodes.count
    if mesh.ranks % nodes:
        raise ConfigError(f"{where} is a mesh of {mesh.ranks} processes, which {nodes} nodes cannot share equally")
    per_node, gpus = mesh.ranks // nodes, len(detect().gpus)
    if gpus and per_node > gpus:
        raise HardwareError(f"{where} needs {per_node} processes on each node, and there are {gpus} GPUs: one each")
    return dataclasses.replace(options, processes=per_node)


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
