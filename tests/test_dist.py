"""sft_play.dist: settings as asked or one message, wrapping and saving over ranks."""

import importlib.util
import json
import logging
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sft_play import dist
from sft_play.config.yaml_io import parse_yaml
from sft_play.dist import (
    DistConfig,
    NoOpAccelerator,
    get_accelerator,
    read_settings,
    save_sharded,
    wrap_model_optimizer,
)
from sft_play.errors import ConfigError, RunFolderError, TrainingError
from tests import warm
from tests.conftest import ROOT, clean_environment
from tests.processes import free_port

CPU, GPU, OLD_GPU = "no", "bf16", "fp16"


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps one state per process: none is left to other tests."""
    before = dict(os.environ)
    monkeypatch.chdir(ROOT)
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in set(os.environ) - set(before):
        del os.environ[name]


def deepspeed_of(config: Any, best_precision: str = CPU) -> dict[str, Any]:
    settings, folder = read_settings(config)
    return dist.load_deepspeed_config(settings, folder, best_precision=best_precision)


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(("config", "named"), [
    ({"backend": "accelerat", "mixed_precison": "no"}, ["backend: ", "mixed_precison: "]),
    ({"mixed_precision": False, "gradient_accumulation_steps": 0}, ["mixed_precision: ", "lation_steps: "]),
    ({"gradient_accumulation_steps": "4", "zero3_offload": 1}, ["gradient_accumulation_steps: ", "'4'", "found 1"]),
    ({"deepspeed_config": "", "find_unused_parameters": "no"}, ["deepspeed_config: ", "find_unused_parameters: "]),
    ({"zero3_offload": True}, ["zero3_offload: true is for DeepSpeed"]),
    # files, with their lines
    ("backend: deepspeeed\nmixed_precison: no\n", ["my.yaml:1: backend", "my.yaml:2: mix"]),
    ("gradient_accumulation_steps: 010\n", ["found '010'"]),
    ("mixed_precision: yes\n", ["'auto', 'no', 'fp16' or 'bf16'"]),
    ("- backend\n", ["the root is a list"]),
    ("backend: accelerate\nbackend: deepspeed\n", ["appears twice"]),
])  # fmt: skip
def test_wrong_settings_are_named_at_once(config, named, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_settings(write(tmp_path / "my.yaml", config) if isinstance(config, str) else config)
    assert all(words in str(caught.value) for words in named), caught.value


@pytest.mark.parametrize("device", [CPU, OLD_GPU, GPU])
def test_the_shipped_deepspeed_settings_are_as_asked(device):
    for offload, steps in ((False, 1), (True, 7)):
        config = {"backend": "deepspeed", "zero3_offload": offload, "gradient_accumulation_steps": steps}
        found = deepspeed_of(config, device)
        assert found["zero_optimization"]["stage"] == (3 if offload else 2)
        assert ("offload_param" in found["zero_optimization"]) is offload
        assert found["gradient_accumulation_steps"] == steps
        assert [key for key in ("bf16", "fp16") if found[key]["enabled"]] == [device] * (device != CPU)


def test_the_shipped_file_says_the_defaults_and_is_found_from_anywhere(monkeypatch, tmp_path):
    text = (ROOT / dist.DEFAULT_CONFIG).read_text(encoding="utf-8")
    assert parse_yaml(text, name="x").data == DistConfig().model_dump()
    monkeypatch.chdir(tmp_path)
    assert read_settings(dist.DEFAULT_CONFIG)[0] == DistConfig()
    monkeypatch.setattr("sft_play.dist.PROJECT_FOLDER", tmp_path / "installed")
    assert read_settings(dist.DEFAULT_CONFIG)[0] == DistConfig()
    with pytest.raises(ConfigError, match="does not exist"):
        read_settings("configs/train/nowhere.yaml")


@pytest.mark.parametrize(("file", "settings", "said"), [
    ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 2}, "4 contradicts the 2 of the settings"),
    ({"zero_optimization": {"stage": 2}}, {"zero3_offload": True}, "need stage 3"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, "need stage 3"),
    ({"zero_optimisation": {"stage": 2}}, {}, "zero_optimisation is not a DeepSpeed key"),
    ({"zero_optimization": {"stage": 5}}, {}, "stage: 5 is not valid"), ("{", {}, "not valid YAML"),
    (None, {}, "does not exist"),
])  # fmt: skip
def test_what_contradicts_the_deepspeed_file_is_said(tmp_path, file, settings, said):
    path = tmp_path / "ds.json"
    if file is not None:
        write(path, file)
    with pytest.raises(ConfigError) as caught:
        deepspeed_of({"backend": "deepspeed", "deepspeed_config": path, **settings})
    assert said in str(caught.value)
    assert "DEEPSPEED_CONFIG" not in str(caught.value)


@pytest.mark.parametrize(("file", "wish", "device", "precision"), [
    ({"bf16": {"enabled": True}}, "no", GPU, "no"), ({"bf16": {"enabled": False}}, "bf16", CPU, "bf16"),
    ({"bf16": {"enabled": False}}, "auto", GPU, "no"),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, "auto", GPU, "fp16"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "auto", GPU, "bf16"), ({}, "auto", OLD_GPU, "fp16"),
])  # fmt: skip
def test_the_file_computes_in_what_was_asked_for_and_auto_follows_it(tmp_path, file, wish, device, precision):
    path = write(tmp_path / "ds.json", file)
    found = deepspeed_of({"backend": "deepspeed", "deepspeed_config": path, "mixed_precision": wish}, device)
    for key in ("bf16", "fp16"):
        assert found[key] == {**file.get(key, {}), "enabled": key == precision}


def test_the_accelerator_has_exactly_the_settings():
    chance = random.Random(3)
    for _ in range(8):
        config: dict[str, Any] = {"mixed_precision": chance.choice(["no", "bf16"])}
        config |= {"gradient_accumulation_steps": chance.choice([1, 3, 8])}
        config |= {"find_unused_parameters": chance.choice([True, False])}
        accelerator = get_accelerator(config)
        assert accelerator.mixed_precision == config["mixed_precision"]
        assert accelerator.gradient_accumulation_steps == config["gradient_accumulation_steps"]
        assert accelerator.ddp_handler.find_unused_parameters is config["find_unused_parameters"]
        assert (accelerator.distributed_type, accelerator.dist_config) == ("NO", DistConfig(**config))


def test_without_deepspeed_accelerate_runs_with_a_warning(caplog, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else there(name))
    accelerator = get_accelerator({"backend": "deepspeed", "mixed_precision": "bf16"})
    assert (accelerator.distributed_type, accelerator.mixed_precision) == ("NO", "bf16")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("falls back to accelerate" in line for line in warned)


def tiny(seed: int = 0, *, adapter: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes, **heads)
    model = LlamaForCausalLM(config).to(dtype)
    if adapter:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    return model


def train(accelerator: Any, *, batch: int, epochs: int = 2, adapter: bool = False, rows: int = 10) -> Any:
    """Losses of every pass (mean over ranks), the prepared model, and optimizer steps."""
    model = tiny(adapter=adapter)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader([torch.randint(0, 64, (8,), generator=generator) for _ in range(rows)], batch_size=batch)
    parts = wrap_model_optimizer(accelerator, model, optimizer, loader, schedule, None)
    model, optimizer, loader, schedule, nothing = parts
    assert nothing is None
    model.train()
    losses, steps = [], 0
    for _ in range(epochs):
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses, model, steps


@pytest.mark.parametrize("adapter", [True, False])
def test_checkpointed_activations_train_the_same(adapter):
    losses = {}
    for on in (True, False):
        accelerator = get_accelerator({"gradient_checkpointing": on})
        losses[on], model, _ = train(accelerator, batch=4, epochs=1, adapter=adapter)
        modules = accelerator.unwrap_model(model).modules()
        assert any(getattr(module, "gradient_checkpointing", False) for module in modules) is on
    assert losses[True] == pytest.approx(losses[False], abs=1e-6)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: Linear has no gradient_checkpointing_enable"):
        wrap_model_optimizer(accelerator, torch.nn.Linear(2, 2), gradient_checkpointing=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adapter", "full", "module"])
def test_what_is_saved_is_opened_and_equal(kind, dtype, tmp_path, monkeypatch):
    from peft import PeftModel
    from safetensors.torch import load_model
    from transformers import LlamaForCausalLM

    accelerator = NoOpAccelerator(mixed_precision="bf16")
    model = torch.nn.Linear(3, 4).to(dtype) if kind == "module" else tiny(adapter=kind == "adapter", dtype=dtype)
    (prepared, _) = wrap_model_optimizer(accelerator, model)
    folder = save_sharded(accelerator, prepared, tmp_path / "out")
    if kind == "adapter":
        opened: Any = PeftModel.from_pretrained(tiny(dtype=dtype), folder, autocast_adapter_dtype=False)
    elif kind == "full":
        opened = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    else:
        load_model(opened := torch.nn.Linear(3, 4).to(dtype), folder / "model.safetensors")
    wanted, found = model.state_dict(), opened.state_dict()
    assert set(wanted) == set(found)
    for name, tensor in wanted.items():
        assert (found[name].dtype, torch.equal(found[name], tensor)) == (dtype, True), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if kind == "adapter":  # of which the base is not read, which would pack its 4 bits
        monkeypatch.setattr(model.base_model.model.lm_head, "state_dict", None)
        assert dist._gather_weights(accelerator, model, model)


def save(folder: Path, seed: int) -> Path:
    return save_sharded(NoOpAccelerator(), tiny(seed), folder)


def weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def test_an_earlier_save_is_replaced_with_its_notes_kept(tmp_path):
    folder = save(tmp_path / "out", 0)
    (folder / "notes.txt").write_text("mine")
    (folder / "model-00001-of-00002.safetensors").write_text("of an older save")
    save(folder, 1)
    assert torch.equal(weights(folder), tiny(1).state_dict()["model.embed_tokens.weight"])
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "model-00001-of-00002.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["_write_model", "_replace_folder", "rename"])
def test_a_save_that_fails_leaves_the_earlier_one_whole(where, tmp_path, monkeypatch):
    folder = save(tmp_path / "out", 0)
    if where == "_write_model":
        broken = tiny(1)
        broken.model.norm.weight.data[0] = float("nan")
        with pytest.raises(Exception, match="not finite"):
            save_sharded(NoOpAccelerator(), broken, folder)
    else:
        rename = Path.rename

        def fail(path: Path, target: Path) -> Path:
            if path.name.endswith(".building"):
                raise OSError(28, "No space left on device")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(TrainingError, match="No space left"):
            save(folder, 1)
        monkeypatch.undo()
    assert torch.equal(weights(folder), tiny(0).state_dict()["model.embed_tokens.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    write(tmp_path / "thesis.txt", "years of work")
    file = tmp_path / "thesis.txt"
    for folder, message in ((tmp_path, r"holds no saved model \(thesis.txt\)"), (file, "not a folder")):
        with pytest.raises(RunFolderError, match=message):
            save(folder, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


TWO_RANKS = """
import json, os, signal, sys
from pathlib import Path
import torch
from sft_play.dist import get_accelerator, save_sharded
from sft_play import dist as saving
from sft_play.errors import TrainingError
from tests.test_dist import tiny, train

out, config = Path(sys.argv[1]), json.loads(sys.argv[2])
found, synced, written = {}, [], []
if config.pop("fsdp", False):  # accelerate shards over GPUs alone: the ranks are called so, and stay on the CPU
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true",
                   "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
                   "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    made = get_accelerator
    def get_accelerator(settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return made(settings)
elif config.get("backend") != "deepspeed":
    from torch.nn.parallel import DistributedDataParallel
    make = DistributedDataParallel.__init__
    def hooked(self, *args, **kwargs):
        make(self, *args, **kwargs)
        def hook(state, bucket):
            synced.append(bucket.is_last())
            return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(
                lambda done: done.value()[0] / 2)
        self.register_comm_hook(None, hook)
    DistributedDataParallel.__init__ = hooked
write = saving._write_model
saving._write_model = lambda *args: (written.append(1), write(*args))
for precision in ("no", "bf16"):
    accelerator = get_accelerator({**config, "mixed_precision": precision})
    found["kind"] = str(accelerator.distributed_type)
    found["precision"] = accelerator.mixed_precision
    found["accumulation"] = accelerator.gradient_accumulation_steps
    for adapter in (False, True) if precision == "no" else (True,):
        synced.clear()
        if getattr(accelerator, "deepspeed_engine_wrapped", None) is not None:
            accelerator = get_accelerator({**config, "mixed_precision": precision})
        losses, model, steps = train(accelerator, batch=2, adapter=adapter, rows=8)
        name = f"{precision}-{'adapter' if adapter else 'full'}"
        found[name] = losses
        found[f"{name}-steps"], found[f"{name}-synced"] = steps, sum(synced)
        save_sharded(accelerator, model, out / name)
found["written"] = len(written)
(out / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
gathered = saving._gather_weights
def dying(*args, **kwargs):
    weights = gathered(*args, **kwargs)
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return weights
saving._gather_weights = dying
try:
    save_sharded(accelerator, model, out / "bf16-adapter")
except TrainingError as error:
    (out / "said.txt").write_text(str(error))
    os._exit(3)
"""


SHARDED = ("FSDP", "DEEPSPEED stage 2", "DEEPSPEED stage 3")


def check_two_ranks(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    """Both ranks find what one process finds; rank 1 dies in a last save, of which rank 0 says so."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    words = [warm.python(), "-c", TWO_RANKS, str(tmp_path), json.dumps(config)]
    ranks = []
    for rank in ("0", "1"):
        given = clean_environment(**meeting, RANK=rank, LOCAL_RANK=rank)
        options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(words, cwd=ROOT, env=given, **options))
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, -9], "\n".join(said)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert kind in first["kind"]
    assert (first["precision"], first["accumulation"], first["written"], second["written"]) == ("bf16", 2, 3, 0)
    for name, tolerance in {"no-full": 1e-5, "no-adapter": 1e-5, "bf16-adapter": 2e-2}.items():
        precision, _, part = name.partition("-")
        alone = get_accelerator({"mixed_precision": precision, "gradient_accumulation_steps": 2})
        losses, model, steps = train(alone, batch=4, adapter=part == "adapter", rows=8)
        assert first[name] == pytest.approx(second[name], abs=1e-7)
        assert first[name] == pytest.approx(losses, abs=tolerance), name
        assert first[f"{name}-steps"] == steps == 2
        if kind == "MULTI_CPU":
            assert first[f"{name}-synced"] == second[f"{name}-synced"] == steps  # of 4 passes
        # a step of Adam moves by the learning rate, either way where bf16 weights (DeepSpeed's) round a gradient's sign
        if part == "adapter":
            opened: Any = PeftModel.from_pretrained(tiny(), tmp_path / name)
        else:
            opened = LlamaForCausalLM.from_pretrained(tmp_path / name)
        for key, tensor in opened.state_dict().items():
            atol = 1e-4 if precision == "no" else 5e-2
            assert torch.allclose(tensor.float(), model.state_dict()[key].float(), atol=atol), key
    # rank 1 was killed in the midst of saving over bf16-adapter
    assert "a folder there is a whole save" in (tmp_path / "said.txt").read_text()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", ["MULTI_CPU", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SHARDED)])
def test_two_ranks_train_as_one_and_save_once_or_not_at_all(kind, tmp_path):
    config: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if kind.startswith("DEEPSPEED"):
        zero = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0}
        file = write(tmp_path / "ds.json", {"zero_optimization": zero})
        config |= {"backend": "deepspeed", "deepspeed_config": str(file)}
    else:
        config |= {"fsdp": True} if kind == "FSDP" else {"find_unused_parameters": False}
    check_two_ranks(tmp_path, config, kind.partition(" ")[0])
