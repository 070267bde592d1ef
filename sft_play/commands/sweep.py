"""`sweep`: every combination of the values that SET lists, each an ordinary run in a process of its own.

All cells are read, checked and planned before the first one trains. A cell's name says what differs, so that the same
command finds its run again: a finished one is left as it is, a stopped one is resumed.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sft_play.commands.answer import Answer, answer_of, stdout_to_stderr
from sft_play.commands.launching import launched_ranks
from sft_play.commands.request import Request, refuse_own_model
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.yaml_io import read_text
from sft_play.diagnose.pages import gib, lines_of, table_of
from sft_play.errors import ConfigError, DoesNotFit, Interrupted, about, in_stage
from sft_play.facts.hardware import Hardware, detect_hardware
from sft_play.finished.report.compare import PAGE, Comparison, compare
from sft_play.finished.run import changed_data
from sft_play.launch.launch_options import LaunchOptions, apply_mesh, mesh_hardware
from sft_play.launch.machine import restrict_to_device
from sft_play.log import one_line
from sft_play.planner.advice.what_if import parse_grid
from sft_play.planner.layout import LayoutName, layout_choices
from sft_play.planner.plan import Plan, format_misfit
from sft_play.process import signals
from sft_play.process.environment import for_another_run
from sft_play.runs.folder import RunFolder
from sft_play.runs.locking import lock
from sft_play.runs.lookup import name_of_config, new_folder, resumes
from sft_play.runs.manifest import other_settings, refuse_mixing
from sft_play.starting.plan_run import plan_run
from sft_play.starting.plan_stages import common_layout, count_rows_before_planning
from sft_play.starting.refusals import refusals, require_gpus_and_disk

logger = logging.getLogger(__name__)


# Bytes of a cell's name before its digest: 200 are allowed.
LONGEST_NAME = 150
# Of a cell: the first four before it is trained, the last four after.
State = Literal["new", "begun", "finished", "does_not_fit", "failed", "stopped"]
_ENDED = {"does_not_fit": "does not fit", "failed": "failed", "stopped": "was stopped"}


@dataclass(frozen=True)
class Cell:
    """One combination, read, checked and planned."""

    words: tuple[str, ...]
    loaded: LoadedConfig
    folder: RunFolder
    plan: Plan
    """That of the stage that needs most, of a run with stages."""
    hours: float | None
    state: State
    error: str | None = None
    """Why it is not finished: what it needs and what would fit, or what its run ended with."""

    @property
    def name(self) -> str:
        """The name of its run."""
        return self.folder.path.name

    @property
    def trains(self) -> bool:
        """Whether it is to be trained."""
        return self.state in ("new", "begun")

    def as_json(self) -> dict[str, Any]:
        """In plain data, with the plan's figures."""
        return {
            "name": self.name, "path": str(self.folder.path), "settings": list(self.words), "status": self.state,
            "fits": self.plan.fits, "peak_bytes": self.plan.memory.required, "budget_bytes": self.plan.budget_bytes,
            "hours": self.hours, "error": self.error,
        }  # fmt: skip


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
    return compare(folders, path=request.out or folders[0].path / PAGE)


# --- read -------------------------------------------------------------------------------------------------------------


def cells_of(path: Path, overrides: Sequence[str]) -> list[tuple[tuple[str, ...], LoadedConfig]]:
    """Each combination of the listed values: the words that tell it from the others, and its run; raises ConfigError
    where nothing is listed, or a value is refused."""
    combinations = parse_grid(overrides, variable="SET")
    if len(combinations) < 2:
        raise ConfigError("SET lists no values to try: make sweep SET='train.learning_rate=1e-4,2e-4 tuning.lora.r=16'")
    varied = [place for place, words in enumerate(zip(*combinations, strict=True)) if len(set(words)) > 1]
    cells = []
    for words in combinations:
        own = tuple(words[place] for place in varied)
        with about(one_line(" ".join(own))):
            cells.append((own, _with_name(load_config(path, overrides=words), own)))
    return cells


def _with_name(loaded: LoadedConfig, words: Sequence[str]) -> LoadedConfig:
    output = loaded.config.output
    base = output.name or name_of_config(loaded.path)
    exists = "replace" if output.if_exists == "replace" else "resume"
    output = output.model_copy(update={"name": cell_name(base, words), "if_exists": exists})
    overrides = (*loaded.overrides, f"output.name={json.dumps(output.name)}", f"output.if_exists={exists}")
    config = loaded.config.model_copy(update={"output": output})
    return dataclasses.replace(loaded, config=config, overrides=overrides)


def cell_name(base: str, words: Sequence[str]) -> str:
    """A run's name with what differs, such as `my-learning_rate=1e-4-r=16`; where letters had to be replaced, or it
    would be too long, with a digest of the words."""
    pairs = [word.partition("=")[::2] for word in words]
    short = Counter(key.rpartition(".")[2] for key, _ in pairs)
    keys = [last if short[last := key.rpartition(".")[2]] == 1 else key for key, _ in pairs]
    text = "-".join([base, *(f"{key}={value}" for key, (_, value) in zip(keys, pairs, strict=True))])
    plain = base + re.sub(r"\.{2,}|[^\w.+=-]", "_", text[len(base) :], flags=re.ASCII)
    if plain == text and len(plain.encode()) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return f"{plain.encode()[:LONGEST_NAME].decode(errors='ignore')}-{digest}"


# --- checked and planned ----------------------------------------------------------------------------------------------


def plan_cells(cells: Sequence[tuple[tuple[str, ...], LoadedConfig]]) -> list[Cell]:
    """Check and plan every cell as `make train` would; nothing is written but the cache of counted rows. Raises
    SftPlayError where one of them would be refused, or a run of its name has other settings or data."""
    planned = []
    for words, loaded in cells:
        with about(one_line(" ".join(words))):
            planned.append(_planned(words, loaded))
    return planned


def _planned(words: tuple[str, ...], loaded: LoadedConfig) -> Cell:
    config = loaded.config
    hardware = _hardware(loaded)
    folder = new_folder(config.output, config_path=loaded.path)
    is_there = resumes(folder, config.output)
    for error in refusals(loaded, hardware, makes_folder=not is_there):
        raise error
    only: tuple[LayoutName, ...] = layout_choices(hardware.ranks) if hardware.ranks > 1 else ("single",)
    options = LaunchOptions(strategy=only[0] if len(only) == 1 else None)
    count_rows_before_planning(loaded, hardware, options, is_resumed=is_there, trains_in_process=False)
    plans = _plans(loaded, hardware, only)
    state = _found(folder, loaded, plans[0]) if is_there else "new"
    if state != "finished":
        require_gpus_and_disk(loaded, hardware, plans, folder)
    most = max(plans, key=lambda plan: (not plan.fits, plan.memory.required))
    if state == "new" and not most.fits:  # one that has begun ran here before, whatever is predicted now
        return Cell(words, loaded, folder, most, _sum(plans), "does_not_fit", format_misfit(most, config))
    return Cell(words, loaded, folder, most, _sum(plans), state)


def _sum(of: Sequence[Plan | Cell]) -> float | None:
    known = [one.hours for one in of if one.hours is not None]
    return sum(known) if known and len(known) == len(of) else None


def _hardware(loaded: LoadedConfig) -> Hardware:
    config, machine = loaded.config, restrict_to_device(loaded.config, detect_hardware())
    apply_mesh(LaunchOptions(), config)  # refuses a mesh of more GPUs than there are
    machine = mesh_hardware(config, machine)
    return machine if config.model.mesh_shape is not None or len(machine.gpus) < 2 else machine.limit_gpus(1)


def _plans(loaded: LoadedConfig, hardware: Hardware, only: tuple[LayoutName, ...]) -> list[Plan]:
    if loaded.stages and len(only) > 1:
        only = (common_layout([stage.config for stage in loaded.stages], hardware, only=only),)
    plans = []
    for part in loaded.parts:
        with in_stage(part.stage):
            trace = part.config.plan.trace and bool(hardware.gpus)
            plans.append(plan_run(part.config, hardware, layouts=only, trace=trace))
    return plans


def _found(folder: RunFolder, loaded: LoadedConfig, plan: Plan) -> State:
    manifest = folder.manifest()
    is_finished = manifest.get("status") == "finished"
    if not is_finished:
        lock(folder).close()
        if not folder.has_trained:  # it starts from the beginning, with the present settings
            return "new"
    settings = other_settings(folder, loaded.config, effective_batch=plan.batch.effective_batch)
    refuse_mixing(folder, [*settings.values(), *changed_data(manifest, loaded)])
    return "finished" if is_finished else "begun"


def plan_lines(cells: Sequence[Cell]) -> list[str]:
    """The table of all cells before the first one trains, and what would make those fit that do not."""
    todo = {"finished": "finished before", "begun": "resumed", "new": "trained", "does_not_fit": "skipped"}
    rows = []
    for cell in cells:
        needs, has = gib(cell.plan.memory.required, digits=2), gib(cell.plan.budget_bytes, digits=2)
        hours = "-" if cell.hours is None else f"{cell.hours:.2f}"
        rows.append((cell.name, "yes" if cell.plan.fits else "NO", needs, has, hours, todo[cell.state]))
    table = table_of(["run", "fits", "needs GiB", "of GiB", "hours", ""], rows, left=(0, 1, 5))
    skipped = [f"{cell.name} does not fit: {cell.error}" for cell in cells if cell.error]
    trained = [cell for cell in cells if cell.trains]
    hours = "" if (whole := _sum(trained)) is None else f", {whole:.2f} h"
    return [f"Sweep: {len(cells)} cells, {len(trained)} to train{hours}", *lines_of(table), *skipped]


# --- trained ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What became of every cell, and the comparison of those that are finished, of two or more."""

    cells: tuple[Cell, ...]
    comparison: Comparison | None

    @property
    def none_fits(self) -> bool:
        """Whether nothing was trained, because nothing fits."""
        return all(cell.state == "does_not_fit" for cell in self.cells)

    @property
    def ok(self) -> bool:
        """Whether every cell that fits is trained, and one fits."""
        return all(cell.state in ("finished", "does_not_fit") for cell in self.cells) and not self.none_fits

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        compared = self.comparison.as_json() if self.comparison else None
        return {"ok": self.ok, "cells": [cell.as_json() for cell in self.cells], "compare": compared}

    def lines(self) -> list[str]:
        """In words: the comparison, and what is not trained."""
        missing = [f"{cell.name} {_ENDED[cell.state]}: {cell.error}" for cell in self.cells if cell.error]
        *compared, following = self.comparison.lines() if self.comparison else [""]
        count = len(self.cells) - len(missing)
        return [
            *compared,
            f"Sweep: {count} of {len(self.cells)} cells are trained",
            *missing,
            *filter(None, [following]),
        ]


def train_cells(cells: Sequence[Cell], environment: Mapping[str, str]) -> list[Cell]:
    """Train the cells one after the other, each in a process of its own; one that fails does not keep the others.
    `environment`: of this process before it planned, which may have set variables. Raises Interrupted where the user
    stopped it."""
    ended, trained = [], [cell for cell in cells if cell.trains]
    for cell in cells:
        if cell.trains:
            logger.info("Cell %d of %d: %s", trained.index(cell) + 1, len(trained), cell.name)
            cell = _trained(cell, for_another_run(environment))
            if cell.error is not None:
                logger.warning("%s %s: %s", cell.name, _ENDED[cell.state], cell.error)
        ended.append(cell)
    return ended


def _trained(cell: Cell, environment: Mapping[str, str]) -> Cell:
    path = cell.loaded.path
    if read_text(path) != cell.loaded.text:
        changed = f"{path} has changed since the sweep began, so that this would be another run"
        return dataclasses.replace(cell, state="failed", error=changed)
    # its answer alone comes through the pipe; its log goes where this one's goes
    words = ["train", "--config", str(path), "--json", *cell.loaded.overrides]
    ended = signals.run_beside("sft_play", words, environment=environment, stdout=subprocess.PIPE, stderr=1)
    if ended.was_stopped:
        raise Interrupted(f"stopped by the user in {cell.name}; the same command goes on from there")
    status = cell.folder.manifest().get("status") if cell.folder.manifest_path.is_file() else None
    if ended.code == 0 and status == "finished":
        return dataclasses.replace(cell, state="finished")
    if ended.code in (0, Interrupted.exit_code):
        return dataclasses.replace(cell, state="stopped", error="before its end; the same command resumes it")
    error = f"its process ended with {f'signal {-ended.code}' if ended.code < 0 else f'exit code {ended.code}'}"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = str(json.loads(ended.written)["error"])
    return dataclasses.replace(cell, state="failed", error=error)
