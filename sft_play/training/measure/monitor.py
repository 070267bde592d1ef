"""What a run measures of itself: between two logs speed, utilisation and padding; in each phase its
highest memory.
"""

import contextlib
import gc
import itertools
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from sft_play.machine.host_speed import save_host_speed
from sft_play.planner.memory.estimate import RunPhase
from sft_play.planner.plan import Plan
from sft_play.planner.speed import OPERATOR_S
from sft_play.process.waiting import release_free_memory
from sft_play.text import GIB
from sft_play.training import distributed
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.loop.rows import CHAT_LENGTHS, DEFAULT_SOURCES

# The highest memory of each phase of a run: loading, training steps, evaluation, generation,
# saving.
#
# On a GPU torch counts one peak since its last reset: at each change of phase it is kept and reset,
# and the allocator's cache is emptied, whose blocks would count for the next. On a CPU a thread
# takes samples of resident memory, which miss what lasts for less than SAMPLE_INTERVAL_S: the
# kernel's own mark could not be reset, because others read it (`time -v`, Slurm's MaxRSS).

# Seconds between two samples of resident memory; one takes 0.03 ms.
SAMPLE_INTERVAL_S = 0.01


# The highest of samples of this process's resident memory, until it is told to end.
class _ResidentSampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="resident memory", daemon=True)
        self.stop_event, self.highest = threading.Event(), _resident_bytes()
        self.start()

    def run(self) -> None:
        process = psutil.Process()  # finding it takes longer than a sample
        while not self.stop_event.wait(SAMPLE_INTERVAL_S):
            self.highest = max(self.highest, int(process.memory_info().rss))


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class MemoryPeaks:
    """The peak of each phase in this process: bytes of tensors, and of the allocator's reserved
    memory; on a CPU both are resident memory beyond `baseline_bytes`."""

    def __init__(self, *, on_gpu: bool = False, baseline_bytes: int = 0) -> None:
        self.on_gpu, self.baseline_bytes = on_gpu, baseline_bytes
        self._peaks: dict[RunPhase, tuple[int, int]] = {}
        self._phase: RunPhase | None = None
        self._sampler: _ResidentSampler | None = None  # of the present phase on a CPU

    def start(self, phase: RunPhase) -> None:
        """Begin a phase, and keep the peak of the one before."""
        self.close()
        self._phase = phase
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            release_free_memory()  # what malloc keeps of one phase would count for the next
            self._sampler = _ResidentSampler()
            # where nothing closes it, as when a trainer fails to be made
            weakref.finalize(self, self._sampler.stop_event.set)

    def close(self) -> None:
        """End the phase without beginning another."""
        self.by_phase()
        if self._sampler is not None:
            self._sampler.stop_event.set()
        self._phase = self._sampler = None

    def clear(self) -> None:
        """Drop all peaks, before another stage of a run."""
        self.close()
        self._peaks = {}

    @contextlib.contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """While open, memory counts for this phase; then the one before continues, if there was
        one."""
        outer_phase = self._phase
        self.start(phase)
        try:
            yield
        finally:
            self.close()
            if outer_phase is not None:
                self.start(outer_phase)

    def by_phase(self) -> dict[RunPhase, tuple[int, int]]:
        """The peaks of all phases so far."""
        if self._phase is not None:
            if self._sampler is None:
                allocated, reserved = (
                    torch.cuda.max_memory_allocated(),
                    torch.cuda.max_memory_reserved(),
                )
            else:
                allocated = reserved = (
                    max(self._sampler.highest, _resident_bytes()) - self.baseline_bytes
                )
            earlier_allocated, earlier_reserved = self._peaks.get(self._phase, (0, 0))
            self._peaks[self._phase] = (
                max(allocated, earlier_allocated),
                max(reserved, earlier_reserved),
            )
        return dict(self._peaks)

    def summary_fields(self, plan: Plan) -> dict[str, Any]:
        """Build `peak_bytes_by_moment` of the summary, predicted and measured, and `peak_bytes`:
        its highest entry."""
        by_moment: dict[str, dict[str, Any]] = {}
        peaks = self.by_phase()
        for phase, (allocated, reserved) in peaks.items():
            predicted_allocated, predicted_reserved = plan.memory.phase_bytes(phase)
            measured: dict[str, Any] = {
                "measured_allocated": allocated,
                "measured_reserved": reserved,
            }
            if not self.on_gpu:
                measured = dict.fromkeys(measured) | {
                    "measured_rss": reserved,
                    "level_rss": self.baseline_bytes,
                }
            by_moment[phase] = {
                "predicted_allocated": predicted_allocated,
                "predicted_reserved": predicted_reserved,
                **measured,
            }
        highest = max(peaks, key=lambda phase: peaks[phase][1])
        return {
            "peak_bytes": {"moment": highest, **by_moment[highest]},
            "peak_bytes_by_moment": by_moment,
        }


def start_memory_peaks(plan: Plan) -> MemoryPeaks:
    """Start the peaks of a run, before anything is loaded."""
    on_gpu = plan.hardware.device == "cuda"
    if not on_gpu:
        # What an earlier run in this process freed and the C library kept is resident already. This
        # run would take from it without the process growing, and its measured peak would be 0.
        gc.collect()
        release_free_memory()
    return MemoryPeaks(on_gpu=on_gpu, baseline_bytes=_resident_bytes())


@dataclass(frozen=True)
class RunMonitors:
    """What is tracked during a run: memory peaks, signs of life, and its start (seconds since
    1970)."""

    peaks: MemoryPeaks
    heartbeat: Heartbeat
    start_time: float


# --- what a run measures of itself between two logs: speed, where a step's time goes, memory ------
#
# Everything is summed on the device and read once per log, so that no step waits for it. Times on a
# GPU are those between two events of the device; on a CPU, of the clock.

# Parts of a step: waiting for rows, the micro-steps with their communication, the optimizer's step.
STEP_PARTS = ("data", "forward_backward", "optimizer")
# What happens between steps, and the phase that its memory is counted for, None for training's. Its
# time is logged, but counts neither for the step nor for the speed.
PAUSES: dict[str, RunPhase | None] = {
    "checkpoint": "saving",
    "evaluation": "evaluation",
    "profile": None,
}
# Steps at a run's start whose passes are not steady: checks look at them, and memory grows.
UNSTEADY_STEPS = 5
# Passes whose times are kept.
MAX_TIMED_PASSES = 512
# What sums over many tokens are kept in: fp32 would stop counting single tokens at 2**24.
_SUM_DTYPE = torch.float64


class Monitor(TrainerCallback):
    """Measures this rank between two logs, and combines the figures of all ranks into what is
    logged. `plan`: what the measured figures are compared with; `tensor_parallel`: consecutive
    ranks that see the same rows and are counted once; `sources`: names of the sources whose losses
    are reported; `peaks`: the peaks by phase, which this starts and ends."""

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        tensor_parallel: int = 1,
        sources: Sequence[str] = DEFAULT_SOURCES,
        peaks: MemoryPeaks | None = None,
    ) -> None:
        self.peaks, self._tensor_parallel, self.sources = (
            peaks or MemoryPeaks(),
            tensor_parallel,
            tuple(sources),
        )
        self._plan, self._on_gpu = plan, self.peaks.on_gpu
        # Names of parts with their start and end, since they were last read.
        self._spans: list[tuple[str, Any, Any]] = []
        self._optimizer_start: Any = None
        # Rows with a trained token (chats of packs), and tokens without padding, that all ranks
        # have seen in the run, as of the last log.
        self.samples_seen, self.tokens_seen = 0.0, 0.0
        # Of those tokens: seen before this process started.
        self.tokens_before_start = 0.0
        # Padded tokens of steady passes with their start and end, the newest.
        self._passes: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_TIMED_PASSES)
        self._pass_tokens = self._finished_steps = 0
        # Seconds of each pause so far, of evaluations by the prefix of their figures.
        self.pause_seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._start_window()

    def seen_counts(self) -> dict[str, float]:
        """Rows and tokens of all ranks until now, for a checkpoint; every rank calls it."""
        samples, tokens = (
            distributed.sum_over_ranks(round(float(self.sums[name]))) / self._tensor_parallel
            for name in ("samples", "tokens")
        )
        return {"samples": self.samples_seen + samples, "tokens": self.tokens_seen + tokens}

    def _start_window(self) -> None:
        # what micro-steps add to, on this rank since the last log; the head's and the sources' are
        # vectors. It is never changed in place: a step that is repeated begins with an earlier one
        # again
        self.sums: dict[str, Any] = dict.fromkeys(
            ("loss", "trained_tokens", "tokens", "places", "samples"), 0
        )
        self._paused_s, self._compile_s, self._window_start = 0.0, 0.0, time.perf_counter()

    def add(self, **values: Any) -> None:
        """Add to the sums of this window: a micro-step's loss times its trained tokens,
        `head_sums`, `source_sums`."""
        self.sums = self.sums | {
            name: self.sums.get(name, 0) + value for name, value in values.items()
        }

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start measuring: what loading and the evaluation before training took is not counted."""
        self.peaks.start("training")
        self._spans = []
        self._start_window()

    @contextlib.contextmanager
    def timed_part(self, name: str, *, label: str | None = None) -> Iterator[None]:
        """Time the body as one of STEP_PARTS or of PAUSES; each pause has its own peak memory.
        `label`: its name in `pause_seconds`."""
        start, start_time, phase = self._now(), time.perf_counter(), PAUSES.get(name)
        with self.peaks.during(phase) if phase else contextlib.nullcontext():
            yield
        end = self._now()
        self._spans.append((name, start, end))
        if name == "forward_backward" and self._finished_steps >= UNSTEADY_STEPS:
            self._passes.append((self._pass_tokens, start, end))
        if name in PAUSES:
            seconds = time.perf_counter() - start_time
            self._paused_s += seconds
            self.pause_seconds[label or name].append(seconds)

    def exclude_wait(self, seconds: float) -> None:
        """Leave out what a micro-step has waited for: compiling, which is logged by itself."""
        self._paused_s += seconds
        self._compile_s += seconds

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Start the optimizer's time."""
        self._optimizer_start = self._now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Add the optimizer's time."""
        self._finished_steps += 1
        self._spans.append(("optimizer", self._optimizer_start, self._now()))

    def count_batch(self, inputs: Any, *, ignored_label: int) -> None:
        """Count a batch that is about to be trained on; `ignored_label` is the label of tokens that
        are not."""
        trained = scored_labels(inputs) != ignored_label
        self._pass_tokens = inputs["labels"].numel()
        self.add(
            tokens=count_tokens(inputs),
            trained_tokens=trained.sum(),
            samples=inputs["sample_count"] if "sample_count" in inputs else trained.any(1).sum(),
            places=inputs["labels"].numel(),
        )

    def timed_passes(self) -> list[tuple[int, float]]:
        """Padded tokens and seconds of this rank's steady passes, the newest."""
        if self._on_gpu and self._passes:
            self._passes[-1][2].synchronize()
        return [
            (tokens, start.elapsed_time(end) / 1000 if self._on_gpu else end - start)
            for tokens, start, end in self._passes
        ]

    def take_metrics(self, *, steps: int, device: torch.device) -> dict[str, float]:
        """The figures since the last log, `steps` optimizer steps ago, then start again; all ranks
        call it."""
        if self._on_gpu and self._spans:
            # all are recorded on one stream, so the others are over too
            self._spans[-1][2].synchronize()
        seconds: dict[str, float] = {}
        for name, start, end in self._spans:
            span_s = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            seconds[name] = seconds.get(name, 0.0) + span_s
        self._spans = []
        if self._compile_s:
            seconds["compile"] = self._compile_s
            seconds["forward_backward"] = max(
                0.0, seconds.get("forward_backward", 0.0) - self._compile_s
            )
        elapsed = max(1e-9, time.perf_counter() - self._window_start - self._paused_s)
        # the sums of every rank by name, each as a list: one vector and one collective, whatever is
        # measured
        sums, sums_by_rank = self.sums | {"memory": self._memory_gib()}, []
        parts = [
            torch.as_tensor(value, dtype=_SUM_DTYPE, device=device).flatten()
            for value in sums.values()
        ]
        for numbers in distributed.gather_values(torch.cat(parts).tolist()):
            remaining = iter(numbers)
            sums_by_rank.append(
                {
                    name: list(itertools.islice(remaining, part.numel()))
                    for name, part in zip(sums, parts, strict=True)
                }
            )
        counted_ranks = sums_by_rank[:: self._tensor_parallel]  # one of each tensor-parallel group
        tokens, places, samples = (
            sum(sums[name][0] for sums in counted_ranks) for name in ("tokens", "places", "samples")
        )
        self._start_window()
        speed = tokens / elapsed
        self.samples_seen += samples
        self.tokens_seen += tokens
        metrics = {
            "tokens_per_s": speed,
            "tokens_per_s_per_gpu" if self._on_gpu else "tokens_per_s_per_rank": (
                speed / len(sums_by_rank)
            ),
            "step_time_s": elapsed / max(1, steps),
            "padding_share": 1 - tokens / max(1.0, places),
            "samples_seen": self.samples_seen,
            "num_tokens": self.tokens_seen,
        }
        if "head" in sums_by_rank[0]:
            metrics |= head_metrics([sums["head"] for sums in counted_ranks])
        if "sources" in sums_by_rank[0]:
            metrics |= source_losses([sums["sources"] for sums in counted_ranks], self.sources)
        metrics |= {f"time_{name}_s": seconds.get(name, 0.0) / max(1, steps) for name in STEP_PARTS}
        metrics |= {
            f"time_{name}_s": seconds[name] for name in (*PAUSES, "compile") if name in seconds
        }
        metrics |= {
            f"loss_rank_{rank}": sums["loss"][0] / sums["trained_tokens"][0]
            for rank, sums in enumerate(sums_by_rank)
            if len(sums_by_rank) > 1 and sums["trained_tokens"][0]
        }
        names = ("allocated", "reserved", "peak") if self._on_gpu else ("resident", "peak")
        for name, *values in zip(names, *(sums["memory"] for sums in sums_by_rank), strict=True):
            metrics[f"memory_{name}_gib"] = max(values)
            if len(values) > 1:
                metrics |= {
                    f"memory_{name}_gib_rank_{rank}": value for rank, value in enumerate(values)
                }
        if self._plan is not None:  # allocated bytes on a GPU, resident ones on a CPU
            memory = self._plan.memory
            metrics["memory_predicted_gib"] = (
                memory.allocated if self._on_gpu else memory.reserved
            ) / GIB
            if self._plan.speed_known and self._plan.mfu is not None:
                metrics["mfu"] = self._plan.mfu * speed / self._plan.speed.tokens_per_s
        return metrics

    # In GiB: allocated and reserved memory of this rank now, on a CPU resident memory, and the
    # highest since loading.
    def _memory_gib(self) -> list[float]:
        present = [max(0, _resident_bytes() - self.peaks.baseline_bytes)]
        if self._on_gpu:
            present = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
        peaks = [
            allocated for name, (allocated, _) in self.peaks.by_phase().items() if name != "loading"
        ]
        return [size / GIB for size in (*present, max([present[0], *peaks]))]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def scored_labels(inputs: Any) -> Any:
    """The labels that are predicted: `shift_labels` where the batch has them, else those from the
    second token on."""
    return inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]


def count_tokens(inputs: Any) -> Any:
    """Tokens of a batch, without padding."""
    return inputs["token_count"] if "token_count" in inputs else inputs["attention_mask"].sum()


def head_sums(outputs: Any) -> torch.Tensor:
    """Sums of entropy, right predictions, scored tokens and routers' balance loss, and 1 if it has
    one: [5]."""
    sums = [
        part.detach().sum(dtype=_SUM_DTYPE)
        for part in (outputs.entropy, outputs.is_top1, outputs.label_mask)
    ]
    # filled on the device: a number that is copied there would be waited for
    none = torch.zeros_like(sums[0])
    balance = [none, none]
    if outputs.aux_loss is not None:
        balance = [outputs.aux_loss.detach().to(none), none + 1]
    return torch.stack([*sums, *balance])


def head_metrics(sums_by_rank: list[list[float]], *, prefix: str = "") -> dict[str, float]:
    """TRL's figures from all ranks' sums: means over trained tokens, of `aux_loss` over
    micro-steps."""
    entropy, correct, scored, balance, micro_steps = (
        sum(column) for column in zip(*sums_by_rank, strict=True)
    )
    metrics = {"entropy": entropy / max(1, scored), "mean_token_accuracy": correct / max(1, scored)}
    metrics |= {"aux_loss": balance / micro_steps} if micro_steps else {}
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def source_sums(
    log_probs: torch.Tensor,
    scored: torch.Tensor,
    sources: torch.Tensor,
    *,
    count: int = len(DEFAULT_SOURCES),
) -> torch.Tensor:
    """For each of `count` sources the sum of its tokens' losses and their number: [sources, 2].
    `log_probs`: of the tokens from the second on [B, T - 1], or of each next token [B, T], zero
    unless `scored`; `sources`: of all tokens, or of each next token [B, T]."""
    device = log_probs.device
    source_ids = torch.arange(count, device=device)[:, None, None]
    # [sources, B, T - 1]
    is_source = (sources[:, -log_probs.shape[1] :].to(device) == source_ids) & scored
    losses = -torch.where(is_source, log_probs.detach().float(), 0.0).sum(
        dim=(1, 2), dtype=_SUM_DTYPE
    )
    return torch.stack([losses, is_source.sum(dim=(1, 2)).to(_SUM_DTYPE)], dim=1)


def source_losses(
    sums_by_rank: list[list[float]], names: Sequence[str] = DEFAULT_SOURCES, *, prefix: str = ""
) -> dict[str, float]:
    """Mean loss over the tokens of each source, from the sums of every rank; a source without
    tokens is left out."""
    losses: dict[str, float] = {}
    for index, name in enumerate(names):
        loss_sum, tokens = (
            sum(rank[2 * index + column] for rank in sums_by_rank) for column in (0, 1)
        )
        if tokens:
            losses[f"{prefix}loss_{name}"] = loss_sum / tokens
    return losses


# --- how long the host takes for a pass: the shortest one of hardly any tokens, at a run's start --
# Tokens of a pass that takes the card next to no time, and how often it is run: the first one may
# build what later ones use.
SHORT_TOKENS, SHORT_PASSES = 8, 3


def shortest_seconds(compute: Callable[[], Any], device: torch.device, *, count: int) -> float:
    """Seconds of the quickest of `count` calls, each waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    seconds = []
    for _ in range(count):
        wait()
        start = time.perf_counter()
        compute()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_pass_floor(trainer: Any) -> float | None:
    """Seconds of a pass of SHORT_TOKENS tokens of the run's own model, which are the host's; None
    on a CPU, which has no time of its own, where other ranks compute in the same pass, and where
    each chat of a pass costs calls of its own. Gradients are left behind."""
    is_alone = distributed.world_size() == 1 and not trainer.plan.choice.step.one_by_one
    if trainer.args.device.type != "cuda" or not is_alone:
        return None
    return time_short_pass(trainer)


def time_short_pass(trainer: Any) -> float:
    """Seconds of a trainer's pass of SHORT_TOKENS tokens, a chat that is trained throughout."""
    device, row = trainer.args.device, trainer.train_dataset.__getitems__([0])[0]
    tokens = row["input_ids"][:SHORT_TOKENS]
    short_row = {"input_ids": tokens, "labels": tokens}
    if CHAT_LENGTHS in row:
        short_row[CHAT_LENGTHS] = [len(tokens)]
    # packs of one shape would be padded to it
    batch = replace(trainer.data_collator, min_tokens=0)([short_row])
    scored = torch.tensor(batch["labels"].numel(), device=device)
    return shortest_seconds(
        lambda: trainer.compute_micro_step(trainer.model_wrapped, dict(batch), scored),
        device,
        count=SHORT_PASSES,
    )


def record_host_speed(plan: Plan, floor_s: float) -> None:
    """Keep the host's seconds for an operator, by the operators that the plan counts in a pass."""
    times = plan.choice.uncorrected.pass_times
    if times is not None and times.host_s > 0:
        # the raw prediction is for a host that takes OPERATOR_S
        operator_s = floor_s * OPERATOR_S / times.host_s
        save_host_speed(plan.hardware.gpus[0].name, operator_s, measured_by="a run")
