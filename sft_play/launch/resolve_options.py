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
from sft_play.launch.accelerate.overridden import overridden_lines
from sft_play.launch.accelerate.places import find_accelerate_file
from sft_play.launch.accelerate.reading import AccelerateConfig, read_found_file
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
