"""The starter of drawn shapes, written again: rows with a picture each, which `configs/run_images.yaml` learns.

    python -m benchmarks.starter_shapes

A picture has two to six shapes on a grid of three by three places. Each is asked three things: how many there are of
some kind, which colour one has, and where one is. Pictures are drawn with whole numbers, so that they are the same
everywhere; how zlib compresses them may differ by its version.
"""

import io
import json
import random
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "sft_play" / "starter" / "shapes"
PICTURES = "pictures.zip"
"""The pictures of all splits, beside the rows."""
SPLITS = {"train": 900, "val": 30, "test": 100}
"""Pictures of each split; a picture has a row of each kind."""
SEED = 47

COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 230),
    "yellow": (240, 220, 60), "purple": (150, 50, 180), "white": (250, 250, 250),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
PLACES = (
    "top left", "top", "top right",
    "left", "centre", "right",
    "bottom left", "bottom", "bottom right",
)  # fmt: skip
"""The grid's cells in the order of reading."""
KINDS = ("count", "colour", "place")
CELL_PIXELS = 16
SIDE_PIXELS = 3 * CELL_PIXELS
RADII_PIXELS = (4, 5, 6)
"""Half the width of a shape, which is moved about in its cell."""
MOST_COUNTED = 4
"""Larger counts are rare, so that they would be learned from few rows."""
CANDIDATES = 6
"""Drawings from which each picture is chosen: the one whose answers are rare so far."""


@dataclass(frozen=True)
class Shape:
    """A drawn shape: what it is, its cell of the grid, and its middle (from the left, from above) and half width in
    pixels."""

    colour: str
    kind: str
    cell: int
    middle: tuple[int, int]
    radius: int

    def covers(self, pixels: Any) -> Any:
        """Which pixels are the shape's; `pixels` are the rows and columns of all, as numpy.mgrid gives them."""
        down, right = pixels[0] - self.middle[1], pixels[1] - self.middle[0]
        if self.kind == "circle":
            return right * right + down * down <= self.radius * (self.radius + 1)
        inside = (abs(right) <= self.radius) & (abs(down) <= self.radius)
        return inside if self.kind == "square" else inside & (2 * abs(right) <= down + self.radius)


@dataclass(frozen=True)
class Drawing:
    """A picture before it is drawn: its shapes in the order of reading, and the grey behind them."""

    shapes: tuple[Shape, ...]
    grey: int

    def indices(self) -> Any:
        """Each pixel's place in `palette`: an array of rows and columns."""
        import numpy

        pixels, indices = numpy.mgrid[:SIDE_PIXELS, :SIDE_PIXELS], numpy.zeros((SIDE_PIXELS, SIDE_PIXELS), "uint8")
        for shape in self.shapes:
            indices[shape.covers(pixels)] = 1 + list(COLOURS).index(shape.colour)
        return indices

    @property
    def palette(self) -> list[tuple[int, int, int]]:
        """What is behind the shapes, and their colours."""
        return [(self.grey, self.grey, self.grey), *COLOURS.values()]

    def png(self) -> bytes:
        """The encoded picture."""
        from PIL import Image

        image = Image.fromarray(self.indices())
        image.putpalette([level for colour in self.palette for level in colour])
        file = io.BytesIO()
        image.save(file, "PNG", bits=4, optimize=True)
        return file.getvalue()


@dataclass(frozen=True)
class Question:
    """What is asked of a picture, and the answer."""

    kind: str
    text: str
    answer: str


def draw(chance: random.Random) -> Drawing:
    """A random drawing."""
    shapes = []
    for cell in sorted(chance.sample(range(len(PLACES)), chance.randint(2, 6))):
        radius = chance.choice(RADII_PIXELS)
        row, column = divmod(cell, 3)
        middle = [place * CELL_PIXELS + chance.randint(radius, CELL_PIXELS - 1 - radius) for place in (column, row)]
        colour, kind = chance.choice(list(COLOURS)), chance.choice(SHAPES)
        shapes.append(Shape(colour, kind, cell, (middle[0], middle[1]), radius))
    return Drawing(tuple(shapes), chance.randint(0, 12) * 8)


def questions(drawing: Drawing) -> Iterator[Question]:
    """Everything that may be asked of a drawing: of counts up to MOST_COUNTED, of one shape where only one is meant."""
    shapes = drawing.shapes
    counted = [("shape", len(shapes))]
    counted += [(kind, sum(one.kind == kind for one in shapes)) for kind in SHAPES]
    counted += [(f"{colour} shape", sum(one.colour == colour for one in shapes)) for colour in COLOURS]
    for name, count in counted:
        if count <= MOST_COUNTED:
            yield Question("count", f"How many {name}s are there?", str(count))
    for one in shapes:
        if sum(other.kind == one.kind for other in shapes) == 1:
            yield Question("colour", f"Which colour is the {one.kind}?", one.colour)
            yield Question("place", f"Where is the {one.kind}?", PLACES[one.cell])
        if sum(other.colour == one.colour for other in shapes) == 1:
            yield Question("place", f"Where is the {one.colour} shape?", PLACES[one.cell])
        yield Question("colour", f"Which colour is the shape at the {PLACES[one.cell]}?", one.colour)


def asked_drawings(count: int, chance: random.Random) -> Iterator[tuple[Drawing, list[Question]]]:
    """Drawings with a question of each kind; every answer is given about as often as the others of its kind."""
    given: Counter[tuple[str, str]] = Counter()

    def rarest(found: Iterable[Question]) -> Question:
        return min(found, key=lambda one: (given[one.kind, one.answer], chance.random()))

    for _ in range(count):
        choices: list[tuple[Drawing, list[Question]]] = []
        while len(choices) < CANDIDATES:
            drawing = draw(chance)
            found = {kind: [one for one in questions(drawing) if one.kind == kind] for kind in KINDS}
            if all(found.values()):
                choices.append((drawing, [rarest(found[kind]) for kind in KINDS]))
        drawing, asked = min(choices, key=lambda choice: sum(given[one.kind, one.answer] for one in choice[1]))
        given.update((one.kind, one.answer) for one in asked)
        yield drawing, asked


def row(question: Question, picture: str) -> dict[str, Any]:
    """A row of the data: the picture, what is asked of it, the answer."""
    asked = [{"type": "image"}, {"type": "text", "text": question.text}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": question.answer}]
    return {"messages": messages, "images": [picture]}


def make_starter(pictures: dict[str, int] = SPLITS) -> tuple[dict[str, list[dict[str, Any]]], dict[str, bytes]]:
    """The rows of each split, and the encoded pictures by their names in the archive."""
    chance = random.Random(SEED)
    rows: dict[str, list[dict[str, Any]]] = {}
    files: dict[str, bytes] = {}
    for split, count in pictures.items():
        rows[split] = []
        for number, (drawing, asked) in enumerate(asked_drawings(count, chance), start=1):
            name = f"{split}/{number:04}.png"
            files[name] = drawing.png()
            rows[split] += [row(question, name) for question in asked]
        chance.shuffle(rows[split])
    return rows, files


def write_starter(folder: Path) -> None:
    """Write the rows and the archive of pictures."""
    rows, files = make_starter()
    folder.mkdir(parents=True, exist_ok=True)
    for split, of in rows.items():
        text = "".join(json.dumps(one) + "\n" for one in of)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    with zipfile.ZipFile(folder / PICTURES, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # of no date: the same file every time


if __name__ == "__main__":
    write_starter(FOLDER)
