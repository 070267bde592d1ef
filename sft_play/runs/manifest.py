"""What makes a run reproducible, for its manifest: versions, the git state, the program's own code; and what a resumed
run has to have in common with its first start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from sft_play._version import __version__
from sft_play.config.load import LoadedConfig, differing_options, is_derived_default, load_config, resolved_config
from sft_play.config.options import all_options
from sft_play.config.schema import RunConfig
from sft_play.errors import RunFolderError
from sft_play.facts.installed import installed_version
from sft_play.files import ROOT
from sft_play.log import one_line
from sft_play.runs.files import read_json, scrub
from sft_play.runs.folder import DEEPSPEED_FILE, FORMAT, RunFolder, Trust, refuse_code

# Packages whose versions can change what a run computes.
PACKAGES = (
    "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "deepspeed", "datasets", "tokenizers",
    "safetensors", "tensorboard", "numpy", "pydantic", "PyYAML",
)  # fmt: skip
# Keys that may differ when a run is resumed: they do not change the training's numbers. The effective batch is compared
# apart.
FREE_TO_CHANGE = frozenset({
    "output.dir", "output.name", "output.if_exists", "train.batch_size", "train.grad_accum",
    "train.gradient_checkpointing", "train.stop_after_steps", "train.max_hours", "train.logging_steps",
    "train.on_nan", "train.save_total_limit", "train.async_save", "train.report_to", "train.profile_steps",
    "train.dataloader_pin_memory", "tuning.backend_fallback", "model.mesh_shape",
    "distributed.profile_communication", "distributed.timeout_s", "distributed.shard_ranks",
})  # fmt: skip


def new_manifest(loaded: LoadedConfig, *, hardware: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """What makes a run reproducible: versions, git state, hardware, data hashes, seeds, command."""
    return {
        "format": FORMAT,
        "status": "running",
        "config_path": str(loaded.path.absolute()),
        "overrides": list(loaded.overrides),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": loaded.config.train.seed,
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "code": own_code(),
        "cwd": str(Path.cwd()),
        "hardware": hardware,
        "data": data,
        "choices": [],
    }


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and what can change a run's numbers; None where not installed."""
    own = {"sft_play": __version__, "python": platform.python_version()}
    packages = {package: installed_version(package) for package in PACKAGES}
    return own | packages | {"platform": f"{platform.system()} {platform.machine()}"}


PACKAGE = ROOT / "sft_play"


@functools.cache  # what this process has imported: a file that changes later is not what runs
def own_code() -> dict[str, Any]:
    """`code_facts` of this program, as it was when a run first asked."""
    return code_facts(PACKAGE)


def code_facts(package: Path) -> dict[str, Any]:
    """A digest of the program's own files, and the git state of its checkout: None where it is installed, or not
    tracked."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".yaml") and file.is_file():
            # with ends marked, so that no byte can move between a name and a content unseen
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    # A package in site-packages may lie inside a repository of the user's, which says nothing about its code.
    is_tracked = git_answer(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return {"sha256": digest.hexdigest(), "git": git_state(package) if is_tracked else None}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether the working tree differs; None outside a repository. Remotes are not read."""
    commit = git_answer(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = git_answer(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": git_answer(folder, "rev-parse", "--abbrev-ref", "HEAD"), "dirty": bool(changed)}


def git_answer(folder: Path, *words: str) -> str | None:
    """What git prints; None where there is no git, or it refuses."""
    try:
        answer = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


# --- a resumed run ----------------------------------------------------------------------------------------------------


def check_same_run(
    folder: RunFolder, loaded: LoadedConfig, *, data: dict[str, Any], batch: dict[str, Any], backend: str = "bnb"
) -> None:
    """Raises RunFolderError, listing every difference, if a run was started with settings that change its numbers; of
    the batch only the effective one counts."""
    differing = other_settings(folder, loaded.config, effective_batch=math.prod(batch.values()))
    lines = list(differing.values())
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
    refuse_mixing(folder, lines)


def settings_to_keep(overrides: Sequence[str]) -> list[str]:
    """The settings of a start that hold for a resume of its run too."""
    of_one_start = ("output.name=", "output.if_exists=", "train.stop_after_steps=")
    return [word for word in overrides if not word.startswith(of_one_start)]


def as_started(loaded: LoadedConfig, folder: RunFolder, *, trusts: Trust) -> LoadedConfig:
    """A run that is resumed: with the settings that its first start was given beside its config, and over them those
    that are given now. Raises ConfigError where they cannot be read, RunFolderError where they allow code that the user
    does not."""
    recorded, model = folder.manifest().get("overrides"), read_json(folder.path / "resolved.json").get("model")
    words = settings_to_keep(list(map(str, recorded))) if isinstance(recorded, list) else []
    adapter = model.get("adapter") if isinstance(model, dict) else None
    if adapter:  # by its path: `last` may be another one by now
        words.append(f"model.adapter={json.dumps(adapter)}")
    started = load_config(loaded.path, overrides=(*words, *loaded.overrides))
    refuse_code(folder.path, *(part.config.model for part in started.runs), trusts=trusts)
    return started


def other_settings(folder: RunFolder, config: RunConfig, *, effective_batch: int | None = None) -> dict[str, str]:
    """The settings that change a run's numbers and are not those it was started with, each in words; raises
    RunFolderError where the run's own cannot be read. `effective_batch` None: before there is a plan."""
    try:
        old = json.loads((folder.path / "resolved.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder.path} cannot be resumed: its resolved.json cannot be read ({error})") from None
    if not isinstance(old, dict) or not isinstance(old.get("train"), dict):
        raise RunFolderError(f"{folder.path} cannot be resumed: its resolved.json is damaged")
    effective_batch = effective_batch or old["train"].get("effective_batch_size")
    # Through JSON and redacted, as the old one was written: tuples are lists there, and secrets are stars.
    new = json.loads(json.dumps(scrub(resolved_config(config, effective_batch=effective_batch))))
    return {
        key: f"{key}: the run has {json.dumps(was)}, now {json.dumps(now)}"
        for key, (was, now) in differing_options(old, new).items()
        if key not in FREE_TO_CHANGE
        and not _came_later(old, key, now)
        and not (is_derived_default(config, key) and was == functools.reduce(getattr, key.split("."), config))
    }


def refuse_mixing(folder: RunFolder, lines: Sequence[str]) -> None:
    """Raises RunFolderError where `lines` say what is not as it was when a run was started."""
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
    return name not in old and key in all_options() and now == all_options()[key].default


def given_deepspeed(folder: RunFolder) -> dict[str, Any] | None:
    """DeepSpeed's config as a run was given it, its "auto" left open; None where another engine runs it. The file in
    the folder, which has the plan's numbers, counts where an older version wrote the plan."""
    return read_json(folder.path / "plan.json").get("deepspeed") or read_json(folder.path / DEEPSPEED_FILE) or None


def first_day(folder: RunFolder) -> date:
    """The day of the run's first start, for chat templates that write the date."""
    kept = folder.manifest().get("template_date") if folder.manifest_path.is_file() else None
    return date.fromisoformat(kept) if isinstance(kept, str) else date.today()
