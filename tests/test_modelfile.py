"""Ollama's template is the chat template: learnt, written in Go's language, evaluated, and refused where it is not."""

from __future__ import annotations

import random
from datetime import date

import pytest

from benchmarks.starter_base import CHAT_TEMPLATE
from sft_play.data.masks.sandbox import RenderError
from sft_play.data.masks.template import ChatTemplate
from sft_play.errors import TokenizerError
from sft_play.finished.export import export
from sft_play.finished.export.checks import probe_conversations
from sft_play.finished.export.export import (
    UnsupportedTemplateError,
    go_template,
    learn_template_parts,
    render_as_ollama,
)
from sft_play.training.prepare.tokenizer import BUILT_IN_TEMPLATES
from tests.conftest import shared
from tests.go_templates import evaluate


def renderer(source: str):
    template = ChatTemplate(source, variables={"bos_token": "<s>", "eos_token": "</s>"}, today=date(2024, 1, 1))

    def render(messages, /):
        return template.render([dict(message) for message in messages], with_prompt=True)

    return render


def conversation(draw: random.Random) -> list[dict[str, str]]:
    words = ["hello", "two  spaces", "{{ .x }}", "{% raw %}", '"quoted"', "日本", "a\nb", "<b>", "it's 5 > 3"]
    roles = (["user", "assistant"] * draw.randint(1, 4))[:-1]
    turns = [{"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 5)))} for role in roles]
    system = [{"role": "system", "content": " ".join(draw.choices(words, k=3))}]
    return [*system, *turns] if draw.random() < 0.5 else turns


OWN = {"chatml": BUILT_IN_TEMPLATES["chatml"], "plain": BUILT_IN_TEMPLATES["plain"], "starter": CHAT_TEMPLATE}
IN_USER = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if WHERE and messages[0].role == 'system' %}<<SYS>>{{ messages[0].content }}<</SYS>> {% endif %}"
    "{{ m.content }} [/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
OWN["system in the first user turn"] = IN_USER.replace("WHERE", "loop.index0 == 1")
OWN["system in the last user turn"] = IN_USER.replace("WHERE", "loop.last")


@pytest.mark.parametrize("name", OWN)
def test_random_conversations_are_rendered_as_the_chat_template_renders_them(name):
    render = renderer(OWN[name])
    parts = learn_template_parts(render)
    template = go_template(parts)
    draw = random.Random(3)
    for _ in range(100):
        messages = conversation(draw)
        assert evaluate(template, messages) == render_as_ollama(parts, messages) == render(messages), messages


def test_every_shared_template_is_said_exactly_or_refused():
    folder = shared("chat_templates")
    said = refused = 0
    for path in sorted(folder.rglob("*.jinja")):
        render = renderer(path.read_text())
        try:
            parts = learn_template_parts(render)
        except (UnsupportedTemplateError, RenderError):
            refused += 1
            continue
        template = go_template(parts)
        for messages in probe_conversations():
            if parts.system is None and messages[0]["role"] == "system":
                continue
            assert evaluate(template, messages) == render_as_ollama(parts, messages) == render(messages), path
        said += 1
    assert said > 120
    assert refused < 10


def test_a_bos_that_the_engine_writes_is_left_out_wherever_it_stands():
    render = renderer("{{ bos_token }}" + CHAT_TEMPLATE)
    template = go_template(learn_template_parts(render, bos="<s>"))
    for messages in probe_conversations():
        assert "<s>" + evaluate(template, messages) == render(messages)


def test_a_default_system_prompt_is_written_where_none_is_given():
    default = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    render = renderer(default + BUILT_IN_TEMPLATES["chatml"])
    template = go_template(learn_template_parts(render))
    said = [{"role": "user", "content": "hi"}]
    for messages in (said, [{"role": "system", "content": "Be brief."}, *said]):
        assert evaluate(template, messages) == render(messages)
    text = export.format_modelfile("a.gguf", template, stops=["<|im_end|>"], context=64)
    assert text.startswith("FROM ./a.gguf\nTEMPLATE ")
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER num_ctx 64\n' in text
    with pytest.raises(TokenizerError, match="ends a text"):
        export.format_modelfile("a.gguf", 'a """ b', stops=[], context=64)


@pytest.mark.parametrize("source", [
    BUILT_IN_TEMPLATES["chatml"].replace("'<|im_start|>'", "loop.index | string + '<|im_start|>'"),
    BUILT_IN_TEMPLATES["chatml"].replace("message['content']", "message['content'] + message['content']"),
    "{% for message in messages | reverse %}{{ message.role + message.content }}{% endfor %}",
])  # fmt: skip
def test_a_template_that_numbers_repeats_or_turns_the_turns_is_refused(source):
    with pytest.raises(UnsupportedTemplateError):
        learn_template_parts(renderer(source))


def test_braces_of_a_template_are_written_as_text():
    template = go_template(export.TemplateParts("{{u}}", "|{{a}}", "|", "|>"))
    assert evaluate(template, [{"role": "user", "content": "a"}]) == "{{u}}a|>"
