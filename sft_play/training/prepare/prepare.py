"""Everything that is checked and decided before any weight is read: backend, tokenizer, the model's
shapes, rows."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config.load import resolved_config_without_paths
from sft_play.data.build.splits import DataSplits, build_splits
from sft_play.data.checks import judge_special_tokens, judge_split
from sft_play.data.masks.image_processor import ImageProcessorSource
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import format_row
from sft_play.data.sources.files import source_digest
from sft_play.errors import BackendError, ConfigError, DataError, stage_context
from sft_play.log import one_line
from sft_play.machine.software import COMPUTE_PACKAGES
from sft_play.models.config_json import base_weights_identity, require_available_model
from sft_play.planner.backend import (
    Backend,
    check_image_options,
    check_trackers,
    choose_backend,
    unsloth_model_problem,
)
from sft_play.runs.folder import installed_versions
from sft_play.text import GIB
from sft_play.training import distributed
from sft_play.training.class_checks.replaced_code import check_kernels
from sft_play.training.job import RunJob
from sft_play.training.model.model_loading import BaseAdapter, read_base_adapter
from sft_play.training.model.vision_parts import require_image_class
from sft_play.training.prepare.device_checks import check_device, check_gpu
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.model_spec import ModelSpec, build_model_spec, peft_loading_warning
from sft_play.training.prepare.tokenizer import LoadedTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Characters of the first row that a terminal shows.
_SHOWN_CHARACTERS = 300
# Facts that all stages of a run share.
MODEL_FACTS = ("weights", "tokenizer", "adapter")


@dataclass(frozen=True)
class Prepared:
    """A run, or a stage of one, before any weight is read."""

    backend: Backend
    tokenizer: LoadedTokenizer
    splits: DataSplits
    model_spec: ModelSpec
    renderer: Renderer
    # The adapter that training continues; None where it starts a new one.
    base_adapter: BaseAdapter | None = None

    @property
    def image_source(self) -> ImageProcessorSource | None:
        """Where the base's processor of images is, if rows have images."""
        return self.renderer.images if self.splits.has_images else None

    @property
    def trains_adapter(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return self.model_spec.peft_config is not None

    @property
    def base_adapter_folder(self) -> Path | None:
        """The folder of the adapter that training continues."""
        return self.base_adapter.folder if self.base_adapter is not None else None


def prepare_stages(job: RunJob) -> list[Prepared]:
    """Check the devices, and prepare every stage: its tokenizer, the model's shapes and the rows.
    Raises SftPlayError for what the user can fix."""
    largest_stage = job.largest_stage
    quiet_libraries()
    for stage in job.stage_jobs:
        check_device(stage.plan, stage.loaded.config)
    if job.loaded.config.tuning.backend == "bnb":  # with Unsloth its own process checks the GPU
        check_gpu(largest_stage.plan, largest_stage.loaded.config)
    prepared_stages = [prepare(stage) for stage in job.stage_jobs]
    if prepared_stages[0].backend.fallback_from:
        check_gpu(largest_stage.plan, largest_stage.loaded.config)
    return prepared_stages


def prepare(job: RunJob) -> Prepared:
    """Load tokenizer, model on the meta device and rows; raises SftPlayError, naming the stage."""
    if job.folder.stage_name is not None:
        logger.debug("Stage %s:", job.folder.stage_name)
    with stage_context(job.folder.stage_name):
        config = job.loaded.config
        backend = choose_backend(
            config,
            job.plan.hardware,
            layout=job.plan.layout,
            is_rank="RANK" in os.environ,
            has_stages=job.folder.stage_name is not None,
        )
        if backend.fallback_from:
            logger.warning("Backend: %s", backend.reason)
        require_available_model(config.model.name, revision=config.model.revision)
        # before the rows: tokenizing may take long, and each of these may refuse the run in seconds
        tokenizer = load_tokenizer(config)
        plan, step = job.plan, job.plan.choice.step
        model_spec = build_model_spec(
            config,
            plan.precision,
            tokenizer_size=len(tokenizer.tokenizer),
            new_rows=tokenizer.new_rows,
            layout=plan.choice.layout,
            repeats_kv=plan.repeats_kv,
            uses_masks=step.masks,
            uses_boundaries=step.varlen,
        )
        _warn_of_other_attention(job, model_spec)
        if backend.name == "unsloth":
            # the plan has judged the class by its shapes, which code of a model's own may belie
            problem = unsloth_model_problem(
                job.plan.precision,
                is_text_tower=model_spec.text_tower is not None,
                is_transposed=model_spec.peft_config is not None
                and model_spec.peft_config.fan_in_fan_out,
            )
            if model_spec.resize_to is not None:
                problem = "the tokenizer is larger than the model's embeddings"
            if problem:
                raise BackendError(
                    f"tuning.backend=unsloth cannot run here: {problem}; use tuning.backend=bnb"
                )
        if backend.name == "bnb":
            check_trackers(config)
            check_kernels(config, job.plan)
        base_adapter = read_base_adapter(config, model_spec)
        if base_adapter is not None:
            model_spec = replace(model_spec, notes=(*model_spec.notes, base_adapter.note))
        splits = _build_splits(job, tokenizer, model_spec)
        model_spec = _fit_to_images(job, model_spec, has_images=splits.has_images)
        for note in (*tokenizer.notes, *splits.notes, *model_spec.notes):
            logger.debug("%s", note)
        if peft_warning := peft_loading_warning(
            model_spec, trust_remote_code=config.model.trust_remote_code
        ):
            logger.warning("Adapter: %s", peft_warning)
        prepared = Prepared(
            backend,
            tokenizer,
            splits,
            model_spec,
            Renderer(
                tokenizer.tokenizer,
                config.data,
                max_seq_len=job.plan.max_seq_len,
                today=job.today,
                images=ImageProcessorSource.from_config(config),
            ),
            base_adapter,
        )
        if job.folder.stage_name is None:
            log_rows(job, prepared)
        return prepared


# Rows with images come padded with a mask, in the layouts that a plan for them has; a plan that was
# made without a look at the rows may have another.
def _fit_to_images(job: RunJob, model_spec: ModelSpec, *, has_images: bool) -> ModelSpec:
    config = job.loaded.config
    if not has_images and config.tuning.trains_vision_parts:
        raise ConfigError(
            "tuning.train_vision and tuning.lora.projector train parts for images, and no row has"
            " one; leave them out"
        )
    if not has_images:
        return model_spec
    require_image_class(model_spec.text_tower, config.model.name)
    check_image_options(config)
    layout, attention = job.plan.choice.layout, model_spec.attention.name
    is_padded = attention in ("sdpa", "eager")
    is_whole_row = layout.context_parallel == layout.tensor_parallel == 1
    if is_padded and is_whole_row and not layout.is_streamed:
        return replace(model_spec, uses_masks=True)
    raise DataError(
        f"rows have images, and the plan ({layout.name}, attention {attention}) is one for rows of"
        " text: it was made without them; plan again where the data is"
    )


# Where the class needs more memory than was planned, or computes attention in another way.
def _warn_of_other_attention(job: RunJob, model_spec: ModelSpec) -> None:
    plan, step, attention = job.plan, job.plan.choice.step, model_spec.attention.name
    needs_masks = (step.varlen and attention == "sdpa") or (
        model_spec.uses_masks and not step.masks
    )
    if needs_masks and plan.masked_bytes is not None:
        logger.warning(
            "Attention: the plan left out masks that a small model of the class needs; with them"
            " this run needs %.2f GiB, where %.2f were planned and %.2f are there",
            plan.masked_bytes / GIB,
            plan.memory.required / GIB,
            plan.budget_bytes / GIB,
        )
    if attention in ("sdpa", "eager") and attention != step.attention:
        logger.warning(
            "Attention: the model's class runs %s, but the plan"
            " assumed %s: memory and speed will differ from the plan",
            attention,
            step.attention,
        )


def _build_splits(job: RunJob, tokenizer: LoadedTokenizer, model_spec: ModelSpec) -> DataSplits:
    config, plan = job.loaded.config, job.plan
    positions = getattr(model_spec.hf_config.get_text_config(), "max_position_embeddings", None)
    splits = build_splits(
        config,
        job.data_paths,
        tokenizer.tokenizer,
        max_seq_len=plan.max_seq_len,
        max_positions=positions if isinstance(positions, int) and positions > 0 else None,
        today=job.today,
    )
    if config.train.load_best_model_at_end and splits.val is None:
        raise ConfigError(
            "train.load_best_model_at_end=true needs validation"
            " rows: give data.val_path or val_fraction"
        )
    for name, split in splits.named.items():
        stats = replace(split.stats, split=name)
        for finding in judge_split(
            stats, config.data, max_seq_len=plan.max_seq_len, max_positions=None
        ):
            is_reported_for_train = name != "train" and finding.name.startswith("columns")
            level = (
                logging.INFO
                if finding.verdict == "WARN" and not is_reported_for_train
                else logging.DEBUG
            )
            logger.log(
                level,
                "Data %s: %s: %s",
                name,
                finding.name.partition(":")[0],
                finding.found.partition("\n")[0],
            )
        if name == "train":
            for finding in judge_special_tokens(stats, tokenizer.tokenizer):
                logger.debug("Data train: %s: %s", finding.name, finding.found)
    return splits


def log_rows(job: RunJob, prepared: Prepared) -> None:
    """Log what is trained and held out, and the first row; of a stage when it begins."""
    plan, splits, tokenizer = job.plan, prepared.splits, prepared.tokenizer
    held_out = [
        f"{len(split.rows):,} {name}" for name, split in splits.named.items() if name != "train"
    ]
    line = splits.train.stats.short_line(max_seq_len=plan.max_seq_len)
    logger.info("Data: %s; held out: %s", line, " and ".join(held_out) or "none")
    row_count, effective_batch = len(splits.train.rows), plan.batch.effective_batch
    if row_count < effective_batch:
        logger.warning(
            "Data train: %d rows are fewer than one effective"
            " batch of %d: each step sees all of them",
            row_count,
            effective_batch,
        )
    row = one_line(format_row(splits.train.first_row(), tokenizer.tokenizer), limit=2_000)
    line = shorten_row(row)
    if line != row:
        logger.debug("First training row, whole: %s", row)
    logger.info("First training row, trained part in [[ ]]: %s", line)


def shorten_row(row: str) -> str:
    """A row with its trained part in [[ ]] as a terminal shows it: from a little before that part,
    where a long prompt would leave no place for it, and from the beginning of a word or token."""
    trained = row.find("[[")
    start = max(0, trained - _SHOWN_CHARACTERS // 3) if len(row) > _SHOWN_CHARACTERS else 0
    if start and (boundary := re.search(r"\s|<", row[start:trained])):
        start += boundary.start()
    return one_line(f"{'…' if start else ''}{row[start:]}", limit=_SHOWN_CHARACTERS)


def data_facts(stage_jobs: Sequence[RunJob], prepared_stages: Sequence[Prepared]) -> dict[str, Any]:
    """`data` of the manifest: path, digest and report of each file, with its stage's name before
    it."""
    facts: dict[str, Any] = {}
    for job, prepared in zip(stage_jobs, prepared_stages, strict=True):
        stage_prefix = f"stage {job.folder.stage_name} " if job.folder.stage_name else ""
        for name, path in job.data_paths.named_paths():
            facts[f"{stage_prefix}{name}"] = {"path": str(path), "sha256": source_digest(path)}
        for name, split in prepared.splits.named.items():
            fact = facts.setdefault(f"{stage_prefix}{name}", {})
            fact["report"] = split.stats.as_json()
            if split.stats.image_rows:  # of each row's tokens and pictures
                fact["images"] = hashlib.sha256(split.stats.digests.tobytes()).hexdigest()
        facts["weights"] = base_weights_identity(
            job.loaded.config.model.name, prepared.model_spec.hf_config
        )
        facts["tokenizer"] = {"path": "tokenizer", "sha256": prepared.tokenizer.sha256}
        if prepared.base_adapter is not None:
            adapter = prepared.base_adapter
            facts["adapter"] = {
                "path": str(adapter.folder),
                "sha256": adapter.sha256,
                "run": adapter.run,
            }
    return facts


def require_agreement(job: RunJob, prepared: Prepared, facts: Mapping[str, Any]) -> None:
    """Raises SftPlayError on all ranks where they do not read the same data (`facts`), model,
    settings and versions, each from its own disk."""
    inputs = {
        f"the {name}" if name in MODEL_FACTS else f"the content of the {name} file": str(
            fact["sha256"]
        )[:12]
        for name, fact in facts.items()
        if "sha256" in fact
    }
    if prepared.renderer.tokenizer_parts.writes_date:
        inputs["the day that the chat template writes"] = str(job.today)
    inputs |= {
        f"the images of the {name} file": str(fact["images"])[:12]
        for name, fact in facts.items()
        if "images" in fact
    }
    settings = json.dumps(resolved_config_without_paths(job.loaded.config), sort_keys=True)
    inputs["the settings of the run"] = hashlib.sha256(settings.encode()).hexdigest()[:12]
    versions = installed_versions()
    inputs |= {
        f"the version of {name}": str(versions[name]) for name in ("sft_play", *COMPUTE_PACKAGES)
    }
    distributed.require_same_inputs(inputs)
