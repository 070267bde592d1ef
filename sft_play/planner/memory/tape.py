"""Autograd on sizes: which bytes a forward and a backward pass hold, without a tensor.

A `Ref` is a handle on a storage, as a tensor is in PyTorch: the storage is freed with its last handle, so code that
follows a model's forward line by line has the same live bytes at each line. What a backward formula needs is held by
its node (derivatives.yaml of PyTorch says what each formula needs); nodes run from the newest to the oldest, free what
they held, and sum gradients in place where nothing else holds the older one, as torch/csrc/autograd/engine.cpp and
input_buffer.cpp do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sft_play.units import MIB

# From this size on a tensor gets its own segment, of whole 2 MiB (kMinLargeAlloc, CUDACachingAllocator.cpp).
OWN_SEGMENT = 10 * MIB


def rest_of_segment(nbytes: int) -> int:
    """Bytes that a large tensor's block has beyond its own: a remainder of at most 1 MiB is not split off."""
    if nbytes < OWN_SEGMENT:
        return 0
    rest = -nbytes % (2 * MIB)
    return rest if rest <= MIB else 0  # kSmallSize: a larger remainder becomes a block of its own


class Meter:
    """Bytes live now, and their peak."""

    __slots__ = ("live", "peak", "rebuilt")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.rebuilt = 0
        """Of the peak: bytes of a weight dequantised at that moment."""

    def take(self, nbytes: int) -> None:
        """Allocate bytes."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self.rebuilt = self.live, 0  # a new peak has other bytes in it

    def touch(self, nbytes: int, *, rebuilt: int = 0) -> None:
        """Allocate and free bytes within one kernel."""
        if self.live + nbytes > self.peak:
            self.peak, self.rebuilt = self.live + nbytes, rebuilt

    def restart(self) -> None:
        """Reset the peak."""
        self.peak, self.rebuilt = self.live, 0


class _Storage:
    __slots__ = ("handles", "meter", "nbytes")

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter, self.nbytes, self.handles = meter, nbytes + rest_of_segment(nbytes), 0
        meter.take(self.nbytes)


class Ref:
    """A handle on a storage: `elements` of `width` bytes each, and the node that made it, if it has a gradient."""

    __slots__ = ("elements", "is_view", "node", "storage", "width")

    def __init__(self, storage: _Storage, elements: int, width: int, node: Node | None = None) -> None:
        self.storage, self.elements, self.width, self.node = storage, elements, width, node
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
        return self.elements * self.width

    def bare(self) -> Ref:
        """Another handle without a gradient, to keep the storage."""
        return Ref(self.storage, self.elements, self.width)


Grads: TypeAlias = "Sequence[Ref | None]"
Backward: TypeAlias = "Callable[[Tape, Ref], Grads]"


class Node:
    """A step of the backward pass: what it holds until it runs, and where its gradients go."""

    __slots__ = ("age", "backward", "holds", "inputs", "saved")

    def __init__(
        self, age: int, inputs: Sequence[Node | None], saved: list[Ref], backward: Backward, *, holds: bool
    ) -> None:
        self.age, self.inputs, self.saved, self.backward, self.holds = age, inputs, saved, backward, holds

    def __lt__(self, other: Node) -> bool:
        # for heapq: the newest first, as autograd's ready queue takes the highest sequence number
        return self.age > other.age


class Tape:
    """Creates handles, records nodes, and runs them backwards."""

    def __init__(self, *, grad: bool = True) -> None:
        self.meter = Meter()
        self.grad = grad
        self.stopped_at = 0
        """The peak when the last tensor was held: recomputation ends there (torch/utils/checkpoint.py)."""
        self.first_use = 0
        """Live bytes when a node first needed what was held: recomputation starts there."""
        self._age = 0

    def new(self, elements: int, width: int) -> Ref:
        """Fresh storage without a gradient."""
        return Ref(_Storage(self.meter, elements * width), elements, width)

    def leaf(self, elements: int, width: int) -> Ref:
        """Fresh storage whose gradient is wanted and returned by `backward`."""
        ref = self.new(elements, width)
        if self.grad:
            ref.node = self.node((), (), lambda tape, grad: ())
        return ref

    def node(
        self, inputs: Sequence[Ref], saved: Sequence[Ref], backward: Backward, *, holds_weight: bool = False
    ) -> Node:
        """A node with these inputs that holds these storages."""
        self._age += 1
        # handles without their nodes: a node that held its output's node would keep itself alive
        held = [ref.bare() for ref in saved]
        return Node(self._age, [ref.node for ref in inputs], held, backward, holds=holds_weight or bool(held))

    def op(
        self,
        inputs: Sequence[Ref],
        elements: int,
        width: int,
        *,
        saved: Sequence[Ref] = (),
        backward: Backward | None = None,
        holds_weight: bool = False,
        holds_output: bool = False,
        trains: bool = False,
    ) -> Ref:
        """The output of an operation: fresh storage, and a node where an input has a gradient or a weight `trains`.
        Without a `backward` each input's gradient is a fresh tensor of its size. `holds_weight`: a parameter is held
        too, which takes no bytes here."""
        with_node = self.grad and (trains or any(ref.node is not None for ref in inputs))
        # inputs are saved before an operation runs: recomputation can stop there, without this one's output
        if with_node and (saved or holds_weight):
            self.stopped_at = self.meter.peak
        out = self.new(elements, width)
        if with_node:
            out.node = self.node(inputs, saved, backward or fresh(*inputs), holds_weight=holds_weight or holds_output)
            if holds_output:
                out.node.saved.append(out.bare())
                self.stopped_at = self.meter.peak
        return out

    def view(self, ref: Ref, elements: int | None = None) -> Ref:
        """The same storage, seen in another shape."""
        out = Ref(ref.storage, ref.elements if elements is None else elements, ref.width)
        if self.grad and ref.node is not None:
            out.node = self.node((ref,), (), _same)
        return out

    def backward(self, root: Node, grad: Ref) -> None:
        """Run from `root` to the leaves; gradients of leaves are freed as they arrive."""
        waiting, queue = {id(root): [grad]}, [root]
        del grad  # each name that is left alive here would be a gradient that is never freed
        while queue:
            node = heapq.heappop(queue)
            if node.holds and not self.first_use:
                self.first_use = self.meter.live
            (arrived,) = waiting.pop(id(node))  # all its consumers are newer, and so have run
            grads = list(node.backward(self, arrived))
            del arrived
            node.saved.clear()
            for position, target in enumerate(node.inputs):
                incoming, grads[position] = grads[position], None  # out of the list, so that _sum sees who holds it
                if target is None or incoming is None:
                    continue
                if id(target) in waiting:
                    self._sum(waiting[id(target)], incoming)
                else:
                    waiting[id(target)] = [incoming]
                    heapq.heappush(queue, target)
                del incoming

    def _sum(self, slot: list[Ref], added: Ref) -> None:
        """In place, unless something else holds the older gradient, or it is a view: of a matrix product over rows and
        tokens, whose two dimensions are seen as one."""
        if slot[0].storage.handles > 1 or slot[0].is_view:  # can_accumulate_inplace of input_buffer.cpp
            slot[0] = self.new(added.elements, added.width)


def fresh(*inputs: Ref) -> Backward:
    """A separate gradient for each input that has one."""
    sizes = [(ref.elements, ref.width) if ref.node is not None else None for ref in inputs]
    return lambda tape, grad: [None if size is None else tape.new(*size) for size in sizes]


def one_gradient(elements: int, width: int, *, during: int = 0) -> Backward:
    """A separate gradient of this size for the only input; `during`: bytes beside it within the kernel."""

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = tape.new(elements, width)
        tape.meter.touch(during)
        return (out,)

    return backward


def _same(tape: Tape, grad: Ref) -> Grads:
    return (grad,)


def shared(count: int) -> Backward:
    """The incoming gradient itself for each input, as a sum passes it on."""
    return lambda tape, grad: [grad] * count
