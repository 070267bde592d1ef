"""What a pass does beside its matrix products: bytes that it moves and operators that start a
kernel, of one block on average; and the seconds of a pass on the card and on the host.

Counted on the class's own blocks where a plan traces (`trace.pass_work`), else by the widths of the
block: the numbers below are those that were counted for Llama and Qwen3, solved for each width
(torch 2.13, transformers 5.23, peft 0.21.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.models.shape import LayerKind, LinearShape, ModelShape
from sft_play.planner.kernels import ReplacedOperations, groups_adapters
from sft_play.planner.memory.model_states import block_adapter_params
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.memory.structure import is_target
from sft_play.planner.precision import DTYPE_BYTES, Precision


@dataclass(frozen=True)
class DirectionWork:
    """A block's forward or backward pass beside its products: bytes for each token, bytes whatever
    the tokens (casts of weights), and operators that start a kernel, products included."""

    token_bytes: float = 0.0
    fixed_bytes: float = 0.0
    operators: float = 0.0

    def plus(self, other: DirectionWork, *, times: float = 1.0) -> DirectionWork:
        """This work, and the other one so many times."""
        return DirectionWork(
            self.token_bytes + times * other.token_bytes,
            self.fixed_bytes + times * other.fixed_bytes,
            self.operators + times * other.operators,
        )


@dataclass(frozen=True)
class PassWork:
    """The work of one block forwards and backwards, the mean over a model's blocks."""

    forward: DirectionWork = DirectionWork()
    backward: DirectionWork = DirectionWork()

    def plus(self, other: PassWork, *, times: float = 1.0) -> PassWork:
        """This work, and the other one so many times."""
        return PassWork(
            self.forward.plus(other.forward, times=times),
            self.backward.plus(other.backward, times=times),
        )


@dataclass(frozen=True)
class CountedWork:
    """The same blocks as their plain code, and compiled: each group of operators between products
    reads what it needs once and writes what others read."""

    plain: PassWork
    compiled: PassWork

    def with_operators(self, count: int) -> CountedWork:
        """The same with `count` more operators in each direction, which a count does not see."""
        more = PassWork(DirectionWork(operators=count), DirectionWork(operators=count))
        return CountedWork(self.plain.plus(more), self.compiled.plus(more))


def mean_work(works: Iterable[tuple[CountedWork, float]]) -> CountedWork:
    """The mean of blocks, each with its share of a model's."""
    plain, compiled = PassWork(), PassWork()
    for work, share in works:
        plain = plain.plus(work.plain, times=share)
        compiled = compiled.plus(work.compiled, times=share)
    return CountedWork(plain, compiled)


# Counts a class's own blocks: `ModelShape.pass_meter`; None where it cannot.
PassMeter = Callable[[RunConfig, ModelShape, Precision, Step], CountedWork | None]


def find_pass_work(
    config: RunConfig,
    shape: ModelShape,
    precision: Precision,
    step: Step,
    *,
    liger: ReplacedOperations | None = None,
) -> PassWork:
    """The work of an average block as the run computes it: counted where the shape has a meter that
    can, else by its widths. `liger`: what Liger's kernels replace; compiled code needs none."""
    work = None
    if shape.pass_meter is not None:
        work = shape.pass_meter(config, shape, precision, step)
    if work is None:
        work = estimate_pass_work(config, shape, precision, step)
    if config.train.compile is True:
        return work.compiled
    if liger is None:
        return work.plain
    return apply_liger(work.plain, shape, liger, half=precision.compute != "float32")


# --- by widths ------------------------------------------------------------------------------------
# How a block computes. half: its states are in 16 bits. wide: weights that train in fp32 under
# autocast, so that states between products are fp32 and each product casts. single: all in fp32.
Precisions = Literal["half", "wide", "single"]
# Bytes that are moved for each element of a unit, forwards and backwards: a norm of the hidden
# width or of heads, `hidden` for sums of residuals and of inputs' gradients, a rotated element of
# queries and keys, an element of an activated gate; the inputs and outputs of layers with adapters;
# rows that are gathered for experts and their gates; scores of eager attention.
_Moves = tuple[float, float]
PLAIN_BYTES: dict[Precisions, dict[str, _Moves]] = {
    "half": {
        "norm": (36, 84), "head_norm": (36, 84), "hidden": (12, 30), "rotation": (20, 32),
        "gate": (10, 18), "adapter_input": (2, 10), "adapter_output": (12, 8), "routed": (11, 25),
        "expert_gate": (14, 37), "score": (30, 40),
    },
    "wide": {
        "norm": (28, 92), "head_norm": (48, 117), "hidden": (50, 102), "rotation": (36, 58),
        "gate": (10, 18), "adapter_input": (2, 10), "adapter_output": (12, 8), "routed": (11, 25),
        "expert_gate": (14, 37), "score": (30, 40),
    },
    "single": {
        "norm": (28, 76), "head_norm": (28, 76), "hidden": (24, 60), "rotation": (48, 68),
        "gate": (20, 36), "adapter_input": (4, 20), "adapter_output": (24, 16), "routed": (22, 50),
        "expert_gate": (28, 74), "score": (40, 60),
    },
}  # fmt: skip
COMPILED_BYTES: dict[Precisions, dict[str, _Moves]] = {
    "half": {
        "norm": (7, 6), "head_norm": (10, 7), "hidden": (12, 22), "rotation": (4, 8),
        "gate": (10, 16), "adapter_input": (2.5, 9.5), "adapter_output": (5.3, 5.5),
        "routed": (4, 7), "expert_gate": (8, 12), "score": (8, 10),
    },
    "wide": {
        "norm": (10, 8), "head_norm": (14, 10), "hidden": (42, 58), "rotation": (4, 8),
        "gate": (10, 16), "adapter_input": (2.5, 9.5), "adapter_output": (5.3, 5.5),
        "routed": (4, 7), "expert_gate": (8, 12), "score": (8, 10),
    },
    "single": {
        "norm": (10, 8), "head_norm": (14, 10), "hidden": (24, 44), "rotation": (14, 20),
        "gate": (20, 32), "adapter_input": (5, 17), "adapter_output": (10, 13), "routed": (8, 14),
        "expert_gate": (16, 24), "score": (16, 20),
    },
}  # fmt: skip
# The same of adapters in groups (training/model/grouped_adapters.py): of each input that a group
# reads, of outputs, and of inputs that further layers of a group share, whose gradients' sum is a
# part of the products.
GROUPED_BYTES: dict[Precisions, dict[str, _Moves]] = {
    "half": {"adapter_input": (2, 6), "adapter_output": (4, 4), "shared_input": (0, -6)},
    "single": {"adapter_input": (4, 12), "adapter_output": (8, 8), "shared_input": (0, -12)},
}
# Layers that read one input, by the last part of their names.
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# The same of Liger's kernels, by bytes of a computed element: each reads its inputs and writes its
# results (liger-kernel's ops/rms_norm.py, rope.py, swiglu.py).
LIGER_MOVES = {"norm": (2, 3), "head_norm": (2, 3), "rotation": (2, 2), "gate": (3, 5)}
# A norm's weight that trains has a gradient of its own.
NORM_GRADIENT_BYTES = 8
# Bytes of a weight that is cast for its products: fp32 is read and 16 bits are written; its
# gradient goes back.
CAST_BYTES = 6
# Bytes that PEFT's cast of an adapter's input to fp32 and autocast's back take, in each direction.
ADAPTER_CAST_BYTES = 12
# Bytes of an output that PEFT copies beside weights in 4 bits before it adds to it.
CLONE_BYTES = 4
# Operators that start a kernel, forwards and backwards: of a norm, a rotation of queries and keys,
# a gate, the sums of a block; of an adapter, of its casts, of a weight in 4 bits. A linear layer's
# product is one, backwards two where its weight trains.
NORM_OPERATORS, ROTATION_OPERATORS = (8, 14), (10, 14)
GATE_OPERATORS, SUM_OPERATORS = (2, 3), (2, 7)
ADAPTER_OPERATORS, ADAPTER_CAST_OPERATORS, NF4_OPERATORS = (6, 8), (2, 2), (1, 1)
# Of an adapter in a group, and of a group: its product by all A, their gradient, that of the input
# and the cast; further layers spare the sums of their inputs' gradients.
GROUPED_OPERATORS, GROUP_OPERATORS = (1, 1), (1, 4)
# What routing to experts adds to a block: the choice, sorting rows, gathering and adding them.
EXPERT_OPERATORS = (18, 20)
# Operators of a plain block that Liger's kernels save the host, forwards and backwards together
# halved: a norm takes 286 us where the plain code takes 318, a rotation 274 where it takes 516
# (Liger-Kernel ead96b618e5c, benchmark/data/all_benchmark_data.csv: A100, rows so short that
# starting is all of it). A Triton kernel's own start costs as much as several operators. A gate is
# only given with its products: nothing is taken.
LIGER_SAVED_OPERATORS = {"norm": (1.0, 1.0), "rotation": (5.0, 6.0)}


def estimate_pass_work(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step
) -> CountedWork:
    """The work of an average block by its widths, as it was counted on blocks of Llama and
    Qwen3."""
    return mean_work(
        (_estimate_kind(config, shape, kind, precision, step), kind.count / shape.num_layers)
        for kind in shape.layers
    )


def _estimate_kind(
    config: RunConfig, shape: ModelShape, kind: LayerKind, precision: Precision, step: Step
) -> CountedWork:
    mode, lora = config.tuning.mode, config.tuning.lora
    is_full, is_nf4 = mode == "full", mode == "qlora"
    computes = _precisions(config, precision, step)
    adapted = [one for one in kind.linears if not is_full and is_target(one, lora.target_modules)]
    routed_rows = shape.rows_per_token * (kind.num_experts > 0)
    computes_scores = step.attention == "eager" and kind.attention != "none"
    adapter_input = sum(linear.inputs for linear in adapted)
    widths = unit_widths(shape, kind) | {
        "hidden": shape.hidden_size,
        "adapter_input": adapter_input,
        "adapter_output": sum(linear.outputs for linear in adapted),
        "routed": routed_rows * shape.hidden_size,
        "expert_gate": routed_rows * (kind.expert_width or shape.intermediate_size),
        "score": shape.num_heads * step.length * computes_scores,
    }
    compiled_bytes = _moved_bytes(widths, COMPILED_BYTES[computes])
    plain_moves, groups = PLAIN_BYTES[computes], list[LinearShape]()
    if not step.casts_inputs and groups_adapters(config, precision, step.layout):
        groups = _first_of_groups(adapted)
        plain_moves = plain_moves | GROUPED_BYTES[computes]
        group_input = sum(linear.inputs for linear in groups)
        widths |= {"adapter_input": group_input, "shared_input": adapter_input - group_input}
    plain_bytes = _moved_bytes(widths, plain_moves)
    norm_bytes = NORM_GRADIENT_BYTES * is_full * (widths["norm"] + widths["head_norm"])
    casts = bool(step.casts_inputs or lora.use_dora or lora.dropout) and computes == "half"
    cast_bytes = ADAPTER_CAST_BYTES * casts * adapter_input
    clone_bytes = CLONE_BYTES * widths["adapter_output"] * is_nf4
    fixed_bytes = _weight_cast_bytes(config, kind, computes)
    forward, backward = _operators(
        config, shape, kind, computes, len(adapted), len(groups), casts=casts
    )
    products, backward_products = _products(kind, len(adapted), is_full=is_full)
    quantised = len(kind.packable_sizes) * is_nf4
    return CountedWork(
        PassWork(
            DirectionWork(
                plain_bytes[0] + cast_bytes + clone_bytes * (not groups),
                fixed_bytes * (not groups),
                forward,
            ),
            DirectionWork(plain_bytes[1] + cast_bytes + norm_bytes, fixed_bytes, backward),
        ),
        # each group of operators between products is one kernel
        PassWork(
            DirectionWork(compiled_bytes[0] + clone_bytes, fixed_bytes, 2 * products + quantised),
            DirectionWork(
                compiled_bytes[1],
                fixed_bytes,
                backward_products + len(kind.linears) + 2.3 * len(adapted) + quantised,
            ),
        ),
    )


def _first_of_groups(linears: Sequence[LinearShape]) -> list[LinearShape]:
    # the first layer of each group that reads one input
    by_group: dict[str, LinearShape] = {}
    for linear in linears:
        name = linear.name.rpartition(".")[2]
        shared = next((names[0] for names in SHARED_INPUTS if name in names), linear.name)
        by_group.setdefault(shared, linear)
    return list(by_group.values())


def unit_widths(shape: ModelShape, kind: LayerKind) -> dict[str, float]:
    """Elements of a token that a block norms, rotates and gates."""
    head_width = (shape.q_width + shape.kv_width) * (kind.attention != "none")
    return {
        "norm": shape.norms_per_layer * shape.hidden_size,
        "head_norm": head_width * shape.has_qk_norm,
        # what is not rotated of a head is copied beside it
        "rotation": head_width * (shape.rotary_dim > 0),
        "gate": kind.mlp_width,
    }


def _precisions(config: RunConfig, precision: Precision, step: Step) -> Precisions:
    if precision.compute == "float32":
        return "single"
    keeps_fp32 = config.tuning.mode == "full" and DTYPE_BYTES[precision.load] == 4
    # FSDP gathers, and DeepSpeed holds, 16-bit copies
    return "wide" if keeps_fp32 and not step.layout.shards_states else "half"


def _moved_bytes(widths: dict[str, float], moves: dict[str, _Moves]) -> _Moves:
    forward, backward = (
        sum(widths[unit] * unit_bytes[direction] for unit, unit_bytes in moves.items())
        for direction in (0, 1)
    )
    return forward, backward


def _weight_cast_bytes(config: RunConfig, kind: LayerKind, computes: Precisions) -> float:
    if computes == "wide":
        return CAST_BYTES * float(kind.linear_weights + kind.expert_params)
    if computes == "half" and config.tuning.mode != "full":
        return CAST_BYTES * float(block_adapter_params(kind, config.tuning.lora))
    return 0.0


def _operators(
    config: RunConfig,
    shape: ModelShape,
    kind: LayerKind,
    computes: Precisions,
    adapters: int,
    groups: int,
    *,
    casts: bool,
) -> _Moves:
    is_full, is_nf4 = config.tuning.mode == "full", config.tuning.mode == "qlora"
    has_attention = kind.attention != "none"
    norms = shape.norms_per_layer + 2 * (shape.has_qk_norm and has_attention)
    counts = {
        NORM_OPERATORS: norms,
        ROTATION_OPERATORS: has_attention and shape.rotary_dim > 0,
        GATE_OPERATORS: 1,
        SUM_OPERATORS: 1,
        ADAPTER_OPERATORS: adapters * (not groups),
        GROUPED_OPERATORS: adapters * (groups > 0),
        GROUP_OPERATORS: groups,
        EXPERT_OPERATORS: kind.num_experts > 0,
    }
    forward, backward = _products(kind, 0, is_full=is_full)
    for operators, count in counts.items():
        forward += operators[0] * count
        backward += operators[1] * count
    # beside 4 bits PEFT also copies an output
    forward += ADAPTER_CAST_OPERATORS[0] * adapters * (casts + is_nf4 * (0.5 if groups else 1.0))
    backward += ADAPTER_CAST_OPERATORS[1] * adapters * casts
    quantised = len(kind.packable_sizes) * is_nf4
    forward += NF4_OPERATORS[0] * quantised
    backward += NF4_OPERATORS[1] * quantised + 2 * norms * is_full
    if computes == "wide":  # each product's weight and input are cast
        forward += len(kind.linears) + 3
        backward += 2 * len(kind.linears) + 2
    return forward, backward


def _products(kind: LayerKind, adapters: int, *, is_full: bool) -> _Moves:
    attention, grouped = int(kind.attention != "none"), 2 * (kind.num_experts > 0)
    products = len(kind.linears) + grouped
    return products + attention + 2 * adapters, products * (1 + is_full) + attention + 4 * adapters


# --- Liger ----------------------------------------------------------------------------------------
def apply_liger(
    work: PassWork, shape: ModelShape, operations: ReplacedOperations, *, half: bool
) -> PassWork:
    """The work of a plain block with Liger's kernels in place of the operators that they
    replace."""
    itemsize, plain_moves = (2, PLAIN_BYTES["half"]) if half else (4, PLAIN_BYTES["single"])
    replaced = {
        "norm": True,
        # norms of heads are replaced only where the package's function for the class does so
        "head_norm": operations.replaces_head_norms,
        "rotation": operations.replaces_rotation,
        "gate": operations.replaces_gate,
    }
    for kind in shape.layers:
        widths = unit_widths(shape, kind)
        norms = shape.norms_per_layer + 2 * (widths["head_norm"] > 0 and replaced["head_norm"])
        has_rotation = widths["rotation"] > 0 and operations.replaces_rotation
        forward, backward = (
            DirectionWork(
                sum(
                    widths[unit]
                    * (plain_moves[unit][direction] - itemsize * LIGER_MOVES[unit][direction])
                    for unit, applies in replaced.items()
                    if applies
                ),
                0.0,
                norms * LIGER_SAVED_OPERATORS["norm"][direction]
                + has_rotation * LIGER_SAVED_OPERATORS["rotation"][direction],
            )
            for direction in (0, 1)
        )
        work = work.plus(PassWork(forward, backward), times=-kind.count / shape.num_layers)
    return work


# --- seconds --------------------------------------------------------------------------------------
# How much longer the host takes for an operator forwards, where Python is beside it, than
# backwards. Fitted to short steps of Qwen3-4B on an H100 (benchmarks/LOG.md, 2026-12-01). A CPU
# says 1.5 (15.1 against 10.4 us of a block of Qwen3, 16.8 against 10.9 with adapters; two shared
# cores, torch 2.13, one thread, 8 tokens of width 64), with the kernels' own time in both.
FORWARD_OPERATOR_WEIGHT = 2.5
# How much longer a forward pass takes the host where it is computed again: every tensor that it
# saves calls Python (`saved_tensors_hooks`). Checkpointing without reentrant autograd took 1.9
# times the host's time of a pass with adapters, with it 1.45, which would be a weight of 0.7.
RECOMPUTED_WEIGHT = 1.4
# Operators that attention to one more chat takes, where each is a call of its own: 113 of the 848
# us of a block of Llama (2026-11-23, CPU, torch 2.13, one thread, two tokens a chat).
CHAT_OPERATORS = 22.0
# Operators of a pass outside the blocks: embedding, last norm, tiles of the head and their loss.
OUTER_OPERATORS = 60.0
# What the host takes in a step for each tensor that trains, in operators: clipping, the update and
# zeroing its gradient walk through them in Python. On the H100's host above 25 ms a step passed
# beside passes and update, with 504 tensors.
STEP_TENSOR_OPERATORS = 2.2


def host_operators(
    work: PassWork, layers: int, *, recomputed_share: float, chats: float
) -> tuple[float, float]:
    """What the host starts in a pass over all blocks, forwards and backwards, in operators of a
    backward pass: `recomputed_share` of the blocks forwards twice, and attention for `chats` more
    than one call."""
    forward = FORWARD_OPERATOR_WEIGHT * layers * work.forward.operators
    backward = layers * work.backward.operators + RECOMPUTED_WEIGHT * recomputed_share * forward
    others = (OUTER_OPERATORS + layers * CHAT_OPERATORS * chats) / 2
    return forward + others, backward + others


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a micro step, forwards and backwards: the host's, which starts the kernels, and
    the card's, for a pass without tokens and for each token."""

    host_forward_s: float = 0.0
    host_backward_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_token_s: float = 0.0
    backward_token_s: float = 0.0

    @property
    def host_s(self) -> float:
        """Seconds that the host needs for a pass, whatever its tokens."""
        return self.host_forward_s + self.host_backward_s

    @property
    def token_s(self) -> float:
        """Seconds that the card needs for each token."""
        return self.forward_token_s + self.backward_token_s

    def corrected(self, *, host_factor: float, card_factor: float) -> PassTimes:
        """The same with the host's seconds and the card's multiplied."""
        return PassTimes(
            self.host_forward_s * host_factor,
            self.host_backward_s * host_factor,
            self.forward_s * card_factor,
            self.backward_s * card_factor,
            self.forward_token_s * card_factor,
            self.backward_token_s * card_factor,
        )

    def card_seconds(self, tokens: float) -> tuple[float, float]:
        """The card's seconds forwards and backwards."""
        return (
            self.forward_s + self.forward_token_s * tokens,
            self.backward_s + self.backward_token_s * tokens,
        )

    def seconds(self, tokens: float) -> float:
        """Seconds of a pass: the longer of host and card, since starting runs ahead of the card;
        but the card begins the backward pass no earlier than the host has started all of the
        forward pass."""
        forward_s, backward_s = self.card_seconds(tokens)
        return max(self.host_s, self.host_forward_s + backward_s, forward_s + backward_s)

    def card_factor(self, tokens: float, seconds: float) -> float | None:
        """How many times as long the card takes as these times say, by a measured pass; None where
        the host alone explains it. The inverse of `seconds`."""
        if seconds <= self.host_s:
            return None
        forward_s, backward_s = self.card_seconds(tokens)
        return min(
            (seconds - self.host_forward_s) / max(1e-12, backward_s),
            seconds / max(1e-12, forward_s + backward_s),
        )
