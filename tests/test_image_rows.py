"""Rows with images: every form in which rows have them, what an image may be and may not, pixels, digests, process."""

from __future__ import annotations

import base64
import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import PIL.Image
import pytest

from sft_play.config.load import config_from_text
from sft_play.config.schema import DataConfig
from sft_play.data.near_duplicates import compared_texts
from sft_play.data.process import process_files, style_rows
from sft_play.data.sources.examples import ExampleReader, character_count, example_text
from sft_play.data.sources.formats import Chat, content_digest
from sft_play.data.sources.image_files import ImageError
from sft_play.data.sources.images import IMAGE_MARK, Picture, find_picture
from sft_play.data.sources.raw import BadRow
from tests.conftest import chat, write_rows

MARK = IMAGE_MARK


def encoded(image: PIL.Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(color="red", size=(4, 3)) -> bytes:
    return encoded(PIL.Image.new("RGB", size, color))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pics").mkdir()
    for name, color in (("a", "red"), ("b", "blue")):
        (tmp_path / "pics" / f"{name}.png").write_bytes(png(color, (4, 3) if name == "a" else (6, 5)))
    return tmp_path


def read(folder: Path, *rows, **options) -> list:
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    reader = ExampleReader(path, DataConfig(**options), split="train")
    return [example for _, example in reader.numbered_examples()]


def one(folder: Path, row, **options):
    return read(folder, row, **options)[0]


A, B = "pics/a.png", "pics/b.png"
USER_PARTS = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}]


def turns(content, answer="Yes."):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(("row", "contents", "sizes"), [
    ({"messages": turns("Is it red?"), "images": [A]}, MARK + "Is it red?", [4]),
    ({"messages": turns("Is it red?"), "image": A}, MARK + "Is it red?", [4]),
    ({"messages": turns("Is <image> redder than <image>?"), "images": [B, A]}, f"Is {MARK} redder than {MARK}?",
     [6, 4]),
    ({"question": "Is it red?", "answer": "Yes.", "image": A}, MARK + "Is it red?", [4]),
    ({"instruction": "<image>\nIs it?", "input": "red", "output": "Yes.", "images": [A]}, MARK + "\nIs it?\nred", [4]),
    ({"conversations": [{"from": "human", "value": "<image>\nIs it red?"}, {"from": "gpt", "value": "Yes."}],
      "image": A}, MARK + "\nIs it red?", [4]),
    ({"messages": turns(USER_PARTS), "images": [A]}, f"Is {MARK} red?", [4]),
    ({"messages": turns([{"type": "image", "image": A}, "?"])}, MARK + "?", [4]),
    ({"messages": turns([{"type": "image", "path": A}, "?"])}, MARK + "?", [4]),
    ({"messages": turns([{"type": "image", "url": A}, "?"])}, MARK + "?", [4]),
    ({"messages": turns([{"type": "image_url", "image_url": {"url": A}}, "?"])}, MARK + "?", [4]),
    ({"messages": turns([{"type": "input_image", "image_url": A}, "?"])}, MARK + "?", [4]),
    ({"messages": turns([{"image": A}, {"text": "?"}])}, MARK + "?", [4]),
    ({"messages": turns([{"type": "image", "index": 0, "text": None}, {"type": "image", "path": B}, "?"]),
      "images": [A]}, MARK * 2 + "?", [4, 6]),
    ({"prompt": [{"role": "user", "content": USER_PARTS}], "completion": [{"role": "assistant", "content": "Yes."}],
      "images": [A]}, f"Is {MARK} red?", [4]),
    # a row that has parts of images has no other notation
    ({"messages": turns([{"type": "image", "image": A}, "What is <image>?"])}, MARK + "What is <image>?", [4]),
])  # fmt: skip
def test_every_form_of_a_row_gives_the_same_marks_and_pictures(folder, row, contents, sizes):
    example = one(folder, row)
    assert isinstance(example, Chat), str(example)
    assert example.messages[0] == {"role": "user", "content": contents}
    assert [picture.width for picture in example.images] == sizes
    assert example.messages[1]["content"] == "Yes."
    assert not example.unused


def test_without_images_the_placeholder_is_text_and_a_mapped_column_is_read(folder):
    example = one(folder, {"messages": turns("What does <image> do?"), "image": False, "images": []})
    assert (example.messages[0]["content"], example.images) == ("What does <image> do?", ())
    assert one(folder, {"messages": turns(f"{MARK}?")}).messages[0]["content"] == f"{MARK}?"
    row = {"messages": turns("Is it red?"), "photo": A}
    (name, kind, mapping), *_ = one(folder, row).unused
    assert (name, kind, mapping) == ("photo", "media", (("images", "photo"),))
    assert one(folder, row, columns={"images": "photo"}).images[0].path == str(folder / A)


@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": turns("<image> or <image>?"), "images": [A]}, "1 image, and <image> stands 2 times"),
    ({"messages": turns(USER_PARTS), "images": [A, B]}, "2 images in the column, 1 part of type image without a path"),
    ({"messages": turns(USER_PARTS)}, "0 images in the column, 1 part of type image"),
    ({"messages": turns([{"type": "image", "index": 1}]), "images": [A]}, "the index 1, and is number 0"),
    ({"messages": turns("Draw it.", "<image>"), "images": [A]}, "an image in an assistant's turn"),
    ({"messages": turns(f"{MARK}?"), "images": [A]}, "U+FDD0"),
    ({"messages": turns("?"), "images": [A], "image": B}, "both images and image"),
    ({"messages": turns("?"), "images": ["pics/c.png"]}, "pics/c.png is not there, nor in a zip beside the data file"),
    ({"messages": turns("?"), "images": ["../x.png"]}, "leaves the folder of its data file (image 1: ../x.png"),
    ({"messages": turns("?"), "images": ["pics/../../x.png"]}, "leaves the folder"),
    ({"messages": turns("?"), "images": ["out/x.png"]}, "leaves the folder"),
    ({"messages": turns("?"), "images": ["pics"]}, "it is a folder"),
    ({"messages": turns("?"), "images": ["x" * 5000]}, "cannot be looked for: File name too long"),
    ({"messages": turns("?"), "images": ["http://localhost/x.png"]}, "data.fetch_images=true"),
    ({"messages": turns("?"), "images": ["s3://bucket/x.png"]}, "an address of s3"),
    ({"messages": turns("?"), "images": ["data:image/png;base64,!"]}, "base64 is damaged"),
    ({"messages": turns("?"), "images": [None]}, "neither a path nor its bytes"),
    ({"messages": turns([{"type": "video", "video": "x.mp4"}, "?"])}, "a content part is video, and only text and"),
    ({"messages": turns("?"), "audio": "x.wav"}, "the row has audio, and only text and images are trained"),
    ({"messages": [{"role": "assistant", "content": "Yes."}], "images": [A]}, "no user turn to put it into"),
])  # fmt: skip
def test_a_row_whose_images_cannot_be_used_says_which_and_why(folder, row, reason):
    (folder / "out").symlink_to(folder.parent)
    example = one(folder, row)
    assert isinstance(example, BadRow)
    assert str(example).startswith(f"{folder / 'rows.jsonl'}:1: ")
    assert reason in str(example)


# Values


def as_data_uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_an_image_is_a_path_an_address_of_a_file_bytes_or_a_member_of_a_zip(folder):
    content = (folder / A).read_bytes()
    with zipfile.ZipFile(folder / "more.zip", "w") as archive:
        archive.writestr("deep/z.png", content)
        archive.writestr("more/y.png", content)
    for value in (
        A, str(folder / A), (folder / A).as_uri(), as_data_uri(content), content, {"bytes": content, "path": "x.png"},
        {"bytes": None, "path": A}, {"url": as_data_uri(content)}, base64.b64encode(content).decode(), "deep/z.png",
        "more.zip!deep/z.png", f"{folder}/more.zip!deep/z.png", "more/y.png", "more/deep/z.png",
    ):  # fmt: skip
        picture = find_picture(value, str(folder), DataConfig())
        assert (picture.width, picture.height) == (4, 3)
        assert picture.decode().getpixel((0, 0)) == (255, 0, 0)
        assert bool(picture.path) != bool(picture.data)
    assert picture.path == str(folder / "more.zip!deep/z.png")
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("deep/z.png", content)
    with pytest.raises(ImageError, match="in several zips"):
        find_picture("deep/z.png", str(folder), DataConfig())
    with pytest.raises(ImageError, match="in no folder"):
        find_picture(A, "", DataConfig())


def test_tables_hold_bytes_and_image_features(folder):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet

    content = (folder / A).read_bytes()
    columns = {"messages": [turns("?")] * 2, "image": [{"bytes": content, "path": None}, {"bytes": None, "path": A}]}
    pyarrow.parquet.write_table(pa.table(columns), folder / "rows.parquet")
    pyarrow.parquet.write_table(pa.table({"q": ["?"], "a": ["!"], "photo": [content]}), folder / "plain.parquet")
    saved = datasets.Dataset.from_dict(
        {"question": ["?"], "answer": ["!"], "images": [[PIL.Image.new("RGB", (4, 3))]]},
        features=datasets.Features(
            {**dict.fromkeys(("question", "answer"), datasets.Value("string")), "images": [datasets.Image()]}
        ),
    )
    saved.save_to_disk(folder / "saved")
    mapping = {"prompt": "q", "completion": "a", "images": "photo"}
    for name, columns in (("rows.parquet", {}), ("plain.parquet", mapping), ("saved", {})):
        reader = ExampleReader(folder / name, DataConfig(columns=columns), split="train")
        for _, example in reader.numbered_examples():
            assert [(picture.width, picture.height) for picture in example.images] == [(4, 3)], str(example)
    streamed = saved.to_iterable_dataset()
    from sft_play.data.sources.tables import _without_decoding

    for loaded in (saved, streamed):
        (row,) = _without_decoding(loaded)
        assert PIL.Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (4, 3)


def test_an_address_is_fetched_once_and_only_where_a_key_says_so(folder, monkeypatch):
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404 if "lost" in self.path else 200)
            self.end_headers()
            self.wfile.write(b"<html>no</html>" if "page" in self.path else png())

        def log_message(self, *args):
            pass

    monkeypatch.setenv("SFT_PLAY_CACHE", str(folder / "cache"))
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, options = f"http://127.0.0.1:{server.server_port}", DataConfig(fetch_images=True)
    try:
        for _ in range(2):
            assert find_picture(f"{address}/a.png", "", options).width == 4
        for name, reason in (("page", "a web page"), ("page", "a web page"), ("lost", "404")):
            with pytest.raises(ImageError, match=reason):
                find_picture(f"{address}/{name}", "", options)
    finally:
        server.shutdown()
        server.server_close()
    assert asked == ["/a.png", "/page", "/page", "/lost"]
    assert len(list((folder / "cache" / "images").iterdir())) == 1


# Bad files

JPEG = encoded(PIL.Image.effect_noise((64, 64), 50), "JPEG")
NOISE = encoded(PIL.Image.effect_noise((64, 64), 50))
FRAMES = [PIL.Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "an image file is empty"),
    (b"%PDF-1.7\n", "x.png is a PDF document"),
    (b"<!DOCTYPE html><p>404", "a web page"),
    (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
    (b"\0\0\0\x18ftypisom\0\0\0\0", "a video (MP4"),
    (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    (b"just words", 'text that begins with "just words"'),
    (b"\x01\x02\x03\x04", "its first bytes are 01 02 03 04"),
    (JPEG[:-2], "truncated or damaged"), (JPEG[:900], "truncated or damaged"), (JPEG[:30], "truncated or damaged"),
    (NOISE[:-30], "truncated or damaged"), (NOISE[:20], "truncated or damaged"), (NOISE[:7], "it ends in its header"),
    (encoded(FRAMES[0], "WEBP", lossless=True)[:-4], "truncated or damaged"),
    *((encoded(FRAMES[0], form, save_all=True, append_images=FRAMES[1:2]), "has 2 frames") for form in
      ("GIF", "PNG", "WEBP", "TIFF")),
    (encoded(PIL.Image.new("1", (11_000, 10_000))), "11,000 x 10,000 pixels, 110.0 million, and the limit is 90"),
    (encoded(PIL.Image.new("F", (4, 4)), "TIFF"), "pixels of mode F"),
])  # fmt: skip
def test_a_file_that_is_no_image_says_what_it_is_and_what_to_do(folder, content, reason):
    (folder / "x.png").write_bytes(content)
    example = one(folder, {"messages": turns("?"), "image": "x.png"})
    assert isinstance(example, BadRow)
    assert reason in str(example)


def test_an_image_is_as_large_as_the_key_allows_and_what_follows_it_does_not_matter(folder):
    (folder / "x.png").write_bytes(encoded(PIL.Image.new("1", (20_000, 10_000))))
    assert one(folder, {"messages": turns("?"), "image": "x.png"}, max_image_megapixels=200.0).images[0].width == 20_000
    photo = encoded(PIL.Image.new("RGB", (64, 64)), "MPO", save_all=True, append_images=FRAMES[:1])
    for content in (JPEG, NOISE, photo):
        assert find_picture(content + b"\0" * 9000, "", DataConfig()).width == 64


def test_decoding_a_file_that_was_damaged_or_changed_names_it(folder):
    picture = find_picture(A, str(folder), DataConfig())
    (folder / A).write_bytes(png(size=(7, 7)))
    with pytest.raises(ImageError, match="had 4 x 3 pixels when its row was read, and has 7 x 7"):
        picture.decode()
    (folder / A).write_bytes(png()[:40])
    with pytest.raises(ImageError, match=r"truncated or damaged \(.*a\.png"):
        picture.decode()
    (folder / A).unlink()
    with pytest.raises(ImageError, match=r"a\.png: it is not there any more"):
        picture.decode()


# Pixels


def decoded(content: bytes) -> PIL.Image.Image:
    picture = find_picture(content, "", DataConfig())
    image = picture.decode()
    assert (image.mode, image.size) == ("RGB", (picture.width, picture.height))
    return image


@pytest.mark.parametrize(("image", "form", "expected"), [
    (PIL.Image.new("L", (2, 2), 100), "PNG", (100, 100, 100)),
    (PIL.Image.new("1", (2, 2), 1), "PNG", (255, 255, 255)),
    (PIL.Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG", (255, 255, 255)),
    (PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 102)), "PNG", (153, 153, 153)),  # 255 * (1 - 102 / 255)
    (PIL.Image.new("LA", (2, 2), (0, 0)), "PNG", (255, 255, 255)),
    (PIL.Image.new("RGB", (2, 2), (10, 200, 30)).quantize(4), "PNG", (10, 200, 30)),
    (PIL.Image.new("I;16", (2, 2), 0x8080), "PNG", (128, 128, 128)),  # 32,896 of 65,535 are 128 of 255
    (PIL.Image.new("I;16", (2, 2), 300), "TIFF", (1, 1, 1)),
    (PIL.Image.new("CMYK", (2, 2), (0, 255, 255, 0)), "TIFF", (255, 0, 0)),
])  # fmt: skip
def test_pixels_of_every_kind_become_the_right_rgb(image, form, expected):
    assert decoded(encoded(image, form)).getpixel((0, 0)) == expected


def test_cmyk_of_a_jpeg_and_a_transparent_colour_of_a_palette_are_right():
    red = decoded(encoded(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)).getpixel((4, 4))
    assert red[0] > 250
    assert max(red[1:]) < 5
    image = PIL.Image.new("P", (2, 2), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 1), 1)
    image = decoded(encoded(image, "GIF", transparency=0))
    assert (image.getpixel((0, 0)), image.getpixel((1, 1))) == ((255, 255, 255), (0, 0, 255))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_an_image_is_turned_as_its_exif_says(form):
    image = PIL.Image.new("RGB", (64, 32), "white")
    image.paste("black", (0, 0, 32, 32))  # the left half
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: left becomes top
    turned = decoded(encoded(image, form, exif=exif))
    assert turned.size == (32, 64)
    assert turned.getpixel((16, 8))[0] < 30
    assert turned.getpixel((16, 56))[0] > 225


def test_a_png_whose_exif_stands_behind_its_pixels_is_turned_too():
    exif = PIL.Image.Exif()
    exif[0x0112] = 8
    content = encoded(PIL.Image.new("RGB", (64, 32)), exif=exif)
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    chunk, whole_end = content[start:end], len(content) - 12
    late = content[:start] + content[end:whole_end] + chunk + content[whole_end:]
    assert decoded(late).size == (32, 64)


def test_names_and_thumbnails(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert find_picture(A, str(folder), DataConfig()).name == A
    content = png(size=(300, 100))
    picture = find_picture(content, "", DataConfig())
    assert picture.name == f"bytes (PNG, {len(content)} bytes)"
    head, _, text = picture.thumbnail_uri(60).partition(",")
    assert head == "data:image/jpeg;base64"
    assert PIL.Image.open(io.BytesIO(base64.b64decode(text))).size == (60, 20)


# Identity


def test_rows_with_equal_text_and_other_pictures_differ_wherever_the_files_lie(folder):
    (folder / "copy.png").write_bytes((folder / A).read_bytes())
    row = {"messages": turns("What is this?")}
    first, copy, other, none = read(
        folder, {**row, "image": A}, {"messages": turns([{"type": "image", "path": "copy.png"}, "What is this?"])},
        {**row, "image": B}, row,
    )  # fmt: skip
    assert content_digest(first) == content_digest(copy)
    assert len({content_digest(example) for example in (first, other, none)}) == 3
    assert example_text(first) == example_text(none)
    assert character_count(first) == character_count(none)
    words = [set(next(compared_texts(example)).split()) for example in (first, other, copy)]
    assert words[0] == words[2]
    assert not words[0] & words[1]


def test_many_headers_are_read_without_a_pixel(folder, monkeypatch):
    names = []
    for index in range(3_000):
        (folder / f"{index}.png").write_bytes(png(size=(index % 7 + 1, 3)))
        names.append(f"{index}.png")
    monkeypatch.setattr(Picture, "decode", lambda picture: pytest.fail("decoded"))
    rows = [{"messages": turns("?"), "image": name} for name in names]
    assert [example.images[0].width for example in read(folder, *rows)] == [index % 7 + 1 for index in range(3_000)]


# make process, make style


def test_processed_and_styled_rows_have_the_same_pictures(folder):
    (folder / "raw" / "pics").mkdir(parents=True)
    (folder / "raw" / A).write_bytes((folder / A).read_bytes())
    with zipfile.ZipFile(folder / "raw" / "more.zip", "w") as archive:
        archive.writestr("z.png", png("green"))
    uri = as_data_uri(png("blue"))
    parts = [{"type": "image"}, {"type": "text", "text": "What <image> is "}, {"type": "image"}]
    rows = [
        {"messages": turns(parts), "images": [A, uri]},
        {"question": "<image>?", "answer": "b", "image": "z.png"},
        chat("q", "a"),
    ]
    for index, row in enumerate(rows):
        write_rows(folder / "raw" / f"{index}.jsonl", [row])
    text = f"""
model: {{name: x}}
data:
  style: {{out_dir: {folder}/styled}}
  process: {{raw_path: {folder}/raw, out_dir: {folder}/out, val_fraction: 0, test_fraction: 0}}
"""
    config = config_from_text(text, name="run.yaml")
    process_files(config)
    written = [json.loads(line) for line in (folder / "out/train.jsonl").read_text().splitlines()]
    assert written[0]["images"] == [str(folder / "raw" / A), uri]
    assert written[0]["messages"][0]["content"] == parts
    assert written[1]["images"] == [f"{folder}/raw/more.zip!z.png"]
    assert "images" not in written[2]
    style_rows(config, "Be brief.")
    raw = [read_file(folder / "raw" / f"{index}.jsonl") for index in range(3)]
    for name in ("out", "styled"):
        reader = ExampleReader(folder / name / "train.jsonl", DataConfig(columns={"images": "x"}), split="train")
        for (_, example), (before,) in zip(reader.numbered_examples(), raw, strict=True):
            messages = example.messages[len(example.messages) - len(before.messages) :]
            assert [message["content"] for message in messages] == [m["content"] for m in before.messages]
            assert [picture.digest for picture in example.images] == [picture.digest for picture in before.images]
            if name == "out":
                assert content_digest(example) == content_digest(before)
    # an image in the folder is written relative to it
    (folder / "out" / "in.png").write_bytes(png())
    write_rows(folder / "raw" / "0.jsonl", [{"messages": turns("?"), "image": str(folder / "out/in.png")}])
    process_files(config)
    assert '"images": ["in.png"]' in (folder / "out/train.jsonl").read_text()


def read_file(path: Path) -> list:
    reader = ExampleReader(path, DataConfig(), split="train")
    return [example for _, example in reader.numbered_examples()]
