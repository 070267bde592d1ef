"""A DeepSpeed configuration: the shipped one of each ZeRO layout, a person's file as plain data in current keys, and
what it decides of a run: the layout, and the batch where the run YAML leaves it open.

DeepSpeed reads some sections with pydantic and refuses unknown keys there, with a traceback on every rank; in all
others, the top level first, an unknown key is ignored without a word. So `keys.json` lists the keys that it knows,
those that it has renamed, and those that it has removed. Paths into a configuration are dotted.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from sft_play.config import yaml_io
from sft_play.config.schema import DTYPES, TrainConfig
from sft_play.config.yaml_io import show
from sft_play.errors import ConfigError
from sft_play.log import one_line
from sft_play.planner.batching import batch_product_problem, is_single_rank_batch
from sft_play.planner.layout import LayoutName
from sft_play.spelling import nearest

# Layout: ZeRO stage, whether optimizer states are offloaded, whether weights are.
STAGES: dict[LayoutName, tuple[int, bool, bool]] = {
    "zero1": (1, False, False),
    "zero2": (2, False, False),
    "zero3": (3, False, False),
    "zero2_offload": (2, True, False),
    "zero3_offload": (3, True, True),
}
LAYOUTS = {(stage, states): name for name, (stage, states, _) in STAGES.items()} | {(1, True): "zero1"}
WANTED = "a DeepSpeed configuration in JSON or YAML, such as configs/deepspeed/zero2.json"


def shipped_config(layout: LayoutName) -> Config:
    """The configuration of a ZeRO layout of `STAGES`, its values "auto"; `configs/deepspeed/` holds the same. Raises
    ConfigError where the layout is not one that DeepSpeed runs."""
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
    """A person's file as plain data: JSON (comments and trailing commas allowed) or YAML; raises ConfigError where the
    file is missing, a folder, neither JSON nor YAML, no mapping, or holds a key twice."""
    text = yaml_io.read_text(path, variable="DEEPSPEED_CONFIG", wanted=WANTED)
    bare = _NOT_JSON.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)  # lines and columns stay
    is_json = bare.lstrip().startswith(("{", "[")) and path.suffix.lower() not in (".yaml", ".yml")
    try:
        data = yaml_io.parse_value(bare if is_json else text, name=one_line(str(path)))
    except ConfigError:
        if is_json:
            _refuse_json(bare, name=one_line(str(path)))
        raise
    if not isinstance(data, dict):
        raise ConfigError(f"{one_line(str(path))} holds {yaml_io.show(data)}; expected {WANTED}")
    return data


def _refuse_json(text: str, *, name: str) -> None:
    """Raise ConfigError in the words of JSON where a text is none; a comma behind the last item is allowed."""
    try:
        json.loads(re.sub(r"(?<!,),(?=\s*[}\]])", " ", text))
    except json.JSONDecodeError as error:
        # what lacks a comma may end lines above
        before = text.count("\n", 0, len(text[: error.pos].rstrip())) + 1
        where = f" behind line {before}" if "delimiter" in error.msg else ""
        raise ConfigError(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}{where}; not valid YAML either"
        ) from None


# What people write in JSON that YAML, of which JSON is a part, does not take: comments, and tabs. Strings are matched
# first, so that the // of a URL begins no comment.
_NOT_JSON = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|\t', re.DOTALL)


def layout_of(
    config: Config, *, name: str = "the DeepSpeed configuration", planned: LayoutName = "zero2"
) -> LayoutName:
    """The layout that a translated configuration asks for; where its stage is "auto" or absent, that of `planned`.
    Raises ConfigError where it shards nothing (stage 0), or offloads weights that it does not shard."""
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


def with_batch(
    train: TrainConfig, config: Config, *, ranks: int, name: str = "the DeepSpeed configuration"
) -> tuple[TrainConfig, tuple[str, ...]]:
    """The run's settings with the batch of a translated configuration where the run YAML leaves it open (micro-batch
    and accumulation "auto", the effective batch not set), and a line for each value taken from it. Raises ConfigError
    where numbers of the two contradict each other, or do not multiply over the data-parallel `ranks`; all of them at
    once."""
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
        if not (is_single_rank_batch(train) and given_batch.keys() == {"train_batch_size"}):
            by_default = f"train.effective_batch_size={train.effective_batch_size} (its default)"
            said = {"effective_batch_size": by_default, **sources}
            problem = batch_product_problem(train.model_copy(update=taken), ranks=ranks, option_texts=said)
            problems += [problem] if problem else []
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return train.model_copy(update=taken), tuple(lines)


# Dtypes that the run YAML alone sets: `distributed.mixed_precision`.
DTYPE_KEYS = {"communication_data_type": "reduce", "data_types.buffer_dtype": "buffer"}
SHORT_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


# --- in current keys --------------------------------------------------------------------------------------------------


Config = dict[str, Any]

# Stands for a value that follows from the run. transformers' word, and ours: DeepSpeed knows it in few places
# (`AUTO_IS_A_VALUE`).
AUTO = "auto"

_TABLE: dict[str, Any] = json.loads(resources.files(__package__).joinpath("keys.json").read_text(encoding="utf-8"))


def _keys_of(section: dict[str, str]) -> frozenset[str]:
    """A section's keys. Some of ZeRO's may be written with the prefix `stage3_` (pydantic's `populate_by_name`)."""
    both = section.get("with_and_without_stage3_", "").split()
    return frozenset([*section["keys"].split(), *both, *(f"stage3_{key}" for key in both)])


# The keys of each section by its dotted path ("" is the top level). Sections that are not here are open: what they may
# contain depends on their values. `sequence_parallel_size` and `inference` are read by transformers and by DeepSpeed's
# ZeRO-3 loading.
KNOWN: dict[str, frozenset[str]] = {path: _keys_of(section) for path, section in _TABLE["sections"].items()}

# Paths where DeepSpeed itself understands "auto".
AUTO_IS_A_VALUE: tuple[str, ...] = tuple(_TABLE["auto_is_a_value"])

_COMMENT = re.compile(r"_.*|//.*|#.*|comments?", re.IGNORECASE)


def translate(raw: Config, *, name: str = "the DeepSpeed configuration") -> tuple[Config, tuple[str, ...]]:
    """The configuration in DeepSpeed's current keys, and notes on what was translated or left out. Raises ConfigError
    where a key is unknown (the nearest known one is named), was removed while it is switched on, or holds a value of
    the wrong kind. All of them at once."""
    config = copy.deepcopy(raw)
    notes: list[str] = []
    for path, section in sections_of(config):
        for key in [key for key in section if _COMMENT.fullmatch(str(key))]:
            del section[key]
            notes.append(f"{_join(path, key)} is read as a comment")
    problems = [*_rename(config, notes), *_drop_removed(config, notes), *_unknown(config)]
    if not problems:  # a value under a wrong key would be reported twice
        problems = _wrong_values(config)
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return config, tuple(notes)


def _rename(config: Config, notes: list[str]) -> Iterator[str]:
    for old, new in _TABLE["renamed"].items():
        holder, key = holder_of(config, old)
        if holder is None or key not in holder:
            continue
        value = meaning = holder.pop(key)
        if "cpu_offload" in old:
            meaning = {"device": "cpu"} if value is True else None if value is False else value
        present = value_at(config, new)
        if meaning is None or present == meaning:
            notes.append(f"{old}: {show(value)} is an old key that says nothing more; left out")
        elif present is None:
            put_at(config, new, meaning)
            notes.append(f"{old}: {show(value)} is an old key; read as {new}: {show(meaning)}")
        else:
            yield f"{old}: {show(value)} (an old key) and {new}: {show(present)} disagree; keep {new} only"


def _drop_removed(config: Config, notes: list[str]) -> Iterator[str]:
    for path, reason in _TABLE["removed"].items():
        holder, key = holder_of(config, path)
        if holder is None or key not in holder:
            continue
        value = holder.pop(key)
        switched = value.get("enabled", bool(value)) if isinstance(value, dict) else value
        if switched in (False, None, -1):  # -1 is how sizes such as mics_shard_size were switched off
            notes.append(f"{path}, which newer versions of DeepSpeed refuse, is switched off and left out")
        else:
            yield f"{path} was removed from DeepSpeed: {reason}; remove the key"


def _unknown(config: Config) -> Iterator[str]:
    for path, section in sections_of(config):
        for key in section if path in KNOWN else ():
            if key not in KNOWN[path]:
                yield f"{_join(path, key)} is not a DeepSpeed key; {_nearest(path, str(key))}"


def _nearest(path: str, key: str) -> str:
    homes = sorted((one for one, names in KNOWN.items() if key in names), key=lambda section: section.count("."))
    if homes:
        return f"it belongs at {' or '.join(_join(home, key) for home in homes[:3])}"
    return f"the nearest is {_join(path, nearest(key, KNOWN[path], alike=0.0) or '')}"


# --- values, checked before ranks start: DeepSpeed itself raises late, on every rank ----------------------------------


def _whole(value: Any, *, least: int = 0) -> bool:
    """Also for `5e8`, which JSON and YAML read as a float: that is how bucket sizes are written in most guides."""
    return _number(value) and value == int(value) and bool(value >= least)


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


_BATCH = re.compile(r"train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps")
# Of a path the test of its values, and what it accepts; DeepSpeed itself checks the others.
_CHECKS: tuple[tuple[re.Pattern[str], Callable[[Any], bool], str], ...] = (
    (_BATCH, lambda value: isinstance(value, int) and _whole(value, least=1), 'a whole number from 1, or "auto"'),
    (re.compile("gradient_clipping"), _number, 'a number from 0 (0: no clipping), or "auto"'),
    (re.compile(r"zero_optimization\.stage"), lambda value: _whole(value) and value <= 3, '0, 1, 2, 3 or "auto"'),
    (
        re.compile(r"zero_optimization\.offload_(optimizer|param)\.device"),
        lambda value: value in ("none", "cpu", "nvme"),
        '"none", "cpu" or "nvme"',
    ),
    (
        re.compile(r"(.*\.)?(enabled|pin_memory|overlap_comm|contiguous_gradients|reduce_scatter)"),
        lambda value: isinstance(value, bool),
        'true, false or "auto"',
    ),
    (
        re.compile(r"zero_optimization\.\w*_(size|threshold|parameters|distance)"),
        _whole,
        'a whole number without quotes, or "auto"',
    ),
)


def _wrong_values(config: Config) -> list[str]:
    problems = []
    for path, value in leaves_of(config):
        if value is not None and (path in KNOWN or path in ("optimizer.params", "scheduler.params")):
            inside = f" with {', '.join(sorted(KNOWN[path]))}" if path in KNOWN else ""
            problems.append(f"{path}: {show(value)} is not a section; expected {{…}}{inside}")
            continue
        check = next((check for check in _CHECKS if check[0].fullmatch(path)), None)
        if check is not None and value not in (AUTO, None) and not check[1](value):
            problems.append(f"{path}: {show(value)} is not valid; expected {check[2]}")
    # These change which ranks hold what: the run would not be the planned one.
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"):
        if _number(size := value_at(config, path)) and size > 1:
            what = "splits rows or layers over ranks; only ZeRO's data-parallel layouts are supported"
            problems.append(f"{path}: {size} {what}")
    for path, field in DTYPE_KEYS.items():
        if value_at(config, path) not in (None, AUTO):
            problems.append(f'{path} is distributed.mixed_precision.{field} of the run YAML; set it there, "auto" here')
    for path in ("expert_parallel", "autotuning", "data_efficiency"):
        if value_at(config, f"{path}.enabled") is True:
            problems.append(f"{path}.enabled: true is not supported: the plan does not model it; remove the section")
    return problems


# --- dotted paths -----------------------------------------------------------------------------------------------------


def _join(path: str, key: object) -> str:
    return one_line(f"{path}.{key}" if path else str(key))


def sections_of(config: Config, path: str = "") -> Iterator[tuple[str, Config]]:
    """Every mapping with its dotted path, the outer ones first."""
    yield path, config
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from sections_of(value, f"{path}.{key}" if path else str(key))


def leaves_of(config: Config) -> Iterator[tuple[str, Any]]:
    """Every value that is not a mapping, with its dotted path."""
    for path, section in sections_of(config):
        for key, value in list(section.items()):
            if not isinstance(value, dict):
                yield f"{path}.{key}" if path else str(key), value


def holder_of(config: Config, path: str) -> tuple[Config | None, str]:
    """The mapping that would hold the last key of a path, None where it does not exist, and that key."""
    *outer, key = path.split(".")
    holder: Any = config
    for part in outer:
        holder = holder.get(part) if isinstance(holder, dict) else None
    return (holder if isinstance(holder, dict) else None), key


def value_at(config: Config, path: str) -> Any:
    """The value at a path; None where there is none."""
    holder, key = holder_of(config, path)
    return None if holder is None else holder.get(key)


def put_at(config: Config, path: str, value: Any) -> None:
    """Set the value at a path; sections that are missing are added."""
    *outer, key = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[key] = value
