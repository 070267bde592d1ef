"""Where an image of a row lies: a file, a member of a zip, bytes, a data URI, or an address; and
what a file is that is no image.

A relative path starts from the folder of the row's data file and stays in it. A path that is not
there is looked for in the zip archives of that folder.
"""

import base64
import binascii
import functools
import hashlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from sft_play.errors import DataError
from sft_play.files import atomic, cache_dir
from sft_play.log import one_line
from sft_play.text import format_size

# What stands between the path of a zip, without its `.zip`, and the name of a member.
ARCHIVE_MARK = ".zip!"
FETCH_TIMEOUT_S = 30
MAX_FETCHED_BYTES = 64 << 20
# An object holds its image under the first of these keys that is filled: `bytes` and `path` are of
# `datasets`, `url` is OpenAI's.
_VALUE_KEYS = ("bytes", "image", "image_url", "path", "url")
# How base64 of a PNG, JPEG, GIF and WebP begins, as some data sets have it without `data:`.
_BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_MIN_BASE64_CHARS = 64


class ImageError(DataError):
    """An image of a row cannot be used: the reason that rows are counted by; which image, what was
    found and what to do."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


def locate_image(value: Any, folder: str, *, can_fetch: bool) -> tuple[str, bytes]:
    """Find what a row calls an image: the path of its file, or "" and its bytes. `folder`: where
    relative paths start, "" for a row that is in no folder. Raises ImageError where there is none.
    """
    if isinstance(value, Mapping):
        filled = (value[key] for key in _VALUE_KEYS if value.get(key) not in (None, ""))
        value = next(filled, None)
        if isinstance(value, Mapping):  # `image_url: {url: …}`
            return locate_image(value, folder, can_fetch=can_fetch)
    if isinstance(value, bytes):
        return "", value
    if not isinstance(value, str) or not value.strip():
        raise ImageError(
            "an image is neither a path nor its bytes",
            f"it is {one_line(repr(value), limit=60)}; write a path, or an object with bytes, path"
            " or url",
        )
    if value.startswith(_BASE64_STARTS) and len(value) >= _MIN_BASE64_CHARS:
        return "", _decode_base64(value)
    scheme, has_scheme, _ = value.partition("://")
    scheme = scheme.lower() if has_scheme else value[:5].lower()
    if scheme == "data:":
        return "", _decode_data_uri(value)
    if scheme in ("http", "https"):
        return str(_fetch_once(value, can_fetch=can_fetch)), b""
    if scheme == "file":
        value = unquote(urlsplit(value).path)
    elif has_scheme:
        raise ImageError(
            f"an image is an address of {one_line(scheme, limit=20)}, which is not read",
            f"{one_line(value, limit=120)}; download it and write its path",
        )
    return _find_file(value, folder), b""


def _decode_data_uri(value: str) -> bytes:
    header, comma, text = value.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ImageError("a data URI of an image is not base64", one_line(header, limit=60))
    return _decode_base64(text)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(
            "an image's base64 is damaged", f'{error}; it begins with "{one_line(text, limit=30)}"'
        ) from None


# Files and members of zips


def _find_file(value: str, folder: str) -> str:
    try:
        archive, has_member, member = value.partition(ARCHIVE_MARK)
        if has_member:
            archive_path = _resolve(f"{archive}.zip", folder)
            if member in open_archive(archive_path).NameToInfo:
                return f"{archive_path}!{member}"
            raise ImageError("an image is missing", f"{archive_path} has no member {member}")
        path = _resolve(value, folder)
        if path.exists():
            return str(path)
        matches = [] if Path(value).is_absolute() else _find_in_archives(value, folder)
    except ImageError:
        raise
    # a name that is too long, a NUL in it, links that lead in a circle, a damaged zip
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(
            "an image is missing", f"{one_line(value, limit=200)} cannot be looked for: {reason}"
        ) from None
    if len(matches) > 1:
        raise ImageError(
            "an image is in several zips",
            f"{', '.join(matches)}; write the path as ARCHIVE.zip!{one_line(value, limit=200)}",
        )
    if not matches:
        raise ImageError(
            "an image is missing",
            f"{one_line(str(path), limit=300)} is not there, nor in a zip beside the data file",
        )
    return matches[0]


def _resolve(value: str, folder: str) -> Path:
    """An absolute path as it is, since a person wrote it; a relative one in the folder. Raises
    ImageError where it leaves the folder, through a link too."""
    path = Path(os.path.normpath(value))
    if path.is_absolute():
        return path
    if not folder:
        raise ImageError(
            "an image's path is relative, and its row is in no folder",
            f"{one_line(value, limit=200)}; write the absolute path",
        )
    root = Path(folder).absolute()
    path = root / path
    target = path.resolve() if ".." not in path.relative_to(root).parts else None
    if target is None or not target.is_relative_to(root.resolve()):
        raise ImageError(
            "an image's path leaves the folder of its data file",
            f"{one_line(value, limit=200)} leads out of {root}; write the absolute path, or put the"
            " file into the folder",
        )
    return path


def _find_in_archives(value: str, folder: str) -> list[str]:
    root = Path(folder).absolute()
    matches = []
    for archive in _list_archives(root, root.stat().st_mtime_ns):
        members = open_archive(archive).NameToInfo
        # a folder that was packed with its name, or without
        names = (value, value.removeprefix(f"{archive.stem}/"))
        matches += [f"{archive}!{name}" for name in dict.fromkeys(names) if name in members]
    return matches


@functools.lru_cache(maxsize=100)
def _list_archives(folder: Path, _mtime_ns: int) -> list[Path]:
    return sorted(folder.glob("*.zip"))


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip, once in each process. Raises OSError or BadZipFile."""
    return _open_archive(path, path.stat().st_mtime_ns, os.getpid())


# By process: one that was forked would move the position of its parent's open file.
@functools.lru_cache(maxsize=8)
def _open_archive(path: Path, _mtime_ns: int, _process: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def open_image(path: str, data: bytes) -> IO[bytes]:
    """Open the encoded image: a file, the member of a zip, or the bytes where `path` is empty.
    Raises OSError, KeyError and what zipfile raises where it cannot be read."""
    if not path:
        return io.BytesIO(data)
    archive, has_member, member = path.partition(ARCHIVE_MARK)
    if has_member:
        return open_archive(Path(f"{archive}.zip")).open(member)
    if not Path(path).is_file():  # a pipe would wait for ever
        kind = "a folder" if Path(path).is_dir() else "no regular file"
        raise OSError(f"it is {kind if Path(path).exists() else 'not there any more'}")
    return Path(path).open("rb")


# Addresses


def fetched_images_dir() -> Path:
    """The folder of fetched images."""
    return cache_dir() / "images"


def _fetch_once(url: str, *, can_fetch: bool) -> Path:
    address = one_line(url, limit=120)
    if not can_fetch:
        raise ImageError(
            "an image is an address, and none is fetched",
            f"{address}; data.fetch_images=true fetches it once, or download it and write its path",
        )
    # takes a tenth of a second, which other rows need not wait
    import http.client
    import urllib.request

    path = fetched_images_dir() / hashlib.sha256(url.encode()).hexdigest()
    if path.is_file():
        return path
    request = urllib.request.Request(url, headers={"User-Agent": "sft_play"})
    try:
        with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S) as response:
            content = response.read(MAX_FETCHED_BYTES + 1)
        if len(content) > MAX_FETCHED_BYTES:
            raise ValueError(f"it is larger than {format_size(MAX_FETCHED_BYTES)}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ImageError("an image could not be fetched", f"{address}: {error}") from None
    with atomic.replace_path(path) as temporary:
        temporary.write_bytes(content)
    return path


# What a file is that is no image

_SIGNATURES = {
    b"%PDF": "a PDF document: save the page that is meant as PNG",
    b"%!PS": "PostScript: save it as PNG",
    b"PK\x03\x04": "a zip archive or an Office file: unpack it, or save the page as PNG",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: git lfs pull",
    b"\x1f\x8b": "compressed with gzip: gunzip it",
    b"8BPS": "a Photoshop file: save it as PNG",
    b"\x1aE\xdf\xa3": "a video (Matroska or WebM), and only text and images are trained",
    b"OggS": "sound or video (Ogg), and only text and images are trained",
    b"ID3": "sound (MP3), and only text and images are trained",
    b"fLaC": "sound (FLAC), and only text and images are trained",
}
# Behind a size of four bytes, or also behind a name of four.
_CONTAINER_SIGNATURES = {
    **dict.fromkeys(
        (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1"),
        "a HEIC image, which is not read: save it as JPEG or PNG",
    ),
    b"ftyp": "a video (MP4 or QuickTime), and only text and images are trained",
    b"AVI ": "a video (AVI), and only text and images are trained",
    b"WAVE": "sound (WAV), and only text and images are trained",
}
_IMAGE_STARTS = {
    b"\x89PNG": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}


def image_format(beginning: bytes) -> str:
    """The name of an image's format by its first bytes; "" where it is none of the usual ones."""
    if beginning[:4] == b"RIFF" and beginning[8:12] == b"WEBP":
        return "WebP"
    return next((name for mark, name in _IMAGE_STARTS.items() if beginning.startswith(mark)), "")


def describe_other_file(beginning: bytes) -> str:
    """What a file is that is no image, by its first bytes, and what to do."""
    for marks, offsets in ((_SIGNATURES, (0,)), (_CONTAINER_SIGNATURES, (4, 8))):
        for mark, kind in marks.items():
            if any(beginning.startswith(mark, offset) for offset in offsets):
                return kind
    text = beginning.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if "<svg" in text.lower():
        return "SVG, a drawing without pixels: save it as PNG"
    if text.lower().startswith(("<!doctype", "<html", "<?xml", "<head", "<body")):
        return "a web page, saved in place of the image: fetch the image itself"
    if text.isprintable() or text.replace("\n", " ").replace("\r", " ").isprintable():
        return f'text that begins with "{one_line(text, limit=40)}"'
    return f"unknown; its first bytes are {beginning[:8].hex(' ')}: save it as PNG or JPEG"
