"""A run as the folder that vLLM serves: the whole model, with the stop tokens of training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from sft_play.diagnose import engines
from sft_play.facts.models.architecture import local_folder
from sft_play.finished.answer.prompts import Prompts
from sft_play.finished.export.exported import Written, shell_word
from sft_play.finished.export.saved_configs import write_generation_config
from sft_play.finished.run import FinishedRun


def write_folder(run: FinishedRun, model: Path, building: Path, target: Path) -> Written:
    """The whole model as a folder: files of `merged/` or `model/`, linked where the disk allows it."""
    prompts = Prompts(run, model)
    for file in model.iterdir():
        if file.is_file():
            _link_or_copy(file, building / file.name)
    write_generation_config(run, prompts.tokenizer, model, building)
    size = sum(file.stat().st_size for file in building.glob("*.safetensors"))
    name, length = run.folder.path.name, run.plan().max_seq_len
    commands = [f"vllm serve {shell_word(target)} --served-model-name {shell_word(name)} --max-model-len {length}"]
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # the base with the adapter is offered as well, but only where vLLM computes what was trained
    limits = engines.findings("vllm", engines.trained_of(run.config, engines.architecture_of(values)))
    rank = engines.vllm_rank(run.config.tuning.lora.r)
    if run.is_adapter and not run.is_quantized and rank and all(limit.verdict != "FAIL" for limit in limits):
        base = local_folder(run.config.model.name) or run.config.model.name
        commands.append(
            f"vllm serve {shell_word(base)} --enable-lora --max-lora-rank {rank} "
            f"--lora-modules {shell_word(f'{name}={run.weights}')} --max-model-len {length}"
        )
    return Written({"run": run.folder.path.name, "model": model.name}, size, tuple(commands))


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same file; a copy on another disk, or where the file system knows no links.

    Small files are copied: an edit of a config here must not change the other one.
    """
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, target)
