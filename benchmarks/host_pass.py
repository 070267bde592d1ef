"""What a pass costs the host beside the device: operators that start a kernel, counted, and seconds on a CPU.

    make -C benchmarks host-pass OUT=host_pass.json

A layer's operators, forwards and backwards, are the difference between passes of models of 4 and 2 layers, in bf16 with
fp32 adapters; `stock peft` is a plain loop with PEFT's own adapters. Seconds are those of a model of 36 tiny layers on
one short row a step, in turns with the loops that `make bench` compares with: nearly all of them are Python, torch's
dispatcher and autograd, in fp32; in bf16 a third is the processor's products, 20 to 30 us each whatever their size.
Operators are exact; seconds mean something as ratios only, of the quickest tenth of the steps, since other work on a
machine only ever adds to a step.
"""

import contextlib
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.random_model import write_random_model
from benchmarks.report_header import report_header
from benchmarks.steps import bench
from benchmarks.steps.material import write_chats, write_config
from sft_play.runs.folder import write_json
from sft_play.trace.pass_work import KernelLog

SHAPE = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
         "tie_word_embeddings": True}  # fmt: skip
COUNTED_LAYERS, TIMED_LAYERS = (2, 4), 36
COUNTED = {
    "full": ("tuning.mode=full",), "lora": ("tuning.mode=lora",),
    "lora, checkpointed": ("tuning.mode=lora", "train.gradient_checkpointing=true"), "qlora": ("tuning.mode=qlora",),
}  # fmt: skip
COUNTED_PASS, STEPS, WARMUP, ROUNDS, PEERS = 3, 60, 6, 4, ("bare", "trl")


class _Counted(BaseException):
    """The pass is counted, and the run needs nothing more."""


def operators_of_layer(folder: Path, count_pass: Callable[[Path], int]) -> float:
    """Operators of a layer, of those that `count_pass` counts in a pass of a run YAML's model."""
    fewer, more = (count_pass(config_of(folder, layers)) for layers in COUNTED_LAYERS)
    return (more - fewer) / (COUNTED_LAYERS[1] - COUNTED_LAYERS[0])


def operators_of_run(config: Path, *, overrides: tuple[str, ...]) -> int:
    """Operators of a pass of a run as `make train` runs it."""
    from sft_play.config.load import load_config
    from sft_play.launch.request import LaunchRequest
    from sft_play.launch.start import start_run
    from sft_play.training.loop.loop import PlannedLoop

    real, operators, passes = PlannedLoop.compute_micro_step, KernelLog(), iter(range(1, 100))

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        if next(passes) < COUNTED_PASS:
            return real(self, *args, **options)
        with operators:
            real(self, *args, **options)
        raise _Counted

    words = [*overrides, "train.bf16=true", "output.name=counted", "output.if_exists=replace",
             f"output.dir={config.parent}/outputs"]  # fmt: skip
    with mock.patch.object(PlannedLoop, "compute_micro_step", counted), contextlib.suppress(_Counted):
        start_run(LaunchRequest(load_config(config, overrides=words)))
    return len(operators.kernels)


def operators_of_stock_peft(config: Path) -> int:
    """Operators of a pass with PEFT's adapters in a plain loop, under autocast."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(config.parent / "model")
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).train()
    ids, operators = torch.arange(8)[None], KernelLog()
    with operators:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return len(operators.kernels)


def config_of(folder: Path, layers: int) -> Path:
    """A run YAML of one short row a step with a model of so many layers, made once."""
    home = folder / str(layers)
    if not home.exists():
        write_random_model(home / "model", SHAPE | {"num_hidden_layers": layers})
        write_chats(home / "chats.jsonl", 100, words_of_question=(2, 0.1), words_of_answer=(2, 0.1))
        train = {"effective_batch_size": 1, "gradient_checkpointing": False}
        write_config(home / "run.yaml", model=home / "model", rows=home / "chats.jsonl", seq_len=64, train=train)
    return home / "run.yaml"


def seconds(config: Path, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """By peer: seconds of the quickest tenth of the steps of both sides, by round, and our share of the peer's."""
    words = [f"train.bf16={str(dtype == 'bf16').lower()}"]
    for peer in PEERS:
        found = bench.compare(config, words, peer=peer, steps=STEPS, warmup=WARMUP, rounds=ROUNDS)
        quickest = {
            side: [statistics.quantiles(run["seconds_by_step"], n=10)[0] for run in runs]
            for side, runs in found.runs.items()
        }
        yield peer, {"step_s": quickest, "ratio": min(quickest["ours"]) / min(quickest[peer])}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sft-play-host-") as name:
        folder = Path(name)
        operators = {
            mode: operators_of_layer(folder, functools.partial(operators_of_run, overrides=words))
            for mode, words in COUNTED.items()
        }
        operators["stock peft"] = operators_of_layer(folder, operators_of_stock_peft)
        print(*(f"{mode}: {count:g} operators a layer" for mode, count in operators.items()), sep="\n")
        measured = {dtype: dict(seconds(config_of(folder, TIMED_LAYERS), dtype)) for dtype in ("fp32", "bf16")}
        for dtype, by_peer in measured.items():
            for peer, one in by_peer.items():
                print(f"{dtype}: {one['ratio']:.2f} of the seconds of {peer}")
    if "OUT" in os.environ:
        result = {**report_header(), "operators_of_layer": operators, "seconds": measured}
        write_json(Path(os.environ["OUT"]), result)


if __name__ == "__main__":
    main()
