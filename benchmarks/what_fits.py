"""What fits where: common models and modes on common cards, by the plan. `sft-play generate` writes docs/what-fits.md.

The plan's closed form, without a trace or earlier runs, with the kernels that an environment for CUDA has: the same on
every machine.
"""

from datetime import UTC, datetime

from sft_play.config.load import load_config
from sft_play.files import ROOT
from sft_play.machine.hardware import parse_hardware
from sft_play.planner.advice import find_largest_fit
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.trace.confirm import load_run_model_shape

CARDS = ("RTX3060", "RTX4090", "RTX5090", "L4", "L40S", "A100-80GB", "H100", "H200", "B200")
MODELS = (
    *("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B"),
    *("google/gemma-3-27b-it", "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct"),
)
MODES = ("qlora", "lora", "full", "qlora, streamed")
"""The columns; of the last one the base stays in RAM_GIB of RAM."""
RAM_GIB = 64
ROW_TOKENS, ROWS = 2048, 16
"""Tokens of a row, and rows of an optimizer step, at which the speed is predicted."""
MEASURED = {("Qwen/Qwen3-4B", "lora", "H100"): 13_160}
"""Tokens per second that were measured of a cell's own rows in steady steps, with `train.kernels: none` (LOG.md,
2026-11-26)."""
_BASE = ROOT / "configs" / "run_bnb.yaml"
_ABOUT = """# What fits where

One card, nothing offloaded to RAM but in the last column, whose base stays in {ram} GiB of it
([streamed.md](streamed.md)), rows of one length, {rows} rows an optimizer step, as `make plan` predicts it
(closed form, no trace). Written by `make -C benchmarks generate`; the figures are of {date}.

Each cell has the longest rows that fit (tokens, with one row per pass and every layer recomputed), and for rows of
{tokens:,} tokens the micro-batch, the tokens per second (counted, on a host that was not measured) with the error of
its kind of run (`speed_error`), what was measured of them, and the hours for a million tokens. `-`: does not fit.
`?`: no published run of the kind was compared. The longest rows keep the plan's margin free; how well memory is
predicted is in [memory-model.md](memory-model.md), speed in [plan.md](plan.md). The same for your run: `make plan
CONFIG=my.yaml HARDWARE=1xRTX4090 MAX=seq_len`.
"""


def cell(model: str, column: str, card: str) -> str:
    """What fits of one model in one mode on one card: the longest rows, and how fast rows of ROW_TOKENS train."""
    mode, _, streamed = column.partition(", ")
    overrides = (
        f"model.name={model}", f"tuning.mode={mode}", f"model.max_seq_len={ROW_TOKENS}",
        f"train.effective_batch_size={ROWS}", "data.train_path=rows.jsonl", "data.val_path=null",
    )  # fmt: skip
    config = load_config(_BASE, overrides=overrides).config
    shape, machine = load_run_model_shape(config), parse_hardware(f"1x{card},ram={RAM_GIB}GiB")
    request = PlanRequest(config, shape, machine, ("streamed" if streamed else "single",), has_eval=False)
    longest = find_largest_fit("seq_len", request).value
    assert not isinstance(longest, str)  # which MAX=model answers with
    if longest is None:
        return "-"
    plan = make_plan(request)
    if not plan.fits or not plan.speed_known:
        return f"{longest:,}"
    share = plan.speed_error.share if plan.speed_error else None
    error = "?" if share is None else f"±{share:.0%}"
    speed, hours = plan.speed.tokens_per_s, 1e6 / plan.speed.tokens_per_s / 3600
    if (model, column, card) in MEASURED:
        error += f" (measured by plain code: {MEASURED[model, mode, card]:,})"
    return f"{longest:,}; micro {plan.batch.micro_batch}, {speed:,.0f}/s {error}, {hours:.2g} h"


def tables() -> str:
    """A table for each model: a line for each card, a column for each mode."""
    lines = []
    for model in MODELS:
        lines += [f"\n## {model}\n", f"| card | {' | '.join(MODES)} |", f"|{'---|' * (1 + len(MODES))}"]
        lines += [f"| {card} | {' | '.join(cell(model, mode, card) for mode in MODES)} |" for card in CARDS]
    return "\n".join(lines) + "\n"


def page(before: str = "") -> str:
    """The page; it keeps the date that it has (`before`) where no figure has changed."""
    written = tables()
    _, _, old = before.partition("\n\n## ")
    if old and written == f"\n## {old}":
        return before
    return _ABOUT.format(ram=RAM_GIB, rows=ROWS, tokens=ROW_TOKENS, date=datetime.now(UTC).date()) + written
