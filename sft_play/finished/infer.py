"""`make infer`: an answer to each prompt of a file, written as JSONL, resumed where it stopped."""

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.answers import Answer
from sft_play.config.schema import DataConfig
from sft_play.data.sources.examples import apply_style
from sft_play.data.sources.files import find_source, read_rows
from sft_play.data.sources.formats import FORMATS, TEMPLATE_KWARGS, Chat, recognise_format, rename_columns, to_example
from sft_play.data.sources.messages import Message, drop_author_messages, quote_value, unpack_json
from sft_play.data.sources.raw import BadRow, RawRow, read_text_blocks, require_file
from sft_play.errors import DataError
from sft_play.finished.respond import Responder
from sft_play.finished.run import FinishedRun, next_command_line, translate_write_errors
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity

logger = logging.getLogger(__name__)

# Prompts that are answered before their answers are written; within them the batches are sorted by length.
_CHUNK_PROMPTS = 256
# Rows that are no prompts, of which an error shows so many.
_MAX_LISTED_ROWS = 5
# Columns of the output: one of the file that has such a name is written as `input_…`.
_OUTPUT_COLUMNS = ("messages", "tools", "answer", "reference", "by")


@dataclass(frozen=True)
class Prompt:
    """A prompt of the file. `output_fields` has what the output repeats of it: further columns of the row, `messages`
    before the answer, and `tools`, `chat_template_kwargs` and `reference` if the row has them."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    reference: str | None = None
    extra_columns: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def output_fields(self) -> dict[str, Any]:
        """The fields of the output line, but for the answer, as JSON reads them back: tuples are lists."""
        new_names = {name: f"input_{name}" for name in _OUTPUT_COLUMNS}
        fields: dict[str, Any] = {new_names.get(name, name): value for name, value in self.extra_columns.items()}
        fields["messages"] = drop_author_messages(self.messages)
        optional = {
            "tools": self.tools or None, TEMPLATE_KWARGS: self.template_kwargs or None, "reference": self.reference
        }  # fmt: skip
        fields |= {name: value for name, value in optional.items() if value is not None}
        return dict(json.loads(json.dumps(fields, default=str)))


@dataclass(frozen=True)
class InferResult(Answer):
    """What `infer` wrote."""

    run: Path
    path: Path
    prompts: int
    resumed: int

    def lines(self) -> list[str]:
        resumed_note = f" ({self.resumed:,} were there already)" if self.resumed else ""
        return [
            f"Answers: {self.prompts:,}{resumed_note}",
            f"Written to: {self.path}",
            next_command_line("eval", RUN=self.run),
        ]


def read_prompts(path: Path, data: DataConfig | None = None) -> list[Prompt]:
    """The prompts of a file: one a line of a .txt, or rows in any format that training reads, with their last answer or
    without it; of `data`, the run's, data.columns and data.style apply as in training. Raises DataError where a row is
    not a prompt."""
    if path.suffix == ".txt":
        lines = enumerate("".join(read_text_blocks(path)).split("\n"), start=1)
        rows: list[RawRow | BadRow] = [
            RawRow(f"{path}:{number}", {"prompt": line.removesuffix("\r")}) for number, line in lines if line.strip()
        ]
    else:
        rows = list(read_rows(find_source(str(path)), split="train"))
    if not rows:
        raise DataError(f"INPUT={one_line(str(path))} holds no prompts")
    prompts, errors = list[Prompt](), list[str]()
    for raw in rows:
        prompt = _parse_prompt(raw, data or DataConfig())
        if isinstance(prompt, Prompt):
            prompts.append(prompt)
        else:
            errors.append(f"{raw.where}: {prompt}")
    if errors:
        heading = [f"{len(errors)} of {len(rows)} rows are no prompts:"] if len(errors) > 1 else []
        more = [f"and {len(errors) - _MAX_LISTED_ROWS} more"] if len(errors) > _MAX_LISTED_ROWS else []
        raise DataError("\n  ".join([*heading, *errors[:_MAX_LISTED_ROWS], *more]))
    return prompts


def _parse_prompt(raw: RawRow | BadRow, data: DataConfig) -> Prompt | str:
    """Return the prompt of a row, or the reason why it holds none."""
    if isinstance(raw, BadRow):
        return str(raw).removeprefix(f"{raw.where}: ")
    column_mapping = {column: user_column for column, user_column in data.columns.items() if user_column in raw.data}
    renamed = rename_columns(raw, column_mapping)
    row = {key: value for key, value in renamed.data.items() if key not in renamed.missing}
    # as training recognises rows, but the answer may be missing, and plain text asks nothing; complete rows first
    formats = [form for form in FORMATS if form.kind != "text" and form.required_columns[0] in row]
    formats.sort(key=lambda form: any(row.get(key) is None for key in form.required_columns))
    if not formats:
        column_names = one_line(", ".join(map(str, row)) or "none", limit=200)
        accepted_forms = "a prompt is a column prompt, question or instruction (with input), or a list messages"
        return f"no column is a prompt (columns: {column_names}); {accepted_forms}"
    # with what data.columns maps
    row_format = recognise_format(formats[0].required_columns, column_mapping) or formats[0]
    question, *answers = row_format.required_columns
    question_value = unpack_json(row[question], "[")
    if not isinstance(question_value, (str, list)):
        return f"{question} is {quote_value(question_value)}, and has to be text or a list of messages"
    names = {*row_format.required_columns, *row_format.optional_columns} - {"reasoning"}
    format_columns = {key: value for key, value in row.items() if key in names}
    # an answer is put where a row of training has one, and taken off again: a prompt is read by the same code
    is_open = row_format.kind != "turns" and row.get(answers[0]) is None
    if is_open:
        format_columns[answers[0]] = "."
    elif row_format.kind == "turns":
        format_columns[question] = question_value
        if question_value and isinstance(question_value, list) and not isinstance(question_value[-1], list):
            is_open = True  # a list of [question, answer] is never open
            format_columns[question] = [*question_value, {"role": "assistant", "content": "."}]
    example = apply_style(to_example(RawRow(raw.where, format_columns), row_format, DataConfig()), raw, data.style)
    if not isinstance(example, Chat):
        return str(example).removeprefix(f"{raw.where}: ")
    messages, reference = [*example.messages], None
    if is_open:
        del messages[-1]
    if messages and messages[-1]["role"] == "assistant":
        reference = str(messages.pop().get("content") or "")
    if not messages:
        return f"{question} holds nothing that an answer can follow"
    extra_columns = {
        column_mapping.get(key, key): value for key, value in renamed.data.items() if key not in format_columns
    }
    return Prompt(tuple(messages), example.tools, reference, extra_columns, example.template_kwargs)


def infer(run: FinishedRun, prompts_path: Path, answers_path: Path, *, max_new_tokens: int) -> InferResult:
    """Answer every prompt of `prompts_path`, greedily, into the JSONL `answers_path`: `Prompt.output_fields`, `answer`
    and `by` (run, weights, limit). A file that was begun so is continued. Raises DataError where a row is not a prompt,
    or `answers_path` holds answers to other prompts or of other weights."""
    prompts = read_prompts(prompts_path, run.config.data)
    # weights and not only the name: a run of the same name may have been trained again
    weights_digest = base_weights_identity(str(run.weights), None)["sha256"]
    provenance = f"{run.folder.path.name} {str(weights_digest)[:12]} max_new_tokens={max_new_tokens}"
    answered_count = _count_answered(answers_path, prompts, provenance)
    if answered_count < len(prompts):
        responder = Responder(run)
        with translate_write_errors(answers_path), answers_path.open("a", encoding="utf-8") as file:
            for offset in range(answered_count, len(prompts), _CHUNK_PROMPTS):
                chunk = prompts[offset : offset + _CHUNK_PROMPTS]
                prompt_ids = [
                    responder.prompt_ids(prompt.messages, prompt.tools, prompt.template_kwargs) for prompt in chunk
                ]
                for prompt, answer in zip(
                    chunk, responder.answer_texts(prompt_ids, max_new_tokens=max_new_tokens), strict=True
                ):
                    fields = {**prompt.output_fields, "answer": answer, "by": provenance}
                    file.write(json.dumps(fields, ensure_ascii=False) + "\n")
                # on the disk before the next ones are computed: an answer that a crash loses costs minutes of GPU
                file.flush()
                os.fsync(file.fileno())
                logger.info("Answered: %d of %d", offset + len(chunk), len(prompts))
    return InferResult(run.folder.path, answers_path, len(prompts), answered_count)


def _count_answered(answers_path: Path, prompts: list[Prompt], provenance: str) -> int:
    """Count the prompts that are answered already, and cut off a half-written last line. Raises DataError where it is
    another file."""
    file_label = f"OUTPUT={one_line(str(answers_path))}"
    if not answers_path.exists():
        with translate_write_errors(answers_path):
            answers_path.parent.mkdir(parents=True, exist_ok=True)
        return 0
    require_file(answers_path)
    # a process that was killed may have left half a line, or half a character of one
    content = answers_path.read_bytes()
    complete_lines = content[: content.rfind(b"\n") + 1]
    lines = complete_lines.decode("utf-8", "replace").split("\n")[:-1]  # not at U+2028
    if len(lines) > len(prompts):
        raise DataError(f"{file_label} has {len(lines)} answers, and INPUT {len(prompts)} prompts")
    for line_number, (line, prompt) in enumerate(zip(lines, prompts, strict=False), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not {"messages", "answer", "by"} <= set(entry):
            raise DataError(f"{file_label} exists, and line {line_number} is not an answer of make infer")
        answered_by = entry.pop("by")
        del entry["answer"]
        if entry != prompt.output_fields:
            raise DataError(f"{file_label} exists and answers other prompts (line {line_number}); name another file")
        if answered_by != provenance:
            raise DataError(
                f"{file_label} exists and was answered by {one_line(str(answered_by))}, now "
                f"{one_line(provenance)}; name another file"
            )
    if len(complete_lines) < len(content):
        os.truncate(answers_path, len(complete_lines))
    return len(lines)
