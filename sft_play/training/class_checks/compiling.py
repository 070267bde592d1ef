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
from sft_play.training.class_checks.proof import (
    ClassCheck,
    all_ranks_agree,
    compare_with_reference,
    logits_and_gradients,
    small_model_attention,
    to_dtype,
)
from sft_play.training.class_checks.small_model import small_config, small_model
from sft_play.training.model import varlen
from sft_play.training.prepare.model_spec import decoder_layers

logger = logging.getLogger(__name__)

COMPILE_BACKEND = "inductor"
# Graphs of one function beyond which dynamo compiles no more and runs plain code: kinds of blocks, each for one row
# and for several, with inputs that need a gradient and without, checkpointed or not. torch's own limit of 8 is less.
MAX_GRAPHS_PER_BLOCK = 32


class CompileMonitor(TrainerCallback):
    """Compiled blocks: their time, told to `on_compiled`, and what became of them; `close` ends the watch."""

    def __init__(self) -> None:
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler

        self.on_compiled: list[Callable[[float], None]] = []
        self._seconds = self._compile_start = 0.0
        self._has_warned = False
        self._exit_stack = contextlib.ExitStack()
        for add, remove, call in (
            (callback_handler.register_start_callback, callback_handler.remove_start_callback, self._on_compile_start),
            (callback_handler.register_end_callback, callback_handler.remove_end_callback, self._on_compile_end),
        ):
            add(call)
            self._exit_stack.callback(remove, call)
        # DDP's own optimizer splits graphs by its buckets, and takes none that recompute; blocks are small already
        self._exit_stack.enter_context(config.patch(optimize_ddp=False, recompile_limit=MAX_GRAPHS_PER_BLOCK))
        self._initial_counts = _dynamo_counts()

    def close(self) -> None:
        """Watch no longer, and put torch's settings back; the blocks stay compiled."""
        self._exit_stack.close()

    def figures(self) -> dict[str, Any]:
        """`compile` of the summary: seconds in training passes, which the speed leaves out, graphs, and `breaks`, at
        which plain code runs: between two graphs, or since too many kinds of passes were seen."""
        graphs, breaks = (
            count - initial for count, initial in zip(_dynamo_counts(), self._initial_counts, strict=True)
        )
        return {"seconds": round(self._seconds, 2), "graphs": graphs, "breaks": breaks}

    def _on_compile_start(self, _: Any) -> None:
        self._compile_start = time.perf_counter()

    def _on_compile_end(self, _: Any) -> None:
        seconds = time.perf_counter() - self._compile_start
        self._seconds += seconds
        for callback in self.on_compiled:
            callback(seconds)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Warn once of what is not compiled."""
        figures = self.figures()
        if not self._has_warned and (figures["breaks"] or not figures["graphs"]):
            self._has_warned = True
            logger.warning("Compiled blocks: %d graphs, and plain code runs at %d places (TORCH_LOGS=graph_breaks says "
                           "where and why)", figures["graphs"], figures["breaks"])  # fmt: skip

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say what was compiled."""
        logger.debug("Compiled blocks: %(graphs)d graphs in %(seconds).0f s, not counted for tokens/s", self.figures())


def compile_blocks(model: Any, config: RunConfig, plan: Plan, *, device: torch.device) -> CompileMonitor | None:
    """Compile a model's blocks, if wanted and proven; None where the plain code stays. All ranks do the same."""
    if not config.train.compile:
        return None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def check() -> tuple[ClassCheck, str | None]:
        dtype = getattr(torch, plan.precision.compute)
        class_check = check_compiled_blocks(
            base.config, attention=small_model_attention(base), device=device, dtype=dtype
        )
        problem = f"a small model of this class computes something else compiled: {class_check.figures_text}"
        return class_check, None if class_check.is_rounding else problem

    class_check, reason = all_ranks_agree(check)
    if class_check is None:
        logger.warning("Compiled blocks: none, the plain code runs: %s", reason)
        return None
    blocks = compile_in_place(model)
    logger.debug(
        "Compiled blocks: %d, at their first pass (on a small model of this class: %s)",
        blocks,
        class_check.figures_text,
    )
    return CompileMonitor()


def check_compiled_blocks(hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype) -> ClassCheck:
    """How far compiled blocks are from the plain code; nothing stays compiled. Attention between boundaries has a
    kernel for 16 bits only: in fp32 the same rows are padded ones. Raises ValueError: no block compiles."""
    uses_boundaries = attention == varlen.VARLEN_ATTENTION and dtype != torch.float32
    with torch.random.fork_rng(devices=[]):
        small = small_config(hf_config)
        reference_model = small_model(small, "sdpa" if uses_boundaries else attention, trust_remote_code=False).to(
            device
        )
        half_model = (
            small_model(small, attention, trust_remote_code=False).to(device) if uses_boundaries else reference_model
        )
        half_model = to_dtype(half_model, dtype)
        reference, reference_half = (
            logits_and_gradients(reference_model),
            logits_and_gradients(half_model, packed=uses_boundaries),
        )
        for model in (reference_model, half_model):
            compile_in_place(model)
        initial_counts = _dynamo_counts()
        try:
            class_check = compare_with_reference(
                reference,
                reference_half,
                logits_and_gradients(reference_model),
                logits_and_gradients(half_model, packed=uses_boundaries),
            )
            # dynamo runs as plain code what it cannot compile, without an error
            if _dynamo_counts()[0] == initial_counts[0]:
                raise ValueError("none of its blocks compiles")
            return class_check
        finally:
            torch.compiler.reset()


def compile_in_place(model: torch.nn.Module) -> int:
    """Compile each block of a model at its next pass; returns how many there are."""
    blocks = decoder_layers(model)
    for block in blocks:
        block.compile(backend=COMPILE_BACKEND, dynamic=True)
    return len(blocks)


def _dynamo_counts() -> tuple[int, int]:
    """Dynamo's counts in this process: graphs, and breaks or functions that it gave up."""
    from torch._dynamo.utils import counters

    limit_breaks = sum(count for name, count in counters["unimplemented"].items() if "limit exceeded" in name)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()) + limit_breaks
