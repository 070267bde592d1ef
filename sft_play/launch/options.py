"""How a run is to be launched over GPUs and machines, as make's variables say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.errors import ConfigError
from sft_play.facts.network import NodeSetup
from sft_play.launch.torchrun import read_nodes, read_whole_number
from sft_play.log import one_line
from sft_play.planner.layout import LAYOUT_NAMES, LayoutName
from sft_play.spelling import did_you_mean


@dataclass(frozen=True)
class DeepspeedRequest:
    """A request for DeepSpeed as the engine; `file` is the user's configuration, None the layout's shipped one."""

    file: Path | None = None


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is launched: what the user gave, None where the plan or the machine decides. `processes` are those of
    one node."""

    strategy: LayoutName | None = None
    processes_per_node: int | None = None
    gpus: tuple[int, ...] = ()
    nodes: NodeSetup = field(default_factory=NodeSetup)
    deepspeed: DeepspeedRequest | None = None
    uses_tensorboard: bool = False
    dry_run: bool = False
    max_restarts: int = 0
    notes: tuple[str, ...] = ()


def parse_launch_options(
    values: Mapping[str, str],
    *,
    uses_deepspeed: bool = False,
    uses_tensorboard: bool = False,
    notes: tuple[str, ...] = (),
) -> LaunchOptions:
    """Parse make's launch variables; `notes` name the sources of values that the user did not type. Raises
    ConfigError where one of them is not a number, out of range, or an unknown strategy."""
    file = values.get("DEEPSPEED_CONFIG")
    try:
        nodes = read_nodes(values)
        if nodes.count == 1 and values.get("NNODES", "").strip():
            # without NNODES a file of accelerate may name several: address and port are kept for it
            nodes = NodeSetup()
        return LaunchOptions(
            strategy=_parse_strategy(values.get("STRATEGY")),
            processes_per_node=read_whole_number(values, "NPROC", minimum=1),
            gpus=_parse_gpus(values.get("GPUS")),
            nodes=nodes,
            deepspeed=DeepspeedRequest(Path(file).expanduser() if file else None) if uses_deepspeed or file else None,
            uses_tensorboard=uses_tensorboard,
            max_restarts=read_whole_number(values, "MAX_RESTARTS", minimum=0) or 0,
            notes=notes,
        )
    except ConfigError as error:
        if not notes:
            raise
        # a value that nobody typed is wrong: the message says where it comes from
        raise ConfigError(f"{error} ({'; '.join(notes)})") from None


def _parse_strategy(text: str | None) -> LayoutName | None:
    if not text:
        return None
    for name in LAYOUT_NAMES:
        if text.strip().lower() == name:
            return name
    suggestion = did_you_mean(text, LAYOUT_NAMES, min_similarity=0.6)
    hint = f"{suggestion} " if suggestion else ""
    raise ConfigError(f"STRATEGY={one_line(text)} is not a layout; {hint}there are: {', '.join(LAYOUT_NAMES)}")


def _parse_gpus(text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if any(not (part.isascii() and part.isdigit() and len(part) < 6) for part in parts):
        raise ConfigError(f"GPUS={one_line(text or '')} is not a list of GPU numbers, such as GPUS=0,1")
    gpu_indices = tuple(int(part) for part in parts)
    if len(set(gpu_indices)) != len(gpu_indices):
        raise ConfigError(f"GPUS={one_line(text or '')} names a GPU twice")
    return gpu_indices
