"""What the ranks of a run are handed by the parent that starts them, or by rank 0: folder, plan, how it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from sft_play.config.load import LoadedConfig
from sft_play.planner.plan import Planned, plan_from_json
from sft_play.runs.creation import create_run
from sft_play.runs.files import write_json, write_text
from sft_play.runs.folder import DEEPSPEED_FILE, RunFolder
from sft_play.runs.locking import LAUNCHER
from sft_play.runs.manifest import new_manifest
from sft_play.runs.resuming import first_day

LAUNCH_FILE = "launch.json"
"""In a run folder that a parent created: what it hands to its ranks."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a rank is handed by its parent or by rank 0: the run's folder, its plan, how it was meant to start."""

    folder: str
    plan: dict[str, Any]
    resume: bool
    made: bool
    """Whether the parent has created the run folder, so that rank 0 must not."""
    deepspeed: dict[str, Any] | None = None
    finished: bool = False
    """Whether there is nothing left to do."""
    today: str = ""
    """The date for chat templates that write one (YYYY-MM-DD): the day of the run's first start."""
    more: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Plan and DeepSpeed's config of each stage after the first."""

    @staticmethod
    def of(folder: str, planned: Sequence[Planned], *, resume: bool, made: bool, today: str) -> Handed:
        """From the plans of a run: one, or one for each stage."""
        (plan, deepspeed), *later = planned
        more = [{"plan": plan.as_json(), "deepspeed": deepspeed} for plan, deepspeed in later]
        return Handed(folder, plan.as_json(), resume, made=made, deepspeed=deepspeed, today=today, more=more)

    def planned(self) -> list[Planned]:
        """The plans, read back."""
        parts = [{"plan": self.plan, "deepspeed": self.deepspeed}, *self.more]
        return [(plan_from_json(part["plan"]), part["deepspeed"]) for part in parts]

    def text(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))


def write_launch(
    folder: RunFolder, loaded: LoadedConfig, planned: Sequence[Planned], *, resume: bool
) -> contextlib.AbstractContextManager[object]:
    """Write the run folder with the plan and what the ranks are handed, or nothing; returns a new folder's lock."""
    mark: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    plan, resolved = planned[0]
    if not resume:
        manifest = new_manifest(loaded, hardware=plan.hardware.as_json(), data={})
        mark = create_run(folder, loaded, manifest=manifest, plan=plan.as_json(), by=LAUNCHER)
    else:  # over other ranks the split of the batch is another; the manifest is updated by rank 0
        folder.write_json("plan.json", plan.as_json())
    handed = Handed.of(
        str(folder.path.absolute()), planned, resume=resume, made=not resume, today=str(first_day(folder))
    )
    write_text(folder.path / LAUNCH_FILE, handed.text())
    if resolved is not None:
        write_json(folder.path / DEEPSPEED_FILE, resolved)
    return mark
