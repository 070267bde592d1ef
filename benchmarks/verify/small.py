"""A small run for comparisons: a model of random weights, and rows of very different lengths that divide unevenly."""

import random
from pathlib import Path

from benchmarks.random_model import write_random_model
from benchmarks.starter_corpus import corpus_documents
from benchmarks.steps.material import chat, write_config, write_rows

ROWS = 37
"""Rows: with an effective batch of 16 an epoch ends with 5, which divide over no number of ranks."""
SEED = 7


def make_small_run(folder: Path) -> Path:
    """Write model, tokenizer, rows and run YAML into `folder`; returns the YAML.

    The model has what layouts can get wrong: biases, grouped key heads, an output head tied to the embeddings.
    """
    model = folder / "model"
    config = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    write_random_model(model, config, seed=SEED, dtype="float32")
    draw = random.Random(SEED)
    words = " ".join(corpus_documents(20)).split()

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    # answers of 1 to 40 words, so that ranks train on very different numbers of tokens
    chats = (chat(text(12), text(40 if number % 3 else 2)) for number in range(ROWS))
    rows = write_rows(folder / "rows.jsonl", chats)
    schedule = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "warmup_steps": 0}
    train = {"effective_batch_size": 16, "bf16": False, "gradient_checkpointing": False, **schedule}
    data = {"max_lost_fraction": 0.05, "workers": "auto"}
    return write_config(folder / "small.yaml", model=model, rows=rows, seq_len=128, train=train, data=data)
