"""The classes FlashAttn*Func: their ``apply`` is the function of the same name, with all arguments by position."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32, offsets, random_tensors  # noqa: E402
from flash_attn_errors import apart  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402

LENGTHS = (offsets([20, 5]), offsets([15, 10]), 20, 15)
Q, KV, QKV = random_tensors(1, (25, 4, 32), (25, 2, 4, 32), (25, 3, 4, 32))
K, V = KV.unbind(1)
PAGES = torch.randn(8, 5, 2, 4, 32)
CASES = [  # class, function, tensors, and what stands between return_softmax and is_grad_enabled
    ("FlashAttnFunc", "flash_attn_func", tuple(x[None] for x in (Q, K, V)), ()),
    ("FlashAttnKVPackedFunc", "flash_attn_kvpacked_func", (Q[None], KV[None]), ()),
    ("FlashAttnQKVPackedFunc", "flash_attn_qkvpacked_func", (QKV[None],), ()),
    ("FlashAttnVarlenFunc", "flash_attn_varlen_func", (Q, K, V, *LENGTHS), (None,)),
    (
        "FlashAttnVarlenFunc",
        "flash_attn_varlen_func",
        (Q, *PAGES.unbind(2), *LENGTHS),
        (int32(*range(6)).reshape(2, 3),),
    ),
    ("FlashAttnVarlenKVPackedFunc", "flash_attn_varlen_kvpacked_func", (Q, KV, *LENGTHS), ()),
    ("FlashAttnVarlenQKVPackedFunc", "flash_attn_varlen_qkvpacked_func", (QKV, LENGTHS[0], 20), ()),
]


@pytest.mark.parametrize("return_softmax", [False, True])
@pytest.mark.parametrize("is_grad_enabled", [False, True])
@pytest.mark.parametrize(("name", "function", "tensors", "last"), CASES)
def test_results(name, function, tensors, last, is_grad_enabled, return_softmax):
    options = (0.0, 0.3, True, (9, 0), 2.0, torch.rand(4), False, return_softmax, *last)
    got = getattr(interface, name).apply(*tensors, *options, is_grad_enabled)
    wanted = getattr(flash_attn, function)(*tensors, *options)
    if not return_softmax:
        got, wanted = [got], [wanted]
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(("name", "function", "tensors", "last"), CASES)
def test_refusals(name, function, tensors, last):
    options = [0.0, None, False, (-1, -1), 0.0, None, False, False, *last]
    apply = getattr(interface, name).apply
    with pytest.raises(TypeError, match=f"^{name}: incompatible function arguments: causal must be a bool, got str"):
        apply(*tensors, *options[:2], "no", *options[3:], True)
    with pytest.raises(NotImplementedError, match=f"^{name}: .* requires a gradient"):
        apply(tensors[0].clone().requires_grad_(), *tensors[1:], *options, True)
    with pytest.raises(TypeError):  # there is no default
        apply(*tensors, *options)
    packed = apart(*tensors[0].shape[:-1], 32, dtype=torch.float32)
    assert apply(packed, *tensors[1:], *options, True).is_contiguous()  # a copy is read
