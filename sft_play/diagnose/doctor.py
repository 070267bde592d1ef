"""`make doctor`: all checks in order: the machine, the plan of the config, the other nodes, and the all-reduce of all
ranks; and findings as lines.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from sft_play.answers import Answer
from sft_play.config.schema import RunConfig
from sft_play.diagnose import machine_checks, ranks
from sft_play.diagnose.machine_checks import SystemFacts, read_system_facts
from sft_play.errors import SftPlayError
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding
from sft_play.launch.refusals import require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import disable_broken_p2p
from sft_play.log import escape_control, one_line
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import NodeSetup
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.models.shape import ModelShape
from sft_play.planner.plan import Plan
from sft_play.text import join_unique, render_lines

# How long nodes wait for each other: time to start the command by hand on the next one.
NODE_MEETING_S = 30.0
# Limit of the all-reduce; importing torch from a cold disk takes most of it, NCCL's startup up to 10 s on many
# nodes.
ALL_REDUCE_LIMIT_S = 40.0


# --- findings as lines ------------------------------------------------------------------------------------------------


def format_findings(findings: Sequence[Finding], labels: Mapping[str, str]) -> list[str]:
    """Each finding's verdict (or its label), name and text; below the text what to do, and the threads that it rests
    on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for min_width in (0, 18, 0):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=min_width)
    for finding in findings:
        remedy = [f"do: {finding.remedy}"] if finding.remedy else []
        text = "\n".join([finding.found, *remedy, *(f"see {source}" for source in finding.sources)])
        rows.add_row(labels.get(finding.verdict, finding.verdict), escape_control(finding.name), escape_control(text))
    return render_lines(rows, width=None)


@dataclass(frozen=True)
class FindingsReport(Answer):
    """All findings of one look, in the order of the page, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing FAILs; warnings do not count."""
        return not self.names_by_verdict("FAIL")

    def names_by_verdict(self, verdict: str) -> list[str]:
        """The names of the findings of one verdict."""
        return [finding.name for finding in self.findings if finding.verdict == verdict]


class DoctorReport(FindingsReport):
    """All findings of one look at this machine."""

    def lines(self) -> list[str]:
        """The table, and the verdict."""
        failed_names = self.names_by_verdict("FAIL")
        header = "Nothing FAILs: " if self.ok else f"{len(failed_names)} FAIL: {join_unique(failed_names)}; "
        counts = ", ".join(f"{len(self.names_by_verdict(verdict))} {verdict}" for verdict in ("PASS", "WARN", "SKIP"))
        return [*format_findings(self.findings, {}), f"{header}{counts} ({self.elapsed_s:.0f} s)"]


# --- the checks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """The run that the doctor checks: its config, the model's shapes, and its plan on this machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


def run_doctor(
    planner: Callable[[Hardware], PlannedRun],
    options: LaunchOptions,
    *,
    environment: Mapping[str, str] = os.environ,
    uses_cpu: bool = False,
    meeting_s: float = NODE_MEETING_S,
) -> DoctorReport:
    """Check everything that can stop or spoil a run of `planner`'s config, launched by `options`; nothing is written,
    and a check that cannot be made is a finding. `uses_cpu`: the run asks for the CPU."""
    start_time_s = time.monotonic()
    machine = detect_hardware(environment)
    if uses_cpu:  # the run must not fail a check for the state of GPUs that it leaves alone
        machine = machine.without_gpus()
    local_machine, all_nodes, gpu_finding = _select_gpus(machine, options)
    planned_run, plan_finding = _plan_run(planner, all_nodes, gpu_finding)
    facts = read_system_facts(local_machine)
    findings = [
        machine_checks.check_packages(facts.versions, facts.requirements),
        gpu_finding,
        *machine_checks.check_torch_build(facts),
        *machine_checks.find_known_bad(
            facts,
            rank_count=local_machine.ranks * options.nodes.count,
            node_count=options.nodes.count,
            layout=planned_run.plan.layout if planned_run else str(options.strategy or ""),
            packages=planned_run.shape.kernel_packages if planned_run else (),
        ),
        machine_checks.check_shared_memory(facts.shared_memory, gpus_per_node=len(local_machine.gpus)),
        plan_finding,
    ]
    if planned_run is not None:
        config, shape = planned_run.config, planned_run.shape
        findings.append(check_run_starts(config, machine, environment, params=shape.params))
        findings += machine_checks.disk_findings(config, shape, planned_run.plan, options)
    findings += _multi_rank_findings(facts, options, gpu_finding, environment, meeting_s=meeting_s)
    return DoctorReport(tuple(findings), time.monotonic() - start_time_s)


def _select_gpus(machine: Hardware, options: LaunchOptions) -> tuple[Hardware, Hardware, Finding]:
    """The machine as this node's ranks use it, the same with all nodes, and the finding on its GPUs."""
    try:
        local_machine = options.select_hardware(machine, is_one_node=True)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return machine, machine, fail_finding("GPUs", message, remedy or "GPUS= and NPROC= name GPUs that there are")
    finding = skip_finding("GPUs", f"none found; {local_machine.ranks} CPU ranks are used instead")
    if local_machine.gpus:
        finding = pass_finding("GPUs", f"{len(local_machine.gpus)} x {local_machine.gpus[0].name}")
    return local_machine, options.select_hardware(machine), finding


def _plan_run(
    planner: Callable[[Hardware], PlannedRun], machine: Hardware, gpu_finding: Finding
) -> tuple[PlannedRun | None, Finding]:
    if gpu_finding.verdict == "FAIL":
        return None, skip_finding("plan", "planning needs identical GPUs that exist; see above")
    try:
        planned_run = planner(machine)
    except SftPlayError as error:
        return None, fail_finding("plan", one_line(str(error), limit=600), "fix it; make plan says more")
    plan = planned_run.plan
    choice = f"{plan.layout} on {machine.ranks} rank{'s' * (machine.ranks > 1)}: {plan.choice.verdict}"
    if plan.fits:
        return planned_run, pass_finding("plan", choice)
    return planned_run, fail_finding("plan", f"nothing fits; the closest: {choice}", "make plan lists suggestions")


def check_run_starts(config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int) -> Finding:
    """Check what a run on this machine is refused for before anything loads: an accelerator that it would not use, a
    model too large for a CPU, no compiler for its kernels."""
    try:
        require_usable_hardware(config, machine, environment, count_params=lambda: params)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return fail_finding("machine", message, remedy or "see docs/setup.md")
    return pass_finding("machine", "a run would start: its device, compiler and kernels are here")


def _multi_rank_findings(
    system_facts: SystemFacts,
    options: LaunchOptions,
    gpu_finding: Finding,
    environment: Mapping[str, str],
    *,
    meeting_s: float,
) -> list[Finding]:
    if "torch" not in system_facts.versions:
        return [skip_finding(ranks.ALL_REDUCE_NAME, "torch is not installed")]
    findings, rank_environment = list[Finding](), dict(environment)
    if options.nodes.count > 1:
        variables, finding = check_node_meeting(system_facts, options.nodes, environment, limit_s=meeting_s)
        findings.append(finding)
        if variables is None:  # ranks would wait for the missing node until their own limit
            return [*findings, skip_finding(ranks.ALL_REDUCE_NAME, "the nodes did not meet")]
        rank_environment |= variables
    if gpu_finding.verdict == "FAIL":
        return [*findings, skip_finding(ranks.ALL_REDUCE_NAME, "not over other GPUs than were asked for; see above")]
    disable_broken_p2p(system_facts.hardware, rank_environment)  # as a run's ranks communicate
    outcome = ranks.run_all_reduce(
        system_facts.hardware, options, limit_s=ALL_REDUCE_LIMIT_S, environment=rank_environment
    )
    return [*findings, ranks.judge_all_reduce(outcome, system_facts, options.nodes)]


def check_node_meeting(
    system_facts: SystemFacts, nodes: NodeSetup, environment: Mapping[str, str], *, limit_s: float
) -> tuple[Mapping[str, str] | None, Finding]:
    """Let all nodes meet before a rank is started: the variables that the ranks need to find each other (None: they did
    not meet), and the finding, with the nodes that are missing and what differs."""
    from sft_play.launch.nodes import meet_nodes

    versions = {
        f"version of {name}": version
        for name, version in sorted(system_facts.versions.items())
        if name in COMPUTE_PACKAGES or name.startswith("nvidia-nccl")
    }
    card = {
        "host": system_facts.hostname,
        "alike": {
            "command": "doctor",
            "version of Python": system_facts.python,
            **versions,
            "CUDA of torch": system_facts.torch_cuda or "none",
            "driver": system_facts.driver or "none",
            "GPUs": ", ".join(gpu.name for gpu in system_facts.hardware.gpus) or "none",
            "number of ranks": system_facts.hardware.ranks,
        },
    }
    try:
        meeting = meet_nodes(nodes, card, timeout_s=limit_s)
    except SftPlayError as error:
        # The doctor's time limit is fixed: distributed.timeout_s does not change it.
        message = str(error).replace(" (distributed.timeout_s)", "").replace("distributed.timeout_s; ", "")
        remedy = "fix it there, then start make doctor on all nodes within half a minute"
        return None, fail_finding("nodes", one_line(message, limit=800), remedy)
    return meeting.gloo_variables(environment), pass_finding(
        "nodes", f"{nodes.count} met, with the same packages, driver, GPUs and number of ranks"
    )
