"""The blocks of a model, each run forwards and backwards: what it keeps, and its peaks.

Hooks read the live bytes of a trace where one block ends and the next begins: forwards when its call begins and ends,
backwards when the gradient of its output is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sft_play.planner.memory.block import LayerBytes
from sft_play.planner.memory.measured_walk import MeasuredPass, Way
from sft_play.trace import build
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.step import Loop, situated
from sft_play.trace.storages import StorageLog


def run_blocks(
    settings: StepSettings,
    passes: Iterable[tuple[int, int]],
    way: Way,
    *,
    places: Sequence[int],
    accumulates: bool = False,
    real: bool = False,
) -> list[MeasuredPass]:
    """Passes of (rows, tokens of a row). `places`: of each of the first blocks, its place in `ModelShape.layers`;
    `accumulates`: gradients are added to those of a pass before; `real`: on real CPU tensors. Raises TraceUnavailable:
    the libraries cannot run them."""
    found = []
    with situated(settings, real=real, depth=len(places)) as (loop, skeleton):
        model = loop.loaded(skeleton)
        blocks = list(build.block_list(build.base_of(model))[1])
        for rows, length in passes:
            look = _Look(loop, model, blocks, way)
            try:
                if accumulates and way != "evaluated":
                    look.step(rows, length)
                found.append(look.passed(rows, length, places))
            finally:
                look.close()
                model.zero_grad(set_to_none=True)
    return found


class _Look:
    """Reads one pass. Lists have an entry for each block; bytes are live ones, not rounded to the allocator's units."""

    def __init__(self, loop: Loop, model: Any, blocks: Sequence[nn.Module], way: Way) -> None:
        self._loop, self._model, self._blocks, self._way = loop, model, blocks, way
        self._log: StorageLog = loop.log
        self._handles: list[RemovableHandle] = []
        for layer, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(self._begins(layer), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._ends(layer)))
        self._forget()

    def _forget(self) -> None:
        count = len(self._blocks)
        self._is_forward, self._open = True, -1
        self._start, self._input, self._peak = [0] * count, [0] * count, [0] * count
        self._back: list[tuple[int, int, int] | None] = [None] * count
        """When a block's backward pass begins: live bytes, those of the gradient, and those of all parameters'
        gradients; None where nothing trains up to it."""
        self._back_peak = [0] * count
        self._tail = self._tail_back = 0
        """Peaks behind the last block, and before its backward pass."""
        self._static, self._older = self._log.current, self._gradients()
        self._first_key: int | None = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- the pass -----------------------------------------------------------------------------------------------------
    def step(self, rows: int, length: int) -> bool:
        """A pass, backwards too where the way has it; whether the first block's input outlives the forward pass."""
        self._forget()
        if self._way == "evaluated":
            self._loop.evaluates(self._model, rows, length)
            self._tail = self._log.peak
            return False
        loss = self._loop.loss(self._model, self._loop.batch(rows, length))
        self._tail, self._is_forward = self._log.peak, False
        is_kept = self._log.lives(self._first_key)
        self._log.peak = self._log.current
        loss.backward()
        self._shut_backward()
        return is_kept

    def passed(self, rows: int, length: int, places: Sequence[int]) -> MeasuredPass:
        is_kept = self.step(rows, length)
        if not all(self._start):
            raise TraceUnavailable("the model does not call each of its first blocks")
        embedded = 0 if is_kept or self._way == "evaluated" else self._input[0]
        held = self._held(embedded)
        # such as states that a class keeps on its modules, and replaces when it runs again; behind the first block what
        # the model's own code held before it may be gone
        if held[-1] < held[1]:
            raise TraceUnavailable("less is held behind its blocks than before them")
        layers = [self._layer(layer, held, embedded) for layer in range(len(self._blocks))]
        # a later block of a kind is like all but the first, and but the last, where there is another
        last = places[-1]
        by_place = {place: layers[layer] for layer, place in enumerate(places[:-1])}
        if last not in places[1:-1]:
            by_place[last] = layers[-1]
        kinds = tuple(by_place[one] for one in range(len(by_place)))
        beyond = layers[-1].kept - by_place[last].kept
        return MeasuredPass(rows, held[0], embedded, layers[0], kinds, self._behind(held[-1]), beyond)

    def _behind(self, held: int) -> LayerBytes:
        casts = 0 if self._way == "kept" else sum(self._casts(block) for block in self._blocks)
        forward = self._tail - self._static - held
        last = self._back[-1]
        if last is None:
            return LayerBytes(forward - casts)
        return LayerBytes(forward - casts, 0, self._tail_back - self._static - held, last[2] - self._older)

    def _held(self, embedded: int) -> list[int]:
        """What is held before each block, and after the last, beside its input and what lasts."""
        count = len(self._blocks)
        before = [self._start[layer] - self._input[layer] - self._static for layer in range(count)]
        if self._way == "evaluated":
            return [before[0]] * (count + 1)
        held, casts = before[:1], 0
        # backward, the states saved at a boundary are freed and only their gradient is live: held is taken from forward
        grows = any(getattr(block, "is_block_boundary", False) is True for block in self._blocks)
        for layer, at in enumerate(self._back):
            casts += self._casts(self._blocks[layer]) if self._way == "recomputed" else 0
            # freed since the forward pass: what its own frames and autocast kept
            if at is not None and not (grows and layer + 1 < count):
                live, gradient, all_gradients = at
                held.append(live - gradient - self._static - (all_gradients - self._older))
            else:
                held.append(before[layer + 1] - embedded - casts if layer + 1 < count else held[-1])
        return held

    def _layer(self, layer: int, held: Sequence[int], embedded: int) -> LayerBytes:
        casts = [self._casts(block) for block in self._blocks[: layer + 1]]
        forward = self._peak[layer] - (self._start[layer] - self._input[layer])
        if self._way == "evaluated":
            return LayerBytes(forward, cast=casts[-1])
        kept, at = held[layer + 1] - held[layer], self._back[layer]
        later = at[2] - self._older if at is not None else 0
        backward = self._back_peak[layer] - self._static - held[layer] - later if at is not None else 0
        forward = self._peak[layer] - self._static - held[layer] - (embedded if layer else 0)
        gradients = _bytes_of(self._blocks[layer].parameters())
        if self._way == "kept":
            return LayerBytes(forward, kept, backward, gradients)
        return LayerBytes(forward - sum(casts), kept, backward, gradients, cast=casts[-1], input=kept)

    def _casts(self, block: nn.Module) -> int:
        """Bytes of autocast's half-precision copies of a block's fp32 leaves with a gradient (cached_cast)."""
        if self._loop.settings.autocast is None:
            return 0
        return sum(
            2 * one.numel()
            for one in block.parameters()
            if one.requires_grad and one.dtype == torch.float32 and one.dim() > 1
        )

    # --- hooks --------------------------------------------------------------------------------------------------------
    def _begins(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward:  # a block that is computed again
                return
            self._shut()
            if self._start[layer]:
                raise TraceUnavailable("the model calls a block more than once in a pass")
            hidden = _tensor(args) if args else _tensor(kwargs.get("hidden_states"))
            self._start[layer], self._input[layer] = self._log.current, hidden.nbytes
            if layer == 0:
                self._first_key = self._log.key_of(hidden)
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: self._shut_backward())
            self._log.peak, self._open = self._log.current, layer

        return hook

    def _ends(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_forward:
                return
            self._shut()
            self._log.peak = self._log.current
            hidden = _tensor(output)
            if hidden.requires_grad:
                hidden.register_hook(self._back_begins(layer))

        return hook

    def _back_begins(self, layer: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._shut_backward()
            if layer == len(self._blocks) - 1:
                self._tail_back = self._log.peak
            self._back[layer] = (self._log.current, gradient.nbytes, self._gradients())
            self._log.peak, self._open = self._log.current, layer

        return hook

    def _shut(self) -> None:
        if self._open >= 0:
            self._peak[self._open], self._open = self._log.peak, -1

    def _shut_backward(self) -> None:
        if self._open >= 0:
            self._back_peak[self._open], self._open = self._log.peak, -1

    def _gradients(self) -> int:
        return _bytes_of(self._model.parameters())


def _bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.grad.nbytes for one in parameters if one.grad is not None)


def _tensor(value: Any) -> torch.Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise TraceUnavailable(f"a block's hidden states are a {type(value).__name__}, not a tensor")
    return value


def operators(settings: StepSettings, passes: Iterable[tuple[int, int]], *, depth: int) -> list[int]:
    """How many operators each pass of an evaluation runs."""
    found = []
    with situated(settings, depth=depth) as (loop, skeleton):
        model = loop.loaded(skeleton)
        for rows, length in passes:
            before = loop.log.operators
            loop.evaluates(model, rows, length)
            found.append(loop.log.operators - before)
    return found
