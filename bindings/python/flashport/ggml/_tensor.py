"""ggml's description of a tensor over the memory of an array, and the arrays that views of it are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flashport import _core
from flashport.ggml import _layout
from flashport.ggml._layout import Extents, Strides
from flashport.typing import CacheFormat

_PLAIN = {"f32": ("fp32", "float32"), "f16": ("fp16", "float16"), "bf16": ("bf16", "bfloat16")}
_BLOCKS: dict[str, tuple[int, int]] = {name: sizes for name, sizes in _core.kv_format_blocks().items() if sizes[0] > 1}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def formats() -> dict[str, Any]:
    """flashport's format of each of ggml's types that attention reads, by ggml's name in lower case."""
    return {name: fmt for name, (fmt, _) in _PLAIN.items()} | {name: name for name in _BLOCKS}


def block_size(kind: str) -> tuple[int, int]:
    """(values, bytes) of what elements of a type come in."""
    return _BLOCKS[kind] if kind in _BLOCKS else (1, _BYTES[_PLAIN[kind][1]])


@dataclass(frozen=True, init=False)
class Tensor:
    """A tensor as ggml has it: memory, an element type, extents and byte strides, fastest axis first.

    Nothing is copied: the memory is that of an array of NumPy, torch or CuPy, on any device, and must stay. Strides may
    be those of any view. A wrong description raises ``ValueError`` or ``TypeError`` when it is made.
    """

    data: Any = field(repr=False)
    type: str
    ne: Extents
    nb: Strides
    offset: int

    def __init__(
        self, data: Any, type: str, ne: Sequence[int], nb: Sequence[int] | None = None, offset: int = 0
    ) -> None:
        """Fills extents and strides up to four, and holds all against the memory.

        Args:
            data: A contiguous array of any element type and shape, whose bytes are meant.
            type: ggml's name of the element type, in any case: "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0",
                "q5_1", "iq4_nl".
            ne: Extents, up to four.
            nb: Byte strides, as many as ``ne``. Default: those of elements that lie in the order of ``ne``.
            offset: Bytes of ``data`` before the first element.
        """
        kind = str(type).lower()
        if kind not in formats():
            _fail(f"type must be one of {', '.join(formats())}, got {type!r}")
        extents = tuple(int(extent) for extent in ne)
        if not 1 <= len(extents) <= 4 or min(extents) < 0:
            _fail(f"ne must be one to four extents, fastest first, got {extents}")
        values, size = block_size(kind)
        if extents[0] % values:
            _fail(f"ne[0] must be a multiple of {values}, the values of a block of {kind}, got {extents[0]}")
        given = None if nb is None else tuple(int(stride) for stride in nb)
        if given is not None and len(given) != len(extents):
            _fail(f"nb must have as many byte strides as ne has extents, {len(extents)}, got {given}")
        full = (*extents, 1, 1, 1)[:4]
        dense = _layout.dense_strides(full, values, size)
        strides = dense if given is None else (*given, *dense[len(given) :])
        if not _is_contiguous(data):
            _fail("data must be contiguous: describe a view by nb and offset, or take it by Tensor.of")
        held = _byte_count(data) - offset
        if offset < 0 or not _layout.strides_fit(full, strides, values, size, held):
            _fail(
                f"ne {list(full)} and nb {list(strides)} of {kind} must lead to whole elements of the {max(held, 0)} "
                f"bytes of data from the offset {offset}; nb[0] is {size}, the bytes of "
                f"{'a block' if values > 1 else 'an element'} (copy a tensor whose rows lie apart, as ggml_cont does)"
            )
        _set(self, data, kind, full, strides, offset)

    @classmethod
    def of(cls, array: Any, type: str | None = None) -> Tensor:
        """The tensor that an array is: ``ne`` is its shape reversed, ``nb`` its strides; no copy.

        Args:
            array: An array of NumPy, torch or CuPy with up to four axes, also a view; rows of blocks as uint8.
            type: ggml's type; to be given for uint8. Default: that of the array's elements.
        """
        name = str(array.dtype).removeprefix("torch.")
        kinds = {dtype: kind for kind, (_, dtype) in _PLAIN.items()}
        kind = kinds.get(name) if type is None else str(type).lower()
        if kind is None or (kind in _PLAIN and kinds.get(name) != kind) or (kind in _BLOCKS and name != "uint8"):
            _fail(f"array must have the elements of type (uint8 for blocks), got {name} and type {type!r}")
        values, size = block_size(kind) if kind in formats() else (1, 1)
        shape = tuple(int(extent) for extent in array.shape)
        if not 1 <= len(shape) <= 4 or (values > 1 and shape[-1] % size):
            _fail(f"array must have one to four axes and whole blocks of {kind}, got the shape {shape}")
        strides, flat = _memory(array)
        ne = (shape[-1] // size * values if values > 1 else shape[-1], *shape[-2::-1])
        nb = (size if values > 1 else strides[-1], *strides[-2::-1])
        return cls(flat, kind, ne, nb)

    def permute(self, *axes: int) -> Tensor:
        """ggml_permute: axis i becomes axis ``axes[i]``; no byte moves."""
        if sorted(axes) != [0, 1, 2, 3]:
            _fail(f"axes of permute must be 0 to 3 in some order, got {axes}")
        order = [axes.index(i) for i in range(4)]
        ne, nb = ([x[i] for i in order] for x in (self.ne, self.nb))
        if self.type in _BLOCKS and order[0] != 0:
            _fail(f"permute of {self.type} must leave axis 0, whose blocks are one piece, where it is, got {axes}")
        return _unchecked(self, ne, nb)

    @property
    def format(self) -> CacheFormat:
        """flashport's name of the element type: "fp16", "q8_0"."""
        return formats()[self.type]  # type: ignore[no-any-return]

    @property
    def block(self) -> tuple[int, int]:
        """(values, bytes) of what elements come in: blocks, or single ones."""
        return block_size(self.type)

    @property
    def is_quantised(self) -> bool:
        """Whether elements come in blocks that share a scale."""
        return self.type in _BLOCKS

    def array(self) -> Any:
        """A view of the memory in NumPy's order of axes (ne3, ne2, ne1, ne0), rows of blocks as bytes; no copy."""
        values, size = block_size(self.type)
        dtype = "uint8" if values > 1 else _PLAIN[self.type][1]
        shape = (*self.ne[:0:-1], self.ne[0] // values * size if values > 1 else self.ne[0])
        strides = (*self.nb[:0:-1], 1 if values > 1 else self.nb[0])
        return _view(self.data, dtype, shape, strides, self.offset)


def _fail(problem: str) -> NoReturn:
    raise ValueError(f"ggml.Tensor: {problem}")


def _unchecked(tensor: Tensor, ne: Sequence[int], nb: Sequence[int]) -> Tensor:
    """Another view of a tensor's elements, which lie where they did: nb[0] may be any here."""
    made = object.__new__(Tensor)
    _set(made, tensor.data, tensor.type, ne, nb, tensor.offset)
    return made


def _set(tensor: Tensor, data: Any, kind: str, ne: Sequence[int], nb: Sequence[int], offset: int) -> None:
    fields = {"data": data, "type": kind, "ne": tuple(ne), "nb": tuple(nb), "offset": offset}
    for name, value in fields.items():
        object.__setattr__(tensor, name, value)


def library(array: Any) -> Any:
    """NumPy, torch or CuPy, whose array this is; else TypeError."""
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray")):
        found = sys.modules.get(name)
        if found is not None and isinstance(array, getattr(found, kind)):
            return found
    raise TypeError(f"ggml.Tensor: data must be an array of NumPy, torch or CuPy, got {type(array).__name__}")


def _is_torch(array: Any) -> bool:
    return bool(library(array).__name__ == "torch")


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if _is_torch(array) else array.flags.c_contiguous)


def _byte_count(array: Any) -> int:
    return int(array.numel() * array.element_size() if _is_torch(array) else array.nbytes)


def _memory(array: Any) -> tuple[tuple[int, ...], Any]:
    """(byte strides, a contiguous array over all that lies between the first element and the last)."""
    xp = library(array)
    size = array.element_size() if _is_torch(array) else array.itemsize
    strides = array.stride() if _is_torch(array) else [stride // size for stride in array.strides]
    if min(strides, default=0) < 0:
        _fail(f"array must have strides that are not negative, got {tuple(stride * size for stride in strides)}")
    is_empty = 0 in array.shape
    count = 0 if is_empty else 1 + sum((e - 1) * s for e, s in zip(array.shape, strides, strict=True))
    if _is_torch(array):
        flat = array.as_strided((count,), (1,))
    else:
        flat = xp.lib.stride_tricks.as_strided(array, (count,), (size,))
    return tuple(int(stride * size) for stride in strides), flat


def _view(data: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], offset: int) -> Any:
    xp = library(data)
    if 0 in shape:
        if _is_torch(data):
            return xp.empty(tuple(shape), dtype=getattr(xp, dtype), device=data.device)
        return xp.empty(tuple(shape), dtype)
    if _is_torch(data):
        size = getattr(xp, dtype).itemsize
        flat = data.reshape(-1).view(xp.uint8)[offset:]
        if offset % size or flat.storage_offset() % size:
            _fail(f"offset must be a multiple of {size}, the bytes of {dtype}, got {offset}")
        flat = flat[: len(flat) // size * size].view(getattr(xp, dtype))
        return flat.as_strided(tuple(shape), [stride // size for stride in strides])
    if dtype == "bfloat16":
        raise TypeError("ggml.Tensor: NumPy and CuPy have no bf16: give the memory of a bf16 tensor as torch's")
    flat = data.reshape(-1).view("uint8")
    size = xp.dtype(dtype).itemsize
    flat = flat[offset : offset + (len(flat) - offset) // size * size].view(dtype)
    return xp.lib.stride_tricks.as_strided(flat, shape, strides)
