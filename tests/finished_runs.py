"""Finished runs made without training: any base of random weights with an adapter of random weights, for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.conftest import chat, write_rows
from tests.models import make_tokenizer

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def make_base(folder: Path, model: Any, *, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Write a model and a tokenizer of 400 tokens."""
    make_tokenizer(folder)
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def finished_run(
    folder: Path, base: Path, *, mode: str = "lora", precision: str = "fp32", seed: int = 0,
    tokens: tuple[str, ...] = (), rows: Sequence[dict[str, Any]] = (), **lora: Any,
) -> Path:  # fmt: skip
    """Write the folder of a finished run with a random adapter for `base`; returns it.

    `tokens`: model.add_tokens; `lora`: settings of tuning.lora; `rows`: its data, some with images, half of them held
    out. The adapter is written by the code that training saves with.
    """
    from peft import get_peft_model

    from sft_play.api import plan
    from sft_play.config.load import load_config, resolved_config
    from sft_play.models.config_json import base_weights_identity
    from sft_play.runs.folder import MANIFEST_FORMAT, write_json
    from sft_play.training.checkpoints.model_saving import save_model
    from sft_play.training.model.model_loading import read_model
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.tokenizer import load_tokenizer

    data = folder.parent / f"{folder.name}.jsonl"
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_rows(data, rows or (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(24)))
    run_yaml = folder.parent / f"{folder.name}.yaml"
    run_yaml.write_text(
        f"model: {{name: {base}, max_seq_len: {512 if rows else 64}, add_tokens: {json.dumps(tokens)}}}\n"
        f"data: {{train_path: {data}, val_path: null, test_path: null, val_fraction: 0.5}}\n"
        f"tuning: {{mode: {mode}, lora: {json.dumps({'r': 4, 'dropout': 0.0, **lora})}}}\n"
        f"train: {{effective_batch_size: 8, max_steps: 2, report_to: [], bf16: {str(precision == 'bf16').lower()}}}\n"
        f"output: {{dir: {folder.parent}, name: {folder.name}}}\n"
    )
    loaded = load_config(run_yaml)
    planned = plan(loaded)
    found = load_tokenizer(loaded.config)
    tokenizer = found.tokenizer
    spec = build_model_spec(loaded.config, planned.precision, tokenizer_size=len(tokenizer), new_rows=found.new_rows)
    torch.manual_seed(seed)
    model = read_model(loaded.config, planned.precision, spec)
    if spec.peft_config is not None:
        spec.peft_config.base_model_name_or_path = str(base)
        model = get_peft_model(model, spec.peft_config, autocast_adapter_dtype=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    folder.mkdir(parents=True)
    save_model(model, tokenizer, folder / ("model" if mode == "full" else "adapter"), base_folder=base)
    write_json(folder / "resolved.json", resolved_config(loaded.config, effective_batch=8))
    write_json(folder / "plan.json", planned.as_json())
    ended = {"format": MANIFEST_FORMAT, "status": "finished", "ended": "2026-01-01T00:00:00+00:00"}
    facts: dict[str, Any] = {"weights": base_weights_identity(str(base), spec.hf_config)}
    if rows:
        image_rows = sum(bool(row.get("images")) for row in rows)
        facts["train"] = {
            "report": {"rows_kept": len(rows), "tokens": 0, "tokens_trained": 0, "image_rows": image_rows}
        }
    write_json(folder / "manifest.json", {**ended, "data": facts})
    return folder
