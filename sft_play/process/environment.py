"""Environment variables: what an independent process must not inherit, and the settings of
OpenMP's threads and of PyTorch's CUDA allocator."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from sft_play.files import cache_dir
from sft_play.log import one_line
from sft_play.variables import VARIABLES

MAKE_COMMAND_VARIABLES = tuple(
    name for name in VARIABLES if name not in ("PYTHON", "VENV", "UNSLOTH_VENV")
)
# Variables that a launcher sets for its ranks; OMP_NUM_THREADS too, but without a launcher that is
# the user's.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT", "LOCAL_SIZE", "CROSS_SIZE", "NPROC_PER_NODE", "SLURM_PROCID", "SFT_PLAY_RUN",
    "SFT_PLAY_RESUMED", "SFT_PLAY_AGENT", "SFT_PLAY_BEGAN", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
# Threads of each CPU rank of a run that is repeated: those that it had.
THREADS_VARIABLE = "SFT_PLAY_THREADS"


def independent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run started beside this one: this package first, this run's rank
    variables left out."""
    excluded = {*MAKE_COMMAND_VARIABLES, *LAUNCHER_VARIABLES}
    if "WORLD_SIZE" in environment:
        excluded.add("OMP_NUM_THREADS")
    # the prefixes begin other launchers' names for the same
    variables = {
        name: value
        for name, value in environment.items()
        if name not in excluded
        and not name.startswith(("PET_", "OMPI_COMM_", "PMI_", "MPI_LOCAL", "MV2_COMM_"))
    }
    variables["ACCELERATE_CONFIG"] = "none"  # accelerate's own file may name several machines
    paths = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def set_deepspeed_to_cpu() -> None:
    """Tell DeepSpeed to use the CPU; call it before DeepSpeed is imported. Without this it looks
    for a GPU and warns that it found none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


# On a quiet machine OpenMP's threads (GNU's, in torch's wheels) spin for a fraction of a
# millisecond, then sleep: as fast as the default's milliseconds, and cheaper once other work runs
# beside it (benchmarks/README.md, Threads).
SHORT_SPIN = {"GOMP_SPINCOUNT": "3000"}
# On a busy machine they sleep at once: spinning takes the cores from the threads that they wait
# for. How they wait changes no number, while fewer threads would round differently.
NO_SPIN = {"OMP_WAIT_POLICY": "PASSIVE"}
# From this many cores in use by others, the machine counts as busy.
_BUSY_CORES = 0.5


def busy_cores(*, seconds: float = 0.1) -> float:
    """Measure how many cores the machine keeps busy while this process sleeps for `seconds`."""
    share: float = psutil.cpu_percent(seconds) / 100
    return share * (psutil.cpu_count() or 1)


def openmp_wait_variables(
    environment: Mapping[str, str], *, measure_busy_cores: Callable[[], float] = busy_cores
) -> dict[str, str]:
    """Variables that say how OpenMP's threads wait, to set before torch is loaded. Empty where the
    environment says it already."""
    if {*SHORT_SPIN, *NO_SPIN, "KMP_BLOCKTIME"} & set(environment):
        return {}
    return dict(NO_SPIN if measure_busy_cores() > _BUSY_CORES else SHORT_SPIN)


def set_library_variables() -> None:
    """Set what torch and OpenMP read when they are loaded, where the environment says nothing of
    it: how threads wait, the allocator, what is compiled. Ranks inherit it."""
    for variables in (openmp_wait_variables, allocator_variables, compile_cache_variables):
        os.environ.update(variables(os.environ))


# Where inductor keeps what it has compiled.
COMPILE_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before torch is loaded: what is compiled is kept in this project's cache, so
    that ranks share it and a restart takes it; torch's own place is in /tmp. Empty where the
    environment names a place."""
    if environment.get(COMPILE_CACHE_VARIABLE):
        return {}
    return {COMPILE_CACHE_VARIABLE: str((cache_dir(environment) / "inductor").absolute())}


# The variables from which PyTorch's caching allocator reads its setting; the older names still
# count.
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
OLDER_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Segments that grow by pages instead of fixed-size ones: steps of changing lengths leave less
# fragmentation.
EXPANDABLE_SEGMENTS = "expandable_segments:True"


def allocator_variables(
    environment: Mapping[str, str], *, root: Path = Path("/")
) -> dict[str, str]:
    """Variables to set before torch starts CUDA: expandable segments, on Linux with NVIDIA's
    driver. Empty where the environment says anything about the allocator, and where they fail: on
    Windows, macOS, AMD cards, and under WSL (pytorch/pytorch#192330). `root`: the machine's
    files."""
    if any(name in environment for name in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES)):
        return {}
    # by the driver's devices: asking CUDA would load it before the variable is set
    devices = root / "dev"
    has_nvidia = (devices / "nvidiactl").exists() or any(devices.glob("nvidia[0-9]*"))
    # dxg: the GPU as WSL has it
    if sys.platform != "linux" or (devices / "dxg").exists() or not has_nvidia:
        return {}
    return {ALLOCATOR_VARIABLE: EXPANDABLE_SEGMENTS}


def format_allocator_setting(environment: Mapping[str, str]) -> str:
    """Format a line on this process's allocator setting; it says where the plan's bound on memory
    does not cover that setting."""
    for name in (ALLOCATOR_VARIABLE, *OLDER_ALLOCATOR_VARIABLES):
        setting = environment.get(name, "").strip()
        if setting == EXPANDABLE_SEGMENTS:
            return f"Allocator: {name}={setting}"
        if setting:
            return (
                f"Allocator: {name}={one_line(setting)}; the plan's bound covers"
                " expandable_segments alone"
            )
    return "Allocator: PyTorch's default, segments of fixed size"
