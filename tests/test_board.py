"""What a run writes for TensorBoard: a run for each split, each point once, charts only of what is logged."""

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from sft_play.training.measure import board
from sft_play.training.measure.board import TensorBoardWriter, scalar_layout
from sft_play.training.measure.exact_match import GeneratedAnswer, Question
from tests.conftest import chat, write_rows, write_run

TAGS_OF = {
    "Loss": ["train/loss", "eval/loss", "test/loss"],
    "Loss by source": ["train/loss_chat", "eval/loss_text", "test/loss_a"],
    "Loss by rank": ["train/loss_rank_0", "train/loss_rank_11"],
    "Exact match": ["eval/exact_match", "test/exact_match"], "Learning rate": ["train/learning_rate"],
    "Gradient norm": ["train/grad_norm"], "Tokens per second": ["train/tokens_per_s", "train/tokens_per_s_per_gpu"],
    "Model FLOP utilisation": ["train/mfu"],
    "Where a step's time goes, in seconds": ["train/step_time_s", "train/time_data_s"],
    "Memory against the plan, in GiB": ["train/memory_peak_gib", "train/memory_predicted_gib"],
    "Memory by rank, in GiB": ["train/memory_peak_gib_rank_1"], "Padding share": ["train/padding_share"],
}  # fmt: skip
OTHERS = ["train/epoch", "train/entropy", "eval/runtime", "train/total_flos", "test/runtime"]


def test_a_chart_is_there_exactly_where_one_of_its_tags_is_logged():
    assert {title for charts in board.CHARTS.values() for title in charts} == set(TAGS_OF)
    draw = random.Random(0)
    every = [tag for tags in TAGS_OF.values() for tag in tags]
    for _ in range(100):
        tags = draw.sample(every, draw.randint(0, 5)) + draw.sample(OTHERS, 2)
        layout = scalar_layout(tags)
        shown = {title for charts in layout.values() for title in charts}
        assert shown == {title for title, own in TAGS_OF.items() if set(own) & set(tags)}, tags
        assert all(layout.values()), "a page without charts"


def make_board(folder: Path, **options: Any) -> TensorBoardWriter:
    """A board over a folder's `tb/`."""
    settings: dict[str, Any] = {"hparams": {"lr": 1e-3}, "metric_tags": (), "answers": list, "resume_step": None}
    return TensorBoardWriter(RunFolder(folder), **{**settings, **options})


def log(to: TensorBoardWriter, step: int, **figures: float) -> None:
    to.on_log(None, SimpleNamespace(global_step=step), None, figures)


def points(folder: Path) -> dict[str, dict[int, float]]:
    """Every tag's points in all folders of a `tb/`; fails where a tag has a step twice, or steps that go back."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("*tfevents*"), key=lambda path: path.stat().st_mtime_ns):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    for tag, curve in curves.items():
        steps = [step for step, _ in curve]
        assert steps == sorted(set(steps)), f"{tag}: {steps}"
    return {tag: dict(curve) for tag, curve in curves.items()}


def accumulated(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()


def shown_charts(folder: Path) -> set[str]:
    """The charts of the newest layout."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    newest = accumulated(folder).Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    return {chart.title for page in layout_pb2.Layout.FromString(newest).category for chart in page.chart}


def test_each_split_is_a_run_of_its_own_and_charts_come_with_their_figures(tmp_path):
    said: list[GeneratedAnswer] = []
    writer = make_board(tmp_path, answers=lambda: said)
    log(writer, 1, loss=3.0, learning_rate=1e-3, epoch=0.1)
    assert shown_charts(tmp_path / "tb") == {"Loss", "Learning rate"}
    assert not (tmp_path / "tb" / "validation").exists()
    log(writer, 2, eval_loss=2.5, epoch=0.2)
    said = [GeneratedAnswer(Question([1], "what?", "this"), "that")]
    log(writer, 2, eval_exact_match=0.5, epoch=0.2)
    assert shown_charts(tmp_path / "tb") == {"Loss", "Learning rate", "Exact match"}
    said = [GeneratedAnswer(Question([1], "and now?", "this"), "this")]
    log(writer, 2, test_loss=2.0, test_exact_match=1.0, epoch=0.2)
    writer.on_train_end()
    log(writer, 2, test_loss=9.0, test_entropy=1.0)  # the figures of weights that were loaded again
    shown = {split: points(tmp_path / "tb" / split) for split in ("validation", "test")}
    tested = {"test/loss": {2: 2.0}, "test/exact_match": {2: 1.0}, "test/entropy": {2: 1.0}}
    assert shown == {"validation": {"eval/loss": {2: 2.5}, "eval/exact_match": {2: 0.5}}, "test": tested}
    for split, words in (("validation", "what?"), ("test", "and now?")):
        (text,) = accumulated(tmp_path / "tb" / split).Tensors("answers/text_summary")
        assert text.step == 2
        assert words in text.tensor_proto.string_val[0].decode()


def test_the_table_of_hparams_has_the_figures_that_the_run_measures(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    writer = make_board(tmp_path, metric_tags=("eval/loss", "test/exact_match"))
    files = [min((tmp_path / "tb" / name).glob("*tfevents*")) for name in (".", "validation", "test")]
    begun = [file.stat().st_mtime_ns for file in files]
    assert begun == sorted(begun), "the colours would be given out in another order"
    arguments = SimpleNamespace(to_json_string=lambda: "{}")
    writer.on_train_begin(arguments, SimpleNamespace(global_step=0), None)
    writer.on_train_end()
    content = accumulated(tmp_path / "tb").summary_metadata["_hparams_/experiment"].plugin_data.content
    infos = HParamsPluginData.FromString(content).experiment.metric_infos
    metrics = [f"{info.name.group}:{info.name.tag}" for info in infos]
    assert metrics == [":train/loss", "validation:eval/loss", "test:test/exact_match", ":train/tokens_per_s"]


def test_a_resumed_run_has_each_point_once_and_those_of_the_steps_that_count(tmp_path):
    draw = random.Random(1)
    for trial in range(2):
        folder, ended, every = tmp_path / str(trial), draw.randint(3, 30), draw.choice([1, 2, 5])
        kept = draw.choice([None, draw.randint(0, ended)])
        first = make_board(folder)
        for step in range(0, ended + 1, every):
            log(first, step, loss=1.0, eval_loss=1.0)
        first.on_train_end()
        time.sleep(1.1)  # event files are named by seconds, and read in that order
        second = make_board(folder, resume_step=kept)
        begin = 0 if kept is None else kept + 1
        again = [step for step in range(0, begin + 40, every) if step >= begin]
        for step in again:
            log(second, step, loss=2.0, eval_loss=2.0)
        second.on_train_end()
        expected = [(step, 1.0) for step in range(0, begin, every)] + [(step, 2.0) for step in again]
        for place, tag in (("tb", "train/loss"), ("tb/validation", "eval/loss")):
            assert [(one.step, one.value) for one in accumulated(folder / place).Scalars(tag)] == expected


def test_what_is_measured_is_told_before_it_is(tmp_path):
    from sft_play.training.measure.summary import EvalSet

    asked, split = [Question([1], "a", "b")], SimpleNamespace(rows=())
    for name, has, while_training, evaluates, expected in (
        ("test", True, [], True, ["eval/loss", "test/loss", "test/exact_match"]),
        ("test", True, asked, False, ["test/loss", "test/exact_match"]),
        ("val", True, asked, True, ["eval/loss", "eval/exact_match"]),
        ("val", False, [], False, []),
    ):
        eval_set: Any = EvalSet(split if has else None, name, asked if has else [], while_training)
        assert eval_set.metric_tags(evaluates_in_training=evaluates) == expected


@pytest.mark.build
def test_a_run_that_is_stopped_and_resumed_shows_what_its_metrics_file_says(tmp_path, tiny_llama, succeed):
    rows = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n}?", f"it is {n}.") for n in range(20)))
    sizes = {"effective_batch_size": 4, "batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    data, judged = (
        {"val_path": str(rows), "test_path": str(rows)},
        {"steps": 2, "generate_rows": 2, "max_new_tokens": 4},
    )
    train, output = {**sizes, "report_to": ["tensorboard"]}, {"name": "it"}
    config = write_run(tmp_path, tiny_llama, rows, data=data, train=train, eval=judged, output=output)
    succeed("train", "--config", str(config), "train.stop_after_steps=3")
    succeed("resume", "--config", str(config))
    run = tmp_path / "outputs" / "it"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = points(run / "tb")
    for tag, key, steps in (
        ("train/loss", "loss", [1, 2, 3, 4]), ("eval/loss", "eval_loss", [2, 4]), ("test/loss", "test_loss", [0, 4]),
        ("eval/entropy", "eval_entropy", [2, 4]), ("test/entropy", "test_entropy", [0, 4]),
        ("eval/exact_match", "eval_exact_match", [2, 4]), ("test/exact_match", "test_exact_match", [0, 4]),
    ):  # fmt: skip
        told = {line["step"]: line[key] for line in lines if key in line}
        assert sorted(told) == sorted(curves[tag]) == steps, tag
        assert curves[tag] == pytest.approx(told, rel=1e-5)
    for split, steps in (("validation", [2, 4]), ("test before", [0]), ("test", [4])):
        assert [text.step for text in accumulated(run / "tb" / split).Tensors("answers/text_summary")] == steps
    charts = shown_charts(run / "tb")
    assert {"Loss", "Exact match", "Gradient norm", "Padding share"} <= charts
    assert not {"Loss by rank", "Loss by source", "Model FLOP utilisation"} & charts
