"""Builds the checkout's .venv from the pinned versions, or says in one message why it cannot.

`make` runs this before every target that needs the environment; it is silent and quick when there
is nothing to do. It reads three environment variables: VENV (the user's own environment, which is
only checked), PYTHON (the Python to build with) and TORCH (the build of torch; by default the one
that the driver runs). With the word `unsloth` it builds .venv-unsloth instead, whose pins conflict
with those of .venv; a target that needs an extra (`dapt-docx`, `eval`, …) adds it. Standard library
only, and nothing newer than Python 3.6: an old Python may run this file, either to find a newer one
or to say that one is needed. All output goes to stderr, so that `make plan JSON=1 > plan.json`
stays clean even when it builds first; only a failure writes the object that JSON=1 asks for to
stdout.
"""

import signal

# Ctrl-C among the imports below: nothing is open, so end without a traceback
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import installer
import torch_build
from installer import Installer, Logged
from torch_build import BuildError, Choice

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from sft_play.exit_codes import (  # noqa: E402
    EXIT_FAULT,
    EXIT_STOPPED,
    EXIT_USER,
    wants_json,
    write_missing_answer,
)

STAMP = (  # inside .venv: "building", then "ready" with the digest of what was built
    ".sft-play-stamp"
)
EXTRA_STAMP = ".sft-play-{}"  # inside .venv: what the stamp said when an extra was added
EXTRAS = {  # extras of pyproject.toml that targets of make add to .venv: for what, and the targets
    "documents": ("reading documents", ("dapt-docx", "test", "coverage")),
    "eval": ("judging answers", ("eval", "ship", "test", "coverage")),
    "serve": ("serving models", ("serve", "test", "coverage", "fuzz")),
    "export": ("reading GGUF files", ("export", "export-test", "test", "coverage")),
}
TASKS_EXTRA = ("tasks", "lm-evaluation-harness")  # for `make eval TASKS=`
OLDEST, NEWEST = (3, 11), (3, 14)  # as `requires-python` in pyproject.toml
RANGE = f"Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")

# Runs in the Python in question, so it has to work in every Python, 2 included. The base executable
# matters: python3 may be that of an activated .venv, which the build empties.
PROBE = """
import sys
try:
    import ensurepip, venv
    pip = 1
except ImportError:
    pip = 0
base = getattr(sys, "_base_executable", None) or sys.executable
print("%d %d %d %s" % (sys.version_info[0], sys.version_info[1], pip, base))
"""

Version = Tuple[int, int]
Runner = Callable[[Sequence[str], Path], int]


class Python(NamedTuple):
    """A Python of this machine, by its own report."""

    path: str  # of the base executable, also where the Python belongs to an environment
    version: Version
    has_pip: bool  # whether it can make environments with pip in them


class Environment(NamedTuple):
    """An environment that can be built: its folder in the checkout, its pins, its target of
    make."""

    folder: str
    pins: str
    target: str
    # what pip is asked for; empty: this project with its tools for development
    needs: Tuple[str, ...]

    @property
    def lock_file(self) -> str:
        """Beside the folder, since a new build empties the folder."""
        return self.folder + ".lock"

    @property
    def log_file(self) -> str:
        """The installer's output of the newest build."""
        return self.folder + ".log"


MAIN = Environment(".venv", "requirements.lock", "setup", ())
# Unsloth, and what this project's training loop needs beside it; Unsloth's process finds the loop
# by its path.
UNSLOTH = Environment(
    ".venv-unsloth",
    "requirements-unsloth.lock",
    "setup-unsloth",
    (
        *(
            "unsloth",
            "unsloth_zoo",
            "transformers>=5.17",
            "bitsandbytes",
            "datasets",
            "peft",
            "accelerate",
            "psutil",
        ),
        *(
            "pydantic>=2.10,<3",
            "pyyaml",
            "pyarrow",
            "rich",
            "jinja2",
            "safetensors",
            "tensorboard",
            "nvidia-ml-py",
        ),
    ),
)


class SetupError(Exception):
    """A problem that the user can solve; its text is the whole message."""


def say(text: str) -> None:
    """One progress line on stderr, visible at once."""
    print("[setup] " + text, file=sys.stderr, flush=True)


def show(version: Version) -> str:
    """(3, 11) as 3.11."""
    return f"{version[0]}.{version[1]}"


# What is pinned


def meaningful(text: str) -> List[str]:
    """The lines that are neither blank nor a comment, without the space around them."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def dependency_lines(pyproject: str) -> List[str]:
    """The part of pyproject.toml that decides what gets installed (no TOML reader before Python
    3.11)."""
    kept = []
    table, in_dependencies = "", False
    for line in meaningful(pyproject):
        if line.startswith("[") and not in_dependencies:
            table = line
        elif line.startswith("dependencies"):
            in_dependencies = True
        whole = table in ("[build-system]", "[project.optional-dependencies]", "[project.scripts]")
        if whole or in_dependencies or line.startswith("requires-python"):
            kept.append(line)
        if line.endswith("]"):
            in_dependencies = False
    return kept


def extra_requirements(pyproject: str, extra: str) -> List[str]:
    """The requirements of an extra in pyproject.toml, one on each line there."""
    lines = meaningful(pyproject)
    start = lines.index(extra + " = [") + 1
    return [line.strip('",') for line in lines[start : lines.index("]", start)]]


def digest(root: Path, version: Version, what: Environment = MAIN) -> str:
    """Identifies a build: the pins, the Python version, and the path (scripts in a venv contain
    it)."""
    lock = (root / what.pins).read_text(encoding="utf-8")
    pyproject = (root / "pyproject.toml").read_text(encoding="utf-8")
    wanted = list(what.needs) or dependency_lines(pyproject)
    parts = [str(root), show(version), *meaningful(lock), "--", *wanted]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# What is there


def live_version(venv: Path) -> Optional[Version]:
    """The version of .venv/bin/python now (a system upgrade may change it), None if it is
    broken."""
    python = venv / "bin" / "python"
    if not python.exists():
        return None
    if Path(sys.executable).parent.resolve() == python.parent.resolve():
        return sys.version_info[:2]  # it runs this script: no need to start it again
    answer = probe(str(python))
    return answer.version if answer else None


def ready_text(root: Path, version: Version, what: Environment = MAIN, torch: str = "") -> str:
    """The stamp of a complete .venv."""
    return f"ready {digest(root, version, what)} python {show(version)} torch {torch}\n"


def is_ready(
    root: Path, venv: Path, wanted: Optional[Python], what: Environment = MAIN, torch: str = ""
) -> bool:
    """Whether .venv is complete, from the present pins, and of the Python and torch that were asked
    for (if any)."""
    try:
        stamp = (venv / STAMP).read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    if not stamp.startswith("ready "):
        return False
    version = live_version(venv)
    if version is None or (wanted is not None and wanted.version != version):
        return False
    return stamp == ready_text(root, version, what, torch or stamp.split()[-1])


def refuse_foreign(venv: Path) -> None:
    """Raises unless .venv is absent, empty, or carries our stamp: only then may a build touch it.
    Never through a link into another checkout, whose environment that is."""
    owner = venv.resolve().parent
    is_others = (
        venv.is_symlink() and owner != venv.parent.resolve() and (owner / MAIN.pins).is_file()
    )
    if not is_others and (not os.path.lexists(str(venv)) or (venv / STAMP).is_file()):
        return
    if not is_others and venv.is_dir() and not any(venv.iterdir()):
        return
    why = (
        f"is a link to the environment of {owner}"
        if is_others
        else f"was not built by this project (no {STAMP})"
    )
    variable = "VENV" if venv.name == MAIN.folder else "UNSLOTH_VENV"
    raise SetupError(
        f"{venv} {why}, so it is not changed.\n"
        f"  To use it unchanged:  make TARGET {variable}={venv.name}\n"
        f"  To build another:     mv {venv.name} {venv.name}.mine   and run make again"
    )


def check_own(venv: str) -> None:
    """Raises unless VENV, the user's own environment, has a Python; nothing in it is changed."""
    python = os.path.join(os.path.abspath(venv), "bin", "python")  # noqa: PTH100, PTH118  (they raise nothing)
    if os.path.isfile(python) and os.access(python, os.X_OK):  # noqa: PTH113
        return
    hint = " (a ~ inside quotes is not expanded: write $HOME)" if venv.startswith("~") else ""
    raise SetupError(
        f"VENV={venv} was asked for, but there is no program {python} that you may run{hint}.\n"
        "  Name the folder of an environment that has bin/python, or leave VENV out: "
        "make then builds and uses .venv"
    )


# Which Python


def probe(command: str) -> Optional[Python]:
    """A Python's report about itself; None if it does not answer."""
    try:
        answer = subprocess.run(
            [command, "-EsSB", "-c", PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        ).stdout
        major, minor, has_pip, path = os.fsdecode(answer).strip().split(" ", 3)
        return Python(path, (int(major), int(minor)), has_pip == "1")
    except (OSError, ValueError, subprocess.CalledProcessError):
        return (
            None  # missing, not executable, a pyenv shim without a version, or not a Python at all
        )


def supported(python: Python) -> bool:
    """Whether the project runs on this version."""
    return OLDEST <= python.version <= NEWEST


def named_python(command: str) -> Python:
    """The Python that PYTHON= names; raises when it is missing or unsuitable."""
    python = probe(command)
    if python is None:
        why = "it does not answer as Python"
    elif not supported(python):
        why = "it is Python " + show(python.version)
    elif not python.has_pip:
        raise SetupError(without_pip("PYTHON=" + command, python))
    else:
        return python
    raise SetupError(
        f"PYTHON={command} was asked for, but {why}; this project needs {RANGE}.\n  Name another"
        f" one (PYTHON=/path/to/python{show(NEWEST)}), leave PYTHON out to search PATH, or use your"
        " own environment (VENV=/path)"
    )


def search_python(names: Sequence[str] = PYTHONS) -> Python:
    """The first suitable Python on PATH; raises with the unsuitable ones."""
    pythons = [(name, python) for name in names for python in [probe(name)] if python is not None]
    fitting = [(name, python) for name, python in pythons if supported(python)]
    for _, python in fitting:
        if python.has_pip:
            return python
    if fitting:
        raise SetupError(without_pip(*fitting[0]))
    versions = ", ".join(f"{name} is {show(python.version)}" for name, python in pythons)
    raise SetupError(
        f"This project needs {RANGE}. Looked on PATH for {', '.join(names)}; found:"
        f" {versions or 'none of them'}.\n  Install one of these versions, name one (make setup"
        f" PYTHON=/path/to/python{show(NEWEST)}), or use your own environment (VENV=/path)"
    )


def without_pip(name: str, python: Python) -> str:
    """The message for a Python that cannot make environments (Debian ships that part
    separately)."""
    version = show(python.version)
    return (
        f"{name} is Python {version} ({python.path}), but it lacks the venv or ensurepip module"
        " that builds .venv.\n  On Debian or Ubuntu: apt install python3-venv (or"
        f" python{version}-venv). Otherwise name another Python (PYTHON=/path) or your own"
        " environment (VENV=/path)"
    )


# Building


def how(venv: Path, environ: Mapping[str, str], asked: str) -> Tuple[Installer, Choice]:
    """The installer for an environment that has its pip, and the build of torch for it."""
    python = str(venv / "bin" / "python")
    by = installer.choose(python, environ, installer.pip_settings(python, environ))
    return by, torch_build.choose(torch_build.this_machine(), asked, by.configured)


def install_steps(
    root: Path, by: Installer, torch: Choice, what: Environment = MAIN
) -> List[Tuple[str, List[str]]]:
    """Title and command of each step that installs, in order."""
    install = [*by.command, "--constraint", what.pins, *installer.options(by)]
    steps, builds, beside = [], [], []  # type: List[Tuple[str, List[str]]], List[str], List[str]
    if torch.source:
        # Without what torch needs, which comes from the usual index below: until then it cannot be
        # imported, and deepspeed's setup.py, run there, does not look for a CUDA toolkit.
        builds = [f"{pin}+{torch.name}" for pin in family_pins(root, what)]
        title = f"installing {torch_build.label(torch)} from {torch.source}"
        steps.append((title, [*install, *installer.from_index(by, torch.source), *builds]))
        if torch.name.startswith("rocm"):  # its own triton is on that index only
            beside = installer.beside_index(by, torch.source)
    if what.needs:
        return [
            *steps,
            ("installing the pinned packages", [*install, *beside, *builds, *what.needs]),
        ]
    # setuptools goes first, at its pin, because the project is built without isolation: an isolated
    # build would fetch a setuptools that nobody pinned.
    project = ".[dev,cuda]" if torch.has_cuda else ".[dev]"
    last = [*install, *beside, *builds, "--no-build-isolation", "--editable", project]
    steps.append(("installing setuptools", [*install, "setuptools"]))
    return [*steps, ("installing the pinned packages", last)]


def family_pins(root: Path, what: Environment) -> List[str]:
    """The pins of torch, and of packages that must be of the same build."""
    lines = meaningful((root / what.pins).read_text(encoding="utf-8"))
    return [line for line in lines if line.split("==")[0] in torch_build.FAMILY]


def write_stamp(venv: Path, text: str) -> None:
    """Write the stamp as a file of its own: a copy of .venv by hard links has another."""
    written = venv / (STAMP + ".new")
    written.write_text(text, encoding="utf-8")
    written.replace(venv / STAMP)


def empty(venv: Path) -> None:
    """Empty .venv, marked as ours first, so that an interrupted build can be repaired."""
    venv.mkdir(exist_ok=True)
    write_stamp(venv, "building\n")
    for entry in list(venv.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(str(entry))
        elif entry.name != STAMP:
            entry.unlink()


def build(
    root: Path,
    venv: Path,
    python: Python,
    run: Runner,
    what: Environment,
    environ: Mapping[str, str],
    asked: str,
) -> None:
    """Build .venv with its stamp; raises when a step fails, and the next call starts over."""
    start = time.monotonic()
    say(
        f"building {what.folder} with Python {show(python.version)} ({python.path});"
        " this takes minutes, once"
    )
    empty(venv)
    take(f"creating {what.folder}", [python.path, "-I", "-m", "venv", str(venv)], root, run, what)
    by, torch = how(venv, environ, asked)
    announce(by, torch, venv, root / what.log_file)
    install(root, by, torch, run, what, start)
    write_stamp(venv, ready_text(root, python.version, what, torch.name))
    say(f"{time.monotonic() - start:3.0f} s: {what.folder} is ready")


def install(
    root: Path, by: Installer, torch: Choice, run: Runner, what: Environment, start: float
) -> None:
    """Install every package, with a line for each step."""
    for title, command in install_steps(root, by, torch, what):
        say(f"{time.monotonic() - start:3.0f} s: {title}")
        try:
            take(title, command, root, run, what)
        except SetupError as error:
            if torch.source not in command or "--no-deps" not in command:
                raise
            raise SetupError(
                f"{error}\n  Without a way to pytorch.org: name a mirror in pip's settings, or take"
                f" the build that your package index has (make setup TORCH={torch_build.OF_INDEX})"
            ) from None


def announce(by: Installer, torch: Choice, venv: Path, log: Path) -> None:
    """Log what is installed, from where and how much; raises where the disk lacks room."""
    _, disk, text = torch_build.sizes(torch)
    say(f"{torch_build.label(torch)}: {torch.why}")
    say(f"{text}; {by.why}, its log is {log}")
    free = shutil.disk_usage(str(venv)).free
    if free < disk:
        needs = f"{disk / 2**30:.1f} GiB are needed at {venv}, {free / 2**30:.1f} GiB free"
        raise SetupError(f"{venv.name} does not fit: {needs}.\n  Make room, then run make again")


def take(title: str, command: Sequence[str], root: Path, run: Runner, what: Environment) -> None:
    """Runs a step; raises when it fails, with the end of its output."""
    code = run(command, root)
    if code == 0:
        return
    shown = ""
    if isinstance(run, Logged):
        lines = "\n".join("    " + line for line in run.tail())
        shown = f"; the last lines of {run.log}:\n{lines}"
    free = shutil.disk_usage(str(root)).free / 2**30
    raise SetupError(
        f"{title} ended with exit code {code}{shown}\n"
        f"  Check the network, the index and the disk ({free:.0f} GiB free), "
        f"then run make {'again' if what is MAIN else what.target}: it repairs {what.folder}"
    )


def needed_extras(asked: Sequence[str], environ: Mapping[str, str]) -> List[Tuple[str, str]]:
    """The extras that targets of make need, each with what it is for."""
    needed = [
        (extra, purpose)
        for extra, (purpose, targets) in EXTRAS.items()
        if not set(asked).isdisjoint(targets)
    ]
    return [*needed, TASKS_EXTRA] if "eval" in asked and environ.get("TASKS") else needed


def add_extra(
    extra: str, purpose: str, root: Path, environ: Mapping[str, str], run: Optional[Runner] = None
) -> None:
    """Add an extra at its pins to a .venv that is ready; raises when it cannot be installed."""
    venv = root / MAIN.folder
    if has_extra(venv, extra):
        return
    with build_lock(root):
        if has_extra(venv, extra):  # another make may have added it while we waited
            return
        needs = extra_requirements((root / "pyproject.toml").read_text(encoding="utf-8"), extra)
        names = ", ".join(need.split(">")[0] for need in needs)
        say(
            f"adding the packages for {purpose} to {MAIN.folder}, once,"
            f" as {MAIN.pins} pins them: {names}"
        )
        python = str(venv / "bin" / "python")
        by = installer.choose(python, environ, installer.pip_settings(python, environ))
        command = [*by.command, "--constraint", MAIN.pins, *installer.options(by), *needs]
        try:
            take(
                f"installing the {extra} extra",
                command,
                root,
                run or Logged(root / MAIN.log_file),
                MAIN,
            )
        except SetupError as error:
            raise SetupError(
                f"{error}\n  Or, in your own environment"
                f" (make with VENV=/path): pip install 'sft-play[{extra}]'"
            ) from None
        stamp = venv / EXTRA_STAMP.format(extra)
        stamp.write_text((venv / STAMP).read_text(encoding="utf-8"), encoding="utf-8")


def has_extra(venv: Path, extra: str) -> bool:
    """Whether an extra was added since .venv was built."""
    stamp = venv / EXTRA_STAMP.format(extra)
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == (venv / STAMP).read_text(
        encoding="utf-8"
    )


@contextlib.contextmanager
def build_lock(root: Path, what: Environment = MAIN) -> Iterator[None]:
    """A lock that one make holds at a time; a second one logs that it waits."""
    with (root / what.lock_file).open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another make that builds {what.folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(
    root: Path,
    environ: Mapping[str, str],
    run: Optional[Runner] = None,
    *,
    what: Environment = MAIN,
) -> None:
    """A usable environment: the user's VENV, or a .venv that fits the pins, built if need be."""
    if environ.get("VENV") and what is MAIN:
        check_own(environ["VENV"])
        return
    venv = root / what.folder
    refuse_foreign(venv)
    wanted = named_python(environ["PYTHON"]) if environ.get("PYTHON") else None
    asked = torch_build.asked_build(environ)
    torch = asked
    if asked == "auto":
        torch = how(venv, environ, asked)[1].name if live_version(venv) else ""
    if is_ready(root, venv, wanted, what, torch):
        if what is not MAIN:
            say(f"{what.folder} is ready")
        return
    with build_lock(root, what):
        refuse_foreign(venv)
        # another make may have built it while we waited
        if not is_ready(root, venv, wanted, what, torch):
            python = wanted or search_python()
            build(root, venv, python, run or Logged(root / what.log_file), what, environ, asked)


def main(root: Path = ROOT, what: Environment = MAIN, *, targets: Sequence[str] = ()) -> int:
    """0 with a usable environment, 2 after a message that says what to do, 130 after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ensure(root, os.environ, what=what)
        if not os.environ.get("VENV"):
            for extra, purpose in needed_extras(targets, os.environ):
                add_extra(extra, purpose, root, os.environ)
    except (SetupError, BuildError) as error:
        return ended(EXIT_USER, str(error))
    except OSError as error:
        if error.errno not in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOSPC,
            errno.EDQUOT,
            errno.ELOOP,
        ):
            answer(EXIT_FAULT, repr(error))
            raise
        return ended(
            EXIT_USER,
            f"{error.filename or root}: {error.strerror}: {what.folder} cannot be read or built"
            " there.\n  Make it readable and writable for you, make room on the disk, or use your"
            f" own ({'VENV' if what is MAIN else 'UNSLOTH_VENV'}=/path)",
        )
    except KeyboardInterrupt:
        again = f"the next make{'' if what is MAIN else ' ' + what.target} repairs {what.folder}"
        return ended(EXIT_STOPPED, f"interrupted; {again}")
    except Exception as error:
        answer(EXIT_FAULT, repr(error))
        raise
    return 0


def ended(code: int, text: str) -> int:
    """Say how it ended, and answer; returns the exit code."""
    say(text)
    answer(code, text)
    return code


def answer(code: int, error: str) -> None:
    """With JSON=1 the object that the command would have written."""
    if wants_json(()):
        write_missing_answer(code, error)


if __name__ == "__main__":
    asked = sys.argv[1:]
    sys.exit(main(what=UNSLOTH if asked == ["unsloth"] else MAIN, targets=asked))
