"""Predicted speed of a step: a roofline from the catalogue's rates, the communication, the code
that runs, and how far the prediction may be off (`find_speed_error`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.machine.gpu_catalog import find_catalog_entries
from sft_play.machine.hardware import Hardware
from sft_play.machine.software import LINEAR_ATTENTION_PACKAGE
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import AverageMicroSteps
from sft_play.planner.kernels import plan_experts, plan_kernels
from sft_play.planner.memory.model_states import (
    adapter_params,
    streamed_bytes,
    trained_parameters,
    trained_vision_params,
)
from sft_play.planner.memory.step_memory import Step, measure_vision
from sft_play.planner.memory.structure import ElementBytes, is_target
from sft_play.planner.pass_work import (
    STEP_TENSOR_OPERATORS,
    DirectionWork,
    PassTimes,
    PassWork,
    find_pass_work,
    host_operators,
)
from sft_play.planner.precision import DTYPE_BYTES, Precision, gradient_sync
from sft_play.text import MIB

# The communication of an optimizer step, predicted: collectives by kind, with their bytes.
#
# Checked on CPU ranks with torch's profiler (`distributed.profile_communication`), engine by
# engine; a run writes its own count into its folder. Tensor-parallel communication is not
# included.

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
# How often a rank sends its (W-1)/W of a whole message (ring algorithms,
# https://arxiv.org/abs/1910.02054 section 7): an all-reduce is a reduce-scatter and an all-gather.
SENT_SHARES: dict[str, float] = {
    "all_reduce": 2.0,
    "reduce": 1.0,
    "broadcast": 1.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
}
# DDP's buckets (`bucket_cap_mb`), each an all-reduce of its own.
DDP_BUCKET_BYTES = 25 * MIB
# ZeRO-3 keeps a parameter that is used again within this many (`stage3_max_reuse_distance`).
ZERO_REUSE_PARAMS = 1_000_000_000


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind over one group of `ranks`: `message_bytes` of full messages (what
    all ranks have together before, or after), in `calls` calls."""

    kind: CollectiveKind
    message_bytes: float
    ranks: int
    calls: float
    # Ranks that the group's links span, where they are not neighbours: copies are on other nodes.
    spanned_ranks: int = 0

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends to others."""
        return sent_bytes(self.kind, self.message_bytes, self.ranks)


def sent_bytes(kind: str, message_bytes: float, ranks: int) -> float:
    """Bytes that one of the ranks sends for messages of that size; 0 for kinds that send none."""
    return SENT_SHARES.get(kind, 0.0) * message_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class Traffic:
    """The collectives of a step: in each micro-batch, additionally where gradients are reduced
    (`reductions_per_step` of so many micro-batches), and after the optimizer's update."""

    per_micro_batch: tuple[Collective, ...] = ()
    per_reduction: tuple[Collective, ...] = ()
    after_update: tuple[Collective, ...] = ()
    reductions_per_step: Callable[[int], int] = int

    def step_collectives(self, grad_accum: int) -> Iterator[tuple[Collective, int]]:
        """Each collective with how often it runs in a step."""
        yield from ((collective, grad_accum) for collective in self.per_micro_batch)
        yield from (
            (collective, self.reductions_per_step(grad_accum)) for collective in self.per_reduction
        )
        yield from ((collective, 1) for collective in self.after_update)

    def sent_bytes(self, grad_accum: int) -> float:
        """Bytes that one rank sends in a step."""
        return sum(
            collective.sent_bytes * times for collective, times in self.step_collectives(grad_accum)
        )

    def bytes_by_kind(self, grad_accum: int) -> dict[str, int]:
        """Bytes of the full messages of a step, by kind."""
        totals: dict[str, float] = {}
        for collective, times in self.step_collectives(grad_accum):
            totals[collective.kind] = (
                totals.get(collective.kind, 0.0) + collective.message_bytes * times
            )
        return {kind: int(size) for kind, size in totals.items() if size}


def step_traffic(config: RunConfig, shape: ModelShape, precision: Precision, step: Step) -> Traffic:
    """The communication of data-parallel ranks, and among ranks that share rows.

    DDP and ZeRO-1 reduce gradients once per step, unless the run says otherwise, and ZeRO-2 in each
    micro-batch. Both ZeRO stages use all-reduces of full buckets
    (`use_multi_rank_bucket_allreduce`; a rank keeps its shard of the result) and an all-gather of
    the updated weights. FSDP2 gathers every unit for the forward and for the backward pass, the
    last one once; ZeRO-3 keeps what it needs again soon.
    """
    layout, sync = step.layout, gradient_sync(config, precision, step.layout.name)
    # neighbours are of one tensor-parallel group
    ranks, neighbour_ranks = layout.gradient_ranks, layout.tensor_parallel
    if ranks == 1:
        return Traffic()
    trained_params = (
        trained_parameters(config, shape, ElementBytes()).params / layout.tensor_parallel
    )
    gradient_bytes = trained_params * DTYPE_BYTES[sync.reduced_dtype]
    if not layout.shards_params:
        reduction = Collective(
            "all_reduce", gradient_bytes, ranks, math.ceil(gradient_bytes / DDP_BUCKET_BYTES)
        )
        gathers: tuple[Collective, ...] = ()
        if layout.is_zero:
            updated_bytes = trained_params * DTYPE_BYTES[precision.compute]
            calls = math.ceil(updated_bytes / DDP_BUCKET_BYTES)
            gathers = (Collective("all_gather", updated_bytes, ranks, calls),)
        return Traffic((), (reduction,), gathers, sync.reductions_per_step)
    calls = shape.num_layers + 1  # a unit per block, and the tail
    if layout.is_fsdp:
        # all units twice: the first block's backward pass prefetches the embedding, trained or not.
        # Only the tail (last norm and head, with the embedding where it is tied) stays gathered
        # from the forward to the backward pass
        gathered_itemsize = DTYPE_BYTES[sync.gathered_dtype]
        gathered_bytes = (
            2 * _weight_bytes(config, shape, gathered_itemsize)
            - gathered_itemsize * shape.embedding_table_params
        )
    else:
        # all weights, and again for the backward pass those behind which more than
        # ZERO_REUSE_PARAMS lie until then; a checkpointed block larger than half of that releases
        # its first layers before its backward pass. For packed weights DeepSpeed counts bytes
        layers = shape.num_layers
        recomputed_share = step.recomputed_layers(layers) / layers
        counted_params = shape.params - 0.5 * shape.linear_params * (config.tuning.mode == "qlora")
        kept_share = min(1.0, ZERO_REUSE_PARAMS / (2 + recomputed_share) / counted_params)
        block_params = counted_params - (2 - shape.tied) * shape.embedding_table_params
        regathered_share = max(0.0, block_params - layers * ZERO_REUSE_PARAMS / 2) / counted_params
        gathered_bytes = _weight_bytes(config, shape, DTYPE_BYTES[precision.compute])
        gathered_bytes *= 2 - kept_share + recomputed_share * regathered_share
    span, parts = layout.shard * neighbour_ranks, ranks // layout.shard
    weights = Collective(
        "all_gather", gathered_bytes / layout.tensor_parallel, layout.shard, 2 * calls, span
    )
    reductions = [Collective("reduce_scatter", gradient_bytes, layout.shard, calls, span)]
    if parts > 1:  # HSDP: each part is reduced once more, over the groups that hold a copy of it
        reductions.append(
            Collective(
                "all_reduce", gradient_bytes / layout.shard, parts, calls, ranks * neighbour_ranks
            )
        )
    return Traffic((weights,), tuple(reductions), (), sync.reductions_per_step)


def _weight_bytes(
    config: RunConfig, shape: ModelShape, itemsize: int, *, with_adapters: bool = True
) -> float:
    # as they are sent: 4-bit ones packed
    weight_bytes = float(shape.params * itemsize)
    if config.tuning.mode == "qlora":
        weight_bytes = 0.5 * shape.linear_params + itemsize * (shape.params - shape.linear_params)
    if with_adapters and config.tuning.mode != "full":
        weight_bytes += itemsize * trained_parameters(config, shape, ElementBytes()).params
    return weight_bytes


# --------------------------------------------------------------------------------------------------
# Compiled blocks (`train.compile`): what they are refused beside, and the time of compiling. What
# they move and start is counted (`planner.pass_work`). Bytes of memory stay those of the plain
# code, an upper bound: what a compiled block keeps for its backward pass is the choice of
# inductor's partitioner. Blocks of Llama and Qwen3 kept 0.64 to 0.78 of the plain code's bytes on a
# CPU (benchmarks/LOG.md). Published peaks fall by 7% (8B in full on H100s, 82.4 to 77.0 GiB,
# https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md) and
# by 15% with a compiled loss, which is not this one (3B on an A100, 60.0 to 51.0 GiB,
# https://github.com/meta-pytorch/torchtune).

# Seconds of compiling one kind of block: 20 to 29 in full, 47 to 83 with adapters (8B and its loss
# on an A100, https://github.com/meta-pytorch/torchtune/pull/1445, the slower of what was
# published).
COMPILE_S = {"full": 29.0, "lora": 83.0, "qlora": 83.0}
# Seconds of the measurement before it, which compiles two narrow blocks: not published, as two in
# full.
COMPILE_CHECK_S = 20.0


def compile_conflicts(config: RunConfig) -> list[str]:
    """Settings beside which blocks are not compiled, each with what to set instead."""
    train, conflicts = config.train, []
    if train.kernels == "liger":
        conflicts.append("train.kernels=liger (auto: the compiler writes such kernels)")
    if train.gradient_checkpointing == "offload":
        conflicts.append(
            "train.gradient_checkpointing=offload (true: a compiled block moves nothing to RAM)"
        )
    return conflicts


def check_compile_options(config: RunConfig) -> None:
    """Raises ConfigError where compiled blocks are asked for beside settings that exclude them."""
    conflicts = compile_conflicts(config)
    if config.train.compile is True and conflicts:
        raise ConfigError(
            f"train.compile: true does not go together with {' and '.join(conflicts)}; or"
            " train.compile=false"
        )


def estimate_compile_s(config: RunConfig, shape: ModelShape) -> float:
    """Seconds at the start of a run in which blocks are compiled and measured; 0 where they are
    not."""
    # blocks of one kind share their compiled code
    return (
        COMPILE_S[config.tuning.mode] * len(shape.layers) + COMPILE_CHECK_S
        if config.train.compile is True
        else 0.0
    )


def compile_reasons(config: RunConfig, shape: ModelShape) -> list[str]:
    """What the plan assumes of compiled blocks, as a reason."""
    if config.train.compile is not True:
        return []
    return [
        "train.compile: operators between products move what they read and write once; memory is"
        " counted as the plain code's, which takes more; compiling is"
        f" estimated at {estimate_compile_s(config, shape):.0f} s of each start"
    ]


# --------------------------------------------------------------------------------------------------
# Predicted speed of a step: a roofline from the catalogue's rates, and earlier measurements on this
# machine.
#
# A micro-step takes the card the time of its matrix products (at the share of the peak that such
# products reach), plus the traffic of what is not a matrix product, plus the rebuilding of 4-bit
# weights; and the host the time of starting its operators. It takes the longer of the two
# (`PassTimes.seconds`); a step adds the optimizer's traffic, the communication that is not hidden
# behind the backward pass, and the wait for the slowest rank. The constants below are
# few, named, and the same for every model and GPU of a generation; `make benchmark-speed` compares
# them with published speeds, and with how published runs scale from one GPU to several.

# Share of the dense peak that large matrix products reach, by the major compute capability, fitted
# again once everything beside them was counted: 8 and 9 to MPT's, NeMo's, Soup's, Qwen's and
# fms-fsdp's runs on A100s and H100s (mean error by source least at 0.88 to 0.92, and 0.70 to 0.74;
# 2026-12-01); 7 and 12 as before, by fp16 on a T4 (FitCheck) and cards of Exxact. benchmarks/
# speed.json has the ratios.
MATRIX_SHARE = {7: 0.32, 8: 0.90, 9: 0.71, 10: 0.60, 12: 0.76}
OTHER_MATRIX_SHARE = 0.60
ATTENTION_SHARE = {8: 0.57, 9: 0.77}
# Share of that rate that attention's products reach, from runs where they are nearly all there is:
# rows of a million tokens and more on H100s (https://github.com/huggingface/trl/pull/6846, 6845);
# on A100s from rows of 8,192 tokens (Qwen-1.8B and 7B). In operations a second as it was fitted
# when products had a smaller share. benchmarks/speed.json has the ratios.
OTHER_ATTENTION_SHARE = 0.88
# Fraction of the memory bandwidth that elementwise kernels reach.
BANDWIDTH_SHARE = 0.80
# Seconds that a kernel takes the card beside its work: until it fills the card, its last blocks,
# and until the next one begins.
KERNEL_S = 4e-6
# Bytes that TRL's head moves for a token and each word of the vocabulary, forwards and backwards: a
# tile of 16-bit logits is written and read, again backwards, and its gradient too.
HEAD_LOGIT_BYTES = (4, 8)
# Seconds of the host for an operator of a backward pass, where the host was not measured, and the
# quickest and slowest that were seen: 7 (Qwen-1.8B on an A100, LoRA, 125 ms for 24 layers whatever
# the tokens, 2023; 10 if it was checkpointed with reentrant autograd), 9 and 13 (a norm and a
# rotation on an A100's host: Liger-Kernel's benchmark), 22 (a virtual machine with an H100: 8.6 ms
# a layer of Qwen3-4B, LoRA; benchmarks/LOG.md, 2026-11-26).
OPERATOR_S = 10e-6
OPERATOR_RANGE_S = (7e-6, 23e-6)
# Seconds that an expert of a block takes more in each pass when experts run one after another than
# when they are one grouped product: 0.22 to 0.31 ms. Forward passes of Qwen1.5-MoE-A2.7B on an
# A100, 24 blocks of 60 experts, 1 x 16 to 4 x 128 tokens: 270 to 523 ms against 64 to 80
# (https://github.com/huggingface/transformers/pull/42697). The backward pass is not published, and
# counted like a forward pass.
EXPERT_OVERHEAD_S = 0.0003
# How often a block's stacked experts are read or written for the gradient of each expert that runs
# by itself: its gradient is put into zeros of the whole tensor, which are then added to the others'
# sum (autograd's select_backward).
EXPERT_GRADIENT_ACCESSES = 4
# Bytes of traffic per value channel, token and pass that a gated delta rule takes more by
# transformers' own code than by flash-linear-attention. Qwen3.5-9B in full on 8 B200, 24 such
# blocks with 4,096 value channels, 8 x 1,024 tokens a card: 1.22 s a step against 0.70
# (https://github.com/huggingface/transformers/issues/48718), so 1.3 us a token, block and pass. One
# run; on other cards it is scaled by memory bandwidth, since the code works on fp32 chunks.
LINEAR_ATTENTION_BYTES = 2000
# Names of the two among a step's parts.
EXPERTS_PART, LINEAR_ATTENTION_PART = "experts_in_turn", "linear_attention"
# Share of the rate of NVLink and of a network that collectives reach (nccl-tests' bus bandwidth
# against the data sheet's).
LINK_SHARE = 0.75
# The same of PCIe, where traffic between cards crosses the host, and its memory where they have no
# peer access: 35 GB/s on 4 and 28 on 8 RTX 5090 at PCIe 5 x16, 64 GB/s
# (https://github.com/NVIDIA/nccl/issues/1639).
PCIE_SHARE = 0.50
# Fraction of PCIe's rate that copies from pinned RAM to one card reach: 25 GB/s of 32 at PCIe 4 x16
# (NVIDIA's bandwidthTest, many reports); a run measures its own (`machine.host_speed`).
BUS_SHARE = 0.78
# Fraction of the backward pass behind which gathering and reducing can hide.
HIDDEN_SHARE = 0.80
# Share of a collective's time that hides at most. The first gather and the last bucket have nothing
# to hide behind, and kernels beside a collective are slower: it takes multiprocessors and memory
# bandwidth. Together with WAIT_SPREAD from published scaling, few GPUs against more:
# benchmarks/scaling.py has the addresses, benchmarks/speed.json the ratios: 3% of median error over
# 33 points on NVLink, on PCIe, through the host's memory, and over nodes.
OVERLAP_SHARE = 0.50
# Standard deviation of a step's duration over ranks, which all wait for the slowest. LoRA, whose
# gradients are small, still loses 3.5% from one card to four (Exxact, Llama-3.1-8B under DDP).
WAIT_SPREAD = 0.02
# Seconds to start a collective, times log2 of its ranks: 42 us for 8 bytes over 8 cards
# (https://github.com/NVIDIA/nccl/issues/1530).
COLLECTIVE_START_S = 15e-6
# How often DDP reads or writes every gradient besides sending it: copied into its bucket and back.
BUCKET_COPIES = 4
# Bytes per second that an optimizer on the CPU moves: two to four memory channels.
HOST_BANDWIDTH = 60e9
# Bytes per second one way of PCIe 5 x16, for cards that are not in the catalogue.
FASTEST_PCIE = 64e9
# Stand-ins for unknown rates, to rank candidates; no speed is promised from them.
NOMINAL_RATE, NOMINAL_BANDWIDTH, NOMINAL_LINK = 100e12, 1e12, 32e9
# A core's fp32 rate and a socket's memory bandwidth, order of magnitude; only to rank candidates.
CPU_CORE_RATE, CPU_BANDWIDTH = 30e9, 20e9


@dataclass(frozen=True)
class Rates:
    """What a rank computes and moves per second; `is_known` if every rate is from the catalogue or
    the user."""

    matrix_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    gpus_per_node: int
    is_known: bool
    matrix_share: float
    # Fraction of the rate of a node's GPU link that collectives reach.
    link_share: float = LINK_SHARE
    # Fraction of the rate of matrix products that attention reaches.
    attention_share: float = OTHER_ATTENTION_SHARE
    missing_packages: frozenset[str] = frozenset()
    # From RAM to a card, one way.
    bus_bytes_per_s: float = NOMINAL_LINK
    # Seconds that the host takes to start an operator.
    operator_s: float = OPERATOR_S
    # What earlier runs correct of a pass: the host's seconds, and the card's.
    host_factor: float = 1.0
    card_factor: float = 1.0


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step and their parts. Tokens are counted over all ranks without
    padding: of the run's own rows where their lengths are known, else of rows of full length."""

    step_s: float
    tokens: int
    parts: dict[str, float] = field(default_factory=dict)
    # Bytes that one rank sends to others in a step.
    moved_bytes: int = 0
    # Bytes of the whole messages that data-parallel ranks exchange in a step, by kind of
    # collective.
    collectives: dict[str, int] = field(default_factory=dict)
    # Floating-point operations of the model for one rank's step, without recomputation.
    model_flops: float = 0.0
    # Seconds of a micro step by its tokens; None in a plan of an earlier version.
    pass_times: PassTimes | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.step_s

    def scaled(self, factor: float) -> Speed:
        """The same speed with every duration multiplied."""
        return dataclasses.replace(
            self,
            step_s=self.step_s * factor,
            parts={name: seconds * factor for name, seconds in self.parts.items()},
        )


def find_rates(hardware: Hardware, precision: Precision) -> Rates:
    """The rates of the slowest GPU (or of the CPU) at the precision of the run's matrix
    products."""
    if not hardware.gpus:
        rate = CPU_CORE_RATE * hardware.cpu_cores
        return Rates(
            rate, CPU_BANDWIDTH, NOMINAL_LINK, NOMINAL_LINK, 1, is_known=False, matrix_share=1.0
        )
    gpus = hardware.gpus
    peak_rates = [gpu.flops(precision.compute) for gpu in gpus]
    bandwidths = [gpu.bandwidth for gpu in gpus]
    matrix_rate = min((rate for rate in peak_rates if rate), default=0.0)
    bandwidth = min((value for value in bandwidths if value), default=0.0)
    majors = {gpu.capability[0] for gpu in gpus if gpu.capability}
    matrix_share = min(
        (MATRIX_SHARE.get(major, OTHER_MATRIX_SHARE) for major in majors),
        default=OTHER_MATRIX_SHARE,
    )
    attention_shares = (ATTENTION_SHARE.get(major, OTHER_ATTENTION_SHARE) for major in majors)
    # GPUs whose known link is no faster than the card's own slot communicate over PCIe
    link = hardware.link_bytes_per_s
    pcie_slots = [entry.pcie for entry in find_catalog_entries(gpus[0].name.split(" MIG ")[0])]
    is_pcie = link is None or link <= max(pcie_slots, default=FASTEST_PCIE)
    return Rates(
        matrix_rate or NOMINAL_RATE,
        bandwidth or NOMINAL_BANDWIDTH,
        link or NOMINAL_LINK,
        hardware.network_bytes_per_s or link or NOMINAL_LINK,
        hardware.ranks_per_node,
        is_known=all(peak_rates) and all(bandwidths),
        matrix_share=matrix_share,
        link_share=PCIE_SHARE if is_pcie else LINK_SHARE,
        bus_bytes_per_s=BUS_SHARE * min(pcie_slots, default=NOMINAL_LINK),
        attention_share=min(attention_shares, default=OTHER_ATTENTION_SHARE),
    )


def predict_speed(
    config: RunConfig,
    shape: ModelShape,
    precision: Precision,
    step: Step,
    rates: Rates,
    *,
    micro_steps: AverageMicroSteps | None = None,
) -> Speed:
    """The predicted duration of one optimizer step of one rank; `micro_steps`: what an average step
    of the run's own rows takes, None for rows of full length."""
    roofline = _Roofline(config, shape, precision, step, rates)
    return roofline.predict(micro_steps or roofline.full_rows)


def micro_step_overhead_tokens(
    config: RunConfig, shape: ModelShape, precision: Precision, step: Step, rates: Rates
) -> int:
    """What one more micro step over the same tokens costs, in tokens: starting kernels, reading and
    dequantising weights."""
    # one over half the tokens takes more than half the time: what two of them take beyond one is
    # what it costs
    roofline = _Roofline(config, shape, precision, step, rates)
    full_rows = roofline.full_rows
    half_rows = dataclasses.replace(
        full_rows, padded_tokens=full_rows.padded_tokens / 2, rows=full_rows.rows / 2
    )
    whole_s, half_s = (
        sum(roofline.micro_step_seconds(rows).values()) for rows in (full_rows, half_rows)
    )
    overhead_s = max(0.0, 2 * half_s - whole_s)
    return round(overhead_s / max(1e-12, whole_s - overhead_s) * full_rows.padded_tokens)


# Seconds that the card takes for a part of a pass: whatever the tokens, and for each of them.
_CardSeconds = tuple[float, float]


@dataclass(frozen=True)
class _Roofline:
    config: RunConfig
    shape: ModelShape
    precision: Precision
    step: Step
    rates: Rates

    @cached_property
    def recomputed_share(self) -> float:
        """Share of the layers that are computed a second time."""
        return self.step.recomputed_layers(self.shape.num_layers) / self.shape.num_layers

    @property
    def full_rows(self) -> AverageMicroSteps:
        """An average step whose rows all have full length."""
        step, layout = self.step, self.step.layout
        return AverageMicroSteps(
            step.grad_accum,
            step.tokens,
            step.seq_len,
            step.tokens * step.grad_accum * layout.data_parallel * layout.context_parallel,
            step.micro_batch,
        )

    @property
    def _compute_itemsize(self) -> int:
        return DTYPE_BYTES[self.precision.compute]

    def _memory_seconds(self, size: float) -> float:
        return size / (self.rates.memory_bytes_per_s * BANDWIDTH_SHARE)

    def predict(self, micro_steps: AverageMicroSteps) -> Speed:
        """Predict the step whose rows take these micro steps."""
        step, layout, count = self.step, self.step.layout, micro_steps.count
        seconds_by_part = self.micro_step_seconds(micro_steps)
        slow_code = self._slow_code_seconds(micro_steps.padded_tokens)
        micro_s = sum(seconds_by_part.values()) + sum(slow_code.values())
        is_full = self.config.tuning.mode == "full"
        params = adapter_params(self.shape, self.config.tuning.lora)
        if is_full:
            params = self.shape.params + trained_vision_params(self.config, self.shape)
        stepped_params = params / (layout.shard if layout.shards_states else 1)
        stepped_params /= layout.tensor_parallel
        optimizer_s = host_s = 0.0
        if layout.offloads_states:
            # seven accesses in fp32 on the host; 16-bit gradients go there, and 16-bit weights come
            # back
            host_s = 28.0 * stepped_params / HOST_BANDWIDTH + 4.0 * stepped_params / NOMINAL_LINK
        else:
            steps_loaded_weights = (
                is_full and not layout.shards_states and self.precision.updates != "stochastic"
            )
            itemsize = DTYPE_BYTES[self.precision.load] if steps_loaded_weights else 4
            # AdamW reads weight, gradient and two states, and writes all but the gradient
            optimizer_s = self._memory_seconds(7.0 * itemsize * stepped_params)
        moved_bytes, exposed_s = self._communication_cost(micro_s, micro_steps)
        if step.offloads:  # each block's input to the host and back, in the stream that computes
            input_bytes = (
                micro_steps.padded_tokens
                * self.shape.hidden_size
                * self._compute_itemsize
                * self.shape.num_layers
                * self.recomputed_share
            )
            host_s += 2 * input_bytes * count / NOMINAL_LINK
        # every part of a micro step, times their number; then what a step has once
        # the host's part of an update, which waits for the size of the gradients
        start_s = 0.0
        if step.on_gpu:
            start_s = STEP_TENSOR_OPERATORS * _trained_tensors(self.config, self.shape)
            start_s *= self.rates.operator_s * self.rates.host_factor
        parts = {
            **{name: seconds * count for name, seconds in (seconds_by_part | slow_code).items()},
            "optimizer": max(optimizer_s, start_s),
            "host": host_s,
            "communication": exposed_s,
            "waiting": micro_s * count * straggler_wait_share(layout.ranks),
        }
        ranks = layout.data_parallel * layout.context_parallel
        # what is not padding
        token_share = micro_steps.tokens / (count * micro_steps.padded_tokens * ranks)
        model_flops = (
            sum(map(sum, self._token_flops(micro_steps.row_length, 0.0).values()))
            * micro_steps.padded_tokens
            * token_share
            * count
            / layout.tensor_parallel
        )
        bytes_by_kind = step_traffic(self.config, self.shape, self.precision, step).bytes_by_kind(
            max(1, round(count))
        )
        return Speed(
            sum(parts.values()),
            round(micro_steps.tokens),
            parts,
            moved_bytes,
            bytes_by_kind,
            model_flops,
            self.pass_times(micro_steps),
        )

    def micro_step_seconds(self, micro_steps: AverageMicroSteps) -> dict[str, float]:
        """Seconds of one micro step: matrix products, moving memory, dequantising weights, and what
        starting kernels takes beyond all of them."""
        tokens, parts = micro_steps.padded_tokens, self._card_parts(micro_steps)
        seconds = {
            name: self.rates.card_factor
            * sum(fixed_s + token_s * tokens for fixed_s, token_s in directions)
            for name, directions in parts.items()
        }
        pass_s = self.pass_times(micro_steps).seconds(tokens)
        seconds["kernel_starts"] = max(0.0, pass_s - sum(seconds.values()))
        if self.step.layout.is_streamed:
            # each direction hides the blocks that it waits for; backwards computes as much again,
            # and what is recomputed
            pass_s, forward_share = sum(seconds.values()), 1 / (2 + self.recomputed_share)
            seconds["bus"] = sum(
                max(0.0, self.bus_s / 2 - share * pass_s)
                for share in (forward_share, 1 - forward_share)
            )
        return seconds

    @property
    def bus_s(self) -> float:
        """Seconds in which a streamed base goes over the bus in a micro step: forwards, and again
        backwards."""
        sent_bytes = 2 * streamed_bytes(self.config, self.shape, DTYPE_BYTES[self.precision.load])
        return sent_bytes / self.rates.bus_bytes_per_s

    def pass_times(self, micro_steps: AverageMicroSteps) -> PassTimes:
        """The seconds of a micro step by its tokens, with the corrections of earlier runs."""
        rates, step = self.rates, self.step
        forward, backward = zip(*self._card_parts(micro_steps).values(), strict=True)
        host_forward, host_backward = host_operators(
            self.work,
            self.shape.num_layers,
            recomputed_share=self.recomputed_share,
            chats=micro_steps.rows * step.one_by_one,
        )
        return PassTimes(
            rates.operator_s * host_forward,
            rates.operator_s * host_backward,
            sum(fixed_s for fixed_s, _ in forward),
            sum(fixed_s for fixed_s, _ in backward),
            sum(token_s for _, token_s in forward),
            sum(token_s for _, token_s in backward),
        ).corrected(host_factor=rates.host_factor, card_factor=rates.card_factor)

    @cached_property
    def work(self) -> PassWork:
        """What an average block moves and starts beside its products."""
        liger = plan_kernels(
            self.config,
            self.shape,
            self.step.layout,
            on_gpu=self.step.on_gpu,
            missing_packages=self.rates.missing_packages,
        ).speed
        return find_pass_work(self.config, self.shape, self.precision, self.step, liger=liger)

    def _card_parts(
        self, micro_steps: AverageMicroSteps
    ) -> dict[str, tuple[_CardSeconds, _CardSeconds]]:
        """The card's seconds of a micro step's parts, forwards and backwards. What checkpointing
        computes again belongs to the backward pass."""
        shape, rates, tensor_parallel = self.shape, self.rates, self.step.layout.tensor_parallel
        again, mode = self.recomputed_share, self.config.tuning.mode
        matrix_rate = rates.matrix_flops_per_s * rates.matrix_share * tensor_parallel
        shares = {"attention": rates.attention_share}
        flops_by_name = self._token_flops(micro_steps.row_length, again)
        forward_s, backward_s = (
            sum(
                flops[direction] / matrix_rate / shares.get(name, 1.0)
                for name, flops in flops_by_name.items()
            )
            for direction in (0, 1)
        )
        # each pass reads the weights once, whatever the number of tokens
        weight_bytes = 2 * active_params(shape) / tensor_parallel
        # half a byte read and two written per weight
        packed_bytes = 2.5 * active_params(shape) * (mode == "qlora")
        work, layers = self.work, shape.num_layers / tensor_parallel

        def direction_parts(
            flops_s: float, work: DirectionWork, passes: float, logit_bytes: int
        ) -> dict[str, _CardSeconds]:
            fixed_bytes = passes * weight_bytes + layers * work.fixed_bytes
            token_bytes = layers * work.token_bytes + logit_bytes * shape.vocab_size
            return {
                "matrix": (0.0, flops_s),
                "memory": (self._memory_seconds(fixed_bytes), self._memory_seconds(token_bytes)),
                "dequantise": (self._memory_seconds(passes * packed_bytes), 0.0),
                "kernels": (KERNEL_S * shape.num_layers * work.operators, 0.0),
            }

        forward = direction_parts(forward_s, work.forward, 1.0, HEAD_LOGIT_BYTES[0])
        backward = direction_parts(
            backward_s,
            work.backward.plus(work.forward, times=again),
            1.0 + again,
            HEAD_LOGIT_BYTES[1],
        )
        return {name: (forward[name], backward[name]) for name in forward}

    def _slow_code_seconds(self, padded_tokens: float) -> dict[str, float]:
        """Seconds of a micro step that faster code would save; a CPU runs linear attention in one
        way only."""
        shape, pass_count, seconds = self.shape, 2.0 + self.recomputed_share, {}
        experts = plan_experts(self.config, shape, self.precision)
        if experts is not None and experts.name == "eager" and not shape.uses_custom_experts:
            start_s = (
                sum(kind.count * kind.num_experts for kind in shape.layers)
                * EXPERT_OVERHEAD_S
                * pass_count
            )
            expert_params = sum(
                kind.count * kind.num_experts * kind.expert_params for kind in shape.layers
            )
            gradient_s = self._memory_seconds(
                EXPERT_GRADIENT_ACCESSES * DTYPE_BYTES[self.precision.load] * expert_params
            )
            seconds[EXPERTS_PART] = start_s + (
                gradient_s if self.config.tuning.mode == "full" else 0.0
            )
        lacks_linear_attention = (
            LINEAR_ATTENTION_PACKAGE in self.rates.missing_packages
            and LINEAR_ATTENTION_PACKAGE in shape.kernel_packages
        )
        if lacks_linear_attention and self.step.capability is not None:
            channels = sum(kind.count * kind.linear_attention_width for kind in shape.layers)
            seconds[LINEAR_ATTENTION_PART] = self._memory_seconds(
                LINEAR_ATTENTION_BYTES * channels * padded_tokens * pass_count
            )
        return seconds

    def _token_flops(
        self, row_length: float, recomputed_share: float
    ) -> dict[str, tuple[float, float]]:
        """Operations for a token of a row of this length, forwards and backwards: matrix products
        of the blocks, attention, head. A product of k by n is 2kn for a token; the gradient of its
        input costs the same, that of its weight the same again and only where the weight trains.
        Attention costs 4q per token and seen key forward (two products) and 2.5 times as much
        backward (FlashAttention-2, https://arxiv.org/abs/2307.08691). TRL's head computes its
        logits twice."""
        shape, is_full = self.shape, self.config.tuning.mode == "full"
        adapter_flops = 0.0 if is_full else 2.0 * adapter_params(shape, self.config.tuning.lora)
        # keys that a query of a row sees on average, summed over the layers; eager attention
        # computes all of them
        attended_keys = 0.0
        for kind in shape.layers:
            has_window = kind.attention in ("sliding", "chunked")
            window = min(row_length, shape.window or row_length) if has_window else row_length
            # causal: position i sees min(i, window) keys; the mean over a row, from the triangle
            # and the band below it
            seen_keys = (
                row_length
                if self.step.attention == "eager"
                else window - window * window / (2 * row_length)
            )
            attended_keys += 0.0 if kind.attention == "none" else kind.count * seen_keys
        block_flops = 2.0 * active_params(shape)
        attention_flops = 4.0 * attended_keys * shape.q_width
        head_flops = 2.0 * shape.vocab_size * shape.hidden_size
        images: dict[str, tuple[float, float]] = {}
        if shape.vision is not None:
            one = measure_vision(self.config, shape, self.precision, self.step)
            tower_flops = shape.vision.mean_token_share * one.operations
            tower_flops /= shape.vision.picture_tokens
            backward_share = (2.0 + recomputed_share) * (one.backward_bytes > 0)
            images = {"images": (tower_flops, tower_flops * backward_share)}
        return images | {
            "blocks": (block_flops, block_flops * (1.0 + recomputed_share + is_full)),
            "adapters": (adapter_flops, adapter_flops * (2.0 + recomputed_share)),
            "attention": (attention_flops, attention_flops * (2.5 + recomputed_share)),
            "head": (head_flops, head_flops * (2.0 + is_full)),
        }

    def _communication_cost(
        self, micro_s: float, micro_steps: AverageMicroSteps
    ) -> tuple[int, float]:
        """Bytes that one rank sends in a step, and the seconds of it that nothing hides: a
        collective hides behind the backward pass of its micro-batch, those after the optimizer's
        update hide behind nothing."""
        shape, rates, layout = self.shape, self.rates, self.step.layout
        grad_accum = max(1, round(micro_steps.count))
        # the backward pass takes two thirds of a micro-step
        hidden_s = HIDDEN_SHARE * micro_s * 2 / 3
        traffic = step_traffic(self.config, shape, self.precision, self.step)
        moved_bytes, exposed_s = traffic.sent_bytes(grad_accum), 0.0
        if layout.gradient_ranks > 1:
            micro_batch_s, reduction_s, update_s = (
                sum(_collective_seconds(collective, rates) for collective in part)
                for part in (traffic.per_micro_batch, traffic.per_reduction, traffic.after_update)
            )
            # a micro-batch hides its own collectives and those that are put off until then, as
            # DDP's in the last one
            reductions = traffic.reductions_per_step(grad_accum)
            exposed_s = (
                (grad_accum - reductions) * _exposed_seconds(micro_batch_s, hidden_s)
                + reductions * _exposed_seconds(micro_batch_s + reduction_s, hidden_s)
                + update_s
            )
            if not layout.shards_states:  # DDP
                message_bytes = sum(
                    collective.message_bytes * count
                    for collective, count in traffic.step_collectives(grad_accum)
                )
                exposed_s += self._memory_seconds(BUCKET_COPIES * message_bytes)
        if layout.offloads_params:
            # weights come from RAM for the forward and for the backward pass
            weight_bytes = _weight_bytes(
                self.config, shape, self._compute_itemsize, with_adapters=False
            )
            exposed_s += grad_accum * max(
                0.0, 2 * weight_bytes / layout.tensor_parallel / NOMINAL_LINK - hidden_s
            )
        recomputes = self.step.checkpointed_layers != 0
        # repeated for more ranks than heads
        key_width = max(shape.kv_width, layout.context_parallel * shape.head_dim)
        # ranks that share a block's products or a row's tokens exchange in every block, and nothing
        # hides that: the next product needs it
        for ranks, block_calls, width, starts, per_node in (
            # two all-reduces forward and two backward, each a reduction and a gather
            (layout.tensor_parallel, 4 + 2 * recomputes, 2 * shape.hidden_size, 1, None),
            # query, key, value and output, and back; each with each: no ring, so over nodes a GPU
            # has its share of the network
            (layout.context_parallel, 2 + recomputes, 2 * shape.q_width + 2 * key_width, 4, 1),
        ):
            calls = shape.num_layers * block_calls * grad_accum
            sent_bytes = (
                (ranks - 1)
                / ranks
                * micro_steps.padded_tokens
                * width
                * self._compute_itemsize
                * calls
            )
            link_rate = _link_bytes_per_s(ranks, rates, per_node=per_node)
            moved_bytes += sent_bytes
            exposed_s += sent_bytes / link_rate + starts * _start_seconds(ranks, calls)
        return int(moved_bytes), exposed_s


def _trained_tensors(config: RunConfig, shape: ModelShape) -> int:
    """Tensors of the blocks that a step updates: weights, or two factors for each adapter."""
    targets = config.tuning.lora.target_modules
    is_full = config.tuning.mode == "full"
    tensors = 0
    for kind in shape.layers:
        adapted = sum(is_target(linear, targets) for linear in kind.linears)
        tensors += kind.count * (len(kind.linears) if is_full else 2 * adapted)
    return tensors


def active_params(shape: ModelShape) -> float:
    """Weights of the blocks that multiply a token: only those experts that it is routed to, if the
    class does so."""
    total = 0.0
    for kind in shape.layers:
        active_experts_share = shape.rows_per_token / kind.num_experts if kind.num_experts else 0.0
        total += kind.count * (kind.linear_weights + active_experts_share * kind.expert_params)
    return total


def _collective_seconds(collective: Collective, rates: Rates) -> float:
    span = collective.spanned_ranks or collective.ranks
    # of a group whose ranks are spread over `span` others, a node has a part
    link_rate = _link_bytes_per_s(
        span, rates, per_node=max(1, rates.gpus_per_node * collective.ranks // span)
    )
    return collective.sent_bytes / link_rate + _start_seconds(collective.ranks, collective.calls)


def _start_seconds(ranks: int, calls: float) -> float:
    return COLLECTIVE_START_S * math.log2(ranks) * calls


def _exposed_seconds(collective_s: float, hidden_s: float) -> float:
    return collective_s - min(OVERLAP_SHARE * collective_s, hidden_s)


def straggler_wait_share(ranks: int) -> float:
    """Share of a step that the mean rank waits for the slowest: the expected largest of `ranks`
    normal durations (Blom's approximation, Statistical Estimates and Transformed Beta-Variables,
    1958)."""
    return (
        WAIT_SPREAD * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
    )


def _link_bytes_per_s(ranks: int, rates: Rates, *, per_node: int | None = None) -> float:
    """Bytes per second that a collective over `ranks` moves per rank: inside a node the link's,
    over nodes no more than the node's network, which a ring enters and leaves once. `per_node`:
    ranks of a node in the group, where its other GPUs are in groups that share the network."""
    node_link = rates.link_bytes_per_s * rates.link_share
    if ranks <= rates.gpus_per_node:
        return node_link
    node_ranks = rates.gpus_per_node if per_node is None else per_node
    return min(node_link, rates.network_bytes_per_s * LINK_SHARE * node_ranks / rates.gpus_per_node)


# --- how far it may be off: published speeds that nothing was fitted to (benchmarks/speed.json) ---
# Compute capabilities of A100 and H100 with their kin, on which most published runs were made.
DATA_CENTRE_CAPABILITIES = {(8, 0), (9, 0)}
# Those of workstation and gaming cards.
WORKSTATION_CAPABILITIES = {(8, 6), (8, 9), (12, 0)}
SMALL_MODEL_PARAMS = 5e9
LONG_ROW_TOKENS = 8192


@dataclass(frozen=True)
class SpeedError:
    """The share of a predicted speed within which four of five comparable published runs lie; None
    if no run of its kind was compared."""

    share: float | None
    of: str

    @property
    def text(self) -> str:
        """`±15%, bf16 on data-centre cards`."""
        return self.of if self.share is None else f"±{self.share:.0%}, {self.of}"

    def is_within(self, ratio: float) -> bool:
        """True if speeds of this quotient are too close for the prediction to tell them apart."""
        return self.share is not None and abs(ratio - 1) <= self.share


DATA_CENTRE_ERROR = SpeedError(0.15, "bf16 on data-centre cards")
LONG_ROW_ERROR = SpeedError(0.40, "rows above 8,192 tokens")
WORKSTATION_ERROR = SpeedError(0.35, "bf16 on workstation and gaming cards")
SMALL_MODEL_ERROR = SpeedError(0.60, "models below 5B, or cards without bf16")
# Largest shares and smallest are those of `benchmarks/speed.json`, rounded up to 5%.
SPEED_ERROR_CLASSES = (DATA_CENTRE_ERROR, LONG_ROW_ERROR, WORKSTATION_ERROR, SMALL_MODEL_ERROR)


def find_speed_error(
    shape: ModelShape, precision: Precision, hardware: Hardware, step: Step
) -> SpeedError:
    """How far a run's predicted speed may be off, by published runs of its kind."""
    capabilities = {gpu.capability for gpu in hardware.gpus}
    uncompared = {
        "on a CPU": not hardware.gpus,
        "on AMD cards": any(gpu.is_amd for gpu in hardware.gpus),
        "that offloads": step.layout.offloads_states or step.offloads,
        "of a streamed base": step.layout.is_streamed,
        "of mixtures of experts": any(kind.num_experts for kind in shape.layers),
        # V100 and T4 have no bf16, and fall into SMALL_MODEL_ERROR below
        "on these cards": (
            not capabilities
            <= DATA_CENTRE_CAPABILITIES | WORKSTATION_CAPABILITIES | {(7, 0), (7, 5)}
        ),
    }
    for description, applies in uncompared.items():
        if applies:
            return SpeedError(None, f"no published run {description} was compared")
    if shape.params < SMALL_MODEL_PARAMS or precision.compute != "bfloat16":
        return SMALL_MODEL_ERROR
    if not capabilities <= DATA_CENTRE_CAPABILITIES:
        return WORKSTATION_ERROR
    return LONG_ROW_ERROR if step.seq_len > LONG_ROW_TOKENS else DATA_CENTRE_ERROR
