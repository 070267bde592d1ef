"""The process that chat templates run in: Jinja's sandbox as transformers has it, with limits on
time and memory.

A template is a program from somebody's repository. Jinja's sandbox keeps it from files and from
Python, and stops neither a loop that never ends nor a text that doubles; nor can anything inside
the process where it happens: comparing two nested lists may take years in one step of Python. So
templates run in a process of their own, one for each process that renders and all of its threads,
which the kernel ends at a limit; the next rendering starts it again.

Both ends are here: `ask` is called by who renders, `serve` is the process. It imports Jinja and
little else, so that it starts in a tenth of a second.
"""

import atexit
import contextlib
import functools
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, sandbox

from sft_play.log import one_line

# Processor time of one rendering. A conversation of a thousand turns takes some hundredths of a
# second.
MAX_RENDER_SECONDS = 5
# Address space of the process beyond what it has when it starts, which is a hundredth of this; a
# `sitecustomize` of the machine may make it more than this, as one that imports torch does.
MAX_SANDBOX_BYTES = 2 * 2**30
_EXIT_NO_MEMORY = 3


class RenderError(ValueError):
    """A template that refuses a conversation, fails on it, or never ends with it; the message is
    safe to show."""

    # The line of the template, where it is no valid Jinja.
    line: int | None = None


class EndlessTemplateError(RenderError):
    """A template that exceeds a limit; rendering it once more would take as long."""


# The end of those who render.

_lock = threading.Lock()
_process: Any = None


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of this module returns in the process of templates; raises RenderError."""
    try:
        request = pickle.dumps((MAX_RENDER_SECONDS, function, arguments))
    except RecursionError:
        raise EndlessTemplateError("the row is nested too deeply for a chat template") from None
    with _lock:
        answer = _exchange(request) or _exchange(request, is_last_try=True)
    if isinstance(answer, RenderError):
        raise answer
    return answer[0]


def _exchange(request: bytes, *, is_last_try: bool = False) -> Any:
    """The answer to a request: what the function returned, in a tuple, or a RenderError. None where
    a signal from elsewhere ended the process, for which the template may not be blamed before a
    second try."""
    global _process
    if _process is None or _process.poll() is not None:
        _process = subprocess.Popen(
            # -P: modules are imported from where this process has them, not from the current folder
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            process_group=0,  # Ctrl-C of a terminal is for who asks
        )
    try:
        _process.stdin.write(request)
        _process.stdin.flush()
        return pickle.load(_process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        _process.communicate()  # its end
        exit_code = _process.returncode
        if exit_code < 0 and exit_code != -signal.SIGPROF and not is_last_try:
            return None
        if exit_code == -signal.SIGPROF:
            limit = f"more than {MAX_RENDER_SECONDS} seconds"
        elif exit_code < 0 or exit_code == _EXIT_NO_MEMORY:
            # the kernel may end it too, where memory is short
            limit = f"more than {MAX_SANDBOX_BYTES / 2**30:.0f} GiB of memory"
        else:
            raise RuntimeError(
                f"the process of chat templates ended with exit code {exit_code}; its output"
                " says why"
            ) from None
        return EndlessTemplateError(
            f"the chat template does not end in reasonable time or size: {limit}"
        )
    except BaseException:  # Ctrl-C: the next request must not be given the answer of this one
        _process.kill()
        _process.communicate()
        raise


# Of the process that forked this one; kept, since closing its pipes could write what is still in
# their buffers.
_inherited_process: Any = None


def _forget_process() -> None:
    global _lock, _process, _inherited_process
    _lock, _process, _inherited_process = threading.Lock(), None, _process


# a process that is forked starts a process of templates of its own
os.register_at_fork(after_in_child=_forget_process)


@atexit.register
def _end_process() -> None:
    if _process is not None:
        _process.kill()
        _process.communicate()


# The end of the process.


def serve() -> None:
    """Answer requests from standard input, each a function with its arguments, until whoever asks
    has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for who asks, whose end closes the pipe
    _limit_address_space()
    # with PYTHONUNBUFFERED standard output writes what a signal lets it, and pickle takes that for
    # all: who asks would wait for the rest
    answers = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115
    try:
        while True:
            seconds, function, arguments = pickle.load(sys.stdin.buffer)
            # no handler: at its end the kernel ends the process, whatever it is doing
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                answer: Any = (function(*arguments),)
            except MemoryError:
                raise
            except RecursionError:
                answer = EndlessTemplateError(
                    "the chat template calls itself without end, or it or the row is nested too"
                    " deeply for recursion"
                )
            except Exception as error:  # a program of somebody's: whatever Python raises
                answer = RenderError(one_line(str(error) or type(error).__name__))
                answer.line = getattr(error, "lineno", None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pickle.dump(answer, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except MemoryError:  # ended at once: what is left would not do for more
        os._exit(_EXIT_NO_MEMORY)


def _limit_address_space() -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no /proc and refuses the limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + MAX_SANDBOX_BYTES
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


# What is asked of it.


def render_template(
    source: str, today: date, variables: Mapping[str, Any], conversation: Mapping[str, Any]
) -> str:
    """What a template writes; `today` is the day that `strftime_now` formats."""
    return _compile(source, today).render(**variables, **conversation)  # a name in both is refused


def describe_template(
    source: str, today: date, known_variables: set[str]
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The texts that a template looks for, and the variables that it reads and does not set: others
    than these."""
    environment = _compile(source, today).environment
    tree = environment.parse(source)
    searched_texts = frozenset(_find_searched_texts(tree))
    # Variables that it asks its caller for are those that it reads before it sets them itself.
    # Jinja alone also names variables that are set in one branch of an `if` and read after it.
    is_read_first: dict[str, bool] = {}
    for name, is_read in _variable_uses(tree):
        is_read_first.setdefault(name, is_read)
    names = sorted(
        meta.find_undeclared_variables(tree) - known_variables - environment.globals.keys()
    )
    return searched_texts, tuple(
        name for name in names if is_read_first.get(name) and not name.endswith("_token")
    )


@functools.lru_cache(maxsize=8)  # a tokenizer has one or two
def _compile(source: str, today: date) -> jinja2.Template:
    environment = _ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # A mask is found by rendering the same conversation several times: all renderings must be
    # alike.
    environment.filters["random"] = environment.globals["lipsum"] = _refuse_randomness
    environment.globals["raise_exception"] = _refuse_conversation
    environment.globals["strftime_now"] = datetime.combine(today, time()).strftime
    environment.globals["dict"] = _DictFactory()
    environment.globals["namespace"] = _PlainNamespace
    return environment.from_string(source)


class _ChatEnvironment(sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role`: of a plain dictionary the item at once, unless it is a method's name,
        which comes first."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_METHODS:
            return obj[attribute]
        return super().getattr(obj, attribute)


_DICT_METHODS = frozenset(dir(dict))


class _GenerationBlock(ext.Extension):
    """`{% generation %}…{% endgeneration %}`, with which templates mark answers: the text between
    them."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """What stands between the marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # transformers' marks are a block: what is set there ends there
        return [nodes.Scope(body).set_lineno(line)]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # transformers' own tojson: Jinja's escapes HTML and sorts keys
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse_conversation(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _refuse_randomness(*_: Any, **__: Any) -> None:
    raise jinja2.exceptions.TemplateError(
        "the chat template writes something else each time, by chance"
    )


class _DictFactory:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict` has it."""
        return dict.fromkeys(*args)


class _PlainNamespace(jinja2.utils.Namespace):
    """Jinja's namespace without underscored names, as transformers has it."""

    # no `self`: a template may name an attribute so
    def __init__(*args: Any, **kwargs: Any) -> None:
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


def _variable_uses(node: nodes.Node) -> Iterator[tuple[str, bool]]:
    """Names in the order in which a template evaluates them, each with whether it is read there."""
    if isinstance(node, nodes.Name):
        yield node.name, node.ctx == "load"
    children = [*node.iter_child_nodes()]
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        # what is assigned is evaluated before its name is set
        children.sort(key=lambda child: child is node.target)
    elif isinstance(node, nodes.For):
        children.sort(key=lambda child: child is not node.iter)
    for child in children:
        yield from _variable_uses(child)


_MIN_SEARCHED_CHARS = 3
_NOT_A_WORD = re.compile(r"[^\w\s]")


def _find_searched_texts(tree: nodes.Template) -> Iterator[str]:
    """Texts that the template compares with, splits at or looks for, on which its output may
    depend; without words that have no punctuation (role names, keys) and texts of one or two
    characters."""
    holders: list[nodes.Node] = [
        *tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign))
    ]
    for holder in holders:
        for constant in holder.find_all(nodes.Const):
            text = str(constant.value).strip()
            # a role's name may occur in any answer: marks around it would cut the answer into
            # pieces
            if (
                isinstance(constant.value, str)
                and len(text) >= _MIN_SEARCHED_CHARS
                and _NOT_A_WORD.search(text)
            ):
                yield text
