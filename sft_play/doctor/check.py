"""All checks in their order: the machine, the plan of the config, the other nodes, and the all-reduce of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.schema import RunConfig
from sft_play.doctor import device, disk, gpus, host, known_bad, packages, ranks, surroundings
from sft_play.doctor.finding import Finding, Report, failed, listed, passed, skipped
from sft_play.doctor.surroundings import DISTRIBUTION, Surroundings
from sft_play.errors import SftPlayError
from sft_play.facts.architecture import local_folder
from sft_play.facts.hardware import Hardware, detect
from sft_play.facts.model_shape import ModelShape
from sft_play.facts.space import free_at
from sft_play.launch import meeting
from sft_play.launch.command import Nodes
from sft_play.launch.spread import Spread
from sft_play.log import one_line
from sft_play.plan.plan import Plan
from sft_play.runs import output_dir
from sft_play.starter.names import BASE_NAME

MEETING_S = 30.0
"""How long nodes wait for each other: time to start the command on the next one by hand."""
ALL_REDUCE_S = 40.0
"""Limit of the all-reduce; importing torch from a cold disk takes most of it, NCCL's start up to 10 s on many nodes."""
WHOLE_S = 58.0
"""All of it together: nodes that met late have the rest for the all-reduce, and `LEAST_S` at any rate."""
LEAST_S = 25.0
_BITSANDBYTES_OPTIMIZERS = ("paged_adamw_8bit",)
_MUST_AGREE = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")
"""Packages that compute on every rank; NCCL's own is one beside them."""


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
    on_cpu: bool = False,
    meeting_s: float = MEETING_S,
    all_reduce_s: float = ALL_REDUCE_S,
) -> Report:
    """Look at everything that can stop or spoil a run of `planner`'s config, spread like `spread`; nothing is written.

    `on_cpu`: the run asks for the CPU. Nothing of this is raised: what a check cannot do is its finding.
    """
    started = time.monotonic()
    environment = os.environ if environment is None else environment
    whole = detect(environment).without_gpus() if on_cpu else detect(environment)
    machine, chosen = gpus.choose(whole, spread)
    planned, said = _plan(planner, gpus.over_nodes(machine, spread.nodes.count), chosen)
    around = surroundings.look(machine, environment)
    findings = [
        *_machine_findings(around, spread, planned, chosen, on_cpu=on_cpu),
        *said,
        *(disk_findings(planned, spread, environment) if planned else ()),
        *_together(
            around,
            spread,
            chosen,
            environment,
            meeting_s=meeting_s,
            all_reduce_s=lambda: min(all_reduce_s, max(LEAST_S, WHOLE_S - (time.monotonic() - started))),
        ),
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
    said = f"{plan.layout} on {machine.ranks} rank{'s' if machine.ranks > 1 else ''}: {plan.choice.verdict}"
    if plan.fits:
        return planned, [passed("plan", said)]
    return planned, [failed("plan", f"nothing fits; the nearest: {said}", "make plan lists the ways out")]


def _machine_findings(
    around: Surroundings, spread: Spread, planned: Planned | None, chosen: Finding, *, on_cpu: bool
) -> list[Finding]:
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
        torch_hip=around.torch_hip,
        nccl=around.nccl,
        gpu_names=tuple(gpu.name for gpu in machine.gpus),
        capabilities=tuple(gpu.capability for gpu in machine.gpus if gpu.capability and not gpu.is_amd),
        bitsandbytes_cuda=around.bitsandbytes_cuda,
        bitsandbytes_rocm=around.bitsandbytes_rocm,
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
        *device.check_unseen(around, planned.shape.params if planned else 0, on_cpu=on_cpu),
        *device.check_build(around),
        *device.check_compiler(around),
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


def disk_findings(planned: Planned, spread: Spread, environment: Mapping[str, str]) -> list[Finding]:
    """Whether the weights to fetch and the checkpoints fit their disks."""
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
            there, space = free_at(folder)
            written = disk.written_by(config, planned.shape, planned.plan)
            found.append(
                disk.check_disk(
                    written, folder=folder, there=there, space=space, may_write=surroundings.writable(there)
                )
            )
    there, space = free_at(surroundings.hub_cache(environment))
    here = is_here(config, environment)
    return [*found, disk.check_fetch(planned.shape, cached=here, there=there, space=space)]


def is_here(config: RunConfig, environment: Mapping[str, str]) -> bool:
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
    all_reduce_s: Callable[[], float],
) -> list[Finding]:
    """What only all nodes and ranks together can say."""
    found: list[Finding] = []
    variables: Mapping[str, str] = {}
    if spread.nodes.count > 1:
        met, said = meet_nodes(around, spread.nodes, limit_s=meeting_s)
        found.append(said)
        if met is None:
            return [*found, skipped(ranks.NAME, "the nodes have not met")]
        variables = met.variables(environment)
    if chosen.verdict == "FAIL" and not around.hardware.gpus:
        return [*found, skipped(ranks.NAME, "GPUs were asked for, and there are none")]
    if "torch" not in around.versions:
        return [*found, skipped(ranks.NAME, "torch is not installed")]
    outcome = ranks.run_ranks(around.hardware, spread, limit_s=all_reduce_s(), environment={**environment, **variables})
    return [*found, *ranks.judge(outcome, around, spread.nodes)]


def meet_nodes(around: Surroundings, nodes: Nodes, *, limit_s: float) -> tuple[meeting.Met | None, Finding]:
    """The meeting of all nodes before a rank is started: who did not come, and what is not alike on them."""
    try:
        met = meeting.meet(nodes, card_of(around), limit_s=limit_s)
    except SftPlayError as error:
        words = (
            str(error).replace(" (distributed.timeout_s)", "").replace("distributed.timeout_s; ", "")
        )  # ours is fixed
        return None, failed("nodes", one_line(words, limit=800),
                            "mend it there, then start make doctor on all nodes within half a minute")  # fmt: skip
    hosts = listed(one_line(str(card.get("host"))) for card in met.cards)
    place = f"{one_line(str(nodes.address))}:{nodes.port}"
    same = "the same packages, driver, GPUs and number of ranks"
    return met, passed("nodes", f"{nodes.count} met at {place} ({hosts}), with {same}")


def card_of(around: Surroundings) -> meeting.Card:
    """What this node tells the others of itself."""
    names = [name for name in around.versions if name in _MUST_AGREE or name.startswith("nvidia-nccl")]
    return {
        "host": around.host,
        "alike": {
            "command": "doctor",
            "version of Python": around.python,
            **{f"version of {name}": around.versions[name] for name in sorted(names)},
            "CUDA of torch": around.torch_cuda or "none",
            "driver": around.driver or "none",
            "GPUs": ", ".join(gpu.name for gpu in around.hardware.gpus) or "none",
            "number of ranks": around.hardware.ranks,
        },
    }
