"""The operations of a block's forward pass on sizes: each one's output, and what it holds for the backward pass.

Names of sizes here and beside: T tokens, h hidden width, f MLP width, q and kv widths of all query and key heads, a
query heads, S sequence length, B sequences, r LoRA rank, e bytes of a computed element.

Live bytes follow the lifetime of Python's names, as they do in PyTorch: a `TensorRef` that a local name, a list or a
closure still has is a tensor that is still allocated. So the order of lines, each `del` and each reused name stand as
they do in the model's own forward, and closures of a backward pass take numbers, never a `TensorRef`, unless held.
"""

from __future__ import annotations

from sft_play.planner.kernels import MAX_MULTIPROCESSORS
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import (
    BackwardFormula,
    Grads,
    Tape,
    TensorRef,
    separate_gradients,
    shared_gradient,
    single_gradient,
)


class ForwardPass:
    """A forward pass of one block on a tape; `gradients` are those of parameters that stay after the backward pass,
    `cast_weights` autocast's copies of trained fp32 weights, by the name of the layer."""

    def __init__(
        self, tape: Tape, spec: BlockSpec, batch: int, length: int, *, is_accumulating: bool, training: bool = True
    ) -> None:
        self.tape, self.spec, self.batch, self.length = tape, spec, batch, length
        self.tokens = batch * length
        self.linears = dict(spec.linears)
        self.is_accumulating, self.training = is_accumulating, training
        self.gradients: list[TensorRef] = []
        self.cast_weights: dict[str, TensorRef] = {}

    def to(self, x: TensorRef, itemsize: int) -> TensorRef:
        """x cast to `width` bytes an element; x itself where it has them."""
        return x if x.itemsize == itemsize else self.tape.op((x,), x.elements, itemsize)

    def to_autocast(self, x: TensorRef) -> TensorRef:
        """x in the dtype in which autocast runs matrix products."""
        return x if self.spec.element_bytes.autocast is None else self.to(x, self.spec.element_bytes.autocast)

    def add(self, a: TensorRef, b: TensorRef) -> TensorRef:
        """a + b: both get the incoming gradient itself."""
        has_same_itemsize = a.itemsize == b.itemsize
        return self.tape.op(
            (a, b), a.elements, max(a.itemsize, b.itemsize), backward=shared_gradient(2) if has_same_itemsize else None
        )

    def scale(self, x: TensorRef) -> TensorRef:
        """x times a number: nothing is held."""
        return self.tape.op((x,), x.elements, x.itemsize)

    def multiply(self, a: TensorRef, b: TensorRef) -> TensorRef:
        """a * b: each is held for the other's gradient; gradients are made in the wider dtype, then cast."""
        saved = [ref for ref, other in ((a, b), (b, a)) if other.node is not None]
        itemsize = max(a.itemsize, b.itemsize)
        cast_bytes = a.elements * itemsize if a.itemsize != b.itemsize else 0
        make_gradients = separate_gradients(a, b)

        def backward(tape: Tape, grad: TensorRef) -> Grads:
            gradients = make_gradients(tape, grad)
            if cast_bytes:
                tape.meter.add_transient(cast_bytes)
            return gradients

        return self.tape.op((a, b), a.elements, itemsize, saved=saved, backward=backward)

    def dropout(self, x: TensorRef, probability: float) -> TensorRef:
        """Dropout: a mask of one byte an element is held."""
        if not probability or not self.training:
            return x
        mask = self.tape.new(x.elements, 1)
        return self.tape.op((x,), x.elements, x.itemsize, saved=(mask,))

    def create_weight_gradient(self, elements: int, itemsize: int) -> None:
        """Create a parameter's gradient: it stays, or is added to an older one."""
        gradient = self.tape.new(elements, self.spec.element_bytes.autocast or itemsize)
        if gradient.itemsize != itemsize:  # of the cast copy; the parameter's own is made from it
            gradient = self.tape.new(elements, itemsize)
        self.keep_gradient(gradient)

    def keep_gradient(self, gradient: TensorRef) -> None:
        """The gradient stays where there was none; otherwise it is added to the older one, and freed."""
        if not self.is_accumulating:
            self.gradients.append(gradient)

    def dense(self, x: TensorRef, name: str, inputs: int, outputs: int, itemsize: int, *, trainable: bool) -> TensorRef:
        """x @ W: a trained weight holds its input; autocast's copy of an fp32 weight is held for x's gradient."""
        x = self.to_autocast(x)
        saved = [x] if trainable else []
        weight = self._autocast_weight(name, inputs * outputs, itemsize, trainable=trainable)
        if weight is not None:
            saved.append(weight)
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
                out.is_view = True  # nn.Linear multiplies (B*S, h) and views the result as (B, S, h)
            if trainable:
                self.create_weight_gradient(inputs * outputs, itemsize)
            return (out,)

        del weight  # `saved` has it, or autocast's cache
        return self.tape.op(
            (x,), rows * outputs, x.itemsize, saved=saved, backward=backward, holds_weight=True, trains_weight=trainable
        )

    def _autocast_weight(self, name: str, elements: int, itemsize: int, *, trainable: bool) -> TensorRef | None:
        autocast_itemsize = self.spec.element_bytes.autocast
        if autocast_itemsize is None or autocast_itemsize == itemsize:
            return None
        # autocast caches casts of leaves that require a gradient, and no others (autocast_mode.cpp, cached_cast)
        if not trainable:
            return self.tape.new(elements, autocast_itemsize)
        if name not in self.cast_weights:
            self.cast_weights[name] = self.tape.new(elements, autocast_itemsize)
        return self.cast_weights[name]

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
        """The gradient of x[indices]: put into zeros, by sorted positions (Indexing.cu: four int64 for each row)."""
        return single_gradient(x.elements, x.itemsize, transient=4 * 8 * rows)


def round_up(size: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-size // multiple) * multiple


# --- Liger's kernels --------------------------------------------------------------------------------------------------
# After liger-kernel 0.8.5, liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py: autograd functions of their own, which
# need contiguous inputs and copy others.
def liger_norm(tape: Tape, x: TensorRef, rows: int, *, in_place: bool, trains_weight: bool) -> TensorRef:
    """A norm over each of `rows`: holds its input and one fp32 number a row, and gives its input's dtype. Backward the
    gradient of the input replaces that of the output where `in_place`; a trained weight's is summed from an fp32 row of
    each multiprocessor."""
    size, e, needs_gradient = x.elements, x.itemsize, x.node is not None
    statistics = tape.new(rows, 4)

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        out = (grad if in_place else tape.new(size, e)) if needs_gradient or not in_place else None
        if trains_weight:
            tape.meter.add_transient(4 * MAX_MULTIPROCESSORS * (size // rows))
        return (out if needs_gradient else None,)

    return tape.op(
        (x,), size, e, saved=(x, statistics), backward=backward, holds_weight=True, trains_weight=trains_weight
    )


def liger_gate(tape: Tape, gate: TensorRef, up: TensorRef, *, copies_inputs: bool) -> TensorRef:
    """activation(gate) * up: holds both, or contiguous copies of them, over which their gradients are written."""
    saved = [tape.new(ref.elements, ref.itemsize) if copies_inputs else ref.detach() for ref in (gate, up)]
    size, e = gate.elements, gate.itemsize

    def backward(tape: Tape, grad: TensorRef) -> Grads:
        gradients = tuple(saved)
        saved.clear()
        return gradients

    return tape.op((gate, up), size, e, backward=backward, holds_weight=True)


def liger_rotation(tape: Tape, x: TensorRef, *, copies_input: bool, copies_gradient: bool) -> TensorRef:
    """x rotated where it lies, or in a contiguous copy; its gradient likewise. Sines and cosines are shared."""
    out = tape.new(x.elements, x.itemsize) if copies_input else TensorRef(x.storage, x.elements, x.itemsize)
    backward: BackwardFormula = separate_gradients(x) if copies_gradient else lambda tape, grad: (grad,)
    if tape.grad_enabled and x.node is not None:
        out.node = tape.node((x,), (), backward, holds_weight=True)
    return out
