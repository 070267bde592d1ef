"""Everything that can be checked before training, in the order of the page; one part that fails
hides no other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.config.load import LoadedConfig, load_config
from sft_play.config.schema import RunConfig
from sft_play.data import checks
from sft_play.data.build.stats import RowStats
from sft_play.data.build.survey import RowRenderer, count_readable_rows
from sft_play.data.masks.token_row import format_row
from sft_play.data.sources.files import AnySource, data_part_split, find_data_paths
from sft_play.diagnose import engines, machine_checks
from sft_play.diagnose.doctor import PlannedRun
from sft_play.diagnose.pages import CheckReport
from sft_play.errors import DataError, ModelError, SftPlayError
from sft_play.findings import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from sft_play.launch.refusals import require_usable_hardware
from sft_play.launch.request import LaunchOptions
from sft_play.launch.run_hardware import go_offline_without_hub
from sft_play.log import one_line
from sft_play.machine.hardware import Hardware
from sft_play.models.config_json import (
    find_model_folder,
    is_hub_reachable,
    load_config_json,
    load_max_positions,
    require_available_model,
)
from sft_play.planner.batching import RowTokens, average_micro_steps, summarize_row_tokens
from sft_play.planner.plan import require_fit
from sft_play.process.waiting import importing, report_wait

# Helpers of commands that look at rows before anything trains: load a run's tokenizer and row
# renderer, choose the stage whose rows are shown, and refuse to overwrite a source.

ROW_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class RowTools:
    """A run's tokenizer, notes on what was chosen for it, and the renderer of its rows."""

    tokenizer: Any
    notes: tuple[str, ...]
    row_renderer: RowRenderer


def load_row_tools(config: RunConfig) -> RowTools:
    """The run's tokenizer and renderer; raises TokenizerError or ModelError where they cannot be used."""
    from sft_play.training.prepare.tokenizer import load_tokenizer

    loaded = load_tokenizer(config)
    return RowTools(loaded.tokenizer, loaded.notes, build_row_renderer(config, loaded.tokenizer))


def build_row_renderer(config: RunConfig, tokenizer: Any) -> RowRenderer:
    """Build the renderer that turns a run's conversations into token rows, cut at the plan's longest row."""
    from sft_play.data.masks.render import Renderer

    max_seq_len = config.model.max_seq_len
    positions = load_max_positions(config.model.name, revision=config.model.revision)
    return RowRenderer(
        Renderer(tokenizer, config.data, max_seq_len=min(max_seq_len, positions or max_seq_len)),
        task_mode=config.task_mode,
    )


def configure_hub(config: RunConfig) -> None:
    """Set, before the hub's libraries are imported: no telemetry, and offline where the hub does not answer."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with contextlib.suppress(ModelError):  # a missing folder is reported where its files are read
        go_offline_without_hub(config.model.name)


def first_stage_run(loaded: LoadedConfig) -> tuple[LoadedConfig, tuple[str, ...]]:
    """The first stage's run of a run with stages, and a line about that."""
    if not loaded.stages:
        return loaded, ()
    first = loaded.stages[0]
    return loaded.for_stage(first), (f"The rows of stage {first.name}, the first of {len(loaded.stages)}",)


def check_not_source(target: Path, files: Sequence[tuple[str, AnySource]]) -> None:
    """Raise DataError if a command would overwrite a file that it reads, with FORCE=1 too."""
    for split, source in files:
        with contextlib.suppress(OSError):
            if Path(str(source)).expanduser().samefile(target):
                description = f"the {split}" if split.startswith("source ") else f"data.{split}_path"
                raise DataError(f"OUT={target} is {description}, which is read; name another file")


# The lengths of the rows as training would have them; None where they could not be counted.
RowLengths = Callable[[], RowTokens | None]
# Plans a run on a machine, by the lengths of its rows where these decide something.
ConfigPlanner = Callable[[RunConfig, Hardware, RowLengths], PlannedRun]


def check_config(
    config_path: Path,
    overrides: Sequence[str],
    hardware: Hardware,
    *,
    planner: ConfigPlanner,
    earlier_findings: Sequence[Finding] = (),
    engine_names: Sequence[str] = (),
) -> CheckReport:
    """Everything that can be checked before training, after the caller's `earlier_findings`; nothing is written.
    `engine_names`: engines that are to load the result, of stages the last one's."""
    start_time_s = time.monotonic()
    try:
        loaded = load_config(config_path, overrides=overrides)
    except SftPlayError as error:
        config_finding = fail_finding(
            "config", str(error), "fix the run YAML; configs/reference.yaml lists every option"
        )
        return CheckReport((*earlier_findings, config_finding), time.monotonic() - start_time_s, config_path)
    findings = [*earlier_findings]
    *earlier_runs, last_run = [*map(loaded.for_stage, loaded.stages)] or [loaded]
    for stage_number, run in enumerate([*earlier_runs, last_run], start=1):
        if loaded.stages:
            findings.append(pass_finding("stage", f"{stage_number} of {len(loaded.stages)}, {run.stage_name}"))
        with report_wait("Checking model, rows, masks, memory and disk"):
            findings += _RunChecks(
                run, hardware, planner, engine_names=engine_names if run is last_run else ()
            ).findings()
    return CheckReport(tuple(findings), time.monotonic() - start_time_s, config_path)


class _RunChecks:
    def __init__(
        self, loaded: LoadedConfig, hardware: Hardware, planner: ConfigPlanner, *, engine_names: Sequence[str] = ()
    ) -> None:
        self._loaded, self._config, self._hardware, self._engine_names = loaded, loaded.config, hardware, engine_names
        self._planner = planner
        self._targets: frozenset[str] = frozenset()
        self._tokenizer: Any = None
        self._row_renderer: RowRenderer | None = None
        self._planned_run: PlannedRun | None = None
        self._surveys: dict[str, RowStats] = {}
        self._lacks_model_files = False
        self._reported: dict[str, str] = {}
        """Errors that are on the page already, and under which name."""

    def _problem_finding(self, name: str, error: SftPlayError, remedy: str) -> Finding:
        """An error as a problem; one that is on the page already makes this part skipped."""
        first_name = self._reported.setdefault(str(error), name)
        return (
            fail_finding(name, str(error), remedy)
            if first_name == name
            else skip_finding(name, f"not without the {first_name}; see there")
        )

    def findings(self) -> Iterator[Finding]:
        """Every check, in the order of the page."""
        config, setting_count = self._config, len(self._loaded.overrides)
        settings = f" with {setting_count} setting{'s' if setting_count > 1 else ''}" if setting_count else ""
        summary = f"{config.model.name}, {config.task_mode}, {config.tuning.mode}"
        yield pass_finding("config", f"{self._loaded.path}{settings}: {summary}")
        configure_hub(config)
        yield from self._check_model_files()
        yield from self._check_tokenizer_and_template()
        yield from self._check_data()
        # made before padding and the model, which need it, and shown after them: the page ends with what it comes to
        plan = list(_catch_user_errors("memory plan", self._check_memory()))
        yield from _catch_user_errors("padding", self._check_padding())
        yield from _catch_user_errors("model", self._check_model())
        yield from self._check_serving()
        yield from plan
        yield from _catch_user_errors("disk", self._check_disk())

    def _check_model_files(self) -> Iterator[Finding]:
        name = self._config.model.name
        try:
            problem = _find_weights_problem(self._config)
        except SftPlayError as error:
            self._lacks_model_files = True
            yield self._problem_finding("model files", error, "give model.name a folder or hub id that exists")
            return
        if problem:
            yield fail_finding("model files", problem, "fetch the weights as safetensors, or give another model.name")
        else:
            yield pass_finding("model files", f"{name}: config.json and weights are available")

    def _check_tokenizer_and_template(self) -> Iterator[Finding]:
        if self._lacks_model_files:
            yield skip_finding("tokenizer", "not without the model files; see there")
            return
        with importing():  # here and not at the top: the checks before it answer without any library
            importlib.import_module("sft_play.training.prepare.model_spec")
        from sft_play.training.prepare.tokenizer import load_tokenizer

        try:
            loaded = load_tokenizer(self._config)
        except SftPlayError as error:
            yield self._problem_finding("tokenizer", error, "fix it, or give another model.name or data.chat_template")
            return
        self._tokenizer = loaded.tokenizer
        summary = f"{type(loaded.tokenizer).__name__}, {len(loaded.tokenizer):,} tokens"
        yield pass_finding("tokenizer", "\n".join([summary, *(one_line(note, limit=300) for note in loaded.notes)]))
        try:
            row_renderer = build_row_renderer(self._config, loaded.tokenizer)
            if self._config.task_mode != "cpt":
                row_renderer.renderer.turn_locator()
            self._row_renderer = row_renderer
        except SftPlayError as error:
            yield fail_finding("chat template", str(error), "give data.chat_template another template")
            return
        if self._config.task_mode != "cpt":
            template_name = self._config.data.chat_template or "the tokenizer's own"
            yield pass_finding(
                "chat template", f"{one_line(template_name, limit=300)}; masks are verified row by row below"
            )

    def _check_data(self) -> Iterator[Finding]:
        config = self._config
        files: list[tuple[str, AnySource]] = []
        try:
            paths = find_data_paths(config.data)
            files = list(paths.named_paths())
            yield pass_finding("data files", "\n".join([", ".join(str(path) for _, path in files), *paths.notes]))
        except SftPlayError as error:
            yield fail_finding("data files", str(error), "name files that exist")
        surveys: dict[str, RowStats] = {}
        parts = {part for part, _ in files}
        for part, path in files:
            try:
                surveys[part] = self._survey_rows(part, path, has_val="val" in parts or f"{part} (val)" in parts)
            except SftPlayError as error:
                yield fail_finding(f"rows: {part}", str(error), "fix the file, or give another one")
                continue
            yield from checks.judge_rows(surveys[part], config.data, task_mode=config.task_mode)
        if surveys and self._row_renderer is not None:
            yield from checks.judge_duplicates(list(surveys.values()))
        self._surveys = surveys
        has_val = any(data_part_split(part) == "val" for part in surveys)
        if config.train.load_best_model_at_end and not has_val and not config.data.val_fraction:
            message = "train.load_best_model_at_end=true needs validation rows, and there are none"
            yield fail_finding("evaluation", message, "give data.val_path or data.val_fraction")
        if self._row_renderer is not None:
            yield from self._check_masks(surveys)
        elif surveys:
            yield skip_finding("masks", "not without a tokenizer and a template; see there")

    def _survey_rows(self, part: str, path: AnySource, *, has_val: bool) -> RowStats:
        config, row_renderer = self._config, self._row_renderer
        if row_renderer is None:
            is_text = config.task_mode == "cpt" or part == "text"
            return count_readable_rows(path, config.data, data_part_split(part), wants_text=is_text)
        from sft_play.data.build.splits import count_source_rows

        tokenizer = row_renderer.renderer.tokenizer_parts
        return count_source_rows(config, path, part, tokenizer, max_seq_len=row_renderer.max_seq_len, has_val=has_val)

    def _check_masks(self, surveys: dict[str, RowStats]) -> Iterator[Finding]:
        config, row_renderer = self._config, self._row_renderer
        assert row_renderer is not None
        positions = load_max_positions(config.model.name, revision=config.model.revision)
        chats = [survey for survey in surveys.values() if not self._is_text(survey)]
        for survey in chats:
            yield from checks.judge_masks(survey, config.data)
            yield from checks.judge_texts(survey, config.data)
        for survey in chats[:1]:
            yield from checks.judge_roles(survey)
            yield from checks.judge_special_tokens(survey, self._tokenizer)
            yield from self._show_example(survey)
        for survey in chats:
            yield from checks.judge_lengths(
                survey, config.data, max_seq_len=row_renderer.max_seq_len, max_positions=positions
            )
        for survey in surveys.values():
            if self._is_text(survey) and not survey.chats:
                if survey.unmasked_rows:
                    yield from checks.judge_masks(survey, config.data)
                yield checks.judge_blocks(survey, max_seq_len=row_renderer.max_seq_len)

    def _is_text(self, survey: RowStats) -> bool:
        return self._config.task_mode == "cpt" or survey.split == "text"

    def _show_example(self, survey: RowStats) -> Iterator[Finding]:
        if survey.first_row is None:
            return
        row_number, token_row = survey.first_row
        header = f"row {row_number:,} of {survey.split}, trained part in [[ ]] (make preview shows more):"
        yield pass_finding("example", f"{header}\n{one_line(format_row(token_row, self._tokenizer), limit=1_300)}")

    def _check_memory(self) -> Iterator[Finding]:
        from sft_play.planner.explain import choice_line, memory_line, parameter_lines

        machine_name = "the named machine" if self._hardware.named else "this machine"
        try:
            self._planned_run = self._planner(self._config, self._hardware, self._row_tokens)
            plan = self._planned_run.plan
            require_fit(plan, self._config)
            if not self._hardware.named:
                require_usable_hardware(
                    self._config, self._hardware, os.environ, count_params=lambda: plan.model_params
                )
        except SftPlayError as error:
            yield self._problem_finding("memory plan", error, "make plan shows every candidate and the ways out")
            return
        summary = "\n".join(
            [f"{choice_line(plan)} ({machine_name})", *parameter_lines(plan, self._config), memory_line(plan)]
        )
        if plan.fits:
            yield pass_finding("memory plan", summary)
        else:
            message = f"{summary}\nthe run tries it, because the batch was given"
            yield warn_finding("memory plan", message, "make plan shows the ways out")
        train, batch = self._surveys.get("train"), plan.batch.effective_batch
        if train is not None and train.kept_rows and train.kept_rows < batch and not self._is_text(train):
            shortage = f"{train.kept_rows:,} training rows are fewer than one effective batch of {batch:,}"
            remedy = f"lower {self._config.train.effective_batch_options}"
            yield warn_finding("batch", f"{shortage}: each step sees all of them", remedy)

    def _row_tokens(self) -> RowTokens | None:
        train = self._surveys.get("train")
        if train is None or self._row_renderer is None:
            return None
        limit = self._row_renderer.max_seq_len
        held_out = [min(limit, max(survey.lengths)) for name, survey in self._surveys.items()
                    if name != "train" and survey.lengths]  # fmt: skip
        lengths = Counter(min(limit, length) for length in train.lengths)
        return summarize_row_tokens(lengths, limit=limit, held_out=max(held_out, default=0))

    def _check_padding(self) -> Iterator[Finding]:
        from sft_play.data.build.packing import padding_shares

        train, config = self._surveys.get("train"), self._config
        if (
            train is None
            or self._planned_run is None
            or self._row_renderer is None
            or self._is_text(train)
            or not train.kept_rows
        ):
            return
        plan = self._planned_run.plan
        # by the real lengths, as the run's own sampler would draw and pad them
        shares = padding_shares(
            train.lengths,
            micro_batch=plan.batch.micro_batch,
            effective_batch=plan.batch.effective_batch,
            max_seq_len=self._row_renderer.max_seq_len,
            seed=config.train.seed,
        )
        micro_batches, rows = plan.micro_batches, plan.row_tokens
        if micro_batches.tokens is not None and rows is not None:
            micro_steps = average_micro_steps(
                rows, micro_batches, effective_batch=plan.batch.effective_batch, ranks=plan.batch.ranks
            )
            shares["grouped"] = 1 - micro_steps.tokens / (
                micro_steps.count * micro_steps.padded_tokens * plan.batch.ranks
            )
        yield checks.judge_padding(
            shares,
            micro_batch=plan.batch.micro_batch,
            packing=config.data.packing,
            groups_by_length=config.train.group_by_length,
        )

    def _check_model(self) -> Iterator[Finding]:
        if self._tokenizer is None or self._planned_run is None:
            yield skip_finding("model", "not without a tokenizer and a plan; see there")
            return
        from sft_play.planner.backend import choose_backend
        from sft_play.training.model.adapters import read_base_adapter
        from sft_play.training.prepare.model_spec import build_model_spec
        from sft_play.training.prepare.tokenizer import added_token_rows

        try:
            if not self._hardware.named:  # a backend is chosen by the GPUs that are here
                choose_backend(self._config, self._hardware)
            size, new_rows = len(self._tokenizer), added_token_rows(self._tokenizer, self._config)
            precision = self._planned_run.plan.precision
            spec = build_model_spec(self._config, precision, tokenizer_size=size, new_rows=new_rows)
            base_adapter = read_base_adapter(self._config, spec)
        except SftPlayError as error:
            yield fail_finding("model", str(error), "fix the option that is named")
            return
        self._targets = frozenset(spec.peft_config.target_modules or ()) if spec.peft_config else frozenset()
        summary = f"{spec.vocab_size:,} embeddings for {len(self._tokenizer):,} tokens"
        notes = [*spec.notes, *([base_adapter.note] if base_adapter else [])]
        yield pass_finding("model", "\n".join([summary, *(one_line(note, limit=300) for note in notes)]))

    def _check_serving(self) -> Iterator[Finding]:
        if not self._engine_names:
            return
        if self._lacks_model_files:
            yield skip_finding("serve", "not without the model files; see there")
            return
        model = self._config.model
        architecture = engines.model_architecture(load_config_json(model.name, revision=model.revision))
        served_model = engines.build_served_model(self._config, architecture, self._targets or ())
        for name in self._engine_names:
            yield from engines.engine_findings(name, served_model)

    def _check_disk(self) -> Iterator[Finding]:
        if self._hardware.named:
            yield skip_finding("disk", "the plan is for a named machine, not for this one")
            return
        if self._planned_run is None:
            yield skip_finding("disk", "not without a memory plan; see there")
            return
        planned_run = self._planned_run
        yield from machine_checks.disk_findings(
            planned_run.config, planned_run.shape, planned_run.plan, LaunchOptions()
        )


def _catch_user_errors(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The checks of a part; an error that a user can fix becomes a problem, and the other parts still run."""
    try:
        yield from findings
    except SftPlayError as error:
        yield fail_finding(name, str(error), "fix what is named")


def _find_weights_problem(config: RunConfig) -> str:
    name = config.model.name
    folder = find_model_folder(name)
    if folder is None:
        require_available_model(name, revision=config.model.revision)
        if machine_checks.has_local_weights(config) or is_hub_reachable():
            return ""
        return f"the weights of {name} are not in the local cache, and the hub cannot be reached"
    load_config_json(name)
    return "" if any(folder.glob("*.safetensors")) else f"{folder} holds no *.safetensors"
