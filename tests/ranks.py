"""Test modules that two CPU ranks run: `tests/ranks_*.py`."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import warm
from tests.conftest import ROOT, clean_environment


def found_by_ranks(module: str, *words: str, folder: Path) -> Any:
    """What the first of two ranks wrote with `write_found`: `torchrun --module MODULE WORDS… FOLDER/found.json`."""
    out = folder / "found.json"
    launch = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", module]
    command, env = [*launch, *words, str(out)], clean_environment()
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(out.read_text())


def write_found(found: Any, out: Path) -> None:
    """The end of such a module: the first rank writes, and all leave together."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
