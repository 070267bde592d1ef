"""What a model's `config.json` means: layers, shapes, parameters by kind. No torch, no weights.

The config is read from a local folder, from the table of known models, or fetched alone from the hub.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sft_play.errors import ModelError
from sft_play.facts.models.config_fields import (
    DEQUANTISED_FORMATS,
    UnknownArchitecture,
    dequantisable_method,
    normalize_field_names,
    quantisation_method,
    require_causal_lm_config,
)
from sft_play.facts.models.decoder import parse_model_shape
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.process.waiting import report_wait
from sft_play.spelling import did_you_mean
from sft_play.starter import BASE, BASE_NAME

ConfigJson = dict[str, Any]

_CONNECT_TIMEOUT_S = 3.0
# A hub that did not answer is not asked again for so long: one command asks several times.
_RETRY_AFTER_S = 60.0
# When a hub last did not answer.
_failure_times: dict[tuple[str, int], float] = {}
_MODEL_INFO_TIMEOUT_S = 3.0


def load_model_shape(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The shapes of a model, by its hub id or folder. Raises ModelError without a usable config.json, or for code that
    was not allowed."""
    config = load_config_json(name, revision=revision)
    refuse_remote_code(config, name=name, allowed=trust_remote_code)
    return parse_model_shape(config, name=name)


def load_max_positions(name: str, *, revision: str | None = None) -> int | None:
    """How many positions a model has; None where its config.json does not say, or there is none."""
    with contextlib.suppress(ModelError):
        config = load_config_json(name, revision=revision)
        try:
            return parse_model_shape(config, name=name).max_positions
        except UnknownArchitecture:
            inner = config.get("text_config")
            max_positions = normalize_field_names(inner if isinstance(inner, Mapping) else config).get(
                "max_position_embeddings"
            )
            return max_positions if isinstance(max_positions, int) and max_positions > 0 else None
    return None


def refuse_remote_code(config: ConfigJson, *, name: str, allowed: bool) -> None:
    """Raises ModelError where the model needs code of its own and the run YAML does not allow it; models that
    transformers has added since still name their old code (`auto_map`)."""
    if config.get("auto_map") and not allowed and not _is_in_transformers(str(config.get("model_type"))):
        raise ModelError(
            f"model {one_line(name)} has its own Python code (auto_map in its config.json), which runs only if "
            "you have read it and set model.trust_remote_code=true"
        )


def text_only_note(config: Mapping[str, Any]) -> str:
    """A note for a model with parts beside its language model, which alone is trained; empty for others."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping) or not inner:
        return ""
    model_type = one_line(str(config.get("model_type")))
    return (
        f"only the language model of this {model_type} is trained; its other parts are not loaded, and stay in merged "
        "and fully trained models as they are published"
    )


def refuse_quantised(config: Mapping[str, Any], *, name: str, mode: str) -> None:
    """Raises ModelError where the stored weights are quantised in a way that is not trained: all but bitsandbytes' 4
    bits in qlora, and `DEQUANTISED_FORMATS`."""
    method, fields = quantisation_method(config)
    if method is None or method in DEQUANTISED_FORMATS:
        return
    is_8bit = any(fields.get(f"{prefix}load_in_8bit") for prefix in ("", "_"))
    if method != "bitsandbytes" or is_8bit or mode != "qlora":
        bits, original = ", 8 bits" if is_8bit else "", original_model_name(config, name)
        remedy = f"take its original, {original}" if original else "take the unquantised model"
        raise ModelError(
            f"the weights of {one_line(name)} are already quantised ({one_line(method)}{bits}); {remedy}: "
            "tuning.mode=qlora quantises it while loading"
        )


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def original_model_name(config: Mapping[str, Any], name: str) -> str:
    """The model that a quantised one was made of, as far as its config.json tells; empty where it does not."""
    _, fields = quantisation_method(config)
    candidates = (config.get("_name_or_path"), config.get("base_model"), fields.get("model_name_or_path"))
    return next((one for one in candidates if isinstance(one, str) and _HUB_ID.fullmatch(one) and one != name), "")


def quantised_storage_note(config: Mapping[str, Any], mode: str) -> str:
    """A note for weights that are stored quantised and dequantised while they are read; empty for others."""
    method, _ = dequantisable_method(config)
    if method is None:
        return ""
    treatment = "packed as NF4" if mode == "qlora" else "trained so" if mode == "full" else "kept so"
    return (
        f"its weights are stored in {DEQUANTISED_FORMATS[method]}: dequantised tensor by tensor while loading, and "
        f"{treatment}"
    )


def _is_in_transformers(model_type: str) -> bool:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    folder = model_type.replace("-", "_")
    names = {folder, folder.removesuffix("_text")}
    return any((Path(spec.origin).parent / "models" / name / "__init__.py").is_file() for name in names if name)


_GGUF_DESCRIPTION = (
    "a GGUF, weights for llama.cpp that nothing here trains: give the model that it was converted from, as a hub id or "
    "a folder with config.json and safetensors (make export FORMAT=gguf makes a GGUF of what was trained)"
)


def load_config_json(name: str, *, revision: str | None = None) -> ConfigJson:
    """A model's config.json: from a folder, the table of known models, the hub's cache, or the hub."""
    folder = find_model_folder(name)
    if folder is not None:
        suffixes = {file.suffix.lower() for file in folder.glob("*")}
        if ".gguf" in suffixes and ".safetensors" not in suffixes:
            raise ModelError(f"model path {one_line(name)} holds {_GGUF_DESCRIPTION}")
        config = _read_config(folder, str(folder))
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model path {one_line(name)} holds an adapter beside its config.json, which transformers would put on "
                "the weights unasked: give the base model's folder (model.adapter continues an adapter), or remove "
                "adapter_config.json"
            )
        return config
    if name in KNOWN_MODELS and revision is None:  # another revision may have another shape
        return KNOWN_MODELS[name].config
    known_name = next((known for known in KNOWN_MODELS if known.rpartition("/")[2].lower() == name.lower()), None)
    if known_name is not None:
        raise ModelError(f"model {one_line(name)} lacks its owner: the hub has it as {known_name}")
    return _fetch_config(name, revision)


def find_model_folder(name: str) -> Path | None:
    """The folder that a model name refers to, or None for a hub id; of the starter's base that of this package. Raises
    ModelError for a path (from `/`, `.` or `~`, or whose first part exists here) that is no folder."""
    if name == BASE_NAME:
        return BASE
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # ~user of a user who does not exist
        path = path.expanduser()
    with contextlib.suppress(OSError):  # a name too long for the file system
        if path.is_dir():
            return path
    first = Path(path.parts[0]) if path.parts else path
    # a hub id is owner/name or a bare name: anything else can only be a path
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or (len(path.parts) > 1 and first.exists())
    with contextlib.suppress(OSError):
        is_path |= path.is_file()
    if is_path:
        problem = f"does not exist or is no folder (looked from {Path.cwd()})"
        raise ModelError(
            f"model path {one_line(name)} {f'is {_GGUF_DESCRIPTION}' if path.suffix.lower() == '.gguf' else problem}"
        )
    return None


def base_weights_identity(name: str, hf_config: Any) -> dict[str, str | None]:
    """What identifies the base weights: the hub's commit, or a digest of each file's size, first and last MiB: whole
    files would take minutes, and training moves every tensor."""
    folder = find_model_folder(name)
    if folder is None:
        return {"path": name, "sha256": getattr(hf_config, "_commit_hash", None)}
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return {"path": str(folder), "sha256": digest.hexdigest()}


def _read_config(folder: Path, name: str) -> ConfigJson:
    path = folder / "config.json"
    if not path.is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = "; it holds an adapter: give the folder of the base model" if is_adapter else ""
        raise ModelError(f"model path {folder} has no config.json{hint}; a model folder holds config.json and weights")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_parse_special_float)
    except (ValueError, RecursionError) as error:  # not text, not JSON, or a number with thousands of digits
        raise ModelError(f"{path} is not JSON: {one_line(str(error))}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    require_causal_lm_config(config, name=name)
    return dict(config)


def _parse_special_float(value: ConfigJson) -> Any:
    """A number that JSON lacks, from transformers' tag for it (`_encode_special_floats`, 5.23); else the object."""
    tag = value.get("__float__")
    return float(tag) if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN") else value


def _fetch_config(name: str, revision: str | None) -> ConfigJson:
    from huggingface_hub import errors, hf_hub_download

    model_text = one_line(name)
    reasons: dict[type[Exception], str] = {
        errors.HFValidationError: "is neither a folder here nor a hub id of the form owner/name",
        errors.GatedRepoError: "is gated: accept its licence on its hub page, then `hf auth login` or set HF_TOKEN",
        errors.LocalEntryNotFoundError: f"is not a folder here (looked from {Path.cwd()}), is not in the local cache, "
        f"and the hub cannot be reached; {did_you_mean(name, KNOWN_MODELS) or 'connect, or give a local folder'}",
        errors.RepositoryNotFoundError: "is not on the hub (or it is private: `hf auth login`); check the spelling, or "
        "give a folder",
        errors.EntryNotFoundError: f"is {_GGUF_DESCRIPTION}"
        if "gguf" in name.lower()
        else "has no config.json on the hub: it is not a transformers model",
    }
    is_offline = not is_hub_reachable()  # then only the cache is read, at once
    try:
        with report_wait(f"Asking the hub for the config.json of {model_text}"):
            path = hf_hub_download(name, "config.json", revision=revision, local_files_only=is_offline)
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        fallback_reason = f": its config.json cannot be fetched: {one_line(str(error))}"
        reason = next((text for error_type, text in reasons.items() if isinstance(error, error_type)), fallback_reason)
        raise ModelError(f"model {model_text} {reason}") from None
    return _read_config(Path(path).parent, name)


def published_params_note(name: str, revision: str | None, params: int) -> str:
    """What the headers of a hub model's files say of its parameters, where its config.json gives over 1% more or fewer;
    empty for folders and known models, and where the hub has no answer."""
    if find_model_folder(name) is not None or (name in KNOWN_MODELS and revision is None):
        return ""
    params_by_dtype = _fetch_published_params(name, revision)
    total = sum(params_by_dtype.values())
    if not total or abs(total - params) <= 0.01 * total:
        return ""
    dtypes = ", ".join(f"{count:,} {one_line(dtype, limit=20)}" for dtype, count in params_by_dtype.items())
    return f"parameters: {total:,} by the published files ({dtypes}), {params:,} by config.json"


@functools.cache  # shapes are asked for several times
def _fetch_published_params(name: str, revision: str | None) -> Mapping[str, int]:
    from huggingface_hub import HfApi

    # a gated model, no network, another hub without this answer: config.json alone has to do
    with contextlib.suppress(Exception):
        if not is_hub_reachable():
            return {}
        answer = HfApi().model_info(name, revision=revision, expand=["safetensors"], timeout=_MODEL_INFO_TIMEOUT_S)
        return {str(dtype): int(count) for dtype, count in answer.safetensors.parameters.items()}
    return {}


def require_available_model(name: str, *, revision: str | None = None) -> None:
    """Raises ModelError where a hub model is neither in the cache nor on a reachable hub; folders always pass."""
    if find_model_folder(name) is None:
        _fetch_config(name, revision)


def is_hub_reachable() -> bool:
    """Whether the hub, or the proxy before it, can be reached: the library would retry for half a minute."""
    # as huggingface_hub reads them (constants.py, 1.x): the second only where the first is not set
    offline_setting = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline_setting.upper() in ("1", "TRUE", "YES", "ON"):
        return False
    host, port = _connection_target(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if time.monotonic() - _failure_times.get((host, port), -math.inf) < _RETRY_AFTER_S:
        return False
    if not _can_connect(host, port):
        _failure_times[host, port] = time.monotonic()
        return False
    return True


def _connection_target(url: str) -> tuple[str, int]:
    """Host and port to connect to for a URL: its own, or those of the proxy that the environment names for it."""
    from urllib.request import getproxies, proxy_bypass

    address, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(address.netloc):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return address.hostname or "", address.port or {"http": 80, "https": 443}.get(address.scheme, 1080)


def _can_connect(host: str, port: int) -> bool:
    """Whether a connection is made in time. In a thread: looking up a name has no limit of its own, and takes half a
    minute where no server of names answers."""
    connections: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError, UnicodeError), socket.create_connection((host, port), _CONNECT_TIMEOUT_S):
            connections.append(True)

    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    return bool(connections)


@dataclass(frozen=True)
class KnownModel:
    """A published config (the fields that determine sizes), its source, and the published parameters if known."""

    config: ConfigJson
    source: str
    params: int | None = None


# By hub id: the models of the shipped configs and the most used others, which can be planned without a network.
#
# A line of `known_models.json` holds the hub ids of models of one shape (base, instruct, successors), where it was
# read, the published parameters where they were, and the part of the published config.json that determines sizes (of
# image-text models with the towers), with how the weights are stored.
KNOWN_MODELS: dict[str, KnownModel] = {
    name: KnownModel(row["config"], row["source"], row["params"])
    for row in json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    for name in row["names"]
}
