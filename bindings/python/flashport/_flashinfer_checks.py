"""What FlashInfer refuses of the arguments of its merges, in its words, in its order, and before anything is written.

Its words stand after the name of our function and before what was expected and what came. It takes contiguous CUDA
tensors of 16-bit types alone; here all tensors of a call lie on one device, whichever that is, with any strides.
"""

from __future__ import annotations

from typing import Any

from flashport._shim_errors import ShimAttributeError, ShimError, ShimTypeError
from flashport.arrays import rank

_AXES = {"v": ("seq_len", "num_heads", "head_dim"), "s": ("seq_len", "num_heads")}
_MANY_AXES = {"v": ("seq_len", "num_states", "num_heads", "head_dim"), "s": ("seq_len", "num_states", "num_heads")}
_TYPES = ("float16", "bfloat16", "float32")


def not_passed(function: str, tensors: int, index: int, x: Any, optional: bool = False) -> str:
    """Words of a function with that many tensors, and perhaps an optional one, to which ``x`` at ``index`` is none."""
    kinds = ["DLTensor*"] * tensors + ["Optional<DLTensor*>"] * optional
    signature = ", ".join(f"{i}: {kind}" for i, kind in enumerate(kinds))
    got = "None" if x is None else type(x).__name__
    return (
        f"Mismatched type on argument #{index} when calling: `{function}({signature}) -> void`. Expected "
        f"`{kinds[index]}` but got `{got}`"
    )


def check_array(function: str, name: str, x: Any, words: str) -> None:
    """For what FlashInfer passes on as it is."""
    if not _is_array(x):
        raise ShimTypeError(f"{function}: {words}; {name} must be an array, got {type(x).__name__}")


def check_method(function: str, name: str, x: Any, attribute: str = "to") -> None:
    """For what FlashInfer first asks for an attribute."""
    if not _is_array(x):
        kind = type(x).__name__
        words = f"'{kind}' object has no attribute '{attribute}'"
        raise ShimAttributeError(f"{function}: {words}; {name} must be an array, got {kind}")


def check_states(function: str, named: dict[str, Any], heads_of: str) -> None:
    """Two states v, s, v, s by name. FlashInfer compares the heads of the first v with those of ``heads_of``."""
    if not all(hasattr(x, "shape") for x in named.values()):
        return  # arrays that speak DLPack alone: the merge knows more
    (v, s, v_other, s_other) = named
    _check_devices(function, named)
    for name, x in named.items():
        _check_axes(function, name, x, _AXES[name[0]])
    for ours, theirs in ((v, v_other), (s, s_other)):
        for axis in range(rank(named[ours])):
            words = f"{ours}.size({axis}) and {theirs}.size({axis}) mismatch; "
            _check_size(function, ("a.size(i)", "b.size(i)"), named, (ours, theirs), axis, words)
    for axis, name in ((0, s), (1, heads_of)):
        _check_size(function, (f"{v}.size({axis})", f"{name}.size({axis})"), named, (v, name), axis)
    _check_values(function, v, named[v])


def check_many(function: str, v: Any, s: Any) -> None:
    """Many states, along the second axis of ``v`` and ``s``."""
    for name, x in (("v", v), ("s", s)):
        if not hasattr(x, "shape"):
            raise TypeError(f"{function}: {name} must be an array with axes, got {type(x).__name__}")
    if rank(v) != 4:
        few = f"not enough values to unpack (expected 4, got {rank(v)})"
        words = few if rank(v) < 4 else "too many values to unpack (expected 4)"
        raise ShimError(f"{function}: {words}; {_axes_wanted('v', v, _MANY_AXES['v'])}")
    named = {"v": v, "s": s}
    _check_devices(function, named)
    _check_axes(function, "s", s, _MANY_AXES["s"])
    for axis in range(3):
        _check_size(function, (f"v.size({axis})", f"s.size({axis})"), named, ("v", "s"), axis)
    _check_values(function, "v", v)


def check_mask(function: str, v: Any, mask: Any) -> None:
    """One number for each row of ``v``."""
    if rank(mask) != 1:
        words = f"Check failed: mask.value().ndim() == 1 ({rank(mask)} vs. 1) : mask.value() must be a 1D tensor"
        raise ShimError(f"{function}: {words}; {_axes_wanted('mask', mask, ('seq_len',))}")
    _check_size(function, ("v.size(0)", "mask.value().size(0)"), {"v": v, "mask": mask}, ("v", "mask"), 0)
    ours, theirs = getattr(v, "device", None), getattr(mask, "device", None)
    if ours != theirs:
        words = "Check failed: mask.value().device().device_type == v.device().device_type"
        raise ShimError(f"{function}: {words}; mask must be on {ours}, as v is, got one on {theirs}")


def check_repeats(function: str, name: str, x: Any) -> None:
    """What is written does not repeat elements; FlashInfer's tensors are contiguous."""
    strides = x.stride() if hasattr(x, "is_cuda") else x.strides
    if any(stride == 0 and extent > 1 for stride, extent in zip(strides, x.shape, strict=True)):
        raise ShimError(
            f"{function}: {name} must be contiguous, or at least not repeat elements, as it is written, got strides "
            f"{tuple(strides)}"
        )


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") or hasattr(x, "__dlpack__")


def _check_devices(function: str, named: dict[str, Any]) -> None:
    """For tensors of torch; a place that others do not have, the merge refuses."""
    places = {name: x.device for name, x in named.items() if hasattr(x, "is_cuda")}
    if len(set(places.values())) <= 1:
        return
    first = next(iter(places))
    others = [name for name, place in places.items() if place.type != "cuda"]
    if len(others) in (0, len(places)):  # CUDA devices alone, or none
        others = [name for name, place in places.items() if place != places[first]]
    name = others[0]
    words = f"{name} must be a CUDA tensor, or all of a call on one other device"
    if places[name].type == "cuda":
        indices = f"({places[name].index} vs. {places[first].index})"
        words = f"Check failed: {name}.device().device_id == {first}.device().device_id {indices}"
    raise ShimError(f"{function}: {words}; got {', '.join(f'{name} on {place}' for name, place in places.items())}")


def _check_axes(function: str, name: str, x: Any, axes: tuple[str, ...]) -> None:
    n = len(axes)
    if rank(x) != n:
        words = f"Check failed: {name}.ndim() == {n} ({rank(x)} vs. {n}) : {name} must be a {n}D tensor"
        raise ShimError(f"{function}: {words}; {_axes_wanted(name, x, axes)}")


def _axes_wanted(name: str, x: Any, axes: tuple[str, ...]) -> str:
    noun = "dimension" if len(axes) == 1 else "dimensions"
    return f"{name} must have {len(axes)} {noun} ({', '.join(axes)}), got {rank(x)}: {tuple(x.shape)}"


def _check_size(
    function: str, texts: tuple[str, str], named: dict[str, Any], pair: tuple[str, str], axis: int, words: str = ""
) -> None:
    """Two arrays are as long along ``axis``; ``texts`` are how FlashInfer writes these sizes."""
    ours, theirs = (tuple(named[name].shape) for name in pair)
    if ours[axis] != theirs[axis]:
        wanted = f"{pair[1]} must have shape {ours[: len(theirs)]} as {pair[0]} has {ours}, got {theirs}"
        failed = f"Check failed: {texts[0]} == {texts[1]} ({ours[axis]} vs. {theirs[axis]})"
        raise ShimError(f"{function}: {failed} : {words}{wanted}")


def _check_values(function: str, name: str, v: Any) -> None:
    """The type and the head dim of results."""
    dtype = str(v.dtype).removeprefix("torch.")
    if dtype not in _TYPES:
        raise ShimTypeError(
            f"{function}: failed to dispatch data type; {name} must be float16, bfloat16 or float32, got {dtype}"
        )
    if v.shape[-1] == 0:
        raise ShimError(
            f"{function}: Unsupported head_dim: 0; {name} must have a head_dim of 1 or more, got {tuple(v.shape)}"
        )
