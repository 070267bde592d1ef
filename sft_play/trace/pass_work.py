"""What a class's own blocks move and start beside their products, counted operator by operator on
fake tensors: real widths, adapters and autocast as the run has them.

A kernel moves each of its inputs and results once. Products and attention are left out: the
roofline has them by their operations; but for products that are as narrow as an adapter's, which
take as long as moving their matrices. A compiled group of operators between products reads what
came from elsewhere once, and writes what is read elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft_play.planner.pass_work import CountedWork, DirectionWork, PassWork
from sft_play.trace import build
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.step import hidden_states, trace_context

# Operators that start no kernel, beside those that return a view, or no tensor.
_ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh")
# Operators that the roofline counts by their operations; attention's are told by their names.
_NARROW_PRODUCTS = ("mm", "addmm")
_PRODUCTS = (*_NARROW_PRODUCTS, "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback")
# A product with a side of fewer elements is bound by memory: of 2 k operations for 2 bytes, where
# cards compute 150 to 300 operations in the time of moving a byte.
NARROW_SIDE = 128


@dataclass(frozen=True)
class _Kernel:
    """A kernel: bytes that it reads and writes, by storage. A product does not join others;
    `is_wide`: and takes as long as its operations."""

    is_product: bool
    is_wide: bool
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]

    @property
    def moved_bytes(self) -> int:
        return sum(size for _, size in (*self.reads, *self.writes)) * (not self.is_wide)


class KernelLog(TorchDispatchMode):
    """Logs the kernels that are started while open."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[_Kernel] = []
        # none is freed, so that no two have one address; a tensor that is held would be copied
        # where autograd takes it over
        self._storages: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        name, writes = str(function._schema.name).rpartition("::")[2], self._accesses(out)
        if writes and _starts_kernel(function, name):
            product = name.removesuffix("_")  # in place or not
            is_product = product in _PRODUCTS or "attention" in name
            sides = [side for one in _tensors(args) for side in one.shape[-2:]]
            is_narrow = product in _NARROW_PRODUCTS and min(sides) < NARROW_SIDE
            reads = self._accesses((args, kwargs))
            self.kernels.append(_Kernel(is_product, is_product and not is_narrow, reads, writes))
        return out

    def _accesses(self, value: Any) -> tuple[tuple[int, int], ...]:
        accesses = []
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            self._storages.append(storage)
            # an expanded tensor is no larger than its storage
            size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
            accesses.append((storage._cdata, size))
        return tuple(accesses)


def _starts_kernel(function: Any, name: str) -> bool:
    aliases = [returned.alias_info for returned in function._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and not name.startswith(_ALLOCATIONS)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def count_blocks(
    settings: StepSettings, *, depth: int, length: int, rows: Sequence[int] = (1, 2)
) -> list[CountedWork]:
    """Count each of the first `depth` blocks, alone, in batches of `rows` rows of `length` tokens:
    what both have is fixed, what more rows add is by token. Raises TraceUnavailable: the class does
    not run on fake tensors."""
    counted: list[list[tuple[int, ...]]] = []
    with trace_context(settings, depth=depth) as (loop, skeleton):
        model = loop.load_model(skeleton)
        if loop.grouped_adapters is not None:
            loop.grouped_adapters.refresh_copies()
        blocks = list(build.find_block_list(build.base_model(model))[1])
        parameters = list(model.parameters())
        for row_count in rows:
            calls = _record_calls(loop, model, blocks, row_count, length)
            counted.append(
                [
                    _count_block(block, *call, parameters=parameters, dtype=settings.autocast)
                    for block, call in zip(blocks, calls, strict=True)
                ]
            )
    tokens = [row_count * length for row_count in rows]
    return [_fit_tokens(tokens, fewer, more) for fewer, more in zip(*counted, strict=True)]


def _record_calls(
    loop: Any, model: Any, blocks: Sequence[Any], rows: int, length: int
) -> list[tuple[Any, Any]]:
    """The arguments with which a model calls its blocks."""
    calls: dict[int, tuple[Any, Any]] = {}
    handles = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: calls.update({index: (args, kwargs)}),
            with_kwargs=True,
        )
        for index, block in enumerate(blocks)
    ]
    try:
        with torch.no_grad():
            loop.compute_loss(model, loop.make_batch(rows, length))
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) < len(blocks):
        raise TraceUnavailable("the model does not call each of its first blocks")
    return [calls[index] for index in range(len(blocks))]


def _count_block(
    block: Any, args: Any, kwargs: Any, *, parameters: Sequence[Any], dtype: str | None
) -> tuple[int, ...]:
    """Bytes and operators forwards and backwards, plain; the same compiled."""
    states = hidden_states(args[0] if args else kwargs.get("hidden_states"))
    hidden = states.detach().requires_grad_()
    args, kwargs = (
        ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})
    )
    log = KernelLog()
    autocast = torch.autocast("cpu", getattr(torch, dtype)) if dtype else contextlib.nullcontext()
    with log:
        with autocast:
            out = next(iter(_tensors(block(*args, **kwargs))), hidden)
        forward_count = len(log.kernels)
        out.backward(torch.empty_like(out))
    results = [out, hidden.grad, *(one.grad for one in parameters)]
    lasting = {one.untyped_storage()._cdata for one in results if one is not None}
    for parameter in parameters:
        parameter.grad = None
    readers: dict[int, set[int]] = {}
    for index, kernel in enumerate(log.kernels):
        for storage, _ in kernel.reads:
            readers.setdefault(storage, set()).add(index)
    forward, backward = log.kernels[:forward_count], log.kernels[forward_count:]
    return (
        *(sum(kernel.moved_bytes for kernel in forward), len(forward)),
        *(sum(kernel.moved_bytes for kernel in backward), len(backward)),
        *_fused(forward, 0, readers, lasting),
        *_fused(backward, forward_count, readers, lasting),
    )


def _fused(
    kernels: Sequence[_Kernel], offset: int, readers: dict[int, set[int]], lasting: set[int]
) -> tuple[int, int]:
    """Bytes and starts of kernels of which those between two products are one."""
    moved = starts = 0
    for is_product, group in itertools.groupby(
        enumerate(kernels, start=offset), lambda numbered: numbered[1].is_product
    ):
        indices, members = zip(*group, strict=True)
        if is_product:
            starts += len(members)
            moved += sum(kernel.moved_bytes for kernel in members)
        else:
            starts += 1
            moved += _group_bytes(members, set(indices), readers, lasting)
    return moved, starts


def _group_bytes(
    group: Sequence[_Kernel], indices: set[int], readers: dict[int, set[int]], lasting: set[int]
) -> int:
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for kernel in group:
        for storage, size in kernel.reads:
            if storage not in writes:
                reads[storage] = max(reads.get(storage, 0), size)
        for storage, size in kernel.writes:
            writes[storage] = max(writes.get(storage, 0), size)
    written = sum(
        size
        for storage, size in writes.items()
        if storage in lasting or readers.get(storage, set()) - indices
    )
    return sum(reads.values()) + written


def _fit_tokens(
    tokens: Sequence[int], fewer: tuple[int, ...], more: tuple[int, ...]
) -> CountedWork:
    def direction(place: int) -> DirectionWork:
        by_token = (more[place] - fewer[place]) / (tokens[1] - tokens[0])
        fixed = max(0.0, fewer[place] - by_token * tokens[0])
        return DirectionWork(by_token, fixed, more[place + 1])

    return CountedWork(PassWork(direction(0), direction(2)), PassWork(direction(4), direction(6)))
