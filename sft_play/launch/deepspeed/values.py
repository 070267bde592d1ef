"""Which values DeepSpeed's keys accept, checked before ranks start: DeepSpeed itself raises late, on every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from sft_play.launch.deepspeed import keys
from sft_play.launch.deepspeed.tree import AUTO, Config, leaves_of, shown_value, value_at

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


def wrong_values(config: Config) -> list[str]:
    """What is wrong with the values of a configuration whose keys are known, a line for each."""
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
