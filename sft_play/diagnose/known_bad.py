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

from sft_play.diagnose.surroundings import SystemFacts
from sft_play.facts.installed import LINEAR_ATTENTION_PACKAGE, kernel_package_problem
from sft_play.findings import Finding, pass_finding
from sft_play.launch.machine import P2P_OFF_VARIABLES, has_broken_p2p

Condition = Mapping[str, Any]
# None: not known, which meets no condition.
Facts = Mapping[str, Any]


def matches_conditions(conditions: Condition | Sequence[Condition], facts: Facts) -> bool:
    """True if the facts meet a condition, or one of several."""
    alternatives = [conditions] if isinstance(conditions, Mapping) else conditions
    return any(
        all(_meets_requirement(facts[name], required) for name, required in condition.items())
        for condition in alternatives
    )


def _meets_requirement(fact: Any, required: Any) -> bool:
    if fact is None:
        return False
    if isinstance(required, bool):
        return fact is required
    if isinstance(required, list):
        return fact in required
    # the leading numbers alone: 2.13.0+cu128, 6.8.0-45-generic and 570.86.15 have to compare
    match = re.match(r"\d+(?:\.\d+)*", str(fact))
    return match is not None and match[0] in SpecifierSet(required)


KNOWN_BAD_NAME = "known bad pairs"
_COMPARED_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "peft")
KNOWN_BAD_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_DEFAULT_ERROR_REMEDY = ("NCCL_DEBUG=INFO make doctor shows more; docs/diagnose.md says what each check needs",)


def find_known_bad(
    system_facts: SystemFacts,
    *,
    rank_count: int = 1,
    node_count: int = 1,
    layout: str = "single",
    packages: Collection[str] = (),
) -> list[Finding]:
    """Find the entries that apply, else a PASS. `rank_count`: of all nodes. `packages`: whose kernels the model's
    class runs where they are installed."""
    facts = _combination_facts(system_facts, packages, rank_count=rank_count, node_count=node_count, layout=layout)
    shown_facts = {name: "?" if value is None else value for name, value in facts.items()}
    findings = [
        Finding(
            KNOWN_BAD_NAME,
            entry["verdict"],
            entry["what"].format(**shown_facts),
            entry["remedy"],
            tuple(entry["sources"]),
        )
        for entry in KNOWN_BAD_TABLE["pairs"]
        if matches_conditions(entry["when"], facts)
    ]
    return findings or [pass_finding(KNOWN_BAD_NAME, f"none of {len(KNOWN_BAD_TABLE['pairs'])} applies")]


def error_remedies(error: str) -> tuple[str, ...]:
    """The remedy for the error of a rank, and the threads on it."""
    for entry in KNOWN_BAD_TABLE["errors"]:
        if re.search(entry["pattern"], error, re.IGNORECASE):
            return entry["remedy"], *entry["sources"]
    return _DEFAULT_ERROR_REMEDY


def _combination_facts(
    system_facts: SystemFacts, packages: Collection[str], *, rank_count: int, node_count: int, layout: str
) -> Facts:
    gpus = system_facts.hardware.gpus
    capabilities = [gpu.capability for gpu in gpus if gpu.capability]
    torch_cuda, driver_cuda = _version_numbers(system_facts.torch_cuda), system_facts.driver_cuda
    unsound_reason = next(
        filter(None, (kernel_package_problem(name, capability) for name in packages for capability in capabilities)), ""
    )
    uses_nccl = rank_count > 1 and bool(gpus)
    is_p2p_off = P2P_OFF_VARIABLES.keys() <= system_facts.environment.keys()
    return {
        **{name: system_facts.versions.get(name) for name in (*_COMPARED_PACKAGES, LINEAR_ATTENTION_PACKAGE)},
        "driver": system_facts.driver,
        "driver_cuda": ".".join(map(str, driver_cuda)) if driver_cuda else None,
        "driver_runs_torchs_cuda": driver_cuda[0] >= torch_cuda[0] if gpus and driver_cuda and torch_cuda else None,
        "torch_cuda": system_facts.torch_cuda,
        "nccl": system_facts.nccl,
        "kernel": system_facts.kernel if system_facts.os_name == "Linux" else None,
        "machine": system_facts.cpu_architecture,
        "oldest_gpu": ".".join(map(str, min(capabilities))) if capabilities else None,
        "desktop_blackwell": any(capability[0] == 12 for capability in capabilities),
        "has_hopper": any(capability[0] == 9 for capability in capabilities),
        "runs_delta_rules": LINEAR_ATTENTION_PACKAGE in packages,
        "unsound": unsound_reason != "",
        "why_not": unsound_reason,
        "ranks": rank_count,
        "nodes": node_count,
        "over_nccl": uses_nccl,
        "layout": layout,
        "accelerate_refuses_p2p": uses_nccl
        and not is_p2p_off
        and has_broken_p2p([gpu.name for gpu in gpus], system_facts.driver),
    }


def _version_numbers(version: str | None) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cu130; empty where there is none."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(map(int, match[0].split("."))) if match else ()
