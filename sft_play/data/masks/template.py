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

from sft_play.data.masks.template_limits import MAX_CHARS, LimitedEnvironment, LimitExceededError
from sft_play.data.sources.messages import REASONING_KEYS, Message
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# The longest real template has 30,000.
MAX_TEMPLATE_CHARS = 1_000_000
# Names of a turn's think text in the order of transformers 5.23 (`_REASONING_FIELDS` in utils/chat_template_utils.py):
# the first that a message has fills `reasoning_content` and `thinking`, which templates read.
_REASONING_KEY_ORDER = ("reasoning_content", "thinking", "reasoning")


# Kinds of rows: with think text in an answer, and without.
THINK_ROW, PLAIN_ROW = "think", "plain"
# What ends think text, in an answer or in a generation prompt.
THINK_END = re.compile(r"</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>")
_RENDER_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def row_kind(messages: Sequence[Message]) -> str:
    """`think` if an assistant's turn holds think text, else `plain`."""
    answers = [message for message in messages if message["role"] == "assistant"]
    texts = [message.get(key) for message in answers for key in REASONING_KEYS]
    has_reasoning = any(isinstance(text, str) and text.strip() for text in texts)
    return (
        THINK_ROW
        if has_reasoning or any(THINK_END.search(str(message.get("content"))) for message in answers)
        else PLAIN_ROW
    )


def has_value_per_kind(value: Any) -> bool:
    """True if an option has its own value for kinds of rows, such as `{think: high, plain: no_think}`."""
    return isinstance(value, Mapping) and bool(value) and {THINK_ROW, PLAIN_ROW}.issuperset(value)


def select_template_kwargs(template_kwargs: Mapping[str, Any], kind: str = PLAIN_ROW) -> dict[str, Any]:
    """data.chat_template_kwargs for one kind of rows; a setting of the other kind alone is left out."""
    selected_kwargs = {
        name: value for name, value in template_kwargs.items() if not has_value_per_kind(value) or kind in value
    }
    return {name: value[kind] if has_value_per_kind(value) else value for name, value in selected_kwargs.items()}


class RenderError(ValueError):
    """A template that refuses a conversation, fails on it, or never ends with it; the message is safe to show."""


class EndlessTemplateError(RenderError):
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
            self._template = self._environment.compile_limited(source)
            tree = self._environment.parse(source)
            self.searched_texts = frozenset(_find_searched_texts(tree))
            self.settable_variables = _find_settable_variables(
                tree, known={*_RENDER_VARIABLES, *self._environment.globals}
            )
            """Variables that it reads and data.chat_template_kwargs may set."""
        except Exception as error:  # compiling somebody's program: RecursionError, SyntaxError, Jinja's own, …
            line_number = getattr(error, "lineno", None)
            line_suffix = f" (line {line_number})" if line_number else ""
            raise TokenizerError(
                f"the chat template is not valid Jinja{line_suffix}: {one_line(str(error))}"
            ) from error

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] = (), with_prompt: bool = False) -> str:
        """The conversation as text; `with_prompt`: ended by what an answer is generated after. Raises RenderError."""
        self._environment.budget.reset()
        pieces: list[str] = []
        written_chars = 0
        with _convert_render_errors():
            for piece in self._template.generate(
                messages=[_normalize_reasoning(message) for message in messages],
                tools=list(tools) or None,  # transformers passes None where there are none; templates test for it
                documents=None,
                add_generation_prompt=with_prompt,
                **self._variables,
            ):
                written_chars += len(piece)
                if written_chars > MAX_CHARS:
                    raise LimitExceededError(f"a text of more than {MAX_CHARS:,} characters")
                pieces.append(piece)
        return "".join(pieces)


@contextmanager
def _convert_render_errors() -> Iterator[None]:
    try:
        yield
    except LimitExceededError as error:
        raise EndlessTemplateError(f"the chat template does not end in reasonable time or size: {error}") from None
    except RecursionError:
        raise EndlessTemplateError(
            "the chat template calls itself without end, or the row is nested too deeply"
        ) from None
    except MemoryError:
        raise EndlessTemplateError("the chat template takes more memory than there is") from None
    except Exception as error:
        raise RenderError(one_line(str(error) or type(error).__name__)) from error


def _normalize_reasoning(message: Message) -> Message:
    """The message as transformers gives it: without keys that hold nothing, its think text under every name."""
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING_KEY_ORDER if key in copy), None)
    if reasoning is None:
        return copy
    return {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _find_settable_variables(tree: nodes.Template, *, known: Collection[str]) -> tuple[str, ...]:
    """Variables that a template asks its caller for: those that it reads before it sets them itself."""
    # Jinja alone also names variables that are set in one branch of an `if` and read after it.
    is_read_first: dict[str, bool] = {}
    for name, is_read in _variable_uses(tree):
        is_read_first.setdefault(name, is_read)
    names = sorted(meta.find_undeclared_variables(tree) - set(known))
    return tuple(name for name in names if is_read_first.get(name) and not name.endswith("_token"))


def _variable_uses(node: nodes.Node) -> Iterator[tuple[str, bool]]:
    """Names in the order in which a template evaluates them, each with whether it is read there."""
    if isinstance(node, nodes.Name):
        yield node.name, node.ctx == "load"
    children = [*node.iter_child_nodes()]
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        children.sort(key=lambda child: child is node.target)  # what is assigned is evaluated before its name is set
    elif isinstance(node, nodes.For):
        children.sort(key=lambda child: child is not node.iter)
    for child in children:
        yield from _variable_uses(child)


_MIN_SEARCHED_CHARS = 3
_NOT_A_WORD = re.compile(r"[^\w\s]")


def _find_searched_texts(tree: nodes.Template) -> Iterator[str]:
    """Texts that the template compares with, splits at or looks for, on which its output may depend; without words that
    have no punctuation (role names, keys) and texts of one or two characters."""
    holders: list[nodes.Node] = [*tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign))]
    for holder in holders:
        for constant in holder.find_all(nodes.Const):
            text = constant.value
            if isinstance(text, str):
                stripped = text.strip()
                # a role's name may stand in any answer: marks around it would cut the answer into pieces
                if len(stripped) >= _MIN_SEARCHED_CHARS and _NOT_A_WORD.search(stripped):
                    yield stripped
