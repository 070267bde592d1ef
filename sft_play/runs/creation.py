"""A new run folder: created whole or not at all; an old one of the same name is resumed, or moved aside."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig, resolved
from sft_play.config.schema import OutputConfig
from sft_play.errors import RunFolderError
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import MANIFEST, RunFolder
from sft_play.runs.locking import Lock, lock
from sft_play.runs.lookup import output_dir, run_name

logger = logging.getLogger(__name__)


def new_folder(output: OutputConfig, *, config_path: Path, now: datetime | None = None) -> RunFolder:
    """The folder that a new run will have; nothing is written yet.

    Raises:
        RunFolderError: the name is refused, or the folder exists and `output.if_exists` is fail.
    """
    now = now or datetime.now(UTC)
    base = output_dir(output)
    name = run_name(output, config_path=config_path, now=now)
    path, number = base / name, 2
    while output.name is None and path.exists():  # two starts of one config within a second
        path, number = base / f"{name}-{number}", number + 1
    if path.exists() and output.if_exists == "fail":
        raise RunFolderError(
            f"the run folder {path} exists; choose output.if_exists=resume (continue it), "
            "output.if_exists=replace (move it aside and start over), or another output.name"
        )
    if path.exists() and output.if_exists == "replace":
        RunFolder(path).manifest()  # refuses early what create_run() would refuse
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


def resumes(folder: RunFolder, output: OutputConfig) -> bool:
    """Whether a start that is given this folder resumes the run in it."""
    return folder.path.exists() and output.if_exists == "resume"


def is_finished(folder: RunFolder) -> bool:
    """Whether a run is finished; logs it if so."""
    if folder.manifest().get("status") != "finished":
        return False
    logger.info("The run %s is finished; there is nothing to resume", folder.path)
    return True


def create_run(
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
        building.chmod(0o755)  # mkdtemp lets only its user read it
        write_start(RunFolder(building), loaded, manifest=manifest, plan=plan)
        mark = lock(RunFolder(building), by=by)
        try:
            if folder.path.exists():
                if loaded.config.output.if_exists != "replace":
                    raise RunFolderError(taken)
                move_aside(folder)
            building.rename(folder.path)
        except BaseException as error:
            mark.close()
            # rename(2) onto a folder that is not empty, or of one to be replaced that another start has moved away
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise RunFolderError(taken) from None
            raise
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    mark.folder = folder
    return mark


def write_start(folder: RunFolder, loaded: LoadedConfig, *, manifest: dict[str, Any], plan: dict[str, Any]) -> None:
    """Write what a run begins with: config, settings, plan and manifest."""
    write_text(folder.path / "config.yaml", loaded.text)
    write_json(folder.path / "resolved.json", resolved(loaded.config, effective_batch=plan.get("effective_batch")))
    write_json(folder.path / "plan.json", plan)
    write_json(folder.path / MANIFEST, manifest)


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


def discard_run(folder: RunFolder) -> None:
    """Remove a run that this start created and that never took a step."""
    folder.manifest()
    shutil.rmtree(folder.path)
