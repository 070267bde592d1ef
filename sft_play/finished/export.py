"""`make export`: a finished run as a GGUF, for Ollama, or as the folder that vLLM serves.

The adapter is merged first. llama.cpp's converter writes the GGUF; what it would guess of the tokenizer is given to it
(the pre-tokenizer, whether a prompt begins with BOS, the tokens that end an answer), and afterwards the file is read
back: its chat template and the token ids of prompts have to be those of training.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.diagnose import engines
from sft_play.errors import ConfigError, DataError, ModelError, RunFolderError, TokenizerError
from sft_play.facts.architecture import local_folder
from sft_play.finished.gguf_tokenizer import GgufTokenizer, Unreadable, read_fields
from sft_play.finished.llama_cpp import Converter, convert, find_converter
from sft_play.finished.load import held_out
from sft_play.finished.merge import stop_tokens, whole_model, write_generation_config
from sft_play.finished.modelfile import NoGoTemplate, evaluate, go_template, learn, modelfile, probes
from sft_play.finished.pre_tokenizers import probe_texts, proven_names, read_pre_tokenizers
from sft_play.finished.prompts import Asked, Prompts
from sft_play.finished.run import FinishedRun, base_folder, next_line, tensor_shapes, weight_files
from sft_play.finished.writing import built_folder
from sft_play.runs.files import write_json
from sft_play.training.quiet import quiet_libraries
from sft_play.units import gib

logger = logging.getLogger(__name__)

Format = Literal["gguf", "ollama", "vllm"]
Quant = Literal["f32", "f16", "bf16", "q8_0"]
EXPORT = "export"
"""The folder in a run folder under which each format has its own."""
RECORD = "export.json"
"""The file beside a GGUF that says what it was made of."""
_LOSSLESS: dict[str, Quant] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
"""By the dtype of the weights as safetensors names it; other dtypes have no lossless one here."""
_LARGEST_F16 = 65_504.0
_CHECKED_PROMPTS = 32


@dataclass(frozen=True)
class Exported:
    """What `export_run` wrote. `file`: the GGUF, where the format has one."""

    run: Path
    format: Format
    path: Path
    file: Path | None
    quant: Quant | None
    bytes: int
    converter: str | None
    pre_tokenizer: str | None
    prompts: int
    """Prompts whose token ids by the file's own tokenizer were seen to be those of training."""
    commands: tuple[str, ...]
    """What serves it."""
    notes: tuple[str, ...]
    is_adapter: bool
    """Whether the run's model had to be merged."""
    seconds: float

    @property
    def ok(self) -> bool:
        """An export that is returned is whole."""
        return True

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": True, "run": str(self.run), "format": self.format, "path": str(self.path),
            "file": str(self.file) if self.file else None, "quant": self.quant, "bytes": self.bytes,
            "converter": self.converter, "pre_tokenizer": self.pre_tokenizer, "prompts_checked": self.prompts,
            "commands": list(self.commands), "notes": list(self.notes), "wall_s": round(self.seconds, 2),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        lines = [*self.notes]
        if self.file is not None:
            lines.append(
                f"Tokenizer: {self.pre_tokenizer}; its ids of {self.prompts} prompts are those of training"
                if self.prompts else "Tokenizer: not compared"
            )  # fmt: skip
        what = f"{self.quant}, " if self.quant else ""
        lines.append(
            f"Written to: {self.file or self.path} ({what}{gib(self.bytes, digits=2)} GiB, {self.seconds:.0f} s)"
        )
        lines += [f"Serve: {command}" for command in self.commands]
        elsewhere = {} if self.path == self.run / EXPORT / self.format else {"OUT": self.path}
        if self.file is not None:
            return [*lines, next_line("export-test", RUN=self.run, **elsewhere)]
        if self.is_adapter:
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
        TokenizerError: the file's tokenizer would not be the one that was trained with, or the chat template cannot be
            said in a Modelfile.
    """
    started = time.monotonic()
    target = out or run.folder.path / EXPORT / format
    _require_target(target, replace=replace)
    quiet_libraries()
    converter = None if format == "vllm" else find_converter(llama_cpp)
    model = whole_model(run, is_locked=True)
    with built_folder(target) as building:
        if converter is None:
            result = _write_folder(run, model, building, target)
        else:
            result = _write_gguf(run, model, building, target, converter, quant=quant, format=format)
    seconds = time.monotonic() - started
    return Exported(run.folder.path, format, target, is_adapter=run.is_adapter, seconds=seconds, **result)


def _require_target(target: Path, *, replace: bool) -> None:
    if not target.exists():
        return
    if not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if not (target / RECORD).is_file():
        raise RunFolderError(
            f"{target} was not written by make export and is not replaced; OUT=FOLDER writes elsewhere"
        )


def _word(name: str | Path) -> str:
    """As a shell reads it as one word."""
    return shlex.quote(str(name))


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _write_gguf(
    run: FinishedRun,
    model: Path,
    building: Path,
    target: Path,
    converter: Converter,
    *,
    quant: Quant | None,
    format: Format,
) -> dict[str, Any]:
    chosen = _quant(model, quant)
    prompts = Prompts(run, model)
    name = run.folder.path.name
    file = building / f"{name}-{chosen}.gguf"
    _require_disk(model, building)
    staged = building / ".model"
    _stage(run, model, prompts.tokenizer, staged)
    vocabulary, pre = _vocabulary(run, prompts, converter)
    told: tuple[str, ...] = ()
    if format == "ollama":
        text, told = _modelfile(run, prompts, file.name, adds_bos=bool(vocabulary["add_bos"]))
        (building / "Modelfile").write_text(text, encoding="utf-8")
    convert(converter, staged, file, quant=chosen, name=name, vocabulary=json.dumps(vocabulary))
    shutil.rmtree(staged)
    checked, notes = _check_file(run, file, prompts, converter, vocabulary)
    fields = read_fields(file)
    served = target / file.name
    commands = (
        (f"ollama create {_word(name.lower())} -f {_word(target / 'Modelfile')} && ollama run {_word(name.lower())}",)
        if format == "ollama" else (f"llama-server --jinja -m {_word(served)}",)
    )  # fmt: skip
    record = {"run": name, "quant": chosen, "converter": converter.version, "file": file.name}
    write_json(building / RECORD, record)
    return {
        "file": served, "quant": chosen, "bytes": file.stat().st_size, "converter": converter.version,
        "pre_tokenizer": str(fields.get("tokenizer.ggml.pre", pre)), "prompts": checked, "commands": commands,
        "notes": (*notes, *told),
    }  # fmt: skip


def _quant(model: Path, given: Quant | None) -> Quant:
    """How the file stores weights; raises ConfigError where f16 would make them infinite."""
    counts: dict[str, int] = {}
    for _, shape, dtype in tensor_shapes(model).values():
        numbers = 1
        for size in shape:
            numbers *= size
        counts[dtype] = counts.get(dtype, 0) + numbers
    own = max(counts, key=lambda dtype: counts[dtype])
    quant = given or _LOSSLESS.get(own)
    if quant is None:
        raise ConfigError(f"the weights in {model} are {own}, which no GGUF holds as they are; give QUANT=bf16 or q8_0")
    if quant == "f16" and own != "F16":
        name = _beyond_f16(model)
        if name is not None:
            raise ConfigError(f"QUANT=f16 cannot hold {name}, which has values above 65,504; take QUANT=bf16")
    return quant


def _beyond_f16(model: Path) -> str | None:
    from safetensors import safe_open

    for file in weight_files(model):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and tensor.numel() and float(tensor.abs().max()) > _LARGEST_F16:
                    return str(name)
    return None


def _require_disk(model: Path, folder: Path) -> None:
    needed = sum(file.stat().st_size for file in weight_files(model))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"the GGUF needs up to {gib(needed)} GiB and {folder.parent} has {gib(free)} GiB free; "
            "name another disk: OUT=FOLDER"
        )


def _stage(run: FinishedRun, model: Path, tokenizer: Any, staged: Path) -> None:
    """A folder as the converter wants it: links to the model's files, with the base's SentencePiece file (a vocabulary
    that transformers does not write again) and the added tokens where the converter looks for them."""
    staged.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (staged / file.name).symlink_to(file.resolve())
    pieces = _base_files(run, model) / "tokenizer.model"
    if pieces.is_file() and not (staged / "tokenizer.model").exists():
        (staged / "tokenizer.model").symlink_to(pieces.resolve())
    path = staged / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    added = {
        str(number): {"content": token.content, "special": token.special, "normalized": token.normalized}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({"added_tokens_decoder": added, **settings}, indent=2) + "\n", encoding="utf-8")


def _base_files(run: FinishedRun, model: Path) -> Path:
    """The folder of the base's files; that of the model itself where the base is gone and not needed."""
    try:
        return base_folder(run)
    except ModelError:
        if run.is_adapter:
            raise
        return model


def _vocabulary(run: FinishedRun, prompts: Prompts, converter: Converter) -> tuple[dict[str, Any], str | None]:
    """What the converter is told of the tokenizer, and the pre-tokenizer that was proven."""
    tokenizer = prompts.tokenizer
    backend = tokenizer.backend_tokenizer
    names = proven_names(backend, read_pre_tokenizers(converter.vocabularies), probe_texts())
    pre = names[0] if names else None
    stops = stop_tokens(run, tokenizer, prompts.configured_stops)
    own = tokenizer.eos_token_id
    others = [token for token in stops if token != own]
    others.sort(key=lambda token: tokenizer.convert_ids_to_tokens(token) != prompts.end_of_turn.strip())
    kinds = ("eos", "eot", "eom") if own is not None else ("eot", "eom")
    ids = dict(zip(kinds, ([own] if own is not None else []) + others, strict=False))
    return {"pre": pre, "add_bos": prompts.engine_adds_bos(), "ids": ids}, pre


def _check_file(
    run: FinishedRun, file: Path, prompts: Prompts, converter: Converter, vocabulary: dict[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Compare what the file says of the tokenizer with training; the number of prompts compared, and notes.

    Raises:
        TokenizerError: it is another tokenizer, or another chat template.
    """
    fields = read_fields(file)
    if prompts.template is not None and fields.get("tokenizer.chat_template") != prompts.template:
        raise TokenizerError(f"{converter.version} wrote another chat template into the GGUF than the one trained with")
    wanted, written = vocabulary["add_bos"], bool(fields.get("tokenizer.ggml.add_bos_token"))
    if wanted is not None and written != wanted:
        what = "lack the BOS that they had" if wanted else "begin with a BOS that they did not have"
        raise TokenizerError(f"{converter.version} wrote add_bos_token={written}: prompts would {what} in training")
    try:
        own = GgufTokenizer(fields, read_pre_tokenizers(converter.vocabularies))
    except Unreadable as error:
        return 0, (f"Tokenizer: {error}; make export-test reads it where llama-cpp-python is installed",)
    asked = _some_prompts(run, prompts)
    for one in asked:
        ids = own.encode(one.text)
        if ids != one.ids:
            raise TokenizerError(
                f"the GGUF's tokenizer ({own.kind}, {own.pre}) is not the one that was trained with: "
                f"{_first_difference(one, ids, prompts.tokenizer)}. llama.cpp cannot run this tokenizer as it is; "
                f"serve the model from its folder: make export FORMAT=vllm RUN={run.folder.path}"
            )
    stops = set(stop_tokens(run, prompts.tokenizer, prompts.configured_stops)) - own.stop_ids
    lost = ", ".join(prompts.tokenizer.convert_ids_to_tokens(sorted(stops)))
    return len(asked), ((f"Stop tokens that a GGUF has no place for: {lost}",) if stops else ())


def _some_prompts(run: FinishedRun, prompts: Prompts) -> list[Asked]:
    """Prompts of the run's own rows, where its data is still there, and of probe conversations."""
    probing = prompts.of_probes()
    try:
        return [*prompts.of_rows(held_out(run).split, _CHECKED_PROMPTS), *probing]
    except DataError as error:
        logger.warning("Export: the run's data is gone, so its prompts are not compared (%s)", error)
        return probing


def _first_difference(one: Asked, ids: Sequence[int], tokenizer: Any) -> str:
    place = next(
        (place for place, (a, b) in enumerate(zip(one.ids, ids, strict=False)) if a != b), min(len(one.ids), len(ids))
    )
    trained, here = (tokenizer.convert_ids_to_tokens(list(some)[place : place + 4]) for some in (one.ids, ids))
    return f"token {place} of a prompt begins {trained} in training and {here} in the file"


# --- Ollama -----------------------------------------------------------------------------------------------------------


def _modelfile(run: FinishedRun, prompts: Prompts, file: str, *, adds_bos: bool) -> tuple[str, tuple[str, ...]]:
    """The Modelfile, and notes about rows that it renders otherwise. `adds_bos`: the engine puts BOS before a prompt.

    Raises:
        NoGoTemplate: the chat template cannot be said in it.
    """
    tokenizer = prompts.tokenizer
    stops = [
        tokenizer.decode([token], skip_special_tokens=False)
        for token in stop_tokens(run, tokenizer, prompts.configured_stops)
    ]
    for stop in stops:
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise NoGoTemplate(f"the stop token {stop!r} is not one token when it is written as text")
    context = run.plan().max_seq_len
    if prompts.is_text:
        return modelfile(file, "{{ .Prompt }}", stops=stops, system=None, context=context), ()
    bos = str(tokenizer.bos_token) if adds_bos else ""
    try:
        parts = learn(prompts.render, tokenizer.all_special_tokens)
        template = go_template(parts, bos=bos)
        _check_probes(prompts, template, bos=bos, has_system=parts.system is not None)
    except NoGoTemplate as error:
        raise NoGoTemplate(
            f"the chat template cannot be written as an Ollama template: {error}. Ollama would send other prompts than "
            "training did. llama-server --jinja runs the chat template itself: make export FORMAT=gguf "
            f"RUN={run.folder.path}"
        ) from None
    notes = _rows_otherwise(run, prompts, template, bos)
    if prompts.writes_date:
        notes = (*notes, f"The chat template writes the date; the Modelfile has that of the run ({prompts.today})")
    return modelfile(file, template, stops=stops, system=parts.default_system, context=context), notes


def _check_probes(prompts: Prompts, template: str, *, bos: str, has_system: bool) -> None:
    for messages in probes():
        if messages[0]["role"] == "system" and not has_system:
            continue
        wanted = prompts.render(messages).removeprefix(bos)
        if evaluate(template, messages) != wanted:
            roles = ", ".join(message["role"] for message in messages)
            raise NoGoTemplate(f"its text of a conversation ({roles}) is another one")


def _rows_otherwise(run: FinishedRun, prompts: Prompts, template: str, bos: str) -> tuple[str, ...]:
    """A note where rows of the run would be rendered otherwise: tools, other roles, white space that is stripped."""
    try:
        rows = prompts.of_rows(held_out(run).split, _CHECKED_PROMPTS)
    except DataError:
        return ()
    plain = [row for row in rows if row.is_plain]
    same = sum(evaluate(template, row.messages) == row.text.removeprefix(bos) for row in plain)
    if same == len(rows):
        return ()
    return (
        f"Ollama: {len(rows) - same} of {len(rows)} prompts of the run's rows are rendered otherwise (tools, other "
        "roles, or white space that the chat template strips)",
    )


# --- vLLM -------------------------------------------------------------------------------------------------------------


def _write_folder(run: FinishedRun, model: Path, building: Path, target: Path) -> dict[str, Any]:
    """The whole model as a folder: files of `merged/` or `model/`, linked where the disk allows it."""
    prompts = Prompts(run, model)
    for file in model.iterdir():
        if file.is_file():
            _link_or_copy(file, building / file.name)
    write_generation_config(run, prompts.tokenizer, model, building)
    write_json(building / RECORD, {"run": run.folder.path.name, "model": model.name})
    size = sum(file.stat().st_size for file in building.glob("*.safetensors"))
    name, length = run.folder.path.name, run.plan().max_seq_len
    commands = [f"vllm serve {_word(target)} --served-model-name {_word(name)} --max-model-len {length}"]
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    limits = engines.findings("vllm", engines.trained_of(run.config, engines.architecture_of(values)))
    rank = engines.vllm_rank(run.config.tuning.lora.r)
    if run.is_adapter and not run.is_quantized and rank and all(limit.verdict != "FAIL" for limit in limits):
        base = local_folder(run.config.model.name) or run.config.model.name
        commands.append(
            f"vllm serve {_word(base)} --enable-lora --max-lora-rank {rank} "
            f"--lora-modules {_word(f'{name}={run.weights}')} --max-model-len {length}"
        )
    return {
        "file": None, "quant": None, "bytes": size, "converter": None, "pre_tokenizer": None, "prompts": 0,
        "commands": tuple(commands), "notes": (),
    }  # fmt: skip


def _link_or_copy(source: Path, target: Path) -> None:
    """A second name for the same file; a copy on another disk, or where the file system knows no links.

    Small files are copied: whoever edits a config here does not change the other one.
    """
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), target)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, target)
