"""A real all-reduce over every rank, started by the doctor: is the sum right, and how fast is it?

Each rank writes how far it came (`rank-N.json`), so that after a hang it is known who waits for
whom; rank 0 the speed (`result.json`).
"""

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sft_play.files import atomic
from sft_play.process.signals import die_with_parent
from sft_play.text import MIB

# Bytes that are reduced, DDP's buckets and FSDP's layers are in this range; the larger are timed.
SIZES = {"cpu": (MIB, 64 * MIB), "cuda": (MIB, 256 * MIB)}


def main(argv: Sequence[str] | None = None) -> int:
    """This rank's part; 0 where every sum was right, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=tuple(SIZES), required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args(argv)
    # the parent is the launcher, which ends with the doctor
    die_with_parent(os.getppid(), signal.SIGKILL)
    report: dict[str, Any] = {"rank": int(os.environ["RANK"])}

    def note(stage: str, **facts: Any) -> None:
        report.update(facts, stage=stage)
        atomic.write(options.out / f"rank-{report['rank']}.json", json.dumps(report))

    note("started")
    try:
        wrong_count = _run_check(note, options.out, options.device, options.timeout)
    except Exception as error:
        # the process group is left as it is: destroying one that hangs would hang too
        note("failed", error=f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()
    return int(wrong_count > 0)


def _run_check(note: Callable[..., None], out: Path, device_type: str, timeout_s: float) -> int:
    """Reduce every size, and note how far this rank came; returns the number of wrong elements."""
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        if torch.version.cuda is None:
            raise RuntimeError(f"torch {torch.__version__} is a CPU-only build, but there are GPUs")
        torch.cuda.init()
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        ones = torch.ones(64, 64, dtype=torch.float16, device=device)
        if (ones @ ones).float().mean().item() != 64.0:
            raise RuntimeError(
                f"{torch.cuda.get_device_name(device)} computes wrongly:"
                " ones(64) @ ones(64) is not 64"
            )
    note("device")
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    note("joined")
    wrong_count = 0
    for size in SIZES[device_type]:
        wrong_count += wrong_elements(size, device)
        note("reduced")  # a broken network hangs in the first one
        once_s = time_all_reduce(size, device, repetitions=1)
        # where the largest size takes longer than 2 s once, the check would not be done in time
        if once_s * SIZES[device_type][-1] / size > 2.0:
            break
    seconds = time_all_reduce(size, device, repetitions=5)
    note("done", wrong=wrong_count)
    if dist.get_rank() == 0:
        atomic.write(out / "result.json", json.dumps({"bytes": size, "seconds": seconds}))
    dist.barrier()
    return wrong_count


def wrong_elements(byte_count: int, device: torch.device) -> int:
    """Count the elements of an all-reduced pattern that are not the sum over all ranks; each rank
    gives rank + 1 times the pattern."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # seven values over and over, so that sums are whole numbers that fp32 represents exactly
    pattern = torch.arange(byte_count // 4, dtype=torch.int32, device=device) % 7 + 1
    reduced = (pattern * (rank + 1)).float()
    dist.all_reduce(reduced)
    expected = (pattern * (world_size * (world_size + 1) // 2)).float()
    return int((reduced != expected).sum().item())


def time_all_reduce(byte_count: int, device: torch.device, repetitions: int) -> float:
    """Time all-reduces in a row; returns the seconds of one, on the slowest rank."""
    tensor = torch.ones(byte_count // 4, device=device)
    dist.barrier()
    start_time = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # ones stay ones
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # collectives return before the GPU has run them
    elapsed_s = torch.tensor(time.perf_counter() - start_time, dtype=torch.float64, device=device)
    dist.all_reduce(elapsed_s, op=dist.ReduceOp.MAX)
    return float(elapsed_s.item()) / repetitions


if __name__ == "__main__":
    sys.exit(main())
