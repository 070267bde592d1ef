"""What every start of a run does before it trains: refuse what needs no library, build the starter's base, import."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os

from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data.sources.examples import look_at
from sft_play.data.sources.files import data_paths
from sft_play.errors import in_stage
from sft_play.facts.hardware import Hardware
from sft_play.heap import importing
from sft_play.launch import tensorboard
from sft_play.launch.device import prepare_libraries, require_machine
from sft_play.launch.launch_options import LaunchOptions
from sft_play.log import one_line
from sft_play.planner.layout import LayoutName, layouts_over
from sft_play.planner.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.starter.names import BASE_NAME
from sft_play.starting.over_ranks import parts_of, refuse_strategy
from sft_play.starting.plan_run import plan_for, shape_for
from sft_play.starting.row_survey import count_rows, has_own_lengths, known_rows

logger = logging.getLogger(__name__)


def log_base(loaded: LoadedConfig) -> None:
    """The first line of every run: which weights it trains, and which file says so."""
    name = loaded.config.model.name
    base = f"{name} ({loaded.path})"
    if name == BASE_NAME:
        base = f"{name}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    logger.info("Base model: %s", one_line(base, limit=400))


def require_usable(config: RunConfig, hardware: Hardware) -> None:
    """Raises HardwareError where this machine would surprise the user (its GPU is unusable), or cannot take a step."""
    require_machine(config, hardware, os.environ, params=lambda: shape_for(config).params)


def require_data(loaded: LoadedConfig) -> None:
    """Raises DataError where a file is missing or empty, or its first rows cannot be read, naming the stage where the
    run has stages."""
    for part, _ in parts_of(loaded, None):
        with in_stage(part.stage):
            look_at(part.config.data, data_paths(part.config.data), task_mode=part.config.task_mode)


def load_libraries() -> None:
    """Import what training needs; said where it is the first import of torch in this process."""
    with importing():
        importlib.import_module("sft_play.training.run")


def require_backend(loaded: LoadedConfig) -> None:
    """Raises BackendError where the requested backend cannot run, before minutes go into the starter's base."""
    if loaded.config.tuning.backend != "bnb":
        from sft_play.training.prepare.backend import choose_backend

        choose_backend(loaded.config, staged=bool(loaded.stages))


def require_adapter(loaded: LoadedConfig, plan: Plan) -> None:
    """Raises ModelError where the adapter that the run continues does not fit, before ranks are started."""
    if loaded.config.model.adapter is None:
        return
    from sft_play.training.prepare.model_spec import build_model_spec
    from sft_play.training.prepare.origin import origin_of
    from sft_play.training.prepare.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(loaded.config).tokenizer
    origin_of(loaded.config, build_model_spec(loaded.config, plan.precision, tokenizer_size=len(tokenizer)))


def with_starter(loaded: LoadedConfig) -> LoadedConfig:
    """The config with the path of the starter's base model in place of its name; trained now if it does not exist."""
    if loaded.config.model.name != BASE_NAME:
        return loaded
    from sft_play.training.prepare.starter_base import ensure_base

    overrides = (*loaded.overrides, f"model.name={json.dumps(str(ensure_base()))}")
    # Text and overrides stay as given: the run folder's config.yaml names the starter, not a path of this machine.
    return dataclasses.replace(
        load_config(loaded.path, overrides=overrides), text=loaded.text, overrides=loaded.overrides
    )


def count_before_planning(
    loaded: LoadedConfig, hardware: Hardware, *, only: tuple[LayoutName, ...] | None, trains_here: bool
) -> None:
    """Count the tokens of the run's rows, so that its plan knows their lengths; nothing where they are known.

    Args:
        trains_here: whether this process trains, and so needs all libraries anyway.
        only: layouts to plan in before minutes may go into the rows, for rows of full length, so that what no length
            changes is refused in a second; None where a file or a stopped run decides the batch.

    Raises:
        SftPlayError: as planning, building the starter's base, or reading the rows does.
    """
    parts = [loaded.of(stage) for stage in loaded.stages] or [loaded]
    if not any(has_own_lengths(part.config) and known_rows(part.config) is None for part in parts):
        return
    for part in parts if only else ():  # the result is dropped: only a refusal counts
        with in_stage(part.stage):
            plan_for(part.config, hardware, only=only or (), with_suggestions=False)
    loaded = with_starter(loaded)
    prepare_libraries(loaded.config.model.name, hardware)
    if trains_here:
        load_libraries()
    count_rows(loaded)


def count_for_ranks(
    loaded: LoadedConfig, hardware: Hardware, options: LaunchOptions, *, is_resumed: bool, trains_here: bool
) -> None:
    """Count the rows for the plan of a run over ranks, after what no length changes is refused; a stopped run, and a
    DeepSpeed file, decide the batch by themselves. Raises as `count_before_planning` does."""
    only: tuple[LayoutName, ...] | None = None
    if not is_resumed and options.deepspeed is None:
        for part, _ in parts_of(loaded, None):
            refuse_strategy(part.config, hardware, options.strategy)
        only = (options.strategy,) if options.strategy else layouts_over(hardware.ranks)
    count_before_planning(loaded, hardware, only=only, trains_here=trains_here)


def board_beside(folder: RunFolder, *, wanted: bool) -> contextlib.AbstractContextManager[object]:
    """A context with TensorBoard over a run's curves, where it is `wanted`."""
    if not wanted:
        return contextlib.nullcontext()
    return tensorboard.beside(folder.tensorboard, environment=os.environ, title=folder.path.absolute().name)
