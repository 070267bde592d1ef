"""One decoder block as transformers, PEFT and bitsandbytes run it, on sizes: what it keeps, and its peaks.

The functions follow the forward of transformers' decoder blocks (models/*/modeling_*.py), of PEFT's LoRA layers
(peft/tuners/lora/{layer,bnb,dora,variants}.py) and of bitsandbytes' 4-bit product, line by line where lines differ
in bytes. Names of sizes: T tokens, h hidden width, f MLP width, q and kv widths of all query and key heads, a query
heads, S sequence length, B sequences, r LoRA rank, e bytes of a computed element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from sft_play.facts.liger import Replaced
from sft_play.planner.memory import fused
from sft_play.planner.memory.tape import Backward, Grads, Ref, Tape, fresh, shared

AttentionKernel = Literal["flash", "varlen", "efficient", "math", "eager"]
"""varlen: flash attention of padded rows, whose tokens are gathered first and scattered back."""


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: widths, and how it is trained. `rank` 0: no adapter."""

    inputs: int
    outputs: int
    rank: int = 0

    @property
    def elements(self) -> int:
        """Weights of its matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Numbers:
    """Bytes of an element: loaded weights, autocast's dtype (None: no autocast), adapters, optimizer states (None: the
    dtype of their parameter)."""

    weights: int = 2
    autocast: int | None = 2
    adapters: int = 4
    states: int | None = None


@dataclass(frozen=True)
class BlockSpec:
    """A block's structure and how it is trained: everything that its bytes depend on besides the batch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    linears: tuple[tuple[str, LinearSpec], ...]
    """Linear layers by role: q, k, v, o or qkv; gate, up, down or gate_up; latent attention's own."""
    norm: Literal["rms", "gemma", "layer"] = "rms"
    norm_after: bool = False
    parallel: bool = False
    """Attention and MLP read the same norm's output."""
    parallel_norms: bool = False
    qk_norm: bool = False
    rotary: float = 1.0
    """Fraction of a head that is rotated; 0: none."""
    rotary_by_cat: bool = False
    """Rotated and other parts of a head are concatenated."""
    activation: Literal["kernel", "gelu_new"] = "kernel"
    dropout: float = 0.0
    """Dropout of the block's two outputs."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities: eager attention keeps its mask, the fused kernels recompute it."""
    kernel: AttentionKernel = "flash"
    masked: bool = False
    one_by_one: bool = False
    """Each chat is attended to by a call of its own."""
    softcap: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    expert_bias: bool = False
    clamped_gate: bool = False
    """Experts gate as gpt-oss does."""
    routes_in_fp32: bool = False
    """The weights by which experts' outputs are added are fp32."""
    experts_in_turn: bool = False
    """Experts run one after another instead of as one grouped product."""
    attends: bool = True
    full: bool = False
    nf4: bool = False
    lora_dropout: float = 0.0
    dora: bool = False
    casts_inputs: bool = False
    """LoRA layers cast their inputs to the adapters' dtype under autocast too."""
    liger: Replaced | None = None
    """What Liger's kernels replace; None: nothing."""
    numbers: Numbers = field(default_factory=Numbers)


@dataclass(frozen=True)
class BlockBytes:
    """A block's bytes for one batch. The peaks include its input and, in the backward pass, its output's gradient."""

    kept: int
    """Held from the forward to the backward pass, without the block's own input unless an operation holds it."""
    forward: int
    backward: int
    recompute: int
    """The peak of recomputing the forward: it starts when the backward pass first needs what was held, and ends at the
    last tensor that is held."""
    input: int
    """The input's bytes, unless an operation holds it: a checkpoint does."""
    gradients: int
    """Gradients of the block's parameters that stay, where there were none before."""
    rebuilt: int
    """Of the backward peak: the NF4 weight that is dequantised at that moment."""
    width: int
    """Bytes of an element of its output."""
    cast_weights: int
    """Half-precision copies of fp32 parameters that autocast keeps until the forward pass ends."""


class Pass:
    """A forward pass of one block on a tape."""

    def __init__(
        self, tape: Tape, spec: BlockSpec, batch: int, length: int, *, accumulating: bool, training: bool = True
    ) -> None:
        self.tape, self.spec, self.batch, self.length = tape, spec, batch, length
        self.tokens = batch * length
        self.linears = dict(spec.linears)
        self.accumulating, self.training = accumulating, training
        self.gradients: list[Ref] = []
        self.cast: dict[str, Ref] = {}

    # --- elementary operations ---------------------------------------------------------------------------------------
    def to(self, x: Ref, width: int) -> Ref:
        """x in another width; x itself where it has it."""
        return x if x.width == width else self.tape.op((x,), x.elements, width)

    def low(self, x: Ref) -> Ref:
        """x as autocast passes it to a matrix product."""
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

    def _weight_gradient(self, elements: int, width: int) -> None:
        """A parameter's gradient is created: it stays, or is added to the existing one."""
        gradient = self.tape.new(elements, self.spec.numbers.autocast or width)
        if gradient.width != width:
            gradient = self.tape.new(elements, width)
        self.keep_gradient(gradient)

    def keep_gradient(self, gradient: Ref) -> None:
        """The gradient stays where there was none; otherwise it was added, and is freed."""
        if not self.accumulating:
            self.gradients.append(gradient)

    # --- linear layers -----------------------------------------------------------------------------------------------
    def linear(self, x: Ref, role: str) -> Ref:
        """A linear layer with its adapter."""
        spec = self.linears[role]
        if not spec.rank:
            return self._base(x, role, spec)
        return self._with_adapter_on_nf4(x, role, spec) if self.spec.nf4 else self._with_adapter(x, role, spec)

    def _base(self, x: Ref, role: str, spec: LinearSpec) -> Ref:
        if self.spec.nf4:
            return self._nf4(x, spec)
        return self.dense(x, role, spec.inputs, spec.outputs, self.spec.numbers.weights, trained=self.spec.full)

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
                out.is_view = True
            if trained:
                self._weight_gradient(inputs * outputs, width)
            return (out,)

        del weight
        return self.tape.op(
            (x,), rows * outputs, x.width, saved=held, backward=backward, holds_weight=True, trains=trained
        )

    def _cast_weight(self, name: str, elements: int, width: int, *, trained: bool) -> Ref | None:
        low = self.spec.numbers.autocast
        if low is None or low == width:
            return None
        if not trained:
            return self.tape.new(elements, low)
        if name not in self.cast:
            self.cast[name] = self.tape.new(elements, low)
        return self.cast[name]

    def _nf4(self, x: Ref, spec: LinearSpec) -> Ref:
        """bitsandbytes' 4-bit product: the weight is dequantised for each pass, with its fp32 absmax."""
        x, before = self.low(x), x.width
        rebuilt = spec.elements * x.width
        absmax = 4 * math.ceil(spec.elements / 64)
        out_elements = x.elements // spec.inputs * spec.outputs

        def backward(
            tape: Tape, grad: Ref, size: int = x.elements, e: int = x.width, wanted: bool = x.node is not None
        ) -> Grads:
            if not wanted:
                return (None,)
            tape.meter.touch(rebuilt + absmax, rebuilt=rebuilt)
            tape.meter.touch(rebuilt + size * e, rebuilt=rebuilt)
            return (tape.new(size, e),)

        self.tape.meter.touch(rebuilt + 2 * absmax)
        self.tape.meter.touch(rebuilt + out_elements * x.width)
        out = self.tape.op((x,), out_elements, x.width, backward=backward, holds_weight=True)
        return self.to(out, before)

    def _with_adapter(self, x: Ref, role: str, spec: LinearSpec) -> Ref:
        """peft/tuners/lora/layer.py, Linear.forward: the input is cast to the adapter's dtype, once for each target;
        under autocast only where training/adapter_inputs.py leaves it."""
        result = self._base(x, role, spec)
        width = result.width
        if self.spec.numbers.autocast is None or self.spec.casts_inputs or self.spec.dora or self.spec.lora_dropout:
            x = self.to(x, self.spec.numbers.adapters)
        result = self.add(result, self._adapter(x, role, spec, result))
        return self.to(result, width)

    def _with_adapter_on_nf4(self, x: Ref, role: str, spec: LinearSpec) -> Ref:
        """peft/tuners/lora/bnb.py, Linear4bit.forward: the base's result is cloned; no cast under autocast."""
        result = self._base(x, role, spec)
        result = self.tape.op((result,), result.elements, result.width, backward=shared(1))
        width = result.width
        if self.spec.numbers.autocast is None:
            x = self.to(x, self.spec.numbers.adapters)
        output = self._adapter(x, role, spec, result)
        if self.spec.numbers.autocast is None:
            output = self.to(output, width)
        return self.add(result, output)

    def _adapter(self, x: Ref, role: str, spec: LinearSpec, result: Ref) -> Ref:
        if self.spec.dora:
            return self._dora(x, role, spec, result)
        return self.scaled(self._lora(self.drop(x, self.spec.lora_dropout), role, spec))

    def _lora(self, x: Ref, role: str, spec: LinearSpec) -> Ref:
        width = self.spec.numbers.adapters
        low = self.dense(x, f"{role}.A", spec.inputs, spec.rank, width, trained=True)
        return self.dense(low, f"{role}.B", spec.rank, spec.outputs, width, trained=True)

    def _dora(self, x: Ref, role: str, spec: LinearSpec, result: Ref) -> Ref:
        """peft/tuners/lora/dora.py: BA, taken as B(A(identity)), and the plain weight live until the end.

        Without dropout the base's result is reused; with it the base runs again on what dropout left. The magnitude is
        fp32, and so is what it multiplies.
        """
        base = None if self.spec.lora_dropout else result
        x = self.drop(x, self.spec.lora_dropout)
        whole = self._dora_weights(x, spec)
        lora = self._lora(x, role, spec)
        if base is None:
            low = self.low(x)
            plain = self.spec.nf4 or self.spec.numbers.weights != low.width
            held = [self.tape.new(spec.elements, low.width)] if plain else []
            outputs = low.elements // spec.inputs * spec.outputs
            base = self.tape.op((low,), outputs, low.width, saved=held, holds_weight=True)
            del low, held
        less = self._by_magnitude(base)
        more = self.scaled(self._by_magnitude(lora))
        out = self.add(less, more)
        del whole
        return out

    def _dora_weights(self, x: Ref, spec: LinearSpec) -> list[Ref]:
        """The identity (i*i, held by A's product), BA and the plain weight (i*o each, in x's dtype); the norm of
        their sum takes two more."""
        numbers, e = self.spec.numbers, x.width
        low = numbers.autocast or e
        identity = self.tape.new(spec.inputs * spec.inputs, numbers.adapters)
        held = [identity if low == numbers.adapters else self.tape.new(spec.inputs * spec.inputs, low)]
        del identity
        delta = self.tape.new(spec.elements, low)
        held.append(delta if low == e else self.tape.new(spec.elements, e))
        del delta
        if self.spec.nf4 or numbers.weights != e:
            held.append(self.tape.new(spec.elements, e))
        self.tape.meter.touch(2 * spec.elements * e)
        return held

    def _by_magnitude(self, x: Ref) -> Ref:
        """x times the magnitude's row, in fp32: x is held for the magnitude's gradient."""
        size, e, wanted = x.elements, x.width, x.node is not None

        def backward(tape: Tape, grad: Ref) -> Grads:
            tape.meter.touch(4 * size)
            if not wanted:
                return (None,)
            out = tape.new(size, 4)
            return (out if e == 4 else tape.new(size, e),)

        return self.tape.op((x,), size, 4, saved=(x,), backward=backward, trains=True)

    # --- norms -------------------------------------------------------------------------------------------------------
    def norm(self, x: Ref, kind: str = "", *, of_heads: bool = False) -> Ref:
        """A norm over hidden states or heads; RMSNorms compute in fp32, LayerNorm is one kernel."""
        kind, liger = kind or self.spec.norm, self.spec.liger
        if liger is not None and (liger.head_norms or not of_heads):
            rows = x.elements // self.spec.head_dim if of_heads else self.tokens
            return fused.norm(self.tape, x, rows, in_place=liger.in_place, trains=self.spec.full)
        if kind == "layer":
            if self.spec.numbers.autocast is not None:  # in autocast's fp32 list on CUDA
                x = self.to(x, 4)
            return self.tape.op((x,), x.elements, x.width, saved=(x,), trains=self.spec.full)
        wide = self.to(x, 4)
        out = self._normalised(wide)
        del wide
        if kind == "gemma":  # (1 + weight) in fp32, then the input's dtype
            return self.to(self._by_weight(out), x.width)
        return self._by_weight(self.to(out, x.width))

    def _normalised(self, wide: Ref) -> Ref:
        """wide * rsqrt(mean(wide ** 2)): holds `wide`; the square's gradient takes four more of its size."""
        size = wide.elements

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, 4)
            tape.meter.touch(12 * size)  # with `grad`, which the mean's gradient replaces
            return (out,)

        return self.tape.op((wide,), size, 4, saved=(wide,), backward=backward)

    def _by_weight(self, x: Ref) -> Ref:
        """weight * x: x is held where the weight trains."""
        width = max(x.width, self.spec.numbers.weights) if self.spec.norm != "gemma" else x.width
        size, e, full, wanted = x.elements, x.width, self.spec.full, x.node is not None

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, width) if wanted else None
            if full:
                tape.meter.touch(size * width)
            return (out if out is None or width == e else tape.new(size, e),)

        held = (x,) if full else ()
        return self.tape.op((x,), size, width, saved=held, backward=backward, holds_weight=True, trains=full)

    # --- attention ---------------------------------------------------------------------------------------------------
    def attention(self, x: Ref) -> Ref:
        """Self-attention with its projections; latent attention and recurrent mixers by their widths."""
        if not self.spec.attends or "o" not in self.linears:
            return self._by_widths(x, "attention.")
        q, k, v = self._latent(x) if "kv_b" in self.linears else self._query_key_value(x)
        q, k = self._turned(q, k)
        out = self._attend(q, k, v)
        by_cat = self.spec.rotary_by_cat and not self._turns_in_place
        if by_cat and self.spec.kernel == "flash" and not self.spec.one_by_one:  # head by head, as the rotated q is
            out = self.tape.op((out,), out.elements, out.width)
        out = self.linear(out, "o")
        return self.drop(out, self.spec.dropout)

    def _query_key_value(self, x: Ref) -> tuple[Ref, Ref, Ref]:
        spec = self.spec
        q_size, kv_size = spec.heads * spec.head_dim * self.tokens, spec.kv_heads * spec.head_dim * self.tokens
        if "qkv" in self.linears:
            fused = self.linear(x, "qkv")
            q, k, v = self._parts(fused, q_size, kv_size, fused.elements - q_size - kv_size)
        else:
            q, k, v = self.linear(x, "q"), self.linear(x, "k"), self.linear(x, "v")
        if spec.qk_norm:
            kind = "rms" if spec.norm == "layer" else spec.norm
            q = self.norm(q, kind, of_heads=True)
            k = self.norm(k, kind, of_heads=True)
        return q, k, v

    @property
    def _turns_in_place(self) -> bool:
        return self.spec.liger is not None and self.spec.liger.rotation

    def _turned(self, q: Ref, k: Ref) -> tuple[Ref, Ref]:
        """Queries and keys after the rotation."""
        spec = self.spec
        if not spec.rotary:
            return q, k
        if self._turns_in_place:
            copies, by_head = "qkv" in self.linears, spec.kernel in ("eager", "math")
            sums = spec.kernel == "efficient" and spec.heads != spec.kv_heads
            q = fused.rotated(self.tape, q, copies=copies, copies_gradient=by_head)
            return q, fused.rotated(self.tape, k, copies=copies, copies_gradient=by_head or sums)
        q_turned = self._rotated(q)
        k = self._rotated(k)
        return q_turned, k  # the plain q lives until k is turned too, as in apply_rotary_pos_emb

    def _by_widths(self, x: Ref, prefix: str) -> Ref:
        """Layers of an unknown arrangement: each holds its output; the sum has the hidden width."""
        outputs = [
            self.linear(x, role) if spec.inputs == self.spec.hidden else None
            for role, spec in self.linears.items()
            if role.startswith(prefix)
        ]
        produced = [out for out in outputs if out is not None]
        return self.tape.op(produced or (x,), self.tokens * self.spec.hidden, x.width, saved=produced or (x,))

    def _latent(self, x: Ref) -> tuple[Ref, Ref, Ref]:
        """Multi-head latent attention: compressed queries and keys, widened to all heads (deepseek_v3)."""
        spec, heads = self.spec, self.tokens * self.spec.heads
        q = (
            self.linear(self.norm(self.linear(x, "q_a"), "rms"), "q_b")
            if "q_a" in self.linears
            else self.linear(x, "q")
        )
        compressed = self.linear(x, "kv_a")
        wide = self.linear(self.norm(compressed, "rms"), "kv_b")
        k = self.tape.op((wide, compressed), heads * spec.head_dim, wide.width)
        v = self._parts(wide, heads * spec.value_dim)[0]
        return q, k, v

    def _parts(self, x: Ref, *sizes: int) -> list[Ref]:
        """Slices of one storage: each one's gradient is a tensor of the full size."""
        whole, e = x.elements, x.width
        parts = []
        for size in sizes:
            part = Ref(x.storage, size, x.width)
            if self.tape.grad and x.node is not None:
                part.node = self.tape.node((x,), (), lambda tape, grad: (tape.new(whole, e),))
            parts.append(part)
        return parts

    def _rotated(self, x: Ref) -> Ref:
        """x * cos + rotate_half(x) * sin: two more tensors of its size while it runs, forwards and backwards."""
        size, e = x.elements, x.width

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, e)
            tape.meter.touch(2 * size * e)
            return (out,)

        self.tape.meter.touch(3 * size * e)
        return self.tape.op((x,), size, e, backward=backward, holds_weight=True)

    def _attend(self, q: Ref, k: Ref, v: Ref) -> Ref:
        kernel = self.spec.kernel
        q, k, v = (self.low(ref) for ref in (q, k, v))
        if self.spec.one_by_one:
            return self._one_by_one(q, k, v)
        if kernel == "flash":
            return self._flash(q, k, v)
        if kernel == "varlen":
            return self._varlen(q, k, v)
        if kernel == "math":
            return self._math(q, k, v)
        groups = self.spec.heads // self.spec.kv_heads
        if groups > 1:
            k, v = self._repeated(k, groups), self._repeated(v, groups)
        return self._eager(q, k, v) if kernel == "eager" else self._efficient(q, k, v)

    def _repeated(self, x: Ref, groups: int) -> Ref:
        """K or V for all query heads: a copy whose gradient is summed back; of a single head a view is enough."""
        if self.spec.kv_heads == 1 and self.spec.kernel == "efficient":
            out = self.tape.view(x)
            if out.node is not None:
                out.node.backward = fresh(x)
            return out
        return self.tape.op((x,), x.elements * groups, x.width)

    def _one_by_one(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """A call for each chat (training/varlen.py): keys and values of all heads; the calls' outputs are held and
        joined, and so are the gradients of what was divided."""
        groups = self.spec.heads // self.spec.kv_heads
        if groups > 1:
            k, v = (self.tape.op((x,), x.elements * groups, x.width) for x in (k, v))
        parts = []
        for whole in (q, k, v):
            part = self.tape.view(whole)
            if part.node is not None:
                part.node.backward = fresh(whole)
            parts.append(part)
        del q, k, v, whole, part
        is_flash = self.spec.kernel == "flash" and not self.spec.masked
        out = self._flash(*parts) if is_flash else self._efficient(*parts)
        parts.clear()
        return self.tape.op((out,), out.elements, out.width, backward=shared(1))

    def _at_once(self) -> int:
        """Tokens that one call attends to."""
        return self.length if self.spec.one_by_one else self.tokens

    def _flash(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """Flash attention (transformers/cuda/flash_attn): holds q, k, v, its output and a logsumexp in fp32."""
        spec, width, tokens = self.spec, q.width, self._at_once()
        rows = tokens // self.length * spec.heads * up(self.length, 128)
        during = 4 * rows + 4 * rows * up(spec.head_dim, 32)
        if spec.heads != spec.kv_heads and not spec.one_by_one:
            during += 2 * tokens * spec.heads * up(spec.head_dim, 8) * width
        return self._fused(q, k, v, during)

    def _varlen(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """Flash attention on padded rows (transformers, `_upad_input`, `_pad_input`): it holds copies of q, k, v
        without padding and their indices; its output is scattered into a tensor of the rows."""
        places = self.tape.new(self.tokens, 8)
        k, v = self._gathered(k, places), self._gathered(v, places)
        q = self._gathered(q, places)
        out = self._flash(q, k, v)
        return self.tape.op((out,), out.elements, out.width, saved=(places,))

    def _gathered(self, x: Ref, places: Ref) -> Ref:
        """x[places]; the gradient is put back into zeros, by sorted positions (Indexing.cu: four int64 a token)."""
        size, width = x.elements, x.width

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, width)
            tape.meter.touch(4 * 8 * self.tokens)
            return (out,)

        return self.tape.op((x,), size, width, saved=(places,), backward=backward)

    def _efficient(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """Memory-efficient attention: like flash, and also holds the mask as a bias in the compute dtype."""
        spec, at_once = self.spec, self._at_once()
        bias = None
        if spec.masked:
            positions = self.batch * self.length * up(self.length, 8)
            self.tape.meter.touch(positions * (1 + q.width))
            bias = self.tape.new(positions, q.width)
        during = 4 * at_once * spec.heads
        if q.width == 2 and spec.head_dim > 64:
            during += 8 * at_once * spec.heads * up(spec.head_dim, 32)
        return self._fused(q, k, v, during, bias)

    def _fused(self, q: Ref, k: Ref, v: Ref, during: int, bias: Ref | None = None) -> Ref:
        spec = self.spec
        statistics = self.tape.new(self.tokens * spec.heads, 4)
        gradient_of = fresh(q, k, v)

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = gradient_of(tape, grad)
            tape.meter.touch(during)
            return out

        held = [q, k, v, statistics] + ([bias] if bias is not None else [])
        elements = self.tokens * spec.heads * spec.value_dim
        return self.tape.op((q, k, v), elements, q.width, saved=held, backward=backward, holds_output=True)

    def _scores(self) -> int:
        return self.batch * self.spec.heads * self.length * self.length

    def _math(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """PyTorch's math kernel: fp32 throughout, with the full causal mask and scores."""
        spec, width = self.spec, q.width
        q, k, v = self.scaled(self.to(q, 4)), self.to(k, 4), self.to(v, 4)
        groups = spec.heads // spec.kv_heads
        if groups > 1:
            k, v = self._repeated(k, groups), self._repeated(v, groups)
        k = self.scaled(k)
        scores = self.tape.op((q, k), self._scores(), 4, saved=(q, k))
        bias = self.tape.new(self.length**2, 4)
        scores = self.tape.op((scores,), scores.elements, 4, backward=shared(1))
        del bias
        scores = self._softmax(scores)
        return self.to(self._weighted(scores, v), width)

    def _softmax(self, scores: Ref) -> Ref:
        """Holds its output; the backward kernel takes grad * output first (SoftMax.cu)."""
        size = scores.elements

        def backward(tape: Tape, grad: Ref) -> Grads:
            tape.meter.touch(2 * size * 4)
            return (tape.new(size, 4),)

        return self.tape.op((scores,), size, 4, backward=backward, holds_output=True)

    def _weighted(self, scores: Ref, v: Ref) -> Ref:
        elements = self.tokens * self.spec.heads * self.spec.value_dim
        return self.tape.op((scores, v), elements, v.width, saved=(scores, v))

    def _eager(self, q: Ref, k: Ref, v: Ref) -> Ref:
        """eager_attention_forward: S x S scores per head in the compute dtype, probabilities in fp32 and cast."""
        width = q.width
        scores = self.scaled(self.tape.op((q, k), self._scores(), width, saved=(q, k)))
        if self.spec.softcap:
            scores = self.scaled(scores)
            scores = self.tape.op((scores,), scores.elements, width, holds_output=True)
            scores = self.scaled(scores)
        scores = self.tape.op((scores,), scores.elements, width, backward=shared(1))
        if width != 4:
            wide = self.to(scores, 4)
            out = self._softmax(wide)
            del wide
            scores = self.to(out, width)
            del out
        else:
            scores = self._softmax(scores)
        return self._weighted(self.drop(scores, self.spec.attention_dropout), v)

    # --- MLP ---------------------------------------------------------------------------------------------------------
    def mlp(self, x: Ref) -> Ref:
        """The feed-forward part: the dense MLP, or experts beside a shared one."""
        if self.spec.experts:
            routed = self._experts(x)
            return self.add(routed, self._dense_mlp(x)) if "down" in self.linears else routed
        return self._dense_mlp(x)

    def _experts(self, x: Ref) -> Ref:
        """Routed experts, line by line as `grouped_mm_experts_forward` (transformers, integrations/moe.py): each
        token's row once per expert, gate and up in one product, weighted and summed.

        Which expert gets a token does not change these bytes: the rows of all experts are in one tensor. One expert
        after another holds no more, except for gradients of the weights.
        """
        spec, rows = self.spec, self.tokens * self.spec.experts_per_token
        wide = rows * spec.expert_width
        routing = self._routing(x, rows)
        places = self.tape.new(rows, 8)
        gathered = self.tape.op((x,), rows * spec.hidden, x.width, saved=(places,), backward=self._put_back(x, rows))
        both = self._grouped(gathered, "up", spec.hidden, 2 * spec.expert_width)
        bias = self.tape.new(both.elements, both.width) if spec.expert_bias else None
        parts = self._parts(both, wide, wide)
        del both
        inner = self._clamped_gate(parts) if spec.clamped_gate else self._plain_gate(parts)
        out = self._grouped(inner, "down", spec.expert_width, spec.hidden)
        del inner
        if bias is not None:
            bias = self.tape.new(out.elements, out.width)
        weighted = self._weighted_rows(out, routing)
        del out, routing
        ordered = self.tape.op(
            (weighted,), weighted.elements, weighted.width, saved=(places,), backward=self._put_back(weighted, rows)
        )
        del weighted
        size, e = ordered.elements, ordered.width
        # the gradient of a sum is expanded, and copied to be seen as rows
        mixed = self.tape.op((ordered,), x.elements, e, backward=lambda tape, grad: (tape.new(size, e),))
        del ordered, bias, gathered
        return self.to(mixed, x.width)

    def _routing(self, x: Ref, rows: int) -> Ref:
        """Each row's weight: probabilities of all experts in fp32, of which the largest are taken."""
        spec = self.spec
        chances = self.tape.op((x,), self.tokens * spec.experts, 4, holds_output=True)
        return self.tape.op((chances,), rows, 4 if spec.routes_in_fp32 else x.width)

    def _put_back(self, x: Ref, rows: int) -> Backward:
        """The gradient of x[places]: put into zeros, by sorted positions (Indexing.cu: four int64 a row)."""
        size, width = x.elements, x.width

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, width)
            tape.meter.touch(4 * 8 * rows)
            return (out,)

        return backward

    def _grouped(self, x: Ref, name: str, inputs: int, outputs: int) -> Ref:
        """Rows times the matrices of their experts; a trained weight holds its input. fp32 weights are cast to
        autocast's dtype by training/experts.py, and the copy is held for x's gradient."""
        spec, low = self.spec, self.spec.numbers.autocast
        elements, width = spec.experts * inputs * outputs, spec.numbers.weights
        x = self.low(x)
        held = [x] if spec.full else []
        if low is not None and low != width:
            held.append(self.tape.new(elements, low))
        size, e, wanted = x.elements, x.width, x.node is not None

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, e) if wanted else None
            if spec.full and spec.experts_in_turn:  # zeros of the whole tensor, beside the sum of the other experts'
                tape.meter.touch(2 * elements * width)
            if spec.full:
                self._weight_gradient(elements, width)
            return (out,)

        return self.tape.op(
            (x,), x.elements // inputs * outputs, e, saved=held, backward=backward, holds_weight=True, trains=spec.full
        )

    def _plain_gate(self, parts: list[Ref]) -> Ref:
        gate, up = parts
        parts.clear()
        return self.product(self._activated(gate), up)

    def _clamped_gate(self, parts: list[Ref]) -> Ref:
        """gpt-oss: (clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)) (modeling_gpt_oss.py,
        `_apply_gate`)."""
        gate, up = (self.tape.op((part,), part.elements, part.width, saved=(part,)) for part in parts)
        parts.clear()
        share = self.scaled(gate)
        share = self.tape.op((share,), share.elements, share.width, holds_output=True)
        share = self.product(gate, share)
        del gate
        up = self.tape.op((up,), up.elements, up.width, backward=shared(1))
        return self.product(up, share)

    def _weighted_rows(self, out: Ref, routing: Ref) -> Ref:
        """Rows times their weights, in the wider dtype; the weights' gradient is the sum of a product of its size."""
        width = max(out.width, routing.width)
        size, e, rows, of_routing = out.elements, out.width, routing.elements, routing.width

        def backward(tape: Tape, grad: Ref) -> Grads:
            gradient = tape.new(size, width)
            gradient = gradient if e == width else tape.new(size, e)
            tape.meter.touch(size * width)
            return (gradient, tape.new(rows, of_routing))

        return self.tape.op((out, routing), size, width, saved=(out, routing), backward=backward)

    def _dense_mlp(self, x: Ref) -> Ref:
        if "gate_up" in self.linears:
            both = self.linear(x, "gate_up")
            gate, up = self._parts(both, both.elements // 2, both.elements // 2)
            up = self._gated(gate, up)
            return self.drop(self.linear(up, "down"), self.spec.dropout)
        if "gate" in self.linears:
            return self.linear(self._gated_mlp(x), "down")
        if "up" not in self.linears:
            return self._by_widths(x, "mlp.")
        x = self.linear(x, "up")
        x = self._activated(x)
        x = self.linear(x, "down")
        return self.drop(x, self.spec.dropout)

    def _gated_mlp(self, x: Ref) -> Ref:
        if self.spec.liger is not None and self.spec.liger.gate:
            return fused.gated(self.tape, self.linear(x, "gate"), self.linear(x, "up"), copies=False)
        return self.product(self._activated(self.linear(x, "gate")), self.linear(x, "up"))

    def _gated(self, gate: Ref, up: Ref) -> Ref:
        """Two halves of one tensor."""
        if self.spec.liger is not None and self.spec.liger.gate:
            return fused.gated(self.tape, gate, up, copies=True)
        return self.product(up, self._activated(gate))

    def _activated(self, x: Ref) -> Ref:
        if self.spec.activation == "kernel":
            return self.tape.op((x,), x.elements, x.width, saved=(x,))
        return self._gelu_new(x)

    def _gelu_new(self, x: Ref) -> Ref:
        """0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), step by step; autocast takes pow in fp32."""
        wide = x if self.spec.numbers.autocast is None else self.to(x, 4)
        half = self.scaled(x)
        cube = self.scaled(self._cubed(wide))
        del wide
        inner = self.scaled(self.add(x, cube))
        del cube
        inner = self.tape.op((inner,), inner.elements, inner.width, holds_output=True)
        inner = self.tape.op((inner,), inner.elements, inner.width, backward=shared(1))
        return self.product(half, inner)

    def _cubed(self, x: Ref) -> Ref:
        """x ** 3: its gradient takes x ** 2, three times that, and their product."""
        size, width = x.elements, x.width

        def backward(tape: Tape, grad: Ref) -> Grads:
            out = tape.new(size, width)
            tape.meter.touch(2 * size * width)
            return (out,)

        return self.tape.op((x,), size, width, saved=(x,), backward=backward)

    # --- the block ---------------------------------------------------------------------------------------------------
    def block(self, x: Ref) -> Ref:
        """The whole block."""
        spec = self.spec
        if spec.parallel:
            normed = self.norm(x)
            attended = self.attention(normed)
            if spec.parallel_norms:
                normed = self.norm(x)
            return self.add(self.add(attended, self.mlp(normed)), x)
        for part in (self.attention, self.mlp):
            residual = x
            x = part(self.norm(x))
            if spec.norm_after:
                x = self.norm(x)
            x = self.add(residual, x)
        return x


def up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


@lru_cache(maxsize=8192)
def block_bytes(
    spec: BlockSpec, *, batch: int, length: int, width: int, input_has_grad: bool = True, accumulating: bool = False
) -> BlockBytes:
    """What one block takes for `batch` sequences of `length` tokens; its input's elements have `width` bytes."""
    tape = Tape()
    run = Pass(tape, spec, batch, length, accumulating=accumulating)
    size = batch * length * spec.hidden
    x = tape.leaf(size, width) if input_has_grad else tape.new(size, width)
    out = run.block(x)
    forward, stopped = tape.meter.peak, tape.stopped_at
    node, grad_size = out.node, (out.elements, out.width)
    storage = x.storage
    del x, out
    alone = 0 if storage.handles else size * width
    cast = sum(ref.nbytes for ref in run.cast.values())
    run.cast.clear()
    if node is None:
        return BlockBytes(0, forward, 0, 0, 0, 0, 0, grad_size[1], cast)
    kept = tape.meter.live
    grad = tape.new(*grad_size)
    tape.meter.restart()
    tape.backward(node, grad)
    del grad
    recompute = stopped + tape.first_use - kept
    gradients = sum(ref.nbytes for ref in run.gradients)
    return BlockBytes(
        kept, forward, tape.meter.peak, recompute, alone, gradients, tape.meter.rebuilt, grad_size[1], cast
    )


@lru_cache(maxsize=8192)
def forward_peak(spec: BlockSpec, *, batch: int, length: int, width: int, training: bool) -> int:
    """The block's peak where nothing is held, including its input: in evaluation, or before a checkpoint."""
    tape = Tape(grad=False)
    run = Pass(tape, spec, batch, length, accumulating=False, training=training)
    x = tape.new(batch * length * spec.hidden, width)
    run.block(x)
    return tape.meter.peak
