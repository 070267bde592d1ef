"""Masks and tokens of rows with images: equal to the processor's own, image tokens never trained, or refused."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from sft_play.config.schema import DataConfig
from sft_play.data.masks.image_processor import ImageProcessorSource, expand_runs, load_image_processor
from sft_play.data.masks.render import CUTS_IMAGE, Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.images import IMAGE_MARK, Picture
from sft_play.data.sources.raw import BadRow
from sft_play.errors import ConfigError, ModelError
from tests.conftest import refusal_of
from tests.image_families import FAMILIES, make_image_model

pytestmark = pytest.mark.build

SIZES = ((64, 64), (50, 30), (37, 90))


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: make_image_model(folder / name, name) for name in FAMILIES}


def noise(size: tuple[int, int], seed: int) -> Picture:
    from PIL import Image

    buffer = io.BytesIO()
    Image.frombytes("RGB", size, random.Random(seed).randbytes(size[0] * size[1] * 3)).save(buffer, "PNG")
    return Picture("", buffer.getvalue(), *size)


def renderer_of(folder: Path, **options: Any) -> Renderer:
    from transformers import AutoTokenizer

    limit = options.pop("max_seq_len", 4096)
    source = options.pop("source", None) or ImageProcessorSource(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Renderer(tokenizer, DataConfig(**options), max_seq_len=limit, images=source)


def chat_of(*pictures: Picture) -> Chat:
    places = [IMAGE_MARK] * len(pictures) + ["", "", ""]
    turns = (
        {"role": "user", "content": f"{places[0]}what is\n{places[1]}\n\nthis?"},
        {"role": "assistant", "content": "it is a light."},
        {"role": "user", "content": f"and \n{places[2]}\n here?"},
        {"role": "assistant", "content": "on."},
    )
    return Chat("rows.jsonl:1", turns, images=pictures)


def parts_of(message: dict[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, str]] = []
    for index, text in enumerate(message["content"].split(IMAGE_MARK)):
        parts += [{"type": "image"}] * (index > 0) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_processors_own_and_answers_alone_are_trained(families, family, count):
    folder, chat = families[family], chat_of(*(noise(size, seed) for seed, size in enumerate(SIZES[:count])))
    renderer = renderer_of(folder)
    row = renderer.render(chat)
    assert isinstance(row, TokenRow)
    processor = load_image_processor(ImageProcessorSource(str(folder))).processor
    tokenizer = processor.tokenizer
    text = tokenizer.apply_chat_template([parts_of(message) for message in chat.messages], tokenize=False)
    images = [picture.decode() for picture in chat.images]
    with warnings.catch_warnings(action="ignore"):
        own = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    assert row.input_ids == own["input_ids"][0].tolist()
    trained = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label != IGNORED]
    assert tokenizer.decode(trained) == "it is a light.<|im_end|>on.<|im_end|>"
    assert row.image_tokens == sum(token in renderer.image_processor.token_ids for token in row.input_ids) > 0
    for name, types in renderer.image_processor.token_types([row.input_ids]).items():
        assert own[name][0].tolist() == types[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_takes_as_many_tokens_as_its_size_says(families, family):
    """The count by a header against the processor's work on the pixels."""
    processor, draw = load_image_processor(ImageProcessorSource(str(families[family]))), random.Random(family)
    for number in range(12):
        size = draw.randint(8, 300), draw.randint(8, 300)
        alone = processor.process([[noise(size, number).decode()]])[1][0]
        assert processor.expand(*size) == alone
        assert processor.expand(*size, is_alone=False) == processor.process([[noise(size, number).decode()] * 2])[1][1]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "mistral3"])
def test_image_tokens_are_never_trained_even_where_all_others_are(families, family):
    row = renderer_of(families[family], loss_on="all").render(chat_of(noise((40, 40), 0)))
    assert isinstance(row, TokenRow)
    ids = renderer_of(families[family]).image_processor.token_ids
    assert all((label == IGNORED) == (token in ids) for token, label in zip(row.input_ids, row.labels, strict=True))


def reason_of(outcome: TokenRow | BadRow) -> str:
    assert isinstance(outcome, BadRow)
    return f"{outcome.reason}: {outcome.detail}"


def test_what_cannot_be_exact_is_a_bad_row(families):
    renderer = renderer_of(families["qwen2_5_vl"])
    one = chat_of(noise((40, 40), 0))
    spelled = Chat(
        "", ({**one.messages[0], "content": f"{IMAGE_MARK} <|image_pad|>?"}, *one.messages[1:2]), images=one.images
    )
    assert "holds the placeholder of an image" in reason_of(renderer.render(spelled))
    without = Renderer(renderer.tokenizer_parts, max_seq_len=4096)
    assert "none can be trained on this base" in reason_of(without.render(one))
    # cut behind its pictures a row is a row; cut in one it is none
    length = len(renderer.render(chat_of(noise((200, 200), 0))).input_ids)
    for limit, cuts in ((length - 1, False), (30, True)):
        outcome = renderer_of(families["qwen2_5_vl"], max_seq_len=limit)(chat_of(noise((200, 200), 0)))
        assert isinstance(outcome, BadRow) == cuts
        assert not cuts or outcome.reason == CUTS_IMAGE


def test_a_template_that_takes_no_parts_gets_the_placeholder_in_its_text(families, tmp_path):
    from transformers import AutoTokenizer

    folder = families["llava_onevision"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = ImageProcessorSource(str(folder))
    in_parts = Renderer(tokenizer, max_seq_len=4096, images=source).render(chat_of(noise((40, 40), 0)))
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    in_text = Renderer(tokenizer, max_seq_len=4096, images=source).render(chat_of(noise((40, 40), 0)))
    assert (in_text.input_ids, in_text.labels) == (in_parts.input_ids, in_parts.labels)
    tokenizer.chat_template = tokenizer.chat_template.replace("m.content", "m.content | replace('<image>', '')")
    outcome = Renderer(tokenizer, max_seq_len=4096, images=source).render(chat_of(noise((40, 40), 0)))
    assert "does not write the row's images" in reason_of(outcome)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_of_any_size_takes_what_the_processor_makes_of_it(families, family):
    """By its size alone, without a pixel, or by a blank picture of a size that is cut into as many tiles."""
    draw = random.Random(family)
    quick = load_image_processor(ImageProcessorSource(str(families[family])))
    for _ in range(15):
        width, height = draw.randint(16, 300), draw.randint(16, 300)
        picture = PIL.Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
        assert quick.expand(width, height) == quick.process([[picture]])[1][0], (width, height)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm46v", "mistral3", "smolvlm"])
def test_bounds_of_pixels_decide_the_tokens(families, family):
    source = ImageProcessorSource(str(families[family]), max_pixels=1024)
    free, bounded = load_image_processor(ImageProcessorSource(str(families[family]))), load_image_processor(source)
    assert bounded.count_tokens(200, 200) < free.count_tokens(200, 200)
    assert bounded.blank_inputs([(200, 200)]).keys() == free.blank_inputs([(200, 200)]).keys()


@pytest.mark.parametrize("family", ["gemma3", "internvl", "llava_onevision"])
def test_bounds_that_a_processor_does_not_have_are_refused(families, family):
    source = ImageProcessorSource(str(families[family]), max_pixels=1024)
    assert "has no such bound" in refusal_of(ConfigError, load_image_processor, source)
    # a setting that nothing answers is no fault of a row
    with pytest.raises(ConfigError, match="has no such bound"):
        renderer_of(families[family], source=source).render(chat_of(noise((40, 40), 0)))


def test_a_base_of_text_is_refused_by_name(tiny_llama):
    said = refusal_of(ModelError, load_image_processor, ImageProcessorSource(str(tiny_llama)))
    assert "takes no images" in said
    assert tiny_llama.name in said


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_repeated_where_they_stand(seed):
    """Against a second rule: each run written out, one token after the other."""
    draw, image = random.Random(seed), 9
    lengths = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
    pieces = [
        [(draw.randint(0, 5), draw.choice((IGNORED, 3))) for _ in range(draw.randint(0, 3))] for _ in (*lengths, 0)
    ]
    row, expected = list(pieces[0]), list(pieces[0])
    for length, piece in zip(lengths, pieces[1:], strict=True):
        row += [(image, draw.choice((IGNORED, 3))), *piece]
        expected += [*[(image, IGNORED)] * length, *piece]
    ids, labels = [list(column) for column in zip(*row, strict=True)] if row else ([], [])
    assert expand_runs(ids, labels, frozenset({image}), lengths) == (
        [token for token, _ in expected], [label for _, label in expected],
    )  # fmt: skip
    assert expand_runs(ids, labels, frozenset({image}), [*lengths, 2]) is None
    if lengths:
        assert expand_runs(ids, labels, frozenset({image}), lengths[:-1]) is None


def test_a_processor_that_gives_more_than_is_known_is_refused(families, monkeypatch):
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    call = Qwen2_5_VLProcessor.__call__
    monkeypatch.setattr(
        Qwen2_5_VLProcessor, "__call__", lambda self, *args, **kwargs: {**call(self, *args, **kwargs), "tiles": 1}
    )
    said = refusal_of(ModelError, load_image_processor, ImageProcessorSource(str(families["qwen2_5_vl"])))
    assert "gives the model tiles beside" in said


def test_a_row_for_each_turn_has_the_pictures_of_its_turns(families):
    first, second, third = (noise(size, seed) for seed, size in enumerate(SIZES))
    renderer = renderer_of(families["qwen2_5_vl"], multi_turn="split")
    rows = renderer.split_turns(chat_of(first, second, third))
    assert [row.images for row in rows] == [(first, second), (first, second, third)]
    assert all(isinstance(renderer.render(row), TokenRow) for row in rows)


@pytest.mark.parametrize(("family", "is_taken"), [("llava_onevision", True), ("mistral3", True), ("qwen2_5_vl", False)])
def test_prompts_of_a_template_without_parts_have_the_images_of_the_row(families, family, is_taken):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(families[family])
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer.chat_template = plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = Renderer(tokenizer, max_seq_len=4096, images=ImageProcessorSource(str(families[family])))
    chat = chat_of(noise((40, 40), 0))
    row, prompt = renderer.render(chat), renderer.prompt_ids(chat)
    assert isinstance(row, TokenRow) == is_taken
    assert (prompt is not None) == is_taken
    if isinstance(row, TokenRow) and prompt is not None:
        assert row.input_ids[: len(prompt)] == prompt


def test_a_template_that_drops_an_image_is_refused(families):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(families["llava_onevision"])
    dropped = "{% if part.type == 'image' and loop.first %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if part.type == 'image' %}", dropped)
    source = ImageProcessorSource(str(families["llava_onevision"]))
    outcome = Renderer(tokenizer, max_seq_len=4096, images=source).render(chat_of(*(noise((40, 40), 0),) * 2))
    assert "does not write the row's images" in reason_of(outcome)


def test_a_picture_that_a_processor_refuses_is_a_bad_row(families):
    outcome = renderer_of(families["qwen2_5_vl"]).render(chat_of(Picture("long.png", b"", 20_000, 10)))
    assert "the processor refuses an image" in reason_of(outcome)
    assert "20000 x 10" in reason_of(outcome)
