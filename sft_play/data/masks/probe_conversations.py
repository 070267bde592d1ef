"""Conversations that a template is probed with, and what to look for in what it writes of them.

Their texts are words that no template writes by itself (`question1q`), so that a rendering shows which of them it took
and where.
"""

from __future__ import annotations

import re
from typing import Any

from sft_play.data.sources.messages import Message

PART_KEY = re.compile(r"""['"]type['"]""")
"""In a rendering: the template took a list of parts for the text, and wrote it with its keys."""

PLAIN: list[Message] = [{"role": "user", "content": "question1q"}, {"role": "assistant", "content": "answer1q"}]
SYSTEM: Message = {"role": "system", "content": "system1q"}
NEXT_TURNS: list[Message] = [{"role": "user", "content": "question2q"}, {"role": "assistant", "content": "answer2q"}]
NEXT_QUESTION: Message = {"role": "user", "content": "question9q"}
"""Put behind a row of the data, whose own texts do not hold it."""

ODD_ARGUMENTS = {"odd": 'x < y > "z" & don\'t écru', "place": "where1q"}
"""Arguments that come out changed if a template escapes, encodes twice, or writes Python in place of JSON."""
CALLING: list[Message] = [
    {"role": "user", "content": "question1q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call1q", "function": {"name": "look1q", "arguments": ODD_ARGUMENTS}}
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
