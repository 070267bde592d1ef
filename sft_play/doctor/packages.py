"""Python and packages against what this project asks for, and against what they ask of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.doctor.finding import Finding, failed, passed, skipped, warned

_SHOWN = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")


def check_python(python: str, wanted: str) -> Finding:
    """The Python that runs, against the project's `requires-python`."""
    if not wanted:
        return skipped("Python", f"{python}; the project's own range is not to be found here")
    if _is_in(python, wanted):
        return passed("Python", f"{python} ({wanted})")
    return failed("Python", f"{python}, and the project wants {wanted}",
                  "make setup PYTHON=/path/to/a/python of that range")  # fmt: skip


def check_packages(
    versions: Mapping[str, str], requirements: Mapping[str, Sequence[str]], *, own: str, optional: frozenset[str]
) -> list[Finding]:
    """Whether everything is there in a version that the project takes, and whether packages contradict each other.

    Args:
        requirements: by name of an installed package, what it asks for; `own` is this project's name among them.
        optional: packages that this run does not use: that one is missing is a warning.
    """
    wrong: list[str] = []
    lacking: list[str] = []
    for text in requirements.get(own, ()):
        problem = _problem(text, versions)
        if problem is not None:
            (lacking if canonicalize_name(Requirement(text).name) in optional else wrong).append(problem)
    found = []
    if wrong:
        found.append(
            failed("packages", "; ".join(wrong), "make setup (with VENV=: install them into that environment)")
        )
    if lacking:
        found.append(
            warned("packages", f"{'; '.join(lacking)} (this run does not use it)", "make setup, before a run that does")
        )
    if not found:
        shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
        found.append(passed("packages", shown) if requirements.get(own) else skipped("packages", f"{shown}: no ranges"))
    return [*found, _among_each_other(versions, requirements, own)]


def _among_each_other(versions: Mapping[str, str], requirements: Mapping[str, Sequence[str]], own: str) -> Finding:
    asked = 0
    problems: list[str] = []
    for name, texts in sorted(requirements.items()):
        if name == own:
            continue
        asked += 1
        problems += [
            f"{name} {versions.get(name, '?')}: {problem}" for text in texts if (problem := _problem(text, versions))
        ]
    if problems:
        return warned("packages together", "; ".join(problems),
                      "make setup installs a set of versions that was tested together")  # fmt: skip
    return passed("packages together", f"what {asked} packages ask of each other holds")


def _problem(text: str, versions: Mapping[str, str]) -> str | None:
    """What is wrong with a requirement, in words; None where it holds or is about another platform or an extra."""
    try:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            return None
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None
    found = versions.get(canonicalize_name(wanted.name))
    if found is None:
        return f"{wanted.name}{wanted.specifier} is missing"
    return None if _is_in(found, str(wanted.specifier)) else f"{wanted.name} is {found}, wanted {wanted.specifier}"


def _is_in(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True  # a version of somebody's own making cannot be judged
