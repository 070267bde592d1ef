"""Each command for a finished run ends by naming the next one, as words of a shell."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RUN = Path("/my outputs/first")
OTHER = Path("/my outputs/else where")


def infer() -> Any:
    from sft_play.finished.infer import InferResult

    return InferResult(RUN, OTHER, 3, 0)


def serve() -> Any:
    from sft_play.finished.serve import ServedEndpoint

    return ServedEndpoint(RUN, "transformers", "first", RUN / "adapter", "127.0.0.1", 8000, 1)


def evaluate() -> Any:
    from sft_play.finished.evaluation import Evaluation

    return Evaluation(RUN, None, 0, (), (), {"before": None}, None, OTHER)


def ship(*, reason: str = "") -> Any:
    from sft_play.finished.ship import ShipResult
    from sft_play.finished.ship_rule import (
        Evidence,
        GeneralEvidence,
        MergeEvidence,
        ShipCheck,
        ShipVerdict,
        TaskEvidence,
        Thresholds,
    )

    evidence = Evidence(TaskEvidence("test"), GeneralEvidence(), MergeEvidence("no adapter"))
    verdict = ShipVerdict((ShipCheck("task", not reason, "it is better", reason),))
    return ShipResult(RUN, evidence, Thresholds(), verdict, {"before": None})


def merge(path: Path = RUN / "merged") -> Any:
    from sft_play.finished.export.merge import MergeResult

    return MergeResult(RUN, path, "bf16", None, 3, False, 10, True, 1.0)


def merge_test(path: Path = RUN / "merged", *, divergence: float = 0.0) -> Any:
    from sft_play.finished.export.check_merge import MergeTest

    loss = {"adapter": 1.0, "merged": 1.0, "base": 2.0}
    return MergeTest(RUN, path, "val", 1, 1, divergence, 1.0, 1e-6, loss)


def export(file: str | None = "first.gguf", *, path: Path = RUN / "export" / "gguf", is_adapter: bool = True) -> Any:
    from sft_play.finished.export.export import ExportResult

    written = path / file if file else None
    merge = "Merged (bf16)" if is_adapter else None
    return ExportResult(RUN, "gguf" if file else "vllm", path, 1, (), file=written, merge=merge)


def export_test() -> Any:
    from sft_play.finished.export.check_export import ExportTest

    return ExportTest(RUN, RUN / "first.gguf", ("F32",), "val", 1, (), None, None)


def push() -> Any:
    from sft_play.finished.export.push import PushResult, Upload

    return PushResult(Upload(RUN, RUN / "adapter", "me/it", {}, repo_exists=False, is_private=True, notes=()), "abc")


def record() -> Any:
    from sft_play.finished.record import RunPart, RunRecord
    from sft_play.runs.folder import RunFolder

    return RunRecord(RunFolder(RUN), "finished", {}, {}, {}, (RunPart(None, {}, {}, {}, {}, {}),), ())


def report() -> Any:
    from sft_play.finished.report import RunReport

    return RunReport(record(), OTHER, (), 0, None)


def compare() -> Any:
    from sft_play.finished.compare import Comparison

    return Comparison(("first", "other"), (record(), record()), {}, (), OTHER, None)


def reproduce(*differing: Any) -> Any:
    from sft_play.finished.reproduce import ReproduceResult

    return ReproduceResult(RUN, OTHER, "here", 1, dict.fromkeys(differing, 0.1), 1)


def runs(*, is_empty: bool = False) -> Any:
    from sft_play.finished.listing import ListedRun, RunList

    listed = ListedRun(RUN.name, RUN, "base", "lora", "finished", 3, None, None, None, None, 10, 0, None)
    return RunList(RUN.parent, () if is_empty else (listed,), datetime.now(UTC))


def prune() -> Any:
    from sft_play.finished.listing import PruneResult

    return PruneResult((RUN,), 10)


ANSWERS: dict[str, list[tuple[Callable[[], Any], list[str]]]] = {
    "infer": [(infer, ["make", "eval", f"RUN={RUN}"])],
    "serve": [(serve, ["make", "push", f"RUN={RUN}", "REPO=user/name"])],
    "eval": [(evaluate, ["make", "ship", f"RUN={RUN}"])],
    "ship": [
        (ship, ["make", "export", f"RUN={RUN}", "FORMAT=gguf"]),
        (lambda: ship(reason="it is worse"), ["make", "eval", f"RUN={RUN}", "writes", "every", "row"]),
    ],
    "merge": [
        (merge, ["make", "merge-test", f"RUN={RUN}"]),
        (lambda: merge(OTHER), ["make", "merge-test", f"RUN={RUN}", f"OUT={OTHER}"]),
    ],
    "merge-test": [
        (merge_test, ["make", "serve", f"RUN={RUN}", "ENGINE=vllm"]),
        (lambda: merge_test(OTHER), ["vllm", "serve", str(OTHER)]),
        (lambda: merge_test(divergence=1.0), ["make", "merge", f"RUN={RUN}", "FORCE=1", "with", "BASE=dequantized"]),
    ],
    "export": [
        (export, ["make", "export-test", f"RUN={RUN}"]),
        (lambda: export(path=OTHER), ["make", "export-test", f"RUN={RUN}", f"OUT={OTHER}"]),
        (lambda: export(None), ["make", "merge-test", f"RUN={RUN}"]),
        (lambda: export(None, is_adapter=False), ["make", "push", f"RUN={RUN}", "REPO=user/name"]),
    ],
    "export-test": [(export_test, ["llama-server", "--jinja", "-m", str(RUN / "first.gguf")])],
    "push": [(push, ["make", "prune", "RUNS=first", "CHECKPOINTS=1"])],
    "report": [(report, ["make", "compare", f"RUNS={RUN} OTHER"])],
    "compare": [(compare, ["make", "report", f"RUN={RUN}"])],
    "reproduce": [
        (reproduce, ["make", "prune", "RUNS=else where"]),
        (lambda: reproduce("weight"), ["make", "compare", "RUNS=first else where"]),
    ],
    "runs": [
        (runs, ["make", "report", f"RUN={RUN}"]),
        (lambda: runs(is_empty=True), ["make", "train"]),
    ],
    "prune": [(prune, ["make", "runs"])],
}
"""Of each command, answers and the words that they say come next."""


def after_training() -> list[str]:
    """The commands of that group of make's help."""
    text = (ROOT / "Makefile").read_text()
    group = text[text.index("##@ After training") :].split("\n##@ ")[0]
    return re.findall(r"^([a-z-]+):.*## ", group, re.MULTILINE)


def test_every_command_after_training_is_in_the_table():
    assert sorted(after_training()) == sorted([*ANSWERS, "chat"])
    assert len(after_training()) == 15


@pytest.mark.parametrize("command", ANSWERS)
def test_an_answer_ends_by_naming_the_next_command(command):
    for answer, words in ANSWERS[command]:
        said = shlex.split(answer().lines()[-1].rpartition("Next: ")[2])
        assert said[: len(words)] == words
        assert "Next: " in answer().lines()[-1]


@pytest.mark.build
def test_a_chat_in_a_terminal_does_too_and_one_over_a_pipe_says_answers_alone(
    tmp_path, tiny_llama, command, monkeypatch
):
    from tests.finished_runs import finished_run

    folder = finished_run(tmp_path / "first", tiny_llama)
    monkeypatch.setattr("builtins.input", lambda prompt: "/exit")
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    assert "Next: " not in command("chat", "--run", str(folder))[1]
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, said = command("chat", "--run", str(folder))
    assert (code, said.rstrip().splitlines()[-1]) == (0, f"Next: make eval RUN={folder}")
