"""`make export`: a finished run as a GGUF, for Ollama, or as the folder that vLLM serves. Adapters are merged first."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace as with_changes
from pathlib import Path

from sft_play.diagnose import engines
from sft_play.errors import RunFolderError
from sft_play.facts.models.architecture import local_folder
from sft_play.finished.export.export_gguf import write_gguf
from sft_play.finished.export.exported import EXPORT, EXPORT_FILE, Exported, Format, Quant, WrittenExport, shell_word
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.merge import merge_record, merge_words, whole_model
from sft_play.finished.export.prompts import Prompts
from sft_play.finished.export.saved_configs import write_generation_config
from sft_play.finished.run import FinishedRun, text_only_of
from sft_play.finished.writing import built_folder
from sft_play.runs.files import write_json
from sft_play.training.prepare.quiet import quiet_libraries


def export_run(
    run: FinishedRun,
    format: Format,
    *,
    quant: Quant | None = None,
    out: Path | None = None,
    replace: bool = False,
    llama_cpp: Path | None = None,
) -> Exported:
    """Write a finished run for an engine.

    Args:
        quant: how the GGUF stores weights; None: losslessly.
        out: the folder; `export/<format>/` in the run folder where None.
        replace: an existing folder is replaced, once the new one is whole.
        llama_cpp: a checkout of llama.cpp, or llama-cpp-python's source package.

    Raises:
        ConfigError: `quant` does not fit, there is no converter, or the target cannot be written.
        RunFolderError: the target exists.
        ModelError, BackendError: the model is one that the converter cannot write.
        TokenizerError: the file's tokenizer would not be the one that was trained with, or the chat template cannot
            be written as a Modelfile's.
    """
    started = time.monotonic()
    target = out or run.folder.path / EXPORT / format
    _require_target(target, replace=replace)
    quiet_libraries()
    # before the merge: a converter that cannot be fetched is known in seconds, a merge takes minutes
    converter = None if format == "vllm" else find_converter(llama_cpp)
    model = whole_model(run, is_locked=True)
    with built_folder(target) as building:
        if converter is None:
            written = _write_folder(run, model, building, target)
        else:
            written = write_gguf(run, model, building, target, converter, quant=quant, format=format)
        merged = merge_record(model)  # what the weights are made of travels with them
        write_json(building / EXPORT_FILE, {**written.record, **({"merge": merged} if merged else {})})
    written = with_changes(written, notes=(*text_only_of(run), *written.notes))
    seconds = time.monotonic() - started
    return Exported(
        run.folder.path, format, target, written, is_adapter=run.is_adapter, seconds=seconds, merge=merge_words(model)
    )  # fmt: skip


def _require_target(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if not (target / EXPORT_FILE).is_file():
        raise RunFolderError(
            f"{target} was not written by make export and is not replaced; OUT=FOLDER writes elsewhere"
        )


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _write_folder(run: FinishedRun, model: Path, building: Path, target: Path) -> WrittenExport:
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
    limits = engines.engine_findings("vllm", engines.served_of(run.config, engines.architecture_of(values)))
    rank = engines.vllm_rank(run.config.tuning.lora.r)
    if run.is_adapter and not run.is_quantized and rank and all(limit.verdict != "FAIL" for limit in limits):
        base = local_folder(run.config.model.name) or run.config.model.name
        commands.append(
            f"vllm serve {shell_word(base)} --enable-lora --max-lora-rank {rank} "
            f"--lora-modules {shell_word(f'{name}={run.weights}')} --max-model-len {length}"
        )
    return WrittenExport({"run": run.folder.path.name, "model": model.name}, size, tuple(commands))


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
