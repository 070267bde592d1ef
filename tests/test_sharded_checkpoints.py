"""Checkpoints in parts: written by every rank, resumed over other numbers of ranks, put together, watched."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from sft_play.config.load import config_from_text
from sft_play.errors import ModelError, TrainingError
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.layout import Layout
from sft_play.planner.memory import estimate
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step, StepMemorySimulation
from sft_play.planner.precision import Precision
from sft_play.training.checkpoints import checkpoints, sharded_checkpoints
from sft_play.training.checkpoints.model_saving import keeps_tensor_names, saved_shapes, write_tensors
from tests import warm
from tests.bundled import model_config
from tests.conftest import ROOT, clean_environment
from tests.models import make_llama, uneven_run
from tests.test_distributed import losses
from tests.test_failures import start as launch  # noqa: F401  (a fixture)
from tests.test_failures import two_ranks_of
from tests.test_going_on import logits
from tests.test_train import assert_same_bits

pytestmark = pytest.mark.build

SMALL = """
from sft_play.planner.memory import estimate
estimate.MAX_WHOLE_BYTES = 0
from sft_play.entry import main
raise SystemExit(main())
"""
"""A command whose plans write every checkpoint of full states in parts: the plan is what ranks are handed."""

DISK = """
import os, time
from pathlib import Path

if os.environ.get("RANK") == "1":
    from sft_play.training.checkpoints import sharded_checkpoints

    write = sharded_checkpoints._PartWriter.write_data

    def instead(writer, plan, planner):
        if "checkpoint-2" in str(writer.path):
            time.sleep(1000)
        return write(writer, plan, planner)

    sharded_checkpoints._PartWriter.write_data = instead
"""
"""sitecustomize.py: a disk under rank 1 that stops for ever at the second checkpoint."""


def start(*words: str, limit_s: float = 280, path: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = clean_environment(**{"PYTHONPATH": f"{ROOT}{os.pathsep}{path}", **environ})
    command = [warm.python(), "-c", SMALL, *words]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=limit_s)


def done(*words: str, **options) -> str:
    answer = start(*words, **options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def tensors(folder: Path):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_llama) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    uneven_run(folder, tiny_llama)
    return folder


@pytest.fixture(scope="module")
def stopped(world) -> Path:
    """A run of two ranks that was stopped after two of five steps."""
    words = ["--config", f"{world}/run.yaml", "tuning.mode=full", "output.name=stopped", "train.stop_after_steps=2"]
    said = done("train-distributed", *words, STRATEGY="fsdp", NPROC="2")
    assert ("are written in parts, one by each of 2 ranks" in said, "Checkpoint of step 2: " in said) == (True, True)
    checkpoint = world / "outputs" / "stopped" / "checkpoints" / "checkpoint-2"
    assert len(list((checkpoint / "shards").glob("*.distcp"))) == 2
    assert not list(checkpoint.glob("*.safetensors")) + list(checkpoint.glob("optimizer.pt"))  # nothing gathered
    return world / "outputs" / "stopped"


@pytest.fixture(scope="module")
def unbroken(world) -> Path:
    done("train", "--config", f"{world}/run.yaml", "tuning.mode=full", "output.name=unbroken")
    return world / "outputs" / "unbroken"


@pytest.mark.parametrize("ranks", [1, 4])
def test_parts_of_two_ranks_go_on_over_others(world, stopped, unbroken, tiny_llama, succeed, refuse, ranks):
    run = world / "outputs" / f"over-{ranks}"
    shutil.copytree(stopped, run)
    given = {"NPROC": str(ranks)} | ({"STRATEGY": "fsdp"} if ranks > 1 else {})
    done("resume", "--config", f"{world}/run.yaml", "tuning.mode=full", RUN=run.name, **given)
    assert losses(run) == pytest.approx(losses(unbroken), rel=1e-5)
    models = [logits(folder, "full", tiny_llama) for folder in (run, unbroken)]
    assert (models[0] - models[1]).abs().max() < 1e-4
    if ranks == 1:
        return
    last = run / "checkpoints" / "checkpoint-5"
    assert len(list((last / "shards").glob("*.distcp"))) == 4
    succeed("consolidate", "--run", str(run))
    assert_same_bits(tensors(run / "consolidated-5"), tensors(run / "model"))  # read from parts, gathered: the same
    (last / "shards" / "__2_0.distcp").unlink()
    printed = refuse("consolidate", "--run", str(last), "--out", str(run / "other"))
    assert "shards/__2_0.distcp has 0 of " in printed


@pytest.mark.slow
def test_parts_in_bf16_go_on_over_fewer_ranks_and_are_put_together_in_the_bases_dtype(world, tmp_path, succeed):
    base = make_llama(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16).save_pretrained(base)
    words = ["--config", f"{world}/run.yaml", "tuning.mode=full", "train.bf16=true", f"model.name={base}"]
    done("train-distributed", *words, "output.name=bf16-whole", STRATEGY="fsdp", NPROC="2")
    given = {"STRATEGY": "fsdp", "NPROC": "4"}
    done("train-distributed", *words, "output.name=bf16", "train.stop_after_steps=2", **given)
    done("resume", *words, RUN="bf16", STRATEGY="fsdp", NPROC="2")
    run, whole = (world / "outputs" / name for name in ("bf16", "bf16-whole"))
    assert losses(run) == pytest.approx(losses(whole), rel=2**-6)
    succeed("consolidate", "--run", str(run))
    made, saved = tensors(run / "consolidated-5"), tensors(run / "model")
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert json.loads((run / "consolidated-5" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same_bits(made, saved)


@pytest.mark.slow
def test_parts_of_a_tensor_parallel_mesh_go_on_under_fsdp(world, unbroken):
    words = ["--config", f"{world}/run.yaml", "tuning.mode=full"]
    done("train", *words, "output.name=mesh", "model.mesh_shape=[[2,2],[fsdp,tp]]", "train.stop_after_steps=2")
    done("resume", *words, RUN="mesh", NPROC="2", STRATEGY="fsdp")
    assert losses(world / "outputs" / "mesh") == pytest.approx(losses(unbroken), rel=1e-5)


def test_a_save_that_stops_ends_the_run_and_leaves_the_last_one_whole(world, tmp_path, launch):  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text(DISK)
    words = ["train-distributed", "--config", f"{world}/run.yaml", "tuning.mode=full", "output.name=stuck"]
    words += ["distributed.timeout_s=8", "train.save_steps=1", "train.max_steps=3"]
    started = launch(sys.executable, "-c", SMALL, *words, path=tmp_path, STRATEGY="fsdp", NPROC="2")
    assert started.end(150) == 1, started.printed
    assert "no progress for 8 s (distributed.timeout_s): rank 1 (host " in started.printed
    assert "stopped at step 2 (writing its part of a checkpoint)" in started.printed
    assert "rank 0 waits for it at step 2 (waiting for the parts of a checkpoint)" in started.printed
    folder = world / "outputs" / "stuck" / "checkpoints"
    assert (folder / ".writing" / "checkpoint-2" / "shards").is_dir()  # rank 1 was killed in the midst
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert checkpoints.complete_checkpoints(folder) == [folder / "checkpoint-1"]
    assert checkpoints.last_undamaged(folder) == (folder / "checkpoint-1", {})


WAITS = """
import datetime, os, sys, time
import torch.distributed as dist
from sft_play.training import distributed
from sft_play.training.heartbeat import SLOWEST_DISK, Heartbeat

saved_bytes = int(sys.argv[1]) * SLOWEST_DISK
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
with Heartbeat(timeout_s=4) as beat:
    beat.note(7, "saving", saved_bytes=saved_bytes)
    if dist.get_rank() == 0:
        time.sleep(8)
    beat.note_wait()
    distributed.barrier(distributed.long_timeout_group())
dist.destroy_process_group()
print("all went on", flush=True)
"""


# one that has nothing to write is no slow disk: a real save that stops is above
@pytest.mark.parametrize("seconds", [30, pytest.param(0, marks=pytest.mark.slow)])
def test_ranks_wait_for_one_that_writes_as_long_as_its_bytes_take(tmp_path, launch, seconds):  # noqa: F811
    (tmp_path / "waits.py").write_text(WAITS)
    started = launch(*two_ranks_of("waits"), str(seconds), path=tmp_path)
    assert started.end(60) == (0 if seconds else 1), started.printed
    if seconds:  # for eight seconds, where four would be a hang
        assert started.printed.count("all went on") == 2
    else:
        assert "no progress for 4 s (distributed.timeout_s): rank 0 (host " in started.printed
        assert "stopped at step 7 (saving)" in started.printed


@pytest.mark.parametrize("seed", range(20))
def test_full_states_that_fsdp_divides_are_in_parts_above_the_limit(seed):
    draw = random.Random(seed)
    name = draw.choice(["Llama-3.1-8B", "Qwen2.5-0.5B", "Llama-3.2-1B", "Mixtral-8x7B-v0.1"])
    shape = parse_model_shape(model_config(name), name=name)
    mode = draw.choice(["full", "full", "lora"])
    ranks = draw.choice([2, 4, 8])
    layout = draw.choice([Layout("fsdp", ranks, ranks), Layout("ddp", ranks), Layout("zero3", ranks, ranks)])
    config = config_from_text(f"model: {{name: x}}\ntuning: {{mode: {mode}}}\n", name="run")
    step = Step(1, 1, 512, layout=layout)
    precision = Precision("bfloat16", "float32" if mode == "full" else "bfloat16", "")
    found = estimate_memory(config, shape, precision, step)
    trained = StepMemorySimulation(config, shape, precision, step).trained_parameters.params
    if layout.is_fsdp and mode == "full":
        assert found.checkpoint_bytes == pytest.approx(12 * trained, rel=0.01)  # fp32: weights and two states
        assert (found.checkpoint == "sharded") == (found.checkpoint_bytes > estimate.MAX_WHOLE_BYTES)
        assert found.host_gather_bytes == pytest.approx(8 * trained, rel=0.01)  # both states of every parameter
    else:
        assert found.checkpoint == ("deepspeed" if layout.is_zero else "whole")
    if found.checkpoint == "sharded":
        assert found.host_save_bytes + found.host_save_each_bytes < found.host_gather_bytes
    assert (found.host_save_each_bytes > 0) == (found.checkpoint == "sharded")


def test_a_table_of_contents_runs_nothing(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / sharded_checkpoints.SHARDS_FOLDER).mkdir()
    for content in (pickle.dumps(Bad()), b"", b"\x80\x04garbage", pickle.dumps({"a": 1})):
        (tmp_path / sharded_checkpoints.CONTENTS_FILE).write_bytes(content)
        with pytest.raises(TrainingError, match=r"shards/\.metadata"):
            sharded_checkpoints.stored_weight_specs(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_weights_written_one_by_one_are_what_the_library_reads(tmp_path, tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    shapes = saved_shapes(model)
    assert keeps_tensor_names(model, shapes)
    given = {name: tensor for name, tensor in model.state_dict().items() if name in shapes}
    model.save_pretrained(tmp_path, state_dict={})
    options = {"shapes": shapes, "dtype_rule": lambda _, tensor: tensor.dtype, "max_file_bytes": 100_000}
    write_tensors(tmp_path, given.items(), **options)
    sizes = [file.stat().st_size for file in tmp_path.glob("model-*.safetensors")]
    assert (len(sizes) > 1, max(sizes) < 100_000 + 10_000) == (True, True)  # no tensor of this model is larger
    read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in given.items())
    with pytest.raises(ModelError, match="1 tensors were not gathered"):
        write_tensors(tmp_path, list(given.items())[1:], **options)
    name = next(iter(given))
    with pytest.raises(ModelError, match=f"{name} was to be saved with shape"):
        write_tensors(tmp_path, [(name, torch.zeros(3))], **options)
    with torch.device("meta"):  # experts that are saved apart are not written one by one
        model = AutoModelForCausalLM.from_config(MixtralConfig(num_hidden_layers=2, num_local_experts=2))
    assert not keeps_tensor_names(model, saved_shapes(model))
