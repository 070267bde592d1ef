"""What surrounds the program: closed pipes, full disks, early Ctrl-C, Pythons and environments that cannot run it, and
what it tells OpenMP and torch's allocator before torch is loaded."""

import ast
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sft_play import entry
from sft_play.log import start_log_file
from sft_play.process import environment
from tests import warm
from tests.conftest import ROOT, clean_environment, write_run

PLAN = ("plan", "--config", "configs/run_bnb.yaml", "--hardware", "2xH200")


def program(*words: str, code: str = "", **streams: object) -> subprocess.CompletedProcess[str]:
    """`sft-play` in a process of its own, `code` run before it."""
    start = ["-m", "sft_play"]
    if code:
        start = ["-c", f"{code}\nimport sys; from sft_play.entry import main; sys.exit(main())"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, **streams}
    return subprocess.run([sys.executable, *start, *words], env=clean_environment(), text=True, timeout=300, **streams)


# output that goes away
@pytest.mark.parametrize(
    ("words", "code"),
    [(PLAN, 0), (("plan", "--help"), 0), (("plan", "--config", "configs/run_llama70b.yaml", "--hardware", "L4"), 3)],
)
def test_a_closed_pipe_is_quiet_and_changes_no_answer(words, code):
    reading, writing = os.pipe()
    os.close(reading)
    answer = program(*words, stdout=writing)
    os.close(writing)
    assert answer.returncode == code
    assert answer.stderr == "" or code


def test_a_watch_that_nobody_reads_ends():
    words = [sys.executable, "-m", "sft_play", "memory-check", "--watch"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=clean_environment(), **streams) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_message():
    with Path("/dev/full").open("w") as full:
        answer = program(*PLAN, stdout=full)
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert answer.stderr.startswith("[plan] error: standard output cannot be written: No space left on device")


def test_streams_that_were_closed_before_the_start_are_no_fault():
    words = ["/bin/sh", "-c", 'exec "$0" -m sft_play "$@" >&- 2>&- <&-', sys.executable, "plan", "--help"]
    assert subprocess.run(words, cwd=ROOT, env=clean_environment(), timeout=120).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_file_on_a_full_disk_is_said_once(capfd):
    handler = start_log_file(Path("/dev/full"))
    for _ in range(3):
        logging.getLogger("sft_play.x").warning("a line")
    with contextlib.suppress(OSError):  # of what could not be written
        handler.close()
    assert capfd.readouterr().err.count("/dev/full cannot be written: No space left on device") == 1


def run_yaml(folder: Path, model: Path, rows: Path, *, steps: int) -> Path:
    train = {"max_steps": steps, "logging_steps": 1, "dataloader_num_workers": 1}
    asked, output = {"generate_rows": 2, "max_new_tokens": 4}, {"name": "one"}
    return write_run(folder, model, rows, data={"test_path": str(rows)}, train=train, eval=asked, output=output)


@pytest.mark.parametrize(
    ("name", "more"), [("train", []), pytest.param("train-distributed", ["--nproc", "2"], marks=pytest.mark.slow)]
)
def test_a_training_whose_pipe_closes_trains_on_logs_and_saves(tmp_path, tiny_llama, sums, name, more):
    config = run_yaml(tmp_path, tiny_llama, sums, steps=3)
    words = [warm.python(), "-m", "sft_play", name, "--config", str(config), *more]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environ = clean_environment(TQDM_MININTERVAL="0")
    with subprocess.Popen(words, cwd=ROOT, env=environ, **streams) as process:
        assert process.stdout.readline().startswith(f"[{name}] Base model: ".encode())
        process.stdout.close()
        assert process.wait(timeout=600) == 0
    folder = tmp_path / "outputs" / "one"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 3
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    log = (folder / "train.log").read_text(encoding="utf-8")
    assert "Base model: " in log.splitlines()[0]
    assert ("step 3/3" in log, "Traceback" in log) == (True, False)


# Ctrl-C before the run
ON_IMPORT = """
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            {action}
sys.meta_path.insert(0, Finder())
"""
INTERRUPT = "if sys.meta_path.pop(0): os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("name", ["sft_play.cli", "pydantic"])
def test_ctrl_c_in_the_first_second_is_one_line(name):
    answer = program(*PLAN, "--json", code=ON_IMPORT.format(name=name, action=INTERRUPT))
    said = "stopped by the user before anything was started"
    assert (answer.returncode, answer.stderr) == (130, f"[plan] {said}\n")
    assert json.loads(answer.stdout) == {"ok": False, "kind": "stopped", "exit": 130, "error": said}


def test_memory_that_runs_out_while_the_program_is_loaded_is_one_line():
    answer = program(*PLAN, "--json", code=ON_IMPORT.format(name="pydantic", action="raise MemoryError"))
    assert (answer.returncode, json.loads(answer.stdout)["kind"]) == (3, "does_not_fit")
    assert answer.stderr == "[plan] error: the memory of this machine ran out while the program was loaded\n"


@pytest.mark.parametrize(
    "raised",
    ["raise KeyboardInterrupt", "try:\n  raise KeyboardInterrupt\n except BaseException:\n  raise ImportError('no')"],
)
def test_ctrl_c_that_a_library_rewords_is_still_one(raised, monkeypatch, capfd):
    scope: dict[str, object] = {}
    exec(f"def run(words):\n {raised}", scope)
    assert entry._run_guarded(scope["run"], ["plan"], "plan") == 130
    assert capfd.readouterr().err == "[plan] stopped by the user\n"
    with pytest.raises(ImportError):
        entry._run_guarded(lambda words: exec("import sft_play.no_such_module"), ["plan"], "plan")
    with pytest.raises(ZeroDivisionError):
        entry._run_guarded(lambda words: 1 // 0, ["plan"], "plan")


# Pythons and environments that cannot run it
@pytest.mark.parametrize("start", [["-m", "sft_play", "plan"], ["scripts/train.py", "--config", "x"]])
def test_an_environment_without_packages_is_one_message(start):
    """`-S` leaves out site-packages; the standard library stays."""
    words = [sys.executable, "-S", *start]
    answer = subprocess.run(words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
    assert f"{sys.executable} (Python {sys.version_info[0]}.{sys.version_info[1]}) has no package " in answer.stderr
    assert f"{sys.executable} -m pip install -e ." in answer.stderr


def test_a_package_of_an_extra_is_installed_with_its_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = {"bs4": "beautifulsoup4", "lm_eval": "lm-eval", "liger_kernel": "liger-kernel"}
    for extra, packages in entry.EXTRA_PACKAGES.items():
        named = {re.split(r"[\[<>=]", one)[0] for one in extras[extra]}
        assert {distributions.get(package, package) for package in packages} == named
        for package in packages:
            said = entry._install_hint(["export"], package)
            assert f"pip install -e '{os.path.relpath(ROOT)}[{extra}]'" in said
    assert set(entry.EXTRA_PACKAGES) == set(extras) - {"dev"}
    # bugs, and a Python that was built without a part of its own, keep their traceback
    for missing in ("sft_play.nowhere", "json.nowhere", "pydantic.nowhere", "_winapi"):
        assert entry.missing_package_message(ModuleNotFoundError("x", name=missing), []) is None
    assert "[" not in entry._install_hint(["train"], "pydantic")


@pytest.mark.parametrize(("package", "words"), [("torch", ("train",)), ("transformers", ("preview",))])
def test_a_package_that_is_missed_later_is_one_message(package, words, tmp_path, tiny_llama, sums):
    config = run_yaml(tmp_path, tiny_llama, sums, steps=1)
    missing = 'raise ModuleNotFoundError(f"No module named {name!r}", name=name)'
    answer = program(*words, "--config", str(config), code=ON_IMPORT.format(name=package, action=missing))
    assert f"has no package {package}, which sft_play needs" in answer.stderr
    assert (answer.returncode, answer.stderr.count("error:"), "Traceback" in answer.stderr) == (2, 1, False)
    assert not (tmp_path / "outputs").exists()


def test_an_old_python_is_told_which_is_needed(monkeypatch, capfd):
    monkeypatch.setattr(sys, "version_info", (3, 8, 18, "final", 0))
    monkeypatch.setattr(sys, "argv", ["sft-play", "plan"])
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert entry.main() == 2
    finally:
        signal.signal(signal.SIGINT, handler)
    said = capfd.readouterr().err
    assert f"[plan] error: {sys.executable} is Python 3.8, and sft_play needs 3.11 or newer; run it in" in said
    assert "pip install" not in said
    assert '">=3.11' in (ROOT / "pyproject.toml").read_text()


def test_what_any_python_reads_is_old_syntax():
    package = [
        f"sft_play/{name}.py" for name in ("__init__", "__main__", "exit_codes", "entry", "spelling", "variables")
    ]
    for name in (*package, *(f"scripts/{name}.py" for name in ("check_variables", "setup_env", "train"))):
        source = (ROOT / name).read_text(encoding="utf-8")
        ast.parse(source, feature_version=(3, 6))
        assert "from __future__ import annotations" not in source, name


# What OpenMP is told: threads that wait do not take cores from those that work
ABOUT_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def test_the_openmp_that_torch_loads_sleeps_while_it_waits_on_a_busy_machine(monkeypatch):
    """By what GNU's OpenMP says of itself (OMP_DISPLAY_ENV) when torch is loaded behind a command of ours."""
    code = (
        "import psutil; psutil.cpu_percent = lambda *_: 200 / psutil.cpu_count(); "
        "from sft_play.cli import main; main(['no-such-command']); import torch"
    )
    for name in ABOUT_WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "GOMP_SPINCOUNT" not in answer.stderr:
        pytest.skip("torch is linked with another OpenMP than GNU's")
    assert "GOMP_SPINCOUNT = '0'" in answer.stderr


def test_one_busy_core_of_many_is_a_busy_machine_and_any_word_of_the_user_about_waiting_counts():
    """Torch has a thread a core: each piece of work waits for the one thread that shares its core."""
    assert (
        environment.openmp_wait_variables({"OMP_NUM_THREADS": "4"}, measure_busy_cores=lambda: 1.0)
        == environment.NO_SPIN
    )
    assert environment.openmp_wait_variables({}, measure_busy_cores=lambda: 0.2) == environment.SHORT_SPIN
    for name in ABOUT_WAITING:
        assert environment.openmp_wait_variables({name: ""}, measure_busy_cores=lambda: 2.0) == {}


def test_the_users_number_of_threads_reaches_other_runs_and_a_launchers_does_not():
    assert environment.independent_environment({"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment.independent_environment(
        {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"}
    )


# The allocator
def machine(folder: Path, *devices: str) -> Path:
    """A machine's files with these in /dev."""
    (folder / "dev").mkdir()
    for name in devices:
        (folder / "dev" / name).touch()
    return folder


GROWS = {"PYTORCH_ALLOC_CONF": environment.EXPANDABLE_SEGMENTS}
USERS = ("", "expandable_segments:False", "max_split_size_mb:128")


@pytest.mark.parametrize(("system", "devices", "given", "added"), [
    ("linux", ("nvidia0",), {}, GROWS), ("linux", ("nvidiactl",), {}, GROWS),
    *(("linux", devices, {}, {}) for devices in [(), ("dxg",), ("dxg", "nvidiactl"), ("kfd",)]),  # WSL, AMD
    *((system, ("nvidia0",), {}, {}) for system in ("win32", "darwin")),
    *(
        ("linux", ("nvidia0",), {name: value}, {})
        for name in (environment.ALLOCATOR_VARIABLE, *environment.OLDER_ALLOCATOR_VARIABLES)
        for value in USERS
    ),
])  # fmt: skip
def test_segments_grow_on_linux_with_a_card_of_nvidia_unless_the_user_says_something(
    tmp_path, monkeypatch, system, devices, given, added
):
    monkeypatch.setattr(sys, "platform", system)
    assert environment.allocator_variables(given, root=machine(tmp_path, *devices)) == added


def test_the_allocators_setting_is_said_and_what_no_simulation_covers():
    assert "segments of fixed size" in environment.format_allocator_setting({})
    assert environment.format_allocator_setting(GROWS).endswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    others = {
        environment.ALLOCATOR_VARIABLE: "max_split_size_mb:64,backend:native",
        "PYTORCH_CUDA_ALLOC_CONF": environment.EXPANDABLE_SEGMENTS,
    }
    said = environment.format_allocator_setting(others)
    assert said.startswith("Allocator: PYTORCH_ALLOC_CONF=max")  # which torch reads first
    assert "covers expandable_segments alone" in said


def test_a_command_sets_it_before_torch_is_loaded(tmp_path, monkeypatch):
    """On a machine with a card: the test's own has none, so its /dev is another."""
    root = machine(tmp_path, "nvidia0")
    code = (
        "import functools, os, sys, pathlib, sft_play.cli as cli, sft_play.process.environment as own; "
        f"own.allocator_variables = functools.partial(own.allocator_variables, root=pathlib.Path({str(root)!r})); "
        "cli.main(['no-such-command']); print('torch' in sys.modules, os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    for name in (environment.ALLOCATOR_VARIABLE, *environment.OLDER_ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.stdout.split() == ["False", environment.EXPANDABLE_SEGMENTS if sys.platform == "linux" else "None"]
