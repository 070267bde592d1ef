"""Measure how fast this machine's host starts kernels, in a process of its own: two narrow layers
with adapters, and a pass of eight tokens.

    python -m sft_play.trace.host_probe DEVICE_NAME MEASURED_BY

Keeps the figure for later plans under the name of the device. Ends with torch's error where it sees
no GPU.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from sft_play.machine.host_speed import save_host_speed
from sft_play.planner.pass_work import FORWARD_OPERATOR_WEIGHT
from sft_play.process.signals import watch_parent
from sft_play.trace.pass_work import KernelLog
from sft_play.training.measure.monitor import SHORT_TOKENS, shortest_seconds
from sft_play.training.model.model_loading import cast_outside_autocast
from sft_play.training.model.streamed_base import measure_bus_rate

LAYERS, PASSES = 2, 15


def build_probe(device: torch.device) -> Callable[[], Any]:
    """A forward pass of the small model, which returns its loss."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    base = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False))
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    # PEFT makes its adapters in fp32
    model = get_peft_model(base.to(device, torch.bfloat16), lora).train()
    cast_outside_autocast(model)
    tokens = torch.arange(SHORT_TOKENS, device=device)[None]

    def forward() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=tokens, labels=tokens).loss

    return forward


def measure_operator_s(device: torch.device) -> float:
    """Seconds of the host for an operator of a backward pass."""
    forward = build_probe(device)
    forward().backward()  # what is built at the first call
    with KernelLog() as log:
        loss = forward()
        forward_count = len(log.kernels)
        loss.backward()
    pass_s = shortest_seconds(lambda: forward().backward(), device, count=PASSES)
    backward_count = len(log.kernels) - forward_count
    return float(pass_s / (FORWARD_OPERATOR_WEIGHT * forward_count + backward_count))


if __name__ == "__main__":
    watch_parent()
    card = torch.device("cuda")
    save_host_speed(
        sys.argv[1],
        measure_operator_s(card),
        measured_by=sys.argv[2],
        bus_bytes_per_s=measure_bus_rate(card),
    )
