"""The code that a run was trained by: this checkout where it is unchanged, else a clone of the recorded commit."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.errors import RunFolderError
from sft_play.log import one_line
from sft_play.runs.manifest import PACKAGE, code_facts, git_answer


@contextlib.contextmanager
def code_of(
    manifest: Mapping[str, Any], *, package: Path = PACKAGE, by_this_code: bool = False
) -> Iterator[tuple[Path, str]]:
    """The folder that holds the package as the run used it, and where it comes from: this one, or a clone of the
    recorded commit, which is removed afterwards.

    `by_this_code`: where neither is the recorded code, this one all the same.

    Raises:
        RunFolderError: neither is the recorded code.
    """
    recorded, now = manifest.get("code") or {}, code_facts(package)
    git = recorded.get("git") or ({} if recorded else manifest.get("git")) or {}
    commit, digest = git.get("commit"), recorded.get("sha256")
    at = f"commit {str(commit)[:12]}{', with changes' if git.get('dirty') else ''}" if commit else "no commit"
    if digest == now["sha256"]:
        yield package.parent, f"{package.parent}, unchanged since the run ({at})"
        return
    with contextlib.ExitStack() as held:
        try:
            place, words = held.enter_context(_cloned(package, commit, digest, at))
        except RunFolderError as error:
            if not by_this_code:
                raise RunFolderError(f"{error}; FORCE=1 trains by the present code all the same") from None
            place, words = package.parent, f"{package.parent}, which is not the run's ({at})"
        yield place, words


@contextlib.contextmanager
def _cloned(package: Path, commit: str | None, digest: str | None, at: str) -> Iterator[tuple[Path, str]]:
    """A clone of this checkout at a commit, while it is used; raises RunFolderError where that is not the code."""
    root = git_answer(package, "rev-parse", "--show-toplevel")
    if commit is None or root is None or git_answer(package, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        where = f"{root} does not have" if root else f"{package.parent}, which is no checkout, does not have"
        raise RunFolderError(f"the run was trained by other code than this, which {where}: {at}")
    with tempfile.TemporaryDirectory(prefix="sft-play-") as folder:
        clone = Path(folder) / "clone"
        for words in (["clone", "--quiet", "--shared", "--no-checkout", root, str(clone)],
                      ["-C", str(clone), "checkout", "--quiet", "--detach", commit]):  # fmt: skip
            done = subprocess.run(["git", *words], capture_output=True, text=True)
            if done.returncode:
                raise RunFolderError(f"commit {commit} of {root} cannot be cloned: {one_line(done.stderr, limit=300)}")
        theirs = clone / package.relative_to(root)
        if digest not in (None, code_facts(theirs)["sha256"]):
            raise RunFolderError(f"the run was trained by other code than this, {at}, and the changes are not recorded")
        note = "; what was changed in it is not recorded" if digest is None and "changes" in at else ""
        yield theirs.parent, f"a clone of {root} at commit {commit[:12]}{note}"
