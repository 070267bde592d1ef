"""The text report that a person can send: a line for every part, and for those that failed what to report."""

from __future__ import annotations

from benchmarks.gpu_selftest.part import DEFERRED_REASON, Part, SelftestRecord
from sft_play.log import one_line
from sft_play.machine.software import COMPUTE_PACKAGES

WORDS = {"pass": "PASS", "fail": "FAIL", "skipped": "SKIP"}


def line_of(part: Part) -> str:
    """A part as a line."""
    return f"{WORDS[part.status]}  {part.name:<34} {one_line(part.reason, limit=400)}"


def page_lines(book: SelftestRecord) -> list[str]:
    """The text report."""
    gpus = [gpu["name"] for gpu in book.machine["gpus"]]
    machine = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    versions = ", ".join(f"{name} {book.versions[name]}" for name in COMPUTE_PACKAGES if book.versions.get(name))
    about = f"{machine}; {book.machine['cpu_name']}, {book.machine['cpu_cores']} cores, " \
            f"{book.machine['ram_bytes'] / 2**30:.0f} GiB"  # fmt: skip
    head = f"sft_play {book.versions['sft_play']}, Python {book.versions['python']}, {versions}"
    return [f"gpu-selftest of {book.as_json()['date']}", about, head, "", *map(line_of, book.parts.values()), "",
            *result_lines(book)]  # fmt: skip


def result_lines(book: SelftestRecord) -> list[str]:
    """The summary, and what to report."""
    count = {status: sum(part.status == status for part in book.parts.values()) for status in WORDS}
    took = f"{book.seconds / 60:.1f} min"
    lines = [f"{count['pass']} parts pass, {count['fail']} fail, {count['skipped']} are left out ({took}); {book.path}"]
    if any(part.reason == DEFERRED_REASON for part in book.parts.values()):
        lines.append(f"The same command with OUT={book.path} continues with what there was no time for")
    if book.failed_parts:
        lines.append(
            f"Report each part that fails in the project's issue tracker, with {book.path.name}, {book.page.name} and "
            "its log:"
        )
        gpus = book.machine["gpus"]
        device = gpus[0]["name"] if gpus else "the CPU"
        lines += [f"  gpu-selftest: {part.name} fails on {device} ({part.log or 'no log'})"
                  for part in book.failed_parts]  # fmt: skip
    return lines
