"""`check`: everything that can be checked before training, on one page; the exit code tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sft_play.commands.answer import Answer, answer_of
from sft_play.commands.machine import asked_machine
from sft_play.commands.request import Request
from sft_play.config.schema import RunConfig
from sft_play.diagnose import engines, run_check
from sft_play.diagnose.doctor import Planned
from sft_play.diagnose.report import CheckReport
from sft_play.facts.hardware import Hardware
from sft_play.findings import Finding
from sft_play.launch.resolve_options import machine_of_mesh
from sft_play.starting.plan_run import plan_for, shape_for
from sft_play.starting.row_survey import has_own_lengths

HELP = {"check": "check everything that can be checked before training, on one page; the exit code tells"}


def run(request: Request) -> Answer:
    """The page; exit code 2 where there is a problem."""
    serve = engines.engine_names(request.serve)
    return answer_of(check(request.config, request.overrides, asked_machine(request), serve=serve))


def check(
    config_path: Path,
    overrides: Sequence[str],
    hardware: Hardware,
    *,
    also: Sequence[Finding] = (),
    serve: Sequence[str] = (),
) -> CheckReport:
    """`run_check.check` with the plan that a run would make here."""
    return run_check.check(config_path, overrides, hardware, planner=_planned, also=also, serve=serve)


def _planned(config: RunConfig, hardware: Hardware, lengths: run_check.Lengths) -> Planned:
    rows = lengths() if has_own_lengths(config) else None  # blocks of text and packs are full, whatever their rows have
    return Planned(config, shape_for(config), plan_for(config, machine_of_mesh(config, hardware), rows=rows))
