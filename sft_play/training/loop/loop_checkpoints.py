"""The checkpoints of the training loop: whole or absent, and readable under one process, DDP and
FSDP alike. What the Trainer writes goes into a folder aside, is checked, and is renamed
(`checkpoints`)."""

import contextlib
import functools
import json
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from sft_play.errors import SftPlayError
from sft_play.runs.folder import free_disk_bytes, require_disk_space, sync_folder
from sft_play.training import distributed, engines
from sft_play.training.checkpoints import (
    checkpoints,
    full_state_dict,
    last_checkpoint,
    sharded_checkpoints,
)
from sft_play.training.checkpoints.model_saving import embeddings_to_save
from sft_play.training.heartbeat import Heartbeat
from sft_play.training.loop.callbacks import NonFiniteStepGuard, require_finite
from sft_play.training.measure.monitor import Monitor

logger = logging.getLogger(__name__)

# In a checkpoint: sums of losses, rows and tokens, so that what is logged after a resume is the
# unbroken run's.
LOGGING_STATE = "logging_state.json"


# How long a run that fails waits for a checkpoint that was begun: other ranks may never write their
# parts.
FINAL_SAVE_TIMEOUT_S = 300.0


class RestoredCounters(TrainerCallback):
    """Restores what a checkpoint counts and the Trainer does not read from it: early stopping's
    counter now, and at the start of training the sums, once the Trainer has set them to zero; they
    do not depend on the number of ranks."""

    def __init__(
        self, trainer: Any, early_stopping: EarlyStoppingCallback | None, checkpoint: Path
    ) -> None:
        self._trainer, self._path = trainer, checkpoint / LOGGING_STATE
        if early_stopping is not None:
            # the Trainer saves it, and restores it only together with all other callbacks
            state = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            saved = (
                state["stateful_callbacks"]
                .get(EarlyStoppingCallback.__name__, {})
                .get("attributes", {})
            )
            early_stopping.early_stopping_patience_counter = int(
                saved.get("early_stopping_patience_counter", 0)
            )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Read the sums from the checkpoint."""
        state = json.loads(self._path.read_text(encoding="utf-8"))
        self._trainer._tr_loss += state["loss_sum"]
        self._trainer._globalstep_last_logged = state["last_logged"]
        self._trainer._total_loss_scalar = state["total_loss"]
        self._trainer.non_finite_guard.steps_without_loss = state["left_out"]
        monitor = self._trainer._monitor
        monitor.samples_seen, monitor.tokens_seen = (
            state["seen"]["samples"],
            state["seen"]["tokens"],
        )
        monitor.tokens_before_start = monitor.tokens_seen


class CheckpointWriter:
    """A checkpoint that is written while training goes on, by a thread that also makes it whole and
    renames it: the thread of torch's `async_save` is one that an exit waits for, and the rest would
    wait for the next step. `step`, `needed_bytes`: of the checkpoint, and the bytes that it takes
    at least."""

    def __init__(self, write: Callable[[], None], *, step: int, needed_bytes: int) -> None:
        self.step, self.needed_bytes = step, needed_bytes
        self._write, self._start_time, self._duration_s = write, time.monotonic(), 0.0
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name="sft_play checkpoint")
        self.thread.start()

    def _run(self) -> None:
        try:
            self._write()
        # torch's distributed checkpoint raises one that is no Exception
        except BaseException as error:
            self._error = error
        self._duration_s = time.monotonic() - self._start_time

    def wait(self) -> float:
        """Wait for its end; the seconds that it took. Raises what the thread did."""
        self.thread.join()
        if self._error is not None:
            raise self._error
        return self._duration_s


class CheckpointedLoop(Trainer):
    """A Trainer whose checkpoints are whole or absent, and do not depend on the layout that wrote
    them. `checkpoint_limit`: how many are kept, None for all; `saves_shards`: every rank writes its
    own part (FSDP only); `async_save`: while training goes on; `on_nan`: what a step that is not
    finite does. The other options are the Trainer's."""

    def __init__(
        self,
        *,
        checkpoint_limit: int | None = None,
        saves_shards: bool = False,
        async_save: bool = False,
        on_nan: Literal["stop", "skip"] = "stop",
        heartbeat: Heartbeat | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> None:
        self._checkpoint_limit = checkpoint_limit
        self.saves_shards, self._saves_async = saves_shards, async_save
        # Of the checkpoint that is about to be written.
        self._shard: sharded_checkpoints.CheckpointShard | None = None
        self._checkpoint_writer: CheckpointWriter | None = None
        self.non_finite_guard = NonFiniteStepGuard(self, on_nan)
        self.heartbeat = heartbeat or Heartbeat(0.0)  # one that was never opened tells nobody
        self._monitor = monitor or Monitor()
        self.pause_seconds = self._monitor.pause_seconds
        self._staging: Path | None = None
        super().__init__(**options)

    # --- writing ----------------------------------------------------------------------------------
    def _mean_loss_sum(self) -> float:
        # of losses since the last log, the mean over ranks; all ranks call it
        return float(self.accelerator.gather(self._tr_loss.detach().reshape(1)).mean().item())

    def _get_output_dir(self, trial: Any) -> str:
        # `_save_checkpoint` asks here for the folder to write to. args.output_dir is not changed
        # instead, since the arguments are saved with each checkpoint
        return str(self._staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # overridden since callbacks hear of a checkpoint (on_save) only once it is written: too
        # late to write it aside
        self.finish_saving()
        folder, step = Path(self.args.output_dir), self.state.global_step
        self.heartbeat.note(step, "saving a checkpoint")
        require_finite(self)
        free_space = distributed.broadcast_value(free_disk_bytes(folder))
        needed_bytes = engines.checkpoint_bytes(self)
        self.heartbeat.note(step, "saving a checkpoint", saved_bytes=needed_bytes)
        try:
            with (
                self._require_room(step, needed_bytes, free_space=free_space),
                self._monitor.timed_part("checkpoint"),
            ):
                self._write_checkpoint(model, trial, needed_bytes)
        finally:
            self._staging = None

    @contextlib.contextmanager
    def _require_room(
        self, step: int, needed_bytes: int, *, free_space: int | None = None
    ) -> Iterator[None]:
        folder = Path(self.args.output_dir)
        try:
            with require_disk_space(
                folder,
                needed_bytes,
                f"{checkpoints.resume_note(folder)}; that of step {step}",
                available_bytes=free_space,
            ):
                yield
        except SftPlayError:
            # it would keep the disk full
            shutil.rmtree(checkpoints.staging_path(folder), ignore_errors=True)
            raise

    def abandon_saving(self) -> None:
        """Wait for a checkpoint that is still written when the training has failed, but not for
        ever; nothing where it is whole."""
        if self._checkpoint_writer is not None:
            self._checkpoint_writer.thread.join(FINAL_SAVE_TIMEOUT_S)

    def finish_saving(self) -> None:
        """Wait until the checkpoint written beside the training is whole; all ranks. Raises
        RunFolderError: no room."""
        writer, self._checkpoint_writer = self._checkpoint_writer, None
        if writer is None:
            return
        self.heartbeat.note(
            self.state.global_step, "waiting for a checkpoint", saved_bytes=writer.needed_bytes
        )
        with self._require_room(writer.step, writer.needed_bytes):
            duration_s = writer.wait()
            self.wait_for_disk()
        logger.info(
            "Checkpoint of step %d: written beside the training in %.0f s", writer.step, duration_s
        )
        self.pause_seconds["checkpoint"].append(duration_s)

    def _write_checkpoint(self, model: Any, trial: Any, needed_bytes: int) -> None:
        folder, step = Path(self.args.output_dir), self.state.global_step
        loss_sum, seen_counts = self._mean_loss_sum(), self._monitor.seen_counts()
        if distributed.is_first():
            checkpoints.create_staging(folder)
        distributed.barrier()  # no rank may write before the folder was emptied
        self._staging = staging = checkpoints.staging_path(folder)
        super()._save_checkpoint(model, trial)
        self.wait_for_disk()  # every rank's files have to be there before the first one checks them
        if distributed.is_first_of_node() and not distributed.is_first():
            # only the node that wrote a file can bring it to a disk that nodes share
            sync_folder(staging)
        self.wait_for_disk()
        checkpoint_path = checkpoints.checkpoint_path(staging, step)
        if distributed.is_first():
            state = {
                "loss_sum": loss_sum,
                "last_logged": self._globalstep_last_logged,
                "total_loss": self._total_loss_scalar,
                "left_out": self.non_finite_guard.steps_without_loss,
                "seen": seen_counts,
            }
            (checkpoint_path / LOGGING_STATE).write_text(json.dumps(state), encoding="utf-8")
            # the Trainer looked for the best one in the staging folder
            if self.state.best_global_step:
                best = checkpoints.checkpoint_path(folder, self.state.best_global_step)
                is_kept = best.exists() or self.state.best_global_step == step
                self.state.best_model_checkpoint = str(best) if is_kept else None
                self.state.save_to_json(str(checkpoint_path / "trainer_state.json"))
        best_path = (
            Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        )
        required_files: tuple[str, ...] = checkpoints.RESUME_FILES
        if self.is_deepspeed_enabled:
            required_files = ("trainer_state.json", "latest")
        elif self.saves_shards:
            required_files = (
                *("trainer_state.json", "scheduler.pt", sharded_checkpoints.CONTENTS_FILE),
                sharded_checkpoints.GROUPS_FILE,
            )

        def commit() -> None:
            if distributed.is_first():
                checkpoints.commit_checkpoint(
                    checkpoint_path, folder, required_files=required_files
                )
                checkpoints.rotate_checkpoints(
                    folder, limit=self._checkpoint_limit, best_checkpoint=best_path
                )

        shard, self._shard = self._shard, None
        if shard is None:
            commit()
            self.wait_for_disk()
            return
        group = distributed.long_timeout_group(purpose="the thread that saves")

        def write() -> None:
            sharded_checkpoints.save_shard(shard, checkpoint_path, group=group)
            commit()  # all parts are on the disk

        self._checkpoint_writer = CheckpointWriter(write, step=step, needed_bytes=needed_bytes)

    def wait_for_disk(self) -> None:
        """Wait for all ranks, as long as their disks take; one process waits for nothing."""
        self.heartbeat.note_wait()
        distributed.barrier(distributed.long_timeout_group())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights; over ranks an adapter without its base, weights in parts with the
        optimizer's states."""
        if self._staging is not None:
            # under their names in memory: the Trainer resumes by plain `load_state_dict`, which
            # silently skips others, and the hub's differ for some classes. PEFT would write whole
            # embeddings wherever they were resized
            options: dict[str, Any] = {"save_original_format": False}
            if is_peft_model(self.model):
                options = {"save_embedding_layers": embeddings_to_save(self.model)}
            self.model.save_pretrained = functools.partial(self.model.save_pretrained, **options)
        try:
            if self.saves_shards and self._staging is not None:
                self._save(output_dir, state_dict={})  # config and tokenizer only
            elif is_peft_model(self.model) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
                self._save(output_dir, state_dict=full_state_dict.gather_state_dict(self))
            else:
                super().save_model(output_dir, _internal_call)
        finally:
            if self._staging is not None:
                del self.model.save_pretrained
        self.wait_for_disk()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # the Trainer's own for FSDP writes the model once more, and states by name that only FSDP
        # reads back
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        path = Path(output_dir)
        if self.saves_shards:
            saved_bytes, start_time = engines.checkpoint_bytes(self), time.monotonic()
            step, note = self.state.global_step, self.heartbeat.note
            note(step, "writing its part of a checkpoint", saved_bytes=saved_bytes)
            shard = sharded_checkpoints.collect_shard(self.model, self.optimizer.optimizer)
            if self._saves_async:
                self._shard = shard.copy_to_host()
            else:
                on_done = functools.partial(
                    note, step, "waiting for the parts of a checkpoint", saved_bytes=saved_bytes
                )
                sharded_checkpoints.save_shard(
                    shard, path, group=distributed.long_timeout_group(), on_done=on_done
                )
                shard_count, seconds = distributed.world_size(), time.monotonic() - start_time
                logger.info("Checkpoint of step %d: %d parts in %.0f s", step, shard_count, seconds)
        else:
            states = full_state_dict.full_optimizer_states(self.model, self.optimizer.optimizer)
            if distributed.is_first():
                torch.save(states, path / "optimizer.pt")
        if distributed.is_first():
            torch.save(self.lr_scheduler.state_dict(), path / "scheduler.pt")
        self.wait_for_disk()

    def _save_rng_state(self, output_dir: str) -> None:
        # all ranks' states are written where the first rank writes: other nodes may have another
        # disk
        if self.args.world_size <= 1:
            super()._save_rng_state(output_dir)
            return
        with tempfile.TemporaryDirectory() as temporary_folder:
            super()._save_rng_state(temporary_folder)  # rng_state_RANK.pth
            own_files = {item.name: item.read_bytes() for item in Path(temporary_folder).iterdir()}
        files_by_rank = distributed.gather_values(own_files)
        for files in files_by_rank if distributed.is_first() else ():
            for name, content in files.items():
                (Path(output_dir) / name).write_bytes(content)

    # --- reading ----------------------------------------------------------------------------------
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # what `_save_optimizer_and_scheduler` wrote, under any layout: the Trainer reads only its
        # own layout's form
        path = Path(checkpoint) if checkpoint is not None else None
        if path is not None and sharded_checkpoints.is_sharded(path):
            # inside accelerate's wrapper
            sharded_checkpoints.load_sharded_optimizer(
                self.model,
                getattr(self.optimizer, "optimizer", self.optimizer),
                path,
                group=distributed.long_timeout_group(),
            )
        elif path is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            if path is not None and self.is_deepspeed_enabled:
                last_checkpoint.finish_loading(self, path)
            return
        else:
            states = (
                torch.load(path / "optimizer.pt", weights_only=True)
                if distributed.is_first()
                else None
            )
            full_state_dict.load_optimizer_states(self.model, self.optimizer.optimizer, states)
        self.lr_scheduler.load_state_dict(torch.load(path / "scheduler.pt", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # the Trainer knows neither parts (.distcp) nor whole safetensors for a model that FSDP has
        # divided already; an adapter it reads with PEFT, which renames tensors as those of the
        # base's published files and loses some; and a config.json as one of any class, which
        # refuses words of some classes (DeepSeek-V4's kinds of layers)
        path = Path(resume_from_checkpoint)
        if sharded_checkpoints.is_sharded(path):
            sharded_checkpoints.load_sharded_weights(
                self.model, path, group=distributed.long_timeout_group()
            )
        elif not self.is_fsdp_enabled and full_state_dict.has_adapter(self.model):
            full_state_dict.load_adapter_weights(self.model, path)
        elif not self.is_fsdp_enabled:
            full_state_dict.load_full_weights(self.model, path)
        else:
            weights = (
                full_state_dict.read_checkpoint_weights(path, self.model)
                if distributed.is_first()
                else {}
            )
            full_state_dict.load_fsdp_weights(self.model, weights)

    def _load_best_model(self) -> None:
        # at the end of training, with load_best_model_at_end; it reads files by itself, not by
        # `_load_from_checkpoint`
        self.finish_saving()
        self.heartbeat.stop_clock()
        # the others know where it was written aside
        best = distributed.broadcast_value(self.state.best_model_checkpoint)
        damage = checkpoints.find_damage(Path(best)) if distributed.is_first() else None
        self.wait_for_disk()
        damage = distributed.broadcast_value(damage)
        if damage is not None:
            logger.warning(
                "The best checkpoint cannot be loaded, so the last weights are kept: %s: %s",
                best,
                damage,
            )
            return
        if (
            self.is_fsdp_enabled
            or sharded_checkpoints.is_sharded(Path(best))
            or full_state_dict.has_adapter(self.model)
        ):
            self._load_from_checkpoint(best)
            return
        # it may have been written over other ranks
        with last_checkpoint.readable_checkpoint(self, Path(best)) as path:
            self.state.best_model_checkpoint = str(path)
            super()._load_best_model()
            last_checkpoint.finish_loading(self, path)
        self.state.best_model_checkpoint = best

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        full_state_dict.require_same_names(
            self.model, load_result.missing_keys, load_result.unexpected_keys
        )
