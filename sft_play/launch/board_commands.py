"""What `make tensorboard`, `tb-open`, `tb-stop` and `tb-clean` do, and what a `-tb` command asks of its run."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play import runs
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError, RunFolderError
from sft_play.launch import tensorboard
from sft_play.launch.tensorboard import Sidecar
from sft_play.log import one_line
from sft_play.runs import RunFolder

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
    inside = [one for one in _boards_in(logdir) if tensorboard.find(Path(one.record)) is not None]
    exact = [one for one in inside if Path(one.logdir) == logdir.absolute().resolve()]
    sidecar = next(iter([*exact, *inside]), None) or show(base, run, environment)
    if _has_display(environment) and webbrowser.open(sidecar.page):
        logger.info("Opened %s in the browser", sidecar.page)
        return sidecar, True
    logger.info("No browser can be shown here; open this address yourself: %s", sidecar.page)
    if environment.get("SSH_CONNECTION"):
        logger.info("From the machine that you sit at: ssh -L %d:127.0.0.1:%d %s, then the same address",
                    sidecar.port, sidecar.port, socket.gethostname())  # fmt: skip
    return sidecar, False


def _logdir(base: Path, run: str | None) -> Path:
    return base if run is None else runs.run_named(base, run).tensorboard


def _boards_in(folder: Path) -> list[Sidecar]:
    """The boards over a folder and over what is in it."""
    place = folder.absolute().resolve()
    return [one for one in tensorboard.recorded() if Path(one.logdir).is_relative_to(place)]


def _has_display(environment: Mapping[str, str]) -> bool:
    """Whether a browser could open a window: a screen, or a command of the user's that opens pages elsewhere."""
    if environment.get("BROWSER"):
        return True
    if sys.platform == "darwin":
        return not environment.get("SSH_CONNECTION")
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def stop(base: Path | None, run: str | None = None) -> tuple[list[Sidecar], list[Sidecar]]:
    """Stop the TensorBoards over a folder and what is in it (None: all of this project).

    Returns:
        Those that have ended, and those that are still running.
    """
    logdir = None if base is None else _logdir(base, run)
    boards = tensorboard.recorded() if logdir is None else _boards_in(logdir)
    if not boards:
        logger.info("No TensorBoard of this project is running%s", "" if logdir is None else f" over {logdir}")
    for one in boards:
        logger.info("%s: %s, over %s", tensorboard.stop(one), one.url, one.logdir)
    running = tensorboard.recorded()
    return [one for one in boards if one not in running], [one for one in boards if one in running]


def clean(base: Path, run: str | None, *, yes: bool, ask: Callable[[str], str] | None) -> dict[str, Any]:
    """Remove the event files of finished runs in `base`, or of one, after asking; logs what is kept and why.

    Args:
        yes: remove without asking.
        ask: puts a question to a person and returns the answer; None where there is no terminal.

    Returns:
        The paths `removed`, their size as `freed_bytes`, and how many event files were `kept`.

    Raises:
        ConfigError: there is no terminal to ask at, and `yes` was not given.
        RunFolderError: RUN names no run, or one that is not finished.
    """
    chosen = list(runs.runs_in(base, replaced=True)) if run is None else [runs.run_named(base, run)]
    files = {folder: sorted(folder.tensorboard.rglob(EVENT_FILES)) for folder in chosen}
    finished: dict[RunFolder, list[Path]] = {}
    for folder in chosen:
        # Files behind a link may be another user's.
        is_link = folder.tensorboard.is_symlink() or (run is None and folder.path.is_symlink())
        own = [] if is_link else [path for path in files[folder] if path.is_file() and not path.is_symlink()]
        status = _status(folder)
        if status != "finished" and run is not None:
            raise RunFolderError(
                f"{folder.path} is not finished (its manifest says {status}): its curves are kept, since it can be "
                "resumed"
            )
        if own and status != "finished":
            logger.info("kept: %s is not finished (%s)", folder.path, status)
        elif own:
            logger.info("%s  %s, %s", _size(own).rjust(11), folder.tensorboard, _count(own))
            finished[folder] = own
    removed: dict[Path, int] = {}
    if not finished:
        logger.info("There are no event files of finished runs in %s", base if run is None else chosen[0].path)
    elif yes or _agrees(finished, ask):
        for folder, own in finished.items():
            removed |= _remove(folder, own)
    kept = sum(map(len, files.values())) - len(removed)
    return {"removed": [str(path) for path in removed], "freed_bytes": sum(removed.values()), "kept": kept}


def _agrees(finished: Mapping[RunFolder, list[Path]], ask: Callable[[str], str] | None) -> bool:
    """Whether the user agrees to the removal; raises ConfigError where there is no terminal to ask at."""
    every = [path for files in finished.values() for path in files]
    total = f"{_count(every)} of {len(finished)} finished run{'s' * (len(finished) > 1)}, {_size(every)}"
    if ask is None:
        raise ConfigError(
            f"tb-clean would remove {total}; it asks first, and there is no terminal to ask at: YES=1 removes what is "
            "listed"
        )
    try:
        agreed = ask(f"Remove {total}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        logger.info("Nothing was removed")
    return agreed


def _remove(folder: RunFolder, files: Sequence[Path]) -> dict[Path, int]:
    """Remove a finished run's event files, with the run locked; returns the removed ones with their sizes."""
    removed: dict[Path, int] = {}
    try:
        with runs.lock(folder):
            if _status(folder) != "finished":  # another run may have taken its place since it was listed
                raise RunFolderError(f"{folder.path} is not finished ({_status(folder)})")
            words = f"Removed {_count(files)}, {_size(files)}, of {folder.path}"
            for path in files:
                size = path.stat().st_size
                path.unlink()
                removed[path] = size
            logger.info("%s", words)
    except (RunFolderError, OSError) as error:
        logger.warning("kept: %s", error)
    return removed


def _status(folder: RunFolder) -> str:
    return one_line(str(folder.manifest().get("status", "nothing")))


def _count(files: Sequence[Path]) -> str:
    return f"{len(files)} event file{'s' * (len(files) != 1)}"


def _size(files: Iterable[Path]) -> str:
    size = float(sum(path.stat().st_size for path in files))
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
