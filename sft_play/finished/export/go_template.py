"""Go's template language, as far as Ollama's chat templates need it: written from parts, and evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.finished.export.template_parts import Parts


def go_template(parts: Parts, *, bos: str = "") -> str:
    """The parts as a template for Ollama. `bos`: text that the engine puts before every prompt, left out here."""

    def text(literal: str) -> str:
        return literal.replace("{{", '{{ "{{" }}')  # Go's way to write braces that begin no action

    start = parts.start.removeprefix(bos)
    first = text(start)
    inside = ""
    if parts.system is not None:
        opening, closing = parts.system
        if parts.system_place != "own turn":
            system = f"{text(opening)}{{{{ $.System }}}}{text(closing)}"
            # the system prompt is a message too: the first user turn is message 1 then; the last turn has none after it
            is_here = "le $i 1" if parts.system_place == "first user turn" else "eq (len (slice $.Messages $i)) 1"
            inside = f"{{{{ if and $.System ({is_here}) }}}}{system}{{{{ end }}}}"
        else:
            system = f"{text(opening.removeprefix(bos))}{{{{ .System }}}}{text(closing)}"
            first = f"{{{{ if .System }}}}{system}{{{{ else }}}}{first}{{{{ end }}}}" if first else (
                f"{{{{ if .System }}}}{system}{{{{ end }}}}"
            )  # fmt: skip
    user = f"{text(parts.user[0])}{inside}{{{{ .Content }}}}{text(parts.user[1])}"
    assistant = f"{text(parts.assistant[0])}{{{{ .Content }}}}{text(parts.assistant[1])}"
    index = "$i, $_ := " if inside else ""
    return (
        f'{first}{{{{ range {index}.Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}{text(parts.answer)}'
    )


def evaluate(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """What Ollama makes of a conversation with this template.

    As Ollama does, neighbouring messages of one role are joined first, and `.System` is every system prompt.

    Raises:
        ValueError: the template uses what this evaluator does not know.
    """
    joined: list[dict[str, str]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] += "\n\n" + message["content"]
        else:
            joined.append({"role": message["role"], "content": message["content"]})
    system = "\n\n".join(one["content"] for one in joined if one["role"] == "system")
    root = {"System": system, "Messages": [{"Role": one["role"], "Content": one["content"]} for one in joined]}
    pieces = re.split(r"\{\{(.*?)\}\}", template, flags=re.DOTALL)  # text and actions in turn, text first
    nodes, rest = _parse(list(enumerate(pieces)))
    if rest:
        raise ValueError("an end without a beginning")
    return _run(nodes, root, {"$": root})


_Node = tuple[str, Any]


def _parse(pieces: list[tuple[int, str]]) -> tuple[list[_Node], list[tuple[int, str]]]:
    """Nodes up to the `end` or `else` that closes this block, and the pieces from there on."""
    nodes: list[_Node] = []
    while pieces:
        (number, piece), pieces = pieces[0], pieces[1:]
        if number % 2 == 0:
            nodes.append(("text", piece))
            continue
        action = piece.strip()
        word = action.partition(" ")[0]
        if word in ("end", "else"):
            return nodes, [(number, piece), *pieces]
        if word in ("if", "range"):
            branches = []
            while True:
                body, pieces = _parse(pieces)
                if not pieces:
                    raise ValueError(f"{word} without an end")
                branches.append((action.partition(" ")[2].strip(), body))
                action, pieces = pieces[0][1].strip(), pieces[1:]
                if action == "end":
                    break
                action = action.removeprefix("else").strip() or "if true"
            nodes.append((word, branches))
        else:
            nodes.append(("value", action))
    return nodes, []


def _run(nodes: Sequence[_Node], dot: Any, variables: dict[str, Any]) -> str:
    written = []
    for kind, body in nodes:
        if kind == "text":
            written.append(body)
        elif kind == "value":
            written.append(str(_value(body, dot, variables)))
        elif kind == "if":
            chosen: list[_Node] = next((block for condition, block in body if _value(condition, dot, variables)), [])
            written.append(_run(chosen, dot, variables))
        else:
            ((loop, block),) = body
            names, _, source = loop.rpartition(":=")
            index = names.partition(",")[0].strip()
            for number, item in enumerate(_value(source.strip(), dot, variables)):
                written.append(_run(block, item, {**variables, index: number} if index else variables))
    return "".join(written)


def _value(expression: str, dot: Any, variables: Mapping[str, Any]) -> Any:
    words = _words(expression)
    name, arguments = words[0], words[1:]
    if arguments:
        if name not in _FUNCTIONS:
            raise ValueError(f"the function {name} is not known here")
        return _FUNCTIONS[name](*(_value(one, dot, variables) for one in arguments))
    if name.startswith("("):
        return _value(name[1:-1], dot, variables)
    if name.startswith('"'):
        return json.loads(name)
    if name == "true":
        return True
    if name.isdigit():
        return int(name)
    holder, _, field = name.partition(".")
    value = variables[holder] if holder else dot
    return value[field] if field else value


def _words(expression: str) -> list[str]:
    """An expression's words; one in parentheses is one word."""
    words, depth = [""], 0
    for part in re.findall(r'"(?:[^"\\]|\\.)*"|[()]|\s+|[^\s()"]+', expression):
        if part.isspace() and not depth:
            words.append("")
            continue
        depth += (part == "(") - (part == ")")
        words[-1] += part
    return words


_FUNCTIONS: dict[str, Any] = {
    "eq": lambda one, other: one == other,
    "le": lambda one, other: one <= other,
    "and": lambda *values: all(values),
    "len": len,
    "slice": lambda items, start: items[start:],
}
