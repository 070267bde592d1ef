"""The model with its weights: read from safetensors, quantised for qlora, refused where any are missing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sft_play.config.schema import RunConfig
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder
from sft_play.planner.precision import DtypeName, Precision
from sft_play.process.waiting import report_wait
from sft_play.training.checkpoints.full_state_dict import embedding_layers, gather_zero3_parameter, tied_weight_names
from sft_play.training.checkpoints.model_saving import describe_broken_connection, fetch_base_folder, open_tensors
from sft_play.training.model import attention_functions, nf4_experts
from sft_play.training.prepare.model_spec import ModelSpec, model_location

logger = logging.getLogger(__name__)

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# For `from_pretrained`, which looks for an adapter beside a model's files, and then puts it on them, or loads the base
# that the adapter names in their place: none is found in this folder.
NO_ADAPTER_KWARGS = {"adapter_kwargs": {"subfolder": "none"}}


def load_model(
    config: RunConfig,
    precision: Precision,
    model_spec: ModelSpec,
    *,
    device: str | None,
    quant_storage: DtypeName | None = None,
) -> Any:
    """The model with its weights, quantised where the mode says so, on `device`; None leaves the placement to ZeRO-3,
    which divides plain weights while they are read, and NF4's when the engine starts. `quant_storage`: the dtype of
    packed 4-bit weights (None: bytes); FSDP can divide only floating-point ones. Raises ModelError: as `read_model`."""
    options: dict[str, Any] = {}
    if config.tuning.mode == "qlora":
        options["quantization_config"] = quantization_config(
            precision, quant_storage, quantizes_experts=config.tuning.has_quantized_experts
        )
    is_on_gpu = device is not None and device.startswith("cuda")
    if device is not None and (config.tuning.mode == "qlora" or device != "cpu"):
        options["device_map"] = {"": device}  # straight to the GPU: no second copy in the host's memory
    attention_functions.set_kv_repetition(enabled=model_spec.attention.repeats_kv)
    model = read_model(config, precision, model_spec, options)
    keep_4bit_trainable(model)
    model.config.use_cache = False
    if is_on_gpu:
        torch.cuda.empty_cache()  # blocks left over from loading would count in every later peak
    return model


def read_model(
    config: RunConfig, precision: Precision, model_spec: ModelSpec, options: Mapping[str, Any] | None = None
) -> Any:
    """The model with its weights and the embeddings that its tokenizer needs, in RAM unless the `options` for
    `from_pretrained` say otherwise. Raises ModelError: weights are missing, not safetensors, or cannot be fetched."""
    load_kwargs: dict[str, Any] = {
        "config": model_spec.hf_config,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": TORCH_DTYPES[precision.load],
        "attn_implementation": model_spec.attention.name,
        "use_safetensors": True,  # pickled weights can run code when they are read
        "output_loading_info": True,
        **NO_ADAPTER_KWARGS,
        **(options or {}),
    }
    if model_spec.text_tower is not None:
        load_kwargs["key_mapping"] = model_spec.text_tower.key_mapping
    model_class: Any = AutoModelForCausalLM
    source: str | None = model_location(config)
    if model_spec.is_dequantised:  # of a class of transformers' own, which alone takes tensors in place of a folder
        model_class, source = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_spec.hf_config)], None
        load_kwargs["state_dict"] = dequantised_tensors(config, reads_now="device_map" not in load_kwargs)
        del load_kwargs["trust_remote_code"]
    try:
        with silence_load_report(), report_wait(f"Loading the weights of {one_line(config.model.name)}"):
            model, loading_info = model_class.from_pretrained(source, **load_kwargs)
    except torch.OutOfMemoryError:  # a RuntimeError that `explain_out_of_memory` words
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        folder = find_model_folder(config.model.name)
        files = sorted(item.name for item in folder.iterdir()) if folder is not None else []
        pickled = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
        if pickled:
            raise ModelError(
                f"{folder} holds {pickled[0]} but no safetensors; pickled weights can run code and are not read: "
                "convert them where that is safe (save_pretrained of transformers)"
            ) from error
        connection_problem = describe_broken_connection(error) if folder is None else None
        problem = connection_problem or f"cannot be loaded: {one_line(str(error), limit=300)}"
        raise ModelError(f"the weights of {config.model.name} {problem}") from error
    model.sft_tower = model_spec.text_tower
    if model_spec.is_dequantised:  # which transformers reads beside a folder's weights only
        model.name_or_path = model.config._name_or_path = model_location(config)
        with contextlib.suppress(OSError):  # it has no generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(
                model_location(config), revision=config.model.revision
            )
    require_all_weights(model, loading_info, config.model.name)
    unused_names = [] if model_spec.text_tower is not None else sorted(loading_info.get("unexpected_keys", ()))
    if unused_names:
        logger.warning("Model: %d tensors of the weights are not used, such as %s", len(unused_names), unused_names[0])
    if model_spec.resize_to is not None:
        # new rows from the mean and covariance of the old ones (the default), where they have none of their own
        has_unset_rows = model_spec.resize_to - model_spec.vocab_size > len(model_spec.new_rows)
        model.resize_token_embeddings(model_spec.resize_to, mean_resizing=has_unset_rows)
    initialize_new_rows(model, model_spec.new_rows)
    return model


@torch.no_grad()
def initialize_new_rows(model: Any, new_rows: Mapping[int, Sequence[int]]) -> None:
    """Let the rows of added tokens begin as the mean of their pieces', so that a model begins near what the text meant
    to it before (https://nlp.stanford.edu/~johnhew/vocab-expansion.html)."""
    tables = {id(layer.weight): layer.weight for layer in embedding_layers(model)}.values()
    for table in tables if any(new_rows.values()) else ():
        with gather_zero3_parameter(table, writer=0):
            for row, piece_ids in new_rows.items() if table.numel() else ():
                table[row] = table[list(piece_ids)].float().mean(dim=0)


def dequantised_tensors(config: RunConfig, *, reads_now: bool) -> dict[str, Any]:
    """The base's tensors by name, dequantised when read; `reads_now`: now, for DeepSpeed."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    folder = fetch_base_folder(config.model.name, revision=config.model.revision)
    tensors = open_tensors(folder)
    is_read_at_once = reads_now and is_deepspeed_zero3_enabled()
    return {name: tensor.read() for name, tensor in tensors.items()} if is_read_at_once else dict(tensors)


@contextlib.contextmanager
def silence_load_report() -> Iterator[None]:
    """transformers' table of missing and unused tensors switched off: both are checked and reported here."""
    library_logger = logging.getLogger("transformers.modeling_utils")
    level = library_logger.level
    library_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library_logger.setLevel(level)


def quantization_config(
    precision: Precision, quant_storage: DtypeName | None = None, *, quantizes_experts: bool = True
) -> BitsAndBytesConfig:
    """NF4 with double quantisation, computing in the run's precision (https://huggingface.co/papers/2305.14314);
    with `quantizes_experts` stacked experts are quantised too."""
    nf4_experts.register_expert_quantizer()
    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=TORCH_DTYPES[precision.compute],
        **({"bnb_4bit_quant_storage": TORCH_DTYPES[quant_storage]} if quant_storage else {}),
    )
    bnb_config.leaves_experts = not quantizes_experts
    return bnb_config


def require_all_weights(model: Any, loading_info: dict[str, Any], name: str) -> None:
    """Raises ModelError where weights were missing, since they would be random numbers."""
    missing = sorted(set(loading_info.get("missing_keys", ())) - tied_weight_names(model))
    if missing or loading_info.get("mismatched_keys"):
        names = ", ".join([*missing, *(str(item) for item in loading_info.get("mismatched_keys", ()))][:6])
        raise ModelError(f"the weights of {name} do not match its config.json: {one_line(names, limit=300)} "
                         f"({len(missing)} missing)")  # fmt: skip


def keep_4bit_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes (0.50.2) from repacking 4-bit weights for inference on CPUs with AVX512-BF16, at the first
    forward in eval mode: training afterwards passes no gradient through a frozen layer, with one warning only."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit" and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
