"""Settings of a chat template: the variables that it reads besides messages and tools, the values that it knows, and a
setting by what a row holds.

A template may write `/no_think`, or a prompt that opens think text, as such a variable says; one value seldom fits all
rows of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import meta, nodes

from sft_play.data.sources.messages import REASONING_KEYS, Message

THINK, PLAIN = "think", "plain"
"""Kinds of rows: with think text in an answer, and without."""
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CLOSED = re.compile(r"</(?:\w+:)?think(?:ing)?>|\[/THINK\]|<channel\|>")
"""Ends of think text inside an answer."""


def kind_of(messages: Sequence[Message]) -> str:
    """Whether an assistant's turn holds think text."""
    answers = [message for message in messages if message["role"] == "assistant"]
    texts = [message.get(key) for message in answers for key in REASONING_KEYS]
    holds = any(isinstance(text, str) and text.strip() for text in texts)
    return THINK if holds or any(_CLOSED.search(str(message.get("content"))) for message in answers) else PLAIN


def is_by_kind(value: Any) -> bool:
    """Whether it says a value for one kind of rows or for both, such as `{think: high, plain: no_think}`."""
    return isinstance(value, Mapping) and bool(value) and {THINK, PLAIN}.issuperset(value)


def settings_of(given: Mapping[str, Any], kind: str = PLAIN) -> dict[str, Any]:
    """data.chat_template_kwargs for one kind of rows; a setting of the other kind alone is left out."""
    fit = {name: value for name, value in given.items() if not is_by_kind(value) or kind in value}
    return {name: value[kind] if is_by_kind(value) else value for name, value in fit.items()}


def readable_settings(tree: nodes.Template) -> Iterator[tuple[str, Any]]:
    """Variables that a template reads, each with a value that it knows: texts that it is compared with, or true and
    false."""
    called = {call.node.name for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)}
    looped = {node.iter.name for node in tree.find_all(nodes.For) if isinstance(node.iter, nodes.Name)}
    texts: dict[str, dict[str, None]] = {}
    for compare in tree.find_all(nodes.Compare):
        names = [name.name for name in compare.find_all(nodes.Name)]
        known = [constant.value for constant in compare.find_all(nodes.Const) if isinstance(constant.value, str)]
        for name in names:
            texts.setdefault(name, {}).update(dict.fromkeys(known))
    tests = [node.test for node in tree.find_all(nodes.If)] + [node.test for node in tree.find_all(nodes.CondExpr)]
    tested = {
        name.name for test in tests for name in (test, *test.find_all(nodes.Name)) if isinstance(name, nodes.Name)
    }
    for name in sorted(meta.find_undeclared_variables(tree) - _GIVEN - called - looped):
        if not name.endswith("_token"):
            yield from ((name, text) for text in texts.get(name, ()) if text)
            if name in tested and (not texts.get(name) or "think" in name):
                yield from ((name, value) for value in (False, True))
