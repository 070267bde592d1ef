"""A DeepSpeed configuration: the shipped one of each ZeRO layout, a person's file as plain data, and what it decides of
a run: the layout, and batch and dtypes of communication where the run YAML leaves them open.
"""

from __future__ import annotations

import re
from pathlib import Path

from sft_play.config import yaml_io
from sft_play.config.schema import DTYPES, MixedPrecisionConfig, TrainConfig
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.translate import AUTO, Config, value_at
from sft_play.log import one_line
from sft_play.planner.batching import is_of_one_rank, product_problem
from sft_play.planner.layout import LayoutName

STAGES: dict[LayoutName, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
"""Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are."""
LAYOUTS = {(stage, states): name for name, (stage, states, _) in STAGES.items()} | {(1, True): "zero1"}
"""The layout of a stage, with its optimizer states offloaded or not."""
WANTED = "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"


def shipped_config(layout: LayoutName) -> Config:
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
    text = yaml_io.read_text(path, variable="DEEPSPEED_CONFIG", wanted=WANTED)
    bare = _NOT_JSON.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)  # lines and columns stay
    is_json = bare.lstrip().startswith(("{", "["))
    data = yaml_io.parse_value(bare if is_json and path.suffix.lower() not in (".yaml", ".yml") else text,
                               name=one_line(str(path)))  # fmt: skip
    if not isinstance(data, dict):
        raise ConfigError(f"{one_line(str(path))} holds {yaml_io.show(data)}; expected {WANTED}")
    return data


_NOT_JSON = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|\t', re.DOTALL)
"""What people write in JSON that YAML, of which JSON is a part, does not take: comments, and tabs. Strings are matched
first, so that the // of a URL begins no comment."""


def layout_of(
    config: Config, *, name: str = "the DeepSpeed configuration", planned: LayoutName = "zero2"
) -> LayoutName:
    """The layout that a translated configuration asks for; where its stage is "auto" or absent, that of `planned`.

    Raises:
        ConfigError: it shards nothing (stage 0), or offloads weights that it does not shard.
    """
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", AUTO)
    stage = STAGES[planned][0] if stage in (AUTO, None) else int(stage)
    states, weights = offloads(zero, "offload_optimizer"), offloads(zero, "offload_param")
    if stage == 0:
        raise ConfigError(
            f"{name}: zero_optimization.stage 0 shards nothing: every GPU would hold the whole model; "
            "set stage 1, 2 or 3, or ask for STRATEGY=ddp"
        )
    if weights and stage < 3:
        raise ConfigError(f"{name}: offload_param needs stage 3 and the stage is {stage}; set stage 3 or remove it")
    return LAYOUTS[stage, states]


def layout_notes(config: Config, *, planned: LayoutName = "zero2") -> tuple[str, ...]:
    """Where a file differs from the layout that it is planned as."""
    zero = config.get("zero_optimization") or {}
    notes = []
    layout = layout_of(config, planned=planned)
    states, weights = offloads(zero, "offload_optimizer"), offloads(zero, "offload_param")
    if states and layout == "zero1":
        notes.append("optimizer states go to RAM; the plan for zero1 has them on the GPUs, so it needs less than that")
    if weights and layout == "zero3":
        notes.append("weights go to RAM; the plan for zero3 has them on the GPUs, so it needs less than that")
    if keeps_params(config, layout):
        notes.append("no offload_param: the weights stay on the GPUs, and are planned there")
    for key in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme":
            notes.append(f"{key} goes to NVMe ({zero[key].get('nvme_path')}); its speed is not planned")
    return tuple(notes)


def keeps_params(config: Config, layout: LayoutName) -> bool:
    """Whether a file that asks for `zero3_offload` offloads only the optimizer states."""
    return layout == "zero3_offload" and not offloads(config.get("zero_optimization") or {}, "offload_param")


def offloads(zero: Config, key: str) -> bool:
    """Whether the section `key` of `zero_optimization` moves something off the GPUs."""
    section = zero.get(key)
    return isinstance(section, dict) and section.get("device", "none") in ("cpu", "nvme")


BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "grad_accum",
    "train_batch_size": "effective_batch_size",
}
"""DeepSpeed's batch keys and the run YAML's."""


def with_batch(
    train: TrainConfig, config: Config, *, ranks: int, name: str = "the DeepSpeed configuration"
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it open, and a line for
    each value taken from it.

    Micro-batch and accumulation are open where the run YAML says "auto", the effective batch where it does not set
    one; where both others are known it is their product with the data-parallel `ranks`.

    Raises:
        ConfigError: a number of the file contradicts one that the run YAML gives, or they do not multiply; both are
            named, all contradictions at once.
    """
    given_batch = {key: value for key in BATCH_KEYS if isinstance(value := config.get(key), int)}  # without "auto"
    if not given_batch:
        return train, ()
    given = {field: value for field in ("batch_size", "grad_accum") if (value := getattr(train, field)) != AUTO}
    # It has a number as its default, so "given" is what the file or SET holds, even if that is the default.
    if "effective_batch_size" in train.model_fields_set:
        given["effective_batch_size"] = train.effective_batch_size
    taken: dict[str, int] = {}
    sources = {field: f"train.{field}={value}" for field, value in given.items()}
    lines, problems = [], []
    for key, value in given_batch.items():
        field = BATCH_KEYS[key]
        if given.get(field, value) != value:
            problems.append(f'{key}: {value} contradicts train.{field}={given[field]}; keep one of them ("auto" here)')
        elif field not in given:
            taken[field], sources[field] = value, f"{key}: {value}"
            lines.append(f"{key}: {value} is the run's train.{field}, which the run YAML leaves open")
    if not problems:
        numbers = given | taken
        micro, accum = (numbers.get(field) for field in ("batch_size", "grad_accum"))
        if "effective_batch_size" not in numbers and micro and accum:
            taken["effective_batch_size"] = micro * accum * ranks
            lines.append(f"train.effective_batch_size → {micro} × {accum} × {ranks} ranks = {micro * accum * ranks}, "
                         "which neither file gives")  # fmt: skip
        # a YAML of one rank is kept over several, unless the file repeats its numbers of a rank
        if not (is_of_one_rank(train) and given_batch.keys() == {"train_batch_size"}):
            by_default = f"train.effective_batch_size={train.effective_batch_size} (its default)"
            said = {"effective_batch_size": by_default, **sources}
            problem = product_problem(train.model_copy(update=taken), ranks=ranks, said=said)
            problems += [problem] if problem else []
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return train.model_copy(update=taken), tuple(lines)


DTYPE_KEYS = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
"""DeepSpeed's keys and the run YAML's under distributed.mixed_precision."""
SHORT_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
"""DeepSpeed's names for our dtypes."""


def with_dtypes(
    mixed: MixedPrecisionConfig, config: Config, *, name: str = "the DeepSpeed configuration"
) -> tuple[MixedPrecisionConfig, tuple[str, ...]]:
    """The run's dtypes with those of a translated configuration where the run YAML says auto, and a line for each.

    Raises:
        ConfigError: a dtype of the file contradicts the run YAML's, or is not one.
    """
    taken, lines, problems = dict[str, str](), [], []
    for key, field in DTYPE_KEYS.items():
        theirs, path = value_at(config, key), f"distributed.mixed_precision.{field}"
        if theirs in (None, AUTO):
            continue
        ours, given = DTYPES.get(str(theirs).lower()), getattr(mixed, field)
        if ours is None:
            problems.append(f"{key}: {yaml_io.show(theirs)} is not valid; expected {', '.join(DTYPES)}")
        elif given not in (AUTO, ours):
            problems.append(f"{key}: {theirs} contradicts {path}={given}; keep one of them")
        elif given == AUTO:
            taken[field] = ours
            lines.append(f"{key}: {theirs} is the run's {path}, which the run YAML leaves open")
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return mixed.model_copy(update=taken), tuple(lines)
