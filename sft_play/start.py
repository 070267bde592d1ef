"""Starts what was asked: the plan with everything that is known here, and the run in this process or over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play import endings, failures, runs
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data.files import DataPaths, data_paths, has_held_out_file
from sft_play.data.size import rough_size
from sft_play.errors import ConfigError, HardwareError, Interrupted, RunFolderError, SftPlayError, in_stage
from sft_play.facts.architecture import (
    ModelShape,
    UnknownArchitecture,
    config_json,
    hub_answers,
    local_folder,
    shape_of,
)
from sft_play.facts.hardware import Hardware, detect
from sft_play.launch import accelerate_config, deepspeed_config, tensorboard
from sft_play.launch.accelerate_config import AccelerateConfig
from sft_play.launch.board_commands import with_curves
from sft_play.launch.command import Launch, require_free_port, torchrun, visible_only
from sft_play.launch.device import allow_fused_attention, hide_gpus, machine_for, require_machine
from sft_play.launch.exported import accelerate_choices, drop_accelerate, meeting_variables, rank_variables
from sft_play.launch.meeting import card_of, choose_interface, meet, refuse_lone_node
from sft_play.launch.ranks import Ranks
from sft_play.launch.spread import DeepspeedWish, Spread, with_accelerate
from sft_play.log import one_line, start_log_buffer
from sft_play.plan import record, show
from sft_play.plan.batching import divisors, effective_batch
from sft_play.plan.candidates import Candidate
from sft_play.plan.layout import DEEPSPEED, LAYOUT_NAMES, LayoutName, Stopped, layouts_for, layouts_over
from sft_play.plan.mesh import mesh_of, mesh_words
from sft_play.plan.plan import Confirm, Plan, Traced, Work, make_plan, plan_from_json, require_fit
from sft_play.plan.precision import ROUNDS_ITSELF, choose_precision
from sft_play.runs import Lock, RunFolder
from sft_play.starter.names import BASE_NAME

if TYPE_CHECKING:
    from sft_play.train.run import Job

logger = logging.getLogger(__name__)


def shape_for(config: RunConfig) -> ModelShape:
    """The model's shapes; those of a class that the tables do not know are measured on the meta device."""
    model = config.model
    try:
        return shape_of(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except UnknownArchitecture as error:
        logger.info("%s; building it without memory to measure it", error)
        from sft_play.trace.meta_shape import shape_on_meta

        return shape_on_meta(
            config_json(model.name, revision=model.revision),
            name=model.name,
            trust_remote_code=model.trust_remote_code,
        )


def has_eval(config: RunConfig) -> bool:
    """Whether evaluation batches run beside the training."""
    return config.data.val_fraction > 0 or has_held_out_file(config.data)


def plan_for(
    config: RunConfig,
    hardware: Hardware,
    *,
    only: tuple[LayoutName, ...] = LAYOUT_NAMES,
    trace: bool = False,
    with_ways_out: bool = True,
    keeps_params: bool = False,
) -> Plan:
    """The plan with everything that is known here: earlier runs, the size of the data, a trace where asked."""
    hardware = machine_for(config, hardware)
    shape = shape_for(config)
    return make_plan(
        config,
        shape,
        hardware,
        only=only,
        has_eval=has_eval(config),
        confirm=_tracer(config, shape) if trace else None,
        earlier=[] if hardware.named else record.load(),
        work=_work(config),
        with_ways_out=with_ways_out,
        keeps_params=keeps_params,
    )


def _tracer(config: RunConfig, shape: ModelShape) -> Confirm:
    """Traces candidates of this config; the libraries are imported at the first one."""

    def confirm(candidate: Candidate) -> Traced:
        from sft_play.trace.confirm import trace_candidate

        model = config_json(config.model.name, revision=config.model.revision)
        return trace_candidate(config, model, shape, candidate.precision, candidate)

    return confirm


def _work(config: RunConfig) -> Callable[[int], Work | None]:
    """How many steps and tokens a run has, by the size of its file."""

    def work(effective: int) -> Work | None:
        text = config.task_mode == "cpt"
        size = rough_size(config.data, text_wanted=text)
        steps = config.train.max_steps
        if size is None:
            return Work(steps, None) if steps else None
        full = text or config.data.packing != "none"
        rows = max(1, size.tokens // config.model.max_seq_len) if full else size.rows
        per_epoch = math.ceil(rows / effective)
        steps = steps or max(1, math.ceil(per_epoch * config.train.epochs))
        tokens = min(size.tokens, rows * config.model.max_seq_len)
        return Work(steps, int(tokens * steps / per_epoch))

    return work


def _with_starter(loaded: LoadedConfig) -> LoadedConfig:
    """The config with the starter's base model, made now if it is not there, in place of its name."""
    if loaded.config.model.name != BASE_NAME:
        return loaded
    from sft_play.train.starter_base import ensure_base

    overrides = (*loaded.overrides, f"model.name={json.dumps(str(ensure_base()))}")
    return dataclasses.replace(
        load_config(loaded.path, overrides=overrides), text=loaded.text, overrides=loaded.overrides
    )


def start_here(loaded: LoadedConfig, folder: RunFolder, *, resume: bool, board: bool = False) -> int:
    """The run in this process, on one GPU or the CPU; `board`: with TensorBoard beside it.

    Outside of the training's steps a request to stop unwinds: nothing is saved that is not saved already.
    """
    with endings.StopSignals(endings.interrupt), contextlib.ExitStack() as held:
        mark = held.enter_context(runs.lock(folder)) if resume else None
        return _run_here(loaded, folder, mark, board=board)


def _run_here(loaded: LoadedConfig, folder: RunFolder, mark: Lock | None, *, board: bool) -> int:
    resume = mark is not None
    buffer = start_log_buffer()
    _say_base(loaded)
    choices = _choices_of_accelerate()
    loaded = with_curves(loaded) if board else loaded
    hide_gpus(loaded.config, os.environ)
    whole = machine_for(loaded.config, detect())
    hardware = _one_gpu(whole)
    _require_machine(loaded.config, hardware)
    made: list[tuple[RunConfig, Plan]] = []
    for part, place in _parts(loaded, folder if resume else None):
        _say_stage(part)
        with in_stage(part.stage):
            stopped = stopped_run(place) if place is not None else None
            planned = _as_stopped(part.config, stopped, 1)
            if place is not None:
                _refuse_going_on(place, stopped, "single", 1)
            plan = plan_for(planned, hardware, only=("single",), trace=planned.plan.trace and bool(hardware.gpus))
            _say_what_all_would_do(planned, whole, plan)
            require_fit(plan, planned)
            _say_plan(plan, planned)
        made.append((planned, plan))
    plans = [plan for _, plan in made]
    if choices is not None:
        _say_choices(choices, plans[0])
    _require_data(loaded)
    _require_backend(loaded)
    loaded = _with_starter(loaded)
    _quiet_libraries(loaded.config.model.name, hardware)
    from sft_play.train.run import Job

    job = Job(
        loaded, plans[0], _paths(loaded), folder, resume=resume, mark=mark, log_buffer=buffer, today=first_day(folder)
    )
    with _beside(folder, wanted=board):
        summary = _train(job, [(plan, None) for plan in plans])
    _remember_all(made, summary)
    return 0


Planned = tuple[Plan, dict[str, Any] | None]
"""A plan, and DeepSpeed's config where it runs it."""


def _require_machine(config: RunConfig, hardware: Hardware) -> None:
    """Raises HardwareError where a run on this machine is not what its user expects, or could not take a step."""
    require_machine(config, hardware, os.environ, params=lambda: shape_for(config).params)


def _train(job: Job, planned: Sequence[Planned]) -> dict[str, Any]:
    """Run a job here, or its stages one after the other; `planned` holds the plan of each."""
    if not job.loaded.stages:
        from sft_play.train.run import run

        return run(job)
    from sft_play.train.curriculum import run_stages

    last = job.loaded.stages[-1]
    stages = [
        dataclasses.replace(
            job, loaded=job.loaded.of(stage), plan=plan, paths=data_paths(stage.config.data), deepspeed=deepspeed,
            folder=job.folder.of_stage(stage.name, is_last=stage is last),
        )
        for stage, (plan, deepspeed) in zip(job.loaded.stages, planned, strict=True)
    ]  # fmt: skip
    return run_stages(dataclasses.replace(job, stages=tuple(stages)))


def _parts(loaded: LoadedConfig, folder: RunFolder | None) -> list[tuple[LoadedConfig, RunFolder | None]]:
    """The stages of a run, or the run itself, each with the folder of what goes on: none of a stage that has not begun,
    or needs nothing more."""
    if not loaded.stages:
        return [(loaded, folder)]
    found: list[tuple[LoadedConfig, RunFolder | None]] = []
    for stage in loaded.stages:
        place = folder.of_stage(stage.name, is_last=stage is loaded.stages[-1]) if folder is not None else None
        goes_on = place is not None and place.has_begun
        goes_on = goes_on and place is not None and not place.has_finished(adapter=stage.config.tuning.mode != "full")
        found.append((loaded.of(stage), place if goes_on else None))
    return found


def _say_stage(part: LoadedConfig) -> None:
    if part.stage is not None:
        logger.info("Stage %s:", part.stage)


def _paths(loaded: LoadedConfig) -> DataPaths:
    """Where the rows of a run, or of its first stage, are read from."""
    return data_paths((loaded.stages[0].config if loaded.stages else loaded.config).data)


def _require_data(loaded: LoadedConfig) -> None:
    """Raises DataError, of a run with stages naming the stage, where a file is missing."""
    for part, _ in _parts(loaded, None):
        with in_stage(part.stage):
            data_paths(part.config.data)


def _require_backend(loaded: LoadedConfig) -> None:
    """Raises BackendError where the one that is asked for cannot run, before the starter's base is made for it."""
    if loaded.config.tuning.backend != "bnb":
        from sft_play.train.model import choose_backend

        choose_backend(loaded.config, staged=bool(loaded.stages))


def _remember_all(made: Sequence[tuple[RunConfig, Plan]], summary: dict[str, Any]) -> None:
    """Keep what was measured; of stages on GPUs only, since the peak of a CPU's is that of all of them."""
    of_stages = summary.get("stages")
    if of_stages is None:
        _remember(*made[0], summary)
        return
    for (config, plan), one in zip(made, of_stages, strict=False):
        if plan.hardware.gpus:
            _remember(config, plan, one)


def first_day(folder: RunFolder) -> date:
    """The day of the run's first start, which a chat template is told that writes the date."""
    kept = folder.manifest().get("template_date") if folder.manifest_path.is_file() else None
    return date.fromisoformat(kept) if isinstance(kept, str) else date.today()


def _beside(folder: RunFolder, *, wanted: bool) -> contextlib.AbstractContextManager[object]:
    """TensorBoard over a run's curves while it goes on, where it was asked for."""
    if not wanted:
        return contextlib.nullcontext()
    return tensorboard.beside(folder.tensorboard, environment=os.environ, title=folder.path.absolute().name)


def _say_base(loaded: LoadedConfig) -> None:
    """The first line of every run: which weights it trains, and which file said so."""
    name = loaded.config.model.name
    if name == BASE_NAME:
        what = f"{BASE_NAME}, the starter's two million parameters ({loaded.path}; a run of yours: CONFIG=my.yaml)"
    else:
        what = f"{name} ({loaded.path})"
    logger.info("Base model: %s", one_line(what, limit=400))


def _say_plan(plan: Plan, config: RunConfig) -> None:
    for line in [show.choice_line(plan), *show.batch_lines(plan, config)]:
        logger.info("%s", line)
    if not plan.fits:
        logger.warning("the batch that was given is predicted not to fit; it is tried because it was given")


def _quiet_libraries(model: str, hardware: Hardware) -> None:
    """Settings that the libraries read when they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not hardware.gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would look for a GPU and warn that there is none
    allow_fused_attention(hardware, os.environ)
    offline_without_hub(model)


# --- a rank of several ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a rank is handed by its parent or by rank 0: the run's folder, its plan, how it was meant to start."""

    folder: str
    plan: dict[str, Any]
    resume: bool
    made: bool
    deepspeed: dict[str, Any] | None = None
    finished: bool = False
    """Whether there is nothing left to do."""
    today: str = ""
    """The day that a chat template is told which writes the date (YYYY-MM-DD): that of the run's first start."""
    more: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Plan and DeepSpeed's config of each stage after the first."""

    @staticmethod
    def of(folder: str, planned: Sequence[Planned], *, resume: bool, made: bool, today: str) -> Handed:
        """What is handed of a run with these plans, one or one a stage."""
        (plan, deepspeed), *later = planned
        more = [{"plan": plan.as_json(), "deepspeed": deepspeed} for plan, deepspeed in later]
        return Handed(folder, plan.as_json(), resume, made=made, deepspeed=deepspeed, today=today, more=more)

    def planned(self) -> list[Planned]:
        """The plans again."""
        parts = [{"plan": self.plan, "deepspeed": self.deepspeed}, *self.more]
        return [(plan_from_json(part["plan"]), part["deepspeed"]) for part in parts]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))


LAUNCH_FILE = "launch.json"
"""In a run folder that a parent made: what it hands to its ranks."""


def start_rank(
    loaded: LoadedConfig, ranks: Ranks, spread: Spread, *, find: Callable[[], tuple[RunFolder, bool]]
) -> int:
    """This process's part of a run that a launcher started over several ranks.

    Args:
        find: the run folder and whether the run goes on in it; asked on rank 0 where no parent named one.
    """
    buffer = start_log_buffer() if ranks.is_first else None
    _say_base(loaded)
    hide_gpus(loaded.config, os.environ)
    os.environ.update(rank_variables(os.environ))  # torch reads torchrun's names
    os.environ.update(meeting_variables(os.environ, nodes=ranks.nodes))
    choices = _choices_of_accelerate()
    if choices is not None and ranks.folder is None:  # below a parent of ours they are somebody else's, left over
        spread, loaded = _with_accelerate(spread, choices, loaded.config), _with_mesh_of(choices, loaded)
    choose_interface(ranks, os.environ)
    loaded = with_curves(loaded) if spread.board else loaded
    handed = _handed(loaded, ranks, spread, find)
    if handed.finished:
        return 0
    configs = [part.config for part, _ in _parts(loaded, None)]
    loaded = _with_starter(loaded)
    _quiet_libraries(loaded.config.model.name, detect())
    planned = handed.planned()
    plan = planned[0][0]
    if choices is not None and ranks.is_first and ranks.folder is None:
        _say_choices(choices, plan)
    _check_gpu(plan, ranks)
    from sft_play.train.run import Job

    folder = RunFolder(Path(handed.folder))
    job = Job(
        loaded, plan, _paths(loaded), folder, resume=handed.resume, log_buffer=buffer,
        made=handed.made, by=runs.WRITER if ranks.folder is not None else None, deepspeed=handed.deepspeed,
        timeout_s=timeout_of(loaded.config, os.environ),
        today=date.fromisoformat(handed.today) if handed.today else date.today(),
    )  # fmt: skip
    with endings.StopSignals(endings.interrupt), _beside(folder, wanted=spread.board and ranks.is_first):
        summary = _train(job, planned)
    if ranks.is_first:
        _remember_all([(config, plan) for config, (plan, _) in zip(configs, planned, strict=True)], summary)
    return 0


def _choices_of_accelerate() -> AccelerateConfig | None:
    """What `accelerate launch` told this process, taken out of its environment: every engine and precision is reached
    through the Trainer's arguments, and accelerate would act on its variables beside them."""
    choices = accelerate_choices(os.environ)
    drop_accelerate(os.environ)
    return choices


def _say_choices(choices: AccelerateConfig, plan: Plan, *, with_count: bool = False) -> None:
    """Where the plan and the run YAML win over a file of accelerate, or over what `accelerate launch` said."""
    for line in accelerate_config.differences(
        choices,
        mixed_precision=_word_of(plan),
        grad_accum=plan.batch.grad_accum,
        has_gpus=bool(plan.hardware.gpus),
        with_count=with_count,
    ):
        logger.info("%s", line)


def _word_of(plan: Plan) -> str:
    """The plan's precision as accelerate calls it."""
    return {"bfloat16": "bf16", "float16": "fp16"}.get(plan.precision.compute, "no")


def timeout_of(config: RunConfig, environment: Mapping[str, str]) -> float:
    """Seconds that ranks wait for each other: `distributed.timeout_s`, or NCCL_TIMEOUT where a person sets it.

    Raises:
        ConfigError: NCCL_TIMEOUT is no number of seconds.
    """
    given = environment.get("NCCL_TIMEOUT", "").strip()
    if not given:
        return config.distributed.timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"NCCL_TIMEOUT={one_line(given)} is no number of seconds from 1 to 86400")
    if seconds != config.distributed.timeout_s:
        logger.info("NCCL_TIMEOUT=%s in the environment: ranks wait %g s for each other instead of %g", one_line(given),
                    seconds, config.distributed.timeout_s)  # fmt: skip
    return seconds


def _handed(loaded: LoadedConfig, ranks: Ranks, spread: Spread, find: Callable[[], tuple[RunFolder, bool]]) -> Handed:
    """From the parent's file, or from rank 0 through the rendezvous store before anything loads."""
    if ranks.folder is not None:
        return Handed(**json.loads((ranks.folder / LAUNCH_FILE).read_text(encoding="utf-8")))
    from sft_play.train.rendezvous import handed_over

    if not ranks.is_first:
        return Handed(**json.loads(handed_over(None)))
    here = machine_for(loaded.config, detect())
    hardware = _spread_over(here, ranks.world_size, ranks.nodes)
    _require_machine(loaded.config, hardware)
    if hardware.gpus and ranks.local_world_size < len(here.gpus):
        logger.warning("%d of this node's %d GPUs stay idle: start %d processes on it (--nproc-per-node) to use all",
                       len(here.gpus) - ranks.local_world_size, len(here.gpus), len(here.gpus))  # fmt: skip
    folder, resume = find()
    place = str(folder.path.absolute())
    if resume and runs.is_finished(folder):
        handed = Handed(place, {}, resume, made=False, finished=True)
    else:
        planned = plan_stages(loaded, hardware, spread, going_on=folder if resume else None)
        handed = Handed.of(place, planned, resume=resume, made=False, today=str(first_day(folder)))
    handed_over(handed.text())
    return handed


def _spread_over(hardware: Hardware, world: int, nodes: int) -> Hardware:
    """The machine as `world` ranks on `nodes` nodes like this one use it."""
    if not hardware.gpus:
        return dataclasses.replace(hardware, cpu_ranks=world, nodes=nodes)
    here = world // nodes
    if here > len(hardware.gpus):
        raise HardwareError(f"{here} ranks on this node and {len(hardware.gpus)} GPUs: start at most one rank per GPU")
    gpus = tuple(dataclasses.replace(hardware.gpus[n % here], index=n) for n in range(world))
    return dataclasses.replace(hardware, gpus=gpus, nodes=nodes)


def _check_gpu(plan: Plan, ranks: Ranks) -> None:
    """Raises HardwareError where this rank's GPU is not the one that was planned for."""
    if not plan.hardware.gpus:
        return
    machine, planned = detect(), plan.hardware.gpus[0]
    here = machine.gpus
    if ranks.local_rank >= len(here):
        raise HardwareError(f"rank {ranks.rank} wants GPU {ranks.local_rank}, and {len(here)} can be seen")
    if here[ranks.local_rank].name != planned.name:
        remedy = "use nodes with GPUs of one kind"
        if len(machine.alike) > 1:
            named = machine.alike_words(variable="CUDA_VISIBLE_DEVICES")
            remedy = f"use GPUs of one kind, with CUDA_DEVICE_ORDER=PCI_BUS_ID and as many ranks: {named}"
        raise HardwareError(
            f"rank {ranks.rank} has a {here[ranks.local_rank].name}, and the plan is for {planned.name}: {remedy}"
        )


# --- the parent of several ranks --------------------------------------------------------------------------------------


def plan_stages(
    loaded: LoadedConfig, hardware: Hardware, spread: Spread, *, going_on: RunFolder | None = None
) -> list[Planned]:
    """The plans of a run over all ranks, said: one, or one a stage, all in one layout; raises as `plan_ranks` does."""
    if not loaded.stages:
        return [plan_ranks(loaded, hardware, spread, going_on=going_on)]
    if spread.strategy is None and spread.deepspeed is None:
        spread = dataclasses.replace(spread, strategy=_layout_of_all(loaded, hardware, going_on))
    found = []
    for part, place in _parts(loaded, going_on):
        _say_stage(part)
        with in_stage(part.stage):
            found.append(plan_ranks(part, hardware, _as_planned(spread, part, going_on), going_on=place))
    return found


def _as_planned(spread: Spread, part: LoadedConfig, going_on: RunFolder | None) -> Spread:
    """The spread with the DeepSpeed file that the first start has written for a stage, where it has and none is given
    now."""
    if going_on is None or part.stage is None or spread.deepspeed is not None or spread.strategy not in DEEPSPEED:
        return spread
    file = going_on.of_stage(part.stage).path / runs.DEEPSPEED_FILE
    return dataclasses.replace(spread, deepspeed=DeepspeedWish(file)) if file.is_file() else spread


def _layout_of_all(loaded: LoadedConfig, hardware: Hardware, going_on: RunFolder | None) -> LayoutName:
    """The layout that the stages share: the one that the run was stopped in, else the one that fits them all."""
    stopped = stopped_run(going_on) if going_on is not None else None
    if stopped is not None and (stopped.processes == hardware.ranks or stopped.layout in DEEPSPEED):
        return stopped.layout
    only = layouts_over(hardware.ranks)
    return common_layout([stage.config for stage in loaded.stages], hardware, only=only)


def common_layout(configs: Sequence[RunConfig], hardware: Hardware, *, only: tuple[LayoutName, ...]) -> LayoutName:
    """The fastest layout, of those that some stage would take by itself, that fits every stage.

    Where none does, the one that the stage with the longest rows would take, whose plan says what does not fit.
    """

    def plans(layouts: tuple[LayoutName, ...]) -> list[Plan]:
        return [plan_for(config, hardware, only=layouts, with_ways_out=False) for config in configs]

    alone = plans(only)
    names = dict.fromkeys(plan.layout for plan in sorted(alone, key=lambda plan: -plan.max_seq_len))
    if len(names) == 1:
        return next(iter(names))
    fitting: dict[LayoutName, float] = {}
    for name in names:
        with contextlib.suppress(SftPlayError):
            together = plans((name,))
            if all(plan.fits and plan.layout == name for plan in together):
                fitting[name] = sum(plan.hours or plan.speed.step_s for plan in together)
    return min(fitting or names, key=lambda name: fitting.get(name, 0.0))


def plan_ranks(
    loaded: LoadedConfig, hardware: Hardware, spread: Spread, *, going_on: RunFolder | None = None
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan of a run over all ranks of `hardware`, logged, and DeepSpeed's config where it runs it.

    Raises:
        ConfigError: the strategy cannot run the job, or DeepSpeed's config is another one's.
        RunFolderError: the run cannot be resumed in this layout or over these ranks.
        DoesNotFit: nothing fits, and the batch was left to the plan.
    """
    stopped = stopped_run(going_on) if going_on else None
    config, strategy, deepspeed = loaded.config, spread.strategy, spread.deepspeed
    if stopped is not None and strategy is None and deepspeed is None:
        strategy = stopped.layout if stopped.processes == hardware.ranks or stopped.layout in DEEPSPEED else None
    if going_on and deepspeed is None and strategy in DEEPSPEED and (going_on.path / runs.DEEPSPEED_FILE).is_file():
        deepspeed = DeepspeedWish(going_on.path / runs.DEEPSPEED_FILE)
    raw = None
    name = f"DEEPSPEED_CONFIG={one_line(str(deepspeed.file))}" if deepspeed and deepspeed.file else "DeepSpeed"
    if deepspeed is not None:
        raw, strategy = _read_deepspeed(deepspeed, name, strategy or "zero2")
    if going_on and strategy:
        _refuse_going_on(going_on, stopped, strategy, hardware.ranks)
    if raw is not None:
        train, taken = deepspeed_config.with_batch(config.train, raw, ranks=hardware.ranks, name=name)
        _say_deepspeed(taken)
        config = config.model_copy(update={"train": train})
        mixed, taken = deepspeed_config.with_dtypes(config.distributed.mixed_precision, raw, name=name)
        _say_deepspeed(taken)
        distributed = config.distributed.model_copy(update={"mixed_precision": mixed})
        config = config.model_copy(update={"distributed": distributed})
    asked = config  # with the batch of a DeepSpeed file, which is as much the user's as the run YAML's
    config = _as_stopped(config, stopped, _batches(config, stopped, hardware))
    refuse_strategy(config, hardware, strategy)
    only = (strategy,) if strategy else layouts_over(hardware.ranks)
    if stopped is not None and strategy is None:
        only = tuple(name for name in only if stopped.cannot_become(name, hardware.ranks) is None)
    keeps = raw is not None and strategy is not None and deepspeed_config.keeps_params(raw, strategy)
    trace = config.plan.trace and bool(hardware.gpus)
    plan = plan_for(config, hardware, only=only, trace=trace, keeps_params=keeps)
    require_fit(plan, config)
    _say_plan(plan, asked)
    if plan.layout not in DEEPSPEED:
        return plan, None
    raw = raw or deepspeed_config.understand(deepspeed_config.shipped(plan.layout))[0]
    return plan, _resolved_deepspeed(plan, config, raw, name)


def _batches(config: RunConfig, stopped: Stopped | None, hardware: Hardware) -> int:
    """Data-parallel ranks of a run that is resumed: those of its mesh, those that it had under as many processes, or
    all."""
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is not None:
        return mesh.batches
    return stopped.ranks if stopped is not None and stopped.processes == hardware.ranks else hardware.ranks


def _read_deepspeed(wish: DeepspeedWish, name: str, planned: LayoutName) -> tuple[dict[str, Any], LayoutName]:
    """The configuration that is wished for, in today's keys, and the layout that it means; where the two differ, and
    what was translated, is logged."""
    raw = deepspeed_config.read(wish.file) if wish.file else deepspeed_config.shipped(planned)
    raw, notes = deepspeed_config.understand(raw, name=name)
    layout = deepspeed_config.layout_of(raw, name=name, planned=planned)
    _say_deepspeed((*notes, *deepspeed_config.layout_notes(raw, planned=planned)))
    return raw, layout


def _say_deepspeed(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info("DeepSpeed: %s", line)


def _resolved_deepspeed(plan: Plan, config: RunConfig, raw: dict[str, Any], name: str) -> dict[str, Any]:
    """DeepSpeed's config with the plan's numbers, each of them logged."""
    numbers = deepspeed_config.PlanNumbers(
        micro_batch=plan.batch.micro_batch,
        grad_accum=plan.batch.grad_accum,
        data_parallel_ranks=plan.batch.ranks,
        hidden_size=shape_for(config).hidden_size,
        max_grad_norm=config.train.max_grad_norm,
        compute=plan.precision.compute,
        layout=plan.layout,
        learning_rate=config.learning_rate,
        weight_decay=config.train.weight_decay,
        betas=(deepspeed_config.ADAM_BETA1, config.train.adam_beta2),
        eps=deepspeed_config.ADAM_EPS,
        reduce=deepspeed_config.SHORT_DTYPES.get(config.distributed.mixed_precision.reduce),
        buffer=deepspeed_config.SHORT_DTYPES.get(config.distributed.mixed_precision.buffer),
    )
    obstacles = deepspeed_config.adam_obstacles() if plan.choice.layout.offloads_states else ()
    resolved, lines = deepspeed_config.fill(raw, numbers, name=name, torch_adam="; ".join(obstacles) or None)
    _say_deepspeed(lines)
    return resolved


def refuse_strategy(config: RunConfig, hardware: Hardware, strategy: LayoutName | None) -> None:
    """Raises ConfigError for a layout that is named and cannot run."""
    if strategy is None:
        return
    possible, refused = layouts_for(config, shape_for(config), hardware, named=strategy)
    names = list(dict.fromkeys(layout.name for layout in possible))
    if strategy in names:
        return
    because = next((item.because for item in refused if item.name == strategy), f"{hardware.ranks} rank(s)")
    if config.model.mesh_shape is not None:
        because = f"model.mesh_shape={mesh_words(config.model.mesh_shape)} is another layout"
    raise ConfigError(f"STRATEGY={strategy} cannot run this job: {because}; there are: {', '.join(names)}")


def go_on(loaded: LoadedConfig, folder: RunFolder, spread: Spread) -> int:
    """Go on with a run that was stopped, over as many ranks as before where no other number is asked for."""
    stopped = stopped_run(folder)
    is_asked = bool(spread.processes or spread.gpus or spread.nodes.count > 1)
    if not is_asked:
        gpus, ranks = len(machine_for(loaded.config, detect()).gpus), stopped.processes if stopped else 1
        spread = dataclasses.replace(spread, processes=min(ranks, gpus) if gpus else ranks)
    is_single = spread.processes == 1 and spread.nodes.count == 1 and not spread.deepspeed
    if is_single and spread.strategy in (None, "single"):
        return start_here(loaded, folder, resume=True, board=spread.board)
    return launch(loaded, spread, going_on=folder)


def launch(loaded: LoadedConfig, spread: Spread, *, going_on: RunFolder | None = None) -> int:
    """Plan, write the run folder, start the ranks and wait for them; the exit code is sft-play's."""
    with endings.StopSignals(endings.interrupt), contextlib.ExitStack() as held:
        return _launch(loaded, spread, going_on, held)


def _launch(loaded: LoadedConfig, spread: Spread, going_on: RunFolder | None, held: contextlib.ExitStack) -> int:
    """The same; the run folder's lock is left in `held`. On several nodes rank 0 has it alone."""
    buffer = start_log_buffer() if loaded.config.tuning.backend == "unsloth" else None
    _say_base(loaded)
    hide_gpus(loaded.config, os.environ)
    loaded = with_curves(loaded) if spread.board else loaded
    spread, accelerate = _as_accelerate_says(spread, loaded.config)
    loaded = _with_mesh_of(accelerate, loaded) if accelerate else loaded
    spread = as_the_mesh_says(spread, loaded.config)
    refuse_lone_node(spread.nodes)
    hardware = _machine_of(spread)
    if not spread.show_only:
        _require_machine(loaded.config, hardware)
    _say_idle(hardware, spread, accelerate.path if accelerate else None)
    here_alone = spread.nodes.count == 1
    folder = going_on or (runs.new_folder(loaded.config.output, config_path=loaded.path) if here_alone else None)
    resume = folder is not None and (going_on is not None or runs.goes_on(folder, loaded.config.output))
    if resume and folder is not None and runs.is_finished(folder):
        return 0
    spread, on_unsloth = _on_unsloth(loaded.config, spread, hardware)
    if resume and folder is not None and here_alone and not spread.show_only and not on_unsloth:
        held.enter_context(runs.lock(folder, by=runs.LAUNCHER))
    planned = plan_stages(loaded, hardware, spread, going_on=folder if resume else None)
    plan = planned[0][0]
    if accelerate is not None:
        _say_choices(accelerate, plan, with_count=True)
    _require_data(loaded)
    if on_unsloth and folder is not None:
        return _run_unsloth(loaded, folder, plan, spread, resume=resume, buffer=buffer)
    here = hardware.gpus_per_node
    made = torchrun(
        _rank_words(loaded, spread, plan, going_on),
        processes=here,
        nodes=spread.nodes,
        threads=None if hardware.gpus else max(1, hardware.cpu_cores // here),
        gpus=",".join(str(gpu) for gpu in spread.gpus) or None,
        folder=folder.path.absolute() if folder is not None and here_alone else None,
        nccl_timeout_s=timeout_of(loaded.config, os.environ) if hardware.gpus else None,
        given=os.environ,
    )
    logger.info("Launch: %s", made.line)
    if spread.show_only:
        return 0
    loaded = _with_starter(loaded)
    if not here_alone or folder is None:
        card = card_of(loaded.config, hardware, spread)
        met = meet(spread.nodes, card, limit_s=timeout_of(loaded.config, os.environ))
        made = dataclasses.replace(made, environment={**made.environment, **met.variables(os.environ)})
        return _run_ranks(made, None)
    with _beside(folder, wanted=spread.board):
        held.enter_context(_write_launch(folder, loaded, planned, resume=resume))
        try:
            code = _run_ranks(made, folder)
        except KeyboardInterrupt:
            _settle(folder, Interrupted.exit_code)
            raise
        _settle(folder, code)
        return code


def _on_unsloth(config: RunConfig, spread: Spread, hardware: Hardware) -> tuple[Spread, bool]:
    """Whether Unsloth's own processes run it, and the spread with the layout that they have.

    Raises:
        BackendError: Unsloth was asked for and cannot run it, and no fallback was named.
    """
    if config.tuning.backend != "unsloth":
        return spread, False
    from sft_play.train import bridge
    from sft_play.train.model import choose_backend, draw_blueprint, fall_back

    layout = spread.strategy or ("zero2" if spread.deepspeed else "ddp" if hardware.ranks > 1 else "single")
    backend = choose_backend(config, layout=layout, nodes=spread.nodes.count)
    if backend.name == "unsloth" and config.model.name != BASE_NAME:
        precision = choose_precision(config, hardware, shape_for(config))
        problem = bridge.model_problem(draw_blueprint(config, precision, tokenizer_size=0), precision)
        backend = fall_back(config, problem) if problem else backend
    if backend.name != "unsloth":
        return spread, False
    return dataclasses.replace(spread, strategy=layout), True


def _run_unsloth(
    loaded: LoadedConfig,
    folder: RunFolder,
    plan: Plan,
    spread: Spread,
    *,
    resume: bool,
    buffer: MemoryHandler | None,
) -> int:
    """The run as one process of this environment that prepares it, and starts Unsloth's on the GPUs itself."""
    planned, loaded = loaded.config, _with_starter(loaded)
    ranks = plan.choice.layout.ranks
    logger.info("Launch: %d process%s of Unsloth's environment", ranks, "es" if ranks > 1 else "")
    if spread.show_only:
        return 0
    if spread.gpus:
        os.environ.update(visible_only(",".join(str(gpu) for gpu in spread.gpus), os.environ))
    _quiet_libraries(loaded.config.model.name, plan.hardware)
    from sft_play.data.files import data_paths
    from sft_play.train.run import Job, run

    paths = data_paths(loaded.config.data)
    with _beside(folder, wanted=spread.board):
        summary = run(
            Job(
                loaded, plan, paths, folder, resume=resume, log_buffer=buffer,
                timeout_s=timeout_of(loaded.config, os.environ), today=first_day(folder),
            )
        )  # fmt: skip
    _remember(planned, plan, summary)
    return 0


def _as_accelerate_says(spread: Spread, config: RunConfig) -> tuple[Spread, AccelerateConfig | None]:
    """The spread with what an accelerate configuration adds, and that configuration; what nobody typed is logged."""
    file, accelerate, notes = accelerate_config.find_config(os.environ), None, spread.notes
    if file is not None:
        accelerate, found = accelerate_config.read_found(file, os.environ)
        notes += found
    for note in notes:
        logger.info("%s", note)
    return (_with_accelerate(spread, accelerate, config) if accelerate else spread), accelerate


def _with_accelerate(spread: Spread, accelerate: AccelerateConfig, config: RunConfig) -> Spread:
    """The spread with what accelerate says; its FSDP is what carries a mesh of the run YAML, and no other layout."""
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is not None and mesh.ranks > mesh.dp and accelerate.distributed_type == "FSDP":
        accelerate = dataclasses.replace(accelerate, mesh=mesh)
    return with_accelerate(spread, accelerate)


def _with_mesh_of(accelerate: AccelerateConfig, loaded: LoadedConfig) -> LoadedConfig:
    """The run YAML with the mesh of a file of accelerate, where it has none of its own; what is done is logged."""
    own, name = mesh_of(loaded.config.model.mesh_shape), one_line(str(accelerate.path))
    if accelerate.mesh is None or own == accelerate.mesh:
        return loaded
    if own is not None:
        logger.info("%s says parallelism_config %s, the run YAML model.mesh_shape=%s: the run YAML wins",
                    name, accelerate.mesh, mesh_words(loaded.config.model.mesh_shape))  # fmt: skip
        return loaded
    logger.info("%s: its parallelism_config is model.mesh_shape=%s", name, accelerate.mesh)
    return load_config(loaded.path, overrides=(*loaded.overrides, f"model.mesh_shape={accelerate.mesh}"))


def as_the_mesh_says(spread: Spread, config: RunConfig) -> Spread:
    """The spread with as many processes as a mesh has, where nobody gave a number.

    Raises:
        ConfigError: they do not divide over the nodes, or there are fewer GPUs than the mesh has processes.
    """
    mesh = mesh_of(config.model.mesh_shape)
    if mesh is None or spread.processes or spread.gpus:
        return spread
    where, nodes = f"model.mesh_shape={mesh_words(config.model.mesh_shape)}", spread.nodes.count
    if mesh.ranks % nodes:
        raise ConfigError(f"{where} is a mesh of {mesh.ranks} processes, which {nodes} nodes cannot share equally")
    here, there = mesh.ranks // nodes, len(detect().gpus)
    if there and here > there:
        raise HardwareError(f"{where} wants {here} processes on each node, and there are {there} GPUs: one each")
    return dataclasses.replace(spread, processes=here)


def _say_idle(hardware: Hardware, spread: Spread, file: Path | None) -> None:
    """Says which GPUs of this node stay idle because a number of processes was given, and what would use them all."""
    there, used = len(detect().gpus), hardware.gpus_per_node
    if not hardware.gpus or spread.gpus or used >= there:
        return
    in_file = f", or num_processes: {there * spread.nodes.count} in {one_line(str(file))}," if file else ""
    logger.warning("%d of this node's %d GPUs %s idle: NPROC=%d%s uses them all",
                   there - used, there, "stay" if there - used > 1 else "stays", there, in_file)  # fmt: skip


def _settle(folder: RunFolder, code: int) -> None:
    """Write how a run ended whose ranks ended before the first of them could."""
    with contextlib.suppress(RunFolderError):  # it was never used, and is removed again
        if code and folder.manifest().get("status") == "running":
            folder.update_manifest(status="stopped" if code == Interrupted.exit_code else "failed")


def _rank_words(loaded: LoadedConfig, spread: Spread, plan: Plan, going_on: RunFolder | None) -> list[str]:
    """What each rank is started with; on several nodes, where no parent hands a plan over, with the layout too."""
    words = ["resume" if going_on else "train", "--config", str(loaded.path), *loaded.overrides]
    if spread.nodes.count == 1:
        return words
    words += ["--strategy", plan.layout]
    words += ["--run", going_on.path.name] if going_on else []
    words += ["--tensorboard"] if spread.board else []  # rank 0 starts it, since it alone knows the run's folder
    if spread.deepspeed is not None:
        words += ["--deepspeed", *(["--deepspeed_config", str(spread.deepspeed.file)] if spread.deepspeed.file else [])]
    return words


def _machine_of(spread: Spread) -> Hardware:
    """The machine as the ranks will use it: named GPUs of it, several nodes like it, or processes on its CPU."""
    hardware = detect()
    for line in show.detected_lines(hardware):
        logger.info("%s", line)
    if not hardware.gpus:
        if spread.gpus:
            raise HardwareError("GPUS= names GPUs, and there are none here")
        count = spread.processes or 2
        return dataclasses.replace(hardware, cpu_ranks=count * spread.nodes.count, nodes=spread.nodes.count)
    known = {gpu.index: gpu for gpu in hardware.gpus}
    missing = [number for number in spread.gpus if number not in known]
    if missing:
        raise HardwareError(f"GPUS= names {missing[0]}, and there are {', '.join(map(str, known))}")
    chosen = [known[number] for number in spread.gpus] or list(hardware.gpus)
    if spread.processes is not None and spread.processes > len(chosen):
        raise HardwareError(f"NPROC={spread.processes} and {len(chosen)} GPUs: one process uses one GPU")
    chosen = chosen[: spread.processes]
    if len({gpu.name for gpu in chosen}) > 1:
        asked = f"GPUS={','.join(map(str, spread.gpus))} are" if spread.gpus else "there are"
        found = ", ".join(f"GPU {gpu.index} a {gpu.name}" for gpu in chosen)
        raise HardwareError(
            f"the GPUs differ, and a run takes GPUs of one kind ({asked}: {found}); name GPUs that are alike: "
            f"{hardware.alike_words(processes=spread.processes)}"
        )
    if len(hardware.alike) > 1:  # CUDA would number the fastest first, and the ranks take others than were planned for
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    machine = dataclasses.replace(hardware, gpus=tuple(chosen))
    return _spread_over(machine, len(chosen) * spread.nodes.count, spread.nodes.count)


def _write_launch(
    folder: RunFolder, loaded: LoadedConfig, planned: Sequence[Planned], *, resume: bool
) -> contextlib.AbstractContextManager[object]:
    """The run folder with the plan and what the ranks are handed, or nothing of it; returns a new one's lock."""
    mark: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, resolved = planned[0]
    if not resume:
        manifest = runs.new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        mark = runs.create(folder, loaded, manifest=manifest, plan=plan.as_json(), by=runs.LAUNCHER)
    else:
        folder.write_json("plan.json", plan.as_json())
    place = str(folder.path.absolute())
    handed = Handed.of(place, planned, resume=resume, made=not resume, today=str(first_day(folder)))
    runs.write_text(folder.path / LAUNCH_FILE, handed.text())
    if resolved is not None:
        runs.write_json(folder.path / runs.DEEPSPEED_FILE, resolved)
    return mark


def _run_ranks(made: Launch, folder: RunFolder | None) -> int:
    """Start the ranks under the agent, pass signals on, leave nothing behind; the exit code as sft-play's.

    The first signal goes to the agent, which hands it on to the ranks and waits for what they save. A second one ends
    everything at once.
    """
    require_free_port(made)
    seen: list[int] = []
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PET_")}  # torchrun's own defaults
    environment = endings.ends_with_me({**kept, **made.environment}, number=signal.SIGTERM)
    process = subprocess.Popen(made.watched, env=environment, start_new_session=True)

    def pass_on(number: int) -> None:
        seen.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        name = signal.Signals(number).name
        logger.warning("%s: the ranks save at the end of this step, then stop; a second ends them at once", name)

    def end(number: int) -> None:
        seen.append(number)
        failures.end_at_once(process.pid)

    with endings.StopSignals(pass_on, end):
        code = process.wait()
        if code < 0:  # without the agent, its ranks have been told to save and stop
            failures.end_leftovers(process.pid, patience_s=0 if len(seen) > 1 else failures.ORPHAN_S)
    return _exit_code(code, folder, stopped=bool(seen))


def _exit_code(code: int, folder: RunFolder | None, *, stopped: bool) -> int:
    """The agent's answer, which is sft-play's; of an agent that a signal ended, 1, or 130 where the user wanted it."""
    if code < 0 and stopped:
        logger.warning("ended at once; what was saved until then is kept")
        return Interrupted.exit_code
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        logger.error("the ranks' agent was killed by %s; what the ranks saved until then is kept", name)
        return 1
    if folder is not None and code in (2, 3) and _is_unused(folder):
        runs.discard(folder)
        logger.info("The run folder %s is removed again: nothing was trained", folder.path)
    return code


def _is_unused(folder: RunFolder) -> bool:
    """Whether this start made the folder, and took no step in it."""
    launched = folder.path / LAUNCH_FILE
    if folder.metrics_path.exists() or not launched.exists():
        return False
    made: bool = json.loads(launched.read_text(encoding="utf-8"))["made"]
    return made


def _say_what_all_would_do(config: RunConfig, whole: Hardware, plan: Plan) -> None:
    """Says which layout the plan would take on all GPUs, where this command uses one of several."""
    alike = whole.alike[0] if whole.gpus else ()
    if len(alike) < 2 or effective_batch(config.train, ranks=len(alike)) % len(alike):
        return
    try:
        all_of_them = plan_for(config, dataclasses.replace(whole, gpus=alike))
    except SftPlayError:
        return
    if all_of_them.fits:
        is_all = len(alike) == len(whole.gpus)
        named = "" if is_all else f" GPUS={','.join(str(gpu.index) for gpu in alike)}"
        logger.info("On %s %d GPUs the plan would take %s (make train-distributed%s); this run is %s",
                    "all" if is_all else "the alike", len(alike), all_of_them.layout, named, plan.layout)  # fmt: skip


def _remember(config: RunConfig, plan: Plan, summary: dict[str, Any]) -> None:
    """Keep what the run measured beside what was predicted without the help of earlier runs, for later plans on this
    machine."""
    if summary.get("backend") == "unsloth":
        return  # later plans are of the other backend
    peak, gpus = summary["peak_bytes"], plan.hardware.gpus
    reserved = peak["measured_reserved"] if gpus else peak["measured_rss"]
    if not reserved or not summary["tokens_per_s"]:
        return
    record.add(
        record.Measured(
            device=gpus[0].name if gpus else "cpu",
            mode=config.tuning.mode,
            layout=plan.layout,
            model=config.model.name,
            micro_batch=plan.batch.micro_batch,
            seq_len=plan.max_seq_len,
            predicted_allocated=plan.memory.allocated,
            measured_allocated=peak["measured_allocated"] or 0,
            predicted_reserved=plan.choice.raw.reserved,
            measured_reserved=reserved,
            predicted_tokens_per_s=plan.choice.raw.tokens_per_s,
            measured_tokens_per_s=summary["tokens_per_s"],
            versions=" ".join(f"{name} {version}" for name, version in sorted(runs.versions().items())),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    )


def offline_without_hub(name: str) -> None:
    """Tell the libraries, before they are imported, not to wait for a hub that does not answer."""
    if local_folder(name) is None and not hub_answers():
        logger.info("The hub cannot be reached: %s is looked for in the local cache only", name)
        os.environ["HF_HUB_OFFLINE"] = "1"


def _one_gpu(hardware: Hardware) -> Hardware:
    """The machine as one process uses it: one GPU, the others idle and said so.

    Several visible GPUs would make transformers wrap the model in DataParallel and multiply the batch.
    """
    for line in show.detected_lines(hardware):
        logger.info("%s", line)
    if len(hardware.gpus) < 2:
        return hardware
    first = hardware.gpus[0]
    idle = len(hardware.gpus) - 1
    logger.info("Using GPU %d; %d other GPU%s idle (make train-distributed uses them all)",
                first.index, idle, "s stay" if idle > 1 else " stays")  # fmt: skip
    os.environ.update(visible_only(str(first.index), os.environ))
    return hardware.first(1)


def stopped_run(folder: RunFolder) -> Stopped | None:
    """How a run was spread when it was stopped: by its manifest, or by its plan where it broke before a rank wrote.

    None where neither says.
    """
    manifest = folder.manifest()
    batch, layout, processes = manifest.get("batch"), manifest.get("layout", "single"), manifest.get("processes", 0)
    if not isinstance(batch, dict):
        batch = _planned_batch(folder)
        layout, processes = batch.get("layout"), batch.get("processes", 0)
    numbers = [batch.get(name) for name in ("micro_batch", "grad_accum", "ranks")]
    micro, accum, ranks = (number if isinstance(number, int) else 0 for number in numbers)
    if min(micro, accum, ranks) < 1:
        return None
    processes = processes if isinstance(processes, int) else 0
    updates = _planned(folder).get("precision", {}).get("updates") if layout in ROUNDS_ITSELF else None
    return Stopped(layout if layout in LAYOUT_NAMES else "single", micro, accum, ranks, processes, updates)


def _planned_batch(folder: RunFolder) -> dict[str, Any]:
    """Batch and layout of the plan in a run folder; empty where it does not say."""
    plan = _planned(folder)
    names = {
        "ranks": "data_parallel_ranks", "micro_batch": "micro_batch", "grad_accum": "grad_accum", "processes": "ranks",
        "layout": "layout",
    }  # fmt: skip
    return {name: plan[key] for name, key in names.items()} if plan.keys() >= set(names.values()) else {}


def _planned(folder: RunFolder) -> dict[str, Any]:
    """The plan in a run folder; empty where it cannot be read."""
    try:
        plan = json.loads((folder.path / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _as_stopped(config: RunConfig, stopped: Stopped | None, ranks: int) -> RunConfig:
    """The config to plan a resumed run with: its effective batch, where that divides its micro-batch, and the way that
    updates reach its weights again.

    What is free on the GPU may have changed; the rows of a step must not, and with the same split no number does. Over
    another number of ranks the effective batch is kept and the accumulation follows, whatever the config gives; a
    micro-batch that does not divide a rank's share becomes the largest that does. What the config changed meanwhile is
    named by the run folder's own check.

    Raises:
        RunFolderError: the effective batch does not split over the ranks.
    """
    if stopped is None:
        return config
    train = config.train
    if stopped.updates is not None and train.weight_updates == "auto":
        train = train.model_copy(update={"weight_updates": stopped.updates})
        config = config.model_copy(update={"train": train})
    kept, is_open = stopped.effective_batch, "auto" in (train.batch_size, train.grad_accum)
    if not train.effective_follows and train.effective_batch_size != kept:
        return config
    if not is_open and int(train.batch_size) * int(train.grad_accum) * ranks == kept:
        return config
    share, left = divmod(kept, ranks)
    if left:
        fitting = ", ".join(str(number) for number in divisors(kept) if number <= 2 * ranks)
        raise RunFolderError(
            f"the run cannot be resumed over {ranks} ranks: they do not divide its effective batch of {kept} "
            f"(it was stopped under {stopped.ranks}); numbers that do: {fitting}"
        )
    micro = stopped.micro_batch if train.batch_size == "auto" else train.batch_size
    if share % micro and train.batch_size == "auto":
        return config
    micro = max(size for size in divisors(share) if size <= micro)
    if ranks == stopped.ranks:
        logger.info("Batch: micro %d x accum %d, as the run was started", micro, share // micro)
    else:
        logger.info("Batch: micro %d x accum %d x %d ranks (stopped under %d): the effective batch of %d is kept",
                    micro, share // micro, ranks, stopped.ranks, kept)  # fmt: skip
    update = {"batch_size": micro, "grad_accum": share // micro, "effective_batch_size": kept}
    return config.model_copy(update={"train": train.model_copy(update=update)})


def _refuse_going_on(folder: RunFolder, stopped: Stopped | None, layout: LayoutName, ranks: int) -> None:
    """Raises RunFolderError, before anything loads, where a run's checkpoint cannot be resumed so."""
    because = stopped.cannot_become(layout, ranks) if stopped else None
    if because is None or stopped is None:
        return
    from sft_play.train.checkpoints import last_complete

    if last_complete(folder.checkpoints) is None:
        return  # it starts again from the first step
    raise RunFolderError(
        f"{folder.path} cannot be resumed: {because}; resume with NPROC={stopped.processes} STRATEGY={stopped.layout}, "
        f"or write out what it has learned so far: make consolidate RUN={folder.path}"
    )
