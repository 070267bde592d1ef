"""`make merge-test` and `make export-test`: whether what was written is the trained model, on rows
of the run's data.

merge-test: merged model and adapter read the same rows. At every trained position the two
next-token distributions are compared: their Kullback-Leibler divergence, and the loss. The base
without its adapter is the yardstick: a merged model that is as far from the adapter as the base is
has not been merged.

export-test names the fault of each comparison: the file's template, its tokenizer (the token ids of
prompts, as an engine renders them, are training's), its stop tokens, and its answers, read back by
transformers (greedy, token for token, with the divergence of the next-token distributions).
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from sft_play.answers import Answer
from sft_play.data.build.splits import DataSplit
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.data.sources.formats import Chat
from sft_play.errors import ModelError, TokenizerError
from sft_play.finished.export.merge import (
    ensure_whole_model_folder,
    folder_stop_ids,
    record_merge_test,
)
from sft_play.finished.respond import (
    build_run_renderer,
    default_device,
    image_source,
    load_held_out_rows,
    load_model_folder,
    load_trained_model,
)
from sft_play.finished.run import (
    MERGED_FOLDER,
    FinishedRun,
    find_gguf,
    next_command_line,
    require_merged,
)
from sft_play.log import one_line
from sft_play.process.waiting import report_each
from sft_play.runs.folder import read_json
from sft_play.training.checkpoints.checkpoints import require_unchanged
from sft_play.training.loop.rows import PICTURES, Collator
from sft_play.training.measure.exact_match import Question, evenly_spaced, generate_answers
from sft_play.training.model import attention_functions
from sft_play.training.model.language_model import prepare_text_config
from sft_play.training.model.vision import find_vision
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.library_messages import quiet_libraries
from sft_play.training.prepare.tokenizer import load_tokenizer

MERGE_TEST_ROWS = 16
# Mean KL divergence, in nats, that is always allowed, by the coarsest dtype in which either
# computes: rounding alone moves the logits of real models in bf16 by some 1e-2, which is a
# divergence of some 1e-4. Weights in so many bits: one and a half times llama.cpp's own measurement
# of the worst such type with Llama 3 8B (tools/perplexity/README.md: 0.0014 for q8_0, 0.0055 for
# q6_K, 0.022 for q5_0, 0.072 for q4_0, 0.228 for q3_K_S, 0.445 for q2_K).
_MIN_KL_LIMIT = {
    "float32": 1e-6,
    "bfloat16": 1e-4,
    "float16": 1e-4,
    "q8": 2e-3,
    "q6": 8e-3,
    "q5": 3e-2,
    "q4": 0.11,
    "q3": 0.34,
    "q2": 0.67,
}
# The same that is never allowed, however much the training changed.
_MAX_KL_LIMIT = {
    "float32": 1e-4,
    "bfloat16": 5e-3,
    "float16": 5e-3,
    "q8": 2e-2,
    "q6": 4e-2,
    "q5": 0.1,
    "q4": 0.25,
    "q3": 0.5,
    "q2": 0.8,
}
EXPORT_TEST_ROWS = 200
_GGUF_FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


# --- merge-test -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class MergeTest(Answer):
    """What merge-test found. Divergences and losses are means over trained positions, in nats."""

    run: Path
    path: Path
    split: str
    rows: int
    # Trained positions that were compared.
    places: int
    # KL(adapter ‖ merged).
    kl_merged: float
    # KL(adapter ‖ base without adapter).
    kl_base: float
    # Mean divergence up to which the two count as equal.
    kl_limit: float
    # Of `adapter`, `merged` and `base`.
    loss: Mapping[str, float]

    @property
    def ok(self) -> bool:
        return self.kl_merged <= self.kl_limit

    def lines(self) -> list[str]:
        lines = [
            f"Compared: {self.places:,} trained tokens of {self.rows} rows ({self.split})",
            "Loss: {base:.4f} base, {adapter:.4f} with the adapter, {merged:.4f} merged".format(
                **self.loss
            ),
            (
                f"KL divergence from the adapter: {self.kl_merged:.2g} nats merged (limit"
                f" {self.kl_limit:.2g}), {self.kl_base:.2g} base"
            ),
        ]
        if not self.ok:
            advice = (
                "FORCE=1 with BASE=dequantized for a QLoRA run, or with a finer DTYPE (bf16, fp32)"
            )
            return [
                *lines,
                "Verdict: the merged model is NOT the adapter's",
                next_command_line("merge", advice, RUN=self.run),
            ]
        next_line = next_command_line("serve", "ENGINE=vllm", RUN=self.run)
        if self.path != self.run / MERGED_FOLDER:
            next_line = f"Next: vllm serve {shlex.quote(str(self.path))}"
        return [*lines, "Verdict: the merged model is the adapter's", next_line]


def merge_test(
    run: FinishedRun, *, path: Path | None = None, rows: int = MERGE_TEST_ROWS
) -> MergeTest:
    """Compare a merged model (`path`; None: `merged/`) with the run's adapter, on at most `rows`
    held-out rows. Raises RunFolderError where there is no merged model, or the run has no adapter;
    ModelError where the model is not what was merged; DataError where the run's data is gone."""
    target = path or run.folder.path / MERGED_FOLDER
    require_merged(run, target)
    require_unchanged(target)
    quiet_libraries()
    held_out_rows = load_held_out_rows(run)
    sample_rows = evenly_spaced(held_out_rows.split.rows, rows)
    model = load_trained_model(run)
    adapter_log_probs = log_probs(model, sample_rows)
    with model.disable_adapter():
        base_log_probs = log_probs(model, sample_rows)
    kl_base = mean_divergence(adapter_log_probs, base_log_probs)
    base_loss = mean_loss(base_log_probs)
    dtypes = {f"torch.{run.plan().precision.compute}", str(next(model.parameters()).dtype)}
    # one model at a time: two whole ones may be more than fits
    del model, base_log_probs
    free_memory()
    model = load_model_folder(target, images=image_source(run))
    dtypes.add(str(model.dtype))
    merged_log_probs = log_probs(model, sample_rows)
    del model
    free_memory()
    result = MergeTest(
        run.folder.path,
        target,
        held_out_rows.name,
        len(sample_rows),
        sum(len(row) for row, _ in adapter_log_probs),
        mean_divergence(adapter_log_probs, merged_log_probs),
        kl_base,
        kl_limit=max(divergence_limit(dtype.removeprefix("torch."), kl_base) for dtype in dtypes),
        loss={
            "adapter": mean_loss(adapter_log_probs),
            "merged": mean_loss(merged_log_probs),
            "base": base_loss,
        },
    )
    record_merge_test(target, ok=result.ok, divergence=result.kl_merged, limit=result.kl_limit)
    return result


def divergence_limit(dtype: str, base_divergence: float) -> float:
    """The mean KL divergence, in nats, up to which a merged model counts as the adapter's.

    Args:
        dtype: the coarsest in which either computes, a key of `_MIN_KL_LIMIT`.
        base_divergence: of the base from the adapter, in nats: what training changed.
    """
    # of what training changed, a twentieth may remain
    return max(_MIN_KL_LIMIT[dtype], min(_MAX_KL_LIMIT[dtype], 0.05 * base_divergence))


# --- how far two models are from each other -------------------------------------------------------
#
# Shape letters: T tokens of a row, P its trained positions, V the vocabulary.

# Trained positions of a row that are compared: with a vocabulary of 150,000 they are 40 MB in fp32.
MAX_POSITIONS = 64

# Log-probabilities of every token at the trained positions of a row ([P, V], fp32, in RAM) and the
# next tokens ([P]).
RowLogProbs = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[dict[str, Any]]) -> list[RowLogProbs]:
    """Compute, for each row, the log-probabilities of the next token at its first `MAX_POSITIONS`
    trained positions."""
    row_log_probs, vision = [], find_vision(model)
    for row in report_each("Comparing models", rows, unit="rows", count=len(rows)):
        inputs = {"input_ids": torch.tensor([row["input_ids"]])}
        if vision is not None:
            inputs = Collator(pad_id=0, images=vision.images)([row])
            del inputs["labels"]
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        labels_T = torch.tensor(row["labels"])[1:]
        positions = torch.nonzero(labels_T >= 0).flatten()[:MAX_POSITIONS]
        logits_PV = model(**inputs, use_cache=False).logits[0, positions.to(model.device)]
        row_log_probs.append(
            (torch.log_softmax(logits_PV.float(), dim=-1).cpu(), labels_T[positions])
        )
    return row_log_probs


def mean_divergence(first: Sequence[RowLogProbs], second: Sequence[RowLogProbs]) -> float:
    """Mean KL(first ‖ second) over positions, in nats."""
    divergences = []
    for (first_PV, _), (second_PV, _) in zip(first, second, strict=True):
        width = min(first_PV.shape[1], second_PV.shape[1])  # one may lack rows that are no token's
        first_PV, second_PV = (
            logits_PV[:, :width].log_softmax(-1) for logits_PV in (first_PV, second_PV)
        )
        divergences.append((first_PV.exp() * (first_PV - second_PV)).sum(-1))
    # of equal models fp32 sums to about -1e-9; what is not a number stays so: max() keeps its first
    # argument then
    return max(float(torch.cat(divergences).double().mean()), 0.0)


def mean_loss(row_log_probs: Sequence[RowLogProbs]) -> float:
    """Mean loss over the trained positions."""
    losses = [-log_PV[torch.arange(len(tokens_P)), tokens_P] for log_PV, tokens_P in row_log_probs]
    return float(torch.cat(losses).double().mean())


# --- a run's prompts, as training rendered them and as an engine does from the exported folder ----
#
# Training's are token ids of its own renderer. An engine has the folder's chat template, its
# tokenizer, the messages.

_PROBE_TEXTS = (
    "The",
    "Once upon a time, in 1984,",
    "naïve café 日本語 🚀\n\n",
    "def f(x):\n    return x\n",
)


class PairedPrompt(NamedTuple):
    """A prompt: training's ids, and the text that an engine renders; empty where the exported
    template refuses it."""

    ids: list[int]
    rendered: str


class EnginePrompts:
    """A run's prompts, as training rendered them and as `model_folder`, a merged or exported model
    of the run, renders them."""

    def __init__(self, run: FinishedRun, model_folder: Path) -> None:
        self._model_folder = model_folder
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_folder, trust_remote_code=run.config.model.trust_remote_code
        )
        self._training_tokenizer = load_tokenizer(run.config).tokenizer
        self._renderer = build_run_renderer(run, self._training_tokenizer)
        self.is_plain_text = run.config.task_mode == "cpt"
        # Tokens that end an answer as the run was trained.
        self.stop_ids = folder_stop_ids(run, self.tokenizer, model_folder)
        # The text that ends an answer; empty where nothing does.
        self.end_of_turn = (
            "" if self.is_plain_text else self._renderer.turn_locator().ends.end_of_turn
        )
        sources = self.tokenizer.chat_template or {}
        if isinstance(sources, str):
            sources = {"default": sources}
        # The folder's chat template, of several the one for rows without tools.
        self.template: str | None = sources.get("default")
        texts = {
            key: value
            for key, value in self.tokenizer.special_tokens_map.items()
            if isinstance(value, str)
        }
        self._templates = {
            name: ChatTemplate(source, variables=texts, today=self._renderer.today)
            for name, source in sources.items()
        }

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """Render messages by the folder's chat template, on the day of the run. Raises RenderError
        where it refuses them, or TokenizerError where there is none."""
        names = ["tool_use", "default"] if tools else ["default"]
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            raise TokenizerError(f"{self._model_folder} has no chat template")
        return template.render(
            [dict(message) for message in messages], tools=tools, with_prompt=True
        )

    def row_prompts(self, split: DataSplit, count: int) -> list[PairedPrompt]:
        """Prompts of a split's rows, at most `count`, evenly spaced over them; without those that
        have images, whose tokens are the processor's."""
        if self.is_plain_text:
            rows = (row["input_ids"] for row in evenly_spaced(split.rows, count))
            return [
                self._text_prompt(self._training_tokenizer.decode(ids[: max(1, len(ids) // 2)]))
                for ids in rows
            ]
        return list(filter(None, map(self._chat_prompt, evenly_spaced(split.chats, count))))

    def probe_prompts(self) -> list[PairedPrompt]:
        """Prompts that are not the run's: conversations with and without a system prompt, or
        texts."""
        if self.is_plain_text:
            return [self._text_prompt(text) for text in _PROBE_TEXTS]
        answer = {"role": "assistant", "content": "."}
        chats = [Chat("", (*turns, answer), ()) for turns in probe_conversations()]
        return list(filter(None, map(self._chat_prompt, chats)))

    def _text_prompt(self, text: str) -> PairedPrompt:
        return PairedPrompt(list(self._training_tokenizer(text)["input_ids"]), text)

    def _chat_prompt(self, chat: Chat) -> PairedPrompt | None:
        """Pair a chat's prompts; None where training makes none of it, or an engine cannot."""
        if chat.images:
            return None
        prompt = self._renderer.prompt_ids(chat)
        # an engine is sent text, in which the name of a special token is the token
        if prompt is None or self._renderer.hides_special_tokens(chat.messages[:-1]):
            return None
        # what a client would send: without the answer, and without keys that only training reads
        messages = [
            {
                key: value
                for key, value in turn.items()
                if key not in ("train", "weight", "loss_weight")
            }
            for turn in chat.messages[:-1]
        ]
        try:
            return PairedPrompt(prompt, self.render(messages, chat.tools))
        except RenderError:
            return PairedPrompt(prompt, "")


def probe_conversations() -> list[list[dict[str, str]]]:
    """Conversations that an engine has to get right: one to four questions, with a system prompt
    and without."""
    texts = (
        "Hello",
        "naïve café 日本語 🚀",
        "a {{ .b }} {% c %} \"d\" '''",
        "two\n\nlines",
        "1 < 2 && 3 > 2",
    )
    conversations = []
    for turns in range(1, 5):
        conversation = [
            {"role": role, "content": f"{texts[(turn + offset) % len(texts)]} {turn}"}
            for turn in range(turns)
            for offset, role in enumerate(("user", "assistant"))
        ][:-1]
        conversations += [
            conversation,
            [{"role": "system", "content": "You are terse."}, *conversation],
        ]
    return conversations


# --- export-test ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExportCheck:
    """One comparison; `ok` is None where it could not be made."""

    name: str
    ok: bool | None
    reason: str


@dataclass(frozen=True)
class ExportTest(Answer):
    """What export-test found."""

    run: Path
    file: Path
    # Of the file's tensors, such as Q8_0.
    types: tuple[str, ...]
    # Where the prompts are from: test, val, or test conversations where the run has no held-out
    # rows.
    split: str
    prompts: int
    checks: tuple[ExportCheck, ...]
    # `kl` is the mean divergence of the file's model from the trained one, in nats, `kl_limit` what
    # the rule of merge-test allows, `equal_answers` the share of answers that are equal token for
    # token. None where transformers does not read the file.
    answers: Mapping[str, float] | None
    # Divergence of the base, in nats; None for a run without an adapter.
    kl_base: float | None

    @property
    def ok(self) -> bool:
        return all(check.ok is True for check in self.checks)

    def lines(self) -> list[str]:
        file = f"{self.file.name} ({', '.join(self.types)})"
        lines = [f"Compared: {file} with {self.run.name}: {self.prompts} prompts ({self.split})"]
        marks = {True: "ok", False: "NOT ok", None: "not checked"}
        lines += [f"{check.name}: {marks[check.ok]}, {check.reason}" for check in self.checks]
        if self.ok:
            return [
                *lines,
                "Verdict: the exported model answers as the trained one",
                f"Next: llama-server --jinja -m {shlex.quote(str(self.file))}",
            ]
        if any(check.ok is False for check in self.checks):
            return [*lines, "Verdict: the exported model does NOT answer as the trained one"]
        return [*lines, "Verdict: not known, since not everything could be checked here"]


def export_test(
    run: FinishedRun, *, path: Path | None = None, rows: int = EXPORT_TEST_ROWS
) -> ExportTest:
    """Compare an exported GGUF (`path`: it, or its folder) with the run, over answers to at most
    `rows` held-out rows. Raises RunFolderError where there is no GGUF, or DataError where the run's
    data is gone."""
    file = find_gguf(run, path)
    fields = read_fields(file)
    quiet_libraries()
    model_folder = ensure_whole_model_folder(run, is_locked=False)
    prompts = EnginePrompts(run, model_folder)
    held_out_rows, plan = load_held_out_rows(run), run.plan()
    pairs, prompt_source = prompts.row_prompts(held_out_rows.split, rows), held_out_rows.name
    if not pairs:  # training rows have no text
        pairs, prompt_source = prompts.probe_prompts()[:rows], "test conversations"
    # a prompt that fills the run's rows leaves no room for an answer
    paired_prompts = [pair for pair in pairs if len(pair.ids) < plan.max_seq_len]
    questions = [Question(pair.ids, "", "") for pair in paired_prompts]
    sample_rows = evenly_spaced(held_out_rows.split.rows, 32)
    kl_rows = [row for row in sample_rows if not row.get(PICTURES)]  # a GGUF is the language model
    tensor_types, embedding_rows = _read_tensor_types(file)
    checks = check_file(run, file, fields, prompts, paired_prompts)
    # the coarsest rounding decides the limit
    dtypes = {
        _GGUF_FLOAT_DTYPES.get(name) or f"q{max(2, weight_bits(name) or 8)}"
        for name in tensor_types
    } | {plan.precision.compute}

    def measure(model: Any) -> tuple[list[tuple[int, ...]], list[RowLogProbs]]:
        # the token ids of the model's answers, and its log-probabilities on held-out rows
        generated = generate_answers(
            model,
            prompts.tokenizer,
            questions,
            stop_ids=prompts.stop_ids,
            max_new_tokens=run.config.eval.max_new_tokens,
            max_tokens=plan.answer_tokens,
        )
        dtypes.add(str(next(model.parameters()).dtype).removeprefix("torch."))
        return [answer.token_ids for answer in generated], log_probs(model, kl_rows)

    comparison, base_divergence = None, None
    try:
        if not kl_rows:
            raise ModelError("the rows looked at all have images, which are not compared")
        model = load_gguf(file, model_folder, embedding_rows=embedding_rows)
    except ModelError as error:
        checks.append(ExportCheck("Answers", None, str(error)))
    else:
        file_answers, file_log_probs = measure(model)
        del model  # two whole models may be more than fits
        free_memory()
        model = load_trained_model(run)
        answers, trained_log_probs = measure(model)
        if run.is_adapter:
            with model.disable_adapter():
                base_divergence = mean_divergence(trained_log_probs, log_probs(model, kl_rows))
        del model
        free_memory()
        equal = [one == other for one, other in zip(answers, file_answers, strict=True)]
        comparison = {
            "kl": mean_divergence(trained_log_probs, file_log_probs),
            "equal_answers": sum(equal) / max(1, len(equal)),
            "kl_limit": max(divergence_limit(dtype, base_divergence or 0.0) for dtype in dtypes),
        }
        reason = (
            "{equal_answers:.1%} equal the trained model's token for token,"
            " KL {kl:.2g} nats (limit {kl_limit:.2g})".format(**comparison)
        )
        checks.append(ExportCheck("Answers", comparison["kl"] <= comparison["kl_limit"], reason))
    return ExportTest(
        run.folder.path,
        file,
        tuple(sorted(tensor_types)),
        prompt_source,
        len(paired_prompts),
        tuple(checks),
        comparison,
        base_divergence,
    )


def check_file(
    run: FinishedRun,
    file: Path,
    fields: Mapping[str, Any],
    prompts: EnginePrompts,
    paired_prompts: Sequence[PairedPrompt],
) -> list[ExportCheck]:
    """Compare a GGUF with training: its template, its tokenizer over `paired_prompts`, its stop
    tokens. `fields` is its metadata. The tokenizer's `ok` is None without prompts, and where only
    llama.cpp itself can read it."""
    checks = []
    if prompts.template is not None:
        is_equal, reason = True, "the file has the chat template trained with"
        if fields.get("tokenizer.chat_template") != prompts.template:
            is_equal, reason = False, "the file has another chat template than the one trained with"
        checks.append(ExportCheck("Template", is_equal, reason))
    try:
        encode = load_file_tokenizer(file, fields)
    except ModelError as error:
        return [*checks, ExportCheck("Tokenizer", None, str(error))]
    equal_count = sum(encode(pair.rendered) == pair.ids for pair in paired_prompts)
    total = len(paired_prompts)
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    reason = (
        f"{equal_count} of {total} prompts have training's token ids by the file's own"
        f" ({kind}, {pre})"
    )
    template_kwargs = run.config.data.chat_template_kwargs
    if equal_count < total and template_kwargs:
        reason += (
            f"; training passed chat_template_kwargs={template_kwargs}, and so has every request"
        )
    # without prompts nothing is known
    checks.append(ExportCheck("Tokenizer", equal_count == total if total else None, reason))
    file_stop_ids = {
        fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    }
    missing_ids = sorted(set(prompts.stop_ids) - file_stop_ids)
    reason = "the file ends answers at training's stop tokens"
    if missing_ids:
        reason = (
            "the file does not end at"
            f" {', '.join(prompts.tokenizer.convert_ids_to_tokens(missing_ids))}"
        )
    return [*checks, ExportCheck("Stop tokens", not missing_ids, reason)]


def load_gguf(file: Path, folder: Path, *, embedding_rows: int) -> Any:
    """Load the model in a GGUF, in eval mode on the first GPU or the CPU.

    Settings and dtype are those of `folder`, the model that was exported: transformers does not
    read all of them out of a GGUF (Llama 3's scaled positions, biases). `embedding_rows` are the
    file's. Raises ModelError where transformers does not read this architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, LlamaConfig

    # a GGUF holds the language model
    config = prepare_text_config(AutoConfig.from_pretrained(folder))
    config.get_text_config().vocab_size = embedding_rows  # without rows that only pad
    dtype = config.dtype or torch.float32
    if config.model_type == "mistral":  # llama.cpp writes it as `llama`, which computes as it does
        config = LlamaConfig(
            **{
                key: value
                for key, value in config.to_dict().items()
                if key not in ("model_type", "architectures")
            }
        )
    attention_functions.enable_cudnn(enabled=False)
    try:
        gguf_model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            config=config,
            dtype=dtype,
            device_map={"": default_device()},
            quantization_config=GgufConfig(dequantize=True),
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
        NotImplementedError,
        KeyError,
        ImportError,
        AttributeError,
    ) as error:
        raise ModelError(
            f"transformers does not read this GGUF ({config.model_type}):"
            f" {one_line(str(error), limit=120)}"
        ) from None
    return gguf_model.eval()


def _read_tensor_types(file: Path) -> tuple[set[str], int]:
    """Read the types of a GGUF's tensors by name, such as Q8_0, and the rows of its embeddings."""
    from gguf import GGUFReader

    tensors = GGUFReader(str(file)).tensors
    rows = next(int(tensor.shape[-1]) for tensor in tensors if tensor.name == "token_embd.weight")
    return {tensor.tensor_type.name for tensor in tensors}, rows


def weight_bits(tensor_type: str) -> int | None:
    """Bits of a weight in a type of a GGUF, such as 4 of Q4_K and IQ4_XS; None for floats."""
    match = re.match(r"I?Q(\d)_", tensor_type)
    return int(match[1]) if match else None


# --- the tokenizer in a GGUF ----------------------------------------------------------------------
#
# A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`). llama.cpp's converter knows published
# tokenizers by a checksum; for others the name is proven here: both cut many texts, from every part
# of Unicode, into the same pieces. `pre_tokenizers.json` has llama.cpp's own table: the names, the
# most usual first; the expressions that cut a text one after the other; and whether a piece that is
# a token as a whole skips the merges (`ignore_merges`).
_PROBED_CHARACTERS = (
    *(
        (0x20, 0x7E),
        (0x09, 0x0D),
        (0xA0, 0x24F),
        (0x370, 0x52F),
        (0x5D0, 0x6FF),
        (0x900, 0xDFF),
        (0xE00, 0x11FF),
    ),
    *(
        (0x2000, 0x206F),
        (0x2070, 0x2BFF),
        (0x3000, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0xFF01, 0xFFEE),
    ),
    *((0x1F300, 0x1FAFF), (0x10400, 0x1044F)),
)
_PIECES = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "a", "Ab", "ABC", "'s", "'S", "'re",
    "'LL", "'", "’s", "1", "12", "123", "1234", "12345678", "1.5", "½", "٣", "!", "?!", "...", "/",
    "//", "_", "-", "--", "=", "é", "ß", "日本", "ひら", "カナ", "한국", "नि", "ก็", "🚀", "👨‍👩‍👧",
    "\u00a0", "\u3000", "\u200d", "µ", "Ǆ", "$", "+", "<", "|", "^",
)  # fmt: skip

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_KNOWN_PRE_TOKENIZERS: list[dict[str, Any]] = read_json(
    Path(__file__).with_name("pre_tokenizers.json")
)["pre_tokenizers"]


def _build_pre_tokenizer(entry: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in entry["expressions"]
    ]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def find_pre_tokenizer(backend: Any) -> str | None:
    """Find llama.cpp's name for the pre-tokenizer of a `tokenizers` tokenizer; None where it has
    none that cuts alike, or the tokenizer is not byte-level BPE. A normalizer is not looked at:
    `check_file` compares token ids.
    """
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE) or backend.pre_tokenizer is None:
        return None
    # all pairs of pieces, and every character of many scripts beside its neighbours and between
    # letters
    scripts = ["".join(map(chr, range(first, last + 1))) for first, last in _PROBED_CHARACTERS]
    pairs = [first + second for first in _PIECES for second in _PIECES]
    texts = [*pairs, *scripts, *map("x".join, scripts)]

    def cut(pre_tokenizer: Any) -> list[list[str]]:
        return [[piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]

    pieces = cut(backend.pre_tokenizer)
    for entry in _KNOWN_PRE_TOKENIZERS:
        if (
            entry["ignore_merges"] == bool(model.ignore_merges)
            and cut(_build_pre_tokenizer(entry)) == pieces
        ):
            return str(entry["names"][0])
    return None


def read_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF by its keys, as plain values; raises ModelError where it is no
    GGUF."""
    from gguf import GGUFReader

    try:
        return {key: field.contents() for key, field in GGUFReader(str(path)).fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF: {error}") from None


def load_file_tokenizer(file: Path, fields: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Read a GGUF's own tokenizer; returns a function from a rendered prompt to token ids, by
    llama.cpp's rules: special tokens are parsed, and a leading BOS of the text is not doubled.
    `fields` is the file's metadata. Raises ModelError for a kind, or a pre-tokenizer, that only
    llama.cpp itself can read."""
    from tokenizers import normalizers
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, _ = get_gguf_tokenizer(str(file))
    kind, pre = vocabulary["tokenizer_type"], vocabulary.get("pre_tokenizer_type", "default")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"the GGUF's tokenizer is a {kind}, which only llama.cpp itself reads")
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    # byte-level BPE; transformers cuts by GPT-2's rule where it does not know the name
    if kind == "gpt2":
        known = [entry for entry in _KNOWN_PRE_TOKENIZERS if pre in entry["names"]]
        if not known:
            raise ModelError(f"the GGUF's pre-tokenizer {pre} is not in the table of llama.cpp's")
        backend.pre_tokenizer = _build_pre_tokenizer(known[0])
        backend.model.ignore_merges = known[0]["ignore_merges"]
    else:  # SentencePiece, whose text gets a space before it after every special token too
        prefix = (
            [normalizers.Prepend(_SPACE_MARK)] if vocabulary.get("add_prefix_space", True) else []
        )
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE_MARK)])
        backend.pre_tokenizer = None
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    # a file without the entry: llama.cpp adds BOS to SentencePiece's prompts, and to none of
    # byte-level BPE
    if bos_id is None or not fields.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    bos = vocabulary["tokens"][bos_id]
    return lambda text: [
        bos_id,
        *backend.encode(text.removeprefix(bos), add_special_tokens=False).ids,
    ]


def is_sentencepiece(tokenizer: Any) -> bool:
    """True if a fast tokenizer is SentencePiece's BPE: bytes only where a character has no
    piece."""
    return getattr(tokenizer.backend_tokenizer.model, "byte_fallback", False) is True


def adds_space_prefix(tokenizer: Any) -> bool:
    """True if a tokenizer puts a space before text after a special token too, as llama.cpp does
    (`add_space_prefix`); most prompts begin with such a token."""
    special_token = next(iter(tokenizer.all_special_tokens), "")
    pieces = tokenizer.convert_ids_to_tokens(
        tokenizer(f"{special_token}a", add_special_tokens=False)["input_ids"]
    )
    return any(piece.startswith(_SPACE_MARK) for piece in pieces[bool(special_token) :])
