"""`sweep`: every combination of the values that SET lists, each an ordinary run in a process of its
own.

All cells are read, checked and planned before the first one trains. A cell's name says what
differs, so that the same command finds its run again: a finished one is left as it is, a stopped
one is resumed.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from sft_play.answers import Answer
from sft_play.commands.launch_requests import launcher_rank_info
from sft_play.commands.request import (
    CommandResult,
    Request,
    command_result,
    redirect_stdout_to_stderr,
    require_config_for_model_and_data,
)
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.yaml_io import read_text
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, error_prefix, stage_context
from sft_play.finished.report import Comparison, compare_runs
from sft_play.finished.run import find_changed_data
from sft_play.launch.planning import (
    build_stage_requests,
    count_rows_before_planning,
    finish_stage_requests,
    plan_request,
    refusals,
    require_gpus_and_disk,
)
from sft_play.launch.request import LaunchOptions, apply_mesh
from sft_play.launch.run_hardware import mesh_hardware, restrict_to_device
from sft_play.log import one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.planner.advice import parse_grid
from sft_play.planner.plan import Plan, format_misfit
from sft_play.process import signals
from sft_play.process.environment import independent_environment
from sft_play.runs.folder import RunFolder, changed_settings, check_no_differences, read_json
from sft_play.runs.lookup import config_run_name, is_resume, lock_run, new_run_folder
from sft_play.text import build_table, gib_or_na, render_lines, value_or_na

logger = logging.getLogger(__name__)


# Bytes of a cell's name before its digest: 200 are allowed.
MAX_NAME_BYTES = 150
# Of a cell: the first four before it is trained, the last four after.
CellState = Literal["new", "begun", "finished", "does_not_fit", "failed", "stopped"]
_STATE_TEXTS = {"does_not_fit": "does not fit", "failed": "failed", "stopped": "was stopped"}


@dataclasses.dataclass(frozen=True)
class SweepCell:
    """One combination, read, checked and planned."""

    settings: tuple[str, ...]
    loaded: LoadedConfig
    folder: RunFolder
    # That of the stage that needs most, of a run with stages.
    plan: Plan
    hours: float | None
    state: CellState
    # Why it is not finished: what it needs and what would fit, or what its run ended with.
    error: str | None = None

    @property
    def name(self) -> str:
        """The name of its run."""
        return self.folder.path.name

    @property
    def needs_training(self) -> bool:
        """True if it is to be trained."""
        return self.state in ("new", "begun")

    def as_json(self) -> dict[str, Any]:
        """In plain data, with the plan's figures."""
        return {
            "name": self.name,
            "path": str(self.folder.path),
            "settings": list(self.settings),
            "status": self.state,
            "fits": self.plan.fits,
            "peak_bytes": self.plan.memory.required,
            "budget_bytes": self.plan.budget_bytes,
            "hours": self.hours,
            "error": self.error,
        }


def run_sweep(request: Request) -> CommandResult:
    """Train every combination and compare the finished ones, as `compare` does. Exit code 0 only if
    every cell that fits is trained, 3 if none fits."""
    if launcher_rank_info(request) is not None:
        raise ConfigError("sweep starts each run itself: call it once, without a launcher")
    with redirect_stdout_to_stderr(enabled=request.json):
        environment = dict(os.environ)
        cell_configs = expand_cells(request.config, request.overrides)
        for _, loaded in cell_configs:
            require_config_for_model_and_data(
                dataclasses.replace(request, overrides=loaded.overrides)
            )
        cells = plan_cells(cell_configs)
        for line in sweep_lines(cells):
            logger.info("%s", line)
        cells = train_cells(cells, environment)
        comparison, folders = None, [cell.folder for cell in cells if cell.state == "finished"]
        if len(folders) > 1:
            comparison = compare_runs(folders, path=request.out)
    sweep = SweepResult(tuple(cells), comparison)
    result = command_result(sweep, is_written_to_out=False)
    if sweep.nothing_fits:
        result = dataclasses.replace(result, exit_code=DoesNotFit.exit_code)
    return result


# --- read -----------------------------------------------------------------------------------------


def expand_cells(
    path: Path, overrides: Sequence[str]
) -> list[tuple[tuple[str, ...], LoadedConfig]]:
    """Read each combination of the listed values: the words that tell it from the others, and its
    run. Raises ConfigError where nothing is listed, or a value is refused."""
    combinations = parse_grid(overrides, variable="SET")
    if len(combinations) < 2:
        raise ConfigError(
            "SET lists no values to try:"
            " make sweep SET='train.learning_rate=1e-4,2e-4 tuning.lora.r=16'"
        )
    varied_indices = [
        index for index, words in enumerate(zip(*combinations, strict=True)) if len(set(words)) > 1
    ]
    cells = []
    for settings in combinations:
        cell_words = tuple(settings[index] for index in varied_indices)
        with error_prefix(one_line(" ".join(cell_words))):
            output = load_config(path, overrides=settings).config.output
            name = cell_name(output.name or config_run_name(path), cell_words)
            if_exists = "replace" if output.if_exists == "replace" else "resume"
            words = [*settings, f"output.name={json.dumps(name)}", f"output.if_exists={if_exists}"]
            cells.append((cell_words, load_config(path, overrides=words)))
    return cells


def cell_name(base: str, settings: Sequence[str]) -> str:
    """Name a run after what differs, such as `my-learning_rate=1e-4-r=16`. A digest of the words
    follows where letters had to be replaced, or the name would be too long."""
    pairs = [word.partition("=")[::2] for word in settings]
    key_counts = Counter(key.rpartition(".")[2] for key, _ in pairs)
    keys = [last if key_counts[last := key.rpartition(".")[2]] == 1 else key for key, _ in pairs]
    text = "-".join(
        [base, *(f"{key}={value}" for key, (_, value) in zip(keys, pairs, strict=True))]
    )
    safe_name = base + re.sub(r"\.{2,}|[^\w.+=-]", "_", text[len(base) :], flags=re.ASCII)
    if safe_name == text and len(safe_name.encode()) <= MAX_NAME_BYTES:
        return safe_name
    digest = hashlib.sha256("\0".join(settings).encode()).hexdigest()[:8]
    return f"{safe_name.encode()[:MAX_NAME_BYTES].decode(errors='ignore')}-{digest}"


# --- checked and planned --------------------------------------------------------------------------


def plan_cells(cells: Sequence[tuple[tuple[str, ...], LoadedConfig]]) -> list[SweepCell]:
    """Check and plan every cell as `make train` would; nothing is written but the cache of counted
    rows. Raises SftPlayError where one of them would be refused, or a run of its name has other
    settings or data.
    """
    planned_cells = []
    for settings, loaded in cells:
        with error_prefix(one_line(" ".join(settings))):
            planned_cells.append(_plan_cell(settings, loaded))
    return planned_cells


def _plan_cell(settings: tuple[str, ...], loaded: LoadedConfig) -> SweepCell:
    config = loaded.config
    apply_mesh(LaunchOptions(), config)  # refuses a mesh of more GPUs than there are
    hardware = mesh_hardware(config, restrict_to_device(config, detect_hardware()))
    if config.model.mesh_shape is None and len(hardware.gpus) > 1:
        hardware = hardware.limit_gpus(1)
    folder = new_run_folder(config.output, config_path=loaded.path)
    is_resumed = is_resume(folder, config.output)
    for error in refusals(loaded, hardware, makes_folder=not is_resumed):
        raise error
    stage_requests = build_stage_requests(
        loaded, hardware, LaunchOptions(strategy=None if hardware.ranks > 1 else "single")
    )
    count_rows_before_planning(stage_requests, trains_in_process=False)
    plans = []
    for request in finish_stage_requests(stage_requests):
        with stage_context(request.run.stage_name):
            trace = request.run.config.plan.trace and bool(hardware.gpus)
            plans.append(plan_request(request.plan_request, trace=trace))
    state = _existing_state(folder, loaded, plans[0]) if is_resumed else "new"
    if state != "finished":
        require_gpus_and_disk(loaded, hardware, plans, folder)
    largest_plan = max(plans, key=lambda plan: (not plan.fits, plan.memory.required))
    cell = SweepCell(settings, loaded, folder, largest_plan, _total_hours(plans), state)
    # one that has begun ran here before, whatever is predicted now
    if state == "new" and not largest_plan.fits:
        return dataclasses.replace(
            cell, state="does_not_fit", error=format_misfit(largest_plan, config)
        )
    return cell


def _total_hours(items: Sequence[Plan | SweepCell]) -> float | None:
    known_hours = [item.hours for item in items if item.hours is not None]
    return sum(known_hours) if len(known_hours) == len(items) else None


def _existing_state(folder: RunFolder, loaded: LoadedConfig, plan: Plan) -> CellState:
    manifest = folder.read_manifest()
    is_finished = manifest.get("status") == "finished"
    if not is_finished:
        lock_run(folder).close()
        if not folder.has_trained:  # it starts from the beginning, with the present settings
            return "new"
    settings = changed_settings(folder, loaded.config, effective_batch=plan.batch.effective_batch)
    check_no_differences(folder, [*settings.values(), *find_changed_data(manifest, loaded)])
    return "finished" if is_finished else "begun"


def sweep_lines(cells: Sequence[SweepCell]) -> list[str]:
    """The table of all cells before the first one trains, and what would make those fit that do
    not."""
    actions = {
        "finished": "finished before",
        "begun": "resumed",
        "new": "trained",
        "does_not_fit": "skipped",
    }
    rows = [
        (
            cell.name,
            "yes" if cell.plan.fits else "NO",
            gib_or_na(cell.plan.memory.required, digits=2),
            gib_or_na(cell.plan.budget_bytes, digits=2),
            value_or_na(cell.hours and round(cell.hours, 2)),
            actions[cell.state],
        )
        for cell in cells
    ]
    table = build_table(
        ["run", "fits", "needs GiB", "of GiB", "hours", ""], rows, text_columns=(0, 1, 5)
    )
    to_train = [cell for cell in cells if cell.needs_training]
    hours = _total_hours(to_train)
    header = (
        f"Sweep: {len(cells)} cells, {len(to_train)} to train,"
        f" {value_or_na(hours and round(hours, 2), 'h')}"
    )
    return [
        header,
        *render_lines(table),
        *(f"{cell.name} does not fit: {cell.error}" for cell in cells if cell.error),
    ]


# --- trained --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SweepResult(Answer):
    """What became of every cell, and the comparison of those that are finished, of two or more."""

    cells: tuple[SweepCell, ...]
    comparison: Comparison | None

    @property
    def nothing_fits(self) -> bool:
        """True if nothing was trained, because nothing fits."""
        return all(cell.state == "does_not_fit" for cell in self.cells)

    @property
    def ok(self) -> bool:
        """True if every cell that fits is trained, and one fits."""
        return (
            all(cell.state in ("finished", "does_not_fit") for cell in self.cells)
            and not self.nothing_fits
        )

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": self.ok,
            "cells": [cell.as_json() for cell in self.cells],
            "compare": self.comparison.as_json() if self.comparison else None,
        }

    def lines(self) -> list[str]:
        """In words: the comparison, and what is not trained."""
        missing = [
            f"{cell.name} {_STATE_TEXTS[cell.state]}: {cell.error}"
            for cell in self.cells
            if cell.error
        ]
        lines = [
            f"Sweep: {len(self.cells) - len(missing)} of {len(self.cells)} cells are trained",
            *missing,
        ]
        if self.comparison is None:
            return lines
        *comparison_lines, next_line = self.comparison.lines()
        return [*comparison_lines, *lines, next_line]


def train_cells(cells: Sequence[SweepCell], environment: Mapping[str, str]) -> list[SweepCell]:
    """Train the cells one after the other, each in a process of its own; one that fails does not
    keep the others. `environment`: of this process before it planned, which may have set variables.
    Raises Interrupted where the user stopped it."""
    result_cells, number, to_train = [], 0, sum(cell.needs_training for cell in cells)
    for cell in cells:
        if cell.needs_training:
            number += 1
            logger.info("Cell %d of %d: %s", number, to_train, cell.name)
            cell = _train_cell(cell, independent_environment(environment))
            if cell.error is not None:
                logger.warning("%s %s: %s", cell.name, _STATE_TEXTS[cell.state], cell.error)
        result_cells.append(cell)
    return result_cells


def _train_cell(cell: SweepCell, environment: Mapping[str, str]) -> SweepCell:
    path = cell.loaded.path
    if read_text(path) != cell.loaded.text:
        return dataclasses.replace(
            cell,
            state="failed",
            error=f"{path} has changed since the sweep began, so that this would be another run",
        )
    # its answer alone comes through the pipe; its log goes where this one's goes
    child = signals.run_child(
        "sft_play",
        ["train", "--config", str(path), "--json", *cell.loaded.overrides],
        environment=environment,
        stdout=subprocess.PIPE,
        stderr=1,
    )
    if child.was_stopped:
        raise Interrupted(
            f"stopped by the user in {cell.name}; the same command goes on from there"
        )
    if child.exit_code == 0 and read_json(cell.folder.manifest_path).get("status") == "finished":
        return dataclasses.replace(cell, state="finished")
    if child.exit_code in (0, Interrupted.exit_code):
        return dataclasses.replace(
            cell, state="stopped", error="before its end; the same command resumes it"
        )
    error = f"its process ended with exit code {child.exit_code}"
    if child.exit_code < 0:
        error = f"its process ended with signal {-child.exit_code}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = str(json.loads(child.stdout)["error"])
    return dataclasses.replace(cell, state="failed", error=error)
