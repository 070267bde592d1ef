"""A run's prompts, rendered in two ways: as training did, and as an engine does from the exported folder.

Training's are token ids of its own renderer. An engine has the folder's chat template, its tokenizer and the messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from sft_play.data.build.splits import DataSplit
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.data.sources.formats import Chat
from sft_play.errors import TokenizerError
from sft_play.finished.load import build_run_renderer, evenly_spaced_indices
from sft_play.finished.run import FinishedRun
from sft_play.runs.files import read_json
from sft_play.training.checkpoints.model_saving import set_stop_tokens
from sft_play.training.measure.exact_match import collect_stop_ids
from sft_play.training.prepare.tokenizer import load_tokenizer

# Keys of a message that only training reads.
_TRAINING_KEYS = ("train", "weight", "loss_weight")
_PROBE_TEXTS = ("The", "Once upon a time, in 1984,", "naïve café 日本語 🚀\n\n", "def f(x):\n    return x\n")


@dataclass(frozen=True)
class PairedPrompt:
    """A prompt: training's ids, and the text that an engine renders; None where the exported template refuses it."""

    ids: list[int]
    rendered: str | None


class EnginePrompts:
    """A run's prompts, and those of `model_folder`, which was merged or exported from it."""

    def __init__(self, run: FinishedRun, model_folder: Path) -> None:
        self._model_folder = model_folder
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_folder, trust_remote_code=run.config.model.trust_remote_code
        )
        self._training_tokenizer = load_tokenizer(run.config).tokenizer
        self._renderer = build_run_renderer(run, self._training_tokenizer)
        self.is_plain_text, self.today = run.config.task_mode == "cpt", self._renderer.today
        # Tokens that end an answer as the run was trained.
        self.stop_ids = folder_stop_ids(run, self.tokenizer, model_folder)
        # The text that ends an answer; empty where nothing does.
        self.end_of_turn = "" if self.is_plain_text else self._renderer.turn_locator().ends.end_of_turn
        templates = self.tokenizer.chat_template or {}
        sources = templates if isinstance(templates, dict) else {"default": templates}
        # The folder's chat template, of several the one for rows without tools.
        self.template: str | None = sources.get("default")
        token_texts = {key: value for key, value in self.tokenizer.special_tokens_map.items() if isinstance(value, str)}
        self._templates = {
            name: ChatTemplate(source, variables=token_texts, today=self.today) for name, source in sources.items()
        }

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The folder's chat template, on the day of the run. Raises RenderError where it refuses these messages, or
        TokenizerError where there is none."""
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise TokenizerError(f"{self._model_folder} has no chat template")
        return template.render([dict(message) for message in messages], tools=tools, with_prompt=True)

    def row_prompts(self, split: DataSplit, count: int) -> list[PairedPrompt]:
        """Prompts of a split's rows, at most `count`, evenly spaced over them."""
        if self.is_plain_text:
            rows = (split.rows[index]["input_ids"] for index in evenly_spaced_indices(len(split.rows), count))
            return [self._text_prompt(self._training_tokenizer.decode(ids[: max(1, len(ids) // 2)])) for ids in rows]
        chats = [split.chats[index] for index in evenly_spaced_indices(len(split.chats), count)]
        return list(filter(None, map(self._chat_prompt, chats)))

    def probe_prompts(self) -> list[PairedPrompt]:
        """Prompts that are not the run's: conversations with and without a system prompt, or texts."""
        if self.is_plain_text:
            return [self._text_prompt(text) for text in _PROBE_TEXTS]
        answer = {"role": "assistant", "content": "."}
        chats = [Chat("", (*turns, answer), ()) for turns in probe_conversations()]
        return list(filter(None, map(self._chat_prompt, chats)))

    def _text_prompt(self, text: str) -> PairedPrompt:
        return PairedPrompt(list(self._training_tokenizer(text)["input_ids"]), text)

    def _chat_prompt(self, chat: Chat) -> PairedPrompt | None:
        """None where training would not take it as a prompt either, or an engine cannot."""
        prompt = self._renderer.prompt_ids(chat)
        # an engine is sent text, in which the name of a special token is the token
        if prompt is None or self._renderer.hides_special_tokens(chat.messages[:-1]):
            return None
        # what a client would send: without the answer, and without keys that only training reads
        messages = [
            {key: value for key, value in turn.items() if key not in _TRAINING_KEYS} for turn in chat.messages[:-1]
        ]
        try:
            return PairedPrompt(prompt, self.render(messages, chat.tools))
        except RenderError:
            return PairedPrompt(prompt, None)

    def engine_adds_bos(self) -> bool | None:
        """Whether an engine has to put BOS before a prompt: where training's began with it and the tokenizer puts it
        there by itself. None of plain text: as the tokenizer does it."""
        bos = self.tokenizer.bos_token_id
        if self.is_plain_text:
            return None
        if bos is None or list(self.tokenizer("a")["input_ids"])[:1] != [bos]:
            return False
        return any(pair.ids[:1] == [bos] for pair in self.probe_prompts()[:1])


def probe_conversations() -> list[list[dict[str, str]]]:
    """Conversations that an engine has to get right: one to four turns, with a system prompt and without."""
    texts = ("Hello", "naïve café 日本語 🚀", "a {{ .b }} {% c %} \"d\" '''", "two\n\nlines", "1 < 2 && 3 > 2")
    conversations = []
    for turns in range(1, 5):
        conversation = [
            {"role": role, "content": f"{texts[(turn + offset) % len(texts)]} {turn}"}
            for turn in range(turns)
            for offset, role in enumerate(("user", "assistant"))
        ][:-1]
        conversations += [conversation, [{"role": "system", "content": "You are terse."}, *conversation]]
    return conversations


def write_generation_config(run: FinishedRun, tokenizer: Any, source: Path, folder: Path) -> list[int]:
    """Write the generation config of the model in `source`, with the stop tokens of training, into `folder`; returns
    the stop tokens."""
    stop_token_ids = folder_stop_ids(run, tokenizer, source)
    set_stop_tokens(folder, stop_token_ids, tokenizer.pad_token_id, source_folder=source)
    return stop_token_ids


def folder_stop_ids(run: FinishedRun, tokenizer: Any, folder: Path) -> list[int]:
    """Tokens that end an answer as the run was trained: those of the model in a folder, by its generation config or
    else its config, and what ends an assistant's turn."""
    settings, config = read_json(folder / "generation_config.json"), read_json(folder / "config.json")
    folder_eos = settings.get("eos_token_id")
    eos_token_ids = config.get("eos_token_id") if folder_eos is None else folder_eos
    return collect_stop_ids(run.config.task_mode, tokenizer, build_run_renderer(run, tokenizer), eos_token_ids)
