"""vLLM's paged attention for ROCm, under its name, signature and cache layout.

vLLM calls it for decoding: ``vllm._custom_ops.paged_attention_rocm``, over ``torch.ops._rocm_C.paged_attention``.
"""

from __future__ import annotations

import importlib
import math
import operator
from typing import Any

from flashport import _core, decode
from flashport._rewording import REFUSALS, reworded
from flashport._shim_errors import ShimError, ShimIndexError, ShimTypeError
from flashport.arrays import caller_library, new_array, rank
from flashport.torch.gradients import refuse_gradients
from flashport.typing import SupportsDLPack

__all__ = ["paged_attention_rocm"]

_NAME = "paged_attention_rocm"
_OF_DECODE = {
    "q": "query",
    "softmax_scale": "scale",
    "seqlens": "seq_lens",
    "k_cache": "key_cache",
    "v_cache": "value_cache",
}
_BLOCK_SIZES = (16, 32)  # what vLLM's kernels are compiled for; it refuses others, and some are wrong here
_HEAD_SIZES = (64, 128)
_GQA_RATIOS = range(1, 17)
_INT_TYPES = ("int32", "int64")
_TORCH_NAMES = {  # of types in torch's errors, where it names one of C++ and where it names one of its own
    "bool": ("bool", "Bool"), "int8": ("signed char", "Char"), "int16": ("short int", "Short"),
    "int32": ("int", "Int"), "int64": ("long int", "Long"), "uint8": ("unsigned char", "Byte"),
    "uint16": ("short unsigned int", "UInt16"), "uint32": ("unsigned int", "UInt32"),
    "uint64": ("long unsigned int", "UInt64"), "float16": ("c10::Half", "Half"),
    "bfloat16": ("c10::BFloat16", "BFloat16"), "float32": ("float", "Float"), "float64": ("double", "Double"),
}  # fmt: skip
_NO_STORAGE = "Cannot access data pointer of Tensor that doesn't have storage"
_OF_NONE = {  # what torch says of a tensor that is None, where vLLM first looks at it
    "out": _NO_STORAGE,
    "query": "Dimension out of range (expected to be in range of [-1, 0], but got 2)",
    "key_cache": "strides() called on an undefined Tensor",
    "value_cache": _NO_STORAGE,
    "block_tables": "Dimension out of range (expected to be in range of [-1, 0], but got 1)",
    "seq_lens": "expected scalar type Int but found UNKNOWN_SCALAR",
}
_AXES = {"query": (2,), "key_cache": (0, 1), "block_tables": (0, 1)}  # that vLLM asks for


def paged_attention_rocm(
    out: SupportsDLPack,
    exp_sum: SupportsDLPack | None,
    max_logits: SupportsDLPack | None,
    tmp_out: SupportsDLPack | None,
    query: SupportsDLPack,
    key_cache: SupportsDLPack,
    value_cache: SupportsDLPack,
    num_kv_heads: int,
    scale: float,
    block_tables: SupportsDLPack,
    seq_lens: SupportsDLPack,
    query_start_loc: SupportsDLPack | None,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: SupportsDLPack | None,
    kv_cache_dtype: str,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    fp8_out_scale: SupportsDLPack | None = None,
    mfma_type: str = "f16",
) -> None:
    """:func:`flashport.flash_decode` of one new token a request over vLLM's caches of ROCm.

    Kernels read rows of one token, which that layout does not have: elements of a key lie in groups of x, and those of
    a value each in a block's row of their own. So the call first copies the blocks that ``block_tables`` names up to
    ``max_seq_len``, and no others, to new arrays, and reads these: pass the batch's own maximum, not the model's. The
    device is never waited for.

    Arrays are all of torch, or all of NumPy or CuPy. Any block_size and head dims are served that
    :func:`flashport.flash_decode` serves, and any GQA ratio.

    Args:
        out: As ``query``; written.
        exp_sum, max_logits, tmp_out: Scratch of vLLM's; neither read nor written.
        query: (tokens, num_heads, head_size) fp16 or bf16, fp32 on the CPU; a token of each sequence, or as
            ``query_start_loc`` says.
        key_cache: (blocks, num_kv_heads, head_size / x, block_size, x), vLLM's x being 16 bytes; of ``query``'s type,
            or for fp8 uint8 or a float8 e4m3 type.
        value_cache: (blocks, num_kv_heads, head_size, block_size), as ``key_cache``.
        num_kv_heads: That of the caches.
        scale: Factor on the scores.
        block_tables: (sequences, max_blocks) int32, blocks of each sequence. Entries past its length may be anything.
        seq_lens: (sequences) int32 or int64, keys of each sequence, its new token among them; 0 gives 0.
        query_start_loc: (sequences + 1) int32, first row of each sequence in ``query``. Rows of sequences that have not
            just one are those of prompts, for another kernel: they are not written.
        block_size: That of the caches.
        max_seq_len: No sequence is longer; on a GPU a length beyond the last block that it needs counts as that block's
            end.
        alibi_slopes: (num_heads) fp32.
        kv_cache_dtype: "auto", for caches of ``query``'s type; "fp8" or "fp8_e4m3". uint8 then is the type of vLLM on
            this device: e4m3fnuz on gfx94x, e4m3fn elsewhere.
        k_scale, v_scale: (1) fp32, or without axes: what stored keys and values are multiplied by. Read with fp8 alone.
        fp8_out_scale: Must be None.
        mfma_type: "f16" or "fp8": what vLLM's kernel multiplies in. These kernels have their own choice.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.flash_decode`; nothing has been written. Also a
            length beyond the table or ``max_seq_len`` and an entry of the table that is no block, where these are in
            host memory. Where vLLM or torch's dispatcher refuses it too, the error is also a RuntimeError and begins
            with their words.
        IndexError: As well, for ``query``, ``key_cache`` or ``block_tables`` that has too few axes or is None.
        NotImplementedError: ``fp8_out_scale``; another ``kv_cache_dtype``; a tensor that asks for a gradient while
            torch records them; and as :func:`flashport.flash_decode`.

    Source:
        bindings/python/flashport/vllm.py over that function; the signature is vLLM's, from vllm/_custom_ops.py, and
        what it does with ``query_start_loc`` that of csrc/rocm/attention.cu.
    """
    refuse_gradients(_NAME, "out query key_cache value_cache", out, query, key_cache, value_cache)
    arrays = {
        "query": query, "out": out, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, "query_start_loc": query_start_loc,
    }  # fmt: skip
    others = {
        "exp_sum": exp_sum, "max_logits": max_logits, "tmp_out": tmp_out, "alibi_slopes": alibi_slopes,
        "k_scale": k_scale, "v_scale": v_scale, "fp8_out_scale": fp8_out_scale,
    }  # fmt: skip
    _check_schema(arrays | others, scale, {"kv_cache_dtype": kv_cache_dtype, "mfma_type": mfma_type})
    num_kv_heads, block_size = _integer("num_kv_heads", num_kv_heads), _integer("block_size", block_size)
    longest = _integer("max_seq_len", max_seq_len)
    if fp8_out_scale is not None:
        raise NotImplementedError(
            f"{_NAME}: fp8 out scale unsupported: fp8_out_scale must be None, since outputs have the type of query; "
            "quantise out afterwards"
        )
    if mfma_type not in ("f16", "fp8"):
        raise ValueError(f'{_NAME}: mfma_type must be "f16" or "fp8", got {mfma_type!r}')
    _check_kinds(arrays)
    _check_shapes(arrays, num_kv_heads, block_size)
    fp8 = _fp8_type(query, key_cache, value_cache, kv_cache_dtype)
    if longest < 0:
        loops = _quotient(_quotient(longest + 255, 256) + 63, 64)  # vLLM's: of 64 partitions of 256 keys
        raise _unsupported("npar_loops", loops, False, f"max_seq_len must be 0 or more, got {longest}")
    if _is_on_host(query):
        _check_entries(block_tables, seq_lens, longest, block_size, _shape(key_cache)[0])
    options: dict[str, Any] = {"softmax_scale": scale, "alibi_slopes": alibi_slopes}
    if fp8 is not None:
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    # Kernels get copies of these, and so cannot say it.
    _core.check_apart(_NAME, {"out": out}, {name: x for name, x in arrays.items() if name != "out"})
    if query_start_loc is not None and _shape(query)[0] == 0:
        return  # sequences without rows
    blocks = -(-longest // block_size)
    pages = _pages(key_cache, value_cache, block_tables, blocks, fp8)
    rows: Any = query
    lens: Any = seq_lens
    result: Any = out
    if query_start_loc is not None:
        rows, lens = _decoding_rows(query, seq_lens, query_start_loc)
        result = new_array(_NAME, "query", rows, _shape(rows))
    try:
        decode.flash_decode(rows, seqlens=lens, **pages, **options, out=result)
    except REFUSALS as error:
        size = _shape(query)[2]
        is_unsupported = isinstance(error, NotImplementedError) and size not in _HEAD_SIZES
        words = f"Unsupported head size: {size}; " if is_unsupported else ""
        raise reworded(error, f"{_NAME}: {words}", _OF_DECODE) from None
    if query_start_loc is not None:
        _put_back(out, result, query_start_loc)


def _check_schema(tensors: dict[str, Any], scale: Any, texts: dict[str, Any]) -> None:
    """What torch's dispatcher looks at: tensors are arrays or None, the scale is a number, and texts are texts."""
    for name, x in tensors.items():
        if x is not None and not (hasattr(x, "__dlpack__") or caller_library(x)):
            raise _wrong_kind(name, x, "an array")
    if not (hasattr(scale, "__float__") or hasattr(scale, "__index__")) or math.prod(getattr(scale, "shape", ())) != 1:
        raise _wrong_kind("scale", scale, "a number")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise _wrong_kind(name, text, "a str")


def _wrong_kind(name: str, x: Any, wanted: str) -> ShimTypeError:
    """In the words of torch's dispatcher."""
    kinds = {
        "num_kv_heads": "int", "block_size": "int", "max_seq_len": "int", "scale": "float", "kv_cache_dtype": "str",
        "mfma_type": "str", "query_start_loc": "Optional[Tensor]", "alibi_slopes": "Optional[Tensor]",
        "fp8_out_scale": "Optional[Tensor]",
    }  # fmt: skip
    return ShimTypeError(
        f"{_NAME}: _rocm_C::paged_attention() Expected a value of type '{kinds.get(name, 'Tensor')}' for argument "
        f"'{'exp_sums' if name == 'exp_sum' else name}' but instead found type '{type(x).__name__}'. {name} must be "
        f"{wanted}"
    )


def _check_kinds(arrays: dict[str, Any]) -> None:
    """Arrays are of one library and on one device, and types are served."""
    for name, x in arrays.items():
        if x is None and name in _OF_NONE:
            error = ShimIndexError if _OF_NONE[name].startswith("Dimension") else ShimTypeError
            raise error(f"{_NAME}: {_OF_NONE[name]}; {name} must be an array of torch, NumPy or CuPy, got NoneType")
    query = arrays["query"]
    library = caller_library(query)
    if library is None:
        raise TypeError(f"{_NAME}: query must be an array of torch, NumPy or CuPy, got {type(query).__name__}")
    for name, x in arrays.items():
        if x is None:
            continue
        if caller_library(x) is not library:
            if library.__name__ == "torch":
                raise _wrong_kind(name, x, "a tensor, as query is")
            raise TypeError(
                f"{_NAME}: {name} must be an array of {library.__name__}, as query is, got {type(x).__name__}"
            )
        device, ours = getattr(x, "device", None), getattr(query, "device", None)
        if device != ours:
            raise ValueError(f"{_NAME}: {name} must be on {ours}, as query is, got one on {device}")
    served = ("float16", "bfloat16", "float32") if _is_on_host(query) else ("float16", "bfloat16")
    if _type_name(query) not in served:
        raise ShimTypeError(
            f"{_NAME}: Unsupported data type: {_torch_names(query)[0]}; query must be float16 or bfloat16, or float32 "
            f"on the CPU, got {_type_name(query)}"
        )
    for name in ("block_tables", "seq_lens"):
        if _type_name(arrays[name]) not in _INT_TYPES:
            raise ShimTypeError(
                f"{_NAME}: expected scalar type Int but found {_torch_names(arrays[name])[1]}; {name} must be int32 or "
                f"int64, got {_type_name(arrays[name])}"
            )
    starts = arrays["query_start_loc"]
    if starts is not None and _type_name(starts) not in _INT_TYPES:
        raise TypeError(f"{_NAME}: query_start_loc must be int32 or int64, got {_type_name(starts)}")
    if arrays["out"].dtype != query.dtype:
        raise TypeError(f"{_NAME}: out must be {_type_name(query)}, as query is, got {_type_name(arrays['out'])}")


def _torch_names(x: Any) -> tuple[str, str]:
    name = _type_name(x)
    return _TORCH_NAMES.get(name, (name, name))


def _check_axes(name: str, x: Any, text: str) -> None:
    dimensions = text.count(",") + 1
    if rank(x) == dimensions:
        return
    wanted = f"{name} must have {dimensions} dimensions {text}, got {rank(x)}: {_shape(x)}"
    for axis in _AXES[name]:
        if rank(x) == 0:
            raise ShimIndexError(f"{_NAME}: Dimension specified as {axis} but tensor has no dimensions; {wanted}")
        if axis >= rank(x):
            span = f"[{-rank(x)}, {rank(x) - 1}]"
            raise ShimIndexError(
                f"{_NAME}: Dimension out of range (expected to be in range of {span}, but got {axis}); {wanted}"
            )
    raise ValueError(f"{_NAME}: {wanted}")


def _check_shapes(arrays: dict[str, Any], num_kv_heads: int, block_size: int) -> None:
    _check_axes("query", arrays["query"], "(tokens, num_heads, head_size)")
    _check_axes("key_cache", arrays["key_cache"], "(blocks, num_kv_heads, head_size / x, block_size, x)")
    _check_axes("block_tables", arrays["block_tables"], "(sequences, max_blocks)")
    rows, heads, head_size = _shape(arrays["query"])
    key_shape = _shape(arrays["key_cache"])
    blocks, kv_heads, groups, tokens, x = key_shape
    sequences = _shape(arrays["block_tables"])[0]
    if head_size == 0:
        raise _unsupported("head size", 0, False, f"query must have a head_size of 1 or more, got {(rows, heads, 0)}")
    if groups * x != head_size:
        need = f"key_cache must have head_size / x times x of query's head_size, {head_size}, got "
        need += f"{groups} times {x}: {key_shape}"
        raise _unsupported("head size", head_size, head_size in _HEAD_SIZES, need)
    cache = f"as key_cache has {key_shape}"
    if block_size != tokens or tokens == 0:
        need = f"block_size must be {tokens or '1 or more'} {cache}, got {block_size}"
        raise _unsupported("block size", block_size, block_size in _BLOCK_SIZES, need)
    if num_kv_heads != kv_heads:
        need = f"num_kv_heads must be {kv_heads} {cache}, got {num_kv_heads}"
        ratio = _quotient(heads, num_kv_heads) if num_kv_heads else 0
        # vLLM compares num_heads / num_kv_heads alone with the ratios that it has, and dies of a division by zero.
        raise _unsupported("gqa ratio", ratio, num_kv_heads == 0 or ratio in _GQA_RATIOS, need)
    if kv_heads > 0 and heads % kv_heads != 0:
        ratio = heads // kv_heads
        need = f"num_heads of query must be a multiple of num_kv_heads, got {heads} and {kv_heads}"
        raise _unsupported("gqa ratio", ratio, ratio in _GQA_RATIOS, need)
    wanted = {
        "out": (rows, heads, head_size),
        "value_cache": (blocks, kv_heads, head_size, tokens),
        "seq_lens": (sequences,),
        "query_start_loc": (sequences + 1,),
    }
    for name, shape in wanted.items():
        if arrays[name] is not None and _shape(arrays[name]) != shape:
            raise ValueError(f"{_NAME}: {name} must have shape {shape}, got {_shape(arrays[name])}")
    if arrays["query_start_loc"] is None and rows != sequences:
        raise ValueError(
            f"{_NAME}: query must have a row for each of the {sequences} sequences where query_start_loc is None, got "
            f"{rows}"
        )


def _quotient(a: int, b: int) -> int:
    """Rounded towards zero, as C++ does."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _unsupported(what: str, value: int, is_vllms: bool, text: str) -> ValueError:
    """In vLLM's words and class, unless its kernels have this ``value``: it then checks nothing."""
    return ValueError(f"{_NAME}: {text}") if is_vllms else ShimError(f"{_NAME}: Unsupported {what}: {value}; {text}")


def _fp8_type(query: Any, key_cache: Any, value_cache: Any, kv_cache_dtype: str) -> Any:
    """The element type of what fp8 caches store; None of caches of the query's own."""
    caches = (("key_cache", key_cache), ("value_cache", value_cache))
    if kv_cache_dtype == "auto":
        for name, x in caches:
            if x.dtype != query.dtype:
                raise TypeError(
                    f'{_NAME}: {name} must be {_type_name(query)}, as query is, with kv_cache_dtype="auto", got '
                    f"{_type_name(x)}"
                )
        return None
    if kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise NotImplementedError(
            f'{_NAME}: Unsupported KV cache dtype: {kv_cache_dtype}; kv_cache_dtype must be "auto", "fp8" or "fp8_e4m3"'
        )
    library: Any = caller_library(query)
    if hasattr(query, "is_cuda"):
        types = (library.float8_e4m3fn, library.float8_e4m3fnuz)
        is_fnuz = query.is_cuda and library.version.hip and _architecture(library, query).startswith("gfx94")
    elif _is_on_host(query):
        ml_dtypes = importlib.import_module("ml_dtypes")
        types = tuple(map(library.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz)))
        is_fnuz = False
    else:
        raise NotImplementedError(f"{_NAME}: fp8 caches must be tensors of torch on a GPU: CuPy has no such type")
    for name, x in caches:
        if x.dtype not in (library.uint8, *types):
            raise TypeError(f"{_NAME}: {name} must be uint8 or float8 e4m3 for fp8, got {_type_name(x)}")
        if x.dtype != key_cache.dtype:
            raise TypeError(f"{_NAME}: {name} must be {_type_name(key_cache)}, as key_cache is, got {_type_name(x)}")
    return types[bool(is_fnuz)] if key_cache.dtype == library.uint8 else key_cache.dtype


def _architecture(torch: Any, query: Any) -> str:
    name: str = torch.cuda.get_device_properties(query.device).gcnArchName
    return name


def _check_entries(block_tables: Any, seq_lens: Any, longest: int, block_size: int, blocks: int) -> None:
    """What kernels must trust on a GPU: the lengths, and the entries of the table up to them."""
    library, width = caller_library(block_tables), _shape(block_tables)[1]
    room = min(longest, width * block_size)
    for i, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= room:
            raise ValueError(
                f"{_NAME}: seq_lens must be 0 to {room}, the least of max_seq_len and {width} blocks of {block_size}, "
                f"got {length} at {i}"
            )
    is_read = library.arange(width)[None] * block_size < seq_lens[:, None]
    wrong = is_read & ((block_tables < 0) | (block_tables >= blocks))
    if wrong.any():
        i, j = (int(x[0]) for x in (wrong.nonzero().T if hasattr(wrong, "is_cuda") else wrong.nonzero()))
        raise ValueError(
            f"{_NAME}: block_tables must name blocks below {blocks} up to a sequence's length, got "
            f"{int(block_tables[i, j])} at ({i}, {j})"
        )


def _pages(key_cache: Any, value_cache: Any, block_tables: Any, blocks: int, fp8: Any) -> dict[str, Any]:
    """The first ``blocks`` blocks of each sequence as flash_decode takes pages, copied.

    Entries past a length may be anything: they become some block, whose tokens are not read.
    """
    named = block_tables[:, : blocks if len(key_cache) else 0]
    shape = _shape(named)
    named = named.reshape(-1).clip(0, max(len(key_cache) - 1, 0))
    copies = []
    for cache in (key_cache, value_cache):
        view = cache if fp8 is None else cache.view(caller_library(cache).uint8)  # any type can be copied as bytes
        rows = _tokens_before_elements(view, named).reshape(len(named), *_page_shape(key_cache))
        copies.append(rows if fp8 is None else rows.view(fp8))
    library: Any = caller_library(block_tables)
    options = {"device": block_tables.device} if hasattr(block_tables, "is_cuda") else {}
    table = library.arange(math.prod(shape), dtype=library.int32, **options).reshape(shape)
    return {"k_cache": copies[0], "v_cache": copies[1], "block_table": table, "kv_layout": "HND"}


def _page_shape(key_cache: Any) -> tuple[int, int, int]:
    """Heads, tokens and elements of a block, in the order of a page."""
    _, heads, groups, tokens, x = _shape(key_cache)
    return heads, tokens, groups * x


def _tokens_before_elements(blocks: Any, named: Any) -> Any:
    """Copies of the ``named`` blocks (blocks, heads, elements, tokens[, x]), with tokens before elements."""
    library: Any = caller_library(blocks)
    if not hasattr(blocks, "is_cuda"):
        return library.ascontiguousarray(blocks[named].swapaxes(2, 3))
    has_groups = blocks.ndim == 5
    per_unit = 16 // blocks.element_size()
    units = blocks if has_groups else blocks.unflatten(3, (-1, per_unit)) if blocks.shape[3] % per_unit == 0 else None
    if units is not None and units.shape[-1] == per_unit and units.is_contiguous() and units.data_ptr() % 16 == 0:
        # 16 bytes are one number to torch: it copies keys in a third of the time, values in 0.65 to 0.95 (H200).
        units = units.view(library.complex128).squeeze(-1).transpose(2, 3)
        copy = library.index_select(units, 0, named).view(blocks.dtype).unflatten(-1, (-1, per_unit))
        return copy if has_groups else copy.transpose(3, 4).flatten(2, 3).contiguous()
    view = blocks.transpose(2, 3)
    return library.index_select(view, 0, named, out=view.new_empty((len(named), *view.shape[1:])))


def _decoding_rows(query: Any, seq_lens: Any, query_start_loc: Any) -> tuple[Any, Any]:
    """The first row of each sequence, and its length; 0 of one that has not just one row, whose result is not used."""
    first = query_start_loc[:-1].clip(0, max(len(query) - 1, 0))
    has_one = query_start_loc[1:] - query_start_loc[:-1] == 1
    first = first.long() if hasattr(first, "is_cuda") else first  # older torch indexes with nothing else
    rows = query[first] if len(query) else query[:0]
    return rows, (seq_lens * has_one)[: len(rows)]


def _put_back(out: Any, result: Any, query_start_loc: Any) -> None:
    """Writes the results of sequences with one row to these rows of ``out``."""
    if not len(out) or not len(result):
        return
    library, last = caller_library(out), len(result) - 1
    has_one = query_start_loc[1:] - query_start_loc[:-1] == 1
    if hasattr(out, "is_cuda"):
        rows = library.arange(len(out), device=out.device, dtype=query_start_loc.dtype)
        owner = library.searchsorted(query_start_loc, rows, right=True) - 1
    else:
        owner = library.searchsorted(query_start_loc, library.arange(len(out)), side="right") - 1
    nearest = owner.clip(0, last)
    is_ours = (has_one[nearest] & (owner == nearest))[:, None, None]  # rows before and after all are nobody's
    if hasattr(library, "copyto"):
        library.copyto(out, result[nearest], where=is_ours)
    else:
        out.copy_(library.where(is_ours, result[nearest], out))


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_kind(name, value, "an integer") from None


def _is_on_host(x: Any) -> bool:
    return not (x.is_cuda if hasattr(x, "is_cuda") else hasattr(x, "device") and hasattr(x.device, "id"))


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _type_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
