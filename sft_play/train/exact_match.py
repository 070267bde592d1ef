"""Generated answers compared word for word with the reference ones.

Greedy decoding from exactly the prompt that training rows begin with; an answer ends at the end-of-turn token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.config.schema import EvalConfig
from sft_play.data.dataset import Split
from sft_play.data.render import Renderer


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, its text as shown, and the reference answer."""

    prompt_ids: list[int]
    shown: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """A question with what the model said; `right` after white space at the ends is taken off."""

    question: Question
    said: str

    @property
    def right(self) -> bool:
        """Whether the answer is the reference, word for word."""
        return self.said.strip() == self.question.answer.strip()


def questions(split: Split, renderer: Renderer, config: EvalConfig, *, max_seq_len: int) -> list[Question]:
    """Up to `eval.generate_rows` questions, evenly spaced over the split's chats that end with an answer."""
    found = []
    for chat in _spaced(split.chats, config.generate_rows):
        prompt = renderer.prompt_ids(chat)
        if prompt is None or len(prompt[0]) + 1 >= max_seq_len:
            continue
        shown = str(chat.messages[-2]["content"] or "") if len(chat.messages) > 1 else ""
        found.append(Question(prompt[0], shown, prompt[1]))
    return found


def _spaced(items: Sequence[Any], count: int) -> Iterator[Any]:
    if count >= len(items):
        yield from items
        return
    for index in range(count):
        yield items[index * len(items) // count]


def stop_ids(tokenizer: Any, model: Any, renderer: Renderer) -> list[int]:
    """Tokens that end an answer: eos, those of the generation config, and the first of each end of the template's."""
    found = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found |= set(configured) if isinstance(configured, list) else {configured}
    added = tokenizer.added_tokens_decoder
    for end in renderer.turns().habits.markers:
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        found |= set(ids[:1]) if len(ids) == 1 or ids[0] in added else set()
    return sorted(token for token in found if token is not None)


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Question],
    *,
    stop: Sequence[int],
    max_new_tokens: int,
    most_tokens: int,
    began: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """What the model answers to each question, in the order asked. The model's mode is put back afterwards.

    `most_tokens`: prompts and answers of a batch, padding counted. `began` is called before each batch.
    """
    was_training = model.training
    model.eval()
    with contextlib.ExitStack() as afterwards:
        afterwards.callback(model.train, was_training)
        afterwards.enter_context(_without_router_logits(model))
        order = sorted(range(len(asked)), key=lambda index: len(asked[index].prompt_ids))
        said: dict[int, str] = {}
        for batch in batches(order, [len(one.prompt_ids) + max_new_tokens for one in asked], most_tokens):
            began()
            texts = _generate(model, tokenizer, [asked[index].prompt_ids for index in batch], stop, max_new_tokens)
            said |= dict(zip(batch, texts, strict=True))
        return [Answer(question, said[index]) for index, question in enumerate(asked)]


def batches(order: Sequence[int], tokens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Items, in this order of growing `tokens` (of each), cut so that rows x the longest of them is at most `most`;
    an item that is longer goes alone."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * tokens[index] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@contextlib.contextmanager
def _without_router_logits(model: Any) -> Iterator[None]:
    """Experts' balance loss off: with a cache its mask and its logits differ in length (transformers 5.23)."""
    config = model.config.get_text_config()
    wanted = getattr(config, "output_router_logits", None)
    if not wanted:
        yield
        return
    config.output_router_logits = False
    try:
        yield
    finally:
        config.output_router_logits = wanted


def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], stop: Sequence[int], max_new_tokens: int
) -> list[str]:
    """Texts generated from prompts that are padded on the left to one length."""
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - longest)
    ids_BT = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made_BT = model.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT.to(model.device),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max(1, room),
        eos_token_id=list(stop),
        pad_token_id=pad,
        use_cache=True,
    )
    ends = set(stop)
    return [_text(tokenizer, row.tolist()[longest:], ends) for row in made_BT]


def _text(tokenizer: Any, tokens: list[int], ends: set[int]) -> str:
    kept = []
    for token in tokens:
        if token in ends:
            break
        kept.append(token)
    return str(tokenizer.decode(kept, skip_special_tokens=False))
