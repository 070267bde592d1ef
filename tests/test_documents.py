"""Documents become clean text: every format, what is left out, what would do harm, and the same bytes again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import unicodedata
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
from lxml import etree

from sft_play.config.load import load_config
from sft_play.config.schema import DocumentsConfig, RunConfig
from sft_play.data.sources.files import data_paths, has_held_out_file
from sft_play.documents import docx_package, reader
from sft_play.documents.documents import documents
from sft_play.documents.docx_numbering import formatted
from sft_play.documents.reader import ReaderProcess, read_document
from sft_play.documents.rst_text import role_text
from sft_play.documents.text import Block, ReadOptions, Tally, Unreadable, chunks, clean, join, paragraphs
from sft_play.errors import DataError
from tests.bundled import BOXED, data_file, there, word_files
from tests.conftest import ROOT, need_documents_extra, shared

need_documents_extra()

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
STRICT_W = "http://purl.oclc.org/ooxml/wordprocessingml/main"
REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
STRICT_REL = "http://purl.oclc.org/ooxml/officeDocument/relationships"
PACKAGE_REL = "http://schemas.openxmlformats.org/package/2006/relationships"
NAMESPACES = (
    f'xmlns:w="{W}" xmlns:r="{REL}" xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" xmlns:v="urn:schemas-microsoft-com:vml" '
    'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
)

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


def text_of(path: Path, **options) -> str:
    return join(read_document(path, ReadOptions(**options)).blocks)


def refusal(path: Path) -> str:
    with pytest.raises(Unreadable) as caught:
        read_document(path, ReadOptions())
    return str(caught.value)


def reason(path: Path) -> str | None:
    """Why a document cannot be read; None where it can. Any other exception is a fault."""
    try:
        read_document(path, ReadOptions())
    except Unreadable as error:
        return str(error)
    return None


def relations(*items: tuple[str, str], base: str = REL) -> str:
    links = "".join(
        f'<Relationship Id="r{n}" Type="{base}/{kind}" Target="{target}"/>' for n, (kind, target) in enumerate(items)
    )
    return f'<Relationships xmlns="{PACKAGE_REL}">{links}</Relationships>'


def make_docx(path: Path, body: str, *, parts: dict[str, str] | None = None, links=(), base: str = REL) -> Path:
    """A .docx of nothing but what is given: the body, other parts, and the document's links to them."""
    document = f"<w:document {NAMESPACES}><w:body>{body}</w:body></w:document>"
    if base == STRICT_REL:
        document = document.replace(W, STRICT_W).replace(REL, STRICT_REL)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_rels/.rels", relations(("officeDocument", "word/document.xml"), base=base))
        archive.writestr("word/document.xml", document)
        archive.writestr("word/_rels/document.xml.rels", relations(*links, base=base))
        for name, content in (parts or {}).items():
            archive.writestr(f"word/{name}", content)
    return path


def p(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def cell(*inner: str) -> str:
    return f"<w:tc>{''.join(inner)}</w:tc>"


def table(*lines: list[str]) -> str:
    inner = "".join("<w:tr>" + "".join(line) + "</w:tr>" for line in lines)
    return f"<w:tbl>{inner}</w:tbl>"


def make_pdf(path: Path, pages: list[list[str]], *, extra: bytes = b"") -> Path:
    """A PDF of lines in Helvetica, 14 points apart; an empty line is a gap."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for lines in pages:
        stream = b"BT /F1 10 Tf 50 780 Td "
        for line in lines:
            shown = line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)").encode("latin-1")
            stream += b"0 -14 Td " + (b"(" + shown + b") Tj " if line else b"")
        stream = zlib.compress(stream + b"ET" + extra)
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


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "in"
    found.mkdir()
    return found


def test_one_row_holds_text_of_one_document(folder, tmp_path):
    (folder / "a.txt").write_text(f"{LONG}\n\nshort\n")
    (folder / "b.md").write_text(f"# Title\n\n{OTHER}\n")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.0))
    assert report.ok
    assert rows(tmp_path / "out") == [
        {"text": f"{LONG}\n\nshort", "source": "a.txt", "part": 1},
        {"text": f"Title\n\n{OTHER}", "source": "b.md", "part": 1},
    ]


def test_what_is_written_is_read_by_the_readers_of_training_data(folder, tmp_path):
    from sft_play.data.sources.files import read_rows

    (folder / "a.txt").write_text('One\u2028two "quoted" \\ text\n\nthree')
    documents(config(folder, tmp_path / "out", val_fraction=0.0))
    (row,) = read_rows(tmp_path / "out" / "train.jsonl", split="train")
    assert row.data["text"] == 'One\ntwo "quoted" \\ text\n\nthree'


def test_a_long_document_is_cut_between_paragraphs(folder, tmp_path):
    (folder / "a.txt").write_text("\n\n".join(f"{n:03d} " + "x" * 96 for n in range(10)))
    documents(config(folder, tmp_path / "out", val_fraction=0.0, chunk_chars=250))
    found = rows(tmp_path / "out")
    # Two paragraphs of 100 characters and what is between them are 202; a third would be 304.
    assert [len(row["text"]) for row in found] == [202] * 5
    assert [row["part"] for row in found] == [1, 2, 3, 4, 5]
    assert found[1]["text"].startswith("002 ")


def test_unreadable_documents_are_named_and_the_rest_goes_on(folder, tmp_path):
    (folder / "good.txt").write_text("Text.")
    (folder / "broken.docx").write_bytes(b"PK\x03\x04 and no more")
    (folder / "latin.txt").write_bytes("first\ncaf\xe9 au lait".encode("latin-1"))
    (folder / "old.doc").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600)
    (folder / "table.xlsx").write_bytes(b"PK")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.0))
    assert report.ok
    assert set(report.unreadable) == {"broken.docx", "latin.txt", "old.doc"}
    said = "\n".join(report.lines())
    assert "4 documents found, 1 read, 3 not" in said
    assert "broken.docx: the archive is broken or cut off" in said
    assert "latin.txt: line 2: byte 0xE9 is not UTF-8" in said
    assert "old.doc: an old Office file" in said
    assert "1 .xlsx: table.xlsx" in said
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written == report.as_json()
    assert written["other_files"] == {".xlsx": 1}


def test_no_readable_document_is_an_error_and_nothing_is_written(folder, tmp_path):
    (folder / "a.pdf").write_bytes(b"%PDF-1.4 and no more")
    with pytest.raises(DataError, match=r"none of the 1 document could be read(.|\n)*a\.pdf: pypdf cannot read it"):
        documents(config(folder, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_no_documents_says_where_it_looked_and_what_is_there(folder, tmp_path):
    (folder / "a.xlsx").write_text("x")
    with pytest.raises(DataError, match=r"no documents there .*there are 1 \.xlsx"):
        documents(config(folder, tmp_path / "out"))
    with pytest.raises(DataError, match=r"nowhere does not exist .*holds in"):
        documents(config(tmp_path / "nowhere", tmp_path / "out"))
    with pytest.raises(DataError, match=r"nothing matches .*\*\.pdf.*holds a\.xlsx"):
        documents(config(folder / "*.pdf", tmp_path / "out"))


def test_files_globs_and_lists_are_taken_and_names_stay_apart(tmp_path):
    for name in ("one/a.txt", "two/a.txt", "two/deep/b.txt", "two/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"Text of {name}.")
    paths = [str(tmp_path / "one"), str(tmp_path / "two" / "**" / "*.txt"), str(tmp_path / "two" / "c.md")]
    report = documents(config(paths, tmp_path / "out", val_fraction=0.0))
    names = [row["source"] for row in rows(tmp_path / "out")]
    assert len(report.files.documents) == 4
    assert len(set(names)) == 4
    assert "deep/b.txt" in names
    assert any(name.endswith("one/a.txt") for name in names)


def test_links_in_a_circle_end_and_hidden_files_are_counted(folder, tmp_path):
    (folder / "a.txt").write_text("Text.")
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "again.txt").symlink_to(folder / "a.txt")
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "~$a.docx").write_bytes(b"lock")
    (folder / ".hidden.txt").write_text("hidden")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.0))
    assert [row["source"] for row in rows(tmp_path / "out")] == ["a.txt"]
    assert report.files.hidden == 2
    assert report.files.twice == 2
    assert "self.txt" in report.unreadable


def test_the_same_documents_give_the_same_bytes(folder, tmp_path):
    for n in range(30):
        (folder / f"{n}.txt").write_text(f"Document {n}.\n\n{LONG}\n\n{n} {OTHER}")
    contents = []
    for out in ("out-a", "out-b"):
        documents(config(folder, tmp_path / out, val_fraction=0.3))
        contents.append([(tmp_path / out / name).read_text() for name in ("train.jsonl", "val.jsonl", "report.json")])
    assert [text.replace("out-a", "out-b") for text in contents[0]] == contents[1]


def test_a_document_stays_in_its_split_when_others_come(folder, tmp_path):
    def split() -> dict[str, str]:
        documents(config(folder, tmp_path / "out", val_fraction=0.4), force=True)
        return {row["source"]: name for name in ("train", "val") for row in rows(tmp_path / "out", name)}

    for n in range(20):
        (folder / f"m{n}.txt").write_text(f"Document {n}. {LONG}")
    before = split()
    for n in range(20):
        (folder / f"a{n}.txt").write_text(f"Document of others, {n}.\n\n{LONG}")
    after = split()
    assert set(before.values()) == {"train", "val"}
    assert {name: after[name] for name in before} == before


def test_copies_and_repeated_paragraphs_are_left_out_and_counted(folder, tmp_path):
    (folder / "a.txt").write_text(f"First.\n\n{LONG}\n\nYes.\n\n{OTHER}\n\n{OTHER}")
    (folder / "b.txt").write_text(f"Second.\n\n{LONG}\n\nYes.")
    (folder / "c.txt").write_text(f"First.\r\n\r\n{LONG}  \r\n\r\n\r\nYes.\r\n\r\n{OTHER}\r\n\r\n{OTHER}\r\n")
    (folder / "d.txt").write_text(f"{LONG}\n\n{OTHER}")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.0))
    assert [row["text"] for row in rows(tmp_path / "out")] == [
        f"First.\n\n{LONG}\n\nYes.\n\n{OTHER}",
        "Second.\n\nYes.",
    ]
    assert report.copies == {"c.txt": "a.txt"}
    assert report.emptied == ["d.txt"]
    counts = {reason: count["pieces"] for reason, count in report.left_out.as_json().items()}
    assert counts["paragraphs that stand in an earlier document"] == 3
    assert counts["paragraphs that stand twice in one document"] == 1
    said = "\n".join(report.lines())
    assert "c.txt is the same text as a.txt" in said
    assert "d.txt: all of it is in earlier documents" in said


def test_repeated_paragraphs_stay_where_they_are_wanted_and_are_counted(folder, tmp_path):
    (folder / "a.txt").write_text(f"First.\n\n{LONG}")
    (folder / "b.txt").write_text(f"Second.\n\n{LONG}")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.0, drop_repeated=False))
    assert [row["text"] for row in rows(tmp_path / "out")] == [f"First.\n\n{LONG}", f"Second.\n\n{LONG}"]
    assert report.kept.as_json() == {
        "paragraphs that stand in an earlier document": {"pieces": 1, "characters": len(LONG)}
    }
    assert not report.left_out.counts


def test_few_documents_may_have_no_validation_and_it_is_said(folder, tmp_path):
    (folder / "a.txt").write_text("Only this.")
    said = "\n".join(documents(config(folder, tmp_path / "out", val_fraction=0.0001)).lines())
    assert "no val.jsonl: of 1 document none has a hash in the share" in said
    assert "data.val_path=null" in said
    assert not (tmp_path / "out" / "val.jsonl").exists()


def test_where_all_hashes_are_of_validation_there_is_still_something_to_train_on(folder, tmp_path):
    n = next(n for n in range(100) if _share(f"Text {n}.") < 0.5)
    (folder / "a.txt").write_text(f"Text {n}.")
    report = documents(config(folder, tmp_path / "out", val_fraction=0.5))
    assert [row["text"] for row in rows(tmp_path / "out")] == [f"Text {n}."]
    assert "by their hashes all documents would be in it" in "\n".join(report.lines())


def _share(text: str) -> float:
    import hashlib

    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64


def test_files_that_somebody_edited_are_not_overwritten(folder, tmp_path):
    (folder / "a.txt").write_text("Text.")
    asked = config(folder, tmp_path / "out")
    documents(asked)
    documents(asked)
    (tmp_path / "out" / "train.jsonl").write_text("mine")
    with pytest.raises(DataError, match="FORCE=1"):
        documents(asked)
    assert (tmp_path / "out" / "train.jsonl").read_text() == "mine"
    documents(asked, force=True)
    assert rows(tmp_path / "out")


def test_output_inside_the_folder_of_documents_is_no_document(folder):
    (folder / "a.txt").write_text("Text.")
    for _ in range(2):
        report = documents(config(folder, folder / "out"))
        assert (len(report.files.documents), report.files.others) == (1, {})


def test_the_command_says_its_report(folder, tmp_path, command):
    (folder / "a.txt").write_text("Text \x1b[31mred.")
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{name: m}}\ndata: {{documents: {{path: {folder}, out_dir: {tmp_path / 'out'}}}}}\n")
    code, said = command("dapt-docx", "--config", str(run))
    assert code == 0
    assert "1 document found, 1 read, 0 not" in said
    assert "control characters: 1 (5 characters)" in said
    assert "\x1b" not in said


def test_a_name_with_control_characters_is_shown_safely(folder, tmp_path):
    (folder / "a.txt").write_text("Text.")
    (folder / "b\x1b[31m\n.txt").write_bytes(b"\xff")
    said = "\n".join(documents(config(folder, tmp_path / "out")).lines())
    assert r"b\x1b[31m\n.txt: line 1: byte 0xFF is not UTF-8" in said


# Text


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a\r\nb\rc\u2028d\x85e", "a\nb\nc\nd\ne"),
        ("one\x0ctwo\u2029three", "one\n\ntwo\n\nthree"),
        ("co\u00adopera\ufefftion", "cooperation"),
        ("a\u00a0b\u2009c   \nd", "a b c\nd"),
        ("cafe\u0301", "café"),
        ("x\x00y\x07z\ud800", "xyz"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        ("  indented\tstays", "  indented\tstays"),
        ("می\u200cخواهم 👩\u200d👩", "می\u200cخواهم 👩\u200d👩"),
    ],
)
def test_text_is_cleaned(given, wanted):
    assert clean(given, Tally()) == wanted


def test_paragraphs_end_at_blank_lines_and_keep_their_indents():
    assert paragraphs("\n\na\nb\n \t\n\n  c\n\n\n") == ["a\nb", "  c"]


@pytest.mark.parametrize("kind", ["text", "code", "table", "list"])
@pytest.mark.parametrize("limit", [7, 50, 333])
def test_cutting_loses_nothing_but_white_space(kind, limit):
    source = "One sentence. Another one! " * 9 + "\n" + "word " * 30 + "\n    indented line\n" + "x" * 700 + "。字" * 50
    pieces = chunks([Block("A heading", "heading"), Block(source, kind), Block("End")], limit=limit)
    assert all(len(piece) <= limit for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(f"A heading{source}End".split())


def test_a_long_paragraph_is_cut_at_the_end_of_a_sentence():
    assert chunks([Block("It is one. It is two. It is three.")], limit=25) == ["It is one. It is two.", "It is three."]


def test_a_heading_goes_with_what_follows():
    blocks = [Block("x" * 30), Block("Head", "heading"), Block("y" * 20)]
    assert chunks(blocks, limit=40) == ["x" * 30, "Head\n\n" + "y" * 20]


def test_code_that_is_cut_keeps_its_indents():
    assert chunks([Block("def f():\n    return 1\n    # end", "code")], limit=22) == [
        "def f():\n    return 1",
        "    # end",
    ]


# Plain text


def test_what_is_no_text_is_said(tmp_path):
    cases = {
        "a.txt": (b"", "the file is empty"),
        "b.txt": (b" \n\n", "the file is blank"),
        "c.txt": (b"\x89PNG\r\n\x1a\n...", "is a PNG picture"),
        "d.txt": (b"abc\n\x00\x01\x02", "is binary, not text (a NUL character in line 2)"),
        "e.txt": ("x".encode("utf-32"), "is UTF-32"),
        "f.txt": (b"\xff\xfea", "begins like UTF-16 but is not"),
        "g.md": (b"<!-- only a comment -->", "holds no text"),
        "h.docx": (b"just words", "not a Word file: it begins with 'just words'"),
        "i.doc": (b"{\\rtf1 x}", "is RTF; save it as .docx"),
        "j.txt": (b"\x1f\x8b\x08", "gzip"),
    }
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert reason in refusal(tmp_path / name), name


def test_utf16_with_its_mark_and_utf8_with_one_are_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes("Grüße".encode("utf-8-sig"))
    assert text_of(tmp_path / "a.txt") == text_of(tmp_path / "b.txt") == "Grüße"


def test_a_file_is_read_as_what_it_is(tmp_path):
    make_docx(tmp_path / "a.txt", p("From Word."))
    found = read_document(tmp_path / "a.txt", ReadOptions())
    assert join(found.blocks) == "From Word."
    assert found.notes == ["named .txt, read as what it is: .docx"]
    (tmp_path / "b.doc").write_text("<html><body><p>Saved by Word as a page.</p></body></html>")
    assert text_of(tmp_path / "b.doc") == "Saved by Word as a page."


def test_a_document_without_rights_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot be opened: Permission denied" in refusal(path)


# Word


def test_tracked_changes_are_read_as_accepted(tmp_path):
    body = (
        "<w:p><w:r><w:t>Kept </w:t></w:r><w:ins><w:r><w:t>new</w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>old words</w:delText></w:r></w:del>"
        "<w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom><w:moveTo><w:r><w:t> moved</w:t></w:r></w:moveTo></w:p>"
        "<w:p><w:pPr><w:rPr><w:del/></w:rPr></w:pPr><w:r><w:t>joined </w:t></w:r></w:p>" + p("to one.")
    )
    path = make_docx(tmp_path / "a.docx", body)
    found = read_document(path, ReadOptions())
    assert join(found.blocks) == "Kept new moved\n\njoined to one."
    assert found.left_out.counts == {"tracked deletions (.docx)": [2, 14]}  # "old words" and "moved"


def test_hidden_text_is_left_out_and_counted(tmp_path):
    styles = (
        f'<w:styles xmlns:w="{W}"><w:style w:styleId="H" w:type="character"><w:rPr><w:vanish/></w:rPr></w:style>'
        '<w:style w:styleId="H2" w:type="character"><w:basedOn w:val="H"/></w:style></w:styles>'
    )
    body = (
        "<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>secret</w:t></w:r>"
        '<w:r><w:rPr><w:vanish w:val="0"/></w:rPr><w:t>shown</w:t></w:r>'
        '<w:r><w:rPr><w:rStyle w:val="H2"/></w:rPr><w:t>by style</w:t></w:r></w:p>'
    )
    path = make_docx(tmp_path / "a.docx", body, parts={"styles.xml": styles}, links=[("styles", "styles.xml")])
    found = read_document(path, ReadOptions())
    assert join(found.blocks) == "shown"
    assert found.left_out.counts == {"hidden text (.docx)": [2, 14]}


def test_a_text_box_is_read_once(tmp_path):
    box = f"<w:txbxContent>{p('In the box.')}{p('Twice?')}</w:txbxContent>"
    body = (
        "<w:p><w:r><w:t>Before</w:t><mc:AlternateContent>"
        f'<mc:Choice Requires="wps"><w:drawing><wps:txbx>{box}</wps:txbx></w:drawing></mc:Choice>'
        f"<mc:Fallback><w:pict><v:textbox>{box}</v:textbox></w:pict></mc:Fallback></mc:AlternateContent>"
        "<w:t> after</w:t></w:r></w:p>"
    )
    assert text_of(make_docx(tmp_path / "a.docx", body)) == "Before after\n\nIn the box.\n\nTwice?"


def test_a_text_box_that_only_old_words_know_is_read(tmp_path):
    box = f"<w:r><w:pict><v:textbox><w:txbxContent>{p('Old box.')}</w:txbxContent></v:textbox></w:pict></w:r>"
    fallback = f"<mc:AlternateContent><mc:Choice Requires='x'/><mc:Fallback>{box}</mc:Fallback></mc:AlternateContent>"
    assert text_of(make_docx(tmp_path / "a.docx", f"<w:p>{fallback}</w:p>")) == "Old box."


def test_tables_are_lines_and_nested_ones_are_read_in_order(tmp_path):
    inner = table([cell(p("x")), cell(p("y"))])
    body = table(
        [cell(p("Name")), cell(p("Value"))],
        [cell(p("one"), p("more")), cell(p(""))],
        [cell(p("outer"), inner, p("end")), cell(p("side"))],
        [cell(p("a | b")), cell(p("|"))],
    )
    assert text_of(make_docx(tmp_path / "a.docx", body)) == (
        "Name | Value\none more\n\nouter\n\nx | y\n\nend\n\nside\n\na | b | |"
    )


def test_tables_nested_forty_deep_are_read(tmp_path):
    body = p("core")
    for n in range(40):
        body = table([cell(p(f"level {n}"), body, p(""))])
    found = text_of(make_docx(tmp_path / "a.docx", body))
    assert found.split("\n\n")[-1] == "core"
    assert found.startswith("level 39")


def test_links_tabs_breaks_and_fields_are_read(tmp_path):
    body = (
        '<w:p><w:hyperlink r:id="r9"><w:r><w:t>a link</w:t></w:r></w:hyperlink><w:r><w:tab/><w:t>tab</w:t><w:br/>'
        '<w:t>line</w:t><w:noBreakHyphen/><w:t>soft</w:t><w:softHyphen/><w:t>er</w:t><w:sym w:char="2022"/></w:r>'
        '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>PAGE \\* MERGE</w:instrText></w:r>'
        '<w:r><w:fldChar w:fldCharType="separate"/></w:r><w:r><w:t>7</w:t></w:r>'
        "<w:sdt><w:sdtPr><w:tag/></w:sdtPr><w:sdtContent><w:r><w:t> control</w:t></w:r></w:sdtContent></w:sdt>"
        "<w:ruby><w:rt><w:r><w:t>かんじ</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>漢字</w:t></w:r></w:rubyBase></w:ruby>"
        "</w:p>"
    )
    assert text_of(make_docx(tmp_path / "a.docx", body)) == "a link\ttab\nline-softer•7 control漢字(かんじ)"


NUMBERING = f"""<w:numbering xmlns:w="{W}"><w:abstractNum w:abstractNumId="0">
<w:lvl w:ilvl="0"><w:start w:val="3"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl>
<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="%1.%2)"/></w:lvl></w:abstractNum>
<w:abstractNum w:abstractNumId="1"><w:lvl w:ilvl="0"><w:numFmt w:val="bullet"/><w:lvlText w:val=""/></w:lvl>
</w:abstractNum><w:num w:numId="5"><w:abstractNumId w:val="0"/></w:num>
<w:num w:numId="6"><w:abstractNumId w:val="1"/></w:num></w:numbering>"""


def item(text: str, number: int, level: int) -> str:
    return p(text, f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>')


def test_lists_get_the_labels_that_word_shows(tmp_path):
    body = item("one", 5, 0) + item("sub", 5, 1) + item("sub", 5, 1) + item("two", 5, 0) + item("sub", 5, 1)
    body += item("point", 6, 0) + p("plain") + item("nowhere", 99, 0)
    links = [("numbering", "numbering.xml")]
    path = make_docx(tmp_path / "a.docx", body, parts={"numbering.xml": NUMBERING}, links=links)
    assert text_of(path) == ("3. one\n  3.a) sub\n  3.b) sub\n4. two\n  4.a) sub\n- point\n\nplain\n\nnowhere")


def test_numbers_in_the_forms_of_word():
    assert [formatted(n, "upperRoman") for n in (4, 9, 1994)] == ["IV", "IX", "MCMXCIV"]
    assert [formatted(n, "lowerLetter") for n in (1, 26, 27)] == ["a", "z", "aa"]
    assert formatted(7, "decimalZero") == "07"
    assert formatted(7, "chineseCounting") == "7"


def test_notes_stand_at_the_end_with_their_marks(tmp_path):
    notes = (
        f'<w:footnotes xmlns:w="{W}"><w:footnote w:id="-1" w:type="separator">{p("no")}</w:footnote>'
        f'<w:footnote w:id="7">{p("The note.")}</w:footnote><w:footnote w:id="9">{p("Not used.")}</w:footnote>'
        "</w:footnotes>"
    )
    ends = f'<w:endnotes xmlns:w="{W}"><w:endnote w:id="2">{p("At the end.")}</w:endnote></w:endnotes>'
    run = '<w:t>Text</w:t><w:footnoteReference w:id="7"/><w:t> more</w:t><w:endnoteReference w:id="2"/>'
    body = f"<w:p><w:r>{run}</w:r></w:p>"
    parts = {"footnotes.xml": notes, "endnotes.xml": ends}
    links = [("footnotes", "footnotes.xml"), ("endnotes", "endnotes.xml")]
    path = make_docx(tmp_path / "a.docx", body, parts=parts, links=links)
    assert text_of(path) == "Text[1] more[i]\n\n[1] The note.\n\n[i] At the end."


def test_headers_are_taken_when_asked_each_once(tmp_path):
    header = f'<w:hdr xmlns:w="{W}">{p("Running head")}</w:hdr>'
    section = '<w:sectPr><w:headerReference r:id="r0" w:type="default"/></w:sectPr>'
    body = f"<w:p><w:pPr>{section}</w:pPr><w:r><w:t>Body</w:t></w:r></w:p>{section}"
    path = make_docx(tmp_path / "a.docx", body, parts={"h.xml": header}, links=[("header", "h.xml")])
    found = read_document(path, ReadOptions())
    assert join(found.blocks) == "Body"
    assert found.left_out.counts == {"page headers and footers (.docx)": [1, 12]}
    assert text_of(path, headers=True) == "Running head\n\nBody"


def test_formulas_are_read_as_text(tmp_path):
    def run(text: str) -> str:
        return f"<m:r><m:t>{text}</m:t></m:r>"

    body = (
        f"<w:p><m:oMathPara><m:oMath>{run('y=')}<m:f><m:num>{run('a')}</m:num><m:den>{run('b')}</m:den></m:f>{run('+')}"
        f"<m:sSup><m:e>{run('x')}</m:e><m:sup>{run('2')}</m:sup></m:sSup>{run('+')}"
        f"<m:rad><m:deg/><m:e>{run('z')}</m:e></m:rad></m:oMath></m:oMathPara></w:p>"
    )
    assert text_of(make_docx(tmp_path / "a.docx", body)) == "y=(a)/(b)+x^{2}+√(z)"


def test_strict_files_are_read_like_others(tmp_path):
    body = p("Title") + table([cell(p("a")), cell(p("b"))]) + item("one", 5, 0)
    numbering = NUMBERING.replace(W, STRICT_W)
    links = [("numbering", "numbering.xml")]
    path = make_docx(tmp_path / "a.docx", body, parts={"numbering.xml": numbering}, links=links, base=STRICT_REL)
    assert text_of(path) == "Title\n\na | b\n\n3. one"


def test_what_python_docx_writes_is_read(tmp_path):
    import docx

    document = docx.Document()
    document.add_heading("Heading", 1)
    document.add_paragraph("Plain paragraph.")
    document.add_paragraph("point", style="List Bullet")
    document.add_paragraph("number", style="List Number")
    made = document.add_table(rows=1, cols=2)
    made.cell(0, 0).text, made.cell(0, 1).text = "left", "right"
    document.save(tmp_path / "a.docx")
    assert text_of(tmp_path / "a.docx") == "Heading\n\nPlain paragraph.\n\n- point\n1. number\n\nleft | right"


def test_a_link_to_a_missing_part_harms_nothing(tmp_path):
    path = make_docx(tmp_path / "a.docx", p("Text."), links=[("image", "NULL"), ("footnotes", "gone.xml")])
    assert text_of(path) == "Text."


def test_other_archives_are_named(tmp_path):
    for name, parts, reason in [
        ("a.docx", {"content.xml": "x"}, "a zip archive without a Word document in it; it holds content.xml"),
        (
            "b.docx",
            {"_rels/.rels": relations(("officeDocument", "xl/workbook.xml")), "xl/workbook.xml": "<x/>"},
            "main part",
        ),
        ("c.docx", {}, "a zip archive without a Word document in it; it holds nothing"),
        ("d.docx", {"word/document.xml": "<w:document"}, "not well-formed XML"),
        ("e.docx", {"word/document.xml": ""}, "not well-formed XML"),
    ]:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for part, content in parts.items():
                archive.writestr(part, content)
        assert reason in refusal(tmp_path / name), name


def test_passwords_are_said(tmp_path):
    path = tmp_path / "a.docx"
    path.write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600 + "EncryptedPackage".encode("utf-16-le"))
    assert "locked with a password" in refusal(path)
    data = bytearray(make_docx(tmp_path / "b.docx", p("x")).read_bytes())
    for match in re.finditer(b"PK\x01\x02", bytes(data)):
        data[match.start() + 8] |= 1
    for match in re.finditer(b"PK\x03\x04", bytes(data)):
        data[match.start() + 6] |= 1
    (tmp_path / "b.docx").write_bytes(data)
    assert "locked with a password" in refusal(tmp_path / "b.docx")


# Word: harm


def test_an_archive_that_unpacks_to_gigabytes_is_not_unpacked(tmp_path):
    path = tmp_path / "a.docx"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_rels/.rels", relations(("officeDocument", "word/document.xml")))
        with archive.open("word/document.xml", "w", force_zip64=True) as part:
            part.write(b"<w:document>")
            for _ in range(40):
                part.write(b" " * 2**20)
    assert re.search(r"word/document\.xml says it unpacks from .* to 40\.0 MiB: more than is opened", refusal(path))


def test_an_archive_that_lies_about_its_size_is_cut_short(tmp_path):
    path = make_docx(tmp_path / "a.docx", p("x" * 5000))
    data = bytearray(path.read_bytes())
    place = data.rfind(b"word/document.xml") - 46  # its entry in the central directory
    data[place + 24 : place + 28] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    assert "broken" in refusal(path)


def test_the_whole_of_a_document_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(docx_package, "MAX_TEXT_BYTES", 4000)
    path = make_docx(tmp_path / "a.docx", p(os.urandom(3000).hex()))
    assert "more than is opened" in refusal(path)


def test_a_large_part_that_is_no_text_is_never_unpacked(tmp_path):
    path = make_docx(tmp_path / "a.docx", p("Text."), parts={"media/image1.bin": "\0" * 50_000_000})
    assert text_of(path) == "Text."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xml_entities_are_refused(tmp_path, encoding):
    lol = "".join(f"<!ENTITY l{n} '" + (f"&l{n - 1};" * 10 if n else "lol") + "'>" for n in range(10))
    files = '<!ENTITY f SYSTEM "file:///etc/passwd">'
    path = tmp_path / "a.docx"
    for declared, used in ((lol, "&l9;"), (files, "&f;")):
        content = (
            f'<?xml version="1.0" encoding="{encoding}"?><!DOCTYPE x [{declared}]>'
            f'<w:document xmlns:w="{W}"><w:body><w:p><w:r><w:t>{used}</w:t></w:r></w:p></w:body></w:document>'
        )
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("word/document.xml", content.encode(encoding))
        assert "declares XML entities" in refusal(path)


def test_xml_nested_without_end_is_refused(tmp_path):
    path = make_docx(tmp_path / "a.docx", "<w:sdt>" * 30_000 + "</w:sdt>" * 30_000)
    assert "not well-formed XML" in refusal(path)


def test_word_files_with_bytes_changed_end_in_a_reason(tmp_path):
    """Three hundred damaged files: each is read, or refused with a reason, and nothing else happens."""
    body = p("Text.") + table([cell(p("a")), cell(p("b"))]) + item("one", 5, 0)
    parts, links = {"numbering.xml": NUMBERING}, [("numbering", "numbering.xml")]
    good = make_docx(tmp_path / "a.docx", body, parts=parts, links=links).read_bytes()
    for n in range(300):
        data = bytearray(good)
        data[(n * 7919) % len(data)] ^= 1 << (n % 8)
        (tmp_path / "b.docx").write_bytes(data if n % 3 else data[: (n * 104729) % len(data)])
        assert reason(tmp_path / "b.docx") != ""


# Real files


def visible_texts(path: Path) -> list[str]:
    """Every `w:t` of a .docx that is in no deleted, hidden or fallback part, as its raw XML says."""
    root = etree.fromstring(zipfile.ZipFile(path).read("word/document.xml"))
    found = []
    for node in root.iter("{*}t"):
        around = [etree.QName(parent).localname for parent in node.iterancestors()]
        run = next((parent for parent in node.iterancestors() if etree.QName(parent).localname == "r"), None)
        is_hidden = run is not None and run.find(".//{*}vanish") is not None
        if not {"del", "moveFrom", "Fallback"} & set(around) and not is_hidden:
            found.append(unicodedata.normalize("NFC", "".join((node.text or "").split())))
    return [text for text in found if text]


@pytest.mark.parametrize(("origin", "count", "without_text"), there([("bundled", 4, 1), ("shared", 39, 4)]))
def test_every_visible_text_of_real_word_files_is_read(origin, count, without_text):
    paths = word_files(origin)
    assert len(paths) == count
    empty = []
    for path in paths:
        why = reason(path)
        if why is not None:
            assert (why, visible_texts(path)) == ("holds no text", [])
            empty.append(path.name)
            continue
        text = "".join(text_of(path).split())
        for wanted, count in Counter(visible_texts(path)).items():
            assert text.count(wanted) >= count, (path.name, wanted)
    assert len(empty) == without_text


@pytest.mark.parametrize(("name", "boxed"), there([("bundled", BOXED), ("docx/docling/textbox.docx", "＊ Fever")]))
def test_text_boxes_of_a_real_file_are_read_once(name, boxed):
    path = word_files("bundled")[0] if name == "bundled" else shared(name)
    assert text_of(path).count(boxed) == 1


def test_words_that_were_deleted_or_hidden_are_left_out():
    [path] = (path for path in word_files("bundled") if path.name == "revised.docx")
    assert text_of(path) == "What stays, what was added"


@pytest.mark.parametrize(("name", "step"), there([("bundled/documents", 1), ("corpora/peps", 8)]))
def test_restructured_text_loses_no_words_of_its_paragraphs(name, step):
    """Lines of plain prose (no markup in them) stand in the text, once their line breaks are spaces."""
    paths = sorted(data_file(name).glob("*.rst"))[::step]
    assert len(paths) > 10 or name.startswith("bundled")
    count = 0
    for path in paths:
        found = " ".join(text_of(path).split())
        for paragraph in paragraphs(path.read_text(encoding="utf-8")):
            if (
                re.fullmatch(r"[A-Z][\w ,.;'()\n-]{80,}[\w)]\.", paragraph)
                and "\n " not in paragraph
                and "_" not in paragraph
            ):
                assert " ".join(paragraph.split()) in found, (path.name, paragraph)
                count += 1
    assert count == 7 or name.startswith("corpora")  # three of the notes on tea, four of the numbers of buses


@pytest.mark.parametrize("name", there(["bundled/documents/verse.txt", "corpora/tinyshakespeare.txt"]))
def test_verse_stays_as_it_is(name):
    path = data_file(name)
    lines = "\n".join(line.rstrip() for line in path.read_text().split("\n"))
    assert text_of(path).split("\n\n") == [part.strip("\n") for part in lines.split("\n\n") if part.strip()]


# Markdown


def test_markdown_keeps_words_lists_and_code():
    from sft_play.documents.markdown_text import read_markdown

    source = (
        "---\ntitle: x\n---\n\n# Head *one*\n\nText with **bold**,\na [link](http://x.y), `code` "
        "and ![a picture](p.png).\n\n"
        "- one\n- two\n  1. deep\n  2. deeper\n\n```python\ndef f():\n    return 1\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | *2* |\n\n"
        "> quoted &amp; said<br>next\n\n<div>inside <b>html</b><script>alert(1)</script></div>\n<!-- gone -->\n"
    )
    found = read_markdown(source, ReadOptions())
    assert join(found.blocks) == (
        "Head one\n\nText with bold, a link, code and a picture.\n\n- one\n- two\n  1. deep\n  2. deeper\n\n"
        "def f():\n    return 1\n\na | b\n1 | 2\n\nquoted & said\nnext\n\ninside html"
    )
    assert set(found.left_out.counts) == {"front matter (.md)", "comments and scripts in HTML (.md)"}


def test_a_rule_at_the_top_of_markdown_is_no_front_matter():
    from sft_play.documents.markdown_text import read_markdown

    found = read_markdown("---\nJust a sentence of prose!\n\n---\nMore.", ReadOptions())
    assert "Just a sentence of prose!" in join(found.blocks)


def test_markdown_nested_without_end_is_refused(tmp_path):
    (tmp_path / "a.md").write_text("> " * 3000 + "x")
    assert "nested" in refusal(tmp_path / "a.md")


# reStructuredText


def rst(source: str, **options) -> str:
    from sft_play.documents.rst_text import read_rst

    return join(read_rst(source, ReadOptions(**options)).blocks)


def test_rst_keeps_words_lists_tables_and_code():
    source = (
        "Title\n=====\n\nA *paragraph* over\ntwo lines with `a link <http://x.y>`_ [1]_.\n\n"
        "- one\n- two\n\n3. three\n4. four\n\n"
        "term\n  its meaning\n\nCode::\n\n    x = 1\n    y = 2\n\n=== ===\na   b\n=== ===\n1   2\n=== ===\n\n"
        ".. comment\n\n.. [1] The note.\n\n.. note:: Mind this.\n"
    )
    assert rst(source) == (
        "Title\n\nA paragraph over two lines with a link [1].\n\n"
        "- one\n- two\n3. three\n4. four\nterm\n  its meaning\n\n"
        "Code:\n\nx = 1\ny = 2\n\na | b\n1 | 2\n\n[1] The note.\n\nMind this."
    )


def test_rst_directives_and_roles_of_others_keep_their_words():
    source = (
        "Use :func:`~os.path.join` and :ref:`the guide <guide>`.\n\n.. versionadded:: 3.9\n   It was *new* then.\n\n"
        "   .. seealso:: deeper\n\n      Inner :class:`Thing`.\n\n.. testcode::\n\n   a  =  *b*\n"
    )
    assert rst(source) == (
        "Use os.path.join and the guide.\n\n3.9\n\nIt was new then.\n\ndeeper\n\nInner Thing.\n\na  =  *b*"
    )


def test_rst_never_opens_other_files(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("SECRET WORDS")
    source = (
        f"Text.\n\n.. include:: {secret}\n\n.. raw:: html\n   :file: {secret}\n\n.. csv-table:: t\n"
        f"   :file: {secret}\n\n"
        f".. literalinclude:: {secret}\n\n.. raw:: html\n\n   <b>raw</b>\n"
    )
    from sft_play.documents.rst_text import read_rst

    found = read_rst(source, ReadOptions())
    assert join(found.blocks) == "Text."
    assert found.left_out.counts["directives that name other files, and raw ones (.rst)"][0] == 5


def test_broken_rst_keeps_its_text():
    found = rst("Title\n==\n\nAn *open emphasis.\n\n=== ===\na b c d\n===\n\n.. figure::\n\n   lost?\n\nEnd.")
    for word in ("Title", "An *open emphasis.", "a b c d", "lost?", "End."):
        assert found.count(word) == 1, word


def test_fields_of_a_pep_stay_apart():
    assert rst("PEP: 8\nTitle: Style\nAuthor: A,\n        B\n\nAbstract\n========\n\nText.") == (
        "PEP: 8\nTitle: Style\nAuthor: A, B\n\nAbstract\n\nText."
    )


def test_roles_without_their_marks():
    assert role_text(":py:meth:`~a.b`") == "a.b"
    assert role_text(":doc:`The page <x/y>`") == "The page"
    assert role_text("not a role") == "not a role"


# Web pages


PAGE = """<!doctype html><html><head><title>T</title><script>var evil = 1</script><style>p{}</style></head><body>
<nav><a href="/">Home menu</a></nav><main><article><h1>The heading</h1>
<p>First paragraph of the story, long enough to look like a paragraph, with <b>bold</b> words
and a <a href="x">link</a> in it.</p><p>Second paragraph of the story; it too is long enough to be body text.</p>
<pre>def f():
    return 1</pre><ul><li>point one</li><li>point two</li></ul>
<table><tr><th>Name</th><th>Value</th></tr><tr><td>alpha</td><td>1</td></tr></table>
<!-- a comment --><p hidden>hidden words</p></article></main><footer>Footer words</footer></body></html>"""


def test_a_page_keeps_its_main_part(tmp_path):
    (tmp_path / "a.html").write_text(PAGE)
    found = read_document(tmp_path / "a.html", ReadOptions())
    assert join(found.blocks) == (
        "The heading\n\nFirst paragraph of the story, long enough to look like a paragraph, with bold words and a link "
        "in it.\n\nSecond paragraph of the story; it too is long enough to be body text.\n\ndef f():\n    return 1\n\n"
        "- point one\n- point two\n\nName | Value\nalpha | 1"
    )
    assert found.left_out.counts["parts of web pages around the main text (.html)"][1] > 10


def test_a_page_is_whole_where_boilerplate_is_wanted(tmp_path):
    (tmp_path / "a.html").write_text(PAGE)
    found = text_of(tmp_path / "a.html", drop_boilerplate=False)
    assert "Home menu" in found
    assert "Footer words" in found
    for word in ("evil", "comment", "hidden", "p{}"):
        assert word not in found


@pytest.mark.parametrize(
    "body", ["<p>Hi.</p>", "Hi.", "<div><span>Hi.</span></div>", "<table><tr><td>Hi.</td></tr></table>"]
)
def test_a_short_page_is_read_by_what_is_visible(tmp_path, body):
    (tmp_path / "a.html").write_text(f"<html><body>{body}</body></html>")
    assert text_of(tmp_path / "a.html") == "Hi."


def test_a_page_is_read_in_the_encoding_that_it_declares(tmp_path):
    page = '<html><head><meta charset="{}"></head><body><p>Grüße, “Welt”</p></body></html>'
    for encoding in ("iso-8859-1", "windows-1252", "utf-8", "gb18030"):
        data = page.format(encoding).encode("cp1252" if encoding == "iso-8859-1" else encoding)
        (tmp_path / "a.html").write_bytes(data)
        assert text_of(tmp_path / "a.html") == "Grüße, “Welt”", encoding
    (tmp_path / "a.html").write_bytes("<p>\nGrüße</p>".encode("latin-1"))
    assert "line 2: byte 0xFC is not UTF-8 (no declared encoding)" in refusal(tmp_path / "a.html")
    (tmp_path / "a.html").write_text('<meta charset="klingon"><p>x</p>')
    assert "unknown encoding (klingon)" in refusal(tmp_path / "a.html")
    (tmp_path / "a.html").write_text('<meta charset="base64"><p>x</p>')
    assert "base64" in refusal(tmp_path / "a.html")


def test_a_page_nested_without_end_is_refused(tmp_path):
    (tmp_path / "a.html").write_text("<div>" * 100_000 + "deep")
    reader = ReaderProcess(ReadOptions(), seconds=30)
    try:
        with pytest.raises(Unreadable, match="nested too deeply"):
            reader.read(tmp_path / "a.html")
    finally:
        reader.close()


# PDF


def test_a_pdf_gives_paragraphs_and_joins_hyphens(tmp_path):
    lines = [
        "A Heading",
        "",
        "The first paragraph goes on over several lines, and one word is hyphen-",
        "ated at the end of a line; a well-known word keeps its own, as in well-",
        "known, for it is written so elsewhere (in brackets).",
        "",
        "The second one.",
    ]
    assert text_of(make_pdf(tmp_path / "a.pdf", [lines])) == (
        "A Heading\n\nThe first paragraph goes on over several lines, and one word is hyphenated at the end of a line; "
        "a well-known word keeps its own, as in well-known, for it is written so elsewhere (in brackets).\n\n"
        "The second one."
    )


def pages_with_running_lines(count: int) -> list[list[str]]:
    return [
        [
            "Annual Report",
            "",
            f"Page {n + 1} tells of matter {n * n} and nothing else of that kind.",
            "",
            f"- {n + 5} -",
        ]
        for n in range(count)
    ]


def test_lines_that_run_over_pages_are_left_out_and_counted(tmp_path):
    path = make_pdf(tmp_path / "a.pdf", pages_with_running_lines(6))
    found = read_document(path, ReadOptions())
    text = join(found.blocks)
    assert "Annual Report" not in text
    assert "- 7 -" not in text
    assert text.split("\n\n") == [
        f"Page {n + 1} tells of matter {n * n} and nothing else of that kind." for n in range(6)
    ]
    # 13 letters of the title and "- 5 -" on six pages, the last one "- 10 -"
    assert found.left_out.counts == {"lines that run over pages (.pdf)": [12, 6 * 13 + 6 * 5 + 1]}
    assert text_of(path, drop_boilerplate=False).count("Annual Report") == 6


def test_numbers_that_are_not_the_pages_stay(tmp_path):
    pages = [[f"{n * n + 3}", "", f"Body of page {n}, with a text of its own {'x' * n}."] for n in range(6)]
    assert read_document(make_pdf(tmp_path / "a.pdf", pages), ReadOptions()).left_out.counts == {}


def test_a_paragraph_goes_on_over_the_end_of_a_page(tmp_path):
    pages = [
        ["A paragraph that begins on one page and goes on", "and on until this page is full and ends with a"],
        ["word."],
    ]
    assert text_of(make_pdf(tmp_path / "a.pdf", pages)) == " ".join(line for page in pages for line in page)


def test_two_pages_have_no_running_lines(tmp_path):
    assert text_of(make_pdf(tmp_path / "a.pdf", pages_with_running_lines(2))).count("Annual Report") == 2


def test_a_pdf_without_text_or_locked_is_named(tmp_path):
    import pypdf

    make_pdf(tmp_path / "a.pdf", [[], []])
    assert "holds no text on its 2 pages (scanned pictures?); run it through OCR first" in refusal(tmp_path / "a.pdf")
    for password, owner in (("secret", "secret"), ("", "owner")):
        writer = pypdf.PdfWriter(clone_from=make_pdf(tmp_path / "b.pdf", [["Words in it."]]))
        writer.encrypt(password, owner, algorithm="RC4-128")
        writer.write(tmp_path / "c.pdf")
        if password:
            assert "locked with a password" in refusal(tmp_path / "c.pdf")
        else:
            assert text_of(tmp_path / "c.pdf") == "Words in it."


def test_a_pdf_that_unpacks_to_gigabytes_is_refused(tmp_path):
    path = make_pdf(tmp_path / "a.pdf", [["x"]], extra=b" " * 90_000_000)
    assert path.stat().st_size < 1_000_000
    assert "pypdf cannot read it (LimitReachedError" in refusal(path)


def test_pdfs_with_bytes_changed_end_in_a_reason(tmp_path):
    good = make_pdf(tmp_path / "a.pdf", [["Some words.", "", "More words."]] * 3).read_bytes()
    for n in range(100):
        data = bytearray(good)
        data[(n * 7919) % len(data)] ^= 1 << (n % 8)
        (tmp_path / "b.pdf").write_bytes(data if n % 3 else data[: (n * 104729) % len(data)])
        assert reason(tmp_path / "b.pdf") != ""


# The process that reads


def test_a_document_that_takes_too_long_is_ended_and_the_next_is_read(tmp_path):
    os.mkfifo(tmp_path / "never.txt")  # opening it waits for a writer that never comes
    (tmp_path / "good.txt").write_text("Text.")
    reader = ReaderProcess(ReadOptions(), seconds=1)
    try:
        with pytest.raises(Unreadable, match="took longer than 1 s to read"):
            reader.read(tmp_path / "never.txt")
        assert reader.read(tmp_path / "good.txt").blocks == [Block("Text.")]
    finally:
        reader.close()


def test_a_reader_that_dies_is_named_and_the_next_document_is_read(tmp_path):
    (tmp_path / "good.txt").write_text("Text.")
    reader = ReaderProcess(ReadOptions())
    try:
        reader.read(tmp_path / "good.txt")
        assert reader._process is not None
        reader._process.kill()
        with pytest.raises(Unreadable, match=r"crashed the process that read it \(exit code -9\)"):
            reader.read(tmp_path / "good.txt")
        assert reader.read(tmp_path / "good.txt").blocks == [Block("Text.")]
    finally:
        reader.close()


def test_long_runs_of_spaces_take_no_time(tmp_path):
    (tmp_path / "a.txt").write_text("a" + " " * 1_000_000 + "b" + "\n" * 1_000_000 + "c")
    assert [len(block.text) for block in read_document(tmp_path / "a.txt", ReadOptions()).blocks] == [1_000_002, 1]


def test_a_document_over_the_size_limit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", 10)
    (tmp_path / "a.txt").write_text("x" * 20)
    assert "that are read; split it" in refusal(tmp_path / "a.txt")


# What is written is what the shipped configs read


@pytest.mark.parametrize("count", [1, 60])
def test_run_dapt_reads_what_dapt_docx_writes(count, tmp_path, monkeypatch, command):
    """With the default paths, whether or not a document fell to validation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "documents").mkdir(parents=True)
    for number in range(count):
        (tmp_path / "data" / "documents" / f"{number}.txt").write_text(f"Text number {number} of the archive.\n")
    run = ROOT / "configs" / "run_dapt.yaml"
    code, said = command("dapt-docx", "--config", str(run))
    assert code == 0, said
    data = load_config(run).config.data
    found = data_paths(data)
    written = Path(data.documents.out_dir)
    assert found.train == written / "train.jsonl"
    assert found.val == (written / "val.jsonl" if count == 60 else None)
    assert (found.test, len(found.notes)) == (None, int(count == 1))
    assert has_held_out_file(data) == (count == 60)


def test_run_dapt_names_the_command_that_writes_its_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"`make dapt-docx` writes them"):
        data_paths(load_config(ROOT / "configs" / "run_dapt.yaml").config.data)


def test_the_text_of_run_mixed_is_written_by_dapt_docx_too():
    data = load_config(ROOT / "configs" / "run_mixed.yaml").config.data
    assert Path(data.text_path) == Path(data.documents.out_dir) / "train.jsonl"


def test_missing_packages_are_named_with_what_installs_them(folder, tmp_path, monkeypatch, command):
    """The core install has none of them; nothing is read or written then."""
    (folder / "a.txt").write_text(f"{LONG}\n")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("pypdf", "bs4") else find(name))
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"model": {"name": "m"}, "data": {"documents": {"path": str(folder)}}}))
    code, said = command("dapt-docx", "--config", str(run), f"data.documents.out_dir={tmp_path / 'out'}")
    assert code == 2
    assert "packages that are not installed in " in said
    assert "beautifulsoup4, pypdf; install them there: pip install 'sft-play[documents]'" in said
    assert not (tmp_path / "out").exists()
