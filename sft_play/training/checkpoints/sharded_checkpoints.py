"""Sharded checkpoints: each rank writes its part of weights and optimizer states, and reads what it needs of all.

The format is torch's distributed checkpoint, which any number of ranks can read. Names are flat: `model.NAME`,
`optimizer.NAME.STATE`. Bytes are counted as they reach the disk, so that a slow save can be told from one that hangs.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from sft_play.errors import TrainingError
from sft_play.training.checkpoints.full_state_dict import tied_names
from sft_play.units import MIB

# In a checkpoint: the folder of the parts.
FOLDER = "shards"
# The table of contents, written once all parts are.
CONTENTS = f"{FOLDER}/.metadata"
# In a checkpoint: the optimizer's groups by the names of their parameters, and states that are not tensors.
GROUPS = "optimizer_groups.pt"
# What is written and then flushed to the disk at once: counted bytes are on the disk, and the last flush of a file,
# during which nothing is counted, has no more than this to write.
PIECE_BYTES = 64 * MIB
_PLAIN_NAMES = frozenset(
    {
        *("torch.Size", "torch.serialization._get_layout"),
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        *(f"torch.distributed.checkpoint.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
        *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    }
)  # fmt: skip

# Called with the bytes that were written or read.
Moved = Callable[[int], None]


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is sharded."""
    return (checkpoint / CONTENTS).is_file()


@dataclass(frozen=True)
class Part:
    """This rank's part of weights and optimizer states, by the names in a checkpoint; groups and plain values."""

    tensors: dict[str, torch.Tensor]
    record: dict[str, Any]

    def in_ram(self) -> Part:
        """A copy of it on the host, also where it is there already, which training does not change."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return Part(stager.stage(self.tensors), deepcopy(self.record))
        finally:
            stager.close()


def part_of(model: nn.Module, optimizer: Any) -> Part:
    """This rank's part of an FSDP model and its optimizer: their own tensors. All ranks call it."""
    states = get_optimizer_state_dict(model, optimizer)
    # dcp stores tensors; plain values and groups are the same on all ranks
    values = {
        name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for name, state in states["state"].items()
    }
    return Part({**_weights(model), **_states(states)}, {"param_groups": states["param_groups"], "values": values})


def save(part: Part, checkpoint: Path, *, group: Any, moved: Moved, done: Callable[[], None] = lambda: None) -> None:
    """Write a checkpoint's weights and optimizer states, each rank its part, into a folder that all see; all call it.
    No tensor is gathered. `group`: one that waits as long as a disk takes; `moved` is called with the bytes that reach
    the disk, `done` once all of this rank are there. Raises TrainingError: a rank could not write."""
    writer = _Writer(checkpoint / FOLDER, moved, done)
    with _worded(f"the checkpoint {checkpoint} could not be written"):
        dcp.save(part.tensors, storage_writer=writer, process_group=group)
    if dist.get_rank() == 0:
        torch.save(part.record, checkpoint / GROUPS)


def load_weights(model: nn.Module, checkpoint: Path, *, group: Any | None, moved: Moved) -> None:
    """Load weights into a model, divided or whole; all ranks. Raises TrainingError: one is missing or not read."""
    _fill(_weights(model), checkpoint, group=group, moved=moved)


def load_optimizer(model: nn.Module, optimizer: Any, checkpoint: Path, *, group: Any | None, moved: Moved) -> None:
    """Load states and groups into an optimizer; all ranks. Raises TrainingError: they are of other parameters."""
    saved = torch.load(checkpoint / GROUPS, weights_only=True)
    states = get_optimizer_state_dict(model, optimizer)  # creates them where no step was taken yet
    saved_names, names = ([sorted(group["params"]) for group in one["param_groups"]] for one in (saved, states))
    if saved_names != names:
        raise TrainingError(f"the checkpoint's optimizer has groups of {list(map(len, saved_names))} tensors, but this "
                            f"one has {list(map(len, names))}: it was written for other trained weights")  # fmt: skip
    _fill(_states(states), checkpoint, group=group, moved=moved)
    for name, values in saved["values"].items():
        states["state"][name].update(values)
    set_optimizer_state_dict(model, optimizer, {"state": states["state"], "param_groups": saved["param_groups"]})


def stored_weights(checkpoint: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every weight in a checkpoint; raises TrainingError for a table that is not read."""
    entries = _Reader(checkpoint / FOLDER).read_metadata().state_dict_metadata
    return {
        name.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.")
    }


def read_weights(checkpoint: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some whole weights, read in this process alone; raises TrainingError where one is missing or not read."""
    stored = stored_weights(checkpoint)
    lacking = [name for name in names if name not in stored]
    if lacking:
        raise TrainingError(f"the checkpoint {checkpoint} lacks {lacking[0]}")
    weights = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    _fill(named, checkpoint, group=None)
    return weights


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's weights by their names in a checkpoint, tied ones once; writing into them changes the model."""
    tied = tied_names(model)
    return {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items() if name not in tied}


def _states(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, state in states["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _fill(
    tensors: dict[str, torch.Tensor], checkpoint: Path, *, group: Any | None, moved: Moved = lambda _: None
) -> None:
    reader = _Reader(checkpoint / FOLDER, moved)
    # without a group one process reads alone; dcp would otherwise ask for a default group
    with _worded(f"the checkpoint {checkpoint} cannot be read"):
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)


@contextlib.contextmanager
def _worded(failure: str) -> Iterator[None]:
    """The failure of any rank as a TrainingError; torch raises a BaseException with the tracebacks of all."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise TrainingError(f"{failure}: rank {rank}: {type(cause).__name__}: {cause}") from error


class _Counted(io.FileIO):
    """A file whose bytes are counted once they are on the disk."""

    def __init__(self, path: Path, mode: str, moved: Moved) -> None:
        super().__init__(path, mode)
        self._moved, self._cached = moved, 0

    def write(self, data: Any) -> int:
        """At most a piece, as raw files may; the buffer above writes the rest."""
        count = super().write(memoryview(data).cast("B")[:PIECE_BYTES]) or 0
        self._cached += count
        if self._cached >= PIECE_BYTES:
            getattr(os, "fdatasync", os.fsync)(self.fileno())  # macOS has no fdatasync
            self._cached = 0
        self._moved(count)
        return count

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._moved(count)
        return count


class _Disk(FileSystem):
    def __init__(self, moved: Moved) -> None:
        super().__init__()
        self._moved = moved

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        raw = _Counted(Path(path), mode, self._moved)
        with io.BufferedWriter(raw) if "w" in mode else io.BufferedReader(raw) as stream:
            yield stream


class _Writer(dcp.FileSystemWriter):
    """torch's writer, counted; it calls `done` when this rank has nothing more to write."""

    def __init__(self, path: Path, moved: Moved, done: Callable[[], None]) -> None:
        super().__init__(path, overwrite=False)
        self.fs = _Disk(moved)
        self._done = done

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        self._done()
        return written

    def storage_meta(self) -> StorageMeta:
        """The table's own entry: without a path, since checkpoints are renamed and moved."""
        return StorageMeta(save_id=self.save_id)


class _Reader(dcp.FileSystemReader):
    """torch's reader, counted; it unpickles nothing but descriptions of tensors from the table of contents."""

    def __init__(self, path: Path, moved: Moved = lambda _: None) -> None:
        super().__init__(path)
        self.fs = _Disk(moved)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """With tensors only: anything else would be unpickled by torch's planner."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Plain(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise TrainingError(f"{path}, a checkpoint's table of contents, cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise TrainingError(f"{path} is not what torch's distributed checkpoint writes")
        entries = metadata.state_dict_metadata.items()
        metadata.state_dict_metadata = {name: one for name, one in entries if isinstance(one, TensorStorageMetadata)}
        return metadata


class _Plain(pickle.Unpickler):
    """Unpickles the objects of torch's table of contents, and none that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and f"{module}.{name}" in _PLAIN_NAMES:
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no table of contents has")
