"""The parts of a .docx: a zip archive opened with limits, and XML read without entities.

Both forms of the standard are read: ISO Strict gives the same elements other namespaces. Parts are unpacked one by
one, and only when they are asked for; pictures never are. (python-docx unpacks every part, and opens neither Strict
files nor those with a link to a missing part.)
"""

from __future__ import annotations

import io
import posixpath
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from sft_play.documents.text import Unreadable
from sft_play.log import one_line
from sft_play.units import MIB

MAX_TEXT_BYTES = 128 * MIB
"""Most bytes of XML that are unpacked from one document; the largest books hold about a tenth."""
MAX_RATIO = 300
"""Most bytes that one packed byte may unpack to, in parts of more than `_SMALL_BYTES`; tables reach 100."""
_SMALL_BYTES = 16 * MIB
_MAX_ARCHIVE_BYTES = 4096 * MIB
"""Most bytes of all parts together as declared, pictures and films among them."""

_SCHEMAS = "http://schemas.openxmlformats.org"
_STRICT = "http://purl.oclc.org/ooxml"
_PREFIXES = {
    f"{_SCHEMAS}/wordprocessingml/2006/main": "w",
    f"{_STRICT}/wordprocessingml/main": "w",
    f"{_SCHEMAS}/officeDocument/2006/math": "m",
    f"{_STRICT}/officeDocument/math": "m",
    f"{_SCHEMAS}/drawingml/2006/main": "a",
    f"{_STRICT}/drawingml/main": "a",
    f"{_SCHEMAS}/officeDocument/2006/relationships": "r",
    f"{_STRICT}/officeDocument/relationships": "r",
    f"{_SCHEMAS}/markup-compatibility/2006": "mc",
}
_NAMESPACES = {
    prefix: tuple(uri for uri, known in _PREFIXES.items() if known == prefix) for prefix in set(_PREFIXES.values())
}


def name(element: Any) -> str:
    """An element's name with the usual prefix, whichever form of the standard; `?` before one that is not known."""
    tag = element.tag
    if not isinstance(tag, str):  # a comment or a processing instruction
        return ""
    uri, _, local = tag.rpartition("}")
    return f"{_PREFIXES.get(uri[1:], '?')}:{local}"


def children(element: Any) -> Iterator[Any]:
    """The direct children of an element, comments left out."""
    return (item for item in element if isinstance(item.tag, str))


def child(element: Any, wanted: str) -> Any:
    """The first direct child of this name; None where there is none."""
    return None if element is None else next((item for item in children(element) if name(item) == wanted), None)


def attribute(element: Any, wanted: str) -> str | None:
    """An attribute by its prefixed name; None where it is not given."""
    if element is None:
        return None
    prefix, _, local = wanted.partition(":")
    for uri in _NAMESPACES[prefix]:
        value = element.get(f"{{{uri}}}{local}")
        if value is not None:
            return str(value)
    return None


def is_on(element: Any) -> bool | None:
    """A toggle property of Word: None where it is absent, else on unless its value says off."""
    return None if element is None else attribute(element, "w:val") not in ("0", "false", "off", "none")


@dataclass(frozen=True)
class Relation:
    """A link from one part to another: the last word of its kind, and the part's name."""

    kind: str
    target: str


class Package:
    """An opened .docx.

    Raises:
        Unreadable: it is no zip, is locked with a password, is not Word's, or unpacks to more than the limits.
    """

    def __init__(self, data: bytes) -> None:
        self._packed_bytes = len(data)
        self._unpacked_bytes = 0
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OSError) as error:
            raise Unreadable(f"the archive is broken or cut off ({one_line(str(error))})") from None
        infos = self._zip.infolist()
        # names in a package are compared without case, and some programs write backslashes
        self._names = {info.filename.replace("\\", "/").lstrip("/").lower(): info for info in infos}
        declared = sum(info.file_size for info in infos)
        packed = sum(info.compress_size for info in infos)
        if declared > _MAX_ARCHIVE_BYTES or (declared > 512 * MIB and declared > MAX_RATIO * max(packed, 1)):
            raise Unreadable(
                f"an archive of {_size(self._packed_bytes)} that says it unpacks to {_size(declared)}: not opened"
            )

    def main_part(self) -> str:
        """The name of the part that holds the document."""
        for relation in self.relations("").values():
            if relation.kind == "officeDocument":
                if relation.target.lower() in self._names and not relation.target.lower().startswith(("xl/", "ppt/")):
                    return relation.target
                raise Unreadable(f"not a Word document: its main part is {one_line(relation.target)}")
        if "word/document.xml" in self._names:
            return "word/document.xml"
        names = [one_line(item, limit=40) for item in sorted(self._names)]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise Unreadable(
            f"a zip archive without a Word document in it; it holds {', '.join(names[:4]) or 'nothing'}{more}"
        )

    def relations(self, part: str) -> dict[str, Relation]:
        """The links of a part (of the whole archive where `part` is empty) to other parts in it, by id."""
        folder, file = posixpath.split(part)
        root = self.read(posixpath.join(folder, "_rels", f"{file}.rels"))
        relations = {}
        for item in children(root) if root is not None else ():
            target = unquote(item.get("Target") or "")
            if item.get("TargetMode") != "External" and target:  # nothing outside the archive is ever opened
                kind = (item.get("Type") or "").rpartition("/")[2]
                absolute = target.lstrip("/") if target.startswith("/") else posixpath.join(folder, target)
                relations[item.get("Id") or ""] = Relation(kind, posixpath.normpath(absolute))
        return relations

    def read(self, part: str) -> Any:
        """The root element of a part; None where the archive has none of this name."""
        info = self._names.get(part.lower())
        return None if info is None else _parse(self._unpack(info), part)

    def _unpack(self, info: zipfile.ZipInfo) -> bytes:
        label = one_line(info.filename, limit=60)
        if info.flag_bits & 0x1:
            raise Unreadable(f"{label} in the archive is locked with a password")
        limit = min(MAX_TEXT_BYTES - self._unpacked_bytes, max(_SMALL_BYTES, MAX_RATIO * info.compress_size))
        if info.file_size > limit:
            raise _too_large(label, f"says it unpacks from {_size(info.compress_size)} to {_size(info.file_size)}")
        pieces, size = [], 0
        try:
            with self._zip.open(info) as file:
                while piece := file.read(MIB):  # counted, since the size that the archive declares may be a lie
                    size += len(piece)
                    if size > limit:
                        raise _too_large(label, f"unpacks from {_size(info.compress_size)} to more than {_size(limit)}")
                    pieces.append(piece)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, OSError, ValueError) as error:
            raise Unreadable(f"{label} in the archive is broken ({one_line(str(error))})") from None
        self._unpacked_bytes += size
        return b"".join(pieces)


def _too_large(label: str, what: str) -> Unreadable:
    return Unreadable(f"{label} {what}: more than is opened ({_size(MAX_TEXT_BYTES)} in all, {MAX_RATIO} times a part)")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB" if size_bytes >= MIB // 10 else f"{size_bytes:,} bytes"


_DOCTYPE = "<!DOCTYPE"


def _parse(data: bytes, part: str) -> Any:
    from lxml import etree  # type: ignore[import-untyped]

    label = one_line(part, limit=60)
    if any(_DOCTYPE.encode(encoding) in data for encoding in ("utf-8", "utf-16-le", "utf-16-be")):
        raise Unreadable(f"{label} declares XML entities (a DOCTYPE), which Word never writes: not opened")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=False, load_dtd=False)
    try:
        root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise Unreadable(f"{label} is not well-formed XML ({one_line(str(error))})") from None
    if root.getroottree().docinfo.doctype:  # in another encoding than the three above
        raise Unreadable(f"{label} declares XML entities (a DOCTYPE), which Word never writes: not opened")
    return root
