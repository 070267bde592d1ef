"""Blocks of a model compiled by torch.compile, where it computes what the plain code computes.

Each block is compiled in place (`nn.Module.compile`), so that names of modules and tensors stay what they are. Blocks
of one kind share their graphs, whose lengths and numbers of rows are symbols: passes of other lengths compile nothing
again. Gradient checkpointing is inside a block's forward in transformers, and so in its graph.

Before that a small model of the class is compiled on the run's device and compared (`proof`). Evaluation and generation
run the plain code. The time that compiling takes is neither the training's speed nor forgotten: the run's log and
summary have it, with the graphs, and what dynamo left uncompiled.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.planner.plan import Plan
from sft_play.training.prepare.model_spec import blocks_of
from sft_play.training.proofs.proof import Proof, agreed, attention_of, compared, has_boundaries, in_dtype, numbers
from sft_play.training.proofs.small_model import small_config, small_model

logger = logging.getLogger(__name__)

BACKEND = "inductor"
GRAPHS_OF_A_BLOCK = 32
"""Graphs of one function beyond which dynamo compiles no more and runs plain code: kinds of blocks, each for one row
and for several, with inputs that need a gradient and without, checkpointed or not. torch's own limit of 8 is less."""


@dataclass(frozen=True)
class CompileFacts:
    """What compiling came to: `compile` of the summary."""

    seconds: float
    """In training passes, which the speed leaves out."""
    proof_s: float
    """For the measurement before the first step."""
    graphs: int
    breaks: int
    """Places at which a block is left to run plain code between two graphs."""
    gave_up: bool
    """Whether some passes run the plain code, because too many kinds of them were seen."""

    def as_json(self) -> dict[str, Any]:
        """As in the summary, seconds rounded."""
        return {**asdict(self), "seconds": round(self.seconds, 2), "proof_s": round(self.proof_s, 2)}

    @property
    def line(self) -> str:
        """The facts in one line."""
        return (
            f"Compiled blocks: {self.graphs} graph{'' if self.graphs == 1 else 's'} in {self.seconds:.0f} s, after "
            f"{self.proof_s:.0f} s of measuring; neither counts for tokens/s"
        )

    @property
    def problems(self) -> dict[str, str]:
        """What of the blocks is not compiled, in words, by its kind; empty where all is."""
        found = {
            "nothing": (self.graphs == 0, "nothing of them could be compiled, and the plain code runs"),
            "breaks": (self.breaks > 0, f"plain code runs between compiled parts, at {self.breaks} places"),
            "gave up": (
                self.gave_up,
                f"passes of more than {GRAPHS_OF_A_BLOCK} kinds were seen, and the others run the plain code",
            ),
        }
        return {kind: text for kind, (is_so, text) in found.items() if is_so}


class Compiler(TrainerCallback):
    """Compiled blocks of a model that trains: their time, and what became of them. `close` ends the watch.

    `waiting` are told, in seconds, how long each compiling held up the training.
    """

    def __init__(self, *, proof_s: float) -> None:
        from torch._dynamo import config
        from torch._dynamo.callback import callback_handler

        self.waiting: list[Callable[[float], None]] = []
        self._proof_s, self._seconds, self._began = proof_s, 0.0, 0.0
        self._said: tuple[int | None, frozenset[str]] = (None, frozenset())
        """Graphs of the last line, and kinds of problems that were said."""
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

    @property
    def facts(self) -> CompileFacts:
        """What compiling came to so far."""
        graphs, breaks, gave_up = (now - then for now, then in zip(_counted(), self._before, strict=True))
        return CompileFacts(self._seconds, self._proof_s, graphs, breaks, gave_up > 0)

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        seconds = time.perf_counter() - self._began
        self._seconds += seconds
        for wait in self.waiting:
            wait(seconds)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Say what was compiled in the first step, and once what is not compiled."""
        self._say(again=False)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Say what was compiled since."""
        self._say(again=True)

    def _say(self, *, again: bool) -> None:
        facts, (graphs, known) = self.facts, self._said
        if graphs is None or (again and facts.graphs > graphs):
            logger.debug("%s", facts.line)
            graphs = facts.graphs
        for kind, text in facts.problems.items():
            if kind not in known:
                logger.warning("Compiled blocks: %s (TORCH_LOGS=graph_breaks,recompiles says where and why)", text)
        self._said = (graphs, known | facts.problems.keys())


def compile_blocks(model: Any, config: RunConfig, plan: Plan, *, device: torch.device) -> Compiler | None:
    """Compile the blocks of a model, if the config wants it and a small model of its class shows that it computes the
    same; None where the plain code stays. All ranks call it, and do the same."""
    if not config.train.compile:
        return None
    began = time.perf_counter()
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
    seconds = time.perf_counter() - began
    blocks = compile_in_place(model)
    logger.debug("Compiled blocks: %d, at their first pass (on a small model of this class: %s)", blocks, proof.words)
    return Compiler(proof_s=seconds)


def prove(hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype) -> Proof:
    """How far compiled blocks are from the plain code for models of this config; no random state is changed, and what
    was compiled is forgotten.

    Attention between boundaries has a kernel for 16 bits only: in fp32 the same rows are padded ones.

    Raises:
        ValueError: the class has no blocks that transformers knows, or none that compiles.
    """
    in_half = dtype != torch.float32
    is_apart = has_boundaries(attention) and in_half
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
    blocks = blocks_of(model)
    for block in blocks:
        block.compile(backend=BACKEND, dynamic=True)
    return len(blocks)


@contextlib.contextmanager
def plain_code() -> Iterator[None]:
    """While open, compiled blocks run the plain code, and nothing is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _counted() -> tuple[int, int, int]:
    """Dynamo's counts in this process: graphs, breaks, and functions that it gave up."""
    from torch._dynamo.utils import counters

    limits = sum(count for name, count in counters["unimplemented"].items() if "limit exceeded" in name)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), limits
