"""The command of `sft-play` that this file is named after, which make executes; also for torchrun,
accelerate launch, deepspeed. The scripts of the other commands are links to this one."""

import os
import sys

# The checkout takes the place of this folder, whose files have names that modules of others may
# have. Nothing more is imported here, so that an early Ctrl-C meets the guard in entry.
FOLDER, NAME = os.path.split(os.path.abspath(__file__))  # noqa: PTH100
sys.path[:] = [os.path.dirname(FOLDER), *(path for path in sys.path if path != FOLDER)]  # noqa: PTH120

from sft_play.entry import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main(NAME[:-3].replace("_", "-")))
