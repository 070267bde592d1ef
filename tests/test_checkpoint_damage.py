"""Any damage of a checkpoint is noticed, and the one before is used; with none left a resume changes nothing."""

import io
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from sft_play.cli import main
from sft_play.training.checkpoints import checkpoints
from tests.conftest import write_run
from tests.test_train import assert_same_bits, losses, run_yaml, train, weights  # noqa: F401  (fixtures)

pytestmark = pytest.mark.build
SAME = ["tuning.mode=lora", "train.max_steps=4", "train.save_steps=1", "train.save_total_limit=null"]
KINDS = ("flip", "truncation", "zeros", "zeros in the midst", "longer", "removal")


def damage(path: Path, kind: str, rng: random.Random) -> None:
    """Change a file that is not empty; zeros are written over bytes that are not all zero."""
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << rng.randrange(8)
    elif kind == "truncation":
        del content[place:]
    elif kind == "zeros":
        content[:] = bytes(len(content))
    elif kind == "zeros in the midst":
        place = rng.choice([index for index, byte in enumerate(content) if byte])
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    elif kind == "longer":
        content += bytes(rng.randrange(1, 600))
    if kind == "removal":
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.fixture(scope="module")
def of_all_kinds(tmp_path_factory) -> Path:
    """A checkpoint with files of many sizes, some below a folder, one of zeros, one empty."""
    folder = tmp_path_factory.mktemp("checkpoints")
    rng = random.Random(0)
    written = folder / checkpoints.STAGING_NAME / "checkpoint-7"
    for name in (*checkpoints.RESUME_FILES, "adapter_model.safetensors", "shards/__0_0.distcp", "shards/.metadata"):
        (written / name).parent.mkdir(parents=True, exist_ok=True)
        (written / name).write_bytes(rng.randbytes(rng.randrange(1, 5000)))
    (written / "zeros.bin").write_bytes(bytes(1000) + b"\1")
    (written / "empty.txt").write_bytes(b"")
    return checkpoints.commit_checkpoint(written, folder)


@pytest.mark.parametrize("piece", [1000, checkpoints.HASH_PIECE_BYTES])
def test_any_damage_of_any_file_is_noticed(of_all_kinds, tmp_path, monkeypatch, piece):
    if piece != checkpoints.HASH_PIECE_BYTES:
        monkeypatch.setattr(checkpoints, "HASH_PIECE_BYTES", piece)
        monkeypatch.setattr(checkpoints, "MIB", 100)
        monkeypatch.setattr(checkpoints, "HASH_THREADS", 3)
    staged = tmp_path / checkpoints.STAGING_NAME / "checkpoint-7"
    shutil.copytree(of_all_kinds, staged)
    (staged / checkpoints.COMPLETE_FILE).unlink()
    one = checkpoints.commit_checkpoint(staged, tmp_path)
    assert not staged.parent.exists()
    rng, files = random.Random(piece), sorted(path for path in one.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(120):
        path = rng.choice(files)
        kept = path.read_bytes()
        damage(path, KINDS[number % len(KINDS)], rng)
        found = checkpoints.find_damage(one)
        assert found is not None, path
        assert path.name in found or path.name == checkpoints.COMPLETE_FILE
        path.write_bytes(kept)
        assert checkpoints.find_damage(one) is None
    (one / "more.bin").write_bytes(b"1")
    assert "files that it was not written with" in checkpoints.find_damage(one)


@pytest.mark.parametrize("method", ["open", "stat"])
def test_what_cannot_be_read_counts_as_damaged(of_all_kinds, monkeypatch, method):
    real = getattr(Path, method)

    def refuse(path, *arguments, **options):
        if path.name == "scheduler.pt":
            raise OSError(5, "Input/output error", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)
    assert "scheduler.pt cannot be read: Input/output error" in checkpoints.find_damage(of_all_kinds)


def test_every_file_reaches_the_disk_before_the_rename_and_the_names_after_it(of_all_kinds, tmp_path, monkeypatch):
    written = tmp_path / checkpoints.STAGING_NAME / "checkpoint-7"
    shutil.copytree(of_all_kinds, written)
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        done.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    final = checkpoints.commit_checkpoint(written, tmp_path)
    monkeypatch.undo()
    at = done.index("rename")
    expected = {str(written), *(str(written / path.relative_to(final)) for path in final.rglob("*"))}
    assert (set(done[:at]), done[at + 1 :]) == (expected, [str(tmp_path)])


def test_a_resume_after_damage_repeats_the_run(train):  # noqa: F811
    """Nor does the damaged one, the newest by its number until the run has passed it, push out the good one."""
    _, _, whole = train("whole", *SAME)
    _, _, folder = train("one", *SAME, "train.stop_after_steps=3")
    damage(folder / "checkpoints" / "checkpoint-3" / "adapter_model.safetensors", "zeros", random.Random(0))
    shutil.rmtree(folder / "checkpoints" / "checkpoint-2")
    same = [*SAME, "train.save_total_limit=1"]
    code, printed, _ = train("one", *same, "train.stop_after_steps=1", verb="resume")
    assert (code, "The run falls back to the checkpoint of step 1" in printed) == (0, True), printed
    assert [path.name for path in checkpoints.complete_checkpoints(folder / "checkpoints")] == ["checkpoint-2"]
    code, printed, _ = train("one", *same, verb="resume")
    assert (code, "Resuming bnb run from step 2" in printed) == (0, True), printed
    assert losses(folder) == losses(whole)
    assert_same_bits(weights(folder), weights(whole))


def test_a_resume_without_a_sound_checkpoint_changes_nothing(train):  # noqa: F811
    _, _, folder = train("one", *SAME, "train.stop_after_steps=3")
    for number, kind in enumerate(("flip", "zeros", "truncation"), start=1):
        damage(folder / "checkpoints" / f"checkpoint-{number}" / "optimizer.pt", kind, random.Random(0))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "checkpoint" in str(path)}
    metrics = (folder / "metrics.jsonl").read_bytes()
    for verb in ("resume", "train"):
        more = ["output.if_exists=resume"] if verb == "train" else []
        code, printed, _ = train("one", *SAME, *more, verb=verb)
        assert (code, "no checkpoint can be resumed" in printed) == (2, True), printed
        assert printed.count("is skipped: optimizer.pt") == 3
        assert (folder / "metrics.jsonl").read_bytes() == metrics
        assert {path: path.read_bytes() for path in before} == before


def test_a_best_checkpoint_that_was_damaged_is_not_loaded(train, monkeypatch):  # noqa: F811
    from sft_play.training.loop.loop import PlannedLoop

    same = ["tuning.mode=lora", "train.max_steps=3", "train.save_steps=1", "eval.steps=1"]
    same += ["train.load_best_model_at_end=true"]
    real, last = PlannedLoop._load_best_model, {}

    def damaged(self):
        last.update({name: tensor.clone() for name, tensor in self.model.named_parameters() if tensor.requires_grad})
        damage(Path(self.state.best_model_checkpoint) / "adapter_model.safetensors", "flip", random.Random(0))
        real(self)

    monkeypatch.setattr(PlannedLoop, "_load_best_model", damaged)
    code, printed, folder = train("one", *same)
    assert code == 0, printed
    assert "The best checkpoint cannot be loaded, so the last weights are kept" in printed
    assert_same_bits(weights(folder), {name.replace(".default", ""): tensor for name, tensor in last.items()})


@pytest.fixture(scope="module", params=["lora", "full"])
def finished(request, tmp_path_factory, tiny_llama, sums) -> Path:
    """A run that has ended, and a run YAML that trains on its rows."""
    folder = tmp_path_factory.mktemp(request.param)
    quick = {"before_training": False, "steps": 0}
    data, output = {"val_fraction": 0.5}, {"name": "one"}
    config = write_run(folder, tiny_llama, sums, tuning={"mode": request.param}, data=data, eval=quick, output=output)
    assert main(["train", "--config", str(config)]) == 0
    return folder


def weights_of(run: Path) -> Path:
    """The folder of the trained weights."""
    return run / ("adapter" if (run / "adapter").is_dir() else "model")


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """The run, to be changed."""
    return Path(shutil.copytree(finished / "outputs" / "one", tmp_path / "one"))


def test_damage_of_trained_weights_stops_every_command_that_loads_them(finished, refuse, tmp_path, monkeypatch):
    run, config = finished / "outputs" / "one", finished / "run.yaml"
    weights = weights_of(run)
    is_adapter = weights.name == "adapter"
    digests = json.loads((weights / checkpoints.COMPLETE_FILE).read_text())["digests"]
    assert {"adapter_config.json" if is_adapter else "config.json", "tokenizer.json"} <= set(digests)
    (tmp_path / "prompts.txt").write_text("what is 1 + 1?\n")
    monkeypatch.setenv("INPUT", str(tmp_path / "prompts.txt"))
    monkeypatch.setenv("OUTPUT", str(tmp_path / "answers.jsonl"))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    export = ["export", "--format", "vllm", "--out", str(tmp_path / "exported")]
    merge = [["merge", "--out", str(tmp_path / "merged")]] if is_adapter else []
    rng = random.Random(2)
    for words in (["chat"], ["infer"], ["eval"], ["ship"], export, *merge):
        path = rng.choice([*weights.glob("*.safetensors"), weights / "tokenizer.json"])
        content = path.read_bytes()
        damage(path, rng.choice(["flip", "zeros in the midst", "longer"]), rng)
        assert f"{weights} is not what was written: {path.name}" in refuse(*words, "--run", str(run))
        path.write_bytes(content)
    assert not (tmp_path / "exported").exists()
    if is_adapter:
        path, again = weights / "adapter_model.safetensors", [f"model.adapter={run}", "output.name=next"]
        content = path.read_bytes()
        damage(path, "flip", rng)
        printed = refuse("train", "--config", str(config), *again)
        assert "adapter_model.safetensors: the contents are not those that were written" in printed
        path.write_bytes(content)


def test_what_people_edit_and_runs_without_digests_are_loaded(copied, succeed, refuse, tmp_path, monkeypatch):
    weights = weights_of(copied)
    (tmp_path / "prompts.txt").write_text("what is 1 + 1?\n")
    monkeypatch.setenv("INPUT", str(tmp_path / "prompts.txt"))
    (weights / "README.md").write_text("# My own words\n")
    (weights / "notes.txt").write_text("more\n")
    settings = weights / ("adapter_config.json" if weights.name == "adapter" else "generation_config.json")
    settings.write_text(json.dumps(json.loads(settings.read_text())))  # the same, on one line
    words = ("infer", "--run", str(copied), "--max-new-tokens", "2")
    for place in ("with", "without"):
        monkeypatch.setenv("OUTPUT", str(tmp_path / f"{place}.jsonl"))
        succeed(*words)
        (weights / checkpoints.COMPLETE_FILE).unlink(missing_ok=True)
    # a record that is damaged itself says so
    (weights / checkpoints.COMPLETE_FILE).write_text("{")
    monkeypatch.setenv("OUTPUT", str(tmp_path / "damaged.jsonl"))
    assert "complete.json is damaged" in refuse(*words)


def test_a_damaged_merge_is_neither_exported_nor_found_the_adapter_s(copied, succeed, refuse, tmp_path):
    run = copied
    if not (run / "adapter").is_dir():
        pytest.skip("all weights were trained: nothing is merged")
    succeed("merge", "--run", str(run))
    path = run / "merged" / "model.safetensors"
    content = path.read_bytes()
    damage(path, "flip", random.Random(3))
    words = ["export", "--run", str(run), "--format", "vllm", "--out", str(tmp_path / "exported")]
    for tried in (words, ["merge-test", "--run", str(run)]):
        assert f"{run}/merged is not what was written: model.safetensors" in refuse(*tried)
    path.write_bytes(content)
    succeed(*words)
