"""Sharded checkpoints: each rank writes its part of weights and optimizer states, and reads what it
needs of all.

The format is torch's distributed checkpoint, which any number of ranks can read. Names are flat:
`model.NAME`, `optimizer.NAME.STATE`.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from sft_play.errors import TrainingError
from sft_play.training.checkpoints.full_state_dict import tied_weight_names

# In a checkpoint: the folder of the parts.
SHARDS_FOLDER = "shards"
# The table of contents, written once all parts are.
CONTENTS_FILE = f"{SHARDS_FOLDER}/.metadata"
# In a checkpoint: the optimizer's groups by the names of their parameters, and states that are not
# tensors.
GROUPS_FILE = "optimizer_groups.pt"
_ALLOWED_CLASSES = frozenset(
    {
        *("torch.Size", "torch.serialization._get_layout"),
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        *("pathlib.PosixPath", "pathlib._local.PosixPath"),
    }
)  # fmt: skip


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint is sharded."""
    return (checkpoint / CONTENTS_FILE).is_file()


@dataclass(frozen=True)
class CheckpointShard:
    """This rank's part of weights and optimizer states, by the names in a checkpoint; groups and
    plain values."""

    tensors: dict[str, torch.Tensor]
    groups_and_values: dict[str, Any]

    def copy_to_host(self) -> CheckpointShard:
        """Copy the shard to the host, even if it is there already: training changes the original,
        not the copy."""
        stager = DefaultStager(StagingOptions(False, False, False, False))
        try:
            return CheckpointShard(stager.stage(self.tensors), deepcopy(self.groups_and_values))
        finally:
            stager.close()


def collect_shard(model: nn.Module, optimizer: Any) -> CheckpointShard:
    """This rank's part of an FSDP model and its optimizer: their own tensors. All ranks call it."""
    states = get_optimizer_state_dict(model, optimizer)
    # dcp stores tensors; plain values and groups are the same on all ranks
    values = {
        name: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for name, state in states["state"].items()
    }
    return CheckpointShard(
        {**_weight_tensors(model), **_state_tensors(states)},
        {"param_groups": states["param_groups"], "values": values},
    )


def save_shard(
    shard: CheckpointShard,
    checkpoint: Path,
    *,
    group: Any,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint's weights and optimizer states, each rank its part, into a folder that all
    see; all call it. No tensor is gathered. `group`: one that waits as long as a disk takes;
    `on_done` is called once all bytes of this rank are on the disk. Raises TrainingError: a rank
    could not write."""
    with _explain_failure(f"the checkpoint {checkpoint} could not be written"):
        dcp.save(
            shard.tensors,
            storage_writer=_PartWriter(checkpoint / SHARDS_FOLDER, on_done),
            process_group=group,
        )
    if dist.get_rank() == 0:
        torch.save(shard.groups_and_values, checkpoint / GROUPS_FILE)


def load_sharded_weights(model: nn.Module, checkpoint: Path, *, group: Any | None) -> None:
    """Load weights into a model, divided or whole; all ranks. Raises TrainingError: one is missing
    or not read."""
    _load_tensors(_weight_tensors(model), checkpoint, group=group)


def load_sharded_optimizer(
    model: nn.Module, optimizer: Any, checkpoint: Path, *, group: Any | None
) -> None:
    """Load states and groups into an optimizer; all ranks. Raises TrainingError: they are of other
    parameters."""
    saved = torch.load(checkpoint / GROUPS_FILE, weights_only=True)
    states = get_optimizer_state_dict(model, optimizer)  # creates them where no step was taken yet
    saved_names, names = (
        [sorted(group["params"]) for group in source["param_groups"]] for source in (saved, states)
    )
    if saved_names != names:
        raise TrainingError(
            f"the checkpoint's optimizer has groups of {list(map(len, saved_names))} tensors, but"
            f" this one has {list(map(len, names))}: it was written for other trained weights"
        )
    _load_tensors(_state_tensors(states), checkpoint, group=group)
    for name, values in saved["values"].items():
        states["state"][name].update(values)
    set_optimizer_state_dict(
        model, optimizer, {"state": states["state"], "param_groups": saved["param_groups"]}
    )


def stored_weight_specs(checkpoint: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every weight in a checkpoint; raises TrainingError for a table that
    is not read."""
    metadata = _PartReader(checkpoint / SHARDS_FOLDER).read_metadata()
    return {
        name.removeprefix("model."): (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }


def read_sharded_weights(checkpoint: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some whole weights, read in this process alone; raises TrainingError where one is missing or
    not read."""
    specs = stored_weight_specs(checkpoint)
    missing = [name for name in names if name not in specs]
    if missing:
        raise TrainingError(f"the checkpoint {checkpoint} lacks {missing[0]}")
    weights = {name: torch.empty(specs[name][0], dtype=specs[name][1]) for name in names}
    _load_tensors(
        {f"model.{name}": tensor for name, tensor in weights.items()}, checkpoint, group=None
    )
    return weights


# This rank's weights by their names in a checkpoint, tied ones once; writing into them changes the
# model.
def _weight_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    tied = tied_weight_names(model)
    return {
        f"model.{name}": tensor
        for name, tensor in get_model_state_dict(model).items()
        if name not in tied
    }


def _state_tensors(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"optimizer.{name}.{key}": value
        for name, state in states["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _load_tensors(tensors: dict[str, torch.Tensor], checkpoint: Path, *, group: Any | None) -> None:
    # without a group one process reads alone; dcp would otherwise ask for a default group
    with _explain_failure(f"the checkpoint {checkpoint} cannot be read"):
        dcp.load(
            tensors,
            storage_reader=_PartReader(checkpoint / SHARDS_FOLDER),
            process_group=group,
            no_dist=group is None,
        )


# torch raises a BaseException with the tracebacks of all ranks
@contextlib.contextmanager
def _explain_failure(failure: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise TrainingError(f"{failure}: rank {rank}: {type(cause).__name__}: {cause}") from error


# Calls `on_done` when this rank has nothing more to write.
class _PartWriter(dcp.FileSystemWriter):
    def __init__(self, path: Path, on_done: Callable[[], None]) -> None:
        super().__init__(path, overwrite=False)
        self._on_done = on_done

    def write_data(self, plan: Any, planner: Any) -> Any:
        written = super().write_data(plan, planner)
        self._on_done()
        return written

    def storage_meta(self) -> StorageMeta:
        # without a path, since checkpoints are renamed and moved
        return StorageMeta(save_id=self.save_id)


# Unpickles nothing but descriptions of tensors from the table of contents.
class _PartReader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        # with tensors only: anything else would be unpickled by torch's planner
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _ContentsUnpickler(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise TrainingError(
                f"{path}, a checkpoint's table of contents, cannot be read: {error}"
            ) from None
        if not isinstance(metadata, Metadata):
            raise TrainingError(f"{path} is not what torch's distributed checkpoint writes")
        metadata.state_dict_metadata = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return metadata


# Unpickles the objects of torch's table of contents, and none that could run code.
class _ContentsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and f"{module}.{name}" in _ALLOWED_CLASSES:
            return super().find_class(module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no table of contents has")
