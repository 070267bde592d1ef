"""The judge of `make mask-score`: whether the trained characters of a conversation are its assistant turns, no more and
no less.

It knows nothing of how masks are found. Every message of a case has words that stand nowhere else, transformers renders
the case, and the characters say the rest:

- a turn begins behind the prompt that it is generated after, so a role header is never part of it; where the prompt
  goes on otherwise than the text, behind what both have in common after the last message;
- it holds every word of its own that is written, and no other message's;
- it ends with what stands behind its last word whatever follows (nothing, a question, a tool's result), through the
  last control token there; where the template closes no turn, with the token that opens the next one.
"""

import copy
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.masks.sandbox import EndlessTemplateError, RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.log import one_line

Message = dict[str, Any]
UNTRAINED = -100
"""The label of a token that is not trained (torch's convention)."""
NOTHING_ENDS = "the template writes nothing behind a turn that could end it"
NEXT_WORD = "ostrelvand"
"""The word of a message that a case does not have."""
# Control tokens as templates spell them, whatever the tokenizer that scores them knows: <|im_end|>, [/INST],
# <end_of_turn>, <｜Assistant｜>, </s>, …
_CONTROL = (
    r"<｜[^<>｜]{1,60}｜>|<\|[^<>|]{1,60}\|>|<\|\w{1,60}>|<\w{1,60}\|>|\[/?[A-Z_]{2,}\]|\[\|[^|\[\]]{1,60}\|\]|\[e~\["
    r"|\]~!?b[\[\]]|</?[A-Za-z_][^<>\s]{0,60}>"
)
_THINK = re.compile("think|thought|channel", re.IGNORECASE)


@dataclass(frozen=True)
class MaskCase:
    """A conversation in which every message has words of its own; `needed` ones must be written."""

    name: str
    messages: tuple[Message, ...]
    words: tuple[tuple[str, ...], ...]
    needed: tuple[str, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True)
class JudgedMask:
    """What is judged: a text, its tokens and their labels, both of shape [T]; `partial` where turns are left out."""

    text: str
    input_ids: Sequence[int]
    labels: Sequence[int]
    partial: bool = False


class Renderings:
    """A case in every form that a template may want, by transformers itself.

    transformers has no limits: `limited` is asked first, and what does not end there is not begun here.
    """

    def __init__(self, case: MaskCase, tokenizer: Any, limited: ChatTemplate) -> None:
        self._case, self._tokenizer, self._limited = case, tokenizer, limited
        self._is_endless = False
        self.why = ""
        self.written: dict[str, list[Message]] = {}
        """Texts that hold all that is needed, and the messages in their form."""
        for messages in _forms(case.messages):
            text = self.text(messages)
            if text is None:
                continue
            missing = [word for word in case.needed if word not in text]
            if missing:
                self.why = self.why or f"the template does not write {missing[0]}"
            else:
                self.written.setdefault(text, messages)

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        """What transformers renders; None where the template refuses it."""
        if not self._ends(messages, prompt=prompt):
            return None
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(self._case.tools) or None, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # whatever a template raises
            self.why = self.why or one_line(str(error), limit=200)
            return None
        return str(text)

    def _ends(self, messages: Sequence[Message], *, prompt: bool) -> bool:
        if self._is_endless:
            return False
        try:
            self._limited.render(messages, tools=self._case.tools, with_prompt=prompt)
        except EndlessTemplateError as error:
            self.why, self._is_endless = self.why or str(error), True
        except RenderError:
            pass  # what it refuses here it refuses there too, and says why
        return not self._is_endless


def _forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages with content as text or parts, arguments as object or text, and without content beside calls."""
    for as_parts, as_text, without in itertools.product((False, True), repeat=3):
        made = copy.deepcopy(list(messages))
        for message in made:
            for call in message.get("tool_calls", ()):
                if as_text:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            if without and message.get("tool_calls"):
                message["content"] = None
            elif as_parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
        yield made


def find_mask_problem(case: MaskCase, mask: JudgedMask, renderings: Renderings, tokenizer: Any) -> str:
    """What is wrong with a mask; empty where it is exact, NOTHING_ENDS where it is and its answers end with nothing."""
    rendered = max((text for text in renderings.written if mask.text.startswith(text)), key=len, default=None)
    if rendered is None:
        return "the text is not what transformers renders"
    if _spelled(mask.text, tokenizer) != _decoded(mask.input_ids, tokenizer):
        return "the tokens do not spell the text"
    if any(label not in (UNTRAINED, token) for label, token in zip(mask.labels, mask.input_ids, strict=True)):
        return "a label is not its token"
    turns = [index for index, message in enumerate(case.messages) if message["role"] == "assistant"]
    judge = _Judge(case, mask.text, rendered, renderings, tokenizer)
    wanted = [judge.turn(index) for index in turns]
    left, nothing_ends = list(wanted), False
    for first, last in _runs(mask.labels):
        begin, end = (_decoded(mask.input_ids[:at], tokenizer) for at in (first, last))
        turn = next((turn for turn in left if turn.start is not None and judge.spelled(turn.start) == begin), None)
        if turn is None:
            return f"a trained run begins where nothing would be generated: {end[len(begin) :][:30]!r}"
        left = left[left.index(turn) + 1 :]
        found = judge.words_problem(turn, end[len(begin) :]) or judge.end_problem(turn, end)
        if found:
            return f"messages[{turn.index}]: {found}"
        nothing_ends = nothing_ends or turn.is_open
    trained = sum(1 for _ in _runs(mask.labels))
    if not trained or (trained != len(turns) and not mask.partial):
        return f"{trained} of {len(turns)} turns are trained, and that is not said"
    if mask.text != rendered and not wanted[-1].is_added:
        return f"the text continues with {mask.text[len(rendered) :]!r}, which transformers does not render"
    return NOTHING_ENDS if nothing_ends else ""


@dataclass(frozen=True)
class _Turn:
    """Where a turn has to begin and may end, as characters of the text; `ends` is empty where no end can be right.

    `is_open`: it ends with nothing. `is_added`: its end stands behind what transformers renders.
    """

    index: int
    start: int | None
    ends: tuple[int, ...] = ()
    is_open: bool = False
    is_added: bool = False


class _Judge:
    """What the characters of one text say of its turns."""

    def __init__(self, case: MaskCase, text: str, rendered: str, renderings: Renderings, tokenizer: Any) -> None:
        self._case, self._text, self._rendered = case, text, rendered
        self._renderings, self._tokenizer = renderings, tokenizer
        self._messages = renderings.written[rendered]
        self._question = next(message for message in self._messages if message["role"] == "user")
        special = sorted(map(re.escape, tokenizer.all_special_tokens), key=len, reverse=True)
        self._control = re.compile("|".join((*special, _CONTROL)))
        self._header = ""
        self._answer_end = self._end_of_answer()
        self._opener = self._header_opening()

    def spelled(self, end: int) -> str:
        return _spelled(self._text[:end], self._tokenizer)

    def turn(self, index: int) -> _Turn:
        own = [word for word in self._case.words[index] if word in self._text]
        start = self._start(index, own)
        if start is None or not own:
            return _Turn(index, None)
        foreign = [at for word in self._others(index) for at in _find_word(self._text, word) if at >= start]
        limit = min(foreign, default=len(self._text))
        places = ((at, word) for word in own for at in _find_word(self._text, word))
        last = max((at + len(word) for at, word in places if start <= at < limit), default=0)
        if not last:
            return _Turn(index, start)
        return self._ended(index, start, last, self._text[last:limit])

    def _ended(self, index: int, start: int, last: int, behind: str) -> _Turn:
        """The turn with its ends; `behind` is what stands between its last word and the next message's first one."""
        is_last = index == len(self._messages) - 1
        turn = self._messages[: index + 1]
        word = max(self._case.words[index], key=lambda word: self._text.rfind(word, 0, last))
        # what the template writes behind the turn: where nothing follows, and where another message does
        alone = self._tail(turn, word)
        tails = [self._tail([*turn, more], word, NEXT_WORD) for more in self._more(index)]
        probed = [tail for tail in tails if tail is not None]
        going_on = probed if is_last else [*probed, behind]
        # what all of these begin with is the turn's own; where they part, the next message has begun
        always = self._headless(_common_prefix([*going_on, *([] if alone is None else [alone])]))
        spoken = self._text[start:last]
        ends = self._ends_in(always, spoken)
        if not ends and alone is not None and self._ends_in(self._headless(alone), spoken):
            # it is closed only at the end of a conversation, or by a message of another role: those are asked as well
            others = [{**self._more(index)[0], "role": role} for role in ("assistant", "system")]
            varied = [self._tail([*turn, more], word, NEXT_WORD) for more in others]
            history = _common_prefix([*going_on, *(tail for tail in varied if tail is not None)])
            ends = self._ends_in(self._headless(alone if is_last else history), spoken)
        elif not ends and self._answer_end and self._messages[index].get("tool_calls") and self._answer_end in behind:
            # a call may be written otherwise as history (with its id): what ends an answer ends it
            end = last + behind.find(self._answer_end) + len(self._answer_end)
            return _Turn(index, start, (end,), is_added=end > len(self._rendered))
        elif not ends and any(self._opened(always, tail) for tail in probed):
            # nothing closes it: generation stops at the token that opens the next message, so training has to end there
            fitting = [tail[: self._opened(always, tail)] for tail in (probed[-1:] if is_last else probed)]
            here = next((len(tail) for tail in fitting if tail and behind.startswith(tail)), 0)
            if is_last and behind[here:]:
                here = 0
            return _Turn(index, start, (last + here,) if here else (), is_added=is_last)
        elif not ends:
            words = len(always.rstrip())
            until = range(words, (words if words else len(always)) + 1)
            return _Turn(index, start, tuple(last + end for end in until), is_open=not words)
        return _Turn(index, start, tuple(last + end for end in ends))

    def _more(self, index: int) -> list[Message]:
        """What may follow a turn: a question, and a tool's result behind a call."""
        question = {**self._question, "content": _renamed(self._question["content"])}
        calls = self._messages[index].get("tool_calls")
        if not calls:
            return [question]
        result = {"role": "tool", "name": calls[0]["function"]["name"], "tool_call_id": calls[0].get("id")}
        return [question, {**result, "content": question["content"]}]

    def _tail(self, messages: Sequence[Message], word: str, until: str = "") -> str | None:
        """What stands behind the last place of a word, up to another one; None where either is not written."""
        text = self._renderings.text(messages)
        if text is None or word not in text:
            return None
        tail = text[text.rfind(word) + len(word) :]
        if not until:
            return tail
        return tail[: tail.find(until)] if until in tail else None

    def _start(self, index: int, own: Sequence[str]) -> int | None:
        """Where the turn would be generated; behind neither a question nor a result, as far before its first word as
        behind a question."""
        before = self._messages[:index]
        if index and before[-1]["role"] in ("user", "tool"):
            prompt = self._renderings.text(before, prompt=True)
            if prompt is not None and self._text.startswith(prompt):
                is_given = before[-1]["role"] == "tool" and self._text.startswith(self._header, len(prompt))
                return len(prompt) + (len(self._header) if is_given else 0)
            return None if prompt is None else self._parted(index, prompt, own)
        asked = [*before, {**self._question, "content": _renamed(self._question["content"])}]
        prompt = self._renderings.text(asked, prompt=True)
        whole = self._renderings.text([*asked, *self._messages[index:]])
        if prompt is None or whole is None or not own:
            return None
        behind = whole.partition(NEXT_WORD)[2]
        gap = behind[: min(behind.find(word) for word in own)]
        given = self._given(prompt.partition(NEXT_WORD)[2], gap)
        first = min(self._text.find(word) for word in own)
        if given is None or not self._text[:first].endswith(gap[given:]):
            return None
        return first - len(gap) + given

    def _parted(self, index: int, prompt: str, own: Sequence[str]) -> int | None:
        """Where a turn begins whose prompt goes on otherwise: behind what prompt and text have in common behind the
        last word before the turn."""
        firsts = [at for word in own for at in _find_word(self._text, word)]
        word = max(self._case.words[index - 1], key=prompt.rfind)
        last = self._text.rfind(word, 0, min(firsts, default=0))
        if last < 0 or word not in prompt:
            return None
        last += len(word)
        tail = prompt[prompt.rfind(word) + len(word) :]
        given = self._given(tail, self._text[last : min(firsts)])
        # no more is given than a plain answer has of it: think text that is there is generated, its opening mark too
        plain = self._tail([*self._messages[:index], {"role": "assistant", "content": NEXT_WORD}], word, NEXT_WORD)
        return None if given is None or plain is None else last + min(given, len(_common_prefix([tail, plain])))

    def _given(self, tail: str, gap: str) -> int | None:
        """How much of a gap before a turn's first word its prompt gives; None where more of a header follows."""
        given = len(_common_prefix([tail, gap]))
        ahead, rest = gap[given:], tail[given:]
        if self._opener and self._opener in ahead:
            return None
        # marks of think text are part of the turn: a prompt may have `<think></think>` where the turn has `</think>`
        header = {found.group() for found in self._control.finditer(rest) if not _THINK.search(found.group())}
        return None if header.intersection(found.group() for found in self._control.finditer(ahead)) else given

    def _header_opening(self) -> str:
        """What opens the header of any message, from its control token on; empty where the prompt writes no header."""
        asked = self._messages[: self._messages.index(self._question) + 1]
        plain, prompt = self._renderings.text(asked), self._renderings.text(asked, prompt=True)
        if plain is None or prompt is None or not prompt.startswith(plain):
            return ""
        if prompt == plain:  # it writes the next header always: what opened the question opens the answer
            alone = self._renderings.text([self._question]) or ""
            before, _, behind = alone.rpartition(max(_words(self._question["content"]), key=len))
            tokens = (found.group() for found in self._control.finditer(before))
            # what ends an answer may end a system prompt and the question too, and opens nothing
            return next((token for token in tokens if token in behind and token != self._answer_end), "")
        self._header = prompt[len(plain) :]
        found = self._control.match(self._header.lstrip())
        if not found:
            return ""
        # `<|open|>` opens parts of a turn too where the role stands behind it: what roles have in common belongs to it
        at = plain.rfind(found.group(), 0, plain.rfind(max(_words(self._question["content"]), key=len)))
        if at < 0:
            return found.group()
        return max(found.group(), _common_prefix([self._header.lstrip(), plain[at:]]), key=len)

    def _end_of_answer(self) -> str:
        """The first control token behind a plain answer, whether it stands alone or a question follows."""
        said = [self._question, {"role": "assistant", "content": _renamed(self._question["content"])}]
        texts = [self._renderings.text(more) or "" for more in (said, [*said, self._question])]
        tails = [text.rpartition(NEXT_WORD)[2] for text in texts]
        tokens = (found.group() for tail in tails for found in self._control.finditer(tail))
        return next(tokens, "")

    def _headless(self, tail: str) -> str:
        at = tail.find(self._opener) if self._opener else -1
        return tail if at < 0 else tail[:at]

    def _ends_in(self, tail: str, spoken: str) -> list[int]:
        """Where a turn may end in a tail: behind its last control token, or an earlier one at which generation stops
        already."""
        tokens = []
        for found in self._control.finditer(tail):
            if found.group() == self._answer_end or not _closes_part(found.group(), spoken + tail[: found.start()]):
                tokens.append(found)
        if not tokens:
            return []
        last = tokens[-1].group()
        return [next(found.end() for found in tokens if found.group() in (self._tokenizer.eos_token, last))]

    def _opened(self, always: str, tail: str) -> int:
        """Where the control token ends that opens the next message right behind a turn; 0 where there is none."""
        closed = len(always.rstrip())
        rest = tail[closed:]
        found = self._control.match(rest.lstrip())
        token = found.group() if found else ""
        is_known = token in self._tokenizer.all_special_tokens or re.search("[|｜]", token)
        if not found or not (is_known or (not closed and token[1] != "/")):
            return 0
        return closed + len(rest) - len(rest.lstrip()) + found.end()

    def _others(self, index: int) -> list[str]:
        return [word for other, words in enumerate(self._case.words) if other != index for word in words]

    def words_problem(self, turn: _Turn, run: str) -> str:
        """Which words a run has that are another message's, or lacks of its own."""
        strange = [word for word in self._others(turn.index) if word in run]
        if strange:
            return f"it holds {strange[0]!r} of another message"
        assert turn.start is not None
        written = self._text[turn.start :]
        missing = [word for word in self._case.words[turn.index] if word in written and word not in run]
        return f"it lacks {missing[0]!r}" if missing else ""

    def end_problem(self, turn: _Turn, spelled: str) -> str:
        """What is wrong with where a run ends; `spelled` is the text through its end."""
        if any(self.spelled(end) == spelled for end in turn.ends):
            return ""
        if not turn.ends:
            return f"nothing ends it there: {spelled[-30:]!r}"
        return f"it ends with {spelled[-30:]!r}, not with {self.spelled(turn.ends[0])[-30:]!r}"


def _words(content: Any) -> list[str]:
    return str(content if isinstance(content, str) else content[0]["text"]).split()


def _closes_part(token: str, before: str) -> bool:
    """Whether it is a tag of a markup language that opens a part of the turn or closes one."""
    if not re.fullmatch(r"</?[A-Za-z_][^<>\s|]*>", token):
        return False
    return f"<{token[2:-1]}" in before if token[1] == "/" else not re.search("end|eo[sta]|sep|turn", token)


def _renamed(content: Any) -> Any:
    return [{"type": "text", "text": NEXT_WORD}] if isinstance(content, list) else NEXT_WORD


def _common_prefix(texts: Sequence[str]) -> str:
    """The common beginning of texts, with no control token cut in two."""
    if not texts:
        return ""
    low, high = min(texts), max(texts)  # all others lie between: what these two share, all of them share
    size = next((at for at, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    cut = [m.start() for text in texts for m in re.finditer(_CONTROL, text) if m.start() < size < m.end()]
    return low[: min([size, *cut])]


def _find_word(text: str, word: str) -> Iterator[int]:
    return (found.start() for found in re.finditer(re.escape(word), text))


def _spelled(text: str, tokenizer: Any) -> str:
    """The text as its own tokens spell it: some tokenizers write spaces and signs differently."""
    return _decoded(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _runs(labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions [first, last) of each run of trained tokens."""
    for is_trained, run in itertools.groupby(range(len(labels)), key=lambda position: labels[position] != UNTRAINED):
        if is_trained:
            positions = list(run)
            yield positions[0], positions[-1] + 1
