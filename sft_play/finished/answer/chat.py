"""`make chat`: a conversation with a finished run in the terminal, or over lines of standard input."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.answer.respond import Responder
from sft_play.runs.files import write_text

HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · /base switches the adapter off and on · "
    "/both answers with and without it · /save FILE writes the conversation as a training row · /exit"
)


@dataclass
class Conversation:
    """The turns so far; who answers; and how answers are made.

    `show` gets text as it comes, without line ends of its own.
    """

    responder: Responder
    show: Callable[[str], None]
    max_new_tokens: int = 512
    temperature: float = 0.0
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    answered_by: list[str] = field(default_factory=list)
    """Who gave each of the answers in `messages`."""
    is_base: bool = False
    is_both: bool = False
    has_ended: bool = False

    def say(self, line: str) -> None:
        """Take a line: an answer is shown, or a command is carried out."""
        text = line.strip()
        if not text:
            return
        if text.startswith("/"):
            self._command(*text[1:].split(maxsplit=1))
            return
        asked: list[Message] = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt = self.responder.prompt_ids([*self._system(), *asked])
        except DataError as error:
            self.show(f"({error})\n")
            return
        answer = ""
        for is_base in (True, False) if self.is_both else (self.is_base,):
            if self.is_both:
                self.show("base:  " if is_base else "tuned: ")
            with self.responder.base() if is_base else nullcontext():
                answer = self.responder.stream(
                    prompt, self.show, max_new_tokens=self.max_new_tokens, temperature=self.temperature
                )
            self.show("\n")
        # with /both the trained model's, which is last
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        run = self.responder.run.folder.path.name
        self.answered_by = [*self.answered_by, f"the base of {run}" if self.is_base and not self.is_both else run]

    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _command(self, name: str = "", argument: str = "") -> None:
        if name in ("exit", "quit"):
            self.has_ended = True
        elif name == "reset":
            self.messages, self.answered_by = [], []
            self.show("(the conversation is empty)\n")
        elif name == "system":
            # answers so far were given under another system prompt
            self.system, self.messages, self.answered_by = argument or None, [], []
            self.show(f"(the system prompt is {'set' if argument else 'removed'}; the conversation is empty)\n")
        elif name in ("base", "both") and not self.responder.run.is_adapter:
            self.show("(this run trained all weights: there is no adapter to switch off)\n")
        elif name == "base":
            self.is_base = not self.is_base
            self.show(f"(the {'base without the adapter' if self.is_base else 'trained model'} answers)\n")
        elif name == "both":
            self.is_both = not self.is_both
            self.show(f"({'base and trained model answer' if self.is_both else 'one model answers'})\n")
        elif name == "save":
            self._save(argument)
        else:
            self.show(f"({HELP})\n")

    def _save(self, argument: str) -> None:
        if not argument:
            self.show("(/save FILE: name a file)\n")
            return
        path = Path(argument).expanduser()
        row: dict[str, Any] = {"messages": [*self._system(), *self.messages], "answered_by": self.answered_by}
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            write_text(path, before + json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            self.show(f"({path} cannot be written: {error.strerror})\n")
            return
        self.show(f"(added to {path})\n")
