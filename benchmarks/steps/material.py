"""What is measured without anything to download: a model with random weights, its tokenizer, chats of mixed lengths.

Every clone makes the same: lengths and words are drawn from a seed.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.starter_corpus import corpus_documents

SEED = 17
QUESTION, ANSWER = (16, 0.6), (48, 1.0)
"""Words of a question and of an answer: median, and the standard deviation of the logarithm. Answers of chat data sets
spread as widely: one in ten has four times the median, and padding to the longest of a batch more than doubles it."""


@dataclass(frozen=True)
class Shape:
    """A small decoder: 1.8 million weights in its blocks, so that a step of 32 chats takes about a second on a core."""

    hidden: int = 192
    intermediate: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    positions: int = 2048


def write_model(folder: Path, shape: Shape = Shape()) -> None:
    """Tokenizer and random weights in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as transformers_logging

    from benchmarks.starter_base import make_tokenizer

    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer(corpus_documents(400))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


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

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = (("user", text(*words_of_question)), ("assistant", text(*words_of_answer)))
            row = {"messages": [{"role": role, "content": content} for role, content in turns]}
            file.write(json.dumps(row) + "\n")


def write_config(path: Path, *, model: Path | str, rows: Path, seq_len: int, **sections: dict[str, Any]) -> Path:
    """A run YAML on these rows; `sections` are settings by section (`train={...}`)."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "max_seq_len": seq_len},
        "tuning": {"mode": "lora"},
        "data": {"train_path": str(rows), "val_path": None, "test_path": None, "max_lost_fraction": 1.0, "workers": 1},
        "train": {"effective_batch_size": 32, "max_steps": 100, "report_to": [], "logging_steps": 10},
        "eval": {"steps": 0, "before_training": False},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")  # JSON is YAML
    return path
