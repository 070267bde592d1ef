"""The commands, a row for each: what it is asked in the tests that ask every one, and what it answers.

A new command gets a row here, and nothing else in the tests but those of its own work.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# What docs/schema/train.json promises of a run's summary, and where the run is.
SUMMARY = "run before after peak_bytes tokens_per_s steps wall_s exit"


@dataclass(frozen=True)
class CommandCase:
    """One command in the tests that go through all of them."""

    words: str
    """What makes it answer in the folder of `tests/test_commands.py`, which is {world}, on the model {model}."""
    fields: str
    """Fields of its answer (of each row, where it is a list)."""
    takes_minutes: bool = False
    can_refuse: bool = True
    """False where it has nothing to refuse, or works on what it finds."""
    refusals: tuple[tuple[str, dict[str, str]], ...] = ()
    """A part of the message, and the variables, of what it refuses without loading a library; the commands of before
    have theirs in `tests/test_refusals.py`."""
    next_commands: tuple[tuple[Callable[[], Any], list[str]], ...] = ()
    """Answers, and the words that each says come next; every command after training has some, but `chat`."""


RUN = Path("/my outputs/first")
OTHER = Path("/my outputs/else where")
OF_RUN = f"RUN={RUN}"
TRAINED = "train.max_steps=2 output.name="


def answer(name: str, *values: Any, **options: Any) -> Callable[[], Any]:
    """A function that makes an answer of `sft_play.finished` by hand, which imports its module then."""
    module, _, kind = name.rpartition(".")
    return lambda: getattr(importlib.import_module(f"sft_play.finished.{module}"), kind)(*values, **options)


def evaluate() -> Any:
    from sft_play.finished.evaluation import EvalRows, Evaluation

    return Evaluation(RUN, EvalRows(), 0, (), (), {"before": None}, None, OTHER)


def ship(*, reason: str = "") -> Any:
    from sft_play.finished import ship as shipping

    task, general = shipping.TaskEvidence("test"), shipping.GeneralEvidence()
    evidence = shipping.Evidence(task, general, shipping.MergeEvidence("no adapter"))
    verdict = shipping.ShipVerdict((shipping.ShipCheck("task", not reason, "it is better", reason),))
    return shipping.ShipResult(RUN, evidence, shipping.Thresholds(), verdict, {"before": None})


def merge(path: Path) -> Callable[[], Any]:
    return answer("export.merge.MergeResult", RUN, path, "bf16", None, 3, False, 10, 1.0)


def merge_test(path: Path = RUN / "merged", *, divergence: float = 0.0) -> Callable[[], Any]:
    loss = {"adapter": 1.0, "merged": 1.0, "base": 2.0}
    return answer("export.checks.MergeTest", RUN, path, "val", 1, 1, divergence, 1.0, 1e-6, loss)


def export(*, path: Path = RUN / "export" / "gguf", kind: str = "gguf", is_adapter: bool = True) -> Callable[[], Any]:
    file = path / "first.gguf" if kind == "gguf" else None
    merged = "Merged (bf16)" if is_adapter else None
    return answer("export.export.ExportResult", RUN, kind, path, 1, (), file=file, merge=merged)


def push() -> Any:
    from sft_play.finished.export.push import Upload

    return Upload(RUN, RUN / "adapter", "me/it", {}, repo_exists=False, is_private=True, notes=(), commit="abc")


def record() -> Any:
    from sft_play.finished.report import RunPart, RunRecord
    from sft_play.runs.folder import RunFolder

    return RunRecord(RunFolder(RUN), "finished", {}, {}, {}, (RunPart(None, {}, {}, {}),), ())


def report() -> Any:
    return answer("report.RunReport", record(), OTHER, (), ())()


def compare() -> Any:
    return answer("report.Comparison", ("first", "other"), (record(), record()), {}, {}, OTHER)()


def reproduce(*differing: str) -> Callable[[], Any]:
    return answer("reproduce.ReproduceResult", RUN, OTHER, "here", 1, dict.fromkeys(differing, 0.1), 1)


def runs(*, is_empty: bool = False) -> Any:
    from sft_play.finished.listing import ListedRun, RunList

    listed = ListedRun(RUN.name, RUN, "base", "lora", "finished", 3, None, None, None, None, 10, 0, None)
    return RunList(RUN.parent, () if is_empty else (listed,), datetime.now(UTC))


COMMAND_CASES: dict[str, CommandCase] = {
    "train": CommandCase(f"{TRAINED}alone", SUMMARY),
    "resume": CommandCase(f"--run begun {TRAINED}begun", SUMMARY),
    "train-distributed": CommandCase(f"--nproc 2 --strategy ddp {TRAINED}two", SUMMARY),
    "train-deepspeed": CommandCase(f"--nproc 2 {TRAINED}zero", SUMMARY, takes_minutes=True),
    "launch-command": CommandCase("--nproc 2", "launch plan"),
    "setup-accelerate": CommandCase("--force", "ok path text", can_refuse=False),
    "new": CommandCase("--model {model} --data rows.jsonl", "ok path settings next"),
    "plan": CommandCase("--hardware 2xH200", "fits layout peak_bytes candidates ways_out"),
    "launch-file": CommandCase("--for slurm --hardware 2xH100 --out {world}/job.sbatch",
                               "path for launch text submit nodes gpus_per_node"),
    "sweep": CommandCase("train.learning_rate=1e-3,1e-2 train.max_steps=1 output.name=cell", "ok cells compare"),
    "memory-model-score": CommandCase("--peaks {world}/peaks.csv", "rows not_expressible summary"),
    "verify-layouts": CommandCase("--layouts ddp --modes lora --steps 2", "rows ok", takes_minutes=True),
    "gpu-selftest": CommandCase("", "machine versions date parts", takes_minutes=True, can_refuse=False),
    "bench": CommandCase("--peer bare --steps 1 --warmup 1 --rounds 1",
                         "machine versions date medians ratios same_work runs"),
    "tensorboard": CommandCase("", "ok page logdir host port pid", can_refuse=False),
    "tb-open": CommandCase("", "ok page opened", can_refuse=False),
    "tb-stop": CommandCase("", "ok stopped running", can_refuse=False),
    "tb-clean": CommandCase("--yes", "ok removed freed_bytes", can_refuse=False),
    "doctor": CommandCase("--nproc 2", "ok elapsed_s findings"),
    "consolidate": CommandCase("--run begun --out {world}/whole", "ok run path"),
    "chat": CommandCase("--run whole --max-new-tokens 2", "ok run messages"),
    "infer": CommandCase("--run whole --input rows.jsonl --max-new-tokens 2", "ok path prompts",
                         next_commands=((answer("respond.InferResult", RUN, OTHER, 3, 0), ["make", "eval", OF_RUN]),)),
    "serve": CommandCase("--run whole --port 0", "ok url model pid", next_commands=(
        (answer("serve.ServedEndpoint", RUN, "transformers", "first", RUN / "adapter", "127.0.0.1", 8000, 1),
         ["make", "push", OF_RUN, "REPO=user/name"]),
    )),
    "eval": CommandCase("--run whole --data rows.jsonl --limit 2 --max-new-tokens 2", "ok rows figures perplexity path",
                        next_commands=((evaluate, ["make", "ship", OF_RUN]),)),
    "ship": CommandCase("--run whole --limit 2", "ok verdict checks evidence thresholds", next_commands=(
        (ship, ["make", "export", OF_RUN, "FORMAT=gguf"]),
        (lambda: ship(reason="it is worse"), ["make", "eval", OF_RUN, "writes", "every", "row"]),
    )),
    "merge": CommandCase("--run whole", "ok path dtype layers", next_commands=(
        (merge(RUN / "merged"), ["make", "merge-test", OF_RUN]),
        (merge(OTHER), ["make", "merge-test", OF_RUN, f"OUT={OTHER}"]),
    )),
    "merge-test": CommandCase("--run whole --limit 2 --out merged", "ok kl_merged kl_base loss", next_commands=(
        (merge_test(), ["make", "serve", OF_RUN, "ENGINE=vllm"]),
        (merge_test(OTHER), ["vllm", "serve", str(OTHER)]),
        (merge_test(divergence=1.0), ["make", "merge", OF_RUN, "FORCE=1", "with", "BASE=dequantized"]),
    )),
    "export": CommandCase("--run whole --format vllm", "ok format path commands", next_commands=(
        (export(), ["make", "export-test", OF_RUN]),
        (export(path=OTHER), ["make", "export-test", OF_RUN, f"OUT={OTHER}"]),
        (export(kind="vllm"), ["make", "merge-test", OF_RUN]),
        (export(kind="vllm", is_adapter=False), ["make", "push", OF_RUN, "REPO=user/name"]),
    )),
    "export-test": CommandCase("--run whole --limit 2 --out exported", "ok checks answers kl_base", next_commands=(
        (answer("export.checks.ExportTest", RUN, RUN / "first.gguf", ("F32",), "val", 1, (), None, None),
         ["llama-server", "--jinja", "-m", str(RUN / "first.gguf")]),
    )),
    "push": CommandCase("--run whole --repo me/it --yes", "ok pushed repo files private",
                        next_commands=((push, ["make", "prune", "RUNS=first", "CHECKPOINTS=1"]),)),
    "report": CommandCase("--run whole", "ok run path status sections figures warnings",
                          next_commands=((report, ["make", "compare", f"RUNS={RUN} OTHER"]),)),
    "compare": CommandCase("--runs 'whole begun'", "ok path runs differing",
                           next_commands=((compare, ["make", "report", OF_RUN]),)),
    "reproduce": CommandCase("--run whole", "ok tensors first_differing", next_commands=(
        (reproduce(), ["make", "prune", "RUNS=else where"]),
        (reproduce("weight"), ["make", "compare", "RUNS=first else where"]),
    )),
    "runs": CommandCase("", "ok output runs", can_refuse=False, next_commands=(
        (runs, ["make", "report", OF_RUN]), (lambda: runs(is_empty=True), ["make", "train"]),
    )),
    "prune": CommandCase("--runs old --yes", "ok removed freed_bytes",
                         next_commands=((answer("listing.PruneResult", (RUN,), 10), ["make", "runs"]),)),
    "gpu-info": CommandCase("", "gpus host", can_refuse=False),
    "memory-check": CommandCase("", "folder running"),
    "process": CommandCase("data.process.raw_path=raw.jsonl", "ok"),
    "style": CommandCase("--style 'You are terse.' data.process.out_dir=given", "ok"),
    "dapt-docx": CommandCase("data.documents.path=documents", "chunk_chars splits"),
    "render": CommandCase("", "ok files notes"),
    "preview": CommandCase("--n 2", "ok page source rows examples"),
    "check": CommandCase("", "ok elapsed_s checks"),
    "full-pipeline": CommandCase("--force data.process.raw_path=raw.jsonl", "ok steps stopped"),
    "mask-score": CommandCase("--templates {world}/templates --tokenizer {model}",
                              "template case method verdict reason"),
    "run-notebook": CommandCase("--notebook {world}/work.ipynb --nproc 2", "ok cells ranks"),
    "generate": CommandCase("", "ok written", can_refuse=False),
}  # fmt: skip
