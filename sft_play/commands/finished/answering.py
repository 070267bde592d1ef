"""`chat` and `infer`: answers of a finished run, in the terminal or for a file of prompts."""

from __future__ import annotations

import sys

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.machine import finished_run
from sft_play.commands.request import Request
from sft_play.errors import ConfigError
from sft_play.finished.run import FinishedRun, next_line
from sft_play.training.prepare.quiet import quiet_libraries

HELP = {
    "chat": "talk to RUN in the terminal, with the adapter, without it, or both side by side",
    "infer": "answer every prompt of INPUT with RUN's model into OUTPUT, resumed where it stopped",
}
_CHAT_TOKENS, _INFER_TOKENS = 512, 256


def run(request: Request) -> Answer | int:
    """Converse, or answer a file."""
    if request.command == "infer":
        examples = {"INPUT=prompts.txt (or .jsonl)": request.input, "OUTPUT=answers.jsonl": request.output}
        missing = [example for example, given in examples.items() if given is None]
        if missing:
            raise ConfigError(f"make infer needs {' and '.join(missing)}")
    finished = finished_run(request)
    quiet_libraries()
    if request.command == "chat":
        return _chat(request, finished)
    from sft_play.finished.answer.infer import infer

    assert request.input is not None
    assert request.output is not None
    with stdout_to_stderr(wanted=request.json):
        answered = infer(
            finished, request.input, request.output, max_new_tokens=request.max_new_tokens or _INFER_TOKENS
        )
    return answer_of(answered)


def _chat(request: Request, finished: FinishedRun) -> Answer:
    from sft_play.finished.answer.chat import HELP as KEYS
    from sft_play.finished.answer.chat import Conversation
    from sft_play.finished.answer.respond import Responder

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
