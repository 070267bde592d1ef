"""Go's template language, as far as Ollama's chat templates need it: what Ollama makes of a conversation."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


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
    "eq": lambda one, other: one == other, "le": lambda one, other: one <= other, "and": lambda *values: all(values),
    "len": len, "slice": lambda items, start: items[start:],
}  # fmt: skip
