"""`make merge-test`: the merged model against the adapter that it came from, on rows of the run's own data.

Both read the same rows. At every trained place the two next-token distributions are compared: their Kullback-Leibler
divergence, the token that each thinks likeliest, and the loss. The base without its adapter is the yardstick: a merged
model that is as far from the adapter as the base is has not been merged.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.errors import RunFolderError
from sft_play.finished.evaluate.divergence import compared, log_probs, loss, spaced
from sft_play.finished.export.merge import MERGED, record_test
from sft_play.finished.load import free_memory, held_out, load_as_trained, load_folder
from sft_play.finished.run import FinishedRun, next_line
from sft_play.training.prepare.quiet import quiet_libraries

ROWS = 16
_SHARE = 0.05
"""How much of the divergence between base and adapter may remain between merged model and adapter."""
_ALWAYS = {"float32": 1e-6, "bfloat16": 1e-4, "float16": 1e-4, "q8_0": 2e-3}
"""Mean KL divergence, in nats, that is always allowed, by the coarsest dtype in which either computes: rounding alone
moves the logits of real models in bf16 by some 1e-2, which is a divergence of some 1e-4. Weights in Q8_0: llama.cpp's
own measurement with Llama 3 8B is 0.001355 (tools/perplexity/README.md)."""
_NEVER = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 5e-3, "q8_0": 2e-2}
"""The same that is never allowed, however much the training changed."""


@dataclass(frozen=True)
class MergeTest:
    """What the comparison found. Divergences are means over places, in nats; losses are means of the run's rows."""

    run: Path
    path: Path
    split: str
    rows: int
    places: int
    divergence: float
    """KL(adapter ‖ merged)."""
    divergence_of_base: float
    """KL(adapter ‖ base without adapter)."""
    largest_difference: float
    """Largest difference of two log-probabilities of a token that was to be predicted."""
    same_token: float
    """Share of the places at which both think the same token likeliest."""
    loss_adapter: float
    loss_merged: float
    loss_base: float
    limit: float
    """Mean divergence up to which the two count as equal."""

    @property
    def ok(self) -> bool:
        """Whether the merged model is the adapter's."""
        return self.divergence <= self.limit

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": self.ok, "run": str(self.run), "path": str(self.path), "split": self.split, "rows": self.rows,
            "places": self.places, "kl_merged": self.divergence, "kl_base": self.divergence_of_base,
            "kl_limit": self.limit, "max_logprob_diff": self.largest_difference, "same_token": self.same_token,
            "loss": {"adapter": self.loss_adapter, "merged": self.loss_merged, "base": self.loss_base},
        }  # fmt: skip

    def lines(self) -> list[str]:
        """In words."""
        verdict = "the merged model is the adapter's" if self.ok else "the merged model is NOT the adapter's"
        lines = [
            f"Compared: {self.places:,} trained tokens of {self.rows} rows ({self.split})",
            f"Loss: {self.loss_base:.4f} base, {self.loss_adapter:.4f} with the adapter, {self.loss_merged:.4f} merged",
            f"KL divergence from the adapter: {self.divergence:.2g} nats merged (limit {self.limit:.2g}), "
            f"{self.divergence_of_base:.2g} base; {self.same_token:.1%} of the likeliest tokens are the same",
            f"Verdict: {verdict}",
        ]
        if not self.ok:
            again = next_line("merge", "FORCE=1", RUN=self.run)
            return [*lines, f"{again} with BASE=dequantized for a QLoRA run, or with a finer DTYPE (bf16, fp32)"]
        if self.path != self.run / MERGED:
            return [*lines, f"Next: vllm serve {shlex.quote(str(self.path))}"]
        return [*lines, next_line("serve", "ENGINE=vllm", RUN=self.run)]


def merge_test(run: FinishedRun, *, path: Path | None = None, rows: int = ROWS) -> MergeTest:
    """Compare a merged model with the run's adapter.

    Args:
        path: the merged model; `merged/` in the run folder where None.
        rows: how many rows of the held-out data are read, evenly spaced.

    Raises:
        RunFolderError: there is no merged model, or the run has no adapter.
        DataError: the run's data is gone.
    """
    target = path or run.folder.path / MERGED
    if not run.is_adapter:
        raise RunFolderError(f"{run.folder.path} trained all weights: there is no adapter to compare with")
    if not (target / "config.json").is_file():
        raise RunFolderError(f"{target} holds no merged model; make merge RUN={run.folder.quoted} writes it")
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
    base_divergence, base_loss = compared(adapter, base)[0], loss(base)
    del base
    merged_model = load_folder(target)
    dtypes.add(str(merged_model.dtype))
    merged = log_probs(merged_model, chosen)
    del merged_model
    free_memory()
    divergence, same, largest = compared(adapter, merged)
    computed_in = {run.plan().precision.compute, *(dtype.removeprefix("torch.") for dtype in dtypes)}
    dtype = max(computed_in, key=lambda name: _ALWAYS.get(name, 0))
    tested = MergeTest(
        run.folder.path, target, data.name, len(chosen), sum(len(row) for row, _ in adapter), divergence,
        base_divergence, largest, same, loss(adapter), loss(merged), base_loss,
        limit=limit_of(dtype, base_divergence),
    )  # fmt: skip
    record_test(target, ok=tested.ok, divergence=divergence, limit=tested.limit)
    return tested


def limit_of(dtype: str, divergence_of_base: float) -> float:
    """Mean KL divergence, in nats, up to which a merged model counts as the adapter's.

    `dtype`: the coarsest that either of them computes in. `divergence_of_base`: of the base from the adapter, which is
    what training changed.
    """
    return max(_ALWAYS[dtype], min(_NEVER[dtype], _SHARE * divergence_of_base))
