"""One of two ranks: real sharded steps, recorded as a trace records them. Writes the first rank's peaks as JSON.

torchrun --standalone --nproc-per-node 2 --module tests.ranks_trace OUT
"""

import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sft_play.trace import step
from tests.ranks import write_found
from tests.test_trace import SHARDED, changed, phase_peaks


def main(out: Path) -> None:
    """Every sharded step."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found = {}
    for name, changes in SHARDED.items():
        settings = changed({"world": 2, **changes})
        found[name] = phase_peaks(step.record_step(settings, uses_real_tensors=True, mesh=mesh))
    write_found(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
