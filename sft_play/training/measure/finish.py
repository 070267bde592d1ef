"""The end of a run: the trained weights are saved, the summary is written and logged."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import torch

from sft_play.errors import Interrupted
from sft_play.runs.disk import free_bytes, room
from sft_play.training.checkpoints import gathered_weights
from sft_play.training.checkpoints.card import Trained, stops_of, write_card
from sft_play.training.checkpoints.model_saving import save_model, set_stop_tokens
from sft_play.training.job import Job, resume_command
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.measure.measure import MemoryMeter
from sft_play.training.measure.summary import Result, summary_lines
from sft_play.training.prepare.prepare import Prepared
from sft_play.training.ranks import distributed, engines

logger = logging.getLogger(__name__)


def finish(job: Job, prepared: Prepared, trainer: PlannedLoop, result: Result, memory: MemoryMeter) -> dict[str, Any]:
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
    for line in summary_lines(job, result, summary):
        logger.info("%s", line)
    distributed.barrier()
    if result.exit_code:
        raise Interrupted(f"stopped at step {result.trained.steps}, state saved; resume with: {resume_command(job)}")
    return summary


def describe(job: Job, prepared: Prepared, summary: dict[str, Any]) -> None:
    """Write the model card of the trained weights; where the disk refuses it, the weights are whole without it."""
    card = Trained(
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


def _save_trained(job: Job, prepared: Prepared, trainer: PlannedLoop, *, steps: int) -> None:
    """Save the adapter or the whole model on the first rank; the others help to gather it, then wait for the disk."""
    path, tokenizer = job.folder.model_path(adapter=prepared.is_adapter), prepared.tokenizer.tokenizer
    native = prepared.model_spec.is_text_tower and not prepared.is_adapter
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
            save_model(
                model, tokenizer, path, native_names=native, state_dict=state, tensors=tensors,
                dtype=dtype, steps=steps if learns else 0, moved=trainer.beat.moved,
            )  # fmt: skip
            if not prepared.is_adapter:  # whoever loads it ends answers where training did
                stop = stops_of(job.loaded.config, tokenizer, prepared.renderer)
                set_stop_tokens(path, stop, tokenizer.pad_token_id)
        else:
            for _ in tensors or ():  # gathering is collective: every rank has to walk through all tensors
                pass
    trainer.wait_for_disk()
