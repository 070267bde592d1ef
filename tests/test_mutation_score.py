"""The tool that counts which changed decisions the tests find: what it changes, what it leaves, what it keeps."""

from __future__ import annotations

import ast
import json
from collections import Counter

from benchmarks.mutation_score import OWN_TESTS, Baseline, MutantVerdict, all_mutants, find_mutants, score
from tests.conftest import ROOT

SOURCE = '''
"""A docstring 1 < 2."""
LIMIT: "int < 3" = 7


def choose(items, most):
    """1 < 2"""
    logger.info("%d < 2", 1 < 2)
    if len(items) > most and not items[0]:
        raise ValueError("1 < 2", 1 + 1)
    return max(items) if items else most // 2
'''


def test_each_decision_is_changed_once_and_words_are_left():
    found = find_mutants("sft_play/planner/x.py", SOURCE)
    changes = {(mutant.before, mutant.after) for mutant in found}
    assert changes == {
        ("len(items) > most and not items[0]", "(len(items) > most or not items[0])"), ("not items[0]", "(items[0])"),
        ("len(items) > most", "(len(items) >= most)"), ("len(items) > most", "(len(items) <= most)"), ("0", "1"),
        ("max(items) if items else most // 2", "(most // 2 if items else max(items))"), ("max(items)", "(min(items))"),
        ("most // 2", "(most * 2)"), ("2", "3"),
    }  # fmt: skip
    verdicts = [MutantVerdict(mutant, "killed" if mutant.kind == "choice" else "survived") for mutant in found]
    assert (score(verdicts)["killed"], score(verdicts)["mutants"]) == (1, len(found))
    for mutant in found:
        changed = mutant.apply(SOURCE.encode()).decode()
        assert changed != SOURCE
        ast.parse(changed)
        assert SOURCE.encode()[mutant.start : mutant.end].decode() == mutant.before


def test_tests_are_asked_for_by_the_names_that_pytest_knows():
    """A name that pytest does not find ends as a failed test does, and no mutant may count as killed by it."""
    asked = Baseline("test_x.py", 1.0, ROOT, ROOT).node_ids
    assert asked({"", "tests.test_x.test_a", "tests.test_x.TestY.test_b"}) == [
        "tests/test_x.py::TestY::test_b", "tests/test_x.py::test_a",
    ]  # fmt: skip
    assert asked({""}) == asked({"tests.test_other.TestBase.test_c"}) == ["tests/test_x.py"]
    assert asked(set()) == []


def test_every_package_has_mutants_and_its_test_files_are_there():
    every = Counter(mutant.path.split("/")[1] for mutant in all_mutants())
    assert set(OWN_TESTS) == set(every)
    assert min(every.values()) > 100
    for name in " ".join(OWN_TESTS.values()).split():
        assert (ROOT / "tests" / f"test_{name}.py").is_file(), name


def test_the_kept_score_is_that_of_its_verdicts_and_of_the_docs():
    kept = json.loads((ROOT / "benchmarks" / "mutation_score.json").read_text(encoding="utf-8"))
    killed = sum(one["verdict"] == "killed" for one in kept["verdicts"])
    assert (kept["killed"], kept["mutants"]) == (killed, len(kept["verdicts"]))
    assert killed >= 0.85 * kept["mutants"]
    said = " ".join((ROOT / "docs" / "testing.md").read_text(encoding="utf-8").split())
    assert f"{kept['killed']} are killed, {kept['share']:.1%}" in said
