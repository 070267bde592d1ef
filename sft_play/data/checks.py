"""Judge the counts of the data: each finding is ok, a warning or a problem, with what to do about
it.

`make check` says all of it; a run stops at problems, and logs what concerns its rows and masks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.answers import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats, count_shared_rows, length_remedy
from sft_play.data.build.survey import count_readable_rows
from sft_play.data.masks.token_row import MASK_METHODS
from sft_play.data.sources.columns import describe_unused_columns
from sft_play.data.sources.files import data_part_split, find_data_paths
from sft_play.data.sources.messages import known_role_lines
from sft_play.data.sources.raw import FIX_ALL, FIX_OR_SKIP, BadRow, bad_row_lines
from sft_play.data.sources.tables import HUB_PREFIX
from sft_play.log import one_line
from sft_play.text import plural

# Rows


def judge_rows(stats: RowStats, data: DataConfig, *, task_mode: str) -> Iterator[Finding]:
    """Judge the rows of a file: how many there are, their format, and rows that cannot be read."""
    name = f"rows: {stats.split}"
    description = f"{plural(stats.rows, 'row')} of {stats.source} ({stats.format})"
    if stats.rows == 0:
        yield fail_finding(name, f"{stats.source} has no rows", "give a file with rows")
        return
    if task_mode == "cpt" and stats.chats:
        yield fail_finding(
            name,
            f"{description} hold chats, and task_mode is cpt, which trains plain text",
            f"use task_mode=sft, or give data.{stats.split}_path plain text, or null",
        )
        return
    if stats.bad_rows:
        yield _bad_rows_finding(
            name,
            description,
            stats.bad_rows,
            stats.first_bad_rows,
            data,
            stats.rows,
            known_role_lines(stats.bad_rows, stats.turns),
        )
    else:
        yield pass_finding(name, description)
    if stats.left_out_rows:
        reasons = [f"{count:,} x {reason}" for reason, count in stats.left_out_rows.most_common(6)]
        yield pass_finding(
            name,
            f"{stats.left_out_rows.total():,} rows are left out as asked: {'; '.join(reasons)}",
        )
    for note, count in stats.notes.most_common(12):
        first_location = one_line(stats.first_note_locations[note], limit=300)
        yield warn_finding(
            name,
            f"{plural(count, 'row')}: {one_line(note, limit=400)} (the first: {first_location})",
            "used as they are: make preview ROW=… shows one",
        )
    yield from judge_columns(stats, data)


def judge_columns(stats: RowStats, data: DataConfig) -> Iterator[Finding]:
    """List the columns that are not read; a warning where one of them would be missed."""
    message, is_missed = describe_unused_columns(stats.unused_columns, data.columns)
    name = f"columns: {stats.split}"
    if is_missed:
        yield warn_finding(
            name,
            message,
            "map them as it says, or take them out: make preview shows what is trained",
        )
    elif message:
        yield pass_finding(name, message)


def missed_column_lines(data: DataConfig, *, task_mode: str) -> list[str]:
    """A line on the columns of each training source's first rows that are not read and would be
    missed; sources of the hub are not read for it. Raises DataError where rows cannot be read."""
    lines: list[str] = []
    for name, source in find_data_paths(data).named_paths():
        is_trained = data_part_split(name) == "train" or (
            name == "text" and task_mode == "cpt_mixed"
        )
        if is_trained and not str(source).startswith(HUB_PREFIX):
            stats = count_readable_rows(
                source, data, name, wants_text=name == "text" or task_mode == "cpt", max_rows=1_000
            )
            source_note = "" if name == "train" else f" of {name}"
            lines += [
                f"Columns{source_note} {finding.found}"
                for finding in judge_columns(stats, data)
                if finding.verdict == "WARN"
            ]
    return lines


def _bad_rows_finding(
    name: str,
    description: str,
    bad_rows: Counter[str],
    first_bad: Sequence[BadRow],
    data: DataConfig,
    rows: int,
    more_lines: Sequence[str] = (),
) -> Finding:
    lines = "\n".join([*bad_row_lines(description, bad_rows, first_bad), *more_lines])
    if data.on_bad_row == "skip":
        return warn_finding(
            name, lines, "they are left out (data.on_bad_row=skip); fix them to use them"
        )
    return fail_finding(name, lines, FIX_ALL if bad_rows.total() == rows else FIX_OR_SKIP)


def duplicate_warnings(stats: RowStats) -> Iterator[Finding]:
    """Warn of rows with the tokens of an earlier row, or of a row in another split."""
    if stats.repeated_rows:
        yield warn_finding(
            "duplicates",
            f"{plural(stats.repeated_rows, 'row')} of {stats.split} with the tokens of an earlier"
            " one (make process names them)",
            "keep one of each: make process SET=data.process.drop_duplicates=true",
        )
    for other_split, count in stats.shared_rows.items():
        yield warn_finding(
            "leaks",
            f"{plural(count, 'row')} with the same tokens as in {other_split}: figures on"
            f" {stats.split} flatter the model (make process names them)",
            "leave them out of one: make process SET=data.process.drop_leaks=true",
        )


def judge_duplicates(surveys: Sequence[RowStats]) -> Iterator[Finding]:
    """Judge rows with the same tokens: within a file, and between training and held-out files."""
    files = [survey for survey in surveys if survey.split != "text"]
    count_shared_rows(files)
    findings = [finding for survey in surveys for finding in duplicate_warnings(survey)]
    yield from findings
    names, splits = (
        {finding.name for finding in findings},
        dict.fromkeys(survey.split for survey in files),
    )
    if "duplicates" not in names:
        yield pass_finding("duplicates", "no row is twice in its file")
    if "leaks" not in names and len(splits) > 1:
        yield pass_finding("leaks", f"no row is in two of {', '.join(splits)}")


# Masks


def judge_masks(stats: RowStats, data: DataConfig) -> Iterator[Finding]:
    """Which rows have a verified mask, by which method, and how much of them is trained."""
    name = f"masks: {stats.split}"
    if stats.unmasked_rows:
        yield _bad_rows_finding(
            name,
            f"{plural(stats.rows - stats.bad_rows.total(), 'row')} of {stats.source}",
            stats.unmasked_rows,
            stats.first_unmasked_rows,
            data,
            stats.rows - stats.bad_rows.total(),
        )
        return
    if not stats.kept_rows:
        yield skip_finding(name, "no row is left to look at")
        return
    methods = ", ".join(
        f"{MASK_METHODS.get(method, method)} ({count:,})"
        for method, count in stats.methods.most_common()
    )
    rows, share = stats.methods.total(), stats.trained_tokens / max(1, stats.tokens)
    rows_note = f"every one of {rows:,} rows" if rows != 1 else "the only row"
    tokens_note = f"{stats.trained_tokens:,} of {stats.tokens:,} tokens are trained ({share:.0%})"
    yield pass_finding(name, f"verified on {rows_note} by {methods}; {tokens_note}")
    if stats.methods["inexact"]:
        yield warn_finding(
            name,
            f"{stats.methods['inexact']:,} rows have no exact mask and train the nearest one",
            "they are trained because data.on_inexact_mask=train; give data.chat_template a better"
            " template",
        )
    if stats.untrained_turns:
        yield warn_finding(
            name,
            f"{stats.untrained_turns:,} assistant turns have no exact mask and are not trained: the"
            " template writes a turn of the history differently from how it is generated",
            "data.multi_turn=split trains each of them as the last turn of a row of its own",
        )
    if stats.merged_edges:
        yield pass_finding(
            name, f"{stats.merged_edges:,} answers end inside a token, which is split there"
        )


def judge_texts(stats: RowStats, data: DataConfig) -> Iterator[Finding]:
    """What the template does to texts: think text that it leaves out, special tokens that texts
    spell; and what images take."""
    if stats.image_rows:
        share = stats.image_tokens / max(1, stats.tokens)
        yield pass_finding(
            f"images: {stats.split}",
            f"{stats.images:,} in {stats.image_rows:,} of {plural(stats.kept_rows, 'row')},"
            f" {stats.image_tokens:,} tokens ({share:.0%} of all), at most"
            f" {stats.largest_image_row:,} in a row",
        )
    if stats.stripped_think_pieces:
        yield warn_finding(
            "think text",
            f"{stats.stripped_think_pieces:,} pieces of think text in {stats.split} are not written"
            " by the template",
            "a template that writes it; data.multi_turn=split keeps it where only the last turn's"
            " is written",
        )
    if not stats.special_token_count:
        return
    spelled_note = (
        f"{stats.special_token_count:,} special tokens are spelled in the texts of "
        f"{plural(stats.special_rows, 'row')} of {stats.split} (the first:"
        f" {one_line(stats.first_special_location)})"
    )
    if data.special_tokens_in_text != "plain":
        yield warn_finding(
            "special tokens",
            f"{spelled_note}: they become the tokens that they spell",
            "data.special_tokens_in_text=plain takes them as text",
        )
    elif stats.special_documents:
        yield warn_finding(
            "special_tokens_in_text",
            f"{spelled_note}; {plural(stats.special_documents, 'row')} are plain text, trained"
            " whole, with these tokens as the characters that spell them",
            "rendered chats belong into messages; data.special_tokens_in_text=control takes each"
            " for its token",
        )
    else:
        yield pass_finding("special tokens", f"{spelled_note}: tokenised as plain text")


# Length


def judge_lengths(
    stats: RowStats, data: DataConfig, *, max_seq_len: int, max_positions: int | None
) -> Iterator[Finding]:
    """Judge what `max_seq_len` cuts, and which limit keeps enough. `max_positions`: the model's,
    None for no limit."""
    cost, name = stats.truncation_cost, f"length: {stats.split}"
    if not cost.trained_tokens:
        return
    share = stats.lost_tokens / cost.trained_tokens
    if not (stats.cut_rows or stats.too_long_rows or share):
        yield pass_finding(
            name,
            f"the longest row has {cost.longest:,} tokens; max_seq_len {max_seq_len:,} cuts none",
        )
        return
    rows_note = f"of {stats.kept_rows + stats.too_long_rows:,} rows"
    row_messages = [f"{stats.cut_rows:,} {rows_note} are cut at max_seq_len {max_seq_len:,}"]
    if stats.rows_with_cut_end:
        row_messages.append(
            f"{stats.rows_with_cut_end:,} {rows_note} train an answer without its end, at which a"
            " model learns to stop"
        )
    if stats.too_long_rows:
        outcome = "left out" if data.truncate == "drop" else "without any trained token left"
        row_messages.append(
            f"{stats.too_long_rows:,} {rows_note} {outcome} (shortest prompt:"
            f" {stats.shortest_prompt:,} tokens)"
        )
    message = (
        f"{'; '.join(row_messages)}; {stats.lost_tokens:,} of {cost.trained_tokens:,} trained"
        f" tokens ({share:.1%}) are lost"
    )
    remedy = length_remedy(stats, data, max_seq_len=max_seq_len, max_positions=max_positions)
    if stats.kept_rows == 0:
        yield fail_finding(
            name,
            f"all {stats.too_long_rows:,} rows lose their answer at max_seq_len {max_seq_len} "
            f"(shortest prompt: {stats.shortest_prompt:,} tokens)",
            remedy,
        )
    elif share > data.max_lost_fraction and stats.split == "train":
        yield fail_finding(
            name,
            f"{message}, more than data.max_lost_fraction={data.max_lost_fraction:g}",
            f"{remedy}, or raise data.max_lost_fraction to accept it",
        )
    else:
        yield warn_finding(name, message, remedy)


def judge_blocks(stats: RowStats, *, max_seq_len: int) -> Finding:
    """How many full blocks the documents of plain text come to."""
    name = f"blocks: {stats.split}"
    if not stats.kept_rows:
        return skip_finding(name, "no document is left to look at")
    blocks, leftover_tokens = divmod(stats.tokens, max_seq_len)
    description = (
        f"{stats.kept_rows:,} documents, {stats.tokens:,} tokens: {blocks:,} full blocks of"
        f" {max_seq_len:,}"
    )
    if blocks == 0 and stats.split not in ("val", "test"):
        return fail_finding(name, description, "lower model.max_seq_len, or give more text")
    return pass_finding(name, f"{description}; {leftover_tokens:,} tokens are left over")


def judge_padding(
    shares: Mapping[str, float], *, micro_batch: int, packing: str, groups_by_length: bool
) -> Finding:
    """Compare the share of padding of random, grouped and packed batches; the one that the run uses
    is marked."""
    names = {
        "random": "random order",
        "grouped": "grouped by length",
        "best_fit": "packed (best_fit)",
    }
    run_key = ("random", "grouped")[groups_by_length]
    if packing == "best_fit":
        run_key = "best_fit"
    share_texts = [
        f"{names[key]} {share:.1%}{' (this run)' * (key == run_key)}"
        for key, share in shares.items()
    ]
    return pass_finding(
        "padding", f"of the tokens in batches of {micro_batch}: {', '.join(share_texts)}"
    )


# Marks


def judge_special_tokens(stats: RowStats, tokenizer: Any) -> Iterator[Finding]:
    """Judge special tokens: BOS on all rows or none, one at the end of trained parts, padding that
    is not trained."""
    if stats.texts or not stats.kept_rows:
        return
    bos, rows_note = tokenizer.bos_token, f"of {stats.kept_rows:,} rows of {stats.split}"
    if stats.rows_with_bos == stats.kept_rows:
        yield pass_finding("BOS", f"every row of {stats.split} begins with one {bos}")
    elif stats.rows_with_bos:
        yield warn_finding(
            "BOS",
            f"{stats.rows_with_bos:,} {rows_note} begin with {bos}, the others do not",
            "give data.chat_template a template that writes it always or never",
        )
    # with a template that writes one too, an engine's prompts have two
    elif tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]:
        yield warn_finding(
            "BOS",
            f"the tokenizer puts {bos} before a text, and the chat template writes none: rows begin"
            " without it",
            "fine if the model was trained like that; otherwise give data.chat_template one that"
            " writes it",
        )
    else:
        yield pass_finding("BOS", "none, as the tokenizer has it")
    names = [
        str(tokenizer.convert_ids_to_tokens(token_id))
        for token_id, _ in stats.end_token_ids.most_common(3)
    ]
    ends = f"ends with {' or '.join(names)}, which is trained"
    if tokenizer.eos_token not in names:
        ends += f"; the tokenizer's eos is {tokenizer.eos_token}"
    added_ends = [
        f"{one_line(text)} after {rows:,} rows" for text, rows in stats.added_ends.most_common(3)
    ]
    if added_ends:
        ends += (
            f"; the chat template does not end a last turn: {', '.join(added_ends)} is added, as a"
            " next turn would begin"
        )
    if stats.rows_with_open_end:
        yield warn_finding(
            "end of turn",
            f"{stats.rows_with_open_end:,} {rows_note} have an answer that ends with no special"
            f" token (the first: {one_line(stats.first_open_end_location)}): the model does not"
            " learn to stop there",
            "they are trained because data.on_missing_end=train; give data.chat_template a template"
            " that ends an assistant's turn with a token",
        )
    elif stats.rows_with_cut_end:
        yield warn_finding(
            "end of turn",
            f"{stats.rows_with_cut_end:,} {rows_note} train an answer that max_seq_len cuts in two,"
            f" without its end; every other one {ends}",
            "raise model.max_seq_len, or leave such rows out with data.truncate=drop",
        )
    else:
        yield pass_finding("end of turn", f"every trained answer {ends}")
    if stats.rows_training_pad:
        yield warn_finding(
            "padding token",
            f"{stats.rows_training_pad:,} rows of {stats.split} train {tokenizer.pad_token}, which"
            " also pads; padding is masked by length, so it is still learned",
            "fine if the template ends turns with it",
        )
    else:
        is_eos_note = ", which is also the end token" * (
            tokenizer.pad_token_id == tokenizer.eos_token_id
        )
        yield pass_finding(
            "padding token",
            f"{tokenizer.pad_token}{is_eos_note}; padding is masked by length, never by its id",
        )


def judge_split(
    stats: RowStats, data: DataConfig, *, max_seq_len: int, max_positions: int | None
) -> Iterator[Finding]:
    """Judge a split for a run, which stops at the first FAIL."""
    yield from judge_rows(stats, data, task_mode="")  # the run itself refuses rows of another task
    yield from duplicate_warnings(stats)
    if stats.methods or stats.unmasked_rows:  # documents have no masks
        yield from judge_masks(stats, data)
    yield from judge_texts(stats, data)
    yield from judge_lengths(stats, data, max_seq_len=max_seq_len, max_positions=max_positions)
