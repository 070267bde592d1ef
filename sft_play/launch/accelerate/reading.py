"""accelerate's configuration, read as `accelerate config` leaves it.

Fields and their defaults are those of accelerate 1.15 (https://github.com/huggingface/accelerate:
`src/accelerate/commands/config/config_args.py`, `cluster.py`). accelerate reads YAML 1.1, in which an unquoted `no`
is false; a false where a word belongs is read as `no` here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sft_play.config.yaml_io import parse_value, show
from sft_play.errors import ConfigError
from sft_play.facts.network import is_address
from sft_play.launch.deepspeed.layout import LAYOUTS
from sft_play.launch.given import text_of
from sft_play.log import one_line
from sft_play.planner.layout import LayoutName
from sft_play.planner.mesh import Mesh

DistributedType = Literal["NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"]
WANTED = "a configuration that `make setup-accelerate` or `accelerate config` wrote"
PRECISIONS = ("no", "fp16", "bf16", "fp8")
PROJECT_FILE = Path("configs/accelerate/default_config.yaml")
"""Where the configuration is written unless `ACCELERATE_CONFIG` names another place: inside the project. accelerate's
own place is shared by all of a user's projects: it is read where this file is missing, and never written."""
NO_FILE = "none"
"""`ACCELERATE_CONFIG=none`: no configuration is read."""


def accelerate_path(environment: Mapping[str, str]) -> Path:
    """Where the configuration is, or would be written: `ACCELERATE_CONFIG`, else `PROJECT_FILE`."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    return Path(given).expanduser() if given and given != NO_FILE else PROJECT_FILE


def accelerate_place(environment: Mapping[str, str] | None = None) -> Path:
    """Where `accelerate config` writes its answers by default (`accelerate/commands/config`)."""
    environment = os.environ if environment is None else environment
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "accelerate" / "default_config.yaml"


def find_accelerate_file(environment: Mapping[str, str]) -> Path | None:
    """The configuration that a launch reads: the named one, else the project's, else accelerate's own."""
    given = environment.get("ACCELERATE_CONFIG", "").strip()
    if given:
        return None if given == NO_FILE else accelerate_path(environment)
    return next((path for path in (PROJECT_FILE, accelerate_place(environment)) if path.is_file()), None)


def read_found_file(path: Path, environment: Mapping[str, str]) -> tuple[AccelerateConfig, tuple[str, ...]]:
    """The configuration of `find_accelerate_file`, and a log line about it where the user did not name it.

    Raises:
        ConfigError: as `read_accelerate_file`; of accelerate's own file, with how to leave it out.
    """
    if path != accelerate_place(environment) or environment.get("ACCELERATE_CONFIG", "").strip():
        return read_accelerate_file(path), ()
    without = f"ACCELERATE_CONFIG={NO_FILE} leaves it out"
    try:
        config = read_accelerate_file(path)
    except ConfigError as error:
        raise ConfigError(f"{error}\nThis is accelerate's own file, which is read by default: {without}") from None
    return config, (f"accelerate's own file {one_line(str(path))} is read ({without})",)


@dataclass(frozen=True)
class AccelerateConfig:
    """A configuration after reading. `num_processes` is the total over machines; None: all GPUs.

    `gpu_ids` are those of each machine; None: all. `fsdp` and `deepspeed` are the engines' blocks, unchanged. Keys that
    are not here are not read.
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
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    """What `parallelism_config` asks for; None where it is absent, or only has one axis of FSDP or copies."""

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
        return LAYOUTS.get((int(self.deepspeed.get("zero_stage", 2)), states))  # 2 is accelerate's default too


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


def read_accelerate_file(path: Path) -> AccelerateConfig:
    """A file written by `accelerate config`, `setup-accelerate` or a person (YAML or accelerate's older JSON).

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping, its engine is not supported, or its numbers
            contradict each other. All problems inside it at once.
    """
    text = text_of(path, variable="ACCELERATE_CONFIG", wanted=WANTED)
    name = one_line(str(path))
    data = parse_value(text, name=name)
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
        self._data = data
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
            main_ip=self._address(),
            main_port=self._int("main_process_port", None, least=1, most=65535),
            fsdp=self._block("fsdp_config"),
            deepspeed=self._deepspeed(kind),
            mesh=self._mesh(),
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
        given = self._data.get("distributed_type")
        # false: an unquoted NO, in a file that a tool with YAML 1.1 has read and written again
        kind = "NO" if given in (None, False) else str(given).upper()
        environment = self._data.get("compute_environment")
        if environment not in (None, "LOCAL_MACHINE"):
            self._wrong(f"compute_environment: {show(environment)} is not supported; only LOCAL_MACHINE is")
        kinds: tuple[DistributedType, ...] = get_args(DistributedType)
        if kind not in kinds:
            self._wrong(f"distributed_type: {show(given)} is not supported; supported are {', '.join(kinds)}")
        return next((one for one in kinds if one == kind), "NO")

    def _total(self, kind: DistributedType, machines: int) -> int | None:
        if self._data.get("num_processes") == -1:  # accelerate's marker for "given at launch"
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
            each = -(-total // machines)  # rounded up
            self._wrong(
                f"num_processes: {total} is the total over num_machines: {machines} and is not divisible by it; "
                f"use {machines * (total // machines)} or {machines * each}"
            )
        return total

    def _gpu_ids(self) -> tuple[int, ...] | None:
        given = self._data.get("gpu_ids")
        if given is None or (isinstance(given, str) and given.strip().lower() in ("all", "")):
            return None
        words = [str(item) for item in given] if isinstance(given, list) else str(given).split(",")
        ids = [word.strip() for word in words]
        if isinstance(given, bool | float | dict) or not all(re.fullmatch(r"[0-9]{1,4}", word) for word in ids):
            self._wrong(f"gpu_ids: {show(given)} cannot be read; expected all, or numbers such as 0,1")
            return None
        if len(set(ids)) < len(ids):
            self._wrong(f"gpu_ids: {show(given)} names a GPU twice")
        return tuple(map(int, ids))

    def _precision(self) -> str | None:
        old = self._data.get("fp16")  # its own key before accelerate 0.5
        given = self._data.get("mixed_precision")
        if given is None:
            return "fp16" if old is True else None
        word = "no" if given is False else str(given).strip().lower()
        if word not in PRECISIONS:
            self._wrong(f"mixed_precision: {show(given)} is not one of {', '.join(PRECISIONS)}")
        return word

    def _address(self) -> str | None:
        given = self._data.get("main_process_ip")
        if given is None:
            return None
        if not isinstance(given, str) or not is_address(given):
            self._wrong(f"main_process_ip: {show(given)} is not a host name or an IP address")
        return str(given)

    def _deepspeed(self, kind: DistributedType) -> dict[str, Any]:
        block = self._block("deepspeed_config")
        stage = block.get("zero_stage", 2)
        if kind == "DEEPSPEED" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
            self._wrong(f"deepspeed_config.zero_stage: {show(stage)} is not 0, 1, 2 or 3")
            return {}
        return block

    def _mesh(self) -> Mesh | None:
        try:
            return mesh_in(self._block("parallelism_config"))
        except ConfigError as error:
            self._wrong(str(error))
            return None

    def _block(self, key: str) -> dict[str, Any]:
        given = self._data.get(key)
        if given is None:
            return {}
        if not isinstance(given, dict):
            self._wrong(f"{key}: {show(given)} is not a mapping of keys")
            return {}
        return given

    def _int(self, key: str, default: int | None, *, least: int, most: int = 10**6) -> int | None:
        given = self._data.get(key)
        if given is None:
            return default
        value = int(given) if isinstance(given, str) and re.fullmatch(r"[0-9]{1,9}", given.strip()) else given
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            upper = f" to {most}" if most < 10**6 else ""
            self._wrong(f"{key}: {show(given)} is not a whole number from {least}{upper}")
            return default
        return value

    def _bool(self, key: str) -> bool:
        given = self._data.get(key)
        if given in (None, False) or str(given).lower() in ("no", "false", "off"):
            return False
        if given is True or str(given).lower() in ("yes", "true", "on"):
            return True
        self._wrong(f"{key}: {show(given)} is neither true nor false")
        return False

    def _wrong(self, problem: str) -> None:
        self._problems.append(problem)
