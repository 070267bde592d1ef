"""TensorBoard beside a run: started, found again and stopped by its record, and never a reason why training fails.

A sidecar is a process of its own, in a session of its own: Ctrl-C in the terminal is the training's. Its record (a
small JSON file) holds machine, pid, start time and command line: whatever is reused or stopped is exactly that process,
or nothing. One that belongs to a run is the child of `board_watch`, which ends it when the run is gone without having
stopped it. Flags and the route `/data/environment` are those of
https://github.com/tensorflow/tensorboard: `tensorboard/program.py`, `tensorboard/plugins/core/core_plugin.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.cache import cache_dir
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
_END_POLL_S = 0.05
_ANSWER_TIMEOUT_S = 5.0
_CLOCK_TOLERANCE_S = 2.0
"""psutil derives a start time from the boot time, which moves when the system's clock is set."""
_TURN_S = 5.0
"""How long an end waits for another start or end of the same board before it goes on regardless."""


@dataclass(frozen=True)
class Sidecar:
    """A TensorBoard that answers: `url` of its server, the process (pid and start time), and where that is recorded.

    `reused`: it was there before, and whoever started it stops it.
    """

    url: str
    pid: int
    created: float
    command: tuple[str, ...]
    host: str
    port: int
    logdir: str
    record: str
    machine: str
    owner: int | None = None
    """The process that it ends with; None for one that stays until it is stopped."""
    owner_created: float | None = None
    reused: bool = False

    @property
    def page(self) -> str:
        """What a browser is to open: the page of the run's own layout, not every curve by the alphabet.

        Curves are drawn as they are: smoothed by TensorBoard's 0.6, a held-out loss that fell to 0.05 would show 3.9.
        Its page "Time series" reads the query, "Custom scalars" and "Scalars" read what follows the page's name.
        """
        return f"{self.url}?smoothing=0#custom_scalars&_smoothingWeight=0"


def record_path(logdir: Path) -> Path:
    """Where the sidecar of a folder of logs is recorded: in the cache, by this machine's name and the folder's path.

    The cache may lie on a disk that several machines share; a pid means something on one of them.
    """
    place = f"{socket.gethostname()}:{logdir.absolute().resolve()}"
    digest = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()
    return _records() / f"{digest[:16]}.json"


def _records() -> Path:
    return cache_dir() / "tensorboard"


def keeps(environment: Mapping[str, str]) -> bool:
    """Whether `TB_KEEP` says that the sidecar outlives the run."""
    return environment.get("TB_KEEP", "").strip().lower() not in ("", "0", "no", "false", "off")


def settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """Host and port that `TB_HOST` and `TB_PORT` ask for, as options of `start`; those not given are left out.

    Raises:
        ConfigError: TB_PORT is no port.
    """
    options: dict[str, Any] = {}
    host, port = (environment.get(name, "").strip() for name in ("TB_HOST", "TB_PORT"))
    if host:
        options["host"] = host
    if port:
        if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65_536):
            raise ConfigError(f"TB_PORT={one_line(port)} is no port; ports go from 1 to 65535")
        options["port"] = int(port)
    return options


def password_warning(host: str, port: int = DEFAULT_PORT) -> str | None:
    """What to say where others can reach the host; None for this machine's own addresses."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        return None
    return (
        f"TensorBoard listens on {one_line(host)} and has no password: whoever reaches that address reads these "
        f"logs; 127.0.0.1 with an ssh tunnel (ssh -L {port}:127.0.0.1:{port} HOST) shows them to you alone"
    )


@contextlib.contextmanager
def beside(logdir: Path, *, environment: Mapping[str, str], **options: Any) -> Iterator[Sidecar | None]:
    """TensorBoard while the block runs; the block runs without it where it cannot be started, which is said once.

    It ends with the block, or with this process where that is killed, unless `TB_KEEP` is set, or somebody else has
    started it or asked for it meanwhile. `options` are those of `start`, before what the environment says.
    """
    keep = keeps(environment)
    try:
        sidecar, words = start(logdir, ends_with_me=not keep, **{**settings(environment), **options})
    except ConfigError as error:
        sidecar, words = None, str(error)
    if sidecar is None:
        logger.warning("no TensorBoard: %s; training goes on without it", words)
    else:
        say_started(sidecar, words)
    try:
        yield sidecar
    finally:
        if sidecar is not None and not sidecar.reused:
            logger.info(
                "%s",
                f"TensorBoard stays at {sidecar.page} (TB_KEEP is set; make tb-stop ends it)"
                if keep
                else _release(sidecar),
            )


def say_started(sidecar: Sidecar, words: str) -> None:
    """Log where a sidecar is, and a warning where others can reach it."""
    logger.info("%s", words)
    warning = password_warning(sidecar.host, sidecar.port)
    if warning is not None:
        logger.warning("%s", warning)


def _release(sidecar: Sidecar) -> str:
    """End the sidecar of a run that is over, unless somebody has asked for it meanwhile; what was done."""
    record = Path(sidecar.record)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_alone(record, time.monotonic() + _TURN_S))
        if is_left_alone(record, sidecar.pid):
            return f"TensorBoard stays at {sidecar.page}: it was asked for while the run went on (make tb-stop ends it)"
        return stop(sidecar)


# --- start ------------------------------------------------------------------------------------------------------------


def start(
    logdir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    title: str | None = None,
    ends_with_me: bool = False,
    python: str = sys.executable,
    record: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Sidecar | None, str]:
    """A TensorBoard over `logdir` and what to say about it; None and the reason where there is none.

    One that this project started for the same folder and host is reused. Otherwise the first free port from `port`
    on is taken (0: any). Nothing that goes wrong here is raised: a run is worth more than its picture. The folder
    need not be there yet, and is not made.

    Args:
        title: of the browser's window.
        ends_with_me: whether it ends when this process does. One that is asked for without this stays.
    """
    deadline = time.monotonic() + timeout_s
    try:
        logdir = logdir.absolute().resolve()
        record = record_path(logdir) if record is None else record
        obstacle = _obstacle(host, 0)  # before one that runs is stopped for it
        if obstacle is not None:
            return None, f"{one_line(host)} cannot be listened on: {obstacle.strerror} (TB_HOST=)"
        with _alone(record, deadline):
            present = _settled(record, deadline)
            if present is not None and present.host == host and Path(present.logdir) == logdir:
                stays = not ends_with_me and present.owner is not None
                if stays:
                    _write_record(replace(present, owner=None, owner_created=None))
                if not ends_with_me or not _is_orphan(present):
                    return present, _runs_already(present, port, stays=stays)
            stop(record)  # ours, and of no use any more: it hangs, listens on another address, or its run is gone
            wish = _Wish(logdir, host, title or logdir.name, python, record, ends_with_me)
            return _start_new(wish, port, deadline)
    except Exception as error:  # whatever it is, training goes on without it
        logger.debug("TensorBoard could not be started", exc_info=True)
        return None, f"{type(error).__name__}: {one_line(str(error))}"


def _runs_already(present: Sidecar, port: int, *, stays: bool) -> str:
    asked = f" (not on port {port}: make tb-stop first)" if port not in (0, DEFAULT_PORT, present.port) else ""
    later = "; it was to end with its run, and stays now" if stays else ""
    return f"TensorBoard runs already: {present.page}{asked}{later}"


@dataclass(frozen=True)
class _Wish:
    """A sidecar that is to be: everything but its port."""

    logdir: Path
    host: str
    title: str
    python: str
    record: Path
    ends_with_me: bool

    def command(self, port: int) -> list[str]:
        """What is run on a port; under watch where it is to end with this process."""
        board = [self.python, "-m", "tensorboard.main", f"--logdir={self.logdir}", f"--host={self.host}"]
        board += [f"--port={port}", f"--window_title={self.title}"]
        watch = [sys.executable, "-m", "sft_play.launch.board_watch", str(os.getpid()), str(self.record)]
        return [*watch, *board] if self.ends_with_me else board


@contextlib.contextmanager
def _alone(record: Path, deadline: float) -> Iterator[None]:
    """One start or end of a board at a time; goes on after the deadline, and where the disk knows no locks."""
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.with_suffix(".lock").open("a", encoding="ascii") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            except OSError:
                break
        yield


def _settled(record: Path, deadline: float) -> Sidecar | None:
    """The recorded sidecar when it answers; one that a start which was broken off has left is waited for."""
    while True:
        present, noted = find(record), _read_record(record)
        if present is not None or noted is None or _process_of(noted) is None or time.monotonic() > deadline:
            return present
        time.sleep(_POLL_S)


def _is_orphan(sidecar: Sidecar) -> bool:
    """Whether the process that a sidecar was to end with is gone, and its watch too."""
    if sidecar.owner is None:
        return False
    try:
        created = psutil.Process(sidecar.owner).create_time()
        return abs(created - (sidecar.owner_created or 0.0)) > _CLOCK_TOLERANCE_S
    except psutil.Error:
        return True


def _start_new(wish: _Wish, port: int, deadline: float) -> tuple[Sidecar | None, str]:
    if isinstance(port, bool) or not 0 <= port <= 65535:
        return None, f"port {port} is none; ports go from 1 to 65535 (0: any free one)"
    reason, last = "", min(65535, port + PORTS_TRIED - 1)
    for candidate in [_any_port(wish.host)] if port == 0 else range(port, last + 1):
        obstacle = _obstacle(wish.host, candidate)
        if obstacle is not None:
            reason = reason or f"no free port from {port} to {last} on {one_line(wish.host)} ({obstacle.strerror})"
            continue
        sidecar, reason = _try_port(wish, candidate, deadline)
        if sidecar is not None:
            moved = f" (port {port} is taken)" if port not in (0, candidate) else ""
            return sidecar, f"TensorBoard: {sidecar.page}{moved}"
        if _obstacle(wish.host, candidate) is None or time.monotonic() > deadline:
            break  # it failed for another reason than the port, which would fail again
    return None, reason


def _try_port(wish: _Wish, port: int, deadline: float) -> tuple[Sidecar | None, str]:
    """Start it on one port and wait until it answers for this folder; what was started and does not is ended."""
    log = wish.record.with_suffix(".log")
    with log.open("wb") as sink:
        started = subprocess.Popen(
            wish.command(port),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=_environment(),
            start_new_session=True,  # Ctrl-C belongs to the training, which stops the sidecar itself
        )
    running: psutil.Process | None = None
    try:
        while time.monotonic() < deadline:
            if started.poll() is not None:
                wish.record.unlink(missing_ok=True)
                return None, f"it ended with exit code {started.returncode}: {_last_line(log)}"
            with contextlib.suppress(psutil.NoSuchProcess):  # the next look at `started` finds its end
                running = running or _board_of(started, watched=wish.ends_with_me)
                if running is not None:
                    sidecar = _noted(wish, port, running)  # anew: a wrapper has become what it wraps
                    if _answers(sidecar) and _noted(wish, port, running) == sidecar:
                        _STARTED[sidecar.pid] = started
                        return sidecar, ""
            time.sleep(_POLL_S)
    except BaseException:
        _end_start(started, wish.record)
        raise
    _end_start(started, wish.record)
    return None, f"it did not answer in time ({_last_line(log) or 'no output'})"


_STARTED: dict[int, subprocess.Popen[bytes]] = {}
"""By a board's pid: what this process started for it, the board or its watch, which it waits for at the end."""


def _board_of(started: subprocess.Popen[bytes], *, watched: bool) -> psutil.Process | None:
    """The board's own process: what was started, or the child of its watch; None before there is one."""
    process = psutil.Process(started.pid)
    return next(iter(process.children()), None) if watched else process


def _noted(wish: _Wish, port: int, running: psutil.Process) -> Sidecar:
    """The sidecar as it is recorded, which is done."""
    me = psutil.Process() if wish.ends_with_me else None
    sidecar = Sidecar(
        url=f"http://{_for_url(_reachable(wish.host))}:{port}/",
        pid=running.pid,
        created=running.create_time(),
        command=tuple(running.cmdline()),
        host=wish.host,
        port=port,
        logdir=str(wish.logdir),
        record=str(wish.record),
        machine=socket.gethostname(),
        owner=me.pid if me else None,
        owner_created=me.create_time() if me else None,
    )
    if _read_record(wish.record) != sidecar:
        _write_record(sidecar)
    return sidecar


def _end_start(started: subprocess.Popen[bytes], record: Path) -> None:
    """End a start that came to nothing: the watch with its board, or the board."""
    with contextlib.suppress(psutil.Error):
        end_process(psutil.Process(started.pid))
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(STOP_TIMEOUT_S)
    record.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """The sidecar's environment: no GPU, and nothing that would make it think that it is a rank, or end it with one."""
    return {**for_another_run(os.environ), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def _any_port(host: str) -> int:
    with _listener(host, 0) as listener:
        return int(listener.getsockname()[1])


def _obstacle(host: str, port: int) -> OSError | None:
    """Why nobody can listen there; None where it is free."""
    try:
        with _listener(host, port):
            return None
    except OSError as error:
        return error


def _listener(host: str, port: int) -> socket.socket:
    """A socket bound to an address of the host. Like TensorBoard's it may take a port whose last user has just left."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _reachable(host: str) -> str:
    """The address under which a server on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _for_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _answers(sidecar: Sidecar) -> bool:
    """Whether it answers HTTP as a TensorBoard over the recorded folder; no proxy is asked."""
    connection = http.client.HTTPConnection(_reachable(sidecar.host), sidecar.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/data/environment")
        answer = connection.getresponse()
        body = answer.read(10**6)
        return answer.status == 200 and str(json.loads(body).get("data_location", "")) == sidecar.logdir
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return one_line(redact(lines[-1]), limit=200) if lines else ""


# --- the record, and stop ---------------------------------------------------------------------------------------------


def _write_record(sidecar: Sidecar) -> None:
    path = Path(sidecar.record)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(asdict(sidecar), indent=2) + "\n", encoding="utf-8")
    aside.replace(path)


def _read_record(record: Path) -> Sidecar | None:
    try:
        data = json.loads(record.read_text(encoding="utf-8"))
        return Sidecar(**{**data, "command": tuple(data["command"]), "record": str(record)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(record: Path) -> Sidecar | None:
    """The sidecar that a record names, if that very process lives and answers; marked as reused."""
    noted = _read_record(record)
    if noted is None or _process_of(noted) is None or not _answers(noted):
        return None
    return replace(noted, reused=True)


def _process_of(sidecar: Sidecar) -> psutil.Process | None:
    """The process that was recorded: its pid, start time and command line agree. None where it is gone or another."""
    try:
        process = psutil.Process(sidecar.pid)
        same_start = abs(process.create_time() - sidecar.created) <= _CLOCK_TOLERANCE_S
        same_place = sidecar.machine == socket.gethostname()
        is_same = same_place and same_start and _is_alive(process) and tuple(process.cmdline()) == sidecar.command
        return process if is_same else None
    except psutil.Error:
        return None


def recorded() -> list[Sidecar]:
    """Every sidecar of this project's that lives on this machine, whether it answers or not; the newest first."""
    found = [noted for path in _records().glob("*.json") if (noted := _read_record(path)) is not None]
    return sorted((one for one in found if _process_of(one) is not None), key=lambda one: -one.created)


def is_left_alone(record: Path, pid: int) -> bool:
    """Whether the sidecar of that pid is recorded as one that ends with nobody."""
    noted = _read_record(record)
    return noted is not None and noted.pid == pid and noted.owner is None


def stop(recorded: Path | Sidecar) -> str:
    """End the process that a record names (or the sidecar itself) with its data server, and say what was done.

    Never raises. A record whose process is gone, or whose pid has become another program's, is removed and nothing is
    ended; one of another machine stays as it is.
    """
    noted = recorded if isinstance(recorded, Sidecar) else _read_record(recorded)
    if noted is None:
        return f"no TensorBoard is recorded in {recorded}"
    if noted.machine != socket.gethostname():
        return f"TensorBoard (pid {noted.pid}) runs on {one_line(noted.machine)}: stop it there"
    record = Path(noted.record)
    process = _process_of(noted)
    try:
        ended = process is None or end_process(process)
        kept = _read_record(record)
        if ended and kept is not None and (kept.pid, kept.created) == (noted.pid, noted.created):
            record.unlink(missing_ok=True)
        started = _STARTED.pop(noted.pid, None)
        if started is not None:
            started.wait(STOP_TIMEOUT_S)
    except (psutil.Error, OSError, subprocess.TimeoutExpired) as error:
        return f"TensorBoard (pid {noted.pid}) could not be stopped: {one_line(str(error))}"
    if process is None:
        return f"TensorBoard (pid {noted.pid}) is not running any more"
    return f"TensorBoard (pid {noted.pid}) " + ("stopped" if ended else f"does not end; see {record}")


def end_process(process: psutil.Process) -> bool:
    """Ask a process and its children to end, then make those that stay; whether all are gone.

    psutil's process objects know their start times, so that a pid which is given out anew meanwhile is not hit.
    """
    family = [process]
    with contextlib.suppress(psutil.Error):
        family += process.children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(member)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (family := [member for member in family if _is_alive(member)]) and time.monotonic() < deadline:
            time.sleep(_END_POLL_S)
        if not family:
            return True
    return False


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and that nobody has asked about yet (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
