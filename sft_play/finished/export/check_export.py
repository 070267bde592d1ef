"""`make export-test`: whether the exported GGUF answers as the trained model does, and where it does not.

Each comparison names its own fault: prompts (an engine's token ids are training's), the file's template, tokenizer and
stop tokens, and the answers of the file, read back by transformers (greedy, token for token, with the divergence of the
next-token distributions).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sft_play.errors import ModelError
from sft_play.finished.export.check_merge import Scored, divergence, limit_of, log_probs, spaced
from sft_play.finished.export.gguf_tokenizer import ExportCheck, file_checks, read_fields
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.merge import whole_model
from sft_play.finished.export.places import find_gguf
from sft_play.finished.export.pre_tokenizers import read_pre_tokenizers
from sft_play.finished.export.prompts import PairedPrompt, Prompts, shared_length
from sft_play.finished.load import held_out, load_as_trained, this_device
from sft_play.finished.run import FinishedRun, Outcome
from sft_play.log import one_line
from sft_play.training.measure.exact_match import Question, generate_answers
from sft_play.training.model import sdpa
from sft_play.training.model.language_model import prepare_text_config
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.quiet import quiet_libraries

ROWS = 200
# Rows at whose trained places the distributions are compared.
_SCORED_ROWS = 32
_TYPE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Model types that llama.cpp writes as `llama`, and that compute as it does.
_AS_LLAMA = ("mistral",)


@dataclass(frozen=True)
class Answering:
    """The file's answers beside the trained model's. Divergences are means over places, in nats."""

    kl: float
    """KL(trained ‖ this)."""
    equal_answers: float
    equal_tokens: float
    """Share of the trained model's tokens before the first that differs."""
    kl_limit: float
    """Mean divergence up to which this counts as the trained model, by the rule of merge-test."""

    @property
    def ok(self) -> bool:
        """Whether it answers as the trained model."""
        return self.kl <= self.kl_limit


@dataclass(frozen=True)
class ExportTest(Outcome):
    """What the comparison found."""

    run: Path
    file: Path
    types: tuple[str, ...]
    split: str
    """Where the prompts are from: test, val, or test conversations where the run has no held-out rows."""
    prompts: int
    checks: tuple[ExportCheck, ...]
    answers: Answering | None
    kl_base: float | None

    @property
    def ok(self) -> bool:
        return all(check.ok is True for check in self.checks)

    def lines(self) -> list[str]:
        types = ", ".join(self.types)
        lines = [f"Compared: {self.file.name} ({types}) with {self.run.name}: {self.prompts} prompts ({self.split})"]
        marks = {True: "ok", False: "NOT ok", None: "not checked"}
        lines += [f"{check.name}: {marks[check.ok]}, {check.reason}" for check in self.checks]
        failed = [check.name.lower() for check in self.checks if check.ok is False]
        missing = [check.name.lower() for check in self.checks if check.ok is None]
        if self.ok:
            next_step = f"Next: llama-server --jinja -m {shlex.quote(str(self.file))}"
            return [*lines, "Verdict: the exported model answers as the trained one", next_step]
        if failed:
            return [*lines, f"Verdict: the exported model does NOT answer as the trained one ({', '.join(failed)})"]
        return [*lines, f"Verdict: not known, since not everything could be checked here ({', '.join(missing)})"]


def export_test(
    run: FinishedRun, *, path: Path | None = None, rows: int = ROWS, llama_cpp: Path | None = None
) -> ExportTest:
    """Compare an exported GGUF (`path`: it, or its folder) with the run, over answers to so many held-out rows. Raises
    RunFolderError where there is no GGUF, or DataError where the run's data is gone."""
    file = find_gguf(run, path)
    fields = read_fields(file)
    quiet_libraries()
    model = whole_model(run, is_locked=False)
    prompts = Prompts(run, model)
    data = held_out(run)
    of_rows = prompts.of_rows(data.split, rows)
    source = data.name if of_rows else "test conversations"  # of training rows only the tokens are kept
    plan, asked = run.plan(), of_rows or prompts.of_probes()[:rows]
    # a prompt that fills the run's rows leaves no room for an answer
    asked = [one for one in asked if len(one.ids) < plan.max_seq_len]
    scored = spaced(data.split.rows, _SCORED_ROWS)
    known = read_pre_tokenizers(find_converter(llama_cpp).vocabularies)
    types, embeddings = _read_types(file)
    checks = _prompt_checks(run, prompts, asked, fields, known)

    def seen_by(model: Any) -> _Seen:
        given = generate_answers(
            model, prompts.tokenizer, [Question(one.ids, "", "") for one in asked], stop_tokens=prompts.stops,
            max_new_tokens=run.config.eval.max_new_tokens, max_tokens=plan.answer_tokens,
        )  # fmt: skip
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return _Seen([answer.token_ids for answer in given], log_probs(model, scored), dtype)

    try:
        read = load_gguf(file, model, rows=embeddings)
    except ModelError as error:
        answering, base = None, None
        checks.append(ExportCheck("Answers", None, str(error)))
    else:
        seen = seen_by(read)
        del read
        free_memory()
        answering, base = _beside_trained(run, seen_by, scored, seen, types)
        checks.append(_answer_check(answering))
    return ExportTest(
        run.folder.path, file, tuple(sorted(types)), source, len(asked), tuple(checks), answering, base
    )  # fmt: skip


def load_gguf(file: Path, model: Path, *, rows: int) -> Any:
    """The model in a GGUF, in eval mode on the first GPU or the CPU, in the dtype of the folder `model`.

    Its settings are that folder's too: transformers reads not all of them out of a GGUF (Llama 3's scaled positions,
    biases). `rows`: of the file's embeddings. Raises ModelError where transformers does not read this architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, LlamaConfig

    config = prepare_text_config(AutoConfig.from_pretrained(model))  # a GGUF holds the language model
    config.get_text_config().vocab_size = rows  # the converter may leave out rows that only pad the embeddings
    dtype = config.dtype or torch.float32
    if config.model_type in _AS_LLAMA:
        kept = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        config = LlamaConfig(**kept)
    sdpa.enable_cudnn(enabled=False)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, config=config, dtype=dtype, device_map={"": this_device()},
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, NotImplementedError, KeyError, ImportError, AttributeError) as error:
        why = f"({config.model_type}): {one_line(str(error), limit=120)}"
        raise ModelError(f"transformers does not read this GGUF {why}") from None
    return loaded.eval()


def _read_types(file: Path) -> tuple[set[str], int]:
    """Names of the types of the file's tensors, such as Q8_0, and the rows of its input embeddings."""
    from gguf import GGUFReader

    tensors = GGUFReader(str(file)).tensors
    rows = next(int(one.shape[-1]) for one in tensors if one.name == "token_embd.weight")
    return {one.tensor_type.name for one in tensors}, rows


def bits_of(kind: str) -> int | None:
    """Bits of a weight in a type of a GGUF, such as 4 of Q4_K and IQ4_XS; None for floats."""
    found = re.match(r"I?Q(\d)_", kind)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class _Seen:
    answers: list[tuple[int, ...]]
    scored: list[Scored]
    dtype: str


def _prompt_checks(
    run: FinishedRun, prompts: Prompts, asked: Sequence[PairedPrompt], fields: dict[str, Any], known: Any
) -> list[ExportCheck]:
    refused = sum(one.rendered is None for one in asked)
    same = sum(one.rendered is not None and prompts.ids_of(one.text) == one.ids for one in asked)
    words = f"{same} of {len(asked)} have training's token ids by the folder's template and tokenizer"
    if refused:
        words += f"; the template refuses {refused}"
    given = run.config.data.chat_template_kwargs
    if same < len(asked) and given:
        words += f"; training passed chat_template_kwargs={given}, and so has every request"
    checks = [ExportCheck("Prompts", same == len(asked) > 0, words)]
    return [*checks, *file_checks(fields, known, prompts, asked)]


def _beside_trained(
    run: FinishedRun, seen_by: Callable[[Any], _Seen], rows: Sequence[Any], seen: _Seen, types: set[str]
) -> tuple[Answering, float | None]:
    model = load_as_trained(run)
    trained, base = seen_by(model), None
    if run.is_adapter:
        with model.disable_adapter():
            base = divergence(trained.scored, log_probs(model, rows))
    del model
    free_memory()
    # the coarsest rounding decides the limit
    of_file = {_TYPE_DTYPES.get(name) or f"q{max(2, bits_of(name) or 8)}" for name in types}
    dtypes = {run.plan().precision.compute, trained.dtype, seen.dtype, *of_file}
    pairs = list(zip(trained.answers, seen.answers, strict=True))
    answering = Answering(
        divergence(trained.scored, seen.scored),
        equal_answers=sum(mine == theirs for mine, theirs in pairs) / max(1, len(pairs)),
        equal_tokens=sum(shared_length(*pair) for pair in pairs) / max(1, sum(len(mine) for mine, _ in pairs)),
        kl_limit=max(limit_of(dtype, base or 0.0) for dtype in dtypes),
    )
    return answering, base


def _answer_check(one: Answering) -> ExportCheck:
    words = f"{one.equal_answers:.1%} equal the trained model's token for token ({one.equal_tokens:.1%} of its tokens)"
    words += f", KL {one.kl:.2g} nats (limit {one.kl_limit:.2g})"
    return ExportCheck("Answers", one.ok, words)
