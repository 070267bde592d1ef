"""A sample of `make fuzz` finds nothing, and the fuzzer finds what is wrong: it can fail, and repeats its cases."""

import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.fuzz import configs, mutate, run
from benchmarks.fuzz.__main__ import DEFAULT_CASES
from tests.conftest import ROOT, clean_environment

pytestmark = pytest.mark.build
SAMPLE = {"yaml": 60, "rows": 25, "words": 60, "make": 5, "templates": 40, "serve": 12}
HAS_SERVE = all(find_spec(name) for name in ("fastapi", "openai", "uvicorn"))


@pytest.mark.parametrize("part", SAMPLE)
def test_a_sample_finds_nothing(part):
    if part == "serve" and not HAS_SERVE:
        pytest.skip("the extra sft-play[serve] is not installed")
    seed = int(os.environ.get("SFT_PLAY_FUZZ_SEED", "1"))
    tried = list(run.run_cases(part, range(SAMPLE[part]), seed=seed))
    assert len(tried) == SAMPLE[part]
    assert [one for one in tried if one.verdict == "wrong"] == []
    assert {one.verdict for one in tried} >= ({"refused"} if part == "make" else {"accepted", "refused"})


def test_every_part_has_a_share_and_a_module():
    assert set(DEFAULT_CASES) == set(run.PART_MODULES) == set(SAMPLE)
    assert sum(DEFAULT_CASES[part] for part in ("words", "make")) == 2_000
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert {part: int(count.replace(",", "")) for part, count in re.findall(
        r"`make fuzz PART=(\w+) N=.*\| ([\d,]+) \|", page)} == DEFAULT_CASES  # fmt: skip


def test_a_case_is_made_from_its_numbers_alone():
    given = {"a": [1, {"b": "text"}]}
    one, again = ([json.dumps(mutate.plain(random.Random(f"0/yaml/{n}"), given)) for n in range(50)] for _ in range(2))
    assert one == again
    assert len(set(one)) > 25
    some, every = (list(run.run_cases("yaml", numbers, seed=0)) for numbers in (range(10, 20), range(20)))
    assert [(one.number, one.verdict) for one in some] == [(one.number, one.verdict) for one in every[10:]]


def test_what_is_let_through_is_found(monkeypatch):
    def broken(path: Path, *, overrides: list[str]) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(configs, "load_config", broken)
    tried = list(run.run_cases("yaml", range(5), seed=0))
    assert [one.verdict for one in tried] == ["wrong"] * 5
    assert all("KeyError: 'a bug'" in one.reason for one in tried)


@pytest.mark.parametrize(("code", "out", "err", "is_json", "told"), [
    (0, "", "[plan] error: no", False, "exit code 0 after an error"), (1, "", "Traceback", False, "exit code 1"),
    (2, "", "", False, "without a word"), (2, "no JSON", "[plan] error: no", True, "with JSON=1 it printed"),
    (2, '{"ok": true}', "[plan] error: no", True, "ok is True"),
])  # fmt: skip
def test_words_and_exit_codes_have_to_agree(code, out, err, is_json, told):
    with pytest.raises(run.FuzzFailure, match=told):
        run.require_consistent_exit(code, out, err, is_json=is_json)
    run.require_consistent_exit(2, '{"ok": false}', "[plan] error: no", is_json=True)
    run.require_consistent_exit(0, "done", "", is_json=False)


def test_time_memory_and_commands_that_were_run_are_judged(monkeypatch, tmp_path):
    def told(judge: run.CaseRunner) -> str:
        (tmp_path / "pwned").unlink(missing_ok=True)
        return run._run_case(judge, "yaml", 0, random.Random(0), tmp_path).reason

    assert told(lambda draw, folder: True) == ""
    assert "was run as a command" in told(lambda draw, folder: bool((folder / "pwned").write_text("x")))
    monkeypatch.setattr(run, "MAX_CASE_SECONDS", -1.0)
    assert "it took" in told(lambda draw, folder: True)
    monkeypatch.setattr(run, "MAX_CASE_BYTES", -1)
    assert "MiB" in told(lambda draw, folder: True)


def test_a_case_that_kills_its_process_is_wrong_and_the_others_are_tried(monkeypatch, tmp_path):
    """By a stand-in for the worker, which is one process for many cases."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\nfor n in range(int(sys.argv[5]), int(sys.argv[6])):\n"
        "    if n == 2:\n        os.kill(os.getpid(), 9)\n"
        "    print(json.dumps({'part': 'yaml', 'number': n, 'verdict': 'refused'}), flush=True)\n"
    )
    popen, program = subprocess.Popen, [sys.executable, str(worker)]
    monkeypatch.setattr(run.subprocess, "Popen", lambda words, **more: popen([*program, *words[2:]], **more))
    tried = list(run.run_cases_isolated("yaml", range(5), seed=0))
    assert [one.number for one in tried] == [*range(5)]
    assert [one.verdict for one in tried] == ["refused", "refused", "wrong", "refused", "refused"]
    assert "-9" in tried[2].reason


def test_make_fuzz_as_it_is_typed(tmp_path):
    def make_fuzz(*words: str) -> subprocess.CompletedProcess[str]:
        environ = clean_environment(VENV=str(Path(sys.executable).parent.parent))
        command = ["make", "fuzz", "N=12", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environ)

    done = make_fuzz("PART=yaml", "SEED=3", f"OUT={tmp_path}/found.json")
    assert done.returncode == 0, done.stderr
    assert "yaml: 12 cases: " in done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["seed"], report["parts"]["yaml"]["cases"], report["parts"]["yaml"]["wrong"]) == (3, 12, 0)
    wrong = make_fuzz("PART=none")
    assert (wrong.returncode, "the parts are yaml" in wrong.stderr) == (2, True)
