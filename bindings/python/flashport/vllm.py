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
            host memory.
        NotImplementedError: ``fp8_out_scale``; another ``kv_cache_dtype``; a tensor that asks for a gradient while
            torch records them; and as :func:`flashport.flash_decode`.

    Source:
        bindings/python/flashport/vllm.py over that function; the signature is vLLM's, from vllm/_custom_ops.py, and
        what it does with ``query_start_loc`` that of csrc/rocm/attention.cu.
    """
    refuse_gradients(_NAME, "out query key_cache value_cache", out, query, key_cache, value_cache)
    if fp8_out_scale is not None:
        raise NotImplementedError(
            f"{_NAME}: fp8_out_scale must be None, since outputs have the type of query; quantise out afterwards"
        )
    if mfma_type not in ("f16", "fp8"):
        raise ValueError(f'{_NAME}: mfma_type must be "f16" or "fp8", got {mfma_type!r}')
    arrays = {
        "query": query, "out": out, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, "query_start_loc": query_start_loc,
    }  # fmt: skip
    _check_kinds(arrays)
    _check_shapes(arrays, _integer("num_kv_heads", num_kv_heads), _integer("block_size", block_size))
    fp8 = _fp8_type(query, key_cache, value_cache, kv_cache_dtype)
    longest = _integer("max_seq_len", max_seq_len)
    for name, value, least in (("max_seq_len", longest, 0), ("block_size", block_size, 1)):
        if value < least:
            raise ValueError(f"{_NAME}: {name} must be {least} or more, got {value}")
    if scale is None:
        raise TypeError(f"{_NAME}: scale must be a number, got None")
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
        raise reworded(error, f"{_NAME}: ", _OF_DECODE) from None
    if query_start_loc is not None:
        _put_back(out, result, query_start_loc)


def _check_kinds(arrays: dict[str, Any]) -> None:
    """Arrays are of one library and on one device, and indices are integers."""
    query = arrays["query"]
    library = caller_library(query)
    if library is None:
        raise TypeError(f"{_NAME}: query must be an array of torch, NumPy or CuPy, got {type(query).__name__}")
    for name, x in arrays.items():
        if x is None and name == "query_start_loc":
            continue
        if caller_library(x) is not library:
            raise TypeError(
                f"{_NAME}: {name} must be an array of {library.__name__}, as query is, got {type(x).__name__}"
            )
        device, ours = getattr(x, "device", None), getattr(query, "device", None)
        if device != ours:
            raise ValueError(f"{_NAME}: {name} must be on {ours}, as query is, got one on {device}")
        if name in ("block_tables", "seq_lens", "query_start_loc") and x.dtype not in (library.int32, library.int64):
            raise TypeError(f"{_NAME}: {name} must be int32 or int64, got {_type_name(x)}")
    if arrays["out"].dtype != query.dtype:
        raise TypeError(f"{_NAME}: out must be {_type_name(query)}, as query is, got {_type_name(arrays['out'])}")


def _check_shapes(arrays: dict[str, Any], num_kv_heads: int, block_size: int) -> None:
    axes = {
        "query": "(tokens, num_heads, head_size)",
        "key_cache": "(blocks, num_kv_heads, head_size / x, block_size, x)",
        "block_tables": "(sequences, max_blocks)",
    }
    for name, text in axes.items():
        dimensions = text.count(",") + 1
        if rank(arrays[name]) != dimensions:
            got = f"{rank(arrays[name])}: {_shape(arrays[name])}"
            raise ValueError(f"{_NAME}: {name} must have {dimensions} dimensions {text}, got {got}")
    rows, heads, head_size = _shape(arrays["query"])
    blocks, kv_heads, groups, tokens, x = _shape(arrays["key_cache"])
    sequences = _shape(arrays["block_tables"])[0]
    if (num_kv_heads, block_size) != (kv_heads, tokens):
        name, given, own = (
            ("num_kv_heads", num_kv_heads, kv_heads) if num_kv_heads != kv_heads else ("block_size", block_size, tokens)
        )
        raise ValueError(f"{_NAME}: {name} must be {own} as key_cache has {_shape(arrays['key_cache'])}, got {given}")
    if groups * x != head_size:
        raise ValueError(
            f"{_NAME}: key_cache must have head_size / x times x of query's head_size, {head_size}, got {groups} times "
            f"{x}: {_shape(arrays['key_cache'])}"
        )
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
            f'{_NAME}: kv_cache_dtype must be "auto", "fp8" or "fp8_e4m3", got {kv_cache_dtype!r}'
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
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{_NAME}: {name} must be an integer, got {type(value).__name__}")
    return operator.index(value)


def _is_on_host(x: Any) -> bool:
    return not (x.is_cuda if hasattr(x, "is_cuda") else hasattr(x, "device") and hasattr(x.device, "id"))


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _type_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")
