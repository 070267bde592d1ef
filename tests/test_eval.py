"""`make eval`: figures of base and trained model, equal to those of the run's own evaluations."""

import fnmatch
import importlib.machinery
import importlib.util
import json
import math
import random
import re
import string
import sys
import types
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from sft_play.errors import ConfigError, DataError
from sft_play.finished import evaluation, respond
from sft_play.finished.evaluation import RowScore, evaluate_run, score_rows, score_rows_of_run
from sft_play.finished.metrics import Interval, MetricComparison, rouge_l, select_metrics, split_words
from sft_play.finished.respond import load_held_out_rows, load_trained_model
from sft_play.finished.run import FinishedRun, find_finished_run, require_split
from tests.conftest import chat, write_rows, write_run
from tests.finished_runs import SMALL, finished_run, make_base

pytestmark = [
    pytest.mark.build,
    pytest.mark.filterwarnings(
        "ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`"
    ),  # PEFT's
]


def mean_loss(scores: list[RowScore]) -> float:
    """Mean over all trained tokens, in nats, without a balance loss."""
    return sum(score.nll for score in scores) / sum(score.tokens for score in scores)


RUNS = {
    "lora, packed": ("lora", False, "data.packing=best_fit"), "lora, bf16": ("lora", True, ""),
    "qlora, bf16": ("qlora", True, ""), "full, bf16": ("full", True, "train.learning_rate=3e-3"),
}  # fmt: skip


def trained(folder: Path, base: Path, succeed: Any, *words: str) -> tuple[FinishedRun, dict[str, Any]]:
    """A run that learns to answer one of two words; half of the rows are held out."""
    rows = (chat(f"what is {n} + {n}?", "yes" if n % 3 else "no no") for n in range(64))
    asked = {"data": {"val_fraction": 0.5}, "eval": {"steps": 0, "generate_rows": 100, "max_new_tokens": 6}}
    asked |= {"train": {"max_steps": 12, "learning_rate": 1e-2, "warmup_steps": 0}, "output": {"name": "first"}}
    path = write_run(folder, base, write_rows(folder / "rows.jsonl", rows), **asked)
    succeed("train", "--config", str(path), *words)
    run = find_finished_run(folder / "outputs", "first")
    return run, json.loads((run.folder.path / "summary.json").read_text())


@pytest.mark.parametrize("kind", RUNS)
def test_the_figures_are_those_of_the_run_s_own_evaluations(tmp_path, tiny_llama, succeed, kind):
    mode, bf16, word = RUNS[kind]
    words = [f"tuning.mode={mode}", f"train.bf16={str(bf16).lower()}", *([word] if word else [])]
    run, summary = trained(tmp_path, tiny_llama, succeed, *words)
    figures = {figure.name: figure for figure in evaluate_run(run, metrics=["exact_match"]).comparisons}
    apart = 5e-4 if bf16 else 1e-4  # processors round products of 16 bits differently by the shape of a batch
    for name, of in (("base", "before"), ("tuned", "after")):
        assert getattr(figures["loss"], name) == pytest.approx(summary[of]["loss"], abs=apart)
        assert getattr(figures["exact_match"], name) == pytest.approx(summary[of]["exact_match"])
    assert figures["loss"].verdict == "better"
    assert figures["exact_match"].tuned > 0


def test_the_loss_of_experts_is_without_their_balance_loss(tmp_path, succeed):
    torch.manual_seed(0)
    balanced = {"num_local_experts": 4, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    model = MixtralForCausalLM(MixtralConfig(**SMALL, vocab_size=400, **balanced))
    base = make_base(tmp_path / "base", model)
    run, summary = trained(tmp_path, base, succeed, "tuning.mode=lora", "train.bf16=false")
    scores = score_rows_of_run(run, load_trained_model(run), load_held_out_rows(run).split.rows)
    assert mean_loss(scores) < summary["after"]["loss"] - 0.1


def plain_scores(model: Any, row: dict[str, list[int]]) -> tuple[float, int, int]:
    """The score of one row by the definition, from whole logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1].float()
    labels = torch.tensor(row["labels"])[1:]
    is_trained = labels >= 0
    log_probs = torch.log_softmax(logits, -1)[is_trained, labels[is_trained]]
    right = logits.argmax(-1)[is_trained] == labels[is_trained]
    return float(-log_probs.double().sum()), int(is_trained.sum()), int(right.sum())


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A finished run with a random adapter, and a head of its own on a base that ties it."""
    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    base = make_base(folder / "base", LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=400, tie_word_embeddings=True)))
    return find_finished_run(folder, str(finished_run(folder / "run", base, modules_to_save=["lm_head"])))


def random_rows(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of 1 to 30 tokens with about half of the labels masked, or all."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 300, (int(torch.randint(1, 31, (1,), generator=draw)),), generator=draw)
        hidden = torch.rand(len(ids), generator=draw) < (1.0 if number % 7 == 3 else 0.5)
        rows.append({"input_ids": ids.tolist(), "labels": torch.where(hidden, -100, ids).tolist()})
    return rows


def test_each_row_has_its_own_score_whatever_the_batches(lora):
    model, rows = load_trained_model(lora), random_rows(23, seed=1)
    expected = [plain_scores(model, row) for row in rows]
    for most in (1, 40, 97, 10_000):
        scores = score_rows(model, rows, max_batch_tokens=most)
        assert [(one.tokens, one.correct) for one in scores] == [row[1:] for row in expected]
        assert [one.nll for one in scores] == pytest.approx([row[0] for row in expected], abs=1e-4)
    with model.disable_adapter():
        base = score_rows(model, rows, max_batch_tokens=97)
        without = [plain_scores(model, row) for row in rows]
    assert [one.nll for one in base] == pytest.approx([row[0] for row in without], abs=1e-4)
    assert mean_loss(base) != pytest.approx(mean_loss(scores), abs=1e-3)


def test_a_batch_has_the_tokens_that_the_plan_evaluates_at_a_time(monkeypatch):
    """Rows of the longest row's length, for which the plan counted them: model.max_seq_len would be thrice that."""
    step, precision = SimpleNamespace(seq_len=80), SimpleNamespace(compute="float32")
    planned = SimpleNamespace(eval_batch=5, max_seq_len=256, choice=SimpleNamespace(step=step), precision=precision)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(evaluation, "score_rows", lambda model, rows, **options: asked.update(options))
    run: Any = SimpleNamespace(plan=lambda: planned)
    score_rows_of_run(run, None, [])
    assert asked == {"max_batch_tokens": 5 * 80, "autocast_dtype": torch.float32}


def test_where_memory_runs_out_batches_are_halved_and_no_row_is_lost(lora, monkeypatch, caplog):
    model, rows = load_trained_model(lora), random_rows(16, seed=2)
    expected = score_rows(model, rows, max_batch_tokens=1_000)
    seen, whole = [], evaluation._score_batch

    def small(model, tables, compute):
        if sum(len(table["input_ids"]) for table in tables) > 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        seen.append(len(tables))
        return whole(model, tables, compute)

    monkeypatch.setattr(evaluation, "_score_batch", small)
    halved = score_rows(model, rows, max_batch_tokens=1_000)
    assert [one.nll for one in halved] == pytest.approx([one.nll for one in expected], abs=1e-5)
    assert "Out of memory: continuing with at most" in caplog.text
    assert max(seen) > 1
    with pytest.raises(torch.OutOfMemoryError):
        score_rows(model, [{"input_ids": [5] * 61, "labels": [5] * 61}], max_batch_tokens=1_000)
    monkeypatch.setattr(evaluation, "_score_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # another fault is no lack of memory
        score_rows(model, rows, max_batch_tokens=1_000)


# The rows.
def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_figure_follows_from_the_rows_that_are_written(lora):
    evaluation = evaluate_run(lora, max_new_tokens=6)
    rows = lines_of(lora.folder.path / "eval.jsonl")
    assert [row["row"] for row in rows] == list(range(1, 13))
    figures = {figure.name: figure for figure in evaluation.comparisons}
    assert list(figures) == ["loss", "token_accuracy", "exact_match", "rouge_l", "chrf"]
    tokens = sum(row["tuned"]["tokens"] for row in rows)
    assert tokens == evaluation.tokens
    for whose in ("base", "tuned"):
        loss = sum(row[whose]["nll"] for row in rows) / tokens
        assert getattr(figures["loss"], whose) == pytest.approx(loss)
        assert evaluation.comparisons[0].perplexity[whose] == pytest.approx(math.exp(loss))
        right = sum(row[whose]["correct"] for row in rows)
        assert getattr(figures["token_accuracy"], whose) == pytest.approx(right / tokens)
        for name in ("exact_match", "rouge_l", "chrf"):
            assert getattr(figures[name], whose) == pytest.approx(sum(row[whose][name] for row in rows) / len(rows))
    assert {row["reference"] for row in rows} <= {f"it is {2 * n}." for n in range(24)}
    assert all(row["prompt"][0]["role"] == "user" for row in rows)
    assert rows[0]["base"]["answer"] != rows[0]["tuned"]["answer"]
    for figure in figures.values():
        assert figure.interval.difference == pytest.approx(figure.tuned - figure.base)
        assert figure.interval.low <= figure.interval.difference <= figure.interval.high
    assert json.loads((lora.folder.path / "eval.json").read_text()) == json.loads(json.dumps(evaluation.as_json()))


def test_a_limit_takes_rows_evenly_and_out_is_another_place(lora, tmp_path):
    out = tmp_path / "new" / "a.jsonl"
    evaluation = evaluate_run(lora, limit=5, metrics=["exact_match"], max_new_tokens=2, out=out)
    assert [row["row"] for row in lines_of(out)] == [1, 3, 5, 8, 10]  # 12 * n // 5 + 1
    assert json.loads((tmp_path / "new" / "a.json").read_text())["rows_of_split"] == 12
    assert "Evaluated: 5 of 12 rows of val" in evaluation.lines()[0]
    for wrong in (tmp_path / "a.json", tmp_path):
        with pytest.raises(ConfigError, match="has to name a JSONL"):
            evaluate_run(lora, out=wrong)


def test_rows_of_a_file_are_read_as_the_run_read_its_own_and_what_was_trained_on_is_named(lora, tmp_path):
    pairs = ({"prompt": f"is it {n}?", "completion": "yes"} for n in range(6))
    other = write_rows(tmp_path / "other.jsonl", pairs)
    fresh = evaluate_run(lora, data=str(other), metrics=["none"], out=tmp_path / "x.jsonl")
    assert (fresh.rows.rows_trained_on, fresh.rows.split_size) == (0, 6)
    own = str(lora.folder.path.parent / "run.jsonl")
    seen = evaluate_run(lora, data=own, metrics=["none"], out=tmp_path / "x.jsonl")
    assert (seen.rows.rows_trained_on, seen.rows.split_size) == (12, 24)  # the other twelve were held out
    assert "Warning: 12 of 24 rows were trained on" in "\n".join(seen.lines())
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    with pytest.raises(DataError, match="DATA: 1 of 1 row of "):
        evaluate_run(lora, data=str(tmp_path / "bad.jsonl"))


def test_a_file_can_be_read_where_the_training_data_is_gone(tmp_path, lora, caplog):
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", Path(lora.config.model.name))))
    rows = tmp_path / "rows.jsonl"
    (tmp_path / "run.jsonl").rename(rows)
    with pytest.raises(DataError, match=r"run\.jsonl"):
        evaluate_run(run)
    evaluation = evaluate_run(run, data=str(rows), metrics=["none"])
    assert (evaluation.rows.rows_trained_on, evaluation.rows.split_size) == (None, 24)
    assert "whether rows of DATA= were trained on is not known" in caplog.text


def changed_run(folder: Path, base: str, change: Any) -> FinishedRun:
    run = finished_run(folder / "run", Path(base))
    resolved = json.loads((run / "resolved.json").read_text())
    change(resolved)
    (run / "resolved.json").write_text(json.dumps(resolved))
    return find_finished_run(folder, "run")


def test_training_rows_are_never_evaluated_silently(tmp_path, lora):
    run = changed_run(tmp_path, lora.config.model.name, lambda resolved: resolved["data"].update(val_fraction=0.0))
    with pytest.raises(DataError, match="DATA=FILE"):
        evaluate_run(run)
    for split, data, message in (("train", None, "training rows are not"), ("val", "x", "leave it out with DATA=")):
        with pytest.raises(ConfigError, match=message):
            require_split(split, data)
    with pytest.raises(DataError, match="has no test rows, only val"):
        evaluate_run(lora, split="test")
    assert not (run.folder.path / "eval.json").exists()


def test_plain_text_has_loss_figures_only(tmp_path, lora):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the light in the kitchen is on at {n}. " * 8 for n in range(40)))

    def to_text(resolved: dict[str, Any]) -> None:
        resolved["task_mode"] = "cpt"
        resolved["data"] |= {"train_path": str(text), "val_fraction": 0.3}

    run = changed_run(tmp_path, lora.config.model.name, to_text)
    assert [figure.name for figure in evaluate_run(run).comparisons] == ["loss", "token_accuracy"]
    assert "kitchen" in lines_of(run.folder.path / "eval.jsonl")[0]["text"]
    with pytest.raises(ConfigError, match="no row of val ends with an answer"):
        evaluate_run(run, metrics=["exact_match"])


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_one_whole_model_is_in_memory_at_a_time(tmp_path, tiny_llama, monkeypatch, mode):
    run = find_finished_run(tmp_path, str(finished_run(tmp_path / "run", tiny_llama, mode=mode)))
    models: list[weakref.ref[Any]] = []

    def counted(name: str) -> Any:
        real = getattr(respond, name)

        def loaded(*arguments: Any, **options: Any) -> Any:
            assert [model() for model in models] == [None] * len(models)
            model = real(*arguments, **options)
            models.append(weakref.ref(model))
            return model

        return loaded

    for name in ("load_model", "load_model_folder"):
        monkeypatch.setattr(respond, name, counted(name))
    seen = respond.measure_both_models(run, lambda whose, model: (whose, next(model.parameters()).shape))
    assert [whose for whose, _ in seen] == ["base", "trained model"]
    assert len(models) == (1 if mode == "lora" else 2)


# Metrics.
def longest_common(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence, by the textbook's table."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, first in enumerate(one):
        for j, second in enumerate(other):
            table[i + 1][j + 1] = table[i][j] + 1 if first == second else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence_of_words():
    pytest.importorskip("rapidfuzz")
    draw = random.Random(5)
    for _ in range(100):
        one, other = ([draw.choice("abcde") for _ in range(draw.randint(1, 12))] for _ in range(2))
        common = longest_common(one, other)
        precision, recall = common / len(one), common / len(other)
        expected = 2 * precision * recall / (precision + recall) if common else 0.0
        assert rouge_l(" ".join(one), " ".join(other)) == pytest.approx(expected)
    assert [rouge_l(*texts) for texts in (("...", "..."), ("...", "!"), ("", "a word"))] == [1.0, 0.0, 0.0]


def test_words_of_ascii_are_runs_of_letters_and_digits_and_other_scripts_have_theirs():
    draw = random.Random(6)
    for _ in range(200):
        text = "".join(draw.choice(string.printable) for _ in range(40))
        # rouge-score, tokenize.py, no stemmer
        assert split_words(text) == re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    assert split_words("Größe ÄRGER 今日は cat") == ["grösse", "ärger", "今", "日", "は", "cat"]
    assert split_words("हिन्दी में") == ["हिन्दी", "में"]


def test_exact_match_and_chrf_are_those_of_training_and_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    match, chrf = select_metrics(["exact_match", "chrf"])
    assert [match.score(answer, "it is 4.", ()) for answer in (" it is 4.\n", "It is 4.")] == [1.0, 0.0]
    wanted = sacrebleu.sentence_chrf("it is 5.", ["it is 4."]).score
    assert chrf.score("it is 5.", "it is 4.", ()) == pytest.approx(wanted)


def test_a_function_of_the_user_s_own_gets_answer_reference_and_messages(lora, tmp_path, monkeypatch):
    (tmp_path / "own_metric.py").write_text(
        "SEEN = []\n"
        "def length(answer, reference, messages):\n"
        "    SEEN.append((answer, reference, messages))\n"
        "    return len(answer)\n"
        "def broken(answer, reference, messages):\n"
        "    if reference == 'it is 10.':\n        raise KeyError('ten')\n    return True\n"
        "def no_number(answer, reference, messages):\n    return float('nan')\n"
        "VALUE = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = tmp_path / "x.jsonl"
    evaluation = evaluate_run(lora, metrics=["own_metric:length"], max_new_tokens=3, out=out)
    rows = lines_of(out)
    assert all(row["tuned"]["own_metric:length"] == len(row["tuned"]["answer"]) for row in rows)
    seen = sys.modules["own_metric"].SEEN
    assert (rows[3]["tuned"]["answer"], rows[3]["reference"], rows[3]["prompt"]) in seen
    assert evaluation.comparisons[-1].name == "own_metric:length"
    number = next(row["row"] for row in rows if row["reference"] == "it is 10.")
    with pytest.raises(ConfigError, match=rf"row {number} of val: own_metric:broken failed: KeyError: 'ten'"):
        evaluate_run(lora, metrics=["own_metric:broken"], max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"row 1 of val.*not a finite number"):
        evaluate_run(lora, metrics=["own_metric:no_number"])
    wrong = {"own_metric:VALUE": "not a function", "own_metric:absent": "AttributeError", "absent_module:f": "NotFound"}
    for name, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            select_metrics([name])


def test_without_the_packages_the_rest_is_measured(monkeypatch, caplog):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else there(name))
    caplog.set_level("INFO")
    assert "chrf" not in [metric.name for metric in select_metrics([])]
    assert "pip install 'sft-play[eval]'" in caplog.text
    assert select_metrics(["none"]) == []
    for names, message in (
        (["chrf"], r"needs the package sacrebleu: \S*pip install 'sft-play\[eval\]'"),
        (["rougel"], "did you mean rouge_l"),
        (["none", "chrf"], "excludes other metrics"),
    ):
        with pytest.raises(ConfigError, match=message):
            select_metrics(names)


# Verdicts, memory.
def test_a_figure_is_better_only_where_its_whole_interval_is():
    for low, high, of_share, of_loss in (
        (1.0, 2.0, "better", "worse"), (-2.0, -1.0, "worse", "better"), (0.0, 0.0, "same", "same"),
        (0.0, 1.0, "not sure", "not sure"), (-1.0, 0.0, "not sure", "not sure"), (-1.0, 1.0, "not sure", "not sure"),
    ):  # fmt: skip
        interval = Interval((low + high) / 2, low, high, 0.95)
        for is_loss, verdict in ((False, of_share), (True, of_loss)):
            assert MetricComparison("x", 0.0, 0.0, interval, is_loss=is_loss).verdict == verdict


def test_where_memory_runs_out_answers_are_made_in_smaller_batches(lora, monkeypatch, tmp_path):
    whole, seen = respond.generate_answers, []

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def small(model, tokenizer, asked, *, try_batch, **options):
        def try_small_batch(compute, rows):
            seen.append(rows)
            return try_batch(compute if rows <= 2 else out_of_memory, rows)

        return whole(model, tokenizer, asked, try_batch=try_small_batch, **options)

    def answers():
        evaluate_run(lora, metrics=["exact_match"], max_new_tokens=3, out=tmp_path / "x.jsonl")
        return [row["tuned"]["answer"] for row in lines_of(tmp_path / "x.jsonl")]

    answered = answers()
    monkeypatch.setattr(respond, "generate_answers", small)
    assert answers() == answered
    assert min(seen) <= 2 < max(seen)


# lm-evaluation-harness.
@pytest.fixture
def harness(monkeypatch):
    """A module in the harness's place that records what it is asked and knows the tasks sums and more_sums."""
    asked: list[dict[str, Any]] = []

    class TaskManager:
        def match_tasks(self, names):
            return [task for task in ("sums", "more_sums") if any(fnmatch.fnmatch(task, name) for name in names)]

    class HFLM:
        def __init__(self, **options):
            self.options = options
            options["pretrained"].tie_weights()  # as the harness does

    @torch.no_grad()
    def simple_evaluate(*, model, tasks, **options):
        asked.append({"model": model.options, "tasks": tasks, **options})
        ids = torch.tensor([[5, 6, 7]])
        value = float(model.options["pretrained"](input_ids=ids).logits.float().sum())
        results = {"acc,none": value, "acc_stderr,none": 0.1, "alias": "sums", "f1,none": 0.5, "f1_stderr,none": "N/A"}
        return {"results": dict.fromkeys(tasks, results)}

    spec = importlib.machinery.ModuleSpec("lm_eval", None)
    modules = {"lm_eval": {"simple_evaluate": simple_evaluate, "__spec__": spec}, "lm_eval.models": {}}
    modules |= {"lm_eval.tasks": {"TaskManager": TaskManager}, "lm_eval.models.huggingface": {"HFLM": HFLM}}
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def test_tasks_are_given_to_the_harness_for_base_and_trained_model(lora, harness, tmp_path, monkeypatch):
    out = tmp_path / "x.jsonl"
    evaluation = evaluate_run(lora, metrics=["none"], tasks=["*sums"], limit=10, out=out)
    base, tuned = harness
    for one in (base, tuned):
        assert (one["tasks"], one["limit"], one["apply_chat_template"]) == (["sums", "more_sums"], 10, True)
        assert type(one["model"]["pretrained"]).__name__ == "LlamaForCausalLM"
        assert one["model"]["tokenizer"].chat_template
        assert (one["model"]["batch_size"], one["model"]["mixed_precision_dtype"]) == (lora.plan().eval_batch, None)
    both = [(task, metric) for task in ("sums", "more_sums") for metric in ("acc,none", "f1,none")]
    assert [(one.task, one.metric) for one in evaluation.tasks] == both
    accuracy, f1 = evaluation.tasks[:2]
    assert accuracy.base != accuracy.tuned  # the adapter was off for the first
    assert (accuracy.stderr, f1.stderr) == (0.1, None)
    with pytest.raises(ConfigError, match="TASKS=gsm8k: lm-evaluation-harness has no such task"):
        evaluate_run(lora, tasks=["gsm8k", "sums"])
    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", None)
    with pytest.raises(ConfigError, match="lm-evaluation-harness failed: TypeError"):
        evaluate_run(lora, metrics=["none"], tasks=["sums"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sft-play\[tasks\]'"):
        evaluate_run(lora, tasks=["sums"])
