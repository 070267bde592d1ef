"""Training that continues an adapter: found by any name, loaded exactly, refused where it does not fit."""

import contextlib
import hashlib
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sft_play.config.load import config_from_text, load_config, resolved_config
from sft_play.data.build.splits import build_splits
from sft_play.data.sources.files import find_data_paths
from sft_play.errors import ConfigError
from sft_play.finished.respond import load_trained_model
from sft_play.finished.run import find_finished_run
from sft_play.training.prepare.tokenizer import load_tokenizer
from tests import warm
from tests.conftest import ROOT, chat, write_rows
from tests.finished_runs import SMALL, finished_run, make_base

pytestmark = pytest.mark.build

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "alpha": 9, "target_modules": ["q_proj", "down_proj"]}, "rslora": {"r": 8, "use_rslora": True},
    "dora": {"r": 2, "use_dora": True}, "whole": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder of finished runs, one for each kind of adapter, all of one base."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=400, tie_word_embeddings=False, eos_token_id=2, **SMALL))
    base = make_base(folder / "base", model)
    for kind, lora in KINDS.items():
        finished_run(folder / "outputs" / kind, base, **lora)
    finished_run(folder / "outputs" / "quantized", base, mode="qlora")
    finished_run(folder / "outputs" / "bf16", base, precision="bf16", alpha=1024)  # far beyond what bf16 rounds
    write_rows(folder / "rows.jsonl", (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(8)))
    return folder


def write(folder: Path, world: Path, *, tuning: str = "{}", **model: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"model: {json.dumps({'name': str(world / 'base'), 'max_seq_len': 64, **model})}\n"
        f"data: {{train_path: {world}/rows.jsonl, val_path: {world}/rows.jsonl, test_path: null}}\n"
        f"tuning: {tuning}\n"
        "train: {effective_batch_size: 8, batch_size: 8, max_steps: 1, learning_rate: 1e-2, warmup_steps: 0,\n"
        "        lr_scheduler_type: constant, report_to: [], bf16: false, gradient_checkpointing: false}\n"
        f"eval: {{steps: 0}}\noutput: {{dir: {world}/outputs}}\n"
    )
    return path


def settings(folder: Path, world: Path, *overrides: str, **given: Any) -> Any:
    return load_config(write(folder, world, **given), overrides=overrides).config


def refusal(folder: Path, world: Path, *overrides: str, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(folder, world, *overrides, **given)
    return str(caught.value)


# --- found, with its settings -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_is_silent_takes_what_the_adapter_was_trained_with(tmp_path, world, kind):
    lora = settings(tmp_path, world, adapter=kind).tuning.lora
    saved = json.loads((world / "outputs" / kind / "adapter" / "adapter_config.json").read_text())
    keys = ("r", "lora_alpha", "use_dora", "use_rslora")
    assert [lora.r, lora.alpha, lora.use_dora, lora.use_rslora] == [saved[key] for key in keys]
    assert sorted(lora.target_modules) == sorted(saved["target_modules"])
    assert sorted(lora.modules_to_save) == sorted(saved["modules_to_save"] or [])


def test_a_run_is_found_by_its_name_its_path_as_the_last_one_and_by_its_adapters_folder(tmp_path, world, monkeypatch):
    place = world / "outputs" / "plain"
    monkeypatch.chdir(world)
    for given in ("plain", str(place / "adapter"), "outputs/plain"):
        assert settings(tmp_path, world, adapter=given).model.adapter == str(place / "adapter")
    newer = finished_run(tmp_path / "outputs" / "newer", world / "base", r=3)
    older = finished_run(tmp_path / "outputs" / "z-older", world / "base", r=5)
    for run, change in ((newer, {"ended": "2026-02-01T00:00:00+00:00"}), (older, {"status": "stopped"})):
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps({**manifest, **change}))
    last = settings(tmp_path, world, f"output.dir={tmp_path}/outputs", adapter="last")
    assert (last.model.adapter, last.tuning.lora.r) == (str(newer / "adapter"), 3)
    stopped = refusal(tmp_path, world, f"output.dir={tmp_path}/outputs", adapter="z-older")
    assert re.search(r"is not finished \(its manifest says stopped\).*make resume RUN=z-older", stopped)


def test_the_mode_is_that_of_the_run_where_the_config_gives_none(tmp_path, world):
    assert [settings(tmp_path, world, adapter=kind).tuning.mode for kind in ("plain", "quantized")] == ["lora", "qlora"]
    assert settings(tmp_path, world, "tuning.mode=lora", adapter="quantized").tuning.mode == "lora"
    bare = shutil.copytree(world / "outputs" / "plain" / "adapter", tmp_path / "bare")
    assert settings(tmp_path, world, adapter=str(bare)).tuning.mode == "qlora"  # the default of any run


@pytest.mark.parametrize(("tuning", "said"), [
    ("{lora: {r: 16}}", "run.yaml:3: tuning.lora.r: 16, and the adapter.*leave it out"),
    ("{lora: {alpha: 8}}", "tuning.lora.alpha: 8, and the adapter"),
    ("{lora: {target_modules: [q_proj]}}", r'\["q_proj"\], and the adapter'),
    ("{lora: {modules_to_save: [lm_head]}}", "tuning.lora.modules_to_save"),
    ("{lora: {use_rslora: true}}", "tuning.lora.use_rslora: true, and the adapter"),
    ("{mode: full}", "tuning.mode: full trains all weights"),
])  # fmt: skip
def test_a_config_that_contradicts_the_adapter_is_refused_with_both(tmp_path, world, tuning, said):
    assert re.search(said, refusal(tmp_path, world, tuning=tuning, adapter="plain"), re.DOTALL)


def test_a_config_may_repeat_the_adapters_settings_and_choose_another_dropout(tmp_path, world):
    same = "{lora: {r: 4, alpha: 9, target_modules: [down_proj, q_proj], modules_to_save: [], dropout: 0.2}}"
    assert settings(tmp_path, world, tuning=same, adapter="plain").tuning.lora.dropout == 0.2
    assert settings(tmp_path, world, tuning="{lora: {target_modules: auto}}", adapter="plain").tuning.lora.r == 4
    assert settings(tmp_path, world, "tuning.lora=null", adapter="plain").tuning.lora.r == 4
    # what a run has resolved needs no adapter to be read again
    config = settings(tmp_path, world, adapter="plain")
    plain = resolved_config(config)
    plain["model"]["adapter"] = str(tmp_path / "gone")
    assert config_from_text(json.dumps(plain), name="resolved.json").tuning == config.tuning


def bare(folder: Path, world: Path, **changes: Any) -> Path:
    """The plain adapter without its run, with some settings changed."""
    place = shutil.copytree(world / "outputs" / "plain" / "adapter", folder / "bare")
    file = place / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return place


@pytest.mark.parametrize(("changes", "said"), [
    ({"peft_type": "IA3"}, "has peft_type=IA3 in its adapter_config.json, and only LORA can be trained here"),
    ({"rank_pattern": {"q_proj": 8}}, 'has rank_pattern={"q_proj": 8}, which this toolkit does not train'),
    ({"bias": "all"}, 'has bias="all"'),
    ({"init_lora_weights": "pissa_niter_4"}, "was started with pissa_niter_4, which changes its base too"),
    ({"lora_alpha": 2.5}, "lora_alpha=2.5 in its adapter_config.json"),
    ({"lora_alpha": math.nan}, "lora_alpha=NaN in its adapter_config.json, and whole numbers from 1 are needed"),
    ({"r": "4"}, 'has r="4" and lora_alpha='), ({"r": True}, "has r=true and lora_alpha="),
    ({"lora_dropout": "0.1"}, 'has lora_dropout="0.1" in its adapter_config.json, and a number of at least 0'),
    ({"lora_dropout": 1.5}, "has lora_dropout=1.5 in its adapter_config.json"),
    ({"target_modules": None}, "has target_modules=null"),
    ({"modules_to_save": "lm_head"}, 'has modules_to_save="lm_head" in its adapter_config.json; write the modules'),
    ({"target_parameters": 3}, "has target_parameters=3 in its adapter_config.json"),
])  # fmt: skip
def test_an_adapter_of_a_kind_that_is_not_trained_here_is_refused(tmp_path, world, changes, said):
    assert said in refusal(tmp_path, world, adapter=str(bare(tmp_path, world, **changes)))


def test_modules_that_are_named_in_full_are_those_of_every_layer(tmp_path, world):
    targets = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    lora = settings(tmp_path, world, adapter=str(bare(tmp_path, world, target_modules=targets))).tuning.lora
    assert {name.rpartition(".")[2] for name in lora.target_modules} == {"q_proj", "down_proj"}
    floats = bare(tmp_path / "floats", world, r=4.0, lora_dropout=None, modules_to_save=None)  # as some tools write
    assert settings(tmp_path, world, adapter=str(floats)).tuning.lora.r == 4
    pattern = bare(tmp_path / "pattern", world, target_modules=r".*\.(q_proj|down_proj)$")
    assert "write the modules' names as a list" in refusal(tmp_path, world, adapter=str(pattern))


def test_what_is_no_adapter_is_one_message(tmp_path, world):
    assert "there is no run or adapter nothing" in refusal(tmp_path, world, adapter="nothing")
    assert "there is no finished run in" in refusal(tmp_path, world, "output.dir=/nowhere", adapter="last")
    assert "hf download" in refusal(tmp_path, world, adapter="nobody/nothing-of-that-name")
    assert "is neither a run of this toolkit nor an adapter" in refusal(tmp_path, world, adapter=str(world / "base"))
    place = bare(tmp_path, world)
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")
    assert "holds no adapter_model.safetensors" in refusal(tmp_path, world, adapter=str(place))
    (place / "adapter_config.json").write_text("{")
    assert "peft_type=None in its adapter_config.json" in refusal(tmp_path, world, adapter=str(place))
    # a run that trained all weights names its model
    finished_run(tmp_path / "outputs" / "whole-model", world / "base", mode="full")
    said = refusal(tmp_path, world, f"output.dir={tmp_path}/outputs", adapter="whole-model")
    assert f"give model.name: {tmp_path}/outputs/whole-model/model" in said


# --- loaded exactly ---------------------------------------------------------------------------------------------------
def loss_of(run: Path, world: Path, *, of_base: bool = False) -> float:
    """The mean loss over the trained tokens of all rows, of a finished run's model as PEFT loads it, or of its base."""
    finished = find_finished_run(run.parent, run.name)
    model = load_trained_model(finished)
    held = {"train_path": f"{world}/rows.jsonl", "val_path": None, "val_fraction": 0.0}
    data = finished.config.data.model_copy(update=held)
    config = finished.config.model_copy(update={"data": data})
    rows = build_splits(config, find_data_paths(data), load_tokenizer(config).tokenizer, max_seq_len=64).train.rows
    total, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor(row[key]) for key in ("input_ids", "labels"))
        with torch.no_grad(), model.disable_adapter() if of_base else contextlib.nullcontext():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        kept = labels[1:] >= 0
        total += float(torch.nn.functional.cross_entropy(logits[kept], labels[1:][kept], reduction="sum"))
        count += int(kept.sum())
    return total / count


def first_loss(run: Path) -> float:
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(float(entry["loss"]) for entry in entries if "loss" in entry)


@pytest.mark.parametrize(("kind", "tolerance", "words"), [
    *((kind, 1e-6, ()) for kind in KINDS), ("quantized", 1e-6, ()), ("bf16", 2e-3, ("train.bf16=true",)),
    ("plain", 1e-6, ("tuning.lora.dropout=0.0", "curriculum=[{name: one}, {name: two, learning_rate: 1e-3}]")),
], ids=[*KINDS, "quantized", "bf16", "stages"])  # fmt: skip
def test_the_first_step_loses_what_the_adapter_loses(tmp_path, world, succeed, kind, tolerance, words):
    path = write(tmp_path, world, adapter=kind)
    words = (f"output.dir={tmp_path}/runs", "output.name=next", f"model.adapter={world}/outputs/{kind}", *words)
    succeed("train", "--config", str(path), *words)
    run = tmp_path / "runs" / "next"
    of_adapter = loss_of(world / "outputs" / kind, world)
    assert first_loss(run) == pytest.approx(of_adapter, rel=tolerance)
    assert abs(loss_of(world / "outputs" / kind, world, of_base=True) / of_adapter - 1) > 5 * tolerance
    before = json.loads((run / "summary.json").read_text())["before"]["loss"]
    assert before == pytest.approx(of_adapter, rel=tolerance)
    fact = json.loads((run / "manifest.json").read_text())["data"]["adapter"]
    file = world / "outputs" / kind / "adapter" / "adapter_model.safetensors"
    assert fact == {"path": str(file.parent), "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "run": kind}
    old, new = load_file(file), load_file(run / "adapter" / "adapter_model.safetensors")
    assert old.keys() == new.keys()
    assert any(not torch.equal(old[name], new[name]) for name in old)  # and it was trained further


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_a_resized_vocabulary_is_continued(tmp_path, world, succeed):
    """PEFT then writes the whole embeddings beside what was trained of them."""
    torch.manual_seed(1)
    small = LlamaForCausalLM(LlamaConfig(vocab_size=280, tie_word_embeddings=False, eos_token_id=2, **SMALL))
    base = make_base(tmp_path / "small", small)
    origin = finished_run(tmp_path / "runs" / "resized", base, **KINDS["whole"])
    path = write(tmp_path, world, adapter="resized")
    words = (f"model.name={base}", f"output.dir={tmp_path}/runs", "output.name=next")
    assert "Embeddings: resized from 280 to" in succeed("train", "--config", str(path), *words)
    assert first_loss(tmp_path / "runs" / "next") == pytest.approx(loss_of(origin, world), rel=1e-6)


# --- what does not fit ------------------------------------------------------------------------------------------------
def spoiled(folder: Path, world: Path, change: str) -> Path:
    place = bare(folder, world)
    file = place / "adapter_model.safetensors"
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-40])
        return place
    tensors = load_file(file)
    name = sorted(tensors)[0]
    one = tensors.pop(name)
    changed = {"shape": {name: torch.cat([one, one])}, "nan": {name: one * math.nan}}
    changed["renamed"] = {name.replace("layers.0", "layers.7"): one}
    save_file(tensors | changed[change], file)
    return place


@pytest.mark.parametrize(("change", "said"), [
    ("cut", "cannot be read"), ("renamed", "has the shape None there and ("), ("shape", "has the shape ("),
    ("nan", "has values that are not finite"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, world, command, change, said):
    place = spoiled(tmp_path, world, change)
    path = write(tmp_path, world, adapter=str(place), tuning="{mode: lora}")
    words = ["--config", str(path), f"output.dir={tmp_path}/runs", "train.batch_size=4"]
    for verb in (["train"], ["check"], *([["train-distributed", "--nproc", "2"]] if change == "shape" else [])):
        code, text = command(*verb, *words)
        assert (code, said in text, "Traceback" in text) == (2, True, False), text
        assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_an_adapter_of_another_base_is_refused_by_digest_or_by_name(tmp_path, world, succeed, refuse):
    other = shutil.copytree(world / "base", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    path = write(tmp_path, world, adapter="plain")

    def said(*words: str) -> str:
        return refuse("train", "--config", str(path), f"model.name={other}", "output.name=refused", *words)

    assert "was trained on other weights" in said()
    alone = bare(tmp_path, world)
    assert "was trained on other weights" in said(f"model.adapter={alone}", "tuning.mode=lora")
    file = alone / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "base_model_name_or_path": "owner/Another"}))
    assert "was trained on owner/Another, and model.name is" in said(f"model.adapter={alone}", "tuning.mode=lora")
    file.write_text(json.dumps({**config, "base_model_name_or_path": "owner/Other"}))  # the name of the folder
    words = (f"model.name={other}", f"model.adapter={alone}", "tuning.mode=lora", f"output.dir={tmp_path}/runs")
    succeed("train", "--config", str(path), *words)


# --- resumed, planned, over ranks -------------------------------------------------------------------------------------
def test_a_continued_run_that_is_stopped_and_resumed_equals_an_unbroken_one(tmp_path, world, command, succeed):
    path = write(tmp_path, world, adapter="dora")
    words = ["--config", str(path), f"output.dir={tmp_path}/runs", f"model.adapter={world}/outputs/dora",
             "train.max_steps=3", "train.lr_scheduler_type=linear"]  # fmt: skip
    succeed("train", *words, "output.name=whole")
    succeed("train", *words, "output.name=broken", "train.stop_after_steps=1")
    succeed("resume", *words, "--run", "broken")
    files = (tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "broken"))
    whole, broken = map(load_file, files)
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    other = shutil.copytree(world / "outputs" / "dora", tmp_path / "outputs" / "dora")
    succeed("train", *words, "output.name=third", "train.stop_after_steps=1")
    code, said = command("resume", *words, "--run", "third", f"model.adapter={other}")
    assert (code, "model.adapter: the run has" in said) == (2, True), said
    words[3] = f"model.adapter={other}"
    succeed("train", *words, "output.name=fourth", "train.stop_after_steps=1")
    file = other / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    code, said = command("resume", *words, "--run", "fourth")
    assert (code, "data adapter: the content" in said) == (2, True), said


def test_the_plan_of_a_continued_run_is_that_of_a_new_adapter_of_its_shape(tmp_path, world, succeed):
    def planned(path: Path) -> Any:
        text = succeed("plan", "--config", str(path), "--json", "--hardware", "1xH100")
        return json.loads(text[text.index("{") :].splitlines()[0])["peak_bytes"]

    continued = planned(write(tmp_path, world, adapter="rslora"))
    saved = json.loads((world / "outputs" / "rslora" / "adapter" / "adapter_config.json").read_text())
    shape = f"{{mode: lora, lora: {{r: {saved['r']}, alpha: {saved['lora_alpha']}, use_rslora: true}}}}"
    assert continued == planned(write(tmp_path, world, tuning=shape))
    assert continued != planned(write(tmp_path, world, tuning="{mode: lora, lora: {r: 32}}"))


def test_a_continued_run_is_compared_with_the_adapter_that_it_began_from(tmp_path, world, command, succeed, refuse):
    path = write(tmp_path, world, adapter="plain")
    outputs = shutil.copytree(world / "outputs" / "plain", tmp_path / "runs" / "plain").parent
    held = write_rows(tmp_path / "rows.jsonl", (chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(20, 56)))
    words = (f"output.dir={outputs}", "output.name=next", f"data.val_path={held}")
    succeed("train", "--config", str(path), *words)
    run, origin = outputs / "next", outputs / "plain"
    said = succeed("eval", "--run", str(run), "--metrics", "none")
    assert "Before: run plain's adapter, which this run continued" in said
    answer = json.loads((run / "eval.json").read_text())
    assert answer["before"] == "run plain's adapter"
    of_adapter, of_base = loss_of(origin, tmp_path), loss_of(origin, tmp_path, of_base=True)
    assert answer["figures"]["loss"]["base"] == pytest.approx(of_adapter, rel=1e-6)
    assert answer["figures"]["loss"]["tuned"] == pytest.approx(loss_of(run, tmp_path), rel=1e-6)
    assert abs(of_base / of_adapter - 1) > 1e-5
    code, said = command("ship", "--run", str(run))
    assert "Before: run plain's adapter, which this run continued: it is the base of these figures" in said
    shipped = json.loads((run / "ship.json").read_text())
    task = shipped["evidence"]["task"]["losses"]
    assert sum(task["base"]) / sum(task["tokens"]) == pytest.approx(of_adapter, rel=1e-6)
    assert shipped["before"] == "run plain's adapter"
    code, said = command("ship", "--replay", str(run / "ship.json"))
    assert "Before: run plain's adapter" in said
    succeed("eval", "--run", str(origin), "--data", f"{world}/rows.jsonl", "--metrics", "none")
    assert json.loads((origin / "eval.json").read_text())["before"] is None
    # its own adapter is one of the base
    succeed("merge", "--run", str(run))
    succeed("merge-test", "--run", str(run))
    # and where the adapter that it began from changes, it is not compared with another
    file = origin / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file)
    code, said = command("eval", "--run", str(run), "--metrics", "none")
    assert (code, "is not the adapter that" in said, "put it back" in said) == (2, True, True), said
    file.unlink()
    for verb in ("eval", "ship"):
        assert "is gone" in refuse(verb, "--run", str(run))


LAYOUTS = [("ddp", "lora"), ("fsdp", "lora"), ("zero2", "lora"), ("zero3", "lora"), ("fsdp", "qlora")]


@pytest.mark.parametrize(
    ("strategy", "mode"), [LAYOUTS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in LAYOUTS[1:])]
)
def test_every_layout_begins_with_the_adapters_loss(tmp_path, world, strategy, mode):
    kind = "quantized" if mode == "qlora" else "plain"
    path = write(tmp_path, world, adapter="last" if mode == "lora" else str(world / "outputs" / kind))
    shutil.copytree(world / "outputs" / kind, tmp_path / "runs" / kind)
    words = [warm.python(), "-m", "sft_play", "train-distributed", "--config", str(path), "output.name=next",
             "--nproc", "2", "--strategy", strategy, f"output.dir={tmp_path}/runs", "train.batch_size=4"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    of_adapter = loss_of(world / "outputs" / kind, world)
    assert first_loss(tmp_path / "runs" / "next") == pytest.approx(of_adapter, rel=1e-5)
