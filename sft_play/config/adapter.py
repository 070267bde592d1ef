"""`model.adapter`: the adapter that a new run continues, found by name, and the settings that come with it.

An adapter's weights mean something only with the rank, the scale and the modules that they were trained with. So these
are read from its `adapter_config.json`; a run YAML may repeat them, and is refused where it contradicts them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.options import accepts, leaves
from sft_play.config.yaml_io import Plain, Problem, YamlDocument, show, value_at
from sft_play.errors import ConfigError
from sft_play.log import one_line

KEY = "model.adapter"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# The name that means the run that finished last.
LAST = "last"
# As in runs/folder.py, which is in a layer above.
_RUN_FILE, _RUN_FORMAT = "manifest.json", "sft_play run "
# Ways to start an adapter that change the base's weights too, which its files do not hold.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of PEFT that change what an adapter computes or which tensors it has, and that are not trained here.
_NOT_TRAINED = (
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication"),
    *("trainable_token_indices", "lora_bias", "use_qalora", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    *("velora_config", "monteclora_config"),
)


@dataclass(frozen=True)
class EarlierAdapter:
    """An adapter to continue: `place` is its folder (absolute), `settings` those of `tuning.lora`."""

    place: str
    settings: Mapping[str, Plain]
    mode: str | None
    """`tuning.mode` of the run that trained it; None where no run of this toolkit is beside it."""
    tokens: list[Plain]
    """`model.add_tokens` of that run, whose rows the adapter has."""
    needs_nf4: bool = False
    """Whether it was started at what NF4 lost of the base."""


def put_adapter(document: YamlDocument) -> list[Problem]:
    """Put the settings of `model.adapter` into a document; returns a problem for each that contradicts it."""
    path = ("model", "adapter")
    given, folder = (value_at(document.data, at) for at in (path, ("output", "dir")))
    if not isinstance(given, str) or not given:
        return []
    try:
        output = Path(folder if isinstance(folder, str) else leaves()["output.dir"].default)
        adapter = find_adapter(given, output=output)
    except ConfigError as error:
        return [document.problem(path, str(error))]
    model, tuning, lora = (document.section(at) for at in (("model",), ("tuning",), ("tuning", "lora")))
    if model is None or tuning is None or lora is None:
        return []  # reported as a section that holds a value
    problems = []
    if tuning.get("mode") == "full":
        why = f"full trains all weights, and {KEY} continues an adapter: use lora or qlora, or merge the adapter"
        problems.append(
            document.problem(("tuning", "mode"), f"{why} (make merge) and name the merged model in model.name")
        )
    for name, theirs in adapter.settings.items():
        if name in lora and name != "dropout" and not _is_same(name, lora[name], theirs):
            why = f"{show(lora[name])}, and the adapter {one_line(adapter.place)} has {show(theirs)}"
            problems.append(document.problem(("tuning", "lora", name), f"{why}; leave it out: the adapter's is taken"))
        elif name != "dropout" or name not in lora:
            lora[name] = theirs
    if adapter.tokens and model.setdefault("add_tokens", adapter.tokens) != adapter.tokens:
        why = f"the adapter {one_line(adapter.place)} has rows of {show(adapter.tokens)}; leave it out"
        problems.append(document.problem(("model", "add_tokens"), f"{why}: the adapter's is taken"))
    if adapter.mode is not None:
        tuning.setdefault("mode", adapter.mode)
    if adapter.needs_nf4 and tuning.get("mode") == "lora":
        why = f"lora, and the adapter {one_line(adapter.place)} was started at what NF4 lost (tuning.lora.init=loftq)"
        problems.append(document.problem(("tuning", "mode"), f"{why}; use qlora, or merge it (make merge)"))
    model["adapter"] = adapter.place
    return problems


def _is_same(name: str, ours: Plain, theirs: Plain) -> bool:
    if name in ("target_modules", "target_parameters") and ours == "auto":
        return True
    if isinstance(ours, list) and isinstance(theirs, list):
        return sorted(map(str, ours)) == sorted(map(str, theirs))
    return ours == theirs


def find_adapter(given: str, *, output: Path) -> EarlierAdapter:
    """The adapter that `given` names: `last`, a run in the folder `output`, a run's or an adapter's folder. Raises
    ConfigError where nothing of that name is found, or it is none that is trained here."""
    folder = _folder(given, output.expanduser())
    place = str(folder.absolute())
    run = run_of(folder)
    resolved = _mapping(run[0] / "resolved.json") if run is not None else {}
    tokens = resolved.get("model", {}).get("add_tokens") or []
    settings = _settings(_mapping(folder / CONFIG_FILE), place, has_tokens=bool(tokens))
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{place} holds no {WEIGHTS_FILE}; pickled weights (.bin) are not read")
    tuning = resolved.get("tuning") or {}
    needs_nf4 = (tuning.get("lora") or {}).get("init") == "loftq"
    return EarlierAdapter(place, settings, tuning.get("mode"), tokens, needs_nf4)


def _folder(given: str, output: Path) -> Path:
    last = _last(output) if given == LAST else None
    try:
        path = Path(given).expanduser()
        places = [last] if last is not None else [*([output / given] if path.name == given else []), path]
        at = next((place for place in places if place.is_dir()), None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{one_line(given)} cannot be a folder: {one_line(str(error))}") from None
    if at is None:
        looked = " and ".join(one_line(str(place)) for place in places)
        raise ConfigError(
            f"there is no run or adapter {one_line(given)}: looked for {looked} (from {Path.cwd()}); name a run of "
            f"{output}, a run's folder, {LAST}, or a folder with {CONFIG_FILE} (one of the hub: hf download)"
        )
    if (at / CONFIG_FILE).is_file():
        return at
    manifest = _manifest(at)
    if manifest is None:
        raise ConfigError(f"{at} is neither a run of this toolkit nor an adapter: it has no {CONFIG_FILE}")
    if manifest.get("status") != "finished":
        raise ConfigError(
            f"the run {at} is not finished (its manifest says {one_line(str(manifest.get('status')))}): make resume "
            f"RUN={at.name} trains it to its end; one of its checkpoints is named by its own path"
        )
    if not (at / "adapter" / CONFIG_FILE).is_file():
        whole = f"; it trained all weights: give model.name: {at / 'model'}" if (at / "model").is_dir() else ""
        raise ConfigError(f"the run {at} has no adapter ({at / 'adapter' / CONFIG_FILE}){whole}")
    return at / "adapter"


def _last(output: Path) -> Path:
    finished = []
    for path in sorted(output.iterdir()) if output.is_dir() else []:
        manifest = None if path.name.startswith(".") or ".replaced-" in path.name else _manifest(path)
        if manifest is not None and manifest.get("status") == "finished":
            finished.append((str(manifest.get("ended")), str(path)))
    if not finished:
        raise ConfigError(f"there is no finished run in {output}; name another run, or train one first")
    return Path(max(finished)[1])


def _mapping(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _manifest(folder: Path) -> dict[str, Any] | None:
    manifest = _mapping(folder / _RUN_FILE)
    return manifest if str(manifest.get("format")).startswith(_RUN_FORMAT) else None


def run_of(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The run that an adapter's folder (`adapter/`, a checkpoint, that of a stage) belongs to, with its manifest."""
    for place in list(folder.absolute().parents)[:4]:
        manifest = _manifest(place)
        if manifest is not None and "stage" not in manifest:
            return place, manifest
    return None


def _settings(config: Mapping[str, Any], place: str, *, has_tokens: bool) -> dict[str, Plain]:
    """An adapter's settings of `tuning.lora`; `has_tokens`: its run says which tokens it added. Raises ConfigError."""
    name = f"the adapter {one_line(place)}"
    kind = config.get("peft_type")
    if str(kind).upper() != "LORA":
        raise ConfigError(
            f"{name} has peft_type={one_line(str(kind))} in its {CONFIG_FILE}, and only LORA can be trained here"
        )
    start = str(config.get("init_lora_weights", True)).lower()  # true, false, or the name of a method
    if start.startswith(_CHANGES_THE_BASE):
        raise ConfigError(f"{name} was started with {one_line(start)}, which changes its base too, and the change is "
                          "not in its files: convert it to a plain LoRA adapter with PEFT first")  # fmt: skip
    odd = [one_line(f"{key}={json.dumps(config[key])}", limit=120) for key in _NOT_TRAINED
           if config.get(key) and not (key == "trainable_token_indices" and has_tokens)]  # fmt: skip
    odd += [f"bias={config['bias']}"] if config.get("bias") not in (None, "none") else []
    if odd:
        raise ConfigError(f"{name} has {', '.join(odd)}, which this toolkit does not train: merge it into its base "
                          "with PEFT, and name the merged model in model.name")  # fmt: skip
    targets = config.get("target_modules")
    stacked = [str(target) for target in config.get("target_parameters") or ()]
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        given = one_line(json.dumps(targets), limit=80)
        raise ConfigError(f"{name} has target_modules={given} in its {CONFIG_FILE}; write the modules' names as a list")
    # Modules are named without their layer here. An adapter of some layers only is refused later, by its tensors
    # (training/prepare/origin).
    names: list[Plain] = [*sorted({re.sub(r"^.*\.\d+\.", "", target) for target in targets})]
    parameters: list[Plain] = [*sorted({re.sub(r"^.*\.\d+\.", "", target) for target in stacked})]
    whole: list[Plain] = [*sorted(config.get("modules_to_save") or ())]
    rank, alpha = (int(one) if isinstance(one, float) and one.is_integer() else one
                   for one in (config.get("r"), config.get("lora_alpha")))  # fmt: skip
    if not (accepts("tuning.lora.r", rank) and accepts("tuning.lora.alpha", alpha)):
        given = one_line(f"r={json.dumps(rank)} and lora_alpha={json.dumps(alpha)}")
        raise ConfigError(f"{name} has {given} in its {CONFIG_FILE}, and whole numbers from 1 are needed")
    return {
        "r": rank,
        "alpha": alpha,
        "dropout": config.get("lora_dropout") or 0.0,
        "target_modules": names,
        "target_parameters": parameters,
        "modules_to_save": whole,
        "use_rslora": bool(config.get("use_rslora")),
        "use_dora": bool(config.get("use_dora")),
    }
