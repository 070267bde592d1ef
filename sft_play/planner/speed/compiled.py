"""What `train.compile` changes in a plan: what it is refused beside, the time of a step and of compiling.

Bytes stay those of the plain code, an upper bound: what a compiled block keeps for its backward pass is the choice of
inductor's partitioner. Blocks of Llama and Qwen3 kept 0.64 to 0.78 of the plain code's bytes on a CPU
(benchmarks/LOG.md). Published peaks fall by 7% (8B in full on H100s, 82.4 to 77.0 GiB,
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md) and by 15% with a compiled
loss, which is not this one (3B on an A100, 60.0 to 51.0 GiB, https://github.com/meta-pytorch/torchtune).
"""

from __future__ import annotations

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.models.model_shape import ModelShape

TRAFFIC = 0.5
"""Share of the bytes of norms, activations, rotations and adapters that a compiled block still moves: each group of
elementwise operations reads its inputs and writes its result, without what lies between. By the same counts as the
plain code's, of widths h and f: two norms with their sums 8h of 14h, rotations 2 of 4, a gated activation 3f of 7f."""
STARTS = 0.5
"""Share of the kernels that a compiled block still starts: of about 25 in a Llama's plain forward pass 9 are matrix
products and attention, and about 4 are what is fused. With both constants published runs gain 5 to 7% by the roofline,
and 16 to 27% as published (torchtitan and torchtune above; benchmarks/LOG.md has the ratios)."""
COMPILE_S = {"full": 29.0, "lora": 83.0, "qlora": 83.0}
"""Seconds of compiling one kind of block: 20 to 29 in full, 47 to 83 with adapters (8B and its loss on an A100,
https://github.com/meta-pytorch/torchtune/pull/1445, the slower of what was published)."""
PROOF_S = 20.0
"""Seconds of the measurement before it, which compiles two narrow blocks: not published, as two in full."""


def refuse(config: RunConfig) -> None:
    """Raises ConfigError for settings beside which blocks are not compiled."""
    if not config.train.compile:
        return
    others = {
        f"train.kernels={config.train.kernels}": (
            config.train.kernels != "none", "the compiler writes such kernels itself: train.kernels=none",
        ),
        "train.gradient_checkpointing=offload": (
            config.train.gradient_checkpointing == "offload",
            "a compiled block recomputes by itself, and moves nothing to RAM: train.gradient_checkpointing=true",
        ),
    }  # fmt: skip
    for name, (is_set, why) in others.items():
        if is_set:
            raise ConfigError(f"train.compile: true and {name} do not go together: {why}, or train.compile=false")


def compile_s(config: RunConfig, shape: ModelShape) -> float:
    """Seconds at the start of a run in which blocks are compiled and measured; 0 where they are not."""
    # blocks of one kind share their compiled code
    return COMPILE_S[config.tuning.mode] * len(shape.layers) + PROOF_S if config.train.compile else 0.0


def words(config: RunConfig, shape: ModelShape) -> list[str]:
    """What the plan assumes of compiled blocks, as a reason."""
    if not config.train.compile:
        return []
    return [
        f"train.compile: elementwise operations move {TRAFFIC:.0%} of the plain code's bytes; memory is counted as the "
        f"plain code's, which takes more; compiling is estimated at {compile_s(config, shape):.0f} s of each start"
    ]
