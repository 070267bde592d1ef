"""`make export`: a finished run as a GGUF, for Ollama, or as the folder that vLLM serves. Adapters are merged first."""

from __future__ import annotations

import time
from dataclasses import replace as with_changes
from pathlib import Path

from sft_play.errors import RunFolderError
from sft_play.finished.export.export_gguf import write_gguf
from sft_play.finished.export.export_vllm import write_folder
from sft_play.finished.export.exported import EXPORT, RECORD, Exported, Format, Quant
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.merge import whole_model
from sft_play.finished.export.merge_record import record_of, told
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
            written = write_folder(run, model, building, target)
        else:
            written = write_gguf(run, model, building, target, converter, quant=quant, format=format)
        merged = record_of(model)  # what the weights are made of travels with them
        write_json(building / RECORD, {**written.record, **({"merge": merged} if merged else {})})
    written = with_changes(written, notes=(*text_only_of(run), *written.notes))
    seconds = time.monotonic() - started
    return Exported(
        run.folder.path, format, target, written, is_adapter=run.is_adapter, seconds=seconds, merge=told(model)
    )  # fmt: skip


def _require_target(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if not (target / RECORD).is_file():
        raise RunFolderError(
            f"{target} was not written by make export and is not replaced; OUT=FOLDER writes elsewhere"
        )
