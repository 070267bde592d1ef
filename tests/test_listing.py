"""`make runs` and `make prune`: what is listed is what there is, and only what is named goes."""

import contextlib
import json
import random
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sft_play.errors import RunFolderError
from sft_play.finished.listing import find_best_checkpoint, list_runs, prune, select_prunable
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder, write_json
from sft_play.runs.lookup import check_run_name, open_run

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def make_run(output: Path, name: str, *, status: str = "finished", hours: float = 1, **figures) -> RunFolder:
    folder = RunFolder(output / name)
    (folder.path / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    (folder.path / "checkpoints" / "checkpoint-4" / "weights").write_bytes(b"x" * 1000)
    started = (NOW - timedelta(hours=hours)).isoformat()
    write_json(folder.manifest_path, {"format": MANIFEST_FORMAT, "status": status, "started": started})
    write_json(folder.path / "resolved.json", {"model": {"name": "some/base"}, "tuning": {"mode": "lora"}})
    lines = [{"step": 2, "loss": 3.0}, {"step": 4, "loss": 2.0, **figures}]
    folder.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    return folder


def runs(output: Path, names: list[str]) -> list[RunFolder]:
    return [open_run(output, check_run_name(name, key="RUNS")) for name in names]


def test_a_run_is_listed_with_its_status_step_best_figure_and_age(tmp_path):
    make_run(tmp_path, "a", eval_loss=1.5, hours=50)
    make_run(tmp_path, "b", status="stopped", hours=3)
    make_run(tmp_path, "c", status="running", hours=0.5)
    live = make_run(tmp_path, "d", status="running", hours=0.01, eval_exact_match=0.25, eval_loss=1.0)
    (tmp_path / "not-a-run").mkdir()
    with locked_elsewhere(live):
        listed = list_runs(tmp_path, now=NOW)
    assert [(run.name, run.status, run.best_metric, run.best_value) for run in listed.runs] == [
        ("d", "running", "exact_match", 0.25), ("c", "failed", None, None), ("b", "stopped", None, None),
        ("a", "finished", "loss", 1.5),
    ]  # fmt: skip
    assert ["exact match 25.0%" in listed.lines()[1], "loss 1.5" in listed.lines()[4]] == [True, True]
    assert {run.step for run in listed.runs} == {4}
    assert "2.1 days" in listed.lines()[-3]
    assert json.loads(json.dumps(listed.as_json()))["runs"][3]["best_value"] == 1.5


def test_the_best_figure_is_that_of_all_evaluations_and_of_the_one_after_training(tmp_path):
    folder = make_run(tmp_path, "run")
    lines = [json.dumps({"step": step, "eval_loss": loss}) + "\n" for step, loss in enumerate((3.0, 2.0, 4.0))]
    folder.metrics_path.write_text("".join(lines))
    for after, best in ((2.5, 2.0), (1.0, 1.0)):
        write_json(folder.path / "summary.json", {"after": {"loss": after, "exact_match": None}})
        (run,) = list_runs(tmp_path).runs
        assert (run.best_metric, run.best_value) == ("loss", best)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_checkpoint_is_that_of_the_best_evaluation(seed, tmp_path):
    """Against another implementation: the first of the evaluations in the order of the metric that was asked for."""
    random_ = random.Random(seed)
    metric, has_stages = random_.choice(["loss", "exact_match"]), random_.random() < 0.4
    run = RunFolder(tmp_path / "run")
    stages = ["short", "long"] if has_stages else [None]
    lines, last = [], []
    for stage in stages:
        last = [
            {"step": step, "eval_loss": random_.choice([0.5, 1.0, 1.5, float("nan")]),
             "eval_exact_match": random_.choice([0.0, 0.5, 1.0]), **({"stage": stage} if stage else {})}
            for step in range(random_.choice([0, 5, 9]))
        ]  # fmt: skip
        last = last or [{"step": 3, "loss": 2.0, **({"stage": stage} if stage else {})}]
        lines += last
    part = run.stage_folder("long") if has_stages else run
    saved = [entry["step"] for entry in last if random_.random() < 0.7]
    for step in saved:
        (part.checkpoints_path / f"checkpoint-{step}").mkdir(parents=True)
    write_json(part.path / "resolved.json", {"train": {"metric_for_best_model": metric}})
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    key = f"eval_{metric}"
    judged = [one for one in last if one["step"] > 0 and key in one and one[key] == one[key]]
    judged.sort(key=lambda one: one[key], reverse=metric == "exact_match")  # which keeps equal ones in order
    step = judged[0]["step"] if judged else None
    path = str(part.checkpoints_path / f"checkpoint-{step}") if step in saved else None
    assert find_best_checkpoint(run) == {"best_step": step, "best_checkpoint": path}


def test_a_damaged_run_has_no_best_checkpoint_and_is_listed(tmp_path):
    for name, text in (("a", "["), ("b", '{"train": {"metric_for_best_model": "x"}}')):
        run = make_run(tmp_path, name)
        (run.path / "resolved.json").write_text(text)
    run.metrics_path.unlink()
    listed = list_runs(tmp_path, now=NOW).as_json()["runs"]
    assert {(one["best_step"], one["best_checkpoint"]) for one in listed} == {(None, None)}


@contextlib.contextmanager
def locked_elsewhere(folder: RunFolder):
    """While it lasts, another process has locked a run, as ship and merge do."""
    code = (
        "import sys, time; from pathlib import Path; "
        "from sft_play.runs.folder import RunFolder; from sft_play.runs.lookup import lock_run; "
        "mark = lock_run(RunFolder(Path(sys.argv[1]))); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield
        finally:
            process.kill()


def test_prune_removes_what_is_named_and_nothing_else(tmp_path):
    one, other = make_run(tmp_path, "one"), make_run(tmp_path, "other")
    make_run(tmp_path, "stopped", status="stopped")
    assert {run.checkpoint_bytes for run in list_runs(tmp_path).runs} == {1000}
    chosen = select_prunable(runs(tmp_path, ["one"]), "checkpoints")
    assert chosen == {one: {one.path / "checkpoints": 1000}}
    assert prune(chosen).freed_bytes == 1000
    assert ((one.path / "checkpoints").exists(), one.manifest_path.is_file()) == (False, True)
    for names, what, said in (
        (["stopped"], "checkpoints", "not finished"),
        (["one", "nothing"], "run", "there is no run"),
        (["../one"], "run", "refused"),
    ):
        with pytest.raises(RunFolderError, match=said):
            select_prunable(runs(tmp_path, names), what)
    prune(select_prunable(runs(tmp_path, ["stopped", "one"]), "run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
    assert other.manifest_path.is_file()


def test_a_run_that_is_being_written_is_not_removed(tmp_path, caplog):
    live, other = make_run(tmp_path, "live"), make_run(tmp_path, "other")
    chosen = select_prunable(runs(tmp_path, ["live", "other"]), "run")  # nobody writes it yet
    with locked_elsewhere(live):
        assert [run.status for run in list_runs(tmp_path, now=NOW).runs] == ["finished", "finished"]
        for scope in ("run", "checkpoints"):
            with pytest.raises(RunFolderError, match="being written"):
                select_prunable(runs(tmp_path, ["live"]), scope)
        pruned = prune(chosen)
        assert (pruned.ok, pruned.removed, pruned.kept) == (False, (other.path,), (live.path,))
        assert live.manifest_path.is_file()
    assert f"kept: {live.path} is being written by another process" in caplog.text
    # one that is resumed while the question is open keeps its checkpoints
    one = make_run(tmp_path, "one")
    chosen = select_prunable(runs(tmp_path, ["one"]), "checkpoints")
    one.update_manifest(status="stopped")
    assert not prune(chosen).ok
    assert f"kept: {one.path} is not finished (stopped)" in caplog.text
    assert (one.path / "checkpoints").is_dir()


def test_a_link_to_a_run_is_not_followed(tmp_path):
    far = make_run(tmp_path / "far", "away")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "link").symlink_to(far.path)
    for what in ("run", "checkpoints"):
        with pytest.raises(RunFolderError, match=f"is a link to {far.path}: name that folder"):
            select_prunable(runs(tmp_path / "outputs", ["link"]), what)


def test_the_commands_list_and_ask_before_they_remove(tmp_path, command, succeed):
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"model: {{name: x}}\ndata: {{train_path: x}}\noutput: {{dir: {tmp_path}/outputs}}\n")
    make_run(tmp_path / "outputs", "first")

    words, first = ("--config", str(yaml)), tmp_path / "outputs" / "first"
    assert "first" in succeed("runs", *words)
    code, printed = command("prune", *words, "--runs", "first")
    assert (code, "YES=1" in printed, first.is_dir()) == (2, True, True)
    printed = succeed("prune", *words, "--runs", "first", "--yes", "--json")
    assert json.loads(printed.splitlines()[-1])["removed"] == [str(first)]
    assert not first.exists()
