"""The nodes of a run find each other before any rank starts: who came, and what each is.

Node 0 listens at MASTER_PORT, every other node sends it a card (plain JSON, one line), and all get all cards once the
last has come. A node that never comes is named, where a launcher would only wait. Whatever else connects to the port is
left unanswered.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from sft_play.doctor.finding import Finding, failed, listed, passed, warned
from sft_play.launch.command import Nodes
from sft_play.log import one_line

NAME = "rendezvous"
PROGRAM = "sft-play doctor"
MOST_BYTES = 65_536
ONE_CLIENT_S = 3.0
_RETRY_S = 0.5

Card = Mapping[str, Any]


@dataclass(frozen=True)
class Met:
    """What came of it: the cards of all nodes by node rank where all met, none otherwise."""

    findings: tuple[Finding, ...]
    cards: tuple[Card, ...] = ()


def meet(nodes: Nodes, card: Card, *, limit_s: float) -> Met:
    """Meet the other nodes at `MASTER_ADDR:MASTER_PORT`, for `limit_s` at most."""
    mine = {**card, "program": PROGRAM, "node": nodes.rank, "nodes": nodes.count}
    deadline = time.monotonic() + limit_s
    return _receive(nodes, mine, deadline) if nodes.rank == 0 else _call(nodes, mine, deadline)


def _addresses(nodes: Nodes) -> list[str]:
    """The addresses that MASTER_ADDR means here; raises OSError where it means none."""
    found = socket.getaddrinfo(nodes.address, nodes.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def _unresolved(nodes: Nodes, error: OSError) -> Met:
    return Met((failed(NAME, f"MASTER_ADDR={one_line(str(nodes.address))} means no address here: {_words(error)}",
                       "give node 0's IP address, or put its name into DNS or /etc/hosts on every node"),))  # fmt: skip


def _words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _place(nodes: Nodes) -> str:
    return f"{one_line(str(nodes.address))}:{nodes.port}"


# --- node 0 -----------------------------------------------------------------------------------------------------------


def _receive(nodes: Nodes, mine: Card, deadline: float) -> Met:
    try:
        addresses = _addresses(nodes)
    except OSError as error:
        return _unresolved(nodes, error)
    try:
        listener = _listener(int(nodes.port or 0))
    except OSError as error:
        said = f"MASTER_PORT={nodes.port} cannot be listened at: {_words(error)}{_holder(nodes.port)}"
        return Met((failed(NAME, said, f"give another on every node, such as MASTER_PORT={(nodes.port or 0) + 1}"),))
    notes = () if any(_is_ours(address) for address in addresses) else (_not_ours(nodes),)
    with listener, contextlib.ExitStack() as open_ones:
        guests, problem = _wait(listener, nodes, deadline, open_ones)
        if problem is None:
            cards = [mine, *(guests[rank][1] for rank in sorted(guests))]
            _answer(guests, {"cards": cards})
            said = f"{nodes.count} nodes met at {_place(nodes)} ({listed(item.get('host') for item in cards)})"
            return Met((passed(NAME, said), *notes), tuple(cards))
        _answer(guests, {"error": problem.found})
        return Met((problem, *notes))


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _holder(port: int | None) -> str:
    """Who listens at a port, as far as this user may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for item in psutil.net_connections("tcp"):
            if item.status == psutil.CONN_LISTEN and item.laddr and item.laddr.port == port and item.pid:
                name = one_line(" ".join(psutil.Process(item.pid).cmdline()), limit=60)
                return f" (pid {item.pid}: {name})"
    return ""


def _is_ours(address: str) -> bool:
    """Whether an address is one of this machine's: it can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _not_ours(nodes: Nodes) -> Finding:
    return warned("MASTER_ADDR", f"{one_line(str(nodes.address))} is not an address of this machine, which is node 0",
                  "start node 0 on the machine that has that address; leave it so only where a router forwards the "
                  "port to this one")  # fmt: skip


Guests = dict[int, tuple[socket.socket, Card]]


def _wait(
    listener: socket.socket, nodes: Nodes, deadline: float, open_ones: contextlib.ExitStack
) -> tuple[Guests, Finding | None]:
    """The nodes that came, and what is wrong where not all did."""
    guests: Guests = {}
    while len(guests) < nodes.count - 1:
        left = deadline - time.monotonic()
        if left <= 0:
            return guests, _missing(nodes, guests)
        listener.settimeout(left)
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        open_ones.callback(client.close)
        card = _card_from(client, min(ONE_CLIENT_S, max(0.1, left)))
        if card is None:
            client.close()
            continue
        rank = card.get("node")
        problem = _refused(card, nodes, guests)
        if problem is not None:
            _answer({0: (client, card)}, {"error": problem.found})
            return guests, problem
        guests[int(str(rank))] = (client, card)
    return guests, None


def _refused(card: Card, nodes: Nodes, guests: Guests) -> Finding | None:
    """What contradicts: another number of nodes, a rank that is none, a rank that somebody else has."""
    rank, host = card.get("node"), one_line(str(card.get("host")))
    remedy = f"each machine its own NODE_RANK=, 0 to {nodes.count - 1}, and the same NNODES={nodes.count} on all"
    if card.get("nodes") != nodes.count:
        return failed(
            NAME, f"{host} was given NNODES={one_line(str(card.get('nodes')))}, node 0 NNODES={nodes.count}", remedy
        )
    if not isinstance(rank, int) or not 0 < rank < nodes.count:
        return failed(NAME, f"{host} was given NODE_RANK={one_line(str(rank))}", remedy)
    if rank in guests:
        other = one_line(str(guests[rank][1].get("host")))
        return failed(NAME, f"{host} and {other} were both given NODE_RANK={rank}", remedy)
    return None


def _missing(nodes: Nodes, guests: Guests) -> Finding:
    absent = [rank for rank in range(1, nodes.count) if rank not in guests]
    return failed(
        NAME,
        f"node{'s' if len(absent) > 1 else ''} {listed(absent)} of {nodes.count} never came to {_place(nodes)}",
        f"start the same command there with NODE_RANK={absent[0]} within half a minute of this one; where it runs, a "
        f"firewall closes port {nodes.port}, or MASTER_ADDR means another machine there",
    )


def _card_from(client: socket.socket, timeout_s: float) -> Card | None:
    """The card that a client sends; None where it sends something else, or nothing in time."""
    until, text = time.monotonic() + timeout_s, b""
    try:
        while not text.endswith(b"\n"):
            client.settimeout(max(0.01, until - time.monotonic()))
            part = client.recv(4096)
            if not part or len(text) > MOST_BYTES:
                return None
            text += part
        card = json.loads(text)
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) and card.get("program") == PROGRAM else None


def _answer(guests: Guests, answer: Mapping[str, Any]) -> None:
    text = (json.dumps(answer) + "\n").encode()
    for client, _ in guests.values():
        with contextlib.suppress(OSError):  # it has given up
            client.settimeout(ONE_CLIENT_S)
            client.sendall(text)


# --- the others -------------------------------------------------------------------------------------------------------


def _call(nodes: Nodes, mine: Card, deadline: float) -> Met:
    try:
        _addresses(nodes)
    except OSError as error:
        return _unresolved(nodes, error)
    last = "nothing was tried"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((str(nodes.address), int(nodes.port or 0)), timeout=min(5.0, left)) as client:
                client.sendall((json.dumps(mine) + "\n").encode())
                answer = _reply(client, deadline)
        except OSError as error:
            last = "no answer at all" if isinstance(error, TimeoutError) else _words(error).lower()
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        if answer is None:
            last = "something else listens there, or node 0 ended"
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        return _understood(nodes, answer)
    remedy = (
        "start the same command with NODE_RANK=0 on that machine within half a minute of this one; where it runs, let "
        f"its firewall pass port {nodes.port} and give an address that this node reaches"
    )
    return Met((failed(NAME, f"node 0 was not met at {_place(nodes)}: {last}", remedy),))


def _reply(client: socket.socket, deadline: float) -> Card | None:
    until, text = deadline + ONE_CLIENT_S, b""
    while not text.endswith(b"\n"):
        client.settimeout(max(0.01, until - time.monotonic()))
        part = client.recv(MOST_BYTES)
        if not part or len(text) > 1000 * MOST_BYTES:
            return None
        text += part
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and ("cards" in answer or "error" in answer) else None


def _understood(nodes: Nodes, answer: Card) -> Met:
    if "error" in answer:
        said = one_line(str(answer["error"]), limit=300)
        return Met((failed(NAME, f"node 0 says: {said}", "see there; then start all nodes again"),))
    cards = tuple(card for card in answer["cards"] if isinstance(card, dict))
    return Met((passed(NAME, f"{nodes.count} nodes met at {_place(nodes)}"),), cards)
