"""Which attention code runs, by one rule for the plan, which knows the shape, and the run, which knows the class; the
kernels behind sdpa, in one table that plan, trace, self-test and run read; and whether rows come with a mask.

The table follows PyTorch 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); 2.11 and 2.12 have the same
order. There cuDNN's kernel comes first on compute capability 9.x and 10.x, about twice as fast as flash attention on
Hopper, and it builds a graph for every new shape of a batch: 0.03 to 1 s each
(https://github.com/modelscope/FunASR/pull/3705). So a run takes it where all batches have one shape, and switches it
off elsewhere; nor is it taken where its backward pass is not safe: for heads wider than 128, or of two widths.

Masks are decided from shapes, and measured before a run by `training.class_checks.masking`. Attention is causal and
padding is at the end, so no token of a chat sees a padded place. Chats that share a row are told apart by their
boundaries: PyTorch's flash kernel takes those of many chats; where it does not run, each chat is a call of its own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, cast

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.facts.installed import CudaLibraries
from sft_play.facts.models.model_shape import ModelShape
from sft_play.planner.precision import Precision

# Names of transformers' implementations.
AttentionName = Literal["sdpa", "eager", "flash_attention_2"]
SdpaKernel = Literal["cudnn", "flash", "efficient", "math"]


def attention_of(wanted: str, *, has_sdpa: bool) -> AttentionName:
    """What `model.attn_implementation` means for a model. Kernels of the hub are flash attention 2, to the byte."""
    if is_hub_kernel(wanted):
        return "flash_attention_2"
    if wanted == "auto":
        return "sdpa" if has_sdpa else "eager"
    return cast(AttentionName, wanted)


def is_hub_kernel(wanted: str) -> bool:
    """Whether it is a kernel of the hub, `owner/name@commit`."""
    return "/" in wanted


def require_package(wanted: str) -> None:
    """Raise ModelError where an attention that was asked for needs a package that is not installed."""
    if is_hub_kernel(wanted):
        package = "kernels"
    elif wanted == "flash_attention_2":
        package = "flash-attn"
    else:
        return
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ModelError(
            f"model.attn_implementation={wanted} needs the package {package}, which is not installed; pip install "
            f"{package}, or use auto"
        )


# --- the kernels behind sdpa ------------------------------------------------------------------------------------------
# Compute capability from which PyTorch's flash kernel runs.
FLASH_SINCE = (8, 0)
# Widest head that it takes.
FLASH_HEAD = 256
# An unknown GPU counts as this one, and has no kernel of cuDNN.
_CURRENT = (9, 0)
_NEWEST = (12, 1)
# cuDNN's version above which PyTorch prefers it (`check_prefer_cudnn_attention`).
_PREFERRED_ABOVE = 91500


@dataclass(frozen=True)
class SdpaCall:
    """What a call of scaled_dot_product_attention asks for; `width` and `value_width` are those of a head, and
    `grouped` says that there are fewer of keys than of queries."""

    width: int
    value_width: int
    grouped: bool = False
    masked: bool = False
    half: bool = True
    """In fp16 or bf16; bf16 is asked for from compute capability 8.0 on."""
    trains: bool = True


@dataclass(frozen=True)
class _Kernel:
    """What a kernel takes. Compute capabilities are inclusive; `unit` is what widths are a multiple of."""

    name: SdpaKernel
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (99, 0)
    fp32: bool = True
    masked: bool = True
    grouped: bool = True
    widest: int | None = None
    unit: int = 1
    one_width: bool = False
    untrained: range = range(0)
    """Widths without a backward pass on GPUs with little shared memory."""


# In PyTorch's order of preference.
_KERNELS = (
    _Kernel("cudnn", (9, 0), (10, 9), fp32=False, widest=128, unit=8, one_width=True),
    _Kernel("flash", FLASH_SINCE, _NEWEST, fp32=False, masked=False, widest=FLASH_HEAD, one_width=True,
            untrained=range(193, 225)),
    _Kernel("efficient", (5, 0), _NEWEST, grouped=False),
    _Kernel("math"),
)  # fmt: skip


def sdpa_kernel(call: SdpaCall, capability: tuple[int, int] | None, *, cudnn: bool) -> SdpaKernel:
    """The kernel that PyTorch takes; `capability` None: unknown; `cudnn`: cuDNN's is preferred there and not switched
    off."""
    own = capability or _CURRENT
    return next(one.name for one in _KERNELS if (cudnn or one.name != "cudnn") and _takes(one, call, own))


def _takes(kernel: _Kernel, call: SdpaCall, capability: tuple[int, int]) -> bool:
    widths = (call.width, call.value_width)
    unit = _efficient_unit(call, capability) if kernel.name == "efficient" else kernel.unit
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        kernel.since <= capability <= kernel.until
        and (call.half or kernel.fp32)
        and (kernel.masked or not call.masked)
        and (kernel.grouped or not call.grouped)
        and (kernel.widest is None or max(widths) <= kernel.widest)
        and not any(width % unit for width in widths)
        and (not kernel.one_width or call.width == call.value_width)
        and not (call.trains and is_small and call.width in kernel.untrained)
    )


def _efficient_unit(call: SdpaCall, capability: tuple[int, int]) -> int:
    """What widths are a multiple of for the memory-efficient kernel (`minimum_gemm_alignment`)."""
    if capability >= (8, 0):
        return 8 if call.half else 4
    return 8 if call.half and capability >= (7, 0) else 1


def prefers_cudnn(capability: tuple[int, int] | None, libraries: CudaLibraries, *, is_amd: bool = False) -> bool:
    """Whether PyTorch asks cuDNN first; not on an unknown GPU, nor on AMD's, whose architectures have such numbers."""
    if is_amd or capability is None or libraries.cudnn <= _PREFERRED_ABOVE or capability[0] not in (9, 10):
        return False
    return libraries.cuda >= (13,) or capability[1] in (0, 3)


def flash_runs(*, half: bool, capability: tuple[int, int] | None) -> bool:
    """Whether PyTorch's flash kernel runs for these numbers on this GPU, in heads of a usual width."""
    return sdpa_kernel(SdpaCall(64, 64, half=half), capability, cudnn=False) == "flash"


# --- masks ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Attended:
    """How a run's rows are attended to, and why not better, as the ends of sentences. `capability` None: unknown, which
    counts as a current one; `device`: `cuda`, `rocm` or `cpu`."""

    config: RunConfig
    shape: ModelShape
    attention: AttentionName
    capability: tuple[int, int] | None
    device: str

    @property
    def masked_because(self) -> str | None:
        """Why padded rows keep their mask; None where they need none."""
        is_old = self.device != "cpu" and self.capability is not None and self.capability < FLASH_SINCE
        if self.attention == "eager":
            return "eager attention computes every score, with a mask or without"
        if self.shape.num_experts:  # load_balancing_loss_func counts padding as tokens where there is no mask
            return "the balance loss of its experts leaves out padding by the mask"
        if any(kind.attention == "none" for kind in self.shape.layers):
            return "some of its layers carry a state from token to token, and read the mask"
        if self.shape.uses_alibi:
            return "its positions are a bias that is added to a mask"
        return "flash attention does not run on this GPU" if is_old else self._own_code

    @property
    def _own_code(self) -> str | None:
        is_other = self.config.tuning.backend == "unsloth"
        return "Unsloth has attention of its own, which is not measured here" if is_other else None

    def unbounded_because(self, precision: Precision) -> str | None:
        """Why packs keep a mask between their chats; None where their boundaries are enough."""
        if self.config.model.attn_implementation != "auto":
            return f"model.attn_implementation={self.config.model.attn_implementation}"
        if self.attention != "sdpa":
            return f"the model's class runs {self.attention} attention"
        if any(kind.attention in ("none", "chunked") for kind in self.shape.layers):
            return "some of its layers see a state or chunks, which boundaries do not say"
        if self.shape.uses_alibi:
            return "its positions are a bias that is added to a mask"
        if self.shape.attention_dropout:
            return "attention between boundaries has no dropout"
        if self._own_code is None and self.config.train.compile and self.one_by_one_because(precision) is not None:
            return "a call for each chat has its length, for which a compiled block would be compiled again"
        return self._own_code

    def one_by_one_because(self, precision: Precision) -> str | None:
        """Why each chat between boundaries is a call of its own; None where one call of PyTorch's flash kernel takes
        them all: on ROCm by AOTriton (https://github.com/huggingface/kernels/pull/401)."""
        half = precision.compute != "float32"
        if self.device == "cpu":
            return "no kernel for boundaries runs on cpu"
        if self.shape.has_latent_attention:  # flash attention takes one width for all three
            return "its keys and values have different widths"
        if self.shape.head_dim > FLASH_HEAD:
            return f"flash attention takes no heads wider than {FLASH_HEAD}"
        if self.device == "cuda" and not flash_runs(half=half, capability=self.capability):
            return "flash attention does not run on this GPU in this precision"
        return None if half else "flash attention does not run in this precision"
