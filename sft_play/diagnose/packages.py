"""Python and packages compared with what this project requires, and with what they require of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from sft_play.facts.installed import COMPUTING
from sft_play.findings import Finding, failed, passed, skipped, warned


def check_python(python: str, wanted: str) -> Finding:
    """The running Python compared with the project's `requires-python`."""
    if not wanted:
        return skipped("Python", f"{python}; the project's supported range was not found")
    if _is_in(python, wanted):
        return passed("Python", f"{python} ({wanted})")
    return failed("Python", f"{python}, and the project needs {wanted}",
                  "make setup PYTHON=/path/to/a/python of that range")  # fmt: skip


def check_packages(
    versions: Mapping[str, str], requirements: Mapping[str, Sequence[str]], *, own: str, optional: frozenset[str]
) -> list[Finding]:
    """Whether every package is installed in a version that the project accepts, and whether packages contradict each
    other.

    Args:
        requirements: by name of an installed package, what it asks for; `own` is this project's name among them.
        optional: packages that this run does not use; a missing one is only a warning.
    """
    needed: list[str] = []
    unused: list[str] = []
    for text in requirements.get(own, ()):
        problem = _problem(text, versions)
        if problem is not None:
            (unused if canonicalize_name(Requirement(text).name) in optional else needed).append(problem)
    findings = []
    if needed:
        findings.append(
            failed("packages", "; ".join(needed), "make setup (with VENV=: install them into that environment)")
        )
    if unused:
        findings.append(
            warned("packages", f"{'; '.join(unused)} (this run does not use it)", "make setup, before a run that does")
        )
    if not findings:
        shown = ", ".join(f"{name} {versions[name]}" for name in COMPUTING if name in versions)
        findings.append(
            passed("packages", shown) if requirements.get(own) else skipped("packages", f"{shown}: no ranges")
        )
    others = sorted((name, texts) for name, texts in requirements.items() if name != own)
    problems = [
        f"{name} {versions.get(name, '?')}: {problem}"
        for name, texts in others
        for text in texts
        if (problem := _problem(text, versions))
    ]
    if problems:
        return [*findings, warned("packages together", "; ".join(problems),
                                  "make setup installs a set of versions that was tested together")]  # fmt: skip
    return [*findings, passed("packages together", f"{len(others)} packages meet each other's requirements")]


def check_kernels(slow: Mapping[str, str]) -> list[Finding]:
    """A warning for each package whose kernels the model would run if it were installed (`slow_code.missing_words`)."""
    return [
        warned(f"kernels of {name}", words, f"pip install {name}, into the environment that trains; it needs CUDA")
        for name, words in slow.items()
    ]


def _problem(text: str, versions: Mapping[str, str]) -> str | None:
    """What is wrong with a requirement, in words; None if it is met, or is for another platform or an extra."""
    try:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate(
            {"extra": ""}
        ):  # no extra: `; extra == "dev"` is out
            return None
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None
    installed = versions.get(canonicalize_name(wanted.name))
    if installed is None:
        return f"{wanted.name}{wanted.specifier} is missing"
    return (
        None if _is_in(installed, str(wanted.specifier)) else f"{wanted.name} is {installed}, needed {wanted.specifier}"
    )


def _is_in(version: str, wanted: str) -> bool:
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)  # nightlies of torch are pre-releases
    except (InvalidSpecifier, InvalidVersion):
        return True  # a version of somebody's own build cannot be compared
