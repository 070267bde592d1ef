"""What the trials train: a model with random weights, its tokenizer, and rows of three kinds. Nothing is downloaded."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_model import write_random_model
from benchmarks.starter_corpus import corpus_documents
from benchmarks.steps.material import chat, write_rows
from sft_play.models.config_json import KNOWN_MODELS

LARGE_MODEL = "Qwen/Qwen2.5-0.5B"
"""The model's shape on a GPU."""
MATERIAL_SEED = 11
ROW_KINDS = ("packed", "equal", "unequal")
HELD_OUT_ROWS = 16


@dataclass(frozen=True)
class TrialSize:
    """Tokens of a row, rows of a micro-batch, micro-batches and optimizer steps of a trial."""

    seq_len: int
    micro_batch: int
    grad_accum: int
    steps: int = 20

    @property
    def effective_batch(self) -> int:
        """Rows of an optimizer step of one rank."""
        return self.micro_batch * self.grad_accum


GPU_SIZE = TrialSize(seq_len=512, micro_batch=4, grad_accum=2)
CPU_SIZE = TrialSize(seq_len=128, micro_batch=2, grad_accum=2)


def write_trial_model(folder: Path, *, large: bool) -> None:
    """Tokenizer and random weights in bf16: Qwen2.5-0.5B's shape if `large`, else one of 0.4 million."""
    shape = dict(KNOWN_MODELS[LARGE_MODEL].config)
    if not large:
        del shape["vocab_size"]
        shape |= {
            "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 2048,
        }  # fmt: skip
    write_random_model(folder, shape, seed=MATERIAL_SEED, device="cuda" if large else "cpu")


def write_trial_rows(folder: Path, size: TrialSize, *, largest_batch: int = 0) -> None:
    """Rows of every kind for `size`, held-out rows, and `largest_batch` full ones for a step that cannot fit."""
    draw = random.Random(MATERIAL_SEED)
    words = [word for word in " ".join(corpus_documents(50)).split() if word.isalpha()]
    needed, full = size.effective_batch * size.steps, 2 * size.seq_len  # a word is a token and more: cut to the length

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    def rows(count: int, least: int, most: int) -> list[dict[str, Any]]:
        lengths = (draw.randint(least, most) for _ in range(count))
        return [chat(text(4), text(length)) for length in lengths]

    short = max(4, size.seq_len // 8)
    kinds = {
        "equal": rows(needed, full, full),
        "unequal": rows(needed - needed // 4, 2, size.seq_len // 2) + rows(needed // 4, full, full),
        "packed": rows(needed * 6, short // 2, short), "held-out": rows(HELD_OUT_ROWS, short // 2, short),
        "out-of-memory": rows(min(8, largest_batch), full, full) * -(-largest_batch // 8),
    }  # fmt: skip
    draw.shuffle(kinds["unequal"])  # else the long rows would share their micro-batches, and pad nothing
    for name, kind_rows in kinds.items():
        write_rows(folder / f"{name}.jsonl", kind_rows)
