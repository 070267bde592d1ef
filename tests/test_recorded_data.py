"""What the data layer makes of random conversations, odd rows and documents is what was recorded.

A change that is not meant to alter training data leaves every digest; one that is records them anew
(`python -m tests.test_recorded_data`), and its diff names the templates, files and answers that changed. Whether they
are right is what the judges of masks, the comparison with transformers and the tests of each format say.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.load import config_from_text, load_config
from sft_play.config.schema import DataConfig
from sft_play.data.files import BadRow
from sft_play.data.formats import Chat
from sft_play.data.packing import best_fit
from sft_play.data.render import Encoder, Renderer, TokenizerParts
from sft_play.errors import SftPlayError
from tests.models import CHATML, make_tokenizer

RECORD = Path(__file__).with_name("recorded_data.json")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
        },
    },
)
TURNS = "{% for m in messages %}"
TEMPLATES = {
    "chatml": CHATML,
    "header": TURNS
    + "[{{ m.role }}]{{ m.content | trim }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "no system": TURNS + "{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no end": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "drops think": TURNS + "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "calls": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "two ends": TURNS
    + "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "alternates": TURNS + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "prompts otherwise": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"loss_on": "completion", "on_inexact_mask": "train", "on_missing_end": "train"},
    {"loss_on": "all", "multi_turn": "split", "system_into_user": True, "merge_consecutive": True},
    {"special_tokens_in_text": "control", "truncate": "prompt", "on_missing_end": "train"},
    {"special_tokens_in_text": "fail", "truncate": "drop"},
)
PLAIN_WORDS = "hello there how are you light in kitchen is on 12 + 30 <|im_end|> </think> <think> é 語 yes no"
WORDS = [*PLAIN_WORDS.split(), "\n", "\t"]


def digest(value: Any) -> str:
    """Sixteen characters that stand for a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.choice([0, 1, 1, 2, 4, 9])))


def conversation(draw: random.Random) -> Chat:
    """Any roles in any order, mostly as people write them."""
    messages: list[dict[str, Any]] = []
    usual = [*(["system"] if draw.random() < 0.3 else []), *["user", "assistant"] * draw.randint(1, 3)]
    roles = (
        usual if draw.random() < 0.7 else draw.choices(["user", "assistant", "system", "tool"], k=draw.randint(1, 5))
    )
    for role in roles:
        message: dict[str, Any] = {"role": role, "content": text(draw)}
        if role == "assistant" and draw.random() < 0.2:
            message["reasoning_content"] = text(draw)
        if role == "assistant" and draw.random() < 0.15:
            arguments: Any = {"place": text(draw), "n": draw.randint(0, 9)}
            arguments = json.dumps(arguments) if draw.random() < 0.5 else arguments
            function = {"name": "look", "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "id": "Ab3dE6gH9", "function": function}]
        if role == "tool":
            message |= {"name": "look", "tool_call_id": "Ab3dE6gH9"}
        if draw.random() < 0.05:
            message["train"] = False
        messages.append(message)
    return Chat("f:1", tuple(messages), TOOLS if draw.random() < 0.3 else ())


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp(prefix="recorded-"))
    make_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def rows(template: str) -> dict[str, Any]:
    """Counts by what became of 60 conversations, and a digest of every token row and refusal."""
    parts = TokenizerParts.of(tokenizer())
    draw, lines, became = random.Random(len(template)), [], Counter[str]()
    for number, options in enumerate(OPTIONS):
        try:
            limit, one = 24 if number > 2 else 400, parts.with_template(template)
            renderer = Renderer(one, DataConfig(**options), max_seq_len=limit, encoder=Encoder(parts))
            renderer.turns()
        except SftPlayError as error:
            lines.append(str(error))
            continue
        for _ in range(12):
            made = renderer.render(conversation(draw))
            if isinstance(made, BadRow):
                became[made.reason] += 1
                lines.append((made.reason, made.detail))
                continue
            cut = renderer.cut(made)
            became[cut.reason if isinstance(cut, BadRow) else made.method] += 1
            facts = (made.spans, made.untrained_turns, made.stripped_think, made.special_in_text, made.notes)
            after = getattr(cut, "input_ids", None), getattr(cut, "labels", None)
            lines.append((made.text, made.input_ids, made.labels, made.method, facts, after))
    return {"became": dict(sorted(became.items())), "digest": digest(lines)}


# --- files of rows ----------------------------------------------------------------------------------------------------


def odd_rows(draw: random.Random) -> list[Any]:
    """Rows of many formats, some of them broken."""
    good = [
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"instruction": "do", "input": "it", "output": "done"},
        {"instruction": "do", "input": "", "output": "done", "history": [["x", "y"]]},
        {"prompt": "p", "completion": "c"},
        {"question": "q?", "answer": "a."},
        {"messages": [{"role": "system", "content": "s"}, *({"role": r, "content": r} for r in ("user", "assistant"))]},
    ]
    bad = [
        {"messages": []}, {"messages": [{"role": "user", "content": "alone"}]},
        {"messages": [{"role": "usr", "content": "x"}]},
        {"prompt": 3, "completion": "c"}, {}, {"messages": "text"}, {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": ""}]}, {"text": "just text"},
        {"messages": ["a", "b"]}, {"prompt": "p", "completion": "c", "label": False},
    ]  # fmt: skip
    shape = draw.choice(good)
    made = [{**shape, "n": number} if draw.random() < 0.2 else shape for number in range(draw.randint(3, 12))]
    return [*made, *draw.choices(good + bad, k=draw.randint(0, 4)), *draw.choices([shape], k=3)]


def answer(words: list[str], folder: Path) -> dict[str, Any]:
    """The exit code of a command and a digest of what it printed, without the folder and what a clock says."""
    import contextlib
    import io

    from sft_play.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    said = re.sub(r"\d+(\.\d+)? ?s\b|\d{4}-\d\d-\d\d\S*", "_", out.getvalue().replace(str(folder), "F"))
    return {"code": code, "said": digest(said)}


def written(folder: Path) -> str:
    """A digest of all rows below a folder, wherever it is."""
    files = sorted(folder.rglob("*.jsonl"))
    return digest([(path.name, path.read_text().replace(str(folder.parent), "F")) for path in files])


def processed(seed: int) -> dict[str, Any]:
    """What `process` makes of a folder of odd files."""
    from sft_play.data.process import process

    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "raw").mkdir()
        for number in range(draw.randint(1, 3)):
            made = odd_rows(draw)
            lines = "".join(json.dumps(row) + draw.choice(["\n", "\n", "\r\n", "\n\n"]) for row in made)
            if draw.random() < 0.2:
                lines += '{"broken": '
            (folder / "raw" / f"part{number}.jsonl").write_text(lines)
        run = config_from_text(
            f"model: {{name: {folder}}}\n", name="run.yaml",
            overrides=[
                f"data.process.raw_path={folder}/raw", f"data.process.out_dir={folder}/out",
                f"data.on_bad_row={draw.choice(['fail', 'skip', 'skip'])}",
                f"data.process.drop_duplicates={draw.choice(['true', 'false'])}",
                f"data.merge_consecutive={draw.choice(['true', 'false'])}",
                f"data.drop_empty={draw.choice(['true', 'false'])}",
                f"data.process.val_fraction={draw.choice([0.0, 0.3])}",
            ],
        )  # fmt: skip
        try:
            report = process(run)
        except SftPlayError as error:
            return {"refused": digest(str(error).replace(place, "F"))}
        told = [line.replace(place, "F") for line in report.lines()]
        return {"rows": written(folder / "out"), "told": digest(told)}


def documents(seed: int) -> dict[str, Any]:
    """What `dapt-docx` makes of documents in every text format."""
    from sft_play.data.documents import documents as read

    draw = random.Random(seed)
    pieces = {
        "md": ["# Title", "A *paragraph* with [a link](http://x.y) and `code`.", "- one\n- two\n    - three",
               "1. a\n2. b", "| a | b |\n|---|---|\n| 1 | 2 |", "```\ncode block\n```", "> quoted", "---"],
        "html": ["<h1>Title</h1>", "<p>A <b>paragraph</b> with <a href='x'>a link</a>.</p>",
                 "<ul><li>one</li><li>two</li></ul>",
                 "<table><tr><th>a</th><td>b</td></tr><tr><td>1</td><td>2</td></tr></table>", "<script>no()</script>",
                 "<pre>kept  as\n it is</pre>", "<nav>menu</nav>", "<p>caf&eacute; &lt;x&gt;</p>",
                 "<ol start=3><li>c</li></ol>"],
        "rst": ["Title\n=====", "A *paragraph* with ``code`` and `a link <http://x.y>`_.", "- one\n- two", "#. a\n#. b",
                "::\n\n    literal", ".. note:: careful", "=== ===\na   b\n=== ===\n1   2\n=== ===", ".. comment",
                "term\n  meaning"],
        "txt": ["A line.", "Another line\nthat goes on.", "   indented", "A line.", "\t tabs", "x" * 30],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "in").mkdir()
        for kind, parts in pieces.items():
            body = (
                "\n\n".join(draw.choices(parts, k=8))
                + "\n\n"
                + "The end of a document, long enough to be kept here. " * 4
            )
            (folder / "in" / f"doc.{kind}").write_text(f"<html><body>{body}</body></html>" if kind == "html" else body)
        _word_document(folder / "in" / "doc.docx", draw)
        run = config_from_text(
            f"model: {{name: {folder}}}\ntask_mode: cpt\n", name="run.yaml",
            overrides=[
                f"data.documents.path={folder}/in", f"data.documents.out_dir={folder}/out",
                f"data.documents.chunk_chars={draw.choice([200, 400, 20000])}",
                f"data.documents.drop_repeated={draw.choice(['true', 'false'])}", "data.documents.val_fraction=0.2",
            ],
        )  # fmt: skip
        try:
            read(run)
        except SftPlayError as error:
            return {"refused": digest(str(error).replace(place, "F"))}
        files = sorted((folder / "out").glob("*.jsonl"))
        found = [(path.name, path.read_text().replace(place, "F")) for path in files]
        return {"rows": digest(found)}


def _word_document(path: Path, draw: random.Random) -> None:
    import docx

    made = docx.Document()
    made.add_heading("Heading", level=draw.randint(1, 3))
    for _ in range(6):
        style = draw.choice([None, "List Bullet", "List Number", "List Bullet 2", "Quote"])
        made.add_paragraph(f"Paragraph {draw.randint(0, 9)} of the document with words.", style=style)
    table = made.add_table(rows=2, cols=2)
    for cell in (cell for row in table.rows for cell in row.cells):
        cell.text = f"cell {draw.randint(0, 9)}"
    made.add_paragraph("The closing paragraph of this document, long enough to be kept.")
    made.save(str(path))


def shown(seed: int) -> dict[str, Any]:
    """What check, preview and render say of a training file, and what they write."""
    from tests.models import make_llama

    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_llama(folder / "model", template=TEMPLATES[draw.choice(sorted(TEMPLATES))])
        made = [
            {"messages": list(chat.messages), **({"tools": list(chat.tools)} if chat.tools else {})}
            for chat in (conversation(draw) for _ in range(14))
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        config = folder / "run.yaml"
        config.write_text(
            f"model: {{name: {model}, max_seq_len: {draw.choice([24, 64, 200])}}}\n"
            f"data: {{train_path: {folder}/train.jsonl, val_path: null, test_path: null, val_fraction: 0.2,\n"
            f"  on_bad_row: {draw.choice(['skip', 'fail', 'skip'])}, max_lost_fraction: 1.0, on_missing_end: train,\n"
            f"  truncate: {draw.choice(['end', 'prompt', 'drop'])}, packing: {draw.choice(['none', 'best_fit'])}}}\n"
            f"tuning: {{mode: lora}}\noutput: {{dir: {folder}/outputs}}\n"
        )
        assert load_config(config).config.model.name == str(model)
        preview = answer(["preview", "--config", str(config), "--out", str(folder / "page.html"), "--n", "9"], folder)
        render = answer(["render", "--config", str(config), "--out", str(folder / "rendered")], folder)
        check = answer(["check", "--config", str(config), "--json"], folder)
        page = folder / "page.html"
        return {
            "preview": preview, "render": render, "check": check["code"],
            "page": digest(page.read_text().replace(place, "F")) if page.exists() else None,
            "rendered": written(folder / "rendered"),
        }  # fmt: skip


def packed(seed: int) -> dict[str, Any]:
    """How random lengths are packed."""
    draw = random.Random(seed)
    size = draw.randint(8, 64)
    packs = best_fit([draw.randint(1, size) for _ in range(draw.randint(1, 80))], size)
    return {"digest": digest([list(packs[number]) for number in range(len(packs))])}


ASKED: dict[str, tuple[Any, Any]] = {
    **{f"rows {name}": (rows, template) for name, template in TEMPLATES.items()},
    **{f"process {seed}": (processed, seed) for seed in range(24)},
    **{f"documents {seed}": (documents, seed) for seed in range(6)},
    **{f"shown {seed}": (shown, seed) for seed in range(4)},
    **{f"packed {seed}": (packed, seed) for seed in range(6)},
}


@pytest.mark.parametrize("name", ASKED)
def test_data_become_what_was_recorded(name):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(recorded) == set(ASKED), "record them anew: python -m tests.test_recorded_data"
    ask, of = ASKED[name]
    assert ask(of) == recorded[name]


if __name__ == "__main__":
    answers = {name: ask(of) for name, (ask, of) in ASKED.items()}
    RECORD.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
