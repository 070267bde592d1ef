"""Keys of other tools: each is answered with our place and the user's value, all of a file in one round."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from pathlib import Path

import pytest

from sft_play.config import other_tools
from sft_play.config.load import config_from_text
from sft_play.config.options import all_options, find_option, option_accepts, sections
from sft_play.errors import ConfigError
from sft_play.variables import FOREIGN_PREFIXES, VARIABLES, all_targets

MINIMAL = "model: {name: gpt2}\n"


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config_from_text(text, name="run.yaml", overrides=overrides)
    lines = str(error.value).splitlines()
    return [line.strip() for line in lines[1:]] if re.fullmatch(r"\d+ problems:", lines[0]) else lines


HINTS = {
    "backend: deepspeed": "make train-deepspeed (or make train-distributed STRATEGY=zero2)",
    "mixed_precision: fp8": "here it is train.bf16: true (FP8 training is not supported)",
    "buffer_dtype: torch.float32": "here it is distributed.mixed_precision.buffer: float32",
    "base_model: Qwen/Qwen3-8B": "here it is model.name: Qwen/Qwen3-8B",
    "template: qwen": "data.chat_template: FILE.jinja, chatml or plain",
    "template: chatml": "here it is data.chat_template: chatml",
    "save_strategy: steps": "here it is train.save_steps: N (steps between two checkpoints)",
    "adapter: qlora": "here it is tuning.mode: qlora, the default",
    "finetuning_type: freeze": "tuning.trainable: [layers.30-31, norm], the parts to train)",
    "stage: dpo": "preference tuning is not supported (task_mode: sft, cpt or cpt_mixed): use TRL's trainers for it",
    "val_set_size: 0.05": "here it is data.val_fraction: 0.05",
    "val_set_size: 500": "put 500 rows of your choice into a file of their own and name it in data.val_path",
    "train_on_inputs: false": "here it is data.loss_on: assistant, the default",
    "push_to_hub: true": "hf upload OWNER/NAME RUN/adapter",
    "load_in_8bit: true": "8-bit weights are not supported: tuning.mode: qlora (4 bits) or lora (16 bits)",
    "learning_rate: 2.0e-5": "it belongs at train.learning_rate: 2.0e-5",
    "lora_alpha: 16.0": "here it is tuning.lora.alpha: 16",
    "lora_target: q_proj,v_proj": 'here it is tuning.lora.target_modules: ["q_proj", "v_proj"]',
    "warmup_ratio: 0.1": "here it is train.warmup_steps: 0.1 (below 1 it is a fraction of the steps)",
    "tokens: [<think>]": 'here it is model.add_tokens: ["<think>"] (their rows are resized, begun and trained with it)',
    "report_to: none": "here it is train.report_to: []",
    "deepspeed: ds_z3.json": "make train-deepspeed DEEPSPEED_CONFIG=ds_z3.json",
    "deepspeed: zero3": "make train-distributed STRATEGY=zero3",
    "wandb_project: mine": "WANDB_PROJECT=mine before make, with train.report_to: [wandb]",
    "wandb_project:": "it has no effect: remove it",
    "ddp_timeout: 180000000": "here it is distributed.timeout_s: 86400 (the longest)",
    "dataset: tatsu-lab/alpaca": "data.train_path: hub:tatsu-lab/alpaca (the format is detected, see make preview)",
}


@pytest.mark.parametrize(("line", "hint"), HINTS.items())
def test_a_key_of_another_tool_is_answered_with_its_value_in_our_words(line, hint):
    (said,) = problems(MINIMAL + line)
    key = line.partition(":")[0]
    assert said.startswith(f"run.yaml:2: {key}: unknown key (value ")
    assert said.endswith(hint), said


def test_a_section_of_another_tool_is_answered_whole_in_one_round():
    said = problems(
        MINIMAL + "training:\n  num_train_epochs: 3\n  bf16: true\n  mixed_precision: bf16\n  backend: deepspeed\n"
        "  lora: {r: 8, bias: none}\n  optimizer: {name: adamw, lr: 1e-4, betas: [0.9, 0.95]}\n  seed: 1\n"
    )
    assert [line.split(": ")[1] for line in said] == [
        *("training.num_train_epochs", "training.bf16", "training.mixed_precision", "training.backend"),
        *("training.lora.r", "training.lora.bias", "training.optimizer.name", "training.optimizer.lr"),
        *("training.optimizer.betas", "training.seed"),
    ]
    for hint in ("train.epochs: 3", "train.bf16: true", "make train-deepspeed", "at tuning.lora.r: 8",
                 "at train.seed: 1", "train.optim: adamw_torch_fused", "train.learning_rate: 1e-4",
                 "train.adam_beta2: 0.95"):  # fmt: skip
        assert hint in "\n".join(said), hint


def test_a_secret_is_not_shown():
    for key in ("hub_token", "hf_hub_token", "swanlab_api_key", "swanlab_secret"):
        (said,) = problems(MINIMAL + f"{key}: abcdef123456")
        assert "abcdef" not in said, key
    assert 'value "<pad>"' in problems(MINIMAL + "pad_token: <pad>")[0]


@pytest.mark.parametrize("key", ["banana", "my_own_thing", "notes", "wheels", "author"])
def test_a_key_of_nobody_is_not_guessed_at(key):
    assert "the root takes model, task_mode" in problems(MINIMAL + f"{key}: 1")[0]


def test_every_target_of_the_table_exists_and_takes_the_translated_values():
    assert len(other_tools.key_table().known_keys) > 500
    for key, row in other_tools.key_table().known_keys.items():
        # one key of a mapping is a path too: data.columns.prompt
        is_path = row.path in all_options() or row.path.rpartition(".")[0] in all_options()
        assert is_path or (not row.path and (row.explanation or row.translations or row.read_value)), key
        for spelling, answer in row.translations.items():
            assert spelling == spelling.lower(), key
            for path, value in answer.settings.items():
                assert option_accepts(path, value), (key, spelling, path, value)
    assert set(other_tools.key_table().sections.values()) <= set(sections())


VALUES = [True, False, None, 0, 1, 4, -1, 0.05, 0.9, 500, 3.0, 1e9, "", "auto", "no", "16", "2e-5", "a/b", "x.jsonl",
          "10ba", "2ep", [], ["a"], [{"path": "a/b"}], [0.9, 0.95], {}, {"a": 1}]  # fmt: skip


def test_whatever_the_value_a_hint_names_only_what_is_taken():
    chance = random.Random(0)
    for key, row in other_tools.key_table().known_keys.items():
        for value in chance.sample(VALUES, 8):
            answer = other_tools.translate_value(row, value)
            # what is part of a data set's entry needs no words
            assert answer.settings or answer.explanation or key.startswith(("entry.", "held_out.")), (key, value)
            for path, ours in answer.settings.items():
                assert option_accepts(path, ours), (key, value, path, ours)


def test_words_of_the_table_name_keys_targets_and_variables_that_exist():
    rows = [*other_tools.key_table().known_keys.values(), *other_tools.key_table().prefixed_keys.values()]
    words = {answer.explanation for row in rows for answer in (row, *row.translations.values())}
    ours = r"(?<![/\w])(?:model|tuning|data|train|eval|distributed|output)\.[a-z_0-9]+(?:\.[a-z_]+)*"
    seen = 0
    for text in words:
        for key in re.findall(ours, text):
            seen += 1
            assert key in all_options() or key in sections(), text
        for target in re.findall(r"(?<!before )\bmake ([a-z]+(?:-[a-z]+)*) (?:[A-Z(]|$)", text):
            assert target in all_targets(), text
        for name in re.findall(r"\b([A-Z_]{3,})=", text):
            assert name in VARIABLES or name.startswith(FOREIGN_PREFIXES), text
    assert seen > 60


def test_no_key_of_the_table_is_guessed_at():
    keys = [key for key in other_tools.key_table().known_keys if "." not in key]
    said = problems(MINIMAL + "".join(f"{key}: 1\n" for key in keys))
    assert ["did you mean" in line for line in said] == [False] * len(keys)


def fields_of(package: str, file: str) -> set[str]:
    """The annotated fields of the classes in a module of an installed package, without importing it."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    return {
        item.target.id
        for node in tree.body if isinstance(node, ast.ClassDef)
        for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }  # fmt: skip


@pytest.mark.parametrize(("package", "file", "count"), [
    ("transformers", "training_args.py", 100), ("trl", "trainer/sft_config.py", 20),
    ("trl", "trainer/model_config.py", 15), ("trl", "scripts/utils.py", 5),
])  # fmt: skip
def test_every_option_of_the_installed_trainers_is_answered(package, file, count):
    keys = {key for key in fields_of(package, file) if not key.startswith("_")}
    assert len(keys) >= count
    assert not [key for key in sorted(keys) if other_tools.find_known_key((key,)) is None and not find_option(key)]
