"""The way in: a run YAML from a model and data or from another tool's file, and slips that are answered."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from sft_play.commands import new
from sft_play.commands.request import Request, read_request
from sft_play.commands.rows import run_rows as prepare
from sft_play.config import other_tools
from sft_play.config.load import config_from_text, load_config, split_overrides
from sft_play.config.options import find_option
from sft_play.config.translated import format_run_yaml, translate_file
from sft_play.data.infer_dataset import _choose_length, infer_dataset
from sft_play.data.sources.examples import ExampleReader, check_first_rows
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.formats import content_digest, digest_share
from sft_play.diagnose.run_check import check_run
from sft_play.errors import ConfigError, DataError, ModelError
from sft_play.launch.planning import plan_run
from sft_play.machine.hardware import detect_hardware, parse_hardware
from sft_play.models.config_json import load_config_json
from tests.conftest import ROOT, shared, write_rows
from tests.image_families import make_image_model
from tests.models import make_llama

build = pytest.mark.build
QUICK = settings(max_examples=50, deadline=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "chat": make_llama(folder / "chat", max_position_embeddings=8192),
        "base": make_llama(folder / "base", template=None, max_position_embeddings=8192),
    }


def asked_for(**variables) -> Request:
    return Request("new", Path("-"), values={name.strip("_").upper(): value for name, value in variables.items()})


def written(**variables) -> Path:
    answer = new.run_new(asked_for(**variables))
    assert answer.data["next"].startswith(f"make plan CONFIG={answer.data['path']}")
    return Path(answer.data["path"])


@build
@pytest.mark.parametrize("model", ["chat", "base"])
def test_what_is_written_for_data_loads_plans_and_checks(models, model, tmp_path, monkeypatch):
    """Every shared file of data: refused as the data, or a run YAML whose only problems are the rows' own."""
    monkeypatch.chdir(tmp_path)
    refused, of_rows = [], ("rows", "masks", "length")
    files = [*shared("sft").rglob("*.json*"), *shared("bad_inputs").glob("*.json*"), *shared("corpora").rglob("*.txt")]
    files = sorted(file for file in files if file.stat().st_size < 2_000_000)
    assert len(files) > 35
    for number, file in enumerate(random.Random(model).sample(files, 8)):
        try:
            out = written(model=str(models[model]), data=str(file), out=Path(f"{number}.yaml"))
        except DataError as error:
            refused.append(str(error))
            assert file.name in str(error)  # noqa: PT017  (a refusal is one of two right answers)
            continue
        config = load_config(out).config
        assert plan_run(config, detect_hardware(), include_suggestions=False).fits
        problems = [one for one in check_run(out, (), detect_hardware()).findings if one.verdict == "FAIL"]
        assert all(one.name.partition(":")[0] in of_rows for one in problems), (file, problems)
    assert len(refused) < 5


@build
def test_rows_fit_their_length_task_and_columns(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"Frage": f"was ist {n}?", "Antwort": "ja " * (n % 50)} for n in range(200)]
    Path("fragen.csv").write_text("Frage;Antwort\n" + "".join(f"{r['Frage']};{r['Antwort']}x\n" for r in rows))
    config = load_config(written(model=str(models["base"]), data="fragen.csv")).config
    assert Path("fragen.yaml").is_file()
    assert (config.task_mode, config.data.val_fraction) == ("sft", 0.05)
    assert config.data.columns == {"prompt": "Frage", "completion": "Antwort"}
    assert config.data.chat_template == "chatml"  # the model has none
    # bytes are tokens here: 150 of the answer, 13 of the question, and what a template writes
    assert config.model.max_seq_len == 256
    with pytest.raises(ConfigError, match=r"fragen\.yaml exists, and is not overwritten; OUT="):
        written(model=str(models["base"]), data="fragen.csv")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("Once upon a time. " * 2_000)
    config = load_config(written(model=str(models["chat"]), data="texts")).config
    assert (config.task_mode, config.model.max_seq_len, config.data.columns) == ("cpt", 256, {})
    assert 20 <= 36_000 // (256 * config.train.effective_batch_size) < 40  # a token is a byte


def test_a_folder_with_splits_is_read_by_them(tmp_path):
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / f"{split}.jsonl", [{"prompt": split, "completion": "b"}])
    found = infer_dataset(str(tmp_path)).settings
    wanted = {"data.train_path": str(tmp_path / "train.jsonl"), "data.val_path": str(tmp_path / "validation.jsonl")}
    assert {name: found[name] for name in found if name in (*wanted, "data.val_fraction")} == wanted


@pytest.mark.parametrize(("variables", "message"), [
    ({}, "make new needs MODEL=owner/name .* and DATA=my.jsonl; or FROM=their.yaml"),
    ({"model": "gpt2", "data": "a.jsonl", "out": Path("my")}, "ends with .yaml: OUT=my.yaml"),
    ({"model": "gpt2", "data": "a.jsonl", "out": Path("nowhere/my.yaml")}, "the folder nowhere does not exist"),
    ({"model": "Qwen2.5-3B-Instruct", "data": "a.jsonl"}, "lacks its owner: the hub has it as Qwen/Qwen2.5-3B"),
    ({"from_": Path("gone.yaml")}, "gone.yaml does not exist"),
])  # fmt: skip
def test_new_refuses_and_writes_nothing(variables, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError, ModelError), match=message):
        new.run_new(asked_for(**variables))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("machine", "mode"), [("4090", "lora"), ("RTX 3060 laptop", "qlora")])
def test_the_mode_is_one_that_fits_the_machine_without_offload(machine, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("my.jsonl"), [{"prompt": "a", "completion": "b"}])
    config = load_config(written(model="Qwen/Qwen2.5-3B-Instruct", data="my.jsonl", hardware=machine)).config
    plan = plan_run(config, parse_hardware(machine), include_suggestions=False)
    assert (config.tuning.mode, plan.fits, plan.choice.offloads) == (mode, True, False)


def test_what_new_advises_can_be_typed_and_thirty_of_three_hundred_rows_are_held_out(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("my.jsonl"), ({"a1": f"what is {n}?", "b1": "it is."} for n in range(300)))
    with pytest.raises(DataError, match="Map yours: ") as refused:
        written(model=str(models["chat"]), data="my.jsonl")
    (advice,) = re.findall(r"SET='(.*?)'", str(refused.value))
    assert "on_bad_row" not in str(refused.value)  # all rows are bad: none would be left
    words = split_overrides(advice.replace("QUESTION", "a1").replace("ANSWER", "b1") + " train={epochs: 3}")
    asked = asked_for(model=str(models["chat"]), data="my.jsonl")
    with pytest.raises(ConfigError, match=r"SET: train\.epoch: unknown key"):
        new.run_new(replace(asked, overrides=("train.epoch=3",)))
    new.run_new(replace(asked, overrides=tuple(words)))
    config = load_config("my.yaml").config
    assert (config.data.columns, config.train.epochs) == ({"prompt": "a1", "completion": "b1"}, 3)
    rows = [row for _, row in ExampleReader(Path("my.jsonl"), config.data, split="train").numbered_examples()]
    held_out = [row for row in rows if digest_share(content_digest(row)) < config.data.val_fraction]
    assert 30 <= len(held_out) <= 32


@pytest.mark.parametrize(("size", "rows", "said"), [
    ("3B", 400, "but a run here would stop: no GPU was detected here"), ("0.5B", 4000, "hours"),
    ("0.5B", 4, "lora fits this machine\n"),
])  # fmt: skip
def test_on_a_cpu_it_is_said_how_long_the_run_takes_or_that_it_would_stop(size, rows, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = replace(parse_hardware("cpu,ram=64GiB,cores=8"), named=False)
    monkeypatch.setattr("sft_play.commands.request.detect_hardware", lambda: machine)
    monkeypatch.setattr("sft_play.launch.planning.find_unusable_accelerator", lambda devices: None)
    write_rows(Path("my.jsonl"), [{"prompt": "what is it? " * 20, "completion": "it is this. " * 30}] * rows)
    text = written(model=f"Qwen/Qwen2.5-{size}-Instruct", data="my.jsonl").read_text()
    (line,) = [one for one in text.splitlines(keepends=True) if one.startswith("# tuning.mode: ")]
    assert said in line
    assert ("hours" in line, "would stop" in line) == (rows == 4000, size == "3B")


THEIRS = {
    "axolotl qlora": (
        "base_model: Qwen/Qwen2.5-3B\nload_in_8bit: false\nload_in_4bit: true\nadapter: qlora\nlora_r: 32\n"
        "lora_alpha: 16\nlora_target_linear: true\nsequence_len: 2048\nsample_packing: true\nval_set_size: 0.05\n"
        "datasets:\n  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}\ngradient_accumulation_steps: 4\n"
        "micro_batch_size: 1\nnum_epochs: 4\noptimizer: adamw_bnb_8bit\nlr_scheduler: cosine\nlearning_rate: 0.0002\n"
        "bf16: auto\ntf32: true\nwandb_project:\nwarmup_ratio: 0.1\nevals_per_epoch: 4\nsaves_per_epoch: 1\n",
        {"tuning.mode": "qlora", "train.batch_size": 1, "train.grad_accum": 4, "data.packing": "best_fit"},
    ),
    "LLaMA-Factory": (
        "model_name_or_path: Qwen/Qwen2.5-3B-Instruct\nquantization_bit: 4\nstage: sft\ndo_train: true\n"
        "finetuning_type: lora\nlora_target: q_proj,v_proj\ndataset: identity,alpaca_en_demo\ntemplate: qwen\n"
        "cutoff_len: 1024\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nwarmup_ratio: 0.1\n"
        "warmup_steps: 0\nfp16: true\nval_size: 0.1\neval_strategy: steps\neval_steps: 500\nsave_strategy: epoch\n"
        "save_steps: 500\nhub_token: hf_secret\n",
        {"tuning.mode": "qlora", "train.warmup_steps": 0.1, "eval.steps": 500, "train.save_steps": None},
    ),
}


@pytest.mark.parametrize(("text", "expected"), THEIRS.values(), ids=THEIRS)
def test_a_file_of_another_tool_becomes_one_that_loads_and_plans(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    out = written(from_=Path("theirs.yaml"))
    assert out.name == "theirs_sft_play.yaml"
    assert "hf_secret" not in out.read_text()
    config = load_config(out).config
    found = translate_file(text, name="theirs.yaml", user_settings={}).settings
    assert {path: found.get(path, "absent") for path in expected} == expected
    assert plan_run(config, parse_hardware("8xH100"), include_suggestions=False).choice


@pytest.mark.parametrize(("tokens", "length"), [
    ([100] * 9, 128), ([100, 129], 256), ([100] * 999 + [4096], 4096), ([4000] * 199 + [5000], 4096), ([5000], 8192),
    ([10**6], 32_768),
])  # fmt: skip
def test_the_length_holds_every_row_or_from_4096_on_all_but_a_hundredth_of_the_tokens(tokens, length):
    assert _choose_length(tokens) == length


def test_preferences_are_refused_and_a_file_without_a_model_asks_for_it():
    with pytest.raises(ConfigError, match=r"rl: .*preference tuning is not supported.*nothing is written"):
        translate_file("base_model: a/b\nrl: dpo\n", name="x.yaml", user_settings={})
    with pytest.raises(ConfigError, match=r"x\.yaml names no model.*FROM=x\.yaml MODEL=owner/name"):
        translate_file("lora_r: 8\n", name="x.yaml", user_settings={})
    found = translate_file("lora_r: 8\n", name="x.yaml", user_settings={"model.name": "a/b"})
    assert found.settings["tuning.mode"] == "lora"


DATA_SET_PATHS = ("data.train_path", "data.sources")
KEYS = sorted(key for key in other_tools.key_table().known_keys if "." not in key)
VALUES = st.sampled_from(
    [True, False, None, 0, 1, 4, 8, 16, 0.05, 2e-4, "auto", "lora", "qlora", "full", "epoch", "no", "steps", "cosine",
     "a/b", "x.jsonl", "q_proj,v_proj", [], ["wandb"], [{"path": "a/b", "type": "alpaca"}], {"x": 1}, -1, 3.0]
)  # fmt: skip


@QUICK
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12))
@example({"dataset": "a/b", "dataset_config": True})
@example({"dataset": "a/b", "dataset_config": "lora"})
@example({"dataset": "x.jsonl", "dataset_config": "lora"})
def test_whatever_a_file_says_is_taken_or_named_with_a_reason(said):
    try:
        found = translate_file(json.dumps(said) if said else "{}", name="x.yaml", user_settings={"model.name": "a/b"})
    except ConfigError as error:
        assert "preference tuning" in str(error)  # noqa: PT017  (others are faults)
        return
    config_from_text(format_run_yaml(found.settings), name="x.yaml")
    comments = " ".join(" ".join(found.comments()).replace("# ", "").split())
    for key, value in said.items():
        row = other_tools.key_table().known_keys[key]
        answer = other_tools.translate_value(row, value)
        # the table's answer, or our own key of that name, which is the better one where the table has words alone
        asked = [*answer.settings, *find_option(key)]
        is_idle = value in (False, None, []) or "no effect" in answer.explanation
        is_taken = any(f"{one}.".startswith(f"{path}.") for one in found.settings for path in asked)
        # a config of the hub is a part of the name that is written: hub:owner/name:config
        is_in_source = any(f":{value}" in json.dumps(found.settings.get(path)) for path in DATA_SET_PATHS)
        is_taken |= key in other_tools.key_table().data_set_names["config"] and is_in_source
        assert is_taken or is_idle or key in comments or any(path in comments for path in asked)


def mode_by_hand(said: dict[str, object]) -> str | None:
    """Trained weights win; then 4 bits by anyone; then an adapter; what is off says least."""
    full = said.get("finetuning_type") == "full" or said.get("full_finetuning") is True or said.get("adapter") == "full"
    bits = said.get("quantization_bit") == 4 or said.get("load_in_4bit") is True or said.get("adapter") == "qlora"
    adapter = said.get("finetuning_type") == "lora" or said.get("adapter") == "lora" or said.get("use_peft") is True
    if full:
        return "full"
    if bits or adapter:
        return "qlora" if bits else "lora"
    off = [said.get("use_peft") is False and "full", said.get("full_finetuning") is False and "lora"]
    return next((mode for mode in ("full", "lora") if mode in off), None)


MODES = st.fixed_dictionaries({}, optional={
    "quantization_bit": st.just(4), "load_in_4bit": st.booleans(), "use_peft": st.booleans(),
    "full_finetuning": st.booleans(), "finetuning_type": st.sampled_from(["lora", "full"]),
    "adapter": st.sampled_from(["lora", "qlora", "full"]),
})  # fmt: skip


@QUICK
@given(MODES, st.randoms())
def test_hints_of_the_mode_agree_with_each_other(said, draw):
    keys = list(said)
    draw.shuffle(keys)
    text = "model: {name: gpt2}\n" + "".join(f"{key}: {json.dumps(said[key])}\n" for key in keys)
    if not said:
        return
    with pytest.raises(ConfigError) as refused:
        config_from_text(text, name="x.yaml")
    hinted = set(re.findall(r"here it is tuning\.mode: (\w+)", str(refused.value)))
    assert hinted == {mode_by_hand(said)} - {None}


def test_a_table_from_excel_is_told_its_encoding_and_columns(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes("Frage;Antwort\nWie heißt du?;Ich heiße Änne – ja\n".encode("cp1252"))
    data = config_from_text(f"model: {{name: a/b}}\ndata: {{train_path: {path}}}", name="x").data
    with pytest.raises(DataError, match=r"looks like cp1252\): data\.encoding=cp1252 in a run reads it so"):
        check_first_rows(data, find_data_paths(data), task_mode="sft")
    found = infer_dataset(str(path)).settings
    columns = {"prompt": "Frage", "completion": "Antwort"}
    assert (found["data.encoding"], found["data.columns"]) == ("cp1252", columns)


def test_process_and_style_name_the_command_that_reads_what_they_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(Path("own.jsonl"), ({"prompt": f"q{n}", "completion": "a"} for n in range(60)))
    Path("my.yaml").write_text(
        "model: {name: a/b}\ndata: {train_path: own.jsonl, process: {raw_path: own.jsonl, test_fraction: 0.0}}\n"
    )
    for command, folder in (("process", "data/processed"), ("style", "data/processed_with_style")):
        answer = prepare(Request(command, Path("my.yaml"), is_config_given=True, values={"STYLE": "Be terse."}))
        *_, warning, following = answer.lines
        assert re.fullmatch(f"Not read yet: .*data.train_path=own.jsonl, not {folder}/train.jsonl", warning)
        assert following.startswith("Next: make check CONFIG=my.yaml 'SET=")
        overrides = following.partition("SET=")[2].rstrip("'").split()
        data = load_config("my.yaml", overrides=overrides).config.data
        found = (data.train_path, data.val_path, data.test_path)
        assert found == (f"{folder}/train.jsonl", f"{folder}/val.jsonl", None)
    # a config that trains on what process writes needs no settings
    Path("my.yaml").write_text("model: {name: a/b}\ndata: {process: {raw_path: own.jsonl, test_fraction: 0.0}}\n")
    answer = prepare(Request("process", Path("my.yaml"), is_config_given=True, values={"FORCE": True}))
    assert answer.lines[-1] == "Next: make check CONFIG=my.yaml"


@pytest.mark.parametrize(("words", "environment", "message"), [
    (["my"], {}, "my does not exist (looked in HERE); did you mean my.yaml?"),
    (["mi.yaml"], {}, "did you mean my.yaml?"), (["rows.jsonl"], {}, "is a data file; CONFIG names a run YAML"),
    (["my.yaml"], {"SET": "train.epochs=2,train.seed=1"}, "SET='train.epochs=2 train.seed=1'"),
    (["my.yaml", "train.learning_rate=2e4"], {}, "did you mean 2e-4?"),
    (["my.yaml", "model.name=Qwen2.5-3B-Instruct"], {}, "the hub has it as Qwen/Qwen2.5-3B-"),
    (["my.yaml"], {"SET": "train.epochs=2, train.seed=1"}, "SET='train.epochs=2 train.seed=1'"),
    (["my.yaml", "model.name=gpt-4o"], {}, "behind an API"),
    (["my.yaml", "model.name=llama3.1:8b"], {}, "the hub has such a model as meta-llama/Llama-3.1-8B-Instruct"),
    (["my.yaml", "model.name=https://huggingface.co/me/it/tree/main"], {}, "the model is named me/it"),
    (["my.yaml", "model.name=x/Qwen2.5-3B-Instruct-GGUF"], {}, "trains: train Qwen/Qwen2.5-3B-Instruct"),
    (["my.yaml", "model.name=unsloth/Qwen2.5-3B-bnb-4bit"], {}, "take the unquantised model Qwen/Qwen2.5-3B:"),
    (["my.yaml"], {"BUDGET": "0"}, "a shell reads $20 as $2 and 0: write BUDGET=20"),
    (["my.yaml"], {"BUDGET": "€20"}, "is not an amount of money"),
])  # fmt: skip
def test_slips_are_answered_with_what_was_meant(words, environment, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("model: {name: Qwen/Qwen2.5-3B-Instruct}\n")

    def read():
        request = read_request(["plan", "--config", *words], environment)
        load_config_json(load_config(request.config, overrides=request.overrides).config.model.name)

    with pytest.raises((ConfigError, ModelError), match=re.escape(message.replace("HERE", str(tmp_path)))):
        read()


def test_a_shipped_config_is_found_by_its_name_whatever_lies_here(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = sorted(path.stem for path in Path("configs").glob("run_*.yaml"))
    assert len(names) > 8
    for name, ending in itertools.product(names, ("", ".yaml")):
        assert read_request(["plan", "--config", name + ending], {}).config == Path(f"configs/{name}.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/run_x.yaml").touch()
    (tmp_path / "run_x").mkdir()
    assert read_request(["plan", "--config", "run_x"], {}).config == Path("configs/run_x.yaml")
    (tmp_path / "run_x.yaml").touch()  # a file of that name here is asked about
    assert read_request(["plan", "--config", "run_x"], {}).config == Path("run_x")


def test_a_secret_is_in_no_comment_wherever_it_stands():
    text = "hub: {token: hf_0, api_key: zzz}\nsecrets: {HF_TOKEN: hf_1}\nhub_token: hf_2\nwandb: {wandb_token: w_3}\n"
    said = "\n".join(translate_file(text, name="x.yaml", user_settings={"model.name": "a/b"}).comments())
    assert not any(secret in said for secret in ("hf_0", "zzz", "hf_1", "hf_2", "w_3")), said
    assert said.count("not shown") >= 4


@build
def test_data_with_images_is_recognised_and_a_base_of_text_is_told_so(tmp_path, tiny_llama, succeed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (240, 48)).save("a.png")
    write_rows(
        tmp_path / "rows.jsonl",
        [{"question": "<image>how many?", "answer": "3", "image": "a.png"}, {"question": "a", "answer": "b"}],
    )
    base = make_image_model(tmp_path / "base", "qwen2_5_vl")
    words = ("new", "--data", "rows.jsonl", "tuning.mode=lora")
    of_text = succeed(*words, "--model", str(tiny_llama), "--out", "text.yaml")
    assert "is a model of text and takes none; give MODEL= an image-text base, such as Qwen/Qwen2.5-VL" in of_text
    # 45 tokens of the image (15 x 3), 56 of the template, and the texts
    of_images = succeed(*words, "--model", str(base), "--out", "images.yaml")
    assert "1 of the first 2 with images" in of_images
    assert "is a model of text" not in of_images
    assert load_config("images.yaml").config.model.max_seq_len == 128
