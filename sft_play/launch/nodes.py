"""The nodes of a run meet before any rank starts: all are present, and all were told the same.

Node 0 serves a store of torch's at MASTER_PORT for as long as the meeting lasts; every node puts a card into it, and
what one refuses all refuse. torchrun, which listens there afterwards, would only say that some nodes did not come.
Where exported variables may number nodes or ranks, they meet once before, and those that come tell.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sft_play.config.load import differing_options, resolved_config_without_paths
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import (
    GLOO_VARIABLE,
    SETTLE_SHARE,
    NodeSetup,
    can_bind,
    find_interface,
    is_local,
    is_loopback,
    local_addresses,
    require_free_port,
    resolve_addresses,
    route_address,
)
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.process.waiting import importing
from sft_play.runs.folder import installed_versions

if TYPE_CHECKING:  # it loads torch, which a plan does without
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

# Differences that a message lists.
_MAX_LISTED_DIFFERENCES = 6
# Between two looks into the store, where a wait hears Ctrl-C; a `wait` of the store itself would not.
_POLL_S = 0.1
# How long node 0 serves the others that have not read yet why it leaves.
_LEAVE_TIMEOUT_S = 10.0
_CARD_KEY, _CAME_KEY, _LEFT_KEY, _REFUSED_KEY = "sft_play_node_", "sft_play_came", "sft_play_left", "sft_play_refused"
_ALL_CARDS_KEY = "sft_play_all"
NodeCard = Mapping[str, Any]


@dataclass(frozen=True)
class NodeMeeting:
    """The result of a meeting: the cards of all nodes by node rank, and this node's address among them."""

    cards: tuple[NodeCard, ...]
    address: str | None

    def gloo_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`GLOO_SOCKET_IFNAME` of this node's ranks; nothing where it is set, or no interface has the address."""
        interface = find_interface(self.address) if self.address else None
        return {} if environment.get(GLOO_VARIABLE) or interface is None else {GLOO_VARIABLE: interface}


def node_card(config: RunConfig, hardware: Hardware, *, strategy: str | None, uses_deepspeed: bool) -> dict[str, Any]:
    """A node's description, without paths, which may differ; the ranks compare the files' content."""
    packages = installed_versions()
    return {
        "host": socket.gethostname(),
        "alike": {
            "number of ranks": hardware.ranks_per_node,
            "device": hardware.gpus[0].name if hardware.gpus else "CPU",
            "STRATEGY": strategy or "left to the plan",
            "engine": "DeepSpeed" if uses_deepspeed else "left to the plan",
            **{f"version of {name}": packages.get(name) or "not installed" for name in ("sft_play", *COMPUTE_PACKAGES)},
        },
        "settings": resolved_config_without_paths(config),
    }


def meet_nodes(nodes: NodeSetup, card: NodeCard, *, timeout_s: float, may_count_ranks: bool = False) -> NodeMeeting:
    """Meet the other nodes at `MASTER_ADDR:MASTER_PORT`; every node returns, or raises the same, at the same time.
    `may_count_ranks`: the numbers may be those of the nodes' first ranks: then all multiples of a node's ranks, and no
    other for a while, are all nodes. Raises ConfigError: the address is unknown here or is another machine's, two nodes
    have the same NODE_RANK, or their settings differ; HardwareError: the port is taken, or nodes did not come within
    `timeout_s`, or one was stopped."""
    with importing():
        from torch.distributed import DistError

    addresses = resolve_addresses(str(nodes.address), nodes.port or 0)
    # `start` tells two starts on one host apart
    own_card = {
        **card,
        "node": nodes.rank,
        "nodes": nodes.count,
        "start": uuid.uuid4().hex,
        "sees node 0 at": addresses,
    }
    deadline = time.monotonic() + timeout_s
    first_ranks = range(0, nodes.count, card["alike"]["number of ranks"]) if may_count_ranks else range(nodes.count)
    try:
        store = (
            _serve_store(nodes, addresses, timeout_s) if nodes.rank == 0 else _connect_store(nodes, own_card, timeout_s)
        )
        with _hold_connection(nodes):
            cards = _exchange_cards(store, nodes, own_card, first_ranks, deadline, timeout_s)
    except DistError as error:
        message = one_line(str(error).partition("\n")[0], limit=200)
        raise HardwareError(
            f"the nodes lost each other at {nodes.endpoint}: {message}; start all of them again"
        ) from None
    if nodes.rank == 0:  # its name may mean the loopback here: the others know where they reach it
        address = next(
            (
                node_address
                for card in (*cards[1:], own_card)
                for node_address in card["sees node 0 at"]
                if can_bind(node_address)
            ),
            None,
        )
    else:
        address = route_address(str(nodes.address), nodes.port or 0)
    interface = find_interface(address) if address else None
    hosts = ", ".join(one_line(str(item.get("host"))) for item in cards)
    logger.info("Nodes: %d met at %s (%s); this is node %d, at %s%s", len(cards), nodes.endpoint, hosts, nodes.rank,
                address, f" on {interface}" if interface else "")  # fmt: skip
    return NodeMeeting(cards, address)


def _serve_store(nodes: NodeSetup, addresses: list[str], timeout_s: float) -> TCPStore:
    if not any(can_bind(node_address) for node_address in addresses):
        raise ConfigError(
            f"NODE_RANK=0 is the machine at MASTER_ADDR={one_line(str(nodes.address))}, and this one has another "
            f"address ({', '.join(local_addresses()) or 'none but the loopback'}): give this machine another "
            f"NODE_RANK= "
            f"(1 to {nodes.count - 1}), or all nodes a MASTER_ADDR= of this machine"
        )
    from torch.distributed import TCPStore

    require_free_port(nodes.port)
    logger.info("Nodes: node 0 waits at %s for %d more, %.0f s at most", nodes.endpoint, nodes.count - 1, timeout_s)
    return TCPStore(str(nodes.address), int(nodes.port or 0), is_master=True, wait_for_workers=False)


def _connect_store(nodes: NodeSetup, own_card: NodeCard, timeout_s: float) -> TCPStore:
    """Connect on a thread: torch's own wait does not hear Ctrl-C, and never ends where another program listens."""
    from torch.distributed import TCPStore

    stores: list[TCPStore] = []
    address, port, deadline = str(nodes.address), int(nodes.port or 0), time.monotonic() + timeout_s
    logger.info("Nodes: node %d looks for node 0 at %s, %.0f s at most", nodes.rank, nodes.endpoint, timeout_s)
    while (reason := _connection_error(address, port)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if reason is None:
        store_timeout = timedelta(seconds=timeout_s + 60)
        connect = threading.Thread(
            target=lambda: stores.append(TCPStore(address, port, wait_for_workers=False, timeout=store_timeout)),
            daemon=True,
        )
        connect.start()
        connect.join(max(_LEAVE_TIMEOUT_S, deadline - time.monotonic()))
        if stores:
            return stores[0]
        reason = "the program that listens there is not a node of this run"
    hint = "MASTER_ADDR= is another machine, or a firewall closes the port"
    if any(is_loopback(node_address) for node_address in own_card["sees node 0 at"]):
        hint = "MASTER_ADDR= resolves to this machine itself: give an address of node 0"
    raise HardwareError(f"node 0 did not answer at {nodes.endpoint} within {timeout_s:.0f} s (distributed.timeout_s; "
                        f"{reason}): start the same command there with NODE_RANK=0; where it runs, {hint}")  # fmt: skip


@contextlib.contextmanager
def _hold_connection(nodes: NodeSetup) -> Iterator[None]:
    """Stay until node 0's store has closed: torchrun, next at the same port, would find this store and lose it."""
    if nodes.rank == 0:
        yield
        return
    connection = None
    with contextlib.suppress(OSError):  # where nothing listens any more, the store will say so
        connection = socket.create_connection((str(nodes.address), int(nodes.port or 0)), timeout=_LEAVE_TIMEOUT_S)
    with connection or contextlib.nullcontext():
        yield
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.recv(1)  # the store sends nothing: this ends when it closes, or when the time is over


def _connection_error(address: str, port: int) -> str | None:
    try:
        socket.create_connection((address, port), timeout=_LEAVE_TIMEOUT_S).close()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
    return None


def _exchange_cards(
    store: TCPStore, nodes: NodeSetup, own_card: NodeCard, first_ranks: range, deadline: float, timeout_s: float
) -> tuple[NodeCard, ...]:
    """The cards of all nodes; an error of this node is left in the store for the others, whose errors it raises."""
    store.add(_CAME_KEY, 1)
    try:
        return _collect_cards(store, nodes, own_card, first_ranks, deadline, timeout_s)
    except BaseException as error:
        stop_message = (
            f"node {nodes.rank} ({one_line(str(own_card.get('host')))}) was stopped; start it again on all nodes"
        )
        message = str(error) or stop_message
        store.compare_set(_REFUSED_KEY, "", json.dumps([isinstance(error, ConfigError), message]))
        raise
    finally:
        store.add(_LEFT_KEY, 1)
        leave_deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        while (
            nodes.rank == 0 and store.add(_LEFT_KEY, 0) < store.add(_CAME_KEY, 0) and time.monotonic() < leave_deadline
        ):
            time.sleep(_POLL_S)  # the store ends with this node's use of it


def _collect_cards(
    store: TCPStore, nodes: NodeSetup, own_card: NodeCard, first_ranks: range, deadline: float, timeout_s: float
) -> tuple[NodeCard, ...]:
    cards: dict[int, NodeCard] = {
        nodes.rank: json.loads(store.compare_set(f"{_CARD_KEY}{nodes.rank}", "", json.dumps(own_card)))
    }
    _require_compatible(nodes, own_card, cards[nodes.rank])
    # A single node may have all ranks, and as well be the first of many, unless no other machine can reach it.
    may_be_first_ranks = len(first_ranks) > 1 or is_local(str(nodes.address))
    last_arrival = time.monotonic()
    while True:
        is_complete = store.check([_ALL_CARDS_KEY])  # node 0 has seen all cards, so that they can be read now
        if store.check([_REFUSED_KEY]):
            is_config_error, message = json.loads(store.get(_REFUSED_KEY))
            raise (ConfigError if is_config_error else HardwareError)(message)
        absent = [rank for rank in range(nodes.count) if rank not in cards]
        arrived = [rank for rank in absent if store.check([f"{_CARD_KEY}{rank}"])]
        for rank in arrived:
            cards[rank] = json.loads(store.get(f"{_CARD_KEY}{rank}"))
            logger.info("Nodes: node %d is here (%s)", rank, one_line(str(cards[rank].get("host"))))
            _require_compatible(nodes, own_card, cards[rank])
            last_arrival = time.monotonic()
        if is_complete:
            return tuple(cards[rank] for rank in sorted(cards))
        quiet_s = time.monotonic() - last_arrival
        are_first_ranks = may_be_first_ranks and sorted(cards) == list(first_ranks)
        if nodes.rank == 0 and (len(cards) == nodes.count or (are_first_ranks and quiet_s > timeout_s * SETTLE_SHARE)):
            store.set(_ALL_CARDS_KEY, "")
        elif 0 not in cards and quiet_s > _LEAVE_TIMEOUT_S:
            raise HardwareError(f"what answers at {nodes.endpoint} is another program, or the ranks of a run that "
            f"began "
                                "without this node: start it again on all nodes")  # fmt: skip
        elif not arrived and time.monotonic() > deadline:
            raise HardwareError(
                f"node{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {nodes.count} did not connect to "
                f"{nodes.endpoint} within {timeout_s:.0f} s (distributed.timeout_s): start the same command there with "
                f"its "
                f"own NODE_RANK=; where it runs, a firewall closes port {nodes.port}, or MASTER_ADDR= differs there"
            )
        time.sleep(_POLL_S * (not arrived))


def _require_compatible(nodes: NodeSetup, own_card: NodeCard, card: NodeCard) -> None:
    first, other = sorted((own_card, card), key=lambda node_card: int(node_card["node"]))
    if card["node"] == nodes.rank and card["start"] != own_card["start"]:
        raise ConfigError(
            f"{one_line(str(card.get('host')))} and {one_line(str(own_card.get('host')))} were both given "
            f"NODE_RANK={nodes.rank}: give each node its own number, 0 to {nodes.count - 1}, and start the command once"
        )
    if first["nodes"] != other["nodes"]:
        raise ConfigError(f"node {first['node']} was given NNODES={first['nodes']}, and node {other['node']} "
                          f"NNODES={other['nodes']}: give all nodes the same")  # fmt: skip
    differing = card_differences(first, other)
    if differing:
        ellipsis = " …" * (len(differing) > _MAX_LISTED_DIFFERENCES)
        raise ConfigError(f"the nodes differ: {'; '.join(differing[:_MAX_LISTED_DIFFERENCES])}{ellipsis}; give all "
                          "nodes the same command, run YAML and packages")  # fmt: skip


def card_differences(first: NodeCard, other: NodeCard) -> list[str]:
    """A line for each difference between the cards of two nodes."""
    first_facts, other_facts = first.get("alike") or {}, other.get("alike") or {}
    differing = {
        key: (first_facts.get(key), other_facts.get(key))
        for key in {**first_facts, **other_facts}
        if first_facts.get(key) != other_facts.get(key)
    }
    differing |= differing_options(first.get("settings") or {}, other.get("settings") or {})
    names = f"node {first.get('node')}", f"node {other.get('node')}"
    return [
        f"{key} is {one_line(str(first_value), limit=60)} on {names[0]} and {one_line(str(other_value), limit=60)} "
        f"on {names[1]}"
        for key, (first_value, other_value) in differing.items()
    ]
