"""The operations of a block's forward pass on sizes: each one's output, and what it holds for the backward pass.

Names of sizes here and beside: T tokens, h hidden width, f MLP width, q and kv widths of all query and key heads, a
query heads, S sequence length, B sequences, r LoRA rank, e bytes of a computed element.

Live bytes follow the lifetime of Python's names, as they do in PyTorch: a `Ref` that a local name, a list or a closure
still has is a tensor that is still allocated. So the order of lines, each `del` and each reused name stand as they do
in the model's own forward, and closures of a backward pass take numbers, never a `Ref`, unless they hold it.
"""

from __future__ import annotations

from sft_play.planner.kernels import MULTIPROCESSORS
from sft_play.planner.memory.structure import BlockSpec
from sft_play.planner.memory.tape import Backward, Grads, Ref, Tape, fresh, one_gradient, shared


class Pass:
    """A forward pass of one block on a tape; `gradients` are those of parameters that stay after the backward pass,
    `cast` autocast's copies of trained fp32 weights, by the name of the layer."""

    def __init__(
        self, tape: Tape, spec: BlockSpec, batch: int, length: int, *, accumulating: bool, training: bool = True
    ) -> None:
        self.tape, self.spec, self.batch, self.length = tape, spec, batch, length
        self.tokens = batch * length
        self.linears = dict(spec.linears)
        self.accumulating, self.training = accumulating, training
        self.gradients: list[Ref] = []
        self.cast: dict[str, Ref] = {}

    def to(self, x: Ref, width: int) -> Ref:
        """x cast to `width` bytes an element; x itself where it has them."""
        return x if x.width == width else self.tape.op((x,), x.elements, width)

    def low(self, x: Ref) -> Ref:
        """x in the dtype in which autocast runs matrix products."""
        return x if self.spec.numbers.autocast is None else self.to(x, self.spec.numbers.autocast)

    def add(self, a: Ref, b: Ref) -> Ref:
        """a + b: both get the incoming gradient itself."""
        same = a.width == b.width
        return self.tape.op((a, b), a.elements, max(a.width, b.width), backward=shared(2) if same else None)

    def scaled(self, x: Ref) -> Ref:
        """x times a number: nothing is held."""
        return self.tape.op((x,), x.elements, x.width)

    def product(self, a: Ref, b: Ref) -> Ref:
        """a * b: each is held for the other's gradient; gradients are made in the wider dtype, then cast."""
        saved = [ref for ref, other in ((a, b), (b, a)) if other.node is not None]
        width = max(a.width, b.width)
        narrow = a.elements * width if a.width != b.width else 0
        gradient_of = fresh(a, b)

        def backward(tape: Tape, grad: Ref) -> Grads:
            gradients = gradient_of(tape, grad)
            if narrow:
                tape.meter.touch(narrow)
            return gradients

        return self.tape.op((a, b), a.elements, width, saved=saved, backward=backward)

    def drop(self, x: Ref, share: float) -> Ref:
        """Dropout: a mask of one byte an element is held."""
        if not share or not self.training:
            return x
        mask = self.tape.new(x.elements, 1)
        return self.tape.op((x,), x.elements, x.width, saved=(mask,))

    def weight_gradient(self, elements: int, width: int) -> None:
        """Create a parameter's gradient: it stays, or is added to an older one."""
        gradient = self.tape.new(elements, self.spec.numbers.autocast or width)
        if gradient.width != width:  # of the cast copy; the parameter's own is made from it
            gradient = self.tape.new(elements, width)
        self.keep_gradient(gradient)

    def keep_gradient(self, gradient: Ref) -> None:
        """The gradient stays where there was none; otherwise it is added to the older one, and freed."""
        if not self.accumulating:
            self.gradients.append(gradient)

    def dense(self, x: Ref, name: str, inputs: int, outputs: int, width: int, *, trained: bool) -> Ref:
        """x @ W: a trained weight holds its input; autocast's copy of an fp32 weight is held for x's gradient."""
        x = self.low(x)
        held = [x] if trained else []
        weight = self._cast_weight(name, inputs * outputs, width, trained=trained)
        if weight is not None:
            held.append(weight)
        rows = x.elements // inputs

        def backward(
            tape: Tape, grad: Ref, size: int = x.elements, e: int = x.width, wanted: bool = x.node is not None
        ) -> Grads:
            out = tape.new(size, e) if wanted else None
            if out is not None:
                out.is_view = True  # nn.Linear multiplies (B*S, h) and views the result as (B, S, h)
            if trained:
                self.weight_gradient(inputs * outputs, width)
            return (out,)

        del weight  # `held` has it, or autocast's cache
        return self.tape.op(
            (x,), rows * outputs, x.width, saved=held, backward=backward, holds_weight=True, trains=trained
        )

    def _cast_weight(self, name: str, elements: int, width: int, *, trained: bool) -> Ref | None:
        low = self.spec.numbers.autocast
        if low is None or low == width:
            return None
        # autocast caches casts of leaves that require a gradient, and no others (autocast_mode.cpp, cached_cast)
        if not trained:
            return self.tape.new(elements, low)
        if name not in self.cast:
            self.cast[name] = self.tape.new(elements, low)
        return self.cast[name]

    def parts(self, x: Ref, *sizes: int) -> list[Ref]:
        """Slices of one storage: each one's gradient is a tensor of the full size."""
        parts = []
        for size in sizes:
            part = Ref(x.storage, size, x.width)
            if self.tape.grad and x.node is not None:
                part.node = self.tape.node((x,), (), one_gradient(x.elements, x.width))
            parts.append(part)
        return parts

    def put_back(self, x: Ref, rows: int) -> Backward:
        """The gradient of x[places]: put into zeros, by sorted positions (Indexing.cu: four int64 for each row)."""
        return one_gradient(x.elements, x.width, during=4 * 8 * rows)


def round_up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


# --- Liger's kernels --------------------------------------------------------------------------------------------------
# After liger-kernel 0.8.5, liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py: autograd functions of their own, which
# need contiguous inputs and copy others.
def liger_norm(tape: Tape, x: Ref, rows: int, *, in_place: bool, trains: bool) -> Ref:
    """A norm over each of `rows`: holds its input and one fp32 number a row, and gives its input's dtype. Backward the
    gradient of the input replaces that of the output where `in_place`; a trained weight's is summed from an fp32 row of
    each multiprocessor."""
    size, e, wanted = x.elements, x.width, x.node is not None
    statistics = tape.new(rows, 4)

    def backward(tape: Tape, grad: Ref) -> Grads:
        out = (grad if in_place else tape.new(size, e)) if wanted or not in_place else None
        if trains:
            tape.meter.touch(4 * MULTIPROCESSORS * (size // rows))
        return (out if wanted else None,)

    return tape.op((x,), size, e, saved=(x, statistics), backward=backward, holds_weight=True, trains=trains)


def liger_gate(tape: Tape, gate: Ref, up: Ref, *, copies: bool) -> Ref:
    """activation(gate) * up: holds both, or contiguous `copies` of them, over which their gradients are written."""
    held = [tape.new(ref.elements, ref.width) if copies else ref.bare() for ref in (gate, up)]
    size, e = gate.elements, gate.width

    def backward(tape: Tape, grad: Ref) -> Grads:
        gradients = tuple(held)
        held.clear()
        return gradients

    return tape.op((gate, up), size, e, backward=backward, holds_weight=True)


def liger_rotation(tape: Tape, x: Ref, *, copies: bool, copies_gradient: bool) -> Ref:
    """x rotated where it lies, or in a contiguous copy; its gradient likewise. Sines and cosines are shared."""
    out = tape.new(x.elements, x.width) if copies else Ref(x.storage, x.elements, x.width)
    backward: Backward = fresh(x) if copies_gradient else lambda tape, grad: (grad,)
    if tape.grad and x.node is not None:
        out.node = tape.node((x,), (), backward, holds_weight=True)
    return out
