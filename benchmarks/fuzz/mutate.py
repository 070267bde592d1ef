"""Mutations of bytes, of plain values and of texts; every choice comes from the given `random.Random`."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

STRANGE_TEXTS = (
    *("", " ", "\n", "\t", "\0", "\x1b[31m", "\u202e", "\ufeff", "\ud83d", "a" * 5000, "é" * 300, ".."),
    "../../etc/passwd",
    *("/", "~", "~nobody", "-", "--", "=", "null", "true", "no", "1e-4", "1e999", "-0", "0x10", "010", "1_000", "nan"),
    *(".inf", "12:30:45", "auto", "$(touch pwned)", "`touch pwned`", "; touch pwned", "${HOME}", "{{ 7*7 }}", "%s%n"),
    *("<script>alert(1)</script>", "<|im_end|>", "</s>", "[INST]", "hub:a/b", "http://127.0.0.1:1/", "\u2028", "１２"),
)
STRANGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 1000, 2**31, 2**63, 2**70, 10**40, 0.5, -0.1, 1e-300, 1e300),
    *(float("inf"), float("-inf"), float("nan"), [], {}, [[]], [None], {"": None}, {"a": {"b": [1, {"c": None}]}}),
)
STRANGE_BYTES = (
    *(b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\x80", b"\r", b"\r\n", b"\n\n", b"\t", b'"', b"'", b"\\"),
    *(b"{", b"}"),
    *(b"[", b"]", b",", b":", b"&a ", b"*a", b"!!python/object/apply:os.system [id]", b"<<: *a", b"--- ", b"...", b"%"),
    *(b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"\\ud83d", b"\\u0000", b"NaN", b"1e999", b"[" * 2000, b'{"a":' * 2000),
)


def value(draw: random.Random) -> Any:
    """A value that is wrong nearly everywhere."""
    return copy.deepcopy(draw.choice(draw.choice((STRANGE_VALUES, STRANGE_TEXTS))))


def text(draw: random.Random, given: str) -> str:
    """A text with a character dropped, doubled, swapped or replaced, or with a strange text in it."""
    at = draw.randrange(len(given) + 1)
    ways: tuple[Callable[[], str], ...] = (
        lambda: given[:at] + given[at + 1 :], lambda: given[:at] + given[at : at + 1] * 2 + given[at + 1 :],
        lambda: given[:at] + given[at + 1 : at + 2] + given[at : at + 1] + given[at + 2 :],
        lambda: given[:at] + draw.choice("abzXY_-.0159 =,:/") + given[at + 1 :],
        lambda: given[:at] + draw.choice(STRANGE_TEXTS) + given[at:], lambda: given.swapcase(),
        lambda: draw.choice(STRANGE_TEXTS),
    )  # fmt: skip
    return draw.choice(ways)()


def raw(draw: random.Random, given: bytes) -> bytes:
    """Bytes with one to six places changed: flipped, cut, repeated, or with strange ones in between."""
    for _ in range(draw.randint(1, 6)):
        at, end = sorted(draw.randrange(len(given) + 1) for _ in range(2))
        end = min(end, at + draw.choice((1, 8, 80, 10**6)))
        given = _bytes_changed(draw, given, at, end)[:2_000_000]
    return given


def _bytes_changed(draw: random.Random, data: bytes, at: int, end: int) -> bytes:
    way = draw.choices(("flip", "drop", "repeat", "insert", "cut", "lines"), (4, 4, 2, 6, 1, 4))[0]
    if way == "lines":
        return _lines_changed(draw, data)
    if way == "flip":
        return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    if way == "insert":
        return data[:at] + draw.choice(STRANGE_BYTES) + data[at:]
    return data[:at] + (data[at:end] * 2 if way == "repeat" else b"") + (b"" if way == "cut" else data[end:])


def _lines_changed(draw: random.Random, data: bytes) -> bytes:
    """A line dropped, doubled, replaced by another or indented otherwise."""
    lines = data.splitlines(keepends=True) or [b""]
    one, other = (draw.randrange(len(lines)) for _ in range(2))
    lines[one] = draw.choice(
        (b"", lines[one] * 2, lines[other], b" " + lines[one], lines[one].lstrip(), lines[one].rstrip(b"\n"))
    )
    return b"".join(lines)


def plain(draw: random.Random, given: Any) -> Any:
    """Plain data with one to three values changed, keys dropped, renamed or added, items repeated."""
    given = copy.deepcopy(given)
    for _ in range(draw.randint(1, 3)):
        holders = list(_holders(given))
        if not holders:
            return value(draw)
        holder = draw.choice(holders)
        keys: list[Any] = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw.choice(keys) if keys else None
        if key is None or draw.random() < 0.1:
            _add(draw, holder)
        elif draw.random() < 0.15:
            del holder[key]
        elif isinstance(holder, dict) and draw.random() < 0.2:
            holder[text(draw, str(key))] = holder.pop(key)
        elif isinstance(holder[key], str) and draw.random() < 0.5:
            holder[key] = text(draw, holder[key])
        elif isinstance(holder[key], (int, float)) and draw.random() < 0.5:
            holder[key] = holder[key] * draw.choice((-1, 0, 2, 3, 1000, 0.37, 1e20))
        else:
            holder[key] = value(draw)
    return given


def _add(draw: random.Random, holder: Any) -> None:
    if isinstance(holder, dict):
        holder[draw.choice(STRANGE_TEXTS)] = value(draw)
    else:
        holder.extend([value(draw)] * draw.choice((1, 2, 50)))


def _holders(given: Any) -> list[Any]:
    if not isinstance(given, (dict, list)):
        return []
    inner = given.values() if isinstance(given, dict) else given
    return [given, *(one for item in inner for one in _holders(item))]


def as_json(given: Any) -> str:
    return json.dumps(given, ensure_ascii=True)
