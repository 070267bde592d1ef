"""What a run measures of itself between two logs: speed, utilisation, where a step's time goes, memory, padding.

Everything is summed on the device and read once per log, so that no step waits for it. Times on a GPU are those between
two events of the device; on a CPU, of the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from sft_play.planner.memory.estimate import RunPhase
from sft_play.planner.plan import Plan
from sft_play.training.loop.rows import DEFAULT_SOURCES
from sft_play.training.measure.peaks import Peaks
from sft_play.training.ranks import distributed
from sft_play.units import GIB

# Parts of a step: waiting for rows, the passes with their communication, the optimizer's step.
PARTS = ("data", "forward_backward", "optimizer")
# What happens between steps, and the moment that its memory is counted for, None for training's. Its time is logged,
# but counts neither for the step nor for the speed.
PAUSES: dict[str, RunPhase | None] = {"checkpoint": "saving", "evaluation": "evaluation", "profile": None}
# What a pass adds to.
_SUMS = ("_loss", "_trained", "_tokens", "_places", "_samples", "_head", "_sources")
# What sums over many tokens are kept in: fp32 would stop counting single tokens at 2**24.
_SUMMED = torch.float64


class _Clock:
    """Seconds spent in each part since they were last read."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any) -> None:
        self._spans.append((name, start, self.now()))

    def take(self) -> dict[str, float]:
        """Then start again from zero; waits for the device."""
        if self._on_gpu and self._spans:
            self._spans[-1][2].synchronize()  # all are recorded on one stream, so the others are over too
        totals: dict[str, float] = {}
        for name, start, end in self._spans:
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            totals[name] = totals.get(name, 0.0) + seconds
        self._spans = []
        return totals


class Monitor(TrainerCallback):
    """Measures this rank between two logs, and combines the figures of all ranks into what is logged."""

    def __init__(
        self, plan: Plan | None = None, *, copies: int = 1, sources: Sequence[str] = DEFAULT_SOURCES, peaks: Peaks | None = None
    ) -> None:
        """`plan`: what the measured figures are compared with; `copies`: consecutive ranks that see the same rows and
        are counted once; `sources`: names of the sources whose losses are reported; `peaks`: the peaks by moment, which
        this starts and ends."""
        self._peaks, self._copies, self.sources = peaks or Peaks(), copies, tuple(sources)
        self._plan, self._on_gpu = plan, self._peaks.on_gpu
        self._clock = _Clock(on_gpu=self._on_gpu)
        self._optimizer_start: Any = None
        self.samples_seen = 0.0
        """Rows with a trained token (chats of packs) that all ranks have seen in the run, as of the last log."""
        self.tokens_seen = 0.0
        """Tokens without padding that all ranks have seen in the run, as of the last log."""
        self.tokens_before = 0.0
        """Of those: seen before this process started."""
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds of each pause so far, of evaluations by the prefix of their figures."""
        self._reset()

    def seen(self) -> dict[str, float]:
        """Rows and tokens of all ranks until now, for a checkpoint; every rank calls it."""
        return {
            "samples": self.samples_seen + distributed.total(round(float(self._samples))) / self._copies,
            "tokens": self.tokens_seen + distributed.total(int(self._tokens)) / self._copies,
        }

    def continue_from(self, seen: Mapping[str, float]) -> None:
        """Count on from what a checkpoint says."""
        self.samples_seen, self.tokens_seen = seen["samples"], seen["tokens"]
        self.tokens_before = self.tokens_seen

    def _reset(self) -> None:
        self._loss: torch.Tensor | float = 0.0
        self._trained: torch.Tensor | int = 0
        self._tokens: torch.Tensor | int = 0
        self._places = 0
        self._samples: torch.Tensor | float = 0.0
        self._head: torch.Tensor | None = None
        self._sources: torch.Tensor | None = None
        self._paused, self._compiling, self._since = 0.0, 0.0, time.perf_counter()

    def counted(self) -> dict[str, Any]:
        """What was summed since the last log, for `recount`."""
        return {name: vars(self)[name] for name in _SUMS}

    def recount(self, counted: Mapping[str, Any]) -> None:
        """Count on from an earlier state: what came after it is repeated."""
        self.__dict__.update(counted)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start measuring: what loading and the evaluation before training took is not counted."""
        self._peaks.start("training")
        self._clock.take()
        self._paused, self._compiling, self._since = 0.0, 0.0, time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str, *, label: str | None = None) -> Iterator[None]:
        """Time what is inside as one of PARTS or of PAUSES; each of the latter has its own peak memory. `label`: its
        name in `pause_seconds`."""
        began, clock, moment = self._clock.now(), time.perf_counter(), PAUSES.get(name)
        with self._peaks.during(moment) if moment else contextlib.nullcontext():
            yield
        self._clock.add(name, began)
        if name in PAUSES:
            seconds = time.perf_counter() - clock
            self._paused += seconds
            self.took_s[label or name].append(seconds)

    def wait(self, seconds: float) -> None:
        """Leave out what a pass has waited for: compiling, which is logged by itself."""
        self._paused += seconds
        self._compiling += seconds

    def generating(self) -> contextlib.AbstractContextManager[None]:
        """While open, answers are generated: their memory is not counted as the evaluation's."""
        return self._peaks.during("generation")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Start the optimizer's time."""
        self._optimizer_start = self._clock.now()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Add it."""
        self._clock.add("optimizer", self._optimizer_start)

    def saw(self, inputs: Any, *, masked: int) -> None:
        """Count a batch that is about to be trained on; `masked` is the label of tokens that are not."""
        labels = inputs["labels"]
        trained = scored_labels(inputs) != masked
        self._tokens = self._tokens + tokens_in(inputs)
        self._trained = self._trained + trained.sum()
        self._samples = self._samples + (inputs["sample_count"] if "sample_count" in inputs else trained.any(1).sum())
        self._places += labels.numel()

    def lost(self, loss: torch.Tensor, *, in_step: Any, ranks: int) -> None:
        """Count the loss of a pass, which was scaled by `ranks` / `in_step` (trained tokens of the step)."""
        self._loss = self._loss + loss.detach() * in_step / ranks

    def scored(self, head: torch.Tensor, sources: torch.Tensor | None) -> None:
        """Count a pass: the sums of `head_sums`, and of `source_sums` where sources are reported."""
        self._head = head if self._head is None else self._head + head
        if sources is not None:
            self._sources = sources if self._sources is None else self._sources + sources

    def take(self, *, steps: int, device: torch.device) -> dict[str, float]:
        """The figures since the last log, `steps` optimizer steps ago, then start again; all ranks call it."""
        seconds = self._clock.take()
        if self._compiling:
            seconds["compile"] = self._compiling
            seconds["forward_backward"] = max(0.0, seconds.get("forward_backward", 0.0) - self._compiling)
        elapsed = max(1e-9, time.perf_counter() - self._since - self._paused)
        has_head, has_sources = self._head is not None, self._sources is not None
        of_head = [] if self._head is None else list(self._head)
        of_sources = [] if self._sources is None else list(self._sources.flatten())
        # one vector and one collective per log, whatever is measured. Places: 0 loss, 1 trained tokens, 2 tokens,
        # 3 places of the batches, 4 samples, 5 to 7 memory; from 8 on the head's sums, at the end those by source
        own = [self._loss, self._trained, self._tokens, self._places, self._samples, *self._memory()]
        own += [*of_head, *of_sources]
        vector = torch.stack([torch.as_tensor(number, dtype=_SUMMED, device=device) for number in own])
        all_ranks = distributed.gathered_numbers(vector)
        counted = all_ranks[:: self._copies]  # one of each tensor-parallel group
        self._reset()
        tokens = sum(rank[2] for rank in counted)
        speed = tokens / elapsed
        self.samples_seen += sum(rank[4] for rank in counted)
        self.tokens_seen += tokens
        figures = {
            "tokens_per_s": speed,
            "tokens_per_s_per_gpu" if self._on_gpu else "tokens_per_s_per_rank": speed / len(all_ranks),
            "step_time_s": elapsed / max(1, steps),
            "padding_share": 1 - tokens / max(1.0, sum(rank[3] for rank in counted)),
            "samples_seen": self.samples_seen,
            "num_tokens": self.tokens_seen,
        }
        if has_head:
            figures |= head_figures([rank[8 : 8 + len(of_head)] for rank in counted])
        if has_sources:
            figures |= source_losses([rank[-2 * len(self.sources) :] for rank in counted], self.sources)
        figures |= {f"time_{name}_s": seconds.get(name, 0.0) / max(1, steps) for name in PARTS}
        figures |= {f"time_{name}_s": seconds[name] for name in (*PAUSES, "compile") if name in seconds}
        if len(all_ranks) > 1:
            figures |= {f"loss_rank_{n}": rank[0] / rank[1] for n, rank in enumerate(all_ranks) if rank[1]}
        figures |= self._memory_figures([rank[5:8] for rank in all_ranks])
        if self._plan is not None:  # allocated bytes on a GPU, resident ones on a CPU
            memory = self._plan.memory
            figures["memory_predicted_gib"] = (memory.allocated if self._on_gpu else memory.reserved) / GIB
            if self._plan.speed_known and self._plan.mfu is not None:
                figures["mfu"] = self._plan.mfu * speed / self._plan.speed.tokens_per_s
        return figures

    def _memory(self) -> list[float]:
        """Allocated and reserved memory of this rank now in GiB (on a CPU resident, and 0), and the highest since
        loading."""
        if self._on_gpu:
            now, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            now, reserved = max(0, psutil.Process().memory_info().rss - self._peaks.level_bytes), 0
        peaks = self._peaks.by_moment()
        highest = max((allocated for name, (allocated, _) in peaks.items() if name != "loading"), default=0)
        return [now / GIB, reserved / GIB, max(now, highest) / GIB]

    def _memory_figures(self, ranks: list[list[float]]) -> dict[str, float]:
        names = ("allocated", "reserved", "peak") if self._on_gpu else ("resident", None, "peak")
        figures: dict[str, float] = {}
        for name, values in zip(names, zip(*ranks, strict=True), strict=True):
            if name is None:
                continue
            figures[f"memory_{name}_gib"] = max(values)
            if len(values) > 1:
                figures |= {f"memory_{name}_gib_rank_{n}": value for n, value in enumerate(values)}
        return figures


def scored_labels(inputs: Any) -> torch.Tensor:
    """The labels that are predicted: `shift_labels` where the batch has them, else those from the second token on."""
    labels: torch.Tensor = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    return labels


def tokens_in(inputs: Any) -> torch.Tensor:
    """Tokens of a batch, without padding."""
    counted: torch.Tensor = inputs["token_count"] if "token_count" in inputs else inputs["attention_mask"].sum()
    return counted


def head_sums(outputs: Any) -> torch.Tensor:
    """Sums of entropy, right predictions, scored tokens and routers' balance loss, and 1 if it has one: [5]."""
    sums = [part.detach().sum(dtype=_SUMMED) for part in (outputs.entropy, outputs.is_top1, outputs.label_mask)]
    none = torch.zeros_like(sums[0])  # filled on the device: a number that is copied there would be waited for
    has_balance = outputs.aux_loss is not None
    balance = [outputs.aux_loss.detach().to(none), none + 1] if has_balance else [none, none]
    return torch.stack([*sums, *balance])


def head_figures(ranks: list[list[float]], *, prefix: str = "") -> dict[str, float]:
    """TRL's figures from all ranks' sums: means over trained tokens, of `aux_loss` over passes."""
    entropy, right, scored, balance, passes = (sum(column) for column in zip(*ranks, strict=True))
    figures = {"entropy": entropy / max(1, scored), "mean_token_accuracy": right / max(1, scored)}
    figures |= {"aux_loss": balance / passes} if passes else {}
    return {f"{prefix}{name}": value for name, value in figures.items()}


def source_sums(
    log_probs: torch.Tensor, scored: torch.Tensor, sources: torch.Tensor, *, count: int = len(DEFAULT_SOURCES)
) -> torch.Tensor:
    """For each of `count` sources the sum of its tokens' losses and their number: [sources, 2]. `log_probs`: of the
    tokens from the second on [B, T - 1], or of each next token [B, T], zero unless `scored`; `sources`: of all tokens,
    or of each next token [B, T]."""
    device = log_probs.device
    marks = torch.arange(count, device=device)[:, None, None]
    of_scored = sources[:, -log_probs.shape[1] :].to(device)
    mine = (of_scored == marks) & scored  # [sources, B, T - 1]
    losses = -torch.where(mine, log_probs.detach().float(), 0.0).sum(dim=(1, 2), dtype=_SUMMED)
    return torch.stack([losses, mine.sum(dim=(1, 2)).to(_SUMMED)], dim=1)


def source_losses(ranks: list[list[float]], names: Sequence[str] = DEFAULT_SOURCES, *, prefix: str = "") -> dict[str, float]:
    """Mean loss over the tokens of each source, from the sums of every rank; a source without tokens is left out."""
    losses: dict[str, float] = {}
    for place, name in enumerate(names):
        loss_sum, tokens = (sum(rank[2 * place + column] for rank in ranks) for column in (0, 1))
        if tokens:
            losses[f"{prefix}loss_{name}"] = loss_sum / tokens
    return losses
