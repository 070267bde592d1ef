"""Targets and variables of make: what its check refuses, make refuses with the same words and exit code 2, and no value
is ever run. Only command lines that are refused, or name no run YAML, reach make itself."""

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fuzz import mutate
from benchmarks.fuzz.run import CaseRunner, FuzzFailure, isolated_environment
from sft_play.files import ROOT
from sft_play.variables import VARIABLES, all_targets, command_line_problem

_INJECTED = (
    *("$(shell touch {0})", "`touch {0}`", "; touch {0} #", "$$(touch {0})", "' ; touch {0} ; '", '" && touch {0} "'),
    *("$(error x)", "a\nb", "$(eval X=1)", "| touch {0}", "x$", "\\", "=", "1"),
)


@contextlib.contextmanager
def case_runner() -> Iterator[CaseRunner]:
    known_names, goals = list(VARIABLES), sorted(all_targets())

    def judge(draw: random.Random, folder: Path) -> bool:
        pwned = folder / "pwned"
        goal, names = draw.choice(goals), draw.choices(known_names, k=draw.choice((1, 1, 2, 3)))
        if draw.random() < 0.3:
            goal = _name(mutate.text(draw, goal)) or "x"
        names = [_name(mutate.text(draw, one)).upper() if draw.random() < 0.3 else one for one in names]
        values = [draw.choice(_INJECTED).format(pwned) for _ in names]
        variables = {name: value for name, value in zip(names, values, strict=True) if name}
        message = command_line_problem([goal], variables, [name for name in variables if not variables[name].strip()])
        if message is None:  # this one is run with its values, as a plan of a run YAML that there is not
            goal, variables = "plan", {"SET": next(iter(variables.values()), "x"), "CONFIG": str(folder / "none.yaml")}
        process = subprocess.run(
            ["make", "-C", str(ROOT), goal, *(f"{name}={value}" for name, value in variables.items())],
            capture_output=True, text=True, timeout=120, env={**os.environ, "VENV": str(ROOT / ".venv")},
        )  # fmt: skip
        if pwned.exists() or (ROOT / "pwned").exists():
            raise FuzzFailure(f"a value was run: {variables}")
        if process.returncode != 2 or "Traceback" in process.stderr:
            output = f"{process.stderr[-2000:]}{process.stdout[-500:]}"
            raise FuzzFailure(f"exit code {process.returncode} of make {goal} {variables}: {output}")
        said = process.stderr + process.stdout
        if message is None and "none.yaml" not in said and "SET" not in said:
            raise FuzzFailure(f"make {goal} {variables} said {process.stderr[-2000:]}")
        return False

    with isolated_environment():
        yield judge


def _name(text: str) -> str:
    return "".join(letter for letter in text if letter.isascii() and (letter.isalnum() or letter in "-_.")).lstrip("-.")
