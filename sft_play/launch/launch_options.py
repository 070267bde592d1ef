"""How a run is to be launched over GPUs and machines: make's variables, or an accelerate configuration."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.network import DEFAULT_PORT, NodeSetup
from sft_play.launch.accelerate import (
    AccelerateConfig,
    accelerate_choices,
    drop_accelerate,
    find_accelerate_file,
    read_found_file,
)
from sft_play.launch.deepspeed.fill import same_numbers
from sft_play.launch.exported import nodes_of, whole_number
from sft_play.log import one_line
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.planner.mesh import Mesh, format_mesh, parse_mesh
from sft_play.spelling import did_you_mean


@dataclass(frozen=True)
class DeepspeedRequest:
    """The wish for DeepSpeed as the engine; `file` is the user's configuration, None the shipped one of the layout."""

    file: Path | None = None


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched: what the user gave, None where the plan or the machine decides. `processes` are those of
    one node."""

    strategy: LayoutName | None = None
    processes: int | None = None
    gpus: tuple[int, ...] = ()
    nodes: NodeSetup = field(default_factory=NodeSetup)
    deepspeed: DeepspeedRequest | None = None
    board: bool = False
    show_only: bool = False
    restarts: int = 0
    notes: tuple[str, ...] = ()


def launch_options_of(
    values: Mapping[str, str], *, deepspeed: bool = False, board: bool = False, notes: tuple[str, ...] = ()
) -> LaunchOptions:
    """What the variables ask for; `notes` name the sources of values that the user did not type. Raises ConfigError
    where one of them is not a number, out of range, or an unknown strategy."""
    file = values.get("DEEPSPEED_CONFIG")
    try:
        nodes = nodes_of(values)
        if nodes.count == 1 and values.get("NNODES", "").strip():
            nodes = NodeSetup()  # without NNODES a file of accelerate may name several: address and port are kept for it
        return LaunchOptions(
            strategy=_strategy(values.get("STRATEGY")),
            processes=whole_number(values, "NPROC", least=1),
            gpus=_gpus(values.get("GPUS")),
            nodes=nodes,
            deepspeed=DeepspeedRequest(Path(file).expanduser() if file else None) if deepspeed or file else None,
            board=board,
            restarts=whole_number(values, "MAX_RESTARTS", least=0) or 0,
            notes=notes,
        )
    except ConfigError as error:
        if not notes:
            raise
        # a value that nobody typed is wrong: the message says where it comes from
        raise ConfigError(f"{error} ({'; '.join(notes)})") from None


def with_accelerate(options: LaunchOptions, accelerate: AccelerateConfig, mesh: Mesh | None = None) -> LaunchOptions:
    """The options with an accelerate configuration filled in wherever the command line says nothing. `mesh`: the run
    YAML's; FSDP in the configuration means it then, and not a layout. Raises ConfigError where it is for several
    machines and lacks the address of rank 0's."""
    nodes = options.nodes
    if nodes.count == 1 and accelerate.num_machines > 1:
        address = nodes.address or accelerate.main_process_ip
        if address is None:
            raise ConfigError(
                f"{one_line(str(accelerate.path))}: num_machines: {accelerate.num_machines} needs main_process_ip, the "
                "address of the machine of rank 0 that the others reach (make setup-accelerate: MAIN_IP=)"
            )
        port = nodes.port or accelerate.main_process_port or DEFAULT_PORT
        nodes = NodeSetup(accelerate.num_machines, accelerate.machine_rank, address, port)
    file = accelerate.deepspeed_config_file
    request = options.deepspeed or (DeepspeedRequest(file) if accelerate.distributed_type == "DEEPSPEED" else None)
    # a mesh of copies only (dp) shards nothing, so there FSDP is a layout of its own
    follows_mesh = mesh is not None and mesh.ranks > mesh.dp and accelerate.distributed_type == "FSDP"
    layout = accelerate.layout if accelerate.layout in LAYOUT_NAMES and not follows_mesh else None
    return replace(
        options,
        strategy=options.strategy or layout,
        processes=options.processes or accelerate.processes_per_machine,
        gpus=options.gpus or accelerate.gpu_ids or (),
        nodes=nodes,
        deepspeed=request,
    )


def _strategy(text: str | None) -> LayoutName | None:
    if not text:
        return None
    for name in LAYOUT_NAMES:
        if text.strip().lower() == name:
            return name
    near = did_you_mean(text, LAYOUT_NAMES, alike=0.6)
    hint = f"{near} " if near else ""
    raise ConfigError(f"STRATEGY={one_line(text)} is not a layout; {hint}there are: {', '.join(LAYOUT_NAMES)}")


def _gpus(text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if any(not (part.isascii() and part.isdigit() and len(part) < 6) for part in parts):
        raise ConfigError(f"GPUS={one_line(text or '')} is not a list of GPU numbers, such as GPUS=0,1")
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"GPUS={one_line(text or '')} names a GPU twice")
    return numbers


logger = logging.getLogger(__name__)


def take_choices() -> AccelerateConfig | None:
    """The choices of `accelerate launch`, removed from this process's environment: the Trainer's arguments set engine
    and precision, and accelerate would act on its variables as well."""
    choices = accelerate_choices(os.environ)
    drop_accelerate(os.environ)
    return choices


def as_accelerate_says(options: LaunchOptions, config: RunConfig) -> tuple[LaunchOptions, AccelerateConfig | None]:
    """The options with what an accelerate configuration adds, and that configuration; what it adds is logged."""
    file, accelerate, notes = find_accelerate_file(os.environ), None, options.notes
    if file is not None:
        accelerate, of_file = read_found_file(file, os.environ)
        notes += of_file
    for note in notes:
        logger.info("%s", note)
    if accelerate is None:
        return options, None
    return with_accelerate(options, accelerate, parse_mesh(config.model.mesh_shape)), accelerate


def machine_of_mesh(config: RunConfig, hardware: Hardware) -> Hardware:
    """The machine as a run would use it for the mesh of its YAML: as many CPU processes, or of its GPUs. GPUs that are
    only named are all used, and too few stay too few: the plan says what the mesh would take."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None:
        return hardware
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=mesh.ranks)
    return hardware if hardware.named or mesh.ranks >= hardware.ranks else hardware.limit_gpus(mesh.ranks)


def as_the_mesh_says(options: LaunchOptions, config: RunConfig) -> LaunchOptions:
    """The options with as many processes as a mesh has, where no number was given; raises ConfigError where they do not
    divide over the nodes, or there are fewer GPUs than the mesh has processes."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None or options.processes or options.gpus:
        return options
    where, nodes = f"model.mesh_shape={format_mesh(config.model.mesh_shape)}", options.nodes.count
    if mesh.ranks % nodes:
        raise ConfigError(f"{where} is a mesh of {mesh.ranks} processes, which {nodes} nodes cannot share equally")
    per_node, gpus = mesh.ranks // nodes, len(detect_hardware().gpus)
    if gpus and per_node > gpus:
        raise HardwareError(f"{where} needs {per_node} processes on each node, and there are {gpus} GPUs: one each")
    return dataclasses.replace(options, processes=per_node)


def overridden_lines(
    accelerate: AccelerateConfig,
    *,
    mixed_precision: str,
    grad_accum: int | None = None,
    max_grad_norm: float | None = None,
) -> list[str]:
    """Lines for the log: where the run YAML or the plan overrides the file. `mixed_precision` is the run's (`no`,
    `fp16`, `bf16`)."""
    kind, precision = accelerate.distributed_type, accelerate.mixed_precision
    of_fsdp = accelerate.fsdp_config if kind == "FSDP" else {"fsdp_version": 2}
    offloads = str(of_fsdp.get("fsdp_offload_params")).lower() in ("true", "yes", "on")
    wins = f"says mixed_precision: {precision}, the run YAML asks for {mixed_precision}: the run YAML wins"
    said = [
        (precision not in (None, mixed_precision), wins),
        (str(of_fsdp.get("fsdp_version", 1)) != "2", "asks for FSDP's first version: FSDP2 (fully_shard) is used"),
        (offloads, "says fsdp_offload_params: true, which is not supported: use zero3_offload for weights in RAM"),
    ]
    for key, ours in {"gradient_accumulation_steps": grad_accum, "gradient_clipping": max_grad_norm}.items():
        theirs = accelerate.deepspeed_config.get(key) if kind == "DEEPSPEED" else None
        if theirs not in (None, "auto") and ours is not None and not same_numbers(theirs, ours):
            said.append((True, f"says deepspeed_config.{key}: {theirs}, the plan {ours:g}: the plan wins"))
    return [f"{accelerate.path.name} {text}" for is_so, text in said if is_so]
