"""An all-reduce over all ranks: started like a run's ranks, ended at a time limit, and judged."""

import json
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.diagnose.machine_checks import SystemFacts, error_remedies
from sft_play.findings import Finding, fail_finding, pass_finding, warn_finding
from sft_play.launch.request import LaunchOptions
from sft_play.launch.torchrun import TORCHRUN_MODULE, LaunchCommand, torchrun_command
from sft_play.log import one_line, redact
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import NodeSetup
from sft_play.process.environment import LAUNCHER_VARIABLES
from sft_play.process.failures import format_ranks, kill_process_tree
from sft_play.process.signals import raise_interrupt, start_child, supervise

ALL_REDUCE_NAME = "all-reduce"
CHECK_MODULE = "sft_play.diagnose.collective_check"
# The ranks' own limit is this much shorter, so that they can report what they were waiting for.
REPORT_MARGIN_S = 5.0
# Fraction of an NVLink's rate below which something is wrong; nccl-tests reach 0.75 to 0.95 of it.
MIN_NVLINK_SHARE = 0.30
# The same for PCIe, where data may pass through the host's memory or between sockets.
MIN_PCIE_SHARE = 0.15
_SLOW_LINK_REMEDY = "nvidia-smi topo -m and nvlink -s show the links and which are down; unset NCCL_P2P_DISABLE"
_TAIL_LINES = 3


@dataclass(frozen=True)
class AllReduceOutcome:
    """What the ranks reported. `reports_by_rank` are this node's; `result` is rank 0's, on its node."""

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
        """The rate over each rank's link: size / time x 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md)."""
        if self.result is None or self.world_size == 1:
            return None
        size, seconds = int(self.result["bytes"]), float(self.result["seconds"])
        return size / seconds * 2 * (self.world_size - 1) / self.world_size


def all_reduce_launch(
    machine: Hardware, options: LaunchOptions, *, reports_folder: Path, timeout_s: float
) -> LaunchCommand:
    """The command that starts this node's ranks: a run's, with another module."""
    local_ranks = len(machine.gpus) or machine.cpu_ranks
    device = "cuda" if machine.gpus else "cpu"
    launch = torchrun_command(
        ["--out", str(reports_folder), "--device", device, "--timeout", str(timeout_s)],
        processes_per_node=local_ranks,
        nodes=options.nodes,
        threads_per_rank=None if machine.gpus else max(1, machine.cpu_cores // local_ranks),
        visible_gpus=",".join(str(gpu) for gpu in options.gpus) or None,
    )
    # a run's launch, of which only the program differs: what the check finds out holds for the run
    module_index = launch.argv.index("--module") + 1
    return replace(launch, argv=(*launch.argv[:module_index], CHECK_MODULE, *launch.argv[module_index + 1 :]))


def run_all_reduce(
    machine: Hardware, options: LaunchOptions, *, limit_s: float, environment: Mapping[str, str]
) -> AllReduceOutcome:
    """Start this node's ranks, wait at most `limit_s`, and read their reports; no rank survives."""
    local_ranks = len(machine.gpus) or machine.cpu_ranks
    expected_ranks = tuple(range(options.nodes.rank * local_ranks, (options.nodes.rank + 1) * local_ranks))
    with tempfile.TemporaryDirectory(prefix="sft-play-doctor-") as folder_name:
        folder = Path(folder_name)
        launch = all_reduce_launch(
            machine, options, reports_folder=folder, timeout_s=max(1.0, limit_s - REPORT_MARGIN_S)
        )
        argv = list(launch.argv)
        argv.insert(argv.index(TORCHRUN_MODULE), "sft_play.process.signals")  # so that it ends with the doctor
        # torchrun gives ranks their places by these; those of a launcher above would be taken for theirs
        launch_environment = {name: value for name, value in environment.items() if name not in LAUNCHER_VARIABLES}
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
            with supervise([process], on_stop=raise_interrupt, kill=lambda launcher: kill_process_tree(launcher.pid)):
                try:
                    exit_code = process.wait(timeout=limit_s)
                except subprocess.TimeoutExpired:
                    exit_code = None
        # The last lines with words: the launcher frames its report with lines of dashes.
        lines = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        last_lines = [line.strip() for line in lines if re.search(r"[A-Za-z]{3}", line)][-_TAIL_LINES:]
        reports = {rank: _read_rank_report(folder / f"rank-{rank}.json") for rank in expected_ranks}
        return AllReduceOutcome(
            expected_ranks,
            local_ranks * options.nodes.count,
            reports_by_rank={rank: report for rank, report in reports.items() if report},
            result=_read_rank_report(folder / "result.json"),
            timed_out=exit_code is None,
            exit_code=exit_code or 0,
            output_tail=" | ".join(redact(one_line(line, limit=160)) for line in last_lines),
            limit_s=limit_s,
        )


def _read_rank_report(path: Path) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # written whole, or absent
    except OSError:
        return None
    return report


def judge_all_reduce(outcome: AllReduceOutcome, system_facts: SystemFacts, nodes: NodeSetup) -> Finding:
    """The finding of the all-reduce: the sum, the ranks that did not arrive, and how fast it was."""
    reports, has_gpus = outcome.reports_by_rank, bool(system_facts.hardware.gpus)
    wrong_counts = {rank: report["wrong"] for rank, report in reports.items() if report.get("wrong")}
    if wrong_counts:
        counts = ", ".join(f"rank {rank} has {count} wrong elements" for rank, count in wrong_counts.items())
        remedy = "test the machine's memory: gloo on the CPU returned wrong numbers"
        if has_gpus:
            remedy = "export NCCL_P2P_DISABLE=1 and run make doctor again; if that fixes it, P2P is broken here"
        return fail_finding(ALL_REDUCE_NAME, f"the sum is wrong: {counts}", remedy)
    is_done = all(reports.get(rank, {}).get("stage") == "done" for rank in outcome.expected_ranks)
    if not is_done or (outcome.result is None and nodes.rank == 0):
        return _failure_finding(outcome, system_facts)
    text = f"right over {'NCCL' if has_gpus else 'gloo'} on {outcome.world_size} ranks"
    if outcome.result is None:
        text = f"right for this node's part of {outcome.world_size} ranks; node 0 reports on all"
    rate, link = outcome.bytes_per_s, system_facts.hardware.link_bytes_per_s
    if rate is not None:
        text += f"; {rate / 1e9:.2f} GB/s a rank"
        if link is not None and nodes.count == 1:
            text += f", {rate / link:.0%} of the {link / 1e9:.0f} GB/s of the link between the GPUs"
            entries = find_catalog_entries(system_facts.hardware.gpus[0].name)
            is_pcie = bool(entries) and link <= entries[0].pcie
            if rate < link * (MIN_PCIE_SHARE if is_pcie else MIN_NVLINK_SHARE):
                return warn_finding(ALL_REDUCE_NAME, text, _SLOW_LINK_REMEDY)
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
    r"closed by peer|reset by peer|[Tt]imed? ?out|remote process exited|Broken pipe|store", re.IGNORECASE
)


def _failure_finding(outcome: AllReduceOutcome, system_facts: SystemFacts) -> Finding:
    errors = {rank: str(report["error"]) for rank, report in outcome.reports_by_rank.items() if "error" in report}
    first_error = next((error for error in errors.values() if not _SECONDARY_ERRORS.search(error)), None)
    if first_error is not None:
        failed_ranks = format_ranks([rank for rank, error in errors.items() if error == first_error])
        text = f"{failed_ranks}: {redact(one_line(first_error, limit=300))}"
        return fail_finding(ALL_REDUCE_NAME, text, *error_remedies(first_error))
    ranks_by_stage: dict[str, list[int]] = {}
    for rank in outcome.expected_ranks:
        ranks_by_stage.setdefault(str(outcome.reports_by_rank.get(rank, {}).get("stage", "absent")), []).append(rank)
    text = "; ".join(f"{format_ranks(ranks)} {_CHECK_STAGE_TEXTS[stage]}" for stage, ranks in ranks_by_stage.items())
    if not outcome.timed_out and not errors:
        text += f", exit code {outcome.exit_code}: {outcome.output_tail or 'no output'}"
        return fail_finding(ALL_REDUCE_NAME, text, *error_remedies(outcome.output_tail))
    if errors:
        text += f" ({one_line(next(iter(errors.values())), limit=200)})"
    text = f"not done after {outcome.limit_s:.0f} s: {text}"
    return fail_finding(ALL_REDUCE_NAME, text, *_hang_remedy(system_facts, outcome))


def _hang_remedy(system_facts: SystemFacts, outcome: AllReduceOutcome) -> tuple[str, ...]:
    if outcome.world_size > len(outcome.expected_ranks):
        return ("let the firewall pass all ports between the nodes: ranks choose their own",)
    if system_facts.hardware.gpus:
        remedy = "export NCCL_P2P_DISABLE=1: where that passes, boot with iommu=pt and switch ACS off in the BIOS"
        return remedy, "https://github.com/NVIDIA/nccl/issues/2079"
    return ("stop other work on this machine and run it again; each rank needs a core, and all need 1 GiB",)
