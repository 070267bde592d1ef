"""What generated answers are compared with: what training teaches to write behind the very prompt that they are given.

The second rule is transformers' own: the conversation as `apply_chat_template` renders it, behind what it has in common
with the prompt, through the first token that ends an answer. A model is pretended that writes exactly that.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from sft_play.config.schema import DataConfig
from sft_play.data.masks.fitted_template import control_tokens
from sft_play.data.masks.render import Renderer
from sft_play.data.sources.formats import Chat
from sft_play.errors import TokenizerError
from sft_play.finished.evaluation import evaluate_run
from sft_play.finished.report import compare_results, read_record
from sft_play.finished.run import find_finished_run
from sft_play.runs.folder import RunFolder
from sft_play.training.measure import exact_match
from sft_play.training.measure.exact_match import build_questions, collect_stop_ids, generate_answers
from tests.bundled import template_of
from tests.conftest import chat, shared, write_rows, write_run
from tests.models import CHATML, make_llama, make_tokenizer
from tests.test_masks import forms
from tests.test_recorded_data import TOOLS

pytestmark = pytest.mark.build

CALL = {"type": "function", "id": "Ab3dE6gH9", "function": {"name": "look", "arguments": {"place": "Rottmoor"}}}
QUESTION = {"role": "user", "content": "Where is it?"}


def asked_and(content: str, **more: Any) -> list[dict[str, Any]]:
    return [QUESTION, {"role": "assistant", "content": content, **more}]


PLAIN = asked_and("There.")
THOUGHT = asked_and("There.", reasoning_content="They ask me.")
OWN_THOUGHT = asked_and("<think>\nThey ask me.\n</think>\n\nThere.")
CASES: dict[str, tuple[list[dict[str, Any]], tuple[Any, ...]]] = {
    "plain": (asked_and("In the kitchen."), ()), "spaced": (asked_and(" In the\n\nkitchen. "), ()),
    "system": ([{"role": "system", "content": "Be terse."}, *PLAIN], ()), "reasoning": (THOUGHT, ()),
    "think": (OWN_THOUGHT, ()), "call": (asked_and("", tool_calls=[CALL]), TOOLS),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """Tokenizers that know the tokens which end the answers of a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)

    def made(template: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        ends = renderer_of(tokenizer, on_missing_end="train").turn_locator().ends
        tokenizer.add_tokens(sorted(ends.end_tokens - set(tokenizer.get_vocab())), special_tokens=True)
        if last := control_tokens(ends.end_of_turn, ()):
            tokenizer.eos_token = last[-1]
        return tokenizer

    return made


def renderer_of(tokenizer: Any, **data: Any) -> Renderer:
    return Renderer(tokenizer, DataConfig(**data), max_seq_len=1 << 30)


def conversation(messages: Any, tools: Any = ()) -> Chat:
    return Chat("f:1", tuple(messages), tuple(tools))


def behind_the_prompt(tokenizer: Any, one: Chat) -> Iterator[str]:
    """What transformers renders of the last turn behind what prompt and whole conversation share, no token cut in two;
    in each form (arguments as text, content in parts) that the template takes."""
    for messages in forms(one.messages):
        options = {"tools": list(one.tools) or None, "tokenize": False}
        try:
            whole = tokenizer.apply_chat_template(messages, **options)
            prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        except Exception:  # whatever a template raises: it takes another form
            continue
        pairs = enumerate(zip(whole, prompt, strict=False))
        size = next((at for at, (mine, theirs) in pairs if mine != theirs), len(prompt))
        if ">" not in whole[:size].rpartition("<")[2] and "<" in whole[:size]:
            size = whole.rfind("<", 0, size)
        yield whole[size:]


def answered(monkeypatch: Any, tokenizer: Any, asked: Any, texts: list[str], stop: Any) -> list[bool]:
    """Whether answers of a model that writes these texts are right, each up to the token that ends it."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ends = [next((at + 1 for at, one in enumerate(row) if one in set(stop)), len(row)) for row in ids]
    made = {tuple(one.prompt_ids): tuple(row[:end]) for one, row, end in zip(asked, ids, ends, strict=True)}

    def generate(_: Any, __: Any, questions: Any, *___: Any) -> Any:
        return [made[tuple(question.prompt_ids)] for question in questions]

    monkeypatch.setattr(exact_match, "_generate", generate)
    model: Any = SimpleNamespace(training=False, eval=lambda: None, train=lambda _: None)
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)
    given = generate_answers(model, tokenizer, asked, stop_ids=stop, max_new_tokens=99, max_tokens=9999)
    return [one.is_correct for one in given]


def check(template: str, tokenizer_of: Any, monkeypatch: Any) -> int:
    """How many cases the template renders as rows, each of which was compared."""
    try:
        tokenizer = tokenizer_of(template)
    except TokenizerError:
        return 0
    renderer, checked = renderer_of(tokenizer), 0
    stop = collect_stop_ids("sft", tokenizer, renderer, None)
    for name, (messages, tools) in CASES.items():
        one = conversation(messages, tools)
        [question] = build_questions([one], renderer, tokenizer)
        if question is None:  # no exact mask: nothing is trained, and nothing is asked
            continue
        reference, rendered = question.reference.strip(), [*behind_the_prompt(tokenizer, one)]
        behind = next((text for text in rendered if text.strip().startswith(reference)), "")
        assert behind, (name, rendered, reference)
        # the words of the answer are in it, with what the template makes the model write around them
        assert messages[-1]["content"].rpartition("\n")[2].strip() in reference or tools, (name, reference)
        assert not tools or "Rottmoor" in reference, (name, reference)
        assert answered(monkeypatch, tokenizer, [question], [behind], stop) == [True], (name, behind, reference)
        for wrong in (behind.replace("e", "a", 1), f"x{behind}", "", reference[:-1]):
            if wrong.strip() != behind.strip():
                assert answered(monkeypatch, tokenizer, [question], [wrong], stop) == [False], (name, wrong)
        content = messages[-1]["content"].strip()
        if content != reference:  # the answer alone is not what was trained
            assert answered(monkeypatch, tokenizer, [question], [content], stop) == [False], name
        checked += 1
    return checked


FAMILIES = (
    *("deepseek_r1_distill", "deepseekv3", "gemma4", "glm4moe", "gptoss", "llama3_1", "qwen3", "qwen3_5_think"),
    "lfm2",
)


@pytest.mark.parametrize("name", [*(f"trl/{family}" for family in FAMILIES), "bundled/tools", "bundled/bars"])
def test_a_model_that_writes_what_was_trained_is_right_and_no_other(name, tokenizer_of, monkeypatch):
    assert check(template_of(name), tokenizer_of, monkeypatch) >= 3


@pytest.mark.slow
def test_so_it_is_for_every_shared_template(tokenizer_of, monkeypatch):
    files = sorted(shared("chat_templates").glob("*/*.jinja"))
    checked = [check(file.read_text(encoding="utf-8"), tokenizer_of, monkeypatch) for file in files]
    assert len(files) > 100
    assert sum(checked) > 3 * len(files)


@pytest.mark.parametrize(("template", "messages", "reference"), [
    # the prompt ends behind `assistant\n`, so the block is the model's to write
    ("trl/qwen3", PLAIN, "<think>\n\n</think>\n\nThere."),
    ("trl/qwen3", THOUGHT, "<think>\nThey ask me.\n</think>\n\nThere."),
    # the prompt opens the block
    ("trl/qwen3_5_think", THOUGHT, "They ask me.\n</think>\n\nThere."),
    ("trl/nemotron_3_nano", THOUGHT, "They ask me.\n</think>\nThere."),
    # the prompt opens a block, and the template takes the answer's away: the answer is trained without it
    ("trl/deepseek_r1_distill", OWN_THOUGHT, "There."),
    # no block is written, and none is expected
    ("trl/qwen3_instruct_2507", PLAIN, "There."),
    # the template strips white space
    ("trl/gemma3", asked_and("  There. \n"), "There."), ("trl/gptoss", PLAIN, "<|channel|>final<|message|>There."),
])  # fmt: skip
def test_the_reference_is_what_the_template_leaves_to_the_model(template, messages, reference, tokenizer_of):
    tokenizer = tokenizer_of(template_of(template))
    [question] = build_questions([conversation(messages)], renderer_of(tokenizer), tokenizer)
    assert question.reference.strip() == reference


def test_what_the_prompt_has_closed_is_not_asked_for_again(tokenizer_of):
    """DeepSeek-V3.2 asks behind `<think></think>`, and writes an answer behind `</think>` alone."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '</think>' if m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    renderer = renderer_of(tokenizer)
    assert renderer.render(conversation(PLAIN)).text.endswith("</think>There.<|im_end|>")
    [question] = build_questions([conversation(PLAIN)], renderer, tokenizer)
    assert (tokenizer.decode(question.prompt_ids)[-15:], question.reference) == ("<think></think>", "There.")


def test_options_that_change_what_is_trained_change_what_is_compared(tokenizer_of):
    tokenizer = tokenizer_of(template_of("trl/qwen3"))
    [usual] = build_questions([conversation(PLAIN)], renderer_of(tokenizer), tokenizer)
    # the block is not trained, so it is given: only behind it the answer was learned
    [given] = build_questions([conversation(PLAIN)], renderer_of(tokenizer, loss_on_empty_think=False), tokenizer)
    block = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(given.prompt_ids) == tokenizer.decode(usual.prompt_ids) + block
    assert (usual.reference, given.reference) == (f"{block}There.", "There.")
    # a prompt that closes the block
    closed = renderer_of(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert build_questions([conversation(PLAIN)], closed, tokenizer)[0].reference == "There."
    turns = [*THOUGHT, *asked_and("Gone.")]
    for options in ({"loss_on": "completion"}, {"loss_on": "all"}, {"multi_turn": "split"}):
        renderer = renderer_of(tokenizer, **options)
        asked = build_questions(renderer.split_turns(conversation(turns)), renderer, tokenizer)
        assert asked[-1].reference == f"{block}Gone.", options
        assert asked[0].reference.endswith("There." if "multi_turn" in options else "Gone.")


def test_what_is_not_trained_is_not_asked_for(tokenizer_of):
    tokenizer = tokenizer_of(CHATML)
    asked = ([*PLAIN, *asked_and("There.", train=False)], asked_and(""), [*PLAIN, QUESTION])
    assert build_questions(map(conversation, asked), renderer_of(tokenizer), tokenizer) == [None] * 3
    # a cut row is compared with its whole answer
    renderer = Renderer(tokenizer, DataConfig(), max_seq_len=60)
    long = conversation(asked_and("the light in the kitchen is on " * 9))
    assert renderer(long).cut_tokens > 0
    assert build_questions([long], renderer, tokenizer)[0].reference.strip() == long.messages[-1]["content"].strip()
    short = Renderer(tokenizer, DataConfig(), max_seq_len=10)
    assert build_questions([long], short, tokenizer) == [None]  # no room behind the prompt


# A whole run.
def test_figures_of_a_run_are_those_of_what_was_trained(tmp_path, succeed, monkeypatch):
    """A model that writes the template's empty think block and then the answer, as trained, is right everywhere."""
    base = make_llama(tmp_path / "base", template=template_of("trl/qwen3"), max_position_embeddings=256)
    rows = [chat(f"what is {n} + {n}?", f"it is {2 * n}.") for n in range(48)]
    asked = {"model": {"max_seq_len": 96}, "eval": {"steps": 1, "generate_rows": 3, "max_new_tokens": 32}}
    asked |= {"data": {"val_fraction": 0.3}, "train": {"metric_for_best_model": "exact_match"}}
    config = write_run(tmp_path, base, write_rows(tmp_path / "rows.jsonl", rows), output={"name": "one"}, **asked)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    end, written = tokenizer.convert_tokens_to_ids("<|im_end|>"), {}
    for row, text in zip(rows, rendered, strict=True):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
        answer = tokenizer(text[len(prompt) :])["input_ids"]
        written[tuple(tokenizer(prompt)["input_ids"])] = tuple(answer[: answer.index(end) + 1])

    def generate(_: Any, __: Any, questions: Any, *___: Any) -> Any:
        return [written[tuple(question.prompt_ids)] for question in questions]

    monkeypatch.setattr(exact_match, "_generate", generate)
    printed = succeed("train", "--config", str(config))
    folder = tmp_path / "outputs" / "one"
    summary = json.loads((folder / "summary.json").read_text())
    held_out = summary["after"]["rows"]
    assert held_out > 3
    for when in ("before", "after"):
        assert (summary[when]["exact_match"], summary[when]["generated_rows"]) == (1.0, 3)
    assert f"exact match of 3 answers (val, {held_out} rows): 100.0% before, 100.0% after" in printed
    assert [one["generated_rows"] for one in summary["evaluations"]] == [3] * len(summary["evaluations"])
    sample = summary["samples"][0]
    assert (sample["right"], sample["expected"].startswith("<think>\n\n</think>\n\nit is ")) == (True, True)
    assert "| exact match of 3 answers | 100.0% | 100.0% |" in (folder / "adapter" / "README.md").read_text()
    compared = compare_results([read_record(RunFolder(folder))])
    assert compared["generated_rows_after"] == compared["val_generated_rows"] == (3,)
    evaluated = evaluate_run(find_finished_run(tmp_path / "outputs", "one"), metrics=["exact_match", "chrf"])
    assert sorted(one.tuned for one in evaluated.comparisons if one.name in ("exact_match", "chrf")) == [1.0, 100.0]
