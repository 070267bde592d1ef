"""Log-probabilities that a loss is made of are those of the class's own logits, over whole ones and by TRL's head."""

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from benchmarks.registry import CannotBuild, model_types, small_base, wide_config
from sft_play.models.families import MODEL_FAMILIES
from sft_play.trace.confirm import load_planned_shape
from sft_play.training.class_checks import adapter_trial
from sft_play.training.class_checks.small_model import measure_small_model, small_config, small_model
from sft_play.training.model.fused_head import fused_head
from sft_play.training.model.language_model import locate_text_tower, prepare_text_config

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
    found: list[Any] = []
    for whole in (False, True):
        model.zero_grad()
        with fused_head(model, from_class_logits=whole):
            output = model(input_ids=ids, labels=labels, fused_lm_head=True)
        output.loss.backward()
        gradient = torch.cat([one.grad.flatten().float() for one in model.parameters()])
        found.append((output, gradient))
    (trls, theirs), (ours, own) = found
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
