"""What a person gives a launch: numbers and machines in variables, and the text of a launcher's file, with JSON as
people write it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sft_play.errors import ConfigError
from sft_play.facts.network import DEFAULT_PORT, Nodes, is_address
from sft_play.log import one_line

MAX_BYTES = 4 * 2**20
"""More than any such file has; weights or a log named by mistake stop here."""

# Strings are matched first, so that the // of a URL begins no comment.
_NOT_DATA = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)|(?P<open>/\*)""", re.DOTALL
)
# A string is matched first, so that commas inside it are left alone.
_TRAILING_COMMA = re.compile(r""""(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])""")


def whole_number(values: Mapping[str, str], name: str, *, least: int) -> int | None:
    """A variable as a whole number from `least`; None where it is not set, ConfigError where it is not one."""
    text = values.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError(f"{name}={one_line(text)} is not a whole number from {least}")
    return int(text)


NODE_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def nodes_of(values: Mapping[str, str], names: tuple[str, str, str, str] = NODE_VARIABLES) -> Nodes:
    """The machines of a run as four variables say: how many, which this is, and the address and port of the first.

    Raises:
        ConfigError: one is not a number or out of range, or is missing where there are several machines.
    """
    of_count, of_rank, of_address, of_port = names
    count, rank = whole_number(values, of_count, least=1) or 1, whole_number(values, of_rank, least=0)
    address, port = values.get(of_address, "").strip() or None, whole_number(values, of_port, least=1)
    if port is not None and port > 65_535:
        raise ConfigError(f"{of_port}={port} is not a port; ports go from 1 to 65535")
    if (rank or 0) >= count and not values.get(of_count, "").strip():
        raise ConfigError(
            f"{of_rank}={rank} names one of several nodes, but {of_count}= does not say how many there are"
        )
    if (rank or 0) >= count:
        raise ConfigError(f"{of_rank}={rank} is not one of {of_count}={count}: ranks go from 0 to {count - 1}")
    if count == 1:
        return Nodes(1, 0, address, port)
    if rank is None or address is None:
        raise ConfigError(
            f"{of_count}={count} needs {of_rank}=0 to {count - 1} and {of_address}=, an address at which the others "
            f"reach node 0 (and {of_port}=, default {DEFAULT_PORT})"
        )
    if not is_address(address):
        raise ConfigError(
            f"{of_address}={one_line(address)} is not a host name or an IP address; the port goes into {of_port}="
        )
    return Nodes(count, rank, address, port or DEFAULT_PORT)


def text_of(path: Path, *, variable: str, wanted: str) -> str:
    """The file's text in UTF-8, without a byte order mark. Messages name `variable` and `wanted` (`DEEPSPEED_CONFIG`,
    `a DeepSpeed configuration in JSON or YAML`).

    Raises:
        ConfigError: the file is missing, a folder, not text, too large, or may not be read.
    """
    shown = f"{variable}={one_line(str(path))}"
    try:
        if path.is_dir():
            raise ConfigError(f"{shown} is a folder; name {wanted}{_those_of(path)}")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{shown} has {path.stat().st_size:,} bytes; {wanted} has a few thousand")
        raw = path.read_bytes()
    except FileNotFoundError:
        where = path.absolute().parent
        raise ConfigError(f"{shown} does not exist (looked in {where}); name {wanted}{_those_of(where)}") from None
    except OSError as error:
        raise ConfigError(f"{shown} cannot be read: {error.strerror}; name {wanted}") from None
    except ValueError as error:  # a null character in the name
        raise ConfigError(f"{shown} cannot be a file: {error}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown}: byte 0x{raw[error.start]:02X} at {error.start:,} is not UTF-8; save the file as UTF-8"
        ) from None


def _those_of(folder: Path) -> str:
    try:
        names = sorted(item.name for item in folder.iterdir() if item.suffix in (".json", ".yaml", ".yml"))
    except OSError:
        return ""
    return f"; {one_line(str(folder))} has {one_line(', '.join(names[:12]))}" if names else ""


def looks_like_json(text: str) -> bool:
    """Whether the first character outside comments is a brace or a bracket."""
    return _without_comments(text, name="").lstrip()[:1] in ("{", "[")


def json_of(text: str, *, name: str) -> Any:
    """The value of a JSON text that may have `//`, `#` and `/* */` comments and trailing commas.

    Raises:
        ConfigError: it is not JSON (with line and column), or a key appears twice.
    """

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        if twice:
            raise ConfigError(f"{name}: the key {one_line(', '.join(twice))} appears twice; keep one of them")
        return dict(pairs)

    def refuse_constant(word: str) -> Any:
        raise ConfigError(f"{name}: {word} is not a JSON value; give a number")

    clean = _TRAILING_COMMA.sub(
        lambda match: " " if match.group() == "," else match.group(), _without_comments(text, name=name)
    )
    try:
        return json.loads(clean, object_pairs_hook=mapping, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        near = clean.splitlines()[error.lineno - 1].strip() if clean.strip() else ""
        what = f"{error.msg}, at `{one_line(near, limit=60)}`" if near else "the file is empty"
        raise ConfigError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {what}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


def _without_comments(text: str, *, name: str) -> str:
    """The text with comments blanked out: all other characters keep their line and column."""

    def blank(match: re.Match[str]) -> str:
        if match.group("open") is not None and name:
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError(f"{name}:{line}: the comment that starts with /* never ends; close it with */")
        comment = match.group("comment")
        return match.group() if comment is None else re.sub(r"[^\n]", " ", comment)

    return _NOT_DATA.sub(blank, text)
