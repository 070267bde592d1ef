"""The training trials: the toolkit's own runs, started as a user starts them, each in its own process."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_selftest.checks import Peak, moment_problems, peak_problems, speed_problems
from benchmarks.gpu_selftest.material import CPU_SIZE, GPU_SIZE, ROW_KINDS, TrialSize
from benchmarks.gpu_selftest.part import Part
from sft_play.config.load import load_config
from sft_play.launch.planning import has_eval
from sft_play.log import one_line, redact
from sft_play.machine.hardware import detect_hardware
from sft_play.machine.visible_gpus import VISIBILITY_VARIABLES
from sft_play.planner.calibration import RECORD_FILE as RECORD
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.plan import Plan
from sft_play.process.environment import independent_environment
from sft_play.process.signals import child_environment
from sft_play.trace.confirm import load_run_model_shape

MODES = ("qlora", "lora", "full")
EVALUATIONS = ("evaluate", "generate")
TRIAL_TIMEOUT_S = 300.0
"""A trial that takes longer hangs: on one H100 they are estimated at 15 to 25 s, most of it imports and loading."""
MEASURED_MOMENTS = {"save": "saving", "evaluate": "evaluation"}
"""What is measured apart from the training."""
WARM_UP_STEPS = 3
"""Steps whose speed does not count."""
ANSWER_TOKENS = {"cuda": 32, "cpu": 8}


@dataclass(frozen=True)
class Trial:
    """One cell of the table: twenty steps of a run."""

    mode: str
    checkpointing: bool
    rows: str
    judged: str

    @property
    def name(self) -> str:
        """Its name as a part."""
        checkpointing = "checkpointed" if self.checkpointing else "plain"
        return f"train/{self.mode}/{checkpointing}/{self.rows}/{self.judged}"


def all_trials() -> list[Trial]:
    """All 36, first those that together cover every pair of settings (an orthogonal array of nine)."""
    every = [Trial(*cell) for cell in itertools.product(MODES, (True, False), ROW_KINDS, EVALUATIONS)]
    first = core_trials()
    return [*first, *(trial for trial in every if trial not in first)]


def core_trials() -> list[Trial]:
    """Nine trials in which every pair of two settings' values occurs; every mode and kind of rows in three in a row."""
    checkpointing = {0: (True, True, False), 1: (True, False, True), 2: (False, True, True)}
    judged = {0: (0, 1, 1), 1: (1, 1, 0), 2: (0, 0, 1)}
    cells = [(m, (m + shift) % len(ROW_KINDS)) for shift in range(len(ROW_KINDS)) for m in range(len(MODES))]
    return [Trial(MODES[m], checkpointing[m][k], ROW_KINDS[k], EVALUATIONS[judged[m][k]]) for m, k in cells]


@dataclass(frozen=True)
class TrialBench:
    """Where trials run: a folder with the model and the rows, the logs beside the result, the device."""

    folder: Path
    logs: Path
    on_gpu: bool

    @property
    def size(self) -> TrialSize:
        """The size of a trial on this device."""
        return GPU_SIZE if self.on_gpu else CPU_SIZE

    @property
    def cache(self) -> Path:
        """The trials' own cache, so that no earlier run corrects their predictions."""
        return self.folder / "cache"

    @property
    def record(self) -> Path:
        """What the trials' runs measured."""
        return self.cache / RECORD

    def config(self, mode: str, rows: str, **more: Any) -> Path:
        """Write the run YAML of a trial; `more` are settings by section (`train={...}`)."""
        size, device = self.size, "cuda" if self.on_gpu else "cpu"
        train: dict[str, Any] = {
            "batch_size": size.micro_batch, "effective_batch_size": size.effective_batch, "max_steps": size.steps,
            "report_to": [], "save_steps": 1000, "logging_steps": 1, "device": "auto" if self.on_gpu else "cpu",
        }  # fmt: skip
        settings: dict[str, Any] = {
            "model": {"name": str(self.folder / "model"), "max_seq_len": size.seq_len},
            "tuning": {"mode": mode},
            "data": {
                "train_path": str(self.folder / f"{rows}.jsonl"),
                "val_path": str(self.folder / "held-out.jsonl"),
                "max_lost_fraction": 1.0,
                "packing": "best_fit" if rows == "packed" else "none",
                "workers": 1,
            },
            "train": train,
            "eval": {"steps": size.steps // 2, "before_training": False, "max_new_tokens": ANSWER_TOKENS[device]},
            "output": {"dir": str(self.folder / "outputs"), "name": "run", "if_exists": "replace"},
        }
        for section, values in more.items():
            settings[section] |= values
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
        return path

    def of(self, trial: Trial) -> Path:
        """The run YAML of a trial."""
        return self.config(
            trial.mode,
            trial.rows,
            train={"gradient_checkpointing": trial.checkpointing},
            eval={"generate_rows": 8 if trial.judged == "generate" else 0},
        )

    @property
    def run_folder(self) -> Path:
        """Where a trial's run is written."""
        return self.folder / "outputs" / "run"

    def clean(self) -> None:
        """Remove what earlier trials have written and measured: nothing corrects the next prediction."""
        shutil.rmtree(self.folder / "outputs", ignore_errors=True)
        self.record.unlink(missing_ok=True)


@dataclass(frozen=True)
class ProcessResult:
    """How a process ended: its exit code (None: it exceeded its time), its output, its log, its seconds."""

    code: int | None
    text: str
    log: Path
    seconds: float

    @property
    def words(self) -> str:
        """Its error message, or the last line of its traceback, or of its output."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        errors = [line.split("error: ", 1)[1] for line in lines if "] error: " in line]
        last = errors[-1] if errors else lines[-1] if lines else "no output"
        how = f"not done after {self.seconds:.0f} s" if self.code is None else f"exit code {self.code}"
        return one_line(redact(f"{last} ({how})"), limit=1200)


def run_module(
    arguments: Sequence[str], log: Path, bench: TrialBench, *, limit_s: float = TRIAL_TIMEOUT_S
) -> ProcessResult:
    """Run `python -m WORDS` to its end, its output in `log`; whatever it started ends with it."""
    environment = child_environment(independent_environment(os.environ))
    environment |= {"SFT_PLAY_CACHE": str(bench.cache), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
    )  # the first GPU of the driver's list is the first here too
    if not bench.on_gpu:
        environment |= dict.fromkeys(VISIBILITY_VARIABLES, "-1")
    began = time.monotonic()
    code: int | None
    with log.open("ab") as sink:
        start = sink.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=sink,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    with log.open("rb") as source:
        source.seek(start)
        text = source.read().decode("utf-8", "replace")
    return ProcessResult(code, text, log, time.monotonic() - began)


def train_run(bench: TrialBench, config: Path, log: Path, *overrides: str, command: str = "train") -> ProcessResult:
    """One run of a run YAML."""
    return run_module(["sft_play", command, "--config", str(config), *overrides], log, bench)


def run_trial(trial: Trial, bench: TrialBench) -> Part:
    """Run a trial and check its peak and its speed; one that does not fit by its plan is skipped."""
    bench.clean()
    config = bench.of(trial)
    plan = plan_run(config) if bench.on_gpu else None
    if plan is not None and not plan.fits:
        return Part(trial.name, "skipped", f"the plan says that it {plan.choice.verdict}")
    log = bench.logs / f"{trial.name.removeprefix('train/').replace('/', '-')}.log"
    return judge_run_folder(trial.name, bench.run_folder, train_run(bench, config, log), rows=trial.rows)


def plan_run(config: Path) -> Plan:
    """The plan of a run YAML on the first GPU, without earlier runs."""
    read = load_config(config).config
    return make_plan(
        PlanRequest(
            read,
            load_run_model_shape(read),
            detect_hardware().limit_gpus(1),
            allowed_layouts=("single",),
            has_eval=has_eval(read),
        )
    )


def judge_run_folder(name: str, folder: Path, ended: ProcessResult, *, rows: str) -> Part:
    """The part that a run yields, from its plan and its summary."""
    common: dict[str, Any] = {"seconds": round(ended.seconds, 1), "log": str(ended.log)}
    if ended.code != 0 or not (folder / "summary.json").is_file():
        return Part(name, "fail", ended.words, **common)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    predicted, measured = _predicted(plan), _measured(summary) | {"tokens_per_s": steady_speed(folder)}
    problems = find_problems(predicted, measured, rows=rows)
    return Part(name, "fail" if problems else "pass", "; ".join(problems) or _words(predicted, measured),
                predicted, measured, **common)  # fmt: skip


def _predicted(plan: dict[str, Any]) -> dict[str, Any]:
    peak = plan["peak_bytes"]
    allocated, reserved = peak["by_moment"]["training"]
    return {
        "allocated": allocated,
        "reserved": reserved,
        **{name: peak[name] for name in ("margin", "load")},
        **{name: peak["moments"].get(moment) for name, moment in MEASURED_MOMENTS.items()},
        "tokens_per_s": plan["tokens_per_s"],
        "confirmed_by_trace": plan["confirmed_by_trace"],
        "precision": plan["precision"]["compute"],
        "micro_batch": plan["micro_batch"],
        "grad_accum": plan["grad_accum"],
        "fits": plan["fits"],
    }


def _measured(summary: dict[str, Any]) -> dict[str, Any]:
    by_moment = summary["peak_bytes_by_moment"]
    peak = by_moment["training"]
    return {
        "allocated": peak["measured_allocated"],
        "reserved": peak["measured_reserved"] if "measured_rss" not in peak else peak["measured_rss"],
        "load": by_moment.get("loading", {}).get("measured_allocated"),
        **{name: by_moment.get(moment, {}).get("measured_allocated") for name, moment in MEASURED_MOMENTS.items()},
        "updates": summary["updates"],
        "evaluations": len(summary["evaluations"]),
    }


def steady_speed(folder: Path) -> float:
    """Median tokens per second of a run's steps, without the first, in which kernels are compiled and libraries
    start."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "tokens_per_s" in line]
    return float(statistics.median(line["tokens_per_s"] for line in steps[WARM_UP_STEPS:] or steps))


def find_problems(predicted: dict[str, Any], measured: dict[str, Any], *, rows: str) -> list[str]:
    """What is wrong with a run of rows of a kind: its peak and, where the device's rates are known and the rows are
    full, as a plan assumes them, its speed."""
    full = rows != "unequal"
    peak = Peak(
        predicted["allocated"], predicted["reserved"], predicted["margin"], measured["allocated"],
        measured["reserved"], exact=full,
    )  # fmt: skip
    problems = peak_problems(peak)
    if full and predicted["tokens_per_s"]:
        problems += speed_problems(predicted["tokens_per_s"], measured["tokens_per_s"])
    return problems


def _words(predicted: dict[str, Any], measured: dict[str, Any]) -> str:
    def gib(size: int | None) -> str:
        return "-" if size is None else f"{size / 2**30:.2f}"

    speed = f"{predicted['tokens_per_s']:,.0f}" if predicted["tokens_per_s"] else "none"
    return (
        f"reserved {gib(measured['reserved'])} GiB measured, {gib(predicted['reserved'])} predicted (margin "
        f"{gib(predicted['margin'])}); {measured['tokens_per_s']:,.0f} tokens/s, {speed} predicted"
    )


def moment_parts(parts: Iterable[Part], *, load_margin: float, margin_bytes: int) -> list[Part]:
    """`load/MODE`, `save/MODE` and so on: the most that a moment besides training held in any trial of a mode."""
    parts, results = list(parts), []
    for mode, name in itertools.product(MODES, ("load", *MEASURED_MOMENTS)):
        of_mode = [part for part in parts if part.name.startswith(f"train/{mode}/") and part.measured]
        held = [
            (part, part.predicted[name], part.measured[name])
            for part in of_mode
            if part.predicted and part.measured
            and part.predicted.get(name) is not None and part.measured.get(name) is not None
        ]  # fmt: skip
        if not held:
            needs = "resident memory, all that a CPU shows, has one peak for the whole run: needs a GPU"
            why = needs if of_mode else "no trial of this mode completed"
            results.append(Part(f"{name}/{mode}", "skipped", why))
            continue
        worst, promised, saw = max(held, key=lambda one: one[2] - one[1])
        margin = int(promised * (load_margin if name == "load" else 0.0)) + margin_bytes
        problems = moment_problems(name, predicted=promised, margin=margin, measured=saw)
        reason = f"{saw / 2**30:.2f} GiB measured, {promised / 2**30:.2f} predicted (margin {margin / 2**30:.2f})"
        results.append(Part(f"{name}/{mode}", "fail" if problems else "pass", "; ".join(problems) or reason,
                          {name: promised, "margin": margin}, {name: saw}, log=worst.log))  # fmt: skip
    return results


def find_oversized_micro_batch(required: Callable[[int], int], budget: int, *, max_rows: int = 4096) -> int | None:
    """The smallest power of two whose step needs a quarter more than `budget` bytes; None up to `max_rows`.

    Args:
        required: bytes that a micro-batch needs.
    """
    size = 1
    while size <= max_rows:
        if required(size) > 1.25 * budget:
            return size
        size *= 2
    return None
