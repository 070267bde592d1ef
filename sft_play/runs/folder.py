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
from sft_play.runs.files import read_json, read_metric_lines, write_json

# True if the user allows the value that a model's settings have for a key by which code of others would run.
CodeTrust = Callable[[ModelConfig, str], bool]


def trust_none(_: ModelConfig, __: str) -> bool:
    """A CodeTrust that allows no code of others."""
    return False


def remote_code_keys(model: ModelConfig) -> dict[str, str]:
    """The keys of a model's settings by which code of others would run, each with what that code is."""
    keys = {"trust_remote_code": f"code that comes with {one_line(model.name)}"} if model.trust_remote_code else {}
    if re.fullmatch(HUB_KERNEL_PATTERN, model.attn_implementation):
        keys["attn_implementation"] = "that kernel of the hub"
    return keys


def check_remote_code(path: Path, *models: ModelConfig, is_trusted: CodeTrust) -> None:
    """Raise RunFolderError where models' settings, read from a run folder, would run code that is not trusted."""
    for model in models:
        for key, code_description in remote_code_keys(model).items():
            if not is_trusted(model, key):
                setting = f"model.{key}={json.dumps(getattr(model, key)).strip(chr(34))}"
                raise RunFolderError(
                    f"{path} says {setting}: {code_description} would run, and a run folder does not decide that. If "
                    f"you have read the code, give the setting with this command: SET={setting}"
                )


MANIFEST_FILE = "manifest.json"
STAGES_FOLDER = "stages"
DEEPSPEED_FILE = "deepspeed.json"
# The value of `format` in the manifest: only a folder that has it is ours to resume, replace or discard.
MANIFEST_FORMAT = "sft_play run 1"
# Entry of the manifest: how a process of the run died, where starting it again may help.
CRASH_ENTRY = "died"
# Entry of the manifest: every restart by the command itself, with how a process had died and the step from which the
# run went on.
RESTARTS_ENTRY = "restarts"
# Entries of the manifest that a resumed run writes anew.
END_ENTRIES = ("error", "ended", CRASH_ENTRY)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the names in it, or that of one of its stages (then `parent_run` is set)."""

    path: Path
    parent_run: RunFolder | None = None
    """The run that this is a stage of: log, metrics and curves are there."""
    is_last_stage: bool = False

    def __post_init__(self) -> None:
        """Name the folder in one way however it was given: ranks, `RUN=` and `output.dir` may say the whole path."""
        object.__setattr__(self, "path", relative_to_cwd(self.path))

    def stage_folder(self, name: str, *, is_last_stage: bool = False) -> RunFolder:
        """The folder of a stage."""
        return RunFolder(self.path / STAGES_FOLDER / name, self, is_last_stage)

    @property
    def whole_run(self) -> RunFolder:
        """The folder of the whole run."""
        return self.parent_run or self

    @property
    def stage_name(self) -> str | None:
        """The name of the stage; None for a whole run."""
        return self.path.name if self.parent_run is not None else None

    @property
    def shell_path(self) -> str:
        """Its path as a word of a shell, for commands that messages show."""
        return shlex.quote(str(self.path))

    @property
    def manifest_path(self) -> Path:
        """Versions, git state, hardware, data hashes, seeds, and how the run ended."""
        return self.path / MANIFEST_FILE

    @property
    def metrics_path(self) -> Path:
        """One JSON object per line: what was logged at each step and evaluation, of every stage."""
        return self.whole_run.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """The run's log."""
        return self.whole_run.path / "train.log"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard_path(self) -> Path:
        """Folder of TensorBoard's event files; a stage's is inside the run's, which shows all of them."""
        return self.path / "tb" if self.parent_run is None else self.parent_run.tensorboard_path / self.path.name

    def model_path(self, *, is_adapter: bool) -> Path:
        """Where the trained adapter, or the whole model, is saved."""
        folder = self.whole_run if self.is_last_stage else self
        return folder.path / ("adapter" if is_adapter else "model")

    def begin_stage(self, manifest: Mapping[str, Any], *, plan: Mapping[str, Any], config: RunConfig) -> None:
        """Create the folder of a stage, or continue the existing one."""
        write_json(self.path / "plan.json", plan)
        write_json(self.path / "resolved.json", resolved_config(config, effective_batch=plan.get("effective_batch")))
        # what the first start recorded stays
        earlier_manifest = self.read_manifest() if self.manifest_path.is_file() else {}
        earlier_manifest = {name: value for name, value in earlier_manifest.items() if name not in END_ENTRIES}
        write_json(
            self.manifest_path,
            earlier_manifest
            | {"format": MANIFEST_FORMAT, "stage": self.stage_name, "status": "running"}
            | dict(manifest),
        )

    @property
    def has_begun(self) -> bool:
        """True if the stage was started."""
        return self.manifest_path.is_file()

    def has_finished(self, *, is_adapter: bool) -> bool:
        """True if the stage was trained to its end, and its result is there."""
        return (
            self.has_begun
            and self.read_manifest().get("status") == "finished"
            and self.model_path(is_adapter=is_adapter).is_dir()
        )

    @property
    def has_trained(self) -> bool:
        """True if a step left something, be it a damaged checkpoint or a line of metrics. A run without any starts from
        the beginning."""
        run = self.whole_run
        if any(run.path.glob("checkpoints/checkpoint-*")) or any(
            run.path.glob(f"{STAGES_FOLDER}/*/checkpoints/checkpoint-*")
        ):
            return True
        lines = read_metric_lines(run.metrics_path) if run.metrics_path.is_file() else ()
        return any(entry["step"] > 0 for _, entry in lines)

    def read_manifest(self) -> dict[str, Any]:
        """The manifest; raises RunFolderError where the folder is not a run of this toolkit."""
        manifest = read_json(self.manifest_path)
        if manifest.get("format") != MANIFEST_FORMAT:
            raise RunFolderError(f"{self.path} has no manifest of this toolkit, so it is not a run folder")
        return manifest

    def read_config(self, *, is_trusted: CodeTrust) -> RunConfig:
        """The settings that the run was trained with. The folder may be somebody else's: `is_trusted` says if the user
        allows code that comes with a model. Raises RunFolderError where they cannot be read, or allow code that the
        user does not; ConfigError where they are not valid."""
        path = self.path / "resolved.json"
        try:
            config = config_from_text(path.read_text(encoding="utf-8"), name=str(path))
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RunFolderError(f"{path} cannot be read: {error}") from None
        check_remote_code(path, config.model, is_trusted=is_trusted)
        return config

    def update_manifest(self, **changes: Any) -> None:
        """Rewrite the manifest with some entries changed; None removes one."""
        kept_entries = {name: value for name, value in self.read_manifest().items() if name not in changes}
        write_json(
            self.manifest_path, kept_entries | {name: value for name, value in changes.items() if value is not None}
        )

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the folder's JSON files."""
        write_json(self.path / name, value)
