"""How a run is to be launched over GPUs and machines: make's variables, or an accelerate configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sft_play.errors import ConfigError
from sft_play.facts.network import DEFAULT_PORT, Nodes, is_address
from sft_play.launch.accelerate.reading import AccelerateConfig
from sft_play.launch.given import whole_number
from sft_play.log import one_line
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.spelling import did_you_mean

NODE_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


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
    nodes: Nodes = field(default_factory=Nodes)
    deepspeed: DeepspeedRequest | None = None
    board: bool = False
    """Whether TensorBoard runs beside the ranks."""
    show_only: bool = False
    """Whether the command is shown and nothing is started (`make launch-command`)."""
    notes: tuple[str, ...] = ()
    """Log lines about values that the user did not type, with their source."""


def launch_options_of(
    values: Mapping[str, str], *, deepspeed: bool = False, board: bool = False, notes: tuple[str, ...] = ()
) -> LaunchOptions:
    """What the variables ask for; `notes` name the sources of values that the user did not type.

    Raises:
        ConfigError: one of them is not a number, out of range, or an unknown strategy.
    """
    try:
        return _options_of(values, deepspeed=deepspeed, board=board, notes=notes)
    except ConfigError as error:
        if not notes:
            raise
        # a value that nobody typed is wrong: the message says where it comes from
        raise ConfigError(f"{error} ({'; '.join(notes)})") from None


def _options_of(values: Mapping[str, str], *, deepspeed: bool, board: bool, notes: tuple[str, ...]) -> LaunchOptions:
    count = whole_number(values, "NNODES", least=1) or 1
    rank = whole_number(values, "NODE_RANK", least=0)
    port = whole_number(values, "MASTER_PORT", least=1)
    if port is not None and port > 65_535:
        raise ConfigError(f"MASTER_PORT={port} is not a port; ports go from 1 to 65535")
    address = values.get("MASTER_ADDR", "").strip()
    if (rank or 0) >= count and not values.get("NNODES", "").strip():
        raise ConfigError(f"NODE_RANK={rank} names one of several nodes, but NNODES= does not say how many there are")
    if (rank or 0) >= count:
        raise ConfigError(f"NODE_RANK={rank} is not one of NNODES={count}: ranks go from 0 to {count - 1}")
    if count > 1 and (rank is None or not address):
        raise ConfigError(
            f"NNODES={count} needs NODE_RANK=0 to {count - 1} and MASTER_ADDR=, an address at which the others reach "
            f"node 0 (and MASTER_PORT=, default {DEFAULT_PORT})"
        )
    if count > 1 and not is_address(address):
        raise ConfigError(
            f"MASTER_ADDR={one_line(address)} is not a host name or an IP address; the port goes into MASTER_PORT="
        )
    file = values.get("DEEPSPEED_CONFIG")
    # Without NNODES a file of accelerate may name several machines: address and port are kept for it.
    is_open = not values.get("NNODES", "").strip()
    nodes = Nodes(1, 0, address or None, port) if is_open else Nodes()
    if count > 1:
        nodes = Nodes(count, rank or 0, address, port or DEFAULT_PORT)
    return LaunchOptions(
        strategy=_strategy(values.get("STRATEGY")),
        processes=whole_number(values, "NPROC", least=1),
        gpus=_gpus(values.get("GPUS")),
        nodes=nodes,
        deepspeed=DeepspeedRequest(Path(file).expanduser() if file else None) if deepspeed or file else None,
        board=board,
        notes=notes,
    )


def with_accelerate(options: LaunchOptions, accelerate: AccelerateConfig) -> LaunchOptions:
    """The options with an accelerate configuration filled in wherever the command line says nothing.

    Raises:
        ConfigError: it is for several machines and lacks the address of rank 0's.
    """
    nodes = options.nodes
    if nodes.count == 1 and accelerate.num_machines > 1:
        address = nodes.address or accelerate.main_ip
        if address is None:
            raise ConfigError(
                f"{one_line(str(accelerate.path))}: num_machines: {accelerate.num_machines} needs main_process_ip, the "
                "address of the machine of rank 0 that the others reach (make setup-accelerate: MAIN_IP=)"
            )
        port = nodes.port or accelerate.main_port or DEFAULT_PORT
        nodes = Nodes(accelerate.num_machines, accelerate.machine_rank, address, port)
    file = accelerate.deepspeed_config_file
    request = options.deepspeed or (DeepspeedRequest(file) if accelerate.distributed_type == "DEEPSPEED" else None)
    # with a mesh the layout follows from the mesh
    layout = accelerate.layout if accelerate.layout in LAYOUT_NAMES and accelerate.mesh is None else None
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
