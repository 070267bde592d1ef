"""The run YAML: what it means, what it refuses, and that its reference is current."""

import functools
import json
import operator
import random
import re
from pathlib import Path

import jsonschema
import pytest

from benchmarks.generate import REFERENCE, SCHEMA, json_schema, reference_yaml
from sft_play.config.load import config_from_text, differing_options, load_config, resolved_config, split_overrides
from sft_play.config.options import all_options
from sft_play.config.yaml_io import parse_yaml
from sft_play.errors import ConfigError
from sft_play.machine.hardware import parse_hardware
from sft_play.models.config_json import load_model_shape
from sft_play.planner.decide import PlanRequest, make_plan
from sft_play.spelling import nearest_name, normalize_name
from sft_play.text import GIB
from tests.bundled import ORIGINS, bad_inputs
from tests.conftest import ROOT

MINIMAL = "model: {name: gpt2}\n"


def load(text: str, *overrides: str):
    return config_from_text(text, name="run.yaml", overrides=overrides)


def problem(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(text, *overrides)
    return str(error.value)


def test_a_learning_rate_is_a_number_however_it_is_written():
    for text in ("1e-4", "1.0e-4", "0.0001", "1E-4", ".0001"):
        assert load(MINIMAL + f"train: {{learning_rate: {text}}}").train.learning_rate == 0.0001


@pytest.mark.parametrize(("yaml_text", "message"), [
    ("train: {bf16: off}", 'expected auto or true or false, found "off"; write false'),
    ("train: {gradient_checkpointing: yes}", 'found "yes"; write true'),
    ("train: {seed: 1_000}", "write the number without separators and leading zeros"),
    ("train: {epochs: 12:30:45}", 'expected a number above 0, found "12:30:45"'),
    ("output: {name: 1.10}", 'put it in quotes: "1.10"'),
    ("train: {report_to: no}", "expected a list of tensorboard, wandb, mlflow or trackio"),
    ("train: {learning_rate: .nan}", "found .nan"),
    ("train: {batch_size: 2.5}", "expected auto or a whole number of at least 1, found 2.5"),
    ("train: {optim: adamw_torhc}", "did you mean adamw_torch?"),
    ("train: {learing_rate: 1e-4}", "unknown key (value 1e-4); did you mean train.learning_rate?"),
    ("learning_rate: 1e-4", "it belongs at train.learning_rate"),
    ("train: 3", "expected a section, found 3"),
    ("train: {device: gpu}", 'train.device: expected auto or cpu, found "gpu"\n'),  # no misspelt cpu
    ("train: {device: cpuu}", "did you mean cpu?"),
    ("tuning: {lora: {r: null}}", "give a value or remove the key"),
])  # fmt: skip
def test_a_wrong_value_is_named_with_what_to_do(yaml_text, message):
    text = problem(MINIMAL + yaml_text)
    assert message in f"{text}\n"
    assert "run.yaml:2" in text


def test_all_problems_come_at_once_each_with_its_line():
    text = problem("model: {name: gpt2}\ntrain:\n  epochs: x\n  seeed: 1\n  seed: 1\n  seed: 2\nfoo: 1\n")
    assert text.splitlines()[0] == "4 problems:"
    for place in ("run.yaml:3: train.epochs", "run.yaml:4: train.seeed", "run.yaml:6: train.seed", "run.yaml:7: foo"):
        assert place in text
    assert "first on line 5" in text


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(("text", "message"), [
    ("", "the file is empty"),
    ("- model: gpt2\n", "run.yaml:1: the root is a list"),
    ("gpt2", "run.yaml:1: the root is the value"),
    ('model: {name: gpt2}\n"a\\ud800": 1\n', "run.yaml:2: a\\ud800: the text has half of a surrogate pair"),
    ('model: {name: gpt2}\nmine: [{a: "\\ud800"}]\n', "run.yaml:2: mine: the text has half of a surrogate pair"),
    (f"model: {{name: gpt2}}\nmine: {'[' * 210}{']' * 210}\n", "run.yaml: not sections and settings"),
    ('model: {name: gpt2}\n"":\n', "unknown key (value null)"),
    ("model:\n\tname: gpt2\n", "indent with spaces, not tabs"),
    ("model: {name: a: b}\n", 'put a value that contains ": " in quotes'),
    ("model: {name: gpt2}\n---\nmodel: {name: gpt2}\n", "found another document"),
    ("model: {name: !!python/object/apply:os.system [id]}\n", "is refused"),
    ("a: &a [*a]\n", "aliases expand without end"),
    (BOMB, "aliases expand without end"),
    ("model: {name: gpt2}\n? [1, 2]\n: 3\n", "a key must be a word"),
    ("task_mode: sft\n", "model: missing"),
    ("model: {name: 'x\x00y'}\n", "is not allowed in YAML"),
    ("model: {name: “Qwen/Qwen2.5-3B-Instruct”}", "model.name: is in typographic quotes"),
    # keys that disagree
    (f"{MINIMAL}task_mode: cpt_mixed", "needs data.text_path"),
    (f"{MINIMAL}data: {{text_path: x.txt}}", "is read only with task_mode: cpt_mixed"),
    (f"{MINIMAL}train: {{bf16: true, fp16: true}}", "choose one"),
    (f"{MINIMAL}train: {{early_stopping_patience: 2}}", "needs train.load_best_model_at_end"),
    (f"{MINIMAL}train: {{optim: adafactor, adam_beta2: 0.95}}", "is AdamW's, and train.optim is adafactor"),
    (f"{MINIMAL}train: {{load_best_model_at_end: true}}\neval: {{steps: 0}}", "never evaluates"),
    (f"{MINIMAL}train: {{metric_for_best_model: exact_match}}", "needs eval.generate_rows"),
    (f"{MINIMAL}tuning: {{backend_fallback: bnb}}", "is the backend itself"),
])  # fmt: skip
def test_what_is_no_run_yaml_says_so(text, message):
    assert message in problem(text)


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_bad_yaml_fixtures_each_get_one_clear_message(refuse, origin):
    files = sorted(bad_inputs(origin).glob("4*.yaml"))
    assert len(files) == 10
    for file in files:
        assert file.name in refuse("train", "--config", str(file))


@pytest.mark.parametrize(("override", "path", "value"), [
    ("train.epochs=1", ("train", "epochs"), 1),
    ("tuning.lora.target_modules=[q_proj,v_proj]", ("tuning", "lora", "target_modules"), ("q_proj", "v_proj")),
    ("data.val_path=null", ("data", "val_path"), None),
    ("data.columns={prompt: q}", ("data", "columns"), {"prompt": "q"}),
    ("output.name=a=b", ("output", "name"), "a=b"),
    ("model.mesh_shape=[[1, 1], [fsdp, tp]]", ("model", "mesh_shape"), ((1, 1), ("fsdp", "tp"))),
])  # fmt: skip
def test_an_override_sets_any_leaf(override, path, value):
    assert functools.reduce(getattr, path, load(MINIMAL, override)) == value
    assert load(MINIMAL, "train.epochs=3", "train.epochs=2").train.epochs == 2  # the last one counts


@pytest.mark.parametrize(("override", "message"), [
    ("train.epoch=1", "did you mean train.epochs?"), ("train.epochs", "is not key=value"),
    ("train.epochs=[", "not valid YAML"), ("train.epochs.x=1", "train.epochs"),
    ("model.name=", "give a value or remove the key"), ("output.name=„x“", "output.name: is in typographic quotes"),
])  # fmt: skip
def test_a_wrong_override_says_that_it_came_from_set(override, message):
    text = problem(MINIMAL, override)
    assert message in text
    assert "SET" in text


def test_set_is_split_as_a_shell_would_without_running_anything(tmp_path):
    marker = tmp_path / "ran"
    words = split_overrides(f"a='b c' d=\"e; touch {marker}\" f=$(touch {marker}) g=`touch {marker}`")
    assert (words[:2], marker.exists()) == (["a=b c", f"d=e; touch {marker}"], False)
    with pytest.raises(ConfigError, match="close the quote"):
        split_overrides("a='b")
    mesh = "model.mesh_shape=[[1, 1], [fsdp, tp]]"  # whose quotes a shell has eaten
    assert split_overrides(f"{mesh} train.epochs=2") == [mesh, "train.epochs=2"]


def test_the_reference_is_current_and_has_every_key_each_with_a_docstring_an_owner_and_words_for_its_values():
    leaves = all_options().values()
    assert len({leaf.doc for leaf in leaves}) == len(leaves) > 50
    assert all(leaf.doc and leaf.owner and leaf.accepted_values for leaf in leaves)
    assert (ROOT / REFERENCE).read_text(encoding="utf-8") == reference_yaml()
    written = parse_yaml(reference_yaml(), name="reference").data
    for path in all_options():
        functools.reduce(operator.getitem, path.split("."), written)
    plain = load("model: {name: Qwen/Qwen2.5-3B-Instruct}")
    assert differing_options(resolved_config(load(reference_yaml())), resolved_config(plain)) == {}


def test_the_json_schema_is_current_and_accepts_every_shipped_config():
    assert (ROOT / SCHEMA).read_text(encoding="utf-8") == json_schema()
    schema = json.loads(json_schema())
    for file in SHIPPED:
        jsonschema.validate(parse_yaml(file.read_text(encoding="utf-8"), name=file.name).data, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"nmae": "gpt2"}}, schema)


SHIPPED = sorted((ROOT / "configs").glob("run_*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_config_has_a_header_loads_and_plans(file: Path):
    header = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for part in ("# Hardware:", "# Predicted peak:", "# Command: make train"):
        assert any(line.startswith(part) for line in header), part
    config = load_config(file).config
    hardware = re.search(r"HARDWARE=([^)]+)\)", "\n".join(header))
    if hardware is None:
        assert file.stem in ("run_images", "run_starter")
        return
    machine = parse_hardware(hardware[1])
    plan = make_plan(PlanRequest(config, load_model_shape(config.model.name), machine))
    assert plan.fits
    # the command is the one that spreads over GPUs where the plan does
    target = "train" if plan.layout == "single" else "train-distributed"
    assert f"# Command: make {target} CONFIG=configs/{file.name}" in header
    stated = re.search(r"Predicted peak: ([\d.]+) GiB allocated per GPU, micro-batch (\d+)", "\n".join(header))
    assert stated is not None
    assert (stated[1], int(stated[2])) == (f"{plan.memory.allocated / GIB:.1f}", plan.batch.micro_batch)


def test_of_names_that_begin_alike_the_nearest_is_meant_whatever_its_place():
    chance = random.Random(3)
    for _ in range(300):
        beginning = "".join(chance.choices("abcdefg", k=chance.randint(4, 9)))
        longer = {beginning + "".join(chance.choices("hijk_", k=chance.randint(1, 12))) for _ in range(4)}
        others = {"".join(chance.choices("lmnopq", k=6)) for _ in range(4)}
        names = [*longer, *others, beginning[1:], beginning[:-1] + "x"]
        chance.shuffle(names)
        found = nearest_name(beginning, names)
        assert found in longer
        assert len(normalize_name(found)) == min(len(normalize_name(name)) for name in longer)


def test_a_missing_run_yaml_names_those_beside_it_and_another_encoding_its_byte(tmp_path, monkeypatch):
    (tmp_path / ".hidden.yaml").touch()
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"none\.yaml does not exist .*; there are: configs/reference\.yaml"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "mine.yml").touch()
    with pytest.raises(ConfigError, match=r"there are: \S*/mine\.yml$"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "mine.yml").write_bytes(b"model: {name: gpt2}\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"mine\.yml:2: byte 0xE9 is not UTF-8"):
        load_config(tmp_path / "mine.yml")
