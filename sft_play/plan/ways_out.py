"""What would fit where the plan does not: changes in the order of the harm they do, each with its predicted peak.

Settings are judged with what earlier runs on the machine taught, as their plan would be. Other machines are only
named: nothing was measured there, and layouts that offload count only where a machine's RAM is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.errors import ConfigError
from sft_play.facts.architecture import ModelShape, shape_of
from sft_play.facts.gpu_catalog import CatalogEntry, find, gpus_by_memory
from sft_play.facts.hardware import Gpu, Hardware, named
from sft_play.plan.candidates import Candidate, least, thriftiest
from sft_play.plan.largest import largest_that_fits
from sft_play.plan.layout import LAYOUT_NAMES, LayoutName, layouts_for
from sft_play.plan.memory import GIB
from sft_play.plan.plan import WayOut, job_of, make_plan
from sft_play.plan.record import Measured

SHORTEST = 256
"""Tokens below which a shorter sequence is no longer offered."""
LENGTH_STEP = 256
MORE_GPUS = (2, 4, 8, 16, 32, 64)
NODE_GPUS = 8
"""GPUs of a node when more of them are asked for than the present nodes have."""
SMALL_RANK = 8
RAM_STEP = 16 * GIB
"""RAM is offered in steps of so many bytes."""

Look = Callable[[RunConfig, Hardware, Sequence[LayoutName]], Candidate | None]
"""What needs the least of a config on a machine; None where its batch does not split over the GPUs."""


@dataclass(frozen=True)
class _Search:
    """The job that does not fit, and what would become of it when it is changed."""

    config: RunConfig
    shape: ModelShape
    hardware: Hardware
    only: Sequence[LayoutName]
    has_eval: bool
    earlier: Sequence[Measured]

    def known(self, machine: Hardware) -> Sequence[Measured]:
        """Runs of the present machine say nothing of another."""
        return self.earlier if machine is self.hardware else ()

    def _without_mesh(self, changed: RunConfig, machine: Hardware) -> RunConfig:
        """The config for a machine of other GPUs, for which a mesh of one's own was not meant."""
        return changed if machine.ranks == self.hardware.ranks else _with(changed, ("model", "mesh_shape"), None)

    def look(self, changed: RunConfig, machine: Hardware, layouts: Sequence[LayoutName]) -> Candidate | None:
        """The thriftiest candidate: far fewer are weighed than for a plan."""
        changed = self._without_mesh(changed, machine)
        possible, _ = layouts_for(changed, self.shape, machine)
        wanted = [layout for layout in possible if layout.name in layouts] or list(possible[:1])
        try:
            known = self.known(machine)
            job = job_of(changed, self.shape, machine, has_eval=self.has_eval, earlier=known, masters=False)
            found = thriftiest(job, wanted)
        except ConfigError:  # the batch that was given does not split over that many GPUs
            return None
        return next((candidate for candidate in found if candidate.fits), least(found))  # those that offload come last

    def choice(
        self, changed: RunConfig, machine: Hardware | None = None, layouts: Sequence[LayoutName] | None = None
    ) -> Candidate | None:
        """What a plan would take where something fits, else the thriftiest."""
        machine, layouts = machine or self.hardware, layouts or self.only
        found = self.look(changed, machine, layouts)
        if found is None or not found.fits:
            return found
        return make_plan(
            self._without_mesh(changed, machine), self.shape, machine, only=layouts, has_eval=self.has_eval,
            earlier=self.known(machine), with_ways_out=False,
        ).choice  # fmt: skip


def ways_out(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    only: Sequence[LayoutName] = LAYOUT_NAMES,
    has_eval: bool = True,
    earlier: Sequence[Measured] = (),
) -> Iterator[WayOut]:
    """Changes that need less memory or find more of it, those that are not enough among them; the last one adds up
    changes until they fit."""
    search = _Search(config, shape, hardware, only, has_eval, earlier)
    fitted = False
    for way in itertools.chain(_by_settings(search), _by_layout(search), _by_machine(search)):
        fitted = fitted or way.fits
        yield way
    if not fitted:
        yield from _by_smaller_model(search)


def _by_settings(search: _Search) -> Iterator[WayOut]:
    """Changed settings, one after the other; added up as long as none of them is enough."""
    config, fitted = search.config, False
    together, settings = config, dict[str, str]()
    present = search.choice(config)
    for setting, changed in _changes(config, lambda shorter: search.look(shorter, search.hardware, search.only)):
        found = search.choice(changed)
        if found is None:
            continue
        if not found.fits and present is not None and found.overload > present.overload:
            continue
        yield _way(setting, found, setting=setting)
        fitted = fitted or found.fits
        together = _apply(together, setting)
        settings[setting.partition("=")[0]] = setting
        if not fitted and len(settings) > 1:
            both = search.choice(together)
            if both is not None and both.fits:
                fitted = True
                words = " ".join(settings.values())
                yield _way(words, both, setting=words)


def _by_layout(search: _Search) -> Iterator[WayOut]:
    """The best layout of all, where STRATEGY= left some out."""
    if set(LAYOUT_NAMES) <= set(search.only):
        return
    found = search.choice(search.config, layouts=LAYOUT_NAMES)
    if found is not None and found.fits:
        name = found.layout.name
        yield _way(f"layout {name} (make train-distributed STRATEGY={name})", found)


def _by_machine(search: _Search) -> Iterator[WayOut]:
    """Other machines."""
    for machine, words in _machines(search.config, search.hardware, search.look):
        found = search.choice(search.config, machine, LAYOUT_NAMES)
        if found is not None and found.fits:
            yield _way(f"{words} ({found.layout.name})", found, hardware=_name_of(machine))


def _by_smaller_model(search: _Search) -> Iterator[WayOut]:
    """The largest known model that fits with the same settings, where nothing keeps the model."""
    asked: dict[str, Any] = {"only": search.only, "has_eval": search.has_eval, "earlier": search.earlier}
    name = largest_that_fits("model", search.config, search.shape, search.hardware, **asked).value
    if isinstance(name, str):
        setting = f"model.name={name}"
        plan = make_plan(_apply(search.config, setting), shape_of(name), search.hardware, with_ways_out=False, **asked)
        yield _way(setting, plan.choice, setting=setting)


def _way(change: str, found: Candidate, *, setting: str | None = None, hardware: str | None = None) -> WayOut:
    needs = f"{found.memory.required / GIB:.1f} GiB per {'GPU' if found.step.on_gpu else 'process'}{found.ram_words}"
    if "RAM" in found.short_of and found.step.on_gpu and not found.offloads:
        needs += f" and {found.host_required / GIB:.1f} GiB of RAM on each node"
    return WayOut(change, found.memory.allocated, found.memory.required, found.fits, needs, setting, hardware)


def _changes(config: RunConfig, choice: Callable[[RunConfig], Candidate | None]) -> Iterator[tuple[str, RunConfig]]:
    """Settings that need less memory, the least harmful first."""
    checkpointing = config.train.gradient_checkpointing
    wishes = ["train.gradient_checkpointing=true"] if checkpointing not in ("auto", True, "offload") else []
    wishes += ["train.gradient_checkpointing=offload"] if checkpointing != "offload" else []
    wishes += _smaller_batches(config.train)
    if config.tuning.mode == "full" and config.train.weight_updates == "float32":
        wishes.append("train.weight_updates=auto")
    if config.tuning.mode == "full" and config.model.dtype == "float32":
        wishes.append("model.dtype=auto")
    if config.eval.batch_size not in ("auto", 1):
        wishes.append("eval.batch_size=auto")
    if config.model.attn_implementation == "eager":
        wishes.append("model.attn_implementation=auto")
    length = _longest(config, choice)
    if length is not None:
        wishes.append(f"model.max_seq_len={length}")
    if config.tuning.mode == "full":
        wishes += ["train.optim=adafactor", "tuning.mode=lora"]
    if config.tuning.mode != "qlora":
        wishes.append("tuning.mode=qlora")
    if config.tuning.mode != "full" and config.tuning.lora.r > SMALL_RANK:
        wishes.append(f"tuning.lora.r={SMALL_RANK}")
    for wish in wishes:
        yield wish, _apply(config, wish)


def _smaller_batches(train: TrainConfig) -> list[str]:
    """Fewer rows a pass; the effective batch stays, also where it follows from the two that are given."""
    if train.effective_follows:
        rows = int(train.batch_size) * int(train.grad_accum)
        return [f"train.batch_size=1 train.grad_accum={rows}"] if train.batch_size != 1 else []
    return [
        *(["train.batch_size=1"] if train.batch_size not in ("auto", 1) else []),
        *(["train.grad_accum=auto"] if train.grad_accum != "auto" else []),
    ]


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
    """The config with plain settings, `section.key=value` each, of those that are offered here."""
    changed: RunConfig = config
    for word in setting.split():
        path, _, text = word.partition("=")
        value: Any = {"true": True, "auto": "auto"}.get(text, int(text) if text.isdigit() else text)
        changed = _with(changed, path.split("."), value)
    return changed


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _with(getattr(section, path[0]), path[1:], value)})


def _machines(config: RunConfig, hardware: Hardware, look: Look) -> Iterator[tuple[Hardware, str]]:
    """More RAM, more GPUs of the same kind, then the smallest larger GPU, on which the job fits as it is, and their
    names."""
    count = len(hardware.gpus)
    yield from _with_more_ram(config, hardware, look)
    for more in MORE_GPUS if count else ():
        if more <= count:
            continue
        machine = _with_gpus(hardware, hardware.gpus[0], more)
        if _fits(look(config, machine, LAYOUT_NAMES)):
            yield machine, f"{more} of these GPUs"
            break
    present = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    needed: dict[object, int] = {}
    larger = [entry for entry in gpus_by_memory() if entry.memory_bytes > present]
    for entry in larger:
        # What a job needs hangs on a GPU's capability alone: one that does not fit tells of all that are not larger.
        if entry.memory_bytes <= needed.get(entry.capability, 0):
            continue
        machine = _with_entry(hardware, entry, max(1, count))
        found = look(config, machine, LAYOUT_NAMES)
        if _fits(found):
            yield machine, _name_of(machine).partition(",")[0]
            return
        needed[entry.capability] = max(entry.memory_bytes, found.memory.required - 1 if found else 0)
    for more in MORE_GPUS if larger else ():
        machine = _with_entry(hardware, larger[-1], more)
        if more > count and _fits(look(config, machine, LAYOUT_NAMES)):
            yield machine, _name_of(machine).partition(",")[0]
            return


def _with_more_ram(config: RunConfig, hardware: Hardware, look: Look) -> Iterator[tuple[Hardware, str]]:
    """The same GPUs in a host with as much RAM as the job would need, where RAM is all that it lacks."""
    if not hardware.gpus or not hardware.ram_given:
        return
    found = look(
        config, replace(_with_gpus(hardware, hardware.gpus[0], len(hardware.gpus)), ram_given=False), LAYOUT_NAMES
    )
    if found is None or not found.fits or found.host_required <= hardware.ram_free_bytes:
        return
    ram = -(-found.host_required // RAM_STEP) * RAM_STEP
    machine = _with_gpus(hardware, hardware.gpus[0], len(hardware.gpus))
    yield replace(machine, ram_bytes=ram, ram_free_bytes=ram), f"{ram / GIB:.0f} GiB of RAM on each node"


def _with_entry(hardware: Hardware, entry: CatalogEntry, count: int) -> Hardware:
    """The same machine with that many GPUs of the catalogue."""
    like = named(f"1x{entry.name}")
    return replace(_with_gpus(hardware, like.gpus[0], count), link_bytes_per_s=like.link_bytes_per_s)


def _fits(found: Candidate | None) -> bool:
    """Whether it fits for certain: RAM that nobody said is none."""
    return found is not None and found.fits and not found.hangs_on_ram


def _with_gpus(hardware: Hardware, gpu: Gpu, count: int) -> Hardware:
    """The same machine with that many GPUs of one kind, on more nodes where its own have no room for eight or more.

    Of a machine without GPUs the RAM says nothing about another.
    """
    gpus = tuple(replace(gpu, index=index, free_bytes=None) for index in range(count))
    nodes = hardware.nodes if count == len(hardware.gpus) else -(-count // max(NODE_GPUS, hardware.gpus_per_node))
    given = hardware.ram_given and bool(hardware.gpus)
    return replace(hardware, gpus=gpus, nodes=nodes, named=True, ram_given=given)


def _name_of(machine: Hardware) -> str:
    """What HARDWARE= takes for the machine: its memory where the catalogue says another, its RAM where it was given."""
    gpu = machine.gpus[0]
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "")
    entry = next(iter(find(name)), None)
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    text = f"{nodes}{machine.gpus_per_node}x{name}"
    if entry is None or abs(entry.memory_bytes - gpu.total_bytes) > 0.05 * gpu.total_bytes:
        text += f",mem={gpu.total_bytes >> 20}MiB"
    return text + (f",ram={machine.ram_free_bytes >> 20}MiB" if machine.ram_given else "")
