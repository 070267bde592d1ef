"""Liger's Triton kernels in place of a model's norms, gated activations and rotations, where they compute the same:
measured on the run's own device, on small models of the class with rows as wide as the real one's (`proof`)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.installed import LIGER_PACKAGE
from sft_play.log import one_line
from sft_play.planner.kernels import LIGER_VERSION
from sft_play.planner.plan import Plan
from sft_play.training.class_checks.proof import (
    ClassCheck,
    all_ranks_agree,
    compare_with_reference,
    largest_differences,
    logits_and_gradients,
    small_model_attention,
    to_dtype,
)
from sft_play.training.class_checks.small_model import small_config, small_model

logger = logging.getLogger(__name__)

LIGER_MODULE = "liger_kernel"
GATE_KERNELS = ("swiglu", "geglu")
# What may be replaced, by the names of Liger's arguments; all others (its losses) are switched off. Gates stay in a
# model with experts, which the package would replace too, by code that computes gradients of frozen weights and
# multiplies in the dtype of the hidden states, not in autocast's (0.8.5, ops/fused_moe.py).
REPLACEABLE_KERNELS = ("rms_norm", *GATE_KERNELS, "rope")
ModuleSnapshot = tuple[Any, dict[str, Any]]
# What the module of this process's model was before Liger's functions were put into it.
_replaced_modules: list[ModuleSnapshot] = []


@dataclass(frozen=True)
class ActiveKernels:
    """The kernels of a run: what Liger's replaced (REPLACEABLE_KERNELS), or why the plain ones run where the config
    asks for more."""

    replaced: tuple[str, ...] = ()
    reason: str | None = None

    def as_json(self, plan: Plan) -> dict[str, Any]:
        """`kernels` of the summary: what was used, what the plan counted, and why they differ."""
        counted = asdict(plan.kernels) if plan.kernels else None
        return {"used": list(self.replaced), "counted": counted, "reason": self.reason}


def check_kernels(config: RunConfig, plan: Plan) -> None:
    """Raises ConfigError where train.kernels=liger cannot be followed on this machine or in this layout."""
    problem = _liger_problem(plan) if config.train.kernels == "liger" else None
    if problem is not None:
        raise ConfigError(f"train.kernels: liger: {problem}; use train.kernels=auto, or none")


def activate_kernels(model: Any, config: RunConfig, plan: Plan, *, device: torch.device) -> ActiveKernels:
    """Replace what Liger has kernels for, if the config wants it and they are proven, in a model without adapters yet;
    all ranks do the same. Raises ConfigError where they were asked for by name, and differ."""
    if _replaced_modules:  # another stage of this process
        _restore_module(_replaced_modules.pop())
    if config.train.kernels == "none":
        return ActiveKernels()
    dtype = getattr(torch, plan.precision.compute)

    def check() -> tuple[ClassCheck | None, str | None]:
        problem = _liger_problem(plan) or _unknown_class_problem(model)
        if problem is not None:
            return None, problem
        class_check = check_liger_kernels(
            model.config, attention=small_model_attention(model), device=device, dtype=dtype
        )
        problem = f"they differ on a small model of this class: {class_check.figures_text}"
        return class_check, None if class_check.is_rounding else problem

    class_check, reason = all_ranks_agree(check)
    if reason is not None:
        if config.train.kernels == "liger":
            raise ConfigError(f"train.kernels: liger: {reason}; use train.kernels=auto, or none")
        logger.debug("Kernels: the plain ones; train.kernels=auto: %s", reason)
        return ActiveKernels(reason=reason)
    _replaced_modules.append(_snapshot_module(model))
    replaced = _apply_liger(model)
    assert class_check is not None
    logger.debug(
        "Kernels: Liger's %s (on small models of this class: %s)", ", ".join(replaced), class_check.figures_text
    )
    return ActiveKernels(replaced)


def check_liger_kernels(hf_config: Any, *, attention: str, device: torch.device, dtype: torch.dtype) -> ClassCheck:
    """How far Liger's kernels are from the plain code, on two small models, one with hidden states and one with an MLP
    as wide as the real one's: wide rows take other ways through them."""
    checks = []
    for width in ("hidden_size", "intermediate_size"):
        small = small_config(hf_config)
        if isinstance(getattr(hf_config, width, None), int):
            setattr(small, width, getattr(hf_config, width))
        with torch.random.fork_rng(devices=[]):
            model = small_model(small, attention, trust_remote_code=False).to(device)
            reference, reference_half = logits_and_gradients(model), logits_and_gradients(to_dtype(model, dtype))
            snapshot = _snapshot_module(model)
            try:
                _apply_liger(model)
                replaced, replaced_half = logits_and_gradients(model), logits_and_gradients(to_dtype(model, dtype))
            finally:
                _restore_module(snapshot)
        checks.append(compare_with_reference(reference, reference_half, replaced, replaced_half))
    return largest_differences(checks)


def _liger_problem(plan: Plan) -> str | None:
    if importlib.util.find_spec(LIGER_MODULE) is None:
        return f"{LIGER_PACKAGE} is not installed here (pip install {LIGER_PACKAGE}=={LIGER_VERSION})"
    if plan.hardware.device != "cuda":
        return "its kernels are Triton's, which need a CUDA GPU"
    if plan.choice.layout.tensor_parallel > 1:
        return "tensor-parallel ranks replace the same forwards (model.mesh_shape)"
    return None


def _unknown_class_problem(model: Any) -> str | None:
    model_type = getattr(model.config, "model_type", None)
    is_known = model_type in _liger_functions() and type(model).__module__.startswith("transformers.models.")
    return None if is_known else f"it has no kernels for {one_line(str(model_type))}"


def _liger_functions() -> dict[str, Any]:
    patches: Any = importlib.import_module(f"{LIGER_MODULE}.transformers.monkey_patch")
    return dict(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)


def _apply_liger(model: Any) -> tuple[str, ...]:
    apply_liger = _liger_functions()[model.config.model_type]
    options = inspect.signature(apply_liger).parameters
    has_experts = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    kinds = tuple(kind for kind in REPLACEABLE_KERNELS if not (has_experts and kind in GATE_KERNELS))
    # what is left at its default is what the package has a kernel for in this class
    apply_liger(model=model, **{name: False for name in options if name not in (*kinds, "model")})
    return tuple(kind for kind in kinds if kind in options and options[kind].default)


def _snapshot_module(model: Any) -> ModuleSnapshot:
    """The module that a model's class is from, with its names: Liger replaces classes and functions there too."""
    module = sys.modules[type(model).__module__]
    return module, dict(vars(module))


def _restore_module(snapshot: ModuleSnapshot) -> None:
    module, names = snapshot
    for name, value in names.items():
        setattr(module, name, value)
