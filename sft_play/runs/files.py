"""Files of a run folder: read, written redacted, aside and renamed; the lines of metrics.jsonl; and
a disk that takes no more, recognised in whatever a library makes of it, with one message in its
place.

No token, key or credential of the environment, of a config or of a git remote reaches a file, and a
kill never leaves half of one.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.errors import RunFolderError, SftPlayError
from sft_play.files import atomic
from sft_play.log import one_line, redact, secret_values
from sft_play.machine.host import nearest_disk_space
from sft_play.text import format_size

# Errors that only writing meets, and that may come without the name of a file.
_WRITE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# The number of an error in texts: safetensors' errors are no OSError, and others quote one.
_ERRNO_IN_TEXT = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
# What torch.save raises where a write fails; it does not say why.
_TORCH_WRITE_ERROR = re.compile(
    r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|basic_ios::clear|iostream error"
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none to read, as in a run that was killed early."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run or a stage."""
    return read_json(folder / "summary.json")


def write_json(path: Path, value: Any) -> None:
    """A JSON file, redacted, written aside and renamed."""
    text = json.dumps(
        redact_values(value), indent=2, ensure_ascii=False, default=str, allow_nan=True
    )
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """A text file, redacted, written aside and renamed."""
    atomic.write(path, redact(text), errors="backslashreplace")


def redact_values(value: Any, secrets: Sequence[str] | None = None) -> Any:
    """Return the value with its texts redacted, before JSON escapes them. `secrets` None: take the
    environment's."""
    if secrets is None:
        secrets = secret_values(os.environ.items())
    if isinstance(value, str):
        return redact(value, secrets=secrets)
    if isinstance(value, Mapping):
        return {
            redact(str(key), secrets=secrets): redact_values(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_values(item, secrets) for item in value]
    return value


def sync_folder(folder: Path, *, is_recursive: bool = True) -> None:
    """Sync the names in a folder to the disk, and with `is_recursive` all that is below it."""
    for path in [*(folder.rglob("*") if is_recursive else ()), folder]:
        if not path.is_file() and not path.is_dir():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # some disks know it for files only
            if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def truncate_metrics(path: Path, step: int, *, stage_name: str | None = None) -> None:
    """Drop the lines of metrics after `step` (in a run with stages, this stage's): a resumed run
    writes those steps again."""
    if path.exists():
        lines = read_metric_lines(path)
        kept_lines = [
            line
            for line, entry in lines
            if entry["step"] <= step or entry.get("stage") != stage_name
        ]
        write_text(path, "".join(f"{line}\n" for line in kept_lines))


def read_evaluations(path: Path, *, stage_name: str | None = None) -> list[dict[str, Any]]:
    """Read the metrics of the validation rows by step, including before training: `step`, `loss`,
    `exact_match`, and `generated_rows`, how many answers `exact_match` was computed on.

    A resumed run has its earlier starts' too.
    """
    by_step: dict[int, dict[str, Any]] = {}
    names = ("loss", "exact_match", "generated_rows")
    for _, entry in read_metric_lines(path):
        metrics = {name: entry[f"eval_{name}"] for name in names if f"eval_{name}" in entry}
        if metrics and entry.get("stage") == stage_name:
            no_metrics = {"step": entry["step"], **dict.fromkeys(names)}
            by_step[entry["step"]] = by_step.get(entry["step"], no_metrics) | metrics
    return [by_step[step] for step in sorted(by_step)]


def read_metric_lines(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Complete lines of metrics.jsonl, each with its content; none where there is no such file."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            yield line, entry


# --- a disk that takes no more --------------------------------------------------------------------


def disk_refusal_reason(error: BaseException | None) -> str | None:
    """The reason why the disk refused to write, in the operating system's words; None for any other
    error."""
    checked_errors: list[BaseException] = []
    while error is not None and error not in checked_errors:
        checked_errors.append(error)
        text = str(error)
        # of torch's distributed checkpoint
        if isinstance(rank_errors := getattr(error, "failures", None), dict):
            text = "\n".join(map(str, [text, *rank_errors.values()]))
        error_numbers = {
            int(os_error or errno_text) for os_error, errno_text in _ERRNO_IN_TEXT.findall(text)
        }
        error_numbers.add(getattr(error, "errno", 0))
        for error_number in error_numbers.intersection(_WRITE_ERRNOS):
            return os.strerror(error_number)
        if isinstance(error, RuntimeError) and _TORCH_WRITE_ERROR.search(text):
            return "writing failed"
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def explain_disk_refusals() -> Iterator[None]:
    """Replace errors of a full or read-only disk inside the block by one RunFolderError, which
    names the file if the error does."""
    try:
        yield
    except SftPlayError:
        raise
    except Exception as error:
        reason = disk_refusal_reason(error)
        if reason is None:
            raise
        file_name = getattr(error, "filename", None)
        if not isinstance(file_name, (str, bytes)):
            raise RunFolderError(f"a file cannot be written: {reason}") from error
        path = os.fsdecode(file_name)
        raise RunFolderError(
            f"{one_line(path)} cannot be written: {reason}; {format_free_space(Path(path))}"
        ) from error


@contextlib.contextmanager
def require_disk_space(
    folder: Path, needed_bytes: int, subject: str, *, available_bytes: int | None
) -> Iterator[None]:
    """Within it, at least `needed_bytes` are written into a folder.

    `subject`: begins the message, such as "the checkpoint of step 6". `available_bytes`: free
    there; None where that is not known. Raises RunFolderError where fewer bytes are free, or the
    disk refuses.
    """
    message = (
        f"{subject} cannot be written into {one_line(str(folder))}: {{}}; about {needed_bytes:,}"
        f" bytes ({format_size(needed_bytes)}) are needed, and {{}}. Free space there, then resume"
        " the run"
    )
    if available_bytes is not None and available_bytes < needed_bytes:
        raise RunFolderError(message.format(os.strerror(errno.ENOSPC), format_free_space(folder)))
    try:
        yield
    except Exception as error:
        reason = disk_refusal_reason(error)
        if reason is None:
            raise
        raise RunFolderError(message.format(reason, format_free_space(folder))) from error


def free_disk_bytes(path: Path) -> int | None:
    """What the disk of a path, which may not exist yet, has free; None where it does not say."""
    _, disk = nearest_disk_space(path)
    return disk.free if disk is not None and disk.total else None


def format_free_space(path: Path) -> str:
    """What a disk has free, for a message."""
    available_bytes = free_disk_bytes(path)
    if available_bytes is None:
        return "what is free there is not known"
    return f"{available_bytes:,} bytes ({format_size(available_bytes)}) are free there"
