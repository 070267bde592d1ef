"""One of two ranks: tiny models divided over both, against the same models whole. Writes what it found as JSON.

torchrun --standalone --nproc-per-node 2 --module tests.ranks_mesh KINDS OUT

KINDS is JSON: which types are divided.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sft_play.errors import ModelError
from sft_play.planner.layout import Layout
from sft_play.training.class_checks.adapter_trial import linear_layers
from sft_play.training.loop.rows import Collator
from sft_play.training.model import attention_functions, tensor_parallel
from tests.ranks import write_found

RANKS = 2
NOT_DIVIDED = ("apertus", "phi3", "olmo2", "mixtral", "qwen3_moe")
"""Types whose plan leaves parameters out, or gathers what it divides."""
CPU = torch.device("cpu")


def tiny(kind: str, **changes: Any) -> Any:
    """A model of a type with two layers, four heads and, where it knows such, two key heads; nothing is dropped."""
    settings = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip
    config = CONFIG_MAPPING[kind](**settings)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    has_sdpa = kind not in ("gemma2", "vaultgemma")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if has_sdpa else "eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)  # norms of exactly one would hide much
    return model


def with_adapters(model: Any) -> Any:
    """Adapters on every linear layer, with a lora_B that changes something."""
    targets = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second padded; loss on its tokens alone."""
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 9:] = -100
    return ids, labels


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by name, and none left."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
            parameter.grad = None
    return found


def apart(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of two gradients of the same name; infinite where names differ."""
    if set(wanted) != set(found):
        return float("inf")
    pairs = [(one, found[name]) for name, one in wanted.items()]
    return max(((one - other).abs().max() / one.abs().max().clamp(min=1e-7)).item() for one, other in pairs)


def divided(kind: str, *, adapters: bool, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """A type over a tensor-parallel group: how far loss and gradients are from those of the whole model, and the share
    of its weights that a rank holds."""
    model = tiny(kind).to(dtype)
    plan = tensor_parallel.tensor_parallel_plan(model)
    model = (with_adapters(model) if adapters else model).train()
    ids, labels = rows()
    whole = sum(parameter.numel() for parameter in model.parameters())
    alone = model(input_ids=ids, labels=labels).loss
    alone.backward()
    wanted = gradients(model)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))["tp"]
    tensor_parallel.divide_model(model, plan, mesh, device=CPU)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    away = abs(loss.item() / alone.item() - 1)
    return {"loss": away, "gradients": apart(wanted, gradients(model)), "held": held / whole}


def shared(kind: str, **changes: Any) -> dict[str, float]:
    """A type whose rows both ranks share: the same distances."""
    model = tiny(kind, **changes).train()
    ids, labels = rows()
    scored = int((labels[:, 1:] != -100).sum())

    def loss_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / scored

    alone = loss_of(model(input_ids=ids).logits[:, :-1], labels[:, 1:])
    alone.backward()
    wanted = gradients(model)
    model.set_attn_implementation(attention_functions.ULYSSES_ATTENTION)
    attention_functions.join_context_parallel_group(Layout("fsdp_cp", 1, RANKS, context_parallel=RANKS), CPU)
    collate = Collator(0, context_parallel_rank=dist.get_rank(), context_parallel_size=RANKS)
    lengths = (13, 9)
    table = [{"input_ids": ids[n, :size].numpy(), "labels": labels[n, :size].numpy()} for n, size in enumerate(lengths)]
    batch = collate(table)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = loss_of(logits, batch["shift_labels"])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    found = {"loss": abs(total.item() / alone.item() - 1), "gradients": apart(wanted, gradients(model))}
    with attention_functions.full_rows_attention(model), torch.no_grad():
        whole = model(input_ids=ids).logits
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found["whole_rows"] = (whole - model(input_ids=ids).logits).abs().max().item()
    return found


def refused(kind: str) -> str:
    """What is said of a type that cannot be divided; empty where it can."""
    try:
        tensor_parallel.tensor_parallel_plan(tiny(kind))
    except ModelError as error:
        return str(error)
    return ""


def main(kinds: list[str], out: Path) -> None:
    """Everything, written by rank 0."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"divided": {}, "shared": {}, "refused": {}}
    for kind in kinds:
        for mode, adapters in {"full": False, "lora": True}.items():
            found["divided"][f"{kind} {mode}"] = divided(kind, adapters=adapters)
    found["divided"]["qwen3 full bf16"] = divided("qwen3", adapters=False, dtype=torch.bfloat16)
    found["shared"] = {
        "llama": shared("llama"), "qwen3": shared("qwen3"), "one key head": shared("qwen2", num_key_value_heads=1),
        "gpt2": shared("gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=64),
        "mistral": shared("mistral", sliding_window=None),
    }  # fmt: skip
    found["refused"] = {kind: refused(kind) for kind in NOT_DIVIDED}
    write_found(found, out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
