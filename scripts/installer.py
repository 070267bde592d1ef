"""How the packages of an environment are installed: by uv where it fits, else by pip; with a log.

Standard library only, and nothing newer than Python 3.6, like setup_env.py.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

# These would make the installer use another environment, or pass make's flags into a package's
# build. UV_TORCH_BACKEND would choose another build of torch than ours.
MISLEADING = (
    *("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_DRY_RUN"),
    *("UV_SYSTEM_PYTHON", "UV_TORCH_BACKEND", "UV_OVERRIDE"),
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"),
)
OF_UV = (
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "UV_FIND_LINKS",
    "UV_NO_INDEX",
)
LINES_SHOWN = 15
"""Lines of the log that a failed step shows."""
QUIET_S = 30.0
"""Seconds between two lines of progress where the output is not a terminal."""

CLEARED = "\r\033[K"
"""Clears a line of progress on a terminal."""


class Installer(NamedTuple):
    """The program that installs, its configured indexes (empty: none), and why it was chosen."""

    name: str
    command: Tuple[str, ...]  # up to and with `install`
    configured: str
    why: str


def clean_environ(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment for pip and uv: with the user's proxies and indexes, without `MISLEADING`."""
    kept = {name: value for name, value in environ.items() if name not in MISLEADING}
    # a question would end in the log
    kept.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    return kept


# Which program


def choose(python: str, environ: Mapping[str, str], pip_settings: str) -> Installer:
    """uv where it is on PATH and has indexes configured if pip has, else the environment's own pip.

    `pip_settings` is what `pip config list` printed: uv reads none of it
    (docs.astral.sh/uv/pip/compatibility).
    """
    of_pip, of_uv = pip_indexes(pip_settings), uv_indexes(environ)
    uv = shutil.which("uv", path=environ.get("PATH", os.defpath))
    if uv and (of_uv or not of_pip):
        told = f"uv's settings name an index ({of_uv})" if of_uv else ""
        return Installer(
            "uv", (uv, "pip", "install", "--python", python), told, f"uv installs ({uv})"
        )
    told = f"pip's settings name an index ({of_pip})" if of_pip else ""
    why = f"pip installs: {told}, and uv does not read them" if uv else "pip installs"
    return Installer("pip", (python, "-m", "pip", "install"), told, why)


def pip_indexes(settings: str) -> str:
    """The settings that name an index, of what `pip config list` prints; empty where none does."""
    keys = ("index-url", "extra-index-url", "find-links", "no-index")
    names = [line.split("=", 1)[0] for line in settings.splitlines() if "=" in line]
    told = [
        name
        for name in names
        if re.match(r"(global|install|:env:)\.", name) and name.split(".")[-1] in keys
    ]
    return ", ".join(told)


def uv_indexes(environ: Mapping[str, str]) -> str:
    """The variable or file of uv that names an index; empty where none does."""
    told = [name for name in OF_UV if environ.get(name)]
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "/") / ".config")
    file = environ.get("UV_CONFIG_FILE")
    files = [Path(file)] if file else [home / "uv/uv.toml", Path("/etc/uv/uv.toml")]
    key = re.compile(
        r"^\s*(\[\[(pip\.)?index\]\]|((extra-)?index(-url)?|find-links|no-index)\s*=)", re.MULTILINE
    )
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if key.search(text):
            told.append(str(path))
    return ", ".join(told)


def pip_settings(python: str, environ: Mapping[str, str]) -> str:
    """What `pip config list` prints, its files and variables together; empty where it does not
    answer."""
    command = [python, "-m", "pip", "config", "list"]
    try:
        return os.fsdecode(
            subprocess.check_output(command, env=clean_environ(environ), stderr=subprocess.DEVNULL)
        )
    except (OSError, subprocess.CalledProcessError):
        return ""


# What it is told


def options(installer: Installer) -> List[str]:
    """Options of each call: uv compiles to bytecode as pip does, and pip draws no progress bars
    into the log."""
    return ["--compile-bytecode"] if installer.name == "uv" else ["--progress-bar", "off"]


def from_index(installer: Installer, url: str) -> List[str]:
    """This index alone, for packages whose dependencies come later from the usual one."""
    retries = [] if installer.name == "uv" else ["--retries", "2"]
    return ["--no-deps", "--index-url", url, *retries]


def beside_index(installer: Installer, url: str) -> List[str]:
    """The usual index and this one; each pin comes from the one that has it."""
    strategy = ["--index-strategy", "unsafe-best-match"] if installer.name == "uv" else []
    return ["--extra-index-url", url, *strategy]


# The log


class Logged:
    """Runs commands with their output in a file, and shows one line of progress."""

    def __init__(self, log: Path) -> None:
        self.log, self.begun = log, time.monotonic()
        log.write_text("", encoding="utf-8")

    def __call__(self, command: Sequence[str], root: Path) -> int:
        """The exit code of a command."""
        with self.log.open("ab") as file:
            file.write(("\n$ " + " ".join(command) + "\n").encode("utf-8", "replace"))
            file.flush()
            # close_fds=False: the command inherits the build lock, so that a pip that outlives us
            # still holds it.
            process = subprocess.Popen(
                list(command),
                cwd=str(root),
                env=clean_environ(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                close_fds=False,
            )
            try:
                return self._watched(process)
            except BaseException:
                process.kill()
                process.wait()
                raise

    def _watched(self, process: "subprocess.Popen[bytes]") -> int:
        """Its exit code; until then a line of progress, every second on a terminal, else every half
        minute."""
        terminal, shown_at = sys.stderr.isatty(), time.monotonic()
        try:
            while True:
                try:
                    return process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    if terminal or time.monotonic() - shown_at >= QUIET_S:
                        shown_at = time.monotonic()
                        self._show(shown_at - self.begun, terminal)
        finally:
            if terminal:
                sys.stderr.write(CLEARED)
                sys.stderr.flush()

    def _show(self, elapsed_s: float, terminal: bool) -> None:
        """The installer's last line; on a terminal it replaces the one before."""
        newest = [line for line in self.tail() if not line.startswith(("WARNING", "$ "))][-1:] or [
            "…"
        ]
        width = shutil.get_terminal_size().columns - 1 if terminal else 100
        text = f"[setup] {elapsed_s:3.0f} s: {''.join(newest)}"[:width]
        sys.stderr.write(CLEARED + text if terminal else text + "\n")
        sys.stderr.flush()

    def tail(self, count: int = LINES_SHOWN) -> List[str]:
        """The last lines of the log, without blank ones."""
        text = self.log.read_bytes()[-20000:].decode("utf-8", "replace")
        return [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()][
            -count:
        ]
