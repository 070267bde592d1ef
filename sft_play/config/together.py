"""Keys of another tool's file that speak of one option, worked out together: `load_in_4bit: true` and `adapter: lora`
are one QLoRA, not two answers of which the last one counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sft_play.config.other_tools import Meaning, spelled
from sft_play.config.yaml_io import Path_, Plain, show


@dataclass(frozen=True)
class Foreign:
    """A key that our sections do not have: `section` is ours that holds it or corresponds to the one that does,
    `meaning` what the table of other tools answers, `home` the only place of our key of that name, which takes the
    value; None where there is none."""

    path: Path_
    value: Plain
    section: str | None
    meaning: Meaning | None
    home: str | None = None

    @property
    def name(self) -> str:
        """The key alone."""
        return str(self.path[-1]).lower()

    @property
    def settings(self) -> dict[str, Plain]:
        """The options that it asks for, by their paths."""
        if self.meaning is not None:
            return dict(self.meaning.settings)
        return {} if self.home is None else {self.home: self.value}


_OFF = ("false", "null", "0", "none", "no", "")
_MODES = ("full", "qlora", "lora")
"""Of modes that keys ask for, the first: 4 bits and an adapter are QLoRA, and weights that are trained have 16 bits."""
_STRONGER = {
    "eval.steps": ("eval_strategy", "evaluation_strategy"),
    "train.save_steps": ("save_strategy",),
}
"""Keys that decide, whatever others say: by `save_strategy: epoch` the Trainer does not read save_steps."""
_FIRST = ("warmup_steps", "num_warmup_steps", "eval_steps", "eval_every")
"""Numbers of steps, which count before shares of them, and before a switch that asks for any."""


def together(keys: Sequence[Foreign]) -> list[Foreign]:
    """The keys with the answers that hold for all of them: one value for each option, and which key decides it."""
    decided = list(keys)
    for option in dict.fromkeys(path for key in keys for path in key.settings):
        asking = [key for key in keys if option in key.settings]
        first = min(asking, key=lambda key: _rank(option, key))
        value = first.settings[option]
        for at, key in enumerate(decided):
            if option in key.settings and spelled(key.settings[option]) != spelled(value):
                words = f"together with {first.name}: {show(first.value)}"
                meaning = Meaning(tuple({**key.settings, option: value}.items()), words)
                decided[at] = dataclasses.replace(key, meaning=meaning)
    return decided


def _rank(option: str, key: Foreign) -> tuple[bool, bool, int, bool]:
    """What counts first of several keys: a strategy, what is switched on, the mode that includes the other."""
    value = key.settings[option]
    mode = _MODES.index(str(value)) if option == "tuning.mode" and value in _MODES else 0
    return key.name not in _STRONGER.get(option, ()), spelled(key.value) in _OFF, mode, key.name not in _FIRST
