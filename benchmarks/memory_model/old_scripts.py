"""What published scripts ran and this toolkit never does, for its tracer: FSDP1, experts in a loop, older losses, other
methods of PEFT, and loops of their own (`ScriptSettings`).

Importing it lets the tracer run them: it adds to the tables that the tracer looks into.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.memory_model.published_columns import RUN_STATE
from benchmarks.memory_model.script_settings import ScriptSettings
from benchmarks.memory_model.streams import ScriptLog, replay
from sft_play.planner.memory.step_memory import cublas_workspace_bytes
from sft_play.trace import build, patches
from sft_play.trace.patches import Patch, TraceState, log_stream
from sft_play.trace.settings import StepSettings
from sft_play.trace.step import LOOP_CLASSES, SHARDING_FUNCTIONS, TracedLoop
from sft_play.trace.storages import ReplayPeaks


def flat_sharded(model: Any, settings: Any, _: Any) -> Any:
    """The model in FSDP1's units, as accelerate wraps it: each decoder layer, trained adapters separately, and the
    rest. BACKWARD_PRE prefetch and limited all-gathers, accelerate's and the launcher's usual settings; original
    parameters."""
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision

    base = build.base_model(model)
    layers = build.require_blocks(base)
    if settings.checkpoints_wrappers:
        for layer in layers:
            layer.gradient_checkpointing = False
    low = getattr(torch, settings.mixed_precision) if settings.mixed_precision else None
    wrapped = FullyShardedDataParallel(
        model, process_group=_get_default_group(),
        auto_wrap_policy=functools.partial(_is_flat_unit, layer_class=type(layers[0]), peft=settings.peft),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=low, buffer_dtype=low) if low else None,
        device_id=torch.device("cpu"), use_orig_params=True, limit_all_gathers=True,
    )  # fmt: skip
    if low is not None:  # accelerate's upcast of trained flat parameters (`Accelerator.prepare_model`)
        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
            flat = getattr(unit, "_flat_param", None)
            if flat is not None and flat.requires_grad and flat.dtype != torch.float32:
                flat.data = flat.data.to(torch.float32)
                unit._handle._orig_param_dtype = torch.float32
    if settings.checkpointing and settings.checkpoints_wrappers:
        limit = settings.checkpointed_layers
        for layer in build.require_blocks(wrapped)[:limit]:
            layer.forward = _checkpointed(layer.forward, reentrant=settings.reentrant)
    return wrapped


def _is_flat_unit(module: nn.Module, recurse: bool, nonwrapped_numel: int, *, layer_class: type, peft: Any) -> bool:
    """A layer, or a trained leaf: PEFT's `fsdp_auto_wrap_policy` adds those, as a flat parameter trains whole."""
    if recurse:
        return True
    weight = getattr(module, "weight", None)
    is_leaf = not any(True for _ in module.children())
    is_adapter = peft is not None and is_leaf and weight is not None and weight.requires_grad
    return isinstance(module, layer_class) or is_adapter


def _checkpointed(forward: Any, *, reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        return checkpoint(functools.partial(forward, **options), *args, use_reentrant=reentrant)

    return run


def logged_use(original: Any, state: TraceState) -> Any:
    """`record_stream`: the log learns which stream still uses a block."""
    log = state.log
    assert isinstance(log, ScriptLog)
    return lambda tensor, stream: log.used(tensor, log_stream(stream))


def logged_event(original: Any, state: TraceState) -> Any:
    """Events that know their position in the log: the host can wait for one."""

    class Event(original):
        _at: int | None = None

        def record(self, stream: Any = None) -> None:
            self._at = len(state.log.events)

        def synchronize(self) -> None:
            if self._at is not None and isinstance(state.log, ScriptLog):
                state.log.wait(self._at)

    return Event


def storage_address(original: Any, _: TraceState) -> Any:
    """Addresses of meta storages that differ, and 0 for emptied ones, as FSDP1 expects."""

    def data_ptr(self: Any) -> int:
        if self.device.type != "meta":  # what fake tensors depend on
            return int(original(self))
        return int(self._cdata) if self.nbytes() else 0

    return data_ptr


def tensor_address(self: Any) -> int:
    """The address of a tensor's first element, by that of its storage."""
    return int(self.untyped_storage().data_ptr()) + int(self.storage_offset()) * int(self.element_size())


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


class _Expert(nn.Module):  # models/mixtral/modeling_mixtral.py of 4.48, MixtralBlockSparseTop2MLP
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


class ScriptLoop(TracedLoop):
    """The loop that `ScriptSettings` describe."""

    log_class = ScriptLog
    log: ScriptLog
    settings: ScriptSettings

    def __init__(self, state: TraceState, mesh: Any) -> None:
        super().__init__(state, mesh)
        self._held: Any = None
        self._passes = 0

    def run(self, skeleton: Any) -> None:
        settings, log = self.settings, self.log
        model = self.load_model(skeleton)
        if settings.empty_cache_after_load:
            log.empty_cache()
        log.start_phase("prepare")
        buckets = self.make_after_backward_hook(model)
        workspace = cublas_workspace_bytes(settings.capability)
        log.record_alloc(workspace)  # the thread that runs forward
        optimizer = self.create_optimizer(model)
        for step in range(settings.optimizer_steps):
            if settings.zero_grad_late:
                optimizer.zero_grad(set_to_none=True)
            for micro in range(settings.grad_accum):
                log.start_phase("forward", step)
                with self.gradient_sync(model, micro == settings.grad_accum - 1):
                    self.run_micro_step(model, step, settings.seq_len)
                if step == micro == 0:
                    log.record_alloc(workspace)  # autograd's own thread
                buckets()
            log.start_phase("optimizer", step)
            self.optimizer_step(model, optimizer)
            log.wait()  # a script reads the loss or the norm of a step
            if not settings.holds_until_next:
                self._held = None
            if settings.empty_cache_every_step:
                log.empty_cache()
        if settings.eval_batch:
            log.empty_cache()
            log.start_phase("evaluation", settings.optimizer_steps - 1)
            self.evaluate_batch(model, settings.eval_batch, settings.seq_len)
        log.start_phase("end", settings.optimizer_steps - 1)

    def create_optimizer(self, model: Any) -> Any:
        name = self.settings.optimizer
        if name == "lora_fa":  # freezes every lora_A when it is created (peft/optimizers/lorafa.py)
            for path, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and "lora_A" not in path)
        trained = [one for one in model.parameters() if one.requires_grad]
        if name == "sgd":
            return torch.optim.SGD(trained, lr=1e-3, foreach=True)
        if name == "adamw_32bit_bnb":
            return build.FakeStateOptimizer(trained, lambda elements: (4 * elements, 4 * elements), self.log)
        if name == "lora_fa":
            return torch.optim.AdamW(trained, lr=1e-4, foreach=False)
        return super().create_optimizer(model)

    def run_micro_step(self, model: Any, step: int, length: int) -> None:
        lengths = self.settings.lengths or (length,)
        super().run_micro_step(model, step, lengths[self._passes % len(lengths)])
        self._passes += 1

    def compute_loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        if self.settings.loss == "chunked" or not self.settings.holds_outputs:
            return super().compute_loss(model, batch)
        dtype = self.settings.autocast
        with torch.autocast("cpu", dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext():
            out = model(**batch, use_cache=False)
        self._held = out.logits
        loss: torch.Tensor = out.loss
        return loss

    @contextlib.contextmanager
    def gradient_sync(self, model: Any, is_last: bool) -> Iterator[None]:
        """FSDP1 has a name of its own for it."""
        waits = not is_last and not self.settings.sync_each_batch and hasattr(model, "no_sync")
        with model.no_sync() if waits else super().gradient_sync(model, is_last):
            yield

    def optimizer_step(self, model: Any, optimizer: Any) -> None:
        """The end of a step: FSDP1 clips by itself, and gradients may stay."""
        if self.settings.clip and hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(1.0)
        elif self.settings.clip:
            torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 1.0, foreach=True)
        optimizer.step()
        if not self.settings.zero_grad_late:
            optimizer.zero_grad(set_to_none=True)

    def replay_peaks(self) -> tuple[ReplayPeaks, ReplayPeaks]:
        """In the script's own mode and on its card, and in the other mode."""
        events, settings, when = self.log.events, self.settings, self.settings.peak_from
        grows = settings.expandable_segments
        own = replay(events, expandable_segments=grows, capacity=settings.capacity, count_from=when)
        return own, replay(events, expandable_segments=not grows, count_from=when)


def upcast(model: Any, settings: StepSettings) -> None:
    """Weights that the script held in fp32: the rest as PEFT's `prepare_model_for_kbit_training`, which recognises
    packed weights by a class that fakes lack; norms by class and name, as TRL's `peft_module_casting_to_bf16` did."""
    if not isinstance(settings, ScriptSettings):
        return
    there = {path: one for path, one in model.named_parameters() if not one.is_meta}  # others PEFT makes later
    for one in there.values() if settings.fp32_rest else ():
        one.requires_grad = False
        if one.dtype in (torch.float16, torch.bfloat16) and not hasattr(one, "quant_type"):
            one.data = one.data.to(torch.float32)
    norms = {path for path, one in model.named_modules() if isinstance(one, nn.LayerNorm) or "norm" in path}
    for path, one in there.items() if settings.fp32_norms else ():
        if path.rpartition(".")[0] in norms:
            one.data = one.data.to(torch.float32)


def composite(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None) -> Any:
    """`_scaled_dot_product_attention_math` (native/transformers/attention.cpp): half inputs are computed in fp32."""
    kind = query.dtype
    if kind in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = torch.zeros_like(square, dtype=query.dtype).masked_fill_(square.logical_not(), float("-inf"))
    query = query * root
    if key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    key = key * root
    with torch.autocast("cpu", enabled=False):
        weights = query @ key.transpose(-2, -1)
        if mask is not None:
            weights = weights + mask
        return (torch.softmax(weights, -1) @ value).to(kind)


def by_math(original: Any, state: TraceState) -> Any:
    """Attention that takes the math kernel where CUDA would, as this toolkit's runs never do."""

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(low), key.to(low), value.to(low)
        if original.choose_kernel(query, key, value, attn_mask, enable_gqa) == "math":
            return composite(query, key, value, attn_mask, is_causal, scale)
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return attention


def expanding(original: Any, state: TraceState) -> Any:
    """Attention whose script repeats K and V to all heads."""

    def attention(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        times = query.shape[1] // key.shape[1]
        if times > 1:
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        return original(query, key, value, *more, **options)

    return attention


_PEFT_MAPPING = importlib.import_module("peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING
PEFT_CONFIGS = {str(getattr(key, "value", key)): value for key, value in _PEFT_MAPPING.items()}


def script_adapters(kind: str, given: dict[str, Any]) -> Any:
    """PEFT's config of a published one; `DORA` is LoRA with `use_dora`."""
    if kind == "DORA":
        kind, given["use_dora"] = "LORA", True
    made = PEFT_CONFIGS[kind]
    names = set(inspect.signature(made.__init__).parameters)
    options = {key: value for key, value in given.items() if key in names and key not in (*RUN_STATE, "peft_type")}
    if "task_type" in names and "task_type" not in given:
        options["task_type"] = "CAUSAL_LM"
    if options.get("layers_to_transform") == []:
        options["layers_to_transform"] = None
    if kind == "ADALORA":
        options["rank_pattern"] = None
        options.setdefault("total_step", 1000)
    return made(**options)


class _HalfSoftmax(torch.autograd.Function):
    """fp16 in, fp32 out, in one kernel forward and one (with its temporary) backward."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Any:
        out = torch.empty(logits.shape, dtype=torch.float32)
        ctx.save_for_backward(out)
        ctx.dtype = logits.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,) = ctx.saved_tensors
        product = grads[0] * out
        grad = torch.empty(out.shape, dtype=ctx.dtype)
        del product
        return grad


def cuda_softmax(original: Any, _: TraceState) -> Any:
    """CUDA's softmax: fp16 to fp32 is one kernel, without an fp32 copy of the input."""

    def softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if dtype is torch.float32 and input.dtype is torch.float16:
            return _HalfSoftmax.apply(input)
        return original(input, dim=dim, dtype=dtype)

    return softmax


build.PEFT_CONFIGS |= {kind: functools.partial(script_adapters, kind) for kind in ("DORA", *PEFT_CONFIGS)}
build.LOADED_MODEL_CHANGES.append(upcast)
LOOP_CLASSES[ScriptSettings] = ScriptLoop
SHARDING_FUNCTIONS["fsdp1"] = flat_sharded
build.META_MODEL_CHANGES.append(loop_over_experts)
build.LOSS_SETUPS |= {
    "logits_float": functools.partial(_loss, floats=True),
    "logits_shifted": functools.partial(_loss, shifted=shifted_loss),
    "logits_shifted_float": functools.partial(_loss, shifted=shifted_loss, floats=True),
    "logits_shifted_half": functools.partial(_loss, shifted=half_shifted_loss),
}
patches.PATCHES += [
    Patch("softmax of fp16 in fp32", "torch.nn.functional:softmax", "input dim _stacklevel dtype",
          "one kernel on CUDA; a CPU makes an fp32 copy of the input first",
          cuda_softmax),
    *patches.conditional_patches(
        lambda settings: isinstance(settings, ScriptSettings),
        Patch("attention by PyTorch's math kernel", "torch.nn.functional:scaled_dot_product_attention",
              "query key value attn_mask dropout_p is_causal scale enable_gqa",
              "scripts leave grouped keys to PyTorch, which has no other kernel for them before Ampere and in fp32",
              by_math),
    ),
    *patches.conditional_patches(
        lambda settings: getattr(settings, "expand_kv", False),
        Patch("repeated keys and values", "torch.nn.functional:scaled_dot_product_attention", "query key value",
              "the script repeats them to all heads before attention",
              expanding),
    ),
    *patches.conditional_patches(
        lambda settings: settings.strategy == "fsdp1",
        Patch("addresses of storages", "torch:UntypedStorage.data_ptr", "",
              "FSDP1 asks by address whether a flat parameter is sharded; all fake storages have the address 0",
              storage_address),
        Patch("addresses of tensors", "torch._subclasses.fake_tensor:FakeTensor.data_ptr", "",
              "FSDP1 asks the same of tensors, whose addresses are 0 too",
              lambda original, state: tensor_address),
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
