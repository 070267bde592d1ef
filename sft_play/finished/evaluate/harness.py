"""lm-evaluation-harness, where it is installed: its tasks for base and trained model."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from sft_play.errors import ConfigError
from sft_play.finished.evaluate.score import compute_dtype
from sft_play.finished.run import FinishedRun
from sft_play.log import one_line

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'sft-play[tasks]'"


@dataclass(frozen=True)
class TaskFigures:
    """A metric of a task, as the harness reports it (metric and filter, such as `acc,none`), with the standard error of
    the trained model's, where it gives one."""

    task: str
    metric: str
    base: float
    tuned: float
    stderr: float | None

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return asdict(self) | {"difference": self.tuned - self.base}

    def lines(self, *, before: str = "base") -> list[str]:
        """In words; `before` names the model that was trained on."""
        error = "" if self.stderr is None else f" (standard error {self.stderr:.4f})"
        both = f"{self.base:.4f} {before}, {self.tuned:.4f} tuned"
        return [f"{self.task} {self.metric}: {both}, {self.tuned - self.base:+.4f}{error}"]


@dataclass(frozen=True)
class Tasks:
    """Tasks that the harness knows, and its own object that loads them."""

    names: tuple[str, ...]
    manager: Any


def find_tasks(tasks: Sequence[str]) -> Tasks | None:
    """The tasks of TASKS=: the harness's names, patterns of them (`mmlu_*`), and YAML files; None without any. Raises
    ConfigError where the harness is not installed, or does not know one."""
    if not tasks:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"TASKS={one_line(','.join(tasks))} needs lm-evaluation-harness: {_INSTALL}")
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    known = {name: [name] if Path(name).is_file() else list(manager.match_tasks([name])) for name in tasks}
    unknown = [name for name, names in known.items() if not names]
    if unknown:
        named = one_line(",".join(unknown))
        raise ConfigError(f"TASKS={named}: lm-evaluation-harness has no such task; lm-eval ls tasks lists them")
    return Tasks(tuple(name for names in known.values() for name in names), manager)


def run_tasks(run: FinishedRun, model: Any, tokenizer: Any, tasks: Tasks, *, limit: int | None) -> dict[str, Any]:
    """What `simple_evaluate` of the harness returns for this model; prompts go through the run's chat template where it
    trained chats. Raises ConfigError where the harness fails, for example because a task's data cannot be fetched."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    compute = compute_dtype(run)
    is_mixed = compute in (torch.bfloat16, torch.float16)
    # it wants transformers' class: the base model, in whose layers the adapter sits
    whole = model.get_base_model() if is_peft_model(model) else model
    batch = "auto" if whole.device.type == "cuda" else run.plan().eval_batch
    try:
        with _without_tying(whole):
            harness = HFLM(
                pretrained=whole,
                tokenizer=tokenizer,
                batch_size=batch,
                mixed_precision_dtype=str(compute).removeprefix("torch.") if is_mixed else None,
            )
        results = simple_evaluate(
            model=harness,
            tasks=list(tasks.names),
            task_manager=tasks.manager,
            limit=limit,
            apply_chat_template=run.config.task_mode != "cpt",  # a run on plain text learnt no turns
            log_samples=False,
        )
    except Exception as error:  # of the harness, the hub, and what tasks run
        named, why = one_line(",".join(tasks.names)), f"{type(error).__name__}: {one_line(str(error), limit=300)}"
        raise ConfigError(f"TASKS={named}: lm-evaluation-harness failed: {why}") from error
    return dict(results or {})


@contextlib.contextmanager
def _without_tying(model: Any) -> Iterator[None]:
    """While it lasts, `tie_weights` does nothing: the harness calls it, and transformers would tie embeddings again
    that training made different, or fail at PEFT's wrapper of them."""
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


def task_figures(base: dict[str, Any], tuned: dict[str, Any]) -> tuple[TaskFigures, ...]:
    """The numbers that both have, by task and metric."""
    figures = []
    for task, values in tuned.get("results", {}).items():
        for metric, value in values.items():
            before = base.get("results", {}).get(task, {}).get(metric)
            name, _, kind = metric.partition(",")
            if not kind or name.endswith("_stderr") or not (_is_number(value) and _is_number(before)):
                continue
            error = values.get(f"{name}_stderr,{kind}")
            stderr = float(error) if _is_number(error) else None  # "N/A" where it is not known
            figures.append(TaskFigures(task, metric, float(before), float(value), stderr))
    return tuple(figures)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
