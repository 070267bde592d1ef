"""The machine that a command is about, the folder of the runs, and the finished run."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.config.schema import ModelConfig, OutputConfig, RunConfig
from sft_play.config.yaml_io import parse_value
from sft_play.data.sources.files import data_files, find_source
from sft_play.errors import ConfigError, DataError, SftPlayError
from sft_play.facts.hardware import Hardware, detect, named
from sft_play.finished.run import FinishedRun, find_finished
from sft_play.launch.machine import require_machine
from sft_play.log import escape_control
from sft_play.planner.plan import Plan
from sft_play.runs.lookup import output_dir


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


def refusal_here(plan: Plan, config: RunConfig, machine: Hardware) -> str | None:
    """Why a planned run would stop on this machine before anything loads; None where it starts, or is only named."""
    try:
        if not machine.named:
            require_machine(config, machine, os.environ, params=lambda: plan.model_params)
    except SftPlayError as error:
        return str(error)
    return None


def output_dir_of(request: Request) -> Path:
    """The folder of the run folders; the default where no config was given and the starter's does not exist."""
    if not request.config_given and not request.config.is_file():
        return output_dir(OutputConfig())
    loaded = load_config(request.config, overrides=request.overrides, with_adapter=False)
    return output_dir(loaded.config.output)


def finished_run(request: Request) -> FinishedRun:
    """The finished run that RUN names, or the newest; raises as `find_finished` does."""
    return find_finished(output_dir_of(request), request.run, trusts=functools.partial(trusts_code, request))


def require_source(given: Path | str, name: str) -> None:
    """Raises DataError where a variable names data that are not there: before anything is imported to read them."""
    try:
        data_files(find_source(str(given)), text_wanted=True)
    except DataError as error:
        raise DataError(f"{name}={error}") from None


def trusts_code(request: Request, model: ModelConfig, key: str) -> bool:
    """Whether this command allows the code that a key of a model's settings lets run: by SET, or by a CONFIG that was
    given for this model in this revision."""
    path, wanted = f"model.{key}", getattr(model, key)
    said = [value for name, _, value in (word.partition("=") for word in request.overrides) if name.strip() == path]
    if said:
        return bool(parse_value(said[-1], name=path) == wanted)
    if not request.config_given:
        return False
    given = load_config(request.config, overrides=request.overrides, with_adapter=False).config.model
    return bool(getattr(given, key) == wanted) and (given.name, given.revision) == (model.name, model.revision)
