"""Where turns end: two end tokens, ends that the next turn opens, no end at all, headers before a first answer; and the
judge of `make mask-score`, held against masks that are wrong on purpose."""

import ast
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.mask_score import exact
from benchmarks.mask_score.score import CASES, score
from sft_play.config.schema import DataConfig
from sft_play.data.masks.render import NO_END_TOKEN, Renderer
from sft_play.data.masks.template import ChatTemplate
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.formats import Chat
from sft_play.data.sources.raw import BadRow
from tests.conftest import write_run
from tests.models import CHATML, make_tokenizer
from tests.test_masks import DONE, EACH, TOOLS, answer, call, tool, trained_texts, user

TOKENS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|end_text|>", "<|end_turn|>", "<|end|>", "<|return|>"]


def asks(header: str) -> str:
    return "{% if add_generation_prompt %}" + header + "{% endif %}"


TWO_ENDS = EACH + "<|{{ m.role }}|>{{ m.content }}<|end_text|><|end_turn|>" + DONE + asks("<|assistant|>")
REASONS = (
    EACH + "<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end_text|>{% if m.role == 'assistant' %}<|end_turn|>{% endif %}" + DONE + asks("<|assistant|>")
)
"""The end of a question is the first of the two that end an answer."""
OPENED = (
    EACH + "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
    "<arg>{{ c.function.arguments.values()|list|join('</arg><arg>') }}</arg>"
    "</tool_call>{% endfor %}" + DONE + asks("<|assistant|>")
)  # fmt: skip
"""As GLM: no turn is closed."""
BETWEEN = (
    "{% set ns = namespace(open=false) %}" + EACH + "{% if ns.open %}<|end|>{% endif %}{% set ns.open = m.role == "
    "'assistant' %}<|{{ m.role }}|>{{ m.content }}" + DONE + "{% if ns.open and add_generation_prompt %}<|end|>"
    "{% endif %}" + asks("<|assistant|>")
)
"""As Apertus: an answer is closed when a question follows."""
RETURNS = (
    EACH + "<|{{ m.role }}|>{{ m.content }}{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}"
    + DONE + asks("<|assistant|>")
)  # fmt: skip
"""As gpt-oss: the last answer has an end of its own."""
NOTHING = EACH + "{{ m.role|upper }}: {{ m.content }}\n" + DONE + asks("ASSISTANT: ")
ASKED_ONLY = (
    EACH
    + "{{ m.role }}<|user|>{{ m.content }}<|end|>{% if loop.last and add_generation_prompt and m.role != 'assistant'"
    " %}assistant<|user|>{% endif %}" + DONE
)
"""As GigaChat: a prompt stands behind a message only."""
FIRST_READ = "{{ messages[0].role[:0] }}" + CHATML
"""As granite and Qwen3: without a first message it fails."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(made, template=None)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def make(tokenizer):
    parts = TokenizerParts.from_tokenizer(tokenizer)

    def made(template: str, **data: Any) -> Renderer:
        return Renderer(parts.replace_template(template), DataConfig(**data), max_seq_len=1 << 30)

    return made


RESULT = tool("rain")
TWO = (user("one"), answer("two"), user("three"), answer("four"))


# The end is what stands behind a turn whatever follows.
@pytest.mark.parametrize(("template", "ends", "added"), [
    (TWO_ENDS, ["<|end_text|><|end_turn|>"] * 2, ""), (RETURNS, ["<|end|>", "<|return|>"], ""),
    (BETWEEN, ["<|end|>"] * 2, "<|end|>"),  # written between turns only, it is added behind the last
])  # fmt: skip
def test_an_answer_is_trained_through_its_own_end(make, template, ends, added):
    row = make(template).render(Chat("f:1", TWO))
    assert (trained_texts(row), row.added_end) == ([f"two{ends[0]}", f"four{ends[1]}"], added)


def test_an_end_that_questions_have_too_does_not_hide_the_one_behind_it(make):
    thought = (user("one"), answer("two", reasoning_content="hm"), user("three"), answer("four"))
    for messages in (TWO, thought):
        texts = [text.split("</think>")[-1] for text in trained_texts(make(REASONS).render(Chat("f:1", messages)))]
        assert texts == ["two<|end_text|><|end_turn|>", "four<|end_text|><|end_turn|>"]


# Where no turn is closed, the token that opens the next one ends it.
def test_the_token_that_opens_the_next_turn_ends_one_that_is_not_closed(make, tokenizer):
    row = make(OPENED).render(Chat("f:1", TWO))
    assert trained_texts(row) == ["\ntwo<|user|>", "\nfour<|user|>"]
    assert (row.method, row.added_end) == ("next_turn", "<|user|>")
    own = tokenizer.apply_chat_template(list(TWO), chat_template=OPENED, tokenize=False)
    assert row.text == own + "<|user|>"
    assert row.labels[-1] == row.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|user|>")


def test_behind_calls_it_is_the_token_that_opens_the_result(make):
    calls = answer("", tool_calls=[call(place="here")])
    row = make(OPENED).render(Chat("f:1", (user("one"), calls, RESULT, answer("wet")), TOOLS))
    called = "\n<tool_call>look<arg>here</arg></tool_call><|observation|>"
    assert trained_texts(row) == [called, "\nwet<|user|>"]
    row = make(OPENED).render(Chat("f:2", (user("one"), calls), TOOLS))
    assert (trained_texts(row), row.added_end) == ([called], "<|observation|>")
    # nothing is added behind a question, and no answer is ended by the header of another one
    row = make(OPENED).render(Chat("f:3", TWO[:3]))
    assert (trained_texts(row), row.added_end) == (["\ntwo<|user|>"], "")
    row = make(OPENED).render(Chat("f:4", (user("one"), answer("two"), answer("three"))))
    assert (trained_texts(row), row.untrained_turns) == (["\nthree<|user|>"], 1)
    # special tokens in texts stay text beside an added end
    row = make(OPENED).render(Chat("f:1", (user("<|user|>"), answer("say <|user|>"))))
    ids = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label != -100]
    assert trained_texts(row) == ["\nsay <|user|><|user|>"]
    assert ids.count(ids[-1]) == 1


def test_glm_is_trained_as_trls_training_template_trains_it(make, tokenizer):
    import trl

    templates = Path(trl.__file__).parent / "chat_templates"
    own, theirs = ((templates / f"glm4moe{name}.jinja").read_text(encoding="utf-8") for name in ("", "_training"))
    calls = answer("", tool_calls=[call(place="here")])
    called = (user("one"), calls, RESULT, answer("wet"))
    for messages, tools in ((TWO, ()), (called, TOOLS), (called[:2], TOOLS)):
        rows = [make(text, on_missing_end="train").render(Chat("f:1", messages, tools)) for text in (own, theirs)]
        assert rows[0].text == rows[1].text.rstrip("\n")
        assert trained_texts(rows[0]) == trained_texts(rows[1])


# No end at all.
def test_answers_that_would_never_end_are_bad_rows_until_told(make):
    row = make(NOTHING).render(Chat("f:1", TWO))
    assert row.reason == NO_END_TOKEN
    assert "data.on_missing_end=train" in row.detail
    assert trained_texts(make(NOTHING, on_missing_end="train").render(Chat("f:1", TWO))) == ["two\n", "four\n"]
    # an end that is no token of the tokenizer ends nothing
    words = EACH + "<|{{ m.role }}|>{{ m.content }}<|fin|>\n" + DONE + asks("<|assistant|>")
    assert "<|fin|>" in make(words).render(Chat("f:1", TWO)).detail
    assert trained_texts(make(words, on_missing_end="train").render(Chat("f:1", TWO))) == ["two<|fin|>", "four<|fin|>"]
    assert isinstance(make(words, loss_on="all").render(Chat("f:1", TWO)), BadRow)


def test_check_and_train_agree_that_such_a_run_stops(tiny_llama, sums, tmp_path, command, succeed):
    (tmp_path / "t.jinja").write_text(NOTHING)
    config = str(write_run(tmp_path, tiny_llama, sums, data={"chat_template": f"{tmp_path}/t.jinja"}))
    for name in ("check", "train"):
        code, said = command(name, "--config", config)
        assert (code, NO_END_TOKEN in said, "data.on_missing_end=train" in said) == (2, True, True)
    assert "Ready to train" in succeed("check", "--config", config, "data.on_missing_end=train")


# A turn that nobody asked for begins where it would behind a question.
@pytest.mark.parametrize("template", [ASKED_ONLY, FIRST_READ, CHATML])
def test_the_header_of_a_leading_answer_is_not_trained(make, template):
    first = (answer("hello"), *TWO)
    row = make(template).render(Chat("f:1", first))
    assert [text.split("<")[0] for text in trained_texts(row)] == ["hello", "two", "four"]
    row = make(template).render(Chat("f:2", (user("one"), answer("two"), answer("three"))))
    assert [text.split("<")[0] for text in trained_texts(row)] == ["two", "three"]


# Think text.
QWEN = (
    EACH + "<|im_start|>{{ m.role }}\n{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set thought = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}<think>{{ thought }}</think>\n\n{% endif %}{{ c }}{% else %}{{ c }}{% endif %}<|im_end|>\n"
    + DONE + asks("<|im_start|>assistant\n")
)  # fmt: skip


def test_think_text_of_the_history_is_counted_and_text_outside_of_its_marks_is_no_thought(make):
    for text in ("<think>a</think>b", "a</think>b", "<think>\na\n</think>\n\nb"):
        row = make(QWEN).render(Chat("f:1", (user("q"), answer(text), user("r"), answer("s"))))
        assert row.stripped_think_pieces == 1
    for text in ("<think>a</think>b</think>c", "a<think>b</think>c", "<think>a</think>b<think>c</think>d"):
        for messages in ((user("q"), answer(text)), (user("q"), answer(text), user("r"), answer("s"))):
            reason = make(QWEN).render(Chat("f:1", messages)).reason
            assert reason == "the chat template drops an assistant's text"


# The judge.
def test_the_judge_knows_nothing_of_how_masks_are_found():
    tree = ast.parse(Path(exact.__file__).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {name for name in names if name and name.startswith("sft_play")}
    assert own == {"sft_play.data.masks.sandbox", "sft_play.data.masks.template", "sft_play.log"}


MULTI = next(case for case in CASES if case.name == "multi_turn")
ANSWERS = [message["content"] for message in MULTI.messages if message["role"] == "assistant"]
JUDGED = {
    "chatml": (CHATML, "<|im_start|>assistant\n", ["<|im_end|>"] * 3, "\n<|im_start|>"),
    "two ends": (TWO_ENDS, "<|assistant|>", ["<|end_text|><|end_turn|>"] * 3, "<|user|>"),
    "first of two ends a question": (REASONS, "<|assistant|>", ["<|end_text|><|end_turn|>"] * 3, "<|user|>"),
    "opened": (OPENED, "<|assistant|>", ["<|user|>"] * 3, "\n"),
    "between": (BETWEEN, "<|assistant|>", ["<|end|>"] * 3, "<|user|>"),
    "returns": (RETURNS, "<|assistant|>", ["<|end|>", "<|end|>", "<|return|>"], "<|user|>"),
}
"""Template, header of an answer, the right end of each answer, and what follows that end in the history."""


def judged(tokenizer, name: str, change: Any) -> str:
    """The judge's word on a template's right spans after a change: (answer's start, its end, its number) -> span."""
    template, header, ends, _ = JUDGED[name]
    tokenizer.chat_template = template
    limited = ChatTemplate(template, variables={}, today=date(2026, 1, 1))
    renderings = exact.Renderings(MULTI, tokenizer, limited)
    text = next(iter(renderings.written))
    added = "" if text.rstrip().endswith(ends[-1]) else ends[-1]
    text += added
    spans = []
    for number, (said, end) in enumerate(zip(ANSWERS, ends, strict=True)):
        start = text.index(header + ("\n" if name == "opened" else "") + said) + len(header)
        until = text.index(said + end) + len(said + end)
        spans.append(change(start, until, number))
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(first <= a and b <= last for first, last in spans) for a, b in encoding["offset_mapping"]]
    ids = encoding["input_ids"]
    labels = [token if trained else -100 for token, trained in zip(ids, inside, strict=True)]
    return exact.find_mask_problem(MULTI, exact.JudgedMask(text, ids, labels), renderings, tokenizer)


def bend(kind: str, name: str, which: int) -> Any:
    _, header, ends, behind = JUDGED[name]
    last = "<" + ends[which].rsplit("<", 1)[1]

    def change(start: int, end: int, number: int) -> tuple[int, int]:
        if number != which:
            return start, end
        return {
            "earlier end": (start, end - len(last)), "no end": (start, end - len(ends[which])),
            "through the next header": (start, end + len(behind) + (len("user\n") if name == "chatml" else 0)),
            "with its header": (start - len(header), end), "without its first letters": (start + 12, end),
            "without its last words": (start, end - len(ends[which]) - 3),
        }[kind]  # fmt: skip

    return change


@pytest.mark.parametrize("name", JUDGED)
def test_the_judge_takes_the_right_mask_and_finds_every_kind_of_wrong_one(tokenizer, name):
    assert judged(tokenizer, name, lambda start, end, number: (start, end)) == ""
    kinds = ("earlier end", "no end", "with its header", "without its first letters", "without its last words")
    wrong = [(kind, which) for kind in kinds for which in range(3)]
    for kind, which in (*wrong, ("through the next header", 0), ("through the next header", 1)):
        assert judged(tokenizer, name, bend(kind, name, which)), (kind, which)


def test_the_judge_misses_no_turn_and_takes_no_other_text(tokenizer):
    assert "2 of 3 turns" in judged(tokenizer, "chatml", lambda start, end, n: (start, start if n == 1 else end))
    for change in (lambda a, b, n: (0, b), lambda a, b, n: (a, b + 1), lambda a, b, n: (a - 60, b)):
        assert judged(tokenizer, "chatml", change)


def test_masks_of_these_templates_are_exact_on_every_case_and_an_endless_one_is_refused(folder, tmp_path):
    found = {name: text for name, (text, *_) in JUDGED.items()}
    found |= {"asked only": ASKED_ONLY, "first read": FIRST_READ, "qwen": QWEN}
    for name, text in found.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    rows = score(tmp_path, str(folder)).rows
    assert [row for row in rows if row.verdict not in ("exact", "cannot_render")] == []
    assert sum(row.verdict == "exact" for row in rows) > 40
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "t.jinja").write_text(NOTHING)
    assert {row.verdict for row in score(tmp_path / "nothing", str(folder)).rows} == {"refused", "cannot_render"}
