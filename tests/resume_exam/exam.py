"""A run stopped after a step and resumed, against the unbroken one: what Automodel's tests ask (its pull requests 3427
and 3562), at the moments of verl#7401, ms-swift#10050 and accelerate#2823.

Before the first resumed update: parameters, optimizer state and groups, scheduler and random states are equal bit for
bit. From there on: the same rows in the same order, the first loss within 1e-6, and every row once an epoch.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers.trainer_callback import CallbackHandler

from tests.models import TEXTS, make_llama

ROWS, BATCH, MICRO, EPOCHS = 40, 8, 2, 3
STEPS_AN_EPOCH = ROWS // BATCH
MOMENTS = {
    "in the first epoch": 2,
    "at the end of an epoch (verl#7401)": STEPS_AN_EPOCH,
    "in the second epoch (ms-swift#10050, accelerate#2823)": STEPS_AN_EPOCH + 3,
    "at the end of the second epoch": 2 * STEPS_AN_EPOCH,
}
"""Steps after which the run is stopped."""
FIRST_LOSS = 1e-6


@dataclass
class Step:
    """What a run holds before a step, as digests, and what it trains on in it."""

    state: dict[str, str]
    batches: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def _digest(*tensors: Any) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def state_of(trainer: Any) -> dict[str, str]:
    """Digests of everything that the next update depends on, of what has its model, optimizer and scheduler."""
    saved = trainer.optimizer.state_dict()
    tensors = [
        one if one.dim() else one.reshape(1)
        for _, state in sorted(saved["state"].items())
        for _, one in sorted(state.items())
        if isinstance(one, torch.Tensor)
    ]
    return {
        "parameters": _digest(*(one for one in trainer.model.parameters() if one.requires_grad)),
        "optimizer's tensors": _digest(*tensors),
        "optimizer's groups": _of(saved["param_groups"]),
        "scheduler": _of({k: v for k, v in trainer.lr_scheduler.state_dict().items() if not k.startswith("_get")}),
        "torch's random state": _digest(torch.get_rng_state()),
        "Python's random state": hashlib.sha256(pickle.dumps(random.getstate())).hexdigest()[:16],
        "NumPy's random state": hashlib.sha256(pickle.dumps(numpy.random.get_state())).hexdigest()[:16],
    }


@contextmanager
def watched() -> Iterator[dict[int, Step]]:
    """Every step of every Trainer that runs meanwhile, by its number."""
    steps: dict[int, Step] = {}
    begin, plain = CallbackHandler.on_step_begin, transformers.Trainer.training_step

    def on_step_begin(self: Any, args: Any, state: Any, control: Any) -> Any:
        steps[state.global_step] = Step(state_of(self))
        return begin(self, args, state, control)

    def training_step(self: Any, model: Any, inputs: Any, *words: Any, **options: Any) -> Any:
        loss = plain(self, model, inputs, *words, **options)
        if (step := steps.get(self.state.global_step)) is not None:  # before the first one, rows are only tried
            step.batches.append(_digest(inputs["input_ids"], inputs["labels"]))
            step.rows += [_row(ids) for ids in inputs["labels"]]
            step.losses.append(float(loss))
        return loss

    CallbackHandler.on_step_begin, transformers.Trainer.training_step = on_step_begin, training_step
    try:
        yield steps
    finally:
        CallbackHandler.on_step_begin, transformers.Trainer.training_step = begin, plain


def _row(labels: torch.Tensor) -> str:
    """A row by its trained tokens, which differ from row to row."""
    return _digest(labels[labels >= 0])


@dataclass(frozen=True)
class Answer:
    """What differed at a moment: names of states before the first resumed update, then of what it trained on."""

    moment: str
    differs: tuple[str, ...]
    first_loss: float
    """Its difference, absolutely."""

    @property
    def passed(self) -> bool:
        return not self.differs


def compared(moment: str, stopped_after: int, unbroken: dict[int, Step], resumed: dict[int, Step]) -> Answer:
    """A resumed run's steps against the unbroken one's."""
    if stopped_after not in resumed:
        return Answer(moment, ("no step was trained",), float("nan"))
    before, after = unbroken[stopped_after], resumed[stopped_after]
    differs = [name for name, value in before.state.items() if after.state[name] != value]
    later = [number for number in unbroken if number >= stopped_after]
    if [resumed[n].batches for n in later if n in resumed] != [unbroken[n].batches for n in later]:
        differs.append("batches")
    whole = {**{n: step for n, step in unbroken.items() if n < stopped_after}, **resumed}
    differs += [] if each_row_once(whole) else ["rows of an epoch"]
    loss = abs(sum(before.losses) - sum(after.losses))
    differs += [] if loss <= FIRST_LOSS else ["first loss"]
    return Answer(moment, tuple(differs), loss)


def each_row_once(steps: dict[int, Step]) -> bool:
    """Whether every epoch has every row exactly once."""
    epochs: dict[int, Counter[str]] = {}
    for number, step in steps.items():
        epochs.setdefault(number // STEPS_AN_EPOCH, Counter()).update(step.rows)
    return len(epochs) == EPOCHS and all(len(rows) == ROWS and set(rows.values()) == {1} for rows in epochs.values())


# --- the runs ---------------------------------------------------------------------------------------------------------
def write_rows(folder: Path) -> None:
    """Chats whose answers differ from one another, so that a row is known by what is trained of it."""
    draw, words = random.Random(1), " ".join(TEXTS).split()
    with (folder / "rows.jsonl").open("w") as out:
        for number in range(ROWS):
            question = " ".join(draw.choices(words, k=draw.randint(1, 8)))
            answer = f"{number} " + " ".join(draw.choices(words, k=draw.randint(1, 6)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")


def ours(folder: Path, base: Path, stopped_after: int | None, *, resume: bool = False) -> None:
    """A run of this toolkit, in this process."""
    from sft_play.cli import main

    path = folder / "run.yaml"
    if not path.exists():
        path.write_text(
            f"model: {{name: {base}, max_seq_len: 64}}\n"
            "tuning: {mode: lora, lora: {dropout: 0.1}}\n"
            f"data: {{train_path: {folder}/rows.jsonl, val_fraction: 0.0}}\n"
            f"train: {{effective_batch_size: {BATCH}, batch_size: {MICRO}, epochs: {EPOCHS}, learning_rate: 1e-3, "
            "report_to: []}\n"
            f"output: {{dir: {folder}/outputs, name: exam}}\n"
        )
    words = ["resume", "--config", str(path)] if resume else ["train", "--config", str(path)]
    stops = [] if stopped_after is None else [f"train.stop_after_steps={stopped_after}"]
    code = main([*words, *stops])
    if code:
        raise RuntimeError(f"the run ended with {code}")


def trl(folder: Path, base: Path, stopped_after: int | None, *, resume: bool = False) -> None:
    """The same with TRL's SFTTrainer and PEFT, as their documentation does it."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stopped_after:
                control.should_save = control.should_training_stop = True

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    arguments = SFTConfig(
        output_dir=str(folder / "trl"), num_train_epochs=EPOCHS, per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=BATCH // MICRO, learning_rate=1e-3, save_strategy="no", report_to=[],
        max_length=64, use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=1, dataset_num_proc=None,
    )  # fmt: skip
    trainer = SFTTrainer(
        str(base), args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[Stop()],
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_dropout=0.1, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder / "trl")) if resume else None)


Run = Callable[..., None]
SUBJECTS: dict[str, Run] = {"sft_play": ours, "TRL": trl}


def examined(run: Run, folder: Path, moments: dict[str, int] = MOMENTS) -> list[Answer]:
    """A subject's answers, one for each moment."""
    folder.mkdir(parents=True, exist_ok=True)
    base = make_llama(folder / "base")

    def steps(name: str, *ways: tuple[int | None, bool]) -> dict[int, Step]:
        place = folder / name
        place.mkdir()
        write_rows(place)
        for stopped_after, resume in ways:
            with watched() as found:
                run(place, base, stopped_after, resume=resume)
        return found

    unbroken = steps("unbroken", (None, False))
    if not each_row_once(unbroken):
        raise RuntimeError("the unbroken run does not train every row once an epoch")
    return [
        compared(moment, after, unbroken, steps(f"after-{after}", (after, False), (None, True)))
        for moment, after in moments.items()
    ]
