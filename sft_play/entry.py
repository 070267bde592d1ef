"""Runs before the program: messages in place of tracebacks for a Python that cannot run it, and for an early Ctrl-C.

The program's own imports take a second, and need a new Python and packages. So nothing of it is imported at the top of
this file but how a command ends; both are written for Python 3.6. With JSON=1 the object of a command that ends here is
written here.
"""

import os
import signal
import sys

from sft_play.exit_codes import EXIT_FAULT, EXIT_STOPPED, EXIT_TOO_LARGE, EXIT_USER, wants_json, write_ending

TYPE_CHECKING = False  # typing's own takes 10 ms to import, in which a Ctrl-C would be a traceback
if TYPE_CHECKING:
    from typing import Any, Optional, Sequence

# As `requires-python` in pyproject.toml says.
OLDEST = (3, 11)
# Packages, as they are imported, that only an extra of pyproject.toml installs.
EXTRAS = {
    "documents": ("bs4", "lxml_html_clean", "markitdown", "trafilatura"),
    "eval": ("rapidfuzz", "sacrebleu"),
    "tasks": ("lm_eval",),
    "serve": ("fastapi", "openai", "uvicorn"),
    "export": ("gguf",),
}


def main(command: "Optional[str]" = None) -> int:
    """Run `sft-play` with this process's words (`command` put before them); returns its exit code."""
    words = [command, *sys.argv[1:]] if command else sys.argv[1:]
    name = next((word for word in words if not word.startswith("-")), "sft-play")[:20]
    is_heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if is_heard:
        # Nothing is open yet, and imports may swallow or reword an exception that interrupts them.
        early = "stopped by the user before anything was started"
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_end(name, words, early, EXIT_STOPPED)))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the Makefile blocks it while Python starts
    if sys.version_info < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return _end(
            name, words, f"{sys.executable} is {_version()}, and sft_play needs {needed} or newer; {_way_out(words)}"
        )
    try:
        from sft_play.cli import main as run
        from sft_play.cli import prepare
        from sft_play.log import output_failure, survive_lost_output
        from sft_play.process.signals import ctrl_c

        prepare(words)
    except ModuleNotFoundError as error:
        text = missing_package(error, words)
        if text is None:
            raise
        return _end(name, words, text)
    except MemoryError:
        return _end(name, words, "the memory of this machine ran out while the program was loaded", EXIT_TOO_LARGE)
    except Exception as error:
        _answer(words, EXIT_FAULT, repr(error))
        raise
    survive_lost_output()
    sys.unraisablehook = _unraisable
    sys.excepthook = _redacted
    if is_heard:
        signal.signal(signal.SIGINT, ctrl_c)
    code = _guarded(run, words, name)
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # only Python's own shutdown is left
    lost = output_failure()
    if lost and code == 0:
        return _end(name, words, lost)
    _answer(words, code, f"exit code {code}; standard error says why")
    return code


def _guarded(run: "Any", words: "Sequence[str]", name: str) -> int:
    try:
        code = run(words)
        assert isinstance(code, int)
        return code
    except ModuleNotFoundError as error:
        text = missing_package(error, words)
        if text is None:
            raise
        return _end(name, words, text)
    except SystemExit as error:  # of --help, or of a library
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        _answer(words, code, f"a library ended the command: {error}")
        raise
    except BaseException as error:
        if not _was_stopped(error):
            from sft_play.commands.answer import error_text

            _answer(words, EXIT_FAULT, error_text(error))
            raise
        return _end(name, words, "stopped by the user", EXIT_STOPPED)


def _was_stopped(error: "Optional[BaseException]") -> bool:
    """Whether an exception is a Ctrl-C, or was raised while one was handled: libraries reword what breaks an import."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unraisable(caught: "Any") -> None:
    """Repeat a Ctrl-C that came where nothing can be raised (in a weak reference's callback)."""
    if issubclass(caught.exc_type, KeyboardInterrupt):
        import threading  # from a thread, a moment later: raised in this hook it would be lost again

        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(caught)


def _redacted(kind: "Any", error: "Any", trace: "Any") -> None:
    """The traceback of a fault of ours, without the tokens that an error may quote: it ends in a batch system's log."""
    import traceback

    from sft_play.log import escape_control, redact

    sys.stderr.write(redact(escape_control("".join(traceback.format_exception(kind, error, trace)))))


def missing_package(error: ModuleNotFoundError, words: "Sequence[str]") -> "Optional[str]":
    """The message for a package that this Python does not have; None for a module of ours, or of a package that is
    there: that is a bug, and keeps its traceback."""
    import contextlib
    from importlib.util import find_spec

    package = (error.name or "").partition(".")[0]
    if package in ("", "sft_play") or package in getattr(sys, "stdlib_module_names", ()):
        return None
    with contextlib.suppress(ImportError, ValueError):
        if find_spec(package) is not None:
            return None
    return f"{sys.executable} ({_version()}) has no package {package}, which sft_play needs; {_way_out(words, package)}"


def _version() -> str:
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}"


def _way_out(words: "Sequence[str]", package: str = "") -> str:
    """How to run the same with the project's environment, or how to install the package here with its extra."""
    from pathlib import Path

    root = Path(__file__).resolve().parent.parent
    here = os.path.relpath(str(root))
    extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
    target = f"'{here}[{extra}]'" if extra else here
    install = f"install what it needs there: {sys.executable} -m pip install -e {target}"
    if not (root / "requirements.lock").exists():
        return "install it into another Python" if sys.version_info < OLDEST else install
    python, command = os.path.join(here, ".venv", "bin", "python"), next(iter(words), "train")  # noqa: PTH118
    run = f"run it in the project's environment: make {command}, or make setup and then {python} -m sft_play {command}"
    return run if sys.version_info < OLDEST else f"{run}; or {install}"


def _end(name: str, words: "Sequence[str]", text: str, code: int = EXIT_USER) -> int:
    _answer(words, code, text)
    _say(f"[{name}] {'' if code == EXIT_STOPPED else 'error: '}{text}")
    return code


def _answer(words: "Sequence[str]", code: int, error: str) -> None:
    """With JSON=1 the object of a command that has written none. Of a launcher's ranks the first answers, and of ours,
    which have an agent, the agent or its parent."""
    is_first = os.environ.get("RANK", "0") == "0" and "SFT_PLAY_AGENT" not in os.environ
    if code and is_first and wants_json(words):
        write_ending(code, error)


def _say(text: str) -> None:
    """One line on standard error; errors of writing it are ignored."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    try:
        os.write(2, (shown + "\n").encode("utf-8", "replace"))
    except OSError:
        return
