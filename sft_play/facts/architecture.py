"""What a model's `config.json` means: layers, shapes, parameters by kind. No torch, no weights.

The config is read from a local folder, from the table of known models, or fetched alone from the hub.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sft_play.errors import ModelError
from sft_play.facts.known_models import KNOWN_MODELS
from sft_play.log import one_line

Config = dict[str, Any]

_CONNECT_TIMEOUT_S = 10.0

MODEL_TYPE_DEFAULTS: dict[str, Config] = {
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "tie_word_embeddings": True, "vocab_size": 262_208},
    "gpt2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128},
    "gpt_oss": {"head_dim": 64, "attention_bias": True},
}
"""Fields that real files leave to their class's defaults (transformers 5.23, configuration_*.py)."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shapes: sizes in numbers of elements, `window` in tokens, None where there is none."""

    name: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    max_positions: int | None
    window: int | None = None
    num_experts: int = 0
    gated_mlp: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms_per_layer: int = 2
    norm_bias: bool = False
    qk_norm: bool = False
    learned_positions: bool = False
    expert_bias: bool = False
    sinks: bool = False

    @cached_property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear layer of a block; an expert's where there are experts."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_width, self.kv_width
        shapes = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        return shapes | ({"gate_proj": (h, f)} if self.gated_mlp else {}) | {"up_proj": (h, f), "down_proj": (f, h)}

    @property
    def q_width(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_params(self) -> int:
        """Parameters of the token (and learned position) embedding."""
        positions = (self.max_positions or 0) if self.learned_positions else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of an output head of its own; 0 where it is the embedding."""
        return 0 if self.tied else self.vocab_size * self.hidden_size

    @property
    def linear_params(self) -> int:
        """Parameters of all blocks' weight matrices, every expert counted, routers and biases not."""
        attention = sum(i * o for name, (i, o) in self.linear_shapes.items() if name in _ATTENTION)
        mlp = sum(i * o for name, (i, o) in self.linear_shapes.items() if name not in _ATTENTION)
        return self.num_layers * (attention + mlp * max(1, self.num_experts))

    @property
    def other_params(self) -> int:
        """Norms, biases, routers, attention sinks, and the last norm."""
        h, norm = self.hidden_size, self.hidden_size * (2 if self.norm_bias else 1)
        per_layer = self.norms_per_layer * norm + (2 * self.head_dim if self.qk_norm else 0)
        per_layer += (self.q_width + 2 * self.kv_width) if self.attention_bias else 0
        per_layer += (h if self.output_bias else 0) + (self.num_heads if self.sinks else 0)
        per_layer += (self.intermediate_size + h) if self.mlp_bias else 0
        if self.num_experts:
            per_layer += self.num_experts * h + (self.num_experts if self.expert_bias else 0)
            per_layer += self.num_experts * (2 * self.intermediate_size + h) if self.expert_bias else 0
        return self.num_layers * per_layer + norm

    @property
    def params(self) -> int:
        """All parameters of the language model."""
        return self.embedding_params + self.head_params + self.linear_params + self.other_params


_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def shape_of(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelShape:
    """The shapes of a model by its hub id or folder.

    Raises:
        ModelError: the folder or hub id has no usable config.json, or brings code that was not allowed.
    """
    config = config_json(name, revision=revision)
    refuse_remote_code(config, name=name, allowed=trust_remote_code)
    return parse_config(config, name=name)


def refuse_remote_code(config: Config, *, name: str, allowed: bool) -> None:
    """Raises ModelError where the model cannot do without Python code of its own and the run YAML does not allow it.

    Files of models that transformers has learned since still name their old code (`auto_map`): that is not run.
    """
    if config.get("auto_map") and not allowed and not _is_native(str(config.get("model_type"))):
        raise ModelError(
            f"model {one_line(name)} brings Python code of its own (auto_map in its config.json), which is not run "
            "unless you read it and say model.trust_remote_code=true"
        )


def _is_native(model_type: str) -> bool:
    """Whether the installed transformers has this model type, looked up without importing it."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return False
    folder = model_type.replace("-", "_")
    names = {folder, folder.removesuffix("_text")}
    return any((Path(found.origin).parent / "models" / name / "__init__.py").is_file() for name in names if name)


def config_json(name: str, *, revision: str | None = None) -> Config:
    """A model's config.json: from a folder, the table of known models, the hub's cache, or the hub."""
    folder = local_folder(name)
    if folder is not None:
        return _read_config(folder)
    if name in KNOWN_MODELS and revision is None:
        return KNOWN_MODELS[name].config
    return _fetch_config(name, revision)


def local_folder(name: str) -> Path | None:
    """The folder that a model name means, or None for a hub id.

    What begins with `/`, `.` or `~`, or whose first part exists here, is a path, never a hub id.

    Raises:
        ModelError: it is a path, and there is no such folder.
    """
    path = _expand(name)
    if _is_dir(path):
        return path
    if _is_file(path):
        raise ModelError(f"model path {one_line(name)} is a file; name the model's folder")
    first = Path(path.parts[0]) if path.parts else path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or (len(path.parts) > 1 and first.exists()):
        parent = next((up for up in path.absolute().parents if _is_dir(up)), Path("/"))
        there = _folders_in(parent)
        listed = f"; {parent} has the folders {', '.join(there)}" if there else ""
        raise ModelError(f"model path {one_line(name)} does not exist (looked from {Path.cwd()}){listed}")
    return None


def _expand(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~someone who does not exist
        return Path(name)


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for the file system
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _folders_in(parent: Path) -> list[str]:
    try:
        return sorted(one_line(child.name, limit=60) for child in parent.iterdir() if _is_dir(child))[:12]
    except OSError:
        return []


def _read_config(folder: Path) -> Config:
    path = folder / "config.json"
    if not path.is_file():
        hint = "; it holds an adapter: give the folder of the base model" if _is_adapter(folder) else ""
        raise ModelError(f"model path {folder} has no config.json{hint}; a model folder holds config.json and weights")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {one_line(str(error))}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path} is not a model's config.json: it has no model_type")
    return config


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _fetch_config(name: str, revision: str | None) -> Config:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = not hub_answers()
    try:
        path = hf_hub_download(name, "config.json", revision=revision, local_files_only=offline)
    except HFValidationError:
        raise ModelError(
            f"model {one_line(name)} is neither a folder here nor a hub id of the form owner/name"
        ) from None
    except GatedRepoError:
        raise ModelError(
            f"model {name} is gated: accept its licence on its hub page, then `hf auth login` or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model {one_line(name)} is no folder here (looked from {Path.cwd()}), is not in the local cache, and the "
            "hub cannot be reached; connect, or give a local folder"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no model {name} (or it is private: `hf auth login`); check the spelling, or give a folder"
        ) from None
    except EntryNotFoundError:
        raise ModelError(f"model {name} has no config.json on the hub: it is not a transformers model") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model {name}: its config.json cannot be fetched: {one_line(str(error))}") from None
    return _read_config(Path(path).parent)


def check_available(name: str, *, revision: str | None = None) -> None:
    """Raises ModelError where a hub model can be had neither from the cache nor from the hub; folders are there."""
    if local_folder(name) is None:
        _fetch_config(name, revision)


def hub_answers() -> bool:
    """Whether a connection to the hub can be opened; with a proxy the library finds out by itself.

    The library would try again and again for half a minute before it says that there is no network.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def parse_config(config: Config, *, name: str) -> ModelShape:
    """The shapes that a config.json means; the language model's, where it wraps one.

    Raises:
        ModelError: a field that a decoder needs is missing.
    """
    text: Config = {**config.get("text_config", {})} if isinstance(config.get("text_config"), dict) else {**config}
    kind = str(text.get("model_type") or config.get("model_type"))
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    text = {**MODEL_TYPE_DEFAULTS.get(kind, {}), **{key: value for key, value in text.items() if value is not None}}
    return _gpt2(text, name) if kind == "gpt2" else _decoder(text, kind, name)


def _need(config: Config, key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        kind = one_line(str(config.get("model_type")))
        raise ModelError(
            f"model {one_line(name)}: config.json has {key}: {one_line(json.dumps(value))}; the plan needs a whole "
            f"number there: it knows decoders with attention (model_type: {kind})"
        )
    return value


def _gpt2(config: Config, name: str) -> ModelShape:
    hidden, heads = _need(config, "n_embd", name), _need(config, "n_head", name)
    return ModelShape(
        name=name,
        model_type="gpt2",
        hidden_size=hidden,
        intermediate_size=int(config.get("n_inner") or 4 * hidden),
        num_layers=_need(config, "n_layer", name),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=_need(config, "vocab_size", name),
        tied=bool(config.get("tie_word_embeddings", True)),
        max_positions=int(config.get("n_positions") or 1024),
        gated_mlp=False,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        learned_positions=True,
    )


OTHER_NAMES = {
    "hidden_size": ("d_model", "n_embd", "word_embed_proj_dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "intermediate_size": ("ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
}
"""What older model types (OPT, BLOOM, Falcon, MPT) call the same sizes."""


def _renamed(config: Config) -> Config:
    """The config with the usual names for its sizes; an MLP whose width is not said is four times as wide."""
    found = dict(config)
    for usual, others in OTHER_NAMES.items():
        for other in others:
            if usual not in found and isinstance(found.get(other), int):
                found[usual] = found[other]
    if "intermediate_size" not in found and isinstance(found.get("hidden_size"), int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    return found


def _count(config: Config, key: str, name: str) -> int | None:
    """A whole number that may be absent; raises ModelError for anything else."""
    return _need(config, key, name) if config.get(key) else None


def _decoder(config: Config, kind: str, name: str) -> ModelShape:
    config = _renamed(config)
    hidden, heads = _need(config, "hidden_size", name), _need(config, "num_attention_heads", name)
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    width = config.get("moe_intermediate_size") if experts else None
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        name=name,
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=int(width) if width else _need(config, "intermediate_size", name),
        num_layers=_need(config, "num_hidden_layers", name),
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", name) or heads,
        head_dim=_count(config, "head_dim", name) or max(1, hidden // heads),
        vocab_size=_need(config, "vocab_size", name),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=_count(config, "max_position_embeddings", name),
        window=_count(config, "sliding_window", name) if config.get("use_sliding_window", True) else None,
        num_experts=experts,
        attention_bias=bias or kind in ("qwen2", "qwen2_moe"),
        output_bias=bias and kind in ("llama", "gpt_oss"),
        norms_per_layer=4 if kind in ("gemma2", "gemma3_text") else 2,
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        expert_bias=kind == "gpt_oss",
        sinks=kind == "gpt_oss",
    )
