"""`make gpu-selftest`: every part in order, each recorded as it finishes, and the summary.

A part that crashes is a FAIL with the last line of its traceback, and the others continue. What needs a GPU, several of
them, or a package that is not installed is skipped, with the reason.
"""

import functools
import importlib.util
import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu_selftest import machine_parts, trials
from benchmarks.gpu_selftest.machine_parts import ENVIRONMENT, SEVERAL
from benchmarks.gpu_selftest.material import write_trial_rows
from benchmarks.gpu_selftest.record import DEFERRED_REASON, Part, SelftestRecord, open_record
from benchmarks.gpu_selftest.trials import MODES, Trial, TrialBench
from sft_play.log import one_line, redact
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.planner import calibration
from sft_play.process import signals

logger = logging.getLogger(__name__)

OUT = Path("selftest.json")
# Packages that a trial imports.
WITHOUT_TRL = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
TRAINING = (*WITHOUT_TRL, "trl", "datasets")


@dataclass(frozen=True)
class Step:
    """A part to run, and how many GPUs and which packages it needs."""

    name: str
    make: Callable[[], Part]
    gpus: int = 0
    packages: tuple[str, ...] = TRAINING


def selftest(
    out: Path | None = None,
    *,
    minutes: float | None = None,
    only: Callable[[str], bool] = lambda name: True,
    progress: Callable[[str], None] = logger.info,
) -> SelftestRecord:
    """Run every part that has not been run yet, and write them to `out` with a text report beside it; no part is begun
    after `minutes`. Raises ConfigError, before anything is done, if `out` is another's file or cannot be written."""
    began = time.monotonic()
    hardware = detect_hardware()
    record = open_record((out or OUT).expanduser(), hardware.as_json())
    if record.parts:
        progress(f"{record.path} holds {len(record.parts)} parts of an interrupted self-test: continuing it")
    stop_signals = signals.StopSignals(signals.raise_interrupt)
    with stop_signals, tempfile.TemporaryDirectory(prefix="sft-play-selftest-", ignore_cleanup_errors=True) as folder:
        bench = TrialBench(Path(folder), record.logs.resolve(), on_gpu=bool(hardware.gpus))
        for step in _steps(bench, hardware):
            if step.name in record.parts or not only(step.name):
                continue
            is_late = minutes is not None and time.monotonic() - began > 60 * minutes
            record.add(_run(step, hardware, is_late=is_late))
            progress(record.parts[step.name].line)
    record.is_done = True
    record.write()
    record.write_page()
    return record


def _steps(bench: TrialBench, hardware: Hardware) -> list[Step]:
    """Every part: first what the others depend on, then three trials that have every mode, then the rest."""
    torch = ("torch",)

    material_problem = functools.cache(lambda: _make_material(bench))

    def with_material(make: Callable[[], Part]) -> Callable[[], Part]:
        def run() -> Part:
            problem = material_problem()
            if problem is not None:
                raise RuntimeError(problem)
            return make()

        return run

    every = []
    for trial in trials.all_trials():
        every.append(Step(trial.name, with_material(functools.partial(_run_trial, trial, bench))))
    attention = functools.partial(machine_parts.check_attention, bench, hardware)
    return [
        Step(f"{ENVIRONMENT}device", lambda: machine_parts.check_device(hardware), packages=()),
        Step(f"{ENVIRONMENT}nf4", lambda: machine_parts.check_nf4(bench), packages=WITHOUT_TRL),
        Step(f"{ENVIRONMENT}attention", attention, packages=("torch", "transformers")),
        Step(f"{ENVIRONMENT}host", lambda: machine_parts.check_host(bench, hardware), 1, WITHOUT_TRL),
        Step(f"{ENVIRONMENT}nvml", lambda: machine_parts.check_nvml(bench), 1, torch), *every[: len(MODES)],
        Step(trials.OUT_OF_MEMORY, with_material(lambda: trials.run_out_of_memory(bench, hardware)), 1),
        *every[len(MODES) :],
        Step(f"{SEVERAL}all-reduce", lambda: machine_parts.check_all_reduce(bench, hardware), packages=torch),
        Step(f"{SEVERAL}fsdp-qlora", with_material(lambda: machine_parts.check_fsdp_qlora(bench, hardware))),
        Step(f"{SEVERAL}verify-layouts", lambda: machine_parts.check_layouts(bench), 2),
    ]  # fmt: skip


def _make_material(bench: TrialBench) -> str | None:
    """Create the model and the rows; returns why the model cannot be created, else None."""
    log = bench.logs / "model.log"
    arguments = ["benchmarks.gpu_selftest.probes", "model", str(bench.folder / "model")]
    result = trials.run_module(arguments, log, bench)
    if result.code != 0:
        return f"the trials' model cannot be built: {result.message}, log {log}"
    write_trial_rows(bench.folder, bench.size)
    return None


def _run_trial(trial: Trial, bench: TrialBench) -> Part:
    """Run a trial, and record its speed for later plans of this machine.

    Of full rows on a GPU, as a plan assumes them: on a CPU the model is too small to say anything about others.
    """
    part = trials.run_trial(trial, bench)
    if bench.on_gpu and trial.rows != "unequal" and part.measured:
        runs = calibration.load_measured_runs(bench.record)  # the trial's own record
        if runs:
            speed = part.measured["tokens_per_s"]
            run = replace(runs[-1], model=calibration.SELFTEST_MODEL, measured_tokens_per_s=speed)
            calibration.add_measured_run(run)  # the user's, which the trials do not see
    return part


def _run(step: Step, hardware: Hardware, *, is_late: bool = False) -> Part:
    """The part, or why it is skipped, or how it crashed."""
    reason = _skip_reason(step, hardware) or (DEFERRED_REASON if is_late else None)
    if reason is not None:
        return Part(step.name, "skipped", reason)
    started = time.monotonic()
    try:
        part = step.make()
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{one_line(redact(last), limit=500)} ({Path(frame.filename).name}, line {frame.lineno})"
        part = Part(step.name, "fail", reason)
    return part if part.seconds else replace(part, seconds=round(time.monotonic() - started, 1))


def _skip_reason(step: Step, hardware: Hardware) -> str | None:
    count = len(machine_parts.joint_hardware(hardware).gpus)
    if step.gpus == 1 and not hardware.gpus:
        return "needs a GPU"
    if (step.gpus > 1 or step.name.startswith(SEVERAL)) and count == 1:
        return "needs two GPUs, but there is one"
    if step.gpus > count:
        return "needs two GPUs; make verify-layouts compares layouts over CPU ranks"
    missing = [name for name in step.packages if importlib.util.find_spec(name) is None]
    return f"needs packages that are not installed (make setup): {', '.join(missing)}" if missing else None
