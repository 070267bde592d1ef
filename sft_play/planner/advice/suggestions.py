"""What would fit where the plan does not: changes, the least harmful first, each with its predicted peak.

Changed settings are predicted with what earlier runs on this machine taught, as their own plan would be. Other machines
are only named: nothing was measured there, and layouts that offload count only where a machine's RAM is known.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.errors import ConfigError
from sft_play.facts.gpus.gpu import Gpu
from sft_play.facts.gpus.gpu_catalog import CatalogEntry, find_gpus, suggested_gpus
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.installed import LIGER_PACKAGE
from sft_play.facts.models.architecture import load_model_shape
from sft_play.planner.advice.what_if import largest, largest_that_fits
from sft_play.planner.candidates import Candidate, first_that_fits, thriftiest
from sft_play.planner.kernels import REPLACED
from sft_play.planner.layout import LAYOUT_NAMES, layouts_for
from sft_play.planner.memory.structure import configured_shape
from sft_play.planner.plan import Plan, PlanRequest, Suggestion, job_of, make_plan
from sft_play.units import GIB

# Shorter sequences are suggested in steps of this many tokens, down to one step.
LENGTH_STEP = 256
MORE_GPUS = (2, 4, 8, 16, 32, 64)
# GPUs per node when more are suggested than the present nodes have.
NODE_GPUS = 8
SMALL_RANK = 8
WITHOUT_MESH = "model.mesh_shape=null"
# RAM is suggested in steps of this many bytes.
RAM_STEP = 16 * GIB


def make_advised_plan(request: PlanRequest, **planned: Any) -> Plan:
    """The plan of `make_plan`; if it does not fit, with the changes that would make it fit."""
    plan = make_plan(request, **planned)
    if plan.fits:
        return plan
    ways = tuple(suggestions(request))
    return replace(
        plan, suggestions=tuple(way for way in ways if way.fits), not_enough=tuple(way for way in ways if not way.fits)
    )


def suggestions(request: PlanRequest) -> Iterator[Suggestion]:
    """Changes that need less memory or provide more, and those that are not enough; then a smaller model."""
    fitted = False
    for way in itertools.chain(_by_settings(request), _by_layout(request), _by_machine(request)):
        fitted = fitted or way.fits
        yield way
    if not fitted:
        yield from _by_smaller_model(request)


def _on(request: PlanRequest, machine: Hardware) -> PlanRequest:
    """The request for another machine, in any layout: neither runs nor the mesh of this one are meant for it."""
    same_ranks = machine.ranks == request.hardware.ranks
    config = request.config if same_ranks else _apply(request.config, WITHOUT_MESH)
    return replace(request, config=config, hardware=machine, only=LAYOUT_NAMES, earlier=())


def look(request: PlanRequest) -> Candidate | None:
    """The thriftiest candidate: far fewer are evaluated than for a plan. None where a plan would be refused."""
    with contextlib.suppress(ConfigError):
        possible, _ = layouts_for(request.config, request.shape, request.hardware)
        layouts = [layout for layout in possible if layout.name in request.only] or list(possible[:1])
        if not layouts:
            return None
        return first_that_fits(thriftiest(job_of(request, masters=False), layouts))  # those that offload come last
    return None


def _choice(request: PlanRequest) -> Candidate | None:
    """What a plan would choose where something fits, else the thriftiest candidate; None where a plan is refused."""
    best = look(request)
    # a whole plan weighs hundreds of candidates, and says more than the thriftiest one only where something fits
    if best is None or not best.fits:
        return best
    with contextlib.suppress(ConfigError):
        return make_plan(request).choice
    return None


def _by_settings(request: PlanRequest) -> Iterator[Suggestion]:
    """Changed settings one at a time, and all so far together as long as none is enough."""
    fitted, together, settings = False, request.config, dict[str, str]()
    present = _choice(request)
    for change in _changes(request):
        setting, candidate = change, _choice(replace(request, config=_apply(request.config, change)))
        if candidate is None and request.config.model.mesh_shape is not None:  # which may be what refuses the change
            setting = f"{change} {WITHOUT_MESH}"
            candidate = _choice(replace(request, config=_apply(request.config, setting)))
        if candidate is None:
            continue
        if not candidate.fits and present is not None and candidate.overload > present.overload:
            continue
        yield _way(setting, candidate, setting=setting)
        fitted = fitted or candidate.fits
        together = _apply(together, setting)
        settings |= {word.partition("=")[0]: word for word in setting.split()}
        # each change alone is not enough so far: all of them up to here
        if not fitted and len(settings) > 1:
            both = _choice(replace(request, config=together))
            if both is not None and both.fits:
                fitted = True
                words = " ".join(settings.values())
                yield _way(words, both, setting=words)


def _by_layout(request: PlanRequest) -> Iterator[Suggestion]:
    if request.config.model.mesh_shape is not None:
        candidate = _choice(replace(request, config=_apply(request.config, WITHOUT_MESH)))
        if candidate is not None and candidate.fits:
            yield _way(f"{WITHOUT_MESH} ({candidate.layout.name})", candidate, setting=WITHOUT_MESH)
        return
    if set(LAYOUT_NAMES) <= set(request.only):
        return
    candidate = _choice(replace(request, only=LAYOUT_NAMES))
    if candidate is not None and candidate.fits:
        name = candidate.layout.name
        yield _way(f"layout {name} (make train-distributed STRATEGY={name})", candidate)


def _by_machine(request: PlanRequest) -> Iterator[Suggestion]:
    for machine, words in _machines(request):
        candidate = _choice(_on(request, machine))
        if candidate is not None and candidate.fits:
            yield _way(f"{words} ({candidate.layout.name})", candidate, hardware=_name_of(machine))


def _by_smaller_model(request: PlanRequest) -> Iterator[Suggestion]:
    name = largest_that_fits("model", request).value
    if isinstance(name, str):
        setting = f"model.name={name}"
        config = _apply(request.config, setting)
        plan = make_plan(replace(request, config=config, shape=configured_shape(config, load_model_shape(name))))
        yield _way(setting, plan.choice, setting=setting)


def _way(change: str, candidate: Candidate, *, setting: str | None = None, hardware: str | None = None) -> Suggestion:
    device = "GPU" if candidate.step.on_gpu else "process"
    needs = f"{candidate.memory.required / GIB:.1f} GiB per {device}{candidate.ram_words}"
    if "RAM" in candidate.short_of and candidate.step.on_gpu and not candidate.offloads:
        needs += f" and {candidate.host_required / GIB:.1f} GiB of RAM on each node"
    return Suggestion(
        change, candidate.memory.allocated, candidate.memory.required, candidate.fits, needs, setting, hardware
    )


def _changes(request: PlanRequest) -> list[str]:
    """Settings that need less memory, the least harmful first."""
    config = request.config
    checkpointing = config.train.gradient_checkpointing
    wishes = ["train.gradient_checkpointing=true"] if checkpointing not in ("auto", True, "offload") else []
    wishes += ["train.gradient_checkpointing=offload"] if checkpointing != "offload" else []
    wishes = wishes if request.shape.can_checkpoint else []
    wishes += _smaller_batches(config.train)
    if config.tuning.mode == "full" and config.train.weight_updates == "float32":
        wishes.append("train.weight_updates=auto")
    if config.tuning.mode == "full" and config.model.dtype == "float32":
        wishes.append("model.dtype=auto")
    if config.eval.batch_size not in ("auto", 1):
        wishes.append("eval.batch_size=auto")
    if config.model.attn_implementation == "eager":
        wishes.append("model.attn_implementation=auto")
    if config.train.kernels == "auto" and LIGER_PACKAGE not in request.without and request.shape.model_type in REPLACED:
        wishes += ["train.kernels=liger"] if request.hardware.gpus else []  # auto counts the plain ones' memory
    if config.model.max_seq_len > LENGTH_STEP:
        wishes.append(f"model.max_seq_len={_longest(request)}")
    if config.tuning.mode == "full":
        wishes += ["train.optim=adafactor", "tuning.mode=lora"]
    if config.tuning.mode != "qlora":
        wishes.append("tuning.mode=qlora")
    if config.tuning.mode != "full" and config.tuning.lora.r > SMALL_RANK:
        wishes.append(f"tuning.lora.r={SMALL_RANK}")
    return wishes


def _smaller_batches(train: TrainConfig) -> list[str]:
    if train.effective_follows:
        rows = int(train.batch_size) * int(train.grad_accum)
        return [f"train.batch_size=1 train.grad_accum={rows}"] if train.batch_size != 1 else []
    if "auto" not in (train.batch_size, train.grad_accum):  # of three numbers that agree no one can change alone
        return ["train.batch_size=1 train.grad_accum=auto"] if train.batch_size != 1 else []
    return [
        *(["train.batch_size=1"] if train.batch_size not in ("auto", 1) else []),
        *(["train.grad_accum=auto"] if train.grad_accum != "auto" else []),
    ]


def _longest(request: PlanRequest) -> int:
    def fits(length: int) -> bool:
        candidate = look(replace(request, config=_apply(request.config, f"model.max_seq_len={length}")))
        return candidate is not None and candidate.fits

    most = (request.config.model.max_seq_len - 1) // LENGTH_STEP * LENGTH_STEP
    return largest(fits, step=LENGTH_STEP, most=most) or LENGTH_STEP


def _apply(config: RunConfig, setting: str) -> RunConfig:
    changed: RunConfig = config
    for word in setting.split():
        path, _, text = word.partition("=")
        value: Any = {"true": True, "null": None}.get(text, int(text) if text.isdigit() else text)
        changed = _with(changed, path.split("."), value)
    return changed


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _with(getattr(section, path[0]), path[1:], value)})


def _machines(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    """More RAM, more GPUs of the same kind, then the smallest larger GPU on which the unchanged job fits."""
    hardware = request.hardware
    count = len(hardware.gpus)
    yield from _with_more_ram(request)
    larger_numbers = [more for more in MORE_GPUS if more > count]
    for more in larger_numbers if count else ():
        machine = _with_gpus(hardware, hardware.gpus[0], more)
        if _fits(look(_on(request, machine))):
            yield machine, f"{more} of these GPUs"
            break
    present = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    # capability: the largest memory that is known to be too small for it
    needed: dict[object, int] = {}
    larger = [entry for entry in suggested_gpus() if entry.memory_bytes > present]
    for entry in larger:
        # a job's need depends only on a GPU's capability: one that is too small rules out all that are not larger
        if entry.memory_bytes <= needed.get(entry.capability, 0):
            continue
        machine = _with_entry(hardware, entry, max(1, count))
        candidate = look(_on(request, machine))
        if _fits(candidate):
            yield machine, _name_of(machine).partition(",")[0]
            return
        needed[entry.capability] = max(entry.memory_bytes, candidate.memory.required - 1 if candidate else 0)
    for more in larger_numbers if larger else ():
        machine = _with_entry(hardware, larger[-1], more)
        if _fits(look(_on(request, machine))):
            yield machine, _name_of(machine).partition(",")[0]
            return


def _with_more_ram(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    hardware = request.hardware
    if not hardware.gpus or not hardware.ram_given:
        return
    machine = _with_gpus(hardware, hardware.gpus[0], len(hardware.gpus))
    candidate = look(_on(request, replace(machine, ram_given=False)))
    if candidate is None or not candidate.fits or candidate.host_required <= hardware.ram_free_bytes:
        return
    ram = -(-candidate.host_required // RAM_STEP) * RAM_STEP
    yield replace(machine, ram_bytes=ram, ram_free_bytes=ram), f"{ram / GIB:.0f} GiB of RAM on each node"


def _with_entry(hardware: Hardware, entry: CatalogEntry, count: int) -> Hardware:
    like = parse_hardware(f"1x{entry.name}")
    return replace(_with_gpus(hardware, like.gpus[0], count), link_bytes_per_s=like.link_bytes_per_s)


def _fits(candidate: Candidate | None) -> bool:
    """Whether it certainly fits: unknown RAM does not count."""
    return candidate is not None and candidate.fits and not candidate.needs_unknown_ram


def _with_gpus(hardware: Hardware, gpu: Gpu, count: int) -> Hardware:
    """The same machine with that many GPUs of one kind, on more nodes where its own have no room for eight or more."""
    # free_bytes None: what other processes hold on the present GPUs is not held there
    gpus = tuple(replace(gpu, index=index, free_bytes=None) for index in range(count))
    nodes = hardware.nodes if count == len(hardware.gpus) else -(-count // max(NODE_GPUS, hardware.gpus_per_node))
    given = hardware.ram_given and bool(hardware.gpus)
    return replace(hardware, gpus=gpus, nodes=nodes, named=True, ram_given=given)


def _name_of(machine: Hardware) -> str:
    gpu = machine.gpus[0]
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "")  # as HARDWARE= takes it
    entry = next(iter(find_gpus(name)), None)
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    text = f"{nodes}{machine.gpus_per_node}x{name}"
    if entry is None or abs(entry.memory_bytes - gpu.total_bytes) > 0.05 * gpu.total_bytes:
        text += f",mem={gpu.total_bytes >> 20}MiB"
    return text + (f",ram={machine.ram_free_bytes >> 20}MiB" if machine.ram_given else "")
