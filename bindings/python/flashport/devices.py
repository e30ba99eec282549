"""What is installed, what is there, and what runs on it."""

from __future__ import annotations

from dataclasses import dataclass

from flashport import _core
from flashport.typing import CacheFormat, DTypeLike, GatedDeltaOperation, GateForm, StateLayout


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


def supports(
    q_dtype: DTypeLike = "bfloat16",
    kv: CacheFormat | DTypeLike | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    group_size: int = 1,
    q_len: int = 1,
    target: str | None = None,
) -> Support:
    """Whether :func:`flashport.flash_decode` serves such a request, and if not, why.

    Args:
        q_dtype: "bfloat16", "float16" or "float32" (or "bf16", "fp16", "fp32"), or a dtype of any library.
        kv: Format of the cache: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz" or "q8_0", or the element type, as
            ``q_dtype``; default as q.
        head_dim: Head dim of queries and keys.
        head_dim_v: Head dim of values; default as ``head_dim``.
        group_size: Query heads for each key-value head.
        q_len: New tokens for each request.
        target: A name such as "cpu", "sm90a" or "gfx942"; default that of the first GPU, else the CPU.

    Returns:
        An object that is true in a condition if the request is served; its ``reason`` says why not.

    Raises:
        ValueError: ``q_dtype`` is no element type.
        TypeError: An argument of the wrong kind.

    Source:
        cmake/decode_instances.txt, the table of all kernels, and common/host/decode/kernel_choice.cpp.
    """
    return Support(*_core.supports(target or "", q_dtype, kv, head_dim, head_dim_v, group_size, q_len))


def which_kernel(
    q_dtype: DTypeLike = "bfloat16",
    kv: CacheFormat | DTypeLike | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    group_size: int = 1,
    q_len: int = 1,
    target: str | None = None,
) -> str:
    """The key of the kernel that such a request runs, such as "decode/bf16/kv=bf16/hd128/r16/sm90a".

    Args:
        q_dtype, kv, head_dim, head_dim_v, group_size, q_len, target: As in :func:`supports`.

    Returns:
        The key: family, math type, cache format, head dims and query rows of the tile, target.

    Raises:
        ValueError: ``q_dtype`` is no element type.
        TypeError: An argument of the wrong kind.
        NotImplementedError: No kernel serves the request; the text is the reason that :func:`supports` gives.

    Source:
        common/host/decode/kernel_choice.cpp.
    """
    return _core.which_kernel(target or "", q_dtype, kv, head_dim, head_dim_v, group_size, q_len)


def supports_gated_delta(
    operation: GatedDeltaOperation,
    q_dtype: DTypeLike = "bfloat16",
    state_dtype: DTypeLike = "float32",
    head_dim_k: int = 128,
    head_dim_v: int | None = None,
    state_layout: StateLayout = "vk",
    gate: GateForm = "head",
    target: str | None = None,
) -> Support:
    """Whether :func:`flashport.gated_delta_update` or :func:`flashport.gated_delta_chunk` serves such a request.

    Args:
        operation: "update" or "chunk".
        q_dtype: "bfloat16", "float16" or "float32" (or "bf16", "fp16", "fp32"), or a dtype of any library.
        state_dtype: Element type of the pool of states: "float32", "bfloat16" or "float16"; "float32" also where there
            is none.
        head_dim_k: Head dim of queries and keys.
        head_dim_v: Head dim of values; default as ``head_dim_k``.
        state_layout: "vk" or "kv".
        gate: What decays and rates are made of. "head": of ``a``, ``A_log``, ``dt_bias`` and ``b``, as a decode call of
            Qwen3-Next has them; everything that a chunked call takes is this. "key": the same with ``is_kda``. "any":
            what else an update may have: ``g``, ``gk``, ``gv``, ``beta``, ``allow_neg_eigval``, rates of columns, no
            ``dt_bias``, final states.
        target: A name such as "cpu", "sm90a" or "gfx942"; default that of the first GPU, else the CPU.

    Returns:
        An object that is true in a condition if the request is served; its ``reason`` says why not.

    Raises:
        ValueError: ``operation``, ``state_layout`` or ``gate`` is another word, or a dtype is no element type.
        TypeError: An argument of the wrong kind.

    Source:
        cmake/gated_delta_instances.txt and cmake/gated_delta_chunk_instances.txt, the tables of all kernels, and
        common/host/gated_delta/kernel_choice.cpp.
    """
    query = target or "", operation, q_dtype, state_dtype, head_dim_k, head_dim_v, state_layout, gate
    return Support(*_core.supports_gated_delta(*query))


def which_gated_delta_kernel(
    operation: GatedDeltaOperation,
    q_dtype: DTypeLike = "bfloat16",
    state_dtype: DTypeLike = "float32",
    head_dim_k: int = 128,
    head_dim_v: int | None = None,
    state_layout: StateLayout = "vk",
    gate: GateForm = "head",
    target: str | None = None,
) -> str:
    """The key of the kernel that such a request runs: "gated_delta_update/state=fp32/vk/gate=head/k128/sm90a".

    Args:
        operation, q_dtype, state_dtype, head_dim_k, head_dim_v, state_layout, gate, target: As in
            :func:`supports_gated_delta`.

    Returns:
        The key: family, type and layout of states, gates, K of the tile, target; of a chunked call that of the chain
        over its chunks: family, math type, K of the tile, target.

    Raises:
        ValueError, TypeError: As :func:`supports_gated_delta`.
        NotImplementedError: No kernel serves the request; the text is the reason that :func:`supports_gated_delta`
            gives.

    Source:
        common/host/gated_delta/kernel_choice.cpp.
    """
    query = target or "", operation, q_dtype, state_dtype, head_dim_k, head_dim_v, state_layout, gate
    return _core.which_gated_delta_kernel(*query)
