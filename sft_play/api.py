"""The toolkit from Python: `from sft_play import load_config, plan, train`.

    run = load_config("my.yaml", overrides=["train.epochs=1"])
    planned = plan(run, hardware="1xRTX4090")   # nothing is loaded: no torch, no weights
    summary = train(run)                        # what `make train` does

Progress goes to the `sft_play` loggers at INFO; `logging.basicConfig(level="INFO")` shows it.
Errors that a user can fix are classes of `sft_play.errors`.
"""

import json
from typing import Any

from sft_play.config.load import LoadedConfig, load_config
from sft_play.launch.planning import plan_run
from sft_play.launch.request import LaunchRequest
from sft_play.launch.run_hardware import mesh_hardware, restrict_to_device
from sft_play.launch.start import start_run
from sft_play.machine.hardware import Hardware, detect_hardware, parse_hardware
from sft_play.planner.plan import Plan
from sft_play.process.environment import set_library_variables

__all__ = ["load_config", "plan", "train"]


def plan(run: LoadedConfig, *, hardware: str | Hardware | None = None, trace: bool = False) -> Plan:
    """Plan a run (with stages, the one with the longest rows): layout, micro-batch, predicted peak
    and speed, with the reasons; sizes are bytes per GPU. Where nothing fits, `plan.fits` is False
    and `plan.suggestions` says what would. `hardware`: a machine by name, such as `2xH200`; None is
    this one. `trace`: confirm the choice by tracing the step (seconds; imports torch). Raises
    ConfigError where the batch does not divide over the GPUs, HardwareError for an unknown machine,
    ModelError for a config.json that cannot be read."""
    if hardware is None:
        hardware = detect_hardware()
    elif isinstance(hardware, str):
        hardware = parse_hardware(hardware)
    machine = mesh_hardware(run.longest_config, restrict_to_device(run.longest_config, hardware))
    return plan_run(run.longest_config, machine, trace=trace)


def train(run: LoadedConfig) -> dict[str, Any]:
    """Train in this process, on one GPU or the CPU; returns the run folder's `summary.json`, with
    its path as `run`. The folder is named by `output.name`, or by config and time;
    `output.if_exists` decides about an existing one. Raises SftPlayError for anything a user can
    fix, such as `DoesNotFit`; Interrupted for Ctrl-C, after the state was saved."""
    set_library_variables()
    folder = start_run(LaunchRequest(run)).folder
    assert folder is not None
    summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    return {"run": str(folder.path), **summary}
