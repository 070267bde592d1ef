"""A window of steps under torch's profiler: where the time goes, what ranks send, and how much of
it is exposed.

Counts and bytes are those of the operators (`c10d::…`) that all collectives go through, as torch's
profiler records them; times those of the backend's own work: NCCL's kernels, gloo's calls.
"""

import json
import logging
import math
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from transformers import TrainerCallback

from sft_play.config.schema import RunConfig
from sft_play.planner.layout import Layout
from sft_play.planner.plan import Plan
from sft_play.planner.speed import sent_bytes
from sft_play.training.distributed import gather_values, is_first, rank

logger = logging.getLogger(__name__)

# The steps before it are warm-up: buffers are allocated, kernels chosen, buckets built.
FIRST_STEP = 3
TRACE_FILE = "trace.json.gz"
_COMMUNICATION_PREFIXES = ("nccl", "gloo:")

TimeSpan = tuple[float, float]


def covered_time(spans: Iterable[TimeSpan]) -> float:
    """How long at least one of the spans lasts, in their unit."""
    total, last_end = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total


def exposed_time(communication: Sequence[TimeSpan], computation: Sequence[TimeSpan]) -> float:
    """How long communication runs while nothing is computed, in the spans' unit."""
    return covered_time([*communication, *computation]) - covered_time(computation)


def split_spans(events: Sequence[Any], *, on_gpu: bool) -> tuple[list[TimeSpan], list[TimeSpan]]:
    """Spans of communication and of computation, in microseconds: kernels on a GPU, operators on a
    CPU. What a library annotates comes back as an event of the GPU too, collectives included: it
    computes nothing."""
    if on_gpu:
        recorded = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        computing = [
            event
            for event in recorded
            if not event.name.startswith((*_COMMUNICATION_PREFIXES, "Memcpy", "Memset"))
        ]
    else:
        recorded = [event for event in events if event.device_type != DeviceType.CUDA]
        computing = [event for event in recorded if event.name.startswith("aten::")]
    sending = [event for event in recorded if event.name.startswith(_COMMUNICATION_PREFIXES)]
    communication, computation = (
        [(event.time_range.start, event.time_range.end) for event in kind]
        for kind in (sending, computing)
    )
    return communication, computation


class ProfileWindow(TrainerCallback):
    """Profiles `steps` optimizer steps of this rank, from the third on; rank 0 writes the trace
    into `folder`, and the `trainer` logs the times. With a `plan`, on every rank,
    `communication.json` counts what they send.
    """

    def __init__(self, folder: Path, steps: int, trainer: Any, *, plan: Plan | None = None) -> None:
        self._folder, self._steps, self._plan, self._trainer = folder, steps, plan, trainer
        self._steps_begun, self._start_time, self._has_ended = 0, 0.0, False
        self._profile: Any = None  # while the window is open

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start with the third step of this process."""
        self._steps_begun += 1
        if self._steps_begun == FIRST_STEP:
            # all activities that this machine has; acc_events: else torch warns that it keeps the
            # last cycle only
            self._profile = profile(acc_events=True, record_shapes=self._plan is not None)
            self._profile.start()
            self._start_time = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the last step of the window, or of the run."""
        is_last = (
            self._steps_begun == FIRST_STEP + self._steps - 1
            or state.global_step >= state.max_steps
        )
        if self._profile is not None and is_last:
            self._finish()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop with a run that ends inside the window; warn if it ended before the window began."""
        if self._profile is not None:
            self._finish()
        elif not self._has_ended and is_first():
            logger.warning(
                "Profile: nothing was traced, since the run ended before its step %d did",
                FIRST_STEP,
            )

    def _finish(self) -> None:
        on_gpu, steps = torch.cuda.is_available(), self._steps_begun - FIRST_STEP + 1
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start_time
        # reading and writing the trace takes longer than a step, whose time it is not
        with self._trainer._monitor.timed_part("profile"):
            self._profile.stop()
            communication, computation = split_spans(self._profile.events(), on_gpu=on_gpu)
            busy_s = covered_time(communication) / 1e6
            exposed_s = exposed_time(communication, computation) / 1e6
            if is_first():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._profile.export_chrome_trace(str(self._folder / TRACE_FILE))
                logger.info(
                    "Profile of %d steps: %.4f s of communication a step, %.4f s of it not hidden"
                    " by computation; trace: %s (https://ui.perfetto.dev opens it)",
                    steps,
                    busy_s / steps,
                    exposed_s / steps,
                    self._folder / TRACE_FILE,
                )
                control = self._trainer.control
                # logging resets it, and the step's own figures would not be logged
                is_due = control.should_log
                self._trainer.log(
                    {
                        "time_communication_s": busy_s / steps,
                        "time_exposed_communication_s": exposed_s / steps,
                    }
                )
                control.should_log = is_due
            if self._plan is not None:
                plan, events = self._plan, self._profile.events()
                collectives = list_collectives(
                    self._profile.profiler.kineto_results.experimental_event_tree()
                )
                spans = [
                    (event.name, event.time_range.start, event.time_range.end) for event in events
                ]
                communication_by_rank = gather_values(
                    RankCommunication(
                        rank(),
                        socket.gethostname(),
                        seconds,
                        busy_s,
                        exposed_s,
                        collectives,
                        collective_times(spans, collectives),
                    )
                )
                if is_first():
                    report = communication_report(
                        communication_by_rank,
                        plan.choice.layout,
                        steps=steps,
                        planned_bytes=plan.speed.collectives,
                        planned_sent_bytes=plan.speed.moved_bytes,
                    )
                    path = self._folder / "communication.json"
                    path.write_text(
                        json.dumps(report | {"trace": TRACE_FILE}, indent=1) + "\n",
                        encoding="utf-8",
                    )
                    verdict = (
                        "agree" if report["agrees"] else f"are not within {report['tolerance']:.0%}"
                    )
                    logger.info(
                        "Communication: a rank sends %s bytes a step,"
                        " %s predicted: they %s; by kind and rank: %s",
                        f"{report['sent_bytes']:,}",
                        f"{report['planned_sent_bytes']:,}",
                        verdict,
                        path,
                    )
        self._profile, self._has_ended = None, True


def build_profile_window(
    config: RunConfig, plan: Plan, folder: Path, trainer: Any
) -> ProfileWindow | None:
    """The window that a run asks for: on all ranks where communication is counted, else on the
    first."""
    profile_setting, steps = (
        config.distributed.profile_communication,
        config.train.profile_steps or 0,
    )
    if profile_setting is not False and not plan.choice.layout.is_one_process:
        counted_steps = 3 if profile_setting is True else int(profile_setting)
        return ProfileWindow(folder, max(steps, counted_steps), trainer, plan=plan)
    return ProfileWindow(folder, steps, trainer) if steps and is_first() else None


# --- what ranks send ------------------------------------------------------------------------------
# What DDP, FSDP2, DeepSpeed and this toolkit call. Operator: kind, the index of the argument with
# the tensors that have the size (-1: none), and whether they are the whole message, else one rank's
# part of it. The whole message is what all ranks have together, before or after.
OPERATORS: Mapping[str, tuple[str, int, bool]] = {
    "c10d::allreduce_": ("all_reduce", 0, True),
    "c10d::reduce_": ("reduce", 0, True),
    "c10d::broadcast_": ("broadcast", 0, True),
    "c10d::_allgather_base_": ("all_gather", 0, True),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0, True),
    "c10d::allgather_": ("all_gather", 1, False),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, True),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, True),
    "c10d::alltoall_base_": ("all_to_all", 1, True),
    "c10d::barrier": ("barrier", -1, True),
}
# How far counted and predicted bytes may be apart: FSDP2 pads tensors, ZeRO-3 keeps small ones
# whole, and logged numbers are reduced too. Measured with a model of 94,000 weights on two CPU
# ranks: 2% at most (docs/launch.md).
TOLERANCE = 0.05
_KINDS_BY_NAME = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Reduce": "reduce", "SendRecv": "send", "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
}  # fmt: skip


class RankCommunication(NamedTuple):
    """What one rank recorded: seconds of the window, of communication and of its exposed part; each
    collective (kind, bytes, whether they are the whole message); kind and seconds of the backend's
    work for them."""

    rank: int
    host: str
    window_s: float
    busy_s: float
    exposed_s: float
    collectives: Sequence[tuple[str, int, bool]] = ()
    work_times: Sequence[tuple[str, float]] = ()


def communication_report(
    communication_by_rank: Sequence[RankCommunication],
    layout: Layout,
    *,
    steps: int,
    planned_bytes: Mapping[str, int],
    planned_sent_bytes: int,
) -> dict[str, Any]:
    """`profile/communication.json`: the counts of all ranks in a window of `steps`, per optimizer
    step, beside the plan's bytes by kind, and what one rank sends. Of a kind, `bytes` are of whole
    messages, `sent_bytes` by one rank, `seconds` on the mean rank."""
    kinds: dict[str, dict[str, Any]] = {}
    own_collectives = communication_by_rank[0].collectives  # all ranks run the same ones
    for kind in dict.fromkeys(kind for kind, _, _ in own_collectives):
        ranks_of_kind = group_size(kind, layout)
        # of whole messages; others are one rank's part of it
        sizes = [
            size if whole else size * ranks_of_kind
            for name, size, whole in own_collectives
            if name == kind
        ]
        work_s = [
            time for rank in communication_by_rank for name, time in rank.work_times if name == kind
        ]
        kinds[kind] = {
            "count": len(sizes) / steps,
            "bytes": int(sum(sizes) / steps),
            "sent_bytes": int(sent_bytes(kind, sum(sizes) / steps, ranks_of_kind)),
            "seconds": sum(work_s) / (len(communication_by_rank) * steps),
        }
    # a collective ends on all ranks together, so it is shortest on the rank that enters it last;
    # what it takes longer on the others is waiting. None where ranks did not run the same ones
    work_by_rank, waiting_s = [entry.work_times for entry in communication_by_rank], None
    if len({tuple(kind for kind, _ in work_times) for work_times in work_by_rank}) == 1:
        shortest_s = sum(
            min(seconds for _, seconds in collective)
            for collective in zip(*work_by_rank, strict=True)
        )
        waiting_s = [
            sum(seconds for _, seconds in work_times) - shortest_s for work_times in work_by_rank
        ]
    ranks: list[dict[str, Any]] = [
        {
            "rank": entry.rank,
            "host": entry.host,
            "step_s": entry.window_s / steps,
            "communication_s": entry.busy_s / steps,
            "exposed_s": entry.exposed_s / steps,
            "waiting_s": None if waiting_s is None else waiting_s[index] / steps,
        }
        for index, entry in enumerate(communication_by_rank)
    ]
    step_s, communication_s = (
        sum(entry[key] for entry in ranks) / len(ranks) for key in ("step_s", "communication_s")
    )
    sent = sum(entry["sent_bytes"] for entry in kinds.values())
    difference = sent / planned_sent_bytes - 1 if planned_sent_bytes else None
    return {
        "layout": layout.name,
        "steps": steps,
        "kinds": kinds,
        "ranks": ranks,
        "planned_bytes": dict(planned_bytes),
        "planned_sent_bytes": planned_sent_bytes,
        "sent_bytes": sent,
        "step_s": step_s,
        "communication_s": communication_s,
        "share": communication_s / step_s if step_s else None,
        "difference": difference,
        "tolerance": TOLERANCE,
        "agrees": difference is not None and abs(difference) <= TOLERANCE,
    }


def group_size(kind: str, layout: Layout) -> int:
    """Ranks of the group that collectives of a kind run over."""
    if layout.tensor_parallel > 1 and kind in ("all_gather", "reduce_scatter"):
        return layout.shard  # FSDP2's, among the ranks that hold the same part of each layer
    if layout.tensor_parallel > 1 and kind == "all_reduce":
        return layout.tensor_parallel  # two in every block; those of gradients are few beside them
    if not layout.shards_params or layout.gradient_ranks == layout.shard:
        return layout.ranks
    # hybrid sharding: gradients are all-reduced across the replicas, the rest stays within a shard
    # group
    return layout.gradient_ranks // layout.shard if kind == "all_reduce" else layout.shard


def list_collectives(tree: Iterable[Any]) -> list[tuple[str, int, bool]]:
    """Kind, bytes and whether they are the whole message, of each collective in the profiler's
    tree, in order."""
    stack, nodes = list(tree), []
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        if node.name in OPERATORS:
            nodes.append(node)
    collectives = []
    for node in sorted(nodes, key=lambda node: node.start_time_ns):
        kind, index, is_whole = OPERATORS[node.name]
        inputs = node.extra_fields.inputs
        tensors = inputs[index] if 0 <= index < len(inputs) else ()
        collectives.append((kind, _tensor_bytes(tensors), is_whole))
    return collectives


def _tensor_bytes(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(map(_tensor_bytes, tensors))
    if not hasattr(tensors, "sizes"):
        return 0
    return int(math.prod(tensors.sizes)) * int(tensors.dtype.itemsize)


def work_kind(name: str) -> str | None:
    """The kind of a backend's work by its name: NCCL's kernels, gloo's calls; None for anything
    else."""
    nccl_kernel = r"nccl\w*Kernel_(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)"
    match = re.match(nccl_kernel, name) or re.match(r"gloo:(.*)", name)
    if match is None:
        return None
    return _KINDS_BY_NAME.get(match[1], match[1])


def collective_times(
    work: Sequence[tuple[str, float, float]], collectives: Sequence[tuple[str, int, bool]]
) -> list[tuple[str, float]]:
    """Kind and seconds of the backend's work (name, start, end in microseconds). gloo implements
    reduce-scatter by an all-reduce: where there is one piece for each collective, it gets that
    one's kind."""
    pieces = sorted(
        (start, end, kind) for name, start, end in work if (kind := work_kind(name)) is not None
    )
    kinds = [kind for _, _, kind in pieces]
    if len(pieces) == len(collectives):
        kinds = [kind for kind, _, _ in collectives]
    return [
        (kind, (end - start) / 1e6) for kind, (start, end, _) in zip(kinds, pieces, strict=True)
    ]
