"""The nodes of a run meet before any rank starts: all are present, have the same settings, and know their interface.

torch's launcher would wait for a node that never comes, count a rank twice where two nodes have the same NODE_RANK, and
end in tracebacks on every node. Here node 0 listens at MASTER_PORT, and every other node sends it a card (one line of
JSON). Once the last one has come, or two contradict each other, all get the same answer: every card, or the error
message, which every node then shows. The port is free again before torch listens on it.

Why not a store of torch (its `static` rendezvous is a `TCPStore` too): its client gets `DistNetworkError` or
`DistStoreError` after the timeout, and nothing else. It cannot tell that another program holds the port, that a node
came and left again, which node is missing (only node 0 could, until its own timeout), or at which of its addresses node
0 is reached, which gloo needs. It would also import torch in the launching process, which takes two seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from sft_play.config.resolved import differing_keys, resolved_without_paths
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.facts.hardware import Hardware
from sft_play.facts.installed import COMPUTING
from sft_play.launch.command import Nodes, require_free_port
from sft_play.launch.exported import gpus_as_nodes
from sft_play.launch.launch_options import LaunchOptions
from sft_play.launch.network import GLOO_VARIABLE, addresses_of, interface_of, is_loopback, is_own, plain_address
from sft_play.log import one_line
from sft_play.runs.manifest import versions

logger = logging.getLogger(__name__)
PROGRAM = "sft-play run"
_MOST_BYTES = 2**20
"""More than any card has; whatever sends more is not a node."""
_SHOWN = 6
"""Differences that a message lists."""
_ATTEMPT_S = 5.0
"""How long one attempt to connect waits: a firewall that drops packets answers nothing."""
_REFUSED_PAUSE_S = 0.5
"""Between two attempts where nobody listens yet."""
_CLOSED_PAUSE_S = 3.0
"""Between two attempts at a port that another program holds, which may log each of them."""
_ANSWER_S = 10.0
"""How much longer than the limit a connected node waits, so that node 0's own message about the limit arrives."""

Card = Mapping[str, Any]


@dataclass(frozen=True)
class Met:
    """The result of a meeting: the cards of all nodes by node rank, and this node's address among them."""

    cards: tuple[Card, ...]
    address: str

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`GLOO_SOCKET_IFNAME` of this node's ranks; nothing where it is set, or no interface has the address."""
        interface = interface_of(self.address)
        return {} if environment.get(GLOO_VARIABLE) or interface is None else {GLOO_VARIABLE: interface}


def card_of(config: RunConfig, hardware: Hardware, options: LaunchOptions) -> dict[str, Any]:
    """A node's description: its settings, package versions, device and number of ranks.

    Paths and the output are left out: nodes may keep the same files in different places. The ranks, which read the
    files, compare their content.
    """
    packages = versions()
    return {
        "host": socket.gethostname(),
        "alike": {
            "number of ranks": hardware.gpus_per_node,
            "device": hardware.gpus[0].name if hardware.gpus else "CPU",
            "STRATEGY": options.strategy or "left to the plan",
            "engine": "DeepSpeed" if options.deepspeed else "left to the plan",
            **{f"version of {name}": packages.get(name) or "not installed" for name in ("sft_play", *COMPUTING)},
        },
        "settings": resolved_without_paths(config),
    }


def meet(nodes: Nodes, card: Card, *, limit_s: float) -> Met:
    """Meet the other nodes at `MASTER_ADDR:MASTER_PORT`; every node returns, or raises the same, at the same time.

    Raises:
        ConfigError: the address is unknown here or is another machine's, two nodes have the same NODE_RANK, or their
            settings differ.
        HardwareError: the port is taken, or nodes did not come within `limit_s`.
    """
    mine = {**card, "program": PROGRAM, "node": nodes.rank, "nodes": nodes.count}
    addresses = addresses_of(str(nodes.address), nodes.port or 0)
    deadline = time.monotonic() + limit_s
    if nodes.rank == 0:
        _require_ours(nodes, addresses)
        require_free_port(nodes.port)
        met = _NodeZero(nodes, mine).receive(deadline, limit_s)
    else:
        met = _call(nodes, mine, deadline, limit_s)
    interface = interface_of(met.address)
    logger.info("Nodes: %d met at %s (%s); this is node %d, at %s%s", nodes.count, _place(nodes),
                ", ".join(one_line(str(item.get("host"))) for item in met.cards), nodes.rank, met.address,
                f" on {interface}" if interface else "")  # fmt: skip
    return met


def _require_ours(nodes: Nodes, addresses: list[str]) -> None:
    """Raises ConfigError where node 0 would listen at another machine's address."""
    if any(is_own(address) for address in addresses):
        return
    own = sorted(
        plain_address(item.address)
        for held in psutil.net_if_addrs().values()
        for item in held
        if item.family == socket.AF_INET and not is_loopback(item.address)
    )
    raise ConfigError(
        f"NODE_RANK=0 is the machine at MASTER_ADDR={one_line(str(nodes.address))}, and this one has another address "
        f"({', '.join(own) or 'none but the loopback'}): give this machine another NODE_RANK= (1 to "
        f"{nodes.count - 1}), or all nodes a MASTER_ADDR= of this machine"
    )


def refuse_lone_node(nodes: Nodes) -> None:
    """Raises ConfigError where MASTER_ADDR is set, but not the number of nodes; on the machine that has the address,
    where it may have been exported for a single node, only a warning."""
    if nodes.count > 1 or nodes.address is None:
        return
    given, how = f"MASTER_ADDR={one_line(nodes.address)}", "NNODES= nor WORLD_SIZE= says how many nodes meet there"
    with contextlib.suppress(ConfigError, OSError):
        addresses = addresses_of(nodes.address, 0)
        if all(is_loopback(address) for address in addresses):
            return
        if any(is_own(address) for address in addresses):  # batch systems export it for a single node too
            logger.warning("%s is this machine, and neither %s: the run is on this node alone", given, how)
            return
    raise ConfigError(
        f"{given} is another machine, and neither {how}: give NNODES=2 NODE_RANK=1 (on the machine at that address "
        "NODE_RANK=0), or NNODES=1 for this machine alone"
    )


def _place(nodes: Nodes) -> str:
    return f"{one_line(str(nodes.address))}:{nodes.port}"


@dataclass
class _Peer:
    """A connection to node 0, and the card that came over it, if any."""

    client: socket.socket
    received: bytes = b""
    card: Card | None = None


@dataclass
class _NodeZero:
    """Node 0: receives the others' cards, and answers all of them at the same time."""

    nodes: Nodes
    mine: Card
    _peers: list[_Peer] = field(default_factory=list)

    def receive(self, deadline: float, limit_s: float) -> Met:
        """All cards; an error is sent to every node that came, then raised."""
        logger.info("Nodes: node 0 waits at %s for %s, %.0f s at most",
                    _place(self.nodes), _numbered(self._absent()), limit_s)  # fmt: skip
        with self._listener() as listener, selectors.DefaultSelector() as ready, contextlib.ExitStack() as stack:
            stack.callback(self._close_all)
            listener.setblocking(False)
            ready.register(listener, selectors.EVENT_READ)
            try:
                while self._absent():
                    if time.monotonic() > deadline:
                        raise HardwareError(self._late(limit_s))
                    # at least once a second, to look at the deadline
                    for key, _ in ready.select(timeout=min(1.0, max(0.01, deadline - time.monotonic()))):
                        self._accept(listener, ready) if key.data is None else self._read(key.data, ready)
            except (ConfigError, HardwareError) as error:
                self._answer({"error": str(error), "kind": type(error).__name__})
                raise
            came = sorted((peer for peer in self._peers if peer.card), key=lambda peer: peer.card["node"])  # type: ignore[index]
            cards = (self.mine, *(peer.card for peer in came if peer.card is not None))
            # only a connection tells at which of its addresses the others reach this node
            reached = plain_address(str(came[0].client.getsockname()[0]))
            self._answer({"cards": cards})
        return Met(cards, reached)

    def _listener(self) -> socket.socket:
        port = int(self.nodes.port or 0)
        with contextlib.suppress(OSError):  # IPv6 may be switched off
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))

    def _absent(self) -> list[int]:
        came = {peer.card["node"] for peer in self._peers if peer.card}
        return [rank for rank in range(1, self.nodes.count) if rank not in came]

    def _late(self, limit_s: float) -> str:
        came = [rank for rank in range(self.nodes.count) if rank not in self._absent()]
        misread = gpus_as_nodes(came, self.nodes.count, _ranks_on(self.mine))
        return (
            f"{_numbered(self._absent())} of {self.nodes.count} did not connect to {_place(self.nodes)} within "
            f"{limit_s:.0f} s (distributed.timeout_s): {misread}{'; else ' if misread else ''}start the same command "
            f"there with its own NODE_RANK=; where it runs, a firewall closes port {self.nodes.port}, or MASTER_ADDR= "
            "means another machine there"
        )

    def _accept(self, listener: socket.socket, ready: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            client.setblocking(False)
            peer = _Peer(client)
            self._peers.append(peer)
            ready.register(client, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer, ready: selectors.BaseSelector) -> None:
        """Read from a connection: a card, a part of one, its end, or something that no node sends."""
        try:
            part = peer.client.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        peer.received += part
        is_whole = peer.received.endswith(b"\n")
        if part and not is_whole and len(peer.received) < _MOST_BYTES and peer.received.startswith(b"{"):
            return  # a part of a card: the rest arrives with a later event
        card = _card(peer.received) if is_whole and peer.card is None else None
        if card is None:
            ready.unregister(peer.client)
            peer.client.close()
            self._peers.remove(peer)
            if peer.card is not None:
                logger.info("Nodes: node %s (%s) left; waiting for it again",
                            peer.card["node"], one_line(str(peer.card.get("host"))))  # fmt: skip
            return
        peer.card = card
        self._check(peer)
        logger.info("Nodes: node %s is here (%s)", card["node"], one_line(str(card.get("host"))))
        self._say_misread()

    def _say_misread(self) -> None:
        """Warn as soon as the first rank of every node has come and no other: nobody else may be coming."""
        absent = set(self._absent())
        came = [rank for rank in range(self.nodes.count) if rank not in absent]
        per_node = _ranks_on(self.mine)
        misread = gpus_as_nodes(came, self.nodes.count, per_node)
        if misread and absent and len(came) == self.nodes.count // per_node:
            logger.warning(
                "Nodes: only nodes %s of %d are here: %s", ", ".join(map(str, came)), self.nodes.count, misread
            )

    def _check(self, peer: _Peer) -> None:
        """Raises ConfigError where a card contradicts this node's, or an earlier one."""
        card = peer.card or {}
        rank, host = card.get("node"), one_line(str(card.get("host")))
        if card.get("nodes") != self.nodes.count:
            raise ConfigError(
                f"{host} was given NNODES={one_line(str(card.get('nodes')))}, and node 0 NNODES={self.nodes.count}: "
                "give all nodes the same"
            )
        if not isinstance(rank, int) or not 0 < rank < self.nodes.count:
            raise ConfigError(f"{host} was given NODE_RANK={one_line(str(rank))}, which node 0 is not waiting for")
        for other in self._peers:
            if other is not peer and other.card is not None and other.card["node"] == rank:
                raise ConfigError(
                    f"{host} and {one_line(str(other.card.get('host')))} were both given NODE_RANK={rank}: give each "
                    f"node its own number, 0 to {self.nodes.count - 1}"
                )
        wrong = differences(self.mine, card)
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise ConfigError(
                f"the nodes differ: {'; '.join(wrong[:_SHOWN])}{more}; give all nodes the same command, run YAML and "
                "packages"
            )

    def _answer(self, answer: Mapping[str, Any]) -> None:
        text = (json.dumps(answer) + "\n").encode()
        for peer in self._peers:
            with contextlib.suppress(OSError):  # it has given up
                peer.client.settimeout(_ANSWER_S)
                peer.client.sendall(text)

    def _close_all(self) -> None:
        for peer in self._peers:
            peer.client.close()


def _ranks_on(card: Card) -> int:
    """Ranks on a node, as its card says."""
    found = (card.get("alike") or {}).get("number of ranks")
    return found if isinstance(found, int) else 1


def _numbered(ranks: list[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def differences(first: Card, other: Card) -> list[str]:
    """A line for each difference between a node's card and node 0's."""
    names = f"node {first.get('node')}", f"node {other.get('node')}"
    lines = []
    left, right = (card.get("alike") or {} for card in (first, other))
    for key in [*left, *(key for key in right if key not in left)]:
        if left.get(key) != right.get(key):
            lines.append(_differ(key, left.get(key), right.get(key), names))
    for key, (one, two) in differing_keys(first.get("settings") or {}, other.get("settings") or {}).items():
        lines.append(_differ(key, one, two, names))
    return lines


def _differ(key: str, one: Any, two: Any, names: tuple[str, str]) -> str:
    return f"{key} is {one_line(str(one), limit=60)} on {names[0]} and {one_line(str(two), limit=60)} on {names[1]}"


def _card(text: bytes) -> Card | None:
    try:
        card = json.loads(text)
    except ValueError:
        return None
    return card if isinstance(card, dict) and card.get("program") == PROGRAM else None


def _call(nodes: Nodes, mine: Card, deadline: float, limit_s: float) -> Met:
    """Find node 0, send it this node's card and wait for the answer."""
    last, is_logged = "", False
    while time.monotonic() < deadline:
        try:
            address = (str(nodes.address), int(nodes.port or 0))
            left = max(0.1, min(_ATTEMPT_S, deadline - time.monotonic()))
            with socket.create_connection(address, timeout=left) as client:
                if client.getsockname() == client.getpeername():  # on one machine a socket may connect to itself
                    raise ConnectionRefusedError(None, "Connection refused")
                client.sendall((json.dumps(mine) + "\n").encode())
                if not is_logged:
                    logger.info("Nodes: node %d waits with node 0 at %s for the others", nodes.rank, _place(nodes))
                    is_logged = True
                answer = _reply(client, deadline)
                if answer is not None:
                    return _understood(answer, plain_address(str(client.getsockname()[0])))
            last, pause = "the program that listens there is not a node of this run, or was stopped", _CLOSED_PAUSE_S
        except OSError as error:
            last = "no answer" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
            pause = _REFUSED_PAUSE_S
        if not is_logged:
            logger.info("Nodes: node %d tries to reach node 0 at %s, %.0f s at most (%s)",
                        nodes.rank, _place(nodes), limit_s, last)  # fmt: skip
            is_logged = True
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    itself = any(is_loopback(address) for address in addresses_of(str(nodes.address), int(nodes.port or 0)))
    trap = "MASTER_ADDR= resolves to this machine itself: give an address of node 0" if itself else (
        "MASTER_ADDR= is another machine, or a firewall closes the port"
    )  # fmt: skip
    misread = gpus_as_nodes((nodes.rank,), nodes.count, _ranks_on(mine))
    raise HardwareError(
        f"node 0 did not answer at {_place(nodes)} within {limit_s:.0f} s (distributed.timeout_s; {last}): "
        f"{misread}{'; else ' if misread else ''}start the same command there with NODE_RANK=0; where it runs, {trap}"
    )


def _reply(client: socket.socket, deadline: float) -> Card | None:
    """The answer of node 0; None where the connection ended without one, or something else answers there."""
    text = b""
    while not text.endswith(b"\n"):
        client.settimeout(max(0.1, deadline + _ANSWER_S - time.monotonic()))  # node 0 gives up first, and says why
        try:
            part = client.recv(65_536)
        except OSError:
            return None
        if not part or not (text + part).startswith(b"{") or len(text) > 1_000 * _MOST_BYTES:
            return None
        text += part
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and ("cards" in answer or "error" in answer) else None


def _understood(answer: Card, address: str) -> Met:
    if "error" in answer:
        kind = HardwareError if answer.get("kind") == HardwareError.__name__ else ConfigError
        raise kind(f"node 0 says: {one_line(str(answer['error']), limit=1_000)}")
    return Met(tuple(card for card in answer["cards"] if isinstance(card, dict)), address)
