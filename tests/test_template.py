"""Chat templates: rendered as transformers renders them, with limits, and watched for looks into texts; and the rules
of tokenizers, on real ones."""

import contextlib
import copy
import fcntl
import itertools
import json
import operator
import pickle
import shutil
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.mask_score.score import CASES
from sft_play.config.load import config_from_text
from sft_play.data.masks import sandbox
from sft_play.data.masks.sandbox import EndlessTemplateError, RenderError
from sft_play.data.masks.template import ChatTemplate, row_kind
from sft_play.errors import TokenizerError
from sft_play.training.prepare.tokenizer import load_tokenizer
from tests.bundled import template_of, there, tokenizer_folder
from tests.conftest import chat, shared, write_rows, write_run

DAY = date(2026, 3, 5)
CHAT = ({"role": "user", "content": "hello there"}, {"role": "assistant", "content": "fine"})


def template(source: str, **variables: Any) -> ChatTemplate:
    return ChatTemplate(source, variables=variables, today=DAY)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder("bundled/pad_is_eos"))


def by_transformers(tokenizer, messages: Any, tools: Any, *, prompt: bool) -> str | None:
    options = {"tools": list(tools) or None, "add_generation_prompt": prompt, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(copy.deepcopy(list(messages)), **options)
    except Exception:  # whatever a template raises
        return None


def same_on_all_cases(tokenizer, source: str) -> int:
    """How many renderings there are; all of them are those of transformers."""
    tokenizer.chat_template = source
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    made = ChatTemplate(source, variables=special, today=date.today())
    count = 0
    for case in CASES:
        for prompt in (False, True):
            wanted, ours = by_transformers(tokenizer, case.messages, case.tools, prompt=prompt), None
            with contextlib.suppress(RenderError):
                ours = made.render(case.messages, tools=case.tools, with_prompt=prompt)
            assert ours == wanted, case.name
            count += wanted is not None
    return count


FEW = (
    *(f"bundled/{name}" for name in ("tools", "history", "dated", "no_end", "generation", "calls")),
    *("llama.cpp/meta-llama-Llama-3.1-8B-Instruct", "llama.cpp/google-gemma-4-31B-it", "mistral-common/v13"),
    *("llama.cpp/deepseek-ai-DeepSeek-V3.1", "onnxruntime-extensions/gpt-oss", "trl/qwen3_training"),
)


@pytest.mark.parametrize("name", there(FEW))
def test_a_real_template_renders_as_transformers_renders_it(tokenizer, name):
    assert same_on_all_cases(tokenizer, template_of(name)) >= 8


@pytest.mark.slow
def test_every_shared_template_renders_as_transformers_renders_it(tokenizer):
    files = sorted(shared("chat_templates").glob("*/*.jinja"))
    assert len(files) == 134
    for file in files:
        same_on_all_cases(tokenizer, file.read_text(encoding="utf-8"))


def test_a_template_is_given_what_transformers_gives_it():
    made = template(
        "{{ strftime_now('%d %b %Y') }}{{ bos_token }}{% if enable_thinking %}think{% endif %}"
        "{% set t = 'a' %}{% for m in messages %}<{% generation %}{{ t }}{% set t = 'b' %}{{ m.reasoning_content }}"
        "{% endgeneration %}{{ t }}{{ m.thinking }}>{% endfor %}",
        bos_token="<s>",
        enable_thinking=True,
    )
    # what is set between the marks of a generation ends there; think text has every name that templates know
    assert made.render([{"role": "assistant", "content": "x", "reasoning": "why"}]) == "05 Mar 2026<s>think<awhyawhy>"


@pytest.mark.parametrize(("source", "message"), [
    ("{% for m in messages %}", "the chat template is not valid Jinja"), ("a\nb\n{{ nothing | closed", r"\(line 3\)"),
    ("{% nonsense %}", "unknown tag 'nonsense'"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ("{{ ((10 ** 1000) ** 1000) ** 1000 }}", "does not end in reasonable time or size: more than 0.3 seconds"),
    ("{% break %}", "outside loop"),
])  # fmt: skip
def test_what_is_no_template_is_a_tokenizer_error_with_its_place(source, message, short_limit):
    with pytest.raises(TokenizerError, match=message):
        template(source)


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}", "{{ messages.append(1) }}"]
)
def test_the_sandbox_keeps_a_template_inside(source):
    with pytest.raises(RenderError):
        template(source).render(CHAT)


NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(60) %}"
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a text that doubles": DOUBLED + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "lists in lists, compared": NESTED + NESTED.replace("ns", "other") + "{{ ns.x == other.x }}",
    "a wrapped text": "{{ (messages[0].role * 20000000) | wordwrap(1) }}",
}


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_RENDER_SECONDS", 0.3)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name, short_limit):
    made = template(ENDLESS[name])
    with pytest.raises(EndlessTemplateError, match=r"more than (0.3 seconds|2 GiB of memory)|calls itself without end"):
        made.render(CHAT)
    assert template("{{ messages[0].content }}").render(CHAT) == "hello there"  # the next one is rendered as ever


def test_what_a_machine_loads_into_every_python_is_not_counted_as_the_templates_memory(monkeypatch, tmp_path):
    taken = "import mmap; taken = mmap.mmap(-1, 3 * 2**30, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)"
    (tmp_path / "sitecustomize.py").write_text(taken)
    monkeypatch.syspath_prepend(tmp_path)
    sandbox._end_process()
    try:
        assert template("{{ messages[0].content * 2000000 }}").render(CHAT) == "hello there" * 2000000
    finally:
        sandbox._end_process()


def test_an_answer_comes_whole_from_a_process_that_is_stopped_and_goes_on_while_it_writes():
    """Where PYTHONUNBUFFERED is set, as in most images of Docker, a write to standard output ends early then."""
    words = [sys.executable, "-u", "-c", f"from {sandbox.__name__} import serve; serve()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(pickle.dumps((60.0, operator.mul, ("x", 10_000_000))))
        process.stdin.flush()
        waiting = 0
        while waiting < 4096:  # it has begun to write, and nobody reads
            waiting = int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
            time.sleep(0.05)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            process.send_signal(number)
            time.sleep(0.2)
        answer, _ = process.communicate(timeout=60)
    assert pickle.loads(answer) == ("x" * 10_000_000,)


@pytest.mark.parametrize(("answers", "kind"), [
    (["<think>a</think>b", "c"], "think"), (["c", "<think>a</think>b"], "think"), (["a", "b"], "plain"),
])  # fmt: skip
def test_a_row_is_one_of_think_text_if_any_answer_has_some(answers, kind):
    turns = [
        [{"role": "user", "content": "q </think>"}, {"role": "assistant", "content": answer}] for answer in answers
    ]
    assert row_kind([*itertools.chain(*turns)]) == kind
    assert row_kind([*turns[0], {"role": "assistant", "content": "d", "reasoning_content": "e"}]) == "think"


def test_a_template_is_stopped_in_any_thread(short_limit):
    made = template(ENDLESS["lists in lists, compared"])
    with ThreadPoolExecutor(1) as pool, pytest.raises(EndlessTemplateError, match=r"more than 0\.3 seconds"):
        pool.submit(made.render, CHAT).result(60)


def test_a_rendering_that_was_interrupted_gives_its_text_to_no_other(monkeypatch):
    slow = template("{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox.pickle, "load", Mock(side_effect=KeyboardInterrupt))  # while the answer is waited for
        with pytest.raises(KeyboardInterrupt):
            slow.render(CHAT)
    assert template("other").render(CHAT) == "other"


@pytest.mark.parametrize(("source", "said"), [
    ("{{ ['a', 'b'] | random }}", "something else each time, by chance"),
    ("{{ lipsum() }}", "something else each time, by chance"),
    ("{{ raise_exception('must\x1b[31m alternate\nhere') }}", r"^must\\x1b\[31m alternate\\nhere$"),
])  # fmt: skip
def test_what_raises_or_writes_by_chance_is_a_render_error_on_one_line(source, said):
    with pytest.raises(RenderError, match=said):
        template(source).render(CHAT)


def test_large_rows_and_many_tools_are_within_the_limits():
    long = "line of text\n" * 100_000
    rows = [{"role": role, "content": long} for role in ("user", "assistant") * 5]
    line = "{{ m.role ~ ': ' ~ m.content | indent(2) | trim }}"
    made = template("{% for m in messages %}" + line + "\n{% endfor %}{{ tools | tojson }}")
    tools = [{"function": {"name": f"f{n}", "parameters": {"a": {"type": "string"}}}} for n in range(2_000)]
    assert len(made.render(rows, tools=tools)) > 10 * len(long)


def load(folder, text="task_mode: cpt"):
    return load_tokenizer(config_from_text(f"model: {{name: {folder}}}\n{text}", name="run.yaml"))


def named(*names: str):
    """Tokenizers of the bundled set and, where they are there, the real ones that they stand for."""
    return pytest.mark.parametrize("name", there(names))


@pytest.mark.parametrize(
    ("name", "other"), there([("bundled/bytes", "bundled/metaspace"), ("gpt2", "Mistral-7B-Instruct-v0.3")])
)
def test_a_tokenizer_without_pad_token_gets_one_said_aloud(name, other):
    loaded = load(tokenizer_folder(name))
    assert loaded.tokenizer.pad_token == "<|endoftext|>"
    assert any("Pad token: the tokenizer has none; <|endoftext|> pads" in note for note in loaded.notes)
    assert load(tokenizer_folder(other)).tokenizer.pad_token == "<unk>"


@named("bundled/pad_is_eos", "SmolLM2")
def test_a_pad_token_that_is_also_the_end_token_is_said_aloud(name):
    loaded = load(tokenizer_folder(name))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    assert any("also the end token; padding is masked by length" in note for note in loaded.notes)


@named("bundled/chatml", "Qwen2.5-Instruct")
def test_a_tokenizer_that_needs_nothing_is_left_as_it_is_and_its_digest_has_the_template(name):
    folder = tokenizer_folder(name)
    loaded = load(folder, "task_mode: sft")
    assert (loaded.notes, loaded.tokenizer.pad_token, len(loaded.sha256)) == ((), "<|endoftext|>", 64)
    assert load(folder).sha256 != load(folder, "data: {chat_template: chatml}").sha256


@named("bundled/bytes", "gpt2")
def test_a_missing_template_names_the_ways_out(name):
    with pytest.raises(TokenizerError) as error:
        load(tokenizer_folder(name), "task_mode: sft")
    for part in ("has no chat template", "data.chat_template", "(plain)", "task_mode=cpt"):
        assert part in str(error.value)
    with pytest.raises(TokenizerError, match=r"needs <\|im_start\|> and <\|im_end\|> in the vocabulary"):
        load(tokenizer_folder(name), "data: {chat_template: chatml}")


@named("bundled/spm", "Mistral-7B-v0.3-spm")
def test_a_sentencepiece_model_loads(name):
    assert load(tokenizer_folder(name)).tokenizer("hello")["input_ids"]


def test_the_training_variant_of_a_template_is_taken_from_trl_or_there_is_none(tiny_llama, tmp_path):
    copied = shutil.copytree(tiny_llama, tmp_path / "own")
    for file in copied.glob("chat_template*"):
        file.unlink()
    own = template_of("trl/qwen3_5_think")
    (copied / "chat_template.jinja").write_text(own)
    loaded = load(copied, "data: {chat_template: training}")
    assert (loaded.original_template, "generation" in loaded.tokenizer.chat_template) == (own, True)
    assert any("training variant" in note for note in loaded.notes)
    (copied / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(TokenizerError, match="TRL has no training variant"):
        load(copied, "data: {chat_template: training}")


def backtracking(folder: Path, base: Path) -> Path:
    """A run YAML, and its model, whose tokenizer splits by a regular expression that backtracks over `aaaa!`."""
    path = shutil.copytree(base, folder / "model") / "tokenizer.json"
    state = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, state["pre_tokenizer"]]}
    path.write_text(json.dumps(state))
    rows = (chat(f"say {n}", "a" * (50 if n == 40 else 1) + "!") for n in range(60))
    return write_run(folder, folder / "model", write_rows(folder / "rows.jsonl", rows))


def test_a_regular_expression_that_backtracks_is_an_error_of_the_tokenizer(tmp_path, tiny_llama, command, monkeypatch):
    """The library panics, which in Python is no Exception; of a worker it could not even be sent to the parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    config = ("--config", str(backtracking(tmp_path, tiny_llama)))
    for words in (("train", *config, "data.workers=2"), ("check", *config)):
        code, said = command(*words)
        assert (code, "Traceback" in said) == (2, False), said
        assert "the tokenizer cannot split a text: its library stopped (Onig: Regex search error" in said
    assert "memory plan" in said  # one part of check that fails hides no other
