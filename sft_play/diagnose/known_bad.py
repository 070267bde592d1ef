"""Combinations of versions, drivers and machines that are known to hang, crash or train wrongly: `known_bad.json`.

Each entry rests on a public thread: what happens, and from which version to which. An entry that the pinned versions no
longer meet stays as long as a user's own environment (`VENV=`) can. `errors` are texts of ranks that failed, the first
that fits counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from sft_play.diagnose.surroundings import Surroundings
from sft_play.facts.installed import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.findings import Finding, pass_finding
from sft_play.launch.machine import P2P_OFF, has_broken_p2p

Condition = Mapping[str, Any]
# None: not known, which meets no condition.
Facts = Mapping[str, Any]


def holds(when: Condition | Sequence[Condition], facts: Facts) -> bool:
    """Whether the facts meet a condition, or one of several."""
    either = [when] if isinstance(when, Mapping) else when
    return any(all(_meets(facts[name], wanted) for name, wanted in one.items()) for one in either)


def _meets(fact: Any, wanted: Any) -> bool:
    if fact is None:
        return False
    if isinstance(wanted, bool):
        return fact is wanted
    if isinstance(wanted, list):
        return fact in wanted
    # the leading numbers alone: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare
    match = re.match(r"\d+(?:\.\d+)*", str(fact))
    return match is not None and match[0] in SpecifierSet(wanted)


NAME = "known bad pairs"
_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "peft")
TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_OTHER_ERROR = ("NCCL_DEBUG=INFO make doctor shows more; docs/diagnose.md says what each check needs",)


def find_known_bad(
    around: Surroundings,
    *,
    ranks: int = 1,
    nodes: int = 1,
    layout: str = "single",
    packages: Collection[str] = (),
) -> list[Finding]:
    """A finding for each entry that applies; else a PASS. `ranks`: of all nodes. `packages`: whose kernels the model's
    class runs where they are installed."""
    facts = _facts(around, packages, ranks=ranks, nodes=nodes, layout=layout)
    words = {name: "?" if value is None else value for name, value in facts.items()}
    findings = [
        Finding(NAME, entry["verdict"], entry["what"].format(**words), entry["remedy"], tuple(entry["sources"]))
        for entry in TABLE["pairs"]
        if holds(entry["when"], facts)
    ]
    return findings or [pass_finding(NAME, f"none of {len(TABLE['pairs'])} applies")]


def explained(error: str) -> tuple[str, ...]:
    """What to do about the error of a rank, and the threads on it."""
    for entry in TABLE["errors"]:
        if re.search(entry["pattern"], error, re.IGNORECASE):
            return entry["remedy"], *entry["sources"]
    return _OTHER_ERROR


def _facts(around: Surroundings, packages: Collection[str], *, ranks: int, nodes: int, layout: str) -> Facts:
    gpus = around.hardware.gpus
    capabilities = [gpu.capability for gpu in gpus if gpu.capability]
    built, newest = _numbers(around.torch_cuda), around.driver_cuda
    why_not = next(filter(None, (kernel_package_problem(name, one) for name in packages for one in capabilities)), "")
    over_nccl = ranks > 1 and bool(gpus)
    is_off = P2P_OFF.keys() <= around.environment.keys()
    return {
        **{name: around.versions.get(name) for name in (*_PACKAGES, LINEAR_ATTENTION_PACKAGE)},
        "driver": around.driver,
        "driver_cuda": ".".join(map(str, newest)) if newest else None,
        "driver_runs_torchs_cuda": newest[0] >= built[0] if gpus and newest and built else None,
        "torch_cuda": around.torch_cuda,
        "nccl": around.nccl,
        "kernel": around.kernel if around.system == "Linux" else None,
        "machine": around.machine,
        "oldest_gpu": ".".join(map(str, min(capabilities))) if capabilities else None,
        "desktop_blackwell": any(capability[0] == 12 for capability in capabilities),
        "has_hopper": any(capability[0] == 9 for capability in capabilities),
        "runs_delta_rules": LINEAR_ATTENTION_PACKAGE in packages,
        "unsound": why_not != "",
        "why_not": why_not,
        "ranks": ranks,
        "nodes": nodes,
        "over_nccl": over_nccl,
        "layout": layout,
        "accelerate_refuses_p2p": over_nccl and not is_off and has_broken_p2p([gpu.name for gpu in gpus], around.driver),
    }


def _numbers(version: str | None) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cu130; empty where there is none."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(map(int, match[0].split("."))) if match else ()
