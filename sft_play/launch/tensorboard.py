"""TensorBoard beside a run: started, found again and stopped by its record, and never a reason for training to fail.

A board is a process in a session of its own, so Ctrl-C in the terminal reaches only the training. Its record (a small
JSON file) holds pid, start time and command line: only that very process is ever reused or stopped. One that belongs to
a run is started through `sft_play.endings`, so that it ends after a kill -9 too. Flags and the route
`/data/environment` are those of https://github.com/tensorflow/tensorboard: `tensorboard/program.py`,
`tensorboard/plugins/core/core_plugin.py`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import ipaddress
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.cache import cache_dir, locked
from sft_play.endings import ends_with_me
from sft_play.environment import for_another_run
from sft_play.errors import ConfigError
from sft_play.log import one_line, redact

logger = logging.getLogger(__name__)

DEFAULT_PORT = 6006
"""TensorBoard's own."""
PORTS_TRIED = 100
START_TIMEOUT_S = 60.0
"""TensorBoard answers 3 to 6 s after its start on an idle machine; imports from a cold disk take a multiple of that."""
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2
_CLOCK_TOLERANCE_S = 2.0
"""psutil derives a start time from the boot time, which moves when the system's clock is set."""


@dataclass(frozen=True)
class Sidecar:
    """A TensorBoard: its process (pid, start time, command line) and the folder that it shows.

    `is_of_run`: it ends with the command that started it. `reused`: it was already running, and whoever started it
    stops it.
    """

    pid: int
    created: float
    command: tuple[str, ...]
    host: str
    port: int
    logdir: str
    is_of_run: bool = False
    reused: bool = False

    @property
    def url(self) -> str:
        """The address of its server, from this machine."""
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{address}]:{self.port}/" if ":" in address else f"http://{address}:{self.port}/"

    @property
    def page(self) -> str:
        """The address to open: the page with the run's own layout, in place of all curves in alphabetical order.

        Curves are not smoothed: by TensorBoard's default of 0.6, a held-out loss that fell to 0.05 would show 3.9.
        Its page "Time series" reads the query, "Custom scalars" and "Scalars" read what follows the page's name.
        """
        return f"{self.url}?smoothing=0#custom_scalars&_smoothingWeight=0"

    @property
    def record(self) -> Path:
        """Where it is recorded, by folder and host."""
        place = f"{self.host}:{self.logdir}".encode("utf-8", "surrogateescape")
        return _records() / f"{hashlib.sha256(place).hexdigest()[:16]}.json"


def _records() -> Path:
    """In the cache, by machine: the cache may be on a disk that several share, and a pid belongs to one of them."""
    return cache_dir() / "tensorboard" / socket.gethostname()


def settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Host and port that `TB_HOST` and `TB_PORT` ask for, as options of `start`; those not given are left out.

    Raises:
        ConfigError: TB_PORT is not a port.
    """
    host, port = (environment.get(name, "").strip() for name in ("TB_HOST", "TB_PORT"))
    if port and not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65_536):
        raise ConfigError(f"TB_PORT={one_line(port)} is not a port; ports go from 1 to 65535")
    return {**({"host": host} if host else {}), **({"port": int(port)} if port else {})}


def password_warning(host: str, port: int = DEFAULT_PORT) -> str | None:
    """The warning for a host that others can reach; None for this machine's own addresses."""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return None
    return (
        f"TensorBoard listens on {one_line(host)} and has no password: anyone who reaches that address can read these "
        f"logs; to keep them to yourself, use 127.0.0.1 and an ssh tunnel (ssh -L {port}:127.0.0.1:{port} HOST)"
    )


@contextlib.contextmanager
def beside(logdir: Path, *, environment: Mapping[str, str], **options: Any) -> Iterator[Sidecar | None]:
    """TensorBoard while the block runs; where it cannot be started, one warning, and the block runs without it.

    It ends with the block, or with this process if that is killed, unless `TB_KEEP` is set or somebody else started
    it. `options` are those of `start` and take precedence over the environment.
    """
    keep = environment.get("TB_KEEP", "").strip().lower() not in ("", "0", "no", "false", "off")
    try:
        sidecar, words = start(logdir, ends_with_me=not keep, **{**settings(environment), **options})
    except ConfigError as error:
        sidecar, words = None, str(error)
    if sidecar is None:
        logger.warning("no TensorBoard: %s; training continues without it", words)
    else:
        say_started(sidecar, words)
    try:
        yield sidecar
    finally:
        if sidecar is not None and not sidecar.reused:
            kept = f"TensorBoard stays at {sidecar.page} (TB_KEEP is set; make tb-stop ends it)"
            logger.info("%s", kept if keep else stop(sidecar))


def say_started(sidecar: Sidecar, words: str) -> None:
    """Log where a board is, and a warning where others can reach it."""
    logger.info("%s", words)
    warning = password_warning(sidecar.host, sidecar.port)
    if warning is not None:
        logger.warning("%s", warning)


# --- start ------------------------------------------------------------------------------------------------------------


def start(
    logdir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    title: str | None = None,
    ends_with_me: bool = False,
    python: str = sys.executable,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Sidecar | None, str]:
    """A TensorBoard over `logdir` and a line about it; None and the reason where it cannot be started.

    One that this project started for the same folder and host is reused. Otherwise the first free port from `port`
    on is taken (0: any). No error is raised: a run is worth more than its curves. The folder need not exist yet, and
    is not created.

    Args:
        title: of the browser's window.
        ends_with_me: whether it ends when this process does (on Linux: when the thread does that called this).
    """
    board = Sidecar(0, 0.0, (), host, port, str(logdir.absolute().resolve()), ends_with_me)
    try:
        _records().mkdir(parents=True, exist_ok=True)
        with locked(_records() / "start.lock", waiting="Another command starts a TensorBoard; waiting for it"):
            present = next((one for one in recorded() if one.record == board.record), None)
            if present is not None and answers(present):
                ends = "; it ends with its run" * (present.is_of_run and not ends_with_me)
                return replace(present, reused=True), f"TensorBoard is already running: {present.page}{ends}"
            if present is not None:
                stop(present)  # it hangs
            board = replace(board, port=_free_port(host, port))
            sidecar, words = _start_new(board, python, title or logdir.name, time.monotonic() + timeout_s)
            moved = f" (port {port} is taken)" if sidecar is not None and port not in (0, sidecar.port) else ""
            return sidecar, words + moved
    except ConfigError as error:
        return None, str(error)
    except Exception as error:  # whatever it is, training continues without it
        logger.debug("TensorBoard could not be started", exc_info=True)
        return None, f"{type(error).__name__}: {one_line(str(error))}"


def _free_port(host: str, first: int) -> int:
    """The first free port from `first` on (0: any); raises ConfigError where there is none, or no such host."""
    last = min(65535, first + PORTS_TRIED - 1) if first else 0
    for port in range(first, last + 1):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorBoard does: skips TIME_WAIT
                listener.bind(address)
                listener.listen()
                return int(listener.getsockname()[1])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"{one_line(host)} cannot be listened on: {error.strerror} (TB_HOST=, port {port})"
                ) from None
    raise ConfigError(f"no port from {first} to {last} is free on {one_line(host)}")


def _start_new(board: Sidecar, python: str, title: str, deadline: float) -> tuple[Sidecar | None, str]:
    """Start it on its port and wait until it answers for its folder; one that does not answer is ended."""
    log = board.record.with_suffix(".log")
    options = [f"--logdir={board.logdir}", f"--host={board.host}", f"--port={board.port}", f"--window_title={title}"]
    environment = ends_with_me(_environment(), number=signal.SIGTERM) if board.is_of_run else _environment()
    through = ["sft_play.endings"] if board.is_of_run else []
    with log.open("wb") as sink:
        started = subprocess.Popen(
            [python, "-m", *through, "tensorboard.main", *options], cwd="/", env=environment,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C belongs to the training, which stops the board itself
        )  # fmt: skip
    process = psutil.Process(started.pid)
    try:
        while time.monotonic() < deadline and started.poll() is None:
            if answers(board):
                created, command = process.create_time(), tuple(process.cmdline())
                sidecar = replace(board, pid=started.pid, created=created, command=command)
                _write_record(sidecar)
                _STARTED[sidecar.pid] = started
                return sidecar, f"TensorBoard: {sidecar.page}"
            time.sleep(_POLL_S)
    except BaseException:
        _end_process(process)
        raise
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = one_line(redact(lines[-1]), limit=200) if lines else "no output"
    if started.returncode is not None:
        return None, f"it ended with exit code {started.returncode}: {last}"
    _end_process(process)
    started.wait(STOP_TIMEOUT_S)
    return None, f"it did not answer in time ({last})"


_STARTED: dict[int, subprocess.Popen[bytes]] = {}
"""Boards that this process started, by pid: waited for once they are stopped, so that none stays a zombie."""


def _environment() -> dict[str, str]:
    """The board's environment: no GPU, and none of the variables that make a process a rank."""
    return {**for_another_run(os.environ), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def answers(board: Sidecar) -> bool:
    """Whether a TensorBoard over this folder answers at its address (without a proxy)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{board.url}data/environment", timeout=5) as answer:
            return str(json.loads(answer.read(10**6)).get("data_location", "")) == board.logdir
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False


# --- the record, and stop ---------------------------------------------------------------------------------------------


def _write_record(sidecar: Sidecar) -> None:
    aside = sidecar.record.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(asdict(sidecar), indent=2) + "\n", encoding="utf-8")
    aside.replace(sidecar.record)


def _read_record(record: Path) -> Sidecar | None:
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
        return Sidecar(**{**data, "command": tuple(data["command"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recorded() -> list[Sidecar]:
    """Every board of this project that is alive on this machine, whether it answers or not; the newest first."""
    boards = [_read_record(path) for path in _records().glob("*.json")]
    return sorted((one for one in boards if one is not None and _process_of(one)), key=lambda one: -one.created)


def _process_of(sidecar: Sidecar) -> psutil.Process | None:
    """The recorded process, if pid, start time and command line still agree; None where it is gone."""
    try:
        process = psutil.Process(sidecar.pid)
        is_same = abs(process.create_time() - sidecar.created) <= _CLOCK_TOLERANCE_S
        return process if is_same and tuple(process.cmdline()) == sidecar.command and _is_alive(process) else None
    except psutil.Error:
        return None


def stop(sidecar: Sidecar) -> str:
    """End a board with its data server and remove its record; returns a line on what was done, and never raises.

    Where the process is gone, or its pid belongs to another program now, only the record is removed.
    """
    name = f"TensorBoard (pid {sidecar.pid})"
    process = _process_of(sidecar)
    if process is not None and not _end_process(process):
        return f"{name} does not end; see {sidecar.record}"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if _read_record(sidecar.record) == replace(sidecar, reused=False):  # else another start has replaced it
            sidecar.record.unlink()
        if sidecar.pid in _STARTED:
            _STARTED.pop(sidecar.pid).wait(STOP_TIMEOUT_S)
    return f"{name} stopped" if process is not None else f"{name} is not running any more"


def _end_process(process: psutil.Process) -> bool:
    """SIGTERM to a process and its children, then SIGKILL to those that stay; returns whether all are gone.

    psutil's process objects know their start times: a pid that was reused in the meantime is not hit.
    """
    family = [process]
    with contextlib.suppress(psutil.Error):
        family += process.children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            with contextlib.suppress(psutil.Error):
                ask(member)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (family := [member for member in family if _is_alive(member)]) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
    return not family


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie, which has ended and only waits for its parent, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
