"""The machine that a command is about, and the folder of the runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.config.schema import OutputConfig
from sft_play.errors import ConfigError
from sft_play.facts.hardware import Hardware, detect, named
from sft_play.log import escape_control
from sft_play.runs.names import output_dir


def asked_machine(request: Request) -> Hardware:
    """The machine to plan for, with the price that was given."""
    hardware = named(request.hardware) if request.hardware else detect()
    return hardware if request.price is None else dataclasses.replace(hardware, price_per_gpu_hour=request.price)


def refuse_hardware(request: Request) -> None:
    """Raises ConfigError where a machine is named and this one is used."""
    if request.hardware:
        raise ConfigError(
            f"HARDWARE={escape_control(request.hardware)} names a machine for make plan; training uses this machine"
        )


def output_dir_of(request: Request) -> Path:
    """The folder of the run folders."""
    loaded = load_config(request.config, overrides=request.overrides, with_adapter=False)
    return output_dir(loaded.config.output)


def output_dir_or_default(request: Request) -> Path:
    """The same; the default where no config was given and the starter's does not exist."""
    if not request.config_given and not request.config.is_file():
        return output_dir(OutputConfig())
    return output_dir_of(request)
