"""Answers of a finished run: prompts are training's, a file of them is resumed, and a chat takes its commands."""

import io
import json

import pytest
import torch

from sft_play.config.schema import DataConfig
from sft_play.errors import DataError
from sft_play.finished import respond
from sft_play.finished.respond import Conversation, Responder, infer, read_prompts
from sft_play.finished.run import find_finished_run
from tests.conftest import write_rows
from tests.finished_runs import finished_run, make_base
from tests.test_merge import llama

pytestmark = pytest.mark.build


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    base = make_base(folder / "base", llama())
    return find_finished_run(folder, str(finished_run(folder / "run", base)))


@pytest.fixture(scope="module")
def responder(run):
    return Responder(run)


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_prompt_is_what_training_put_before_the_answer(run, responder):
    from sft_play.finished.respond import load_held_out_rows

    split = load_held_out_rows(run).split
    for chat, row in zip(split.chats, split.rows, strict=True):
        trained = next(place for place, label in enumerate(row["labels"]) if label >= 0)
        assert responder.prompt_ids(chat.messages[:-1]) == row["input_ids"][:trained]


def test_a_streamed_answer_is_the_batched_one_shown_whole_and_sampling_follows_the_seed(responder):
    prompts = [responder.prompt_ids(question(text)) for text in ("hello there", "what is 12 + 30?", "né 日本 yes")]
    batched = responder.answer_texts(prompts, max_new_tokens=12)
    for prompt, answer in zip(prompts, batched, strict=True):
        shown: list[str] = []
        assert responder.stream(prompt, shown.append, max_new_tokens=12) == answer == "".join(shown)
    sampled = []
    for temperature in (2.0, 2.0, 0.0):
        torch.manual_seed(1)
        sampled.append(responder.stream(prompts[0], lambda _: None, max_new_tokens=12, temperature=temperature))
    assert sampled[0] == sampled[1] != sampled[2]


def test_prompts_of_every_kind_of_file_are_read(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("one\n\n two  \n")
    assert [list(prompt.messages) for prompt in read_prompts(text)] == [question("one"), question(" two  ")]
    rows = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "s"}, *question("q")]
    answered = [*turns, {"role": "assistant", "content": "a"}]
    write_rows(rows, [{"messages": turns}, {"messages": answered}])
    one, other = read_prompts(rows)
    assert one.messages == other.messages == tuple(turns)
    assert (one.reference, other.reference) == (None, "a")
    text.write_bytes("a\u2028b\r\nc".encode())
    assert [prompt.messages[0]["content"] for prompt in read_prompts(text)] == ["a\u2028b", "c"]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(tmp_path / "empty.txt")


@pytest.mark.parametrize(("row", "said", "reference", "columns"), [
    ({"id": 7, "prompt": "q"}, "q", None, {"id": 7}),
    ({"id": "a", "system": "s", "prompt": "q", "tag": [1]}, "s|q", None, {"id": "a", "tag": [1]}),
    ({"question": "q", "label": "spam", "score": 0.5}, "q", None, {"label": "spam", "score": 0.5}),
    ({"instruction": "q", "input": "i", "id": 1}, "q\ni", None, {"id": 1}),
    ({"instruction": "q", "context": "c", "output": "a"}, "q\nc", "a", {}),
    ({"query": "q", "text": "other"}, "q", None, {"text": "other"}),
    ({"prompt": "q", "completion": "a", "id": 3}, "q", "a", {"id": 3}),
    ({"prompt": question("q"), "id": 3}, "q", None, {"id": 3}),
    ({"messages": [*question("q"), {"role": "assistant", "content": "a"}], "n": 1}, "q", "a", {"n": 1}),
    ({"messages": question("q"), "system": "s", "question": "not read"}, "s|q", None, {"question": "not read"}),
    ({"conversations": [{"from": "human", "value": "q"}], "id": "x"}, "q", None, {"id": "x"}),
    ({"conversations": [["q", "a"], ["r", "b"]]}, "q|a|r", "b", {}),
    ({"messages": json.dumps(question("q")), "id": 1}, "q", None, {"id": 1}),
    ({"frage": "q", "id": 1}, "q", None, {"id": 1}),
    ({"frage": "q", "passage": "p", "cot": "think", "id": 1}, "q\np", None, {"id": 1, "cot": "think"}),
])  # fmt: skip
def test_a_row_is_a_prompt_with_its_further_columns(tmp_path, row, said, reference, columns):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    data = DataConfig(columns={"prompt": "frage", "context": "passage", "reasoning": "cot"})
    [prompt] = read_prompts(path, data)
    assert "|".join(message["content"] for message in prompt.messages) == said
    assert (prompt.reference, prompt.extra_columns) == (reference, columns)


def test_a_prompt_has_what_a_row_of_training_has_before_its_answer(tmp_path):
    path = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "Be terse."}]  # which stand in the output without their author's own form
    path.write_text(json.dumps({"messages": [{"role": "developer", "content": parts}, *question("q")]}) + "\n")
    terse = [{"role": "system", "content": "Be terse."}, *question("q")]
    assert read_prompts(path)[0].output_fields == {"messages": terse}
    table = tmp_path / "prompts.csv"
    table.write_text("id,question,answer\n1,q,NaN\n")
    assert (read_prompts(table)[0].reference, read_prompts(table)[0].extra_columns) == (None, {"id": "1"})
    table.write_text("id,question\n1,q\n2,NaN\n")
    with pytest.raises(DataError, match=r"prompts\.csv:3: no column is a prompt"):
        read_prompts(table)


def test_further_columns_of_prompts_stand_beside_the_answers(run, tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": n, "question": f"what is {n}?", "answer": None, "by": "me", "note": "é"} for n in range(3)]
    write_rows(source, rows)
    infer(run, source, target, max_new_tokens=3)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["id"], line["note"], line["input_by"]) for line in lines] == [(n, "é", "me") for n in range(3)]
    assert all(line["by"].startswith(run.folder.path.name) and "answer" in line for line in lines)
    write_rows(target, lines[:2])
    assert infer(run, source, target, max_new_tokens=3).resumed == 2
    source.write_text(source.read_text().replace('"id": 0', '"id": 10'))
    with pytest.raises(DataError, match="other prompts"):
        infer(run, source, target, max_new_tokens=3)


def test_a_file_is_answered_once_and_resumed_after_its_last_whole_line(run, tmp_path, monkeypatch):
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("".join(f"what is {n}\u2028?\n" for n in range(7)))
    monkeypatch.setattr(respond, "_CHUNK_PROMPTS", 2)
    whole = infer(run, source, target, max_new_tokens=6)
    assert (whole.prompts, whole.resumed) == (7, 0)
    lines = [f"{line}\n" for line in target.read_text().split("\n")[:-1]]
    assert [json.loads(line)["messages"][0]["content"] for line in lines] == [f"what is {n}\u2028?" for n in range(7)]
    target.write_text(lines[0] + lines[1][:20])
    assert (infer(run, source, target, max_new_tokens=6).resumed, target.read_text()) == (1, "".join(lines))
    assert infer(run, source, target, max_new_tokens=6).resumed == 7
    with pytest.raises(DataError, match="max_new_tokens=6"):
        infer(run, source, target, max_new_tokens=7)
    source.write_text("something else\n" * 7)
    with pytest.raises(DataError, match="other prompts"):
        infer(run, source, target, max_new_tokens=6)
    assert target.read_text() == "".join(lines)
    target.write_text("my notes\n")
    with pytest.raises(DataError, match="not an answer"):
        infer(run, source, target, max_new_tokens=6)
    assert target.read_text() == "my notes\n"


def test_every_row_that_is_no_prompt_is_named_with_what_it_holds(tmp_path):
    rows = tmp_path / "rows.jsonl"
    bad = {
        "prompt is 5, and has to be text": {"prompt": 5}, "prompt is null": {"prompt": None},
        "messages is empty": {"messages": []}, "pirate": {"messages": [{"role": "pirate", "content": "q"}]},
        "holds nothing that": {"messages": [{"role": "assistant", "content": "a"}]}, "left out": {"text": "x"},
    }  # fmt: skip
    write_rows(rows, [{"prompt": "good"}, *bad.values()])
    with pytest.raises(DataError) as caught:
        read_prompts(rows)
    told = str(caught.value)
    assert "6 of 7 rows are no prompts" in told
    assert [message in told for message in bad] == [True] * 5 + [False]  # five are listed
    assert [f"rows.jsonl:{line}" in told for line in range(1, 8)] == [False, True, True, True, True, True, False]
    rows.write_text(json.dumps({"id": 1, "frage": "q"}) + "\n")
    with pytest.raises(DataError, match=r"no column is a prompt \(columns: id, frage\); a prompt is a"):
        read_prompts(rows)


def test_prompts_have_the_system_prompt_that_rows_of_training_had(tmp_path):
    data = DataConfig.model_validate({"style": {"system": "Be terse.", "how": "prepend"}})
    text, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("q\n")
    turns = [{"role": "system", "content": "own"}, *question("q")]
    written = {"id": "1", "messages": turns, "source": "a.jsonl:1", "styled": True}  # by make style
    write_rows(rows, [{"prompt": "q"}, {"messages": turns}, written])

    def first_texts(path, data=None):
        return [prompt.messages[0]["content"] for prompt in read_prompts(path, data)]

    assert first_texts(text, data) == ["Be terse."]
    assert first_texts(rows, data) == ["Be terse.", "Be terse.\n\nown", "own"]
    assert first_texts(rows) == ["q", "own", "own"]


def test_a_chat_keeps_its_history_and_takes_its_commands(responder):
    shown: list[str] = []
    chat = Conversation(responder, shown.append, max_new_tokens=6)
    chat.handle_line("hello")
    chat.handle_line("what is 12?")
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant"] * 2
    asked = responder.prompt_ids(chat.messages[:3])
    assert [chat.messages[3]["content"]] == responder.answer_texts([asked], max_new_tokens=6)
    chat.handle_line("/reset")
    assert chat.messages == []
    chat.handle_line("/system you are terse")
    chat.handle_line("hello")
    terse = [{"role": "system", "content": "you are terse"}, {"role": "user", "content": "hello"}]
    assert [chat.messages[1]["content"]] == responder.answer_texts([responder.prompt_ids(terse)], max_new_tokens=6)
    chat.handle_line("/nonsense")
    assert "/reset forgets" in shown[-1]
    chat.handle_line("/exit")
    assert chat.has_ended


def test_a_chat_shows_control_characters_of_the_model_escaped(run, responder, command, monkeypatch):
    """Cut anywhere, since text comes in pieces; the conversation itself is kept as it is."""
    pieces = ["good\x1b", "[2J", "\x07\x9b31m", "\u202emorn", "\n\ting\r"]

    def stream(prompt, show, **_):
        for piece in pieces:
            show(piece)
        return "".join(pieces)

    monkeypatch.setattr(responder, "stream", stream)
    monkeypatch.setattr("sft_play.finished.respond.Responder", lambda _: responder)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\nnever said\n"))
    code, said = command("chat", "--run", str(run.folder.path), "--json")
    assert code == 0, said
    assert "good\\x1b[2J\\x07\\x9b31m\\u202emorn\n\ting\\r" in said
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(said)
    answer = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert [turn["content"] for turn in answer["messages"]] == ["hello", "".join(pieces)]


def test_the_base_answers_without_the_adapter_alone_and_beside_the_tuned_model(responder):
    prompt = responder.prompt_ids(question("hello there"))
    tuned = responder.answer_texts([prompt], max_new_tokens=8)[0]
    with responder.model.disable_adapter():
        base = responder.answer_texts([prompt], max_new_tokens=8)[0]
    assert base != tuned
    shown: list[str] = []
    chat = Conversation(responder, shown.append, max_new_tokens=8)
    chat.handle_line("/base")
    chat.handle_line("hello there")
    assert chat.messages[-1]["content"] == base
    chat.handle_line("/base")
    chat.handle_line("/reset")
    chat.handle_line("/both")
    shown.clear()
    chat.handle_line("hello there")
    assert ("".join(shown), chat.messages[-1]["content"]) == (f"base:  {base}\ntuned: {tuned}\n", tuned)
