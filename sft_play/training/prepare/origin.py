"""The adapter that a run continues (`model.adapter`): checked against model and base before weights are read."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sft_play.config.adapter import CONFIG_FILE, KEY, WEIGHTS_FILE, adapter_folder, run_of
from sft_play.config.schema import RunConfig
from sft_play.data.sources.files import digest_of
from sft_play.errors import ModelError
from sft_play.facts.models.architecture import local_folder
from sft_play.log import one_line
from sft_play.training.checkpoints.full_state_dict import adapter_names, is_saved_twice
from sft_play.training.model.model_loading import weights_facts
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
    notes: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """For `data` of the manifest."""
        return {"path": str(self.folder), "sha256": self.sha256, "run": self.run}


def origin_of(config: RunConfig, model_spec: ModelSpec, *, tokenizer_sha256: str | None = None) -> Origin | None:
    """The adapter that a run continues; None where it starts a new one.

    `tokenizer_sha256`: digest of the run's tokenizer and template, to say whether the adapter was trained with another.

    Raises:
        ConfigError: its files cannot be fetched.
        ModelError: they cannot be read, or are the adapter of another model or another base.
    """
    place = config.model.adapter
    if place is None:
        return None
    folder = adapter_folder(place)
    run = run_of(folder)
    data = (run[1].get("data") if run else None) or {}
    notes = [_require_base(config, model_spec, folder, data.get("weights") or {})]
    tensors = _require_tensors(folder / WEIGHTS_FILE, config, model_spec)
    digest = digest_of(folder / WEIGHTS_FILE)
    notes.append(
        f"Adapter: continues {folder} ({tensors} tensors, digest {digest[:12]}), with a new optimizer and schedule"
    )
    was = (data.get("tokenizer") or {}).get("sha256")
    if None not in (was, tokenizer_sha256) and was != tokenizer_sha256:
        notes.append(
            "Adapter: it was trained with another tokenizer or chat template (data.chat_template) than this run"
        )
    return Origin(folder, digest, run[0].name if run else None, tuple(note for note in notes if note))


def _require_tensors(file: Path, config: RunConfig, model_spec: ModelSpec) -> int:
    """How many tensors the adapter has, all of which the run's own adapter has too, in the same shapes.

    Raises:
        ModelError: naming the first that differs, is empty or is not finite.
    """
    model = empty_model(grown(model_spec), trust_remote_code=config.model.trust_remote_code)
    wanted = {name: tuple(model.state_dict()[ours].shape) for name, ours in adapter_names(model).items()}
    in_file = model_spec.tower.in_whole if model_spec.tower is not None else str
    problem = None
    try:
        with safe_open(file, framework="pt") as tensors:
            names = {in_file(name): name for name in tensors.keys() if not is_saved_twice(name)}  # noqa: SIM118
            for name, stored in names.items():
                shape = tuple(tensors.get_slice(stored).get_shape())
                if 0 in shape or not shape:
                    problem = problem or f"{name} is empty (shape {list(shape)})"
                elif name in wanted and shape != wanted[name]:
                    problem = (
                        problem or f"{name} has the shape {list(shape)}, and this model's has {list(wanted[name])}"
                    )
            missing, more = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
            if problem is None and (missing or more):
                problem = f"it lacks {missing[0]}" if missing else f"this model's has no {more[0]}"
                problem += f" ({len(missing)} are missing, {len(more)} too many)"
            for name, stored in names.items() if problem is None else ():
                if not tensors.get_tensor(stored).isfinite().all():
                    problem = problem or f"{name} has values that are not finite"
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{KEY}: {file} cannot be read: {one_line(str(error))}") from None
    if problem:
        raise ModelError(f"{KEY}: {file} does not fit {one_line(config.model.name)}: {one_line(problem, limit=300)}")
    return len(names)


def _require_base(config: RunConfig, model_spec: ModelSpec, folder: Path, recorded: dict[str, Any]) -> str | None:
    """Check that the adapter was trained on the run's base: by digest where both are files here, else by name.

    Returns a note where that can be known in part only.

    Raises:
        ModelError: it was trained on another.
    """
    now = weights_facts(config.model.name, model_spec.hf_config)
    is_local = local_folder(config.model.name) is not None
    theirs = str(recorded.get("path") or "") or _named_base(folder)
    was = recorded.get("sha256")
    # a digest of files has 64 digits, a commit of the hub 40
    is_same_kind = was is not None and (len(str(was)) == len(str(now["sha256"]))) and is_local
    if not recorded and is_local and Path(theirs).is_dir():
        was, is_same_kind = weights_facts(theirs, None)["sha256"], True
    if is_same_kind:
        if was == now["sha256"]:
            return None
        raise ModelError(
            f"{KEY}: {folder} was trained on other weights ({one_line(theirs)}, digest {str(was)[:12]}) than "
            f"model.name={one_line(config.model.name)} has now (digest {str(now['sha256'])[:12]}): give the adapter's "
            "own base"
        )
    if not theirs:
        return f"Adapter: {folder / CONFIG_FILE} names no base; its shapes fit {config.model.name}"
    if _plain_name(theirs) != _plain_name(config.model.name):
        raise ModelError(
            f"{KEY}: {folder} was trained on {one_line(theirs)}, and model.name is {one_line(config.model.name)}: give "
            f"the adapter's own base (if it is the same under another name: base_model_name_or_path in {CONFIG_FILE})"
        )
    if was is not None and not is_local and now["sha256"] not in (None, was):
        return (
            f"Adapter: it was trained on revision {str(was)[:12]} of {config.model.name}, and this run loads "
            f"{str(now['sha256'])[:12]} (model.revision={was} pins the first)"
        )
    return None


def _named_base(folder: Path) -> str:
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path") or "")


def _plain_name(name: str) -> str:
    """A model's name without its place: `owner/name`, a folder of that name and its snapshot in the hub's cache are
    equal."""
    cached = [part for part in Path(name).parts if part.startswith("models--")]
    return (cached[-1].rpartition("--")[2] if cached else Path(name).name).lower()
