"""`eval`, `ship`, `report`, `compare`, `reproduce`, `runs`, `prune`, `chat`, `infer` and `serve`: runs that have ended
measured, judged, shown, trained again, listed and removed; and what they answer."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from sft_play.commands.answer import Answer, agreed, answer_of, give, refuse_place, stdout_to_stderr
from sft_play.commands.request import Request, finished_run, output_dir_of, require_source
from sft_play.errors import ConfigError
from sft_play.finished.listing import What, list_runs, prune, to_prune
from sft_play.finished.report.compare import PAGE, Comparison, compare
from sft_play.finished.report.record import read_record
from sft_play.finished.report.report import RunReport, report
from sft_play.finished.run import find_any, next_line, require_split
from sft_play.log import escape_control, one_line
from sft_play.runs.lookup import checked_name, run_at
from sft_play.training.prepare.quiet import quiet_libraries
from sft_play.units import gib

logger = logging.getLogger(__name__)


def run(request: Request) -> Answer | int:
    """Exit code 2 is: do not ship (ship), or a tensor differs (reproduce)."""
    if request.command == "runs":
        return answer_of(list_runs(output_dir_of(request)))
    if request.command in _OTHERS:
        return _OTHERS[request.command](request)
    if request.command in ("report", "compare"):
        return _show(request)
    if request.command == "ship" and request.replay is not None:
        from sft_play.finished.evaluate.ship_rule import replay

        return answer_of(replay(request.replay))
    with stdout_to_stderr(wanted=request.json):
        return _run_models(request)


def _run_models(request: Request) -> Answer:
    if request.data is not None:
        require_source(request.data, "DATA")
    finished = finished_run(request)
    if request.command == "reproduce":
        from sft_play.finished.reproduce import reproduce

        return answer_of(reproduce(finished))
    if request.command == "ship":
        from sft_play.finished.evaluate.ship import ROWS, ship

        return answer_of(ship(finished, rows=request.limit or ROWS, tolerance=request.tolerance))
    require_split(request.split, request.data)
    from sft_play.finished.evaluate.evaluation import evaluate_run

    evaluation = evaluate_run(
        finished,
        split=request.split,
        data=request.data,
        limit=request.limit,
        metrics=request.metrics,
        tasks=request.tasks,
        out=request.out,
        max_new_tokens=request.max_new_tokens,
    )
    return answer_of(evaluation, to_out=False)


def _show(request: Request) -> Answer:
    output = output_dir_of(request)
    written: RunReport | Comparison
    if request.command == "report":
        written = report(read_record(find_any(output, request.run)), path=request.out)
    elif not request.runs:
        raise ConfigError('RUNS= names no runs: make compare RUNS="first second" (make runs lists them)')
    else:
        folders = [find_any(output, name) for name in request.runs]
        written = compare(folders, path=request.out or folders[0].path / PAGE)
    return answer_of(written, to_out=False)


def _prune(request: Request) -> Answer:
    output = output_dir_of(request)
    if not request.runs:
        raise ConfigError("RUNS= names no run; make runs lists them: make prune RUNS='first second'")
    what: What = "checkpoints" if request.checkpoints else "run"
    chosen = to_prune([run_at(output, checked_name(name, key="RUNS")) for name in request.runs], what)
    nothing = {"ok": True, "removed": [], "freed_bytes": 0}
    if not chosen:
        return Answer(nothing, ["There are no checkpoints to remove"])
    parts = [part for of_run in chosen.values() for part in of_run.items()]
    listed = "\n".join(f"  {path} ({gib(size, digits=2)} GiB)" for path, size in parts)
    if not agreed(request, f"Remove\n{listed}\n?", refusal=f"this would remove\n{listed}"):
        return Answer(nothing, ["Nothing was removed"])
    return answer_of(prune(chosen))


# --- their answers: in the terminal, for a file of prompts, or over HTTP ----------------------------------------------


_CHAT_TOKENS, _INFER_TOKENS = 512, 256


def _infer(request: Request) -> Answer:
    if request.input is None or request.output is None:
        examples = {"INPUT=prompts.txt (or .jsonl)": request.input, "OUTPUT=answers.jsonl": request.output}
        missing = [example for example, given in examples.items() if given is None]
        raise ConfigError(f"make infer needs {' and '.join(missing)}")
    require_source(request.input, "INPUT")
    refuse_place(request.output, "OUTPUT")
    if request.output.is_dir():
        raise ConfigError(f"OUTPUT={one_line(str(request.output))} is a folder; name a file")
    finished = finished_run(request)
    quiet_libraries()
    from sft_play.finished.answer.infer import infer

    with stdout_to_stderr(wanted=request.json):
        most = request.max_new_tokens or _INFER_TOKENS
        return answer_of(infer(finished, request.input, request.output, max_new_tokens=most))


def _chat(request: Request) -> Answer:
    finished = finished_run(request)
    quiet_libraries()
    from sft_play.finished.answer.respond import KEYS, Conversation, Responder

    with stdout_to_stderr(wanted=request.json):
        responder = Responder(finished)
        is_terminal = sys.stdin is not None and sys.stdin.isatty()

        def show(text: str) -> None:
            sys.stdout.write(escape_control(text))  # the model's text, and names of the run's folder
            sys.stdout.flush()

        conversation = Conversation(
            responder,
            show,
            max_new_tokens=request.max_new_tokens or _CHAT_TOKENS,
            temperature=request.temperature or 0.0,
            system=finished.config.data.style.system if request.system is None else request.system,
        )
        if is_terminal:
            show(f"{finished.folder.path.name}: {finished.config.model.name}. {KEYS}\n")
            if conversation.system:
                show(f"(the system prompt: {conversation.system})\n")
        while not conversation.has_ended:
            try:
                # input() for its line editing; from a pipe it would write the prompt into the output
                line = input("> ") if is_terminal else next(sys.stdin, None)
            except (EOFError, KeyboardInterrupt):
                break
            if line is None:
                break
            conversation.say(line.rstrip("\n"))
        if is_terminal:
            show(f"{next_line('eval', RUN=finished.folder.path)}\n")
    return Answer({"ok": True, "run": str(finished.folder.path), "messages": conversation.messages})


def _serve(request: Request) -> int:
    """Serve. With JSON=1 (and OUT) its one object is written once the endpoint answers, and the command stays."""
    from sft_play.finished.answer import serve

    host, port = request.host or serve.DEFAULT_HOST, serve.read_port(request.port)
    service = serve.service_of(request.engine or serve.ENGINES[0], finished_run(request), host, port)
    warning = serve.warning_of(host)
    if warning is not None:
        logger.warning("%s", warning)
    with stdout_to_stderr(wanted=request.json):
        serving = service.start()
    give(answer_of(serving), request)
    with stdout_to_stderr(wanted=request.json):
        code = service.wait()
    if service.is_busy:
        # a daemon thread inside torch while the interpreter is torn down aborts the process (SIGABRT)
        logging.shutdown()
        os._exit(code)
    return code


_OTHERS: dict[str, Callable[[Request], Answer | int]] = {
    "prune": _prune, "chat": _chat, "infer": _infer, "serve": _serve,
}  # fmt: skip
