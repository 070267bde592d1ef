"""`sft-play gpu-selftest`, which `make gpu-selftest` executes."""

import os
import sys

# The checkout takes the place of this folder, whose files have names that modules of others may have. Nothing more is
# imported here, so that an early Ctrl-C meets the guard in entry.
FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
sys.path[:] = [os.path.dirname(FOLDER), *(path for path in sys.path if path != FOLDER)]  # noqa: PTH120

from sft_play.entry import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main("gpu-selftest"))
