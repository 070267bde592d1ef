"""Where the turns of a conversation stand in its rendered text, measured on the template and verified on every row.

A template is probed, never recognised by its name. Two kinds of renderings show everything:

- The conversation up to a turn, with the generation prompt: what an answer would be generated after. The turn's
  trained span begins where this prompt ends, provided that the whole text begins with it.
- A marked copy: a sentinel before and after every piece of text in the row. Sentinels stand inside the white space at
  a text's ends and around texts that the template itself looks for (`</think>`), so that the template treats the copy
  as it treats the row. The copy shows what the template writes between the pieces, and what it strips, drops, escapes
  or moves. Without its sentinels it must be the row's own text, character by character; else nothing is trained.

A second copy has other sentinels and must be the same in everything else. So nothing that a template took out of a
text, such as its first letter, passes for the template's own words.

A turn's end is what stands after its text whatever follows. The conversation that stops there and the one that
continues are compared, and the end is the last control token that both have. Where they have none, the special token
that opens the next turn ends this one (GLM: `<|user|>`, after calls `<|observation|>`); after a last turn it is added.

What a template writes between the pieces is the same for all rows of one shape (roles, white space at the ends), as
long as no text holds anything that the template looks for. So plain rows are checked against the copy of their shape:
one rendering and one comparison per row. All other rows get a copy each; so do the rows of a shape where the template
looks at more of a text (its length, its first letter, a word), which is watched while the copy is rendered.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sft_play.data.masks.control_tokens import (
    NO_TAG,
    SAYS_END,
    TAG,
    common_length,
    control_token_places,
    control_tokens,
    shared_beginning,
)
from sft_play.data.masks.marked_copy import (
    NOWHERE,
    OTHER_SALT,
    SALT,
    SENTINEL_CHARS,
    Piece,
    Place,
    Places,
    Skeleton,
    Turn,
    pieces_of_text,
    splitter,
    take_apart,
    text_after,
    with_first_sentinels,
    with_other_sentinels,
)
from sft_play.data.masks.message_forms import (
    ARGUMENT_FORMS,
    CALL_FORMS,
    CALL_KEYS,
    KNOWN_KEYS,
    NOTE_PARTS,
    NOTE_ROLE,
    ArgumentForm,
    Fitted,
    Kind,
    adapted,
    in_form,
    kinds_of_parts,
    mapped,
    with_arguments_as,
    with_notes,
)
from sft_play.data.masks.template import ChatTemplate, Endless, Message, RenderError
from sft_play.data.masks.template_limits import Span
from sft_play.data.sources.messages import GIVEN, REASONING_KEYS, without_given
from sft_play.errors import TokenizerError
from sft_play.log import one_line

Method = Literal["generation", "prefix", "marker", "next_turn", "last_turn", "all", "document", "inexact"]
"""How the trained spans of a row were found; see docs/masks.md.

generation: the template's own `{% generation %}` marks, which agree with the turns that were found; prefix: start and
end of every turn are those of the rendered conversation up to it; marker: the start is, the end is that of the
end-of-turn marker, because the template renders a turn differently once it is history; next_turn: the token that opens
the next turn ends this one; last_turn: only some turns are exact; all: every token; document: plain text; inexact: the
best guess (data.on_inexact_mask=train)."""

_MAX_PIECES = 90_000
REFUSED = "the chat template refuses the row"
OTHER_PROMPT = "the generation prompt does not match how the chat template writes the turn"


class Inexact(ValueError):
    """A mask that cannot be found exactly: the reason rows are counted by, and the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Habits:
    """What a template was seen to do with probe conversations."""

    parts: bool = False
    """It takes content only as a list of parts."""
    tools: bool = False
    """It has to be given tools: a template for rows with tools may loop over them without a check."""
    arguments: ArgumentForm | Literal["own"] = "own"
    """The one form of a call's arguments that it writes correctly; `own` where it writes both or neither."""
    system: Literal["written", "dropped", "refused"] = "written"
    calls: bool = False
    """It writes tool calls."""
    markers: tuple[str, ...] = ()
    """Texts that end an assistant turn, the usual one first; empty where it writes nothing."""
    next_openers: tuple[str, ...] = ()
    """Those of them that open the next turn, where the template closes none."""


@dataclass(frozen=True)
class LocatedTurns:
    """A conversation as text with the exact spans of its assistant turns, by message index."""

    text: str
    spans: dict[int, Span]
    inexact: dict[int, Turn]
    nearest: dict[int, Span]
    method: Method
    stripped: int = 0
    """Pieces of think text that the template does not write."""
    added: str = ""
    """The end of `text` that the template does not write: what ends its last turn."""


class Turns:
    """Finds the turns of conversations rendered by one template.

    `with_tools` says that it is for rows with tools alone, so that it is probed with some.

    Raises:
        TokenizerError: the template cannot render a question and an answer, or drops the answer.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        special_tokens: Sequence[str],
        eos_token: str | None,
        with_tools: bool = False,
    ) -> None:
        self.template = template
        self.with_tools = with_tools
        self._special = tuple(token for token in special_tokens if token)
        self._eos = eos_token
        self._split = splitter(template.tested)
        self._asked = splitter(template.tested | {SALT, OTHER_SALT})
        self._shapes: dict[Any, Skeleton | None] = {}
        self._taken: dict[tuple[str, ...], bool] = {}
        self._names = frozenset(re.findall(r"\w+", template.source))
        self._openers: frozenset[str] = frozenset()
        self._history_ends: frozenset[str] = frozenset()
        self.habits = Habits()
        # Each step probes the template with the habits that the steps before it have seen.
        self._learn_content()
        self._learn_calls()
        self._learn_system()
        self._learn_ends()

    # What the template does.

    def _learn_content(self) -> None:
        """Whether it takes content as text or in parts, with tools or without: the first that writes an answer."""
        problem, does = "", "drops"
        for tools, parts in itertools.product((self.with_tools, not self.with_tools), (False, True)):
            self.habits = Habits(parts=parts, tools=tools)
            try:
                text = self._probe(_PLAIN)
            except Endless as error:
                raise TokenizerError(f"the chat template cannot render a question and an answer: {error}") from error
            except RenderError as error:
                problem = problem or str(error)
                continue
            if "answer1q" in text and not (parts and _PART_KEY.search(text)):
                return
            if not parts and "answer1q" in text.casefold():
                does = "rewrites"
        if problem:
            raise TokenizerError(f"the chat template cannot render a question and an answer: {problem}")
        raise TokenizerError(f"the chat template {does} an assistant's answer; set data.chat_template to another one")

    def _learn_calls(self) -> None:
        """Whether it writes tool calls, and the arguments correctly as objects, as text, or as both."""
        with contextlib.suppress(Endless):
            for turns, tools in ((_CALLING, PROBE_TOOLS), (_CALLING[:2], PROBE_TOOLS), (_CALLING[:2], ())):
                written = {kind: self._written_calls(turns, tools, kind) for kind in ARGUMENT_FORMS}
                if any(written.values()):
                    right = [kind for kind, text in written.items() if self._are_right(text, kind)]
                    arguments = right[0] if len(right) == 1 else "own"
                    self.habits = replace(self.habits, calls=turns is _CALLING, arguments=arguments)
                    return

    def _written_calls(self, turns: Sequence[Message], tools: Sequence[Any], kind: ArgumentForm) -> str:
        """What the template writes for a probe's calls, in the first form in which it writes them; else empty."""
        given = with_arguments_as(turns, kind)
        for form in CALL_FORMS:
            try:
                text = self.rendered(in_form(given, form), tools)
            except Endless:
                raise
            except RenderError:
                continue
            written = text.split("question1q")[-1]
            words = ("look1q", "where1q", *(str(message["content"]) for message in turns[2:]))
            if all(word in written for word in words):
                return written
        return ""

    def _are_right(self, written: str, kind: ArgumentForm) -> bool:
        """Whether the probe's arguments are encoded once and not escaped: written as their JSON, or with `object` each
        value as it is, for templates that do not write calls as JSON."""
        if self._entity(written):
            return False
        if kind == "text":
            return json.dumps(_ODD_ARGUMENTS, ensure_ascii=False) in written
        if all(value in written for value in _ODD_ARGUMENTS.values()):
            return True
        for brace in re.finditer(r"\{", written):
            with contextlib.suppress(ValueError):
                if json.JSONDecoder().raw_decode(written, brace.start())[0] == _ODD_ARGUMENTS:
                    return True
        return False

    def _entity(self, text: str, row: Any = ()) -> str:
        """The first HTML entity of a text that comes from neither the template's source nor the row; else empty."""
        for entity in dict.fromkeys(_ENTITY.findall(text)):
            if entity not in self.template.source and entity not in json.dumps(row, ensure_ascii=False, default=str):
                return str(entity)
        return ""

    def _learn_system(self) -> None:
        system: Literal["written", "dropped", "refused"]
        try:
            system = "written" if "system1q" in self._probe([_SYSTEM, *_PLAIN]) else "dropped"
        except RenderError:
            system = "refused"
        self.habits = replace(self.habits, system=system)

    def _learn_ends(self) -> None:
        """What ends a last turn, a turn that is history, and a turn that calls."""
        self._openers = self._learn_openers()
        last = self._probe(_PLAIN)
        own = last.rpartition("answer1q")[2]
        try:
            whole = self._probe([*_PLAIN, {"role": "user", "content": "question2q"}, _ANSWER])
            after = whole.partition("answer1q")[2]
            following = after.partition("question2q")[0] if "question2q" in after else None
        except RenderError:
            following = None
        behind_question = last.partition("question1q")[2].partition("answer1q")[0]
        user_end = next(iter(control_tokens(behind_question, self._special)), "")
        self._history_ends = frozenset({user_end, self._eos or ""} - {""})
        ends: list[tuple[str, bool]] = []
        for is_last in (True, False):
            end = self._end_of(own, following, is_last=is_last, is_text=True)
            if end is not None:
                ends.append((end.text.strip(), end.by_next))
        # an end of calls counts only where it is none of these
        self.habits = replace(self.habits, markers=tuple(dict.fromkeys(text for text, _ in ends if text)))
        if self.habits.calls:
            ends += self._learn_call_ends()
        self.habits = replace(
            self.habits,
            markers=tuple(dict.fromkeys(text for text, _ in ends if text)),
            next_openers=tuple(dict.fromkeys(text for text, by_next in ends if by_next)),
        )

    def _learn_call_ends(self) -> Iterator[tuple[str, bool]]:
        """The last token of a calling turn's end, where it is none of the known ends."""
        try:
            last, whole = (
                self.rendered(self.fitted(turns, PROBE_TOOLS).messages, PROBE_TOOLS)
                for turns in (_CALLING[:2], _CALLING)
            )
        except (RenderError, Inexact):
            return
        own = last.rpartition("where1q")[2]
        before, result, _ = whole.rpartition("result1q")
        following = before.rpartition("where1q")[2] if result else None
        for is_last in (True, False):
            end = self._end_of(own, following, is_last=is_last, is_text=False)
            if end is not None and not end.is_words:
                last = control_tokens(end.text, self._special)[-1]
                if not any(marker.endswith(last) for marker in self.habits.markers):
                    yield last, end.by_next

    def _learn_openers(self) -> frozenset[str]:
        """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
        try:
            question = self._probe(_PLAIN[:1])
            if question != self._probe(_PLAIN[:1], prompt=True):
                return frozenset()
            first = self._probe([_SYSTEM, *_PLAIN])
        except RenderError:
            first = self._probe(_PLAIN)
        place = first.find("system1q") if "system1q" in first else first.find("question1q")
        return frozenset(control_tokens(first[: max(0, place)], self._special)) - {self._eos or ""}

    def _end_of(self, own: str | None, following: str | None, *, is_last: bool, is_text: bool) -> _End | None:
        """The end of a turn: the text after its last piece, through its end; None where it has no end.

        `own` is what follows the piece in the conversation that stops with the turn (None: not found there),
        `following` in the one that continues (None: it cannot be rendered). `is_last`: the turn is the last one of the
        row; `is_text`: its last piece is an answer's text, not think text or a call.
        """
        if own is None:  # the first known end that follows; of those that begin together the longest
            text = following or ""
            known = [(text.find(marker), -len(marker)) for marker in self.habits.markers if marker in text]
            return _End(text[: min(known)[0] - min(known)[1]]) if known else None
        shared = own if following is None else shared_beginning(own, following, self._special)
        ends = self._possible_ends(shared, is_text=is_text)
        while ends and ends[-1][1] in self._openers:
            shared = shared[: ends[-1][0]]
            ends = self._possible_ends(shared, is_text=is_text)
        if ends:
            return _End(shared[: self._through(ends)])
        own_ends = self._possible_ends(own, is_text=is_text)
        if not own_ends and following is not None:
            opener = self._opener_end(own, following)
            if opener:
                return _End(following[:opener], by_next=True)
        if own_ends and is_last:
            return _End(own[: self._through(own_ends)])
        if own_ends and following is not None:
            # as history the turn may be closed by another token than where it is the last one
            at, token = next(iter(control_token_places(following, self._special)), (0, ""))
            if token and (token in self._history_ends or SAYS_END.search(token)):
                return _End(following[: at + len(token)])
        words = shared.rstrip()
        is_end = 0 < len(words) <= _LONGEST_MARKER or words.endswith(self.habits.markers or ("\0",))
        return _End(words, is_words=True) if is_end else None

    def _possible_ends(self, text: str, *, is_text: bool) -> list[tuple[int, str]]:
        """Places of control tokens that may end a turn. Tags such as `</tool_call>` open or close a part of one, unless
        they are tokens that end an answer."""
        known = "".join(self.habits.markers) if not is_text else ""

        def may_end(token: str) -> bool:
            if token == self._eos or not TAG.fullmatch(token):
                return True
            is_opening_end = token[1] != "/" and bool(SAYS_END.search(token))
            return is_opening_end or (token in self._special and (is_text or token in known))

        return [(at, token) for at, token in control_token_places(text, self._special) if may_end(token)]

    def _through(self, ends: Sequence[tuple[int, str]]) -> int:
        """Where an end ends: with the first eos, at which generation stops, else where its last token first stands."""
        tokens = [token for _, token in ends]
        at, token = ends[tokens.index(self._eos if self._eos in tokens else tokens[-1])]
        return at + len(token)

    def _opener_end(self, own: str, following: str) -> int:
        """Where the special token ends that opens the next turn right after this one; 0 where there is none."""
        closed = own.rstrip()
        places = [place for place in control_token_places(following, self._special) if place[0] >= len(closed)]
        if not following.startswith(closed) or not places:
            return 0
        at, token = places[0]
        is_token = token in self._special or NO_TAG.fullmatch(token) or (not closed and token[1] != "/")
        return at + len(token) if is_token and not following[len(closed) : at].strip() else 0

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing."""
        return self.habits.markers[0] if self.habits.markers else ""

    @property
    def end_tokens(self) -> frozenset[str]:
        """The control tokens of all ends of turns."""
        return frozenset(token for marker in self.habits.markers for token in control_tokens(marker, self._special))

    # Rendering.

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The conversation as the model sees it; `messages` are fitted ones. Raises RenderError."""
        return self.template.render(adapted(messages, parts=self.habits.parts), tools=tools, prompt=prompt)

    def _probe(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """A probe conversation, with tools where the template has to be given some."""
        return self.rendered(messages, PROBE_TOOLS if self.habits.tools else (), prompt=prompt)

    def _rendered_or_nothing(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        try:
            return self.rendered(messages, tools)
        except RenderError:
            return ""

    # Tool calls in the form that the template takes.

    def fitted(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Fitted:
        """The conversation as its author wrote it where the template writes its calls so; else as near to that as the
        template allows.

        A template may write arguments correctly only as objects (text is encoded a second time) or only as text
        (objects are refused or escaped). Then it is given them in that form, which is the same JSON.

        Raises:
            Inexact: the template refuses the conversation in every form.
        """
        if any(GIVEN in message for message in messages):
            authored = self._as_authored(messages, tools)
            fitted = self.fitted(authored.messages, tools)
            fitted = Fitted(fitted.messages, (*authored.notes, *fitted.notes))
            if not fitted.notes:
                self._check_as_authored(messages, fitted.messages, tools)
            return fitted
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return Fitted(messages)
        arguments = self.habits.arguments
        given = messages if arguments == "own" else with_arguments_as(messages, arguments)
        accepted: list[Sequence[Message]] = []
        refusal = ""
        for form in CALL_FORMS:
            candidate = in_form(given, form)
            if candidate in accepted:
                continue
            try:
                writes = self._writes_names(candidate, tools)
            except RenderError as error:
                refusal = str(error)
                if isinstance(error, Endless):
                    break
                continue
            if writes:
                return with_notes(messages, candidate)
            accepted.append(candidate)
        if not accepted:
            raise Inexact(REFUSED, refusal)
        return with_notes(messages, accepted[0])

    def _as_authored(self, messages: Sequence[Message], tools: Sequence[Any]) -> Fitted:
        """The messages with what their author wrote, as far as the template takes it: roles, parts, further keys.

        Keys that the template has no name for are left out where the text is the same without them.
        """
        notes: dict[str, None] = {}
        whole = [self._authored(message, notes) if GIVEN in message else message for message in messages]
        slim = [
            {key: value for key, value in message.items() if key in KNOWN_KEYS or key in self._names}
            for message in whole
        ]
        if slim != whole and self._rendered_or_nothing(slim, tools) != self._rendered_or_nothing(whole, tools):
            return Fitted(whole, tuple(notes))
        return Fitted(slim, tuple(notes))

    def _check_as_authored(self, messages: Sequence[Message], fitted: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise Inexact where a row without notes is not rendered as its author's own messages are."""
        own = [message.get(GIVEN, message) for message in messages]
        if any((given.get("tool_calls") or None) != message.get("tool_calls")
               for given, message in zip(own, messages, strict=True)):  # fmt: skip
            return  # calls in a form of their own are noted where rows are read
        wanted, text = self._rendered_or_nothing(own, tools), self._rendered_or_nothing(fitted, tools)
        if wanted and wanted != text:
            raise Inexact(_NOT_ITS_OWN, _first_difference(wanted, text))

    def _authored(self, message: Message, notes: dict[str, None]) -> Message:
        """A message with its author's role, content and keys; what cannot be kept is noted."""
        given = message[GIVEN]
        authored = without_given([message])[0]
        if given["role"] != authored["role"]:
            if authored["role"] == "system" and self._takes(given["role"]):
                authored["role"] = given["role"]
            else:
                notes[NOTE_ROLE] = None
        if not isinstance(given["content"], (str, type(None))):
            kinds = kinds_of_parts(given["content"])
            if kinds and self._takes(authored["role"], *kinds):
                authored["content"] = given["content"]
                if not any(given.get(key) for key in REASONING_KEYS):
                    authored.pop("reasoning_content", None)
            else:
                notes[NOTE_PARTS] = None
        # the same think text or calls under another of their names must not be given twice
        covered = {*authored, *(REASONING_KEYS if "reasoning_content" in authored else ())}
        covered |= {*(CALL_KEYS if authored.get("tool_calls") else ())}
        return authored | {key: value for key, value in given.items() if key not in covered and value is not None}

    def _takes(self, role: str, *kinds: str) -> bool:
        """Whether the template writes a message of this role, with content in parts of these types."""
        asked = (role, *kinds)
        if asked not in self._taken:
            words = [f"part{number}q" for number in range(len(kinds))] or ["part0q"]
            parts = [{"type": kind, kind: word} for kind, word in zip(kinds, words, strict=False)]
            message = {"role": role, "content": parts or words[0]}
            question, reply = _PLAIN
            before: list[Message] = {"assistant": [question], "tool": [*_CALLING[:2]]}.get(role, [])
            after: list[Message] = {"assistant": [], "tool": [], "user": [reply]}.get(role, [*_PLAIN])
            turns = [*before, {**_CALLING[2], **message} if role == "tool" else message, *after]
            with contextlib.suppress(RenderError, Inexact):
                text = self.rendered(self.fitted(turns).messages)
                self._taken[asked] = all(word in text for word in words) and not _PART_KEY.search(text)
        return self._taken.setdefault(asked, False)

    def _writes_names(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether the names of all calls are written, seen by marks on them; raises RenderError."""
        count = itertools.count()

        def mark(text: str, index: int, kind: Kind) -> str:
            return f"{text}{SALT}{next(count)}q" if kind == "name" else text

        text = self.rendered([mapped(message, 0, mark) for message in messages], tools)
        return all(f"{SALT}{number}q" in text for number in range(next(count)))

    # The turns of a row.

    def locate(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> LocatedTurns:
        """The text of a conversation, a fitted one, and the exact spans of its assistant turns.

        Raises:
            Inexact: the template refuses the row, drops or rewrites a part of it, or cannot be verified on it.
        """
        try:
            text = self.rendered(messages, tools)
        except RenderError as error:
            raise Inexact(REFUSED, str(error)) from error
        shape = None if tools else self._shape_of(messages)
        if shape is None:
            return self._verified(text, messages, tools)
        if shape not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._skeleton_of_shape(messages)
        skeleton = self._shapes[shape]
        if skeleton is None:
            return self._verified(text, messages, tools)
        pieces = [stripped for message in messages if (stripped := message["content"].strip())]
        expected, begins = skeleton.fill(pieces)
        if expected != text:
            return self._verified(text, messages, tools)
        return self._located(skeleton, text, begins)

    def _skeleton_of_shape(self, messages: Sequence[Message]) -> Skeleton | None:
        """The skeleton of plain rows of this shape; None where they have none or may differ from one another."""
        try:
            skeleton = self._skeleton(messages, ())[0]
        except Inexact:
            return None
        copy = adapted(self._marked_copy(messages)[0], parts=self.habits.parts)
        looks = self.template.looks_into(SALT, copy) or any(
            self.template.looks_into(SALT, copy[: turn.message], prompt=True) for turn in skeleton.turns
        )
        return None if looks else skeleton

    def _shape_of(self, messages: Sequence[Message]) -> Any:
        """What decides how the template treats a plain row: roles, and the white space around the texts.

        None where the row has calls, think text, or a text that holds something the template looks for, or a mark.
        """
        shape: list[tuple[Any, ...]] = []
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str) or len(message) != 2 or self._asked.search(content):
                return None
            body = content.strip()
            if body == content:
                shape.append((message["role"], not body))
            else:
                begin = content.find(body) if body else len(content)
                shape.append((message["role"], not body, content[:begin], content[begin + len(body) :]))
        return tuple(shape)

    def _verified(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> LocatedTurns:
        """The turns by a marked copy of this very row, confirmed by its own prompts: each turn must begin where the
        prompt ends. Raises Inexact."""
        skeleton, pieces = self._skeleton(messages, tools)
        expected, begins = skeleton.fill([piece.text for piece in pieces])
        if expected != text:
            raise Inexact(
                "the chat template renders the row differently from its marked copy, so its turns cannot be located",
                _first_difference(expected, text),
            )
        located = self._located(skeleton, text, begins)
        for turn in skeleton.turns:
            if turn.message not in located.spans:
                continue
            start, end = located.spans[turn.message]
            where = f"messages[{turn.message}]"
            try:
                prompt = self.rendered(messages[: turn.message], tools, prompt=True)
            except RenderError as error:
                if turn.message:
                    raise Inexact(OTHER_PROMPT, where) from error
                prompt = ""  # many templates read the first message, which an empty prompt does not have
            if prompt + turn.header != located.text[:start]:
                raise Inexact(OTHER_PROMPT, where)
            if turn.by_prefix and not self.habits.markers:
                own = self._rendered_or_nothing(messages[: turn.message + 1], tools)
                if own != located.text[:end]:
                    raise Inexact(_NO_END, where)
        return located

    def _located(self, skeleton: Skeleton, text: str, begins: Sequence[int]) -> LocatedTurns:
        """The skeleton's turns as spans of a row's text; `begins` is where each gap begins in it."""
        spans: dict[int, Span] = {}
        nearest: dict[int, Span] = {}
        for turn in skeleton.turns:
            if turn.start is not None and turn.end is not None:
                start = begins[turn.start.gap] + turn.start.offset
                spans[turn.message] = (start, begins[turn.end.gap] + turn.end.offset)
            elif turn.nearest is not None:
                first, last = turn.nearest
                nearest[turn.message] = (begins[first.gap] + first.offset, begins[last.gap] + last.offset)
        inexact = {turn.message: turn for turn in skeleton.turns if not turn.is_exact}
        method: Method
        if inexact:
            method = "last_turn" if spans else "inexact"
        elif skeleton.marks_agree:
            method = "generation"
        elif any(turn.by_next for turn in skeleton.turns):
            method = "next_turn"
        else:
            method = "prefix" if all(turn.by_prefix for turn in skeleton.turns) else "marker"
        stripped, added = len(skeleton.stripped), skeleton.added
        return LocatedTurns(text + added, spans, inexact, nearest, method, stripped, added)

    def _skeleton(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Skeleton, list[Piece]]:
        """What the template writes around this row's pieces, and the pieces.

        Raises:
            Inexact: the template refuses a marked copy, or drops, rewrites or takes apart a text.
        """
        copy, pieces = self._marked_copy(messages)
        try:
            text = self.rendered(copy, tools)
        except RenderError as error:
            raise Inexact("the chat template refuses a copy of the row with marks in it", str(error)) from error
        # letters that the template took out of a text show here: the second copy has others in their place
        other = [mapped(message, index, with_other_sentinels) for index, message in enumerate(copy)]
        again = with_first_sentinels(self._rendered_or_nothing(other, tools))
        if again != text:
            raise Inexact("the chat template rewrites a text or takes it apart", _first_difference(text, again))
        gaps, order, broken = take_apart(text, pieces)
        written = {number for number, _ in order}
        stripped = self._judge_pieces(messages, pieces, written, broken, text)
        places = Places(text, gaps, order, pieces)
        turns = tuple(
            self._turn(places, copy, index, tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        agree = self.template.has_generation and self._marks_agree(places, turns, copy, tools)
        return Skeleton(tuple(gaps), tuple(order), turns, stripped, agree), pieces

    def _marks_agree(
        self, places: Places, turns: Sequence[Turn], copy: Sequence[Message], tools: Sequence[Any]
    ) -> bool:
        """Whether `{% generation %}` marks begin where the turns begin and end with them, white space aside."""
        text, marks = self.template.render_marked(adapted(copy, parts=self.habits.parts), tools=tools)
        exact = [(turn.start, turn.end) for turn in turns if turn.start is not None and turn.end is not None]
        spans = [(places.position(start), places.position(end)) for start, end in exact]
        return len(marks) == len(spans) == len(turns) and all(
            mark[0] == span[0] and mark[1] >= span[1] and not text[span[1] : mark[1]].strip()
            for mark, span in zip(marks, spans, strict=True)
        )

    def _marked_copy(self, messages: Sequence[Message]) -> tuple[list[Message], list[Piece]]:
        """The row with sentinels around its pieces, and the pieces by number."""
        pieces: list[Piece] = []

        def mark(text: str, index: int, kind: Kind) -> str:
            for salt in (SALT, OTHER_SALT):
                if salt in text:
                    raise Inexact("a text holds the mark that is used to find turns", f"messages[{index}]: {salt}")
            marked: list[str] = []
            at = 0
            for begin, end, is_think in pieces_of_text(
                text, self._split if kind in ("content", "reasoning") else NOWHERE
            ):
                number = len(pieces)
                pieces.append(Piece(index, kind, text[begin:end], is_think or kind == "reasoning"))
                self._check_between(text[at:begin], index)
                marked += (text[at:begin], f"{SALT}{number:05d}b", text[begin:end], f"{SALT}{number:05d}e")
                at = end
            self._check_between(text[at:], index)
            return "".join((*marked, text[at:]))

        copy = [mapped(message, index, mark) for index, message in enumerate(messages)]
        if len(pieces) > _MAX_PIECES:
            raise Inexact("a row has too many texts", f"{len(pieces):,}")
        return copy, pieces

    def _check_between(self, text: str, index: int) -> None:
        """Raise Inexact where a text between pieces, for which the template looks, is an end of turn."""
        ends = sorted(self.end_tokens | {*self.habits.markers})
        marker = next((marker for marker in ends if marker in text), None)
        if marker is not None:
            raise Inexact(
                "a text holds the end of turn, which the chat template looks for in texts",
                f"messages[{index}]: {one_line(marker)}",
            )

    def _judge_pieces(
        self, messages: Sequence[Message], pieces: Sequence[Piece], written: set[int], broken: set[int], text: str
    ) -> tuple[int, ...]:
        """Numbers of think pieces that are not written; raises Inexact where anything else is missing or rewritten."""
        last = {piece.message: number for number, piece in enumerate(pieces) if piece.kind == "content"}
        stripped = []
        for number, piece in enumerate(pieces):
            role = messages[piece.message]["role"]
            where = f"messages[{piece.message}]"
            if number in broken and piece.kind == "arguments":
                raise Inexact("the chat template encodes the JSON text of a tool call's arguments a second time", where)
            if number in broken:
                raise Inexact(f"the chat template rewrites {_WHOSE[role]} text", where)
            if number in written:
                continue
            if piece.kind == "name":  # Kimi writes the id, `functions.get_weather:0`, and no name beside it
                calls = messages[piece.message]["tool_calls"]
                ids = [str(call.get("id") or "") for call in calls if call["function"]["name"] == piece.text]
                if all(piece.text in ident and ident in text for ident in ids):
                    continue
            if piece.kind in ("name", "argument", "arguments"):
                raise Inexact("the chat template drops a tool call", f"{where}: {one_line(piece.text, limit=60)}")
            if role in ("system", "developer"):
                raise Inexact(_DROPPED_SYSTEM, where)
            if role != "assistant" or not piece.is_think or number == last.get(piece.message):
                raise Inexact(f"the chat template drops {_WHOSE[role]} text", where)
            stripped.append(number)
        return tuple(stripped)

    def _turn(self, places: Places, copy: Sequence[Message], index: int, tools: Sequence[Any]) -> Turn:
        """One assistant turn of the marked copy."""
        try:
            prompt = self.rendered(copy[:index], tools, prompt=True)
        except RenderError as error:
            if index:
                return Turn(index, reason="the chat template cannot render the prompt of a turn", detail=str(error))
            prompt = ""  # many templates read the first message, which an empty prompt does not have
        common = common_length(prompt, places.text)
        is_prefix = common == len(prompt)
        first, last, kind = places.extent(index, common)
        begin: int | None = common
        if is_prefix and not (index and copy[index - 1]["role"] in ("user", "tool")):
            begin = self._unasked_start(places, copy, index, tools, after=common, first=first)
        start = None if begin is None else places.place(begin)
        after = common if last is None else last
        if entity := self._entity(places.text[common : places.next_piece(after)], copy):
            raise Inexact(_ENTITIES, f"messages[{index}]: {entity}")
        end = self._turn_end(places, copy, index, tools, after=after, is_text=kind == "content")
        if begin is None or start is None or end.place is None:
            why = _NO_END if end.place is None else OTHER_PROMPT
            return Turn(index, reason=why, detail=f"messages[{index}]")
        if not is_prefix:
            nearest = (start, end.place) if first is None or common <= first else None
            detail = f"messages[{index}]: the prompt continues with {one_line(repr(prompt[common:][:40]))}"
            return Turn(index, reason=OTHER_PROMPT, detail=detail, nearest=nearest, added=end.added)
        problem = places.problem(index, begin, places.position(end.place))
        if problem:
            return Turn(index, reason=problem, detail=f"messages[{index}]")
        header = places.text[common:begin]
        return Turn(index, start, end.place, end.by_prefix, end.by_next, end.added, header)

    def _unasked_start(
        self,
        places: Places,
        copy: Sequence[Message],
        index: int,
        tools: Sequence[Any],
        *,
        after: int,
        first: int | None,
    ) -> int | None:
        """Where a turn begins that follows neither a question nor a tool's result; None where that is not certain.

        Templates may write a generation prompt after a question only, and the turn's header in any case. So the header
        is measured after a question, and the turn begins that much before its first piece.
        """
        if first is None:
            return None
        asked = [*copy[:index], _NEXT_QUESTION]
        try:
            prompt, whole = self.rendered(asked, tools, prompt=True), self.rendered([*asked, *copy[index:]], tools)
        except RenderError:
            return None
        at = whole.find(places.text[first : first + SENTINEL_CHARS], len(prompt))
        gap = whole[len(prompt) : at]
        begin = first - len(gap)
        known = whole.startswith(prompt) and at >= 0 and SALT not in gap
        return begin if known and begin >= after and places.text[begin:first] == gap else None

    def _turn_end(
        self, places: Places, copy: Sequence[Message], index: int, tools: Sequence[Any], *, after: int, is_text: bool
    ) -> _TurnEnd:
        """Where a turn ends whose last piece ends at `after`, and whether its own rendering ends there too."""
        limit = places.next_piece(after)
        own = self._rendered_or_nothing(copy[: index + 1], tools)
        until = len(own) if own and places.text.startswith(own) and after <= len(own) <= limit else None
        is_last = index + 1 == len(copy)
        written = places.text[after:limit]
        own_tail = own[after:] if until is not None else text_after(own, places.text, after)
        following = self._continued(places, copy, tools, after=after) if is_last else written
        end = self._end_of(own_tail, following, is_last=is_last, is_text=is_text)
        if end is not None and end.by_next and not is_last:
            opener = next(reversed(control_tokens(end.text, self._special)), "")
            end = end if opener in self.habits.next_openers else None
        if end is not None:
            is_own = own_tail is not None and own_tail.startswith(end.text)
            if not (is_own or end.by_next or places.tells_end(index, len(copy))):
                return _TurnEnd()
            size = len(end.text)
            added = end.text[len(written) :] if is_last else ""
            if added and not (end.text.startswith(written) and limit == len(places.text)):
                return _TurnEnd()
            place = places.place(after + size - len(added))
            if place is not None and added:
                place = Place(place.gap, place.offset + len(added))
            return _TurnEnd(place, until is not None, end.by_next, added)
        if self.habits.markers:
            return _TurnEnd()
        if until is not None:
            return _TurnEnd(places.place(until), True)
        return _TurnEnd(places.place(after)) if is_text else _TurnEnd()

    def _continued(self, places: Places, copy: Sequence[Message], tools: Sequence[Any], *, after: int) -> str | None:
        """What stands after the last piece of the last turn when the conversation goes on; None where it cannot."""
        calls = copy[-1].get("tool_calls") or []
        result = {"role": "tool", "content": _NEXT_QUESTION["content"]}
        if calls:
            result |= {"name": calls[-1]["function"]["name"], "tool_call_id": str(calls[-1].get("id") or "")}
        for following in (result, _NEXT_QUESTION) if calls else (_NEXT_QUESTION,):
            whole = self._rendered_or_nothing([*copy, following], tools)
            tail = text_after(whole, places.text, after) if whole else None
            if tail is not None and following["content"] in tail:
                return tail.partition(following["content"])[0]
        return None


@dataclass(frozen=True)
class _End:
    """What ends a turn: `text` is what stands after its last piece, through its end."""

    text: str
    by_next: bool = False
    is_words: bool = False
    """It holds no control token."""


@dataclass(frozen=True)
class _TurnEnd:
    """Where a turn ends; `added` is the end of it that the template does not write."""

    place: Place | None = None
    by_prefix: bool = False
    by_next: bool = False
    added: str = ""


_WHOSE = {
    **dict.fromkeys(("system", "developer"), "a system prompt's"),
    "user": "a user turn's",
    "assistant": "an assistant's",
    "tool": "a tool's",
}
_NOT_ITS_OWN = "the row is not rendered as apply_chat_template renders its messages"
_DROPPED_SYSTEM = (
    "the chat template drops the system prompt (data.system_into_user=true puts it before the first user turn)"
)
_ENTITIES = "the chat template writes HTML entities in an assistant's turn"
_NO_END = "the chat template writes no end of turn after a turn"
_MAX_SHAPES = 20_000
_LONGEST_MARKER = 40

_PART_KEY = re.compile(r"""['"]type['"]""")
"""A template that writes a part's key takes the list of parts for the text."""

_PLAIN: list[Message] = [{"role": "user", "content": "question1q"}, {"role": "assistant", "content": "answer1q"}]
_SYSTEM: Message = {"role": "system", "content": "system1q"}
_ANSWER: Message = {"role": "assistant", "content": "answer2q"}
_ODD_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
"""Arguments that come out changed if a template escapes, encodes twice, or writes Python in place of JSON."""
_NEXT_QUESTION: Message = {"role": "user", "content": "question9q"}
_CALLING: list[Message] = [
    {"role": "user", "content": "question1q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call1q", "function": {"name": "look1q", "arguments": _ODD_ARGUMENTS}}
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

_ENTITY = re.compile(r"&(?:[a-z]{2,6}|#\d{1,5}|#x[0-9A-Fa-f]{1,4});")


def _first_difference(expected: str, text: str) -> str:
    at = common_length(expected, text)
    return f"at character {at + 1}: {one_line(repr(text[max(0, at - 20) : at + 40]), limit=90)}"
