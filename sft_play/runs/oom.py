"""Memory that ran out: what a run did about it, in its manifest; or in a note, where its processes ended over it."""

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from sft_play.runs.files import read_json, write_json
from sft_play.runs.folder import STAGES_FOLDER, RunFolder

OOM_ENTRY = "out_of_memory"
# In the folder of a run or a stage: that a rank ran out of memory, until the next start has read it.
OOM_NOTE_FILE = "out_of_memory.json"
_REPEAT_DESCRIPTIONS = {
    "step": "the step is repeated from its start with {now}, and so are all later ones",
    "run": "all ranks end, and start again from the last checkpoint with {now}",
    "batch": "this batch is repeated in parts of {now}, and so are all later ones",
    None: "the run ends",
}


@dataclass(frozen=True)
class OomEvent:
    """Where memory ran out, and what is done: `micro_batch` rows were too many, and `now` are tried."""

    step: int
    doing: str
    rank: int
    micro_batch: int
    now: int
    again: Literal["step", "run", "batch"] | None
    error: str

    @property
    def description(self) -> str:
        """The event in words, for the log."""
        return (
            f"step {self.step}: rank {self.rank} ran out of memory ({self.doing}, {self.micro_batch} rows at a time): "
            f"{_REPEAT_DESCRIPTIONS[self.again].format(now=self.now)}; {self.error}"
        )


def read_oom_events(folder: RunFolder) -> list[OomEvent]:
    """Read the events in the manifest of a run or a stage, oldest first."""
    entries = read_json(folder.manifest_path).get(OOM_ENTRY)
    events = []
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(TypeError):  # of another version
            events.append(OomEvent(**entry))
    return events


def record_oom_event(folder: RunFolder, event: OomEvent) -> None:
    """Add an event to the manifest, with the batch that the run goes on with, and a resumed run too."""
    manifest = folder.read_manifest()
    batch = manifest.get("batch")
    if event.again in ("step", "run") and isinstance(batch, dict) and batch.get("micro_batch") == event.micro_batch:
        rows = batch["micro_batch"] * batch["grad_accum"]
        batch = {**batch, "micro_batch": event.now, "grad_accum": rows // event.now}
    folder.update_manifest(
        batch=batch,
        **{OOM_ENTRY: [*(asdict(earlier_event) for earlier_event in read_oom_events(folder)), asdict(event)]},
    )


def write_oom_note(folder: RunFolder, event: OomEvent) -> None:
    """Leave a note: this rank does not write the manifest, and who does may wait for it in vain."""
    write_json(folder.path / OOM_NOTE_FILE, asdict(event))


def pop_oom_note(folder: RunFolder) -> OomEvent | None:
    """Move the note of a run that ended so into its manifest, or that of its stage; None where there is none."""
    for note_path in (*folder.path.glob(OOM_NOTE_FILE), *folder.path.glob(f"{STAGES_FOLDER}/*/{OOM_NOTE_FILE}")):
        event = OomEvent(**json.loads(note_path.read_text(encoding="utf-8")))
        record_oom_event(RunFolder(note_path.parent), event)
        note_path.unlink()
        return event
    return None
