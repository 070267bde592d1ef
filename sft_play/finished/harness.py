"""lm-evaluation-harness, where it is installed: its tasks for base and trained model."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model

from sft_play.errors import ConfigError
from sft_play.finished.load import compute_dtype
from sft_play.finished.run import FinishedRun
from sft_play.log import one_line

_INSTALL_TASKS = "pip install 'sft-play[tasks]'"


@dataclass(frozen=True)
class TaskComparison:
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

    def format_line(self, *, base_label: str) -> str:
        """In words; `base_label` names the model that was trained on."""
        values = f"{self.base:.4f} {base_label}, {self.tuned:.4f} tuned, {self.tuned - self.base:+.4f}"
        stderr_note = "" if self.stderr is None else f" (standard error {self.stderr:.4f})"
        return f"{self.task} {self.metric}: {values}{stderr_note}"


def find_tasks(tasks: Sequence[str]) -> list[str]:
    """The harness's names of the tasks of TASKS=: its names, patterns of them (`mmlu_*`), and YAML files. Raises
    ConfigError where the harness is not installed, or does not know one."""
    if not tasks:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"TASKS={one_line(','.join(tasks))} needs lm-evaluation-harness: {_INSTALL_TASKS}")
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    matches = {name: [name] if Path(name).is_file() else list(manager.match_tasks([name])) for name in tasks}
    unknown = [name for name, names in matches.items() if not names]
    if unknown:
        task_names = one_line(",".join(unknown))
        raise ConfigError(f"TASKS={task_names}: lm-evaluation-harness has no such task; lm-eval ls tasks lists them")
    return [name for names in matches.values() for name in names]


def run_tasks(
    run: FinishedRun, model: Any, tokenizer: Any, task_names: Sequence[str], *, limit: int | None
) -> dict[str, Any]:
    """Run the tasks on a model; returns what the harness's `simple_evaluate` does. Runs on chats use their
    chat template. Raises ConfigError where the harness fails, for example because a task's data cannot be fetched."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    compute = compute_dtype(run)
    is_mixed = compute in (torch.bfloat16, torch.float16)
    # it wants transformers' class: the base model, in whose layers the adapter sits
    base_model = model.get_base_model() if is_peft_model(model) else model
    # it ties weights, and transformers would tie embeddings again that training made different, or fail at PEFT's
    # wrapper of them
    base_model.tie_weights = lambda *_, **__: None
    try:
        harness = HFLM(
            pretrained=base_model,
            tokenizer=tokenizer,
            batch_size="auto" if base_model.device.type == "cuda" else run.plan().eval_batch,
            mixed_precision_dtype=str(compute).removeprefix("torch.") if is_mixed else None,
        )
        results = simple_evaluate(
            model=harness,
            tasks=list(task_names),
            limit=limit,
            apply_chat_template=run.config.task_mode != "cpt",  # a run on plain text learnt no turns
            log_samples=False,
        )
    except Exception as error:  # of the harness, the hub, and what tasks run
        reason = f"{type(error).__name__}: {one_line(str(error), limit=300)}"
        raise ConfigError(f"TASKS={one_line(','.join(task_names))}: lm-evaluation-harness failed: {reason}") from error
    finally:
        del base_model.tie_weights
    return dict(results or {})


def compare_tasks(base: dict[str, Any], tuned: dict[str, Any]) -> tuple[TaskComparison, ...]:
    """Compare the metrics that both results of the harness have, by task; empty results have none."""
    comparisons = []
    for task, values in tuned.get("results", {}).items():
        # others are names, and "N/A" where a standard error is not known
        numbers = {metric: float(value) for metric, value in values.items() if isinstance(value, (int, float))}
        base_numbers = base["results"].get(task, {})
        for metric, value in numbers.items():
            name, _, filter_name = metric.partition(",")
            if filter_name and not name.endswith("_stderr") and isinstance(base_numbers.get(metric), (int, float)):
                stderr = numbers.get(f"{name}_stderr,{filter_name}")
                comparisons.append(TaskComparison(task, metric, float(base_numbers[metric]), value, stderr))
    return tuple(comparisons)
