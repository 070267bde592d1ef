"""Images of rows: where they lie, checked by their headers, and decoded when a batch is made.

A picture is never held decoded: rows keep a `Picture`, which names a file or has the encoded bytes.
In the text of a message each picture stands as one `IMAGE_MARK`.
"""

import base64
import contextlib
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sft_play.config.schema import DataConfig
from sft_play.data.sources.image_files import (
    ARCHIVE_MARK,
    ImageError,
    describe_other_file,
    fetched_images_dir,
    image_format,
    locate_image,
    open_image,
)
from sft_play.errors import SftPlayError
from sft_play.files import relative_to_cwd
from sft_play.log import one_line
from sft_play.text import format_size

if TYPE_CHECKING:
    import PIL.Image

# What stands for a picture in a message's text: a noncharacter of Unicode, which no text to be
# exchanged may hold.
IMAGE_MARK = "\ufdd0"

# Formats of pixels. Pillow also knows drawings, for which it starts other programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# Pixels that become 8-bit RGB without a choice of ours: `I` holds 16 bits in PNG and PPM, anything
# in TIFF.
_MODES = frozenset(
    {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
    | {"I;16", "I;16B", "I;16L", "I;16N"}
)
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
# What the last bytes of a whole file have, and how many of them are searched: some programs write
# on behind it.
_END_MARKS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "GIF": b"\x3b"}
_TAIL_BYTES = 4096
# EXIF says with these that width and height are exchanged.
_ORIENTATION_TAG, _TURNED_ORIENTATIONS = 0x0112, (5, 6, 7, 8)
_DAMAGED = "an image is truncated or damaged"
# What Pillow and zipfile raise for bytes that they cannot read.
_READ_ERRORS = (
    *(OSError, SyntaxError, ValueError, LookupError, EOFError, TypeError, ArithmeticError),
    *(RuntimeError, struct.error, zlib.error, zipfile.BadZipFile),
)


@dataclass(frozen=True)
class Picture:
    """An image of a row, not decoded. `path` names its file, for a member of a zip
    `ARCHIVE.zip!member`; where it is empty, `data` has the encoded file. `width` and `height` are
    pixels as it is shown, turned as its EXIF says."""

    path: str
    data: bytes
    width: int
    height: int

    @property
    def file(self) -> str:
        """The path of the file that it lies in, for a member of a zip the zip's; "" for bytes."""
        archive, has_member, _ = self.path.partition(ARCHIVE_MARK)
        return f"{archive}.zip" if has_member else self.path

    @property
    def name(self) -> str:
        """The picture in messages: its path, or `bytes (PNG, 12.0 KiB)`."""
        if self.path:
            return one_line(str(relative_to_cwd(Path(self.path))), limit=300)
        return f"bytes ({image_format(self.data) or 'unknown'}, {format_size(len(self.data))})"

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded file, the same wherever it lies. Reads the file."""
        with self.open_encoded() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]

    @property
    def data_uri(self) -> str:
        """The encoded file as a data URI."""
        kind = (image_format(self.data) or "octet-stream").lower()
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode('ascii')}"

    @contextlib.contextmanager
    def open_encoded(self) -> Iterator[IO[bytes]]:
        """Open the encoded file. What cannot be read of it, in the block too, is an ImageError that
        names the picture."""
        try:
            with open_image(self.path, self.data) as stream:
                yield stream
        except (SftPlayError, MemoryError):
            raise
        except _READ_ERRORS as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise ImageError(
                _DAMAGED, f"{self.name}: {one_line(str(reason), limit=200)}; replace the file"
            ) from None

    def decode(self) -> "PIL.Image.Image":
        """The pixels as 8-bit RGB: turned as EXIF says, 16 bits scaled to 8, transparency over
        white. Raises ImageError where the file is damaged, or its size is no longer the recorded
        one."""
        import PIL.ImageOps

        size = (self.width, self.height)
        with self.open_encoded() as stream, _without_pixel_limit():
            image: PIL.Image.Image = PIL.Image.open(stream, formats=_FORMATS)
            # before its pixels are read: another file of this name may be a decompression bomb
            if sorted(image.size) == sorted(size):
                image.load()
                image = PIL.ImageOps.exif_transpose(image)
            if image.size == size:
                return _convert_to_rgb(image)
        raise ImageError(
            "an image has changed",
            f"{self.name} had {size[0]:,} x {size[1]:,} pixels when its row was read, and has"
            f" {image.width:,} x {image.height:,}; run again",
        )

    def thumbnail_uri(self, max_side: int) -> str:
        """A small JPEG of the picture as a data URI, no side longer than `max_side` pixels."""
        image, buffer = self.decode(), io.BytesIO()
        image.thumbnail((max_side, max_side))
        image.save(buffer, "JPEG", quality=85)
        return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def find_picture(value: Any, folder: str, data: DataConfig) -> Picture:
    """The picture that a row's value names (a path, bytes, a data URI, an address, an object with
    one of them), checked by its header. `folder`: where relative paths start. Raises ImageError
    where it cannot be used."""
    path, encoded = locate_image(value, folder, can_fetch=data.fetch_images)
    try:
        return _check_header(Picture(path, encoded, 0, 0), data.max_image_megapixels)
    except ImageError:
        # what an address gave once may be better the next time
        if path and Path(path).parent == fetched_images_dir():
            Path(path).unlink(missing_ok=True)
        raise


def _check_header(picture: Picture, max_megapixels: float) -> Picture:
    """The picture with its size. Raises ImageError where it is no still image, or too large."""
    import PIL.Image

    with picture.open_encoded() as stream, _without_pixel_limit():
        beginning = stream.read(512)
        if not beginning:
            raise ImageError("an image file is empty", f"{picture.name} has 0 bytes; replace it")
        stream.seek(0)
        try:
            image = PIL.Image.open(stream, formats=_FORMATS)
        except PIL.UnidentifiedImageError:
            if image_format(beginning):
                raise ImageError(_DAMAGED, f"{picture.name}: it ends in its header") from None
            raise ImageError(
                "a file is not an image", f"{picture.name} is {describe_other_file(beginning)}"
            ) from None
        reason, problem = _kind_problem(image, max_megapixels)
        if reason:
            raise ImageError(reason, f"{picture.name} {problem}")
        size = stream.seek(0, io.SEEK_END)
        stream.seek(max(0, size - _TAIL_BYTES))
        tail = stream.read()
        is_whole = _END_MARKS.get(image.format or "", b"") in tail
        if image.format == "PNG" and b"eXIf" in tail:  # behind the pixels, which are read to it
            image.load()
        # PNG's own getexif would read all pixels
        orientation = PIL.Image.Image.getexif(image).get(_ORIENTATION_TAG)
        # Pillow gives TIFF its size as it is shown
        is_turned = image.format != "TIFF" and orientation in _TURNED_ORIENTATIONS
        width, height = image.size[::-1] if is_turned else image.size
        if beginning[:4] == b"RIFF":
            is_whole = size >= 8 + int.from_bytes(beginning[4:8], "little")
    picture = replace(picture, width=width, height=height)
    if not is_whole:
        picture.decode()  # raises, unless a program has written much behind the image
    return picture


def _kind_problem(image: "PIL.Image.Image", max_megapixels: float) -> tuple[str, str]:
    """Why pixels of this kind are not taken, and what to do; two empty texts where they are."""
    width, height = image.size
    if not width or not height:
        return "an image has no pixels", f"is {width:,} x {height:,} pixels; replace it"
    if width * height > max_megapixels * 1e6:
        return (
            "an image is larger than data.max_image_megapixels",
            f"is {width:,} x {height:,} pixels, {width * height / 1e6:,.1f} million, and the limit"
            f" is {max_megapixels:g}; make it smaller, or raise data.max_image_megapixels",
        )
    frames = getattr(image, "n_frames", 1)
    # cameras keep a preview behind the photo (MPO)
    if frames > 1 and image.format != "MPO":
        return (
            "an image is animated, or has several pages",
            f"has {frames:,} frames ({image.format}); save the one that is meant as PNG",
        )
    is_sixteen_bit = image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS
    if image.mode not in _MODES and not is_sixteen_bit:
        return (
            "an image has pixels that are not read",
            f"has pixels of mode {image.mode} ({image.format}); save it as 8-bit RGB",
        )
    return "", ""


# The limit is data.max_image_megapixels, which was checked before any pixel is read.
@contextlib.contextmanager
def _without_pixel_limit() -> Iterator[None]:
    import PIL.Image

    limit = PIL.Image.MAX_IMAGE_PIXELS
    PIL.Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        PIL.Image.MAX_IMAGE_PIXELS = limit


def _convert_to_rgb(image: "PIL.Image.Image") -> "PIL.Image.Image":
    import numpy as np
    import PIL.Image

    if image.mode.startswith("I"):  # Pillow would cut 16 bits off at 255
        values = np.asarray(image).astype(np.int64).clip(0, 65_535)
        image = PIL.Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8))
    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        image = PIL.Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")
