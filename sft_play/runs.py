"""The run folder: its name, its contents, and what to do with an existing one.

Everything written here goes through `redact`: no token, key or credential of the environment, of a config or of a git
remote reaches a file. Files are written aside and renamed, so that a kill never leaves half of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import sft_play
from sft_play.config.leaves import leaves
from sft_play.config.load import LoadedConfig, differing_keys, resolved
from sft_play.config.schema import OutputConfig, RunConfig
from sft_play.errors import RunFolderError
from sft_play.log import one_line, redact, secret_values

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STAGES = "stages"
"""In a run folder: the folders of its stages."""
DEEPSPEED_FILE = "deepspeed.json"
"""In a run folder: DeepSpeed's config, every value resolved."""
LOCK = "run.lock"
"""In a run folder while a process writes it: which process. The lock is on the file, not its existence."""
FORMAT = "sft_play run 1"
"""The value of `format` in the manifest: only a folder that has it is ours to resume, replace or discard."""

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "bitsandbytes",
    "accelerate",
    "deepspeed",
    "datasets",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "numpy",
    "pydantic",
    "PyYAML",
)
"""Packages whose versions can change what a run computes."""

FREE_TO_CHANGE = frozenset(
    {
        "output.dir",
        "output.name",
        "output.if_exists",
        "train.stop_after_steps",
        "train.logging_steps",
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
        old = self.manifest() if self.manifest_path.is_file() else {}
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


def write_json(path: Path, value: Any) -> None:
    """A JSON file, redacted, written aside and renamed."""
    text = json.dumps(_scrub(value), indent=2, ensure_ascii=False, default=str, allow_nan=True)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, redacted, written aside and renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(redact(text))
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _scrub(value: Any, secrets: Sequence[str] | None = None) -> Any:
    """The value with its texts redacted before JSON escapes them; `secrets` None: those of the environment."""
    secrets = secret_values(os.environ.items()) if secrets is None else secrets
    if isinstance(value, str):
        return redact(value, secrets=secrets)
    if isinstance(value, Mapping):
        return {redact(str(key), secrets=secrets): _scrub(item, secrets) for key, item in value.items()}
    return [_scrub(item, secrets) for item in value] if isinstance(value, (list, tuple)) else value


def output_dir(output: OutputConfig) -> Path:
    """The folder of the run folders; raises RunFolderError where it cannot be a folder."""
    try:
        base = Path(output.dir).expanduser()
        is_file = base.exists() and not base.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise RunFolderError(f"output.dir={one_line(output.dir)} cannot be a folder: {error}") from None
    if is_file:
        raise RunFolderError(f"output.dir={one_line(str(base))} is a file; name a folder")
    return base


def run_name(output: OutputConfig, *, config_path: Path, now: datetime) -> str:
    """The folder's name: as given, or the config's stem with the UTC time.

    Raises:
        RunFolderError: the name could leave `output.dir`.
    """
    if output.name is None:
        stem = re.sub(r"[^\w.-]+", "-", config_path.stem).strip(".-") or "run"
        return f"{stem}-{now.strftime('%Y%m%dT%H%M%SZ')}"
    return checked_name(output.name, key="output.name")


def checked_name(name: str, *, key: str) -> str:
    """The name, if it can only mean a folder directly below `output.dir`; raises RunFolderError otherwise."""
    bad = name != name.strip() or name.startswith((".", "~", "-")) or re.search(r"[/\\\x00-\x1f:]", name)
    if bad or ".." in name or not name or len(name.encode()) > 200:
        raise RunFolderError(
            f"{key}={one_line(json.dumps(name, ensure_ascii=False))} is refused: a run's name is one word "
            "without separators, `..` or a leading dot, such as output.name=gsm8k-r16"
        )
    return name


def new_folder(output: OutputConfig, *, config_path: Path, now: datetime | None = None) -> RunFolder:
    """The folder that a new run will have; nothing is written yet.

    Raises:
        RunFolderError: the name is refused, or the folder exists and `output.if_exists` is fail.
    """
    now = now or datetime.now(UTC)
    base = output_dir(output)
    name = run_name(output, config_path=config_path, now=now)
    path, number = base / name, 2
    while output.name is None and path.exists():
        path, number = base / f"{name}-{number}", number + 1
    if path.exists() and output.if_exists == "fail":
        raise RunFolderError(
            f"the run folder {path} exists; choose output.if_exists=resume (continue it), "
            "output.if_exists=replace (move it aside and start over), or another output.name"
        )
    if path.exists() and output.if_exists == "replace":
        RunFolder(path).manifest()  # refuses early what create() would refuse
        lock(RunFolder(path)).close()
    return RunFolder(path)


def require_writable(folder: RunFolder) -> None:
    """Raises RunFolderError where a new run's folder could not be created; nothing is left behind."""
    try:
        place = next(parent for parent in folder.path.absolute().parents if parent.exists())
        Path(tempfile.mkdtemp(dir=place, prefix=f".{folder.path.name}.")).rmdir()
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: RunFolder, error: OSError | ValueError) -> RunFolderError:
    problem = error.strerror if isinstance(error, OSError) else str(error)
    return RunFolderError(f"output.dir={folder.path.parent} cannot be written: {problem}")


def goes_on(folder: RunFolder, output: OutputConfig) -> bool:
    """Whether a start with this folder resumes the run in it."""
    return folder.path.exists() and output.if_exists == "resume"


def is_finished(folder: RunFolder) -> bool:
    """Whether a run is finished; logs it if so."""
    if folder.manifest().get("status") != "finished":
        return False
    logger.info("The run %s is finished; there is nothing to resume", folder.path)
    return True


def create(
    folder: RunFolder, loaded: LoadedConfig, *, manifest: dict[str, Any], plan: dict[str, Any], by: int | None = None
) -> Lock:
    """Create the folder with config, plan and manifest, or nothing; one to be replaced is moved aside.

    It is locked before anyone can see it.

    Args:
        by: whose lock is taken; see `lock`.

    Raises:
        RunFolderError: the folder exists (another start may have created it), is being written, or cannot be
            created.
    """
    taken = f"the run folder {folder.path} was created by another process in the meantime; start again"
    if folder.path.exists() and loaded.config.output.if_exists != "replace":
        raise RunFolderError(taken)
    try:
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.path.parent, prefix=f".{folder.path.name}."))
    except (OSError, ValueError) as error:
        raise _unwritable(folder, error) from None
    try:
        building.chmod(0o755)
        write_text(building / "config.yaml", loaded.text)
        write_json(building / "resolved.json", resolved(loaded.config, effective_batch=plan.get("effective_batch")))
        write_json(building / "plan.json", plan)
        write_json(building / MANIFEST, manifest)
        mark = lock(RunFolder(building), by=by)
        try:
            if folder.path.exists():
                if loaded.config.output.if_exists != "replace":
                    raise RunFolderError(taken)
                move_aside(folder)
            building.rename(folder.path)
        except BaseException as error:
            mark.close()
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise RunFolderError(taken) from None
            raise
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    mark.folder = folder
    return mark


def move_aside(folder: RunFolder) -> Path:
    """Rename an old run to NAME.replaced-TIME.

    Raises:
        RunFolderError: it is not one of ours, or is being written.
    """
    folder.manifest()
    with lock(folder) as mark:
        stamp, number = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), 2
        aside = folder.path.with_name(f"{folder.path.name}.replaced-{stamp}")
        while aside.exists():
            aside, number = folder.path.with_name(f"{folder.path.name}.replaced-{stamp}-{number}"), number + 1
        folder.path.rename(aside)
        mark.folder = RunFolder(aside)
    return aside


# --- the lock ---------------------------------------------------------------------------------------------------------

LAUNCHER, WRITER = 0, 1
"""Who locks only a part of a run: the command that started its ranks, and the rank (or their agent) that writes."""
_HELD = (errno.EACCES, errno.EAGAIN)
_LOCKED_HERE: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()
"""What this process has locked, by device and inode: opening and closing such a file again would release the lock."""


class Lock:
    """Marks a run folder as being written until it is closed or the process ends, however it ends."""

    def __init__(self, folder: RunFolder, descriptor: int, by: int | None) -> None:
        self.folder = folder
        """Where the folder is; code that moves it updates this."""
        self._descriptor: int | None = descriptor
        self._by = by
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder; the last holder removes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or os.getpid() != self._pid:  # a fork's copy holds no lock
            return
        path = self.folder.path / LOCK
        with contextlib.suppress(OSError):
            if self._by is not None:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the other part is still locked
            if _is_file(descriptor, path):
                path.unlink()
        os.close(descriptor)


def lock(folder: RunFolder, *, by: int | None = None) -> Lock:
    """Mark a run folder as being written; called by whatever moves, resumes or writes one.

    Locks are fcntl's: the kernel releases them when the process ends, data loaders do not inherit them, and those of
    other nodes are visible through NFS. On a file system without locks the note of who writes is trusted.

    Args:
        by: None for the whole run. LAUNCHER and WRITER lock a part each, for two processes of one run: they do not
            exclude each other, and each excludes everybody else.

    Raises:
        RunFolderError: another process is writing the run, or the folder cannot be written.
    """
    path = folder.path / LOCK
    for _ in range(100):
        _refuse_second_lock(folder, path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"{folder.path} cannot be written: {error.strerror}") from None
        try:
            _take(folder, descriptor, by)
            if not _is_file(descriptor, path):  # it was removed between opening and locking
                os.close(descriptor)
                continue
            if by != WRITER or not os.fstat(descriptor).st_size:
                _write_note(folder, descriptor)
            status = os.fstat(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        mark = _LOCKED_HERE[status.st_dev, status.st_ino] = Lock(folder, descriptor, by)
        return mark
    raise RunFolderError(f"{path} is created and removed repeatedly by other processes; start again")


def _refuse_second_lock(folder: RunFolder, path: Path) -> None:
    """Raises RunFolderError where this process has the lock: to the kernel, a second one by it is the same lock."""
    try:
        status = path.stat()
    except OSError:
        return
    mine = _LOCKED_HERE.get((status.st_dev, status.st_ino))
    if mine is not None and mine._descriptor is not None:
        raise RunFolderError(f"{folder.path} is already being written by this process (pid {os.getpid()})")


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _take(folder: RunFolder, descriptor: int, by: int | None) -> None:
    """Lock an open lock file or a part of it; raises RunFolderError with the holder."""
    length, start = (0, 0) if by is None else (1, by)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in _HELD:
            raise _being_written(folder, _note(descriptor)) from None
        _refuse_by_note(folder, _note(descriptor), by, f"the file system does not support locks ({error.strerror})")


def _refuse_by_note(folder: RunFolder, note: Mapping[str, Any], by: int | None, because: str) -> None:
    """Without locks: raises RunFolderError where the note names another machine, or a live process of this one."""
    logger.warning("%s: %s; a run in progress in this folder is known only by its note in %s, and two that start "
                   "at the same moment do not see each other", folder.path, because, LOCK)  # fmt: skip
    pid, host = note.get("pid"), note.get("host")
    if not isinstance(pid, int) or by == WRITER:
        return
    if host != socket.gethostname():
        raise _being_written(folder, note, f"; if that process is gone, remove {folder.path / LOCK}")
    with contextlib.suppress(ProcessLookupError):
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)
        if pid != os.getpid():
            raise _being_written(folder, note, f"; if it belongs to another program, remove {folder.path / LOCK}")


def _being_written(folder: RunFolder, note: Mapping[str, Any], more: str = "") -> RunFolderError:
    pid, host = note.get("pid"), note.get("host")
    who = f" (pid {pid} on {one_line(str(host))}, since {one_line(str(note.get('since')))})" if pid else ""
    stop = f"kill {pid}" if host == socket.gethostname() else f"kill {pid} on {one_line(str(host))}"
    return RunFolderError(
        f"{folder.path} is being written by another process{who}; wait until it ends, stop it"
        f"{f' ({stop}, which saves its state)' if pid else ''}, or give another output.name{more}"
    )


def _note(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(os.pread(descriptor, 4096, 0).decode("utf-8", "replace"))
        return note if isinstance(note, dict) else {}
    return {}


def _write_note(folder: RunFolder, descriptor: int) -> None:
    """Who writes the run; raises RunFolderError where the disk has no place for it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}).encode()
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text + b"\n", 0)
    except OSError as error:
        raise RunFolderError(f"{folder.path} cannot be written: {error.strerror}") from None


def discard(folder: RunFolder) -> None:
    """Remove a run that this start created and that never took a step."""
    folder.manifest()
    shutil.rmtree(folder.path)


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
        "code": code_facts(),
        "cwd": str(Path.cwd()),
        "hardware": hardware,
        "data": data,
        "choices": [],
    }


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and what can change a run's numbers; None where not installed."""
    by_package: dict[str, str | None] = {"sft_play": sft_play.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = None
    return by_package | {"platform": f"{platform.system()} {platform.machine()}"}


PACKAGE = Path(sft_play.__file__).resolve().parent


def code_facts(package: Path = PACKAGE) -> dict[str, Any]:
    """What identifies the program's own code: a digest of its files, and the git state of its checkout.

    `git` is None where the package is installed, or lies in a repository that does not track it.
    """
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".yaml") and file.is_file():
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
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


def find_resumable(output: OutputConfig, *, config_path: Path, name: str | None = None) -> RunFolder:
    """The run to resume: the named one, or the newest unfinished run of this config.

    Raises:
        RunFolderError: there is none, or the named one is finished or not ours.
    """
    base = output_dir(output)
    if name is not None or output.name is not None:
        folder = run_at(base, checked_name(name or output.name or "", key="RUN" if name else "output.name"))
        if folder.manifest().get("status") == "finished":
            raise RunFolderError(f"the run {folder.path} is finished; start a new one with make train")
        return folder
    config = str(config_path.absolute())
    manifests = [(folder, folder.manifest()) for folder in runs_in(base)]
    of_config = [(folder, manifest) for folder, manifest in manifests if manifest.get("config_path") == config]
    unfinished = [item for item in of_config if item[1].get("status") != "finished"]
    if not unfinished:
        finished = f" ({len(of_config)} finished)" if of_config else ""
        raise RunFolderError(
            f"no unfinished run of {config_path} in {base}{finished}; start one with make train CONFIG={config_path}"
        )
    return max(unfinished, key=lambda item: (str(item[1].get("started")), str(item[0].path)))[0]


def run_at(base: Path, name: str) -> RunFolder:
    """The run of that name in an output folder.

    Raises:
        RunFolderError: there is none, or it is not one of ours.
    """
    folder = RunFolder(base / name)
    if not folder.path.is_dir():
        there = ", ".join(other.path.name for other in list(runs_in(base))[-8:]) or "none"
        raise RunFolderError(f"there is no run {one_line(name)} in {base}; the runs there: {there}")
    folder.manifest()
    return folder


def run_named(base: Path, run: str) -> RunFolder:
    """The run that RUN names: by its name in an output folder, or by its own path.

    Raises:
        RunFolderError: there is none, or it is not one of ours.
    """
    given = Path(run).expanduser()
    if given.name != run or (given / MANIFEST).is_file():
        return run_at(given.parent, given.name)
    return run_at(base, checked_name(run, key="RUN"))


def runs_in(base: Path, *, replaced: bool = False) -> Iterator[RunFolder]:
    """Every run of this toolkit directly below an output folder, by name; with `replaced` those moved aside too."""
    for path in sorted(base.iterdir()) if base.is_dir() else []:
        if replaced or not (path.name.startswith(".") or ".replaced-" in path.name):
            with contextlib.suppress(RunFolderError):
                RunFolder(path).manifest()
                yield RunFolder(path)


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
    new = json.loads(json.dumps(_scrub(resolved(loaded.config, effective_batch=math.prod(batch.values())))))
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


def sha256_of(path: Path) -> str:
    """Digest of a file, or of the names and contents of all files of a folder."""
    digest = hashlib.sha256()
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def first_day(folder: RunFolder) -> date:
    """The day of the run's first start, for chat templates that write the date."""
    kept = folder.manifest().get("template_date") if folder.manifest_path.is_file() else None
    return date.fromisoformat(kept) if isinstance(kept, str) else date.today()


def keep_metrics_until(path: Path, step: int, *, stage: str | None = None) -> None:
    """Drop the lines of metrics after `step` (in a run with stages, this stage's): a resumed run writes those steps
    again."""
    if path.exists():
        kept = [line for line, entry in metrics(path) if entry["step"] <= step or entry.get("stage") != stage]
        write_text(path, "".join(f"{line}\n" for line in kept))


def evaluations(path: Path, *, stage: str | None = None) -> list[dict[str, Any]]:
    """The figures of the validation rows by step, including before training: `step`, `loss`, `exact_match`.

    A resumed run has those of its earlier starts too.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for _, entry in metrics(path) if path.exists() else ():
        if entry.get("stage") != stage:
            continue
        figures = {name: entry[f"eval_{name}"] for name in ("loss", "exact_match") if f"eval_{name}" in entry}
        if figures:
            empty = {"step": entry["step"], "loss": None, "exact_match": None}
            by_step[entry["step"]] = by_step.get(entry["step"], empty) | figures
    return [by_step[step] for step in sorted(by_step)]


def metrics(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Complete lines of metrics.jsonl, each with its content."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry
