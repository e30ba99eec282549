"""layers.rotary: apply_rotary_emb against complex numbers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_attn_call import expect_close, int32, offsets, random_tensors  # noqa: E402
from flash_attn_errors import expect_refusal  # noqa: E402
from flashport.flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func  # noqa: E402

ANGLES = torch.rand(50, 8, generator=torch.Generator().manual_seed(2)) * 6
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(x, rows, interleaved):
    """x [S, H, D], whose tokens have these rows of the tables, as complex numbers."""
    part, rest = x[..., :16].double(), x[..., 16:]
    pairs = part.unflatten(-1, (8, 2)) if interleaved else part.unflatten(-1, (2, 8)).transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(8), ANGLES[rows])[:, None].to(
        torch.cdouble
    )
    pairs = torch.view_as_real(numbers)
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([part.to(x.dtype), rest], -1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", [0, 7, int32(3, 40), int32(0, 9).long()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense(first, interleaved, inplace, dtype):
    (x,) = random_tensors(1, (2, 9, 3, 24), dtype=dtype)
    before = x.clone()
    cos, sin = COS.to(dtype), SIN.to(dtype)
    out = apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=first)
    assert (out is x) == inplace
    assert inplace or torch.equal(x, before)
    for b in range(2):
        start = first if isinstance(first, int) else int(first[b])
        expect_close(out[b], turned(before[b], torch.arange(start, start + 9), interleaved), dtype)


@pytest.mark.parametrize("first", [2, int32(3, 0, 40)])
def test_packed(first):
    (x,) = random_tensors(1, (15, 3, 24))
    out = apply_rotary_emb(x, COS, SIN, seqlen_offsets=first, cu_seqlens=offsets([5, 0, 8]), max_seqlen=8)
    starts = [2, 2] if isinstance(first, int) else [3, 40]
    rows = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, (5, 8), strict=True)])
    expect_close(out[:13], turned(x[:13], rows, False), torch.float32)
    assert torch.equal(out[13:], x[13:])  # of no sequence


def test_positions_past_the_tables_are_not_turned():
    (x,) = random_tensors(1, (1, 4, 2, 16))
    out = apply_rotary_emb(x, COS, SIN, seqlen_offsets=int32(48))
    assert torch.equal(out[0, 2:], x[0, 2:])
    assert not torch.equal(out[0, :2], x[0, :2])


def test_gradients():
    x = random_tensors(1, (1, 4, 2, 24))[0].double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary_emb(x, COS.double(), SIN.double()).float().double(), x, eps=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("dim", [264, 512])
def test_head_dims_that_flash_attn_refuses(dim):
    (x,) = random_tensors(1, (1, 4, 2, dim))
    out = apply_rotary_emb(x, COS, SIN)
    expect_close(out[0], turned(x[0], torch.arange(4), False), torch.float32)


X = torch.randn(1, 4, 2, 24)
WRONG = [  # what differs from a right call, flash-attn's words where it has any, and its class
    ({"cu_seqlens": offsets([4])}, "If cu_seqlens is passed in, then max_seqlen must be passed", AssertionError),
    ({"cos": COS[:3], "sin": SIN[:3]}, "seqlen_ro must be >= seqlen", AssertionError),
    ({"cos": torch.rand(50, 16), "sin": torch.rand(50, 16)}, "rotary_dim must be <= headdim", AssertionError),
    ({"sin": SIN[1:]}, "sin must have the shape of cos", AssertionError),
    ({"sin": SIN[:, 1:]}, "sin must have the shape of cos", AssertionError),
    ({"seqlen_offsets": 47}, "seqlen_offsets + seqlen must be at most seqlen_ro, 50, got 47 and 4", AssertionError),
    ({"seqlen_offsets": int32(1, 2)}, "seqlen_offsets must have shape (1,)", AssertionError),
    ({"seqlen_offsets": torch.tensor([1.0])}, "int32 or int64, got", AssertionError),
    ({"x": X[0]}, "x must have shape (batch, seqlen, nheads, headdim), got (4, 2, 24)", ValueError),
    ({"cu_seqlens": offsets([4]), "max_seqlen": 4}, "x must have shape (total, nheads, headdim)", ValueError),
    ({"cos": COS[None]}, "cos must have shape (seqlen_ro, rotary_dim / 2)", ValueError),
    ({"sin": SIN[0]}, "sin must have shape (seqlen_ro, rotary_dim / 2)", ValueError),
    ({"cos": None}, "cos must be a torch.Tensor, got NoneType", TypeError),
]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("changed", "words", "kind"), WRONG)
def test_wrong_arguments(changed, words, kind, inplace):
    expect_refusal(
        apply_rotary_emb_func, {"x": X.clone(), "cos": COS, "sin": SIN, "inplace": inplace} | changed, words, kind
    )
