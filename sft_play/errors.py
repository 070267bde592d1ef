"""The error tree: what a user can fix. Every other exception is a bug of ours and keeps its
traceback.

Each class is also the standard-library type that it refines, so that scripts can catch either. The
message says what was asked, what was found, and what to do.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from sft_play.exit_codes import EXIT_STOPPED, EXIT_TOO_LARGE, EXIT_USER


class SftPlayError(Exception):
    """Root of the tree; `exit_code` is the exit code of the command line."""

    exit_code = EXIT_USER


class ConfigError(SftPlayError, ValueError):
    """The run YAML, an override or a flag cannot be read or is not valid."""


class HardwareError(SftPlayError, ValueError):
    """A named machine is not in the catalogue, or the present one cannot be used."""


class DataError(SftPlayError, ValueError):
    """A data file is missing, unreadable, of an unknown shape, or has nothing to learn."""


class ModelError(SftPlayError, ValueError):
    """A model folder or hub id cannot be used: missing, gated, custom code, names that match
    nothing."""


class TokenizerError(SftPlayError, ValueError):
    """The tokenizer cannot be used: no chat template, a missing package, more tokens than
    embeddings."""


class BackendError(SftPlayError, RuntimeError):
    """The tuning backend that was asked for cannot run here."""


class RunFolderError(SftPlayError, FileExistsError):
    """The run folder exists, is not ours, cannot be resumed, or has a name that is refused."""


class TrainingError(SftPlayError, RuntimeError):
    """Training was stopped because continuing would waste it, such as a tensor that gets no
    gradient."""


class DoesNotFit(SftPlayError, MemoryError):
    """No micro-batch fits into memory. `plan`: the plan that shows it, as JSON."""

    exit_code = EXIT_TOO_LARGE

    def __init__(self, message: str = "", *, plan: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.plan = plan


class OutOfMemory(DoesNotFit):
    """Memory ran out while a run was on its way. `batch`: how rows were divided; None where ranks
    start again."""

    def __init__(self, message: str = "", *, batch: Any = None) -> None:
        super().__init__(message)
        self.batch = batch


class Interrupted(SftPlayError, KeyboardInterrupt):
    """The user stopped the run, and its state was saved."""

    exit_code = EXIT_STOPPED


@contextlib.contextmanager
def translate_library_errors() -> Iterator[None]:
    """Translate two errors of libraries inside the block: a panic of the tokenizer's library over a
    text (which is no Exception in Python) becomes TokenizerError, and the host's memory running out
    becomes DoesNotFit.
    """
    try:
        yield
    except SftPlayError:
        raise
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # pyo3's, which cannot be imported
            raise TokenizerError(
                f"the tokenizer cannot split a text: its library stopped ({error}); where a regular"
                " expression of its tokenizer.json backtracks, correct it there, or take the"
                " tokenizer of another model"
            ) from error
        # of an import, reworded
        is_memory_error = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        if is_memory_error or re.search(
            "failed to map segment|can(no|')t allocate memory", str(error), re.IGNORECASE
        ):
            raise DoesNotFit(
                f"the memory of this machine ran out ({str(error) or type(error).__name__}): end"
                " other programs, or raise the limit of this process (ulimit -v,"
                " the container's, the job's)"
            ) from error
        raise


def stage_context(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Add the name of a curriculum's stage to errors about it; None: the run has none."""
    return error_prefix(name and f"stage {name}")


@contextlib.contextmanager
def error_prefix(prefix: str | None) -> Iterator[None]:
    """Put words before the message of an error; None: nothing."""
    try:
        yield
    except SftPlayError as error:
        if prefix is None:
            raise
        # the cause is read again: a plan that does not fit is on the first error
        # (cli._unfitting_plan)
        raise type(error)(f"{prefix}: {error}") from error
