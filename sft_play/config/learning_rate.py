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
ADAPTERS, FULL = 4e-4, 2e-5
ALPHA = 32
# Lion steps by signs: its rate is 3 to 10 times smaller than AdamW's (https://arxiv.org/abs/2302.06675).
LION = 5
# Fewer, or more, rows than these change nothing any more.
ROWS = (16, 128)


def auto_learning_rate(*, alpha: float | None, rows: int, lion: bool = False) -> tuple[float, str]:
    """The peak learning rate and the reason for it. `alpha`: the adapters' scale times their rank (alpha, or with
    rsLoRA alpha x sqrt(r)) and the ratio of lora_B's rate to this one; None: all weights train. `rows`: the effective
    batch."""
    fewest, most = ROWS
    counted = min(max(rows, fewest), most)
    base = FULL if alpha is None else ADAPTERS
    rate, words = base * math.sqrt(counted / most), f"{base:g} at {most} rows a step x sqrt({counted}/{most})"
    if alpha is not None and alpha > ALPHA:
        rate, words = (
            rate * ALPHA / alpha,
            f"{words} x {ALPHA}/{alpha:.4g}, since the adapters' scale x rank x lora_B's ratio is that large",
        )
    if lion:
        rate, words = rate / LION, f"{words} / {LION} for Lion"
    rounded = float(f"{rate:.3g}")
    return rounded, f"learning rate {rounded:g} (auto): {words} (docs/tuning.md)"
