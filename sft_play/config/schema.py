"""`RunConfig`: everything that a user can set. Each key has one docstring, one owner and one
default.

The owner is the module that reads the key; a test proves that it does and that changing the key
changes something downstream. `configs/reference.yaml` and `configs/run.schema.json` are generated
from this file.
"""

import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticUndefined

# The learning rate where `train.learning_rate` is auto: one rule, from published sweeps.
#
# Adapters: Thinking Machines' sweep (tulu3, 780 steps of 128 rows, alpha 32; get_lr and
# sft_sweep.md of tinker-cookbook, 2026) finds 3e-4 to 1e-3 best for all models but one, and at
# ranks 1 to 64 hardly a difference between 2e-4 and 4e-4. Its authors withdrew their formula by
# model size, so size is not in the rule. "LoRA Without Regret" (Schulman et al., 2025): at first
# the product of alpha, A's scale and B's learning rate decides how fast the weights move, so a
# larger scale x rank takes a smaller rate. A smaller one gets no larger rate: it only learns more
# slowly.
#
# Full: 2e-5 at 128 rows (Stanford Alpaca; the alignment handbook). Rows: the square root, as for
# Adam (Malladi et al., 2022, https://arxiv.org/abs/2205.10287), within what was published: QLoRA's
# 16 rows to the sweep's 128.

# At 128 rows a step; of adapters at alpha 32 (by alpha / r).
ADAPTER_RATE, FULL_RATE = 4e-4, 2e-5
REFERENCE_ALPHA = 32
# Lion steps by signs: its rate is 3 to 10 times smaller than AdamW's
# (https://arxiv.org/abs/2302.06675).
LION_DIVISOR = 5
# Fewer, or more, rows than these change nothing any more.
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 16, 128


def auto_learning_rate(
    *, alpha: float | None, rows: int, is_lion: bool = False
) -> tuple[float, str]:
    """The peak learning rate and the reason for it. `alpha`: the adapters' scale times their rank
    (alpha, or with rsLoRA alpha x sqrt(r)) and the ratio of lora_B's rate to this one; None: all
    weights train. `rows`: the effective batch."""
    counted_rows = min(max(rows, MIN_BATCH_ROWS), MAX_BATCH_ROWS)
    base = FULL_RATE if alpha is None else ADAPTER_RATE
    rate, derivation = (
        base * math.sqrt(counted_rows / MAX_BATCH_ROWS),
        f"{base:g} at {MAX_BATCH_ROWS} rows a step x sqrt({counted_rows}/{MAX_BATCH_ROWS})",
    )
    if alpha is not None and alpha > REFERENCE_ALPHA:
        rate, derivation = (
            rate * REFERENCE_ALPHA / alpha,
            (
                f"{derivation} x {REFERENCE_ALPHA}/{alpha:.4g}, since the adapters' scale x rank x"
                " lora_B's ratio is that large"
            ),
        )
    if is_lion:
        rate, derivation = rate / LION_DIVISOR, f"{derivation} / {LION_DIVISOR} for Lion"
    rounded = float(f"{rate:.3g}")
    return rounded, f"learning rate {rounded:g} (auto): {derivation} (docs/tuning.md)"


# The name of the owner's entry in a key's JSON schema.
OWNER = "owner"


def option(default: Any = PydanticUndefined, *, owner: str, **limits: Any) -> Any:
    """A key with its default, the module that reads it (below `sft_play`), and its limits;
    `default_factory`: a default that is made, or that follows from the keys above it in its
    section."""
    return Field(default, json_schema_extra={OWNER: owner}, **limits)


# The key of an option's other names in its metadata.
EXTERNAL_NAMES = "elsewhere"


@dataclass(frozen=True)
class ExternalNames:
    """The names of an optimizer option in the Trainer, DeepSpeed's file and other tools."""

    # The argument of transformers' TrainingArguments, which the trainers of TRL and Unsloth take
    # too.
    trainer: str
    # Its path in DeepSpeed's file, where that has it; `betas.1` is the second of a list.
    deepspeed: str | None = None
    # Names in other tools' files that take the same values; other_tools.yaml translates those that
    # take others.
    other_tools: str = ""
    # The values of train.optim that read it; empty: all.
    optimizers: tuple[str, ...] = ()


def optimizer_option(default: Any, external_names: ExternalNames, **limits: Any) -> Any:
    """An optimizer option: Trainer, DeepSpeed, Unsloth, bench, TensorBoard and hints find it by its
    entry here."""
    return Field(
        default,
        json_schema_extra={OWNER: "training.loop.trainer", EXTERNAL_NAMES: external_names},  # type: ignore[dict-item]
        **limits,
    )


# The optimizers that are AdamW, or have it beside them.
ADAMW_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adamw_8bit", "muon")
# The optimizers of bitsandbytes.
BITSANDBYTES_OPTIMIZERS = ("paged_adamw_8bit", "adamw_8bit", "lion_32bit", "lion_8bit")


class Section(BaseModel):
    """Frozen and strict: an unknown key or a value of the wrong type is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # true is no number, and "1" is none either
        # the text below a field is its description, in messages and in the reference
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,  # also derived defaults have to be within their limits
    )


Name = Annotated[str, Field(min_length=1)]

# Short names of dtypes, which keys take for torch's.
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _torch_dtype_name(value: Any) -> Any:
    return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


TorchDtypeName = BeforeValidator(_torch_dtype_name)
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], TorchDtypeName]

# A flash attention kernel of the Hugging Face hub, pinned: what is fetched is code that the run
# executes.
HUB_KERNEL_PATTERN = r"^[\w.-]+/[\w.-]*flash[\w.-]*@[0-9a-f]{40}$"


class ModelConfig(Section):
    """The model to train."""

    name: Name = option(owner="training.prepare.model_spec")
    """Hub id (`Qwen/Qwen2.5-3B-Instruct`) or local folder (starts with `/`, `.` or `~`, or
    exists)."""

    revision: Name | None = option(None, owner="training.prepare.model_spec")
    """Branch, tag or commit on the hub; null uses the default branch."""

    adapter: Name | None = option(None, owner="training.model.model_loading")
    """Adapter that training continues: a run's name in the output folder, its path, `last`, or an
    adapter's folder. Its rank, alpha, target modules and the like are taken from it. null starts a
    new one."""

    add_tokens: tuple[Name, ...] = option((), owner="training.prepare.tokenizer")
    """Tokens that the tokenizer gets, such as `[<think>, </think>]`. Their rows begin as the mean
    of the pieces that each was split into; with adapters only these rows of the embeddings train,
    and are saved with the adapter."""

    max_seq_len: int = option(2048, owner="planner.decide", ge=8)
    """Longest training row in tokens; longer rows are cut or left out (data.truncate), and
    counted."""

    dtype: Dtype = option("auto", owner="planner.precision")
    """Dtype that the weights are loaded in; auto uses the compute precision."""

    attn_implementation: (
        Literal["auto", "sdpa", "eager", "flash_attention_2"]
        | Annotated[str, Field(pattern=HUB_KERNEL_PATTERN)]
    ) = option("auto", owner="training.prepare.model_spec")
    """Attention implementation. auto uses sdpa if the model has it, and attends to packs by their
    boundaries if that is exact for the model. `kernels-community/flash-attn2@` and a commit: that
    kernel of the hub, through the package kernels."""

    experts_implementation: Literal["auto", "grouped_mm", "eager"] = option(
        "auto", owner="planner.kernels"
    )
    """How a mixture of experts is computed. grouped_mm: all experts of a block at once; eager: one
    after another, several times slower. auto uses grouped_mm if the model's class and sizes allow
    it."""

    mesh_shape: int | tuple[int, ...] | tuple[tuple[int, ...], tuple[str, ...]] | None = option(
        None, owner="planner.decide"
    )
    """Device mesh, such as `[[2, 4], [fsdp, tp]]`: fsdp shards weights, tp splits tensors, cp
    splits rows, dp replicates. The product is the number of processes. null lets the plan
    choose."""

    trust_remote_code: bool = option(False, owner="training.prepare.model_spec")
    """Run Python code that comes with the model."""


class LoraConfig(Section):
    """The adapters of `tuning.mode: lora` and `qlora`."""

    r: int = option(16, owner="training.prepare.lora_config", ge=1, le=65_536)
    """Rank of the adapters."""

    alpha: int = option(32, owner="training.prepare.lora_config", ge=1)
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with rsLoRA)."""

    dropout: float = option(0.0, owner="training.prepare.lora_config", ge=0.0, lt=1.0)
    """Dropout before the adapter; costs memory for every target module."""

    target_modules: Literal["auto"] | Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        "auto", owner="training.prepare.lora_config"
    )
    """Modules that get an adapter; auto means every linear layer of the language model that takes
    one, never lm_head."""

    target_parameters: Literal["auto"] | tuple[Name, ...] = option((), owner="config.schema")
    """Weights of experts that get an adapter each, where a class keeps those of all experts as one
    tensor: `[gate_up_proj, down_proj]`; auto means every one, the default none."""

    experts: bool = option(False, owner="config.schema")
    """Routed experts get adapters too, all of their weights: what `target_parameters: auto`
    says."""

    projector: bool = option(False, owner="config.schema")
    """Of an image-text model that trains on rows with images, the projector gets adapters too."""

    modules_to_save: tuple[Name, ...] = option((), owner="training.prepare.lora_config")
    """Modules that are fully trained and saved with the adapter."""

    init: Literal["default", "pissa", "loftq"] = option(
        "default", owner="training.model.model_loading"
    )
    """Where adapters start. default: B is zero. pissa: at the base's principal directions
    (https://huggingface.co/papers/2404.02948), which a frozen half of the adapter takes off again,
    so that it has twice the rank in memory and files. loftq, for qlora: at what NF4 lost of the
    base (https://huggingface.co/papers/2310.08659)."""

    use_rslora: bool = option(False, owner="training.prepare.lora_config")
    """Rank-stabilised scaling (https://huggingface.co/papers/2312.03732)."""

    use_dora: bool = option(False, owner="training.prepare.lora_config")
    """Weight-decomposed adapters (https://huggingface.co/papers/2402.09353)."""

    loraplus_lr_ratio: float = option(1.0, owner="training.loop.trainer", ge=1.0, le=1000.0)
    """LoRA+: the learning rate of every lora_B, and of DoRA's magnitudes, over train.learning_rate,
    which the rest has; its paper takes 16 (https://huggingface.co/papers/2402.12354). 1 trains all
    alike."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16"], TorchDtypeName] = option(
        "auto", owner="planner.precision"
    )
    """Dtype of the adapters and their optimizer states; auto is float32. bfloat16 halves both, but
    loses updates that are smaller than 1/256 of a weight. Runs that do not compute in bf16 keep
    float32."""

    @property
    def stored_rank(self) -> int:
        """Rank of the adapters in memory and in files: PiSSA has a frozen half beside the one that
        trains."""
        return 2 * self.r if self.init == "pissa" else self.r

    @property
    def adapted_parameters(self) -> Literal["auto"] | tuple[str, ...]:
        """Weights of experts that get an adapter, whichever of the two keys says so."""
        return "auto" if self.experts else self.target_parameters

    @property
    def stored_alpha(self) -> int:
        """The alpha that keeps the scale at that rank."""
        return self.alpha * self.stored_rank // self.r


class TuningConfig(Section):
    """How the model is fine-tuned."""

    mode: Literal["qlora", "lora", "full"] = option("qlora", owner="training.model.model_loading")
    """qlora: adapters on a 4-bit NF4 base; lora: adapters on the base as loaded; full: every
    weight."""

    quantize_experts: Literal["auto"] | bool = option("auto", owner="planner.memory.structure")
    """Routed experts in 4 bits with qlora, where a class keeps those of all experts as one tensor.
    auto does it; false leaves them in 16 bits; true refuses a run in which there are none."""

    backend: Literal["bnb", "unsloth"] = option("bnb", owner="planner.backend")
    """bnb: transformers, PEFT and bitsandbytes; unsloth: Unsloth's kernels, in a separate
    environment (make setup-unsloth)."""

    backend_fallback: Literal["bnb"] | None = option(None, owner="planner.backend")
    """Backend to fall back to if the requested one cannot run (logged and recorded); null stops the
    run instead."""

    trainable: Literal["all"] | Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        "all", owner="training.prepare.lora_config"
    )
    """Which of the mode's weights are trained, by parts of their names: `[layers.0-3, norm,
    lm_head]`, `[lora]`, `[q_proj]`; the others stay frozen. all trains every one."""

    train_vision: bool = option(False, owner="training.loop.trainer")
    """Full training of an image-text model on rows with images trains its vision tower and its
    projector too, which else stay frozen."""

    lora: LoraConfig = LoraConfig()
    """The adapters."""

    @property
    def trains_vision_parts(self) -> bool:
        """Whether parts of an image-text model for images train."""
        return self.train_vision or (self.lora.projector and self.mode != "full")

    @property
    def has_quantized_experts(self) -> bool:
        """True if routed experts are kept in 4 bits."""
        return self.mode == "qlora" and self.quantize_experts is not False


class ProcessConfig(Section):
    """`make process`: turns raw files into checked conversations, split into train, val and
    test."""

    raw_path: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        "data/raw", owner="data.process"
    )
    """Raw files: a file, a folder, a glob, a hub id (`hub:owner/name`, `hub:owner/name:config`), or
    a list of these; JSONL, JSON, CSV, Parquet, Arrow, plain or gzipped."""

    out_dir: Name = option("data/processed", owner="data.process")
    """Folder that train.jsonl, val.jsonl, test.jsonl and report.json are written to."""

    val_fraction: float = option(0.05, owner="data.process", ge=0.0, le=0.5)
    """Share of the rows for validation, by content hash: a row never moves when others are
    added."""

    test_fraction: float = option(0.05, owner="data.process", ge=0.0, le=0.5)
    """Share of the rows for the final test, by content hash."""

    drop_duplicates: bool = option(False, owner="data.process")
    """Keep only the first of several rows with the same content; duplicates are counted either
    way."""

    drop_leaks: bool = option(False, owner="data.process")
    """Leave out training rows that are also in val or test (for files that come with their own
    splits)."""

    near_duplicates: Literal["ignore", "count", "drop"] = option("count", owner="data.process")
    """Rows that are nearly an earlier one: count and name them, keep only the first, or look for
    none."""

    compare_with: tuple[Name, ...] = option((), owner="data.process")
    """Files, folders or hub ids, such as a benchmark's test file, in whose rows training rows are
    looked for; those found are counted and named, as are those nearly in data.val_path and
    data.test_path unless near_duplicates is ignore."""

    drop_overlaps: bool = option(False, owner="data.process")
    """Leave out training rows that are nearly a row of those files."""

    similarity: float = option(0.8, owner="data.process", ge=0.5, le=0.99)
    """Rows are nearly the same from this Jaccard similarity of their runs of three words on."""


class StyleConfig(Section):
    """The system prompt of conversations: given to rows when they are read, or written into them by
    `make style`."""

    system: Name | None = option(None, owner="data.sources.examples")
    """System prompt for every conversation; STYLE= overrides it."""

    how: Literal["prepend", "replace", "keep"] = option("prepend", owner="data.sources.examples")
    """What to do with an existing system prompt: put the new one before it, replace it, or keep
    it."""

    per_source: dict[Name, Name] = option(default_factory=dict, owner="data.sources.examples")
    """System prompts by raw file, as `{glob: prompt}`; the first glob that matches a row's source
    is used."""

    out_dir: Name = option("data/processed_with_style", owner="data.process")
    """Folder that `make style` writes the styled splits to."""


class DocumentsConfig(Section):
    """`make dapt-docx`: turns documents into clean plain text."""

    path: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        "data/documents", owner="documents"
    )
    """Documents: a file, a folder, a glob, or a list of these; .docx, .pdf, .pptx, .xlsx, .epub,
    .html, .md, .txt."""

    out_dir: Name = option("data/processed_text", owner="documents")
    """Folder that train.jsonl, val.jsonl and report.json are written to."""

    val_fraction: float = option(0.05, owner="documents", ge=0.0, le=0.5)
    """Share of the documents for validation, by content hash."""

    chunk_chars: int = option(20_000, owner="documents", ge=200)
    """Longest text row in characters; longer documents are split between paragraphs."""

    headers: bool = option(False, owner="documents")
    """Include page headers and footers of .docx files."""

    drop_repeated: bool = option(True, owner="documents")
    """Leave out boilerplate and paragraphs that an earlier document already has; they are counted
    either way."""


# Where `make process` writes the training rows.
PROCESSED_TRAIN_PATH = "data/processed/train.jsonl"

# Where `make dapt-docx` writes the training text.
PROCESSED_TEXT_PATH = "data/processed_text/train.jsonl"

# The held-out files that a command may write beside the training rows, by the default path of
# those.
MANAGED_HELD_OUT_FILES = {
    PROCESSED_TRAIN_PATH: ("val.jsonl", "test.jsonl"),
    PROCESSED_TEXT_PATH: ("val.jsonl",),
}


def _default_held_out_path(name: str, earlier_values: dict[str, Any]) -> str | None:
    """The default of a held-out path: the file that a command writes beside `train_path`; none if
    the user set their own `train_path`, because that file does not belong to its rows."""
    train_path = PurePath(earlier_values.get("train_path", PROCESSED_TRAIN_PATH) or "")
    return (
        str(train_path.with_name(name))
        if name in MANAGED_HELD_OUT_FILES.get(str(train_path), ())
        else None
    )


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: Name = option(owner="data.sources.files")
    """Training rows of this source: anything that data.train_path accepts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,59}$")] | None = option(
        None, owner="data.sources.files"
    )
    """Name in the log and in the metrics (loss_NAME); null derives it from the path."""

    weight: Annotated[float, Field(gt=0.0)] | None = option(None, owner="data.build.splits")
    """Share of an epoch's rows: weight / sum of the weights, exactly. Set it for all sources or for
    none; without weights every row appears once per epoch."""

    max_rows: Annotated[int, Field(ge=1)] | None = option(None, owner="data.build.splits")
    """Use at most this many of its rows, the same ones for the whole run, drawn by train.seed; null
    uses all."""

    val_path: Name | None = option(None, owner="data.sources.files")
    """Held-out rows of this source, evaluated with their own loss; null holds out data.val_fraction
    of its rows, if any."""


# By Python's name.
Encoding = Literal[
    "utf-8", "utf-16", "cp1252", "latin1", "cp1250", "cp1254", "cp1251", "koi8-r", "cp932",
    "euc-jp", "gb18030", "euc-kr", "big5",
]  # fmt: skip


class ImagePixelsConfig(Section):
    """Bounds of an image's pixels (width times height); null leaves the processor's own."""

    min: Annotated[int, Field(ge=1)] | None = option(None, owner="data.masks.image_processor")
    """Smaller images are enlarged."""

    max: Annotated[int, Field(ge=1)] | None = option(None, owner="data.masks.image_processor")
    """Larger images are made smaller."""


class DataConfig(Section):
    """Training and evaluation data."""

    sources: Annotated[tuple[SourceConfig, ...], Field(max_length=100)] = option(
        (), owner="data.build.splits"
    )
    """Several sources of training rows instead of train_path, each with a share of every epoch: a
    list of {path, weight, max_rows, val_path, name}."""

    train_path: Name | None = option(
        default_factory=lambda above: None if above.get("sources") else PROCESSED_TRAIN_PATH,
        owner="data.sources.files",
    )
    """Training rows: JSONL, JSON, CSV, Parquet, Arrow, plain text, a folder or glob of these, or a
    folder saved by `datasets`. Null if sources are given."""

    val_path: Name | None = option(
        default_factory=partial(_default_held_out_path, "val.jsonl"), owner="data.sources.files"
    )
    """Rows for evaluation during training; null holds out `val_fraction` of the training rows, if
    any. The default is the file that make process or make dapt-docx writes beside the training
    rows; with your own train_path it is null."""

    test_path: Name | None = option(
        default_factory=partial(_default_held_out_path, "test.jsonl"), owner="data.sources.files"
    )
    """Held-out rows for the metrics before and after training; null uses the validation rows. The
    default applies only with the default train_path; with your own train_path it is null."""

    text_path: Name | None = option(None, owner="data.sources.files")
    """Plain text for `task_mode: cpt_mixed`; train_path has the chats."""

    text_fraction: float = option(0.5, owner="data.build.splits", gt=0.0, lt=1.0)
    """Share of the training sequences in `task_mode: cpt_mixed` that are blocks of plain text."""

    val_fraction: float = option(0.0, owner="data.build.splits", ge=0.0, le=0.5)
    """Share of the training rows held out for validation, by content hash, if there is no
    val_path."""

    encoding: Encoding = option("utf-8", owner="data.sources.raw")
    """What files of text and tables are written in. Files that are UTF-8 are read as that whatever
    is set here; with another encoding, the others are read as that one."""

    keep_default_na: bool = option(True, owner="data.sources.formats")
    """Whether a cell of a CSV or TSV that is NaN, None, null, N/A or another of pandas' words for
    no value is empty; false takes it as text."""

    columns: dict[Name, Name] = option(default_factory=dict, owner="data.sources.formats")
    """Maps known column names to those of your data, such as `{prompt: question, completion:
    reply}`; a chat may have context (text behind the question), reasoning (think text of the last
    answer), system and tools too."""

    chat_template: Name | None = option(None, owner="training.prepare.tokenizer")
    """Jinja file or built-in name (chatml, plain) instead of the tokenizer's own template;
    `training` uses TRL's training variant of the tokenizer's own, in which every turn is rendered
    as it is generated."""

    chat_template_kwargs: dict[Name, Any] = option(default_factory=dict, owner="data.masks.render")
    """Variables for the chat template, such as `{enable_thinking: false}`. A value may go by what a
    row's answers hold, think text or none: `{reasoning_effort: {think: high, plain: no_think}}`; a
    kind without one gets the default. A row's own column `chat_template_kwargs` goes before."""

    template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = option(
        None, owner="data.masks.render"
    )
    """Date for templates that write one (YYYY-MM-DD); null uses the day when the run starts."""

    loss_on: Literal["assistant", "completion", "all"] = option(
        "assistant", owner="data.masks.render"
    )
    """What the loss is computed on. assistant: every assistant turn; completion: the last one; all:
    every token."""

    loss_on_empty_think: bool = option(True, owner="data.masks.render")
    """Train the tokens of an empty think block (`<think></think>`) at the beginning of an answer;
    false leaves them untrained, so that the model does not learn to skip thinking."""

    add_empty_think: bool = option(False, owner="data.masks.render")
    """Write the empty think block that the generation prompt ends with (`<think></think>`) before
    answers whose text has none, untrained, so that a row goes on from the same prompt as an
    engine's default. Of the turns before the last one, engines write none: multi_turn=split gives
    exactly their prompts."""

    multi_turn: Literal["whole", "split"] = option("whole", owner="data.masks.render")
    """whole: a conversation is one row; split: every assistant turn ends its own row and is
    rendered as the last turn, so that think text is kept and every turn is trained in the form in
    which it is generated."""

    on_inexact_mask: Literal["fail", "train"] = option("fail", owner="data.masks.render")
    """What to do if no exact mask is found for a template or row: stop and say what would be
    trained, or train that."""

    on_missing_end: Literal["fail", "train"] = option("fail", owner="data.masks.render")
    """What to do if no token ends an answer, so that the model would not learn to stop: stop and
    say so, or train anyway."""

    special_tokens_in_text: Literal["plain", "control", "fail"] = option(
        "plain", owner="data.masks.render"
    )
    """What to do with special tokens of the tokenizer that occur in the data's texts. plain:
    tokenise them as plain text; control: tokenise them as special tokens; fail: the row is a bad
    row."""

    system_into_user: bool = option(False, owner="data.masks.render")
    """Put the system prompt before the first user turn if the template does not support one."""

    drop_text_beside_calls: bool = option(False, owner="data.masks.render")
    """Leave out the text of turns that call tools, for templates that write it behind the tool's
    result (Gemma 4). Think text stays."""

    turns_without_roles: Literal["fail", "alternate"] = option("fail", owner="data.sources.formats")
    """How to read a list of texts without roles: as a bad row, or as user and assistant in turn."""

    merge_consecutive: bool = option(False, owner="data.sources.formats")
    """Join consecutive turns of the same role, with a blank line between them."""

    drop_empty: bool = option(False, owner="data.sources.formats")
    """Leave out rows whose answer is empty or white space; otherwise they are counted and named."""

    on_bad_row: Literal["fail", "skip"] = option("fail", owner="data.checks")
    """What to do with rows that cannot be used: stop with a list of them, or leave them out and
    count them."""

    truncate: Literal["end", "prompt", "drop"] = option("end", owner="data.masks.render")
    """Rows longer than max_seq_len: cut them at the end, cut them from the beginning (the answer
    stays), or leave them out."""

    max_lost_fraction: float = option(0.05, owner="data.checks", ge=0.0, le=1.0)
    """Largest share of the trained tokens that may be lost to max_seq_len. Above it the run stops
    and says which length would keep how much."""

    packing: Literal["none", "best_fit"] = option("none", owner="data.build.packing")
    """best_fit: pack several chats into one row of max_seq_len tokens; no chat is cut, and none
    sees another."""

    image_pixels: ImagePixelsConfig = ImagePixelsConfig()
    """Pixels of each image as the model is given it, which decide its tokens."""

    max_image_megapixels: float = option(90.0, owner="data.sources.images", gt=0.0, le=10_000.0)
    """A row with a larger image is a bad row: a small file may hold one that fills the memory."""

    fetch_images: bool = option(False, owner="data.sources.images")
    """Images at http addresses are fetched, once, into the cache; else such a row is a bad one."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=256)] = option(
        "auto", owner="data.build.splits"
    )
    """Processes that render and tokenise; auto uses one per core, up to 16, if there is enough to
    do."""

    process: ProcessConfig = ProcessConfig()
    """`make process`: turns raw files into checked conversations, split into train, val and
    test."""

    style: StyleConfig = StyleConfig()
    """The system prompt of conversations: given to rows when they are read, or written into them by
    `make style`."""

    documents: DocumentsConfig = DocumentsConfig()
    """`make dapt-docx`: turns documents into clean plain text."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """The name of each source: as given, or the stem of its path, with the folder if two stems
        are equal."""
        stems = [_stem(source.path) for source in self.sources]
        return tuple(
            source.name or (stem if stems.count(stem) == 1 else _stem(source.path, part_count=2))
            for source, stem in zip(self.sources, stems, strict=True)
        )


def _stem(path: str, *, part_count: int = 1) -> str:
    """The last part, or parts, of a path as a word, without its file extensions."""
    pieces = [
        piece for piece in re.split(r"[/\\:]", path) if piece not in ("", ".", "..", "~")
    ] or ["source"]
    last = re.sub(
        r"(\.(jsonl?|ndjson|csv|tsv|parquet|pq|arrow|feather|ipc|txt|md|rst|text|gz))+$",
        "",
        pieces[-1],
    )
    word = re.sub(r"[^\w.-]+", "-", "-".join([*pieces[-part_count:-1], last])).strip("-._")
    return word[:60] or "source"


class TrainConfig(Section):
    """Batch size, duration, optimizer, precision, checkpoints."""

    effective_batch_size: int = option(32, owner="planner.batching", ge=1, le=1_000_000)
    """Sequences per optimizer step over all GPUs; micro-batch x accumulation x ranks equals it
    exactly. If it is left out and batch_size and grad_accum are both given, it is their product
    times the ranks."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = option(
        "auto", owner="planner.batching"
    )
    """Sequences per GPU and forward pass; auto uses what the memory plan allows."""

    grad_accum: Literal["auto"] | Annotated[int, Field(ge=1)] = option(
        "auto", owner="planner.batching"
    )
    """Forward passes per optimizer step; auto follows from the effective batch."""

    epochs: float = option(1.0, owner="training.loop.trainer", gt=0.0)
    """Passes over the training rows."""

    max_steps: Annotated[int, Field(ge=1)] | None = option(None, owner="training.loop.trainer")
    """Optimizer steps of the whole run, including its schedule; null follows epochs."""

    stop_after_steps: Annotated[int, Field(ge=1)] | None = option(None, owner="training.run")
    """Stop with a checkpoint after this many steps, counted from this start, as at a time limit;
    make resume continues."""

    max_hours: Annotated[float, Field(gt=0.0)] | None = option(None, owner="training.run")
    """Stop with a checkpoint in time to end within this many hours of this start, as before a job's
    time limit. The longest step, evaluation and checkpoint so far are kept free, for the checkpoint
    at least 5% of the time up to 10 minutes; make resume continues."""

    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0.0)] = optimizer_option(
        "auto",
        ExternalNames(
            "learning_rate",
            deepspeed="optimizer.params.lr",
            other_tools="peak_lr initial_lr max_lr",
        ),
    )
    """Peak learning rate. auto follows published sweeps (docs/tuning.md): 2e-4 with adapters and
    1e-5 for full at 32 rows a step, more or less by the square root of the rows, and less where the
    adapters' scale x rank is above 32."""

    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = optimizer_option("cosine", ExternalNames("lr_scheduler_type"))
    """Learning rate schedule, by its name in transformers."""

    warmup_steps: float = optimizer_option(0.03, ExternalNames("warmup_steps"), ge=0.0)
    """Warm-up steps; a value below 1 is a share of all steps."""

    weight_decay: float = optimizer_option(
        0.0, ExternalNames("weight_decay", deepspeed="optimizer.params.weight_decay"), ge=0.0
    )
    """AdamW's weight decay (not applied to norms and biases)."""

    adam_beta2: float = optimizer_option(
        0.999,
        ExternalNames(
            "adam_beta2",
            deepspeed="optimizer.params.betas.1",
            other_tools="beta2",
            optimizers=ADAMW_OPTIMIZERS,
        ),
        ge=0.0,
        lt=1.0,
    )
    """Decay of AdamW's average of squared gradients; a smaller value forgets sooner, which suits
    short pre-training (0.95)."""

    max_grad_norm: float = optimizer_option(
        1.0,
        ExternalNames(
            "max_grad_norm",
            deepspeed="gradient_clipping",
            other_tools=(
                "max_norm gradient_clip_val clip_grad_norm clip_grad max_gradient_norm grad_clip"
            ),
        ),
        ge=0.0,
    )
    """Clip gradients to this norm; 0 does not clip."""

    on_nan: Literal["stop", "skip"] = option("stop", owner="training.loop.trainer")
    """What to do with a step whose gradient norm or loss is NaN or infinite. Such a step changes
    nothing: weights, optimizer and learning rate stay as they were. stop: end the run. skip:
    continue with the next step; five in a row end the run. In fp16 the loss scaling skips steps by
    itself."""

    optim: Literal[
        "adamw_torch_fused",
        "adamw_torch",
        "paged_adamw_8bit",
        "adamw_8bit",
        "lion_32bit",
        "lion_8bit",
        "muon",
        "adafactor",
    ] = optimizer_option("adamw_torch_fused", ExternalNames("optim"))
    """Optimizer, by its name in transformers. muon: torch's Muon for the weight matrices of
    tuning.mode=full, and AdamW for embeddings, head, norms and biases (docs/tuning.md)."""

    weight_updates: Annotated[
        Literal["auto", "float32", "stochastic", "bfloat16"], TorchDtypeName
    ] = option("auto", owner="planner.precision")
    """How weights are updated with tuning.mode=full in bf16 on one GPU and under DDP. auto: weights
    are held in float32 if that fits, else in bf16 with stochastic rounding. bfloat16 rounds to
    nearest, which loses nearly all updates at usual learning rates. FSDP and DeepSpeed always keep
    float32 copies."""

    device: Literal["auto", "cpu"] = option("auto", owner="launch.run_hardware")
    """auto: the detected GPUs, or the CPU if there are none. If the machine has an accelerator that
    cannot be used, or the model has more than a billion parameters, the run stops instead and says
    why. cpu: always the CPU."""

    bf16: Literal["auto"] | bool = option("auto", owner="planner.precision")
    """Compute in bfloat16; auto does so if the GPU supports it. If not, the plan says what is used
    instead: float16, or float32 for families whose activations exceed float16's range."""

    fp16: bool = option(False, owner="planner.precision")
    """Compute in float16 with loss scaling; refused for families whose activations exceed its range
    (docs/gpus.md)."""

    gradient_checkpointing: Literal["auto", "offload"] | bool | Annotated[int, Field(ge=1)] = (
        option("auto", owner="planner.candidates")
    )
    """Recompute activations in the backward pass: less memory, about a third more time. true: in
    all layers. A number: in that many layers, from the first on. offload: in all layers, with what
    recomputation needs kept in RAM, for very long rows. auto uses what the plan predicts to be
    fastest among what fits, without offload."""

    kernels: Literal["none", "auto", "liger"] = option(
        "auto", owner="training.class_checks.replaced_code"
    )
    """Kernels of norms, gated activations and rotary embeddings. auto: on a CUDA GPU those of the
    package liger-kernel, which make setup installs there, if a comparison before the first step
    shows that they compute the same; else the plain ones, and the log says why. none: the plain
    ones. liger: Liger's, or the run does not start. The plan counts Liger's memory and speed for
    liger; for auto it counts the memory of the plain ones, which take more."""

    compile: Literal["auto"] | bool = option("auto", owner="training.class_checks.replaced_code")
    """Compile each block of the model with torch.compile, for training passes of any length, if a
    comparison before the first step shows that it computes the same; else the plain code runs, with
    a warning. auto: on a GPU, where the plan says that the run saves more than twice the time that
    compiling takes. Evaluation and generation run the plain code. Compiling takes a minute or two,
    which the plan counts; a later start takes it from the cache. Not with DeepSpeed, tensor or
    context parallelism, train.kernels=liger, Unsloth, or train.gradient_checkpointing=offload."""

    logging_steps: int = option(1, owner="training.loop.trainer", ge=1)
    """Log metrics every N steps."""

    save_steps: Annotated[int, Field(ge=1)] | None = option(500, owner="training.loop.trainer")
    """Save a checkpoint every N steps; null saves at the end of each epoch."""

    save_total_limit: Annotated[int, Field(ge=1)] | None = option(2, owner="training.loop.trainer")
    """Number of checkpoints to keep, not counting the best one; null keeps all."""

    async_save: bool = option(False, owner="training.loop.trainer")
    """Write checkpoints while training goes on: each rank copies its part of weights and optimizer
    states into RAM, which the plan counts, and a thread writes it. For tuning.mode=full under FSDP2
    only, whose ranks each write a part."""

    load_best_model_at_end: bool = option(False, owner="training.loop.trainer")
    """Save at every evaluation and end with the best checkpoint instead of the last."""

    metric_for_best_model: Literal["loss", "exact_match"] = option(
        "loss", owner="training.loop.trainer"
    )
    """What "best" means: the lowest evaluation loss or the highest exact match."""

    early_stopping_patience: Annotated[int, Field(ge=1)] | None = option(
        None, owner="training.loop.trainer"
    )
    """Stop after this many evaluations without improvement; needs load_best_model_at_end."""

    seed: int = optimizer_option(
        42,
        ExternalNames("seed", other_tools="data_seed random_seed global_seed random_state"),
        ge=0,
        lt=2**32,
    )
    """Seed for adapters, dropout, data order and splits."""

    profile_steps: Annotated[int, Field(ge=1, le=100)] | None = option(
        None, owner="training.measure.profile"
    )
    """Profile this many steps with torch's profiler, from the third on (rank 0). The trace is
    written to the run folder, and exposed communication (not hidden by computation) is logged; null
    profiles none."""

    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = option(
        ("tensorboard",), owner="training.loop.trainer"
    )
    """Experiment trackers, through transformers' own integrations; `[]` for none."""

    group_by_length: bool = option(True, owner="training.loop.trainer")
    """Within each optimizer step, put rows of similar length into the same micro-batch: less
    padding, same rows."""

    batch_by: Literal["auto", "rows", "tokens"] = option("auto", owner="planner.candidates")
    """How the rows of a step are divided into micro-batches. tokens: as many rows as have no more
    tokens than `batch_size` rows of full length; rows: exactly `batch_size`. auto is tokens if
    batch_size and grad_accum are auto. Packs, blocks of text and rows in random order
    (`group_by_length: false`) are divided by rows."""

    dataloader_num_workers: int = option(0, owner="training.loop.trainer", ge=0)
    """Processes that prepare batches; 0 prepares them in the training process."""

    dataloader_pin_memory: bool = option(True, owner="training.loop.trainer")
    """Use page-locked memory for batches: faster copies to the GPU; no effect on a CPU."""

    @property
    def derives_effective_batch(self) -> bool:
        """True if the effective batch is derived: batch_size and grad_accum are given, and it is
        not. A value in the file, in SET or in a copy with an update counts as given, even if it is
        the default."""
        return (
            self.batch_size != "auto"
            and self.grad_accum != "auto"
            and "effective_batch_size" not in self.model_fields_set
        )

    @property
    def effective_batch_options(self) -> str:
        """The options to change for a different effective batch."""
        return (
            "train.batch_size or train.grad_accum"
            if self.derives_effective_batch
            else "train.effective_batch_size"
        )


class EvalConfig(Section):
    """Evaluation before, during and after training."""

    steps: Annotated[int, Field(ge=0)] | None = option(None, owner="training.loop.trainer")
    """Evaluate every N steps; null evaluates at the end of each epoch, 0 never during training."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = option("auto", owner="planner.plan")
    """Sequences per GPU in evaluation; auto uses as many as need no more memory than a training
    step, at most 64."""

    generate_rows: int = option(0, owner="training.measure.summary", ge=0)
    """Number of held-out rows for which an answer is generated and compared with what the row
    trains behind the same prompt (exact match); 0 for none. Where it is left out, three answers are
    shown before and after training, and no exact match is measured."""

    max_new_tokens: int = option(128, owner="training.loop.trainer", ge=1)
    """Maximum length of a generated answer in tokens."""

    before_training: bool = option(True, owner="training.measure.summary")
    """Also evaluate before the first step, to show the improvement."""


class PlanConfig(Section):
    """How the plan is confirmed."""

    trace: bool = option(True, owner="trace.confirm")
    """On a GPU, trace the planned step on tensors without storage before weights are loaded; if the
    trace's peak is higher than the prediction, it counts."""


class MixedPrecisionConfig(Section):
    """Dtypes of communication between ranks; auto is the layout's default (compute dtype:
    train.bf16, train.fp16)."""

    param: Dtype = option("auto", owner="planner.precision")
    """Weights as FSDP2 gathers them (MixedPrecisionPolicy's param_dtype): auto is the compute
    dtype, float32 gathers twice the bytes. DDP gathers none, and DeepSpeed holds them in the
    compute dtype."""

    reduce: Dtype = option("auto", owner="planner.precision")
    """Gradients as they are reduced: FSDP2's reduce_dtype, DeepSpeed's communication_data_type,
    DDP's bf16 or fp16 compression hook. auto keeps the dtype that they are computed in; float32
    sums more exactly, bfloat16 sends half of float32's bytes."""

    buffer: Dtype = option("auto", owner="planner.precision")
    """The model's buffers, under DeepSpeed only (data_types.buffer_dtype); auto leaves them as they
    are, which keeps rotary frequencies exact."""


class DistributedConfig(Section):
    """How several ranks work together."""

    timeout_s: float = option(1800.0, owner="launch.torchrun", ge=5.0, le=86_400.0)
    """Seconds that ranks wait for one that does not respond; then the run ends and names it."""

    shard_ranks: Literal["auto"] | Annotated[int, Field(ge=2)] = option(
        "auto", owner="planner.layout"
    )
    """Number of ranks that fsdp_hybrid shards the states over; the other ranks hold copies. auto
    uses the ranks of one node."""

    sync_gradients_every: Literal["auto", "step", "micro_batch"] | Annotated[int, Field(ge=1)] = (
        option("auto", owner="planner.precision")
    )
    """When ranks reduce their gradients: at the end of an optimizer step, or after every
    micro-batch. auto: step for DDP and ZeRO-1, micro_batch for FSDP2 (step keeps full gradients on
    every rank meanwhile) and for ZeRO-2 and -3. A number, under DDP and FSDP2: after so many
    micro-batches, and at the end of the step."""

    find_unused_parameters: bool = option(False, owner="training.engines")
    """Under DDP, look after each forward pass for parameters that the loss does not use. Needed for
    models that skip some; costs a pass over the graph. FSDP2 and DeepSpeed do not need it."""

    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()
    """Dtypes of communication between ranks."""

    profile_communication: bool | Annotated[int, Field(ge=1, le=100)] = option(
        False, owner="training.measure.profile"
    )
    """Measure communication between ranks for this many steps, from the third on (true: 3): counts,
    bytes and time of each kind of collective, the waiting time of ranks, and the bytes that the
    plan predicts. Written to profile/communication.json in the run folder, with rank 0's trace."""


class OutputConfig(Section):
    """Where the run is written."""

    dir: Name = option("outputs", owner="runs.lookup")
    """Parent folder of the run folders."""

    name: Name | None = option(None, owner="runs.lookup")
    """Name of the run folder; null uses the config's name with the UTC time."""

    if_exists: Literal["fail", "resume", "replace"] = option("fail", owner="runs.lookup")
    """What to do if the run folder exists: stop, resume it, or move it aside."""


class StageConfig(Section):
    """A stage of a curriculum: keys that override the run's, in their sections or (those below)
    without one."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,59}$")] = option(owner="config.load")
    """Name in the log, in the metrics, and of its folder (RUN/stages/NAME)."""

    epochs: Annotated[float, Field(gt=0.0)] | None = option(None, owner="config.load")
    """train.epochs of this stage."""

    max_steps: Annotated[int, Field(ge=1)] | None = option(None, owner="config.load")
    """train.max_steps of this stage."""

    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0.0)] | None = option(
        None, owner="config.load"
    )
    """train.learning_rate of this stage."""

    max_seq_len: Annotated[int, Field(ge=8)] | None = option(None, owner="config.load")
    """model.max_seq_len of this stage."""

    trainable: Literal["all"] | Annotated[tuple[Name, ...], Field(min_length=1)] | None = option(
        None, owner="config.load"
    )
    """tuning.trainable of this stage."""

    task_mode: Literal["sft", "cpt", "cpt_mixed"] | None = option(None, owner="config.load")
    """task_mode of this stage."""

    data: dict[Name, Any] = option(default_factory=dict, owner="config.load")
    """Keys of data for this stage."""

    train: dict[Name, Any] = option(default_factory=dict, owner="config.load")
    """Keys of train for this stage."""

    eval: dict[Name, Any] = option(default_factory=dict, owner="config.load")
    """Keys of eval for this stage."""

    model: dict[Name, Any] = option(default_factory=dict, owner="config.load")
    """max_seq_len of this stage."""

    tuning: dict[Name, Any] = option(default_factory=dict, owner="config.load")
    """trainable of this stage."""


class RunConfig(Section):
    """A run: everything that a user can set, and nothing derived."""

    model: ModelConfig
    """The model to train."""

    task_mode: Literal["sft", "cpt", "cpt_mixed"] = option("sft", owner="data.build.splits")
    """sft: chats, loss on the answers; cpt: plain text in full blocks; cpt_mixed: both, in the
    ratio data.text_fraction."""

    tuning: TuningConfig = TuningConfig()
    """How the model is fine-tuned."""

    data: DataConfig = DataConfig()
    """Training and evaluation data."""

    train: TrainConfig = TrainConfig()
    """Batch size, duration, optimizer, precision, checkpoints."""

    eval: EvalConfig = EvalConfig()
    """Evaluation before, during and after training."""

    curriculum: Annotated[tuple[StageConfig, ...], Field(max_length=50)] = option(
        (), owner="config.load"
    )
    """Stages that are trained one after the other in one job, each on the weights of the one
    before: a list of {name, data, epochs or max_steps, learning_rate, max_seq_len, trainable, …}; a
    stage inherits what it does not set from the run."""

    plan: PlanConfig = PlanConfig()
    """How the plan is confirmed."""

    distributed: DistributedConfig = DistributedConfig()
    """How several ranks work together."""

    output: OutputConfig = OutputConfig()
    """Where the run is written."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: as given, or by the rule."""
        value = self.train.learning_rate
        return self.derived_learning_rate[0] if value == "auto" else value

    @property
    def derived_learning_rate(self) -> tuple[float, str]:
        """The learning rate that auto is, and why. An effective batch that only the ranks make
        counts as its default."""
        lora = self.tuning.lora
        alpha = lora.alpha * (lora.r**0.5 if lora.use_rslora else 1) * lora.loraplus_lr_ratio
        return auto_learning_rate(
            alpha=None if self.tuning.mode == "full" else alpha,
            rows=self.train.effective_batch_size,
            is_lion="lion" in self.train.optim,
        )
