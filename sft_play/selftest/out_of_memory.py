"""A run that is sent out of memory on purpose: what it says then must be true."""

from __future__ import annotations

import time
from typing import Any

from sft_play.config.load import load_config
from sft_play.facts.hardware import Hardware, detect
from sft_play.plan.plan import Plan, make_plan
from sft_play.selftest.judge import FREE_APART, out_of_memory_problems
from sft_play.selftest.material import write_rows
from sft_play.selftest.part import Part
from sft_play.selftest.trials import Bench, micro_batch_that_cannot_fit, train
from sft_play.start import shape_for

NAME = "out-of-memory"
SETTLES_S = 10.0
"""A driver takes back the memory of a process a moment after its end."""


def make(bench: Bench, hardware: Hardware) -> Part:
    """Give a run a micro-batch that its plan says cannot fit, let it run out, and compare what it says with the plan's
    figures and the driver's."""
    bench.clean()
    machine = hardware.first(1)
    plans: dict[int, Plan] = {}

    def required(micro: int) -> int:
        config = load_config(_config(bench, micro)).config
        plans[micro] = make_plan(
            config, shape_for(config), machine, only=("single",), has_eval=False, with_ways_out=False
        )  # fmt: skip
        return plans[micro].memory.required

    budget = plans_budget(machine)
    micro = micro_batch_that_cannot_fit(required, budget)
    if micro is None:
        return Part(NAME, "skipped", "no micro-batch up to 4,096 needs more than this GPU has")
    write_rows(bench.folder, bench.size, largest_batch=micro)
    free_before = _free()
    log = bench.logs / f"{NAME}.log"
    ended = train(bench, _config(bench, micro), log)
    free_after = _settled(free_before)
    plan = plans[micro]
    predicted: dict[str, Any] = {"required": plan.memory.required, "budget": plan.budget_bytes, "micro_batch": micro}
    measured = {"exit_code": ended.code, "said": ended.words, "free_before": free_before, "free_after": free_after}
    kept: dict[str, Any] = {"seconds": round(ended.seconds, 1), "log": str(log)}
    if ended.code is None:
        return Part(NAME, "fail", ended.words, predicted, measured, **kept)
    problems = out_of_memory_problems(
        ended.words, exit_code=ended.code, required=plan.memory.required, budget=plan.budget_bytes, micro_batch=micro,
        free_before=free_before, free_after=free_after,
    )  # fmt: skip
    said = f"micro-batch {micro} ran out as planned ({plan.memory.required / 2**30:.1f} GiB), and the message is true"
    return Part(NAME, "fail" if problems else "pass", "; ".join(problems) or said, predicted, measured, **kept)


def plans_budget(machine: Hardware) -> int:
    """Bytes that the driver says the GPU has: more than a plan may use of it."""
    return machine.gpus[0].total_bytes


def _config(bench: Bench, micro: int) -> Any:
    return bench.config(
        "full",
        NAME,
        data={"val_path": None},
        train={
            "batch_size": micro, "effective_batch_size": micro, "max_steps": 2, "gradient_checkpointing": False,
        },
        eval={"steps": 0},
    )  # fmt: skip


def _free() -> int:
    free = detect().gpus[0].free_bytes
    return free if free is not None else 0


def _settled(wanted: int) -> int:
    """Bytes that are free once the driver has taken back what a process had."""
    until = time.monotonic() + SETTLES_S
    while (free := _free()) < wanted - FREE_APART and time.monotonic() < until:
        time.sleep(0.5)
    return free
