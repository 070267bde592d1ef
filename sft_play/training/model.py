"""The model of a run: checked by its shapes before any weights are read, loaded, quantised, given its adapters."""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import RunConfig
from sft_play.data.packing import wants_packing
from sft_play.errors import ModelError
from sft_play.facts.architecture import local_folder
from sft_play.facts.families import MOVED_WORDS, takes_adapter
from sft_play.log import one_line
from sft_play.planner.experts import Experts
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.precision import DtypeName, Precision
from sft_play.training import experts, repeated_keys, stream, tensor_parallel
from sft_play.training.attention import Attention, choose_attention
from sft_play.training.boundaries import boundaries_of
from sft_play.training.full_state_dict import adapter_names, tied_names
from sft_play.training.packable import require_packable
from sft_play.training.tensor_parallel import Style
from sft_play.training.unmasked import padding_of
from sft_play.training.varlen import ATTENTION

logger = logging.getLogger(__name__)

DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
TEXT_TOWER_KEYS = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
"""Where checkpoints of image-text models keep the language model's weights, in the old layout and the new."""
_SHOWN_NAMES = 24


@dataclass(frozen=True)
class ModelSpec:
    """What is known of the model before any weights are read: its config, class, adapters and choices."""

    hf_config: Any
    attention: Attention
    is_text_tower: bool
    peft_config: PeftLoraConfig | None
    vocab_size: int
    resize_to: int | None
    layer_class: str
    """Class name of the repeated decoder layer; empty where there is none."""
    notes: tuple[str, ...]
    masks: bool = True
    """Whether padded rows come with an attention mask."""
    tensor_plan: Mapping[str, Style] = field(default_factory=dict)
    """How modules are divided over tensor-parallel ranks; empty without tensor parallelism."""
    dtype: torch.dtype | None = None
    """The base's dtype by its config.json, in which whole weights are saved; None saves them as they trained."""
    experts: Experts | None = None
    """How experts are multiplied; None where there are none."""


def grown(model_spec: ModelSpec) -> ModelSpec:
    """The spec of a model whose embeddings are resized already, such as one that an earlier stage has saved."""
    if model_spec.resize_to is None:
        return model_spec
    hf_config = copy.deepcopy(model_spec.hf_config)
    hf_config.vocab_size = model_spec.resize_to
    return replace(model_spec, hf_config=hf_config, resize_to=None)


def build_model_spec(
    config: RunConfig,
    precision: Precision,
    *,
    tokenizer_size: int,
    layout: Layout = SINGLE,
    repeats_kv: bool = False,
    masks: bool = True,
    by_boundaries: bool = False,
) -> ModelSpec:
    """Everything about the model that can be checked without its weights, on the meta device.

    Args:
        repeats_kv: whether sdpa repeats keys and values (`Plan.repeats_kv`).
        masks: whether padded rows come with a mask (`Step.masks`); False is measured, and refused where it matters.
        by_boundaries: whether packs are told apart without a mask (`Step.varlen`); measured too.

    Raises:
        ModelError: the class is unknown, a target or module matches nothing, the vocabulary does not fit, or the class
            cannot be divided as the layout divides it.
        ConfigError: packing is on, and the class does not keep the chats of a row apart.
    """
    whole = _whole_config(config)
    hf_config = whole.get_text_config()
    is_text_tower = hf_config is not whole
    notes = []
    if is_text_tower:
        notes.append(
            f"Model: the text tower of {type(whole).__name__} is trained, as a causal language model; its adapter "
            "belongs to that class"
        )
    model_class = _model_class(hf_config, config)
    attention = choose_attention(config, model_class, shares_rows=layout.context_parallel > 1)
    attention = attention.repeating if repeats_kv else attention
    skeleton = _skeleton(hf_config, config)
    chosen = _experts(config, hf_config, skeleton, precision)
    vocab_size = skeleton.get_input_embeddings().weight.shape[0]
    resize_to = _resize(config, vocab_size, tokenizer_size)
    peft_config = None if config.tuning.mode == "full" else _peft_config(config, skeleton)
    if peft_config is not None:
        notes += _adapter_notes(peft_config, skeleton, hf_config)
    if resize_to is not None:
        notes.append(f"Embeddings: resized from {vocab_size} to {resize_to}, the tokenizer's size")
    notes.append(f"Attention: {attention.reason}")
    if chosen is not None:
        notes.append(f"Experts: {chosen.reason}")
    trusted = config.model.trust_remote_code
    if wants_packing(config):
        notes.append(require_packable(hf_config, attention=attention.name, trust_remote_code=trusted))
    if by_boundaries and attention.name == "sdpa":
        attention = _by_boundaries(hf_config, attention, notes, trust_remote_code=trusted)
    if not masks and config.task_mode != "cpt" and layout.context_parallel == 1:
        padding = padding_of(hf_config, attention=attention.name, trust_remote_code=trusted)
        notes.append(f"Attention: {padding.reason}")
        masks = padding.masks
    return ModelSpec(
        hf_config, attention, is_text_tower, peft_config, vocab_size, resize_to, _layer_class(skeleton), tuple(notes),
        masks,
        tensor_parallel.plan_of(skeleton) if layout.tensor_parallel > 1 else {},
        hf_config.dtype or whole.dtype, chosen,
    )  # fmt: skip


def _by_boundaries(hf_config: Any, attention: Attention, notes: list[str], *, trust_remote_code: bool) -> Attention:
    """The attention that is told chats apart by their boundaries where a measurement shows that they are enough; the
    reason goes into `notes`."""
    boundaries = boundaries_of(hf_config, trust_remote_code=trust_remote_code)
    notes.append(f"Attention: {boundaries.reason}")
    return replace(attention, name=ATTENTION) if boundaries.are_enough else attention


def _adapter_notes(peft_config: PeftLoraConfig, skeleton: Any, hf_config: Any) -> list[str]:
    """Where adapters are, and where they are not."""
    targets = sorted(peft_config.target_modules or ())
    notes = [f"Adapters: r {peft_config.r}, alpha {peft_config.lora_alpha} on {', '.join(targets)}"]
    if any(parameter.dim() == 3 for parameter in skeleton.parameters()):
        notes.append("Adapters: the experts are one tensor per layer, not linear layers, and get none")
    names = {name.rpartition(".")[2] for name in linear_layers(skeleton)}
    moved = sorted(name for name in names if not takes_adapter(hf_config.model_type, name))
    if moved:
        notes.append(f"Adapters: none on {', '.join(moved)}, which PEFT would put on the experts instead")
    return notes


def _layer_class(skeleton: Any) -> str:
    """The class of the decoder layer: the most frequent one that is checkpointed, since some models have others beside
    it; empty where there is none."""
    layers = Counter(
        type(module).__name__ for module in skeleton.modules() if isinstance(module, GradientCheckpointingLayer)
    )
    return max(layers, key=lambda name: layers[name], default="")


def _experts(config: RunConfig, hf_config: Any, skeleton: Any, precision: Precision) -> Experts | None:
    """How experts are multiplied; the model's config says it to whatever builds or loads the model."""
    chosen = experts.choose_experts(config, skeleton, precision)
    if chosen is not None:
        experts.register()
        hf_config._experts_implementation = experts.name_in_transformers(chosen)
    return chosen


def _skeleton(hf_config: Any, config: RunConfig) -> Any:
    """The model on the meta device: names and shapes, no weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(
            f"{config.model.name}: transformers cannot build a {type(hf_config).__name__} from its config.json: "
            f"{one_line(str(error), limit=300)}"
        ) from error


def empty_model(model_spec: ModelSpec, *, trust_remote_code: bool) -> Any:
    """The model with its adapter, where it has one, on the meta device: names and shapes, no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_spec.hf_config, trust_remote_code=trust_remote_code)
        adapter = model_spec.peft_config
        return model if adapter is None else get_peft_model(model, copy.deepcopy(adapter))


def location(config: RunConfig) -> str:
    """The model's folder, or its name on the hub."""
    return str(local_folder(config.model.name) or config.model.name)


def _whole_config(config: RunConfig) -> Any:
    """The config as published: that of an image-text model holds the language model's as its text config."""
    model, where = config.model, location(config)
    try:
        return AutoConfig.from_pretrained(where, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # each config class checks its fields in its own way
        raise ModelError(f"the config of {model.name} cannot be read: {one_line(str(error), limit=300)}") from error


def _model_class(hf_config: Any, config: RunConfig) -> Any:
    """The class that the model is built from; `nn.Module` for code that comes with the model.

    Raises:
        ModelError: it is an encoder or a classifier, its weights are already quantised in another way, or the class is
            unknown.
    """
    others = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    other = next((name for name in getattr(hf_config, "architectures", None) or () if name.endswith(others)), None)
    if other is not None:
        raise ModelError(f"{config.model.name} is a {other}, not a causal language model; take the language model")
    method = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    if method is not None and not (method == "bitsandbytes" and config.tuning.mode == "qlora"):
        raise ModelError(
            f"the weights of {config.model.name} are already quantised ({one_line(str(method))}); take the unquantised "
            "model: tuning.mode=qlora quantises it while loading"
        )
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if config.model.trust_remote_code and getattr(hf_config, "auto_map", None):
        return nn.Module
    raise ModelError(
        f"{config.model.name} is a {type(hf_config).__name__}, which transformers does not know as a causal language "
        "model; this toolkit trains causal language models"
    )


def _resize(config: RunConfig, vocab_size: int, tokenizer_size: int) -> int | None:
    """The embedding's new size where the tokenizer is larger than the model, else None: embeddings never shrink.

    Raises:
        ModelError: adapters alone would leave the new rows untrained and unsaved.
    """
    if tokenizer_size <= vocab_size:
        return None
    saved = {name.rpartition(".")[2] for name in config.tuning.lora.modules_to_save}
    if config.tuning.mode != "full" and not {"embed_tokens", "lm_head"} <= saved and "wte" not in saved:
        raise ModelError(
            f"the tokenizer has {tokenizer_size} tokens and the model {vocab_size} embeddings; adapters would leave "
            "the new ones untrained and unsaved: set tuning.lora.modules_to_save=[embed_tokens, lm_head], use "
            "tuning.mode=full, or take the tokenizer that belongs to the model"
        )
    return tokenizer_size


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer of the language model by its full name, without the output head."""
    head = _output_head(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def _output_head(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _peft_config(config: RunConfig, skeleton: Any) -> PeftLoraConfig:
    lora, kind = config.tuning.lora, str(skeleton.config.model_type)
    layers = {
        name: layer for name, layer in linear_layers(skeleton).items() if takes_adapter(kind, name.rpartition(".")[2])
    }
    if lora.target_modules == "auto":
        targets = sorted({name.rpartition(".")[2] for name in layers})
        if not targets:
            raise ModelError(f"{config.model.name} has no linear layers that an adapter could take")
    else:
        targets = list(lora.target_modules)
        _check_names("tuning.lora.target_modules", targets, layers, skeleton)
    _check_saved(config, targets, skeleton)
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # GPT-2's weights are transposed
    )


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_names(key: str, wanted: list[str], layers: dict[str, nn.Module], model: Any) -> None:
    """Raises ModelError naming every target that matches no linear layer, with the names that exist."""
    head = _output_head(model)
    head_names = [name for name, module in model.named_modules() if module is head]
    problems = []
    for target in wanted:
        if any(_matches(target, name) for name in head_names):
            problems.append(f"{target} is the output head, which takes no adapter (the loss reads its weight)")
        elif not takes_adapter(str(model.config.model_type), target.rpartition(".")[2]):
            problems.append(f"{one_line(target)}: {MOVED_WORDS}")
        elif not any(_matches(target, name) for name in layers):
            problems.append(f"{one_line(target)} matches nothing{_nearest(target, layers)}")
    if problems:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in layers})[:_SHOWN_NAMES])
        raise ModelError(f"{key}: {'; '.join(problems)}. The linear layers are: {names}; auto takes them all")


def _nearest(target: str, names: Any) -> str:
    near = difflib.get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _check_saved(config: RunConfig, targets: list[str], model: nn.Module) -> None:
    """Raises ModelError for a module of modules_to_save that matches nothing, or that gets an adapter too."""
    modules = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    for saved in config.tuning.lora.modules_to_save:
        if not any(_matches(saved, name) for name in modules):
            names = ", ".join(sorted({name.rpartition(".")[2] for name in modules if not name[-1].isdigit()}))
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} matches nothing{_nearest(saved, modules)}. "
                f"The modules are: {one_line(names, limit=400)}"
            )
        if saved in targets:
            raise ModelError(f"tuning.lora: {one_line(saved)} is both in target_modules and in modules_to_save")
        inside = [layer for layer in linear_layers(model) if f".{saved}." in f".{layer}."]
        if inside:
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} holds linear layers that get adapters or are "
                f"quantised, such as {inside[0]}; name whole modules without them: embed_tokens, lm_head, norms"
            )


def load_model(
    config: RunConfig,
    precision: Precision,
    model_spec: ModelSpec,
    *,
    device: str | None,
    storage: DtypeName | None = None,
) -> Any:
    """The model with its weights, quantised where the mode says so, on `device` (`cuda:0`, `mps`, `cpu`).

    `device` None leaves the placement to DeepSpeed's ZeRO-3, which divides plain weights while they are read; NF4
    weights are first quantised whole on the process's own device, and divided when the engine starts. `storage` is the
    dtype in which packed 4-bit weights are kept (None: bytes); FSDP can divide only floating-point ones.

    Raises:
        ModelError: the weights cannot be fetched, are not safetensors, or some are missing.
    """
    options: dict[str, Any] = {}
    if config.tuning.mode == "qlora":
        options["quantization_config"] = quantization(precision, storage)
    on_gpu = device is not None and device.startswith("cuda")
    if device is not None and (config.tuning.mode == "qlora" or device != "cpu"):
        options["device_map"] = {"": device}  # straight to the GPU: no second copy in the host's memory
    repeated_keys.use(repeated=model_spec.attention.repeats_kv)
    model = read_model(config, precision, model_spec, options)
    keep_4bit_trainable(model)
    model.config.use_cache = False
    if on_gpu:
        torch.cuda.empty_cache()  # blocks left over from loading would count in every later peak
    return model


def read_model(
    config: RunConfig, precision: Precision, model_spec: ModelSpec, options: Mapping[str, Any] | None = None
) -> Any:
    """The model with its weights and the embeddings that its tokenizer needs, in the host's memory unless the `options`
    for `from_pretrained` say otherwise.

    Raises:
        ModelError: the weights cannot be fetched, are not safetensors, or some are missing.
    """
    chosen: dict[str, Any] = {
        "config": model_spec.hf_config,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": DTYPES[precision.load],
        "attn_implementation": model_spec.attention.name,
        "use_safetensors": True,
        "output_loading_info": True,
        **(options or {}),
    }
    if model_spec.is_text_tower:
        chosen["key_mapping"] = TEXT_TOWER_KEYS
    where = location(config)
    try:
        with _no_load_report():
            model, info = AutoModelForCausalLM.from_pretrained(where, **chosen)
    except torch.OutOfMemoryError:  # a RuntimeError that `out_of_memory_explained` words
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        folder = local_folder(config.model.name)
        files = sorted(item.name for item in folder.iterdir()) if folder is not None else []
        pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
        if pickled:
            raise ModelError(
                f"{folder} holds {pickled[0]} but no safetensors; pickled weights can run code and are not read: "
                "convert them (transformers: load them where that is safe, then save_pretrained)"
            ) from error
        problem = one_line(str(error), limit=300)
        raise ModelError(f"the weights of {config.model.name} cannot be loaded: {problem}") from error
    _check_loaded(model, info, config)
    unused = [] if model_spec.is_text_tower else sorted(info.get("unexpected_keys", ()))
    if unused:
        logger.warning("Model: %d tensors of the weights are not used, such as %s", len(unused), unused[0])
    if model_spec.resize_to is not None:
        model.resize_token_embeddings(model_spec.resize_to)
    return model


@contextlib.contextmanager
def _no_load_report() -> Iterator[None]:
    """transformers' table of missing and unused tensors switched off: both are checked and reported here."""
    table = logging.getLogger("transformers.modeling_utils")
    level = table.level
    table.setLevel(logging.ERROR)
    try:
        yield
    finally:
        table.setLevel(level)


def quantization(precision: Precision, storage: DtypeName | None = None) -> BitsAndBytesConfig:
    """NF4 with double quantisation, computing in the run's precision (https://huggingface.co/papers/2305.14314)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[precision.compute],
        **({"bnb_4bit_quant_storage": DTYPES[storage]} if storage else {}),
    )


def _check_loaded(model: Any, info: dict[str, Any], config: RunConfig) -> None:
    """Raises ModelError where weights were missing, since they would be random numbers."""
    missing = sorted(set(info.get("missing_keys", ())) - tied_names(model))
    if missing or info.get("mismatched_keys"):
        names = ", ".join([*missing, *(str(item) for item in info.get("mismatched_keys", ()))][:6])
        raise ModelError(
            f"the weights of {config.model.name} do not fill the model: {one_line(names, limit=300)} "
            f"({len(missing)} missing); the folder is incomplete, or of another architecture than its config.json says"
        )


def keep_4bit_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16.

    The first forward in eval mode without gradients would repack them, and training afterwards passes no gradient
    through a frozen layer, with one warning only (seen on bitsandbytes 0.50.2; its Linear4bit reads this flag per
    instance). Versions without the flag are not touched.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def weights_facts(name: str, hf_config: Any) -> dict[str, str | None]:
    """What identifies the base weights: the hub's commit, or a digest of each file's size, first and last MiB.

    Whole files are not read: 140 GB would take minutes, and different weights differ at their ends too, since a
    safetensors file begins with its index and training moves every tensor.
    """
    folder = local_folder(name)
    if folder is None:
        return {"path": name, "sha256": getattr(hf_config, "_commit_hash", None)}
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return {"path": str(folder), "sha256": digest.hexdigest()}


def save_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    native_names: bool = False,
    state_dict: dict[str, Any] | None = None,
    tensors: stream.Tensors | None = None,
    dtype: torch.dtype | None = None,
    steps: int = 0,
    moved: Callable[[int], None] | None = None,
) -> None:
    """Save the adapter, or the whole model, with its tokenizer: written aside, read back and checked, then renamed.

    Args:
        native_names: keep the tensors' names as they are in memory: a text tower saved under the names of the
            image-text model that it came from could not be loaded as the class that its config names.
        state_dict: the weights, where the model itself holds only a part of them.
        tensors: the same, one after the other: at most one file's worth is in memory where the model's tensors keep
            their names (`stream.keeps_names`).
        dtype: the dtype of whole weights in the files (None: unchanged). The model has it from then on.
        steps: optimizer steps taken; after more than one (the first may have a learning rate of zero) an adapter whose
            every lora_B is still zero has learned nothing.
        moved: called with the bytes of each tensor that is read back.

    Raises:
        ModelError: what was written is empty, not finite, or not what the model holds.
    """
    building = path.with_name(f".{path.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    try:
        write_weights(
            model, building, native_names=native_names, state_dict=state_dict, tensors=tensors, dtype=dtype
        )  # fmt: skip
        (building / "README.md").unlink(missing_ok=True)  # PEFT's blank form, which names the base by its path
        tokenizer.save_pretrained(building)
        check_saved_weights(building, expected=whole_shapes(model), must_have_learned=steps > 1, moved=moved)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)
    building.rename(path)


def write_weights(
    model: Any,
    folder: Path,
    *,
    native_names: bool = False,
    state_dict: dict[str, Any] | None = None,
    tensors: stream.Tensors | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's config and weights into a folder; the arguments are those of `save_model`."""
    options: dict[str, Any] = {"save_original_format": False} if native_names else {}
    if _saves_its_embeddings(model):
        options["save_embedding_layers"] = False
    dtype_of = saved_dtypes(model, dtype)
    shapes = whole_shapes(model)
    given = tensors if tensors is not None or state_dict is None else state_dict.items()
    if tensors is not None and (native_names or stream.keeps_names(model, shapes)):
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
        stream.write(folder, tensors, shapes=shapes, dtype_of=dtype_of)
    elif given is not None:
        cast = {name: tensor.to(dtype_of(name, tensor)) for name, tensor in given if tensor is not None}
        model.save_pretrained(folder, **options, state_dict=cast)
    else:  # the model's own weights are cast in place: no second copy
        for name, parameter in model.named_parameters() if dtype is not None else ():
            parameter.data = parameter.data.to(dtype_of(name, parameter))
        model.save_pretrained(folder, **options)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner may read
    if dtype is not None:
        # transformers writes the dtype that the weights had in memory
        path = folder / "config.json"
        saved_config = {**json.loads(path.read_text(encoding="utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(saved_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def set_stop_tokens(folder: Path, stop: Sequence[int], pad: int | None, *, of: Path | None = None) -> None:
    """Write the tokens that end an answer into a model's generation config, whose other settings are those of the model
    in `of`, or its own."""
    source, path = (of or folder) / "generation_config.json", folder / "generation_config.json"
    settings = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else {}
    settings |= {"eos_token_id": list(stop) if len(stop) > 1 else stop[0], "pad_token_id": pad}
    path.unlink(missing_ok=True)  # it may be a link to another model's
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _saves_its_embeddings(model: Any) -> bool:
    """Whether every embedding of a PEFT model is among its `modules_to_save`.

    PEFT would save a resized one once more, as the wrapper's `original_module` and `modules_to_save` (0.21).
    """
    from peft.utils import ModulesToSaveWrapper

    if not hasattr(model, "peft_config"):
        return False
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    return all(isinstance(layer, ModulesToSaveWrapper) for layer in layers if layer is not None)


def saved_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The dtype that each tensor is saved in: the given one, except for those that the class always keeps in fp32."""
    if dtype is None:
        return lambda name, tensor: tensor.dtype
    wide = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        is_kept = not tensor.is_floating_point() or any(part in name for part in wide)
        return tensor.dtype if is_kept else dtype

    return of


def whole_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name in a saved file and whole shape of every tensor that saving has to write, tied ones once.

    A parameter knows its whole shape under ZeRO-3, where it is empty here, and under FSDP, where it is a part.
    """
    parameters = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
    }
    if is_peft_model(model):
        return {saved: parameters[name] for saved, name in adapter_names(model).items() if name in parameters}
    tied = tied_names(model)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in (tensors | parameters).items() if name not in tied}


def check_saved_weights(
    folder: Path,
    *,
    expected: dict[str, tuple[int, ...]] | None = None,
    must_have_learned: bool = False,
    moved: Callable[[int], None] | None = None,
) -> int:
    """Bytes of the tensors saved in a folder, each read back; `moved` is called with the bytes of each.

    Raises:
        ModelError: there are none, one is empty, of another shape or not finite, one of `expected` is missing, or every
            lora_B is zero though the adapter `must_have_learned`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    size, learned = 0, not must_have_learned
    for name, tensor in _saved_tensors(folder):
        shapes[name] = tuple(tensor.shape)
        size += tensor.nbytes
        if moved is not None:
            moved(tensor.nbytes)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{folder}: {name} was saved with values that are not finite")
        learned = learned or ("lora_B" in name and bool(torch.count_nonzero(tensor)))
    if size == 0:
        raise ModelError(f"{folder}: no weights were saved")
    if expected is not None:
        _compare_saved(folder, shapes, expected)
    if not learned and any("lora_B" in name for name in shapes):
        raise ModelError(
            f"{folder}: every lora_B of the adapter is zero, so that it changes nothing; what was trained did not "
            "reach the file"
        )
    return size


def _saved_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (safe_open is not a mapping)
                yield name, tensors.get_tensor(name)


def _compare_saved(folder: Path, shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises ModelError where the saved tensors are not those of the model.

    transformers saves some models under the hub's names, with one tensor per expert: there only the total number of
    values is compared.
    """
    problem = None
    missing = sorted(set(expected) - set(shapes))
    if not missing:
        wrong = [name for name, shape in expected.items() if shapes[name] != shape]
        if wrong:
            problem = f"{wrong[0]} has the shape {shapes[wrong[0]]} and not {expected[wrong[0]]} ({len(wrong)} such)"
    else:
        saved, wanted = (sum(map(math.prod, sizes.values())) for sizes in (shapes, expected))
        if saved != wanted:
            problem = f"it holds {saved:,} of {wanted:,} values; missing by name: {', '.join(missing[:3])}"
    if problem:
        raise ModelError(
            f"{folder}: what was saved is not the model: {problem}. The last checkpoint is kept: continue from it with "
            "make resume, or write it out with make consolidate"
        )
