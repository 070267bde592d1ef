"""The training options: what each is called by the Trainer, in DeepSpeed's file and in other tools' files.

One table, made of the fields of `schema.py` that are `training(…)`. The Trainer's arguments (TRL's and Unsloth's), what
DeepSpeed's file may not contradict, what peers of `make bench` are told, TensorBoard's table of runs, the hints for
other tools' names and the check for options that an optimizer does not read all come from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sft_play.config import schema
from sft_play.config.schema import ELSEWHERE, Elsewhere, RunConfig


@dataclass(frozen=True)
class TrainingOption:
    """A key of the section `train`, and its other names."""

    name: str
    default: Any
    elsewhere: Elsewhere

    @property
    def key(self) -> str:
        """Its dotted path."""
        return f"train.{self.name}"

    @property
    def other_names(self) -> list[str]:
        """Names for it in other tools' files, the Trainer's and DeepSpeed's among them."""
        in_deepspeed = (self.elsewhere.deepspeed or "").rpartition(".")[2]
        names = [self.elsewhere.trainer, in_deepspeed, *self.elsewhere.tools.split()]
        return [name for name in dict.fromkeys(names) if name not in ("", self.name) and not name.isdigit()]

    def value(self, config: RunConfig) -> Any:
        """Its value in a run; the run's own property of that name says what auto is."""
        given = getattr(config.train, self.name)
        return getattr(config, self.name) if given == "auto" else given

    def is_read_by(self, optimizer: str) -> bool:
        """Whether a value of train.optim reads it."""
        return optimizer in (self.elsewhere.optimizers or (optimizer,))


def training_options() -> tuple[TrainingOption, ...]:
    """The table, in the order of the schema."""
    options = []
    for name, field in schema.TrainConfig.model_fields.items():
        extra: Any = field.json_schema_extra
        if ELSEWHERE in extra:
            options.append(TrainingOption(name, field.default, extra[ELSEWHERE]))
    return tuple(options)
