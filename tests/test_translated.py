"""Other tools' files as run YAMLs: what a file names, and what its tool takes for the rest, is in the YAML or a
comment."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.load import config_from_text
from sft_play.config.schema import RunConfig
from sft_play.config.translated import Translation, format_run_yaml, translate_file
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.files import find_source
from sft_play.errors import ConfigError

MODEL = {"model.name": "a/b"}


def translated(text: str, *, rows: str = "") -> Translation:
    return translate_file(text, name="theirs.yaml", user_settings=MODEL, row_format=rows)


def config_of(text: str, *, rows: str = "") -> RunConfig:
    return config_from_text(format_run_yaml(translated(text, rows=rows).settings), name="x.yaml")


def value(config: RunConfig, path: str) -> object:
    at: object = config
    for name in path.split("."):
        at = at[name] if isinstance(at, dict) else getattr(at, name)
    return list(at) if isinstance(at, tuple) else at


def comments(text: str) -> str:
    return " ".join(" ".join(translated(text).comments()).replace("# ", "").split())


AXOLOTL = "base_model: a/b\nmicro_batch_size: 2\nlearning_rate: 1e-4\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\ntemplate: qwen\n"
TRL = "model_name_or_path: a/b\ndataset_name: o/d\n"
SWIFT = "model: a/b\ntuner_type: lora\n"
TUNE = (
    "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj]}\n"
    "checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m}\n"
    "optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}\nbatch_size: 2\ngradient_accumulation_steps: 4\n"
)
OF_TUNE = f"{TUNE}dataset: {{_component_: torchtune.datasets"
UNSLOTH = "model: a/b\ndata: {dataset: o/d, format_type: auto}\ntraining: {max_steps: 60}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            AXOLOTL,
            {"tuning.mode": "full", "model.max_seq_len": 512, "data.truncate": "drop", "data.loss_on": "assistant",
             "data.packing": "none", "train.batch_size": 2, "train.grad_accum": 1, "train.epochs": 1.0,
             "train.lr_scheduler_type": "cosine", "train.warmup_steps": 0.03, "train.weight_decay": 0.0,
             "train.max_grad_norm": 1.0, "train.optim": "adamw_torch_fused", "train.seed": 42},
        ),
        (
            f"{AXOLOTL}adapter: lora\nlora_r: 8\nlora_alpha: 64\nlora_target_linear: true\nmax_grad_norm:\n",
            {"tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 64, "tuning.lora.dropout": 0.0,
             "tuning.lora.target_modules": "auto", "train.max_grad_norm": 1.0},
        ),
        (
            FACTORY,
            {"tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 16, "tuning.lora.dropout": 0.0,
             "tuning.lora.target_modules": "auto", "model.max_seq_len": 2048, "data.loss_on": "assistant",
             "train.learning_rate": 5e-5, "train.lr_scheduler_type": "linear", "train.warmup_steps": 0,
             "train.batch_size": 8, "train.grad_accum": 1, "train.epochs": 3.0, "train.weight_decay": 0.0},
        ),
        (f"{FACTORY}lora_alpha: 7\nquantization_bit: 4\n", {"tuning.lora.alpha": 7, "tuning.mode": "qlora"}),
        (
            TRL,
            {"tuning.mode": "full", "model.max_seq_len": 1024, "data.loss_on": "all", "data.truncate": "end",
             "train.learning_rate": 2e-5, "train.lr_scheduler_type": "linear", "train.warmup_steps": 0,
             "train.batch_size": 8, "train.grad_accum": 1, "train.epochs": 3.0, "data.packing": "none"},
        ),
        (
            f"{TRL}use_peft: true\n",
            {"tuning.mode": "lora", "tuning.lora.r": 16, "tuning.lora.alpha": 32, "tuning.lora.dropout": 0.05,
             "tuning.lora.target_modules": ["q_proj", "v_proj"]},
        ),
        (
            SWIFT,
            {"tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 32, "tuning.lora.dropout": 0.05,
             "train.learning_rate": 1e-4, "train.weight_decay": 0.1, "train.adam_beta2": 0.95, "train.epochs": 3.0,
             "train.effective_batch_size": 16, "train.batch_size": 1, "train.lr_scheduler_type": "cosine",
             "train.warmup_steps": 0, "data.truncate": "drop", "data.loss_on": "assistant"},
        ),
        (SWIFT.replace("lora", "full"), {"tuning.mode": "full", "train.learning_rate": 1e-5}),
        (
            TUNE,
            {"tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 16, "tuning.lora.dropout": 0.0,
             "tuning.lora.target_modules": ["q_proj", "o_proj"], "train.lr_scheduler_type": "constant",
             "train.warmup_steps": 0, "train.max_grad_norm": 0.0, "train.weight_decay": 0.01, "model.name": "a/b"},
        ),
        (
            UNSLOTH,
            {"tuning.mode": "qlora", "tuning.lora.r": 64, "tuning.lora.alpha": 16, "train.learning_rate": 2e-4,
             "train.batch_size": 2, "train.grad_accum": 4, "train.warmup_steps": 5, "train.weight_decay": 0.01,
             "train.optim": "adamw_8bit", "train.lr_scheduler_type": "linear", "train.seed": 3407,
             "train.max_steps": 60, "data.loss_on": "all"},
        ),
        (
            "model_name_or_path: a/b\nper_device_train_batch_size: 4\n",
            {"train.lr_scheduler_type": "linear", "train.learning_rate": 5e-5, "train.epochs": 3.0,
             "train.batch_size": 4, "train.grad_accum": 1, "train.warmup_steps": 0},
        ),
    ],
)  # fmt: skip
def test_what_a_file_leaves_out_is_what_its_tool_takes_then(text, expected):
    config = config_of(text)
    assert {path: value(config, path) for path in expected} == expected


def test_an_adapter_that_is_continued_and_a_run_yaml_of_ours_keep_their_own_options():
    assert config_of(f"{FACTORY}adapter_name_or_path: saves/first\n").model.adapter == "saves/first"
    assert not any(path.startswith("tuning.lora.") for path in translated(f"{FACTORY}adapter_folder: x\n").settings)
    text = "model: {name: a/b, max_seq_len: 64}\ndata: {packing: best_fit, train_path: x.jsonl}\ntuning: {mode: lora}\n"
    found = translate_file(text, name="x.yaml", user_settings={})
    given = {"model.name": "a/b", "model.max_seq_len": 64, "data.train_path": "x.jsonl", "data.packing": "best_fit"}
    assert (found.left_out_keys, found.settings) == ([], {**given, "tuning.mode": "lora"})


def test_a_default_never_counts_against_the_file():
    said = comments(f"{TRL}lr_scheduler_type: warmup_stable_decay\noptim: sgd\n").replace('"', "")
    assert "lr_scheduler_type (value warmup_stable_decay)" in said
    assert "optim (value sgd): here it is train.optim" in said
    assert "all weights, not adapters" not in comments(f"{TRL}use_peft: true\n")
    config = config_of(f"{TRL}train_batch_size: 64\nreport_to: tensorboard\nuse_wandb: true\nuse_mlflow: false\n")
    assert (config.train.effective_batch_size, config.train.batch_size) == (64, "auto")
    assert sorted(config.train.report_to) == ["tensorboard", "wandb"]
    for rows, loss_on in (("messages", "all"), ("prompt/completion", "completion")):  # the rows decide
        assert config_of(TRL, rows=rows).data.loss_on == loss_on


@pytest.mark.parametrize(("entry", "said"), [
    ("roles_to_train: [user]", "not the turns of other roles alone"),
    ("roles_to_train: []", "does not say train: false"),
    ("type: {field_output: a, format: '[INST] {instruction} [/INST]'}", "the model's chat template writes them"),
    ("train_on_split: test", "load_dataset(…, split=test)"),
    ("train_on_eos: last", "the end of every trained answer is trained"),
    ("message_field_training: keep_me", "rename it to train in the rows"), ("type: alpaca", "not as Alpaca's text"),
    ("type: chat_template", None), ("message_property_mappings: {role: wer, content: was}", "rename it in the rows"),
    ("message_property_mappings: {role: from, content: value}", None),
    ("chat_template: llama3", "the model's own chat template is used"),
    ("unheard_of: 1", "there is no such option here"),
])  # fmt: skip
def test_what_axolotl_says_of_a_data_set_is_taken_or_named(entry, said):
    text = f"{AXOLOTL}datasets:\n  - path: my.jsonl\n    {entry}\n"
    key, found = re.split(r"[:{ ]", entry)[0], comments(text)
    assert (said is None) is (f"datasets[0].{key}" not in found), found
    assert said is None or said in found


def test_the_columns_that_a_file_names_are_those_that_are_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"frage": "Was?", "antwort": "Das.", "regel": "Kurz.", "instruction": "no", "output": "no"}
    Path("my.jsonl").write_text(json.dumps(row) + "\n")
    types = (
        "type: {field_instruction: frage, field_output: antwort, field_system: regel}",
        "type: alpaca\n    field_instruction: frage\n    field_output: antwort\n    field_system: regel",
    )
    for kind in types:
        data = config_of(f"{AXOLOTL}datasets:\n  - path: my.jsonl\n    {kind}\n").data
        assert data.columns == {"instruction": "frage", "output": "antwort", "system": "regel"}
        ((_, chat),) = ExampleReader(find_source("my.jsonl"), data, split="train").numbered_examples()
        assert [turn["content"] for turn in chat.messages] == ["Kurz.", "Was?", "Das."]


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        (f"{AXOLOTL}datasets: [{{path: x.jsonl, field_messages: chat}}]\n", "data.columns", {"messages": "chat"}),
        (f"{TRL}dataset_text_field: body\n", "data.columns", {"text": "body"}),
        (f"{OF_TUNE}.instruct_dataset, source: json, data_files: x.json, column_map: {{input: q, output: a}}}}\n",
         "data.columns", {"input": "q", "output": "a"}),
        (f"{TRL}dataset_config: cn\n", "data.train_path", "hub:o/d:cn"),
        (f"{AXOLOTL}datasets: [{{path: o/d, name: cn, type: alpaca}}]\n", "data.train_path", "hub:o/d:cn"),
        (f"{OF_TUNE}.chat_dataset, source: o/d, subset: cn}}\n", "data.train_path", "hub:o/d:cn"),
        (f"{AXOLOTL}datasets: [{{path: json, data_files: my.json, name: cn}}]\n", "data.train_path", "my.json"),
        (f"{TRL}dataset_config: default\n".replace("o/d", "./r.jsonl"), "data.train_path", "./r.jsonl"),
        (TUNE.replace("lr: 3e-4", "lr: 3e-4, betas: [0.9, 0.95]"), "train.adam_beta2", 0.95),
        (TUNE.replace("lr: 3e-4", "lr: 3e-4, betas: [0.9]"), "train.adam_beta2", 0.999),
        (TUNE.replace("lr: 3e-4", "lr: 3e-4, betas: [0.9, 0.95, 0.9]"), "train.adam_beta2", 0.999),
        (f"{TRL}assistant_only_loss: true\n", "data.loss_on", "assistant"),
        (f"{AXOLOTL}train_on_inputs: true\n", "data.loss_on", "all"),
        (f"{OF_TUNE}.alpaca_cleaned_dataset}}\n", "data.loss_on", "all"),
        (f"{OF_TUNE}.chat_dataset, source: o/d}}\n", "data.loss_on", "assistant"),
        (f"{SWIFT}loss_scale: last_round\n", "data.loss_on", "completion"),
        (f"{SWIFT}system: Be terse.\n", "data.style.system", "Be terse."),
        (f"{FACTORY}default_system: Be terse.\n", "data.style.how", "keep"),  # for rows that have none
    ],
)  # fmt: skip
def test_each_tools_way_to_say_it_is_taken(text, path, expected):
    assert value(config_of(text), path) == expected


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        (f"{SWIFT}dataset: rows.jsonl#500\n", [("rows.jsonl", 500)]),
        (f"{SWIFT}dataset: ['o/d:cn#7', b.jsonl]\n", [("hub:o/d:cn", 7), ("b.jsonl", None)]),
        (f"{FACTORY}dataset: a.jsonl, b.jsonl\nmax_samples: 9\n", [("a.jsonl", 9), ("b.jsonl", 9)]),
        ("model_name_or_path: a/b\ndataset_mixer: {o/d: 1.0, o/e: 0.5}\n", [("hub:o/d", None), ("hub:o/e", None)]),
        (f"{AXOLOTL}datasets: [{{path: o/d, split: 'train[:100]'}}]\n", [("hub:o/d", 100)]),
    ],
)  # fmt: skip
def test_a_number_of_rows_is_a_number_of_rows_here(text, sources):
    assert [(source.path, source.max_rows) for source in config_of(text).data.sources] == sources


def test_a_share_of_each_data_set_is_not_taken_for_its_share_of_the_mix():
    """alignment-handbook's weight is the share of a data set's own rows; TRL's fraction is that of the mixture."""
    for text in (
        "model_name_or_path: a/b\ndataset_mixture: {datasets: [{id: o/d, weight: 0.1}, {id: o/e, weight: 1.0}]}\n",
        "model_name_or_path: a/b\ndataset_mixer: {o/d: 0.1, o/e: 1.0}\n",
    ):
        sources = config_of(text).data.sources
        assert [(source.path, source.weight) for source in sources] == [("hub:o/d", None), ("hub:o/e", None)]
        assert re.search(r"share \(value 0\.1\): alignment-handbook's weight takes this share", comments(text))
        assert "value 1.0" not in comments(text)
    text = f"{TRL}datasets: [{{path: o/d, fraction: 3}}, {{path: o/e, fraction: 1}}]\n".replace("dataset_name", "x")
    assert [source.weight for source in config_of(text).data.sources] == [3, 1]
    assert "datasets[0].fraction (value 3)" in comments(text)


@pytest.mark.parametrize("text", ["", "- a\n", "words\n", 'model: "\\ud800"\n'])
def test_what_is_no_file_of_settings_is_refused_by_its_name(text):
    with pytest.raises(ConfigError, match=r"^theirs\.yaml:"):
        translated(text)


def test_every_file_of_a_data_set_is_taken_once_and_a_list_of_data_sets_is_no_file():
    text = f"{AXOLOTL}datasets: [{{path: x.jsonl}}, {{path: x.jsonl, max_samples: 5}}]\n"
    assert [source.max_rows for source in config_of(text).data.sources] == [5]
    assert config_of(f"{AXOLOTL}datasets: [{{path: x.jsonl}}, {{path: x.jsonl}}]\n").data.train_path == "x.jsonl"
    text = f"{AXOLOTL}datasets:\n  - {{path: json, data_files: [a.jsonl, b.jsonl]}}\n"
    assert [source.path for source in config_of(text).data.sources] == ["a.jsonl", "b.jsonl"]
    text = f"{AXOLOTL}datasets:\n  - {{path: json, data_files: {{train: a.jsonl, test: b.jsonl}}}}\n"
    assert config_of(text).data.train_path == "a.jsonl"
    assert "held-out ones are named by data.val_path" in comments(text)
    text = "model: a/b\nmodel_class: llm\ntrain_dataset: data/v1_sft_demo.yaml\n"
    assert "data.train_path" not in translated(text).settings
    assert "not by a name in a registry" in comments(text)


def test_another_split_of_the_hub_is_not_taken_for_the_one_that_is_read():
    text = f"{AXOLOTL}datasets:\n  - {{path: o/d, split: test}}\n  - {{path: o/e, split: train_sft}}\n"
    assert config_of(text).data.train_path == "hub:o/e"
    assert "load_dataset(…, split=test)" in comments(text)
    assert "data.train_path" not in translated(f"{AXOLOTL}datasets: [{{path: o/d, split: test}}]\n").settings
    assert config_of(f"{AXOLOTL}datasets: [{{path: ./test.jsonl, split: test}}]\n").data.train_path == "./test.jsonl"
    # held-out rows of the training split are no validation file: `hub:o/d` would read the split validation
    data = "{_component_: torchtune.datasets.chat_dataset, source: o/d, split: 'train[%s]'}"
    text = f"{TUNE}dataset: {data % ':95%'}\ndataset_val: {data % '95%:'}\n"
    assert config_of(text).data.val_path is None
    assert "dataset_val (value" in comments(text)
    kept = f"{TUNE}dataset_val: {data.replace('train[%s]', 'validation')}\n"
    assert config_of(kept).data.val_path == "hub:o/d"


@pytest.mark.parametrize(("line", "named"), [
    ("packing: true\npacking_strategy: wrapped", "not cut and continued"),
    ("chat_template_jinja: '{% for m in messages %}{% endfor %}'", "in a file of its own"),
    ("lr_scheduler: rex", "rex is not supported"),
    ("lr_scheduler: cosine_with_min_lr", "it ends at 0, not at a min_lr"),
    ("optimizer: ademamix", "a second, slower average, is not supported"),
    ("shuffle: false", "their order in the file is not kept"),
    ("lora_target_modules: 'layers.[0-9]+.mlp'", "a pattern is not read"),
    ("peft_layers_to_transform: [30, 31]", "trains adapters of these layers alone"),
    ("max_steps_per_epoch: 100", "100 x train.epochs"),
])  # fmt: skip
def test_what_is_replaced_is_said(line, named):
    assert named in comments(AXOLOTL + line + "\n")


def test_modules_and_modes_of_torchtune_are_ours():
    text = TUNE.replace("lora_llama3_1_8b,", "qlora_llama3_1_8b, apply_lora_to_mlp: true,")
    config = config_of(text)
    assert config.tuning.mode == "qlora"
    assert set(config.tuning.lora.target_modules) == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert config_of(TUNE.replace("lora_llama3_1_8b,", "llama3_1_8b,")).tuning.mode == "full"
    # the folder of the weights, by OmegaConf's reference too
    text = TUNE.replace("/m}", "'${base}'}") + "base: /weights\n"
    assert translate_file(text, name="x.yaml", user_settings={}).settings["model.name"] == "/weights"


_OF_ENTRIES = [
    "split", "name", "type", "field_instruction", "field_output", "field_messages", "roles_to_train", "train_on_eos",
    "message_field_training", "shards", "revision", "trust_remote_code", "data_files", "ds_type", "chat_template",
    "drop_system_message", "weight", "max_samples", "subset", "seed", "split_thinking", "unheard_of",
]  # fmt: skip
_VALUES = st.sampled_from(["train", "main", "test[:5%]", "x", 3, True, ["user"], {"a": "b"}])
_IN_THE_SOURCE = {"split", "name", "weight", "max_samples", "subset"}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(_OF_ENTRIES), _VALUES, max_size=5), min_size=1, max_size=3))
def test_what_is_said_of_data_sets_is_taken_or_named(entries):
    """The result loads, and each key is in the settings, in a comment, or has nothing to say."""
    given_entries = [{"path": f"owner/set{at}", **entry} for at, entry in enumerate(entries)]
    text = json.dumps({"base_model": "a/b", "sequence_len": 64, "datasets": given_entries})
    found = translated(text)
    config_from_text(format_run_yaml(found.settings), name="x.yaml")
    said = " ".join(" ".join(found.comments()).replace("# ", "").split())
    plain = {"type": ["train"], "train_on_eos": []}
    for number, entry in enumerate(given_entries):
        for key, given_value in entry.items():
            is_column = key.startswith("field_") and any(path.startswith("data.columns.") for path in found.settings)
            silent = key in _IN_THE_SOURCE | {"path"} or given_value in plain.get(key, []) or given_value == "train"
            assert f"datasets[{number}].{key}" in said or is_column or silent, (key, said)
