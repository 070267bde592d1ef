"""LoRA layers that read one input train by one function: PEFT's numbers, with fewer operators, and PEFT's own forward
wherever that is not what is asked for."""

import itertools
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.config.load import config_from_text
from sft_play.planner.kernels import groups_adapters
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.precision import Precision
from sft_play.trace.pass_work import KernelLog
from sft_play.training.class_checks.replaced_code import check_grouped_adapters
from sft_play.training.model.grouped_adapters import GroupedAdapters, find_shared_inputs, group_adapters
from tests.test_adapter_inputs import adapted

pytestmark = pytest.mark.build
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATES = ("mlp.gate_proj", "mlp.up_proj")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("llama", {GATES, QKV}), ("gpt_oss", {QKV}), ("phi3", set()), ("gpt2", set()), ("gpt_neox", set()),
        ("qwen3_next", {GATES, QKV, ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
                        tuple(f"mlp.shared_expert.{one}_proj" for one in ("gate", "up"))} - {GATES}),
    ],
)  # fmt: skip
def test_layers_that_read_one_tensor_are_found_on_the_class(kind, shared):
    assert set(find_shared_inputs(AutoConfig.for_model(kind))) == shared


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "mixtral", "phi3"])
def test_a_small_model_trains_as_with_pefts_forward(kind, is_quantised):
    attention, options = "eager" if kind in ("gpt_oss", "gemma2") else "sdpa", {"is_quantised": is_quantised}
    for dtype in (torch.float32, torch.bfloat16):
        check = check_grouped_adapters(
            AutoConfig.for_model(kind), attention=attention, device=CPU, dtype=dtype, **options
        )
        assert check.fp32_difference < 5e-6
        assert check.half_precision_ratio < 1.3


def test_a_class_without_plain_layers_keeps_pefts():
    with pytest.raises(ValueError, match="no plain adapter"):
        check_grouped_adapters(AutoConfig.for_model("gpt2"), attention="eager", device=CPU, dtype=torch.float32)


class Block(GradientCheckpointingLayer):
    """Linear layers a0, a1, ... that each read one of three tensors made from the input; `reads` says which."""

    def __init__(self, reads: list[int], draw: random.Random) -> None:
        super().__init__()
        self.reads = reads
        for place in range(len(reads)):
            self.add_module(f"a{place}", nn.Linear(12, draw.choice((4, 7, 16)), bias=draw.random() < 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = [x * (1 + one) for one in range(3)]
        outputs = [layer(inputs[read]) for layer, read in zip(self.children(), self.reads, strict=True)]
        return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("seed", range(12))
def test_random_blocks_train_as_with_pefts_forward(seed):
    """Some share inputs and are said to, some are said to and do not, with ranks and scales of their own."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    reads = [draw.randrange(3) for _ in range(draw.randint(1, 6))]
    model = nn.Sequential(Block(reads, draw))
    names = [f"0.a{place}" for place in range(len(reads))]
    options: dict[str, Any] = {
        "rank_pattern": {name: draw.choice((2, 5)) for name in names if draw.random() < 0.4},
        "alpha_pattern": {name: 3 for name in names if draw.random() < 0.3},
        "use_rslora": draw.random() < 0.5,
    }
    model = get_peft_model(model, LoraConfig(target_modules=names, r=3, lora_alpha=4, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    x = torch.randn(2, 5, 12, requires_grad=draw.random() < 0.7)
    weight = torch.randn(model(x).shape)

    def computed() -> list[torch.Tensor]:
        model.zero_grad()
        leaf = x.detach().requires_grad_(x.requires_grad)
        output = model(leaf)
        (output * weight).sum().backward()
        gradients = [one.grad for one in model.parameters() if one.requires_grad]
        return [output.detach(), *gradients, *([leaf.grad] if x.requires_grad else [])]

    expected = computed()
    said = [0] * len(reads) if draw.random() < 0.3 else reads
    shared = [tuple(f"a{place}" for place, read in enumerate(said) if read == one) for one in range(3)]
    grouped = group_adapters(model, shared, dtype=x.dtype)
    grouped.refresh_copies()
    for mine, pefts in zip(computed(), expected, strict=True):
        torch.testing.assert_close(mine, pefts, rtol=1e-5, atol=1e-5)
    grouped.remove()
    assert all(torch.equal(mine, pefts) for mine, pefts in zip(computed(), expected, strict=True))


def losses(model: Any, grouped: GroupedAdapters | None, *, checkpointing: bool) -> list[float]:
    """Of three steps under autocast on the same two micro-batches."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-2)
    ids = torch.randint(3, 300, (2, 2, 17), generator=torch.Generator().manual_seed(4))
    found = []
    for _ in range(3):
        if grouped is not None:
            grouped.refresh_copies()
        for batch in ids:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(("kind", "checkpointing"), [*itertools.product(("lora", "qlora"), (False, True))])
def test_steps_follow_the_parameters(tiny_llama, kind, checkpointing):
    """Copies are made anew in each step: losses fall as PEFT's do, and copies that stay behind would not."""
    model = adapted(tiny_llama, kind)
    expected, model = losses(model, None, checkpointing=checkpointing), adapted(tiny_llama, kind)
    base = model.get_base_model()
    grouped = group_adapters(base, find_shared_inputs(base.config), dtype=torch.bfloat16)
    assert sorted(len(group.layers) for group in grouped.groups) == [1] * 4 + [2] * 2 + [3] * 2
    found = losses(model, grouped, checkpointing=checkpointing)
    assert found == pytest.approx(expected, abs=0.02)
    assert expected[-1] < expected[1] - 0.06


def test_every_other_pass_is_pefts_own(tiny_llama):
    """To the bit: without gradients, merged, switched off; before the first step; with arguments of PEFT's."""
    model = adapted(tiny_llama, "lora", dtype=torch.float32)
    ids, base = torch.arange(3, 20)[None], model.get_base_model()
    layer = base.model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features)

    def outputs() -> list[torch.Tensor]:
        found = [layer(x)]
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)
        with model.disable_adapter():
            found.append(model(input_ids=ids).logits)
        model.merge_adapter()
        found.append(model(input_ids=ids).logits)
        model.unmerge_adapter()
        return found

    first, *expected = outputs()
    grouped = group_adapters(base, [QKV, GATES], dtype=torch.float32)
    assert torch.allclose(layer(x), first, atol=1e-5)  # but what merging rounded
    grouped.refresh_copies()
    for group in grouped.groups:  # read by training passes alone
        group.a.zero_()
    changed, *found = outputs()
    assert not torch.allclose(changed, first, atol=1e-2)
    assert all(torch.allclose(mine, pefts, atol=1e-5) for mine, pefts in zip(found, expected, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), [
    ("dropout", torch.bfloat16), ("dora", torch.bfloat16), ("lora", torch.float32),  # autocast casts such a base
])  # fmt: skip
def test_dropout_dora_and_another_dtype_than_the_computations_stay_pefts(tiny_llama, kind, dtype):
    assert group_adapters(adapted(tiny_llama, kind, dtype=dtype), [QKV, GATES], dtype=torch.bfloat16) is None


def test_nothing_is_held_behind_a_pass(tiny_llama):
    """A pass that ends within a group, as for want of memory, holds outputs until the next step, and no longer."""
    model = adapted(tiny_llama, "lora", dtype=torch.float32)
    grouped = group_adapters(model, [QKV, GATES], dtype=torch.float32)
    grouped.refresh_copies()
    model(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    assert all(group.pending_input is None for group in grouped.groups)
    model.get_base_model().model.layers[0].self_attn.q_proj(torch.randn(3, 64))
    assert sum(group.pending_input is not None for group in grouped.groups) == 1
    grouped.refresh_copies()
    assert all(group.pending_input is None for group in grouped.groups)


def test_a_layer_starts_fewer_kernels(tiny_llama):
    model, ids = adapted(tiny_llama, "lora"), torch.arange(3, 20)[None]

    def operators() -> int:
        with KernelLog() as counted:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        model.zero_grad()
        return len(counted.kernels)

    pefts = operators()
    grouped = group_adapters(model, [QKV, GATES], dtype=torch.bfloat16)
    grouped.refresh_copies()
    assert (pefts - operators()) / len(model.get_base_model().model.layers) >= 60


@pytest.mark.parametrize(("words", "precision", "layout", "is_grouped"), [
    ("", "bfloat16", SINGLE, True), ("tuning: {mode: qlora}", "bfloat16", SINGLE, True),
    ("", "bfloat16", Layout("ddp", data_parallel=2), True), ("", "bfloat16", Layout("fsdp", data_parallel=2), False),
    ("", "bfloat16", Layout("zero2", data_parallel=2), False), ("tuning: {mode: full}", "bfloat16", SINGLE, False),
    ("tuning: {mode: lora, lora: {dropout: 0.1}}", "bfloat16", SINGLE, False),
    ("tuning: {mode: lora, lora: {use_dora: true}}", "bfloat16", SINGLE, False),
    ("train: {kernels: none}", "bfloat16", SINGLE, False),
    ("train: {kernels: none, compile: true}", "bfloat16", SINGLE, False),
    ("tuning: {mode: lora}", "float32", SINGLE, False),
])  # fmt: skip
def test_where_a_plan_counts_on_them(words, precision, layout, is_grouped):
    fields = "" if "train:" in words else "train: {kernels: auto}\n"
    config = config_from_text(f"model: {{name: m}}\n{fields}{words}\n", name="x")
    assert groups_adapters(config, Precision(precision, "bfloat16", ""), layout) is is_grouped
