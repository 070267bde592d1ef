"""A person's DeepSpeed configuration in current keys: comments dropped, old spellings translated, mistakes refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

from sft_play.errors import ConfigError
from sft_play.launch.deepspeed import keys
from sft_play.launch.deepspeed.keys import (
    AUTO,
    Config,
    holder_of,
    join_path,
    leaves_of,
    put_at,
    sections_of,
    shown_value,
    value_at,
)
from sft_play.spelling import nearest

_COMMENT = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


def translate(raw: Config, *, name: str = "the DeepSpeed configuration") -> tuple[Config, tuple[str, ...]]:
    """The configuration in DeepSpeed's current keys, and notes on what was translated or left out.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named), was removed while it is switched on, or holds
            a value of the wrong kind. All of them at once.
    """
    config = copy.deepcopy(raw)
    notes: list[str] = []
    problems: list[str] = []
    # Comments first, since they are no keys; `"bf16": true` becomes a section before anything looks into that section.
    for step in (_drop_comments, _expand_switches, _rename, _drop_removed, _drop_bf16_scaling):
        step(config, notes, problems)
    problems += _unknown(config)
    if not problems:  # a value under a wrong key would be reported twice
        problems += _wrong_values(config)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config, tuple(notes)


def _drop_comments(config: Config, notes: list[str], problems: list[str]) -> None:
    """Keys such as `_comment`, which people use for comments in JSON."""
    for path, section in sections_of(config):
        for key in [key for key in section if _COMMENT.fullmatch(str(key))]:
            del section[key]
            notes.append(f"{join_path(path, key)} is read as a comment")


def _expand_switches(config: Config, notes: list[str], problems: list[str]) -> None:
    """`"bf16": true` for a section with `enabled`, and `"zero_optimization": true`, ZeRO's first format."""
    for key in ("bf16", "bfloat16", "fp16", "torch_autocast"):
        if isinstance(config.get(key), bool) or config.get(key) == AUTO:
            config[key] = {"enabled": config[key]}
            notes.append(f'{key}: {shown_value(config[key]["enabled"])} is read as {{"enabled": …}}')
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization: {shown_value(zero)} is read as stage {int(zero)}, as in ZeRO's first format")
        if "allgather_size" in config:
            config["zero_optimization"]["allgather_bucket_size"] = config.pop("allgather_size")
            notes.append("allgather_size is read as zero_optimization.allgather_bucket_size, its current name")


def _rename(config: Config, notes: list[str], problems: list[str]) -> None:
    for old, new in keys.RENAMED.items():
        holder, key = holder_of(config, old)
        if holder is None or key not in holder:
            continue
        value = holder.pop(key)
        meaning = _meaning(old, value, config)
        if meaning is None:
            notes.append(f"{old}: {shown_value(value)} is an old key that changes nothing; left out")
            continue
        present = value_at(config, new)
        # {"device": "cpu"} beside a section with more keys says nothing new
        both = isinstance(present, dict) and isinstance(meaning, dict)
        is_covered = present == meaning or (both and meaning.items() <= present.items())
        if present is not None and not is_covered:
            problems.append(
                f"{old}: {shown_value(value)} (an old key) and {new}: {shown_value(present)} (its current name) "
                f"disagree; keep {new} only"
            )
        elif present is None:
            put_at(config, new, meaning)
            notes.append(f"{old}: {shown_value(value)} is an old key; read as {new}: {shown_value(meaning)}")
        else:
            notes.append(f"{old}: {shown_value(value)} is an old key that repeats {new}; left out")


def _meaning(old: str, value: Any, config: Config) -> Any:
    """The new key's value for an old key's value; None where the old one changes nothing."""
    if old.endswith(("cpu_offload", "cpu_offload_param", "cpu_offload_params")):
        return {"device": "cpu"} if value is True else None if value in (False, None) else value
    if old.endswith("cpu_offload_use_pin_memory"):
        # Pins only what is offloaded. `cpu_offload` stands before it in RENAMED, so it is a section by now.
        return value if isinstance(value_at(config, "zero_optimization.offload_optimizer"), dict) else None
    if old in ("fp32_allreduce", "allreduce_always_fp32"):
        return "fp32" if value is True else None
    return value


def _drop_removed(config: Config, notes: list[str], problems: list[str]) -> None:
    for path, reason in keys.REMOVED.items():
        holder, key = holder_of(config, path)
        if holder is None or key not in holder:
            continue
        value = holder[key]
        switched = value.get("enabled", True) if isinstance(value, dict) else value
        if switched in (False, None, -1) or value == {}:  # -1 is how sizes such as mics_shard_size were switched off
            del holder[key]
            notes.append(f"{path}, which newer versions of DeepSpeed refuse, is switched off and left out")
        else:
            problems.append(f"{path} was removed from DeepSpeed: {reason}; remove the key")
            del holder[key]


def _drop_bf16_scaling(config: Config, notes: list[str], problems: list[str]) -> None:
    section = config.get("bf16")
    extra = sorted(keys.LOSS_SCALING & set(section)) if isinstance(section, dict) else []
    if extra:
        config["bf16"] = {key: value for key, value in config["bf16"].items() if key not in extra}
        notes.append(
            f"bf16.{{{', '.join(extra)}}} left out: bfloat16 needs no loss scaling, and DeepSpeed refuses them"
        )


def _unknown(config: Config) -> list[str]:
    known = keys.known()
    problems = []
    for path, section in sections_of(config):
        if path not in known:
            continue
        for key in section:
            if key not in known[path]:
                problems.append(f"{join_path(path, key)} is not a DeepSpeed key; {_nearest(path, str(key), known)}")
    return problems


def _nearest(path: str, key: str, known: keys.Sections) -> str:
    """What an unknown key at `path` may mean: the same name in another section, then the nearest spelling in its own
    section, in any section, and last its own section's nearest however far."""
    elsewhere = [section for section, names in known.items() if key in names and section != path]
    if elsewhere:
        # the outer sections first, and of those the two that nearly every file has
        homes = sorted(elsewhere, key=lambda section: (section.count("."), section not in ("", "zero_optimization")))
        return f"it belongs at {' or '.join(join_path(home, key) for home in homes[:3])}"
    near = nearest(key, known[path], alike=0.5)
    if near is None:
        everywhere = {name: section for section, names in known.items() for name in names}
        near = nearest(key, everywhere, alike=0.6)
        path = everywhere[near] if near else path
    return f"the nearest is {join_path(path, near or nearest(key, known[path], alike=0.0) or '')}"


# --- values, checked before ranks start: DeepSpeed itself raises late, on every rank ----------------------------------

Check = Callable[[Any], bool]


def _whole(value: Any, *, least: int) -> bool:
    """Also for `5e8`, which JSON and YAML read as a float: that is how bucket sizes are written in most guides."""
    return _number(value) and value == int(value) and bool(value >= least)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _check_of(path: str) -> tuple[Check, str] | None:
    """A test of a key's values, and what it accepts in words; None where DeepSpeed itself checks."""
    section, _, key = path.rpartition(".")
    if path in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return (lambda value: isinstance(value, int) and _whole(value, least=1)), 'a whole number from 1, or "auto"'
    if path == "gradient_clipping":
        return _number, 'a number from 0 (0: no clipping), or "auto"'
    if path == "zero_optimization.stage":
        return (lambda value: _whole(value, least=0) and value <= 3), '0, 1, 2, 3 or "auto"'
    if section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param") and key == "device":
        return (lambda value: value in ("none", "cpu", "nvme")), '"none", "cpu" or "nvme"'
    if key in ("enabled", "pin_memory", "overlap_comm", "contiguous_gradients", "reduce_scatter"):
        return (lambda value: isinstance(value, bool)), 'true, false or "auto"'
    if section == "zero_optimization" and re.search(r"_(size|threshold|parameters|distance)$", key):
        return (lambda value: _whole(value, least=0)), 'a whole number without quotes, or "auto"'
    return None


def _wrong_values(config: Config) -> list[str]:
    problems = []
    known = keys.known()
    for path, value in leaves_of(config):
        if value is not None and (path in known or path in ("optimizer.params", "scheduler.params")):
            inside = f" with {', '.join(sorted(known[path]))}" if path in known else ""
            problems.append(f"{path}: {shown_value(value)} is not a section; expected {{…}}{inside}")
            continue
        check = _check_of(path)
        if check and value not in (AUTO, None) and not check[0](value):
            problems.append(f"{path}: {shown_value(value)} is not valid; expected {check[1]}")
    # These change which ranks hold what: the run would not be the planned one.
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if _number(size := value_at(config, path)) and size > 1:
            problems.append(
                f"{path}: {size} splits rows or layers over ranks; only ZeRO's data-parallel layouts are supported"
            )
    for path in ("expert_parallel", "autotuning", "data_efficiency"):
        if value_at(config, f"{path}.enabled") is True:
            problems.append(f"{path}.enabled: true is not supported: the plan does not model it; remove the section")
    return problems
