"""A DeepSpeed configuration: the shipped ones, one for each ZeRO layout, and a person's file as plain data."""

from __future__ import annotations

from pathlib import Path

from sft_play.config import yaml_io
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.keys import AUTO, Config
from sft_play.launch.deepspeed.layout import STAGES
from sft_play.launch.given import json_of, looks_like_json, text_of
from sft_play.log import one_line

WANTED = "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"


def shipped_config(layout: str) -> Config:
    """The configuration of a ZeRO layout of `STAGES`, its values "auto"; `configs/deepspeed/` holds the same.

    Raises:
        ConfigError: the layout is not one that DeepSpeed runs.
    """
    if layout not in STAGES:
        raise ConfigError(f"DeepSpeed has no layout {one_line(layout)}; it has {', '.join(STAGES)}")
    stage, states, weights = STAGES[layout]
    zero: Config = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,  # reduce a bucket while the backward pass goes on with the next
        "reduce_scatter": True,
        "reduce_bucket_size": AUTO,
    }
    if states:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if weights:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_gather_16bit_weights_on_model_save": True,  # else a checkpoint holds shards only
        }
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # train.optim chooses; DeepSpeed knows its own and torch's Adam
        "wall_clock_breakdown": False,
    }


def read_deepspeed_file(path: Path) -> Config:
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML.

    Raises:
        ConfigError: the file is missing, a folder, neither JSON nor YAML, no mapping, or holds a key twice.
    """
    text = text_of(path, variable="DEEPSPEED_CONFIG", wanted=WANTED)
    name = one_line(str(path))
    suffix = path.suffix.lower()
    if suffix == ".json" or (suffix not in (".yaml", ".yml") and looks_like_json(text)):
        data = json_of(text, name=name)
    else:
        data = yaml_io.parse_value(text, name=name)
    if data is None:
        raise ConfigError(f"{name}: the file is empty; expected {WANTED}")
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"the value {one_line(repr(data), limit=40)}"
        raise ConfigError(f"{name}: the root is {kind}; expected {WANTED}")
    _refuse_other_kinds(data, name)
    return data


def _refuse_other_kinds(data: Config, name: str) -> None:
    """Raises ConfigError for files of other programs that are easily given by mistake."""
    if {"compute_environment", "distributed_type"} & set(data):
        raise ConfigError(
            f"DEEPSPEED_CONFIG={name} is a configuration of accelerate: give it as ACCELERATE_CONFIG; "
            f"DEEPSPEED_CONFIG names {WANTED}"
        )
    if "model" in data and {"train", "data", "tuning", "task_mode", "output"} & set(data):
        raise ConfigError(f"DEEPSPEED_CONFIG={name} is a run YAML: give it as CONFIG; DEEPSPEED_CONFIG names {WANTED}")
