"""Autograd on sizes: which bytes a forward and a backward pass hold, without a tensor.

A `TensorRef` is a handle on a storage, as a tensor is in PyTorch: the storage is freed with its last handle, so code
that follows a model's forward line by line has the same live bytes at each line. What a backward formula needs is held
by its node (derivatives.yaml of PyTorch says what each formula needs); nodes run from the newest to the oldest, free
what they held, and sum gradients in place where nothing else holds the older one, as torch/csrc/autograd/engine.cpp
and input_buffer.cpp do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sft_play.units import MIB

# From this size on a tensor gets its own segment, of whole 2 MiB (kMinLargeAlloc, CUDACachingAllocator.cpp).
OWN_SEGMENT_BYTES = 10 * MIB


def segment_remainder(nbytes: int) -> int:
    """Bytes that a large tensor's block has beyond its own: a remainder of at most 1 MiB is not split off."""
    if nbytes < OWN_SEGMENT_BYTES:
        return 0
    remainder = -nbytes % (2 * MIB)
    return remainder if remainder <= MIB else 0  # kSmallSize: a larger remainder becomes a block of its own


class ByteMeter:
    """Bytes live now, and their peak."""

    __slots__ = ("dequantised", "live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.dequantised = 0
        """Of the peak: bytes of a weight dequantised at that moment."""

    def allocate(self, nbytes: int) -> None:
        """Allocate bytes."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self.dequantised = self.live, 0  # a new peak has other bytes in it

    def add_transient(self, nbytes: int, *, dequantised: int = 0) -> None:
        """Allocate and free bytes within one kernel."""
        if self.live + nbytes > self.peak:
            self.peak, self.dequantised = self.live + nbytes, dequantised

    def reset_peak(self) -> None:
        """Reset the peak."""
        self.peak, self.dequantised = self.live, 0


class _Storage:
    __slots__ = ("handles", "meter", "nbytes")

    def __init__(self, meter: ByteMeter, nbytes: int) -> None:
        self.meter, self.nbytes, self.handles = meter, nbytes + segment_remainder(nbytes), 0
        meter.allocate(self.nbytes)


class TensorRef:
    """A handle on a storage: `elements` of `itemsize` bytes each, and the node that made it, if it has a gradient."""

    __slots__ = ("elements", "is_view", "itemsize", "node", "storage")

    def __init__(self, storage: _Storage, elements: int, itemsize: int, node: Node | None = None) -> None:
        self.storage, self.elements, self.itemsize, self.node = storage, elements, itemsize, node
        self.is_view = False
        storage.handles += 1

    def __del__(self) -> None:
        # CPython calls this with the last reference, at once: the model is that a tensor dies with its last name
        storage = self.storage
        storage.handles -= 1
        if not storage.handles:
            storage.meter.live -= storage.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that this handle sees of its storage."""
        return self.elements * self.itemsize

    def detach(self) -> TensorRef:
        """Another handle without a gradient, to keep the storage."""
        return TensorRef(self.storage, self.elements, self.itemsize)


Grads: TypeAlias = "Sequence[TensorRef | None]"
BackwardFormula: TypeAlias = "Callable[[Tape, TensorRef], Grads]"


class Node:
    """A step of the backward pass: what it holds until it runs, and where its gradients go."""

    __slots__ = ("backward", "has_saved_tensors", "inputs", "saved", "sequence_number")

    def __init__(
        self,
        sequence_number: int,
        inputs: Sequence[Node | None],
        saved: list[TensorRef],
        backward: BackwardFormula,
        *,
        has_saved_tensors: bool,
    ) -> None:
        self.sequence_number, self.inputs, self.saved, self.backward, self.has_saved_tensors = (
            sequence_number,
            inputs,
            saved,
            backward,
            has_saved_tensors,
        )

    def __lt__(self, other: Node) -> bool:
        # for heapq: the newest first, as autograd's ready queue takes the highest sequence number
        return self.sequence_number > other.sequence_number


class Tape:
    """Creates handles, records nodes, and runs them backwards."""

    def __init__(self, *, grad_enabled: bool = True) -> None:
        self.meter = ByteMeter()
        self.grad_enabled = grad_enabled
        self.peak_at_last_save = 0
        """The peak when the last tensor was held: recomputation ends there (torch/utils/checkpoint.py)."""
        self.live_at_first_use = 0
        """Live bytes when a node first needed what was held: recomputation starts there."""
        self._sequence_number = 0

    def new(self, elements: int, itemsize: int) -> TensorRef:
        """Fresh storage without a gradient."""
        return TensorRef(_Storage(self.meter, elements * itemsize), elements, itemsize)

    def leaf(self, elements: int, itemsize: int) -> TensorRef:
        """Fresh storage whose gradient is wanted and returned by `backward`."""
        ref = self.new(elements, itemsize)
        if self.grad_enabled:
            ref.node = self.node((), (), lambda tape, grad: ())
        return ref

    def node(
        self,
        inputs: Sequence[TensorRef],
        saved: Sequence[TensorRef],
        backward: BackwardFormula,
        *,
        holds_weight: bool = False,
    ) -> Node:
        """A node with these inputs that holds these storages."""
        self._sequence_number += 1
        # handles without their nodes: a node that held its output's node would keep itself alive
        saved_refs = [ref.detach() for ref in saved]
        return Node(
            self._sequence_number,
            [ref.node for ref in inputs],
            saved_refs,
            backward,
            has_saved_tensors=holds_weight or bool(saved_refs),
        )

    def op(
        self,
        inputs: Sequence[TensorRef],
        elements: int,
        itemsize: int,
        *,
        saved: Sequence[TensorRef] = (),
        backward: BackwardFormula | None = None,
        holds_weight: bool = False,
        holds_output: bool = False,
        trains_weight: bool = False,
    ) -> TensorRef:
        """The output of an operation: fresh storage, and a node where an input has a gradient or a weight trains.
        Without a `backward` each input's gradient is a fresh tensor of its size. `holds_weight`: a parameter is held
        too, which takes no bytes here."""
        needs_node = self.grad_enabled and (trains_weight or any(ref.node is not None for ref in inputs))
        # inputs are saved before an operation runs: recomputation can stop there, without this one's output
        if needs_node and (saved or holds_weight):
            self.peak_at_last_save = self.meter.peak
        out = self.new(elements, itemsize)
        if needs_node:
            out.node = self.node(
                inputs, saved, backward or separate_gradients(*inputs), holds_weight=holds_weight or holds_output
            )
            if holds_output:
                out.node.saved.append(out.detach())
                self.peak_at_last_save = self.meter.peak
        return out

    def view(self, ref: TensorRef, elements: int | None = None) -> TensorRef:
        """The same storage, seen in another shape."""
        out = TensorRef(ref.storage, ref.elements if elements is None else elements, ref.itemsize)
        if self.grad_enabled and ref.node is not None:
            out.node = self.node((ref,), (), _pass_gradient)
        return out

    def backward(self, root: Node, grad: TensorRef) -> None:
        """Run from `root` to the leaves; gradients of leaves are freed as they arrive."""
        pending, queue = {id(root): [grad]}, [root]
        del grad  # each name that is left alive here would be a gradient that is never freed
        while queue:
            node = heapq.heappop(queue)
            if node.has_saved_tensors and not self.live_at_first_use:
                self.live_at_first_use = self.meter.live
            (output_gradient,) = pending.pop(id(node))  # all its consumers are newer, and so have run
            input_gradients = list(node.backward(self, output_gradient))
            del output_gradient
            node.saved.clear()
            for position, input_node in enumerate(node.inputs):
                # out of the list, so that _accumulate sees who holds it
                incoming, input_gradients[position] = input_gradients[position], None
                if input_node is None or incoming is None:
                    continue
                if id(input_node) in pending:
                    self._accumulate(pending[id(input_node)], incoming)
                else:
                    pending[id(input_node)] = [incoming]
                    heapq.heappush(queue, input_node)
                del incoming

    def _accumulate(self, slot: list[TensorRef], gradient: TensorRef) -> None:
        """In place, unless something else holds the older gradient, or it is a view: of a matrix product over rows and
        tokens, whose two dimensions are seen as one."""
        if slot[0].storage.handles > 1 or slot[0].is_view:  # can_accumulate_inplace of input_buffer.cpp
            slot[0] = self.new(gradient.elements, gradient.itemsize)


def separate_gradients(*inputs: TensorRef) -> BackwardFormula:
    """A separate gradient for each input that has one."""
    sizes = [(ref.elements, ref.itemsize) if ref.node is not None else None for ref in inputs]
    return lambda tape, grad: [None if size is None else tape.new(*size) for size in sizes]


def single_gradient(elements: int, itemsize: int, *, transient: int = 0) -> BackwardFormula:
    """A separate gradient of this size for the only input; `transient`: bytes beside it within the kernel."""

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = tape.new(elements, itemsize)
        tape.meter.add_transient(transient)
        return (out,)

    return backward


def _pass_gradient(tape: Tape, grad: TensorRef) -> Grads:
    return (grad,)


def shared_gradient(count: int) -> BackwardFormula:
    """The incoming gradient itself for each input, as a sum passes it on."""
    return lambda tape, grad: [grad] * count
