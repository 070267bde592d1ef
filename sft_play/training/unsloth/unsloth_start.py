"""The start and the end of Unsloth's process: logging, signals, exit code, and how a failure is reported.

Nothing here loads torch: Unsloth has to be imported first, inside the handlers that turn its errors into messages.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from sft_play import endings, failures
from sft_play.errors import BackendError, SftPlayError
from sft_play.log import one_line, set_up_logging, survive_lost_output


def start(path: Path) -> int:
    """Train as the document at `path` says, in this rank; returns sft-play's exit code.

    A failure is written into the file that the parent named, as a launcher's ranks do.
    """
    survive_lost_output()
    set_up_logging("train", rank=int(os.environ.get("RANK", "0")))
    endings.leave_with_starter()
    try:
        with endings.StopSignals(endings.interrupt):
            try:
                import unsloth  # noqa: F401
            except Exception as error:
                reason = one_line(f"{type(error).__name__}: {error}", limit=400)
                raise BackendError(f"Unsloth cannot be imported: {reason}") from error
            from sft_play.training.unsloth.unsloth_run import train

            train(path)
        return 0
    except SftPlayError as error:
        failures.hand_over(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        failures.hand_over(error)
        return 130
    except Exception as error:
        failures.hand_over(error)
        sys.stderr.write(traceback.format_exc())
        return 1
