"""What one process of a comparison is asked to do. Standard library only: a peer's own environment reads it too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ProcessOrder:
    """One process: which side, how many steps, and where things are.

    `config`, `overrides`: our run. `facts`: the folder with `facts.json` and `rows`, which our side writes where it
    names one, and a peer reads. `result`: the JSON file that the process writes. `settings`: of a peer, chosen before.
    """

    side: str
    result: str
    folder: str
    warmup: int
    steps: int
    config: str = ""
    overrides: list[str] = field(default_factory=list)
    facts: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.warmup + self.steps

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> ProcessOrder:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def known(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((Path(self.facts) / "facts.json").read_text(encoding="utf-8"))
        return facts


def trainer_arguments(facts: dict[str, Any], *, steps: int, micro: int) -> dict[str, Any]:
    """Arguments of transformers' Trainer for the facts of our run; `micro`: rows of a micro-batch."""
    return {**facts["trainer"]} | {
        "max_steps": steps, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": facts["effective_batch"] // micro, "logging_steps": facts["logging_steps"],
        "bf16": facts["compute_dtype"] == "bfloat16", "fp16": facts["compute_dtype"] == "float16",
        "use_cpu": facts["on_cpu"], "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
