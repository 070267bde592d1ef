"""Rows that are not supervised examples, named as what they are and by the column that shows it.

Preferences, unwanted answers, rankings, multiple choice and the like hold questions and answers under the same names as
supervised rows do. A key counts only with the kind of value that it has in such data, so that an innocent column of
that name stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.data.sources.messages import UnusableRowError, unpack_json

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
_UNWANTED_WORDS = frozenset({"false", "0", "0.0", "undesirable", "unwanted", "rejected", "dispreferred"})
REJECTED_COLUMNS = (
    *("rejected", "rejected_response", "response_rejected", "rejected_answer", "rejected_completion"),
    *("rejected_output", "rejected_messages", "rejected_conversations", "non_preferred_output", "dispreferred"),
)
NEGATIVE_COLUMNS = ("negative", "negatives", "neg", "hard_negatives")
CHOICE_COLUMNS = ("choices", "options")
# Every row that `refuse_other_kind` refuses has at least one of these keys, so that others need no closer look.
OTHER_KIND_COLUMNS = frozenset({*PREFERENCE_TAGS, *REJECTED_COLUMNS, *NEGATIVE_COLUMNS, *CHOICE_COLUMNS})

UNWANTED_REASON = "an answer that is not wanted (KTO)"
PREFERENCE_REASON = "preferences (a chosen and a rejected answer, as for DPO), which are not supervised examples"
RETRIEVAL_REASON = "pairs and negatives for retrieval or embeddings, which are not supervised examples"
CHOICE_REASON = "multiple choice, whose answer is a mark in a column that the prompt does not show"

# What a flag of the name "rejected" holds.
_FLAG_WORDS = frozenset({"", "yes", "no", "true", "false", "none", "null", "nan", "n/a", "0", "1"})


def refuse_other_kind(data: Mapping[str, Any], required_columns: Sequence[str], *, is_text: bool) -> None:
    """Raises UnusableRow where a row that has the columns `required_columns` of a format is data of another kind.

    `is_text`: the format is plain text, which may have any label beside it.
    """
    tag = next((key for key in PREFERENCE_TAGS if key in data and _is_unwanted(key, data[key])), None)
    if tag is not None and not is_text:
        raise UnusableRowError(
            f"{tag} is {str(data[tag]).strip().lower()}: {UNWANTED_REASON}",
            "data.on_bad_row=skip leaves such rows out and trains the wanted ones; "
            f"{_train_anyway_hint(required_columns)}",
        )
    rejected = next((key for key in REJECTED_COLUMNS if key in data and _is_answer(data[key])), None)
    if rejected is not None:
        remedy = "data.columns={prompt: prompt, completion: chosen}, or {messages: chosen} if it is a chat, trains it"
        raise UnusableRowError(
            PREFERENCE_REASON, f"{rejected} is there; {remedy}; {_train_anyway_hint(required_columns)}"
        )
    negative = next((key for key in NEGATIVE_COLUMNS if key in data and _is_passage(data[key])), None)
    if negative is not None:
        raise UnusableRowError(RETRIEVAL_REASON, f"{negative} is there; {_train_anyway_hint(required_columns)}")
    lists = {key: unpack_json(data.get(key), "[{") for key in CHOICE_COLUMNS}
    choices = next((key for key, value in lists.items() if isinstance(value, (list, dict)) and len(value) > 1), None)
    if choices is not None and not is_text and _is_choice_mark(data[required_columns[-1]], lists[choices]):
        raise UnusableRowError(
            CHOICE_REASON,
            f"{choices} is there; write the choices into the question; {_train_anyway_hint(required_columns)}",
        )


def _is_unwanted(tag: str, value: Any) -> bool:
    """Whether a tag says that the answer is one not to give: as a truth value, a number, or the text of one."""
    lowered = str(value).strip().lower()
    return lowered in ("true", "1", "1.0") if tag.removeprefix("is_").startswith("un") else lowered in _UNWANTED_WORDS


def _train_anyway_hint(required_columns: Sequence[str]) -> str:
    return f"to train every row anyway: data.columns={{{', '.join(f'{key}: {key}' for key in required_columns)}}}"


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in _FLAG_WORDS
    return isinstance(value, (list, dict)) and bool(value)


def _is_passage(value: Any) -> bool:
    if isinstance(value, str):
        value = unpack_json(value, "[")
    if isinstance(value, str):
        return len(value.split()) > 1
    return isinstance(value, list) and bool(value) and all(isinstance(item, (str, dict)) for item in value)


def _is_choice_mark(value: Any, choices: Any) -> bool:
    if isinstance(value, str):
        mark = value.strip().strip("().")
        return len(mark) == 1 and mark.isalnum() and not (isinstance(choices, list) and mark in choices)
    return isinstance(value, int) and not isinstance(value, bool)
