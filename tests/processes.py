"""What tests ask of processes that they started: whether one lives, and a wait for what it does."""

import socket
import time
from collections.abc import Callable
from typing import Any

import psutil


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which has ended, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(holds: Callable[[], Any], *, within_s: float = 150, said: Callable[[], str] = str) -> Any:
    """What `holds` answers once it is true; fails with what was `said` where that takes longer."""
    deadline = time.monotonic() + within_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"waited {within_s} s in vain; {said()}"
        time.sleep(0.05)
    return answer
