"""`make merge`: an adapter merged into the 16-bit weights of its base, one tensor at a time.

A 70B needs the RAM of one output file, one tensor in fp32 and the adapter: the model is on the
meta device (`AdaptedModel`), and the base's files are read, merged and written tensor by tensor
(`MergedWeights`).

A QLoRA adapter was trained on NF4 weights, which are not the base's files. Merged into the
weights that NF4 stands for (`dequantized`) the model computes what was trained; merged into the
original ones it is off by NF4's rounding, some 9% of their size.
"""

import contextlib
import copy
import json
import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from sft_play.answers import Answer
from sft_play.data.masks.image_processor import copy_processor_files
from sft_play.errors import ConfigError, ModelError
from sft_play.finished.respond import build_run_renderer, image_source
from sft_play.finished.run import (
    MERGE_FILE,
    MERGED_FOLDER,
    FinishedRun,
    MergeBase,
    base_model_folder,
    find_merged_model,
    next_command_line,
    require_faithful_merge,
    require_mergeable,
    require_space,
    staged_folder,
)
from sft_play.log import one_line
from sft_play.models.config_json import base_weights_identity
from sft_play.models.families import dequantised_config
from sft_play.planner.memory.estimate import MAX_WEIGHTS_FILE_BYTES
from sft_play.process.waiting import report_each
from sft_play.runs.folder import read_json, read_summary, write_json
from sft_play.runs.lookup import lock_run
from sft_play.text import format_duration, format_size
from sft_play.training.checkpoints.card import CardFacts, WeightsKind, write_card
from sft_play.training.checkpoints.checkpoints import record_digests
from sft_play.training.checkpoints.full_state_dict import (
    ADAPTER_FILE,
    is_duplicate_name,
    model_names_by_saved_name,
    tied_weight_names,
)
from sft_play.training.checkpoints.model_saving import (
    FileTensor,
    apply_key_mapping,
    open_tensors,
    saved_dtype_rule,
    set_dtype,
    set_stop_tokens,
    write_tensors,
)
from sft_play.training.measure.exact_match import collect_stop_ids
from sft_play.training.model.model_loading import (
    TORCH_DTYPES,
    quantization_config,
    silence_load_report,
)
from sft_play.training.model.nf4_experts import nf4_roundtrip
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.model_spec import (
    ModelSpec,
    build_meta_model,
    build_model_spec,
    peft_loading_warning,
    resized_spec,
)
from sft_play.training.prepare.tokenizer import added_token_rows

logger = logging.getLogger(__name__)

# A run's model with its adapter, on the meta device: PEFT merges each layer when its base weight
# comes by.
#
# Nothing but the adapter has memory. PEFT itself computes what a merged layer is (rsLoRA, DoRA and
# transposed layers are its business), in fp32.


class AdaptedModel:
    """The run's model on the meta device with its adapter, whose layers are merged as base weights
    come by."""

    def __init__(self, run: FinishedRun, *, base: MergeBase | None) -> None:
        self.run, self.base = run, base
        self.precision = run.plan().precision
        self.tokenizer = AutoTokenizer.from_pretrained(
            run.weights, trust_remote_code=run.config.model.trust_remote_code
        )
        self.model_spec = build_model_spec(
            run.config,
            self.precision,
            tokenizer_size=len(self.tokenizer),
            new_rows=added_token_rows(self.tokenizer, run.config),
        )
        self.base_model = self._build_meta_model()
        tower = self.model_spec.text_tower
        self.key_mapping: dict[str, str] | None = None if tower is None else tower.key_mapping
        # The name in the base's files of a tensor of the model, where they hold a larger class.
        self.to_full_name: Callable[[str], str] = str if tower is None else tower.to_full_name
        tied_sources = dict(getattr(self.base_model, "all_tied_weights_keys", None) or {})
        self.quantized_names: set[str] = set()
        if base == "dequantized":
            from transformers.quantizers import AutoHfQuantizer

            # transformers decides which layers it leaves alone (the head, what a class excludes):
            # it is asked again
            model = self._build_meta_model()
            quantizer = AutoHfQuantizer.from_config(
                quantization_config(
                    self.precision, quantizes_experts=run.config.tuning.has_quantized_experts
                ),
                pre_quantized=False,
            )
            quantizer.preprocess_model(
                model=model, dtype=TORCH_DTYPES[self.precision.load], device_map=None
            )
            self.quantized_names = {
                name
                for name, _ in model.named_parameters()
                if quantizer.param_needs_quantization(model, name)
            }
        self.adapted_layers: dict[str, Any] = {}
        self.fully_trained_tensors: dict[str, torch.Tensor] = {}
        # Embeddings whose rows were trained in part, by name: the indices of these rows, and the
        # rows.
        self.trained_embedding_rows: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._load_adapter(self._build_meta_model())
        shared = [
            source
            for name, source in tied_sources.items()
            if {name, source} <= self.adapted_layers.keys()
        ]
        if shared:
            raise ModelError(
                f"the adapter cannot be merged: blocks of a {type(self.base_model).__name__} share"
                f" {shared[0]}, and each has changes of its own to it;"
                " serve the base with the adapter"
            )
        # Tensors that the base ties to others and that training made different, with the name of
        # the other.
        self.untied_sources: dict[str, str] = {}
        for name, source in tied_sources.items():
            trained = [
                self.fully_trained_tensors[key]
                for key in (name, source)
                if key in self.fully_trained_tensors
            ]
            if len(trained) == 1 or (trained and not torch.equal(*trained)):
                self.untied_sources[name] = source
        self.tied_tensors = frozenset(tied_sources) - set(self.untied_sources)

    def _build_meta_model(self) -> Any:
        return build_meta_model(
            replace(resized_spec(self.model_spec), peft_config=None),
            trust_remote_code=self.run.config.model.trust_remote_code,
        ).eval()

    def _load_adapter(self, model: Any) -> None:
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import ParamWrapper
        from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
        from safetensors.torch import load_file

        file = self.run.weights / ADAPTER_FILE
        # a product of two bf16 factors, or a sum with a bf16 weight, would round what was trained
        saved = {
            self.to_full_name(name): tensor.float()
            for name, tensor in load_file(file).items()
            if not is_duplicate_name(name)
        }
        peft_model = get_peft_model(model, cast("Any", self.model_spec.peft_config))
        names = model_names_by_saved_name(peft_model)
        mismatched_names = sorted(set(names) ^ set(saved))
        if mismatched_names:
            raise ModelError(
                f"{file} is the adapter of another model:"
                f" {mismatched_names[0]} is in one of them only"
            )
        try:
            # PEFT's own loading would move what it reads to where the base is, which is nowhere
            peft_model.load_state_dict(
                {names[name]: saved[name] for name in saved}, strict=False, assign=True
            )
        except RuntimeError as error:
            raise ModelError(
                f"{file} is the adapter of another model: {one_line(str(error), limit=300)}"
            ) from None
        for module_name, module in peft_model.get_base_model().named_modules():
            if isinstance(module, ParamWrapper):  # nested, where a module has several such weights
                self.adapted_layers[
                    f"{module_name.removesuffix('.base_layer')}.{module.parameter_name}"
                ] = module
            elif isinstance(module, LoraLayer):
                self.adapted_layers[f"{module_name}.weight"] = module
            elif isinstance(module, ModulesToSaveWrapper):
                for name, parameter in module.modules_to_save["default"].named_parameters():
                    self.fully_trained_tensors[f"{module_name}.{name}"] = parameter.detach()
            elif (
                isinstance(module, TrainableTokensWrapper)
                and module.token_adapter.tied_adapter is None
            ):
                adapter = module.token_adapter
                self.trained_embedding_rows[f"{module_name}.weight"] = (
                    adapter.token_indices["default"],
                    adapter.trainable_tokens_delta["default"].detach(),
                )

    def trained_shape(self, name: str, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a tensor of the base has after training: embeddings may have more rows."""
        if name in self.trained_embedding_rows:
            return (
                max(base_shape[0], max(self.trained_embedding_rows[name][0]) + 1),
                *base_shape[1:],
            )
        if name in self.fully_trained_tensors:
            return tuple(self.fully_trained_tensors[name].shape)
        return base_shape

    def trained_tensor(self, name: str, base_tensor: torch.Tensor) -> torch.Tensor:
        """Compute a tensor of the model as it is after training, from the base's; in fp32 where
        training changed it. Raises ModelError where the adapter makes values that are not
        finite."""
        if name in self.fully_trained_tensors:
            return self.fully_trained_tensors[name]
        if name in self.trained_embedding_rows:
            row_indices, trained = self.trained_embedding_rows[name]
            table = base_tensor.new_zeros(
                self.trained_shape(name, tuple(base_tensor.shape)), dtype=torch.float32
            )
            table[: len(base_tensor)] = base_tensor
            table[row_indices] = trained
            return table
        tensor = base_tensor
        if name in self.quantized_names:
            # from the dtype in which training loaded it before it quantised: from fp32 other values
            # would round otherwise
            tensor = nf4_roundtrip(base_tensor.to(TORCH_DTYPES[self.precision.load]))
        if name not in self.adapted_layers:
            return tensor
        layer = self.adapted_layers[name]
        base_layer = layer.get_base_layer()
        parameter_name = getattr(layer, "parameter_name", "weight")
        meta_weight = getattr(base_layer, parameter_name)
        setattr(
            base_layer, parameter_name, nn.Parameter(tensor.float().clone(), requires_grad=False)
        )
        try:
            # merges a copy, and raises ValueError unless all of it is finite (PEFT 0.21)
            layer.merge(safe_merge=True)
            return getattr(base_layer, parameter_name).data
        except ValueError as error:
            raise ModelError(f"the adapter makes values that are not finite: {error}") from None
        finally:
            # back to the meta device: kept in its layer, every merged weight would stay in RAM
            layer.merged_adapters.clear()
            setattr(base_layer, parameter_name, meta_weight)


# --------------------------------------------------------------------------------------------------
# The merged weights as files, from the base's files tensor by tensor.

# Floating-point dtypes as safetensors names them; tensors of others pass through as they are.
_FLOAT_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def main_dtype(tensors: Iterable[FileTensor]) -> str:
    """Find the dtype of most elements, as safetensors names it."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += math.prod(tensor.shape)
    return elements.most_common(1)[0][0]


class MergedWeights:
    """The merged weights, written from the base's files tensor by tensor. Raises ModelError where a
    trained layer cannot be taken apart into the files' tensors again, or the result would not have
    the class's names and shapes.
    """

    def __init__(self, adapted: AdaptedModel, base_folder: Path, dtype: torch.dtype | None) -> None:
        self._adapted, self._requested_dtype = adapted, dtype
        self._base_tensors = open_tensors(base_folder)
        file_dtype = main_dtype(self._base_tensors.values())
        if file_dtype not in _FLOAT_DTYPES:
            raise ModelError(
                f"{base_folder} holds weights in {file_dtype}, into which no adapter can be merged"
            )
        # Dtype of the merged weights; tensors that the class keeps in fp32 stay so.
        self.dtype = dtype or _FLOAT_DTYPES[file_dtype]
        # The most bytes that the files can have: as if everything that was trained whole came on
        # top.
        tensors = [
            *self._base_tensors.values(),
            *adapted.fully_trained_tensors.values(),
            *(rows for _, rows in adapted.trained_embedding_rows.values()),
        ]
        self.max_bytes = self.dtype.itemsize * sum(math.prod(tensor.shape) for tensor in tensors)
        # What each tensor of the model comes from, by its name there. transformers' own table
        # decides, as it does when loading, which is a private part of it (5.23): files of older
        # layouts get today's names here, and experts that a file holds one by one are stacked into
        # one tensor.
        self._sources, model = dict[str, "_Source"](), adapted.base_model
        transforms = get_model_conversion_mapping(model, adapted.key_mapping)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        state = model.state_dict()
        # the tenth expert comes after the ninth
        for key in sorted(self._base_tensors, key=dot_natural_key):
            target, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, state
            )
            # only what a converter takes has a pattern; a mere renaming has none
            source = self._sources.setdefault(
                target, _Source(adapted, target, by_pattern.get(pattern))
            )
            source.patterns[key], source.shapes[key] = pattern, tuple(self._base_tensors[key].shape)
        # files hold a tied tensor once, under its source's name
        unwritten = {*adapted.untied_sources, *adapted.tied_tensors}
        self._written_sources = [
            source for target, source in self._sources.items() if target not in unwritten
        ]
        self._trained_targets = {
            *adapted.adapted_layers,
            *(adapted.fully_trained_tensors.keys() - unwritten),
            *adapted.trained_embedding_rows,
            *adapted.quantized_names,
        }
        model_name = type(adapted.base_model).__name__
        for target in sorted(self._trained_targets):
            if target not in self._sources or not self._sources[target].can_be_split():
                raise ModelError(
                    f"the adapter cannot be merged: {target} of a {model_name} is made of "
                    "tensors of its files in a way that has no way back;"
                    " serve the base with the adapter"
                )
        misfit = self._find_misfit()
        if misfit is not None:
            raise ModelError(f"the merged weights would not be those of a {model_name}: {misfit}")

    def write(self, folder: Path, file_bytes: int) -> None:
        """Write the weights into a folder."""
        shapes = dict(self._output_shapes())
        tensors = report_each("Merging", self._merged_tensors(), unit="tensors", count=len(shapes))
        write_tensors(
            folder, tensors, shapes=shapes, dtype_rule=self._saved_dtype, max_file_bytes=file_bytes
        )

    def _find_misfit(self) -> str | None:
        """Find tensors that the class would miss, not know, or have in another shape, as
        transformers loads them; None if there are none."""
        adapted, tensors = self._adapted, dict[str, torch.Tensor]()
        for name, shape in self._output_shapes():
            if name in tensors:
                return f"two tensors would be {name}"
            tensors[name] = torch.empty(shape, device="meta")
        for source in self._sources.values():
            # transformers joins these on the CPU wherever the model is, as Qwen4's table of
            # n-grams: it needs data
            if (
                getattr(source.converter, "force_cpu", False)
                and source.patterns.keys() <= tensors.keys()
            ):
                tensors[source.target] = source.join(
                    {key: tensors.pop(key) for key in source.patterns}
                )
        model_class, extra = type(adapted.base_model), tensors.keys() - self._base_tensors.keys()
        config = copy.deepcopy(adapted.base_model.config)
        config.tie_word_embeddings = config.tie_word_embeddings and not adapted.untied_sources
        try:
            with silence_load_report():
                model, load_report = model_class.from_pretrained(
                    None,
                    config=config,
                    state_dict=tensors,
                    device_map={"": "meta"},
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    key_mapping=adapted.key_mapping,
                )
        except (RuntimeError, ValueError) as error:  # experts of different numbers cannot be joined
            return one_line(str(error), limit=300)
        problems = {
            "are missing": set(load_report["missing_keys"]) - tied_weight_names(model),
            "have another shape": {str(item[0]) for item in load_report["mismatched_keys"]},
            # the base's own unused ones are kept
            "are unknown to it": set(load_report["unexpected_keys"]) & extra,
        }
        for problem, names in problems.items():
            if names:
                return f"{len(names)} {problem}, such as {min(names)}"
        return None

    def _output_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the result. Tensors of the base keep their names, so that
        other engines read them as they read the base."""
        for source in self._written_sources:
            for key in source.patterns:
                shape = self._base_tensors[key].shape
                if source.converter is None:
                    shape = self._adapted.trained_shape(source.target, shape)
                yield key, shape
        for name, target in self._adapted.untied_sources.items():
            (key,) = self._sources[target].patterns
            yield (
                self._adapted.to_full_name(name),
                self._adapted.trained_shape(name, self._base_tensors[key].shape),
            )

    def _merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        untied_names = {target: name for name, target in self._adapted.untied_sources.items()}
        for source in self._written_sources:
            if source.target in self._trained_targets:
                parts = {key: self._base_tensors[key].read() for key in source.patterns}
                yield from source.split(
                    self._adapted.trained_tensor(source.target, source.join(parts))
                )
            else:  # one tensor at a time is in memory
                yield from ((key, self._base_tensors[key].read()) for key in source.patterns)
            if source.target in untied_names:  # what was one tensor in the base is two now
                name, (key,) = untied_names[source.target], source.patterns
                yield (
                    self._adapted.to_full_name(name),
                    self._adapted.trained_tensor(name, self._base_tensors[key].read()),
                )

    def _saved_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Choose the dtype of a tensor in the files: DTYPE= as far as the class takes it, else the
        dtype of the base's file. Raises ConfigError where fp16 cannot hold a value."""
        if self._requested_dtype is not None:
            dtype = saved_dtype_rule(self._adapted.base_model, self._requested_dtype)(name, tensor)
        elif name in self._base_tensors:
            dtype = _FLOAT_DTYPES.get(self._base_tensors[name].dtype, tensor.dtype)
        else:
            dtype = self.dtype
        if dtype == torch.float16 and float(tensor.float().abs().max()) > torch.finfo(dtype).max:
            raise ConfigError(
                f"DTYPE=fp16 cannot hold {name}, which has values above 65,504; take DTYPE=bf16"
            )
        return dtype


class _Source:
    """The tensors in the base's files that become one tensor of the model: one, or several that
    transformers joins on the way, such as a projection of all experts. `patterns` has the
    converter's pattern for each, by its name in the files.
    """

    def __init__(self, adapted: AdaptedModel, target: str, converter: Any) -> None:
        self._adapted, self.target, self.converter = adapted, target, converter
        self.patterns: dict[str, str | None] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.converter is None:
            (tensor,) = parts.values()
            return tensor
        converter, model = copy.deepcopy(self.converter), self._adapted.base_model
        for key, pattern in self.patterns.items():
            converter.add_tensor(self.target, key, pattern, parts[key])
        converted = converter.convert(self.target, model=model, config=model.config)[self.target]
        return converted[0] if isinstance(converted, list) else converted

    def split(self, joined: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split the model's tensor into the files' tensors, by their names in the files."""
        if self.converter is None:
            yield next(iter(self.patterns)), joined
            return
        names = {
            apply_key_mapping(key, self._adapted.key_mapping or {}): key for key in self.patterns
        }
        for name, tensor in revert_weight_conversion(
            self._adapted.base_model, {self.target: joined}
        ).items():
            yield names.get(name, name), tensor

    def can_be_split(self) -> bool:
        """True if joining and splitting gives the names and shapes of the files again."""
        parts = {key: torch.empty(shape, device="meta") for key, shape in self.shapes.items()}
        try:
            split_shapes = {
                key: tuple(tensor.shape) for key, tensor in self.split(self.join(parts))
            }
        except Exception:  # a conversion that has no way back, each in its own way
            return False
        return split_shapes == self.shapes


MERGE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class MergeResult(Answer):
    """What `merge_run` wrote."""

    run: Path
    path: Path
    dtype: str
    # Of a QLoRA run: which weights the adapter was added to.
    base: MergeBase | None
    layers: int
    # True if input and output embeddings, one tensor in the base, are two now.
    untied: bool
    bytes: int
    wall_s: float
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        lines = [f"Merged: {self.layers} layers"]
        if self.base is not None:
            base_note = (
                "what was trained" if self.base == "dequantized" else "not quite what was trained"
            )
            lines.append(f"Base: {self.base}, {base_note}: the adapter was trained on NF4 weights")
        lines += self.notes
        if self.untied:
            lines.append(
                "Embeddings: input and output were one tensor in the base and are two now"
                " (both were trained)"
            )
        variables = {"RUN": self.run}
        if self.path != self.run / MERGED_FOLDER:
            variables["OUT"] = self.path
        return [
            *lines,
            (
                f"Written to: {self.path} ({self.dtype}, {format_size(self.bytes)},"
                f" {format_duration(self.wall_s)})"
            ),
            next_command_line("merge-test", **variables),
        ]


def merge_run(
    run: FinishedRun,
    *,
    dtype: str | None = None,
    base: MergeBase | None = None,
    out: Path | None = None,
    replace: bool = False,
    file_bytes: int = MAX_WEIGHTS_FILE_BYTES,
) -> MergeResult:
    """Write the base with the run's adapter merged into it, as a folder that loads as any model.

    Args:
        dtype: of the merged weights, a key of `MERGE_DTYPES`; None is the base's.
        base: for a QLoRA run the weights that the adapter is added to; None is `dequantized`.
        out: the folder; None is `merged/`.
        replace: True replaces a model that is there.
        file_bytes: the size of one output file, which is held in RAM.

    Raises:
        RunFolderError: the run was trained whole and needs no merge, or the target exists.
        ConfigError: `base` is given for a run without NF4 weights, the disk is too small, or fp16
            cannot hold a value.
        ModelError: the base is gone, or does not fit the adapter.
    """
    start_time = time.monotonic()
    target = out or run.folder.path / MERGED_FOLDER
    require_mergeable(run, base, target, replace=replace)
    quiet_libraries()
    base_folder = base_model_folder(run)
    if run.is_quantized and base is None:
        base = "dequantized"
    adapted = AdaptedModel(run, base=base)
    merged_weights = MergedWeights(adapted, base_folder, MERGE_DTYPES[dtype] if dtype else None)
    dtype_name = next(
        (name for name, value in MERGE_DTYPES.items() if value == merged_weights.dtype),
        str(merged_weights.dtype),
    )
    # a merge that does not end leaves no folder, and the one before it as it was
    with staged_folder(target) as staging_folder:
        require_space(staging_folder, merged_weights.max_bytes, "the merged model needs")
        merged_weights.write(staging_folder, file_bytes)
        stop_ids = _write_configs(adapted, base_folder, staging_folder, merged_weights.dtype)
        record_digests(staging_folder)
        write_card(staging_folder, card_facts(run, adapted.model_spec, stop_ids, dtype=dtype_name))
        write_json(
            staging_folder / MERGE_FILE,
            {
                "base": adapted.base,
                "dtype": dtype_name,
                "adapter_sha256": base_weights_identity(str(run.weights), None)["sha256"],
                "test": None,
            },
        )
        size = sum(file.stat().st_size for file in staging_folder.glob("*.safetensors"))
    lost_note = peft_loading_warning(
        adapted.model_spec, trust_remote_code=run.config.model.trust_remote_code
    )
    return MergeResult(
        run.folder.path,
        target,
        dtype_name,
        adapted.base,
        len(adapted.adapted_layers),
        bool(adapted.untied_sources),
        size,
        round(time.monotonic() - start_time, 2),
        (f"Adapter: {lost_note}",) if lost_note else (),
    )


def card_facts(
    run: FinishedRun,
    model_spec: ModelSpec,
    stop_ids: list[int],
    *,
    kind: WeightsKind = "merged",
    dtype: str = "",
) -> CardFacts:
    """What the card of a finished run's weights says; `dtype` is a merged model's."""
    return CardFacts(
        kind=kind,
        name=run.folder.path.name,
        config=run.config,
        plan=run.plan(),
        model_spec=model_spec,
        manifest=run.manifest,
        summary=read_summary(run.folder.path),
        stop_ids=stop_ids,
        dtype=dtype,
    )


def _write_configs(
    adapted: AdaptedModel, base_folder: Path, folder: Path, dtype: torch.dtype
) -> list[int]:
    config = dequantised_config(read_json(base_folder / "config.json"))
    text_config = config.get("text_config") or config
    set_dtype(config, str(dtype).removeprefix("torch."))
    if adapted.untied_sources:
        config["tie_word_embeddings"] = text_config["tie_word_embeddings"] = False
    if adapted.model_spec.resize_to is not None:
        text_config["vocab_size"] = adapted.model_spec.resize_to
    (folder / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    adapted.tokenizer.save_pretrained(folder)
    stop_ids = write_generation_config(adapted.run, adapted.tokenizer, base_folder, folder)
    # code of the model's own, which config.json's auto_map names
    for file in base_folder.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    copy_processor_files(base_folder, folder, image_source(adapted.run))
    return stop_ids


def write_generation_config(
    run: FinishedRun, tokenizer: Any, source: Path, folder: Path
) -> list[int]:
    """Write the generation config of the model in `source`, with the stop tokens of training, into
    `folder`; returns the stop tokens."""
    stop_token_ids = folder_stop_ids(run, tokenizer, source)
    set_stop_tokens(folder, stop_token_ids, tokenizer.pad_token_id, source_folder=source)
    return stop_token_ids


def folder_stop_ids(run: FinishedRun, tokenizer: Any, folder: Path) -> list[int]:
    """Collect the tokens that end an answer as the run was trained: the end-of-text tokens of the
    model in `folder` (generation config, else config), and what ends an assistant's turn."""
    eos_token_ids = read_json(folder / "generation_config.json").get("eos_token_id")
    if eos_token_ids is None:
        eos_token_ids = read_json(folder / "config.json").get("eos_token_id")
    return collect_stop_ids(
        run.config.task_mode, tokenizer, build_run_renderer(run, tokenizer), eos_token_ids
    )


def ensure_whole_model_folder(run: FinishedRun, *, is_locked: bool) -> Path:
    """Find the folder with the run's whole model: its own weights, or `merged/`, which is written
    now where it is missing or of an earlier adapter. `is_locked` is True if the caller holds the
    run's lock, which a merge needs. Raises RunFolderError where a merge is not what was trained, or
    SftPlayError as `merge_run` does."""
    if not run.is_adapter:
        return run.weights
    merged = find_merged_model(run)
    if merged is not None:
        require_faithful_merge(merged, run)
        return merged
    target = run.folder.path / MERGED_FOLDER
    logger.info("The adapter is merged into its base first (%s)", target)
    with contextlib.nullcontext() if is_locked else lock_run(run.folder):
        return merge_run(run, replace=target.exists()).path


def record_merge_test(folder: Path, *, ok: bool, divergence: float, limit: float) -> None:
    """Add merge-test's verdict to the record; nothing where the folder has none: it may be
    anybody's model."""
    record = read_json(folder / MERGE_FILE)
    if record:
        record["test"] = {
            "ok": ok,
            "kl_merged": divergence,
            "kl_limit": limit,
            "date": datetime.now(UTC).isoformat("T", "seconds"),
        }
        write_json(folder / MERGE_FILE, record)
