"""The command that starts a run's ranks, with the variables that it sets: what is shown is what is run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sft_play.launch.ranks import RUN_VARIABLE


@dataclass(frozen=True)
class Nodes:
    """The machines of a run: how many, which this is, and where they meet."""

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Launch:
    """A command and the variables that it sets beside those that are there."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """As a person would type it."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{variables} {shlex.join(self.words)}".strip()


def torchrun(
    program: Sequence[str],
    *,
    processes: int,
    nodes: Nodes,
    threads: int | None = None,
    gpus: str | None = None,
    folder: Path | None = None,
    python: str | None = None,
) -> Launch:
    """`torchrun` with as many processes as this node has ranks, running `sft-play` with the words of `program`.

    Args:
        threads: OMP_NUM_THREADS of CPU ranks; ranks that share cores would otherwise wait for each other, spinning.
        gpus: CUDA_VISIBLE_DEVICES, where some of the GPUs were named.
        folder: the run folder that the ranks are handed.
    """
    words = [python or sys.executable, "-m", "torch.distributed.run"]
    if nodes.count == 1:
        words.append("--standalone")
    else:
        words += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
        words += ["--master-addr", str(nodes.address), "--master-port", str(nodes.port)]
    words += ["--nproc-per-node", str(processes), "--module", "sft_play", *program]
    environment: dict[str, str] = {}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if gpus is not None:
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
    if folder is not None:
        environment[RUN_VARIABLE] = str(folder)
    return Launch(tuple(words), environment)
