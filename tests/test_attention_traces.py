"""Every attention, mask and loss that can be chosen is traced: the tables are read from the schema and the settings."""

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sft_play.config.load import config_from_text
from sft_play.config.schema import ModelConfig
from sft_play.errors import ModelError
from sft_play.models.config_json import load_model_shape
from sft_play.planner.memory.step_memory import Step
from sft_play.planner.precision import Precision
from sft_play.trace import confirm
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.step import record_step, trace_step
from sft_play.trace.storages import ALLOC, StorageLog
from sft_play.training.prepare.model_spec import choose_attention
from tests.test_trace import GEMMA3, GPT2, LLAMA

pytestmark = pytest.mark.build

CHOICES = get_args(get_args(get_type_hints(ModelConfig)["attn_implementation"])[0])
ATTENTIONS = tuple(name for name in CHOICES if name != "auto")
MASKS = get_args(get_type_hints(StepSettings)["mask"])

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": (LLAMA, ATTENTIONS),
    "gemma3: windows": (GEMMA3, ATTENTIONS),
    "gpt2": (GPT2, ATTENTIONS),
    "gemma2: softcap": ({"model_type": "gemma2", "sliding_window": 16, **SIZES}, ("eager", "flash_attention_2")),
    "gpt-oss: sinks": ({"model_type": "gpt_oss", "sliding_window": 16, **SIZES, **ROUTED}, ("eager",)),
    "mixtral: experts": ({"model_type": "mixtral", **SIZES, **ROUTED}, ATTENTIONS),
    "deepseek: latent": (
        {"model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 32,
         "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
         "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
         "num_experts_per_tok": 2},
        ATTENTIONS,
    ),
}  # fmt: skip
"""A small model of each arrangement of attention, and what its class runs with; the rest it refuses."""
FOUR_BITS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def settings(family: str = "llama", **changes: Any) -> StepSettings:
    base = StepSettings(model=FAMILIES[family][0], mode="full", micro_batch=2, seq_len=32, optimizer_steps=1)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_is_traced_on_every_kind_of_rows(attention: str, mask: str) -> None:
    found = trace_step(settings(attention=attention, mask=mask))
    assert set(found.phases) >= {"forward", "backward", "optimizer"}
    assert found.allocated > found.resident > 0


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("family", "attention"), [(name, one) for name, (_, can) in FAMILIES.items() for one in can])
def test_every_arrangement_of_attention_is_traced(family: str, attention: str, mask: str) -> None:
    changes = {"mode": "qlora", "peft": FOUR_BITS} if family.startswith(("gemma3", "gpt-oss")) else {}
    assert trace_step(settings(family, attention=attention, mask=mask, eval_batch=1, **changes)).allocated > 0


def test_what_a_class_does_not_have_is_refused_in_words() -> None:
    for family, (_, can) in FAMILIES.items():
        for attention in set(ATTENTIONS) - set(can):
            with pytest.raises(TraceUnavailable, match=f"has no {attention}: take eager or auto"):
                trace_step(settings(family, attention=attention))


def births(**changes: Any) -> Counter[int]:
    """How often a storage of so many bytes is born in one forward and backward pass."""
    log = record_step(settings(checkpointing=False, loss="logits", **changes))
    return Counter(number for kind, _, number, _ in log.events if kind == ALLOC)


def test_padded_rows_are_gathered_for_flash_attention_and_scattered_back() -> None:
    """Forward: copies of q, k, v without padding and the output as rows; backward: one of each once more."""
    full = births(attention="flash_attention_2", mask="ones")
    padded = births(attention="flash_attention_2", mask="padded")
    tokens, layers = 2 * 32, 3
    query, key = 2 * tokens * 4 * 16, 2 * tokens * 2 * 16
    assert padded[query] - full[query] >= 4 * layers  # q and the output, and both gradients
    assert padded[key] - full[key] >= 4 * layers  # k and v, and both gradients
    assert padded[8 * tokens] - full[8 * tokens] >= layers  # places of the tokens
    bare = births(attention="flash_attention_2", mask="none")
    differing = [size for size in full | bare if full[size] != bare[size]]
    assert max(differing, default=0) <= 8 * tokens  # a mask of ones is read and left out


def test_packs_of_flash_attention_are_one_row_without_a_square() -> None:
    length = 48
    square = 2 * length * length  # a boolean mask of two rows
    assert births(attention="sdpa", mask="packed", seq_len=length)[square] > 0
    flat = births(attention="flash_attention_2", mask="packed", seq_len=length)
    assert not {square, (2 * length) ** 2} & set(flat)


@pytest.mark.parametrize(
    ("packing", "padded", "mask"), [("best_fit", True, "packed"), ("none", True, "padded"), ("none", False, "ones")]
)
def test_the_plans_rows_are_the_traces_rows(packing: str, padded: bool, mask: str) -> None:
    config = config_from_text(f"model: {{name: x}}\ndata: {{packing: {packing}}}\n", name="run")
    shape, precision = load_model_shape("Qwen/Qwen2.5-0.5B"), Precision("float32", "float32", "")
    assert confirm.step_settings(config, {}, shape, precision, Step(2, 1, 64, padded=padded)).mask == mask


def test_flash_attention_is_refused_where_transformers_would_take_another_kernel(monkeypatch) -> None:
    """gpt-oss lists the kernels that know its sinks; flash-attn 2 is not among them."""
    from transformers import GptOssForCausalLM

    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    config = config_from_text("model: {name: x, attn_implementation: flash_attention_2}", name="run")
    with pytest.raises(ModelError, match="runs only with other kernels"):
        choose_attention(config, GptOssForCausalLM)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_boolean_index_at_any_place_has_as_many_elements_as_the_mask(before):
    """GLM 5.3 picks pools of keys by `keys[:, keep]`; a fake mask has no values."""
    with FakeTensorMode(), StorageLog():
        keys, keep = torch.zeros(2, 3, 5, 7), torch.zeros((2, 3, 5)[before:], dtype=torch.bool)
        shape = keys[(slice(None),) * before + (keep,)].shape
    assert shape == (*(2, 3)[:before], keep.numel(), 7)
