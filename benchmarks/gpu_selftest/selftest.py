"""`make gpu-selftest`: every part in order, each recorded as it finishes, and the summary.

A part that crashes is a FAIL with the last line of its traceback, and the others continue. What needs a GPU, several of
them, or a package that is not installed is skipped, with the reason.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu_selftest import environment, out_of_memory, several, trials
from benchmarks.gpu_selftest.checks import update_problems
from benchmarks.gpu_selftest.material import write_trial_rows
from benchmarks.gpu_selftest.part import DEFERRED_REASON, Part, SelftestRecord, open_record
from benchmarks.gpu_selftest.report import line_of, page_lines
from benchmarks.gpu_selftest.trials import MODES, Trial, TrialBench
from sft_play.log import one_line, redact
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.planner import calibration
from sft_play.planner.memory.estimate import LOAD_MARGIN, MARGIN_BYTES
from sft_play.process import signals

logger = logging.getLogger(__name__)

OUT = Path("selftest.json")
TIME_S = {"cuda": 600.0, "cpu": 240.0}
"""Seconds, without those of several ranks, after which no further trial is started (on a GPU: beyond the first nine);
the next start with the same OUT runs them."""
TRAINING = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes")
"""Packages that a trial imports."""


@dataclass(frozen=True)
class Step:
    """A part to run. `gpus`: how many it needs; `waits`: it comes after all others; `later`: only while there is
    time."""

    name: str
    make: Callable[[], Part]
    gpus: int = 0
    packages: tuple[str, ...] = ()
    waits: bool = False
    later: bool = False


def selftest(
    out: Path | None = None,
    *,
    minutes: float | None = None,
    only: Callable[[str], bool] = lambda name: True,
    progress: Callable[[str], None] = logger.info,
) -> SelftestRecord:
    """Run every part that has not been run yet, and write them to `out` with a text report beside it.

    Args:
        minutes: no part is begun after them, whatever it is; None: only trials wait for time (TIME_S).
        only: which parts to make, by their names.

    Raises:
        ConfigError: `out` is another's file, or cannot be written; nothing has been done then.
    """
    began = time.monotonic()
    hardware = detect_hardware()
    book = open_record((out or OUT).expanduser(), hardware.as_json())
    if book.parts:
        progress(f"{book.path} holds {len(book.parts)} parts of an interrupted self-test: continuing it")
    with signals.StopSignals(signals.raise_interrupt), _bench(book, hardware) as bench:
        together_s = 0.0  # parts over several ranks have limits of their own, and take none of the trials' time
        for step in _steps(bench, hardware, book):
            if step.name in book.parts or not only(step.name):
                continue
            elapsed_s = time.monotonic() - began - (together_s if minutes is None else 0.0)
            book.add(_run(step, hardware, elapsed_s, minutes=minutes))
            if step.name.startswith(several.PREFIX):
                together_s += book.parts[step.name].seconds
            progress(line_of(book.parts[step.name]))
    for part in _drawn(book, hardware):
        if only(part.name):
            book.add(part)
            progress(line_of(part))
    book.is_done, book.seconds = True, round(time.monotonic() - began, 1)
    book.write()
    book.write_page(page_lines(book))
    return book


@contextmanager
def _bench(book: SelftestRecord, hardware: Hardware) -> Iterator[TrialBench]:
    """A folder for the trials, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="sft-play-selftest-"))
    try:
        yield TrialBench(folder, book.logs.resolve(), on_gpu=bool(hardware.gpus))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _steps(bench: TrialBench, hardware: Hardware, book: SelftestRecord) -> list[Step]:
    """Every part that runs alone: first what the others depend on, then the trials that cover every pair of
    settings."""
    torch, core = ("torch",), trials.core_trials()

    @functools.cache  # once, also where it fails
    def problem() -> str | None:
        return _make_material(bench)

    def with_material(make: Callable[[], Part]) -> Callable[[], Part]:
        def run() -> Part:
            why = problem()
            if why is not None:
                raise RuntimeError(why)
            return make()

        return run

    def trial(one: Trial) -> Step:
        make = with_material(lambda: _calibrating(trials.run_trial(one, bench), one, bench))
        return Step(one.name, make, packages=TRAINING, waits=one not in core, later=one not in core or not bench.on_gpu)

    def of_several(name: str, make: Callable[[], Part], *, gpus: int = 0) -> Step:
        return Step(f"{several.PREFIX}{name}", make, gpus=gpus, packages=torch if name == "all-reduce" else TRAINING)

    every = [trial(one) for one in trials.all_trials()]
    first = [step for step in every if not step.waits]
    return [
        Step(f"{environment.PREFIX}device", lambda: environment.device(hardware)),
        Step(f"{environment.PREFIX}compiler", lambda: environment.toolchain(bench)),
        Step(f"{environment.PREFIX}triton", lambda: environment.triton(bench), gpus=1, packages=("torch", "triton")),
        Step(f"{environment.PREFIX}nf4", lambda: environment.nf4(bench),
             packages=("torch", "bitsandbytes", "transformers", "peft", "accelerate")),
        Step(f"{environment.PREFIX}attention", lambda: environment.attention(bench, hardware),
             packages=("torch", "transformers")),
        Step(f"{environment.PREFIX}varlen", lambda: environment.varlen(bench), packages=("torch", "transformers")),
        Step(f"{environment.PREFIX}nvml", lambda: environment.nvml(bench), gpus=1, packages=torch),
        *first[: len(MODES)],
        Step(out_of_memory.NAME, with_material(lambda: out_of_memory.make(bench, hardware)), gpus=1, packages=TRAINING),
        *first[len(MODES) :],
        of_several("all-reduce", lambda: several.all_reduce(bench, hardware)),
        of_several("fsdp-qlora", with_material(lambda: several.fsdp_qlora(bench, hardware))),
        of_several("resume", with_material(
            lambda: several.resume(bench, hardware, book.parts.get(f"{several.PREFIX}fsdp-qlora")))),
        of_several("verify-layouts", lambda: several.verify_layouts(bench, hardware), gpus=2),
        *(step for step in every if step.waits),
    ]  # fmt: skip


def _make_material(bench: TrialBench) -> str | None:
    """Create the model and the rows; returns why the model cannot be created, else None."""
    log = bench.logs / "model.log"
    ended = trials.run_module(["benchmarks.gpu_selftest.probes", "model", str(bench.folder / "model")], log, bench)
    if ended.code != 0:
        return f"the trials' model cannot be built: {ended.words}, log {log}"
    write_trial_rows(bench.folder, bench.size)
    return None


def _run(step: Step, hardware: Hardware, elapsed_s: float, *, minutes: float | None = None) -> Part:
    """The part, or why it is skipped, or how it crashed."""
    why = _left_out(step, hardware, elapsed_s, minutes=minutes)
    if why is not None:
        return Part(step.name, "skipped", why)
    started = time.monotonic()
    try:
        part = step.make()
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{one_line(redact(last), limit=500)} ({Path(frame.filename).name}, line {frame.lineno})"
        part = Part(step.name, "fail", words)
    return part if part.seconds else replace(part, seconds=round(time.monotonic() - started, 1))


def _left_out(step: Step, hardware: Hardware, elapsed_s: float, *, minutes: float | None = None) -> str | None:
    """Why a part cannot be run on this machine now; None where it can."""
    there = len(several.together(hardware).gpus)
    if step.gpus == 1 and not hardware.gpus:
        return "needs a GPU"
    wants_two = step.gpus > 1 or step.name.startswith(several.PREFIX)
    if wants_two and there == 1:
        return "needs two GPUs, but there is one"
    if step.gpus > there:
        return "needs two GPUs; make verify-layouts compares layouts over CPU ranks"
    missing = [name for name in step.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed (make setup)"
    if minutes is not None:
        return DEFERRED_REASON if elapsed_s > 60 * minutes else None
    return DEFERRED_REASON if step.later and elapsed_s > TIME_S["cuda" if hardware.gpus else "cpu"] else None


def _calibrating(part: Part, trial: Trial, bench: TrialBench) -> Part:
    """Record the speed of a trial on a GPU for later plans: of full rows, as a plan assumes them. On a CPU the model is
    too small to say anything about others."""
    if bench.on_gpu and trial.rows != "unequal" and part.measured:
        recorded = calibration.load_measured_runs(bench.record)
        if recorded:
            speed = part.measured["tokens_per_s"]  # into the user's record, which the trials do not see
            calibration.add_measured_run(
                replace(recorded[-1], model=calibration.SELFTEST_MODEL, measured_tokens_per_s=speed)
            )
    return part


def _drawn(book: SelftestRecord, hardware: Hardware) -> list[Part]:
    """Parts derived from the trials: loading and saving, dtypes and what moves, the rates that plans learn."""
    parts = list(book.parts.values())
    return [
        *trials.moment_parts(parts, load_margin=LOAD_MARGIN, margin_bytes=MARGIN_BYTES),
        *(_updates(mode, parts) for mode in MODES),
        _calibration(parts, hardware),
    ]


def _updates(mode: str, parts: Sequence[Part]) -> Part:
    """Dtypes and the fraction of elements moved, in every trial of a mode."""
    name = f"updates/{mode}"
    updated = [(part, part.measured["updates"]) for part in parts
             if part.name.startswith(f"train/{mode}/") and part.measured and part.measured.get("updates")]  # fmt: skip
    if not updated:
        return Part(name, "skipped", "no trial of this mode completed")
    wrong = [(part, problem) for part, updates in updated for problem in update_problems(updates, mode=mode)]
    part, updates = next(((one, moved) for one, moved in updated if wrong and one is wrong[0][0]), updated[0])
    if wrong:
        words = "; ".join(dict.fromkeys(problem for _, problem in wrong))
        return Part(name, "fail", f"{part.name}: {words}", None, updates, log=part.log)
    least = min(updates["moved_share"] for _, updates in updated)
    stepped = " and ".join(updates["adapters"] or updates["weights"])
    states = " and ".join(updates["optimizer_states"])
    return Part(name, "pass", f"{stepped} stepped, states {states}; a step moves {least:.1%} or more", None, updates)


def _calibration(parts: Sequence[Part], hardware: Hardware) -> Part:
    """What later plans on this machine learn from the trials."""
    if not hardware.gpus:
        return Part(
            "calibration", "skipped", "needs a GPU: on a CPU the model is too small to say anything about others"
        )
    ratios = {
        mode: [
            part.measured["tokens_per_s"] / part.predicted["tokens_per_s"]
            for part in parts
            if part.name.startswith(f"train/{mode}/") and "/unequal/" not in part.name
            and part.measured and part.predicted and part.predicted["tokens_per_s"]
        ]
        for mode in MODES
    }  # fmt: skip
    if not any(ratios.values()):
        return Part("calibration", "skipped", "no trial of full rows completed, or this GPU's rates are not known")
    median = {mode: round(sorted(found)[len(found) // 2], 3) for mode, found in ratios.items() if found}
    ratios_text = ", ".join(f"{mode} {ratio:.2f}" for mode, ratio in median.items())
    record_note = f"kept in {calibration.measured_runs_path()}; make plan on this machine says so where it uses them"
    return Part("calibration", "pass", f"speeds over the roofline's: {ratios_text}; {record_note}", None, dict(median))
