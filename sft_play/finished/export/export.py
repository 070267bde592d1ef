"""`make export`: a finished run as a GGUF, for Ollama, or as the folder that vLLM serves. Adapters are merged first.

llama.cpp's converter writes the GGUF; what it would guess of the tokenizer is given to it (the pre-tokenizer, whether a
prompt begins with BOS, the tokens that end an answer), and afterwards the file is read back: its chat template and the
token ids of prompts have to be those of training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.errors import ConfigError, DataError, ModelError, TokenizerError
from sft_play.finished.export import gguf_checks
from sft_play.finished.export.engine_prompts import (
    MAX_CHECKED_ROWS,
    EnginePrompts,
    PairedPrompt,
    write_generation_config,
)
from sft_play.finished.export.gguf_checks import matching_names, probe_texts, read_pre_tokenizers
from sft_play.finished.export.llama_cpp import (
    LLAMA_CPP_PACKAGE,
    LLAMA_CPP_VERSION,
    Converter,
    convert_to_gguf,
    find_converter,
    has_llama_cpp,
    quantize_gguf,
)
from sft_play.finished.export.merge import ensure_whole_model_folder
from sft_play.finished.export.ollama import build_modelfile
from sft_play.finished.export.places import (
    CONVERTER_QUANTS,
    EXPORT_FILE,
    EXPORT_FOLDER,
    ExportFormat,
    Quant,
    describe_merge,
    read_merge_record,
    require_export_target,
)
from sft_play.finished.load import load_held_out_rows
from sft_play.finished.run import (
    FinishedRun,
    base_model_folder,
    describe_context_window,
    language_model_notes,
    next_command_line,
    require_space,
    staged_folder,
)
from sft_play.runs.files import read_json, write_json
from sft_play.text import format_gib
from sft_play.training.checkpoints.model_saving import open_tensors, weight_files
from sft_play.training.prepare.library_messages import quiet_libraries

logger = logging.getLogger(__name__)

# By the dtype of the weights as safetensors names it; other dtypes have no lossless one here.
_LOSSLESS_QUANTS: dict[str, Quant] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_MAX_F16 = 65_504.0


@dataclass(frozen=True)
class ExportResult(Answer):
    """What `export_run` wrote; `file`, `quant`, `converter`, `pre_tokenizer` and `prompts_checked` are of a GGUF."""

    run: Path
    format: ExportFormat
    path: Path
    bytes: int
    commands: tuple[str, ...]
    notes: tuple[str, ...] = ()
    file: Path | None = None
    quant: Quant | None = None
    converter: str | None = None
    pre_tokenizer: str | None = None
    prompts_checked: int = 0
    """Prompts whose token ids by the file's own tokenizer were seen to be those of training."""
    merge: str | None = None
    """Of an adapter: what was merged, and whether merge-test passed, in words."""
    wall_s: float = 0.0

    def lines(self) -> list[str]:
        lines = [*([self.merge] if self.merge else []), *self.notes]
        if self.file is not None:
            lines.append(
                f"Tokenizer: {self.pre_tokenizer}; its ids of {self.prompts_checked} prompts are those of training"
                if self.prompts_checked else "Tokenizer: not compared"
            )  # fmt: skip
        quant_note = f"{self.quant}, " if self.quant else ""
        size = f"{quant_note}{format_gib(self.bytes, digits=2)} GiB"
        lines.append(f"Written to: {self.file or self.path} ({size}, {self.wall_s:.0f} s)")
        lines += [f"Serve: {command}" for command in self.commands]
        out_variable = {} if self.path == self.run / EXPORT_FOLDER / self.format else {"OUT": self.path}
        if self.file is not None:
            return [*lines, next_command_line("export-test", RUN=self.run, **out_variable)]
        if self.merge is not None:
            return [*lines, next_command_line("merge-test", RUN=self.run)]
        return [*lines, next_command_line("push", "REPO=user/name", RUN=self.run)]


def export_run(
    run: FinishedRun,
    format: ExportFormat,
    *,
    quant: Quant | None = None,
    out: Path | None = None,
    replace: bool = False,
    llama_cpp: Path | None = None,
) -> ExportResult:
    """Write a finished run for an engine, with the options of docs/trained.md (export). Raises ConfigError where
    `quant` does not fit, there is no converter, or the target cannot be written; RunFolderError where the target
    exists; ModelError or BackendError where the model is one that the converter cannot write; TokenizerError where the
    file's tokenizer would not be the one that was trained with, or the chat template cannot be written as a
    Modelfile's."""
    start_time = time.monotonic()
    target = out or run.folder.path / EXPORT_FOLDER / format
    require_export_target(target, replace=replace)
    quiet_libraries()
    # before the merge: a converter that cannot be fetched is known in seconds, a merge takes minutes
    if quant not in (None, *CONVERTER_QUANTS) and not has_llama_cpp():
        install = f"{sys.executable} -m pip install {LLAMA_CPP_PACKAGE}=={LLAMA_CPP_VERSION} (it compiles for minutes)"
        raise ConfigError(f"QUANT={quant} needs llama.cpp's library, which is not here: {install}; or take QUANT=q8_0")
    converter = None if format == "vllm" else find_converter(llama_cpp)
    model_folder = ensure_whole_model_folder(run, is_locked=True)
    with staged_folder(target) as staging_folder:
        if converter is None:
            result = _write_vllm_folder(run, model_folder, staging_folder, target)
        else:
            result = _write_gguf(run, model_folder, staging_folder, target, converter, quant=quant, format=format)
        record = {
            "run": run.folder.path.name, "model": model_folder.name, "quant": result.quant,
            "converter": result.converter,
            "file": result.file.name if result.file else None,
            "merge": read_merge_record(model_folder) or None,  # what the weights are made of travels with them
        }  # fmt: skip
        write_json(staging_folder / EXPORT_FILE, {name: value for name, value in record.items() if value is not None})
    notes, seconds = (*language_model_notes(run), *result.notes), round(time.monotonic() - start_time, 2)
    return with_changes(result, notes=notes, merge=describe_merge(model_folder), wall_s=seconds)


def _write_vllm_folder(run: FinishedRun, model_folder: Path, staging_folder: Path, target: Path) -> ExportResult:
    prompts = EnginePrompts(run, model_folder)
    for file in model_folder.iterdir():
        if file.is_file():
            _link_or_copy(file, staging_folder / file.name)
    write_generation_config(run, prompts.tokenizer, model_folder, staging_folder)
    size = sum(file.stat().st_size for file in staging_folder.glob("*.safetensors"))
    max_positions, context_note = describe_context_window(run, str(model_folder))
    name = run.folder.path.name
    command = ["vllm", "serve", str(target), "--served-model-name", name, "--max-model-len", str(max_positions)]
    return ExportResult(
        run.folder.path, "vllm", target, size, (shlex.join(command),), (context_note,) if context_note else ()
    )


def _link_or_copy(file: Path, target: Path) -> None:
    """Hard-link weights, or copy them to another disk; copy small files, so that an edit does not change the other."""
    try:
        (os.link if file.suffix == ".safetensors" else shutil.copyfile)(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)


def _write_gguf(
    run: FinishedRun,
    model_folder: Path,
    staging_folder: Path,
    target: Path,
    converter: Converter,
    *,
    quant: Quant | None,
    format: ExportFormat,
) -> ExportResult:
    file_quant = _resolve_quant(model_folder, quant)
    converted_quant = file_quant if file_quant in CONVERTER_QUANTS else _lossless_quant(model_folder) or "bf16"
    prompts = EnginePrompts(run, model_folder)
    name = run.folder.path.name
    file = staging_folder / f"{name}-{file_quant}.gguf"
    needed_bytes = sum(weight_file.stat().st_size for weight_file in weight_files(model_folder))
    needed_bytes += 0 if converted_quant == file_quant else needed_bytes // 2  # both files are there for a moment
    require_space(staging_folder, needed_bytes, "the GGUF needs up to")
    staged_model = staging_folder / ".model"
    _stage_model(run, model_folder, prompts.tokenizer, staged_model)
    vocabulary, pre_tokenizer = _converter_vocabulary(prompts, converter)
    modelfile_notes: tuple[str, ...] = ()
    if format == "ollama":
        max_positions, context_note = describe_context_window(run, str(model_folder))
        text, modelfile_notes = build_modelfile(
            run, prompts, file.name, adds_bos=bool(vocabulary["add_bos"]), context=max_positions
        )
        modelfile_notes += (context_note,) if context_note else ()
        (staging_folder / "Modelfile").write_text(text, encoding="utf-8")
    converted_file = file if converted_quant == file_quant else staged_model / "whole.gguf"
    convert_to_gguf(
        converter, staged_model, converted_file, quant=converted_quant, name=name, vocabulary=json.dumps(vocabulary)
    )
    if converted_quant != file_quant:
        quantize_gguf(converted_file, file, file_quant)
    shutil.rmtree(staged_model)
    checked, notes = _check_gguf(run, file, prompts, converter)
    fields = gguf_checks.read_fields(file)
    served_file = target / file.name
    ollama_name = shlex.quote(name.lower())
    command = (
        f"ollama create {ollama_name} -f {shlex.quote(str(target / 'Modelfile'))} && ollama run {ollama_name}"
        if format == "ollama" else f"llama-server --jinja -m {shlex.quote(str(served_file))}"
    )  # fmt: skip
    return ExportResult(
        run.folder.path, format, target, file.stat().st_size, (command,), (*notes, *modelfile_notes), served_file,
        file_quant, converter.version, str(fields.get("tokenizer.ggml.pre", pre_tokenizer)), checked,
    )  # fmt: skip


def _resolve_quant(model_folder: Path, requested_quant: Quant | None) -> Quant:
    quant = requested_quant or _lossless_quant(model_folder)
    if quant is None:
        dtype = _main_dtype(model_folder)
        raise ConfigError(
            f"the weights in {model_folder} are {dtype}, which no GGUF holds as they are; give QUANT=bf16 or q8_0"
        )
    if (
        quant == "f16"
        and _lossless_quant(model_folder) != "f16"
        and (name := _find_f16_overflow(model_folder)) is not None
    ):
        raise ConfigError(f"QUANT=f16 cannot hold {name}, which has values above 65,504; take QUANT=bf16")
    return quant


def _main_dtype(model_folder: Path) -> str:
    counts: dict[str, int] = {}
    for tensor in open_tensors(model_folder).values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype])


def _lossless_quant(model_folder: Path) -> Quant | None:
    return _LOSSLESS_QUANTS.get(_main_dtype(model_folder))


def _find_f16_overflow(model_folder: Path) -> str | None:
    from safetensors import safe_open

    for file in weight_files(model_folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > _MAX_F16:
                    return str(name)
    return None


def _stage_model(run: FinishedRun, model_folder: Path, tokenizer: Any, staged_model: Path) -> None:
    """Build the folder that the converter reads: links to the model's files, with the base's SentencePiece file, which
    transformers does not write again (or one that is made of tokenizer.json), and the added tokens where the converter
    looks for them."""
    staged_model.mkdir()
    for file in model_folder.iterdir():
        if file.is_file():
            (staged_model / file.name).symlink_to(file.resolve())
    base_pieces = _tokenizer_folder(run, model_folder) / "tokenizer.model"
    staged_pieces = staged_model / "tokenizer.model"
    if base_pieces.is_file() and not staged_pieces.exists():
        staged_pieces.symlink_to(base_pieces.resolve())
    if not staged_pieces.exists() and gguf_checks.is_sentencepiece(tokenizer):
        gguf_checks.write_sentencepiece_model(tokenizer, staged_pieces)
    # the converter reads added tokens from here (`added_tokens_decoder`), where transformers 5 no longer writes them
    path = staged_model / "tokenizer_config.json"
    settings = read_json(path)
    added_tokens = {
        str(token_id): {"content": token.content, "special": token.special, "normalized": token.normalized}
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    path.unlink(missing_ok=True)  # a link: writing through it would change the model's own file
    path.write_text(json.dumps({"added_tokens_decoder": added_tokens, **settings}, indent=2) + "\n", encoding="utf-8")


def _tokenizer_folder(run: FinishedRun, model_folder: Path) -> Path:
    try:
        return base_model_folder(run)
    except ModelError:
        if run.is_adapter:
            raise
        return model_folder


def _converter_vocabulary(prompts: EnginePrompts, converter: Converter) -> tuple[dict[str, Any], str | None]:
    """Build the JSON of `run_converter.py` about the tokenizer; also return the pre-tokenizer that was proven equal."""
    tokenizer = prompts.tokenizer
    backend = tokenizer.backend_tokenizer
    names = matching_names(backend, read_pre_tokenizers(converter.vocabulary_source), probe_texts())
    pre_tokenizer = names[0] if names else None
    eos_id = tokenizer.eos_token_id
    # a GGUF has three places for tokens that end an answer (eos, eot, eom): the template's end of turn must have one
    other_stops = [token for token in prompts.stop_ids if token != eos_id]
    other_stops.sort(key=lambda token: tokenizer.convert_ids_to_tokens(token) != prompts.end_of_turn.strip())
    stop_names = ("eos", "eot", "eom") if eos_id is not None else ("eot", "eom")
    ids = dict(zip(stop_names, ([eos_id] if eos_id is not None else []) + other_stops, strict=False))
    space_prefix = gguf_checks.adds_space_prefix(tokenizer) if gguf_checks.is_sentencepiece(tokenizer) else None
    return {
        "pre": pre_tokenizer,
        "add_bos": prompts.engine_adds_bos(),
        "ids": ids,
        "space_prefix": space_prefix,
    }, pre_tokenizer


def _check_gguf(run: FinishedRun, file: Path, prompts: EnginePrompts, converter: Converter) -> tuple[int, list[str]]:
    fields, pre_tokenizers = gguf_checks.read_fields(file), read_pre_tokenizers(converter.vocabulary_source)
    paired_prompts = _check_prompts(run, prompts)
    checks = {check.name: check for check in gguf_checks.file_checks(fields, pre_tokenizers, prompts, paired_prompts)}
    for check in checks.values():
        if check.ok is False and check.name != "Stop tokens":
            remedy = f"serve the model from its folder: make export FORMAT=vllm RUN={run.folder.shell_path}"
            raise TokenizerError(
                f"{converter.version} wrote a GGUF that is not the trained model: {check.reason}; {remedy}"
            )
    notes = [f"{check.name}: {check.reason}" for check in checks.values() if check.ok is not True]
    return len(paired_prompts) if checks["Tokenizer"].ok else 0, notes


def _check_prompts(run: FinishedRun, prompts: EnginePrompts) -> list[PairedPrompt]:
    probe_prompts = prompts.probe_prompts()
    try:
        return [*prompts.row_prompts(load_held_out_rows(run).split, MAX_CHECKED_ROWS), *probe_prompts]
    except DataError as error:
        logger.warning("Export: the run's data is gone, so its prompts are not compared (%s)", error)
        return probe_prompts
