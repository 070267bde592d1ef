"""The images of a row and their places in its text.

A row has images in the column `images` (or `image`), in parts of its messages, or both. Their
places are the parts `{"type": "image"}`; in a row without such parts each `<image>` in a text.
Where a row with images has neither, they stand before the first user turn's text, with nothing
between, as in TRL and LLaMA-Factory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.sources.image_files import ImageError
from sft_play.data.sources.images import IMAGE_MARK, Picture, find_picture
from sft_play.data.sources.messages import (
    AUTHOR_MESSAGE,
    PART_IMAGES,
    Message,
    UnusableRowError,
    drop_author_messages,
    iter_texts,
    quote_value,
    unpack_json,
)
from sft_play.data.sources.raw import RawRow
from sft_play.text import plural

ROW_IMAGE_COLUMNS = ("images", "image")
UNTRAINED_MEDIA_COLUMNS = ("videos", "video", "audios", "audio")
PLACEHOLDER = "<image>"
_DISAGREEMENT = "images and their places in the text do not agree"


def holds_media(value: Any) -> bool:
    """True for a cell that may be media: not empty, and no flag or count of that name."""
    return value not in (None, "", [], {}) and not isinstance(value, (bool, int, float))


def refuse_untrained_media(data: Mapping[str, Any]) -> None:
    """Raises UnusableRow where a row has video or sound."""
    for key in UNTRAINED_MEDIA_COLUMNS:
        if holds_media(data.get(key)):
            raise UnusableRowError(
                f"the row has {key}, and only text and images are trained", quote_value(data[key])
            )


def place_images(
    messages: Sequence[Message], row: RawRow, data: DataConfig
) -> tuple[tuple[Message, ...], tuple[Picture, ...]]:
    """The messages with an IMAGE_MARK for each image of the row, and the pictures in their order.
    Raises UnusableRow where an image cannot be used, or numbers and places do not agree."""
    column_values = _column_values(row.data)
    parts = [part for message in messages for part in message.pop(PART_IMAGES, ())]
    if not column_values and not parts:
        return tuple(messages), ()
    mark_count = sum(text.count(IMAGE_MARK) for text in iter_texts(drop_author_messages(messages)))
    if mark_count != len(parts):
        raise UnusableRowError(
            "a text has the character U+FDD0, which stands for an image here", "take it out"
        )
    if parts:
        values = list(_part_values(parts, column_values))
    else:
        messages, values = _mark_places(messages, len(column_values)), column_values
    if any(message["role"] == "assistant" and _has_mark(message) for message in messages):
        raise UnusableRowError(
            "an image in an assistant's turn", "a model is trained to write text; move it to a user"
        )
    pictures = []
    for index, value in enumerate(values):
        try:
            pictures.append(find_picture(value, row.folder, data))
        except ImageError as error:
            raise UnusableRowError(error.reason, f"image {index + 1}: {error.detail}") from None
    # the author's own form has parts with sources, or `<image>`, and is made again from the marks
    written = (
        {key: message[key] for key in message if key != AUTHOR_MESSAGE or not _has_mark(message)}
        for message in messages
    )
    return tuple(written), tuple(pictures)


def _has_mark(message: Message) -> bool:
    return IMAGE_MARK in (message["content"] or "")


def _column_values(data: Mapping[str, Any]) -> list[Any]:
    columns = [key for key in ROW_IMAGE_COLUMNS if holds_media(data.get(key))]
    if len(columns) > 1:
        raise UnusableRowError("the row has both images and image", "leave one of them out")
    if not columns:
        return []
    value = unpack_json(data[columns[0]], "[{")
    return value if isinstance(value, list) else [value]


def _part_values(parts: list[tuple[Any, Any]], column_values: list[Any]) -> Iterator[Any]:
    place_count = sum(value is None for value, _ in parts)
    if place_count != len(column_values):
        raise UnusableRowError(
            _DISAGREEMENT,
            f"{plural(len(column_values), 'image')} in the column,"
            f" {plural(place_count, 'part')} of type image without a path or url of"
            f" {'its' if place_count == 1 else 'their'} own",
        )
    remaining_values = enumerate(column_values)
    for value, index in parts:
        if value is None:
            column_index, value = next(remaining_values)
            if isinstance(index, int) and index != column_index:
                raise UnusableRowError(
                    _DISAGREEMENT,
                    f"a part has the index {index}, and is number {column_index} in the text",
                )
        yield value


def _mark_places(messages: Sequence[Message], image_count: int) -> list[Message]:
    place_count = sum((message["content"] or "").count(PLACEHOLDER) for message in messages)
    if place_count not in (0, image_count):
        raise UnusableRowError(
            _DISAGREEMENT,
            f"{plural(image_count, 'image')}, and {PLACEHOLDER} stands"
            f" {plural(place_count, 'time')} in the text",
        )
    if place_count:
        return [
            {**message, "content": message["content"].replace(PLACEHOLDER, IMAGE_MARK)}
            if message["content"]
            else message
            for message in messages
        ]
    first_user = next(
        (index for index, message in enumerate(messages) if message["role"] == "user"), None
    )
    if first_user is None:
        raise UnusableRowError(
            _DISAGREEMENT, f"{plural(image_count, 'image')} and no user turn to put it into"
        )
    marked = list(messages)
    marked[first_user] = {
        **messages[first_user],
        "content": IMAGE_MARK * image_count + (messages[first_user]["content"] or ""),
    }
    return marked


def split_at_images(message: Message) -> Message:
    """The message with its content in parts where it holds IMAGE_MARKs: {"type": "image"} for each
    of them, and {"type": "text", "text": …}."""
    if not isinstance(message["content"], str) or not _has_mark(message):
        return message
    parts: list[dict[str, str]] = []
    for index, text in enumerate(message["content"].split(IMAGE_MARK)):
        parts += [{"type": "image"}] * (index > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": parts}
