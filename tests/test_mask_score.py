"""`make mask-score`: an independent verdict on the masks of every template of a folder; and masks beside those of
another project."""

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.mask_score import score as module
from benchmarks.mask_score.score import CASES, score
from sft_play.config.schema import DataConfig
from sft_play.data.masks import sandbox
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.sources.formats import Chat
from sft_play.errors import ConfigError, TokenizerError
from tests.bundled import template_of, there, tokenizer_folder
from tests.conftest import ROOT, shared
from tests.models import CHATML, make_tokenizer

FIELDS = ["template", "case", "method", "verdict", "reason"]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(9) %}" + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, template=None)
    return folder


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Path:
    """A folder with templates, in folders of their own, and with what is none."""
    folder = tmp_path_factory.mktemp("scored") / "templates"
    (folder / "a" / "b.jinja").mkdir(parents=True)
    (folder / "plain.jinja").write_text(CHATML)
    (folder / "a" / "b.jinja" / "deep.J2").write_text(CHATML)
    (folder / "a" / "latin.jinja").write_bytes(b"caf\xe9" + CHATML.encode())
    (folder / "a" / "broken.jinja2").write_text("\n{% for m in messages %}")
    (folder / "a" / "empty.jinja").write_text("")
    (folder / "a" / "endless.jinja").write_text(ENDLESS)
    (folder / "a" / "endless_tools.jinja").write_text("{% if tools %}" + ENDLESS + "{% endif %}" + CHATML)
    (folder / "a" / "otherwise.jinja").write_text(CHATML.replace("assistant\n", "model\n"))
    (folder / "README.md").write_text("no template")
    return folder


@pytest.fixture(scope="module")
def made(templates, tokenizer) -> module.MaskScore:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "MAX_RENDER_SECONDS", 1)
        return score(templates, str(tokenizer))


def verdicts(rows, template: str) -> dict[str, str]:
    return {row.case: row.verdict for row in rows if row.template == template}


def test_every_template_below_the_folder_gets_a_verdict_on_every_case(made):
    assert made.ok
    assert len(made.rows) == 8 * len(CASES)
    # this ChatML writes no calls, so that case cannot be rendered
    plain = {**{case.name: "exact" for case in CASES}, "tool_calls": "cannot_render", "call_last": "cannot_render"}
    assert verdicts(made.rows, "plain.jinja") == verdicts(made.rows, "a/b.jinja/deep.J2") == plain
    assert verdicts(made.rows, "a/endless_tools.jinja") == plain
    assert set(verdicts(made.rows, "a/otherwise.jinja").values()) == {"refused", "cannot_render"}
    reasons = {row.template: row.reason for row in made.rows if row.verdict == "cannot_render"}
    assert reasons["a/latin.jinja"] == "the file is not UTF-8: byte 0xE9 at 3"
    assert "not valid Jinja (line 2)" in reasons["a/broken.jinja2"]
    assert "drops an assistant's answer" in reasons["a/empty.jinja"]
    assert "does not end" in reasons["a/endless.jinja"]
    assert "does not end" in reasons["a/endless_tools.jinja"]


def test_the_score_is_the_same_twice_and_holds_the_fixed_fields(made, templates, tokenizer, tmp_path, command):
    out = tmp_path / "score.json"
    ends = shutil.copytree(templates, tmp_path / "ends", ignore=shutil.ignore_patterns("endless*"))
    words = ("mask-score", "--templates", str(ends), "--tokenizer", str(tokenizer), "--out", str(out))
    code, text = command(*words)
    assert code == 0
    assert "| plain.jinja | prefix | prefix | prefix | — | prefix | prefix | prefix | — |" in text
    assert "12 of 18 cases that render are exact (66.7%), 6 are refused, 0 are wrong; 30 cannot be rendered" in text
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert all(list(row) == FIELDS and all(isinstance(value, str) for value in row.values()) for row in rows)
    before = [list(row.items()) for row in made.as_json() if "endless" not in row["template"]]
    assert [list(row.items()) for row in rows] == before


@pytest.mark.parametrize(("name", "said"), [
    ("absent", "is not a folder"), ("empty", "holds no templates"), ("file.jinja", "give the folder that holds it"),
])  # fmt: skip
def test_a_folder_without_templates_or_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path, tokenizer, name, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.jinja").write_text(CHATML)
    with pytest.raises(ConfigError, match=said):
        score(tmp_path / name, str(tokenizer))
    with pytest.raises(TokenizerError, match="TOKENIZER"):
        score(tmp_path, str(tmp_path / name))


# Layouts in which right masks were called wrong, or wrong ones right.
ROLES = "{% for m in messages %}{% if m.role == 'user' %}"
LAYOUTS = {
    # Kimi K3: the token that opens a message opens the parts of an answer too
    "parts_open_as_messages": "{% macro o(t) %}<|open|>{{ t }}<|sep|>{% endmacro %}"
    "{% macro c(t) %}<|close|>{{ t }}<|sep|>{% endmacro %}{% for m in messages %}"
    "{{ o('message role=\"' ~ m.role ~ '\"') }}{% if m.role == 'assistant' %}"
    "{{ o('think') ~ (m.reasoning_content or '') ~ c('think') ~ o('response') ~ (m.content or '') ~ c('response') }}"
    "{% for call in m.tool_calls or [] %}{{ o('call ' ~ call.function.name) }}"
    "{% for key, value in call.function.arguments.items() %}{{ o(key) ~ value ~ c(key) }}{% endfor %}{{ c('call') }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{{ c('message') }}<|end_of_msg|>{% endfor %}"
    "{% if add_generation_prompt %}{{ o('message role=\"assistant\"') ~ o('think') }}{% endif %}",
    # DeepSeek-V3.2: the prompt has both marks of think text, the answer only what closes it
    "closed_in_both": ROLES + "<|user|>{{ m.content }}{% else %}{{ '<|assistant|></think>' if m.role == 'assistant' }}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments|tojson }}</call>{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}",
    # MiniMax-M2 as LLaMA-Factory writes it: brackets of its own, and the header after every question
    "brackets": "]~!b[]~b]system\nBe nice.[e~[\n" + ROLES + "]~b]user\n{{ m.content ~ '[e~[\n]~b]ai\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content ~ '[e~[\n' }}{% endif %}{% endfor %}",
    # Zephyr: what ends an answer ends a question and the system prompt too
    "one_end": "{{ '<|system|>\nBe nice.</s>' }}" + ROLES + "{{ '<|user|>\n' ~ m.content ~ '</s><|assistant|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content ~ '</s>' }}{% endif %}{% endfor %}",
}
HISTORY_HAS_IDS = (
    "{% for m in messages %}{% set last = loop.last %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    '{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments|tojson }}{{ ', \"id\": \"' ~ c.id ~ '\"' if not last }}}{% endfor %}</calls>{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_right_masks_of_odd_layouts_are_called_exact(name, tmp_path, tokenizer):
    (tmp_path / "t.jinja").write_text(LAYOUTS[name])
    rows = score(tmp_path, str(tokenizer)).rows
    assert [row for row in rows if row.verdict not in ("exact", "cannot_render")] == []
    assert sum(row.verdict == "exact" for row in rows) >= 5


def test_a_call_that_is_cut_in_half_is_called_wrong(tmp_path, tokenizer, monkeypatch):
    """Its two forms, with an id as history and without one, have the call's bracket in common, which is no end."""
    (tmp_path / "t.jinja").write_text(HISTORY_HAS_IDS)
    assert {row.verdict for row in score(tmp_path, str(tokenizer)).rows} == {"exact"}
    real = Renderer.render

    def cut(self, example):
        row = real(self, example)
        if not hasattr(row, "labels") or "<calls>" not in row.text:
            return row
        encoding = self.backend.encode(row.text, add_special_tokens=False)
        end = row.text.index("3}", row.text.index("<calls>")) + 2
        until = row.text.index("<|im_end|>", end) + len("<|im_end|>")
        pairs = zip(encoding.offsets, row.labels, strict=True)
        labels = [IGNORED if end <= first < until else label for (first, _), label in pairs]
        return dataclasses.replace(row, labels=labels)

    monkeypatch.setattr(Renderer, "render", cut)
    verdict = {row.case: row.verdict for row in score(tmp_path, str(tokenizer)).rows}
    assert {case for case in verdict if verdict[case] == "wrong"} == {"tool_calls", "call_last"}


def test_a_label_that_is_another_token_is_wrong_and_makes_the_command_fail(monkeypatch, tokenizer, tmp_path, command):
    """Behind the renderer's back; test_ends.py bends what is trained."""
    real = Renderer.render

    def render(self, example):
        made = real(self, example)
        if not hasattr(made, "labels"):
            return made
        at = next(index for index, label in enumerate(made.labels) if label != IGNORED)
        return dataclasses.replace(made, labels=[*made.labels[:at], made.labels[at] + 1, *made.labels[at + 1 :]])

    monkeypatch.setattr(Renderer, "render", render)
    (tmp_path / "chatml.jinja").write_text(CHATML)
    rows = [row for row in score(tmp_path, str(tokenizer)).rows if row.verdict != "cannot_render"]
    assert [row.verdict for row in rows] == ["wrong"] * 6
    assert all(row.reason for row in rows)
    code, text = command("mask-score", "--templates", str(tmp_path), "--tokenizer", str(tokenizer))
    assert (code != 0, "WRONG" in text, "chatml.jinja, single_turn: wrong: " in text) == (True, True, True)


def test_an_end_of_turn_that_looks_like_none_is_known_as_the_end_of_the_turn(tmp_path, tokenizer):
    for name, end in (("bars", "[|endofturn|]"), ("words", " -- over and out")):
        (tmp_path / f"{name}.jinja").write_text(
            "{% for m in messages %}{{ '[' + m.role + ']\n' + (m.content or '') }}{% for c in m.tool_calls or [] %}"
            "{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}{% endfor %}"
            "{{ '" + end + "\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
        )
    rows = score(tmp_path, str(tokenizer)).rows
    found = {(row.template, row.case): row.verdict for row in rows}
    assert found["bars.jinja", "tool_calls"] == found["bars.jinja", "multi_turn"] == "exact"
    assert found["words.jinja", "tool_calls"] == "exact"
    assert "wrong" not in found.values()


# Real templates.
METHODS = {
    "bundled/chatml": ["prefix", "prefix", "prefix", "", "prefix", "prefix", "prefix", ""],
    "bundled/tools": ["prefix"] * 8,
    "bundled/history": ["prefix", "marker", "marker", "", "marker", "marker", "marker", ""],
    "bundled/no_system": ["prefix", "prefix", "", "", "prefix", "prefix", "", ""],
    "trl/qwen3": ["prefix", *["marker"] * 5, "prefix", "prefix"],
    "llama.cpp/Qwen-Qwen2.5-7B-Instruct": ["prefix"] * 8,
    "llama.cpp/google-gemma-2-2b-it": ["prefix", "prefix", "", "", "prefix", "prefix", "", ""],
    "llama.cpp/llama-cpp-deepseek-r1": ["header", "header", "header", "", "header", "header", "header", ""],
}


@pytest.mark.parametrize("tokenizer_name", there(["bundled/chatml", "Qwen2.5-Instruct"]))
def test_real_templates_have_the_methods_that_were_read_by_hand(tmp_path, tokenizer_name):
    """Qwen3's history loses the empty think block that its last turn has, Gemma 2 takes no system prompt, DeepSeek-R1's
    answers begin behind the header, without what its prompt opens. Ours are built like theirs."""
    own = tokenizer_name.startswith("bundled/")
    wanted = {name: of for name, of in METHODS.items() if name.startswith("bundled/") == own or "trl/" in name}
    for name in wanted:
        (tmp_path / f"{name.replace('/', '_')}.jinja").write_text(template_of(name), encoding="utf-8")
    rows = score(tmp_path, str(tokenizer_folder(tokenizer_name))).rows
    assert not [row for row in rows if row.verdict == "wrong"]
    for name, methods in wanted.items():
        assert [row.method for row in rows if row.template == f"{name.replace('/', '_')}.jinja"] == methods, name


@pytest.mark.slow
def test_the_table_in_the_documentation_is_the_score_of_all_shared_templates():
    made = score(shared("chat_templates"), str(shared("tokenizers/Qwen2.5-Instruct")))
    assert len({row.template for row in made.rows}) == 134
    assert made.counts()["wrong"] == 0
    lines = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8").splitlines()
    first = lines.index(f"| template | {' | '.join(case.name for case in CASES)} |")
    last = next(number for number, line in enumerate(lines) if "cases that render are exact" in line)
    assert [line for line in lines[first : last + 1] if line] == [line for line in made.lines() if line]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["SmolLM2", "gpt2", "Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3-spm", "Phi-3-mini-4k-instruct"]
)
def test_no_template_gets_a_wrong_mask_with_another_tokenizer(name):
    made = score(shared("chat_templates"), str(shared(f"tokenizers/{name}")))
    assert not [row for row in made.rows if row.verdict == "wrong"]
    assert made.counts()["exact"] > 400


# Beside `renderers`; skipped where it is not installed.
FAMILIES = {
    "trl/qwen3": "qwen3", "trl/qwen3_vl": "qwen3-vl", "trl/qwen3_5_think": "qwen3.5", "trl/qwen3_5_nothink": "qwen3.5",
    "trl/qwen3_6": "qwen3.6", "trl/nemotron_3_nano": "nemotron-3", "trl/nemotron_3_ultra": "nemotron-3-ultra",
    "trl/glm4moe": "glm-4.5", "trl/llama3_1": "llama-3", "llama.cpp/GLM-4.6": "glm-4.5", "llama.cpp/GLM-5.2": "glm-5.1",
    "llama.cpp/MiniMax-M2": "minimax-m2", "llama.cpp/google-gemma-4-31B-it": "gemma4",
}  # fmt: skip
SETTINGS = {"trl/qwen3_5_think": {"enable_thinking": True}, "trl/qwen3_5_nothink": {"enable_thinking": False}}
NAMES = {"llama.cpp/google-gemma-4-31B-it": "google/gemma-4-31B-it"}
"""Its renderer goes by the name of the model."""
COMPARED = ("single_turn", "multi_turn", "system", "tool_calls", "reasoning", "call_last")
OTHER_TEMPLATE = {("llama.cpp/google-gemma-4-31B-it", "reasoning")}
"""renderers follows a later template, which writes think text in answers too."""
TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|end_of_text|>", "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<bos>", "<eos>"),
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|image|>", "<|image>", "<image|>", "<pad>"),
]
_OPENING = re.compile(r"\s*(?:<think>\s*)?(?:</think>|<\|channel>thought\n<channel\|>)?\s*")
"""What a run may begin with in one of the two only."""
_ADDED_END = re.compile(r"(?:<\|endoftext\|>|<\|user\|>|<\|observation\|>)$")


@pytest.fixture(scope="module")
def known_tokens() -> Any:
    made = AutoTokenizer.from_pretrained(tokenizer_folder("Qwen2.5-Instruct"))
    made.add_special_tokens({"additional_special_tokens": TOKENS})
    return made


def runs(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool]) -> Iterator[str]:
    """Trained runs as text, without what the two may differ in."""
    places = [at for at, is_trained in enumerate(trained) if is_trained]
    for at in places:
        if at - 1 not in places:
            last = next(end for end in range(at, len(ids) + 1) if end not in places)
            text = str(tokenizer.decode(ids[at:last]))
            yield _ADDED_END.sub("", text[_OPENING.match(text).end() :])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_runs_are_those_of_renderers(known_tokens, name):
    """PrimeIntellect's `renderers` writes families by hand. Trained runs must be the same, turn by turn, but for what
    docs/masks.md explains: think marks and white space that a run begins with, and the token that ends a last turn
    which the template does not end."""
    base = pytest.importorskip("renderers.base", reason="renderers is not installed: pip install renderers httpx")
    from renderers import configs

    base._populate_registry()
    tokenizer = known_tokens
    tokenizer.name_or_path = NAMES.get(name, "")
    tokenizer.chat_template = template_of(name)
    known = [one for one in vars(configs).values() if isinstance(one, type) and hasattr(one, "model_fields")]
    fields = [(one, one.model_fields["name"].default) for one in known if "name" in one.model_fields]
    config = next(one for one, default in fields if default == FAMILIES[name])
    written = base.RENDERER_REGISTRY[FAMILIES[name]](tokenizer, config(**SETTINGS.get(name, {})))
    renderer = Renderer(tokenizer, DataConfig(on_missing_end="train"), max_seq_len=1 << 30)
    for case in CASES:
        if case.name not in COMPARED or (name, case.name) in OTHER_TEMPLATE:
            continue
        messages = [copy.deepcopy(message) for message in case.messages]
        sample = base.build_training_sample(written, messages, tools=list(case.tools) or None, ensure_final_stop=True)
        row = renderer.render(Chat("f:1", case.messages, case.tools))
        assert isinstance(row, TokenRow), (case.name, row)
        assert row.untrained_turns == 0
        ours = list(runs(tokenizer, row.input_ids, [label != IGNORED for label in row.labels]))
        assert ours == list(runs(tokenizer, sample.token_ids, sample.loss_mask)), case.name
