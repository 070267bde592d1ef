"""What a survey of the data means for a run: each finding ok, a warning or a problem, with what to do about it.

`make check` says all of it; a run stops at problems, and logs what concerns its rows and masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats, note_shared, rows_text, ways_to_keep
from sft_play.data.build.survey import TEMPLATE, survey_rows
from sft_play.data.masks.token_row import MASK_METHODS
from sft_play.data.sources.columns import describe_unused_columns
from sft_play.data.sources.files import find_data_paths, part_split
from sft_play.data.sources.messages import known_role_lines
from sft_play.data.sources.raw import FIX_OR_SKIP, BadRow, bad_row_lines
from sft_play.data.sources.tables import HUB_PREFIX
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.log import one_line

# Rows


def judge_rows(survey: RowStats, data: DataConfig, *, task_mode: str) -> Iterator[Finding]:
    """The rows of a file: how many, of which format, and those that cannot be read."""
    name = f"rows: {survey.split}"
    every = f"{rows_text(survey.rows)} of {survey.source} ({survey.format})"
    if survey.rows == 0:
        yield fail_finding(name, f"{survey.source} has no rows", "give a file with rows")
        return
    if task_mode == "cpt" and survey.chats:
        found = f"{every} hold chats, and task_mode is cpt, which trains plain text"
        yield fail_finding(name, found, f"use task_mode=sft, or give data.{survey.split}_path plain text, or null")
        return
    if survey.bad:
        yield _bad(name, every, survey.bad, survey.first_bad, data, known_role_lines(survey.bad, survey.turns))
    else:
        yield pass_finding(name, every)
    if survey.left_out:
        reasons = "; ".join(f"{count:,} x {reason}" for reason, count in survey.left_out.most_common(6))
        yield pass_finding(name, f"{sum(survey.left_out.values()):,} rows are left out as asked: {reasons}")
    for note, count in survey.notes.most_common(12):
        first = one_line(survey.first_noted[note], limit=300)
        found = f"{rows_text(count)}: {one_line(note, limit=400)} (the first: {first})"
        yield warn_finding(name, found, "used as they are: make preview ROW=… shows one")
    yield from judge_columns(survey, data)


def judge_columns(survey: RowStats, data: DataConfig) -> Iterator[Finding]:
    """The columns that are not read; a warning where one of them would be missed."""
    words, is_missed = describe_unused_columns(survey.unused, data.columns)
    name = f"columns: {survey.split}"
    do = "map them as it says, or take them out: make preview shows what is trained"
    if words:
        yield warn_finding(name, words, do) if is_missed else pass_finding(name, words)


# rows from which new, preview and plan tell which columns are not read
_FIRST_ROWS = 1_000


def missed_columns(data: DataConfig, *, task_mode: str) -> list[str]:
    """A line on the columns of each training source's first rows that are not read and would be missed; sources of the
    hub are not read for it. Raises DataError where rows cannot be read."""
    lines: list[str] = []
    for name, source in find_data_paths(data).named_paths():
        is_trained = part_split(name) == "train" or (name == "text" and task_mode == "cpt_mixed")
        if is_trained and not str(source).startswith(HUB_PREFIX):
            survey = survey_rows(source, data, name, text_wanted=name == "text" or task_mode == "cpt", most=_FIRST_ROWS)
            of = "" if name == "train" else f" of {name}"
            lines += [f"Columns{of} {one.found}" for one in judge_columns(survey, data) if one.verdict == "WARN"]
    return lines


def _bad(
    name: str, among: str, bad: Counter[str], first: Sequence[BadRow], data: DataConfig, also: Sequence[str] = ()
) -> Finding:
    lines = "\n".join([*bad_row_lines(among, bad, first), *also])
    if data.on_bad_row == "skip":
        return warn_finding(name, lines, "they are left out (data.on_bad_row=skip); fix them to use them")
    return fail_finding(name, lines, FIX_OR_SKIP)


_KEEP_ONE = "keep one of each: make process SET=data.process.drop_duplicates=true"
_LEAVE_OUT = "leave them out of one: make process SET=data.process.drop_leaks=true"


def judge_tokens(stats: RowStats) -> Iterator[Finding]:
    """Rows with the tokens of another one."""
    if stats.repeated:
        found = f"{rows_text(stats.repeated)} of {stats.split} with the tokens of an earlier one"
        yield warn_finding("duplicates", f"{found} (make process names them)", _KEEP_ONE)
    for other, count in stats.shared.items():
        found = f"{rows_text(count)} with the same tokens as in {other}: figures on {stats.split} flatter the model"
        yield warn_finding("leaks", f"{found} (make process names them)", _LEAVE_OUT)


def judge_repeats(surveys: Sequence[RowStats]) -> Iterator[Finding]:
    """Rows with the same tokens: within a file, and in training and held-out files."""
    files = [survey for survey in surveys if survey.split != "text"]
    note_shared(files)
    found = [finding for survey in surveys for finding in judge_tokens(survey)]
    yield from found
    names, splits = {finding.name for finding in found}, dict.fromkeys(survey.split for survey in files)
    if "duplicates" not in names:
        yield pass_finding("duplicates", "no row is twice in its file")
    if "leaks" not in names and len(splits) > 1:
        yield pass_finding("leaks", f"no row is in two of {', '.join(splits)}")


# Masks


def judge_masks(survey: RowStats, data: DataConfig) -> Iterator[Finding]:
    """Which rows have a verified mask, by which method, and how much of them is trained."""
    name = f"masks: {survey.split}"
    if survey.unmasked:
        readable = f"{rows_text(survey.rows - survey.bad.total())} of {survey.source}"
        yield _bad(name, readable, survey.unmasked, survey.first_unmasked, data)
        return
    if not survey.kept:
        yield skip_finding(name, "no row is left to look at")
        return
    methods = ", ".join(f"{MASK_METHODS.get(method, method)} ({count:,})" for method, count in survey.methods.most_common())
    rows, share = survey.methods.total(), survey.trained / max(1, survey.tokens)
    every = f"every one of {rows:,} rows" if rows != 1 else "the only row"
    tokens = f"{survey.trained:,} of {survey.tokens:,} tokens are trained ({share:.0%})"
    yield pass_finding(name, f"verified on {every} by {methods}; {tokens}")
    if survey.methods["inexact"]:
        found = f"{survey.methods['inexact']:,} rows have no exact mask and train the nearest one"
        why = "they are trained because data.on_inexact_mask=train; give data.chat_template a better template"
        yield warn_finding(name, found, why)
    if survey.untrained_turns:
        found = (
            f"{survey.untrained_turns:,} assistant turns have no exact mask and are not trained: the template "
            "writes a turn of the history differently from how it is generated"
        )
        yield warn_finding(name, found, "data.multi_turn=split trains each of them as the last turn of a row of its own")
    if survey.merged:
        yield pass_finding(name, f"{survey.merged:,} answers end inside a token, which is split there")


def judge_texts(survey: RowStats, data: DataConfig) -> Iterator[Finding]:
    """What the template does to texts: think text that it leaves out, special tokens that texts spell."""
    if survey.stripped_think:
        found = f"{survey.stripped_think:,} pieces of think text in {survey.split} are not written by the template"
        way = "a template that writes it; data.multi_turn=split keeps it where only the last turn's is written"
        yield warn_finding("think text", found, way)
    if not survey.special_in_text:
        return
    spelled = (
        f"{survey.special_in_text:,} special tokens are spelled in the texts of {rows_text(survey.special_rows)} "
        f"of {survey.split} (the first: {one_line(survey.first_special)})"
    )
    if data.special_tokens_in_text != "plain":
        found = f"{spelled}: they become the tokens that they spell"
        yield warn_finding("special tokens", found, "data.special_tokens_in_text=plain takes them as text")
    elif survey.special_documents:
        found = (
            f"{spelled}; {rows_text(survey.special_documents)} are plain text, trained whole, with these "
            "tokens as the characters that spell them"
        )
        way = "rendered chats belong into messages; data.special_tokens_in_text=control takes each for its token"
        yield warn_finding("special_tokens_in_text", found, way)
    else:
        yield pass_finding("special tokens", f"{spelled}: tokenised as plain text")


# Length


def judge_lengths(survey: RowStats, data: DataConfig, *, max_seq_len: int, positions: int | None) -> Iterator[Finding]:
    """What `max_seq_len` takes away, and which limit would keep enough. `positions`: the model's, None for no limit."""
    cost, name = survey.cost, f"length: {survey.split}"
    if not cost.trained:
        return
    share = survey.lost / cost.trained
    if not (survey.cut_rows or survey.too_long or share):
        yield pass_finding(name, f"the longest row has {cost.longest:,} tokens; max_seq_len {max_seq_len:,} cuts none")
        return
    of = f"of {survey.kept + survey.too_long:,} rows"
    rows = [f"{survey.cut_rows:,} {of} are cut at max_seq_len {max_seq_len:,}"]
    if survey.cut_ends:
        rows.append(f"{survey.cut_ends:,} {of} train an answer without its end, at which a model learns to stop")
    if survey.too_long:
        whole = "left out" if data.truncate == "drop" else "without any trained token left"
        rows.append(f"{survey.too_long:,} {of} {whole} (shortest prompt: {survey.shortest_prompt:,} tokens)")
    lost = f"{'; '.join(rows)}; {survey.lost:,} of {cost.trained:,} trained tokens ({share:.1%}) are lost"
    ways = ways_to_keep(survey, data, max_seq_len=max_seq_len, positions=positions)
    if survey.kept == 0:
        shortest = f"(shortest prompt: {survey.shortest_prompt:,} tokens)"
        yield fail_finding(
            name, f"all {survey.too_long:,} rows lose their answer at max_seq_len {max_seq_len} {shortest}", ways
        )
    elif share > data.max_lost_fraction and survey.split == "train":
        over = f", more than data.max_lost_fraction={data.max_lost_fraction:g}"
        yield fail_finding(name, lost + over, f"{ways}, or raise data.max_lost_fraction to accept it")
    else:
        yield warn_finding(name, lost, ways)


def judge_blocks(survey: RowStats, *, max_seq_len: int) -> Finding:
    """How many full blocks the documents of plain text come to."""
    name = f"blocks: {survey.split}"
    if not survey.kept:
        return skip_finding(name, "no document is left to look at")
    blocks, left = divmod(survey.tokens, max_seq_len)
    count = f"{survey.kept:,} documents, {survey.tokens:,} tokens: {blocks:,} full blocks of {max_seq_len:,}"
    if blocks == 0 and survey.split not in ("val", "test"):
        return fail_finding(name, count, "lower model.max_seq_len, or give more text")
    return pass_finding(name, f"{count}; {left:,} tokens are left over")


def judge_padding(shares: Mapping[str, float], *, micro_batch: int, packing: str, grouped: bool) -> Finding:
    """Share of padding for each way to make batches, the run's own marked."""
    names = {"random": "random order", "grouped": "grouped by length", "best_fit": "packed (best_fit)"}
    own = "best_fit" if packing == "best_fit" else "grouped" if grouped else "random"
    listed = [f"{names[key]} {share:.1%}{' (this run)' if key == own else ''}" for key, share in shares.items()]
    return pass_finding("padding", f"of the tokens in batches of {micro_batch}: {', '.join(listed)}")


# Roles and marks


def judge_roles(survey: RowStats) -> Iterator[Finding]:
    """Trained tokens of each role."""
    if survey.role_rows:
        order = sorted(survey.roles, key=lambda role: (role == TEMPLATE, -survey.roles[role][0]))
        shares = ", ".join(f"{role} {survey.roles[role][1]:,} of {survey.roles[role][0]:,}" for role in order)
        of = "" if survey.role_rows == survey.kept else f", counted in {survey.role_rows:,} of {survey.kept:,} rows"
        yield pass_finding("tokens by role", f"trained in {survey.split}: {shares}{of}")


def judge_marks(survey: RowStats, tokenizer: Any) -> Iterator[Finding]:
    """BOS on all rows or none, trained parts that end with a special token, padding that is not trained."""
    if survey.kept and not survey.texts:
        yield _bos(survey, tokenizer)
        yield _end(survey, tokenizer)
        yield _pad(survey, tokenizer)


def _bos(survey: RowStats, tokenizer: Any) -> Finding:
    name = tokenizer.bos_token
    if survey.with_bos not in (0, survey.kept):
        found = f"{survey.with_bos:,} of {survey.kept:,} rows of {survey.split} begin with {name}, the others do not"
        return warn_finding("BOS", found, "give data.chat_template a template that writes it always or never")
    if survey.with_bos:
        return pass_finding("BOS", f"every row of {survey.split} begins with one {name}")
    # with a template that writes one too, an engine's prompts have two
    if tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        found = f"the tokenizer puts {name} before a text, and the chat template writes none: rows begin without it"
        way = "fine if the model was trained like that; otherwise give data.chat_template one that writes it"
        return warn_finding("BOS", found, way)
    return pass_finding("BOS", "none, as the tokenizer has it")


def _end(survey: RowStats, tokenizer: Any) -> Finding:
    if survey.open_ends:
        found = (
            f"{survey.open_ends:,} of {survey.kept:,} rows of {survey.split} have an answer that ends with no special "
            f"token (the first: {one_line(survey.first_open_end)}): the model does not learn to stop there"
        )
        why = "they are trained because data.on_missing_end=train; give data.chat_template a template that ends an "
        return warn_finding("end of turn", found, f"{why}assistant's turn with a token")
    names = [str(tokenizer.convert_ids_to_tokens(number)) for number, _ in survey.ends.most_common(3)]
    eos = "" if tokenizer.eos_token in names else f"; the tokenizer's eos is {tokenizer.eos_token}"
    added = ", ".join(f"{one_line(end)} after {rows:,} rows" for end, rows in survey.added_ends.most_common(3))
    if added:
        added = f"; the chat template does not end a last turn: {added} is added, as a next turn would begin"
    ends = f"ends with {' or '.join(names)}, which is trained{eos}{added}"
    if survey.cut_ends:
        rows = f"{survey.cut_ends:,} of {survey.kept:,} rows of {survey.split}"
        found = f"{rows} train an answer that max_seq_len cuts in two, without its end; every other one {ends}"
        return warn_finding("end of turn", found, "raise model.max_seq_len, or leave such rows out with data.truncate=drop")
    return pass_finding("end of turn", f"every trained answer {ends}")


def _pad(survey: RowStats, tokenizer: Any) -> Finding:
    if survey.pad_trained:
        found = (
            f"{survey.pad_trained:,} rows of {survey.split} train {tokenizer.pad_token}, which also pads; padding is "
            "masked by length, so it is still learned"
        )
        return warn_finding("padding token", found, "fine if the template ends turns with it")
    same = ", which is also the end token" if tokenizer.pad_token_id == tokenizer.eos_token_id else ""
    return pass_finding("padding token", f"{tokenizer.pad_token}{same}; padding is masked by length, never by its id")


def judge_split(stats: RowStats, data: DataConfig, *, max_seq_len: int, positions: int | None) -> Iterator[Finding]:
    """What a run says of a split's rows, and where it fails stops at."""
    yield from judge_rows(stats, data, task_mode="")  # the run itself refuses rows of another task
    yield from judge_tokens(stats)
    if stats.methods or stats.unmasked:  # documents have no masks
        yield from judge_masks(stats, data)
    yield from judge_texts(stats, data)
    yield from judge_lengths(stats, data, max_seq_len=max_seq_len, positions=positions)
