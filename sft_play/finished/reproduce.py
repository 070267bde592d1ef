"""`make reproduce`: a finished run trained again from what its folder records, and compared with it
bit for bit.

The manifest names the code (a digest of its files, and the commit), the versions, the machine, and
a digest of every file that training read. If code or data have changed it would be another run, and
is refused. Other versions or another machine may be why the result differs: `make compare` names
them. Where the code has changed since, a checkout of the recorded commit trains the run again.
"""

import contextlib
import json
import logging
import math
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.answers import Answer
from sft_play.config.load import ADAPTER_WEIGHTS_FILE, LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data.sources.files import source_digest
from sft_play.errors import DataError, Interrupted, RunFolderError, TrainingError
from sft_play.finished.run import (
    FinishedRun,
    base_model_folder,
    find_changed_data,
    next_command_line,
)
from sft_play.log import one_line
from sft_play.machine.hardware import detect_hardware
from sft_play.models.config_json import find_model_folder
from sft_play.process import signals
from sft_play.process.environment import THREADS_VARIABLE, independent_environment
from sft_play.runs.folder import (
    DEEPSPEED_FILE,
    PACKAGE_FOLDER,
    RunFolder,
    code_state,
    read_json,
    read_summary,
    requested_deepspeed,
)
from sft_play.runs.lookup import check_run_name, unused_path
from sft_play.training.checkpoints.model_saving import open_tensors
from sft_play.training.prepare.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReproduceResult(Answer):
    """A run and its repetition."""

    run: Path
    path: Path
    code: str
    tensors: int
    # The largest difference of each tensor that is not equal bit for bit, in the files' order.
    differing_tensors: Mapping[str, float]
    steps: int

    @property
    def ok(self) -> bool:
        return not self.differing_tensors

    def as_json(self) -> dict[str, Any]:
        differing = [
            {"name": name, "max_diff": largest} for name, largest in self.differing_tensors.items()
        ]
        return {
            "ok": self.ok,
            "run": str(self.run),
            "path": str(self.path),
            "code": self.code,
            "tensors": self.tensors,
            "tensors_differing": len(differing),
            "first_differing": next(iter(differing), None),
            "steps": self.steps,
        }

    def lines(self) -> list[str]:
        if self.ok:
            return [
                (
                    f"Weights: all {self.tensors} tensors are equal bit for bit, after"
                    f" {self.steps:,} steps"
                ),
                f"Written to: {self.path}",
                next_command_line("prune", RUNS=self.path.name),
            ]
        name, largest = next(iter(self.differing_tensors.items()))
        return [
            (
                f"Weights: {len(self.differing_tensors)} of {self.tensors} tensors differ; the"
                f" first is {name}, by up to {largest:.3g}"
            ),
            f"Written to: {self.path}",
            next_command_line(
                "compare",
                "says whether versions, machine or plan are others",
                RUNS=f"{self.run.name} {self.path.name}",
            ),
        ]


def reproduce(run: FinishedRun) -> ReproduceResult:
    """Train a run again as its folder records it, into a new folder beside it, and compare the
    weights. Raises DataError where what training read is gone or has changed; RunFolderError where
    other code trained it, or its settings cannot be read; TrainingError where the repetition
    failed; Interrupted where the user stopped it.
    """
    run_folder = run.folder.path
    config_path = run_folder.absolute() / "resolved.json"
    new_folder = unused_path(run_folder.with_name(f"{run_folder.name}-reproduced"))
    check_run_name(new_folder.name, key="RUN")
    # its paths are relative to where it was started
    working_folder = Path(str(run.manifest.get("cwd")))
    if not working_folder.is_dir():
        working_folder = Path.cwd()
    with contextlib.chdir(working_folder):
        loaded = load_config(config_path)
        _require_inputs(run, loaded)
    code_description = describe_code(run.manifest)
    logger.info("Code: %s", code_description)
    with tempfile.TemporaryDirectory(prefix="sft_play_deepspeed_") as temporary_folder:
        deepspeed_settings, deepspeed_path = requested_deepspeed(run.folder), None
        if deepspeed_settings is not None:
            deepspeed_path = Path(temporary_folder) / DEEPSPEED_FILE
            deepspeed_path.write_text(json.dumps(deepspeed_settings), encoding="utf-8")
        arguments = [
            *_training_command(run, loaded, deepspeed_path),
            f"output.dir={json.dumps(str(new_folder.absolute().parent))}",
            f"output.name={new_folder.name}",
        ]
        logger.info("Training again: sft-play %s", shlex.join(arguments))
        environment = independent_environment(os.environ) | {
            "PYTHONPATH": str(PACKAGE_FOLDER.parent)
        }
        threads = (run.manifest.get("cpu") or {}).get("threads")
        if threads:  # sums of another number of threads round differently
            environment |= {"OMP_NUM_THREADS": str(threads), THREADS_VARIABLE: str(threads)}
        exit_code = signals.run_child(
            "sft_play", arguments, environment=environment, cwd=working_folder
        ).exit_code
    if exit_code == Interrupted.exit_code:
        raise Interrupted(f"stopped by the user; what was trained is in {new_folder}")
    if exit_code:
        raise TrainingError(
            f"{run_folder} could not be trained again:"
            f" it ended with exit code {exit_code}; see above"
        )
    tensors, differing = compare_weights(
        run.weights, RunFolder(new_folder).model_path(is_adapter=run.is_adapter)
    )
    return ReproduceResult(
        run_folder,
        new_folder,
        code_description,
        tensors,
        differing,
        steps=int(read_summary(new_folder)["steps"]),
    )


def _require_inputs(run: FinishedRun, loaded: LoadedConfig) -> None:
    base_model_folder(run)
    recorded = run.manifest.get("data") or {}
    changes = find_changed_data(run.manifest, loaded)
    recorded_digest = (recorded.get("tokenizer") or {}).get("sha256")
    if recorded_digest not in (None, load_tokenizer(loaded.config).sha256):
        changes.append(
            f"tokenizer: that of {loaded.config.model.name}, or its template, has changed"
        )
    adapter_file = Path(str(loaded.config.model.adapter)) / ADAPTER_WEIGHTS_FILE
    if recorded.get("adapter") and source_digest(adapter_file) != recorded["adapter"].get("sha256"):
        changes.append(f"adapter: {adapter_file}, which it began from, has changed since")
    if changes:
        raise DataError(
            "\n  ".join(
                [
                    f"{run.folder.path} cannot be trained again, since what it read has changed:",
                    *(one_line(line, limit=300) for line in changes),
                ]
            )
        )


def _training_command(
    run: FinishedRun, loaded: LoadedConfig, deepspeed_path: Path | None
) -> list[str]:
    manifest, config, folder = run.manifest, loaded.config, run.folder
    layout, processes = manifest.get("layout", "single"), manifest.get("processes", 1)
    arguments = ["train", "--config", str(folder.path.absolute() / "resolved.json")]
    if layout != "single" or processes != 1:
        arguments = ["train-distributed", *arguments[1:], "--nproc", str(processes)]
        if config.model.mesh_shape is None:
            arguments += ["--strategy", layout]
        if deepspeed_path is not None:
            arguments += ["--deepspeed_config", str(deepspeed_path)]
    if not loaded.stages:
        arguments += _batch_overrides("", folder, config)
    for stage in loaded.stages:
        arguments += _batch_overrides(
            f"curriculum.{stage.number - 1}.", folder.stage_folder(stage.name), stage.config
        )
    arguments += ["output.if_exists=fail", "train.stop_after_steps=null", "train.max_hours=null"]
    # TensorBoard writes into the run folder; other trackers would log the run a second time to
    # somebody's account
    trackers = [name for name in config.train.report_to if name == "tensorboard"]
    arguments.append(f"train.report_to={json.dumps(trackers)}")
    weights = (manifest.get("data") or {}).get("weights") or {}
    # of a hub model that is its commit
    if find_model_folder(config.model.name) is None and weights.get("sha256"):
        arguments.append(f"model.revision={weights['sha256']}")
    if config.data.template_date is None and manifest.get("template_date"):
        arguments.append(f'data.template_date="{manifest["template_date"]}"')
    if not (manifest.get("hardware") or {}).get("gpus") and detect_hardware().gpus:
        arguments.append("train.device=cpu")
    return arguments


def _batch_overrides(prefix: str, folder: RunFolder, config: RunConfig) -> list[str]:
    batch, plan = folder.read_manifest().get("batch"), read_json(folder.path / "plan.json")
    if not isinstance(batch, dict) or not plan:
        raise RunFolderError(
            f"{folder.path} does not record how its batch was divided, and cannot be trained again"
        )
    overrides = [
        f"{prefix}train.batch_size={batch['micro_batch']}",
        f"{prefix}train.grad_accum={batch['grad_accum']}",
    ]
    if config.train.batch_by == "auto":
        is_by_rows = (plan.get("micro_batches") or {}).get("tokens") is None
        overrides.append(f"{prefix}train.batch_by={'rows' if is_by_rows else 'tokens'}")
    if config.train.gradient_checkpointing == "auto":
        layers = plan["checkpointed_layers"]
        value = {0: "false", plan["layers"]: "true"}.get(layers, layers)
        overrides.append(f"{prefix}train.gradient_checkpointing={value}")
    if config.train.compile == "auto":
        overrides.append(f"{prefix}train.compile={json.dumps(bool(plan.get('compiled')))}")
    if config.eval.batch_size == "auto" and plan.get("eval_batch"):
        overrides.append(f"{prefix}eval.batch_size={plan['eval_batch']}")
    return overrides


def describe_code(manifest: Mapping[str, Any], *, package: Path = PACKAGE_FOLDER) -> str:
    """Describe the code that trains; raises RunFolderError where the manifest has another
    digest."""
    recorded = manifest.get("code") or {}
    git = recorded.get("git") or {}
    commit = str(git.get("commit") or "")[:12]
    commit_note, checkout = "no commit", ""
    if commit:
        commit_note = f"commit {commit}" + (", with changes" if git.get("dirty") else "")
        checkout = f": git worktree add ../then {commit} has it, and make reproduce there"
    if recorded.get("sha256") == code_state(package)["sha256"]:
        return f"{package.parent}, unchanged since the run ({commit_note})"
    raise RunFolderError(
        f"the run was trained by other code than {package.parent} ({commit_note}){checkout}"
    )


def compare_weights(first_folder: Path, second_folder: Path) -> tuple[int, dict[str, float]]:
    """Compare two folders of weights bit by bit; returns the number of tensors, and the largest
    difference of each that differs, in the order of the first folder's files. It is infinite where
    shapes or dtypes differ, a folder lacks the tensor, or a value is not a number."""
    first, second = open_tensors(first_folder), open_tensors(second_folder)
    names, differing = dict.fromkeys([*first, *sorted(second)]), dict[str, float]()
    for name in names:
        tensors = [folder[name].read() for folder in (first, second) if name in folder]
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1 or len(tensors) == 1:
            differing[name] = math.inf
        # as bytes: a NaN is equal to itself then, and -0.0 is not 0.0
        elif not torch.equal(
            *(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
        ):
            largest = float((tensors[0].double() - tensors[1].double()).abs().max())
            differing[name] = math.inf if math.isnan(largest) else largest
    return len(names), differing
