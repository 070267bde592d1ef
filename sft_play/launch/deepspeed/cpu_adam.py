"""Whether DeepSpeed can build its own CPU Adam, which updates offloaded optimizer states."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


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
