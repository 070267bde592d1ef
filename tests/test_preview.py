"""The preview: what a token shows as, what is marked, what no text of the data can do to page or terminal."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from sft_play.commands.rows import Preview, load_row_tools
from sft_play.commands.rows import preview as preview_of
from sft_play.config.load import load_config
from sft_play.data import preview as page_parts
from sft_play.data.masks.token_row import format_row
from sft_play.data.preview import PreviewRow, TokenBytes, TokenPiece, format_plain_lines, split_token_pieces
from sft_play.data.sources.examples import ExampleReader
from sft_play.errors import DataError
from tests.bundled import there, tokenizer_folder
from tests.conftest import chat, write_rows, write_run
from tests.image_families import make_image_model

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)> \"'& \x1b[31mred\x1b[0m\x07 \u202egnp.exe\u202c ]] [[ ~~"


def run_yaml(folder: Path, model: Path, rows: list[dict[str, Any]]) -> Path:
    return write_run(folder, model, write_rows(folder / "rows.jsonl", rows), model={"max_seq_len": 256})


def look(folder: Path, model: Path, rows: list[dict[str, Any]], *words: str, **wish: Any) -> Preview:
    loaded = load_config(run_yaml(folder, model, rows), overrides=words)
    asked = {"count": None, "row": None, "page": folder / "page.html", "force": False, **wish}
    return preview_of(loaded, **asked)


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.tokens: list[tuple[str, str]] = []
        self._in_token = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        classes = dict(attrs).get("class") or ""
        if tag == "span" and "pre" in self.tags and "t" in classes.split():  # not the legend above
            self.tokens.append((classes, ""))
            self._in_token = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._in_token = False

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"
        if self._in_token:
            name, text = self.tokens[-1]
            self.tokens[-1] = (name, text + data)


TOKENIZERS = ("bundled/chatml", "bundled/metaspace", "bundled/rebuilt", "bundled/pad_is_eos", "bundled/bytes",
              "Qwen2.5-Instruct", "Mistral-7B-Instruct-v0.3", "Phi-3-mini-4k-instruct", "SmolLM2", "gpt2")  # fmt: skip


@pytest.mark.parametrize("name", there(TOKENIZERS))
def test_the_pieces_of_real_tokenizers_are_the_text(name):
    """Byte-level vocabularies give the text back byte for byte; SentencePiece puts one space before it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(name))
    text = "héllo 👩‍👩‍👧 日本語\n\n  y\t<0x41> ▁ مرحبا é 🇩🇪 \x00"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = split_token_pieces(ids, ids, TokenBytes(tokenizer), kept_flags=[True] * len(ids))
    joined = "".join(piece.text for piece in found)
    assert joined.removeprefix(" ").replace(" ", "▁") == text.replace(" ", "▁")
    assert [number for piece in found for number in piece.ids] == ids
    assert not any(piece.is_special for piece in found)
    assert not re.search("[\udc80-\udcff]", joined)  # bytes are in a piece with those that complete their character
    ids = tokenizer("a 😀", add_special_tokens=False)["input_ids"]
    if len(ids) > 3:  # a character of which only a part is trained is shown by its bytes
        labels = [*[-100] * (len(ids) - 1), 1]
        found = split_token_pieces(ids, labels, TokenBytes(tokenizer), kept_flags=[True] * len(ids))
        assert "".join(map(page_parts.character_sign, found[-1].text)) == "⟨0x80⟩"
        assert (found[-1].is_trained, found[-2].is_trained) == (True, False)
    if name in ("bundled/chatml", "Qwen2.5-Instruct"):
        ids = tokenizer("<tool_call>a<|im_end|>")["input_ids"]
        found = split_token_pieces(ids, ids, TokenBytes(tokenizer), kept_flags=[True] * len(ids))
        shown_pieces = [(piece.text, piece.is_special) for piece in found]
        assert shown_pieces == [("<tool_call>", True), ("a", False), ("<|im_end|>", True)]


def test_a_cut_row_is_the_beginning_the_end_or_both_ends_of_the_whole_one():
    for kept in ([1, 2], [3, 4], [1, 3, 4], [1, 2, 3, 4]):
        assert page_parts.kept_token_flags([1, 2, 3, 4], kept) == [number in kept for number in range(1, 5)]


def test_long_examples_lose_the_middles_of_their_stretches_with_their_number():
    row = [TokenPiece("a", (1,)) for _ in range(1_000)] + [TokenPiece("b", (2,), is_trained=True) for _ in range(30)]
    found = page_parts.shorten_pieces(row, 100)
    gaps = [item for item in found if isinstance(item, str)]
    assert gaps == ["… 950 tokens not shown …"]  # 100 for two stretches
    assert sum(1 for item in found if not isinstance(item, str) and item.is_trained) == 30
    assert page_parts.shorten_pieces(row, 2_000) == row


def shown(found: list[TokenPiece], **more: Any) -> PreviewRow:
    ids = tuple(number for piece in found for number in piece.ids)
    labels = tuple(number if piece.is_trained else -100 for piece in found for number in piece.ids)
    return PreviewRow(1, "a.jsonl:1", ids, labels, tuple(found), **more)


def test_plain_text_marks_what_is_trained_and_what_is_cut():
    pieces = [TokenPiece("hi", (1,)), TokenPiece(" yes", (2,), is_trained=True)]
    pieces.append(TokenPiece("no", (3,), is_trained=True, is_kept=False))
    row = shown(pieces, cut_tokens=1, lost_trained_tokens=1)
    cut = "max_seq_len cuts 1 tokens, 1 of them trained"
    first = f"Row 1 (a.jsonl:1): 3 tokens; 2 trained (67%); {cut}"
    assert format_plain_lines(row) == [first, "  hi[[·yes]]", f"  --- {cut} ---", "  ~~[[no]]~~"]
    # texts cannot write our marks
    lines = format_plain_lines(shown([TokenPiece("a[[b]]~~", (1,)), TokenPiece("[", (2,)), TokenPiece("[", (3,))]))
    assert lines[1] == "  a[\\[b]\\]~\\~¦[¦["


def test_nothing_of_a_row_reaches_a_terminal_as_a_control_character():
    row = shown([TokenPiece(NASTY, (1,), is_trained=True)], reason="x\x1b[2J", raw_text="\x1b]0;title\x07 \u202e")
    text = page_parts.format_terminal_text(row).plain + "".join(format_plain_lines(row))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "⟨U+001B⟩[31m" in text


def test_colours_are_drawn_on_a_terminal_only(monkeypatch):
    row = shown([TokenPiece("hi", (1,)), TokenPiece("yes", (2,), is_trained=True)])
    found = Preview("a.jsonl", 1, (row,), (), Path("page.html"))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert (found.draw(terminal), found.draw(file)) == (True, False)
    assert ("\x1b[" in terminal.getvalue(), file.getvalue()) == (True, "")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not found.draw(terminal)


def test_the_page_holds_nothing_of_the_data_but_text():
    row = shown([TokenPiece(NASTY, (1,), is_trained=True)], reason=NASTY, raw_text=NASTY, notes=(NASTY,))
    text = page_parts.render_html_page([row], title=NASTY, intro_lines=[NASTY])
    page = Page(text)
    allowed = ("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "section", "pre", "span")
    assert set(page.tags) == set(allowed)
    assert {name for name, _ in page.attributes} <= {"lang", "charset", "http-equiv", "content", "name", "class", "dir"}
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    text.encode("utf-8")


def test_the_page_allows_its_own_style_and_nothing_else():
    text = page_parts.render_html_page([], title="t", intro_lines=[])
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'" in text
    assert not re.search(r"url\(|https?://", text)


def test_the_page_shows_every_token_in_order(tiny_llama, tmp_path):
    found = look(tmp_path, tiny_llama, [chat("hello there", "the light is on")])
    page = Page((tmp_path / "page.html").read_text())
    trained, prompt = "the·light·is·on<|im_end|>", "<|im_start|>user⏎\nhello·there<|im_end|>⏎\n<|im_start|>assistant⏎\n"
    assert "".join(text for _, text in page.tokens) == f"{prompt}{trained}⏎\n"
    assert "".join(text for name, text in page.tokens if "y" in name.split()) == trained
    assert found.examples[0].method


def test_truncation_is_marked_with_its_counts(tiny_llama, tmp_path):
    found = look(tmp_path, tiny_llama, [chat("hello", "yes no " * 40)], "model.max_seq_len=24")
    example = found.examples[0]
    assert example.cut_tokens == len(example.ids) - 24
    assert sum(len(piece.ids) for piece in example.pieces if not piece.is_kept) == example.cut_tokens
    page = (tmp_path / "page.html").read_text()
    assert f"max_seq_len cuts {example.cut_tokens} tokens, {example.lost_trained_tokens} of them trained" in page
    assert any("x" in name.split() for name, _ in Page(page).tokens)


def test_a_bad_row_is_shown_with_its_reason_and_how_it_begins(tiny_llama, tmp_path):
    bad = {"messages": [{"role": "asistant", "content": "<b>\x1b"}]}
    found = look(tmp_path, tiny_llama, [chat("a", "b"), bad])
    assert 'unknown role "asistant"' in found.examples[1].reason
    lines = "\n".join(found.lines())
    assert "CANNOT BE USED: " in lines
    assert '"content": "<b>\\u001b"' in lines
    page = (tmp_path / "page.html").read_text()
    assert ("&lt;b&gt;" in page, "<b>" in page) == (True, False)


def test_rows_are_shown_by_number_or_evenly_and_one_beyond_the_file_is_refused(tiny_llama, tmp_path):
    rows = [chat(f"what is {n}?", f"it is {n}.") for n in range(9)]
    found = look(tmp_path, tiny_llama, rows, row=7)
    assert [example.row_number for example in found.examples] == [7]
    assert "it·is·6." in "".join(found.lines()).replace("¦", "")
    assert [example.row_number for example in look(tmp_path, tiny_llama, rows).examples] == [1, 3, 5, 7, 9]
    (tmp_path / "page.html").unlink()
    with pytest.raises(DataError, match=r"ROW=10: .*rows\.jsonl has 9 rows; rows are counted from 1"):
        look(tmp_path, tiny_llama, [chat("a", "b")] * 9, row=10)
    assert not (tmp_path / "page.html").exists()


def test_the_command_says_plain_text_without_escapes_and_json(tiny_llama, tmp_path, command, monkeypatch):
    config = run_yaml(tmp_path, tiny_llama, [chat("hi \x1b[31m", "yes")])
    monkeypatch.chdir(tmp_path)
    code, said = command("preview", "--config", str(config), "--n", "1")
    assert (code, "\x1b" in said, "<|im_end|>]]" in said) == (0, False, True)
    assert (tmp_path / "data" / "preview.html").is_file()
    code, said = command("preview", "--config", str(config), "--json")
    (example,) = json.loads(said)["examples"]
    assert (code, json.loads(said)["rows"]) == (0, 1)
    assert len(example["input_ids"]) == len(example["labels"]) == example["tokens"]
    assert example["trained"] == sum(label != -100 for label in example["labels"])


def test_documents_are_shown_whole_for_cpt(tiny_llama, tmp_path):
    found = look(tmp_path, tiny_llama, [{"text": "yes no " * 200}], "task_mode=cpt", "model.max_seq_len=32")
    assert (found.examples[0].cut_tokens, found.examples[0].method) == (0, "document")
    assert all(piece.is_trained for piece in found.examples[0].pieces)


# --- rows with images -----------------------------------------------------------------------------
def test_a_picture_is_shown_small_before_its_tokens_which_are_shown_once(tmp_path):
    base = make_image_model(tmp_path / "base", "qwen2_5_vl")
    for name, size in (("a.png", (240, 48)), ("b.png", (16, 16))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    rows = [{"question": "<image>or<image>?", "answer": "a.", "images": ["a.png", "b.png"]}, chat("no image", "no.")]
    lines = look(tmp_path, base, rows).lines()
    # pixels are 8 x 8 patches, four of them a token: 15 x 3 tokens and 1
    assert "  image 1: a.png, 240 x 48, 45 tokens" in [line.replace(f"{tmp_path}/", "") for line in lines]
    assert "<|vision_start|>¦<|image_pad|> x 45¦<|vision_end|>¦o¦r¦<|vision_start|>¦<|image_pad|>¦" in "\n".join(lines)
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert [value for name, value in page.attributes if name == "alt"] == ["image 1", "image 2"]
    assert "; img-src data:" in text
    before, first, between, second = re.split(r'<img src="data:image/jpeg;base64,([^"]+)" alt="image \d">', text)[:4]
    assert before.endswith("&lt;|vision_start|&gt;</span>")
    assert "&lt;|image_pad|&gt; x 45" in between
    sizes = [Image.open(io.BytesIO(base64.b64decode(one))).size for one in (first, second)]
    assert sizes == [(160, 32), (16, 16)]


def test_a_row_of_the_log_has_an_images_tokens_once_with_their_number(tmp_path):
    base = make_image_model(tmp_path / "base", "smolvlm")
    Image.new("RGB", (64, 32), "red").save(tmp_path / "a.png")
    loaded = load_config(run_yaml(tmp_path, base, [{"question": "<image>what?", "answer": "a.", "image": "a.png"}]))
    _, _, row_renderer = load_row_tools(loaded.config)
    reader = ExampleReader(tmp_path / "rows.jsonl", loaded.config.data, split="train", wants_text=False)
    (outcome,) = row_renderer.render_rows(reader.numbered_examples())
    shown_row = format_row(outcome.whole_row, AutoTokenizer.from_pretrained(base))
    assert "<row_1_col_1><image> x 4<fake_token_around_image><row_1_col_2><image> x 4" in shown_row
    assert shown_row.count("<image>") == outcome.whole_row.image_tokens // 4
