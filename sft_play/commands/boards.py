"""`tensorboard`, `tb-open`, `tb-stop` and `tb-clean`: the curves of runs in TensorBoard."""

from __future__ import annotations

import logging
import os
import sys
import webbrowser
from pathlib import Path

from sft_play.commands.answer import Answer, agreed, stdout_to_stderr
from sft_play.commands.request import Request, output_dir_of
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.listing import CURVES, Pruned, prune, to_prune
from sft_play.launch import tensorboard
from sft_play.launch.tensorboard import TensorBoardServer
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import run_named, runs_in
from sft_play.units import size_of

logger = logging.getLogger(__name__)


def run(request: Request) -> Answer:
    """Start, open or stop the page, or remove the curves; each step is logged."""
    with stdout_to_stderr(wanted=request.json):
        if request.command == "tensorboard":
            return Answer({"ok": True, **_page(_shown(request))})
        return {"tb-open": _open, "tb-stop": _stop, "tb-clean": _clean}[request.command](request)


def _shown(request: Request) -> TensorBoardServer:
    base, logdir = output_dir_of(request), _logdir(request)
    title = (logdir.parent if request.run else logdir).absolute().name
    sidecar, words = tensorboard.start_server(logdir, title=title, **tensorboard.server_settings(os.environ))
    if sidecar is None:
        raise ConfigError(f"TensorBoard over {logdir} does not start: {words}")
    tensorboard.log_started(sidecar, words)
    if not any(logdir.rglob(CURVES) if request.run else base.glob(f"*/tb/{CURVES}")):
        logger.info("There are no curves in %s yet", logdir)
    elif not sidecar.ends_with_run:
        logger.info("It shows %s, and stays until make tb-stop", logdir)
    return sidecar


def _open(request: Request) -> Answer:
    """In a browser, or its address where there is no display. Without RUN, a TensorBoard of one of the runs will do."""
    inside = sorted(filter(tensorboard.is_serving, _inside(_logdir(request))), key=lambda one: len(one.logdir))
    sidecar = inside[0] if inside else _shown(request)
    has_display = sys.platform == "darwin" or any(map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")))
    is_open = has_display and webbrowser.open(sidecar.page)
    where = "Opened %s in the browser" if is_open else "No browser can be shown here; open this address yourself: %s"
    logger.info(where, sidecar.page)
    return Answer({"ok": True, "opened": is_open, **_page(sidecar)})


def _stop(request: Request) -> Answer:
    folder = _logdir(request) if request.config_given or request.run or request.overrides else None
    chosen = tensorboard.running_servers() if folder is None else _inside(folder)
    if not chosen:
        over = "" if folder is None else f" over {folder}"
        logger.info("No TensorBoard of this project is running%s", over)
    for one in chosen:
        logger.info("%s: %s, over %s", tensorboard.stop_server(one), one.url, one.logdir)
    running = tensorboard.running_servers()
    left = [one for one in chosen if one in running]
    stopped = [_page(one) for one in chosen if one not in left]
    return Answer({"ok": not left, "stopped": stopped, "running": list(map(_page, running))}, exit_code=int(bool(left)))


def _clean(request: Request) -> Answer:
    output = output_dir_of(request)
    chosen: dict[RunFolder, dict[Path, int]] = {}
    for folder in [run_named(output, request.run)] if request.run else runs_in(output, replaced=True):
        try:
            chosen |= to_prune([folder], "curves")
        except RunFolderError as error:
            if request.run:
                raise
            logger.info("kept: %s", error)
    files = [size for parts in chosen.values() for size in parts.values()]
    what = f"{len(files)} event file{'s' * (len(files) != 1)}, {size_of(sum(files))}, of {len(chosen)} finished run"
    what += "s" * (len(chosen) > 1)
    pruned = Pruned((), 0)
    if not chosen:
        logger.info("There are no event files of finished runs in %s", output)
    elif agreed(request, f"Remove {what}?", refusal=f"tb-clean would remove {what}"):
        pruned = prune(chosen)
    if chosen:
        logger.info("Removed: %d event files, %s", len(pruned.removed), size_of(pruned.freed_bytes))
    return Answer({"ok": True, "removed": list(map(str, pruned.removed)), "freed_bytes": pruned.freed_bytes})


def _logdir(request: Request) -> Path:
    base = output_dir_of(request)
    return run_named(base, request.run).tensorboard if request.run else base


def _inside(folder: Path) -> list[TensorBoardServer]:
    place = folder.absolute().resolve()
    return [one for one in tensorboard.running_servers() if Path(one.logdir).is_relative_to(place)]


def _page(sidecar: TensorBoardServer) -> dict[str, object]:
    return {name: getattr(sidecar, name) for name in ("page", "logdir", "host", "port", "pid")}
