"""A chat template as transformers renders it, with the date pinned and with limits.

A template is a program from somebody's repository; `LimitedEnvironment` is what it runs in. A
test holds the rendering equal to `apply_chat_template` of transformers.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from datetime import time as clock
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import meta, nodes

from sft_play.data.sources.messages import REASONING_KEYS, Message
from sft_play.errors import TokenizerError
from sft_play.log import one_line

# The sandbox that chat templates run in: transformers' environment with limits.
#
# Jinja's sandbox keeps a template from files and from Python. It stops neither a loop that never
# ends nor a text that doubles. So turns of loops, calls and the sizes of their results are counted
# here, and at each of them the processor time is looked at; what a single operation may take is
# bounded by the sizes of its texts.

# Loop iterations and calls in one rendering; a conversation of a thousand turns takes some ten thousand.
MAX_STEPS = 2_000_000
# Processor time of one rendering. A conversation of a thousand turns takes some hundredths of a second.
MAX_RENDER_SECONDS = 5.0
# Longest text that a template may put together.
MAX_CHARS = 64 * 2**20
# Bytes of all texts that a template makes in one rendering, together: it may keep every one of them.
MAX_WRITTEN_BYTES = 2**30
# Largest number that a template may pad, indent or repeat a text by.
MAX_WIDTH = 100_000
# What a character costs in filters that go through a text in Python, which nothing ends on their way.
WRAPPING_COST = 64
# Values inside a list or an object that is written as text; lists that hold a list twice double quickly.
MAX_TEMPLATE_VALUES = 1_000_000
# Length of a whole number that a template may multiply up to.
MAX_INTEGER_BITS = 1_000_000


class LimitExceededError(Exception):
    """A limit was exceeded."""


# Filters that do not look inside the values of a list; the others compare or write them.
_LIST_FILTERS = frozenset(
    {"length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "items"}
    | {"default", "d", "reverse", "batch", "slice", "attr"}
)
# Filters that may write more than they are given.
_GROWING_FILTERS = frozenset(
    {"center", "indent", "format", "wordwrap", "batch", "slice", "truncate", "replace", "join"}
)
_SLOW_FILTERS = frozenset({"wordwrap", "urlize", "pprint", "title", "xmlattr", "striptags", "wordcount"})
_COMPARING_TESTS = frozenset(
    {"eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=", "ge", ">=", "in"}
)


class RenderBudget(threading.local):
    """What one rendering may use, in its thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start the budget of a new rendering."""
        self.remaining_steps, self.written_bytes, self.deadline = MAX_STEPS, 0, time.thread_time() + MAX_RENDER_SECONDS

    def use_step(self) -> None:
        """Use up a step; raises LimitExceededError when none is left, or the time is up."""
        self.remaining_steps -= 1
        if self.remaining_steps < 0:
            raise LimitExceededError(f"more than {MAX_STEPS:,} turns of loops and calls")
        if time.thread_time() > self.deadline:
            raise LimitExceededError(f"more than {MAX_RENDER_SECONDS:.0f} seconds")

    def count_result(self, value: Any) -> Any:
        """Count what the template has made, if it is a text or a list, and return it."""
        if isinstance(value, (str, list, tuple)):
            _check_chars(len(value))
            self.written_bytes += sys.getsizeof(value)
            if self.written_bytes > MAX_WRITTEN_BYTES:
                raise LimitExceededError(f"texts of more than {MAX_WRITTEN_BYTES / 2**30:.0f} GiB in all")
        return value


def _check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise LimitExceededError(f"a text of more than {MAX_CHARS:,} characters")


_DICT_METHODS = frozenset(dir(dict))


class _GenerationBlock(jinja2.ext.Extension):
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
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self.budget = RenderBudget()
        self.finalize = check_value_size  # every value that `{{ }}` writes passes through it
        self.concat = _join_limited  # type: ignore[method-assign]  # puts together what blocks and macros write
        self.filters["tojson"] = _tojson
        for name, filter_function in self.filters.items():
            self.filters[name] = self._limit_filter(name, filter_function)
        tests: Any = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = _check_argument_sizes(tests[name])
        self.filters["flat"] = check_value_size
        self.filters["joined"] = lambda parts: self.budget.count_result(
            "".join(str(check_value_size(part)) for part in parts)
        )
        self.filters["turn"] = self._count_iteration

        def refuse_randomness(*_: Any, **__: Any) -> None:
            raise jinja2.exceptions.TemplateError("the chat template writes something else each time, by chance")

        # A mask is found by rendering the same conversation several times: all renderings must be alike.
        self.filters["random"] = self.globals["lipsum"] = refuse_randomness
        now = datetime.combine(today, clock())
        self.globals["raise_exception"] = refuse_conversation
        self.globals["strftime_now"] = now.strftime
        self.globals["dict"] = _DictFactory()
        self.globals["namespace"] = _PlainNamespace

    def _limit_filter(self, name: str, filter_function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted, and looks at its arguments first; `map` calls one for each of its items."""
        # the context, evaluation context or environment comes first
        passes_context = hasattr(filter_function, "jinja_pass_arg")

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.budget.use_step()
            values = list(args)
            if name == "join" and not isinstance(values[passes_context], str):
                values[passes_context] = list(values[passes_context])
            if name in _GROWING_FILTERS:
                _check_text(name, *values[passes_context:], **kwargs)
            if name in _SLOW_FILTERS:
                _check_chars(WRAPPING_COST * len(str(values[passes_context])))
            if name in _LIST_FILTERS:
                return filter_function(*values, **kwargs)
            for value in values:
                _count_values(value)
            return self.budget.count_result(filter_function(*values, **kwargs))

        if passes_context:
            setattr(limited, "jinja_pass_arg", getattr(filter_function, "jinja_pass_arg"))  # noqa: B009, B010
        return limited

    @jinja2.pass_context  # so that Jinja does not work it out while it compiles
    def _count_iteration(self, _: Any, value: Any) -> Any:
        self.budget.use_step()
        return value

    # As Jinja names them: a template may call its own macros with arguments named `self` or `context`.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a call that the template makes, and limit the size of its result."""
        __self.budget.use_step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_method(owner, __obj.__name__, args, kwargs)
        return __self.budget.count_result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, whose results may be huge."""
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(str(left), _PERCENT_WIDTH)
            check_value_size(right)
        return self.budget.count_result(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: of a plain dictionary the item at once, unless it is a method's name, which comes first."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def compile_limited(self, source: str) -> jinja2.Template:
        """Compile a template whose loops and joins are counted."""
        tree = self.parse(source)
        # Jinja calls no hook for loops, comparisons and `~`: the syntax tree is given filters in their places.
        _replace_nodes(tree, self._instrument)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def _instrument(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, nodes.For):
            iteration = _filter_node(nodes.Const(True).set_lineno(node.lineno), "turn")
            node.body.insert(0, nodes.ExprStmt(iteration).set_lineno(node.lineno))
            if node.test is not None:
                node.test = nodes.And(iteration, node.test).set_lineno(node.lineno)
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


def _replace_nodes(node: nodes.Node, change: Callable[[nodes.Node], nodes.Node]) -> None:
    """Put `change(node)` in the place of every node below this one, from the innermost outwards."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace_nodes(value, change)
            setattr(node, name, change(value))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_nodes(item, change)
                    value[index] = change(item)


def _filter_node(node: nodes.Node, name: str) -> nodes.Filter:
    filtered = nodes.Filter(node, name, [], [], None, None)
    filtered.set_lineno(node.lineno)
    return filtered


def _join_limited(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_chars(sum(map(len, parts)))
    return "".join(parts)


def check_value_size(value: Any) -> Any:
    """The value, if it is small enough to be written as text; raises LimitExceededError."""
    _count_values(value)
    return value


def _count_values(value: Any) -> int:
    """Values inside a list or an object, itself counted; raises LimitExceededError."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    # with a list of what is left, since recursion could go deeper than Python allows
    count, pending = 1, [value]
    while pending:
        container = pending.pop()
        items = [*container, *container.values()] if isinstance(container, dict) else container
        count += len(items)
        if count > MAX_TEMPLATE_VALUES:
            raise LimitExceededError(f"a list of more than {MAX_TEMPLATE_VALUES:,} values written as text")
        pending += [item for item in items if isinstance(item, (list, tuple, dict))]
    return count


def _check_argument_sizes(test: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: test(*map(check_value_size, args))


def _check_product(operator: str, left: Any, right: Any) -> None:
    for side, times in ((left, right), (right, left)):
        if isinstance(side, (str, bytes, list, tuple)) and isinstance(times, int):
            # a list takes a pointer of 8 bytes for each value
            _check_chars(times * len(side) * (1 if isinstance(side, (str, bytes)) else 8))
    if isinstance(left, int) and isinstance(right, int):
        # the length of the result before it is computed, which is what would take the time
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INTEGER_BITS:
            raise LimitExceededError("a number without end")


_PERCENT_WIDTH = r"%(?:\([^)]*\))?[^a-zA-Z%]*?(\d+|\*)"


def _check_format(format_text: str, width_pattern: str) -> None:
    widths = [match.group(1) for match in re.finditer(width_pattern, format_text)]
    # by its length first: int() of a thousand digits is slow, and refused beyond 4,300
    if any(text == "*" or len(text) > 5 for text in widths) or sum(map(int, widths)) > MAX_CHARS:
        raise LimitExceededError(f"a text padded to more than {MAX_WIDTH:,}")


def _check_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name == "join":
        _check_text("join", *args, owner)
    elif name in ("format", "format_map"):
        _check_widths((*args, *kwargs.values()))
        _check_format(str(owner), r"(\d+)")
        check_value_size([*args, *kwargs.values()])
    else:
        _check_text(name, owner, *args, **kwargs)


def _check_widths(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise LimitExceededError(f"a text padded or repeated by more than {MAX_WIDTH:,}")


def _check_text(name: str, text: Any, *args: Any, **kwargs: Any) -> None:
    """Raise LimitExceededError where a method of a text, or the filter of that name, would pad, wrap, fill or join one
    further than a text may be long."""
    options = [*args, *kwargs.values()]
    _check_widths([text, *options])
    max_insertion = max(
        (one if isinstance(one, int) else len(one) for one in options if isinstance(one, (int, str))), default=0
    )
    size = 0
    if name == "join":
        separator = str(kwargs.get("d", args[0] if args else ""))
        size, insertions, max_insertion = (
            sum(len(one) for one in text if isinstance(one, str)),
            len(text),
            len(separator),
        )
    elif name == "translate" and args and isinstance(args[0], dict):
        insertions, max_insertion = len(text), max((len(str(one)) for one in args[0].values()), default=0)
    elif name == "replace":
        old, new = (*map(str, args), "", "")[:2]
        size, insertions, max_insertion = len(str(text)), str(text).count(old), len(new)
    elif name == "format":
        _check_format(str(text), _PERCENT_WIDTH)
        insertions = str(text).count("%")
    else:  # how often the padding or separator may be written
        insertion_counts = {
            "wordwrap": len(str(text)),
            "indent": str(text).count("\n") + 1,
            "expandtabs": str(text).count("\t"),
        }
        size, insertions, max_insertion = len(str(text)), insertion_counts.get(name, 1), max_insertion or 8
    _check_chars(size + insertions * max_insertion)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # transformers' own tojson: Jinja's escapes HTML and sorts keys
    _check_widths([indent])
    width = sum(item if isinstance(item, int) else len(item) for item in (indent or 0, *(separators or ())))
    _check_chars(_count_values(value) * width)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse_conversation(message: Any) -> None:
    """What `raise_exception` does: the template refuses the conversation."""
    raise jinja2.exceptions.TemplateError(str(message))


class _DictFactory:
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
