"""What a model's `config.json` means: found or fetched, and read into the shape of a decoder. No
torch, no weights.
"""

import contextlib
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.families import (
    ACTIVATION_FIELDS,
    DEQUANTISED_FORMATS,
    EXPERT_WEIGHTS,
    MODEL_FAMILIES,
    ConfigFields,
    ModelFamily,
    UnknownArchitecture,
    dequantisable_method,
    no_adapter_reason,
    normalize_field_names,
    quantisation_method,
    require_causal_lm_config,
    wrapped_config,
)
from sft_play.models.shape import (
    AttentionKind,
    LayerKind,
    LinearShape,
    ModelShape,
    StackedExpertWeight,
)
from sft_play.process.waiting import report_wait
from sft_play.spelling import did_you_mean, nearest_name
from sft_play.starter import BASES

# From a config.json to a decoder's shape: its blocks by kind, as its model type's class lays them
# out.

# Activations that transformers computes step by step in Python, with a tensor per step
# (activations.py).
STEPWISE_ACTIVATIONS = frozenset({"gelu_new", "gelu_fast", "gelu_python", "gelu_accurate"})


def parse_model_shape(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shapes that a config.json describes, or wraps. Raises UnknownArchitecture for a type or
    part that the table does not describe, ModelError where it is no decoder's, or a size is missing
    or impossible."""
    require_causal_lm_config(config, name=name)
    fields = ConfigFields.from_config(config, name)
    family = MODEL_FAMILIES[fields.model_type]
    # dropout of what blocks add up, whose masks the estimate does not count
    unsupported_fields = [
        key
        for key in ("resid_pdrop", "embd_pdrop")
        if fields.read_number(key, minimum=0, maximum=1)
    ]
    unsupported_fields += [
        key for key in ACTIVATION_FIELDS if str(fields.values.get(key)) in STEPWISE_ACTIVATIONS
    ]
    if unsupported_fields:
        key = unsupported_fields[0]
        raise UnknownArchitecture(
            f"model {one_line(name)}: config.json has {key}: {one_line(str(fields.values[key]))},"
            " which the plan does not know without transformers"
        )
    # files from before transformers 5 have torch_dtype
    dtypes = [
        part.get("dtype") or part.get("torch_dtype") for part in (config, wrapped_config(config))
    ]
    stored_dtype = next(
        (dtype.removeprefix("torch.") for dtype in dtypes if isinstance(dtype, str)), None
    )
    stored_dtype = dequantisable_method(config)[0] or stored_dtype
    return replace(_ShapeBuilder(family, fields).build(), stored_dtype=stored_dtype)


class _ShapeBuilder:
    def __init__(self, family: ModelFamily, fields: ConfigFields) -> None:
        self.family, self.fields = family, fields
        self.hidden = fields.require_count("hidden_size")
        self.num_layers = fields.require_count("num_hidden_layers")
        self.heads = fields.require_count("num_attention_heads")
        self.kv_heads = fields.read_optional_count("num_key_value_heads") or self.heads
        self._require_multiple(
            "num_attention_heads", self.heads, "num_key_value_heads", self.kv_heads
        )
        head_dim = fields.read_optional_count("head_dim")
        if head_dim is None:
            self._require_multiple("hidden_size", self.hidden, "num_attention_heads", self.heads)
        self.head_dim = head_dim or self.hidden // self.heads

    def build(self) -> ModelShape:
        family, fields = self.family, self.fields
        blocks = [
            (self._attention_kind(index), self._has_experts(index))
            for index in range(self.num_layers)
        ]
        kinds = list(dict.fromkeys(blocks))
        layers = tuple(self._build_block(*kind, count=blocks.count(kind)) for kind in kinds)
        commonest = max(layers, key=lambda kind: kind.count)
        window = None  # config.json may have one that no block uses (Qwen2: use_sliding_window)
        if any(kind.attention == "sliding" for kind in layers):
            window = fields.read_optional_count("sliding_window")
        rope, rotary_share = fields.values.get("rope_parameters"), None
        if isinstance(rope, Mapping):
            rotary_share = rope.get("partial_rotary_factor")
        if rotary_share is None:
            rotary_share = fields.read_number("partial_rotary_factor")
        if not isinstance(rotary_share, int | float):
            rotary_share = 1.0
        return ModelShape(
            name=fields.name,
            model_type=fields.model_type,
            hidden_size=self.hidden,
            intermediate_size=commonest.expert_width or commonest.mlp_width,
            num_layers=self.num_layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=fields.require_count("vocab_size"),
            tied=fields.read_flag("tie_word_embeddings"),
            max_positions=fields.read_optional_count("max_position_embeddings"),
            layers=layers,
            layer_order=tuple(kinds.index(block) for block in blocks),
            window=window,
            num_experts=commonest.num_experts,
            experts_per_token=commonest.num_experts
            and (fields.read_optional_count("num_experts_per_tok") or 0),
            has_clamped_gate=family.experts is not None and family.experts.has_clamped_gate,
            routes_in_fp32=family.experts is not None and family.experts.routes_in_fp32,
            norm=family.norm,
            norms_per_layer=family.norms_per_block,
            has_qk_norm=fields.read_flag(family.qk_norm),
            has_fused_qkv=len(family.qkv) == 1,
            rotary_dim=min(int(self.head_dim * rotary_share), self.head_dim),
            has_attention_sinks=family.has_sinks,
            attention_softcap=fields.read_number("attn_logit_softcapping"),
            caps_logits=fields.read_number("final_logit_softcapping") is not None,
            attention_dropout=fields.read_number("attention_dropout", minimum=0, maximum=1) or 0.0,
            outer_params=self.hidden,  # the last norm
        )

    def _require_multiple(self, name: str, value: int, divisor_name: str, divisor: int) -> None:
        if value % divisor:
            raise ModelError(
                f"model {one_line(self.fields.name)}: config.json has {name}: {value} and"
                f" {divisor_name}: {divisor}; the first must be a multiple of the second"
            )

    def _build_block(self, attention: AttentionKind, has_experts: bool, *, count: int) -> LayerKind:
        family, fields, experts = self.family, self.fields, self.family.experts
        # q is not always the hidden width: Gemma's and Qwen3's heads are wider together
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths: tuple[int, ...] = (q, kv, kv)
        if len(family.qkv) == 1:
            widths = (q + 2 * kv,)
        linears = [
            LinearShape(path, self.hidden, width, fields.read_flag(family.qkv_bias))
            for path, width in zip(family.qkv, widths, strict=True)
        ]
        linears.append(
            LinearShape("self_attn.o_proj", q, self.hidden, fields.read_flag(family.out_bias))
        )
        norm_params = family.norms_per_block * self.hidden
        if fields.read_flag(family.qk_norm):
            norm_params += q + kv if family.qk_norm_size == "width" else 2 * self.head_dim
        kind = LayerKind(
            count=count,
            linears=(),
            attention=attention,
            norm_params=norm_params,
            other_params=self.heads * family.has_sinks,  # attention sinks
        )
        if experts is not None and has_experts:
            width = fields.require_count(experts.width_field)
            expert_count = fields.require_count(experts.count_field)
            if experts.shared_count_field:
                paths = tuple(
                    f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")
                )
                linears += self._mlp_linears(
                    paths, width * fields.require_count(experts.shared_count_field), bias=False
                )
            up_path, down_path = EXPERT_WEIGHTS
            # of gate and up, and of down
            biases = (2 * width + self.hidden) * experts.has_expert_bias
            kind = replace(
                kind,
                num_experts=expert_count,
                expert_width=width,
                expert_params=expert_count * (3 * self.hidden * width + biases),
                expert_weights=(
                    StackedExpertWeight(up_path, expert_count, self.hidden, 2 * width),
                    StackedExpertWeight(down_path, expert_count, width, self.hidden),
                ),
                router_params=expert_count * (self.hidden + int(experts.has_router_bias)),
            )
        else:
            width = fields.require_count("intermediate_size")
            linears += self._mlp_linears(family.mlp, width, bias=fields.read_flag(family.mlp_bias))
            kind = replace(kind, mlp_width=width)
        # an adapter would not stay on some
        adaptable_linears = (
            replace(linear, adaptable=no_adapter_reason(fields.model_type, linear.name) is None)
            for linear in linears
        )
        return replace(kind, linears=tuple(adaptable_linears))

    def _mlp_linears(self, paths: tuple[str, ...], width: int, *, bias: bool) -> list[LinearShape]:
        input_width = width * (1 + (len(self.family.mlp) == 2))  # gate and up projection in one
        input_linears = [LinearShape(path, self.hidden, input_width, bias) for path in paths[:-1]]
        return [*input_linears, LinearShape(paths[-1], width, self.hidden, bias)]

    def _has_experts(self, index: int) -> bool:
        fields, experts = self.fields, self.family.experts
        if experts is None:
            return False
        if experts.block_rule == "after_dense":
            return index >= (fields.read_optional_count("first_k_dense_replace") or 0)
        if experts.block_rule == "sparse_step":
            dense_layers = fields.values.get("mlp_only_layers") or ()
            return (
                index not in dense_layers
                and (index + 1) % fields.require_count("decoder_sparse_step") == 0
            )
        return True

    def _attention_kind(self, index: int) -> AttentionKind:
        fields, rule = self.fields, self.family.window_rule
        if rule == "none":
            return "full"
        # transformers 5 writes layer_types; older files only have the window, and the class's own
        # rule applies, whose fields may be missing where there is no window
        layer_types = fields.values.get("layer_types")
        has_window = bool(fields.read_optional_count("sliding_window"))
        if isinstance(layer_types, list) and rule != "all":
            if len(layer_types) != self.num_layers:
                raise ModelError(
                    f"model {one_line(fields.name)}: config.json has {len(layer_types)} layer_types"
                    f" and num_hidden_layers: {self.num_layers}"
                )
            if layer_types[index] not in ("full_attention", "sliding_attention"):
                raise UnknownArchitecture(
                    f"model {one_line(fields.name)}: config.json has a block of type"
                    f" {one_line(str(layer_types[index]))}, which the plan does not know without"
                    " transformers"
                )
            is_sliding = has_window and layer_types[index] == "sliding_attention"
        elif not has_window or (
            "use_sliding_window" in fields.values and not fields.read_flag("use_sliding_window")
        ):
            is_sliding = False
        elif rule == "late":
            is_sliding = index >= (fields.read_optional_count("max_window_layers") or 0)
        elif rule == "no_rope":
            # blocks without rotary positions: no_rope_layers has 1 where there are
            interval = fields.read_optional_count("no_rope_layer_interval") or 4
            is_sliding = (index + 1) % interval == 0
            rope_layers = fields.values.get("no_rope_layers")
            if isinstance(rope_layers, list) and index < len(rope_layers):
                is_sliding = not rope_layers[index]
        elif rule == "pattern" or (
            rule.startswith("every_") and "sliding_window_pattern" in fields.values
        ):
            is_sliding = (index + 1) % fields.require_count("sliding_window_pattern") != 0
        else:
            is_sliding = rule == "all" or (index + 1) % int(rule.removeprefix("every_")) != 0
        return "sliding" if is_sliding else "full"


# --------------------------------------------------------------------------------------------------
# The config is read from a local folder, from the table of known models, or fetched alone from the
# hub.

ConfigJson = dict[str, Any]

_CONNECT_TIMEOUT_S = 3.0
_QUANTISED_SUFFIX = re.compile(
    r"[-_.](unsloth-)?(bnb-4bit|4bit|8bit|int[48]|gptq|awq|fp8|mlx).*$", re.IGNORECASE
)
_NAME_HINTS_FILE = Path(__file__).with_name("name_hints.json")
# A hub that did not answer is not asked again for so long: one command asks several times.
_RETRY_AFTER_S = 60.0
# When a hub last did not answer.
_failure_times: dict[tuple[str, int], float] = {}


def load_model_shape(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """The shapes of a model, by its hub id or folder. Raises ModelError without a usable
    config.json, or for code that was not allowed."""
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
            values = normalize_field_names(wrapped_config(config) or config)
            return ConfigFields("", values, name).read_optional_count("max_position_embeddings")
    return None


def refuse_remote_code(config: ConfigJson, *, name: str, allowed: bool) -> None:
    """Raises ModelError where the model needs code of its own and the run YAML does not allow it;
    models that transformers has added since still name their old code (`auto_map`)."""
    if (
        config.get("auto_map")
        and not allowed
        and not _is_in_transformers(str(config.get("model_type")))
    ):
        raise ModelError(
            f"model {one_line(name)} has its own Python code (auto_map in its config.json), which"
            " runs only if you have read it and set model.trust_remote_code=true"
        )


def text_only_note(config: Mapping[str, Any]) -> str:
    """A note for a model with parts beside its language model, which alone is trained; empty for
    others."""
    if not wrapped_config(config):
        return ""
    return (
        f"only the language model of this {one_line(str(config.get('model_type')))} is trained;"
        " its other parts are not loaded, and stay in merged and fully trained models as they are"
        " published"
    )


def refuse_quantised(config: Mapping[str, Any], *, name: str, mode: str) -> None:
    """Raises ModelError where the stored weights are quantised in a way that is not trained: all
    but bitsandbytes' 4 bits in qlora, and `DEQUANTISED_FORMATS`."""
    method, fields = quantisation_method(config)
    if method is None or method in DEQUANTISED_FORMATS:
        return
    is_8bit = any(fields.get(f"{prefix}load_in_8bit") for prefix in ("", "_"))
    if method != "bitsandbytes" or is_8bit or mode != "qlora":
        raise ModelError(
            f"the weights of {one_line(name)} are already quantised"
            f" ({one_line(method)}{', 8 bits' * is_8bit}); {_unquantised_remedy(name)}"
        )


def quantised_storage_note(config: Mapping[str, Any], mode: str) -> str:
    """A note for weights that are stored quantised and dequantised while they are read; empty for
    others."""
    method, _ = dequantisable_method(config)
    if method is None:
        return ""
    treatment = {"qlora": "packed as NF4", "full": "trained so", "lora": "kept so"}[mode]
    return (
        f"its weights are stored in {DEQUANTISED_FORMATS[method]}: dequantised tensor by tensor"
        f" while loading, and {treatment}"
    )


def _is_in_transformers(model_type: str) -> bool:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    folder = model_type.replace("-", "_")
    names = {folder, folder.removesuffix("_text")}
    return any(
        (Path(spec.origin).parent / "models" / name / "__init__.py").is_file()
        for name in names
        if name
    )


_GGUF_DESCRIPTION = (
    "a GGUF, weights for llama.cpp that nothing here trains: give the model that it was converted"
    " from, as a hub id or a folder with config.json and safetensors (make export FORMAT=gguf makes"
    " a GGUF of what was trained)"
)


def explain_model_name(name: str) -> str:
    """What a name means that is no model of the hub to train: an address, a model behind an API, a
    name of Ollama's, a quantised copy; empty for others."""
    for pattern, text in json.loads(_NAME_HINTS_FILE.read_text(encoding="utf-8")):
        if match := re.fullmatch(pattern, name, re.IGNORECASE):
            stem = match[1].replace(":", "-")
            known = _find_known_name(f"{stem}-Instruct", stem)
            return str(text.format(stem=stem, meant=known or "owner/name"))
    return ""


# The known model whose name without its owner is nearest to one of these.
def _find_known_name(*stems: str) -> str | None:
    names = {known.rpartition("/")[2]: known for known in KNOWN_MODELS}
    return names.get(next(filter(None, (nearest_name(stem, names) for stem in stems)), ""))


# What to train in place of a quantised copy.
def _unquantised_remedy(name: str) -> str:
    known = _find_known_name(_QUANTISED_SUFFIX.sub("", name.rpartition("/")[2]))
    return (
        f"take the unquantised model{f' {known}' if known else ''}: tuning.mode=qlora quantises it"
        " while loading"
    )


def load_config_json(name: str, *, revision: str | None = None) -> ConfigJson:
    """A model's config.json: from a folder, the table of known models, the hub's cache, or the
    hub."""
    folder = find_model_folder(name)
    if folder is not None:
        suffixes = {file.suffix.lower() for file in folder.glob("*")}
        if ".gguf" in suffixes and ".safetensors" not in suffixes:
            raise ModelError(f"model path {one_line(name)} holds {_GGUF_DESCRIPTION}")
        config = _read_config(folder, str(folder))
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"model path {one_line(name)} holds an adapter beside its config.json, which"
                " transformers would put on the weights unasked: give the base model's folder"
                " (model.adapter continues an adapter), or remove adapter_config.json"
            )
        return config
    if name in KNOWN_MODELS and revision is None:  # another revision may have another shape
        return KNOWN_MODELS[name].config
    known_name = next(
        (known for known in KNOWN_MODELS if known.rpartition("/")[2].lower() == name.lower()), None
    )
    if known_name is not None:
        raise ModelError(f"model {one_line(name)} lacks its owner: the hub has it as {known_name}")
    return _fetch_config(name, revision)


def find_model_folder(name: str) -> Path | None:
    """The folder that a model name refers to, or None for a hub id; of a starter's base that of
    this package. Raises ModelError for a path (from `/`, `.` or `~`, or whose first part exists
    here) that is no folder.
    """
    if name in BASES:
        return BASES[name]
    # os.path has no error for ~nobody, or for a name that is too long
    path = Path(os.path.expanduser(name))  # noqa: PTH111
    if os.path.isdir(path):  # noqa: PTH112
        return path
    if meaning := explain_model_name(name):
        raise ModelError(f"model {one_line(name)} is {one_line(meaning, limit=300)}")
    # a hub id is owner/name or a bare name: anything else can only be a path
    begins_here = len(path.parts) > 1 and os.path.exists(path.parts[0])  # noqa: PTH110
    is_path = (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or begins_here
        or os.path.isfile(path)  # noqa: PTH113
    )
    if not is_path:
        return None
    problem = f"does not exist or is no folder (looked from {Path.cwd()})"
    if path.suffix.lower() == ".gguf":
        problem = f"is {_GGUF_DESCRIPTION}"
    raise ModelError(f"model path {one_line(name)} {problem}")


def base_weights_identity(name: str, hf_config: Any) -> dict[str, str | None]:
    """What identifies the base weights: the hub's commit, or a digest of each file's size, first
    and last MiB: whole files would take minutes, and training moves every tensor."""
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
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = "; it holds an adapter: give the folder of the base model"
        raise ModelError(
            f"model path {folder} has no config.json{hint}; a model folder holds config.json and"
            " weights"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_parse_special_float)
    except (ValueError, RecursionError) as error:
        # not text, not JSON, or a number with thousands of digits
        raise ModelError(f"{path} is not JSON: {one_line(str(error))}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    require_causal_lm_config(config, name=name)
    return dict(config)


# A number that JSON lacks, from transformers' tag for it (`_encode_special_floats`, 5.23); else the
# object.
def _parse_special_float(value: ConfigJson) -> Any:
    tag = value.get("__float__")
    if len(value) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
        return float(tag)
    return value


def _fetch_config(name: str, revision: str | None) -> ConfigJson:
    from huggingface_hub import errors, hf_hub_download

    model_text = one_line(name)
    no_config_reason = "has no config.json on the hub: it is not a transformers model"
    if "gguf" in name.lower():
        no_config_reason = f"is {_GGUF_DESCRIPTION}"
    quantised_hint = f"it is quantised: {_unquantised_remedy(name)}"
    hint = did_you_mean(name, KNOWN_MODELS) or "connect, or give a local folder"
    reasons: dict[type[Exception], str] = {
        errors.HFValidationError: "is neither a folder here nor a hub id of the form owner/name",
        errors.GatedRepoError: (
            "is gated: accept its licence on its hub page, then `hf auth login` or set HF_TOKEN"
        ),
        errors.LocalEntryNotFoundError: (
            f"is not a folder here (looked from {Path.cwd()}), is not in the local cache, and the"
            f" hub cannot be reached; {quantised_hint if _QUANTISED_SUFFIX.search(name) else hint}"
        ),
        errors.RepositoryNotFoundError: (
            "is not on the hub (or it is private: `hf auth login`); check the spelling, or "
            "give a folder"
        ),
        errors.EntryNotFoundError: no_config_reason,
    }
    is_offline = not is_hub_reachable()  # then only the cache is read, at once
    try:
        with report_wait(f"Asking the hub for the config.json of {model_text}"):
            path = hf_hub_download(
                name, "config.json", revision=revision, local_files_only=is_offline
            )
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = next(
            (text for error_type, text in reasons.items() if isinstance(error, error_type)),
            f": its config.json cannot be fetched: {one_line(str(error))}",
        )
        raise ModelError(f"model {model_text} {reason}") from None
    return _read_config(Path(path).parent, name)


def require_available_model(name: str, *, revision: str | None = None) -> None:
    """Raises ModelError where a hub model is neither in the cache nor on a reachable hub; folders
    always pass."""
    if find_model_folder(name) is None:
        _fetch_config(name, revision)


def is_hub_reachable() -> bool:
    """True if the hub, or the proxy before it, can be reached: the library would retry for half a
    minute."""
    from urllib.request import getproxies, proxy_bypass

    # as huggingface_hub reads them (constants.py, 1.x): the second only where the first is not set
    offline_setting = (
        os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    )
    if offline_setting.upper() in ("1", "TRUE", "YES", "ON"):
        return False
    # the proxy that the environment names for the hub, where there is one
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(address.netloc):
        if "://" not in proxy:
            proxy = f"http://{proxy}"
        address = urlsplit(proxy)
    host = address.hostname or ""
    port = address.port or {"http": 80, "https": 443}.get(address.scheme, 1080)
    if time.monotonic() - _failure_times.get((host, port), -math.inf) < _RETRY_AFTER_S:
        return False
    if not _can_connect(host, port):
        _failure_times[host, port] = time.monotonic()
        return False
    return True


# In a thread: looking up a name has no limit of its own, and takes half a minute where no server of
# names answers.
def _can_connect(host: str, port: int) -> bool:
    connections: list[bool] = []

    def connect() -> None:
        with (
            contextlib.suppress(OSError, UnicodeError),
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S),
        ):
            connections.append(True)

    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(_CONNECT_TIMEOUT_S)
    return bool(connections)


@dataclass(frozen=True)
class KnownModel:
    """A published config (the fields that determine sizes), its source, and the published
    parameters if known."""

    config: ConfigJson
    source: str
    params: int | None = None


# By hub id: the models of the shipped configs and the most used others, which can be planned
# without a network.
#
# A line of `known_models.json` holds the hub ids of models of one shape (base, instruct,
# successors), where it was read, the published parameters where they were, and the part of the
# published config.json that determines sizes (of image-text models with the towers), with how the
# weights are stored.
KNOWN_MODELS: dict[str, KnownModel] = {
    name: KnownModel(row["config"], row["source"], row["params"])
    for row in json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
    for name in row["names"]
}
