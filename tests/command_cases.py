"""The commands, a row for each: what it is asked in the tests that ask every one, and what it answers.

A new command gets a row here, and nothing else in the tests but those of its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# What docs/schema/train.json promises of a run's summary, and where the run is.
SUMMARY = {"run", "before", "after", "peak_bytes", "tokens_per_s", "steps", "wall_s", "exit"}


@dataclass(frozen=True)
class CommandCase:
    """One command in the tests that go through all of them."""

    words: Callable[[Path], Sequence[str]]
    """The words that make it answer in the folder of `tests/test_commands.py`."""
    fields: set[str]
    """Fields of its answer (of each row, where it is a list)."""
    takes_minutes: bool = False
    has_schema: bool = True
    """False where docs/schema has none: its answer then has the fields of `ending` alone."""
    can_refuse: bool = True
    """False where it has nothing to refuse, or works on what it finds."""
    refusals: tuple[tuple[str, dict[str, str]], ...] = ()
    """A part of the message, and the variables, of what it refuses without loading a library; the commands of before
    have theirs in `tests/test_refusals.py`."""
    next_commands: tuple[tuple[Callable[[], Any], list[str]], ...] = ()
    """Answers, and the words that each says come next; every command after training has some, but `chat`."""


def a_run(name: str, *more: str) -> list[str]:
    return ["train.max_steps=2", f"output.name={name}", *more]


# --- answers of commands after training, made by hand -----------------------------------------------------------------

RUN = Path("/my outputs/first")
OTHER = Path("/my outputs/else where")


def infer() -> Any:
    from sft_play.finished.respond import InferResult

    return InferResult(RUN, OTHER, 3, 0)


def serve() -> Any:
    from sft_play.finished.serve import ServedEndpoint

    return ServedEndpoint(RUN, "transformers", "first", RUN / "adapter", "127.0.0.1", 8000, 1)


def evaluate() -> Any:
    from sft_play.finished.evaluation import EvalRows, Evaluation

    return Evaluation(RUN, EvalRows(), 0, (), (), {"before": None}, None, OTHER)


def ship(*, reason: str = "") -> Any:
    from sft_play.finished.ship import (
        Evidence,
        GeneralEvidence,
        MergeEvidence,
        ShipCheck,
        ShipResult,
        ShipVerdict,
        TaskEvidence,
        Thresholds,
    )

    evidence = Evidence(TaskEvidence("test"), GeneralEvidence(), MergeEvidence("no adapter"))
    verdict = ShipVerdict((ShipCheck("task", not reason, "it is better", reason),))
    return ShipResult(RUN, evidence, Thresholds(), verdict, {"before": None})


def merge(path: Path = RUN / "merged") -> Any:
    from sft_play.finished.export.merge import MergeResult

    return MergeResult(RUN, path, "bf16", None, 3, False, 10, 1.0)


def merge_test(path: Path = RUN / "merged", *, divergence: float = 0.0) -> Any:
    from sft_play.finished.export.checks import MergeTest

    loss = {"adapter": 1.0, "merged": 1.0, "base": 2.0}
    return MergeTest(RUN, path, "val", 1, 1, divergence, 1.0, 1e-6, loss)


def export(file: str | None = "first.gguf", *, path: Path = RUN / "export" / "gguf", is_adapter: bool = True) -> Any:
    from sft_play.finished.export.export import ExportResult

    written = path / file if file else None
    merge = "Merged (bf16)" if is_adapter else None
    return ExportResult(RUN, "gguf" if file else "vllm", path, 1, (), file=written, merge=merge)


def export_test() -> Any:
    from sft_play.finished.export.checks import ExportTest

    return ExportTest(RUN, RUN / "first.gguf", ("F32",), "val", 1, (), None, None)


def push() -> Any:
    from sft_play.finished.export.push import Upload

    return Upload(RUN, RUN / "adapter", "me/it", {}, repo_exists=False, is_private=True, notes=(), commit="abc")


def record() -> Any:
    from sft_play.finished.report import RunPart, RunRecord
    from sft_play.runs.folder import RunFolder

    return RunRecord(RunFolder(RUN), "finished", {}, {}, {}, (RunPart(None, {}, {}, {}),), ())


def report() -> Any:
    from sft_play.finished.report import RunReport

    return RunReport(record(), OTHER, (), ())


def compare() -> Any:
    from sft_play.finished.report import Comparison

    return Comparison(("first", "other"), (record(), record()), {}, {}, OTHER)


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


COMMAND_CASES: dict[str, CommandCase] = {
    "train": CommandCase(lambda world: a_run("alone"), SUMMARY),
    "resume": CommandCase(lambda world: ["--run", "begun", *a_run("begun")], SUMMARY),
    "train-distributed": CommandCase(lambda world: ["--nproc", "2", "--strategy", "ddp", *a_run("two")], SUMMARY),
    "train-deepspeed": CommandCase(lambda world: ["--nproc", "2", *a_run("zero")], SUMMARY, takes_minutes=True),
    "launch-command": CommandCase(lambda world: ["--nproc", "2"], {"launch", "plan"}),
    "setup-accelerate": CommandCase(lambda world: ["--force"], {"ok", "path", "text"}, can_refuse=False),
    "new": CommandCase(lambda world: ["--model", "MODEL", "--data", "rows.jsonl"], {"ok", "path", "settings", "next"}),
    "plan": CommandCase(
        lambda world: ["--hardware", "2xH200"], {"fits", "layout", "peak_bytes", "candidates", "ways_out"}
    ),
    "launch-file": CommandCase(
        lambda world: ["--for", "slurm", "--hardware", "2xH100", "--out", f"{world}/job.sbatch"],
        {"path", "for", "launch", "text", "submit", "nodes", "gpus_per_node"},
    ),
    "sweep": CommandCase(
        lambda world: ["train.learning_rate=1e-3,1e-2", "train.max_steps=1", "output.name=cell"],
        {"ok", "cells", "compare"},
    ),
    "memory-model-score": CommandCase(
        lambda world: ["--peaks", f"{world}/peaks.csv"], {"rows", "not_expressible", "summary"}
    ),
    "verify-layouts": CommandCase(
        lambda world: ["--layouts", "ddp", "--modes", "lora", "--steps", "2"], {"rows", "ok"}, takes_minutes=True
    ),
    "gpu-selftest": CommandCase(
        lambda world: [], {"machine", "versions", "date", "parts"}, takes_minutes=True, can_refuse=False
    ),
    "bench": CommandCase(
        lambda world: ["--peer", "bare", "--steps", "1", "--warmup", "1", "--rounds", "1"],
        {"machine", "versions", "date", "medians", "ratios", "same_work", "runs"},
    ),
    "tensorboard": CommandCase(lambda world: [], {"ok", "page", "logdir", "host", "port", "pid"}, can_refuse=False),
    "tb-open": CommandCase(lambda world: [], {"ok", "page", "opened"}, can_refuse=False),
    "tb-stop": CommandCase(lambda world: [], {"ok", "stopped", "running"}, can_refuse=False),
    "tb-clean": CommandCase(lambda world: ["--yes"], {"ok", "removed", "freed_bytes"}, can_refuse=False),
    "doctor": CommandCase(lambda world: ["--nproc", "2"], {"ok", "elapsed_s", "findings"}),
    "consolidate": CommandCase(lambda world: ["--run", "begun", "--out", f"{world}/whole"], {"ok", "run", "path"}),
    "chat": CommandCase(lambda world: ["--run", "whole", "--max-new-tokens", "2"], {"ok", "run", "messages"}),
    "infer": CommandCase(
        lambda world: ["--run", "whole", "--input", "rows.jsonl", "--max-new-tokens", "2"],
        {"ok", "path", "prompts"},
        next_commands=((infer, ["make", "eval", f"RUN={RUN}"]),),
    ),
    "serve": CommandCase(
        lambda world: ["--run", "whole", "--port", "0"],
        {"ok", "url", "model", "pid"},
        next_commands=((serve, ["make", "push", f"RUN={RUN}", "REPO=user/name"]),),
    ),
    "eval": CommandCase(
        lambda world: ["--run", "whole", "--data", "rows.jsonl", "--limit", "2", "--max-new-tokens", "2"],
        {"ok", "rows", "figures", "perplexity", "path"},
        next_commands=((evaluate, ["make", "ship", f"RUN={RUN}"]),),
    ),
    "ship": CommandCase(
        lambda world: ["--run", "whole", "--limit", "2"],
        {"ok", "verdict", "checks", "evidence", "thresholds"},
        next_commands=(
            (ship, ["make", "export", f"RUN={RUN}", "FORMAT=gguf"]),
            (lambda: ship(reason="it is worse"), ["make", "eval", f"RUN={RUN}", "writes", "every", "row"]),
        ),
    ),
    "merge": CommandCase(
        lambda world: ["--run", "whole"],
        {"ok", "path", "dtype", "layers"},
        next_commands=(
            (merge, ["make", "merge-test", f"RUN={RUN}"]),
            (lambda: merge(OTHER), ["make", "merge-test", f"RUN={RUN}", f"OUT={OTHER}"]),
        ),
    ),
    "merge-test": CommandCase(
        lambda world: ["--run", "whole", "--limit", "2", "--out", "merged"],
        {"ok", "kl_merged", "kl_base", "loss"},
        next_commands=(
            (merge_test, ["make", "serve", f"RUN={RUN}", "ENGINE=vllm"]),
            (lambda: merge_test(OTHER), ["vllm", "serve", str(OTHER)]),
            (
                lambda: merge_test(divergence=1.0),
                ["make", "merge", f"RUN={RUN}", "FORCE=1", "with", "BASE=dequantized"],
            ),
        ),
    ),
    "export": CommandCase(
        lambda world: ["--run", "whole", "--format", "vllm"],
        {"ok", "format", "path", "commands"},
        next_commands=(
            (export, ["make", "export-test", f"RUN={RUN}"]),
            (lambda: export(path=OTHER), ["make", "export-test", f"RUN={RUN}", f"OUT={OTHER}"]),
            (lambda: export(None), ["make", "merge-test", f"RUN={RUN}"]),
            (lambda: export(None, is_adapter=False), ["make", "push", f"RUN={RUN}", "REPO=user/name"]),
        ),
    ),
    "export-test": CommandCase(
        lambda world: ["--run", "whole", "--limit", "2", "--out", "exported"],
        {"ok", "checks", "answers", "kl_base"},
        next_commands=((export_test, ["llama-server", "--jinja", "-m", str(RUN / "first.gguf")]),),
    ),
    "push": CommandCase(
        lambda world: ["--run", "whole", "--repo", "me/it", "--yes"],
        {"ok", "pushed", "repo", "files", "private"},
        next_commands=((push, ["make", "prune", "RUNS=first", "CHECKPOINTS=1"]),),
    ),
    "report": CommandCase(
        lambda world: ["--run", "whole"],
        {"ok", "run", "path", "status", "sections", "figures", "warnings"},
        next_commands=((report, ["make", "compare", f"RUNS={RUN} OTHER"]),),
    ),
    "compare": CommandCase(
        lambda world: ["--runs", "whole begun"],
        {"ok", "path", "runs", "differing"},
        next_commands=((compare, ["make", "report", f"RUN={RUN}"]),),
    ),
    "reproduce": CommandCase(
        lambda world: ["--run", "whole"],
        {"ok", "tensors", "first_differing"},
        next_commands=(
            (reproduce, ["make", "prune", "RUNS=else where"]),
            (lambda: reproduce("weight"), ["make", "compare", "RUNS=first else where"]),
        ),
    ),
    "runs": CommandCase(
        lambda world: [],
        {"ok", "output", "runs"},
        can_refuse=False,
        next_commands=((runs, ["make", "report", f"RUN={RUN}"]), (lambda: runs(is_empty=True), ["make", "train"])),
    ),
    "prune": CommandCase(
        lambda world: ["--runs", "old", "--yes"],
        {"ok", "removed", "freed_bytes"},
        next_commands=((prune, ["make", "runs"]),),
    ),
    "gpu-info": CommandCase(lambda world: [], {"gpus", "host"}, can_refuse=False),
    "memory-check": CommandCase(lambda world: [], {"folder", "running"}),
    "process": CommandCase(lambda world: ["data.process.raw_path=raw.jsonl"], {"ok"}),
    "style": CommandCase(lambda world: ["--style", "You are terse.", "data.process.out_dir=given"], {"ok"}),
    "dapt-docx": CommandCase(lambda world: ["data.documents.path=documents"], {"chunk_chars", "splits"}),
    "render": CommandCase(lambda world: [], {"ok", "files", "notes"}),
    "preview": CommandCase(lambda world: ["--n", "2"], {"ok", "page", "source", "rows", "examples"}),
    "check": CommandCase(lambda world: [], {"ok", "elapsed_s", "checks"}),
    "full-pipeline": CommandCase(
        lambda world: ["--force", "data.process.raw_path=raw.jsonl"], {"ok", "steps", "stopped"}
    ),
    "mask-score": CommandCase(
        lambda world: ["--templates", f"{world}/templates", "--tokenizer", "MODEL"],
        {"template", "case", "method", "verdict", "reason"},
    ),
    "run-notebook": CommandCase(
        lambda world: ["--notebook", f"{world}/work.ipynb", "--nproc", "2"], {"ok", "cells", "ranks"}
    ),
    "generate": CommandCase(lambda world: [], {"ok", "written"}, can_refuse=False),
}
