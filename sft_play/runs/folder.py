"""A run's folder: the names in it, its manifest, and the folders of its stages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.resolved import resolved
from sft_play.config.schema import RunConfig
from sft_play.errors import RunFolderError
from sft_play.runs.files import write_json

MANIFEST = "manifest.json"
STAGES = "stages"
"""In a run folder: the folders of its stages."""
DEEPSPEED_FILE = "deepspeed.json"
"""In a run folder: DeepSpeed's config, every value resolved."""
FORMAT = "sft_play run 1"
"""The value of `format` in the manifest: only a folder that has it is ours to resume, replace or discard."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the names in it, or that of one of its stages (then `run` is set)."""

    path: Path
    run: RunFolder | None = None
    """The run that this is a stage of: log, metrics and curves are there."""
    is_last: bool = False
    """Whether what this stage trained is the run's result."""

    def of_stage(self, name: str, *, is_last: bool = False) -> RunFolder:
        """The folder of a stage."""
        return RunFolder(self.path / STAGES / name, self, is_last)

    @property
    def whole(self) -> RunFolder:
        """The folder of the whole run."""
        return self.run or self

    @property
    def stage(self) -> str | None:
        """The name of the stage; None for a whole run."""
        return self.path.name if self.run is not None else None

    @property
    def manifest_path(self) -> Path:
        """Versions, git state, hardware, data hashes, seeds, and how the run ended."""
        return self.path / MANIFEST

    @property
    def metrics_path(self) -> Path:
        """One JSON object per line: what was logged at each step and evaluation, of every stage."""
        return self.whole.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """The run's log."""
        return self.whole.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files; a stage's is inside the run's, which shows all of them."""
        return self.path / "tb" if self.run is None else self.run.tensorboard / self.path.name

    def model_path(self, *, adapter: bool) -> Path:
        """Where the trained adapter, or the whole model, is saved."""
        folder = self.whole if self.is_last else self
        return folder.path / ("adapter" if adapter else "model")

    def begin_stage(self, manifest: Mapping[str, Any], *, plan: Mapping[str, Any], config: RunConfig) -> None:
        """Create the folder of a stage, or continue the existing one."""
        write_json(self.path / "plan.json", plan)
        write_json(self.path / "resolved.json", resolved(config, effective_batch=plan.get("effective_batch")))
        old = self.manifest() if self.manifest_path.is_file() else {}  # what the first start recorded stays
        write_json(
            self.manifest_path, old | {"format": FORMAT, "stage": self.stage, "status": "running"} | dict(manifest)
        )

    @property
    def has_begun(self) -> bool:
        """Whether a stage was started."""
        return self.manifest_path.is_file()

    def has_finished(self, *, adapter: bool) -> bool:
        """Whether a stage was trained to its end, and its result is there."""
        return (
            self.has_begun and self.manifest().get("status") == "finished" and self.model_path(adapter=adapter).is_dir()
        )

    def manifest(self) -> dict[str, Any]:
        """The manifest.

        Raises:
            RunFolderError: the folder is not a run of this toolkit.
        """
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            manifest = None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise RunFolderError(f"{self.path} has no manifest of this toolkit, so it is not a run folder")
        return manifest

    def update_manifest(self, **changes: Any) -> None:
        """Rewrite the manifest with some entries changed."""
        write_json(self.manifest_path, self.manifest() | changes)

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the folder's JSON files."""
        write_json(self.path / name, value)
