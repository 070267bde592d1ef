"""Lists the private names of transformers, TRL and accelerate that the training loop uses, and
checks that the libraries' own methods still use each: otherwise overriding or setting it would have
no effect."""

import importlib.metadata
import inspect
from collections.abc import Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer

from sft_play.errors import BackendError

# Private names, each with the methods of the library that use it.
MethodsByName = Mapping[str, tuple[str, ...]]
# Private methods that `PlannedLoop` overrides, or the loops that it builds on.
OVERRIDDEN_METHODS: MethodsByName = {
    "_get_output_dir": ("_save_checkpoint",),
    "_save_checkpoint": ("_maybe_log_save_evaluate",),
    "_save_optimizer_and_scheduler": ("_save_checkpoint",),
    "_load_optimizer_and_scheduler": ("_prepare_for_training",),
    "_load_from_checkpoint": ("_prepare_for_training",),
    "_load_best_model": ("_finalize_training",),
    "_run_epoch": ("_inner_training_loop",),
    "_clip_grad_norm": ("_run_epoch",),
    "_get_grad_norm": ("_run_epoch",),
    "_prepare_inputs": ("training_step", "prediction_step"),
    "_save_rng_state": ("_save_checkpoint",),
    "_issue_warnings_after_load": ("_load_best_model",),
    "_move_model_to_device": ("__init__",),
}
# Others that they call or read.
USED_MEMBERS: MethodsByName = {
    "_save": ("save_model",),
    "_tr_loss": ("_inner_training_loop", "_finalize_training"),
    "_total_loss_scalar": ("_finalize_training",),
    "_globalstep_last_logged": ("_inner_training_loop", "_maybe_log_save_evaluate"),
}
# What says that a step was left out, so that the learning rate stays.
ACCELERATE_MEMBERS: MethodsByName = {"_is_overflow": ("step",)}
# What TRL's loss computes with, and ours in its place.
TRL_MEMBERS: MethodsByName = dict.fromkeys(
    (
        *(
            "log_probs",
            "label_mask",
            "average_tokens_across_devices",
            "aux_loss",
            "aux_loss_enabled",
        ),
        *("router_aux_loss_coef", "current_gradient_accumulation_steps", "entropy", "is_top1"),
    ),
    ("compute_loss",),
)


def require_upstream_names(upstream: type) -> None:
    """Check that the installed libraries still use every name as it is listed here; `upstream`:
    `Trainer`, or TRL's `SFTTrainer`. Raises BackendError: naming the library, its version, and what
    changed."""
    checks: list[tuple[Any, str, MethodsByName]] = [
        (Trainer, "transformers", {**OVERRIDDEN_METHODS, **USED_MEMBERS}),
        (AcceleratedOptimizer, "accelerate", ACCELERATE_MEMBERS),
    ]
    checks += [(upstream, "trl", TRL_MEMBERS)] if upstream is not Trainer else []
    for trainer_class, library, names in checks:
        for name, method in (
            (name, method) for name, methods in names.items() for method in methods
        ):
            function: Any = getattr(trainer_class, method, None)
            # Unsloth replaces some, and what those use is not checked
            is_library = str(getattr(function, "__module__", "")).startswith(
                ("transformers.", "trl.", "accelerate.")
            )
            # `co_names` has the attributes that a function's own code reads or calls, not those of
            # functions inside it
            used_names = getattr(
                getattr(inspect.unwrap(function), "__code__", None), "co_names", ()
            )
            if (function is None or is_library) and name not in used_names:
                raise BackendError(
                    f"this training loop does not support {library}"
                    f" {importlib.metadata.version(library)}: {trainer_class.__name__}.{method} no"
                    f" longer uses {name}; install the version of requirements.lock (make setup)"
                )
