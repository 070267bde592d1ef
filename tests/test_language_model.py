"""On text the language model of an image-text class computes what the whole class does, and is found in its files."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.registry import small_base
from sft_play.finished.load import load_model_folder
from sft_play.training.checkpoints.full_state_dict import load_adapter
from sft_play.training.checkpoints.model_saving import expand_to_full_class, write_weights
from sft_play.training.class_checks.adapter_trial import linear_layers
from sft_play.training.loop.loop_checkpoints import CheckpointedLoop
from sft_play.training.model import language_model
from tests.test_merge import qwen3_5_moe_with_images

WITHOUT_HEAD = (
    "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "granite_docling", "mistral_large4", "molmo2",
    "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Classes whose decoders get their head here."""
WITH_HEAD = (
    "gemma3", "idefics3", "kosmos-2", "llama4", "minimax_m3_vl", "mistral3", "qwen3_5", "unlimited_ocr",
)  # fmt: skip
OFTEN = ("qwen2_5_vl", "qwen3_vl", "mistral3", "idefics3")


def logits(model):
    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


KINDS = [
    pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in sorted({*WITHOUT_HEAD, *WITH_HEAD})
]


@pytest.mark.parametrize("kind", KINDS)
def test_on_text_both_compute_the_same(kind, tmp_path):
    small_base(kind).save_pretrained(tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    alone = load_model_folder(tmp_path, dtype=torch.float32)
    assert sum(one.numel() for one in alone.parameters()) < sum(one.numel() for one in whole.parameters())
    torch.testing.assert_close(logits(alone), logits(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["molmo2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("nemotron_h_omni", "minimax_m3_vl"))]
)
def test_trained_weights_are_written_as_the_whole_class_reads_them(kind, tmp_path):
    """Tensors that files hold in pieces, or under other names, take the place of the base's."""
    whole = small_base(kind)
    whole.save_pretrained(tmp_path / "base")
    alone = load_model_folder(tmp_path / "base", dtype=torch.float32)
    alone.sft_tower = language_model.locate_text_tower(whole.config, alone)
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    write_weights(alone, tmp_path / "saved")
    expand_to_full_class(alone, tmp_path / "saved", tmp_path / "base")
    again, found = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not found["missing_keys"] | found["unexpected_keys"]
    torch.testing.assert_close(logits(again.eval()), logits(alone), rtol=1e-5, atol=1e-5)
    others = {name: one for name, one in whole.named_parameters() if "vision" in name}
    assert others
    assert all(torch.equal(one, again.get_parameter(name)) for name, one in others.items())


def test_a_checkpoint_s_adapter_is_read_under_its_own_names(tmp_path):
    """PEFT renames an adapter's tensors as those of the base's published files, and loses some (Mistral Large 4)."""
    whole = small_base("mistral_large4")
    torch.manual_seed(1)
    alone = AutoModelForCausalLM.from_config(language_model.prepare_text_config(whole.config))
    model = get_peft_model(alone, LoraConfig(r=2, target_modules=["gate_proj", "o_proj"]))
    own = {name: one for name, one in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        wanted = {name: one.normal_().clone() for name, one in own.items()}
        model.save_pretrained(tmp_path)
        for one in own.values():
            one.zero_()
    trainer = SimpleNamespace(model=model, is_fsdp_enabled=False)
    CheckpointedLoop._load_from_checkpoint(trainer, str(tmp_path))
    assert len(own) > 8
    assert all(torch.equal(one, wanted[name]) for name, one in own.items())


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("kind", ["laguna", "llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_peft_would_lose_are_named_and_loaded(kind, dtype, tmp_path):
    """A base of text too: chat, eval and serve read its adapters."""
    model = small_base(kind).to(dtype)
    base = copy.deepcopy(model)
    lora = LoraConfig(r=2, target_modules=["o_proj", "gate_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(model, lora)
    model.save_pretrained(tmp_path)
    wanted = {name: one for name, one in model.named_parameters() if "lora_" in name}
    by_peft = dict(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).named_parameters())
    lost = {name for name, one in wanted.items() if not torch.equal(one, by_peft[name].to(one.dtype))}
    named = language_model.names_lost_by_peft(base, load_file(tmp_path / "adapter_model.safetensors"))
    assert {name.replace(".weight", ".default.weight") for name in named} == lost
    assert bool(lost) == (kind == "laguna")
    loaded = dict(load_adapter(base, tmp_path).named_parameters())
    assert all(torch.equal(one, loaded[name].to(one.dtype)) for name, one in wanted.items())


@pytest.mark.parametrize("places", [(("model.", "model.language_model."),), (("", "language_model."),)])
def test_a_name_in_the_whole_class_and_back(places):
    tower, draw = language_model.TextTower(None, places), random.Random(4)
    for _ in range(300):
        rest = ".".join(draw.choices(["layers", "3", "self_attn", "q_proj", "weight"], k=draw.randrange(1, 5)))
        name = draw.choice(["", language_model.PEFT_PREFIX]) + "model." + rest
        whole = tower.to_full_name(name)
        assert whole != name
        assert tower.to_text_name(whole) == name
        assert tower.to_full_name(whole) == whole
    assert tower.to_full_name("lm_head.weight") == ("" if places[0][0] else "language_model.") + "lm_head.weight"
    assert {**language_model.LEGACY_KEY_MAPPING}.items() <= tower.key_mapping.items()


_HEAD = {"lm_head.": "language_model.lm_head."}
_LANGUAGE = {"model.language_model.": "language_model.model."}
VLLM = {
    "gemma3": {**_LANGUAGE, "model.vision_tower.": "vision_tower.",
               "model.multi_modal_projector.": "multi_modal_projector.", **_HEAD},
    "qwen2_5_vl": {**_LANGUAGE, "model.visual.": "visual.", **_HEAD, "model.": "language_model.model."},
    "qwen3_vl": {"model.visual.": "visual.", **_HEAD, **_LANGUAGE},
    "qwen3_5_moe": {"model.visual.": "visual.", **_HEAD, **_LANGUAGE},
}  # fmt: skip
"""What vLLM turns the beginnings of a class's names into, weights' and adapters' alike: `hf_to_vllm_mapper` of
https://github.com/vllm-project/vllm/tree/main/vllm/model_executor/models (read 2026-11-26)."""


def in_vllm(kind: str, name: str) -> str:
    """The name of a module or weight in vLLM: the first rule that fits, after PEFT's prefix (vllm/lora/utils.py)."""
    name = name.removeprefix(language_model.PEFT_PREFIX)
    return next((new + name[len(old) :] for old, new in VLLM[kind].items() if name.startswith(old)), name)


@pytest.mark.parametrize("kind", sorted(VLLM))
def test_vllm_finds_adapters_where_it_puts_the_base_s_weights(kind):
    whole = qwen3_5_moe_with_images() if kind == "qwen3_5_moe" else small_base(kind)
    with torch.device("meta"):
        alone = AutoModelForCausalLM.from_config(language_model.prepare_text_config(copy.deepcopy(whole.config)))
    tower = language_model.locate_text_tower(whole.config, alone)
    base = {in_vllm(kind, name.removesuffix(".weight")) for name in whole.state_dict()}
    layers = linear_layers(alone)
    assert len(layers) > 4
    for layer in layers:
        found = in_vllm(kind, tower.to_full_name(f"{language_model.PEFT_PREFIX}{layer}"))
        assert found.startswith("language_model.model.layers."), layer
        assert found in base, layer
