"""What `make tensorboard`, `tb-open`, `tb-stop` and `tb-clean` do, and what a `-tb` command asks of its run."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError, RunFolderError
from sft_play.launch import tensorboard
from sft_play.launch.tensorboard import Sidecar
from sft_play.log import one_line
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import lock
from sft_play.runs.lookup import run_named, runs_in
from sft_play.units import size_of

logger = logging.getLogger(__name__)

EVENT_FILES = "events.out.tfevents.*"
"""The names of TensorBoard's files; nothing else is removed."""


def with_curves(loaded: LoadedConfig) -> LoadedConfig:
    """The config with TensorBoard among its trackers, logged where it was added: the page would stay empty without."""
    trackers = loaded.config.train.report_to
    if "tensorboard" in trackers or importlib.util.find_spec("tensorboard") is None:
        return loaded
    asked = f"train.report_to={json.dumps(['tensorboard', *trackers])}"
    logger.info("TensorBoard was asked for: %s, in place of %s", asked, json.dumps(list(trackers)))
    kept = [word for word in loaded.overrides if not word.startswith("train.report_to=")]
    return load_config(loaded.path, overrides=[*kept, asked])


# --- the commands -----------------------------------------------------------------------------------------------------


def show(base: Path, run: str | None, environment: Mapping[str, str]) -> Sidecar:
    """A TensorBoard over all runs in `base`, or over one, that stays until it is stopped; its address is logged.

    Raises:
        ConfigError: it cannot be started, or TB_PORT is not a port.
        RunFolderError: RUN names no run.
    """
    logdir = _logdir(base, run)
    title = (logdir.parent if run else logdir).absolute().name
    sidecar, words = tensorboard.start(logdir, title=title, **tensorboard.settings(environment))
    if sidecar is None:
        raise ConfigError(f"TensorBoard over {logdir} does not start: {words}")
    tensorboard.say_started(sidecar, words)
    if not any(logdir.rglob(EVENT_FILES) if run else base.glob(f"*/tb/{EVENT_FILES}")):
        logger.info("There are no curves in %s yet", logdir)
    elif not sidecar.is_of_run:
        logger.info("It shows %s, and stays until make tb-stop", logdir)
    return sidecar


def open_page(base: Path, run: str | None, environment: Mapping[str, str]) -> tuple[Sidecar, bool]:
    """Open the page in a browser, or log its address where there is no display; starts TensorBoard if need be.

    Without RUN, a TensorBoard of one of the runs in `base`, such as that of a `-tb` command, will do.

    Returns:
        The TensorBoard, and whether a browser was opened.

    Raises:
        ConfigError: it cannot be started, or TB_PORT is not a port.
        RunFolderError: RUN names no run.
    """
    logdir = _logdir(base, run)
    inside = sorted(filter(tensorboard.answers, _boards_in(logdir)), key=lambda one: len(one.logdir))
    sidecar = inside[0] if inside else show(base, run, environment)
    has_display = any(environment.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if (has_display or sys.platform == "darwin") and webbrowser.open(sidecar.page):
        logger.info("Opened %s in the browser", sidecar.page)
        return sidecar, True
    logger.info("No browser can be shown here; open this address yourself: %s", sidecar.page)
    if environment.get("SSH_CONNECTION"):
        logger.info("From the machine that you sit at: ssh -L %d:127.0.0.1:%d %s, then the same address",
                    sidecar.port, sidecar.port, socket.gethostname())  # fmt: skip
    return sidecar, False


def _logdir(base: Path, run: str | None) -> Path:
    return base if run is None else run_named(base, run).tensorboard


def _boards_in(folder: Path) -> list[Sidecar]:
    """The boards over a folder and over what is in it."""
    place = folder.absolute().resolve()
    return [one for one in tensorboard.recorded() if Path(one.logdir).is_relative_to(place)]


def stop(base: Path | None, run: str | None = None) -> tuple[list[Sidecar], list[Sidecar]]:
    """Stop the TensorBoards over a folder and what is in it (None: all of this project).

    Returns:
        Those that have ended, and those that are still running.
    """
    boards = tensorboard.recorded() if base is None else _boards_in(_logdir(base, run))
    if not boards:
        over = "" if base is None else f" over {_logdir(base, run)}"
        logger.info("No TensorBoard of this project is running%s", over)
    for one in boards:
        logger.info("%s: %s, over %s", tensorboard.stop(one), one.url, one.logdir)
    running = tensorboard.recorded()
    return [one for one in boards if one not in running], [one for one in boards if one in running]


def clean(base: Path, run: str | None, *, agrees: Callable[[str], bool]) -> dict[str, Any]:
    """Remove the event files of finished runs in `base`, or of one, if the user agrees; logs what is kept and why.

    Files behind a link are kept: they may be another user's.

    Args:
        agrees: asks whether what it is given may be removed.

    Returns:
        The paths `removed`, their size as `freed_bytes`, and how many event files were `kept`.

    Raises:
        RunFolderError: RUN names no run, or one that is not finished.
    """
    chosen = list(runs_in(base, replaced=True)) if run is None else [run_named(base, run)]
    every = {folder: sorted(folder.tensorboard.rglob(EVENT_FILES)) for folder in chosen}
    finished: dict[RunFolder, dict[Path, int]] = {}
    for folder, files in every.items():
        if run is not None:
            _require_finished(folder)
        is_link = folder.tensorboard.is_symlink() or (run is None and folder.path.is_symlink())
        own = {path: path.stat().st_size for path in files if not is_link and not path.is_symlink()}
        if own and (status := _status(folder)) != "finished":
            logger.info("kept: %s is not finished (%s)", folder.path, status)
        elif own:
            logger.info("%s: %s", folder.tensorboard, _said(own))
            finished[folder] = own
    total = {path: size for own in finished.values() for path, size in own.items()}
    removed: dict[Path, int] = {}
    if not total:
        logger.info("There are no event files of finished runs in %s", base if run is None else chosen[0].path)
    else:
        if agrees(f"{_said(total)}, of {len(finished)} finished run{'s' * (len(finished) > 1)}"):
            removed = {path: size for folder, own in finished.items() for path, size in _remove(folder, own)}
        logger.info("%s", f"Removed {_said(removed)}" if removed else "Nothing was removed")
    return {
        "removed": [str(path) for path in removed],
        "freed_bytes": sum(removed.values()),
        "kept": sum(map(len, every.values())) - len(removed),
    }


def _remove(folder: RunFolder, files: Mapping[Path, int]) -> Iterator[tuple[Path, int]]:
    """Remove a finished run's event files with the run locked; what was removed."""
    try:
        with lock(folder):
            _require_finished(folder)  # another run may have taken its place since it was listed
            for path, size in files.items():
                path.unlink()
                yield path, size
    except (RunFolderError, OSError) as error:
        logger.warning("kept: %s", error)


def _require_finished(folder: RunFolder) -> None:
    if (status := _status(folder)) != "finished":
        raise RunFolderError(f"{folder.path} is not finished ({status}): its curves are kept, since it can be resumed")


def _status(folder: RunFolder) -> str:
    return one_line(str(folder.manifest().get("status", "nothing")))


def _said(files: Mapping[Path, int]) -> str:
    return f"{len(files)} event file{'s' * (len(files) != 1)}, {size_of(sum(files.values()))}"
