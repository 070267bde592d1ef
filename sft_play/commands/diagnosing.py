"""`check`, `doctor`, `gpu-info` and `memory-check`: what stops or spoils a run, what this machine
is, and what a run holds of it."""

import contextlib
import dataclasses
import functools
import logging
import os
import sys

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
    take_snapshot = functools.partial(
        machine_pages.read_memory_snapshot,
        request_output_dir(request),
        os.environ,
        name=request.run,
    )
    if not request.watch:
        snapshot = take_snapshot()
        return CommandResult(
            dataclasses.asdict(snapshot),
            ["\n".join(machine_pages.format_memory_snapshot(snapshot))],
        )

    def show_snapshot(snapshot: machine_pages.MemorySnapshot) -> None:
        if request.json:
            write_json_line(add_exit_status(dataclasses.asdict(snapshot), 0))
        else:
            if sys.stdout.isatty():
                sys.stdout.write("\033[H\033[2J")  # in the place of the look before
            lines = [
                *machine_pages.format_memory_snapshot(snapshot),
                f"{snapshot.time}; Ctrl-C ends this",
            ]
            logger.info("%s", "\n".join(lines))
        if is_output_lost():
            raise KeyboardInterrupt  # the output has lost its reader: end as with Ctrl-C

    # one look after the other; the last one is written to OUT
    last_snapshot = machine_pages.watch_memory(take_snapshot, show_snapshot=show_snapshot)
    if request.out is not None and last_snapshot is not None:
        write_out_file(request.out, dataclasses.asdict(last_snapshot))
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
