"""What surrounds the program: closed pipes, full disks, early Ctrl-C, Pythons and environments that cannot run it."""

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
from tests import warm
from tests.conftest import ROOT, clean_environment

PLAN = ("plan", "--config", "configs/run_bnb.yaml", "--hardware", "2xH200")


def program(*words: str, code: str = "", **streams: object) -> subprocess.CompletedProcess[str]:
    """`sft-play` in a process of its own, `code` run before it."""
    start = (
        ["-c", f"{code}\nimport sys; from sft_play.entry import main; sys.exit(main())"] if code else ["-m", "sft_play"]
    )
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=ROOT, env=clean_environment(), text=True, timeout=300,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )  # fmt: skip


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
    with subprocess.Popen(
        [sys.executable, "-m", "sft_play", "memory-check", "--watch"],
        cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_message():
    with Path("/dev/full").open("w") as full:
        answer = program(*PLAN, stdout=full)
    assert answer.returncode == 2
    assert answer.stderr.startswith("[plan] error: standard output cannot be written: No space left on device")
    assert answer.stderr.count("\n") == 1


def test_streams_that_were_closed_before_the_start_are_no_fault():
    words = ["/bin/sh", "-c", 'exec "$0" -m sft_play "$@" >&- 2>&- <&-', sys.executable, "plan", "--help"]
    assert subprocess.run(words, cwd=ROOT, env=clean_environment(), timeout=120).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_file_on_a_full_disk_is_said_once(capfd):
    handler = start_log_file(Path("/dev/full"))
    for _ in range(3):
        logging.getLogger("sft_play.x").warning("a line")
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):  # of what could not be written
        handler.close()
    assert capfd.readouterr().err.count("/dev/full cannot be written: No space left on device") == 1


def run_yaml(folder: Path, model: Path, rows: Path, *, steps: int) -> Path:
    config = folder / "run.yaml"
    config.write_text(
        f"model: {{name: {model}, max_seq_len: 64}}\ntuning: {{mode: lora}}\n"
        f"data: {{train_path: {rows}, val_path: null, test_path: {rows}}}\n"
        f"train: {{effective_batch_size: 8, max_steps: {steps}, logging_steps: 1, dataloader_num_workers: 1}}\n"
        "eval: {generate_rows: 2, max_new_tokens: 4}\n"
        f"output: {{dir: {folder}/outputs, name: one}}\n"
    )
    return config


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
    assert "step 3/3" in log
    assert "Traceback" not in log


# Ctrl-C before the run
INTERRUPT = """
import importlib.abc, os, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} and sys.meta_path.pop(0):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("name", ["sft_play.cli", "pydantic"])
def test_ctrl_c_in_the_first_second_is_one_line(name):
    answer = program(*PLAN, "--json", code=INTERRUPT.format(name=name))
    assert answer.returncode == 130
    said = "stopped by the user before anything was started"
    assert answer.stderr == f"[plan] {said}\n"
    assert json.loads(answer.stdout) == {"ok": False, "kind": "stopped", "exit": 130, "error": said}


def test_memory_that_runs_out_while_the_program_is_loaded_is_one_line():
    code = INTERRUPT.format(name="pydantic").replace("os.kill(os.getpid(), signal.SIGINT)", "raise MemoryError")
    answer = program(*PLAN, "--json", code=code)
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
    distributions = {"bs4": "beautifulsoup4", "lm_eval": "lm-eval"}
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


WITHOUT = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without())
"""


@pytest.mark.parametrize(("package", "words"), [("torch", ("train",)), ("transformers", ("preview",))])
def test_a_package_that_is_missed_later_is_one_message(package, words, tmp_path, tiny_llama, sums):
    config = run_yaml(tmp_path, tiny_llama, sums, steps=1)
    answer = program(*words, "--config", str(config), code=WITHOUT.format(name=package))
    assert answer.returncode == 2
    assert f"has no package {package}, which sft_play needs" in answer.stderr
    assert answer.stderr.count("error:") == 1
    assert "Traceback" not in answer.stderr
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
    for name in (
        *("sft_play/__init__.py", "sft_play/__main__.py", "sft_play/exit_codes.py", "sft_play/entry.py"),
        *("sft_play/spelling.py", "sft_play/variables.py", "scripts/check_variables.py", "scripts/setup_env.py"),
        "scripts/train.py",
    ):
        source = (ROOT / name).read_text(encoding="utf-8")
        ast.parse(source, feature_version=(3, 6))
        assert "from __future__ import annotations" not in source, name
