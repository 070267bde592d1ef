"""The sandbox that chat templates run in: transformers' environment with limits.

Jinja's sandbox keeps a template from files and from Python. It stops neither a loop that never ends nor a text that
doubles. So loops, calls and the sizes of their results are counted here; `template.py` ends what takes too long.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from datetime import date, datetime
from datetime import time as clock
from functools import partial
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

MAX_STEPS = 2_000_000
"""Loop iterations and calls in one rendering; a conversation of a thousand turns takes some ten thousand."""
MAX_CHARS = 64 * 2**20
"""Longest text that a template may put together."""
MAX_WRITTEN = 2**30
"""Bytes of all texts that a template makes in one rendering, together: it may keep every one of them."""
MAX_WIDTH = 100_000
"""Largest number that a template may pad, indent or repeat a text by."""
WRAPPING = 64
"""What wrapping a character costs: it is split into words at once, which nothing can end."""
MAX_NODES = 1_000_000
"""Values inside a list or an object that is written as text; lists that hold a list twice double quickly."""
MAX_BITS = 1_000_000
"""Length of a whole number that a template may multiply up to."""


class TooMuch(Exception):
    """A limit was exceeded."""


_OF_LISTS = frozenset(
    {"length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "items"}
    | {"default", "d", "reverse", "batch", "slice", "attr"}
)
"""Filters that do not look inside the values of a list; the others compare or write them."""
_COMPARING_TESTS = frozenset(
    {"eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">=", "in"}
)


class RenderBudget:
    """What one rendering may use."""

    def __init__(self) -> None:
        self.steps, self.written = MAX_STEPS, 0

    def take(self, steps: int) -> None:
        """Use up steps; raises TooMuch when none are left."""
        self.steps -= steps
        if self.steps < 0:
            raise TooMuch(f"more than {MAX_STEPS:,} turns of loops and calls")

    def write(self, made: Any) -> Any:
        """Count what the template has made, if it is a text or a list, and return it."""
        if isinstance(made, (str, list, tuple)):
            _check_chars(len(made))
            self.written += sys.getsizeof(made)
            if self.written > MAX_WRITTEN:
                raise TooMuch(f"texts of more than {MAX_WRITTEN / 2**30:.0f} GiB in all")
        return made


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise TooMuch(f"a text of more than {MAX_CHARS:,} characters")


_METHODS_OF_DICT = frozenset(dir(dict))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, with which templates mark answers: the text between them."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """What stands between the marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body).set_lineno(line)]  # transformers' marks are a block: what is set there ends there


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """transformers' environment with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # Jinja's sandbox gives `call_binop` these operators alone

    def __init__(self, today: date) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.budget = RenderBudget()
        self.finalize = flat  # every value that `{{ }}` writes passes through it
        self.concat = _joined  # type: ignore[method-assign]  # puts together what blocks and macros write
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "format", "wordwrap", "batch", "slice", "truncate"):
            self.filters[name] = _after(partial(_check_filter, name), self.filters[name])
        for name in self.filters.keys() - _OF_LISTS:
            self.filters[name] = self._counted(_after(_check_flat, self.filters[name]))
        tests: Any = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = _after(_check_flat, tests[name])
        for name, check in (("join", _check_join), ("replace", _check_replace)):
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["bounded"] = self._bounded
        self.filters["flat"] = flat
        self.filters["joined"] = lambda parts: self.budget.write("".join(str(flat(part)) for part in parts))

        def refuse_chance(*_: Any, **__: Any) -> None:
            raise jinja2.exceptions.TemplateError("the chat template writes something else each time, by chance")

        # A mask is found by rendering the same conversation several times: all renderings must be alike.
        self.filters["random"] = self.globals["lipsum"] = refuse_chance
        now = datetime.combine(today, clock())
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = now.strftime
        self.globals["dict"] = _MakeDict()
        self.globals["namespace"] = _PlainNamespace

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose texts are counted; `map` calls one for each of its items."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.take(1)
            return self.budget.write(plain(*args, **kwargs))

        return _passing_as(plain, counted)

    def _bounded(self, items: Any) -> Any:
        if not isinstance(items, Sized):  # a generator, which Jinja's `map` and `select` return
            items = list(items)
        self.budget.take(1 + len(items))
        return items

    # As Jinja names them: a template may call its own macros with arguments named `self` or `context`.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of the template's, counted, its result short."""
        __self.budget.take(1)
        owner = _owner_of(__obj)
        if isinstance(owner, (str, bytes)):
            _check_method(owner, __obj.__name__, args, kwargs)
        return __self.budget.write(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, whose results may be huge."""
        if operator == "+" and type(left) is str and type(right) is str:  # most of them
            return self.budget.write(left + right)
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left), _PERCENT_WIDTH)
            flat(right)
        return self.budget.write(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: of a plain dictionary the item at once, unless it is a method's name, which comes first."""
        if type(obj) is dict and attribute in obj and attribute not in _METHODS_OF_DICT:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def compiled(self, source: str) -> jinja2.Template:
        """The template with its loops and joins counted."""
        tree = self.parse(source)
        # Jinja calls no hook for loops, comparisons and `~`: the syntax tree is given filters in their places.
        _rewrite(tree, self._rewritten)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def _rewritten(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, nodes.For):
            node.iter = _filter_node(node.iter, "bounded")
        elif isinstance(node, nodes.Compare):
            sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
            # comparing two nested lists takes as many steps as they have values; with a constant it ends at once
            if not any(isinstance(side.expr, nodes.Const) for side in sides):
                for side in sides:
                    side.expr = _filter_node(side.expr, "flat")
        elif isinstance(node, nodes.Tuple) and node.ctx == "load":
            return _filter_node(node, "flat")  # as a key it is hashed, through all that it holds
        elif isinstance(node, nodes.Concat):
            return _filter_node(nodes.List(node.nodes).set_lineno(node.lineno), "joined")
        return node


def _rewrite(node: nodes.Node, change: Callable[[nodes.Node], nodes.Node]) -> None:
    """Put `change(node)` in the place of every node below this one, from the innermost outwards."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _rewrite(value, change)
            setattr(node, name, change(value))
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _rewrite(item, change)
                    value[position] = change(item)


def _owner_of(function: Any) -> Any:
    return getattr(getattr(function, "__wrapped__", function), "__self__", None)


def _filter_node(node: nodes.Node, name: str) -> nodes.Filter:
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno)
    return filtered


def _joined(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_chars(sum(map(len, parts)))
    return "".join(parts)


def flat(value: Any) -> Any:
    """The value, if it is small enough to be written as text; raises TooMuch."""
    _count(value)
    return value


def _count(value: Any) -> int:
    """Values inside a list or an object, itself counted; raises TooMuch."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    # with a list of what is left, since recursion could go deeper than Python allows
    counted, waiting = 1, [value]
    while waiting:
        held = waiting.pop()
        items = [*held, *held.values()] if isinstance(held, dict) else held
        counted += len(items)
        if counted > MAX_NODES:
            raise TooMuch(f"a list of more than {MAX_NODES:,} values written as text")
        waiting += [item for item in items if isinstance(item, (list, tuple, dict))]
    return counted


def _check_flat(*values: Any, **_: Any) -> None:
    for value in values:
        _count(value)


def _after(check: Callable[..., None], plain: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return plain(*args, **kwargs)

    return _passing_as(plain, checked)


def _passing_as(plain: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper, given the context, evaluation context or environment that Jinja gives to `plain`."""
    if hasattr(plain, "jinja_pass_arg"):
        setattr(wrapper, "jinja_pass_arg", plain.jinja_pass_arg)  # noqa: B010
    return wrapper


def _check_product(operator: str, left: Any, right: Any) -> None:
    for side, times in ((left, right), (right, left)):
        if isinstance(side, (str, bytes, list, tuple)) and isinstance(times, int):
            # a list takes a pointer of 8 bytes for each value
            _check_chars(times * len(side) * (1 if isinstance(side, (str, bytes)) else 8))
    if isinstance(left, int) and isinstance(right, int):
        # the length of the result before it is computed, which is what would take the time
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TooMuch("a number without end")


_PERCENT_WIDTH = r"%(?:\([^)]*\))?[^a-zA-Z%]*?(\d+|\*)"


def _check_format(form: str, width: str) -> None:
    widths = [match.group(1) for match in re.finditer(width, form)]
    # by its length first: int() of a thousand digits is slow, and refused beyond 4,300
    if any(text == "*" or len(text) > 5 for text in widths) or sum(map(int, widths)) > MAX_CHARS:
        raise TooMuch(f"a text padded to more than {MAX_WIDTH:,}")


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    given = (*args, *kwargs.values())
    _check_widths(given)
    if name == "replace":
        _check_replace(owner, *args)
    elif name == "join":
        _check_join(*args, owner)
    elif name in ("format", "format_map"):
        _check_format(str(owner), r"(\d+)")
        _check_flat(*given)
    elif name == "translate" and args and isinstance(args[0], dict):
        _check_chars(len(owner) * max((len(str(text)) for text in args[0].values()), default=0))
    elif name == "expandtabs":
        width = next((value for value in given if isinstance(value, int)), 8)
        _check_chars(str(owner).count("\t") * width + len(owner))


def _check_widths(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TooMuch(f"a text padded or repeated by more than {MAX_WIDTH:,}")


def _check_filter(name: str, *args: Any, **kwargs: Any) -> None:
    """Raise TooMuch where a filter would pad, wrap or fill a text further than a text may be long."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, (int, str))]
    _check_widths(given)
    text = str(given[0]) if given else ""
    if name == "format":
        _check_format(text, _PERCENT_WIDTH)
    # how often the padding or separator may be written
    places = {"wordwrap": len(text), "format": text.count("%")}.get(name, text.count("\n") + 1)
    sizes = [value if isinstance(value, int) else len(value) for value in given[1:]]
    if name == "wordwrap":
        _check_chars(WRAPPING * len(text))
    if name in ("wordwrap", "format", "indent"):
        _check_chars(places * max(sizes, default=0))


def _checked(plain: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter whose arguments are looked at first; those after `eval_ctx` are given to the check."""

    def checked(context: Any, *args: Any, **kwargs: Any) -> Any:
        args = (list(args[0]) if check is _check_join and not isinstance(args[0], str) else args[0], *args[1:])
        check(*args, **kwargs)
        return plain(context, *args, **kwargs)

    return _passing_as(plain, checked)


def _check_join(items: Any, between: Any = "", *_: Any, **more: Any) -> None:
    separators = len(items) * len(str(more.get("d", between)))
    _check_chars(separators + sum(len(item) for item in items if isinstance(item, str)))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    _check_chars(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # transformers' own tojson: Jinja's escapes HTML and sorts keys
    _check_widths([indent])
    width = sum(item if isinstance(item, int) else len(item) for item in (indent or 0, *(separators or ())))
    _check_chars(_count(value) * width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: Any) -> None:
    """What `raise_exception` does: the template refuses the conversation."""
    raise jinja2.exceptions.TemplateError(str(message))


class _MakeDict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict` has it."""
        return dict.fromkeys(*args)


class _PlainNamespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, as transformers has it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may name an attribute so
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
