"""What a merged model was made of, and whether merge-test passed: a file in its folder, which travels with it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sft_play.errors import RunFolderError
from sft_play.finished.run import FinishedRun, next_line
from sft_play.runs.files import read_json, write_json
from sft_play.training.model.model_loading import weights_facts

RECORD = "merge.json"


def write_record(folder: Path, run: FinishedRun, *, base: str | None, dtype: str) -> None:
    """Write what the merge in `folder` was made of: of a QLoRA run which weights of the base, and which adapter."""
    adapter = weights_facts(str(run.weights), None)["sha256"]
    write_json(folder / RECORD, {"base": base, "dtype": dtype, "adapter_sha256": adapter, "test": None})


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a merged model; empty where it has none."""
    return read_json(folder / RECORD)


def write_verdict(folder: Path, *, ok: bool, divergence: float, limit: float) -> None:
    """Add merge-test's verdict to the record; nothing where the folder has none: it may be anybody's model."""
    if not (folder / RECORD).is_file():
        return
    test = {"ok": ok, "kl_merged": divergence, "kl_limit": limit, "date": datetime.now(UTC).isoformat("T", "seconds")}
    write_json(folder / RECORD, {**record_of(folder), "test": test})


def is_of(folder: Path, run: FinishedRun) -> bool:
    """Whether the merge is of the adapter that the run has now: it is trained again where the run is resumed."""
    recorded = record_of(folder).get("adapter_sha256")
    if recorded is not None:
        return bool(recorded == weights_facts(str(run.weights), None)["sha256"])
    # merged before there were records
    trained = max(file.stat().st_mtime for file in run.weights.glob("*.safetensors"))
    return (folder / "config.json").stat().st_mtime >= trained


def refuse_another_model(folder: Path, run: FinishedRun) -> None:
    """Raises RunFolderError where a merge is not what was trained: merge-test says so, or it was made of other weights
    than the adapter was trained on and merge-test has not been asked."""
    record = record_of(folder)
    test = record.get("test") or {}
    again = next_line("merge", "FORCE=1", RUN=run.folder.path).removeprefix("Next: ")
    if test and not test.get("ok"):
        raise RunFolderError(
            f"{folder} is not the trained model: merge-test found it {test.get('kl_merged', 0):.2g} nats from the "
            f"adapter (limit {test.get('kl_limit', 0):.2g}); {again} merges into what was trained"
        )
    if not test and record.get("base") == "original":
        tried = next_line("merge-test", RUN=run.folder.path).removeprefix("Next: ")
        raise RunFolderError(
            f"{folder} was merged into the original weights (BASE=original), and the adapter was trained on NF4 ones: "
            f"{tried} says whether it is still the trained model; {again} merges into what was trained"
        )


def told(folder: Path) -> str | None:
    """The record in words; None where there is none."""
    record = record_of(folder)
    if not record:
        return None
    test = record.get("test")
    tested = "merge-test has not been run" if not test else f"merge-test {'passed' if test.get('ok') else 'FAILED'}"
    into = f" into the {record['base']} base" if record.get("base") else ""
    return f"Merged{into} ({record.get('dtype')}); {tested}"
