"""How exact the loss masks are: every chat template of a folder, on five kinds of conversation, judged independently.

The judge shares no code with what makes the masks. It renders through transformers, tokenises anew, and asks of every
trained run of tokens: does it begin exactly where generation would, does it end with the turn's end, does it hold all
of the turn's words that the template writes, and nothing of anybody else's?
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.data.files import BadRow
from sft_play.data.formats import Chat
from sft_play.data.render import IGNORED, Encoder, Rendered, Renderer, TokenizerParts
from sft_play.data.template import ChatTemplate, Endless, RenderError
from sft_play.errors import ConfigError, TokenizerError
from sft_play.log import one_line

Verdict = Literal["exact", "refused", "wrong", "cannot_render"]
SUFFIXES = frozenset({".jinja", ".jinja2", ".j2"})
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Case:
    """A conversation in which every message has words of its own; `needed` ones must be written."""

    name: str
    messages: tuple[dict[str, Any], ...]
    words: tuple[tuple[str, ...], ...]
    needed: tuple[str, ...]
    tools: tuple[Any, ...] = ()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look the weather up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["city"],
        },
    },
}
_CALL = {
    "type": "function",
    "id": "Ab3dE6gH9",
    "function": {"name": "get_weather", "arguments": {"city": "Brambleton", "days": 3}},
}

CASES = (
    Case(
        "single_turn",
        (_user("What is a quokka?"), _answer("A marsupial from Rottnest.")),
        (("quokka",), ("marsupial", "Rottnest")),
        ("quokka", "marsupial", "Rottnest"),
    ),
    Case(
        "multi_turn",
        (
            *(_user("What is a quokka?"), _answer("A marsupial from Rottnest.")),
            *(_user("Does it bite?"), _answer("Seldom, unless cornered.")),
            *(_user("And swim?"), _answer("Barely.")),
        ),
        (("quokka",), ("marsupial", "Rottnest"), ("bite",), ("Seldom", "cornered"), ("swim",), ("Barely",)),
        ("quokka", "marsupial", "Rottnest", "bite", "Seldom", "cornered", "swim", "Barely"),
    ),
    Case(
        "system",
        (
            {"role": "system", "content": "Speak like a zoologist."},
            *(_user("What is a quokka?"), _answer("A marsupial from Rottnest.")),
            *(_user("Does it bite?"), _answer("Seldom, unless cornered.")),
        ),
        (("zoologist",), ("quokka",), ("marsupial", "Rottnest"), ("bite",), ("Seldom", "cornered")),
        ("zoologist", "quokka", "marsupial", "Rottnest", "bite", "Seldom", "cornered"),
    ),
    Case(
        "tool_calls",
        (
            _user("Will it rain, dear oracle?"),
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {
                "role": "tool",
                "name": "get_weather",
                "tool_call_id": "Ab3dE6gH9",
                "content": '{"forecast": "drizzle"}',
            },
            _answer("Yes, take an umbrella."),
            _user("Splendid, many thanks."),
            _answer("Gladly."),
        ),
        (("oracle",), ("Brambleton",), ("drizzle",), ("umbrella",), ("Splendid",), ("Gladly",)),
        ("oracle", "Brambleton", "drizzle", "umbrella", "Splendid", "Gladly"),
        (_TOOL,),
    ),
    Case(
        "think_text",
        (
            _user("What is a quokka?"),
            _answer("<think>\nThey mean the macropod.\n</think>\n\nA marsupial from Rottnest."),
            _user("Does it bite?"),
            _answer("<think>\nTeeth, incisors.\n</think>\n\nSeldom, unless cornered."),
        ),
        (("quokka",), ("macropod", "marsupial", "Rottnest"), ("bite",), ("incisors", "Seldom", "cornered")),
        ("quokka", "marsupial", "Rottnest", "bite", "Seldom", "cornered"),
    ),
)


@dataclass(frozen=True)
class Row:
    """One template on one case."""

    template: str
    case: str
    method: str
    verdict: Verdict
    reason: str

    def as_json(self) -> dict[str, str]:
        """A row of OUT."""
        return dict(vars(self))


@dataclass(frozen=True)
class Score:
    """All templates on all cases; `ok` where no mask is wrong."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """Whether no mask is wrong."""
        return all(row.verdict != "wrong" for row in self.rows)

    def as_json(self) -> list[dict[str, str]]:
        """The rows as OUT holds them."""
        return [row.as_json() for row in self.rows]

    def counts(self) -> Counter[str]:
        """Rows by verdict."""
        return Counter(row.verdict for row in self.rows)

    def lines(self) -> list[str]:
        """A table with a line for each template, and the sums."""
        names = [case.name for case in CASES]
        lines = [f"| template | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for template, rows in itertools.groupby(self.rows, key=lambda row: row.template):
            shown = " | ".join(_cell(row) for row in rows)
            lines.append(f"| {template} | {shown} |")
        counts = self.counts()
        renders = len(self.rows) - counts["cannot_render"]
        lines.append("")
        lines += [
            f"{row.template}, {row.case}: {row.verdict}: {row.reason}" for row in self.rows if row.verdict == "wrong"
        ]
        share = f"{counts['exact'] / renders:.1%}" if renders else "none"
        lines.append(
            f"{counts['exact']} of {renders} cases that render are exact ({share}), {counts['refused']} are refused, "
            f"{counts['wrong']} are wrong; {counts['cannot_render']} cannot be rendered"
        )
        return lines


def _cell(row: Row) -> str:
    if row.verdict == "exact":
        return row.method
    return {"refused": "refused", "cannot_render": "—", "wrong": "WRONG"}[row.verdict]


def score(folder: Path, tokenizer: str) -> Score:
    """The masks of every template below the folder, with this tokenizer (a folder or a hub id).

    Raises:
        ConfigError: there is no such folder, or no template in it.
        TokenizerError: the tokenizer cannot be loaded.
    """
    if folder.is_file():
        raise ConfigError(f"TEMPLATES={folder} is a file; give the folder that holds it: TEMPLATES={folder.parent}")
    if not folder.is_dir():
        raise ConfigError(f"TEMPLATES={folder} is no folder (looked from {Path.cwd()})")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise ConfigError(f"TEMPLATES={folder} holds no templates; looked for {', '.join(sorted(SUFFIXES))}")
    loaded = _load(tokenizer)
    parts = TokenizerParts.of(loaded)
    encoder = Encoder(parts)
    return Score(tuple(row for file in files for row in _of_template(file, folder, loaded, parts, encoder)))


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    looks_local = name.startswith(("/", ".", "~")) or folder.exists()
    if not name.strip():
        raise TokenizerError("TOKENIZER is empty; give the folder or the hub id of a tokenizer")
    if looks_local and not folder.is_dir():
        raise TokenizerError(f"TOKENIZER={name} is no folder (looked from {Path.cwd()})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if looks_local else name)
    except Exception as error:  # a damaged file fails in as many ways as there are tokenizers
        raise TokenizerError(f"TOKENIZER={name} cannot be loaded: {one_line(str(error), limit=300)}") from error
    return tokenizer


def _of_template(file: Path, folder: Path, tokenizer: Any, parts: TokenizerParts, encoder: Encoder) -> Iterator[Row]:
    name = file.relative_to(folder).as_posix()
    try:
        own = copy.copy(tokenizer)
        own.chat_template = _read(file)
        renderer = Renderer(parts.with_template(own.chat_template), max_seq_len=_NO_LIMIT, encoder=encoder)
        renderer.turns()
    except TokenizerError as error:
        for case in CASES:
            yield Row(name, case.name, "", "cannot_render", one_line(str(error), limit=200))
        return
    for case in CASES:
        yield _judged(name, case, renderer, own)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TokenizerError(f"the file is not UTF-8: byte 0x{byte:02X} at {error.start}") from error
    except OSError as error:
        raise TokenizerError(f"the file cannot be read: {error.strerror}") from error


def _judged(name: str, case: Case, renderer: Renderer, tokenizer: Any) -> Row:
    texts = _Texts(case, tokenizer, renderer.turns().template)
    found = renderer.render(Chat(f"{name}:{case.name}", case.messages, case.tools))
    if not texts.written:
        return Row(name, case.name, "", "cannot_render", texts.why)
    if isinstance(found, BadRow):
        reason = found.reason + (f" ({found.detail})" if found.detail else "")
        return Row(name, case.name, "", "refused", one_line(reason, limit=300))
    problem = _problem(case, found, texts, tokenizer)
    if problem:
        return Row(name, case.name, found.method, "wrong", problem)
    left = f"{found.untrained_turns} earlier turns are not trained" if found.untrained_turns else ""
    return Row(name, case.name, found.method, "exact", left)


class _Texts:
    """The renderings of a case in every form that a template may want, by transformers itself.

    transformers has no limits: `limited` is asked first, and what does not end there is not begun here.
    """

    def __init__(self, case: Case, tokenizer: Any, limited: ChatTemplate) -> None:
        self._case, self._tokenizer, self._limited = case, tokenizer, limited
        self._is_endless = False
        self.why = ""
        self.written: dict[str, list[dict[str, Any]]] = {}
        """Texts that hold all that is needed, and the messages in their form."""
        for messages in _forms(case.messages):
            text = self._render(messages)
            if text is None:
                continue
            missing = [word for word in case.needed if word not in text]
            if missing:
                self.why = self.why or f"the template does not write {missing[0]}"
            else:
                self.written.setdefault(text, messages)

    def _render(self, messages: Sequence[dict[str, Any]], *, prompt: bool = False) -> str | None:
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

    def _ends(self, messages: Sequence[dict[str, Any]], *, prompt: bool) -> bool:
        if self._is_endless:
            return False
        try:
            self._limited.render(messages, tools=self._case.tools, prompt=prompt)
        except Endless as error:
            self.why, self._is_endless = self.why or str(error), True
        except RenderError:
            pass  # what it refuses here it refuses there too, and says why
        return not self._is_endless

    def prompts(self, text: str) -> dict[int, str]:
        """What each assistant turn of the text would be generated after, by message."""
        messages = self.written[text]
        found = {}
        for index, message in enumerate(messages):
            prompt = self._render(messages[:index], prompt=True) if message["role"] == "assistant" else None
            if prompt is not None:
                found[index] = prompt
        return found

    def alone(self, text: str, index: int) -> str:
        """The conversation that ends with this turn."""
        return self._render(self.written[text][: index + 1]) or ""


def _forms(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
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


def _problem(case: Case, found: Rendered, texts: _Texts, tokenizer: Any) -> str:
    """What is wrong with a mask; empty where it is exact. Texts are compared as their tokens spell them."""
    if found.text not in texts.written:
        return "the text is not what transformers renders"
    ids, whole = found.input_ids, _spelled(found.text, tokenizer)
    if _decoded(ids, tokenizer) != whole:
        return "the tokens do not spell the text"
    if any(label not in (IGNORED, token) for label, token in zip(found.labels, ids, strict=True)):
        return "a label is not its token"
    prompts = {_spelled(prompt, tokenizer): index for index, prompt in texts.prompts(found.text).items()}
    trained = []
    for first, last in _runs(found.labels):
        before = _decoded(ids[:first], tokenizer)
        run = _decoded(ids[:last], tokenizer)[len(before) :]
        index = prompts.get(before)
        if index is None:
            return f"a trained run begins where nothing would be generated: {run[:30]!r}"
        alone = _spelled(texts.alone(found.text, index), tokenizer)[len(before) :]
        problem = _run_problem(case, index, run, whole[len(before) :], alone, tokenizer)
        if problem:
            return f"messages[{index}]: {problem}"
        trained.append(index)
    turns = [index for index, message in enumerate(case.messages) if message["role"] == "assistant"]
    if not trained or (trained != turns and found.method != "last_turn"):
        return f"turns {trained} of {turns} are trained, and the method is {found.method}"
    return ""


def _spelled(text: str, tokenizer: Any) -> str:
    """The text as its own tokens spell it: some tokenizers write spaces and signs otherwise."""
    return _decoded(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _runs(labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Positions [first, last) of each run of trained tokens."""
    for is_trained, run in itertools.groupby(range(len(labels)), key=lambda position: labels[position] != IGNORED):
        if is_trained:
            positions = list(run)
            yield positions[0], positions[-1] + 1


_CONTROL = re.compile(r"<｜[^<>｜]{1,60}｜>|<[^<>\s]{1,60}>|\[/?[A-Z_]{2,}\]|\[\|[^|\[\]]{1,60}\|\]|\[e~\[")


def _run_problem(case: Case, index: int, run: str, rest: str, alone: str, tokenizer: Any) -> str:
    """What is wrong with a run: `rest` is what follows its beginning in the conversation, `alone` in the one that ends
    with this turn."""
    for other, words in enumerate(case.words):
        strange = [word for word in words if other != index and word in run]
        if strange:
            return f"it holds {strange[0]!r} of messages[{other}]"
    own = [word for word in case.words[index] if word in rest]
    missing = [word for word in own if word not in run]
    if missing:
        return f"it lacks {missing[0]!r}"
    last = max((run.rfind(word) + len(word) for word in own), default=0)
    return _end_problem(run[last:], rest[last:], alone[last:], tokenizer)


def _end_problem(tail: str, rest: str, alone: str, tokenizer: Any) -> str:
    """What is wrong with the end of a run: `tail` is what it has behind its last word, `rest` and `alone` are what
    follows that word in the conversation, and in the conversation that ends with this turn."""
    ends = [*_control(alone, tokenizer)]
    if not ends:  # the template writes nothing that could be learned as an end
        return "" if not _control(tail, tokenizer) else f"it goes on with {tail!r} behind a turn that ends with nothing"
    marks = _control(tail, tokenizer)
    if not marks or not tail.endswith(marks[-1]):
        if tail and tail == alone.rstrip():
            return ""  # all that the template writes of the turn: its end is none that can be known by its looks
        return f"it does not end with an end of turn: {tail[-30:]!r}"
    if tail == alone[: len(tail)]:
        return ""
    header = _control(rest, tokenizer)
    if marks != header[: len(marks)]:
        return f"its end {tail!r} is not what follows"
    return "" if len(marks) <= len(ends) else f"it goes beyond the end of its turn: {tail!r}"


def _control(text: str, tokenizer: Any) -> list[str]:
    """Control tokens in a text: those of the tokenizer, and what looks like one."""
    special = "|".join(re.escape(token) for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True))
    pattern = f"{special}|{_CONTROL.pattern}" if special else _CONTROL.pattern
    return [match.group() for match in re.finditer(pattern, text)]
