"""Generated answers, compared word for word with what training teaches to write behind the same
prompt; greedy."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.data.build.splits import DataSplit
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.images import IMAGE_MARK, Picture
from sft_play.training.model.vision import prepare_generation


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, its text as shown, and the reference: the answer that training teaches
    behind it; `images` are the pictures of its image tokens."""

    prompt_ids: list[int]
    prompt_text: str
    reference: str
    images: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class GeneratedAnswer:
    """A question with the text that the model generated; `token_ids`: its tokens, with the one that
    ended it."""

    question: Question
    text: str
    token_ids: tuple[int, ...] = ()

    @property
    def is_correct(self) -> bool:
        """Whether the answer is the reference, word for word; white space at both ends does not
        count."""
        return self.text.strip() == self.question.reference.strip()


def evenly_spaced(items: Any, count: int) -> list[Any]:
    """At most `count` of the items of a sequence, at equal distances from the first on."""
    selected = min(count, len(items))
    return [items[index * len(items) // selected] for index in range(selected)]


def select_questions(
    split: DataSplit, renderer: Renderer, tokenizer: Any, *, max_questions: int
) -> list[Question]:
    """At most so many questions, evenly spaced over the split's chats."""
    chats = evenly_spaced(split.chats, max_questions)
    return [
        question for question in build_questions(chats, renderer, tokenizer) if question is not None
    ]


def build_questions(
    chats: Sequence[Chat], renderer: Renderer, tokenizer: Any
) -> list[Question | None]:
    """The question of each chat's last answer. None where training teaches no answer behind the
    chat's prompt, max_seq_len leaves no room for one, or a token that ends an answer stands inside
    it."""
    if not chats:
        return []
    # without the model's generation config: in training the model is not loaded yet, and these end
    # every trained turn
    stop_ids = collect_stop_ids("sft", tokenizer, renderer, None)

    def build_question(chat: Chat) -> Question | None:
        prompt_and_answer = renderer.prompt_and_answer_ids(chat)
        # room for a token and the one that ends it
        if prompt_and_answer is None or len(prompt_and_answer[0]) + 1 >= renderer.max_seq_len:
            return None
        prompt_ids, answer_ids = prompt_and_answer
        answer = decode_answer(tokenizer, answer_ids, stop_ids)
        full_text = tokenizer.decode(
            [token for token in answer_ids if token not in stop_ids], skip_special_tokens=False
        )
        # gpt-oss: `<|end|>` ends think text, and turns too
        if not answer.strip() or answer.strip() != full_text.strip():
            return None
        prompt_text = "".join(str(message["content"] or "") for message in chat.messages[-2:-1])
        prompt_text = prompt_text.replace(IMAGE_MARK, "[image] ")
        return Question(prompt_ids, prompt_text, answer, chat.images)

    return [build_question(chat) for chat in chats]


def decode_answer(tokenizer: Any, ids: Sequence[int], stop_ids: Sequence[int]) -> str:
    """The text of an answer's tokens, special ones included, up to the one that ends it."""
    answer_ids = itertools.takewhile(lambda token: token not in stop_ids, ids)
    return str(tokenizer.decode([*answer_ids], skip_special_tokens=False))


def configured_eos_token_ids(model: Any) -> Any:
    """The end tokens of a loaded model's generation config: a number, several, or None."""
    return getattr(getattr(model, "generation_config", None), "eos_token_id", None)


def collect_stop_ids(
    task_mode: str, tokenizer: Any, renderer: Renderer, eos_token_ids: Any
) -> list[int]:
    """Tokens that end an answer: the tokenizer's and the generation config's, and the template's
    ends of turn."""
    stop_ids = {
        tokenizer.eos_token_id,
        *(eos_token_ids if isinstance(eos_token_ids, list) else [eos_token_ids]),
    }
    if task_mode != "cpt":
        for marker in renderer.turn_locator().ends.end_markers:
            ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
            # else its first token is one of ordinary text
            if len(ids) == 1 or ids[0] in tokenizer.added_tokens_decoder:
                stop_ids.add(ids[0])
    return sorted(token for token in stop_ids if token is not None)


@torch.no_grad()
def generate_answers(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    max_tokens: int,
    on_batch_start: Callable[[], None] = lambda: None,
    on_batch_end: Callable[[int], None] = lambda count: None,
    try_batch: Callable[..., list[tuple[int, ...]] | None] = lambda compute, _: compute(),
) -> list[GeneratedAnswer]:
    """What the model answers to each question, in the order asked. The model's mode is restored
    afterwards. `max_tokens`: prompts and answers of a batch, with padding. `on_batch_start` is
    called before each batch, `on_batch_end` with its rows after it. `try_batch` is given what
    generates it and its rows: None where they are too many, and it is repeated in halves."""
    was_training, text_config = model.training, model.config.get_text_config()
    router_logits = getattr(text_config, "output_router_logits", None)
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].prompt_ids))
    generated_ids: dict[int, tuple[int, ...]] = {}
    model.eval()
    try:
        # of the experts' balance loss: with a cache its mask has another length (transformers 5.23)
        if router_logits:
            text_config.output_router_logits = False
        tokens = [len(question.prompt_ids) + max_new_tokens for question in questions]
        while batch := next(batch_by_tokens(order[len(generated_ids) :], tokens, max_tokens), None):
            on_batch_start()
            generate = functools.partial(
                _generate,
                model,
                tokenizer,
                [questions[index] for index in batch],
                stop_ids,
                max_new_tokens,
            )
            generated = try_batch(generate, len(batch)) or []
            generated_ids |= dict(zip(batch, generated, strict=False))
            on_batch_end(len(generated))
            if not generated:
                max_tokens = len(batch) // 2 * tokens[batch[-1]]
    finally:
        model.train(was_training)
        if router_logits:
            text_config.output_router_logits = router_logits
    return [
        GeneratedAnswer(
            question, decode_answer(tokenizer, generated_ids[index], stop_ids), generated_ids[index]
        )
        for index, question in enumerate(questions)
    ]


def batch_by_tokens(
    order: Sequence[int], tokens: Sequence[int], max_tokens: int
) -> Iterator[list[int]]:
    """Cut indices, ordered by growing `tokens`, into batches of at most `max_tokens` tokens (rows x
    longest), or one item."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * tokens[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _generate(
    model: Any,
    tokenizer: Any,
    questions: list[Question],
    stop_ids: Sequence[int],
    max_new_tokens: int,
) -> list[tuple[int, ...]]:
    prompts = [question.prompt_ids for question in questions]
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        max_new_tokens = max(1, min(max_new_tokens, positions - longest))
    # on the left: the model continues what stands at the end of each row
    ids_BT = torch.tensor(
        [[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device
    )
    mask_BT = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    )
    generator, inputs = prepare_generation(
        model, ids_BT, [question.images for question in questions]
    )
    generated_BT = generator.generate(
        input_ids=ids_BT,
        attention_mask=mask_BT.to(model.device),
        **inputs,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids),
        pad_token_id=pad,
        use_cache=True,
    )
    answers = []
    for row in generated_BT[:, longest:].tolist():
        end = next((position + 1 for position, token in enumerate(row) if token in stop_ids), None)
        answers.append(tuple(row[:end]))
    return answers
