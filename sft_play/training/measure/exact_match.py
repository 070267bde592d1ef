"""Generated answers, compared word for word with what training teaches to write behind the same prompt; greedy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.data.build.splits import Split
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.formats import Chat


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, its text as shown, and the reference: the answer that training teaches behind it."""

    prompt_ids: list[int]
    shown: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """A question with the text that the model generated; `ids`: its tokens, with the one that ended it."""

    question: Question
    text: str
    ids: tuple[int, ...] = ()

    @property
    def right(self) -> bool:
        """Whether the answer is the reference, word for word; white space at both ends does not count."""
        return self.text.strip() == self.question.answer.strip()


def questions(split: Split, renderer: Renderer, tokenizer: Any, *, most: int) -> list[Question]:
    """At most so many questions, evenly spaced over the split's chats."""
    count = min(most, len(split.chats))
    chats = [split.chats[index * len(split.chats) // count] for index in range(count)]
    return [question for question in questions_of(chats, renderer, tokenizer) if question is not None]


def questions_of(chats: Sequence[Chat], renderer: Renderer, tokenizer: Any) -> list[Question | None]:
    """The question of each chat's last answer. None where training teaches no answer behind the chat's prompt,
    max_seq_len leaves no room for one, or a token that ends an answer stands inside it."""
    # without the model's generation config: in training the model is not loaded yet, and these end every trained turn
    stop = stop_ids("sft", tokenizer, renderer, None) if chats else []

    def question_of(chat: Chat) -> Question | None:
        ids = renderer.question_ids(chat)
        if ids is None or len(ids[0]) + 1 >= renderer.max_seq_len:  # room for a token and the one that ends it
            return None
        answer = text_of_answer(tokenizer, ids[1], stop)
        whole = tokenizer.decode([token for token in ids[1] if token not in stop], skip_special_tokens=False)
        if not answer.strip() or answer.strip() != whole.strip():  # gpt-oss: `<|end|>` ends think text, and turns too
            return None
        return Question(ids[0], str(chat.messages[-2]["content"] or "") if len(chat.messages) > 1 else "", answer)

    return [question_of(chat) for chat in chats]


def text_of_answer(tokenizer: Any, ids: Sequence[int], stop: Sequence[int]) -> str:
    """The text of an answer's tokens, special ones included, up to the one that ends it."""
    written = itertools.takewhile(lambda token: token not in stop, ids)
    return str(tokenizer.decode([*written], skip_special_tokens=False))


# The end tokens of a generation config.
Configured = int | list[int] | None


def configured_stops(model: Any) -> Configured:
    """The end tokens of a loaded model's generation config."""
    stops: Configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return stops


def stop_ids(task_mode: str, tokenizer: Any, renderer: Renderer, configured: Configured) -> list[int]:
    """Tokens that end an answer: the tokenizer's and the generation config's, and the template's ends of turn."""
    stops = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    added = tokenizer.added_tokens_decoder
    for end in () if task_mode == "cpt" else renderer.turns().ends.markers:
        ids = tokenizer(end, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 or ids[0] in added:  # else its first token is one of ordinary text
            stops.add(ids[0])
    return sorted(token for token in stops if token is not None)


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
    done: Callable[[int], None] = lambda count: None,
    tried: Callable[..., list[tuple[int, ...]] | None] = lambda compute, _: compute(),
) -> list[Answer]:
    """What the model answers to each question, in the order asked. The model's mode is restored afterwards.
    `most_tokens`: prompts and answers of a batch, with padding. `began` is called before each batch, `done` with its
    rows after it. `tried` is given what generates it and its rows: None where they are too many, and it is repeated in
    halves."""
    was_training, config = model.training, model.config.get_text_config()
    router_logits = getattr(config, "output_router_logits", None)
    order = sorted(range(len(asked)), key=lambda index: len(asked[index].prompt_ids))
    given: dict[int, tuple[int, ...]] = {}
    model.eval()
    try:
        if router_logits:  # of the experts' balance loss: with a cache its mask has another length (transformers 5.23)
            config.output_router_logits = False
        tokens = [len(one.prompt_ids) + max_new_tokens for one in asked]
        while batch := next(batches(order[len(given) :], tokens, most_tokens), None):
            began()
            prompts = [asked[index].prompt_ids for index in batch]
            generate = functools.partial(_generate, model, tokenizer, prompts, stop, max_new_tokens)
            generated = tried(generate, len(batch))
            given |= dict(zip(batch, generated or (), strict=generated is not None))
            done(len(generated or ()))
            most_tokens = most_tokens if generated else len(batch) // 2 * tokens[batch[-1]]
    finally:
        model.train(was_training)
        if router_logits:
            config.output_router_logits = router_logits
    texts = [text_of_answer(tokenizer, given[index], stop) for index in range(len(asked))]
    return [Answer(question, texts[index], given[index]) for index, question in enumerate(asked)]


def batches(order: Sequence[int], tokens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Cut indices, ordered by growing `tokens`, into batches of at most `most` tokens (rows x longest), or one item."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * tokens[index] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], stop: Sequence[int], max_new_tokens: int
) -> list[tuple[int, ...]]:
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - longest)
    # on the left: the model continues what stands at the end of each row
    ids_BT = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generated_BT = model.generate(
        input_ids=ids_BT, attention_mask=mask_BT.to(model.device), do_sample=False, temperature=None, top_p=None,
        top_k=None, max_new_tokens=max(1, room), eos_token_id=list(stop), pad_token_id=pad, use_cache=True,
    )  # fmt: skip
    ends = set(stop)
    generated = [tuple(row.tolist()[longest:]) for row in generated_BT]
    lengths = [next((place + 1 for place, token in enumerate(row) if token in ends), len(row)) for row in generated]
    return [row[:length] for row, length in zip(generated, lengths, strict=True)]
