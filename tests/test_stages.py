"""A curriculum: stages equal to runs chained by hand, resumed in and between them, planned, and refused before any."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from sft_play.cli import main
from sft_play.config.load import LoadedConfig, config_from_text, load_config, resolved_config
from sft_play.errors import ConfigError
from sft_play.launch.planning import build_plan_request, common_layout, plan_run
from sft_play.machine.hardware import parse_hardware
from sft_play.planner.layout import LAYOUT_NAMES
from sft_play.runs.folder import RunFolder
from sft_play.training.prepare.lora_config import select_names
from tests.conftest import ROOT, chat, write_rows
from tests.test_train import assert_same_bits, metrics, weights

pytestmark = pytest.mark.build
BASE = "model: {name: x, max_seq_len: 512}\ndata: {train_path: a.jsonl}\ntrain: {max_steps: 9}\n"


def loaded(folder: Path, curriculum: str, *overrides: str) -> LoadedConfig:
    path = folder / "run.yaml"
    path.write_text(f"{BASE}curriculum:\n{curriculum}\n")
    return load_config(path, overrides=overrides)


def refusal(folder: Path, curriculum: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder, curriculum, *overrides)
    return str(caught.value).replace(str(folder / "run.yaml"), "run.yaml")


def test_a_stage_takes_from_the_run_what_it_does_not_give(tmp_path):
    short, long = loaded(
        tmp_path,
        "- {name: short, epochs: 2, learning_rate: 1e-4}\n"
        "- name: long\n  max_seq_len: 2048\n  trainable: [lora]\n  data: {sources: [{path: b.jsonl}]}\n"
        "  train: {weight_decay: 0.1}",
    ).stages
    assert (short.name, short.number, short.config.train.epochs, short.config.learning_rate) == ("short", 1, 2.0, 1e-4)
    assert short.config.train.max_steps is None  # epochs of its own stand in place of the run's steps
    assert (short.config.model.max_seq_len, short.config.data.train_path) == (512, "a.jsonl")
    assert (long.config.train.max_steps, long.config.train.weight_decay) == (9, 0.1)
    assert (long.config.model.max_seq_len, long.config.tuning.trainable) == (2048, ("lora",))
    assert (long.config.data.train_path, long.config.data.source_names) == (None, ("b",))


@pytest.mark.parametrize("name", ["run_bnb.yaml", "run_mixed.yaml", "run_stages.yaml"])
def test_the_settings_that_a_run_records_are_read_as_they_were(name):
    """Of stages too: a path that follows from the run's own files is not given for a stage that has others."""
    given = load_config(ROOT / "configs" / name)
    read = config_from_text(json.dumps(resolved_config(given.config, effective_batch=8)), name="resolved.json")
    assert resolved_config(read, effective_batch=8) == resolved_config(given.config, effective_batch=8)


def test_stages_of_recorded_settings_have_the_held_out_rows_that_they_had(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name: x}\ncurriculum:\n- {name: a, epochs: 1}\n- {name: b, data: {train_path: own.jsonl}}\n"
        "- {name: c, data: {sources: [{path: own.jsonl, val_path: held.jsonl}]}}\n"
    )
    for _ in ("given", "read again"):
        given = load_config(path)
        assert [stage.config.data.val_path for stage in given.stages] == ["data/processed/val.jsonl", None, None]
        path.write_text(json.dumps(resolved_config(given.config)))


@pytest.mark.parametrize(("curriculum", "said"), [
    ("- {name: a, epochs: 0}", "run.yaml:5: curriculum[0].epochs: expected a number above 0 or null, found 0"),
    ("- {name: a}\n- {name: b, lr: 3}", "run.yaml:6: curriculum[1].lr: unknown key (value 3); curriculum[]"),
    ("- {name: a, train: {bf16: true}}", "curriculum[0].train.bf16: applies to all stages; set train.bf16"),
    ("- {name: a, epochs: 1, train: {epochs: 2}}", "curriculum[0].train.epochs: set twice: here and as"),
    ("- {name: a}\n- {name: A, epochs: 1}", "run.yaml:5: curriculum[0].name: a is the name of 2 stages"),
    ("- {name: a, data: {sources: [{path: q, weight: 0}]}}", "curriculum[0].data.sources[0].weight: expected"),
    ("- {epochs: 1}", "curriculum[0].name: missing"), ("- a", 'curriculum[0]: expected a section, found "a"'),
])  # fmt: skip
def test_what_is_wrong_with_a_stage_is_said_with_its_place(tmp_path, curriculum, said):
    assert said in refusal(tmp_path, curriculum)


def test_a_setting_that_every_stage_gives_itself_is_not_set_in_vain(tmp_path):
    stages = "- {name: a, epochs: 1}\n- {name: b, epochs: 2}"
    said = refusal(tmp_path, stages, "train.epochs=3")
    assert said == "SET: train.epochs: every stage of the curriculum sets its own; set it there: curriculum.0.epochs=…"
    one, two = loaded(tmp_path, stages, "curriculum.0.epochs=3", "curriculum.1.train.weight_decay=0.5").stages
    assert (one.config.train.epochs, two.config.train.epochs, two.config.train.weight_decay) == (3, 2, 0.5)
    assert "there are 2 stages, counted from 0" in refusal(tmp_path, stages, "curriculum.2.epochs=3")


def test_patterns_mean_names_by_their_pieces():
    names = [f"model.layers.{n}.{part}.weight" for n in (1, 3, 11) for part in ("mlp.up_proj", "input_layernorm")]
    names += ["model.norm.weight", "lm_head.weight", "base.layers.1.q_proj.lora_A.default.weight"]
    assert select_names(["layers.1"], names) == [names[0], names[1], names[8]]
    assert select_names(["layers.0-3.mlp"], names) == [names[0], names[2]]
    assert select_names(["norm"], names) == [names[1], names[3], names[5], names[6]]
    assert select_names(["lora", "lm_head"], names) == names[7:]
    assert select_names(["*_proj"], names) == [names[0], names[2], names[4], names[8]]
    assert not select_names(["layer", "proj", "1.layers"], names)


def write_run(tmp_path: Path, tiny_llama: Path) -> Path:
    for name, answer in (("sums", "it is"), ("colours", "red red"), ("held", "it is")):
        rows = (chat(f"what is {n} of {name}?", f"{answer} {n}.") for n in range(24))
        write_rows(tmp_path / f"{name}.jsonl", rows)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name: {tiny_llama}, max_seq_len: 64}}\n"
        f"data: {{train_path: {tmp_path}/sums.jsonl, val_path: {tmp_path}/held.jsonl}}\n"
        "train: {effective_batch_size: 8, batch_size: 2, learning_rate: 1e-3, gradient_checkpointing: false,\n"
        "        bf16: false, report_to: [], save_steps: 2}\n"
        f"eval: {{steps: 0}}\noutput: {{dir: {tmp_path}/outputs}}\n"
        "curriculum:\n  - {name: short, epochs: 1}\n"
        f"  - {{name: long, epochs: 2, max_seq_len: 80, learning_rate: 5e-4,\n"
        f"     data: {{train_path: {tmp_path}/colours.jsonl}}}}\n"
    )
    return path


@pytest.fixture
def run_yaml(tmp_path: Path, tiny_llama: Path) -> Path:
    return write_run(tmp_path, tiny_llama)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", "--config", str(write_run(folder, tiny_llama)), "output.name=whole"]) == 0
    return folder / "outputs" / "whole"


def losses(folder: Path) -> list[Any]:
    pairs = [(line, key) for line in metrics(folder) for key in ("loss", "eval_loss") if key in line]
    return [(line.get("stage"), line["step"], key, line[key]) for line, key in pairs]


@pytest.mark.parametrize("bf16", ["false", "true"])
def test_two_stages_are_two_runs_chained_by_hand(run_yaml, succeed, tmp_path, bf16):
    def run(name: str, *words: str) -> Path:
        given = ("tuning.mode=full", f"train.bf16={bf16}", f"output.name={name}", *words)
        succeed("train", "--config", str(run_yaml), *given)
        return tmp_path / "outputs" / name

    whole = run("whole")
    one = run("one", "curriculum=[]")
    two = run(
        "two", "curriculum=[]", f"model.name={one}/model", "train.epochs=2", "model.max_seq_len=80",
        "train.learning_rate=5e-4", f"data.train_path={tmp_path}/colours.jsonl",
    )  # fmt: skip
    by_hand = [number for _, _, _, number in (*losses(one), *losses(two))]
    tolerance, atol = (1e-5, 1e-6) if bf16 == "false" else (1e-2, 1e-3)
    assert [number for _, _, _, number in losses(whole)] == pytest.approx(by_hand, rel=tolerance)
    assert len(by_hand) == 9 + 4
    for name, tensor in weights(two).items():
        torch.testing.assert_close(weights(whole)[name], tensor, rtol=1e-5, atol=atol)


def test_a_run_with_stages_writes_a_folder_for_each_and_holds_one_model_at_a_time(
    run_yaml, succeed, tmp_path, monkeypatch
):
    from sft_play.training.loop import curriculum

    def models() -> int:  # by its type: isinstance asks every object of torch for its class, and some warn then
        gc.collect()
        return sum(issubclass(type(item), PreTrainedModel) for item in gc.get_objects())

    before, left = models(), []
    monkeypatch.setattr(curriculum, "free_memory", lambda: left.append(models()))
    said = succeed("train", "--config", str(run_yaml), "output.name=one", "train.report_to=[tensorboard]")
    assert [count <= before for count in left] == [True, True], left
    run = tmp_path / "outputs" / "one"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "resolved.json", "plan.json", "manifest.json", "summary.json", "metrics.jsonl", "train.log",
        "report.html", "tb", "stages", "adapter",
    }  # fmt: skip
    assert {path.name for path in (run / "tb").iterdir()} == {"short", "long"}
    assert {path.name for path in (run / "stages" / "short").iterdir()} == {
        "manifest.json", "plan.json", "resolved.json", "summary.json", "checkpoints", "adapter",
    }  # fmt: skip
    assert not (run / "stages" / "long" / "adapter").exists()  # what the last stage trained is the run's
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["status"], summary["exit"]) == (9, "finished", 0)
    short, long = summary["stages"]
    assert [(one["name"], one["steps"]) for one in (short, long)] == [("short", 3), ("long", 6)]
    assert long["before"]["loss"] == pytest.approx(short["after"]["loss"], rel=1e-6)  # the adapter went over
    assert (summary["before"], summary["after"]) == (short["before"], long["after"])
    rates = [line["learning_rate"] for line in metrics(run) if line["stage"] == "long" and "learning_rate" in line]
    assert max(rates) == pytest.approx(5e-4)
    data = json.loads((run / "manifest.json").read_text())["data"]
    assert {"stage short train", "stage long train", "stage long val", "weights", "tokenizer"} <= set(data)
    assert "Stage 2 of 2, long: 2 epochs, learning rate 0.0005, rows of at most 80 tokens" in said


@pytest.mark.parametrize("steps", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_run_stopped_in_or_between_stages_ends_as_an_unbroken_one(run_yaml, whole, command, succeed, tmp_path, steps):
    words = ["output.name=broken", f"train.stop_after_steps={steps}"]
    succeed("train", "--config", str(run_yaml), *words)
    broken = tmp_path / "outputs" / "broken"
    assert json.loads((broken / "summary.json").read_text())["status"] == "stopped"
    assert len([one for one in losses(broken) if one[2] == "loss"]) == steps
    assert not (broken / "adapter").exists()
    given = run_yaml.read_text()
    run_yaml.write_text(given.replace("5e-4", "6e-4"))
    code, said = command("resume", "--config", str(run_yaml), "--run", "broken")
    assert (code, "curriculum: the run has" in said) == (2, True), said
    run_yaml.write_text(given)
    succeed("resume", "--config", str(run_yaml), "--run", "broken")
    assert set(losses(broken)) == set(losses(whole))
    assert_same_bits(weights(broken), weights(whole))
    assert json.loads((broken / "manifest.json").read_text())["status"] == "finished"


def test_a_run_killed_while_a_stage_ended_takes_no_step_again(run_yaml, whole, succeed, tmp_path):
    """The last checkpoint of a stage is there, and what it trained, or that it ended, is not written yet."""
    for name in ("unsaid", "unsaved"):
        succeed("train", "--config", str(run_yaml), f"output.name={name}", "train.stop_after_steps=3")
        run = RunFolder(tmp_path / "outputs" / name)
        stage = run.stage_folder("short")
        stage.update_manifest(status="running")
        run.update_manifest(status="running")
        if name == "unsaved":
            (stage.path / "adapter").rename(tmp_path / "moved")
        said = succeed("resume", "--config", str(run_yaml), "--run", name)
        assert "Resuming bnb run from step 3" in said
        assert_same_bits(weights(run.path), weights(whole))


def test_only_the_parts_that_a_stage_names_are_trained(run_yaml, succeed, tmp_path, tiny_llama):
    words = ["tuning.mode=full", "curriculum.0.trainable=[layers.0.mlp]", "curriculum.1.trainable=[norm]"]
    said = succeed("train", "--config", str(run_yaml), *words, "output.name=one")
    run, base = tmp_path / "outputs" / "one", load_file(tiny_llama / "model.safetensors")
    first, last = weights(run / "stages" / "short"), weights(run)
    moved = {name for name, tensor in first.items() if not torch.equal(tensor, base[name])}
    assert moved == {f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    later = {name for name, tensor in last.items() if not torch.equal(tensor, first[name])}
    assert later == {name for name in last if "norm" in name}
    assert "Trainable: norm: 5 of" in said


@pytest.mark.parametrize(("words", "said"), [
    (["curriculum.1.trainable=[mlpp]"],
     "stage long: tuning.trainable: mlpp names no weight that tuning.mode=full trains (did you mean mlp?)"),
    (["curriculum.1.data.train_path=none.jsonl"], "stage long: data.train_path: none.jsonl does not exist"),
    (["curriculum.1.data.max_lost_fraction=0", "curriculum.1.max_seq_len=40"], "stage long: data.train_path: "),
    (["curriculum.1.train.effective_batch_size=7"], "stage long: "),
])  # fmt: skip
def test_a_later_stage_that_cannot_be_is_refused_before_the_first(run_yaml, command, tmp_path, words, said):
    words = ["tuning.mode=full", "output.name=one", *words]
    answer, printed = command("train", "--config", str(run_yaml), *words)
    assert (answer, said in printed) == (2, True), printed
    assert not (tmp_path / "outputs" / "one").exists()


def test_every_stage_is_planned_and_one_that_does_not_fit_is_named(tmp_path, command, succeed):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name: Qwen/Qwen2.5-3B-Instruct, max_seq_len: 512}\ndata: {train_path: none.jsonl}\n"
        "curriculum:\n  - {name: short}\n  - {name: long, max_seq_len: 2048, epochs: 2, trainable: [lora]}\n"
    )
    said = succeed("plan", "--config", str(path), "--hardware", "1xRTX3060")
    assert "The plan of stage long, the one with the longest rows:" in said
    assert "2 long: 2 epochs, learning rate 0.0002, rows of at most 2,048 tokens, trains lora; micro" in said
    answer = succeed("plan", "--config", str(path), "--hardware", "1xRTX3060", "--json")
    stages = json.loads(answer[answer.index("{") :].splitlines()[0])["stages"]
    shown = [(stage["name"], stage["max_seq_len"], stage["fits"]) for stage in stages]
    assert shown == [("short", 512, True), ("long", 2048, True)]
    code, said = command("plan", "--config", str(path), "--hardware", "1xRTX3060", "curriculum.1.max_seq_len=32768")
    assert (code, "stage long: Qwen/Qwen2.5-3B-Instruct with tuning.mode=qlora does not fit" in said) == (3, True), said


def test_stages_share_the_layout_that_fits_them_all():
    """LoRA of a 3B over two 24 GiB cards: short rows alone would take DDP, which rows of 32,768 tokens do not fit."""
    machine, only = parse_hardware("2xRTX4090"), tuple(name for name in LAYOUT_NAMES if name != "single")
    model = "model: {name: Qwen/Qwen2.5-3B-Instruct, max_seq_len: %d}\ntuning: {mode: lora}\n"
    short, long = (config_from_text(model % length, name="x") for length in (256, 32_768))
    alone = [plan_run(config, machine, layouts=only, include_suggestions=False).layout for config in (short, long)]
    requests = [build_plan_request(config, machine, only) for config in (short, long)]
    found = common_layout(requests)
    assert alone[0] != alone[1] == found
    assert not plan_run(long, machine, layouts=(alone[0],), include_suggestions=False).fits
    assert plan_run(short, machine, layouts=(found,), include_suggestions=False).fits
    assert common_layout(requests[:1] * 2) == alone[0]


def test_check_preview_render_and_consolidate_know_stages(run_yaml, succeed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "2 of 2, long" in succeed("check", "--config", str(run_yaml))
    for name in ("preview", "render"):
        assert "The rows of stage short, the first of 2" in succeed(name, "--config", str(run_yaml))
    succeed("train", "--config", str(run_yaml), "output.name=one", "train.stop_after_steps=5")
    succeed("consolidate", "--config", str(run_yaml), "--run", str(tmp_path / "outputs" / "one"))
    assert list((tmp_path / "outputs" / "one" / "stages" / "long").glob("consolidated-2/*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("ddp", "qlora"), ("zero3", "full"), ("fsdp", "qlora"), ("zero2", "lora"), ("tp", "lora"), ("fsdp_cp", "full")],
)
def test_stages_over_ranks_lose_what_one_process_loses_and_are_resumed(run_yaml, tmp_path, strategy, mode):
    from tests.test_distributed import start

    words = ["--config", str(run_yaml), f"tuning.mode={mode}"]
    asked = {"STRATEGY": strategy, "NPROC": "2"}
    for verb, more, given in (
        ("train", ["output.name=one"], {}),
        ("train-distributed", ["output.name=two", "train.stop_after_steps=5"], asked),
        ("resume", [], {"RUN": "two"}),
    ):
        answer = start(tmp_path, verb, *words, *more, **given)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    one, two = (tmp_path / "outputs" / name for name in ("one", "two"))
    mine, theirs = ({found[:3]: found[3] for found in losses(run)} for run in (two, one))
    assert mine == pytest.approx(theirs, rel=1e-5)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=1e-4, atol=1e-5)
    proofs = [stage["engine_proof"]["layout"] for stage in json.loads((two / "summary.json").read_text())["stages"]]
    assert proofs == [strategy] * 2
