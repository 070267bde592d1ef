"""DeepSpeed's communication over torch's process group."""

from __future__ import annotations

import importlib
from typing import Any

from sft_play.environment import deepspeed_on_cpu


def init_deepspeed(*, on_cpu: bool) -> None:
    """Join DeepSpeed's ranks, which torch's process group has where there is one: by gloo on CPUs, else by NCCL.

    On CPUs DeepSpeed's shared-memory collectives stay out: DeepSpeed (0.19) compiles them before it begins, for more
    than a minute on two cores, and only its inference calls them.
    """
    if not on_cpu:
        from deepspeed import comm

        comm.init_distributed("nccl", auto_mpi_discovery=False)
        return
    deepspeed_on_cpu()
    from deepspeed import comm

    backend: Any = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    build = getattr(backend, "build_shm_op", None)  # DeepSpeed's own name; without it, it is compiled
    if build is not None:
        backend.build_shm_op = lambda: None
    try:
        comm.init_distributed("gloo", auto_mpi_discovery=False)
    finally:
        if build is not None:
            backend.build_shm_op = build
