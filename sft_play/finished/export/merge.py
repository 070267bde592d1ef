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
from sft_play.finished.export.adapted_model import AdaptedModel, MergeBase
from sft_play.finished.export.merged_weights import MergedWeights
from sft_play.finished.export.places import (
    MERGE_FILE,
    MERGED_FOLDER,
    find_merged_model,
    read_merge_record,
    require_faithful_merge,
    require_mergeable,
)
from sft_play.finished.export.prompts import write_generation_config
from sft_play.finished.run import (
    FinishedRun,
    RunCommandResult,
    base_model_folder,
    language_model_notes,
    next_command_line,
    require_space,
    staged_folder,
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

MERGE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class MergeResult(RunCommandResult):
    """What `merge_run` wrote."""

    run: Path
    path: Path
    dtype: str
    base: MergeBase | None
    """Of a QLoRA run: which weights the adapter was added to."""
    layers: int
    untied: bool
    """True if input and output embeddings, one tensor in the base, are two now."""
    bytes: int
    streamed: bool
    wall_s: float
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lines = [f"Merged: {self.layers} layers"]
        if self.base is not None:
            base_note = "what was trained" if self.base == "dequantized" else "not quite what was trained"
            lines.append(f"Base: {self.base}, {base_note}: the adapter was trained on NF4 weights")
        lines += self.notes
        if self.untied:
            lines.append("Embeddings: input and output were one tensor in the base and are two now (both were trained)")
        lines.append(
            f"Written to: {self.path} ({self.dtype}, {format_gib(self.bytes, digits=2)} GiB, {self.wall_s:.0f} s)"
        )
        out_variable = {} if self.path == self.run / MERGED_FOLDER else {"OUT": self.path}
        return [*lines, next_command_line("merge-test", RUN=self.run, **out_variable)]


def merge_run(
    run: FinishedRun,
    *,
    dtype: str | None = None,
    base: MergeBase | None = None,
    out: Path | None = None,
    replace: bool = False,
    file_bytes: int = MAX_WEIGHTS_FILE_BYTES,
) -> MergeResult:
    """Write the base with the run's adapter merged into it, as a folder that loads as any model, with the options of
    docs/trained.md (merge). `file_bytes` is the size of one output file, which is held in RAM. Raises RunFolderError
    where the run was trained whole and needs no merge, or the target exists; ConfigError where `base` is given for a
    run without NF4 weights, the disk is too small, or a value has no place in fp16; ModelError where the base is
    missing, or does not fit the adapter."""
    start_time = time.monotonic()
    target = out or run.folder.path / MERGED_FOLDER
    require_mergeable(run, base, target, replace=replace)
    quiet_libraries()
    base_folder = base_model_folder(run)
    adapted = AdaptedModel(run, base=(base or "dequantized") if run.is_quantized else None)
    merged_weights = MergedWeights(adapted, base_folder, MERGE_DTYPES[dtype] if dtype else None)
    with staged_folder(target) as staging_folder:
        require_space(staging_folder, merged_weights.max_bytes, "the merged model needs")
        merged_weights.write(staging_folder, file_bytes)
        stop_ids = _write_configs(adapted, base_folder, staging_folder, merged_weights.dtype)
        record_digests(staging_folder)
        dtype_name = {value: name for name, value in MERGE_DTYPES.items()}.get(
            merged_weights.dtype, str(merged_weights.dtype)
        )
        write_card(staging_folder, card_facts(run, adapted.model_spec, stop_ids, dtype=dtype_name))
        adapter_digest = base_weights_identity(str(run.weights), None)["sha256"]
        record = {"base": adapted.base, "dtype": dtype_name, "adapter_sha256": adapter_digest, "test": None}
        write_json(staging_folder / MERGE_FILE, record)
        size = sum(file.stat().st_size for file in staging_folder.glob("*.safetensors"))
    lost_note = peft_loading_warning(adapted.model_spec, trust_remote_code=run.config.model.trust_remote_code)
    notes = [*language_model_notes(run), *[f"Adapter: {lost_note}"] * bool(lost_note)]
    if dtype_name != "fp32" and any(
        holds_routed_experts(*named_module) for named_module in adapted.base_model.named_modules()
    ):
        notes.append(f"Experts: rounded to {dtype_name}, a router may choose another of two that are nearly equal to "
        f"it; "
                     "DTYPE=fp32 keeps the adapter's choices")  # fmt: skip
    return MergeResult(
        run.folder.path, target, dtype_name, adapted.base, len(adapted.adapted_layers), bool(adapted.untied_sources),
        size,
        merged_weights.is_streamed, round(time.monotonic() - start_time, 2), tuple(notes),
    )  # fmt: skip


def card_facts(
    run: FinishedRun, model_spec: ModelSpec, stop_ids: list[int], *, kind: WeightsKind = "merged", dtype: str = ""
) -> CardFacts:
    """What the card of a finished run's weights says; `dtype` is a merged model's."""
    summary = read_summary(run.folder.path)  # the card has fewer lines without one
    return CardFacts(
        kind=kind, name=run.folder.path.name, config=run.config, plan=run.plan(), model_spec=model_spec,
        manifest=run.manifest, summary=summary, stop_ids=stop_ids, dtype=dtype,
    )  # fmt: skip


def _write_configs(adapted: AdaptedModel, base_folder: Path, folder: Path, dtype: torch.dtype) -> list[int]:
    config = dequantised_config(read_json(base_folder / "config.json"))
    text_config = config.get("text_config") or config
    set_dtype(config, str(dtype).removeprefix("torch."))
    if adapted.untied_sources:
        config["tie_word_embeddings"] = text_config["tie_word_embeddings"] = False
    if adapted.model_spec.resize_to is not None:
        text_config["vocab_size"] = adapted.model_spec.resize_to
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    adapted.tokenizer.save_pretrained(folder)
    stop_ids = write_generation_config(adapted.run, adapted.tokenizer, base_folder, folder)
    # code of the model's own, which config.json's auto_map names, and what its class reads images with
    for file in (*base_folder.glob("*.py"), *base_folder.glob("*processor*.json")):
        shutil.copyfile(file, folder / file.name)
    return stop_ids


def ensure_whole_model_folder(run: FinishedRun, *, is_locked: bool) -> Path:
    """The folder with the run's whole model: its own weights, or `merged/`, which is written now where it is missing or
    of an earlier adapter. `is_locked`: the caller holds the run's lock, which a merge needs. Raises RunFolderError
    where what was merged is not what was trained, or SftPlayError as `merge_run` does."""
    if not run.is_adapter:
        return run.weights
    merged = find_merged_model(run)
    if merged is not None:
        require_faithful_merge(merged, run)
        return merged
    target = run.folder.path / MERGED_FOLDER
    logger.info("The adapter is merged into its base first (%s)", target)
    with contextlib.nullcontext() if is_locked else lock_run(run.folder):
        return merge_run(run, replace=target.exists()).path


def record_merge_test(folder: Path, *, ok: bool, divergence: float, limit: float) -> None:
    """Add merge-test's verdict to the record; nothing where the folder has none: it may be anybody's model."""
    if not (folder / MERGE_FILE).is_file():
        return
    verdict = {
        "ok": ok,
        "kl_merged": divergence,
        "kl_limit": limit,
        "date": datetime.now(UTC).isoformat("T", "seconds"),
    }
    write_json(folder / MERGE_FILE, {**read_merge_record(folder), "test": verdict})
