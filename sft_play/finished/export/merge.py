"""`make merge`: an adapter merged into the 16-bit weights of its base, one tensor at a time.

A 70B needs the RAM of one output file, one tensor in fp32 and the adapter: the model is on the meta device
(`adapted_model`), and the base's files are read, merged and written tensor by tensor (`merged_weights`).

A QLoRA adapter was trained on NF4 weights, which are not the base's files. Merged into the weights that NF4 stands for
(`dequantized`) the model computes what was trained; merged into the original ones it is off by NF4's rounding, some 9%
of their size.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from sft_play.facts.models.architecture import base_weights_identity
from sft_play.facts.models.config_fields import dequantised_config
from sft_play.finished.export.adapted_model import AdaptedModel, Base
from sft_play.finished.export.merged_weights import MergedWeights
from sft_play.finished.export.places import (
    MERGE_FILE,
    MERGED,
    merge_record,
    merged_model,
    refuse_another_model,
    require_mergeable,
)
from sft_play.finished.export.prompts import write_generation_config
from sft_play.finished.run import (
    FinishedRun,
    Outcome,
    base_folder,
    built_folder,
    next_line,
    require_space,
    text_only_of,
)
from sft_play.planner.memory.loading_and_saving import MAX_WEIGHTS_FILE_BYTES
from sft_play.runs.files import read_json, read_summary, write_json
from sft_play.runs.locking import lock_run
from sft_play.training.checkpoints.card import CardFacts, WeightsKind, write_card
from sft_play.training.checkpoints.checkpoints import record_digests
from sft_play.training.checkpoints.model_saving import set_dtype
from sft_play.training.prepare.experts import holds_routed_experts
from sft_play.training.prepare.model_spec import ModelSpec, peft_loading_warning
from sft_play.training.prepare.quiet import quiet_libraries
from sft_play.units import format_gib

logger = logging.getLogger(__name__)

SHORT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Merged(Outcome):
    """What `merge_run` wrote."""

    run: Path
    path: Path
    dtype: str
    base: Base | None
    """Of a QLoRA run: which weights the adapter was added to."""
    layers: int
    untied: bool
    """Whether input and output embeddings, one tensor in the base, are two now."""
    bytes: int
    streamed: bool
    wall_s: float
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lines = [f"Merged: {self.layers} layers"]
        if self.base is not None:
            chosen = "what was trained" if self.base == "dequantized" else "not quite what was trained"
            lines.append(f"Base: {self.base}, {chosen}: the adapter was trained on NF4 weights")
        lines += self.notes
        if self.untied:
            lines.append("Embeddings: input and output were one tensor in the base and are two now (both were trained)")
        lines.append(f"Written to: {self.path} ({self.dtype}, {format_gib(self.bytes, digits=2)} GiB, {self.wall_s:.0f} s)")
        elsewhere = {} if self.path == self.run / MERGED else {"OUT": self.path}
        return [*lines, next_line("merge-test", RUN=self.run, **elsewhere)]


def merge_run(
    run: FinishedRun,
    *,
    dtype: str | None = None,
    base: Base | None = None,
    out: Path | None = None,
    replace: bool = False,
    file_bytes: int = MAX_WEIGHTS_FILE_BYTES,
) -> Merged:
    """Write the base with the run's adapter merged into it, as a folder that loads as any model, with the options of
    docs/trained.md (merge). `file_bytes` is the size of one output file, which is held in RAM. Raises RunFolderError
    where the run was trained whole and needs no merge, or the target exists; ConfigError where `base` is given for a
    run without NF4 weights, the disk is too small, or a value has no place in fp16; ModelError where the base is
    missing, or does not fit the adapter."""
    started = time.monotonic()
    target = out or run.folder.path / MERGED
    require_mergeable(run, base, target, replace=replace)
    quiet_libraries()
    folder = base_folder(run)
    adapted = AdaptedModel(run, base=(base or "dequantized") if run.is_quantized else None)
    weights = MergedWeights(adapted, folder, SHORT_DTYPES[dtype] if dtype else None)
    with built_folder(target) as building:
        require_space(building, weights.most_bytes, "the merged model needs")
        weights.write(building, file_bytes)
        stops = _write_configs(adapted, folder, building, weights.dtype)
        record_digests(building)
        short = {value: name for name, value in SHORT_DTYPES.items()}.get(weights.dtype, str(weights.dtype))
        write_card(building, card_facts(run, adapted.model_spec, stops, dtype=short))
        adapter = base_weights_identity(str(run.weights), None)["sha256"]
        made_of = {"base": adapted.base, "dtype": short, "adapter_sha256": adapter, "test": None}
        write_json(building / MERGE_FILE, made_of)
        size = sum(file.stat().st_size for file in building.glob("*.safetensors"))
    lost = peft_loading_warning(adapted.model_spec, trust_remote_code=run.config.model.trust_remote_code)
    notes = [*text_only_of(run), *[f"Adapter: {lost}"] * bool(lost)]
    if short != "fp32" and any(holds_routed_experts(*one) for one in adapted.plain.named_modules()):
        notes.append(f"Experts: rounded to {short}, a router may choose another of two that are nearly equal to it; "
                     "DTYPE=fp32 keeps the adapter's choices")  # fmt: skip
    return Merged(
        run.folder.path, target, short, adapted.base, len(adapted.layers), bool(adapted.untied), size,
        weights.is_streamed, round(time.monotonic() - started, 2), tuple(notes),
    )  # fmt: skip


def card_facts(
    run: FinishedRun, model_spec: ModelSpec, stop: list[int], *, kind: WeightsKind = "merged", dtype: str = ""
) -> CardFacts:
    """What the card of a finished run's weights says; `dtype` is a merged model's."""
    summary = read_summary(run.folder.path)  # the card has fewer lines without one
    return CardFacts(
        kind=kind, name=run.folder.path.name, config=run.config, plan=run.plan(), model_spec=model_spec,
        manifest=run.manifest, summary=summary, stop=stop, dtype=dtype,
    )  # fmt: skip


def _write_configs(adapted: AdaptedModel, base: Path, folder: Path, dtype: torch.dtype) -> list[int]:
    config = dequantised_config(read_json(base / "config.json"))
    text = config.get("text_config") or config
    set_dtype(config, str(dtype).removeprefix("torch."))
    if adapted.untied:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    if adapted.model_spec.resize_to is not None:
        text["vocab_size"] = adapted.model_spec.resize_to
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    adapted.tokenizer.save_pretrained(folder)
    stops = write_generation_config(adapted.run, adapted.tokenizer, base, folder)
    # code of the model's own, which config.json's auto_map names, and what its class reads images with
    for file in (*base.glob("*.py"), *base.glob("*processor*.json")):
        shutil.copyfile(file, folder / file.name)
    return stops


def whole_model(run: FinishedRun, *, is_locked: bool) -> Path:
    """The folder with the run's whole model: its own weights, or `merged/`, which is written now where it is missing or
    of an earlier adapter. `is_locked`: the caller holds the run's lock, which a merge needs. Raises RunFolderError
    where what was merged is not what was trained, or SftPlayError as `merge_run` does."""
    if not run.is_adapter:
        return run.weights
    merged = merged_model(run)
    if merged is not None:
        refuse_another_model(merged, run)
        return merged
    target = run.folder.path / MERGED
    logger.info("The adapter is merged into its base first (%s)", target)
    with contextlib.nullcontext() if is_locked else lock_run(run.folder):
        return merge_run(run, replace=target.exists()).path


def record_test(folder: Path, *, ok: bool, divergence: float, limit: float) -> None:
    """Add merge-test's verdict to the record; nothing where the folder has none: it may be anybody's model."""
    if not (folder / MERGE_FILE).is_file():
        return
    test = {"ok": ok, "kl_merged": divergence, "kl_limit": limit, "date": datetime.now(UTC).isoformat("T", "seconds")}
    write_json(folder / MERGE_FILE, {**merge_record(folder), "test": test})
