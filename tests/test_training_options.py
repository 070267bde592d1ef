"""One table of training options: who adds one to the schema finds it at every reader; hints know what there is."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from sft_play.config import options as config_options
from sft_play.config import other_tools
from sft_play.config.load import config_from_text
from sft_play.config.options import find_option, optimizer_options
from sft_play.config.schema import ADAMW_OPTIMIZERS, ExternalNames, RunConfig, TrainConfig, optimizer_option
from sft_play.config.validation import find_conflicts
from sft_play.config.yaml_io import YamlDocument
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed import KNOWN_DEEPSPEED_KEYS, PlanValues, deepspeed_options, fill_auto_values
from sft_play.planner import backend
from sft_play.planner.batching import BatchPlan
from sft_play.runs.folder import RunFolder

EPSILON = ExternalNames(
    "adam_epsilon", deepspeed="optimizer.params.eps", other_tools="adam_eps epsilon", optimizers=ADAMW_OPTIMIZERS
)


class LongerTrain(TrainConfig):
    """The section with an option more."""

    adam_epsilon: float = optimizer_option(1e-8, EPSILON, gt=0.0)
    """Added to the root of AdamW's average of squared gradients."""


class LongerRun(RunConfig):
    """A run with that option."""

    train: LongerTrain = LongerTrain()
    """Training."""


@pytest.fixture
def longer(monkeypatch):
    """A run with train.adam_epsilon, while the schema has it."""
    cached = [config_options.all_options, config_options.sections, config_options.list_item_sections]
    cached.append(other_tools.key_table)
    monkeypatch.setattr(config_options, "TrainConfig", LongerTrain)
    monkeypatch.setattr(config_options, "RunConfig", LongerRun)
    for one in cached:
        one.cache_clear()
    yield LongerRun.model_validate_json('{"model": {"name": "a"}, "train": {"adam_epsilon": 1e-6}}')
    monkeypatch.undo()
    for one in cached:
        one.cache_clear()


def test_the_trainer_unsloths_process_the_bench_and_tensorboard_are_given_a_new_option(longer, monkeypatch, tmp_path):
    from benchmarks.steps import order, ours
    from sft_play.training.loop.trainer import training_arguments
    from sft_play.training.measure.board import build_hparams

    plan: Any = SimpleNamespace(
        trainer_batch=SimpleNamespace(micro_batch=1, grad_accum=1), eval_batch=1, layout="single", max_seq_len=8,
        precision=SimpleNamespace(compute="float32"), hardware=SimpleNamespace(device="cpu"),
        batch=SimpleNamespace(ranks=1, effective_batch=8, micro_batch=1),
        choice=SimpleNamespace(checkpointed_layers=0, step=SimpleNamespace(offloads=False)),
    )  # fmt: skip
    assert training_arguments(longer, plan, RunFolder(tmp_path), has_eval=False).adam_epsilon == 1e-6
    assert not [refused for refused in backend.unsupported_options(longer) if "adam_epsilon" in refused]
    facts = ours.training_facts(longer)
    assert facts["adam_epsilon"] == 1e-6
    told = {"trainer": facts, "effective_batch": 8, "logging_steps": 1, "compute_dtype": "float32", "on_cpu": True}
    assert order.trainer_arguments(told, steps=1, micro=1)["adam_epsilon"] == 1e-6
    assert build_hparams(longer, plan)["adam_epsilon"] == 1e-6


def test_deepspeeds_file_agrees_with_a_new_option_or_is_refused(longer):
    numbers = PlanValues(
        "zero2", BatchPlan(1, 1, 1), hidden_size=8, compute_dtype="float32", options=deepspeed_options(longer)
    )
    block = {"type": "AdamW", "params": {"eps": 1e-6}}
    assert "optimizer" not in fill_auto_values({"optimizer": block}, numbers)
    with pytest.raises(ConfigError, match=r"eps: 1e-08 contradicts train.adam_epsilon: 1e-06"):
        fill_auto_values({"optimizer": {"type": "AdamW", "params": {"eps": 1e-8}}}, numbers)


def test_other_tools_names_lead_to_a_new_option_and_an_optimizer_that_does_not_read_it_is_refused(longer):
    for name in ("adam_eps", "epsilon", "eps"):
        with pytest.raises(ConfigError, match=r"here it is train.adam_epsilon: 1e-6"):
            config_from_text(f"model: {{name: a}}\n{name}: 1e-6\n", name="x.yaml")
    train = longer.train.model_copy(update={"optim": "adafactor"})
    config = longer.model_copy(update={"train": train})
    (problem,) = (one for one in find_conflicts(config, YamlDocument("run.yaml")) if "adam_epsilon" in one.path)
    assert problem.message == "1e-06 is AdamW's, and train.optim is adafactor; remove one of them"


def test_the_table_names_real_arguments_of_the_trainer_and_real_keys_of_deepspeed():
    from transformers import TrainingArguments

    assert len(optimizer_options()) == 8
    for option in optimizer_options():
        assert option.external_names.trainer in TrainingArguments.__dataclass_fields__
        path = option.external_names.deepspeed
        assert path is None or path.startswith("optimizer.params.") or path in KNOWN_DEEPSPEED_KEYS[""]
        assert set(option.external_names.optimizers) <= set(ADAMW_OPTIMIZERS)


def test_a_key_in_a_wrong_place_is_never_told_to_be_removed():
    """Whatever the table of other tools says of a name: what exists here is moved to its place."""
    own = {path.rpartition(".")[2]: path for path in config_options.all_options() if not path.startswith("plan.")}
    own = [name for name in own if len(find_option(name)) == 1 and name not in other_tools._VAGUE_NAMES]
    assert len(own) > 80
    for name in own:
        with pytest.raises(ConfigError) as error:
            config_from_text(f"model: {{name: a}}\nplan: {{{name}: 3}}", name="run.yaml")
        assert not re.search("remove it|not supported", str(error.value))


def test_no_row_of_words_holds_a_name_that_the_table_answers():
    """A row that says `remove it` of a key that has become an option here, or of its synonyms, is out of date."""
    ours = {name: option.path for option in optimizer_options() for name in (option.name, *option.other_names)}
    listed = other_tools.parse_known_keys(other_tools._load_tables()["rows"])
    assert len(listed) > 800
    assert not {key: ours[key] for key, row in listed.items() if key in ours and row.path != ours[key]}
    for key, row in listed.items():
        if "remove it" in row.explanation and not (row.path or row.translations or row.read_value):
            assert not find_option(key) or key in other_tools._VAGUE_NAMES, key
