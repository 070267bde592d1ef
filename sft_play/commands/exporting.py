"""`merge`, `export` and `push`: a finished run's model for other programs, and whether it still is the trained one; and
`consolidate`: the trained weights of a run's last checkpoint, whole, as safetensors."""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from sft_play.commands.answer import CommandResult, command_result, confirm_with_user, redirect_stdout_to_stderr
from sft_play.commands.request import Request, find_request_run, request_output_dir, trusts_code
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.places import (
    EXPORT_FOLDER,
    MERGED_FOLDER,
    ExportFormat,
    Quant,
    find_gguf,
    require_export_target,
    require_mergeable,
    require_merged,
)
from sft_play.finished.export.push import plan_upload, push, require_repo_name
from sft_play.finished.run import FinishedRun
from sft_play.log import one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.runs.lookup import lock_run, resolve_run

if TYPE_CHECKING:
    from sft_play.finished.export.merge import MergeBase

_DTYPES = ("bf16", "fp16", "fp32")
_BASES = ("dequantized", "original")
_FORMATS, _QUANTS = get_args(ExportFormat), get_args(Quant)


def run_exporting(request: Request) -> CommandResult:
    """Write, compare or upload; exit code 2 where what was written is not the trained model."""
    if request.command == "consolidate":
        return _consolidate(request)
    if request.command.startswith("merge"):
        for name, value, choices in (("DTYPE", request.dtype, _DTYPES), ("BASE", request.base, _BASES)):
            if value not in (None, *choices):
                raise ConfigError(f"{name}={value} is not one of {', '.join(choices)}")
    elif request.command.startswith("export"):
        _check_export(request)
    else:
        require_repo_name(request.repo)
    finished = find_request_run(request)
    export_command = {
        "merge": _merge, "merge-test": _merge_test, "export": _export, "export-test": _export_test, "push": _push,
    }[request.command]  # fmt: skip
    with redirect_stdout_to_stderr(enabled=request.json):
        return export_command(request, finished)


def _merge(request: Request, finished: FinishedRun) -> CommandResult:
    require_mergeable(
        finished, request.base, request.out or finished.folder.path / MERGED_FOLDER, replace=request.force
    )
    from sft_play.finished.export.merge import merge_run

    base = cast("MergeBase | None", request.base)
    with lock_run(finished.folder):
        merged = merge_run(finished, dtype=request.dtype, base=base, out=request.out, replace=request.force)
    return command_result(merged, is_written_to_out=False)


def _merge_test(request: Request, finished: FinishedRun) -> CommandResult:
    require_merged(finished, request.out or finished.folder.path / MERGED_FOLDER)
    from sft_play.finished.export.check_merge import MERGE_TEST_ROWS, merge_test

    return command_result(
        merge_test(finished, path=request.out, rows=request.limit or MERGE_TEST_ROWS), is_written_to_out=False
    )


def _check_export(request: Request) -> None:
    if request.command == "export" and request.format not in _FORMATS:
        problem = "make export needs FORMAT=,"
        if request.format:
            problem = f"FORMAT={one_line(request.format)} is not"
        raise ConfigError(f"{problem} one of {', '.join(_FORMATS)}")
    if request.quant is not None and request.quant.lower() not in _QUANTS:
        raise ConfigError(f"QUANT={one_line(request.quant)} is not one of {', '.join(_QUANTS)}")
    if request.quant is not None and request.format == "vllm":
        raise ConfigError("QUANT= is for GGUFs, and FORMAT=vllm writes none (make merge DTYPE= sets its dtype)")


def _export(request: Request, finished: FinishedRun) -> CommandResult:
    require_export_target(
        request.out or finished.folder.path / EXPORT_FOLDER / str(request.format), replace=request.force
    )
    if request.llama_cpp is not None and request.format != "vllm":
        find_converter(request.llama_cpp)
    from sft_play.finished.export.export import export_run

    with lock_run(finished.folder):
        exported = export_run(
            finished,
            cast("ExportFormat", request.format),
            quant=cast("Quant | None", request.quant and request.quant.lower()),
            out=request.out,
            replace=request.force,
            llama_cpp=request.llama_cpp,
        )
    return command_result(exported, is_written_to_out=False)


def _export_test(request: Request, finished: FinishedRun) -> CommandResult:
    find_gguf(finished, request.out)
    from sft_play.finished.export.check_export import EXPORT_TEST_ROWS, export_test

    tested = export_test(finished, path=request.out, rows=request.limit or EXPORT_TEST_ROWS)
    return command_result(tested, is_written_to_out=False)


def _push(request: Request, finished: FinishedRun) -> CommandResult:
    upload = plan_upload(
        finished, request.repo, is_merged=request.merged, is_public=request.public, is_confirmed=request.yes
    )
    upload_text = upload.describe()  # shown before it is agreed to: an upload cannot be taken back
    if not confirm_with_user(request, f"{upload_text}\nUpload?", refusal=upload_text):
        return CommandResult({"ok": True, "pushed": False, "repo": upload.repo}, ["Nothing was uploaded"])
    return command_result(push(upload))


def _consolidate(request: Request) -> CommandResult:
    """Write the weights of RUN's last checkpoint, or of the checkpoint that RUN names, into OUT or the run's folder."""
    if not request.run:
        raise ConfigError("RUN= names no run; give its name or folder: make consolidate RUN=outputs/my-run")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not detect_hardware().gpus:
        set_deepspeed_to_cpu()
    run_path = Path(request.run).expanduser()
    checkpoint = run_path if run_path.name.startswith("checkpoint-") and run_path.name != request.run else None
    # what is no run is refused before torch is imported
    folder = resolve_run(request_output_dir(request), str(run_path.parents[1] if checkpoint else request.run))
    if request.out is not None and request.out.exists():
        raise RunFolderError(f"{request.out} exists; remove it, or name another place: OUT=FOLDER")
    from sft_play.training.checkpoints.consolidate import consolidate

    with redirect_stdout_to_stderr(enabled=request.json):
        is_trusted = functools.partial(trusts_code, request)
        path = consolidate(folder, checkpoint=checkpoint, out=request.out, is_trusted=is_trusted)
    return CommandResult({"ok": True, "run": str(folder.path), "path": str(path)}, is_written_to_out=False)
