"""Which tests the default suite leaves out for their duration: `tests/slow_tests.txt`, made from a measured run.

    make test TESTS="-m '' -n3 --dist=loadfile --junitxml=times.xml"
    python -m tests.slow_tests times.xml

Of the variants of a test the quickest stays, and others that are quick; what takes long even so stays in `-m slow`,
beside the tests that are marked by hand. What is listed and was not measured, as by a default run, stays listed.
"""

import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
QUICK_VARIANT_S = 0.7
"""A further variant of a test stays if it takes no longer."""
QUICK_TEST_S = 5.0
"""A test stays with its quickest variant if that takes no longer."""

KEPT = (
    "tests/test_recorded_plans.py",
    *("tests/test_failures.py", "tests/test_gradients.py", "tests/test_mesh.py", "tests/test_pretended.py"),
    *("tests/test_package.py", "tests/test_refusals.py", "tests/test_resume_exam.py", "tests/test_ship.py"),
    *("tests/test_startup.py", "tests/test_tensorboard.py"),
)
"""Files whose tests are parts of one, or look at one run that the first of them starts: all of them stay, but what is
marked by hand."""


def listed() -> frozenset[str]:
    """Node ids of the tests that are left out."""
    return frozenset(line for line in LIST.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")


def slow(seconds: Mapping[str, float]) -> list[str]:
    """Of measured tests by node id: those to leave out."""
    variants: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for node, duration in seconds.items():
        if node.startswith(KEPT):
            continue
        variants[node.partition("[")[0]].append((duration, node))
    found = []
    for of in variants.values():
        (quickest, first), *others = sorted(of)
        found += [first] * (quickest > QUICK_TEST_S)
        found += [node for duration, node in others if duration > QUICK_VARIANT_S]
    return sorted(found)


def measured(file: Path) -> dict[str, float]:
    """Seconds of each test of a JUnit file, by node id; set-up and tear-down count."""
    seconds: dict[str, float] = {}
    for case in xml.parse(file).getroot().iter("testcase"):
        *folder, module = case.get("classname", "").split(".")
        group = [] if module.startswith("test_") else [module]
        path = [*folder, module] if not group else folder
        node = "::".join(["/".join(path) + ".py", *group, case.get("name", "")])
        seconds[node] = seconds.get(node, 0.0) + float(case.get("time", 0))
    return seconds


def write(nodes: Iterable[str], *, about: str) -> None:
    """Write the list."""
    head = f"# Left out by default, run by -m slow; written by tests/slow_tests.py: {about}\n"
    LIST.write_text(head + "".join(f"{node}\n" for node in nodes), encoding="utf-8")


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]))
    left_out = sorted({*slow(found), *(listed() - found.keys())})
    write(left_out, about=f"{len(left_out)} of {len(found)} measured tests")
