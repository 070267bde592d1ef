"""The fast path on a card, in about eight minutes: what it computes, its speed beside TRL's, and the plan's.

    make -C benchmarks gpu-pass OUT=gpu_pass_h100.json        SMALL=1: tiny widths, on a CPU too

In this order, each part written as it ends: other code against plain code on small models; the plan's speed on a
machine that was never measured; an 8B in NF4, resident and streamed from RAM; a 4B with LoRA on full rows and on mixed
chats with PEFT's and the model's own code, in groups with Liger's kernels, and compiled, TRL in turns with the default;
a recorded run of which two steps are profiled; the plan's speed after it; an 8B with LoRA at 4,096 tokens, and QLoRA.
"""

import contextlib
import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.random_model import ensure_published_shape, write_random_model
from benchmarks.report_header import report_header
from benchmarks.steps import bench
from benchmarks.steps.material import write_chats, write_config, write_rows
from sft_play import plan
from sft_play.config.load import load_config
from sft_play.errors import SftPlayError
from sft_play.launch.request import LaunchOptions, LaunchRequest
from sft_play.launch.start import start_run
from sft_play.models.config_json import KNOWN_MODELS
from sft_play.planner.layout import LayoutName
from sft_play.runs.folder import read_json, write_json
from sft_play.training.class_checks import replaced_code
from sft_play.training.measure.profile import TRACE_FILE, covered_time

logger = logging.getLogger(__name__)

SMALL, LARGE = "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
CODES = {
    "plain": ("train.kernels=none", "train.compile=false"),
    "default": ("train.compile=false",),
    "compiled": ("train.compile=true",),
}
CHECKS: dict[str, Callable[..., Any]] = {
    "liger": replaced_code.check_liger_kernels,
    "compiled": replaced_code.check_compiled_blocks,
    "adapters": replaced_code.check_grouped_adapters,
}
PROFILED_STEPS, RECORDED_STEPS, STREAMED_STEPS = 2, 25, 10
LAYOUTS: tuple[LayoutName, ...] = ("single", "streamed")


class Parts:
    """The parts by name, in a folder with the models and rows; `is_tiny`: narrow models, short rows, few steps."""

    def __init__(self, folder: Path, *, is_tiny: bool) -> None:
        self._folder, self._is_tiny = folder, is_tiny

    def all(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """The parts in their order."""
        yield "checks", self.check
        yield "planned before", self.plan
        yield "8b qlora streamed", self.stream
        for rows in ("full", "mixed"):
            for code, words in CODES.items():
                peer = "trl" if code == "default" else None
                yield f"4b {rows} {code}", partial(self.measure, SMALL, rows, 2048, words, peer=peer)
        yield "profile", self.profile
        yield "planned after", self.plan
        yield "8b lora 4096", partial(self.measure, LARGE, "full", 4096, ())
        yield "8b qlora 2048", partial(self.measure, LARGE, "full", 2048, ("tuning.mode=qlora",))

    def check(self) -> dict[str, Any]:
        """Differences of other code on small models of the class, on this device."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config, found = AutoConfig.for_model(**KNOWN_MODELS[SMALL].config), {}
        for name, check in CHECKS.items():
            try:
                found[name] = vars(check(config, attention="sdpa", device=device, dtype=torch.bfloat16))
            except Exception as error:  # a class or a machine that cannot is a result
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        return found

    def config(self, model: str, rows: str, length: int) -> Path:
        """A run YAML of four rows a step on full rows, of 32 chats on mixed ones; written once."""
        length = 64 if self._is_tiny else length
        path = self._folder / f"{Path(model).name}-{rows}-{length}.yaml"
        if not path.exists():
            home = self._folder / Path(model).name
            if self._is_tiny and not home.exists():
                shape = {name: value for name, value in KNOWN_MODELS[model].config.items() if name != "vocab_size"}
                write_random_model(home, shape | TINY)
            home = home if self._is_tiny else ensure_published_shape(model, home)
            data = self._folder / f"{path.stem}.jsonl"
            if rows == "mixed":
                write_chats(data, 40 if self._is_tiny else 2000)
            else:
                write_rows(data, ({"text": "word " * 2 * length} for _ in range(200)))
            effective = 4 if rows == "full" or self._is_tiny else 32
            train = {"effective_batch_size": effective, "bf16": True, "max_steps": RECORDED_STEPS}
            write_config(path, model=home, rows=data, seq_len=length, train=train)
            if rows == "full":
                write_json(path, read_json(path) | {"task_mode": "cpt"})
        return path

    def measure(self, model: str, rows: str, length: int, words: tuple[str, ...], *, peer: str | None = None) -> Any:
        """A run of ours, in one round, in turns with a peer."""
        steps, warmup = (2, 1) if self._is_tiny else (bench.STEPS, bench.WARMUP)
        config = self.config(model, rows, length)
        found = bench.compare(config, words, peer=peer, steps=steps, warmup=warmup, rounds=1)
        logger.info("\n".join(found.lines()))
        return found.as_json()

    def plan(self) -> dict[str, Any]:
        """Tokens a second that the plan predicts for the 4B's runs; None where it knows none."""
        plans = {rows: plan(load_config(self.config(SMALL, rows, 2048))) for rows in ("full", "mixed")}
        return {rows: one.speed.tokens_per_s if one.speed_known else None for rows, one in plans.items()}

    def stream(self) -> dict[str, Any]:
        """Memory, speed and losses of a base that stays in RAM, beside the same run with it on the card."""
        found: dict[str, Any] = {}
        for layout in LAYOUTS:
            words = ["tuning.mode=qlora", f"train.max_steps={STREAMED_STEPS}", f"output.dir={self._folder}/{layout}"]
            loaded = load_config(self.config(LARGE, "full", 2048), overrides=words)
            folder = start_run(LaunchRequest(loaded, LaunchOptions(strategy=layout))).folder
            assert folder is not None
            lines = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
            summary, steps = read_json(folder.path / "summary.json"), [line for line in lines if "loss" in line]
            kept = ("tokens_per_s", "predicted_tokens_per_s", "peak_bytes", "engine_proof", "wall_s")
            found[layout] = {name: summary[name] for name in kept} | {"losses": [line["loss"] for line in steps]}
        return found

    def profile(self) -> dict[str, Any]:
        """The share of two steps of mixed chats in which the card computes, of a run that later plans learn from."""
        words = [f"train.profile_steps={PROFILED_STEPS}", f"output.dir={self._folder}/profiled"]
        folder = start_run(LaunchRequest(load_config(self.config(SMALL, "mixed", 2048), overrides=words))).folder
        assert folder is not None
        with gzip.open(folder.path / "profile" / TRACE_FILE) as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        spans = [[(one["ts"], one["ts"] + one["dur"]) for one in some] for some in (kernels, events)]
        whole = max(end for _, end in spans[1]) - min(start for start, _ in spans[1])
        return {"kernels": len(kernels), "busy_share": covered_time(spans[0]) / whole}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out, result = os.environ.get("OUT"), {**report_header(), "parts": {}}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sft-play-gpu-pass-")))
        os.environ["SFT_PLAY_CACHE"] = str(folder / "cache")  # a machine that was never measured
        for name, part in Parts(folder, is_tiny=bool(os.environ.get("SMALL"))).all():
            start = time.monotonic()
            try:
                found = part()
            except SftPlayError as error:  # a card that is too small for one part has the others
                found = {"error": str(error)}
            result["parts"][name] = {"seconds": round(time.monotonic() - start, 1), "found": found}
            logger.info("%s: %.0f s", name, time.monotonic() - start)
            if out is not None:
                write_json(Path(out), result)
    if out is None:
        print(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
