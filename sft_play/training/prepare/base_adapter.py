"""The adapter that a run continues (`model.adapter`): checked against model and base before weights are read."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sft_play.config.adapter import ADAPTER_CONFIG_FILE, ADAPTER_KEY, ADAPTER_WEIGHTS_FILE, find_adapter_run
from sft_play.config.schema import RunConfig
from sft_play.data.sources.files import file_digest
from sft_play.errors import ModelError
from sft_play.facts.models.architecture import base_weights_identity, find_model_folder
from sft_play.log import one_line
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.checkpoints.full_state_dict import is_duplicate_name, model_names_by_saved_name
from sft_play.training.prepare.model_spec import ModelSpec, build_meta_model, resized_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseAdapter:
    """An adapter that fits the run's model and belongs to its base."""

    folder: Path
    sha256: str
    """Digest of its weights' file."""
    run: str | None
    """Name of the run that trained it; None where there is no run of this toolkit beside it."""
    note: str

    def manifest_facts(self) -> dict[str, Any]:
        """For `data` of the manifest."""
        return {"path": str(self.folder), "sha256": self.sha256, "run": self.run}


def read_base_adapter(config: RunConfig, model_spec: ModelSpec) -> BaseAdapter | None:
    """The adapter that a run continues; None where it starts a new one. Raises ModelError: its
    files cannot be read, or are the adapter of another model or another base."""
    if config.model.adapter is None:
        return None
    folder = Path(config.model.adapter)
    run = find_adapter_run(folder)
    manifest_data = (run[1].get("data") if run else None) or {}
    _require_base(config, model_spec, folder, manifest_data.get("weights") or {})
    require_unchanged(folder)
    tensors = _require_tensors(folder / ADAPTER_WEIGHTS_FILE, config, model_spec)
    digest = file_digest(folder / ADAPTER_WEIGHTS_FILE)
    note = f"Adapter: continues {folder} ({tensors} tensors, digest {digest[:12]}), with a new optimizer and schedule"
    return BaseAdapter(folder, digest, run[0].name if run else None, note)


def _require_tensors(file: Path, config: RunConfig, model_spec: ModelSpec) -> int:
    model = build_meta_model(resized_spec(model_spec), trust_remote_code=config.model.trust_remote_code)
    state = model.state_dict()
    expected_shapes = {
        name: tuple(state[parameter_name].shape) for name, parameter_name in model_names_by_saved_name(model).items()
    }
    to_saved_name = model_spec.text_tower.to_full_name if model_spec.text_tower is not None else str
    try:
        with safe_open(file, framework="pt") as tensors:
            saved_names = {
                to_saved_name(name): name
                for name in tensors.keys()  # noqa: SIM118
                if not is_duplicate_name(name)
            }
            saved_shapes = {
                name: tuple(tensors.get_slice(saved_name).get_shape()) for name, saved_name in saved_names.items()
            }
            problems = [
                f"{name} has the shape {saved_shapes.get(name)} there and {expected_shapes.get(name)} here"
                for name in sorted({**expected_shapes, **saved_shapes})
                if expected_shapes.get(name) != saved_shapes.get(name)
            ] or [
                f"{name} has values that are not finite"
                for name, saved_name in saved_names.items()
                if not tensors.get_tensor(saved_name).isfinite().all()
            ]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{ADAPTER_KEY}: {file} cannot be read: {one_line(str(error))}") from None
    if problems:
        problem = f"{one_line(problems[0])} ({len(problems)} such)"
        raise ModelError(f"{ADAPTER_KEY}: {file} does not fit {one_line(config.model.name)}: {problem}")
    return len(saved_names)


def _require_base(config: RunConfig, model_spec: ModelSpec, folder: Path, recorded_weights: dict[str, Any]) -> None:
    """Require the adapter's base to be the model: by digest where both are files here, else by name."""
    name, sha256 = config.model.name, base_weights_identity(config.model.name, model_spec.hf_config)["sha256"]
    config_base = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    adapter_base, recorded_sha256 = (
        str(recorded_weights.get("path") or config_base or ""),
        recorded_weights.get("sha256"),
    )
    is_local = find_model_folder(name) is not None
    if not recorded_weights and is_local and Path(adapter_base).is_dir():
        recorded_sha256 = base_weights_identity(adapter_base, None)["sha256"]
    # a digest of files has 64 digits, a commit of the hub 40
    if is_local and recorded_sha256 is not None and len(str(recorded_sha256)) == len(str(sha256)):
        if recorded_sha256 != sha256:
            raise ModelError(f"{ADAPTER_KEY}: {folder} was trained on other weights ({one_line(adapter_base)}) than "
            f"those of "
                             f"model.name={one_line(name)}")  # fmt: skip
    elif adapter_base and _short_name(adapter_base) != _short_name(name):
        raise ModelError(f"{ADAPTER_KEY}: {folder} was trained on {one_line(adapter_base)}, and model.name is "
                         f"{one_line(name)}: give the adapter's own base, or correct its "
                         f"{ADAPTER_CONFIG_FILE}")  # fmt: skip


def _short_name(name: str) -> str:
    """`owner/name`, a folder of that name and its snapshot in the hub's cache are equal."""
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(name).name).lower()
