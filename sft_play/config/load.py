"""A run YAML and its overrides → `RunConfig`, or every problem at once.

Overrides apply to the plain data before validation, so they go through the same reader as the file.
A stage of a `curriculum` is a complete run YAML, the run's with the stage's keys in place of the
run's, and is validated like any other: its errors look the same, with the stage's line numbers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from sft_play.config.options import all_options, option_accepts, sections
from sft_play.config.schema import RunConfig, Section
from sft_play.config.validation import validate
from sft_play.config.yaml_io import (
    OVERRIDE_LOCATION,
    JsonValue,
    KeyPath,
    Problem,
    YamlDocument,
    dotted_path,
    find_value,
    format_value,
    parse_yaml,
    parse_yaml_value,
    read_text,
)
from sft_play.errors import ConfigError
from sft_play.log import one_line


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config, with the text and the `key=value` overrides it came from."""

    config: RunConfig
    path: Path
    text: str
    overrides: tuple[str, ...]
    # The stages of its curriculum; empty without one.
    stages: tuple[Stage, ...] = ()
    # The name of the stage where this is one stage's run; None for a whole run.
    stage_name: str | None = None

    @property
    def longest_config(self) -> RunConfig:
        """The config of the stage with the longest rows, or of the run if it has no stages."""
        return max(self.runs, key=lambda run: run.config.model.max_seq_len).config

    @property
    def runs(self) -> list[LoadedConfig]:
        """The runs that are trained, in order: one for each stage, or the run itself."""
        return [self.for_stage(stage) for stage in self.stages] or [self]

    def for_stage(self, stage: Stage) -> LoadedConfig:
        """The run of a single stage."""
        return replace(self, config=stage.config, stages=(), stage_name=stage.name)


def load_config(
    path: Path | str,
    *,
    overrides: Sequence[str] = (),
    with_adapter: bool = True,
    text: str | None = None,
) -> LoadedConfig:
    """Read the run that a YAML file and `key=value` overrides describe. `with_adapter`: False
    leaves out the settings of `model.adapter`, whose folder may be gone. `text`: stands for the
    file's, and `path` is its name in errors. Raises ConfigError with every problem and what to
    do."""
    path = Path(path)
    text = read_text(path) if text is None else text
    config, stages = _parse_config(
        text, name=str(path), overrides=overrides, with_adapter=with_adapter
    )
    return LoadedConfig(
        config=config, path=path, text=text, overrides=tuple(overrides), stages=stages
    )


def config_from_text(text: str, *, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run that a YAML text and overrides describe. `model.adapter` is not looked for.
    Raises ConfigError as `load_config` does."""
    return _parse_config(text, name=name, overrides=overrides, with_adapter=False)[0]


def _parse_config(
    text: str, *, name: str, overrides: Sequence[str], with_adapter: bool
) -> tuple[RunConfig, tuple[Stage, ...]]:
    document = parse_yaml(text, name=name)
    problems = [*document.problems, *apply_overrides(document, overrides)]
    if with_adapter:
        problems += _apply_adapter(document)
    config, further_problems = validate(document)
    problems += further_problems
    stages: tuple[Stage, ...] = ()
    if config is not None and config.curriculum and not problems:
        stages, problems = _build_stages(document)
    if problems or config is None:
        # in the order of the file, overrides last; a problem of the run is found in each of its
        # stages, and shown once
        lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=_problem_line)))
        if len(lines) > 1:
            lines = [f"{len(lines)} problems:", *(f"  {line}" for line in lines)]
        raise ConfigError("\n".join(lines))
    return config, stages


def _build_stages(document: YamlDocument) -> tuple[tuple[Stage, ...], list[Problem]]:
    stage_data = cast("list[dict[str, JsonValue]]", document.data["curriculum"])  # validated
    overlays = [_build_overlay(document, index, stage) for index, stage in enumerate(stage_data)]
    problems = [problem for overlay in overlays for problem in overlay.problems]
    # overrides of the run's keys that every stage sets for itself: they would change nothing
    for path in sorted(document.overridden_paths, key=str):
        if overlays and all(path in overlay.stage_paths for overlay in overlays):
            stage_key = ".".join(map(str, overlays[0].stage_paths[path]))
            problems.append(
                Problem(
                    dotted_path(path),
                    OVERRIDE_LOCATION,
                    f"every stage of the curriculum sets its own; set it there: {stage_key}=…",
                )
            )
    names = [str(stage["name"]) for stage in stage_data]
    counts = Counter(map(str.lower, names))
    stages: list[Stage] = []
    for index, (name, overlay) in enumerate(zip(names, overlays, strict=True)):
        config, stage_problems = validate(overlay)
        problems += stage_problems
        if (count := counts[name.lower()]) > 1:
            problems.append(
                document.problem(
                    ("curriculum", index, "name"), f"{name} is the name of {count} stages"
                )
            )
        if config is not None:
            stages.append(Stage(name, index + 1, config))
    return tuple(stages), problems


def _problem_line(problem: Problem) -> int:
    line_number = problem.location.rpartition(":")[2]
    return int(line_number) if line_number.isdigit() else 1_000_000


def split_overrides(text: str) -> list[str]:
    """Split `SET` as a shell splits words, without running anything; raises ConfigError where a
    quote is not closed. A word with an open bracket is joined with the next ones: quotes of a list
    (`[[4, 1], [fsdp, tp]]`) were eaten.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{OVERRIDE_LOCATION}={format_value(text)}: {str(error).lower()}; close the quote"
        ) from None
    overrides: list[str] = []
    value = ""  # of the word before
    for word in words:
        is_open = sum(map(value.count, "[{")) > sum(map(value.count, "]}"))
        if value.startswith(("[", "{")) and is_open:
            overrides[-1] += f" {word}"
        else:
            overrides.append(word)
        value = overrides[-1].partition("=")[2]
    return overrides


def apply_overrides(document: YamlDocument, overrides: Sequence[str]) -> list[Problem]:
    """Put each `a.b=value` into the document's data; returns a problem for each that cannot be."""
    problems = []
    spaced = " ".join(word.rstrip(",") for word in overrides)
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        next_setting = re.search(r",\s*([a-z_.]+)=", text)
        message = None
        if not equals or not key:
            key, message = "", f"{format_value(override)} is not key=value, such as train.epochs=1"
        elif next_setting and next_setting[1] in all_options():
            separated = (
                f"{key}={text[: next_setting.start()]} {text[next_setting.start() + 1 :].strip()}"
            )
            message = f"settings stand apart by spaces, not commas: SET='{separated}'"
        elif text.endswith(",") and key in all_options() and not option_accepts(key, text):
            message = f"settings stand apart by spaces, not commas: SET='{spaced}'"
        else:
            try:
                value = parse_yaml_value(text, name=f"{OVERRIDE_LOCATION} {key}")
                message = _set_value(document, tuple(key.split(".")), value, text)
            except ConfigError as error:
                problems.append(
                    Problem("", "", f"{error}; put the value in quotes to mean it as text")
                )
        if message is not None:
            problems.append(Problem(key, OVERRIDE_LOCATION, message))
    return problems


def _set_value(
    document: YamlDocument, key_parts: tuple[str, ...], value: JsonValue, text: str
) -> str | None:
    """Put `train.epochs=1`, or `curriculum.0.train.epochs=1`, a key of a stage (counted from 0);
    returns what is wrong with the key."""
    path: KeyPath = key_parts
    if len(key_parts) > 2 and key_parts[0] == "curriculum" and key_parts[1].isdigit():
        path = (key_parts[0], int(key_parts[1]), *key_parts[2:])
        stages = document.data.get("curriculum")
        if not isinstance(stages, list):
            stages = []
        if int(key_parts[1]) >= len(stages):
            return (
                f"there are {len(stages)} stages, counted from 0: curriculum.0.train.epochs=1 sets"
                " a key of the first"
            )
    section = document.ensure_section(path[:-1])
    if section is None:
        parent = next(
            path[:end] for end in range(1, len(path)) if document.ensure_section(path[:end]) is None
        )
        return (
            f"{'.'.join(map(str, parent))} is {format_value(find_value(document.data, parent))},"
            " not a section"
        )
    section[key_parts[-1]] = value
    document.forget(path)
    document.raw_texts[path] = text
    document.overridden_paths.add(path)
    return None


def resolved_config(config: RunConfig, *, effective_batch: int | None = None) -> dict[str, Any]:
    """Return the config as plain data, defaults included: what `resolved.json` holds.
    `effective_batch`: the plan's, taken where the config derives it from the ranks, so that a
    resumed run trains the same over any number of them, or is refused.
    """
    data = config.model_dump(mode="json")
    if config.train.derives_effective_batch:
        data["train"]["effective_batch_size"] = effective_batch
    # read again, derived defaults would count as given for stages that have files of their own
    if config.curriculum:
        data["data"] = {
            key: value
            for key, value in data["data"].items()
            if not is_derived_default(config, f"data.{key}")
        }
    return data


def is_derived_default(config: RunConfig, path: str) -> bool:
    """True for a key that was not given and whose default follows from other keys of its
    section."""
    section, _, key = path.partition(".")
    section_config = getattr(config, section, None)
    if not isinstance(section_config, Section) or key in section_config.model_fields_set:
        return False
    field = type(section_config).model_fields.get(key)
    return field is not None and bool(field.default_factory_takes_validated_data)


def resolved_config_without_paths(config: RunConfig) -> dict[str, Any]:
    """The config as plain data without paths: nodes may keep the same files in different
    folders."""
    data_paths: dict[str, Any] = {
        **dict.fromkeys(("train_path", "val_path", "test_path", "text_path"), True),
        "sources": {"__all__": {"path", "val_path"}},
    }
    return config.model_dump(
        mode="json",
        exclude={
            "output": True,
            "model": {"name", "adapter"},
            "data": data_paths,
            "curriculum": {"__all__": {"data": data_paths}},
        },
    )


def differing_options(
    first: dict[str, Any], second: dict[str, Any], *, prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Options that differ between two resolved configs: {path: (first's value, second's value)}."""
    differing: dict[str, tuple[Any, Any]] = {}
    for key in [*first, *(key for key in second if key not in first)]:
        first_value, second_value = first.get(key), second.get(key)
        path = f"{prefix}{key}"
        if isinstance(first_value, dict) and isinstance(second_value, dict) and path in sections():
            differing |= differing_options(first_value, second_value, prefix=f"{path}.")
        elif first_value != second_value:
            differing[path] = (first_value, second_value)
    return differing


# --- stages ---------------------------------------------------------------------------------------


# Keys that a stage may give without naming their section.
STAGE_SHORTCUTS: dict[str, KeyPath] = {
    "epochs": ("train", "epochs"),
    "max_steps": ("train", "max_steps"),
    "learning_rate": ("train", "learning_rate"),
    "max_seq_len": ("model", "max_seq_len"),
    "trainable": ("tuning", "trainable"),
    "task_mode": ("task_mode",),
}
# Sections that a stage may override in part.
STAGE_SECTIONS = ("model", "tuning", "data", "train", "eval")
# Keys of `data` and `train` that apply to the job as a whole, as all of `model` and `tuning` do but
# for `STAGE_SHORTCUTS`.
_JOB_WIDE_OPTIONS = frozenset({
    "data.chat_template", "data.workers", "data.process", "data.style", "data.documents",
    "train.bf16", "train.fp16", "train.report_to", "train.stop_after_steps", "train.max_hours",
    "train.profile_steps", "train.dataloader_num_workers", "train.dataloader_pin_memory",
})  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its name, its number from 1, and its complete settings."""

    name: str
    number: int
    config: RunConfig


def _build_overlay(document: YamlDocument, index: int, stage: dict[str, JsonValue]) -> YamlDocument:
    """Copy the run's document with the settings of a stage in place of its own. The copy's
    problems are about the stage's keys alone."""
    data = copy.deepcopy(
        {key: value for key, value in document.data.items() if key != "curriculum"}
    )
    overlay = YamlDocument(
        document.name, data, dict(document.lines), {}, [], set(document.overridden_paths)
    )
    for path, file_path, value in _stage_settings(stage, ("curriculum", index)):
        if path in overlay.stage_paths:
            overlay.problems.append(
                document.problem(
                    file_path,
                    f"set twice: here and as {dotted_path(overlay.stage_paths[path])};"
                    " remove one of them",
                )
            )
        elif _is_job_wide(path):
            overlay.problems.append(
                document.problem(
                    file_path, f"applies to all stages; set {dotted_path(path)} of the run"
                )
            )
        else:
            section = overlay.ensure_section(path[:-1])
            assert section is not None, "validated"
            section[str(path[-1])] = copy.deepcopy(value)
            overlay.forget(path)
            overlay.stage_paths[path] = file_path
            # an override of a stage's key has no line: the stage's stands for it
            overlay.lines[path] = document.lines.get(
                file_path, document.lines.get(file_path[:2], 1)
            )
    for set_path, (section_name, replaced_key) in _REPLACED_OPTIONS.items():
        section = overlay.ensure_section((section_name,))
        if (
            set_path in overlay.stage_paths
            and (section_name, replaced_key) not in overlay.stage_paths
            and section
        ):
            section.pop(replaced_key, None)
    return overlay


# Settings that a stage gives in another form than the run: files for sources, epochs for steps.
_REPLACED_OPTIONS = {
    ("data", "sources"): ("data", "train_path"),
    ("data", "train_path"): ("data", "sources"),
    ("train", "epochs"): ("train", "max_steps"),
}


def _stage_settings(
    stage: dict[str, JsonValue], prefix: KeyPath
) -> Iterator[tuple[KeyPath, KeyPath, JsonValue]]:
    """Yield each setting of a stage: its path in a run YAML, its path in the file, its value. An
    empty section sets nothing."""
    for key, value in stage.items():
        if key in STAGE_SHORTCUTS and value is not None:
            yield STAGE_SHORTCUTS[key], (*prefix, key), value
        elif key in STAGE_SECTIONS and isinstance(value, dict):
            for inner_key, inner_value in value.items():
                yield (key, inner_key), (*prefix, key, inner_key), inner_value


def _is_job_wide(path: KeyPath) -> bool:
    key = dotted_path(path)
    if path in STAGE_SHORTCUTS.values() or path[0] not in ("model", "tuning"):
        return key in _JOB_WIDE_OPTIONS
    return any(name == key or name.startswith(f"{key}.") for name in all_options())


# --- model.adapter --------------------------------------------------------------------------------
# An adapter's weights mean something only with the rank, the scale and the modules that they were
# trained with. So these are read from its `adapter_config.json`; a run YAML may repeat them, and is
# refused where it contradicts them.

ADAPTER_KEY = "model.adapter"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# The name that means the run that finished last.
LAST_RUN = "last"
# As in runs/folder.py, which is in a layer above.
_MANIFEST_FILE, _MANIFEST_FORMAT = "manifest.json", "sft_play run "
# Ways to start an adapter that change the base's weights too, which its files do not hold.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of PEFT that change what an adapter computes or which tensors it has, and that are not
# trained here.
_UNSUPPORTED_SETTINGS = (
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "bias",
)


def _apply_adapter(document: YamlDocument) -> list[Problem]:
    """Put the settings of `model.adapter` into a document: `last`, a run in the output folder, a
    run's or an adapter's folder. Returns a problem where nothing of that name is found or it is
    none that is trained here, and for each setting that contradicts it."""
    name = find_value(document.data, ("model", "adapter"))
    if not isinstance(name, str) or not name:
        return []
    output_dir = find_value(document.data, ("output", "dir"))
    if not isinstance(output_dir, str):
        output_dir = all_options()["output.dir"].default
    try:
        folder = _find_adapter_folder(name, Path(output_dir).expanduser())
        owner_run = find_adapter_run(folder) or (folder, {})
        # of the run that trained it, if it is one of ours
        run_settings = _read_mapping(owner_run[0] / "resolved.json")
        added_tokens = (run_settings.get("model") or {}).get("add_tokens") or []
        settings = _lora_settings(folder, has_added_tokens=bool(added_tokens))
    except ConfigError as error:
        return [document.problem(("model", "adapter"), str(error))]
    sections = [
        document.ensure_section(path) for path in (("model",), ("tuning",), ("tuning", "lora"))
    ]
    if None in sections:
        return []  # reported as a section that holds a value
    model, tuning, lora = cast("list[dict[str, JsonValue]]", sections)
    adapter_name = f"the adapter {one_line(str(folder.absolute()))}"
    problems: list[Problem] = []
    lora.setdefault("dropout", settings.pop("dropout"))  # changes nothing of what is stored
    # what a run YAML may repeat, and not contradict
    stored: list[tuple[dict[str, JsonValue], KeyPath, JsonValue]] = [
        (lora, ("tuning", "lora", option), value) for option, value in settings.items()
    ]
    if added_tokens:
        stored.append((model, ("model", "add_tokens"), added_tokens))
    for section, path, value in stored:
        key = str(path[-1])
        if _is_same_value(key, section.get(key, value), value):
            section[key] = value
        else:
            problems.append(
                document.problem(
                    path,
                    f"{format_value(section[key])}, and {adapter_name} has {format_value(value)};"
                    " leave it out: the adapter's is taken",
                )
            )
    if tuning.get("mode") == "full":
        problems.append(
            document.problem(
                ("tuning", "mode"),
                f"full trains all weights, and {ADAPTER_KEY} continues an adapter: use lora or"
                " qlora, or merge the adapter (make merge) and name the merged model in model.name",
            )
        )
    run_tuning = run_settings.get("tuning") or {}
    if run_tuning.get("mode") is not None:
        tuning.setdefault("mode", run_tuning["mode"])
    if (run_tuning.get("lora") or {}).get("init") == "loftq" and tuning.get("mode") == "lora":
        problems.append(
            document.problem(
                ("tuning", "mode"),
                f"lora, and {adapter_name} was started at what NF4 lost (tuning.lora.init=loftq);"
                " use qlora, or merge it (make merge)",
            )
        )
    model["adapter"] = str(folder.absolute())
    return problems


def _is_same_value(name: str, value: JsonValue, adapter_value: JsonValue) -> bool:
    if name in ("target_modules", "target_parameters") and value == "auto":
        return True
    if isinstance(value, list) and isinstance(adapter_value, list):
        return sorted(map(str, value)) == sorted(map(str, adapter_value))
    return value == adapter_value


def _find_adapter_folder(name: str, output_dir: Path) -> Path:
    if name == LAST_RUN:
        manifests = {path: _read_manifest(path) or {} for path in output_dir.glob("[!.]*")}
        finished = [
            (str(run_manifest.get("ended")), str(run_path.absolute()))
            for run_path, run_manifest in manifests.items()
            if run_manifest.get("status") == "finished" and ".replaced-" not in run_path.name
        ]
        if not finished:
            raise ConfigError(
                f"there is no finished run in {output_dir}; name another run, or train one first"
            )
        _, name = max(finished)
    try:
        path = Path(name).expanduser()
        candidates = [output_dir / name, path] if path.name == name else [path]
        folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{one_line(name)} cannot be a folder: {one_line(str(error))}") from None
    if folder is None:
        searched = " and ".join(one_line(str(candidate)) for candidate in candidates)
        raise ConfigError(
            f"there is no run or adapter {one_line(name)}: looked for {searched} (from"
            f" {Path.cwd()}); name a run of {output_dir}, a run's folder, {LAST_RUN}, or a folder"
            f" with {ADAPTER_CONFIG_FILE} (one of the hub: hf download)"
        )
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        return folder
    manifest = _read_manifest(folder)
    if manifest is None:
        raise ConfigError(
            f"{folder} is neither a run of this toolkit nor an adapter: it has no"
            f" {ADAPTER_CONFIG_FILE}"
        )
    if manifest.get("status") != "finished":
        raise ConfigError(
            f"the run {folder} is not finished (its manifest says"
            f" {one_line(str(manifest.get('status')))}): make resume RUN={folder.name} trains it to"
            " its end; one of its checkpoints is named by its own path"
        )
    if not (folder / "adapter" / ADAPTER_CONFIG_FILE).is_file():
        problem = f"the run {folder} has no adapter ({folder / 'adapter' / ADAPTER_CONFIG_FILE})"
        if (folder / "model").is_dir():
            problem += f"; it trained all weights: give model.name: {folder / 'model'}"
        raise ConfigError(problem)
    return folder / "adapter"


def _read_mapping(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    manifest = _read_mapping(folder / _MANIFEST_FILE)
    return manifest if str(manifest.get("format")).startswith(_MANIFEST_FORMAT) else None


def find_adapter_run(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Find the run that an adapter's folder (`adapter/`, a checkpoint, a stage's) belongs to, with
    its manifest; None if it belongs to none."""
    for parent in list(folder.absolute().parents)[:4]:
        manifest = _read_manifest(parent)
        if manifest is not None and "stage" not in manifest:
            return parent, manifest
    return None


def _lora_settings(folder: Path, *, has_added_tokens: bool) -> dict[str, JsonValue]:
    """Read the settings of `tuning.lora` from an adapter's config. `has_added_tokens`: True if its
    run names the tokens that it added. Raises ConfigError where it is none that is trained here."""
    written = _read_mapping(folder / ADAPTER_CONFIG_FILE)
    # what is null is what PEFT takes without the key
    config = {
        "lora_dropout": 0.0,
        **{key: value for key, value in written.items() if value is not None},
    }
    if has_added_tokens:
        config.pop("trainable_token_indices", None)
    # some tools write `32.0`
    rank, alpha = (
        int(value) if isinstance(value, float) and value.is_integer() else value
        for value in (config.get("r"), config.get("lora_alpha"))
    )
    names_by_key = {
        key: config.get(key, [])
        for key in ("target_modules", "target_parameters", "modules_to_save")
    }
    _refuse_untrainable_adapter(folder, config, rank, alpha, names_by_key)
    # Modules are named without their layer here. An adapter of some layers only is refused later,
    # by its tensors (training/prepare/base_adapter).
    target_modules, target_parameters = (
        sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names_by_key[key]})
        for key in ("target_modules", "target_parameters")
    )
    return {
        "r": rank,
        "alpha": alpha,
        "dropout": config["lora_dropout"],
        "target_modules": target_modules,
        "target_parameters": target_parameters,
        "modules_to_save": sorted(names_by_key["modules_to_save"]),
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
    }


def _refuse_untrainable_adapter(
    folder: Path,
    config: dict[str, Any],
    rank: JsonValue,
    alpha: JsonValue,
    names_by_key: dict[str, Any],
) -> None:
    """Raise ConfigError where an adapter is of another kind than those that are trained here, or
    its config holds something else than a number or a list of names where one is needed."""
    init_method = str(config.get("init_lora_weights", True)).lower()
    unsupported = [
        one_line(f"{key}={json.dumps(config[key])}", limit=120)
        for key in _UNSUPPORTED_SETTINGS
        if config.get(key, False) not in (False, [], {}, "none", "")
    ]
    no_names = [
        key
        for key, names in names_by_key.items()
        if not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or (key == "target_modules" and not names)
    ]
    no_names_text = ", ".join(f"{key}={json.dumps(config.get(key))}" for key in no_names)
    numbers_text = f"r={json.dumps(rank)} and lora_alpha={json.dumps(alpha)}"
    dropout, peft_type = config["lora_dropout"], str(config.get("peft_type"))
    problems = (
        (
            peft_type.upper() != "LORA",
            f"has peft_type={one_line(peft_type)} in its {ADAPTER_CONFIG_FILE}, and only LORA can"
            " be trained here",
        ),
        (
            # the setting is true, false, or the name of a method
            init_method.startswith(_BASE_CHANGING_INITS),
            f"was started with {one_line(init_method)}, which changes its base too, and the change"
            " is not in its files: convert it to a plain LoRA adapter with PEFT first",
        ),
        (
            unsupported,
            f"has {', '.join(unsupported)}, which this toolkit does not train: merge it into its"
            " base with PEFT, and name the merged model in model.name",
        ),
        (
            no_names,
            f"has {one_line(no_names_text, limit=95)} in its {ADAPTER_CONFIG_FILE}; write the"
            " modules' names as a list",
        ),
        (
            not option_accepts("tuning.lora.r", rank)
            or not option_accepts("tuning.lora.alpha", alpha),
            f"has {one_line(numbers_text)} in its {ADAPTER_CONFIG_FILE},"
            " and whole numbers from 1 are needed",
        ),
        (
            not option_accepts("tuning.lora.dropout", dropout),
            f"has lora_dropout={one_line(json.dumps(dropout))} in its {ADAPTER_CONFIG_FILE}, and"
            f" {all_options()['tuning.lora.dropout'].accepted_values} is needed",
        ),
        (
            not (folder / ADAPTER_WEIGHTS_FILE).is_file(),
            f"holds no {ADAPTER_WEIGHTS_FILE}; pickled weights (.bin) are not read",
        ),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(f"the adapter {one_line(str(folder.absolute()))} {message}")
