"""A small model of a class with random weights, a few narrow layers of every kind: it computes in a
second or two."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from transformers import AutoModelForCausalLM

from sft_play.data.masks.token_row import IGNORED
from sft_play.log import one_line
from sft_play.training.loop.rows import COUNT_KEYS, Collator, complete_boundaries

VOCABULARY_SIZE = 128
# Of a model at full width with few layers: more would take longer than a few seconds.
MAX_PARAMETERS = 200_000_000
# The same where it also runs backwards, in bf16 too: more would take minutes on a CPU (Falcon-H1 at
# full width: five).
MAX_TRAINED_PARAMETERS = 20_000_000
_MAX_WINDOW = 8

# Sizes by their names in transformers' configs; those that a config lacks, or that are null or 0,
# stay so.
_NARROW_SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "ffn_dim": 64, "ffn_hidden_size": 256,
    "intermediate_size_mlp": 64, "word_embed_proj_dim": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16, "d_head": 16,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_head_dim": 16,
    "v_head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_heads": 4,
    "linear_head_dim": 16, "rotary_dim": 16, "index_n_heads": 4, "index_head_dim": 32,
    "indexer_n_heads": 4, "indexer_head_dim": 32, "hc_lowrank": 16, "ple_embed_dim": 64,
    "ngram_vocab_size_base": 100, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_state": 16,
    "state_size": 16, "ssm_state_size": 16, "mamba_chunk_size": 16, "chunk_size": 16,
    "time_step_rank": 4, "mamba_dt_rank": 4,
}  # fmt: skip
# Size of the part of a head that turns with the position, where the config has one apart.
_ROTARY_SIZE = 8
# Tokens from which on a class computes otherwise (it chooses among them, sums them up, weighs them
# by their place), by their names in configs, and as many as short rows have; as those of
# `compress_rates`, one for each kind of layer.
_LENGTH_THRESHOLDS = {
    "index_topk": 8, "index_block_size": 8, "index_topk_blocks": 2, "index_kpool": 4,
    "keep_window_size": 8, "block_size": 8, "floor_scale": 8, "log_scaling_n_floor": 8,
    "rel_extent": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Layers kept where the config does not list their kinds: periods of hybrids are 6 to 8 (jamba 8,
# zamba 6).
_MAX_LAYERS = 12
Measurement = TypeVar("Measurement")


def model_type_name(hf_config: Any) -> str:
    """The model's type, as it is named in messages."""
    return one_line(str(getattr(hf_config, "model_type", type(hf_config).__name__)))


def measure_small_model(
    hf_config: Any,
    measure: Callable[..., Measurement],
    *,
    trust_remote_code: bool = False,
    max_parameters: int = MAX_PARAMETERS,
    needs_all_layers: bool = False,
    max_row_tokens: int | None = None,
    **options: Any,
) -> tuple[Measurement | None, str]:
    """Call `measure` with the config of a small model of the class, once in a process, and return
    its result. Tried are few narrow layers of every kind, then full widths; None and the reason if
    none of at most `max_parameters` computes. `max_row_tokens`: tokens of the longest row; what the
    class does with longer ones is not asked."""
    options["trust_remote_code"] = trust_remote_code
    # code of a model's own may hold any object in its config
    settings = json.dumps(hf_config.to_dict(), default=repr)
    key = (
        *(measure, type(hf_config), settings, max_parameters, needs_all_layers, max_row_tokens),
        *sorted(options.items()),
    )
    if key in _measurements:
        return _measurements[key]
    measurement, problem = None, "no small model of its class computes"
    for has_all_layers, is_narrow in [(True, True)] * needs_all_layers + [
        (False, True),
        (False, False),
    ]:
        try:
            config = _shorten(
                hf_config, has_all_layers=has_all_layers, max_row_tokens=max_row_tokens
            )
            if is_narrow:
                _shrink_widths(config)
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config), trust_remote_code=trust_remote_code
                )
            parameter_count = sum(parameter.numel() for parameter in skeleton.parameters())
            if parameter_count > max_parameters:  # nested configs have sizes of their own
                raise ValueError(
                    f"its smallest model here has {parameter_count:,} parameters, too many to try"
                )
            measurement, problem = measure(config, **options), ""
            break
        # each class checks its sizes in its own way, some only in the forward pass
        except Exception as error:
            problem = f"{problem}; {type(error).__name__}: {one_line(str(error), limit=200)}"
    _measurements[key] = measurement, problem
    return measurement, problem


_measurements: dict[Hashable, tuple[Any, str]] = {}


def small_config(hf_config: Any) -> Any:
    """A config of the same class with few narrow layers, at least one of every kind, and a
    vocabulary of 128."""
    config = _shorten(hf_config)
    _shrink_widths(config)
    return config


def small_model(config: Any, attention: str, trust_remote_code: bool) -> Any:
    """A model in fp32, the same at every call, with weights so large that any influence shows; in
    evaluation mode."""
    implementations = ["sdpa", "eager"] if "flash" in attention else [attention]
    for implementation in implementations:
        try:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                attn_implementation=implementation,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
            )
            break
        except ValueError:
            if implementation == implementations[-1]:
                raise
    generator = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                scale = 1.0 if id(parameter) in tables else 1.5 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


@dataclass(frozen=True)
class ModelOutputs:
    """What a model computed of rows, in fp32: logits at positions without padding, [tokens,
    vocabulary], and the gradient of each weight (none where it did not train)."""

    logits: torch.Tensor
    weight_gradients: list[torch.Tensor]

    @property
    def gradients(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return torch.cat([gradient.flatten() for gradient in self.weight_gradients])


def pack_row(chats: Sequence[Any]) -> dict[str, Any]:
    """Join chats to a training row; all tokens are trained but the first of each chat."""
    ids, lengths = np.concatenate(chats), np.array([len(chat) for chat in chats])
    labels = ids.copy()
    labels[np.cumsum(lengths) - lengths] = IGNORED
    return {"input_ids": ids, "labels": labels, "chat_lengths": lengths}


def run_model(
    model: Any,
    rows: list[dict[str, Any]],
    *,
    flat: bool = False,
    uses_masks: bool = True,
    needs_gradients: bool = True,
    **extra_inputs: Any,
) -> ModelOutputs:
    """Run rows through a model as in training; `needs_gradients`: backward too; `flat`: join packs
    to one row, with boundaries between chats; `uses_masks`: give padded rows a mask;
    `extra_inputs`: other arguments of the model."""
    batch = Collator(pad_id=0, flat=flat, adds_masks=uses_masks, adds_chat_lengths=flat)(rows)
    inputs = {
        name: value for name, value in complete_boundaries(batch).items() if name not in COUNT_KEYS
    }
    if not needs_gradients:
        del inputs["labels"]
    inputs = send_to_device(inputs, model.device)
    model.zero_grad(set_to_none=True)
    output = model(**inputs, **extra_inputs, use_cache=False)
    if needs_gradients:
        output.loss.backward()
    logits = output.logits[0]
    if not (flat and "chat_lengths" in rows[0]):
        logits = torch.cat(
            [
                row_logits[: len(row["input_ids"])]
                for row_logits, row in zip(output.logits, rows, strict=True)
            ]
        )
    return ModelOutputs(
        logits.detach().float(),
        [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None],
    )


def _shorten(
    hf_config: Any, *, has_all_layers: bool = False, max_row_tokens: int | None = None
) -> Any:
    # a copy with a small vocabulary, short windows, and all layers or the first with one of every
    # kind
    config = copy.deepcopy(hf_config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Inkling 2's head has the second many rows from transformers 5.24 on; a balance loss of no
    # routers, which a config.json may ask for, is an IndexError
    _set_fields(
        config,
        {
            "vocab_size": VOCABULARY_SIZE,
            "unpadded_vocab_size": VOCABULARY_SIZE,
            "output_router_logits": False,
            **_SPECIAL_TOKENS,
        },
    )
    layer_count = int(getattr(config, "num_hidden_layers", 0) or 0)
    if layer_count and not has_all_layers:
        _cut_layers(config, layer_count)
    for name in ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"):
        if isinstance(window := config_field(config, name), int):
            setattr(config, name, min(window, _MAX_WINDOW))
    for name, size in _LENGTH_THRESHOLDS.items():
        if _is_exceeded(config_field(config, name), max_row_tokens):
            setattr(config, name, size)
    if rates := _compress_rates(config):
        config.compress_rates = {
            kind: min(rate, _MAX_WINDOW) if _is_exceeded(rate, max_row_tokens) else rate
            for kind, rate in rates.items()
        }
    return config


def length_threshold(hf_config: Any) -> int | None:
    """Return the most tokens that a row may have for the class to compute as it does for short
    rows; None: it computes alike for rows of any length."""
    sizes = [config_field(hf_config, name) for name in _LENGTH_THRESHOLDS] + list(
        _compress_rates(hf_config).values()
    )
    return min((size for size in sizes if _is_exceeded(size, None)), default=None)


# Whether a size of `_LENGTH_THRESHOLDS` is set, and rows are longer.
def _is_exceeded(size: Any, max_row_tokens: int | None) -> bool:
    return isinstance(size, int) and size > 0 and (max_row_tokens is None or size < max_row_tokens)


def _compress_rates(config: Any) -> dict[str, int]:
    rates = config_field(config, "compress_rates")
    return rates if isinstance(rates, dict) else {}


def _cut_layers(config: Any, layer_count: int) -> None:
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == layer_count
    }
    layer_kinds = [[str(item) for item in value] for value in lists.values()]
    needed_layers = []
    for kinds in layer_kinds:
        for kind in set(kinds):
            first = kinds.index(kind) + 1
            if kind == "hybrid" and "linear_attention" in kinds and kind in kinds[first:]:
                # two of Zamba's hybrid ones, which share their weights
                first += kinds[first:].index(kind) + 1
            needed_layers.append(first)
    kept_layers = min(
        layer_count, max(2, min(_MAX_LAYERS, max(needed_layers, default=_MAX_LAYERS)))
    )
    # the last layers, behind one of each kind with keys of its own
    if config_field(config, "num_kv_shared_layers"):
        shared = max(
            (value.index(item) + 1 for value in layer_kinds for item in set(value)), default=1
        )
        config.num_kv_shared_layers, kept_layers = shared, 2 * shared
    for name, value in lists.items():
        setattr(config, name, value[:kept_layers])
    for name, value in vars(config).items():
        if name.endswith("layer_ids") and isinstance(value, list | tuple):  # numbers of layers
            setattr(config, name, [layer for layer in value if layer < kept_layers])
    overrides = _per_layer_sizes(config)
    if overrides:  # which are checked against the number of layers
        config.per_layer_config = None
    config.num_hidden_layers = kept_layers
    if overrides:
        config.per_layer_config = {
            layer: sizes for layer, sizes in overrides.items() if layer < kept_layers
        }
    if isinstance(getattr(config, "attention_types", None), list):  # gpt-neo: [[kinds, times]]
        config.attention_types = [
            [
                [kind for layer_kinds, _ in config.attention_types for kind in layer_kinds][
                    :kept_layers
                ],
                1,
            ]
        ]
        config.num_hidden_layers = len(config.attention_types[0][0])
        config.attention_layers = config.attention_types[0][0]


def _per_layer_sizes(config: Any) -> dict[int, dict[str, Any]]:
    if not getattr(config, "is_heterogeneous", False):
        return {}
    return {
        int(layer): dict(sizes) for layer, sizes in config.to_dict()["per_layer_config"].items()
    }


def _shrink_widths(config: Any) -> None:
    # one, some or all key heads stay so, and absent sizes stay absent
    overrides = _per_layer_sizes(config)
    if overrides:  # which hide the config's own sizes of the same names
        config.per_layer_config = None
    heads = config_field(config, "num_attention_heads")
    key_heads = config_field(config, "num_key_value_heads") or config_field(config, "num_kv_heads")
    sizes = dict(_NARROW_SIZES)
    if isinstance(heads, int) and isinstance(key_heads, int):
        narrow_heads = {1: 1, heads: 4}.get(key_heads, 2)
        sizes |= {"num_key_value_heads": narrow_heads, "num_kv_heads": narrow_heads}
    rotary_size = config_field(config, "qk_rope_head_dim")
    head_sizes = {
        name: config_field(config, name)
        for name in ("head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim")
        if rotary_size
    }
    head_sizes = {name: value for name, value in head_sizes.items() if isinstance(value, int)}
    sizes |= {name: _scale_head_part(value, rotary_size) for name, value in head_sizes.items()}
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        value = config_field(config, name)
        if isinstance(value, int) and value:
            sizes[name] = min(value, 8 * int(getattr(config, "n_group", None) or 1))
    experts_per_token = config_field(config, "num_experts_per_tok")
    if isinstance(experts_per_token, int):
        sizes["num_experts_per_tok"] = min(experts_per_token, 4)
    _set_fields(config, {**sizes, **_state_space_sizes(config)})
    for layer_sizes in overrides.values():
        for name, value in layer_sizes.items():
            if name in head_sizes:
                layer_sizes[name] = _scale_head_part(value, rotary_size)
            elif name in sizes and isinstance(value, int):
                layer_sizes[name] = 2 * sizes[name]
    if overrides:
        config.per_layer_config = overrides
    rotation = getattr(config, "rope_parameters", None)
    if isinstance(rotation, dict):
        # of layers
        by_kind = [parameters for parameters in rotation.values() if isinstance(parameters, dict)]
        for parameters in by_kind or [rotation]:
            rotary_share = float(parameters.get("partial_rotary_factor", None) or 1.0)
            frequencies = (
                _ROTARY_SIZE if rotary_size else int(sizes["head_dim"] * rotary_share)
            ) // 2
            # longrope lists a factor per frequency of a head
            for name in ("short_factor", "long_factor"):
                if isinstance(parameters.get(name), list):
                    parameters[name] = parameters[name][:frequencies]
            if "mrope_section" in {
                *parameters,
                *getattr(config, "ignore_keys_at_rope_validation", ()),
            }:
                # how many frequencies turn with each of time, height and width; HunYuan's with the
                # number of the image, too
                equal_parts = [frequencies // 4] * (
                    len(parameters.get("mrope_section") or "thw") - 1
                )
                parameters["mrope_section"] = [*equal_parts, frequencies - sum(equal_parts)]


# Scales a part of a head like its rotary part: classes check that the parts add up, and keep the
# rotary share.
def _scale_head_part(size: int, rotary_size: int) -> int:
    return max(1, size * _ROTARY_SIZE // rotary_size)


# Of a state-space model: as many heads as its inner width, a multiple of the hidden one, asks for.
def _state_space_sizes(config: Any) -> dict[str, int]:
    expansion = next(
        (
            value
            for name in ("mamba_expand", "expand")
            if isinstance(value := config_field(config, name), int)
        ),
        2,
    )
    inner_width = expansion * _NARROW_SIZES["hidden_size"]
    sizes = {
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), inner_width // 8),
        # Zamba's, of no size of their own, are computed head by head and token by token
        "n_mamba_heads": 8 if config_field(config, "mamba_headdim") else 2,
        "mamba_d_ssm": inner_width,
    }
    if config_field(config, "attention_hidden_size"):  # Zamba's: of twice the hidden width
        width = 2 * _NARROW_SIZES["hidden_size"]
        sizes |= {
            "attention_hidden_size": width,
            "attention_head_dim": width // _NARROW_SIZES["num_attention_heads"],
        }
    for name in ("mamba_n_groups", "mamba_ngroups", "n_groups"):
        if isinstance(value := config_field(config, name), int):
            sizes[name] = min(value, 2)
    if config_field(config, "num_attention_heads") is None and isinstance(
        config_field(config, "state_size"), int
    ):
        sizes["intermediate_size"] = inner_width  # of mamba itself: all its heads are states
        if isinstance(config_field(config, "num_heads"), int):
            sizes |= {"num_heads": 8, "head_dim": inner_width // 8}
    return sizes


def _set_fields(config: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        value = config_field(config, name)
        if not value and name not in _SPECIAL_TOKENS:
            continue
        with contextlib.suppress(AttributeError):  # a property computed from other fields
            setattr(config, name, [size] * len(value) if isinstance(value, list) else size)


def config_field(config: Any, name: str) -> Any:
    """A field of the config; None where it is missing, or differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises an error of its own for fields that differ by layer
        return None
