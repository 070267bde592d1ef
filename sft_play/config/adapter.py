"""`model.adapter`: the adapter that a new run continues, found by name, and the settings that come with it.

An adapter's weights mean something only with the rank, the scale and the modules that they were trained with. So these
are read from its `adapter_config.json`; a run YAML may repeat them, and is refused where it contradicts them.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any, cast

from sft_play.config.options import all_options, option_accepts
from sft_play.config.yaml_io import JsonValue, KeyPath, Problem, YamlDocument, find_value, format_value
from sft_play.errors import ConfigError
from sft_play.log import one_line

ADAPTER_KEY = "model.adapter"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# The name that means the run that finished last.
LAST_RUN = "last"
# As in runs/folder.py, which is in a layer above.
_MANIFEST_FILE, _MANIFEST_FORMAT = "manifest.json", "sft_play run "
# Ways to start an adapter that change the base's weights too, which its files do not hold.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of PEFT that change what an adapter computes or which tensors it has, and that are not trained here.
_UNSUPPORTED_SETTINGS = (
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication"),
    *("trainable_token_indices", "lora_bias", "use_qalora", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    *("velora_config", "monteclora_config", "bias"),
)
_TOKENS_KEY = "trainable_token_indices"


def apply_adapter(document: YamlDocument) -> list[Problem]:
    """Put the settings of `model.adapter` into a document: `last`, a run in the output folder, a run's or an adapter's
    folder. Returns a problem where nothing of that name is found or it is none that is trained here, and for each
    setting that contradicts it."""
    key_path = ("model", "adapter")
    name, output_dir = find_value(document.data, key_path), find_value(document.data, ("output", "dir"))
    if not isinstance(name, str) or not name:
        return []
    if not isinstance(output_dir, str):
        output_dir = all_options()["output.dir"].default
    try:
        folder = _find_adapter_folder(name, Path(output_dir).expanduser())
        owner_run = find_adapter_run(folder) or (folder, {})
        run_settings = _read_mapping(owner_run[0] / "resolved.json")  # of the run that trained it, if it is one of ours
        added_tokens = run_settings.get("model", {}).get("add_tokens") or []
        settings = _lora_settings(folder, has_added_tokens=bool(added_tokens))
    except ConfigError as error:
        return [document.problem(key_path, str(error))]
    sections = [document.ensure_section(path) for path in (("model",), ("tuning",), ("tuning", "lora"))]
    if None in sections:
        return []  # reported as a section that holds a value
    model, tuning, lora = cast("list[dict[str, JsonValue]]", sections)
    adapter_name = f"the adapter {one_line(str(folder.absolute()))}"
    contradictions: list[tuple[KeyPath, str]] = []
    for option, value in settings.items():
        if option == "dropout":  # changes nothing of what is stored
            lora.setdefault(option, value)
        elif _is_same_value(option, lora.get(option, value), value):
            lora[option] = value
        else:
            reason = f"{format_value(lora[option])}, and {adapter_name} has {format_value(value)}"
            contradictions.append((("tuning", "lora", option), f"{reason}; leave it out: the adapter's is taken"))
    if added_tokens and model.setdefault("add_tokens", added_tokens) != added_tokens:
        reason = f"{adapter_name} has rows of {format_value(added_tokens)}"
        contradictions.append((("model", "add_tokens"), f"{reason}; leave it out: the adapter's is taken"))
    if tuning.get("mode") == "full":
        reason = (
            f"full trains all weights, and {ADAPTER_KEY} continues an adapter: use lora or qlora, or merge the adapter "
            "(make merge) and name the merged model in model.name"
        )
        contradictions.append((("tuning", "mode"), reason))
    run_tuning = run_settings.get("tuning") or {}
    if run_tuning.get("mode") is not None:
        tuning.setdefault("mode", run_tuning["mode"])
    if (run_tuning.get("lora") or {}).get("init") == "loftq" and tuning.get("mode") == "lora":
        reason = f"lora, and {adapter_name} was started at what NF4 lost (tuning.lora.init=loftq)"
        contradictions.append((("tuning", "mode"), f"{reason}; use qlora, or merge it (make merge)"))
    model["adapter"] = str(folder.absolute())
    return [document.problem(path, message) for path, message in contradictions]


def _is_same_value(name: str, value: JsonValue, adapter_value: JsonValue) -> bool:
    if name in ("target_modules", "target_parameters") and value == "auto":
        return True
    if isinstance(value, list) and isinstance(adapter_value, list):
        return sorted(map(str, value)) == sorted(map(str, adapter_value))
    return value == adapter_value


def _find_adapter_folder(name: str, output_dir: Path) -> Path:
    candidates = [_find_last_finished_run(output_dir)] if name == LAST_RUN else []
    try:
        if not candidates:
            path = Path(name).expanduser()
            candidates = [output_dir / name, path] if path.name == name else [path]
        folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{one_line(name)} cannot be a folder: {one_line(str(error))}") from None
    if folder is None:
        searched = " and ".join(one_line(str(candidate)) for candidate in candidates)
        raise ConfigError(
            f"there is no run or adapter {one_line(name)}: looked for {searched} (from {Path.cwd()}); name a run of "
            f"{output_dir}, a run's folder, {LAST_RUN}, or a folder with {ADAPTER_CONFIG_FILE} (one of the hub: "
            "hf download)"
        )
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        return folder
    manifest = _read_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder} is neither a run of this toolkit nor an adapter: it has no {ADAPTER_CONFIG_FILE}")
    if manifest.get("status") != "finished":
        raise ConfigError(
            f"the run {folder} is not finished (its manifest says {one_line(str(manifest.get('status')))}): make "
            f"resume RUN={folder.name} trains it to its end; one of its checkpoints is named by its own path"
        )
    if not (folder / "adapter" / ADAPTER_CONFIG_FILE).is_file():
        problem = f"the run {folder} has no adapter ({folder / 'adapter' / ADAPTER_CONFIG_FILE})"
        if (folder / "model").is_dir():
            problem += f"; it trained all weights: give model.name: {folder / 'model'}"
        raise ConfigError(problem)
    return folder / "adapter"


def _find_last_finished_run(output_dir: Path) -> Path:
    finished = []
    for path in output_dir.glob("[!.]*"):
        manifest = _read_manifest(path) or {}
        if manifest.get("status") == "finished" and ".replaced-" not in path.name:
            finished.append((str(manifest.get("ended")), str(path)))
    if not finished:
        raise ConfigError(f"there is no finished run in {output_dir}; name another run, or train one first")
    return Path(max(finished)[1])


def _read_mapping(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    manifest = _read_mapping(folder / _MANIFEST_FILE)
    return manifest if str(manifest.get("format")).startswith(_MANIFEST_FORMAT) else None


def find_adapter_run(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run that an adapter's folder (`adapter/`, a checkpoint, that of a stage) belongs to, with its manifest."""
    for parent in list(folder.absolute().parents)[:4]:
        manifest = _read_manifest(parent)
        if manifest is not None and "stage" not in manifest:
            return parent, manifest
    return None


def _lora_settings(folder: Path, *, has_added_tokens: bool) -> dict[str, JsonValue]:
    """An adapter's settings of `tuning.lora`; `has_added_tokens`: its run names those it added. Raises ConfigError."""
    config = _read_mapping(folder / ADAPTER_CONFIG_FILE)
    init_method = str(config.get("init_lora_weights", True)).lower()  # true, false, or the name of a method
    unsupported = [
        one_line(f"{key}={json.dumps(config[key])}", limit=120)
        for key in _UNSUPPORTED_SETTINGS
        if config.get(key) not in (None, False, [], {}, "none", "") and not (key == _TOKENS_KEY and has_added_tokens)
    ]
    targets, parameters = config.get("target_modules"), config.get("target_parameters") or []
    is_list_of_names = isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets)
    rank, alpha = (int(value) if isinstance(value, float) and value.is_integer() else value
                   for value in (config.get("r"), config.get("lora_alpha")))  # fmt: skip
    has_whole_numbers = option_accepts("tuning.lora.r", rank) and option_accepts("tuning.lora.alpha", alpha)
    peft_type = str(config.get("peft_type"))
    display_numbers = one_line(f"r={json.dumps(rank)} and lora_alpha={json.dumps(alpha)}")
    problems = (
        (
            peft_type.upper() != "LORA",
            f"has peft_type={one_line(peft_type)} in its {ADAPTER_CONFIG_FILE}, and only LORA can be trained here",
        ),
        (
            init_method.startswith(_BASE_CHANGING_INITS),
            f"was started with {one_line(init_method)}, which changes its base too, and the change is not in its "
            "files: convert it to a plain LoRA adapter with PEFT first",
        ),
        (
            unsupported,
            f"has {', '.join(unsupported)}, which this toolkit does not train: merge it into its base with PEFT, and "
            "name the merged model in model.name",
        ),
        (
            not is_list_of_names,
            f"has target_modules={one_line(json.dumps(targets), limit=80)} in its {ADAPTER_CONFIG_FILE}; write the "
            "modules' names as a list",
        ),
        (
            not has_whole_numbers,
            f"has {display_numbers} in its {ADAPTER_CONFIG_FILE}, and whole numbers from 1 are needed",
        ),
        (
            not (folder / ADAPTER_WEIGHTS_FILE).is_file(),
            f"holds no {ADAPTER_WEIGHTS_FILE}; pickled weights (.bin) are not read",
        ),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise ConfigError(f"the adapter {one_line(str(folder.absolute()))} {message}")
    # Modules are named without their layer here. An adapter of some layers only is refused later, by its tensors
    # (training/prepare/base_adapter).
    module_names, parameter_names = (
        sorted({re.sub(r"^.*\.\d+\.", "", str(target)) for target in names}) for names in (targets or (), parameters)
    )
    return {
        "r": rank,
        "alpha": alpha,
        "dropout": config.get("lora_dropout") or 0.0,
        "target_modules": [*module_names],
        "target_parameters": [*parameter_names],
        "modules_to_save": sorted(config.get("modules_to_save") or ()),
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
    }
