"""TensorBoard beside a run: started, found again, shown, stopped however the run ends, and never in its way."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sft_play.commands import boards as commands
from sft_play.config.load import load_config
from sft_play.launch import tensorboard as board
from sft_play.launch.request import add_tensorboard_tracker
from sft_play.runs.folder import MANIFEST_FORMAT, RunFolder
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.models import uneven_run
from tests.processes import free_port, is_alive, wait_for
from tests.test_train import metrics

WAIT_S = 120
END_S = 30


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """A cache of this test's own; TensorBoards that run for it at the end are stopped."""
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "own-cache"))
    yield tmp_path / "own-cache"
    for one in board.running_servers():
        board.stop_server(one)


OPENS_AT = "?smoothing=0#custom_scalars&_smoothingWeight=0"


def fetch(asked: str | urllib.request.Request) -> tuple[int, bytes]:
    """Status and content of a page."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=20) as page:
            return page.status, page.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def scalars(url: str, run: str, tag: str) -> dict[int, float]:
    """Step and value of a curve, as TensorBoard's own HTTP interface gives them; empty where there is none yet."""
    if tag not in json.loads(fetch(f"{url}data/plugin/scalars/tags")[1]).get(run, {}):
        return {}
    asked = f"run={urllib.request.quote(run)}&tag={urllib.request.quote(tag)}"
    rows = json.loads(fetch(f"{url}data/plugin/scalars/scalars?{asked}")[1])
    return {int(step): value for _, step, value in rows}


def test_tensorboard_starts_is_found_again_and_ends_with_its_children(tmp_path):
    logs = tmp_path / "tb"
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    first, words = board.start_server(logs, port=port)
    assert first is not None, words
    assert (first.port > port, f"port {port} is taken" in words) == (True, True)
    taken.close()
    assert b"<html" in fetch(first.url)[1].lower()
    assert not logs.exists()  # a run makes its folder itself
    assert board.running_servers() == [first]
    again, words = board.start_server(logs, port=port)
    assert (again, "already" in words) == (replace(first, is_reused=True), True)
    members = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    assert "stopped" in board.stop_server(again)
    assert not [member for member in members if is_alive(member.pid)]
    assert board.running_servers() == []
    assert "is not running any more" in board.stop_server(first)


def test_only_this_machines_names_and_pages_read_the_curves(tmp_path):
    for host, is_asked in (("127.0.0.1", True), ("0.0.0.0", False)):
        sidecar, words = board.start_server(tmp_path / "tb", host=host, port=0)
        assert sidecar is not None, words
        asking = [({"Host": "localhost:6006"}, 200), ({"Host": "evil.example:6006"}, 403)]
        asking += [({"Origin": "http://127.0.0.1:3000"}, 200), ({"Origin": "null"}, 403)]
        try:
            for headers, status in asking:
                asked = urllib.request.Request(f"{sidecar.url}data/environment", headers=headers)
                assert fetch(asked)[0] == (status if is_asked else 200), headers
        finally:
            board.stop_server(sidecar)


@pytest.fixture
def other() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts somebody else's process, with a TensorBoard's words or in its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", *words]
        process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout.read(1) == b"1"  # it has its own command line by now
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_only_what_this_project_started_from_this_cache_is_found_and_stopped(other, own_cache):
    words = (board._TENSORBOARD_MODULE, "--logdir=/x", "--host=127.0.0.1", "--port=1")
    ours = other(*words, **{board.OWNER_VARIABLE: str(own_cache)})
    others = [
        other(*words),  # started by hand
        other(*words, **{board.OWNER_VARIABLE: str(own_cache / "elsewhere")}),
        other(*words[1:], **{board.OWNER_VARIABLE: str(own_cache)}),  # a child that has the environment only
        other(words[0], **{board.OWNER_VARIABLE: str(own_cache)}),  # not over any folder
    ]
    (found,) = board.running_servers()
    assert (found.pid, found.logdir, found.host, found.port) == (ours.pid, "/x", "127.0.0.1", 1)
    assert board.stop_server(found) == f"TensorBoard (pid {ours.pid}) stopped"
    assert [process.poll() for process in others] == [None] * 4
    assert board.running_servers() == []


def test_a_pid_that_is_another_programs_by_now_ends_nothing(other):
    process = other()
    reused = psutil.Process(process.pid)
    # psutil tells processes of the same pid apart by when they were started.
    reused._create_time = reused.create_time() - 60
    reused._ident = (process.pid, reused._create_time)
    assert "is not running any more" in board.stop_server(board.TensorBoardServer(reused, "127.0.0.1", 1, "/x"))
    assert process.poll() is None


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_sidecar_that_cannot_start_or_hangs_is_a_reason_and_leaves_nothing(tmp_path, monkeypatch):
    broken = program(tmp_path / "broken.sh", "#!/bin/sh\necho no module named tensorboard >&2\nexit 3\n")
    for python, expected in [(broken, "no module named tensorboard"), (str(tmp_path / "none"), "No such file")]:
        sidecar, words = board.start_server(tmp_path / "tb", port=free_port(), python=python, ends_with_caller=True)
        assert (sidecar, expected in words) == (None, True)
        assert board.running_servers() == []
    assert board.start_server(tmp_path / "tb", port=70000)[0] is None
    hanging = program(tmp_path / "hang.sh", f"#!/bin/sh\necho $$ > {tmp_path / 'pid'}\nexec sleep 60\n")
    options = {"python": hanging, "timeout_s": 1, "ends_with_caller": True}
    sidecar, words = board.start_server(tmp_path / "tb", port=free_port(), **options)
    assert (sidecar, "did not answer" in words) == (None, True)
    assert not is_alive(int((tmp_path / "pid").read_text()))
    monkeypatch.setenv("SFT_PLAY_CACHE", broken)  # a file
    assert board.start_server(tmp_path / "tb", port=free_port())[0] is None


def test_a_host_whose_name_means_an_address_of_ipv6_alone_is_listened_on(monkeypatch):
    resolve = socket.getaddrinfo
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *words, **options: resolve("::1", *words, **options))
    assert board._find_free_port("six.example", 0) > 0


FAKE = """#!{python}
import http.server, json, sys
from sft_play.process.signals import watch_parent
watch_parent()
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"data_location": options["logdir"]}}).encode())
    def log_message(self, *words):
        pass
http.server.HTTPServer((options["host"], int(options["port"])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path):
    """A program that answers as TensorBoard does, in a tenth of the time."""
    return program(tmp_path / "fake.py", FAKE.format(python=sys.executable))


def test_it_stops_with_the_run_unless_it_is_kept_or_was_there_before(tmp_path, fake, caplog):
    caplog.set_level(logging.INFO)
    options = {"port": 0, "python": fake}
    before = set(psutil.Process().children())  # what an earlier test left: the tracker of its worker processes
    with contextlib.suppress(KeyError), board.sidecar(tmp_path / "tb", environment={}, **options) as sidecar:
        assert is_alive(sidecar.pid)
        raise KeyError("the training fails")
    assert not is_alive(sidecar.pid)
    assert set(psutil.Process().children()) <= before
    with board.sidecar(tmp_path / "tb", environment={"TB_KEEP": "1"}, **options) as kept:
        pass
    with board.sidecar(tmp_path / "tb", environment={}, **options) as reused:
        assert (reused.pid, reused.is_reused) == (kept.pid, True)
    assert board.running_servers() == [kept]
    assert "stopped" in board.stop_server(kept)
    assert "is not running any more" not in caplog.text
    with board.sidecar(tmp_path / "tb", environment={}, **options) as sidecar:  # one that crashes on the way
        psutil.Process(sidecar.pid).kill()
        wait_for(lambda: not is_alive(sidecar.pid), within_s=END_S)
    assert "is not running any more" in caplog.text
    assert board.running_servers() == []


def test_starts_at_the_same_time_leave_one_process_each_that_their_runs_end(tmp_path, fake):
    port = free_port()
    with ThreadPoolExecutor(5) as pool:
        begun = pool.map(lambda name: board.start_server(tmp_path / name, port=port, python=fake)[0], "aabbc")
    found = list(begun)
    assert len({(sidecar.port, sidecar.pid) for sidecar in found}) == len({sidecar.port for sidecar in found}) == 3
    assert {Path(sidecar.logdir).name for sidecar in found} == set("abc")
    assert sum(sidecar.is_reused for sidecar in found) == 2
    assert all("stopped" in board.stop_server(sidecar) for sidecar in found if not sidecar.is_reused)


def test_on_another_host_there_is_one_of_its_own_and_it_says_that_there_is_no_password(tmp_path, fake, caplog):
    first, _ = board.start_server(tmp_path / "tb", port=0, python=fake)
    assert "password" not in caplog.text
    with board.sidecar(tmp_path / "tb", environment={"TB_HOST": "0.0.0.0"}, port=0, python=fake) as second:
        assert second.url == f"http://127.0.0.1:{second.port}/"
        warning = next(line for line in caplog.records if line.levelno == logging.WARNING)
        assert "TensorBoard listens on 0.0.0.0 and has no password" in warning.getMessage()
        assert f"ssh -L {second.port}:127.0.0.1:{second.port}" in warning.getMessage()
    assert not is_alive(second.pid)
    assert board.running_servers() == [first]


@pytest.mark.parametrize(("environment", "why"), [
    ({"TB_PORT": "80x"}, "TB_PORT=80x is not a whole number from 1"),
    ({"TB_PORT": "65536"}, "TB_PORT=65536 is not a port; ports go from 1 to 65535"),
    ({"TB_HOST": "192.0.2.1"}, "192.0.2.1 cannot be listened on: Cannot assign requested address"),
    ({"TB_HOST": "no such host"}, "no such host cannot be listened on: "),
])  # fmt: skip
def test_what_cannot_be_meant_is_one_warning_and_the_run_goes_on(tmp_path, fake, caplog, environment, why):
    with board.sidecar(tmp_path / "tb", environment=environment, python=fake) as sidecar:
        assert sidecar is None
    (warning,) = caplog.messages
    assert (f"no TensorBoard: {why}" in warning, "training continues without it" in warning) == (True, True)


OWNER = """
import sys, time
from pathlib import Path
from sft_play.launch import tensorboard as board
logs, python = Path(sys.argv[1]), sys.argv[2]
with board.sidecar(logs, environment={}, port=0, python=python) as sidecar:
    (logs.parent / "pid").write_text(str(sidecar.pid))
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_it_ends_when_the_process_that_wanted_it_ends_by_a_signal(tmp_path, fake, number):
    words, environment = (
        [sys.executable, "-c", OWNER, str(tmp_path / "tb"), fake],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    with subprocess.Popen(words, env=environment, start_new_session=True) as process:
        pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        assert os.getsid(process.pid) != os.getsid(pid)  # a terminal's Ctrl-C does not reach it
        process.send_signal(number)
    wait_for(lambda: not is_alive(pid), within_s=END_S)
    assert board.running_servers() == []


def make_run(base: Path, name: str, status: str | None, *, files: int = 1) -> RunFolder:
    """A run folder with event files of 1,000 bytes, and a manifest unless `status` is None."""
    folder = RunFolder(base / name)
    folder.tensorboard_path.mkdir(parents=True)
    for number in range(files):
        (folder.tensorboard_path / f"events.out.tfevents.{number}.host").write_bytes(b"x" * 1000)
    (folder.tensorboard_path / "notes.txt").write_text("mine")
    if status is not None:
        folder.log_path.write_text("")
        folder.manifest_path.write_text(json.dumps({"format": MANIFEST_FORMAT, "status": status}))
    return folder


def events(base: Path) -> set[str]:
    return {path.parents[1].name for path in base.rglob("events.out.tfevents.*")}


@pytest.fixture
def several(tmp_path) -> Path:
    """Runs of every state, one of somebody else's, and one behind a link."""
    base = tmp_path / "outputs"
    for status in ("finished", "running", "stopped", "failed"):
        make_run(base, status, status, files=2)
    make_run(base, "foreign", None)
    make_run(tmp_path / "far", "away", "finished")
    (base / "link").symlink_to(tmp_path / "far" / "away")
    linked = make_run(base, "linked-tb", "finished")
    shutil.rmtree(linked.tensorboard_path)
    linked.tensorboard_path.symlink_to(tmp_path / "far" / "away" / "tb")
    return base


@pytest.fixture
def on(command, tmp_path, tiny_llama) -> Callable[..., tuple[int, str]]:
    """Runs a command on an output folder: its exit code, and what it printed."""
    path = uneven_run(tmp_path, tiny_llama)
    return lambda name, base, *words: command(name, "--config", str(path), f"output.dir={base}", *words)


def answer_in(printed: str) -> dict[str, Any]:
    return next(json.loads(line) for line in printed.splitlines() if line.startswith("{"))


def test_clean_removes_the_event_files_of_finished_runs_and_nothing_else(several, tmp_path, on):
    code, printed = on("tb-clean", several, "--yes", "--json")
    assert (code, "Removed: 2 event files, 2.0 KiB" in printed) == (0, True), printed
    assert f"kept: {several}/stopped is not finished (stopped)" in printed
    assert f"kept: {several}/running is not finished (failed)" in printed, "no process writes it: it was killed"
    assert events(several) == {"running", "stopped", "failed", "foreign"}
    assert events(tmp_path / "far") == {"away"}
    removed = [str(several / "finished" / "tb" / f"events.out.tfevents.{number}.host") for number in (0, 1)]
    assert answer_in(printed) == {"ok": True, "kind": "done", "exit": 0, "removed": removed, "freed_bytes": 2000}
    assert (several / "finished" / "tb" / "notes.txt").exists()
    assert "There are no event files of finished runs" in on("tb-clean", several)[1]  # and nothing to ask about


def test_clean_of_a_run_that_may_go_on_or_is_somebody_elses_is_refused(several, on):
    before = events(several)
    for name, why in (("stopped", "not finished (stopped)"), ("foreign", "has no manifest")):
        code, printed = on("tb-clean", several, "--run", name, "--yes")
        assert (code, why in printed) == (2, True), printed
    assert "There are no event files" in on("tb-clean", several, "--run", "linked-tb", "--yes")[1]
    assert events(several) == before
    assert (on("tb-clean", several, "--run", "finished", "--yes")[0], events(several)) == (0, before - {"finished"})


def test_clean_asks_at_a_terminal_and_takes_only_a_yes(several, on, monkeypatch):
    before = events(several)
    code, printed = on("tb-clean", several)
    assert (code, "there is no terminal to ask on" in printed) == (2, True)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    asked: list[str] = []
    for answer in ("", "n", "no", "yess"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: asked.append(question) or answer)
        code, printed = on("tb-clean", several)
        assert (code, printed.count("Removed: 0 event files")) == (0, 1)
    assert set(asked) == {"Remove 2 event files, 2.0 KiB, of 1 finished run? [y/N] "}
    assert (on("tb-clean", several, "--json")[0], events(several)) == (2, before)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert (on("tb-clean", several)[0], events(several)) == (0, before - {"finished"})


def test_clean_leaves_a_finished_run_that_is_still_being_written(several, on, monkeypatch):
    hold = (
        "import sys; from pathlib import Path; "
        "from sft_play.runs.folder import RunFolder; from sft_play.runs.lookup import lock_run; "
        "held = lock_run(RunFolder(Path(sys.argv[1]))); print(1, flush=True); input()"
    )
    words = [sys.executable, "-c", hold, str(several / "finished")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert "is being written" in on("tb-clean", several, "--yes")[1]
        # One that begins to be written while the question is open is kept too.
        monkeypatch.setattr("sft_play.finished.listing.lock_holder_pid", lambda folder: None)
        printed = on("tb-clean", several, "--yes")[1]
        assert f"kept: {several}/finished is being written by another process (pid {holder.pid}" in printed
        assert ("Removed: 0 event files" in printed, "finished" in events(several)) == (True, True)
        holder.kill()


def test_stop_ends_those_of_a_folder_or_all(tmp_path, fake, on, command):
    base = tmp_path / "outputs"
    one, two = make_run(base, "one", "running"), make_run(base, "two", "running")
    away = tmp_path / "elsewhere"
    places = (one.tensorboard_path, two.tensorboard_path, base, away)
    first, second, third, fourth = (board.start_server(place, port=0, python=fake)[0].pid for place in places)
    assert {server.pid for server in board.running_servers()} == {first, second, third, fourth}

    def stopped(printed: str) -> set[int]:
        return {item["pid"] for item in answer_in(printed)["stopped"]}

    assert stopped(on("tb-stop", base, "--run", "one", "--json")[1]) == {first}
    assert [*map(is_alive, (first, second, third, fourth))] == [False, True, True, True]
    assert stopped(on("tb-stop", base, "--json")[1]) == {third, second}
    assert [*map(is_alive, (second, third, fourth))] == [False, False, True]
    code, printed = command("tb-stop", "--json")
    assert (code, stopped(printed), answer_in(printed)["running"], is_alive(fourth)) == (0, {fourth}, [], False)
    assert "No TensorBoard of this project is running\n" in command("tb-stop")[1]


def test_open_shows_what_runs_in_a_browser_or_says_the_address(tmp_path, fake, on, monkeypatch):
    base = tmp_path / "outputs"
    of_run, _ = board.start_server(make_run(base, "one", "running").tensorboard_path, port=0, python=fake)
    opened: list[str] = []
    monkeypatch.setattr(commands.webbrowser, "open", lambda url: not opened.append(url))
    monkeypatch.setattr(commands.sys, "platform", "linux")
    for name in ("BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    on("tb-open", base)
    assert opened == [of_run.page]  # nobody shows the whole folder, and this one is in it
    monkeypatch.delenv("DISPLAY")
    of_all, _ = board.start_server(base, port=0, python=fake)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert answer_in(on("tb-open", base, "--json")[1])["opened"] is True
    assert opened == [of_run.page, of_all.page]
    monkeypatch.delenv("WAYLAND_DISPLAY")
    printed = on("tb-open", base, "--run", "one")[1]
    assert (len(opened), f"open this address yourself: {of_run.page}" in printed) == (2, True)
    code, printed = on("tb-open", base, "--run", "two")
    assert (code, "the runs there: one" in printed) == (2, True)


def test_a_command_with_tensorboard_reports_to_it(tmp_path, tiny_llama, caplog):
    caplog.set_level(logging.INFO)
    path = uneven_run(tmp_path, tiny_llama)  # report_to: []
    loaded = add_tensorboard_tracker(load_config(path, overrides=["output.name=one", "train.report_to=[]"]))
    assert (loaded.config.train.report_to, loaded.config.output.name) == (("tensorboard",), "one")
    assert 'train.report_to=["tensorboard"], in place of []' in caplog.text
    assert add_tensorboard_tracker(loaded) is loaded


@dataclass
class Training:
    process: subprocess.Popen[bytes]
    printed_to: Path
    run: Path
    url: str = ""

    @property
    def printed(self) -> str:
        return self.printed_to.read_text()


@dataclass(frozen=True)
class World:
    """A folder with a run YAML, how its commands are started, and the runs that were."""

    folder: Path
    environment: dict[str, str]
    trainings: list[Training] = field(default_factory=list)

    def command(self, *words: str, **variables: str) -> str:
        """What a command prints that has ended."""
        line = [warm.python(), "-m", "sft_play", *words, "--config", f"{self.folder}/run.yaml"]
        environment = self.environment | variables
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        return done.stdout

    def train(self, name: str, *words: str, command: str = "train", **variables: str) -> Training:
        """A run with TensorBoard beside it, just started."""
        line = [sys.executable, "-u", "-m", "sft_play", command, "--tensorboard", "--config", f"{self.folder}/run.yaml"]
        line += [f"output.name={name}", "tuning.mode=lora", "train.logging_steps=1", *words]
        to, environment = self.folder / f"{name}.txt", self.environment | variables
        with to.open("wb") as file:
            process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        self.trainings.append(Training(process, to, self.folder / "outputs" / name))
        return self.trainings[-1]


@pytest.fixture
def world(tmp_path, tiny_llama) -> Iterator[World]:
    uneven_run(tmp_path, tiny_llama)
    made = World(tmp_path, clean_environment(SFT_PLAY_CACHE=str(tmp_path / "cache")))
    yield made
    for training in made.trainings:
        training.process.kill()
        training.process.wait()
    made.command("tb-stop")


def until_curves(training: Training, *, points: int = 3) -> dict[int, float]:
    """The loss as the run's own TensorBoard shows it, once it has so many steps."""

    def see() -> dict[int, float]:
        assert training.process.poll() is None, training.printed
        line = next((line for line in training.printed.splitlines() if "TensorBoard: http" in line), "")
        training.url = line.partition("TensorBoard: ")[2].partition("?")[0]
        found = scalars(training.url, ".", "train/loss") if training.url else {}
        return found if len(found) >= points else {}

    found: dict[int, float] = wait_for(see, said=lambda: training.printed)
    return found


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


def boards_of(world: World) -> dict[str, int]:
    """The process ids of a world's TensorBoards by the folder that they show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFT_PLAY_CACHE", str(world.folder / "cache"))
        return {one.logdir: one.pid for one in board.running_servers()}


@pytest.mark.build
def test_two_runs_at_the_same_time_show_their_curves_and_end_with_their_tensorboards(world):
    port = free_port()
    for name, rate in (("stopped", "1e-3"), ("killed", "3e-2")):
        words = ("train.max_steps=100000", f"train.learning_rate={rate}", "train.warmup_steps=0")
        said = world.train(name, *words, TB_PORT=str(port))
        wait_for(lambda said=said: "TensorBoard: " in said.printed, said=lambda said=said: said.printed)
    stopped, killed = world.trainings
    for training in world.trainings:
        shown, logged = until_curves(training), losses(training.run)
        assert {step: logged[step] for step in shown} == pytest.approx(shown, rel=1e-5)
    assert f"TensorBoard: http://127.0.0.1:{port}/{OPENS_AT}\n" in stopped.printed
    assert f"/{OPENS_AT} (port {port} is taken)" in killed.printed
    answer = world.command("tensorboard", TB_PORT=str(free_port()))
    page = answer.partition("TensorBoard: ")[2].partition("?")[0]
    for name in ("stopped/tb", "killed/tb"):
        wait_for(lambda name=name: scalars(page, name, "train/loss"), within_s=END_S)
    boards = boards_of(world)
    pids = [boards[str(training.run / "tb")] for training in world.trainings]
    stopped.process.send_signal(signal.SIGINT)
    killed.process.kill()
    assert [training.process.wait(WAIT_S) for training in world.trainings] == [130, -signal.SIGKILL]
    assert list((stopped.run / "checkpoints").iterdir())
    assert re.search(rf"saving at the end of this step[^$]*TensorBoard \(pid {pids[0]}\) stopped", stopped.printed)
    wait_for(lambda: not any(map(is_alive, pids)), within_s=END_S)
    assert " stopped: http://" in world.command("tb-stop")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_several_ranks_have_one_tensorboard_that_ends_with_their_command(world, number):
    words = ("train.max_steps=100000", "distributed.timeout_s=60")
    asked = {"NPROC": "2", "STRATEGY": "ddp", "TB_PORT": str(free_port())}
    training = world.train("two", *words, command="train-distributed", **asked)
    shown, logged = until_curves(training), losses(training.run)
    assert {step: logged[step] for step in shown} == pytest.approx(shown, rel=1e-5)
    assert training.printed.count("TensorBoard: http") == 1
    ((_, pid),) = boards_of(world).items()
    training.process.send_signal(number)
    assert training.process.wait(WAIT_S) == (130 if number == signal.SIGTERM else -number)
    wait_for(lambda: not is_alive(pid), within_s=END_S)
    wait_for(lambda: any((training.run / "checkpoints").glob("*/complete.json")), said=lambda: training.printed)
    wait_for(lambda: "stopped at step " in training.printed, said=lambda: training.printed)
    if number == signal.SIGTERM:
        assert re.search(rf"stopped at step [^$]*TensorBoard \(pid {pid}\) stopped", training.printed)
