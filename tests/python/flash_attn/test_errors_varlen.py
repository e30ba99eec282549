"""Calls of packed sequences with wrong arguments raise flash-attn's errors, in its words, and write nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32, offsets  # noqa: E402
from flash_attn_errors import (  # noqa: E402
    DIM,
    DIVIDE,
    GENERATOR,
    KEY,
    KIND,
    LAST,
    MULTIPLE,
    NO_SCALE,
    OPTIONS,
    RETURNS,
    SIDES,
    TYPE,
    VALUE,
    WINDOWS,
    apart,
    cases,
    expect_refusal,
    expect_refusal_elsewhere,
    numbers_aside,
    tensor,
)
from flashport.flash_attn import _checks as checks  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402

Q = "q must have shape (total_q, num_heads, head_size)"
K = "k must have shape (total_k, num_heads_k, head_size)"
V = "v must have shape (total_k, num_heads_k, head_size)"
ROWS = [
    *OPTIONS,
    *WINDOWS,
    *SIDES,
    *RETURNS,
    ({"q": tensor(8, 4, 32, dtype=torch.float64)}, TYPE),
    ({"k": tensor(14, 2, 32, dtype=torch.bfloat16)}, KEY),
    ({"v": tensor(14, 2, 32, dtype=torch.bfloat16)}, VALUE),
    ({"q": tensor(1, 8, 4, 32)}, Q),
    ({"q": tensor(8, 128)}, Q, IndexError),
    ({"k": tensor(1, 14, 2, 32)}, K),
    ({"k": tensor(14, 2, 40)}, K),
    ({"v": tensor(13, 2, 32)}, V),
    ({"v": tensor(14, 1, 32)}, V),
    ({"v": tensor(14, 64)}, V, IndexError),
    ({"k": tensor(14, 3, 32), "v": tensor(14, 3, 32)}, DIVIDE),
    ({"k": tensor(14, 0, 32), "v": tensor(14, 0, 32)}, DIVIDE),
    ({name: tensor(14, 4, 520) for name in "qkv"}, DIM),
    ({"cu_seqlens_q": offsets([5, 3]).long()}, "cu_seqlens_q must have dtype int32"),
    ({"cu_seqlens_k": offsets([9, 5]).long()}, "cu_seqlens_k must have dtype int32"),
    ({"cu_seqlens_k": offsets([9, 5]).float()}, "cu_seqlens_k must have dtype int32"),
    ({"cu_seqlens_q": int32(0, 9, 5, 9, 8, 9)[::2]}, "cu_seqlens_q must be contiguous"),
    ({"cu_seqlens_k": int32(0, 9, 9, 9, 14, 9)[::2]}, "cu_seqlens_k must be contiguous"),
    ({"cu_seqlens_q": offsets([5, 3])[None]}, "cu_seqlens_q must have shape (batch_size + 1)"),
    ({"cu_seqlens_k": offsets([9, 5, 0])}, "cu_seqlens_k must have shape (batch_size + 1)"),
    ({"cu_seqlens_k": offsets([9])}, "cu_seqlens_k must have shape (batch_size + 1)"),
    ({"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}, "batch size must be positive"),
    ({"cu_seqlens_q": int32(0, 5, 3)}, "cu_seqlens_q"),
    ({"cu_seqlens_q": int32(0, 5, 9)}, "cu_seqlens_q"),
    ({"cu_seqlens_k": int32(0, 9, 15)}, "cu_seqlens_k"),
    ({"q": None}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"k": None}, f"{KIND}: k must be a torch.Tensor, got NoneType", TypeError),
    ({"v": 1}, f"{KIND}: v must be a torch.Tensor, got int", TypeError),
    ({"cu_seqlens_q": [0, 5, 8]}, f"{KIND}: cu_seqlens_q must be a torch.Tensor, got list", TypeError),
    ({"cu_seqlens_k": [0, 5, 8]}, f"{KIND}: cu_seqlens_k must be a torch.Tensor, got list", TypeError),
    ({"max_seqlen_q": "a"}, f"{KIND}: max_seqlen_q must be an integer, got str", TypeError),
    ({"max_seqlen_q": 5.0}, f"{KIND}: max_seqlen_q must be an integer, got float", TypeError),
    ({"max_seqlen_k": None}, f"{KIND}: max_seqlen_k must be an integer, got NoneType", TypeError),
    ({"max_seqlen_k": 1 << 40}, f"{KIND}: max_seqlen_k must be an integer of 32 bits, got 1099511627776", TypeError),
    ({"zero_tensors": "n"}, f"{KIND}: zero_tensors must be a bool, got str", TypeError),
]  # fmt: skip


# Calls with pages: k and v have them.
PAGES = "must have shape (num_blocks, page_block_size, num_heads_k, head_size)"
TABLE = "block_table must have shape (batch_size, max_num_blocks_per_seq)"
PAGED = [
    ({"block_table": int32(0, 1, 2, 3).reshape(2, 2).long()}, "block_table must have dtype torch.int32"),
    ({"block_table": int32(0, 1, 2, 3)}, TABLE, IndexError),
    ({"block_table": int32(0, 1, 2).reshape(3, 1)}, TABLE),
    ({"block_table": [[0, 1], [2, 3]]}, f"{KIND}: block_table must be a torch.Tensor, got list", TypeError),
    ({"block_table": int32(*range(8)).reshape(2, 4)[:, ::2]}, "block_table must have contiguous last dimension"),
    ({"block_table": int32(0, 1).reshape(2, 1)}, "max(seqlens_k) (= 9) exceeds the capacity addressable"),
    ({"block_table": int32(0, 9, 2, 3).reshape(2, 2)}, "block_table must have page numbers from 0 to 3"),
    ({"k": tensor(32, 2, 32)}, f"k {PAGES}", IndexError),
    ({"k": tensor(4, 8, 2, 40)}, f"k {PAGES}"),
    ({"v": tensor(4, 7, 2, 32)}, f"v {PAGES}"),
    ({"v": tensor(3, 8, 2, 32)}, f"v {PAGES}"),
    ({"q": tensor(8, 3, 32)}, DIVIDE),
]  # fmt: skip
# Calls with the options of servers, with pages.
SERVERS = [
    ({"num_splits": 2}, "num_splits > 1 is not supported for varlen paged KV"),
    ({"num_splits": None}, f"{KIND}: num_splits must be an integer, got NoneType", TypeError),
    ({"num_splits": 0.5}, f"{KIND}: num_splits must be an integer, got float", TypeError),
    ({"leftpad_k": int32(0, 1)}, "We don't support Paged KV and leftpad_k running at the same time yet"),
    ({"seqused_k": int32(1, 2).long()}, "seqused_k must have dtype int32"),
    ({"seqused_k": int32(1, 2, 3, 4)[::2]}, "seqused_k must be contiguous"),
    ({"seqused_k": int32(1, 2, 3)}, "seqused_k must have shape (batch_size)"),
    ({"seqused_k": int32(1, 17)}, "max(seqlens_k) (= 17) exceeds the capacity addressable by block_table"),
]
# The same, without pages.
LEFTPAD = [
    ({"leftpad_k": int32(0, 1).long()}, "leftpad_k must have dtype int32"),
    ({"leftpad_k": int32(0, 1, 2, 3)[::2]}, "leftpad_k must be contiguous"),
    ({"leftpad_k": int32(0, 1, 2)}, "leftpad_k must have shape (batch_size)"),
    ({"leftpad_k": 1}, f"{KIND}: leftpad_k must be a torch.Tensor, got int", TypeError),
    ({"seqused_k": int32(1, 2).long()}, "seqused_k must have dtype int32"),
    ({"seqused_k": int32(1, 2, 3)}, "seqused_k must have shape (batch_size)"),
]
COMPILED = [
    ({"gen": torch.Generator()}, GENERATOR, TypeError),
    ({"gen": torch.ones(1)}, GENERATOR),
    ({"q": tensor(8, 4, 30), "k": tensor(14, 2, 30), "v": tensor(14, 2, 30)}, MULTIPLE),
    ({"q": apart(8, 4, 32)}, LAST),
    ({"k": apart(14, 2, 32)}, LAST),
    ({"v": apart(14, 2, 32)}, LAST),
    ({"out": tensor(8, 4, 32, dtype=torch.float32)}, "Output must have the same dtype as inputs"),
    ({"out": tensor(9, 4, 32)}, "out must have shape (sizes[0], sizes[1], head_size)"),
    ({"out": tensor(8, 4, 40)}, "out must have shape (sizes[0], sizes[1], head_size)"),
    ({"out": apart(8, 4, 32)}, "Output tensor must have contiguous last dimension"),
    ({"return_softmax": True}, "return_softmax is only supported when p_dropout > 0.0"),
]
PAGED_COMPILED = [({"return_softmax": True, "dropout_p": 0.5}, "S_dmask is made of packed keys alone")]

OWN = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
CHOICES = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "return_attn_probs"}
SERVED = {"seqused_k", "leftpad_k", "num_splits", "zero_tensors", "window_size_left", "window_size_right"}
SERVED.add("return_softmax")


def right(changed):
    """Wrong arguments of flash_attn_varlen_func."""
    base = {
        "q": tensor(8, 4, 32), "k": tensor(14, 2, 32), "v": tensor(14, 2, 32), "cu_seqlens_q": offsets([5, 3]),
        "cu_seqlens_k": offsets([9, 5]), "max_seqlen_q": 5, "max_seqlen_k": 9,
    }  # fmt: skip
    return base | changed if changed.keys() <= OWN | CHOICES | {"block_table"} else None


def packed_keys(changed):
    """Wrong arguments of flash_attn_varlen_kvpacked_func."""
    arguments = right(changed)
    return arguments and stacked(arguments, "kv")


def packed_projection(changed):
    """Of flash_attn_varlen_qkvpacked_func, which has one set of offsets and one maximum."""
    if not changed.keys() <= {*CHOICES, *"qkv"}:
        return None
    arguments = stacked(right({name: tensor(14, 4, 32) for name in "qkv"} | changed), "qkv")
    if arguments is None:
        return None
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        del arguments[name]
    return arguments | {"cu_seqlens": offsets([9, 5]), "max_seqlen": 9}


def stacked(arguments, names):
    """With these in one tensor; None where they cannot be."""
    parts = [arguments.pop(name) for name in names]
    if not all(isinstance(x, torch.Tensor) for x in parts) or len({(x.shape, x.dtype) for x in parts}) > 1:
        return None
    return arguments | {names: torch.stack(parts, -3)}


def private(changed):
    """Wrong arguments of _flash_attn_varlen_forward."""
    served = {name: changed[name] for name in SERVED & changed.keys()}
    arguments = right({name: x for name, x in changed.items() if name not in served})
    if arguments is None or changed.keys() & {"window_size", "return_attn_probs"}:
        return None
    return {"dropout_p": 0.0, "softmax_scale": 0.1, "causal": True} | arguments | served


def low(changed):
    """Wrong arguments of flash_attn_2_cuda.varlen_fwd."""
    own = {name: changed[name] for name in ("out", "gen") if name in changed}
    arguments = private({name: x for name, x in changed.items() if name not in own})
    if arguments is None:
        return None
    base = {
        "out": tensor(8, 4, 32), "seqused_k": None, "leftpad_k": None, "block_table": None, "alibi_slopes": None,
        "zero_tensors": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "return_softmax": False, "gen": None,
    }  # fmt: skip
    arguments = base | arguments | own
    return arguments | {"p_dropout": arguments.pop("dropout_p"), "is_causal": arguments.pop("causal")}


def with_pages(make):
    """The same over pages of 8."""
    pages = {"k": tensor(4, 8, 2, 32), "v": tensor(4, 8, 2, 32), "block_table": int32(0, 1, 2, 3).reshape(2, 2)}
    return lambda changed: make(pages | changed)


FUNCTIONS = [
    (flash_attn.flash_attn_varlen_func, right),
    (flash_attn.flash_attn_varlen_kvpacked_func, packed_keys),
    (flash_attn.flash_attn_varlen_qkvpacked_func, packed_projection),
    (interface._flash_attn_varlen_forward, private),
    (compiled.varlen_fwd, low),
]
PAGING = [(function, with_pages(make)) for function, make in (FUNCTIONS[0], *FUNCTIONS[3:])]


@pytest.mark.parametrize(("function", "make"), [*FUNCTIONS, *PAGING])
def test_right_arguments_are_right(function, make):
    result = function(**make({}))
    assert (result[0] if isinstance(result, list | tuple) else result).isfinite().all()


OPERATOR = [(torch.ops.flash_attn._flash_attn_varlen_forward, private)]
ALL = [*cases(FUNCTIONS, ROWS), *cases(FUNCTIONS[3:], NO_SCALE), *cases(OPERATOR, numbers_aside(ROWS))]


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ALL)
def test_wrong_arguments(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), cases(PAGING, [*OPTIONS, *PAGED]))
def test_wrong_arguments_with_pages(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


SERVING = [*cases(PAGING[1:], SERVERS), *cases(FUNCTIONS[3:], LEFTPAD), *cases(FUNCTIONS[4:], COMPILED)]
SERVING += cases(PAGING[2:], PAGED_COMPILED)


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), SERVING)
def test_wrong_options_of_servers(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize("name", ["k", "v", "alibi_slopes", "out", "cu_seqlens_q", "cu_seqlens_k", "leftpad_k"])
def test_tensors_elsewhere(name):
    changed = {"alibi_slopes": torch.rand(4), "leftpad_k": int32(0, 1)}
    expect_refusal_elsewhere(compiled.varlen_fwd, low(changed), name)


@pytest.mark.parametrize("name", ["block_table", "seqused_k"])
def test_tensors_of_pages_elsewhere(name):
    expect_refusal_elsewhere(compiled.varlen_fwd, with_pages(low)({"seqused_k": int32(9, 5)}), name)


def test_too_many_splits_of_single_queries():
    run = interface._flash_attn_varlen_forward
    arguments = private({"q": tensor(2, 4, 32), "cu_seqlens_q": offsets([1, 1]), "max_seqlen_q": 1})
    assert run(**arguments, num_splits=128)[0].shape == (2, 4, 32)
    expect_refusal(run, arguments | {"num_splits": 129}, "num_splits > 128 not supported")


@pytest.mark.parametrize("shape", [(14, 1, 4, 32), (14, 3, 4, 32), (14, 4, 32)])
def test_wrong_packed_keys(shape):
    arguments = packed_keys({}) | {"kv": tensor(*shape)}
    words = "kv must have shape (total_k, 2, num_heads_k, head_size)"
    expect_refusal(flash_attn.flash_attn_varlen_kvpacked_func, arguments, words, IndexError)


@pytest.mark.parametrize("shape", [(14, 2, 4, 32), (14, 3, 32)])
def test_wrong_packed_projections(shape):
    arguments = packed_projection({}) | {"qkv": tensor(*shape)}
    words = "qkv must have shape (total, 3, num_heads, head_size)"
    expect_refusal(flash_attn.flash_attn_varlen_qkvpacked_func, arguments, words, IndexError)


WRONG_OFFSETS = [
    ({"cu_seqlens": offsets([9, 5]).long()}, "cu_seqlens_q must have dtype int32"),
    ({"cu_seqlens": int32(0, 9, 9, 9, 14, 9)[::2]}, "cu_seqlens_q must be contiguous"),
    ({"cu_seqlens": int32(0)}, "batch size must be positive"),
    ({"cu_seqlens": int32(0, 9, 15)}, "cu_seqlens_q"),
]


@pytest.mark.parametrize(("changed", "words"), WRONG_OFFSETS)
def test_wrong_offsets_of_packed_projections(changed, words):
    expect_refusal(flash_attn.flash_attn_varlen_qkvpacked_func, packed_projection({}) | changed, words)


@pytest.mark.parametrize(("setting", "looks"), [(None, False), ("0", False), ("1", True)])
def test_lengths_of_a_gpu_are_looked_at_on_demand(monkeypatch, setting, looks):
    """flash-attn waits for the GPU to refuse an over-long length; here a call does so with FLASHPORT_CHECK=1 alone."""
    monkeypatch.delenv("FLASHPORT_CHECK", raising=False)
    if setting is not None:
        monkeypatch.setenv("FLASHPORT_CHECK", setting)
    assert checks.reads_contents(torch.empty(1, device="meta")) == looks  # meta stands for a GPU
    assert checks.reads_contents(torch.empty(1))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(name):
    for function, make in (FUNCTIONS[0], *FUNCTIONS[3:]):
        arguments = make({})
        arguments[name].requires_grad_()
        expect_refusal(function, arguments, f"{name} requires a gradient", NotImplementedError)
    qkv = tensor(9, 3, 4, 32).requires_grad_()
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_qkvpacked_func: qkv requires a gradient"):
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets([9]), 9)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_kvpacked_func: kv requires a gradient"):
        flash_attn.flash_attn_varlen_kvpacked_func(tensor(9, 4, 32), qkv[:, :2], *[offsets([9])] * 2, 9, 9)
