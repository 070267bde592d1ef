"""Answers of a finished run's model: prompts as training rendered them, ended where training taught answers to end; one
by one, in batches, or in the conversation of `make chat`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from sft_play.data.sources.formats import Chat
from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.evaluate.score import compute_dtype
from sft_play.finished.load import load_as_trained, renderer_of
from sft_play.finished.run import FinishedRun
from sft_play.runs.files import write_text
from sft_play.training.measure.exact_match import (
    GeneratedAnswer,
    Question,
    configured_eos_token_ids,
    generate_answers,
    stop_ids,
)
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# Questions that are answered before the next line on how far it is.
_AT_ONCE = 256
# What tokens decode to that end inside a character.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def _as_trained(run: FinishedRun, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Whole weights trained under autocast, and so they answer; an adapter's base has the precision of training."""
    compute = compute_dtype(run)
    is_mixed = not run.is_adapter and compute != torch.float32
    return torch.autocast(model.device.type, dtype=compute) if is_mixed else contextlib.nullcontext()


class Responder:
    """A run's model, loaded as it was trained where none is given, with the tokenizer and template of the run."""

    def __init__(self, run: FinishedRun, model: Any = None) -> None:
        self.run = run
        self.tokenizer = load_tokenizer(run.config).tokenizer
        self.model = load_as_trained(run) if model is None else model
        self.renderer = renderer_of(run, self.tokenizer)
        self._is_text = run.config.task_mode == "cpt"
        self.stop = stop_ids(run.config.task_mode, self.tokenizer, self.renderer, configured_eos_token_ids(self.model))

    def prompt_ids(
        self, messages: Sequence[Message], tools: tuple[Any, ...] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of a conversation that ends before the assistant's turn: those that training put before an answer;
        raises DataError where the chat template refuses these messages."""
        if self._is_text:
            text = "\n".join(str(message["content"]) for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        turns = (*messages, {"role": "assistant", "content": "."})  # the answer itself is not rendered
        prompt = self.renderer.prompt_ids(Chat("", turns, tools, template_kwargs=template_kwargs or {}))
        if prompt is None:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(f"the chat template of {self.run.folder.path} cannot render turns of these roles: {roles}")
        return prompt

    def answers(self, asked: Sequence[Question], *, max_new_tokens: int, whose: str | None = None) -> list[GeneratedAnswer]:
        """Greedy answers, in the order asked, in batches of a token budget and in the precision of the run's own
        evaluation; where memory runs out the batches are halved. `whose` names the model in lines on how far it is."""
        most = self.run.plan().answer_tokens
        given: list[GeneratedAnswer] = []
        while len(given) < len(asked):
            chunk = asked[len(given) : len(given) + _AT_ONCE]
            try:
                with _as_trained(self.run, self.model):
                    given += generate_answers(
                        self.model, self.tokenizer, chunk, stop_tokens=self.stop, max_new_tokens=max_new_tokens,
                        max_tokens=most,
                    )  # fmt: skip
            except RuntimeError as error:
                longest = max(len(one.prompt_ids) for one in chunk) + max_new_tokens  # a batch of one cannot be halved
                if not should_reduce_batch_size(error) or most <= longest:
                    raise
                most //= 2
                logger.warning("Out of memory: continuing with at most %s tokens a batch", f"{most:,}")
                free_memory()
                continue
            if whose is not None and len(asked) > _AT_ONCE:
                logger.info("Answered by the %s: %s of %s", whose, f"{len(given):,}", f"{len(asked):,}")
        return given

    def answer_all(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        """The texts of greedy answers to prompts."""
        asked = [Question(ids, "", "") for ids in prompts]
        return [answer.text for answer in self.answers(asked, max_new_tokens=max_new_tokens)]

    @torch.no_grad()
    def stream(
        self, prompt: list[int], show: Callable[[str], None], *, max_new_tokens: int, temperature: float = 0.0
    ) -> str:
        """One answer, of which each piece of text is shown as it comes; greedy at temperature 0. Ctrl-C ends it."""
        streamer = _Streamer(self.tokenizer, self.stop, show)
        # greedy without what a base's generation config sets for sampling, of which transformers would warn
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else greedy
        ids_BT = torch.tensor([prompt], device=self.model.device)
        with contextlib.suppress(KeyboardInterrupt), _as_trained(self.run, self.model):
            self.model.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=max_new_tokens,
                eos_token_id=self.stop,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                streamer=streamer,
                **sampling,
            )
        streamer.end()
        return streamer.text


class _Streamer:
    """Shows text while tokens come (transformers' protocol: `put` gets the prompt first, then each token)."""

    def __init__(self, tokenizer: Any, stop: Sequence[int], show: Callable[[str], None]) -> None:
        self._tokenizer, self._stop, self._show = tokenizer, set(stop), show
        self._ids: list[int] = []
        self._is_prompt = True
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._ids += [token for token in value.flatten().tolist() if token not in self._stop]
        self.end(is_over=False)

    def end(self, *, is_over: bool = True) -> None:
        """Show what has come; what ends inside a character only once all of it is there."""
        # all of them again: what a token spells depends on those before it (bytes of one character, leading spaces)
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=False))
        if text != self.text and (is_over or not text.endswith(_UNFINISHED)):
            self._show(text[len(self.text) :])
            self.text = text


KEYS = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · /base switches the adapter off and on · "
    "/both answers with and without it · /save FILE writes the conversation as a training row · /exit"
)


@dataclass
class Conversation:
    """The turns so far; who answers; and how. `show` gets text as it comes, without line ends of its own."""

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
            with self.responder.model.disable_adapter() if is_base else contextlib.nullcontext():
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
            self.show(f"({KEYS})\n")

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
