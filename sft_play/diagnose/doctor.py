"""`make doctor`: all checks in order: the machine, the plan of the config, the other nodes, and the
all-reduce of all ranks; and findings as lines.
"""

import os
import platform
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from sft_play.answers import Answer, Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.schema import RunConfig
from sft_play.diagnose import machine_checks
from sft_play.diagnose.machine_checks import SystemFacts, read_system_facts
from sft_play.errors import SftPlayError
from sft_play.launch.refusals import require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import disable_broken_p2p
from sft_play.launch.torchrun import TORCHRUN_MODULE, torchrun_command
from sft_play.log import escape_control, one_line, redact
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.network import NodeSetup
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.models.shape import ModelShape
from sft_play.planner.plan import Plan
from sft_play.process.environment import LAUNCHER_VARIABLES
from sft_play.process.failures import format_ranks, kill_process_tree
from sft_play.process.signals import raise_interrupt, start_child, supervise
from sft_play.runs.files import read_json
from sft_play.text import join_unique, render_lines

# --- findings as lines ----------------------------------------------------------------------------


def format_findings(findings: Sequence[Finding], labels: Mapping[str, str]) -> list[str]:
    """Format findings as a table: the verdict (or its label), the name, and the text; below the
    text what to do, and the threads that it rests on."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    for min_width in (0, 18, 0):
        rows.add_column(no_wrap=True, overflow="ignore", min_width=min_width)
    for finding in findings:
        lines = [finding.found, *(f"see {source}" for source in finding.sources)]
        if finding.remedy:
            lines.insert(1, f"do: {finding.remedy}")
        label, text = labels.get(finding.verdict, finding.verdict), escape_control("\n".join(lines))
        rows.add_row(label, escape_control(finding.name), text)
    return render_lines(rows, width=None)


@dataclass(frozen=True)
class DoctorReport(Answer):
    """What the doctor found on this machine, in the order of the page, and how long it took."""

    findings: tuple[Finding, ...]
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing FAILs; warnings do not count."""
        return not self.names_by_verdict("FAIL")

    def names_by_verdict(self, verdict: str) -> list[str]:
        """The names of the findings of one verdict."""
        return [finding.name for finding in self.findings if finding.verdict == verdict]

    def lines(self) -> list[str]:
        header = "Nothing FAILs: "
        if failed_names := self.names_by_verdict("FAIL"):
            header = f"{len(failed_names)} FAIL: {join_unique(failed_names)}; "
        counts = ", ".join(
            f"{len(self.names_by_verdict(verdict))} {verdict}"
            for verdict in ("PASS", "WARN", "SKIP")
        )
        return [*format_findings(self.findings, {}), f"{header}{counts} ({self.elapsed_s:.0f} s)"]


# --- the checks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedRun:
    """The run that the doctor checks: its config, the model's shapes, and its plan on this
    machine."""

    config: RunConfig
    shape: ModelShape
    plan: Plan


def run_doctor(
    planner: Callable[[Hardware], PlannedRun],
    options: LaunchOptions,
    *,
    environment: Mapping[str, str] = os.environ,
    uses_cpu: bool = False,
    meeting_s: float = 30.0,
) -> DoctorReport:
    """Check everything that can stop or spoil a run on this machine; nothing is written, and a
    check that cannot be made is a finding.

    Args:
        planner: plans the run for some hardware; raises SftPlayError where that fails.
        options: how the run is launched.
        uses_cpu: True if the run asks for the CPU.
        meeting_s: seconds that the nodes wait for each other: time to start the command by hand on
            the next one.
    """
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
        machine_checks.check_shared_memory(
            facts.shared_memory, gpus_per_node=len(local_machine.gpus)
        ),
        plan_finding,
    ]
    if planned_run is not None:
        config, shape = planned_run.config, planned_run.shape
        findings.append(check_run_starts(config, machine, environment, params=shape.params))
        findings += machine_checks.disk_findings(config, shape, planned_run.plan, options)
    findings += _multi_rank_findings(facts, options, gpu_finding, environment, meeting_s=meeting_s)
    return DoctorReport(tuple(findings), time.monotonic() - start_time_s)


def _select_gpus(machine: Hardware, options: LaunchOptions) -> tuple[Hardware, Hardware, Finding]:
    """Select the hardware that this node's ranks use; returns it, the same of all nodes, and the
    finding on its GPUs."""
    try:
        local_machine = options.select_hardware(machine, is_one_node=True)
    except SftPlayError as error:
        message, _, remedy = str(error).partition("; ")
        return (
            machine,
            machine,
            fail_finding("GPUs", message, remedy or "GPUS= and NPROC= name GPUs that there are"),
        )
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
        return None, fail_finding(
            "plan", one_line(str(error), limit=600), "fix it; make plan says more"
        )
    plan = planned_run.plan
    choice = (
        f"{plan.layout} on {machine.ranks} rank{'s' * (machine.ranks > 1)}: {plan.choice.verdict}"
    )
    if plan.fits:
        return planned_run, pass_finding("plan", choice)
    return planned_run, fail_finding(
        "plan", f"nothing fits; the closest: {choice}", "make plan lists suggestions"
    )


def check_run_starts(
    config: RunConfig, machine: Hardware, environment: Mapping[str, str], *, params: int
) -> Finding:
    """Check whether a run would be refused before anything loads: for an accelerator that it would
    not use, a model too large for a CPU, a missing compiler for its kernels."""
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
        return [skip_finding(ALL_REDUCE_NAME, "torch is not installed")]
    findings, rank_environment = list[Finding](), dict(environment)
    if options.nodes.count > 1:
        variables, finding = check_node_meeting(
            system_facts, options.nodes, environment, limit_s=meeting_s
        )
        findings.append(finding)
        if variables is None:  # ranks would wait for the missing node until their own limit
            return [*findings, skip_finding(ALL_REDUCE_NAME, "the nodes did not meet")]
        rank_environment |= variables
    if gpu_finding.verdict == "FAIL":
        return [
            *findings,
            skip_finding(ALL_REDUCE_NAME, "not over other GPUs than were asked for; see above"),
        ]
    disable_broken_p2p(system_facts.hardware, rank_environment)  # as a run's ranks communicate
    # importing torch from a cold disk takes most of the limit, NCCL's startup up to 10 s on many
    # nodes
    outcome = run_all_reduce(
        system_facts.hardware, options, limit_s=40.0, environment=rank_environment
    )
    return [*findings, judge_all_reduce(outcome, system_facts, options.nodes)]


def check_node_meeting(
    system_facts: SystemFacts, nodes: NodeSetup, environment: Mapping[str, str], *, limit_s: float
) -> tuple[Mapping[str, str] | None, Finding]:
    """Let all nodes meet before a rank is started; returns the variables by which the ranks find
    each other (None if the nodes did not meet), and the finding, which names missing nodes and what
    differs."""
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
            "version of Python": platform.python_version(),
            **versions,
            "CUDA of torch": system_facts.torch_cuda or "none",
            "driver": system_facts.driver or "none",
            "GPUs": ", ".join(gpu.name for gpu in system_facts.hardware.gpus) or "none",
            "number of ranks": system_facts.hardware.ranks,
        },
    }
    try:
        variables = meet_nodes(nodes, card, timeout_s=limit_s, environment=environment)
    except SftPlayError as error:
        # The doctor's time limit is fixed: distributed.timeout_s does not change it.
        message = (
            str(error)
            .replace(" (distributed.timeout_s)", "")
            .replace("distributed.timeout_s; ", "")
        )
        return None, fail_finding(
            "nodes",
            one_line(message, limit=800),
            "fix it there, then start make doctor on all nodes within half a minute",
        )
    text = f"{nodes.count} met, with the same packages, driver, GPUs and number of ranks"
    return variables, pass_finding("nodes", text)


# --- an all-reduce over all ranks: started like a run's ranks, ended at a time limit, and judged --

ALL_REDUCE_NAME = "all-reduce"
_ERROR_REMEDY = (
    "fix what the error names; NCCL_DEBUG=INFO make doctor shows more,"
    " docs/diagnose.md what each check needs"
)


@dataclass(frozen=True)
class AllReduceOutcome:
    """What the ranks reported. `reports_by_rank` has this node's ranks; `result` is written by rank
    0, so only its node has it."""

    expected_ranks: tuple[int, ...]
    world_size: int
    reports_by_rank: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    timed_out: bool = False
    exit_code: int = 0
    output_tail: str = ""
    limit_s: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate over each rank's link: size / time x 2(n-1)/n (nccl-tests,
        doc/PERFORMANCE.md)."""
        if self.result is None or self.world_size == 1:
            return None
        size, seconds = int(self.result["bytes"]), float(self.result["seconds"])
        return size / seconds * 2 * (self.world_size - 1) / self.world_size


def run_all_reduce(
    machine: Hardware, options: LaunchOptions, *, limit_s: float, environment: Mapping[str, str]
) -> AllReduceOutcome:
    """Start this node's ranks, wait at most `limit_s`, and read their reports; no rank survives."""
    local_ranks = len(machine.gpus) or machine.cpu_ranks
    expected_ranks = tuple(
        range(options.nodes.rank * local_ranks, (options.nodes.rank + 1) * local_ranks)
    )
    with tempfile.TemporaryDirectory(prefix="sft-play-doctor-") as folder_name:
        folder = Path(folder_name)
        # the ranks' own limit is shorter, so that they can report what they were waiting for
        timeout_s, device = max(1.0, limit_s - 5.0), "cuda" if machine.gpus else "cpu"
        launch = torchrun_command(
            ["--out", str(folder), "--device", device, "--timeout", str(timeout_s)],
            processes_per_node=local_ranks,
            nodes=options.nodes,
            threads_per_rank=None if machine.gpus else max(1, machine.cpu_cores // local_ranks),
            visible_gpus=",".join(str(gpu) for gpu in options.gpus) or None,
        )
        argv = list(launch.argv)
        # a run's launch with another program: what the check finds out holds for the run
        argv[argv.index("--module") + 1] = "sft_play.diagnose.collective_check"
        # so that it ends with the doctor
        argv.insert(argv.index(TORCHRUN_MODULE), "sft_play.process.signals")
        # torchrun gives ranks their places by these; a launcher above this process may have set
        # its own
        launch_environment = {
            name: value for name, value in environment.items() if name not in LAUNCHER_VARIABLES
        }
        with (folder / "output").open("wb") as output_file:
            process = start_child(
                argv,
                environment={**launch_environment, **launch.environment},
                death_signal=signal.SIGKILL,
                stdin=subprocess.DEVNULL,
                stdout=output_file,
                stderr=subprocess.STDOUT,
            )
            # Ctrl-C ends the doctor at once, and the ranks with it: they have nothing to save
            with supervise(
                [process],
                on_stop=raise_interrupt,
                kill=lambda launcher: kill_process_tree(launcher.pid),
            ):
                try:
                    exit_code = process.wait(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    exit_code = None
        # The last lines with words: the launcher frames its report with lines of dashes.
        lines = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        last_lines = [line.strip() for line in lines if re.search(r"[A-Za-z]{3}", line)][-3:]
        return AllReduceOutcome(
            expected_ranks,
            local_ranks * options.nodes.count,
            reports_by_rank={
                rank: read_json(folder / f"rank-{rank}.json") for rank in expected_ranks
            },
            result=read_json(folder / "result.json") or None,
            timed_out=exit_code is None,
            exit_code=exit_code or 0,
            output_tail=" | ".join(redact(one_line(line, limit=160)) for line in last_lines),
            limit_s=limit_s,
        )


def judge_all_reduce(
    outcome: AllReduceOutcome, system_facts: SystemFacts, nodes: NodeSetup
) -> Finding:
    """Judge the all-reduce: whether the sum is right, which ranks did not arrive, how fast it
    was."""
    reports, has_gpus = outcome.reports_by_rank, bool(system_facts.hardware.gpus)
    wrong_counts = {
        rank: report["wrong"] for rank, report in reports.items() if report.get("wrong")
    }
    if wrong_counts:
        counts = ", ".join(
            f"rank {rank} has {count} wrong elements" for rank, count in wrong_counts.items()
        )
        remedy = "test the machine's memory: gloo on the CPU returned wrong numbers"
        if has_gpus:
            remedy = (
                "export NCCL_P2P_DISABLE=1 and run make doctor again;"
                " if that fixes it, P2P is broken here"
            )
        return fail_finding(ALL_REDUCE_NAME, f"the sum is wrong: {counts}", remedy)
    is_done = all(reports.get(rank, {}).get("stage") == "done" for rank in outcome.expected_ranks)
    if not is_done or (outcome.result is None and nodes.rank == 0):
        return _failure_finding(outcome, system_facts)
    if outcome.result is None:
        text = f"right for this node's part of {outcome.world_size} ranks; node 0 reports on all"
        return pass_finding(ALL_REDUCE_NAME, text)
    text = f"right over {'NCCL' if has_gpus else 'gloo'} on {outcome.world_size} ranks"
    rate, link = outcome.bytes_per_s, system_facts.hardware.link_bytes_per_s
    if rate is not None:
        text += f"; {rate / 1e9:.2f} GB/s a rank"
        if link is not None and nodes.count == 1:
            text += f", {rate / link:.0%} of the {link / 1e9:.0f} GB/s of the link between the GPUs"
            # nccl-tests reach 0.75 to 0.95 of an NVLink's rate; over PCIe data may pass through the
            # host's memory or between sockets, but below 0.15 something is wrong
            if rate < link * 0.15:
                return warn_finding(
                    ALL_REDUCE_NAME,
                    text,
                    "nvidia-smi topo -m and nvlink -s show the links and which are down; unset"
                    " NCCL_P2P_DISABLE",
                )
    return pass_finding(ALL_REDUCE_NAME, text)


# by the last report that a rank of `diagnose.collective_check` wrote
_CHECK_STAGE_TEXTS = {
    "absent": "never started",
    "started": "has not reached its device",
    "device": "is waiting to join the others",
    "joined": "is waiting in the first all-reduce",
    "reduced": "is waiting in a later all-reduce",
    "done": "is done",
    "failed": "gave up",
}


# errors of ranks that only lost another one, or waited for it: it failed first
_SECONDARY_ERRORS = re.compile(
    r"closed by peer|reset by peer|[Tt]imed? ?out|remote process exited|Broken pipe|store",
    re.IGNORECASE,
)


def _failure_finding(outcome: AllReduceOutcome, system_facts: SystemFacts) -> Finding:
    errors = {
        rank: str(report["error"])
        for rank, report in outcome.reports_by_rank.items()
        if "error" in report
    }
    first_error = next(
        (error for error in errors.values() if not _SECONDARY_ERRORS.search(error)), None
    )
    if first_error is not None:
        failed_ranks = format_ranks(
            [rank for rank, error in errors.items() if error == first_error]
        )
        return fail_finding(
            ALL_REDUCE_NAME,
            f"{failed_ranks}: {redact(one_line(first_error, limit=300))}",
            _ERROR_REMEDY,
        )
    ranks_by_stage: dict[str, list[int]] = {}
    for rank in outcome.expected_ranks:
        ranks_by_stage.setdefault(
            str(outcome.reports_by_rank.get(rank, {}).get("stage", "absent")), []
        ).append(rank)
    text = "; ".join(
        f"{format_ranks(ranks)} {_CHECK_STAGE_TEXTS[stage]}"
        for stage, ranks in ranks_by_stage.items()
    )
    if not outcome.timed_out and not errors:
        text += f", exit code {outcome.exit_code}: {outcome.output_tail or 'no output'}"
        return fail_finding(ALL_REDUCE_NAME, text, _ERROR_REMEDY)
    if errors:
        text += f" ({one_line(next(iter(errors.values())), limit=200)})"
    text = f"not done after {outcome.limit_s:.0f} s: {text}"
    remedy = (
        "stop other work on this machine and run it again;"
        " each rank needs a core, and all need 1 GiB"
    )
    if outcome.world_size > len(outcome.expected_ranks):
        remedy = "let the firewall pass all ports between the nodes: ranks choose their own"
    elif system_facts.hardware.gpus:
        remedy = (
            "export NCCL_P2P_DISABLE=1: where that passes, boot with iommu=pt and switch ACS off in"
            " the BIOS (https://github.com/NVIDIA/nccl/issues/2079)"
        )
    return fail_finding(ALL_REDUCE_NAME, text, remedy)
