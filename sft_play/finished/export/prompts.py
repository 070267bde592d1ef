"""A run's prompts twice: as training made them, and as an engine makes them from the exported folder.

Training's are token ids of its own renderer. An engine has the folder's chat template and tokenizer, and the messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sft_play.data.build.splits import Split
from sft_play.data.masks.template import ChatTemplate, RenderError
from sft_play.data.sources.formats import Chat
from sft_play.errors import TokenizerError
from sft_play.finished.load import evenly_spaced, renderer_of
from sft_play.finished.run import FinishedRun
from sft_play.runs.files import read_json
from sft_play.training.checkpoints.model_saving import set_stop_tokens
from sft_play.training.measure.exact_match import EosTokenIds, stop_ids
from sft_play.training.prepare.tokenizer import load_tokenizer

CHECKED_ROWS = 32
# Keys of a message that only training reads.
_UNSENT = ("train", "weight", "loss_weight")
_TEXTS = ("The", "Once upon a time, in 1984,", "naïve café 日本語 🚀\n\n", "def f(x):\n    return x\n")


@dataclass(frozen=True)
class PairedPrompt:
    """A prompt: training's ids, and the text that an engine renders; None where the exported template refuses it."""

    ids: list[int]
    rendered: str | None
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def text(self) -> str:
        """The engine's text, empty where there is none."""
        return self.rendered or ""


class Prompts:
    """A run's prompts, and those of the folder `model`, which was merged or exported from it."""

    def __init__(self, run: FinishedRun, model: Path) -> None:
        self._run, self._model = run, model
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.config.model.trust_remote_code)
        self._trained = load_tokenizer(run.config).tokenizer
        self._renderer = renderer_of(run, self._trained)
        self.is_text = run.config.task_mode == "cpt"
        self.today = self._renderer.today
        self.end_of_turn = "" if self.is_text else self._renderer.turns().ends.end_of_turn
        """The text that ends an answer; empty where nothing does."""

    @cached_property
    def template(self) -> str | None:
        """The folder's chat template, of several the one for rows without tools."""
        given = self.tokenizer.chat_template
        return given.get("default") if isinstance(given, dict) else given

    @cached_property
    def stops(self) -> list[int]:
        """Tokens that end an answer as the run was trained; the folder's own are those of its generation config, else
        of its config."""
        configured = (read_json(self._model / name) for name in ("generation_config.json", "config.json"))
        of_folder = next((one["eos_token_id"] for one in configured if one.get("eos_token_id") is not None), None)
        return stop_tokens(self._run, self.tokenizer, of_folder)

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        given = self.tokenizer.chat_template
        named = given if isinstance(given, dict) else {"default": given} if given else {}
        texts = {key: value for key, value in self.tokenizer.special_tokens_map.items() if isinstance(value, str)}
        return {name: ChatTemplate(source, variables=texts, today=self.today) for name, source in named.items()}

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, prompt: bool = True, tools: Sequence[Any] = ()
    ) -> str:
        """The folder's chat template, on the day of the run. Raises RenderError where it refuses these messages, or
        TokenizerError where there is none."""
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise TokenizerError(f"{self._model} has no chat template")
        return template.render([dict(message) for message in messages], tools=tools, prompt=prompt)

    def of_rows(self, split: Split, count: int) -> list[PairedPrompt]:
        """Prompts of a split's rows, at most `count`, evenly spaced over them."""
        if self.is_text:
            rows = (split.rows[index]["input_ids"] for index in evenly_spaced(len(split.rows), count))
            return [self._of_text(self._trained.decode(ids[: max(1, len(ids) // 2)])) for ids in rows]
        chosen = (split.chats[index] for index in evenly_spaced(len(split.chats), count))
        return [asked for chat in chosen for asked in [self._of_chat(chat)] if asked is not None]

    def of_probes(self) -> list[PairedPrompt]:
        """Prompts that are not the run's: conversations with and without a system prompt, or texts."""
        if self.is_text:
            return [self._of_text(text) for text in _TEXTS]
        chats = (Chat("", (*turns, {"role": "assistant", "content": "."}), ()) for turns in probes())
        return [asked for chat in chats for asked in [self._of_chat(chat)] if asked is not None]

    def _of_text(self, text: str) -> PairedPrompt:
        return PairedPrompt(list(self._trained(text)["input_ids"]), text)

    def _of_chat(self, chat: Chat) -> PairedPrompt | None:
        """None where training would not take it as a prompt either, or an engine cannot."""
        prompt = self._renderer.prompt_ids(chat)
        # an engine is sent text, in which the name of a special token is the token
        if prompt is None or self._renderer.hides(chat.messages[:-1]):
            return None
        # what a client would send: without the answer, and without keys that only training reads
        messages = [{key: value for key, value in turn.items() if key not in _UNSENT} for turn in chat.messages[:-1]]
        try:
            rendered = self.render(messages, tools=chat.tools)
        except RenderError:
            rendered = None
        return PairedPrompt(prompt, rendered, messages)

    def ids_of(self, text: str) -> list[int]:
        """Ids of an engine's text by the folder's tokenizer; a chat template writes BOS itself."""
        return list(self.tokenizer(text, add_special_tokens=self.is_text)["input_ids"])

    def engine_adds_bos(self) -> bool | None:
        """Whether an engine has to put BOS before a prompt: where training's began with it and the tokenizer puts it
        there by itself. None of plain text: as the tokenizer does it."""
        if self.is_text:
            return None
        bos = self.tokenizer.bos_token_id
        added = list(self.tokenizer("a")["input_ids"])[:1] == [bos]
        return bos is not None and added and any(asked.ids[:1] == [bos] for asked in self.of_probes()[:1])


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Tokens, or characters, before the first that differs."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def probes() -> list[list[dict[str, str]]]:
    """Conversations that an engine has to get right: one to four turns, with a system prompt and without."""
    texts = ("Hello", "naïve café 日本語 🚀", "a {{ .b }} {% c %} \"d\" '''", "two\n\nlines", "1 < 2 && 3 > 2")
    conversations = []
    for turns in range(1, 5):
        asked = [
            {"role": role, "content": f"{texts[(turn + shift) % len(texts)]} {turn}"}
            for turn in range(turns)
            for shift, role in enumerate(("user", "assistant"))
        ][:-1]
        conversations += [asked, [{"role": "system", "content": "You are terse."}, *asked]]
    return conversations


def write_generation_config(run: FinishedRun, tokenizer: Any, source: Path, folder: Path) -> list[int]:
    """Write the generation config of the model in `source`, with the stop tokens of training, into `folder`; returns
    the stop tokens."""
    settings, config = read_json(source / "generation_config.json"), read_json(source / "config.json")
    stops = stop_tokens(run, tokenizer, settings.get("eos_token_id", config.get("eos_token_id")))
    set_stop_tokens(folder, stops, tokenizer.pad_token_id, source_folder=source)
    return stops


def stop_tokens(run: FinishedRun, tokenizer: Any, of_base: EosTokenIds) -> list[int]:
    """Tokens that end an answer as the run was trained: the base's own, and what ends an assistant's turn."""
    return stop_ids(run.config.task_mode, tokenizer, renderer_of(run, tokenizer), of_base)
