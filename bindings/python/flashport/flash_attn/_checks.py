"""What flash-attn 2.8.4 refuses, in its words, before anything is written.

Its words stand after the name of our function and before what came, with its names of arguments (kcache, seqlens_k) and
its letters of shapes (batch_size, head_size_og, sizes[1]), as its callers match them. It takes CUDA tensors alone; here
all tensors of a call lie on one device, whichever that is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from flashport import _core
from flashport.torch import tracing

MAX_HEAD_DIM = 512
MAX_SPLITS = 128
_INT_LIMIT = 1 << 31  # of what flash-attn's compiled half counts in
TYPES = (torch.float16, torch.bfloat16)
_ROTARY = "seqlen_ro, params.rotary_dim / 2"
NO_BACKWARD = "there is no backward yet; run the model under torch.no_grad()"
GENERATOR = (
    "flash-attn: the RNG `generator` argument is no longer supported and must be None; dropout (when enabled) uses the "
    "default CUDA generator."
)


class FlashAttnError(ValueError, RuntimeError):
    """A wrong argument: flash-attn raises RuntimeError for it, and this package ValueError."""


class FlashAttnAssertionError(FlashAttnError, AssertionError):
    """A wrong argument for which flash-attn raises AssertionError."""


class FlashAttnIndexError(FlashAttnError, IndexError):
    """A tensor with too few or too many axes, or an index outside of its tensor: flash-attn raises IndexError."""


class FlashAttnTypeError(FlashAttnError, TypeError):
    """What is no tensor or no number, for which flash-attn's compiled half raises TypeError."""


_MOST_FORMS = 4096
_passed: set[Any] = set()  # forms of calls


def form_of(function: str, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
    """What checks of shapes, types, places and numbers look at: calls of one form pass them, or not, alike.

    None while torch traces, whose sizes are no numbers, and where a tensor stands for a number.
    """
    if tracing.is_compiling():
        return None
    for x in numbers:
        if isinstance(x, torch.Tensor):
            return None
    form: Any = _core.tensors_form(tensors)
    if form is None:  # tensors of a torch without DLPack's exchange API, or what is no tensor
        form = tuple([(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in tensors])
    return function, form, tuple([(type(x), x) for x in numbers])


def check_written(function: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """What a call writes by a copy shares no memory with its other tensors, nor with itself."""
    if tracing.is_compiling():
        return
    for name, x in written.items():
        if x is not None and any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True)):
            raise FlashAttnError(f"{function}: {name} must not share memory with itself, got strides {x.stride()}")
    try:
        _core.check_apart(function, written, read)
    except ValueError as error:
        raise FlashAttnError(str(error)) from error


def check_once(form: Any, check: Callable[..., None], *arguments: Any) -> None:
    """Calls ``check``, unless it has passed for a call of this form before."""
    try:
        if form is not None and form in _passed:
            return
    except TypeError:  # what has no hash is checked
        form = None
    check(*arguments)
    if form is None:
        return
    if len(_passed) >= _MOST_FORMS:
        _passed.clear()
    _passed.add(form)


def check_tensors(function: str, q: Any, *others: tuple[str, Any, str], types: tuple[Any, ...] = TYPES) -> None:
    """All have one served type, one device, a unit last stride; ``others`` are (name, tensor, what types must be)."""
    dtype, device = q.dtype, q.device
    if dtype not in types and not (dtype == torch.float32 and device.type == "cpu"):
        words = "support fp16 and bf16" if types is TYPES else "supports fp16, bf16, and fp8_e4m3"
        raise FlashAttnError(
            f"{function}: FlashAttention only {words} data type, and here fp32 on the CPU, got {dtype}"
        )
    for name, x, words in others:
        if x.dtype != dtype:
            raise FlashAttnError(f"{function}: {words}, got {dtype} and {x.dtype}")
        if x.device != device:
            check_device(function, q, name, x)
        if x.stride(-1) != 1:
            raise _apart(function, name, x)
    if q.stride(-1) != 1:
        raise _apart(function, "q", q)


def _apart(function: str, name: str, x: Any) -> FlashAttnError:
    return FlashAttnError(
        f"{function}: Input tensor must have contiguous last dimension, got {name} with strides {x.stride()}"
    )


def check_device(function: str, q: Any, name: str, x: Any) -> None:
    """``x`` lies on q's device."""
    if x.device != q.device:
        wrong, place, device = ("q", q.device, x.device) if x.is_cuda else (name, x.device, q.device)
        raise FlashAttnError(
            f"{function}: {wrong} must be on CUDA device, or all tensors of a call on one other; {wrong} is on {place} "
            f"and another is on {device}"
        )


def check_shape(function: str, name: str, x: Any, shape: tuple[int, ...], words: str) -> None:
    """``words`` are the letters of ``shape``."""
    if x.shape != shape:
        raise FlashAttnError(f"{function}: {name} must have shape ({words}), here {tuple(shape)}, got {tuple(x.shape)}")


def check_rank(function: str, name: str, x: Any, words: str) -> None:
    """``x`` is a tensor with as many axes as ``words`` has letters."""
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(function, name, x)
    if x.ndim != words.count(",") + 1:
        raise FlashAttnIndexError(f"{function}: {name} must have shape ({words}), got {tuple(x.shape)}")


def not_a_tensor(function: str, name: str, x: Any) -> FlashAttnTypeError:
    """For what should be one."""
    return FlashAttnTypeError(
        f"{function}: incompatible function arguments: {name} must be a torch.Tensor, got {type(x).__name__}"
    )


def check_batch(function: str, batch: int) -> None:
    """One sequence or more; FlashAttention-3 alone takes a call of none."""
    if batch <= 0:
        raise FlashAttnError(f"{function}: batch size must be positive, got {batch}")


def check_heads(function: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Sizes that no shape says."""
    if head_dim > MAX_HEAD_DIM:
        raise FlashAttnError(
            f"{function}: FlashAttention forward only supports head dimension at most {MAX_HEAD_DIM}, got {head_dim}"
        )
    if kv_heads == 0 or heads % kv_heads != 0:
        raise FlashAttnError(
            f"{function}: Number of heads in key/value must divide number of heads in query, got {kv_heads} and {heads}"
        )


def check_multiple_of_8(function: str, q: Any) -> None:
    """What the compiled half of flash-attn asks for, and its functions in Python pad to."""
    if isinstance(q, torch.Tensor) and q.ndim and q.shape[-1] % 8 != 0:
        raise FlashAttnError(
            f"{function}: query, key, value, and out_ must have a head_size that is a multiple of 8, got {q.shape[-1]}"
        )


def to_int(function: str, name: str, x: Any) -> int:
    """``x`` as pybind11 gives it to an int of flash-attn's compiled half; torch's operators take the same.

    What has __index__ or __int__ is one, such as a tensor of one element, but a float is none.
    """
    number: int = x
    if type(x) is not int:
        if isinstance(x, float) or not (hasattr(type(x), "__index__") or hasattr(type(x), "__int__")):
            raise _wrong_kind(function, name, "an integer", x)
        try:
            number = int(x)
        except Exception:  # whatever the object raises
            raise _wrong_kind(function, name, "an integer", x) from None
    if not -_INT_LIMIT <= number < _INT_LIMIT:
        raise FlashAttnTypeError(
            f"{function}: incompatible function arguments: {name} must be an integer of 32 bits, got {number}"
        )
    return number


def equal_lengths(function: str, batch: int, length: int, device: Any) -> Any:
    """``cache_seqlens`` as a tensor, where a number is every sequence's."""
    length = to_int(function, "cache_seqlens", length)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def to_float(function: str, name: str, x: Any) -> float:
    """The same for a float: what has __float__ or __index__."""
    if type(x) is float:
        return x
    if not (hasattr(type(x), "__float__") or hasattr(type(x), "__index__")):
        raise _wrong_kind(function, name, "a number", x)
    try:
        return float(x)
    except Exception:
        raise _wrong_kind(function, name, "a number", x) from None


def to_bool(function: str, name: str, x: Any) -> bool:
    """The same for a bool: what has __bool__, such as any number, and None, which is False; a str is none."""
    if type(x) is bool:
        return x
    if x is None:
        return False
    if not hasattr(type(x), "__bool__"):
        raise _wrong_kind(function, name, "a bool", x)
    try:
        return bool(x)
    except Exception:
        raise _wrong_kind(function, name, "a bool", x) from None


def _wrong_kind(function: str, name: str, kind: str, x: Any) -> FlashAttnTypeError:
    return FlashAttnTypeError(
        f"{function}: incompatible function arguments: {name} must be {kind}, got {type(x).__name__}"
    )


def check_dropout(function: str, dropout_p: float, softcap: float, return_softmax: bool = False) -> None:
    """A probability from 0 on below 1, and not with a softcap."""
    if not 0 <= dropout_p < 1:
        raise FlashAttnError(
            f"{function}: Expected p_dropout < 1.f to be true, but got false: p_dropout must be from 0 on below 1, got "
            f"{dropout_p}"
        )
    if dropout_p != 0 and softcap > 0:
        raise FlashAttnError(f"{function}: Softcapping does not support dropout for now, got {softcap} and {dropout_p}")
    if return_softmax and dropout_p <= 0:
        raise FlashAttnError(f"{function}: return_softmax is only supported when p_dropout > 0.0, got {dropout_p}")


def check_out(function: str, q: Any, out: Any, shape: tuple[int, ...], words: str) -> None:
    """An output that the caller gave."""
    if out.dtype != q.dtype:
        raise FlashAttnError(f"{function}: Output must have the same dtype as inputs, got {out.dtype} and {q.dtype}")
    check_device(function, q, "out", out)
    if out.stride(-1) != 1:
        raise FlashAttnError(
            f"{function}: Output tensor must have contiguous last dimension, got strides {out.stride()}"
        )
    check_shape(function, "out", out, shape, words)


def check_alibi(function: str, q: Any, slopes: Any, batch: int, heads: int) -> None:
    """(num_heads) or (batch_size, num_heads) in fp32."""
    if not isinstance(slopes, torch.Tensor):
        raise not_a_tensor(function, "alibi_slopes", slopes)
    if slopes.dtype != torch.float32:
        raise FlashAttnError(f"{function}: ALiBi slopes must have dtype fp32, got {slopes.dtype}")
    check_device(function, q, "alibi_slopes", slopes)
    if slopes.ndim and slopes.stride(-1) != 1:
        raise FlashAttnError(
            f"{function}: ALiBi slopes tensor must have contiguous last dimension, got strides {slopes.stride()}"
        )
    if slopes.shape not in ((heads,), (batch, heads)):
        raise FlashAttnError(
            f"{function}: Expected alibi_slopes.sizes() == torch::IntArrayRef({{num_heads}}) || "
            "alibi_slopes.sizes() == torch::IntArrayRef({batch_size, num_heads}) to be true, but got false: they must "
            f"be ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}"
        )


def check_integers(
    function: str, q: Any, name: str, x: Any, shape: tuple[int, ...], words: str, dtype: str = "int32"
) -> None:
    """Lengths, offsets or indices in int32, which flash-attn calls ``dtype``."""
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(function, name, x)
    if x.dtype != torch.int32:
        raise FlashAttnError(f"{function}: {name} must have dtype {dtype}, got {x.dtype}")
    check_device(function, q, name, x)
    if not x.is_contiguous():
        raise FlashAttnError(f"{function}: {name} must be contiguous, got strides {x.stride()}")
    check_shape(function, name, x, shape, words)


def check_block_table(
    function: str,
    q: Any,
    table: Any,
    batch: int,
    name: str = "block_table",
    words: str = "batch_size, max_num_blocks_per_seq",
) -> None:
    """[batch, pages] in int32."""
    check_rank(function, name, table, words)
    if table.dtype != torch.int32:
        raise FlashAttnError(f"{function}: {name} must have dtype torch.int32, got {table.dtype}")
    check_device(function, q, name, table)
    if table.stride(-1) != 1:
        raise FlashAttnError(f"{function}: {name} must have contiguous last dimension, got strides {table.stride()}")
    if table.shape[0] != batch:
        raise FlashAttnError(
            f"{function}: {name} must have shape ({words}), here ({batch}, ...), got {tuple(table.shape)}"
        )


def check_rotary(function: str, q: Any, k: Any, cos: Any, sin: Any, kv_len: int) -> None:
    """cos and sin [seqlen_ro, rotary_dim / 2]."""
    if k is None:
        raise FlashAttnError(
            f"{function}: If rotary cos/sin are provided, new key / value to be appended to KV cache must also be "
            "provided"
        )
    if sin is None:
        raise FlashAttnError(f"{function}: If rotary cos is provided, rotary sin must also be provided")
    check_rank(function, "rotary_cos", cos, _ROTARY)
    rotary_dim = cos.shape[1] * 2
    if rotary_dim > q.shape[-1]:
        raise FlashAttnError(f"{function}: rotary_dim must be <= headdim, got {rotary_dim} and {q.shape[-1]}")
    if rotary_dim % 16 != 0:
        raise FlashAttnError(
            f"{function}: Only rotary dimensions divisible by 16 are currently supported, got {rotary_dim}"
        )
    if cos.shape[0] < kv_len:
        raise FlashAttnError(
            f"{function}: cos/sin seqlen must be at least the seqlen of KV cache, got {cos.shape[0]} and {kv_len}"
        )
    for name, x, names in (("rotary_cos", cos, "rotary_cos"), ("rotary_sin", sin, "rotary_sin as rotary_cos")):
        check_rank(function, name, x, _ROTARY)
        check_device(function, q, name, x)
        check_shape(function, name, x, tuple(cos.shape), _ROTARY)
        if not x.is_contiguous():
            raise FlashAttnError(f"{function}: {name} must be contiguous, got strides {x.stride()}")
        if x.dtype != q.dtype:
            raise FlashAttnError(f"{function}: {names} must have the same dtype as query, got {x.dtype} and {q.dtype}")


def check_splits(function: str, num_splits: int, most: int = MAX_SPLITS) -> None:
    """At most as many as flash-attn combines."""
    if num_splits > most:
        raise FlashAttnError(f"{function}: num_splits > {most} not supported, got {num_splits}")


def check_leftpad(function: str, q: Any, leftpad_k: Any, paged: bool, name: str, batch: int) -> None:
    """Keys that do not exist, of each sequence; ``name`` is the caller's argument."""
    if leftpad_k is None:
        return
    if paged:
        raise FlashAttnError(
            f"{function}: We don't support Paged KV and leftpad_k running at the same time yet; pass one of "
            f"block_table and {name}"
        )
    check_integers(function, q, "leftpad_k", leftpad_k, (batch,), "batch_size")


def window_of(function: str, window_size: Any) -> tuple[int, int]:
    """(left, right), integers of what may be tensors."""
    words = "incompatible function arguments: window_size must be two integers, got"
    try:
        if len(window_size) != 2:
            raise FlashAttnIndexError(f"{function}: {words} {window_size!r}")
        left, right = window_size[0], window_size[1]
    except TypeError:
        raise FlashAttnTypeError(f"{function}: {words} {window_size!r}") from None
    return to_int(function, "window_size[0]", left), to_int(function, "window_size[1]", right)


def window_of_sides(function: str, left: Any, right: Any) -> tuple[int, int]:
    """The same of two arguments."""
    return to_int(function, "window_size_left", left), to_int(function, "window_size_right", right)


def reads_contents(q: Any) -> bool:
    """Whether a call may look at lengths and tables: those of a GPU only under FLASHPORT_CHECK=1, which waits."""
    if torch.compiler.is_compiling():
        return False
    return q.device.type == "cpu" or os.environ.get("FLASHPORT_CHECK", "0") not in ("", "0")


def check_paged_lengths(
    function: str, lengths: Any, table: Any, pages: int, page_size: int, words: str, name: str = "block_table"
) -> None:
    """Lengths fit into the table ``name``, and entries of it are pages. ``words`` say what ``lengths`` are."""
    longest, capacity = int(lengths.max()), table.shape[1] * page_size
    if longest > capacity:
        raise FlashAttnError(
            f"{function}: Paged KV cache: {words} (= {longest}) exceeds the capacity addressable by {name} "
            f"(max_num_blocks_per_seq * page_block_size = {capacity}). Allocate more columns in {name}"
        )
    blocks = torch.arange(table.shape[1], device=table.device)
    used = table[blocks < -(-lengths[:, None] // page_size)]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < pages:
        raise FlashAttnError(
            f"{function}: {name} must have page numbers from 0 to {pages - 1}, got {int(used.min())} to "
            f"{int(used.max())}"
        )
