"""Decode of requests that share keys: what several requests begin with is read once for all of them.

A level is a part of each request's keys: the shared levels come first (a system prompt, then a document that some of
the requests ask about), the last one is what each request has for itself. Symbols are those of :mod:`flashport.decode`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, overload

from flashport import _attention, _core, decode
from flashport._rewording import REFUSALS, reworded
from flashport.arrays import caller_library, new_array, rank
from flashport.torch import tracing
from flashport.typing import Array, CacheFormat, KvLayout, StreamLike, SupportsDLPack

_NAME = "cascade_decode"
_ALIGNMENT = 16  # of each level's part of a workspace
_ROWS = 128  # of a work tile of attention on GPUs: fewer requests leave room for all heads of a group
# What attention and merge_states call the arguments of a level and of the call.
_OF_ATTENTION = {
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "seqlens",
    "cu_seqlens_q": "qo_indptr",
    "max_seqlen_q": "max_group_len",
}
_OF_MERGE = {"out_lse": "lse"}
_TAKEN_BY_BOTH = (
    "block_table", "token_table", "request_index", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_layout",
    "k_scale", "v_scale", "k_format", "v_format", "num_splits",
)  # fmt: skip
_ARRAYS = (
    "k_cache", "v_cache", "seqlens", "qo_indptr", "block_table", "token_table", "request_index", "kv_indptr",
    "kv_indices", "kv_last_page_len", "k_scale", "v_scale",
)  # fmt: skip
_BLOCKS = _core.kv_format_blocks()


@dataclass(frozen=True, eq=False)
class CascadeLevel:
    """The keys and values of one level of :func:`cascade_decode`: whose they are, and where they lie.

    A shared level has G groups, each some neighbouring requests of the batch; the last level has B, one for each
    request.

    Args:
        k_cache: As of :func:`flashport.flash_decode`, with G in place of B where it is contiguous.
        v_cache: As ``k_cache``, with DV in place of D.
        seqlens: (G) int32, keys of each group in this level; 0 is no keys. None only with ``kv_last_page_len``; in a
            shared level that is contiguous None is all of its keys. The last level also takes int64.
        qo_indptr: (G + 1) int32, first request of each group, from 0, and the end of the last one, as FlashInfer has
            it; requests past that are nobody's, and their rows of results hold anything. None in a shared level is one
            group of the whole batch; the last level has none.
        max_group_len: No group has more requests; default B. A smaller one saves blocks that find nothing to do.
        block_table, token_table, request_index, kv_indptr, kv_indices, kv_last_page_len, kv_layout: Where the keys of
            each group lie, as of :func:`flashport.flash_decode`.
        k_scale, v_scale, k_format, v_format: What the caches store, as there; scales of a shared level are above 0.
        num_splits: Into how many parts keys are cut: of a shared level as :func:`flashport.attention` has it, of the
            last one as :func:`flashport.flash_decode` has it.
    """

    k_cache: SupportsDLPack
    v_cache: SupportsDLPack
    seqlens: SupportsDLPack | None = None
    qo_indptr: SupportsDLPack | None = None
    max_group_len: int | None = None
    block_table: SupportsDLPack | None = None
    token_table: SupportsDLPack | None = None
    request_index: SupportsDLPack | None = None
    kv_indptr: SupportsDLPack | None = None
    kv_indices: SupportsDLPack | None = None
    kv_last_page_len: SupportsDLPack | None = None
    kv_layout: KvLayout = "NHD"
    k_scale: SupportsDLPack | None = None
    v_scale: SupportsDLPack | None = None
    k_format: CacheFormat | None = None
    v_format: CacheFormat | None = None
    num_splits: int | None = None


@overload
def cascade_decode(
    q: Array, levels: Sequence[CascadeLevel], *, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: SupportsDLPack | None = None, out: Array | None = None, lse: None = None,
    return_lse: Literal[False] = False, workspace: SupportsDLPack | None = None, stream: StreamLike | None = None,
) -> Array: ...  # fmt: skip
@overload
def cascade_decode(
    q: Array, levels: Sequence[CascadeLevel], *, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: SupportsDLPack | None = None, out: Array | None = None, lse: Array | None = None, return_lse: Literal[True],
    workspace: SupportsDLPack | None = None, stream: StreamLike | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def cascade_decode(
    q: Array, levels: Sequence[CascadeLevel], *, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: SupportsDLPack | None = None, out: Array | None = None, lse: Array, return_lse: bool = False,
    workspace: SupportsDLPack | None = None, stream: StreamLike | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def cascade_decode(
    q: Array, levels: Sequence[CascadeLevel], *, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: SupportsDLPack | None = None, out: Array | None = None, lse: Array | None = None, return_lse: bool = False,
    workspace: SupportsDLPack | None = None, stream: StreamLike | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip
def cascade_decode(
    q: Array,
    levels: Sequence[CascadeLevel],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: SupportsDLPack | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
    workspace: SupportsDLPack | None = None,
    stream: StreamLike | None = None,
) -> Array | tuple[Array, Array]:
    """:func:`flashport.flash_decode` of one new token a request, whose keys lie in several levels.

    Each shared level is one call of :func:`flashport.attention` without a mask, in which the requests of a group are
    the rows of one sequence, so that its keys are read once for all of them (where the whole batch is one group and
    small, so are the heads that share a kv head); the last level is one call of
    :func:`flashport.flash_decode`, and one launch merges what the levels give. A request whose group has no keys in a
    level gets nothing of it; one without any key gets output 0 and lse -inf. No call waits for the device: lengths,
    offsets and tables are read there, and a captured graph can be replayed with others.

    The partial results of levels are rounded to q's type before they are merged, so bits are not those of
    :func:`flashport.flash_decode` over whole sequences. A request's bits follow from its own query, the keys that it
    sees, their lengths in each level, and from how many requests are in its groups, on which it depends into how many
    pieces attention cuts keys; never from what the others hold, nor from where in the batch the request stands. With
    ``num_splits=1`` in the shared levels they do not follow from the size of groups either.

    There are no windows and no ALiBi, whose positions would go through all levels.

    Args:
        q: (B, Hq, D) fp16 or bf16, fp32 on the CPU; a tensor of torch, or an array of NumPy or CuPy.
        levels: Shared levels in any number, then the last one, of a request each; levels may share caches.
        softmax_scale: Factor on the scores; default 1 / sqrt(D).
        softcap: Scores become cap * tanh(score / cap) after the scale; 0 is off.
        sinks: (Hq) fp32, a logit that joins the softmax's denominator, and so the lse, once: with the last level.
        out: (B, Hq, DV), of q's type; written. Default: a new array.
        lse: (B, Hq) fp32; written. Where given, ``return_lse`` is implied.
        return_lse: Also return the lse.
        workspace: uint8 of at least :func:`cascade_workspace_size` bytes, as of :func:`flashport.flash_decode`; a
            tensor of torch, or an array of NumPy or CuPy. Partial results of levels are new arrays in any case.
        stream: As of :func:`flashport.flash_decode`.

    Returns:
        ``out``, or ``(out, lse)``.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.flash_decode`, and of shared
            levels as :func:`flashport.attention`; the text names the level. Nothing that was given has been written,
            but for ``workspace``.

    Source:
        bindings/python/flashport/cascade.py over :func:`flashport.attention`, :func:`flashport.flash_decode` and
        :func:`flashport.merge_states`; levels are those of FlashInfer's MultiLevelCascadeAttentionWrapper.
    """
    calls = _calls(q, levels, softmax_scale, softcap, sinks)
    pieces = [None] * len(calls) if workspace is None else _divide(workspace, [call.size() for call in calls])
    if (out is not None or lse is not None) and not tracing.is_compiling():
        _check_apart(q, levels, sinks, out, lse, workspace)
    shape = (len(calls), *_shape(q)[:2])
    with _allocating_on(q, stream):
        parts: Any = new_array(_NAME, "q", q, (*shape, _head_dim_v(calls[-1].level)))
        lses: Any = new_array(_NAME, "q", q, shape, "float32")
        for i, call in enumerate(calls):
            call.run(parts[i], lses[i], pieces[i], stream)
    try:
        merged, merged_lse = decode.merge_states(parts, lses, out=out, out_lse=lse, stream=stream)
    except REFUSALS as error:
        raise reworded(error, f"{_NAME}: ", _OF_MERGE) from None
    return (merged, merged_lse) if return_lse or lse is not None else merged


def cascade_workspace_size(
    q: SupportsDLPack,
    levels: Sequence[CascadeLevel],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: SupportsDLPack | None = None,
) -> int:
    """Bytes of workspace that :func:`cascade_decode` needs with these arguments, whatever the lengths.

    Nothing is computed or allocated.

    Args:
        q, levels, softmax_scale, softcap, sinks: As in :func:`cascade_decode`; no element is read.

    Returns:
        A number of bytes: what the levels need, one after the other; 0 where no workspace is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`cascade_decode`.

    Source:
        bindings/python/flashport/cascade.py.
    """
    return sum(_aligned(call.size()) for call in _calls(q, levels, softmax_scale, softcap, sinks))


@dataclass(frozen=True, eq=False)
class _Call:
    """One level's call: of attention, or the last one's of flash_decode."""

    where: str  # "cascade_decode: levels[0]: "
    level: CascadeLevel
    q: Any  # as the call has it
    options: dict[str, Any]
    is_shared: bool
    kv_heads: int = 0  # where the heads of a group are rows, too

    def run(self, out: Any, lse: Any, workspace: Any, stream: StreamLike | None) -> None:
        """Writes the level's ``out`` (B, Hq, DV) and ``lse`` (B, Hq)."""
        level = self.level
        try:
            if self.kv_heads > 0:
                found = _attention.attention(
                    self._packed_q(), level.k_cache, level.v_cache, **self.options, workspace=workspace, stream=stream,
                    return_lse=True,
                )  # fmt: skip
                self._unpack(found[0], found[1], out, lse)
            elif self.is_shared:
                out, lse = self._seen_by_attention(out, lse)
                _attention.attention(
                    self.q, level.k_cache, level.v_cache, **self.options, out=out, lse=lse, workspace=workspace,
                    stream=stream,
                )  # fmt: skip
            else:
                decode.flash_decode(
                    self.q, level.k_cache, level.v_cache, level.seqlens, **self.options, out=out, lse=lse,
                    workspace=workspace, stream=stream,
                )  # fmt: skip
        except REFUSALS as error:
            raise reworded(error, self.where, _OF_ATTENTION) from None

    def size(self) -> int:
        """Bytes of its workspace; raises what :meth:`run` would of its inputs."""
        level = self.level
        try:
            if self.is_shared:
                q = self.q if self.kv_heads == 0 else self._packed_q()
                return _attention.attention_workspace_size(q, level.k_cache, level.v_cache, **self.options)
            return decode.decode_workspace_size(self.q, level.k_cache, level.v_cache, level.seqlens, **self.options)
        except REFUSALS as error:
            raise reworded(error, self.where, _OF_ATTENTION) from None

    def _packed_q(self) -> Any:
        """[1, B * group, Hkv, D]: the heads that share a kv head are rows, so that its keys are read once for them."""
        batch, heads, dim = self.q.shape[1:]
        by_group = self.q.reshape(batch, self.kv_heads, heads // self.kv_heads, dim)
        return by_group.swapaxes(1, 2).reshape(1, -1, self.kv_heads, dim)

    def _unpack(self, found: Any, found_lse: Any, out: Any, lse: Any) -> None:
        """From the rows of :meth:`_packed_q` to (B, Hq, DV) and (B, Hq)."""
        batch, groups = out.shape[0], out.shape[1] // self.kv_heads
        rows = found.reshape(batch, groups, self.kv_heads, -1).swapaxes(1, 2)
        out.reshape(batch, self.kv_heads, groups, -1)[...] = rows
        lse.reshape(batch, self.kv_heads, groups)[...] = found_lse.reshape(self.kv_heads, batch, groups).swapaxes(0, 1)

    def _seen_by_attention(self, out: Any, lse: Any) -> tuple[Any, Any]:
        """Views of both: attention has heads before rows in its lse, and one group as a batch of one sequence."""
        return (out, lse.T) if self.level.qo_indptr is not None else (out[None], lse.T[None])


def _calls(
    q: Any, levels: Sequence[CascadeLevel], softmax_scale: float | None, softcap: float, sinks: SupportsDLPack | None
) -> list[_Call]:
    """The call of each level; raises where levels do not fit together."""
    if caller_library(q) is None:
        raise TypeError(f"{_NAME}: q must be a tensor of torch, or an array of NumPy or CuPy, got {type(q).__name__}")
    if rank(q) != 3:
        raise ValueError(
            f"{_NAME}: q must have 3 dimensions (batch, num_q_heads, head_dim), got {rank(q)}: {_shape(q)}"
        )
    if not isinstance(levels, Sequence) or not all(isinstance(level, CascadeLevel) for level in levels):
        kinds = [type(x).__name__ for x in levels] if isinstance(levels, Sequence) else type(levels).__name__
        raise TypeError(f"{_NAME}: levels must be a list of CascadeLevel, got {kinds}")
    if not levels:
        raise ValueError(f"{_NAME}: levels must have one level or more, the last of a request each, got none")
    last = len(levels) - 1
    if levels[last].qo_indptr is not None or levels[last].max_group_len is not None:
        name = "qo_indptr" if levels[last].qo_indptr is not None else "max_group_len"
        raise ValueError(
            f"{_NAME}: levels[{last}].{name} must be None, since the last level has one request in each group; leave "
            "it out, or add a level for what each request has for itself"
        )
    calls = [_call(i, level, q, i < last) for i, level in enumerate(levels)]
    dims = [_head_dim_v(level) for level in levels]
    for i, dim in enumerate(dims[:last]):
        if dim != dims[last]:
            raise ValueError(
                f"{_NAME}: levels[{i}].v_cache must have the head_dim_v of the last level, {dims[last]}, got {dim}"
            )
    heads = [_kv_heads(level) for level in levels]
    fits = [count > 0 and q.shape[1] % count == 0 for count in heads]  # of others the level's call says so
    for i, count in enumerate(heads[:last]):
        if fits[i] and fits[last] and count != heads[last]:
            raise ValueError(
                f"{_NAME}: levels[{i}].k_cache must have the num_kv_heads of the last level, {heads[last]}, got {count}"
            )
    for call in calls:
        call.options.update(softmax_scale=softmax_scale, softcap=softcap)
    calls[last].options["sinks"] = sinks
    return calls


def _call(i: int, level: CascadeLevel, q: Any, is_shared: bool) -> _Call:
    for name in ("k_cache", "v_cache"):
        if rank(getattr(level, name)) == 0:
            got = type(getattr(level, name)).__name__
            raise TypeError(f"{_NAME}: levels[{i}].{name} must be an array with axes, got {got}")
    options: dict[str, Any] = {name: getattr(level, name) for name in _TAKEN_BY_BOTH}
    if is_shared:
        options["seqused_k"] = level.seqlens
        if level.qo_indptr is None:
            if level.max_group_len is not None:
                raise ValueError(
                    f"{_NAME}: levels[{i}].max_group_len must be None without qo_indptr, got {level.max_group_len}: "
                    "the whole batch is one group"
                )
            q = q[None]
            kv_heads = _kv_heads(level)
            packs = 0 < q.shape[1] < _ROWS and 0 < kv_heads < q.shape[2] and q.shape[2] % kv_heads == 0
            return _Call(f"{_NAME}: levels[{i}]: ", level, q, options, is_shared, kv_heads if packs else 0)
        longest = len(q) if level.max_group_len is None else level.max_group_len
        options.update(cu_seqlens_q=level.qo_indptr, max_seqlen_q=longest)
    return _Call(f"{_NAME}: levels[{i}]: ", level, q, options, is_shared)


def _check_apart(q: Any, levels: Sequence[CascadeLevel], sinks: Any, out: Any, lse: Any, workspace: Any) -> None:
    """The calls of levels write arrays of ours, so they cannot say what the caller's outputs share memory with."""
    outputs = {"out": out, "lse": lse, "workspace": workspace}
    _core.check_apart(_NAME, outputs, {"q": q, "sinks": sinks})
    for i, level in enumerate(levels):
        _core.check_apart(_NAME, outputs, {f"levels[{i}].{name}": getattr(level, name) for name in _ARRAYS})


def _divide(workspace: Any, sizes: list[int]) -> list[Any]:
    """The part of a workspace that each level has."""
    ends = list(accumulate(map(_aligned, sizes)))
    if caller_library(workspace) is None:
        got = type(workspace).__name__
        raise TypeError(f"{_NAME}: workspace must be a tensor of torch, or an array of NumPy or CuPy, got {got}")
    if rank(workspace) != 1 or len(workspace) < ends[-1]:
        raise ValueError(
            f"{_NAME}: workspace must have {ends[-1]} bytes or more, as cascade_workspace_size says, got shape "
            f"{_shape(workspace)}"
        )
    return [workspace[end - _aligned(size) : end] for end, size in zip(ends, sizes, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _kv_heads(level: CascadeLevel) -> int:
    shape = _shape(level.k_cache)
    axis = 1 if len(shape) == 3 or level.kv_layout == "HND" else 2
    return int(shape[axis]) if axis < len(shape) else 0


def _head_dim_v(level: CascadeLevel) -> int:
    extent: int = level.v_cache.shape[-1]  # type: ignore[attr-defined]
    # The level's call refuses another name.
    values, elements = (1, 1) if level.v_format is None else _BLOCKS.get(level.v_format, (1, 1))
    return extent // elements * values


def _allocating_on(q: Any, stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Where new arrays belong to ``stream``: what they leave free then waits for the kernels that still read it."""
    library: Any = caller_library(q)
    is_torch = hasattr(q, "is_cuda")
    if stream is None or not (q.is_cuda if is_torch else library is sys.modules.get("cupy")):
        return contextlib.nullcontext()
    if hasattr(stream, "__cuda_stream__"):
        handle = stream.__cuda_stream__()[1]
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if not isinstance(handle, int):
        return contextlib.nullcontext()  # the levels' calls refuse it
    context: contextlib.AbstractContextManager[Any] = (
        library.cuda.stream(library.cuda.ExternalStream(handle, device=q.device))
        if is_torch
        else library.cuda.ExternalStream(handle)
    )
    return context
