"""A frozen base that stays in RAM: its blocks visit the device, one ahead of the computation.

The frozen tensors of a block lie behind each other in pinned RAM, as they are stored (NF4 or 16
bits). On the device there are two places, which blocks take in turn: blocks 0, 2, 4, … the first,
blocks 1, 3, 5, … the second. A block's tensors are views of its place from the start, so that a
visit is one copy and nothing else, and what autograd kept of a weight in the forward pass is right
again when its block has come back for the backward pass. Nothing is written back: nothing changes.
"""

import collections
import contextlib
import logging
import mmap
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sft_play.errors import DoesNotFit, TrainingError
from sft_play.planner.memory.model_states import PLACES
from sft_play.planner.plan import Plan
from sft_play.process.waiting import release_free_memory, report_each
from sft_play.text import GIB, MIB
from sft_play.training.measure.monitor import shortest_seconds
from sft_play.training.prepare.experts import PACKED_ATTRIBUTE
from sft_play.training.prepare.model_spec import decoder_layers

logger = logging.getLogger(__name__)

# Tensors of a block begin at a multiple of this: kernels read in steps of 16 bytes and more.
ALIGNMENT_BYTES = 256
# Names of a quantisation state's tensors (bitsandbytes functional.py, `QuantState`).
STATE_TENSORS = ("absmax", "code", "offset")
# Of the copy that measures the bus.
BUS_PROBE_BYTES = 256 * MIB


@dataclass(frozen=True)
class _FrozenTensor:
    # a tensor of a block, its place behind the block's first byte, and what puts another in its
    # stead
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    replace: Callable[[torch.Tensor], None]


class BlockStream:
    """The frozen tensors of a model's blocks in RAM, and the places on the device that they take in
    turn. Blocks are added one after the other, then `start` begins their visits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_pinned = device.type == "cuda"
        # Of each block: its bytes in RAM, and what they are.
        self.blocks: list[nn.Module] = []
        self._host: list[torch.Tensor] = []
        self._tensors: list[list[_FrozenTensor]] = []
        self._places: list[torch.Tensor] = []
        # Parameters that blocks share, by their `id`: they stay on the device.
        self._shared: set[int] = set()
        # Which block each place holds, and when its copy is over.
        self._held: list[int | None] = [None] * PLACES
        self._copied: list[Any] = [None] * PLACES
        self._copy_stream = torch.cuda.Stream(device) if self.is_pinned else None

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM of all blocks."""
        return sum(host.nbytes for host in self._host)

    @torch.no_grad()
    def add(self, block: nn.Module, shared: Collection[int] = ()) -> None:
        """Move the frozen tensors of a block to RAM; what they took elsewhere is free then.
        `shared`: the parameters, by their `id`, that stay where they are."""
        self._shared.update(shared)
        frozen = list(_frozen_tensors(block, shared))
        offsets, total_bytes = [], 0
        for tensor, _ in frozen:
            offsets.append(total_bytes)
            total_bytes += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # pages of its own: what shares a page with another cannot be pinned beside it
        try:
            pages = mmap.mmap(-1, max(1, total_bytes))
        except (OSError, MemoryError) as error:
            raise DoesNotFit(
                f"the RAM of this machine ran out: {self.host_bytes / GIB:.2f} GiB of the base are"
                f" there, and the next block takes {total_bytes / GIB:.2f}; free some, or take a"
                " smaller base or tuning.mode=qlora"
            ) from error
        host = torch.frombuffer(pages, dtype=torch.uint8)[:total_bytes]
        if self.is_pinned and total_bytes:
            self._pin(host)
        tensors = []
        for (tensor, replace), offset in zip(frozen, offsets, strict=True):
            tensors.append(_FrozenTensor(offset, tensor.shape, tensor.dtype, replace))
            _view(host, tensors[-1]).copy_(tensor)
            # a placeholder until `start`, with the memory of one element
            replace(tensor.new_empty(()).expand(tensor.shape))
        self.blocks.append(block)
        self._host.append(host)
        self._tensors.append(tensors)

    def streamed_parameters(self) -> set[int]:
        """The parameters, by their `id`, that lie in RAM."""
        return {id(one) for block in self.blocks for one in frozen_parameters(block)} - self._shared

    def require_streamed(self) -> None:
        """Raise TrainingError where there is no block, or one has a frozen weight outside of its
        place."""
        if not self.host_bytes:
            raise TrainingError(
                "the plan says streamed, but no block of this class could be moved to RAM; nothing"
                " was trained: STRATEGY=single"
            )
        for index, block in enumerate(self.blocks):
            place = self._places[index % PLACES].untyped_storage().data_ptr()
            for parameter in frozen_parameters(block):
                is_here = parameter.untyped_storage().data_ptr() == place
                if not is_here and id(parameter) not in self._shared:
                    raise TrainingError(
                        f"the plan says streamed, but block {index} holds weights of its own on"
                        f" {parameter.device}; nothing was trained"
                    )

    def start(self) -> None:
        """Let the tensors of all blocks be views of their places, and each block come before its
        passes."""
        largest = max((host.nbytes for host in self._host), default=0)
        for _ in range(PLACES):
            self._places.append(torch.zeros(largest, dtype=torch.uint8, device=self.device))
            if self._copy_stream is not None:  # a copy may be on its way when the model is dropped
                self._places[-1].record_stream(self._copy_stream)
        for index, (block, tensors) in enumerate(zip(self.blocks, self._tensors, strict=True)):
            for tensor in tensors:
                tensor.replace(_view(self._places[index % PLACES], tensor))
            block.register_forward_pre_hook(lambda *_, index=index: self.visit(index))
            block.register_forward_hook(partial(self._after_forward, index))

    # --- visits -----------------------------------------------------------------------------------
    def _after_forward(self, index: int, block: nn.Module, inputs: Any, output: Any) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0]
        if isinstance(first, torch.Tensor) and first.requires_grad:
            # its gradient comes before the block's own backward pass
            first.register_hook(lambda gradient: self.visit(index))

    def visit(self, index: int) -> None:
        """Have a block on the device before what is computed next, and the one after it on its
        way."""
        self._bring(index)
        if self._copy_stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied[index % PLACES])
        next_index = self._next_block(index)
        if next_index is not None:
            self._bring(next_index)

    def _next_block(self, index: int) -> int | None:
        # autograd numbers its backward passes; recomputed blocks are inside of one, too
        if torch._C._current_graph_task_id() != -1:
            return index - 1 if index else None
        if index + 1 < len(self.blocks):
            return index + 1
        # answers and evaluations begin again with the first block, which may share the place
        is_alone = index % PLACES == 0
        return None if torch.is_grad_enabled() or is_alone else 0

    def _bring(self, index: int) -> None:
        place = index % PLACES
        if self._held[place] == index:
            return
        host = self._host[index]
        if self._copy_stream is None:
            self._places[place][: host.nbytes].copy_(host)
        else:
            # all that was computed with the block before is over
            self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._copy_stream):
                self._places[place][: host.nbytes].copy_(host, non_blocking=True)
                self._copied[place] = self._copy_stream.record_event()
        self._held[place] = index

    def _pin(self, host: torch.Tensor) -> None:
        # not `pin_memory=True`, which takes the next power of two
        error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        if int(error) == 0:
            weakref.finalize(self, _unpin, host)
            return
        self.is_pinned = False
        # CUDA keeps the refusal as its last error, and would raise it at the next kernel
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
        logger.warning(
            "Streamed base: the system pins no more than %.1f GiB of RAM (%s); blocks are copied"
            " from memory that is not pinned, which is slower: raise the limit (ulimit -l, WSL:"
            " memory= in .wslconfig), or STRATEGY=single",
            self.host_bytes / GIB,
            error,
        )


def stream_base(model: nn.Module, device: torch.device) -> BlockStream:
    """Let the frozen weights of a model's blocks stay in RAM and visit `device`, where all of the
    rest is moved. The model is in RAM; what trains is decided."""
    stream = move_blocks(model, device)
    streamed = stream.streamed_parameters()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in streamed:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
    stream.start()
    model.hf_device_map = {"": device}
    # their values are no state of ranks: DDP would send every block's
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, one in model.named_parameters() if id(one) in streamed]
    )
    return stream


def move_blocks(model: nn.Module, device: torch.device) -> BlockStream:
    """Move the frozen tensors of all blocks of a model to where they stay in RAM; their visits to
    `device` are not begun."""
    layers = decoder_layers(model)
    # of layers in layers the outer ones, which are called with what is inside of them
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    blocks = [layer for layer in layers if id(layer) not in inner]
    # what two blocks share has no place of one of them, and stays on the device
    counts = collections.Counter(
        id(parameter) for block in blocks for parameter in frozen_parameters(block)
    )
    shared = {name for name, count in counts.items() if count > 1}
    stream = BlockStream(device)
    for block in report_each("Keeping the base in RAM", blocks, unit="blocks", count=len(blocks)):
        stream.add(block, shared)
        release_free_memory()  # of the tensors that were copied
    return stream


def measure_bus_rate(device: torch.device) -> float:
    """Bytes per second from pinned RAM to the device, of the quickest of a few copies."""
    source = torch.empty(BUS_PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return BUS_PROBE_BYTES / shortest_seconds(copy, device, count=4)


def slow_bus_warning(plan: Plan, host_bytes: int, bus_bytes_per_s: float) -> str:
    """What a run is told where the bus, as it was measured, takes longer for a pass than its
    computation was planned to take; empty where it does not."""
    bus_s, pass_times = 2 * host_bytes / bus_bytes_per_s, plan.speed.pass_times
    if pass_times is None or bus_s <= pass_times.seconds(plan.choice.step.tokens):
        return ""
    return (
        f"Streamed base: {bus_bytes_per_s / 1e9:.1f} GB/s were measured from RAM to the card, so"
        f" that a pass takes at least {bus_s:.1f} s, and its computation"
        f" {pass_times.seconds(plan.choice.step.tokens):.1f} s by the plan: a slot with more lanes,"
        " or more tokens a pass; later plans count with it"
    )


def frozen_parameters(block: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a block that do not train."""
    return (parameter for parameter in block.parameters() if not parameter.requires_grad)


def _unpin(host: torch.Tensor) -> None:
    torch.cuda.synchronize()  # the last copy reads it
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def _view(flat: torch.Tensor, tensor: _FrozenTensor) -> torch.Tensor:
    """The tensor of this place, dtype and shape in one of bytes."""
    size = tensor.shape.numel() * tensor.dtype.itemsize
    return flat[tensor.offset : tensor.offset + size].view(tensor.dtype).view(tensor.shape)


def _frozen_tensors(
    block: nn.Module, shared: Collection[int]
) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Yield the tensors of a block that do not train, with what puts another in their stead: its
    weights, and what NF4 keeps beside the packed ones."""
    for module in block.modules():
        for parameter in module._parameters.values():
            if parameter is None or parameter.requires_grad or id(parameter) in shared:
                continue
            yield parameter.data, partial(setattr, parameter, "data")
            yield from _state_tensors(getattr(parameter, "quant_state", None))
        for packed_weight in vars(module).get(PACKED_ATTRIBUTE, {}).values():
            for state in packed_weight.nf4_state.states if packed_weight.nf4_state else ():
                yield from _state_tensors(state)


def _state_tensors(state: Any) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    for holder in (state, getattr(state, "state2", None)):
        for name in STATE_TENSORS:
            tensor = getattr(holder, name, None)
            if isinstance(tensor, torch.Tensor):
                yield tensor, partial(setattr, holder, name)
