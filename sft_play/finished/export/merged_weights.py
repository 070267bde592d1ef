"""The merged weights as files: from the base's files tensor by tensor where that is possible, else through RAM."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_play.errors import ConfigError, ModelError
from sft_play.finished.export.adapted_model import AdaptedModel
from sft_play.log import one_line
from sft_play.training.checkpoints.full_state_dict import tied_weight_names
from sft_play.training.checkpoints.model_saving import (
    apply_key_mapping,
    expand_to_full_class,
    saved_dtype_rule,
    write_tensors,
    write_weights,
)
from sft_play.training.checkpoints.tensor_files import open_tensors
from sft_play.training.model.model_loading import TORCH_DTYPES, read_model, silence_load_report
from sft_play.units import format_gib

logger = logging.getLogger(__name__)

# Floating-point dtypes as safetensors names them; tensors of others pass through as they are.
_FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class MergedWeights:
    """The merged weights, and how they are written: from the base's files tensor by tensor where every adapted layer
    is a tensor there, else through the whole model in RAM."""

    def __init__(self, adapted: AdaptedModel, base_folder: Path, dtype: torch.dtype | None) -> None:
        self._adapted, self._base_folder = adapted, base_folder
        self._base_tensors = open_tensors(base_folder)
        self._base_facts = {
            name: (tensor.file, tensor.shape, tensor.dtype) for name, tensor in self._base_tensors.items()
        }
        self._requested_dtype = dtype
        self.dtype = dtype or self._dtype_of_files()
        """Dtype of the merged weights; tensors that the class keeps in fp32 stay so."""
        self._target_names, self._joined_tensors = _map_to_model(adapted, self._base_facts)
        streamable_targets = {target for target, is_converted in self._target_names.values() if not is_converted}
        streamable_targets |= {
            target for target, joined_tensor in self._joined_tensors.items() if joined_tensor.can_be_split()
        }
        # files hold a tied tensor once, under its source's name
        trained_whole = (
            name
            for name in adapted.fully_trained_tensors
            if name not in adapted.untied_sources and name not in adapted.tied_tensors
        )
        self._trained_targets = {
            *adapted.adapted_layers,
            *trained_whole,
            *adapted.trained_embedding_rows,
            *adapted.quantized_names,
        }
        self.is_streamed = (
            self._trained_targets <= streamable_targets and self._find_misfit(self._output_shapes()) is None
        )

    def _dtype_of_files(self) -> torch.dtype:
        counts: dict[torch.dtype, int] = {}
        for _, shape, name in self._base_facts.values():
            if name in _FLOAT_DTYPES:
                counts[_FLOAT_DTYPES[name]] = counts.get(_FLOAT_DTYPES[name], 0) + math.prod(shape)
        if not counts:
            raise ModelError(f"{self._base_folder} holds no floating-point weights to merge an adapter into")
        return max(counts, key=lambda dtype: counts[dtype])

    @property
    def max_bytes(self) -> int:
        """The most bytes that the files can have: as if everything that was trained whole came on top."""
        elements = sum(math.prod(shape) for _, shape, _ in self._base_facts.values())
        elements += sum(tensor.numel() for tensor in self._adapted.fully_trained_tensors.values())
        elements += sum(rows.numel() for _, rows in self._adapted.trained_embedding_rows.values())
        return int(elements * self.dtype.itemsize)

    def write(self, folder: Path, file_bytes: int) -> None:
        """Write the weights into a folder; raises ModelError where the files are not the class's, by names and
        shapes."""
        if self.is_streamed:
            shapes, tensors = dict(self._output_shapes()), self._merged_tensors()
            write_tensors(folder, tensors, shapes=shapes, dtype_rule=self._saved_dtype, max_file_bytes=file_bytes)
        else:
            self._write_through_model(folder)
        misfit = self._find_misfit((name, tensor.shape) for name, tensor in open_tensors(folder).items())
        if misfit is not None:
            raise ModelError(
                f"the merged weights are not those of a {type(self._adapted.base_model).__name__}: {misfit}"
            )

    def _find_misfit(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> str | None:
        """Find tensors that the class would miss, not know, or have in another shape, as transformers loads them;
        None if there are none."""
        adapted, tensors = self._adapted, dict[str, torch.Tensor]()
        for name, shape in shapes:
            if name in tensors:
                return f"two tensors would be {name}"
            tensors[name] = torch.empty(shape, device="meta")
        for target, joined_tensor in self._joined_tensors.items():
            if joined_tensor.is_joined_in_ram and set(joined_tensor.keys) <= tensors.keys():  # needs data
                tensors[target] = joined_tensor.join({key: tensors.pop(key) for key in joined_tensor.keys})
        model_class, extra = type(adapted.base_model), set(tensors) - set(self._base_facts)
        config = copy.deepcopy(adapted.base_model.config)
        config.tie_word_embeddings = config.tie_word_embeddings and not adapted.untied_sources
        try:
            with silence_load_report():
                model, load_report = model_class.from_pretrained(
                    None, config=config, state_dict=tensors, device_map={"": "meta"}, ignore_mismatched_sizes=True,
                    output_loading_info=True, key_mapping=_key_mapping(adapted),
                )  # fmt: skip
        except (RuntimeError, ValueError) as error:  # experts of different numbers cannot be joined
            return one_line(str(error), limit=300)
        problems = {
            "are missing": set(load_report["missing_keys"]) - tied_weight_names(model),
            "have another shape": {str(item[0]) for item in load_report["mismatched_keys"]},
            "are unknown to it": set(load_report["unexpected_keys"]) & extra,  # the base's own unused ones are kept
        }
        return next(
            (f"{len(names)} {problem}, such as {min(names)}" for problem, names in problems.items() if names), None
        )

    def _output_name(self, key: str) -> str | None:
        """The name of a base's tensor in the result, its own, so that other engines read it as they read the base; None
        where it has no place there."""
        target = self._target_names[key][0]
        return None if target in self._adapted.tied_tensors or target in self._adapted.untied_sources else key

    def _output_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for key, (_, shape, _) in self._base_facts.items():
            name = self._output_name(key)
            if name is not None:
                yield name, self._adapted.trained_shape(self._target_names[key][0], shape)
        by_target = {self._target_names[key][0]: shape for key, (_, shape, _) in self._base_facts.items()}
        for name, source in self._adapted.untied_sources.items():
            yield self._full_name(name), self._adapted.trained_shape(name, by_target[source])

    def _merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = {source: name for name, source in self._adapted.untied_sources.items()}
        written_targets: set[str] = set()
        for file in sorted({file for file, _, _ in self._base_facts.values()}):
            # one tensor at a time is in memory: the order of the output is that of the base's files
            for key in [key for key, facts in self._base_facts.items() if facts[0] == file]:
                name, target = self._output_name(key), self._target_names[key][0]
                if name is None:
                    continue
                if target in self._joined_tensors and target in self._trained_targets:
                    if target not in written_targets:  # all of its parts at once, whichever files have them
                        written_targets.add(target)
                        yield from self._merged_parts(target)
                    continue
                base = self._base_tensors[key].read()
                yield name, self._cast_as_in_files(self._adapted.trained_tensor(target, base), base)
                if target in sources:  # what was one tensor in the base is two now
                    untied_name = sources[target]
                    yield (
                        self._full_name(untied_name),
                        self._cast_as_in_files(self._adapted.trained_tensor(untied_name, base), base),
                    )

    def _merged_parts(self, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        joined_tensor = self._joined_tensors[target]
        parts = {key: self._base_tensors[key].read() for key in joined_tensor.keys}
        joined = self._adapted.trained_tensor(target, joined_tensor.join(parts))
        yield from ((key, self._cast_as_in_files(part, parts[key])) for key, part in joined_tensor.split(joined))

    def _full_name(self, name: str) -> str:
        tower = self._adapted.model_spec.text_tower
        return name if tower is None else tower.to_full_name(name)

    def _cast_as_in_files(self, tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return tensor.to(base.dtype) if self._requested_dtype is None else tensor

    def _saved_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        dtype = saved_dtype_rule(self._adapted.base_model, self._requested_dtype)(name, tensor)
        if dtype == torch.float16 and float(tensor.float().abs().max()) > torch.finfo(dtype).max:
            raise ConfigError(f"DTYPE=fp16 cannot hold {name}, which has values above 65,504; take DTYPE=bf16")
        return dtype

    def _write_through_model(self, folder: Path) -> None:
        """Where transformers builds an adapted layer out of several tensors of the files: load, merge, save."""
        from dataclasses import replace

        adapted = self._adapted
        size_gib = format_gib(sum(math.prod(shape) * self.dtype.itemsize for _, shape, _ in self._base_facts.values()))
        reason = "transformers joins tensors of its files into the layers that were trained"
        logger.warning("Merge: the whole model is loaded into RAM (%s GiB): %s", size_gib, reason)
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        precision = replace(adapted.precision, load=names[self.dtype])
        model = read_model(adapted.run.config, precision, adapted.model_spec)
        if adapted.untied_sources:
            model.config.tie_word_embeddings = False
            for name, source in adapted.untied_sources.items():
                parent, _, attribute = name.rpartition(".")
                untied_parameter = nn.Parameter(model.get_parameter(source).detach().clone(), requires_grad=False)
                setattr(model.get_submodule(parent), attribute, untied_parameter)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=True):
                parameter.data = adapted.trained_tensor(name, parameter.data).to(parameter.dtype)
        write_weights(model, folder, dtype=self.dtype)
        expand_to_full_class(model, folder, self._base_folder, dtype=self._requested_dtype)


def _key_mapping(adapted: AdaptedModel) -> dict[str, str] | None:
    tower = adapted.model_spec.text_tower
    return None if tower is None else tower.key_mapping


class _JoinedTensor:
    """Tensors of the base's files that transformers joins into one of the model, such as a projection of all
    experts."""

    def __init__(
        self, adapted: AdaptedModel, target: str, converter: Any, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._adapted, self._target, self._converter, self._shapes = adapted, target, converter, shapes
        self.keys: list[str] = []
        self._patterns: dict[str, str] = {}

    def add(self, key: str, pattern: str) -> None:
        """One more of its tensors, and the pattern of the converter that it matches."""
        self.keys.append(key)
        self._patterns[key] = pattern

    @property
    def is_joined_in_ram(self) -> bool:
        """True if transformers joins them on the CPU wherever the model is, as Qwen4's table of n-grams."""
        return bool(getattr(self._converter, "force_cpu", False))

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Join the files' tensors into the model's tensor."""
        from transformers.core_model_loading import dot_natural_key

        converter, model = copy.deepcopy(self._converter), self._adapted.base_model
        for key in sorted(self.keys, key=dot_natural_key):  # the tenth expert comes after the ninth
            converter.add_tensor(self._target, key, self._patterns[key], parts[key])
        converted = converter.convert(self._target, model=model, config=model.config)
        tensor = converted[self._target]
        result: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return result

    def split(self, joined: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split the model's tensor into the files' tensors, by their names in the files."""
        from transformers.core_model_loading import revert_weight_conversion

        mapping = _key_mapping(self._adapted) or {}
        names = {apply_key_mapping(key, mapping): key for key in self.keys}
        for name, tensor in revert_weight_conversion(self._adapted.base_model, {self._target: joined}).items():
            yield names.get(name, name), tensor

    def can_be_split(self) -> bool:
        """True if its tensors come out again under the names and with the shapes that the files have."""
        parts = {key: torch.empty(self._shapes[key], device="meta") for key in self.keys}
        try:
            split_shapes = {key: tuple(tensor.shape) for key, tensor in self.split(self.join(parts))}
        except Exception:  # a conversion that has no way back, each in its own way
            return False
        return split_shapes == {key: tuple(self._shapes[key]) for key in self.keys}


def _map_to_model(
    adapted: AdaptedModel, tensors: Mapping[str, tuple[Path, tuple[int, ...], str]]
) -> tuple[dict[str, tuple[str, bool]], dict[str, _JoinedTensor]]:
    """The name in the model of each tensor of the base's files, and whether it is converted on the way (joined with
    others, split, reshaped); transformers' own table decides, as it does when loading. With the tensors of each that is
    converted."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    # a private part of transformers (5.23): files of older layouts get today's names here, and experts that a file
    # holds one by one are stacked into one tensor
    model = adapted.base_model
    transforms = get_model_conversion_mapping(model, _key_mapping(adapted))
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state = model.state_dict()
    targets, joined_tensors = dict[str, tuple[str, bool]](), dict[str, _JoinedTensor]()
    by_pattern = {pattern: transform for transform in converters for pattern in transform.source_patterns}
    shapes = {key: shape for key, (_, shape, _) in tensors.items()}
    for key in sorted(tensors):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        targets[key] = (target, pattern is not None)  # a pattern is that of a converter; mere renamings have none
        if pattern is not None:
            joined_tensor = joined_tensors.setdefault(
                target, _JoinedTensor(adapted, target, by_pattern[pattern], shapes)
            )
            joined_tensor.add(key, pattern)
    return targets, joined_tensors
