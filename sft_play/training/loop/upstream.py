"""Which private names of transformers' and TRL's trainers the training loop builds on, why, and a guard for each.

Every other override is of a public method. A private one may change with any release, so each is listed here with its
reason, its parameters, and the library's methods that have to use it for the override to have any effect. A library
that has changed is named in one error before training, instead of training or saving wrongly.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from sft_play.errors import BackendError


@dataclass(frozen=True)
class Private:
    """A private name of a library's trainer.

    `parameters`: of a method, in their order; None for an attribute. `used_by`: methods of `transformers.Trainer` (of
    `owner`, where it is another class) that use it.
    """

    name: str
    reason: str
    parameters: tuple[str, ...] | None
    used_by: tuple[str, ...]
    owner: str = "Trainer"


OVERRIDDEN = (
    Private(
        "_get_output_dir",
        "checkpoints are written aside and renamed; the arguments that are saved with them keep the real folder",
        ("self", "trial"),
        ("_save_checkpoint",),
    ),
    Private(
        "_save_checkpoint",
        "a checkpoint is whole or absent: written aside, checked, renamed; no callback comes before the writing",
        ("self", "model", "trial"),
        ("_maybe_log_save_evaluate",),
    ),
    Private(
        "_save_optimizer_and_scheduler",
        "under FSDP the states are written whole, or every rank's part, so that other layouts read them",
        ("self", "output_dir"),
        ("_save_checkpoint",),
    ),
    Private(
        "_load_optimizer_and_scheduler",
        "what was written so is read back under another layout or number of ranks",
        ("self", "checkpoint"),
        ("_prepare_for_training",),
    ),
    Private(
        "_load_from_checkpoint",
        "weights in parts, and whole ones into an FSDP model",
        ("self", "resume_from_checkpoint", "model"),
        ("_prepare_for_training",),
    ),
    Private(
        "_load_best_model",
        "the same at the end of a run with load_best_model_at_end",
        ("self",),
        ("_finalize_training",),
    ),
    Private(
        "_get_grad_norm",
        "a step whose gradients are not finite changes nothing: only here is the norm known before the update",
        ("self", "model", "grad_norm"),
        ("_run_epoch",),
    ),
    Private(
        "_save_rng_state",
        "random states of all ranks are written by the first: other nodes may have another disk",
        ("self", "output_dir"),
        ("_save_checkpoint",),
    ),
    Private(
        "_issue_warnings_after_load",
        "a checkpoint that does not match the model is an error here, not a warning",
        ("self", "load_result"),
        ("_load_from_checkpoint", "_load_best_model"),
    ),
)
"""Private methods that `PlannedLoop` overrides, or `CheckpointedLoop`, which it builds on."""

USED = (
    Private(
        "_save",
        "an adapter that was gathered from all ranks is written as the Trainer writes one",
        ("self", "output_dir", "state_dict"),
        ("save_model",),
    ),
    Private(
        "_tr_loss",
        "a resumed run logs the unbroken run's mean: the sum of losses since the last log is kept in checkpoints",
        None,
        ("_inner_training_loop", "_finalize_training"),
    ),
    Private(
        "_total_loss_scalar",
        "the mean loss of all steps: its last part is one rank's own, and is put right",
        None,
        ("_finalize_training",),
    ),
    Private(
        "_globalstep_last_logged",
        "the step that this sum begins at",
        None,
        ("_inner_training_loop", "_maybe_log_save_evaluate"),
    ),
    *(
        Private(name, f"the loss is computed here as TRL computes it: {reason}", None, ("compute_loss",), "SFTTrainer")
        for name, reason in {
            "log_probs": "from its head's log-probabilities of trained tokens",
            "label_mask": "over the tokens that its head scores",
            "average_tokens_across_devices": "scaled up for DDP's mean over ranks",
            "aux_loss": "with the balancing loss of routers",
            "aux_loss_enabled": "where the config of a mixture of experts has one",
            "router_aux_loss_coef": "weighted by the config's coefficient",
            "current_gradient_accumulation_steps": "as a mean over the passes of a step",
            "entropy": "with the figures that are logged beside it",
            "is_top1": "with the figures that are logged beside it",
        }.items()
    ),
)
"""Names that they call or read: private ones, and those of TRL's loss."""


def require_known(upstream: type, *, names: Sequence[Private] = (*OVERRIDDEN, *USED)) -> None:
    """Check that the installed libraries still have every name as it is listed here.

    Args:
        upstream: the library's class that the loop refines: `Trainer`, or TRL's `SFTTrainer`.

    Raises:
        BackendError: naming the library, its version, and what changed.
    """
    for private in names:
        problem = next(_problems(upstream, private), None)
        if problem is not None:
            module = str(getattr(getattr(upstream, private.name, None), "__module__", ""))
            library = "trl" if private.owner == "SFTTrainer" or module.startswith("trl.") else "transformers"
            raise BackendError(
                f"this training loop does not support {library} {importlib.metadata.version(library)}: {problem}; "
                f"it is needed for this: {private.reason}. Install the version of requirements.lock (make setup)"
            )


def _problems(upstream: type, private: Private) -> Iterator[str]:
    holder = upstream if private.owner == upstream.__name__ else Trainer
    if private.owner not in [base.__name__ for base in upstream.__mro__]:
        return  # a loop that is not TRL's
    if private.parameters is not None:
        method = getattr(upstream, private.name, None)
        if method is None:
            yield f"{upstream.__name__}.{private.name} is gone"
            return
        parameters = tuple(inspect.signature(method).parameters)
        if _is_theirs(method) and parameters != private.parameters:
            takes, needed = ", ".join(parameters), ", ".join(private.parameters)
            yield f"{upstream.__name__}.{private.name} takes ({takes}) instead of ({needed})"
    for user in private.used_by:
        method = getattr(holder, user, None)
        # `co_names` has the attributes that a function's own code reads or calls, not those of functions inside it
        code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
        if method is None or (_is_theirs(method) and private.name not in getattr(code, "co_names", ())):
            yield f"{holder.__name__}.{user} no longer uses {private.name}"


def _is_theirs(method: Any) -> bool:
    """Whether a method is the library's own: Unsloth replaces some, and what those use is not checked."""
    return str(getattr(method, "__module__", "")).startswith(("transformers.", "trl."))
