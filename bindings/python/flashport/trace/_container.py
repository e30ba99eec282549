"""A GGUF file: its metadata and where its tensors lie. Whatever the bytes are, reading ends in these or in TraceError.

The file is mapped, and nothing of a tensor is read here. Every count, length and offset is held against the bytes that
are left before anything is allocated or looped over, so a damaged header costs no more time or memory than the file
has bytes. The layout is that of GGUF 2 and 3, little-endian: magic, version, number of tensors, number of metadata
entries, the entries, the tensors' names, extents (fastest first), types and offsets, padding, data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from flashport.trace._errors import TraceError, gguf_package

_MOST_DIMS = 4  # GGML_MAX_DIMS
_MOST_EXTENT = 1 << 40  # what the extents of a tensor without elements may come to
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file. ``ne`` has four extents, fastest first; ``data`` the bytes of as many dense elements."""

    name: str
    type: Any  # gguf.GGMLQuantizationType
    ne: tuple[int, int, int, int]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    block_values: int
    block_bytes: int


@dataclass(frozen=True)
class Container:
    """What a file has: metadata by key, and tensors in the order of the file."""

    path: str
    metadata: dict[str, Any]
    entries: list[Entry]


class _Cursor:
    """Reads from the front to the back, and never past the end."""

    def __init__(self, path: str, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.path, self.data, self.place = path, data, 0

    def fail(self, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}: {problem} (at byte {self.place})")

    @property
    def left(self) -> int:
        return len(self.data) - self.place

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            self.fail(f"the file ends within {what}: {count} bytes expected, {self.left} left")
        taken = self.data[self.place : self.place + count].tobytes()
        self.place += count
        return taken

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        count: int = self.number("Q", f"the number of {what}")
        if count > self.left // least_bytes:
            self.fail(f"{count} {what} do not fit into the {self.left} bytes that are left")
        return count

    def text(self, what: str) -> str:
        length = self.count(f"bytes of {what}", 1)
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind != _ARRAY:
            self.fail(f"{what} has the unknown type {kind}")
        item = self.number("I", f"the element type of {what}")
        if item == _STRING:
            return [self.text(what) for _ in range(self.count(f"elements of {what}", 8))]
        if item not in _SCALARS:
            self.fail(f"{what} has elements of the unknown type {item}")
        size = struct.calcsize("<" + _SCALARS[item])
        count = self.count(f"elements of {what}", size)
        return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(count * size, what)))


def read(path: str | os.PathLike[str]) -> Container:
    """Maps a file and reads all of it but the data of its tensors."""
    gguf = gguf_package()
    name = os.fspath(path)
    if os.path.getsize(name) == 0:
        raise TraceError(f"{name}: the file is empty")
    cursor = _Cursor(name, np.memmap(name, np.uint8, "r"))
    if (magic := cursor.take(4, "the magic number")) != b"GGUF":
        cursor.fail(f"no GGUF file: it begins with {magic!r}, expected b'GGUF'")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        cursor.fail("a big-endian file; convert it first" if big_endian else f"GGUF version {version}, expected 2 or 3")
    tensors = cursor.number("Q", "the number of tensors")
    entries = cursor.count("metadata entries", 13)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text("a key")
        if key in metadata:
            cursor.fail(f"the key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.number("I", f"the type of {key!r}"), f"{key!r}")
    if tensors > cursor.left // 24:
        cursor.fail(f"{tensors} tensors do not fit into the {cursor.left} bytes that are left")
    headers = [_header(cursor, gguf) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        cursor.fail(f"general.alignment must be a power of two from 8 to 2^20, got {alignment!r}")
    begin = -(-cursor.place // alignment) * alignment
    found: dict[str, Entry] = {}
    for own_name, kind, ne, offset in headers:
        if own_name in found:
            cursor.fail(f"two tensors have the name {own_name!r}")
        if offset % alignment:
            cursor.fail(f"tensor {own_name!r} is at the offset {offset}, expected a multiple of {alignment}")
        if 0 in ne and math.prod(max(extent, 1) for extent in ne) > _MOST_EXTENT:
            cursor.fail(f"tensor {own_name!r} has the extents {list(ne)}")
        values, size = gguf.GGML_QUANT_SIZES[kind]
        if ne[0] % values:
            cursor.fail(
                f"tensor {own_name!r} has rows of {ne[0]} values, expected a multiple of {values} ({kind.name})"
            )
        count = math.prod(ne) // values * size
        if count > len(cursor.data) - begin - offset:
            cursor.fail(
                f"tensor {own_name!r} of {kind.name} {list(ne)} takes {count} bytes from the offset {offset}, and the "
                f"file has {max(len(cursor.data) - begin - offset, 0)} there"
            )
        data = cursor.data[begin + offset : begin + offset + count]
        found[own_name] = Entry(own_name, kind, ne, data, values, size)
    return Container(name, metadata, list(found.values()))


def _header(cursor: _Cursor, gguf: Any) -> tuple[str, Any, tuple[int, int, int, int], int]:
    """(name, type, extents, offset) of a tensor."""
    name = cursor.text("the name of a tensor")
    dims = cursor.number("I", f"the number of axes of {name!r}")
    if dims > _MOST_DIMS:
        cursor.fail(f"tensor {name!r} has {dims} axes, expected at most {_MOST_DIMS}")
    ne = [cursor.number("Q", f"the extents of {name!r}") for _ in range(dims)] + [1] * (_MOST_DIMS - dims)
    raw = cursor.number("I", f"the type of {name!r}")
    try:
        kind = gguf.GGMLQuantizationType(raw)
    except ValueError:
        cursor.fail(f"tensor {name!r} has the unknown type {raw}")
    if kind not in gguf.GGML_QUANT_SIZES:
        cursor.fail(f"tensor {name!r} has the type {kind.name}, whose block size is unknown")
    return name, kind, (ne[0], ne[1], ne[2], ne[3]), cursor.number("Q", f"the offset of {name!r}")
