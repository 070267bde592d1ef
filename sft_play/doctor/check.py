"""All checks in their order: the machine, the plan of the config, the other nodes, and the all-reduce of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.doctor import disk, gpus, host, known_bad, meeting, packages, ranks, surroundings
from sft_play.doctor.finding import Finding, Report, failed, passed, skipped
from sft_play.doctor.surroundings import DISTRIBUTION, Surroundings
from sft_play.errors import SftPlayError
from sft_play.facts.architecture import local_folder
from sft_play.facts.hardware import Hardware, detect
from sft_play.facts.model_shape import ModelShape
from sft_play.launch.spread import Spread
from sft_play.log import one_line
from sft_play.plan.plan import Plan
from sft_play.runs import output_dir
from sft_play.starter.names import BASE_NAME

MEETING_S = 30.0
"""How long nodes wait for each other: time to start the command on the next one by hand."""
ALL_REDUCE_S = 40.0
"""Limit of the all-reduce; importing torch from a cold disk takes most of it, NCCL's start up to 10 s on many nodes."""
_BITSANDBYTES_OPTIMIZERS = ("paged_adamw_8bit",)
_MUST_AGREE = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "nvidia-nccl")
"""Packages that compute on every rank."""


@dataclass(frozen=True)
class Planned:
    """The run that the doctor is asked about: its config, the model's shapes, and its plan on this machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


Planner = Callable[[Hardware], Planned]
"""Plans the run on the machine that it is given; what it raises of the project's own errors is a finding."""


def examine(
    planner: Planner,
    spread: Spread,
    *,
    environment: Mapping[str, str] | None = None,
    meeting_s: float = MEETING_S,
    all_reduce_s: float = ALL_REDUCE_S,
) -> Report:
    """Look at everything that can stop or spoil a run of `planner`'s config, spread like `spread`; nothing is written.

    Nothing of this is raised: what a check cannot do is its finding.
    """
    started = time.monotonic()
    environment = os.environ if environment is None else environment
    whole = detect(environment)
    machine, chosen = gpus.choose(whole, spread)
    planned, said = _plan(planner, gpus.over_nodes(machine, spread.nodes.count), chosen)
    around = surroundings.look(machine, environment)
    findings = [
        *_machine_findings(around, spread, planned, chosen),
        *said,
        *(_disk_findings(planned, spread, environment) if planned else ()),
        *_together(around, spread, chosen, environment, meeting_s=meeting_s, all_reduce_s=all_reduce_s),
    ]
    return Report(tuple(findings), time.monotonic() - started)


def _plan(planner: Planner, machine: Hardware, chosen: Finding) -> tuple[Planned | None, list[Finding]]:
    """The plan, and whether there is one that fits."""
    if chosen.verdict == "FAIL":
        return None, [skipped("plan", "made for GPUs that are equal and there; see above")]
    try:
        planned = planner(machine)
    except SftPlayError as error:
        return None, [failed("plan", one_line(str(error), limit=600), "mend it; make plan says more")]
    plan = planned.plan
    said = (
        f"{plan.layout} on {machine.ranks} rank{'s' if machine.ranks > 1 else ''}, "
        f"{plan.memory.required / disk.GIB:.1f} of {plan.budget_bytes / disk.GIB:.1f} GiB each"
    )
    if plan.fits:
        return planned, [passed("plan", said)]
    return planned, [failed("plan", f"nothing fits; the thriftiest: {said}", "make plan lists the ways out")]


def _machine_findings(around: Surroundings, spread: Spread, planned: Planned | None, chosen: Finding) -> list[Finding]:
    """What the machine alone says: packages, GPUs, limits, known bad pairs."""
    machine, nodes = around.hardware, spread.nodes.count
    config, plan = (planned.config, planned.plan) if planned else (None, None)
    workers = config.train.dataloader_num_workers if config else 0
    here = machine.ranks
    quantised = config is not None and (config.tuning.mode == "qlora" or config.train.optim in _BITSANDBYTES_OPTIMIZERS)
    layout = plan.layout if plan else str(spread.strategy or "")
    optional = frozenset(
        name
        for name, used in (
            ("bitsandbytes", quantised or config is None),
            ("deepspeed", layout.startswith("zero") or spread.deepspeed is not None),
        )
        if not used
    )
    pairs = known_bad.Pairs(
        versions=around.versions,
        kernel=around.kernel if around.system == "Linux" else "",
        machine=around.machine,
        driver=around.driver,
        driver_cuda=around.driver_cuda,
        torch_cuda=around.torch_cuda,
        nccl=around.nccl,
        gpu_names=tuple(gpu.name for gpu in machine.gpus),
        capabilities=tuple(gpu.capability for gpu in machine.gpus if gpu.capability),
        bitsandbytes_cuda=around.bitsandbytes_cuda,
        ranks=here * nodes,
        nodes=nodes,
        layout=layout,
        quantised=quantised,
        environment=around.environment,
    )
    return [
        packages.check_python(around.python, around.python_wanted),
        *packages.check_packages(around.versions, around.requirements, own=DISTRIBUTION, optional=optional),
        chosen,
        *_build(around),
        *gpus.check_health(around.gpus, gpus=len(machine.gpus)),
        *gpus.check_peer_path(around.gpus),
        *known_bad.find_known_bad(pairs),
        host.check_shared_memory(
            around.shm,
            gpus_per_node=len(machine.gpus),
            ranks_per_node=here,
            workers=workers,
            batch_tokens=plan.batch.micro_batch * plan.max_seq_len if plan else 0,
        ),
        host.check_locked_memory(
            around.locked_memory, infiniband=around.infiniband_bytes_per_s > 0 and bool(machine.gpus), nodes=nodes
        ),
        host.check_open_files(around.open_files, workers=workers),
    ]


def _build(around: Surroundings) -> list[Finding]:
    """Which CUDA torch is built for, beside the newest that the driver runs."""
    if "torch" not in around.versions:
        return []
    torch = around.versions["torch"]
    if not around.hardware.gpus:
        return [skipped("driver", f"no GPU; torch {torch} is {_for_cuda(around.torch_cuda)}")]
    if around.torch_cuda is None:
        return [failed("driver", f"torch {torch} is a build for the CPU alone, and there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    if around.driver is None or around.driver_cuda is None:
        return [skipped("driver", f"NVML does not answer; torch {torch} is {_for_cuda(around.torch_cuda)}")]
    newest = ".".join(map(str, around.driver_cuda))
    return [
        passed("driver", f"{around.driver} (CUDA {newest} and older); torch {torch} is {_for_cuda(around.torch_cuda)}")
    ]


def _for_cuda(cuda: str | None) -> str:
    return f"built for CUDA {cuda}" if cuda else "a build for the CPU alone"


def _disk_findings(planned: Planned, spread: Spread, environment: Mapping[str, str]) -> list[Finding]:
    config, layout = planned.config, planned.plan.choice.layout
    found = []
    if spread.nodes.rank > 0 and not layout.is_zero:
        found.append(skipped("disk", "checkpoints and the final weights are written on node 0"))
    else:
        try:
            folder = output_dir(config.output)
        except SftPlayError as error:
            found.append(failed("disk", one_line(str(error), limit=300), "set output.dir to a folder"))
        else:
            there, space = surroundings.free_at(folder)
            written = disk.written_by(config, planned.shape, planned.plan)
            found.append(
                disk.check_disk(
                    written, folder=folder, there=there, space=space, may_write=surroundings.writable(there)
                )
            )
    there, space = surroundings.free_at(surroundings.hub_cache(environment))
    here = _is_here(config, environment)
    return [*found, disk.check_fetch(planned.shape, cached=here, there=there, space=space)]


def _is_here(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether the model's weights need not be fetched."""
    name = config.model.name
    if name == BASE_NAME or local_folder(name) is not None:
        return True
    kept: Path = surroundings.hub_cache(environment) / f"models--{name.replace('/', '--')}" / "snapshots"
    return any(kept.glob("*/*.safetensors"))


def _together(
    around: Surroundings,
    spread: Spread,
    chosen: Finding,
    environment: Mapping[str, str],
    *,
    meeting_s: float,
    all_reduce_s: float,
) -> list[Finding]:
    """What only all nodes and ranks together can say."""
    found: list[Finding] = []
    if spread.nodes.count > 1:
        met = meeting.meet(spread.nodes, _card(around), limit_s=meeting_s)
        found += met.findings
        if not met.cards:
            return [*found, skipped(ranks.NAME, "the nodes have not met")]
        alike = packages.check_alike(met.cards)
        found.append(alike)
        counts = {card.get("ranks per node") for card in met.cards}
        if len(counts) > 1:
            return [*found, skipped(ranks.NAME, "the nodes have different numbers of ranks")]
    if chosen.verdict == "FAIL" and not around.hardware.gpus:
        return [*found, skipped(ranks.NAME, "GPUs were asked for, and there are none")]
    if "torch" not in around.versions:
        return [*found, skipped(ranks.NAME, "torch is not installed")]
    outcome = ranks.run_ranks(around.hardware, spread, limit_s=all_reduce_s, environment=environment)
    return [*found, *ranks.judge(outcome, around, spread.nodes)]


def _card(around: Surroundings) -> meeting.Card:
    """What this node tells the others of itself."""
    names = [name for name in around.versions if name in _MUST_AGREE or name.startswith("nvidia-nccl")]
    return {
        "host": around.host,
        "versions": {"Python": around.python, **{name: around.versions[name] for name in sorted(names)}},
        "driver": around.driver,
        "GPUs": ", ".join(gpu.name for gpu in around.hardware.gpus) or "none",
        "ranks per node": around.hardware.ranks,
    }
