"""Runs that have ended. `eval`, `ship`, `report`, `compare`, `reproduce`, `runs`, `prune`, `chat`,
`infer` and `serve`: measured, judged, shown, trained again, listed and removed; and what they
answer. `merge`, `export` and `push`: their model for other programs, and whether it still is the
trained one; `consolidate`: the trained weights of a run's last checkpoint, whole, as
safetensors."""

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

from sft_play.commands.request import (
    CommandResult,
    Request,
    command_result,
    confirm_with_user,
    find_request_run,
    redirect_stdout_to_stderr,
    request_output_dir,
    require_source,
    require_writable_out,
    trusts_code,
    write_result,
)
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.push import plan_upload, push, require_repo_name
from sft_play.finished.listing import list_runs, prune, select_prunable
from sft_play.finished.report import compare_runs, read_record, write_report
from sft_play.finished.run import (
    EXPORT_FOLDER,
    MERGED_FOLDER,
    ExportFormat,
    MergeBase,
    Quant,
    find_gguf,
    find_run_folder,
    next_command_line,
    require_export_target,
    require_mergeable,
    require_merged,
    require_split,
)
from sft_play.log import escape_control, one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.machine.network import is_local
from sft_play.process.environment import set_deepspeed_to_cpu
from sft_play.process.waiting import importing, report_wait
from sft_play.runs.lookup import check_run_name, lock_run, open_run, resolve_run
from sft_play.text import format_gib
from sft_play.training.prepare.library_messages import quiet_libraries

logger = logging.getLogger(__name__)


def run_finished_runs(request: Request) -> CommandResult | int:
    """Run a command on finished runs. Exit code 2: do not ship (ship), a tensor differs
    (reproduce), or what was written is not the trained model (merge, export)."""
    if request.command == "serve":
        return _serve(request)
    with redirect_stdout_to_stderr(enabled=request.json):
        return _COMMAND_FUNCTIONS[request.command](request)


def _eval(request: Request) -> CommandResult:
    require_split(request.split, request.data)
    if request.data is not None:
        require_source(request.data, "DATA")
    finished = find_request_run(request)
    with importing():
        from sft_play.finished.evaluation import evaluate_run

    return command_result(
        evaluate_run(
            finished,
            split=request.split,
            data=request.data,
            limit=request.limit,
            metrics=request.metrics,
            tasks=request.tasks,
            out=request.out,
            max_new_tokens=request.max_new_tokens,
        ),
        is_written_to_out=False,
    )


def _ship(request: Request) -> CommandResult:
    from sft_play.finished.ship import SHIP_ROWS, refuse_few_rows, replay_verdict

    if request.replay is not None:
        return command_result(replay_verdict(request.replay))
    finished = find_request_run(request)
    max_rows = request.limit or SHIP_ROWS
    if refused := refuse_few_rows(finished, max_rows):
        return command_result(refused)
    with importing():
        from sft_play.finished.evaluation import judge_run

    return command_result(judge_run(finished, max_rows=max_rows, tolerance=request.tolerance))


def _report(request: Request) -> CommandResult:
    folder = find_run_folder(request_output_dir(request), request.run)
    return command_result(
        write_report(read_record(folder), path=request.out), is_written_to_out=False
    )


def _compare(request: Request) -> CommandResult:
    output = request_output_dir(request)
    return command_result(
        compare_runs([find_run_folder(output, name) for name in request.runs], path=request.out),
        is_written_to_out=False,
    )


def _reproduce(request: Request) -> CommandResult:
    finished = find_request_run(request)
    from sft_play.finished.reproduce import reproduce

    return command_result(reproduce(finished))


def _runs(request: Request) -> CommandResult:
    return command_result(list_runs(request_output_dir(request)))


def _prune(request: Request) -> CommandResult:
    output = request_output_dir(request)
    if not request.runs:
        raise ConfigError(
            "RUNS= names no run; make runs lists them: make prune RUNS='first second'"
        )
    removable = select_prunable(
        [open_run(output, check_run_name(name, key="RUNS")) for name in request.runs],
        "checkpoints" if request.checkpoints else "run",
    )
    nothing_removed = {"ok": True, "removed": [], "freed_bytes": 0}
    if not removable:
        return CommandResult(nothing_removed, ["There are no checkpoints to remove"])
    parts_text = "\n".join(
        f"  {path} ({format_gib(size, digits=2)} GiB)"
        for parts in removable.values()
        for path, size in parts.items()
    )
    if not confirm_with_user(
        request, f"Remove\n{parts_text}\n?", refusal=f"this would remove\n{parts_text}"
    ):
        return CommandResult(nothing_removed, ["Nothing was removed"])
    return command_result(prune(removable))


# --- their answers: in the terminal, for a file of prompts, or over HTTP --------------------------


def _infer(request: Request) -> CommandResult:
    if request.input is None or request.output is None:
        raise ConfigError("make infer needs INPUT=prompts.txt (or .jsonl) and OUTPUT=answers.jsonl")
    require_source(request.input, "INPUT")
    require_writable_out(request.output, "OUTPUT")
    if request.output.is_dir():
        raise ConfigError(f"OUTPUT={one_line(str(request.output))} is a folder; name a file")
    finished = find_request_run(request)
    quiet_libraries()
    with importing():
        from sft_play.finished.respond import infer

    return command_result(
        infer(finished, request.input, request.output, max_new_tokens=request.max_new_tokens or 256)
    )


def _chat(request: Request) -> CommandResult:
    finished = find_request_run(request)
    quiet_libraries()
    with importing():
        from sft_play.finished.respond import CHAT_HELP, Conversation, Responder

    is_terminal = sys.stdin is not None and sys.stdin.isatty()

    def show(text: str) -> None:
        sys.stdout.write(escape_control(text))  # the model's text, and names of the run's folder
        sys.stdout.flush()

    with report_wait("Loading the run"):
        responder = Responder(finished)
    conversation = Conversation(
        responder,
        show,
        max_new_tokens=request.max_new_tokens or 512,
        temperature=request.temperature or 0.0,
        system=finished.config.data.style.system if request.system is None else request.system,
    )
    if is_terminal:
        show(f"{finished.folder.path.name}: {finished.config.model.name}. {CHAT_HELP}\n")
        if conversation.system:
            show(f"(the system prompt: {conversation.system})\n")
    while not conversation.has_ended:
        try:
            # input() for its line editing; from a pipe it would write the prompt into the output
            line = input("> ") if is_terminal else next(sys.stdin)
        except (EOFError, KeyboardInterrupt, StopIteration):
            break
        conversation.handle_line(line.rstrip("\n"))
    if is_terminal:
        show(f"{next_command_line('eval', RUN=finished.folder.path)}\n")
    return CommandResult(
        {"ok": True, "run": str(finished.folder.path), "messages": conversation.messages}
    )


def _serve(request: Request) -> int:
    """Serve. With JSON=1 (and OUT) its one object is written once the endpoint answers, and the
    command stays."""
    from sft_play.finished import serve

    host, port = request.host or serve.DEFAULT_HOST, serve.parse_port(request.port)
    service = serve.create_service(
        request.engine or serve.SERVING_ENGINES[0], find_request_run(request), host, port
    )
    if not is_local(host):
        logger.warning(
            "HOST=%s: there is no password; to keep the model to yourself,"
            " use an ssh tunnel instead",
            one_line(host),
        )
    with redirect_stdout_to_stderr(enabled=request.json), report_wait("Starting to serve"):
        serving = service.start()
    write_result(command_result(serving), request)
    with redirect_stdout_to_stderr(enabled=request.json):
        return service.wait()


# --- their model for other programs ---------------------------------------------------------------

_FORMATS, _QUANTS = get_args(ExportFormat), get_args(Quant)


def _merge(request: Request) -> CommandResult:
    for name, value, choices in (
        ("DTYPE", request.dtype, ("bf16", "fp16", "fp32")),
        ("BASE", request.base, get_args(MergeBase)),
    ):
        if value not in (None, *choices):
            raise ConfigError(f"{name}={value} is not one of {', '.join(choices)}")
    finished = find_request_run(request)
    require_mergeable(
        finished,
        request.base,
        request.out or finished.folder.path / MERGED_FOLDER,
        replace=request.force,
    )
    with importing():
        from sft_play.finished.export.merge import merge_run

    with lock_run(finished.folder):
        merged = merge_run(
            finished,
            dtype=request.dtype,
            base=cast("MergeBase | None", request.base),
            out=request.out,
            replace=request.force,
        )
    return command_result(merged, is_written_to_out=False)


def _merge_test(request: Request) -> CommandResult:
    finished = find_request_run(request)
    require_merged(finished, request.out or finished.folder.path / MERGED_FOLDER)
    with importing():
        from sft_play.finished.export.checks import MERGE_TEST_ROWS, merge_test

    return command_result(
        merge_test(finished, path=request.out, rows=request.limit or MERGE_TEST_ROWS),
        is_written_to_out=False,
    )


def _export(request: Request) -> CommandResult:
    if request.format not in _FORMATS:
        format_text = (
            f"FORMAT={one_line(request.format)} is not"
            if request.format
            else "make export needs FORMAT=,"
        )
        raise ConfigError(f"{format_text} one of {', '.join(_FORMATS)}")
    if request.quant is not None and request.quant.lower() not in _QUANTS:
        raise ConfigError(f"QUANT={one_line(request.quant)} is not one of {', '.join(_QUANTS)}")
    if request.quant is not None and request.format == "vllm":
        raise ConfigError(
            "QUANT= is for GGUFs, and FORMAT=vllm writes none (make merge DTYPE= sets its dtype)"
        )
    finished = find_request_run(request)
    require_export_target(
        request.out or finished.folder.path / EXPORT_FOLDER / str(request.format),
        replace=request.force,
    )
    if request.llama_cpp is not None and request.format != "vllm":
        find_converter(request.llama_cpp)
    with importing():
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


def _export_test(request: Request) -> CommandResult:
    finished = find_request_run(request)
    find_gguf(finished, request.out)
    with importing():
        from sft_play.finished.export.checks import EXPORT_TEST_ROWS, export_test

    return command_result(
        export_test(finished, path=request.out, rows=request.limit or EXPORT_TEST_ROWS),
        is_written_to_out=False,
    )


def _push(request: Request) -> CommandResult:
    repo = require_repo_name(request.repo)
    upload = plan_upload(
        find_request_run(request),
        repo,
        is_merged=request.merged,
        is_public=request.public,
        is_confirmed=request.yes,
    )
    upload_text = upload.describe()  # shown before it is agreed to: an upload cannot be taken back
    if not confirm_with_user(request, f"{upload_text}\nUpload?", refusal=upload_text):
        return CommandResult(
            {"ok": True, "pushed": False, "repo": upload.repo}, ["Nothing was uploaded"]
        )
    return command_result(push(upload))


def _consolidate(request: Request) -> CommandResult:
    """Write the weights of RUN's last checkpoint, or of the checkpoint that RUN names, into OUT or
    the run's folder."""
    if not request.run:
        raise ConfigError(
            "RUN= names no run; give its name or folder: make consolidate RUN=outputs/my-run"
        )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not detect_hardware().gpus:
        set_deepspeed_to_cpu()
    run_path = Path(request.run).expanduser()
    checkpoint = (
        run_path
        if run_path.name.startswith("checkpoint-") and run_path.name != request.run
        else None
    )
    # what is no run is refused before torch is imported
    folder = resolve_run(
        request_output_dir(request), str(run_path.parents[1] if checkpoint else request.run)
    )
    if request.out is not None and request.out.exists():
        raise RunFolderError(f"{request.out} exists; remove it, or name another place: OUT=FOLDER")
    from sft_play.training.checkpoints.last_checkpoint import consolidate

    path = consolidate(
        folder,
        checkpoint=checkpoint,
        out=request.out,
        is_trusted=functools.partial(trusts_code, request),
    )
    return CommandResult(
        {"ok": True, "run": str(folder.path), "path": str(path)}, is_written_to_out=False
    )


_COMMAND_FUNCTIONS: dict[str, Callable[[Request], CommandResult]] = {
    "chat": _chat, "compare": _compare, "consolidate": _consolidate, "eval": _eval,
    "export": _export, "export-test": _export_test, "infer": _infer, "merge": _merge,
    "merge-test": _merge_test, "prune": _prune, "push": _push, "report": _report,
    "reproduce": _reproduce, "runs": _runs, "ship": _ship,
}  # fmt: skip
