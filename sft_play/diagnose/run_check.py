"""`make check`: everything that can be checked before training, in the order of the page; one part
that fails hides no other.
"""

import contextlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.answers import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data import checks
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import RowRenderer, count_readable_rows
from sft_play.data.masks.token_row import format_row
from sft_play.data.sources.examples import check_first_rows
from sft_play.data.sources.files import AnySource, data_part_split, find_data_paths
from sft_play.diagnose.doctor import (
    DoctorReport,
    PlannedRun,
    disk_findings,
    format_findings,
    has_local_weights,
)
from sft_play.errors import ConfigError, DataError, ModelError, SftPlayError
from sft_play.launch.planning import plan_run, refusals, require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.row_survey import build_row_renderer, has_variable_lengths, load_row_tokens
from sft_play.launch.run_hardware import go_offline_without_hub, mesh_hardware, restrict_to_device
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import (
    find_model_folder,
    is_hub_reachable,
    load_config_json,
    load_max_positions,
    require_available_model,
)
from sft_play.planner.backend import check_trackers, choose_backend
from sft_play.planner.batching import RowTokens, average_micro_steps, summarize_row_tokens
from sft_play.planner.plan import require_fit
from sft_play.process.waiting import importing, report_wait
from sft_play.text import plural
from sft_play.trace.confirm import load_run_model_shape

# --- for every command that looks at rows before anything trains ----------------------------------

ROW_SPLITS = ("train", "val", "test")


def load_row_tools(config: RunConfig) -> tuple[Any, tuple[str, ...], RowRenderer]:
    """Load a run's tokenizer, and build the renderer of its rows; between the two stand notes on
    what was chosen for the tokenizer. Raises TokenizerError or ModelError where they cannot be
    used."""
    from sft_play.training.prepare.tokenizer import load_tokenizer

    loaded = load_tokenizer(config)
    return loaded.tokenizer, loaded.notes, build_row_renderer(config, loaded.tokenizer)


def configure_hub(config: RunConfig) -> None:
    """Set the hub's variables before its libraries are imported: no telemetry, and offline where
    the hub does not answer."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with contextlib.suppress(ModelError):  # a missing folder is reported where its files are read
        go_offline_without_hub(config.model.name)


def first_stage_run(loaded: LoadedConfig) -> tuple[LoadedConfig, tuple[str, ...]]:
    """Choose the run of the first stage, and a line that says so; a run without stages is itself,
    without a line."""
    if not loaded.stages:
        return loaded, ()
    first = loaded.stages[0]
    return loaded.for_stage(first), (
        f"The rows of stage {first.name}, the first of {len(loaded.stages)}",
    )


def check_not_source(target: Path, files: Sequence[tuple[str, AnySource]]) -> None:
    """Raise DataError if a command would overwrite a file that it reads, with FORCE=1 too."""
    for split, source in files:
        with contextlib.suppress(OSError):
            if Path(str(source)).expanduser().samefile(target):
                description = (
                    f"the {split}" if split.startswith("source ") else f"data.{split}_path"
                )
                raise DataError(f"OUT={target} is {description}, which is read; name another file")


# --- the report -----------------------------------------------------------------------------------

CHECK_STATES = {"PASS": "ok", "WARN": "warning", "FAIL": "problem", "SKIP": "skipped"}
_STATE_LABELS = {**CHECK_STATES, "FAIL": "PROBLEM"}


@dataclass(frozen=True)
class CheckReport(DoctorReport):
    """Everything that was checked of a config."""

    config: Path = Path()

    def summary_lines(self) -> list[str]:
        """Problems and warnings, and the verdict."""
        problems = [item for item in self.findings if item.verdict in ("FAIL", "WARN")]
        header = [f"Check of {self.config}:"] if problems else []
        return [
            *header,
            *format_findings(problems, _STATE_LABELS),
            f"{self._verdict()}; WHY=1 shows each",
        ]

    def lines(self) -> list[str]:
        """The page and its verdict."""
        return [
            f"Check of {self.config}:",
            *format_findings(self.findings, _STATE_LABELS),
            self._verdict(),
        ]

    def _verdict(self) -> str:
        problems, warnings, passed = (
            self.names_by_verdict(verdict) for verdict in ("FAIL", "WARN", "PASS")
        )
        verdict, counts = "Ready to train", f"{len(passed)} ok ({self.elapsed_s:.0f} s)"
        if warnings:
            counts = f"{plural(len(warnings), 'warning')}, {counts}"
        if "memory plan" in warnings:
            verdict = "Predicted not to fit"
        if problems:
            verdict, counts = "Not ready", f"{plural(len(problems), 'problem')}, {counts}"
        return f"{verdict}: {counts}"

    def as_json(self) -> dict[str, Any]:
        """`ok`, `elapsed_s` and the checks."""
        checks = [
            {
                "name": item.name,
                "state": CHECK_STATES[item.verdict],
                "what": item.found,
                "do": item.remedy,
            }
            for item in self.findings
        ]
        return {"ok": self.ok, "elapsed_s": self.elapsed_s, "checks": checks}


# --- the checks -----------------------------------------------------------------------------------


def check_run(
    config_path: Path,
    overrides: Sequence[str],
    hardware: Hardware,
    *,
    earlier_findings: Sequence[Finding] = (),
) -> CheckReport:
    """Check everything that can be checked before training, planned as a run here would be;
    nothing is written. The report begins with the caller's `earlier_findings`."""
    start_time_s, findings, start_findings = time.monotonic(), [*earlier_findings], list[Finding]()
    try:
        loaded = load_config(config_path, overrides=overrides)
    except SftPlayError as error:
        findings.append(
            fail_finding(
                "config",
                str(error),
                "fix the run YAML; configs/reference.yaml of a checkout lists every option",
            )
        )
        return CheckReport(tuple(findings), time.monotonic() - start_time_s, config_path)
    for stage_number, run in enumerate(loaded.runs, start=1):
        if loaded.stages:
            findings.append(
                pass_finding("stage", f"{stage_number} of {len(loaded.stages)}, {run.stage_name}")
            )
        with report_wait("Checking model, rows, masks, memory and disk"):
            findings += _RunChecks(run, hardware).findings()
    known_failures = [finding.found for finding in findings if finding.verdict == "FAIL"]
    with contextlib.suppress(ConfigError):  # the findings say it
        for refusal in refusals(loaded, restrict_to_device(loaded.config, hardware), plans=()):
            # of the rows the report knows more, since it reads them all
            is_known = isinstance(refusal, DataError) or any(
                text in str(refusal) for text in known_failures
            )
            if not is_known:
                start_findings.append(fail_finding("start", str(refusal), "fix what is named"))
    return CheckReport((*start_findings, *findings), time.monotonic() - start_time_s, config_path)


class _RunChecks:
    """The checks of a run, or of a stage; each keeps what later ones need."""

    def __init__(self, loaded: LoadedConfig, hardware: Hardware) -> None:
        self._loaded, self._config, self._hardware = loaded, loaded.config, hardware
        self._has_model_files = False
        self._tokenizer: Any = None
        self._row_renderer: RowRenderer | None = None
        self._planned_run: PlannedRun | None = None
        self._surveys: dict[str, RowStats] = {}
        # Errors that are on the page already, and under which name.
        self._reported: dict[str, str] = {}

    def findings(self) -> Iterator[Finding]:
        """Every check, in the order of the page."""
        config = self._config
        count = len(self._loaded.overrides)
        settings = f" with {plural(count, 'setting')}" if count else ""
        summary = f"{config.model.name}, {config.task_mode}, {config.tuning.mode}"
        yield pass_finding("config", f"{self._loaded.path}{settings}: {summary}")
        configure_hub(config)
        yield from self._part(
            "model files", self._check_model_files, "give model.name a folder or hub id that exists"
        )
        yield from self._part(
            "tokenizer",
            self._check_tokenizer,
            "fix it, or give another model.name or data.chat_template",
        )
        yield from self._part(
            "chat template", self._check_template, "give data.chat_template another template"
        )
        yield from self._check_data()
        # made before padding and the model, which need it, and shown after them: the page ends with
        # what it comes to
        plan = list(
            self._part(
                "memory plan",
                self._check_memory,
                "make plan shows every candidate and the ways out",
            )
        )
        yield from self._part("padding", self._check_padding, "fix what is named")
        yield from self._part("model", self._check_model, "fix the option that is named")
        yield from plan
        yield from self._part("disk", self._check_disk, "fix what is named")

    def _part(
        self, name: str, check: Callable[[], Iterator[Finding]], remedy: str
    ) -> Iterator[Finding]:
        """Yield the findings of a part. An error that a user can fix becomes a problem, and the
        other parts still run; where it is on the page already, this part counts as skipped."""
        try:
            yield from check()
        except SftPlayError as error:
            first_name = self._reported.setdefault(str(error), name)
            if first_name == name:
                yield fail_finding(name, str(error), remedy)
            else:
                yield skip_finding(name, f"not without the {first_name}; see there")

    def _check_model_files(self) -> Iterator[Finding]:
        name, problem = self._config.model.name, None
        folder = find_model_folder(name)
        if folder is None:
            require_available_model(name, revision=self._config.model.revision)
            if not has_local_weights(self._config) and not is_hub_reachable():
                problem = (
                    f"the weights of {name} are not in the local cache,"
                    " and the hub cannot be reached"
                )
        else:
            load_config_json(name)
            if not any(folder.glob("*.safetensors")):
                problem = f"{folder} holds no *.safetensors"
        self._has_model_files = True
        if problem is not None:
            yield fail_finding(
                "model files",
                problem,
                "fetch the weights as safetensors, or give another model.name",
            )
        else:
            yield pass_finding("model files", f"{name}: config.json and weights are available")

    def _check_tokenizer(self) -> Iterator[Finding]:
        if not self._has_model_files:
            yield skip_finding("tokenizer", "not without the model files; see there")
            return
        if blocker := self._find_blocker():
            yield skip_finding("tokenizer", f"not before the {blocker}; see there")
            return
        # here and not at the top: the checks before it answer without any library
        with importing():
            importlib.import_module("sft_play.training.prepare.model_spec")
        from sft_play.training.prepare.tokenizer import load_tokenizer

        loaded = load_tokenizer(self._config)
        self._tokenizer = loaded.tokenizer
        summary = f"{type(loaded.tokenizer).__name__}, {len(loaded.tokenizer):,} tokens"
        yield pass_finding(
            "tokenizer", "\n".join([summary, *(one_line(note, limit=300) for note in loaded.notes)])
        )

    def _find_blocker(self) -> str:
        """What has to be put right first, as it is known without a library; empty where nothing
        is."""
        config = self._config
        try:
            if config.tuning.backend == "bnb" and not self._hardware.named:
                check_trackers(config)
        except ConfigError:
            return "tracker is installed"
        try:
            check_first_rows(config.data, find_data_paths(config.data), task_mode=config.task_mode)
        except SftPlayError:
            return "rows can be read"
        return ""

    def _check_template(self) -> Iterator[Finding]:
        if self._tokenizer is None:
            return
        row_renderer = build_row_renderer(self._config, self._tokenizer)
        if self._config.task_mode != "cpt":
            # raises for a template whose turns cannot be found
            row_renderer.renderer.turn_locator()
            name = one_line(self._config.data.chat_template or "the tokenizer's own", limit=300)
            yield pass_finding("chat template", f"{name}; masks are verified row by row below")
        self._row_renderer = row_renderer

    def _check_data(self) -> Iterator[Finding]:
        config = self._config
        files: list[tuple[str, AnySource]] = []
        try:
            paths = find_data_paths(config.data)
            files = list(paths.named_paths())
            yield pass_finding(
                "data files", "\n".join([", ".join(str(path) for _, path in files), *paths.notes])
            )
        except SftPlayError as error:
            yield fail_finding("data files", str(error), "name files that exist")
        surveys, parts = self._surveys, {part for part, _ in files}
        for part, path in files:
            try:
                surveys[part] = self._survey_rows(
                    part, path, has_val="val" in parts or f"{part} (val)" in parts
                )
            except SftPlayError as error:
                remedy = "fix the file, or give another one"
                if isinstance(error, ConfigError):
                    remedy = "change the key that it names"
                yield fail_finding(f"rows: {part}", str(error), remedy)
                continue
            yield from checks.judge_rows(surveys[part], config.data, task_mode=config.task_mode)
        if surveys and self._row_renderer is not None:
            yield from checks.judge_duplicates(list(surveys.values()))
        has_val = any(data_part_split(part) == "val" for part in surveys)
        if config.train.load_best_model_at_end and not has_val and not config.data.val_fraction:
            yield fail_finding(
                "evaluation",
                "train.load_best_model_at_end=true needs validation rows, and there are none",
                "give data.val_path or data.val_fraction",
            )
        if self._row_renderer is not None:
            yield from self._check_masks(self._row_renderer.max_seq_len)
        elif surveys:
            yield skip_finding("masks", "not without a tokenizer and a template; see there")

    def _survey_rows(self, part: str, path: AnySource, *, has_val: bool) -> RowStats:
        config, row_renderer = self._config, self._row_renderer
        if row_renderer is None:
            is_text = config.task_mode == "cpt" or part == "text"
            return count_readable_rows(path, config.data, data_part_split(part), wants_text=is_text)
        from sft_play.data.build.splits import count_source_rows

        return count_source_rows(
            config,
            path,
            part,
            row_renderer.renderer.tokenizer_parts,
            max_seq_len=row_renderer.max_seq_len,
            has_val=has_val,
        )

    def _check_masks(self, max_seq_len: int) -> Iterator[Finding]:
        config, model = self._config, self._config.model
        chats = [survey for survey in self._surveys.values() if not self._is_text(survey)]
        for survey in chats:
            yield from checks.judge_masks(survey, config.data)
            yield from checks.judge_texts(survey, config.data)
        for survey in chats[:1]:
            yield from checks.judge_special_tokens(survey, self._tokenizer)
            if survey.first_row is not None:
                row_number, token_row = survey.first_row
                header = (
                    f"row {row_number:,} of {survey.split},"
                    " trained part in [[ ]] (make preview shows more):"
                )
                row_text = one_line(format_row(token_row, self._tokenizer), limit=1_300)
                yield pass_finding("example", f"{header}\n{row_text}")
        for survey in chats:
            yield from checks.judge_lengths(
                survey,
                config.data,
                max_seq_len=max_seq_len,
                max_positions=load_max_positions(model.name, revision=model.revision),
            )
        for survey in self._surveys.values():
            if self._is_text(survey) and not survey.chats:
                if survey.unmasked_rows:
                    yield from checks.judge_masks(survey, config.data)
                yield checks.judge_blocks(survey, max_seq_len=max_seq_len)

    def _is_text(self, survey: RowStats) -> bool:
        return self._config.task_mode == "cpt" or survey.split == "text"

    def _check_memory(self) -> Iterator[Finding]:
        from sft_play.planner.explain import choice_line, memory_line, parameter_lines

        config, hardware, rows = self._config, self._hardware, None
        # blocks of text and packs are full, whatever their rows have
        if has_variable_lengths(config):
            rows = self._row_tokens()
        # what they show is counted where they are built, for the run too
        if any(survey.image_rows for survey in self._surveys.values()):
            rows = load_row_tokens(config)
        shape = load_run_model_shape(config, rows)
        plan = plan_run(config, mesh_hardware(config, hardware), rows=rows)
        self._planned_run = PlannedRun(config, shape, plan)
        require_fit(plan, config)
        if not hardware.named:
            require_usable_hardware(
                config, hardware, os.environ, count_params=lambda: plan.model_params
            )
        machine_name = "the named machine" if hardware.named else "this machine"
        lines = [
            f"{choice_line(plan)} ({machine_name})",
            *parameter_lines(plan, config),
            memory_line(plan),
        ]
        summary = "\n".join(lines)
        if plan.fits:
            yield pass_finding("memory plan", summary)
        else:
            yield warn_finding(
                "memory plan",
                f"{summary}\nthe run tries it, because the batch was given",
                "make plan shows the ways out",
            )
        train, batch = self._surveys.get("train"), plan.batch.effective_batch
        if train is not None and 0 < train.kept_rows < batch and not self._is_text(train):
            shortage = (
                f"{train.kept_rows:,} training rows are fewer than one effective batch of {batch:,}"
            )
            remedy = f"lower {config.train.effective_batch_options}"
            yield warn_finding("batch", f"{shortage}: each step sees all of them", remedy)

    def _row_tokens(self) -> RowTokens | None:
        """The lengths of the rows as training would have them; None where they could not be
        counted."""
        train = self._surveys.get("train")
        if train is None or self._row_renderer is None:
            return None
        limit = self._row_renderer.max_seq_len
        held_out = [
            min(limit, max(survey.lengths))
            for name, survey in self._surveys.items()
            if name != "train" and survey.lengths
        ]
        lengths = Counter(min(limit, length) for length in train.lengths)
        return summarize_row_tokens(lengths, limit=limit, held_out=max(held_out, default=0))

    def _check_padding(self) -> Iterator[Finding]:
        from sft_play.data.build.packing import padding_shares

        train, config, planned_run = self._surveys.get("train"), self._config, self._planned_run
        if train is None or planned_run is None or self._row_renderer is None:
            return
        if self._is_text(train) or not train.kept_rows:
            return
        plan, batch = planned_run.plan, planned_run.plan.batch
        # by the real lengths, as the run's own sampler would draw and pad them
        shares = padding_shares(
            train.lengths,
            micro_batch=batch.micro_batch,
            effective_batch=batch.effective_batch,
            max_seq_len=self._row_renderer.max_seq_len,
            seed=config.train.seed,
        )
        if plan.micro_batches.tokens is not None and plan.row_tokens is not None:
            steps = average_micro_steps(
                plan.row_tokens,
                plan.micro_batches,
                effective_batch=batch.effective_batch,
                ranks=batch.ranks,
            )
            shares["grouped"] = 1 - steps.tokens / (steps.count * steps.padded_tokens * batch.ranks)
        yield checks.judge_padding(
            shares,
            micro_batch=batch.micro_batch,
            packing=config.data.packing,
            groups_by_length=config.train.group_by_length,
        )

    def _check_model(self) -> Iterator[Finding]:
        if self._tokenizer is None or self._planned_run is None:
            yield skip_finding("model", "not without a tokenizer and a plan; see there")
            return
        from sft_play.training.model.model_loading import read_base_adapter
        from sft_play.training.prepare.model_spec import build_model_spec
        from sft_play.training.prepare.tokenizer import added_token_rows

        config, size = self._config, len(self._tokenizer)
        if not self._hardware.named:  # a backend is chosen by the GPUs that are here
            choose_backend(config, self._hardware)
        spec = build_model_spec(
            config,
            self._planned_run.plan.precision,
            tokenizer_size=size,
            new_rows=added_token_rows(self._tokenizer, config),
        )
        base_adapter = read_base_adapter(config, spec)
        notes = [*spec.notes, *([base_adapter.note] if base_adapter else [])]
        summary = f"{spec.vocab_size:,} embeddings for {size:,} tokens"
        yield pass_finding(
            "model", "\n".join([summary, *(one_line(note, limit=300) for note in notes)])
        )

    def _check_disk(self) -> Iterator[Finding]:
        run = self._planned_run
        if self._hardware.named:
            yield skip_finding("disk", "the plan is for a named machine, not for this one")
        elif run is None:
            yield skip_finding("disk", "not without a memory plan; see there")
        else:
            yield from disk_findings(run.config, run.shape, run.plan, LaunchOptions())
