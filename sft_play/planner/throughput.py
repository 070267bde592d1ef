"""Predicted speed of a step: a roofline from the catalogue's rates, and earlier measurements on this machine.

A micro-step takes the time of its matrix products (at the share of the peak that such products reach), plus the
traffic of what is not a matrix product, plus the rebuilding of 4-bit weights, plus what starting kernels costs; a
step adds the optimizer's traffic, the communication that is not hidden behind the backward pass, and the wait for the
slowest rank. The constants below are few, named, and the same for every model and GPU of a generation; `make
benchmark-speed` compares them with published speeds, and with how published runs scale from one GPU to several.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from statistics import NormalDist

from sft_play.config.schema import RunConfig
from sft_play.facts.architecture import ModelShape
from sft_play.facts.gpu_catalog import find
from sft_play.facts.hardware import Hardware
from sft_play.planner.memory.model_states import adapter_params
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import BYTES, Precision
from sft_play.planner.traffic import Collective, base_weights, traffic_of

MATRIX_SHARE = {7: 0.32, 8: 0.77, 9: 0.62, 10: 0.60, 12: 0.76}
"""Share of the dense peak that large matrix products reach, by the major compute capability, so that published speeds
come out: fine-tuning on A100s (fms-acceleration, torchtune), fp16 on a T4 (FitCheck), 8B on H200s (torchtitan).
benchmarks/speed.json has the ratios."""
OTHER_MATRIX_SHARE = 0.60
ATTENTION_SHARE = 0.88
"""Share of that rate that attention's products reach, from runs where they are nearly all there is: rows of a million
tokens and more on H100s (https://github.com/huggingface/trl/pull/6846, 6845); benchmarks/speed.json has the ratios."""
BANDWIDTH_SHARE = 0.80
"""Fraction of the memory bandwidth that elementwise kernels reach."""
PASS_OVERHEAD_S = 0.0006
"""Seconds per layer and pass in which the GPU waits for kernel launches and Python: santacoder on an A100 takes 64 ms
more than its tokens explain, 24 layers and four passes (fms-acceleration, 8k against 16k tokens)."""
LINK_SHARE = 0.75
"""Share of the rate of NVLink and of a network that collectives reach (nccl-tests' bus bandwidth against the data
sheet's)."""
PCIE_SHARE = 0.50
"""The same of PCIe, where traffic between cards crosses the host, and its memory where they have no peer access: 35
GB/s on 4 and 28 on 8 RTX 5090 at PCIe 5 x16, 64 GB/s (https://github.com/NVIDIA/nccl/issues/1639)."""
HIDDEN_SHARE = 0.80
"""Fraction of the backward pass behind which gathering and reducing can hide."""
OVERLAP_SHARE = 0.50
"""Share of a collective's time that hides at most. The first gather and the last bucket have nothing to hide behind,
and kernels beside a collective are slower: it takes multiprocessors and memory bandwidth. Together with WAIT_SPREAD
from published scaling, few GPUs against more: benchmarks/scaling.py has the addresses, benchmarks/speed.json the
ratios: 3% of median error over 33 points on NVLink, on PCIe, through the host's memory, and over nodes."""
WAIT_SPREAD = 0.02
"""Standard deviation of a step's duration over ranks, which all wait for the slowest. LoRA, whose gradients are small,
still loses 3.5% from one card to four (Exxact, Llama-3.1-8B under DDP)."""
COLLECTIVE_START_S = 15e-6
"""Seconds to start a collective, times log2 of its ranks: 42 us for 8 bytes over 8 cards
(https://github.com/NVIDIA/nccl/issues/1530)."""
BUCKET_COPIES = 4
"""How often DDP reads or writes every gradient besides sending it: copied into its bucket and back."""
HOST_BANDWIDTH = 60e9
"""Bytes per second that an optimizer on the CPU moves: two to four memory channels."""
PCIE_FASTEST = 64e9
"""Bytes per second one way of PCIe 5 x16, for cards that are not in the catalogue."""
NOMINAL_RATE, NOMINAL_BANDWIDTH, NOMINAL_LINK = 100e12, 1e12, 32e9
"""Stand-ins for unknown rates, to rank candidates; no speed is promised from them."""
CPU_CORE_RATE, CPU_BANDWIDTH = 30e9, 20e9
"""A core's fp32 rate and a socket's memory bandwidth, order of magnitude; only to rank candidates."""


@dataclass(frozen=True)
class Rates:
    """What a rank computes and moves per second; `known` if every rate is from the catalogue or the user."""

    matrix: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int
    known: bool
    share: float
    link_share: float = LINK_SHARE
    """Fraction of the rate of a node's GPU link that collectives reach."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step and their parts; tokens are those of full-length rows over all ranks."""

    step_s: float
    tokens: int
    parts: dict[str, float] = field(default_factory=dict)
    moved_bytes: int = 0
    """Bytes that one rank sends to others in a step."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Bytes of the whole messages that data-parallel ranks exchange in a step, by kind of collective."""
    model_flops: float = 0.0
    """Floating-point operations of the model for one rank's step, without recomputation."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.step_s

    def scaled(self, factor: float) -> Speed:
        """The same with every duration multiplied."""
        parts = {name: seconds * factor for name, seconds in self.parts.items()}
        return dataclasses.replace(self, step_s=self.step_s * factor, parts=parts)


def rates_of(hardware: Hardware, precision: Precision) -> Rates:
    """The rates of the slowest GPU (or of the CPU) at the precision of the run's matrix products."""
    if not hardware.gpus:
        rate = CPU_CORE_RATE * hardware.cpu_cores
        return Rates(rate, CPU_BANDWIDTH, NOMINAL_LINK, NOMINAL_LINK, 1, known=False, share=1.0)
    gpus = hardware.gpus
    peaks = [gpu.rate(precision.compute) for gpu in gpus]
    bandwidths = [gpu.bandwidth for gpu in gpus]
    matrix = min((rate for rate in peaks if rate), default=0.0)
    bandwidth = min((value for value in bandwidths if value), default=0.0)
    majors = {gpu.capability[0] for gpu in gpus if gpu.capability}
    share = min((MATRIX_SHARE.get(major, OTHER_MATRIX_SHARE) for major in majors), default=OTHER_MATRIX_SHARE)
    # GPUs whose known link is no faster than the card's own slot communicate over PCIe
    link, slots = hardware.link_bytes_per_s, [entry.pcie for entry in find(gpus[0].name.split(" MIG ")[0])]
    is_pcie = link is None or link <= max(slots, default=PCIE_FASTEST)
    return Rates(
        matrix or NOMINAL_RATE,
        bandwidth or NOMINAL_BANDWIDTH,
        link or NOMINAL_LINK,
        hardware.network_bytes_per_s or link or NOMINAL_LINK,
        hardware.gpus_per_node,
        known=all(peaks) and all(bandwidths),
        share=share,
        link_share=PCIE_SHARE if is_pcie else LINK_SHARE,
    )


def predict_speed(config: RunConfig, shape: ModelShape, precision: Precision, step: Step, rates: Rates) -> Speed:
    """The predicted duration of one optimizer step of one rank, all its micro-steps."""
    mode, tp = config.tuning.mode, step.layout.tensor_parallel
    layers = shape.num_layers
    again = (layers if step.checkpointed_layers is None else step.checkpointed_layers) / layers
    flops = _flops(config, shape, step, again)
    products = sum(flops.values()) + flops["attention"] * (1 / ATTENTION_SHARE - 1)
    matrix = products / tp / (rates.matrix * rates.share)
    reads = 2 * active_params(shape) / tp  # each pass reads the weights once, whatever the number of tokens
    # forward, backward, and what checkpointing computes again
    passes = 2.0 + again
    traffic = _traffic(config, shape, precision, step) * passes / tp + reads * passes
    moving = traffic / (rates.bandwidth * BANDWIDTH_SHARE)
    dequantise = 0.0
    if mode == "qlora":
        # half a byte read and two written per weight
        dequantise = 2.5 * active_params(shape) * passes / (rates.bandwidth * BANDWIDTH_SHARE)
    starting = PASS_OVERHEAD_S * layers * (passes + 1) * (1.0 if mode == "full" else 1.5)
    micro_s = matrix + moving + dequantise + starting
    optimizer_s, host_s = _optimizer(config, shape, precision, step, rates)
    moved, exposed = _communication(config, shape, precision, step, rates, micro_s)
    if step.offloads:  # each block's input to the host and back, in the stream that computes
        inputs = step.tokens * shape.hidden_size * BYTES[precision.compute] * layers * again
        host_s += 2 * inputs * step.grad_accum / NOMINAL_LINK
    parts = {
        "matrix": matrix * step.grad_accum,
        "memory": moving * step.grad_accum,
        "dequantise": dequantise * step.grad_accum,
        "kernel_starts": starting * step.grad_accum,
        "optimizer": optimizer_s,
        "host": host_s,
        "communication": exposed,
        "waiting": micro_s * step.grad_accum * slowest(step.layout.ranks),
    }
    tokens = step.tokens * step.grad_accum * step.layout.data_parallel * step.layout.context_parallel
    useful = sum(_flops(config, shape, step, 0.0).values()) * step.grad_accum / tp
    collectives = traffic_of(config, shape, precision, step).by_kind(step.grad_accum)
    return Speed(sum(parts.values()), tokens, parts, moved, collectives, useful)


def _flops(config: RunConfig, shape: ModelShape, step: Step, again: float) -> dict[str, float]:
    """Operations of one micro-step: matrix products of the blocks, attention, head; `again`: share recomputed.

    A product of T x k by k x n is 2Tkn; the gradient of its input costs the same, that of its weight the same again
    and only where the weight trains. Attention costs 4q per token and seen key forward (two products) and 2.5 times as
    much backward (FlashAttention-2, https://arxiv.org/abs/2307.08691). TRL's head computes its logits twice.
    """
    tokens, mode = step.tokens, config.tuning.mode
    weight_gradients = 1.0 if mode == "full" else 0.0
    blocks = 2.0 * active_params(shape) * tokens * (2.0 + again + weight_gradients)
    adapters = 0.0 if mode == "full" else 2.0 * adapter_params(shape, config.tuning.lora.r) * tokens * (3.0 + again)
    attention = 4.0 * _attended(shape, step) * shape.q_width * tokens * (3.5 + again)
    head = 2.0 * shape.vocab_size * shape.hidden_size * tokens * (3.0 + weight_gradients)
    return {"blocks": blocks, "adapters": adapters, "attention": attention, "head": head}


def active_params(shape: ModelShape) -> float:
    """Weights of the blocks that a token passes through: only those experts that it is routed to."""
    total = 0.0
    for kind in shape.layers:
        chosen = shape.experts_per_token / kind.num_experts if kind.num_experts else 0.0
        total += kind.count * (kind.linear_weights + chosen * kind.expert_params)
    return total


def _attended(shape: ModelShape, step: Step) -> float:
    """Keys that a query sees on average, summed over the layers; eager attention computes all of them."""
    total, length = 0.0, step.seq_len
    for kind in shape.layers:
        window = min(length, shape.window or length) if kind.attention in ("sliding", "chunked") else length
        seen = window - window * window / (2 * length)
        total += 0.0 if kind.attention == "none" else kind.count * (length if step.attention == "eager" else seen)
    return total


def _traffic(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> float:
    """Bytes that norms, activations, rotations and adapters move in one pass over all layers: each intermediate is
    written once and read about twice."""
    e, h, f = BYTES[precision.compute], shape.hidden_size, shape.intermediate_size
    width = f * max(1, shape.experts_per_token)
    per_token = 14 * e * h + 4 * e * (shape.q_width + shape.kv_width) + 7 * e * width
    if config.tuning.mode != "full":
        inputs, lora = sum(i + o for i, o in shape.linear_shapes.values()), config.tuning.lora
        shared = not (step.casts_inputs or lora.use_dora or lora.dropout or precision.compute == "float32")
        per_token += inputs * (8 if config.tuning.mode == "lora" and not shared else 4)
    return float(per_token * step.tokens * shape.num_layers)


def _optimizer(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step, rates: Rates
) -> tuple[float, float]:
    """Seconds of the update on the GPU, and on the host where the states are kept there."""
    params = shape.params if config.tuning.mode == "full" else adapter_params(shape, config.tuning.lora.r)
    trained = params / (step.layout.shard if step.layout.shards_states else 1)
    trained /= step.layout.tensor_parallel
    as_loaded = config.tuning.mode == "full" and not step.layout.shards_states and precision.updates != "stochastic"
    width = BYTES[precision.load] if as_loaded else 4
    if step.layout.offloads_states:
        # the same seven in fp32 on the host; 16-bit gradients go there, and 16-bit weights come back
        return 0.0, 28.0 * trained / HOST_BANDWIDTH + 4.0 * trained / NOMINAL_LINK
    # AdamW reads weight, gradient and two states, and writes all but the gradient
    return 7.0 * width * trained / (rates.bandwidth * BANDWIDTH_SHARE), 0.0


def _communication(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step, rates: Rates, micro_s: float
) -> tuple[int, float]:
    """Bytes that one rank sends in a step, and the seconds of it that nothing hides: a collective hides behind the
    backward pass of its micro-batch, those after the optimizer's update hide behind nothing."""
    layout, accum = step.layout, step.grad_accum
    width = BYTES[precision.compute]
    hidden_s = HIDDEN_SHARE * micro_s * 2 / 3  # the backward pass takes two thirds of a micro-step
    traffic = traffic_of(config, shape, precision, step)
    moved, exposed = traffic.sent(accum), 0.0
    if layout.gradient_ranks > 1:
        each, last, after = (sum(_seconds(one, rates) for one in part)
                             for part in (traffic.each, traffic.last, traffic.after))  # fmt: skip
        exposed = (accum - 1) * _exposed(each, hidden_s) + _exposed(each + last, hidden_s) + after
        if not layout.shards_states:  # DDP
            reduced = sum(one.bytes * times for one, times in traffic.in_step(accum))
            exposed += BUCKET_COPIES * reduced / (rates.bandwidth * BANDWIDTH_SHARE)
    if layout.offloads_params:
        read = 2 * base_weights(config, shape, width) / layout.tensor_parallel
        exposed += accum * max(0.0, read / NOMINAL_LINK - hidden_s)
    if layout.tensor_parallel > 1:
        inner = _link(layout.tensor_parallel, rates)
        again = 2 if step.checkpointed_layers != 0 else 0
        part = 2 * (layout.tensor_parallel - 1) / layout.tensor_parallel
        calls = shape.num_layers * (4 + again) * accum  # all-reduces: two a block forward, and two backward
        sent = part * step.tokens * shape.hidden_size * width * calls
        moved += sent
        exposed += sent / inner + COLLECTIVE_START_S * math.log2(layout.tensor_parallel) * calls
    if layout.context_parallel > 1:
        ranks, again = layout.context_parallel, 1 if step.checkpointed_layers != 0 else 0
        keys = max(shape.kv_width, ranks * shape.head_dim)  # repeated where there are fewer heads than ranks
        calls = shape.num_layers * (2 + again) * accum  # query, key, value and output are exchanged, and back
        sent = (ranks - 1) / ranks * step.tokens * (2 * shape.q_width + 2 * keys) * width * calls
        moved += sent
        exposed += sent / _link(ranks, rates) + 4 * COLLECTIVE_START_S * math.log2(ranks) * calls
    return int(moved), exposed


def _seconds(one: Collective, rates: Rates) -> float:
    return one.sent / _link(one.span or one.ranks, rates) + COLLECTIVE_START_S * math.log2(one.ranks) * one.times


def _exposed(collective_s: float, hidden_s: float) -> float:
    """Seconds of a collective that `hidden_s` of computation beside it does not hide."""
    return collective_s - min(OVERLAP_SHARE * collective_s, hidden_s)


def slowest(ranks: int) -> float:
    """Share of a step that the mean rank waits for the slowest: the expected largest of `ranks` normal durations
    (Blom's approximation, Statistical Estimates and Transformed Beta-Variables, 1958)."""
    return WAIT_SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def _link(ranks: int, rates: Rates) -> float:
    """Bytes per second that a collective over `ranks` moves per rank: inside a node the link's, over nodes a GPU's
    share of what the node sends."""
    inside = rates.link * rates.link_share
    if ranks <= rates.gpus_per_node:
        return inside
    return min(inside, rates.network / rates.gpus_per_node * LINK_SHARE)


def utilisation(speed: Speed, rates: Rates) -> float | None:
    """Model FLOP utilisation: the model's own operations per second over the peak; None where no peak is known."""
    return speed.model_flops / speed.step_s / rates.matrix if rates.known else None
