"""Addresses and network interfaces of this machine, and the one that leads to another node: what gloo listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import MutableMapping

import psutil

from sft_play.errors import ConfigError
from sft_play.launch.ranks import Ranks
from sft_play.log import one_line

logger = logging.getLogger(__name__)

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The network interface that gloo listens on. Without it gloo resolves this host's own name."""


def addresses_of(host: str, port: int) -> list[str]:
    """The addresses that `MASTER_ADDR` resolves to on this machine.

    Raises:
        ConfigError: it does not resolve.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(
            f"MASTER_ADDR={one_line(host)} does not resolve on this machine ({reason or 'it cannot be a name'}); give "
            "the IP address of node 0, or a name that every node knows"
        ) from None
    return list(dict.fromkeys(str(item[4][0]) for item in resolved))


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine; None where none has it."""
    wanted = plain_address(address)
    for name, held in psutil.net_if_addrs().items():
        of_ip = (item.address for item in held if item.family in (socket.AF_INET, socket.AF_INET6))
        if any(plain_address(text) == wanted for text in of_ip):
            return name
    return "lo" if is_loopback(address) and "lo" in psutil.net_if_addrs() else None


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the route to another (no packet is sent); None where there is no route."""
    for address in addresses_of(host, port):
        with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, port or 9))  # of UDP: it only chooses the route; any port does
            return str(probe.getsockname()[0])
    return None


def choose_interface(ranks: Ranks, environment: MutableMapping[str, str]) -> None:
    """Set `GLOO_SOCKET_IFNAME` of a rank among several nodes to the interface that leads to `MASTER_ADDR`.

    gloo would take the address of this host's own name. That is the loopback where the name does not resolve, or
    resolves to 127.0.1.1 (as in Debian's /etc/hosts), and on the other nodes it means themselves. A launch that met the
    other nodes, or the user, has set the variable already. NCCL finds interfaces by itself (`NCCL_SOCKET_IFNAME`), and
    may use several at once.

    Raises:
        ConfigError: MASTER_ADDR does not resolve here, so this rank would not find the others.
    """
    host = environment.get("MASTER_ADDR")
    if ranks.world_size <= ranks.local_world_size or not host:
        return
    port = environment.get("MASTER_PORT", "")
    try:
        address = address_towards(host, int(port) if port.isdigit() else 0)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where torchrun runs with --rdzv-backend c10d it takes the name of node 0's host: give "
            "--local-addr with this node's own address on every node"
        ) from None
    interface = interface_of(address) if address else None
    if environment.get(GLOO_VARIABLE) or interface is None:
        return
    environment[GLOO_VARIABLE] = interface
    logger.info("Network: gloo uses %s (%s), which leads to MASTER_ADDR=%s; %s= names another",
                interface, address, one_line(host), GLOO_VARIABLE)  # fmt: skip


def plain_address(address: str) -> str:
    """An address without its zone, and IPv4 inside IPv6 as IPv4."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def is_loopback(address: str) -> bool:
    """Whether an address means this machine wherever it is read."""
    try:
        return ipaddress.ip_address(plain_address(address)).is_loopback
    except ValueError:
        return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_own(address: str) -> bool:
    """Whether this machine can listen at an address."""
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
