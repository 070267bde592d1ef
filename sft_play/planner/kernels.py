"""Which kernels a plan counts for norms, gated activations and rotations, the plain ones or Liger's; and which code
runs a mixture's experts, by one rule for the plan, which knows the shape, and the run, which knows the class.

A plan is made before the run has proven Liger's kernels, and on machines that lack them. What is counted errs on the
side that fits: with `train.kernels: auto` the bytes of the plain code, which takes more, and the speed of what the run
will take here; with `liger` both of Liger's, since the run was asked for by name and refuses to start without the
package.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.facts.installed import LIGER_PACKAGE
from sft_play.facts.models.model_shape import ModelShape
from sft_play.log import one_line
from sft_play.planner.layout import Layout
from sft_play.planner.precision import DTYPE_BYTES, DTYPE_SHORT_NAMES, Precision

LIGER_VERSION = "0.8.5"
# Rows of fp32 sums that a trained norm's gradient is added up from, one for each multiprocessor of the GPU: the most
# that a card of the catalogue has (RTX PRO 6000; an H100 has 132).
MAX_MULTIPROCESSORS = 188


@dataclass(frozen=True)
class ReplacedOperations:
    """What liger-kernel replaces of a model; norms over the hidden width always are."""

    replaces_head_norms: bool = False
    """Norms of queries and keys too."""
    replaces_gate: bool = True
    """The product of an activated gate and its partner."""
    replaces_rotation: bool = True
    """The rotation of queries and keys."""
    writes_in_place: bool = True
    """A norm writes its input's gradient over its output's; not where the residual needs that one."""

    @property
    def text(self) -> str:
        """What is replaced, as the end of a sentence."""
        parts = [
            "norms",
            *(["gated activations"] if self.replaces_gate else []),
            *(["rotations"] if self.replaces_rotation else []),
        ]
        return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


_REPLACED_BY_TYPES = {
    "gemma granite hunyuan_v1_dense llama ministral mistral phi3 qwen2 smollm3": ReplacedOperations(),
    "qwen3": ReplacedOperations(replaces_head_norms=True),
    "gpt_oss mixtral": ReplacedOperations(replaces_gate=False),
    "qwen3_moe": ReplacedOperations(replaces_head_norms=True, replaces_gate=False),
    "gemma2": ReplacedOperations(writes_in_place=False),
    "gemma3_text": ReplacedOperations(replaces_head_norms=True, writes_in_place=False),
    "glm4": ReplacedOperations(replaces_rotation=False, writes_in_place=False),
}
# By model_type, from the package's own table and functions (liger_kernel/transformers/monkey_patch.py,
# MODEL_TYPE_TO_APPLY_LIGER_FN and the defaults of each function), as a run asks for them: of a model that is already
# built, without losses, and without experts, which keep their own code (training/class_checks/kernels.py). Types that
# the package knows and this table does not are planned with the plain code: those that no trace confirms (Qwen3-Next,
# Qwen3.5, Llama 4, Gemma 4, towers of image models), and those whose norms only follow attention and MLP (EXAONE 4,
# OLMo 2 and 3), which the estimate of a block only approximates.
LIGER_REPLACEMENTS: Mapping[str, ReplacedOperations] = {
    kind: replaced for kinds, replaced in _REPLACED_BY_TYPES.items() for kind in kinds.split()
}


KernelsName = Literal["plain", "liger"]


@dataclass(frozen=True)
class PlannedKernels:
    """What Liger's kernels replace in the plan's bytes and in its speed (None: nothing), and why in words; no words
    where the config leaves the plain kernels."""

    memory: ReplacedOperations | None = None
    speed: ReplacedOperations | None = None
    reason: str = ""

    @property
    def counted_kernels(self) -> CountedKernels:
        """The same by name."""
        return CountedKernels("liger" if self.memory else "plain", "liger" if self.speed else "plain")


@dataclass(frozen=True)
class CountedKernels:
    """Which kernels a plan counts, by name: `kernels` of its JSON."""

    memory: KernelsName = "plain"
    speed: KernelsName = "plain"


def plan_kernels(
    config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool, missing_packages: Collection[str] = ()
) -> PlannedKernels:
    """What is counted in a layout; `missing_packages`: not installed here, which only `auto` asks."""
    option = config.train.kernels
    if option == "none":
        return PlannedKernels()
    setting = f"kernels: train.kernels={option}: "
    problem = _liger_obstacle(config, shape, layout, on_gpu=on_gpu)
    # asked for by name, a missing package is refused when the run starts; the plan may be made on another machine
    if problem is None and option == "auto" and LIGER_PACKAGE in missing_packages:
        problem = f"{LIGER_PACKAGE} is not installed here"
    if problem is not None:
        return PlannedKernels(reason=f"{setting}the plain ones, because {problem}")
    operations = LIGER_REPLACEMENTS[shape.model_type]
    if shape.num_experts:  # experts keep their own code, and so do MLPs beside them
        operations = replace(operations, replaces_gate=False)
    operations_text = f"{setting}Liger's for {operations.text}"
    condition = (
        f"if a measurement before the first step shows that they compute the same ({LIGER_PACKAGE} {LIGER_VERSION})"
    )
    if option == "liger":
        return PlannedKernels(operations, operations, f"{operations_text}, {condition}")
    # auto may fall back to the plain code when the run starts, which must then still fit
    basis = "the speed is theirs, the memory that of the plain ones, which take more"
    return PlannedKernels(None, operations, f"{operations_text}, {condition}: {basis}")


def _liger_obstacle(config: RunConfig, shape: ModelShape, layout: Layout, *, on_gpu: bool) -> str | None:
    if not on_gpu:
        return "Liger's need a CUDA GPU"
    if config.tuning.backend != "bnb":
        return f"tuning.backend={config.tuning.backend} brings its own"
    if layout.tensor_parallel > 1:
        return "tensor-parallel ranks replace the same forwards"
    if shape.model_type not in LIGER_REPLACEMENTS:
        return f"{LIGER_PACKAGE} {LIGER_VERSION} has none for {one_line(shape.model_type)} that this plan knows"
    return None


# --- experts ----------------------------------------------------------------------------------------------------------
# Names of transformers' implementations. Its `batched_mm` copies an expert's weights for every token, which only pays
# for single tokens of generation; `deepgemm` and `sonicmoe` load kernels from the hub.
ExpertsImplementationName = Literal["grouped_mm", "eager"]

# Rows of a grouped product's matrices begin at a multiple of this (PyTorch's `_grouped_mm`, `check_valid_strides`).
GROUPED_MM_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ExpertsImplementation:
    """An implementation, and why it was chosen. `casts_weights`: the weights of experts are cast to the dtype of the
    other matrix products, which autocast does not do for grouped ones."""

    name: ExpertsImplementationName
    reason: str
    casts_weights: bool = False


def select_experts_implementation(
    config: RunConfig, *, uses_custom_experts: bool, widths: Iterable[int], precision: Precision
) -> ExpertsImplementation:
    """The implementation for a model with experts: grouped_mm unless its class, its widths or the config are against.
    Raises ConfigError where it is asked for by name, and cannot run."""
    implementation = config.model.experts_implementation
    if implementation == "eager":
        return ExpertsImplementation("eager", "eager, one expert after another, as model.experts_implementation says")
    # the narrower dtype needs the larger multiple of elements
    multiple = GROUPED_MM_ALIGNMENT_BYTES // min(DTYPE_BYTES[precision.compute], DTYPE_BYTES[precision.load])
    misaligned_widths = [width for width in widths if width % multiple]
    problem = None
    if uses_custom_experts:
        problem = "its class runs them by code of its own, which model.experts_implementation does not reach"
    elif misaligned_widths:
        problem = f"grouped products need widths that are multiples of {multiple}, and one is {misaligned_widths[0]}"
    if problem is None:
        return _grouped_implementation(precision)
    if implementation == "grouped_mm":
        raise ConfigError(
            f"model.experts_implementation=grouped_mm: {one_line(config.model.name)} cannot run it, because {problem}; "
            "use auto"
        )
    return ExpertsImplementation("eager", f"eager, not grouped_mm: {problem}")


def _grouped_implementation(precision: Precision) -> ExpertsImplementation:
    reason = "grouped_mm, one product for all experts of a block"
    if precision.load == precision.compute or precision.compute == "float32":
        return ExpertsImplementation("grouped_mm", reason)
    compute_name = DTYPE_SHORT_NAMES[precision.compute]
    cast_note = (
        f"; their {DTYPE_SHORT_NAMES[precision.load]} weights are cast to {compute_name} for it, as autocast casts "
        "those of other products"
    )
    return ExpertsImplementation("grouped_mm", reason + cast_note, casts_weights=True)


# Compute capability of the first GPUs with PyTorch's grouped products (transformers, integrations/moe.py).
GROUPED_MM_MIN_CAPABILITY = (8, 0)


def plan_experts(config: RunConfig, shape: ModelShape, precision: Precision) -> ExpertsImplementation | None:
    """The implementation for the experts of a shape; None where there are none. Raises ConfigError where the config
    names one that cannot run."""
    expert_layers = [kind for kind in shape.layers if kind.num_experts]
    if not expert_layers:
        check_experts_option(config)
        return None
    # the width of experts in code that is not known is not known either
    widths = sorted({shape.hidden_size, *(kind.expert_width for kind in expert_layers if kind.expert_width)})
    return select_experts_implementation(
        config, uses_custom_experts=shape.uses_custom_experts, widths=widths, precision=precision
    )


def check_experts_option(config: RunConfig) -> None:
    """Raises ConfigError where an implementation is named for a model that has no experts."""
    implementation = config.model.experts_implementation
    if implementation != "auto":
        raise ConfigError(
            f"model.experts_implementation={implementation}: {one_line(config.model.name)} has no experts that it "
            "could reach; "
            "leave it at auto"
        )
