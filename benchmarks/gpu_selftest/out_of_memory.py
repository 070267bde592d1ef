"""A run that is made to run out of memory: what it then reports must be true."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_selftest.checks import FREE_APART, out_of_memory_problems
from benchmarks.gpu_selftest.material import write_trial_rows
from benchmarks.gpu_selftest.part import Part
from benchmarks.gpu_selftest.trials import TrialBench, find_oversized_micro_batch, plan_run, train_run
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.planner.plan import Plan

NAME = "out-of-memory"
SETTLES_S = 10.0
"""A driver reclaims the memory of a process a moment after it ends."""


def make(bench: TrialBench, hardware: Hardware) -> Part:
    """Give a run a micro-batch that its plan says cannot fit, let it run out of memory, and compare its message with
    the figures of the plan and the driver."""
    if hardware.pages:
        return Part(NAME, "skipped", "under WSL the driver moves memory to the host's and no run has to run out of it")
    bench.clean()
    plans: dict[int, Plan] = {}

    def required(micro: int) -> int:
        plans[micro] = plan_run(_config(bench, micro))
        return plans[micro].memory.required

    micro = find_oversized_micro_batch(required, hardware.gpus[0].total_bytes)
    if micro is None:
        return Part(NAME, "skipped", "no micro-batch up to 4,096 needs more than this GPU has")
    write_trial_rows(bench.folder, bench.size, largest_batch=micro)
    free_before = _free()
    log = bench.logs / f"{NAME}.log"
    ended = train_run(bench, _config(bench, micro), log)
    free_after = _settled(free_before)
    plan = plans[micro]
    predicted: dict[str, Any] = {"required": plan.memory.required, "budget": plan.budget_bytes, "micro_batch": micro}
    measured = {"exit_code": ended.code, "said": ended.words, "free_before": free_before, "free_after": free_after}
    common: dict[str, Any] = {"seconds": round(ended.seconds, 1), "log": str(log)}
    if ended.code is None:
        return Part(NAME, "fail", ended.words, predicted, measured, **common)
    problems = out_of_memory_problems(
        ended.words, exit_code=ended.code, required=plan.memory.required, budget=plan.budget_bytes, micro_batch=micro,
        free_before=free_before, free_after=free_after,
    )  # fmt: skip
    reason = f"micro-batch {micro} ran out as planned ({plan.memory.required / 2**30:.1f} GiB), and the message is true"
    return Part(NAME, "fail" if problems else "pass", "; ".join(problems) or reason, predicted, measured, **common)


def _config(bench: TrialBench, micro: int) -> Path:
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
    free = detect_hardware().gpus[0].free_bytes
    return free if free is not None else 0


def _settled(wanted: int) -> int:
    """Bytes that are free once the driver has reclaimed a process's memory."""
    until = time.monotonic() + SETTLES_S
    while (free := _free()) < wanted - FREE_APART and time.monotonic() < until:
        time.sleep(0.5)
    return free
