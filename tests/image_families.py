"""Tiny image-text models of many families, with random weights: class, tokenizer, processor and template in a folder.

Nothing is downloaded: each is made of its config classes, as a base on the hub has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.models import make_tokenizer

# ChatML with pictures in parts; `{}` is what the family writes for one.
TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n"
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for part in m.content %%}"
    "{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}{%% endfor %%}{%% endif %%}"
    "<|im_end|>\n{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
WIDTH, HEADS = 64, 4
TEXT = {
    "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}}
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a family's tiny model is made. `tokens`: attributes of its tokenizer and their texts; `picture`: what its
    template writes for a picture."""

    model_type: str
    processor: str
    picture: str
    tokens: dict[str, str]
    text: dict[str, Any]
    vision: dict[str, Any]
    image_processor: str
    image_options: dict[str, Any]
    processor_options: dict[str, Any] = field(default_factory=dict)
    # Fields of the config, of which those that end in _id or _index name a token's attribute.
    config: dict[str, Any] = field(default_factory=dict)
    text_type: str | None = None
    vision_type: str | None = None


QWEN_TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": "image_token", "video_token_id": "video_token", "vision_start_token_id": "vision_start_token",
    "vision_end_token_id": "vision_end_token",
}  # fmt: skip
QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PIXELS = {"size": {"shortest_edge": 256, "longest_edge": 16_384}, "patch_size": 8, "merge_size": 2}
GLM_TOKENS = {
    "image_token": "<|image|>", "video_token": "<|video|>", "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>", "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}  # fmt: skip
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}

FAMILIES = {
    "qwen2_5_vl": Family(
        "qwen2_5_vl", "Qwen2_5_VLProcessor", QWEN_PICTURE, QWEN_TOKENS, TEXT | MROPE,
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8, "window_size": 32,
         "out_hidden_size": WIDTH, "fullatt_block_indexes": [1]},
        "Qwen2VLImageProcessor", QWEN_PIXELS, config=QWEN_IDS,
    ),
    "qwen3_vl": Family(
        "qwen3_vl", "Qwen3VLProcessor", QWEN_PICTURE, QWEN_TOKENS, TEXT | MROPE,
        {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
         "out_hidden_size": WIDTH, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        "Qwen2VLImageProcessor", QWEN_PIXELS, config=QWEN_IDS,
    ),
    "qwen3_5": Family(
        "qwen3_5", "Qwen3VLProcessor", QWEN_PICTURE, QWEN_TOKENS,
        TEXT | {
            "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
         "out_hidden_size": WIDTH, "num_position_embeddings": 64},
        "Qwen2VLImageProcessor", QWEN_PIXELS, config=QWEN_IDS,
    ),
    "gemma3": Family(
        "gemma3", "Gemma3Processor", "<start_of_image>", GEMMA_TOKENS, TEXT | {"sliding_window": 16},
        SIGLIP | {"image_size": 32}, "Gemma3ImageProcessor",
        {"size": {"height": 32, "width": 32}}, {"image_seq_length": 4},
        {"mm_tokens_per_image": 4, "boi_token_index": "boi_token", "eoi_token_index": "eoi_token",
         "image_token_index": "image_token"},
        "gemma3_text", "siglip_vision_model",
    ),
    "gemma4": Family(
        "gemma4", "Gemma4Processor", "<|image|>",
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "video_token": "<|video|>",
         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        TEXT | {"sliding_window": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 8,
                "layer_types": ["sliding_attention", "full_attention"]},
        SIGLIP | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 64},
        "Gemma4ImageProcessor", {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2}, {},
        {"boi_token_id": "boi_token", "eoi_token_id": "eoi_token", "image_token_id": "image_token",
         "video_token_id": "video_token", "audio_config": None},
        "gemma4_text", "gemma4_vision",
    ),
    "mistral3": Family(
        "mistral3", "PixtralProcessor", "[IMG]",
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}, TEXT,
        SIGLIP | {"image_size": 64, "head_dim": 16}, "PixtralImageProcessor",
        {"size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        {"patch_size": 8, "spatial_merge_size": 2},
        {"image_token_index": "image_token", "spatial_merge_size": 2}, "mistral", "pixtral",
    ),
    "smolvlm": Family(
        "smolvlm", "SmolVLMProcessor", "<image>",
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "video_token": "<video>",
         "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
         **{f"row_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)}},
        TEXT, SIGLIP | {"image_size": 32}, "SmolVLMImageProcessor",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4},
        {"image_token_id": "image_token", "scale_factor": 2}, "llama", "smolvlm_vision",
    ),
    "internvl": Family(
        "internvl", "InternVLProcessor", "<IMG_CONTEXT>",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"}, TEXT,
        SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8]}, "GotOcr2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 4},
        {"image_token_id": "context_image_token", "image_seq_length": 4}, "qwen2", "internvl_vision",
    ),
    "llava_onevision": Family(
        "llava_onevision", "LlavaOnevisionProcessor", "<image>",
        {"image_token": "<image>", "video_token": "<video>"}, TEXT, SIGLIP | {"image_size": 32},
        "LlavaOnevisionImageProcessor",
        {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        {"image_token_index": "image_token", "video_token_index": "video_token",
         "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}, "qwen2", "siglip_vision_model",
    ),
    "llava": Family(
        "llava", "LlavaProcessor", "<image>", {"image_token": "<image>"}, TEXT,
        SIGLIP | {"num_hidden_layers": 3, "image_size": 32, "projection_dim": 32}, "CLIPImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token_index": "image_token", "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        "llama", "clip_vision_model",
    ),
    "aya_vision": Family(  # each of the shapes that are probed has four tiles
        "aya_vision", "AyaVisionProcessor", "<image>",
        {"image_token": "<image>", "img_patch_token": "<|IMG_PATCH|>", "start_of_img_token": "<|START_OF_IMG|>",
         "end_of_img_token": "<|END_OF_IMG|>", "tile_global_token": "TILE_GLOBAL"},
        TEXT | {"logit_scale": 1.0},  # which the whole class leaves out
        SIGLIP | {"image_size": 32}, "GotOcr2ImageProcessor",
        {"size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"patch_size": 8, "img_size": 32, "downsample_factor": 2},
        {"image_token_index": "img_patch_token", "downsample_factor": 2, "alignment_intermediate_size": 64,
         "vision_feature_layer": -1}, "cohere2", "siglip_vision_model",
    ),
    "glm46v": Family(
        "glm46v", "Glm46VProcessor", "<|begin_of_image|><|image|><|end_of_image|>", GLM_TOKENS,
        TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0,
                                    "partial_rotary_factor": 0.5}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8, "image_size": 64,
         "out_hidden_size": WIDTH},
        "Glm46VImageProcessor", QWEN_PIXELS,
        config={f"{name}_id": name for name in GLM_TOKENS}, text_type="glm4v_text", vision_type="glm4v_vision",
    ),
}  # fmt: skip


def make_image_model(folder: Path, name: str, *, seed: int = 0) -> Path:
    """Write the tiny model of a family with its tokenizer, processor and chat template into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, template=TEMPLATE % family.picture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(family.tokens.values()))})
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = family.tokens
    settings.pop("additional_special_tokens", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {attribute: tokenizer.convert_tokens_to_ids(text) for attribute, text in family.tokens.items()}
    special = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    text = {"vocab_size": len(tokenizer), **special, **family.text}
    config = AutoConfig.for_model(
        family.model_type,
        text_config={**text, **({"model_type": family.text_type} if family.text_type else {})},
        vision_config={**family.vision, **({"model_type": family.vision_type} if family.vision_type else {})},
        tie_word_embeddings=True,
        **{key: ids.get(value, value) if isinstance(value, str) else value for key, value in family.config.items()},
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():  # towers begin with parts of zero, which hide a wrong picture
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    processor = {"image_processor_type": family.image_processor, "processor_class": family.processor}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **family.image_options}))
    options = {"processor_class": family.processor, **family.processor_options}
    (folder / "processor_config.json").write_text(json.dumps(options))
    return folder
