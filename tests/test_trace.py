"""The traced step against real tensors: the same events, the same bytes; every shim against what it stands for."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math

import pytest
import torch
from torch import nn

from sft_play.trace import shims, step, twins
from sft_play.trace.replay import BIRTH, DEATH, MARK
from sft_play.trace.settings import Device, StepSettings, TraceUnavailable
from sft_play.trace.storages import StorageLog
from tests.conftest import ROOT, shared

pytestmark = pytest.mark.build

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
SMALL = StepSettings(model=LLAMA, mode="full", micro_batch=2, seq_len=48, attention="eager")


def phase_peaks(log: StorageLog) -> dict[str, int]:
    """Highest live bytes inside each phase, blocks not rounded."""
    live: dict[object, int] = {}
    phase, current, peaks = "build", 0, {}
    for kind, key, number, _ in log.events:
        if kind == BIRTH:
            live[key] = number
            current += number
        elif kind == DEATH:
            current -= live.pop(key)
        elif kind == MARK:
            phase = f"{key} {number}"
        peaks[phase] = max(peaks.get(phase, 0), current)
    return peaks


def both(settings: StepSettings) -> tuple[dict[str, int], dict[str, int]]:
    """Phase peaks of the step on fake and on real tensors. The first trace of a process makes constants: a dry one."""
    step.record(dataclasses.replace(settings, optimizer_steps=1))
    torch.manual_seed(0)
    return phase_peaks(step.record(settings)[0]), phase_peaks(step.record(settings, real=True)[0])


GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpointing": False},
        {"autocast": None, "checkpointing": False},
        {"mode": "lora", "peft": LORA},
        {"mode": "lora", "peft": LORA, "checkpointing": False, "autocast": None},
        {"mode": "lora", "peft": {**LORA, "use_dora": True}},
        {"mode": "qlora", "peft": LORA},
        {"mode": "qlora", "peft": {**LORA, "use_dora": True}, "checkpointing": False},
        {"mode": "lora", "peft": {**LORA, "lora_dropout": 0.1}, "reentrant": True},
        {"model": {**LLAMA, "tie_word_embeddings": True}},
        {"model": {**LLAMA, "tie_word_embeddings": True}, "loss": "logits", "holds_outputs": True},
        {"model": {**LLAMA, "num_key_value_heads": 4}, "loss": "logits_shifted", "optimizer": "adamw_foreach"},
        {"model": GEMMA3},
        {"model": GEMMA3, "mode": "lora", "peft": LORA, "eval_batch": 4},
        {"grad_accum": 3, "checkpointed_layers": 2},
        {"weights": "float32", "autocast": "bfloat16", "optimizer": "sgd"},
        {"optimizer": "adafactor"},
        {"mask": "none", "weights": "float16", "autocast": None},
    ],
    ids=str,
)
def test_fake_tensors_live_and_die_like_real_ones(changes):
    fake, real = both(dataclasses.replace(SMALL, **changes))
    assert fake == real
    assert max(fake.values()) > fake["build"] > 0
