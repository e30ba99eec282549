"""Types of the interface, for annotations and type checkers: arrays, layouts, formats."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeAlias, TypeVar

__all__ = [
    "Array",
    "BlockFormat",
    "CacheFormat",
    "DTypeLike",
    "GateForm",
    "HeadMap",
    "KvLayout",
    "Operation",
    "QuantisedFormat",
    "StateLayout",
    "StreamLike",
    "SupportsDLPack",
]


class SupportsDLPack(Protocol):
    """An array of any library: NumPy's, PyTorch's, CuPy's, JAX's, or a :class:`flashport.DeviceArray`.

    Arrays have more methods of DLPack than this one, which is what annotations of all these libraries have in common.
    """

    def __dlpack__(self) -> Any:
        """A capsule with the array's memory, as the Python array API standard has it."""


Array = TypeVar("Array", bound=SupportsDLPack)
"""The caller's own array type: what a call returns is of the type of its query."""


class _HasCudaStream(Protocol):
    """A stream of PyTorch."""

    @property
    def cuda_stream(self) -> int: ...


class _HasPointer(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int: ...


class _SupportsCudaStream(Protocol):
    """A stream of cuda.core, and of others that have its protocol."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = "int | _HasCudaStream | _HasPointer | _SupportsCudaStream"
"""A stream handle, or an object that has one."""

DTypeLike: TypeAlias = Any
"""A name such as "bfloat16" or "bf16", or a dtype of any library."""

BlockFormat = Literal["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
"""ggml's blocks."""

QuantisedFormat = Literal[
    "fp8_e4m3", "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "fp8_e5m2", "int8", "int4"
]
"""Formats of a cache that have fewer bits than 16."""

CacheFormat = Literal[
    "fp32",
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3fnuz",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "iq4_nl",
    "fp8_e5m2",
    "int8",
    "int4",
]
KvLayout = Literal["NHD", "HND"]
StateLayout = Literal["vk", "kv"]
HeadMap = Literal["consecutive", "modulo"]
GateForm = Literal["head", "key", "any"]
Operation = Literal[
    "decode",
    "decode_stage2",
    "append",
    "merge",
    "gated_delta",
    "gated_delta_chunk",
    "attention",
    "quantize",
    "dequantize",
]
