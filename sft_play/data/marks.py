"""What a run's log says of its first rows, and `make check` of all: trained tokens by role, BOS, ends, padding."""

from __future__ import annotations

from typing import Any

from sft_play.data.build.survey import TEMPLATE, RowMaker, Survey, Surveyor
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.files import AnySource
from sft_play.findings import Finding, passed, warned
from sft_play.log import one_line


def judge_roles(survey: Survey) -> list[Finding]:
    """Trained tokens of each role."""
    if not survey.role_rows:
        return []
    order = sorted(survey.roles, key=lambda role: (role == TEMPLATE, -survey.roles[role][0]))
    shares = ", ".join(f"{role} {survey.roles[role][1]:,} of {survey.roles[role][0]:,}" for role in order)
    of = "" if survey.role_rows == survey.kept else f", counted in {survey.role_rows:,} of {survey.kept:,} rows"
    return [passed("tokens by role", f"trained in {survey.split}: {shares}{of}")]


def judge_marks(survey: Survey, tokenizer: Any, *, adds_bos: bool) -> list[Finding]:
    """BOS on all rows or none, trained parts that end with a special token, padding that is not trained."""
    if not survey.kept or survey.texts:
        return []
    name = tokenizer.bos_token
    if survey.with_bos not in (0, survey.kept):
        bos = warned(
            "BOS",
            f"{survey.with_bos:,} of {survey.kept:,} rows of {survey.split} begin with {name}, the others do not",
            "give data.chat_template a template that writes it always or never",
        )
    elif adds_bos and not survey.with_bos:
        bos = warned(
            "BOS",
            f"the tokenizer puts {name} before a text, and the chat template writes none: rows begin without it",
            "fine if the model was trained like that; otherwise give data.chat_template one that writes it",
        )
    else:
        every = f"every row of {survey.split} begins with one {name}"
        bos = passed("BOS", every if survey.with_bos else "none, as the tokenizer has it")
    return [bos, _end(survey, tokenizer), _pad(survey, tokenizer)]


def _end(survey: Survey, tokenizer: Any) -> Finding:
    names = [str(tokenizer.convert_ids_to_tokens(number)) for number, _ in survey.ends.most_common(3)]
    if survey.open_ends:
        return warned(
            "end of turn",
            f"{survey.open_ends:,} of {survey.kept:,} rows of {survey.split} have an answer that ends with no special "
            f"token (the first: {one_line(survey.first_open_end)}): the model does not learn to stop there",
            "they are trained because data.on_missing_end=train; give data.chat_template a template that ends an "
            "assistant's turn with a token",
        )
    eos = "" if tokenizer.eos_token in names else f"; the tokenizer's eos is {tokenizer.eos_token}"
    added = ", ".join(f"{one_line(end)} after {rows:,} rows" for end, rows in survey.added_ends.most_common(3))
    if added:
        added = f"; the chat template does not end a last turn: {added} is added, as a next turn would begin"
    return passed("end of turn", f"every trained answer ends with {' or '.join(names)}, which is trained{eos}{added}")


def _pad(survey: Survey, tokenizer: Any) -> Finding:
    if survey.pad_trained:
        return warned(
            "padding token",
            f"{survey.pad_trained:,} rows of {survey.split} train {tokenizer.pad_token}, which also pads; padding is "
            "masked by length, so it is still learned",
            "fine if the template ends turns with it",
        )
    same = ", which is also the end token" if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
    return passed("padding token", f"{tokenizer.pad_token}{same}; padding is masked by length, never by its id")


FIRST_ROWS = 200
"""Rows that the first lines of a run's log describe."""


def first_lines(path: AnySource, renderer: Renderer, tokenizer: Any, *, task_mode: str) -> list[str]:
    """The masks of the training file's first rows: trained tokens by role, BOS, end of turn, padding."""
    maker = RowMaker(renderer, task_mode=task_mode)
    surveyor = Surveyor(renderer.data, tokenizer=tokenizer, maker=maker)
    survey = surveyor.survey(path, "train", text_wanted=task_mode == "cpt", rows=FIRST_ROWS)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    checks = [*judge_roles(survey), *judge_marks(survey, tokenizer, adds_bos=adds_bos)]
    return [f"First {survey.rows} rows: {check.name}: {check.found}" for check in checks]
