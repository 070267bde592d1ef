"""`make merge`: an adapter merged into the 16-bit weights of its base, one tensor at a time.

The model is built on the meta device with the run's adapter; PEFT itself merges each layer when its base weight
arrives from the base's files (rsLoRA, DoRA, transposed layers are its business), in fp32. So a 70B needs the RAM of one
output file, one tensor in fp32 and the adapter.

A QLoRA adapter was trained on NF4 weights, which are not the base's files. Merged into the weights that NF4 stands for
(`dequantized`) the model computes what was trained; merged into the original ones it is off by NF4's rounding. Both
relative sizes are measured on the way: the rounding, and what the adapter changes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.data.masks.render import Renderer
from sft_play.errors import ConfigError, ModelError, RunFolderError
from sft_play.finished.run import FinishedRun, base_folder, next_line, tensor_shapes
from sft_play.finished.writing import built_folder
from sft_play.planner.memory.saving import FILE_BYTES
from sft_play.runs.locking import lock
from sft_play.runs.resuming import first_day
from sft_play.training import stream
from sft_play.training.card import Kind, Trained, write_card
from sft_play.training.exact_match import Configured, stop_ids
from sft_play.training.full_state_dict import ADAPTER_FILE, adapter_names, is_saved_twice
from sft_play.training.model_loading import DTYPES, TEXT_TOWER_KEYS, quantization, read_model
from sft_play.training.model_saving import saved_dtypes, set_stop_tokens, write_weights
from sft_play.training.model_spec import ModelSpec, build_model_spec
from sft_play.training.quiet import quiet_libraries
from sft_play.units import gib

logger = logging.getLogger(__name__)

MERGED = "merged"
"""The folder in a run folder that `make merge` writes."""
Base = Literal["original", "dequantized"]
SHORT_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_FROM_FILES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Floating-point dtypes as safetensors names them; tensors of others pass through as they are."""


@dataclass
class Sizes:
    """Squares summed over the layers that have an adapter, in fp32: of the base's weights, of NF4's rounding of them,
    and of what the adapter adds."""

    weights: float = 0.0
    rounding: float = 0.0
    change: float = 0.0

    @property
    def relative_rounding(self) -> float | None:
        """Size of NF4's rounding relative to the weights (Frobenius norms); None where nothing was quantised."""
        return math.sqrt(self.rounding / self.weights) if self.rounding and self.weights else None

    @property
    def relative_change(self) -> float | None:
        """Size of what the adapter adds, relative to the weights."""
        return math.sqrt(self.change / self.weights) if self.weights else None


@dataclass(frozen=True)
class Merged:
    """What `merge_run` wrote."""

    run: Path
    path: Path
    dtype: str
    base: Base | None
    """Of a QLoRA run: which weights the adapter was added to."""
    layers: int
    """Layers whose adapter was merged."""
    replaced: int
    """Tensors that training replaced whole (`tuning.lora.modules_to_save`)."""
    is_untied: bool
    """Whether input and output embeddings, one tensor in the base, are two now."""
    sizes: Sizes
    bytes: int
    is_streamed: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """A merge that is returned is whole."""
        return True

    def as_json(self) -> dict[str, Any]:
        """In plain data."""
        return {
            "ok": True,
            "run": str(self.run),
            "path": str(self.path),
            "dtype": self.dtype,
            "base": self.base,
            "layers": self.layers,
            "replaced_tensors": self.replaced,
            "untied": self.is_untied,
            "relative_adapter_change": self.sizes.relative_change,
            "relative_quantization_error": self.sizes.relative_rounding,
            "bytes": self.bytes,
            "streamed": self.is_streamed,
            "wall_s": round(self.seconds, 2),
        }

    def lines(self) -> list[str]:
        """In words."""
        change = self.sizes.relative_change
        lines = [
            f"Merged: {self.layers} layers"
            + (f", and {self.replaced} tensors that were trained whole" if self.replaced else "")
            + (f"; the adapter changes its weights by {change:.2%}" if change is not None else "")
        ]
        rounding = self.sizes.relative_rounding
        if self.base is not None and rounding is not None:
            chosen = "what was trained" if self.base == "dequantized" else "not quite what was trained"
            lines.append(
                f"Base: {self.base}, {chosen}: NF4 rounds these weights by {rounding:.2%}, which the adapter was "
                "trained on"
            )
        if self.is_untied:
            lines.append("Embeddings: input and output were one tensor in the base and are two now (both were trained)")
        lines.append(f"Written to: {self.path} ({self.dtype}, {gib(self.bytes, digits=2)} GiB, {self.seconds:.0f} s)")
        elsewhere = {} if self.path == self.run / MERGED else {"OUT": self.path}
        return [*lines, next_line("merge-test", RUN=self.run, **elsewhere)]


def merge_run(
    run: FinishedRun,
    *,
    dtype: str | None = None,
    base: Base | None = None,
    out: Path | None = None,
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> Merged:
    """Write the base with the run's adapter merged into it, as a folder that loads as any model.

    Args:
        dtype: bf16, fp16 or fp32; None: as the base's files are.
        base: of a QLoRA run, which weights to merge into; None: dequantized, which is what was trained.
        out: where to; `merged/` in the run folder where None.
        replace: an existing folder is replaced, once the new one is whole.
        file_bytes: the size of one output file, which is held in RAM.

    Raises:
        RunFolderError: the run was trained whole and needs no merge, or the target exists.
        ConfigError: `base` is given for a run without NF4 weights; the disk is too small; a value has no place in fp16.
        ModelError: the base is missing, or does not fit the adapter.
    """
    started = time.monotonic()
    target = out or run.folder.path / MERGED
    _require_mergeable(run, base, target, replace=replace)
    quiet_libraries()
    folder = base_folder(run)
    adapted = AdaptedModel(run, base=(base or "dequantized") if run.is_quantized else None)
    writer = _Writer(adapted, folder, SHORT_DTYPES[dtype] if dtype else None)
    with built_folder(target) as building:
        writer.require_disk(building)
        writer.write(building, file_bytes)
        stops = _write_configs(adapted, folder, building, writer.dtype)
        short = {value: name for name, value in SHORT_DTYPES.items()}.get(writer.dtype, str(writer.dtype))
        write_card(building, card_facts(run, adapted.model_spec, stops, dtype=short))
        size = sum(file.stat().st_size for file in building.glob("*.safetensors"))
    return Merged(
        run.folder.path, target, short, adapted.base, len(adapted.layers), len(adapted.whole), bool(adapted.untied),
        adapted.sizes, size, writer.is_streamed, time.monotonic() - started,
    )  # fmt: skip


def merged_model(run: FinishedRun) -> Path | None:
    """The run's `merged/`; None where there is none, or one that is older than the adapter."""
    config = run.folder.path / MERGED / "config.json"
    if not config.is_file():
        return None
    trained = max(file.stat().st_mtime for file in run.weights.glob("*.safetensors"))
    return config.parent if config.stat().st_mtime >= trained else None


def whole_model(run: FinishedRun, *, is_locked: bool) -> Path:
    """The folder with the run's whole model: its own weights, or `merged/`, which is written now where it is missing or
    older than the adapter.

    `is_locked`: the caller holds the run's lock, which a merge needs. Raises as `merge_run` does.
    """
    if not run.is_adapter:
        return run.weights
    merged = merged_model(run)
    if merged is not None:
        return merged
    target = run.folder.path / MERGED
    logger.info("The adapter is merged into its base first (%s)", target)
    with contextlib.nullcontext() if is_locked else lock(run.folder):
        return merge_run(run, replace=target.exists()).path


def _require_mergeable(run: FinishedRun, base: str | None, target: Path, *, replace: bool) -> None:
    if not run.is_adapter:
        raise RunFolderError(
            f"{run.folder.path} trained all weights: {run.weights} is the whole model, and nothing has to be merged"
        )
    if base is not None and not run.is_quantized:
        raise ConfigError(
            f"BASE={base} is for QLoRA runs; {run.folder.path} was trained on the base's own weights "
            f"(tuning.mode={run.config.tuning.mode})"
        )
    if target.exists() and not replace:
        raise RunFolderError(
            f"{target} exists (make ship, serve and export merge too): make merge-test compares it, FORCE=1 replaces "
            "it, OUT=FOLDER writes elsewhere"
        )
    if target.exists() and not (target / "config.json").is_file():
        raise RunFolderError(f"{target} is not a model folder and is not replaced; OUT=FOLDER writes elsewhere")


class AdaptedModel:
    """The run's model on the meta device with its adapter, whose layers are merged as base weights come by."""

    def __init__(self, run: FinishedRun, *, base: Base | None) -> None:
        self.run, self.base = run, base
        self.precision = run.plan().precision
        self.tokenizer = AutoTokenizer.from_pretrained(
            run.weights, trust_remote_code=run.config.model.trust_remote_code
        )
        self.model_spec = build_model_spec(run.config, self.precision, tokenizer_size=len(self.tokenizer))
        self.plain = self._empty()
        """The model without its adapter: its names are those of the base."""
        self.names = frozenset(self.plain.state_dict())
        """Names of all tensors of the model as transformers holds it, tied ones too."""
        tied = dict(getattr(self.plain, "all_tied_weights_keys", None) or {})
        self.quantized = self._quantized_layers() if base == "dequantized" else frozenset()
        self.layers: dict[str, Any] = {}
        """PEFT's layers, by the names of the weights that they adapt."""
        self.whole: dict[str, torch.Tensor] = {}
        """Tensors that were trained whole, by name."""
        self._fill(self._empty())
        self.untied = {name: source for name, source in tied.items() if self._are_apart(name, source)}
        """Tensors that the base ties to others and that training made different, with the name of the other."""
        self.tied = frozenset(tied) - set(self.untied)
        self.sizes = Sizes()

    def _empty(self) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self.model_spec.hf_config,
                dtype=torch.float32,
                trust_remote_code=self.run.config.model.trust_remote_code,
            )
            if self.model_spec.resize_to is not None:
                model.resize_token_embeddings(self.model_spec.resize_to, mean_resizing=False)
        return model.eval()

    def _quantized_layers(self) -> frozenset[str]:
        """Names of the weights that were NF4 while the adapter was trained: transformers decides, as it did then."""
        from transformers.quantizers import AutoHfQuantizer

        model = self._empty()
        quantizer = AutoHfQuantizer.from_config(quantization(self.precision), pre_quantized=False)
        quantizer.preprocess_model(model=model, dtype=DTYPES[self.precision.load], device_map=None)
        return frozenset(
            f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"
        )

    def _fill(self, model: Any) -> None:
        """Give the model the run's adapter, in fp32; raises ModelError where it is another model's."""
        from peft import get_peft_model
        from peft.tuners.lora import LoraLayer
        from peft.utils import ModulesToSaveWrapper
        from safetensors.torch import load_file

        file = self.run.weights / ADAPTER_FILE
        saved = {name: tensor.float() for name, tensor in load_file(file).items() if not is_saved_twice(name)}
        peft_model = get_peft_model(model, cast("Any", self.model_spec.peft_config))
        names = adapter_names(peft_model)
        lost = sorted(set(names) ^ set(saved))
        if lost:
            raise ModelError(f"{file} is the adapter of another model: {lost[0]} is in one of them only")
        for name, tensor in saved.items():
            shape = tuple(peft_model.get_parameter(names[name]).shape)
            if shape != tuple(tensor.shape):
                raise ModelError(
                    f"{file} is the adapter of another model: {name} has the shape {tuple(tensor.shape)}, and this "
                    f"model's has {shape}"
                )
        # PEFT's own loading would move what it reads to where the base is, which is nowhere
        peft_model.load_state_dict({names[name]: tensor for name, tensor in saved.items()}, strict=False, assign=True)
        inner = peft_model.get_base_model()
        for path, module in inner.named_modules():
            if isinstance(module, LoraLayer):
                self.layers[f"{path}.weight"] = module
            elif isinstance(module, ModulesToSaveWrapper):
                for name, parameter in module.modules_to_save["default"].named_parameters():
                    self.whole[f"{path}.{name}"] = parameter.detach()

    def _are_apart(self, name: str, source: str) -> bool:
        """Whether two tensors that the base ties are different after training."""
        if (name in self.whole) != (source in self.whole):
            return True
        return name in self.whole and not torch.equal(self.whole[name], self.whole[source])

    def tensor(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """The tensor of this name as it is after training, given the base's; in fp32 where training changed it."""
        if name in self.whole:
            return self.whole[name]
        layer = self.layers.get(name)
        if layer is None and name not in self.quantized:
            return base
        weight = self._as_trained(name, base)
        if layer is None:
            return weight
        merged = _merged(layer, weight)
        self.sizes.weights += float(base.double().square().sum())
        self.sizes.change += float((merged - weight).double().square().sum())
        return merged

    def _as_trained(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """The base's weight in fp32, rounded to NF4 and back where the adapter is merged into such."""
        weight = base.float()
        if self.base is None or (name not in self.quantized and name not in self.layers):
            return weight
        rounded = _through_nf4(base.to(DTYPES[self.precision.load]))
        if name in self.layers:
            self.sizes.rounding += float((rounded - weight).double().square().sum())
        return rounded if name in self.quantized else weight


def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """What PEFT makes of a layer whose base weight is this one."""
    base = layer.get_base_layer()
    empty = base.weight
    base.weight = nn.Parameter(weight.clone(), requires_grad=False)
    try:
        layer.merge(safe_merge=True)
        result: torch.Tensor = base.weight.data
    except ValueError as error:
        raise ModelError(f"the adapter makes values that are not finite: {error}") from None
    finally:
        layer.merged_adapters.clear()
        base.weight = empty
    return result


def _through_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The values that a weight has in NF4 with double quantisation, in fp32."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    quantized = Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4").to(weight.device)
    return cast("torch.Tensor", dequantize_4bit(quantized.data, quantized.quant_state)).float().reshape(weight.shape)


class _Writer:
    """Writes the merged weights: from the base's files tensor by tensor where every adapted layer is a tensor there,
    else through the whole model in RAM."""

    def __init__(self, adapted: AdaptedModel, folder: Path, dtype: torch.dtype | None) -> None:
        self._adapted, self._folder = adapted, folder
        self._tensors = tensor_shapes(folder)
        self._given = dtype
        self.dtype = dtype or self._dtype_of_files()
        """Dtype of the merged weights; tensors that the class keeps in fp32 stay so."""
        self._targets = _target_names(adapted, self._tensors)
        there = {target for target, is_converted in self._targets.values() if not is_converted}
        trained_whole = (name for name in adapted.whole if name not in adapted.untied and name not in adapted.tied)
        wanted = {*adapted.layers, *trained_whole, *adapted.quantized}
        self.is_streamed = wanted <= there
        """Whether no more than an output file was ever in RAM."""

    def _dtype_of_files(self) -> torch.dtype:
        """The floating-point dtype that most of the base's numbers have."""
        counts: dict[torch.dtype, int] = {}
        for _, shape, name in self._tensors.values():
            if name in _FROM_FILES:
                counts[_FROM_FILES[name]] = counts.get(_FROM_FILES[name], 0) + math.prod(shape)
        if not counts:
            raise ModelError(f"{self._folder} holds no floating-point weights to merge an adapter into")
        return max(counts, key=lambda dtype: counts[dtype])

    def require_disk(self, folder: Path) -> None:
        """Raises ConfigError where the disk has no place for the result."""
        numbers = sum(math.prod(shape) for _, shape, _ in self._tensors.values())
        numbers += sum(tensor.numel() for tensor in self._adapted.whole.values())
        needed, free = numbers * self.dtype.itemsize, shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"the merged model needs {gib(needed)} GiB and {folder.parent} has {gib(free)} GiB free; "
                "name another disk: OUT=FOLDER"
            )

    def write(self, folder: Path, file_bytes: int) -> None:
        """Write the weights into a folder."""
        if not self.is_streamed:
            self._write_through_model(folder)
            return
        shapes = dict(self._shapes())
        stream.write(folder, self._merged_tensors(), shapes=shapes, dtype_of=self._saved_dtype, file_bytes=file_bytes)

    def _out_name(self, key: str) -> str | None:
        """The name of a base's tensor in the result; None where it has no place there.

        The base's own names are kept, so that other engines read the result as they read the base. A text tower's
        become those of its class.
        """
        target, is_converted = self._targets[key]
        if target in self._adapted.tied or target in self._adapted.untied:
            return None
        if not self._adapted.model_spec.is_text_tower:
            return key
        return target if is_converted or target in self._adapted.names else None

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for key, (_, shape, _) in self._tensors.items():
            name, whole = self._out_name(key), self._adapted.whole.get(self._targets[key][0])
            if name is not None:
                yield name, shape if whole is None else tuple(whole.shape)
        by_target = {
            target: shape for key, (_, shape, _) in self._tensors.items() for target in [self._targets[key][0]]
        }
        for name, source in self._adapted.untied.items():
            whole = self._adapted.whole.get(name)
            yield name, by_target[source] if whole is None else tuple(whole.shape)

    def _merged_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = {source: name for name, source in self._adapted.untied.items()}
        for file in sorted({file for file, _, _ in self._tensors.values()}):
            with safe_open(file, framework="pt") as tensors:
                for key in [key for key, place in self._tensors.items() if place[0] == file]:
                    name, target = self._out_name(key), self._targets[key][0]
                    if name is None:
                        continue
                    base = tensors.get_tensor(key)
                    yield name, self._as_in_files(self._adapted.tensor(target, base), base)
                    if target in sources:  # what was one tensor in the base is two now
                        other = sources[target]
                        yield other, self._as_in_files(self._adapted.whole.get(other, base), base)

    def _as_in_files(self, tensor: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """In the base's own dtype where no other is asked for."""
        return tensor.to(base.dtype) if self._given is None else tensor

    def _saved_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """A tensor's dtype in the file, once its values are seen to fit it."""
        dtype = saved_dtypes(self._adapted.plain, self._given)(name, tensor)
        if dtype == torch.float16 and float(tensor.float().abs().max()) > torch.finfo(dtype).max:
            raise ConfigError(f"DTYPE=fp16 cannot hold {name}, which has values above 65,504; take DTYPE=bf16")
        return dtype

    def _write_through_model(self, folder: Path) -> None:
        """Where transformers builds an adapted layer out of several tensors of the files: load, merge, save."""
        from dataclasses import replace

        adapted = self._adapted
        logger.warning(
            "Merge: transformers joins tensors of this model's files into the layers that were trained, so the whole "
            "model is loaded into RAM (%s GiB)",
            gib(sum(math.prod(shape) * self.dtype.itemsize for _, shape, _ in self._tensors.values())),
        )
        names = {dtype: name for name, dtype in DTYPES.items()}
        precision = replace(adapted.precision, load=names[self.dtype])
        model = read_model(adapted.run.config, precision, adapted.model_spec)
        if adapted.untied:
            model.config.tie_word_embeddings = False
            for name, source in adapted.untied.items():
                parent, _, leaf = name.rpartition(".")
                own = nn.Parameter(model.get_parameter(source).detach().clone(), requires_grad=False)
                setattr(model.get_submodule(parent), leaf, own)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=True):
                parameter.data = adapted.tensor(name, parameter.data).to(parameter.dtype)
        write_weights(model, folder, native_names=adapted.model_spec.is_text_tower, dtype=self.dtype)


def _target_names(adapted: AdaptedModel, tensors: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """The name in the model of each tensor of the base's files, and whether it is converted on the way (joined with
    others, split, reshaped); transformers' own table decides, as it does when loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    model = adapted.plain
    key_mapping = TEXT_TOWER_KEYS if adapted.model_spec.is_text_tower else None
    transforms = get_model_conversion_mapping(model, key_mapping)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    state = model.state_dict()
    targets = {}
    for key in sorted(tensors):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        targets[key] = (target, pattern is not None)
    return targets


def card_facts(
    run: FinishedRun, model_spec: ModelSpec, stop: list[int], *, kind: Kind = "merged", dtype: str = ""
) -> Trained:
    """What the card of a finished run's weights says; `dtype` is a merged model's."""
    path = run.folder.path / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is not needed for the merge
        summary = {}
    return Trained(
        kind=kind, name=run.folder.path.name, config=run.config, plan=run.plan(), model_spec=model_spec,
        manifest=run.manifest, summary=summary, stop=stop, dtype=dtype,
    )  # fmt: skip


def _write_configs(adapted: AdaptedModel, base: Path, folder: Path, dtype: torch.dtype) -> list[int]:
    """config.json, generation config with the stop tokens of training, tokenizer, template and the model's own code.

    Returns the stop tokens.
    """
    if adapted.model_spec.is_text_tower:
        adapted.plain.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["architectures"] = [type(adapted.plain).__name__]
    else:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name of the same
    config["dtype"] = str(dtype).removeprefix("torch.")
    if adapted.untied:
        config["tie_word_embeddings"] = False
    if adapted.model_spec.resize_to is not None:
        config["vocab_size"] = adapted.model_spec.resize_to
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    adapted.tokenizer.save_pretrained(folder)
    stops = write_generation_config(adapted.run, adapted.tokenizer, base, folder)
    for file in base.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    return stops


def write_generation_config(run: FinishedRun, tokenizer: Any, source: Path, folder: Path) -> list[int]:
    """Write the generation config of the model in `source`, with the stop tokens of training, into `folder`.

    Returns the stop tokens.
    """
    generation = source / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    stops = stop_tokens(run, tokenizer, settings.get("eos_token_id", config.get("eos_token_id")))
    set_stop_tokens(folder, stops, tokenizer.pad_token_id, of=source)
    return stops


def stop_tokens(run: FinishedRun, tokenizer: Any, of_base: Configured) -> list[int]:
    """Tokens that end an answer as the run was trained: the base's own, and what ends an assistant's turn."""
    renderer = Renderer(tokenizer, run.config.data, max_seq_len=run.plan().max_seq_len, today=first_day(run.folder))
    return stop_ids(run.config.task_mode, tokenizer, renderer, of_base)
