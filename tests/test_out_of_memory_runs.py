"""Memory that runs out in the middle of a run: it goes on, as a run that was planned with smaller micro-batches.

Where it cannot, its advice is what resume takes.
The error is injected: torch's own, raised by a pass (an evaluation, an answer, a checkpoint) with too many rows.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sft_play.config.load import LoadedConfig, config_from_text
from sft_play.launch.request import resume_constraints
from sft_play.planner.batching import BatchPlan, MicroBatches
from sft_play.planner.layout import PreviousRun
from sft_play.runs.folder import OOM_NOTE_FILE, OomEvent, RunFolder, check_same_run, new_manifest, read_oom_events
from sft_play.runs.lookup import create_run
from sft_play.text import GIB
from sft_play.training.checkpoints.checkpoints import checkpoint_path
from sft_play.training.loop.out_of_memory import StepMemory
from sft_play.training.loop.rows import EpochOrder, StepBatches
from sft_play.training.loop.trainer import PlannedTrainer
from sft_play.training.measure import exact_match
from sft_play.training.prepare import device_checks
from tests.ranks_micro_batches import trainer_of
from tests.test_distributed import succeed
from tests.test_train import assert_same_bits, losses, run_yaml, train, trained, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build
TWO_PASSES = ["train.batch_size=4", "train.grad_accum=2", "tuning.lora.dropout=0.1", "train.report_to=[tensorboard]"]
LACK = "CUDA out of memory. Tried to allocate 2.00 GiB"
Fits = Callable[[Any, int, bool], bool]
"""Whether a pass fits: the trainer, places (or rows) of the batch, whether it is trained on."""


def refuse(patch: pytest.MonkeyPatch, fits: Fits, *, error: Callable[[], BaseException] | None = None) -> list[int]:
    """Let passes that do not fit raise; returns the rows of each pass that did."""
    real, seen = PlannedTrainer.compute_loss, []

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        rows = len(inputs["labels"])
        if not fits(self, rows, model.training):
            raise error() if error else torch.OutOfMemoryError(LACK)
        seen.append(rows)
        return real(self, model, inputs, *args, **options)

    patch.setattr(PlannedTrainer, "compute_loss", compute_loss)
    return seen


def dropping(model: Path, folder: Path, cut: MicroBatches, *, bf16: bool) -> Any:
    """A trainer whose model drops activations at random, so that losses depend on every random number."""
    trainer = trainer_of(model, folder, cut, ranks=1, bf16=bf16)
    trainer.model.model.layers[0].mlp.register_forward_hook(
        lambda module, _, output: torch.nn.functional.dropout(output, 0.2, module.training)
    )
    return trainer


CUTS = {
    "rows": (MicroBatches(4), MicroBatches(2)),
    "all at once": (MicroBatches(4, tokens=4 * 48, overhead=2, single=True), MicroBatches(2, tokens=96, overhead=2)),
    "two passes": (MicroBatches(2), MicroBatches(1)),
    "tokens": (MicroBatches(2, tokens=96, overhead=5), MicroBatches(1, tokens=48, overhead=5)),
    "joined": (MicroBatches(2, tokens=96, padded=False), MicroBatches(1, tokens=48, padded=False)),
}


def figures(trainer: Any) -> dict[str, Any]:
    """What a run has of its numbers: losses and norms, the order of its rows' tokens, its state at the end."""
    names = ("step", "loss", "grad_norm", "num_tokens", "samples_seen", "padding_share")
    history = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    return {"history": history, "flos": trainer.state.total_flos, "next": torch.rand(3).tolist()}


@pytest.mark.parametrize(("when", "cut", "bf16"), [
    ("longest rows", "tokens", False), ("longest rows", "joined", True), ("step 1", "joined", False),
    ("step 1", "two passes", True), ("step 3", "rows", True), ("step 3", "all at once", False),
    ("step 3", "tokens", True),
])  # fmt: skip
def test_a_repeated_step_and_all_after_it_are_those_of_a_run_planned_so(
    tiny_llama, tmp_path, monkeypatch, caplog, when, cut, bf16
):
    planned, half = CUTS[cut]
    if when == "step 3":  # its first steps are those of the larger micro-batches
        dropping(tiny_llama, tmp_path / "wanted", planned, bf16=bf16).train()
    expected = dropping(tiny_llama, tmp_path / "wanted", half, bf16=bf16)
    checkpoint = str(tmp_path / "wanted" / "checkpoints" / "checkpoint-2") if when == "step 3" else None
    expected.train(resume_from_checkpoint=checkpoint)
    wanted = figures(expected)

    def fits(trainer: Any, _: int, __: bool) -> bool:
        if trainer.step_memory.has_halved:
            return True
        if not trainer._slot_batches:  # no step has begun: the longest rows are tried
            return when != "longest rows"
        is_last_pass = trainer._micro_step == trainer._micro_steps
        return when == "step 3" and not (trainer.state.global_step == 2 and is_last_pass)

    refuse(monkeypatch, fits)
    told: list[OomEvent] = []
    trainer = dropping(tiny_llama, tmp_path / "broken", planned, bf16=bf16)
    trainer.step_memory.on_oom.append(told.append)
    trainer.train()
    assert_same_bits(trainer.model.state_dict(), expected.model.state_dict())
    assert figures(trainer) == wanted
    assert [(one.step, one.micro_batch, one.now, one.again) for one in told] == [
        (3 if when == "step 3" else 1, planned.rows, half.rows, "step")
    ]
    assert f"the step is repeated from its start with {half.rows}" in caplog.text


def test_trying_the_longest_rows_changes_no_number_of_a_run(tiny_llama, tmp_path, monkeypatch):
    tried = dropping(tiny_llama, tmp_path / "tried", MicroBatches(2), bf16=True)
    tried.train()
    found = figures(tried)
    monkeypatch.setattr(StepMemory, "on_train_begin", lambda *_, **__: None)
    plain = dropping(tiny_llama, tmp_path / "plain", MicroBatches(2), bf16=True)
    plain.train()
    assert_same_bits(tried.model.state_dict(), plain.model.state_dict())
    assert figures(plain) == found


@pytest.mark.parametrize("seed", range(20))
def test_what_is_tried_is_the_largest_pass_of_the_step_with_the_longest_row(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(2, 90) for _ in range(draw.randint(1, 40))]
    window, ranks, rows = draw.randint(1, 9), draw.choice([1, 2, 3]), draw.randint(1, 4)
    padded, tokens = draw.random() < 0.5, draw.choice([None, rows * 90])
    cut = MicroBatches(rows, tokens=tokens, overhead=draw.choice([0, 20]), padded=padded or tokens is None)
    order = EpochOrder(len(lengths), seed=seed, lengths=np.array(lengths), effective_batch=window)
    by_rank = [
        StepBatches(order, np.array(lengths), cut, effective_batch=window, rank=n, ranks=ranks) for n in range(ranks)
    ]
    batches, given = by_rank[0], [list(one) for one in by_rank]
    whole = list(order)
    steps = [whole[first : first + window] for first in range(0, len(whole), window)]
    step = next(one for one in steps if max(lengths) in [lengths[row] for row in one])

    def places(batch: list[int]) -> int:
        own = [lengths[row] for row in batch]
        return (len(own) * max(own) if cut.padded else sum(own)) if own else 0

    # every pass of that step, as the ranks are given them
    first = steps.index(step) * batches.slots
    passes = list(zip(*(rank[first : first + batches.slots] for rank in given), strict=True))
    most = max(places([row for row in batch if row >= 0]) for each in passes for batch in each)
    tried = batches.largest_micro_step(cut)
    assert max(map(places, tried)) == most
    assert [list(batch) or [-1] for batch in tried] in [list(map(list, each)) for each in passes]


def lacking_rows(most: int, *, only: Callable[[Any], bool] = lambda _: True) -> Fits:
    return lambda trainer, rows, is_training: not (is_training and rows > most and only(trainer))


@pytest.mark.parametrize("settings", [
    ["tuning.mode=full", "data.packing=best_fit"],
    pytest.param(["tuning.mode=qlora", "train.batch_by=tokens", "train.bf16=true"], marks=pytest.mark.slow),
], ids=["packs", "tokens"])  # fmt: skip
def test_a_run_goes_on_and_says_why_and_a_resumed_one_does_not_try_again(train, trained, monkeypatch, settings):  # noqa: F811
    same = [*TWO_PASSES, "train.max_steps=4", *settings]
    code, printed, planned = train("planned", *same, "train.batch_size=2", "train.grad_accum=4")
    assert code == 0, printed
    monkeypatch.setattr("sft_play.planner.calibration.measured_runs_path", lambda: planned.parent / "measured.jsonl")
    with monkeypatch.context() as patch:
        refuse(patch, lambda trainer, *_: trainer.step_memory.batch_plan.micro_batch <= 2)
        code, printed, folder = train("broken", *same, "train.stop_after_steps=2")
    assert code == 0, printed
    assert losses(folder) == losses(planned)[:2]
    line = "step 1: rank 0 ran out of memory (training, 4 rows at a time): the step is repeated from its start with 2"
    assert line in printed
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["batch"] == {"micro_batch": 2, "grad_accum": 4, "ranks": 1}
    (event,) = read_oom_events(RunFolder(folder))
    assert event.description.startswith(line)
    assert line in text_of(folder)
    trained("broken", *same, verb="resume")
    assert losses(folder) == losses(planned)
    assert_same_bits(weights(folder), weights(planned))


def text_of(folder: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tb"), size_guidance={"tensors": 0}).Reload()
    return "\n".join(one.tensor_proto.string_val[0].decode() for one in found.Tensors("out_of_memory/text_summary"))


def test_later_plans_on_this_machine_know_what_ran_out(train, run_yaml, command, monkeypatch, tmp_path):  # noqa: F811
    record = tmp_path / "measured.jsonl"
    monkeypatch.setattr("sft_play.planner.calibration.measured_runs_path", lambda: record)
    words = ["plan", "--config", str(run_yaml), "--json", "train.batch_by=rows"]

    def planned() -> tuple[int, list[str]]:
        plan = json.loads(command(*words)[1].splitlines()[0])  # below it: what the log says on standard error
        return plan["micro_batch"], [why for why in plan["reasons"] if "ran out of memory" in why]

    before, reasons = planned()
    assert (before > 1, reasons) == (True, [])
    with monkeypatch.context() as patch:
        refuse(patch, lacking_rows(1))
        assert train("one", "train.batch_by=rows")[0] == 0
    after, reasons = planned()
    assert after < before
    assert reasons[0].startswith(f"micro-batch {before} ran out of memory in a run of this kind")
    assert train("given", f"train.batch_size={before}")[0] == 0  # it fits after all: another process is gone
    assert planned() == (before, [])


def test_what_one_row_does_not_fit_in_ends_with_what_would(train, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:
        refuse(patch, lacking_rows(0))
        code, printed, folder = train("one", "tuning.mode=full", "train.save_steps=1")
    assert code == 3
    assert "and it ran out with 1 too" in printed
    assert re.search(r"train\.gradient_checkpointing=true \([\d.]+ GiB per process; [^)]*resume takes it\)", printed)
    assert re.search(r"tuning\.mode=lora \([\d.]+ GiB per process; [^)]*a new run\)", printed)
    assert read_oom_events(RunFolder(folder))[-1].again is None
    assert train("one", "tuning.mode=full", "train.gradient_checkpointing=true", verb="resume")[0] == 0


def test_evaluations_and_answers_are_done_again_with_less(train, monkeypatch):  # noqa: F811
    same = ["eval.before_training=true", "eval.generate_rows=4", "eval.max_new_tokens=4", "train.max_steps=1"]
    code, printed, planned = train("planned", *same)
    assert code == 0, printed
    generate, asked = exact_match._generate, []

    def small(model: Any, tokenizer: Any, prompts: list[list[int]], *args: Any) -> Any:
        if len(prompts) > 1:
            raise RuntimeError("CUDA error: out of memory")
        asked.append(prompts[0])
        return generate(model, tokenizer, prompts, *args)

    with monkeypatch.context() as patch:
        seen = refuse(patch, lambda _, rows, is_training: is_training or rows <= 3)
        patch.setattr(exact_match, "_generate", small)
        code, printed, folder = train("broken", *same)
    assert code == 0, printed
    assert_same_bits(weights(folder), weights(planned))
    found, wanted = (json.loads((one / "summary.json").read_text()) for one in (folder, planned))
    for when in ("before", "after"):
        for name in ("loss", "exact_match"):
            assert found[when][name] == pytest.approx(wanted[when][name], rel=1e-5)
    assert (bool(asked), bool(seen)) == (True, True)
    assert {one.doing for one in read_oom_events(RunFolder(folder))} == {"evaluating", "generating answers"}


def test_what_counts_as_a_lack_of_memory():
    lacks = [
        torch.OutOfMemoryError(LACK), MemoryError(), RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("NCCL error: unhandled cuda error, Failed to CUDA calloc: Cuda failure 2 'out of memory'"),
    ]  # fmt: skip
    others = [ValueError("out of memory"), RuntimeError("shape mismatch"), KeyboardInterrupt()]
    others.append(device_checks.OutOfMemory("CUDA out of memory"))  # it was said already
    assert [device_checks.is_out_of_memory(one) for one in (*lacks, *others)] == [True] * 7 + [False] * 4


def loaded_config(*settings: str) -> LoadedConfig:
    config = config_from_text("model: {name: Qwen/Qwen2.5-0.5B}\n", name="run.yaml", overrides=settings)
    return LoadedConfig(config, Path("run.yaml"), "", settings)


def test_what_is_advised_is_taken_by_resume_and_needs_less(tmp_path):
    draw, kinds = random.Random(27), set()
    for number in range(60):
        micro, accum, ranks = draw.choice([1, 2, 3, 4, 6, 7, 9, 16]), draw.choice([1, 2, 5]), draw.choice([1, 2, 3])
        started, whole = BatchPlan(micro, accum, ranks), micro * accum * ranks
        size, steps = f"train.batch_size={micro}", f"train.grad_accum={accum}"
        effective = f"train.effective_batch_size={whole}"
        given = draw.choice([(effective,), (size, steps), (size, effective)])
        loaded = loaded_config(*given)
        manifest = {**new_manifest(loaded, hardware={}, data={}), "batch": vars(started), "layout": "ddp"}
        folder = RunFolder(tmp_path / str(number))
        create_run(folder, loaded, manifest=manifest, plan={"effective_batch": whole}).close()
        checkpoint_path(folder.checkpoints_path, 1).mkdir(parents=True)
        checkpointing = draw.choice([False, True, "selective"])
        plan: Any = SimpleNamespace(
            memory=SimpleNamespace(required=30 * GIB), budget_bytes=23 * GIB, batch=started,
            choice=SimpleNamespace(checkpointing=checkpointing),
        )  # fmt: skip
        advice = device_checks.out_of_memory_message(plan, RuntimeError("no room"))
        found = re.search(r"SET=(\S+|'[^']*'), which resume takes too", advice)
        assert bool(found) == (micro > 1 or checkpointing is not True), advice
        if found is None:
            assert "more GPUs, or a new run with a shorter model.max_seq_len" in advice
            kinds.add("nothing")
            continue
        again = loaded_config(*given, *shlex.split(shlex.split(found[1])[0]))
        asked = again.config.train
        kept, *_ = resume_constraints(again.config, PreviousRun("ddp", started), ranks)
        kept = kept or BatchPlan(int(asked.batch_size), int(asked.grad_accum), ranks)
        assert kept.effective_batch == whole
        check_same_run(folder, again, data={}, batch=vars(kept))
        assert kept.micro_batch < micro or (micro == 1 and again.config.train.gradient_checkpointing is True)
        kinds.add(len(given))
    assert kinds == {"nothing", 1, 2}


RANKS = """
import os


def lacking(most, step):
    import torch
    from sft_play.training.loop.trainer import PlannedTrainer

    real = PlannedTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **options):
        is_its_turn = self.state.global_step + 1 == step and bool(self._slot_batches) == (step > 1)
        if model.training and is_its_turn and self.step_memory.batch_plan.micro_batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, model, inputs, *args, **options)

    PlannedTrainer.compute_loss = compute_loss


if "RANK" in os.environ and os.environ["RANK"] == os.environ.get("LACKING"):
    lacking(1, int(os.environ["AT_STEP"]))
"""
"""sitecustomize.py: a rank with micro-batches of more than one row lacks memory in a step, or before the first."""


@pytest.mark.parametrize(("strategy", "step", "rank", "more"), [
    ("ddp", 3, 1, []), pytest.param("fsdp", 1, 0, ["train.batch_by=tokens"], marks=pytest.mark.slow),
    pytest.param("zero2", 3, 1, ["train.bf16=true"], marks=pytest.mark.slow),
])  # fmt: skip
def test_ranks_start_again_from_the_last_checkpoint_as_a_run_planned_so(world, strategy, step, rank, more):
    if strategy == "zero2":
        pytest.importorskip("deepspeed")
    name = f"{strategy}-{step}-{rank}"
    words = ["tuning.mode=lora", "tuning.lora.dropout=0.1", *more]
    words += ["train.save_steps=1", "train.save_total_limit=null", "train.report_to=[tensorboard]"]

    def ended(command: str, *settings: str, **environ: str) -> str:
        kept = {"STRATEGY": strategy, "NPROC": "2", **environ}
        answer = succeed(world, command, *words, *settings, limit_s=550, **kept)
        return answer.stdout + answer.stderr

    printed = ended("train-distributed", f"output.name={name}", LACKING=str(rank), AT_STEP=str(step))
    assert f"rank {rank} ran out of memory (training, 2 rows at a time): all ranks end, and start again" in printed
    assert "Starting again with micro-batch 1" in printed
    folder, other = world / "outputs" / name, world / "outputs" / f"{name}-planned"
    planned = ["train.batch_size=1", f"output.name={other.name}"]
    if step > 1:  # what was trained until then had two rows at a time
        ended("train-distributed", f"output.name={other.name}", f"train.stop_after_steps={step - 1}")
    ended("resume" if step > 1 else "train-distributed", *planned, **({"RUN": other.name} if step > 1 else {}))
    assert losses(folder) == losses(other)
    assert len(losses(folder)) == 5
    assert_same_bits(weights(folder), weights(other))
    (event,) = read_oom_events(RunFolder(folder))
    assert (event.rank, event.step, event.micro_batch, event.now, event.again) == (rank, step, 2, 1, "run")
    assert json.loads((folder / "manifest.json").read_text())["batch"]["micro_batch"] == 1
    assert "start again from the last checkpoint with 1" in text_of(folder)
    assert not (folder / OOM_NOTE_FILE).exists()
