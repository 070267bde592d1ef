"""The formats of exports, and where merged and exported models are or may be written: known before any library is
imported."""

from pathlib import Path
from typing import Any, Literal

from sft_play.errors import ConfigError, RunFolderError
from sft_play.finished.run import FinishedRun
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
        raise RunFolderError(
            f"{run.folder.path} trained all weights: {run.weights} is the whole model, and nothing has to be merged"
        )
    if base is not None and not run.is_quantized:
        raise ConfigError(
            f"BASE={base} is for QLoRA runs; {run.folder.path} was trained with "
            f"tuning.mode={run.config.tuning.mode}, on the base's own weights"
        )
    if base == "original" and run.config.tuning.lora.init == "loftq":
        raise ConfigError(
            f"BASE=original: {run.folder.path} has tuning.lora.init=loftq: its adapter was "
            "started at what NF4 lost, which original weights have not lost; leave it out"
        )
    if target.exists() and not replace:
        raise RunFolderError(
            f"{target} exists (make ship, serve and export merge too): make merge-test compares "
            "it, FORCE=1 replaces it, OUT=FOLDER writes elsewhere"
        )
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
    if read_merge_record(folder).get("adapter_sha256") != base_weights_identity(str(run.weights), None)["sha256"]:
        return None
    return folder


def read_merge_record(folder: Path) -> dict[str, Any]:
    """The record of a merged model; empty where it has none."""
    return read_json(folder / MERGE_FILE)


def require_faithful_merge(folder: Path, run: FinishedRun) -> None:
    """Raises RunFolderError where a merge is not what was trained: merge-test says so, or it was made of other weights
    than the adapter was trained on and merge-test has not been asked; ModelError where it is not what was merged."""
    require_unchanged(folder)
    record = read_merge_record(folder)
    test = record.get("test") or {}
    merge_again = f"make merge RUN={run.folder.shell_path} FORCE=1 merges into what was trained"
    if test and not test.get("ok"):
        raise RunFolderError(
            f"{folder} is not the trained model: merge-test found it "
            f"{test.get('kl_merged', 0):.2g} nats from the adapter (limit "
            f"{test.get('kl_limit', 0):.2g}); {merge_again}"
        )
    if not test and record.get("base") == "original":
        raise RunFolderError(
            f"{folder} was merged into the original weights, and the adapter was trained on NF4 "
            f"ones: make merge-test RUN={run.folder.shell_path} compares the two; {merge_again}"
        )


def describe_merge(folder: Path) -> str | None:
    """The record in words; None where there is none."""
    record = read_merge_record(folder)
    if not record:
        return None
    test_results = {None: "merge-test has not been run", True: "merge-test passed", False: "merge-test FAILED"}
    verb = "Merged"
    if record.get("base"):
        verb = f"Merged into the {record['base']} base"
    return f"{verb} ({record.get('dtype')}); {test_results[(record.get('test') or {}).get('ok')]}"


def require_export_target(target: Path, *, replace: bool) -> None:
    """Raises RunFolderError where an export would replace what it may not."""
    if target.exists() and not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if target.exists() and not (target / EXPORT_FILE).is_file():
        raise RunFolderError(f"{target} is no export of this toolkit and is not replaced; OUT=FOLDER writes elsewhere")


def find_gguf(run: FinishedRun, path: Path | None) -> Path:
    """The exported GGUF: the file or the folder `path`, else that in the run folder; raises RunFolderError where there
    is none, or several."""
    folders = [run.folder.path / EXPORT_FOLDER / name for name in ("gguf", "ollama")]
    if path is not None:
        folders = [path]
        if path.is_file():
            return path
    for folder in folders:
        files = sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            raise RunFolderError(f"{folder} holds {len(files)} GGUF files; name one: OUT={files[0]}")
        if files:
            return files[0]
    raise RunFolderError(
        f"there is no GGUF in {' or '.join(map(str, folders))}; make export FORMAT=gguf "
        f"RUN={run.folder.shell_path} writes one"
    )
