"""train.async_save: checkpoints are written while training goes on, and are as whole as any other."""

import json
import random
import shutil
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from sft_play.config.load import config_from_text
from sft_play.models.config_json import parse_model_shape
from sft_play.planner.layout import Layout
from sft_play.planner.memory.estimate import estimate_memory
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.runs.folder import RESTARTS_ENTRY
from sft_play.training.checkpoints import checkpoints
from sft_play.training.loop.loop_checkpoints import CheckpointWriter
from tests import warm
from tests.bundled import model_config
from tests.models import uneven_run
from tests.test_distributed import start
from tests.test_train import assert_same_bits, losses, weights

pytestmark = pytest.mark.build


def test_where_the_engine_has_none_it_is_refused(refuse, tmp_path, tiny_llama, monkeypatch):
    uneven_run(tmp_path, tiny_llama)
    words = ["--config", f"{tmp_path}/run.yaml", "train.async_save=true"]
    assert "train.async_save: only FSDP2's ranks (fsdp)" in refuse("train", *words, "tuning.mode=full")
    monkeypatch.setenv("NPROC", "2")
    for layout, mode in (("zero2", "full"), ("fsdp", "lora")):
        monkeypatch.setenv("STRATEGY", layout)
        assert "async_save: only FSDP2's ranks" in refuse("train-distributed", *words, f"tuning.mode={mode}")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_counts_the_copy_that_each_rank_keeps(seed):
    draw = random.Random(seed)
    name = draw.choice(["Llama-3.1-8B", "Qwen2.5-0.5B", "Llama-3.2-1B"])
    shape, ranks, on_gpu = parse_model_shape(model_config(name), name=name), draw.choice([2, 4, 8]), draw.random() < 0.5
    name, copies = draw.choice([("fsdp", 1), ("fsdp_hybrid", 2)])
    step = Step(1, 1, 512, layout=Layout(name, ranks * copies, ranks), on_gpu=on_gpu)
    text, precision = "model: {name: x}\ntuning: {mode: full}", Precision("bfloat16", "float32", "")
    configs = (config_from_text(text + more, name="run") for more in ("", "\ntrain: {async_save: true}"))
    plain, beside = (estimate_memory(config, shape, precision, step) for config in configs)
    assert beside.checkpoint == "sharded"  # also where one process would have written it whole
    staged = -(-beside.checkpoint_bytes // ranks)
    assert staged == pytest.approx(12 * shape.params / ranks, rel=0.02)
    assert beside.host_save_each_bytes >= staged
    if plain.checkpoint == "sharded":
        assert beside.host_save_each_bytes - plain.host_save_each_bytes == staged
        assert beside.host_bytes - plain.host_bytes == staged
    assert beside.outside_allocator - plain.outside_allocator == (0 if on_gpu else staged)


def test_what_the_thread_raises_is_raised_where_it_is_awaited():
    writing = CheckpointWriter(Mock(side_effect=SystemExit("a part")), step=3, needed_bytes=1)
    writing.thread.join(10)
    with pytest.raises(SystemExit, match="a part"):
        writing.wait()
    done = threading.Event()
    writing = CheckpointWriter(lambda: done.wait(10) and None, step=3, needed_bytes=1)
    writing.thread.join(0.01)  # not its end
    done.set()
    assert 0 < writing.wait() < 10


RANKS = """
import os


def disturb(kind):
    import errno
    import pathlib
    import signal
    import threading
    import time
    from sft_play.training.checkpoints import sharded_checkpoints

    write, mark = sharded_checkpoints.save_shard, pathlib.Path(os.environ["MARK"])

    def save(part, checkpoint, **options):
        assert threading.current_thread() is not threading.main_thread()
        is_its_turn, is_second = os.environ["RANK"] == "1", checkpoint.name == "checkpoint-4"
        time.sleep(1.5)  # the rest of the run, if nothing waits for it
        if kind == "dies" and is_second and is_its_turn and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "told" and checkpoint.name == "checkpoint-2" and os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1.5)
        return write(part, checkpoint, **options)

    def no_room(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    sharded_checkpoints.save_shard = save
    if kind == "full" and os.environ["RANK"] == "1":
        real = sharded_checkpoints._PartWriter.write_data
        sharded_checkpoints._PartWriter.write_data = lambda self, *args: (
            no_room(self) if "checkpoint-4" in str(self.path) else real(self, *args)
        )


if "RANK" in os.environ and os.environ.get("DISTURBED"):
    disturb(os.environ["DISTURBED"])
"""
"""sitecustomize.py: writes that take longer than the training, and what may happen in the midst of one."""


def run(world: Path, command: str, name: str, *words: str, ends: int = 0, **environ: str) -> str:
    """What a command of a run over two ranks says, with a checkpoint every second step; `ends`: its exit code."""
    python = sys.executable if "DISTURBED" in environ else warm.python()  # a fork's launcher is not the ranks' parent
    given = ["--config", f"{world}/run.yaml", "tuning.mode=full"]
    given += ["train.save_steps=2", "train.save_total_limit=null", "train.max_steps=6", *words]
    given += [f"output.name={name}"] if command != "resume" else []
    environ = {"STRATEGY": "fsdp", "NPROC": "2", "MARK": str(world / f"mark-{name}"), **environ}
    environ |= {"RUN": name} if command == "resume" else {}
    answer = start(world, command, *given, limit_s=300, python=python, **environ)
    assert answer.returncode == ends, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def whole_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints, each as it was written; fails where anything else lies beside them."""
    found = sorted((folder / "checkpoints").iterdir())
    assert [checkpoints.find_damage(path) for path in found] == [None] * len(found)
    return [checkpoints.checkpoint_step(path) for path in found]


@pytest.fixture(scope="module")
def plain(world) -> Path:
    """The run that waits for its checkpoints."""
    run(world, "train-distributed", "plain")
    return world / "outputs" / "plain"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_is_of_its_step_although_training_went_on(world, plain, precision):
    words = ["train.bf16=true"] if precision == "bf16" else []
    if words:
        run(world, "train-distributed", "plain-bf16", *words)
        plain = world / "outputs" / "plain-bf16"
    name = f"beside-{precision}"
    run(world, "train-distributed", name, *words, "train.async_save=true", DISTURBED="late")
    folder = world / "outputs" / name
    assert_same_bits(weights(folder), weights(plain))
    assert (losses(folder), whole_steps(folder)) == (losses(plain), [2, 4, 6])
    log = (folder / "train.log").read_text()
    assert "are written while training goes on" in log
    assert all(f"Checkpoint of step {step}: written beside the training in " in log for step in (2, 4, 6))
    again = world / "outputs" / f"{name}-again"  # as if it had been killed after the first of them
    shutil.copytree(folder, again)
    for step in (4, 6):
        shutil.rmtree(again / "checkpoints" / f"checkpoint-{step}")
    manifest = json.loads((again / "manifest.json").read_text())
    (again / "manifest.json").write_text(json.dumps({**manifest, "status": "failed"}))
    shutil.rmtree(again / "model")
    assert "from step 2" in run(world, "resume", again.name, *words)  # it need not be asked for again
    assert_same_bits(weights(again), weights(plain))
    assert losses(again) == losses(plain)


@pytest.mark.slow
def test_a_kill_in_the_midst_leaves_the_last_one_whole_and_a_restart_goes_on_from_it(world, plain):
    printed = run(world, "train-distributed", "dies", "train.async_save=true", DISTURBED="dies", MAX_RESTARTS="1")
    assert "was killed by SIGKILL" in printed
    assert "the run goes on from the checkpoint of step 2" in printed
    folder = world / "outputs" / "dies"
    assert whole_steps(folder) == [2, 4, 6]
    assert [one["from_step"] for one in json.loads((folder / "manifest.json").read_text())[RESTARTS_ENTRY]] == [2]
    assert_same_bits(weights(folder), weights(plain))
    assert losses(folder) == losses(plain)


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_the_last_one_stays(world):
    printed = run(world, "train-distributed", "full", "train.async_save=true", ends=2, DISTURBED="full")
    assert printed.count("error: ") == 1, printed
    assert "the last checkpoint is that of step 2; that of step 4 cannot be written into" in printed
    assert "No space left on device; about " in printed
    assert "Traceback" not in printed
    assert whole_steps(world / "outputs" / "full") == [2]


@pytest.mark.slow
def test_a_stop_request_waits_for_it_and_for_its_own(world, plain):
    assert "resume" in run(world, "train-distributed", "told", "train.async_save=true", ends=130, DISTURBED="told")
    folder = world / "outputs" / "told"
    assert whole_steps(folder)[0] == 2
    run(world, "resume", "told", "train.async_save=true")
    assert_same_bits(weights(folder), weights(plain))
