"""Runs before the program: messages in place of tracebacks for a Python that cannot run it, and for
an early Ctrl-C.

The program's own imports take a second, and need a new Python and packages. So nothing of it is
imported at the top of this file but how a command ends; both are written for Python 3.6. With
JSON=1 the object of a command that ends here is written here.
"""

import os
import signal
import sys

from sft_play import exit_codes

TYPE_CHECKING = False  # typing's own takes 10 ms to import, in which a Ctrl-C would be a traceback
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

# As `requires-python` in pyproject.toml says.
MIN_PYTHON = (3, 11)
# Packages, as they are imported, that only an extra of pyproject.toml installs.
EXTRA_PACKAGES = {
    "cuda": ("liger_kernel",),
    "documents": ("bs4", "lxml_html_clean", "markitdown", "trafilatura"),
    "eval": ("rapidfuzz", "sacrebleu"),
    "tasks": ("lm_eval",),
    "serve": ("fastapi", "openai", "uvicorn"),
    "export": ("gguf",),
}


def main(command: "Optional[str]" = None) -> int:
    """Run `sft-play` with this process's words (`command` put before them); returns its exit
    code."""
    argv = [command, *sys.argv[1:]] if command else sys.argv[1:]
    command_name = next((word for word in argv if not word.startswith("-")), "sft-play")[:20]
    catches_interrupt = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if catches_interrupt:
        # Nothing is open yet, and imports may swallow or reword an exception that interrupts them.
        signal.signal(
            signal.SIGINT,
            lambda number, frame: os._exit(
                _exit_with_message(
                    command_name,
                    argv,
                    "stopped by the user before anything was started",
                    exit_codes.EXIT_STOPPED,
                )
            ),
        )
    # the Makefile blocks it while Python starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if sys.version_info < MIN_PYTHON:
        return _exit_with_message(
            command_name,
            argv,
            f"{sys.executable} is {_python_version()}, and sft_play needs"
            f" {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer; {_install_hint(argv)}",
        )
    try:
        from sft_play import cli, log

        cli.import_command(argv)
    except ModuleNotFoundError as error:
        text = missing_package_message(error, argv)
        if text is None:
            raise
        return _exit_with_message(command_name, argv, text)
    except MemoryError:
        return _exit_with_message(
            command_name,
            argv,
            "the memory of this machine ran out while the program was loaded",
            exit_codes.EXIT_TOO_LARGE,
        )
    except Exception as error:
        _write_missing_answer(argv, exit_codes.EXIT_FAULT, repr(error))
        raise
    log.survive_lost_output()
    sys.excepthook = _write_redacted_traceback
    if catches_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run_guarded(cli.main, argv, command_name)
    if catches_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # only Python's own shutdown is left
    output_error = log.output_failure()
    if output_error and code == 0:
        return _exit_with_message(command_name, argv, output_error)
    _write_missing_answer(argv, code, f"exit code {code}; standard error says why")
    return code


def _run_guarded(run_program: "Any", argv: "Sequence[str]", command_name: str) -> int:
    try:
        return run_program(argv)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        text = missing_package_message(error, argv)
        if text is None:
            raise
        return _exit_with_message(command_name, argv, text)
    except SystemExit as error:  # of --help, or of a library
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        _write_missing_answer(argv, code, f"a library ended the command: {error}")
        raise
    except BaseException as error:
        if not _is_interrupt(error):
            from sft_play.commands.request import error_text

            _write_missing_answer(argv, exit_codes.EXIT_FAULT, error_text(error))
            raise
        return _exit_with_message(
            command_name, argv, "stopped by the user", exit_codes.EXIT_STOPPED
        )


def _is_interrupt(error: "Optional[BaseException]") -> bool:
    """True if an exception is a Ctrl-C, or was raised while handling one: libraries reword what
    breaks an import."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _write_redacted_traceback(error_type: "Any", error: "Any", error_traceback: "Any") -> None:
    """Write the traceback of a bug, with tokens redacted: an error may quote them, and a batch
    system logs it."""
    import traceback

    from sft_play import log

    sys.stderr.write(
        log.redact(
            log.escape_control(
                "".join(traceback.format_exception(error_type, error, error_traceback))
            )
        )
    )


def missing_package_message(error: ModuleNotFoundError, argv: "Sequence[str]") -> "Optional[str]":
    """Return the message for a package that is not installed. None where the missing module is
    ours, Python's own (a Python built without it), or of an installed package: that is no package
    to install, and keeps its traceback."""
    import contextlib
    from importlib.util import find_spec

    package = (error.name or "sft_play").partition(".")[0]
    with contextlib.suppress(ImportError, ValueError):
        if package in sys.stdlib_module_names or find_spec(package) is not None:
            return None
    return (
        f"{sys.executable} ({_python_version()}) has no package {package}, which sft_play needs;"
        f" {_install_hint(argv, package)}"
    )


def _python_version() -> str:
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}"


def _install_hint(argv: "Sequence[str]", package: str = "") -> str:
    """Say how to run the same command in the project's environment, or how to install the package
    here with its extra."""
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    checkout = target = os.path.relpath(str(root))
    if not (root / "pyproject.toml").exists():
        checkout = target = "sft-play"
    for extra, packages in EXTRA_PACKAGES.items():
        if package in packages:
            target = f"'{checkout}[{extra}]'"
    hints = []
    if (root / "requirements.lock").exists():
        command = next(iter(argv), "train")
        python = os.path.join(checkout, ".venv", "bin", "python")  # noqa: PTH118
        hints.append(
            f"run it in the project's environment: make {command}, or make setup and then"
            f" {python} -m sft_play {command}"
        )
    if sys.version_info >= MIN_PYTHON:
        edit = "-e " if checkout != "sft-play" else ""
        hints.append(f"install what it needs there: {sys.executable} -m pip install {edit}{target}")
    return "; or ".join(hints) or "install it into another Python"


def _exit_with_message(
    command_name: str, argv: "Sequence[str]", text: str, code: int = exit_codes.EXIT_USER
) -> int:
    _write_missing_answer(argv, code, text)
    kind = "" if code == exit_codes.EXIT_STOPPED else "error: "
    printable = "".join(
        letter if letter.isprintable() else "?" for letter in f"[{command_name}] {kind}{text}"
    )
    try:  # noqa: SIM105  (contextlib would have to be imported)
        os.write(2, (printable + "\n").encode("utf-8", "replace"))
    except OSError:
        pass  # nobody reads it
    return code


def _write_missing_answer(argv: "Sequence[str]", code: int, error: str) -> None:
    """With JSON=1, write the object of a command that failed before writing one. Among another
    launcher's ranks only rank 0 writes it; ranks of ours leave it to their agent or its parent."""
    is_first = os.environ.get("RANK", "0") == "0" and "SFT_PLAY_AGENT" not in os.environ
    if code and is_first and exit_codes.wants_json(argv):
        exit_codes.write_missing_answer(code, error)
