"""The operands of one call of the library, sequence by sequence, as a trace has them.

Packed queries, pages, layouts and lengths are gathered into dense rows; causal masks, windows, trees, ALiBi, biases and
masks become one additive mask. Formats that ggml does not have, and stored values with a scale, become fp32. Queries
are turned as a call with a rotary embedding turns them, and the weights that a dropout keeps are drawn once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flashport import _attention, _core
from flashport._mixed import KvSegment
from flashport.testing import attention_oracle, numerics, oracle
from flashport.trace._errors import gguf_package

Values = np.ndarray[Any, Any]
Arguments = dict[str, Any]
Turn = Callable[[Values, str, int], Values]  # (bits of queries, format, sequence) -> bits

_FORMATS = {dtype: fmt for fmt, dtype in numerics.DTYPE.items() if dtype != "uint8"}
_GGML_TYPES = {"fp32": None, "fp16": None, "bf16": "BF16"}


class NotRecordedError(Exception):
    """A call that a trace cannot hold; the text says why."""


def to_host(x: Any) -> tuple[Values, str]:
    """(bits in a NumPy array, name of the element type)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch_to_host(torch, x.detach())
    if isinstance(x, _core.DeviceArray):
        carriers = {dtype: numerics.CARRIER[fmt] for dtype, fmt in _FORMATS.items()}
        bits = np.empty(x.shape, carriers.get(x.dtype, x.dtype))
        x.copy_to(bits)
        return bits, x.dtype
    array = np.asarray(x.get() if hasattr(x, "get") else x)
    name = array.dtype.name
    return (array.view(numerics.CARRIER[_FORMATS[name]]) if name in _FORMATS else array), name


def _torch_to_host(torch: Any, x: Any) -> tuple[Values, str]:
    name = str(x.dtype).removeprefix("torch.")
    if name in _FORMATS and numerics.CARRIER[_FORMATS[name]] not in (np.float32, np.float16):
        bits = x.view(torch.int16 if x.element_size() == 2 else torch.uint8).cpu().numpy()
        return bits.view(numerics.CARRIER[_FORMATS[name]]), name
    return x.cpu().numpy(), name


def _numbers(x: Any) -> Values | None:
    """Lengths, tables, scales: host values of what may be None."""
    return None if x is None else to_host(x)[0]


def _taken(x: Any, index: Any) -> tuple[Values, str]:
    """Rows of an array, chosen before they are copied where its library lets us."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return to_host(x[index if isinstance(index, int) else torch.as_tensor(index, device=x.device)])
    bits, name = to_host(x)
    return bits[index], name


class _Cache:
    """The keys or values of a call, by sequence; ``sequences``: how many there are, if they may have scales."""

    def __init__(self, a: Arguments, side: str, array: Any, sequences: int | None = None) -> None:
        self.a, self.array, self.side = a, array, side
        self.format = a.get(f"{side}_format")
        scale = a.get(f"{side}_scale")
        shape: tuple[int, ...] = () if scale is None else tuple(scale.shape)
        is_of_sequences = len(shape) == 2 and sequences == shape[0]
        has_row_scale = len(shape) > 1 and not is_of_sequences
        self.row_scale = scale if has_row_scale else None
        self.scale = None if has_row_scale else _numbers(scale)
        tables = ("block_table", "token_table", "request_index", "kv_indptr", "kv_indices", "cu_seqlens_k")
        self.tables = {name: _numbers(a.get(name)) for name in tables}

    def rows(self, b: int, length: int, first: int = 0) -> tuple[Values, str | None]:
        """(tokens, heads, row) of a sequence, and ggml's type of their bits."""
        bits, name = self._stored(self.array, b, length)
        fmt = self.format or _FORMATS.get(name, name)
        return _as_ggml(np.ascontiguousarray(bits[first:length]), fmt, self._scale_of(b, length, first))

    def _scale_of(self, b: int, length: int, first: int) -> Values | None:
        """What multiplies (tokens, heads, values): a factor of all, of a head, of a row, or of a group of values."""
        if self.row_scale is not None:
            factors = self._stored(self.row_scale, b, length)[0][first:length].astype(np.float32)
            return factors[..., None] if factors.ndim == 2 else factors
        if self.scale is None:
            return None
        scale: Values = self.scale[b] if self.scale.ndim == 2 else self.scale
        return scale[:, None]

    def _stored(self, array: Any, b: int, length: int) -> tuple[Values, str]:
        """Rows of a sequence in the cache, or of an array with the cache's first axes."""
        heads_first = self.a["kv_layout"] == "HND" and len(self.array.shape) == 4
        tables = self.tables
        if tables["cu_seqlens_k"] is not None:
            begin = int(tables["cu_seqlens_k"][b])
            return _taken(array, np.arange(begin, begin + length))
        if tables["token_table"] is not None:
            row = b if tables["request_index"] is None else int(tables["request_index"][b])
            pages, page_size = tables["token_table"][row, :length], 1
        elif tables["block_table"] is not None or tables["kv_indptr"] is not None:
            shape = self.array.shape
            page_size = 1 if len(shape) == 3 else int(shape[2 if heads_first else 1])
            if tables["block_table"] is not None:
                pages = tables["block_table"][b]
            else:
                assert tables["kv_indptr"] is not None
                assert tables["kv_indices"] is not None
                pages = tables["kv_indices"][int(tables["kv_indptr"][b]) : int(tables["kv_indptr"][b + 1])]
            pages = pages[: -(-length // page_size)]
        else:
            bits, name = _taken(array, b)
            return (bits.swapaxes(0, 1) if heads_first else bits), name
        bits, name = _taken(array, np.asarray(pages, np.int64))
        if len(self.array.shape) == 4:
            bits = bits.swapaxes(1, 2) if heads_first else bits
            bits = bits.reshape(-1, *bits.shape[2:])
        return bits[:length], name


def _as_ggml(bits: Values, fmt: str, scale: Values | None) -> tuple[Values, str | None]:
    """(array, ggml's type of its bits or None): as stored, but fp32 where ggml has no such thing."""
    if fmt in _GGML_TYPES and scale is None:
        return bits, _GGML_TYPES[fmt]
    gguf = gguf_package()
    block = getattr(gguf.GGMLQuantizationType, fmt.upper(), None) if bits.dtype == np.uint8 else None
    if block is not None and scale is None:
        return bits, str(block.name)
    if block is not None:
        values: Values = gguf.quants.dequantize(bits, block)
    elif fmt in numerics.CARRIER:
        values = numerics.decode(bits, fmt)
    elif fmt == "int8":
        values = bits.astype(np.float32)
    elif fmt == "int4":  # the first of two values in the low bits
        values = np.stack([bits << 4 >> 4, bits >> 4], axis=-1).reshape(*bits.shape[:-1], -1).astype(np.float32)
    else:
        raise NotRecordedError(f"a trace has no format {fmt}")
    if scale is not None and scale.shape[-1] > 1:  # of groups of values
        scale = np.repeat(scale, values.shape[-1] // scale.shape[-1], axis=-1)
    return (values if scale is None else (values * scale).astype(np.float32)), None


def sequences(name: str, a: Arguments, result: Any) -> Iterator[dict[str, Any]]:
    """The arguments of Writer.add for each sequence of a call that has queries and keys."""
    if name in ("flash_decode_segments", "flash_decode_mixed"):
        yield from _mixed_sequences(name, a, result)
        return
    is_decode = name == "flash_decode"
    q = a["q"]
    out = result[0] if isinstance(result, tuple) else result
    given = {
        key: _numbers(a.get(key)) for key in ("cu_seqlens_q", "seqused_q", "leftpad_k", "alibi_slopes", "tree_mask")
    }
    sinks, q_scale = _numbers(a.get("sinks")), _numbers(a.get("q_scale"))
    offsets = given["cu_seqlens_q"]
    batch = int(q.shape[0]) if offsets is None else len(offsets) - 1
    k, v = (_Cache(a, side, a[f"{side}_cache" if is_decode else side], None if is_decode else batch) for side in "kv")
    bias, kept, turn = a.get("bias"), _kept(a, is_decode, k, batch), _rotary(a)
    for b in range(batch):
        rows, length = _query_rows(a, is_decode, given, b), _key_count(a, is_decode, k, b)
        first = 0 if given["leftpad_k"] is None else int(given["leftpad_k"][b])
        own_q, q_type = _own_queries(q, rows, b, offsets is not None, q_scale, turn)
        if len(own_q) == 0 or length <= first:
            continue
        own_k, k_type = k.rows(b, length, first)
        own_v, v_type = v.rows(b, length, first)
        mask = _mask(a, is_decode, given, own_q, own_k, b, rows)
        if bias is not None:
            added, bias_type = _taken(bias, b if bias.shape[0] > 1 else 0)
            mask = mask + numerics.decode(added, _FORMATS[bias_type])
        fits = np.isin(mask, (0, -np.inf)).all()
        own_out, _ = _own_queries(out, rows, b, offsets is not None, None)
        types = {"q": q_type, "k": k_type, "v": v_type}
        yield {
            "q": own_q[None], "k": own_k[None], "v": own_v[None],
            "mask": mask.astype(np.float16 if fits else np.float32)[None], "out": _plain(own_out)[None],
            "sinks": None if sinks is None else sinks.astype(np.float32),
            "kept": None if kept is None else kept[b : b + 1, :, : len(own_q), : len(own_k)],
            "dropout_p": a.get("dropout_p", 0.0),
            "types": {role: kind for role, kind in types.items() if kind}, "scale": _scale(a, q),
            "softcap": a.get("softcap", 0.0), "operation": name, "options": _options(a, b, batch),
        }  # fmt: skip


_PARTS = ("", "_quant", "_first")  # what roles of keys end in, the newest part first


def _mixed_sequences(name: str, a: Arguments, result: Any) -> Iterator[dict[str, Any]]:
    """The same of segments: each one of a sequence that has keys is a part of the step."""
    q, segments = a["q"], a["segments"] if name == "flash_decode_segments" else _segments(a)
    out = result[0] if isinstance(result, tuple) else result
    sides = [[_Cache(one._asdict(), side, getattr(one, side)) for one in segments] for side in "kv"]
    counts = np.stack([_segment_counts(one) for one in segments])
    sinks, own_slopes = _numbers(a.get("sinks")), _numbers(a.get("mask_slopes"))
    given = {key: _numbers(a.get(key)) for key in ("cu_seqlens_q", "seqused_q", "alibi_slopes", "tree_mask")}
    batch = counts.shape[1]
    for b in range(batch):
        rows = _query_rows(a, True, given, b)
        own_q, q_type = _own_queries(q, rows, b, given["cu_seqlens_q"] is not None, None)
        filled = [i for i in range(len(segments)) if counts[i, b] > 0][::-1]
        if len(own_q) == 0 or not filled:
            continue
        if len(filled) > len(_PARTS):
            raise NotRecordedError(f"a trace has at most {len(_PARTS)} segments of a sequence, got {len(filled)}")
        step: dict[str, Any] = {}
        types = {"q": q_type}
        for part, i in zip(_PARTS, filled, strict=False):
            for side, caches in zip("kv", sides, strict=True):
                bits, types[side + part] = caches[i].rows(b, int(counts[i, b]))
                step[side + part] = bits[None]
        mask = _given_mask(a, own_slopes, given, len(own_q), int(counts[:, b].sum()), b)
        fits = np.isin(mask, (0, -np.inf)).all()
        own_out, _ = _own_queries(out, rows, b, given["cu_seqlens_q"] is not None, None)
        yield step | {
            "q": own_q[None], "mask": mask.astype(np.float16 if fits else np.float32)[None],
            "out": _plain(own_out)[None], "sinks": None if sinks is None else sinks.astype(np.float32),
            "types": {role: kind for role, kind in types.items() if kind}, "scale": _scale(a, q),
            "softcap": a.get("softcap", 0.0), "operation": name, "options": _options(a, b, batch),
        }  # fmt: skip


def _segments(a: Arguments) -> list[KvSegment]:
    """Those that flash_decode_mixed makes of its arguments."""
    hot = KvSegment(a["k_hot"], a["v_hot"], a["hot_seqlens"], kv_layout=a["kv_layout"])
    if a["k_quant"] is None:
        return [hot]
    names = ("k_format", "v_format", "k_scale", "v_scale")
    given = {name: a[f"{name[0]}_quant{name[1:]}"] for name in names}
    return [KvSegment(a["k_quant"], a["v_quant"], a["quant_seqlens"], kv_layout=a["kv_layout"], **given), hot]


def _segment_counts(segment: KvSegment) -> Values:
    """(batch) keys of each sequence."""
    if segment.seqlens is not None:
        return np.asarray(_numbers(segment.seqlens), np.int64)
    shape = segment.k.shape  # type: ignore[attr-defined] # an array's
    return np.full(shape[0], shape[2 if segment.kv_layout == "HND" else 1], np.int64)


def _given_mask(
    a: Arguments, own_slopes: Values | None, given: dict[str, Values | None], tokens: int, keys: int, b: int
) -> Values:
    """As :func:`_mask`, where the call's own mask says what a query sees, within its window."""
    window, added = tuple(a.get("window") or (-1, -1)), a.get("mask")
    own = np.zeros((keys, 1, 1), np.float32)
    if added is None:
        plain = {"window": window, "causal": True}
        return _mask(plain, True, given, np.zeros((tokens, 1, 1)), own, b, slice(0, tokens))
    rule = attention_oracle.Rule(causal=False, window=window)
    seen = attention_oracle.visible(rule, np.arange(tokens), tokens, keys)
    bits, kind = _taken(added, b if added.shape[0] > 1 else 0)
    mask = numerics.decode(bits, _FORMATS[kind])[:, :tokens, :keys].astype(np.float32)
    if own_slopes is not None:
        mask = mask * own_slopes[:, None, None]
    return np.asarray(np.where(seen, mask, -np.inf) + _alibi(given["alibi_slopes"], b, tokens, keys), np.float32)


def _alibi(slopes: Values | None, b: int, tokens: int, keys: int) -> Values:
    """What ALiBi adds to the scores: 0 without slopes."""
    if slopes is None:
        return np.zeros((1, 1, 1), np.float32)
    own = (slopes[b] if slopes.ndim == 2 else slopes)[:, None, None]
    distance = np.abs((np.arange(tokens) + keys - tokens)[:, None] - np.arange(keys))
    return np.asarray(-own * distance, np.float32)


def _scale(a: Arguments, q: Any) -> float:
    given = a.get("softmax_scale")
    return float(q.shape[-1] ** -0.5 if given is None else given)


def _options(a: Arguments, b: int, batch: int) -> str:
    """What was called, in words: options that are no arrays and not off, and which sequence this is."""
    plain = (bool, int, float, str, tuple)
    named = {key: value for key, value in a.items() if isinstance(value, plain) and value not in (False, 0.0, (-1, -1))}
    shown = [f"{key}={value}" for key, value in named.items() if key not in ("return_lse", "stream")]
    return ", ".join([*shown, f"sequence {b} of {batch}"])


def _query_rows(a: Arguments, is_decode: bool, given: dict[str, Values | None], b: int) -> slice | None:
    """Rows of a sequence's queries: of packed ones in all, else of its own; None where a query has no tokens' axis."""
    offsets, used = given["cu_seqlens_q"], given["seqused_q"]
    if offsets is not None:
        begin, end = int(offsets[b]), int(offsets[b + 1])
    elif is_decode and len(a["q"].shape) == 3:
        return None
    else:
        begin, end = 0, int(a["q"].shape[1])
    return slice(begin, end if used is None else begin + int(used[b]))


def _own_queries(
    x: Any, rows: slice | None, b: int, is_packed: bool, scale: Values | None, turn: Turn | None = None
) -> tuple[Values, str | None]:
    """(tokens, heads, head dim) of a sequence, as the call turned them, and ggml's type."""
    if is_packed:
        assert rows is not None
        bits, name = _taken(x, np.arange(rows.start, rows.stop))
    else:
        bits, name = _taken(x, b)
        bits = bits[None] if rows is None else bits[rows]
    if scale is not None:  # of key-value heads
        scale = scale[b] if scale.ndim == 2 else scale
        scale = np.repeat(scale, bits.shape[1] // len(scale))[:, None]
    bits = np.ascontiguousarray(bits)
    return _as_ggml(bits if turn is None else turn(bits, _FORMATS[name], b), _FORMATS[name], scale)


def _rotary(a: Arguments) -> Turn | None:
    """What turns the queries of a sequence as a call with rotary position embedding does, in fp32 but for the sum."""
    if a.get("rotary_cos") is None:
        return None
    tables = [to_host(a[name]) for name in ("rotary_cos", "rotary_sin")]
    cos, sin = (numerics.decode(bits, _FORMATS[name])[:, None] for bits, name in tables)
    before = np.asarray(_numbers(a["seqused_k"]), np.int64)
    advances, half = bool(a["causal"]) or max(a["window"]) >= 0, cos.shape[-1]
    pairs = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)]
    if not a["rotary_interleaved"]:
        pairs = [slice(0, half), slice(half, 2 * half)]

    def turn(bits: Values, fmt: str, b: int) -> Values:
        values = numerics.decode(bits, fmt)
        position = np.broadcast_to(before[b] + (np.arange(len(bits)) if advances else 0), len(bits))
        place = np.flatnonzero(position < len(cos))  # the others stay as they are
        c, s = cos[position[place]], sin[position[place]]
        x, y = (values[place][..., one] for one in pairs)
        for one, near, far in ((pairs[0], x, -y * s), (pairs[1], y, x * s)):
            values[place, :, one] = near.astype(np.float64) * c + far
        return numerics.encode(values, fmt)

    return turn


def _kept(a: Arguments, is_decode: bool, k: _Cache, batch: int) -> Values | None:
    """(batch, heads, queries, keys) 1 where a call with dropout kept a weight, else 0."""
    if not a.get("dropout_p"):
        return None
    q, is_packed = a["q"], a["cu_seqlens_q"] is not None
    tokens, heads = (a["max_seqlen_q"] or q.shape[0], q.shape[1]) if is_packed else (q.shape[1], q.shape[2])
    keys = max((_key_count(a, is_decode, k, b) for b in range(batch)), default=0)
    state = np.ascontiguousarray(_numbers(a["rng_state"]), np.int64)
    mask: Values = _attention.dropout_mask((batch, heads, tokens, keys), state, a["dropout_p"])
    return mask.view(np.int8)


def _plain(bits: Values) -> Values:
    """fp32 values of an output."""
    return numerics.decode(bits, "bf16") if bits.dtype == np.uint16 else bits.astype(np.float32)


def _key_count(a: Arguments, is_decode: bool, k: _Cache, b: int) -> int:
    """Keys of a sequence, those that the call itself has appended among them."""
    new, offsets = a.get("k_new"), _numbers(a.get("cu_seqlens_k_new"))
    if new is None:
        return _stored_count(a, is_decode, k, b)
    added = int(new.shape[1]) if offsets is None else int(offsets[b + 1]) - int(offsets[b])
    return _stored_count(a, is_decode, k, b) + added


def _stored_count(a: Arguments, is_decode: bool, k: _Cache, b: int) -> int:
    lengths = _numbers(a.get("seqlens" if is_decode else "seqused_k"))
    if lengths is not None:
        return int(lengths[b])
    indptr, last = k.tables["kv_indptr"], _numbers(a.get("kv_last_page_len"))
    shape, heads_first = k.array.shape, a["kv_layout"] == "HND"
    if indptr is not None and last is not None:
        page_size = 1 if len(shape) == 3 else int(shape[2 if heads_first else 1])
        pages = int(indptr[b + 1]) - int(indptr[b])
        return (pages - 1) * page_size + int(last[b]) if pages > 0 else 0
    offsets = k.tables["cu_seqlens_k"]
    if offsets is not None:
        return int(offsets[b + 1]) - int(offsets[b])
    return int(shape[2 if heads_first and len(shape) == 4 else 1])


def _mask(
    a: Arguments, is_decode: bool, given: dict[str, Values | None], q: Values, k: Values, b: int, rows: slice | None
) -> Values:
    """(heads or 1, tokens, keys) fp32: 0 where a query sees a key, -inf where not, less what ALiBi takes."""
    tokens, keys = len(q), len(k)
    window = tuple(a["window"])
    if is_decode:
        tree = given["tree_mask"]
        if tree is not None:
            tree = tree[rows] if tree.ndim == 1 else tree[b]
        seen = oracle.Request(q, k, k, window=(window[0], window[1]), tree=tree).visible()
    else:
        rule = attention_oracle.Rule(causal=bool(a["causal"]), window=(window[0], window[1]))
        seen = attention_oracle.visible(rule, np.arange(tokens), tokens, keys)
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))[None]
    return np.asarray(mask + _alibi(given["alibi_slopes"], b, tokens, keys), np.float32)
