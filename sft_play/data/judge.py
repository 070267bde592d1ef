"""What a survey of the data means for a run: each finding ok, a warning or a problem, with what to do about it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sft_play.config.schema import DataConfig
from sft_play.data.files import AnySource
from sft_play.data.messages import roles_said
from sft_play.data.preview import METHODS
from sft_play.data.process import rows_said
from sft_play.data.render import Renderer
from sft_play.data.survey import TEMPLATE, RowMaker, Survey, Surveyor
from sft_play.log import escape_control, one_line

State = Literal["ok", "warning", "problem", "skipped"]
"""skipped: not looked at, and `what` says why."""
_NAME_WIDTH = 18
LIMIT_STEP = 64
"""`model.max_seq_len` is proposed in multiples of this."""


@dataclass(frozen=True)
class Check:
    """One line of the page: what was looked at, what was found, and what to do where it is not well."""

    name: str
    state: State
    what: str
    do: str | None = None

    def __post_init__(self) -> None:
        assert self.do or self.state in ("ok", "skipped"), f"{self.name}: {self.state} without what to do"

    def lines(self) -> list[str]:
        """The line as a person reads it; further lines of what was found, and what to do, stand below it."""
        state = self.state.upper() if self.state == "problem" else self.state
        first, *more = escape_control(self.what).split("\n")
        margin = " " * (9 + _NAME_WIDTH)
        found = [f"{state:<8} {self.name:<{_NAME_WIDTH}} {first}", *(f"{margin} {line}" for line in more)]
        return [*found, f"{margin} do: {escape_control(self.do)}"] if self.do else found

    def as_json(self) -> dict[str, Any]:
        """`name`, `state`, `what` and `do`."""
        return asdict(self)


def ok(name: str, what: str) -> Check:
    """Nothing wrong."""
    return Check(name, "ok", what)


def skipped(name: str, why: str) -> Check:
    """Not looked at, and why."""
    return Check(name, "skipped", why)


def warning(name: str, what: str, do: str) -> Check:
    """Something that trains, and may not be meant."""
    return Check(name, "warning", what, do)


def problem(name: str, what: str, do: str) -> Check:
    """Something that would stop or spoil the run."""
    return Check(name, "problem", what, do)


# --- rows -------------------------------------------------------------------------------------------------------------


def judge_rows(survey: Survey, data: DataConfig, *, task_mode: str) -> list[Check]:
    """The rows of a file: how many, of which format, and those that cannot be read."""
    name = f"rows: {survey.split}"
    said = f"{rows_said(survey.rows)} of {survey.source} ({survey.format})"
    if survey.rows == 0:
        return [problem(name, f"{survey.source} has no rows", "give a file with rows")]
    if task_mode == "cpt" and survey.chats and survey.split != "train":
        return [warning(name, f"{said} hold chats and task_mode is cpt: the file is not used",
                        f"set data.{survey.split}_path to plain text, or to null")]  # fmt: skip
    if survey.bad:
        found = [_bad(name, said, survey.bad, survey.first_bad, data, roles_said(survey.bad, survey.turns))]
    else:
        found = [ok(name, said)]
    if survey.left_out:
        listed = "; ".join(f"{count:,} x {reason}" for reason, count in survey.left_out.most_common(6))
        found.append(ok(name, f"{sum(survey.left_out.values()):,} rows are left out as asked: {listed}"))
    if survey.notes:
        told = [
            f"{count:,} x {one_line(note, limit=200)} (the first: {one_line(survey.first_noted[note], limit=300)})"
            for note, count in survey.notes.most_common(12)
        ]
        found.append(
            warning(name, "\n".join(["rows that are used as they are:", *told]), "look at them: make preview ROW=…")
        )
    return found


def _bad(
    name: str, said: str, counts: Counter[str], first: Sequence[str], data: DataConfig, also: Sequence[str] = ()
) -> Check:
    """Bad rows by reason, the first of them listed; a problem where the run would stop at them."""
    total = sum(counts.values())
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in counts.most_common(6))
    more = [f"… and {total - len(first):,} more"] if total > len(first) else []
    what = "\n".join([f"{total:,} of {said} cannot be used: {reasons}", *first, *more, *also])
    if data.on_bad_row == "skip":
        return warning(name, what, "they are left out (data.on_bad_row=skip); mend them to use them")
    return problem(name, what, "mend them, or leave them out, counted, with data.on_bad_row=skip")


def judge_repeats(surveys: Mapping[str, Survey]) -> list[Check]:
    """Rows with the same content: within a file, and between training and held-out files."""
    found = []
    repeated = [survey for survey in surveys.values() if survey.duplicates]
    for survey in repeated:
        assert survey.first_duplicate is not None
        one, other = survey.first_duplicate
        share = survey.duplicates / max(1, survey.rows)
        found.append(
            warning(
                "duplicates",
                f"{rows_said(survey.duplicates)} of {survey.source} ({share:.1%}) with the content of an earlier one, "
                f"such as row {other:,} that of row {one:,}",
                "keep one of each: make process SET=data.process.drop_duplicates=true",
            )
        )
    if not repeated:
        found.append(ok("duplicates", "no row stands twice in its file"))
    chats = [survey for survey in surveys.values() if survey.split != "text"]
    pairs = [pair for pair in itertools.combinations(chats, 2) if pair[0].split != pair[1].split]
    leaks = [leak for pair in pairs if (leak := _leak(*pair)) is not None]
    if not leaks and pairs:
        leaks = [ok("leaks", f"no row stands in two of {', '.join(dict.fromkeys(survey.split for survey in chats))}")]
    return [*found, *leaks]


def _leak(one: Survey, other: Survey) -> Check | None:
    shared = one.digests.keys() & other.digests.keys()
    if not shared:
        return None
    first = min(shared, key=lambda digest: one.digests[digest])
    return warning(
        "leaks",
        f"{len(shared):,} contents stand in {one.split} and in {other.split}, such as row {one.digests[first]:,} of "
        f"{one.source} and row {other.digests[first]:,} of {other.source}: figures on {other.split} flatter the model",
        "leave them out of one: make process SET=data.process.drop_leaks=true",
    )


# --- masks ------------------------------------------------------------------------------------------------------------


def judge_masks(survey: Survey, data: DataConfig) -> list[Check]:
    """Which rows have a verified mask, by which method, and how much of them is trained."""
    name = f"masks: {survey.split}"
    said = f"{rows_said(survey.rows - sum(survey.bad.values()))} of {survey.source}"
    if survey.unmasked:
        return [_bad(name, said, survey.unmasked, survey.first_unmasked, data)]
    if not survey.kept:
        return [skipped(name, "no row is left to look at")]
    methods = ", ".join(f"{METHODS.get(method, method)} ({count:,})" for method, count in survey.methods.most_common())
    share = survey.trained / max(1, survey.tokens)
    found = [
        ok(
            name,
            f"verified on {_every(sum(survey.methods.values()))} by {methods}; {survey.trained:,} of "
            f"{survey.tokens:,} tokens are trained ({share:.0%})",
        )
    ]
    if survey.methods["inexact"]:
        found.append(
            warning(
                name,
                f"{survey.methods['inexact']:,} rows have no exact mask and train what is nearest",
                "they are trained because data.on_inexact_mask=train; give data.chat_template a better template",
            )
        )
    if survey.untrained_turns:
        found.append(
            warning(
                name,
                f"{survey.untrained_turns:,} assistant turns have no exact mask and are not trained: the template "
                "writes a turn of the history otherwise than it is generated",
                "data.multi_turn=split trains each of them as the last turn of a row of its own",
            )
        )
    if survey.merged:
        found.append(ok(name, f"{survey.merged:,} ends of answers stand inside a token, which is split there"))
    return found


def _every(rows: int) -> str:
    return f"every one of {rows:,} rows" if rows != 1 else "the only row"


def judge_texts(survey: Survey, data: DataConfig) -> list[Check]:
    """What the template does to texts: think text that it leaves out, special tokens that texts spell."""
    found = []
    if survey.stripped_think:
        found.append(
            warning(
                "think text",
                f"{survey.stripped_think:,} pieces of think text in {survey.split} are not written by the template",
                "a template that writes it; data.multi_turn=split keeps it where only the last turn's is written",
            )
        )
    if survey.special_in_text:
        said = (
            f"{survey.special_in_text:,} special tokens are spelled in the texts of {rows_said(survey.special_rows)} "
            f"of {survey.split} (the first: {one_line(survey.first_special)})"
        )
        if data.special_tokens_in_text == "plain":
            found.append(ok("special tokens", f"{said}: tokenised as plain text"))
        else:
            found.append(
                warning(
                    "special tokens",
                    f"{said}: they become the tokens that they spell",
                    "data.special_tokens_in_text=plain takes them as text",
                )
            )
    return found


def judge_roles(survey: Survey) -> list[Check]:
    """Trained tokens of each role."""
    if not survey.role_rows:
        return []
    order = sorted(survey.roles, key=lambda role: (role == TEMPLATE, -survey.roles[role][0]))
    said = ", ".join(f"{role} {survey.roles[role][1]:,} of {survey.roles[role][0]:,}" for role in order)
    of = "" if survey.role_rows == survey.kept else f", counted in {survey.role_rows:,} of {survey.kept:,} rows"
    return [ok("tokens by role", f"trained in {survey.split}: {said}{of}")]


def judge_marks(survey: Survey, tokenizer: Any, *, adds_bos: bool) -> list[Check]:
    """Beginning, end and padding: BOS on all rows or none, trained parts that end with a token, padding untrained."""
    if not survey.kept or survey.texts:
        return []
    found, bos = [], tokenizer.bos_token
    if survey.with_bos not in (0, survey.kept):
        found.append(
            warning(
                "BOS",
                f"{survey.with_bos:,} of {survey.kept:,} rows of {survey.split} begin with {bos}, the others do not",
                "give data.chat_template a template that writes it always or never",
            )
        )
    elif adds_bos and not survey.with_bos:
        found.append(
            warning(
                "BOS",
                f"the tokenizer puts {bos} before a text, and the chat template writes none: rows begin without it",
                "fine if the model was made so; otherwise give data.chat_template one that writes it",
            )
        )
    else:
        every = f"every row of {survey.split} begins with one {bos}"
        found.append(ok("BOS", every if survey.with_bos else "none, as the tokenizer has it"))
    return [*found, _end(survey, tokenizer), _pad(survey, tokenizer)]


def _end(survey: Survey, tokenizer: Any) -> Check:
    names = [str(tokenizer.convert_ids_to_tokens(number)) for number, _ in survey.ends.most_common(3)]
    if survey.open_ends:
        return warning(
            "end of turn",
            f"{survey.open_ends:,} of {survey.kept:,} rows of {survey.split} have an answer that ends with no special "
            f"token (the first: {one_line(survey.first_open_end)}): the model does not learn there to stop",
            "they are trained because data.on_missing_end=train; give data.chat_template a template that ends an "
            "assistant's turn with a token",
        )
    eos = "" if tokenizer.eos_token in names else f"; the tokenizer's eos is {tokenizer.eos_token}"
    added = ", ".join(f"{one_line(end)} behind {rows:,} rows" for end, rows in survey.added_ends.most_common(3))
    if added:
        added = f"; the chat template does not end a last turn: {added} is added, as a next turn would begin"
    return ok("end of turn", f"every trained answer ends with {' or '.join(names)}, which is trained{eos}{added}")


def _pad(survey: Survey, tokenizer: Any) -> Check:
    if survey.pad_trained:
        return warning(
            "padding token",
            f"{survey.pad_trained:,} rows of {survey.split} train {tokenizer.pad_token}, which also pads; padding is "
            "masked by length, so it is still learned",
            "fine if the template ends turns with it",
        )
    same = ", which is also the end token" if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
    return ok("padding token", f"{tokenizer.pad_token}{same}; padding is masked by length, never by its id")


# --- length -----------------------------------------------------------------------------------------------------------


def judge_lengths(survey: Survey, data: DataConfig, *, max_seq_len: int, positions: int | None) -> list[Check]:
    """What `max_seq_len` takes away, and which limit would keep how much where that is too much.

    `positions`: the most that the model has; None where it has no limit.
    """
    cost, name = survey.cost, f"length: {survey.split}"
    if not cost.trained:
        return []
    share = survey.lost_trained / cost.trained
    if not (survey.cut_rows or survey.out_of_reach or share):
        return [ok(name, f"the longest row has {cost.longest:,} tokens; max_seq_len {max_seq_len:,} cuts none")]
    of = f"of {survey.kept + survey.out_of_reach:,} rows"
    rows = [f"{survey.cut_rows:,} {of} are cut at max_seq_len {max_seq_len:,}"]
    if survey.out_of_reach:
        whole = "left out" if data.truncate == "drop" else "without any trained token left"
        rows.append(f"{survey.out_of_reach:,} {of} {whole} (shortest prompt: {survey.shortest_prompt:,} tokens)")
    said = f"{'; '.join(rows)}; {survey.lost_trained:,} of {cost.trained:,} trained tokens ({share:.1%}) are lost"
    ways = _ways(survey, data, max_seq_len=max_seq_len, positions=positions)
    if survey.kept == 0:
        return [problem(name, f"{said}: nothing is left", ways)]
    if share > data.max_lost_fraction and survey.split == "train":
        over = f", more than data.max_lost_fraction={data.max_lost_fraction:g}"
        return [problem(name, said + over, f"{ways}, or raise data.max_lost_fraction to accept it")]
    return [warning(name, said, ways)]


def _ways(survey: Survey, data: DataConfig, *, max_seq_len: int, positions: int | None) -> str:
    """The limits that would keep enough and everything, as far as the model has positions."""
    cost, said = survey.cost, []
    enough = 1 - data.max_lost_fraction
    limits = {_rounded(cost.limit_for(share)) for share in (enough, 1.0)}
    for limit in sorted(limits):
        if limit > max_seq_len and (positions is None or limit <= positions):
            kept = cost.kept_share(limit)
            said.append(f"{limit} keeps {'all' if kept == 1 else f'{kept:.1%}'}")
    if said:
        return f"set model.max_seq_len: {', '.join(said)}"
    if positions is not None and cost.kept_share(positions) > cost.kept_share(max_seq_len):
        return f"set model.max_seq_len={positions}, the most that the model has: {cost.kept_share(positions):.1%} kept"
    other = "" if data.truncate == "prompt" else ", or keep the ends of rows with data.truncate=prompt"
    more = positions is not None and positions > max_seq_len
    why = f"the model's {positions:,} positions keep no more" if more else "the model has no more positions"
    return f"{why}: split or shorten the rows{other}"


def _rounded(limit: int) -> int:
    return -(-limit // LIMIT_STEP) * LIMIT_STEP


def judge_blocks(survey: Survey, *, max_seq_len: int) -> list[Check]:
    """How many full blocks the documents of plain text come to."""
    name = f"blocks: {survey.split}"
    if not survey.kept:
        return [skipped(name, "no document is left to look at")]
    blocks, left = divmod(survey.tokens, max_seq_len)
    said = f"{survey.kept:,} documents, {survey.tokens:,} tokens: {blocks:,} full blocks of {max_seq_len:,}"
    if blocks == 0 and survey.split not in ("val", "test"):
        return [problem(name, said, "lower model.max_seq_len, or give more text")]
    return [ok(name, f"{said}; {left:,} tokens are left over")]


def judge_padding(shares: Mapping[str, float], *, micro_batch: int, packing: str, grouped: bool) -> list[Check]:
    """Share of padding for each way to make batches, the run's own marked."""
    names = {"random": "random order", "grouped": "grouped by length", "best_fit": "packed (best_fit)"}
    own = "best_fit" if packing == "best_fit" else "grouped" if grouped else "random"
    listed = [
        f"{names.get(key, key)} {share:.1%}{' (this run)' if key == own else ''}" for key, share in shares.items()
    ]
    return [ok("padding", f"of the tokens in batches of {micro_batch}: {', '.join(listed)}")]


FIRST_ROWS = 200
"""Rows that the first lines of a run are told from."""


def first_lines(path: AnySource, renderer: Renderer, tokenizer: Any, *, task_mode: str) -> list[str]:
    """What the first rows of the training file say of the masks: trained tokens by role, BOS, end of turn, padding."""
    maker = RowMaker(renderer, task_mode=task_mode)
    surveyor = Surveyor(renderer.data, tokenizer=tokenizer, maker=maker)
    survey = surveyor.survey(path, "train", text_wanted=task_mode == "cpt", rows=FIRST_ROWS)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    checks = [*judge_roles(survey), *judge_marks(survey, tokenizer, adds_bos=adds_bos)]
    return [f"First {survey.rows} rows: {check.name}: {check.what}" for check in checks]
