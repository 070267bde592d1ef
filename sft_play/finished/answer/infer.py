"""`make infer`: an answer to each prompt of a file, written as JSONL, resumed where it stopped."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.sources.files import find_source, read_rows
from sft_play.data.sources.formats import Chat, first_format, to_example
from sft_play.data.sources.messages import Message
from sft_play.data.sources.raw import BadRow, RawRow, require_file
from sft_play.errors import DataError
from sft_play.finished.answer.respond import Responder
from sft_play.finished.run import FinishedRun, Outcome, next_line, writing
from sft_play.log import one_line
from sft_play.training.model.model_loading import weights_facts

logger = logging.getLogger(__name__)

_AT_ONCE = 256
"""Prompts that are answered before their answers are written; within them the batches are sorted by length."""
_SHOWN_ROWS = 5
"""Rows that are no prompts, of which an error shows so many."""


@dataclass(frozen=True)
class Prompt:
    """The messages before the answer, the tools there are, and the reference answer where the file has one."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    reference: str | None = None


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


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: one a line of a .txt, or rows in any format that training reads, of which the last answer
    is the reference. Raises DataError where a row is not a prompt."""
    if path.suffix == ".txt":
        require_file(path)
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"INPUT={one_line(str(path))} cannot be read as UTF-8: {error}") from None
        prompts = [Prompt(({"role": "user", "content": line.removesuffix("\r")},)) for line in lines if line.strip()]
    else:
        prompts = _from_rows(path)
    if not prompts:
        raise DataError(f"INPUT={one_line(str(path))} holds no prompts")
    return prompts


def _from_rows(path: Path) -> list[Prompt]:
    read = [(raw.where, _prompt_of(raw)) for raw in read_rows(find_source(str(path)), split="train")]
    bad = [f"{where}: {found}" for where, found in read if isinstance(found, str)]
    if bad:
        more = [f"and {len(bad) - _SHOWN_ROWS} more"] if len(bad) > _SHOWN_ROWS else []
        head = [] if len(bad) == 1 else [f"{len(bad)} of {len(read)} rows are no prompts:"]
        raise DataError("\n  ".join([*head, *bad[:_SHOWN_ROWS], *more]))
    return [found for _, found in read if isinstance(found, Prompt)]


def _prompt_of(raw: RawRow | BadRow) -> Prompt | str:
    if isinstance(raw, BadRow):
        return raw.reason
    key = "messages" if "messages" in raw.data else "prompt"
    turns: Any = raw.data.get(key)
    others = {name: value for name, value in raw.data.items() if name != key}
    if isinstance(turns, str) and not others:
        return Prompt(({"role": "user", "content": turns},))
    if key == "prompt" and not others and not isinstance(turns, list):
        given = one_line(json.dumps(turns, default=str), limit=60)
        return f"prompt is {given}, and has to be text or a list of messages"
    is_open = set(others) <= {"tools"} and isinstance(turns, list) and bool(turns)
    is_open = is_open and not (isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant")
    if is_open:  # it ends before the answer, and a row of training has one
        raw = replace(raw, data={**others, "messages": [*turns, {"role": "assistant", "content": "."}]})
    data = DataConfig()
    try:
        _, shape = first_format(iter([raw]), data)
    except DataError as error:
        return str(error)
    assert shape is not None
    example = to_example(raw, shape, data)
    if not isinstance(example, Chat):
        return example.reason if isinstance(example, BadRow) else "it is plain text, not a chat"
    *before, last = example.messages
    if last["role"] != "assistant":
        return Prompt(example.messages, example.tools)
    return Prompt(tuple(before), example.tools, None if is_open else str(last.get("content") or ""))


def infer(run: FinishedRun, source: Path, target: Path, *, max_new_tokens: int) -> Inferred:
    """Answer every prompt of `source`, greedily, into the JSONL `target`: `messages`, `answer`, `reference` where the
    source has one, and `by` (run, weights, limit). One that was begun so is continued. Raises DataError where a row is
    not a prompt, or the target holds answers to other prompts or of other weights."""
    prompts = read_prompts(source)
    # weights and not only the name: a run of the same name may have been trained again
    digest = weights_facts(str(run.weights), None)["sha256"]
    by = f"{run.folder.path.name} {str(digest)[:12]} max_new_tokens={max_new_tokens}"
    done = _answered(target, prompts, by)
    if done < len(prompts):
        responder = Responder(run)
        with writing(target), target.open("a", encoding="utf-8") as file:
            for start in range(done, len(prompts), _AT_ONCE):
                chunk = prompts[start : start + _AT_ONCE]
                ids = [responder.prompt_ids(prompt.messages, prompt.tools) for prompt in chunk]
                for prompt, answer in zip(chunk, responder.answer_all(ids, max_new_tokens=max_new_tokens), strict=True):
                    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
                    reference = {} if prompt.reference is None else {"reference": prompt.reference}
                    line = {"messages": list(prompt.messages), **tools, "answer": answer, **reference, "by": by}
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
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{named} cannot be written: {error.strerror}") from None
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
        # through JSON, as the file's went: tuples are lists there
        if entry["messages"] != json.loads(json.dumps(list(prompt.messages))):
            raise DataError(f"{named} exists and answers other prompts (line {number}); name another file")
        if entry["by"] != by:
            who = f"{one_line(str(entry['by']))}, now {one_line(by)}"
            raise DataError(f"{named} exists and was answered by {who}; name another file")
    if len(kept) < len(whole):
        with target.open("r+b") as file:
            file.truncate(len(kept))
    return len(lines)
