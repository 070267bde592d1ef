"""Predicted against measured: when a part of the self-test passes. Pure functions that return what is wrong.

The margin of a peak is the plan's own (docs/plan.md): a fraction by what is known of the setting, and 0.3 GiB. The plan
gives none for speeds, which rank candidates; here a factor of two either way is allowed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.text import GIB

SPEED_FACTOR = 2.0
"""How far a speed may be from its prediction, either way. The roofline is within it on the published runs of
benchmarks/speed.json."""
NF4_ERROR = (0.05, 0.12)
"""Relative error (2-norms) of normal numbers after NF4 and back, blocks of 64 with double quantisation: 0.092 for
131,072 numbers with bitsandbytes' code for CPUs. Rounding to other values, or no rounding, is outside."""
FREE_APART = GIB // 4
"""How far two readings of free memory may be apart: other processes' buffers come and go between them."""
CONTEXT_APART = GIB // 4
"""How much more than the plan's figure a CUDA context may take."""
MESSAGE_APART = 0.25
"""GiB that a message's figures may be off the plan's: free memory changes between two readings, and a message
rounds."""
# The cases of attention that a probe runs and a plan predicts: masks; key and value heads beside the query's; dtypes;
# whether all batches have one shape.
MASKS = ("causal", "padding mask")
HEADS = {"grouped heads": 2, "equal heads": 8}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ROWS = {"": False, ", one shape": True}
TOKENS, HEAD_DIM, QUERY_HEADS = 256, 64, 8
_PREDICTED = re.compile(r"the plan predicted ([\d.]+) of ([\d.]+) GiB with micro-batch (\d+)")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB).*?of which ([\d.]+) ([KMG]iB) is free", re.DOTALL)
_UNIT = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank: what a run predicted and measured. `margin` is the plan's, on the reserved bytes. `exact`: the
    rows are those that the plan assumes, so the prediction may not be too high either."""

    predicted_allocated: int
    predicted_reserved: int
    margin: int
    measured_allocated: int | None
    measured_reserved: int
    exact: bool = False


def peak_problems(peak: Peak) -> list[str]:
    """What is wrong with a peak: above the promise or, for `exact` rows, below the prediction by more than the
    margin."""
    problems = []
    if peak.measured_reserved > peak.predicted_reserved + peak.margin:
        problems.append(_over("reserved", peak.measured_reserved, peak.predicted_reserved, peak.margin))
    if peak.measured_allocated is None:
        return problems
    if peak.measured_allocated > peak.predicted_allocated + peak.margin:
        problems.append(_over("allocated", peak.measured_allocated, peak.predicted_allocated, peak.margin))
    if peak.exact and peak.measured_allocated < peak.predicted_allocated - peak.margin:
        below = _gib(peak.predicted_allocated - peak.measured_allocated)
        problems.append(
            f"{_gib(peak.measured_allocated)} allocated are {below} below the prediction, more than the "
            f"margin {_gib(peak.margin)}: the plan is too cautious"
        )
    return problems


def moment_problems(name: str, *, predicted: int, margin: int, measured: int) -> list[str]:
    """What is wrong with what loading or saving held, in bytes: a plan's figure for it is an upper bound."""
    return [_over(f"allocated to {name}", measured, predicted, margin)] if measured > predicted + margin else []


def speed_problems(predicted: float, measured: float, *, what: str = "tokens/s", form: str = ",.0f") -> list[str]:
    if predicted / SPEED_FACTOR <= measured <= predicted * SPEED_FACTOR:
        return []
    ratio = measured / predicted
    return [f"{measured:{form}} {what} are {ratio:.2f} of the {predicted:{form}} predicted "
            f"({1 / SPEED_FACTOR:g} to {SPEED_FACTOR:g} pass)"]  # fmt: skip


def update_problems(updates: Mapping[str, Any], *, mode: str) -> list[str]:
    """What is wrong with the dtypes of what trains, and with the fraction of elements that a step moves."""
    problems = []
    if mode != "full" and list(updates["adapters"]) != ["float32"]:
        problems.append(f"adapters are {_and(updates['adapters'])}, not float32")
    if list(updates["optimizer_states"]) != ["float32"]:
        problems.append(f"optimizer states are {_and(updates['optimizer_states'])}, not float32")
    if mode == "qlora" and "nf4" not in updates["weights"]:
        problems.append(f"the base is {_and(updates['weights'])}, not NF4")
    if mode == "full" and updates["rounding"] == "float32" and list(updates["weights"]) != ["float32"]:
        problems.append(f"weights are {_and(updates['weights'])}, and the plan says float32")
    if updates["moved_share"] is None:
        problems.append("no step was examined")
    elif updates["lost"]:
        problems.append(f"a step moves {updates['moved_share']:.1%} of what trains: updates are lost")
    return problems


def attention_problems(predicted: Mapping[str, str], measured: Mapping[str, str]) -> list[str]:
    """Cases in which another kernel runs than the plan counts on."""
    return [
        f"{case}: the plan counts on {kernel}, but {measured.get(case, 'nothing')} runs"
        for case, kernel in predicted.items()
        if measured.get(case) != kernel
    ]


def nf4_problems(measured: Mapping[str, float]) -> list[str]:
    """What is wrong with a round trip through NF4: its error, its bytes, a layer's products and gradient."""
    low, high = NF4_ERROR
    wrong = []
    if not low <= measured["relative_error"] <= high:
        wrong.append(f"the relative error of the round trip is {measured['relative_error']:.3f}, not {low} to {high}")
    if measured["packed_bytes"] * 2 != measured["elements"]:
        wrong.append(f"{measured['elements']:.0f} elements take {measured['packed_bytes']:.0f} bytes, not half of that")
    if not measured["layer_error"] <= 0.02:
        wrong.append(f"a 4-bit layer is {measured['layer_error']:.3f} (relative) from the product with its own weights")
    if not measured["gradient_error"] <= 0.02:
        wrong.append(f"the gradient through a 4-bit layer is {measured['gradient_error']:.3f} (relative) off")
    return wrong


def memory_counter_problems(measured: Mapping[str, int], *, context_bytes: int) -> list[str]:
    """What is wrong between the driver's count of free bytes (NVML), which a plan reads, and CUDA's own."""
    wrong = []
    apart = abs(measured["free_by_driver"] - measured["free_by_cuda"])
    if apart > FREE_APART:
        by_driver, by_cuda = _gib(measured["free_by_driver"]), _gib(measured["free_by_cuda"])
        wrong.append(f"the driver says {by_driver} free and CUDA {by_cuda}")
    if measured["context"] > context_bytes + CONTEXT_APART:
        wrong.append(f"a CUDA context takes {_gib(measured['context'])}; the plan counts {_gib(context_bytes)}")
    return wrong


def out_of_memory_problems(
    output: str,
    *,
    exit_code: int | None,
    required: int,
    budget: int,
    micro_batch: int,
    free_before: int,
    free_after: int,
) -> list[str]:
    """What is wrong in the message of a run that was made to run out of memory, or in how it ended: beside the bytes
    and the micro-batch of a plan made before it, and what the driver said is free before it and after."""
    wrong = [] if exit_code == 3 else [f"the exit code is {exit_code}, not 3"]
    words = _PREDICTED.search(output)
    if words is None:
        return [*wrong, "the message does not say what was predicted"]
    planned, room, batch = float(words[1]), float(words[2]), int(words[3])
    if batch != micro_batch:
        wrong.append(f"it says micro-batch {batch}, and {micro_batch} was asked for")
    if planned <= room:
        wrong.append(f"it says that {planned} of {room} GiB were predicted, which would have fitted")
    if planned < required / GIB - MESSAGE_APART:
        wrong.append(f"it says {planned} GiB predicted, and the plan {required / GIB:.1f}")
    if abs(room - budget / GIB) > MESSAGE_APART:
        wrong.append(f"it says {room} GiB of room, and the plan {budget / GIB:.1f}")
    tried = _TRIED.search(output)
    if tried is None:
        wrong.append("it does not say what was asked for and what was free")
    elif float(tried[1]) * _UNIT[tried[2]] <= float(tried[3]) * _UNIT[tried[4]]:
        wrong.append(f"{tried[1]} {tried[2]} were asked for and {tried[3]} {tried[4]} free: that is another fault")
    if free_after < free_before - FREE_APART:
        wrong.append(f"{_gib(free_before - free_after)} are not free again after it")
    return wrong


def _over(what: str, measured: int, predicted: int, margin: int) -> str:
    above = f"{_gib(measured)} {what} are {_gib(measured - predicted)} above the {_gib(predicted)} predicted"
    return f"{above}, margin {_gib(margin)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _and(names: Sequence[str]) -> str:
    return " and ".join(names) or "absent"
