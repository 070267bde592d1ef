"""What would fit where the plan does not: changes in the order of the harm they do, each with its predicted peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.architecture import ModelShape
from sft_play.facts.gpu_catalog import gpus_by_memory
from sft_play.facts.hardware import Hardware, named
from sft_play.plan.candidates import Candidate
from sft_play.plan.layout import LAYOUT_NAMES, LayoutName
from sft_play.plan.plan import WayOut, make_plan

SHORTEST = 256
"""Tokens below which a shorter sequence is no longer offered."""
LENGTH_STEP = 256
MORE_GPUS = (2, 4, 8, 16, 32, 64)
SMALL_RANK = 8


def ways_out(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    only: Sequence[LayoutName] = LAYOUT_NAMES,
    has_eval: bool = True,
) -> Iterator[WayOut]:
    """Changes that need less memory or find more of it; the last one adds up changes until they fit."""

    def choice(
        changed: RunConfig, machine: Hardware = hardware, layouts: Sequence[LayoutName] = only
    ) -> Candidate | None:
        try:
            plan = make_plan(changed, shape, machine, only=layouts, has_eval=has_eval, with_ways_out=False)
        except ConfigError:  # the batch that was given does not split over that many GPUs
            return None
        return plan.choice

    fitted = False
    together = config
    settings: list[str] = []
    for setting, changed in _changes(config, choice):
        found = choice(changed)
        if found is None:
            continue
        yield _way(setting, found, setting=setting)
        fitted = fitted or found.fits
        together, settings = _apply(together, setting), [*settings, setting]
        if not fitted and len(settings) > 1:
            both = choice(together)
            if both is not None and both.fits:
                fitted = True
                yield _way(" ".join(settings), both, setting=" ".join(settings))
    left_out = [name for name in LAYOUT_NAMES if name not in only]
    if left_out:
        found = choice(config, layouts=LAYOUT_NAMES)
        if found is not None and found.fits:
            yield _way(f"layout {found.layout.name}, which this version does not launch", found)
    yield from _machines(config, hardware, lambda machine: choice(config, machine, LAYOUT_NAMES))


def _way(change: str, found: Candidate, *, setting: str | None = None, hardware: str | None = None) -> WayOut:
    return WayOut(change, found.memory.allocated, found.memory.required, found.fits, setting, hardware)


def _changes(config: RunConfig, choice: Callable[[RunConfig], Candidate | None]) -> Iterator[tuple[str, RunConfig]]:
    """Settings that need less memory, the least harmful first."""
    wishes = ["train.gradient_checkpointing=true"] if config.train.gradient_checkpointing not in ("auto", True) else []
    if config.train.batch_size not in ("auto", 1):
        wishes.append("train.batch_size=1")
    if config.train.grad_accum != "auto":
        wishes.append("train.grad_accum=auto")
    if config.eval.batch_size not in ("auto", 1):
        wishes.append("eval.batch_size=1")
    if config.model.attn_implementation == "eager":
        wishes.append("model.attn_implementation=auto")
    length = _longest(config, choice)
    if length is not None:
        wishes.append(f"model.max_seq_len={length}")
    if config.tuning.mode == "full":
        wishes += ["train.optim=adafactor", "tuning.mode=lora"]
    if config.tuning.mode != "qlora":
        wishes.append("tuning.mode=qlora")
    if config.tuning.lora.r > SMALL_RANK:
        wishes.append(f"tuning.lora.r={SMALL_RANK}")
    for wish in wishes:
        yield wish, _apply(config, wish)


def _longest(config: RunConfig, choice: Callable[[RunConfig], Candidate | None]) -> int | None:
    """The longest shorter sequence that fits, in steps of 256 tokens; the shortest one where none does."""
    low, high = 0, (config.model.max_seq_len - 1) // LENGTH_STEP
    if high < 1:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        found = choice(_apply(config, f"model.max_seq_len={middle * LENGTH_STEP}"))
        if found is not None and found.fits:
            low = middle
        else:
            high = middle - 1
    return max(low * LENGTH_STEP, SHORTEST)


def _apply(config: RunConfig, setting: str) -> RunConfig:
    """The config with one plain setting, `section.key=value`, of those that are offered here."""
    path, _, text = setting.partition("=")
    value: Any = {"true": True, "auto": "auto"}.get(text, int(text) if text.isdigit() else text)
    changed: RunConfig = _with(config, path.split("."), value)
    return changed


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _with(getattr(section, path[0]), path[1:], value)})


def _machines(
    config: RunConfig, hardware: Hardware, choice: Callable[[Hardware], Candidate | None]
) -> Iterator[WayOut]:
    """More GPUs of the same kind, then the smallest larger GPU, on which the job fits as it is."""
    count = max(1, len(hardware.gpus))
    if hardware.gpus:
        for more in MORE_GPUS:
            if more <= count:
                continue
            machine = _with_gpus(hardware, more)
            found = choice(machine)
            if found is not None and found.fits:
                name = f"{more}x{hardware.gpus[0].name.removeprefix('NVIDIA ').replace(' ', '')}"
                yield _way(f"{more} of these GPUs ({found.layout.name})", found, hardware=name)
                break
    present = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    for entry in gpus_by_memory():
        if entry.memory_bytes <= present:
            continue
        found = choice(named(f"{count}x{entry.name}"))
        if found is not None and found.fits:
            yield _way(f"{count}x{entry.name}", found, hardware=f"{count}x{entry.name}")
            return


def _with_gpus(hardware: Hardware, count: int) -> Hardware:
    """The same machine with more GPUs like its first, eight to a node at most."""
    first = hardware.gpus[0]
    gpus = tuple(replace(first, index=index, free_bytes=None) for index in range(count))
    return replace(hardware, gpus=gpus, nodes=max(1, count // 8), named=True)
