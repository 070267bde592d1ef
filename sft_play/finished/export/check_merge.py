"""`make merge-test`: the merged model against the adapter that it came from, on rows of the run's own data.

Both read the same rows. At every trained place the two next-token distributions are compared: their Kullback-Leibler
divergence, and the loss. The base without its adapter is the yardstick: a merged
model that is as far from the adapter as the base is has not been merged.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.finished.export.merge import record_test
from sft_play.finished.export.places import MERGED, require_merged
from sft_play.finished.load import evenly_spaced, held_out, load_as_trained, load_folder
from sft_play.finished.run import FinishedRun, Outcome, next_line
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.quiet import quiet_libraries

ROWS = 16
# How much of the divergence between base and adapter may remain between merged model and adapter.
_SHARE = 0.05
# Mean KL divergence, in nats, that is always allowed, by the coarsest dtype in which either computes: rounding alone
# moves the logits of real models in bf16 by some 1e-2, which is a divergence of some 1e-4. Weights in so many bits: one
# and a half times llama.cpp's own measurement of the worst such type with Llama 3 8B (tools/perplexity/README.md:
# 0.0014 for q8_0, 0.0055 for q6_K, 0.022 for q5_0, 0.072 for q4_0, 0.228 for q3_K_S, 0.445 for q2_K).
_ALWAYS = {
    "float32": 1e-6, "bfloat16": 1e-4, "float16": 1e-4,
    "q8": 2e-3, "q6": 8e-3, "q5": 3e-2, "q4": 0.11, "q3": 0.34, "q2": 0.67,
}  # fmt: skip
# The same that is never allowed, however much the training changed.
_NEVER = {
    "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3,
    "q8": 2e-2, "q6": 4e-2, "q5": 0.1, "q4": 0.25, "q3": 0.5, "q2": 0.8,
}  # fmt: skip


@dataclass(frozen=True)
class MergeTest(Outcome):
    """What the comparison found. Divergences are means over places, in nats; losses are means of the run's rows."""

    run: Path
    path: Path
    split: str
    rows: int
    places: int
    kl_merged: float
    """KL(adapter ‖ merged)."""
    kl_base: float
    """KL(adapter ‖ base without adapter)."""
    kl_limit: float
    """Mean divergence up to which the two count as equal."""
    loss: Mapping[str, float]
    """Of `adapter`, `merged` and `base`."""

    @property
    def ok(self) -> bool:
        return self.kl_merged <= self.kl_limit

    def lines(self) -> list[str]:
        verdict = "the merged model is the adapter's" if self.ok else "the merged model is NOT the adapter's"
        lines = [
            f"Compared: {self.places:,} trained tokens of {self.rows} rows ({self.split})",
            "Loss: {base:.4f} base, {adapter:.4f} with the adapter, {merged:.4f} merged".format(**self.loss),
            f"KL divergence from the adapter: {self.kl_merged:.2g} nats merged (limit {self.kl_limit:.2g}), "
            f"{self.kl_base:.2g} base",
            f"Verdict: {verdict}",
        ]
        if not self.ok:
            again = next_line("merge", "FORCE=1", RUN=self.run)
            return [*lines, f"{again} with BASE=dequantized for a QLoRA run, or with a finer DTYPE (bf16, fp32)"]
        if self.path != self.run / MERGED:
            return [*lines, f"Next: vllm serve {shlex.quote(str(self.path))}"]
        return [*lines, next_line("serve", "ENGINE=vllm", RUN=self.run)]


def merge_test(run: FinishedRun, *, path: Path | None = None, rows: int = ROWS) -> MergeTest:
    """Compare a merged model (`path`; None: `merged/`) with the run's adapter, on so many held-out rows. Raises
    RunFolderError where there is no merged model, or the run has no adapter; ModelError where the model is not what was
    merged; DataError where the run's data is gone."""
    target = path or run.folder.path / MERGED
    require_merged(run, target)
    require_unchanged(target)
    quiet_libraries()
    data = held_out(run)
    chosen = spaced(data.split.rows, rows)
    model = load_as_trained(run)
    adapter = log_probs(model, chosen)
    with model.disable_adapter():
        base = log_probs(model, chosen)
    dtypes = {str(next(model.parameters()).dtype)}
    # one model at a time: two whole ones may be more than fits
    del model
    free_memory()
    base_divergence, base_loss = divergence(adapter, base), loss(base)
    del base
    merged_model = load_folder(target)
    dtypes.add(str(merged_model.dtype))
    merged = log_probs(merged_model, chosen)
    del merged_model
    free_memory()
    kl_merged = divergence(adapter, merged)
    computed_in = {run.plan().precision.compute, *(dtype.removeprefix("torch.") for dtype in dtypes)}
    dtype = max(computed_in, key=lambda name: _ALWAYS.get(name, 0))
    tested = MergeTest(
        run.folder.path, target, data.name, len(chosen), sum(len(row) for row, _ in adapter), kl_merged,
        base_divergence, limit_of(dtype, base_divergence),
        {"adapter": loss(adapter), "merged": loss(merged), "base": base_loss},
    )  # fmt: skip
    record_test(target, ok=tested.ok, divergence=kl_merged, limit=tested.kl_limit)
    return tested


def limit_of(dtype: str, divergence_of_base: float) -> float:
    """Mean KL divergence, in nats, up to which a merged model counts as the adapter's. `dtype`: the coarsest that
    either of them computes in. `divergence_of_base`: of the base from the adapter, which is what training changed."""
    return max(_ALWAYS[dtype], min(_NEVER[dtype], _SHARE * divergence_of_base))


# --- how far two models are from each other ---------------------------------------------------------------------------
#
# Shape letters: T tokens of a row, P its trained places, V the vocabulary.

# Trained places of a row that are compared: with a vocabulary of 150,000 they are 40 MB in fp32.
PLACES = 64

# Log-probabilities of every token at the trained places of a row ([P, V], fp32, in RAM) and the next tokens ([P]).
Scored = tuple[torch.Tensor, torch.Tensor]


def spaced(rows: Any, count: int) -> list[dict[str, list[int]]]:
    """At most `count` rows, evenly spaced."""
    return [rows[index] for index in evenly_spaced(len(rows), count)]


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[dict[str, list[int]]]) -> list[Scored]:
    """Of each row, what the model expects at its first `PLACES` trained places."""
    scored = []
    for row in rows:
        ids_BT = torch.tensor([row["input_ids"]], device=model.device)
        labels_T = torch.tensor(row["labels"])[1:]
        places = torch.nonzero(labels_T >= 0).flatten()[:PLACES]
        logits_PV = model(input_ids=ids_BT, use_cache=False).logits[0, places.to(model.device)]
        scored.append((torch.log_softmax(logits_PV.float(), dim=-1).cpu(), labels_T[places]))
    return scored


def divergence(one: Sequence[Scored], other: Sequence[Scored]) -> float:
    """Mean KL(one ‖ other) over places, in nats."""
    divergences = []
    for (first_PV, _), (second_PV, _) in zip(one, other, strict=True):
        width = min(first_PV.shape[1], second_PV.shape[1])
        if first_PV.shape[1] != second_PV.shape[1]:  # one lacks rows that are no token's
            first_PV, second_PV = (one_PV[:, :width].log_softmax(-1) for one_PV in (first_PV, second_PV))
        divergences.append((first_PV.exp() * (first_PV - second_PV)).sum(-1))
    # of equal models fp32 sums to about -1e-9; what is not a number stays so: max() keeps its first argument then
    return max(float(torch.cat(divergences).double().mean()), 0.0)


def loss(scored: Sequence[Scored]) -> float:
    """Mean loss over the trained places."""
    parts = [-log_PV[torch.arange(len(tokens_P)), tokens_P] for log_PV, tokens_P in scored]
    return float(torch.cat(parts).double().mean())
