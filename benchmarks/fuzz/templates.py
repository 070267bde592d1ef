"""Chat templates: real ones mutated, and programs made of the sandbox's own means, rendered and masked."""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.fuzz import mutate
from benchmarks.fuzz.run import CaseRunner, FuzzFailure, isolated_environment, read_files, require_words
from sft_play.errors import TokenizerError
from sft_play.files import ROOT
from sft_play.runs.folder import read_json

_PIECES: dict[str, list[str]] = read_json(Path(__file__).with_suffix(".json"))
_NAMES, _ATTRIBUTES, _FILTERS, _EXPRESSIONS = (
    _PIECES[kind] for kind in ("names", "attributes", "filters", "expressions")
)


@contextlib.contextmanager
def case_runner() -> Iterator[CaseRunner]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folders = (Path(spec.origin).parent / "chat_templates", ROOT / "tests" / "bundled" / "templates")
    seeds = [path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.glob("*.jinja"))]
    with isolated_environment(), tokenizer() as made:

        def judge(draw: random.Random, folder: Path) -> bool:
            if draw.random() < 0.4:
                source = "".join(_statement(draw, 0) for _ in range(draw.randint(1, 5)))
            else:
                source = _mutated(draw, draw.choice(seeds))
            accepted = _renders(draw, source)
            if draw.random() < 0.3:
                _masks(draw, made, source)
            if read_files(folder):
                raise FuzzFailure(f"the template wrote {list(read_files(folder))}")
            return accepted

        yield judge


@contextlib.contextmanager
def tokenizer() -> Iterator[Any]:
    from transformers import AutoTokenizer

    from tests.models import make_tokenizer

    with tempfile.TemporaryDirectory(prefix="fuzz-tokenizer-") as folder:
        make_tokenizer(Path(folder))
        yield AutoTokenizer.from_pretrained(folder)


def _mutated(draw: random.Random, source: str) -> str:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(source) + 1)
        choice = draw.randrange(3)
        if choice == 0:
            source = mutate.text(draw, source)
        elif choice == 1:
            source = source[:at] + _statement(draw, 0) + source[at:]
        else:
            source = mutate.raw(draw, source.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return source


def _statement(draw: random.Random, depth: int) -> str:
    inner = _statement(draw, depth + 1) if depth < 5 else "y"
    ways = (
        f"{{{{ {_expression(draw)} }}}}", f"{{% for x in {_expression(draw)} %}}{inner}{{% endfor %}}",
        f"{{% if {_expression(draw)} %}}{inner}{{% else %}}z{{% endif %}}", f"{{% set x = {_expression(draw)} %}}",
        f"{{% macro m(x) %}}{inner}{{{{ m(x) }}}}{{% endmacro %}}{{{{ m(1) }}}}",
        f"{{% set ns = namespace(x=[]) %}}{{% set ns.x = ns.x + [ns.x, ns.x] %}}{{{{ ns.x }}}}{inner}",
        f"{{% generation %}}{inner}{{% endgeneration %}}",
        "{% include 'a' %}" if draw.random() < 0.3 else "{{ bos_token }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        f"{{% filter {draw.choice(_FILTERS)} %}}{inner}{{% endfilter %}}",
    )  # fmt: skip
    return draw.choices(ways, (4, 3, 3, 3, 1, 1, 1, 1, 1, 1))[0]


def _expression(draw: random.Random) -> str:
    way = draw.randrange(6)
    if way == 0:
        return draw.choice(_EXPRESSIONS)
    made = draw.choice(_NAMES)
    for _ in range(draw.randrange(3)):
        made += f".{draw.choice(_ATTRIBUTES)}" if draw.random() < 0.5 else f" | {draw.choice(_FILTERS)}"
    return made if way < 4 else f"{made} {draw.choice('+-*~/%')} {draw.choice((*_NAMES, *_EXPRESSIONS))}"


def _messages(draw: random.Random) -> list[dict[str, Any]]:
    texts = ("hello", "what is 2 + 2?", "<|im_end|>", "é" * 50, "")
    roles = ("user", "assistant") * draw.randint(1, 3)
    turns = [{"role": role, "content": draw.choice(texts)} for role in roles]
    return [{"role": "system", "content": "Be kind."}, *turns] if draw.random() < 0.3 else turns


def _renders(draw: random.Random, source: str) -> bool:
    from sft_play.data.masks.sandbox import RenderError
    from sft_play.data.masks.template import ChatTemplate

    try:
        template = ChatTemplate(source, variables={"eos_token": "<|im_end|>"}, today=date(2026, 11, 1))
        written = template.render(_messages(draw), with_prompt=draw.random() < 0.5)
    except (TokenizerError, RenderError) as error:
        require_words(error)
        return False
    if not isinstance(written, str):
        raise FuzzFailure(f"rendered to {type(written)}")
    return True


def _masks(draw: random.Random, tokenizer: Any, source: str) -> None:
    """A row through the template as training renders it: a mask that fits, or why there is none."""
    from sft_play.config.schema import DataConfig
    from sft_play.data.masks.render import Renderer
    from sft_play.data.sources.formats import Chat
    from sft_play.data.sources.raw import BadRow

    tokenizer.chat_template = source
    chat = Chat(messages=tuple(_messages(draw)), tools=(), where="row 1")
    try:
        row = Renderer(tokenizer, DataConfig(), max_seq_len=256)(chat)
    except TokenizerError:
        return
    if isinstance(row, BadRow):
        return
    is_fitting = len(row.input_ids) == len(row.labels)
    if not is_fitting or any(label not in (-100, i) for i, label in zip(row.input_ids, row.labels, strict=True)):
        raise FuzzFailure("the labels are not those of the tokens")
