"""Images of rows: where they lie, checked by their headers, and decoded when a batch is made.

A picture is never held decoded: rows keep a `Picture`, which names a file or has the encoded bytes.
In the text of a message each picture stands as one `IMAGE_MARK`.
"""

from dataclasses import dataclass

# What stands for a picture in a message's text: a noncharacter of Unicode, which no text to be
# exchanged may hold.
IMAGE_MARK = "\ufdd0"


@dataclass(frozen=True)
class Picture:
    """An image of a row, not decoded. `path` names its file, for a member of a zip
    `ARCHIVE.zip!member`; where it is empty, `data` has the encoded file. `width` and `height` are
    pixels as it is shown, turned as its EXIF says."""

    path: str
    data: bytes
    width: int
    height: int
