"""The list of tests that are left out for their duration."""

import ast
import functools
import random

import pytest

from tests.conftest import ROOT
from tests.slow_tests import KEPT, QUICK_TEST_S, QUICK_VARIANT_S, listed, measured, slow


@functools.cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_test_of_the_list_exists():
    assert len(listed()) > 50
    for node in listed():
        file, *_, name = node.partition("[")[0].split("::")
        assert name in names_in(file), node


@pytest.mark.parametrize("seed", range(8))
def test_each_test_keeps_its_quickest_variant_unless_that_takes_long(seed):
    draw = random.Random(seed)
    seconds = {
        f"tests/test_a.py::test_{test}[{variant}]": draw.choice([0.1, QUICK_VARIANT_S, 3.0, QUICK_TEST_S, 11.0, 40.0])
        for test in range(8)
        for variant in range(draw.randint(1, 5))
    }
    left_out = set(slow(seconds))
    assert slow({f"{KEPT[0]}::test_x[{part}]": 20.0 for part in range(3)}) == []  # parts of one test stay
    for node, duration in seconds.items():
        others = {one: of for one, of in seconds.items() if one.partition("[")[0] == node.partition("[")[0]}
        stays = {one for one in others if one not in left_out}
        if min(others.values()) <= QUICK_TEST_S:
            assert any(seconds[one] == min(others.values()) for one in stays)
        else:
            assert not stays
        if duration <= QUICK_VARIANT_S:
            assert node in stays
        if node in stays and duration > QUICK_VARIANT_S:
            assert len([one for one in stays if seconds[one] > QUICK_VARIANT_S]) == 1


def test_seconds_are_read_by_node_id(tmp_path):
    (tmp_path / "times.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.test_train.TestChecks" name="test_a[x-1]" time="2.5"/>
        <testcase classname="tests.test_train" name="test_b" time="0.5"/>
        </testsuite></testsuites>"""
    )
    assert measured(tmp_path / "times.xml") == {
        "tests/test_train.py::TestChecks::test_a[x-1]": 2.5,
        "tests/test_train.py::test_b": 0.5,
    }
