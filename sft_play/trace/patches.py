"""Every place where a trace differs from what the libraries would run, with its reason and its guard.

A patch replaces one attribute of a library while a trace runs. Its guard is the set of parameter names that the target
must have, so that a library that has changed is reported instead of giving a wrong number. Fakes and rules patch
nothing; their guards check what they stand in for.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sft_play.facts.installed import version_of
from sft_play.trace import fakes, kernels, replacements
from sft_play.trace.replacements import Situation
from sft_play.trace.settings import StepSettings, TraceUnavailable


@dataclass(frozen=True)
class Patch:
    """One difference: `target` is `module:attribute`, `parameters` the names that it must have (none: it must only
    exist).

    `make(original, situation)` gives the replacement; None leaves the target unchanged and only guards it.
    """

    name: str
    reason: str
    target: str
    parameters: tuple[str, ...] = ()
    make: Callable[[Any, Situation], Any] | None = None
    needed: Callable[[StepSettings], bool] = lambda settings: True

    def holder(self) -> tuple[Any, str, Any]:
        """The object that holds the target, the attribute's name and its value.

        Raises:
            TraceUnavailable: the library has no such attribute, or with other parameters than the patch expects.
        """
        module, _, path = self.target.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            *way, last = path.split(".")
            for name in way:
                holder = getattr(holder, name)
            value = getattr(holder, last)
        except (ImportError, AttributeError) as error:
            raise self._outdated(f"{self.target} does not exist ({error})") from error
        missing = set(self.parameters) - _parameters(value) if self.parameters else set()
        if missing:
            raise self._outdated(f"{self.target} no longer has the parameter {', '.join(sorted(missing))}")
        return holder, last, value

    def _outdated(self, problem: str) -> TraceUnavailable:
        library = self.target.partition(".")[0].partition(":")[0]
        return TraceUnavailable(f"patch '{self.name}' does not know {library} {version_of(library)}: {problem}")


def _parameters(value: Any) -> set[str]:
    if isinstance(value, type) and hasattr(value, "forward"):
        value = value.forward
    try:
        return set(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # C functions have none; `scaled_dot_product_attention` has them in its docstring
        return {word.strip("=,*() ").partition("=")[0] for word in (value.__doc__ or "").split()}


def _is_flat(settings: StepSettings) -> bool:
    return settings.strategy == "fsdp1"


def _is_quantised(settings: StepSettings) -> bool:
    return settings.mode == "qlora"


def _is_chunked(settings: StepSettings) -> bool:
    return settings.loss == "chunked"


def _is_flash(settings: StepSettings) -> bool:
    return settings.attention == "flash_attention_2"


def _is_fsdp(settings: StepSettings) -> bool:
    return settings.strategy == "fsdp2"


def _is_sharded(settings: StepSettings) -> bool:
    return settings.strategy in ("fsdp1", "fsdp2")


PATCHES: tuple[Patch, ...] = (
    Patch(
        "layer norm in fp32 under autocast",
        "CUDA's autocast takes layer_norm in fp32 (aten/src/ATen/autocast_mode.h, AT_FORALL_FP32); a CPU's does not",
        "torch.nn.functional:layer_norm",
        ("input", "normalized_shape", "weight", "bias", "eps"),
        replacements.wide_layer_norm,
    ),
    Patch(
        "powers in fp32 under autocast",
        "CUDA's autocast takes pow in fp32 (the same list), which the stepwise GELU of GPT-2 calls; a CPU's does not",
        "torch:pow",
        (),
        lambda original, situation: (
            lambda input, exponent, **options: original(
                input.float() if replacements.is_half_under_autocast(input) else input, exponent, **options
            )
        ),
    ),
    Patch(
        "attention by CUDA's choice",
        "the CPU kernel saves other tensors; CUDA's operators have fake kernels",
        "torch.nn.functional:scaled_dot_product_attention",
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        lambda original, situation: kernels.CudaAttention(situation.settings, lambda: situation.cudnn),
    ),
    Patch(
        "dropout",
        "a CPU keeps the noise in the input's type, CUDA a mask of one byte (native_dropout)",
        "torch.nn.functional:dropout",
        ("input", "p", "training", "inplace"),
        lambda original, situation: replacements.cuda_dropout,
    ),
    Patch(
        "softmax of fp16 in fp32",
        "one kernel on CUDA; a CPU makes an fp32 copy of the input first",
        "torch.nn.functional:softmax",
        ("input", "dim", "_stacklevel", "dtype"),
        replacements.cuda_softmax,
    ),
    Patch(
        "fake tensors count as real ones for masks",
        "transformers builds every S x S mask when it believes it is traced",
        "transformers.masking_utils:is_tracing",
        ("tensor",),
        lambda original, situation: lambda tensor=None: False,
    ),
    Patch(
        "the mask's content",
        "transformers reads whether a mask is all ones; fake tensors have no values",
        "transformers.masking_utils:fast_all",
        ("tensor",),
        lambda original, situation: lambda tensor: situation.mask != "padded",
    ),
    Patch(
        "grouped products",
        "PyTorch's fake knows the kernel of bf16 only; others, and older GPUs, multiply one expert after another "
        "inside one operator, as transformers' own does",
        "transformers.integrations.moe:_can_use_grouped_mm",
        ("input", "weight", "offs"),
        lambda original, situation: (
            lambda input, weight, offs: (
                weight.dtype == torch.bfloat16 and situation.settings.device.capability >= (8, 0)
            )
        ),
        lambda settings: settings.experts in ("stacked", "cast"),
    ),
    Patch(
        "packing",
        "transformers reads position ids for sequence borders; fake tensors have no values",
        "transformers.masking_utils:find_packed_sequence_indices",
        ("position_ids",),
        lambda original, situation: (
            lambda position_ids: torch.cumsum(torch.ones_like(position_ids), -1) if situation.mask == "packed" else None
        ),
    ),
    Patch(
        "the mask's content for flash attention",
        "transformers asks `attention_mask.all()` to leave out a mask without padding; fake tensors have no values",
        "transformers.masking_utils:flash_attention_mask",
        ("attention_mask", "kv_length"),
        replacements.flash_mask,
        _is_flash,
    ),
    Patch(
        "the package flash-attn",
        "it runs only on CUDA; PyTorch's operators of the same kernels have fake implementations",
        "transformers.modeling_flash_attention_utils:_lazy_imports",
        ("implementation",),
        replacements.flash_package,
        _is_flash,
    ),
    Patch(
        "the loaded flash attention",
        "transformers remembers which one it loaded; it forgets this one when the trace ends",
        "transformers.modeling_flash_attention_utils:_loaded_implementation",
        (),
        lambda original, situation: None,
        _is_flash,
    ),
    Patch(
        "where rows end",
        "transformers reads lengths and places of tokens from the mask; fake tensors have no values",
        "transformers.modeling_flash_attention_utils:_get_unpad_data",
        ("attention_mask",),
        lambda original, situation: replacements.full_rows,
        _is_flash,
    ),
    Patch(
        "whether a row is a pack",
        "transformers reads position ids for it, in each layer; fake tensors have no values",
        "transformers.modeling_flash_attention_utils:_is_packed_sequence",
        ("position_ids", "batch_size"),
        lambda original, situation: (
            lambda position_ids, batch_size: position_ids is not None and batch_size == 1 and situation.mask == "packed"
        ),
        _is_flash,
    ),
    Patch(
        "where the chats of a pack end",
        "a class that does not pass the given boundaries down reads them from position ids",
        "transformers.modeling_flash_attention_utils:prepare_fa_kwargs_from_position_ids",
        ("position_ids",),
        replacements.borders_of_packs,
        _is_flash,
    ),
    Patch(
        "attention between boundaries",
        "it runs only on CUDA; PyTorch's operator of the same kernel has a fake implementation",
        "sft_play.training.model.varlen:kernel",
        ("query", "key", "value", "ends", "longest", "lengths", "scale", "window"),
        lambda original, situation: kernels.between_boundaries,
        lambda settings: settings.attention == "varlen",
    ),
    Patch(
        "autocast's device",
        "PEFT asks for autocast without a device, meaning CUDA; the trace runs under the CPU's",
        "torch:is_autocast_enabled",
        (),
        lambda original, situation: lambda device_type="cpu": original("cpu"),
    ),
    Patch(
        "storages that are resized",
        "FSDP empties and refills gathered parameters without an operator",
        "torch:UntypedStorage.resize_",
        (),
        replacements.logged_resize,
    ),
    Patch(
        "swapped tensors",
        "Module.to always swaps fake parameters, which fails where a weak reference is held",
        "torch.utils:swap_tensors",
        ("t1", "t2"),
        lambda original, situation: replacements.swap_by_data,
    ),
    Patch(
        "Triton's way through TRL's head",
        "only CUDA and XPU devices score just the labelled tokens",
        "trl.trainer.utils:_use_triton",
        ("device",),
        lambda original, situation: lambda device: True,
        _is_chunked,
    ),
    Patch(
        "TRL's chunked head",
        "Triton cannot run on fake tensors, and the fallback makes fp32 tiles that CUDA never has",
        "trl.trainer.utils:_ChunkedLogProbFunction",
        tuple(inspect.signature(fakes.ChunkedLogProb.forward).parameters)[1:],
        lambda original, situation: fakes.ChunkedLogProb,
        _is_chunked,
    ),
    Patch(
        "weights of NF4 fakes",
        "DoRA takes the norm of a dequantised weight; bitsandbytes' operator refuses fake tensors",
        "peft.tuners.lora.dora:dequantize_module_weight",
        ("module",),
        lambda original, situation: fakes.dequantised_weight(original),
        lambda settings: _is_quantised(settings) and settings.peft is not None,
    ),
    Patch(
        "NF4 layers",
        "Params4bit cannot wrap a fake tensor; a fake makes the same buffers, always by dequantising",
        "bitsandbytes.nn:Linear4bit",
        ("x",),
        None,
        _is_quantised,
    ),
    Patch(
        "NF4 products",
        "the fake repeats MatMul4Bit: dequantise in forward and again in backward, nothing saved",
        "bitsandbytes.autograd._functions:MatMul4Bit",
        ("A", "B", "out", "bias", "quant_state"),
        None,
        _is_quantised,
    ),
    Patch(
        "8-bit and paged states",
        "bitsandbytes' optimizers update in C++; their states are created by formula",
        "bitsandbytes.optim.optimizer:Optimizer2State.init_state",
        ("group", "p", "gindex", "pindex"),
        None,
        lambda settings: "8bit" in settings.optimizer or "bnb" in settings.optimizer,
    ),
    Patch(
        "tensors of global size",
        "DTensor runs each new operator once on global shapes to learn its result's; those storages do not exist",
        "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",
        ("op_schema",),
        replacements.hiding,
        _is_fsdp,
    ),
    Patch(
        "addresses of storages",
        "FSDP1 asks by address whether a flat parameter is sharded; all fake storages have the address 0",
        "torch:UntypedStorage.data_ptr",
        (),
        replacements.storage_address,
        _is_flat,
    ),
    Patch(
        "addresses of tensors",
        "FSDP1 asks the same of tensors, whose addresses are 0 too",
        "torch._subclasses.fake_tensor:FakeTensor.data_ptr",
        (),
        lambda original, situation: replacements.tensor_address,
        _is_flat,
    ),
    Patch(
        "streams",
        "both FSDPs gather and reduce on streams of their own, whose blocks the allocator keeps apart; a CPU has none",
        "torch.cpu:stream",
        ("stream",),
        replacements.logged_stream,
        _is_sharded,
    ),
    Patch(
        "the host's waiting",
        "FSDP1 lets the host wait for the gather before the last (limit_all_gathers); a CPU's events do nothing",
        "torch.cpu:Event",
        (),
        replacements.logged_event,
        _is_sharded,
    ),
    Patch(
        "gathered parameters that another stream uses",
        "FSDP1 tells the allocator so, which then waits before it reuses the block; not for a CPU's tensors",
        "torch.distributed.fsdp._flat_param:_no_dispatch_record_stream",
        ("tensor", "stream"),
        replacements.logged_use,
        _is_flat,
    ),
    Patch(
        "gradients that another stream uses",
        "the same for whole gradients, made on the model's stream and reduced on another",
        "torch.distributed.fsdp._runtime_utils:_no_dispatch_record_stream",
        ("tensor", "stream"),
        replacements.logged_use,
        _is_flat,
    ),
    Patch(
        "gradient buckets",
        "DistributedDataParallel's C++ reducer reads tensors' data; its own function cuts the buckets",
        "torch.distributed:_compute_bucket_assignment_by_size",
        (),
        None,
        lambda settings: settings.strategy == "ddp",
    ),
    Patch(
        "gradients summed in place",
        "the autograd engine sums in place only without modes; the second sum takes over the first one's storage",
        "torch.autograd.graph:_engine_run_backward",
        ("t_outputs",),
        None,
    ),
    Patch(
        "who else holds a gradient",
        "the engine may sum in place only what nothing else holds: the counts that it checks itself",
        "torch._C:_storage_Use_Count",
        (),
        None,
    ),
    Patch(
        "units of a sharded model",
        "accelerate's own function cuts them; a stand-in gives it what it reads of an accelerator",
        "accelerate.utils.fsdp_utils:fsdp2_prepare_model",
        ("accelerator", "model"),
        None,
        _is_fsdp,
    ),
    Patch(
        "which layers are quantised",
        "transformers' own function swaps them, and the fakes take their places",
        "transformers.integrations.bitsandbytes:replace_with_bnb_linear",
        ("model", "modules_to_not_convert", "quantization_config"),
        None,
        _is_quantised,
    ),
)


@contextlib.contextmanager
def installed(situation: Situation) -> Iterator[None]:
    """The patches that these settings need, until the end of the block.

    Raises:
        TraceUnavailable: a library differs from what a patch expects.
    """
    with contextlib.ExitStack() as undo:
        for patch in PATCHES:
            if not patch.needed(situation.settings):
                continue
            holder, name, value = patch.holder()
            if patch.make is not None:
                setattr(holder, name, patch.make(value, situation))
                undo.callback(setattr, holder, name, value)
        yield
