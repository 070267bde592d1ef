"""`scripts/run_notebook.py` is the same as `sft-play run-notebook`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sft_play.entry import main

if __name__ == "__main__":
    raise SystemExit(main("run-notebook"))
