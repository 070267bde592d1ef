"""Checkpoints in parts: written by every rank, resumed over other numbers of ranks, put together, and seen getting on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, VARIABLES
from tests.models import uneven_run
from tests.test_distributed import losses

pytestmark = pytest.mark.build

SMALL = "from sft_play.plan import saving; saving.WHOLE_BYTES = 0; from sft_play.entry import main; raise SystemExit(main())"
"""A command whose plans write every checkpoint of full states in parts: the plan is what ranks are handed."""


def start(*words: str, program: str = SMALL, limit_s: float = 280, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=limit_s)


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    uneven_run(folder, tiny_llama)
    return folder
