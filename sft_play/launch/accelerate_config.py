"""accelerate's configuration: written from the detected machine, and read as `accelerate config` leaves it.

Fields and their defaults are those of accelerate 1.15 (https://github.com/huggingface/accelerate:
`src/accelerate/commands/config/config_args.py`, `cluster.py`). accelerate reads YAML 1.1, in which an unquoted `no`
is false; a false where a word belongs is read as `no` here.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from sft_play.config import yaml_io
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware
from sft_play.launch.deepspeed_config import LAYOUTS, same_numbers
from sft_play.launch.given_file import text_of
from sft_play.log import one_line
from sft_play.planner.layout import LayoutName
from sft_play.planner.mesh import Mesh
from sft_play.runs.files import write_text

DistributedType = Literal["NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"]
Precision = Literal["no", "fp16", "bf16"]

PROJECT_FILE = Path("configs/accelerate/default_config.yaml")
"""Where the configuration is written unless `ACCELERATE_CONFIG` names another place: inside the project. accelerate's
own place is shared by all of a user's projects: it is read where this file is missing, and never written."""
NO_FILE = "none"
"""`ACCELERATE_CONFIG=none`: no configuration is read."""
DEFAULT_PORT = 29500
"""torch.distributed's and accelerate's default port of the main process."""
WANTED = "a configuration that `make setup-accelerate` or `accelerate config` wrote"
_MARK = "# Written by sft-play setup-accelerate; sha256 of the lines below: "
_TOTAL = "# num_processes is the total over all machines, as accelerate counts; each machine starts its share.\n"
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def config_path(environment: Mapping[str, str]) -> Path:
    """Where the configuration is, or would be written: `ACCELERATE_CONFIG`, else `PROJECT_FILE`."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    return Path(given).expanduser() if given and given != NO_FILE else PROJECT_FILE


def accelerate_place(environment: Mapping[str, str] | None = None) -> Path:
    """Where `accelerate config` writes its answers by default (`accelerate/commands/config`)."""
    environment = os.environ if environment is None else environment
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "accelerate" / "default_config.yaml"


def find_config(environment: Mapping[str, str]) -> Path | None:
    """The configuration that a launch reads: the named one, else the project's, else accelerate's own."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    if given:
        return None if given == NO_FILE else config_path(environment)
    return next((path for path in (PROJECT_FILE, accelerate_place(environment)) if path.is_file()), None)


def read_found(path: Path, environment: Mapping[str, str]) -> tuple[AccelerateConfig, tuple[str, ...]]:
    """The configuration of `find_config`, and a log line about it where the user did not name it.

    Raises:
        ConfigError: as `read_config`; of accelerate's own file, with how to leave it out.
    """
    if path != accelerate_place(environment) or environment.get("ACCELERATE_CONFIG", "").strip():
        return read_config(path), ()
    without = f"ACCELERATE_CONFIG={NO_FILE} leaves it out"
    try:
        config = read_config(path)
    except ConfigError as error:
        raise ConfigError(f"{error}\nThis is accelerate's own file, which is read by default: {without}") from None
    return config, (f"accelerate's own file {one_line(str(path))} is read ({without})",)


# --- several machines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and which of them this is. `main_ip` and `main_port` are where rank 0 listens."""

    num_machines: int = 1
    machine_rank: int = 0
    main_ip: str | None = None
    main_port: int | None = None


def machines_of(environment: Mapping[str, str]) -> Machines:
    """`NUM_MACHINES`, `MACHINE_RANK`, `MAIN_IP` and `MAIN_PORT` from the command line.

    Raises:
        ConfigError: one is not a number or out of range, or several machines have no main address.
    """
    machines = Machines(
        num_machines=whole_number(environment, "NUM_MACHINES", least=1) or 1,
        machine_rank=whole_number(environment, "MACHINE_RANK", least=0) or 0,
        main_ip=environment.get("MAIN_IP", "").strip() or None,
        main_port=whole_number(environment, "MAIN_PORT", least=1),
    )
    return check_machines(machines)


def whole_number(values: Mapping[str, str], name: str, *, least: int) -> int | None:
    """A variable as a whole number from `least`; None where it is not set, ConfigError where it is not one."""
    text = values.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError(f"{name}={one_line(text)} is not a whole number from {least}")
    return int(text)


def check_machines(machines: Machines) -> Machines:
    """The machines with accelerate's default port filled in where several need one.

    Raises:
        ConfigError: the rank is not one of the machines, the address is not one, or a port is out of range.
    """
    count, rank = machines.num_machines, machines.machine_rank
    if not 0 <= rank < count:
        raise ConfigError(
            f"MACHINE_RANK={rank} is not one of NUM_MACHINES={count}: ranks go from 0 to {count - 1}, "
            "and the machine of rank 0 is the one at MAIN_IP"
        )
    if machines.main_ip is not None and not is_address(machines.main_ip):
        raise ConfigError(f"MAIN_IP={one_line(machines.main_ip)} is not a host name or an IP address")
    if machines.main_port is not None and not 1 <= machines.main_port <= 65535:
        raise ConfigError(
            f"MAIN_PORT={machines.main_port} is not a port; ports go from 1 to 65535 (default {DEFAULT_PORT})"
        )
    if count == 1:
        return machines
    if machines.main_ip is None:
        raise ConfigError(
            f"NUM_MACHINES={count} needs MAIN_IP=, the address of the machine of rank 0 that the others can reach "
            f"(and MAIN_PORT=, default {DEFAULT_PORT})"
        )
    return Machines(count, rank, machines.main_ip, machines.main_port or DEFAULT_PORT)


def is_address(text: str) -> bool:
    """Whether a text can be a host: an IP address or a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and len(text) <= 253
    return True


# --- writing ----------------------------------------------------------------------------------------------------------


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
        words = {
            "new": "written",
            "renewed": "rewritten (it had not been edited)",
            "same": "was already there and is unchanged",
            "replaced": "replaced because of FORCE=1; your edits are gone",
        }
        return (f"{self.path} {words[self.how]}:", *(f"  {line}" for line in self.text.splitlines()))


def write_config(
    path: Path,
    hardware: Hardware,
    *,
    mixed_precision: Precision,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_ip: str | None = None,
    main_port: int | None = None,
    gpu_ids: Sequence[int] | None = None,
    processes: int | None = None,
    distributed_type: DistributedType | None = None,
    deepspeed_config_file: Path | None = None,
    overwrite: bool = False,
) -> WrittenConfig:
    """Write a configuration for `num_machines` machines like this one.

    `processes` is per machine (default: one per GPU; two ranks on a machine without GPUs); `gpu_ids` chooses GPUs by
    their index (default: all); `distributed_type` defaults to what accelerate's questionnaire yields for the machine.

    Raises:
        ConfigError: the file is not ours or was edited and `overwrite` is False; GPUs, processes or machines that do
            not exist; the file cannot be written. Nothing is written then.
    """
    machines = check_machines(Machines(num_machines, machine_rank, main_ip, main_port))
    if mixed_precision not in _PRECISIONS:
        raise ConfigError(f"mixed precision {one_line(str(mixed_precision))} is not one of {', '.join(_PRECISIONS)}")
    ids = _chosen_gpus(hardware, gpu_ids)
    per_machine = _processes(hardware, ids, processes)
    total = per_machine * machines.num_machines
    kind = distributed_type or ("NO" if total == 1 else "MULTI_GPU" if hardware.gpus else "MULTI_CPU")
    body = _TOTAL + yaml.safe_dump(
        {
            **_fields(kind, machines, mixed_precision, total=total, on_cpu=not hardware.gpus),
            **({"gpu_ids": "all" if gpu_ids is None else ",".join(map(str, ids))} if hardware.gpus else {}),
            **_engine_block(kind, deepspeed_config_file),
        },
        sort_keys=True,
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
    """Indices of the GPUs that one machine uses."""
    indices = tuple(gpu.index for gpu in hardware.gpus[: hardware.gpus_per_node if hardware.gpus else 0])
    if gpu_ids is None:
        return indices
    if not gpu_ids or len(set(gpu_ids)) != len(gpu_ids) or not set(gpu_ids) <= set(indices):
        asked = one_line(",".join(map(str, gpu_ids)))
        has = ", ".join(map(str, indices)) or "no GPU"
        raise ConfigError(f"GPUS={asked} cannot be used: this machine has {has}; name each once")
    return tuple(gpu_ids)


def _processes(hardware: Hardware, ids: tuple[int, ...], processes: int | None) -> int:
    """Processes of one machine."""
    if processes is None:
        return len(ids) if hardware.gpus else 2
    if processes < 1 or (hardware.gpus and processes > len(ids)):
        limit = f"from 1 to {len(ids)}, one for each GPU" if hardware.gpus else "from 1"
        raise ConfigError(f"NPROC={processes} cannot be used; give a number {limit}")
    return processes


def _fields(kind: DistributedType, machines: Machines, precision: str, *, total: int, on_cpu: bool) -> dict[str, Any]:
    """The fields that `accelerate config` writes for every kind."""
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": machines.machine_rank,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": machines.num_machines,
        "num_processes": total,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_env": [],
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": on_cpu,
    }
    if machines.main_ip is not None:
        fields["main_process_ip"] = machines.main_ip
    if machines.main_port is not None:
        fields["main_process_port"] = machines.main_port
    return fields


def _engine_block(kind: DistributedType, deepspeed_config_file: Path | None) -> dict[str, Any]:
    """The block of the engine: FSDP2 as the Trainer sets it up, or the DeepSpeed file."""
    if kind == "FSDP":
        return {
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_offload_params": False,
                "fsdp_reshard_after_forward": True,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            }
        }
    if kind == "DEEPSPEED":
        if deepspeed_config_file is None:
            return {"deepspeed_config": {"zero_stage": 2, "zero3_init_flag": False}}
        return {"deepspeed_config": {"deepspeed_config_file": str(deepspeed_config_file), "zero3_init_flag": False}}
    return {}


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8")).hexdigest()


def is_edited(text: str) -> bool:
    """Whether a configuration is not ours, or was edited since it was written."""
    first, _, body = text.partition("\n")
    return not first.startswith(_MARK) or first.removeprefix(_MARK).strip() != _digest(body)


def _may_write(path: Path, text: str, *, overwrite: bool) -> Literal["new", "renewed", "same", "replaced"]:
    if not path.exists():
        return "new"
    present = text_of(path, variable="ACCELERATE_CONFIG", wanted=WANTED)
    if present == text:
        return "same"
    if not is_edited(present):
        return "renewed"
    if overwrite:
        return "replaced"
    why = "was edited since it was written" if present.startswith(_MARK) else "was not written by this command"
    raise ConfigError(
        f"{path} {why}, so it is not overwritten; FORCE=1 replaces it, ACCELERATE_CONFIG=other.yaml writes another file"
    )


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccelerateConfig:
    """A configuration after reading. `num_processes` is the total over machines; None: all GPUs.

    `gpu_ids` are those of each machine; None: all. `fsdp` and `deepspeed` are the engines' blocks, unchanged; `other`
    is what is not read here (it stays in the file, and accelerate sees it).
    """

    path: Path
    distributed_type: DistributedType
    num_processes: int | None
    num_machines: int = 1
    machine_rank: int = 0
    gpu_ids: tuple[int, ...] | None = None
    mixed_precision: str | None = None
    use_cpu: bool = False
    main_ip: str | None = None
    main_port: int | None = None
    rdzv_backend: str = "static"
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    """What `parallelism_config` asks for; None where it is absent, or only has one axis of FSDP or copies."""
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes_per_machine(self) -> int | None:
        """Processes that this machine starts; None: one per GPU."""
        return None if self.num_processes is None else self.num_processes // self.num_machines

    @property
    def deepspeed_config_file(self) -> Path | None:
        """The DeepSpeed configuration that the file names, relative to the working folder as accelerate reads it."""
        named = self.deepspeed.get("deepspeed_config_file")
        return Path(str(named)).expanduser() if named not in (None, "", "none", "None") else None

    @property
    def layout(self) -> LayoutName | None:
        """The layout that the file asks for; None where it leaves it open (plain processes, or a DeepSpeed file)."""
        if self.distributed_type == "FSDP":
            return self._fsdp()
        if self.distributed_type == "DEEPSPEED" and self.deepspeed_config_file is None:
            return self._zero()
        return None

    def _fsdp(self) -> LayoutName:
        """By name or, in older files, by number (torch's `ShardingStrategy`): 3 shards nothing, 4 and 5 within
        nodes."""
        strategy = str(self.fsdp.get("fsdp_sharding_strategy", "")).upper()
        if strategy in ("NO_SHARD", "3"):
            return "ddp"
        hybrid = strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "4", "5")
        return "fsdp_hybrid" if hybrid and self.num_machines > 1 else "fsdp"

    def _zero(self) -> LayoutName | None:
        """None for stage 0, which shards nothing."""
        states = self.deepspeed.get("offload_optimizer_device", "none") in ("cpu", "nvme")
        return LAYOUTS.get((int(self.deepspeed.get("zero_stage", 2)), states))


_AXES = {"dp_replicate": "dp", "dp_shard": "fsdp", "tp": "tp", "cp": "cp", "sp": "cp"}
"""Axes of accelerate's parallelism_config, and ours; sp is DeepSpeed's sequence parallelism."""


def mesh_in(block: Mapping[str, Any]) -> Mesh | None:
    """The mesh of a `parallelism_config` block, or of the variables that accelerate makes of it; None where it only has
    the axes of FSDP and of copies, which are layouts themselves.

    Raises:
        ConfigError: a size is not a whole number from 1 on.
    """
    sizes = dict.fromkeys(_AXES.values(), 1)
    for theirs, ours in _AXES.items():
        key = f"parallelism_config_{theirs}_size"
        given = str(block.get(key, 1)).strip()
        if not (given.isascii() and given.isdigit() and int(given) > 0):
            raise ConfigError(f"{key}: {one_line(given)} is not a whole number from 1 on")
        sizes[ours] *= int(given)
    mesh = Mesh(**sizes)
    return mesh if mesh.tp * mesh.cp > 1 else None


def read_config(path: Path) -> AccelerateConfig:
    """A file written by `accelerate config`, `setup-accelerate` or a person (YAML or accelerate's older JSON).

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping, its engine is not supported, or its numbers
            contradict each other. All problems inside it at once.
    """
    text = text_of(path, variable="ACCELERATE_CONFIG", wanted=WANTED)
    name = one_line(str(path))
    data = yaml_io.parse_value(text, name=name)
    if not isinstance(data, dict):
        kind = {type(None): "empty", list: "a list"}.get(type(data), f"the value {one_line(repr(data), limit=40)}")
        raise ConfigError(
            f"{name}: the file is {kind}; expected keys such as `distributed_type: MULTI_GPU`, as {WANTED}"
        )
    if "distributed_type" not in data:
        if "zero_optimization" in data:
            raise ConfigError(f"{name} is a configuration of DeepSpeed: give it as DEEPSPEED_CONFIG; name {WANTED}")
        raise ConfigError(f"{name}: distributed_type is missing; is this {WANTED}?")
    return _Reader(path, data).config()


class _Reader:
    """Reads one file's keys, and collects what is wrong with them."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self._path = path
        self._left = dict(data)
        self._problems: list[str] = []

    def config(self) -> AccelerateConfig:
        """The configuration; raises with all problems at once."""
        kind = self._kind()
        machines, rank = self._int("num_machines", 1, least=1) or 1, self._int("machine_rank", 0, least=0) or 0
        total = self._total(kind, machines)
        if rank >= machines:
            self._wrong(
                f"machine_rank: {rank} is not one of num_machines: {machines}; ranks go from 0 to {machines - 1}"
            )
        config = AccelerateConfig(
            path=self._path,
            distributed_type=kind,
            num_processes=total,
            num_machines=machines,
            machine_rank=rank,
            gpu_ids=self._gpu_ids(),
            mixed_precision=self._precision(),
            use_cpu=self._bool("use_cpu"),
            main_ip=self._address(machines),
            main_port=self._int("main_process_port", None, least=1, most=65535),
            rdzv_backend=str(self._take("rdzv_backend") or "static"),
            fsdp=self._block("fsdp_config"),
            deepspeed=self._deepspeed(kind),
            mesh=self._mesh(),
            other=self._left,
        )
        each = config.processes_per_machine
        if config.gpu_ids is not None and each is not None and not config.use_cpu and each > len(config.gpu_ids):
            listed = ",".join(map(str, config.gpu_ids))
            self._wrong(
                f"num_processes: {total} over num_machines: {machines} is {each} on each, and gpu_ids: {listed} names "
                f"{len(config.gpu_ids)}; one process needs one GPU"
            )
        if self._problems:
            raise ConfigError("\n".join(f"{one_line(str(self._path))}: {problem}" for problem in self._problems))
        return config

    def _kind(self) -> DistributedType:
        given = self._take("distributed_type")
        kind = "NO" if given in (None, False) else str(given).upper()
        environment = self._take("compute_environment")
        if environment not in (None, "LOCAL_MACHINE"):
            self._wrong(f"compute_environment: {_show(environment)} is not supported; only LOCAL_MACHINE is")
        kinds: tuple[DistributedType, ...] = get_args(DistributedType)
        if kind not in kinds:
            self._wrong(f"distributed_type: {_show(given)} is not supported; supported are {', '.join(kinds)}")
        return next((one for one in kinds if one == kind), "NO")

    def _total(self, kind: DistributedType, machines: int) -> int | None:
        given = self._left.get("num_processes")
        if given == -1:  # accelerate's marker for "given at launch"
            self._take("num_processes")
            return None
        total = self._int("num_processes", 1 if kind == "NO" else None, least=1)
        if total is None:
            return None
        if total < machines:
            self._wrong(
                f"num_processes: {total} is the total over num_machines: {machines}, so some machines would start "
                f"none; give at least {machines}"
            )
        elif total % machines:
            each = -(-total // machines)
            self._wrong(
                f"num_processes: {total} is the total over num_machines: {machines} and is not divisible by it; "
                f"use {machines * (total // machines)} or {machines * each}"
            )
        return total

    def _gpu_ids(self) -> tuple[int, ...] | None:
        given = self._take("gpu_ids")
        if given is None or (isinstance(given, str) and given.strip().lower() in ("all", "")):
            return None
        words = [str(item) for item in given] if isinstance(given, list) else str(given).split(",")
        ids = [word.strip() for word in words]
        if isinstance(given, bool | float | dict) or not all(re.fullmatch(r"[0-9]{1,4}", word) for word in ids):
            self._wrong(f"gpu_ids: {_show(given)} cannot be read; expected all, or numbers such as 0,1")
            return None
        if len(set(ids)) < len(ids):
            self._wrong(f"gpu_ids: {_show(given)} names a GPU twice")
        return tuple(map(int, ids))

    def _precision(self) -> str | None:
        old = self._take("fp16")  # its own key before accelerate 0.5
        given = self._take("mixed_precision")
        if given is None:
            return "fp16" if old is True else None
        word = "no" if given is False else str(given).strip().lower()
        if word not in _PRECISIONS:
            self._wrong(f"mixed_precision: {_show(given)} is not one of {', '.join(_PRECISIONS)}")
        return word

    def _address(self, machines: int) -> str | None:
        given = self._take("main_process_ip")
        if given is None:
            return None
        if not isinstance(given, str) or not is_address(given):
            self._wrong(f"main_process_ip: {_show(given)} is not a host name or an IP address")
        return str(given)

    def _deepspeed(self, kind: DistributedType) -> dict[str, Any]:
        block = self._block("deepspeed_config")
        stage = block.get("zero_stage", 2)
        if kind == "DEEPSPEED" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            self._wrong(f"deepspeed_config.zero_stage: {_show(stage)} is not 0, 1, 2 or 3")
            return {}
        return block

    def _mesh(self) -> Mesh | None:
        try:
            return mesh_in(self._block("parallelism_config"))
        except ConfigError as error:
            self._wrong(str(error))
            return None

    def _block(self, key: str) -> dict[str, Any]:
        given = self._take(key)
        if given is None:
            return {}
        if not isinstance(given, dict):
            self._wrong(f"{key}: {_show(given)} is not a mapping of keys")
            return {}
        return given

    def _int(self, key: str, default: int | None, *, least: int, most: int = 10**6) -> int | None:
        given = self._take(key)
        if given is None:
            return default
        value = int(given) if isinstance(given, str) and re.fullmatch(r"[0-9]{1,9}", given.strip()) else given
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = f" to {most}" if most < 10**6 else ""
            self._wrong(f"{key}: {_show(given)} is not a whole number from {least}{upper}")
            return default
        return value

    def _bool(self, key: str) -> bool:
        given = self._take(key)
        if given in (None, False) or str(given).lower() in ("no", "false", "off"):
            return False
        if given is True or str(given).lower() in ("yes", "true", "on"):
            return True
        self._wrong(f"{key}: {_show(given)} is neither true nor false")
        return False

    def _take(self, key: str) -> Any:
        return self._left.pop(key, None)

    def _wrong(self, problem: str) -> None:
        self._problems.append(problem)


def _show(value: Any) -> str:
    return yaml_io.show(value)


def differences(
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
