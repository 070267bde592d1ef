"""Chats of mixed lengths, and a run YAML on them. Every clone makes the same: lengths and words come from a seed."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.starter_corpus import corpus_documents

SEED = 17
QUESTION, ANSWER = (16, 0.6), (48, 1.0)
"""Words of a question and of an answer: median, and the standard deviation of the logarithm. Answers of chat data sets
spread as widely: one in ten has four times the median, and padding to the longest of a batch more than doubles it."""


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def write_chats(
    path: Path,
    count: int,
    *,
    words_of_question: tuple[float, float] = QUESTION,
    words_of_answer: tuple[float, float] = ANSWER,
) -> None:
    """`count` chats as JSONL; lengths are lognormal, by median and standard deviation of the logarithm."""
    draw = random.Random(SEED)
    words = [word for word in " ".join(corpus_documents(400)).split() if word.isalpha()]

    def text(median: float, spread: float) -> str:
        return " ".join(draw.choices(words, k=max(1, round(median * draw.lognormvariate(0.0, spread)))))

    write_rows(path, (chat(text(*words_of_question), text(*words_of_answer)) for _ in range(count)))


def write_config(path: Path, *, model: Path | str, rows: Path, seq_len: int, **sections: dict[str, Any]) -> Path:
    """A run YAML on these rows; `sections` are settings by section (`train={...}`)."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "max_seq_len": seq_len}, "tuning": {"mode": "lora"},
        "data": {"train_path": str(rows), "val_path": None, "test_path": None, "max_lost_fraction": 1.0, "workers": 1},
        "train": {"effective_batch_size": 32, "max_steps": 100, "report_to": [], "logging_steps": 10},
        "eval": {"steps": 0, "before_training": False},
    }  # fmt: skip
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
    return path
