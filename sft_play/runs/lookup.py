"""Runs in an output folder: how they are named, and found by name, by path, or as the newest that can be resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from sft_play.config.schema import OutputConfig
from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.runs.folder import MANIFEST, RunFolder

logger = logging.getLogger(__name__)


def find_resumable(output: OutputConfig, *, config_path: Path, name: str | None = None) -> RunFolder:
    """The run to resume: the named one, or the newest unfinished run of this config, of those that have trained if any
    has.

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
    unfinished.sort(key=lambda item: (str(item[1].get("started")), str(item[0].path)), reverse=True)
    folders = [folder for folder, _ in unfinished]
    chosen = next((folder for folder in folders if folder.has_trained), folders[0])
    for passed in folders[: folders.index(chosen)]:
        logger.info("%s is newer, but no step was trained in it: RUN=%s starts it again", passed.path, passed.path.name)
    return chosen


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
        # a leading dot: a folder that another start is building (creation.create_run)
        if replaced or not (path.name.startswith(".") or ".replaced-" in path.name):
            with contextlib.suppress(RunFolderError):
                RunFolder(path).manifest()
                yield RunFolder(path)


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
        return f"{name_of_config(config_path)}-{now.strftime('%Y%m%dT%H%M%SZ')}"
    return checked_name(output.name, key="output.name")


def name_of_config(path: Path) -> str:
    """What the names of a config's runs begin with where it names none."""
    return re.sub(r"[^\w.-]+", "-", path.stem).strip(".-") or "run"


def checked_name(name: str, *, key: str) -> str:
    """The name, if it can only mean a folder directly below `output.dir`; raises RunFolderError otherwise."""
    # "-" would read as a flag where the name is typed, ":" as a drive; 200 bytes leave room for ".replaced-TIME".
    bad = name != name.strip() or name.startswith((".", "~", "-")) or re.search(r"[/\\\x00-\x1f:]", name)
    if bad or ".." in name or not name or len(name.encode()) > 200:
        raise RunFolderError(
            f"{key}={one_line(json.dumps(name, ensure_ascii=False))} is refused: a run's name is one word "
            "without separators, `..` or a leading dot, such as output.name=gsm8k-r16"
        )
    return name
