"""`make merge-test`: the merged model against the adapter that it came from, on rows of the run's own data.

Both read the same rows. At every trained position the two next-token distributions are compared: their Kullback-Leibler
divergence, and the loss. The base without its adapter is the yardstick: a merged
model that is as far from the adapter as the base is has not been merged.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.answers import Answer
from sft_play.finished.export.merge import record_merge_test
from sft_play.finished.export.places import MERGED_FOLDER, require_merged
from sft_play.finished.load import evenly_spaced_indices, load_held_out_rows, load_model_folder, load_trained_model
from sft_play.finished.run import FinishedRun, next_command_line
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.library_messages import quiet_libraries

MERGE_TEST_ROWS = 16
# How much of the divergence between base and adapter may remain between merged model and adapter.
_ALLOWED_SHARE = 0.05
# Mean KL divergence, in nats, that is always allowed, by the coarsest dtype in which either computes: rounding alone
# moves the logits of real models in bf16 by some 1e-2, which is a divergence of some 1e-4. Weights in so many bits: one
# and a half times llama.cpp's own measurement of the worst such type with Llama 3 8B (tools/perplexity/README.md:
# 0.0014 for q8_0, 0.0055 for q6_K, 0.022 for q5_0, 0.072 for q4_0, 0.228 for q3_K_S, 0.445 for q2_K).
_MIN_KL_LIMIT = {
    "float32": 1e-6, "bfloat16": 1e-4, "float16": 1e-4,
    "q8": 2e-3, "q6": 8e-3, "q5": 3e-2, "q4": 0.11, "q3": 0.34, "q2": 0.67,
}  # fmt: skip
# The same that is never allowed, however much the training changed.
_MAX_KL_LIMIT = {
    "float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3,
    "q8": 2e-2, "q6": 4e-2, "q5": 0.1, "q4": 0.25, "q3": 0.5, "q2": 0.8,
}  # fmt: skip


@dataclass(frozen=True)
class MergeTest(Answer):
    """What the comparison found. Divergences are means over trained positions, in nats; losses are means over rows."""

    run: Path
    path: Path
    split: str
    rows: int
    places: int
    # KL(adapter ‖ merged).
    kl_merged: float
    # KL(adapter ‖ base without adapter).
    kl_base: float
    # Mean divergence up to which the two count as equal.
    kl_limit: float
    # Of `adapter`, `merged` and `base`.
    loss: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return self.kl_merged <= self.kl_limit

    def lines(self) -> list[str]:
        lines = [
            f"Compared: {self.places:,} trained tokens of {self.rows} rows ({self.split})",
            "Loss: {base:.4f} base, {adapter:.4f} with the adapter, {merged:.4f} merged".format(**self.loss),
            f"KL divergence from the adapter: {self.kl_merged:.2g} nats merged (limit {self.kl_limit:.2g}), "
            f"{self.kl_base:.2g} base",
        ]
        if not self.ok:
            again = next_command_line("merge", "FORCE=1", RUN=self.run)
            advice = f"{again} with BASE=dequantized for a QLoRA run, or with a finer DTYPE (bf16, fp32)"
            return [*lines, "Verdict: the merged model is NOT the adapter's", advice]
        lines.append("Verdict: the merged model is the adapter's")
        if self.path != self.run / MERGED_FOLDER:
            return [*lines, f"Next: vllm serve {shlex.quote(str(self.path))}"]
        return [*lines, next_command_line("serve", "ENGINE=vllm", RUN=self.run)]


def merge_test(run: FinishedRun, *, path: Path | None = None, rows: int = MERGE_TEST_ROWS) -> MergeTest:
    """Compare a merged model (`path`; None: `merged/`) with the run's adapter, on so many held-out rows. Raises
    RunFolderError where there is no merged model, or the run has no adapter; ModelError where the model is not what was
    merged; DataError where the run's data is gone."""
    target = path or run.folder.path / MERGED_FOLDER
    require_merged(run, target)
    require_unchanged(target)
    quiet_libraries()
    held_out_rows = load_held_out_rows(run)
    held_out = held_out_rows.split.rows
    sample_rows = [held_out[index] for index in evenly_spaced_indices(len(held_out), rows)]
    model = load_trained_model(run)
    adapter_log_probs = log_probs(model, sample_rows)
    with model.disable_adapter():
        base_log_probs = log_probs(model, sample_rows)
    dtypes = {f"torch.{run.plan().precision.compute}", str(next(model.parameters()).dtype)}
    # one model at a time: two whole ones may be more than fits
    del model
    free_memory()
    model = load_model_folder(target)
    dtypes.add(str(model.dtype))
    merged_log_probs = log_probs(model, sample_rows)
    del model
    free_memory()
    kl_merged = mean_divergence(adapter_log_probs, merged_log_probs)
    kl_base = mean_divergence(adapter_log_probs, base_log_probs)
    losses = {"adapter": adapter_log_probs, "merged": merged_log_probs, "base": base_log_probs}
    result = MergeTest(
        run.folder.path, target, held_out_rows.name, len(sample_rows), sum(len(row) for row, _ in adapter_log_probs),
        kl_merged, kl_base,
        kl_limit=max(divergence_limit(dtype.removeprefix("torch."), kl_base) for dtype in dtypes),
        loss={name: mean_loss(row_log_probs) for name, row_log_probs in losses.items()},
    )  # fmt: skip
    record_merge_test(target, ok=result.ok, divergence=kl_merged, limit=result.kl_limit)
    return result


def divergence_limit(dtype: str, base_divergence: float) -> float:
    """Mean KL divergence, in nats, up to which a merged model counts as the adapter's. `dtype`: the coarsest that
    either of them computes in. `base_divergence`: of the base from the adapter, which is what training changed."""
    return max(_MIN_KL_LIMIT[dtype], min(_MAX_KL_LIMIT[dtype], _ALLOWED_SHARE * base_divergence))


# --- how far two models are from each other ---------------------------------------------------------------------------
#
# Shape letters: T tokens of a row, P its trained positions, V the vocabulary.

# Trained positions of a row that are compared: with a vocabulary of 150,000 they are 40 MB in fp32.
MAX_POSITIONS = 64

# Log-probabilities of every token at the trained positions of a row ([P, V], fp32, in RAM) and the next tokens ([P]).
RowLogProbs = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[dict[str, list[int]]]) -> list[RowLogProbs]:
    """Compute, for each row, the log-probabilities of the next token at its first `MAX_POSITIONS` trained positions."""
    row_log_probs = []
    for row in rows:
        ids_BT = torch.tensor([row["input_ids"]], device=model.device)
        labels_T = torch.tensor(row["labels"])[1:]
        positions = torch.nonzero(labels_T >= 0).flatten()[:MAX_POSITIONS]
        logits_PV = model(input_ids=ids_BT, use_cache=False).logits[0, positions.to(model.device)]
        row_log_probs.append((torch.log_softmax(logits_PV.float(), dim=-1).cpu(), labels_T[positions]))
    return row_log_probs


def mean_divergence(first: Sequence[RowLogProbs], second: Sequence[RowLogProbs]) -> float:
    """Mean KL(first ‖ second) over positions, in nats."""
    divergences = []
    for (first_PV, _), (second_PV, _) in zip(first, second, strict=True):
        width = min(first_PV.shape[1], second_PV.shape[1])  # one may lack rows that are no token's
        first_PV, second_PV = (logits_PV[:, :width].log_softmax(-1) for logits_PV in (first_PV, second_PV))
        divergences.append((first_PV.exp() * (first_PV - second_PV)).sum(-1))
    # of equal models fp32 sums to about -1e-9; what is not a number stays so: max() keeps its first argument then
    return max(float(torch.cat(divergences).double().mean()), 0.0)


def mean_loss(row_log_probs: Sequence[RowLogProbs]) -> float:
    """Mean loss over the trained positions."""
    losses = [-log_PV[torch.arange(len(tokens_P)), tokens_P] for log_PV, tokens_P in row_log_probs]
    return float(torch.cat(losses).double().mean())
