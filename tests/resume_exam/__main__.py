"""Command line of the resume exam."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.resume_exam import exam, kills


def examined(folder: Path, names: list[str]) -> bool:
    """Print a table; whether this toolkit passed."""
    print("| stopped | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    answers = {name: exam.examined(exam.SUBJECTS[name], folder / name) for name in names}
    for place, moment in enumerate(exam.MOMENTS):
        cells = [answers[name][place] for name in names]
        print(f"| {moment} | " + " | ".join("equal" if one.passed else ", ".join(one.differs) for one in cells) + " |")
    return all(one.passed for one in answers.get("sft_play", []))


def main() -> int:
    """0 where nothing of this toolkit differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.resume_exam", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("exam", "kills"), default="exam")
    parser.add_argument("--subjects", nargs="+", choices=tuple(exam.SUBJECTS), default=list(exam.SUBJECTS))
    parser.add_argument("--layouts", nargs="+", choices=tuple(kills.LAYOUTS), default=list(kills.LAYOUTS))
    parser.add_argument("--runs", type=int, default=10, help="killed runs of each layout")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exam-") as folder:
        if given.what == "exam":
            return 0 if examined(Path(folder), given.subjects) else 1
        found = kills.main(given.layouts, given.runs, given.seed, Path(folder))
        print(kills.summary(found))
        return 1 if any(one.differs for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
