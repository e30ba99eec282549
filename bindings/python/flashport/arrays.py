"""New arrays of the caller's own library."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from flashport import _core
from flashport.typing import Array


def new_output(q: Array, v: Any, function: str | None = None) -> Array | None:
    """An uninitialised, contiguous array of q's library, type and device in v's shape.

    If that library is unknown it is None, or the error of ``function``, which then takes no output. What else does not
    fit, the library says, which looks at q and v before it looks at the output.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor) and isinstance(v, torch.Tensor):
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    shape = getattr(v, "shape", None)
    if shape is None:
        return None
    out = _other_array(q, shape, None)
    return new_array(function, "q", q, tuple(shape)) if out is None and function is not None else out


def rank(x: Any) -> int:
    """How many axes an array has; 0 for what is none, which the library refuses."""
    return len(getattr(x, "shape", ()))


def new_array(function: str, name: str, like: Array, shape: tuple[int, ...], dtype: str | None = None) -> Array:
    """An uninitialised, contiguous array of the library and device of ``like``, of its type or the one named.

    ``like`` is the argument ``name`` of ``function``, whose error it is that no arrays of its library can be made.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype) if dtype else like.dtype, device=like.device)
    array = _other_array(like, shape, dtype)
    if array is not None:
        return array
    raise TypeError(
        f"{function}: {name} must be an array of torch, NumPy or CuPy or a flashport.DeviceArray, since results are of "
        f"its kind, got {type(like).__name__}; convert it, or call flashport's own functions with outputs of yours"
    )


def _other_array(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    """As :func:`new_array` of libraries but torch; None if that of ``like`` is unknown."""
    numpy, cupy = sys.modules.get("numpy"), sys.modules.get("cupy")
    if numpy is not None and isinstance(like, numpy.ndarray):
        return numpy.empty(shape, dtype or like.dtype)
    if isinstance(like, _core.DeviceArray):
        return _core.DeviceArray(shape, dtype or like.dtype, like.device)
    if cupy is not None and isinstance(like, cupy.ndarray):
        with like.device:
            return cupy.empty(shape, dtype or like.dtype)
    return None


def require_numpy_type(function: str, like: Any, dtype: str, otherwise: str) -> None:
    """Makes NumPy, where ``like`` is an array of it, know a type that ml_dtypes adds.

    Where that is not installed it is the error of ``function``, which also says what to do ``otherwise``.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(like, numpy.ndarray):
        return
    try:
        numpy.dtype(dtype)  # which knows the name once ml_dtypes has been imported
    except TypeError:
        try:
            importlib.import_module("ml_dtypes")
        except ImportError:
            raise TypeError(
                f"{function}: NumPy has no type {dtype} without the package ml_dtypes: pip install ml_dtypes, or "
                f"{otherwise}"
            ) from None


def contiguous(x: Any) -> Any:
    """``x`` if its elements lie in the order of its shape, else a copy; what is no array stays as it is."""
    if x is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.contiguous()
    library = array_library(x)
    return x if library is None or x.flags.c_contiguous else library.ascontiguousarray(x)


def contiguous_rows(x: Any) -> Any:
    """``x`` if neighbours along its last axis are neighbours in memory, else a copy as of :func:`contiguous`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.contiguous() if x.ndim > 0 and x.stride(-1) != 1 else x
    library = array_library(x)
    apart = library is not None and x.ndim > 0 and x.strides[-1] != x.itemsize
    return library.ascontiguousarray(x) if apart else x


def contiguous_slots(x: Any) -> Any:
    """``x`` if what lies along its first axis is contiguous each by itself, else a copy as of :func:`contiguous`."""
    if x is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x if x.is_contiguous() or (x.ndim > 0 and len(x) > 0 and x[0].is_contiguous()) else x.contiguous()
    library = array_library(x)
    is_dense = library is None or x.flags.c_contiguous or (x.ndim > 0 and len(x) > 0 and x[0].flags.c_contiguous)
    return x if is_dense else library.ascontiguousarray(x)


def caller_library(x: Any) -> Any:
    """torch, NumPy or CuPy if ``x`` is an array of theirs, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else array_library(x)


def array_library(x: Any) -> Any:
    """NumPy or CuPy if ``x`` is an array of theirs, else None."""
    for library in map(sys.modules.get, ("numpy", "cupy")):
        if library is not None and isinstance(x, library.ndarray):
            return library
    return None
