"""What stands beside the weights of a finished run: configs, stop tokens, tokenizer, template, facts of its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from sft_play.finished.export.adapted_model import AdaptedModel
from sft_play.finished.load import renderer_of
from sft_play.finished.run import FinishedRun
from sft_play.runs.files import read_json
from sft_play.training.checkpoints.card import CardFacts, Kind
from sft_play.training.checkpoints.model_saving import set_stop_tokens
from sft_play.training.measure.exact_match import Configured, stop_ids
from sft_play.training.prepare.model_spec import ModelSpec


def card_facts(
    run: FinishedRun, model_spec: ModelSpec, stop: list[int], *, kind: Kind = "merged", dtype: str = ""
) -> CardFacts:
    """What the card of a finished run's weights says; `dtype` is a merged model's."""
    summary = read_json(run.folder.path / "summary.json")  # the card has fewer lines without one
    return CardFacts(
        kind=kind, name=run.folder.path.name, config=run.config, plan=run.plan(), model_spec=model_spec,
        manifest=run.manifest, summary=summary, stop=stop, dtype=dtype,
    )  # fmt: skip


def write_configs(adapted: AdaptedModel, base: Path, folder: Path, dtype: torch.dtype) -> list[int]:
    """config.json, generation config with the stop tokens of training, tokenizer, template and the model's own code.

    Returns the stop tokens.
    """
    if adapted.model_spec.is_text_tower:  # the base's config.json is of the whole model, images and all
        adapted.plain.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = [type(adapted.plain).__name__]
    else:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # what transformers 4 called `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    if adapted.untied:
        config["tie_word_embeddings"] = False
    if adapted.model_spec.resize_to is not None:
        config["vocab_size"] = adapted.model_spec.resize_to
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    adapted.tokenizer.save_pretrained(folder)
    stops = write_generation_config(adapted.run, adapted.tokenizer, base, folder)
    for file in base.glob("*.py"):  # code of the model's own, which config.json's auto_map names
        shutil.copyfile(file, folder / file.name)
    return stops


def write_generation_config(run: FinishedRun, tokenizer: Any, source: Path, folder: Path) -> list[int]:
    """Write the generation config of the model in `source`, with the stop tokens of training, into `folder`.

    Returns the stop tokens.
    """
    generation = source / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stops = stop_tokens(run, tokenizer, settings.get("eos_token_id", config.get("eos_token_id")))
    set_stop_tokens(folder, stops, tokenizer.pad_token_id, of=source)
    return stops


def stop_tokens(run: FinishedRun, tokenizer: Any, of_base: Configured) -> list[int]:
    """Tokens that end an answer as the run was trained: the base's own, and what ends an assistant's turn."""
    return stop_ids(run.config.task_mode, tokenizer, renderer_of(run, tokenizer), of_base)
