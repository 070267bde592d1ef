"""The adapter that a run continues (`model.adapter`): checked against model and base before weights are read."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sft_play.config.adapter import CONFIG_FILE, KEY, WEIGHTS_FILE, run_of
from sft_play.config.schema import RunConfig
from sft_play.data.sources.files import file_digest
from sft_play.errors import ModelError
from sft_play.facts.models.architecture import find_model_folder, base_weights_identity
from sft_play.log import one_line
from sft_play.training.checkpoints.checkpoints import require_sealed
from sft_play.training.checkpoints.full_state_dict import adapter_names, is_saved_twice
from sft_play.training.prepare.model_spec import ModelSpec, empty_model, grown

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """An adapter that fits the run's model and belongs to its base."""

    folder: Path
    sha256: str
    """Digest of its weights' file."""
    run: str | None
    """Name of the run that trained it; None where there is no run of this toolkit beside it."""
    note: str

    def facts(self) -> dict[str, Any]:
        """For `data` of the manifest."""
        return {"path": str(self.folder), "sha256": self.sha256, "run": self.run}


def origin_of(config: RunConfig, model_spec: ModelSpec) -> Origin | None:
    """The adapter that a run continues; None where it starts a new one. Raises ModelError: its
    files cannot be read, or are the adapter of another model or another base."""
    if config.model.adapter is None:
        return None
    folder = Path(config.model.adapter)
    run = run_of(folder)
    data = (run[1].get("data") if run else None) or {}
    _require_base(config, model_spec, folder, data.get("weights") or {})
    require_sealed(folder)
    tensors = _require_tensors(folder / WEIGHTS_FILE, config, model_spec)
    digest = file_digest(folder / WEIGHTS_FILE)
    note = f"Adapter: continues {folder} ({tensors} tensors, digest {digest[:12]}), with a new optimizer and schedule"
    return Origin(folder, digest, run[0].name if run else None, note)


def _require_tensors(file: Path, config: RunConfig, model_spec: ModelSpec) -> int:
    model = empty_model(grown(model_spec), trust_remote_code=config.model.trust_remote_code)
    state = model.state_dict()
    wanted = {name: tuple(state[ours].shape) for name, ours in adapter_names(model).items()}
    in_file = model_spec.tower.in_whole if model_spec.tower is not None else str
    try:
        with safe_open(file, framework="pt") as tensors:
            names = {in_file(name): name for name in tensors.keys() if not is_saved_twice(name)}  # noqa: SIM118
            shapes = {name: tuple(tensors.get_slice(stored).get_shape()) for name, stored in names.items()}
            problems = [
                f"{name} has the shape {shapes.get(name)} there and {wanted.get(name)} here"
                for name in sorted({**wanted, **shapes})
                if wanted.get(name) != shapes.get(name)
            ] or [
                f"{name} has values that are not finite"
                for name, stored in names.items()
                if not tensors.get_tensor(stored).isfinite().all()
            ]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{KEY}: {file} cannot be read: {one_line(str(error))}") from None
    if problems:
        what = f"{one_line(problems[0])} ({len(problems)} such)"
        raise ModelError(f"{KEY}: {file} does not fit {one_line(config.model.name)}: {what}")
    return len(names)


def _require_base(config: RunConfig, model_spec: ModelSpec, folder: Path, recorded: dict[str, Any]) -> None:
    """By digest where both are files here, else by name."""
    name, now = config.model.name, base_weights_identity(config.model.name, model_spec.hf_config)["sha256"]
    said = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    theirs, was = str(recorded.get("path") or said or ""), recorded.get("sha256")
    is_local = find_model_folder(name) is not None
    if not recorded and is_local and Path(theirs).is_dir():
        was = base_weights_identity(theirs, None)["sha256"]
    # a digest of files has 64 digits, a commit of the hub 40
    if is_local and was is not None and len(str(was)) == len(str(now)):
        if was != now:
            raise ModelError(f"{KEY}: {folder} was trained on other weights ({one_line(theirs)}) than those of "
                             f"model.name={one_line(name)}")  # fmt: skip
    elif theirs and _plain_name(theirs) != _plain_name(name):
        raise ModelError(f"{KEY}: {folder} was trained on {one_line(theirs)}, and model.name is {one_line(name)}: give "
                         f"the adapter's own base, or correct its {CONFIG_FILE}")  # fmt: skip


def _plain_name(name: str) -> str:
    """`owner/name`, a folder of that name and its snapshot in the hub's cache are equal."""
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(name).name).lower()
