"""`make verify-layouts`: the same run under one process and under every layout, compared by step and by tensor.

Every row is a real run of this toolkit over real ranks, started as a user starts it; what it logged and saved is read
back from its run folder. The same data, seed and effective batch; dropout off, since ranks draw masks of their own.
"""

import functools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DoesNotFit, TrainingError
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware, detect_hardware
from sft_play.models.config_json import find_model_folder, load_config_json, load_model_shape
from sft_play.models.families import UnknownArchitecture
from sft_play.models.shape import ModelShape
from sft_play.planner.batching import effective_batch
from sft_play.planner.layout import LayoutName
from sft_play.planner.precision import UNSHARDED_LAYOUTS
from sft_play.process.environment import independent_environment
from sft_play.process.signals import child_environment
from sft_play.runs.folder import read_summary

logger = logging.getLogger(__name__)

MODES = ("full", "lora", "qlora")
GRAD_ACCUMS = (1, 4)
STEPS = 4
"""Optimizer steps of each run: with the small run's rows, an epoch with its uneven end and the next one's beginning."""
NEGLIGIBLE_LEARNING_RATE = 1e-30
"""Learning rate of the run whose saved weights are the start: too small to change any of them."""


SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("data.val_path", "data.test_path", "train.early_stopping_patience")),
    **dict.fromkeys(("tuning.lora.dropout", "data.val_fraction", "eval.steps", "eval.generate_rows"), 0),
    **dict.fromkeys(("train.load_best_model_at_end", "eval.before_training"), False), "train.logging_steps": 1,
    "train.report_to": [], "output.if_exists": "replace",
}  # fmt: skip
"""What every run of a table sets over the config: no dropout, nothing evaluated, every step logged."""


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from the single process: `loss` relative at every step, `weights` by `compare_tensors`."""

    loss: float
    weights: float


TOLERANCES = {
    # Rounding of fp32 sums that are added in another order (2^-24 each). Adam divides a gradient by its own size, so
    # where the true gradient is next to zero the rounding becomes a step of full length: that is why weights, after the
    # same losses to 1e-5, are allowed more. NF4: every rank quantises the same weights by the same code to the same
    # numbers, and computes in fp32, so that the tolerance is that of fp32.
    "fp32": Tolerance(loss=1e-5, weights=2e-3), "nf4": Tolerance(loss=1e-5, weights=2e-3),
    # 16 bits keep 8 (bf16) or 11 (fp16) of each number: sums in another order differ by 2^-9, and Adam turns that into
    # steps of another length wherever a gradient is small.
    "bf16": Tolerance(loss=2**-8, weights=0.7), "fp16": Tolerance(loss=2**-8, weights=0.7),
}  # fmt: skip
SAVED_IN_16_BITS = (
    "the base has 16 bits, and so have the weights that were saved: updates of a few steps are below their digits, so "
    "that only the losses are judged"
)
"""Why `full` of such a base has no tolerance for weights."""


@dataclass(frozen=True)
class LayoutCase:
    """One run of the table."""

    layout: LayoutName
    ranks: int
    mode: str
    accum: int
    bf16: bool = False

    @property
    def rows(self) -> int:
        """Ranks that see rows of their own; in pairs they share rows or tensors."""
        return self.ranks // 2 if self.layout in ("tp", "fsdp_tp", "fsdp_cp") else self.ranks

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.layout}-{self.ranks}-accum{self.accum}{'-bf16' if self.bf16 else ''}"


@dataclass
class LayoutRow:
    """One line of the table; differences are None where the run gave none, and `error` says why."""

    layout: str
    mode: str
    dtype: str
    ranks: int
    steps: int
    accum: int
    micro_batch: int
    engine_proof: dict[str, Any] | None = None
    max_rel_loss_diff: float | None = None
    rel_weight_change_diff: float | None = None
    worst_tensor: str | None = None
    loss_tolerance: float | None = None
    tolerance: float | None = None
    ok: bool = False
    seconds: float = 0.0
    error: str | None = None
    note: str | None = None


@dataclass
class LayoutTable:
    """The rows, and the cases that cannot run here with the reason."""

    rows: list[LayoutRow] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def as_json(self) -> list[dict[str, Any]]:
        """One object per row; a difference that is not finite is null, and the row says where it is."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            for key, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    row[key] = None
        return rows

    def lines(self) -> list[str]:
        split, figures = f"{'micro x accum':<14}", f"{'loss':>9}{'weights':>10}"
        lines = [f"{'layout':<14}{'ranks':>5}  {'mode':<6}{'dtype':<6}{split}{figures}  wrapped"]
        lines += [_line(row) for row in self.rows]
        lines += [f"left out: {what}: {why}" for what, why in self.left_out]
        lines += sorted({f"{row.mode} in {row.dtype}: {row.note}" for row in self.rows if row.note})
        good = sum(row.ok for row in self.rows)
        lines.append(f"{good} of {len(self.rows)} runs agree with the single process")
        differing = [(row.max_rel_loss_diff, row) for row in self.rows if row.max_rel_loss_diff]
        if differing:
            largest, worst = max(differing, key=lambda pair: pair[0])
            lines.append(f"largest relative difference of a loss: {largest:.1e} ({worst.layout}, {worst.mode})")
        return lines


def _line(row: LayoutRow) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    wrapped = (row.engine_proof or {}).get("wrapped_class", "")
    end = wrapped if row.ok else f"DIFFERS {row.error or row.worst_tensor or ''} {wrapped}".rstrip()
    split = f"{row.micro_batch} x {row.accum}"
    return (
        f"{row.layout:<14}{row.ranks:>5}  {row.mode:<6}{row.dtype:<6}{split:<14}"
        f"{number(row.max_rel_loss_diff):>9}{number(row.rel_weight_change_diff):>10}  {end}"
    )


def verify(
    config: Path | None,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = (),
    modes: Sequence[str] = (),
    steps: int = STEPS,
    progress: Callable[[str], None] = logger.info,
) -> LayoutTable:
    """The table of a run YAML, or of a small run made for it where `config` is None; without `layouts` or `modes`, of
    all. Raises ConfigError (a name that is not known, or one GPU only), TrainingError (the single process failed)."""
    hardware = detect_hardware()
    _check_names(layouts, modes)
    if not hardware.gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU and warns that it found none
    with tempfile.TemporaryDirectory(prefix="sft-play-verify-") as workdir:
        folder = Path(workdir)
        if config is None:
            from benchmarks.verify.small import make_small_run

            config = make_small_run(folder)
        run_config = load_config(config, overrides=overrides).config
        bench = _LayoutBench(folder, config, tuple(overrides), run_config, hardware, steps)
        table = LayoutTable()
        for mode in modes or MODES:
            for bf16 in (False, True) if mode in ("full", "lora") and bench.may_add_bf16 else (False,):
                bench.compare(mode, bf16, layouts, table, progress)
        return table


def _check_names(layouts: Sequence[str], modes: Sequence[str]) -> None:
    known_layouts = sorted({case.layout for case in _cases(Hardware((), "CPU", 2, 0, 0), "lora", False)})
    for kind, names, known_names in (("LAYOUTS", layouts, known_layouts), ("MODES", modes, MODES)):
        for name in names:
            if name not in known_names:
                raise ConfigError(f"{kind}={one_line(name)} is not one of: {', '.join(known_names)}")


def _cases(hardware: Hardware, mode: str, bf16: bool) -> list[LayoutCase]:
    """The runs that are compared with one process: two ranks and four, or what GPUs there are."""
    most = len(hardware.gpus) or 4
    if most < 2:
        raise ConfigError(
            "there is one GPU, and every layout needs several ranks: hide it to compare on CPU ranks "
            "(CUDA_VISIBLE_DEVICES= make verify-layouts)"
        )
    layouts: list[tuple[LayoutName, int]] = [("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2), ("zero3_offload", 2)]
    layouts += [("tp", 2), ("fsdp_cp", 2)]
    if most >= 4:
        layouts += [("ddp", 4), ("fsdp_hybrid", 4), ("fsdp_tp", 4), ("fsdp_cp", 4)]
    accumulations = GRAD_ACCUMS if not bf16 else (1,)
    return [LayoutCase("single", 1, mode, 1, bf16)] + [
        LayoutCase(layout, ranks, mode, accum, bf16) for layout, ranks in layouts for accum in accumulations
    ]


@dataclass
class _LayoutBench:
    """Where the runs of a table are made, and what they share."""

    folder: Path
    config: Path
    overrides: tuple[str, ...]
    parsed: RunConfig
    hardware: Hardware
    steps: int

    @property
    def may_add_bf16(self) -> bool:
        """Whether there are rows in bf16 beside those in the precision of the config."""
        return self.parsed.train.bf16 is False and not self.parsed.train.fp16

    @property
    def effective(self) -> int:
        """The effective batch: the config's, or the next that 4 ranks x 4 passes divide."""
        unit = 4 * max(GRAD_ACCUMS)
        return math.ceil(effective_batch(self.parsed.train, ranks=1) / unit) * unit

    def compare(
        self, mode: str, bf16: bool, layouts: Iterable[str], table: LayoutTable, progress: Callable[[str], None]
    ) -> None:
        from benchmarks.verify.weights import compare_tensors, read_tensors

        reference = LayoutCase("single", 1, mode, max(GRAD_ACCUMS), bf16)
        try:
            begun = self.run(reference, start=True)
            alone = self.run(reference)
        except DoesNotFit as error:
            table.left_out.append((mode, one_line(str(error), limit=200)))
            return
        start, one = read_tensors(self.saved(begun)), read_tensors(self.saved(alone))
        wanted_losses = self.losses(alone)
        for case in _cases(self.hardware, mode, bf16):
            if layouts and case.layout not in {*layouts, "single"}:
                continue
            row = self.row(case)
            began = time.monotonic()
            try:
                result = self.run(case)
            # ConfigError: the layout is not possible for this mode; anything else is a difference
            except (DoesNotFit, ConfigError) as error:
                table.left_out.append((case.name, one_line(str(error), limit=200)))
                continue
            except TrainingError as error:
                row.error = one_line(str(error), limit=400)
            else:
                row.engine_proof = read_summary(result)["engine_proof"]
                row.max_rel_loss_diff = _largest_difference(wanted_losses, self.losses(result))
                far = compare_tensors(start, one, read_tensors(self.saved(result)), from_bf16=self.rounds_start(case))
                row.rel_weight_change_diff, row.worst_tensor = far.largest, far.tensor
                fits = row.tolerance is None or far.largest <= row.tolerance
                row.ok = fits and row.max_rel_loss_diff <= TOLERANCES[row.dtype].loss
                row.seconds = round(time.monotonic() - began, 1)
                shutil.rmtree(result)  # a table of a large model would fill the disk with its checkpoints
            table.rows.append(row)
            progress(_line(row))

    @functools.cached_property
    def base_dtype(self) -> str:
        model = self.parsed.model
        plain = load_config_json(model.name, revision=model.revision)
        return str(plain.get("dtype") or plain.get("torch_dtype") or "float32")

    def row(self, case: LayoutCase) -> LayoutRow:
        tolerance = TOLERANCES[self.dtype(case)]
        narrow = case.mode == "full" and self.base_dtype != "float32"
        return LayoutRow(
            layout=case.layout, mode=case.mode, dtype=self.dtype(case), ranks=case.ranks, steps=self.steps,
            accum=case.accum, micro_batch=self.effective // (case.rows * case.accum),
            loss_tolerance=tolerance.loss, tolerance=None if narrow else tolerance.weights,
            note=SAVED_IN_16_BITS if narrow else None,
        )  # fmt: skip

    def rounds_start(self, case: LayoutCase) -> bool:
        """Whether the case loads the base in bf16, which one process holds in fp32: engines make their copies of it."""
        return case.mode == "full" and self.dtype(case) == "bf16" and case.layout not in UNSHARDED_LAYOUTS

    def dtype(self, case: LayoutCase) -> str:
        """What the case computes in: by the config, the device, and whether the weights are NF4."""
        from sft_play.planner.precision import DTYPE_SHORT_NAMES, choose_precision

        train = self.parsed.train.model_copy(update={"bf16": True, "fp16": False} if case.bf16 else {})
        config = self.parsed.model_copy(update={"train": train})
        compute = DTYPE_SHORT_NAMES[choose_precision(config, self.hardware, self._shape()).compute]
        return "nf4" if case.mode == "qlora" and compute == "fp32" else compute

    def _shape(self) -> ModelShape | None:
        """The model's shape; None for a class that the tables do not know."""
        model = self.parsed.model
        try:
            return load_model_shape(model.name, revision=model.revision, trust_remote_code=model.trust_remote_code)
        except UnknownArchitecture:
            return None

    def settings(self, case: LayoutCase, *, start: bool) -> list[str]:
        name = ("start-" if start else "") + case.name
        values: dict[str, Any] = {
            **SETTINGS, "tuning.mode": case.mode, "train.effective_batch_size": self.effective,
            "train.batch_size": self.effective // (case.rows * case.accum), "train.grad_accum": case.accum,
            "train.max_steps": 1 if start else self.steps, "output.dir": str(self.folder / "outputs"),
            "output.name": name,
        }  # fmt: skip
        if case.bf16:
            values["train.bf16"] = True
        if start:
            values |= {"train.learning_rate": NEGLIGIBLE_LEARNING_RATE, "train.warmup_steps": 0}
            values["train.lr_scheduler_type"] = "constant"
        if case.layout == "fsdp_hybrid":
            values["distributed.shard_ranks"] = 2
        if case.layout == "fsdp_cp":
            values["model.mesh_shape"] = [[case.ranks // 2, 2], ["fsdp", "cp"]]
        model = self._without_dropout()
        if model is not None:
            values["model.name"] = str(model)
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def _without_dropout(self) -> Path | None:
        """A copy of a local model whose config has its dropouts off, beside the same files; None where it has none."""
        source = find_model_folder(self.parsed.model.name)
        if source is None or not (source / "config.json").is_file():
            return None
        settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
        drops = [key for key, value in settings.items() if "drop" in key and isinstance(value, float) and value > 0]
        if not drops:
            return None
        copy = self.folder / "without-dropout"
        if not copy.exists():
            logger.info("The model's config has %s: off in this comparison", ", ".join(drops))
            copy.mkdir()
            for item in source.iterdir():
                if item.name != "config.json":
                    (copy / item.name).symlink_to(item.resolve())
            (copy / "config.json").write_text(json.dumps(settings | dict.fromkeys(drops, 0.0)), encoding="utf-8")
        return copy

    def run(self, case: LayoutCase, *, start: bool = False) -> Path:
        """Run a case as a user would start it; returns its run folder.
        Raises DoesNotFit or ConfigError or TrainingError."""
        command = [sys.executable, "-m", "sft_play", "train" if case.layout == "single" else "train-distributed"]
        command += ["--config", str(self.config), *self.overrides, *self.settings(case, start=start)]
        if case.layout != "single":
            command += ["--strategy", case.layout, "--nproc", str(case.ranks)]
        environment = child_environment(independent_environment(os.environ))
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        folder = self.folder / "outputs" / (("start-" if start else "") + case.name)
        if answer.returncode == 0:
            return folder
        message = _message(answer.stderr) or _message(answer.stdout) or f"exit code {answer.returncode}"
        if answer.returncode == DoesNotFit.exit_code:
            raise DoesNotFit(message)
        if answer.returncode == ConfigError.exit_code and not folder.exists():
            if case.layout == "single":
                raise TrainingError(f"the single process cannot run this config: {message}")
            if "cannot run this job" in message:
                raise ConfigError(message)
        raise TrainingError(f"{case.name}: {message}")

    def saved(self, run: Path) -> Path:
        return next(run / name for name in ("model", "adapter") if (run / name).is_dir())

    def losses(self, run: Path) -> list[float]:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def _largest_difference(expected: Sequence[float], measured: Sequence[float]) -> float:
    """Largest relative difference over steps; infinite where their numbers differ."""
    if len(expected) != len(measured) or not expected:
        return math.inf
    return max(abs(one - other) / abs(one) for one, other in zip(expected, measured, strict=True))


def _message(text: str) -> str:
    """The error that a command printed: its own message, else the last lines."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.split("error: ", 1)[1] for line in lines if "error: " in line]
    return errors[-1] if errors else " / ".join(lines[-3:])
