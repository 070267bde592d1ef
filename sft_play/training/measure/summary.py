"""The end of a run: the trained weights are saved, the summary is written as JSON and logged in words."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import Interrupted
from sft_play.log import one_line
from sft_play.runs.files import evaluations, free_bytes, room
from sft_play.starter import CONFIG
from sft_play.training.checkpoints import gathered_weights
from sft_play.training.checkpoints.card import CardFacts, stops_of, write_card
from sft_play.training.checkpoints.model_saving import save_model, set_stop_tokens
from sft_play.training.checkpoints.tensor_files import base_files
from sft_play.training.job import RunJob, resume_command
from sft_play.training.loop.callbacks import StopAfter
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.measure.evaluate import Figures
from sft_play.training.measure.peaks import LoadMemory, MemoryMeter
from sft_play.training.measure.updates import UpdateFacts
from sft_play.training.prepare.prepare import Prepared
from sft_play.training.proofs.compiling import CompileFacts
from sft_play.training.proofs.kernels import Taken
from sft_play.training.ranks import distributed, engines
from sft_play.training.ranks.engines import EngineCheck
from sft_play.units import GIB, duration_of

logger = logging.getLogger(__name__)

SAMPLE_ANSWERS = 3
"""Questions that the last lines of a run show."""
KEPT_SAMPLES, _SAMPLE_CHARACTERS = 12, 2_000
"""Questions whose answers are kept in the summary, and the longest text of each."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of the optimizer steps since this process started. Speed is in tokens per second of all ranks."""

    steps: int
    """Of the whole run, those of earlier starts too."""
    tokens_per_s: float
    peak_bytes: dict[str, int | None]
    stop: StopAfter
    updates: UpdateFacts | None
    compiled: CompileFacts | None = None
    """What compiling blocks came to; None where the plain code ran."""
    steps_before: int = 0
    """Steps of earlier starts."""
    skipped_steps: int = 0
    """Steps that were left out since they were not finite."""
    ran_out: bool = False
    """Whether memory ran out, and steps had smaller micro-batches than planned."""


@dataclass(frozen=True)
class Result:
    """The result of a run since this process started."""

    trained: TrainingResult
    before: Figures | None
    after: Figures | None
    split: str
    by_moment: dict[str, dict[str, int | None]]
    engine_check: EngineCheck
    loading: LoadMemory | None
    wall_s: float
    kernels: Taken = field(default_factory=Taken)

    @property
    def exit_code(self) -> int:
        """130 if a signal stopped the run, else 0."""
        stop = self.trained.stop
        return Interrupted.exit_code if stop.signal is not None and stop.stopped_early else 0

    @property
    def status(self) -> str:
        """`status` of the manifest."""
        return "stopped" if self.trained.stop.stopped_early else "finished"

    def as_json(self, job: RunJob) -> dict[str, Any]:
        """`summary.json`; `finish` adds `model_path` once the weights are saved."""
        stage, speed = job.folder.stage, job.plan.speed.tokens_per_s
        return {
            "status": self.status,
            "split": self.split,
            "before": self.before.as_json() if self.before else None,
            "after": self.after.as_json() if self.after else None,
            "samples": samples(self.before, self.after),
            "peak_bytes": self.trained.peak_bytes,
            "peak_bytes_by_moment": self.by_moment,
            "tokens_per_s": round(self.trained.tokens_per_s, 2),
            "steps": self.trained.steps,
            "skipped_steps": self.trained.skipped_steps,
            "ran_out": self.trained.ran_out,
            "wall_s": round(self.wall_s, 2),
            "exit": self.exit_code,
            "engine_proof": self.engine_check.as_json(),
            "updates": self.trained.updates.as_json() if self.trained.updates else None,
            "compile": self.trained.compiled.as_json() if self.trained.compiled else None,
            "loading": self.loading.as_json() if self.loading else None,
            "evaluations": evaluations(job.folder.metrics_path, stage=stage) if distributed.is_first() else [],
            "predicted_tokens_per_s": round(speed, 2) if job.plan.speed_known else None,
            **({"kernels": self.kernels.as_json(job.plan)} if job.plan.kernels else {}),
        }


def summary_lines(job: RunJob, result: Result) -> list[str]:
    """The last lines of a run: figures before and after, sample answers, memory, speed, paths, what is next."""
    predicted = f" ({job.plan.speed.tokens_per_s:,.0f} predicted)" if job.plan.speed_known else ""
    steps, speed = result.trained.steps, result.trained.tokens_per_s
    earlier = result.trained.steps_before
    now = f"{steps - earlier} of {steps}, after a resume," if earlier else f"{steps}"
    now += f" ({result.trained.skipped_steps} skipped: not finite)" if result.trained.skipped_steps else ""
    lines = [
        f"Steps: {now} in {duration_of(result.wall_s)}; {speed:,.0f} tokens/s in training{predicted}",
        *_figure_lines(result),
        *_answer_lines(samples(result.before, result.after, most=SAMPLE_ANSWERS)),
        _memory_line(result.trained.peak_bytes),
        f"Written to: {job.folder.path}",
    ]
    if result.exit_code:  # its error says how to resume
        return lines
    if result.status == "stopped":
        return [*lines, f"Stopped early; resume with: {resume_command(job)}"]
    return (
        lines
        if job.folder.run is not None
        else [*lines, f"Talk to it: make chat RUN={job.folder.quoted}", *_try_next(job)]
    )


def _figure_lines(result: Result) -> list[str]:
    lines = []
    for name, form in (("loss", "{:.4f}"), ("exact match", "{:.1%}")):
        key = name.replace(" ", "_")
        values = [getattr(figures, key) if figures else None for figures in (result.before, result.after)]
        if any(value is not None for value in values):
            shown = [form.format(value) if value is not None else "not measured" for value in values]
            rows = (result.after or result.before or Figures()).rows
            lines.append(f"Held-out {name} ({result.split}, {rows} rows): {shown[0]} before, {shown[1]} after")
    return lines


def _answer_lines(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for one in shown:
        mark = "right" if one["right"] else f"expected: {one_line(one['expected'])}"
        lines.append(f"Asked: {one_line(one['asked'])}")
        lines += [f"  before: {one_line(one['before'])}"] if one["before"] is not None else []
        lines.append(f"  after:  {one_line(one['after'])}  ({mark})")
    return lines


def samples(before: Figures | None, after: Figures | None, *, most: int = KEPT_SAMPLES) -> list[dict[str, Any]]:
    """Some questions with the answers of the untrained and the trained model (`before` is None where it was not asked),
    evenly spaced over those that were asked; long texts are cut."""
    answers = after.answers if after else ()
    old = {answer.question.shown: _cut(answer.text) for answer in before.answers} if before else {}
    count = min(most, len(answers))
    return [
        {
            "asked": _cut(answer.question.shown),
            "expected": _cut(answer.question.answer),
            "before": old.get(answer.question.shown),
            "after": _cut(answer.text),
            "right": answer.right,
        }
        for answer in (answers[index * len(answers) // count] for index in range(count))
    ]


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1] + "…"


def _memory_line(peak: dict[str, int | None]) -> str:
    """One figure predicted and one measured, both of what plans are made and corrected by."""
    on_cpu = "measured_rss" in peak
    what, predicted = "above the libraries' own" if on_cpu else "reserved on a GPU", peak["predicted_reserved"] or 0
    measured = peak["measured_rss" if on_cpu else "measured_reserved"]
    shown = "not measured" if measured is None else f"{measured / GIB:.2f} GiB measured"
    return f"Peak memory {what}: {predicted / GIB:.2f} GiB predicted, {shown}"


def _try_next(job: RunJob) -> list[str]:
    """After the starter: a model of the hub, on a CPU one that it can train, with the user's data."""
    if Path(job.loaded.path).name != Path(CONFIG).name:
        return []
    model = "" if job.plan.hardware.gpus else "model.name=Qwen/Qwen2.5-0.5B-Instruct "  # at most CPU_PARAMS
    return [f'Try next: make train CONFIG=configs/run_bnb.yaml SET="{model}data.train_path=…" (your own data)']


def finish(
    job: RunJob, prepared: Prepared, trainer: PlannedLoop, result: Result, memory: MemoryMeter
) -> dict[str, Any]:
    """Save what was trained, write and log the summary; raises Interrupted if the user stopped the run."""
    summary = result.as_json(job)
    if result.status == "finished":
        path = job.folder.model_path(adapter=prepared.is_adapter)
        with memory.peaks.during("saving"):
            _save_trained(job, prepared, trainer, steps=result.trained.steps)
        summary["peak_bytes_by_moment"] = memory.by_moment()
        summary["model_path"] = str(path)
    if not distributed.is_first():
        distributed.barrier()  # a launcher ends rank 0 when another leaves before rank 0 has written the summary
        if result.exit_code:
            raise Interrupted(f"stopped at step {result.trained.steps}, state saved by rank 0")
        return summary
    job.folder.write_json("summary.json", summary)
    job.folder.update_manifest(status=result.status, ended=datetime.now(UTC).isoformat(timespec="seconds"))
    if result.status == "finished" and prepared.backend.name != "unsloth":  # its process knows no template
        describe(job, prepared, summary)
    for line in summary_lines(job, result):
        logger.info("%s", line)
    distributed.barrier()
    if result.exit_code:
        raise Interrupted(f"stopped at step {result.trained.steps}, state saved; resume with: {resume_command(job)}")
    return summary


def describe(job: RunJob, prepared: Prepared, summary: dict[str, Any]) -> None:
    """Write the model card of the trained weights; where the disk refuses it, the weights are whole without it."""
    card = CardFacts(
        kind="adapter" if prepared.is_adapter else "model",
        name=job.folder.whole.path.name,
        config=job.loaded.config,
        plan=job.plan,
        model_spec=prepared.model_spec,
        manifest=job.folder.whole.manifest(),
        summary=summary,
        stop=stops_of(job.loaded.config, prepared.tokenizer.tokenizer, prepared.renderer),
    )
    try:
        write_card(job.folder.model_path(adapter=prepared.is_adapter), card)
    except OSError as error:
        logger.warning("The model card could not be written: %s", error)


def _save_trained(job: RunJob, prepared: Prepared, trainer: PlannedLoop, *, steps: int) -> None:
    """Save the adapter or the whole model on the first rank; the others help to gather it, then wait for the disk."""
    path, tokenizer = job.folder.model_path(adapter=prepared.is_adapter), prepared.tokenizer.tokenizer
    dtype = None if prepared.is_adapter else prepared.model_spec.dtype
    model = trainer.accelerator.unwrap_model(trainer.model)
    needed, free = engines.trained_bytes(trainer, dtype), distributed.of_first(free_bytes(path.parent))
    with room(path.parent, needed, "the trained weights", free=free), trainer.writing(path.parent):
        one_by_one = trainer.is_fsdp_enabled and not prepared.is_adapter
        tensors = gathered_weights.whole_tensors(trainer.model) if one_by_one else None
        state = None if one_by_one else gathered_weights.whole_state(trainer, in_fp32=dtype is torch.float32)
        if distributed.is_first():
            if prepared.tokenizer.own_template is not None:
                tokenizer.chat_template = prepared.tokenizer.own_template
            learns = any(weight.requires_grad for name, weight in model.named_parameters() if "lora_B" in name)
            base_model = job.loaded.config.model  # of which a whole model of images and text keeps what did not train
            keeps = prepared.model_spec.tower is not None and not prepared.is_adapter
            base = base_files(base_model.name, revision=base_model.revision) if keeps else None
            save_model(
                model, tokenizer, path, base=base, state_dict=state, tensors=tensors, dtype=dtype,
                steps=steps if learns else 0, moved=trainer.beat.moved,
            )  # fmt: skip
            if not prepared.is_adapter:  # whoever loads it ends answers where training did
                stop = stops_of(job.loaded.config, tokenizer, prepared.renderer)
                set_stop_tokens(path, stop, tokenizer.pad_token_id)
        else:
            for _ in tensors or ():  # gathering is collective: every rank has to walk through all tensors
                pass
    trainer.wait_for_disk()
