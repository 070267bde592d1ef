"""The machines of a run as `make setup-accelerate` is given them, and as accelerate's files name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sft_play.errors import ConfigError
from sft_play.facts.network import DEFAULT_PORT, is_address
from sft_play.launch.given import whole_number
from sft_play.log import one_line


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and which of them this is. `main_ip` and `main_port` are where rank 0 listens."""

    num_machines: int = 1
    machine_rank: int = 0
    main_ip: str | None = None
    main_port: int | None = None


def machines_of(environment: Mapping[str, str]) -> Machines:
    """`NUM_MACHINES`, `MACHINE_RANK`, `MAIN_IP` and `MAIN_PORT` from the command line.

    Raises:
        ConfigError: one is not a number or out of range, or several machines have no main address.
    """
    machines = Machines(
        num_machines=whole_number(environment, "NUM_MACHINES", least=1) or 1,
        machine_rank=whole_number(environment, "MACHINE_RANK", least=0) or 0,
        main_ip=environment.get("MAIN_IP", "").strip() or None,
        main_port=whole_number(environment, "MAIN_PORT", least=1),
    )
    return check_machines(machines)


def check_machines(machines: Machines) -> Machines:
    """The machines with accelerate's default port filled in where several need one.

    Raises:
        ConfigError: the rank is not one of the machines, the address is not one, or a port is out of range.
    """
    count, rank = machines.num_machines, machines.machine_rank
    if not 0 <= rank < count:
        raise ConfigError(
            f"MACHINE_RANK={rank} is not one of NUM_MACHINES={count}: ranks go from 0 to {count - 1}, "
            "and the machine of rank 0 is the one at MAIN_IP"
        )
    if machines.main_ip is not None and not is_address(machines.main_ip):
        raise ConfigError(f"MAIN_IP={one_line(machines.main_ip)} is not a host name or an IP address")
    if machines.main_port is not None and not 1 <= machines.main_port <= 65535:
        raise ConfigError(
            f"MAIN_PORT={machines.main_port} is not a port; ports go from 1 to 65535 (default {DEFAULT_PORT})"
        )
    if count == 1:
        return machines
    if machines.main_ip is None:
        raise ConfigError(
            f"NUM_MACHINES={count} needs MAIN_IP=, the address of the machine of rank 0 that the others can reach "
            f"(and MAIN_PORT=, default {DEFAULT_PORT})"
        )
    return Machines(count, rank, machines.main_ip, machines.main_port or DEFAULT_PORT)
