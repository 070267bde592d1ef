"""Targets and variables of make: what its check refuses, make refuses with the same words and exit code 2, and no value
is ever run. Only command lines that are refused, or name no run YAML, reach make itself."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fuzz import mutate
from benchmarks.fuzz.run import CaseRunner, FuzzFailure, isolated_environment
from sft_play.files import ROOT
from sft_play.process.variables import VARIABLES, command_line_problem, all_targets

_INJECTED = (
    *("$(shell touch {0})", "`touch {0}`", "; touch {0} #", "$$(touch {0})", "' ; touch {0} ; '", '" && touch {0} "'),
    *("$(error x)", "a\nb", "$(eval X=1)", "| touch {0}", "x$", "\\", "=", "1"),
)


@contextlib.contextmanager
def case_runner() -> Iterator[CaseRunner]:
    """Cases of make's command line."""
    known, every = list(VARIABLES), sorted(all_targets())

    def judge(draw: random.Random, folder: Path) -> bool:
        pwned = folder / "pwned"
        goal, given = draw.choice(every), draw.choices(known, k=draw.choice((1, 1, 2, 3)))
        if draw.random() < 0.3:
            goal = _name(mutate.text(draw, goal)) or "x"
        given = [_name(mutate.text(draw, one)).upper() if draw.random() < 0.3 else one for one in given]
        values = [draw.choice(_INJECTED).format(pwned) for _ in given]
        words = {name: value for name, value in zip(given, values, strict=True) if name}
        told = command_line_problem([goal], words, [name for name in words if not words[name].strip()])
        if told is None:  # this one is run with its values, as a plan of a run YAML that there is not
            goal, words = "plan", {"SET": next(iter(words.values()), "x"), "CONFIG": str(folder / "none.yaml")}
        done = subprocess.run(
            ["make", "-C", str(ROOT), goal, *(f"{name}={value}" for name, value in words.items())],
            capture_output=True, text=True, timeout=120, env={**os.environ, "VENV": str(ROOT / ".venv")},
        )  # fmt: skip
        if pwned.exists() or (ROOT / "pwned").exists():
            raise FuzzFailure(f"a value was run: {words}")
        if done.returncode != 2 or "Traceback" in done.stderr:
            raise FuzzFailure(
                f"exit code {done.returncode} of make {goal} {words}: {done.stderr[-2000:]}{done.stdout[-500:]}"
            )
        if told is None and "none.yaml" not in done.stderr + done.stdout and "SET" not in done.stderr + done.stdout:
            raise FuzzFailure(f"make {goal} {words} said {done.stderr[-2000:]}")
        return False

    with isolated_environment():
        yield judge


def _name(text: str) -> str:
    """A name that make takes for a goal or a variable."""
    return "".join(letter for letter in text if letter.isascii() and (letter.isalnum() or letter in "-_.")).lstrip("-.")
