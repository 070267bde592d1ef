"""What a table's columns are, by their names in several languages and by their values: which hold a
question and its answer, for hints and for the run YAML that `make new` writes; and which of those
that a format does not read would be missed. Rows are never read by a guess.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sft_play.data.sources.json_rows import is_turn_list
from sft_play.data.sources.messages import UnusableRowError, iter_texts, unpack_json
from sft_play.log import one_line

# By kind: words in the names of columns; what is missed where one is not read; the known column
# that reads it, and what it becomes there. A name with a word of `about` only describes its row.
COLUMN_KINDS: dict[str, dict[str, str]] = json.loads(
    resources.files(__package__).joinpath("columns.json").read_text(encoding="utf-8")
)
_KIND_WORDS = {kind: frozenset(row["words"].split()) for kind, row in COLUMN_KINDS.items()}
_UNSPACED_SCRIPTS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
# a word, or a letter of a script that puts no space between words
WORD_PATTERN = re.compile(rf"[{_UNSPACED_SCRIPTS}]|[^\W{_UNSPACED_SCRIPTS}]+")
# how a user's turn begins in layouts that data sets have, whatever the run's template is
_RENDERED_TURN = re.compile(
    r"<\|?(?:im_start|start_header_id|start_of_turn|start_of_role|turn_start)\|?>\s?(?:user|human)"
    r"|<[|｜](?:user|User|human)[|｜]>|\[INST\]|(?:^|\n)#{2,3} ?(?:Human|User|Instruction):"
    r"|(?:^|\n)(?:USER|Human|User): .*\n+(?:ASSISTANT|Assistant|GPT): "
)


def find_rendered_mark(text: str) -> str | None:
    """The mark of a user's turn by which a text looks like a rendered chat of any template; None
    where it has none."""
    match = _RENDERED_TURN.search(text)
    return match.group().strip().splitlines()[0][:40] if match else None


# Columns of rows that no format has
def guess_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Guess `data.columns` for rows like this one; empty if names and values are unclear or
    ambiguous."""
    values = {
        name: unpack_json(value, "[{") for name, value in row.items() if name == one_line(name)
    }
    turns = [name for name, value in values.items() if is_turn_list(value)]
    texts = [
        name
        for name, value in values.items()
        if isinstance(value, str) and not find_rendered_mark(value)
    ]
    questions = _find_kind_columns(texts, "question") or _find_kind_columns(texts, "task")
    answers = _find_kind_columns([name for name in texts if name not in questions[:1]], "answer")
    if len(turns) == 1:
        return {"messages": turns[0]}
    if questions and len(answers) == 1 and not turns:
        return {"prompt": questions[0], "completion": answers[0]}
    text_columns = _find_kind_columns(texts, "text")
    return {"text": text_columns[0]} if text_columns and not (turns or questions or answers) else {}


def unknown_format_hint(row: Mapping[str, Any]) -> str:
    """How to map the columns of rows of no known format, such as this one."""
    columns = guess_columns(row)
    if columns:
        return f"Map them: {columns_setting(columns)}"
    example = columns_setting({"prompt": "QUESTION", "completion": "ANSWER"})
    return f"Map yours: SET='{example}', with your columns in the place of QUESTION and ANSWER"


# The column that has a word of this kind for its name, else all with one among others
# (`user_question`).
def _find_kind_columns(names: list[str], kind: str) -> list[str]:
    exact = [name for name in names if name.strip().lower() in _KIND_WORDS[kind]]
    return exact[:1] or [name for name in names if kind in kinds_in_name(name)]


@functools.lru_cache(maxsize=10_000)
def kinds_in_name(name: str) -> frozenset[str]:
    """The kinds of columns that a name speaks of; `about` and no other where it only describes the
    row, as `question_id` does, but that `image_path` names pictures too."""
    lowered = name.strip().lower()
    # `toolDefs` and `tool_defs` have two words; a letter that is not alone (`model_a`) is none
    parts = re.split(r"[\W_\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip()).lower())
    words_in_name = {lowered, *(part for part in parts if len(part) > 1)}
    # words of scripts without spaces, or with endings, stand inside others
    words_in_name.update(
        word
        for words in _KIND_WORDS.values()
        for word in words
        if not word.isascii() and word in lowered
    )
    kinds = frozenset(
        kind for kind, words in _KIND_WORDS.items() if not words.isdisjoint(words_in_name)
    )
    if "about" in kinds:
        return kinds & {"about", *_MEDIA_KINDS}
    # a prompt that is the system's is no question
    return kinds - {"question"} if "system" in kinds else kinds


def columns_setting(columns: Mapping[str, str]) -> str:
    """`data.columns={prompt: Frage, completion: Antwort}`."""
    pairs = []
    for known, name in columns.items():
        is_plain = re.fullmatch(r"[^\W\d][\w-]*", name)
        pairs.append(f"{known}: {name if is_plain else json.dumps(name, ensure_ascii=False)}")
    return f"data.columns={{{', '.join(pairs)}}}"


# --------------------------------------------------------------------------------------------------
# Columns that a format does not read


# a column's name, its kind where it would be missed (else ""), and the items of data.columns that
# read it
UnusedColumn = tuple[str, str, tuple[tuple[str, str], ...]]
# words from which a text with a telling name is missed: one alone is a flag or a level (`reasoning:
# high`), and a user's name has two
_MIN_WORDS = {"reasoning": 2, "system": 2, "context": 2, "choices": 2, "question": 4, "answer": 4}
# words from which one of any name is missed: if it is as long as the answer (a title has fewer),
# and in any case; of one that describes the row both
_LONG_WORDS, _VERY_LONG_WORDS, _ENOUGH_CHARS = 12, 40, 1_000
# a file, an address, or the thing itself
_MEDIA_KINDS = ("media", "video")
_MEDIA_VALUE = re.compile(r"\S+\.\w{2,5}|(?:data|https?):\S+")
_BIT_LIST = re.compile(r"\[(?:[01](?:, )?){2,}\]")


def missed_column_kind(name: str, value: Any, *, is_text: bool, answer_chars: int) -> str:
    """The kind of an unread column that training would miss, told by its name and value; "" if the
    column only describes its row. `is_text`: the rows are plain text."""
    kinds, value = kinds_in_name(name), unpack_json(value, "[{")
    if not isinstance(value, (str, list, dict)) and not kinds:
        return ""
    # Tools are told by what they are made of, whatever the column's name.
    items = value if isinstance(value, list) else [value]
    are_objects = all(isinstance(item, dict) for item in items)
    if are_objects and (
        "tools" in kinds or all("function" in item or "parameters" in item for item in items)
    ):
        return "tools"
    # Masks and weights: a usual value (all trained, weight 1) says nothing that would be missed.
    lowered = str(value).strip().lower()
    flag_kinds = [
        kind
        for kind in ("mask", "weight")
        if kind in kinds and lowered not in COLUMN_KINDS[kind]["usual"].split()
    ]
    if flag_kinds or _BIT_LIST.fullmatch(lowered):
        return "mask"
    if (
        is_text
        and not kinds.isdisjoint(("label", "answer"))
        and not isinstance(value, (list, dict))
    ):
        return "label"
    # Texts: missed for their name with a few words, under any name where they are long.
    texts = list(iter_texts(value))
    counts = [len(WORD_PATTERN.findall(text[:_ENOUGH_CHARS])) for text in texts]
    media_kinds = [kind for kind in _MEDIA_KINDS if kind in kinds]
    if media_kinds and not is_text and any(map(_MEDIA_VALUE.fullmatch, texts)):
        return media_kinds[0]
    named_kind = next(
        (kind for kind, minimum in _MIN_WORDS.items() if kind in kinds and sum(counts) >= minimum),
        "",
    )
    long_minimum = _VERY_LONG_WORDS if "about" in kinds else _LONG_WORDS
    is_long = any(
        (len(text) >= answer_chars and count >= long_minimum)
        or ("about" not in kinds and count >= _VERY_LONG_WORDS)
        for count, text in zip(counts, texts, strict=True)
    )
    return named_kind or ("long" if is_long else "")


def describe_unused_columns(
    counts: Counter[UnusedColumn], columns: Mapping[str, str]
) -> tuple[str, bool]:
    """Counted unused columns in words, with the setting that reads them beside the `columns` that
    data.columns has, and whether any of them would be missed."""
    missed: dict[str, str] = {}
    added_columns: dict[str, str] = {}
    conversions: list[str] = []
    for (name, kind, mapping), count in counts.most_common():
        if kind and name not in missed:
            missed[name] = (
                f"{one_line(name, limit=40)} ({COLUMN_KINDS[kind]['missed']}, {count:,}"
                f" row{'s' * (count != 1)})"
            )
            # of two for one known column the first
            if mapping and added_columns.keys().isdisjoint(dict(mapping)):
                added_columns |= mapping
                conversions.append(f"{one_line(name, limit=40)} as {COLUMN_KINDS[kind]['becomes']}")
    other_names = [
        one_line(name, limit=40)
        for name in dict.fromkeys(name for name, _, _ in counts)
        if name not in missed
    ]
    # plain text with a label becomes a question and its answer, whatever was mapped
    setting = columns_setting(
        added_columns if "completion" in added_columns else {**columns, **added_columns}
    )
    parts = {
        f"not read: {', '.join(missed.values())}": missed,
        f"{setting} reads {', '.join(conversions)}": added_columns,
        f"{'also ' * bool(missed)}not read: {', '.join(other_names)}": other_names,
    }
    return "; ".join(text for text, names in parts.items() if names), bool(missed)


# --------------------------------------------------------------------------------------------------
# Rows that are not supervised examples, named as what they are and by the column that shows it.
#
# Preferences, unwanted answers, rankings, multiple choice and the like hold questions and answers
# under the same names as supervised rows do. A key counts only with the kind of value that it has
# in such data, so that an innocent column of that name stops nothing.

# Where rows of KTO say whether an answer is wanted.
PREFERENCE_TAGS = (
    "label",
    "kto_tag",
    "kto_label",
    "desirable",
    "is_desirable",
    "is_chosen",
    "undesirable",
    "is_undesirable",
)
# What they say of one that is not, as text; of a name with `un` the contrary.
_UNWANTED_WORDS = frozenset(
    {"false", "0", "0.0", "undesirable", "unwanted", "rejected", "dispreferred"}
)
REJECTED_COLUMNS = (
    "rejected",
    "rejected_response",
    "response_rejected",
    "rejected_answer",
    "rejected_completion",
    "rejected_output",
    "rejected_messages",
    "rejected_conversations",
    "non_preferred_output",
    "dispreferred",
)
NEGATIVE_COLUMNS = ("negative", "negatives", "neg", "hard_negatives")
CHOICE_COLUMNS = ("choices", "options")
# Every row that `refuse_other_kind` refuses has at least one of these keys, so that others need no
# closer look.
OTHER_KIND_COLUMNS = frozenset(
    {*PREFERENCE_TAGS, *REJECTED_COLUMNS, *NEGATIVE_COLUMNS, *CHOICE_COLUMNS}
)

# What a flag of the name "rejected" holds.
_FLAG_WORDS = frozenset({"", "yes", "no", "true", "false", "none", "null", "nan", "n/a", "0", "1"})


def refuse_other_kind(
    data: Mapping[str, Any], required_columns: Sequence[str], *, is_text: bool
) -> None:
    """Raises UnusableRow where a row that has the columns `required_columns` of a format is data of
    another kind.

    `is_text`: the format is plain text, which may have any label beside it.
    """
    train_anyway = (
        f"to train every row anyway: {columns_setting({key: key for key in required_columns})}"
    )
    tag = next(
        (key for key in PREFERENCE_TAGS if key in data and _is_unwanted(key, data[key])), None
    )
    if tag is not None and not is_text:
        raise UnusableRowError(
            f"{tag} is {str(data[tag]).strip().lower()}: an answer that is not wanted (KTO)",
            f"data.on_bad_row=skip leaves such rows out and trains the wanted ones; {train_anyway}",
        )
    rejected = next(
        (key for key in REJECTED_COLUMNS if key in data and _is_answer(data[key])), None
    )
    if rejected is not None:
        raise UnusableRowError(
            "preferences (a chosen and a rejected answer, as for DPO), which are not supervised"
            " examples",
            f"{rejected} is there; data.columns={{prompt: prompt, completion: chosen}}, or"
            f" {{messages: chosen}} if it is a chat, trains it; {train_anyway}",
        )
    negative = next(
        (key for key in NEGATIVE_COLUMNS if key in data and _is_passage(data[key])), None
    )
    if negative is not None:
        raise UnusableRowError(
            "pairs and negatives for retrieval or embeddings, which are not supervised examples",
            f"{negative} is there; {train_anyway}",
        )
    lists = {key: unpack_json(data.get(key), "[{") for key in CHOICE_COLUMNS}
    choices = next(
        (key for key, value in lists.items() if isinstance(value, (list, dict)) and len(value) > 1),
        None,
    )
    if (
        choices is not None
        and not is_text
        and _is_choice_mark(data[required_columns[-1]], lists[choices])
    ):
        raise UnusableRowError(
            "multiple choice, whose answer is a mark in a column that the prompt does not show",
            f"{choices} is there; write the choices into the question; {train_anyway}",
        )


def _is_unwanted(tag: str, value: Any) -> bool:
    lowered = str(value).strip().lower()
    return (
        lowered in ("true", "1", "1.0")
        if tag.removeprefix("is_").startswith("un")
        else lowered in _UNWANTED_WORDS
    )


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in _FLAG_WORDS
    return isinstance(value, (list, dict)) and bool(value)


def _is_passage(value: Any) -> bool:
    value = unpack_json(value, "[")
    if isinstance(value, str):
        return len(value.split()) > 1
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, (str, dict)) for item in value)
    )


def _is_choice_mark(value: Any, choices: Any) -> bool:
    if isinstance(value, str):
        mark = value.strip().strip("().")
        return (
            len(mark) == 1
            and mark.isalnum()
            and not (isinstance(choices, list) and mark in choices)
        )
    return isinstance(value, int) and not isinstance(value, bool)
