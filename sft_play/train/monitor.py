"""What a run measures of itself between two logs: speed, utilisation, where a step's time goes, memory, padding.

Everything is summed on the device and read once per log, so that no step waits for it. On a GPU times are those of the
device, between events; on a CPU those of the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from sft_play.plan.plan import Plan
from sft_play.train import engine
from sft_play.train.peaks import Peaks, RunMoment
from sft_play.train.rows import SOURCES

GIB = 2**30
PARTS = ("data", "forward_backward", "optimizer")
"""Parts of a step: waiting for rows, the passes with their communication, the optimizer's step."""
PAUSES: dict[str, RunMoment] = {"checkpoint": "saving", "evaluation": "evaluation"}
"""What stands between steps, with the moment whose memory it takes: its time is shown, and is no part of a step or of
the speed."""


@dataclass(frozen=True)
class Expected:
    """What the plan predicts: peak bytes, and tokens a second at its model FLOP utilisation; None where not known."""

    peak_bytes: int
    tokens_per_s: float | None
    mfu: float | None

    def mfu_at(self, tokens_per_s: float) -> float | None:
        """Utilisation of the GPUs' dense peak at a speed: operations per token are the plan's."""
        if not self.tokens_per_s or self.mfu is None:
            return None
        return self.mfu * tokens_per_s / self.tokens_per_s


def expected_of(plan: Plan) -> Expected:
    """The figures that the measured ones stand beside: allocated bytes on a GPU, resident ones on a CPU."""
    on_gpu = plan.hardware.device == "cuda"
    speed = plan.speed.tokens_per_s if plan.speed_known else None
    return Expected(plan.memory.allocated if on_gpu else plan.memory.reserved, speed, plan.mfu)


class _Clock:
    """Seconds by part since they were last taken."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """A moment: an event in the device's stream, or seconds."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: Any) -> None:
        """What went on from `start` until now."""
        self._spans.append((name, start, self.now()))

    def take(self) -> dict[str, float]:
        """Seconds of each part, and start again; waits for the device."""
        if self._on_gpu and self._spans:
            self._spans[-1][2].synchronize()
        found: dict[str, float] = {}
        for name, start, end in self._spans:
            seconds = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            found[name] = found.get(name, 0.0) + seconds
        self._spans = []
        return found


class Monitor:
    """Measures this rank between two logs, and makes of all ranks' figures what is logged."""

    def __init__(
        self,
        expected: Expected | None = None,
        *,
        on_gpu: bool = False,
        level_bytes: int = 0,
        copies: int = 1,
        sources: Sequence[str] = SOURCES,
        peaks: Peaks | None = None,
    ) -> None:
        """`level_bytes`: resident memory before anything of the run was loaded; `copies`: ranks in a row that see the
        same rows, and are counted once; `sources`: names of those whose losses are told apart; `peaks`: those of the
        run's moments, whose changes this tells."""
        self._peaks = peaks or Peaks(on_gpu=on_gpu, level_bytes=level_bytes)
        self._copies = copies
        self.sources = tuple(sources)
        self._expected, self._on_gpu, self._level = expected, on_gpu, level_bytes
        self._clock = _Clock(on_gpu=on_gpu)
        self._paused = 0.0
        self._optimizer: Any = None
        self._loss: torch.Tensor | float = 0.0
        self._trained: torch.Tensor | int = 0
        self._tokens: torch.Tensor | int = 0
        self._places = 0
        self._samples: torch.Tensor | float = 0.0
        self._sources: torch.Tensor | None = None
        self.samples_seen = 0.0
        """Rows (of packs: their chats) with a trained token that all ranks have seen in this start."""
        self.tokens_seen = 0.0
        """Tokens, padding not counted, that all ranks have seen in this start."""
        self._since = time.perf_counter()

    def start(self) -> None:
        """Count from here; memory above this level is the run's on a CPU."""
        self._peaks.start("training")
        self._clock.take()
        self._paused, self._since = 0.0, time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside as one of PARTS, or as one of PAUSES, whose peaks of memory are their own."""
        began, clock = self._clock.now(), time.perf_counter()
        with self._peaks.during(PAUSES[name]) if name in PAUSES else contextlib.nullcontext():
            yield
        self._clock.add(name, began)
        if name in PAUSES:
            self._paused += time.perf_counter() - clock

    def generating(self) -> contextlib.AbstractContextManager[None]:
        """What is inside generates answers, which is no part of the evaluation's memory."""
        return self._peaks.during("generation")

    def before_optimizer(self) -> None:
        """The optimizer's step begins."""
        self._optimizer = self._clock.now()

    def after_optimizer(self) -> None:
        """It ends."""
        if self._optimizer is not None:
            self._clock.add("optimizer", self._optimizer)
            self._optimizer = None

    def saw(self, inputs: Any, *, masked: int) -> None:
        """A batch that is about to be trained on; `masked` is the label of a token that is not.

        A batch of packs has no attention mask and tells what it holds.
        """
        labels = inputs["labels"]
        trained = scored_labels(inputs) != masked
        self._tokens = self._tokens + tokens_in(inputs)
        self._trained = self._trained + trained.sum()
        self._samples = self._samples + (inputs["sample_count"] if "sample_count" in inputs else trained.any(1).sum())
        self._places += labels.numel()

    def lost(self, loss: torch.Tensor, *, in_step: Any, ranks: int) -> None:
        """The loss of a pass as the trainer scales it: by ranks over the trained tokens of the whole step."""
        self._loss = self._loss + loss.detach() * in_step / ranks

    def by_source(self, sums: torch.Tensor) -> None:
        """What a pass lost on the tokens of each source: sums of `source_sums`."""
        self._sources = sums if self._sources is None else self._sources + sums

    def take(self, *, steps: int, device: torch.device) -> dict[str, float]:
        """The figures since the last log, and start again; all ranks call it.

        Args:
            steps: optimizer steps since then.
        """
        seconds = self._clock.take()
        elapsed = max(1e-9, time.perf_counter() - self._since - self._paused)
        has_sources = self._sources is not None
        of_sources = [] if self._sources is None else list(self._sources.flatten())
        mine = [self._loss, self._trained, self._tokens, self._places, self._samples, *self._memory(), *of_sources]
        all_ranks = engine.gathered_numbers(_vector(mine, device))
        sums = all_ranks[:: self._copies]
        self._reset()
        tokens = sum(rank[2] for rank in sums) / elapsed
        found = {
            "tokens_per_s": tokens,
            "tokens_per_s_per_gpu" if self._on_gpu else "tokens_per_s_per_rank": tokens / len(all_ranks),
            "step_time_s": elapsed / max(1, steps),
            "padding_share": 1 - sum(rank[2] for rank in sums) / max(1.0, sum(rank[3] for rank in sums)),
        }
        self.samples_seen += sum(rank[4] for rank in sums)
        found["samples_seen"] = self.samples_seen
        self.tokens_seen += sum(rank[2] for rank in sums)
        if has_sources:
            found |= source_losses([rank[-2 * len(self.sources) :] for rank in sums], self.sources)
        found |= {f"time_{name}_s": seconds.get(name, 0.0) / max(1, steps) for name in PARTS}
        found |= {f"time_{name}_s": seconds[name] for name in PAUSES if name in seconds}
        if len(all_ranks) > 1:
            found |= {f"loss_rank_{n}": rank[0] / rank[1] for n, rank in enumerate(all_ranks) if rank[1]}
        return found | self._memory_figures(all_ranks) | self._against_plan(tokens)

    def _reset(self) -> None:
        self._loss, self._trained, self._tokens, self._samples = 0.0, 0, 0, 0.0
        self._places, self._sources = 0, None
        self._paused, self._since = 0.0, time.perf_counter()

    def _memory(self) -> list[float]:
        """Allocated and reserved bytes of this rank, and the highest of its training steps, in GiB; on a CPU resident
        ones."""
        if self._on_gpu:
            now, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            now, reserved = max(0, psutil.Process().memory_info().rss - self._level), 0
        highest = self._peaks.highest("training")
        return [now / GIB, reserved / GIB, max(now, highest.allocated if highest else 0) / GIB]

    def _memory_figures(self, sums: list[list[float]]) -> dict[str, float]:
        names = ("allocated", "reserved", "peak") if self._on_gpu else ("resident", None, "peak")
        found: dict[str, float] = {}
        for offset, name in enumerate(names):
            if name is None:
                continue
            values = [rank[5 + offset] for rank in sums]
            found[f"memory_{name}_gib"] = max(values)
            if len(values) > 1:
                found |= {f"memory_{name}_gib_rank_{n}": value for n, value in enumerate(values)}
        return found

    def _against_plan(self, tokens_per_s: float) -> dict[str, float]:
        if self._expected is None:
            return {}
        found = {"memory_predicted_gib": self._expected.peak_bytes / GIB}
        mfu = self._expected.mfu_at(tokens_per_s)
        return found if mfu is None else {**found, "mfu": mfu}


def scored_labels(inputs: Any) -> torch.Tensor:
    """The labels that are scored: those from the second token on, or those of each next one where they are given."""
    shifted: torch.Tensor = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
    return shifted


def tokens_in(inputs: Any) -> torch.Tensor:
    """Tokens of a batch, padding not counted."""
    counted: torch.Tensor = inputs["token_count"] if "token_count" in inputs else inputs["attention_mask"].sum()
    return counted


def source_sums(
    log_probs: torch.Tensor, scored: torch.Tensor, sources: torch.Tensor, *, count: int = len(SOURCES)
) -> torch.Tensor:
    """For each of `count` sources the sum of the losses of its tokens, and how many there are: [sources, 2].

    Args:
        log_probs: of the tokens from the second on [B, T - 1], zero where `scored` is false, or of the next [B, T].
        sources: of all tokens [B, T], or of the next ones.
    """
    device = log_probs.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    marks = torch.arange(count, device=device)[:, None, None]
    of_scored = sources[:, -log_probs.shape[1] :].to(device)
    mine = (of_scored == marks) & scored  # [sources, B, T - 1]
    losses = -torch.where(mine, log_probs.detach().float(), 0.0).sum(dim=(1, 2), dtype=dtype)
    return torch.stack([losses, mine.sum(dim=(1, 2)).to(dtype)], dim=1)


def source_losses(ranks: list[list[float]], names: Sequence[str] = SOURCES, *, prefix: str = "") -> dict[str, float]:
    """Loss over the tokens of each source from the sums of every rank; a source without a token has none."""
    found: dict[str, float] = {}
    for place, name in enumerate(names):
        lost, tokens = (sum(rank[2 * place + column] for rank in ranks) for column in (0, 1))
        if tokens:
            found[f"{prefix}loss_{name}"] = lost / tokens
    return found


def _vector(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """Numbers, some of them on the device already, as one vector of float64 (float32 where the device has no other)."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([torch.as_tensor(number, dtype=dtype, device=device) for number in numbers])
