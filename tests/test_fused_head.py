"""Log-probabilities that a loss is made of are those of the class's own logits, over whole ones and by TRL's head; and
the language model of an image-text class computes on text what the whole class does."""

import copy
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from benchmarks.registry import CannotBuild, model_types, small_base, wide_config
from sft_play.finished.respond import load_model_folder
from sft_play.models.families import MODEL_FAMILIES
from sft_play.trace.confirm import load_planned_shape
from sft_play.training.checkpoints.full_state_dict import load_adapter
from sft_play.training.checkpoints.model_saving import expand_to_full_class, write_weights
from sft_play.training.class_checks import adapter_trial
from sft_play.training.class_checks.adapter_trial import linear_layers
from sft_play.training.class_checks.small_model import measure_small_model, small_config, small_model
from sft_play.training.loop.loop_checkpoints import CheckpointedLoop
from sft_play.training.model import language_model
from sft_play.training.model.fused_head import fused_head
from sft_play.training.model.language_model import locate_text_tower, prepare_text_config
from tests.test_merge import qwen3_5_moe_with_images

pytestmark = pytest.mark.build
BEFORE_5_24 = Version(transformers.__version__) < Version("5.24")
OTHERS = {"inkling_text", "modernbert-decoder"} | ({"inkling2_text"} if BEFORE_5_24 else set())
"""Classes with logits of their own, of those that a run trains. Inkling 2 cuts its logits up to transformers 5.23; its
head has no more rows than words since."""
FEW = ("gemma3_text", "cohere2", "falcon_h1", "hyperclovax", *sorted(OTHERS))


def labelled(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (2, 16), generator=draw)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.4, -100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_logits_give_what_trls_head_gives(dtype: torch.dtype) -> None:
    """On a class that TRL knows: loss, gradients, entropy, right words and mask."""
    model = small_model(small_config(AutoConfig.for_model("llama")), "sdpa", False).to(dtype)
    ids, labels = labelled(0)

    def step(whole: bool) -> tuple[Any, torch.Tensor]:
        model.zero_grad()
        with fused_head(model, from_class_logits=whole):
            output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        output.loss.backward()
        return output, torch.cat([one.grad.flatten().float() for one in model.parameters()])

    (trls, theirs), (ours, own) = map(step, (False, True))
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for name in ("loss", "log_probs"):
        torch.testing.assert_close(getattr(ours, name).float(), getattr(trls, name).float(), **close)
    assert torch.equal(ours.label_mask, trls.label_mask)
    assert float((own - theirs).norm() / theirs.norm()) < (1e-5 if dtype == torch.float32 else 0.02)
    logits = model(input_ids=ids).logits[:, :-1].float()
    assert torch.equal(ours.is_top1, (logits.argmax(-1) == labels[:, 1:]) & ours.label_mask)
    entropy = torch.distributions.Categorical(logits=logits).entropy() * ours.label_mask
    torch.testing.assert_close(ours.entropy, entropy, **close)


@pytest.mark.parametrize("kind", sorted(OTHERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_with_logits_of_its_own_has_its_own_loss(kind: str, dtype: torch.dtype) -> None:
    small = small_config(AutoConfig.for_model(kind))
    if getattr(small, "unpadded_vocab_size", None):
        small.unpadded_vocab_size = 100
    model = small_model(small, "flash", False)
    ids, labels = labelled(7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        own = model(input_ids=ids, labels=labels).loss.float()
        with fused_head(model, from_class_logits=True):
            ours = model(input_ids=ids, labels=labels, fused_lm_head=True).loss.float()
        with fused_head(model):
            trls = model(input_ids=ids, labels=labels, fused_lm_head=True).loss.float()
    torch.testing.assert_close(ours, own, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0)
    assert abs(float(trls - own)) > 0.01


def shows(kind: str) -> bool | None:
    """Whether a small model of the class has logits of its own; None where none computes, or nothing trains it."""
    try:
        config = small_base(kind).config
        text = prepare_text_config(config, config.to_dict())
        found, _ = measure_small_model(text, adapter_trial._try_head)
    except CannotBuild:
        return None
    return None if found is None else bool(found)


@pytest.mark.parametrize("kind", FEW)
def test_a_class_is_known_by_a_small_model_of_it(kind: str) -> None:
    assert shows(kind) == (kind in OTHERS)


@pytest.mark.slow
def test_of_all_classes_of_the_table_none_has_logits_of_its_own() -> None:
    found = {kind: shows(kind) for kind in model_types()}
    assert {kind for kind, is_own in found.items() if is_own and kind in MODEL_FAMILIES} == set()
    assert {kind for kind, is_own in found.items() if is_own} >= OTHERS


def test_a_run_of_such_a_class_is_planned_over_whole_logits(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    assert load_planned_shape(wide_config("modernbert-decoder") | {"vocab_size": 512}, name="m").has_custom_logits
    assert not load_planned_shape(wide_config("llama") | {"vocab_size": 512}, name="m").has_custom_logits


UNSCALED = {"aya_vision", "cohere2_vision"}
"""Their whole classes leave out the factor that their language model has in its own class (transformers 5.23)."""
SCALED = ("granite_docling", "mistral_large4", "muse_glimmer", "gemma3")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in SCALED else [pytest.mark.slow])
     for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES],
)  # fmt: skip
def test_a_language_model_answers_text_as_its_whole_class(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Logits of the class that is trained, with an image-text class's weights, and log-probabilities of its loss."""
    caplog.set_level(logging.ERROR)
    try:
        whole = small_base(kind).eval()
        config = prepare_text_config(copy.deepcopy(whole.config), whole.config.to_dict())
        config.tie_word_embeddings = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tower = locate_text_tower(whole.config, model)
        assert tower is not None
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
        ids, _ = labelled(3)
        with torch.no_grad():
            theirs = whole(input_ids=ids, use_cache=False).logits.float()
        assert theirs.shape[:2] == ids.shape  # an encoder reads the text of others
    except (CannotBuild, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        pytest.skip(f"no text passes a small model of it alone: {error}"[:160])
    weights = whole.state_dict()
    model.load_state_dict({name: weights[tower.to_full_name(name)] for name in model.state_dict()})
    with torch.no_grad():
        ours = model(input_ids=ids, use_cache=False).logits.float()
        with fused_head(model, from_class_logits=adapter_trial.has_custom_logits(config)):
            log_probs = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    ours, theirs = (ours, theirs * config.logit_scale) if kind in UNSCALED else (ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    own = theirs[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs, own, rtol=1e-3, atol=1e-3)


# --- the language model of an image-text class, computing the same and found in its files ---------------------------
WITHOUT_HEAD = (
    "cosmos3_omni", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "granite_docling", "mistral_large4", "molmo2",
    "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Classes whose decoders get their head here."""
WITH_HEAD = ("gemma3", "idefics3", "kosmos-2", "llama4", "minimax_m3_vl", "mistral3", "qwen3_5", "unlimited_ocr")
OFTEN = ("qwen2_5_vl", "qwen3_vl", "mistral3", "idefics3")


def logits(model):
    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in (*WITHOUT_HEAD, *WITH_HEAD)]
)
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
    alone.sft_tower = locate_text_tower(whole.config, alone)
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
    alone = AutoModelForCausalLM.from_config(prepare_text_config(whole.config))
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
        alone = AutoModelForCausalLM.from_config(prepare_text_config(copy.deepcopy(whole.config)))
    tower = locate_text_tower(whole.config, alone)
    base = {in_vllm(kind, name.removesuffix(".weight")) for name in whole.state_dict()}
    layers = linear_layers(alone)
    assert len(layers) > 4
    for layer in layers:
        found = in_vllm(kind, tower.to_full_name(f"{language_model.PEFT_PREFIX}{layer}"))
        assert found.startswith("language_model.model.layers."), layer
        assert found in base, layer
