"""What TensorBoard shows beside the curves: config, plan, manifest, answers of each evaluation, hparams, a layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.log import redact
from sft_play.plan.plan import Plan
from sft_play.runs import RunFolder
from sft_play.train.exact_match import Answer

SHOWN_ANSWERS = 5
LAYOUT = {
    "Run": {
        "Loss": ["Multiline", ["train/loss", "eval/loss", "test/loss"]],
        "Loss by source": ["Multiline", ["train/loss_(?!rank_).+", "eval/loss_.+", "test/loss_.+"]],
        "Loss by rank": ["Multiline", ["train/loss_rank_.*"]],
        "Exact match": ["Multiline", ["eval/exact_match", "test/exact_match"]],
        "Learning rate": ["Multiline", ["train/learning_rate"]],
        "Gradient norm": ["Multiline", ["train/grad_norm"]],
    },
    "Machine": {
        "Tokens per second": ["Multiline", ["train/tokens_per_s", "train/tokens_per_s_per_.*"]],
        "Model FLOP utilisation": ["Multiline", ["train/mfu"]],
        "Where a step's time goes, in seconds": ["Multiline", ["train/step_time_s", "train/time_.*_s"]],
        "Memory against the plan, in GiB": [
            "Multiline",
            ["train/memory_predicted_gib", "train/memory_peak_gib", "train/memory_reserved_gib"],
        ],
        "Memory by rank, in GiB": ["Multiline", ["train/memory_.*_rank_.*"]],
        "Padding share": ["Multiline", ["train/padding_share"]],
    },
}
"""The page of custom scalars: what a run does first, what the machine does second."""
METRICS = ("train/loss", "eval/loss", "eval/exact_match", "test/loss", "test/exact_match", "train/tokens_per_s")
"""Scalars that runs are compared by."""


def hparams_of(config: RunConfig, plan: Plan) -> dict[str, str | int | float | bool]:
    """What runs are compared by: the choices that change a result or its speed."""
    found: dict[str, str | int | float | bool] = {
        "model": config.model.name,
        "mode": config.tuning.mode,
        "layout": plan.layout,
        "ranks": plan.batch.ranks,
        "effective_batch": plan.batch.effective_batch,
        "micro_batch": plan.batch.micro_batch,
        "max_seq_len": plan.max_seq_len,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": config.train.lr_scheduler_type,
        "warmup_steps": config.train.warmup_steps,
        "weight_decay": config.train.weight_decay,
        "adam_beta2": config.train.adam_beta2,
        "optim": config.train.optim,
        "precision": plan.precision.compute,
        "seed": config.train.seed,
    }
    if config.tuning.mode != "full":
        lora = config.tuning.lora
        found |= {"lora_r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return found


class Board(TrainerCallback):
    """Writes texts, hparams and the layout once, and the answers of each evaluation."""

    def __init__(
        self, writer: Any, folder: RunFolder, *, hparams: Mapping[str, Any], answers: Callable[[], Sequence[Answer]]
    ) -> None:
        self._writer, self._folder, self._hparams, self._answers = writer, folder, dict(hparams), answers

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The texts of the run folder, and how runs compare."""
        for name, language in (("config.yaml", "yaml"), ("plan.json", "json"), ("manifest.json", "json")):
            path = self._folder.path / name
            if path.is_file():
                text = redact(path.read_text(encoding="utf-8", errors="replace"))
                self._writer.add_text(path.stem, f"```{language}\n{text}\n```", state.global_step)
        self._writer.add_custom_scalars(LAYOUT)
        self._add_hparams()

    def _add_hparams(self) -> None:
        """In this run's own file: `SummaryWriter.add_hparams` would make a run of its own for them."""
        from torch.utils.tensorboard.summary import hparams

        for part in hparams(self._hparams, dict.fromkeys(METRICS, 0.0)):
            self._writer.file_writer.add_summary(part)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Some of the questions with what the model said, once they have been counted.

        The Trainer's `on_evaluate` comes before this evaluation's answers are generated.
        """
        answers = list(self._answers())[:SHOWN_ANSWERS]
        if answers and any(key.endswith("_exact_match") for key in logs or {}):
            self._writer.add_text("answers", answers_text(answers), state.global_step)
            self._writer.flush()


def answers_text(answers: Sequence[Answer]) -> str:
    """Questions and answers as a Markdown list."""
    lines = []
    for answer in answers:
        mark = "right" if answer.right else f"expected: {_quoted(answer.question.answer)}"
        lines.append(f"- asked: {_quoted(answer.question.shown)}\n  said: {_quoted(answer.said)} ({mark})")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Text as code, so that nothing of it is read as Markdown or HTML."""
    return f"`{json.dumps(redact(text), ensure_ascii=False)[1:-1].replace('`', chr(0x2019))}`"
