"""The checkpoints of the training loop: whole or absent, and readable under one process, DDP and FSDP alike. What the
Trainer writes goes into a folder aside, is checked, and is renamed (`checkpoints`)."""

from __future__ import annotations

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
from sft_play.log import one_line
from sft_play.runs.files import flush, free_bytes, room
from sft_play.training.checkpoints import checkpoints, full_state_dict, sharded_checkpoints, universal
from sft_play.training.checkpoints.model_saving import embeddings_to_save
from sft_play.training.loop.finite import FiniteSteps, require_finite
from sft_play.training.measure.monitor import Monitor
from sft_play.training.prepare.device_checks import free_memory, is_out_of_memory
from sft_play.training.ranks import distributed, engines
from sft_play.training.ranks.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

# In a checkpoint: sums of losses, rows and tokens, so that what is logged after a resume is the unbroken run's.
LOGGING_STATE = "logging_state.json"


# How long a run that fails waits for a checkpoint that was begun.
_LAST_SAVE_S = 300.0


class RestoreSums(TrainerCallback):
    """Restores the sums that do not depend on the number of ranks, once the Trainer has set them to zero."""

    def __init__(self, trainer: Any, checkpoint: Path) -> None:
        self._trainer, self._path = trainer, checkpoint / LOGGING_STATE

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Read it from the checkpoint."""
        state = json.loads(self._path.read_text(encoding="utf-8"))
        self._trainer._tr_loss += state["loss_sum"]
        self._trainer._globalstep_last_logged = state["last_logged"]
        self._trainer._total_loss_scalar = state["total_loss"]
        self._trainer.finite.left_out = state["left_out"]
        self._trainer._monitor.continue_from(state["seen"])


def evaluations_without_a_better(checkpoint: Path) -> int:
    """How often early stopping had seen no better evaluation when the checkpoint was written, which the Trainer saves
    and restores only together with all other callbacks."""
    saved = json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["stateful_callbacks"]
    attributes = saved.get(EarlyStoppingCallback.__name__, {}).get("attributes", {})
    return int(attributes.get("early_stopping_patience_counter", 0))


class Writing:
    """A checkpoint that is written while training goes on, by a thread that also makes it whole and renames it: the
    thread of torch's `async_save` is one that an exit waits for, and the rest would wait for the next step."""

    def __init__(self, work: Callable[[], None], *, step: int, needed: int) -> None:
        """`step`, `needed`: of the checkpoint, and the bytes that it takes at least."""
        self.step, self.needed = step, needed
        self.awaited = False
        """Whether training waits for it, so that its bytes are the rank's progress."""
        self._work, self._began, self._took_s = work, time.monotonic(), 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="sft_play checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # torch's distributed checkpoint raises one that is no Exception
            self._error = error
        self._took_s = time.monotonic() - self._began

    def result(self) -> float:
        """Wait for its end; the seconds that it took. Raises what the thread did."""
        self.awaited = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._took_s

    def give_time(self, seconds: float) -> None:
        """Wait for its end, but no longer: where this rank fails, others may never write their parts."""
        self._thread.join(seconds)


class CheckpointedLoop(Trainer):
    """A Trainer whose checkpoints are whole or absent, and do not depend on the layout that wrote them."""

    def __init__(
        self,
        *,
        checkpoint_limit: int | None = None,
        in_parts: bool = False,
        async_save: bool = False,
        on_nan: Literal["stop", "skip"] = "stop",
        beat: Heartbeat | None = None,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> None:
        """`checkpoint_limit`: how many are kept, None for all; `in_parts`: every rank writes its own part (FSDP only);
        `async_save`: while training goes on; `on_nan`: what a step that is not finite does. The other options are the
        Trainer's."""
        self._checkpoint_limit = checkpoint_limit
        self.in_parts, self._async_save = in_parts, async_save
        self._part: sharded_checkpoints.CheckpointPart | None = None  # of the checkpoint that is about to be written
        self._writing: Writing | None = None
        self.finite = FiniteSteps(self, on_nan)
        self.beat = beat or Heartbeat(0.0)  # one that was never opened tells nobody
        self._monitor = monitor or Monitor()
        self.took_s = self._monitor.took_s
        self._staging: Path | None = None
        super().__init__(**options)

    # --- writing ------------------------------------------------------------------------------------------------------
    def _mean_loss_sum(self) -> float:
        """Sum of losses since the last log, the mean over ranks; all ranks call it."""
        return float(self.accelerator.gather(self._tr_loss.detach().reshape(1)).mean().item())

    def _get_output_dir(self, trial: Any) -> str:
        # `_save_checkpoint` asks here for the folder to write to. args.output_dir is not changed instead, since the
        # arguments are saved with each checkpoint
        return str(self._staging) if self._staging is not None else str(super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # overridden since callbacks hear of a checkpoint (on_save) only once it is written: too late to write it aside
        self.finish_saving()
        folder, step = Path(self.args.output_dir), self.state.global_step
        self.beat.note(step, "saving a checkpoint")
        require_finite(self)
        free, needed = distributed.of_first(free_bytes(folder)), engines.checkpoint_bytes(self)
        try:
            with self._room(step, needed, free=free):
                self._write_twice(model, trial, needed)
        finally:
            self._staging = None

    @contextlib.contextmanager
    def _room(self, step: int, needed: int, *, free: int | None = None) -> Iterator[None]:
        folder = Path(self.args.output_dir)
        try:
            with room(folder, needed, f"{checkpoints.resume_note(folder)}; that of step {step}", free=free):
                yield
        except SftPlayError:
            shutil.rmtree(checkpoints.staging_path(folder), ignore_errors=True)  # it would keep the disk full
            raise

    def finish_saving(self) -> None:
        """Wait until the checkpoint written beside the training is whole; all ranks. Raises RunFolderError: no room."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        self.beat.note(self.state.global_step, "waiting for a checkpoint")
        with self._room(writing.step, writing.needed), self.beat.waiting():
            took_s = writing.result()
            self.wait_for_disk()
        logger.info("Checkpoint of step %d: written beside the training in %.0f s", writing.step, took_s)
        self.took_s["checkpoint"].append(took_s)

    @contextlib.contextmanager
    def _saved_at_the_end(self) -> Iterator[None]:
        """After an error it waits only as long as the other ranks may take to write theirs."""
        try:
            yield
            self.finish_saving()
        finally:
            if self._writing is not None:
                self._writing.give_time(_LAST_SAVE_S)

    def _write_twice(self, model: Any, trial: Any, needed: int) -> None:
        """Write a checkpoint; where one process lacks memory for it, once more with what the caches held."""
        with self._monitor.part("checkpoint"):
            try:
                self._write_checkpoint(model, trial, needed)
                return
            except (RuntimeError, MemoryError) as error:
                if distributed.world_size() > 1 or not is_out_of_memory(error):
                    raise
                logger.warning("Checkpoint: out of memory; once more without caches: %s", one_line(str(error)))
            free_memory()
            self._write_checkpoint(model, trial, needed)

    def _write_checkpoint(self, model: Any, trial: Any, needed: int) -> None:
        folder, step = Path(self.args.output_dir), self.state.global_step
        loss_sum, seen = self._mean_loss_sum(), self._monitor.seen()
        if distributed.is_first():
            checkpoints.create_staging(folder)
        distributed.barrier()  # no rank may write before the folder was emptied
        self._staging = staging = checkpoints.staging_path(folder)
        with contextlib.nullcontext() if self.in_parts else self.writing(staging):
            super()._save_checkpoint(model, trial)
        self.wait_for_disk()  # every rank's files have to be there before the first one checks them
        if distributed.is_first_of_node() and not distributed.is_first():
            flush(staging)  # only the node that wrote a file can bring it to a disk that nodes share
        self.wait_for_disk()
        written = checkpoints.checkpoint_path(staging, step)
        if distributed.is_first():
            state = {
                "loss_sum": loss_sum, "last_logged": self._globalstep_last_logged,
                "total_loss": self._total_loss_scalar, "left_out": self.finite.left_out, "seen": seen,
            }  # fmt: skip
            (written / LOGGING_STATE).write_text(json.dumps(state), encoding="utf-8")
            if self.state.best_global_step:  # the Trainer looked for the best one in the staging folder
                best = checkpoints.checkpoint_path(folder, self.state.best_global_step)
                is_kept = best.exists() or self.state.best_global_step == step
                self.state.best_model_checkpoint = str(best) if is_kept else None
                self.state.save_to_json(str(written / "trainer_state.json"))
        best = self.state.best_model_checkpoint
        put = functools.partial(self._put, written, folder, Path(best) if best else None)
        part, self._part = self._part, None
        if part is not None:
            group = distributed.patient(of="the thread that saves")
            self._writing = Writing(lambda: self._write_beside(part, put, written, group), step=step, needed=needed)
            return
        if distributed.is_first():
            put(moved=self.beat.moved)
        self.wait_for_disk()

    def _put(self, written: Path, folder: Path, best: Path | None, *, moved: Callable[[int], None]) -> None:
        checkpoints.commit_checkpoint(written, folder, required_files=self._needed_files(), on_bytes=moved)
        checkpoints.rotate_checkpoints(folder, limit=self._checkpoint_limit, best_checkpoint=best)

    def _write_beside(
        self, part: sharded_checkpoints.CheckpointPart, put: Callable[..., None], written: Path, group: Any
    ) -> None:
        """On the thread; its bytes are this rank's progress only where training waits."""

        def moved(count: int) -> None:
            if self._writing is None or self._writing.awaited:
                self.beat.moved(count)

        sharded_checkpoints.save_part(part, written, group=group, on_bytes=moved)
        if distributed.is_first():  # all parts are on the disk
            put(moved=moved)

    def _needed_files(self) -> tuple[str, ...]:
        if self.is_deepspeed_enabled:
            return ("trainer_state.json", "latest")
        if self.in_parts:
            return ("trainer_state.json", "scheduler.pt", sharded_checkpoints.CONTENTS_FILE, sharded_checkpoints.GROUPS_FILE)
        return checkpoints.RESUME_FILES

    @contextlib.contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """While open, the heartbeat watches the files of `folder` grow; other ranks than the first wait. Parts are
        counted by their own writer, so that a rank that hangs is noticed although the others write."""
        with self.beat.watching(folder), contextlib.ExitStack() as waiting:
            if not distributed.is_first():
                waiting.enter_context(self.beat.waiting())
            yield

    def wait_for_disk(self) -> None:
        """Wait for all ranks, as long as bytes move on any of them; one process waits for nothing."""
        with self.beat.waiting():
            distributed.barrier(distributed.patient())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights; over ranks an adapter without its base, weights in parts with the optimizer's states."""
        with self._named_as_in_memory():
            if self.in_parts and self._staging is not None:
                self._save(output_dir, state_dict={})  # config and tokenizer only
            elif is_peft_model(self.model) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
                self._save(output_dir, state_dict=full_state_dict.gather_state_dict(self))
            else:
                super().save_model(output_dir, _internal_call)
        self.wait_for_disk()

    @contextlib.contextmanager
    def _named_as_in_memory(self) -> Iterator[None]:
        """Weights are written under their names in memory: the Trainer resumes by plain `load_state_dict`, which
        silently skips others, and the hub's differ for some classes. PEFT would write whole embeddings wherever they
        were resized."""
        if self._staging is None:
            yield
            return
        options: dict[str, Any] = {"save_original_format": False}
        if is_peft_model(self.model):
            options = {"save_embedding_layers": embeddings_to_save(self.model)}
        self.model.save_pretrained = functools.partial(self.model.save_pretrained, **options)
        try:
            yield
        finally:
            del self.model.save_pretrained

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # the Trainer's own for FSDP writes the model once more, and states by name that only FSDP reads back
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        path = Path(output_dir)
        if self.in_parts:
            self._save_parts(path)
        else:
            states = full_state_dict.full_optimizer_states(self.model, self.optimizer.optimizer)
            if distributed.is_first():
                torch.save(states, path / "optimizer.pt")
        if distributed.is_first():
            torch.save(self.lr_scheduler.state_dict(), path / "scheduler.pt")
        self.wait_for_disk()

    def _save_parts(self, path: Path) -> None:
        step, started = self.state.global_step, time.monotonic()
        with contextlib.ExitStack() as waiting:

            def done() -> None:
                self.beat.note(step, "waiting for the parts of a checkpoint")
                waiting.enter_context(self.beat.waiting())

            self.beat.note(step, "writing its part of a checkpoint")
            part = sharded_checkpoints.collect_part(self.model, self.optimizer.optimizer)
            if self._async_save:
                self._part = part.copy_to_host()
                return
            sharded_checkpoints.save_part(part, path, group=distributed.patient(), on_bytes=self.beat.moved, on_done=done)
        parts, seconds = distributed.world_size(), time.monotonic() - started
        logger.info("Checkpoint of step %d: %d parts in %.0f s", step, parts, seconds)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the random states of all ranks where the first rank writes: other nodes may have another disk."""
        if self.args.world_size <= 1:
            super()._save_rng_state(output_dir)
            return
        with tempfile.TemporaryDirectory() as aside:
            super()._save_rng_state(aside)  # rng_state_RANK.pth
            own_files = {item.name: item.read_bytes() for item in Path(aside).iterdir()}
        of_ranks = distributed.of_all(own_files)
        for files in of_ranks if distributed.is_first() else ():
            for name, content in files.items():
                (Path(output_dir) / name).write_bytes(content)

    # --- reading ------------------------------------------------------------------------------------------------------
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # what `_save_optimizer_and_scheduler` wrote, under any layout: the Trainer reads only its own layout's form
        path = Path(checkpoint) if checkpoint is not None else None
        if path is not None and sharded_checkpoints.is_sharded(path):
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # inside accelerate's wrapper
            group = distributed.patient()
            sharded_checkpoints.load_sharded_optimizer(self.model, optimizer, path, group=group, on_bytes=self.beat.moved)
        elif path is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            if path is not None and self.is_deepspeed_enabled:
                universal.finish_loading(self, path)
            return
        else:
            states = torch.load(path / "optimizer.pt", weights_only=True) if distributed.is_first() else None
            full_state_dict.load_optimizer_states(self.model, self.optimizer.optimizer, states)
        self.lr_scheduler.load_state_dict(torch.load(path / "scheduler.pt", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # the Trainer knows neither parts (.distcp) nor whole safetensors for a model that FSDP has divided already; an
        # adapter it reads with PEFT, which renames tensors as those of the base's published files and loses some; and a
        # config.json as one of any class, which refuses words of some classes (DeepSeek-V4's kinds of layers)
        path = Path(resume_from_checkpoint)
        if sharded_checkpoints.is_sharded(path):
            sharded_checkpoints.load_sharded_weights(self.model, path, group=distributed.patient(), on_bytes=self.beat.moved)
        elif not self.is_fsdp_enabled and full_state_dict.has_adapter(self.model):
            full_state_dict.load_adapter_weights(self.model, path)
        elif not self.is_fsdp_enabled:
            full_state_dict.load_full_weights(self.model, path)
        else:
            weights = full_state_dict.read_checkpoint_weights(path, self.model) if distributed.is_first() else {}
            full_state_dict.load_fsdp_weights(self.model, weights)

    def _load_best_model(self) -> None:
        # at the end of training, with load_best_model_at_end; it reads files by itself, not by `_load_from_checkpoint`
        self.finish_saving()
        best = distributed.of_first(self.state.best_model_checkpoint)  # the others know where it was written aside
        found = checkpoints.find_damage(Path(best), on_bytes=self.beat.moved) if distributed.is_first() else None
        self.wait_for_disk()
        found = distributed.of_first(found)
        if found is not None:
            logger.warning("The best checkpoint cannot be loaded, so the last weights are kept: %s: %s", best, found)
            return
        if self.is_fsdp_enabled or sharded_checkpoints.is_sharded(Path(best)) or full_state_dict.has_adapter(self.model):
            self._load_from_checkpoint(best)
            return
        with universal.readable_checkpoint(self, Path(best)) as path:  # it may have been written over other ranks
            self.state.best_model_checkpoint = str(path)
            super()._load_best_model()
            universal.finish_loading(self, path)
        self.state.best_model_checkpoint = best

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        full_state_dict.require_same_names(self.model, load_result.missing_keys, load_result.unexpected_keys)
