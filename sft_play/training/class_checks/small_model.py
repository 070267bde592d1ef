"""A small model of a class with random weights, a few narrow layers of every kind: it computes in a second or two."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from sft_play.log import one_line
from sft_play.training.loop.collate import COUNTS, Collator

VOCABULARY = 128
# Of a model at full width with few layers: more would take longer than a few seconds.
MOST_PARAMETERS = 200_000_000
# The same where it also runs backwards, in bf16 too: more would take minutes on a CPU (Falcon-H1 at full width:
# five).
MOST_TRAINED = 20_000_000
_WINDOW = 8

# Sizes by their names in transformers' configs; those that a config lacks, or that are null or 0, stay so.
_NARROW = {
    "hidden_size": 64, "intermediate_size": 64, "ffn_dim": 64, "ffn_hidden_size": 256, "intermediate_size_mlp": 64,
    "word_embed_proj_dim": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4, "head_dim": 16, "d_head": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_head_dim": 16, "v_head_dim": 16, "global_head_dim": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_heads": 4,
    "linear_head_dim": 16, "rotary_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "indexer_n_heads": 4,
    "indexer_head_dim": 32, "hc_lowrank": 16, "ple_embed_dim": 64, "ngram_vocab_size_base": 100,
}  # fmt: skip
_HEADS = ("head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_nope_head_dim")
# Size of the part of a head that turns with the position, where the config has one apart.
_TURNED = 8
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
# Tokens from which on a class computes otherwise (it chooses among them, sums them up, weighs them by their place), by
# their names in configs, and as many as short rows have; as those of `compress_rates`, one for each kind of layer.
_REACHES = {
    "index_topk": 8, "index_block_size": 8, "index_topk_blocks": 2, "index_kpool": 4, "keep_window_size": 8,
    "block_size": 8, "floor_scale": 8, "log_scaling_n_floor": 8, "rel_extent": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Layers kept where the config does not list their kinds: periods of hybrids are 6 to 8 (jamba 8, zamba 6).
_MOST_LAYERS = 12
Found = TypeVar("Found")


def kind_of(hf_config: Any) -> str:
    """The model's type, as it is named in messages."""
    return one_line(str(getattr(hf_config, "model_type", type(hf_config).__name__)))


def on_small_model(
    hf_config: Any,
    look: Callable[..., Found],
    *,
    trust_remote_code: bool = False,
    most: int = MOST_PARAMETERS,
    whole_depth: bool = False,
    longest: int | None = None,
    **options: Any,
) -> tuple[Found | None, str]:
    """What `look` finds with the config of a small model of the class: few narrow layers of every kind, or full width
    where the class refuses; None where none of at most `most` parameters computes, and why. Once a process. `longest`:
    tokens of the longest row, where what the class does with longer ones is not asked."""
    options["trust_remote_code"] = trust_remote_code
    settings = json.dumps(hf_config.to_dict(), default=repr)  # code of a model's own may hold any object in its config
    key = look, type(hf_config), settings, most, whole_depth, longest, tuple(sorted(options.items()))
    if key not in _looked_at:
        _looked_at[key] = _look(hf_config, look, most, options, whole_depth, longest)
    found: tuple[Found | None, str] = _looked_at[key]
    return found


_looked_at: dict[Hashable, Any] = {}


def _look(
    hf_config: Any, look: Callable[..., Any], most: int, options: dict[str, Any], whole_depth: bool, longest: int | None
) -> tuple[Any, str]:
    problem = "no small model of its class computes"
    for is_whole, is_narrow in [(True, True)] * whole_depth + [(False, True), (False, False)]:
        try:
            small = _short(hf_config, is_whole=is_whole, longest=longest)
            if is_narrow:
                _narrow(small)
            _require_small(small, options["trust_remote_code"], most)
            return look(small, **options), ""
        except Exception as error:  # each class checks its sizes in its own way, some only in the forward pass
            problem = f"{problem}; {type(error).__name__}: {one_line(str(error), limit=200)}"
    return None, problem


def small_config(hf_config: Any) -> Any:
    """A config of the same class with few narrow layers, at least one of every kind, and a vocabulary of 128."""
    small = _short(hf_config)
    _narrow(small)
    return small


def small_model(small: Any, attention: str, trust_remote_code: bool) -> Any:
    """A model in fp32, the same at every call, with weights so large that any influence shows; in evaluation mode."""
    wanted = ["sdpa", "eager"] if "flash" in attention else [attention]
    for name in wanted:
        try:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(small), attn_implementation=name, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
            break
        except ValueError:
            if name == wanted[-1]:
                raise
    draw = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                scale = 1.0 if id(parameter) in tables else 1.5 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)
    return model.eval()


@dataclass(frozen=True)
class Passed:
    """What a model computed of rows, in fp32."""

    logits: torch.Tensor
    """Of the real places, [tokens, words]."""
    gradients: torch.Tensor
    """Of all weights, one after the other; none where it did not train."""


def passed(
    model: Any, rows: list[dict[str, Any]], *, flat: bool = False, masks: bool = True, trains: bool = True, **more: Any
) -> Passed:
    """A pass over rows as in training, backward too where it `trains`; `flat`: packs lie one behind the other, told
    apart by boundaries; `masks`: padded rows come with theirs; `more`: what else the model is given."""
    batch = Collator(pad_id=0, flat=flat, masks=masks, tells_lengths=flat)(rows)
    left_out = COUNTS if trains else (*COUNTS, "labels")
    inputs = {name: value for name, value in batch.items() if name not in left_out}
    model.zero_grad(set_to_none=True)
    output = model(**inputs, **more, use_cache=False)
    if trains:
        output.loss.backward()
    lengths = [len(row["input_ids"]) for row in rows]
    is_joined = flat and "chat_lengths" in rows[0]
    real = output.logits[0] if is_joined else torch.cat([output.logits[n, :length] for n, length in enumerate(lengths)])
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return Passed(real.detach().float(), torch.cat(gradients).float() if gradients else torch.zeros(0))


def _require_small(small: Any, trust_remote_code: bool, most: int) -> None:
    """Raises ValueError for a model that would take long: nested configs have sizes of their own."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(small), trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if parameters > most:
        raise ValueError(f"its smallest model here has {parameters:,} parameters, too many to try")


def _short(hf_config: Any, *, is_whole: bool = False, longest: int | None = None) -> Any:
    """With a small vocabulary and short windows; all layers, or enough of the first to have one of every kind."""
    small = copy.deepcopy(hf_config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    # Inkling 2's head has the second many rows from transformers 5.24 on; a balance loss of no routers, which a
    # config.json may ask for, is an IndexError
    _set(
        small,
        {"vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY, "output_router_logits": False, **_SPECIAL},
    )
    layers = int(getattr(small, "num_hidden_layers", 0) or 0)
    if layers and not is_whole:
        _cut_layers(small, layers)
    for name in _WINDOWS:
        value = field_of(small, name)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(small, name, min(value, _WINDOW))
    _set(small, {name: size for name, size in _REACHES.items() if _binds(field_of(small, name), longest)})
    if rates := _rates(small):
        small.compress_rates = {
            kind: min(rate, _WINDOW) if _binds(rate, longest) else rate for kind, rate in rates.items()
        }
    return small


def longest_usual(hf_config: Any) -> int | None:
    """Tokens of the longest row of which a class computes as of short ones; None where it does so of any."""
    sizes = [field_of(hf_config, name) for name in _REACHES] + list(_rates(hf_config).values())
    return min((size for size in sizes if _binds(size, None)), default=None)


def _binds(size: Any, longest: int | None) -> bool:
    """Whether a size of `_REACHES` is set, and rows are longer."""
    return isinstance(size, int) and size > 0 and (longest is None or size < longest)


def _rates(config: Any) -> dict[str, int]:
    rates = field_of(config, "compress_rates")
    return rates if isinstance(rates, dict) else {}


def _cut_layers(small: Any, layers: int) -> None:
    lists = {
        name: value for name, value in vars(small).items() if isinstance(value, list | tuple) and len(value) == layers
    }
    kinds = [[str(item) for item in value] for value in lists.values()]
    firsts = [_shown_by(value, item) for value in kinds for item in set(value)] if kinds else [_MOST_LAYERS]
    kept = min(layers, max(2, min(_MOST_LAYERS, max(firsts))))
    if field_of(small, "num_kv_shared_layers"):  # the last layers, behind one of each kind with keys of its own
        shared = max(value.index(item) + 1 for value in kinds for item in set(value)) if kinds else 1
        small.num_kv_shared_layers, kept = shared, 2 * shared
    for name, value in lists.items():
        setattr(small, name, value[:kept])
    for name, value in vars(small).items():
        if name.endswith("layer_ids") and isinstance(value, list | tuple):  # numbers of layers
            setattr(small, name, [layer for layer in value if layer < kept])
    overrides = _own_sizes(small)
    if overrides:
        small.per_layer_config = None
    small.num_hidden_layers = kept
    if overrides:
        small.per_layer_config = {layer: sizes for layer, sizes in overrides.items() if layer < kept}
    if isinstance(getattr(small, "attention_types", None), list):  # gpt-neo: [[kinds, times]]
        small.attention_types = [[[kind for kinds, _ in small.attention_types for kind in kinds][:kept], 1]]
        small.num_hidden_layers = len(small.attention_types[0][0])
        small.attention_layers = small.attention_types[0][0]


def _shown_by(kinds: list[str], kind: str) -> int:
    """How many of the first layers show one of a kind: two of Zamba's hybrid ones, which share their weights."""
    first = kinds.index(kind) + 1
    is_shared = kind == "hybrid" and "linear_attention" in kinds
    return kinds.index(kind, first) + 1 if is_shared and kind in kinds[first:] else first


def _own_sizes(small: Any) -> dict[int, dict[str, Any]]:
    if not getattr(small, "is_heterogeneous", False):
        return {}
    return {int(layer): dict(sizes) for layer, sizes in small.to_dict()["per_layer_config"].items()}


def _narrow(small: Any) -> None:
    """The kind of attention (one, some or all key heads) stays; absent sizes stay absent."""
    overrides = _own_sizes(small)
    if overrides:  # which hide the config's own sizes of the same names
        small.per_layer_config = None
    heads = field_of(small, "num_attention_heads")
    groups = field_of(small, "num_key_value_heads") or field_of(small, "num_kv_heads")
    sizes = dict(_NARROW)
    if isinstance(heads, int) and isinstance(groups, int):
        sizes |= dict.fromkeys(
            ("num_key_value_heads", "num_kv_heads"), 4 if groups == heads else 1 if groups == 1 else 2
        )
    turned = field_of(small, "qk_rope_head_dim")
    heads = {name: value for name in _HEADS if isinstance(value := field_of(small, name), int)} if turned else {}
    sizes |= {name: _in_proportion(value, turned) for name, value in heads.items()}
    for name in _EXPERTS:
        value = field_of(small, name)
        if isinstance(value, int) and value:
            sizes[name] = min(value, 8 * int(getattr(small, "n_group", None) or 1))
    chosen = field_of(small, "num_experts_per_tok")
    if isinstance(chosen, int):
        sizes["num_experts_per_tok"] = min(chosen, 4)
    _set(small, {**sizes, **_states(small)})
    if overrides:
        small.per_layer_config = {
            layer: {name: _in_proportion(value, turned) if name in heads
                    else 2 * sizes[name] if name in sizes and isinstance(value, int) else value
                    for name, value in own.items()}
            for layer, own in overrides.items()
        }  # fmt: skip
    rotation = getattr(small, "rope_parameters", None)
    if isinstance(rotation, dict):
        by_kind = [one for one in rotation.values() if isinstance(one, dict)]  # of layers
        for one in by_kind or [rotation]:
            share = float(one.get("partial_rotary_factor", None) or 1.0)
            _narrow_rotation(small, one, (_TURNED if turned else int(sizes["head_dim"] * share)) // 2)


def _narrow_rotation(small: Any, rotation: dict[str, Any], frequencies: int) -> None:
    for name in ("short_factor", "long_factor"):  # longrope lists a factor per frequency of a head
        if isinstance(rotation.get(name), list):
            rotation[name] = rotation[name][:frequencies]
    if "mrope_section" in {*rotation, *getattr(small, "ignore_keys_at_rope_validation", ())}:
        # how many frequencies turn with each of time, height and width; HunYuan's with the number of the image, too
        others = [frequencies // 4] * (len(rotation.get("mrope_section") or "thw") - 1)
        rotation["mrope_section"] = [*others, frequencies - sum(others)]


def _in_proportion(size: int, turned: int) -> int:
    """Classes check that the parts add up to heads, and keep how large a share of a head turns."""
    return max(1, size * _TURNED // turned)


def _states(small: Any) -> dict[str, int]:
    """Small sizes of a state-space model: as many heads as its inner width, a multiple of the hidden one, asks for."""
    times = next((value for name in ("mamba_expand", "expand") if isinstance(value := field_of(small, name), int)), 2)
    inner = times * _NARROW["hidden_size"]
    sizes = dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8)
    # Zamba's, of no size of their own, are computed head by head and token by token
    sizes["n_mamba_heads"] = 8 if field_of(small, "mamba_headdim") else 2
    sizes |= dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), inner // 8)
    sizes |= dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16)
    sizes |= dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16) | {"mamba_d_ssm": inner}
    sizes |= dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4)
    if field_of(small, "attention_hidden_size"):  # Zamba's: of twice the hidden width
        width = 2 * _NARROW["hidden_size"]
        sizes |= {"attention_hidden_size": width, "attention_head_dim": width // _NARROW["num_attention_heads"]}
    for name in ("mamba_n_groups", "mamba_ngroups", "n_groups"):
        value = field_of(small, name)
        sizes |= {name: min(value, 2)} if isinstance(value, int) else {}
    if field_of(small, "num_attention_heads") is None and isinstance(field_of(small, "state_size"), int):
        sizes["intermediate_size"] = inner  # of mamba itself, all of whose heads are states
        if isinstance(field_of(small, "num_heads"), int):
            sizes |= {"num_heads": 8, "head_dim": inner // 8}
    return sizes


def _set(small: Any, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        value = field_of(small, name)
        if not value and name not in _SPECIAL:
            continue
        with contextlib.suppress(AttributeError):  # a property computed from other fields
            setattr(small, name, [size] * len(value) if isinstance(value, list) else size)


def field_of(config: Any, name: str) -> Any:
    """A field of the config; None where it is missing, or differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises an error of its own for fields that differ by layer
        return None
