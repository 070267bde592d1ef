"""A person's DeepSpeed configuration in current keys: comments dropped, old names translated, mistakes refused.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on every rank; in all
others, the top level first, an unknown key is ignored without a word. So `keys.json` lists the keys that it knows,
those that it has renamed, and those that it has removed. Paths into a configuration are dotted.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

from sft_play.config.yaml_io import show
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.spelling import nearest

Config = dict[str, Any]
"""DeepSpeed's configuration as plain data: keys and values are DeepSpeed's."""

AUTO = "auto"
"""Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
(`AUTO_IS_A_VALUE`)."""

_TABLE: dict[str, Any] = json.loads(resources.files(__package__).joinpath("keys.json").read_text(encoding="utf-8"))


def _keys_of(section: dict[str, str]) -> frozenset[str]:
    """A section's keys. Some of ZeRO's may be written with the prefix `stage3_` (pydantic's `populate_by_name`)."""
    both = section.get("with_and_without_stage3_", "").split()
    return frozenset([*section["keys"].split(), *both, *(f"stage3_{key}" for key in both)])


KNOWN: dict[str, frozenset[str]] = {path: _keys_of(section) for path, section in _TABLE["sections"].items()}
"""The keys of each section by its dotted path ("" is the top level). Sections that are not here are open: what they may
contain depends on their values. `sequence_parallel_size` and `inference` are read by transformers and by DeepSpeed's
ZeRO-3 loading."""

AUTO_IS_A_VALUE: tuple[str, ...] = tuple(_TABLE["auto_is_a_value"])
"""Paths where DeepSpeed itself understands "auto"."""

_COMMENT = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


def translate(raw: Config, *, name: str = "the DeepSpeed configuration") -> tuple[Config, tuple[str, ...]]:
    """The configuration in DeepSpeed's current keys, and notes on what was translated or left out.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), was removed while it is switched on, or holds
            a value of the wrong kind. All of them at once.
    """
    config = copy.deepcopy(raw)
    notes: list[str] = []
    for path, section in sections_of(config):
        for key in [key for key in section if _COMMENT.fullmatch(str(key))]:
            del section[key]
            notes.append(f"{_join(path, key)} is read as a comment")
    problems = [*_rename(config, notes), *_drop_removed(config, notes), *_unknown(config)]
    if not problems:  # a value under a wrong key would be reported twice
        problems = _wrong_values(config)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config, tuple(notes)


def _rename(config: Config, notes: list[str]) -> Iterator[str]:
    """Translate the old keys that guides teach; yields what is wrong with them."""
    for old, new in _TABLE["renamed"].items():
        holder, key = holder_of(config, old)
        if holder is None or key not in holder:
            continue
        value = meaning = holder.pop(key)
        if "cpu_offload" in old:
            meaning = {"device": "cpu"} if value is True else None if value is False else value
        present = value_at(config, new)
        if meaning is None or present == meaning:
            notes.append(f"{old}: {show(value)} is an old key that says nothing more; left out")
        elif present is None:
            put_at(config, new, meaning)
            notes.append(f"{old}: {show(value)} is an old key; read as {new}: {show(meaning)}")
        else:
            yield f"{old}: {show(value)} (an old key) and {new}: {show(present)} disagree; keep {new} only"


def _drop_removed(config: Config, notes: list[str]) -> Iterator[str]:
    """Leave out removed keys that are switched off; yields the others."""
    for path, reason in _TABLE["removed"].items():
        holder, key = holder_of(config, path)
        if holder is None or key not in holder:
            continue
        value = holder.pop(key)
        switched = value.get("enabled", bool(value)) if isinstance(value, dict) else value
        if switched in (False, None, -1):  # -1 is how sizes such as mics_shard_size were switched off
            notes.append(f"{path}, which newer versions of DeepSpeed refuse, is switched off and left out")
        else:
            yield f"{path} was removed from DeepSpeed: {reason}; remove the key"


def _unknown(config: Config) -> Iterator[str]:
    for path, section in sections_of(config):
        for key in section if path in KNOWN else ():
            if key not in KNOWN[path]:
                yield f"{_join(path, key)} is not a DeepSpeed key; {_nearest(path, str(key))}"


def _nearest(path: str, key: str) -> str:
    """What an unknown key at `path` may mean: the same name in another section, else the nearest of its own."""
    homes = sorted((one for one, names in KNOWN.items() if key in names), key=lambda section: section.count("."))
    if homes:
        return f"it belongs at {' or '.join(_join(home, key) for home in homes[:3])}"
    return f"the nearest is {_join(path, nearest(key, KNOWN[path], alike=0.0) or '')}"


# --- values, checked before ranks start: DeepSpeed itself raises late, on every rank ----------------------------------


def _whole(value: Any, *, least: int = 0) -> bool:
    """Also for `5e8`, which JSON and YAML read as a float: that is how bucket sizes are written in most guides."""
    return _number(value) and value == int(value) and bool(value >= least)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


_BATCH = re.compile(r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps")
_CHECKS: tuple[tuple[re.Pattern[str], Callable[[Any], bool], str], ...] = (
    (_BATCH, lambda value: isinstance(value, int) and _whole(value, least=1), 'a whole number from 1, or "auto"'),
    (re.compile("gradient_clipping"), _number, 'a number from 0 (0: no clipping), or "auto"'),
    (re.compile(r"zero_optimization\.stage"), lambda value: _whole(value) and value <= 3, '0, 1, 2, 3 or "auto"'),
    (
        re.compile(r"zero_optimization\.offload_(optimizer|param)\.device"),
        lambda value: value in ("none", "cpu", "nvme"),
        '"none", "cpu" or "nvme"',
    ),
    (
        re.compile(r"(.*\.)?(enabled|pin_memory|overlap_comm|contiguous_gradients|reduce_scatter)"),
        lambda value: isinstance(value, bool),
        'true, false or "auto"',
    ),
    (
        re.compile(r"zero_optimization\.\w*_(size|threshold|parameters|distance)"),
        _whole,
        'a whole number without quotes, or "auto"',
    ),
)
"""Of a path the test of its values, and what it accepts; DeepSpeed itself checks the others."""


def _wrong_values(config: Config) -> list[str]:
    problems = []
    for path, value in leaves_of(config):
        if value is not None and (path in KNOWN or path in ("optimizer.params", "scheduler.params")):
            inside = f" with {', '.join(sorted(KNOWN[path]))}" if path in KNOWN else ""
            problems.append(f"{path}: {show(value)} is not a section; expected {{…}}{inside}")
            continue
        check = next((check for check in _CHECKS if check[0].fullmatch(path)), None)
        if check is not None and value not in (AUTO, None) and not check[1](value):
            problems.append(f"{path}: {show(value)} is not valid; expected {check[2]}")
    # These change which ranks hold what: the run would not be the planned one.
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if _number(size := value_at(config, path)) and size > 1:
            what = "splits rows or layers over ranks; only ZeRO's data-parallel layouts are supported"
            problems.append(f"{path}: {size} {what}")
    for path in ("expert_parallel", "autotuning", "data_efficiency"):
        if value_at(config, f"{path}.enabled") is True:
            problems.append(f"{path}.enabled: true is not supported: the plan does not model it; remove the section")
    return problems


# --- dotted paths -----------------------------------------------------------------------------------------------------


def _join(path: str, key: object) -> str:
    return one_line(f"{path}.{key}" if path else str(key))


def sections_of(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every mapping with its dotted path, the outer ones first."""
    yield path, config
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from sections_of(value, f"{path}.{key}" if path else str(key))


def leaves_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its dotted path."""
    for path, section in sections_of(config):
        for key, value in list(section.items()):
            if not isinstance(value, dict):
                yield f"{path}.{key}" if path else str(key), value


def holder_of(config: Config, path: str) -> tuple[Config | None, str]:
    """The mapping that would hold the last key of a path, None where it does not exist, and that key."""
    *outer, key = path.split(".")
    holder: Any = config
    for part in outer:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def value_at(config: Config, path: str) -> Any:
    """The value at a path; None where there is none."""
    holder, key = holder_of(config, path)
    return None if holder is None else holder.get(key)


def put_at(config: Config, path: str, value: Any) -> None:
    """Set the value at a path; sections that are missing are added."""
    *outer, key = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[key] = value
