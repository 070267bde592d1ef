"""accelerate's configuration, written from the detected machine; a file that a person edited is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from sft_play.config.yaml_io import read_text
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.facts.network import Nodes, is_address
from sft_play.launch.accelerate.reading import WANTED, DistributedType
from sft_play.launch.given import nodes_of
from sft_play.log import one_line
from sft_play.runs.files import write_text

Precision = Literal["no", "fp16", "bf16"]
_MARK = "# Written by sft-play setup-accelerate; sha256 of the lines below: "
_TOTAL = "# num_processes is the total over all machines, as accelerate counts; each machine starts its share.\n"


ALONE = Nodes()


@dataclass(frozen=True)
class WrittenConfig:
    """The file and its text. `how`: a `new` file, one of ours `renewed`, the `same` as before, or a file that a person
    edited, `replaced` on request."""

    path: Path
    text: str
    how: Literal["new", "renewed", "same", "replaced"]

    @property
    def lines(self) -> tuple[str, ...]:
        """What to report: where, how, and the file's content."""
        return (f"{self.path} ({self.how}):", *(f"  {line}" for line in self.text.splitlines()))


def write_accelerate_file(
    path: Path,
    hardware: Hardware,
    *,
    mixed_precision: Precision,
    machines: Nodes = ALONE,
    gpu_ids: Sequence[int] | None = None,
    processes: int | None = None,
    overwrite: bool = False,
) -> WrittenConfig:
    """Write a configuration for machines like this one.

    `processes` is per machine (default: one per GPU; two ranks on a machine without GPUs); `gpu_ids` chooses GPUs by
    their index (default: all). The engine is left to the plan.

    Raises:
        ConfigError: the file is not ours or was edited and `overwrite` is False; GPUs or processes that do not
            exist; the file cannot be written. Nothing is written then.
    """
    ids = _chosen_gpus(hardware, gpu_ids)
    per_machine = _processes(hardware, ids, processes)
    total = per_machine * machines.count  # accelerate counts over all machines, torchrun on each
    kind: DistributedType = "NO" if total == 1 else "MULTI_GPU" if hardware.gpus else "MULTI_CPU"
    body = _TOTAL + yaml.safe_dump(
        {
            **_fields(kind, machines, mixed_precision, total=total, on_cpu=not hardware.gpus),
            **({"gpu_ids": "all" if gpu_ids is None else ",".join(map(str, ids))} if hardware.gpus else {}),
        },
        sort_keys=True,  # as `accelerate config` does
        default_flow_style=False,
    )
    text = f"{_MARK}{_digest(body)}\n{body}"
    how = _may_write(path, text, overwrite=overwrite)
    if how != "same":
        try:
            write_text(path, text)
        except OSError as error:
            raise ConfigError(f"ACCELERATE_CONFIG={path} cannot be written: {error.strerror}") from None
    return WrittenConfig(path, text, how)


def _chosen_gpus(hardware: Hardware, gpu_ids: Sequence[int] | None) -> tuple[int, ...]:
    indices = tuple(gpu.index for gpu in hardware.gpus[: hardware.gpus_per_node if hardware.gpus else 0])
    if gpu_ids is None:
        return indices
    if not gpu_ids or len(set(gpu_ids)) != len(gpu_ids) or not set(gpu_ids) <= set(indices):
        has = ", ".join(map(str, indices)) or "no GPU"
        raise ConfigError(f"GPUS={','.join(map(str, gpu_ids))} cannot be used: this machine has {has}; name each once")
    return tuple(gpu_ids)


def _processes(hardware: Hardware, ids: tuple[int, ...], processes: int | None) -> int:
    if processes is None:
        return len(ids) if hardware.gpus else 2  # on a CPU the fewest that are several
    if hardware.gpus and processes > len(ids):
        raise ConfigError(f"NPROC={processes} cannot be used; give a number up to {len(ids)}, one for each GPU")
    return processes


def _fields(kind: DistributedType, machines: Nodes, precision: str, *, total: int, on_cpu: bool) -> dict[str, Any]:
    """The fields that `accelerate config` writes for every kind."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": machines.rank,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": machines.count,
        "num_processes": total,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": on_cpu,
        **({} if machines.address is None else {"main_process_ip": machines.address}),
        **({} if machines.port is None else {"main_process_port": machines.port}),
    }


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8")).hexdigest()


def _may_write(path: Path, text: str, *, overwrite: bool) -> Literal["new", "renewed", "same", "replaced"]:
    if not path.exists():
        return "new"
    present = read_text(path, variable="ACCELERATE_CONFIG", wanted=WANTED)
    first, _, body = present.partition("\n")
    if present == text:
        return "same"
    if first == f"{_MARK}{_digest(body)}":
        return "renewed"
    if overwrite:
        return "replaced"
    why = "was edited since it was written" if present.startswith(_MARK) else "was not written by this command"
    raise ConfigError(
        f"{path} {why}, so it is not overwritten; FORCE=1 replaces it, ACCELERATE_CONFIG=other.yaml writes another file"
    )


def machines_of(environment: Mapping[str, str]) -> Nodes:
    """`NUM_MACHINES`, `MACHINE_RANK` (0 where it is not given), `MAIN_IP` and `MAIN_PORT` from the command line.

    Raises:
        ConfigError: as `nodes_of`, or the address is none.
    """
    given = {**environment, "MACHINE_RANK": environment.get("MACHINE_RANK", "").strip() or "0"}
    nodes = nodes_of(given, ("NUM_MACHINES", "MACHINE_RANK", "MAIN_IP", "MAIN_PORT"))
    if nodes.address is not None and not is_address(nodes.address):
        raise ConfigError(f"MAIN_IP={one_line(nodes.address)} is not a host name or an IP address")
    return nodes
