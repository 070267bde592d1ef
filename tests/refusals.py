"""Commands that are refused, each in a fork of one light process, which ends where a heavy library would be imported.

echo '[{"words": ["push"], "set": {"RUN": "x"}}]' | python -m tests.refusals
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import signal
import sys
import traceback
from types import ModuleType
from typing import Any

HEAVY = ("torch", "transformers", "datasets")
LONGEST_S = 60
"""A command that waits for something is no refusal."""


class Loading(BaseException):
    """A heavy library is being imported; no handler of the program's own catches it."""


class _Stops(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds heavy libraries, which may be looked for, and does not load them."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in HEAVY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        raise Loading(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Never called; importlib treats a loader without it as a legacy one."""


def _answer(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """In a fork: run the command, and report the end."""
    out, loaded = io.StringIO(), None
    os.environ.update(variables)
    sys.argv = ["sft-play", *words]
    sys.stdin = io.StringIO()
    sys.meta_path.insert(0, _Stops())
    signal.alarm(LONGEST_S)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            from sft_play.entry import main

            code = main()
        except Loading as error:
            code, loaded = -1, str(error)
        except BaseException:
            code = -1
            traceback.print_exc(file=out)
    return {"code": code, "said": out.getvalue(), "loaded": loaded}


def _forked(words: list[str], variables: dict[str, str]) -> str:
    """The report as JSON; empty where the command was ended."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        with os.fdopen(writing, "w") as file:
            file.write(json.dumps(_answer(words, variables)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def main() -> None:
    """Read cases from standard input, and write a line on what became of each."""
    from sft_play import commands

    for command in commands.COMMAND_FILES:
        commands.load_module(command)
    assert not [name for name in HEAVY if name in sys.modules]
    for case in json.load(sys.stdin):
        ended = json.dumps({"code": None, "said": "", "loaded": None})
        sys.stdout.write((_forked(case["words"], case["set"]) or ended) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
