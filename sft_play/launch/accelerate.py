"""What accelerate was asked for: its configuration file, as `accelerate config` leaves it, and the
variables by which `accelerate launch` hands the same choices to the processes that it starts.

Fields, variables and defaults are those of accelerate 1.15
(https://github.com/huggingface/accelerate: `commands/config/config_args.py`, `cluster.py`,
`utils/launch.py`). accelerate reads YAML 1.1, in which an unquoted `no` is false; a false where a
word belongs is read as `no` here.
"""

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from sft_play.config.yaml_io import format_value, parse_yaml_value, read_text
from sft_play.data.managed_outputs import OutputFolder
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed import ZERO_LAYOUTS
from sft_play.launch.torchrun import rank_variables, read_nodes
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import NodeSetup, is_host_address
from sft_play.planner.layout import LayoutName

DistributedType = Literal["NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"]
ACCELERATE_FILE_DESCRIPTION = (
    "a configuration that `make setup-accelerate` or `accelerate config` wrote"
)
# Where the configuration is written unless `ACCELERATE_CONFIG` names another place: inside the
# project. accelerate's own place is shared by all of a user's projects: it is read where this file
# is missing, and never written.
PROJECT_ACCELERATE_FILE = Path("configs/accelerate/default_config.yaml")
# `ACCELERATE_CONFIG=none`: no configuration is read.
NO_ACCELERATE_FILE = "none"


def accelerate_path(environment: Mapping[str, str]) -> Path:
    """Where the configuration is, or would be written: `ACCELERATE_CONFIG`, else
    `PROJECT_ACCELERATE_FILE`."""
    named_path = environment.get("ACCELERATE_CONFIG", "").strip()
    return (
        Path(named_path).expanduser()
        if named_path and named_path != NO_ACCELERATE_FILE
        else PROJECT_ACCELERATE_FILE
    )


def default_accelerate_path(environment: Mapping[str, str]) -> Path:
    """Where `accelerate config` writes its answers by default (`accelerate/commands/config`)."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "accelerate" / "default_config.yaml"


def find_accelerate_file(environment: Mapping[str, str]) -> Path | None:
    """The configuration that a launch reads: the named one, else the project's, else accelerate's
    own."""
    named_path = environment.get("ACCELERATE_CONFIG", "").strip()
    if named_path == NO_ACCELERATE_FILE:
        return None
    if named_path:
        return Path(named_path).expanduser()
    paths = (PROJECT_ACCELERATE_FILE, default_accelerate_path(environment))
    return next((path for path in paths if path.is_file()), None)


class AccelerateConfig(BaseModel):
    """The keys of a file that are read, by accelerate's names and with its defaults. Others are not
    read."""

    model_config = ConfigDict(frozen=True)

    path: Path
    distributed_type: DistributedType = "NO"
    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    # The total over machines; None: one for each GPU.
    num_processes: int | None = Field(default=None, ge=1)
    num_machines: int = Field(default=1, ge=1)
    machine_rank: int = Field(default=0, ge=0)
    # Those of each machine; None: all.
    gpu_ids: tuple[NonNegativeInt, ...] | None = None
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] | None = None
    use_cpu: bool = False
    main_process_ip: str | None = None
    main_process_port: int | None = Field(default=None, ge=1, le=65535)
    fsdp_config: dict[str, Any] = Field(default_factory=dict)
    deepspeed_config: dict[str, Any] = Field(default_factory=dict)
    parallelism_config: dict[str, Any] = Field(default_factory=dict)

    @property
    def deepspeed_config_file(self) -> Path | None:
        """The DeepSpeed configuration that the file names, relative to the working folder as
        accelerate reads it."""
        named = self.deepspeed_config.get("deepspeed_config_file")
        return Path(str(named)).expanduser() if named not in (None, "", "none", "None") else None

    @property
    def layout(self) -> LayoutName | None:
        """The layout that the file asks for; None where it leaves it open (plain processes, or a
        DeepSpeed file)."""
        if self.distributed_type == "FSDP":
            strategy = str(self.fsdp_config.get("fsdp_sharding_strategy", "")).upper()
            if strategy == "NO_SHARD":
                return "ddp"
            if "HYBRID_SHARD" in strategy and self.num_machines > 1:
                return "fsdp_hybrid"
            return "fsdp"
        if self.distributed_type == "DEEPSPEED" and self.deepspeed_config_file is None:
            offloads_states = self.deepspeed_config.get("offload_optimizer_device", "none") in (
                "cpu",
                "nvme",
            )
            # 2 is accelerate's default too; stage 0 shards nothing and is no layout
            return ZERO_LAYOUTS.get(
                (int(self.deepspeed_config.get("zero_stage", 2)), offloads_states)
            )
        return None

    def contradictions(self) -> Iterator[str]:
        """What is wrong with values that are valid alone."""
        machines, total, gpu_ids = self.num_machines, self.num_processes or 0, self.gpu_ids or ()
        stage = self.deepspeed_config.get("zero_stage", 2)
        if self.machine_rank >= machines:
            yield (
                f"machine_rank: {self.machine_rank} is not one of num_machines: {machines}, from 0"
            )
        if total % machines:
            yield (
                f"num_processes: {total} is the total over num_machines: {machines} and is not"
                " divisible by it"
            )
        if len(set(gpu_ids)) < len(gpu_ids):
            yield "gpu_ids names a GPU twice"
        if self.distributed_type == "DEEPSPEED" and str(stage) not in ("0", "1", "2", "3"):
            yield f"deepspeed_config.zero_stage: {format_value(stage)} is not 0, 1, 2 or 3"
        sizes = {
            axis: self.parallelism_config.get(f"parallelism_config_{axis}_size", 1)
            for axis in ("tp", "cp", "sp")
        }
        axes = [axis for axis, size in sizes.items() if str(size).strip() != "1"]
        if axes:
            yield (
                f"parallelism_config divides by {', '.join(axes)}, which model.mesh_shape of the"
                " run YAML asks for"
            )


def read_accelerate_file(path: Path) -> AccelerateConfig:
    """A file written by `accelerate config`, `setup-accelerate` or a person (YAML or accelerate's
    older JSON). Raises ConfigError where the file is missing, not YAML or not a mapping, its engine
    is not supported, or its numbers contradict each other. All problems inside it at once."""
    name = one_line(str(path))
    data = parse_yaml_value(
        read_text(path, variable="ACCELERATE_CONFIG", expected=ACCELERATE_FILE_DESCRIPTION),
        name=name,
    )
    if not isinstance(data, dict) or "distributed_type" not in data:
        raise ConfigError(f"{name} has no distributed_type; is this {ACCELERATE_FILE_DESCRIPTION}?")
    # accelerate's marker for "given at launch" is -1, and null is a key that is not there
    values: dict[str, Any] = {key: value for key, value in data.items() if value is not None}
    if values.get("num_processes") == -1:
        del values["num_processes"]
    values.setdefault("distributed_type", "no")
    for key in ("distributed_type", "mixed_precision"):
        if key in values:  # false: an unquoted no that a tool with YAML 1.1 has written again
            values[key] = str(values[key]).strip().lower().replace("false", "no")
    values["distributed_type"] = values["distributed_type"].upper()
    gpu_ids = str(values.pop("gpu_ids", "all")).strip(" []").lower()
    if gpu_ids not in ("all", ""):
        values["gpu_ids"] = gpu_ids.split(",")
    if values["distributed_type"] == "NO":
        values.setdefault("num_processes", 1)
    try:
        config = AccelerateConfig.model_validate({**values, "path": path})
        problems = list(config.contradictions())
    except ValidationError as error:
        problems = [
            f"{detail['loc'][0]}: {format_value(data[str(detail['loc'][0])])} is not valid:"
            f" {detail['msg']}"
            for detail in error.errors(include_url=False)
        ]
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config


# --- accelerate launch ----------------------------------------------------------------------------

# Set by every start of `accelerate launch`, whichever launcher it uses.
_ACCELERATE_LAUNCH_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")
# Variables by which accelerate turns on an engine inside a process, whatever its Trainer's
# arguments are.
_ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_DEEPSPEED_KEYS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}


def is_accelerate_launch(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process."""
    return all(name in environment for name in _ACCELERATE_LAUNCH_VARIABLES)


def accelerate_launch_config(environment: Mapping[str, str]) -> AccelerateConfig | None:
    """The choices of `accelerate launch`, flags or file, which reach a rank as variables, as a
    configuration of one machine; None where it did not start this process. Raises ConfigError where
    they divide what the run YAML alone divides."""
    if not is_accelerate_launch(environment):
        return None
    # what is left where no engine's variable is set
    distributed_type: DistributedType = "MULTI_GPU"
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        distributed_type = "FSDP"
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        distributed_type = "DEEPSPEED"
    deepspeed_values = {key: environment.get(name, "none") for name, key in _DEEPSPEED_KEYS.items()}
    lowered = {name.lower(): text for name, text in environment.items()}
    values = {
        "path": Path("accelerate launch"),
        "distributed_type": distributed_type,
        "mixed_precision": environment["ACCELERATE_MIXED_PRECISION"],
        "fsdp_config": lowered,
        "parallelism_config": lowered,
        "deepspeed_config": {key: text for key, text in deepspeed_values.items() if text != "none"},
    }
    config = AccelerateConfig.model_validate(values)
    for problem in config.contradictions():
        raise ConfigError(f"accelerate launch: {problem}")
    return config


def remove_accelerate_variables(environment: MutableMapping[str, str]) -> None:
    """Remove what accelerate would act on besides the Trainer's arguments, which configure every
    engine."""
    # ACCELERATE_CONFIG is make's variable; accelerate does not read it
    for name in [
        name
        for name in environment
        if name.startswith(_ACCELERATE_PREFIXES) and name != "ACCELERATE_CONFIG"
    ]:
        del environment[name]


def refuse_too_few_processes(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where `accelerate launch` was asked for several processes (it sets
    MASTER_ADDR then) but started one, as on a CPU without MPI."""
    if (
        is_accelerate_launch(environment)
        and "MASTER_ADDR" in environment
        and not rank_variables(environment)
    ):
        raise ConfigError(
            "accelerate launch was asked for several processes (MASTER_ADDR is set) and started 1:"
            " without a GPU it starts several only through MPI. Use torchrun --standalone"
            " --nproc-per-node 2 with the same script and arguments, or for a run make"
            " train-distributed NPROC=2 (ACCELERATE_CONFIG=FILE reads the same file)"
        )


# --- written --------------------------------------------------------------------------------------


# accelerate's word for what a run computes in; `no` for fp32.
MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}
SINGLE_NODE = NodeSetup()


def write_accelerate_file(
    path: Path,
    hardware: Hardware,
    *,
    mixed_precision: str,
    nodes: NodeSetup = SINGLE_NODE,
    gpu_ids: Sequence[int] = (),
    overwrite: bool = False,
) -> str:
    """Write a configuration for the ranks of a machine (`select_hardware`), on `gpu_ids` of each
    node (none: all), and return its text. The engine is left to the plan. Raises DataError where
    the file is not ours or was edited and `overwrite` is False, or it cannot be written; nothing is
    written then."""
    distributed_type: DistributedType = "MULTI_GPU"
    gpu_list: str | None = ",".join(map(str, gpu_ids)) or "all"
    if not hardware.gpus:
        distributed_type, gpu_list = "MULTI_CPU", None
    if hardware.ranks == 1:
        distributed_type = "NO"
    fields = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": distributed_type,
        "gpu_ids": gpu_list,
        "machine_rank": nodes.rank,
        "main_process_ip": nodes.address,
        "main_process_port": nodes.port,
        "mixed_precision": mixed_precision,
        "num_machines": nodes.count,
        "num_processes": hardware.ranks,  # over all machines; torchrun counts those of each
        "same_network": True,
        "use_cpu": not hardware.gpus,
    }
    text = (
        "# num_processes is the total over all machines, as accelerate counts; each machine starts"
        " its share.\n"
        + yaml.safe_dump({name: value for name, value in fields.items() if value is not None})
    )
    with OutputFolder(
        path.parent, (path.name,), force=overwrite, command="setup-accelerate"
    ) as folder:
        folder.open(path.name).write(text)
    return text


def read_accelerate_nodes(environment: Mapping[str, str]) -> NodeSetup:
    """`NUM_MACHINES`, `MACHINE_RANK` (0 where it is not given), `MAIN_IP` and `MAIN_PORT` from the
    command line. Raises ConfigError as `read_nodes` does, or where the address is none."""
    values = {**environment, "MACHINE_RANK": environment.get("MACHINE_RANK", "").strip() or "0"}
    nodes = read_nodes(values, ("NUM_MACHINES", "MACHINE_RANK", "MAIN_IP", "MAIN_PORT"))
    if nodes.address is not None and not is_host_address(nodes.address):
        raise ConfigError(f"MAIN_IP={one_line(nodes.address)} is not a host name or an IP address")
    return nodes
