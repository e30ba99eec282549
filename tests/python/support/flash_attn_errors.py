"""What the suites of wrong arguments of flash_attn share: tensors that are wrong, and what a refusal has to be."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from flash_attn_call import random_tensors  # noqa: E402

HALF = torch.float16
PLACES = ["meta", "cuda"] if torch.cuda.is_available() else ["meta"]  # where a tensor of a call on the CPU is wrong
WRITTEN = ("out", "k_cache", "v_cache", "kcache", "vcache")

LAST = "Input tensor must have contiguous last dimension"
DIVIDE = "Number of heads in key/value must divide number of heads in query"
GENERATOR = "the RNG `generator` argument is no longer supported and must be None"
MULTIPLE = "query, key, value, and out_ must have a head_size that is a multiple of 8"
TYPE = "FlashAttention only support fp16 and bf16 data type"
DIM = "FlashAttention forward only supports head dimension at most 512"
KEY, VALUE = "query and key must have the same dtype", "query and value must have the same dtype"
KIND = "incompatible function arguments"
SIZES = (
    "Expected alibi_slopes.sizes() == torch::IntArrayRef({num_heads}) || alibi_slopes.sizes() == "
    "torch::IntArrayRef({batch_size, num_heads}) to be true, but got false"
)


def tensor(*shape, dtype=HALF):
    """A random one."""
    return random_tensors(0, shape, dtype=dtype)[0]


def apart(*shape, dtype=HALF):
    """A tensor whose last axis is not contiguous."""
    return tensor(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


# Rows of all tables: what differs from a right call, flash-attn's words, and its class where that is not RuntimeError.
# These go with every function of flash-attn for 2 sequences and 4 heads.
OPTIONS = [
    ({"dropout_p": 1.0}, "Expected p_dropout < 1.f to be true, but got false"),
    ({"dropout_p": -0.5}, "p_dropout must be from 0 on below 1, got -0.5"),
    ({"dropout_p": float("nan")}, "Expected p_dropout < 1.f to be true, but got false"),
    ({"dropout_p": "a"}, f"{KIND}: dropout_p must be a number, got str", TypeError),
    ({"dropout_p": 0.1, "softcap": 3.0}, "Softcapping does not support dropout for now"),
    ({"softcap": None}, f"{KIND}: softcap must be a number, got NoneType", TypeError),
    ({"alibi_slopes": tensor(4)}, "ALiBi slopes must have dtype fp32"),
    ({"alibi_slopes": torch.rand(8)[::2]}, "ALiBi slopes tensor must have contiguous last dimension"),
    ({"alibi_slopes": 0.5}, f"{KIND}: alibi_slopes must be a torch.Tensor, got float", TypeError),
    ({"alibi_slopes": torch.rand(3)}, SIZES),
    ({"alibi_slopes": torch.rand(1, 4)}, SIZES),
    ({"alibi_slopes": torch.rand(2, 3)}, SIZES),
    ({"alibi_slopes": torch.rand(2, 4, 1)}, SIZES),
    ({"alibi_slopes": torch.tensor(0.5)}, SIZES),
    ({"softmax_scale": float("nan")}, "softmax_scale"),
    ({"softmax_scale": "a"}, f"{KIND}: softmax_scale must be a number, got str", TypeError),
    ({"softmax_scale": "0.1"}, f"{KIND}: softmax_scale must be a number, got str", TypeError),
    ({"softmax_scale": torch.rand(2)}, f"{KIND}: softmax_scale must be a number, got Tensor", TypeError),
    ({"dropout_p": "0.5"}, f"{KIND}: dropout_p must be a number, got str", TypeError),
    ({"dropout_p": 1j}, f"{KIND}: dropout_p must be a number, got complex", TypeError),
    ({"softcap": [1.0]}, f"{KIND}: softcap must be a number, got list", TypeError),
    ({"softcap": 10**400}, f"{KIND}: softcap must be a number, got int", TypeError),
    ({"causal": "no"}, f"{KIND}: causal must be a bool, got str", TypeError),
    ({"causal": ""}, f"{KIND}: causal must be a bool, got str", TypeError),
    ({"causal": [False]}, f"{KIND}: causal must be a bool, got list", TypeError),
    ({"causal": object()}, f"{KIND}: causal must be a bool, got object", TypeError),
    ({"causal": torch.ones(2)}, f"{KIND}: causal must be a bool, got Tensor", TypeError),
]
# These go with functions that have a window of two numbers, or two arguments for it, or no default for the scale, or
# that return more on demand.
WINDOWS = [
    ({"window_size": (1.5, 2.7)}, f"{KIND}: window_size[0] must be an integer, got float", TypeError),
    ({"window_size": (3, 4.0)}, f"{KIND}: window_size[1] must be an integer, got float", TypeError),
    ({"window_size": ("3", "4")}, f"{KIND}: window_size[0] must be an integer, got str", TypeError),
    ({"window_size": "34"}, f"{KIND}: window_size[0] must be an integer, got str", TypeError),
    ({"window_size": (None, 4)}, f"{KIND}: window_size[0] must be an integer, got NoneType", TypeError),
    ({"window_size": (3, torch.ones(2))}, f"{KIND}: window_size[1] must be an integer, got Tensor", TypeError),
    ({"window_size": (1 << 31, 4)}, f"{KIND}: window_size[0] must be an integer of 32 bits, got 2147483648", TypeError),
    ({"window_size": None}, f"{KIND}: window_size must be two integers, got None", TypeError),
    ({"window_size": 4}, f"{KIND}: window_size must be two integers, got 4", TypeError),
    ({"window_size": {3, 4}}, f"{KIND}: window_size must be two integers, got {{3, 4}}", TypeError),
    ({"window_size": (1,)}, f"{KIND}: window_size must be two integers, got (1,)", IndexError),
    ({"window_size": (1, 2, 3)}, f"{KIND}: window_size must be two integers, got (1, 2, 3)", IndexError),
]
SIDES = [
    ({"window_size_left": None}, f"{KIND}: window_size_left must be an integer, got NoneType", TypeError),
    ({"window_size_left": 1.5}, f"{KIND}: window_size_left must be an integer, got float", TypeError),
    ({"window_size_right": "3"}, f"{KIND}: window_size_right must be an integer, got str", TypeError),
    ({"window_size_right": -(1 << 40)}, f"{KIND}: window_size_right must be an integer of 32 bits, got -", TypeError),
]
NO_SCALE = [({"softmax_scale": None}, f"{KIND}: softmax_scale must be a number, got NoneType", TypeError)]
RETURNS = [
    ({"return_attn_probs": ""}, f"{KIND}: return_softmax must be a bool, got str", TypeError),
    ({"return_attn_probs": []}, f"{KIND}: return_softmax must be a bool, got list", TypeError),
    ({"return_softmax": ""}, f"{KIND}: return_softmax must be a bool, got str", TypeError),
    ({"return_softmax": "no"}, f"{KIND}: return_softmax must be a bool, got str", TypeError),
]


def bits(x):
    """A copy of what memory holds."""
    return x.reshape(-1).contiguous().view(torch.uint8).clone()


def expect_refusal(function, arguments, words, kind=RuntimeError):
    """The call fails so, and leaves each bit of its tensors; those that it would write hold poison, NaN among it."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type != "meta"}
    for name in tensors.keys() & set(WRITTEN):
        x = tensors[name]
        x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).random_()
    before = {name: bits(x) for name, x in tensors.items()}
    with pytest.raises(kind, match=re.escape(words)) as raised:
        function(**arguments)
    assert str(raised.value).startswith(f"{function.__name__}: ")
    if kind is not NotImplementedError:
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, RuntimeError)
    for name, x in tensors.items():
        assert torch.equal(bits(x), before[name]), name


def expect_refusal_elsewhere(function, arguments, name):
    """A call on the CPU takes no tensor of another device."""
    for place in PLACES:
        moved = arguments | {name: torch.empty_like(arguments[name], device=place)}
        expect_refusal(function, moved, f"{'q' if place == 'cuda' else name} must be on CUDA")


def numbers_aside(rows):
    """Without those of numbers that are none, for operators of torch, whose schemas refuse them in torch's words."""
    return [row for row in rows if row[2:] != (TypeError,)]


def cases(functions, rows):
    """Parameters of a test: each function with each row that it has the arguments for.

    ``functions`` are (function, what makes its arguments of the table's, or gives None where it cannot).
    """
    found = []
    for function, make in functions:
        for number, (changed, *expected) in enumerate(rows):
            if (arguments := make(changed)) is not None:
                name = f"{function.__name__}-{number}-{'-'.join(changed)}"
                found.append(pytest.param(function, arguments, *expected[:1], (*expected, RuntimeError)[1], id=name))
    return found
