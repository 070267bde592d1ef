"""What a person gives a launch in variables: numbers, and machines."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sft_play.errors import ConfigError
from sft_play.facts.network import DEFAULT_PORT, Nodes, is_address
from sft_play.log import one_line


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
