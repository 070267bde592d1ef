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

from sft_play.errors import ConfigError, DataError, ModelError, TokenizerError
from sft_play.finished.export import gguf_tokenizer
from sft_play.finished.export.llama_cpp import (
    PACKAGE,
    VERSION,
    Converter,
    convert,
    find_converter,
    has_llama_cpp,
    quantize,
)
from sft_play.finished.export.merge import whole_model
from sft_play.finished.export.ollama import modelfile_of
from sft_play.finished.export.places import (
    CONVERTED,
    EXPORT,
    EXPORT_FILE,
    Format,
    Quant,
    merge_record,
    merge_words,
    require_export_place,
)
from sft_play.finished.export.pre_tokenizers import probe_texts, proven_names, read_pre_tokenizers
from sft_play.finished.export.prompts import CHECKED_ROWS, PairedPrompt, Prompts, write_generation_config
from sft_play.finished.load import held_out
from sft_play.finished.run import (
    FinishedRun,
    Outcome,
    base_folder,
    built_folder,
    context_of,
    next_line,
    require_space,
    text_only_of,
)
from sft_play.runs.files import read_json, write_json
from sft_play.training.checkpoints.tensor_files import open_tensors, weight_files
from sft_play.training.prepare.quiet import quiet_libraries
from sft_play.units import format_gib

logger = logging.getLogger(__name__)

# By the dtype of the weights as safetensors names it; other dtypes have no lossless one here.
_LOSSLESS: dict[str, Quant] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_LARGEST_F16 = 65_504.0


@dataclass(frozen=True)
class Exported(Outcome):
    """What `export_run` wrote; `file`, `quant`, `converter`, `pre_tokenizer` and `prompts_checked` are of a GGUF."""

    run: Path
    format: Format
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
        what = f"{self.quant}, " if self.quant else ""
        size = f"{what}{format_gib(self.bytes, digits=2)} GiB"
        lines.append(f"Written to: {self.file or self.path} ({size}, {self.wall_s:.0f} s)")
        lines += [f"Serve: {command}" for command in self.commands]
        elsewhere = {} if self.path == self.run / EXPORT / self.format else {"OUT": self.path}
        if self.file is not None:
            return [*lines, next_line("export-test", RUN=self.run, **elsewhere)]
        if self.merge is not None:
            return [*lines, next_line("merge-test", RUN=self.run)]
        return [*lines, next_line("push", "REPO=user/name", RUN=self.run)]


def export_run(
    run: FinishedRun,
    format: Format,
    *,
    quant: Quant | None = None,
    out: Path | None = None,
    replace: bool = False,
    llama_cpp: Path | None = None,
) -> Exported:
    """Write a finished run for an engine, with the options of docs/trained.md (export). Raises ConfigError where
    `quant` does not fit, there is no converter, or the target cannot be written; RunFolderError where the target
    exists; ModelError or BackendError where the model is one that the converter cannot write; TokenizerError where the
    file's tokenizer would not be the one that was trained with, or the chat template cannot be written as a
    Modelfile's."""
    started = time.monotonic()
    target = out or run.folder.path / EXPORT / format
    require_export_place(target, replace=replace)
    quiet_libraries()
    # before the merge: a converter that cannot be fetched is known in seconds, a merge takes minutes
    if quant not in (None, *CONVERTED) and not has_llama_cpp():
        install = f"{sys.executable} -m pip install {PACKAGE}=={VERSION} (it compiles for minutes)"
        raise ConfigError(f"QUANT={quant} needs llama.cpp's library, which is not here: {install}; or take QUANT=q8_0")
    converter = None if format == "vllm" else find_converter(llama_cpp)
    model = whole_model(run, is_locked=True)
    with built_folder(target) as building:
        if converter is None:
            written = _write_folder(run, model, building, target)
        else:
            written = _write_gguf(run, model, building, target, converter, quant=quant, format=format)
        made_of = {
            "run": run.folder.path.name, "model": model.name, "quant": written.quant, "converter": written.converter,
            "file": written.file.name if written.file else None,
            "merge": merge_record(model) or None,  # what the weights are made of travels with them
        }  # fmt: skip
        write_json(building / EXPORT_FILE, {name: fact for name, fact in made_of.items() if fact is not None})
    notes, seconds = (*text_only_of(run), *written.notes), round(time.monotonic() - started, 2)
    return with_changes(written, notes=notes, merge=merge_words(model), wall_s=seconds)


def _write_folder(run: FinishedRun, model: Path, building: Path, target: Path) -> Exported:
    prompts = Prompts(run, model)
    for file in model.iterdir():
        if file.is_file():
            _link_or_copy(file, building / file.name)
    write_generation_config(run, prompts.tokenizer, model, building)
    size = sum(file.stat().st_size for file in building.glob("*.safetensors"))
    positions, note = context_of(run, str(model))
    name = run.folder.path.name
    words = ["vllm", "serve", str(target), "--served-model-name", name, "--max-model-len", str(positions)]
    return Exported(run.folder.path, "vllm", target, size, (shlex.join(words),), (note,) if note else ())


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for weights; a copy on another disk, and of small files: an edit here must not change the other."""
    try:
        (os.link if source.suffix == ".safetensors" else shutil.copyfile)(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _write_gguf(
    run: FinishedRun,
    model: Path,
    building: Path,
    target: Path,
    converter: Converter,
    *,
    quant: Quant | None,
    format: Format,
) -> Exported:
    chosen = _quant(model, quant)
    first = chosen if chosen in CONVERTED else _lossless(model) or "bf16"
    prompts = Prompts(run, model)
    name = run.folder.path.name
    file = building / f"{name}-{chosen}.gguf"
    needed = sum(weights.stat().st_size for weights in weight_files(model))
    needed += 0 if first == chosen else needed // 2  # both files are there for a moment
    require_space(building, needed, "the GGUF needs up to")
    staged = building / ".model"
    _stage(run, model, prompts.tokenizer, staged)
    vocabulary, pre = _vocabulary(prompts, converter)
    told: tuple[str, ...] = ()
    if format == "ollama":
        positions, note = context_of(run, str(model))
        text, told = modelfile_of(run, prompts, file.name, adds_bos=bool(vocabulary["add_bos"]), context=positions)
        told += (note,) if note else ()
        (building / "Modelfile").write_text(text, encoding="utf-8")
    written = file if first == chosen else staged / "whole.gguf"
    convert(converter, staged, written, quant=first, name=name, vocabulary=json.dumps(vocabulary))
    if first != chosen:
        quantize(written, file, chosen)
    shutil.rmtree(staged)
    checked, notes = _check_file(run, file, prompts, converter)
    fields = gguf_tokenizer.read_fields(file)
    served = target / file.name
    own = shlex.quote(name.lower())
    command = (
        f"ollama create {own} -f {shlex.quote(str(target / 'Modelfile'))} && ollama run {own}"
        if format == "ollama" else f"llama-server --jinja -m {shlex.quote(str(served))}"
    )  # fmt: skip
    return Exported(
        run.folder.path, format, target, file.stat().st_size, (command,), (*notes, *told), served,
        chosen, converter.version, str(fields.get("tokenizer.ggml.pre", pre)), checked,
    )  # fmt: skip


def _quant(model: Path, given: Quant | None) -> Quant:
    quant = given or _lossless(model)
    if quant is None:
        own = _dtype(model)
        raise ConfigError(f"the weights in {model} are {own}, which no GGUF holds as they are; give QUANT=bf16 or q8_0")
    if quant == "f16" and _lossless(model) != "f16" and (name := _beyond_f16(model)) is not None:
        raise ConfigError(f"QUANT=f16 cannot hold {name}, which has values above 65,504; take QUANT=bf16")
    return quant


def _dtype(model: Path) -> str:
    counts: dict[str, int] = {}
    for one in open_tensors(model).values():
        counts[one.dtype] = counts.get(one.dtype, 0) + math.prod(one.shape)
    return max(counts, key=lambda dtype: counts[dtype])


def _lossless(model: Path) -> Quant | None:
    return _LOSSLESS.get(_dtype(model))


def _beyond_f16(model: Path) -> str | None:
    from safetensors import safe_open

    for file in weight_files(model):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > _LARGEST_F16:
                    return str(name)
    return None


def _stage(run: FinishedRun, model: Path, tokenizer: Any, staged: Path) -> None:
    """A folder as the converter wants it: links to the model's files, with the base's SentencePiece file, which
    transformers does not write again (or one that is made of tokenizer.json), and the added tokens where the converter
    looks for them."""
    staged.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (staged / file.name).symlink_to(file.resolve())
    pieces = _base_files(run, model) / "tokenizer.model"
    own = staged / "tokenizer.model"
    if pieces.is_file() and not own.exists():
        own.symlink_to(pieces.resolve())
    if not own.exists() and gguf_tokenizer.is_sentencepiece(tokenizer):
        gguf_tokenizer.write_pieces(tokenizer, own)
    # the converter reads added tokens from here (`added_tokens_decoder`), where transformers 5 no longer writes them
    path = staged / "tokenizer_config.json"
    settings = read_json(path)
    added = {
        str(number): {"content": token.content, "special": token.special, "normalized": token.normalized}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    path.unlink(missing_ok=True)  # a link: writing through it would change the model's own file
    path.write_text(json.dumps({"added_tokens_decoder": added, **settings}, indent=2) + "\n", encoding="utf-8")


def _base_files(run: FinishedRun, model: Path) -> Path:
    try:
        return base_folder(run)
    except ModelError:
        if run.is_adapter:
            raise
        return model


def _vocabulary(prompts: Prompts, converter: Converter) -> tuple[dict[str, Any], str | None]:
    """What the converter is told about the tokenizer, and the pre-tokenizer that was proven equal to it."""
    tokenizer = prompts.tokenizer
    backend = tokenizer.backend_tokenizer
    names = proven_names(backend, read_pre_tokenizers(converter.vocabularies), probe_texts())
    pre = names[0] if names else None
    own = tokenizer.eos_token_id
    # a GGUF has three places for tokens that end an answer (eos, eot, eom): the template's end of turn must have one
    others = [token for token in prompts.stops if token != own]
    others.sort(key=lambda token: tokenizer.convert_ids_to_tokens(token) != prompts.end_of_turn.strip())
    kinds = ("eos", "eot", "eom") if own is not None else ("eot", "eom")
    ids = dict(zip(kinds, ([own] if own is not None else []) + others, strict=False))
    prefix = gguf_tokenizer.prefixes_space(tokenizer) if gguf_tokenizer.is_sentencepiece(tokenizer) else None
    return {"pre": pre, "add_bos": prompts.engine_adds_bos(), "ids": ids, "space_prefix": prefix}, pre


def _check_file(run: FinishedRun, file: Path, prompts: Prompts, converter: Converter) -> tuple[int, list[str]]:
    fields, known = gguf_tokenizer.read_fields(file), read_pre_tokenizers(converter.vocabularies)
    asked = _some_prompts(run, prompts)
    checks = {check.name: check for check in gguf_tokenizer.file_checks(fields, known, prompts, asked)}
    for check in checks.values():
        if check.ok is False and check.name != "Stop tokens":
            way_out = f"serve the model from its folder: make export FORMAT=vllm RUN={run.folder.shell_path}"
            raise TokenizerError(
                f"{converter.version} wrote a GGUF that is not the trained model: {check.reason}; {way_out}"
            )
    notes = [f"{check.name}: {check.reason}" for check in checks.values() if check.ok is not True]
    return len(asked) if checks["Tokenizer"].ok else 0, notes


def _some_prompts(run: FinishedRun, prompts: Prompts) -> list[PairedPrompt]:
    probing = prompts.of_probes()
    try:
        return [*prompts.of_rows(held_out(run).split, CHECKED_ROWS), *probing]
    except DataError as error:
        logger.warning("Export: the run's data is gone, so its prompts are not compared (%s)", error)
        return probing
