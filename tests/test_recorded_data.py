"""What the data layer makes of random conversations, odd rows and documents is what was recorded.

A change that is not meant to alter training data leaves every digest; one that is records them anew
(`python -m tests.test_recorded_data`), and its diff names the templates, files and answers that changed. Whether they
are right is what the judges of masks, the comparison with transformers and the tests of each format say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sft_play.cli import main
from sft_play.config.load import config_from_text, load_config
from sft_play.config.schema import DataConfig
from sft_play.data.build.packing import pack_best_fit
from sft_play.data.build.splits import build_splits
from sft_play.data.checks import judge_split
from sft_play.data.masks.render import Renderer
from sft_play.data.masks.tokenizer import TokenizerParts
from sft_play.data.process import process_files
from sft_play.data.sources.files import find_data_paths
from sft_play.data.sources.formats import Chat, detect_format, to_example
from sft_play.data.sources.raw import BadRow, RawRow
from sft_play.errors import SftPlayError
from tests.conftest import digest, need_documents_extra, write_rows
from tests.models import CHATML, make_tokenizer

RECORD = Path(__file__).with_name("recorded_data.json")
PLACE = {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}}
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PLACE}},)
TURNS = "{% for m in messages %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": CHATML,
    "header": TURNS
    + "[{{ m.role }}]{{ m.content | trim }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "no system": TURNS + "{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "no end": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + PROMPT,
    "drops think": TURNS + "<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}" + PROMPT,
    "calls": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}" + PROMPT,
    "two ends": TURNS
    + "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    "<|im_end|>{% endfor %}" + PROMPT,
    "alternates": TURNS + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}" + PROMPT,
    "prompts otherwise": TURNS + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"loss_on": "completion", "on_inexact_mask": "train", "on_missing_end": "train"},
    {"loss_on": "all", "multi_turn": "split", "system_into_user": True, "merge_consecutive": True},
    {"special_tokens_in_text": "control", "truncate": "prompt", "on_missing_end": "train"},
    {"special_tokens_in_text": "fail", "truncate": "drop"},
)  # fmt: skip
PLAIN_WORDS = "hello there how are you light in kitchen is on 12 + 30 <|im_end|> </think> <think> é 語 yes no"
WORDS = [*PLAIN_WORDS.split(), "\n", "\t"]


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.choice([0, 1, 1, 2, 4, 9])))


def conversation(draw: random.Random) -> Chat:
    """Any roles in any order, mostly as people write them."""
    messages: list[dict[str, Any]] = []
    roles = [*(["system"] if draw.random() < 0.3 else []), *["user", "assistant"] * draw.randint(1, 3)]
    if draw.random() >= 0.7:
        roles = draw.choices(["user", "assistant", "system", "tool"], k=draw.randint(1, 5))
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
def tokenizer(*, begins: bool = False) -> Any:
    """A small tokenizer; `begins`: it writes a token before every text that it is asked for with special tokens."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp(prefix="recorded-"))
    make_tokenizer(folder)
    made = AutoTokenizer.from_pretrained(folder)
    if begins:
        token = ("<|endoftext|>", made.convert_tokens_to_ids("<|endoftext|>"))
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{token[0]} $A", pair=f"{token[0]} $A $B", special_tokens=[token]
        )
    return made


def rows(template: str) -> dict[str, Any]:
    """Counts by what became of conversations, and a digest of every token row and refusal."""
    draw, lines, became = random.Random(len(template)), [], Counter[str]()
    for number, options in enumerate(OPTIONS):
        parts = TokenizerParts.from_tokenizer(tokenizer(begins=number % 2 == 1))
        try:
            limit, one = 24 if number > 2 else 400, parts.replace_template(template)
            renderer = Renderer(one, DataConfig(**options), max_seq_len=limit)
            renderer.turn_locator()
        except SftPlayError as error:
            lines.append(str(error))
            continue
        own = []
        for _ in range(20):
            row = RawRow("f:1", written_otherwise(draw))
            _, shape = detect_format(iter([row]), DataConfig())
            own.append(to_example(row, shape, DataConfig()) if shape is not None else None)
        for chat in [*(conversation(draw) for _ in range(12)), *(one for one in own if isinstance(one, Chat))]:
            made = renderer.render(chat)
            if isinstance(made, BadRow):
                became[made.reason] += 1
                lines.append((made.reason, made.detail))
                continue
            cut = renderer.truncate(made)
            became[cut.reason if isinstance(cut, BadRow) else made.method] += 1
            facts = (made.spans, made.untrained_turns, made.stripped_think_pieces, made.special_token_count, made.notes)
            after = getattr(cut, "input_ids", None), getattr(cut, "labels", None)
            lines.append((made.text, made.input_ids, made.labels, made.method, facts, after))
    return {"became": dict(sorted(became.items())), "digest": digest(lines)}


def odd_rows(draw: random.Random) -> list[Any]:
    """Rows of many formats, some of them broken."""
    good = [
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
        {"instruction": "do", "input": "it", "output": "done"},
        {"instruction": "do", "input": "", "output": "done", "history": [["x", "y"]]},
        {"prompt": "p", "completion": "c"}, {"question": "q?", "answer": "a."},
        {"messages": [{"role": "system", "content": "s"}, *({"role": r, "content": r} for r in ("user", "assistant"))]},
    ]  # fmt: skip
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


def command(words: list[str]) -> tuple[int, str]:
    """The exit code of a command and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    return code, out.getvalue()


def answer(words: list[str], folder: Path) -> dict[str, Any]:
    """The exit code of a command and a digest of what it printed, without the folder and what a clock says."""
    code, printed = command(words)
    said = re.sub(r"\d+(\.\d+)? ?s\b|\d{4}-\d\d-\d\d\S*", "_", printed.replace(str(folder), "F"))
    return {"code": code, "said": digest(said)}


def written(folder: Path) -> str:
    """A digest of all rows below a folder, wherever it is."""
    files = sorted(folder.rglob("*.jsonl"))
    return digest([(path.name, path.read_text().replace(str(folder.parent), "F")) for path in files])


def processed(seed: int) -> dict[str, Any]:
    """What `process` makes of a folder of odd files."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "raw").mkdir()
        for number in range(draw.randint(1, 3)):
            ends = ["\n", "\n", "\r\n", "\n\n"]
            lines = "".join(json.dumps(row) + draw.choice(ends) for row in odd_rows(draw))
            if draw.random() < 0.2:
                lines += '{"broken": '
            (folder / "raw" / f"part{number}.jsonl").write_text(lines)
        run = config_from_text(
            f"model: {{name: {folder}}}\n", name="run.yaml",
            overrides=[
                f"data.process.raw_path={folder}/raw", f"data.process.out_dir={folder}/out",
                f"data.on_bad_row={draw.choice(['fail', 'skip', 'skip'])}",
                f"data.process.drop_duplicates={draw.choice(['true', 'false'])}",
                "data.process.near_duplicates=ignore",  # tests/test_process.py
                f"data.merge_consecutive={draw.choice(['true', 'false'])}",
                f"data.drop_empty={draw.choice(['true', 'false'])}",
                f"data.process.val_fraction={draw.choice([0.0, 0.3])}",
            ],
        )  # fmt: skip
        try:
            report = process_files(run)
        except SftPlayError as error:
            return {"refused": digest(str(error).replace(place, "F"))}
        told = [line.replace(place, "F") for line in report.lines()]
        return {"rows": written(folder / "out"), "told": digest(told)}


def documents(seed: int) -> dict[str, Any]:
    """What `dapt-docx` makes of text; that of other kinds is what their libraries read."""
    from sft_play.documents import convert_documents as read

    need_documents_extra()
    draw = random.Random(seed)
    pieces = {
        "md": ["# Title", "A *paragraph* with [a link](http://x.y) and `code`.", "- one\n- two\n    - three",
               "1. a\n2. b", "| a | b |\n|---|---|\n| 1 | 2 |", "```\ncode block\n```", "> quoted", "---",
               "<div>html <b>in</b> it</div>", "![an image](x.png)", "[ref]: http://x.y", "a  \nb", "Under\n=====",
               "<style>p {}</style>", "~~~py\nx = 1\n~~~", "* [ ] todo\n* [x] done", "&amp; &lt;",
               "term[^1]\n\n[^1]: a note",
               "    indented code\n    more", "| a |\n|---|", "#not a title", "1) one\n2) two"],
        "txt": ["A line.", "Another line\nthat goes on.", "   indented", "A line.", "\t tabs", "x" * 30],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "in").mkdir()
        for kind, parts in pieces.items():
            end = "The end of a document, long enough to be kept here. " * 4
            (folder / "in" / f"doc.{kind}").write_text("\n\n".join([*draw.choices(parts, k=9), end]))
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
        return {"rows": written(folder / "out")}


def checked(config: Path, folder: Path) -> dict[str, Any]:
    """The exit code of `check`, and a digest of what it says of the data; what it says of the machine is left out."""
    code, printed = command(["check", "--config", str(config), "--json"])
    answered = next(line for line in printed.splitlines() if line.startswith("{"))  # the log stands around it
    of_machine = ("model", "memory plan", "disk", "disk for the model")
    said = [list(one.values()) for one in json.loads(answered)["checks"] if one["name"] not in of_machine]
    return {"code": code, "said": digest(json.loads(json.dumps(said).replace(str(folder), "F")))}


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
        write_rows(folder / "train.jsonl", made)
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
        check = checked(config, folder)
        page = folder / "page.html"
        shows = digest(page.read_text().replace(place, "F")) if page.exists() else None
        return {"preview": preview, "render": render, "check": check, "page": shows,
                "rendered": written(folder / "rendered")}  # fmt: skip


def read(seed: int) -> dict[str, Any]:
    """What is read out of rows as people write them: roles, parts, calls and thoughts in every form."""
    draw, became, lines = random.Random(seed), Counter[str](), []
    for number in range(150):
        row = written_otherwise(draw)
        options = {"merge_consecutive": draw.random() < 0.3, "drop_empty": draw.random() < 0.3}
        options["turns_without_roles"] = draw.choice(["fail", "alternate"])
        _, shape = detect_format(iter([RawRow(f"f:{number}", row)]), DataConfig(**options))
        found = to_example(RawRow(f"f:{number}", row), shape, DataConfig(**options)) if shape else None
        became[found.reason if isinstance(found, BadRow) else type(found).__name__] += 1
        fields = dataclasses.asdict(found) if found is not None else None
        if isinstance(found, Chat):
            assert fields.pop("images") == ()
        lines.append(fields)
    return {"became": dict(sorted(became.items())), "digest": digest(lines)}


def written_otherwise(draw: random.Random) -> Any:
    """A row of messages in one of the ways that are in use, now and then broken."""
    role, content = draw.choice([("role", "content"), ("from", "value"), ("role", "text"), ("author", "content")])
    names = draw.choice([("user", "assistant"), ("human", "gpt"), ("User", "ASSISTANT"), ("prompter", "model")])

    def said() -> Any:
        plain = text(draw)
        parts = [{"type": "text", "text": plain}, {"type": "text", "text": "more"}]
        thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": plain}]
        return draw.choice([plain] * 40 + [parts, thought, None, [plain], f"<think>{plain}</think>{plain}", 7])

    def called() -> Any:
        given: Any = draw.choice([{"place": "a"}, '{"place": "a"}', "", None, "{broken", [1]])
        function = {"name": draw.choice(["look", "look", None]), draw.choice(["arguments", "parameters"]): given}
        call = draw.choice([{"type": "function", "function": function}, function, {"id": "x1", "function": function}])
        return draw.choice([[call], [call, call], call, json.dumps([call]), [], None])

    turns: list[Any] = []
    for number in range(draw.choice([1, 2, 2, 4, 4, 6])):
        turn: dict[str, Any] = {role: names[number % 2], content: said()}
        if number % 2 and draw.random() < 0.3:
            turn[draw.choice(["tool_calls", "function_call"])] = called()
        if number % 2 and draw.random() < 0.2:
            turn[draw.choice(["reasoning_content", "reasoning", "thinking"])] = draw.choice(["so", None, ""])
        if draw.random() < 0.1:
            turn[draw.choice(["weight", "train", "name", "loss"])] = draw.choice([0, 1, False, True, 0.5, "x", None])
        turns.append(turn)
    if draw.random() < 0.25:
        turns.insert(0, {role: draw.choice(["system", "developer"]), content: "be brief"})
    if draw.random() < 0.15:
        turns.append({role: draw.choice(["tool", "function", "observation", "ipython"]), content: "42"})
    row: dict[str, Any] = {draw.choice(["messages", "conversations", "conversation", "dialog"]): turns}
    if draw.random() < 0.1:
        row = {next(iter(row)): draw.choice([json.dumps(turns), [turns], ["a", "b"], ["a", "b", "c"], [["a", "b"]]])}
    tool = draw.choice([list(TOOLS), json.dumps(TOOLS), [TOOLS[0]["function"]], [], "none", None])
    more = {"tools": tool, "system": draw.choice(["s", "", None]), "id": 3, "source": "x", "images": []}
    return {**row, **{key: more[key] for key in more if draw.random() < 0.15}}


def split(seed: int) -> dict[str, Any]:
    """Token rows, reports and refusals of whole runs: chats, text and both, split off, packed, cut, left out."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chats = [{"messages": list(conversation(draw).messages)} for _ in range(draw.choice([4, 20, 60]))]
        chats += draw.choices(chats, k=draw.choice([0, 2]))
        counts = (draw.choice([1, 30]) for _ in range(draw.choice([1, 3, 30])))
        texts = [{"text": " ".join(text(draw) for _ in range(count))} for count in counts]
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
        (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        words = [f"data.val_path={draw.choice(['null', f'{folder}/chats.jsonl'])}", "data.test_path=null"]
        mode = draw.choice(["sft", "sft", "cpt", "cpt_mixed"])
        words += [f"task_mode={mode}", f"data.train_path={folder}/{'texts' if mode == 'cpt' else 'chats'}.jsonl"]
        if mode == "cpt":
            words[0] = f"data.val_path={draw.choice(['null', f'{folder}/texts.jsonl'])}"
        if mode == "cpt_mixed":
            words += [f"data.text_path={folder}/texts.jsonl", f"data.text_fraction={draw.choice([0.1, 0.5, 0.99])}"]
        words += [
            f"data.val_fraction={draw.choice([0.0, 0.0, 0.2]) if 'null' in words[0] else 0.0}",
            f"data.on_bad_row={draw.choice(['fail', 'skip', 'skip'])}", "data.on_missing_end=train",
            f"data.max_lost_fraction={draw.choice([0.02, 1.0, 1.0])}",
            f"data.truncate={draw.choice(['end', 'prompt', 'drop'])}",
            f"data.special_tokens_in_text={draw.choice(['plain', 'control', 'fail'])}",
            f"data.loss_on={draw.choice(['assistant', 'completion', 'all'])}",
            f"data.packing={draw.choice(['none', 'best_fit']) if mode == 'sft' else 'none'}",
        ]  # fmt: skip
        run = config_from_text("model: {name: m}\n", name="run.yaml", overrides=words)
        positions = draw.choice([None, 16, 4096])
        try:
            paths, limit = find_data_paths(run.data), draw.choice([16, 40, 300])
            made = build_splits(run, paths, tokenizer(), max_seq_len=limit, max_positions=positions)
        except SftPlayError as error:
            return {"refused": digest(str(error).replace(place, "F"))}
        found: dict[str, Any] = {"notes": digest([note.replace(place, "F") for note in made.notes])}
        for name in ("train", "val", "test"):
            if (part := getattr(made, name)) is not None:
                rows_of = [[list(row[key]) for key in ("input_ids", "labels")] for row in part.rows]
                stats = dataclasses.replace(part.stats, split=name)
                findings = judge_split(stats, run.data, max_seq_len=40, max_positions=None)
                told = [finding.found.replace(place, "F") for finding in findings]
                found[name] = {"rows": len(rows_of), "digest": digest(rows_of), "told": digest(told)}
        return found


def packed(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    size = draw.randint(8, 64)
    packs = pack_best_fit([draw.randint(1, size) for _ in range(draw.randint(1, 80))], size)
    return {"digest": digest([list(packs[number]) for number in range(len(packs))])}


ASKED: dict[str, tuple[Any, Any]] = {
    **{f"rows {name}": (rows, template) for name, template in TEMPLATES.items()},
    **{f"process {seed}": (processed, seed) for seed in range(24)},
    **{f"documents {seed}": (documents, seed) for seed in range(16)},
    **{f"shown {seed}": (shown, seed) for seed in range(9)},
    **{f"packed {seed}": (packed, seed) for seed in range(6)}, **{f"read {seed}": (read, seed) for seed in range(12)},
    **{f"split {seed}": (split, seed) for seed in range(60)},
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_data_become_what_was_recorded(name):
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(recorded) == set(ASKED), "record them anew: python -m tests.test_recorded_data"
    ask, of = ASKED[name]
    assert ask(of) == recorded[name]


if __name__ == "__main__":
    answers = {name: ask(of) for name, (ask, of) in ASKED.items()}
    RECORD.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
