"""`make bench`: steps of a run in turns with another trainer's, each in a process of its own.

Our side is the run that `make train` starts (`ours`); the other is a bare loop over the same batches, or TRL's trainer
on the same token rows (docs/bench.md). Rounds go A B A B; ratios are those of medians.
"""

import dataclasses
import json
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report_header import report_header
from benchmarks.steps.order import ProcessOrder
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError, DoesNotFit, TrainingError
from sft_play.log import one_line, redact
from sft_play.planner.plan import Plan, plan_from_json
from sft_play.planner.speed import find_rates, predict_speed
from sft_play.process.environment import independent_environment
from sft_play.process.signals import child_environment
from sft_play.runs.folder import read_json
from sft_play.text import GIB
from sft_play.trace.confirm import load_run_model_shape

logger = logging.getLogger(__name__)

STEPS, WARMUP, ROUNDS = 20, 5, 3
"""The checks of a run's first four steps (updates, gradients) are not among those that are measured."""
# What our run is compared with. All but `bare` need the package trl, in this environment or in that of PEER_PYTHON=.
PEERS = ("bare", "trl", "trl-grouped")
OUR_MODULE, TRL_MODULE = "benchmarks.steps.ours", "benchmarks.steps.trl_peer"
COMPARED = 5
"""Steps from the first, those of the warm-up included, whose losses are compared."""
FIGURES = (
    *("tokens_per_s", "trained_tokens_per_s", "padded_tokens_per_s", "rows_per_s", "step_s", "cpu_s_per_step", "mfu"),
    *("resident_bytes", "allocated_bytes", "reserved_bytes", "process_s", "process_cpu_s"),
)
"""What is compared: speeds, seconds of a step, memory, and of the whole process its seconds from start to end."""

Run = dict[str, Any]


@dataclass
class Comparison:
    """All runs of both sides, in the order in which they were made."""

    config: str
    peer: str | None
    steps: int
    warmup: int
    runs: dict[str, list[Run]] = field(default_factory=dict)
    tried: list[Run] = field(default_factory=list)

    def medians(self, side: str) -> dict[str, float | None]:
        """Each figure's median over the rounds of a side; None where a side does not have it."""
        values = {name: [run[name] for run in self.runs[side] if run.get(name) is not None] for name in FIGURES}
        return {name: statistics.median(some) if some else None for name, some in values.items()}

    def ratios(self) -> dict[str, float] | None:
        """Ours over the peer's of each figure that both have; `rows_per_cpu_s` and `tokens_per_cpu_s` compare by
        seconds of processors, which other work on the machine disturbs less."""
        if self.peer is None:
            return None
        ours, theirs = self.medians("ours"), self.medians(self.peer)
        ratios = {}
        for name in FIGURES:
            mine, other = ours[name], theirs[name]
            if mine and other:
                ratios[name] = mine / other
        if all(run.get("cpu_s") for side in ("ours", self.peer) for run in self.runs[side]):
            for name in ("rows", "tokens"):
                ours_per_cpu = statistics.median(_per_cpu(run, name) for run in self.runs["ours"])
                theirs_per_cpu = statistics.median(_per_cpu(run, name) for run in self.runs[self.peer])
                ratios[f"{name}_per_cpu_s"] = ours_per_cpu / theirs_per_cpu
        return ratios

    def same_work(self) -> dict[str, Any] | None:
        """Whether the first runs of both sides trained on the same: rows, rows of every step, losses."""
        if self.peer is None or "losses" not in self.runs["ours"][0]:
            return None
        mine, other = self.runs["ours"][0], self.runs[self.peer][0]
        # of the first steps alone: rounding that differs grows from step to step, however equal the work is
        pairs = list(zip(mine["losses"], other["losses"], strict=True))[:COMPARED]
        return {
            "rows": mine["rows_digest"] == other["rows_digest"],
            "steps": mine["step_digests"] == other["step_digests"],
            "tokens": mine["tokens"]["total"] == other["tokens"]["total"],
            "trained_tokens": mine["tokens"]["trained"] == other["tokens"]["trained"],
            "largest_loss_difference": max(abs(a - b) for a, b in pairs), "losses_compared": len(pairs),
        }  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            **report_header(), "config": self.config, "peer": self.peer, "steps": self.steps, "warmup": self.warmup,
            "rounds": len(self.runs["ours"]), "medians": {side: self.medians(side) for side in self.runs},
            "ratios": self.ratios(), "same_work": self.same_work(), "tried": self.tried, "runs": self.runs,
        }  # fmt: skip

    def lines(self) -> list[str]:
        lines = [f"{self.config}: {self.steps} steps after {self.warmup}, {len(self.runs['ours'])} rounds"]
        for side in self.runs:
            figures = self.medians(side)
            lines.append(f"  {side}: {_words(figures)}")
            lines += _beside_the_plan(self.runs[side][0])
            parts = self.runs[side][0].get("parts_s")
            if parts:
                words = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
                lines.append(f"    of a step: {words}")
        ratios, same = self.ratios(), self.same_work()
        if ratios:
            shown = ("tokens_per_s", "rows_per_s", "rows_per_cpu_s", "step_s", "process_s", "process_cpu_s")
            lines.append(f"  ours / {self.peer}: " + ", ".join(f"{n} {ratios[n]:.3f}" for n in shown if n in ratios))
        if same:
            rows = "the same rows" if same["rows"] else "other rows"
            if same["steps"]:
                rows = "the same rows in every step"
            largest = f"{same['largest_loss_difference']:.1e}"
            lines.append(f"  {rows}; losses of the first {same['losses_compared']} steps differ by at most {largest}")
        return lines


def _beside_the_plan(run: Run) -> list[str]:
    """Measured and predicted memory of a run of ours on a GPU; a CPU's peak is that of the whole process."""
    if run.get("allocated_bytes") is None or "predicted" not in run:
        return []
    plan = run["predicted"]
    pairs = ((run[f"{name}_bytes"] / GIB, plan[f"{name}_bytes"] / GIB, name) for name in ("allocated", "reserved"))
    text = ", ".join(f"{saw:.2f} GiB {name} ({predicted:.2f} predicted)" for saw, predicted, name in pairs)
    return [f"    of the GPU: {text}"]


def _per_cpu(run: Run, name: str) -> float:
    return float((run["rows"] if name == "rows" else run["tokens"]["total"]) / run["cpu_s"])


def _words(figures: dict[str, float | None]) -> str:
    texts = {
        "tokens_per_s": "{:,.0f} tokens/s", "trained_tokens_per_s": "{:,.0f} of them trained",
        "padded_tokens_per_s": "{:,.0f} with padding", "rows_per_s": "{:,.2f} rows/s", "step_s": "{:.3f} s a step",
        "mfu": "MFU {:.1%}", "process_s": "{:.1f} s from start to end",
    }  # fmt: skip
    words = [text.format(figures[name]) for name, text in texts.items() if figures[name] is not None]
    peak = figures["reserved_bytes"] or figures["resident_bytes"]
    return ", ".join([*words, f"peak {peak / 2**30:.2f} GiB"] if peak else words)


def compare(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    peer: str | None,
    python: str | None = None,
    steps: int = STEPS,
    warmup: int = WARMUP,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = logger.info,
) -> Comparison:
    """Measure a run, and a peer, which `python` runs, in turns with it; TRL tries other micro-batches first.

    Raises ConfigError where there is no such peer or it cannot train this run, TrainingError where a process failed."""
    python = check_peer(peer, python)
    loaded = load_config(config, overrides=overrides)
    if loaded.stages:
        raise ConfigError(f"{config} has {len(loaded.stages)} stages, and make bench measures a run of one: give a run "
                          "YAML of that stage")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sft-play-bench-") as workdir:
        bench = _Bench(loaded, Path(workdir), list(overrides), python, steps, warmup, progress)
        comparison = Comparison(loaded.path.name, peer, steps, warmup)
        # in turns, so that a machine that slows down (heat, other work) slows both sides down
        for turn in range(rounds):
            for side in ("ours", peer) if peer else ("ours",):
                # the peer gets the micro-batch that is best for it, not the one that suits us
                if side.startswith("trl") and not turn:
                    comparison.tried = bench.tries()
                progress(f"Round {turn + 1} of {rounds}: {side}, {warmup} steps and {steps} that are measured")
                comparison.runs.setdefault(side, []).append(bench.measure(side, turn))
    return comparison


def check_peer(peer: str | None, python: str | None) -> str:
    """The Python that runs a peer: the one that is given, else this one. Raises ConfigError."""
    if peer is not None and peer not in PEERS:
        raise ConfigError(f"PEER={one_line(peer)} is not known; there are: {', '.join(PEERS)}")
    if python is None:
        return sys.executable
    if peer in (None, "bare"):
        raise ConfigError("PEER_PYTHON= names the Python of another TRL, and none is asked for: give PEER=trl, or "
                          "leave it out")  # fmt: skip
    if shutil.which(python) is None:
        raise ConfigError(f"PEER_PYTHON={one_line(python)} is not a program that can be run")
    # an import that fails there would fail after our run
    words, environment = [python, "-c", "import trl"], peers_environment()
    process = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if process.returncode:
        reason = [line for line in process.stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
        raise ConfigError(
            f"PEER={peer} needs the package trl, which {one_line(python)} cannot import: "
            f"{one_line(redact(' '.join(reason)), limit=400)}; install it there, or leave PEER_PYTHON= out"
        )
    return python


@dataclass
class _Bench:
    """The processes of a comparison and the folder that they share."""

    loaded: LoadedConfig
    folder: Path
    overrides: list[str]
    python: str
    steps: int
    warmup: int
    progress: Callable[[str], None]
    _micro: int = 0
    """TRL's micro-batch once its tries have chosen one."""

    @property
    def _facts(self) -> Path:
        return self.folder / "facts"

    def _words(self, name: str) -> list[str]:
        """The overrides of our run: only the steps that are measured, nothing evaluated beside them."""
        return [
            *self.overrides, f"train.max_steps={self.warmup + self.steps}", "train.report_to=[]", "eval.steps=0",
            "eval.before_training=false", "train.save_steps=1000000000",
            f"output.dir={json.dumps(str(self.folder / 'outputs'))}", f"output.name={name}", "output.if_exists=replace",
        ]  # fmt: skip

    def _order(self, side: str, turn: int = 0, **more: Any) -> ProcessOrder:
        result, folder = str(self.folder / f"{side}-{turn}.json"), str(self.folder)
        return ProcessOrder(side, result=result, folder=folder, warmup=self.warmup, steps=self.steps, **more)

    def measure(self, side: str, turn: int) -> Run:
        """One run of a side; our first writes what a peer has to know of it."""
        if side.startswith("trl"):
            order = self._order(side, turn, facts=str(self._facts), settings={"micro_batch": self._micro})
            return self._measured(order, TRL_MODULE, self.python)
        self._facts.mkdir(exist_ok=True)
        facts = str(self._facts) if side == "ours" and not turn else ""
        words = self._words(f"{side}-{turn}")
        order = self._order(side, turn, config=str(self.loaded.path), overrides=words, facts=facts)
        return self._measured(order, OUR_MODULE, sys.executable)

    def tries(self) -> list[Run]:
        """TRL's figures of the measured steps with each micro-batch; the fastest is taken from then on.

        On a CPU it is the one with the fewest seconds of processors, which other work disturbs less.
        """
        facts = self._known()
        order = self._order("trl-tries", facts=str(self._facts), settings={"micro_batches": micro_batches(facts)})
        self._run("trl-tries", [self.python, "-m", TRL_MODULE, str(order.write(self.folder / "tries.json"))])
        tried: list[Run] = read_json(Path(order.result))["tried"]
        possible = [one for one in tried if one["seconds"] is not None]
        if not possible:
            raise DoesNotFit("TRL's trainer runs out of memory with every micro-batch that was tried")
        judged = "cpu_s" if facts["on_cpu"] else "seconds"
        self._micro = min(possible, key=lambda one: one[judged])["micro_batch"]
        shown = ", ".join(f"{one['micro_batch']}: {one[judged]:.2f}" for one in possible)
        self.progress(f"trl: {judged} of the measured steps by micro-batch ({shown}); taken: {self._micro}")
        return tried

    def _known(self) -> dict[str, Any]:
        return read_json(self._facts / "facts.json")

    def _measured(self, order: ProcessOrder, module: str, python: str) -> Run:
        path = order.write(self.folder / f"{order.side}-order.json")
        timed = self._run(order.side, [python, "-m", module, str(path)])
        run = flat(read_json(Path(order.result))) | timed
        plan = plan_from_json(self._known()["plan"])
        run["mfu"] = utilisation(run, plan, self.loaded)
        if order.side == "ours":
            run["predicted"] = predicted(plan)
        self.progress(f"{order.side}: {_words({name: run.get(name) for name in FIGURES})}")
        for line in _beside_the_plan(run):  # now: a peer that fails would leave no comparison
            self.progress(f"{order.side}, {line.strip()}")
        return run

    def _run(self, side: str, command: list[str]) -> Run:
        """A process to its end: seconds, of the wall's clock and of processors, its children's included.
        Raises ConfigError or TrainingError."""
        log = self.folder / f"{side}.log"
        environment = child_environment(peers_environment())
        began, cpu_before = time.monotonic(), _children_cpu_s()
        with log.open("wb") as sink:
            process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        seconds, cpu_s = time.monotonic() - began, _children_cpu_s() - cpu_before
        if process.returncode:
            refuse(side, process.returncode, log.read_text(encoding="utf-8", errors="replace"))
        return {"process_s": seconds, "process_cpu_s": cpu_s}


def _children_cpu_s() -> float:
    """Processor time of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peers_environment() -> dict[str, str]:
    """The environment of both sides' processes; no library reports home."""
    more = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return independent_environment(os.environ) | more


def refuse(side: str, code: int, text: str) -> None:
    """Raises what the output of a failed process says: ConfigError for exit code 2, DoesNotFit for 3."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.split("error: ", 1)[1] for line in lines if "] error: " in line]
    last = one_line(redact([*lines, *errors][-1] if lines else "no output"), limit=800)
    for line in lines[-15:] if not errors else []:
        logger.info("%s: %s", side, one_line(redact(line), limit=300))
    kind = {ConfigError.exit_code: ConfigError, DoesNotFit.exit_code: DoesNotFit}.get(code, TrainingError)
    raise kind(f"{side} ended with exit code {code}: {last}")


def flat(run: Run) -> Run:
    """A measured run with the names of FIGURES beside what they are made of."""
    speeds, peak = run.pop("tokens_per_s"), run.pop("peak_bytes")
    return run | {
        "tokens_per_s": speeds["total"], "trained_tokens_per_s": speeds["trained"],
        "padded_tokens_per_s": speeds["padded"], "seconds_by_step": run["step_s"],
        "step_s": run["seconds"] / run["steps"], "cpu_s_per_step": run["cpu_s"] / run["steps"],
        **{f"{name}_bytes": value for name, value in peak.items()},
    }  # fmt: skip


def predicted(plan: Plan) -> dict[str, Any]:
    """The plan's peak of a training step in bytes, the margin on what is reserved, and tokens per second of full rows
    (None: not known), under the names of the measured ones."""
    return {
        "allocated_bytes": plan.memory.allocated, "reserved_bytes": plan.memory.reserved,
        "margin_bytes": plan.memory.margin, "tokens_per_s": plan.speed.tokens_per_s if plan.speed_known else None,
        "confirmed_by_trace": plan.choice.is_traced,
    }  # fmt: skip


def utilisation(run: Run, plan: Plan, loaded: LoadedConfig) -> float | None:
    """Model FLOP utilisation; None where the device's rate is not known, as on a CPU.

    The operations are those of `planner.speed`, for rows as long as the measured ones: attention's grow with
    the square of the length, so the length that stands for all is the mean over tokens.
    """
    rates = find_rates(plan.hardware, plan.precision)
    if not rates.is_known:
        return None
    length = max(2, round(run["weighted_length"]))  # sum of squares over sum: the length of the row a token is in
    step = dataclasses.replace(plan.choice.step, micro_batch=1, grad_accum=1, seq_len=length)
    speed = predict_speed(loaded.config, load_run_model_shape(loaded.config), plan.precision, step, rates)
    return float(speed.model_flops / step.tokens * run["tokens_per_s"] / rates.matrix_flops_per_s)


def micro_batches(facts: dict[str, Any]) -> list[int]:
    """The micro-batches that TRL tries: powers of two that divide the effective batch.

    On a GPU from half of ours to twice ours; on a CPU up to 8, its default: more rows at once only bring more padding.
    """
    effective = int(facts["effective_batch"])
    powers = [2**n for n in range(effective.bit_length()) if effective % 2**n == 0]
    own = int(facts["micro_batch"])
    if facts["on_cpu"]:
        return sorted({own, *(micro for micro in powers if micro <= 8)})
    return sorted({own, *(micro for micro in powers if own / 2 <= micro <= own * 2)})
