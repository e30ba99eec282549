"""Which byte belongs to which element: links of a tensor's name, byte strides, and the values that they lead to.

``ne`` counts elements of four axes and ``nb`` the bytes between their neighbours, fastest first, as in ggml. The trace
tools of llama.cpp's forks store ne and the bytes that a view spans, but no nb. The last link of a name tells it: after
a permutation the bytes are still those of the parent,

    (permuted)               ne [D, n_kv, heads, batch], in memory D, heads, n_kv, batch
    (copy), (cont), ...      ne [D, n_kv, heads, batch], in memory in this order

and any other name (a view that may have been made with either strides, a name without links, one that was cut at 63
characters) does not tell it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashport.ggml import _layout as ggml_layout
from flashport.ggml._layout import Strides
from flashport.trace._container import Entry
from flashport.trace._errors import TraceError, gguf_package

LONGEST_NAME = 63  # of a tensor: GGML_MAX_NAME less its zero
_OPERATIONS = {
    "view": "VIEW", "permuted": "PERMUTE", "copy": "CPY", "cont": "CONT", "reshaped": "RESHAPE",
    "transposed": "TRANSPOSE",
}  # fmt: skip
_DENSE_LINKS = ("copy", "cont", "reshaped")
_NAME = re.compile(r"(?P<base>.*?)(?P<links>(?: \((?:copy of [^()]*|[a-z_]+)\))*)")
_STEP = re.compile(r"_step_(\d*)$")
_CUT_STEP = re.compile(r"(?<=\))_(?:s|st|ste|step)?$")
_PREFIX = re.compile(r"^(kqv_out|src(\d+))_(?!step_|-)")


@dataclass(frozen=True)
class Name:
    """A name of the file taken apart: "src1_cache_k_l0 (view) (permuted)_step_3"."""

    base: str  # "cache_k_l0"
    links: tuple[str, ...]  # ("view", "permuted")
    step: int | None  # 3; None where it was cut off
    source: int | None  # 1, in names that have a prefix
    is_output: bool
    was_cut: bool  # whether links may be missing

    @property
    def chain(self) -> str:
        """The operations that the links stand for, in order."""
        return " > ".join(_OPERATIONS.get(link, link.upper()) for link in self.links) or "-"

    @property
    def layer(self) -> int | None:
        """The layer that llama.cpp writes into the names of its graph: kqv_out-3, Qcur-3, cache_k_l3."""
        found = re.search(r"(?:-|_l)(\d+)$", self.base)
        return int(found[1]) if found else None


def parse_name(name: str) -> Name:
    """Takes a name apart."""
    step = _STEP.search(name)
    body = name[: step.start()] if step else name
    was_cut = step is None and len(name.encode()) >= LONGEST_NAME
    if was_cut and (rest := _CUT_STEP.search(name)):  # the links are whole
        body, was_cut = name[: rest.start()], False
    prefix = _PREFIX.match(body)
    is_output = "kqv_out" in body if prefix is None else prefix[2] is None
    source = int(prefix[2]) if prefix and prefix[2] and len(prefix[2]) < 4 else None
    found = _NAME.fullmatch(body[prefix.end() :] if prefix else body)
    base, text = (found["base"], found["links"]) if found else (body, "")
    links = tuple("copy" if link.startswith("copy of") else link for link in re.findall(r"\(([^()]*)\)", text))
    number = int(step[1]) if step and step[1] and len(step[1]) < 10 else None
    return Name(base, links, number, source, is_output, was_cut)


def dense_strides(entry: Entry) -> Strides:
    """Those of elements that lie in the order of ne."""
    return ggml_layout.dense_strides(entry.ne, entry.block_values, entry.block_bytes)


def permuted_strides(entry: Entry) -> Strides:
    """Those of a permutation (0, 2, 1, 3) of elements that lie in their parent's order."""
    return ggml_layout.permuted_strides(entry.ne, entry.block_values, entry.block_bytes)


def told_strides(entry: Entry, name: Name) -> list[Strides]:
    """The strides that a name without strides beside it allows; the likelier one first."""
    dense, permuted = dense_strides(entry), permuted_strides(entry)
    if 1 in entry.ne[1:3]:  # both are the same bytes
        return [dense]
    if name.was_cut or not name.links or name.links[-1] not in ("permuted", *_DENSE_LINKS):
        return [dense, permuted]
    return [permuted if name.links[-1] == "permuted" else dense]


def check_strides(path: str, entry: Entry, nb: Strides) -> None:
    """Raises TraceError where strides lead out of the data or between elements."""
    if not ggml_layout.strides_fit(entry.ne, nb, entry.block_values, entry.block_bytes, len(entry.data)):
        raise TraceError(
            f"{path}: tensor {entry.name!r} of {entry.type.name} {list(entry.ne)} has the strides {list(nb)}, which "
            f"lead out of its {len(entry.data)} bytes or between its elements"
        )


def rows(entry: Entry, nb: Strides) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(ne3, ne2, ne1, bytes of a row): a view of the file."""
    shape = (*entry.ne[:0:-1], ggml_layout.row_bytes(entry.ne, entry.block_values, entry.block_bytes))
    if 0 in shape:
        return np.zeros(shape, np.uint8)
    return np.lib.stride_tricks.as_strided(entry.data, shape, (*nb[:0:-1], 1), writeable=False)


def values(entry: Entry, nb: Strides) -> np.ndarray[Any, Any]:
    """(ne3, ne2, ne1, ne0): a copy in the element's own type where NumPy has it, else dequantised to fp32."""
    gguf = gguf_package()
    own_rows = np.ascontiguousarray(rows(entry, nb))
    plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
    if entry.type.name in plain:
        return own_rows.view(plain[entry.type.name])
    if 0 in own_rows.shape:
        return np.zeros(entry.ne[::-1], np.float32)
    try:
        with np.errstate(all="ignore"):  # scales of any bits
            found: np.ndarray[Any, Any] = gguf.quants.dequantize(own_rows, entry.type)
    except NotImplementedError as error:
        raise TraceError(f"tensor {entry.name!r}: gguf does not dequantise {entry.type.name}") from error
    return found
