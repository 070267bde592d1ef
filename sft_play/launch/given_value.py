"""Numbers and addresses that a person gives a launch as text, by make's variables or in a file."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from sft_play.errors import ConfigError
from sft_play.log import one_line

DEFAULT_PORT = 29500
"""torch.distributed's and accelerate's default port of the main process."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def whole_number(values: Mapping[str, str], name: str, *, least: int) -> int | None:
    """A variable as a whole number from `least`; None where it is not set, ConfigError where it is not one."""
    text = values.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ConfigError(f"{name}={one_line(text)} is not a whole number from {least}")
    return int(text)


def is_address(text: str) -> bool:
    """Whether a text can be a host: an IP address or a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and len(text) <= 253
    return True
