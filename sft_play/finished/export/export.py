"""`make export`: a finished run as a GGUF, for Ollama, or as the folder that vLLM serves. Adapters
are merged first.

llama.cpp's converter writes the GGUF; what it would guess of the tokenizer is given to it (the
pre-tokenizer, whether a prompt begins with BOS, the tokens that end an answer), and afterwards the
file is read back: its chat template and the token ids of prompts have to be those of training.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.data.masks.sandbox import RenderError
from sft_play.errors import BackendError, ConfigError, DataError, ModelError, TokenizerError
from sft_play.finished.export.checks import (
    EnginePrompts,
    adds_space_prefix,
    check_file,
    find_pre_tokenizer,
    is_sentencepiece,
    probe_conversations,
    read_fields,
)
from sft_play.finished.export.llama_cpp import (
    LLAMA_CPP_PACKAGE,
    LLAMA_CPP_VERSION,
    convert_to_gguf,
    find_converter,
    quantize_gguf,
)
from sft_play.finished.export.merge import (
    ensure_whole_model_folder,
    main_dtype,
    write_generation_config,
)
from sft_play.finished.respond import load_held_out_rows
from sft_play.finished.run import (
    CONVERTER_QUANTS,
    EXPORT_FILE,
    EXPORT_FOLDER,
    MERGE_FILE,
    ExportFormat,
    FinishedRun,
    Quant,
    base_model_folder,
    describe_context_window,
    describe_merge,
    next_command_line,
    require_export_target,
    require_space,
    staged_folder,
)
from sft_play.log import one_line
from sft_play.machine.software import install_command
from sft_play.runs.folder import read_json, write_json
from sft_play.text import format_duration, format_size
from sft_play.training.checkpoints.model_saving import open_tensors, weight_files
from sft_play.training.prepare.library_messages import quiet_libraries

logger = logging.getLogger(__name__)

# By the dtype of the weights as safetensors names it; other dtypes have no lossless one here.
_LOSSLESS_QUANTS: dict[str, Quant] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@dataclasses.dataclass(frozen=True)
class ExportResult(Answer):
    """What `export_run` wrote; only a GGUF has `file`, `quant` and `prompts_checked`."""

    run: Path
    format: ExportFormat
    path: Path
    bytes: int
    commands: tuple[str, ...]
    notes: tuple[str, ...] = ()
    file: Path | None = None
    quant: Quant | None = None
    # What turns images into embeddings; None for a run on text alone, and where there is none.
    projector: Path | None = None
    # Prompts that have training's token ids by the file's own tokenizer.
    prompts_checked: int = 0
    # What was merged, and whether merge-test passed, in words; None without an adapter.
    merge: str | None = None
    wall_s: float = 0.0

    def lines(self) -> list[str]:
        lines = list(filter(None, [self.merge, *self.notes]))
        if self.prompts_checked:
            lines.append(
                f"Tokenizer: its ids of {self.prompts_checked} prompts are those of training"
            )
        facts = filter(None, [self.quant, format_size(self.bytes), format_duration(self.wall_s)])
        lines.append(f"Written to: {self.file or self.path} ({', '.join(facts)})")
        if self.projector:
            lines.append(f"Images: by the projector {self.projector}")
        lines += [f"Serve: {command}" for command in self.commands]
        next_line = next_command_line("push", "REPO=user/name", RUN=self.run)
        if self.file is not None:
            place = (
                {} if self.path == self.run / EXPORT_FOLDER / self.format else {"OUT": self.path}
            )
            next_line = next_command_line("export-test", RUN=self.run, **place)
        elif self.merge is not None:
            next_line = next_command_line("merge-test", RUN=self.run)
        return [*lines, next_line]


def export_run(
    run: FinishedRun,
    format: ExportFormat,
    *,
    quant: Quant | None = None,
    out: Path | None = None,
    replace: bool = False,
    llama_cpp: Path | None = None,
) -> ExportResult:
    """Write a finished run for an engine; the options are those of `make export` (docs/trained.md).

    Raises:
        ConfigError: `quant` does not fit, there is no converter, or the target cannot be written.
        RunFolderError: the target exists.
        ModelError, BackendError: the converter cannot write this model.
        TokenizerError: the file's tokenizer is not the one that was trained with, or the chat
            template cannot be written as a Modelfile's.
    """
    start_time = time.monotonic()
    target = out or run.folder.path / EXPORT_FOLDER / format
    require_export_target(target, replace=replace)
    quiet_libraries()
    # before the merge: a converter that cannot be fetched is known in seconds, a merge takes
    # minutes
    if quant not in (None, *CONVERTER_QUANTS) and importlib.util.find_spec("llama_cpp") is None:
        raise ConfigError(
            f"QUANT={quant} needs llama.cpp's library, which is not here:"
            f" {install_command(f'{LLAMA_CPP_PACKAGE}=={LLAMA_CPP_VERSION}')}"
            " (it compiles for minutes); or take QUANT=q8_0"
        )
    converter_folder = None if format == "vllm" else find_converter(llama_cpp)
    model_folder = ensure_whole_model_folder(run, is_locked=True)
    prompts = EnginePrompts(run, model_folder)
    with staged_folder(target) as staging_folder:
        if converter_folder is None:
            result = _write_vllm_folder(run, model_folder, prompts, staging_folder, target)
        else:
            result = _write_gguf(
                run, model_folder, prompts, staging_folder, target, converter_folder, quant, format
            )
        record = {
            "run": run.folder.path.name,
            "model": model_folder.name,
            "quant": result.quant,
            "converter": converter_folder and converter_folder.name,
            "file": result.file and result.file.name,
            "projector": result.projector and result.projector.name,
            # what the weights are made of travels with them
            "merge": read_json(model_folder / MERGE_FILE) or None,
        }
        write_json(
            staging_folder / EXPORT_FILE,
            {name: value for name, value in record.items() if value is not None},
        )
    return dataclasses.replace(
        result, merge=describe_merge(model_folder), wall_s=round(time.monotonic() - start_time, 2)
    )


def _write_vllm_folder(
    run: FinishedRun, model_folder: Path, prompts: EnginePrompts, staging_folder: Path, target: Path
) -> ExportResult:
    for file in filter(Path.is_file, model_folder.iterdir()):
        copy = staging_folder / file.name
        # weights share their place on the disk; a small file is copied, so that an edit does not
        # change the other
        if file.suffix == ".safetensors":
            with contextlib.suppress(OSError):  # on another disk, or one without hard links
                os.link(file.resolve(), copy)
        if not copy.exists():
            shutil.copyfile(file, copy)
    write_generation_config(run, prompts.tokenizer, model_folder, staging_folder)
    size = sum(file.stat().st_size for file in staging_folder.glob("*.safetensors"))
    max_positions, _ = describe_context_window(run, str(model_folder))
    command = [
        *("vllm", "serve", str(target), "--served-model-name", run.folder.path.name),
        *("--max-model-len", str(max_positions)),
    ]
    return ExportResult(run.folder.path, "vllm", target, size, (shlex.join(command),))


def _write_gguf(
    run: FinishedRun,
    model_folder: Path,
    prompts: EnginePrompts,
    staging_folder: Path,
    target: Path,
    converter_folder: Path,
    quant: Quant | None,
    format: ExportFormat,
) -> ExportResult:
    name = run.folder.path.name
    file_quant, converted_quant = _resolve_quants(model_folder, quant)
    file = staging_folder / f"{name}-{file_quant}.gguf"
    needed_bytes = sum(weight_file.stat().st_size for weight_file in weight_files(model_folder))
    if converted_quant != file_quant:
        needed_bytes += needed_bytes // 2  # both files are there for a moment
    require_space(staging_folder, needed_bytes, "the GGUF needs up to")
    vocabulary = _converter_vocabulary(prompts)
    command = f"llama-server --jinja -m {shlex.quote(str(target / file.name))}"
    if format == "ollama":
        max_positions, _ = describe_context_window(run, str(model_folder))
        text = build_modelfile(
            run,
            prompts,
            file.name,
            adds_bos=vocabulary["fields"]["tokenizer.ggml.add_bos_token"],
            context=max_positions,
        )
        (staging_folder / "Modelfile").write_text(text, encoding="utf-8")
        model_name = shlex.quote(name.lower())
        command = (
            f"ollama create {model_name} -f {shlex.quote(str(target / 'Modelfile'))} && ollama run"
            f" {model_name}"
        )
    staged_model = staging_folder / ".model"
    _stage_model(run, model_folder, prompts.tokenizer, staged_model)
    # a type that the converter does not write is quantized from a lossless file
    converted_file = file if converted_quant == file_quant else staged_model / "whole.gguf"
    convert_to_gguf(
        converter_folder,
        staged_model,
        converted_file,
        quant=converted_quant,
        name=name,
        vocabulary=vocabulary,
    )
    if converted_file != file:
        quantize_gguf(converted_file, file, file_quant)
    projector, notes = None, list[str]()
    if run.has_images and format == "ollama":
        notes.append("Images: the Modelfile takes text alone; FORMAT=gguf writes the projector too")
    elif run.has_images:
        projector = staging_folder / f"mmproj-{name}.gguf"
        reason = _write_projector(converter_folder, staged_model, projector, converted_quant, name)
        if reason:
            projector = None
            notes.append(f"Images: the file takes text alone, {reason}")
        else:
            command += f" --mmproj {shlex.quote(str(target / projector.name))}"
    shutil.rmtree(staged_model)
    prompts_checked, check_notes = _check_written_file(run, file, prompts)
    notes += check_notes
    return ExportResult(
        run.folder.path,
        format,
        target,
        file.stat().st_size,
        (command,),
        tuple(notes),
        target / file.name,
        file_quant,
        projector and target / projector.name,
        prompts_checked,
    )


def _check_written_file(
    run: FinishedRun, file: Path, prompts: EnginePrompts
) -> tuple[int, list[str]]:
    """Compare the vocabulary and prompts of a GGUF with the run's: how many prompts were equal, and
    what is not as trained. Raises TokenizerError where it is another model."""
    notes: list[str] = []
    paired_prompts = prompts.probe_prompts()
    try:
        paired_prompts += prompts.row_prompts(load_held_out_rows(run).split, 32)
    except DataError as error:
        logger.warning(
            "Export: the run's data is gone, so its prompts are not compared (%s)", error
        )
    prompts_checked = 0
    for check in check_file(run, file, read_fields(file), prompts, paired_prompts):
        # a GGUF has three places for stop tokens: a fourth is a note, and no fault of the file
        if check.ok is False and check.name != "Stop tokens":
            raise TokenizerError(
                f"llama.cpp's converter wrote a GGUF that is not the trained model: {check.reason};"
                " serve the model from its folder: make export FORMAT=vllm"
                f" RUN={run.folder.shell_path}"
            )
        if check.name == "Tokenizer" and check.ok:
            prompts_checked = len(paired_prompts)
        if not check.ok:
            notes.append(f"{check.name}: {check.reason}")
    return prompts_checked, notes


def _write_projector(
    converter_folder: Path, staged_model: Path, target: Path, quant: Quant, name: str
) -> str:
    """Write the projector of the staged model; returns why there is none, empty where there is."""
    try:
        convert_to_gguf(
            converter_folder,
            staged_model,
            target,
            quant="f16" if quant == "q8_0" else quant,
            name=name,
            vocabulary={"pre": None, "fields": {}},
            is_projector=True,
        )
    except BackendError as error:
        target.unlink(missing_ok=True)
        class_name = (read_json(staged_model / "config.json").get("architectures") or ["it"])[0]
        last_line = one_line(str(error).splitlines()[-1].strip(), limit=200)
        return f"llama.cpp's converter writes no projector for {class_name}: {last_line}"
    return ""


def _resolve_quants(model_folder: Path, requested_quant: Quant | None) -> tuple[Quant, Quant]:
    """Choose the type of the file's weights, and the type in which the converter writes them before
    they are quantized. Raises ConfigError where there is none, or f16 cannot hold a value."""
    tensors = open_tensors(model_folder)
    dtype = main_dtype(tensors.values())
    lossless = _LOSSLESS_QUANTS.get(dtype)
    quant = requested_quant or lossless
    if quant is None:
        raise ConfigError(
            f"the weights in {model_folder} are {dtype}, which no GGUF holds as they are; give"
            " QUANT=bf16 or q8_0"
        )
    if quant == "f16" and lossless != "f16":
        for name, tensor in tensors.items():
            values = tensor.read()
            if values.is_floating_point() and values.numel() and float(values.abs().max()) > 65_504:
                raise ConfigError(
                    f"QUANT=f16 cannot hold {name}, which has values above 65,504; take QUANT=bf16"
                )
    return quant, quant if quant in CONVERTER_QUANTS else lossless or "bf16"


def _stage_model(run: FinishedRun, model_folder: Path, tokenizer: Any, staged_model: Path) -> None:
    """Build the folder that the converter reads: links to the model's files, the base's
    SentencePiece file, which transformers does not write again, and the added tokens where the
    converter looks for them. Raises ModelError where a SentencePiece file is missing."""
    staged_model.mkdir()
    for file in filter(Path.is_file, model_folder.iterdir()):
        (staged_model / file.name).symlink_to(file.resolve())
    pieces = staged_model / "tokenizer.model"
    # a base that is gone: a fully trained model needs it no more
    with contextlib.suppress(ModelError):
        base_pieces = base_model_folder(run) / "tokenizer.model"
        if base_pieces.is_file() and not pieces.exists():
            pieces.symlink_to(base_pieces.resolve())
    if is_sentencepiece(tokenizer) and not pieces.exists():
        # without it the converter ends in an error, or gives all pieces one score: another
        # tokenizer
        raise ModelError(
            "llama.cpp's converter reads a SentencePiece tokenizer from tokenizer.model, and "
            f"{model_folder} and the base have none;"
            f" copy the published model's into {model_folder}"
        )
    # the converter reads added tokens from here (`added_tokens_decoder`), where transformers 5 no
    # longer writes them
    path = staged_model / "tokenizer_config.json"
    settings = read_json(path)
    added_tokens = {
        str(token_id): {
            "content": token.content,
            "special": token.special,
            "normalized": token.normalized,
        }
        for token_id, token in tokenizer.added_tokens_decoder.items()
    }
    path.unlink(missing_ok=True)  # a link: writing through it would change the model's own file
    path.write_text(
        json.dumps({"added_tokens_decoder": added_tokens, **settings}, indent=2) + "\n",
        encoding="utf-8",
    )


def _converter_vocabulary(prompts: EnginePrompts) -> dict[str, Any]:
    """Describe the tokenizer to the converter: `pre` and `fields` of `run_llama_cpp.py`."""
    tokenizer = prompts.tokenizer
    # a GGUF has three places for tokens that end an answer (eos, eot, eom): the template's end of
    # turn must have one
    stop_ids = sorted(
        prompts.stop_ids,
        key=lambda token: (
            token != tokenizer.eos_token_id,
            tokenizer.convert_ids_to_tokens(token) != prompts.end_of_turn.strip(),
        ),
    )
    names = ["eos", "eot", "eom"] if tokenizer.eos_token_id is not None else ["eot", "eom"]
    fields = {f"{name}_token_id": token for name, token in zip(names, stop_ids, strict=False)}
    # an engine has to put BOS before a prompt where training's began with it and the tokenizer puts
    # it there by itself
    bos = [tokenizer.bos_token_id]
    is_added = list(tokenizer("a")["input_ids"])[:1] == bos
    adds_bos = is_added and any(pair.ids[:1] == bos for pair in prompts.probe_prompts()[:1])
    fields |= {"add_bos_token": adds_bos, "add_eos_token": False}
    if is_sentencepiece(tokenizer):
        # llama.cpp puts a space before text if the entry is missing
        fields["add_space_prefix"] = adds_space_prefix(tokenizer)
    return {
        "pre": find_pre_tokenizer(tokenizer.backend_tokenizer),
        "fields": {f"tokenizer.ggml.{name}": value for name, value in fields.items()},
    }


# --- an Ollama Modelfile --------------------------------------------------------------------------
#
# The chat template of training, written again in Go's template language, and checked. Ollama does
# not run the template inside a GGUF. Its own is made of the texts that the chat template writes
# between probe texts. A conversation alternates (Ollama joins neighbouring messages of one role),
# so it does not matter where one turn ends and the next begins between two of them. What Ollama
# makes of conversations with its template has to be the chat template's text, character by
# character.
_SYSTEM, _TURNS = "Qsys0Q", ("Quser1Q", "Qbot1Q", "Quser2Q", "Qbot2Q", "Quser3Q")


class UnsupportedTemplateError(TokenizerError):
    """The chat template does what a Modelfile cannot say."""


@dataclasses.dataclass(frozen=True)
class TemplateParts:
    """What a chat template writes around the texts of a conversation."""

    # Before the first question, where there is no system prompt.
    start: str
    question_to_answer: str
    answer_to_question: str
    # After the last question, up to where the answer begins.
    end: str
    # Around the system prompt, up to the question that follows it; None where the template takes
    # none.
    system: tuple[str, str] | None = None
    # True if the system prompt stands before the last question, after `start` or
    # `answer_to_question`; else it stands before the first question, in the place of `start`.
    is_system_last: bool = False


def build_modelfile(
    run: FinishedRun, prompts: EnginePrompts, file: str, *, adds_bos: bool, context: int
) -> str:
    """Build the text of a Modelfile for the GGUF `file`. `adds_bos` is True if the engine puts BOS
    before a prompt; `context` is the model's positions. Raises UnsupportedTemplateError where a
    Modelfile cannot render what the chat template does.
    """
    tokenizer = prompts.tokenizer
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in prompts.stop_ids]
    for stop in stops:
        # Ollama stops at a text, not at a token: one that ordinary tokens spell too would end
        # answers early
        if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
            raise UnsupportedTemplateError(
                f"the stop token {stop!r} is not one token when it is written as text"
            )
    template, bos = "{{ .Prompt }}", str(tokenizer.bos_token) if adds_bos else ""
    try:
        if not prompts.is_plain_text:
            template = go_template(learn_template_parts(prompts.render, bos=bos))
        return format_modelfile(file, template, stops=stops, context=context)
    except (UnsupportedTemplateError, RenderError) as error:
        raise UnsupportedTemplateError(
            f"the chat template cannot be written as an Ollama template: {error}. llama-server "
            f"--jinja runs it itself: make export FORMAT=gguf RUN={run.folder.shell_path}"
        ) from None


def format_modelfile(file: str, template: str, *, stops: Sequence[str], context: int) -> str:
    """Write the lines of a Modelfile. `context` is the tokens of the longest conversation: Ollama's
    own limit cuts prompts silently. Raises UnsupportedTemplateError where the template cannot be
    quoted."""
    if '"""' in template:
        raise UnsupportedTemplateError('it writes """, which ends a text in a Modelfile')
    lines = [
        f"FROM ./{file}",
        f'TEMPLATE """{template}"""',
        *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops),
        f"PARAMETER num_ctx {context}",
        "PARAMETER temperature 0",  # greedy, as the run's own evaluation and every comparison here
    ]
    return "\n".join(lines) + "\n"


def learn_template_parts(
    render: Callable[[Sequence[Mapping[str, str]]], str], *, bos: str = ""
) -> TemplateParts:
    """Learn the parts of a chat template from probe conversations.

    Args:
        render: the template: messages to text up to where the answer begins; raises RenderError
            where it refuses them.
        bos: a text at the beginning that the engine puts there.

    Raises:
        UnsupportedTemplateError: the parts do not make up what the template writes.
    """
    turns = [
        {"role": ("user", "assistant")[index % 2], "content": text}
        for index, text in enumerate(_TURNS)
    ]
    start, *between, end = _split_at(render(turns), _TURNS)
    parts = TemplateParts(start.removeprefix(bos), between[0], between[1], end)
    try:
        text = render([{"role": "system", "content": _SYSTEM}, *turns])
    except RenderError:
        text = ""
    if _SYSTEM in text and text.index(_SYSTEM) < text.index(_TURNS[0]):
        before, after, *_ = _split_at(text, (_SYSTEM, *_TURNS))
        parts = dataclasses.replace(parts, system=(before.removeprefix(bos), after))
    elif _SYSTEM in text:
        *_, before, after, _ = _split_at(text, (*_TURNS[:-1], _SYSTEM, _TURNS[-1]))
        parts = dataclasses.replace(
            parts, system=(before.removeprefix(between[1]), after), is_system_last=True
        )
    for messages in probe_conversations():
        if messages[0]["role"] == "system" and parts.system is None:
            continue
        if render_as_ollama(parts, messages) != render(messages).removeprefix(bos):
            roles = ", ".join(message["role"] for message in messages)
            raise UnsupportedTemplateError(f"it renders a conversation ({roles}) differently")
    return parts


def _split_at(text: str, marks: Sequence[str]) -> list[str]:
    pieces = []
    for mark in marks:
        piece, matched, text = text.partition(mark)
        if not matched or mark in text:
            raise UnsupportedTemplateError("it does not write every turn once and in order")
        pieces.append(piece)
    return [*pieces, text]


def go_template(parts: TemplateParts) -> str:
    """The parts as a template in Go's language."""

    def escape(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')  # Go's way to write braces that begin no action

    start, question, index = escape(parts.start), "{{ .Content }}", ""
    if parts.system is not None:
        before, after = map(escape, parts.system)
        if parts.is_system_last:
            condition, index = "and $.System (eq (len (slice $.Messages $i)) 1)", "$i, $_ := "
            question = (
                f"{{{{ if {condition} }}}}{before}{{{{ $.System }}}}{after}{{{{ end }}}}{question}"
            )
        else:
            start = (
                f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end"
                " }}"
            )
    answer = (
        f"{escape(parts.question_to_answer)}{{{{ .Content }}}}{escape(parts.answer_to_question)}"
    )
    return (
        f'{start}{{{{ range {index}.Messages }}}}{{{{ if eq .Role "user" }}}}{question}{{{{ else if'
        f' eq .Role "assistant" }}}}{answer}{{{{ end }}}}{{{{ end }}}}{escape(parts.end)}'
    )


def render_as_ollama(parts: TemplateParts, messages: Sequence[Mapping[str, str]]) -> str:
    """Render a conversation as Ollama does with the template of these parts; its roles
    alternate."""
    contents, text, system = [message["content"] for message in messages], parts.start, ""
    if messages[0]["role"] == "system" and parts.system is not None:
        system = parts.system[0] + contents.pop(0) + parts.system[1]
        text = text if parts.is_system_last else system
    for index, content in enumerate(contents):
        if index == len(contents) - 1 and parts.is_system_last:
            text += system
        if index % 2:
            content = parts.question_to_answer + content + parts.answer_to_question
        text += content
    return text + parts.end
