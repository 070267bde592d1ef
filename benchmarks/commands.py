"""The developers' commands of `sft-play` (`commands/developing.py`): what each asks of the tools here."""

from collections.abc import Callable

from sft_play.commands.request import CommandResult, Request, command_result
from sft_play.errors import ConfigError

Progress = Callable[[str], None]


def bench(request: Request, progress: Progress) -> CommandResult:
    from benchmarks.steps import bench

    compared = bench.compare(
        request.config, request.overrides, peer=request.peer,
        python=str(request.peer_python) if request.peer_python else None, steps=request.steps or bench.STEPS,
        warmup=request.warmup or bench.WARMUP, rounds=request.rounds or bench.ROUNDS, progress=progress,
    )  # fmt: skip
    return CommandResult(compared.as_json(), compared.lines())


def memory_model_score(request: Request, progress: Progress) -> CommandResult:
    if request.peaks is None:
        raise ConfigError("PEAKS= names no file; give the CSV of measured peaks: make memory-model-score PEAKS=FILE")
    from benchmarks.memory_model.score import score

    report = score(request.peaks, progress=progress)
    return CommandResult(report.as_json(), report.table_lines())


def verify_layouts(request: Request, progress: Progress) -> CommandResult:
    """Each layout's losses and weights beside those of one process; exit code 1 where one differs."""
    from benchmarks.verify import layouts

    table = layouts.verify(
        request.config if request.is_config_given else None, request.overrides, layouts=request.layouts,
        modes=request.modes, steps=request.steps or layouts.STEPS, progress=progress,
    )  # fmt: skip
    return CommandResult(table.as_json(), table.lines(), 0 if table.ok else 1)


def gpu_selftest(request: Request, progress: Progress) -> CommandResult:
    """What this machine's GPUs do, beside what is planned; exit code 2 where they differ."""
    from benchmarks.gpu_selftest.selftest import selftest

    record = selftest(request.out, minutes=request.minutes, progress=progress)
    code = 0 if record.ok else ConfigError.exit_code
    return CommandResult(record.as_json(), record.result_lines(), code, is_written_to_out=False)


def mask_score(request: Request, _: Progress) -> CommandResult:
    if request.templates is None or request.tokenizer is None:
        raise ConfigError("mask-score needs both: TEMPLATES=FOLDER (.jinja files) and TOKENIZER=FOLDER (or a hub id)")
    from benchmarks.mask_score.score import score

    return command_result(score(request.templates, request.tokenizer))


def generate(_: Request, __: Progress) -> CommandResult:
    from benchmarks.generate import generate as write

    written = write()
    return CommandResult({"ok": True, "written": written}, [f"wrote {path}" for path in written])
