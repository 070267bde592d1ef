"""Facts: machines found or named, and what a config.json means."""

from __future__ import annotations

import csv
import json
import os
import stat

import pytest

from sft_play.errors import HardwareError, ModelError
from sft_play.facts import hardware
from sft_play.facts.architecture import (
    config_json,
    local_folder,
    parse_config,
    refuse_remote_code,
    shape_of,
)
from sft_play.facts.gpu_catalog import CATALOG, MIB
from sft_play.facts.known_models import KNOWN_MODELS
from tests.conftest import shared


def fake_nvidia_smi(folder, lines):
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def two_h200s(tmp_path, monkeypatch):
    """A machine with two H200s as nvidia-smi would show it: 144,384 MiB are 141.0 units of 2**30 bytes."""
    fake_nvidia_smi(
        tmp_path,
        [f"{n}, GPU-{n}{n}{n}-aa, NVIDIA H200, 144384, 143000, 9.0" for n in range(2)],
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "_probe_nvml", hardware._probe_nvidia_smi)


def test_gpus_are_read_from_nvidia_smi(two_h200s):
    gpus = hardware.detect({}).gpus
    assert [gpu.name for gpu in gpus] == ["NVIDIA H200", "NVIDIA H200"]
    assert gpus[0].total_bytes == 144384 * MIB
    assert gpus[0].free_bytes == 143000 * MIB
    assert gpus[0].capability == (9, 0)
    assert gpus[0].has_bf16


@pytest.mark.parametrize(
    ("variable", "indices"),
    [("0", [0]), ("1,0", [1, 0]), ("", []), ("-1", []), ("1,7,0", [1]), ("GPU-111", [1]), ("0,0", [0])],
)
def test_cuda_visible_devices_is_honoured(two_h200s, variable, indices):
    found = hardware.detect({"CUDA_VISIBLE_DEVICES": variable}).gpus
    assert [gpu.index for gpu in found] == indices


def test_a_machine_without_gpus_has_its_ram(monkeypatch):
    monkeypatch.setattr(hardware, "_probe_gpus", lambda: ())
    found = hardware.detect({})
    assert found.device == "cpu"
    assert found.ram_bytes >= found.ram_free_bytes > 0
    assert found.cpu_cores >= 1


def test_a_broken_nvidia_smi_is_a_machine_without_gpus(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert hardware._probe_nvidia_smi() == ()


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("2xH200", 2, "NVIDIA H200"), ("H100", 1, "NVIDIA H100"), ("8xA100-80GB", 8, "NVIDIA A100-80GB")],
)
def test_a_machine_can_be_named(text, count, name):
    found = hardware.named(text)
    assert (len(found.gpus), found.gpus[0].name, found.named) == (count, name, True)


def test_an_unknown_gpu_can_be_given_with_its_memory():
    gpus = hardware.named("2xMyGPU,mem=24GiB").gpus
    assert len(gpus) == 2
    assert gpus[0].total_bytes == 24 * 2**30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0xH200", "names 0 GPUs"),
        ("3xH300", "nearest: H200"),
        ("2x", "is not COUNTxGPU"),
        ("-1xH200", "is not COUNTxGPU"),
        ("2xMyGPU,mem=lots", "is not mem=24GiB"),
    ],
)
def test_a_machine_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(HardwareError, match=message):
        hardware.named(text)


def test_every_gpu_of_the_catalogue_has_a_source():
    assert len(CATALOG) >= 12
    for entry in CATALOG.values():
        assert entry.source
        assert entry.memory_bytes > 8 * 2**30


def test_parameter_counts_are_exact_for_the_published_configs():
    checked = 0
    for row in csv.DictReader(shared("model_configs/params.csv").open()):
        config = json.loads(shared(f"model_configs/{row['name']}/config.json").read_text())
        if row["name"] == "phi-2-remote-code":
            continue
        shape = parse_config(config, name=row["name"])
        # gemma-3-27b-it is published with its image tower: 27,009,346,304 of it are the language model
        # (262208*5376 embedding + 62 blocks + last norm); every other row is the language model whole.
        expected = 27_009_346_304 if row["name"] == "gemma-3-27b-it" else int(row["params"])
        assert shape.params == expected, row["name"]
        checked += 1
    assert checked == 19


def test_known_models_plan_without_a_network_and_say_their_source():
    counts = {"Qwen/Qwen2.5-3B-Instruct": 3_085_938_688, "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496}
    for name, known in KNOWN_MODELS.items():
        assert known.source
        assert shape_of(name).params > (1e6 if name.startswith("sft-play/") else 4e8)
    for name, params in counts.items():
        assert shape_of(name).params == params


@pytest.mark.parametrize("name", ["/no/such/model", "./nothing", "~/no-such-model-folder"])
def test_what_looks_like_a_path_is_never_a_hub_id(name):
    with pytest.raises(ModelError, match="does not exist"):
        local_folder(name)


def test_a_path_whose_first_part_exists_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="model path models/llama does not exist"):
        local_folder("models/llama")
    assert local_folder("other/llama") is None


def test_a_hub_model_without_network_says_that_it_is_neither_here_nor_cached(monkeypatch):
    monkeypatch.setattr("sft_play.facts.architecture.hub_answers", lambda: False)
    with pytest.raises(ModelError, match=r"no folder here .* not in the local cache, .* cannot be reached"):
        config_json("nobody/no-such-model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not JSON"),
        ("[]", "has no model_type"),
        ('{"model_type": "llama"}', "hidden_size: null"),
        ('{"model_type": "llama", "hidden_size": "x"}', "needs a whole number"),
    ],
)
def test_a_config_json_that_is_none_says_so(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        shape_of(str(tmp_path))


def test_custom_code_is_refused_with_the_options_name():
    folder = shared("model_configs/phi-2-remote-code")
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        shape_of(str(folder))
    refuse_remote_code({"model_type": "phi-msft", "auto_map": {"AutoConfig": "x.Y"}}, name="x", allowed=True)


def test_custom_code_that_transformers_does_not_need_is_no_obstacle():
    assert json.loads(shared("model_configs/Phi-3.5-mini-instruct/config.json").read_text())["auto_map"]
    assert shape_of(str(shared("model_configs/Phi-3.5-mini-instruct"))).num_layers == 32
