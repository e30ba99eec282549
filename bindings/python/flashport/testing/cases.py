"""The case list of flash_decode that tests, benchmarks and the support table share, and arrays for its cases.

Columns of decode.csv: ``q``, ``k_format`` and ``v_format``, head dims ``dk`` and ``dv``, ``hq`` and ``hkv`` heads,
``q_len`` new tokens handed in as ``q_form`` (token, uniform, ragged), cache ``layout`` and ``page`` size, request
lengths ``lens`` ("1024*8|17" is eight of 1024 and one of 17), then options; ``splits`` -1 is the batch-invariant
schedule.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashport import _core
from flashport.testing import numerics
from flashport.testing.oracle import Request


@dataclass(frozen=True)
class DecodeCase:
    """One row of the case list."""

    name: str
    tier: str
    q: str
    k_format: str
    v_format: str
    dk: int
    dv: int
    hq: int
    hkv: int
    q_len: int
    q_form: str
    layout: str
    page: int
    lens: tuple[int, ...]
    window: tuple[int, int]
    softcap: float
    alibi: str
    sinks: bool
    tree: bool
    scales: str
    index: str
    out: str
    lse: bool
    strides: str
    splits: int

    @property
    def num_splits(self) -> int | None:
        """As :func:`flashport.flash_decode` takes it."""
        return None if self.splits < 0 else self.splits

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports`, which is asked about "decode"."""
        return {
            "q_dtype": self.q, "k_format": self.k_format, "v_format": self.v_format, "head_dim": self.dk,
            "head_dim_v": self.dv, "group_size": self.hq // self.hkv, "q_len": self.q_len,
        }  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the call has to read."""
        row = numerics.row_bytes(self.dk, self.k_format) + numerics.row_bytes(self.dv, self.v_format)
        return sum(self.lens) * self.hkv * row

    @property
    def title(self) -> str:
        """The shape in a few words."""
        counts = {length: self.lens.count(length) for length in dict.fromkeys(self.lens)}
        lens = " + ".join(f"{count} x {length}" for length, count in counts.items())
        dims = str(self.dk) if self.dk == self.dv else f"{self.dk}/{self.dv}"
        formats = "/".join(dict.fromkeys((self.k_format, self.v_format)))
        place = self.layout + (f" page {self.page}" if self.page else "")
        return f"{lens}, {self.hq}/{self.hkv}, {dims}, {self.q}/{formats}, {place}"


def load_cases(*tiers: str) -> list[DecodeCase]:
    """The cases of some tiers ("emulator", "full", "bench"), in the list's order."""
    with _case_file().open(newline="") as file:
        return [_parse(row) for row in csv.DictReader(file) if row["tier"] in tiers]


def _case_file() -> Path:
    installed = Path(__file__).parents[1] / "data" / "decode.csv"
    return installed if installed.exists() else Path(__file__).resolve().parents[4] / "tests/cases/decode.csv"


def _parse(row: dict[str, str]) -> DecodeCase:
    lens: list[int] = []
    for part in row["lens"].split("|"):
        length, _, count = part.partition("*")
        lens += [int(length)] * int(count or 1)
    left, right = row["window"].split(":")
    number = {name: int(row[name]) for name in ("dk", "dv", "hq", "hkv", "q_len", "page", "splits")}
    flag = {name: row[name] == "1" for name in ("sinks", "tree", "lse")}
    text = {name: row[name] for name in ("name", "tier", "q", "k_format", "v_format", "q_form", "layout")}
    text |= {name: row[name] for name in ("alibi", "scales", "index", "out", "strides")}
    return DecodeCase(
        **text,
        **number,
        **flag,
        lens=tuple(lens),
        window=(int(left), int(right)),
        softcap=float(row["softcap"]),
    )


@dataclass
class HostArray:
    """Bits in host memory with the element type that the library is to see."""

    bits: np.ndarray
    dtype: str

    def on(self, device: str) -> Any:
        """A copy on a device."""
        array = _core.DeviceArray(self.bits.shape, self.dtype, device)
        array.copy_from(np.ascontiguousarray(self.bits))
        return array


def to_host(array: Any, fmt: str) -> np.ndarray:
    """The fp32 values of a :class:`flashport.DeviceArray` of a format."""
    bits = np.empty(array.shape, numerics.CARRIER[fmt])
    array.copy_to(bits)
    return numerics.decode(bits, fmt)


@dataclass
class DecodeData:
    """Arrays of one case, and its requests as the oracle takes them."""

    arguments: dict[str, Any] = field(default_factory=dict)  # HostArray, or plain values
    requests: list[Request] = field(default_factory=list)
    out_shape: tuple[int, ...] = ()

    def on(self, device: str) -> dict[str, Any]:
        """The arguments of :func:`flashport.flash_decode` on a device."""
        return {
            name: value.on(device) if isinstance(value, HostArray) else value for name, value in self.arguments.items()
        }

    def rows(self, per_request: list[np.ndarray]) -> np.ndarray:
        """Results of the requests, in the shape that the call returns them."""
        return np.concatenate(per_request).reshape(*self.out_shape[:-1], *per_request[0].shape[2:])


def make_data(case: DecodeCase, seed: int = 0, check: bool = True) -> DecodeData:
    """Random arrays for a case; unused slots hold NaN. ``check=False`` leaves the oracle's copies out."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    data = DecodeData()
    batch = len(case.lens)
    index_type = np.int64 if case.index == "i64" else np.int32
    q_lens = [case.q_len - b % case.q_len if case.q_form == "ragged" else case.q_len for b in range(batch)]

    q_bits = numerics.encode(rng.standard_normal((sum(q_lens), case.hq, case.dk), np.float32), case.q)
    q_shape = {
        "token": (batch, case.hq, case.dk),
        "uniform": (batch, case.q_len, case.hq, case.dk),
        "ragged": (sum(q_lens), case.hq, case.dk),
    }[case.q_form]
    data.out_shape = (*q_shape[:-1], case.dv)
    arguments = data.arguments
    arguments["q"] = HostArray(q_bits.reshape(q_shape), numerics.DTYPE[case.q])
    if case.q_form == "ragged":
        arguments["cu_seqlens_q"] = HostArray(np.cumsum([0, *q_lens]).astype(np.int32), "int32")
        arguments["max_q_len"] = case.q_len
    arguments["seqlens"] = _indices(np.array(case.lens), index_type)

    slots = _make_tables(case, arguments, rng, index_type)
    k_rows = _make_cache(case, "k", case.dk, slots, arguments, rng)
    v_rows = _make_cache(case, "v", case.dv, slots, arguments, rng)
    options = _make_options(case, q_lens, arguments, rng)
    if not check:
        return data

    q_values = numerics.decode(q_bits, case.q)
    first = 0
    for b, q_len in enumerate(q_lens):
        own = {name: value[b] if name in ("slopes", "tree") else value for name, value in options.items()}
        if "tree" in own:
            own["tree"] = own["tree"][:q_len]
        data.requests.append(
            Request(
                q_values[first : first + q_len],
                numerics.decode(k_rows[b], case.k_format),
                numerics.decode(v_rows[b], case.v_format),
                window=case.window,
                softcap=case.softcap,
                **own,
            )
        )
        first += q_len
    return data


def _indices(values: np.ndarray, dtype: type) -> HostArray:
    return HostArray(values.astype(dtype), np.dtype(dtype).name)


def _make_tables(case: DecodeCase, arguments: dict[str, Any], rng: Any, index_type: type) -> list[np.ndarray]:
    """Adds the page tables; returns the slot of each token of each request (page * page_size + offset).

    Page 0 belongs to nobody: it holds NaN, and unused table entries point to it.
    """
    batch = len(case.lens)
    if case.layout in ("nhd", "hnd"):
        extent = max(1, *case.lens)
        return [b * extent + np.arange(length) for b, length in enumerate(case.lens)]
    page = max(case.page, 1)
    counts = [-(-length // page) for length in case.lens]
    pages = 1 + rng.permutation(sum(counts) + 2)
    own = np.split(pages[: sum(counts)], np.cumsum(counts)[:-1])
    if case.layout.startswith("csr"):
        arguments["kv_indptr"] = _indices(np.cumsum([0, *counts]), np.int32)
        arguments["kv_indices"] = _indices(pages[: max(1, sum(counts))], np.int32)
        arguments["kv_last_page_len"] = _indices((np.array(case.lens) - 1) % page + 1, np.int32)
        arguments["seqlens"] = None if all(case.lens) else arguments["seqlens"]
    else:
        table = np.zeros((batch, max(1, *counts)), np.int32)
        for b in range(batch):
            table[b, : counts[b]] = own[b]
        if case.layout == "token":
            rows = rng.permutation(batch + 2)[:batch]
            spread = np.zeros((batch + 2, table.shape[1]), np.int32)
            spread[rows] = table
            arguments["token_table"] = _indices(spread, np.int32)
            arguments["request_index"] = _indices(rows, index_type)
        else:
            arguments["block_table"] = _indices(table, np.int32)
    return [
        (own[b][:, None] * page + np.arange(page)).reshape(-1)[:length].astype(np.int64)
        for b, length in enumerate(case.lens)
    ]


def _make_cache(
    case: DecodeCase, side: str, head_dim: int, slots: list[np.ndarray], arguments: dict[str, Any], rng: Any
) -> list[np.ndarray]:
    """Adds the cache of "k" or "v", filled at ``slots``, NaN elsewhere; returns the encoded rows of each request."""
    fmt = case.k_format if side == "k" else case.v_format
    rows = [numerics.encode(rng.standard_normal((len(own), case.hkv, head_dim), np.float32), fmt) for own in slots]
    width = numerics.row_extent(head_dim, fmt)
    if case.layout in ("nhd", "hnd"):
        outer, page = len(case.lens), max(1, *case.lens)
    else:
        page = max(case.page, 1)
        outer = 1 + sum(-(-length // page) for length in case.lens) + 2
    pool = numerics.nan_bits((outer * page, case.hkv, width), fmt)
    for own, values in zip(slots, rows, strict=True):
        pool[own] = values
    if case.layout != "token":
        pool = pool.reshape(outer, page, case.hkv, width)
    if case.layout.endswith("hnd"):
        pool = np.ascontiguousarray(pool.swapaxes(1, 2))
        arguments["kv_layout"] = "HND"
    arguments[f"{side}_cache"] = HostArray(pool, numerics.DTYPE[fmt])
    arguments[f"{side}_format"] = fmt
    return rows


def _make_options(case: DecodeCase, q_lens: list[int], arguments: dict[str, Any], rng: Any) -> dict[str, Any]:
    """Adds the options of a case; returns those that are arrays, as the oracle takes them."""
    options: dict[str, Any] = {}
    batch = len(case.lens)
    arguments["window"] = case.window
    arguments["softcap"] = case.softcap
    arguments["num_splits"] = case.num_splits
    if case.alibi != "none":
        shape = (case.hq,) if case.alibi == "heads" else (batch, case.hq)
        slopes = (2.0 ** -rng.uniform(1, 8, shape)).astype(np.float32)
        arguments["alibi_slopes"] = HostArray(slopes, "float32")
        options["slopes"] = np.broadcast_to(slopes, (batch, case.hq))
    if case.sinks:
        options["sinks"] = rng.standard_normal(case.hq, np.float32)
        arguments["sinks"] = HostArray(options["sinks"], "float32")
    if case.tree:
        own = np.uint32(1) << np.arange(case.q_len, dtype=np.uint32)
        masks = rng.integers(0, 1 << case.q_len, (batch, case.q_len), np.uint32) | own
        given = np.concatenate([mask[:n] for mask, n in zip(masks, q_lens, strict=True)])
        arguments["tree_mask"] = HostArray(given if case.q_form == "ragged" else masks, "uint32")
        options["tree"] = masks
    if case.scales != "none":
        for name in ("k_scale", "v_scale"):
            scale = rng.uniform(0.5, 2, 1 if case.scales == "tensor" else case.hkv).astype(np.float32)
            arguments[name] = HostArray(scale, "float32")
            options[name] = np.broadcast_to(scale, (case.hkv,))
    return options
