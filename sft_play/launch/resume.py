"""A run that was stopped, or died, and goes on: what it keeps of how it was spread over ranks, and how often this
command starts it again.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import RunFolderError
from sft_play.launch.request import LaunchOptions, LaunchRequest
from sft_play.launch.run_hardware import restrict_to_device
from sft_play.log import start_log_file
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.planner.batching import BatchPlan, divisors
from sft_play.planner.layout import (
    DEEPSPEED_LAYOUTS,
    LAYOUT_NAMES,
    LayoutName,
    PreviousRun,
    format_mesh,
    mesh_layout,
    parse_mesh,
)
from sft_play.planner.precision import UNSHARDED_LAYOUTS, WeightUpdates
from sft_play.runs.files import read_json
from sft_play.runs.folder import (
    CRASH_ENTRY,
    RESTARTS_ENTRY,
    CodeTrust,
    RunFolder,
    load_resumed_config,
    pop_oom_note,
    read_oom_events,
)
from sft_play.runs.lookup import find_resumable

logger = logging.getLogger(__name__)


def resume_request(
    loaded: LoadedConfig, options: LaunchOptions, *, run_name: str | None, is_trusted: CodeTrust
) -> LaunchRequest:
    """Build the request that resumes a stopped run, the one named `run_name` or the newest, over as many ranks as
    before unless another number is given. Raises RunFolderError where there is none, or its settings allow code that
    `is_trusted` does not."""
    folder = find_resumable(loaded.config.output, config_path=loaded.path, name=run_name)
    new_config, previous = loaded, read_previous_run(folder)
    loaded = load_resumed_config(new_config, folder, is_trusted=is_trusted)
    if not (options.processes_per_node or options.gpus or options.nodes.count > 1):
        gpu_count = len(restrict_to_device(loaded.config, detect_hardware()).gpus)
        rank_count = previous.processes if previous else 1
        options = dataclasses.replace(
            options, processes_per_node=min(rank_count, gpu_count) if gpu_count else rank_count
        )
    if not _keeps_mesh(loaded.config, options, previous):
        mesh_text = format_mesh(loaded.config.model.mesh_shape)
        logger.info("Mesh: model.mesh_shape=%s is of other processes, or another layout: left out", mesh_text)
        loaded = load_resumed_config(new_config, folder, is_trusted=is_trusted, keeps_mesh=False)
    # a single rank's too
    has_engine = options.deepspeed or (previous is not None and previous.layout in DEEPSPEED_LAYOUTS)
    is_one_rank = options.processes_per_node == 1 and options.nodes.count == 1 and not has_engine
    launches_ranks = not (is_one_rank and options.strategy in (None, "single"))
    return LaunchRequest(loaded, options, launches_ranks=launches_ranks, should_resume=True, folder=folder)


def _keeps_mesh(config: RunConfig, options: LaunchOptions, previous: PreviousRun | None) -> bool:
    """Whether a resumed run keeps its mesh: over as many processes, and in the layout that the mesh is."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is None:
        return True
    layout = options.strategy or (previous.layout if previous else None)
    if layout not in (None, mesh_layout(mesh).name):
        return False
    processes_per_node = options.processes_per_node or len(options.gpus)
    return not processes_per_node or processes_per_node * options.nodes.count == mesh.ranks


def read_previous_run(folder: RunFolder) -> PreviousRun | None:
    """Read a stopped run's layout, batch and number of ranks from its manifest, or from its plan if it failed before a
    rank wrote them; None if neither has them."""
    manifest, plan = folder.read_manifest(), read_json(folder.path / "plan.json")
    batch, layout, processes = manifest.get("batch"), manifest.get("layout", "single"), manifest.get("processes", 0)
    if not isinstance(batch, dict):
        batch = {**plan, "ranks": plan.get("data_parallel_ranks")}
        layout, processes = plan.get("layout"), plan.get("ranks")
    batch_values = [batch.get(name) for name in ("micro_batch", "grad_accum", "ranks")]
    micro_batch, grad_accum, ranks = (number if isinstance(number, int) else 0 for number in batch_values)
    if min(micro_batch, grad_accum, ranks) < 1:
        return None
    processes = processes if isinstance(processes, int) else 0
    # Elsewhere updates follow from the layout: FSDP and DeepSpeed keep copies in float32.
    updates = (plan.get("precision") or {}).get("updates") if layout in UNSHARDED_LAYOUTS else None
    known_layout: LayoutName = layout if layout in LAYOUT_NAMES else "single"
    oom_micro_batches = [event.micro_batch for event in read_oom_events(folder) if event.again in ("step", "run")]
    previous_batch = BatchPlan(micro_batch, grad_accum, ranks)
    return PreviousRun(
        known_layout, previous_batch, processes, updates, folder.has_trained, min(oom_micro_batches, default=None)
    )


@dataclass(frozen=True)
class ResumeConstraints:
    """What a resumed run keeps from its first start; None leaves it to the config and the plan."""

    batch: BatchPlan | None = None
    updates: WeightUpdates | None = None


def resume_constraints(config: RunConfig, previous: PreviousRun | None, ranks: int) -> ResumeConstraints:
    """What a resumed run keeps over `ranks` data-parallel ranks: its batch, and how updates reach its weights. Free GPU
    memory may have changed; the rows of a step must not. Over another number of ranks the accumulation follows, and a
    micro-batch that does not divide a rank's share, or ran out of memory, becomes the largest that does. Raises
    RunFolderError where the effective batch does not split over the ranks."""
    if previous is None or not (previous.has_trained or previous.oom_micro_batch):
        return ResumeConstraints()
    train = config.train
    requested_micro_batch = None if train.batch_size == "auto" else train.batch_size
    if requested_micro_batch and previous.oom_micro_batch and requested_micro_batch >= previous.oom_micro_batch:
        requested_micro_batch = None
    updates = previous.updates if train.weight_updates == "auto" else None
    effective_batch, is_batch_open = previous.batch.effective_batch, "auto" in (train.batch_size, train.grad_accum)
    # Another effective batch is refused by check_same_run, and a split that is given in full needs none from here.
    is_other_batch = not train.derives_effective_batch and train.effective_batch_size != effective_batch
    is_fully_requested = (
        requested_micro_batch
        and not is_batch_open
        and requested_micro_batch * int(train.grad_accum) * ranks == effective_batch
    )
    if is_other_batch or is_fully_requested:
        return ResumeConstraints(updates=updates)
    rank_share, remainder = divmod(effective_batch, ranks)
    if remainder:
        possible_ranks = ", ".join(str(number) for number in divisors(effective_batch) if number <= 2 * ranks)
        raise RunFolderError(
            f"the run cannot be resumed over {ranks} ranks: they do not divide its effective batch of "
            f"{effective_batch} (it was stopped with {previous.batch.ranks}); numbers that do: {possible_ranks}"
        )
    micro_batch = requested_micro_batch or previous.batch.micro_batch
    if rank_share % micro_batch and train.batch_size == "auto" and not previous.oom_micro_batch:
        return ResumeConstraints(updates=updates)
    micro_batch = max(size for size in divisors(rank_share) if size <= micro_batch)
    return ResumeConstraints(BatchPlan(micro_batch, rank_share // micro_batch, ranks), updates)


def require_resumable_layout(folder: RunFolder, previous: PreviousRun | None, layout: LayoutName) -> None:
    """Raises RunFolderError, before anything loads, where a run's checkpoint cannot be resumed in this layout."""
    reason = previous.resume_obstacle(layout) if previous else None
    if reason is None or previous is None:
        return
    from sft_play.training.checkpoints.checkpoints import last_complete_checkpoint

    if last_complete_checkpoint(folder.checkpoints_path) is None:
        return  # without a checkpoint it starts again from the first step
    raise RunFolderError(
        f"{folder.path} cannot be resumed: {reason}; resume with STRATEGY={previous.layout}, "
        f"or write out what it has learned so far: make consolidate RUN={folder.shell_path}"
    )


def count_data_parallel_ranks(config: RunConfig, previous: PreviousRun | None, hardware: Hardware) -> int:
    """Data-parallel ranks of a resumed run: those of its mesh, those that it had over as many processes, or all."""
    mesh = parse_mesh(config.model.mesh_shape)
    if mesh is not None:
        return mesh.data_parallel_ranks
    if previous is not None and previous.processes == hardware.ranks:
        return previous.batch.ranks
    return hardware.ranks


# --- started again by the command that launched it --------------------------------------------------------------------


@dataclass
class RestartBudget:
    """The restarts of one command: at most `limit` after a process died."""

    limit: int
    used: int = 0

    def should_restart(self, folder: RunFolder, loaded: LoadedConfig) -> bool:
        """Whether a run that has failed is to be started again; why is logged, and recorded in its manifest."""
        if event := pop_oom_note(folder):
            logger.warning("Starting again with micro-batch %d", event.now)
            return True
        crash = pop_crash_record(folder) if self.limit else None
        if crash is None:
            return False
        with _log_to_run(folder):
            if self.used == self.limit:
                logger.error("MAX_RESTARTS=%d is used up: the run ends", self.limit)
                return False
            self.used += 1
            step, resume_text = _resume_point(folder, loaded)
            logger.warning("Restart %d of %d: %s; the run goes on from %s", self.used, self.limit, crash, resume_text)
        entry = {"after": crash, "from_step": step, "number": self.used, "of": self.limit}
        folder.update_manifest(**{RESTARTS_ENTRY: [*folder.read_manifest().get(RESTARTS_ENTRY, []), entry]})
        return True


def pop_crash_record(folder: RunFolder) -> str | None:
    """Read how a process of the run died, and remove it from the manifest; None if none died."""
    with contextlib.suppress(RunFolderError):  # an unused folder was removed again
        crash = folder.read_manifest().get(CRASH_ENTRY)
        if isinstance(crash, str):
            folder.update_manifest(**{CRASH_ENTRY: None})
            return crash
    return None


def _resume_point(folder: RunFolder, loaded: LoadedConfig) -> tuple[int, str]:
    from sft_play.training.checkpoints.checkpoints import checkpoint_step, last_complete_checkpoint

    begun_stages = [
        stage_folder
        for stage_config in loaded.config.curriculum
        if (stage_folder := folder.stage_folder(stage_config.name)).has_begun
    ]
    last_folder = begun_stages[-1] if begun_stages else folder
    checkpoint = last_complete_checkpoint(last_folder.checkpoints_path)
    stage_suffix = f" of stage {last_folder.stage_name}" if last_folder.stage_name else ""
    if checkpoint is None:
        return 0, f"the beginning{stage_suffix}: there is no checkpoint"
    return checkpoint_step(checkpoint), f"the checkpoint of step {checkpoint_step(checkpoint)}{stage_suffix}"


@contextlib.contextmanager
def _log_to_run(folder: RunFolder) -> Iterator[None]:
    handler = start_log_file(folder.log_path)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
