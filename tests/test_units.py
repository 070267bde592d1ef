"""One unit: sizes of memory and disk are GiB wherever a person reads them; rates of links stay GB/s."""

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

DECIMAL = re.compile(r"(?:^|[\d}]) ?(?:KB|kB|MB|GB|TB)\b(?!/s)")
"""A decimal size: `80 GB`, `{size} GB`; products hold theirs without a space (`H100-80GB`, `H100 80GB HBM3`)."""
PRODUCT = re.compile(r"\d(?:GB|TB)\b")
SOURCES = [*sorted((ROOT / "sft_play").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts that a program may print: constants and f-strings, docstrings left out."""
    skipped: set[int] = set()  # a tree is walked from its root: what holds a node comes before it
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def decimal_sizes(text: str) -> list[str]:
    return DECIMAL.findall(PRODUCT.sub("", text))


def test_the_search_finds_decimal_sizes_and_leaves_rates_and_names():
    for text in ("141.0 GB", "{} GB free", "12 MB", "GB"):
        assert decimal_sizes(text), text
    for text in ("450 GB/s", "NVIDIA H100 80GB HBM3", "A100-80GB", "12 GiB", "{}GB/s", "GB200"):
        assert not decimal_sizes(text), text


def test_no_text_of_the_package_gives_a_size_in_decimal_units():
    assert len(SOURCES) > 100
    found = [
        (str(path.relative_to(ROOT)), text)
        for path in SOURCES
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if decimal_sizes(text)
    ]
    assert found == []


def test_no_header_of_a_config_gives_a_size_in_decimal_units():
    assert not [path for path in (ROOT / "configs").glob("*.yaml") if decimal_sizes(path.read_text(encoding="utf-8"))]
