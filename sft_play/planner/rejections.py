"""The candidates that a plan shows beside its choice, each with why it was not chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sft_play.planner.candidates import AS_FAST, Candidate, Job, candidate_of, choose, fastest, least, needs_words
from sft_play.planner.layout import SIMPLICITY
from sft_play.planner.speed.speed_error import SpeedError, speed_error
from sft_play.units import GIB, gib


def shown(job: Job, candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """The candidates worth showing, each with why it was not chosen: every micro-batch of the chosen layout and
    checkpointing, every checkpointing with the chosen micro-batch, and the best of each other layout."""
    kept: dict[Any, Candidate] = {chosen.key: chosen}
    for candidate in candidates:
        same_layout = candidate.layout == chosen.layout
        same_batch = candidate.batch.micro_batch == chosen.batch.micro_batch
        if same_layout and (same_batch or candidate.checkpointed == chosen.checkpointed):
            kept.setdefault(candidate.key, candidate)
    for layout in {candidate.layout: None for candidate in candidates}:
        mine = [candidate for candidate in candidates if candidate.layout == layout]
        best = choose(mine) or least(mine)
        kept.setdefault(best.key, best)
    whole = candidate_of(job, chosen.layout, chosen.batch, chosen.checkpointed, loss="logits")
    # full logits are shown only for comparison: training always computes the loss in chunks
    if chosen.fits or not whole.fits:
        kept.setdefault(whole.key, whole)
    speed = fastest(candidates)
    return [
        candidate
        if candidate.key == chosen.key
        else dataclasses.replace(candidate, rejected_because=because(job, candidate, chosen, best=speed))
        for candidate in kept.values()
    ]


def because(job: Job, candidate: Candidate, chosen: Candidate, *, best: float) -> str:
    """Why a candidate was not chosen, with numbers; `best`: tokens per second of the fastest that fits."""
    if not candidate.fits:
        return f"needs {needs_words(candidate, terms=1)}"
    if candidate.step.loss != chosen.step.loss:
        more = candidate.memory.allocated - chosen.memory.allocated
        # less than 0.05 GiB would be printed as 0.0 GiB more
        if more < GIB // 20:
            full, chunked = gib(candidate.memory.allocated), gib(chosen.memory.allocated)
            return f"full logits: {full} GiB allocated; the chunked loss, which training uses, {chunked}"
        return f"full logits: {gib(more)} GiB more for the same loss"
    ratio = candidate.speed.tokens_per_s / chosen.speed.tokens_per_s
    error = speed_error(job.shape, chosen.precision, job.hardware, chosen.step)
    if candidate.layout != chosen.layout:
        return _layout_reason(job, candidate, chosen, ratio, error)
    if candidate.speed.tokens_per_s < AS_FAST * best:
        word = "predicted" if job.rates.known else "with typical rates"
        of_best = candidate.speed.tokens_per_s / best
        if error.is_within(of_best):
            return f"{word} slower than the fastest that fits, but about as fast within ±{error.share:.0%}"
        return f"{word} {1 - of_best:.1%} slower than the fastest that fits"
    more = candidate.memory.required - chosen.memory.required
    faster = "about as fast" if ratio >= 1.001 else "not faster"
    return (
        f"{faster}, {gib(more)} GiB more" if more > 0 else (f"{faster}, {gib(candidate.memory.required)} GiB as well")
    )


def _layout_reason(job: Job, candidate: Candidate, chosen: Candidate, ratio: float, error: SpeedError) -> str:
    if candidate.layout.offloads_states and not chosen.layout.offloads_states:
        needed = f"; it needs {gib(candidate.host_required)} GiB of RAM on each node"
        return f"offload is not needed: {_fits_at(job, chosen)}{needed}"
    is_less_simple = SIMPLICITY.index(candidate.layout.name) > SIMPLICITY.index(chosen.layout.name)
    text = f"{'not needed' if is_less_simple else 'another is preferred'}: {_fits_at(job, chosen)}"
    moved = candidate.speed.moved_bytes - chosen.speed.moved_bytes
    if abs(moved) >= GIB // 10:
        text += f" and moves {abs(moved) / GIB:.1f} GiB {'less' if moved > 0 else 'more'} per step"
    if ratio < AS_FAST or not is_less_simple:
        text += f"; this is predicted {speed_words(ratio, error)}"
    return text


def speed_words(ratio: float, error: SpeedError | None = None) -> str:
    """A speed relative to another in words: `3% slower`, `12% faster`, `as fast`; `about as fast` within the error."""
    if error is not None and error.is_within(ratio):
        return "about as fast"
    percent = f"{abs(ratio - 1):.0%}"
    if percent == "0%":
        return "as fast"
    return f"{percent} {'faster' if ratio > 1 else 'slower'}"


def _fits_at(job: Job, chosen: Candidate) -> str:
    return f"{chosen.layout.name} fits at {gib(chosen.memory.required)} of {gib(job.budget)} GiB"
