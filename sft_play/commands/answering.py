"""`chat`, `infer` and `serve`: answers of a finished run: in the terminal, for a file of prompts, or over HTTP."""

from __future__ import annotations

import logging
import os
import sys

from sft_play.commands.answer import Answer, answer_of, give, refuse_place, stdout_to_stderr
from sft_play.commands.request import Request, finished_run, require_source
from sft_play.errors import ConfigError
from sft_play.finished.run import FinishedRun, next_line
from sft_play.log import one_line
from sft_play.training.prepare.quiet import quiet_libraries

logger = logging.getLogger(__name__)

_CHAT_TOKENS, _INFER_TOKENS = 512, 256


def run(request: Request) -> Answer | int:
    """Converse, answer a file, or serve."""
    if request.command == "serve":
        return _serve(request)
    if request.command == "chat":
        return _chat(request, finished_run(request))
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


def _chat(request: Request, finished: FinishedRun) -> Answer:
    quiet_libraries()
    from sft_play.finished.answer.respond import KEYS, Conversation, Responder

    with stdout_to_stderr(wanted=request.json):
        responder = Responder(finished)
        is_terminal = sys.stdin is not None and sys.stdin.isatty()

        def show(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        conversation = Conversation(
            responder,
            show,
            max_new_tokens=request.max_new_tokens or _CHAT_TOKENS,
            temperature=request.temperature or 0.0,
            system=request.system,
        )
        if is_terminal:
            show(f"{finished.folder.path.name}: {finished.config.model.name}. {KEYS}\n")
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
