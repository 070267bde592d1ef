"""All checks in order: the machine, the plan of the config, the other nodes, and the all-reduce of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from sft_play.config.schema import RunConfig
from sft_play.diagnose import known_bad, ranks, surroundings, system
from sft_play.diagnose.disk import disk_findings
from sft_play.diagnose.pages import DoctorReport, each_once
from sft_play.diagnose.surroundings import Surroundings
from sft_play.errors import SftPlayError
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.facts.installed import COMPUTE_PACKAGES
from sft_play.facts.models.model_shape import ModelShape
from sft_play.facts.network import NodeSetup
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.machine import select_hardware, require_usable_hardware, disable_broken_p2p
from sft_play.log import one_line
from sft_play.planner.plan import Plan

# How long nodes wait for each other: time to start the command by hand on the next one.
MEETING_S = 30.0
# Limit of the all-reduce; importing torch from a cold disk takes most of it, NCCL's startup up to 10 s on many
# nodes.
ALL_REDUCE_S = 40.0
# Limit of the whole examination: nodes that meet late have the rest for the all-reduce, at least `LEAST_S`.
WHOLE_S = 58.0
LEAST_S = 25.0


@dataclass(frozen=True)
class Planned:
    """The run that the doctor checks: its config, the model's shapes, and its plan on this machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


Planner = Callable[[Hardware], Planned]


def examine(
    planner: Planner,
    options: LaunchOptions,
    *,
    environment: Mapping[str, str] | None = None,
    on_cpu: bool = False,
    meeting_s: float = MEETING_S,
) -> DoctorReport:
    """Check everything that can stop or spoil a run of `planner`'s config, launched by `options`; nothing is written,
    and a check that cannot be made is a finding. `was_measured_on_cpu`: the run asks for the CPU."""
    started = time.monotonic()
    environment = os.environ if environment is None else environment
    # a run that asks for the CPU must not fail a check for the state of GPUs that it leaves alone
    whole = detect_hardware(environment).without_gpus() if on_cpu else detect_hardware(environment)
    here, everywhere, chosen = _choose(whole, options)
    planned, plan_findings = _plan(planner, everywhere, chosen)
    around = surroundings.read_surroundings(here, environment)
    findings = [
        *_machine_findings(around, options, planned, chosen),
        *plan_findings,
        *([check_start(planned.config, whole, environment, params=planned.shape.params)] if planned else ()),
        *(disk_findings(planned.config, planned.shape, planned.plan, options) if planned else ()),
        *_together(around, options, chosen, environment, meeting_s=meeting_s, started=started),
    ]
    return DoctorReport(tuple(findings), time.monotonic() - started)


def _choose(whole: Hardware, options: LaunchOptions) -> tuple[Hardware, Hardware, Finding]:
    try:
        here = select_hardware(replace(options, nodes=NodeSetup()), whole)
    except SftPlayError as error:
        found, _, remedy = str(error).partition("; ")
        return whole, whole, fail_finding("GPUs", found, remedy or "GPUS= and NPROC= name GPUs that there are")
    everywhere = select_hardware(options, whole)
    if not here.gpus:
        return here, everywhere, skip_finding("GPUs", f"none found; {here.ranks} CPU ranks are used instead")
    return here, everywhere, pass_finding("GPUs", f"{len(here.gpus)} x {here.gpus[0].name}")


def _plan(planner: Planner, machine: Hardware, chosen: Finding) -> tuple[Planned | None, list[Finding]]:
    if chosen.verdict == "FAIL":
        return None, [skip_finding("plan", "planning needs identical GPUs that exist; see above")]
    try:
        planned = planner(machine)
    except SftPlayError as error:
        return None, [fail_finding("plan", one_line(str(error), limit=600), "fix it; make plan says more")]
    plan, ranks_here = planned.plan, f"{machine.ranks} rank{'s' if machine.ranks > 1 else ''}"
    choice = f"{plan.layout} on {ranks_here}: {plan.choice.verdict}"
    nothing = fail_finding("plan", f"nothing fits; the closest: {choice}", "make plan lists suggestions")
    return planned, [pass_finding("plan", choice) if plan.fits else nothing]


def _machine_findings(
    around: Surroundings, options: LaunchOptions, planned: Planned | None, chosen: Finding
) -> list[Finding]:
    machine, nodes = around.hardware, options.nodes.count
    layout = planned.plan.layout if planned else str(options.strategy or "")
    return [
        system.check_packages(around.versions, around.requirements),
        chosen,
        *check_build(around),
        *known_bad.find_known_bad(
            around,
            ranks=machine.ranks * nodes,
            nodes=nodes,
            layout=layout,
            packages=planned.shape.kernel_packages if planned else (),
        ),
        system.check_shared_memory(around.shm, gpus_per_node=len(machine.gpus)),
    ]


def check_start(config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int) -> Finding:
    """What a run on this machine is refused for before anything loads: an accelerator that it would not use, a model
    too large for a CPU, no compiler for its kernels."""
    try:
        require_usable_hardware(config, machine, environment, count_params=lambda: params)
    except SftPlayError as error:
        found, _, remedy = str(error).partition("; ")
        return fail_finding("machine", found, remedy or "see docs/setup.md")
    return pass_finding("machine", "a run would start: its device, compiler and kernels are here")


def check_build(around: Surroundings) -> list[Finding]:
    """What torch is built for, and the newest CUDA that the driver runs, where there are GPUs."""
    torch = around.versions.get("torch")
    if torch is None or not around.hardware.gpus:
        return []
    if around.torch_cuda is None:
        return [fail_finding("driver", f"torch {torch} is a build without CUDA, but there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    built = f"torch {torch} is built for CUDA {around.torch_cuda}"
    if around.driver is None or around.driver_cuda is None:
        return [skip_finding("driver", f"NVML does not answer; {built}")]
    newest = ".".join(map(str, around.driver_cuda))
    return [pass_finding("driver", f"{around.driver} (CUDA {newest} and older); {built}")]


def _together(
    around: Surroundings,
    options: LaunchOptions,
    chosen: Finding,
    environment: Mapping[str, str],
    *,
    meeting_s: float,
    started: float,
) -> list[Finding]:
    findings: list[Finding] = []
    given = dict(environment)
    if options.nodes.count > 1 and "torch" in around.versions:
        variables, finding = meet_nodes(around, options.nodes, environment, limit_s=meeting_s)
        findings.append(finding)
        if variables is None:  # ranks would wait for the missing node until their own limit
            return [*findings, skip_finding(ranks.NAME, "the nodes did not meet")]
        given |= variables
    if chosen.verdict == "FAIL":
        return [*findings, skip_finding(ranks.NAME, "not over other GPUs than were asked for; see above")]
    if "torch" not in around.versions:
        return [*findings, skip_finding(ranks.NAME, "torch is not installed")]
    disable_broken_p2p(around.hardware, given)  # as a run's ranks communicate
    # nodes that met after half a minute leave less of the whole
    limit_s = min(ALL_REDUCE_S, max(LEAST_S, WHOLE_S - (time.monotonic() - started)))
    outcome = ranks.run_ranks(around.hardware, options, limit_s=limit_s, environment=given)
    return [*findings, *ranks.judge(outcome, around, options.nodes)]


def meet_nodes(
    around: Surroundings, nodes: NodeSetup, environment: Mapping[str, str], *, limit_s: float
) -> tuple[Mapping[str, str] | None, Finding]:
    """All nodes meet before a rank is started: the variables that the ranks need to find each other (None: they did not
    meet), and the finding, with the nodes that are missing and what differs."""
    from sft_play.training.ranks.node_meeting import meet_nodes

    try:
        met = meet_nodes(nodes, card_of(around), limit_s=limit_s)
    except SftPlayError as error:
        # The doctor's time limit is fixed: distributed.timeout_s does not change it.
        words = str(error).replace(" (distributed.timeout_s)", "").replace("distributed.timeout_s; ", "")
        remedy = "fix it there, then start make doctor on all nodes within half a minute"
        return None, fail_finding("nodes", one_line(words, limit=800), remedy)
    hosts = each_once(one_line(str(card.get("host"))) for card in met.cards)
    address = f"{one_line(str(nodes.address))}:{nodes.port}"
    same = "the same packages, driver, GPUs and number of ranks"
    return met.gloo_variables(environment), pass_finding("nodes", f"{nodes.count} met at {address} ({hosts}), with {same}")


def card_of(around: Surroundings) -> Mapping[str, object]:
    """This node's description, which the others compare with theirs."""
    names = [name for name in around.versions if name in COMPUTE_PACKAGES or name.startswith("nvidia-nccl")]
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
