"""A run on Unsloth, in its environment: Unsloth's model and adapters in this project's training loop (on transformers'
Trainer, not TRL's), on rows that were handed over."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainingArguments

from sft_play.config.load import LoadedConfig
from sft_play.config.schema import RunConfig
from sft_play.data.build.splits import DataSplit, DataSplits
from sft_play.errors import BackendError
from sft_play.log import one_line, start_log_file
from sft_play.planner.backend import Backend, check_trackers
from sft_play.planner.plan import Plan, plan_from_json
from sft_play.runs.folder import RunFolder
from sft_play.training import distributed, engines
from sft_play.training.checkpoints.model_saving import saved_shapes
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.job import RunJob
from sft_play.training.loop.loop import PlannedLoop
from sft_play.training.loop.trainer import build_run_trainer, training_arguments
from sft_play.training.measure.evaluate import EvalSet
from sft_play.training.measure.exact_match import Question, configured_eos_token_ids
from sft_play.training.measure.monitor import RunMonitors, start_memory_peaks
from sft_play.training.model.model_loading import keep_4bit_trainable
from sft_play.training.prepare.device_checks import check_device, check_gpu
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.model_spec import ModelSpec
from sft_play.training.prepare.prepare import Prepared
from sft_play.training.prepare.tokenizer import LoadedTokenizer
from sft_play.training.run import train_stage as train_model
from sft_play.training.unsloth.bridge import Handover

# Stands for what only `prepare` needs: data files, reports, attention, renderer.
_NOT_HANDED_OVER: Any = None


def train_handover(path: Path) -> None:
    """Train as the document at `path` says; the run folder then holds what every run writes. Raises BackendError:
    Unsloth would train something else; SftPlayError: as any run."""
    handover = Handover.model_validate_json(path.read_text(encoding="utf-8"))
    quiet_libraries()
    job = _build_job(handover)
    check_device(job.plan, job.loaded.config)
    check_trackers(job.loaded.config)  # `prepare` has looked in the other environment, whose packages are not these
    check_gpu(job.plan, job.loaded.config)
    memory_peaks = start_memory_peaks(job.plan)
    with distributed.process_group(job.plan, timeout_s=job.timeout_s), Heartbeat(job.timeout_s) as heartbeat:
        log_handler = start_log_file(job.folder.log_path) if distributed.is_first() else None
        try:
            train_model(
                job, _build_prepared(handover, job.loaded.config), RunMonitors(memory_peaks, heartbeat,
                handover.started),
                build_eval_set=functools.partial(_build_eval_set, handover),
                load_trainer=functools.partial(_build_trainer, handover),
            )  # fmt: skip
        finally:
            if log_handler is not None:
                logging.getLogger().removeHandler(log_handler)
                log_handler.close()


def _build_job(handover: Handover) -> RunJob:
    config = RunConfig.model_validate_json(json.dumps(handover.config))
    loaded = LoadedConfig(config, Path(handover.config_path), "", tuple(handover.overrides))
    folder = RunFolder(Path(handover.folder))
    plan = plan_from_json(handover.plan)
    return RunJob(
        loaded, plan, _NOT_HANDED_OVER, folder, resume=handover.resume, folder_exists=True, timeout_s=handover.timeout_s
    )


def _build_prepared(handover: Handover, config: RunConfig) -> Prepared:
    from datasets import Dataset
    from transformers import AutoTokenizer

    trust_remote_code = config.model.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(handover.tokenizer, trust_remote_code=trust_remote_code)
    splits = {name: DataSplit(Dataset.from_file(file), _NOT_HANDED_OVER) for name, file in handover.splits.items()}
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=config.tuning.lora.r, target_modules=handover.target_modules)
    return Prepared(
        Backend("unsloth", ""),
        LoadedTokenizer(tokenizer, (), "", handover.own_template),
        DataSplits(splits["train"], splits.get("val"), splits.get("test")),
        ModelSpec(None, _NOT_HANDED_OVER, None, peft_config, 0, None, "", ()),
        _NOT_HANDED_OVER,
    )


def _build_eval_set(handover: Handover, _: RunJob, prepared: Prepared) -> EvalSet:
    splits = prepared.splits
    split = {"train": splits.train, "val": splits.val, "test": splits.test}.get(handover.held_out)
    return EvalSet(split, handover.held_out, handover.asked, handover.asked_while_training)


class UnslothLoop(PlannedLoop):
    """The loop of every run, which generates answers in Unsloth's inference mode."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """In an evaluation the mean over this rank's batch; the Trainer would divide by all ranks' tokens."""
        if not model.training:
            options["num_items_in_batch"] = None
        return super().compute_loss(model, inputs, *args, **options)

    def _measure_exact_match(self, questions: Sequence[Question], *, prefix: str) -> dict[str, float]:
        from unsloth import FastLanguageModel

        model = self.accelerator.unwrap_model(self.model)
        FastLanguageModel.for_inference(model)
        try:
            return super()._measure_exact_match(questions, prefix=prefix)
        finally:
            FastLanguageModel.for_training(model)


def _build_trainer(
    handover: Handover, job: RunJob, prepared: Prepared, eval_set: EvalSet, monitors: RunMonitors, **_: Any
) -> PlannedLoop:
    config, plan = job.loaded.config, job.plan
    arguments = _build_arguments(config, plan, job.folder, has_eval=prepared.splits.val is not None)
    model = load_unsloth_model(handover, config, plan)
    eos_token_ids = configured_eos_token_ids(model)
    model_stop_ids = {*(eos_token_ids if isinstance(eos_token_ids, list) else [eos_token_ids])} - {None}
    return build_run_trainer(
        job, prepared, eval_set, monitors, arguments=arguments, model=model, peft_config=None,
        trainer_class=UnslothLoop, stop_ids=sorted({*handover.stop_ids, *model_stop_ids}),
    )  # fmt: skip


def _build_arguments(config: RunConfig, plan: Plan, folder: RunFolder, *, has_eval: bool) -> TrainingArguments:
    """Without checkpointing: the Trainer would replace Unsloth's own with its."""
    kwargs: dict[str, Any] = {}

    def make(**options: Any) -> TrainingArguments:
        for name, value in options.items():
            if name.removesuffix("_kwargs") not in ("gradient_checkpointing", "activation_checkpointing"):
                kwargs[name] = value
        return TrainingArguments(**kwargs)

    engine = engines.engine_arguments(plan, config, layer_class="", deepspeed=None)
    arguments: TrainingArguments = training_arguments(
        config, plan, folder, has_eval=has_eval, engine_options=engine, arguments_class=make
    )
    changes = []
    for name, value in kwargs.items():
        actual = getattr(arguments, name)
        actual = getattr(actual, "value", actual)  # of an enumeration
        if isinstance(value, (bool, int, float, str)) and value != actual:
            changes.append(f"{name}={one_line(str(value))} to {one_line(str(actual))}")
    if changes:
        raise BackendError(f"Unsloth would change what the run asks for on this machine: {', '.join(changes)}; set "
                           "these to Unsloth's values, or use tuning.backend=bnb")  # fmt: skip
    return arguments


def load_unsloth_model(handover: Handover, config: RunConfig, plan: Plan) -> Any:
    """Unsloth's model with the document's adapters; raises BackendError where they differ, or it cannot load."""
    from unsloth import FastLanguageModel

    model, lora = config.model, config.tuning.lora
    is_4bit = config.tuning.mode == "qlora"
    # "unsloth": its own, which offloads activations
    shared_options: dict[str, Any] = {
        "use_gradient_checkpointing": "unsloth" if plan.choice.checkpointed_layers > 0 else False,
        "max_seq_length": plan.max_seq_len, "random_state": config.train.seed,
    }  # fmt: skip
    try:
        loaded, _ = FastLanguageModel.from_pretrained(
            model_name=handover.model_path, revision=model.revision, trust_remote_code=model.trust_remote_code,
            use_exact_model_name=True,  # else it would train its own quantised copy from the hub
            dtype=getattr(torch, plan.precision.compute), load_in_4bit=is_4bit, load_in_8bit=False,
            full_finetuning=False, fix_tokenizer=False, **shared_options,
        )  # fmt: skip
        peft_model = FastLanguageModel.get_peft_model(
            loaded, r=lora.r, target_modules=handover.target_modules, lora_alpha=lora.alpha,
            lora_dropout=lora.dropout, bias="none", use_rslora=lora.use_rslora, **shared_options,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Unsloth checks models and options in many ways
        reason = f"{type(error).__name__}: {one_line(str(error), limit=300)}"
        raise BackendError(f"Unsloth cannot load {one_line(handover.model_path)}: {reason}") from error
    check_loaded_model(peft_model, handover.tensors, is_4bit=is_4bit)
    keep_4bit_trainable(peft_model)
    peft_model.config.use_cache = False
    return peft_model


def check_loaded_model(model: Any, expected_shapes: dict[str, list[int]], *, is_4bit: bool) -> None:
    """Raises BackendError where the model is not quantised as asked, or its adapters are not those of the run."""
    has_4bit = any(type(module).__name__ == "Linear4bit" for module in model.modules())
    if has_4bit != is_4bit:
        loaded, requested = ("4-bit" if flag else "unquantised" for flag in (has_4bit, is_4bit))
        raise BackendError(
            f"Unsloth loaded {loaded} weights, and the run asks for {requested} ones; nothing was trained"
        )
    shapes = {name: list(shape) for name, shape in saved_shapes(model).items()}
    differing = [name for name in {**expected_shapes, **shapes} if shapes.get(name) != expected_shapes.get(name)]
    if differing:
        name = differing[0]
        raise BackendError(f"Unsloth's adapters are not those of the run: {name} has shape {shapes.get(name)} instead "
                           f"of {expected_shapes.get(name)} ({len(differing)} differ); nothing was "
                           "trained")  # fmt: skip
