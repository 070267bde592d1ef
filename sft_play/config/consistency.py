"""Values of a run YAML that are valid alone but not together."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config.overrides import place
from sft_play.config.schema import RunConfig
from sft_play.config.training_options import training_options
from sft_play.config.yaml_io import Path_, Problem, YamlDocument, dotted


def cross_problems(config: RunConfig, document: YamlDocument) -> list[Problem]:
    """Values that are valid alone but not together; each problem names the keys that disagree."""
    train, problems = config.train, []

    def add(name: str | Path_, message: str) -> None:
        path: Path_ = tuple(name.split(".")) if isinstance(name, str) else name
        problems.append(Problem(dotted(path), place(document, path), message))

    if train.fp16 and train.bf16 is True:
        add("train.fp16", "true, and train.bf16 is true as well; choose one")
    if config.task_mode == "cpt_mixed" and config.data.text_path is None:
        add("task_mode", "cpt_mixed needs data.text_path (plain text) as well as data.train_path (chats)")
    if config.task_mode != "cpt_mixed" and config.data.text_path is not None:
        add("data.text_path", f"is read only with task_mode: cpt_mixed, and task_mode is {config.task_mode}")
    for path, message in _source_problems(config):
        add(path, message)
    if train.load_best_model_at_end and config.eval.steps == 0:
        add("train.load_best_model_at_end", "true, but eval.steps=0 never evaluates; set eval.steps")
    if train.early_stopping_patience is not None and not train.load_best_model_at_end:
        add("train.early_stopping_patience", "needs train.load_best_model_at_end: true")
    if train.metric_for_best_model == "exact_match" and config.eval.generate_rows == 0:
        add("train.metric_for_best_model", "exact_match needs eval.generate_rows above 0")
    for option in training_options():
        value = option.value(config)
        if not option.is_read_by(train.optim) and value != option.default:
            add(option.key, f"{value} is AdamW's, and train.optim is {train.optim}; remove one of them")
    if config.tuning.backend_fallback == config.tuning.backend:
        add("tuning.backend_fallback", f"is the backend itself ({config.tuning.backend}); remove it")
    return problems


def _source_problems(config: RunConfig) -> Iterator[tuple[Path_, str]]:
    """Problems of data.sources as a whole."""
    data, here = config.data, ("data", "sources")
    if not data.sources:
        if data.train_path is None:
            yield ("data", "train_path"), "null, and data.sources is empty; give one of them"
        return
    if data.train_path is not None:
        yield (
            ("data", "train_path"),
            "given together with data.sources; remove it (SET: data.train_path=null), or add it to them",
        )
    if config.task_mode == "cpt_mixed":
        ours = "data.train_path and data.text_path by data.text_fraction"
        yield here, f"task_mode cpt_mixed mixes {ours}; use task_mode sft or cpt with sources"
    without = [source for source in data.sources if source.weight is None]
    if without and len(without) < len(data.sources):
        at = data.sources.index(without[0])
        yield (*here, at), "has no weight, and other sources have one; give every source a weight, or none"
    if data.val_path is not None and any(source.val_path for source in data.sources):
        yield ("data", "val_path"), "given together with a source's val_path; keep one of them"
    first_of: dict[str, int] = {}
    for at, source in enumerate(data.sources):
        same = first_of.setdefault(f"path {source.path.rstrip('/')}", at)
        if same != at:
            yield (*here, at, "path"), f"is data.sources[{same}] already; give one of them the weight of both"
    for at, name in enumerate(data.source_names):
        if name.startswith("rank_"):
            yield (*here, at), f"is named {name}, but loss_{name} is a rank's loss; give it another name"
        same = first_of.setdefault(f"name {name}", at)
        if same != at and data.sources[at].path != data.sources[same].path:
            key = ("name",) if data.sources[at].name else ()
            yield (*here, at, *key), f"is named {name}, as data.sources[{same}] is; give it another name"
