"""A cache of keys and values whose newest tokens, and first ones, stay as they came; the rest is quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, overload

from flashport import _core, arrays, decode
from flashport._mixed import KvSegment, flash_decode_segments, spill_kv
from flashport.torch.gradients import refuse_gradients
from flashport.typing import Array, BlockFormat, CacheFormat, SupportsDLPack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _AttendOptions(TypedDict, total=False):
        """Arguments of attend that do not change the type of its result."""

        mask_slopes: SupportsDLPack | None
        softmax_scale: float | None
        window: tuple[int, int]
        softcap: float
        sinks: SupportsDLPack | None
        by_segment: bool
        alibi_slopes: SupportsDLPack | None
        out: Any


class _Stored(TypedDict, total=False):
    """What a quantised part stores, as append_kv and segments name it."""

    k_format: CacheFormat
    v_format: CacheFormat
    k_scale: Any
    v_scale: Any


_HOT_TYPES = ("float16", "bfloat16", "float32")
_BLOCKS = get_args(BlockFormat)
_TYPES = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz", "fp8_e5m2": "float8_e5m2", "int8": "int8", "int4": "int8",
}  # fmt: skip
_FP8 = ("fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2")
# Types of factors beside quantised rows. fp16, LightLLM's own, is too coarse for the small ones of fp8.
_FACTORS = {**dict.fromkeys(("int8", "int4"), "float16"), **dict.fromkeys(_FP8, "float32")}
_LIGHTLLM_DIMS = 8


class MixedKVCache:
    """Keys and values of a batch of sequences, in the order sinks, quantised, hot; one softmax over all of them.

    The first ``sink_tokens`` tokens of a sequence and its newest ones keep the type that they came in. The rest is in
    ``k_format`` and ``v_format``. The hot window of a sequence begins a multiple of ``spill_tokens`` after the sinks
    and has ``hot_tokens`` to ``hot_tokens + spill_tokens - 1`` tokens once there are as many. The length alone says
    where each token is, so that the bits of :meth:`attend` are the same however the tokens were split into calls of
    :meth:`append`.

    All arrays, lengths among them, are on one device and stay in place, and are of NumPy or torch. :meth:`attend` makes
    no decision on the host and can be captured in a graph that is replayed as the cache grows. With ``auto_spill``
    False the same holds for :meth:`append` and :meth:`spill`; the caller then spills at least every ``spill_tokens``
    tokens, since a replayed append drops what the window has no room for. Work runs on the current stream of the
    library.
    """

    def __init__(
        self,
        like: Array,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_tokens: int,
        head_dim_v: int | None = None,
        hot_tokens: int = 256,
        spill_tokens: int = 64,
        sink_tokens: int = 0,
        k_format: CacheFormat = "q8_0",
        v_format: CacheFormat = "q8_0",
        k_scale_dims: int | None = None,
        v_scale_dims: int | None = None,
        auto_spill: bool = True,
    ) -> None:
        """Allocates an empty cache.

        Args:
            like: An array whose library, device and element type (fp16, bf16, on the CPU fp32) keys and values have.
            batch: Sequences.
            num_kv_heads: Heads of keys and values.
            head_dim: Of keys.
            max_tokens: The most tokens of a sequence.
            head_dim_v: Of values; default ``head_dim``.
            hot_tokens: Newest tokens that always keep their type.
            spill_tokens: How many tokens at a time are quantised.
            sink_tokens: First tokens that always keep their type.
            k_format, v_format: What the rest is stored in: a format of :func:`flashport.quantize_kv`, or a plain type.
            k_scale_dims, v_scale_dims: How many values of a row share a factor in "int8", "int4" and fp8: a multiple of
                8 that divides the head dim; the head dim itself is one factor for each token and head. Default: 8 in
                int8 and int4, as LightLLM has them, and fp8 without factors.
            auto_spill: Whether :meth:`append` quantises what leaves the hot window.

        Raises:
            ValueError: A number that must be positive, a head dim that is no multiple of a block, another format, or
                factors that the format does not have.
            TypeError: A number is no int; ``like`` is no array of NumPy or torch, or of another type; the library has
                no such type, as NumPy without ml_dtypes has no fp8 and no bf16.
        """
        positive = {
            "batch": batch, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "max_tokens": max_tokens,
            "hot_tokens": hot_tokens, "spill_tokens": spill_tokens,
        }  # fmt: skip
        others = {"head_dim_v": head_dim_v, "k_scale_dims": k_scale_dims, "v_scale_dims": v_scale_dims}
        given = {name: value for name, value in others.items() if value is not None}
        for name, value in (positive | {"sink_tokens": sink_tokens} | given).items():
            if not hasattr(value, "__index__"):
                raise TypeError(f"MixedKVCache: {name} must be an int, got {value!r}")
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"MixedKVCache: {name} must be at least 1, got {value}")
        if sink_tokens < 0:
            raise ValueError(f"MixedKVCache: sink_tokens must be at least 0, got {sink_tokens}")
        library = arrays.caller_library(like)
        if library is None or library.__name__ not in ("numpy", "torch"):
            raise TypeError(f"MixedKVCache: like must be an array of NumPy or torch, got {type(like).__name__}")
        self._xp, self._is_torch, self._like = library, library.__name__ == "torch", like
        self._array_type = library.Tensor if self._is_torch else library.ndarray
        self.dtype = _dtype_name(like)
        if self.dtype not in _HOT_TYPES:
            raise TypeError(f"MixedKVCache: like must have one of the types {', '.join(_HOT_TYPES)}, got {self.dtype}")
        self.batch, self.num_kv_heads, self.max_tokens = batch, num_kv_heads, max_tokens
        self.hot_tokens, self.spill_tokens, self.sink_tokens = hot_tokens, spill_tokens, sink_tokens
        self.k_format, self.v_format, self.auto_spill = k_format, v_format, auto_spill
        dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
        self._dims = dims
        self._sinks = tuple(self._rows(sink_tokens, dim, self.dtype) for dim in dims)
        room = hot_tokens + spill_tokens * (1 if auto_spill else 2)
        self._hot = tuple(self._rows(room, dim, self.dtype) for dim in dims)
        self._like = self._hot[0]  # and the caller's array may go
        formats, shared = (k_format, v_format), (k_scale_dims, v_scale_dims)
        self._quantised = tuple(
            self._stored_rows(f"{side}_format", fmt, dim) for side, fmt, dim in zip("kv", formats, dims, strict=True)
        )
        k_scale, v_scale = self._factors = tuple(
            self._factor_rows(f"{side}_scale_dims", fmt, dim, one)
            for side, fmt, dim, one in zip("kv", formats, dims, shared, strict=True)
        )
        self._stored: _Stored = {"k_format": k_format, "v_format": v_format, "k_scale": k_scale, "v_scale": v_scale}
        self._lengths = {name: self._full((batch,), 0, "int32") for name in ("sinks", "quantised", "hot")}
        self._host_quantised = [0] * batch
        self._count([0] * batch)
        self._sequence = self._arange(batch)[:, None]
        self._hot_begin = self._sequence * room
        self._hot_flat = self._hot_begin[:, 0]
        (k_hot, v_hot), (k_old, v_old), (k_first, v_first) = self._hot, self._quantised, self._sinks
        self._segments = [KvSegment(k_old, v_old, self._lengths["quantised"], **self._stored)]
        if sink_tokens:
            self._segments.insert(0, KvSegment(k_first, v_first, self._lengths["sinks"]))
        self._segments.append(KvSegment(k_hot, v_hot, self._lengths["hot"]))

    def _rows(self, tokens: int, extent: int, dtype: str) -> Any:
        return self._array((self.batch, tokens, self.num_kv_heads, extent), dtype)

    def _array(self, shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.new_array("MixedKVCache", "like", self._like, shape, dtype)

    @property
    def _quantised_room(self) -> int:
        return max(self.max_tokens - self.sink_tokens, 1)

    def _stored_rows(self, name: str, fmt: CacheFormat, dim: int) -> Any:
        if fmt not in _BLOCKS and fmt not in _TYPES:
            raise ValueError(f"MixedKVCache: {name} must be one of {', '.join((*_BLOCKS, *_TYPES))}, got {fmt!r}")
        if fmt in _TYPES:
            arrays.require_numpy_type(f"MixedKVCache: {name} {fmt}", self._like, _TYPES[fmt], "use a cache of torch")
        values, size = _core.kv_format_blocks()[fmt]
        if dim % values:
            raise ValueError(f"MixedKVCache: {name} {fmt} needs head dims that are multiples of {values}, got {dim}")
        extent = dim if values == 1 else dim // values * size  # blocks are of bytes
        return self._rows(self._quantised_room, extent, _TYPES.get(fmt, "uint8"))

    def _factor_rows(self, name: str, fmt: CacheFormat, dim: int, dims_per_factor: int | None) -> Any:
        if fmt not in _FACTORS:
            if dims_per_factor is not None:
                raise ValueError(f"MixedKVCache: {name} is of {', '.join(_FACTORS)}, and must not come with {fmt}")
            return None
        if dims_per_factor is None and fmt in _FP8:
            return None
        shared = _LIGHTLLM_DIMS if dims_per_factor is None else dims_per_factor
        shape = (self.batch, self._quantised_room, self.num_kv_heads)
        if shared == dim:
            return self._array(shape, _FACTORS[fmt])
        if shared < 1 or shared % 8 or dim % shared:
            raise ValueError(
                f"MixedKVCache: {name} must be a multiple of 8 that divides the head dim {dim}, or that head dim, got "
                f"{shared}"
            )
        return self._array((*shape, dim // shared), _FACTORS[fmt])

    def _full(self, shape: tuple[int, ...], value: int, dtype: str) -> Any:
        if self._is_torch:
            return self._xp.full(shape, value, dtype=getattr(self._xp, dtype), device=self._like.device)  # type: ignore[attr-defined]
        return self._xp.full(shape, value, dtype)

    def _arange(self, count: int) -> Any:
        if self._is_torch:
            return self._xp.arange(count, device=self._like.device)  # type: ignore[attr-defined]
        return self._xp.arange(count)

    @property
    def lengths(self) -> Any:
        """(batch) int32 on the device: tokens of each sequence, in a new array."""
        return self._lengths["sinks"] + self._lengths["quantised"] + self._lengths["hot"]

    @property
    def quantised_lengths(self) -> Any:
        """(batch) int32 on the device: tokens in ``k_format`` and ``v_format``; the cache's own array."""
        return self._lengths["quantised"]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that there is room for, and of the factors beside them."""
        parts = (*self._sinks, *self._quantised, *self._hot, *(x for x in self._factors if x is not None))
        return sum(int(x.nbytes) for x in parts)

    def segments(self) -> list[KvSegment]:
        """The cache as :func:`flashport.flash_decode_segments` takes it: views, whose lengths are on the device."""
        return list(self._segments)

    def append(self, k: SupportsDLPack, v: SupportsDLPack, *, lengths: Sequence[int] | None = None) -> None:
        """Adds tokens to every sequence, and quantises what leaves the hot window.

        Args:
            k: (batch, tokens, heads, head dim), or (batch, heads, head dim) for one token each; of the cache's type.
            v: As ``k`` with the head dim of values.
            lengths: Tokens of each sequence that count, in host memory; rows past them are skipped. Default: all.

        Raises:
            ValueError: A wrong shape or length, more tokens than ``max_tokens``, or with ``auto_spill`` False more than
                the hot window has room for; nothing has been written.
            TypeError: An array of another library or type.
            NotImplementedError: A tensor that requires a gradient.
        """
        keys, values = self._checked("k", k, self._dims[0]), self._checked("v", v, self._dims[1])
        tokens = 1 if keys.ndim == 3 else int(keys.shape[1])
        if (1 if values.ndim == 3 else values.shape[1]) != tokens:
            raise ValueError(f"MixedKVCache.append: v must have the {tokens} tokens of k, got {values.shape[1]}")
        if lengths is None and tokens <= self._free:
            self._write_hot(keys, values, tokens)  # first: what it refuses does not count
            self._free -= tokens
            self._pending += tokens
            return
        keys, values = (x[:, None] if x.ndim == 3 else x for x in (keys, values))
        self._append_any(keys, values, tokens, lengths)

    def _append_any(self, keys: Any, values: Any, tokens: int, lengths: Sequence[int] | None) -> None:
        """Where tokens go to other parts than the hot window, or may have no room, or sequences get other numbers."""
        added = self._added(tokens, lengths)
        total = [before + self._pending + more for before, more in zip(self._host_total, added, strict=True)]
        if max(total) > self.max_tokens:
            raise ValueError(
                f"MixedKVCache.append: max_tokens is {self.max_tokens}, and a sequence would have {max(total)}"
            )
        room = self._hot[0].shape[1]
        hot = max(n - min(n, self.sink_tokens) - old for n, old in zip(total, self._host_quantised, strict=True))
        if not self.auto_spill and hot > room:
            raise ValueError(
                f"MixedKVCache.append: the hot window has room for {room} tokens and would have {hot}: call spill() "
                "before, or make the cache with auto_spill"
            )
        if tokens == 0:
            return
        spilled = [max(old, self._aim(n)) for n, old in zip(total, self._host_quantised, strict=True)]
        spills = self.auto_spill and spilled != self._host_quantised
        counts: Any = tokens if lengths is None else self._from_host(added)
        if spills:
            self._move(self._aimed(self._device_total() + counts))
            self._host_quantised = spilled
        self._write(keys, values, counts, spills)
        self._count(total)

    def _count(self, total: list[int]) -> None:
        """Sets the host's numbers of tokens, and how many more go to the hot window of every sequence as they come."""
        self._host_total, self._pending = total, 0
        self._free = min(self._free_of(*one) for one in zip(total, self._host_quantised, strict=True))

    def _free_of(self, total: int, quantised: int) -> int:
        if total < self.sink_tokens:
            return 0
        full = self.sink_tokens + quantised + int(self._hot[0].shape[1])
        if self.auto_spill:
            full = self.sink_tokens + self.hot_tokens + (quantised // self.spill_tokens + 1) * self.spill_tokens - 1
        return int(max(min(full, self.max_tokens) - total, 0))

    def spill(self, hot_tokens: int | None = None) -> None:
        """Quantises the oldest hot tokens of every sequence.

        Args:
            hot_tokens: How many of the newest tokens stay hot; default as many as an append with ``auto_spill`` leaves.

        Raises:
            ValueError: A negative number.
        """
        if hot_tokens is not None and hot_tokens < 0:
            raise ValueError(f"MixedKVCache.spill: hot_tokens must be at least 0, got {hot_tokens}")
        total, host_total = self._device_total(), [n + self._pending for n in self._host_total]
        if hot_tokens is None:
            aim, aims = self._aimed(total), [self._aim(n) for n in host_total]
        else:
            aim = self._at_least(total - self.sink_tokens - hot_tokens, 0)
            aims = [n - self.sink_tokens - hot_tokens for n in host_total]
        self._move(aim)
        self._host_quantised = [max(pair) for pair in zip(self._host_quantised, aims, strict=True)]
        self._count(host_total)

    @overload
    def attend(
        self, q: Array, mask: SupportsDLPack | None = None, *, return_lse: Literal[False] = False,
        **options: Unpack[_AttendOptions],
    ) -> Array: ...  # fmt: skip
    @overload
    def attend(
        self, q: Array, mask: SupportsDLPack | None = None, *, return_lse: Literal[True],
        **options: Unpack[_AttendOptions],
    ) -> tuple[Array, Array]: ...  # fmt: skip
    @overload
    def attend(
        self, q: Array, mask: SupportsDLPack | None = None, *, return_lse: bool = False,
        **options: Unpack[_AttendOptions],
    ) -> Array | tuple[Array, Array]: ...  # fmt: skip
    def attend(
        self,
        q: Array,
        mask: SupportsDLPack | None = None,
        *,
        mask_slopes: SupportsDLPack | None = None,
        softmax_scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: SupportsDLPack | None = None,
        by_segment: bool = False,
        alibi_slopes: SupportsDLPack | None = None,
        out: Array | None = None,
        return_lse: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Attention of new tokens, whose keys have been appended, over all that the cache holds.

        Args:
            q: (batch, heads, head dim), or (batch, tokens, heads, head dim) with up to 16 tokens.
            mask: As in :func:`flashport.flash_decode_segments`, over all tokens in the order of the sequence.
            mask_slopes, softmax_scale, window, softcap, sinks, by_segment, alibi_slopes, out, return_lse: As in
                :func:`flashport.flash_decode_segments`.

        Returns:
            As :func:`flashport.flash_decode_segments`.

        Raises:
            ValueError, TypeError, NotImplementedError: As :func:`flashport.flash_decode_segments`.
        """
        return flash_decode_segments(
            q, self._segments, mask=mask, mask_slopes=mask_slopes, softmax_scale=softmax_scale, window=window,
            softcap=softcap, sinks=sinks, by_segment=by_segment, alibi_slopes=alibi_slopes, out=out,
            return_lse=return_lse,
        )  # fmt: skip

    def reset(self) -> None:
        """Forgets all tokens."""
        for length in self._lengths.values():
            length[...] = 0
        self._host_quantised = [0] * self.batch
        self._count([0] * self.batch)

    def _checked(self, name: str, x: Any, dim: int) -> Any:
        if not isinstance(x, self._array_type) or x.dtype != self._like.dtype:  # type: ignore[attr-defined]
            got = _dtype_name(x) if arrays.caller_library(x) is self._xp else type(x).__name__
            raise TypeError(
                f"MixedKVCache.append: {name} must be an array of {self._xp.__name__} of {self.dtype}, got {got}"
            )
        shape = x.shape
        expected = (self.batch, self.num_kv_heads, dim)
        if len(shape) not in (3, 4) or (shape[0], shape[-2], shape[-1]) != expected:
            raise ValueError(
                f"MixedKVCache.append: {name} must have the shape ({self.batch}, tokens, {self.num_kv_heads}, {dim}), "
                f"got {tuple(shape)}"
            )
        if self._is_torch and x.device != self._like.device:  # type: ignore[attr-defined]
            raise ValueError(
                f"MixedKVCache.append: {name} must be on {self._like.device}, where the cache is, got {x.device}"  # type: ignore[attr-defined]
            )
        refuse_gradients("MixedKVCache.append", name, x)
        return x

    def _added(self, tokens: int, lengths: Sequence[int] | None) -> list[int]:
        if lengths is None:
            return [tokens] * self.batch
        added = [int(length) for length in lengths]
        if len(added) != self.batch or min(added) < 0 or max(added) > tokens:
            raise ValueError(
                f"MixedKVCache.append: lengths must be {self.batch} numbers from 0 to {tokens}, got {added}"
            )
        return added

    def _aim(self, total: int) -> int:
        """How many of so many tokens are to be quantised."""
        return max(total - self.sink_tokens - self.hot_tokens, 0) // self.spill_tokens * self.spill_tokens

    def _aimed(self, total: Any) -> Any:
        """The same on the device."""
        return self._at_least(total - self.sink_tokens - self.hot_tokens, 0) // self.spill_tokens * self.spill_tokens

    def _device_total(self) -> Any:
        return self._wide(self.lengths)

    def _wide(self, x: Any) -> Any:
        return x.to(self._xp.int64) if self._is_torch else x.astype("int64")

    def _from_host(self, values: list[int]) -> Any:
        if self._is_torch:
            return self._xp.tensor(values, device=self._like.device)  # type: ignore[attr-defined]
        return self._xp.asarray(values)

    def _at_least(self, x: Any, least: int) -> Any:
        return self._xp.where(x > least, x, least)

    def _move(self, aim: Any) -> None:
        """Hot tokens become quantised until each sequence has ``aim`` of these, and the rest moves to the front."""
        quantised, hot = (self._wide(self._lengths[name]) for name in ("quantised", "hot"))
        count = self._at_least(aim - quantised, 0)
        count = self._xp.where(count < hot, count, hot)[:, None]
        row = self._arange(self._hot[0].shape[1])[None]
        slots = self._sequence * self._quantised[0].shape[1] + quantised[:, None] + row
        positions = self._xp.where(row < count, slots, -1).reshape(-1)
        (k_hot, v_hot), (k_old, v_old) = self._hot, self._quantised
        k_scale, v_scale = self._factors
        spill_kv(
            k_hot, v_hot, k_old, v_old, positions, k_quant_format=self.k_format, v_quant_format=self.v_format,
            k_quant_scale=k_scale, v_quant_scale=v_scale,
        )  # fmt: skip
        last = self._hot[0].shape[1] - 1
        source = self._xp.where(row + count < last, row + count, last)
        for array in self._hot:
            array[...] = array[self._sequence, source]
        self._lengths["quantised"] += self._narrow(count[:, 0])
        self._lengths["hot"] -= self._narrow(count[:, 0])

    def _narrow(self, x: Any) -> Any:
        return x.to(self._xp.int32) if self._is_torch else x.astype("int32")

    def _write_hot(self, k: Any, v: Any, tokens: int) -> None:
        """New tokens for which the hot window has room, past the sinks: what nearly every token of a decode loop is."""
        hot, end = self._lengths["hot"], self._hot[0].shape[1]
        place = hot if tokens == 1 else hot[:, None] + self._arange(tokens)
        slots = place + (self._hot_flat if tokens == 1 else self._hot_begin)
        slots = self._xp.where(place < end, slots, -1)  # a replayed graph that nobody spilled for has no room
        rows = [x if x.ndim == 3 else x.reshape(-1, *x.shape[2:]) for x in (k, v)]
        decode.append_kv(rows[0], rows[1], self._hot[0], self._hot[1], slots.reshape(-1))
        hot[...] = self._xp.where(hot + tokens < end, hot + tokens, end)

    def _write(self, k: Any, v: Any, counts: Any, fills_quantised: bool) -> None:
        """New tokens go to the sinks, to the quantised part, and to the hot window."""
        total = self._device_total()
        row = self._arange(k.shape[1])[None]
        is_new = row < (counts if isinstance(counts, int) else counts[:, None])
        place = total[:, None] - self.sink_tokens + row  # in what comes after the sinks
        after = total + counts
        if self.sink_tokens:
            slots = self._sequence * self.sink_tokens + place + self.sink_tokens
            self._store((k, v), self._sinks, self._xp.where(is_new & (place < 0), slots, -1))
        quantised = self._wide(self._lengths["quantised"])
        begin = quantised
        if fills_quantised:  # tokens of a long prompt that the hot window never holds
            aim = self._aimed(after)
            begin = self._xp.where(aim > quantised, aim, quantised)
            slots = self._sequence * self._quantised[0].shape[1] + place
            chosen = is_new & (place >= quantised[:, None]) & (place < begin[:, None])
            self._store((k, v), self._quantised, self._xp.where(chosen, slots, -1), **self._stored)
        room = self._hot[0].shape[1]
        slot = place - begin[:, None]
        chosen = is_new & (slot >= 0) & (slot < room) & (place >= 0)
        self._store((k, v), self._hot, self._xp.where(chosen, self._hot_begin + slot, -1))
        sinks = self._xp.where(after < self.sink_tokens, after, self.sink_tokens)
        hot = after - sinks - begin
        hot = self._xp.where(hot < room, hot, room)  # a replayed graph that nobody spilled for has no room
        for name, value in (("sinks", sinks), ("quantised", begin), ("hot", hot)):
            self._lengths[name][...] = self._narrow(value)

    def _store(self, rows: tuple[Any, ...], cache: tuple[Any, ...], slots: Any, **stored: Unpack[_Stored]) -> None:
        k, v = (x.reshape(-1, *x.shape[2:]) for x in rows)
        decode.append_kv(k, v, cache[0], cache[1], slots.reshape(-1), **stored)


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
