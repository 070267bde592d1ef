"""One training step, as the real libraries run it, on tensors without bytes: what it needs at its peak, by the replay
of every storage's allocation and freeing through the simulated allocator."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from sft_play.planner.memory.step_memory import cublas_workspace
from sft_play.trace import build, fakes, kernels, patches, replacements
from sft_play.trace.settings import BY_BOUNDARIES, StepSettings, TracedPeak, TraceUnavailable
from sft_play.trace.storages import Peaks, StorageLog, replay


def trace_step(settings: StepSettings) -> TracedPeak:
    """The highest bytes of one rank's step; seconds of work, no GPU, no weights. Raises TraceUnavailable: the libraries
    cannot run it on fake tensors."""
    start = time.perf_counter()
    with situated(settings) as (run, skeleton):
        run.whole(skeleton)
    peaks, other = run.replayed()
    return TracedPeak(
        allocated=peaks.allocated,
        reserved=peaks.reserved,
        reserved_either=max(peaks.reserved, other.reserved),
        phases=peaks.phases,
        resident=peaks.after["build"],
        seconds=round(time.perf_counter() - start, 3),
    )


def record(settings: StepSettings, *, real: bool = False, mesh: Any = None) -> StorageLog:
    """The events of the step. For comparison, `real` runs it on real CPU tensors instead, a sharded step in the real
    group of `mesh`. Raises TraceUnavailable: as `trace_step`."""
    with situated(settings, real=real, mesh=mesh) as (run, skeleton):
        run.whole(skeleton)
    return run.log


@contextlib.contextmanager
def situated(
    settings: StepSettings, *, real: bool = False, mesh: Any = None, depth: int | None = None
) -> Iterator[tuple[Loop, Any]]:
    """A training loop and the skeleton of its model, where the step's tensors are logged: fake ones, or `real` ones in
    the group of `mesh`. `depth`: only the first this many blocks. Raises TraceUnavailable: as `trace_step`."""
    if settings.strategy.startswith("zero"):
        raise TraceUnavailable("DeepSpeed ZeRO is not traced")
    if settings.kernels not in build.KERNELS:
        raise TraceUnavailable("Liger's kernels run on a GPU alone")
    from sft_play.training.model import sdpa

    loop = LOOPS[type(settings)]
    log = loop.log_of(workspace=functools.partial(kernels.workspace, on_gpu=settings.on_gpu))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_collected())
        stack.enter_context(_library_faults())
        situation = replacements.Situation(settings, log)
        log.is_padded = lambda: situation.mask == "padded"
        stack.enter_context(patches.installed(situation))
        stack.enter_context(sdpa.repeating_keys(repeated=settings.repeats_kv))
        model = build.skeleton(settings, depth=depth)
        stack.enter_context(build.without_packages(build.base_of(model), settings))
        stack.enter_context(build.KERNELS[settings.kernels](model))
        if _is_sharded(settings) and mesh is None:
            from sft_play.trace import ranks

            mesh = stack.enter_context(ranks.fake_group(settings.world))
        # the log is entered last: it must see operators before the fake mode does
        if not real:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(log)
        yield loop(situation, mesh), model


class Loop:
    """The loop of a training script: build, steps of micro-batches, clip, update, evaluation."""

    log_of = StorageLog

    def __init__(self, situation: replacements.Situation, mesh: Any) -> None:
        self.settings, self.log, self.situation, self.mesh = situation.settings, situation.log, situation, mesh

    def whole(self, skeleton: Any) -> None:
        """Run it with this model."""
        settings, log = self.settings, self.log
        model = self.loaded(skeleton)
        log.empty_cache()
        log.mark("prepare")
        buckets = self.buckets(model)
        workspace = cublas_workspace(settings.capability) if settings.on_gpu else 0
        log.born(workspace)  # the thread that runs forward
        optimizer = self.optimizer(model)
        for step in range(settings.optimizer_steps):
            for micro in range(settings.grad_accum):
                log.mark("forward", step)
                with self.synchronised(model, micro == settings.grad_accum - 1):
                    self.passes(model, step, settings.seq_len)
                if step == micro == 0:
                    log.born(workspace)  # autograd's own thread
                buckets()
            log.mark("optimizer", step)
            self.update(model, optimizer)
        if settings.eval_batch:
            log.empty_cache()  # as the trainer does between the moments of a run
            log.mark("evaluation", settings.optimizer_steps - 1)
            self.evaluates(model, settings.eval_batch, settings.seq_len)
        log.mark("end", settings.optimizer_steps - 1)

    def loaded(self, skeleton: Any) -> Any:
        """The model on this rank's GPU; a sharded one is loaded on the host, and only its shards arrive."""
        if not _is_sharded(self.settings):
            model = build.furnish(skeleton, self.settings)
            with self.log.hidden():
                build.fill_buffers(model)
            return model
        from sft_play.trace import ranks

        with self.log.hidden():
            model = build.furnish(skeleton, self.settings)
            largest = ranks.largest_unit(model, self.settings)
            model = ranks.DIVIDED[self.settings.strategy](model, self.settings, self.mesh)
        self.log.passing((largest,))
        for tensor in ranks.shards(model):
            self.log.see(tensor)
        return model

    def buckets(self, model: Any) -> Callable[[], None]:
        """What DDP does after a backward pass."""
        if self.settings.strategy != "ddp":
            return lambda: None
        from sft_play.trace import ranks

        return ranks.Buckets(model, self.log).after_backward

    def optimizer(self, model: Any) -> Any:
        """The optimizer of the run."""
        return make_optimizer(self.settings, model, self.log)

    def batch(self, rows: int, length: int) -> dict[str, Any]:
        """The collator's tensors: packs without a mask, for flash attention in one row with their boundaries."""
        is_packed = self.situation.mask == "packed"
        is_flat = is_packed and self.settings.attention in ("flash_attention_2", *BY_BOUNDARIES)
        shape = (1, rows * length) if is_flat else (rows, length)
        batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "labels")}
        if is_packed:
            batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
        elif self.situation.mask == "positions":
            batch["position_ids"] = torch.zeros((1, length), dtype=torch.long)
        elif self.situation.mask != "none":
            batch["attention_mask"] = torch.ones(shape, dtype=torch.long)
        if is_flat:
            ends = torch.zeros(rows + 1, dtype=torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}
            if self.settings.attention in BY_BOUNDARIES:
                batch["chat_lengths"] = (length,) * rows
        return batch

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch."""
        dtype = self.settings.autocast
        with torch.autocast("cpu", dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext():
            if self.settings.loss in ("chunked", "logits"):
                out = model(**batch, use_cache=False, fused_lm_head=True)
                return (-out.log_probs).sum() / out.label_mask.sum().clamp(min=1)
            return model(**batch, use_cache=False).loss

    @contextlib.contextmanager
    def synchronised(self, model: Any, is_last: bool) -> Iterator[None]:
        """accelerate's `no_sync` around all micro-batches but the last: sharded models keep whole gradients there."""
        if is_last or self.settings.sync_each_batch or not _is_sharded(self.settings):
            yield
        else:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    def passes(self, model: Any, step: int, length: int) -> None:
        """A micro-batch of rows of this length, forwards and backwards."""
        loss = self.loss(model, self.batch(self.settings.micro_batch, length))
        if self.settings.grad_accum > 1:
            loss = loss / self.settings.grad_accum
        self.log.mark("backward", step)
        loss.backward()

    def update(self, model: Any, optimizer: Any) -> None:
        """The end of a step."""
        if self.settings.clip:
            trained = [one for one in model.parameters() if one.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def evaluates(self, model: Any, rows: int, length: int) -> None:
        """A pass of an evaluation."""
        model.eval()
        self.situation.evaluating = True
        with torch.no_grad():
            self.loss(model, self.batch(rows, length))
        self.situation.evaluating = False
        model.train()

    def replayed(self) -> tuple[Peaks, Peaks]:
        """Peaks in the allocator's two modes, fixed-size segments and expandable ones."""
        return replay(self.log.events), replay(self.log.events, expandable_segments=True)


# The loop of each kind of settings; benchmarks add that of other scripts.
LOOPS: dict[type[StepSettings], type[Loop]] = {StepSettings: Loop}


def _is_sharded(settings: StepSettings) -> bool:
    return settings.strategy.startswith("fsdp")


# In an optimizer's name: transformers' Trainer keeps its states of embeddings in fp32.
_WIDE = "_wide_embeddings"


def make_optimizer(settings: StepSettings, model: Any, log: StorageLog) -> Any:
    """The optimizer of that name, or a fake with bitsandbytes' states; raises TraceUnavailable for an unknown one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    states: dict[str, Callable[[int], tuple[int, ...]]] = {
        "adamw_8bit": fakes.adam_8bit_states,
        "paged_adamw_8bit": fakes.paged_adam_8bit_states,
        "lion_32bit_bnb": lambda elements: (4 * elements,),
        "none": lambda elements: (),
    }
    name, wide = settings.optimizer.removesuffix(_WIDE), list[Any]()
    states["lion_8bit"] = lambda elements: fakes.adam_8bit_states(elements)[::2]
    if name != settings.optimizer:
        wide = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    if name in states:
        count = 0 if name.startswith("paged") else 1 if name.startswith("lion") else 2  # in the allocator
        return fakes.StateOptimizer(trained, states[name], log, wide={id(one): count for one in wide})
    if name == "muon":
        from sft_play.training.loop.optimizers import MuonWithAdamW, matrices_of

        return MuonWithAdamW([{"params": trained}], matrices=matrices_of(model), lr=1e-4)
    if settings.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
    if settings.optimizer == "adamw_fused":
        return torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if settings.optimizer == "adamw_foreach":
        return torch.optim.AdamW(trained, lr=1e-4, foreach=True)
    raise TraceUnavailable(f"no optimizer {settings.optimizer!r} is known to the trace")


# --- faults -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _library_faults() -> Iterator[None]:
    """Turn an exception from inside a library into TraceUnavailable; our own keep their traceback."""
    try:
        yield
    except (TraceUnavailable, MemoryError, KeyboardInterrupt):
        raise
    except ImportError as error:
        raise TraceUnavailable(f"a library, or a part of it that the trace uses, is missing: {error}") from error
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(innermost).resolve().parent == Path(__file__).resolve().parent:
            raise
        text = " ".join(str(error).split())[:300]
        raise TraceUnavailable(
            f"the libraries cannot run this step on fake tensors: {type(error).__name__}: {text}"
        ) from error


@contextlib.contextmanager
def _collected() -> Iterator[None]:
    """No garbage collection in between: its timing depends on what this process did before, and so would peaks."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
