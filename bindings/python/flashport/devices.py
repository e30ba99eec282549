"""What is installed, what is there, and what runs on it."""

from __future__ import annotations

from dataclasses import dataclass

from flashport import _core


@dataclass(frozen=True)
class Support:
    """Whether a request is served; ``reason`` says why not. True in a condition if it is."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        """Whether the request is served."""
        return self.supported


def version() -> str:
    """The version of the compiled library, "major.minor.patch"."""
    return _core.version()


def backends() -> list[_core.BackendStatus]:
    """Every backend of this build with its devices, also those that could not be opened and why.

    Source: common/host/loader.cpp and common/host/devices.cpp.

    Returns:
        A list of objects with ``name``, ``available``, ``detail`` (why not), ``targets`` and ``devices``; a device has
        ``device`` (as "cuda:0"), ``name``, ``target``, ``multiprocessors`` and ``memory_bytes``.
    """
    return _core.backends()


def supports(
    q_dtype: str = "bfloat16",
    kv: str | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    group_size: int = 1,
    q_len: int = 1,
    target: str | None = None,
) -> Support:
    """Whether :func:`flashport.flash_decode` serves such a request, and if not, why.

    Args:
        q_dtype: "bfloat16", "float16" or "float32" (or "bf16", "fp16", "fp32").
        kv: Format of the cache: "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz" or "q8_0"; default as q.
        head_dim: Head dim of queries and keys.
        head_dim_v: Head dim of values; default as ``head_dim``.
        group_size: Query heads for each key-value head.
        q_len: New tokens for each request.
        target: A name such as "cpu", "sm90a" or "gfx942"; default that of the first GPU, else the CPU.

    Source: cmake/decode_instances.txt, the table of all kernels, and common/host/kernel_choice.cpp.

    Returns:
        An object that is true in a condition if the request is served; its ``reason`` says why not.

    Raises:
        ValueError: ``q_dtype`` is no element type.
    """
    return Support(*_core.supports(*_query(q_dtype, kv, head_dim, head_dim_v, group_size, q_len, target)))


def which_kernel(
    q_dtype: str = "bfloat16",
    kv: str | None = None,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    group_size: int = 1,
    q_len: int = 1,
    target: str | None = None,
) -> str:
    """The key of the kernel that such a request runs, such as "decode/bf16/kv=bf16/hd128/r16/sm90a".

    Arguments are those of :func:`supports`.

    Source: common/host/kernel_choice.cpp.

    Returns:
        The key: family, math type, cache format, head dims and query rows of the tile, target.

    Raises:
        ValueError: ``q_dtype`` is no element type.
        NotImplementedError: No kernel serves the request; the text is the reason that :func:`supports` gives.
    """
    return _core.which_kernel(*_query(q_dtype, kv, head_dim, head_dim_v, group_size, q_len, target))


_KV_OF_QUERY = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}


def _query(
    q_dtype: str,
    kv: str | None,
    head_dim: int,
    head_dim_v: int | None,
    group_size: int,
    q_len: int,
    target: str | None,
) -> tuple[str, str, str, int, int, int, int]:
    q_dtype = str(q_dtype).rpartition(".")[2]  # also torch.bfloat16 and NumPy's dtypes
    return (
        target or "",
        q_dtype,
        kv or _KV_OF_QUERY.get(q_dtype, q_dtype),
        head_dim,
        head_dim_v or head_dim,
        group_size,
        q_len,
    )
