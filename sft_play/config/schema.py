"""`RunConfig`: what a user may ask for. One docstring, one owner and one default for every leaf.

The owner is the module that reads the leaf; a test proves that it does and that a change of the leaf changes
something downstream. `configs/reference.yaml` and `configs/run.schema.json` are generated from this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

OWNER = "owner"
"""The key under which a leaf's owner stands in its JSON schema."""


def leaf(default: Any, *, owner: str, **limits: Any) -> Any:
    """A leaf with its default, the module that reads it (below `sft_play`), and its limits."""
    return Field(default, json_schema_extra={OWNER: owner}, **limits)


def derived(default: Callable[[dict[str, Any]], Any], *, owner: str) -> Any:
    """A leaf whose default follows from the leaves above it in its section."""
    return Field(default_factory=default, json_schema_extra={OWNER: owner})


class Section(BaseModel):
    """Frozen and strict: an unknown key or a value of another type is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


Name = Annotated[str, Field(min_length=1)]


class ModelConfig(Section):
    """The model that is trained."""

    name: Name = Field(json_schema_extra={OWNER: "train.model"})
    """Hub id (`Qwen/Qwen2.5-3B-Instruct`) or local folder (begins with `/`, `.` or `~`, or exists)."""

    revision: Name | None = leaf(None, owner="train.model")
    """Branch, tag or commit on the hub; null takes the default branch."""

    max_seq_len: int = leaf(2048, owner="plan.plan", ge=8)
    """Longest training row in tokens; longer rows are cut at the end and counted."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = leaf("auto", owner="plan.precision")
    """Dtype in which the weights are loaded; auto takes the compute precision."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = leaf("auto", owner="train.attention")
    """Attention code; auto takes sdpa where the model has it."""

    mesh_shape: int | tuple[int, ...] | tuple[tuple[int, ...], tuple[str, ...]] | None = leaf(None, owner="plan.plan")
    """Device mesh, such as `[[2, 4], [fsdp, tp]]`: fsdp shards, tp divides tensors, cp rows, dp copies; its product is
    the number of processes. null lets the plan choose."""

    trust_remote_code: bool = leaf(False, owner="train.model")
    """Run Python code that the model's folder brings along."""


class LoraConfig(Section):
    """The adapters of `tuning.mode: lora` and `qlora`."""

    r: int = leaf(16, owner="train.model", ge=1, le=65_536)
    """Rank of the adapters."""

    alpha: int = leaf(32, owner="train.model", ge=1)
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) with rsLoRA)."""

    dropout: float = leaf(0.0, owner="train.model", ge=0.0, lt=1.0)
    """Dropout before the adapter; costs memory per target."""

    target_modules: Literal["auto"] | Annotated[tuple[Name, ...], Field(min_length=1)] = leaf(
        "auto", owner="train.model"
    )
    """Modules that get an adapter; auto takes every linear layer of the language model, never lm_head."""

    modules_to_save: tuple[Name, ...] = leaf((), owner="train.model")
    """Modules that are trained whole and saved with the adapter."""

    use_rslora: bool = leaf(False, owner="train.model")
    """Rank-stabilised scaling (https://huggingface.co/papers/2312.03732)."""

    use_dora: bool = leaf(False, owner="train.model")
    """Weight-decomposed adapters (https://huggingface.co/papers/2402.09353)."""

    dtype: Literal["auto", "float32", "bfloat16"] = leaf("auto", owner="plan.gradients")
    """Dtype of adapters and of their optimizer states: auto is float32. bfloat16 halves both, and loses updates that
    are smaller than 1/256 of a weight; runs that do not compute in bf16 keep float32."""


class TuningConfig(Section):
    """How the model is changed."""

    mode: Literal["qlora", "lora", "full"] = leaf("qlora", owner="train.model")
    """qlora: adapters on a 4-bit NF4 base; lora: adapters on the base as loaded; full: every weight."""

    backend: Literal["bnb", "unsloth"] = leaf("bnb", owner="train.model")
    """bnb: transformers, PEFT and bitsandbytes; unsloth: Unsloth's kernels, in an environment of their own (make
    setup-unsloth)."""

    backend_fallback: Literal["bnb"] | None = leaf(None, owner="train.model")
    """Backend to fall back to, logged and recorded, when the one that was asked for cannot run; null stops instead."""

    trainable: Literal["all"] | Annotated[tuple[Name, ...], Field(min_length=1)] = leaf("all", owner="train.trainable")
    """Which of the weights that the mode trains are trained, by parts of their names: `[layers.0-3, norm, lm_head]`,
    `[lora]`, `[q_proj]`; the others stay as they are. all takes every one."""

    lora: LoraConfig = LoraConfig()
    """The adapters."""


class ProcessConfig(Section):
    """`make process`: raw files become checked conversations, split."""

    raw_path: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = leaf("data/raw", owner="data.process")
    """Raw files: a file, a folder, a glob, a hub id (`hub:owner/name`, `hub:owner/name:config`), or a list of these;
    JSONL, JSON, CSV, Parquet, Arrow, plain or gzipped."""

    out_dir: Name = leaf("data/processed", owner="data.process")
    """Folder that train.jsonl, val.jsonl, test.jsonl and report.json are written to."""

    val_fraction: float = leaf(0.05, owner="data.process", ge=0.0, le=0.5)
    """Share of the rows for validation, by content hash: a row never moves when others are added."""

    test_fraction: float = leaf(0.05, owner="data.process", ge=0.0, le=0.5)
    """Share of the rows for the final test, by content hash."""

    drop_duplicates: bool = leaf(False, owner="data.process")
    """Keep only the first of rows with the same content; they are counted either way."""

    drop_leaks: bool = leaf(False, owner="data.process")
    """Leave training rows out that stand in val or test too (files that bring their own splits)."""


class StyleConfig(Section):
    """`make style`: the system prompt of processed conversations."""

    system: Name | None = leaf(None, owner="data.style")
    """System prompt to give to every conversation; STYLE= replaces it."""

    how: Literal["prepend", "replace", "keep"] = leaf("prepend", owner="data.style")
    """What it does to a system prompt that is there: stand before it, replace it, or leave it alone."""

    per_source: dict[Name, Name] = Field(default_factory=dict, json_schema_extra={OWNER: "data.style"})
    """System prompts by raw file, as `{glob: prompt}`; the first glob that fits a row's source counts."""

    out_dir: Name = leaf("data/processed_with_style", owner="data.style")
    """Folder that the styled splits are written to."""


class DocumentsConfig(Section):
    """`make dapt-docx`: documents become clean plain text."""

    path: Name | Annotated[tuple[Name, ...], Field(min_length=1)] = leaf("data/documents", owner="data.documents")
    """Documents: a file, a folder, a glob, or a list of these; .docx, .txt, .md, .rst, .html, .pdf."""

    out_dir: Name = leaf("data/processed_text", owner="data.documents")
    """Folder that train.jsonl, val.jsonl and report.json are written to."""

    val_fraction: float = leaf(0.05, owner="data.documents", ge=0.0, le=0.5)
    """Share of the documents for validation, by content hash."""

    chunk_chars: int = leaf(20_000, owner="data.documents", ge=200)
    """Longest text row in characters; longer documents are cut between paragraphs."""

    headers: bool = leaf(False, owner="data.documents")
    """Take page headers and footers of .docx files too."""

    drop_repeated: bool = leaf(True, owner="data.documents")
    """Leave out boilerplate and paragraphs that stand in an earlier document; they are counted either way."""


PROCESSED_TRAIN = "data/processed/train.jsonl"
"""Where `make process` writes the training rows."""

TEXT_TRAIN = "data/processed_text/train.jsonl"
"""Where `make dapt-docx` writes the training text."""

WRITTEN = {PROCESSED_TRAIN: ("val.jsonl", "test.jsonl"), TEXT_TRAIN: ("val.jsonl",)}
"""The held-out files that a command may write beside the training rows, by the default place of these."""


def _beside_processed(name: str) -> Callable[[dict[str, Any]], str | None]:
    """The default of a held-out path: the file that a command writes beside `train_path`, and none beside one of the
    user's own, to whose rows it does not belong."""

    def default(validated: dict[str, Any]) -> str | None:
        train = PurePath(validated.get("train_path", PROCESSED_TRAIN) or "")
        return str(train.with_name(name)) if name in WRITTEN.get(str(train), ()) else None

    return default


class SourceConfig(Section):
    """One of several sources of training rows."""

    path: Name = Field(json_schema_extra={OWNER: "data.files"})
    """Training rows of this source: whatever data.train_path takes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,59}$")] | None = leaf(None, owner="data.files")
    """Name in the log and in the metrics (loss_NAME); null takes it from the path."""

    weight: Annotated[float, Field(gt=0.0)] | None = leaf(None, owner="data.dataset")
    """Share of an epoch's rows: weight / sum of the weights, exactly. Without weights (all sources or none) every row
    comes once an epoch."""

    max_rows: Annotated[int, Field(ge=1)] | None = leaf(None, owner="data.dataset")
    """Use no more than so many of its rows, the same for the whole run, drawn by train.seed; null uses all."""

    val_path: Name | None = leaf(None, owner="data.files")
    """Held-out rows of this source, judged with a loss of their own; null takes data.val_fraction of its rows, if
    any."""


def _own_or_processed(validated: dict[str, Any]) -> str | None:
    """The default of train_path: none beside sources."""
    return None if validated.get("sources") else PROCESSED_TRAIN


class DataConfig(Section):
    """What it learns from."""

    sources: Annotated[tuple[SourceConfig, ...], Field(max_length=100)] = leaf((), owner="data.dataset")
    """Several sources of training rows in place of train_path, each with a share of every epoch: a list of {path,
    weight, max_rows, val_path, name}."""

    train_path: Name | None = derived(_own_or_processed, owner="data.files")
    """Training rows: JSONL, JSON, CSV, Parquet, Arrow, plain text, a folder or glob of these, or one saved by
    `datasets`. Null beside sources."""

    val_path: Name | None = derived(_beside_processed("val.jsonl"), owner="data.files")
    """Rows for evaluation while training; null takes `val_fraction` of the training rows, if any. The default is the
    file beside what make process or make dapt-docx writes; with a train_path of your own it is null."""

    test_path: Name | None = derived(_beside_processed("test.jsonl"), owner="data.files")
    """Held-out rows for the figures before and after; null uses the validation rows. The default holds with the default
    train_path only; with a train_path of your own it is null."""

    text_path: Name | None = leaf(None, owner="data.files")
    """Plain text of `task_mode: cpt_mixed`; train_path holds its chats."""

    text_fraction: float = leaf(0.5, owner="data.dataset", gt=0.0, lt=1.0)
    """Share of the training sequences of `task_mode: cpt_mixed` that are blocks of plain text."""

    val_fraction: float = leaf(0.0, owner="data.dataset", ge=0.0, le=0.5)
    """Share of the training rows split off for validation, by content hash, where there is no val_path."""

    columns: dict[Name, Name] = Field(default_factory=dict, json_schema_extra={OWNER: "data.formats"})
    """Names of your columns for the known ones, such as `{prompt: question, completion: reply}`."""

    chat_template: Name | None = leaf(None, owner="train.tokenizer")
    """Jinja file or built-in name (chatml, plain) instead of the tokenizer's own template; training takes TRL's
    training variant of that one, in which every turn is written as it is generated."""

    chat_template_kwargs: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "data.render"})
    """Variables for the chat template, such as `{enable_thinking: false}`."""

    template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = leaf(None, owner="data.render")
    """Day that a template which writes the date is given (YYYY-MM-DD); null takes the day of the run's start."""

    loss_on: Literal["assistant", "completion", "all"] = leaf("assistant", owner="data.render")
    """assistant: every assistant turn; completion: the last one; all: every token."""

    multi_turn: Literal["whole", "split"] = leaf("whole", owner="data.render")
    """whole: a conversation is one row; split: every assistant turn ends a row of its own, rendered as the last turn,
    so that think text stays and nothing of it is trained in another form than it is generated."""

    on_inexact_mask: Literal["fail", "train"] = leaf("fail", owner="data.render")
    """What to do where no exact mask can be found for a template or row: stop and say what would be trained, or train
    that."""

    on_missing_end: Literal["fail", "train"] = leaf("fail", owner="data.render")
    """What to do where no token ends an answer, so that the model would not learn to stop: stop and say so, or train
    all the same."""

    special_tokens_in_text: Literal["plain", "control", "fail"] = leaf("plain", owner="data.render")
    """The tokenizer's special tokens inside texts of the data: tokenised as plain text, as the control tokens that
    they spell, or a bad row."""

    system_into_user: bool = leaf(False, owner="data.render")
    """Put a system prompt before the first user turn where the template has no place for it."""

    turns_without_roles: Literal["fail", "alternate"] = leaf("fail", owner="data.formats")
    """A list of texts that does not say whose they are: a bad row, or the user's and the assistant's in turn."""

    merge_consecutive: bool = leaf(False, owner="data.formats")
    """Join turns of the same role that follow each other, with a blank line between them."""

    drop_empty: bool = leaf(False, owner="data.formats")
    """Leave rows out whose answer is empty or white space; otherwise they are counted and named."""

    on_bad_row: Literal["fail", "skip"] = leaf("fail", owner="data.dataset")
    """What a row that cannot be used does: stop with the list of them, or be left out and counted."""

    truncate: Literal["end", "prompt", "drop"] = leaf("end", owner="data.render")
    """Rows longer than max_seq_len: cut at the end, cut from the beginning (the answer stays), or left out."""

    max_lost_fraction: float = leaf(0.05, owner="data.dataset", ge=0.0, le=1.0)
    """Largest share of the trained tokens that may be lost to max_seq_len before a run stops and says which length
    would keep how much."""

    packing: Literal["none", "best_fit"] = leaf("none", owner="data.packing")
    """best_fit: several chats in one row of max_seq_len, none of them cut, none seeing another."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1, le=256)] = leaf("auto", owner="data.dataset")
    """Processes that render and tokenise; auto takes one per core, up to 16, where there is enough to do."""

    process: ProcessConfig = ProcessConfig()
    """`make process`: raw files become checked conversations, split."""

    style: StyleConfig = StyleConfig()
    """`make style`: the system prompt of processed conversations."""

    documents: DocumentsConfig = DocumentsConfig()
    """`make dapt-docx`: documents become clean plain text."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """The name of each source: as given, or the stem of its path, with the folder where stems are alike."""
        stems = [_stem(source.path) for source in self.sources]
        return tuple(
            source.name or (stem if stems.count(stem) == 1 else _stem(source.path, parts=2))
            for source, stem in zip(self.sources, stems, strict=True)
        )


def _stem(path: str, *, parts: int = 1) -> str:
    """The last part, or parts, of a path as a word: what stands before the first dot that ends the name."""
    pieces = [piece for piece in re.split(r"[/\\:]", path) if piece not in ("", ".", "..", "~")] or ["source"]
    last = re.sub(r"(\.(jsonl?|ndjson|csv|tsv|parquet|pq|arrow|feather|ipc|txt|md|rst|text|gz))+$", "", pieces[-1])
    word = re.sub(r"[^\w.-]+", "-", "-".join([*pieces[-parts:-1], last])).strip("-._")
    return word[:60] or "source"


class TrainConfig(Section):
    """How long, how fast, with what precision."""

    effective_batch_size: int = leaf(32, owner="plan.batching", ge=1, le=1_000_000)
    """Sequences per optimizer step over all GPUs; micro x accumulation x ranks equals it exactly. Left out beside a
    batch_size and a grad_accum that are both given, it is their product times the ranks."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = leaf("auto", owner="plan.batching")
    """Sequences per GPU and forward pass; auto takes what the memory plan allows."""

    grad_accum: Literal["auto"] | Annotated[int, Field(ge=1)] = leaf("auto", owner="plan.batching")
    """Forward passes per optimizer step; auto is what the effective batch asks for."""

    epochs: float = leaf(1.0, owner="train.trainer", gt=0.0)
    """Passes over the training rows."""

    max_steps: Annotated[int, Field(ge=1)] | None = leaf(None, owner="train.trainer")
    """Optimizer steps of the whole run, schedule included; null follows epochs."""

    stop_after_steps: Annotated[int, Field(ge=1)] | None = leaf(None, owner="train.run")
    """End this start after so many steps with a checkpoint, as if its time had run out; resume goes on."""

    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0.0)] = leaf("auto", owner="train.trainer")
    """Peak learning rate; auto: 2e-4 with adapters, 1e-5 for full."""

    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"] = (
        leaf("cosine", owner="train.trainer")
    )
    """Shape of the learning rate over the run."""

    warmup_steps: float = leaf(0.03, owner="train.trainer", ge=0.0)
    """Steps of rising learning rate; below 1 it is a share of all steps."""

    weight_decay: float = leaf(0.0, owner="train.trainer", ge=0.0)
    """AdamW's decay of weights (norms and biases left out)."""

    adam_beta2: float = leaf(0.999, owner="train.trainer", ge=0.0, lt=1.0)
    """Decay of AdamW's average of squared gradients; smaller forgets sooner, as short pre-training wants it (0.95)."""

    max_grad_norm: float = leaf(1.0, owner="train.trainer", ge=0.0)
    """Gradients are scaled down to this norm; 0 leaves them."""

    optim: Literal["adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adafactor"] = leaf(
        "adamw_torch_fused", owner="train.trainer"
    )
    """Optimizer, by its name in transformers."""

    weight_updates: Literal["auto", "float32", "stochastic", "bfloat16"] = leaf("auto", owner="plan.precision")
    """How updates reach the weights of tuning.mode=full in bf16 on one GPU and under DDP. auto: weights are held in
    float32 where that fits, else in bf16 with updates rounded stochastically. bfloat16 rounds to the nearest, which
    loses nearly all updates at usual learning rates. FSDP and DeepSpeed keep float32 copies whatever is asked for."""

    device: Literal["auto", "cpu"] = leaf("auto", owner="launch.device")
    """auto: the GPUs that are found; without any the CPU, unless the machine shows an accelerator all the same or the
    model has more than a billion parameters: then the run stops and says why. cpu: the CPU, whatever there is."""

    bf16: Literal["auto"] | bool = leaf("auto", owner="plan.precision")
    """Compute in bfloat16; auto where the GPU has it. Where it has not, the plan says what is taken instead: float16,
    or float32 for families whose activations leave float16's range."""

    fp16: bool = leaf(False, owner="plan.precision")
    """Compute in float16 with loss scaling; refused for families whose activations leave its range (docs/gpus.md)."""

    gradient_checkpointing: Literal["auto", "offload"] | bool | Annotated[int, Field(ge=1)] = leaf(
        "auto", owner="plan.candidates"
    )
    """Recompute activations in the backward pass: less memory, about a third more time. A number does it for the
    first so many layers; offload does it for all and keeps what they need for it in RAM, which very long rows need;
    auto takes what the plan finds fastest among what fits, without offload."""

    logging_steps: int = leaf(1, owner="train.trainer", ge=1)
    """Steps between two lines of metrics."""

    save_steps: Annotated[int, Field(ge=1)] | None = leaf(500, owner="train.trainer")
    """Steps between two checkpoints; null saves at the end of each epoch."""

    save_total_limit: Annotated[int, Field(ge=1)] | None = leaf(2, owner="train.trainer")
    """Checkpoints that are kept, the best one not counted; null keeps all."""

    load_best_model_at_end: bool = leaf(False, owner="train.trainer")
    """Save at every evaluation and end with the best of them instead of the last."""

    metric_for_best_model: Literal["loss", "exact_match"] = leaf("loss", owner="train.trainer")
    """What "best" means: the lowest evaluation loss or the highest exact match."""

    early_stopping_patience: Annotated[int, Field(ge=1)] | None = leaf(None, owner="train.trainer")
    """Stop after so many evaluations without a better metric; needs load_best_model_at_end."""

    seed: int = leaf(42, owner="train.trainer", ge=0, lt=2**32)
    """Seed of adapters, dropout, data order and splits."""

    profile_steps: Annotated[int, Field(ge=1, le=100)] | None = leaf(None, owner="train.profile")
    """Trace so many steps with torch's profiler, from the third on (rank 0): the trace goes into the run folder, and
    the communication that no computation hides is logged; null traces none."""

    report_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = leaf(
        ("tensorboard",), owner="train.trainer"
    )
    """Trackers, through transformers' own integrations; `[]` for none."""

    group_by_length: bool = leaf(True, owner="train.trainer")
    """Within each optimizer step, put rows of like length into the same micro-batch: less padding, the same rows."""

    dataloader_num_workers: int = leaf(0, owner="train.trainer", ge=0)
    """Processes that prepare batches; 0 prepares them in the training process."""

    dataloader_pin_memory: bool = leaf(True, owner="train.trainer")
    """Page-locked batches: faster copies to the GPU; has no effect on a CPU."""

    @property
    def effective_follows(self) -> bool:
        """Whether the effective batch follows from batch_size, grad_accum and the ranks: both are given, and it is not.

        What the file, SET or a copy with an update names counts as given, also where it is the default.
        """
        is_split = self.batch_size != "auto" and self.grad_accum != "auto"
        return is_split and "effective_batch_size" not in self.model_fields_set

    @property
    def effective_words(self) -> str:
        """What to change for another effective batch."""
        return "train.batch_size or train.grad_accum" if self.effective_follows else "train.effective_batch_size"


class EvalConfig(Section):
    """How it is judged while it trains."""

    steps: Annotated[int, Field(ge=0)] | None = leaf(None, owner="train.trainer")
    """Steps between two evaluations; null evaluates at the end of each epoch, 0 never while training."""

    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = leaf("auto", owner="plan.plan")
    """Sequences per GPU in evaluation; auto takes as many as need no more memory than a training step, 64 at most."""

    generate_rows: int = leaf(0, owner="train.exact_match", ge=0)
    """Held-out rows whose answers are generated and compared word for word; 0 compares none."""

    max_new_tokens: int = leaf(128, owner="train.run", ge=1)
    """Longest generated answer in tokens."""

    before_training: bool = leaf(True, owner="train.run")
    """Evaluate before the first step too, so that the gain can be seen."""


class PlanConfig(Section):
    """How the plan is made sure of."""

    trace: bool = leaf(True, owner="trace.confirm")
    """On a GPU, trace the planned step on tensors without memory before weights are loaded; what the trace finds
    counts where it is more than predicted."""


Dtype = Literal["auto", "bfloat16", "float16", "float32"]


class MixedPrecisionConfig(Section):
    """Dtypes of what ranks send each other; auto takes what the layout does by itself. What is computed in is
    train.bf16 and train.fp16."""

    param: Dtype = leaf("auto", owner="plan.gradients")
    """Weights as FSDP2 gathers them (MixedPrecisionPolicy's param_dtype): auto is the dtype of the computation, float32
    gathers twice the bytes. DDP gathers none, and DeepSpeed holds them in the dtype of the computation."""

    reduce: Dtype = leaf("auto", owner="plan.gradients")
    """Gradients on their way: FSDP2's reduce_dtype, DeepSpeed's communication_data_type, DDP's bf16 or fp16 compression
    hook. auto reduces them as they are made; float32 adds up more exactly, bfloat16 sends half of float32's bytes."""

    buffer: Dtype = leaf("auto", owner="plan.gradients")
    """The model's buffers, under DeepSpeed alone (data_types.buffer_dtype); auto leaves them as they are, which keeps
    rotary frequencies exact."""


class DistributedConfig(Section):
    """How several ranks work together."""

    timeout_s: float = leaf(1800.0, owner="start", ge=5.0, le=86_400.0)
    """Seconds after which ranks give up waiting for one that does not answer; the run then ends and names it."""

    shard_ranks: Literal["auto"] | Annotated[int, Field(ge=2)] = leaf("auto", owner="plan.layout")
    """Ranks that fsdp_hybrid divides the states over, the other ranks holding copies; auto takes those of one node."""

    sync_gradients_every: Literal["auto", "step", "micro_batch"] | Annotated[int, Field(ge=1)] = leaf(
        "auto", owner="plan.gradients"
    )
    """When ranks add up their gradients: at the end of an optimizer step, or after every micro-batch. auto: DDP and
    ZeRO-1 step, FSDP2 micro_batch (step keeps whole gradients on every rank meanwhile), ZeRO-2 and -3 micro_batch. A
    number of micro-batches may be 1 or train.grad_accum."""

    find_unused_parameters: bool = leaf(False, owner="train.engine")
    """DDP looks after each forward pass for parameters that the loss does not use: for models that leave some out, at
    the cost of a pass over the graph. FSDP2 and DeepSpeed need no such thing."""

    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()
    """Dtypes of what ranks send each other."""

    profile_communication: bool | Annotated[int, Field(ge=1, le=100)] = leaf(False, owner="train.profile")
    """Count what ranks send each other over so many steps, from the third on (true: 3): counts, bytes and time of each
    kind of collective, the ranks that wait, and the plan's bytes beside them, in profile/communication.json of the run
    folder, with rank 0's trace."""


class OutputConfig(Section):
    """Where the run is written."""

    dir: Name = leaf("outputs", owner="runs")
    """Folder that holds the run folders."""

    name: Name | None = leaf(None, owner="runs")
    """Name of the run folder; null is the config's name with the UTC time."""

    if_exists: Literal["fail", "resume", "replace"] = leaf("fail", owner="runs")
    """What a run folder of that name that exists means: stop, go on with it, or move it aside."""


class StageConfig(Section):
    """A stage of a curriculum: keys that it gives in place of the run's, in their sections or (these) without."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,59}$")] = Field(
        json_schema_extra={OWNER: "config.stages"}
    )
    """Name in the log, in the metrics and of its folder (RUN/stages/NAME)."""

    epochs: Annotated[float, Field(gt=0.0)] | None = leaf(None, owner="config.stages")
    """train.epochs of this stage."""

    max_steps: Annotated[int, Field(ge=1)] | None = leaf(None, owner="config.stages")
    """train.max_steps of this stage."""

    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0.0)] | None = leaf(None, owner="config.stages")
    """train.learning_rate of this stage."""

    max_seq_len: Annotated[int, Field(ge=8)] | None = leaf(None, owner="config.stages")
    """model.max_seq_len of this stage."""

    trainable: Literal["all"] | Annotated[tuple[Name, ...], Field(min_length=1)] | None = leaf(
        None, owner="config.stages"
    )
    """tuning.trainable of this stage."""

    task_mode: Literal["sft", "cpt", "cpt_mixed"] | None = leaf(None, owner="config.stages")
    """task_mode of this stage."""

    data: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "config.stages"})
    """Keys of data for this stage."""

    train: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "config.stages"})
    """Keys of train for this stage."""

    eval: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "config.stages"})
    """Keys of eval for this stage."""

    model: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "config.stages"})
    """max_seq_len of this stage."""

    tuning: dict[Name, Any] = Field(default_factory=dict, json_schema_extra={OWNER: "config.stages"})
    """trainable of this stage."""


AUTO_LEARNING_RATE = {"qlora": 2e-4, "lora": 2e-4, "full": 1e-5}


class RunConfig(Section):
    """A run: everything a user may ask for, and nothing that was derived."""

    model: ModelConfig
    """The model that is trained."""

    task_mode: Literal["sft", "cpt", "cpt_mixed"] = leaf("sft", owner="data.dataset")
    """sft: chats, loss on the answers; cpt: plain text in full blocks; cpt_mixed: both in a given ratio."""

    tuning: TuningConfig = TuningConfig()
    """How the model is changed."""

    data: DataConfig = DataConfig()
    """What it learns from."""

    train: TrainConfig = TrainConfig()
    """How long, how fast, with what precision."""

    eval: EvalConfig = EvalConfig()
    """How it is judged while it trains."""

    curriculum: Annotated[tuple[StageConfig, ...], Field(max_length=50)] = leaf((), owner="config.load")
    """Stages that are trained one after the other in one job, each on the weights of the one before: a list of {name,
    data, epochs or max_steps, learning_rate, max_seq_len, trainable, …}; a stage takes from the run what it does not
    give."""

    plan: PlanConfig = PlanConfig()
    """How the plan is made sure of."""

    distributed: DistributedConfig = DistributedConfig()
    """How several ranks work together."""

    output: OutputConfig = OutputConfig()
    """Where the run is written."""

    @property
    def learning_rate(self) -> float:
        """The peak learning rate: as given, or the usual one of the tuning mode."""
        given = self.train.learning_rate
        return AUTO_LEARNING_RATE[self.tuning.mode] if given == "auto" else given
