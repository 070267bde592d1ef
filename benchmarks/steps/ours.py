"""A run as `make train` runs it, measured; or the same steps as a bare PyTorch loop.

    python -m benchmarks.steps.ours ORDER.json

Plan, rows, model and trainer are those of `sft_play.launch.start`; only what is watched, and under `bare` the
loop, is put in the place of the run's own.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.steps.order import ProcessOrder
from sft_play.config.load import load_config
from sft_play.config.options import optimizer_options
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, SftPlayError
from sft_play.log import set_up_logging
from sft_play.process.environment import set_library_variables
from sft_play.process.signals import watch_parent

SECONDS = "time_{}_s"
"""The monitor's figure of a part of a step."""


def main(path: Path) -> int:
    set_library_variables()  # before torch is imported
    set_up_logging("bench", stream=sys.stderr)
    order = ProcessOrder.read(path)
    try:
        measure(order)
    except SftPlayError as error:
        sys.stderr.write(f"[bench] error: {error}\n")
        return error.exit_code
    return 0


def measure(order: ProcessOrder) -> None:
    """Start the run of an order; it ends after its last measured step, and its folder is left as it is."""
    from benchmarks.steps.recording import MeasurementDone
    from sft_play.launch.request import LaunchRequest
    from sft_play.launch.start import start_run
    from sft_play.training import run

    loaded = load_config(Path(order.config), overrides=order.overrides)
    # the run's own code up to its training loop: what is measured is what `make train` does
    measured = functools.partial(_train, order, run.train_stage)
    with mock.patch.object(run, "train_stage", measured), contextlib.suppress(MeasurementDone):
        start_run(LaunchRequest(loaded))


def _train(order: ProcessOrder, train: Callable[..., Any], job: Any, prepared: Any, watch: Any, **options: Any) -> Any:
    """The run's `train`, with a recorder at its trainer, and what a peer needs to know of the run written first."""
    from sft_play.training.loop.trainer import load_trainer

    if order.facts:
        write_facts(Path(order.facts), job, prepared)

    def loaded_and_watched(*args: Any, **more: Any) -> Any:
        trainer = load_trainer(*args, **more)
        watched(trainer, order, job)
        return trainer

    return train(job, prepared, watch, load_trainer=loaded_and_watched, **options)


def watched(trainer: Any, order: ProcessOrder, job: Any) -> None:
    """Put a recorder at a trainer; under `bare` its `train` becomes the bare loop."""
    from benchmarks.steps.recording import Recorder, record_trainer

    plan = job.plan
    settings = {"micro_batch": plan.batch.micro_batch, "grad_accum": plan.batch.grad_accum,
                "gradient_checkpointing": plan.choice.checkpointing, "packing": job.loaded.config.data.packing,
                "group_by_length": job.loaded.config.train.group_by_length}  # fmt: skip
    recorder = Recorder(
        Path(order.result), warmup=order.warmup, steps=order.steps,
        pad_id=int(trainer.processing_class.pad_token_id), facts={"side": order.side, "settings": settings},
    )  # fmt: skip
    if order.side == "bare":
        trainer.train = functools.partial(bare_loop, trainer, recorder, plan=plan)
        return
    record_trainer(trainer, recorder)
    recorder.on_window = PartsOf(trainer, steps=order.steps)


class PartsOf:
    """Seconds a step of each part that the run's monitor times, over the measured steps; logs between them count."""

    def __init__(self, trainer: Any, *, steps: int) -> None:
        self._monitor, self._device, self._steps = trainer._monitor, trainer.args.device, steps
        self._sums: dict[str, float] = {}

    def __call__(self, begins: bool) -> dict[str, Any] | None:
        """Start or end; at the end the parts."""
        from sft_play.training.measure.monitor import STEP_PARTS

        real = type(self._monitor).take_metrics
        figures = real(self._monitor, steps=1, device=self._device)
        if not begins:
            self._add(figures, 1)
            return {"parts_s": {name: self._sums[SECONDS.format(name)] / self._steps for name in STEP_PARTS}}
        self._sums = {SECONDS.format(name): 0.0 for name in STEP_PARTS}

        def take(*, steps: int, device: Any) -> dict[str, float]:
            logged: dict[str, float] = real(self._monitor, steps=steps, device=device)
            self._add(logged, max(1, steps))
            return logged

        self._monitor.take_metrics = take
        return None

    def _add(self, figures: dict[str, float], steps: int) -> None:
        for name in self._sums:
            self._sums[name] += figures[name] * steps


def bare_loop(trainer: Any, recorder: Any, *, plan: Any, **_: Any) -> None:
    """The same steps without a trainer: forward, the trainer's loss head, backward, clipping, AdamW, schedule.

    The batches are those that the trainer would take, collated and moved before anything is timed. No callback, log,
    metric or wait for the device is left between the steps. Raises ConfigError."""
    import torch

    from benchmarks.steps.recording import MeasurementDone
    from sft_play.training.loop.rows import COUNT_KEYS, SOURCE
    from sft_play.training.loop.trainer import checkpoint_first_layers

    args, model = trainer.args, trainer.model
    if trainer.grouped_adapters is not None:
        trainer.grouped_adapters.remove()
    for module in model.modules():  # PEFT's adapters as a plain loop has them
        vars(module).pop("cast_input_dtype_enabled", None)
    if args.fp16:
        raise ConfigError("PEER=bare has no loss scaling, and this run computes in fp16; use bf16, or another PEER")
    if plan.choice.checkpointed_layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if plan.choice.checkpointing == "selective":
            checkpoint_first_layers(model, plan.choice.checkpointed_layers)
    wanted = recorder.wanted_steps
    optimizer = trainer.create_optimizer()
    schedule = trainer.create_scheduler(args.max_steps, optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = list(_steps(trainer, wanted))  # all of them before the first: collating takes no time of a step
    model.train()
    compute = torch.autocast(args.device.type, torch.bfloat16) if args.bf16 else contextlib.nullcontext()
    with contextlib.suppress(MeasurementDone):
        for batches, trained in steps:
            for batch in batches:
                inputs = {name: value for name, value in batch.items() if name not in (*COUNT_KEYS, SOURCE)}
                with compute:
                    outputs = model(**inputs, use_cache=False, fused_lm_head=True)
                loss = -outputs.log_probs.sum() / trained
                loss.backward()
                recorder.saw(batch, loss)
            torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            recorder.ended_step()
    raise MeasurementDone


def _steps(trainer: Any, count: int) -> Any:
    """Micro-batches on the device and the trained tokens of each of `count` steps, epoch after epoch."""
    done, epoch, args = 0, 0, trainer.args
    while True:
        loader = trainer.get_train_dataloader()
        trainer.epoch_order.set_epoch(epoch)
        batches = iter(loader)
        while True:
            # the trainer's own division of the loss: by the trained tokens of the whole effective batch
            samples, trained = trainer.get_batch_samples(batches, args.gradient_accumulation_steps, args.device)
            if not samples:
                break
            yield [trainer._prepare_inputs(sample) for sample in samples if sample], trained
            done += 1
            if done == count:
                return
        epoch += 1


def training_facts(config: RunConfig) -> dict[str, Any]:
    return {option.external_names.trainer: option.value(config) for option in optimizer_options()}


def write_facts(folder: Path, job: Any, prepared: Any) -> None:
    """What a peer needs for the same run: `facts.json` and its token rows as a saved data set, `rows`.

    Columns: input_ids, labels, attention_mask (ones). No row's first token has a label.
    """
    from sft_play.training.model import attention_functions

    config, plan, spec = job.loaded.config, job.plan, prepared.model_spec
    rows = prepared.splits.train.rows.select_columns(["input_ids", "labels"])

    def completed(batch: dict[str, Any]) -> dict[str, Any]:
        # a causal model predicts no first token; other trainers count it among the trained ones where it has a label
        labels = [[-100, *row[1:]] for row in batch["labels"]]
        return {"labels": labels, "attention_mask": [[1] * len(row) for row in labels]}

    rows.map(completed, batched=True).save_to_disk(str(folder / "rows"))
    prepared.tokenizer.tokenizer.save_pretrained(str(folder / "tokenizer"))
    lora = spec.peft_config
    # peers do not have this toolkit's own attention
    attention = "sdpa" if spec.attention.name == attention_functions.VARLEN_ATTENTION else spec.attention.name
    facts = {
        "model": config.model.name, "revision": config.model.revision, "attention": attention,
        "trust_remote_code": config.model.trust_remote_code, "mode": config.tuning.mode,
        "load_dtype": plan.precision.load, "compute_dtype": plan.precision.compute, "on_cpu": not plan.hardware.gpus,
        "lora": None if lora is None else {
            "r": lora.r, "alpha": lora.lora_alpha, "dropout": lora.lora_dropout, "rslora": lora.use_rslora,
            "dora": lora.use_dora, "targets": sorted(lora.target_modules or ()),
            "saved": list(lora.modules_to_save or ()),
        },
        "micro_batch": plan.batch.micro_batch, "grad_accum": plan.batch.grad_accum,
        "effective_batch": plan.batch.effective_batch, "seq_len": plan.max_seq_len,
        "packing": config.data.packing != "none", "gradient_checkpointing": plan.choice.checkpointed_layers > 0,
        "trainer": training_facts(config),
        "max_steps": config.train.max_steps, "logging_steps": config.train.logging_steps,
        "pad_id": int(prepared.tokenizer.tokenizer.pad_token_id or 0), "plan": plan.as_json(),
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    watch_parent()
    raise SystemExit(main(Path(sys.argv[1])))
