"""FlashInfer's functions that merge partial results of attention, under its names, signatures and layouts.

``s`` is the logarithm to base 2 of the sum of exponentials, as all of FlashInfer has it. Tensors may be of any library
that :mod:`flashport.arrays` makes arrays of: torch, NumPy and CuPy.
"""

from __future__ import annotations

import sys
from typing import Any

from flashport import _core, decode
from flashport import _flashinfer_checks as checks
from flashport._rewording import REFUSALS, reworded
from flashport.arrays import array_library, caller_library, rank
from flashport.torch.gradients import refuse_gradients
from flashport.typing import Array, SupportsDLPack

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def merge_state(v_a: Array, s_a: SupportsDLPack, v_b: Array, s_b: SupportsDLPack) -> tuple[Array, Array]:
    """:func:`flashport.merge_state` to base 2: the attention over the keys of two results together.

    Args:
        v_a: (seq_len, num_heads, head_dim) fp16, bf16 or fp32; any strides.
        s_a: (seq_len, num_heads) fp32; another floating type is converted.
        v_b: As ``v_a``.
        s_b: As ``s_a``.

    Returns:
        ``(v, s)``, new, as ``v_a`` and in fp32 as ``s_a``. -inf in both ``s_a`` and ``s_b`` gives v = 0 and s = -inf.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.merge_state`. Where FlashInfer
            refuses it too, the error is also a RuntimeError and begins with FlashInfer's words.
        AttributeError: As well, for ``s_a`` or ``s_b`` that is no array.

    Source:
        bindings/python/flashport/flashinfer.py over that function; the signature is FlashInfer's, from
        flashinfer/cascade.py.
    """
    name = "merge_state"
    refuse_gradients(name, "v_a s_a v_b s_b", v_a, s_a, v_b, s_b)
    checks.check_method(name, "s_a", s_a)
    checks.check_method(name, "s_b", s_b)
    words = f"empty_like(): argument 'input' (position 1) must be Tensor, not {type(v_a).__name__}"
    checks.check_array(name, "v_a", v_a, words)
    checks.check_array(name, "v_b", v_b, checks.not_passed(name, 6, 2, v_b))
    checks.check_states(name, {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}, "s_b")
    try:
        return decode.merge_state(v_a, _fp32(s_a), v_b, _fp32(s_b), lse_base=2)
    except REFUSALS as error:
        names = {"o_a": "v_a", "lse_a": "s_a", "o_b": "v_b", "lse_b": "s_b"}
        raise reworded(error, f"{name}: ", names) from None


def merge_state_in_place(
    v: Array, s: Array, v_other: SupportsDLPack, s_other: SupportsDLPack, mask: SupportsDLPack | None = None
) -> None:
    """As :func:`merge_state`, into the first result.

    Args:
        v: (seq_len, num_heads, head_dim) fp16, bf16 or fp32; any strides; written. A tensor of torch, or an array of
            NumPy or CuPy, as are the others.
        s: (seq_len, num_heads) fp32; written.
        v_other: As ``v``.
        s_other: As ``s``; another floating type is converted.
        mask: (seq_len) bool, or an integer type; rows where it is 0 stay as they are. Default: all rows are merged.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.merge_state`; nothing has been
            written. Where FlashInfer refuses it too, the error is also a RuntimeError and begins with FlashInfer's
            words.
        AttributeError: As well, for ``s`` or ``s_other`` that is no array.

    Source:
        bindings/python/flashport/flashinfer.py: the merge is of new arrays, which are then copied; the signature is
        FlashInfer's, from flashinfer/cascade.py.
    """
    name = "merge_state_in_place"
    refuse_gradients(name, "v s v_other s_other", v, s, v_other, s_other)
    checks.check_method(name, "s", s)
    checks.check_method(name, "s_other", s_other)
    passed: list[tuple[int, str, Any]] = [(0, "v", v), (2, "v_other", v_other)]
    if mask is not None:
        passed.append((4, "mask", mask))
    for index, argument, x in passed:
        checks.check_array(name, argument, x, checks.not_passed(name, 4, index, x, optional=True))
    library = caller_library(v)
    for argument, x in (("v", v), ("s", s), ("mask", mask)):
        if library is None or (x is not None and caller_library(x) is not library):
            of = "torch, NumPy or CuPy" if library is None else library.__name__
            raise TypeError(f"{name}: {argument} must be an array of {of}, got {type(x).__name__}")
    checks.check_states(name, {"v": v, "s": s, "v_other": v_other, "s_other": s_other}, "s")
    if mask is not None:
        checks.check_mask(name, v, mask)
    _check_written(name, "v", v)
    _check_written(name, "s", s)
    try:
        _core.check_apart(name, {"v": v, "s": s}, {"mask": mask})
        merged = decode.merge_state(v, s, v_other, _fp32(s_other), lse_base=2)
    except REFUSALS as error:
        names = {"o_a": "v", "lse_a": "s", "o_b": "v_other", "lse_b": "s_other"}
        raise reworded(error, f"{name}: ", names) from None
    for x, values in ((v, merged[0]), (s, merged[1])):
        _write(x, values, mask)


def merge_states(v: Array, s: SupportsDLPack) -> tuple[Array, Array]:
    """:func:`flashport.merge_states` to base 2, with the states along the second axis.

    Args:
        v: (seq_len, num_states, num_heads, head_dim) fp16, bf16 or fp32; any strides. A tensor of torch, or an array of
            NumPy, CuPy or JAX.
        s: (seq_len, num_states, num_heads) fp32; another floating type is converted.

    Returns:
        ``(v, s)``, new: (seq_len, num_heads, head_dim) of the type of ``v``, and (seq_len, num_heads) fp32. A row
        whose states all have s = -inf gives v = 0 and s = -inf.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: As :func:`flashport.merge_states`, whose axes begin
            with the states. Where FlashInfer refuses it too, the error is also a RuntimeError and begins with
            FlashInfer's words.
        AttributeError: As well, for what is no array.

    Source:
        bindings/python/flashport/flashinfer.py over that function, which gets views; the signature is FlashInfer's,
        from flashinfer/cascade.py.
    """
    name = "merge_states"
    refuse_gradients(name, "v s", v, s)
    checks.check_method(name, "v", v, "device")
    checks.check_method(name, "s", s)
    checks.check_many(name, v, s)
    try:
        return decode.merge_states(_states_first(v), _states_first(_fp32(s)), lse_base=2)
    except REFUSALS as error:
        raise reworded(error, f"{name}: ", {"o": "v", "lse": "s"}) from None


def _check_written(function: str, name: str, x: Any) -> None:
    """The copies at the end must not be what finds that one of two arrays cannot be written."""
    if hasattr(x, "flags") and not getattr(x.flags, "writeable", True):
        raise ValueError(f"{function}: {name} is written and must not be read-only; pass a copy")
    checks.check_repeats(function, name, x)


def _fp32(s: Any) -> Any:
    """``s`` in fp32, itself where it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(s, torch.Tensor):
        return s.float() if s.is_floating_point() else s
    library = array_library(s)
    return s if library is None or s.dtype.kind in "iub" else s.astype("float32", copy=False)


def _states_first(x: Any) -> Any:
    """A view with the first two axes exchanged."""
    return x.swapaxes(0, 1)


def _write(x: Any, values: Any, mask: Any) -> None:
    """Copies rows into ``x``, all of them or where ``mask`` is not 0."""
    library = caller_library(x)
    if mask is None:
        x[...] = values
        return
    rows = (mask != 0).reshape(-1, *[1] * (rank(x) - 1))
    if hasattr(library, "copyto"):
        library.copyto(x, values, where=rows)
    else:
        x.copy_(library.where(rows, values, x))
