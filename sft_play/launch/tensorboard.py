"""TensorBoard beside a run: started, found again and stopped by its process, and never a reason for
training to fail.

A TensorBoard is a process in a session of its own, so Ctrl-C in the terminal reaches only the
training. Nothing is recorded on disk: a TensorBoard of this project carries `OWNER_VARIABLE` in its
environment, which only its user can read, and the rest is in its command line. One that belongs to
a run watches the process that started it, so that it ends after a kill -9 too. The process is
`python -m sft_play.launch.tensorboard --logdir=…`: TensorBoard's own program, with a check of each
request's Host. Flags and the route `/data/environment` are those of
https://github.com/tensorflow/tensorboard: `tensorboard/program.py`,
`tensorboard/plugins/core/core_plugin.py`.
"""

import contextlib
import errno
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil

from sft_play.errors import ConfigError
from sft_play.files import cache_dir, hold_lock
from sft_play.launch.torchrun import read_whole_number
from sft_play.log import one_line, redact
from sft_play.machine.network import allowed_host_names, is_local, is_local_request, server_url
from sft_play.process.environment import independent_environment
from sft_play.process.signals import PARENT_VARIABLE, child_environment, watch_parent

logger = logging.getLogger(__name__)

# In the environment of a TensorBoard of this project: the cache folder of whoever started it.
OWNER_VARIABLE = "SFT_PLAY_TENSORBOARD"
DEFAULT_TENSORBOARD_PORT = 6006
PORTS_TRIED = 100
# TensorBoard answers 3 to 6 s after its start on an idle machine; imports from a cold disk take a
# multiple of that.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2
_TENSORBOARD_MODULE = "sft_play.launch.tensorboard"


@dataclass(frozen=True)
class TensorBoardServer:
    """A TensorBoard: its process, where it listens, and the folder that it shows. `ends_with_run`:
    it ends with the command that started it. `is_reused`: it was running already, and whoever
    started it stops it.
    """

    process: psutil.Process
    host: str
    port: int
    logdir: str
    ends_with_run: bool = False
    is_reused: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self.process.pid)

    @property
    def url(self) -> str:
        """The address of its server, from this machine."""
        return server_url(self.host, self.port)

    @property
    def page(self) -> str:
        """The address to open: the page with the run's own layout. Curves are not smoothed: by the
        default of 0.6, a held-out loss that fell to 0.05 would show 3.9 ("Time series" reads the
        query, the others what follows their name)."""
        return f"{self.url}?smoothing=0#custom_scalars&_smoothingWeight=0"


def server_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Host and port that `TB_HOST` and `TB_PORT` ask for, as options of `start_server`; those not
    given are left out. Raises ConfigError where TB_PORT is not a port."""
    host = environment.get("TB_HOST", "").strip()
    port = read_whole_number(environment, "TB_PORT", minimum=1)
    if port is not None and port > 65_535:
        raise ConfigError(f"TB_PORT={port} is not a port; ports go from 1 to 65535")
    return {name: value for name, value in {"host": host, "port": port}.items() if value}


@contextlib.contextmanager
def sidecar(
    logdir: Path, *, environment: Mapping[str, str], **options: Any
) -> Iterator[TensorBoardServer | None]:
    """Run TensorBoard while the block runs; warn once if it cannot be started. It ends with the
    block, or with this process, unless `TB_KEEP` is set or somebody else started it. `options`:
    keywords of `start_server`, which win over the environment."""
    should_keep = environment.get("TB_KEEP", "").strip().lower() not in (
        "",
        "0",
        "no",
        "false",
        "off",
    )
    try:
        server, message = start_server(
            logdir, ends_with_caller=not should_keep, **{**server_options(environment), **options}
        )
    except ConfigError as error:
        server, message = None, str(error)
    if server is None:
        logger.warning("no TensorBoard: %s; training continues without it", message)
    else:
        log_server_start(server, message)
    try:
        yield server
    finally:
        if server is not None and not server.is_reused:
            stay_message = (
                f"TensorBoard stays at {server.page} (TB_KEEP is set; make tb-stop ends it)"
            )
            logger.info("%s", stay_message if should_keep else stop_server(server))


def log_server_start(server: TensorBoardServer, message: str) -> None:
    """Log where a TensorBoard is, and a warning where others can reach it."""
    logger.info("%s", message)
    if not is_local(server.host):
        logger.warning(
            "TensorBoard listens on %s and has no password: anyone who reaches that address can"
            " read these logs; to keep them to yourself, use 127.0.0.1 and an ssh tunnel (ssh -L"
            " %d:127.0.0.1:%d HOST)",
            one_line(server.host),
            server.port,
            server.port,
        )


# --- start ----------------------------------------------------------------------------------------


def start_server(
    logdir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_TENSORBOARD_PORT,
    title: str | None = None,
    ends_with_caller: bool = False,
    python: str = sys.executable,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[TensorBoardServer | None, str]:
    """Start a TensorBoard over `logdir`, which need not exist yet, at the first free port from
    `port` on (0: any), or reuse one of ours for the same folder and host. Returns it with a line on
    it, or None with the reason: it never raises, as a run is worth more than its curves. `title`:
    the title of the browser's window. `ends_with_caller`: whether it ends when this process does
    (on Linux: the thread that called this)."""
    folder = str(logdir.absolute().resolve())
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        # Two that start at once would both find the same port free, and no TensorBoard over the
        # folder.
        with hold_lock(
            cache_dir() / "tensorboard.lock",
            waiting_message="Another command starts a TensorBoard; waiting for it",
        ):
            for server in running_servers():
                if (server.logdir, server.host) == (folder, host) and is_serving(server):
                    message = f"TensorBoard is already running: {server.page}"
                    if server.ends_with_run and not ends_with_caller:
                        message += "; it ends with its run"
                    return replace(server, is_reused=True), message
            free_port = _find_free_port(host, port)
            flags = {
                "logdir": folder,
                "host": host,
                "port": free_port,
                "window_title": title or logdir.name,
            }
            argv = [
                python,
                "-m",
                _TENSORBOARD_MODULE,
                *(f"--{name}={value}" for name, value in flags.items()),
            ]
            # marked as ours, with no GPU and none of the variables that make a process a rank
            environment = {
                **independent_environment(os.environ),
                OWNER_VARIABLE: str(cache_dir().absolute()),
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "3",
            }
            if ends_with_caller:
                environment = child_environment(environment, signal_number=signal.SIGTERM)
            with tempfile.TemporaryFile() as output:
                popen = subprocess.Popen(
                    argv,
                    cwd="/",
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C belongs to the training, which stops TensorBoard itself
                    start_new_session=True,
                )
                server = TensorBoardServer(
                    psutil.Process(popen.pid), host, free_port, folder, ends_with_caller
                )
                _wait_until_serving(server, popen, output, timeout_s)
            message = f"TensorBoard: {server.page}"
            if port not in (0, free_port):
                message += f" (port {port} is taken)"
            return server, message
    except ConfigError as error:
        return None, str(error)
    except Exception as error:  # whatever it is, training continues without it
        logger.debug("TensorBoard could not be started", exc_info=True)
        return None, f"{type(error).__name__}: {one_line(str(error))}"


def _find_free_port(host: str, first: int) -> int:
    last, reason = min(65535, first + PORTS_TRIED - 1) if first else 0, "all are taken"
    for port in range(first, last + 1):
        try:
            # by the family that the name means: a host may have an address of IPv6 alone
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.create_server(address, family=family) as free:
                return int(free.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = str(error.strerror)
                break
    raise ConfigError(
        f"{one_line(host)} cannot be listened on: {reason} (TB_HOST=, ports {first} to {last})"
    )


def _wait_until_serving(
    server: TensorBoardServer, popen: Any, output: IO[bytes], timeout_s: float
) -> None:
    """Wait until a process that was just started answers. Raises ConfigError where it does not, and
    has ended it."""
    deadline, is_answering = time.monotonic() + timeout_s, False
    try:
        while not is_answering and popen.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            is_answering = is_serving(server)
    finally:
        code = popen.returncode
        # from here on psutil waits for it: no ResourceWarning from subprocess
        popen.returncode = code or 0
        if not is_answering:
            _terminate(server.process)
    if not is_answering:
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or ["no output"]
        reason = "did not answer in time" if code is None else f"ended with exit code {code}"
        raise ConfigError(f"it {reason}: {one_line(redact(lines[-1]), limit=200)}")


def is_serving(server: TensorBoardServer) -> bool:
    """Whether it answers at its address for its folder."""
    # this machine's own: no proxy is asked
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{server.url}data/environment", timeout=5) as response:
            return str(json.loads(response.read(10**6)).get("data_location", "")) == server.logdir
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False


# --- find, and stop -------------------------------------------------------------------------------


def running_servers() -> list[TensorBoardServer]:
    """This user's TensorBoards of this project on this machine, whether they answer or not."""
    servers, owner = [], str(cache_dir().absolute())
    for process in psutil.process_iter():
        # it has ended meanwhile, or is another user's
        with contextlib.suppress(psutil.Error, KeyError):
            argv, environment = process.cmdline(), process.environ()
            if _TENSORBOARD_MODULE in argv and environment.get(OWNER_VARIABLE) == owner:
                options = dict(
                    word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word
                )
                address = options["host"], int(options["port"]), options["logdir"]
                servers.append(
                    TensorBoardServer(
                        process, *address, ends_with_run=PARENT_VARIABLE in environment
                    )
                )
    return servers


def stop_server(server: TensorBoardServer) -> str:
    """End a TensorBoard with its data server, unless its pid is another program's by now; returns a
    line on what was done, and never raises."""
    outcome = "is not running any more"
    if _is_alive(server.process):
        _terminate(server.process)
        outcome = "does not end" if _is_alive(server.process) else "stopped"
    return f"TensorBoard (pid {server.pid}) {outcome}"


def _terminate(process: psutil.Process) -> None:
    """End a process with its session, in which its data server is."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if _is_alive(process):  # else its pid may be another program's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
        while _is_alive(process) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
    with contextlib.suppress(psutil.Error):
        process.wait(0)  # a child of this process would stay a zombie


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie, which has ended and only waits for its parent, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Serve the folder that TensorBoard's own flags name, until it is stopped, or the run ends that
    it belongs to."""
    watch_parent()
    from absl import app
    from tensorboard import default, main_lib, program

    def create_server(tensorboard_app: Any, flags: Any) -> Any:
        names = allowed_host_names(flags.host)

        # answers 403 to requests under a name, or from a page, that is not this machine's:
        # TensorBoard itself answers under any host name, also to pages of other origins
        def filtered_app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            if is_local_request(names, environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")):
                return tensorboard_app(environ, start_response)  # type: ignore[no-any-return]
            body = (
                b"This TensorBoard answers this machine alone, and the request names another in"
                b" Host or Origin.\n"
            )
            headers = [("Content-Type", "text/plain"), ("X-Content-Type-Options", "nosniff")]
            start_response("403 Forbidden", [*headers, ("Content-Length", str(len(body)))])
            return [body]

        return program.create_port_scanning_werkzeug_server(filtered_app, flags)

    main_lib.global_init()
    tensorboard = program.TensorBoard(plugins=default.get_plugins(), server_class=create_server)
    app.run(tensorboard.main, flags_parser=tensorboard.configure)


if __name__ == "__main__":
    main()
