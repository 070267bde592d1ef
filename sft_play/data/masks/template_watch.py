"""Whether a chat template looks into the texts of a row, seen while it renders them.

A template that only writes texts, strips their ends, asks whether they are empty, or looks for texts of its own
(`</think>`), treats all rows of one shape alike. One that asks how long a text is, how it begins, or whether it equals
another one does not. Every text of the row holds a mark here, so whatever comes from a text is known by it, and what is
done with it is seen. All that happens before the first look is the same for every row, so one rendering is enough.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import jinja2
from jinja2 import nodes

from sft_play.data.masks.template_limits import (
    LimitedEnvironment,
    MakeDict,
    PlainNamespace,
    filter_node,
    flat,
    owner_of,
    passing_as,
    refuse,
)

_TYPE_TESTS = frozenset(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float"}
    | {"boolean", "true", "false", "callable", "escaped", "filter", "test"}
)
_WRITING = frozenset(
    {"string", "safe", "tojson", "default", "d", "e", "escape", "forceescape", "upper", "lower", "join", "joined"}
    | {"indent", "bounded", "looked_into", "compared"}
)
"""Filters that write a text, or have a look of their own."""
_COMPARING = frozenset({"sort", "unique", "max", "min", "groupby", "dictsort", "sum"})
_STRIPPING = frozenset({"strip", "lstrip", "rstrip"})
_SEEKING = frozenset(
    {"split", "rsplit", "partition", "rpartition", "startswith", "endswith", "replace", "find", "rfind", "count"}
    | {"index", "rindex", "removeprefix", "removesuffix"}
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class WatchingEnvironment(LimitedEnvironment):
    """The environment of a rendering in which every text of the row holds a mark: it notes whether the template looks
    into one of them for anything else than `tested`, white space at its ends, and whether it is empty."""

    def __init__(self, today: date, tested: frozenset[str]) -> None:
        super().__init__(today)
        self.looked = False
        self._tested, self._mark, self._texts = tested, "", ""
        tests: Any = self.tests
        for name, test in tests.items():
            if name not in _TYPE_TESTS:  # a marked text is of the same type as the row's own
                tests[name] = self._watched(test, deep=True)
        for name, plain in self.filters.items():
            if name not in (*_WRITING, "trim", "replace"):
                self.filters[name] = self._watched(plain, deep=name in _COMPARING)
        plain_trim, plain_replace = self.filters["trim"], self.filters["replace"]

        def trim(value: Any, chars: str | None = None) -> Any:
            if self._is_marked(value) and chars and str(chars).strip():
                self.looked = True
            return plain_trim(value, chars)

        def replace(context: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
            is_tested = bool(args) and self._is_tested(args[0]) and self._is_whole(str(text))
            if self._is_marked(text) and not is_tested:
                self.looked = True
            return plain_replace(context, text, *args, **kwargs)

        self.filters["trim"], self.filters["replace"] = trim, passing_as(plain_replace, replace)
        self.filters["looked_into"] = self._looked_into
        self.filters["compared"] = self._compared
        self.filters["size"] = len  # `length` without the watch, where only emptiness is asked for

    def watch(self, mark: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Start again: from now on a text that holds the mark is one of these messages'."""
        self.looked, self._mark = False, mark.casefold()
        self._texts = json.dumps([*messages], ensure_ascii=False, default=str)

    def _rewritten(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, nodes.Compare):
            if _is_emptiness(node):
                node.expr.name = "size"  # type: ignore[attr-defined]
                return node
            if len(node.ops) == 1:  # both sides go to one filter, which sees how they are compared
                pair = nodes.List([node.expr, node.ops[0].expr]).set_lineno(node.lineno)
                return filter_node(pair, "compared", nodes.Const(node.ops[0].op))
            node.expr = filter_node(node.expr, "looked_into")
            for operand in node.ops:
                operand.expr = filter_node(operand.expr, "looked_into")
        elif isinstance(node, nodes.Getitem) and not (
            isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)  # a key of an object
        ):
            node.node = filter_node(node.node, "looked_into")
            if not isinstance(node.arg, nodes.Slice):
                node.arg = filter_node(node.arg, "looked_into")
        return super()._rewritten(node)

    def _is_marked(self, value: Any, *, deep: bool = False) -> bool:
        """Whether a text, or with `deep` one inside a list or an object, comes from the row."""
        if isinstance(value, str):
            return self._mark in value.casefold()
        if deep and isinstance(value, dict):
            return any(self._is_marked(item, deep=True) for item in (*value, *flat(value).values()))
        return (
            deep and isinstance(value, (list, tuple)) and any(self._is_marked(item, deep=True) for item in flat(value))
        )

    def _is_whole(self, text: str) -> bool:
        """Whether a marked text stands so in the row: nothing was joined to it or changed in it."""
        return json.dumps(text, ensure_ascii=False)[1:-1] in self._texts

    def _is_tested(self, text: Any) -> bool:
        return isinstance(text, str) and text.strip() in self._tested

    def _watched(self, plain: Callable[..., Any], *, deep: bool) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if any(self._is_marked(value, deep=deep) for value in (*args, *kwargs.values())):
                self.looked = True
            return plain(*args, **kwargs)

        return passing_as(plain, watched)

    def _looked_into(self, value: Any) -> Any:
        if self._is_marked(value):
            self.looked = True
        return value

    def _compared(self, pair: Sequence[Any], name: str) -> Any:
        left, right = flat(pair)
        marked = [side for side in pair if self._is_marked(side, deep=True)]
        if marked and not self._is_same_for_all(name, left, right):
            self.looked = True
        return _COMPARISONS[name](left, right)

    def _is_same_for_all(self, name: str, left: Any, right: Any) -> bool:
        """Whether a comparison with a marked value comes out the same for every text without `tested`."""
        if name in ("in", "notin"):
            if self._is_marked(left):
                return False
            if isinstance(right, dict):
                return isinstance(left, str)
            # `"</think>" in content`: the copy has such texts outside of its marks, where the row has them
            return self._is_tested(left) and (not isinstance(right, str) or self._is_whole(right))
        if name not in ("eq", "ne"):
            return False
        text, other = (left, right) if self._is_marked(left, deep=True) else (right, left)
        if not isinstance(text, str):  # a list or an object equals none of another type, whatever texts it holds
            return not isinstance(other, (dict, list, tuple))
        if isinstance(other, str) and other.strip():
            return self._is_tested(other) and self._is_whole(text)
        return True

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in the template, watched."""
        if not __self.looked:
            __self.looked = __self._call_looks(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _call_looks(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        owner, name = owner_of(function), getattr(function, "__name__", "")
        if isinstance(owner, str) and self._is_marked(owner):
            if name in _STRIPPING:
                return any(str(value).strip() for value in args if value is not None)
            return not (name in _SEEKING and args and self._is_tested(args[0]) and self._is_whole(owner))
        if isinstance(owner, str) and name in ("join", "format", "format_map"):
            return False
        # a macro's body is watched itself; `loop(…)` and `dict(…)` only pass values on
        if isinstance(function, (jinja2.runtime.Macro, jinja2.runtime.LoopContext, MakeDict)):
            return False
        if function in (refuse, PlainNamespace):
            return False
        given = (*args, *(value for key, value in kwargs.items() if not key.startswith("_")))  # `_` is Jinja's own
        return any(self._is_marked(value, deep=True) for value in given)

    def _bounded(self, items: Any) -> Any:
        return super()._bounded(self._looked_into(items))  # a loop over a text goes through its letters

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As without watching; a marked text that is used as a format is looked into."""
        if operator == "%":
            self._looked_into(left)
        return super().call_binop(context, operator, left, right)


def _is_emptiness(node: nodes.Compare) -> bool:
    """Whether it is `text|length > 0` or says the same in another way."""
    if not (len(node.ops) == 1 and isinstance(node.expr, nodes.Filter) and node.expr.name in ("length", "count")):
        return False
    operand = node.ops[0]
    bound = {"eq": 0, "ne": 0, "gt": 0, "gteq": 1, "lt": 1}.get(operand.op)
    return isinstance(operand.expr, nodes.Const) and operand.expr.value == bound
