"""Every place where a trace differs from what the libraries would run, with its reason and its
guard: the parameters that a target must have, so that a library that has changed is reported
instead of giving a wrong number.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sft_play.machine.software import installed_version
from sft_play.planner.kernels import GROUPED_MM_MIN_CAPABILITY
from sft_play.trace import build, kernels
from sft_play.trace.settings import StepSettings, TraceUnavailable
from sft_play.trace.storages import StorageLog

# What runs in a library's place while a step is traced; `PATCHES`, below, says where each goes, and
# why.
#
# A function here takes the original and the state and gives the replacement, or is the replacement
# itself.


@dataclass
class TraceState:
    """What a patch may depend on."""

    settings: StepSettings
    log: StorageLog
    # Linear layers of a block that read one input, where adapters train in groups.
    shared_inputs: Sequence[tuple[str, ...]] = ()
    is_evaluating: bool = False

    @property
    def active_mask(self) -> str:
        """How rows are separated now (`StepSettings.mask`)."""
        return (self.is_evaluating and self.settings.eval_mask) or self.settings.mask

    @property
    def uses_cudnn(self) -> bool:
        """True if cuDNN's attention is switched on now."""
        return self.settings.cudnn == "always" or (
            self.settings.cudnn == "training" and not self.is_evaluating
        )


def _cuda_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.ops.aten.native_dropout(input, p, True)[0] if training and p > 0 else input


class _GroupedProduct(torch.autograd.Function):
    """CUDA's grouped product in other dtypes than bf16: rows of inputs, experts x inputs x outputs;
    rows of outputs."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        # each is held for the other's gradient, as by the derivative of `_grouped_mm`
        needs_row_gradient, needs_weight_gradient = ctx.needs_input_grad
        ctx.save_for_backward(
            rows if needs_weight_gradient else None, weight if needs_row_gradient else None
        )
        ctx.like = (rows.shape, weight.shape, rows.dtype)
        return rows.new_empty(rows.shape[0], weight.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *shapes, dtype = ctx.like
        pairs = zip(shapes, ctx.needs_input_grad, strict=True)
        return tuple(
            torch.empty(shape, dtype=dtype) if is_needed else None for shape, is_needed in pairs
        )


def _make_flash_mask(original: Any, state: TraceState) -> Any:
    def mask(*sizes: Any, kv_length: int, attention_mask: Any = None, **options: Any) -> Any:
        is_read = attention_mask is not None and state.active_mask == "padded"
        return attention_mask[:, -kv_length:] if is_read else None

    return mask


def _make_flash_imports(original: Any, _: TraceState) -> Any:
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")

    def imports(implementation: Any, *more: Any, **options: Any) -> Any:
        if implementation != kernels.FLASH_NAME:
            return original(implementation, *more, **options)
        return (
            kernels.flash_attn_func,
            kernels.flash_attn_varlen_func,
            None,
            utils._pad_input,
            utils._unpad_input,
        )

    return imports


def _full_row_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    # every position counts as a token, as the plan assumes
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.empty((attention_mask.numel(), 1), dtype=torch.int64).flatten()
    ends = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return indices, ends, int(attention_mask.shape[-1])


def _make_pack_boundaries(original: Any, state: TraceState) -> Any:
    def borders(position_ids: torch.Tensor) -> Any:
        rows, longest = state.settings.micro_batch, state.settings.seq_len
        ends = torch.zeros(rows + 1, dtype=torch.int32)
        return (ends, ends), (longest, longest)

    return borders


def _make_logged_resize(original: Any, state: TraceState) -> Any:
    def resize_(self: Any, size: int) -> Any:
        out = original(self, size)
        state.log.record_resize(self)
        return out

    return resize_


def _make_logged_stream(original: Any, state: TraceState) -> Any:
    @contextlib.contextmanager
    def enter_stream(stream: Any) -> Iterator[None]:
        with original(stream), state.log.use_stream(log_stream(stream)):
            yield

    return enter_stream


def log_stream(stream: Any) -> Any:
    """A stream as the log takes it: None is the model's own stream."""
    return None if stream is importlib.import_module("torch.cpu")._default_cpu_stream else stream


def _swap_by_data(t1: Any, t2: Any) -> None:
    if t1 is not t2:
        t1.data = t2.data


def _make_unlogged(original: Any, state: TraceState) -> Any:
    def propagate(self: Any, *args: Any, **options: Any) -> Any:
        with state.log.hide_allocations():
            return original(self, *args, **options)

    return propagate


def is_half_under_autocast(value: Any) -> bool:
    """True if CUDA's autocast would cast this tensor up for an operator of its fp32 list."""
    return (
        torch.is_autocast_enabled("cpu")
        and isinstance(value, torch.Tensor)
        and value.dtype in (torch.float16, torch.bfloat16)
    )


def _make_fp32_layer_norm(original: Any, _: TraceState) -> Any:
    def layer_norm(
        input: torch.Tensor,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not is_half_under_autocast(input):
            return original(input, normalized_shape, weight, bias, eps)
        parameters = [None if one is None else one.float() for one in (weight, bias)]
        with torch.autocast("cpu", enabled=False):
            return original(input.float(), normalized_shape, *parameters, eps)

    return layer_norm


@dataclass(frozen=True)
class Patch:
    """One difference: `target` is `module:attribute`, `parameters` the names that it must have, if
    any; `make(original, state)` gives the replacement, None only guards the target."""

    name: str
    target: str
    parameters: str
    reason: str
    make: Callable[[Any, TraceState], Any] | None = None
    is_needed: Callable[[StepSettings], bool] = lambda settings: True

    def resolve_target(self) -> tuple[Any, str, Any]:
        """The object that holds the target, the attribute's name and its value. Raises
        TraceUnavailable: the library has no such attribute, or with other parameters than the patch
        expects."""
        module, _, path = self.target.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            *parents, last = path.split(".")
            for name in parents:
                holder = getattr(holder, name)
            value = getattr(holder, last)
        except (ImportError, AttributeError) as error:
            raise self._outdated_error(f"{self.target} does not exist ({error})") from error
        function = value.forward if isinstance(value, type) and hasattr(value, "forward") else value
        try:
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            # C functions have none; `scaled_dot_product_attention` has them in its docstring
            names = {
                word.strip("=,*() ").partition("=")[0] for word in (function.__doc__ or "").split()
            }
        missing = set(self.parameters.split()) - names
        if missing:
            raise self._outdated_error(
                f"{self.target} no longer has the parameter {', '.join(sorted(missing))}"
            )
        return holder, last, value

    def _outdated_error(self, problem: str) -> TraceUnavailable:
        library = self.target.partition(".")[0].partition(":")[0]
        return TraceUnavailable(
            f"patch '{self.name}' does not know {library} {installed_version(library)}: {problem}"
        )


def conditional_patches(
    is_needed: Callable[[StepSettings], bool], *patches: Patch
) -> tuple[Patch, ...]:
    """Restrict patches to the settings that need them."""
    return tuple(replace(patch, is_needed=is_needed) for patch in patches)


def _make_pow(original: Any, state: TraceState) -> Any:
    return lambda input, exponent, **options: original(
        input.float() if is_half_under_autocast(input) else input, exponent, **options
    )


def _make_grouped_mm(original: Any, state: TraceState) -> Any:
    has_grouped_mm = state.settings.capability >= GROUPED_MM_MIN_CAPABILITY
    grouped_mm = original if has_grouped_mm else torch.ops.transformers.grouped_mm_fallback

    def product(input: Any, weight: Any, offs: Any) -> Any:
        if has_grouped_mm and weight.dtype != torch.bfloat16:
            return _GroupedProduct.apply(input.to(weight.dtype), weight)
        return grouped_mm(input.to(weight.dtype), weight, offs)

    return product


_FLASH_UTILS = "transformers.modeling_flash_attention_utils"
PATCHES: list[Patch] = [
    Patch(
        "layer norm in fp32 under autocast",
        "torch.nn.functional:layer_norm",
        "input normalized_shape weight bias eps",
        "CUDA's autocast takes layer_norm in fp32 (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32);"
        " a CPU's does not",
        _make_fp32_layer_norm,
    ),
    Patch(
        "powers in fp32 under autocast",
        "torch:pow",
        "",
        "CUDA's autocast takes pow in fp32 (the same list), which the stepwise GELU of GPT-2 calls;"
        " a CPU's does not",
        _make_pow,
    ),
    Patch(
        "attention by CUDA's choice",
        "torch.nn.functional:scaled_dot_product_attention",
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        "the CPU kernel saves other tensors; CUDA's operators have fake kernels",
        lambda original, state: kernels.CudaAttention(
            state.settings.capability, lambda: state.uses_cudnn
        ),
    ),
    Patch(
        "dropout",
        "torch.nn.functional:dropout",
        "input p training inplace",
        "a CPU keeps the noise in the input's type, CUDA a mask of one byte (native_dropout)",
        lambda original, state: _cuda_dropout,
    ),
    Patch(
        "fake tensors count as real ones for masks",
        "transformers.masking_utils:is_tracing",
        "tensor",
        "transformers builds every S x S mask when it believes it is traced",
        lambda original, state: lambda tensor=None: False,
    ),
    Patch(
        "the mask's content",
        "transformers.masking_utils:fast_all",
        "tensor",
        "transformers reads whether a mask is all ones; fake tensors have no values",
        lambda original, state: lambda tensor: state.active_mask != "padded",
    ),
    *conditional_patches(
        lambda settings: settings.experts in ("stacked", "cast"),
        Patch(
            "grouped products",
            "transformers.integrations.moe:_grouped_mm",
            "input weight offs",
            "PyTorch's fake knows the kernel of bf16 only; in other dtypes it multiplies one expert"
            " after another inside one operator. GPUs before Ampere run transformers' own loop,"
            " whose backward pass makes the gradient of frozen weights too",
            _make_grouped_mm,
        ),
    ),
    Patch(
        "packing",
        "transformers.masking_utils:find_packed_sequence_indices",
        "position_ids",
        "transformers reads position ids for sequence borders; fake tensors have no values",
        lambda original, state: (
            lambda position_ids: (
                torch.cumsum(torch.ones_like(position_ids), -1)
                if state.active_mask == "packed"
                else None
            )
        ),
    ),
    *conditional_patches(
        lambda settings: settings.attention == "flash_attention_2",
        Patch(
            "the mask's content for flash attention",
            "transformers.masking_utils:flash_attention_mask",
            "attention_mask kv_length",
            "transformers asks `attention_mask.all()` to leave out a mask without padding, and fake"
            " tensors have no values",
            _make_flash_mask,
        ),
        Patch(
            "the package flash-attn",
            f"{_FLASH_UTILS}:_lazy_imports",
            "implementation",
            "it runs only on CUDA; PyTorch's operators of the same kernels have fake"
            " implementations",
            _make_flash_imports,
        ),
        Patch(
            "the loaded flash attention",
            f"{_FLASH_UTILS}:_loaded_implementation",
            "",
            "transformers remembers which one it loaded; it forgets this one when the trace ends",
            lambda original, state: None,
        ),
        Patch(
            "where rows end",
            f"{_FLASH_UTILS}:_get_unpad_data",
            "attention_mask",
            "transformers reads lengths and places of tokens from the mask; fake tensors have no"
            " values",
            lambda original, state: _full_row_data,
        ),
        Patch(
            "whether a row is a pack",
            f"{_FLASH_UTILS}:_is_packed_sequence",
            "position_ids batch_size",
            "transformers reads position ids for it, in each layer; fake tensors have no values",
            lambda original, state: (
                lambda position_ids, batch_size: (
                    position_ids is not None and batch_size == 1 and state.active_mask == "packed"
                )
            ),
        ),
        Patch(
            "where the chats of a pack end",
            f"{_FLASH_UTILS}:prepare_fa_kwargs_from_position_ids",
            "position_ids",
            "a class that does not pass the given boundaries down reads them from position ids",
            _make_pack_boundaries,
        ),
    ),
    *conditional_patches(
        lambda settings: settings.attention == "varlen",
        Patch(
            "attention between boundaries",
            "sft_play.training.model.attention_functions:packed_attention",
            "query key value boundaries max_length lengths scale window",
            "it runs only on CUDA; PyTorch's operator of the same kernel has a fake implementation",
            lambda original, state: kernels.traced_varlen_attention,
        ),
    ),
    Patch(
        "autocast's device",
        "torch:is_autocast_enabled",
        "",
        "PEFT asks for autocast without a device, meaning CUDA; the trace runs under the CPU's",
        lambda original, state: lambda device_type="cpu": original("cpu"),
    ),
    Patch(
        "storages that are resized",
        "torch:UntypedStorage.resize_",
        "",
        "FSDP empties and refills gathered parameters without an operator",
        _make_logged_resize,
    ),
    Patch(
        "swapped tensors",
        "torch.utils:swap_tensors",
        "t1 t2",
        "Module.to always swaps fake parameters, which fails where a weak reference is held",
        lambda original, state: _swap_by_data,
    ),
    *conditional_patches(
        lambda settings: settings.loss == "chunked" and settings.on_gpu,
        Patch(
            "Triton's way through TRL's head",
            "trl.trainer.utils:_use_triton",
            "device",
            "only CUDA and XPU devices score just the labelled tokens",
            lambda original, state: lambda device: True,
        ),
        Patch(
            "forward tiles of TRL's head",
            "trl.kernels.chunked_logprob:_forward_tile",
            "tile n_cols",
            "Triton's kernel reads a tile where it lies; torch's operators in its place make fp32"
            " copies of it",
            lambda original, state: lambda *args, **options: None,
        ),
        Patch(
            "backward tiles of TRL's head",
            "trl.kernels.chunked_logprob:_backward_tile",
            "tile n_cols",
            "Triton's kernel writes the gradient over a tile's logits; torch's operators copy them",
            lambda original, state: lambda *args, **options: None,
        ),
        Patch(
            "products in fp32 of TRL's head",
            "trl.kernels.chunked_logprob:_addmm_fp32",
            "acc a b",
            "CUDA adds products of half inputs to an fp32 sum; a CPU makes fp32 copies of them"
            " first",
            lambda original, state: lambda *args, **options: None,
        ),
    ),
    *conditional_patches(
        lambda settings: settings.mode == "qlora" and settings.peft is not None,
        Patch(
            "weights of NF4 fakes",
            "peft.tuners.lora.dora:dequantize_module_weight",
            "module",
            "DoRA takes the norm of a dequantised weight; bitsandbytes' operator refuses fake"
            " tensors",
            lambda original, state: build.wrap_dequantize(original),
        ),
        Patch(
            "weights of NF4 fakes in groups",
            "sft_play.training.model.grouped_adapters:base_weight",
            "base dtype",
            "bitsandbytes' operator refuses fake tensors",
            lambda original, state: build.wrap_dequantize(original, is_backward=True),
        ),
    ),
    *conditional_patches(
        lambda settings: settings.mode == "qlora",
        Patch(
            "NF4 layers",
            "bitsandbytes.nn:Linear4bit",
            "x",
            "Params4bit cannot wrap a fake tensor; a fake makes the same buffers, always by"
            " dequantising",
        ),
        Patch(
            "NF4 products",
            "bitsandbytes.autograd._functions:MatMul4Bit",
            "A B out bias quant_state",
            "the fake repeats MatMul4Bit: dequantise in forward and again in backward, nothing"
            " saved",
        ),
        Patch(
            "which layers are quantised",
            "transformers.integrations.bitsandbytes:replace_with_bnb_linear",
            "model modules_to_not_convert quantization_config",
            "transformers' own function swaps them, and the fakes take their places",
        ),
    ),
    *conditional_patches(
        lambda settings: "8bit" in settings.optimizer or "bnb" in settings.optimizer,
        Patch(
            "8-bit and paged states",
            "bitsandbytes.optim.optimizer:Optimizer2State.init_state",
            "group p gindex pindex",
            "bitsandbytes' optimizers update in C++; their states are created by formula",
        ),
    ),
    *conditional_patches(
        lambda settings: settings.strategy == "fsdp2",
        Patch(
            "tensors of global size",
            "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
            "op_schema",
            "DTensor runs each new operator once on global shapes to learn its result's; those"
            " storages do not exist",
            _make_unlogged,
        ),
        Patch(
            "units of a sharded model",
            "accelerate.utils.fsdp_utils:fsdp2_prepare_model",
            "accelerator model",
            "accelerate's own function cuts them; a stand-in gives it what it reads of an"
            " accelerator",
        ),
    ),
    *conditional_patches(
        lambda settings: settings.strategy.startswith("fsdp"),
        Patch(
            "streams",
            "torch.cpu:stream",
            "stream",
            "FSDP gathers and reduces on streams of its own, whose blocks the allocator keeps"
            " apart; a CPU has none",
            _make_logged_stream,
        ),
    ),
    *conditional_patches(
        lambda settings: settings.strategy == "ddp",
        Patch(
            "gradient buckets",
            "torch.distributed:_compute_bucket_assignment_by_size",
            "",
            "DistributedDataParallel's C++ reducer reads tensors' data; its own function cuts the"
            " buckets",
        ),
    ),
    Patch(
        "gradients summed in place",
        "torch.autograd.graph:_engine_run_backward",
        "t_outputs",
        "the autograd engine sums in place only without modes; the second sum takes over the first"
        " one's storage",
    ),
    Patch(
        "who else holds a gradient",
        "torch._C:_storage_Use_Count",
        "",
        "the engine may sum in place only what nothing else holds: the counts that it checks"
        " itself",
    ),
]


@contextlib.contextmanager
def install_patches(state: TraceState) -> Iterator[None]:
    """The patches that these settings need, until the end of the block; raises TraceUnavailable as
    `resolve_target`."""
    with contextlib.ExitStack() as undo:
        for patch in PATCHES:
            if patch.is_needed(state.settings):
                holder, name, value = patch.resolve_target()
                if patch.make is not None:
                    setattr(holder, name, patch.make(value, state))
                    undo.callback(setattr, holder, name, value)
        yield
