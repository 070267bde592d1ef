"""An all-reduce over all ranks: started like a run's ranks, ended at a time limit, and judged."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.diagnose.known_bad import explained
from sft_play.diagnose.surroundings import Surroundings
from sft_play.facts.gpus.gpu_catalog import find_gpus
from sft_play.facts.hardware import Hardware
from sft_play.facts.network import NodeSetup
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.launch.command import TORCHRUN_MODULE, LaunchCommand, torchrun_command
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import one_line, redact
from sft_play.process.environment import LAUNCHER_VARIABLES
from sft_play.process.failures import kill_process_tree, format_ranks
from sft_play.process.signals import child_environment

NAME, SPEED = "all-reduce", "bandwidth"
MODULE = "sft_play.training.ranks.collective_check"
# The ranks' own limit is this much shorter, so that they can report what they were waiting for.
GIVE_UP_S = 5.0
# Fraction of an NVLink's rate below which something is wrong; nccl-tests reach 0.75 to 0.95 of it.
NVLINK_SHARE = 0.30
# The same for PCIe, where data may pass through the host's memory or between sockets.
PCIE_SHARE = 0.15
_SLOW = (
    "NCCL_DEBUG=INFO shows which path NCCL took (NET/Socket: it found no InfiniBand); nvidia-smi topo -m and nvlink -s "
    "show links and which are down; PCIe: switch ACS off and boot with iommu=pt; unset NCCL_P2P_DISABLE"
)
BUS_SOURCE = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"
_TAIL_LINES = 3


@dataclass(frozen=True)
class Outcome:
    """What the ranks reported. `notes` are this node's, by rank; `result` is rank 0's, on its node."""

    expected: tuple[int, ...]
    world: int
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    timed_out: bool = False
    code: int = 0
    tail: str = ""
    limit_s: float = 0.0


def launch_of(machine: Hardware, options: LaunchOptions, *, out: Path, timeout_s: float) -> LaunchCommand:
    """The command that starts this node's ranks: a run's, with another module."""
    here = len(machine.gpus) or machine.cpu_ranks
    kind = "cuda" if machine.gpus else "cpu"
    launch = torchrun_command(
        ["--out", str(out), "--device", kind, "--timeout", str(timeout_s)],
        processes=here,
        nodes=options.nodes,
        threads=None if machine.gpus else max(1, machine.cpu_cores // here),
        gpus=",".join(str(gpu) for gpu in options.gpus) or None,
    )
    # a run's launch, of which only the program differs: what the check finds out holds for the run
    at = launch.argv.index("--module") + 1
    return replace(launch, argv=(*launch.argv[:at], MODULE, *launch.argv[at + 1 :]))


def run_ranks(machine: Hardware, options: LaunchOptions, *, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    """Start this node's ranks, wait at most `limit_s`, and read their reports; no rank survives."""
    here = len(machine.gpus) or machine.cpu_ranks
    first = options.nodes.rank * here
    outcome = Outcome(tuple(range(first, first + here)), here * options.nodes.count, limit_s=limit_s)
    with tempfile.TemporaryDirectory(prefix="sft-play-doctor-") as text:
        out = Path(text)
        launch = launch_of(machine, options, out=out, timeout_s=max(1.0, limit_s - GIVE_UP_S))
        at = launch.argv.index(TORCHRUN_MODULE)
        # torchrun gives ranks their places by these; those of a launcher above would be taken for theirs
        kept = {name: value for name, value in environment.items() if name not in LAUNCHER_VARIABLES}
        with (out / "output").open("wb") as sink:
            process = subprocess.Popen(
                [*launch.argv[:at], "sft_play.process.signals", *launch.argv[at:]],  # so that it ends with the doctor
                env=child_environment({**kept, **launch.environment}),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ctrl-C goes to the doctor, which ends the ranks itself
            )
            try:
                code = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code, outcome = -1, replace(outcome, timed_out=True)
            finally:
                if process.poll() is None:  # a launcher that has ended took its ranks with it
                    kill_process_tree(process.pid)
                    process.wait()
        # The last lines with words: the launcher frames its report with lines of dashes.
        lines = (out / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        tail = [line.strip() for line in lines if re.search(r"[A-Za-z]{3}", line)][-_TAIL_LINES:]
        return replace(
            outcome,
            notes={rank: note for rank in outcome.expected if (note := _read(out / f"rank-{rank}.json"))},
            result=_read(out / "result.json"),
            code=code,
            tail=" | ".join(redact(one_line(line, limit=160)) for line in tail),
        )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def judge(outcome: Outcome, around: Surroundings, nodes: NodeSetup) -> list[Finding]:
    """The findings of the all-reduce: the sum, the ranks that did not arrive, the bandwidth."""
    errors = {rank: str(note["error"]) for rank, note in outcome.notes.items() if "error" in note}
    wrong = {rank: int(note["wrong"]) for rank, note in outcome.notes.items() if note.get("wrong")}
    done = [rank for rank in outcome.expected if outcome.notes.get(rank, {}).get("stage") == "done"]
    if wrong:
        counts = ", ".join(f"rank {rank} has {count} wrong elements" for rank, count in wrong.items())
        remedy = "test the machine's memory: gloo on the CPU returned wrong numbers"
        if around.hardware.gpus:
            remedy = "export NCCL_P2P_DISABLE=1 and run make doctor again; if that fixes it, P2P is broken here"
        return [fail_finding(NAME, f"the sum is wrong: {counts}", remedy)]
    if len(done) < len(outcome.expected) or (outcome.result is None and nodes.rank == 0):
        return [_failed(outcome, around, errors)]
    ranks = list(outcome.result["ranks"]) if outcome.result else list(outcome.notes.values())
    return [_sum(outcome, ranks, around), *_bandwidth(outcome, around, nodes)]


def _sum(outcome: Outcome, ranks: Sequence[Mapping[str, Any]], around: Surroundings) -> Finding:
    hosts: dict[str, list[int]] = {}
    for note in ranks:
        hosts.setdefault(one_line(str(note.get("host"))), []).append(int(note["rank"]))
    where = "; ".join(f"{format_ranks(sorted(members))} on {host}" for host, members in hosts.items())
    part = "" if outcome.result else f" (this node's part of {outcome.world}; node 0 reports on all)"
    how = "NCCL" if around.hardware.gpus else "gloo"
    return pass_finding(NAME, f"right over {how} on {len(ranks)} ranks{part}: {where}")


# by the last note that a rank of `training.ranks.collective_check` wrote
_STAGES = {
    "absent": "never started",
    "started": "has not reached its device",
    "device": "is waiting to join the others",
    "joined": "is waiting in the first all-reduce",
    "reduced": "is waiting in a later all-reduce",
    "done": "is done",
    "failed": "gave up",
}


# errors of ranks that only lost another one, or waited for it: it failed first
_SECONDARY = re.compile(
    r"closed by peer|reset by peer|[Tt]imed? ?out|remote process exited|Broken pipe|store", re.IGNORECASE
)


def _failed(outcome: Outcome, around: Surroundings, errors: Mapping[int, str]) -> Finding:
    own = {rank: text for rank, text in errors.items() if not _SECONDARY.search(text)}
    if own:
        text = next(iter(own.values()))
        same = [rank for rank, message in own.items() if message == text]
        return fail_finding(NAME, f"{format_ranks(same)}: {redact(one_line(text, limit=300))}", *explained(text))
    by_stage: dict[str, list[int]] = {}
    for rank in outcome.expected:
        by_stage.setdefault(str(outcome.notes.get(rank, {}).get("stage", "absent")), []).append(rank)
    words = "; ".join(f"{format_ranks(ranks)} {_STAGES.get(stage, stage)}" for stage, ranks in by_stage.items())
    if not outcome.timed_out and not errors:
        found = f"{words}, exit code {outcome.code}: {outcome.tail or 'no output'}"
        return fail_finding(NAME, found, *explained(outcome.tail))
    reason = f" ({one_line(next(iter(errors.values())), limit=200)})" if errors else ""
    return fail_finding(NAME, f"not done after {outcome.limit_s:.0f} s: {words}{reason}", *_hang_remedy(around, outcome))


def _hang_remedy(around: Surroundings, outcome: Outcome) -> tuple[str, ...]:
    if outcome.world > len(outcome.expected):
        sockets = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME" if around.hardware.gpus else "GLOO_SOCKET_IFNAME"
        return (
            f"name the network interface that joins the nodes: export {sockets}=eth0 (ip -br address shows them), and "
            "let the firewall pass all ports between the nodes: ranks choose their own",
        )
    if around.hardware.gpus:
        return (
            "export NCCL_P2P_DISABLE=1 and run make doctor again: where that passes, boot with iommu=pt and switch ACS "
            "off in the BIOS; NCCL_DEBUG=INFO shows where it hangs",
            "https://github.com/NVIDIA/nccl/issues/2079",
        )
    return ("stop other work on this machine and run it again; each rank needs a core, and all need 1 GiB",)


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second over each rank's link: size / time x 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def _bandwidth(outcome: Outcome, around: Surroundings, nodes: NodeSetup) -> list[Finding]:
    if outcome.result is None:
        return [skip_finding(SPEED, "node 0 reports it")]
    if outcome.world == 1:
        return [skip_finding(SPEED, "one rank has no other to reduce with")]
    speeds = [(int(item["bytes"]), float(item["seconds"])) for item in outcome.result["speeds"]]
    measured = [(size, bus_bandwidth(size, seconds, outcome.world)) for size, seconds in speeds]
    best = max(speed for _, speed in measured)
    words = f"{best / 1e9:.2f} GB/s a rank (" + ", ".join(f"{s // 2**20} MiB: {v / 1e9:.2f}" for s, v in measured) + ")"
    if not around.hardware.gpus:
        return [skip_finding(SPEED, f"{words}; CPU ranks have no expected rate")]
    wanted, share, link = expected(around) if nodes.count == 1 else (None, 0.0, "the network")
    if wanted is None:
        return [skip_finding(SPEED, f"{words}; the expected rate of {link} is not known")]
    words += f", {best / wanted:.0%} of the {wanted / 1e9:.0f} GB/s of {link}"
    if best >= share * wanted:
        return [pass_finding(SPEED, words)]
    return [warn_finding(SPEED, f"{words}; at least {share:.0%} is expected", _SLOW, BUS_SOURCE)]


def expected(around: Surroundings) -> tuple[float | None, float, str]:
    """The rate of a GPU's link, one way, in bytes per second; the fraction of it that is enough; and its name."""
    link = around.hardware.link_bytes_per_s
    entries = find_gpus(around.hardware.gpus[0].name)
    over_pcie = link is not None and bool(entries) and link <= entries[0].pcie
    return (link, PCIE_SHARE, "PCIe") if over_pcie else (link, NVLINK_SHARE, "the link between the GPUs")
