"""The bundled rows of the starter as files: written by `make -C benchmarks generate`, kept current by a test."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.starter.language import DEFAULT_SEED, chat_rows

FOLDER = Path("sft_play/starter/data")


def texts() -> dict[Path, str]:
    """Path below the repository and text of each bundled file."""
    return {
        FOLDER / f"{split}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for split, rows in chat_rows(seed=DEFAULT_SEED).items()
    }


def write(root: Path) -> list[Path]:
    """Write the bundled files below `root`; returns their paths."""
    for path, text in texts().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(texts())
