"""Models of random weights: a benchmark downloads nothing. `python -m benchmarks.random_model NAME FOLDER` writes one
of a published shape, in a process of its own, which leaves the GPU empty."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.starter_corpus import corpus_documents
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.text import GIB

ROOM = 2 * GIB
"""Beside the weights, while they are made on the GPU."""


def write_random_model(
    folder: Path, config: Mapping[str, Any], *, seed: int = 17, dtype: str = "bfloat16", device: str = "cpu"
) -> None:
    """Write a small tokenizer and random weights of a config.json, whose vocabulary is the tokenizer's unless it says
    another."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from benchmarks.starter_base import make_tokenizer

    transformers_logging.disable_progress_bar()
    aside = folder.with_name(f"{folder.name}.writing")  # a folder with a config and no weights would pass as made
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer = make_tokenizer(corpus_documents(200))
    tokenizer.save_pretrained(aside)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"vocab_size": len(tokenizer), **config, **ends, "dtype": dtype}
    (aside / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(aside), dtype=getattr(torch, dtype))
    model.save_pretrained(aside)
    aside.rename(folder)


def write_published_shape(name: str, folder: Path) -> None:
    """Write a published shape in bf16: on the GPU where it holds the weights, else on the CPU, in minutes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(KNOWN_MODELS[name].config)
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    device = "cuda" if free > 2 * meta.num_parameters() + ROOM else "cpu"
    write_random_model(folder, config, device=device)


def ensure_published_shape(name: str, folder: Path) -> Path:
    """The folder, with the model in it, made by a process of its own."""
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.random_model", name, str(folder)], check=True)
    return folder


if __name__ == "__main__":
    write_published_shape(sys.argv[1], Path(sys.argv[2]))
