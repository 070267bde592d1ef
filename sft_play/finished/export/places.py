"""The formats of exports, and where merged and exported models are or may be written: known before any library is
imported."""

from pathlib import Path
from typing import Any, Literal

from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.run import FinishedRun, next_command_line
from sft_play.models.config_json import base_weights_identity
from sft_play.runs.files import read_json
from sft_play.training.checkpoints.checkpoints import require_unchanged

ExportFormat = Literal["gguf", "ollama", "vllm"]
# How a GGUF stores weights, the coarsest last: those that need no importance matrix.
Quant = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0",
    "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip
CONVERTER_QUANTS: tuple[Quant, ...] = ("f32", "f16", "bf16", "q8_0")
EXPORT_FOLDER = "export"
# The file beside the export that says what it was made of; a folder without one is not replaced.
EXPORT_FILE = "export.json"
MERGED_FOLDER = "merged"
# In that folder, and travelling with it: what it was made of, and whether merge-test passed.
MERGE_FILE = "merge.json"


def require_mergeable(run: FinishedRun, base: str | None, target: Path, *, replace: bool) -> None:
    """Raises RunFolderError or ConfigError where a run cannot be merged like that, or not into this folder."""
    if not run.is_adapter:
        explanation = f"{run.weights} is the whole model, and nothing has to be merged"
        raise RunFolderError(f"{run.folder.path} trained all weights: {explanation}")
    if base is not None and not run.is_quantized:
        mode = f"tuning.mode={run.config.tuning.mode}, on the base's own weights"
        raise ConfigError(f"BASE={base} is for QLoRA runs; {run.folder.path} was trained with {mode}")
    if base == "original" and run.config.tuning.lora.init == "loftq":
        reason = "its adapter was started at what NF4 lost, which original weights have not lost"
        raise ConfigError(f"BASE=original: {run.folder.path} has tuning.lora.init=loftq: {reason}; leave it out")
    if target.exists() and not replace:
        remedy = "make merge-test compares it, FORCE=1 replaces it, OUT=FOLDER writes elsewhere"
        raise RunFolderError(f"{target} exists (make ship, serve and export merge too): {remedy}")
    if target.exists() and not (target / "config.json").is_file():  # FORCE=1 with OUT=~ must not remove a home folder
        raise RunFolderError(f"{target} is not a model folder and is not replaced; OUT=FOLDER writes elsewhere")


def require_merged(run: FinishedRun, target: Path) -> None:
    """Raises RunFolderError where a folder holds no merged model that a run's adapter could be compared with."""
    if not run.is_adapter:
        raise RunFolderError(f"{run.folder.path} trained all weights: there is no adapter to compare with")
    if not (target / "config.json").is_file():
        raise RunFolderError(f"{target} holds no merged model; make merge RUN={run.folder.shell_path} writes it")


def find_merged_model(run: FinishedRun) -> Path | None:
    """The run's `merged/`; None where there is none, or one of an earlier adapter."""
    folder = run.folder.path / MERGED_FOLDER
    # the run is trained again where it is resumed
    is_current = (
        read_merge_record(folder).get("adapter_sha256") == base_weights_identity(str(run.weights), None)["sha256"]
    )
    return folder if is_current and (folder / "config.json").is_file() else None


def read_merge_record(folder: Path) -> dict[str, Any]:
    """The record of a merged model; empty where it has none."""
    return read_json(folder / MERGE_FILE)


def require_faithful_merge(folder: Path, run: FinishedRun) -> None:
    """Raises RunFolderError where a merge is not what was trained: merge-test says so, or it was made of other weights
    than the adapter was trained on and merge-test has not been asked; ModelError where it is not what was merged."""
    require_unchanged(folder)
    record = read_merge_record(folder)
    test = record.get("test") or {}
    merge_command = next_command_line("merge", "FORCE=1", RUN=run.folder.path).removeprefix("Next: ")
    if test and not test.get("ok"):
        divergence = f"{test.get('kl_merged', 0):.2g} nats from the adapter (limit {test.get('kl_limit', 0):.2g})"
        reason = f"merge-test found it {divergence}; {merge_command} merges into what was trained"
        raise RunFolderError(f"{folder} is not the trained model: {reason}")
    if not test and record.get("base") == "original":
        test_command = next_command_line("merge-test", RUN=run.folder.path).removeprefix("Next: ")
        explanation = f"{folder} was merged into the original weights, and the adapter was trained on NF4 ones"
        raise RunFolderError(
            f"{explanation}: {test_command} compares the two; {merge_command} merges into what was trained"
        )


def describe_merge(folder: Path) -> str | None:
    """The record in words; None where there is none."""
    record = read_merge_record(folder)
    if not record:
        return None
    test, test_note = record.get("test"), "merge-test has not been run"
    if test:
        test_note = "merge-test passed" if test.get("ok") else "merge-test FAILED"
    base_note = f" into the {record['base']} base" if record.get("base") else ""
    return f"Merged{base_note} ({record.get('dtype')}); {test_note}"


def require_export_target(target: Path, *, replace: bool) -> None:
    """Raises RunFolderError where an export would replace what it may not."""
    if not target.exists():
        return
    if not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if not (target / EXPORT_FILE).is_file():
        raise RunFolderError(f"{target} is no export of this toolkit and is not replaced; OUT=FOLDER writes elsewhere")


def find_gguf(run: FinishedRun, path: Path | None) -> Path:
    """The exported GGUF: the file or the folder `path`, else that in the run folder; raises RunFolderError where there
    is none, or several."""
    if path is not None and path.is_file():
        return path
    folders = [path] if path is not None else [run.folder.path / EXPORT_FOLDER / name for name in ("gguf", "ollama")]
    for folder in folders:
        files = sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            raise RunFolderError(f"{folder} holds {len(files)} GGUF files; name one: OUT={files[0]}")
        if files:
            return files[0]
    command = f"make export FORMAT=gguf RUN={run.folder.shell_path}"
    raise RunFolderError(f"there is no GGUF in {' or '.join(map(str, folders))}; {command} writes one")
