"""Logging, set up once and only by entry points; and functions that make text safe to show.

What is logged names commands as the user can type them (`spell_commands`).

Modules only use `logger = logging.getLogger(__name__)`. INFO is what a person reads while a command
runs, DEBUG everything else: it is in a run's train.log, and with WHY=1 on the terminal. Ranks but
the first log at WARNING, with their rank in the prefix.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

from sft_play.variables import spell_commands

# With the marks that reorder text (U+202A and the like), which could make a line read as another,
# and lone surrogates, which cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_URL_USERINFO = re.compile(
    r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?:[^/\s@:]+:[^\s\"']*@|[^/\s@]+@)"
)
# Token formats of services: secret wherever they come from.
_TOKEN_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9_-]{20,}|AKIA[0-9A-Z]{16}"
    r"|glpat-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|AIza[\w-]{30,}|xox[abpros]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}(\.[\w-]*)?)"
    r"|(?<=access_token=)[^\s&\"']+|(?<=Bearer )[\w.~+/=-]{16,}"
)
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|_KEY$|^KEY$|_PAT$|AUTH|BEARER",
    re.IGNORECASE,
)


def escape_control(text: str) -> str:
    r"""Text with its control characters shown as escapes (`\x1b`), tabs and line breaks kept."""
    return _CONTROL.sub(
        lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text
    )


def one_line(text: str, *, limit: int = 120) -> str:
    """Text fit for a message: one line, escaped, cut at `limit` characters."""
    escaped = escape_control(text).replace("\n", "\\n").replace("\t", "\\t")
    return escaped if len(escaped) <= limit else escaped[: limit - 1] + "…"


def secret_values(environment: Iterable[tuple[str, str]]) -> list[str]:
    """Values of environment variables whose names mark them as secret, longest first."""
    # shorter values of secret-looking variables are words like `true`: hiding them would garble
    # every line
    secrets = {
        value for name, value in environment if len(value) >= 8 and _SECRET_NAME.search(name)
    }
    return sorted(secrets, key=len, reverse=True)


def redact(text: str, *, secrets: Iterable[str] | None = None) -> str:
    """Text without tokens, keys, values of secret environment variables, or passwords inside
    URLs."""
    for secret in secret_values(os.environ.items()) if secrets is None else secrets:
        # as it is, as a text in JSON (metrics, the manifest), and as JSON inside such a text
        for form in {secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret)[1:-1])[1:-1]}:
            text = text.replace(form, "***")
    return _TOKEN_SHAPES.sub("***", _URL_USERINFO.sub(r"\g<scheme>***@", text))


# Loggers of libraries whose warnings a user cannot act on, and what they warn about; their errors
# are shown.
QUIET_LOGGERS = {
    "bitsandbytes": "asks at import for a package that would fetch kernels from the hub",
    "transformers.distributed.tensor_parallel": (
        "lists layers that are not sharded in runs that shard nothing"
    ),
    "torch.distributed.tensor._redistribute": (
        "tells how two collectives of a mesh could be one, norm and checkpoint"
    ),
    "torch.distributed.tensor._collective_utils": "tells that gloo gathers where NCCL exchanges",
}


class _PlainFormatter(logging.Formatter):
    """`[train] message`, with the level where it is a warning and the rank where it is not 0."""

    def __init__(self, *, command: str, rank: int) -> None:
        super().__init__()
        self._prefix = f"[{command}]" if rank == 0 else f"[{command} rank {rank}]"

    def format(self, record: logging.LogRecord) -> str:
        level = f" {record.levelname.lower()}:" if record.levelno >= logging.WARNING else ""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return redact(f"{self._prefix}{level} {spell_commands(escape_control(message))}")


def _is_new_warning(seen_messages: set[str], record: logging.LogRecord) -> bool:
    """Let a library's warning through once: repeated at every step, it would bury other
    messages."""
    if record.levelno < logging.WARNING or record.name.startswith("sft_play"):
        return True
    is_new = record.getMessage() not in seen_messages
    seen_messages.add(record.getMessage())
    return is_new


def _is_first_on_node(folder: Path, record: logging.LogRecord) -> bool:
    """Let a warning through on the first rank of a node that has it; the others would repeat
    it."""
    if record.levelno != logging.WARNING:
        return True
    digest = hashlib.sha256(record.getMessage().encode("utf-8", "surrogateescape")).hexdigest()[:24]
    with contextlib.suppress(OSError):
        try:
            os.close(os.open(folder / f"said-{digest}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
    return True


_make_record = logging.getLogRecordFactory()


def _escaped_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Make a record whose text is safe to show: libraries have handlers of their own, and quote a
    stranger's files."""
    record = _make_record(*args, **kwargs)
    # values that do not fit into the text: its handler reports it
    with contextlib.suppress(Exception):
        record.msg, record.args = escape_control(record.getMessage()), None
    return record


class _OutputHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stdout`, so that lines appear above a progress bar that redirects
    it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout  # not by setStream, which flushes the old stream: it may be closed
        super().emit(record)


def set_up_logging(command: str, *, rank: int = 0, stream: TextIO | None = None) -> None:
    """Send this process's log to `stream` (standard output by default), replacing earlier
    handlers."""
    handler: logging.Handler = _OutputHandler(sys.stdout)
    if stream not in (None, sys.stdout):
        handler = logging.StreamHandler(stream)
    handler.setFormatter(_PlainFormatter(command=command, rank=rank))
    handler.addFilter(functools.partial(_is_new_warning, set()))
    handler.setLevel(logging.INFO)
    if os.environ.get("WHY", "0") not in ("", "0"):  # ranks inherit it
        handler.setLevel(logging.DEBUG)
    # torch's launcher gives each rank of this node a folder below it
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and Path(error_file).parent.parent.is_dir():
        handler.addFilter(functools.partial(_is_first_on_node, Path(error_file).parent.parent))
    root = logging.getLogger()
    # cli.main sets up twice: under the word typed, then under the command's name
    for old_handler in root.handlers[:]:
        root.removeHandler(old_handler)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("sft_play").setLevel(logging.DEBUG if rank == 0 else logging.WARNING)
    logging.captureWarnings(True)
    logging.setLogRecordFactory(_escaped_record)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


# --- output without a reader ----------------------------------------------------------------------

_lost_streams: dict[int, OSError] = {}


class _SurvivingOutput(io.FileIO):
    """Output that outlives its reader (`plan | head` finishes the plan): after the first failed
    write all output goes to the null device, the libraries' and children's too."""

    def write(self, data: Any) -> int:
        """Write; returns the number of bytes also where nobody reads them."""
        try:
            return super().write(data)
        except OSError as error:
            _lost_streams.setdefault(self.fileno(), error)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def survive_lost_output() -> None:
    """Keep writes to standard output and error from failing: a command whose reader leaves (`make
    plan | head`) finishes, writes its files and exits with its own code."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed at the start (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  (open to the end)
            continue
        if not isinstance(stream, io.TextIOWrapper) or not _has_descriptor(stream, descriptor):
            continue  # put in place by a program that reads what is printed
        stream.flush()
        raw = _SurvivingOutput(descriptor, "w", closefd=False)
        is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
        wrapper = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, wrapper)


def _has_descriptor(stream: io.TextIOWrapper, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except OSError:
        return False


def is_output_lost() -> bool:
    """True if standard output has lost its reader: a command that only shows something may end."""
    return 1 in _lost_streams


def output_failure() -> str | None:
    """Return why standard output could not be written; None if it could, or if only its reader
    left."""
    with contextlib.suppress(ValueError):
        sys.stdout.flush()
    error = _lost_streams.get(1)
    # Errors of a write after the reader of a pipe has left, or a terminal was closed.
    if error is None or error.errno in (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET):
        return None
    return f"standard output cannot be written: {error.strerror}; the output is incomplete"


def start_log_buffer() -> MemoryHandler:
    """Start a handler that keeps log records until there is a run folder to write them to."""
    buffer = MemoryHandler(capacity=100_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    logging.getLogger().addHandler(buffer)
    return buffer


def start_log_file(path: Path, *, buffer: MemoryHandler | None = None) -> logging.Handler:
    """Append the log to `path` from now on, starting with what `buffer` kept."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(
        _TimedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    handler.addFilter(functools.partial(_is_new_warning, set()))
    root = logging.getLogger()
    if buffer is not None:
        root.removeHandler(buffer)
        buffer.setTarget(handler)
        buffer.flush()
        buffer.close()
    root.addHandler(handler)
    return handler


class _LogFile(logging.FileHandler):
    """`train.log`: a full or missing disk is reported once, not with a traceback for every line."""

    _failed = False

    def close(self) -> None:
        """Take it out of the log, and close it."""
        logging.getLogger().removeHandler(self)
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Report that the file cannot be written; bugs of ours keep their traceback."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            sys.stderr.write(
                f"{escape_control(self.baseFilename)} cannot be written: {error.strerror}\n"
            )


class _TimedFormatter(logging.Formatter):
    """The line of `train.log`: UTC time, level, module, message; redacted like everything in a run
    folder."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return redact(spell_commands(escape_control(super().format(record))))
