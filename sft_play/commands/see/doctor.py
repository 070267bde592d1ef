"""`doctor`: looks for what would break a run on this machine, before it starts."""

from __future__ import annotations

import contextlib
import os

from sft_play.commands.answer import Answer
from sft_play.commands.machine import refuse_hardware
from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.diagnose.doctor import Planned, examine
from sft_play.errors import ConfigError, SftPlayError
from sft_play.facts.hardware import Hardware
from sft_play.launch.accelerate.reading import find_accelerate_file, read_found_file
from sft_play.launch.launch_options import with_accelerate
from sft_play.launch.resolve_options import as_the_mesh_says
from sft_play.planner.layout import layouts_over
from sft_play.starting.plan_run import plan_for, shape_for
from sft_play.starting.plan_stages import refuse_strategy

HELP = {"doctor": "look for what breaks a run: versions, drivers, limits, disk, an all-reduce over every rank"}


def run(request: Request) -> Answer:
    """Every finding about this machine, and about the run that `make train` with the same words would start."""
    refuse_hardware(request)
    options, file = request.options, find_accelerate_file(os.environ)
    if file is not None:
        options = with_accelerate(options, read_found_file(file, os.environ)[0])
    on_cpu = False
    with contextlib.suppress(SftPlayError):  # `planner` raises it again, and the report shows it
        config = load_config(request.config, overrides=request.overrides).config
        on_cpu = config.train.device == "cpu"
        options = as_the_mesh_says(options, config)

    def planner(machine: Hardware) -> Planned:
        config = load_config(request.config, overrides=request.overrides).longest
        # as the launch would choose: DeepSpeed without a layout is ZeRO-2
        strategy = options.strategy or ("zero2" if options.deepspeed else None)
        refuse_strategy(config, machine, strategy)
        only = (strategy,) if strategy else layouts_over(machine.ranks)
        return Planned(config, shape_for(config), plan_for(config, machine, only=only, with_suggestions=False))

    report = examine(planner, options, on_cpu=on_cpu)
    return Answer(report.as_json(), report.lines(), 0 if report.ok else ConfigError.exit_code)
