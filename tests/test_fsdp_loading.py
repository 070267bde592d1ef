"""FSDP2 a unit at a time: what a rank has of memory while it loads, and what does not fit the usual case."""

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.loading import LoadingSetting, measure_loading
from sft_play.training.model.model_loading import _put_placeholders, _shard_units, base_parameter_name
from tests.models import uneven_run
from tests.test_distributed import losses, start

MIB = 2**20
HEAP = 128 * MIB
"""What a process's heap keeps of tensors that were freed, and libraries that are first needed then."""


@pytest.mark.build
@pytest.mark.parametrize("setting", [
    LoadingSetting("full"), pytest.param(LoadingSetting("qlora"), marks=pytest.mark.slow),
    pytest.param(LoadingSetting("lora", ranks=4), marks=pytest.mark.slow),
    pytest.param(LoadingSetting("lora", experts=True), marks=pytest.mark.slow),
], ids=lambda setting: setting.name)  # fmt: skip
def test_what_each_rank_takes_to_load_is_what_is_planned(tmp_path, setting, monkeypatch):
    """glibc gives freed blocks of a MiB back at once here: how many it keeps depends on how busy the machine is."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(MIB))
    found = measure_loading(tmp_path, setting)
    assert len(found["device_by_rank"]) == setting.ranks
    assert max(found["device_by_rank"]) <= found["predicted_device"] + HEAP
    if setting.mode == "full":  # fp32 copies of all weights would be twice their files
        assert max(found["device_by_rank"]) < 2 * found["files"]
        assert found["predicted_device"] < 1.5 * found["files"]


def test_a_name_is_that_of_the_base_whatever_is_around_it():
    for name in ("model.layers.3.self_attn.q_proj.weight", "lm_head.weight", "transformer.h.0.attn.c_attn.bias"):
        module, _, own = name.rpartition(".")
        for around in ("", ".base_layer", ".original_module", ".modules_to_save.default"):
            assert base_parameter_name(f"base_model.model.{module}{around}.{own}") == base_parameter_name(name) == name


@pytest.mark.parametrize("seed", range(12))
def test_every_parameter_is_in_a_unit_and_the_units_are_those_of_accelerate(seed):
    """Each layer; an embedding that is not tied; the last norm with the head, and a tied embedding; the rest."""
    draw = random.Random(seed)
    layers, tied = draw.randint(1, 4), draw.random() < 0.5
    if draw.random() < 0.3:
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=layers, n_head=2, vocab_size=64))
        layer, tied, norm = "GPT2Block", True, model.transformer.ln_f
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=tied))
        layer, norm = "LlamaDecoderLayer", model.model.norm
    found = list(_shard_units(model, layer))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    blocks = [module for module in model.modules() if type(module).__name__ == layer]
    tail = [norm, embedding, head] if tied else [norm, head]
    rest = [] if tied else [[embedding]]
    assert [one for one, _ in found] == [*([block] for block in blocks), *rest, tail, [model]]
    assert [more.get("reshard_after_forward", True) for _, more in found[-2:]] == [False, None]


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.parametrize("words", [("tuning.mode=lora", "tuning.lora.r=2"), ("tuning.mode=full",)])
def test_parts_without_elements_are_trained_and_resumed(tmp_path, tiny_llama, words):
    """Two rows of an adapter over three ranks: one of them has none."""
    uneven_run(tmp_path, tiny_llama)
    given = ["--config", f"{tmp_path}/run.yaml", "train.effective_batch_size=6", *words]
    for name, more in (("whole", []), ("broken", ["train.stop_after_steps=2"])):
        said = start(tmp_path, "train-distributed", *given, f"output.name={name}", *more, STRATEGY="fsdp", NPROC="3")
        assert said.returncode == 0, said.stdout + said.stderr
    said = start(tmp_path, "resume", *given, RUN="broken")
    assert said.returncode == 0, said.stdout + said.stderr
    assert losses(tmp_path / "outputs/broken") == pytest.approx(losses(tmp_path / "outputs/whole"), rel=1e-6)


@pytest.mark.slow  # two ranks that import everything; test_failures has what else ranks find late
@pytest.mark.build
def test_weights_that_the_first_rank_cannot_read_are_one_message(tmp_path, tiny_llama):
    shutil.copytree(tiny_llama, tmp_path / "model")
    uneven_run(tmp_path, tmp_path / "model")
    weights: Path = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-500])
    words = ["train-distributed", "--config", f"{tmp_path}/run.yaml", "output.name=bad"]
    said = start(tmp_path, *words, python=sys.executable, STRATEGY="fsdp", NPROC="2")
    told = said.stdout + said.stderr
    assert (said.returncode, told.count("error:"), "Traceback" in told) == (2, 1, False), told
    assert "cannot be loaded" in told
    assert not (tmp_path / "outputs" / "bad").exists()


def test_a_placeholder_has_the_shape_and_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Linear(200, 300))
    model[2].weight = nn.Parameter(model[0].weight.T.contiguous())
    model[0].bias.requires_grad_(False)
    _put_placeholders(model, {"1.weight": torch.float32}, torch.bfloat16)
    parameters = dict(model.named_parameters())
    assert {parameter.device.type for parameter in parameters.values()} == {"cpu"}
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters.values()) <= 4 * len(parameters)
    assert parameters["0.weight"].shape == (200, 300)
    assert (parameters["0.weight"].dtype, parameters["1.weight"].dtype) == (torch.bfloat16, torch.float32)
    assert [name for name, one in parameters.items() if not one.requires_grad] == ["0.bias"]
