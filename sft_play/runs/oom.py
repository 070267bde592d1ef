"""Memory that ran out: what a run did about it, in its manifest; or in a note, where its processes ended over it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import STAGES, RunFolder

ENTRY = "out_of_memory"
# In the folder of a run or a stage: that a rank ran out of memory, until the next start has read it.
NOTE = "out_of_memory.json"
_AGAIN = {
    "step": "the step is repeated from its start with {now}, and so are all later ones",
    "run": "all ranks end, and start again from the last checkpoint with {now}",
    "batch": "this batch is repeated in parts of {now}, and so are all later ones",
    None: "the run ends",
}


@dataclass(frozen=True)
class RanOut:
    """Where memory ran out, and what is done: `micro_batch` rows were too many, and `now` are tried."""

    step: int
    doing: str
    rank: int
    micro_batch: int
    now: int
    again: Literal["step", "run", "batch"] | None
    error: str

    @property
    def line(self) -> str:
        """In words."""
        return (
            f"step {self.step}: rank {self.rank} ran out of memory ({self.doing}, {self.micro_batch} rows at a time): "
            f"{_AGAIN[self.again].format(now=self.now)}; {self.error}"
        )


def recorded(folder: RunFolder) -> list[RanOut]:
    """What the manifest of a run or a stage has of it, oldest first."""
    entries = read_json(folder.manifest_path).get(ENTRY)
    found = []
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(TypeError):  # of another version
            found.append(RanOut(**entry))
    return found


def record(folder: RunFolder, event: RanOut) -> None:
    """Add it to the manifest, with the batch that the run goes on with, and a resumed run too."""
    manifest = folder.manifest()
    batch = manifest.get("batch")
    if event.again in ("step", "run") and isinstance(batch, dict) and batch.get("micro_batch") == event.micro_batch:
        rows = batch["micro_batch"] * batch["grad_accum"]
        batch = {**batch, "micro_batch": event.now, "grad_accum": rows // event.now}
    folder.update_manifest(batch=batch, **{ENTRY: [*(asdict(one) for one in recorded(folder)), asdict(event)]})


def leave(folder: RunFolder, event: RanOut) -> None:
    """Leave a note: this rank does not write the manifest, and who does may wait for it in vain."""
    write_json(folder.path / NOTE, asdict(event))


def take(folder: RunFolder) -> RanOut | None:
    """Move the note of a run that ended so into its manifest, or that of its stage; None where there is none."""
    for note in (*folder.path.glob(NOTE), *folder.path.glob(f"{STAGES}/*/{NOTE}")):
        event = RanOut(**json.loads(note.read_text(encoding="utf-8")))
        record(RunFolder(note.parent), event)
        note.unlink()
        return event
    return None
