"""TensorBoard under watch: ended when the command that wanted it is gone, however that ended (kill -9 too).

`python -m sft_play.launch.board_watch OWNER RECORD COMMAND...` runs the command as its child and looks twice a second
whether OWNER, its own parent, is still there. Looking at the parent's pid is what works on Linux and macOS alike; a
signal at the parent's death (`PR_SET_PDEATHSIG`) is Linux's alone, and tied to the thread that started the child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from sft_play.launch.tensorboard import end_process, is_left_alone

_LOOK_S = 0.5


def main(words: Sequence[str]) -> int:
    """Run a command as long as its owner lives; returns its exit code, 128 and the number for a signal."""
    owner, record, command = int(words[0]), Path(words[1]), list(words[2:])
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; who wants the board stopped says so to the board
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    board = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        process = psutil.Process(board.pid)
        while board.poll() is None:
            if os.getppid() != owner:
                if is_left_alone(record, board.pid):
                    return 0
                break
            time.sleep(_LOOK_S)
    except BaseException:
        _end(board)
        raise
    if board.poll() is None:
        end_process(process)
        return 0
    return board.returncode if board.returncode >= 0 else 128 - board.returncode


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end(board: subprocess.Popen[bytes]) -> None:
    try:
        end_process(psutil.Process(board.pid))
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
