"""Documents become clean text: every format, what is left out, what would do harm, and the same bytes again."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import shlex
import zipfile
import zlib
from pathlib import Path

import docx
import pytest

from sft_play import documents
from sft_play.config.load import load_config
from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.errors import DataError
from tests.bundled import there, word_files
from tests.conftest import need_documents_extra, refusal_of

need_documents_extra()

import openpyxl  # noqa: E402 - with the extra
import pptx  # noqa: E402

LONG = "This sentence is long enough that nobody takes it for the name of a section."
OTHER = "Another sentence that is long enough, and that says something else than the first."


def config(path: Path | str | list[str], out: Path, **options) -> RunConfig:
    asked = tuple(map(str, path)) if isinstance(path, list) else str(path)
    run = RunConfig(model={"name": "m"})
    section = DocumentsConfig(path=asked, out_dir=str(out), **options)
    return run.model_copy(update={"data": run.data.model_copy(update={"documents": section})})


def rows(out: Path, split: str = "train") -> list[dict]:
    path = out / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(path: Path, **options) -> str:
    return documents.read_document(path, DocumentsConfig(**options))


refusal = functools.partial(refusal_of, documents.UnreadableDocumentError, read)


def make_pdf(path: Path, pages: list[list[str]]) -> Path:
    """A PDF of lines in Helvetica, 14 points apart; an empty line is a gap."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        stream = b"BT /F1 10 Tf 50 780 Td "
        for line in lines:
            shown = line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)").encode("latin-1")
            stream += b"0 -14 Td " + (b"(" + shown + b") Tj " if line else b"")
        stream = zlib.compress(stream + b"ET")
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(stream), stream))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 800] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%b] >>" % (len(kids), b" ".join(kids))
    data, offsets = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, start=1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, item)
    start = len(data)
    data += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    data += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start)
    path.write_bytes(data)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "in"
    found.mkdir()
    return found


def test_a_long_document_is_cut_between_paragraphs(folder, tmp_path):
    (folder / "a.txt").write_text("\n\n".join(f"{n:03d} " + "x" * 96 for n in range(10)))
    documents.convert_documents(config(folder, tmp_path / "out", val_fraction=0.0, chunk_chars=250))
    # Two paragraphs of 100 characters and what is between them are 202; a third would be 304.
    found = [(len(row["text"]), row["text"][:4], row["part"], row["source"]) for row in rows(tmp_path / "out")]
    assert found == [(202, f"00{2 * n} ", n + 1, "a.txt") for n in range(5)]


def test_unreadable_documents_are_named_and_the_rest_goes_on(folder, tmp_path):
    (folder / "a.pdf").write_bytes(b"%PDF-1.4 and no more")
    with pytest.raises(DataError, match=r"none of the 1 document could be read(.|\n)*a\.pdf: "):
        documents.convert_documents(config(folder, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
    (folder / "good.txt").write_text("Text.")
    (folder / "b\x1b[31m\n.txt").write_bytes(b"\xff")
    (folder / "table.csv").write_bytes(b"a,b")
    report = documents.convert_documents(config(folder, tmp_path / "out", val_fraction=0.0))
    assert (report.ok, set(report.unreadable)) == (True, {"a.pdf", "b\x1b[31m\n.txt"})
    said = "\n".join(report.lines())
    for words in ("3 documents found, 1 read, 2 not", r"b\x1b[31m\n.txt:1: byte 0xFF at column 1", "1 .csv"):
        assert words in said
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report.as_json()
    assert report.as_json()["other_files"] == {".csv": 1}


def test_files_globs_and_lists_are_taken_and_names_stay_apart(tmp_path):
    for name in ("one/a.txt", "two/a.txt", "two/deep/b.txt", "two/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Text of {name}.")
    (tmp_path / "one" / "up").symlink_to(tmp_path / "one")
    (tmp_path / "one" / "self.txt").symlink_to(tmp_path / "one" / "self.txt")
    (tmp_path / "one" / "~$a.docx").write_bytes(b"lock")
    (tmp_path / "one" / ".hidden.txt").write_text("hidden")
    paths = [str(tmp_path / "one"), str(tmp_path / "two" / "**" / "*.txt"), str(tmp_path / "two" / "c.md")]
    report = documents.convert_documents(config(paths, tmp_path / "out", val_fraction=0.0))
    names = {row["source"] for row in rows(tmp_path / "out")}
    assert len(report.documents) == len(names) == 4
    assert ("deep/b.txt" in names, any(name.endswith("two/a.txt") for name in names)) == (True, True)


def test_a_document_stays_in_its_split_when_others_come(folder, tmp_path):
    def split() -> dict[str, str]:
        documents.convert_documents(config(folder, tmp_path / "out", val_fraction=0.4), force=True)
        return {row["source"]: name for name in ("train", "val") for row in rows(tmp_path / "out", name)}

    for n in range(20):
        (folder / f"m{n}.txt").write_text(f"Document {n}. {LONG}")
    before = split()
    contents = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert split() == before
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == contents
    for n in range(20):
        (folder / f"a{n}.txt").write_text(f"Document of others, {n}.\n\n{LONG}")
    after = split()
    assert (set(before.values()), {name: after[name] for name in before}) == ({"train", "val"}, before)


def test_copies_and_repeated_paragraphs_are_left_out_and_counted(folder, tmp_path):
    (folder / "a.txt").write_text(f"First.\n\n{LONG}\n\nYes.\n\n{OTHER}\n\n{OTHER}")
    (folder / "b.txt").write_text(f"Second.\n\n{LONG}\n\nYes.")
    (folder / "c.txt").write_text(f"First.\r\n\r\n{LONG}  \r\n\r\n\r\nYes.\r\n\r\n{OTHER}\r\n\r\n{OTHER}\r\n")
    (folder / "d.txt").write_text(f"{LONG}\n\n{OTHER}")
    report = documents.convert_documents(config(folder, tmp_path / "out", val_fraction=0.0))
    first = f"First.\n\n{LONG}\n\nYes.\n\n{OTHER}"
    assert [row["text"] for row in rows(tmp_path / "out")] == [first, "Second.\n\nYes."]
    assert (report.copies, report.repeated_paragraphs) == ({"c.txt": "a.txt"}, 4)


def test_text_that_repeats_stays_where_it_is_wanted_and_validation_never_takes_all_of_it(folder, tmp_path):
    (folder / "a.txt").write_text(f"First.\n\n{LONG}")
    (folder / "b.txt").write_text(f"Second.\n\n{LONG}")
    report = documents.convert_documents(config(folder, tmp_path / "out", val_fraction=0.0001, drop_repeated=False))
    assert [row["text"] for row in rows(tmp_path / "out")] == [f"First.\n\n{LONG}", f"Second.\n\n{LONG}"]
    assert (report.repeated_paragraphs, "no document has a hash in the share" in report.val_note) == (1, True)
    # headings and code are no repeats of anything, not of the same words in a paragraph either
    words = "# A heading of more than forty bytes, as few of them are"
    (folder / "a.txt").write_text(words.replace("of more", "of\nmore"))
    (folder / "b.txt").write_text(f"{words}\n\nSecond.")
    documents.convert_documents(config(folder, tmp_path / "headings"))
    assert rows(tmp_path / "headings")[1]["text"] == f"{words}\n\nSecond."
    (folder / "a.txt").write_text(f"First.\n\n{LONG}")
    (folder / "b.txt").unlink()
    text = next(t for t in map("Text {}.".format, range(99)) if hashlib.sha256(t.encode()).hexdigest() < "7")
    (folder / "a.txt").write_text(text)
    report = documents.convert_documents(config(folder, tmp_path / "all", val_fraction=0.5))
    assert [row["text"] for row in rows(tmp_path / "all")] == [text]
    assert "by their hashes all documents would be in it" in report.val_note
    assert [(tmp_path / out / "val.jsonl").exists() for out in ("out", "all")] == [False, False]


def test_files_that_somebody_edited_are_not_overwritten_and_what_was_written_is_no_document(folder):
    (folder / "a.txt").write_text("Text.")
    out = folder / "out"
    for _ in range(2):
        report = documents.convert_documents(config(folder, out))
        assert (len(report.documents), report.other_files) == (1, {})
    (out / "train.jsonl").write_text("mine")
    with pytest.raises(DataError, match="FORCE=1"):
        documents.convert_documents(config(folder, out))
    assert (out / "train.jsonl").read_text() == "mine"
    documents.convert_documents(config(folder, out), force=True)
    assert rows(out) == [{"text": "Text.", "source": "a.txt", "part": 1}]


def test_no_documents_says_where_it_looked_and_what_is_there(folder, tmp_path):
    (folder / "a.csv").write_text("x")
    missing = ((tmp_path / "nowhere", "nowhere does not exist"), (folder / "*.pdf", r"no file matches .*\*\.pdf"))
    for path, message in ((folder, r"no documents there .*there are 1 \.csv"), *missing):
        with pytest.raises(DataError, match=message):
            documents.convert_documents(config(path, tmp_path / "out"))


@pytest.mark.parametrize(("given", "wanted"), [
    ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne"), ("one\x0ctwo\u2029three", "one\n\ntwo\n\nthree"),
    ("co\u00adopera\ufefftion", "cooperation"), ("a\u00a0b\u2009c   \nd", "a b c\nd"), ("cafe\u0301", "café"),
    ("x\x00y\x07z\ud800", "xyz"), ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07end", "red end"),
    ("  indented\tstays", "  indented\tstays"), ("می\u200cخواهم 👩\u200d👩", "می\u200cخواهم 👩\u200d👩"),
])  # fmt: skip
def test_text_is_cleaned(given, wanted):
    assert documents.clean_text(given) == wanted


def test_paragraphs_end_at_blank_lines_keep_their_indents_and_cutting_loses_nothing_but_white_space():
    assert documents.split_paragraphs("\n\na\nb\n\n\n  c\n\n\n") == ["a\nb", "  c"]
    assert documents.split_paragraphs("a\n\n```\nb\n\n~~~\nc\n```\n\nd") == ["a", "```\nb\n\n~~~\nc\n```", "d"]
    assert documents.split_chunks(["x" * 30, "# Head", "y" * 20], limit=40) == ["x" * 30, "# Head\n\n" + "y" * 20]
    sentences = documents.split_chunks(["It is one. It is two. It is three."], limit=25)
    assert sentences == ["It is one. It is two. It", "is three."]
    source = "One sentence. Another one! " * 9 + "\n" + "word " * 30 + "\n    indented line\n" + "x" * 700 + "。字" * 50
    for start, limit in (("", 7), ("    ", 50), ("| ", 333)):
        pieces = documents.split_chunks(["# A heading", start + source, "End"], limit=limit)
        assert all(len(piece) <= limit for piece in pieces)
        assert "".join("".join(pieces).split()) == "".join(f"# A heading{start}{source}End".split())


def make_docx(path: Path) -> Path:
    made = docx.Document()
    made.add_heading("Heading", 1)
    made.add_paragraph("Plain paragraph.")
    made.add_paragraph("point", style="List Bullet")
    made.add_paragraph("number", style="List Number")
    table = made.add_table(rows=2, cols=2)
    for cell, text in zip((cell for row in table.rows for cell in row.cells), ("left", "right", "1", "2"), strict=True):
        cell.text = text
    made.sections[0].header.paragraphs[0].text = "Running head"
    made.save(str(path))
    return path


def test_word(tmp_path):
    path = make_docx(tmp_path / "a.docx")
    table = "|  |  |\n| --- | --- |\n| left | right |\n| 1 | 2 |"
    text = f"# Heading\n\nPlain paragraph.\n\n* point\n\n1. number\n\n{table}"
    assert (read(path), read(path, headers=True)) == (text, f"Running head\n\n{text}")


def test_excel_powerpoint_and_epub(tmp_path):
    book = openpyxl.Workbook()
    book.active.title = "Prices"
    book.active.append(["Fruit", "Price"])
    book.active.append(["apple", 3])
    book.save(tmp_path / "a.xlsx")
    assert read(tmp_path / "a.xlsx") == "## Prices\n| Fruit | Price |\n| --- | --- |\n| apple | 3 |"
    made = pptx.Presentation()
    slide = made.slides.add_slide(made.slide_layouts[1])
    slide.shapes.title.text = "What we do"
    slide.placeholders[1].text = "First point\nSecond point"
    made.save(str(tmp_path / "a.pptx"))
    found = read(tmp_path / "a.pptx")
    assert ("# What we do\n" in found, "First point\nSecond point" in found) == (True, True)
    parts = {
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="b.opf"/></rootfiles></container>',
        "b.opf": '<package xmlns:dc="d"><metadata><dc:title>The Book</dc:title></metadata><manifest>'
        '<item id="c" href="c.xhtml"/></manifest><spine><itemref idref="c"/></spine></package>',
        "c.xhtml": "<html><body><h1>One</h1><p>It was dark.</p></body></html>",
    }
    with zipfile.ZipFile(tmp_path / "a.epub", "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert read(tmp_path / "a.epub") == "**Title:** The Book\n\n# One\n\nIt was dark."


def test_pdf(tmp_path):
    lines = ["A Heading", "", "", "The first paragraph goes on", "over two lines (in brackets).", "", "", "The second."]
    found = read(make_pdf(tmp_path / "a.pdf", [lines, ["Another page."]]))
    first = "The first paragraph goes on\nover two lines (in brackets)."
    assert documents.split_paragraphs(found) == ["A Heading", first, "The second.", "Another page."]
    assert "run it through OCR first" in refusal(make_pdf(tmp_path / "b.pdf", [[], []]))


PAGE = """<!doctype html><html><head><title>T</title><script>var evil = 1</script><style>p{}</style></head><body>
<nav><a href="/">Home menu</a></nav><main><article><h1>The heading</h1>
<p>First paragraph of the story, long enough to look like a paragraph, with <b>bold</b> words in it.</p>
<p>Second paragraph of the story; it too is long enough to be body text.</p>
<pre>def f():
    return 1</pre><ul><li>point one</li><li>point two</li></ul></article></main>
<footer>Footer words</footer></body></html>"""


def test_a_page_keeps_its_main_part_or_all_of_it_in_the_encoding_that_it_declares(tmp_path):
    (tmp_path / "a.html").write_text(PAGE)
    main, whole = read(tmp_path / "a.html"), read(tmp_path / "a.html", drop_repeated=False)
    kept = ("# The heading\n", "with **bold** words", "def f():\n    return 1", "point two")
    for words in (*kept, "Home menu", "Footer words", "evil"):
        assert (words in main, words in whole) == (words in kept, words != "evil"), words
    for encoding in ("iso-8859-1", "utf-8", "gb18030"):
        page = f'<html><head><meta charset="{encoding}"></head><body><p>Grüße an die Welt</p></body></html>'
        (tmp_path / "a.html").write_bytes(page.encode(encoding))
        assert read(tmp_path / "a.html") == "Grüße an die Welt"


def test_text_is_taken_as_it_is_and_long_runs_of_spaces_take_no_time(tmp_path):
    text = "# Title\n\n- *one*\n    - two\n\n```\ncode\n\n\nmore\n```\n\n.. note:: `x`_\n\n    indented"
    for name, encoding in (("a.md", "utf-8"), ("a.rst", "utf-8-sig"), ("a.txt", "utf-8")):
        (tmp_path / name).write_bytes(text.encode(encoding))
        assert read(tmp_path / name) == text
    (tmp_path / "a.txt").write_text("a" + " " * 1_000_000 + "b" + "\n" * 1_000_000 + "c")
    assert [len(paragraph) for paragraph in documents.split_paragraphs(read(tmp_path / "a.txt"))] == [1_000_002, 1]


@pytest.mark.parametrize(("origin", "count", "without_text"), there([("bundled", 4, 1), ("shared", 39, 4)]))
def test_word_files_of_others_are_read(origin, count, without_text):
    whys = [why_not(path) for path in word_files(origin)]
    assert (len(whys), [why for why in whys if why]) == (count, ["holds no text"] * without_text)
    if origin == "bundled":
        revised = read(next(path for path in word_files("bundled") if path.name == "revised.docx"))
        assert ("What stays, what was added" in revised, "struck out" in revised) == (True, False)


def why_not(path: Path) -> str:
    try:
        return "" if read(path) else "nothing was said"
    except documents.UnreadableDocumentError as error:
        return str(error)


def test_what_cannot_be_read_is_said(tmp_path):
    cases = {
        "a.txt": (b"", "holds no text"), "b.txt": (b" \n\n", "holds no text"),
        "c.txt": (b"\x89PNG\r\n\x1a\n...", ":1: byte 0x89 at column 1 is not UTF-8"),
        "d.txt": (b"abc\n\x00\x01\x02", "is not text (it holds NUL bytes)"),
        "e.txt": (b"first\ncaf\xe9", ":2: byte 0xE9 at column 4 is not UTF-8 (looks like latin1)"),
        "f.txt": ("text".encode("utf-16"), "is UTF-16, not UTF-8: "),
        "g.docx": (b"just words", "cannot be read as docx: damaged"),
        "h.docx": (b"PK\x03\x04 and no more", "cannot be read as docx: damaged"),
        "i.pdf": (b"%PDF-1.4 and no more", "pdf"),
        "j.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "an Office file from before 2007"),
    }  # fmt: skip
    for name, (data, why) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert why in refusal(tmp_path / name), name
    assert "cannot be opened: No such file" in refusal(tmp_path / "gone.txt")


def test_files_with_bytes_changed_end_in_a_reason(tmp_path):
    make_pdf(tmp_path / "a.pdf", [["Some words.", "", "More words."]] * 3)
    for good in (make_docx(tmp_path / "a.docx"), tmp_path / "a.pdf"):
        data = good.read_bytes()
        for n in range(20):
            changed = bytearray(data)
            changed[(n * 7919) % len(data)] ^= 1 << (n % 8)
            bad = tmp_path / f"b{good.suffix}"
            bad.write_bytes(changed if n % 3 else changed[: (n * 104729) % len(data)])
            why_not(bad)


def test_what_is_too_large_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_UNPACKED_BYTES", 30 << 20)
    with zipfile.ZipFile(tmp_path / "a.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b" " * (31 << 20))
    assert "unpacks to more than the 30 MiB" in refusal(tmp_path / "a.docx")
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
    assert "that are read; split it" in refusal(tmp_path / "a.docx")


def test_a_reader_that_is_too_slow_or_dies_is_named_and_the_next_document_is_read(tmp_path):
    (tmp_path / "good.txt").write_text("Text.")
    (tmp_path / "a.html").write_text("<div>" * 100_000 + "deep")
    with contextlib.closing(documents.ReaderProcess(DocumentsConfig(), timeout_s=0)) as process:
        with pytest.raises(documents.UnreadableDocumentError, match="took longer than 0 s"):  # to start
            process.read(tmp_path / "good.txt")
        process._timeout_s = 60
        with contextlib.suppress(documents.UnreadableDocumentError):
            assert process.read(tmp_path / "a.html") == "deep"
        process.read(tmp_path / "good.txt")
        assert process._process is not None
        process._process.kill()
        with pytest.raises(documents.UnreadableDocumentError, match="crashed the process that read it"):
            process.read(tmp_path / "good.txt")
        assert process.read(tmp_path / "good.txt") == "Text."


@pytest.mark.parametrize(("text", "overrides"), [
    ("", ()), ("task_mode: cpt\n", ("data.documents.out_dir=my text/out",)),
    ("task_mode: cpt\ndata: {train_path: other.jsonl}\n", ("train.epochs=2",)),
    ("task_mode: cpt_mixed\ndata: {text_path: other.jsonl}\n", ()),
])  # fmt: skip
def test_dapt_docx_ends_with_a_command_that_reads_what_it_wrote(text, overrides, tmp_path, monkeypatch, succeed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "documents").mkdir(parents=True)
    (tmp_path / "data" / "documents" / "a.txt").write_text("Text of the archive.\n")
    (tmp_path / "mine.yaml").write_text(f"model: {{name: m}}\n{text}")
    said = succeed("dapt-docx", "--config", "mine.yaml", *overrides)
    words = shlex.split(said.rstrip().splitlines()[-1].partition("Next: ")[2])
    assert words[:3] == ["make", "check", "CONFIG=mine.yaml"]
    given = [word for one in words[3:] for word in shlex.split(one.removeprefix("SET="))]
    config = load_config("mine.yaml", overrides=given).config
    is_mixed = "mixed" in text
    assert config.task_mode == ("cpt_mixed" if is_mixed else "cpt")
    assert set(overrides) <= set(given)
    read = Path(config.data.text_path if is_mixed else config.data.train_path)
    assert read == Path(config.data.documents.out_dir) / "train.jsonl"
    assert read.is_file()
    assert is_mixed or config.data.val_path is None  # one document: none was held out


def test_missing_packages_are_named_with_what_installs_them(folder, tmp_path, monkeypatch, refuse):
    (folder / "a.txt").write_text(f"{LONG}\n")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("markitdown", "bs4") else find(name))
    (tmp_path / "run.yaml").write_text(f"model: {{name: m}}\ndata: {{documents: {{path: {folder}}}}}\n")
    words = ("--config", str(tmp_path / "run.yaml"), f"data.documents.out_dir={tmp_path / 'out'}")
    said = refuse("dapt-docx", *words)
    assert "beautifulsoup4, markitdown; install them there: " in said
    assert "pip install 'sft-play[documents]'" in said
    assert not (tmp_path / "out").exists()
