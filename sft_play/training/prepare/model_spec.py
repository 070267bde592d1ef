"""What is known of a model before its weights are read: class, attention, adapters, vocabulary, by
its shapes alone.

`planner.kernels` has the rule for attention; here the implementation is checked against the model's
class.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sft_play.config.schema import RunConfig
from sft_play.data.build.packing import is_packing_enabled
from sft_play.errors import ModelError
from sft_play.log import one_line
from sft_play.models.config_json import find_model_folder, quantised_storage_note, refuse_quantised
from sft_play.models.families import dequantisable_method
from sft_play.planner.kernels import (
    ExpertsImplementation,
    is_hub_kernel,
    require_attention_package,
    select_attention,
)
from sft_play.planner.layout import SINGLE, Layout
from sft_play.planner.precision import Precision
from sft_play.training.checkpoints.full_state_dict import model_names_by_saved_name
from sft_play.training.checkpoints.model_saving import open_tensors
from sft_play.training.class_checks.adapter_trial import late_gradients, parameters_without_gradient
from sft_play.training.class_checks.masking import check_boundaries, check_padding, require_packable
from sft_play.training.model import attention_functions, tensor_parallel
from sft_play.training.model.language_model import (
    TextTower,
    fit_tied_embeddings,
    locate_text_tower,
    names_lost_by_peft,
    prepare_text_config,
)
from sft_play.training.model.vision_parts import (
    add_trained_parts,
    adopt_trained_parts,
    projector_layers,
    require_image_class,
)
from sft_play.training.prepare import experts
from sft_play.training.prepare.lora_config import build_peft_config, trainable_note


@dataclass(frozen=True)
class AttentionChoice:
    """An attention of transformers, why it was chosen, and whether keys and values are repeated
    (`sdpa`)."""

    name: str
    reason: str
    repeats_kv: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """What is known of the model before any weights are read: its config, class, adapters and
    choices."""

    hf_config: Any
    attention: AttentionChoice
    # Where it lies in an image-text class, whose language model it is; None for a model of text.
    text_tower: TextTower | None
    peft_config: PeftLoraConfig | None
    vocab_size: int
    resize_to: int | None
    # Class name of the repeated decoder layer; empty where there is none.
    layer_class: str
    notes: tuple[str, ...]
    # Whether padded rows come with an attention mask.
    uses_masks: bool = True
    # How modules are divided over tensor-parallel ranks; empty without tensor parallelism.
    tensor_parallel_plan: Mapping[str, tensor_parallel.ParallelStyle] = field(default_factory=dict)
    # The base's dtype by its config.json, in which whole weights are saved; None saves them as they
    # trained.
    dtype: torch.dtype | None = None
    # How experts are multiplied; None where there are none.
    experts: ExpertsImplementation | None = None
    # Of full training: parameters that get no gradient by their class, with * for numbers.
    untrained_parameters: frozenset[str] = frozenset()
    # Parameters that only longer rows or later steps give a gradient
    # (`adapter_trial.late_gradients`).
    late_gradients: Mapping[str, str] = field(default_factory=dict)
    # Rows of the embeddings that added tokens have, and the rows whose mean each begins as; empty:
    # left as read.
    new_rows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    # The base's files hold quantised weights, which are dequantised while they are read.
    is_dequantised: bool = False


def resized_spec(model_spec: ModelSpec) -> ModelSpec:
    """The spec of a model whose embeddings are resized already, such as one that an earlier stage
    has saved."""
    if model_spec.resize_to is None:
        return replace(model_spec, new_rows={})
    hf_config = copy.deepcopy(model_spec.hf_config)
    hf_config.vocab_size = model_spec.resize_to
    return replace(model_spec, hf_config=hf_config, resize_to=None, new_rows={})


def build_model_spec(
    config: RunConfig,
    precision: Precision,
    *,
    tokenizer_size: int,
    new_rows: Mapping[int, tuple[int, ...]] | None = None,
    layout: Layout = SINGLE,
    repeats_kv: bool = False,
    uses_masks: bool = True,
    uses_boundaries: bool = False,
) -> ModelSpec:
    """Everything about the model that can be checked without its weights, on the meta device.
    `uses_masks` (`Step.masks`) and `uses_boundaries` (`Step.varlen`) are the plan's hopes, which
    are measured. Raises ModelError: the class is unknown or cannot be divided so, a target, module
    or pattern matches nothing, or the vocabulary does not fit; ConfigError: packing is on, and the
    class does not keep the chats of a row apart."""
    full_config = _load_full_config(config)
    notes = _drop_quantization_config(full_config, config)
    is_dequantised = bool(notes)
    hf_config = prepare_text_config(full_config)
    fit_tied_embeddings(full_config, hf_config, lambda: _saved_tensor_names(config))
    attention = choose_attention(
        config,
        _find_model_class(hf_config, config, is_dequantised=is_dequantised),
        shares_rows=layout.context_parallel > 1,
    )
    if repeats_kv and attention.name in ("sdpa", attention_functions.ULYSSES_ATTENTION):
        attention = replace(
            attention,
            reason=f"{attention.reason}; keys and values are repeated to all heads, since no kernel"
            " for grouped heads runs on this GPU",
            repeats_kv=True,
        )
    notes += experts.fit_balance_loss(hf_config, trust_remote_code=config.model.trust_remote_code)
    skeleton = _build_skeleton(hf_config, config)
    chosen_experts = experts.choose_experts(config, skeleton, precision)
    if chosen_experts is not None:  # the config says it to whatever builds or loads the model
        hf_config._experts_implementation = (
            experts.CASTING_GROUPED_MM if chosen_experts.casts_weights else chosen_experts.name
        )
        notes.append(f"Experts: {chosen_experts.reason}")
    vocab_size = skeleton.get_input_embeddings().weight.shape[0]
    new_rows = new_rows or {}
    resize_to = _resized_vocab_size(config, vocab_size, tokenizer_size, added_rows=set(new_rows))
    peft_config, untrained_parameters, training_notes = _choose_trained(config, skeleton, new_rows)
    notes += training_notes
    if resize_to is not None:
        notes.append(f"Embeddings: resized from {vocab_size} to {resize_to}, the tokenizer's size")
    notes.append(f"Attention: {attention.reason}")
    attention, uses_masks, attention_notes = _measure_attention(
        config, hf_config, attention, layout, uses_masks, uses_boundaries
    )
    notes += attention_notes
    layer_counts = Counter(type(block).__name__ for block in decoder_layers(skeleton))
    model_spec = ModelSpec(
        hf_config,
        attention,
        _locate_language_model(config, full_config, skeleton, peft_config),
        peft_config,
        vocab_size,
        resize_to,
        # some models have others beside it
        max(layer_counts, key=lambda name: layer_counts[name], default=""),
        tuple(notes),
        uses_masks,
        tensor_parallel.tensor_parallel_plan(skeleton) if layout.tensor_parallel > 1 else {},
        hf_config.dtype
        # an image-text model's config may have it outside the text config only
        or full_config.dtype,
        chosen_experts,
        untrained_parameters,
        late_gradients(skeleton, trust_remote_code=config.model.trust_remote_code),
        new_rows,
        is_dequantised,
    )
    if config.tuning.trainable == "all":
        return model_spec
    meta_model = build_meta_model(model_spec, trust_remote_code=config.model.trust_remote_code)
    return replace(model_spec, notes=(*notes, trainable_note(config, meta_model)))


# Where parts for images train too, with their names beside the language model's, and those of the
# projector's layers among the adapters' targets.
def _locate_language_model(
    config: RunConfig, full_config: Any, skeleton: Any, peft_config: PeftLoraConfig | None
) -> TextTower | None:
    text_tower = locate_text_tower(full_config, skeleton)
    if not config.tuning.trains_vision_parts:
        return text_tower
    full_model = require_image_class(text_tower, config.model.name)
    assert text_tower is not None
    text_tower = add_trained_parts(text_tower, full_model, tower=config.tuning.train_vision)
    if peft_config is not None:
        peft_config.target_modules = {
            *(peft_config.target_modules or ()),
            *projector_layers(full_model, text_tower),
        }
    return text_tower


def _drop_quantization_config(full_config: Any, config: RunConfig) -> list[str]:
    fields = full_config.to_dict()
    refuse_quantised(fields, name=config.model.name, mode=config.tuning.mode)
    if dequantisable_method(fields)[0] is None:
        return []
    for config_part in (full_config, full_config.get_text_config()):
        vars(config_part).pop("quantization_config", None)
    return [f"Model: {quantised_storage_note(fields, config.tuning.mode)}"]


# The class with its adapters still to come, on the meta device.
def _build_skeleton(hf_config: Any, config: RunConfig) -> Any:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                hf_config, trust_remote_code=config.model.trust_remote_code
            )
    except Exception as error:  # each model class checks its config in its own way
        class_name, message = type(hf_config).__name__, one_line(str(error), limit=300)
        raise ModelError(
            f"{config.model.name}: transformers cannot build"
            f" a {class_name} from its config.json: {message}"
        ) from error


# What trains: the adapters, or all weights but those without a gradient; and the notes about it.
def _choose_trained(
    config: RunConfig, skeleton: Any, new_rows: Mapping[int, Any]
) -> tuple[PeftLoraConfig | None, frozenset[str], list[str]]:
    if config.tuning.mode != "full":
        peft_config, notes = build_peft_config(config, skeleton, new_rows=list(new_rows))
        return peft_config, frozenset(), notes
    untrained_parameters = parameters_without_gradient(
        skeleton, trust_remote_code=config.model.trust_remote_code
    )
    if not untrained_parameters:
        return None, untrained_parameters, []
    names = one_line(", ".join(sorted(untrained_parameters)), limit=200)
    note = f"Trainable: all but {names}, which get no gradient by their class"
    return None, untrained_parameters, [note]


def _measure_attention(
    config: RunConfig,
    hf_config: Any,
    attention: AttentionChoice,
    layout: Layout,
    uses_masks: bool,
    uses_boundaries: bool,
) -> tuple[AttentionChoice, bool, list[str]]:
    notes, trust_remote_code, max_row_tokens = (
        [],
        config.model.trust_remote_code,
        config.model.max_seq_len,
    )
    if is_packing_enabled(config):
        notes.append(
            require_packable(
                hf_config,
                attention=attention.name,
                max_row_tokens=max_row_tokens,
                trust_remote_code=trust_remote_code,
            )
        )
    if uses_boundaries and attention.name == "sdpa":
        boundaries = check_boundaries(
            hf_config, max_row_tokens=max_row_tokens, trust_remote_code=trust_remote_code
        )
        notes.append(f"Attention: {boundaries.reason}")
        if not boundaries.is_needed:
            attention = replace(attention, name=attention_functions.VARLEN_ATTENTION)
    # full blocks of text have no padding, and a part of a row has no mask (`context_parallel`)
    if not uses_masks and config.task_mode != "cpt" and layout.context_parallel == 1:
        padding = check_padding(
            hf_config,
            attention=attention.name,
            max_row_tokens=max_row_tokens,
            trust_remote_code=trust_remote_code,
        )
        notes.append(f"Attention: {padding.reason}")
        uses_masks = padding.is_needed
    return attention, uses_masks, notes


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model in their order: what transformers checkpoints one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def build_meta_model(model_spec: ModelSpec, *, trust_remote_code: bool) -> Any:
    """The model with its adapter, where it has one, on the meta device: names and shapes, no
    weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_spec.hf_config, trust_remote_code=trust_remote_code
        )
        model.sft_tower = model_spec.text_tower
        if model_spec.text_tower is not None and model_spec.text_tower.prefixes[1:]:
            adopt_trained_parts(model, model_spec.text_tower.build_full_model())
        peft_config = model_spec.peft_config
        return model if peft_config is None else get_peft_model(model, copy.deepcopy(peft_config))


def peft_loading_warning(model_spec: ModelSpec, *, trust_remote_code: bool) -> str:
    """How many of the adapter's tensors PEFT loses when it loads them, and what to do; empty where
    it loses none."""
    full_config = (
        model_spec.text_tower.full_config if model_spec.text_tower else model_spec.hf_config
    )
    if (
        model_spec.peft_config is None
        or get_checkpoint_conversion_mapping(full_config.model_type) is None
    ):
        return ""
    adapted_model = build_meta_model(model_spec, trust_remote_code=trust_remote_code)
    tower = model_spec.text_tower
    published_model = (
        tower.build_full_model() if tower is not None else adapted_model.get_base_model()
    )
    names = model_names_by_saved_name(adapted_model)
    lost_names = names_lost_by_peft(published_model, names) if published_model is not None else []
    if not lost_names:
        return ""
    return (
        f"PEFT alone would load it without {len(lost_names)} of {len(names)}"
        " tensors, as it renames those of this class wrongly: give others"
        " the model of make merge; the commands here load them all"
    )


def model_location(config: RunConfig) -> str:
    """The model's folder, or its name on the hub."""
    return str(find_model_folder(config.model.name) or config.model.name)


def _load_full_config(config: RunConfig) -> Any:
    model, location = config.model, model_location(config)
    try:
        return AutoConfig.from_pretrained(
            location, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:  # each config class checks its fields in its own way
        raise ModelError(
            f"the config of {model.name} cannot be read: {one_line(str(error), limit=300)}"
        ) from error


def _saved_tensor_names(config: RunConfig) -> set[str]:
    # empty where they cannot be read, which loading words
    folder = find_model_folder(config.model.name)
    try:
        if folder is not None:
            return set(open_tensors(folder))
        return set(
            get_safetensors_metadata(config.model.name, revision=config.model.revision).weight_map
        )
    except ModelError:
        raise
    except Exception:  # no network, or broken files
        return set()


def _find_model_class(hf_config: Any, config: RunConfig, *, is_dequantised: bool) -> Any:
    # `nn.Module` for code that comes with the model
    for name in hf_config.architectures or ():
        if name.endswith(("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")):
            raise ModelError(
                f"{config.model.name} is a {name}, not a causal"
                " language model; take the language model"
            )
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    if config.model.trust_remote_code and getattr(hf_config, "auto_map", None):
        if is_dequantised:
            raise ModelError(
                f"the weights of {config.model.name} are stored quantised, and its class is code of"
                " its own; take the 16-bit model"
            )
        return nn.Module
    raise ModelError(
        f"{config.model.name} is a {type(hf_config).__name__}, which transformers does not know as"
        " a causal language model; this toolkit trains causal language models"
    )


def _resized_vocab_size(
    config: RunConfig, vocab_size: int, tokenizer_size: int, *, added_rows: set[int]
) -> int | None:
    if tokenizer_size <= vocab_size:
        return None
    saved_modules = {name.rpartition(".")[2] for name in config.tuning.lora.modules_to_save}
    has_untrained_rows = config.tuning.mode != "full" and not added_rows >= set(
        range(vocab_size, tokenizer_size)
    )
    # wte: GPT-2's embedding, which is its head too
    if (
        has_untrained_rows
        and not {"embed_tokens", "lm_head"} <= saved_modules
        and "wte" not in saved_modules
    ):
        raise ModelError(
            f"the tokenizer has {tokenizer_size} tokens and the model {vocab_size} embeddings: take"
            " the model's own, or train the new ones by tuning.lora.modules_to_save=[embed_tokens,"
            " lm_head] or tuning.mode=full"
        )
    return tokenizer_size


# --- attention ------------------------------------------------------------------------------------
def choose_attention(
    config: RunConfig, model_class: Any, *, shares_rows: bool = False
) -> AttentionChoice:
    """The implementation that was asked for, or sdpa where the model has it; `shares_rows`: one for
    rows whose tokens several ranks share. Raises ModelError: the model lacks the one that was asked
    for, or cannot share rows.
    """
    if shares_rows:
        if not getattr(model_class, "_supports_attention_backend", False):
            raise ModelError(
                f"{model_class.__name__} cannot share rows over context-parallel ranks: it does not"
                " call its attention through transformers; use a layout without cp"
            )
        return AttentionChoice(
            attention_functions.ULYSSES_ATTENTION,
            "sdpa over whole rows, each rank for some of the heads (context parallelism)",
        )
    requested = config.model.attn_implementation
    has_sdpa = bool(getattr(model_class, "_supports_sdpa", False))
    if requested == "auto":
        if select_attention(requested, has_sdpa=has_sdpa) == "sdpa":
            return AttentionChoice(
                "sdpa", "sdpa: PyTorch's fused attention, no S x S matrix unless rows need a mask"
            )
        return AttentionChoice(
            "eager",
            f"eager: {model_class.__name__} has no sdpa; memory grows with the length squared",
        )
    if requested == "sdpa" and not has_sdpa:
        raise ModelError(
            f"model.attn_implementation=sdpa: {model_class.__name__} has none; use eager or auto"
        )
    require_attention_package(requested)
    if is_hub_kernel(requested) or requested == "flash_attention_2":
        kernel = requested.partition("@")[0]
        setting = f"model.attn_implementation={kernel}: {model_class.__name__}"
        if not getattr(model_class, "_supports_flash_attn", False):
            raise ModelError(f"{setting} has none; use sdpa")
        compatible = getattr(model_class, "_compatible_flash_implementations", None)
        # such as gpt-oss, whose attention sinks flash-attn 2 lacks
        if compatible and kernel not in compatible:
            raise ModelError(
                f"{setting} runs only with other kernels ({', '.join(compatible)}); use auto"
            )
    return AttentionChoice(requested, f"{requested}, as model.attn_implementation says")
