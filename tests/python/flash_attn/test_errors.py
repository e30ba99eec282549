"""Dense calls with wrong arguments raise flash-attn's errors, in its words, and write nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
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
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402

Q = "q must have shape (batch_size, seqlen_q, num_heads, head_size)"
K = "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"
V = "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)"
ROWS = [
    *OPTIONS,
    *WINDOWS,
    *SIDES,
    *RETURNS,
    ({"q": tensor(2, 5, 4, 32, dtype=torch.float64)}, TYPE),
    ({"q": tensor(2, 5, 4, 32).to(torch.float8_e4m3fn)}, TYPE),
    ({"k": tensor(2, 9, 2, 32, dtype=torch.bfloat16)}, KEY),
    ({"v": tensor(2, 9, 2, 32, dtype=torch.float32)}, VALUE),
    ({"q": tensor(5, 4, 32)}, Q, IndexError),
    ({"q": tensor(1, 2, 5, 4, 32)}, Q),
    ({"k": tensor(9, 2, 32)}, K, IndexError),
    ({"v": tensor(9, 2, 32)}, V, IndexError),
    ({"k": tensor(3, 9, 2, 32), "v": tensor(3, 9, 2, 32)}, K),
    ({"k": tensor(2, 9, 2, 40), "v": tensor(2, 9, 2, 40)}, K),
    ({"k": tensor(2, 9, 2, 40)}, K),
    ({"v": tensor(2, 8, 2, 32)}, V),
    ({"v": tensor(2, 9, 1, 32)}, V),
    ({"v": tensor(2, 9, 2, 40)}, V),
    ({"q": tensor(0, 5, 4, 32), "k": tensor(0, 9, 2, 32), "v": tensor(0, 9, 2, 32)}, "batch size must be positive"),
    ({name: tensor(0, 9, 4, 32) for name in "qkv"}, "batch size must be positive"),
    ({"k": tensor(2, 9, 3, 32), "v": tensor(2, 9, 3, 32)}, DIVIDE),
    ({"k": tensor(2, 9, 8, 32), "v": tensor(2, 9, 8, 32)}, DIVIDE),
    ({"k": tensor(2, 9, 0, 32), "v": tensor(2, 9, 0, 32)}, DIVIDE),
    ({name: tensor(2, 9, 4, 520) for name in "qkv"}, DIM),
    ({name: tensor(2, 9, 4, 32, dtype=torch.float64) for name in "qkv"}, TYPE),
    ({"q": None}, f"{KIND}: q must be a torch.Tensor, got NoneType", TypeError),
    ({"k": None}, f"{KIND}: k must be a torch.Tensor, got NoneType", TypeError),
    ({"v": [1.0]}, f"{KIND}: v must be a torch.Tensor, got list", TypeError),
]  # fmt: skip


# The compiled half alone refuses these: flash-attn's functions in Python pad head dims, copy rows that lie apart and
# have no out.
COMPILED = [
    ({"gen": torch.Generator()}, GENERATOR, TypeError),
    ({"gen": torch.ones(1)}, GENERATOR),
    ({"q": tensor(2, 5, 4, 30), "k": tensor(2, 9, 2, 30), "v": tensor(2, 9, 2, 30)}, MULTIPLE),
    ({"q": apart(2, 5, 4, 32)}, LAST),
    ({"k": apart(2, 9, 2, 32)}, LAST),
    ({"v": apart(2, 9, 2, 32)}, LAST),
    ({"out": tensor(2, 5, 4, 32, dtype=torch.float32)}, "Output must have the same dtype as inputs"),
    ({"out": tensor(2, 5, 4, 32, dtype=torch.bfloat16)}, "Output must have the same dtype as inputs"),
    ({"out": tensor(2, 4, 4, 32)}, "out must have shape (batch_size, sizes[1], sizes[2], head_size)"),
    ({"out": tensor(2, 5, 2, 32)}, "out must have shape (batch_size, sizes[1], sizes[2], head_size)"),
    ({"out": tensor(5, 4, 32)}, "out must have shape (batch_size, sizes[1], sizes[2], head_size)"),
    ({"out": apart(2, 5, 4, 32)}, "Output tensor must have contiguous last dimension"),
    ({"return_softmax": True}, "return_softmax is only supported when p_dropout > 0.0"),
]


def right(changed):
    """Wrong arguments of flash_attn_func."""
    known = {*"qkv", "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"}
    known.add("return_attn_probs")
    base = {"q": tensor(2, 5, 4, 32), "k": tensor(2, 9, 2, 32), "v": tensor(2, 9, 2, 32)}
    return base | changed if changed.keys() <= known else None


def packed_keys(changed):
    """Wrong arguments of flash_attn_kvpacked_func."""
    arguments = right(changed)
    return arguments and stacked(arguments, "kv", -3)


def packed_projection(changed):
    """Wrong arguments of flash_attn_qkvpacked_func."""
    arguments = right({name: tensor(2, 9, 4, 32) for name in "qkv"} | changed)
    return arguments and stacked(arguments, "qkv", -3)


def stacked(arguments, names, axis):
    """With these in one tensor; None where they cannot be."""
    parts = [arguments.pop(name) for name in names]
    if not all(isinstance(x, torch.Tensor) for x in parts) or len({(x.shape, x.dtype) for x in parts}) > 1:
        return None
    return arguments | {names: torch.stack(parts, axis)}


def private(changed):
    """Wrong arguments of _flash_attn_forward."""
    if changed.keys() & {"window_size", "return_attn_probs"}:
        return None
    own = {"window_size_left": -1, "window_size_right": -1, "return_softmax": False}
    others = {name: x for name, x in changed.items() if name not in own}
    arguments = right(
        {"dropout_p": 0.0, "softmax_scale": 0.1, "causal": True, "softcap": 0.0, "alibi_slopes": None} | others
    )
    return arguments and arguments | {name: changed.get(name, x) for name, x in own.items()}


def low(changed):
    """Wrong arguments of flash_attn_2_cuda.fwd."""
    own = {name: changed[name] for name in ("out", "gen") if name in changed}
    arguments = private({name: x for name, x in changed.items() if name not in own})
    if arguments is None:
        return None
    arguments = {"out": tensor(2, 5, 4, 32), "gen": None} | arguments | own
    return arguments | {"p_dropout": arguments.pop("dropout_p"), "is_causal": arguments.pop("causal")}


FUNCTIONS = [
    (flash_attn.flash_attn_func, right),
    (flash_attn.flash_attn_kvpacked_func, packed_keys),
    (flash_attn.flash_attn_qkvpacked_func, packed_projection),
    (interface._flash_attn_forward, private),
    (compiled.fwd, low),
]


@pytest.mark.parametrize(("function", "make"), FUNCTIONS)
def test_right_arguments_are_right(function, make):
    result = function(**make({}))
    assert (result[0] if isinstance(result, list | tuple) else result).isfinite().all()


OPERATOR = [(torch.ops.flash_attn._flash_attn_forward, private)]
ALL = [*cases(FUNCTIONS, ROWS), *cases(FUNCTIONS[3:], NO_SCALE), *cases(OPERATOR, numbers_aside(ROWS))]


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), ALL)
def test_wrong_arguments(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize(("function", "arguments", "words", "kind"), cases([(compiled.fwd, low)], COMPILED))
def test_wrong_arguments_of_the_compiled_half(function, arguments, words, kind):
    expect_refusal(function, dict(arguments), words, kind)


@pytest.mark.parametrize("name", ["k", "v", "alibi_slopes", "out"])
def test_tensors_elsewhere(name):
    expect_refusal_elsewhere(compiled.fwd, low({"alibi_slopes": torch.rand(4)}), name)
    if name != "out":
        expect_refusal_elsewhere(flash_attn.flash_attn_func, right({"alibi_slopes": torch.rand(4)}), name)


PACKED = [
    (flash_attn.flash_attn_kvpacked_func, "kv", (2, 9, 1, 2, 32), "batch_size, seqlen_k, 2, num_heads_k, head_size"),
    (flash_attn.flash_attn_kvpacked_func, "kv", (2, 9, 3, 2, 32), "batch_size, seqlen_k, 2, num_heads_k, head_size"),
    (flash_attn.flash_attn_kvpacked_func, "kv", (2, 9, 2, 32), "batch_size, seqlen_k, 2, num_heads_k, head_size"),
    (flash_attn.flash_attn_qkvpacked_func, "qkv", (2, 9, 2, 4, 32), "batch_size, seqlen, 3, num_heads, head_size"),
    (flash_attn.flash_attn_qkvpacked_func, "qkv", (2, 9, 3, 32), "batch_size, seqlen, 3, num_heads, head_size"),
]


@pytest.mark.parametrize(("function", "name", "shape", "words"), PACKED)
def test_wrong_packed_tensors(function, name, shape, words):
    arguments = {name: tensor(*shape)} | ({"q": tensor(2, 5, 4, 32)} if name == "kv" else {})
    expect_refusal(function, arguments, f"{name} must have shape ({words})", IndexError)
    expect_refusal(function, arguments | {name: None}, f"{KIND}: {name} must be a torch.Tensor", TypeError)


def test_an_output_over_an_input():
    arguments = low({})
    arguments["out"] = arguments["q"]
    before = arguments["q"].clone()
    with pytest.raises(RuntimeError, match=r"^fwd: .*out"):
        compiled.fwd(**arguments)
    assert torch.equal(arguments["q"], before)


def test_blocks_of_head_dims_that_no_kernel_has():
    with pytest.raises(AssertionError, match=r"^_get_block_size_n: head_dim must be at most 512, got 520"):
        interface._get_block_size_n("cpu", 520, False, False)
    assert interface._get_block_size_n("cpu", 512, False, False) >= 1 << 30


class TestBackward:
    """There is none: a call that needs a gradient says so, and under no_grad there is no need."""

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    @pytest.mark.parametrize(("function", "make"), [FUNCTIONS[0], *FUNCTIONS[3:]])
    def test_gradients_are_refused(self, function, make, name):
        arguments = make({})
        arguments[name].requires_grad_()
        expect_refusal(function, arguments, f"{name} requires a gradient", NotImplementedError)
        with torch.no_grad():
            result = function(**arguments)
        assert not (result[0] if isinstance(result, list | tuple) else result).requires_grad

    def test_packed(self):
        qkv = tensor(2, 9, 3, 4, 32).requires_grad_()
        with pytest.raises(NotImplementedError, match="flash_attn_qkvpacked_func: qkv requires a gradient"):
            flash_attn.flash_attn_qkvpacked_func(qkv)
        with pytest.raises(NotImplementedError, match="flash_attn_kvpacked_func: kv requires a gradient"):
            flash_attn.flash_attn_kvpacked_func(tensor(2, 9, 4, 32), qkv[:, :, :2])

    def test_the_compiled_half(self):
        x, none = tensor(1, 1, 2, 8), None
        dense = (x, x, x, x, x, x, none, none, none, none, 0.0, 0.1, True, -1, -1, 0.0, False)
        varlen = (*dense[:9], none, none, none, 1, 1, 0.0, 0.1, False, True, -1, -1, 0.0, False)
        for function, arguments in ((compiled.bwd, dense), (compiled.varlen_bwd, varlen)):
            with pytest.raises(NotImplementedError, match=f"{function.__name__}: there is no backward yet"):
                function(*arguments, none, none)
            with pytest.raises(RuntimeError, match=GENERATOR) as raised:
                function(*arguments, torch.Generator(), none)
            assert isinstance(raised.value, ValueError)
        backward = (*dense[:9], 0.0, 0.1, True, -1, -1, 0.0, none, False)
        varlen_backward = (*dense[:9], none, none, 1, 1, *backward[9:])
        for function, arguments in (
            (interface._flash_attn_backward, backward),
            (interface._flash_attn_varlen_backward, varlen_backward),
        ):
            with pytest.raises(NotImplementedError, match=f"{function.__name__}: there is no backward yet"):
                function(*arguments)
