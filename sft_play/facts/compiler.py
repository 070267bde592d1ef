"""Whether Triton could build what its first kernel needs: a C compiler, Python's headers, a list of libraries.

On CUDA TRL's loss is a Triton kernel (trl 1.16, `kernels/chunked_logprob.py`, `_use_triton`); its way without
Triton is taken only where no Triton is installed. The first kernel of a process, which comes in the first step, with
all weights loaded, has Triton build a C module against `Python.h` (triton 3.7.1 and 3.8: `runtime/build.py`,
`backends/nvidia/driver.py`), once for a machine and a release.
"""

from __future__ import annotations

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
from sft_play.facts.hardware import Hardware
from sft_play.log import one_line

logger = logging.getLogger(__name__)

# A compiler on a cold network disk takes seconds.
TRIAL_S = 60.0
# TRL's path in torch operations holds 7.3 tiles of 4,096 tokens x 32,768 words in fp32 at once (counted, trl 1.16).
WITHOUT_TRITON = "the loss runs without its kernel, slower and with up to 3.6 GiB beyond the plan; pip install triton"
# The headers that Triton's own module includes, without those that Triton ships.
_MODULE = "#include <Python.h>\n#include <dlfcn.h>\n#include <stdbool.h>\n#include <stdlib.h>\nint answer = 42;\n"
_BUILT = "cuda_utils"


@dataclass(frozen=True)
class Toolchain:
    """What Triton would find. `compiler` None: not installed; `failed`: the output of a failed trial, None where it
    passed or was not made. `built`: an earlier run on this machine has left what Triton builds."""

    triton: bool
    compiler: str | None
    headers: Path
    failed: str | None = None
    built: bool = False
    python: str = platform.python_version()


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """This machine's, from a trial: a one-line module is compiled as Triton would compile its own."""
    compiler = environment.get("CC") or shutil.which("gcc") or shutil.which("clang")
    # as Triton does it: Debian's posix_local has no Python.h (triton 3.7.1, runtime/build.py)
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    home = Path(environment.get("TRITON_HOME") or "~").expanduser()
    cache = Path(environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return Toolchain(
        triton=importlib.util.find_spec("triton") is not None,
        compiler=compiler,
        headers=headers,
        failed=_trial(compiler, headers) if compiler else None,
        built=next(cache.glob(f"*/{_BUILT}{suffix}"), None) is not None,
    )


def obstacle(tools: Toolchain) -> tuple[str, str] | None:
    """What is missing, and what to do; None where Triton can build its module, has built it, or is not installed."""
    if not tools.triton or tools.built or (tools.compiler is not None and tools.failed is None):
        return None
    headers, failed = tools.headers / "Python.h", tools.failed or ""
    missing = [] if tools.compiler else ["no C compiler (neither CC, gcc nor clang)"]
    if "Python.h" in failed or not (tools.compiler or headers.exists()):
        missing.append(f"no Python headers ({headers})")
    elif tools.compiler:
        missing.append(f"the C compiler {one_line(tools.compiler)} fails: {one_line(failed, limit=200)}")
    version = ".".join(tools.python.split(".")[:2])
    return " and ".join(missing), (
        f"install a C compiler (gcc or clang; CC= names one) and the headers of Python {version}: on Debian and Ubuntu "
        f"apt-get install -y gcc g++ libc6-dev python{version}-dev; without root from conda"
    )


def block_obstacle(hardware: Hardware, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What inductor lacks to compile blocks, and what to do; None where it can. On a GPU it writes Triton kernels,
    whose starts the C compiler builds; on a CPU it writes C++ (torch 2.13, `_inductor/config.py`: `cpp.cxx`)."""
    old = [gpu for gpu in hardware.gpus if gpu.capability and gpu.capability < (7, 0)]
    if old:  # torch 2.13, _inductor/scheduler.py: GPUTooOldForTriton, in the first step
        found = ".".join(map(str, old[0].capability or ()))
        return f"it compiles for compute capability 7.0 and newer, and {old[0].name} has {found}", "use another GPU"
    tools = replace(find_toolchain(environment), built=False)  # what an earlier run has left is of other kernels
    if hardware.gpus and not tools.triton:
        return "Triton is not installed", "pip install triton"
    if not hardware.gpus:
        default = "clang++" if platform.system() == "Darwin" else "g++"
        compiler = shutil.which(environment.get("CXX") or default)
        if compiler is None:
            return f"no C++ compiler (CXX, or {default})", f"install {default}"
        tools = replace(tools, triton=True, compiler=compiler, failed=_trial(compiler, tools.headers))
    return obstacle(tools)


def require_for_blocks(hardware: Hardware, environment: Mapping[str, str]) -> None:
    """Raises HardwareError, before anything loads, where inductor cannot compile blocks."""
    if problem := block_obstacle(hardware, environment):
        said = "; ".join(problem)
        raise HardwareError(f"train.compile: inductor cannot compile here: {said}, or train.compile=false")


def require_compiler(hardware: Hardware, environment: Mapping[str, str]) -> None:
    """Raises HardwareError, before anything loads, where GPUs would run TRL's loss and Triton cannot build it."""
    if hardware.device != "cuda":
        return
    tools = find_toolchain(environment)
    if not tools.triton:
        logger.warning("Triton is not installed, although torch's GPU builds bring it: %s", WITHOUT_TRITON)
    if problem := obstacle(tools):
        raise HardwareError(
            f"Triton builds the loss kernel at the first step, which would fail here: {'; '.join(problem)}"
        )


def _trial(compiler: str, headers: Path) -> str | None:
    with tempfile.TemporaryDirectory(prefix="sft-play-cc-") as folder:
        source = Path(folder) / "trial.c"
        source.write_text(_MODULE, encoding="utf-8")
        flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(source.with_suffix(".so")), f"-I{headers}"]
        try:
            done = subprocess.run(
                [compiler, str(source), *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()  # the first error; what follows are its consequences
    return next((line for line in lines if "error" in line), lines[-1] if lines else f"exit code {done.returncode}")
