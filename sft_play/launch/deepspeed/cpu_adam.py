"""Whether DeepSpeed can build its own CPU Adam, which updates offloaded optimizer states, and whether it has."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

COMPILING = "its CPU Adam is compiled at this first start, which takes minutes; later starts find it in {folder}"


def compiling_words() -> str | None:
    """What to say where the first step waits for DeepSpeed's CPU Adam to be compiled; None where it is there.

    Sources: DeepSpeed's `op_builder/builder.py` (`load`: a built-in module, else torch's folder of extensions) and
    torch's `torch/utils/cpp_extension.py` (`_get_build_directory`).
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else caches / "torch_extensions"
    python = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}_*/" if not given else ""
    if any(folder.glob(f"{python}cpu_adam/cpu_adam.so")):
        return None
    spec = find_spec("deepspeed")
    if spec and spec.origin and any((Path(spec.origin).parent / "ops" / "adam").glob("cpu_adam_op*.so")):
        return None
    return COMPILING.format(folder=folder)


def adam_obstacles() -> tuple[str, ...]:
    """What DeepSpeed lacks to build its CPU Adam at the first start: a C++ compiler, ninja, Python's headers.

    Empty where nothing is missing; the build itself may still fail. Sources: DeepSpeed's
    `op_builder/builder.py` (`jit_load`) and torch's `torch/utils/cpp_extension.py`, which reads `CXX`.
    """
    missing = []
    compiler = (os.environ.get("CXX") or "c++").split()[0]  # CXX may hold flags, or a wrapper before the compiler
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        missing.append(f"no C++ compiler ({compiler})")
    if shutil.which("ninja") is None:
        missing.append("no ninja")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        missing.append(f"no Python headers ({headers / 'Python.h'})")
    return tuple(missing)
