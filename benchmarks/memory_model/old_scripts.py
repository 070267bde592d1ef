"""What published scripts ran and this toolkit never does, for its tracer: FSDP1, experts in a loop, older losses.

Importing it lets the tracer run them: it adds to the tables that the tracer looks into.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from sft_play.trace import build, patches, ranks
from sft_play.trace.patches import Patch
from sft_play.trace.replacements import Situation, named
from sft_play.trace.settings import StepSettings


# --- FSDP1 ------------------------------------------------------------------------------------------------------------
def flat_sharded(model: Any, settings: StepSettings, _: Any) -> Any:
    """The model in FSDP1's units, as accelerate wraps it: each decoder layer, trained adapters separately, and the
    rest. BACKWARD_PRE prefetch and limited all-gathers, accelerate's and the launcher's usual settings; original
    parameters."""
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision

    base = build.base_of(model)
    layers = build.decoder_layers(base)
    if settings.checkpoints_wrappers:
        for layer in layers:
            layer.gradient_checkpointing = False
    low = getattr(torch, settings.mixed_precision) if settings.mixed_precision else None
    wrapped = FullyShardedDataParallel(
        model,
        process_group=_get_default_group(),
        auto_wrap_policy=functools.partial(
            _is_flat_unit, layer_class=type(layers[0]), has_adapters=settings.peft is not None
        ),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low) if low else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        limit_all_gathers=True,
    )
    if low is not None:  # accelerate's upcast of trained flat parameters (`Accelerator.prepare_model`)
        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
            flat = getattr(unit, "_flat_param", None)
            if flat is not None and flat.requires_grad and flat.dtype != torch.float32:
                flat.data = flat.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
    if settings.checkpointing and settings.checkpoints_wrappers:
        limit = settings.checkpointed_layers
        for layer in build.decoder_layers(wrapped)[:limit]:
            layer.forward = _checkpointed(layer.forward, reentrant=settings.reentrant)
    return wrapped


def _is_flat_unit(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, *, layer_class: type, has_adapters: bool
) -> bool:
    """A layer, or a trained leaf: PEFT's `fsdp_auto_wrap_policy` adds those, as a flat parameter trains whole."""
    if recurse:
        return True
    weight = getattr(module, "weight", None)
    is_leaf = not any(True for _ in module.children())
    is_adapter = has_adapters and is_leaf and weight is not None and weight.requires_grad
    return isinstance(module, layer_class) or is_adapter


def _checkpointed(forward: Any, *, reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(functools.partial(forward, **options), *args, use_reentrant=reentrant)

    return run


def logged_use(original: Any, situation: Situation) -> Any:
    """`record_stream`: the log learns which stream still uses a block."""
    return lambda tensor, stream: situation.log.used(tensor, named(stream))


def logged_event(original: Any, situation: Situation) -> Any:
    """Events that know their position in the log: the host can wait for one."""

    class Event(original):
        """Knows its position in the log, so that the host can wait for it."""

        _at: int | None = None

        def record(self, stream: Any = None) -> None:
            self._at = len(situation.log.events)

        def synchronize(self) -> None:
            if self._at is not None:
                situation.log.wait(self._at)

    return Event


def storage_address(original: Any, _: Situation) -> Any:
    """Addresses of meta storages that differ, and 0 for emptied ones, as FSDP1 expects."""

    def data_ptr(self: Any) -> int:
        if self.device.type != "meta":  # what fake tensors depend on
            return int(original(self))
        return int(self._cdata) if self.nbytes() else 0

    return data_ptr


def tensor_address(self: Any) -> int:
    """The address of a tensor's first element, by that of its storage."""
    return int(self.untyped_storage().data_ptr()) + int(self.storage_offset()) * int(self.element_size())


# --- before transformers 5.0 ------------------------------------------------------------------------------------------
class ExpertLoop(nn.Module):
    """Experts as transformers before 5.0 ran them: a list of MLPs with linear layers of their own, one after another.
    Quantisation sees those layers, as it did then; it skips the stacked weights of today's classes."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        experts, _, hidden = stacked.gate_up_proj.shape
        width = stacked.down_proj.shape[-1]
        dtype = stacked.down_proj.dtype
        self.experts = nn.ModuleList(_Expert(hidden, width, stacked.act_fn, dtype) for _ in range(experts))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Tokens x hidden in and out; the other two are tokens x experts per token."""
        weights = top_k_weights.to(hidden_states.dtype)
        mixed = torch.zeros_like(hidden_states)
        chosen = nn.functional.one_hot(top_k_index, num_classes=len(self.experts) + 1).permute(2, 1, 0)
        share = math.ceil(top_k_index.numel() / len(self.experts))
        for expert in self.experts:
            place, token = (torch.zeros(share, dtype=torch.int64) for _ in range(2))
            out = expert(hidden_states[None, token].reshape(share, -1)) * weights[token, place, None]
            mixed.index_add_(0, token, out.to(mixed.dtype))
        del chosen
        return mixed


class _Expert(nn.Module):
    """A gated MLP (models/mixtral/modeling_mixtral.py of 4.48, MixtralBlockSparseTop2MLP)."""

    def __init__(self, hidden: int, width: int, activation: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.w2 = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.w3 = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.act_fn = activation

    def forward(self, hidden_states: Any) -> Any:
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


def loop_over_experts(model: nn.Module, settings: StepSettings) -> None:
    """Every block of stacked experts becomes an ExpertLoop, where the script ran them so."""
    if settings.experts != "loop":
        return
    for name, module in list(model.named_modules()):
        stacked = getattr(module, "gate_up_proj", None)
        if isinstance(stacked, nn.Parameter) and stacked.dim() == 3:
            with torch.device("meta"):
                model.set_submodule(name, ExpertLoop(module))


# --- losses -----------------------------------------------------------------------------------------------------------
def shifted_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    """The loss of transformers before 4.50: the fp32 logits [batch, tokens, vocabulary] are copied to shift them."""
    return half_shifted_loss(logits.float(), labels, vocab_size)


def half_shifted_loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    """The same in the logits' own dtype, or in fp32 under autocast, as CUDA's autocast takes a cross entropy."""
    shifted = logits[..., :-1, :].contiguous()
    if torch.is_autocast_enabled("cpu"):
        shifted = shifted.float()
    return nn.functional.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


def _loss(base: Any, *, shifted: Any = None, floats: bool = False) -> None:
    if shifted is not None:
        base.loss_function = shifted
    if floats:
        base.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits.float())


ranks.DIVIDED["fsdp1"] = flat_sharded
build.OLDER.append(loop_over_experts)
build.LOSSES |= {
    "logits_float": functools.partial(_loss, floats=True),
    "logits_shifted": functools.partial(_loss, shifted=shifted_loss),
    "logits_shifted_float": functools.partial(_loss, shifted=shifted_loss, floats=True),
    "logits_shifted_half": functools.partial(_loss, shifted=half_shifted_loss),
}
patches.PATCHES += [
    *patches.where(
        lambda settings: settings.strategy == "fsdp1",
        Patch("addresses of storages", "torch:UntypedStorage.data_ptr", "",
              "FSDP1 asks by address whether a flat parameter is sharded; all fake storages have the address 0",
              storage_address),
        Patch("addresses of tensors", "torch._subclasses.fake_tensor:FakeTensor.data_ptr", "",
              "FSDP1 asks the same of tensors, whose addresses are 0 too",
              lambda original, situation: tensor_address),
        Patch("gathered parameters that another stream uses",
              "torch.distributed.fsdp._flat_param:_no_dispatch_record_stream", "tensor stream",
              "FSDP1 tells the allocator so, which then waits before it reuses the block; not for a CPU's tensors",
              logged_use),
        Patch("gradients that another stream uses",
              "torch.distributed.fsdp._runtime_utils:_no_dispatch_record_stream", "tensor stream",
              "the same for whole gradients, made on the model's stream and reduced on another",
              logged_use),
        Patch("the host's waiting", "torch.cpu:Event", "",
              "FSDP1 lets the host wait for the gather before the last (limit_all_gathers); a CPU's events do nothing",
              logged_event),
    ),
]  # fmt: skip
