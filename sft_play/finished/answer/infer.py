"""`make infer`: an answer to each prompt of a file, written as JSONL, resumed where it stopped."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.sources.examples import apply_style
from sft_play.data.sources.files import find_source, read_rows
from sft_play.data.sources.formats import FORMATS, TEMPLATE_KWARGS, Chat, recognise_format, rename_columns, to_example
from sft_play.data.sources.messages import Message, quote_value, unpack_json, drop_author_messages
from sft_play.data.sources.raw import BadRow, RawRow, require_file, read_text_blocks
from sft_play.errors import DataError
from sft_play.facts.models.architecture import base_weights_identity
from sft_play.finished.answer.respond import Responder
from sft_play.finished.run import FinishedRun, Outcome, next_line, writing
from sft_play.log import one_line

logger = logging.getLogger(__name__)

# Prompts that are answered before their answers are written; within them the batches are sorted by length.
_AT_ONCE = 256
# Rows that are no prompts, of which an error shows so many.
_SHOWN_ROWS = 5
# of the output: a column of the file that is called so is written as `input_…`
_OWN_COLUMNS = ("messages", "tools", "answer", "reference", "by")


@dataclass(frozen=True)
class Prompt:
    """A prompt of the file. `line` has what the output repeats of it: further columns of the row, `messages` before the
    answer, and `tools`, `chat_template_kwargs` and `reference` if the row has them."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    reference: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def line(self) -> dict[str, Any]:
        """In plain data, as it is read back: tuples are lists."""
        columns = {f"input_{name}" if name in _OWN_COLUMNS else name: value for name, value in self.columns.items()}
        line = {**columns, "messages": drop_author_messages(self.messages)}
        line |= {"tools": self.tools} if self.tools else {}
        line |= {TEMPLATE_KWARGS: self.template_kwargs} if self.template_kwargs else {}
        line |= {} if self.reference is None else {"reference": self.reference}
        return dict(json.loads(json.dumps(line, default=str)))


@dataclass(frozen=True)
class Inferred(Outcome):
    """What `infer` wrote."""

    run: Path
    path: Path
    prompts: int
    resumed: int

    def lines(self) -> list[str]:
        there = f" ({self.resumed:,} were there already)" if self.resumed else ""
        return [f"Answers: {self.prompts:,}{there}", f"Written to: {self.path}", next_line("eval", RUN=self.run)]


def read_prompts(path: Path, data: DataConfig | None = None) -> list[Prompt]:
    """The prompts of a file: one a line of a .txt, or rows in any format that training reads, with their last answer or
    without it; of `data`, the run's, data.columns and data.style apply as in training. Raises DataError where a row is
    not a prompt."""
    data = data or DataConfig()
    if path.suffix == ".txt":
        lines = enumerate("".join(read_text_blocks(path)).split("\n"), start=1)
        texts = [(f"{path}:{number}", line.removesuffix("\r")) for number, line in lines if line.strip()]
        rows: list[RawRow | BadRow] = [RawRow(where, {"prompt": text}) for where, text in texts]
    else:
        rows = list(read_rows(find_source(str(path)), split="train"))
    prompts = _from_rows(rows, data)
    if not prompts:
        raise DataError(f"INPUT={one_line(str(path))} holds no prompts")
    return prompts


def _from_rows(rows: Sequence[RawRow | BadRow], data: DataConfig) -> list[Prompt]:
    read = [(raw.where, _prompt_of(raw, data)) for raw in rows]
    bad = [f"{where}: {found}" for where, found in read if isinstance(found, str)]
    if bad:
        more = [f"and {len(bad) - _SHOWN_ROWS} more"] if len(bad) > _SHOWN_ROWS else []
        head = [] if len(bad) == 1 else [f"{len(bad)} of {len(read)} rows are no prompts:"]
        raise DataError("\n  ".join([*head, *bad[:_SHOWN_ROWS], *more]))
    return [found for _, found in read if isinstance(found, Prompt)]


def _prompt_of(raw: RawRow | BadRow, data: DataConfig) -> Prompt | str:
    """The prompt that a row holds, or why it holds none."""
    if isinstance(raw, BadRow):
        return str(raw).removeprefix(f"{raw.where}: ")
    mapped = {known: theirs for known, theirs in data.columns.items() if theirs in raw.data}
    renamed = rename_columns(raw, mapped)
    row = {key: value for key, value in renamed.data.items() if key not in renamed.missing}
    # as training recognises rows, but the answer may be missing, and plain text asks nothing
    fitting = [shape for shape in FORMATS if shape.kind != "text" and shape.required_columns[0] in row]
    whole = (shape for shape in fitting if all(row.get(key) is not None for key in shape.required_columns))
    shape = next(whole, next(iter(fitting), None))
    if shape is None:
        names = one_line(", ".join(map(str, row)) or "none", limit=200)
        taken = "a prompt is a column prompt, question or instruction (with input), or a list messages"
        return f"no column is a prompt (columns: {names}); {taken}"
    shape = recognise_format(shape.required_columns, mapped) or shape  # with what data.columns maps beside its own columns
    question, *answers = shape.required_columns
    value = unpack_json(row[question], "[")
    if not isinstance(value, (str, list)):
        return f"{question} is {quote_value(value)}, and has to be text or a list of messages"
    # an answer is put where a row of training has one, and taken off again: a prompt is read by the same code
    used = {key: one for key, one in row.items() if key in {*shape.required_columns, *shape.optional_columns} - {"reasoning"}}
    if shape.kind == "turns":
        # a list of [question, answer] is never open
        is_open = isinstance(value, list) and bool(value) and not isinstance(value[-1], list)
        used[question] = [*value, {"role": "assistant", "content": "."}] if is_open else value
    else:
        is_open = row.get(answers[0]) is None
        used |= {answers[0]: "."} if is_open else {}
    example = apply_style(to_example(RawRow(raw.where, used), shape, DataConfig()), raw, data.style)
    if not isinstance(example, Chat):
        return str(example).removeprefix(f"{raw.where}: ")
    messages, reference = example.messages[: -1 if is_open else None], None
    if messages[-1:] and messages[-1]["role"] == "assistant":
        messages, reference = messages[:-1], str(messages[-1].get("content") or "")
    if not messages:
        return f"{question} holds nothing that an answer can follow"
    return Prompt(
        messages,
        example.tools,
        reference,
        {mapped.get(key, key): one for key, one in renamed.data.items() if key not in used},
        example.template_kwargs,
    )


def infer(run: FinishedRun, source: Path, target: Path, *, max_new_tokens: int) -> Inferred:
    """Answer every prompt of `source`, greedily, into the JSONL `target`: what `Prompt.line` has, `answer`, and `by`
    (run, weights, limit). One that was begun so is continued. Raises DataError where a row is not a prompt, or the
    target holds answers to other prompts or of other weights."""
    prompts = read_prompts(source, run.config.data)
    # weights and not only the name: a run of the same name may have been trained again
    digest = base_weights_identity(str(run.weights), None)["sha256"]
    by = f"{run.folder.path.name} {str(digest)[:12]} max_new_tokens={max_new_tokens}"
    done = _answered(target, prompts, by)
    if done < len(prompts):
        responder = Responder(run)
        with writing(target), target.open("a", encoding="utf-8") as file:
            for start in range(done, len(prompts), _AT_ONCE):
                chunk = prompts[start : start + _AT_ONCE]
                ids = [responder.prompt_ids(prompt.messages, prompt.tools, prompt.template_kwargs) for prompt in chunk]
                for prompt, answer in zip(chunk, responder.answer_all(ids, max_new_tokens=max_new_tokens), strict=True):
                    line = {**prompt.line, "answer": answer, "by": by}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                # on the disk before the next ones are computed: an answer that a crash loses costs minutes of GPU
                file.flush()
                os.fsync(file.fileno())
                logger.info("Answered: %d of %d", start + len(chunk), len(prompts))
    return Inferred(run.folder.path, target, len(prompts), done)


def _answered(target: Path, prompts: list[Prompt], by: str) -> int:
    """How many prompts the target answers already, a half-written last line cut off; DataError where it is another
    file."""
    named = f"OUTPUT={one_line(str(target))}"
    if not target.exists():
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        return 0
    require_file(target)
    # a process that was killed may have left half a line, or half a character of one
    whole = target.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    lines = kept.decode("utf-8", "replace").split("\n")[:-1]  # splitlines() would also split at U+2028 inside an answer
    if len(lines) > len(prompts):
        raise DataError(f"{named} has {len(lines)} answers, and INPUT {len(prompts)} prompts")
    for number, (line, prompt) in enumerate(zip(lines, prompts, strict=False), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not {"messages", "answer", "by"} <= set(entry):
            raise DataError(f"{named} exists, and line {number} is not an answer of make infer")
        if {name: value for name, value in entry.items() if name not in ("answer", "by")} != prompt.line:
            raise DataError(f"{named} exists and answers other prompts (line {number}); name another file")
        if entry["by"] != by:
            who = f"{one_line(str(entry['by']))}, now {one_line(by)}"
            raise DataError(f"{named} exists and was answered by {who}; name another file")
    if len(kept) < len(whole):
        with target.open("r+b") as file:
            file.truncate(len(kept))
    return len(lines)
