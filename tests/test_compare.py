"""`make compare`: what differs and nothing else, results beside each other, and no winner where rows differ."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from sft_play.config.options import all_options
from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.compare import compare_runs, comparison_charts, find_differences
from sft_play.finished.report import build_run_charts, read_record
from sft_play.finished.run import find_run_folder
from tests.recorded_runs import MANIFEST, SUMMARY, planned_folder, recorded_run, steps
from tests.test_report import HOSTILE, _Reader


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory, tiny_llama) -> Path:
    return planned_folder(tmp_path_factory.mktemp("planned") / "run", tiny_llama)


def changed(resolved: dict, path: str, value: object) -> None:
    *outer, name = path.split(".")
    for part in outer:
        resolved = resolved[part]
    resolved[name] = value


@pytest.mark.parametrize("seed", range(6))
def test_the_settings_that_differ_are_listed_and_no_others(tmp_path, plan_of, seed):
    draw = random.Random(seed)
    paths = [path for path in all_options() if "curriculum" not in path]
    chosen = draw.sample(paths, 5)

    def change(resolved):
        for number, path in enumerate(chosen):
            changed(resolved, path, f"other {number}")

    records = [
        read_record(recorded_run(tmp_path / name, like=plan_of, settings=settings))
        for name, settings in (("a", None), ("b", change), ("c", None))
    ]
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
    one = recorded_run(tmp_path / "a", like=plan_of)
    two = recorded_run(tmp_path / "b", like=plan_of, manifest=other)
    plan = json.loads((two.path / "plan.json").read_text())
    (two.path / "plan.json").write_text(json.dumps({**plan, "layout": "fsdp", "ranks": 2}))
    assert find_differences([read_record(one), read_record(two)]) == {
        "plan: layout": ("single", "fsdp"),
        "plan: ranks": (1, 2),
        "content of train": ("a" * 12, "e" * 12),
        "version of torch": ("2.13.0", "2.14.0"),
        "machine": ("A CPU", "H100, H100"),
        "commit": ("0123456789ab", None),
    }


def test_runs_are_refused_before_anything_is_written(tmp_path):
    one = recorded_run(tmp_path / "one")
    page = tmp_path / "page.html"
    with pytest.raises(ConfigError, match="two runs or more"):
        compare_runs([one], path=page)
    with pytest.raises(ConfigError, match="names one twice"):
        compare_runs([one, find_run_folder(tmp_path, str(one.path))], path=page)
    (tmp_path / "odd").mkdir()
    with pytest.raises(RunFolderError, match="not a run folder"):
        compare_runs([one, find_run_folder(tmp_path, "one"), find_run_folder(tmp_path, "odd")], path=page)
    assert not page.exists()


def test_make_compare_as_it_is_typed(tmp_path, plan_of, command):
    for place, name, count, status in (("outputs", "first", 5, "finished"), ("elsewhere", "first", 3, "stopped")):
        summary = SUMMARY if status == "finished" else None
        recorded_run(tmp_path / place / name, like=plan_of, manifest={"status": status}, summary=summary,
                     metrics=steps(count, eval_loss=lambda n: 1 / n),
                     settings=lambda resolved: changed(resolved, "model.name", HOSTILE))  # fmt: skip
    words = ("compare", "--config", "configs/run_starter.yaml", f"output.dir={tmp_path}/outputs")
    code, printed = command(*words, "--runs", f"first,{tmp_path}/elsewhere/first")
    assert code == 0, printed
    for shown in ("held-out loss after", "0.5000", "stopped",
                  f"make report RUN={tmp_path}/outputs/first"):  # fmt: skip
        assert shown in printed, shown
    assert "\x1b" not in printed
    text = (tmp_path / "outputs" / "first" / "compare.html").read_text()
    page = _Reader(text)
    assert {"script", "img"} & set(page.tags) == set()
    assert page.tags.count("svg") == 4
    assert page.text.count(HOSTILE) == 2  # in the list of runs: it is the same in both
    assert f"{tmp_path}/elsewhere/first" in page.text
    colours = [value for name, value in page.attributes if name == "style"]
    assert len(set(colours)) == 2
    assert all(f'stroke="{colour.removeprefix("background: ")}"' in text for colour in colours)

    out = str(tmp_path / "other.html")
    code, printed = command(*words, "--runs", f"last {tmp_path}/elsewhere/first", "--json", "--out", out)
    answer = json.loads(printed)
    assert (code, answer["ok"], answer["path"], answer["differing"]) == (0, True, out, {})
    assert [run["status"] for run in answer["runs"]] == ["finished", "stopped"]
    assert [run["best_val_loss"] for run in answer["runs"]] == [pytest.approx(0.2), pytest.approx(1 / 3)]
    assert [run["loss_after"] for run in answer["runs"]] == [0.5, None]
    for runs, told in (("", "two runs or more"), ("first", "two runs or more"), ("first nobody", "no run nobody")):
        code, printed = command(*words, *(("--runs", runs) if runs else ()))
        assert code == 2
        assert told in printed


def test_the_curves_of_all_runs_are_in_one_frame(tmp_path, plan_of):
    folders = [recorded_run(tmp_path / name, like=plan_of, metrics=steps(3)) for name in ("a", "b", "c")]
    records = [read_record(folder) for folder in folders]
    charts = {chart.title: chart for chart in comparison_charts(("a", "b", "c"), records)}
    assert list(charts) == ["Training loss", "Learning rate", "Tokens per second"]
    for chart in charts.values():
        assert [(curve.name, curve.colour_index) for curve in chart.curves] == [("a", 0), ("b", 1), ("c", 2)]
    assert charts["Training loss"].curves[1].points == build_run_charts(records[1])[0].curves[0].points
