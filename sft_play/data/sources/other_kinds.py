"""Rows that are not supervised examples, named as what they are and by the column that shows it.

Preferences, unwanted answers, rankings, multiple choice and the like hold questions and answers under the same names as
supervised rows do. A key counts only with the kind of value that it has in such data, so that an innocent column of
that name stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.data.sources.messages import Unusable, shown, unpacked
from sft_play.log import one_line

TAGS = ("label", "kto_tag", "kto_label", "desirable", "is_desirable", "is_chosen", "undesirable", "is_undesirable")
"""Where rows of KTO say whether an answer is wanted."""
_UNWANTED = frozenset({"false", "0", "0.0", "undesirable", "unwanted", "rejected", "dispreferred"})
"""What they say of one that is not, as text; of a name with `un` the contrary."""
REJECTED = (
    *("rejected", "rejected_response", "response_rejected", "rejected_answer", "rejected_completion"),
    *("rejected_output", "rejected_messages", "rejected_conversations", "non_preferred_output", "dispreferred"),
)
NEGATIVES = ("negative", "negatives", "neg", "hard_negatives")
CHOICES = ("choices", "options")
TELLTALES = frozenset({*TAGS, *REJECTED, *NEGATIVES, *CHOICES})
"""Every row that `refuse_other_kind` refuses has at least one of these keys, so that others need no closer look."""

UNWANTED = "an answer that is not wanted (KTO)"
PREFERENCE = "preferences (a chosen and a rejected answer, as for DPO), which are not supervised examples"
RETRIEVAL = "pairs and negatives for retrieval or embeddings, which are not supervised examples"
CHOICE = "multiple choice, whose answer is a mark in a column that the prompt does not show"

_NO_ANSWERS = frozenset({"", "yes", "no", "true", "false", "none", "null", "nan", "n/a", "0", "1"})
"""What a flag of the name "rejected" holds."""


def refuse_other_kind(data: Mapping[str, Any], needs: Sequence[str], *, is_text: bool) -> None:
    """Raises Unusable where a row that has the columns `needs` of a format is data of another kind.

    `is_text`: the format is plain text, which may have any label beside it.
    """
    tag = next((key for key in TAGS if key in data and _says_unwanted(key, data[key])), None)
    if tag is not None and not is_text:
        raise Unusable(
            f"{tag} is {str(data[tag]).strip().lower()}: {UNWANTED}",
            f"data.on_bad_row=skip leaves such rows out and trains the wanted ones; {_all_the_same(needs)}",
        )
    rejected = next((key for key in REJECTED if key in data and _is_answer(data[key])), None)
    if rejected is not None:
        raise Unusable(PREFERENCE, f"{rejected} is there; {_train_chosen(data, needs)}")
    negative = next((key for key in NEGATIVES if key in data and _is_passage(data[key])), None)
    if negative is not None:
        raise Unusable(RETRIEVAL, f"{negative} is there; {_all_the_same(needs)}")
    lists = {key: unpacked(data.get(key), "[{") for key in CHOICES}
    choices = next((key for key, value in lists.items() if isinstance(value, (list, dict)) and len(value) > 1), None)
    if choices is not None and not is_text and _is_mark(data[needs[-1]], lists[choices]):
        raise Unusable(CHOICE, f"{choices} is there; write the choices into the question; {_all_the_same(needs)}")


def _says_unwanted(tag: str, value: Any) -> bool:
    """Whether a tag says that the answer is one not to give: as a truth value, a number, or the text of one."""
    said = str(value).strip().lower()
    return said in ("true", "1", "1.0") if tag.removeprefix("is_").startswith("un") else said in _UNWANTED


def _all_the_same(needs: Sequence[str]) -> str:
    return f"to train every row anyway: data.columns={{{', '.join(f'{key}: {key}' for key in needs)}}}"


def _train_chosen(data: Mapping[str, Any], needs: Sequence[str]) -> str:
    """How to train the chosen answers, where they can be found, or what the format would take."""
    if "chosen" not in data:
        return _all_the_same(needs)
    turns = next((key for key in ("messages", "conversations", "conversation") if key in data), None)
    asked = turns or next((key for key in ("prompt", "question", "instruction", "input") if key in data), None)
    chosen = unpacked(data["chosen"], "[{")
    if isinstance(chosen, list) and len(chosen) > 1:
        way = "data.columns={messages: chosen}"
    elif asked is not None:
        way = f"data.columns={{prompt: {asked}, completion: chosen}}"
    else:
        way = "move the question out of them into a column of its own"
    return f"to train the chosen answers: {way}" + (f"; {_all_the_same(needs)}" if turns in needs else "")


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() not in _NO_ANSWERS
    return isinstance(value, (list, dict)) and bool(value)


def _is_passage(value: Any) -> bool:
    """A text of several words, or a list of texts or of objects that hold one."""
    if isinstance(value, str):
        value = unpacked(value, "[")
    if isinstance(value, str):
        return len(value.split()) > 1
    return isinstance(value, list) and bool(value) and all(isinstance(item, (str, dict)) for item in value)


def _is_mark(value: Any, choices: Any) -> bool:
    """A number or letter that points at one of several; not one of them itself."""
    if isinstance(value, str):
        mark = value.strip().strip("().")
        return len(mark) == 1 and mark.isalnum() and not (isinstance(choices, list) and mark in choices)
    return isinstance(value, int) and not isinstance(value, bool)


# Rows of no known format.


_TWO_ANSWERS = (
    *(("conversation_a", "conversation_b"), ("response_a", "response_b"), ("response1", "response2")),
    *(("response_0", "response_1"), ("response_j", "response_k"), ("answer_a", "answer_b"), ("answer_0", "answer_1")),
    *(("output_1", "output_2"), ("human_ref_A", "human_ref_B"), ("completion_a", "completion_b")),
)
_LISTS_OF_ANSWERS = ("responses", "completions", "answers", "outputs", "candidates", "generations", "replies")
_QUESTIONS = ("prompt", "question", "query", "instruction", "problem", "input", "user", "human")
_RETRIEVAL_KEYS = (("anchor", "positive"), ("query", "pos"), ("query", "positive"), ("sentence1", "sentence2"))
_MAP_ONE = "data.columns names the answer to train, such as {prompt: prompt, completion: best_answer}"


def likely_kind(data: Mapping[str, Any]) -> str:
    """What rows of no known format look like, and what to do; "" where nothing is known."""
    likely = _likely(data)
    if likely is None:
        return ""
    what, columns, advice = likely
    return f"It looks like {what} ({', '.join(columns)}): {advice}. "


def _likely(data: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str] | None:
    rejected = next((key for key in REJECTED if key in data), None)
    if rejected is not None:
        return (
            "preferences, as for DPO",
            (rejected,),
            "not supervised examples; map the answer to train with data.columns",
        )
    pair = next((keys for keys in _TWO_ANSWERS if all(key in data for key in keys)), None)
    if pair is not None:
        return "comparisons of two answers", pair, f"not supervised examples; {_MAP_ONE}"
    if isinstance(data.get("labels"), list) and isinstance(data.get("completions"), list):
        steps = "not supervised examples; join the right steps into one completion"
        return "steps with labels, as for a process reward model", ("completions", "labels"), steps
    if "input_ids" in data:
        return "rows of tokens", ("input_ids",), "texts are needed, since masks are found by rendering them"
    retrieval = next((keys for keys in _RETRIEVAL_KEYS if all(key in data for key in keys)), None)
    if retrieval is not None:
        return "pairs for retrieval or embeddings", retrieval, "not supervised examples"
    choices = next((key for key in (*CHOICES, "endings") if isinstance(data.get(key), (list, dict))), None)
    if choices is not None:
        return "multiple choice", (choices,), "write the choices into a prompt and the right one as its completion"
    answers = next((key for key in _LISTS_OF_ANSWERS if isinstance(unpacked(data.get(key), "["), list)), None)
    if answers is not None:
        return "several answers to one prompt, as for a ranking", (answers,), f"choose one; {_MAP_ONE}"
    if "label" in data:
        label = one_line(shown(data["label"]), limit=30)
        return "classification", (f"label is {label}",), "write the label as the answer's text, and map both columns"
    asked = next((key for key in _QUESTIONS if isinstance(data.get(key), (str, list)) and data[key]), None)
    if asked is None:
        return None
    do = "prompts for reinforcement learning have none; where there is one, map it with data.columns"
    return "questions whose answer is in no known column", (asked,), do
