"""What a request is about, looked up: the machine, the folder of the runs, a finished run, data that
a variable names.
"""

import dataclasses
import functools
from pathlib import Path

from sft_play.commands.request import Request
from sft_play.config.load import load_config
from sft_play.config.schema import ModelConfig, OutputConfig
from sft_play.config.yaml_io import parse_yaml_value
from sft_play.data.sources.files import find_source, list_parts
from sft_play.errors import ConfigError, DataError
from sft_play.finished.run import FinishedRun, find_finished_run
from sft_play.log import escape_control
from sft_play.machine.hardware import Hardware, detect_hardware, parse_hardware
from sft_play.runs.lookup import output_dir


def requested_hardware(request: Request) -> Hardware:
    """The machine to plan for, with the price that was given."""
    hardware = parse_hardware(request.hardware) if request.hardware else detect_hardware()
    return hardware if request.price is None else dataclasses.replace(hardware, price_per_gpu_hour=request.price)


def refuse_hardware(request: Request) -> None:
    """Raises ConfigError where a machine is named and this one is used."""
    if request.hardware:
        raise ConfigError(
            f"HARDWARE={escape_control(request.hardware)} names a machine for make plan; training uses this machine"
        )


def request_output_dir(request: Request) -> Path:
    """The folder of the run folders; the default where no config was given and the starter's does not exist."""
    if not request.is_config_given and not request.config.is_file():
        return output_dir(OutputConfig())
    loaded = load_config(request.config, overrides=request.overrides, with_adapter=False)
    return output_dir(loaded.config.output)


def find_request_run(request: Request) -> FinishedRun:
    """The finished run that RUN names, or the newest; raises as `find_finished_run` does."""
    return find_finished_run(
        request_output_dir(request), request.run, is_trusted=functools.partial(trusts_code, request)
    )


def require_source(path: Path | str, variable_name: str) -> None:
    """Raises DataError where a variable names data that are not there: before anything is imported to read them."""
    try:
        list_parts(find_source(str(path)), wants_text=True)
    except DataError as error:
        raise DataError(f"{variable_name}={error}") from None


def trusts_code(request: Request, model: ModelConfig, key: str) -> bool:
    """True if the user allows the code that `model.KEY` would run: SET gives the same value, or the given CONFIG does,
    for the same model and revision."""
    path, required_value = f"model.{key}", getattr(model, key)
    set_values = [
        value for name, _, value in (word.partition("=") for word in request.overrides) if name.strip() == path
    ]
    if set_values:
        return bool(parse_yaml_value(set_values[-1], name=path) == required_value)
    if not request.is_config_given or request.is_config_recorded:
        return False
    config_model = load_config(request.config, overrides=request.overrides, with_adapter=False).config.model
    return bool(getattr(config_model, key) == required_value) and (config_model.name, config_model.revision) == (
        model.name,
        model.revision,
    )
