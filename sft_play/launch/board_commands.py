"""What `make tensorboard`, `tb-open`, `tb-stop` and `tb-clean` do, and what a `-tb` command asks of its run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_play import runs
from sft_play.config.load import LoadedConfig, load_config
from sft_play.errors import ConfigError, RunFolderError
from sft_play.launch import tensorboard
from sft_play.launch.tensorboard import Sidecar
from sft_play.log import one_line
from sft_play.runs import RunFolder

logger = logging.getLogger(__name__)

EVENT_FILES = "events.out.tfevents.*"
"""How TensorBoard's writers name their files; nothing else is removed."""


def with_curves(loaded: LoadedConfig) -> LoadedConfig:
    """The config with TensorBoard among its trackers, said where it was not: the page would stay empty."""
    trackers = loaded.config.train.report_to
    if "tensorboard" in trackers or importlib.util.find_spec("tensorboard") is None:
        return loaded
    asked = f"train.report_to={json.dumps(['tensorboard', *trackers])}"
    logger.info("TensorBoard was asked for: %s, in place of %s", asked, json.dumps(list(trackers)))
    kept = [word for word in loaded.overrides if not word.startswith("train.report_to=")]
    return load_config(loaded.path, overrides=[*kept, asked])


# --- which folder -----------------------------------------------------------------------------------------------------


def run_of(base: Path, run: str) -> RunFolder:
    """The run that RUN names: by its name in `base`, or by its folder.

    Raises:
        RunFolderError: there is none, or it is not one of ours.
    """
    given = Path(run).expanduser()
    if given.name != run or (given / runs.MANIFEST).is_file():
        folder = RunFolder(given)
    else:
        folder = RunFolder(base / runs.checked_name(run, key="RUN"))
    if not folder.path.is_dir():
        there = ", ".join(sorted(other.path.name for other in runs_in(base))[-8:]) or "none"
        raise RunFolderError(f"there is no run {one_line(run)} in {base}; the runs there: {there}")
    folder.manifest()
    return folder


def runs_in(base: Path) -> Iterator[RunFolder]:
    """Every run folder of this project's directly below `base`, those that were moved aside too."""
    for path in sorted(base.iterdir()) if base.is_dir() else []:
        folder = RunFolder(path)
        if path.is_symlink() or not folder.manifest_path.is_file():
            continue
        try:
            folder.manifest()
        except RunFolderError:
            continue
        yield folder


def _shown(base: Path, run: str | None) -> tuple[Path, str]:
    """The folder of logs that is asked for, and the title of its page."""
    if run is None:
        return base, base.absolute().name
    folder = run_of(base, run)
    return folder.tensorboard, folder.path.absolute().name


# --- the commands -----------------------------------------------------------------------------------------------------


def show(base: Path, run: str | None, environment: Mapping[str, str]) -> Sidecar:
    """A TensorBoard over all runs in `base`, or over one, that stays until it is stopped; its address is logged.

    Raises:
        ConfigError: it cannot be started, or TB_PORT is no port.
        RunFolderError: RUN names no run.
    """
    logdir, title = _shown(base, run)
    sidecar, words = tensorboard.start(logdir, title=title, **tensorboard.settings(environment))
    if sidecar is None:
        raise ConfigError(f"TensorBoard over {logdir} does not start: {words}")
    tensorboard.say_started(sidecar, words)
    if not any(logdir.rglob(EVENT_FILES) if run else base.glob(f"*/tb/{EVENT_FILES}")):
        logger.info("There are no curves in %s yet", logdir)
    else:
        logger.info("It shows %s, and stays until make tb-stop", logdir)
    return sidecar


def open_page(base: Path, run: str | None, environment: Mapping[str, str]) -> None:
    """Open the page in a browser where there is a display, else say its address; TensorBoard is started if need be.

    Without RUN a TensorBoard of one of the runs in `base`, such as that of a `-tb` command, will do.

    Raises:
        ConfigError: it cannot be started, or TB_PORT is no port.
        RunFolderError: RUN names no run.
    """
    logdir, _ = _shown(base, run)
    running = [one for one in tensorboard.recorded() if tensorboard.find(Path(one.record)) is not None]
    inside = [one for one in running if _is_in(one, logdir)]
    exact = [one for one in inside if Path(one.logdir) == logdir.absolute().resolve()]
    sidecar = next(iter([*exact, *inside]), None) or show(base, run, environment)
    if _has_display(environment) and webbrowser.open(sidecar.page):
        logger.info("Opened %s in the browser", sidecar.page)
        return
    logger.info("No browser can be shown here; open this address yourself: %s", sidecar.page)
    if environment.get("SSH_CONNECTION"):
        logger.info("From the machine that you sit at: ssh -L %d:127.0.0.1:%d %s, then the same address",
                    sidecar.port, sidecar.port, socket.gethostname())  # fmt: skip


def _is_in(sidecar: Sidecar, folder: Path) -> bool:
    return Path(sidecar.logdir).is_relative_to(folder.absolute().resolve())


def _has_display(environment: Mapping[str, str]) -> bool:
    """Whether a browser could open a window: a screen, or a command of the user's that opens pages elsewhere."""
    if environment.get("BROWSER"):
        return True
    if sys.platform == "darwin":
        return not environment.get("SSH_CONNECTION")
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def stop(base: Path | None, run: str | None = None) -> bool:
    """Stop the TensorBoards over a folder and what is in it (None: all of this project's); whether all have ended."""
    found = tensorboard.recorded()
    if base is not None:
        logdir, _ = _shown(base, run)
        found = [one for one in found if _is_in(one, logdir)]
    if not found:
        where = f" over {logdir}" if base is not None else ""
        logger.info("No TensorBoard of this project is running%s", where)
    for one in found:
        logger.info("%s: %s, over %s", tensorboard.stop(one), one.url, one.logdir)
    return not [one for one in found if one in tensorboard.recorded()]


# --- tb-clean ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Removable:
    """A finished run and its event files, with what they take."""

    run: RunFolder
    files: tuple[Path, ...]
    size_bytes: int


def clean(base: Path, run: str | None, *, yes: bool, ask: Callable[[str], str] | None) -> None:
    """Remove the event files of finished runs in `base`, or of one, after asking; what is kept is said with why.

    Args:
        yes: remove without asking.
        ask: puts a question to a person and returns the answer; None where there is nobody to ask.

    Raises:
        ConfigError: nobody can be asked, and `yes` was not given.
        RunFolderError: RUN names no run, or one that is not finished.
    """
    chosen = list(runs_in(base)) if run is None else [run_of(base, run)]
    finished = [folder for folder in chosen if _status(folder) == "finished"]
    if run is not None and not finished:
        raise RunFolderError(
            f"{chosen[0].path} is not finished (its manifest says {_status(chosen[0])}): its curves are kept, since it "
            "may go on"
        )
    found = [removable for folder in finished if (removable := _removable(folder)).files]
    for one in found:
        logger.info("%s  %s, %s", _size(one.size_bytes).rjust(11), one.run.tensorboard, _count(len(one.files)))
    for folder in chosen:
        if folder not in finished and _removable(folder).files:
            logger.info("kept: %s is not finished (%s)", folder.path, _status(folder))
    if not found:
        logger.info("There are no event files of finished runs in %s", base if run is None else chosen[0].path)
        return
    total = f"{_count(sum(len(one.files) for one in found))} of {len(found)} finished run{'s' * (len(found) > 1)}, "
    total += _size(sum(one.size_bytes for one in found))
    if not yes and ask is None:
        raise ConfigError(
            f"tb-clean would remove {total}; it asks first, and there is no terminal to ask at: YES=1 removes what is "
            "listed"
        )
    if not yes and ask is not None and not _agrees(ask, f"Remove {total}? [y/N] "):
        logger.info("Nothing was removed")
        return
    count, freed = 0, 0
    for one in found:
        removed = _remove(one)
        count, freed = count + len(removed), freed + sum(removed)
    logger.info("Removed %s, %s", _count(count), _size(freed))


def _agrees(ask: Callable[[str], str], question: str) -> bool:
    try:
        return ask(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _status(folder: RunFolder) -> str:
    return one_line(str(folder.manifest().get("status", "nothing")))


def _removable(folder: RunFolder) -> Removable:
    """The run's event files, nothing of what a link leads to."""
    files: list[Path] = []
    if not folder.tensorboard.is_symlink():
        for place, _, names in os.walk(folder.tensorboard):
            here = [Path(place) / name for name in names]
            files += [path for path in here if path.match(EVENT_FILES) and path.is_file() and not path.is_symlink()]
    return Removable(folder, tuple(sorted(files)), sum(path.stat().st_size for path in files))


def _remove(one: Removable) -> list[int]:
    """Remove what was listed, unless the run has begun to be written again; the sizes of what is gone."""
    try:
        with runs.lock(one.run):
            return _remove_files(one)
    except RunFolderError as error:
        logger.warning("kept: %s", error)
        return []


def _remove_files(one: Removable) -> list[int]:
    try:
        status = _status(one.run)
    except RunFolderError:
        status = "nothing any more"
    if status != "finished":  # another run has taken its place since it was listed
        logger.warning("kept: %s is not finished (%s)", one.run.path, status)
        return []
    gone = []
    for path in one.files:
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError as error:
            logger.warning("kept: %s cannot be removed: %s", path, error.strerror)
            continue
        gone.append(size)
    return gone


def _count(files: int) -> str:
    return f"{files} event file{'s' if files != 1 else ''}"


def _size(size: float) -> str:
    if size < 1024:
        return f"{size:.0f} bytes"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
