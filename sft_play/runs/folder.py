"""A run's folder: the names in it, its manifest, and the folders of its stages; what makes the run
reproducible; its files, read, written redacted, aside and renamed; the lines of metrics.jsonl; and
a disk that takes no more, recognised in whatever a library makes of it, with one message in its
place.

No token, key or credential of the environment, of a config or of a git remote reaches a file, and a
kill never leaves half of one.
"""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from sft_play._version import __version__
from sft_play.config.load import (
    LoadedConfig,
    config_from_text,
    differing_options,
    is_derived_default,
    load_config,
    resolved_config,
)
from sft_play.config.options import all_options
from sft_play.config.schema import HUB_KERNEL_PATTERN, ModelConfig, RunConfig
from sft_play.errors import RunFolderError, SftPlayError
from sft_play.files import ROOT, atomic, relative_to_cwd
from sft_play.log import one_line, redact, secret_values
from sft_play.machine.host import nearest_disk_space
from sft_play.machine.software import installed_version
from sft_play.starter import CONFIG
from sft_play.text import format_size

# --- files: read, written redacted, aside and renamed ---------------------------------------------
# Errors that only writing meets, and that may come without the name of a file.
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# The number of an error in texts: safetensors' errors are no OSError, and others quote one.
_ERRNO_IN_TEXT = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
# What torch.save raises where a write fails; it does not say why.
_TORCH_WRITE_ERROR = re.compile(
    r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|basic_ios::clear|iostream error"
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none to read, as in a run that was killed early."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run or a stage."""
    return read_json(folder / "summary.json")


def write_json(path: Path, value: Any) -> None:
    """A JSON file, redacted, written aside and renamed."""
    text = json.dumps(
        redact_values(value), indent=2, ensure_ascii=False, default=str, allow_nan=True
    )
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, redacted, written aside and renamed."""
    atomic.write(path, redact(text), errors="backslashreplace")


def redact_values(value: Any, secrets: Sequence[str] | None = None) -> Any:
    """Return the value with its texts redacted, before JSON escapes them. `secrets` None: take the
    environment's."""
    if secrets is None:
        secrets = secret_values(os.environ.items())
    if isinstance(value, str):
        return redact(value, secrets=secrets)
    if isinstance(value, Mapping):
        return {
            redact(str(key), secrets=secrets): redact_values(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_values(item, secrets) for item in value]
    return value


def sync_folder(folder: Path, *, is_recursive: bool = True) -> None:
    """Sync the names in a folder to the disk, and with `is_recursive` all that is below it."""
    for path in [*(folder.rglob("*") if is_recursive else ()), folder]:
        if not path.is_file() and not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # some disks know it for files only
            if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def truncate_metrics(path: Path, step: int, *, stage_name: str | None = None) -> None:
    """Drop the lines of metrics after `step` (in a run with stages, this stage's): a resumed run
    writes those steps again."""
    if path.exists():
        lines = read_metric_lines(path)
        kept_lines = [
            line
            for line, entry in lines
            if entry["step"] <= step or entry.get("stage") != stage_name
        ]
        write_text(path, "".join(f"{line}\n" for line in kept_lines))


def read_evaluations(path: Path, *, stage_name: str | None = None) -> list[dict[str, Any]]:
    """Read the metrics of the validation rows by step, including before training: `step`, `loss`,
    `exact_match`, and `generated_rows`, how many answers `exact_match` was computed on.

    A resumed run has its earlier starts' too.
    """
    by_step: dict[int, dict[str, Any]] = {}
    names = ("loss", "exact_match", "generated_rows")
    for _, entry in read_metric_lines(path):
        metrics = {name: entry[f"eval_{name}"] for name in names if f"eval_{name}" in entry}
        if metrics and entry.get("stage") == stage_name:
            no_metrics = {"step": entry["step"], **dict.fromkeys(names)}
            by_step[entry["step"]] = by_step.get(entry["step"], no_metrics) | metrics
    return [by_step[step] for step in sorted(by_step)]


def read_metric_lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Complete lines of metrics.jsonl, each with its content; none where there is no such file."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry


# --- a disk that takes no more --------------------------------------------------------------------


def disk_refusal_reason(error: BaseException | None) -> str | None:
    """The reason why the disk refused to write, in the operating system's words; None for any other
    error."""
    checked_errors: list[BaseException] = []
    while error is not None and error not in checked_errors:
        checked_errors.append(error)
        text = str(error)
        # of torch's distributed checkpoint
        if isinstance(rank_errors := getattr(error, "failures", None), dict):
            text = "\n".join(map(str, [text, *rank_errors.values()]))
        error_numbers = {
            int(os_error or errno_text) for os_error, errno_text in _ERRNO_IN_TEXT.findall(text)
        }
        error_numbers.add(getattr(error, "errno", 0))
        for error_number in error_numbers.intersection(_WRITE_ERRNOS):
            return os.strerror(error_number)
        if isinstance(error, RuntimeError) and _TORCH_WRITE_ERROR.search(text):
            return "writing failed"
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def explain_disk_refusals() -> Iterator[None]:
    """Replace errors of a full or read-only disk inside the block by one RunFolderError, which
    names the file if the error does."""
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:
        reason = disk_refusal_reason(error)
        if reason is None:
            raise
        file_name = getattr(error, "filename", None)
        if not isinstance(file_name, (str, bytes)):
            raise RunFolderError(f"a file cannot be written: {reason}") from error
        path = os.fsdecode(file_name)
        raise RunFolderError(
            f"{one_line(path)} cannot be written: {reason}; {format_free_space(Path(path))}"
        ) from error


@contextlib.contextmanager
def require_disk_space(
    folder: Path, needed_bytes: int, subject: str, *, available_bytes: int | None
) -> Iterator[None]:
    """Within it, at least `needed_bytes` are written into a folder.

    `subject`: begins the message, such as "the checkpoint of step 6". `available_bytes`: free
    there; None where that is not known. Raises RunFolderError where fewer bytes are free, or the
    disk refuses.
    """
    message = (
        f"{subject} cannot be written into {one_line(str(folder))}: {{}}; about {needed_bytes:,}"
        f" bytes ({format_size(needed_bytes)}) are needed, and {{}}. Free space there, then resume"
        " the run"
    )
    if available_bytes is not None and available_bytes < needed_bytes:
        raise RunFolderError(message.format(os.strerror(errno.ENOSPC), format_free_space(folder)))
    try:
        yield
    except Exception as error:
        reason = disk_refusal_reason(error)
        if reason is None:
            raise
        raise RunFolderError(message.format(reason, format_free_space(folder))) from error


def free_disk_bytes(path: Path) -> int | None:
    """What the disk of a path, which may not exist yet, has free; None where it does not say."""
    _, disk = nearest_disk_space(path)
    return disk.free if disk is not None and disk.total else None


def format_free_space(path: Path) -> str:
    """What a disk has free, for a message."""
    available_bytes = free_disk_bytes(path)
    if available_bytes is None:
        return "what is free there is not known"
    return f"{available_bytes:,} bytes ({format_size(available_bytes)}) are free there"


# --- the folder -----------------------------------------------------------------------------------
# True if the user allows the value that a model's settings have for a key by which code of others
# would run.
CodeTrust = Callable[[ModelConfig, str], bool]


def trust_none(_: ModelConfig, __: str) -> bool:
    """A CodeTrust that allows no code of others."""
    return False


def remote_code_keys(model: ModelConfig) -> dict[str, str]:
    """Return the keys of a model's settings that would run other people's code, each with a
    description of that code."""
    keys = {}
    if model.trust_remote_code:
        keys["trust_remote_code"] = f"code that comes with {one_line(model.name)}"
    if re.fullmatch(HUB_KERNEL_PATTERN, model.attn_implementation):
        keys["attn_implementation"] = "that kernel of the hub"
    return keys


def check_remote_code(path: Path, *models: ModelConfig, is_trusted: CodeTrust) -> None:
    """Raise RunFolderError where models' settings, read from a run folder, would run code that is
    not trusted."""
    for model in models:
        for key, code_description in remote_code_keys(model).items():
            if not is_trusted(model, key):
                setting = f"model.{key}={json.dumps(getattr(model, key)).strip(chr(34))}"
                raise RunFolderError(
                    f"{path} says {setting}: {code_description} would run, and a run folder does"
                    " not decide that. If you have read the code, give the setting with this"
                    f" command: SET={setting}"
                )


MANIFEST_FILE = "manifest.json"
STAGES_FOLDER = "stages"
DEEPSPEED_FILE = "deepspeed.json"
# The value of `format` in the manifest: only a folder that has it is ours to resume, replace or
# discard.
MANIFEST_FORMAT = "sft_play run 1"
# Entry of the manifest: how a process of the run died, where starting it again may help.
CRASH_ENTRY = "died"
# Entry of the manifest: every restart by the command itself, with how a process had died and the
# step from which the run went on.
RESTARTS_ENTRY = "restarts"
# Entries of the manifest that a resumed run writes anew.
END_ENTRIES = ("error", "ended", CRASH_ENTRY)


def next_run_commands(
    folder: "RunFolder", config_path: str | Path, *, on_gpu: bool, has_held_out_rows: bool
) -> list[str]:
    """The commands that come after a run: one's own data after the starter, else what judges the
    run, where there are rows for it, and ships it."""
    if Path(config_path).name == Path(CONFIG).name:
        # at most what a run here takes
        return [f"make new MODEL=Qwen/Qwen2.5-{'3' if on_gpu else '0.5'}B-Instruct DATA=my.jsonl"]
    run = f"RUN={folder.whole_run.shell_path}"
    judging = [f"make eval {run}", f"make ship {run}"] if has_held_out_rows else []
    return [*judging, f"make export {run} FORMAT=gguf"]


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, or of one of its stages (then `parent_run` is set), with the names in
    it."""

    path: Path
    # The run that this is a stage of: log, metrics and curves are there.
    parent_run: "RunFolder | None" = None
    is_last_stage: bool = False

    def __post_init__(self) -> None:
        # named in one way however it was given: ranks, `RUN=` and `output.dir` may say the whole
        # path
        object.__setattr__(self, "path", relative_to_cwd(self.path))

    def stage_folder(self, name: str, *, is_last_stage: bool = False) -> "RunFolder":
        """The folder of a stage."""
        return RunFolder(self.path / STAGES_FOLDER / name, self, is_last_stage)

    @property
    def whole_run(self) -> "RunFolder":
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
        """Folder of TensorBoard's event files; a stage's is inside the run's, which shows all of
        them."""
        if self.parent_run is not None:
            return self.parent_run.tensorboard_path / self.path.name
        return self.path / "tb"

    def model_path(self, *, is_adapter: bool) -> Path:
        """Where the trained adapter, or the whole model, is saved."""
        folder = self.whole_run if self.is_last_stage else self
        return folder.path / ("adapter" if is_adapter else "model")

    def begin_stage(
        self, manifest: Mapping[str, Any], *, plan: Mapping[str, Any], config: RunConfig
    ) -> None:
        """Create the folder of a stage, or continue the existing one."""
        write_json(self.path / "plan.json", plan)
        write_json(
            self.path / "resolved.json",
            resolved_config(config, effective_batch=plan.get("effective_batch")),
        )
        earlier_entries = read_json(
            self.manifest_path
        ).items()  # what the first start recorded stays
        kept_entries = {name: value for name, value in earlier_entries if name not in END_ENTRIES}
        own_entries = {"format": MANIFEST_FORMAT, "stage": self.stage_name, "status": "running"}
        write_json(self.manifest_path, kept_entries | own_entries | dict(manifest))

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
        """True if a step left something, be it a damaged checkpoint or a line of metrics. A run
        without any starts from the beginning."""
        run = self.whole_run
        for folders in ("checkpoints", f"{STAGES_FOLDER}/*/checkpoints"):
            if any(run.path.glob(f"{folders}/checkpoint-*")):
                return True
        return any(entry["step"] > 0 for _, entry in read_metric_lines(run.metrics_path))

    def read_manifest(self) -> dict[str, Any]:
        """The manifest; raises RunFolderError where the folder is not a run of this toolkit."""
        manifest = read_json(self.manifest_path)
        if manifest.get("format") != MANIFEST_FORMAT:
            raise RunFolderError(
                f"{self.path} has no manifest of this toolkit, so it is not a run folder"
            )
        return manifest

    def read_config(self, *, is_trusted: CodeTrust) -> RunConfig:
        """The settings that the run was trained with. The folder may be somebody else's:
        `is_trusted` says if the user allows code that comes with a model. Raises RunFolderError
        where they cannot be read, or allow code that the user does not; ConfigError where they are
        not valid."""
        path = self.path / "resolved.json"
        try:
            config = config_from_text(path.read_text(encoding="utf-8"), name=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise RunFolderError(
                f"{path} cannot be read: {getattr(error, 'strerror', error)}"
            ) from None
        check_remote_code(path, config.model, is_trusted=is_trusted)
        return config

    def update_manifest(self, **changes: Any) -> None:
        """Rewrite the manifest with some entries changed; None removes one."""
        entries = {**self.read_manifest(), **changes}
        write_json(
            self.manifest_path,
            {
                name: value
                for name, value in entries.items()
                if value is not None or name not in changes
            },
        )

    def write_json(self, name: str, value: Any) -> None:
        """Write one of the folder's JSON files."""
        write_json(self.path / name, value)


# --------------------------------------------------------------------------------------------------
# What makes a run reproducible, for its manifest: versions, the git state, the program's own code;
# and what a resumed run has to have in common with its first start.

# Packages whose versions can change what a run computes.
MANIFEST_PACKAGES = (
    "torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "deepspeed", "datasets",
    "tokenizers", "safetensors", "tensorboard", "numpy", "pydantic", "PyYAML",
)  # fmt: skip
# Keys that may differ when a run is resumed: they do not change the training's numbers. The
# effective batch is compared apart.
FREE_TO_CHANGE_OPTIONS = frozenset({
    "output.dir", "output.name", "output.if_exists", "train.batch_size", "train.grad_accum",
    "train.gradient_checkpointing", "train.stop_after_steps", "train.max_hours",
    "train.logging_steps", "train.on_nan", "train.save_total_limit", "train.async_save",
    "train.report_to", "train.profile_steps", "train.dataloader_pin_memory",
    "tuning.backend_fallback", "model.mesh_shape", "distributed.profile_communication",
    "distributed.timeout_s", "distributed.shard_ranks",
})  # fmt: skip


def new_manifest(
    loaded: LoadedConfig, *, hardware: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    """What makes a run reproducible: versions, git state, hardware, data hashes, seeds, command."""
    return {
        "format": MANIFEST_FORMAT,
        "status": "running",
        "config_path": str(loaded.path.absolute()),
        "overrides": list(loaded.overrides),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": loaded.config.train.seed,
        "versions": installed_versions(),
        "git": git_state(Path.cwd()),
        "code": own_code_state(),
        "cwd": str(Path.cwd()),
        "hardware": hardware,
        "data": data,
        "choices": [],
    }


def installed_versions() -> dict[str, str | None]:
    """Versions of this package, Python and what can change a run's numbers; None where not
    installed."""
    own_versions = {"sft_play": __version__, "python": platform.python_version()}
    package_versions = {package: installed_version(package) for package in MANIFEST_PACKAGES}
    return (
        own_versions | package_versions | {"platform": f"{platform.system()} {platform.machine()}"}
    )


PACKAGE_FOLDER = ROOT / "sft_play"


@functools.cache  # what this process has imported: a file that changes later is not what runs
def own_code_state() -> dict[str, Any]:
    """`code_state` of this program, as it was when a run first asked."""
    return code_state(PACKAGE_FOLDER)


def code_state(package: Path) -> dict[str, Any]:
    """A digest of the program's own files, and the git state of its checkout: None where it is
    installed, or not tracked."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".yaml") and file.is_file():
            # with ends marked, so that no byte can move between a name and a content unseen
            digest.update(
                f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0"
            )
    # A package in site-packages may lie inside a repository of the user's, which says nothing about
    # its code.
    is_tracked = run_git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    return {"sha256": digest.hexdigest(), "git": git_state(package) if is_tracked else None}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, branch and whether the working tree differs; None outside a repository. Remotes are
    not read."""
    commit = run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": run_git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(run_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def run_git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, or it refuses."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


# --- a resumed run --------------------------------------------------------------------------------
def check_same_run(
    folder: RunFolder,
    loaded: LoadedConfig,
    *,
    data: dict[str, Any],
    batch: dict[str, Any],
    backend: str = "bnb",
) -> None:
    """Raises RunFolderError, listing every difference, if a run was started with settings that
    change its numbers; of the batch only the effective one counts."""
    differing = changed_settings(folder, loaded.config, effective_batch=math.prod(batch.values()))
    lines = list(differing.values())
    manifest = folder.read_manifest()
    for name, facts in data.items():
        recorded_facts = manifest.get("data", {}).get(name)
        if recorded_facts is None:
            lines.append(f"data {name}: the run's manifest does not record what it was")
        elif recorded_facts.get("sha256") != facts.get("sha256"):
            lines.append(
                f"data {name}: the content of {facts.get('path')} has changed since the run started"
            )
        elif recorded_facts.get("images") != facts.get("images"):
            lines.append(
                f"data {name}: images of {facts.get('path')} have changed since the run started"
            )
    # the only backend before the manifest named it
    recorded_backend = manifest.get("backend", "bnb")
    if recorded_backend != backend and "tuning.backend" not in differing:
        lines.append(
            f"tuning backend: the run was trained by {recorded_backend}, and {backend} would"
            " continue it here"
        )
    recorded_batch = manifest.get("batch")
    if recorded_batch and math.prod(recorded_batch.values()) != math.prod(batch.values()):
        lines.append(f"batch: the run has {json.dumps(recorded_batch)}, now {json.dumps(batch)}")
    check_no_differences(folder, lines)


def kept_overrides(overrides: Sequence[str]) -> list[str]:
    """The settings of a start that hold for a resume of its run too."""
    return [
        override
        for override in overrides
        if not override.startswith(("output.name=", "output.if_exists=", "train.stop_after_steps="))
    ]


def load_resumed_config(
    loaded: LoadedConfig, folder: RunFolder, *, is_trusted: CodeTrust, keeps_mesh: bool = True
) -> LoadedConfig:
    """Load the config of a resumed run: the settings that its first start was given beside its
    config, and over them those that are given now. `keeps_mesh` False: without the mesh of its
    first start, unless one is given now. Raises ConfigError where they cannot be read,
    RunFolderError where they allow code that the user does not.
    """
    given_keys = {override.partition("=")[0] for override in loaded.overrides}
    recorded_overrides = kept_overrides(folder.read_manifest().get("overrides", ()))
    overrides = [
        override for override in recorded_overrides if override.partition("=")[0] not in given_keys
    ]
    train = read_json(folder.path / "resolved.json").get("train", {})
    for name in ("kernels", "compile"):  # whose default is auto now, and was not for some runs
        is_default = getattr(loaded.config.train, name) == "auto"
        if is_default and name in train and f"train.{name}" not in given_keys:
            overrides.insert(0, f"train.{name}={json.dumps(train[name])}")
    if not keeps_mesh:
        overrides.append("model.mesh_shape=null")
    adapter = read_json(folder.path / "resolved.json").get("model", {}).get("adapter")
    if adapter:  # by its path: `last` may be another one by now
        overrides.append(f"model.adapter={json.dumps(adapter)}")
    resumed = load_config(loaded.path, overrides=(*overrides, *loaded.overrides))
    check_remote_code(
        folder.path, *(run.config.model for run in resumed.runs), is_trusted=is_trusted
    )
    return resumed


def changed_settings(
    folder: RunFolder, config: RunConfig, *, effective_batch: int | None = None
) -> dict[str, str]:
    """Return the settings that change a run's numbers and differ from its first start's, by their
    keys, each with a sentence. `effective_batch` None: there is no plan yet. Raises RunFolderError
    where the run's own settings cannot be read.
    """
    try:
        recorded_settings = json.loads((folder.path / "resolved.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{folder.path} cannot be resumed: its resolved.json cannot be read ({error})"
        ) from None
    if not isinstance(recorded_settings, dict) or not isinstance(
        recorded_settings.get("train"), dict
    ):
        raise RunFolderError(f"{folder.path} cannot be resumed: its resolved.json is damaged")
    effective_batch = effective_batch or recorded_settings["train"].get("effective_batch_size")
    # Through JSON and redacted, as the old one was written: tuples are lists there, and secrets are
    # stars.
    current_settings = json.loads(
        json.dumps(redact_values(resolved_config(config, effective_batch=effective_batch)))
    )
    # Left out: options that may change, or that the run's version did not have, and a default that
    # follows from other keys where the run recorded it before it was resolved.
    return {
        key: f"{key}: the run has {json.dumps(recorded)}, now {json.dumps(current)}"
        for key, (recorded, current) in differing_options(
            recorded_settings, current_settings
        ).items()
        if key not in FREE_TO_CHANGE_OPTIONS
        and not _is_newer_option(recorded_settings, key, current)
        and not (
            is_derived_default(config, key)
            and recorded == functools.reduce(getattr, key.split("."), config)
        )
    }


def check_no_differences(folder: RunFolder, differences: Sequence[str]) -> None:
    """Raise RunFolderError if there are `differences` from the settings that a run was started
    with."""
    if differences:
        listed_lines = "\n".join(f"  {one_line(line, limit=300)}" for line in differences)
        raise RunFolderError(
            f"{folder.path} was started with other settings, and continuing would mix two"
            f" runs:\n{listed_lines}\nset these back, or start a new run"
        )


# An option that did not exist in the version of an old run, and has its default here.
def _is_newer_option(recorded_settings: Mapping[str, Any], key: str, value: Any) -> bool:
    for name in key.split("."):
        if not isinstance(recorded_settings, Mapping) or name not in recorded_settings:
            return key in all_options() and bool(value == all_options()[key].default)
        recorded_settings = recorded_settings[name]
    return False


def requested_deepspeed(folder: RunFolder) -> dict[str, Any] | None:
    """Return DeepSpeed's config as the run was first given it, with its "auto"; None where another
    engine runs it. An older version's plan lacks it: then the file in the folder counts, which has
    the plan's numbers."""
    return (
        read_json(folder.path / "plan.json").get("deepspeed")
        or read_json(folder.path / DEEPSPEED_FILE)
        or None
    )


def first_start_date(folder: RunFolder) -> date:
    """The day of the run's first start, for chat templates that write the date."""
    template_date = read_json(folder.manifest_path).get("template_date")
    return date.fromisoformat(template_date) if template_date else date.today()


# --------------------------------------------------------------------------------------------------
# Memory that ran out in a run, as its folder remembers it.

OOM_ENTRY = "out_of_memory"
# In the folder of a run or a stage: that a rank ran out of memory, until the next start has read
# it.
OOM_NOTE_FILE = "out_of_memory.json"
_REPEAT_DESCRIPTIONS = {
    "step": "the step is repeated from its start with {now}, and so are all later ones",
    "run": "all ranks end, and start again from the last checkpoint with {now}",
    "batch": "this batch is repeated in parts of {now}, and so are all later ones",
    None: "the run ends",
}


@dataclass(frozen=True)
class OomEvent:
    """One time that memory ran out: `micro_batch` rows were too many, and `now` rows are tried
    next. `again`: what is repeated; None where the run ends."""

    step: int
    doing: str
    rank: int
    micro_batch: int
    now: int
    again: Literal["step", "run", "batch"] | None
    error: str

    @property
    def description(self) -> str:
        """The event in words, for the log."""
        return (
            f"step {self.step}: rank {self.rank} ran out of memory ({self.doing},"
            f" {self.micro_batch} rows at a time):"
            f" {_REPEAT_DESCRIPTIONS[self.again].format(now=self.now)}; {self.error}"
        )


def read_oom_events(folder: RunFolder) -> list[OomEvent]:
    """Read the events in the manifest of a run or a stage, oldest first."""
    events = []
    for entry in read_json(folder.manifest_path).get(OOM_ENTRY, ()):
        with contextlib.suppress(TypeError):  # of another version
            events.append(OomEvent(**entry))
    return events


def record_oom_event(folder: RunFolder, event: OomEvent) -> None:
    """Add an event to the manifest, with the batch that the run goes on with, and a resumed run
    too."""
    batch = folder.read_manifest().get("batch")
    if event.again in ("step", "run") and batch and batch["micro_batch"] == event.micro_batch:
        rows = batch["micro_batch"] * batch["grad_accum"]
        batch = {**batch, "micro_batch": event.now, "grad_accum": rows // event.now}
    events = [*read_oom_events(folder), event]
    folder.update_manifest(batch=batch, **{OOM_ENTRY: [asdict(one) for one in events]})


def write_oom_note(folder: RunFolder, event: OomEvent) -> None:
    """Leave a note for the next start: this rank does not write the manifest, and the rank that
    does may wait for this one in vain."""
    write_json(folder.path / OOM_NOTE_FILE, asdict(event))


def pop_oom_note(folder: RunFolder) -> OomEvent | None:
    """Move the note of a run that ran out of memory into its manifest, or into its stage's; None
    where there is no note."""
    for note_path in (
        *folder.path.glob(OOM_NOTE_FILE),
        *folder.path.glob(f"{STAGES_FOLDER}/*/{OOM_NOTE_FILE}"),
    ):
        event = OomEvent(**json.loads(note_path.read_text(encoding="utf-8")))
        record_oom_event(RunFolder(note_path.parent), event)
        note_path.unlink()
        return event
    return None
