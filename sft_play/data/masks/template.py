"""A chat template as transformers renders it, with the date pinned and with limits.

A template is a program from somebody's repository; `template_limits.py` is what it runs in. A test holds the rendering
equal to `apply_chat_template` of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any

from jinja2 import meta, nodes

from sft_play.data.masks.template_limits import MAX_CHARS, LimitedEnvironment, TooMuch
from sft_play.data.sources.messages import REASONING_KEYS, Message
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# The longest real template has 30,000.
MAX_TEMPLATE_CHARS = 1_000_000
# Names of a turn's think text in the order of transformers 5.23 (`_REASONING_FIELDS` in utils/chat_template_utils.py):
# the first that a message has fills `reasoning_content` and `thinking`, which templates read.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


# Kinds of rows: with think text in an answer, and without.
THINK, PLAIN = "think", "plain"
# What ends think text, in an answer or in a generation prompt.
THINK_END = re.compile(r"</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>")
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")


def kind_of(messages: Sequence[Message]) -> str:
    """Whether an assistant's turn holds think text."""
    answers = [message for message in messages if message["role"] == "assistant"]
    texts = [message.get(key) for message in answers for key in REASONING_KEYS]
    holds = any(isinstance(text, str) and text.strip() for text in texts)
    return THINK if holds or any(THINK_END.search(str(message.get("content"))) for message in answers) else PLAIN


def is_by_kind(value: Any) -> bool:
    """Whether it says a value for one kind of rows or for both, such as `{think: high, plain: no_think}`."""
    return isinstance(value, Mapping) and bool(value) and {THINK, PLAIN}.issuperset(value)


def settings_of(given: Mapping[str, Any], kind: str = PLAIN) -> dict[str, Any]:
    """data.chat_template_kwargs for one kind of rows; a setting of the other kind alone is left out."""
    fit = {name: value for name, value in given.items() if not is_by_kind(value) or kind in value}
    return {name: value[kind] if is_by_kind(value) else value for name, value in fit.items()}


class RenderError(ValueError):
    """A template that refuses a conversation, fails on it, or never ends with it; the message is safe to show."""


class Endless(RenderError):
    """A template that exceeds the limits; rendering it once more would take as long."""


class ChatTemplate:
    """One chat template, compiled once. `variables` are what it may read besides messages and tools; `today` is the day
    that `strftime_now` formats. Raises TokenizerError where it is no valid Jinja."""

    def __init__(self, source: str, *, variables: Mapping[str, Any], today: date) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(f"the chat template has {len(source):,} characters; the limit is 1,000,000")
        self.source = source
        self._variables = dict(variables)
        self._environment = LimitedEnvironment(today)
        try:
            self._template = self._environment.compiled(source)
            tree = self._environment.parse(source)
            self.tested = frozenset(_tested_texts(tree))
            self.settings = _settings(tree, known={*_GIVEN, *self._environment.globals})
            """Variables that it reads and data.chat_template_kwargs may set."""
        except Exception as error:  # compiling somebody's program: RecursionError, SyntaxError, Jinja's own, …
            number = getattr(error, "lineno", None)
            line = f" (line {number})" if number else ""
            raise TokenizerError(f"the chat template is not valid Jinja{line}: {one_line(str(error))}") from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] = (), prompt: bool = False) -> str:
        """The conversation as text; with `prompt`, ended by what an answer is generated after. Raises RenderError."""
        self._environment.budget.begin()
        pieces: list[str] = []
        written = 0
        with _as_render_error():
            for piece in self._template.generate(
                messages=[_as_transformers_gives(message) for message in messages],
                tools=list(tools) or None,  # transformers passes None where there are none; templates test for it
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            ):
                written += len(piece)
                if written > MAX_CHARS:
                    raise TooMuch(f"a text of more than {MAX_CHARS:,} characters")
                pieces.append(piece)
        return "".join(pieces)


@contextmanager
def _as_render_error() -> Iterator[None]:
    try:
        yield
    except TooMuch as error:
        raise Endless(f"the chat template does not end in reasonable time or size: {error}") from None
    except RecursionError:
        raise Endless("the chat template calls itself without end, or the row is nested too deeply") from None
    except MemoryError:
        raise Endless("the chat template takes more memory than there is") from None
    except Exception as error:
        raise RenderError(one_line(str(error) or type(error).__name__)) from error


def _as_transformers_gives(message: Message) -> Message:
    """The message as transformers gives it: without keys that hold nothing, its think text under every name."""
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING_KEYS if key in copy), None)
    if reasoning is None:
        return copy
    return {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _settings(tree: nodes.Template, *, known: Collection[str]) -> tuple[str, ...]:
    """Variables that a template asks its caller for: those that it reads before it sets them itself."""
    # Jinja alone also names variables that are set in one branch of an `if` and read after it.
    is_read_first: dict[str, bool] = {}
    for name, is_read in _uses_in_order(tree):
        is_read_first.setdefault(name, is_read)
    names = sorted(meta.find_undeclared_variables(tree) - set(known))
    return tuple(name for name in names if is_read_first.get(name) and not name.endswith("_token"))


def _uses_in_order(node: nodes.Node) -> Iterator[tuple[str, bool]]:
    """Names in the order in which a template evaluates them, each with whether it is read there."""
    if isinstance(node, nodes.Name):
        yield node.name, node.ctx == "load"
    children = [*node.iter_child_nodes()]
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        children.sort(key=lambda child: child is node.target)  # what is assigned is evaluated before its name is set
    elif isinstance(node, nodes.For):
        children.sort(key=lambda child: child is not node.iter)
    for child in children:
        yield from _uses_in_order(child)


_MIN_TESTED = 3
_NOT_A_WORD = re.compile(r"[^\w\s]")


def _tested_texts(tree: nodes.Template) -> Iterator[str]:
    """Texts that the template compares with, splits at or looks for, on which its output may depend; without words that
    have no punctuation (role names, keys) and texts of one or two characters."""
    holders: list[nodes.Node] = [*tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign))]
    for holder in holders:
        for constant in holder.find_all(nodes.Const):
            text = constant.value
            if isinstance(text, str):
                stripped = text.strip()
                # a role's name may stand in any answer: marks around it would cut the answer into pieces
                if len(stripped) >= _MIN_TESTED and _NOT_A_WORD.search(stripped):
                    yield stripped
