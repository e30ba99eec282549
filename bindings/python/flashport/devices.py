"""What is installed, what is there, and what runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from flashport import _core
from flashport.typing import CacheFormat, DTypeLike, GateForm, Operation, QuantisedFormat, StateLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    class _DecodeStage2Query(TypedDict, total=False):
        target: str | None
        out_dtype: DTypeLike

    class _AppendQuery(TypedDict, total=False):
        target: str | None
        dtype: DTypeLike
        k_format: CacheFormat | DTypeLike | None
        v_format: CacheFormat | DTypeLike | None
        head_dim: int
        head_dim_v: int | None
        scales_beside: bool

    class _QuantizeQuery(TypedDict, total=False):
        target: str | None
        dtype: DTypeLike
        format: QuantisedFormat
        head_dim: int

    class _DecodeQuery(TypedDict, total=False):
        target: str | None
        q_dtype: DTypeLike
        k_format: CacheFormat | DTypeLike | None
        v_format: CacheFormat | DTypeLike | None
        head_dim: int
        head_dim_v: int | None
        group_size: int
        q_len: int
        segment_formats: Sequence[CacheFormat] | None
        scales_beside: bool

    class _DecodeScheduleQuery(_DecodeQuery, total=False):
        batch: int
        num_kv_heads: int
        max_kv_len: int
        num_splits: int | None

    class _MergeQuery(TypedDict, total=False):
        target: str | None
        dtype: DTypeLike
        head_dim: int

    class _DeltaQuery(TypedDict, total=False):
        target: str | None
        q_dtype: DTypeLike
        state_dtype: DTypeLike
        head_dim_k: int
        head_dim_v: int | None
        state_layout: StateLayout
        gate: GateForm

    class _AttentionCall(TypedDict, total=False):
        target: str | None
        dtype: DTypeLike
        head_dim: int
        head_dim_v: int | None
        k_format: CacheFormat | DTypeLike | None
        v_format: CacheFormat | DTypeLike | None
        paged: bool
        causal: bool
        softcap: bool
        alibi: bool
        bias: bool
        dropout: bool
        seqused_k: bool
        appends: bool
        scales_beside: bool

    class _AttentionQuery(_AttentionCall, total=False):
        q_len: int
        group_size: int

    class _AttentionScheduleQuery(_AttentionCall, total=False):
        batch: int
        num_q_heads: int
        num_kv_heads: int
        q_len: int
        kv_len: int
        num_splits: int | None


@dataclass(frozen=True)
class Support:
    """Whether a request is served; ``reason`` says why not. True in a condition if it is."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        """Whether the request is served."""
        return self.supported


@dataclass(frozen=True)
class DecodeSchedule:
    """How a call of flash_decode is cut, as far as shapes decide it; :func:`explain` says what each number is."""

    kernel: str
    blocks: int
    query_tiles: int
    most_chunks: int
    shortest_chunk: int
    longest_chunk: int
    combine: Literal["none", "launch", "second launch"]
    workspace_bytes: int
    text: str

    def __str__(self) -> str:
        """All of it in a sentence."""
        return self.text


@dataclass(frozen=True)
class AttentionSchedule:
    """How a call of attention is cut, as far as shapes decide it; :func:`explain` says what each number is."""

    kernel: str
    rows: int
    keys: int
    stages: int
    threads: int
    blocks: int
    work_tiles: int
    shared_bytes: int
    pieces: int
    workspace_bytes: int
    text: str

    def __str__(self) -> str:
        """All of it in a sentence."""
        return self.text


def version() -> str:
    """The version of the compiled library.

    Returns:
        "major.minor.patch".

    Source:
        CMakeLists.txt.
    """
    return _core.version()


def backends() -> list[_core.BackendStatus]:
    """Every backend of this build with its devices, also those that could not be opened and why.

    Returns:
        A list of objects with ``name``, ``available``, ``detail`` (why not), ``targets`` and ``devices``; a device has
        ``device`` (as "cuda:0"), ``name``, ``target``, ``multiprocessors`` and ``memory_bytes``.

    Source:
        common/host/loader.cpp and common/host/devices.cpp.
    """
    return _core.backends()


@overload
def supports(operation: Literal["decode"], **options: Unpack[_DecodeQuery]) -> Support: ...
@overload
def supports(operation: Literal["decode_stage2"], **options: Unpack[_DecodeStage2Query]) -> Support: ...
@overload
def supports(operation: Literal["append"], **options: Unpack[_AppendQuery]) -> Support: ...
@overload
def supports(operation: Literal["merge"], **options: Unpack[_MergeQuery]) -> Support: ...
@overload
def supports(operation: Literal["gated_delta", "gated_delta_chunk"], **options: Unpack[_DeltaQuery]) -> Support: ...
@overload
def supports(operation: Literal["attention"], **options: Unpack[_AttentionQuery]) -> Support: ...
@overload
def supports(operation: Literal["quantize", "dequantize"], **options: Unpack[_QuantizeQuery]) -> Support: ...
def supports(operation: Operation, **options: Any) -> Support:
    """Whether a target serves such a call of an operation, and if not, why.

    Args:
        operation: "decode" for :func:`flashport.flash_decode`, :func:`flashport.flash_decode_segments` and
            :func:`flashport.flash_decode_stage1`;
            "decode_stage2", "append", "merge", "gated_delta", "gated_delta_chunk", "attention", "quantize" and
            "dequantize" for :func:`flashport.flash_decode_stage2`, :func:`flashport.append_kv`,
            :func:`flashport.merge_states` (and ``merge_state``), :func:`flashport.gated_delta_update`,
            :func:`flashport.gated_delta_chunk`, :func:`flashport.attention`, :func:`flashport.quantize_kv` and
            :func:`flashport.dequantize_kv`.
        options: What the call is like, by keyword; each has a default. All operations: ``target``, a name such as
            "cpu", "sm90a" or "gfx942", or a backend's for that of its first device; default that of the first GPU, else
            the CPU. Element types are names such as "bfloat16" or "bf16", or dtypes of any library; head dims are 128.

            "decode": ``q_dtype`` ("bfloat16"); ``k_format`` and ``v_format``, each "fp32", "fp16", "bf16", "fp8_e4m3",
            "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "fp8_e5m2", "int8" or "int4", or the
            element type whose own format it is, default that of ``q_dtype``; ``head_dim``; ``head_dim_v``, default as
            ``head_dim``; ``group_size``, query heads for each key-value head (1); ``q_len``, new tokens for each
            request (1); ``segment_formats``, for :func:`flashport.flash_decode_segments` with several segments or a
            mask: a list of the names of all formats that their keys and values have, in place of ``k_format`` and
            ``v_format``; ``scales_beside``, whether rows of the cache or groups of their values have scales of their
            own (False).

            "decode_stage2": ``out_dtype`` ("bfloat16").

            "append": ``dtype`` of ``k`` and ``v`` ("bfloat16"); ``k_format``, ``v_format``, ``head_dim`` and
            ``head_dim_v`` as above; ``scales_beside``, whether rows or groups of their values have scales of their own,
            which the call writes (False).

            "merge": ``dtype`` of ``o`` ("bfloat16"); ``head_dim``.

            "gated_delta" and "gated_delta_chunk": ``q_dtype`` ("bfloat16"); ``state_dtype`` of the pool of states,
            "float32", "bfloat16" or "float16", and "float32" also where there is none; ``head_dim_k``; ``head_dim_v``,
            default as ``head_dim_k``; ``state_layout``, "vk" or "kv"; ``gate``, what decays and rates are made of.
            "head": of ``a``, ``A_log``, ``dt_bias`` and ``b``, as a decode call of Qwen3-Next has them; everything that
            a chunked call takes is this. "key": the same with ``is_kda``. "any": what else an update may have: ``g``,
            ``gk``, ``gv``, ``beta``, ``allow_neg_eigval``, rates of columns, no ``dt_bias``, final states.

            "attention": ``dtype`` of q ("bfloat16"); ``head_dim``; ``head_dim_v``, default as ``head_dim``;
            ``k_format`` and ``v_format`` as above; ``paged``, whether keys lie on pages (False); ``causal`` (False);
            ``softcap``, ``alibi``, ``bias``, ``dropout`` and ``seqused_k``, whether the call has each (False);
            ``appends``, whether it has a few new keys, of q's type as the cache (False); ``scales_beside``, whether
            rows of keys or values or groups of their values have scales of their own (False);
            ``q_len``, queries of every sequence of a call without ``cu_seqlens_q`` (0: packed ones, or many), and
            ``group_size`` (1): few queries on a cache are served by the kernels of "decode".

            "quantize" and "dequantize": ``dtype`` of the numbers ("bfloat16"); ``format`` of what is stored ("q8_0");
            ``head_dim``.

    Returns:
        An object that is true in a condition if the call is served; its ``reason`` says why not.

    Raises:
        ValueError: Another operation, format, layout or gate than these, or what is no element type.
        TypeError: An argument of the wrong kind, or an option that the operation does not have.

    Source:
        bindings/python/queries.cpp; cmake/decode_instances.txt, cmake/gated_delta_instances.txt,
        cmake/gated_delta_chunk_instances.txt and cmake/attention_instances.txt, the tables of all kernels;
        common/host/decode/kernel_choice.cpp, common/host/gated_delta/kernel_choice.cpp and
        common/host/attention/kernel_choice.cpp.
    """
    return Support(*_core.supports(operation, options))


@overload
def which_kernel(operation: Literal["decode"], **options: Unpack[_DecodeQuery]) -> str: ...
@overload
def which_kernel(operation: Literal["decode_stage2"], **options: Unpack[_DecodeStage2Query]) -> str: ...
@overload
def which_kernel(operation: Literal["append"], **options: Unpack[_AppendQuery]) -> str: ...
@overload
def which_kernel(operation: Literal["merge"], **options: Unpack[_MergeQuery]) -> str: ...
@overload
def which_kernel(operation: Literal["gated_delta", "gated_delta_chunk"], **options: Unpack[_DeltaQuery]) -> str: ...
@overload
def which_kernel(operation: Literal["attention"], **options: Unpack[_AttentionQuery]) -> str: ...
@overload
def which_kernel(operation: Literal["quantize", "dequantize"], **options: Unpack[_QuantizeQuery]) -> str: ...
def which_kernel(operation: Operation, **options: Any) -> str:
    """The key of the kernel that such a call of an operation runs, such as "decode/bf16/kv=bf16/hd128/r16/sm90a".

    Args:
        operation, options: As in :func:`supports`.

    Returns:
        The key. "decode" gives family, math type, cache formats, head dims and query rows of the tile, target;
        "gated_delta" gives family, type and layout of states, gates, K of the tile, target. "gated_delta_chunk" has two
        kernels and gives that of the chain over its chunks: family, math type, K of the tile, target. "attention" gives
        family, math type, head dims of the tile, form of the scores, target. The others give family and target.

    Raises:
        ValueError, TypeError: As :func:`supports`.
        NotImplementedError: No kernel serves the call; the text is the reason that :func:`supports` gives.

    Source:
        As :func:`supports`.
    """
    return _core.which_kernel(operation, options)


@overload
def explain(operation: Literal["decode"], **options: Unpack[_DecodeScheduleQuery]) -> DecodeSchedule: ...
@overload
def explain(operation: Literal["attention"], **options: Unpack[_AttentionScheduleQuery]) -> AttentionSchedule: ...
def explain(operation: Literal["decode", "attention"], **options: Any) -> DecodeSchedule | AttentionSchedule:
    """How the first device of a target cuts a call, as far as shapes decide it.

    Lengths stay on the device, where the tile scheduler reads them (docs/decode-schedule.md, docs/attention.md).

    Args:
        operation: "decode" for :func:`flashport.flash_decode`, "attention" for :func:`flashport.attention`.
        options: Those that :func:`supports` has for the operation; for "decode" also ``batch`` (1), ``num_kv_heads``
            (1), ``max_kv_len``, the keys of the longest sequence that the cache or its table has room for (0), and
            ``num_splits``, as ``flash_decode`` takes it (None); for "attention" also ``batch``, ``num_q_heads``,
            ``num_kv_heads``, ``q_len`` and ``kv_len`` of every sequence (all 1), and ``num_splits``, as ``attention``
            takes it (None).

    Returns:
        A frozen object whose ``str`` is one sentence. ``kernel`` is the key that :func:`which_kernel` gives;
        ``blocks``, those of the grid; ``workspace_bytes``, as :func:`flashport.decode_workspace_size` and
        :func:`flashport.attention_workspace_size`.

        "decode": ``query_tiles``, those of all sequences, kv heads and tiles of query rows; ``most_chunks``, how many
        chunks (with ``num_splits`` splits) a query tile has at most; ``shortest_chunk`` and ``longest_chunk``, their
        keys, of which a sequence's last chunk may have fewer; ``combine``, where partial results become one: "none"
        where every tile is one chunk, "launch" in the same launch, by the last block of each tile, or "second launch".

        "attention": ``rows`` of a work tile, ``keys`` of a key tile, ``stages``, the key tiles that are in flight or in
        use; ``threads`` and ``shared_bytes`` of a block; ``work_tiles`` of all sequences, heads and pieces; ``pieces``
        that the keys of a sequence are cut into. Where few queries are served by flash_decode's kernels: its tiles,
        chunks and blocks, and 0 for the rest.

    Raises:
        ValueError, TypeError: As :func:`supports`; a number out of its range.
        NotImplementedError: No kernel serves the call, or no device of the target is here.

    Source:
        common/host/decode/explain.cpp and common/host/attention/explain.cpp.
    """
    if operation == "attention":
        return AttentionSchedule(*_core.explain(operation, options))
    return DecodeSchedule(*_core.explain(operation, options))
