"""`sweep`: every combination of the values that SET lists, planned, trained where it fits, and compared."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.finished_runs import draw
from sft_play.commands.launching import launched_ranks
from sft_play.commands.request import Request, refuse_own_model
from sft_play.errors import ConfigError, DoesNotFit
from sft_play.finished.report.charts import screen_of
from sft_play.finished.report.compare import PAGE, Comparison, compare
from sft_play.starting.sweep import Cell, Sweep, cells_of, plan_cells, plan_lines, train_cells

logger = logging.getLogger(__name__)

HELP = {"sweep": "train every combination of the values that SET lists, those that fit, and compare them"}


def run(request: Request) -> Answer:
    """Exit code 0 only where every cell that fits is trained, 3 where none fits; the page is written as `compare`
    writes it."""
    if launched_ranks(request) is not None:
        raise ConfigError("sweep starts each run itself: call it once, without a launcher")
    with stdout_to_stderr(wanted=request.json):
        environment = dict(os.environ)
        found = cells_of(request.config, request.overrides)
        for _, loaded in found:
            refuse_own_model(dataclasses.replace(request, overrides=loaded.overrides))
        cells = plan_cells(found)
        for line in plan_lines(cells):
            logger.info("%s", line)
        ended = train_cells(cells, environment)
        sweep = Sweep(tuple(ended), _compared(request, ended))
    answer = answer_of(sweep, to_out=False)
    return dataclasses.replace(answer, exit_code=DoesNotFit.exit_code) if sweep.none_fits else answer


def _compared(request: Request, cells: list[Cell]) -> Comparison | None:
    folders = [cell.folder for cell in cells if cell.state == "finished"]
    if len(folders) < 2:
        return None
    compared = compare(folders, path=request.out or folders[0].path / PAGE, screen=screen_of(sys.stdout))
    draw(request, compared)
    return compared
