"""`make export-test`: whether the exported GGUF answers as the trained model does, and where it does not.

A chain of comparisons, each of which names its own fault: prompts (an engine's token ids are training's), the file's
weights (the merged model's, rounded as the file's types say, bit for bit), its settings and stop tokens, and the
answers (greedy, token for token, with the divergence of the next-token distributions).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from sft_play.finished.export import gguf_model
from sft_play.finished.export.check_merge import Scored, divergence, limit_of, log_probs, spaced
from sft_play.finished.export.gguf_tokenizer import ExportCheck, file_checks, read_fields
from sft_play.finished.export.llama_cpp import find_converter
from sft_play.finished.export.merge import whole_model
from sft_play.finished.export.places import find_gguf
from sft_play.finished.export.pre_tokenizers import read_pre_tokenizers
from sft_play.finished.export.prompts import PairedPrompt, Prompts, shared_length
from sft_play.finished.load import held_out, load_as_trained, load_folder
from sft_play.finished.run import FinishedRun, Outcome
from sft_play.training.measure.exact_match import Question, answers
from sft_play.training.prepare.device_checks import free_memory
from sft_play.training.prepare.quiet import quiet_libraries

ROWS = 200
_SCORED_ROWS = 32
"""Rows at whose trained places the distributions are compared."""
_TYPE_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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
    weights: gguf_model.Weights | None
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


@dataclass(frozen=True)
class _Seen:
    answers: list[tuple[int, ...]]
    scored: list[Scored]
    dtype: str


@dataclass(frozen=True)
class _Material:
    asked: Sequence[PairedPrompt]
    rows: Sequence[dict[str, list[int]]]
    stop: Sequence[int]
    max_new_tokens: int
    most_tokens: int
    tokenizer: Any

    def seen_by(self, model: Any) -> _Seen:
        """Answers and log-probabilities of a model of transformers."""
        questions = [Question(asked.ids, "", "") for asked in self.asked]
        given = answers(
            model, self.tokenizer, questions, stop=self.stop, max_new_tokens=self.max_new_tokens,
            most_tokens=self.most_tokens,
        )  # fmt: skip
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        return _Seen([answer.ids for answer in given], log_probs(model, self.rows), dtype)


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
    material = _Material(
        asked, spaced(data.split.rows, _SCORED_ROWS), prompts.stops, run.config.eval.max_new_tokens, plan.answer_tokens,
        prompts.tokenizer,
    )  # fmt: skip
    known = read_pre_tokenizers(find_converter(llama_cpp).vocabularies)
    types = gguf_model.tensor_types(file)
    problems = gguf_model.different_settings(file, fields, AutoConfig.from_pretrained(model))
    words = "; ".join(problems) or "layers, heads and positions are the model's"
    checks = [*_prompt_checks(run, prompts, asked, fields, known), ExportCheck("Settings", not problems, words)]
    seen, weights, check = _read_and_answer(file, model, material, types)
    checks.append(check)
    base_divergence, answering = _beside_trained(run, material, seen, types) if seen is not None else (None, None)
    if answering is not None:
        checks.append(_answer_check(answering))
    return ExportTest(
        run.folder.path, file, tuple(sorted(types)), source, len(material.asked), tuple(checks), answering, weights,
        base_divergence,
    )  # fmt: skip


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


def _read_and_answer(
    file: Path, model: Path, material: _Material, types: set[str]
) -> tuple[_Seen | None, gguf_model.Weights | None, ExportCheck]:
    whole, rows = load_folder(model), gguf_model.embedding_rows(file)
    try:
        read = gguf_model.load_gguf(file, model, dtype=whole.dtype, rows=rows)
    except gguf_model.NotReadHere as error:
        return None, None, ExportCheck("Weights", None, str(error))
    weights = gguf_model.compare_gguf_weights(read, whole, types, rows=rows)
    del whole
    free_memory()
    seen = material.seen_by(read)
    del read
    free_memory()
    is_exact = all((gguf_model.bits_of(name) or 8) >= 8 for name in types)
    words = f"{weights.equal} of {weights.tensors} tensors are the merged model's{', bit for bit' if is_exact else ''}"
    if weights.rounded:
        words += f" after rounding ({weights.rounded} rounded, by {weights.relative_rounding:.2%} of their size)"
    words += f"; the first other one is {weights.first}" if weights.first else ""
    return seen, weights, ExportCheck("Weights", weights.equal == weights.tensors, words)


def _beside_trained(
    run: FinishedRun, material: _Material, seen: _Seen, types: set[str]
) -> tuple[float | None, Answering]:
    model = load_as_trained(run)
    trained, base_divergence = material.seen_by(model), None
    if run.is_adapter:
        with model.disable_adapter():
            base_divergence = divergence(trained.scored, log_probs(model, material.rows))
    del model
    free_memory()
    # the coarsest rounding decides the limit
    of_file = {_TYPE_DTYPES.get(name) or f"q{max(2, gguf_model.bits_of(name) or 8)}" for name in types}
    dtypes = {run.plan().precision.compute, trained.dtype, seen.dtype, *of_file}
    pairs = list(zip(trained.answers, seen.answers, strict=True))
    return base_divergence, Answering(
        divergence(trained.scored, seen.scored),
        equal_answers=sum(mine == theirs for mine, theirs in pairs) / max(1, len(pairs)),
        equal_tokens=sum(shared_length(*pair) for pair in pairs) / max(1, sum(len(mine) for mine, _ in pairs)),
        kl_limit=max(limit_of(dtype, base_divergence or 0.0) for dtype in dtypes),
    )


def _answer_check(one: Answering) -> ExportCheck:
    words = f"{one.equal_answers:.1%} equal the trained model's token for token ({one.equal_tokens:.1%} of its tokens)"
    words += f", KL {one.kl:.2g} nats (limit {one.kl_limit:.2g})"
    return ExportCheck("Answers", one.ok, words)
