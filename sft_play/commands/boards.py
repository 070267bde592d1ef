"""`tensorboard`, `tb-open`, `tb-stop` and `tb-clean`: the curves of runs in TensorBoard."""

import logging
import os
import sys
import webbrowser
from pathlib import Path

from sft_play.commands.request import (
    CommandResult,
    Request,
    confirm_with_user,
    redirect_stdout_to_stderr,
    request_output_dir,
)
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.listing import EVENT_FILES, PruneResult, prune, select_prunable
from sft_play.launch import tensorboard
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import iter_runs, resolve_run
from sft_play.text import format_size, plural

logger = logging.getLogger(__name__)


def run_boards(request: Request) -> CommandResult:
    """Start, open or stop the page, or remove the curves; each step is logged."""
    with redirect_stdout_to_stderr(enabled=request.json):
        if request.command == "tensorboard":
            return CommandResult({"ok": True, **_server_fields(_start_page(request))})
        return {"tb-open": _open_page, "tb-stop": _stop_servers, "tb-clean": _remove_curves}[
            request.command
        ](request)


def _start_page(request: Request) -> tensorboard.TensorBoardServer:
    base, logdir = request_output_dir(request), _logdir(request)
    server, message = tensorboard.start_server(
        logdir,
        title=(logdir.parent if request.run else logdir).absolute().name,
        **tensorboard.server_options(os.environ),
    )
    if server is None:
        raise ConfigError(f"TensorBoard over {logdir} does not start: {message}")
    tensorboard.log_server_start(server, message)
    if not any(logdir.rglob(EVENT_FILES) if request.run else base.glob(f"*/tb/{EVENT_FILES}")):
        logger.info("There are no curves in %s yet", logdir)
    elif not server.ends_with_run:
        logger.info("It shows %s, and stays until make tb-stop", logdir)
    return server


def _open_page(request: Request) -> CommandResult:
    """Open the page in a browser, or log its address where there is no display. Without RUN, a
    TensorBoard over one of the runs will do."""
    servers = list(filter(tensorboard.is_serving, _servers_inside(_logdir(request))))
    server = min(servers, key=lambda one: len(one.logdir)) if servers else _start_page(request)
    has_display = sys.platform == "darwin" or any(
        map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    )
    is_open = has_display and webbrowser.open(server.page)
    log_text = (
        "Opened %s in the browser"
        if is_open
        else "No browser can be shown here; open this address yourself: %s"
    )
    logger.info(log_text, server.page)
    return CommandResult({"ok": True, "opened": is_open, **_server_fields(server)})


def _stop_servers(request: Request) -> CommandResult:
    folder = (
        _logdir(request) if request.is_config_given or request.run or request.overrides else None
    )
    servers = tensorboard.running_servers() if folder is None else _servers_inside(folder)
    if not servers:
        logger.info(
            "No TensorBoard of this project is running%s", f" over {folder}" if folder else ""
        )
    for server in servers:
        logger.info("%s: %s, over %s", tensorboard.stop_server(server), server.url, server.logdir)
    running = tensorboard.running_servers()
    still_running = [server for server in servers if server in running]
    stopped = [_server_fields(server) for server in servers if server not in still_running]
    return CommandResult(
        {
            "ok": not still_running,
            "stopped": stopped,
            "running": list(map(_server_fields, running)),
        },
        exit_code=int(bool(still_running)),
    )


def _remove_curves(request: Request) -> CommandResult:
    output = request_output_dir(request)
    removable: dict[RunFolder, dict[Path, int]] = {}
    for folder in (
        [resolve_run(output, request.run)]
        if request.run
        else iter_runs(output, include_replaced=True)
    ):
        try:
            removable |= select_prunable([folder], "curves")
        except RunFolderError as error:
            if request.run:
                raise
            logger.info("kept: %s", error)
    files = [size for parts in removable.values() for size in parts.values()]
    description = (
        f"{plural(len(files), 'event file')}, {format_size(sum(files))},"
        f" of {plural(len(removable), 'finished run')}"
    )
    pruned = PruneResult((), 0)
    if removable:
        if confirm_with_user(
            request, f"Remove {description}?", refusal=f"tb-clean would remove {description}"
        ):
            pruned = prune(removable)
        logger.info(
            "Removed: %d event files, %s", len(pruned.removed), format_size(pruned.freed_bytes)
        )
    else:
        logger.info("There are no event files of finished runs in %s", output)
    return CommandResult(
        {"ok": True, "removed": list(map(str, pruned.removed)), "freed_bytes": pruned.freed_bytes}
    )


def _logdir(request: Request) -> Path:
    base = request_output_dir(request)
    return resolve_run(base, request.run).tensorboard_path if request.run else base


def _servers_inside(folder: Path) -> list[tensorboard.TensorBoardServer]:
    return [
        server
        for server in tensorboard.running_servers()
        if Path(server.logdir).is_relative_to(folder.absolute().resolve())
    ]


def _server_fields(server: tensorboard.TensorBoardServer) -> dict[str, object]:
    return {name: getattr(server, name) for name in ("page", "logdir", "host", "port", "pid")}
