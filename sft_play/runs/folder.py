"""A run's folder: the names in it, its manifest, and the folders of its stages."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.load import config_from_text, resolved_config
from sft_play.config.schema import HUB_KERNEL_PATTERN, ModelConfig, RunConfig
from sft_play.errors import RunFolderError
from sft_play.files import relative_to_cwd
from sft_play.log import one_line
from sft_play.runs.files import metric_lines, read_json, write_json

# Whether the user gives the value that a model's settings have for a key that lets code of others run.
Trust = Callable[[ModelConfig, str], bool]


def trust_none(_: ModelConfig, __: str) -> bool:
    """No code of others is run."""
    return False


def code_keys(model: ModelConfig) -> dict[str, str]:
    """The keys of a model's settings by which code of others would run, each with what that code is."""
    keys = {"trust_remote_code": f"code that comes with {one_line(model.name)}"} if model.trust_remote_code else {}
    if re.fullmatch(HUB_KERNEL_PATTERN, model.attn_implementation):
        keys["attn_implementation"] = "that kernel of the hub"
    return keys


def refuse_code(path: Path, *models: ModelConfig, trusts: Trust) -> None:
    """Raise RunFolderError where settings of models, read from a run folder, let code run that the user does not."""
    for model in models:
        for key, code in code_keys(model).items():
            if not trusts(model, key):
                setting = f"model.{key}={json.dumps(getattr(model, key)).strip(chr(34))}"
                raise RunFolderError(
                    f"{path} says {setting}: {code} would run, and a run folder does not decide that. If you have read "
                    f"the code, give the setting with this command: SET={setting}"
                )


MANIFEST = "manifest.json"
STAGES = "stages"
DEEPSPEED_FILE = "deepspeed.json"
# The value of `format` in the manifest: only a folder that has it is ours to resume, replace or discard.
FORMAT = "sft_play run 1"
# Entry of the manifest: how a process of the run died, where starting it again may help.
DIED = "died"
# Entry of the manifest: every restart by the command itself, with how a process had died and the step from which the
# run went on.
RESTARTS = "restarts"
# Entries of the manifest that a resumed run writes anew.
HOW_IT_ENDED = ("error", "ended", DIED)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the names in it, or that of one of its stages (then `run` is set)."""

    path: Path
    run: RunFolder | None = None
    """The run that this is a stage of: log, metrics and curves are there."""
    is_last: bool = False

    def __post_init__(self) -> None:
        """Name the folder in one way however it was given: ranks, `RUN=` and `output.dir` may say the whole path."""
        object.__setattr__(self, "path", relative_to_cwd(self.path))

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
    def quoted(self) -> str:
        """Its path as a word of a shell, for commands that messages show."""
        return shlex.quote(str(self.path))

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
        write_json(self.path / "resolved.json", resolved_config(config, effective_batch=plan.get("effective_batch")))
        old = self.manifest() if self.manifest_path.is_file() else {}  # what the first start recorded stays
        old = {name: value for name, value in old.items() if name not in HOW_IT_ENDED}
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

    @property
    def has_trained(self) -> bool:
        """Whether a step left something, be it a damaged checkpoint or a line of metrics. A run without any starts from
        the beginning."""
        run = self.whole
        if any(run.path.glob("checkpoints/checkpoint-*")) or any(run.path.glob(f"{STAGES}/*/checkpoints/checkpoint-*")):
            return True
        lines = metric_lines(run.metrics_path) if run.metrics_path.is_file() else ()
        return any(entry["step"] > 0 for _, entry in lines)

    def manifest(self) -> dict[str, Any]:
        """The manifest; raises RunFolderError where the folder is not a run of this toolkit."""
        manifest = read_json(self.manifest_path)
        if manifest.get("format") != FORMAT:
            raise RunFolderError(f"{self.path} has no manifest of this toolkit, so it is not a run folder")
        return manifest

    def settings(self, *, trusts: Trust) -> RunConfig:
        """The settings that the run was trained with. The folder may be somebody else's: `trusts` says whether the user
        allows code that comes with a model. Raises RunFolderError where they cannot be read, or allow code that the
        user does not; ConfigError where they are not valid."""
        path = self.path / "resolved.json"
        try:
            config = config_from_text(path.read_text(encoding="utf-8"), name=str(path))
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RunFolderError(f"{path} cannot be read: {error}") from None
        refuse_code(path, config.model, trusts=trusts)
        return config

    def update_manifest(self, **changes: Any) -> None:
        """Rewrite the manifest with some entries changed; None removes one."""
        kept = {name: value for name, value in self.manifest().items() if name not in changes}
        write_json(self.manifest_path, kept | {name: value for name, value in changes.items() if value is not None})

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the folder's JSON files."""
        write_json(self.path / name, value)
