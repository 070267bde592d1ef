"""How OpenMP's threads should wait: training steps of the starter's base, alone and beside busy processes, in turns.

    make -C benchmarks benchmark-threads OUT=threads.json

Each setting has a process of its own that takes the same training steps (forward, backward, AdamW; 4 blocks of 128
tokens) for some seconds when its turn comes and sleeps otherwise. Rounds alternate: every setting alone, every setting
beside as many busy loops as `--busy` says (two). `alone` counts only turns during which everything else on the machine
took less than `--quiet` cores; `turns` says how many there were, and `other_cores` of each turn how busy it was beside
the loops. Figures are medians; `ratio` compares with torch's own setting in the same round. `per_core` is what a
setting did with the processor time that it got, in every turn: what waiting costs on a machine that is never quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from sft_play.machine.hardware import detect_hardware
from sft_play.process.environment import NO_SPIN, SHORT_SPIN
from sft_play.runs.files import write_json
from sft_play.runs.folder import installed_versions

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SETTINGS: dict[str, dict[str, str]] = {
    "torch's own": {},
    "busy: passive": NO_SPIN,
    "quiet: spin 3,000": SHORT_SPIN,
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""torch's own, what a command sets where it finds the machine busy or quiet, and others."""
TOKENS = 4 * 128


@dataclass(frozen=True)
class Turn:
    """What one setting did in one turn."""

    setting: str
    busy: int
    round: int
    tokens_per_s: float
    own_cores: float
    """Cores that it took itself."""
    other_cores: float
    """Cores that everything else took, the busy loops left out."""


def work() -> None:
    """In a process of its own: for each line read, take steps for that many seconds and write how many."""
    import torch

    from benchmarks.starter_base import make_model

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids_BT = torch.randint(0, 500, (4, 128))

    def step() -> None:
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        began, spent, steps = time.monotonic(), time.process_time(), 0
        while time.monotonic() < began + float(line):
            step()
            steps += 1
        took = time.monotonic() - began
        answer = {"tokens_per_s": steps * TOKENS / took, "own_cores": (time.process_time() - spent) / took}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def start(setting: str) -> subprocess.Popen[str]:
    """The process of a setting, ready to take steps."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, __file__, "--work"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | SETTINGS[setting]
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def busy_seconds() -> float:
    """Seconds of all cores that were not idle so far; what the hypervisor gave to others counts too."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def wait_for_quiet(quiet: float, patience: float) -> None:
    """Wait, for a while at most, until everything on the machine takes less than `quiet` cores."""
    end = time.monotonic() + patience
    while time.monotonic() < end and psutil.cpu_percent(0.3) / 100 * (os.cpu_count() or 1) > quiet:
        pass


def turn(
    setting: str, process: subprocess.Popen[str], number: int, loops: list[psutil.Process], seconds: float
) -> Turn:
    """Let one setting take its steps."""

    def looped() -> float:
        return sum(sum(loop.cpu_times()[:2]) for loop in loops)

    assert process.stdin is not None
    assert process.stdout is not None
    began, busy, loop = time.monotonic(), busy_seconds(), looped()
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    took = time.monotonic() - began
    others = (busy_seconds() - busy - (looped() - loop)) / took - answer["own_cores"]
    return Turn(setting, len(loops), number, answer["tokens_per_s"], answer["own_cores"], max(0.0, others))


def summary(turns: list[Turn], *, quiet: float) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Medians by load and setting: tokens a second, and their ratio to torch's own setting of the same round."""
    made: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for busy in sorted({one.busy for one in turns}):
        counted = [one for one in turns if one.busy == busy and (busy or one.other_cores < quiet)]
        own = {one.round: one.tokens_per_s for one in counted if one.setting == "torch's own"}
        cells = made.setdefault(f"beside {busy}" if busy else "alone", {})
        for setting in SETTINGS:
            of_it = [one for one in counted if one.setting == setting]
            ratios = [one.tokens_per_s / own[one.round] for one in of_it if own.get(one.round)]
            cells[setting] = {
                "turns": len(of_it),
                "tokens_per_s": statistics.median(one.tokens_per_s for one in of_it) if of_it else None,
                "ratio": statistics.median(ratios) if ratios else None,
            }
    return made


def per_core(turns: list[Turn]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by load and setting, of all turns: cores that it took itself, and tokens a second of them."""
    made: dict[str, dict[str, dict[str, float]]] = {}
    for busy in sorted({one.busy for one in turns}):
        for setting in SETTINGS:
            of_it = [one for one in turns if one.busy == busy and one.setting == setting and one.own_cores > 0]
            if of_it:
                made.setdefault(f"beside {busy}" if busy else "alone", {})[setting] = {
                    "own_cores": statistics.median(one.own_cores for one in of_it),
                    "tokens_per_core_s": statistics.median(one.tokens_per_s / one.own_cores for one in of_it),
                }
    return made


def main() -> None:
    """Take turns, and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default=os.environ.get("OUT") or "threads.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=0.15)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine")
    options = parser.parse_args()
    if options.work:
        work()
        return
    turns: list[Turn] = []
    processes = {setting: start(setting) for setting in SETTINGS}
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(options.rounds):
            for count in (0, options.busy):
                loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                watched = [psutil.Process(loop.pid) for loop in loops]
                # the order turns each round, so that no setting always comes after the same one
                for setting in SETTINGS if number % 2 else reversed(SETTINGS):
                    if not count:
                        wait_for_quiet(options.quiet, options.patience)
                    turns.append(turn(setting, processes[setting], number, watched, options.seconds))
                    sys.stdout.write(f"{json.dumps(asdict(turns[-1]))}\n")
                    sys.stdout.flush()
                for loop in loops:
                    loop.kill()
                    loop.wait()
    finally:
        for process in processes.values():
            process.kill()
        for loop in loops:
            loop.kill()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": detect_hardware().as_json(),
        "versions": installed_versions(),
        "settings": SETTINGS,
        "summary": summary(turns, quiet=options.quiet),
        "per_core": per_core(turns),
        "turns": [asdict(one) for one in turns],
    }
    write_json(Path(options.out).absolute(), result)
    sys.stdout.write(json.dumps(result["summary"], indent=1) + "\n")


if __name__ == "__main__":
    main()
