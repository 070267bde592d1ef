"""Autograd on sizes: which bytes a forward and a backward pass hold, without a tensor.

The tape and its storages, and the operations that a block is made of: `ForwardPass`, Liger's
kernels, norms, and linear layers with adapters.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from sft_play.planner.kernels import MAX_MULTIPROCESSORS
from sft_play.planner.memory.structure import NF4_BLOCK, BlockSpec, LinearSpec, segment_remainder

# A `TensorRef` is a handle on a storage, as a tensor is in PyTorch: the storage is freed with its
# last handle, so code that follows a model's forward line by line has the same live bytes at each
# line. What a backward formula needs is held by its node (derivatives.yaml of PyTorch says what
# each formula needs); nodes run from the newest to the oldest, free what they held, and sum
# gradients in place where nothing else holds the older one, as torch/csrc/autograd/engine.cpp and
# input_buffer.cpp do.


class ByteMeter:
    """Bytes live now, and their peak."""

    __slots__ = ("dequantised", "live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        # Of the peak: bytes of a weight dequantised at that moment.
        self.dequantised = 0

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
    """A handle on a storage: `elements` of `itemsize` bytes each, and the node that made it, if it
    has a gradient."""

    __slots__ = ("elements", "is_view", "itemsize", "node", "storage")

    def __init__(
        self, storage: _Storage, elements: int, itemsize: int, node: Node | None = None
    ) -> None:
        self.storage, self.elements, self.itemsize, self.node = storage, elements, itemsize, node
        self.is_view = False
        storage.handles += 1

    def __del__(self) -> None:
        # CPython calls this with the last reference, at once: the model is that a tensor dies with
        # its last name
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
        # The peak when the last tensor was held: recomputation ends there
        # (torch/utils/checkpoint.py).
        self.peak_at_last_save = 0
        # Live bytes when a node first needed what was held: recomputation starts there.
        self.live_at_first_use = 0
        self._sequence_number = 0

    def new(self, elements: int, itemsize: int) -> TensorRef:
        """Fresh storage without a gradient."""
        return TensorRef(_Storage(self.meter, elements * itemsize), elements, itemsize)

    def cast(self, ref: TensorRef, itemsize: int) -> TensorRef:
        """Storage of this width without a gradient: `ref` itself if it has it, else fresh."""
        return ref if ref.itemsize == itemsize else self.new(ref.elements, itemsize)

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
        """The output of an operation: fresh storage, and a node where an input has a gradient or a
        weight trains. Without a `backward` each input's gradient is a fresh tensor of its size.
        `holds_weight`: a parameter is held too, which takes no bytes here."""
        needs_node = self.grad_enabled and (
            trains_weight or any(ref.node is not None for ref in inputs)
        )
        # inputs are saved before an operation runs: recomputation can stop there, without this
        # one's output
        if needs_node and (saved or holds_weight):
            self.peak_at_last_save = self.meter.peak
        out = self.new(elements, itemsize)
        if needs_node:
            out.node = self.node(
                inputs,
                saved,
                backward or separate_gradients(*inputs),
                holds_weight=holds_weight or holds_output,
            )
            if holds_output:
                out.node.saved.append(out.detach())
                self.peak_at_last_save = self.meter.peak
        return out

    def view(self, ref: TensorRef, elements: int | None = None) -> TensorRef:
        """The same storage, seen in another shape."""
        out = TensorRef(ref.storage, ref.elements if elements is None else elements, ref.itemsize)
        if self.grad_enabled and ref.node is not None:
            out.node = self.node((ref,), (), shared_gradient(1))
        return out

    def backward(self, root: Node, grad: TensorRef) -> None:
        """Run from `root` to the leaves; gradients of leaves are freed as they arrive."""
        pending, queue = {id(root): [grad]}, [root]
        del grad  # each name that is left alive here would be a gradient that is never freed
        while queue:
            node = heapq.heappop(queue)
            if node.has_saved_tensors and not self.live_at_first_use:
                self.live_at_first_use = self.meter.live
            # all its consumers are newer, and so have run
            (output_gradient,) = pending.pop(id(node))
            input_gradients = list(node.backward(self, output_gradient))
            del output_gradient
            node.saved.clear()
            for position, input_node in enumerate(node.inputs):
                # out of the list, so that the storage counts who holds it
                incoming, input_gradients[position] = input_gradients[position], None
                if input_node is None or incoming is None:
                    continue
                key = id(input_node)
                if key not in pending:
                    pending[key] = [incoming]
                    heapq.heappush(queue, input_node)
                # in place, unless something else holds the older gradient (can_accumulate_inplace
                # of input_buffer.cpp), or it is a view: of a matrix product over rows and tokens,
                # whose two dimensions are seen as one
                elif pending[key][0].storage.handles > 1 or pending[key][0].is_view:
                    pending[key][0] = self.new(incoming.elements, incoming.itemsize)
                del incoming


def separate_gradients(*inputs: TensorRef) -> BackwardFormula:
    """A separate gradient for each input that has one."""
    sizes = [(ref.elements, ref.itemsize) if ref.node is not None else None for ref in inputs]
    return lambda tape, grad: [None if size is None else tape.new(*size) for size in sizes]


def single_gradient(elements: int, itemsize: int, *, transient: int = 0) -> BackwardFormula:
    """A separate gradient of this size for the only input; `transient`: bytes beside it within the
    kernel."""

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = tape.new(elements, itemsize)
        tape.meter.add_transient(transient)
        return (out,)

    return backward


def shared_gradient(count: int) -> BackwardFormula:
    """The incoming gradient itself for each input, as a sum passes it on."""
    return lambda tape, grad: [grad] * count


# --------------------------------------------------------------------------------------------------
# The operations of a block's forward pass on sizes: each one's output, and what it holds for the
# backward pass.
#
# Names of sizes here and beside: T tokens, h hidden width, f MLP width, q and kv widths of all
# query and key heads, a query heads, S sequence length, B sequences, r LoRA rank, e bytes of a
# computed element.
#
# Live bytes follow the lifetime of Python's names, as they do in PyTorch: a `TensorRef` that a
# local name, a list or a closure still has is a tensor that is still allocated. So the order of
# lines, each `del` and each reused name stand as they do in the model's own forward, and closures
# of a backward pass take numbers, never a `TensorRef`, unless held.


def round_up(size: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-size // multiple) * multiple


class ForwardPass:
    """A forward pass of one block on a tape. `gradients` has the gradients that stay after the
    backward pass, `cast_weights` autocast's copies of trained fp32 weights by the name of the
    layer."""

    def __init__(
        self,
        tape: Tape,
        spec: BlockSpec,
        batch: int,
        length: int,
        *,
        is_accumulating: bool,
        training: bool = True,
    ) -> None:
        self.tape, self.spec, self.batch, self.length = tape, spec, batch, length
        self.tokens = batch * length
        self.linears = dict(spec.linears)
        self.is_accumulating, self.training = is_accumulating, training
        self.gradients: list[TensorRef] = []
        self.cast_weights: dict[str, TensorRef] = {}

    def to(self, x: TensorRef, itemsize: int) -> TensorRef:
        """x cast to `itemsize` bytes an element; x itself where it has them."""
        return x if x.itemsize == itemsize else self.tape.op((x,), x.elements, itemsize)

    def to_autocast(self, x: TensorRef) -> TensorRef:
        """x in the dtype in which autocast runs matrix products."""
        return (
            x
            if self.spec.element_bytes.autocast is None
            else self.to(x, self.spec.element_bytes.autocast)
        )

    def add(self, a: TensorRef, b: TensorRef) -> TensorRef:
        """a + b: both get the incoming gradient itself."""
        has_same_itemsize = a.itemsize == b.itemsize
        return self.tape.op(
            (a, b),
            a.elements,
            max(a.itemsize, b.itemsize),
            backward=shared_gradient(2) if has_same_itemsize else None,
        )

    def scale(self, x: TensorRef) -> TensorRef:
        """x times a number: nothing is held."""
        return self.tape.op((x,), x.elements, x.itemsize)

    def multiply(self, a: TensorRef, b: TensorRef) -> TensorRef:
        """a * b: each is held for the other's gradient; gradients are made in the wider dtype, then
        cast."""
        saved = [ref for ref, other in ((a, b), (b, a)) if other.node is not None]
        itemsize = max(a.itemsize, b.itemsize)
        cast_bytes = a.elements * itemsize * (a.itemsize != b.itemsize)
        make_gradients = separate_gradients(a, b)

        def backward(tape: Tape, grad: TensorRef) -> Grads:
            gradients = make_gradients(tape, grad)
            if cast_bytes:
                tape.meter.add_transient(cast_bytes)
            return gradients

        return self.tape.op((a, b), a.elements, itemsize, saved=saved, backward=backward)

    def dropout(self, x: TensorRef, probability: float) -> TensorRef:
        """Dropout of x: holds a mask of one byte an element."""
        if not probability or not self.training:
            return x
        return self.tape.op((x,), x.elements, x.itemsize, saved=(self.tape.new(x.elements, 1),))

    def create_weight_gradient(self, elements: int, itemsize: int) -> None:
        """Create a parameter's gradient: it stays, or is added to an older one."""
        # of the cast copy; the parameter's own is made from it
        gradient = self.tape.new(elements, self.spec.element_bytes.autocast or itemsize)
        self.keep_gradient(self.tape.cast(gradient, itemsize))

    def keep_gradient(self, gradient: TensorRef) -> None:
        """The gradient stays where there was none; otherwise it is added to the older one, and
        freed."""
        if not self.is_accumulating:
            self.gradients.append(gradient)

    def dense(
        self, x: TensorRef, name: str, inputs: int, outputs: int, itemsize: int, *, trainable: bool
    ) -> TensorRef:
        """x @ W: a trained weight holds its input; autocast's copy of an fp32 weight is held for
        x's gradient."""
        x = self.to_autocast(x)
        saved = [x] * trainable
        autocast_itemsize = self.spec.element_bytes.autocast
        if autocast_itemsize is not None and autocast_itemsize != itemsize:
            weight = self.cast_weights.get(name) or self.tape.new(
                inputs * outputs, autocast_itemsize
            )
            # autocast caches casts of leaves that require a gradient, and no others
            # (autocast_mode.cpp, cached_cast)
            if trainable:
                self.cast_weights[name] = weight
            saved.append(weight)
            del weight  # `saved` has it, and autocast's cache
        rows = x.elements // inputs

        def backward(
            tape: Tape,
            grad: TensorRef,
            size: int = x.elements,
            e: int = x.itemsize,
            needs_gradient: bool = x.node is not None,
        ) -> Grads:
            out = tape.new(size, e) if needs_gradient else None
            if out is not None:
                # nn.Linear multiplies (B*S, h) and views the result as (B, S, h)
                out.is_view = True
            if trainable:
                self.create_weight_gradient(inputs * outputs, itemsize)
            return (out,)

        return self.tape.op(
            (x,),
            rows * outputs,
            x.itemsize,
            saved=saved,
            backward=backward,
            holds_weight=True,
            trains_weight=trainable,
        )

    def split(self, x: TensorRef, *sizes: int) -> list[TensorRef]:
        """Slices of one storage: each one's gradient is a tensor of the full size."""
        parts = []
        for size in sizes:
            part = TensorRef(x.storage, size, x.itemsize)
            if self.tape.grad_enabled and x.node is not None:
                part.node = self.tape.node((x,), (), single_gradient(x.elements, x.itemsize))
            parts.append(part)
        return parts

    def index_backward(self, x: TensorRef, rows: int) -> BackwardFormula:
        """The gradient of x[indices]: put into zeros, by sorted positions (Indexing.cu: four int64
        for each row)."""
        return single_gradient(x.elements, x.itemsize, transient=4 * 8 * rows)


# --- Liger's kernels ------------------------------------------------------------------------------
# After liger-kernel 0.8.5, liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py: autograd functions of
# their own, which need contiguous inputs and copy others.
def liger_norm(
    tape: Tape, x: TensorRef, rows: int, *, in_place: bool, trains_weight: bool
) -> TensorRef:
    """A norm over each of `rows`: holds its input and one fp32 number a row, and gives its input's
    dtype. Backward the input's gradient replaces the output's if `in_place`; a trained weight's is
    summed from an fp32 row of each multiprocessor."""
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None
    statistics = tape.new(rows, 4)

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = grad if in_place else tape.new(size, e)
        if trains_weight:
            tape.meter.add_transient(4 * MAX_MULTIPROCESSORS * (size // rows))
        return (out if needs_gradient else None,)

    return tape.op(
        (x,),
        size,
        e,
        saved=(x, statistics),
        backward=backward,
        holds_weight=True,
        trains_weight=trains_weight,
    )


def liger_gate(tape: Tape, gate: TensorRef, up: TensorRef, *, copies_inputs: bool) -> TensorRef:
    """activation(gate) * up: holds both, or contiguous copies of them, over which their gradients
    are written."""
    saved = [
        tape.new(ref.elements, ref.itemsize) if copies_inputs else ref.detach()
        for ref in (gate, up)
    ]
    size, e = gate.elements, gate.itemsize

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        gradients = tuple(saved)
        saved.clear()
        return gradients

    return tape.op((gate, up), size, e, backward=backward, holds_weight=True)


def liger_rotation(
    tape: Tape, x: TensorRef, *, copies_input: bool, copies_gradient: bool
) -> TensorRef:
    """x rotated where it lies, or in a contiguous copy; its gradient likewise. Sines and cosines
    are shared."""
    out = (
        tape.new(x.elements, x.itemsize)
        if copies_input
        else TensorRef(x.storage, x.elements, x.itemsize)
    )
    backward: BackwardFormula = (
        separate_gradients(x) if copies_gradient else lambda tape, grad: (grad,)
    )
    if tape.grad_enabled and x.node is not None:
        out.node = tape.node((x,), (), backward, holds_weight=True)
    return out


# --------------------------------------------------------------------------------------------------
# Norms, and linear layers: plain, in NF4, and with the adapter of LoRA or DoRA.


def norm(block: ForwardPass, x: TensorRef, *, is_head_norm: bool = False) -> TensorRef:
    """A norm over hidden states or heads; it is computed in fp32."""
    liger = block.spec.liger
    if liger is not None and (liger.replaces_head_norms or not is_head_norm):
        rows = x.elements // block.spec.head_dim if is_head_norm else block.tokens
        return liger_norm(
            block.tape,
            x,
            rows,
            in_place=liger.writes_in_place,
            trains_weight=block.spec.trains_weights,
        )
    # x * rsqrt(mean(x ** 2)) in fp32, which is held; with the incoming gradient, which the mean's
    # gradient replaces, the square's takes four more of its size
    wide, size = block.to(x, 4), x.elements
    out = block.tape.op(
        (wide,), size, 4, saved=(wide,), backward=single_gradient(size, 4, transient=12 * size)
    )
    del wide
    if block.spec.norm == "gemma":  # in fp32, then the input's dtype
        return block.to(_scale_by_weight(block, out), x.itemsize)
    return _scale_by_weight(block, block.to(out, x.itemsize))


def _scale_by_weight(block: ForwardPass, x: TensorRef) -> TensorRef:
    # type promotion: fp32 weights under autocast make the product fp32; Gemma's weight is cast up
    # to x's fp32
    itemsize = (
        x.itemsize
        if block.spec.norm == "gemma"
        else max(x.itemsize, block.spec.element_bytes.weights)
    )
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None
    trains_weight = block.spec.trains_weights

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = tape.new(size, itemsize) if needs_gradient else None
        if trains_weight:
            tape.meter.add_transient(size * itemsize)
        return (None if out is None else tape.cast(out, e),)

    return block.tape.op(
        (x,),
        size,
        itemsize,
        saved=(x,) * trains_weight,
        backward=backward,
        holds_weight=True,
        trains_weight=trains_weight,
    )


def linear(block: ForwardPass, x: TensorRef, role: str) -> TensorRef:
    """A linear layer with its adapter."""
    spec = block.linears[role]
    if not spec.rank:
        return _base_linear(block, x, role, spec)
    # a layer in 4 bits returns its input's dtype, and states in fp32 leave it to PEFT
    returns_fp32 = block.spec.is_nf4 and x.itemsize > (block.spec.element_bytes.autocast or 4)
    if block.spec.groups_adapters and block.training and not returns_fp32:
        return _grouped_linear(block, x, spec)
    if block.spec.is_nf4:
        return _adapted_nf4_linear(block, x, role, spec)
    # peft/tuners/lora/layer.py, Linear.forward: the input is cast to the adapter's dtype, once for
    # each target; under autocast only where training/model/model_loading.py leaves it
    result = _base_linear(block, x, role, spec)
    itemsize = result.itemsize
    if (
        block.spec.element_bytes.autocast is None
        or block.spec.casts_inputs
        or block.spec.uses_dora
        or block.spec.lora_dropout
    ):
        x = block.to(x, block.spec.element_bytes.adapters)
    # result + lora_B(lora_A(dropout(x))) * scaling: fp32 where adapters are and autocast is not,
    # then back
    result = block.add(result, _adapter_output(block, x, role, spec, result))
    return block.to(result, itemsize)


def _base_linear(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    if block.spec.is_nf4:
        return _nf4_linear(block, x, spec)
    return block.dense(
        x,
        role,
        spec.inputs,
        spec.outputs,
        block.spec.element_bytes.weights,
        trainable=block.spec.trains_weights,
    )


def _nf4_linear(block: ForwardPass, x: TensorRef, spec: LinearSpec) -> TensorRef:
    """bitsandbytes' 4-bit product: the weight is dequantised for each pass, with its fp32
    absmax."""
    x, input_itemsize = block.to_autocast(x), x.itemsize
    dequantised = spec.elements * x.itemsize
    absmax = 4 * math.ceil(spec.elements / NF4_BLOCK)
    out_elements = x.elements // spec.inputs * spec.outputs

    def backward(
        tape: Tape,
        grad: TensorRef,
        size: int = x.elements,
        e: int = x.itemsize,
        needs_gradient: bool = x.node is not None,
    ) -> Grads:
        if not needs_gradient:
            return (None,)
        # saved packed and dequantised again: the backward pass holds no weight of its own
        tape.meter.add_transient(dequantised + absmax, dequantised=dequantised)
        tape.meter.add_transient(dequantised + size * e, dequantised=dequantised)
        return (tape.new(size, e),)

    # double quantisation: absmax is dequantised first, to fp32 (functional.py, dequantize_4bit),
    # and is gone when the product runs
    block.tape.meter.add_transient(dequantised + 2 * absmax)
    block.tape.meter.add_transient(dequantised + out_elements * x.itemsize)
    out = block.tape.op((x,), out_elements, x.itemsize, backward=backward, holds_weight=True)
    return block.to(out, input_itemsize)  # Linear4bit.forward returns its input's dtype


def _grouped_linear(block: ForwardPass, x: TensorRef, spec: LinearSpec) -> TensorRef:
    """A layer of a group (training/model/grouped_adapters.py): the adapter adds to the base's
    output where it lies. Held are x and x A^T; factors are copies that stay."""
    x = block.to_autocast(x)
    size, e, rows = x.elements, x.itemsize, x.elements // spec.inputs
    dequantised, absmax = spec.elements * e * block.spec.is_nf4, 0
    if block.spec.is_nf4:
        absmax = 4 * math.ceil(spec.elements / NF4_BLOCK)
    low_rank = block.tape.new(rows * spec.rank, e)
    block.tape.meter.add_transient(dequantised + 2 * absmax)
    block.tape.meter.add_transient(dequantised + rows * spec.outputs * e)
    adapter_params = spec.rank * (spec.inputs + spec.outputs)
    needs_gradient = x.node is not None

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        low_gradient = tape.new(rows * spec.rank, e)
        factor_gradients = tape.new(adapter_params, e)
        out = None
        if needs_gradient:
            tape.meter.add_transient(dequantised + absmax, dequantised=dequantised)
            out = tape.new(size, e)
            tape.meter.add_transient(dequantised, dequantised=dequantised)
        block.keep_gradient(tape.cast(factor_gradients, block.spec.element_bytes.adapters))
        del low_gradient, factor_gradients
        return (out,)

    return block.tape.op(
        (x,),
        rows * spec.outputs,
        e,
        saved=(x, low_rank),
        backward=backward,
        holds_weight=True,
        trains_weight=True,
    )


def _adapted_nf4_linear(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    """peft/tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned; no cast under
    autocast."""
    result = _base_linear(block, x, role, spec)
    # result.clone()
    result = block.tape.op((result,), result.elements, result.itemsize, backward=shared_gradient(1))
    itemsize = result.itemsize
    if block.spec.element_bytes.autocast is None:
        x = block.to(x, block.spec.element_bytes.adapters)
    output = _adapter_output(block, x, role, spec, result)
    if block.spec.element_bytes.autocast is None:
        output = block.to(output, itemsize)
    return block.add(result, output)


def _adapter_output(
    block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec, result: TensorRef
) -> TensorRef:
    if block.spec.uses_dora:
        return _dora_output(block, x, role, spec, result)
    return block.scale(_lora_output(block, block.dropout(x, block.spec.lora_dropout), role, spec))


def _lora_output(block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec) -> TensorRef:
    """B(A(x)) of LoRA: T x r, then T x outputs. Both factors train, so both of their inputs are
    held."""
    itemsize = block.spec.element_bytes.adapters
    low_rank = block.dense(x, f"{role}.A", spec.inputs, spec.rank, itemsize, trainable=True)
    return block.dense(low_rank, f"{role}.B", spec.rank, spec.outputs, itemsize, trainable=True)


def _dora_output(
    block: ForwardPass, x: TensorRef, role: str, spec: LinearSpec, result: TensorRef
) -> TensorRef:
    """DoRA (peft/tuners/lora/dora.py): BA, taken as B(A(identity)), and the plain weight live until
    the end. With dropout the base runs again on what that left. The magnitude is fp32, and so is
    what it multiplies."""
    base = None if block.spec.lora_dropout else result
    x = block.dropout(x, block.spec.lora_dropout)
    # the identity (i*i, held by A's product), BA and the plain weight (i*o each, as x); their sum's
    # norm: two more
    element_bytes, e = block.spec.element_bytes, x.itemsize
    compute_itemsize = element_bytes.autocast or e
    identity = block.tape.new(spec.inputs * spec.inputs, element_bytes.adapters)
    weights = [block.tape.cast(identity, compute_itemsize)]
    del identity
    delta = block.tape.new(spec.elements, compute_itemsize)
    weights.append(block.tape.cast(delta, e))
    del delta
    if block.spec.is_nf4 or element_bytes.weights != e:
        weights.append(block.tape.new(spec.elements, e))
    block.tape.meter.add_transient(2 * spec.elements * e)
    lora = _lora_output(block, x, role, spec)
    if base is None:
        cast_input = block.to_autocast(x)
        copies_weight = block.spec.is_nf4 or block.spec.element_bytes.weights != cast_input.itemsize
        saved = [block.tape.new(spec.elements, cast_input.itemsize)] if copies_weight else []
        outputs = cast_input.elements // spec.inputs * spec.outputs
        base = block.tape.op(
            (cast_input,), outputs, cast_input.itemsize, saved=saved, holds_weight=True
        )
        del cast_input, saved  # F.linear's own: only its node keeps them
    scaled_base = _scale_by_magnitude(block, base)
    scaled_lora = block.scale(_scale_by_magnitude(block, lora))
    out = block.add(scaled_base, scaled_lora)
    del weights  # locals of PEFT's forward, which live until it returns
    return out


def _scale_by_magnitude(block: ForwardPass, x: TensorRef) -> TensorRef:
    """x times the magnitude's row, in fp32: x is held for the magnitude's gradient."""
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        tape.meter.add_transient(4 * size)
        if not needs_gradient:
            return (None,)
        return (tape.cast(tape.new(size, 4), e),)

    return block.tape.op((x,), size, 4, saved=(x,), backward=backward, trains_weight=True)
