"""What a DeepSpeed file decides where the run YAML leaves it open: the batch, and dtypes of communication."""

from __future__ import annotations

from sft_play.config.schema import DTYPES, MixedPrecisionConfig, TrainConfig
from sft_play.errors import ConfigError
from sft_play.launch.deepspeed.keys import AUTO, Config, shown_value, value_at
from sft_play.planner.batching import is_of_one_rank, product_problem

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
            problems.append(f"{key}: {shown_value(theirs)} is not valid; expected {', '.join(DTYPES)}")
        elif given not in (AUTO, ours):
            problems.append(f"{key}: {theirs} contradicts {path}={given}; keep one of them")
        elif given == AUTO:
            taken[field] = ours
            lines.append(f"{key}: {theirs} is the run's {path}, which the run YAML leaves open")
    if problems:
        raise ConfigError("\n".join(f"{name}: {problem}" for problem in problems))
    return mixed.model_copy(update=taken), tuple(lines)
