"""What other code than the model's own changes in a plan: compiled blocks (`train.compile`), and Liger's kernels.

Compiled: what it is refused beside, the time of a step and of compiling. Bytes stay those of the plain code, an upper
bound: what a compiled block keeps for its backward pass is the choice of inductor's partitioner. Blocks of Llama and
Qwen3 kept 0.64 to 0.78 of the plain code's bytes on a CPU (benchmarks/LOG.md). Published peaks fall by 7% (8B in full
on H100s, 82.4 to 77.0 GiB, https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)
and by 15% with a compiled loss, which is not this one (3B on an A100, 60.0 to 51.0 GiB,
https://github.com/meta-pytorch/torchtune).

Liger's: bytes that plain elementwise code moves and they do not, and kernel starts. Counted operator by operator, e
bytes of a computed element, from transformers' forward (models/llama), PyTorch's derivatives.yaml and liger-kernel's
own kernels. Half precision is cast to fp32 in a norm, and back. Against published pairs of runs: benchmarks/LOG.md.
"""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.kernels import ReplacedOperations

# Share of the bytes of norms, activations, rotations and adapters that a compiled block still moves: each group of
# elementwise operations reads its inputs and writes its result, without what lies between. By the same counts as the
# plain code's, of widths h and f: two norms with their sums 8h of 14h, rotations 2 of 4, a gated activation 3f of 7f.
COMPILED_TRAFFIC_SHARE = 0.5
# Share of the kernels that a compiled block still starts: of about 25 in a Llama's plain forward pass 9 are matrix
# products and attention, and about 4 are what is fused. With both constants published runs gain 5 to 7% by the
# roofline, and 16 to 27% as published (torchtitan and torchtune above; benchmarks/LOG.md has the ratios).
COMPILED_STARTS_SHARE = 0.5
# Seconds of compiling one kind of block: 20 to 29 in full, 47 to 83 with adapters (8B and its loss on an A100,
# https://github.com/meta-pytorch/torchtune/pull/1445, the slower of what was published).
COMPILE_S = {"full": 29.0, "lora": 83.0, "qlora": 83.0}
# Seconds of the measurement before it, which compiles two narrow blocks: not published, as two in full.
COMPILE_CHECK_S = 20.0


def check_compile_options(config: RunConfig) -> None:
    """Raises ConfigError for settings beside which blocks are not compiled."""
    train = config.train
    conflicts = (
        [f"train.kernels={train.kernels} (none: the compiler writes such kernels)"] if train.kernels != "none" else []
    )
    if train.gradient_checkpointing == "offload":
        conflicts.append("train.gradient_checkpointing=offload (true: a compiled block moves nothing to RAM)")
    if train.compile and conflicts:
        raise ConfigError(
            f"train.compile: true does not go together with {' and '.join(conflicts)}; or train.compile=false"
        )


def estimate_compile_s(config: RunConfig, shape: ModelShape) -> float:
    """Seconds at the start of a run in which blocks are compiled and measured; 0 where they are not."""
    # blocks of one kind share their compiled code
    return COMPILE_S[config.tuning.mode] * len(shape.layers) + COMPILE_CHECK_S if config.train.compile else 0.0


def compile_reasons(config: RunConfig, shape: ModelShape) -> list[str]:
    """What the plan assumes of compiled blocks, as a reason."""
    if not config.train.compile:
        return []
    return [
        f"train.compile: elementwise operations move {COMPILED_TRAFFIC_SHARE:.0%} of the plain code's bytes; memory is "
        "counted as the "
        f"plain code's, which takes more; compiling is estimated at {estimate_compile_s(config, shape):.0f} s of each "
        "start"
    ]


# Seconds, forward and backward together, that a norm and a rotation of both queries and keys take less to start: the
# package's own benchmark (A100, 0.2.1) where rows are so short that starting is all of it: a norm of width 1,024 0.286
# against 0.318 ms, a rotation of width 512 0.274 against 0.516 ms (Liger-Kernel ead96b618e5c,
# benchmark/data/all_benchmark_data.csv). A gated activation is only given with its matrix products; nothing is taken.
NORM_START_S, ROTATION_START_S = 32e-6, 242e-6


# Share of the counted traffic of norms, activations and rotations that remains at least: what the fused kernels and the
# sums of residuals move, 0.53 of Llama-3.1-8B's. Plain code moves more than the roofline of `throughput` counts; the
# rest is in the share of the peak that matrix products reach, which was fitted to whole steps, and it stays there.
MIN_TRAFFIC_SHARE = 0.5


def liger_saved_bytes(shape: ModelShape, operations: ReplacedOperations, *, e: int, recomputed_share: float) -> float:
    """Bytes that Liger's kernels save of a token's forward and backward pass through all blocks, `recomputed_share` of
    which run forward twice."""
    forward_bytes, backward_bytes = 0.0, 0.0
    cast_bytes = 0 if e == 4 else 2 * (e + 4)
    # square, mean, product; that with the weight moves 2 e, as Liger's kernel does
    norm_forward_bytes = cast_bytes + 20
    # of the product, the square, the mean, their sum; 2 e of the weight's against 3 e
    norm_backward_bytes = cast_bytes + 68 - e
    for kind in shape.layers:
        has_attention = kind.attention != "none"
        head_width = shape.q_width + shape.kv_width if has_attention else 0
        normed_width = shape.norms_per_layer * shape.hidden_size
        # norms of heads are replaced only where the package's function for the class does so
        normed_width += head_width if shape.has_qk_norm and operations.replaces_head_norms else 0
        rotated_width = head_width * shape.rotary_dim // max(1, shape.head_dim) if operations.replaces_rotation else 0
        gated_width = kind.mlp_width if operations.replaces_gate else 0
        # rotation: times cos, half negated, put together, times sin, added: 10 e, and 15 e back, against 2 e
        forward_bytes += kind.count * (normed_width * norm_forward_bytes + rotated_width * 8 * e + gated_width * 2 * e)
        backward_bytes += kind.count * (
            normed_width * norm_backward_bytes + rotated_width * 13 * e + gated_width * 4 * e
        )
    return forward_bytes * (1 + recomputed_share) + backward_bytes


def liger_saved_starts_s(shape: ModelShape, operations: ReplacedOperations, *, recomputed_share: float) -> float:
    """Seconds of kernel starts that Liger's kernels save, forward and backward; a second forward pass counts half."""
    seconds = 0.0
    for kind in shape.layers:
        has_attention = kind.attention != "none"
        norm_count = shape.norms_per_layer + (
            2 if has_attention and shape.has_qk_norm and operations.replaces_head_norms else 0
        )
        seconds += kind.count * (
            norm_count * NORM_START_S + (ROTATION_START_S if has_attention and operations.replaces_rotation else 0.0)
        )
    return seconds * (1 + recomputed_share / 2)
