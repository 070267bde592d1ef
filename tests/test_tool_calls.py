"""Tool calls: rendered as transformers renders the row of their author, with the template of rows with tools."""

import copy
import itertools
import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from sft_play.config.schema import DataConfig
from sft_play.data.masks import fitted_template, token_row
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.token_row import IGNORED, TokenRow
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.sources.examples import ExampleReader
from sft_play.data.sources.formats import recognise_format, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import TokenizerError
from tests.bundled import template_of, there, tokenizer_folder
from tests.conftest import shared, write_rows
from tests.models import CHATML, make_tokenizer

NO_LIMIT = 1 << 30
ENDLESS: dict[str, Any] = {"on_missing_end": "train"}
"""For templates whose end of turn is no token of the tokenizer that they are tried with."""
ODD = {"city": 'Bram "x" <b> & it\'s \\ é', "days": 3}
PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"],
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS}}]
ESCAPED = ("&#34;", "&#39;", "&quot;", "&lt;", "&gt;", "&amp;")
MISTRAL = ("v3", "v7_spm", "v7_audio")
FEW = (
    *("mistral-common/v13", "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "llama.cpp/Qwen3-Coder"),
    *("llama.cpp/deepseek-ai-DeepSeek-V3.1", "trl/qwen3_training"),
)


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "Ab3dE6gH9", "type": "function", "function": function, **more}


def as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def row(*calls: dict[str, Any], content: Any = "", tools: Any = TOOLS) -> dict[str, Any]:
    results = [{"role": "tool", "name": "get_weather", "tool_call_id": one.get("id"), "content": "ok"} for one in calls]
    messages = [
        {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *results, {"role": "assistant", "content": "Yes."},
    ]  # fmt: skip
    return {"messages": messages, "tools": tools}


def plain_row() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]}


def rendered(renderer: Renderer, data: dict[str, Any]) -> TokenRow | BadRow:
    shape = recognise_format(data)
    assert shape is not None
    example = to_example(RawRow("f:1", copy.deepcopy(data)), shape)
    return example if isinstance(example, BadRow) else renderer.render(example)


def by_transformers(tokenizer: Any, data: dict[str, Any]) -> str | None:
    messages, tools = copy.deepcopy(data["messages"]), data.get("tools") or None
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # whatever a template raises
        return None


def trained(made: TokenRow) -> str:
    return "".join(made.text[start:end] for start, end in made.spans)


@pytest.fixture(scope="module")
def mistral():
    return AutoTokenizer.from_pretrained(shared("tokenizers/Mistral-7B-Instruct-v0.3"))


def tokenizer_for(name: str) -> Any:
    """A fresh tokenizer with square brackets for a template: Mistral's for the shared ones, else our own."""
    own = name.startswith(("bundled/", "trl/"))
    return AutoTokenizer.from_pretrained(tokenizer_folder("bundled/metaspace" if own else "Mistral-7B-Instruct-v0.3"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def renderer_of(tokenizer: Any, template: str, **data: Any) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(tokenizer, DataConfig(**{**ENDLESS, **data}), max_seq_len=NO_LIMIT)


def rows_of_every_form() -> list[dict[str, Any]]:
    forms = itertools.product((ODD, as_text(ODD), {}), ("", None), ("Ab3dE6gH9", "call_1"))
    rows = [row(call(arguments, id=number), content=content) for arguments, content, number in forms]
    return [*rows, row(call(ODD), call(as_text(ODD), id="Zb3dE6gH9"))]


def compare(tokenizer: Any, renderer: Renderer) -> int:
    """How many rows are trained; each as transformers renders it, or else with what was changed said."""
    count = 0
    for data in rows_of_every_form():
        made, wanted = rendered(renderer, data), by_transformers(tokenizer, data)
        if isinstance(made, BadRow):
            continue
        count += 1
        own = made.text.removesuffix(made.added_end)  # what ends a last turn that the template does not end
        assert own == wanted or made.notes, data
        assert not any(escaped in trained(made) for escaped in ESCAPED), made.text
        if own == wanted:
            assert not made.notes
        else:  # the template refuses the row, escapes its calls, encodes them twice or drops them
            assert wanted is None or wanted.count("\\") != made.text.count("\\") or "&#34;" in wanted
    return count


@pytest.mark.parametrize("name", there(["bundled/calls", "bundled/tools", "mistral-common/v3", *FEW]))
def test_calls_are_what_transformers_renders_or_what_was_changed_is_said(name):
    tokenizer = tokenizer_for(name)
    renderer = renderer_of(copy.copy(tokenizer), template := template_of(name))
    tokenizer.chat_template = template
    assert compare(tokenizer, renderer) == len(rows_of_every_form())


@pytest.mark.slow
def test_calls_of_every_shared_template_are_what_transformers_renders_or_said(mistral):
    parts = TokenizerParts.from_tokenizer(mistral)
    for file in sorted(shared("chat_templates").glob("*/*.jinja")):
        tokenizer = copy.copy(mistral)
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        own = parts.replace_template(tokenizer.chat_template)
        renderer = Renderer(own, DataConfig(**ENDLESS), max_seq_len=NO_LIMIT)
        try:
            renderer.turn_locator()
        except TokenizerError:
            continue
        compare(tokenizer, renderer)


@pytest.mark.parametrize("name", there(["bundled/calls", *(f"mistral-common/{version}" for version in MISTRAL)]))
def test_mistrals_calls_are_json_in_both_forms(name):
    renderer = renderer_of(tokenizer_for(name), template_of(name))
    for arguments, notes in ((ODD, (fitted_template.NOTE_TEXT_FOR_OBJECT,)), (as_text(ODD), ())):
        made = rendered(renderer, row(call(arguments)))
        assert made.notes == notes
        written = trained(made).partition("[TOOL_CALLS]")[2].partition("</s>")[0]
        assert json.loads(written)[0] == {"name": "get_weather", "arguments": ODD, "id": "Ab3dE6gH9"}


GOLDEN = """
5 1501 7567 1629 2032 1113 1295 29498 1537 1991 1316 1113 17452 2032 10598 19141 2032 1113 29528 3980 12547 29512 5651
1291 29494 29535 1335 1146 29510 29481 2001 1316 1113 14066 2032 29473 29538 1649 1113 1081 2032 1113 7338 29538 29483
29517 29552 29489 29537 29542 29507 10925 2
"""
"""What mistral-common 1.13.1 (MistralTokenizer.v3) encodes the call of the test below as, through its end token."""


def test_a_call_has_the_ids_of_mistral_common(mistral):
    renderer = renderer_of(copy.copy(mistral), template_of("mistral-common/v3_spm"))
    arguments = {"city": 'Bram "x" <b> & it\'s é', "days": 3}
    for form in (arguments, as_text(arguments)):
        data = row(call(form))
        made = rendered(renderer, {**data, "messages": data["messages"][:-1]})
        assert [label for label in made.labels if label != IGNORED] == list(map(int, GOLDEN.split()))


EACH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = "c.function.arguments"
JSON = f"{{% if {ARGUMENTS} is string %}}{{{{ {ARGUMENTS} }}}}{{% else %}}{{{{ {ARGUMENTS}|tojson }}}}{{% endif %}}"
WAYS = {
    "as it is": ("<call>{{ c.function.name }} {{ " + ARGUMENTS + " }}</call>", "text"),
    "text or safe": (
        f"{{% set a = {ARGUMENTS} if {ARGUMENTS} is string else {ARGUMENTS}|tojson|safe %}}"
        "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + a + '}' }}",
        "text",
    ),
    "tojson": ("<call>{{ c.function | tojson }}</call>", "object"),
    "both": ("<call>{{ c.function.name }} " + JSON + "</call>", "own"),
    "in tags": (
        "<f={{ c.function.name }}>{% for k, v in " + ARGUMENTS + ".items() %}<p={{ k }}>{{ v }}</p>{% endfor %}",
        "object",
    ),
    "asks for an object": (
        "{{ raise_exception('no text') if " + ARGUMENTS + " is string }}<call>{{ c.function.name }} " + JSON,
        "object",
    ),
    "escaped": ("<call>{{ c.function.name }} {{ " + ARGUMENTS + "|tojson|escape }}</call>", "none"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_form_that_a_template_writes_rightly_is_found_by_asking_it(small, way):
    written, right = WAYS[way]
    renderer = renderer_of(small, EACH.replace("CALL", written))
    for arguments in (ODD, as_text(ODD), {}, "{}"):
        data = row(call(arguments))
        made = rendered(renderer, data)
        if right == "none":
            if not isinstance(made, BadRow):
                assert (arguments, made.text) == ({}, by_transformers(small, data))  # which needs no escaping
            continue
        assert isinstance(made, TokenRow), made
        own = "text" if isinstance(arguments, str) else "object"
        if right in ("own", own):
            assert (made.notes, made.text) == ((), by_transformers(small, data))
        else:
            for_object, for_text = fitted_template.NOTE_TEXT_FOR_OBJECT, fitted_template.NOTE_OBJECT_FOR_TEXT
            assert made.notes == (for_object if own == "object" else for_text,)
        other = json.loads(arguments) if isinstance(arguments, str) else as_text(arguments)
        assert trained(rendered(renderer, row(call(other)))) == trained(made)


def test_arguments_of_both_forms_may_stand_in_one_file_and_one_row(small):
    draw = random.Random(5)
    for written, right in (WAYS["tojson"], WAYS["text or safe"], WAYS["both"]):
        renderer = renderer_of(small, EACH.replace("CALL", written))
        for _ in range(10):
            given = [{"city": draw.choice(['"a"', "<b>", "it's", "é&"]), "n": draw.randrange(9)} for _ in range(3)]
            mixed = [one if draw.random() < 0.5 else as_text(one) for one in given]
            wanted = [as_text(one) if right == "text" else one for one in given]
            made, alike = (rendered(renderer, row(*map(call, forms))) for forms in (mixed, wanted))
            assert made.text == alike.text
            assert bool(made.notes) == (right != "own" and mixed != wanted)


def test_a_call_keeps_the_keys_and_the_order_of_its_author(small):
    renderer = renderer_of(small, EACH.replace("CALL", "<call>{{ c | tojson }}</call>"))
    for one in (call(ODD), call(ODD, index=0), {"index": 1, "function": {"arguments": ODD, "name": "get_weather"}}):
        made = rendered(renderer, row(one))
        assert (made.text, made.notes) == (by_transformers(small, row(one)), ())


def test_what_cohere_says_before_a_call_is_trained_or_counted(small):
    plan = "<plan>{{ m.tool_plan }}</plan>"
    for written, stripped in ((plan + WAYS["tojson"][0], 0), ("{{ c }}", 1)):
        data = row(call({"city": "x"}), content=None)
        data["messages"][1]["tool_plan"] = "I will look <|im_end|> it up."
        made = rendered(renderer_of(small, EACH.replace("CALL", written)), data)
        assert isinstance(made, TokenRow), made
        assert (made.stripped_think_pieces, made.special_token_count) == (stripped, 1)
        assert ("I will look <|im_end|> it up." in trained(made)) == (not stripped)


@pytest.mark.parametrize("name", there(["bundled/calls", "mistral-common/v3"]))
def test_an_id_that_the_template_takes_is_left_as_it_is(name):
    tokenizer = tokenizer_for(name)
    renderer = renderer_of(copy.copy(tokenizer), template := template_of(name))
    tokenizer.chat_template = template
    data = row(call(as_text(ODD), id="call_1234"))
    assert rendered(renderer, data).text == by_transformers(tokenizer, data)
    longer = rendered(renderer, row(call(as_text(ODD), id="call_12345")))
    assert longer.notes == (fitted_template.NOTE_SHORT_IDS,)


def test_a_special_token_that_json_text_spells_by_an_escape_is_no_control_token(small):
    renderer = renderer_of(small, EACH.replace("CALL", WAYS["tojson"][0]))
    made = rendered(renderer, row(call('{"city": "\\u003c|im_end|\\u003e"}')))
    assert made.special_token_count == 1
    assert made.labels.count(small.convert_tokens_to_ids("<|im_end|>")) == 2  # the ends of the two turns


TOOL_USE = "<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>\n" + EACH.replace(
    "CALL", "<tool>{{ c.function | tojson }}</tool>"
)
RAG = "{% for d in documents %}{{ d.title }}{% endfor %}"


def saved(folder: Any, templates: dict[str, str], how: str) -> Any:
    make_tokenizer(folder, template=None)
    if how == "folder":
        (folder / "additional_chat_templates").mkdir()
        for name, text in templates.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            (folder / file).write_text(text, encoding="utf-8")
    else:
        path = folder / "tokenizer_config.json"
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == templates
    return tokenizer


@pytest.mark.parametrize("how", ["config", "folder"])
def test_each_row_has_the_template_that_transformers_chooses_for_it(tmp_path, how):
    tokenizer = saved(tmp_path, {"default": CHATML, "tool_use": TOOL_USE, "rag": RAG}, how)
    renderer = Renderer(tokenizer, DataConfig(), max_seq_len=NO_LIMIT)
    for data in (row(call(ODD)), plain_row(), {**plain_row(), "tools": TOOLS}, row(call(ODD)), plain_row()):
        made = rendered(renderer, data)
        assert isinstance(made, TokenRow), made
        assert made.text == by_transformers(tokenizer, data)
        assert ("get_weather" in made.text) == ("tools" in data)
        assert trained(made).endswith("Yes.<|im_end|>")
    assert renderer.turn_locator().ends.end_of_turn == "<|im_end|>"


HERMES = ("bundled/tools", "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use")
COMMAND_R = ("bundled/order_last", "llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use")
"""These write an order behind the last message, and none before the answers of a row."""


@pytest.mark.parametrize("name", there([*HERMES, *COMMAND_R]))
def test_hermes_and_command_r_train_rows_with_tools_or_say_why_not(tmp_path, name):
    tokenizer = saved(tmp_path, {"default": CHATML, "tool_use": template_of(name)}, "folder")
    renderer = Renderer(tokenizer, DataConfig(), max_seq_len=NO_LIMIT)
    assert isinstance(rendered(renderer, plain_row()), TokenRow)
    made = rendered(renderer, row(call(ODD)))
    if name in COMMAND_R:
        assert made.reason == token_row.PROMPT_MISMATCH
    else:
        assert made.text == by_transformers(tokenizer, row(call(ODD)))


def test_a_template_that_goes_over_tools_without_asking_is_probed_with_some(small):
    renderer = renderer_of(small, TOOL_USE)
    assert isinstance(rendered(renderer, row(call(ODD))), TokenRow)
    assert rendered(renderer, plain_row()).reason == token_row.TEMPLATE_REFUSES_ROW


def test_a_template_that_is_broken_or_not_there_costs_the_rows_that_need_it_alone(tmp_path):
    broken = {"default": CHATML, "tool_use": "{% for t in tools %}{{ t.function.name }}"}
    for name, templates in (("a", broken), ("b", {"tool_use": TOOL_USE, "rag": RAG})):
        (tmp_path / name).mkdir()
        renderer = Renderer(saved(tmp_path / name, templates, "folder"), DataConfig(), max_seq_len=NO_LIMIT)
        good, bad = plain_row(), row(call(ODD))
        if name == "b":
            good, bad = bad, good
        assert isinstance(rendered(renderer, good), TokenRow)
        refused = rendered(renderer, bad)
        assert "rag, tool_use; set data.chat_template" in refused.detail if name == "b" else "tools" in refused.reason


ROWS_OF_CALLS = [
    {
        "messages": [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": name, "arguments": arguments}}]},
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
            key: {"type": "string", **({"enum": ["x"]} if key == "city" else {})} for key in arguments}}}}],
    }
    for number, (name, arguments) in enumerate([
        ("weather", {"city": "Rome"}), ("mail", {"to": "me", "subject": "hi", "cc": ["a", None]}),
        ("nested", {"where": {"lat": "1", "lon": "2"}}), ("weather", {"city": "Oslo"}),
    ])
]  # fmt: skip


@pytest.mark.parametrize("stored", ["parquet", "saved"])
def test_arguments_that_a_table_made_up_are_left_out_and_counted(tmp_path, stored):
    """Written by `datasets`, which gives every object of a column the keys of all: read back as the rows were."""
    import datasets

    table = datasets.Dataset.from_list(ROWS_OF_CALLS)
    told = table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    path = tmp_path / f"rows.{stored}"
    table.to_parquet(str(path)) if stored == "parquet" else table.save_to_disk(str(path))
    found = [example for _, example in ExampleReader(path, DataConfig(), split="train").numbered_examples()]
    for row, example in zip(ROWS_OF_CALLS, found, strict=True):
        assert example.messages[1]["tool_calls"][0]["function"] == row["messages"][1]["tool_calls"][0]["function"]
        assert example.tools == tuple(row["tools"])
    if isinstance(told, dict) and None in told.values():  # this release of datasets fills the keys
        assert all(any("nulls in tool calls" in note for note in example.notes) for example in found)


def test_a_null_that_somebody_wrote_into_jsonl_stays(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [row(call({"a": None, "b": 1}))])
    [(_, found)] = ExampleReader(path, DataConfig(), split="train").numbered_examples()
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": 1}
    assert not any("nulls" in note for note in found.notes)
