"""What a chat template does, seen by rendering probe conversations once; and messages in the form
that it takes.

In this order: what ends its turns (`TurnEnds`), the form of messages that it takes
(`FittedTemplate`), and the probes (`probe_template`). `TurnLocator` of `turns.py` begins here.
"""

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sft_play.data.masks.sandbox import EndlessTemplateError, RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.data.masks.token_row import TEMPLATE_REFUSES_ROW, InexactMaskError
from sft_play.data.sources.messages import (
    AUTHOR_MESSAGE,
    REASONING_KEYS,
    TEXT_KEYS,
    Message,
    drop_author_messages,
    map_texts,
)
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# `argument` is a text inside the arguments of a call, `arguments` all of them as one JSON text.
PieceKind = Literal["content", "reasoning", "name", "argument", "arguments"]

# Sentinels are ASCII letters and digits: nothing that a template strips, splits at or escapes.
SENTINEL_PREFIX = "zQ9x"


# Control tokens in rendered texts, and where an assistant's turn ends, told from texts alone: what
# follows it where it is the last turn, and where the conversation goes on.
#
# `probe_template` learns what ends the turns of a template; `turns.py` asks for the end of each
# turn of a row.

# Texts that look like control tokens, for templates whose tokens this tokenizer does not have.
_CONTROL_TOKEN = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>|\[/?[A-Z_]{2,20}\]"
    r"|</?[A-Za-z_][^<>\s]{0,40}>"
)
# Control tokens that do not look like HTML or XML tags.
NON_TAG_TOKEN = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>"
)
# What may be a tag of a markup language.
MARKUP_TAG = re.compile(r"(?!</s>)</?[A-Za-z_][^<>\s|]{0,40}>")
# Words in the names of control tokens that end something.
END_WORD = re.compile(r"end|eot|eos|eom|return|stop|sep\b|<turn\||^</s>$|\bcall\|>", re.IGNORECASE)


def control_tokens(text: str, special_tokens: Sequence[str]) -> list[str]:
    """Control tokens in a text, in order: the tokenizer's own, and what looks like one."""
    return [token for _, token in find_control_tokens(text, special_tokens)]


def find_control_tokens(text: str, special_tokens: Sequence[str]) -> list[tuple[int, str]]:
    """Find control tokens in a text, each with its offset, in order. Of tokens that overlap the
    first counts, of tokens that begin together the longest."""
    # Both kinds: a tokenizer may lack tokens of its template, and may have tokens that look like
    # words.
    matches = {(match.start(), match.group()) for match in _CONTROL_TOKEN.finditer(text)}
    for token in filter(text.__contains__, special_tokens):
        # by looking ahead: tokens may overlap, and the first one wins below
        places = re.finditer(f"(?={re.escape(token)})", text)
        matches.update((place.start(), token) for place in places)
    ordered: list[tuple[int, str]] = []
    covered_until = 0
    for offset, token in sorted(matches, key=lambda place: (place[0], -len(place[1]))):
        if offset >= covered_until:
            ordered.append((offset, token))
            covered_until = offset + len(token)
    return ordered


def common_prefix(first: str, second: str, special_tokens: Sequence[str]) -> str:
    """The common beginning of two texts, with no control token cut in two."""
    # `<|im_end|>` and `<|im_start|>` begin alike: the beginning that both texts have may end inside
    # a token
    size = common_prefix_chars(first, second)
    for text in (first, second):
        for offset, token in find_control_tokens(text, special_tokens):
            if offset < size < offset + len(token):
                size = offset
    return first[:size]


def common_prefix_chars(first: str, second: str) -> int:
    """Length of the common beginning."""
    if second.startswith(first):
        return len(first)
    # by halves: slices are compared by memcmp, far quicker than characters one by one in Python
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def format_first_difference(expected: str, text: str) -> str:
    """Where two texts part, and what the second has there, for a message."""
    offset = common_prefix_chars(expected, text)
    return (
        f"at character {offset + 1}:"
        f" {one_line(repr(text[max(0, offset - 20) : offset + 40]), limit=90)}"
    )


# Characters that may end a turn without a control token, such as `\n\n### End`: more is text of the
# template.
_MAX_WORDS_CHARS = 40


@dataclass(frozen=True)
class TurnEnd:
    """What ends a turn: `text` is what stands after its last piece, through its end."""

    text: str
    # It is the token that opens the next turn.
    opens_next_turn: bool = False
    # It holds no control token.
    is_text_only: bool = False


@dataclass(frozen=True)
class TurnEnds:
    """What ends an assistant's turn in one template; `special_tokens` and `eos_token` are the
    tokenizer's."""

    special_tokens: tuple[str, ...]
    eos_token: str | None
    # Tokens that open a turn, where the template writes the next one's header whether or not it is
    # asked to.
    turn_openers: frozenset[str] = frozenset()
    # Tokens that may close a turn once it is history, where another one closes the last turn.
    history_end_tokens: frozenset[str] = frozenset()
    # Texts that end an assistant turn, the usual one first; empty where the template writes
    # nothing.
    end_markers: tuple[str, ...] = ()
    # Those of them that open the next turn, where the template closes none.
    opener_end_markers: tuple[str, ...] = ()

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template
        writes nothing."""
        return next(iter(self.end_markers), "")

    @property
    def end_tokens(self) -> frozenset[str]:
        """The control tokens of all ends of turns."""
        return frozenset(
            token
            for marker in self.end_markers
            for token in control_tokens(marker, self.special_tokens)
        )

    def find_end(
        self,
        final_tail: str | None,
        continued_tail: str | None,
        *,
        is_last: bool,
        is_answer_text: bool,
    ) -> TurnEnd | None:
        """The end of a turn: the text after its last piece, through its end; None where it has no
        end. `final_tail` follows the piece in the conversation that stops with the turn (None: not
        found), `continued_tail` in the one that continues (None: cannot be rendered). `is_last`:
        the turn is the last of the row; `is_answer_text`: its last piece is an answer's text, not
        think text or a call."""
        # rendered otherwise as a last turn, so there is nothing to compare: only known ends count
        if final_tail is None:
            return self._first_known_end(continued_tail or "")
        # Where the two renderings part, the turn is over: the one goes on with the next turn's
        # header.
        shared = (
            final_tail
            if continued_tail is None
            else common_prefix(final_tail, continued_tail, self.special_tokens)
        )
        ends = self._possible_ends(shared, is_answer_text=is_answer_text)
        # A header that is always written is in both texts; it still belongs to the next turn.
        while ends and ends[-1][1] in self.turn_openers:
            shared = shared[: ends[-1][0]]
            ends = self._possible_ends(shared, is_answer_text=is_answer_text)
        if ends:
            return TurnEnd(shared[: self._end_offset(ends)])
        final_ends = self._possible_ends(final_tail, is_answer_text=is_answer_text)
        if not final_ends and continued_tail is not None:
            opener_end = self._opener_end(final_tail, continued_tail)
            if opener_end:
                return TurnEnd(continued_tail[:opener_end], opens_next_turn=True)
        if final_ends and is_last:
            return TurnEnd(final_tail[: self._end_offset(final_ends)])
        if continued_tail is not None and (final_ends or not is_answer_text):
            # as history the turn may be written otherwise (a call with its id), or be closed by
            # another token
            tokens = [
                token
                for _, token in self._possible_ends(continued_tail, is_answer_text=is_answer_text)[
                    :1
                ]
            ]
            end = self._first_known_end(
                continued_tail,
                *(
                    token
                    for token in tokens
                    if token in self.history_end_tokens or END_WORD.search(token)
                ),
            )
            return self._last_call_end(final_tail, end) if is_last else end
        words = shared.rstrip()
        # a call's own brackets and quotes are no end of it: behind a call only words that end turns
        # count
        is_end = (is_answer_text and 0 < len(words) <= _MAX_WORDS_CHARS) or words.endswith(
            self.end_markers or ("\0",)
        )
        return TurnEnd(words, is_text_only=True) if is_end else None

    def _last_call_end(self, tail: str, history_end: TurnEnd | None) -> TurnEnd | None:
        """Find the end of a last turn that calls a tool and that no control token ends: words that
        are known to end turns, or the token that opens the next turn in a longer conversation.
        `tail` is the text behind the call.
        """
        end = self._first_known_end(tail)
        opener = next(
            (
                text
                for text in self.opener_end_markers
                if history_end and history_end.text.endswith(text)
            ),
            "",
        )
        if end is not None or history_end is None or not opener:
            return end
        words = history_end.text.removesuffix(opener)
        return TurnEnd(tail.rstrip() + words[len(words.rstrip()) :] + opener, opens_next_turn=True)

    def _first_known_end(self, text: str, *extra_markers: str) -> TurnEnd | None:
        """The text through the first of the known ends in it, or of `extra_markers`; of several
        there the longest."""
        ends = [
            (text.find(end), -len(end))
            for end in (*self.end_markers, *extra_markers)
            if end in text
        ]
        if not ends:
            return None
        offset, negative_size = min(ends)
        end_text = text[: offset - negative_size]
        return TurnEnd(
            end_text, is_text_only=not self._possible_ends(end_text, is_answer_text=False)
        )

    def _possible_ends(self, text: str, *, is_answer_text: bool) -> list[tuple[int, str]]:
        """Places of control tokens that may end a turn. Tags such as `</tool_call>` open or close a
        part of one, unless they are tokens that end an answer."""
        known_markers = "".join(self.end_markers)

        def may_end(token: str) -> bool:
            if token == self.eos_token or not MARKUP_TAG.fullmatch(token):
                return True
            # such as Gemma's <end_of_turn>
            is_opening_end = token[1] != "/" and bool(END_WORD.search(token))
            return is_opening_end or (
                token in self.special_tokens and (is_answer_text or token in known_markers)
            )

        return [
            (offset, token)
            for offset, token in find_control_tokens(text, self.special_tokens)
            if may_end(token)
        ]

    def _end_offset(self, ends: Sequence[tuple[int, str]]) -> int:
        """Find the offset behind an end of turn: behind the first eos, at which generation stops,
        else behind the first place of the end's last token."""
        tokens = [token for _, token in ends]
        offset, token = ends[
            tokens.index(self.eos_token if self.eos_token in tokens else tokens[-1])
        ]
        return offset + len(token)

    def _opener_end(self, final_tail: str, continued_tail: str) -> int:
        """Find the offset behind the special token that opens the next turn right after this one; 0
        where there is none."""
        closed_tail = final_tail.rstrip()
        following_tokens = [
            place
            for place in find_control_tokens(continued_tail, self.special_tokens)
            if place[0] >= len(closed_tail)
        ]
        if not continued_tail.startswith(closed_tail) or not following_tokens:
            return 0
        offset, token = following_tokens[0]
        is_token = (
            token in self.special_tokens
            or NON_TAG_TOKEN.fullmatch(token)
            or (not closed_tail and token[1] != "/")
        )
        return (
            offset + len(token)
            if is_token and not continued_tail[len(closed_tail) : offset].strip()
            else 0
        )


# --------------------------------------------------------------------------------------------------
# Adapt messages to the form that a chat template takes: content, roles, tool calls.
#
# Templates differ in what they accept. Which form one writes correctly is seen by trying them: on
# probe conversations (`probe_template`), and for tool calls on the row itself.

# In a rendering: the template took a list of parts for the text, and wrote it with its keys.
PART_KEY = re.compile(r"""['"]type['"]""")

PROBE_EXCHANGE: list[Message] = [
    {"role": "user", "content": "question1q"},
    {"role": "assistant", "content": "answer1q"},
]
PROBE_SYSTEM: Message = {"role": "system", "content": "system1q"}
PROBE_NEXT_TURNS: list[Message] = [
    {"role": "user", "content": "question2q"},
    {"role": "assistant", "content": "answer2q"},
]
# Put behind a row of the data, whose own texts do not hold it.
NEXT_QUESTION: Message = {"role": "user", "content": "question9q"}
# A plain answer to a question of the data.
PLAIN_ANSWER: Message = {"role": "assistant", "content": "answer9q"}

# Arguments that come out changed if a template escapes, encodes twice, or writes Python in place of
# JSON.
PROBE_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
PROBE_CALL_TURNS: list[Message] = [
    {"role": "user", "content": "question1q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "call1q",
                "function": {"name": "look1q", "arguments": PROBE_ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "content": "result1q", "name": "look1q", "tool_call_id": "call1q"},
    {"role": "assistant", "content": "answer1q"},
]
PROBE_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where."}},
                "required": ["place"],
            },
        },
    }
]

ArgumentForm = Literal["object", "text"]
ARGUMENT_FORMS: tuple[ArgumentForm, ...] = ("object", "text")

_ENTITY = re.compile(r"&(?:[a-z]{2,6}|#\d{1,5}|#x[0-9A-Fa-f]{1,4});")


# Forms of messages, and what is changed in a row for its template.

NOTE_ROLE = (
    "a role is passed to the chat template under its usual name (system, user, assistant, tool)"
)
NOTE_PARTS = "content in parts is passed to the chat template as one text, which it takes"
NOTE_SHORT_IDS = (
    "ids of tool calls are passed to the chat template as nine letters and digits, which it"
    " requires"
)
# What is changed of the arguments of calls, by the form that the template writes correctly.
NOTE_TEXT_FOR_OBJECT = (
    "tool call arguments that are objects are passed to the chat template as JSON text, the form"
    " that it writes correctly"
)
NOTE_OBJECT_FOR_TEXT = (
    "tool call arguments that are JSON text are passed to the chat template as objects: it would"
    " encode text a second time or not write it"
)
_ARGUMENT_NOTES = {"text": NOTE_TEXT_FOR_OBJECT, "object": NOTE_OBJECT_FOR_TEXT}


@dataclass(frozen=True)
class CallForm:
    """What is changed in a row with tool calls, besides the form of their arguments, where the
    template refuses the row or drops its calls as they are."""

    # In a turn that only calls.
    content: Literal["own", "absent", "empty"] = "own"
    # Every call has a type.
    adds_type: bool = False
    # Ids are nine letters and digits.
    shortens_ids: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What is changed, in words. The form with the fewest changes is taken, so that each of
        them is one."""
        changes = (
            (
                (
                    "a turn that only calls tools is passed to the chat template with empty"
                    " content, or without content"
                ),
                self.content != "own",
            ),
            (
                (
                    "a tool call without a type is passed to the chat template with type: function,"
                    " which it requires"
                ),
                self.adds_type,
            ),
            (NOTE_SHORT_IDS, self.shortens_ids),
        )
        return tuple(note for note, is_made in changes if is_made)


# In the order in which they are tried: the first leaves the row as it is written.
CALL_FORMS = tuple(
    CallForm(content, typed, short_ids)
    for content in ("own", "empty", "absent")
    # fewest changes first
    for typed, short_ids in ((False, False), (True, False), (False, True), (True, True))
)


KNOWN_KEYS = frozenset(
    {"role", "tool_calls", "name", "tool_call_id", "call_id", "train", *TEXT_KEYS}
)


@dataclass(frozen=True)
class TemplateTraits:
    """What a template was seen to do with probe conversations."""

    # It takes content only as a list of parts.
    needs_content_parts: bool = False
    # It has to be given tools: a template for rows with tools may loop over them without a check.
    needs_tools: bool = False
    # The one form of a call's arguments that it writes correctly; `own` where it writes both or
    # neither.
    argument_form: ArgumentForm | Literal["own"] = "own"
    writes_system: bool = True
    # It writes tool calls.
    writes_calls: bool = False
    # What opens think text, what closes it, and the control tokens in both.
    think_marks: tuple[str, ...] = ()
    # What it writes behind a question as the prompt of an answer; empty where it writes no
    # generation prompt.
    generation_prompt: str = ""
    # What stands between a question and its answer where it writes no generation prompt, such as
    # the answer's role.
    answer_header: str = ""


class FittedTemplate:
    """A chat template with its probed `traits`, which adapts messages to the form that the template
    takes."""

    def __init__(self, chat_template: ChatTemplate, traits: TemplateTraits) -> None:
        self.chat_template, self.traits = chat_template, traits
        # Keys that a template may ask a message for by name.
        self._source_words = frozenset(re.findall(r"\w+", chat_template.source))
        self._accepted: dict[tuple[str, ...], bool] = {}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, with_prompt: bool = False
    ) -> str:
        """The conversation as the model sees it; `messages` are fitted ones. Raises RenderError."""
        # `train` is ours
        copies = [
            {key: value for key, value in message.items() if key != "train"} for message in messages
        ]
        for copy in copies:
            if self.traits.needs_content_parts and isinstance(copy.get("content"), str):
                copy["content"] = [{"type": "text", "text": copy["content"]}]
        return self.chat_template.render(copies, tools=tools, with_prompt=with_prompt)

    def has_only_think_marks(self, text: str) -> bool:
        """True if a text has only marks of think text and white space."""
        for mark in sorted(self.traits.think_marks, key=len, reverse=True):
            text = text.replace(mark, "")
        return not text.strip()

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Any], *, with_prompt: bool = False
    ) -> str:
        """The conversation as the model sees it; empty where the template refuses it."""
        try:
            return self.render(messages, tools, with_prompt=with_prompt)
        except RenderError:
            return ""

    def fit(
        self, messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> tuple[Sequence[Message], tuple[str, ...]]:
        """Adapt a conversation to the template: unchanged if its calls are written so, else as
        little as the template allows: arguments as objects or as text are the same JSON. Returns
        the messages, and what was changed, in words. Raises InexactMaskError if it refuses every
        form."""
        if any(AUTHOR_MESSAGE in message for message in messages):
            # What their author wrote, as far as the template takes it: roles, parts, and further
            # keys, unless the template has no name for them and the text is the same without them.
            notes: dict[str, None] = {}
            authored = [self._authored_message(message, notes) for message in messages]
            known_keys_only = [
                {
                    key: value
                    for key, value in message.items()
                    if key in KNOWN_KEYS or key in self._source_words
                }
                for message in authored
            ]
            if known_keys_only == authored or self.try_render(
                known_keys_only, tools
            ) == self.try_render(authored, tools):
                authored = known_keys_only
            fitted_messages, fit_notes = self.fit(authored, tools)
            if not notes and not fit_notes:
                originals = [message.get(AUTHOR_MESSAGE, message) for message in messages]
                # calls in a form of their own are noted where rows are read
                has_same_calls = all(
                    (original.get("tool_calls") or None) == message.get("tool_calls")
                    for original, message in zip(originals, messages, strict=True)
                )
                original_text, text = (
                    self.try_render(originals, tools),
                    self.try_render(fitted_messages, tools),
                )
                if has_same_calls and original_text and original_text != text:
                    raise InexactMaskError(
                        "the row is not rendered as apply_chat_template renders its messages",
                        format_first_difference(original_text, text),
                    )
            return fitted_messages, (*notes, *fit_notes)
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return messages, ()
        converted = convert_arguments(messages, self.traits.argument_form)
        argument_notes: tuple[str, ...] = ()
        if converted != [*messages]:
            argument_notes = (_ARGUMENT_NOTES[self.traits.argument_form],)
        accepted_candidates: list[tuple[Sequence[Message], tuple[str, ...]]] = []
        refusal = ""
        # The first form whose calls are all written; a template may take a form and drop the calls
        # without a word.
        for form in CALL_FORMS:
            candidate = apply_call_form(converted, form)
            try:
                if self._writes_names(candidate, tools):
                    return candidate, (*argument_notes, *form.notes)
                accepted_candidates.append((candidate, (*argument_notes, *form.notes)))
            except EndlessTemplateError as error:
                refusal = str(error)
                break  # each further form would take as long
            except RenderError as error:
                refusal = str(error)
        if not accepted_candidates:
            raise InexactMaskError(TEMPLATE_REFUSES_ROW, refusal)
        return accepted_candidates[0]

    def _writes_names(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        count = itertools.count()

        def mark(text: str, index: int, kind: PieceKind) -> str:
            return f"{text}{SENTINEL_PREFIX}{next(count)}q" if kind == "name" else text

        text = self.render([map_message_texts(message, 0, mark) for message in messages], tools)
        return all(f"{SENTINEL_PREFIX}{call_number}q" in text for call_number in range(next(count)))

    def _authored_message(self, message: Message, notes: dict[str, None]) -> Message:
        """A message with its author's role, content and keys; what cannot be kept is noted."""
        original = message.get(AUTHOR_MESSAGE, message)
        authored = drop_author_messages([message])[0]
        if original["role"] != authored["role"]:
            if authored["role"] == "system" and self._accepts(original["role"]):
                authored["role"] = original["role"]
            else:
                notes[NOTE_ROLE] = None
        if not isinstance(original.get("content"), (str, type(None))):
            kinds = content_part_kinds(original["content"])
            if kinds and self._accepts(authored["role"], *kinds):
                authored["content"] = original["content"]
                if not any(original.get(key) for key in REASONING_KEYS):
                    authored.pop("reasoning_content", None)
            else:
                notes[NOTE_PARTS] = None
        # the same think text or calls under another of their names must not be given twice
        covered_keys = {*authored}
        if "reasoning_content" in authored:
            covered_keys.update(REASONING_KEYS)
        if authored.get("tool_calls"):
            covered_keys.update(("tool_calls", "function_call"))
        return authored | {
            key: value
            for key, value in original.items()
            if key not in covered_keys and value is not None
        }

    def _accepts(self, role: str, *kinds: str) -> bool:
        key = (role, *kinds)
        if key not in self._accepted:
            words = [f"part{index}q" for index in range(len(kinds))] or ["part0q"]
            parts = [{"type": kind, kind: word} for kind, word in zip(kinds, words, strict=False)]
            message = {"role": role, "content": parts or words[0]}
            question, reply = PROBE_EXCHANGE
            earlier_turns: list[Message] = {
                "assistant": [question],
                "tool": [*PROBE_CALL_TURNS[:2]],
            }.get(role, [])
            later_turns: list[Message] = {"assistant": [], "tool": [], "user": [reply]}.get(
                role, [*PROBE_EXCHANGE]
            )
            turns = [
                *earlier_turns,
                {**PROBE_CALL_TURNS[2], **message} if role == "tool" else message,
                *later_turns,
            ]
            with contextlib.suppress(RenderError, InexactMaskError):
                text = self.render(self.fit(turns)[0])
                self._accepted[key] = all(word in text for word in words) and not PART_KEY.search(
                    text
                )
        return self._accepted.setdefault(key, False)

    def find_added_entity(self, text: str, row: Any = ()) -> str:
        """The first HTML entity of a text that comes from neither the template's source nor the
        row; else empty."""
        for entity in dict.fromkeys(_ENTITY.findall(text)):
            if entity not in self.chat_template.source and entity not in json.dumps(
                row, ensure_ascii=False, default=str
            ):
                return str(entity)
        return ""


def content_part_kinds(content: Any) -> list[str]:
    """The types of a list of parts that are text or think text; empty for anything else."""
    kinds: list[str] = []
    for part in content if isinstance(content, list) else ():
        # `{"type": "text", "text": …}`, or `{"type": "thinking", "thinking": …}`: the text is under
        # the type's own name
        if (
            not isinstance(part, dict)
            or part.get("type") not in ("text", "thinking", "reasoning")
            or not isinstance(part.get(part["type"]), str)
        ):
            return []
        kinds.append(part["type"])
    return kinds


def map_message_texts(
    message: Message, index: int, change: Callable[[str, int, PieceKind], str]
) -> Message:
    """A copy of the message with every text changed, think text before content, calls last."""
    copy = dict(message)
    for key in TEXT_KEYS:
        if isinstance(copy.get(key), str):
            copy[key] = change(copy[key], index, "content" if key == "content" else "reasoning")
    if isinstance(copy.get("content"), list):
        kinds: dict[str, PieceKind] = {
            "text": "content",
            **dict.fromkeys(REASONING_KEYS, "reasoning"),
        }
        copy["content"] = [
            {
                key: (
                    change(value, index, kinds[key])
                    if key in kinds and isinstance(value, str)
                    else value
                )
                for key, value in part.items()
            }
            for part in copy["content"]
        ]

    def change_function(function: dict[str, Any]) -> dict[str, Any]:
        name, arguments = change(function["name"], index, "name"), function["arguments"]
        arguments = (
            change(arguments, index, "arguments")
            if isinstance(arguments, str)
            else map_texts(arguments, lambda text: change(text, index, "argument"))
        )
        return {**function, "name": name, "arguments": arguments}

    return _map_functions(copy, change_function)


def _map_functions(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """A copy of the message with the function of every call changed."""
    copy = dict(message)
    if copy.get("tool_calls"):
        copy["tool_calls"] = [
            {**call, "function": change(call["function"])} for call in copy["tool_calls"]
        ]
    return copy


def apply_call_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with their calls in a form."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        if copy.get("tool_calls"):
            copy["tool_calls"] = [dict(call) for call in copy["tool_calls"]]
            for call in copy["tool_calls"]:
                if form.adds_type and not call.get("type"):
                    call["type"] = "function"
                if form.shortens_ids:
                    call["id"] = _short_id(str(call.get("id") or call["function"]["name"]))
            # some templates refuse null, others write it as "None", and some test whether the key
            # is there
            if form.content != "own" and not copy.get("content"):
                copy["content"] = "" if form.content == "empty" else None
        for key in ("tool_call_id", "call_id") if form.shortens_ids else ():
            if isinstance(copy.get(key), str):
                copy[key] = _short_id(copy[key])
    return copies


def convert_arguments(
    messages: Sequence[Message], form: ArgumentForm | Literal["own"]
) -> list[Message]:
    """The messages with the arguments of all calls as objects or as JSON text; `own`: as they
    are."""

    def convert(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if form == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif form == "object" and isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**function, "arguments": arguments}

    return [_map_functions(message, convert) for message in messages]


def _short_id(call_id: str) -> str:
    # Mistral's templates refuse any other id: "Tool call IDs should be alphanumeric strings with
    # length 9!"
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


# --------------------------------------------------------------------------------------------------
# What a template does, seen by rendering probe conversations once for each template.
#
# A template is never recognised by its name: forks change templates and keep the names.


def probe_template(
    chat_template: ChatTemplate,
    *,
    special_tokens: Sequence[str],
    eos_token: str | None,
    with_tools: bool,
) -> tuple[FittedTemplate, TurnEnds]:
    """The template with the traits that were seen, and what ends its assistant turns; raises
    TokenizerError where it cannot render a question and an answer, or drops the answer."""
    # What renders at all comes first: the other steps render so.
    traits = _probe_content(chat_template, with_tools=with_tools)
    template = FittedTemplate(chat_template, traits)
    writes_calls, argument_form = _probe_calls(template)
    ends = TurnEnds(tuple(token for token in special_tokens if token), eos_token)
    think_marks = _probe_think_marks(template, ends)
    generation_prompt, answer_header = _probe_headers(template, ends.special_tokens, think_marks)
    traits = replace(
        traits,
        argument_form=argument_form,
        writes_system="system1q" in _render(template, [PROBE_SYSTEM, *PROBE_EXCHANGE]),
        writes_calls=writes_calls,
        think_marks=think_marks,
        generation_prompt=generation_prompt,
        answer_header=answer_header,
    )
    template = FittedTemplate(chat_template, traits)
    return template, _probe_turn_ends(template, ends)


# Empty where the template refuses the conversation.
def _render(
    template: FittedTemplate, messages: Sequence[Message], *, with_prompt: bool = False
) -> str:
    return template.try_render(
        messages, PROBE_TOOLS if template.traits.needs_tools else (), with_prompt=with_prompt
    )


def _probe_content(chat_template: ChatTemplate, *, with_tools: bool) -> TemplateTraits:
    problem, failure = "", "drops"
    for needs_tools, needs_content_parts in itertools.product(
        (with_tools, not with_tools), (False, True)
    ):
        traits = TemplateTraits(needs_content_parts=needs_content_parts, needs_tools=needs_tools)
        try:
            text = FittedTemplate(chat_template, traits).render(
                PROBE_EXCHANGE, PROBE_TOOLS if needs_tools else ()
            )
        except EndlessTemplateError as error:
            raise TokenizerError(
                f"the chat template cannot render a question and an answer: {error}"
            ) from error
        except RenderError as error:
            problem = problem or str(error)
            continue
        if "answer1q" in text and not (needs_content_parts and PART_KEY.search(text)):
            return traits
        if not needs_content_parts and "answer1q" in text.casefold():
            failure = "rewrites"
    if problem:
        raise TokenizerError(f"the chat template cannot render a question and an answer: {problem}")
    raise TokenizerError(
        f"the chat template {failure} an assistant's answer; set data.chat_template to another one"
    )


# What becomes of tool calls, think text, a system prompt and headers


def _probe_calls(template: FittedTemplate) -> tuple[bool, ArgumentForm | Literal["own"]]:
    # The whole exchange first; some templates refuse a tool's result, or to be given tools.
    with contextlib.suppress(EndlessTemplateError):
        for turns, tools in (
            (PROBE_CALL_TURNS, PROBE_TOOLS),
            (PROBE_CALL_TURNS[:2], PROBE_TOOLS),
            (PROBE_CALL_TURNS[:2], ()),
        ):
            call_texts = {
                form: _render_calls(template, turns, tools, form) for form in ARGUMENT_FORMS
            }
            if any(call_texts.values()):
                correct_forms = [
                    form
                    for form, text in call_texts.items()
                    if _are_arguments_intact(template, text, form)
                ]
                return turns is PROBE_CALL_TURNS, (
                    correct_forms[0] if len(correct_forms) == 1 else "own"
                )
    return False, "own"


def _render_calls(
    template: FittedTemplate,
    turns: Sequence[Message],
    tools: Sequence[Any],
    argument_form: ArgumentForm,
) -> str:
    converted = convert_arguments(turns, argument_form)
    for form in CALL_FORMS:
        try:
            text = template.render(apply_call_form(converted, form), tools)
        except EndlessTemplateError:
            raise
        except RenderError:
            continue
        call_text = text.split("question1q")[-1]  # the tools before it hold words of the calls too
        expected_words = ("look1q", "where1q", *(str(message["content"]) for message in turns[2:]))
        if all(word in call_text for word in expected_words):
            return call_text
    return ""


def _are_arguments_intact(template: FittedTemplate, call_text: str, form: ArgumentForm) -> bool:
    """True if the probe's arguments are encoded once and not escaped: written as their JSON, or
    each value as it is."""
    if template.find_added_entity(call_text):
        return False
    if form == "text":
        return json.dumps(PROBE_ARGUMENTS, ensure_ascii=False) in call_text
    if all(value in call_text for value in PROBE_ARGUMENTS.values()):
        return True
    for brace in re.finditer(r"\{", call_text):
        with contextlib.suppress(ValueError):
            if json.JSONDecoder().raw_decode(call_text, brace.start())[0] == PROBE_ARGUMENTS:
                return True
    return False


def _probe_think_marks(template: FittedTemplate, ends: TurnEnds) -> tuple[str, ...]:
    """What opens think text, what closes it, and the control tokens in both; empty where there are
    no such marks."""
    question, answer = PROBE_EXCHANGE
    think_forms = (
        {"reasoning_content": "thought1q"},
        {"content": f"<think>\nthought1q\n</think>\n\n{answer['content']}"},
    )
    for form in think_forms:
        text = _render(template, [question, {**answer, **form}])
        question_text, prompt = (
            _render(template, [question], with_prompt=with_prompt) for with_prompt in (False, True)
        )
        text_before, has_think, text_after = text.partition("thought1q")
        closing, has_answer, _ = text_after.partition("answer1q")
        if has_think and has_answer and question_text and prompt:
            mark_start = next(
                reversed(find_control_tokens(text_before, ends.special_tokens)),
                (len(text_before), ""),
            )[0]
            marks = (text_before[mark_start:].strip(), closing.strip())
            # what opens the turn itself is no mark
            header = next(
                iter(control_tokens(prompt.removeprefix(question_text), ends.special_tokens)), "\0"
            )
            if all(mark and mark not in question_text and header not in mark for mark in marks):
                return tuple(
                    dict.fromkeys((*marks, *control_tokens(" ".join(marks), ends.special_tokens)))
                )
    return ()


def _probe_headers(
    template: FittedTemplate, special_tokens: Sequence[str], think_marks: Sequence[str]
) -> tuple[str, str]:
    """The generation prompt behind a question; and where there is none, what stands before the
    answer all the same."""
    question, prompt = (
        _render(template, PROBE_EXCHANGE[:1], with_prompt=with_prompt)
        for with_prompt in (False, True)
    )
    if prompt != question:
        is_added = bool(question) and prompt.startswith(question)
        return prompt.removeprefix(question) if is_added else "", ""
    text_before, _, text_after = _render(template, PROBE_EXCHANGE).partition("answer1q")
    header = text_before.removeprefix(question)
    # many templates write the answer's header in any case: then more than an end of turn stands
    # behind the question
    answer_end = next(iter(control_tokens(text_after, special_tokens)), "")
    after_question = control_tokens(question.rpartition("question1q")[2], special_tokens)
    has_header = any(token != answer_end and not END_WORD.search(token) for token in after_question)
    if has_header or header == text_before:
        return "", ""
    # an empty think block behind it is no part of the header
    for mark in think_marks[:2]:
        header = header.partition(mark)[0]
    return "", header if header.strip() else ""


# Ends of turns


def _probe_turn_ends(template: FittedTemplate, ends: TurnEnds) -> TurnEnds:
    exchange_text = _render(template, PROBE_EXCHANGE)
    final_tail = exchange_text.rpartition("answer1q")[2]
    # a template for a single exchange refuses it
    continuation = _render(template, [*PROBE_EXCHANGE, *PROBE_NEXT_TURNS]).partition("answer1q")[2]
    continued_tail = (
        continuation.partition("question2q")[0] if "question2q" in continuation else None
    )
    # What closes the question may close an answer too, once it is history.
    after_question = exchange_text.partition("question1q")[2].partition("answer1q")[0]
    question_end = next(iter(control_tokens(after_question, ends.special_tokens)), "")
    history_end_tokens = frozenset({question_end, ends.eos_token or ""} - {""})
    ends = replace(
        ends,
        turn_openers=_probe_turn_openers(template, ends),
        history_end_tokens=history_end_tokens,
    )
    end_texts: list[tuple[str, bool]] = []
    for is_last in (True, False):
        end = ends.find_end(final_tail, continued_tail, is_last=is_last, is_answer_text=True)
        if end is not None:
            end_texts.append((end.text.strip(), end.opens_next_turn))
    # An end of calls counts only where it is none of these.
    ends = replace(ends, end_markers=tuple(dict.fromkeys(text for text, _ in end_texts if text)))
    if template.traits.writes_calls:
        # The last token of a calling turn's end where it is none of the known ends (gpt-oss:
        # `<|call|>`).
        with contextlib.suppress(RenderError, InexactMaskError):
            call_text, history_text = (
                template.render(template.fit(turns, PROBE_TOOLS)[0], PROBE_TOOLS)
                for turns in (PROBE_CALL_TURNS[:2], PROBE_CALL_TURNS)
            )
            text_before, result, _ = history_text.rpartition("result1q")
            history_tail = text_before.rpartition("where1q")[2] if result else None
            for is_last in (True, False):
                end = ends.find_end(
                    call_text.rpartition("where1q")[2],
                    history_tail,
                    is_last=is_last,
                    is_answer_text=False,
                )
                if end is not None and not end.is_text_only:
                    # The last token alone: what stands before it closes the call (`</tool_call>`),
                    # not the turn.
                    token = control_tokens(end.text, ends.special_tokens)[-1]
                    if not any(marker.endswith(token) for marker in ends.end_markers):
                        end_texts.append((token, end.opens_next_turn))
    return replace(
        ends,
        end_markers=tuple(dict.fromkeys(text for text, _ in end_texts if text)),
        opener_end_markers=tuple(
            dict.fromkeys(text for text, opens_next_turn in end_texts if opens_next_turn)
        ),
    )


def _probe_turn_openers(template: FittedTemplate, ends: TurnEnds) -> frozenset[str]:
    """Tokens that open a turn, where the template writes the next one's header whether or not it is
    asked to."""
    if _render(template, PROBE_EXCHANGE[:1]) != _render(
        template, PROBE_EXCHANGE[:1], with_prompt=True
    ):
        return frozenset()  # it waits for add_generation_prompt, as nearly all do
    turns = [PROBE_SYSTEM, *PROBE_EXCHANGE]
    beginning = _render(template, turns) or _render(template, PROBE_EXCHANGE)
    first_text = "system1q" if "system1q" in beginning else "question1q"
    opening = beginning[: max(0, beginning.find(first_text))]
    return frozenset(control_tokens(opening, ends.special_tokens)) - {ends.eos_token or ""}
