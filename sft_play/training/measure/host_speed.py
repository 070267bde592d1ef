"""How long the host takes for a pass: the shortest pass of hardly any tokens, at a run's start."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sft_play.machine.host_speed import save_host_speed
from sft_play.planner.plan import Plan
from sft_play.planner.speed import OPERATOR_S
from sft_play.training import distributed
from sft_play.training.loop.rows import CHAT_LENGTHS

# Tokens of a pass that takes the card next to no time, and how often it is run: the first one may
# build what later ones use.
SHORT_TOKENS, SHORT_PASSES = 8, 3


def shortest_seconds(compute: Callable[[], Any], device: torch.device, *, count: int) -> float:
    """Seconds of the quickest of `count` calls, each waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    seconds = []
    for _ in range(count):
        wait()
        start = time.perf_counter()
        compute()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_pass_floor(trainer: Any) -> float | None:
    """Seconds of a pass of SHORT_TOKENS tokens of the run's own model, which are the host's; None
    on a CPU, which has no time of its own, where other ranks compute in the same pass, and where
    each chat of a pass costs calls of its own. Gradients are left behind."""
    is_alone = distributed.world_size() == 1 and not trainer.plan.choice.step.one_by_one
    if trainer.args.device.type != "cuda" or not is_alone:
        return None
    return time_short_pass(trainer)


def time_short_pass(trainer: Any) -> float:
    """Seconds of a trainer's pass of SHORT_TOKENS tokens, a chat that is trained throughout."""
    device, row = trainer.args.device, trainer.train_dataset.__getitems__([0])[0]
    tokens = row["input_ids"][:SHORT_TOKENS]
    short_row = {"input_ids": tokens, "labels": tokens}
    if CHAT_LENGTHS in row:
        short_row[CHAT_LENGTHS] = [len(tokens)]
    # packs of one shape would be padded to it
    batch = replace(trainer.data_collator, min_tokens=0)([short_row])
    scored = torch.tensor(batch["labels"].numel(), device=device)
    return shortest_seconds(
        lambda: trainer.compute_micro_step(trainer.model_wrapped, dict(batch), scored),
        device,
        count=SHORT_PASSES,
    )


def record_host_speed(plan: Plan, floor_s: float) -> None:
    """Keep the host's seconds for an operator, by the operators that the plan counts in a pass."""
    times = plan.choice.uncorrected.pass_times
    if times is not None and times.host_s > 0:
        # the raw prediction is for a host that takes OPERATOR_S
        operator_s = floor_s * OPERATOR_S / times.host_s
        save_host_speed(plan.hardware.gpus[0].name, operator_s, measured_by="a run")
