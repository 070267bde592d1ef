"""The model of a run: checked on shapes before a weight is read, loaded, quantised, given its adapters.

The one seam for tuning backends: `choose_backend` decides and says why, and nobody else asks which it is.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import LoraConfig as PeftLoraConfig
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from sft_play.config.schema import RunConfig
from sft_play.data.packing import wants_packing
from sft_play.errors import BackendError, ModelError
from sft_play.facts.architecture import local_folder
from sft_play.log import one_line
from sft_play.plan.layout import SINGLE, Layout
from sft_play.plan.precision import DtypeName, Precision
from sft_play.train import repeated_keys, stream, tensor_parallel
from sft_play.train.attention import Attention, choose_attention
from sft_play.train.packable import require_packable
from sft_play.train.portable import adapter_names
from sft_play.train.tensor_parallel import Style

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
"""Where the language model's weights stand in checkpoints of image-text models, old layout and new."""
_SHOWN_NAMES = 24


@dataclass(frozen=True)
class Backend:
    """The tuning backend that runs, and what was asked for where that is another one."""

    name: str
    reason: str
    fallback_from: str | None = None


@dataclass(frozen=True)
class Blueprint:
    """What is known of the model before a weight is read: its config, class, adapters and choices."""

    hf_config: Any
    attention: Attention
    is_text_tower: bool
    peft_config: PeftLoraConfig | None
    vocab_size: int
    resize_to: int | None
    layer_class: str
    """Class name of the repeated decoder layer; empty where there is none."""
    notes: tuple[str, ...]
    tensor_plan: Mapping[str, Style] = field(default_factory=dict)
    """How modules are divided over tensor-parallel ranks; empty without such."""
    dtype: torch.dtype | None = None
    """Dtype of the base's weights as its config.json says, in which whole weights are saved; None: as they trained."""


def grown(blueprint: Blueprint) -> Blueprint:
    """The blueprint of a model whose embeddings have been resized already, as an earlier stage has saved it."""
    if blueprint.resize_to is None:
        return blueprint
    hf_config = copy.deepcopy(blueprint.hf_config)
    hf_config.vocab_size = blueprint.resize_to
    return replace(blueprint, hf_config=hf_config, resize_to=None)


def choose_backend(
    config: RunConfig, *, layout: str = "single", nodes: int = 1, launched: bool = False, staged: bool = False
) -> Backend:
    """The backend that can run here, in this layout over so many nodes.

    `launched`: this process is a rank that a launcher started; `staged`: the config is that of a stage.

    Raises:
        BackendError: the one that was asked for cannot, and no fallback was named.
    """
    if config.tuning.backend == "bnb":
        return Backend("bnb", "bnb: transformers, PEFT and bitsandbytes")
    from sft_play.train import bridge

    problem = bridge.problem(config, layout=layout, nodes=nodes, launched=launched)
    problem = "it does not carry curriculum" if staged else problem
    if problem is not None:
        return fall_back(config, problem)
    python, answer = bridge.answer_here()
    return Backend("unsloth", f"unsloth: {answer.words}, in {python}")


def fall_back(config: RunConfig, problem: str) -> Backend:
    """The backend in the place of Unsloth, which cannot run because of `problem`; raises like `choose_backend`."""
    if config.tuning.backend_fallback is None:
        raise BackendError(
            f"tuning.backend=unsloth cannot run here: {problem}; use tuning.backend=bnb, or set "
            "tuning.backend_fallback=bnb to fall back to it where Unsloth cannot run"
        )
    name = config.tuning.backend_fallback
    return Backend(name, f"{name} instead of unsloth: {problem}", fallback_from="unsloth")


def draw_blueprint(
    config: RunConfig, precision: Precision, *, tokenizer_size: int, layout: Layout = SINGLE, repeats_kv: bool = False
) -> Blueprint:
    """Everything about the model that can be checked without its weights, on the meta device.

    `repeats_kv`: sdpa is to repeat keys and values (`Plan.repeats_kv`).

    Raises:
        ModelError: the class is unknown, a target or module matches nothing, the vocabulary does not fit, or the class
            cannot be divided as the layout divides it.
        ConfigError: chats are to be packed, and the class does not keep the chats of a row apart.
    """
    whole = _whole_config(config)
    hf_config = whole.get_text_config()
    is_text_tower = hf_config is not whole
    notes = [
        f"Model: the text tower of {type(whole).__name__} is trained, as a causal language model; its adapter belongs "
        "to that class"
    ]
    notes = notes if is_text_tower else []
    model_class = _model_class(hf_config, config)
    attention = choose_attention(config, model_class, shares_rows=layout.context_parallel > 1)
    attention = attention.repeating if repeats_kv else attention
    skeleton = _skeleton(hf_config, config)
    vocab_size = skeleton.get_input_embeddings().weight.shape[0]
    resize_to = _resize(config, vocab_size, tokenizer_size)
    peft_config = None if config.tuning.mode == "full" else _peft_config(config, skeleton)
    if peft_config is not None:
        targets = sorted(peft_config.target_modules or ())
        notes.append(f"Adapters: r {peft_config.r}, alpha {peft_config.lora_alpha} on {', '.join(targets)}")
        notes += _expert_note(skeleton)
    if resize_to is not None:
        notes.append(f"Embeddings: resized from {vocab_size} to {resize_to}, the tokenizer's size")
    notes.append(f"Attention: {attention.reason}")
    if wants_packing(config):
        trusted = config.model.trust_remote_code
        notes.append(require_packable(hf_config, attention=attention.name, trust_remote_code=trusted))
    return Blueprint(
        hf_config, attention, is_text_tower, peft_config, vocab_size, resize_to, _layer_class(skeleton), tuple(notes),
        tensor_parallel.plan_of(skeleton) if layout.tensor_parallel > 1 else {},
        hf_config.dtype or whole.dtype,
    )  # fmt: skip


def _layer_class(skeleton: nn.Module) -> str:
    counts: dict[str, int] = {}
    for module in skeleton.modules():
        if isinstance(module, GradientCheckpointingLayer):
            counts[type(module).__name__] = counts.get(type(module).__name__, 0) + 1
    return max(counts, key=lambda name: counts[name], default="")


def _skeleton(hf_config: Any, config: RunConfig) -> Any:
    """The model on the meta device: names and shapes without a byte of weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # each model class checks its config in its own way
        raise ModelError(
            f"{config.model.name}: transformers cannot build a {type(hf_config).__name__} from its config.json: "
            f"{one_line(str(error), limit=300)}"
        ) from error


def location(config: RunConfig) -> str:
    """The model's folder, or its name on the hub."""
    folder = local_folder(config.model.name)
    return str(folder) if folder is not None else config.model.name


def _whole_config(config: RunConfig) -> Any:
    """The config as it was published: an image-text model's holds the language model's as its text config."""
    model, where = config.model, location(config)
    try:
        return AutoConfig.from_pretrained(where, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # each config class checks its fields in its own way
        raise ModelError(f"the config of {model.name} cannot be read: {one_line(str(error), limit=300)}") from error


def _model_class(hf_config: Any, config: RunConfig) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _refuse_other_kinds(hf_config, config)
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if config.model.trust_remote_code and getattr(hf_config, "auto_map", None):
        return nn.Module
    raise ModelError(
        f"{config.model.name} is a {type(hf_config).__name__}, which transformers does not know as a causal language "
        "model; this toolkit trains causal language models"
    )


def _refuse_other_kinds(hf_config: Any, config: RunConfig) -> None:
    """Raises ModelError for encoders, classifiers, and weights that are already quantised in another way."""
    names = list(getattr(hf_config, "architectures", None) or ())
    other = [
        name for name in names if name.endswith(("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"))
    ]
    if other:
        raise ModelError(f"{config.model.name} is a {other[0]}, not a causal language model; take the language model")
    method = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    if method is not None and not (method == "bitsandbytes" and config.tuning.mode == "qlora"):
        raise ModelError(
            f"the weights of {config.model.name} are already quantised ({one_line(str(method))}); take the unquantised "
            "model: tuning.mode=qlora quantises it while loading"
        )


def _resize(config: RunConfig, vocab_size: int, tokenizer_size: int) -> int | None:
    """The embedding's new size where the tokenizer is larger than the model; never smaller.

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
    """Every linear layer of the language model by its full name, the output head left out."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    }


def _peft_config(config: RunConfig, skeleton: nn.Module) -> PeftLoraConfig:
    lora = config.tuning.lora
    layers = linear_layers(skeleton)
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
        fan_in_fan_out=_is_transposed(layers),
    )


def _is_transposed(layers: dict[str, nn.Module]) -> bool:
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(layer, Conv1D) for layer in layers.values())


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _check_names(key: str, wanted: list[str], layers: dict[str, nn.Module], model: nn.Module) -> None:
    """Raises ModelError naming every target that matches no linear layer, with the names there are."""
    head = _head_name(model)
    problems = []
    for target in wanted:
        if head is not None and _matches(target, head):
            problems.append(f"{target} is the output head, which takes no adapter (the loss reads its weight)")
        elif not any(_matches(target, name) for name in layers):
            problems.append(f"{one_line(target)} matches nothing{_nearest(target, layers)}")
    if problems:
        there = ", ".join(sorted({name.rpartition(".")[2] for name in layers})[:_SHOWN_NAMES])
        raise ModelError(f"{key}: {'; '.join(problems)}. The linear layers are: {there}; auto takes them all")


def _nearest(target: str, names: Any) -> str:
    near = difflib.get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def _head_name(model: nn.Module) -> str | None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return next((name for name, module in model.named_modules() if module is head), None) if head is not None else None


def _check_saved(config: RunConfig, targets: list[str], model: nn.Module) -> None:
    """Raises ModelError for a module to save that matches nothing, or that has an adapter too."""
    modules = {
        name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    }
    for saved in config.tuning.lora.modules_to_save:
        if not any(_matches(saved, name) for name in modules):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in modules if not name[-1].isdigit()}))
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} matches nothing{_nearest(saved, modules)}. "
                f"The modules are: {one_line(there, limit=400)}"
            )
        if saved in targets:
            raise ModelError(f"tuning.lora: {one_line(saved)} is both in target_modules and in modules_to_save")
        inside = [layer for layer in linear_layers(model) if f".{saved}." in f".{layer}."]
        if inside:
            raise ModelError(
                f"tuning.lora.modules_to_save: {one_line(saved)} holds linear layers that get adapters or are "
                f"quantised, such as {inside[0]}; name whole modules without them: embed_tokens, lm_head, norms"
            )


def _expert_note(model: nn.Module) -> list[str]:
    """Says that experts which the library keeps as one tensor get no adapter."""
    fused = {name for name, parameter in model.named_parameters() if parameter.dim() == 3}
    return ["Adapters: the experts are one tensor per layer, not linear layers, and get none"] if fused else []


def load_model(
    config: RunConfig,
    precision: Precision,
    blueprint: Blueprint,
    *,
    device: str | None,
    storage: DtypeName | None = None,
) -> Any:
    """The model with its weights, quantised where the mode says so, on `device` (`cuda:0`, `mps`, `cpu`).

    `device` None leaves the place to DeepSpeed's ZeRO-3, which divides plain weights while they are read; NF4 weights
    are then made whole on the process's own device, and divided when the engine is made. `storage` is the dtype in
    which packed 4-bit weights are kept (None: bytes); only floating-point ones can be divided by FSDP.

    Raises:
        ModelError: the weights cannot be fetched, are no safetensors, or some are missing.
    """
    options: dict[str, Any] = {}
    if config.tuning.mode == "qlora":
        options["quantization_config"] = quantization(precision, storage)
    on_gpu = device is not None and device.startswith("cuda")
    if device is not None and (config.tuning.mode == "qlora" or device != "cpu"):
        options["device_map"] = {"": device}  # straight to the GPU: no second copy in the host's memory
    repeated_keys.use(repeated=blueprint.attention.repeats_kv)
    model = read_model(config, precision, blueprint, options)
    keep_4bit_trainable(model)
    model.config.use_cache = False
    if on_gpu:
        torch.cuda.empty_cache()  # blocks that loading left over would count in every later peak
    return model


def read_model(
    config: RunConfig, precision: Precision, blueprint: Blueprint, options: Mapping[str, Any] | None = None
) -> Any:
    """The model with its weights and the embeddings that its tokenizer needs; in the host's memory, where the `options`
    of `from_pretrained` say nothing else.

    Raises:
        ModelError: the weights cannot be fetched, are no safetensors, or some are missing.
    """
    chosen: dict[str, Any] = {
        "config": blueprint.hf_config,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": DTYPES[precision.load],
        "attn_implementation": blueprint.attention.name,
        "use_safetensors": True,
        "output_loading_info": True,
        **(options or {}),
    }
    if blueprint.is_text_tower:
        chosen["key_mapping"] = TEXT_TOWER_KEYS
    where = location(config)
    try:
        with _no_load_report():
            model, info = AutoModelForCausalLM.from_pretrained(where, **chosen)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(_weights_message(config, error)) from error
    _check_loaded(model, info, config)
    unused = [] if blueprint.is_text_tower else sorted(info.get("unexpected_keys", ()))
    if unused:
        logger.warning("Model: %d tensors of the weights are not used, such as %s", len(unused), unused[0])
    if blueprint.resize_to is not None:
        model.resize_token_embeddings(blueprint.resize_to)
    return model


@contextlib.contextmanager
def _no_load_report() -> Iterator[None]:
    """transformers' table of missing and unused tensors off: both are looked at and said here."""
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


def _weights_message(config: RunConfig, error: Exception) -> str:
    folder = local_folder(config.model.name)
    if folder is not None:
        pickled = sorted(item.name for item in folder.iterdir() if item.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            return (
                f"{folder} holds {pickled[0]} but no safetensors; pickled weights can run code and are not read: "
                "convert them (transformers: save_pretrained after loading in a place you trust)"
            )
    return f"the weights of {config.model.name} cannot be loaded: {one_line(str(error), limit=300)}"


def _check_loaded(model: Any, info: dict[str, Any], config: RunConfig) -> None:
    """Raises ModelError where weights were missing, since they would be random numbers."""
    tied = set(model.all_tied_weights_keys) if hasattr(model, "all_tied_weights_keys") else set()
    missing = sorted(set(info.get("missing_keys", ())) - tied)
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
    """What tells the base weights from others: the hub's commit, or a digest of each file's size, head and tail.

    Whole files are not read: 140 GB would take minutes, and weights that differ differ at their ends too, since a
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
    """Save the adapter, or the whole model, with its tokenizer, aside and renamed; then look that it is whole.

    Args:
        native_names: keep the tensors' names as they are in memory: a text tower saved under the names of the
            image-text model that it came from could not be loaded as what its config says.
        state_dict: the weights, where the model itself has a part of them only.
        tensors: the same one after the other, of which no more than a file is there at once where the model's tensors
            keep their names (`stream.keeps_names`).
        dtype: that of whole weights in the files (None: as they are). The model has it from then on.
        steps: optimizer steps that were taken; after more than one (the first may have a learning rate of zero) an
            adapter whose every lora_B is still zero has learned nothing.
        moved: is told the bytes of each tensor that is read back.

    Raises:
        ModelError: what was written is empty, not finite, or not what the model holds.
    """
    import shutil

    building = path.with_name(f".{path.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    try:
        write_weights(
            model, building, native_names=native_names, state_dict=state_dict, tensors=tensors, dtype=dtype
        )  # fmt: skip
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
    """Write a model's config and weights, as `save_model` says, into a folder."""
    options: dict[str, Any] = {"save_original_format": False} if native_names else {}
    dtype_of = _saved_dtypes(model, dtype)
    shapes = whole_shapes(model)
    given = tensors if tensors is not None or state_dict is None else state_dict.items()
    if tensors is not None and (native_names or stream.keeps_names(model, shapes)):
        model.save_pretrained(folder, state_dict={}, save_original_format=False)
        stream.write(folder, tensors, shapes=shapes, dtype_of=dtype_of)
    elif given is not None:
        cast = {name: tensor.to(dtype_of(name, tensor)) for name, tensor in given if tensor is not None}
        model.save_pretrained(folder, **options, state_dict=cast)
    else:  # the model's own are changed, so that no second copy is made
        for name, parameter in model.named_parameters() if dtype is not None else ():
            parameter.data = parameter.data.to(dtype_of(name, parameter))
        model.save_pretrained(folder, **options)
    if dtype is not None:
        _write_dtype(folder / "config.json", dtype)


def _saved_dtypes(model: Any, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """The dtype that each tensor is saved in: the one given, but for those that the class keeps in fp32 whatever it is
    loaded in."""
    wide = set()
    if dtype is not None:
        wide = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        is_kept = dtype is None or not tensor.is_floating_point() or any(part in name for part in wide)
        return tensor.dtype if is_kept or dtype is None else dtype

    return of


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Say in a saved config.json what its weights are: transformers says what they were in memory."""
    plain = json.loads(path.read_text(encoding="utf-8"))
    plain["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def whole_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name in a saved file and whole shape of every tensor that saving has to write, tied ones once.

    Under ZeRO-3 a parameter here is empty and knows its shape; under FSDP it is a part and knows it too.
    """
    parameters = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
    }
    if is_peft_model(model):
        return {saved: parameters[name] for saved, name in adapter_names(model).items() if name in parameters}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in (tensors | parameters).items() if name not in tied}


def check_saved_weights(
    folder: Path,
    *,
    expected: dict[str, tuple[int, ...]] | None = None,
    must_have_learned: bool = False,
    moved: Callable[[int], None] | None = None,
) -> int:
    """Bytes of the tensors saved in a folder, each read back; `moved` is told those of each.

    Raises:
        ModelError: there are none, one is empty, of another shape or not finite, one of `expected` is missing, or every
            lora_B is zero though the adapter `must_have_learned`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    size, learned = 0, not must_have_learned
    for name, tensor in _saved_tensors(folder):
        shapes[name] = tuple(tensor.shape)
        size += tensor.numel() * tensor.element_size()
        if moved is not None:
            moved(tensor.numel() * tensor.element_size())
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
            for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield name, tensors.get_tensor(name)


def _compare_saved(folder: Path, shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Raises ModelError where the saved tensors are not those of the model.

    transformers writes some models under the hub's names, with their experts apart: then the numbers are counted.
    """
    problem = None
    missing = sorted(set(expected) - set(shapes))
    if not missing:
        wrong = [name for name, shape in expected.items() if shapes[name] != shape]
        if wrong:
            problem = f"{wrong[0]} has the shape {shapes[wrong[0]]} and not {expected[wrong[0]]} ({len(wrong)} such)"
    else:
        there, wanted = (sum(math.prod(shape) for shape in found.values()) for found in (shapes, expected))
        if there != wanted:
            problem = f"{there:,} numbers of {wanted:,} are there; missing by name: {', '.join(missing[:3])}"
    if problem:
        raise ModelError(
            f"{folder}: what was saved is not the model: {problem}. The last checkpoint is kept: go on from it with "
            "make resume, or write it out with make consolidate"
        )
