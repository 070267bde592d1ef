"""The picture of README.md: predicted and measured peaks, from the recorded results beside this file."""

import json
import math
import re
from pathlib import Path

GIB = 2**30
FOLDER = Path(__file__).parent
PICTURE = Path("docs/predicted-measured.svg")
TICKS_GIB = (1, 2, 4, 8, 16, 32, 64)
# The square of the points, in the picture's units: left, top, side.
LEFT, TOP, SIDE = 60, 40, 330


def picture() -> str:
    """The text of the picture: a point for each peak of tensors, both axes logarithmic."""
    published, h100 = _published_peaks(), _h100_peaks()
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 430" font-family="sans-serif" font-size="12">',
        '<rect width="640" height="430" fill="#fff"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#999"/>',
        f'<path d="M{LEFT} {TOP + SIDE}L{LEFT + SIDE} {TOP}" stroke="#999"/>',
        f'<text x="{LEFT}" y="24" font-size="14">Peak memory of a GPU, GiB of tensors</text>',
        f'<text x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 42}" text-anchor="middle">predicted, before loading</text>',
        f'<text transform="translate(18 {TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">measured</text>',
    ]
    for tick in TICKS_GIB:
        offset = _offset(tick)
        parts.append(f'<text x="{LEFT + offset}" y="{TOP + SIDE + 18}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{LEFT - 8}" y="{TOP + SIDE - offset + 4}" text-anchor="end">{tick}</text>')
    for peaks, colour, radius in ((published, "#7aa6d8", 3), (h100, "#d9480f", 4.5)):
        parts += [
            f'<circle cx="{LEFT + _offset(predicted)}" cy="{TOP + SIDE - _offset(measured)}" r="{radius}"'
            f' fill="{colour}" fill-opacity=".75"/>'
            for predicted, measured in peaks
        ]
    for row, (colour, heading, peaks) in enumerate((
        ("#d9480f", f"{len(h100)} runs on one H100 (2026-11-26)", h100),
        ("#7aa6d8", f"{len(published)} peaks that others published", published),
    )):  # fmt: skip
        top = TOP + 30 + 64 * row
        parts += [
            f'<circle cx="412" cy="{top - 4}" r="5" fill="{colour}"/><text x="424" y="{top}">{heading}</text>',
            f'<text x="424" y="{top + 18}" fill="#555">{error_text(peaks)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def error_text(peaks: list[tuple[float, float]]) -> str:
    """How far off the predictions are, in words."""
    errors = sorted(abs(predicted / measured - 1) for predicted, measured in peaks)
    middle, most = errors[len(errors) // 2], errors[math.ceil(0.95 * len(errors)) - 1]
    return f"median error {middle:.1%}, 95% within {most:.1%}"


def _offset(gib: float) -> float:
    """Where a peak lies on an axis."""
    return round(SIDE * (math.log2(gib) + 0.2) / (math.log2(80) + 0.2), 1)


def _published_peaks() -> list[tuple[float, float]]:
    rows = json.loads((FOLDER / "memory_model_score.json").read_text())["rows"]
    pairs = [(row["predicted_allocated_bytes"], row["measured_allocated_bytes"]) for row in rows]
    return [(predicted / GIB, measured / GIB) for predicted, measured in pairs if predicted and measured]


def _h100_peaks() -> list[tuple[float, float]]:
    line = re.compile(r"Peak memory: ([\d.]+) GiB predicted, ([\d.]+) GiB measured \(allocated\)")
    runs = json.loads((FOLDER / "experts_h100.json").read_text())["runs"].values()
    said = [match for run in runs for text in run.get("said", ()) if (match := line.search(text))]
    peaks = [(float(match[1]), float(match[2])) for match in said]
    blocks = json.loads((FOLDER / "gpu_bench_h100.json").read_text())["trials"]["4b-lora-2048-blocks"]["runs"]["ours"][
        0
    ]
    return [*peaks, (blocks["predicted"]["allocated_bytes"] / GIB, blocks["allocated_bytes"] / GIB)]
