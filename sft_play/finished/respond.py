"""Answers of a finished run's model: prompts as training rendered them, ended where training taught
answers to end; one by one, in batches, or in the conversation of `make chat`.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from sft_play.data.sources.formats import Chat
from sft_play.data.sources.messages import Message
from sft_play.errors import DataError
from sft_play.finished.load import build_run_renderer, compute_dtype, load_trained_model
from sft_play.finished.run import FinishedRun
from sft_play.process.waiting import report_wait
from sft_play.training.measure.exact_match import (
    GeneratedAnswer,
    Question,
    collect_stop_ids,
    configured_eos_token_ids,
    generate_answers,
)
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What tokens decode to that end inside a character.
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def _training_autocast(run: FinishedRun, model: Any) -> contextlib.AbstractContextManager[Any]:
    """Autocast for a run that trained all weights, as in training; none for adapters: their base has its precision."""
    dtype = compute_dtype(run)
    is_mixed = not run.is_adapter and dtype != torch.float32
    return torch.autocast(model.device.type, dtype=dtype) if is_mixed else contextlib.nullcontext()


class Responder:
    """A run's model, loaded as it was trained where none is given, with the tokenizer and template of the run."""

    def __init__(self, run: FinishedRun, model: Any = None) -> None:
        self.run = run
        self.tokenizer = load_tokenizer(run.config).tokenizer
        self.model = load_trained_model(run) if model is None else model
        self.renderer = build_run_renderer(run, self.tokenizer)
        self._is_plain_text = run.config.task_mode == "cpt"
        self.stop_ids = collect_stop_ids(
            run.config.task_mode, self.tokenizer, self.renderer, configured_eos_token_ids(self.model)
        )

    def prompt_ids(
        self, messages: Sequence[Message], tools: tuple[Any, ...] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokens of a conversation that ends before the assistant's turn: those that training put before an answer;
        raises DataError where the chat template refuses these messages."""
        if self._is_plain_text:
            text = "\n".join(str(message["content"]) for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        turns = (*messages, {"role": "assistant", "content": "."})  # the answer itself is not rendered
        prompt = self.renderer.prompt_ids(Chat("", turns, tools, template_kwargs=template_kwargs or {}))
        if prompt is None:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(f"the chat template of {self.run.folder.path} cannot render turns of these roles: {roles}")
        return prompt

    def answers(
        self, questions: Sequence[Question], *, max_new_tokens: int, model_label: str = "trained model"
    ) -> list[GeneratedAnswer]:
        """Greedy answers, in the order asked, in batches of a token budget and in the precision of the run's own
        evaluation; where memory runs out the batches are halved. `model_label` names the model in log lines."""

        def try_batch(generate: Callable[[], T], rows: int) -> T | None:
            try:
                return generate()
            except RuntimeError as error:
                if not should_reduce_batch_size(error) or rows == 1:
                    raise
            logger.warning("Out of memory: continuing with at most %s rows a batch", f"{rows // 2:,}")
            free_memory()
            return None

        total = len(questions)
        with (
            report_wait(f"Answers by the {model_label}", unit="questions", count_total=lambda: total) as progress,
            _training_autocast(self.run, self.model),
        ):
            answers: list[GeneratedAnswer] = generate_answers(
                self.model, self.tokenizer, questions, stop_ids=self.stop_ids, max_new_tokens=max_new_tokens,
                max_tokens=self.run.plan().answer_tokens, on_batch_end=progress.add, try_batch=try_batch,
            )  # fmt: skip
        return answers

    def answer_texts(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[str]:
        """The texts of greedy answers to prompts."""
        questions = [Question(ids, "", "") for ids in prompts]
        return [answer.text for answer in self.answers(questions, max_new_tokens=max_new_tokens)]

    @torch.no_grad()
    def stream(
        self, prompt_ids: list[int], show: Callable[[str], None], *, max_new_tokens: int, temperature: float = 0.0
    ) -> str:
        """One answer, of which each piece of text is shown as it comes; greedy at temperature 0. Ctrl-C ends it."""
        streamer = _TextStreamer(self.tokenizer, self.stop_ids, show)
        # without what a base's generation config sets for sampling, of which transformers would warn
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature}
        ids_BT = torch.tensor([prompt_ids], device=self.model.device)
        with contextlib.suppress(KeyboardInterrupt), _training_autocast(self.run, self.model):
            self.model.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=max_new_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                streamer=streamer,
                **sampling,
            )
        streamer.end()
        return streamer.text


class _TextStreamer:
    """Shows text while tokens come (transformers' protocol: `put` gets the prompt first, then each token)."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], show: Callable[[str], None]) -> None:
        self._tokenizer, self._stop_ids, self._show = tokenizer, set(stop_ids), show
        self._ids: list[int] | None = None
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        self._ids += [token for token in value.flatten().tolist() if token not in self._stop_ids]
        self.end(is_over=False)

    def end(self, *, is_over: bool = True) -> None:
        """Show what has come; what ends inside a character only once all of it is there."""
        # all of them again: what a token spells depends on those before it (bytes of one character, leading spaces)
        text = str(self._tokenizer.decode(self._ids or [], skip_special_tokens=False))
        if text != self.text and (is_over or not text.endswith(_INCOMPLETE_CHARACTER)):
            self._show(text[len(self.text) :])
            self.text = text


CHAT_HELP = (
    "/reset forgets the conversation · /system TEXT sets the system prompt · /base switches the adapter off and on · "
    "/both answers with and without it · /exit"
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
    uses_base: bool = False
    compares_base: bool = False
    has_ended: bool = False

    def handle_line(self, line: str) -> None:
        """Take a line: an answer is shown, or a command is carried out."""
        text = line.strip()
        if not text:
            return
        if text.startswith("/"):
            self._run_command(*text[1:].split(maxsplit=1))
            return
        conversation: list[Message] = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt_ids = self.responder.prompt_ids([*self._system(), *conversation])
        except DataError as error:
            self.show(f"({error})\n")
            return
        answer = ""
        answering_base = (True, False) if self.compares_base else (self.uses_base,)
        for is_base in answering_base:
            if self.compares_base:
                self.show("base:  " if is_base else "tuned: ")
            with self.responder.model.disable_adapter() if is_base else contextlib.nullcontext():
                answer = self.responder.stream(
                    prompt_ids, self.show, max_new_tokens=self.max_new_tokens, temperature=self.temperature
                )
            self.show("\n")
        # with /both the trained model's, which is last
        self.messages = [*conversation, {"role": "assistant", "content": answer}]

    def _system(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _run_command(self, name: str = "", argument: str = "") -> None:
        reply = CHAT_HELP
        if name in ("exit", "quit"):
            self.has_ended = True
            return
        if name == "reset":
            self.messages = []
            reply = "the conversation is empty"
        elif name == "system":
            # answers so far were given under another system prompt
            self.system, self.messages = argument or None, []
            reply = f"the system prompt is {'set' if argument else 'removed'}; the conversation is empty"
        elif name in ("base", "both") and not self.responder.run.is_adapter:
            reply = "this run trained all weights: there is no adapter to switch off"
        elif name == "base":
            self.uses_base = not self.uses_base
            reply = f"the {'base without the adapter' if self.uses_base else 'trained model'} answers"
        elif name == "both":
            self.compares_base = not self.compares_base
            reply = "base and trained model answer" if self.compares_base else "one model answers"
        self.show(f"({reply})\n")
