"""`rank`: one process of a run over several, as this program's own launch starts it. Help does not name it."""

from __future__ import annotations

import os

from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.errors import ConfigError
from sft_play.finished.report.report import report_at_end
from sft_play.launch.exported import RESUMED_VARIABLE, ranks_of
from sft_play.log import set_up_logging
from sft_play.starting.one_rank import start_rank

HELP = {"rank": "one process of a run over several, as make train-distributed starts it"}


def run(request: Request) -> int:
    """This rank's part of the run; `train` under another launcher runs the same code."""
    ranks = ranks_of(os.environ)
    if ranks is None:
        raise ConfigError("rank is what make train-distributed starts in each of its processes; to train here: train")
    run_name = os.environ.get(RESUMED_VARIABLE)
    set_up_logging("resume" if run_name else "train", rank=ranks.rank)
    loaded = load_config(request.config, overrides=request.overrides)
    folder = start_rank(loaded, ranks, request.options, resume=bool(run_name), run_name=run_name)
    if ranks.is_first and ranks.folder is None:  # else the parent that started the ranks writes it, after them
        report_at_end(folder)
    return 0
