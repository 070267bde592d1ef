"""The vision tower and projector of an image-text class, measured on the class itself: their
weights, and what a pass over pictures takes.

Sizes of pictures decide what the class computes, so whole numbers are real here; numbers with
fractions have no bytes, so that a pass at full depth takes a second.
"""

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForImageTextToText

from sft_play.data.masks.image_processor import ImageProcessorSource, load_image_processor
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.shape import LinearShape, VisionPass, VisionWeights
from sft_play.trace import kernels, patches
from sft_play.trace.settings import StepSettings
from sft_play.trace.step import quiet_process
from sft_play.trace.storages import StorageLog
from sft_play.training.model.language_model import drop_kernel_choices
from sft_play.training.model.vision_parts import PROJECTOR_NAMES, compute_image_features

# The dtype of weights in a class that is only looked at: not fp32, so that buffers which stay in
# fp32 are told from those that follow the weights.
_WEIGHT_DTYPE = torch.bfloat16
# Tokens of a picture that is measured as it is: 5 s on one core (Qwen2.5-VL, 28 blocks in windows;
# 2026-12-01); with gradients four times as slow.
MAX_MEASURED_TOKENS, MAX_TRAINED_TOKENS = 1024, 256
_INDEX_OPERATORS = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def measure_vision_weights(config_json: Mapping[str, Any], *, name: str) -> VisionWeights:
    """Count what the whole class has beside its language model. Raises ModelError: it is no class
    of images and text."""
    model = _build_on_meta(config_json, name=name, dtype=_WEIGHT_DTYPE)
    language_ids = {
        id(one)
        for part in _language_parts(model)
        for one in (*part.modules(), *part.parameters(), *part.buffers())
    }
    buffers = [one for one in model.buffers() if id(one) not in language_ids]
    return VisionWeights(
        params=sum(one.numel() for one in model.parameters() if id(one) not in language_ids),
        buffer_bytes=sum(one.nbytes for one in buffers if one.dtype != _WEIGHT_DTYPE),
        buffer_elements=sum(one.numel() for one in buffers if one.dtype == _WEIGHT_DTYPE),
        projector=tuple(
            LinearShape(path, module.in_features, module.out_features, module.bias is not None)
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and id(module) not in language_ids
            and PROJECTOR_NAMES.search(path)
        ),
        has_picture_mask=_masks_pictures(model),
    )


def measure_vision_pass(
    config_json: Mapping[str, Any],
    settings: StepSettings,
    picture: Mapping[str, torch.Tensor],
    *,
    name: str,
    is_trained: bool = False,
) -> VisionPass:
    """Run the tower over the tensors of one picture; `is_trained`: with gradients, and a backward
    pass. Raises ModelError where the class cannot look at pictures by itself."""
    model = _build_on_meta(
        config_json,
        name=name,
        dtype=getattr(torch, settings.weights),
        attn_implementation="eager" if settings.attention == "eager" else "sdpa",
    )
    try:
        return _run_pass(model, settings, picture, is_trained=is_trained)
    except Exception as error:  # code of each class
        raise ModelError(
            f"{one_line(name)}: rows with images cannot be trained on it, because what its"
            f" vision tower needs cannot be measured: {type(model).__name__} does not look at"
            f" images as this plan knows it: {type(error).__name__}:"
            f" {one_line(str(error), limit=200)}"
        ) from error


def measure_picture(
    config_json: Mapping[str, Any],
    settings: StepSettings,
    source: ImageProcessorSource,
    size: tuple[int, int],
    *,
    is_trained: bool,
) -> VisionPass:
    """Measure a pass over a picture of this width and height as the base's processor gives it; that
    over a very large one follows from two smaller ones. Raises ModelError as `measure_vision_pass`,
    or where the base has no processor."""
    processor, name = load_image_processor(source), source.location
    width, height = size
    tokens = max(1, processor.count_tokens(width, height))
    limit = MAX_TRAINED_TOKENS if is_trained else MAX_MEASURED_TOKENS
    shares = [1.0] if tokens <= limit else [limit / tokens, limit / tokens / 2]
    passes: list[tuple[int, VisionPass]] = []
    for share in shares:
        side = math.sqrt(share)
        scaled_size = (max(1, round(width * side)), max(1, round(height * side)))
        picture = processor.blank_inputs([scaled_size])
        measured = measure_vision_pass(
            config_json, settings, picture, name=name, is_trained=is_trained
        )
        passes.append((processor.count_tokens(*scaled_size), measured))
    if len({count for count, _ in passes}) < 2:  # a processor may make all of them as large
        return passes[0][1].scaled(tokens / passes[0][0])
    return _extrapolate(passes, tokens)


def _extrapolate(passes: Sequence[tuple[int, VisionPass]], tokens: int) -> VisionPass:
    """Carry on by tokens and their squares, as attention has."""
    (many, larger), (few, smaller) = passes
    sizes = {}
    for one in fields(VisionPass):
        high, low = getattr(larger, one.name) / many, getattr(smaller, one.name) / few
        growth = max(0.0, (high - low) / (many - few))
        sizes[one.name] = round(tokens * (high + growth * (tokens - many)))
    return VisionPass(**sizes)


# --- the class ------------------------------------------------------------------------------------
def _build_on_meta(
    config_json: Mapping[str, Any], *, name: str, dtype: torch.dtype, **options: Any
) -> Any:
    fields = {key: value for key, value in config_json.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(str(config_json["model_type"]), **copy.deepcopy(fields))
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(
                drop_kernel_choices(config), dtype=dtype, **options
            )
    except Exception as error:  # each class checks its config in its own way
        raise ModelError(
            f"{one_line(name)} cannot look at images: transformers has no image-text class for its"
            f" config.json (model_type {one_line(str(config_json.get('model_type')))}):"
            f" {type(error).__name__}: {one_line(str(error), limit=200)}; train rows with images on"
            " an image-text base"
        ) from None


def _language_parts(model: Any) -> list[nn.Module]:
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return [part for part in parts if part is not None]


def _masks_pictures(model: Any) -> bool:
    """Whether tokens of a picture see each other, by a mask that rows without padding have too."""
    code = inspect.unwrap(type(model.base_model).forward).__code__
    return "block_sequence_ids" in code.co_varnames


# --- the pass -------------------------------------------------------------------------------------
class _RealSizes(TorchDispatchMode):
    """Runs for real what reads no tensor without bytes, such as sizes and places of patches; enter
    it inside a FakeTensorMode. `operations` counts those of products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not any(isinstance(one, FakeTensor) for one in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _INDEX_OPERATORS:
            args = (args[0], list(_number_indices(args[1])), *args[2:])
        out = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=out)
        return out


def _number_indices(indices: Any) -> Iterator[Any]:
    """Replace true-or-false indices, whose number of places a tensor without bytes cannot know, by
    those places."""
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            yield index
        else:
            with unset_fake_temporarily():
                yield from index.nonzero(as_tuple=True)


@contextlib.contextmanager
def _pass_context(
    model: Any, settings: StepSettings, *, is_trained: bool
) -> Iterator[tuple[StorageLog, _RealSizes]]:
    log = StorageLog(
        workspace_sizes=functools.partial(kernels.workspace_sizes, on_gpu=settings.on_gpu)
    )
    dtype = settings.autocast
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_process())
        stack.enter_context(patches.install_patches(patches.TraceState(settings, log)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _load(model, is_trained=is_trained)
        sizes = stack.enter_context(_RealSizes())
        stack.enter_context(log)
        if dtype is not None:
            stack.enter_context(torch.autocast("cpu", dtype=getattr(torch, dtype)))
        yield log, sizes


def _run_pass(
    model: Any, settings: StepSettings, picture: Mapping[str, Any], *, is_trained: bool
) -> VisionPass:
    with _pass_context(model, settings, is_trained=is_trained) as (log, sizes):
        # what is there before the pass; a view of it counts as nothing new then
        for tensor in (*model.parameters(), *model.buffers(), *picture.values()):
            log.record_tensor(tensor)
        log.peak = before = log.current
        if is_trained and settings.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        with torch.set_grad_enabled(is_trained):
            output, features = compute_image_features(model, picture)
        forward = VisionPass(
            pixel_bytes=sum(one.nbytes for one in picture.values()),
            peak_bytes=log.peak - before,
            feature_bytes=log.current - before,
            operations=sizes.operations,
        )
        if not is_trained:
            return forward
        log.peak = log.current
        del output
        torch.autograd.backward(features, [torch.empty_like(one) for one in features])
        gradient_bytes = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
        backward_bytes = max(0, log.peak - before - gradient_bytes)
        return replace(forward, backward_bytes=backward_bytes)


def _load(model: Any, *, is_trained: bool) -> None:
    """Give the tower's tensors a device, without bytes. Autocast keeps its casts of those that
    train."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    fake = torch.empty_like(tensor, device="cpu")
                    store[name] = (
                        nn.Parameter(fake, is_trained) if isinstance(tensor, nn.Parameter) else fake
                    )
