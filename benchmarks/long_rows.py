"""Published training on rows of one to four million tokens, and what the plan says of it.

TRL's runs on nodes of 8 H100s: every weight trains, one row a step, shared by all GPUs (context parallelism), with
checkpoints offloaded. `make -C benchmarks benchmark-speed` prints them.
"""

from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.load import config_from_text
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.planner.plan import Plan

MILLION = 2**20
FIRST_SOURCE = "https://github.com/huggingface/trl/pull/6845 (2026-08-21)"
SECOND_SOURCE = "https://github.com/huggingface/trl/pull/6846 (2026-08-21), examples/sft_qwen3_8b_1m_context"


@dataclass(frozen=True)
class LongRow:
    """A published run: millions (2^20) of tokens in a row, seconds of a step, and bytes of a GPU where the run's
    settings are published too."""

    model: str
    millions: int
    nodes: int
    step_s: float
    source: str = FIRST_SOURCE
    peak_bytes: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} full, one row of {self.millions}M tokens on {self.nodes} x 8 H100"


LONG_ROWS = (
    LongRow("Qwen/Qwen3-8B", 1, 1, 380, SECOND_SOURCE, 56.2e9), LongRow("Qwen/Qwen3-0.6B", 1, 1, 137),
    LongRow("Qwen/Qwen3-30B-A3B", 1, 1, 483), LongRow("Qwen/Qwen3-32B", 1, 1, 1295),
    LongRow("Qwen/Qwen3-0.6B", 4, 1, 2135), LongRow("Qwen/Qwen3-8B", 2, 2, 696), LongRow("Qwen/Qwen3-8B", 4, 4, 1346),
)  # fmt: skip


def plan_long_row(row: LongRow) -> Plan:
    """The plan of the same run. The model's positions are those that the run gives it (YaRN)."""
    tokens, gpus = row.millions * MILLION, 8 * row.nodes
    config = config_from_text(
        f"model: {{name: {row.model}, max_seq_len: {tokens}, mesh_shape: [[1, {gpus}], [fsdp, cp]]}}\n"
        "tuning: {mode: full}\n"
        "train: {effective_batch_size: 1, gradient_checkpointing: offload, kernels: none, compile: false}\n",
        name="long",
    )
    shape = replace(load_model_shape(row.model), max_positions=tokens)
    machine = parse_hardware(f"{row.nodes}x8xH100,network=3200Gbps,ram=2TiB" if row.nodes > 1 else "8xH100,ram=2TiB")
    return make_plan(PlanRequest(config, shape, machine, has_eval=False))


def long_rows() -> dict[str, dict[str, Any]]:
    """Every run by its name: seconds of a step and bytes of a GPU, predicted and published, and the quotients."""
    found: dict[str, dict[str, Any]] = {}
    for row in LONG_ROWS:
        plan = plan_long_row(row)
        found[row.name] = {
            "source": row.source, "published_s": row.step_s, "predicted_s": round(plan.speed.step_s, 1),
            "ratio_s": plan.speed.step_s / row.step_s,
        }  # fmt: skip
        if row.peak_bytes is not None:
            allocated, published = plan.memory.allocated, row.peak_bytes
            found[row.name] |= {"published_bytes": int(published), "predicted_bytes": allocated, "fits": plan.fits}
            found[row.name]["ratio_bytes"] = allocated / published
    return found
