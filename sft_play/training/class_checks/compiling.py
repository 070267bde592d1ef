"""Blocks of a model compiled by torch.compile, where it computes what the plain code computes (`proof`).

Each block is compiled in place, with lengths and numbers of rows as symbols. Evaluation and generation run the plain
code. The time of compiling does not count for the training's speed; the summary has it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.planner.plan import Plan
from sft_play.training.class_checks.proof import Proof, agreed, attention_of, compared, in_dtype, numbers
from sft_play.training.class_checks.small_model import small_config, small_model
from sft_play.training.model import varlen
from sft_play.training.prepare.model_spec import decoder_layers

logger = logging.getLogger(__name__)

BACKEND = "inductor"
# Graphs of one function beyond which dynamo compiles no more and runs plain code: kinds of blocks, each for one row
# and for several, with inputs that need a gradient and without, checkpointed or not. torch's own limit of 8 is less.
GRAPHS_OF_A_BLOCK = 32


class Compiler(TrainerCallback):
    """Compiled blocks: their time, told to `waiting`, and what became of them; `close` ends the watch."""

    def __init__(self) -> None:
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler

        self.waiting: list[Callable[[float], None]] = []
        self._seconds = self._began = 0.0
        self._warned = False
        self._open = contextlib.ExitStack()
        for add, remove, call in (
            (callback_handler.register_start_callback, callback_handler.remove_start_callback, self._start),
            (callback_handler.register_end_callback, callback_handler.remove_end_callback, self._end),
        ):
            add(call)
            self._open.callback(remove, call)
        # DDP's own optimizer splits graphs by its buckets, and takes none that recompute; blocks are small already
        self._open.enter_context(config.patch(optimize_ddp=False, recompile_limit=GRAPHS_OF_A_BLOCK))
        self._before = _counted()

    def close(self) -> None:
        """Watch no longer, and put torch's settings back; the blocks stay compiled."""
        self._open.close()

    def facts(self) -> dict[str, Any]:
        """`compile` of the summary: seconds in training passes, which the speed leaves out, graphs, and `breaks`, at
        which plain code runs: between two graphs, or since too many kinds of passes were seen."""
        graphs, breaks = (now - then for now, then in zip(_counted(), self._before, strict=True))
        return {"seconds": round(self._seconds, 2), "graphs": graphs, "breaks": breaks}

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        seconds = time.perf_counter() - self._began
        self._seconds += seconds
        for wait in self.waiting:
            wait(seconds)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Warn once of what is not compiled."""
        facts = self.facts()
        if not self._warned and (facts["breaks"] or not facts["graphs"]):
            self._warned = True
            logger.warning("Compiled blocks: %d graphs, and plain code runs at %d places (TORCH_LOGS=graph_breaks says "
                           "where and why)", facts["graphs"], facts["breaks"])  # fmt: skip

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say what was compiled."""
        logger.debug("Compiled blocks: %(graphs)d graphs in %(seconds).0f s, not counted for tokens/s", self.facts())


def compile_blocks(model: Any, config: RunConfig, plan: Plan, *, device: torch.device) -> Compiler | None:
    """Compile a model's blocks, if wanted and proven; None where the plain code stays. All ranks do the same."""
    if not config.train.compile:
        return None
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model

    def tried() -> tuple[Proof, str | None]:
        dtype = getattr(torch, plan.precision.compute)
        found = prove(inner.config, attention=attention_of(inner), device=device, dtype=dtype)
        differs = f"a small model of this class computes something else compiled: {found.words}"
        return found, None if found.holds else differs

    proof, reason = agreed(tried)
    if proof is None:
        logger.warning("Compiled blocks: none, the plain code runs: %s", reason)
        return None
    blocks = compile_in_place(model)
    logger.debug("Compiled blocks: %d, at their first pass (on a small model of this class: %s)", blocks, proof.words)
    return Compiler()


def prove(hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype) -> Proof:
    """How far compiled blocks are from the plain code; nothing stays compiled. Attention between boundaries has a
    kernel for 16 bits only: in fp32 the same rows are padded ones. Raises ValueError: no block compiles."""
    is_apart = attention == varlen.VARLEN_ATTENTION and dtype != torch.float32
    with torch.random.fork_rng(devices=[]):
        small = small_config(hf_config)
        exact = small_model(small, "sdpa" if is_apart else attention, trust_remote_code=False).to(device)
        half = small_model(small, attention, trust_remote_code=False).to(device) if is_apart else exact
        half = in_dtype(half, dtype)
        plain, plain_half = numbers(exact), numbers(half, boundaries=is_apart)
        for model in (exact, half):
            compile_in_place(model)
        before = _counted()
        try:
            proof = compared(plain, plain_half, numbers(exact), numbers(half, boundaries=is_apart))
            if _counted()[0] == before[0]:  # dynamo runs as plain code what it cannot compile, without an error
                raise ValueError("none of its blocks compiles")
            return proof
        finally:
            torch.compiler.reset()


def compile_in_place(model: torch.nn.Module) -> int:
    """Compile each block of a model at its next pass; returns how many there are."""
    blocks = decoder_layers(model)
    for block in blocks:
        block.compile(backend=BACKEND, dynamic=True)
    return len(blocks)


def _counted() -> tuple[int, int]:
    """Dynamo's counts in this process: graphs, and breaks or functions that it gave up."""
    from torch._dynamo.utils import counters

    limits = sum(count for name, count in counters["unimplemented"].items() if "limit exceeded" in name)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()) + limits
