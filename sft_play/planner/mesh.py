"""`model.mesh_shape`: a user's device mesh, read as the layout that it describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.errors import ConfigError
from sft_play.log import one_line

# The axes of a mesh; order and case are free, and an axis of size 1 changes nothing.
AXES = {"dp": "data parallel copies", "fsdp": "FSDP2 shards", "tp": "tensor parallel parts", "cp": "parts of a row"}
# Names of sizes given without any.
UNNAMED = ("fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """How many processes each axis has."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Processes, one per GPU."""
        return self.dp * self.fsdp * self.tp * self.cp

    @property
    def batches(self) -> int:
        """Data-parallel ranks: processes that see their own rows."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        # axes of one process are left out, as a user would write it
        used = {name: size for name in AXES if (size := getattr(self, name)) > 1} or {"fsdp": 1}
        return f"[[{', '.join(map(str, used.values()))}], [{', '.join(used)}]]"


def mesh_of(given: Any) -> Mesh | None:
    """The mesh that `model.mesh_shape` gives; None where it is null. Raises ConfigError where no engine builds it."""
    if given is None:
        return None
    sizes, names = _split(given)
    if not sizes or min(sizes) < 1 or len(names) != len(sizes):
        raise _refusal(given, f"{len(sizes)} sizes, which must be whole numbers from 1, and {len(names)} names")
    if set(names) - set(AXES) or len(set(names)) < len(names):
        raise _refusal(given, "unknown axis, or one that is named twice")
    mesh = Mesh(**dict(zip(names, sizes, strict=True)))
    if mesh.tp > 1 and mesh.cp > 1:
        raise _refusal(given, "tp and cp cannot be combined", f"use {Mesh(mesh.dp, mesh.fsdp, 1, mesh.cp * mesh.tp)}")
    if mesh.dp > 1 and mesh.fsdp == 1 and mesh.tp * mesh.cp > 1:
        instead = Mesh(1, mesh.dp, mesh.tp, mesh.cp)
        raise _refusal(given, "DDP cannot be combined with tp or cp", f"use {instead}: the same rows, less memory")
    return mesh


def _split(given: Any) -> tuple[list[int], list[str]]:
    if isinstance(given, int):
        given = (given,)
    parts = list(given)
    # [[2, 4], [fsdp, tp]]; a list of two numbers has no names
    if len(parts) == 2 and all(isinstance(part, Sequence) for part in parts):
        return list(parts[0]), [str(name).strip().lower() for name in parts[1]]
    if len(parts) > len(UNNAMED):
        raise _refusal(given, f"{len(parts)} sizes without names")
    return parts, list(UNNAMED[: len(parts)])


def _refusal(given: Any, problem: str, remedy: str = "") -> ConfigError:
    known = ", ".join(f"{name} ({meaning})" for name, meaning in AXES.items())
    remedy = remedy or f"use sizes and names, such as [[2, 4], [fsdp, tp]], of {known}; null lets the plan choose"
    return ConfigError(f"model.mesh_shape={mesh_words(given)}: {problem}; {remedy}")


def mesh_words(given: Any) -> str:
    """A mesh as written in YAML."""
    if isinstance(given, list | tuple):
        return f"[{', '.join(mesh_words(part) for part in given)}]"
    return one_line(str(given))
