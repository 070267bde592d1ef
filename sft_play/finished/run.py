"""A finished run: found by its name, with its settings, its weights and the base that they were
trained from; what a command on it answers with; where its merged and exported models are; and what
it writes, whole or as it was before.
"""

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from sft_play.config.load import LAST_RUN, LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.sources.files import find_data_paths, source_digest
from sft_play.errors import ConfigError, ModelError, RunFolderError, SftPlayError
from sft_play.files import atomic
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity, find_model_folder, load_max_positions
from sft_play.planner.plan import Plan, plan_from_json
from sft_play.runs.folder import CodeTrust, RunFolder, disk_refusal_reason, read_json, trust_none
from sft_play.runs.lookup import iter_runs, resolve_run
from sft_play.text import format_gib
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.variables import spell_commands

# What a run is merged and exported to is known here, before any library is imported.
ExportFormat = Literal["gguf", "ollama", "vllm"]
# How a GGUF stores weights, the coarsest last: those that need no importance matrix.
Quant = Literal[
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s",
    "q4_1", "q4_0", "iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
]  # fmt: skip
CONVERTER_QUANTS: tuple[Quant, ...] = ("f32", "f16", "bf16", "q8_0")
# Of a QLoRA run: which weights the adapter is added to, the base's own or what NF4 makes of them.
MergeBase = Literal["original", "dequantized"]
EXPORT_FOLDER = "export"
# The file beside the export that says what it was made of; a folder without one is not replaced.
EXPORT_FILE = "export.json"
MERGED_FOLDER = "merged"
# In that folder, and travelling with it: what it was made of, and whether merge-test passed.
MERGE_FILE = "merge.json"


def next_command_line(command: str, *arguments: str, **variables: str | Path) -> str:
    """`Next: make COMMAND NAME=value …`, the last line of an answer, with values as a shell reads
    them."""
    words = (f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
    return spell_commands(" ".join([f"Next: make {command}", *words, *arguments]))


@dataclass(frozen=True)
class FinishedRun:
    """A run that was trained to its end."""

    folder: RunFolder
    config: RunConfig
    manifest: dict[str, Any]
    weights: Path

    @property
    def is_adapter(self) -> bool:
        """True if the weights are an adapter, which needs its base."""
        return self.config.tuning.mode != "full"

    @property
    def is_quantized(self) -> bool:
        """True if the adapter was trained on NF4 weights."""
        return self.config.tuning.mode == "qlora"

    @property
    def has_images(self) -> bool:
        """True if rows that it was trained on or measured with have images."""
        return any(
            (part.get("report") or {}).get("image_rows")
            for part in (self.manifest.get("data") or {}).values()
        )

    def plan(self) -> Plan:
        """The plan that the run was trained by; raises RunFolderError where it cannot be read."""
        path = self.folder.path / "plan.json"
        try:
            return plan_from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunFolderError(f"{path} cannot be read: {one_line(str(error))}") from None


def find_finished_run(
    output_folder: Path, name: str | None, *, is_trusted: CodeTrust = trust_none
) -> FinishedRun:
    """Find the finished run that `name` means: `last` (or None), a name in the output folder
    `base`, or a path. `is_trusted`: as in `read_config`. Raises RunFolderError where there is none,
    it is not finished, its settings allow what `is_trusted` does not, or its weights are gone;
    ModelError where they are not those that were written.
    """
    folder = find_run_folder(output_folder, name, must_be_finished=True)
    manifest = folder.read_manifest()
    if manifest.get("status") != "finished":
        raise RunFolderError(
            f"the run {folder.path} is not finished (its manifest says"
            f" {one_line(str(manifest.get('status')))}): make resume"
            f" RUN={shlex.quote(folder.path.name)} trains it to its end"
        )
    config = folder.read_config(is_trusted=is_trusted)
    if config.curriculum:
        # the last stage made the weights, and its settings differ from those of the whole run
        last_stage = folder.stage_folder(config.curriculum[-1].name, is_last_stage=True)
        if (last_stage.path / "resolved.json").is_file():
            config = last_stage.read_config(is_trusted=is_trusted)
    weights = folder.model_path(is_adapter=config.tuning.mode != "full")
    if not any(weights.glob("*.safetensors")):
        raise RunFolderError(
            f"{weights} holds no trained weights (*.safetensors); were they moved or removed?"
        )
    require_unchanged(weights)
    return FinishedRun(folder, config, manifest, weights)


@dataclass(frozen=True)
class ContinuedAdapter:
    """The adapter that a run began from (`model.adapter`): its folder, the digest of its weights,
    and its name."""

    folder: Path
    sha256: str
    name: str


def find_continued_adapter(run: FinishedRun) -> ContinuedAdapter | None:
    """The adapter that the run continued, as its manifest records it; None where it trained a new
    one."""
    record = (run.manifest.get("data") or {}).get("adapter")
    if record is None:
        return None
    name = (
        f"run {record['run']}'s adapter"
        if record.get("run")
        else f"the adapter {one_line(record['path'])}"
    )
    return ContinuedAdapter(Path(record["path"]), str(record["sha256"]), name)


def find_run_folder(
    output_folder: Path, name: str | None, *, must_be_finished: bool = False
) -> RunFolder:
    """Find the run that `name` means: a name in the output folder `base`, or a path; `last` (or
    None) is the one that finished last, else, unless it `must_be_finished`, the one that started
    last. Raises RunFolderError where there is none."""
    if name not in (None, LAST_RUN):
        return resolve_run(output_folder, str(name))
    runs = [(folder.read_manifest(), folder) for folder in iter_runs(output_folder)]
    candidates = [
        (manifest, folder) for manifest, folder in runs if manifest.get("status") == "finished"
    ]
    time_key = "ended"
    if not candidates and not must_be_finished:
        candidates, time_key = runs, "started"
    if not candidates:
        kind = "finished run" if must_be_finished else "run"
        unfinished_note = f" ({len(runs)} unfinished)" if runs else ""
        raise RunFolderError(
            f"there is no {kind} in {output_folder}{unfinished_note}; train one with make train"
        )
    return max(candidates, key=lambda run: (str(run[0].get(time_key)), str(run[1].path)))[1]


def base_model_folder(run: FinishedRun) -> Path:
    """Find the folder with the base's files: a local one, or the hub's, downloaded at the revision
    that was trained on. Raises ModelError where it is gone, cannot be fetched, or holds other
    weights than the run was trained on."""
    name = run.config.model.name
    recorded = (run.manifest.get("data") or {}).get("weights") or {}
    folder = find_model_folder(name)
    if folder is not None:
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"the base {folder}, from which {run.weights} was trained, holds no *.safetensors"
            )
        if recorded.get("sha256") not in (None, base_weights_identity(name, None)["sha256"]):
            raise ModelError(
                f"the weights in {name} are not those that {run.folder.path} was trained on:"
                " put the base back"
            )
        return folder
    # a path and no hub id, for which the hub need not be asked
    if name.startswith((".", "/", "~")):
        raise ModelError(
            f"the base {one_line(name)}, from which {run.weights} was trained, is gone"
        )
    from sft_play.training.checkpoints.model_saving import fetch_base_folder

    return fetch_base_folder(name, revision=recorded.get("sha256") or run.config.model.revision)


def find_changed_data(manifest: Mapping[str, Any], loaded: LoadedConfig) -> list[str]:
    """Describe each data file of a run that has changed since its manifest was written."""
    recorded, changes = manifest.get("data") or {}, []
    for part in loaded.runs:
        prefix = f"stage {part.stage_name} " if part.stage_name else ""
        for name, path in find_data_paths(part.config.data).named_paths():
            recorded_digest = (recorded.get(f"{prefix}{name}") or {}).get("sha256")
            if recorded_digest is None:
                changes.append(f"data {prefix}{name}: the manifest does not record what {path} was")
            elif source_digest(path) != recorded_digest:
                changes.append(
                    f"data {prefix}{name}: the content of {path} has changed since the run"
                )
    return changes


def require_split(split: str | None, data: str | None) -> None:
    """Raises ConfigError where SPLIT names no held-out rows, or is given together with DATA."""
    if split is not None and data is not None:
        raise ConfigError(
            f"SPLIT={one_line(split)} is a split of the run's own data; leave it out with DATA="
        )
    if split not in (None, "val", "test"):
        hint = (
            "; training rows are not evaluated (DATA=FILE evaluates any file)"
            if split == "train"
            else ""
        )
        raise ConfigError(f"SPLIT={one_line(str(split))} is neither val nor test{hint}")


def describe_context_window(run: FinishedRun, model: str) -> tuple[int, str]:
    """Read how many positions a model (a folder, or a name on the hub) has for a conversation;
    returns them, and a note where the rows of training were shorter (empty where not)."""
    trained_length = run.plan().max_seq_len
    max_positions = load_max_positions(model) or trained_length
    if max_positions == trained_length:
        return max_positions, ""
    return max_positions, (
        f"Context: the model's own {max_positions:,} positions; rows of training had at most"
        f" {trained_length:,} tokens (model.max_seq_len)"
    )


# --- the merged and the exported model: where they are or may be written --------------------------


def require_mergeable(run: FinishedRun, base: str | None, target: Path, *, replace: bool) -> None:
    """Raises RunFolderError where the run has no adapter, or `target` exists and may not be
    replaced; ConfigError where the adapter cannot be merged into `base`."""
    if not run.is_adapter:
        raise RunFolderError(
            f"{run.folder.path} trained all weights: {run.weights} is the whole model, and nothing"
            " has to be merged"
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
    # FORCE=1 with OUT=~ must not remove a home folder
    if target.exists() and not (target / "config.json").is_file():
        raise RunFolderError(
            f"{target} is not a model folder and is not replaced; OUT=FOLDER writes elsewhere"
        )


def require_merged(run: FinishedRun, target: Path) -> None:
    """Raises RunFolderError where the run has no adapter, or `target` holds no merged model."""
    if not run.is_adapter:
        raise RunFolderError(
            f"{run.folder.path} trained all weights: there is no adapter to compare with"
        )
    if not (target / "config.json").is_file():
        raise RunFolderError(
            f"{target} holds no merged model; make merge RUN={run.folder.shell_path} writes it"
        )


def find_merged_model(run: FinishedRun) -> Path | None:
    """The run's `merged/`; None where it holds no model, or one of an earlier adapter."""
    folder = run.folder.path / MERGED_FOLDER
    if not (folder / "config.json").is_file():
        return None
    # the run is trained again where it is resumed
    digest = base_weights_identity(str(run.weights), None)["sha256"]
    return folder if read_json(folder / MERGE_FILE).get("adapter_sha256") == digest else None


def require_faithful_merge(folder: Path, run: FinishedRun) -> None:
    """Raises RunFolderError where a merge is not what was trained: merge-test found so, or was not
    asked about an adapter that was trained on NF4 weights and merged into the original ones.
    Raises ModelError where the files have changed since the merge.
    """
    require_unchanged(folder)
    record = read_json(folder / MERGE_FILE)
    test = record.get("test")
    merge_again = f"make merge RUN={run.folder.shell_path} FORCE=1"
    remedy = f"{merge_again} merges into what was trained"
    if test and not test.get("ok"):
        if record.get("base") != "original":  # what 16 bits round away
            remedy = f"{merge_again} DTYPE=fp32 rounds less"
        raise RunFolderError(
            f"{folder} is not the trained model: merge-test found it "
            f"{test.get('kl_merged', 0):.2g} nats from the adapter (limit "
            f"{test.get('kl_limit', 0):.2g}); {remedy}"
        )
    if not test and record.get("base") == "original":
        raise RunFolderError(
            f"{folder} was merged into the original weights, and the adapter was trained on NF4 "
            f"ones: make merge-test RUN={run.folder.shell_path} compares the two; {remedy}"
        )


def describe_merge(folder: Path) -> str | None:
    """The record of a merged model in words; None where it has none."""
    record = read_json(folder / MERGE_FILE)
    if not record:
        return None
    test_results = {
        None: "merge-test has not been run",
        True: "merge-test passed",
        False: "merge-test FAILED",
    }
    base = f" into the {record['base']} base" if record.get("base") else ""
    return (
        f"Merged{base} ({record.get('dtype')});"
        f" {test_results[(record.get('test') or {}).get('ok')]}"
    )


def require_export_target(target: Path, *, replace: bool) -> None:
    """Raises RunFolderError where `target` exists, and with `replace` where it is no export."""
    if target.exists() and not replace:
        raise RunFolderError(f"{target} exists; FORCE=1 replaces it, OUT=FOLDER writes elsewhere")
    if target.exists() and not (target / EXPORT_FILE).is_file():
        raise RunFolderError(
            f"{target} is no export of this toolkit and is not replaced;"
            " OUT=FOLDER writes elsewhere"
        )


def find_gguf(run: FinishedRun, path: Path | None) -> Path:
    """Find the exported GGUF: the file `path`, the one in the folder `path`, or the run's own
    (`path` None); not that of a projector. Raises RunFolderError where there is none, or
    several."""
    folders = [run.folder.path / EXPORT_FOLDER / name for name in ("gguf", "ollama")]
    if path is not None:
        folders = [path]
        if path.is_file():
            return path
    for folder in folders:
        files = sorted(
            file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj-")
        )
        if len(files) > 1:
            raise RunFolderError(
                f"{folder} holds {len(files)} GGUF files; name one: OUT={files[0]}"
            )
        if files:
            return files[0]
    raise RunFolderError(
        f"there is no GGUF in {' or '.join(map(str, folders))}; make export FORMAT=gguf "
        f"RUN={run.folder.shell_path} writes one"
    )


# --- files and folders that a command writes ------------------------------------------------------


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Raise ConfigError, one message, where the disk is full or `path` cannot be written. Errors of
    other paths, such as a file that cannot be read, go through as they are.
    """
    try:
        yield
    except SftPlayError:
        raise
    except (OSError, SafetensorError) as error:
        reason = disk_refusal_reason(error)
        if reason is None and isinstance(error, OSError) and error.filename:
            # of the path, a folder above it, or something in it or in what will replace it
            error_path, target = Path(os.fsdecode(error.filename)).absolute(), path.absolute()
            names = (str(target), str(target.with_name(f".{target.name}.")))
            if target.is_relative_to(error_path) or str(error_path).startswith(names):
                reason = error.strerror
        if reason is None:
            raise
        raise ConfigError(f"{one_line(str(path))} cannot be written: {reason}") from None


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `target` once it is complete; after an error the old
    `target` stays. Raises ConfigError where the disk is full, or nothing can be written there."""
    with translate_write_errors(target), atomic.replace_path(target) as staging_folder:
        staging_folder.mkdir()
        yield staging_folder


def require_space(folder: Path, needed_bytes: int, message_start: str) -> None:
    """Raises ConfigError where the disk of a folder that is being built has fewer than
    `needed_bytes` free; `message_start` begins the message."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{message_start} {format_gib(needed_bytes)} GiB and {folder.parent} has "
            f"{format_gib(free_bytes)} GiB free; name another disk: OUT=FOLDER"
        )
