"""Where the turns of a conversation stand in its rendered text, measured on the template and verified on every row.

A template is asked, not known by name. Two kinds of renderings tell everything:

- The conversation up to a turn, with the generation prompt: what an answer would be generated after. The turn's
  trained span begins where it ends, if the whole text really begins with it.
- A marked copy: a sentinel before and after every piece of text in the row, put inside the white space at its ends
  and around the texts that the template itself looks for (`</think>`), so that the template treats the copy as it
  treats the row. The copy shows what the template writes between the pieces, what it strips, drops, escapes or moves.
  Without its sentinels it must be the row's own text, character by character; else nothing is trained.

A second copy has other sentinels and must be the same otherwise: so nothing that a template took out of a text, such
as its first letter, passes for the template's own words.

What ends a turn is what stands behind its text whatever follows: the conversation that ends there and the one that goes
on are compared, and the end is the last control token that both have. Where they have none, the special token that
opens the next turn ends this one (GLM: `<|user|>`, after calls `<|observation|>`); behind the last turn it is added.

What a template writes between the pieces is the same for all rows of one shape (roles, white space at the ends), as
long as no text holds anything that the template looks for. So plain rows are checked against the copy of their shape:
one rendering and one comparison a row. Where the template looks at more of a text (its length, its first letter, a
word), which is watched while the copy is rendered, and for all other rows, every row gets a copy of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sft_play.data.messages import GIVEN, REASONING_KEYS, TEXT_KEYS, without_given
from sft_play.data.template import ChatTemplate, Endless, Message, RenderError
from sft_play.data.template_limits import Span
from sft_play.errors import TokenizerError
from sft_play.log import one_line

Method = Literal["generation", "prefix", "marker", "next_turn", "last_turn", "all", "document", "inexact"]
"""How the trained spans of a row were found; see docs/masks.md.

generation: the template's own `{% generation %}` marks, which agree with what follows; prefix: start and end of every
turn are those of the rendered conversation up to it; marker: the start so, the end by the end-of-turn marker, because
the template renders a turn otherwise once it is history; last_turn: only the last turn is exact; all: every token;
document: plain text; inexact: as told, not as it should be."""

Kind = Literal["content", "reasoning", "name", "argument", "arguments"]
"""`argument` is a text inside the arguments of a call, `arguments` all of them as one JSON text."""
ArgumentForm = Literal["object", "text"]
_ARGUMENT_FORMS: tuple[ArgumentForm, ...] = ("object", "text")
_SALT = "zQ9x"
_SENTINEL = re.compile(_SALT + r"(\d{5})([be])")
_OTHER_SALT = "Kw7V"
_OTHER_SENTINEL = re.compile(_OTHER_SALT + r"([ghjkmnprst]{5})([du])")
_TO_OTHER, _FROM_OTHER = str.maketrans("0123456789be", "ghjkmnprstdu"), str.maketrans("ghjkmnprstdu", "0123456789be")
_SENTINEL_CHARS = len(_SALT) + 6
_MAX_PIECES = 90_000
REFUSED = "the chat template refuses the row"
OTHER_PROMPT = "the chat template prompts for a turn otherwise than it writes the turn"


class Inexact(ValueError):
    """A mask that cannot be found exactly: the reason rows are counted by, and the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Piece:
    """A piece of a message's text, without white space at its ends."""

    message: int
    kind: Kind
    text: str
    is_think: bool = False
    """It is think text, which a template may leave out."""


@dataclass(frozen=True)
class Habits:
    """What a template was seen to do with probe conversations."""

    parts: bool = False
    """It takes content as a list of parts only."""
    tools: bool = False
    """It has to be given tools: one that is for rows with tools alone may go over them without asking."""
    arguments: ArgumentForm | Literal["own"] = "own"
    """The form of a call's arguments that it writes rightly where it does so with one of the two alone."""
    system: Literal["written", "dropped", "refused"] = "written"
    calls: bool = False
    """It writes tool calls."""
    markers: tuple[str, ...] = ()
    """Texts that end an assistant turn, the usual one first; empty where it writes nothing."""
    next_openers: tuple[str, ...] = ()
    """Those of them that open the next turn, where the template closes none."""


@dataclass(frozen=True)
class CallForm:
    """What is changed in a row with calls, beside the form of the arguments, for a template that refuses the row or
    drops its calls as they are written."""

    content: Literal["own", "absent", "empty"] = "own"
    """In a turn that only calls."""
    typed: bool = False
    """Every call has a type."""
    short_ids: bool = False
    """Ids are nine letters and digits."""


_CALL_FORMS = tuple(
    CallForm(content, typed, short_ids)
    for content in ("own", "empty", "absent")
    for typed, short_ids in ((False, False), (True, False), (False, True), (True, True))
)
"""In the order in which they are tried: the first leaves the row as it is written."""

TEXT_FOR_OBJECT = "tool call arguments that are objects are given to the chat template as JSON text, which it writes"
OBJECT_FOR_TEXT = (
    "tool call arguments that are JSON text are given to the chat template as objects: it encodes text once more or "
    "does not write it"
)
NOTE_CONTENT = "a turn that only calls tools is given to the chat template with its content empty, or without one"
NOTE_TYPED = "a tool call without a type is given to the chat template with type: function, which it asks for"
NOTE_ROLE = "a role is given to the chat template under its usual name (system, user, assistant, tool)"
NOTE_PARTS = "content in parts is given to the chat template as one text, which it takes"
NOTE_SHORT_IDS = "ids of tool calls are given to the chat template as nine letters and digits, which it asks for"


@dataclass(frozen=True)
class Fitted:
    """A conversation as the template takes it, and what was changed for that, in words; mostly nothing."""

    messages: Sequence[Message]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A position in a rendered text: characters behind the beginning of a gap between pieces."""

    gap: int
    offset: int


@dataclass(frozen=True)
class Turn:
    """One assistant turn: its span where it is exact, else why it is not and what would be trained instead."""

    message: int
    start: Place | None = None
    end: Place | None = None
    by_prefix: bool = False
    """Its end is that of the rendered conversation up to it."""
    by_next: bool = False
    """It is ended by the token that opens the next turn."""
    added: str = ""
    """What the template does not write behind the last turn: the token that would open the next one."""
    header: str = ""
    """What the template writes before the turn that its prompt does not have, such as before a first message."""
    reason: str = ""
    detail: str = ""
    nearest: tuple[Place, Place] | None = None
    """The best guess at an inexact turn's span."""

    @property
    def is_exact(self) -> bool:
        """Whether its span was found and verified."""
        return self.start is not None and self.end is not None


@dataclass(frozen=True)
class Skeleton:
    """What a template writes around the pieces of rows of one shape, and where their turns are.

    `gaps` has one text more than `order`, which holds for each written piece its number and the form it is written
    in. `stripped` are numbers of think pieces that are not written.
    """

    gaps: tuple[str, ...]
    order: tuple[tuple[int, str], ...]
    turns: tuple[Turn, ...]
    stripped: tuple[int, ...] = ()
    marks_agree: bool = False
    """The template has `{% generation %}` marks, and they hold exactly the turns."""

    @property
    def added(self) -> str:
        """The end that is added behind a last turn which the template does not end."""
        return self.turns[-1].added if self.turns else ""

    def fill(self, pieces: Sequence[str]) -> tuple[str, list[int]]:
        """The text that a row with these pieces must have, and where each gap begins in it."""
        parts = [self.gaps[0]]
        position = len(self.gaps[0])
        begins = [0]
        for (number, form), gap in zip(self.order, self.gaps[1:], strict=True):
            text = _FORMS[form](pieces[number])
            position += len(text)
            begins.append(position)
            position += len(gap)
            parts += (text, gap)
        return "".join(parts), begins


@dataclass(frozen=True)
class Found:
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


_FORMS: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii json": lambda text: json.dumps(text)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)[1:-1],
    "repr": lambda text: repr(text)[1:-1],
}
"""How a template may write a text: as it is, or inside a string of JSON or Python."""


def _is_told_by_id(message: Message, name: str, text: str) -> bool:
    """Whether a call's name stands in its id, which the text holds: Kimi writes `functions.get_weather:0` alone."""
    ids = (str(call.get("id") or "") for call in message["tool_calls"] if call["function"]["name"] == name)
    return all(name in written and written in text for written in ids)


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
        self._split = _splitter(template.tested)
        self._asked = _splitter(template.tested | {_SALT, _OTHER_SALT}) or re.compile("(?!)")
        self._shapes: dict[Any, Skeleton | None] = {}
        self._taken: dict[tuple[str, ...], bool] = {}
        self._names = frozenset(re.findall(r"\w+", template.source))
        self._openers: frozenset[str] = frozenset()
        self._history_ends: frozenset[str] = frozenset()
        self.habits = Habits()
        self.habits = self._learn()

    # What the template does.

    def _learn(self) -> Habits:
        habits = self._learn_content()
        habits = self._learn_calls(habits)
        return self._learn_ends(_replace(habits, system=self._learn_system(habits)))

    def _learn_content(self) -> Habits:
        problem, does = "", "drops"
        for tools, parts in itertools.product((self.with_tools, not self.with_tools), (False, True)):
            habits = Habits(parts=parts, tools=tools)
            try:
                text = self._probe(habits, _PLAIN)
            except Endless as error:
                raise TokenizerError(f"the chat template cannot render a question and an answer: {error}") from error
            except RenderError as error:
                problem = problem or str(error)
                continue
            if "answer1q" in text and not (parts and _PART_KEY.search(text)):
                return habits
            if not parts and "answer1q" in text.casefold():
                does = "rewrites"
        if problem:
            raise TokenizerError(f"the chat template cannot render a question and an answer: {problem}")
        raise TokenizerError(f"the chat template {does} an assistant's answer; give data.chat_template another one")

    def _learn_calls(self, habits: Habits) -> Habits:
        """Whether it writes tool calls, and rightly with arguments as objects, as text, or as both."""
        try:
            for turns, tools in ((_CALLING, PROBE_TOOLS), (_CALLING[:2], PROBE_TOOLS), (_CALLING[:2], ())):
                written = {kind: self._written_calls(habits, turns, tools, kind) for kind in _ARGUMENT_FORMS}
                if any(written.values()):
                    right = [kind for kind, text in written.items() if self._are_right(text, kind)]
                    arguments = right[0] if len(right) == 1 else "own"
                    return _replace(habits, calls=turns is _CALLING, arguments=arguments)
        except Endless:
            pass
        return habits

    def _written_calls(self, habits: Habits, turns: Sequence[Message], tools: Sequence[Any], kind: ArgumentForm) -> str:
        """What is written of a probe's calls in the first form in which they are; empty where there is none."""
        given = _with_form(turns, kind)
        for form in _CALL_FORMS:
            try:
                text = self._render(habits, in_form(given, form), tools=tools)
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
        """Whether the probe's arguments are written once encoded and not escaped: their JSON, or with `object` every
        value as it is, for templates that write calls otherwise than as JSON."""
        if self._entity(written):
            return False
        if kind == "text":
            return json.dumps(_ODD_ARGUMENTS, ensure_ascii=False) in written
        return all(value in written for value in _ODD_ARGUMENTS.values()) or _ODD_ARGUMENTS in _objects_in(written)

    def _entity(self, text: str, row: Any = ()) -> str:
        """An HTML entity in a text that neither the template's source nor the row has; empty where there is none."""
        for entity in dict.fromkeys(_ENTITY.findall(text)):
            if entity not in self.template.source and entity not in json.dumps(row, ensure_ascii=False, default=str):
                return str(entity)
        return ""

    def _learn_system(self, habits: Habits) -> Literal["written", "dropped", "refused"]:
        try:
            text = self._probe(habits, [{"role": "system", "content": "system1q"}, *_PLAIN])
        except RenderError:
            return "refused"
        return "written" if "system1q" in text else "dropped"

    def _learn_ends(self, habits: Habits) -> Habits:
        """The habits with the ends of a last turn, of a turn that is history, and of a turn that calls."""
        self._openers = self._learn_openers(habits)
        last = self._probe(habits, _PLAIN)
        own = last.rpartition("answer1q")[2]
        try:
            whole = self._probe(habits, [*_PLAIN, {"role": "user", "content": "question2q"}, _ANSWER])
            after = whole.partition("answer1q")[2]
            following = after.partition("question2q")[0] if "question2q" in after else None
        except RenderError:
            following = None
        found: list[tuple[str, bool]] = []
        user_end = next(iter(_atoms(_between(last, "question1q", "answer1q"), self._special)), "")
        self._history_ends = frozenset({user_end, self._eos or ""} - {""})
        for is_last in (True, False):
            end = self._end_of(own, following, is_last=is_last, is_text=True)
            if end is not None:
                found.append((end.text.strip(), end.by_next))
        habits = _replace(habits, markers=tuple(dict.fromkeys(text for text, _ in found if text)))
        self.habits = habits
        if habits.calls:
            found += self._learn_call_ends(habits)
        return _replace(
            habits,
            markers=tuple(dict.fromkeys(text for text, _ in found if text)),
            next_openers=tuple(dict.fromkeys(text for text, by_next in found if by_next)),
        )

    def _learn_call_ends(self, habits: Habits) -> Iterator[tuple[str, bool]]:
        """The last token of what ends a turn that calls, where no known end stands there."""
        try:
            last, whole = (
                self._render(habits, self._fitted(turns, PROBE_TOOLS, habits).messages, tools=PROBE_TOOLS)
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
                last = _atoms(end.text, self._special)[-1]
                if not any(marker.endswith(last) for marker in habits.markers):
                    yield last, end.by_next

    def _learn_openers(self, habits: Habits) -> frozenset[str]:
        """Tokens that open a turn, where the template writes the next one's header whether or not it is asked to."""
        try:
            question = self._probe(habits, _PLAIN[:1])
            if question != self._probe(habits, _PLAIN[:1], prompt=True):
                return frozenset()
            first = self._probe(habits, [{"role": "system", "content": "system1q"}, *_PLAIN])
        except RenderError:
            first = self._probe(habits, _PLAIN)
        place = first.find("system1q") if "system1q" in first else first.find("question1q")
        return frozenset(_atoms(first[: max(0, place)], self._special)) - {self._eos or ""}

    def _end_of(self, own: str | None, following: str | None, *, is_last: bool, is_text: bool) -> _End | None:
        """What ends a turn, as the text behind its last piece through its end; None where nothing does.

        `own` is what stands there in the conversation that ends with the turn, `following` in the one that goes on
        (None: it cannot be rendered). `is_last`: the turn is the last one of the row; `is_text`: its last piece is an
        answer's text, not think text or a call.
        """
        if own is None:
            return self._known_end(following or "")
        shared = own if following is None else _shared(own, following, self._special)
        ends = self._enders(shared, is_text=is_text)
        while ends and ends[-1][1] in self._openers:
            shared = shared[: ends[-1][0]]
            ends = self._enders(shared, is_text=is_text)
        if ends:
            return _End(shared[: self._through(ends)])
        own_ends = self._enders(own, is_text=is_text)
        if not own_ends and following is not None:
            opener = self._opener(own, following)
            if opener:
                return _End(following[:opener], by_next=True)
        if own_ends and is_last:
            return _End(own[: self._through(own_ends)])
        if own_ends and following is not None:
            atoms = _atom_places(following, self._special)
            if atoms and (atoms[0][1] in self._history_ends or _ENDER.search(atoms[0][1])):
                return _End(following[: atoms[0][0] + len(atoms[0][1])])
        words = shared.rstrip()
        is_end = 0 < len(words) <= _LONGEST_MARKER or words.endswith(self.habits.markers or ("\0",))
        return _End(words, is_words=True) if is_end else None

    def _known_end(self, following: str) -> _End | None:
        """The first known end in a text."""
        found = [(at, marker) for marker in self.habits.markers if (at := following.find(marker)) >= 0]
        if not found:
            return None
        at, marker = min(found, key=lambda item: (item[0], -len(item[1])))
        return _End(following[: at + len(marker)])

    def _enders(self, text: str, *, is_text: bool) -> list[tuple[int, str]]:
        """Places of control tokens that may end a turn. Tags such as `</tool_call>` open or close a part of one, unless
        they are tokens that end an answer."""
        known = "".join(self.habits.markers) if not is_text else ""

        def may_end(atom: str) -> bool:
            if atom == self._eos or not _TAG.fullmatch(atom):
                return True
            return (atom[1] != "/" and bool(_ENDER.search(atom))) or (
                atom in self._special and (is_text or atom in known)
            )

        return [(at, atom) for at, atom in _atom_places(text, self._special) if may_end(atom)]

    def _through(self, ends: Sequence[tuple[int, str]]) -> int:
        """Where an end ends: with the first eos, at which generation stops, else where its last token first stands."""
        names = [atom for _, atom in ends]
        at, atom = ends[names.index(self._eos if self._eos in names else names[-1])]
        return at + len(atom)

    def _opener(self, own: str, following: str) -> int:
        """Where the special token ends that opens the next turn right behind this one; 0 where there is none."""
        closed = own.rstrip()
        atoms = [place for place in _atom_places(following, self._special) if place[0] >= len(closed)]
        if not following.startswith(closed) or not atoms:
            return 0
        at, atom = atoms[0]
        is_token = atom in self._special or _CONTROL.fullmatch(atom) or (not closed and atom[1] != "/")
        return at + len(atom) if is_token and not following[len(closed) : at].strip() else 0

    @property
    def end_of_turn(self) -> str:
        """The text that ends an assistant turn, such as `<|im_end|>`; empty where the template writes nothing."""
        return self.habits.markers[0] if self.habits.markers else ""

    @property
    def end_tokens(self) -> frozenset[str]:
        """The control tokens of all ends of turns."""
        return frozenset(atom for marker in self.habits.markers for atom in _atoms(marker, self._special))

    # Rendering.

    def _render(
        self, habits: Habits, messages: Sequence[Message], *, tools: Sequence[Any] = (), prompt: bool = False
    ) -> str:
        return self.template.render(adapted(messages, habits), tools=tools, prompt=prompt)

    def _probe(self, habits: Habits, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """A probe conversation, with tools where the template has to be given some."""
        return self._render(habits, messages, tools=PROBE_TOOLS if habits.tools else (), prompt=prompt)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, prompt: bool = False) -> str:
        """The conversation as the model sees it; `messages` are fitted ones. Raises RenderError."""
        return self._render(self.habits, messages, tools=tools, prompt=prompt)

    # Tool calls in the form that the template takes.

    def fitted(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Fitted:
        """The conversation in the form of its author, where the template writes its calls so; else as near to that
        as the template allows.

        A template may write arguments rightly as objects alone (text is encoded once more) or as text alone (objects
        are refused or escaped): then they are given to it so, which is the same JSON.

        Raises:
            Inexact: the template refuses the conversation in every form.
        """
        return self._fitted(messages, tools, self.habits)

    def _fitted(self, messages: Sequence[Message], tools: Sequence[Any], habits: Habits) -> Fitted:
        if any(GIVEN in message for message in messages):
            own = self._as_its_author_wrote_it(messages, tools)
            fitted = self._fitted(own.messages, tools, habits)
            fitted = Fitted(fitted.messages, (*own.notes, *fitted.notes))
            if not fitted.notes:
                self._check_own(messages, fitted.messages, tools)
            return fitted
        if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            return Fitted(messages)
        given = messages if habits.arguments == "own" else _with_form(messages, habits.arguments)
        tried: list[Sequence[Message]] = []
        refused = ""
        for form in _CALL_FORMS:
            made = in_form(given, form)
            if made in tried:
                continue
            try:
                writes = self._writes_names(habits, made, tools)
            except RenderError as error:
                refused = str(error)
                if isinstance(error, Endless):
                    break
                continue
            if writes:
                return _told(messages, made)
            tried.append(made)
        if not tried:
            raise Inexact(REFUSED, refused)
        return _told(messages, tried[0])

    def _as_its_author_wrote_it(self, messages: Sequence[Message], tools: Sequence[Any]) -> Fitted:
        """The messages with what their author wrote, as far as the template takes it: roles, parts, further keys.

        Keys that the template has no name for are left out where the text is the same without them.
        """
        notes: dict[str, None] = {}
        whole = [self._with_own(message, notes) if GIVEN in message else message for message in messages]
        slim = [
            {key: value for key, value in message.items() if key in _KNOWN_KEYS or key in self._names}
            for message in whole
        ]
        if slim != whole and self._rendered_or_nothing(slim, tools) != self._rendered_or_nothing(whole, tools):
            return Fitted(whole, tuple(notes))
        return Fitted(slim, tuple(notes))

    def _check_own(self, messages: Sequence[Message], fitted: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise Inexact where a row of which nothing is noted is written otherwise than its author's own messages."""
        own = [message.get(GIVEN, message) for message in messages]
        if any((given.get("tool_calls") or None) != message.get("tool_calls")
               for given, message in zip(own, messages, strict=True)):  # fmt: skip
            return  # calls in a form of their own are noted where rows are read
        wanted, text = self._rendered_or_nothing(own, tools), self._rendered_or_nothing(fitted, tools)
        if wanted and wanted != text:
            raise Inexact(_NOT_ITS_OWN, _first_difference(wanted, text))

    def _with_own(self, message: Message, notes: dict[str, None]) -> Message:
        """A message with its author's role, content and keys; what cannot be kept is noted."""
        given = message[GIVEN]
        made = without_given([message])[0]
        if given["role"] != made["role"]:
            if made["role"] == "system" and self._takes(given["role"]):
                made["role"] = given["role"]
            else:
                notes[NOTE_ROLE] = None
        if not isinstance(given["content"], (str, type(None))):
            kinds = _kinds_of_parts(given["content"])
            if kinds and self._takes(made["role"], *kinds):
                made["content"] = given["content"]
                if not any(given.get(key) for key in REASONING_KEYS):
                    made.pop("reasoning_content", None)
            else:
                notes[NOTE_PARTS] = None
        is_thought = "reasoning_content" in made
        said = {*(REASONING_KEYS if is_thought else ()), *(_CALL_KEYS if made.get("tool_calls") else ())}
        made |= {key: value for key, value in given.items() if key not in {*made, *said} and value is not None}
        return made

    def _takes(self, role: str, *kinds: str) -> bool:
        """Whether the template writes a message of this role, with content in parts of these types."""
        asked = (role, *kinds)
        if asked not in self._taken:
            words = [f"part{number}q" for number in range(len(kinds))] or ["part0q"]
            parts = [_part(kind, word) for kind, word in zip(kinds, words, strict=False)]
            message = {"role": role, "content": parts or words[0]}
            question, reply = _PLAIN
            before: list[Message] = {"assistant": [question], "tool": [*_CALLING[:2]]}.get(role, [])
            after: list[Message] = {"assistant": [], "tool": [], "user": [reply]}.get(role, [*_PLAIN])
            turns = [*before, {**_CALLING[2], **message} if role == "tool" else message, *after]
            with contextlib.suppress(RenderError, Inexact):
                text = self._render(self.habits, self._fitted(turns, (), self.habits).messages)
                self._taken[asked] = all(word in text for word in words) and not _PART_KEY.search(text)
        return self._taken.setdefault(asked, False)

    def _writes_names(self, habits: Habits, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether the names of all calls are written, seen by marks on them; raises RenderError."""
        count = itertools.count()

        def mark(text: str, index: int, kind: Kind) -> str:
            return f"{text}{_SALT}{next(count)}q" if kind == "name" else text

        text = self._render(habits, [_mapped(message, 0, mark) for message in messages], tools=tools)
        return all(f"{_SALT}{number}q" in text for number in range(next(count)))

    def find(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Found:
        """The text of a conversation, a fitted one, and the exact spans of its assistant turns.

        Raises:
            Inexact: the template refuses the row, drops or rewrites something of it, or cannot be verified on it.
        """
        try:
            text = self.rendered(messages, tools)
        except RenderError as error:
            raise Inexact(REFUSED, str(error)) from error
        shape = None if tools else self._shape(messages)
        if shape is None:
            return self._verified(text, messages, tools)
        if shape not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._of_shape(messages)
        skeleton = self._shapes[shape]
        if skeleton is None:
            return self._verified(text, messages, tools)
        pieces = [stripped for message in messages if (stripped := message["content"].strip())]
        expected, begins = skeleton.fill(pieces)
        if expected != text:
            return self._verified(text, messages, tools)
        return self._found(skeleton, text, begins)

    def _of_shape(self, messages: Sequence[Message]) -> Skeleton | None:
        """The skeleton of plain rows of this shape; None where they have none or may differ from one another."""
        try:
            skeleton = self._skeleton(messages, ())[0]
        except Inexact:
            return None
        copy = adapted(self._marked_copy(messages)[0], self.habits)
        looks = self.template.looks_into(_SALT, copy) or any(
            self.template.looks_into(_SALT, copy[: turn.message], prompt=True) for turn in skeleton.turns
        )
        return None if looks else skeleton

    def _shape(self, messages: Sequence[Message]) -> Any:
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

    def _verified(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> Found:
        """The turns by a marked copy of this very row, and by its own prompts."""
        skeleton, pieces = self._skeleton(messages, tools)
        expected, begins = skeleton.fill([piece.text for piece in pieces])
        if expected != text:
            raise Inexact(
                "the chat template treats the row otherwise than its marked copy, so its turns cannot be told",
                _first_difference(expected, text),
            )
        found = self._found(skeleton, text, begins)
        self._confirm(found, skeleton, messages, tools)
        return found

    def _confirm(self, found: Found, skeleton: Skeleton, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Raise Inexact unless the row's own prompts are what its turns begin behind."""
        for turn in skeleton.turns:
            if turn.message not in found.spans:
                continue
            start, end = found.spans[turn.message]
            prompt = self._prompt(self.habits, messages[: turn.message], tools)
            if prompt is None and not turn.message:
                prompt = ""
            if prompt is None or prompt + turn.header != found.text[:start]:
                raise Inexact(OTHER_PROMPT, f"messages[{turn.message}]")
            if turn.by_prefix and not self.habits.markers:
                own = self._rendered_or_nothing(messages[: turn.message + 1], tools)
                if own != found.text[:end]:
                    raise Inexact(_NO_END, f"messages[{turn.message}]")

    def _found(self, skeleton: Skeleton, text: str, begins: Sequence[int]) -> Found:
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
        method = self._method(skeleton, spans, inexact)
        return Found(text + skeleton.added, spans, inexact, nearest, method, len(skeleton.stripped), skeleton.added)

    def _method(self, skeleton: Skeleton, spans: dict[int, Span], inexact: dict[int, Turn]) -> Method:
        if inexact:
            return "last_turn" if spans else "inexact"
        if skeleton.marks_agree:
            return "generation"
        if any(turn.by_next for turn in skeleton.turns):
            return "next_turn"
        return "prefix" if all(turn.by_prefix for turn in skeleton.turns) else "marker"

    def _prompt(self, habits: Habits, before: Sequence[Message], tools: Sequence[Any]) -> str | None:
        try:
            return self._render(habits, before, tools=tools, prompt=True)
        except RenderError:
            return None

    def _skeleton(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Skeleton, list[Piece]]:
        copy, pieces = self._marked_copy(messages)
        try:
            text = self.rendered(copy, tools)
        except RenderError as error:
            raise Inexact("the chat template refuses a copy of the row with marks in it", str(error)) from error
        self._check_other_copy(copy, text, tools)
        gaps, order, broken = _take_apart(text, pieces)
        written = {number for number, _ in order}
        stripped = self._judge_pieces(messages, pieces, written, broken, text)
        places = _Places(text, gaps, order, pieces)
        turns = tuple(
            self._turn(places, copy, index, tools)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        agree = self.template.has_generation and self._marks_agree(places, turns, copy, tools)
        return Skeleton(tuple(gaps), tuple(order), turns, stripped, agree), pieces

    def _check_other_copy(self, copy: Sequence[Message], text: str, tools: Sequence[Any]) -> None:
        """Raise Inexact where a copy with other sentinels is rendered otherwise."""
        other = [_mapped(message, index, _with_other_sentinels) for index, message in enumerate(copy)]
        again = _OTHER_SENTINEL.sub(_first_sentinel, self._rendered_or_nothing(other, tools))
        if again != text:
            raise Inexact("the chat template rewrites a text or takes it apart", _first_difference(text, again))

    def _marks_agree(
        self, places: _Places, turns: Sequence[Turn], copy: Sequence[Message], tools: Sequence[Any]
    ) -> bool:
        """Whether `{% generation %}` marks begin where the turns begin and end with them or in white space behind."""
        text, marks = self.template.render_marked(adapted(copy, self.habits), tools=tools)
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
            for salt in (_SALT, _OTHER_SALT):
                if salt in text:
                    raise Inexact("a text holds the mark that turns are found by", f"messages[{index}]: {salt}")
            made: list[str] = []
            at = 0
            for begin, end, is_think in _pieces(text, self._split if kind in ("content", "reasoning") else None):
                number = len(pieces)
                pieces.append(Piece(index, kind, text[begin:end], is_think or kind == "reasoning"))
                self._check_between(text[at:begin], index)
                made += (text[at:begin], f"{_SALT}{number:05d}b", text[begin:end], f"{_SALT}{number:05d}e")
                at = end
            self._check_between(text[at:], index)
            return "".join((*made, text[at:]))

        copy = [_mapped(message, index, mark) for index, message in enumerate(messages)]
        if len(pieces) > _MAX_PIECES:
            raise Inexact("a row has too many texts", f"{len(pieces):,}")
        return copy, pieces

    def _check_between(self, text: str, index: int) -> None:
        """Raise Inexact where a text that is no piece, since the template looks for it, could pass for an end."""
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
        """Numbers of think pieces that are not written; raises Inexact for what else is missing or rewritten."""
        last = {piece.message: number for number, piece in enumerate(pieces) if piece.kind == "content"}
        stripped = []
        for number, piece in enumerate(pieces):
            role = messages[piece.message]["role"]
            where = f"messages[{piece.message}]"
            if number in broken and piece.kind == "arguments":
                raise Inexact("the chat template encodes the text of a tool call's arguments once more", where)
            if number in broken:
                raise Inexact(f"the chat template rewrites {_A[role]} text", where)
            if number in written:
                continue
            if piece.kind == "name" and _is_told_by_id(messages[piece.message], piece.text, text):
                continue
            if piece.kind in ("name", "argument", "arguments"):
                raise Inexact("the chat template drops a tool call", f"{where}: {one_line(piece.text, limit=60)}")
            is_think = piece.is_think and number != last.get(piece.message)
            if role != "assistant" or not is_think:
                raise Inexact(self._dropped(role), where)
            stripped.append(number)
        return tuple(stripped)

    def _dropped(self, role: str) -> str:
        if role in ("system", "developer"):
            return (
                "the chat template drops the system prompt (data.system_into_user=true puts it before the first "
                "user turn)"
            )
        return f"the chat template drops {_A[role]} text"

    def _turn(self, places: _Places, copy: Sequence[Message], index: int, tools: Sequence[Any]) -> Turn:
        """One assistant turn of the marked copy."""
        try:
            prompt = self.rendered(copy[:index], tools, prompt=True)
        except RenderError as error:
            if index:
                return Turn(index, reason="the chat template cannot render the prompt of a turn", detail=str(error))
            prompt = ""  # many look into a first message that is not there
        common = _common(prompt, places.text)
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
            detail = f"messages[{index}]: the prompt goes on with {one_line(repr(prompt[common:][:40]))}"
            return Turn(index, reason=OTHER_PROMPT, detail=detail, nearest=nearest, added=end.added)
        problem = places.problem(index, begin, places.position(end.place))
        if problem:
            return Turn(index, reason=problem, detail=f"messages[{index}]")
        header = places.text[common:begin]
        return Turn(index, start, end.place, end.by_prefix, end.by_next, end.added, header)

    def _unasked_start(
        self,
        places: _Places,
        copy: Sequence[Message],
        index: int,
        tools: Sequence[Any],
        *,
        after: int,
        first: int | None,
    ) -> int | None:
        """Where a turn begins that follows neither a question nor a tool's result; None where it cannot be told.

        Templates may prompt behind a question only, and write a header before the turn all the same. So it begins as
        it would behind a question: that much before its first piece.
        """
        if first is None:
            return None
        asked = [*copy[:index], _NEXT_QUESTION]
        try:
            prompt, whole = self.rendered(asked, tools, prompt=True), self.rendered([*asked, *copy[index:]], tools)
        except RenderError:
            return None
        at = whole.find(places.text[first : first + _SENTINEL_CHARS], len(prompt))
        gap = whole[len(prompt) : at]
        begin = first - len(gap)
        known = whole.startswith(prompt) and at >= 0 and _SALT not in gap
        return begin if known and begin >= after and places.text[begin:first] == gap else None

    def _turn_end(
        self, places: _Places, copy: Sequence[Message], index: int, tools: Sequence[Any], *, after: int, is_text: bool
    ) -> _TurnEnd:
        """Where a turn ends whose last piece ends at `after`, and whether its own rendering ends there too."""
        limit = places.next_piece(after)
        own = self._rendered_or_nothing(copy[: index + 1], tools)
        until = len(own) if own and places.text.startswith(own) and after <= len(own) <= limit else None
        is_last = index + 1 == len(copy)
        written = places.text[after:limit]
        own_tail = own[after:] if until is not None else _behind(own, places.text, after)
        following = self._continued(places, copy, tools, after=after) if is_last else written
        end = self._end_of(own_tail, following, is_last=is_last, is_text=is_text)
        if end is not None and end.by_next and not is_last:
            end = end if _last_atom(end.text, self._special) in self.habits.next_openers else None
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

    def _continued(self, places: _Places, copy: Sequence[Message], tools: Sequence[Any], *, after: int) -> str | None:
        """What stands behind the last piece of the last turn when the conversation goes on; None where it cannot."""
        calls = copy[-1].get("tool_calls") or []
        result = {"role": "tool", "content": _NEXT_QUESTION["content"]}
        if calls:
            result |= {"name": calls[-1]["function"]["name"], "tool_call_id": str(calls[-1].get("id") or "")}
        for following in (result, _NEXT_QUESTION) if calls else (_NEXT_QUESTION,):
            whole = self._rendered_or_nothing([*copy, following], tools)
            tail = _behind(whole, places.text, after) if whole else None
            if tail is not None and following["content"] in tail:
                return tail.partition(following["content"])[0]
        return None

    def _rendered_or_nothing(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        try:
            return self.rendered(messages, tools)
        except RenderError:
            return ""


@dataclass(frozen=True)
class _End:
    """What ends a turn: `text` is what stands behind its last piece, through its end."""

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


def _behind(other: str, text: str, after: int) -> str | None:
    """What `other` has behind the place that is `after` in `text`, the end of a piece; None where it has no such."""
    last = text.rfind(_SALT, 0, after)
    if last < 0 or text[last:after] not in other:
        return None
    return other[other.rfind(text[last:after]) + after - last :]


def _shared(own: str, following: str, special: Sequence[str]) -> str:
    """The common beginning of two texts, with no control token cut in two."""
    size = _common(own, following)
    for text in (own, following):
        for at, atom in _atom_places(text, special):
            if at < size < at + len(atom):
                size = at
    return own[:size]


_A = {
    **dict.fromkeys(("system", "developer"), "a system prompt's"),
    "user": "a user turn's",
    "assistant": "an assistant's",
    "tool": "a tool's",
}
_NOT_ITS_OWN = "the row is rendered otherwise than apply_chat_template renders its own messages"
_ENTITIES = "the chat template writes HTML entities in an assistant's turn"
_NO_END = "the chat template writes no end of turn behind a turn"
_MAX_SHAPES = 20_000
_LONGEST_MARKER = 40

_PART_KEY = re.compile(r"""['"]type['"]""")
"""A template that writes a part's key takes the list of parts for the text."""

_PLAIN: list[Message] = [{"role": "user", "content": "question1q"}, {"role": "assistant", "content": "answer1q"}]
_ANSWER: Message = {"role": "assistant", "content": "answer2q"}
_ODD_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
"""Arguments that come out otherwise wherever a template escapes, encodes twice, or writes Python for JSON."""
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

_ATOM = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>|\[/?[A-Z_]{2,20}\]"
    r"|</?[A-Za-z_][^<>\s]{0,40}>"
)
"""Texts that look like control tokens, for templates whose tokens this tokenizer does not have."""
_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|<\|[A-Za-z_]{1,40}>|<[A-Za-z_]{1,40}\|>")
"""Those that no tag of a markup language looks like."""
_TAG = re.compile(r"(?!</s>)</?[A-Za-z_][^<>\s|]{0,40}>")
"""What may be a tag of a markup language."""
_CLOSES = re.compile(r"/|end|suffix|close|stop|^<\w+\|>$", re.IGNORECASE)
"""Marks behind think text."""
_ENDER = re.compile(r"end|eot|eos|eom|return|stop|sep\b|<turn\||^</s>$|\bcall\|>", re.IGNORECASE)


def _atoms(text: str, special: Sequence[str]) -> list[str]:
    """Control tokens in a text, in order: the tokenizer's own, and what looks like one."""
    return [atom for _, atom in _atom_places(text, special)]


def _last_atom(text: str, special: Sequence[str]) -> str:
    return next(reversed(_atoms(text, special)), "")


def _atom_places(text: str, special: Sequence[str]) -> list[tuple[int, str]]:
    """Where control tokens begin in a text."""
    found = {(match.start(), match.group()) for match in _ATOM.finditer(text)}
    for token in special:
        at = text.find(token)
        while at >= 0:
            found.add((at, token))
            at = text.find(token, at + 1)
    ordered: list[tuple[int, str]] = []
    covered = 0
    for at, token in sorted(found, key=lambda item: (item[0], -len(item[1]))):
        if at >= covered:
            ordered.append((at, token))
            covered = at + len(token)
    return ordered


def _between(text: str, first: str, second: str) -> str:
    return text.partition(first)[2].partition(second)[0]


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    if second.startswith(first):
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first_difference(expected: str, text: str) -> str:
    at = _common(expected, text)
    return f"at character {at + 1}: {one_line(repr(text[max(0, at - 20) : at + 40]), limit=90)}"


def _replace(habits: Habits, **changes: Any) -> Habits:
    return dataclasses.replace(habits, **changes)


def _splitter(tested: frozenset[str]) -> re.Pattern[str] | None:
    """A pattern of what the template looks for in texts; None where it looks for nothing."""
    if not tested:
        return None
    return re.compile("|".join(re.escape(text) for text in sorted(tested, key=lambda text: (-len(text), text))))


def _pieces(text: str, split: re.Pattern[str] | None) -> Iterator[tuple[int, int, bool]]:
    """The text between what the template looks for, without white space at the ends, and whether it is think text."""
    marks = [(match.start(), match.end(), match.group()) for match in split.finditer(text)] if split else []
    at, before = 0, ""
    for begin, end, after in (*marks, (len(text), -1, "")):
        inner = text[at:begin]
        body = inner.strip()
        if body:
            first = at + inner.find(body)
            yield first, first + len(body), _is_think(body, before, after)
        at, before = end, after


def _is_think(text: str, before: str, after: str) -> bool:
    """Whether a text between two marks, such as `<think>` and `</think>`, is think text: it begins the message or
    stands behind an opening mark, and a closing one follows. A text between two closing ones is part of the answer."""
    if not _CLOSES.search(after) or _CLOSES.search(before):
        return False
    opening = after.replace("/", "", 1).replace("END", "START").replace("end", "start")
    return opening == after or opening not in text[1:]


def _with_other_sentinels(text: str, *_: Any) -> str:
    return _SENTINEL.sub(lambda found: _OTHER_SALT + (found.group(1) + found.group(2)).translate(_TO_OTHER), text)


def _first_sentinel(found: re.Match[str]) -> str:
    return _SALT + (found.group(1) + found.group(2)).translate(_FROM_OTHER)


_CALL_KEYS = ("tool_calls", "function_call")
_KNOWN_KEYS = frozenset({"role", "tool_calls", "name", "tool_call_id", "call_id", "train", *TEXT_KEYS})
_PART_TEXTS = ("text", *REASONING_KEYS)
"""Keys of a part of content under which its text stands."""


def _kinds_of_parts(content: Any) -> list[str]:
    """The types of a list of parts that are text or think text; empty for anything else."""
    parts = content if isinstance(content, list) else []
    kinds = [str(part.get("type")) if isinstance(part, dict) else "" for part in parts]
    plain = all(
        kind in ("text", "thinking", "reasoning") and isinstance(part.get("text" if kind == "text" else kind), str)
        for kind, part in zip(kinds, parts, strict=True)
    )
    return kinds if plain else []


def _part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, kind: text}


def _mapped_part(part: dict[str, Any], index: int, change: Callable[[str, int, Kind], str]) -> dict[str, Any]:
    kinds: dict[str, Kind] = {key: "content" if key == "text" else "reasoning" for key in _PART_TEXTS}
    return {
        key: change(value, index, kinds[key]) if key in kinds and isinstance(value, str) else value
        for key, value in part.items()
    }


def _mapped(message: Message, index: int, change: Callable[[str, int, Kind], str]) -> Message:
    """A copy of the message with every text changed, think text before content, calls last."""
    made = dict(message)
    for key in TEXT_KEYS:
        if isinstance(made.get(key), str):
            made[key] = change(made[key], index, "content" if key == "content" else "reasoning")
    if isinstance(made.get("content"), list):
        made["content"] = [_mapped_part(part, index, change) for part in made["content"]]
    if made.get("tool_calls"):
        made["tool_calls"] = [_mapped_call(call, index, change) for call in made["tool_calls"]]
    return made


def _mapped_call(call: dict[str, Any], index: int, change: Callable[[str, int, Kind], str]) -> dict[str, Any]:
    function = call["function"]
    name = change(function["name"], index, "name")
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    arguments = change(arguments, index, "arguments") if is_text else _mapped_value(arguments, index, change)
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _mapped_value(value: Any, index: int, change: Callable[[str, int, Kind], str]) -> Any:
    if isinstance(value, str):
        return change(value, index, "argument")
    if isinstance(value, dict):
        return {key: _mapped_value(item, index, change) for key, item in value.items()}
    return [_mapped_value(item, index, change) for item in value] if isinstance(value, list) else value


def adapted(messages: Sequence[Message], habits: Habits) -> list[Message]:
    """The messages with their content as the template takes it, and without what is none of a template's business."""
    made = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "train"}
        if habits.parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        made.append(message)
    return made


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """The messages with their calls in a form."""
    made = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [_call_in_form(call, form) for call in calls]}
            if form.content != "own" and not message.get("content"):
                message["content"] = "" if form.content == "empty" else None
        for key in ("tool_call_id", "call_id") if form.short_ids else ():
            if isinstance(message.get(key), str):
                message = {**message, key: _short_id(message[key])}
        made.append(message)
    return made


def _call_in_form(call: dict[str, Any], form: CallForm) -> dict[str, Any]:
    made = {**call, "type": "function"} if form.typed and not call.get("type") else call
    if form.short_ids:
        made = {**made, "id": _short_id(str(call.get("id") or call["function"]["name"]))}
    return made


def _with_form(messages: Sequence[Message], kind: ArgumentForm) -> list[Message]:
    """The messages with the arguments of all calls as objects or as JSON text."""
    return [
        {**message, "tool_calls": [_with_call_form(call, kind) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_call_form(call: dict[str, Any], kind: ArgumentForm) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if kind == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif kind == "object" and isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _objects_in(text: str) -> Iterator[Any]:
    """The JSON objects that stand in a text, those inside of others too."""
    for found in re.finditer(r"\{", text):
        with contextlib.suppress(ValueError):
            yield json.JSONDecoder().raw_decode(text, found.start())[0]


def _told(before: Sequence[Message], after: Sequence[Message]) -> Fitted:
    """The fitted messages with what was changed, in words."""
    notes: dict[str, None] = {}
    for old, new in zip(before, after, strict=True):
        if old.get("content") != new.get("content"):
            notes[NOTE_CONTENT] = None
        if old.get("tool_call_id") != new.get("tool_call_id") or old.get("call_id") != new.get("call_id"):
            notes[NOTE_SHORT_IDS] = None
        for was, now in zip(old.get("tool_calls") or (), new.get("tool_calls") or (), strict=True):
            given, taken = was["function"]["arguments"], now["function"]["arguments"]
            if isinstance(given, str) != isinstance(taken, str):
                notes[OBJECT_FOR_TEXT if isinstance(given, str) else TEXT_FOR_OBJECT] = None
            if was.get("type") != now.get("type"):
                notes[NOTE_TYPED] = None
            if was.get("id") != now.get("id"):
                notes[NOTE_SHORT_IDS] = None
    return Fitted(after, tuple(notes))


def _short_id(given: str) -> str:
    """Nine letters and digits, the same for the same id."""
    plain = given if given.isalnum() and given.isascii() else ""
    return plain if len(plain) == 9 else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _take_apart(text: str, pieces: Sequence[Piece]) -> tuple[list[str], list[tuple[int, str]], set[int]]:
    """A rendered copy as gaps and written pieces; `broken` are numbers of pieces that are written otherwise."""
    gaps: list[str] = []
    order: list[tuple[int, str]] = []
    broken: set[int] = set()
    at = 0
    open_number, open_end = -1, 0
    for match in _SENTINEL.finditer(text):
        number, side = int(match.group(1)), match.group(2)
        if number >= len(pieces):
            continue
        if side == "b":
            if open_number >= 0:
                broken.add(open_number)
            gaps.append(text[at : match.start()])
            open_number, open_end = number, match.end()
            continue
        if number != open_number:
            broken.add(number)
            continue
        inner = text[open_end : match.start()]
        forms = _FORMS if pieces[number].kind != "arguments" else {"plain": _FORMS["plain"]}  # encoded once, not twice
        form = next((name for name, form in forms.items() if form(pieces[number].text) == inner), None)
        if form is None:
            broken.add(number)
        order.append((number, form or "plain"))
        at, open_number = match.end(), -1
    if open_number >= 0:
        broken.add(open_number)
    gaps.append(text[at:])
    return gaps, order, broken


class _Places:
    """Positions in a rendered copy, sentinels and all, and what stands where."""

    def __init__(
        self, text: str, gaps: Sequence[str], order: Sequence[tuple[int, str]], pieces: Sequence[Piece]
    ) -> None:
        self.text = text
        self._bounds: list[Span] = []
        """Where each gap stands in the copy."""
        self._parts: list[tuple[int, int, int]] = []
        """Number, begin and end of each written piece, sentinels included."""
        self._pieces = pieces
        at, sentinel = 0, _SENTINEL_CHARS
        for position, gap in enumerate(gaps):
            self._bounds.append((at, at + len(gap)))
            at += len(gap)
            if position < len(order):
                number, form = order[position]
                size = len(_FORMS[form](pieces[number].text)) + 2 * sentinel
                self._parts.append((number, at, at + size))
                at += size

    def place(self, position: int) -> Place | None:
        """The gap that holds the position; None inside a piece."""
        found = bisect.bisect_right(self._bounds, (position, len(self.text) + 1)) - 1
        begin, end = self._bounds[found]
        return Place(found, position - begin) if begin <= position <= end else None

    def position(self, place: Place) -> int:
        """Where a place is in the copy."""
        return self._bounds[place.gap][0] + place.offset

    def extent(self, message: int, start: int) -> tuple[int | None, int | None, Kind | None]:
        """Where the message's pieces begin and end from `start` on, and the kind of the last one; repetitions of a
        piece do not count. Nones where none is written."""
        first: int | None = None
        last: tuple[int | None, Kind | None] = (None, None)
        seen: set[int] = set()
        for number, begin, end in self._parts:
            piece = self._pieces[number]
            if piece.message != message or begin < start or number in seen:
                continue
            seen.add(number)
            first = begin if first is None else first
            last = (end, piece.kind)
        return first, *last

    def tells_end(self, message: int, count: int) -> bool:
        """Whether the turn and the message behind it are written with texts of their own, so that what stands between
        them is the turn's end or the other's beginning."""
        written = {self._pieces[number].message for number, _, _ in self._parts}
        return message in written and (message + 1 in written or message + 1 == count)

    def next_piece(self, position: int) -> int:
        """Where the next piece begins at or behind the position; the text's end where there is none."""
        return next((begin for _, begin, _ in self._parts if begin >= position), len(self.text))

    def problem(self, message: int, start: int, end: int) -> str:
        """Why [start, end) is not exactly the message's turn; empty where it is."""
        inside = {number for number, begin, stop in self._parts if start <= begin and stop <= end}
        for number, begin, stop in self._parts:
            piece = self._pieces[number]
            if piece.message == message:
                repeats_a_name = piece.kind == "name" and number in inside
                if not (start <= begin and stop <= end) and not repeats_a_name:
                    return "the chat template writes a part of a turn outside of it"
            elif begin < end and stop > start:
                return "the chat template writes another turn's text inside a turn"
        return ""
