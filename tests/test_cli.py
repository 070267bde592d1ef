"""The command line: words, environment, exit codes."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from sft_play import commands
from sft_play.commands.request import read_request
from sft_play.errors import RunFolderError
from sft_play.launch import planning
from sft_play.launch.run_hardware import use_one_gpu
from sft_play.log import set_up_logging
from sft_play.machine.hardware import parse_hardware
from sft_play.planner import calibration
from sft_play.runs.folder import MANIFEST_FORMAT
from tests.conftest import ROOT, write_run


@pytest.mark.parametrize(("words", "message"), [
    (["trian"], "did you mean train?"), (["dance"], "there are: train, resume, train-distributed, "),
    ([], "the following arguments are required: command"),
    (["plan", "--confg", "x"], "has no flag --confg; did you mean --config?"),
    (["plan", "--config"], "expected one argument"),
    (["plan", "--config", "configs/run_bnb.yaml", "--hardware", "3xH300"], "nearest: H800, H200"),
    (["plan", "--config", "configs/run_bnb.yaml", "epochs"], "is not key=value"),
    (["plan", "--config", "é" * 300], "cannot be read: File name too long"),
    (["resume", "--config", "configs/run_bnb.yaml", "output.dir=/nowhere"], "no unfinished run of"),
    (["resume", "--config", "configs/run_bnb.yaml", "--run", "../x"], "RUN="),
])  # fmt: skip
def test_wrong_words_are_one_message_and_exit_code_2(refuse, monkeypatch, words, message):
    monkeypatch.chdir(ROOT)
    assert message in refuse(*words)


def test_the_environment_that_make_passes_is_read_and_words_win(monkeypatch):
    environment = {"CONFIG": "a.yaml", "SET": "train.epochs=1 'data.train_path=x y'", "HARDWARE": "2xH200", "JSON": "1"}
    request = read_request(["plan", "train.epochs=2"], environment)
    assert str(request.config) == "a.yaml"
    assert request.overrides == ("train.epochs=1", "data.train_path=x y", "train.epochs=2")
    assert (request.hardware, request.json) == ("2xH200", True)
    assert str(read_request(["plan", "--config", "b.yaml"], environment).config) == "b.yaml"
    assert str(read_request(["train"], {"SET": ""}).config) == "configs/run_starter.yaml"


def test_a_run_that_is_named_is_resumed_with_the_run_yaml_that_it_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "mine"
    run.mkdir(parents=True)
    recorded = tmp_path / "my.yaml"
    (run / "manifest.json").write_text(json.dumps({"format": MANIFEST_FORMAT, "config_path": str(recorded)}))

    def config_of(*words, **environment):
        return str(read_request(list(words), environment).config)

    starter = config_of("resume")
    assert config_of("resume", RUN="mine") == starter  # its file is gone
    recorded.write_text("")
    assert config_of("resume", RUN="mine") == config_of("resume", "--run", "mine") == "my.yaml"
    assert config_of("resume", RUN="mine", CONFIG="b.yaml") == "b.yaml"
    with pytest.raises(RunFolderError, match=r"there is no run other in outputs; the runs there: mine"):
        config_of("resume", RUN="other")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "run_starter.yaml").touch()  # beside the starter it may be one of its runs
    assert config_of("resume", RUN="other") == config_of("resume") == "configs/run_starter.yaml" != starter


def test_of_several_gpus_one_is_used_and_the_others_said_to_stay_idle(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    gpus = tuple(dataclasses.replace(gpu, index=n) for n, gpu in enumerate(parse_hardware("2xH200").gpus, start=2))
    with caplog.at_level("INFO"):
        used = use_one_gpu(dataclasses.replace(parse_hardware("2xH200"), gpus=gpus))
    assert [gpu.index for gpu in used.gpus] == [2]
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("2", "PCI_BUS_ID")
    assert "Using GPU 2; 1 other GPU stays idle (make train-distributed uses them all)" in caplog.text


def test_a_hub_id_is_trained_from_the_local_cache_when_there_is_no_network(tmp_path, tiny_llama, sums):
    """The cache's layout is huggingface_hub's: models--OWNER--NAME/snapshots/COMMIT and refs/main."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_llama, repository / "snapshots" / commit)
    config = write_run(tmp_path, Path("me/tiny"), sums, train={"max_steps": 1}, output={"name": "one"})
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "sft_play", "train", "--config", str(config)]
    answer = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "me/tiny is looked for in the local cache only" in answer.stdout
    assert (tmp_path / "outputs" / "one" / "adapter").is_dir()
    config.write_text(config.read_text().replace("me/tiny", "me/absent").replace('"one"', '"two"'))
    answer = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (answer.returncode, "model me/absent is not a folder here" in answer.stderr) == (2, True)
    assert not (tmp_path / "outputs" / "two").exists()


def test_a_run_is_remembered_and_later_plans_say_so(tmp_path, tiny_llama, sums, succeed, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    config = write_run(tmp_path, tiny_llama, sums, output={"name": "one"})
    assert "earlier run" not in succeed("plan", "--config", str(config))
    succeed("train", "--config", str(config))
    (run,) = calibration.load_measured_runs()
    summary = json.loads((tmp_path / "outputs" / "one" / "summary.json").read_text())
    assert (run.device, run.mode, run.layout) == ("cpu", "lora", "single")
    by_moment = summary["peak_bytes_by_moment"]
    assert "evaluation" not in by_moment
    assert run.measured_reserved == by_moment["training"]["measured_rss"]
    assert run.measured_tokens_per_s == summary["tokens_per_s"]
    assert "1 earlier run of this kind on this machine" in succeed("plan", "--config", str(config))
    assert "earlier run" not in succeed("plan", "--config", str(config), "--hardware", "cpu,ram=8GiB,cores=4")


def test_training_on_a_gpu_traces_the_plan_before_anything_loads(tmp_path, tiny_llama, sums, refuse, monkeypatch):
    """The GPU is only said to be there: torch, which cannot use it, ends the run after the plan."""
    machine = dataclasses.replace(parse_hardware("1xRTX4090"), named=False)
    monkeypatch.setattr(planning, "detect_hardware", lambda: machine)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = write_run(tmp_path, tiny_llama, sums)
    printed = refuse("train", "--config", str(config))
    assert ("Because: traced: " in printed, "but torch" in printed) == (True, True)
    assert "traced" not in refuse("train", "--config", str(config), "plan.trace=false")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("override", "message"), [
    (f"data.train_path=/{'a' * 300}", "does not exist"), (f"output.dir=/{'a' * 300}", "cannot be a folder"),
    ("data.train_path=~nobody-there/x", "does not exist"),
    (r'model.name="a\0b"', "neither a folder here nor a hub id"),
    ("data.train_path=/dev/null", "is not a regular file (a pipe or a device?)"),
    ("output.dir=/dev/null", "is a file"), ("data.chat_template=/tmp", "is neither a file"),
    ("train.epochs=1e400", "found 1e400"),
])  # fmt: skip
def test_paths_that_can_be_none_are_one_message(tmp_path, tiny_llama, sums, refuse, override, message):
    config = write_run(tmp_path, tiny_llama, sums)
    assert message in refuse("train", "--config", str(config), override)
    assert not (tmp_path / "outputs").exists()


def test_a_warning_of_several_ranks_is_said_once_and_with_no_folder_of_a_launcher_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in ("", "error.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        set_up_logging("train")
        logging.getLogger("sft_play.x").warning("the fan is loud")
        assert "the fan is loud" in capsys.readouterr().out
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        set_up_logging("train", rank=rank)
        logging.getLogger("sft_play.x").warning("the disk is nearly full")
        logging.getLogger("sft_play.x").warning("rank %d alone", rank)
        logging.getLogger("sft_play.x").error("an error")
    said = capsys.readouterr().out
    assert [said.count(words) for words in ("the disk is nearly full", "alone", "an error")] == [1, 2, 2]


def test_memory_that_runs_out_while_something_is_imported_is_a_message(command, monkeypatch):
    not_imported = ModuleNotFoundError("Could not import module 'LlamaForCausalLM'.", name="transformers")
    not_imported.__cause__ = MemoryError()
    for error in (
        MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), not_imported,
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):  # fmt: skip
        monkeypatch.setattr(commands, "command_function", lambda _, error=error: Mock(side_effect=error))
        code, said = command("plan", "--config", "x.yaml", "--json")
        assert (code, json.loads(said.splitlines()[0])["kind"]) == (3, "does_not_fit"), error
        assert "the memory of this machine ran out" in said
