"""Which private names of transformers' and TRL's trainers the training loop builds on, and a guard for each: its
parameters, and the library's methods that have to use it. A library that has changed is named before training."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import Trainer

from sft_play.errors import BackendError


class Private(NamedTuple):
    """A private name of a library's trainer. `used_by`: methods of `transformers.Trainer` (of `owner`, where it is
    another class) that use it; `parameters`: of a method, in their order; None for an attribute."""

    name: str
    used_by: tuple[str, ...]
    parameters: tuple[str, ...] | None = None
    owner: str = "Trainer"


OVERRIDDEN = (
    Private("_get_output_dir", ("_save_checkpoint",), ("self", "trial")),
    Private("_save_checkpoint", ("_maybe_log_save_evaluate",), ("self", "model", "trial")),
    Private("_save_optimizer_and_scheduler", ("_save_checkpoint",), ("self", "output_dir")),
    Private("_load_optimizer_and_scheduler", ("_prepare_for_training",), ("self", "checkpoint")),
    Private("_load_from_checkpoint", ("_prepare_for_training",), ("self", "resume_from_checkpoint", "model")),
    Private("_load_best_model", ("_finalize_training",), ("self",)),
    Private("_run_epoch", ("_inner_training_loop",)),
    Private("_get_grad_norm", ("_run_epoch",), ("self", "model", "grad_norm")),
    Private("_save_rng_state", ("_save_checkpoint",), ("self", "output_dir")),
    Private("_issue_warnings_after_load", ("_load_from_checkpoint", "_load_best_model"), ("self", "load_result")),
)
"""Private methods that `PlannedLoop` overrides, or `CheckpointedLoop`, which it builds on."""

USED = (
    Private("_save", ("save_model",), ("self", "output_dir", "state_dict")),
    Private("_tr_loss", ("_inner_training_loop", "_finalize_training")),
    Private("_total_loss_scalar", ("_finalize_training",)),
    Private("_globalstep_last_logged", ("_inner_training_loop", "_maybe_log_save_evaluate")),
    *(
        Private(name, ("compute_loss",), owner="SFTTrainer")
        for name in (
            *("log_probs", "label_mask", "average_tokens_across_devices", "aux_loss", "aux_loss_enabled"),
            *("router_aux_loss_coef", "current_gradient_accumulation_steps", "entropy", "is_top1"),
        )
    ),
)
"""Names that they call or read: private ones, and those of TRL's loss."""


def require_known(upstream: type, *, names: Sequence[Private] = (*OVERRIDDEN, *USED)) -> None:
    """Check that the installed libraries still have every name as it is listed here, in `upstream`: `Trainer`, or TRL's
    `SFTTrainer`. Raises BackendError: naming the library, its version, and what changed."""
    for private in names:
        problem = next(_problems(upstream, private), None)
        if problem is not None:
            module = str(getattr(getattr(upstream, private.name, None), "__module__", ""))
            library = "trl" if private.owner == "SFTTrainer" or module.startswith("trl.") else "transformers"
            raise BackendError(
                f"this training loop does not support {library} {importlib.metadata.version(library)}: {problem}; "
                "install the version of requirements.lock (make setup)"
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
