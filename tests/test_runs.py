"""The run folder: its name, what an existing one means, what is written, and what never is."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import logging
import os
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sft_play.config.load import LoadedConfig, config_from_text, load_config
from sft_play.errors import RunFolderError
from sft_play.files import relative_to_cwd
from sft_play.log import escape_control, one_line, redact, start_log_file
from sft_play.runs.folder import (
    RunFolder,
    check_same_run,
    git_state,
    load_resumed_config,
    new_manifest,
    truncate_metrics,
    write_json,
)
from sft_play.runs.lookup import LAUNCHER, LOCK_FILE, WRITER, create_run, find_resumable, lock_run, new_run_folder
from tests.conftest import ROOT

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def loaded(tmp_path, text="", overrides=()):
    full = f"model: {{name: gpt2}}\noutput: {{dir: {tmp_path}/outputs}}\n{text}"
    config = config_from_text(full, name="run.yaml", overrides=overrides)
    return LoadedConfig(config, tmp_path / "run.yaml", full, tuple(overrides))


def make(tmp_path, name="one", **changes):
    job = loaded(tmp_path, overrides=(f"output.name={name}",))
    folder = new_run_folder(job.config.output, config_path=job.path, now=NOW)
    manifest = new_manifest(job, hardware={}, data={}) | changes
    create_run(folder, job, manifest=manifest, plan={"fits": True})
    return folder


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "/tmp/x", ".hidden", "~x", "a\\b", "a\nb", " a", "-rf", "a..b"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, name):
    job = loaded(tmp_path)
    folder = new_run_folder(job.config.output, config_path=job.path, now=NOW)
    assert folder.path == tmp_path / "outputs" / "run-20260102T030405Z"
    folder.path.mkdir(parents=True)
    assert new_run_folder(job.config.output, config_path=job.path, now=NOW).path.name == "run-20260102T030405Z-2"
    job = loaded(tmp_path, overrides=(f"output.name={json.dumps(name)}",))
    with pytest.raises(RunFolderError, match=r"output\.name=.*is refused"):
        new_run_folder(job.config.output, config_path=job.path)


def test_replace_moves_aside_only_a_folder_of_ours(tmp_path):
    folder = make(tmp_path)
    (folder.path / "mine.txt").write_text("kept")
    job = loaded(tmp_path, overrides=("output.name=one",))
    with pytest.raises(RunFolderError, match=r"if_exists=resume.*if_exists=replace.*another output\.name"):
        new_run_folder(job.config.output, config_path=job.path)  # an existing folder is a named decision
    job = loaded(tmp_path, overrides=("output.name=one", "output.if_exists=replace"))
    again = new_run_folder(job.config.output, config_path=job.path)
    create_run(again, job, manifest=new_manifest(job, hardware={}, data={}), plan={})
    (kept,) = (tmp_path / "outputs").rglob("mine.txt")
    assert (".replaced-" in kept.parent.name, kept.read_text()) == (True, "kept")

    foreign = tmp_path / "outputs" / "two"
    foreign.mkdir()
    (foreign / "thesis.doc").write_text("precious")
    job = loaded(tmp_path, overrides=("output.name=two", "output.if_exists=replace"))
    with pytest.raises(RunFolderError, match="has no manifest of this toolkit"):
        new_run_folder(job.config.output, config_path=job.path)
    job = loaded(tmp_path, overrides=("output.name=two",))
    with pytest.raises(RunFolderError, match="by another process in the meantime"):
        create_run(RunFolder(foreign), job, manifest={}, plan={})
    assert (foreign / "thesis.doc").read_text() == "precious"


def test_nothing_is_left_of_a_folder_that_could_not_be_made_or_of_a_killed_write(tmp_path, monkeypatch):
    job = loaded(tmp_path, overrides=("output.name=one",))
    folder, path = new_run_folder(job.config.output, config_path=job.path), tmp_path / "x.json"
    write_json(path, {"a": 1})

    def killed(temporary, text, **options):
        temporary.touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            create_run(folder, job, manifest={}, plan={})
        with pytest.raises(KeyboardInterrupt):
            write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert sorted(item.name for item in tmp_path.rglob("*")) == ["outputs", "x.json"]
    for name in ("a\0b", "\ud800"):
        with pytest.raises(RunFolderError, match=r"output\.dir=.* cannot be written: "):
            create_run(RunFolder(tmp_path / name / "one"), job, manifest={}, plan={})


def test_the_newest_unfinished_run_of_a_config_is_resumed(tmp_path):
    make(tmp_path, "old", status="stopped", started="2026-01-01T00:00:00+00:00")
    make(tmp_path, "new", status="stopped", started="2026-01-02T00:00:00+00:00")
    make(tmp_path, "done", status="finished", started="2026-01-03T00:00:00+00:00")
    job = loaded(tmp_path)

    def found(name: str | None = None, path: Path = job.path) -> str:
        return find_resumable(job.config.output, config_path=path, name=name).path.name

    assert (found(), found("old")) == ("new", "old")
    for name, said in (("done", "is finished"), ("nine", r"no run nine in .* the runs there: done, new, old")):
        with pytest.raises(RunFolderError, match=said):
            found(name)
    with pytest.raises(RunFolderError, match="no unfinished run of"):
        found(path=tmp_path / "other.yaml")


def test_a_run_without_a_trained_step_does_not_hide_an_older_one_that_has_trained(tmp_path, caplog):
    older, newer, newest = (make(tmp_path, name, started=f"2026-01-0{day}") for day, name in enumerate("abc", start=1))
    job = loaded(tmp_path)

    def found() -> str:
        return find_resumable(job.config.output, config_path=job.path).path.name

    assert found() == "c"  # the newest of those that would all start from the beginning
    (newest.path / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n{"step": 1, "lo')
    assert not newest.has_trained
    (older.path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with caplog.at_level("INFO"):
        assert found() == "a"
    assert caplog.text.count("no step was trained in it") == 2
    assert "RUN=c starts it again" in caplog.text
    (newer.path / "checkpoints" / "checkpoint-3").mkdir(parents=True)  # damaged, and still the trace of a step
    assert found() == "b"
    (newest.stage_folder("first").checkpoints_path / "checkpoint-1").mkdir(parents=True)
    assert found() == "c"
    assert newest.stage_folder("second").has_trained  # as the run that it is a stage of


def test_a_run_made_with_other_settings_is_not_resumed_silently(tmp_path):
    folder = make(tmp_path, batch={"micro_batch": 4}, data={"train": {"sha256": "aa"}})
    text = "tuning: {mode: lora}\ntrain: {seed: 7, logging_steps: 5, stop_after_steps: 3}\n"
    other = loaded(tmp_path, text, overrides=("output.name=one",))
    with pytest.raises(RunFolderError) as error:
        check_same_run(folder, other, data={"train": {"sha256": "bb", "path": "t.jsonl"}}, batch={"micro_batch": 2})
    for part in ('has "qlora", now "lora"', "has 42, now 7", "of t.jsonl has changed", "batch: the run has"):
        assert part in str(error.value)
    assert not re.search("logging_steps|stop_after_steps", str(error.value))
    same = loaded(tmp_path, overrides=("output.name=one", "train.stop_after_steps=9"))
    check_same_run(folder, same, data={"train": {"sha256": "aa"}}, batch={"micro_batch": 4})


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCY",
    "MY_DB_PASSWORD": "correct-horse-battery", "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}  # fmt: skip


def test_no_secret_reaches_a_file_of_the_run(tmp_path, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    text = "# notes: " + " ".join(SECRETS.values()) + "\n# https://user:hunter2hunter2@host/x.git\n"
    overrides = (f"model.name=/data/{SECRETS['MY_DB_PASSWORD']}/model", "output.name=one")
    job = loaded(tmp_path, text, overrides)
    folder = new_run_folder(job.config.output, config_path=job.path)
    manifest = new_manifest(job, hardware={"note": SECRETS["HF_TOKEN"]}, data={SECRETS["WANDB_API_KEY"]: 1})
    create_run(folder, job, manifest=manifest, plan={"reasons": [SECRETS["AWS_SECRET_ACCESS_KEY"]]})
    handler = start_log_file(folder.log_path)
    logging.getLogger("sft_play.x").warning("token %s at https://me:pw12345678@host", SECRETS["HF_TOKEN"])
    handler.close()
    written = "".join(path.read_text() for path in folder.path.rglob("*") if path.is_file())
    for value in (*SECRETS.values(), "hunter2hunter2", "pw12345678"):
        assert value not in written
    assert "***" in written


@pytest.mark.parametrize("secret", [
    "glpat-abcdefghij0123456789", "npm_abcdefghijklmnopqrstuvwxyz0123456789", "https://user:p4ss/w@rd@host",
    "AIzaSyA0123456789abcdefghijklmnopqrstuvw", "xoxb-123456789012-abcdefghijkl",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefghijk", "https://host/?access_token=s3cr3t-value-123",
])  # fmt: skip
def test_tokens_of_well_known_shapes_are_hidden_wherever_they_come_from(secret):
    shown = redact(f"# note: {secret} end")
    assert re.fullmatch(r".*\*\*\*.* end", shown)
    assert not re.search(r"abcdefghij|p4ss|w@rd|s3cr3t|Sy", shown)


def test_values_of_secret_variables_are_hidden_in_json_too_and_short_ones_hide_nothing(monkeypatch):
    monkeypatch.setenv("MY_PAT", 'a"b\\cdefghij')
    assert "cdefghij" not in redact(json.dumps({"x": 'a"b\\cdefghij'}))
    monkeypatch.setenv("USE_TOKEN", "true")
    assert redact("this is true") == "this is true"


def test_a_git_remote_with_credentials_is_not_recorded(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x")
    git("remote", "add", "origin", "https://user:ghp_abcdefghijklmnopqrstuvwxyz012345@github.com/x/y.git")
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40
    assert "ghp_" not in json.dumps(state)


def test_hostile_text_in_a_config_does_not_reach_the_terminal(tmp_path, command):
    assert escape_control("a\x1b[31mb\x07\x00\u202ec\td\n") == "a\\x1b[31mb\\x07\\x00\\u202ec\td\n"
    assert one_line("a\nb" + "x" * 200, limit=10) == "a\\nbxxxxx…"
    path = tmp_path / "run.yaml"
    path.write_text('model: {name: gpt2}\ntrain: {epochs: "\\e]0;owned\\a\\e[2J"}\n"\\e[31mkey": 1\n')
    code, printed = command("plan", "--config", str(path))
    assert (code, "\x1b" in printed) == (2, False)
    assert "\\x1b" in printed or "\\u001b" in printed


@pytest.mark.parametrize(("file", "content", "message"), [
    ("resolved.json", "[]", "damaged"), ("resolved.json", "{", "cannot be read"), ("manifest.json", "{", "no manifest"),
])  # fmt: skip
def test_a_damaged_run_says_what_is_damaged(tmp_path, file, content, message):
    folder = make(tmp_path)
    (folder.path / file).write_text(content)
    with pytest.raises(RunFolderError, match=message):
        check_same_run(folder, loaded(tmp_path, overrides=("output.name=one",)), data={}, batch={})


@pytest.mark.parametrize("path", ["train.weight_decay", "tuning.lora.r"])
def test_a_key_that_a_version_added_hinders_no_old_run_unless_it_changes_something(tmp_path, path):
    folder = make(tmp_path)
    job = loaded(tmp_path, overrides=("output.name=one",))
    old = json.loads((folder.path / "resolved.json").read_text())
    outer, _, name = path.rpartition(".")
    had = functools.reduce(lambda holder, part: holder[part], outer.split("."), old).pop(name)
    (folder.path / "resolved.json").write_text(json.dumps(old))
    check_same_run(folder, job, data={}, batch={})
    another = had / 2 if had else 0.25
    word = f"{path}={another if isinstance(had, float) else 2 * had}"
    with pytest.raises(RunFolderError, match=path):
        check_same_run(folder, loaded(tmp_path, overrides=("output.name=one", word)), data={}, batch={})


def test_metrics_after_the_checkpoint_are_dropped_for_a_resumed_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": step}) + "\n" for step in range(5))
    path.write_text(whole + '5\n{"step": null}\n{"step": 5, "lo')
    truncate_metrics(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


LOCK = (
    "import sys; from pathlib import Path; from sft_play.runs.folder import RunFolder; "
    "from sft_play.runs.lookup import lock_run; mark = lock_run(RunFolder(Path(sys.argv[1]))"
)
"""The begin of a program that marks a run as being written."""


@pytest.fixture
def writer(tmp_path):
    """Starts a process that marks a run as being written until it is killed."""
    started = []

    def begin(folder, by=None):
        code = f"{LOCK}, role={by}); sys.stdout.write('locked'); sys.stdout.flush(); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        started.append(subprocess.Popen([sys.executable, "-c", code, str(folder.path)], **pipes))
        assert started[-1].stdout.read(6) == "locked"
        return started[-1]

    yield begin
    for process in started:
        end(process)


def end(process):
    process.kill()
    process.communicate()


def test_nobody_takes_the_folder_of_a_run_that_lives_and_a_crash_lets_it_go(tmp_path, writer, caplog):
    from sft_play.finished.listing import prune
    from sft_play.training.checkpoints.last_checkpoint import consolidate

    folder = make(tmp_path, status="finished")
    (folder.path / "tb").mkdir()
    (folder.path / "tb" / "events.out.tfevents.1").write_text("curve")
    other = writer(folder)
    job = loaded(tmp_path, overrides=("output.name=one", "output.if_exists=replace"))
    takers = [
        lambda: new_run_folder(job.config.output, config_path=job.path),  # a start that replaces
        lambda: create_run(folder, job, manifest={}, plan={}),  # one that looked before it was there
        lambda: lock_run(folder),  # a resumed run
        lambda: consolidate(folder),
    ]
    for take in takers:
        with pytest.raises(RunFolderError, match=f"another process .pid {other.pid} on .*kill {other.pid}"):
            take()
    assert prune({folder: {folder.path / "tb" / "events.out.tfevents.1": 5}}).removed == ()
    assert f"kept: {folder.path} is being written by another process (pid {other.pid}" in caplog.text
    assert (folder.path / "tb" / "events.out.tfevents.1").exists()
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["one"]  # nothing half made either

    end(other)
    with pytest.raises(RunFolderError, match="no complete checkpoint"):
        consolidate(folder)
    mark = create_run(new_run_folder(job.config.output, config_path=job.path), job, manifest={}, plan={})
    with pytest.raises(RunFolderError, match="already being written by this process"):
        lock_run(folder)
    mark.close()
    assert not (folder.path / LOCK_FILE).exists()
    assert len(list((tmp_path / "outputs").glob("one.replaced-*"))) == 1


def test_the_command_that_starts_ranks_and_the_rank_that_writes_have_a_part_each(tmp_path, writer):
    folder = make(tmp_path)
    parent = writer(folder, LAUNCHER)
    for by in (None, LAUNCHER):
        with pytest.raises(RunFolderError, match=f"pid {parent.pid} on "):
            lock_run(folder, role=by)
    rank = writer(folder, WRITER)
    end(parent)
    for by in (None, WRITER):  # the rank still saves
        with pytest.raises(RunFolderError, match="being written by another process"):
            lock_run(folder, role=by)
    end(rank)
    lock_run(folder).close()


TAKE_TURNS = """
import os, random, sys, time
from pathlib import Path
from sft_play.config.load import LoadedConfig, config_from_text, load_config
from sft_play.errors import RunFolderError
from sft_play.runs.lookup import create_run, new_run_folder
from sft_play.runs.folder import MANIFEST_FORMAT
from sft_play.runs.lookup import lock_run
base, seed = Path(sys.argv[1]), int(sys.argv[2])
draw, made, until = random.Random(seed), 0, time.monotonic() + float(sys.argv[3])
text = f"model: {{name: gpt2}}\\noutput: {{dir: {base}, name: one, if_exists: replace}}"
job = LoadedConfig(config_from_text(text, name="run.yaml"), base / "run.yaml", text, ())
while time.monotonic() < until:
    try:
        folder = new_run_folder(job.config.output, config_path=job.path)
        time.sleep(draw.random() * 0.004)
        if draw.random() < 0.5 or not folder.path.exists():
            mark = create_run(folder, job, manifest={"format": MANIFEST_FORMAT, "pid": os.getpid()}, plan={})
        else:
            mark = lock_run(folder)
            folder.update_manifest(pid=os.getpid())
    except RunFolderError as error:
        known = ("being written by another", "created by another process in the meantime", "No such file",
                 "no manifest")
        assert any(word in str(error) for word in known), error
        continue
    made += 1
    time.sleep(draw.random() * 0.004)
    assert folder.read_manifest()["pid"] == os.getpid(), "somebody took the folder of a run that lives"
    mark.close() if draw.random() < 0.8 else os._exit(9)
assert made
"""


def test_whoever_comes_first_keeps_the_folder(tmp_path):
    words = [sys.executable, "-c", TAKE_TURNS, str(tmp_path / "outputs")]
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    several = [subprocess.Popen([*words, str(n), "0.7"], **options) for n in range(3)]
    for process in several:
        _, printed = process.communicate(timeout=120)
        assert process.returncode in (0, 9), printed  # 9: it was to crash
    left = [path.name for path in (tmp_path / "outputs").iterdir()]
    assert all(name == "one" or name.startswith(("one.replaced-", ".one.")) for name in left), left


@pytest.mark.parametrize("owner", ["dead", "of our pid", "alive", "elsewhere"])
def test_on_a_disk_without_locks_the_note_of_who_writes_is_believed(tmp_path, monkeypatch, caplog, owner):
    folder = make(tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    # a container gives the next start the pid of the one that was killed
    pid = {"alive": os.getppid(), "of our pid": os.getpid()}.get(owner, ended.pid)
    host = "another-host" if owner == "elsewhere" else socket.gethostname()
    (folder.path / LOCK_FILE).write_text(json.dumps({"pid": pid, "host": host, "since": "2026-01-02T03:04:05+00:00"}))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    if owner in ("dead", "of our pid"):
        lock_run(folder).close()
        assert "the file system does not support locks (No locks available)" in caplog.text
    else:
        with pytest.raises(RunFolderError, match=rf"pid {pid} on {host}, since 2026-01-02.*remove .*run\.lock"):
            lock_run(folder)


def test_a_lock_that_an_error_keeps_is_released_in_silence_at_the_end(tmp_path):
    (tmp_path / "run").mkdir()
    words = [sys.executable, "-c", f"{LOCK}); sys.kept = mark", str(tmp_path / "run")]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stderr == ""
    assert list((tmp_path / "run").iterdir()) == []


def test_a_path_is_named_from_the_current_folder_on_by_whatever_links(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "outputs").mkdir(parents=True)
    link.symlink_to(real)
    (real / "disk").symlink_to(tmp_path)
    monkeypatch.chdir(link)
    inside = {
        "my.yaml": [Path("my.yaml"), real / "my.yaml", link / "my.yaml", real / "outputs" / ".." / "my.yaml"],
        "disk/my.yaml": [link / "disk" / "my.yaml"],
        "not/there": [real / "not" / "there"],
    }
    for name, paths in inside.items():
        assert {str(relative_to_cwd(path)) for path in paths} == {name}
    for path in (Path("../my.yaml"), tmp_path / "my.yaml", tmp_path, Path("/"), Path("/not/here")):
        assert relative_to_cwd(path) == path
    (real / "outputs").rmdir()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert relative_to_cwd(real / "my.yaml") == real / "my.yaml"


def test_a_resume_takes_each_recorded_setting_once_and_what_is_given_now_over_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: a}\n")
    first = load_config(path, overrides=["train.epochs=2", "train.seed=7", "model.mesh_shape=[2]", "output.name=one"])
    folder = RunFolder(tmp_path / "one")
    folder.path.mkdir()
    folder.write_json("manifest.json", new_manifest(first, hardware={}, data={}))

    def resumed(*given: str, keeps_mesh: bool = True) -> tuple[str, ...]:
        now = load_config(path, overrides=list(given))
        return load_resumed_config(now, folder, is_trusted=lambda *_: True, keeps_mesh=keeps_mesh).overrides

    assert resumed() == ("train.epochs=2", "train.seed=7", "model.mesh_shape=[2]")
    assert resumed("train.seed=8") == ("train.epochs=2", "model.mesh_shape=[2]", "train.seed=8")
    assert resumed(keeps_mesh=False)[-1] == "model.mesh_shape=null"
    assert resumed("model.mesh_shape=[4]", keeps_mesh=False)[-1] == "model.mesh_shape=[4]"
    folder.write_json("resolved.json", {"train": {"kernels": "none", "compile": False}})  # from before auto was default
    assert resumed()[:2] == ("train.compile=false", 'train.kernels="none"')
    assert resumed("train.kernels=auto")[0] == "train.compile=false"
