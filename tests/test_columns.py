"""Columns: which of a row are read, which would be missed, and what to do about it; the same in every command."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.build.stats import RowStats
from sft_play.data.checks import judge_columns
from sft_play.data.sources.columns import (
    NEGATIVE_COLUMNS,
    PREFERENCE_TAGS,
    REJECTED_COLUMNS,
    guess_columns,
    missed_column_kind,
)
from sft_play.data.sources.examples import ExampleReader, read_example
from sft_play.data.sources.formats import FORMATS, TEXT_COLUMNS, Chat, Text, detect_format, recognise_format
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import DataError
from tests.bundled import data_file
from tests.conftest import chat, write_rows, write_run

QA: dict[str, Any] = {"question": "Which lamp is on?", "answer": "The one in the hall."}
TURNS = chat("Which lamp is on?", "The one in the hall.")
TOOLS = [{"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}]
PASSAGE = "A lamp stands in the hall and one in the kitchen, of which the first was lit at noon by Ann."


def read(row: dict[str, Any], **options: Any) -> Any:
    """The row as a file of it alone is read."""
    data = DataConfig(**options)
    first, shape = detect_format(iter([RawRow("f:1", row)]), data)
    return read_example(first[0], shape, data)


def kinds(row: dict[str, Any], **options: Any) -> dict[str, str]:
    """By each column that is not read, the kind by which it would be missed."""
    found = read(row, **options)
    assert isinstance(found, (Chat, Text)), found
    return {name: kind for name, kind, _ in found.unused}


def finding(*rows: dict[str, Any], **options: Any) -> Any:
    stats, data = RowStats(), DataConfig(**options)
    for row in rows:
        stats.count_example(read(row, **options))
    return next(judge_columns(stats, data), None)


def proposed(words: str, row: dict[str, Any], **options: Any) -> Any:
    """The row as it is read with the setting that a message proposes."""
    setting = re.search(r"data\.columns=\{.*?\}", words)
    assert setting is not None, words
    # through the config, as a person would type it
    config = config_from_text("model: {name: a/b}", name="x", overrides=[setting[0]])
    return read(row, **{**options, "columns": config.data.columns})


@pytest.mark.parametrize(("column", "value", "kind"), [
    ("context", PASSAGE, "context"), ("passage", "The hall is lit.", "context"), ("Kontext", PASSAGE, "context"),
    ("supporting_facts", ["The hall is lit.", "So is the attic."], "context"),
    ("背景资料", "走廊里有一盏灯", "context"),
    ("wikiParagraph", PASSAGE, "context"), ("anything", PASSAGE, "long"), ("notes", {"inner": [PASSAGE]}, "long"),
    ("reasoning", "The first was lit.", "reasoning"), ("chain_of_thought_cot", "It was lit.", "reasoning"),
    ("thinking", "Hm, the hall.", "reasoning"), ("model_reasoning", "Hm, no.", "reasoning"),
    ("tool_defs", TOOLS, "tools"), ("available_functions", json.dumps(TOOLS), "tools"), ("x", TOOLS, "tools"),
    ("api", [{"type": "function", "function": {"name": "f"}}], "tools"), ("specs", json.dumps(TOOLS[0]), "tools"),
    ("loss_mask", [1, 0, 1], "mask"), ("loss_mask", "[0, 1]", "mask"), ("turns_seen", [0, 1, 1], "mask"),
    ("loss_masks", [True, False], "mask"), ("skip", True, "mask"), ("skip", "true", "mask"), ("weight", 0.5, "mask"),
    ("weight", "0.5", "mask"), ("is_ignored", 1, "mask"), ("ignore", 1, "mask"), ("sample_weight", 0, "mask"),
    ("train", False, "mask"), ("system_text", "Be brief.", "system"), ("systemInstructions", "Be brief.", "system"),
    ("persona", "A tired pirate.", "system"), ("response", "The kitchen's lamp is on.", "answer"),
    ("options", ["hall", "kitchen"], "choices"), ("user_question", "Is any other lamp on?", "question"),
    ("image_path", "lamps/3.png", "media"), ("photos", ["a.jpg"], "media"),
    ("audio_file", {"path": "a.wav", "bytes": None}, "video"), ("pictureUrl", "https://example.org/3", "media"),
    ("page", f"{PASSAGE} {PASSAGE}", "long"),
])  # fmt: skip
def test_what_somebody_meant_to_be_trained_is_told_by_its_class(column, value, kind):
    for row in (QA, TURNS):
        assert kinds({**row, column: value}) == {column: kind}, row


@pytest.mark.parametrize(("column", "value"), [
    ("uuid", "0b1c"), ("url", "https://example.org/a/very/long/path/of/a/page"), ("score", 0.93), ("lang", "en"),
    ("created_at", "2024-01-01 10:00:00"), ("sha256", "ab" * 32), ("title", "The Lord of the Rings"),
    ("category", "open questions"), ("tags", ["lamp", "hall", "noon"]), ("model", "gpt-4 turbo"),
    ("context_id", "a b c d"), ("tool_name", "look"), ("answer_type", "a place name"), ("num_tools", 3),
    ("is_complete", [True, True]), ("correctness", [True, False]), ("skip", False),
    ("quality_explanation", "It is clear and short."), ("weight", 1), ("weight", "1.0"), ("train", True),
    ("reasoning", "high"), ("system", ""), ("operating", "linux"), ("reasoning_tokens", 12), ("user", "Ann Smith"),
    ("has_context", True), ("is_tool_call", True), ("model_name", "a b c d"),
    ("metadata", {"url": "https://example.org", "words": 12, "lang": "en"}), ("embedding", [0.1, 0.2]),
    ("quality_explanation", PASSAGE), ("llm_judge_rationale", "It says what was asked."), ("document_title", PASSAGE),
    ("task", "Control of lamps in all rooms of a house"), ("image_count", 3), ("has_image", "no"), ("tool", "look"),
    ("token_ids", [5, 1, 0]), ("prompt_length", 7), ("split", "train"), ("model_a", "some model of a family"),
])  # fmt: skip
def test_what_only_describes_a_row_is_listed_without_a_warning(column, value):
    for row in (QA, TURNS):
        found = finding({**row, column: value})
        assert found is None or (found.verdict, found.found) == ("PASS", f"not read: {column}")
        assert (found is None) is (value == "")


def test_what_the_conversation_holds_is_not_missed():
    asked, answered = TURNS["messages"]
    assert set(kinds({**TURNS, "prompt": asked["content"], "chosen": TURNS["messages"]}).values()) == {""}
    assert kinds({"problem": "2 + 2?", "solution": "It is 4, as is 2 x 2.", "answer": "It is 4, as"}) == {"answer": ""}
    assert kinds({**TURNS, "response": f"{answered['content']} Or not."}) == {"response": "answer"}
    # as alpaca's own file has it: the whole row rendered with a preamble
    rendered = f"A task. ### Instruction: {asked['content']} ### Response: {answered['content']} " + "more " * 40
    for row in (TURNS, QA):
        assert kinds({**row, "full_text": rendered}) == {"full_text": ""}
    alpaca = {"instruction": asked["content"], "input": "In the house.", "output": answered["content"]}
    assert kinds({**alpaca, "text": f"{rendered} ### Input: In the house."}) == {"text": ""}
    extractive = {**QA, "passage": f"{PASSAGE} {QA['answer']}"}
    assert kinds(extractive) == {"passage": "context"}


def test_every_format_names_a_column_beside_it_that_holds_long_text():
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    for shape in FORMATS:
        row: dict[str, Any] = dict.fromkeys(shape.required_columns, "What is it that you see?")
        row |= {key: TURNS["messages"] for key in shape.required_columns if shape.kind == "turns"}
        if shape.kind == "calls":
            row |= {"answers": [{"name": "look", "arguments": {}}], "tools": TOOLS}
        name = "".join(draw.choices(letters, k=9))
        words = ["".join(draw.choices(letters, k=5)) for _ in range(60)]
        if recognise_format({**row, name: ""}) == shape:
            assert kinds({**row, name: " ".join(words)}) == {name: "long"}, shape
            assert kinds({**row, name: words[0]}) == {name: ""}, shape


def test_of_two_columns_for_one_thing_the_one_that_is_not_read_is_named():
    both = {**TURNS, "system": "Be brief.", "system_instruction": "Speak like a pirate.", "tools": TOOLS}
    assert kinds(both) == {"system_instruction": "system"}
    assert kinds({**both, "functions": [{**TOOLS[0], "name": "other"}]})["functions"] == "tools"
    repeated = kinds({**both, "functions": TOOLS, "system_instruction": "Be brief."})
    assert repeated == {"system_instruction": "", "functions": ""}


def test_a_label_of_texts_is_named_with_the_setting_that_trains_it():
    for column in ("label", "sentiment", "Etikett", "intent", "target", "summary"):
        row = {"text": "I liked the lamp.", column: "positive"}
        found = finding(row)
        trained = proposed(found.found, row)
        assert [message["content"] for message in trained.messages] == ["I liked the lamp.", "positive"]
        assert (found.verdict, trained.unused) == ("WARN", ())
    assert kinds({"text": "I liked the lamp.", "label": 1}) == {"label": "label"}
    assert "data.columns" not in finding({"text": "I liked the lamp.", "label": 1}).found  # a number is no answer
    crawled = {"text": "I liked the lamp.", "url": "https://a.b", "lang": "en", "dump": "CC-MAIN-2024"}
    code = {"content": "def f(): pass", "max_stars_repo_head_hexsha": "ab" * 20, "max_stars_repo_licenses": ["MIT"]}
    for row in (crawled, code):
        assert set(kinds(row).values()) == {""}
    mapped = {"columns": {"text": "body"}}
    row = {"body": "I liked the lamp.", "label": "positive"}
    assert "{prompt: body, completion: label}" in finding(row, **mapped).found


@pytest.mark.parametrize(("row", "more", "expected"), [
    (QA, {"passage": PASSAGE}, [("user", f"Which lamp is on?\n{PASSAGE}")]),
    (QA, {"my passages": ["One is lit.", "Two are."]}, [("user", "Which lamp is on?\nOne is lit.\n\nTwo are.")]),
    (QA, {"system text": "Be brief."}, [("system", "Be brief.")]),
    (TURNS, {"system_text": "Be brief."}, [("system", "Be brief.")]),
])  # fmt: skip
def test_the_setting_that_a_message_proposes_reads_the_column(row, more, expected):
    row = {**row, **more}
    found = finding(row)
    trained = proposed(found.found, row)
    said = [(message["role"], message["content"]) for message in trained.messages]
    assert (said[: len(expected)], said[-1]) == (expected, ("assistant", "The one in the hall."))
    assert (found.verdict, trained.unused) == ("WARN", ())


@pytest.mark.parametrize("row", [QA, TURNS], ids=["pair", "turns"])
def test_think_text_and_tools_in_columns_of_their_own_are_read_where_they_are_mapped(row):
    row = {**row, "cot": "The first was lit.", "tool_defs": json.dumps(TOOLS), "tools": None}
    found = finding(row)
    assert "cot (think text, 1 row)" in found.found
    assert "reads cot as think text of the last answer, tool_defs as the tools" in found.found
    trained = proposed(found.found, row)
    assert trained.messages[-1]["reasoning_content"] == "The first was lit."
    assert (trained.tools, trained.unused) == (tuple(TOOLS), ())


def test_a_setting_keeps_what_is_mapped_and_think_text_does_not_replace_that_of_an_answer():
    columns = {"prompt": "frage", "completion": "antwort"}
    row = {"frage": "Welche Lampe?", "antwort": "Die im Flur.", "absatz": PASSAGE, "gedanken": "Sie brennt."}
    assert proposed(finding(row, columns=columns).found, row).messages == (
        {"role": "user", "content": f"Welche Lampe?\n{PASSAGE}"},
        {"role": "assistant", "content": "Die im Flur.", "reasoning_content": "Sie brennt."},
    )
    asked, answered = TURNS["messages"]
    row = {"messages": [asked, {**answered, "thinking": "It was lit."}], "cot": "Other text."}
    assert "data.columns" not in finding(row).found
    assert "two different think texts" in read(row, columns={"reasoning": "cot"}).reason


def test_no_setting_is_proposed_that_would_make_the_row_a_bad_one():
    prompted = {"messages": [{"role": "system", "content": "Hello."}, *TURNS["messages"]]}
    for row in (
        {**prompted, "system_text": "Be brief."},
        {**TURNS, "passage": PASSAGE},  # which turn it belongs to is not said
        {**QA, "passage": {"title": "Lamps", "text": PASSAGE}},
        {**QA, "skip": True},
        {"text": "A text.", "passage": PASSAGE},
    ):
        found = finding(row)
        assert (found.verdict, "data.columns" in found.found) == ("WARN", False), row


def test_a_column_that_rows_may_lack_is_looked_for_in_more_than_the_first_and_another_in_that_alone():
    data = DataConfig(columns={"reasoning": "cot"})
    rows = [RawRow(f"f:{number}", {**QA, **({"cot": "Hm, yes."} if number == 5 else {})}) for number in range(1, 9)]
    read_rows, shape = detect_format(iter(rows), data)
    assert len(read_rows) == 5
    assert "reasoning_content" not in read_example(rows[0], shape, data).messages[-1]
    assert read_example(rows[4], shape, data).messages[-1]["reasoning_content"] == "Hm, yes."
    for columns in ({"reasoning": "cott"}, {"prompt": "quest"}):
        with pytest.raises(DataError, match=r"f:1: data\.columns names .*; the columns are: question, answer"):
            detect_format(iter(rows), DataConfig(columns=columns))
    rows = [RawRow("f:1", {"asked": "a", "other": "x"}), RawRow("f:2", {"asked": "a", "said": "b"})]
    with pytest.raises(DataError, match=r"f:1: data\.columns names said; the columns are: asked, other"):
        detect_format(iter(rows), DataConfig(columns={"prompt": "asked", "completion": "said"}))


def test_a_file_may_lack_a_mapped_column_where_it_has_none_that_could_be_meant():
    columns = {"prompt": "frage", "context": "absatz", "completion": "antwort"}
    rows = [{"frage": "Was?", "antwort": "Das.", "url": "u", "system": "Kurz."}] * 2
    data = DataConfig(columns=columns)
    _, shape = detect_format((RawRow(f"f:{number}", row) for number, row in enumerate(rows)), data)
    assert read_example(RawRow("f:1", rows[0]), shape, data).messages[0]["role"] == "system"
    with pytest.raises(DataError, match=r"data\.columns names absatz; the columns are: .*, abstaz"):
        detect_format(iter([RawRow("f:1", {**rows[0], "abstaz": PASSAGE})]), data)
    with pytest.raises(DataError, match=r"data\.columns names antwort"):
        detect_format(iter([RawRow("f:1", {"frage": "Was?", "absatz": PASSAGE})]), data)


def hint(row: dict[str, Any]) -> str:
    with pytest.raises(DataError) as refused:
        read(row)
    return str(refused.value)


def test_columns_are_guessed_by_names_and_values_and_nothing_is_guessed_where_they_are_unclear():
    for row, columns in (
        ({"question_id": "1", "prompt_length": "7", "user_query": "q", "botReply": "a"},
         {"prompt": "user_query", "completion": "botReply"}),
        ({"task": "Add two.", "solution": "4"}, {"prompt": "task", "completion": "solution"}),
        ({"سؤال": "متى", "إجابة": "الآن"}, {"prompt": "سؤال", "completion": "إجابة"}),
        ({"prompt_text": "q", "response_a": "one"}, {"prompt": "prompt_text", "completion": "response_a"}),
        ({"Unterhaltung": json.dumps(TURNS["messages"]), "user_id": "7"}, {"messages": "Unterhaltung"}),
        ({"system_prompt": "Be brief.", "user_prompt": "Which?", "assistant_response": "The hall's."},
         {"prompt": "user_prompt", "completion": "assistant_response"}),
    ):  # fmt: skip
        assert guess_columns(row) == columns
        assert isinstance(proposed(hint(row), row), Chat)
    for row in (
        {"prompt_text": "q", "model_a": "m", "response_a": "one", "response_b": "two"},
        {"system": "You are.", "chat": "USER: q\n\n\nASSISTANT: a <|endoftext|>"},
        {"id": "7", "data": "words"},
        {"nix": 7, "answer": 8},
    ):
        assert guess_columns(row) == {}
        assert "completion: ANSWER" in hint(row)


def test_real_files_hold_no_column_that_would_be_missed():
    for name in ("bundled/rows", "sft"):
        for path in sorted(Path(data_file(name)).rglob("*.json*")):
            stats = RowStats()
            for _, example in ExampleReader(path, DataConfig(), split="train").numbered_examples():
                assert not isinstance(example, BadRow), path
                stats.count_example(example)
            assert not [one for one in judge_columns(stats, DataConfig()) if one.verdict == "WARN"], path
            assert stats.chats + stats.texts > 0, path


ASKED, ANSWERED = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
PAIR_TURNS: Any = chat("q", "a")["messages"]
OTHER_TURNS = chat("q", "b")["messages"]
KTO = "is false: an answer that is not wanted (KTO)"
DPO = "preferences (a chosen and a rejected answer, as for DPO)"


@pytest.mark.parametrize(("row", "kind", "columns"), [
    ({"messages": PAIR_TURNS, "label": False}, f"label {KTO}", {"messages": "messages"}),
    ({"instruction": "q", "output": "a", "label": "False"}, f"label {KTO}", None),
    ({"conversations": [ASKED], "chosen": ANSWERED, "rejected": {"from": "gpt", "value": "b"}}, DPO, None),
    ({"messages": PAIR_TURNS, "chosen": PAIR_TURNS, "rejected": OTHER_TURNS}, DPO, None),
    ({"messages": PAIR_TURNS, "chosen": "x", "rejected": "y"}, DPO, {"messages": "messages"}),
    ({"messages": PAIR_TURNS, "rejected_response": "b"}, DPO, None),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, DPO, {"prompt": "prompt", "completion": "chosen"}),
    ({"prompt": "q", "chosen": PAIR_TURNS, "rejected": OTHER_TURNS}, DPO, {"messages": "chosen"}),
    ({"prompt": "q", "chosen": PAIR_TURNS, "rejected": json.dumps(OTHER_TURNS)}, DPO, None),
    ({"chosen": PAIR_TURNS, "rejected": OTHER_TURNS}, DPO, {"messages": "chosen"}),
    ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, DPO, None),
    ({"query": "q", "answer": "a", "negative": "an other passage"}, "for retrieval or embeddings", None),
    ({"question": "q", "choices": ["x", "y"], "answer": 1}, "multiple choice", None),
    ({"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}, "multiple choice", None),
])  # fmt: skip
def test_a_row_of_another_kind_is_named_and_the_mapping_of_its_message_trains_what_it_says(row, kind, columns):
    found = read(row)
    assert isinstance(found, BadRow), found
    assert kind in found.reason
    assert "data.columns" in found.detail or "column of its own" in found.detail
    if columns is not None:
        assert f"{{{', '.join(f'{known}: {theirs}' for known, theirs in columns.items())}}}" in found.detail
        assert list(read(row, columns=columns).messages) == PAIR_TURNS


@pytest.mark.parametrize("key", ["messages", "conversations", "dialog", "turns", "conversation"])
@pytest.mark.parametrize("pack", [list, json.dumps])
def test_texts_without_speakers_are_turns_only_where_it_is_said(key, pack):
    row = {"question_id": 81, key: pack(["Compose a blog post.", "Rewrite it."]), "reference": []}
    found = read(row)
    assert isinstance(found, BadRow)
    assert "data.turns_without_roles=alternate" in found.detail
    taken = read(row, turns_without_roles="alternate")
    assert list(taken.messages) == chat("Compose a blog post.", "Rewrite it.")["messages"]


INNOCENT: dict[str, list[Any]] = {
    "label": [True, "true", 1, 3, "math", "", None, 0.5, ["a"], "falsehood", "desirable", "1"],
    "kto_tag": [True, None], "undesirable": [False, 0, None, "no"], "is_desirable": [True, 1, None],
    "chosen": [True, False, None, "yes", 1], "rejected": [True, False, None, "", "no", "False", 0, [], {}, " "],
    "negative": [True, 0, None, "no", -1], "choices": [None, [], 3, "one of them", ["x", "y"]],
    "options": [{"temperature": 0.5, "top_p": 1}, None], "labels": [["a", "b"], [1, 0]], "completions": [2, ["x"]],
    "category": ["brainstorm"], "score": [0.0, -1, 1], "tags": [["x"], "x"], "preference": [True],
    "meta": [{"label": False, "rejected": "b"}],
}  # fmt: skip
"""Columns of real data sets with values that say nothing against the row."""


def _rows() -> list[dict[str, Any]]:
    """A row of every format, with answers of several words."""
    rows = []
    for shape in FORMATS:
        if shape.name in TEXT_COLUMNS:
            rows.append({shape.required_columns[0]: "some words"})
        elif len(shape.required_columns) == 1:
            rows.append({shape.required_columns[0]: PAIR_TURNS})
        elif shape.kind == "calls":
            call = {"name": "look_up", "arguments": {"word": "light"}}
            rows.append({"query": "what is it", "answers": [call], "tools": [{"name": "look_up", "parameters": {}}]})
        else:
            rows.append({shape.required_columns[0]: "what is it", shape.required_columns[1]: "it is that"})
    return rows


def test_innocent_columns_change_nothing():
    """Every format with random columns beside it, seeded: the example is that of the row alone."""
    for label in (0, 1, True, False, "neg", "false"):  # which plain text may have
        assert read({"text": "a film review", "label": label}).text == "a film review"
    chance = random.Random(13)
    for row in _rows():
        alone = read(row)
        for _ in range(100):
            names = [key for key in chance.sample(sorted(INNOCENT), k=chance.randint(1, 6)) if key not in row]
            extra = {key: chance.choice(INNOCENT[key]) for key in names}
            items = list({**row, **extra}.items())
            chance.shuffle(items)
            if recognise_format(dict(items)) is recognise_format(row):
                assert read(dict(items)) == alone, (row, extra)


def test_what_tells_another_kind_is_found_among_any_other_columns():
    chance = random.Random(14)
    undesired = [False, "false", " False", 0, "0", 0.0, "undesirable", "rejected"]
    other_answers = ["another answer", PAIR_TURNS, [{"role": "assistant", "content": "b"}], {"x": "y"}]
    telling = {key: [True, "true", 1, "1"] if "un" in key else undesired for key in PREFERENCE_TAGS}
    telling |= dict.fromkeys(REJECTED_COLUMNS, other_answers)
    telling |= {key: ["an other passage", ["x"], '["x", "y"]'] for key in NEGATIVE_COLUMNS}
    refused = 0
    for row in _rows():
        for key, values in telling.items():
            if key in PREFERENCE_TAGS and set(row) & set(TEXT_COLUMNS):
                continue
            names = chance.sample(sorted(set(INNOCENT) - {*row, *telling, "chosen"}), k=3)
            extra = {name: chance.choice(INNOCENT[name]) for name in names}
            found = read({**row, **extra, key: chance.choice(values)})
            assert isinstance(found, BadRow), (row, key)
            refused += 1
    assert refused > 500


@pytest.fixture
def story(tmp_path, tiny_llama, monkeypatch, succeed):
    """Commands in a folder with 40 rows that hold a passage and a flag: their printed text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHY", "0")
    asked = {"question": "Which lamp is {}?", "passage": f"{PASSAGE} {{}}", "answer": "The {}th.", "url": "u"}
    rows: list[dict[str, Any]] = [{key: text.format(n) for key, text in asked.items()} for n in range(40)]
    rows[3]["skip"] = True
    own = write_rows(Path("own.jsonl"), rows)
    data = {"val_fraction": 0.2, "process": {"raw_path": str(own)}}
    config = write_run(tmp_path, tiny_llama, own, data=data, model={"max_seq_len": 128}, train={"max_steps": 1})
    return lambda name, *words: succeed(name, "--config", str(config), "eval.before_training=false", *words)


@pytest.mark.build
def test_every_command_that_reads_rows_says_what_would_be_missed(story, succeed, tiny_llama):
    said = (
        "not read: passage (text that the question may be about, 40 rows), skip (says what is trained, or is left out, "
        "1 row); data.columns={context: passage} reads passage as text behind the question; also not read: url"
    )
    assert said in story("check").replace("\n", " ")
    for name in ("plan", "preview", "process"):
        assert story(name).count(said) == 1, name
    mapped = "data.columns={context: passage}"
    assert "noon" in story("preview", mapped, "--row", "1").replace("¦", "")
    told = story("check", mapped)
    assert ("passage" in told.replace(mapped, ""), "not read: skip" in told) == (False, True)
    succeed("new", "--model", str(tiny_llama), "--data", "own.jsonl", "--out", "new.yaml")
    assert f"# Columns {said}\n" in Path("new.yaml").read_text()
    (line,) = [line for line in story("train").splitlines() if "passage" in line]
    assert "Data train: columns: not read: passage (text that the question may be about," in line
    (run,) = Path("outputs").iterdir()
    report = json.loads((run / "manifest.json").read_text())["data"]["train"]["report"]
    assert report["unused"] == ["passage", "skip", "url"]


@pytest.mark.parametrize(("items", "kind"), [
    ([{"function": {}}, {"parameters": {}}], "tools"), ([{"function": {}}, {"score": 1}], ""), ([{"score": 1}], ""),
])  # fmt: skip
def test_tools_are_told_by_what_all_of_them_are_made_of(items, kind):
    assert missed_column_kind("meta", items, is_text=False, answer_chars=10_000) == kind


@pytest.mark.parametrize(("words", "kind"), [(39, ""), (40, "long")])
def test_a_text_of_forty_words_is_long_however_long_the_answer_is(words, kind):
    text = " ".join(["lamp"] * words)
    assert missed_column_kind("anything", text, is_text=True, answer_chars=10_000) == kind
