"""Whether Triton could build what its first kernel needs: a C compiler, Python's headers, a list of
libraries.

On CUDA TRL's loss is a Triton kernel (trl 1.16, `kernels/chunked_logprob.py`, `_use_triton`); its
way without Triton is taken only where no Triton is installed. The first kernel of a process,
which comes in the first step, with all weights loaded, has Triton build a C module against
`Python.h` (triton 3.7.1 and 3.8: `runtime/build.py`, `backends/nvidia/driver.py`), once for a
machine and a release.
"""

import importlib.util
import logging
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import install_command

logger = logging.getLogger(__name__)

# A compiler on a cold network disk takes seconds.
COMPILE_TIMEOUT_S = 60.0
# The headers that Triton's own module includes, without those that Triton ships.
_TRIAL_SOURCE = (
    "#include <Python.h>\n#include <dlfcn.h>\n#include <stdbool.h>\n#include <stdlib.h>\nint answer"
    " = 42;\n"
)
_TRITON_MODULE = "cuda_utils"


@dataclass(frozen=True)
class Toolchain:
    """What Triton would find. `compiler` None: not installed; `compile_error`: the output of a
    failed trial, None where it passed or was not made. `has_built_module`: an earlier run on this
    machine has left what Triton builds.
    """

    has_triton: bool
    compiler: str | None
    headers: Path
    compile_error: str | None = None
    has_built_module: bool = False
    python_version: str = platform.python_version()


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """Find this machine's toolchain by a trial: a one-line module is compiled as Triton would
    compile its own."""
    compiler = environment.get("CC") or shutil.which("gcc") or shutil.which("clang")
    # as Triton does it: Debian's posix_local has no Python.h (triton 3.7.1, runtime/build.py)
    scheme = sysconfig.get_default_scheme()
    headers = Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )
    home = Path(environment.get("TRITON_HOME") or "~").expanduser()
    cache = Path(environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Toolchain(
        has_triton=importlib.util.find_spec("triton") is not None,
        compiler=compiler,
        headers=headers,
        compile_error=_compile_trial(compiler, headers) if compiler else None,
        has_built_module=next(cache.glob(f"*/{_TRITON_MODULE}{suffix}"), None) is not None,
    )


def toolchain_obstacle(toolchain: Toolchain) -> tuple[str, str] | None:
    """What is missing, and what to do; None where Triton can build its module, has built it, or is
    not installed."""
    can_compile = toolchain.compiler is not None and toolchain.compile_error is None
    if can_compile or toolchain.has_built_module or not toolchain.has_triton:
        return None
    headers, compile_error = toolchain.headers / "Python.h", toolchain.compile_error or ""
    missing = []
    if toolchain.compiler is None:
        missing.append("no C compiler (neither CC, gcc nor clang)")
    elif "Python.h" not in compile_error:
        missing.append(
            f"the C compiler {one_line(toolchain.compiler)} fails:"
            f" {one_line(compile_error, limit=200)}"
        )
    if "Python.h" in compile_error or not (toolchain.compiler or headers.exists()):
        missing.append(f"no Python headers ({headers})")
    version = ".".join(toolchain.python_version.split(".")[:2])
    return (
        " and ".join(missing),
        (
            "install a C compiler (gcc or clang; CC= names one) and the headers of Python"
            f" {version}: on Debian and Ubuntu apt-get install -y gcc g++ libc6-dev"
            f" python{version}-dev; without root from conda"
        ),
    )


def inductor_obstacle(hardware: Hardware, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What inductor lacks to compile blocks, and what to do; None where it can. On a GPU it writes
    Triton kernels, whose starts the C compiler builds; on a CPU it writes C++ (torch 2.13,
    `_inductor/config.py`: `cpp.cxx`).
    """
    unsupported_gpus = [gpu for gpu in hardware.gpus if gpu.capability and gpu.capability < (7, 0)]
    # torch 2.13, _inductor/scheduler.py: GPUTooOldForTriton, in the first step
    if unsupported_gpus:
        capability = ".".join(map(str, unsupported_gpus[0].capability or ()))
        return (
            (
                f"it compiles for compute capability 7.0 and newer, and {unsupported_gpus[0].name}"
                f" has {capability}"
            ),
            "use another GPU",
        )
    # what an earlier run has left is of other kernels
    toolchain = replace(find_toolchain(environment), has_built_module=False)
    if hardware.gpus and not toolchain.has_triton:
        return "Triton is not installed", install_command("triton")
    if not hardware.gpus:
        default = "clang++" if platform.system() == "Darwin" else "g++"
        compiler = shutil.which(environment.get("CXX") or default)
        if compiler is None:
            return f"no C++ compiler (CXX, or {default})", f"install {default}"
        toolchain = replace(
            toolchain,
            has_triton=True,
            compiler=compiler,
            compile_error=_compile_trial(compiler, toolchain.headers),
        )
    return toolchain_obstacle(toolchain)


def require_inductor(hardware: Hardware, environment: Mapping[str, str]) -> None:
    """Raises HardwareError, before anything loads, where inductor cannot compile blocks."""
    if problem := inductor_obstacle(hardware, environment):
        raise HardwareError(
            f"train.compile: inductor cannot compile here: {'; '.join(problem)}, or"
            " train.compile=false"
        )


def require_compiler(hardware: Hardware, environment: Mapping[str, str]) -> None:
    """Raises HardwareError, before anything loads, where GPUs would run TRL's loss and Triton
    cannot build it."""
    toolchain = find_toolchain(environment)
    if not toolchain.has_triton:
        # TRL's path in torch operations holds 7.3 tiles of 4,096 tokens x 32,768 words in fp32 at
        # once (counted, trl 1.16).
        logger.warning(
            "Triton is not installed, although torch's GPU builds bring it: the loss runs without"
            " its kernel, slower and with up to 3.6 GiB beyond the plan; %s",
            install_command("triton"),
        )
    if problem := toolchain_obstacle(toolchain):
        raise HardwareError(
            "Triton builds the loss kernel at the first step, which would fail here:"
            f" {'; '.join(problem)}"
        )


def _compile_trial(compiler: str, headers: Path) -> str | None:
    with tempfile.TemporaryDirectory(prefix="sft-play-cc-") as folder:
        source = Path(folder) / "trial.c"
        source.write_text(_TRIAL_SOURCE, encoding="utf-8")
        flags = [
            "-O3",
            "-shared",
            "-fPIC",
            "-Wno-psabi",
            "-o",
            str(source.with_suffix(".so")),
            f"-I{headers}",
        ]
        try:
            completed = subprocess.run(
                [compiler, str(source), *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMPILE_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    if completed.returncode == 0:
        return None
    lines = completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"]
    # the first error; what follows are its consequences
    return next((line for line in lines if "error" in line), lines[-1])
