"""A chat template as transformers renders it, with the date pinned and with limits.

A template is a program from somebody's repository. It runs in Jinja's sandbox, as in transformers; and since a sandbox
does not stop a loop that never ends or a text that doubles, loops, calls and texts are counted here too. A test holds
the rendering equal to `apply_chat_template` of transformers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from datetime import date, datetime
from datetime import time as clock
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from sft_play.errors import TokenizerError
from sft_play.log import one_line

Message = dict[str, Any]
Span = tuple[int, int]
"""Characters [start, end) of a text."""

MAX_TEMPLATE_CHARS = 1_000_000
"""The longest real template has 30,000."""
MAX_STEPS = 2_000_000
"""Turns of loops and calls in one rendering; a conversation of a thousand turns takes some ten thousand."""
MAX_CHARS = 64 * 2**20
"""Longest text that a template may put together."""
MAX_SECONDS = 20.0
MAX_WIDTH = 100_000
"""Largest number that a template may pad, indent or repeat a text by."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates look for a turn's think text (transformers fills them from one another)."""


class RenderError(ValueError):
    """A template that refuses a conversation, fails on it, or never ends with it; the message is safe to show."""


class _TooMuch(Exception):
    """A limit was passed."""


class _Budget:
    """What one rendering may use."""

    def __init__(self) -> None:
        self.steps, self.until = MAX_STEPS, time.monotonic() + MAX_SECONDS

    def take(self, steps: int) -> None:
        """Use up steps; raises when there are none left or the time is over."""
        self.steps -= steps
        if self.steps < 0:
            raise _TooMuch(f"more than {MAX_STEPS:,} turns of loops and calls")
        if time.monotonic() > self.until:
            raise _TooMuch(f"more than {MAX_SECONDS:.0f} seconds")


def _short(text: Any) -> Any:
    if isinstance(text, (str, list, tuple)) and len(text) > MAX_CHARS:
        raise _TooMuch(f"a text of more than {MAX_CHARS:,} characters")
    return text


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: the text between them, whose place is noted."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """A block whose rendered text goes through `_note`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = str(caller())
        environment = self.environment
        assert isinstance(environment, _Environment)
        if environment.pieces is not None:
            start = sum(map(len, environment.pieces))
            environment.marked.append((start, start + len(text)))
        return text


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """transformers' environment with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: date) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.budget = _Budget()
        self.pieces: list[str] | None = None
        self.marked: list[Span] = []
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "format", "wordwrap", "batch", "slice", "truncate"):
            self.filters[name] = _narrow(self.filters[name])
        for name, check in (("join", _check_join), ("replace", _check_replace)):
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["bounded"] = self._bounded
        self.filters["joined"] = lambda parts: _short("".join(map(str, parts)))
        now = datetime.combine(today, clock())
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = now.strftime
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _Namespace

    def _bounded(self, items: Any) -> Any:
        """What a loop goes over, counted before it begins."""
        if not isinstance(items, Sized):
            items = list(items)
        self.budget.take(1 + len(items))
        return items

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.take(1)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_widths((*args, *kwargs.values()))
            if __obj.__name__ == "replace":
                _check_replace(owner, *args)
            elif __obj.__name__ == "join":
                _check_join(*args, owner)
        return _short(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, whose results may be huge."""
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > 1_000:
            raise _TooMuch("a power beyond 1,000")
        if operator == "*":
            _check_widths([side for side, other in ((left, right), (right, left)) if isinstance(other, (str, list))])
        if operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{6,}|\*)", left):
            raise _TooMuch(f"a text padded to more than {MAX_WIDTH:,}")
        return _short(super().call_binop(context, operator, left, right))

    def compiled(self, source: str) -> jinja2.Template:
        """The template with its loops and joins counted."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "bounded", [], [], None, None).set_lineno(loop.lineno)
        _bound_joins(tree)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))


def _bound_joins(node: nodes.Node) -> None:
    """Every `a ~ b` below the node becomes a filter that looks at the length."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _bound_joins(value)
            if isinstance(value, nodes.Concat):
                setattr(node, name, _joined(value))
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _bound_joins(item)
                    if isinstance(item, nodes.Concat):
                        value[position] = _joined(item)


def _joined(concat: nodes.Concat) -> nodes.Node:
    parts = nodes.List(concat.nodes).set_lineno(concat.lineno)
    return nodes.Filter(parts, "joined", [], [], None, None).set_lineno(concat.lineno)


def _check_widths(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise _TooMuch(f"a text padded or repeated by more than {MAX_WIDTH:,}")


def _narrow(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose whole numbers are no larger than a text may be padded by."""

    def narrowed(*args: Any, **kwargs: Any) -> Any:
        _check_widths((*args, *kwargs.values()))
        return plain(*args, **kwargs)

    for mark in ("jinja_pass_arg",):
        if hasattr(plain, mark):
            setattr(narrowed, mark, getattr(plain, mark))
    return narrowed


def _checked(plain: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter whose arguments are looked at first; those behind `eval_ctx` are given to the check."""

    def checked(context: Any, *args: Any, **kwargs: Any) -> Any:
        args = (list(args[0]) if check is _check_join and not isinstance(args[0], str) else args[0], *args[1:])
        check(*args, **kwargs)
        return plain(context, *args, **kwargs)

    setattr(checked, "jinja_pass_arg", plain.jinja_pass_arg)  # type: ignore[attr-defined]  # noqa: B010
    return checked


def _check_join(items: Any, between: Any = "", *_: Any, **more: Any) -> None:
    size = len(items) * len(str(more.get("d", between)))
    if size > MAX_CHARS or size + sum(len(item) for item in items if isinstance(item, str)) > MAX_CHARS:
        raise _TooMuch(f"a text of more than {MAX_CHARS:,} characters")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    if len(str(text)) + str(text).count(str(old)) * len(str(new)) > MAX_CHARS:
        raise _TooMuch(f"a text of more than {MAX_CHARS:,} characters")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _check_widths([indent])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


class _MakeDict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


_make_dict = _MakeDict()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, given = args[0], args[1:]
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class ChatTemplate:
    """One chat template, compiled once; `render` gives the text that the model sees.

    `variables` are what the template may read besides messages and tools: special tokens, and the run's own.
    `today` is the day that `strftime_now` tells.

    Raises:
        TokenizerError: it is no Jinja, or larger than any template.
    """

    def __init__(self, source: str, *, variables: Mapping[str, Any], today: date) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(f"the chat template has {len(source):,} characters; the limit is 1,000,000")
        self.source = source
        self.writes_date = "strftime_now" in source
        self.has_generation = bool(re.search(r"\{%-?\s*generation\s*-?%\}", source))
        self._variables = dict(variables)
        self._environment = _Environment(today)
        try:
            self._template = self._environment.compiled(source)
            self.tested = frozenset(_tested_texts(self._environment.parse(source)))
        except (jinja2.exceptions.TemplateError, RecursionError, SyntaxError, _TooMuch) as error:
            number = getattr(error, "lineno", None)
            line = f" (line {number})" if number else ""
            raise TokenizerError(f"the chat template is not Jinja{line}: {one_line(str(error))}") from error

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), prompt: bool = False, **more: Any
    ) -> str:
        """The conversation as text; with `prompt`, ended by what an answer is generated after.

        Raises:
            RenderError: the template refuses it, fails on it, or does not end.
        """
        return "".join(self._pieces(messages, tools, prompt, more))

    def render_marked(self, messages: Sequence[Message], *, tools: Sequence[Any] = ()) -> tuple[str, list[Span]]:
        """The conversation with the places that `{% generation %}` marks."""
        environment = self._environment
        environment.pieces, environment.marked = [], []
        try:
            for piece in self._pieces(messages, tools, False, {}):
                environment.pieces.append(piece)
            return "".join(environment.pieces), environment.marked
        finally:
            environment.pieces = None

    def _pieces(
        self, messages: Sequence[Message], tools: Sequence[Any], prompt: bool, more: Mapping[str, Any]
    ) -> Iterator[str]:
        self._environment.budget = _Budget()
        with _as_render_error():
            yield from self._template.generate(
                messages=[_with_reasoning(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=prompt,
                **{**self._variables, **more},
            )


@contextmanager
def _as_render_error() -> Iterator[None]:
    """Whatever a template can raise becomes a RenderError: its code is not ours."""
    try:
        yield
    except _TooMuch as error:
        raise RenderError(f"the chat template does not end in reasonable time or size: {error}") from None
    except RecursionError:
        raise RenderError("the chat template calls itself without end, or the row is nested too deeply") from None
    except GeneratorExit:
        raise
    except Exception as error:
        raise RenderError(one_line(str(error) or type(error).__name__)) from error


def _with_reasoning(message: Message) -> Message:
    """A copy of the message with its think text under every name that templates know."""
    found = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


_MIN_TESTED = 3
_NOT_A_WORD = re.compile(r"[^\w\s]")


def _tested_texts(tree: nodes.Template) -> Iterator[str]:
    """Texts that the template compares with, splits at or looks for: those on which its output may depend.

    Words without punctuation (role names, keys) and texts of one or two characters are left out.
    """
    holders: list[nodes.Node] = [*tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign))]
    for holder in holders:
        for constant in holder.find_all(nodes.Const):
            text = constant.value
            if isinstance(text, str):
                stripped = text.strip()
                if len(stripped) >= _MIN_TESTED and _NOT_A_WORD.search(stripped):
                    yield stripped
