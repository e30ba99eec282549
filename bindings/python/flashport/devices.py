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
        scale_group: int

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


@dataclass(frozen=True)
class Support:
    """Whether a request is served; ``reason`` says why not. True in a condition if it is."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        """Whether the request is served."""
        return self.supported


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
            own (False), and ``scale_group``, how many values share one: 8, of fp16, as in LightLLM, or ``head_dim`` (0:
            not said; a kernel that serves all is named).

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

    A decode call that asks for nothing but the output may run the same text without the code for more, with equal bits:
    "decode_plain/..." for "decode/...". Over ggml's blocks the size of the cache may choose a kernel of other rows, or
    one of blocks of any formats, with equal bits too. :func:`explain` names what runs.

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
