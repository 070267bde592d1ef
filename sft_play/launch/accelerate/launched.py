"""What `accelerate launch` was asked for, by the variables that it sets in the processes that it starts.

The names are those of accelerate 1.15 (`accelerate/utils/launch.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import psutil

from sft_play.errors import ConfigError
from sft_play.launch.accelerate.reading import (
    AccelerateConfig,
    DistributedType,
    accelerate_place,
    mesh_in,
    read_accelerate_file,
)
from sft_play.launch.exported import rank_variables

_SET_BY_ACCELERATE = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")
"""Set by every start of `accelerate launch`, whichever launcher it uses."""
_RUNS_INSTEAD = (
    "make train-distributed NPROC={count} (ACCELERATE_CONFIG=FILE reads the same file), or torchrun --standalone "
    "--nproc-per-node {count} scripts/train.py with the same arguments"
)
_ACTED_ON = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
"""Variables by which accelerate turns on an engine inside a process, whatever its Trainer's arguments are."""


def is_of_accelerate(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process."""
    return all(name in environment for name in _SET_BY_ACCELERATE)


def accelerate_choices(environment: Mapping[str, str]) -> AccelerateConfig | None:
    """The choices of `accelerate launch`, as a configuration of one machine; None where it did not start this process.

    Its flags and its file look the same here: both reach a rank as variables.
    """
    if not is_of_accelerate(environment):
        return None
    kind: DistributedType = "MULTI_GPU"  # what is left where no engine's variable is set
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        kind = "FSDP"
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        kind = "DEEPSPEED"
    deepspeed_keys = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
        "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    }
    return AccelerateConfig(
        path=Path("accelerate launch"),
        distributed_type=kind,
        num_processes=None,
        mixed_precision=environment["ACCELERATE_MIXED_PRECISION"],
        fsdp={name.lower(): text for name, text in environment.items() if name.startswith("FSDP_")},
        deepspeed={
            key: environment[name] for name, key in deepspeed_keys.items() if environment.get(name, "none") != "none"
        },
        mesh=mesh_in({name.lower(): text for name, text in environment.items() if name.startswith("PARALLELISM_")}),
    )


def drop_accelerate(environment: MutableMapping[str, str]) -> None:
    """Remove what accelerate would act on besides the Trainer's arguments, which configure every engine."""
    # ACCELERATE_CONFIG is make's variable; accelerate does not read it
    for name in [name for name in environment if name.startswith(_ACTED_ON) and name != "ACCELERATE_CONFIG"]:
        del environment[name]


def refuse_too_few_processes(environment: Mapping[str, str], *, instead: str = _RUNS_INSTEAD) -> None:
    """Raises ConfigError where `accelerate launch` was asked for several processes but started one.

    On a CPU it starts several only through MPI, silently one otherwise, and does not pass on how many were asked for.

    Args:
        instead: what starts them, with `{count}` in the place of their number.
    """
    if not is_of_accelerate(environment) or "MASTER_ADDR" not in environment or rank_variables(environment):
        return
    asked = _asked_of_accelerate()
    if asked == 1:
        return
    raise ConfigError(
        f"accelerate launch was asked for {asked or 'several'} processes and started 1: without a GPU it starts "
        f"several only through MPI. Use {instead.format(count=asked or 2)}"
    )


def _asked_of_accelerate() -> int | None:
    """The number of processes in the command line of the `accelerate launch` above this process, or in its file."""
    words = _launcher_words()
    text = _value_of(words, "num_processes", "n")
    if text is not None:
        return int(text) if text.isdigit() else None
    file = _value_of(words, "config_file")
    with contextlib.suppress(ConfigError):
        path = Path(file) if file else accelerate_place()
        return read_accelerate_file(path).num_processes if file or path.is_file() else None
    return None


def _launcher_words() -> list[str]:
    """The command line of the `accelerate launch` above this process; empty where none is seen."""
    with contextlib.suppress(psutil.Error, OSError):  # a process of another user, or one that ended meanwhile
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if "launch" in words or any(word.endswith("accelerate-launch") for word in words):
                return words
    return []


def _value_of(words: list[str], *names: str) -> str | None:
    pattern = re.compile("|".join(f"--?{re.escape(name).replace('_', '[-_]')}" for name in names))
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if pattern.fullmatch(flag):
            return value if equals else next(iter(words[index + 1 :]), None)
    return None
