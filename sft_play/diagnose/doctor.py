"""All checks in order: the machine, the plan of the config, the other nodes, and the all-reduce of all ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sft_play.config.schema import RunConfig
from sft_play.diagnose import machine_checks, ranks, this_machine
from sft_play.diagnose.machine_checks import disk_findings
from sft_play.diagnose.pages import DoctorReport
from sft_play.diagnose.this_machine import SystemFacts
from sft_play.errors import SftPlayError
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding
from sft_play.launch.refusals import require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import disable_broken_p2p
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import NodeSetup
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.models.shape import ModelShape
from sft_play.planner.plan import Plan
from sft_play.text import join_unique

# How long nodes wait for each other: time to start the command by hand on the next one.
NODE_MEETING_S = 30.0
# Limit of the all-reduce; importing torch from a cold disk takes most of it, NCCL's startup up to 10 s on many
# nodes.
MAX_ALL_REDUCE_S = 40.0
# Limit of the whole examination: nodes that meet late have the rest for the all-reduce, at least `MIN_ALL_REDUCE_S`.
TOTAL_LIMIT_S = 58.0
MIN_ALL_REDUCE_S = 25.0


@dataclass(frozen=True)
class PlannedRun:
    """The run that the doctor checks: its config, the model's shapes, and its plan on this machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


RunPlanner = Callable[[Hardware], PlannedRun]


def run_doctor(
    planner: RunPlanner,
    options: LaunchOptions,
    *,
    environment: Mapping[str, str] | None = None,
    uses_cpu: bool = False,
    meeting_s: float = NODE_MEETING_S,
) -> DoctorReport:
    """Check everything that can stop or spoil a run of `planner`'s config, launched by `options`; nothing is written,
    and a check that cannot be made is a finding. `uses_cpu`: the run asks for the CPU."""
    start_time_s = time.monotonic()
    environment = os.environ if environment is None else environment
    # a run that asks for the CPU must not fail a check for the state of GPUs that it leaves alone
    machine = detect_hardware(environment).without_gpus() if uses_cpu else detect_hardware(environment)
    local_machine, all_nodes, gpu_finding = _select_gpus(machine, options)
    planned_run, plan_findings = _plan_run(planner, all_nodes, gpu_finding)
    system_facts = this_machine.read_system_facts(local_machine, environment)
    findings = [
        *_machine_findings(system_facts, options, planned_run, gpu_finding),
        *plan_findings,
        *(
            [check_run_starts(planned_run.config, machine, environment, params=planned_run.shape.params)]
            if planned_run
            else ()
        ),
        *(disk_findings(planned_run.config, planned_run.shape, planned_run.plan, options) if planned_run else ()),
        *_multi_rank_findings(
            system_facts, options, gpu_finding, environment, meeting_s=meeting_s, start_time_s=start_time_s
        ),
    ]
    return DoctorReport(tuple(findings), time.monotonic() - start_time_s)


def _select_gpus(machine: Hardware, options: LaunchOptions) -> tuple[Hardware, Hardware, Finding]:
    try:
        local_machine = options.select_hardware(machine, is_one_node=True)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return machine, machine, fail_finding("GPUs", message, remedy or "GPUS= and NPROC= name GPUs that there are")
    all_nodes = options.select_hardware(machine)
    if not local_machine.gpus:
        return (
            local_machine,
            all_nodes,
            skip_finding("GPUs", f"none found; {local_machine.ranks} CPU ranks are used instead"),
        )
    return local_machine, all_nodes, pass_finding("GPUs", f"{len(local_machine.gpus)} x {local_machine.gpus[0].name}")


def _plan_run(planner: RunPlanner, machine: Hardware, gpu_finding: Finding) -> tuple[PlannedRun | None, list[Finding]]:
    if gpu_finding.verdict == "FAIL":
        return None, [skip_finding("plan", "planning needs identical GPUs that exist; see above")]
    try:
        planned_run = planner(machine)
    except SftPlayError as error:
        return None, [fail_finding("plan", one_line(str(error), limit=600), "fix it; make plan says more")]
    plan, ranks = planned_run.plan, f"{machine.ranks} rank{'s' if machine.ranks > 1 else ''}"
    choice = f"{plan.layout} on {ranks}: {plan.choice.verdict}"
    nothing_fits = fail_finding("plan", f"nothing fits; the closest: {choice}", "make plan lists suggestions")
    return planned_run, [pass_finding("plan", choice) if plan.fits else nothing_fits]


def _machine_findings(
    system_facts: SystemFacts, options: LaunchOptions, planned_run: PlannedRun | None, gpu_finding: Finding
) -> list[Finding]:
    machine, nodes = system_facts.hardware, options.nodes.count
    layout = planned_run.plan.layout if planned_run else str(options.strategy or "")
    return [
        machine_checks.check_packages(system_facts.versions, system_facts.requirements),
        gpu_finding,
        *check_torch_build(system_facts),
        *machine_checks.find_known_bad(
            system_facts,
            rank_count=machine.ranks * nodes,
            node_count=nodes,
            layout=layout,
            packages=planned_run.shape.kernel_packages if planned_run else (),
        ),
        machine_checks.check_shared_memory(system_facts.shared_memory, gpus_per_node=len(machine.gpus)),
    ]


def check_run_starts(config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int) -> Finding:
    """Check what a run on this machine is refused for before anything loads: an accelerator that it would not use, a
    model too large for a CPU, no compiler for its kernels."""
    try:
        require_usable_hardware(config, machine, environment, count_params=lambda: params)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return fail_finding("machine", message, remedy or "see docs/setup.md")
    return pass_finding("machine", "a run would start: its device, compiler and kernels are here")


def check_torch_build(system_facts: SystemFacts) -> list[Finding]:
    """Check what torch is built for against the newest CUDA that the driver runs, if there are GPUs."""
    torch_version = system_facts.versions.get("torch")
    if torch_version is None or not system_facts.hardware.gpus:
        return []
    if system_facts.torch_cuda is None:
        return [fail_finding("driver", f"torch {torch_version} is a build without CUDA, but there are GPUs",
                       "install torch's CUDA build: make setup (with VENV=: torch from PyPI)")]  # fmt: skip
    build_text = f"torch {torch_version} is built for CUDA {system_facts.torch_cuda}"
    if system_facts.driver is None or system_facts.driver_cuda is None:
        return [skip_finding("driver", f"NVML does not answer; {build_text}")]
    newest_cuda = ".".join(map(str, system_facts.driver_cuda))
    return [pass_finding("driver", f"{system_facts.driver} (CUDA {newest_cuda} and older); {build_text}")]


def _multi_rank_findings(
    system_facts: SystemFacts,
    options: LaunchOptions,
    gpu_finding: Finding,
    environment: Mapping[str, str],
    *,
    meeting_s: float,
    start_time_s: float,
) -> list[Finding]:
    findings: list[Finding] = []
    rank_environment = dict(environment)
    if options.nodes.count > 1 and "torch" in system_facts.versions:
        variables, finding = check_node_meeting(system_facts, options.nodes, environment, limit_s=meeting_s)
        findings.append(finding)
        if variables is None:  # ranks would wait for the missing node until their own limit
            return [*findings, skip_finding(ranks.ALL_REDUCE_NAME, "the nodes did not meet")]
        rank_environment |= variables
    if gpu_finding.verdict == "FAIL":
        return [*findings, skip_finding(ranks.ALL_REDUCE_NAME, "not over other GPUs than were asked for; see above")]
    if "torch" not in system_facts.versions:
        return [*findings, skip_finding(ranks.ALL_REDUCE_NAME, "torch is not installed")]
    disable_broken_p2p(system_facts.hardware, rank_environment)  # as a run's ranks communicate
    # nodes that met after half a minute leave less of the whole
    limit_s = min(MAX_ALL_REDUCE_S, max(MIN_ALL_REDUCE_S, TOTAL_LIMIT_S - (time.monotonic() - start_time_s)))
    outcome = ranks.run_all_reduce(system_facts.hardware, options, limit_s=limit_s, environment=rank_environment)
    return [*findings, *ranks.judge_all_reduce(outcome, system_facts, options.nodes)]


def check_node_meeting(
    system_facts: SystemFacts, nodes: NodeSetup, environment: Mapping[str, str], *, limit_s: float
) -> tuple[Mapping[str, str] | None, Finding]:
    """Let all nodes meet before a rank is started: the variables that the ranks need to find each other (None: they did
    not meet), and the finding, with the nodes that are missing and what differs."""
    from sft_play.launch.nodes import meet_nodes

    try:
        meeting = meet_nodes(nodes, node_description(system_facts), timeout_s=limit_s)
    except SftPlayError as error:
        # The doctor's time limit is fixed: distributed.timeout_s does not change it.
        message = str(error).replace(" (distributed.timeout_s)", "").replace("distributed.timeout_s; ", "")
        remedy = "fix it there, then start make doctor on all nodes within half a minute"
        return None, fail_finding("nodes", one_line(message, limit=800), remedy)
    hosts = join_unique(one_line(str(card.get("host"))) for card in meeting.cards)
    address = f"{one_line(str(nodes.address))}:{nodes.port}"
    compared_facts = "the same packages, driver, GPUs and number of ranks"
    return meeting.gloo_variables(environment), pass_finding(
        "nodes", f"{nodes.count} met at {address} ({hosts}), with {compared_facts}"
    )


def node_description(system_facts: SystemFacts) -> Mapping[str, object]:
    """The description of this node, which the others compare with theirs."""
    package_names = [
        name for name in system_facts.versions if name in COMPUTE_PACKAGES or name.startswith("nvidia-nccl")
    ]
    return {
        "host": system_facts.hostname,
        "alike": {
            "command": "doctor",
            "version of Python": system_facts.python,
            **{f"version of {name}": system_facts.versions[name] for name in sorted(package_names)},
            "CUDA of torch": system_facts.torch_cuda or "none",
            "driver": system_facts.driver or "none",
            "GPUs": ", ".join(gpu.name for gpu in system_facts.hardware.gpus) or "none",
            "number of ranks": system_facts.hardware.ranks,
        },
    }
