"""What TensorBoard shows: curves, config, plan, manifest, answers of each evaluation, hparams, a
layout. It takes each folder of event files for a run: the run's own `tb/` has what was trained on,
a folder in it each held-out split.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import rewrite_logs

from sft_play.config.options import optimizer_options
from sft_play.config.schema import RunConfig
from sft_play.log import redact
from sft_play.planner.plan import Plan
from sft_play.runs.folder import OOM_ENTRY, OomEvent, RunFolder, read_oom_events
from sft_play.training.measure.exact_match import GeneratedAnswer

# First part of a held-out split's tags: its folder in `tb/`.
SPLIT_FOLDERS = {"eval": "validation", "test": "test"}
# The page of custom scalars: first how the run goes, then how the machine does. Each chart with its
# tags' patterns, which TensorBoard matches from a tag's beginning.
CHARTS = {
    "Run": {
        "Loss": ["train/loss$", "eval/loss$", "test/loss$"],
        "Loss by source": ["train/loss_(?!rank_).+", "eval/loss_.+", "test/loss_.+"],
        "Loss by rank": ["train/loss_rank_.*"],
        "Exact match": ["eval/exact_match$", "test/exact_match$"],
        "Learning rate": ["train/learning_rate$"],
        "Gradient norm": ["train/grad_norm$"],
    },
    "Machine": {
        "Tokens per second": ["train/tokens_per_s$", "train/tokens_per_s_per_.*"],
        "Model FLOP utilisation": ["train/mfu$"],
        "Where a step's time goes, in seconds": ["train/step_time_s$", "train/time_.*_s"],
        "Memory against the plan, in GiB": [
            "train/memory_predicted_gib$",
            "train/memory_peak_gib$",
            "train/memory_reserved_gib$",
        ],
        "Memory by rank, in GiB": ["train/memory_.*_rank_.*"],
        "Padding share": ["train/padding_share$"],
    },
}


def scalar_layout(tags: Collection[str]) -> dict[str, dict[str, list[Any]]]:
    """The charts that have at least one of these tags to show, as torch's SummaryWriter takes a
    layout."""
    pages = {
        page: {
            title: ["Multiline", patterns]
            for title, patterns in charts.items()
            if any(re.match(pattern, tag) for pattern in patterns for tag in tags)
        }
        for page, charts in CHARTS.items()
    }
    return {page: charts for page, charts in pages.items() if charts}


def build_hparams(config: RunConfig, plan: Plan) -> dict[str, str | int | float | bool]:
    """The settings in the table that compares runs: those that change a result or its speed."""
    hparams: dict[str, str | int | float | bool] = {
        "model": config.model.name,
        "mode": config.tuning.mode,
        "layout": plan.layout,
        "ranks": plan.batch.ranks,
        "effective_batch": plan.batch.effective_batch,
        "micro_batch": plan.batch.micro_batch,
        "max_seq_len": plan.max_seq_len,
        "precision": plan.precision.compute,
        **{option.name: option.value(config) for option in optimizer_options()},
    }
    if config.tuning.mode != "full":
        lora = config.tuning.lora
        hparams |= {"lora_r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
    return hparams


class TensorBoardWriter(TrainerCallback):
    """Writes what is logged, one value of a tag a step, texts, hparams, answers, and the layout of
    what there is. `metric_tags`: tags of the held-out figures that this run measures, for the table
    of hparams. `resume_step`: the step that the run continues after (None: its first step); what
    was written after it is not shown.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        hparams: Mapping[str, Any],
        metric_tags: Sequence[str],
        answers: Callable[[], Sequence[GeneratedAnswer]],
        resume_step: int | None = None,
    ) -> None:
        self._folder, self._hparams, self._metric_tags = folder, dict(hparams), tuple(metric_tags)
        self._answers, self._purge_step = answers, None
        self._writers: dict[str, Any] = {}
        self._steps: dict[str, int] = {}  # the last one that was written of each tag
        self._layout: dict[str, Any] = {}
        if resume_step is not None:
            self._purge_step = resume_step + 1
        else:
            # of a start that trained nothing
            for path in folder.tensorboard_path.rglob("events.out.tfevents.*"):
                path.unlink()
        # TensorBoard gives out its colours in this order
        for tag in ("train/", *self._metric_tags):
            self._get_writer(tag)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the settings and the hparams."""
        writer = self._get_writer("train/")
        for name, language in (
            ("config.yaml", "yaml"),
            ("plan.json", "json"),
            ("manifest.json", "json"),
        ):
            path = self._folder.path / name
            if path.is_file():
                text = redact(path.read_text(encoding="utf-8", errors="replace"))
                writer.add_text(path.stem, f"```{language}\n{text}\n```", state.global_step)
        # ranks that started again for it could not write it before
        for event in read_oom_events(self._folder):
            self.write_oom(event)
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams as build_table

        experiment, start, end = build_table(
            self._hparams,
            dict.fromkeys(("train/loss", *self._metric_tags, "train/tokens_per_s"), 0.0),
        )
        metadata = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(metadata.content)
        for info in content.experiment.metric_infos:
            info.name.group = SPLIT_FOLDERS.get(info.name.tag.partition("/")[0], "")
        metadata.content = content.SerializeToString()
        for summary in (experiment, start, end):
            # into this run's own file: `SummaryWriter.add_hparams` would make a second run for them
            writer.file_writer.add_summary(summary)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write the figures, and some questions and answers beside their exact match. The Trainer's
        `on_evaluate` would be too early for answers: it comes before they are generated."""
        step = state.global_step
        for tag, value in rewrite_logs(logs or {}).items():
            if not isinstance(value, (int, float)) or self._steps.get(tag, -1) >= step:
                continue
            self._steps[tag] = step
            writer = self._get_writer(tag, step)
            writer.add_scalar(tag, value, step)
            if tag.endswith("/exact_match") and (answers := list(self._answers())[:5]):
                writer.add_text("answers", format_answers(answers), step)
        layout = scalar_layout(self._steps)
        if layout != self._layout:
            from torch.utils.tensorboard.summary import custom_scalars

            # with its step: the newest layout is the one that is shown
            self._get_writer("train/").file_writer.add_summary(custom_scalars(layout), step)
            self._layout = layout
        for writer in self._writers.values():
            writer.flush()

    def write_oom(self, event: OomEvent) -> None:
        """Write that memory ran out, and what is done about it."""
        self._get_writer("train/").add_text(OOM_ENTRY, f"`{redact(event.description)}`", event.step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the files; the figures of the trained weights, which follow, open new ones."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _get_writer(self, tag: str, step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        name = SPLIT_FOLDERS.get(tag.partition("/")[0], "")
        if tag.startswith("test/") and step == 0:
            # measured twice: a curve of two points would be a line over steps that nobody measured
            name = f"{name} before"
        if name not in self._writers:
            self._writers[name] = SummaryWriter(
                log_dir=str(self._folder.tensorboard_path / name), purge_step=self._purge_step
            )
        return self._writers[name]


def format_answers(answers: Sequence[GeneratedAnswer]) -> str:
    """Questions and answers as a Markdown list."""
    lines = []
    for answer in answers:
        verdict = "right" if answer.is_correct else f"expected: {_quote(answer.question.reference)}"
        lines.append(
            f"- asked: {_quote(answer.question.prompt_text)}\n  said: {_quote(answer.text)}"
            f" ({verdict})"
        )
    return "\n".join(lines)


def _quote(text: str) -> str:
    return f"`{json.dumps(redact(text), ensure_ascii=False)[1:-1].replace('`', chr(0x2019))}`"
