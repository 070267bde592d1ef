"""`check`, `doctor`, `gpu-info` and `memory-check`: what stops or spoils a run, what this machine
is, and what a run holds of it."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
from typing import Any

from sft_play.commands.request import (
    CommandResult,
    Request,
    command_result,
    refuse_hardware,
    request_output_dir,
    requested_hardware,
    write_out_file,
)
from sft_play.config.load import load_config
from sft_play.diagnose import machine_pages
from sft_play.diagnose.doctor import PlannedRun, run_doctor
from sft_play.diagnose.run_check import CheckReport, check_run
from sft_play.errors import SftPlayError
from sft_play.exit_codes import add_exit_status, write_json_line
from sft_play.launch.accelerate import find_accelerate_file, read_accelerate_file
from sft_play.launch.planning import plan_run, refuse_impossible_strategy
from sft_play.launch.request import apply_mesh, fill_from_accelerate
from sft_play.log import is_output_lost
from sft_play.machine.hardware import Hardware
from sft_play.planner.layout import layout_choices
from sft_play.trace.confirm import load_run_model_shape

logger = logging.getLogger(__name__)

# Seconds between two looks at a run's memory.
REFRESH_S = 3.0


def run_diagnosing(request: Request) -> CommandResult | int:
    """Run check, doctor, gpu-info or memory-check; check and doctor end with exit code 2 if there
    is a problem."""
    if request.command == "check":
        return check_result(
            check_run(request.config, request.overrides, requested_hardware(request)),
            is_full=request.why,
        )
    if request.command == "gpu-info":
        if request.hardware:
            data, lines = machine_pages.assumed_machine_info(
                requested_hardware(request), request.hardware
            )
        else:
            data, lines = machine_pages.read_machine_info(
                request_output_dir(request), os.environ, includes_torch=request.full
            )
        return CommandResult(data, ["\n".join(lines)])
    refuse_hardware(request)
    if request.command == "doctor":
        return _doctor(request)
    if request.watch:
        return _watch_memory(request)
    snapshot = _read_snapshot(request)
    return CommandResult(
        dataclasses.asdict(snapshot), ["\n".join(machine_pages.format_memory_snapshot(snapshot))]
    )


def _read_snapshot(request: Request) -> machine_pages.MemorySnapshot:
    return machine_pages.read_memory_snapshot(
        request_output_dir(request), os.environ, name=request.run
    )


def _watch_memory(request: Request) -> int:
    """Show one look after the other until Ctrl-C; the last one is written to OUT."""
    data: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        while not is_output_lost():
            snapshot = _read_snapshot(request)
            data = dataclasses.asdict(snapshot)
            if request.json:
                write_json_line(add_exit_status(data, 0))
            else:
                if sys.stdout.isatty():
                    sys.stdout.write("\033[H\033[2J")  # in the place of the look before
                lines = machine_pages.format_memory_snapshot(snapshot)
                logger.info("%s\n%s; Ctrl-C ends this", "\n".join(lines), snapshot.time)
            time.sleep(REFRESH_S)
    if request.out is not None and data:
        write_out_file(request.out, data)
    return 0


def check_result(report: CheckReport, *, is_full: bool) -> CommandResult:
    """Return the answer of a check. `is_full`: True shows the whole page, False only what a person
    has to read."""
    result = command_result(report)
    return (
        result
        if is_full
        else dataclasses.replace(result, lines=["\n".join(report.summary_lines())])
    )


def _doctor(request: Request) -> CommandResult:
    options, file = request.options, find_accelerate_file(os.environ)
    if file is not None:
        options = fill_from_accelerate(options, read_accelerate_file(file))
    uses_cpu = False
    with contextlib.suppress(SftPlayError):  # `planner` raises it again, and the report shows it
        config = load_config(request.config, overrides=request.overrides).config
        uses_cpu = config.train.device == "cpu"
        options = apply_mesh(options, config)

    def planner(machine: Hardware) -> PlannedRun:
        config = load_config(request.config, overrides=request.overrides).longest_config
        # as the launch would choose: DeepSpeed without a layout is ZeRO-2
        strategy = options.strategy or ("zero2" if options.deepspeed else None)
        refuse_impossible_strategy(config, machine, strategy)
        layouts = (strategy,) if strategy else layout_choices(machine.ranks)
        plan = plan_run(config, machine, layouts=layouts, include_suggestions=False)
        return PlannedRun(config, load_run_model_shape(config, plan.row_tokens), plan)

    return command_result(run_doctor(planner, options, uses_cpu=uses_cpu))
