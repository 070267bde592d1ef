"""`make report` and `make compare`: the page says what the folders say, whatever is missing in them, and nothing in it
runs or leaks; what differs between runs is listed, and nothing else."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from sft_play.config.load import config_from_text
from sft_play.config.options import all_options
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished import report as reports
from sft_play.finished.report import COLOURS, Chart, Curve, draw_chart, find_differences, read_record, write_report
from sft_play.finished.run import find_run_folder
from sft_play.runs.folder import RunFolder, read_evaluations, read_summary
from sft_play.text import GIB
from sft_play.training.loop.curriculum import _merge_summaries
from sft_play.training.measure.exact_match import GeneratedAnswer, Question
from sft_play.training.measure.summary import MAX_KEPT_SAMPLES, EvalMetrics, sample_answers
from tests.recorded_runs import MANIFEST, SUMMARY, planned_folder, recorded_run, steps
from tests.test_preview import Page

HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory, tiny_llama) -> Path:
    return planned_folder(tmp_path_factory.mktemp("planned") / "run", tiny_llama)


def test_the_page_shows_what_a_finished_run_recorded_and_needs_no_network(tmp_path, plan_of):
    metrics = [{"step": 0, "test_loss": 4.0}, *steps(4, grad_norm=lambda n: n, padding_share=lambda n: 0.1 * n)]
    log = "2026-01-01T00:00:01 WARNING sft_play.data: 3 rows are odd\n2026-01-01T00:00:02 INFO x: fine\n" * 2
    folder = recorded_run(tmp_path / "first", like=plan_of, metrics=metrics, summary=SUMMARY, log=log)
    written = write_report(read_record(folder))
    text = (folder.path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(written.charts) == page.tags.count("svg") == 5  # loss, learning rate, gradient norm, speed, padding
    assert {"script", "link", "img", "iframe"} & set(page.tags) == set()
    assert {"src", "href", "xlink:href", "srcset"} & {name for name, _ in page.attributes} == set()
    assert not re.search(r"url\(|@import", text)
    for shown in ("4.0000 → 0.5000", "0.0% → 75.0%", "+50%", "-20%", "rows_kept: 1234", "two and two?", "A CPU"):
        assert shown in page.text, shown
    assert (page.text.count("3 rows are odd"), "fine" in page.text) == (1, False)
    assert f"make reproduce RUN={folder.path}" in page.text


def test_nothing_that_comes_from_data_is_read_as_html(tmp_path, plan_of):
    sample = dict.fromkeys(("asked", "expected", "before", "after"), HOSTILE) | {"right": False}
    folder = recorded_run(
        tmp_path / "first",
        like=plan_of,
        metrics=steps(3, **{f"loss_{HOSTILE}": lambda n: n, "loss_b": lambda n: n}),
        manifest={
            "status": "failed", "error": HOSTILE, "choices": [HOSTILE], "overrides": [f"model.name={HOSTILE}"],
            "versions": {HOSTILE: HOSTILE}, "data": {HOSTILE: {"path": HOSTILE, "report": {"format": HOSTILE}}},
            "config_path": HOSTILE, "layout": HOSTILE,
        },
        summary={**SUMMARY, "samples": [sample], "model_path": HOSTILE},
        settings=lambda resolved: resolved["model"].update(name=HOSTILE),
        log=f"2026-01-01T00:00:01 WARNING sft_play.data: {HOSTILE}\n",
    )  # fmt: skip
    (folder.path / "config.yaml").write_text(HOSTILE)
    (folder.path / "plan.json").write_text("[1, 2")  # a damaged file is a missing one
    written = write_report(read_record(folder))
    page = Page(written.path.read_text(encoding="utf-8"))
    assert (len(written.charts), page.text.count(HOSTILE) >= 12) == (4, True)  # shown as text, and so not run
    assert {"script", "img"} & set(page.tags) == set()
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_no_secret_reaches_the_page_however_html_would_spell_it(tmp_path, plan_of, monkeypatch):
    secret = "s&cr<t>'quoted\"12"
    monkeypatch.setenv("MY_SERVICE_TOKEN", secret)
    sample = {"asked": f"is it {secret}?", "expected": "x", "before": "hf_" + "a" * 30, "after": "y", "right": False}
    log = f"2026-01-01T00:00:01 WARNING a.b: https://me:{secret}@host {secret}\n"
    summary = {**SUMMARY, "samples": [sample]}
    folder = recorded_run(tmp_path / "first", like=plan_of, metrics=steps(3), summary=summary, log=log)
    (folder.path / "config.yaml").write_text(f"key: {secret}\n")
    text = write_report(read_record(folder)).path.read_text(encoding="utf-8")
    page = Page(text)
    assert "is it ***?" in page.text
    assert not [shown for shown in (secret, "s&amp;cr", "hf_aaaa") if shown in text or shown in page.text]


def test_a_run_that_has_only_begun_has_a_page_of_what_there_is(tmp_path, plan_of):
    bare = {"status": "running", "data": {}, "config_path": None}
    written = write_report(read_record(recorded_run(tmp_path / "bare", manifest=bare)))
    assert written.record.status == "failed"  # nobody writes it
    assert (written.sections, written.charts) == (("What was run",), ())
    metrics = steps(2, memory_peak_gib=lambda n: n / 4, eval_loss=lambda n: 3 / n)
    manifest = {"status": "stopped", "before": {"loss": 9.0}}
    begun = recorded_run(tmp_path / "begun", like=plan_of, metrics=metrics, manifest=manifest)
    with (begun.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    page = Page(write_report(read_record(begun)).path.read_text(encoding="utf-8"))
    for shown in ("2 of 4", "9.0000 before", "peak, resident so far", "512.0 MiB", "800"):
        assert shown in page.text, shown
    assert "Answers before and after" not in page.text


def test_the_summary_of_stages_and_one_with_a_loss_that_is_no_number_are_whole(tmp_path, caplog):
    lines = [{"step": 1, "eval_loss": "nan", "stage": "short"}, {"step": 2, "eval_loss": 1.0, "stage": "short"}]
    folder = recorded_run(tmp_path / "one", metrics=lines)
    assert read_record(folder).parts[0].curves == {}  # its stage is not in resolved.json
    assert read_record(recorded_run(tmp_path / "two", metrics=[{"step": 1, "loss": "nan"}])).curve("loss") == []
    stage = {**SUMMARY, "name": "short", "evaluations": read_evaluations(folder.metrics_path, stage_name="short")}
    summary = _merge_summaries([stage], [config_from_text("model: {name: m}\n", name="x")])
    assert [one["loss"] for one in summary["evaluations"]] == ["nan", 1.0]
    (folder.path / "summary.json").write_text(json.dumps(summary))
    assert read_summary(folder.path) == json.loads(json.dumps(summary))
    assert not caplog.text


def test_stages_follow_each_other(tmp_path, plan_of):
    def staged(resolved):
        resolved["curriculum"] = [{"name": "short"}, {"name": "long"}, {"name": "never begun"}]

    lines = [{"stage": name, **line} for name, count in (("short", 3), ("long", 2)) for line in steps(count)]
    folder = recorded_run(tmp_path / "run", like=plan_of, metrics=lines, settings=staged, summary={"split": "val"})
    for name in ("short", "long"):
        recorded_run(folder.path / "stages" / name, like=plan_of, summary={**SUMMARY, "wall_s": 1.0})
    record = read_record(folder)
    assert [(part.name, part.steps) for part in record.parts] == [("short", 3), ("long", 2)]
    assert record.curve("loss") == [(1, 8.0), (2, 4.0), (3, 8 / 3), (4, 8.0), (5, 4.0)]
    assert (record.stage_starts, record.steps) == ([0, 3], 5)
    written = write_report(record)
    sections = {section.title: section for section in reports.report_sections(record, [])}
    assert [table.headers[0] for table in sections["Predicted and measured"].tables] == ["short", "long"]
    assert "short (3 steps), long (2 steps)" in Page(written.path.read_text(encoding="utf-8")).text
    assert len(written.charts) == 3


def test_a_run_on_gpus_is_compared_by_allocated_bytes_of_each_moment(tmp_path, plan_of):
    folder = recorded_run(
        tmp_path / "run",
        like=plan_of,
        metrics=steps(4),
        manifest={"processes": 8, "layout": "fsdp", "overrides": ["a=b$c"],
                  "hardware": {"gpus": [{"name": "H200", "total_bytes": 141 * GIB}] * 8}},
        summary={
            **SUMMARY,
            "peak_bytes": {"predicted_reserved": 50 * GIB, "measured_reserved": 55 * GIB},
            "peak_bytes_by_moment": {
                "training": {"predicted_allocated": 40 * GIB, "measured_allocated": 30 * GIB},
                "saving": {"predicted_allocated": 20 * GIB, "measured_allocated": None},
            },
        },
    )  # fmt: skip
    plan = json.loads((folder.path / "plan.json").read_text())
    plan["hardware"]["gpus"] = [{"name": "H200"}]
    (folder.path / "plan.json").write_text(json.dumps(plan))
    sections = {section.title: section for section in reports.report_sections(read_record(folder), [])}
    assert {
        ("memory in training", "40.0 GiB", "30.0 GiB", "-25%"), ("memory in saving", "20.0 GiB", "-", ""),
        ("peak, reserved, in training", "50.0 GiB", "55.0 GiB", "+10%"),
    } <= set(sections["Predicted and measured"].tables[0].rows)  # fmt: skip
    assert dict(sections["What was run"].pairs)["machine"] == "8 x H200"


@pytest.mark.parametrize("seed", range(3))
def test_time_is_the_sum_over_every_step_and_speed_the_mean_of_what_was_logged(tmp_path, seed):
    draw = random.Random(seed)
    lines, step, seconds, speeds = [], 0, 0.0, []
    for _ in range(draw.randint(1, 12)):
        every, took, speed = draw.randint(1, 5), draw.uniform(0.1, 2), draw.uniform(10, 900)
        step += every
        seconds, speeds = seconds + every * took, [*speeds, speed]
        lines.append({"step": step, "loss": 1.0, "step_time_s": took, "tokens_per_s": speed})
        lines.append({"step": step, "eval_loss": 1.0})
    (part,) = read_record(recorded_run(tmp_path / "run", metrics=lines)).parts
    wanted = (seconds, sum(speeds) / len(speeds), step)
    assert (part.training_s, part.tokens_per_s, part.steps) == pytest.approx(wanted)


def test_samples_are_spaced_over_what_was_asked_and_cut():
    def asked(number, text):
        return GeneratedAnswer(Question([1], f"q{number}", f"a{number}"), text)

    after = EvalMetrics(answers=tuple(asked(n, f" a{n} " if n % 2 else "no" * 3000) for n in range(40)))
    before = EvalMetrics(answers=tuple(asked(n, f"old{n}") for n in range(20)))
    kept = sample_answers(before, after)
    numbers = [int(sample["asked"][1:]) for sample in kept]
    assert numbers == [40 * n // 12 for n in range(MAX_KEPT_SAMPLES)]
    for sample, number in zip(kept, numbers, strict=True):
        assert sample["before"] == (f"old{number}" if number < 20 else None)
        assert sample["right"] == bool(number % 2)
        assert len(sample["after"]) <= 2000
    assert sample_answers(None, None) == sample_answers(before, None) == []


def test_a_long_curve_is_averaged_in_groups_of_neighbours():
    draw = random.Random(1)
    for count in (1, 299, 300, 301, 3000, 4567):
        points = [(float(step), draw.random()) for step in range(count)]
        kept = reports.thin_points(points)
        assert len(kept) == min(count, 300)
        groups = np.array_split(np.arange(count), len(kept))
        for (x, y), group in zip(kept, groups, strict=True):
            assert x == pytest.approx(sum(points[at][0] for at in group) / len(group))
            assert y == pytest.approx(sum(points[at][1] for at in group) / len(group))


def test_a_chart_that_a_run_cannot_fill_is_left_out(tmp_path):
    def charts_of(name, metrics):
        record = read_record(recorded_run(tmp_path / name, metrics=metrics))
        return {chart.title: chart for chart in reports.build_run_charts(record)}

    assert charts_of("run", [{"step": 1, "memory_predicted_gib": 3.0}]) == {}  # no curve of the run
    for name, share, has_chart in (("flat", 0.0, False), ("padded", 0.1, True)):
        assert ("Padding" in charts_of(name, [{"step": n, "padding_share": n * share} for n in (1, 2)])) == has_chart
    lines = steps(3, eval_loss=lambda n: n, loss_rank_0=lambda n: n, loss_chats=lambda n: n, loss_text=lambda n: n,
                  eval_loss_text=lambda n: n)  # fmt: skip
    charts = charts_of("two", lines)
    assert list(charts) == ["Loss", "Loss by source", "Learning rate", "Tokens per second"]
    assert [curve.name for curve in charts["Loss"].curves] == ["training", "validation"]
    by_source = {curve.name: curve.colour for curve in charts["Loss by source"].curves}
    assert by_source == {"chats": COLOURS[0], "text": COLOURS[1], "text, validation": COLOURS[1]}


def test_a_chart_is_drawn_in_its_frame():
    """Worked by hand: the frame is 56 to 412 wide, and 8 to 204 high from its top."""
    loss = Curve("training", [(0, 0.0), (5, 10.0), (10, 5.0)])
    points = Curve("validation", [(10, 5.0)], COLOURS[1], shows_points=True)
    drawn = draw_chart(Chart("Loss", (loss, points)))
    assert [curve["line"] for curve in drawn["curves"]] == ["56.0,204.0 234.0,8.0 412.0,106.0", ""]
    assert [curve["dots"] for curve in drawn["curves"]] == [[], [(412.0, 106.0)]]
    assert (drawn["value_ticks"][0], drawn["value_ticks"][-1]) == ((204.0, "0"), (8.0, "10"))
    assert drawn["step_ticks"][0] == (56.0, "0")
    one_point = draw_chart(Chart("Share", (Curve("a", [(3, 0.5)]),), is_share=True))
    assert one_point["curves"][0]["dots"] == [(56.0, 8.0)]
    assert one_point["value_ticks"][-1] == (8.0, "50%")


def test_last_is_the_run_that_finished_last_else_the_one_that_started_last(tmp_path):
    with pytest.raises(RunFolderError, match="there is no run in"):
        find_run_folder(tmp_path, None)
    for name, status, started, ended, last in (
        ("a", "failed", 1, 9, "a"), ("b", "stopped", 3, 2, "b"), ("c", "failed", 2, 8, "b"),
        ("d", "finished", 1, 5, "d"), ("e", "finished", 4, 4, "d"),
    ):  # fmt: skip
        times = {"started": f"2026-01-0{started}", "ended": f"2026-01-0{ended}"}
        recorded_run(tmp_path / name, manifest={"status": status, **times})
        assert find_run_folder(tmp_path, "last").path.name == last
        if name == "c":
            with pytest.raises(RunFolderError, match=r"there is no finished run in .* \(3 unfinished\)"):
                find_run_folder(tmp_path, "last", must_be_finished=True)
    assert find_run_folder(tmp_path, "c").path == tmp_path / "c"
    for name in ("tiny-1", "tall", "tall-2"):
        recorded_run(tmp_path / name)
    assert [find_run_folder(tmp_path, name).path.name for name in ("tiny", "tall")] == ["tiny-1", "tall"]
    with pytest.raises(RunFolderError, match="there is no run ta"):
        find_run_folder(tmp_path, "ta")  # two begin so
    with pytest.raises(RunFolderError, match="there is no run nobody"):
        find_run_folder(tmp_path, "nobody")


def test_make_report_as_it_is_typed(tmp_path, plan_of, command):
    recorded_run(tmp_path / "outputs" / "first", like=plan_of, metrics=steps(5), summary=SUMMARY)
    words = ("--config", "configs/run_starter.yaml", f"output.dir={tmp_path}/outputs")
    code, printed = command("report", *words)
    assert (code, printed.startswith("[report] Run first: status finished, ")) == (0, True), printed
    page = (tmp_path / "outputs" / "first" / "report.html").read_text()
    assert f"<li>make export RUN={tmp_path}/outputs/first FORMAT=gguf</li>" in page
    code, printed = command("report", *words, "--json", "--out", str(tmp_path / "elsewhere.html"))
    answer = json.loads(printed)
    found = (answer["ok"], answer["status"], answer["charts"], answer["path"])
    assert found == (True, "finished", 3, str(tmp_path / "elsewhere.html"))
    assert (tmp_path / "elsewhere.html").read_text().startswith("<!DOCTYPE html>")
    for wrong, told in ((tmp_path, "is a folder"), (tmp_path / "elsewhere.html" / "x", "cannot be written")):
        code, printed = command("report", *words, "--out", str(wrong))
        assert (code, told in printed) == (2, True)


def test_the_report_is_named_at_the_end_however_the_run_ended(tmp_path, caplog):
    caplog.set_level("INFO", "sft_play")
    folder = recorded_run(tmp_path / "run", metrics=steps(3))
    page = folder.path / "report.html"

    def train():
        with reports.report_on_exit(folder):
            folder.update_manifest(status="failed")
            raise RuntimeError("the step")

    with pytest.raises(RuntimeError):
        train()
    assert f"Report: {page}" in caplog.text
    page.unlink()
    for refused in (folder, RunFolder(tmp_path / "never")):  # before it began: nothing is written
        with pytest.raises(ConfigError), reports.report_on_exit(refused):
            raise ConfigError("no")
    assert [page.exists(), (tmp_path / "never").exists()] == [False, False]


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    folder = recorded_run(tmp_path / "run", metrics=steps(3))
    (folder.path / "report.html").mkdir()
    reports.write_final_report(folder)
    monkeypatch.setattr("sft_play.finished.report.read_record", lambda folder: 1 / 0)  # a fault of ours
    reports.write_final_report(folder)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert ["is a folder" in caplog.text, "ZeroDivisionError" in caplog.text] == [True, True]


def changed(resolved: dict, path: str, value: object) -> None:
    *outer, name = path.split(".")
    functools.reduce(lambda section, part: section[part], outer, resolved)[name] = value


@pytest.mark.parametrize("seed", range(2))
def test_the_settings_that_differ_are_listed_and_no_others(tmp_path, plan_of, seed):
    draw = random.Random(seed)
    paths = [path for path in all_options() if "curriculum" not in path]
    chosen = draw.sample(paths, 5)

    def change(resolved):
        for number, path in enumerate(chosen):
            changed(resolved, path, f"other {number}")

    runs = (("a", None), ("b", change), ("c", None))
    records = [read_record(recorded_run(tmp_path / name, like=plan_of, settings=how)) for name, how in runs]
    differing = find_differences(records)
    assert set(differing) == {path for path in chosen if not path.startswith("output.")}
    for path, (first, second, third) in differing.items():
        assert second == f"other {chosen.index(path)}"
        assert first == third != second
    assert find_differences([records[0], records[2]]) == {}


def test_data_versions_machine_and_plan_are_compared_too(tmp_path, plan_of):
    other = copy.deepcopy(MANIFEST)
    other["data"]["train"]["sha256"] = "e" * 64
    other["versions"]["torch"] = "2.14.0"
    other["git"]["commit"] = None
    other["hardware"]["gpus"] = [{"name": "H100"}] * 2
    one = recorded_run(tmp_path / "a", like=plan_of, summary=SUMMARY)
    two = recorded_run(tmp_path / "b", like=plan_of, manifest=other)
    plan = json.loads((two.path / "plan.json").read_text())
    (two.path / "plan.json").write_text(json.dumps({**plan, "layout": "fsdp", "ranks": 2}))
    assert find_differences([read_record(one), read_record(two)]) == {
        "plan: layout": ("single", "fsdp"), "plan: ranks": (1, 2), "content of train": ("a" * 12, "e" * 12),
        "version of torch": ("2.13.0", "2.14.0"), "machine": ("A CPU", "H100, H100"),
        "commit": ("0123456789ab", None),
    }  # fmt: skip
    # which is better is said where the losses compare
    lower = recorded_run(tmp_path / "c", like=plan_of, summary={**SUMMARY, "after": {"loss": 0.25}})
    answer = reports.compare_runs([one, lower])
    assert answer.lines()[1] == answer.better == "Better: c, by held-out loss: c 0.2500, a 0.5000"
    assert "of other rows or models (content of train)" in reports.compare_runs([two, lower]).better
    assert (
        "no held-out losses that differ"
        in reports.compare_runs([one, recorded_run(tmp_path / "d", like=plan_of)]).better
    )


def test_runs_are_refused_before_anything_is_written(tmp_path):
    one = recorded_run(tmp_path / "one")
    page = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="names one twice"):
        reports.compare_runs([one, find_run_folder(tmp_path, str(one.path))], path=page)
    (tmp_path / "odd").mkdir()
    with pytest.raises(RunFolderError, match="not a run folder"):
        reports.compare_runs([one, find_run_folder(tmp_path, "one"), find_run_folder(tmp_path, "odd")], path=page)
    assert not page.exists()


def test_make_compare_as_it_is_typed(tmp_path, plan_of, command):
    for place, count, status in (("outputs", 5, "finished"), ("elsewhere", 3, "stopped")):
        recorded_run(tmp_path / place / "first", like=plan_of, manifest={"status": status},
                     summary=SUMMARY if status == "finished" else None,
                     metrics=steps(count, eval_loss=lambda n: 1 / n),
                     settings=lambda resolved: changed(resolved, "model.name", HOSTILE))  # fmt: skip
    words = ("compare", "--config", "configs/run_starter.yaml", f"output.dir={tmp_path}/outputs")
    code, printed = command(*words, "--runs", f"first,{tmp_path}/elsewhere/first")
    assert code == 0, printed
    assert ["held-out loss after" in printed, "stopped" in printed] == [True, True]
    page = Page((tmp_path / "outputs" / "first" / "compare.html").read_text())
    assert {"script", "img"} & set(page.tags) == set()
    assert page.tags.count("svg") == 4
    assert page.text.count(HOSTILE) == 2  # in the list of runs: it is the same in both
    assert len({value for name, value in page.attributes if name == "style"}) == 2
    out = str(tmp_path / "other.html")
    code, printed = command(*words, "--runs", f"last {tmp_path}/elsewhere/first", "--json", "--out", out)
    answer = json.loads(printed)
    assert (code, answer["ok"], answer["path"], answer["differing"]) == (0, True, out, {})
    assert [run["status"] for run in answer["runs"]] == ["finished", "stopped"]
    assert [run["best_val_loss"] for run in answer["runs"]] == [pytest.approx(0.2), pytest.approx(1 / 3)]
    assert [run["loss_after"] for run in answer["runs"]] == [0.5, None]
    code, printed = command(*words)
    assert (code, "two runs or more" in printed) == (2, True)
