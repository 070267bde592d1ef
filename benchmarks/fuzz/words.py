"""Command lines: every command with its own and others' flags, words and variables, some of them mutated.

What would train, serve or measure for minutes gets a config that is refused; what has none is only read as a request.
"""

import contextlib
import os
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.fuzz import mutate, run
from sft_play.commands.request import flag_commands_table, read_request
from sft_play.errors import SftPlayError
from sft_play.variables import COMMANDS, VARIABLES

_QUICK = ("plan", "gpu-info", "runs", "report", "compare", "prune", "process", "style", "tb-stop", "tb-clean", "check")
"""Commands that end soon by themselves, whatever the config."""
_READ_ONLY = (
    *("gpu-selftest", "mask-score", "memory-model-score", "generate", "doctor"),
    *("run-notebook", "setup-accelerate"),
)
"""Commands that work without a config, or on the machine: their words are read, and nothing is run."""
_GOOD = "model: {name: Qwen/Qwen2.5-0.5B}\ndata: {train_path: rows.jsonl}\n"
_VALUES = ("run.yaml", "none.yaml", ".", "last", "2xH100", "1", "0", "2", "ddp", "zero3", "x=1", "a.b=1", "rows.jsonl")


@contextlib.contextmanager
def case_runner() -> Iterator[run.CaseRunner]:
    flags = flag_commands_table()

    def judge(draw: random.Random, folder: Path) -> bool:
        name = draw.choice(COMMANDS)
        is_quick = name in _QUICK
        (folder / "run.yaml").write_text(_GOOD if is_quick else "model: {name: ./none, no_such_key: 1}\n")
        (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 20)
        words, chosen = _words(draw, name, flags), draw.choices(list(VARIABLES), k=draw.choice((0, 0, 1, 2)))
        variables = {one: _as_passed(draw.choice((*_VALUES, draw.choice(mutate.STRANGE_TEXTS)))) for one in chosen}
        if name in _READ_ONLY or not any(word in COMMANDS for word in words):
            return _is_read(words, variables)
        if not is_quick:
            variables["CONFIG"] = "run.yaml"
            words = [word for word in words if not word.startswith("--config")]
        before = run.read_files(folder)
        is_json = "--json" in words or variables.get("JSON", "0") not in ("", "0")
        code, out, err = run.run_command(words, **variables)
        if not {"-h", "--help"} & set(words):
            run.require_consistent_exit(code, out, err, is_json=is_json)
        if code and (changed := {key for key, old in before.items() if run.read_files(folder).get(key) != old}):
            raise run.FuzzFailure(f"refused, and it changed {changed}")
        if code and (more := run.read_files(folder).keys() - before.keys()):
            raise run.FuzzFailure(f"refused, and it wrote {sorted(more)}")
        return code == 0

    with run.isolated_environment():
        yield judge


def _words(draw: random.Random, name: str, flags: dict[str, Sequence[str]]) -> list[str]:
    """The words of a command; most of its flags are its own, half of these with a value that means something."""
    words, own = [name], [flag for flag, commands in flags.items() if name in commands] or ["--json"]
    for _ in range(draw.choice((0, 0, 1, 1, 2, 4))):
        flag = draw.choice(own if draw.random() < 0.7 else list(flags))
        value = draw.choice((*_VALUES, draw.choice(mutate.STRANGE_TEXTS)))
        variable = VARIABLES.get(flag.strip("-").replace("-", "_").upper())
        if variable is not None and draw.random() < 0.5:
            value = shlex.split(variable.example)[0]
        words += draw.choice(([flag, value], [f"{flag}={value}"], [flag], ["model.max_seq_len=64"], [f"a={value}"]))
    if draw.random() < 0.5:
        words += ["--config", "run.yaml"]
    if draw.random() < 0.3:
        words.append("--json")
    if draw.random() < 0.3:
        at = draw.randrange(len(words))
        words[at] = mutate.text(draw, words[at])
    if draw.random() < 0.2:
        draw.shuffle(words)
    return list(map(_as_passed, words))


def _as_passed(word: str) -> str:
    # the kernel hands over neither a null character nor, through Python, half a surrogate pair as such
    return word.replace("\0", "").encode("utf-8", "replace").decode()


def _is_read(words: list[str], variables: dict[str, str]) -> bool:
    try:
        read_request(words, {**os.environ, **variables})
    except SftPlayError as error:
        run.require_words(error)
        return False
    except SystemExit:  # --help
        return True
    return True
