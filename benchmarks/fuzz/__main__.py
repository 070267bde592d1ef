"""`make fuzz`: try cases of each part and say what was wrong; exit code 1 where anything was."""

import argparse
import json
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from benchmarks.fuzz.run import PART_MODULES, run_cases_isolated, run_worker

DEFAULT_CASES = {"yaml": 10_000, "rows": 10_000, "words": 1_800, "make": 200, "serve": 1_000, "templates": 1_000}
"""Cases of each part where N is not given."""


def main() -> int:
    """Run what N=, PART=, CASE= and SEED= ask for; OUT= is written after each part."""
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[2], *map(int, sys.argv[3:6]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=os.environ.get("PART") or ",".join(DEFAULT_CASES))
    parser.add_argument("--n", type=int, default=int(os.environ.get("N") or 0), help="cases of each part")
    parser.add_argument("--case", type=int, default=os.environ.get("CASE"), help="this case alone")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED") or 0))
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    options = parser.parse_args()
    unknown = set(options.parts.split(",")) - set(PART_MODULES)
    if unknown:
        parser.error(f"PART={options.parts}: the parts are {', '.join(PART_MODULES)}")
    report: dict[str, Any] = {"seed": options.seed, "parts": {}}
    for part in options.parts.split(","):
        start_time, seconds = time.monotonic(), [0.0]
        verdicts = dict.fromkeys(("accepted", "refused", "wrong"), 0)
        found: list[dict[str, Any]] = []
        count = options.n or DEFAULT_CASES[part]
        numbers = range(count) if options.case is None else range(options.case, options.case + 1)
        for result in run_cases_isolated(part, numbers, seed=options.seed):
            verdicts[result.verdict] += 1
            seconds.append(result.seconds)
            if result.verdict == "wrong":
                found.append({"case": result.number, "why": result.reason})
                repeat = f"make fuzz PART={part} CASE={result.number} SEED={options.seed}"
                print(f"wrong: {repeat}\n{textwrap.indent(result.reason.rstrip(), '  ')}", flush=True)
        took = round(time.monotonic() - start_time, 1)
        cases = sum(verdicts.values())
        counts = {"cases": cases, **verdicts, "seconds": took, "slowest_s": max(seconds), "found": found}
        report["parts"][part] = counts
        shown = ", ".join(f"{number:,} {name}" for name, number in verdicts.items())
        print(f"{part}: {cases:,} cases: {shown}; {took:,.0f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(part["wrong"] for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
