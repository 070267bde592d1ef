"""The training trials: the toolkit's own runs, started as a user starts them, each in its own process."""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_selftest import checks
from benchmarks.gpu_selftest.material import CPU_SIZE, GPU_SIZE, ROW_KINDS, TrialSize, write_trial_rows
from benchmarks.gpu_selftest.record import Part, judged_part
from benchmarks.steps.material import write_config
from sft_play.config.load import load_config
from sft_play.launch.planning import has_eval
from sft_play.log import one_line, redact
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.machine.visible_gpus import VISIBILITY_VARIABLES
from sft_play.planner.calibration import RECORD_FILE
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.memory.estimate import LOAD_MARGIN, MARGIN_BYTES
from sft_play.planner.plan import Plan
from sft_play.process.environment import independent_environment
from sft_play.process.signals import child_environment
from sft_play.runs.folder import read_json, read_summary
from sft_play.text import GIB
from sft_play.trace.confirm import load_run_model_shape

MODES = ("qlora", "lora", "full")
EVALUATIONS = ("evaluate", "generate")
# A trial that takes longer hangs: on one H100 they take 15 to 25 s, most of it imports and loading.
TRIAL_TIMEOUT_S = 300.0
# What is measured apart from the training: the plan's name of a moment, and the summary's.
MEASURED_MOMENTS = {"load": "loading", "save": "saving", "evaluate": "evaluation"}
WARM_UP_STEPS = 3
ANSWER_TOKENS = {"cuda": 32, "cpu": 8}
OUT_OF_MEMORY = "out-of-memory"
# A driver reclaims the memory of a process a moment after it ends.
RECLAIM_S = 10.0


@dataclass(frozen=True)
class Trial:
    """Twenty steps of a run with these settings."""

    mode: str
    checkpointing: bool
    rows: str
    judged: str

    @property
    def name(self) -> str:
        checkpointing = "checkpointed" if self.checkpointing else "plain"
        return f"train/{self.mode}/{checkpointing}/{self.rows}/{self.judged}"


def all_trials() -> list[Trial]:
    """Nine trials (an orthogonal array) in which every pair of two settings' values occurs.

    Each three in a row have every mode and every kind of rows, so that a little time says something of all.
    """
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
        return GPU_SIZE if self.on_gpu else CPU_SIZE

    @property
    def cache(self) -> Path:
        """The trials' own cache, so that no earlier run corrects their predictions."""
        return self.folder / "cache"

    @property
    def record(self) -> Path:
        return self.cache / RECORD_FILE

    @property
    def run_folder(self) -> Path:
        return self.folder / "outputs" / "run"

    def write_config(self, mode: str, rows: str, **changes: Mapping[str, Any]) -> Path:
        """Write the run YAML of a trial; `changes` are settings by section (`train={...}`)."""
        size, device = self.size, "cuda" if self.on_gpu else "cpu"
        sections: dict[str, dict[str, Any]] = {
            "tuning": {"mode": mode},
            "data": {"val_path": str(self.folder / "held-out.jsonl")},
            "train": {
                "batch_size": size.micro_batch, "effective_batch_size": size.effective_batch, "max_steps": size.steps,
                "save_steps": 1000, "logging_steps": 1, "device": "auto" if self.on_gpu else "cpu",
            },
            "eval": {"steps": size.steps // 2, "max_new_tokens": ANSWER_TOKENS[device]},
            "output": {"dir": str(self.folder / "outputs"), "name": "run", "if_exists": "replace"},
        }  # fmt: skip
        if rows == "packed":
            sections["data"]["packing"] = "best_fit"
        for section, values in changes.items():
            sections[section] |= values
        model, rows_path, path = self.folder / "model", self.folder / f"{rows}.jsonl", self.folder / "run.yaml"
        return write_config(path, model=model, rows=rows_path, seq_len=size.seq_len, **sections)

    def write_trial_config(self, trial: Trial) -> Path:
        train = {"gradient_checkpointing": trial.checkpointing}
        generation = {"generate_rows": 8 if trial.judged == "generate" else 0}
        return self.write_config(trial.mode, trial.rows, train=train, eval=generation)

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
    def message(self) -> str:
        """Its error message, or the last line of its traceback, or of its output."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()] or ["no output"]
        errors = [line.split("error: ", 1)[1] for line in lines if "] error: " in line]
        last = (errors or lines)[-1]
        ending = f"not done after {self.seconds:.0f} s" if self.code is None else f"exit code {self.code}"
        return one_line(redact(f"{last} ({ending})"), limit=1200)

    @property
    def figures(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 1), "log": str(self.log)}


def run_module(
    arguments: Sequence[str], log: Path, bench: TrialBench, *, limit_s: float = TRIAL_TIMEOUT_S
) -> ProcessResult:
    """Run `python -m ARGUMENTS` to its end, its output in `log`; whatever it started ends with it."""
    environment = child_environment(independent_environment(os.environ))
    environment |= {"SFT_PLAY_CACHE": str(bench.cache), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the driver's first GPU is the first here too
    if not bench.on_gpu:
        environment |= dict.fromkeys(VISIBILITY_VARIABLES, "-1")
    command = [sys.executable, "-m", *arguments]
    began, code = time.monotonic(), None
    with log.open("wb") as out, contextlib.suppress(subprocess.TimeoutExpired):
        stdin = subprocess.DEVNULL
        code = subprocess.run(command, env=environment, stdin=stdin, stdout=out, stderr=out, timeout=limit_s).returncode
    return ProcessResult(code, log.read_text(encoding="utf-8", errors="replace"), log, time.monotonic() - began)


def train_in_process(config: Path, bench: TrialBench, log: str, *, limit_s: float = TRIAL_TIMEOUT_S) -> ProcessResult:
    words = ["sft_play", "train", "--config", str(config)]
    return run_module(words, bench.logs / f"{log}.log", bench, limit_s=limit_s)


def run_trial(trial: Trial, bench: TrialBench) -> Part:
    """Run a trial and check its peaks, its dtypes and its speed; one that does not fit by its plan is skipped."""
    bench.clean()
    config = bench.write_trial_config(trial)
    plan = plan_run(config) if bench.on_gpu else None
    if plan is not None and not plan.fits:
        return Part(trial.name, "skipped", f"the plan says that it {plan.choice.verdict}")
    result = train_in_process(config, bench, trial.name.removeprefix("train/").replace("/", "-"))
    return judge_run_folder(trial.name, bench.run_folder, result, mode=trial.mode, rows=trial.rows)


def plan_run(config: Path) -> Plan:
    """The plan of a run YAML on the first GPU, without earlier runs."""
    run_config, hardware = load_config(config).config, detect_hardware().limit_gpus(1)
    shape, evaluates = load_run_model_shape(run_config), has_eval(run_config)
    return make_plan(PlanRequest(run_config, shape, hardware, allowed_layouts=("single",), has_eval=evaluates))


def judge_run_folder(name: str, folder: Path, result: ProcessResult, *, mode: str, rows: str) -> Part:
    """The part that a run yields, from its plan and its summary."""
    if result.code != 0 or not (folder / "summary.json").is_file():
        return Part(name, "fail", result.message, **result.figures)
    predicted, measured = predicted_figures(folder), measured_figures(folder)
    problems = find_problems(predicted, measured, rows=rows) + checks.update_problems(measured["updates"], mode=mode)
    speed = f"{predicted['tokens_per_s']:,.0f}" if predicted["tokens_per_s"] else "none"
    reason = (
        f"reserved {measured['reserved'] / GIB:.2f} GiB measured, {predicted['reserved'] / GIB:.2f} predicted (margin "
        f"{predicted['margin'] / GIB:.2f}); {measured['tokens_per_s']:,.0f} tokens/s, {speed} predicted"
    )
    return judged_part(name, problems, reason, predicted=predicted, measured=measured, **result.figures)


def predicted_figures(folder: Path) -> dict[str, Any]:
    """The bytes and the speed that a run's plan.json promises."""
    plan = read_json(folder / "plan.json")
    peak, copied = plan["peak_bytes"], ("tokens_per_s", "confirmed_by_trace", "micro_batch", "grad_accum", "fits")
    allocated, reserved = peak["by_moment"]["training"]
    moments = {name: peak["moments"].get(MEASURED_MOMENTS[name]) for name in ("save", "evaluate")}
    return {
        "allocated": allocated, "reserved": reserved, "margin": peak["margin"],
        "moments": {**moments, "load": peak["load"]}, "precision": plan["precision"]["compute"],
        **{name: plan[name] for name in copied},
    }  # fmt: skip


def measured_figures(folder: Path) -> dict[str, Any]:
    """What a run's summary.json measured, and the speed of its steady steps."""
    summary = read_summary(folder)
    by_moment = summary["peak_bytes_by_moment"]
    peak = by_moment["training"]
    return {
        "allocated": peak["measured_allocated"], "reserved": peak.get("measured_rss", peak["measured_reserved"]),
        "moments": {name: by_moment.get(of, {}).get("measured_allocated") for name, of in MEASURED_MOMENTS.items()},
        "updates": summary["updates"], "evaluations": len(summary["evaluations"]),
        "tokens_per_s": steady_speed(folder),
    }  # fmt: skip


def steady_speed(folder: Path) -> float:
    """Median tokens per second of a run's steps, without the first ones, in which kernels are compiled."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if "tokens_per_s" in line]
    return float(statistics.median(line["tokens_per_s"] for line in steps[WARM_UP_STEPS:] or steps))


def find_problems(predicted: dict[str, Any], measured: dict[str, Any], *, rows: str) -> list[str]:
    """What is wrong with a run of rows of a kind: its peaks and, where the device's rates are known and the rows are
    full, as a plan assumes them, its speed."""
    is_full = rows != "unequal"
    promise = (predicted["allocated"], predicted["reserved"], predicted["margin"])
    peak = checks.Peak(*promise, measured["allocated"], measured["reserved"], exact=is_full)
    problems = checks.peak_problems(peak)
    for name, held in measured["moments"].items():
        promised = predicted["moments"][name]
        if promised is None or held is None:
            continue  # a CPU's process has one peak for the whole run
        margin = MARGIN_BYTES + (int(promised * LOAD_MARGIN) if name == "load" else 0)
        problems += checks.moment_problems(name, predicted=promised, margin=margin, measured=held)
    if is_full and predicted["tokens_per_s"]:
        problems += checks.speed_problems(predicted["tokens_per_s"], measured["tokens_per_s"])
    return problems


def run_out_of_memory(bench: TrialBench, hardware: Hardware) -> Part:
    """Give a run a micro-batch that its plan says cannot fit, let it run out of memory, and compare its message with
    the figures of the plan and the driver."""
    if hardware.pages:
        reason = "under WSL the driver moves memory to the host's and no run has to run out of it"
        return Part(OUT_OF_MEMORY, "skipped", reason)
    bench.clean()
    micro = find_oversized_micro_batch(
        lambda size: plan_run(oversized_config(bench, size)).memory.required, hardware.gpus[0].total_bytes
    )
    if micro is None:
        return Part(OUT_OF_MEMORY, "skipped", "no micro-batch up to 4,096 needs more than this GPU has")
    write_trial_rows(bench.folder, bench.size, largest_batch=micro)
    config = oversized_config(bench, micro)
    plan = plan_run(config)
    free_before = _free_bytes()
    result = train_in_process(config, bench, OUT_OF_MEMORY)
    until = time.monotonic() + RECLAIM_S
    while _free_bytes() < free_before - checks.FREE_APART and time.monotonic() < until:
        time.sleep(0.5)
    free = {"free_before": free_before, "free_after": _free_bytes()}
    predicted = {"required": plan.memory.required, "budget": plan.budget_bytes, "micro_batch": micro}
    measured = {"exit_code": result.code, "said": result.message, **free}
    problems = checks.out_of_memory_problems(result.message, exit_code=result.code, **free, **predicted)
    reason = f"micro-batch {micro} ran out as planned ({plan.memory.required / GIB:.1f} GiB), and the message is true"
    return judged_part(OUT_OF_MEMORY, problems, reason, predicted=predicted, measured=measured, **result.figures)


def oversized_config(bench: TrialBench, micro: int) -> Path:
    train = {"batch_size": micro, "effective_batch_size": micro, "max_steps": 2, "gradient_checkpointing": False}
    return bench.write_config("full", OUT_OF_MEMORY, data={"val_path": None}, train=train, eval={"steps": 0})


def find_oversized_micro_batch(required: Callable[[int], int], budget: int) -> int | None:
    """The smallest power of two to 4,096 whose step needs (`required`) a quarter more than `budget` bytes, if any."""
    return next((2**power for power in range(13) if required(2**power) > 1.25 * budget), None)


def _free_bytes() -> int:
    return detect_hardware().gpus[0].free_bytes or 0
