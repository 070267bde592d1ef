"""LoRA without PEFT's cast of inputs under autocast: the same bits in loss, gradients and saved adapters, less held."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sft_play.training.model.model_loading import cast_outside_autocast

pytestmark = pytest.mark.build
KINDS: dict[str, dict] = {"lora": {}, "dropout": {"lora_dropout": 0.3}, "dora": {"use_dora": True}, "qlora": {}}


def adapted(folder: Path, kind: str, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A bf16 (or NF4) model with fp32 adapters that are not zero, in training mode."""
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    packed = nf4 if kind == "qlora" else None
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=packed)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **KINDS[kind])
    model = get_peft_model(base, config, autocast_adapter_dtype=True)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) / 8
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train()


def trained(model: Any, out: Path, *, autocast: torch.dtype, checkpointing: bool) -> tuple[list[Any], list[Any], str]:
    """Losses of three steps, gradients of the last, and the digest of the saved adapter."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    steps = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    torch.manual_seed(3)
    ids = torch.randint(3, 300, (3, 2, 17), generator=torch.Generator().manual_seed(4))
    losses, gradients = [], []
    for batch in ids:
        with torch.autocast("cpu", dtype=autocast):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        steps.step()
        steps.zero_grad()
        losses.append(float(loss.detach()))
    model.save_pretrained(out)
    return losses, gradients, hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("autocast", "checkpointing"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_loss_gradients_and_saved_adapters_are_the_same_bits(tmp_path, tiny_llama, kind, autocast, checkpointing):
    found = []
    for without_cast in (False, True):
        model = adapted(tiny_llama, kind, dtype=autocast)
        if without_cast:
            changed = cast_outside_autocast(model)
            assert changed == (0 if kind in ("dora", "dropout") else 14)
        found.append(trained(model, tmp_path / str(without_cast), autocast=autocast, checkpointing=checkpointing))
    (losses, gradients, saved), (losses_2, gradients_2, saved_2) = found
    assert (losses, saved, len(set(losses)), len(gradients) >= 28) == (losses_2, saved_2, 3, True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, gradients_2, strict=True))
    assert all(float(one.abs().max()) > 0 for one in gradients)


def test_inputs_are_cast_as_before_where_autocast_is_off(tiny_llama):
    """Generation runs PEFT's base model, which the trainer has not put under autocast."""
    model = adapted(tiny_llama, "lora").eval()
    ids = torch.arange(3, 20)[None]
    answers = []
    for _ in range(2):
        answers.append(model.generate(input_ids=ids, max_new_tokens=8, do_sample=False).tolist())
        cast_outside_autocast(model)
    assert answers[0] == answers[1]


@contextlib.contextmanager
def held_bytes(model: Any) -> Iterator[dict[int, int]]:
    """What is kept for a backward pass meanwhile, but for weights: bytes by storage."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    held: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield held


def test_targets_that_read_one_input_hold_it_once(tiny_llama):
    """Seven copies of inputs become three: of q/k/v, gate/up and down; o reads what attention holds anyway."""
    kept, ids = [], torch.arange(2 * 17)[None] + 3
    for without_cast in (False, True):
        model = adapted(tiny_llama, "lora")
        if without_cast:
            cast_outside_autocast(model)
        with held_bytes(model) as held, torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        kept.append(sum(held.values()))
        del loss
    copies, shared = 2 * (3 * 64 + 64 + 2 * 64 + 128), 2 * (64 + 64 + 128)  # bytes of a token in a layer
    assert kept[0] - kept[1] == (copies - shared) * 34 * 2
