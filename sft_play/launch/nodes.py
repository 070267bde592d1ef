"""The nodes of a run meet before any rank starts: all are present, and all were told the same.

Node 0 serves a store of torch's at MASTER_PORT for as long as the meeting lasts; every node puts a
card into it, and what one refuses all refuse. torchrun, which listens there afterwards, would only
say that some nodes did not come.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sft_play.config.load import differing_options, resolved_config_without_paths
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, HardwareError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.network import (
    GLOO_VARIABLE,
    NodeSetup,
    can_bind,
    find_interface,
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

# Between two looks into the store.
_POLL_S = 0.1
# How long node 0 serves the others that have not read yet why it leaves.
_LEAVE_TIMEOUT_S = 10.0
# Keys of the store: a card for each node, how many came and left, and the answer: the cards of all,
# or a refusal.
_CARD_KEY, _CAME_KEY, _LEFT_KEY, _ANSWER_KEY = (
    "sft_play_node_",
    "sft_play_came",
    "sft_play_left",
    "sft_play_answer",
)
NodeCard = Mapping[str, Any]


def node_card(
    config: RunConfig, hardware: Hardware, *, strategy: str | None, uses_deepspeed: bool
) -> dict[str, Any]:
    """Describe a node by what all nodes must have in common. Paths are left out, as they may
    differ; the ranks compare the content of the files."""
    packages = installed_versions()
    return {
        "host": socket.gethostname(),
        "alike": {
            "number of ranks": hardware.ranks_per_node,
            "device": hardware.gpus[0].name if hardware.gpus else "CPU",
            "STRATEGY": strategy or "left to the plan",
            "engine": "DeepSpeed" if uses_deepspeed else "left to the plan",
            **{
                f"version of {name}": packages.get(name) or "not installed"
                for name in ("sft_play", *COMPUTE_PACKAGES)
            },
        },
        "settings": resolved_config_without_paths(config),
    }


def meet_nodes(
    nodes: NodeSetup,
    card: NodeCard,
    *,
    timeout_s: float,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Meet the other nodes at `MASTER_ADDR:MASTER_PORT`; every node returns, or raises the same, at
    the same time. Returns `GLOO_SOCKET_IFNAME` for this node's ranks; nothing where it is set, or
    no interface has the address. Raises ConfigError: the address is unknown here or is another
    machine's, nodes did not come within `timeout_s`, two have the same NODE_RANK, or their settings
    differ; HardwareError: the port is taken, or node 0 does not answer.
    """
    addresses = resolve_addresses(str(nodes.address), nodes.port or 0)
    own_card = {**card, "node": nodes.rank, "nodes": nodes.count, "sees node 0 at": addresses}
    own_card["start"] = uuid.uuid4().hex  # tells two starts on one host apart
    if nodes.rank == 0:
        if not any(map(can_bind, addresses)):
            other_addresses = ", ".join(local_addresses()) or "none but the loopback"
            raise ConfigError(
                f"NODE_RANK=0 is the machine at MASTER_ADDR={one_line(str(nodes.address))}, and"
                f" this one has another address ({other_addresses}): give this machine another"
                f" NODE_RANK= (1 to {nodes.count - 1}), or all nodes a MASTER_ADDR= of this machine"
            )
        require_free_port(nodes.port)
        logger.info(
            "Nodes: node 0 waits at %s for %d more, %.0f s at most",
            nodes.endpoint,
            nodes.count - 1,
            timeout_s,
        )
    else:
        logger.info(
            "Nodes: node %d looks for node 0 at %s, %.0f s at most",
            nodes.rank,
            nodes.endpoint,
            timeout_s,
        )
    with importing():
        importlib.import_module("torch.distributed")
    # what stays where the thread below never ends
    outcomes: list[tuple[NodeCard, ...] | Exception] = [
        _no_answer_error(nodes, own_card, timeout_s, "another program listens there")
    ]

    def meet() -> None:
        try:
            outcomes.append(_exchange_cards(nodes, own_card, timeout_s))
        except Exception as error:
            outcomes.append(error)

    # in a thread: torch's own waits hear no Ctrl-C, and one for a program that is no store never
    # ends
    thread = threading.Thread(target=meet, daemon=True, name="sft_play nodes")
    thread.start()
    thread.join(2 * timeout_s + 3 * _LEAVE_TIMEOUT_S)
    cards = outcomes[-1]
    if isinstance(cards, Exception):
        raise cards
    if nodes.rank == 0:  # its name may mean the loopback here: the others know where they reach it
        seen_addresses = [
            address for card in (*cards[1:], own_card) for address in card["sees node 0 at"]
        ]
        address = next(filter(can_bind, seen_addresses), None)
    else:
        address = route_address(str(nodes.address), nodes.port or 0)
    hosts = ", ".join(one_line(str(item.get("host"))) for item in cards)
    interface = find_interface(address) if address else None
    logger.info(
        "Nodes: %d met at %s (%s); this is node %d, at %s%s",
        len(cards),
        nodes.endpoint,
        hosts,
        nodes.rank,
        address,
        f" on {interface}" if interface else "",
    )
    if environment.get(GLOO_VARIABLE) or interface is None:
        return {}
    return {GLOO_VARIABLE: interface}


def _no_answer_error(
    nodes: NodeSetup, own_card: NodeCard, timeout_s: float, reason: str
) -> HardwareError:
    hint = "MASTER_ADDR= is another machine, or a firewall closes the port"
    if any(map(is_loopback, own_card["sees node 0 at"])):
        hint = "MASTER_ADDR= resolves to this machine itself: give an address of node 0"
    return HardwareError(
        f"node 0 did not answer at {nodes.endpoint} within {timeout_s:.0f} s"
        f" (distributed.timeout_s; {reason}): start the same command there with NODE_RANK=0; where"
        f" it runs, {hint}"
    )


def _exchange_cards(nodes: NodeSetup, own_card: NodeCard, timeout_s: float) -> tuple[NodeCard, ...]:
    """Put this node's card into the store; returns the cards of all nodes, which node 0 hands out.
    Raises ConfigError on every node where one is refused; HardwareError where this node finds no
    node 0, or loses it."""
    from torch.distributed import DistError, TCPStore

    store, timeout = None, timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            str(nodes.address),
            nodes.port or 0,
            None,
            nodes.rank == 0,
            timeout,
            wait_for_workers=False,
        )
        store.set_timeout(2 * timeout)  # node 0 may have begun to wait last
        store.add(_CAME_KEY, 1)
        # the first card of this NODE_RANK: another node's, where both were given the same
        card = json.loads(store.compare_set(_CARD_KEY + str(nodes.rank), "", json.dumps(own_card)))
        if card["start"] != own_card["start"]:
            hosts = " and ".join(one_line(str(item.get("host"))) for item in (card, own_card))
            _refuse(
                store,
                f"{hosts} were both given NODE_RANK={nodes.rank}: give each node its own number, 0"
                f" to {nodes.count - 1}, and start the command once",
            )
        elif nodes.rank == 0:
            _collect_cards(store, nodes, own_card, timeout_s)
        elif not _poll(lambda: store.check([_CARD_KEY + "0"]), _LEAVE_TIMEOUT_S):
            raise HardwareError(
                f"what answers at {nodes.endpoint} is another program, or the ranks of a run that"
                " began without this node: start it again on all nodes"
            )
        answer = json.loads(store.get(_ANSWER_KEY))
        store.add(_LEFT_KEY, 1)
        # Node 0 stays until the others have read its answer; these until its store has closed:
        # torchrun, next at the same port, would find this store and lose it.
        with contextlib.suppress(RuntimeError):
            _poll(
                lambda: store.add(_LEFT_KEY, 0) >= store.add(_CAME_KEY, 0) and nodes.rank == 0,
                _LEAVE_TIMEOUT_S,
            )
    except DistError as error:
        reason = one_line(str(error).partition("\n")[0], limit=200)
        if store is None:
            raise _no_answer_error(nodes, own_card, timeout_s, reason) from None
        raise HardwareError(
            f"the nodes lost each other at {nodes.endpoint}: {reason}; start all of them again"
        ) from None
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    cards: list[NodeCard] = answer["cards"]
    if nodes.rank >= len(cards):
        raise ConfigError(
            f"NNODES={nodes.count} here, and node 0 was given {len(cards)}: give all the same"
        )
    return tuple(cards)


def _poll(holds: Callable[[], bool], limit_s: float) -> bool:
    """Look ten times a second whether something holds; False where it does not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _refuse(store: TCPStore, message: str) -> None:
    """Answer all nodes with an error, unless there is an answer."""
    store.compare_set(_ANSWER_KEY, "", json.dumps({"refused": message}))


def _collect_cards(store: TCPStore, nodes: NodeSetup, own_card: NodeCard, timeout_s: float) -> None:
    """On node 0: answer all with the cards of all, once they are there and alike."""
    cards = {0: own_card}

    def is_answered() -> bool:
        for rank in range(nodes.count):
            if rank not in cards and store.check([_CARD_KEY + str(rank)]):
                cards[rank] = json.loads(store.get(_CARD_KEY + str(rank)))
                logger.info(
                    "Nodes: node %d is here (%s)", rank, one_line(str(cards[rank].get("host")))
                )
                differing = card_differences(own_card, cards[rank])
                if differing:
                    listed = "; ".join(differing[:6])  # no more, for a message that can be read
                    _refuse(
                        store,
                        f"the nodes differ: {listed}; give all nodes the same command, run YAML and"
                        " packages",
                    )
        return len(cards) == nodes.count or store.check([_ANSWER_KEY])

    if not _poll(is_answered, timeout_s):
        absent = [rank for rank in range(nodes.count) if rank not in cards]
        _refuse(
            store,
            f"node{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {nodes.count} did not"
            f" connect to {nodes.endpoint} within {timeout_s:.0f} s (distributed.timeout_s): start"
            " the same command there with its own NODE_RANK=; where it runs, a firewall closes"
            f" port {nodes.port}, or MASTER_ADDR= differs",
        )
    # unless one was refused
    store.compare_set(
        _ANSWER_KEY, "", json.dumps({"cards": [cards[rank] for rank in sorted(cards)]})
    )


def card_differences(first: NodeCard, other: NodeCard) -> list[str]:
    """A line for each difference between the cards of two nodes."""
    first_facts, other_facts = (
        {"NNODES": card.get("nodes"), **card["alike"], **card.get("settings", {})}
        for card in (first, other)
    )
    return [
        f"{key} is {one_line(str(first_value), limit=60)} on node {first['node']} and "
        f"{one_line(str(other_value), limit=60)} on node {other['node']}"
        for key, (first_value, other_value) in differing_options(first_facts, other_facts).items()
    ]
