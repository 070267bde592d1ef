"""What people know a key as from other tools, and what it is here: a table, and how a value of theirs becomes ours.

The keys are those that accelerate, DeepSpeed, transformers' TrainingArguments, TRL's SFTConfig, axolotl, LLaMA-Factory,
ms-swift, torchtune, llm-foundry and Unsloth document. A key has one of two answers: the place here with the user's
value in our words, or that it is not done here and what to do instead. No key of the table is ever guessed at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.config.leaves import accepts, leaves
from sft_play.config.yaml_io import Plain


@dataclass(frozen=True)
class Answer:
    """What a key means here: settings of ours by path, and words."""

    settings: tuple[tuple[str, Plain], ...] = ()
    words: str = ""


Reading = Callable[[Any], Answer | None]
"""Reads a value of another tool; None where it cannot, so that the table's other columns answer."""


@dataclass(frozen=True)
class Known:
    """A row of the table.

    `path`: our key, "" where there is none. `values`: answers by the value's spelling in small letters (`true`, `null`,
    `0.1`). `read`: turns other values into an answer. `words`: said where neither answers, and beside `path` always;
    `{value}` in them is the user's value. `switch`: off needs no word of what to do instead.
    """

    path: str = ""
    values: Mapping[str, Answer] = field(default_factory=dict)
    read: Reading | None = None
    words: str = ""
    switch: bool = False

    @property
    def only_words(self) -> bool:
        """Whether the answer is the same whatever the value."""
        return not (self.path or self.values or self.read)


def to(path: str, value: Plain, words: str = "") -> Answer:
    """The answer that is one setting of ours."""
    return Answer(((path, value),), words)


def say(words: str) -> Answer:
    """The answer that is words alone."""
    return Answer((), words)


def says(words: str) -> Known:
    """A key whose value changes nothing of the answer."""
    return Known(words=words)


def lacks(what: str, instead: str = "remove it") -> Known:
    """A key for what is not done here."""
    return Known(words=f"{what} not done here: {instead}", switch=True)


REMOVE = "remove it"
_OFF = ("false", "null", "0", "", "none", "[]", "{}", "disabled", "-1")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|txt|gz)$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def spelled(value: Plain) -> str:
    """A value as `Known.values` spells it: YAML's word in small letters, whole numbers without a point."""
    if isinstance(value, str):
        return value.strip().lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


# --- values that are more than a word ---------------------------------------------------------------------------------
def _held_out_share(value: Any) -> Answer | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    if value >= 1:
        return say("data.val_fraction is a share (0.05), never a number of rows; {value} rows of your choice go into a "
                   "file of their own: data.val_path")  # fmt: skip
    if value > 0.5:
        return say("data.val_fraction is the share held out, at most 0.5, not the share that is trained")
    return to("data.val_fraction", float(value))


def _percentage(value: Any) -> Answer | None:
    return _held_out_share(value / 100) if isinstance(value, int | float) and 0 <= value <= 50 else None


def _rows_at(path: str) -> Reading:
    """Reads what names a data set: a file, an id of the hub, a name in a registry, a list of `{path: …}`."""

    def read(value: Any) -> Answer | None:
        if isinstance(value, list) and value:
            names = [item.get("path", item.get("name")) if isinstance(item, dict) else item for item in value]
            if len(names) == 1:
                return read(names[0])
            named = [(item, name) for item, name in zip(value, names, strict=True) if isinstance(name, str)]
            if path == "data.train_path" and named:
                sources: list[Plain] = [_source_of(item, name) for item, name in named]
                return to("data.sources", sources, "a weight in each gives it that share of an epoch")
            files: list[Plain] = [_source(name) for _, name in named]
            return to("data.process.raw_path", files, "then make process writes the rows") if files else None
        if not isinstance(value, str) or not value.strip():
            return None
        if "," in value and path == "data.train_path":
            return read([part.strip() for part in value.split(",") if part.strip()])
        if "," in value:
            return say(f"several sets become one: data.process.raw_path takes a list of files and hub:owner/name, and "
                       f"make process writes what {path} reads")  # fmt: skip
        source = _source(value)
        if source == value and not _is_path(value):
            return say(f"a set is named by its file, or hub:owner/name, not by a name in a registry: {path}")
        return to(path, source, "the format is recognised, see make preview")

    return read


def _is_path(value: str) -> bool:
    return value.startswith((".", "/", "~", "hub:")) or "/" in value or _DATA_FILE.search(value) is not None


def _source(value: str) -> str:
    is_hub_id = _HUB_ID.fullmatch(value) and not _DATA_FILE.search(value) and not value.startswith((".", "/", "~"))
    return f"hub:{value}" if is_hub_id else value


def _source_of(item: Any, name: str) -> dict[str, Plain]:
    """One of several sets as one of data.sources, with the share that its tool gives it."""
    found: dict[str, Plain] = {"path": _source(name)}
    given = item if isinstance(item, dict) else {}
    for ours, theirs in (
        ("weight", ("weight", "prob", "ratio", "proportion")),
        ("max_rows", ("num_samples", "max_samples")),
    ):
        number = next((given[key] for key in theirs if isinstance(given.get(key), (int, float))), None)
        if number:
            found[ours] = number
    return found


def _every(path: str) -> Reading:
    """Reads llm-foundry's times (`1000ba`, `1ep`) and whole numbers as steps between two of something."""

    def read(value: Any) -> Answer | None:
        found = re.fullmatch(r"(\d+)(ba|ep)", value) if isinstance(value, str) else None
        if found and found[2] == "ba":
            return to(path, int(found[1]))
        if found:
            return to(path, None, "each epoch") if found[1] == "1" else None
        return None

    return read


def _per_epoch(path: str) -> Reading:
    def read(value: Any) -> Answer | None:
        if isinstance(value, int | float) and value > 1:
            return say(f"{path} counts steps: a {{value}}th of those of an epoch (make plan says how many there are)")
        return None

    return read


def _duration(value: Any) -> Answer | None:
    found = re.fullmatch(r"(\d+)(ba|ep)", value) if isinstance(value, str) else None
    if not found:
        return None
    return to("train.epochs", int(found[1])) if found[2] == "ep" else to("train.max_steps", int(found[1]))


def _second_beta(value: Any) -> Answer | None:
    return to("train.adam_beta2", value[1]) if isinstance(value, list) and len(value) == 2 else None


def _seconds(value: Any) -> Answer | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 86_400:
        return to("distributed.timeout_s", 86_400, "the longest")
    return None


def _word_in_list(value: Any) -> Answer | None:
    """A tracker, or several, by name; those that are not there are said."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return None
    own = [name for name in names if accepts("train.report_to", [name])]
    return to("train.report_to", list(own)) if own else say("trackers: tensorboard, wandb, mlflow, trackio")


def _with_text_column(value: Any) -> Answer | None:
    return to("data.columns", {"text": value}) if isinstance(value, str) and value else None


def _thinking(value: Any) -> Answer | None:
    return to("data.chat_template_kwargs", {"enable_thinking": value}) if isinstance(value, bool) else None


def _template(value: Any) -> Answer | None:
    if isinstance(value, str) and (value in ("chatml", "plain") or value.endswith((".jinja", ".jinja2", ".j2"))):
        return to("data.chat_template", value)
    return None


def _deepspeed(value: Any) -> Answer | None:
    if not isinstance(value, str):
        return None
    stage = re.fullmatch(r"(zero[123](_offload)?)", value)
    if stage:
        return say(f"make train-distributed STRATEGY={value}")
    return say("make train-deepspeed DEEPSPEED_CONFIG={value}") if value.endswith((".json", ".yaml", ".yml")) else None


def _axis(name: str) -> Reading:
    """Reads the size of an axis of a mesh; with one group of it, or several, which FSDP2 shards over."""

    def read(value: Any) -> Answer | None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            return None
        return to("model.mesh_shape", [[1, value], ["fsdp", name]], "with several such groups, their number for the 1")

    return read


# --- answers that several keys share ----------------------------------------------------------------------------------
_PREFERENCE = "preference tuning is not done here (task_mode: sft, cpt or cpt_mixed): use TRL's trainers for it"
_OWN_CODE = "the model's own config.json and tokenizer say so: remove it"
_GENERATION = "answers are generated greedily, to be compared (eval.generate_rows, eval.max_new_tokens): remove it"
_AFTER = "this toolkit trains; export, merging and serving take PEFT or vLLM on RUN/adapter (RUN/model): remove it"
_HUB = "nothing is uploaded; the trained weights lie in RUN/adapter (full: RUN/model): hf upload OWNER/NAME RUN/adapter"
_LOGIN = "tokens stay out of the run YAML: hf auth login, or HF_TOKEN in the environment"
_PICTURES = "pictures, sound and films are not trained here, the text tower alone is: remove it"
_FUSED = "the loss is computed in chunks already, without whole logits; other fused kernels: tuning.backend: unsloth"
_PLACED = "the plan places the model (make plan, STRATEGY=); GPUs are chosen with GPUS=0,1"
_CACHED = "tokens are kept in ~/.cache/sft-play/tokens (SFT_PLAY_CACHE moves it) and renewed by themselves: remove it"
_LAUNCHER = "it is a launcher's: remove it, or give accelerate's file as ACCELERATE_CONFIG="
_ZERO_FILE = "it belongs in DeepSpeed's file: make train-deepspeed DEEPSPEED_CONFIG=FILE"
_FSDP = "make train-distributed STRATEGY=fsdp (FSDP2)"
_MESH = "model.mesh_shape: [[GROUPS, RANKS], [fsdp, {axis}]]; null lets the plan choose"
_FSDP_OPTIONS = "FSDP2 is set up by the plan (STRATEGY=fsdp, fsdp_hybrid; distributed.mixed_precision): remove it"
_POLICY = "distributed.mixed_precision takes param, reduce and buffer, each auto, bfloat16, float16 or float32"
_SEEN = "train.profile_steps traces steps, and says how long communication is not hidden"
_TOKENS = (
    "the tokenizer is used as it comes: add tokens in the model's folder, and train their rows with "
    "tuning.lora.modules_to_save"
)
_PADDING = "padding is masked by length and goes to the longest row of a batch; less of it: data.packing: best_fit"
_ORDER = "rows are shuffled by train.seed, differently each epoch: remove it"
_SCHEDULE = "the schedules of train.lr_scheduler_type end at 0 and take no options: remove it"
_ADAM = "of AdamW train.adam_beta2 and train.weight_decay can be set; the rest is torch's default: remove it"
_TRACKER = "trackers: train.report_to takes tensorboard, wandb, mlflow, trackio"
_WANDB = to("train.report_to", ["wandb"])
_TB = "the event files lie in RUN/tb, the log in RUN/train.log and RUN/metrics.jsonl: remove it"
_RESUME = "make resume CONFIG=… continues the newest unfinished run (RUN=NAME: that one)"
_LORA_INIT = "adapters begin as PEFT's default (B is zero): remove it"
_DRAWN = (
    "data.sources: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}] mixes files: each has its share of every "
    "epoch, exactly (no sampling, nothing to stop at)"
)


def _switch(path: str, on: Plain, off: Plain) -> dict[str, Answer]:
    return {"true": to(path, on), "false": to(path, off)}


_QLORA, _LORA, _FULL = (to("tuning.mode", mode) for mode in ("qlora", "lora", "full"))
_ADAPTERS = {
    "qlora": _QLORA, "lora": _LORA, "full": _FULL, "none": _FULL,
    "longlora": say("not done here: tuning.mode: lora"), "adalora": say("not done here: tuning.mode: lora"),
    "dora": to("tuning.lora.use_dora", True), "rslora": to("tuning.lora.use_rslora", True),
    "freeze": to("tuning.mode", "full", "with tuning.trainable: [layers.30-31, norm], the parts that train"),
    "oft": say("not done here: tuning.mode: lora or qlora"),
}  # fmt: skip
_SDPA, _EAGER, _FLASH = (to("model.attn_implementation", name) for name in ("sdpa", "eager", "flash_attention_2"))
_ATTENTION = {
    "auto": to("model.attn_implementation", "auto"), "true": _FLASH, "false": to("model.attn_implementation", "auto"),
    "fa2": _FLASH, "flash_attn": _FLASH, "flash_attention_2": _FLASH, "flash": _FLASH, "flash_attn_2": _FLASH,
    "fa3": to("model.attn_implementation", "flash_attention_2", "flash_attention_3 is not taken"),
    "flash_attention_3": to("model.attn_implementation", "flash_attention_2", "flash_attention_3 is not taken"),
    "sdpa": _SDPA, "xformers": _SDPA, "flex_attention": _SDPA, "eager": _EAGER, "disabled": _EAGER,
}  # fmt: skip
_DTYPES = {
    name: to("model.dtype", ours)
    for ours, names in {
        "bfloat16": "bf16 bfloat16 torch.bfloat16", "float16": "fp16 float16 half torch.float16",
        "float32": "fp32 float32 torch.float32", "auto": "auto",
    }.items() for name in names.split()
}  # fmt: skip
_REDUCED, _GATHERED, _BUFFERED = (
    {name: to(f"distributed.mixed_precision.{part}", answer.settings[0][1]) for name, answer in _DTYPES.items()}
    for part in ("reduce", "param", "buffer")
)
_HOOKS = {
    "no": to("distributed.mixed_precision.reduce", "auto"),
    **{name: to("distributed.mixed_precision.reduce", ours)
       for ours, names in {"bfloat16": "bf16 bf16_compress_hook", "float16": "fp16 fp16_compress_hook"}.items()
       for name in names.split()},
}  # fmt: skip
_IN_FP32 = _switch("distributed.mixed_precision.reduce", "float32", "auto")
_BF16, _FP16, _FP32 = to("train.bf16", True), to("train.fp16", True), to("train.bf16", False)
_FP8 = to("train.bf16", True, "FP8 is not trained here")
_PRECISIONS = {
    name: answer
    for answer, names in (
        (_BF16, "bf16 bf16_mixed bf16-mixed amp_bf16 bfloat16 bf16-true"),
        (_FP16, "fp16 fp16_mixed 16-mixed 16 amp_fp16 float16"),
        (_FP32, "no none false fp32 32 32-true float32"),
        (_FP8, "fp8 amp_fp8"),
    ) for name in names.split()
}  # fmt: skip
_OPTIMIZERS = {
    name: to("train.optim", ours)
    for ours, names in {
        "adamw_torch_fused": "adamw adam adamw_hf paged_adamw paged_adamw_32bit torch.optim.adamw torch.optim.adam "
        "decoupled_adamw adamw_apex_fused adamw_anyprecision fusedadam",
        "paged_adamw_8bit": "adamw_bnb_8bit adamw_8bit adamw_torch_8bit adamw_torch_4bit ademamix_8bit "
        "bitsandbytes.optim.pagedadamw8bit bitsandbytes.optim.pagedadamw bitsandbytes.optim.adamw8bit "
        "torchao.optim.adamw8bit torchao.prototype.low_bit_optim.adamw8bit",
        "adafactor": "adafactor",
    }.items() for name in names.split()
}  # fmt: skip
_SCHEDULES = {
    name: to("train.lr_scheduler_type", ours)
    for ours, names in {
        "cosine": "cosine cosine_with_warmup cosine_with_restarts cosine_with_min_lr cosine_annealing warmupcosinelr "
        "one_cycle rex torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "linear": "linear linear_decay_with_warmup warmupdecaylr", "constant": "constant",
        "constant_with_warmup": "constant_with_warmup warmuplr", "inverse_sqrt": "inverse_sqrt inv_sqrt_with_warmup",
        "polynomial": "polynomial",
    }.items() for name in names.split()
}  # fmt: skip
_BEST_FIT, _UNPACKED = to("data.packing", "best_fit"), to("data.packing", "none")
_PACKING = {"true": _BEST_FIT, "false": _UNPACKED, "bfd": _BEST_FIT, "best_fit": _BEST_FIT, "wrapped": _BEST_FIT,
            "bfd_split": _BEST_FIT, "bfd-requeue": _BEST_FIT, "ffd": _BEST_FIT, "none": _UNPACKED}  # fmt: skip
_TRUNCATION = {
    **dict.fromkeys(("truncate", "right", "keep_start"), to("data.truncate", "end")),
    **dict.fromkeys(("left", "keep_end"), to("data.truncate", "prompt")),
    **dict.fromkeys(("delete", "drop"), to("data.truncate", "drop")),
    "raise": to("data.max_lost_fraction", 0.0), "split": say("rows are cut or dropped, never split: data.truncate"),
}  # fmt: skip
_LOSS = {
    "last_round": to("data.loss_on", "completion"), "default": to("data.loss_on", "assistant"),
    "all": to("data.loss_on", "all"), "train": to("data.loss_on", "all"), "mask": to("data.loss_on", "assistant"),
}  # fmt: skip
_STAGES = {
    "sft": to("task_mode", "sft"), "pt": to("task_mode", "cpt"), "cpt": to("task_mode", "cpt"),
    "pretrain": to("task_mode", "cpt"), "causal_lm": to("task_mode", "sft"),
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "kto", "rm", "ppo", "grpo", "gdpo", "gkd", "reward", "rlhf"),
                    say(_PREFERENCE)),
}  # fmt: skip
_LAYOUTS = {
    name: say(f"make train-distributed STRATEGY={ours}")
    for ours, names in {
        "ddp": "ddp distributed_data_parallel multi_gpu", "fsdp": "fsdp fsdp2 full_shard",
        "zero1": "zero1 deepspeed_stage_1",
        "zero2": "zero2 deepspeed_stage_2", "zero3": "zero3 deepspeed_stage_3",
        "fsdp_hybrid": "hybrid_shard hsdp", "zero3_offload": "zero3_offload deepspeed_stage_3_offload",
        "zero2_offload": "zero2_offload deepspeed_stage_2_offload",
    }.items() for name in names.split()
}  # fmt: skip
_EVAL_WHEN = {"no": to("eval.steps", 0, "never"), "false": to("eval.steps", 0, "never"),
              "epoch": to("eval.steps", None, "each epoch"),
              "steps": say("here it is eval.steps: N (steps between two evaluations)")}  # fmt: skip
_SAVE_WHEN = {"epoch": to("train.save_steps", None, "each epoch"),
              "steps": say("here it is train.save_steps: N (steps between two checkpoints)"),
              "best": to("train.load_best_model_at_end", True),
              "no": say("a run can always be resumed: train.save_steps: N, as large as you like")}  # fmt: skip
_EIGHT_BIT = say("8-bit weights are not trained here: tuning.mode: qlora (4 bits) or lora (16 bits)")
_NO_BITS = say("4 bits are asked for with tuning.mode: qlora alone: remove it")
_BITS = {"4": _QLORA, "8": _EIGHT_BIT, "16": _LORA, "null": say("without it tuning.mode decides: remove it")}
_ALL_LINEAR = {name: to("tuning.lora.target_modules", "auto") for name in ("all", "all-linear", "auto", "all_linear")}
_PIECES = {"true": _BF16, "auto": to("train.bf16", "auto"), "full": to("model.dtype", "bfloat16"), "false": _FP32}
_UNSLOTH = to("tuning.backend", "unsloth")


# --- the table --------------------------------------------------------------------------------------------------------
_MODEL: tuple[tuple[str, Known], ...] = (
    ("base_model model_name_or_path model_name pretrained_model_name_or_path pretrained_model_path model_id model_path "
     "model_id_or_path base_model_name_or_path base_model_name name_or_path model.path model.pretrained model.model "
     "hf_model model_checkpoint", Known("model.name")),
    ("model_revision revision_of_model hub_revision", Known("model.revision")),
    ("cutoff_len max_length max_seq_length sequence_len model_max_length max_model_len block_size seq_len "
     "seq_length sequence_length context_length max_source_length packing_length eval_sequence_len max_prompt_length "
     "max_packed_sequence_len tokenizer.max_seq_len", Known("model.max_seq_len")),
    ("torch_dtype dtype compute_dtype infer_dtype", Known("model.dtype", _DTYPES)),
    ("pure_bf16", Known("model.dtype", {"true": to("model.dtype", "bfloat16"),
     "false": say("the default: remove it")})),
    ("flash_attn flash_attention attn_impl attn_implementation use_flash_attention_2 use_flash_attn attention "
     "flash_attention_2 use_flash_attention attn_config.attn_impl", Known("model.attn_implementation", _ATTENTION)),
    ("sdp_attention sdpa_attention", Known(values={"true": _SDPA, "false": say(REMOVE)})),
    ("xformers_attention flex_attention sage_attention", Known(
        values={"true": say("not done here: model.attn_implementation: sdpa takes its place")}, words=REMOVE)),
    ("eager_attention", Known(values={"true": _EAGER, "false": say(REMOVE)})),
    ("base_model_config tokenizer_config tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path",
     says("the tokenizer in the model's folder is used: remove it (another one is put into that folder)")),
    ("model_type tokenizer_type processor_type tokenizer_use_fast use_fast_tokenizer tokenizer_legacy "
     "tokenizer_use_mistral_common is_llama_derived_model is_mistral_derived_model is_falcon_derived_model "
     "is_qwen_derived_model tokenizer_save_jinja_files use_fast padding_side add_bos_token add_eos_token "
     "add_special_tokens split_special_tokens model_author model_class cls_model_config type_of_model",
     says(_OWN_CODE)),
    ("model_config model_init_kwargs model_kwargs overrides_of_model_config overrides_of_model_kwargs rope_scaling "
     "config_overrides", says("fields of the model's config.json are read, never overridden: edit the copy in a folder "
                              "of yours and name it in model.name")),
    ("device_map max_memory low_cpu_mem_usage gpu_memory_limit device offload_folder "
     "experimental_skip_move_to_device init_device use_cpu_offload", says(_PLACED)),
    ("cache_dir download_dir", says("HF_HOME=… before make moves the hub's cache")),
    ("hub_token hf_hub_token hf_token use_auth_token hf_use_auth_token auth_token ms_hub_token om_hub_token",
     says(_LOGIN)),
    ("pad_token eos_token bos_token unk_token pad_token_id eos_token_id",
     says("the tokenizer's own is used (a missing pad token is chosen and said): remove it")),
    ("special_tokens tokens additional_special_tokens add_tokens new_special_tokens new_special_tokens_config "
     "added_tokens_overrides resize_vocab resize_token_embeddings_to_32x shrink_embeddings init_special_tokens "
     "fix_untrained_tokens mean_resizing_embeddings embeddings_skip_upcast", says(_TOKENS)),
    ("use_liger_kernel liger_kernel_config enable_liger_kernel use_liger cut_cross_entropy chunked_cross_entropy "
     "chunked_cross_entropy_num_chunks plugins use_kernels flash_attn_cross_entropy flash_attn_rms_norm "
     "flash_attn_fuse_mlp fused_attn_kernel unsloth_cross_entropy_loss loss_type kernel_config use_v1_kernels",
     says(_FUSED)),
    ("use_unsloth use_unsloth_gc", Known("tuning.backend", {"true": _UNSLOTH, "false": to("tuning.backend", "bnb")})),
    ("torch_compile torch_compile_backend torch_compile_mode torch_compile_options compile compile_config",
     lacks("torch.compile is")),
    ("train_from_scratch reinit_weights d_model n_heads n_layers expansion_ratio vocab_size loss_fn attn_config "
     "hidden_size num_layers num_hidden_layers num_attention_heads",
     lacks("training from random weights is", "model.name is a trained model")),
    ("num_labels problem_type", lacks("classification is", "task_mode: sft writes the label as the answer")),
    ("use_cache use_kv_cache", says("training keeps no cache of keys: remove it")),
    ("upcast_layernorm upcast_lmhead_output fp32_norms fp32_norm_classes",
     says("norms follow train.bf16 and model.dtype, as the plan says: remove it")),
    ("mixture_of_depths shift_attn block_diag_attn use_pose quantize_moe_experts experts_implementation "
     "router_aux_loss_coef moe_aux_loss_coef tiled_mlp layer_offloading model_quantization_config "
     "model_quantization_config_kwargs qat fp8_backend fp8_enable_fsdp_float8_all_gather use_onebitllms relora "
     "lisa_activated_layers use_mca use_megatron_bridge use_hyper_parallel use_kt kt_config", lacks("this is")),
)  # fmt: skip

_TUNING: tuple[tuple[str, Known], ...] = (
    ("adapter", Known("tuning.mode", {**_ADAPTERS, "null": _FULL})),
    ("finetuning_type train_type tuner_type sft_type peft_type peft_method tuning_type training_mode",
     Known("tuning.mode", _ADAPTERS)),
    ("peft_config.name", Known("tuning.mode", _ADAPTERS)),
    ("use_peft use_lora enable_lora", Known("tuning.mode", {"true": _LORA, "false": _FULL})),
    ("use_qlora", Known("tuning.mode", {"true": _QLORA, "false": _LORA})),
    ("full_finetuning full_finetune", Known("tuning.mode", {"true": _FULL, "false": _LORA})),
    ("load_in_4bit", Known("tuning.mode", {"true": _QLORA, "false": _NO_BITS})),
    ("load_in_8bit", Known("tuning.mode", {"true": _EIGHT_BIT, "false": say("8 bits are never loaded: remove it")})),
    ("quantization_bit quant_bits bits quantization quantize", Known("tuning.mode", {**_BITS, "true": _QLORA,
     "nf4": _QLORA, "4bit": _QLORA, "bnb": _QLORA, "bitsandbytes": _QLORA, "bnb.nf4": _QLORA, "8bit": _EIGHT_BIT})),
    ("quantization_method quant_method quantization_type quant_config.name",
     Known("tuning.mode", {"bnb": _QLORA, "bitsandbytes": _QLORA},
     words="4-bit NF4 by bitsandbytes is what tuning.mode: qlora is; other methods are not done here")),
    ("bnb_4bit_quant_type", Known(words="tuning.mode: qlora uses nf4 with double quantisation: remove it")),
    ("bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant bnb_4bit_compute_dtype "
     "bnb_4bit_quant_storage bnb_config_kwargs llm_int8_threshold llm_int8_skip_modules quantization_device_map "
     "llm_int8_enable_fp32_cpu_offload", says("tuning.mode: qlora uses NF4, quantised doubly, and computes in "
                                              "train.bf16's precision: remove it")),
    ("gptq gptq_groupsize gptq_model_v1 loftq_config loftq_bits hqq_axis awq", lacks("another quantisation is",
                                                                                    "tuning.mode: qlora")),
    ("lora_r lora_rank rank peft_r lora.rank", Known("tuning.lora.r")),
    ("lora_alpha", Known("tuning.lora.alpha")),
    ("lora_dropout peft_dropout", Known("tuning.lora.dropout")),
    ("lora_target lora_target_modules target_modules lora_attn_modules lora_modules",
     Known("tuning.lora.target_modules", _ALL_LINEAR, read=lambda value: _modules("tuning.lora.target_modules",
         value))),
    ("lora_target_linear apply_lora_to_mlp", Known(values={
        "true": to("tuning.lora.target_modules", "auto"), "false": say("tuning.lora.target_modules lists them")})),
    ("apply_lora_to_output",
     says("the head gets no adapter; whole it is trained by tuning.lora.modules_to_save: [lm_head]")),
    ("lora_modules_to_save modules_to_save additional_target",
     Known("tuning.lora.modules_to_save", {"null": to("tuning.lora.modules_to_save", [])},
           read=lambda value: _modules("tuning.lora.modules_to_save", value))),
    ("peft_use_dora lora_use_dora use_dora", Known("tuning.lora.use_dora")),
    ("peft_use_rslora lora_use_rslora use_rslora rslora", Known("tuning.lora.use_rslora")),
    ("lora_bias bias lora_task_type task_type lora_fan_in_fan_out lora_dtype lora.bias",
     says("adapters have no bias, and their kind follows the model: remove it")),
    ("init_lora_weights peft_init_lora_weights init_weights pissa_init pissa_iter pissa_convert",
     says(_LORA_INIT)),
    ("lora_model_dir adapter_name_or_path adapters create_new_adapter adapter_folder resume_only_model",
     lacks("training on from an adapter is", f"merge it into its model and name that in model.name; a run of this "
                                             f"toolkit: {_RESUME}")),
    ("loraplus_lr_ratio loraplus_lr_embedding lorap_lr_ratio lora_target_parameters target_parameters target_regex "
     "lora_rank_pattern lora_alpha_pattern rank_pattern alpha_pattern layers_to_transform layers_pattern "
     "peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_trainable_token_indices "
     "peft_autocast_adapter_dtype peft_ensure_weight_tying lora_on_cpu module_dropout megatron_config",
     lacks("this of PEFT's options is", "tuning.lora.* is what there is")),
    ("lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel qlora_sharded_model_loading",
     says("fused LoRA kernels come with tuning.backend: unsloth alone: remove it")),
    ("unfrozen_parameters freeze_trainable_layers freeze_trainable_modules freeze_extra_modules freeze_parameters "
     "freeze_parameters_ratio freeze_parameters_regex trainable_parameters trainable_parameters_regex freeze_llm "
     "use_llama_pro", says("tuning.trainable: [layers.28-31, norm, lm_head] names the parts of the model that train")),
    ("use_gradient_checkpointing gradient_checkpointing activation_checkpointing enable_activation_checkpointing "
     "enable_gradient_checkpointing", Known("train.gradient_checkpointing", {
         "unsloth": to("train.gradient_checkpointing", True), "offload": to("train.gradient_checkpointing", True),
         "offload_disk": to("train.gradient_checkpointing", True)})),
    ("disable_gradient_checkpointing", Known(values={"true": to("train.gradient_checkpointing", False),
                                                     "false": to("train.gradient_checkpointing", "auto")})),
    ("gradient_checkpointing_kwargs activation_checkpointing_kwargs use_reentrant use_reentrant_gc",
     says("checkpointing is the kind without re-entrance (use_reentrant=False): remove it")),
    ("activation_offloading enable_activation_offloading selective_checkpointing recompute_granularity",
     lacks("this is", "train.gradient_checkpointing: auto, or a number of layers")),
)  # fmt: skip

_DATA: tuple[tuple[str, Known], ...] = (
    ("stage task task_name training_stage", Known("task_mode", _STAGES)),
    ("rl rlhf_type", Known(words=_PREFERENCE, switch=True)),
    ("dataset dataset_name dataset_path train_dataset train_data train_file train_files training_data data_path "
     "datasets data_files dataset_id data.path data.dataset data.train_files train_path data_name training_file",
     Known("data.train_path", read=_rows_at("data.train_path"))),
    ("eval_dataset val_dataset validation_dataset eval_data val_data validation_file eval_file test_datasets "
     "eval_dataset_path val_file val_files validation_data data.val_files",
     Known("data.val_path", read=_rows_at("data.val_path"))),
    ("pretraining_dataset", Known("data.train_path", read=_rows_at("data.train_path"),
                                  words="with task_mode: cpt")),
    ("val_set_size val_size test_size split_dataset_ratio validation_split eval_size val_split val_ratio eval_ratio "
     "test_split_size",
     Known("data.val_fraction", read=_held_out_share)),
    ("validation_split_percentage", Known("data.val_fraction", read=_percentage)),
    ("dataset_dir dataset_config dataset_config_name dataset_train_split dataset_test_split dataset_split "
     "train_split eval_split split subset dataset_train_name data_dir media_dir "
     "data_shared_file_system custom_dataset_info",
     says("data is named by its files: data.train_path, data.val_path (hub:owner/name:config for one of the hub)")),
    ("template chat_template conversation_template prompt_template", Known(
        values={"tokenizer_default": say("that is so here: remove it")}, read=_template,
        words="the model's own chat template is used; another: data.chat_template: FILE.jinja, chatml or plain")),
    ("chat_template_jinja chat_template_path chat_template_file", Known("data.chat_template")),
    ("template_backend agent_template tool_format use_chat_template response_prefix add_non_thinking_prefix "
     "preserve_thinking disable_ignore_empty_think train_on_eot roles_to_train eot_tokens",
     says("the chat template decides; make preview shows every trained token, data.loss_on which turns are")),
    ("enable_thinking", Known("data.chat_template_kwargs", read=_thinking)),
    ("default_system default_system_message system_prompt system system_message", Known("data.style.system",
     words="and make style writes it into the rows")),
    ("train_on_inputs train_on_prompt train_on_source train_on_prompts",
     Known("data.loss_on", _switch("data.loss_on", "all", "assistant"))),
    ("mask_history train_on_last_turn_only", Known(
        "data.loss_on", _switch("data.loss_on", "completion", "assistant"))),
    ("completion_only_loss", Known("data.loss_on", _switch("data.loss_on", "completion", "all"))),
    ("train_on_responses_only", Known("data.loss_on", _switch("data.loss_on", "assistant", "all"))),
    ("assistant_only_loss mask_prompt", Known("data.loss_on", _switch("data.loss_on", "assistant", "all"))),
    ("loss_scale masking_strategy target_prompts target_responses", Known("data.loss_on", _LOSS)),
    ("ignore_pad_token_for_loss", says("padding is never trained: remove it")),
    ("sample_packing packing neat_packing packed packing_strategy use_packing batching_strategy dataset.packed "
     "pack_sequences", Known("data.packing", _PACKING)),
    ("eval_sample_packing eval_packing", says("held-out rows are never packed: remove it")),
    ("padding_free batch_flattening pad_to_sequence_len pad_to_multiple_of padding pad_to_max_length "
     "dynamic_padding multipack_real_batches packing_ratio packing_num_proc sample_packing_sequentially "
     "sample_packing_eff_est sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method "
     "total_num_tokens total_supervised_tokens", says(_PADDING)),
    ("max_samples max_train_samples num_train_samples max_eval_samples fraction dataset_shard_idx dataset_shard_num "
     "num_dataset_shards_to_save eval_limit eval_subset_num_batches limit",
     says("all rows are trained: a shorter file, or train.max_steps")),
    ("streaming dataset_streaming buffer_size shuffle_buffer_size streaming_multipack_buffer_size "
     "preprocess_iterable lazy_tokenize dataset_keep_in_memory preprocessing_batch_size pretrain_multipack_attn "
     "pretrain_multipack_buffer_size pretraining_sample_concatenation",
     says("rows are prepared once, before the first step, and read from disk: remove it")),
    ("dataset_prepared_path tokenized_path overwrite_cache load_from_cache_file cached_dataset download_mode "
     "cached_val_dataset push_dataset_to_hub", says(_CACHED)),
    ("preprocessing_num_workers dataset_processes dataset_num_proc num_proc preprocessing_workers",
     Known("data.workers")),
    ("dataset_text_field text_column text_field", Known("data.columns", read=_with_text_column)),
    ("column_mapping columns_mapping disable_auto_column_mapping field_messages message_property_mappings",
     says("data.columns: {prompt: yours, completion: yours} names them; usual names are known")),
    ("truncation_strategy truncation_mode excess_length_strategy truncation_side",
     Known("data.truncate", _TRUNCATION)),
    ("min_sample_len", lacks("leaving short rows out is", "leave them out of the file")),
    ("shuffle_dataset shuffle_merged_datasets dataset_shuffle val_dataset_shuffle disable_shuffling shuffle "
     "shuffle_before_merging_datasets train_dataloader_shuffle curriculum_sampling dataloader_in_order", says(_ORDER)),
    ("remove_unused_columns label_names skip_prepare_dataset dataset_kwargs length_column_name "
     "eval_do_concat_batches", says("the rows are prepared by this toolkit, which needs no such word: remove it")),
    ("dataset_exact_deduplication", Known("data.process.drop_duplicates")),
    ("mix_strategy interleave_probs interleave_prob stopping_strategy dataset_weights dataset_mixture dataset_mixer "
     "mixture sampling_probabilities mixing_weights sampling_weights", says(_DRAWN)),
    ("freeze_vision_tower freeze_multi_modal_projector freeze_language_model freeze_mm_modules freeze_vit "
     "freeze_aligner norm_bbox max_pixels vit_lr aligner_lr vit_gradient_checkpointing crop_to_patches",
     says(_PICTURES)),
    ("answer_column prompt_column response_column query_column", says("data.columns: {prompt: …, completion: …}")),
)  # fmt: skip

_TRAIN: tuple[tuple[str, Known], ...] = (
    ("per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu device_train_microbatch_size "
     "batch_size per_gpu_train_batch_size micro_batch_size_per_gpu micro_train_batch_size batch_size_per_gpu",
     Known("train.batch_size")),
    ("train_batch_size global_train_batch_size global_batch_size total_batch_size total_train_batch_size",
     Known("train.effective_batch_size")),
    ("gradient_accumulation_steps gradient_accumulation accumulate_grad_batches grad_accumulation_steps "
     "grad_accum_steps",
     Known("train.grad_accum")),
    ("per_device_eval_batch_size eval_batch_size device_eval_batch_size eval_micro_batch_size",
     Known("eval.batch_size")),
    ("auto_find_batch_size", Known(values={"true": to("train.batch_size", "auto"),
     "false": say("train.batch_size: N")})),
    ("num_train_epochs num_epochs n_epochs max_epochs train_epochs epoch_count", Known("train.epochs")),
    ("max_duration", Known("train.epochs", read=_duration)),
    ("max_steps num_steps train_steps total_steps num_training_steps max_train_steps training_steps "
     "max_steps_per_epoch train.steps", Known("train.max_steps", {
         name: say("without a limit train.epochs decides: remove it") for name in ("-1", "0")})),
    ("lr peak_lr initial_lr max_lr", Known("train.learning_rate")),
    ("warmup_ratio warmup_fraction num_warmup_steps lr_warmup_steps lr_warmup_ratio warmup",
     Known("train.warmup_steps", words="below 1 it is a share of the steps")),
    ("lr_scheduler lr_scheduler_type scheduler lr_scheduler_name scheduler.name lr_schedule scheduler.type "
     "lr_scheduler.name lr_scheduler._component_", Known("train.lr_scheduler_type", _SCHEDULES)),
    ("lr_scheduler_kwargs cosine_min_lr_ratio cosine_constant_lr_ratio eta_min min_lr lr_quadratic_warmup "
     "lr_div_factor alpha_f t_warmup t_max scheduler.alpha_f min_lr_ratio warmup_min_lr warmup_max_lr",
     says(_SCHEDULE)),
    ("optimizer optim optimizer_type optimizer.name optimizer.type optimizer._component_ optimizer.class_name "
     "optim_config.name",
     Known("train.optim", _OPTIMIZERS)),
    ("optim_args optim_target_modules adam_beta3 adam_epsilon2 optimizer.fused lr_groups embedding_lr "
     "embedding_lr_scale", says(_ADAM)),
    ("adam_beta1 beta1", Known(values={"0.9": say("that is so here: remove it")}, words=_ADAM)),
    ("adam_epsilon adam_eps eps epsilon", Known(values={"1e-08": say("that is so here: remove it")}, words=_ADAM)),
    ("beta2", Known("train.adam_beta2")),
    ("betas", Known("train.adam_beta2", read=_second_beta)),
    ("gradient_clipping max_norm gradient_clip_val clip_grad_norm clip_grad max_gradient_norm grad_clip",
     Known("train.max_grad_norm")),
    ("label_smoothing_factor label_smoothing neftune_noise_alpha noisy_embedding_alpha average_tokens_across_devices "
     "use_dft_loss use_eaft_loss use_eaft eaft_alpha eaft_k use_asft_loss asft_alpha enable_dft_loss "
     "enable_channel_loss do_causal_lm_eval", lacks("another loss is", "the loss is the mean over all trained tokens")),
    ("mixed_precision precision bf16.enabled", Known("train.bf16", _PRECISIONS)),
    ("bf16 bfloat16 use_bf16", Known("train.bf16", _PIECES)),
    ("fp16 float16 use_fp16 fp16.enabled", Known("train.fp16", {
        "true": _FP16, "false": to("train.fp16", False),
        "auto": to("train.bf16", "auto", "float16 is taken where a GPU has no bf16")})),
    ("float32 fp32", Known(values={"true": _FP32, "false": say(REMOVE)})),
    ("fp8", Known(values={"true": _FP8}, words="FP8 is not trained here: remove it")),
    ("tf32 bf16_full_eval fp16_full_eval allow_tf32",
     says("precision is train.bf16's, evaluation included: remove it")),
    ("downcast_bf16", says(_LAUNCHER)),
    ("log_every_n_steps logging_interval log_interval steps_per_print", Known("train.logging_steps")),
    ("console_log_interval", Known("train.logging_steps", read=_every("train.logging_steps"))),
    ("logging_strategy logging_dir logging_first_step logging_nan_inf_filter log_level log_level_replica plot_loss "
     "log_on_each_node log_to_console progress_bar disable_tqdm include_num_input_tokens_seen include_tkps "
     "include_tokens_per_second include_effective_tokens_per_second print_param_status log_peak_memory_stats "
     "metric_logger", says(_TB)),
    ("save_strategy checkpointing_strategy", Known("train.save_steps", _SAVE_WHEN)),
    ("save_steps checkpointing_steps save_every save_interval checkpoint_interval save_freq",
     Known("train.save_steps", read=_every("train.save_steps"),
           values={"0": say("train.save_steps: null saves at the end of each epoch")})),
    ("saves_per_epoch save_per_epoch", Known("train.save_steps", {"1": to("train.save_steps", None, "each epoch")},
                                             read=_per_epoch("train.save_steps"))),
    ("save_num_checkpoints_to_keep max_checkpoints save_limit", Known("train.save_total_limit")),
    ("save_only_model save_safetensors safe_serialization save_first_step save_on_each_node max_shard_size "
     "save_adapter_weights_only create_checkpoint_symlink enable_jit_checkpoint save_optimizer use_flash_ckpt "
     "torch_save save_overwrite checkpointer", says("checkpoints are whole (weights, optimizer, position), in "
                                                    "safetensors, and can be resumed: remove it")),
    ("metric_for_best_model", Known("train.metric_for_best_model", {
        "eval_loss": to("train.metric_for_best_model", "loss"), "loss": to("train.metric_for_best_model", "loss")})),
    ("greater_is_better", says("train.metric_for_best_model knows which way is better: remove it")),
    ("early_stopping_steps", Known("train.early_stopping_patience")),
    ("early_stop_interval", Known("train.early_stopping_patience")),
    ("report_to log_with logger trackers", Known("train.report_to", {
        "none": to("train.report_to", []), "no": to("train.report_to", []), "false": to("train.report_to", []),
        "all": to("train.report_to", ["tensorboard", "wandb"])}, read=_word_in_list)),
    ("use_wandb wandb", Known("train.report_to", {"true": _WANDB, "false": to("train.report_to", ["tensorboard"])})),
    ("wandb_project", Known(words="WANDB_PROJECT={value} before make, with train.report_to: [wandb]", switch=True)),
    ("wandb_entity", Known(words="WANDB_ENTITY={value} before make, with train.report_to: [wandb]", switch=True)),
    ("wandb_name wandb_run_name", Known("output.name", words="which W&B shows too")),
    ("wandb_run_id wandb_watch wandb_log_model wandb_mode wandb_group wandb_tags", Known(
        words="W&B reads its own variables (WANDB_RUN_ID, WANDB_WATCH, WANDB_MODE, …), with train.report_to: [wandb]",
        switch=True)),
    ("use_mlflow", Known("train.report_to", {"true": to("train.report_to", ["mlflow"]), "false": say(REMOVE)})),
    ("use_trackio", Known("train.report_to", {"true": to("train.report_to", ["trackio"]), "false": say(REMOVE)})),
    ("mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts", Known(
        words="MLflow reads its own variables (MLFLOW_TRACKING_URI, …), with train.report_to: [mlflow]", switch=True)),
    ("use_tensorboard", Known("train.report_to", {"true": to("train.report_to", ["tensorboard"]),
                                                  "false": to("train.report_to", [])})),
    ("project trackio_space_id trackio_bucket_id trackio_static_space_id trackio_project_name trackio_run_name "
     "use_comet use_neptune comet_project_name project_name", Known(words=_TRACKER, switch=True)),
    ("data_seed random_seed global_seed random_state", Known("train.seed")),
    ("full_determinism", says("a run repeats its numbers by train.seed on the same machine: remove it")),
    ("num_workers dataloader_num_proc train_loader.num_workers", Known("train.dataloader_num_workers")),
    ("pin_memory", Known("train.dataloader_pin_memory")),
    ("dataloader_drop_last dataloader_prefetch_factor dataloader_persistent_workers persistent_workers drop_last "
     "prefetch_factor dataloader_multiprocessing_context", says("no row is dropped, and batches are prepared by "
                                                "train.dataloader_num_workers: remove it")),
    ("train_sampling_strategy", Known("train.group_by_length", {
        "group_by_length": to("train.group_by_length", True), "random": to("train.group_by_length", False)})),
    ("torch_empty_cache_steps gc_steps gc_collect_steps skip_memory_metrics empty_cache expandable_segments",
     says("the plan keeps room for what the allocator loses, and memory-check shows what is held: remove it")),
    ("loss_watchdog_threshold loss_watchdog_patience", says("a loss that is not finite stops the run: remove it")),
    ("trainer_cls custom_register_path external_plugins callbacks algorithms callback",
     lacks("code of your own in the run is")),
)  # fmt: skip

_EVAL: tuple[tuple[str, Known], ...] = (
    ("eval_strategy evaluation_strategy", Known("eval.steps", _EVAL_WHEN)),
    ("eval_steps eval_every val_check_interval evaluation_steps eval_interval run_val_every_n_steps",
     Known("eval.steps", read=_every("eval.steps"))),
    ("evals_per_epoch eval_per_epoch", Known("eval.steps", {
        "1": to("eval.steps", None, "each epoch"), "0": to("eval.steps", 0, "never")}, read=_per_epoch("eval.steps"))),
    ("do_eval", Known("eval.steps", {"true": to("eval.steps", None, "each epoch"), "false": to("eval.steps", 0,
     "never")})),
    ("do_train do_predict", says("the command says what is done (make train, make check): remove it")),
    ("eval_on_start eval_first", Known("eval.before_training")),
    ("predict_with_generate", Known("eval.generate_rows", {
        "true": say("here it is eval.generate_rows: N (answers generated and compared)"),
        "false": to("eval.generate_rows", 0)})),
    ("generation_max_new_tokens max_target_length generation_max_length generate_max_len",
     Known("eval.max_new_tokens")),
    ("eval_delay eval_accumulation_steps eval_table_size eval_causal_lm_metrics eval_max_new_tokens eval_metric "
     "prediction_loss_only include_for_metrics batch_eval_metrics eval_use_gather_object eval_on_each_dataset "
     "do_bench_eval bench_dataset bench_split compute_accuracy eval_loader icl_tasks eval_gauntlet "
     "eval_use_evalscope eval_dataset_args extra_eval_args eval_generation_config",
     says("evaluation takes the loss over all held-out rows, and eval.generate_rows answers compared word for word: "
          "remove it")),
    ("temperature top_p top_k num_beams eval_num_beams do_sample repetition_penalty length_penalty generate_samples "
     "num_generation_samples skip_special_tokens infer_backend sample_backend stop_words", says(_GENERATION)),
)  # fmt: skip

_OUTPUT: tuple[tuple[str, Known], ...] = (
    ("output_dir save_folder save_dir output_path output_folder", Known("output.dir")),
    ("run_name experiment_name train.name", Known("output.name")),
    ("overwrite_output_dir", Known("output.if_exists", _switch("output.if_exists", "replace", "fail"))),
    ("resume_from_checkpoint auto_resume_from_checkpoints autoresume resume load_path ignore_data_skip "
     "restore_callback_states_from_checkpoint load_args load_weights_only", Known(words=_RESUME, switch=True)),
    ("push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push push_to_hub_model_id "
     "export_hub_model_id use_hf", Known(words=_HUB, switch=True)),
    ("merge_lora merge_method export_dir export_size export_device export_legacy_format export_quantization_bit "
     "merge_adapter", says(_AFTER)),
)  # fmt: skip

_DISTRIBUTED: tuple[tuple[str, Known], ...] = (
    ("backend tuner_backend distributed_backend", Known("tuning.backend", {
        "deepspeed": say("make train-deepspeed (or make train-distributed STRATEGY=zero2)"),
        "accelerate": say("make train-distributed"), "torchrun": say("make train-distributed"),
        "peft": to("tuning.backend", "bnb"), "bitsandbytes": to("tuning.backend", "bnb"),
        "huggingface": to("tuning.backend", "bnb"), "hf": to("tuning.backend", "bnb"),
        **{name: say("ranks speak NCCL on GPUs and gloo on CPUs by themselves: remove it")
           for name in ("nccl", "gloo", "mpi", "hccl", "ccl")}, **_LAYOUTS})),
    ("ddp_backend dist_backend", says("ranks speak NCCL on GPUs and gloo on CPUs by themselves: remove it")),
    ("strategy parallel_strategy distributed_strategy parallelism parallel_mode distributed_type", Known(
        values={**_LAYOUTS, "auto": say("the plan chooses the layout: remove it"), "no": say("make train"),
                "deepspeed": say("make train-deepspeed"), "multi_cpu": say("make train-distributed NPROC=2")},
        words="make train-distributed STRATEGY=ddp, fsdp, zero1, zero2, zero3, zero2_offload or zero3_offload")),
    ("deepspeed deepspeed_config deepspeed_config_file deepspeed_plugin", Known(
        read=_deepspeed, words="make train-deepspeed DEEPSPEED_CONFIG=FILE", switch=True)),
    ("zero_stage deepspeed_stage zero_optimization.stage", Known(values={
        stage: say(f"make train-distributed STRATEGY=zero{stage}") for stage in "123"},
        words="make train-distributed STRATEGY=ddp holds everything on every GPU")),
    ("zero3_offload", Known(values={"true": say("make train-distributed STRATEGY=zero3_offload")},
                            words="it is off unless STRATEGY=zero3_offload is given: remove it")),
    ("zero2_offload", Known(values={"true": say("make train-distributed STRATEGY=zero2_offload")},
                            words="it is off unless STRATEGY=zero2_offload is given: remove it")),
    ("offload_optimizer offload_param offload_optimizer_device offload_param_device cpu_offload", Known(
        words="make train-distributed STRATEGY=zero2_offload (optimizer) or zero3_offload (weights too)", switch=True)),
    ("zero_optimization zero_force_ds_cpu_optimizer zero_allow_untested_optimizer zero3_init_flag "
     "zero3_save_16bit_model "
     "zero_hpz_partition_size deepspeed_autotp_size deepcompile wall_clock_breakdown "
     "ds3_gather_for_generation gradient_predivide_factor prescale_gradients", says(_ZERO_FILE)),
    ("fsdp use_fsdp", Known(words=_FSDP, switch=True)),
    ("fsdp_config fsdp_version fsdp_transformer_layer_cls_to_wrap fsdp_final_state_dict_type fsdp_plugin "
     "parallelism_config accelerator_config dist_config init_config", says(_FSDP_OPTIONS)),
    ("dp_shard_size data_parallel_shard_degree", Known(
        words="make train-distributed STRATEGY=fsdp over all GPUs; groups of fewer: STRATEGY=fsdp_hybrid with "
              "distributed.shard_ranks: {value}")),
    ("dp_replicate_size data_parallel_replicate_degree", Known(
        words="STRATEGY=ddp copies the model, fsdp_hybrid shards within distributed.shard_ranks")),
    ("tensor_parallel_size tp_size tensor_model_parallel_size tensor_parallel tensor_parallel_degree",
     Known(read=_axis("tp"), words=_MESH.format(axis="tp"), switch=True,
           values={"1": say("1 is what there is without it: remove it")})),
    ("context_parallel_size cp_size sequence_parallel_degree sequence_parallel_size sequence_parallel ulysses_size "
     "context_parallel_degree",
     Known(read=_axis("cp"), words=_MESH.format(axis="cp"), switch=True,
           values={"1": say("1 is what there is without it: remove it")})),
    ("ring_attn_func heads_k_stride cp_backend sp_backend", says(
        "ranks that share a row exchange heads for tokens (Ulysses), which has no options: remove it")),
    ("pipeline_parallel_size pipeline_model_parallel_size expert_parallel_size expert_model_parallel_size "
     "pp_size ep_size",
     lacks("this kind of parallelism is", "make train-distributed chooses a layout")),
    ("num_processes nproc_per_node n_gpus num_gpus n_gpu gpu_count devices gpus_per_node", Known(
        words="make train-distributed NPROC={value} (processes on this node)")),
    ("num_machines num_nodes nnodes", Known(words="make train-distributed NNODES={value}, the command once on each")),
    ("machine_rank node_rank", Known(words="make train-distributed NODE_RANK={value}")),
    ("main_process_ip master_addr", Known(words="make train-distributed MASTER_ADDR={value}")),
    ("main_process_port master_port", Known(words="make train-distributed MASTER_PORT={value}")),
    ("gpu_ids visible_devices cuda_visible_devices gpus", Known(words="make train-distributed GPUS={value}")),
    ("local_rank world_size global_rank compute_environment rdzv_backend rdzv_id same_network main_training_function "
     "tpu_env tpu_use_cluster tpu_use_sudo tpu_name dynamo_config dynamo_backend use_cpu ray_num_workers "
     "ray_init_kwargs use_ray", says(_LAUNCHER)),
    ("ddp_timeout dist_timeout timeout ddp_timeout_s nccl_timeout", Known("distributed.timeout_s", read=_seconds)),
    ("find_unused_parameters ddp_find_unused_parameters", Known("distributed.find_unused_parameters")),
    ("sync_gradients_every", Known("distributed.sync_gradients_every")),
    ("sync_each_batch", Known("distributed.sync_gradients_every",
                              _switch("distributed.sync_gradients_every", "micro_batch", "auto"))),
    ("no_sync", Known("distributed.sync_gradients_every", _switch("distributed.sync_gradients_every", "step",
                                                                 "micro_batch"))),
    ("profile_communication comms_logger comms_logger.enabled",
     Known("distributed.profile_communication", _switch("distributed.profile_communication", True, False))),
    ("communication_data_type reduce_dtype mixed_precision_reduce fsdp_reduce_dtype fsdp_mixed_precision_reduce_dtype",
     Known("distributed.mixed_precision.reduce", _REDUCED)),
    ("param_dtype mixed_precision_param fsdp_param_dtype fsdp_mixed_precision_param_dtype",
     Known("distributed.mixed_precision.param", _GATHERED)),
    ("buffer_dtype fsdp_buffer_dtype fsdp_mixed_precision_buffer_dtype",
     Known("distributed.mixed_precision.buffer", _BUFFERED)),
    ("comm_hook ddp_comm_hook", Known("distributed.mixed_precision.reduce", _HOOKS)),
    ("grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 fp32_allreduce fp32_reduce_scatter",
     Known("distributed.mixed_precision.reduce", _IN_FP32)),
    ("mixed_precision_policy mp_policy fsdp_mixed_precision_policy fsdp_mixed_precision data_types", says(_POLICY)),
    ("profiler_steps", Known("train.profile_steps")),
    ("enable_torch_profiler profiler profile profiler_steps_start profiler_output_dir profiler_wait_steps "
     "profiler_warmup_steps profiler_active_steps", says(_SEEN)),
    ("ddp ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph overlap_grad_reduce overlap_param_gather "
     "use_distributed_optimizer ignore_bias_buffers",
     says("DDP is set up by the plan (make train-distributed STRATEGY=ddp): remove it")),
)  # fmt: skip

_OTHER: tuple[tuple[str, Known], ...] = (
    ("reward_model ref_model ref_model_adapters ref_model_quantization_bit reward_model_type reward_model_adapters trl "
     "vllm ebft num_generations beta process_reward_model center_rewards_coefficient precompute_ref_log_probs "
     "ld_alpha reward_funcs advantage_estimator max_prompt_len", says(_PREFERENCE)),
    ("train_loader.name test_value use_scattermoe use_sonicmoe bias_activation_fusion apply_rope_fusion "
     "strict debug mode is_preprocess check_model ignore_args_error lazy_mode verbose add_version env_capabilities "
     "capabilities secrets gpu use_swift_lora", says("nothing here reads it: remove it")),
    ("use_galore use_apollo use_badam use_muon use_adam_mini torchdistx_path", lacks(
        "this optimizer is", "train.optim: paged_adamw_8bit or adafactor needs less memory")),
)  # fmt: skip

PREFIXES: tuple[tuple[tuple[str, ...], Known], ...] = (
    (("galore_", "apollo_", "badam_", "qgalore_", "dion_", "muon_"), lacks(
        "this optimizer is", "train.optim: paged_adamw_8bit or adafactor needs less memory")),
    (("swanlab_", "comet_", "neptune_", "trackio_", "use_swanlab", "otel_", "use_otel"),
     Known(words=_TRACKER, switch=True)),
    (("dpo_", "kto_", "ppo_", "pref_", "orpo_", "cpo_", "simpo_", "grpo_", "rl_", "reward_", "rlhf_"),
     says(_PREFERENCE)),
    (("vllm_", "sglang_", "lmdeploy_", "export_", "infer_"), says(_AFTER)),
    (("generation_",), says(_GENERATION)),
    (("image_", "video_", "audio_", "use_audio"), says(_PICTURES)),
    (("liger_",), says(_FUSED)),
    (("fsdp_",), says(_FSDP_OPTIONS)),
    (("wandb_",), Known(words="W&B reads its own variables (WANDB_…), with train.report_to: [wandb]", switch=True)),
    (("profiler_", "profile_"), says(_SEEN)),
    (("adalora_", "boft_", "oft_", "vera_", "reft_", "fourier_", "lora_ga_", "llamapro_", "loftq_", "relora_", "lisa_"),
     lacks("this kind of adapter is", "tuning.mode: lora or qlora")),
    (("kt_", "megatron_", "hyper_parallel_", "moe_", "diffusion_", "scaling_softmax", "pose_", "jagged_restart_",
     "tpu_",
      "icl_", "ebft_", "eaft_", "asft_"), lacks("this is")),
    (("gradio_", "bench_"), says(_AFTER)),
)  # fmt: skip
"""How the names of keys begin that are answered alike."""

SECTIONS: Mapping[str, str] = {
    **dict.fromkeys(("training", "trainer", "training_args", "training_arguments", "trainer_args", "train_args",
                     "train_config", "training_config", "sft", "sft_config", "hyperparameters", "hparams", "optimizer",
                     "optimizer_config", "optim_config", "params", "variables",
                     "lr_scheduler", "scheduler", "logging", "checkpointing", "solver",
                     "checkpoint", "training_arguments_config", "fit"), "train"),
    **dict.fromkeys(("model_args", "model_arguments", "model_configuration", "base"), "model"),
    **dict.fromkeys(("peft", "lora", "peft_config", "lora_config", "peft_args", "lora_args", "adapter_config"),
                    "tuning.lora"),
    **dict.fromkeys(("finetuning_args", "method", "quantization_config", "quant_config", "bnb_config"), "tuning"),
    **dict.fromkeys(("data_args", "data_config", "dataset_args", "script_args", "train_loader", "dataset_config"),
        "data"),
    **dict.fromkeys(("evaluation", "eval_args", "eval_config"), "eval"),
    **dict.fromkeys(("accelerate", "distributed_args", "parallel", "launcher"), "distributed"),
}  # fmt: skip
"""Sections of other tools, and the one of ours that most of their keys belong to: each inner key is answered."""


def _modules(path: str, value: Any) -> Answer | None:
    """A list of modules that stands as one text: `q_proj,v_proj`."""
    if not isinstance(value, str):
        return None
    names = [part.strip() for part in value.split(",") if part.strip()]
    plain = all(re.fullmatch(r"\w+(\.\w+)*", name) for name in names)
    return to(path, list(names)) if names and plain else None


def _table() -> dict[str, Known]:
    found: dict[str, Known] = {}
    for names, known in (*_MODEL, *_TUNING, *_DATA, *_TRAIN, *_EVAL, *_OUTPUT, *_DISTRIBUTED, *_OTHER):
        for name in names.split():
            assert name not in found, f"{name} stands twice in the table"
            found[name] = known
    return found


KNOWN: Mapping[str, Known] = _table()
"""Keys of other tools; `optimizer.name` is `name` inside of `optimizer`."""


PLAIN = [name for name in KNOWN if "." not in name]
"""Keys that stand alone, for those that are misspelt."""


def known(parts: tuple[str, ...]) -> Known | None:
    """The row of a key by its names from the root: of the last two, of the last, or of how it begins."""
    names = [part.strip().lower().replace("-", "_") for part in parts[-2:]]
    for name in (".".join(names), names[-1]):
        if name in KNOWN:
            return KNOWN[name]
    return next((row for begins, row in PREFIXES if names[-1].startswith(begins)), None)


def answer(row: Known, value: Plain) -> Answer:
    """What a row says to a value: by its spelling, by reading it, as it stands where our key takes it, or in words."""
    word = spelled(value)
    for one in (word, {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(word, word)):
        if one in row.values:
            return row.values[one]
    if value is None or (row.switch and word in _OFF):
        return say("nothing is asked with it: remove it")
    found = row.read(value) if row.read else None
    if found is not None:
        more = row.words if found.settings and row.path else ""
        return Answer(found.settings, "; ".join(filter(None, [found.words, more])))
    for form in _forms(value) if row.path else ():
        if accepts(row.path, form):
            return to(row.path, form, row.words)
    if not row.path or row.words:
        return say(row.words or REMOVE)
    return say(f"here it is {row.path} ({leaves()[row.path].expects})")


def _forms(value: Plain) -> Iterator[Plain]:
    """A value as it stands, and the number that it is in another form (`16.0`, `"2e-5"`)."""
    yield value
    number: Plain = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return
        yield number
    if isinstance(number, float) and number.is_integer():
        yield int(number)
