"""`model.mesh_shape`: a user's device mesh, read as the layout that it describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.errors import ConfigError
from sft_play.log import one_line

# The axes of a mesh; order and case are free, and an axis of size 1 changes nothing.
MESH_AXES = {
    "dp": "data parallel copies",
    "fsdp": "FSDP2 shards",
    "tp": "tensor parallel parts",
    "cp": "parts of a row",
}
# Names of sizes given without any.
DEFAULT_AXES = ("fsdp", "tp")


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
    def data_parallel_ranks(self) -> int:
        """Data-parallel ranks: processes that see their own rows."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        # axes of one process are left out, as a user would write it
        used_axes = {name: size for name in MESH_AXES if (size := getattr(self, name)) > 1} or {"fsdp": 1}
        return f"[[{', '.join(map(str, used_axes.values()))}], [{', '.join(used_axes)}]]"


def parse_mesh(mesh_shape: Any) -> Mesh | None:
    """The mesh that `model.mesh_shape` gives; None where it is null. Raises ConfigError where no engine builds it."""
    if mesh_shape is None:
        return None
    sizes, names = _split_mesh_shape(mesh_shape)
    if not sizes or min(sizes) < 1 or len(names) != len(sizes):
        raise _mesh_error(mesh_shape, f"{len(sizes)} sizes, which must be whole numbers from 1, and {len(names)} names")
    if set(names) - set(MESH_AXES) or len(set(names)) < len(names):
        raise _mesh_error(mesh_shape, "unknown axis, or one that is named twice")
    mesh = Mesh(**dict(zip(names, sizes, strict=True)))
    if mesh.tp > 1 and mesh.cp > 1:
        raise _mesh_error(
            mesh_shape, "tp and cp cannot be combined", f"use {Mesh(mesh.dp, mesh.fsdp, 1, mesh.cp * mesh.tp)}"
        )
    if mesh.dp > 1 and mesh.fsdp == 1 and mesh.tp * mesh.cp > 1:
        alternative = Mesh(1, mesh.dp, mesh.tp, mesh.cp)
        raise _mesh_error(
            mesh_shape, "DDP cannot be combined with tp or cp", f"use {alternative}: the same rows, less memory"
        )
    return mesh


def _split_mesh_shape(mesh_shape: Any) -> tuple[list[int], list[str]]:
    if isinstance(mesh_shape, int):
        mesh_shape = (mesh_shape,)
    parts = list(mesh_shape)
    # [[2, 4], [fsdp, tp]]; a list of two numbers has no names
    if len(parts) == 2 and all(isinstance(part, Sequence) for part in parts):
        return list(parts[0]), [str(name).strip().lower() for name in parts[1]]
    if len(parts) > len(DEFAULT_AXES):
        raise _mesh_error(mesh_shape, f"{len(parts)} sizes without names")
    return parts, list(DEFAULT_AXES[: len(parts)])


def _mesh_error(mesh_shape: Any, problem: str, remedy: str = "") -> ConfigError:
    axes_text = ", ".join(f"{name} ({meaning})" for name, meaning in MESH_AXES.items())
    remedy = remedy or f"use sizes and names, such as [[2, 4], [fsdp, tp]], of {axes_text}; null lets the plan choose"
    return ConfigError(f"model.mesh_shape={format_mesh(mesh_shape)}: {problem}; {remedy}")


def format_mesh(mesh_shape: Any) -> str:
    """A mesh as written in YAML."""
    if isinstance(mesh_shape, list | tuple):
        return f"[{', '.join(format_mesh(part) for part in mesh_shape)}]"
    return one_line(str(mesh_shape))
