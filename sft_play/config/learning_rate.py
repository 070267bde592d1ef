"""The learning rate where `train.learning_rate` is auto: one rule, from published sweeps.

Adapters: Thinking Machines' sweep (tulu3, 780 steps of 128 rows, alpha 32; get_lr and sft_sweep.md of tinker-cookbook,
2026) finds 3e-4 to 1e-3 best for all models but one, and at ranks 1 to 64 hardly a difference between 2e-4 and 4e-4.
Its authors withdrew their formula by model size, so size is not in the rule. "LoRA Without Regret" (Schulman et al.,
2025): at first the product of alpha, A's scale and B's learning rate decides how fast the weights move, so a larger
scale x rank takes a smaller rate. A smaller one gets no larger rate: it only learns more slowly.

Full: 2e-5 at 128 rows (Stanford Alpaca; the alignment handbook). Rows: the square root, as for Adam (Malladi et al.,
2022, https://arxiv.org/abs/2205.10287), within what was published: QLoRA's 16 rows to the sweep's 128.
"""

from __future__ import annotations

import math

# At 128 rows a step; of adapters at alpha 32 (by alpha / r).
ADAPTER_RATE, FULL_RATE = 4e-4, 2e-5
REFERENCE_ALPHA = 32
# Lion steps by signs: its rate is 3 to 10 times smaller than AdamW's (https://arxiv.org/abs/2302.06675).
LION_DIVISOR = 5
# Fewer, or more, rows than these change nothing any more.
BATCH_ROWS_RANGE = (16, 128)


def auto_learning_rate(*, alpha: float | None, rows: int, is_lion: bool = False) -> tuple[float, str]:
    """The peak learning rate and the reason for it. `alpha`: the adapters' scale times their rank (alpha, or with
    rsLoRA alpha x sqrt(r)) and the ratio of lora_B's rate to this one; None: all weights train. `rows`: the effective
    batch."""
    min_rows, max_rows = BATCH_ROWS_RANGE
    counted_rows = min(max(rows, min_rows), max_rows)
    base = FULL_RATE if alpha is None else ADAPTER_RATE
    rate, derivation = (
        base * math.sqrt(counted_rows / max_rows),
        f"{base:g} at {max_rows} rows a step x sqrt({counted_rows}/{max_rows})",
    )
    if alpha is not None and alpha > REFERENCE_ALPHA:
        rate, derivation = (
            rate * REFERENCE_ALPHA / alpha,
            f"{derivation} x {REFERENCE_ALPHA}/{alpha:.4g}, since the adapters' scale x rank x lora_B's ratio is that "
            "large",
        )
    if is_lion:
        rate, derivation = rate / LION_DIVISOR, f"{derivation} / {LION_DIVISOR} for Lion"
    rounded = float(f"{rate:.3g}")
    return rounded, f"learning rate {rounded:g} (auto): {derivation} (docs/tuning.md)"
