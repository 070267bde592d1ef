"""What a resumed run has to have in common with its first start."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date
from typing import Any

from sft_play.config.leaves import leaves
from sft_play.config.load import LoadedConfig
from sft_play.config.resolved import differing_keys, resolved
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.runs.files import read_json, scrub
from sft_play.runs.folder import DEEPSPEED_FILE, RunFolder

FREE_TO_CHANGE = frozenset(
    {
        "output.dir",
        "output.name",
        "output.if_exists",
        "train.batch_size",  # the effective batch is compared apart
        "train.grad_accum",
        "train.gradient_checkpointing",
        "train.stop_after_steps",
        "train.logging_steps",
        "train.on_nan",
        "train.save_total_limit",
        "train.report_to",
        "train.profile_steps",
        "distributed.profile_communication",
        "train.dataloader_pin_memory",
        "tuning.backend_fallback",
        "distributed.timeout_s",
        "distributed.shard_ranks",
        "model.mesh_shape",
    }
)
"""Keys that may differ when a run is resumed: they do not change the training's numbers."""


def check_same_run(
    folder: RunFolder, loaded: LoadedConfig, *, data: dict[str, Any], batch: dict[str, Any], backend: str = "bnb"
) -> None:
    """Raises RunFolderError, listing every difference, if a run was started with settings that change its numbers.

    The batch may be split differently over other ranks: what matters is the effective batch.
    """
    try:
        old = json.loads((folder.path / "resolved.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder.path} cannot be resumed: its resolved.json cannot be read ({error})") from None
    # Through JSON and redacted, as the old one was written: tuples are lists there, and secrets are stars.
    new = json.loads(json.dumps(scrub(resolved(loaded.config, effective_batch=math.prod(batch.values())))))
    if not isinstance(old, dict):
        raise RunFolderError(f"{folder.path} cannot be resumed: its resolved.json is damaged")
    differing = {
        key: pair
        for key, pair in differing_keys(old, new).items()
        if key not in FREE_TO_CHANGE and not _came_later(old, key, pair[1])
    }
    lines = [f"{key}: the run has {json.dumps(was)}, now {json.dumps(now)}" for key, (was, now) in differing.items()]
    manifest = folder.manifest()
    recorded = manifest.get("data")
    for name, facts in data.items():
        was = recorded.get(name) if isinstance(recorded, dict) else None
        if not isinstance(was, dict):
            lines.append(f"data {name}: the run's manifest does not record what it was")
        elif was.get("sha256") != facts.get("sha256"):
            lines.append(f"data {name}: the content of {facts.get('path')} has changed since the run started")
    trained_by = manifest.get("backend", "bnb")  # the only backend before the manifest named it
    if trained_by != backend and "tuning.backend" not in differing:
        lines.append(f"tuning backend: the run was trained by {trained_by}, and {backend} would continue it here")
    before = manifest.get("batch")
    if before and math.prod(before.values()) != math.prod(batch.values()):
        lines.append(f"batch: the run has {json.dumps(before)}, now {json.dumps(batch)}")
    if lines:
        listed = "\n".join(f"  {one_line(line, limit=300)}" for line in lines)
        raise RunFolderError(
            f"{folder.path} was started with other settings, and continuing would mix two runs:\n{listed}\n"
            "set these back, or start a new run"
        )


def _came_later(old: Mapping[str, Any], key: str, now: Any) -> bool:
    """Whether a setting did not exist in the version of an old run, and has the value that changes nothing."""
    *outer, name = key.split(".")
    for part in outer:
        old = old.get(part) if isinstance(old.get(part), dict) else {}  # type: ignore[assignment]
    return name not in old and key in leaves() and now == leaves()[key].default


def given_deepspeed(folder: RunFolder) -> dict[str, Any] | None:
    """DeepSpeed's config as a run was given it, its "auto" left open; None where another engine runs it.

    The file in the folder has the plan's numbers in it, which are not the user's: it counts only where an older version
    wrote the plan.
    """
    return read_json(folder.path / "plan.json").get("deepspeed") or read_json(folder.path / DEEPSPEED_FILE) or None


def first_day(folder: RunFolder) -> date:
    """The day of the run's first start, for chat templates that write the date."""
    kept = folder.manifest().get("template_date") if folder.manifest_path.is_file() else None
    return date.fromisoformat(kept) if isinstance(kept, str) else date.today()
