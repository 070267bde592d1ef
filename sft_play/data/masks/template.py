"""A chat template: what it writes for a conversation, as transformers renders it, and what it asks
for.

A test holds the rendering equal to `apply_chat_template` of transformers.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from sft_play.data.masks import sandbox
from sft_play.data.masks.sandbox import EndlessTemplateError, RenderError
from sft_play.data.sources.messages import REASONING_KEYS, Message
from sft_play.errors import TokenizerError

# Names of a turn's think text in the order of transformers 5.23 (`_REASONING_FIELDS` in
# utils/chat_template_utils.py): the first that a message has fills `reasoning_content` and
# `thinking`, which templates read.
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
        if has_reasoning
        or any(THINK_END.search(str(message.get("content"))) for message in answers)
        else PLAIN_ROW
    )


def has_value_per_kind(value: Any) -> bool:
    """True if an option has its own value for kinds of rows, such as `{think: high, plain:
    no_think}`."""
    return isinstance(value, Mapping) and bool(value) and {THINK_ROW, PLAIN_ROW}.issuperset(value)


def select_template_kwargs(
    template_kwargs: Mapping[str, Any], kind: str = PLAIN_ROW
) -> dict[str, Any]:
    """data.chat_template_kwargs for one kind of rows; a setting of the other kind alone is left
    out."""
    return {
        name: value[kind] if has_value_per_kind(value) else value
        for name, value in template_kwargs.items()
        if not has_value_per_kind(value) or kind in value
    }


class ChatTemplate:
    """One chat template. `variables` are what it may read besides messages and tools; `today` is
    the day that `strftime_now` formats. Raises TokenizerError where it is no valid Jinja."""

    def __init__(self, source: str, *, variables: Mapping[str, Any], today: date) -> None:
        self.source, self._variables, self._today = source, dict(variables), today
        try:
            # Texts that it looks for; variables that it reads and data.chat_template_kwargs may
            # set.
            self.searched_texts, self.settable_variables = sandbox.ask(
                sandbox.describe_template, source, today, set(_RENDER_VARIABLES)
            )
        except EndlessTemplateError as error:
            raise TokenizerError(str(error)) from error
        except RenderError as error:
            line = f" (line {error.line})" if error.line else ""
            raise TokenizerError(f"the chat template is not valid Jinja{line}: {error}") from error

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), with_prompt: bool = False
    ) -> str:
        """The conversation as text; `with_prompt`: ended by what an answer is generated after.
        Raises RenderError."""
        conversation = {
            "messages": [_normalize_reasoning(message) for message in messages],
            # transformers passes None where there are none; templates test for it
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": with_prompt,
        }
        return str(
            sandbox.ask(
                sandbox.render_template, self.source, self._today, self._variables, conversation
            )
        )


def _normalize_reasoning(message: Message) -> Message:
    """The message as transformers gives it: without keys that hold nothing, its think text under
    every name."""
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING_KEY_ORDER if key in copy), None)
    if reasoning is None:
        return copy
    return {"thinking": reasoning, **copy, "reasoning_content": reasoning}
