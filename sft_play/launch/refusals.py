"""What a run is refused for before a library is loaded, in one list: commands that start runs raise
the first of it, `plan` and `check` say all of it."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.sources.examples import check_first_rows
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import DataError, HardwareError, RunFolderError, SftPlayError, stage_context
from sft_play.log import one_line
from sft_play.machine.compiler import require_compiler, require_inductor
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import torch_cuda_version
from sft_play.machine.visible_gpus import (
    CPU_HINT,
    explain_unusable_torch,
    find_unusable_accelerator,
)
from sft_play.planner.backend import check_trackers
from sft_play.planner.kernels import require_attention_package
from sft_play.planner.plan import MORE_SPACE_REMEDY, Plan, planned_disk_usage
from sft_play.runs.files import format_free_space, free_disk_bytes
from sft_play.runs.folder import RunFolder
from sft_play.runs.lookup import (
    check_run_name,
    is_resume,
    new_run_folder,
    output_dir,
    require_writable_output_dir,
)
from sft_play.text import format_size
from sft_play.trace.confirm import load_run_model_shape

# Parameters above which a model is trained on a CPU only if that is asked for: a step takes
# minutes.
MAX_CPU_PARAMS = 1_000_000_000


def refusals(
    loaded: LoadedConfig,
    hardware: Hardware,
    *,
    makes_folder: bool = True,
    needs_rows: bool = True,
    plans: Sequence[Plan] | None = None,
) -> Iterator[SftPlayError]:
    """Yield every error for which a run would be refused on a machine, in the order in which a
    start would meet them. The disk and the packages of a machine that is only named are not known.

    Args:
        makes_folder: False where the run's folder exists, or another node makes it.
        needs_rows: False for a plan, after which the data may come; a file that is there has to be
            readable.
        plans: the plan of the run, or of each stage, as far as there are any; None before there
            are.
    """
    checks: list[Callable[[], object]] = [
        partial(require_capable_machine, stage_run.config, hardware) for stage_run in loaded.runs
    ]
    if makes_folder:
        checks.append(partial(_require_writable_folder, loaded, hardware))
    checks += [
        partial(_require_readable_rows, stage_run, needs_rows=needs_rows)
        for stage_run in loaded.runs
    ]
    if plans is not None:
        resumed_folder, output = None, loaded.config.output
        with contextlib.suppress(SftPlayError):  # a check above says it
            folder = new_run_folder(output, config_path=loaded.path)
            if is_resume(folder, output):
                resumed_folder = folder
        checks.append(partial(require_gpus_and_disk, loaded, hardware, plans, resumed_folder))
    for check in checks:
        try:
            check()
        except SftPlayError as error:
            yield error


def require_capable_machine(config: RunConfig, hardware: Hardware) -> None:
    """Raise an error where this machine cannot train a run: HardwareError, or for a package that is
    not installed."""
    if hardware.named:
        return
    require_usable_hardware(
        config, hardware, os.environ, count_params=lambda: load_run_model_shape(config).params
    )
    if config.tuning.backend == "bnb":  # Unsloth's processes have packages of their own
        check_trackers(config)
        require_attention_package(config.model.attn_implementation)


def require_usable_hardware(
    config: RunConfig,
    hardware: Hardware,
    environment: Mapping[str, str],
    *,
    count_params: Callable[[], int],
) -> None:
    """Check, before anything loads, that a run here is what its user expects and can take a step;
    `count_params`: the model's parameters, asked for on a CPU only. Raises HardwareError where an
    accelerator would not be used, the model is too large for a CPU, Triton or inductor cannot build
    what is needed, or flash-attn 2 has no kernels.
    """
    if config.train.compile is True:
        require_inductor(hardware, environment)
    if config.model.attn_implementation == "flash_attention_2":
        old_gpus = [gpu for gpu in hardware.gpus if gpu.capability and gpu.capability < (8, 0)]
        obstacle = ""
        if not hardware.gpus:
            obstacle = "flash_attention_2 has kernels for GPUs, and this run uses the CPU"
        for gpu in old_gpus:
            capability = ".".join(map(str, gpu.capability or ()))
            obstacle = (
                f"flash_attention_2 needs GPUs from Ampere on (8.0), and {gpu.name} has"
                f" {capability}"
            )
        if obstacle:
            raise HardwareError(f"model.attn_implementation: {obstacle}; use auto")
    if hardware.gpus:
        return require_compiler(hardware, environment)
    if config.train.device == "cpu":
        return None
    if accelerator := find_unusable_accelerator(environment):
        raise HardwareError(accelerator)
    param_count = count_params()  # asked last: for a model of the hub it fetches the config
    if param_count > MAX_CPU_PARAMS:
        raise HardwareError(
            f"no GPU was detected here, and {one_line(config.model.name)} has"
            f" {param_count / 1e9:.1f} billion parameters: make gpu-info shows what this machine"
            f" has; or {CPU_HINT}"
        )
    return None


def _require_writable_folder(loaded: LoadedConfig, hardware: Hardware) -> None:
    output = loaded.config.output
    if output.name is not None:
        check_run_name(output.name, key="output.name")
    if not hardware.named:
        require_writable_output_dir(new_run_folder(output, config_path=loaded.path))


def _require_readable_rows(stage_run: LoadedConfig, *, needs_rows: bool) -> None:
    with stage_context(stage_run.stage_name):
        try:
            paths = find_data_paths(stage_run.config.data)
        except DataError:
            if needs_rows:
                raise
            return
        check_first_rows(stage_run.config.data, paths, task_mode=stage_run.config.task_mode)


def require_gpus_and_disk(
    loaded: LoadedConfig, hardware: Hardware, plans: Sequence[Plan], folder: RunFolder | None = None
) -> None:
    """Raise an error where a run cannot begin as it is planned: HardwareError, where torch cannot
    use the GPUs; RunFolderError, where the disk certainly cannot hold the checkpoints that exist at
    once, beside those that the `folder` of a resumed run has."""
    if hardware.named:
        return
    if hardware.gpus and torch_cuda_version() is None:  # each rank would find it, after its imports
        raise HardwareError(
            explain_unusable_torch(hardware.gpus[0].name, "it is built without CUDA")
        )
    folder = folder or RunFolder(output_dir(loaded.config.output))
    for stage_run, plan in zip(loaded.runs, plans, strict=False):
        stage_folder = folder
        if stage_run.stage_name is not None:
            stage_folder = folder.stage_folder(stage_run.stage_name)
        disk = planned_disk_usage(stage_run.config, load_run_model_shape(stage_run.config), plan)
        free_disk = free_disk_bytes(folder.path)
        needed_bytes = disk.min_bytes(
            existing_checkpoints=len(list(stage_folder.checkpoints_path.glob("checkpoint-*")))
        )
        if free_disk is not None and free_disk < needed_bytes:
            raise RunFolderError(
                f"{folder.path}: there is no room for what the run writes"
                f" ({disk.max_checkpoints or 'all its'} checkpoints at once, and the final"
                f" weights): at least {needed_bytes:,} bytes ({format_size(needed_bytes)}) are"
                f" needed, and {format_free_space(folder.path)}; {MORE_SPACE_REMEDY}"
            )
