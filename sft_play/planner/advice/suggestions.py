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
from sft_play.facts.gpus.gpu_catalog import CatalogEntry, find_catalog_entries, suggested_gpus
from sft_play.facts.hardware import Hardware, parse_hardware
from sft_play.facts.installed import LIGER_PACKAGE
from sft_play.facts.models.architecture import load_model_shape
from sft_play.planner.advice.what_if import find_largest_fit, largest_fitting_multiple
from sft_play.planner.candidates import Candidate, first_fitting, lowest_memory_candidates
from sft_play.planner.kernels import LIGER_REPLACEMENTS
from sft_play.planner.layout import LAYOUT_NAMES, find_layouts
from sft_play.planner.memory.structure import configured_shape
from sft_play.planner.plan import Plan, PlanRequest, Suggestion, build_plan_inputs, make_plan
from sft_play.units import GIB

# Shorter sequences are suggested in steps of this many tokens, down to one step.
SUGGESTED_SEQ_LEN_STEP = 256
GPU_COUNTS = (2, 4, 8, 16, 32, 64)
# GPUs per node when more are suggested than the present nodes have.
GPUS_PER_NODE = 8
SMALL_LORA_RANK = 8
NO_MESH = "model.mesh_shape=null"
# RAM is suggested in steps of this many bytes.
RAM_STEP_BYTES = 16 * GIB


def make_advised_plan(request: PlanRequest, **options: Any) -> Plan:
    """The plan of `make_plan`; if it does not fit, with the changes that would make it fit."""
    plan = make_plan(request, **options)
    if plan.fits:
        return plan
    all_suggestions = tuple(find_suggestions(request))
    return replace(
        plan,
        suggestions=tuple(suggestion for suggestion in all_suggestions if suggestion.fits),
        not_enough=tuple(suggestion for suggestion in all_suggestions if not suggestion.fits),
    )


def find_suggestions(request: PlanRequest) -> Iterator[Suggestion]:
    """Changes that need less memory or provide more, and those that are not enough; then a smaller model."""
    has_fit = False
    for suggestion in itertools.chain(_suggest_settings(request), _suggest_layout(request), _suggest_machine(request)):
        has_fit = has_fit or suggestion.fits
        yield suggestion
    if not has_fit:
        yield from _suggest_smaller_model(request)


def _request_on_machine(request: PlanRequest, machine: Hardware) -> PlanRequest:
    """The request for another machine, in any layout: neither runs nor the mesh of this one are meant for it."""
    has_same_ranks = machine.ranks == request.hardware.ranks
    config = request.config if has_same_ranks else _apply_setting(request.config, NO_MESH)
    return replace(request, config=config, hardware=machine, allowed_layouts=LAYOUT_NAMES, measured_runs=())


def lowest_memory_candidate(request: PlanRequest) -> Candidate | None:
    """The candidate that needs the least memory: far fewer are evaluated than for a plan. None where a plan would be
    refused."""
    with contextlib.suppress(ConfigError):
        possible, _ = find_layouts(request.config, request.shape, request.hardware)
        layouts = [layout for layout in possible if layout.name in request.allowed_layouts] or list(possible[:1])
        if not layouts:
            return None
        # those that offload come last
        return first_fitting(lowest_memory_candidates(build_plan_inputs(request, fp32_master_weights=False), layouts))
    return None


def _planned_choice(request: PlanRequest) -> Candidate | None:
    """What a plan would choose where something fits, else the one that needs the least memory; None where a plan is
    refused."""
    candidate = lowest_memory_candidate(request)
    # a plan evaluates hundreds of candidates, and says more than the smallest one only where something fits
    if candidate is None or not candidate.fits:
        return candidate
    with contextlib.suppress(ConfigError):
        return make_plan(request).choice
    return None


def _suggest_settings(request: PlanRequest) -> Iterator[Suggestion]:
    """Changed settings one at a time, and all so far together as long as none is enough."""
    has_fit, combined_config, combined_settings = False, request.config, dict[str, str]()
    present_candidate = _planned_choice(request)
    for change in _memory_saving_settings(request):
        setting, candidate = change, _planned_choice(replace(request, config=_apply_setting(request.config, change)))
        if candidate is None and request.config.model.mesh_shape is not None:  # which may be what refuses the change
            setting = f"{change} {NO_MESH}"
            candidate = _planned_choice(replace(request, config=_apply_setting(request.config, setting)))
        if candidate is None:
            continue
        if (
            not candidate.fits
            and present_candidate is not None
            and candidate.budget_ratio > present_candidate.budget_ratio
        ):
            continue
        yield _build_suggestion(setting, candidate, setting=setting)
        has_fit = has_fit or candidate.fits
        combined_config = _apply_setting(combined_config, setting)
        combined_settings |= {assignment.partition("=")[0]: assignment for assignment in setting.split()}
        # each change alone is not enough so far: all of them up to here
        if not has_fit and len(combined_settings) > 1:
            combined = _planned_choice(replace(request, config=combined_config))
            if combined is not None and combined.fits:
                has_fit = True
                combined_setting = " ".join(combined_settings.values())
                yield _build_suggestion(combined_setting, combined, setting=combined_setting)


def _suggest_layout(request: PlanRequest) -> Iterator[Suggestion]:
    if request.config.model.mesh_shape is not None:
        candidate = _planned_choice(replace(request, config=_apply_setting(request.config, NO_MESH)))
        if candidate is not None and candidate.fits:
            yield _build_suggestion(f"{NO_MESH} ({candidate.layout.name})", candidate, setting=NO_MESH)
        return
    if set(LAYOUT_NAMES) <= set(request.allowed_layouts):
        return
    candidate = _planned_choice(replace(request, allowed_layouts=LAYOUT_NAMES))
    if candidate is not None and candidate.fits:
        name = candidate.layout.name
        yield _build_suggestion(f"layout {name} (make train-distributed STRATEGY={name})", candidate)


def _suggest_machine(request: PlanRequest) -> Iterator[Suggestion]:
    for machine, description in _larger_machines(request):
        candidate = _planned_choice(_request_on_machine(request, machine))
        if candidate is not None and candidate.fits:
            yield _build_suggestion(
                f"{description} ({candidate.layout.name})", candidate, hardware=_hardware_name(machine)
            )


def _suggest_smaller_model(request: PlanRequest) -> Iterator[Suggestion]:
    name = find_largest_fit("model", request).value
    if isinstance(name, str):
        setting = f"model.name={name}"
        config = _apply_setting(request.config, setting)
        plan = make_plan(replace(request, config=config, shape=configured_shape(config, load_model_shape(name))))
        yield _build_suggestion(setting, plan.choice, setting=setting)


def _build_suggestion(
    change: str, candidate: Candidate, *, setting: str | None = None, hardware: str | None = None
) -> Suggestion:
    device = "GPU" if candidate.step.on_gpu else "process"
    needs = f"{candidate.memory.required / GIB:.1f} GiB per {device}{candidate.ram_text}"
    if "RAM" in candidate.insufficient_memory and candidate.step.on_gpu and not candidate.offloads:
        needs += f" and {candidate.host_required / GIB:.1f} GiB of RAM on each node"
    return Suggestion(
        change, candidate.memory.allocated, candidate.memory.required, candidate.fits, needs, setting, hardware
    )


def _memory_saving_settings(request: PlanRequest) -> list[str]:
    """Settings that need less memory, the least harmful first."""
    config = request.config
    checkpointing = config.train.gradient_checkpointing
    settings = ["train.gradient_checkpointing=true"] if checkpointing not in ("auto", True, "offload") else []
    settings += ["train.gradient_checkpointing=offload"] if checkpointing != "offload" else []
    settings = settings if request.shape.can_checkpoint else []
    settings += _smaller_batches(config.train)
    if config.tuning.mode == "full" and config.train.weight_updates == "float32":
        settings.append("train.weight_updates=auto")
    if config.tuning.mode == "full" and config.model.dtype == "float32":
        settings.append("model.dtype=auto")
    if config.eval.batch_size not in ("auto", 1):
        settings.append("eval.batch_size=auto")
    if config.model.attn_implementation == "eager":
        settings.append("model.attn_implementation=auto")
    if (
        config.train.kernels == "auto"
        and LIGER_PACKAGE not in request.missing_packages
        and request.shape.model_type in LIGER_REPLACEMENTS
    ):
        settings += ["train.kernels=liger"] if request.hardware.gpus else []  # auto counts the plain ones' memory
    if config.model.max_seq_len > SUGGESTED_SEQ_LEN_STEP:
        settings.append(f"model.max_seq_len={_longest_fitting_seq_len(request)}")
    if config.tuning.mode == "full":
        settings += ["train.optim=adafactor", "tuning.mode=lora"]
    if config.tuning.mode != "qlora":
        settings.append("tuning.mode=qlora")
    if config.tuning.mode != "full" and config.tuning.lora.r > SMALL_LORA_RANK:
        settings.append(f"tuning.lora.r={SMALL_LORA_RANK}")
    return settings


def _smaller_batches(train: TrainConfig) -> list[str]:
    if train.derives_effective_batch:
        rows = int(train.batch_size) * int(train.grad_accum)
        return [f"train.batch_size=1 train.grad_accum={rows}"] if train.batch_size != 1 else []
    if "auto" not in (train.batch_size, train.grad_accum):  # of three numbers that agree no one can change alone
        return ["train.batch_size=1 train.grad_accum=auto"] if train.batch_size != 1 else []
    return [
        *(["train.batch_size=1"] if train.batch_size not in ("auto", 1) else []),
        *(["train.grad_accum=auto"] if train.grad_accum != "auto" else []),
    ]


def _longest_fitting_seq_len(request: PlanRequest) -> int:
    def fits(length: int) -> bool:
        candidate = lowest_memory_candidate(
            replace(request, config=_apply_setting(request.config, f"model.max_seq_len={length}"))
        )
        return candidate is not None and candidate.fits

    max_seq_len = (request.config.model.max_seq_len - 1) // SUGGESTED_SEQ_LEN_STEP * SUGGESTED_SEQ_LEN_STEP
    return largest_fitting_multiple(fits, step=SUGGESTED_SEQ_LEN_STEP, limit=max_seq_len) or SUGGESTED_SEQ_LEN_STEP


def _apply_setting(config: RunConfig, setting: str) -> RunConfig:
    changed: RunConfig = config
    for assignment in setting.split():
        path, _, value_text = assignment.partition("=")
        value: Any = {"true": True, "null": None}.get(
            value_text, int(value_text) if value_text.isdigit() else value_text
        )
        changed = _replace_option(changed, path.split("."), value)
    return changed


def _replace_option(section: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) == 1:
        return section.model_copy(update={path[0]: value})
    return section.model_copy(update={path[0]: _replace_option(getattr(section, path[0]), path[1:], value)})


def _larger_machines(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    """More RAM, more GPUs of the same kind, then the smallest larger GPU on which the unchanged job fits."""
    hardware = request.hardware
    count = len(hardware.gpus)
    yield from _machines_with_more_ram(request)
    larger_counts = [gpu_count for gpu_count in GPU_COUNTS if gpu_count > count]
    for gpu_count in larger_counts if count else ():
        machine = _machine_with_gpus(hardware, hardware.gpus[0], gpu_count)
        if _certainly_fits(lowest_memory_candidate(_request_on_machine(request, machine))):
            yield machine, f"{gpu_count} of these GPUs"
            break
    present_memory = max((gpu.total_bytes for gpu in hardware.gpus), default=0)
    # capability: the largest memory that is known to be too small for it
    too_small_memory: dict[object, int] = {}
    larger_gpus = [entry for entry in suggested_gpus() if entry.memory_bytes > present_memory]
    for entry in larger_gpus:
        # a job's need depends only on a GPU's capability: one that is too small rules out all that are not larger
        if entry.memory_bytes <= too_small_memory.get(entry.capability, 0):
            continue
        machine = _machine_with_entry(hardware, entry, max(1, count))
        candidate = lowest_memory_candidate(_request_on_machine(request, machine))
        if _certainly_fits(candidate):
            yield machine, _hardware_name(machine).partition(",")[0]
            return
        too_small_memory[entry.capability] = max(entry.memory_bytes, candidate.memory.required - 1 if candidate else 0)
    for gpu_count in larger_counts if larger_gpus else ():
        machine = _machine_with_entry(hardware, larger_gpus[-1], gpu_count)
        if _certainly_fits(lowest_memory_candidate(_request_on_machine(request, machine))):
            yield machine, _hardware_name(machine).partition(",")[0]
            return


def _machines_with_more_ram(request: PlanRequest) -> Iterator[tuple[Hardware, str]]:
    hardware = request.hardware
    if not hardware.gpus or not hardware.ram_given:
        return
    machine = _machine_with_gpus(hardware, hardware.gpus[0], len(hardware.gpus))
    candidate = lowest_memory_candidate(_request_on_machine(request, replace(machine, ram_given=False)))
    if candidate is None or not candidate.fits or candidate.host_required <= hardware.ram_free_bytes:
        return
    ram_bytes = -(-candidate.host_required // RAM_STEP_BYTES) * RAM_STEP_BYTES
    yield (
        replace(machine, ram_bytes=ram_bytes, ram_free_bytes=ram_bytes),
        f"{ram_bytes / GIB:.0f} GiB of RAM on each node",
    )


def _machine_with_entry(hardware: Hardware, entry: CatalogEntry, count: int) -> Hardware:
    named_machine = parse_hardware(f"1x{entry.name}")
    return replace(
        _machine_with_gpus(hardware, named_machine.gpus[0], count), link_bytes_per_s=named_machine.link_bytes_per_s
    )


def _certainly_fits(candidate: Candidate | None) -> bool:
    """Whether it certainly fits: unknown RAM does not count."""
    return candidate is not None and candidate.fits and not candidate.needs_unknown_ram


def _machine_with_gpus(hardware: Hardware, gpu: Gpu, count: int) -> Hardware:
    """The same machine with that many GPUs of one kind, on more nodes where its own have no room for eight or more."""
    # free_bytes None: what other processes hold on the present GPUs is not held there
    gpus = tuple(replace(gpu, index=index, free_bytes=None) for index in range(count))
    nodes = hardware.nodes if count == len(hardware.gpus) else -(-count // max(GPUS_PER_NODE, hardware.ranks_per_node))
    has_given_ram = hardware.ram_given and bool(hardware.gpus)
    return replace(hardware, gpus=gpus, nodes=nodes, named=True, ram_given=has_given_ram)


def _hardware_name(machine: Hardware) -> str:
    gpu = machine.gpus[0]
    name = gpu.name.removeprefix("NVIDIA ").removeprefix("AMD ").replace(" ", "")  # as HARDWARE= takes it
    entry = next(iter(find_catalog_entries(name)), None)
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    text = f"{nodes}{machine.ranks_per_node}x{name}"
    if entry is None or abs(entry.memory_bytes - gpu.total_bytes) > 0.05 * gpu.total_bytes:
        text += f",mem={gpu.total_bytes >> 20}MiB"
    return text + (f",ram={machine.ram_free_bytes >> 20}MiB" if machine.ram_given else "")
