"""Addresses, ports and network interfaces of this machine, and where the nodes of a run meet."""

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from sft_play.errors import ConfigError, HardwareError
from sft_play.log import one_line

# torch.distributed's and accelerate's default port of the main process.
DEFAULT_PORT = 29500
# How long ranks that a launcher started wait for each other.
RENDEZVOUS_TIMEOUT_S = 600.0
# The network interface that gloo listens on. Without it gloo resolves this host's own name.
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class NodeSetup:
    """The machines of a run: how many, which this is, and where they meet."""

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int | None = None
    # What RANK and WORLD_SIZE of the environment were read as, where they gave count and rank; else
    # empty.
    exported_note: str = field(default="", compare=False)

    @property
    def endpoint(self) -> str:
        """Address and port, for a message."""
        return f"{one_line(str(self.address))}:{self.port}"


def is_host_address(text: str) -> bool:
    """True if a text can be a host: an IP address or a name."""
    is_name = _HOST_NAME.fullmatch(text) is not None and len(text) <= 253
    return is_name or _parse_address(text) is not None


def resolve_addresses(host: str, port: int) -> list[str]:
    """The addresses that `MASTER_ADDR` resolves to on this machine. Raises ConfigError where it
    does not."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(
            f"MASTER_ADDR={one_line(host)} does not resolve on this machine"
            f" ({reason or 'it cannot be a name'}); give the IP address of node 0, or a name that"
            " every node knows"
        ) from None
    return list(dict.fromkeys(str(item[4][0]) for item in resolved))


def local_addresses() -> list[str]:
    """This machine's IPv4 addresses but the loopback."""
    interfaces = psutil.net_if_addrs().values()
    ipv4 = [
        item.address
        for addresses in interfaces
        for item in addresses
        if item.family == socket.AF_INET
    ]
    return sorted(address for address in ipv4 if not is_loopback(address))


def find_interface(address: str) -> str | None:
    """The network interface that has an address of this machine; None where none has it."""
    interfaces, parsed = psutil.net_if_addrs(), _parse_address(address)
    for name, interface_addresses in interfaces.items():
        if parsed is not None and any(
            _parse_address(item.address) == parsed for item in interface_addresses
        ):
            return name
    return "lo" if is_loopback(address) and "lo" in interfaces else None


def route_address(host: str, port: int) -> str | None:
    """This machine's address on the route to another (no packet is sent); None where there is no
    route."""
    for address in resolve_addresses(host, port):
        with (
            contextlib.suppress(OSError),
            socket.socket(_address_family(address), socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((address, port or 9))  # of UDP: it only chooses the route; any port does
            return str(probe.getsockname()[0])
    return None


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(text.partition("%")[0])
        return getattr(parsed, "ipv4_mapped", None) or parsed
    return None


def is_loopback(address: str) -> bool:
    """True if an address means this machine wherever it is read."""
    parsed = _parse_address(address)
    return parsed is not None and parsed.is_loopback


def is_local(host: str) -> bool:
    """True if a server that listens there can be reached by this machine alone."""
    return host.lower() == "localhost" or is_loopback(host)


def server_url(host: str, port: int) -> str:
    """The address, from this machine, of a server that listens there."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in address:
        address = f"[{address}]"
    return f"http://{address}:{port}/"


def allowed_host_names(host: str) -> frozenset[str] | None:
    """The names under which clients may ask a server that only this machine can reach; None, which
    is any name, for a server that others reach. A page in a browser of this machine can be made to
    reach it too: under its own name, pointed here (DNS rebinding)."""
    return frozenset((host.lower(), "localhost", "127.0.0.1", "::1")) if is_local(host) else None


def is_local_request(allowed_names: frozenset[str] | None, host: str, origin: str | None) -> bool:
    """True if a request's Host, and its Origin where it has one, are names of this machine."""
    if allowed_names is None:
        return True
    try:
        return all(
            urlsplit(url).hostname in allowed_names
            for url in (f"//{host}", origin)
            if url is not None
        )
    except ValueError:
        return False


def _address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def can_bind(address: str) -> bool:
    """True if this machine can listen at an address."""
    with (
        contextlib.suppress(OSError),
        socket.socket(_address_family(address), socket.SOCK_STREAM) as probe,
    ):
        probe.bind((address, 0))
        return True
    return False


def require_free_port(port: int | None) -> None:
    """Raises HardwareError where another process listens on the port that this node needs; None
    needs none."""
    if port is None:
        return
    with socket.socket() as probe:
        # a port that was just closed counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            other_port = port + 1 if port < 65_535 else DEFAULT_PORT
            raise HardwareError(
                f"MASTER_PORT={port} cannot be listened on: {error.strerror}; stop what listens"
                f" there, or give another port on all nodes: MASTER_PORT={other_port}"
            ) from None
