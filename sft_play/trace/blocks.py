"""The blocks of a model, each run forwards and backwards: what it keeps, and its peaks.

Hooks read the live bytes of a trace where one block ends and the next begins: forwards when its call begins and ends,
backwards when the gradient of its output is there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sft_play.planner.memory.block import LayerBytes
from sft_play.planner.memory.step_memory import BlockMode, MeasuredBlocks
from sft_play.trace import build
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.step import TracedLoop, trace_context
from sft_play.trace.storages import StorageLog


def run_blocks(
    settings: StepSettings,
    batch_shapes: Iterable[tuple[int, int]],
    block_mode: BlockMode,
    *,
    kind_indices: Sequence[int],
    is_accumulating: bool = False,
    uses_real_tensors: bool = False,
) -> list[MeasuredBlocks]:
    """Measure micro steps of (rows, tokens of a row). `kind_indices`: each first block's index in `ModelShape.layers`;
    `is_accumulating`: gradients are added to those of an earlier one; `uses_real_tensors`: on real CPU tensors. Raises
    TraceUnavailable: the libraries cannot run them."""
    measured_batches = []
    with trace_context(settings, uses_real_tensors=uses_real_tensors, depth=len(kind_indices)) as (loop, skeleton):
        model = loop.load_model(skeleton)
        blocks = list(build.find_block_list(build.base_model(model))[1])
        for rows, length in batch_shapes:
            recorder = _BlockRecorder(loop, model, blocks, block_mode)
            try:
                if is_accumulating and block_mode != "evaluated":
                    recorder.run_micro_step(rows, length)
                measured_batches.append(recorder.measure_micro_step(rows, length, kind_indices))
            finally:
                recorder.close()
                model.zero_grad(set_to_none=True)
    return measured_batches


class _BlockRecorder:
    """Reads one step. Lists have an entry for each block; bytes are live ones, not rounded to the allocator's units."""

    def __init__(self, loop: TracedLoop, model: Any, blocks: Sequence[nn.Module], block_mode: BlockMode) -> None:
        self._loop, self._model, self._blocks, self._block_mode = loop, model, blocks, block_mode
        self._log: StorageLog = loop.log
        self._handles: list[RemovableHandle] = []
        for layer, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(self._forward_start_hook(layer), with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._forward_end_hook(layer)))
        self._reset()

    def _reset(self) -> None:
        count = len(self._blocks)
        self._is_forward, self._open_layer = True, -1
        self._start_bytes, self._input_bytes, self._peak_bytes = [0] * count, [0] * count, [0] * count
        # When a block's backward pass begins: live bytes, those of the gradient, and those of all
        # parameters' gradients; None where nothing trains up to it.
        self._backward_starts: list[tuple[int, int, int] | None] = [None] * count
        self._backward_peaks = [0] * count
        # Peaks behind the last block, and before its backward pass.
        self._tail_peak = self._tail_backward_peak = 0
        self._static_bytes, self._previous_gradients = self._log.current, self._gradient_bytes()
        self._first_input_key: int | None = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- the pass -----------------------------------------------------------------------------------------------------
    def run_micro_step(self, rows: int, length: int) -> bool:
        """Run a micro step, backwards too in training; True if the first block's input outlives the forward pass."""
        self._reset()
        if self._block_mode == "evaluated":
            self._loop.evaluate_batch(self._model, rows, length)
            self._tail_peak = self._log.peak
            return False
        loss = self._loop.compute_loss(self._model, self._loop.make_batch(rows, length))
        self._tail_peak, self._is_forward = self._log.peak, False
        is_kept = self._log.is_live(self._first_input_key)
        self._log.peak = self._log.current
        loss.backward()
        self._close_backward()
        return is_kept

    def measure_micro_step(self, rows: int, length: int, kind_indices: Sequence[int]) -> MeasuredBlocks:
        is_kept = self.run_micro_step(rows, length)
        if not all(self._start_bytes):
            raise TraceUnavailable("the model does not call each of its first blocks")
        embedding_bytes = 0 if is_kept or self._block_mode == "evaluated" else self._input_bytes[0]
        held_bytes = self._held_bytes(embedding_bytes)
        # such as states that a class keeps on its modules, and replaces when it runs again; behind the first block what
        # the model's own code held before it may be gone
        if held_bytes[-1] < held_bytes[1]:
            raise TraceUnavailable("less is held behind its blocks than before them")
        layers = [self._layer_bytes(layer, held_bytes, embedding_bytes) for layer in range(len(self._blocks))]
        # a later block of a kind is like all but the first, and but the last, where there is another
        last_kind = kind_indices[-1]
        by_kind = {kind_index: layers[layer] for layer, kind_index in enumerate(kind_indices[:-1])}
        if last_kind not in kind_indices[1:-1]:
            by_kind[last_kind] = layers[-1]
        kinds = tuple(by_kind[one] for one in range(len(by_kind)))
        last_extra = layers[-1].saved - by_kind[last_kind].saved
        return MeasuredBlocks(
            rows, held_bytes[0], embedding_bytes, layers[0], kinds, self._tail_bytes(held_bytes[-1]), last_extra
        )

    def _tail_bytes(self, held_bytes: int) -> LayerBytes:
        cast_bytes = 0 if self._block_mode == "kept" else sum(self._cast_bytes(block) for block in self._blocks)
        forward = self._tail_peak - self._static_bytes - held_bytes
        backward_start = self._backward_starts[-1]
        if backward_start is None:
            return LayerBytes(forward - cast_bytes)
        return LayerBytes(
            forward - cast_bytes,
            0,
            self._tail_backward_peak - self._static_bytes - held_bytes,
            backward_start[2] - self._previous_gradients,
        )

    def _held_bytes(self, embedding_bytes: int) -> list[int]:
        """What is held before each block, and after the last, beside its input and what lasts."""
        count = len(self._blocks)
        starts = [self._start_bytes[layer] - self._input_bytes[layer] - self._static_bytes for layer in range(count)]
        if self._block_mode == "evaluated":
            return [starts[0]] * (count + 1)
        held_bytes, cast_bytes = starts[:1], 0
        # backward, the states saved at a boundary are freed and only their gradient is live: held is taken from forward
        has_block_boundaries = any(getattr(block, "is_block_boundary", False) is True for block in self._blocks)
        for layer, backward_start in enumerate(self._backward_starts):
            cast_bytes += self._cast_bytes(self._blocks[layer]) if self._block_mode == "recomputed" else 0
            # freed since the forward pass: what its own frames and autocast kept
            if backward_start is not None and not (has_block_boundaries and layer + 1 < count):
                live, gradient, all_gradients = backward_start
                held_bytes.append(live - gradient - self._static_bytes - (all_gradients - self._previous_gradients))
            else:
                held_bytes.append(
                    starts[layer + 1] - embedding_bytes - cast_bytes if layer + 1 < count else held_bytes[-1]
                )
        return held_bytes

    def _layer_bytes(self, layer: int, held_bytes: Sequence[int], embedding_bytes: int) -> LayerBytes:
        cast_bytes = [self._cast_bytes(block) for block in self._blocks[: layer + 1]]
        forward = self._peak_bytes[layer] - (self._start_bytes[layer] - self._input_bytes[layer])
        if self._block_mode == "evaluated":
            return LayerBytes(forward, cast=cast_bytes[-1])
        kept_bytes, backward_start = held_bytes[layer + 1] - held_bytes[layer], self._backward_starts[layer]
        later_gradients = backward_start[2] - self._previous_gradients if backward_start is not None else 0
        backward = (
            self._backward_peaks[layer] - self._static_bytes - held_bytes[layer] - later_gradients
            if backward_start is not None
            else 0
        )
        forward = self._peak_bytes[layer] - self._static_bytes - held_bytes[layer] - (embedding_bytes if layer else 0)
        gradients = _total_gradient_bytes(self._blocks[layer].parameters())
        if self._block_mode == "kept":
            return LayerBytes(forward, kept_bytes, backward, gradients)
        return LayerBytes(
            forward - sum(cast_bytes), kept_bytes, backward, gradients, cast=cast_bytes[-1], input=kept_bytes
        )

    def _cast_bytes(self, block: nn.Module) -> int:
        """Bytes of autocast's half-precision copies of a block's fp32 leaves with a gradient (cached_cast)."""
        if self._loop.settings.autocast is None:
            return 0
        return sum(
            2 * one.numel()
            for one in block.parameters()
            if one.requires_grad and one.dtype == torch.float32 and one.dim() > 1
        )

    # --- hooks --------------------------------------------------------------------------------------------------------
    def _forward_start_hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_forward:  # a block that is computed again
                return
            self._close_forward()
            if self._start_bytes[layer]:
                raise TraceUnavailable("the model calls a block more than once in a pass")
            hidden = _hidden_states(args) if args else _hidden_states(kwargs.get("hidden_states"))
            self._start_bytes[layer], self._input_bytes[layer] = self._log.current, hidden.nbytes
            if layer == 0:
                self._first_input_key = self._log.storage_key(hidden)
                if hidden.requires_grad:
                    hidden.register_hook(lambda gradient: self._close_backward())
            self._log.peak, self._open_layer = self._log.current, layer

        return hook

    def _forward_end_hook(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_forward:
                return
            self._close_forward()
            self._log.peak = self._log.current
            hidden = _hidden_states(output)
            if hidden.requires_grad:
                hidden.register_hook(self._backward_start_hook(layer))

        return hook

    def _backward_start_hook(self, layer: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            self._close_backward()
            if layer == len(self._blocks) - 1:
                self._tail_backward_peak = self._log.peak
            self._backward_starts[layer] = (self._log.current, gradient.nbytes, self._gradient_bytes())
            self._log.peak, self._open_layer = self._log.current, layer

        return hook

    def _close_forward(self) -> None:
        if self._open_layer >= 0:
            self._peak_bytes[self._open_layer], self._open_layer = self._log.peak, -1

    def _close_backward(self) -> None:
        if self._open_layer >= 0:
            self._backward_peaks[self._open_layer], self._open_layer = self._log.peak, -1

    def _gradient_bytes(self) -> int:
        return _total_gradient_bytes(self._model.parameters())


def _total_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.grad.nbytes for one in parameters if one.grad is not None)


def _hidden_states(value: Any) -> torch.Tensor:
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise TraceUnavailable(f"a block's hidden states are a {type(value).__name__}, not a tensor")
    return value


def count_operators(settings: StepSettings, batch_shapes: Iterable[tuple[int, int]], *, depth: int) -> list[int]:
    """How many operators each pass of an evaluation runs."""
    counts = []
    with trace_context(settings, depth=depth) as (loop, skeleton):
        model = loop.load_model(skeleton)
        for rows, length in batch_shapes:
            previous = loop.log.operator_count
            loop.evaluate_batch(model, rows, length)
            counts.append(loop.log.operator_count - previous)
    return counts
