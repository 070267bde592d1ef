"""TensorBoard beside a run: started, found again and stopped by its record, and never a reason why training fails.

A sidecar is a process of its own. Its record (a small JSON file) holds pid, start time and command line: whatever is
reused or stopped is exactly that process, or nothing. Flags and the route `/data/environment` are those of
https://github.com/tensorflow/tensorboard: `tensorboard/program.py`, `tensorboard/plugins/core/core_plugin.py`.
"""

from __future__ import annotations

import contextlib
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
from sft_play.log import one_line, redact

logger = logging.getLogger(__name__)

DEFAULT_PORT = 6006
"""TensorBoard's own."""
PORTS_TRIED = 100
START_TIMEOUT_S = 60.0
"""TensorBoard answers 3 to 6 s after its start on an idle machine; imports from a cold disk take a multiple of that."""
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_CLOCK_TOLERANCE_S = 2.0
"""psutil derives a start time from the boot time, which moves when the system's clock is set."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Sidecar:
    """A TensorBoard that answers: `url` for a browser, the process (pid and start time), and where that is recorded.

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
    reused: bool = False


def record_path(logdir: Path) -> Path:
    """Where the sidecar of a folder of logs is recorded: in the cache, by the folder's full path."""
    digest = hashlib.sha256(str(logdir.absolute().resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_dir() / "tensorboard" / f"{digest[:16]}.json"


def keeps(environment: Mapping[str, str]) -> bool:
    """Whether `TB_KEEP` says that the sidecar outlives the run."""
    return environment.get("TB_KEEP", "").strip().lower() not in ("", "0", "no", "false", "off")


def password_warning(host: str) -> str | None:
    """What to say where others can reach the host; None for this machine's own addresses."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        return None
    return (
        f"TensorBoard listens on {one_line(host)} and has no password: whoever reaches that address reads this run's "
        "logs; 127.0.0.1 with an ssh tunnel (ssh -L 6006:127.0.0.1:6006 HOST) shows them to you alone"
    )


@contextlib.contextmanager
def beside(logdir: Path, *, environment: Mapping[str, str], **options: Any) -> Iterator[Sidecar | None]:
    """TensorBoard while the block runs; the block runs without it where it cannot be started.

    It is stopped at the end unless `TB_KEEP` is set, or it had been there before. `options` are those of `start`.
    """
    sidecar, words = start(logdir, **options)
    logger.log(logging.INFO if sidecar else logging.WARNING, words)
    try:
        yield sidecar
    finally:
        if sidecar is not None and not sidecar.reused:
            if keeps(environment):
                logger.info("TensorBoard stays at %s (TB_KEEP is set; pid %d)", sidecar.url, sidecar.pid)
            else:
                logger.info(stop(sidecar))


# --- start ------------------------------------------------------------------------------------------------------------


def start(
    logdir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    python: str = sys.executable,
    record: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> tuple[Sidecar | None, str]:
    """A TensorBoard over `logdir` and what to say about it; None and the reason where there is none.

    One that this project started for the same folder and host is reused. Otherwise the first free port from `port`
    on is taken (0: any). Nothing that goes wrong here is raised: a run is worth more than its picture.
    """
    record = record_path(logdir) if record is None else record
    try:
        present = _settled(record, time.monotonic() + timeout_s)
        if present is not None and present.host == host and Path(present.logdir) == logdir.absolute().resolve():
            return present, f"TensorBoard runs already: {present.url} (pid {present.pid})"
        stop(record)  # ours, and of no use any more: it hangs, or listens on another address
        sidecar, words = _start_new(logdir, host, port, python, record, timeout_s)
    except Exception as error:  # whatever it is, training goes on without it
        logger.debug("TensorBoard could not be started", exc_info=True)
        return None, f"no TensorBoard: {type(error).__name__}: {one_line(str(error))}; training goes on without it"
    warning = password_warning(host) if sidecar else None
    return sidecar, f"{words}. {warning}" if warning else words


def _settled(record: Path, deadline: float) -> Sidecar | None:
    """The recorded sidecar when it answers; one that another start has just made is waited for."""
    while True:
        present, noted = find(record), _read_record(record)
        if present is not None or noted is None or _process_of(noted) is None or time.monotonic() > deadline:
            return present
        time.sleep(_POLL_S)


def _start_new(
    logdir: Path, host: str, port: int, python: str, record: Path, timeout_s: float
) -> tuple[Sidecar | None, str]:
    if isinstance(port, bool) or not 0 <= port <= 65535:
        return None, f"no TensorBoard: port {port} is none; ports go from 1 to 65535 (0: any free one)"
    logdir = logdir.absolute().resolve()
    logdir.mkdir(parents=True, exist_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    reason = ""
    for candidate in _free_ports(host, port):
        sidecar, reason = _try_port(logdir, host, candidate, python, record, deadline)
        if sidecar is not None:
            moved = f" (port {port} is taken)" if port not in (0, candidate) else ""
            return sidecar, f"TensorBoard: {sidecar.url}{moved}"
        if _is_free(host, candidate) or time.monotonic() > deadline:
            break  # it failed for another reason than the port, which would fail again
    return None, f"no TensorBoard: {reason or _no_port(host, port)}; training goes on without it"


def _no_port(host: str, port: int) -> str:
    return f"no free port from {port} to {min(65535, port + PORTS_TRIED - 1)} on {one_line(host)}"


def _try_port(
    logdir: Path, host: str, port: int, python: str, record: Path, deadline: float
) -> tuple[Sidecar | None, str]:
    """Start it on one port and wait until it answers for this folder; what was started and does not is ended."""
    log = record.with_suffix(".log")
    command = [python, "-m", "tensorboard.main", f"--logdir={logdir}", f"--host={host}", f"--port={port}"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C belongs to the training, which stops the sidecar itself
        )
    try:
        running = psutil.Process(process.pid)
        created, words = running.create_time(), tuple(running.cmdline())
    except psutil.NoSuchProcess:  # it has ended already
        return None, f"it ended with exit code {process.wait()}: {_last_line(log)}"
    try:
        sidecar = Sidecar(
            url=f"http://{_for_url(_reachable(host))}:{port}/",
            pid=process.pid,
            created=created,
            command=words,
            host=host,
            port=port,
            logdir=str(logdir),
            record=str(record),
        )
        _write_record(sidecar)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                record.unlink(missing_ok=True)
                return None, f"it ended with exit code {process.returncode}: {_last_line(log)}"
            if _answers(sidecar):
                sidecar = replace(sidecar, command=tuple(running.cmdline()))  # a wrapper has become what it wraps
                _write_record(sidecar)
                return sidecar, ""
            time.sleep(_POLL_S)
    except BaseException:
        _end(running)
        record.unlink(missing_ok=True)
        raise
    _end(running)
    record.unlink(missing_ok=True)
    return None, f"it did not answer in time ({_last_line(log) or 'no output'})"


def _environment() -> dict[str, str]:
    """The sidecar's environment: no GPU, and nothing that would make it think that it is a rank."""
    kept = {key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def _free_ports(host: str, port: int) -> Iterator[int]:
    if port == 0:
        with _listener(host, 0) as listener:
            chosen = int(listener.getsockname()[1])
        yield chosen
        return
    for candidate in range(port, min(65535, port + PORTS_TRIED - 1) + 1):
        if _is_free(host, candidate):
            yield candidate


def _is_free(host: str, port: int) -> bool:
    try:
        with _listener(host, port):
            return True
    except OSError:
        return False


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
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if same_start and alive and tuple(process.cmdline()) == sidecar.command else None
    except psutil.Error:
        return None


def stop(recorded: Path | Sidecar) -> str:
    """End the process that a record names (or the sidecar itself) with its data server, and say what was done.

    Never raises. A record whose process is gone, or whose pid has become another program's, is removed and nothing is
    ended.
    """
    noted = recorded if isinstance(recorded, Sidecar) else _read_record(recorded)
    if noted is None:
        return f"no TensorBoard is recorded in {recorded}"
    record = Path(noted.record)
    process = _process_of(noted)
    try:
        ended = process is None or _end(process)
        kept = _read_record(record)
        if ended and kept is not None and (kept.pid, kept.created) == (noted.pid, noted.created):
            record.unlink(missing_ok=True)
    except (psutil.Error, OSError) as error:
        return f"TensorBoard (pid {noted.pid}) could not be stopped: {one_line(str(error))}"
    if process is None:
        return f"TensorBoard (pid {noted.pid}) is not running any more"
    return f"TensorBoard (pid {noted.pid}) " + ("stopped" if ended else f"does not end; see {record}")


def _end(process: psutil.Process) -> bool:
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
        _, family = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        if not family:
            return True
    return False
