"""layers.rotary over packed projections, and RotaryEmbedding, against formulas in operations of torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_attn_call import expect_close, int32, random_tensors  # noqa: E402
from flash_attn_errors import expect_refusal  # noqa: E402
from flashport.flash_attn.layers.rotary import (  # noqa: E402
    RotaryEmbedding,
    _apply_rotary_emb_qkv,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

COS, SIN = random_tensors(1, (50, 8), (50, 8))
COS_K, SIN_K = random_tensors(2, (50, 8), (50, 8))
OFFSETS = [0, 7, int32(3, 40), int32(0, 9).long()]
TYPES = [torch.float32, torch.bfloat16]


def turned(x, cos, sin, interleaved, first=0):
    """x [B, S, H, D] whose tokens stand from ``first`` on, in fp64: (a cos - b sin, a sin + b cos) of each pair."""
    dim = 2 * cos.shape[1]
    result = x.double().clone()
    for b in range(x.shape[0]):
        start = int(first[b]) if isinstance(first, torch.Tensor) else first
        c, s = (table[start : start + x.shape[1], None].double() for table in (cos, sin))
        one = slice(0, dim, 2) if interleaved else slice(0, dim // 2)
        other = slice(1, dim, 2) if interleaved else slice(dim // 2, dim)
        result[b, :, :, one] = x[b, :, :, one].double() * c - x[b, :, :, other].double() * s
        result[b, :, :, other] = x[b, :, :, one].double() * s + x[b, :, :, other].double() * c
    return result


def test_rotate_half():
    x = torch.arange(1.0, 7.0)
    assert rotate_half(x).tolist() == [-4, -5, -6, 1, 2, 3]
    assert rotate_half(x, interleaved=True).tolist() == [-2, 1, -4, 3, -6, 5]
    (x,) = random_tensors(1, (2, 3, 8))
    for interleaved in (False, True):
        assert torch.equal(rotate_half(rotate_half(x, interleaved), interleaved), -x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batched", [False, True])
def test_by_plain_tables(interleaved, dtype, batched):
    x, cos, sin = random_tensors(3, (2, 9, 3, 24), *[(2, 9, 8)] * 2, dtype=dtype)
    before = x.clone()
    tables = (cos, sin) if batched else (cos[0], sin[0])
    out = apply_rotary_emb_torch(x, *tables, interleaved)
    assert out.dtype == dtype
    assert torch.equal(x, before)
    for b in range(2):
        own = cos[b if batched else 0], sin[b if batched else 0]
        expect_close(out[b : b + 1], turned(x[b : b + 1], *own, interleaved), dtype)
    if not batched and dtype == torch.float32:
        expect_close(out, apply_rotary_emb(x, *tables, interleaved), dtype)
    assert apply_rotary_emb_torch(x, cos.float(), sin.float()).dtype == torch.float32


@pytest.mark.parametrize("form", ["three", "three apart", "grouped", "grouped apart"])
@pytest.mark.parametrize("own_k", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", OFFSETS)
@pytest.mark.parametrize("dtype", TYPES)
def test_packed_projections(form, own_k, interleaved, first, dtype):
    shape = (2, 9, 3, 4, 24) if "three" in form else (2, 9, 8, 24)
    (qkv,) = random_tensors(4, shape, dtype=dtype)
    if "apart" in form:
        qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    heads, before = None if "three" in form else 4, qkv.clone()
    cos, sin, cos_k, sin_k = (x.to(dtype) for x in (COS, SIN, COS_K, SIN_K))
    keys = {"cos_k": cos_k, "sin_k": sin_k} if own_k else {}
    result = apply_rotary_emb_qkv_(
        qkv, cos, sin, **keys, interleaved=interleaved, seqlen_offsets=first, num_heads_q=heads
    )
    assert result is qkv
    q, k, v = qkv.unbind(2) if heads is None else qkv.split((4, 2, 2), 2)
    old_q, old_k, old_v = before.unbind(2) if heads is None else before.split((4, 2, 2), 2)
    unturned = before.clone()
    expect_close(q, turned(old_q, cos, sin, interleaved, first), dtype)
    expect_close(k, turned(old_k, *(keys.values() if own_k else (cos, sin)), interleaved, first), dtype)
    assert torch.equal(v, old_v)
    options = {**keys, "interleaved": interleaved, "seqlen_offsets": first, "num_heads_q": heads}
    assert torch.equal(_apply_rotary_emb_qkv(before, cos, sin, **options), qkv)
    assert torch.equal(before, unturned)
    same = before.clone()
    assert _apply_rotary_emb_qkv(same, cos, sin, **options, inplace=True) is same
    assert torch.equal(same, qkv)
    opposite = keys | ({"sin_k": -sin_k} if own_k else {})
    backwards = apply_rotary_emb_qkv_(before.clone(), cos, -sin, **{**options, **opposite})
    assert torch.equal(_apply_rotary_emb_qkv(before, cos, sin, **options, conjugate=True), backwards)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", OFFSETS)
@pytest.mark.parametrize("dtype", TYPES)
def test_packed_keys(interleaved, first, dtype):
    (kv,) = random_tensors(5, (2, 9, 2, 3, 24), dtype=dtype)
    before, cos, sin = kv.clone(), COS.to(dtype), SIN.to(dtype)
    assert apply_rotary_emb_kv_(kv, cos, sin, interleaved, first) is kv
    expect_close(kv[:, :, 0], turned(before[:, :, 0], cos, sin, interleaved, first), dtype)
    assert torch.equal(kv[:, :, 1], before[:, :, 1])


def tables(rows, dim=16, base=10000.0, scale_base=None):
    """cos and sin of queries, then of keys, by the formula in fp64."""
    pairs = torch.arange(dim // 2).double()
    positions = torch.arange(rows).double()[:, None]
    angles = positions * base ** (-2 * pairs / dim)
    scale = torch.ones(1, 1).double()
    if scale_base is not None:
        scale = ((2 * pairs + 0.4 * dim) / (1.4 * dim)) ** ((positions - rows // 2) / scale_base)
    return angles.cos() * scale, angles.sin() * scale, angles.cos() / scale, angles.sin() / scale


class TestRotaryEmbedding:
    @pytest.mark.parametrize("form", ["three", "grouped", "apart"])
    @pytest.mark.parametrize("first", OFFSETS)
    @pytest.mark.parametrize(("interleaved", "base", "scale_base"), [(False, 1e4, None), (True, 500.0, 64)])
    @pytest.mark.parametrize("dtype", TYPES)
    def test_formula(self, form, first, interleaved, base, scale_base, dtype):
        rotary = RotaryEmbedding(16, base, interleaved, scale_base)
        known = isinstance(first, int)
        rows = 9 + first if known else 50
        options = {"seqlen_offset": first} | ({} if known else {"max_seqlen": 50})
        cos, sin, cos_k, sin_k = (x.to(dtype) for x in tables(rows, 16, base, scale_base))
        if form == "apart":
            q, kv = random_tensors(6, (2, 9, 4, 24), (2, 9, 2, 3, 24), dtype=dtype)
            before, old_kv = q.clone(), kv.clone()
            got_q, got_kv = rotary(q, kv, **options)
            assert got_q is q
            assert got_kv is kv
            pairs = [(q, before), (kv[:, :, 0], old_kv[:, :, 0]), (kv[:, :, 1], old_kv[:, :, 1])]
        else:
            (qkv,) = random_tensors(6, (2, 9, 3, 4, 24) if form == "three" else (2, 9, 8, 24), dtype=dtype)
            before = qkv.clone()
            assert rotary(qkv, **options, num_heads_q=4 if form == "grouped" else None) is qkv
            parts = [x.unbind(2) if form == "three" else x.split((4, 2, 2), 2) for x in (qkv, before)]
            pairs = list(zip(*parts, strict=True))
        (q, old_q), (k, old_k), (v, old_v) = pairs
        expect_close(q, turned(old_q, cos, sin, interleaved, first), dtype)
        expect_close(k, turned(old_k, cos_k, sin_k, interleaved, first), dtype)
        assert torch.equal(v, old_v)

    def test_tables_are_made_where_there_are_none(self):
        rotary = RotaryEmbedding(16)
        qkv = torch.randn(1, 9, 3, 2, 16)
        rotary(qkv)
        made = rotary._cos_cached
        assert made.shape == (9, 8)
        rotary(qkv[:, :4], seqlen_offset=5)
        assert rotary._cos_cached is made
        rotary(qkv[:, :4], seqlen_offset=6)
        assert rotary._cos_cached.shape == (10, 8)
        rotary(qkv[:, :4], max_seqlen=20)
        rotary(qkv, seqlen_offset=torch.tensor([11]))  # in the rows that there are
        assert rotary._cos_cached.shape == (20, 8)
        rotary(qkv.bfloat16())
        assert rotary._cos_cached.dtype == torch.bfloat16
        assert rotary._cos_cached.shape == (9, 8)

    def test_tables_of_inference_mode_are_made_anew_for_training(self):
        rotary = RotaryEmbedding(16)
        with torch.inference_mode():
            rotary(torch.randn(1, 9, 3, 2, 16))
        assert rotary._cos_cached.is_inference()
        rotary.eval()(torch.randn(1, 9, 3, 2, 16))
        assert rotary._cos_cached.is_inference()
        rotary.train()(torch.randn(1, 9, 3, 2, 16))
        assert not rotary._cos_cached.is_inference()

    @pytest.mark.parametrize("scale_base", [None, 512])
    def test_a_model_in_16_bits_has_the_same_tables(self, scale_base):
        rotary, rounded = RotaryEmbedding(16, scale_base=scale_base), RotaryEmbedding(16, scale_base=scale_base)
        rounded.bfloat16()
        for one in (rotary, rounded):
            one(torch.zeros(1, 3000, 3, 1, 16))
        assert torch.equal(rotary._cos_cached, rounded._cos_cached)
        expect_close(rotary._sin_cached[:100], tables(3000, scale_base=scale_base)[1][:100], torch.float32)

    def test_buffers(self):
        plain, scaled = RotaryEmbedding(16), RotaryEmbedding(16, scale_base=512)
        assert plain.scale is None
        assert scaled.scale.shape == plain.inv_freq.shape == (8,)
        assert not scaled.state_dict()

    def test_refusals(self):
        rotary = RotaryEmbedding(16)
        with pytest.raises(ValueError, match=r"^RotaryEmbedding: max_seqlen must be passed, got None: seqlen_offset"):
            rotary(torch.randn(1, 9, 3, 2, 16), seqlen_offset=int32(0))
        with pytest.raises(AssertionError, match="seqlen_offsets \\+ seqlen must be at most seqlen_ro, 10"):
            rotary(torch.randn(1, 9, 3, 2, 16), seqlen_offset=4, max_seqlen=10)
        q, kv = torch.randn(1, 9, 2, 16), torch.randn(1, 8, 3, 2, 16)
        before = q.clone()
        with pytest.raises(AssertionError, match=r"^RotaryEmbedding: kv must have shape \(batch, seqlen, 2, nheads"):
            rotary(q, kv)
        with pytest.raises(AssertionError, match=r"^RotaryEmbedding: rotary_dim must be <= headdim, got 16 and 8"):
            rotary(q, torch.randn(1, 9, 2, 2, 8))
        with pytest.raises(TypeError, match=r"^RotaryEmbedding: .*qkv must be a torch.Tensor, got NoneType"):
            rotary(None, kv)
        assert torch.equal(q, before)
        for arguments, name in (((q.requires_grad_(), kv), "qkv"), ((before, kv.requires_grad_()), "kv")):
            with pytest.raises(NotImplementedError, match=f"^RotaryEmbedding: {name} requires a gradient"):
                rotary(*arguments)


QKV, GROUPED, KV = torch.randn(2, 9, 3, 4, 24), torch.randn(2, 9, 8, 24), torch.randn(2, 9, 2, 4, 24)
RIGHT = {
    apply_rotary_emb_qkv_: {"qkv": QKV, "cos": COS, "sin": SIN},
    _apply_rotary_emb_qkv: {"qkv": QKV, "cos": COS, "sin": SIN},
    apply_rotary_emb_kv_: {"kv": KV, "cos": COS, "sin": SIN},
    apply_rotary_emb_torch: {"x": torch.randn(2, 50, 4, 24), "cos": COS, "sin": SIN},
    rotate_half: {"x": QKV},
}
SHAPE = "qkv must have shape (batch, seqlen, 3, nheads, headdim) or (batch, seqlen, num_heads_q + 2 * num_heads_k"
KIND = "incompatible function arguments"
WRONG = [  # function, what differs from a right call, words, flash-attn's class
    (apply_rotary_emb_qkv_, {"qkv": QKV[:, :, :2]}, f"{SHAPE}, headdim), got (2, 9, 2, 4, 24)", AssertionError),
    (apply_rotary_emb_qkv_, {"qkv": QKV[0, 0]}, SHAPE, AssertionError),
    (_apply_rotary_emb_qkv, {"qkv": QKV[:, :, :2]}, f"{SHAPE}, headdim), got (2, 9, 2, 4, 24)", AssertionError),
    (_apply_rotary_emb_qkv, {"qkv": None}, f"{KIND}: qkv must be a torch.Tensor, got NoneType", TypeError),
    (apply_rotary_emb_qkv_, {"qkv": GROUPED}, "num_heads_q must be passed with qkv of four axes", AssertionError),
    (apply_rotary_emb_qkv_, {"qkv": GROUPED, "num_heads_q": 3}, SHAPE, AssertionError),
    (apply_rotary_emb_qkv_, {"qkv": GROUPED, "num_heads_q": 10}, SHAPE, AssertionError),
    (apply_rotary_emb_qkv_, {"qkv": None}, f"{KIND}: qkv must be a torch.Tensor, got NoneType", TypeError),
    (apply_rotary_emb_qkv_, {"cos_k": COS[:20]}, "sin must have the shape of cos, got (50, 8) and (20", AssertionError),
    (apply_rotary_emb_qkv_, {"cos_k": COS[:5], "sin_k": SIN[:5]}, "seqlen_ro must be >= seqlen", AssertionError),
    (apply_rotary_emb_qkv_, {"seqlen_offsets": 42}, "must be at most seqlen_ro, 50, got 42 and 9", AssertionError),
    (apply_rotary_emb_qkv_, {"seqlen_offsets": int32(1)}, "seqlen_offsets must have shape (2,)", AssertionError),
    (apply_rotary_emb_qkv_, {"cos": COS[0]}, "cos must have shape (seqlen_ro, rotary_dim / 2)", ValueError),
    (apply_rotary_emb_kv_, {"kv": QKV}, "kv must have shape (batch, seqlen, 2, nheads, headdim)", AssertionError),
    (apply_rotary_emb_kv_, {"kv": GROUPED}, "kv must have shape (batch, seqlen, 2, nheads, headdim)", ValueError),
    (apply_rotary_emb_kv_, {"kv": KV[..., :8]}, "rotary_dim must be <= headdim, got 16 and 8", AssertionError),
    (apply_rotary_emb_kv_, {"sin": None}, f"{KIND}: sin must be a torch.Tensor, got NoneType", TypeError),
    (apply_rotary_emb_torch, {"x": torch.randn(2, 50, 4, 8)}, "rotary_dim must be <= headdim", AssertionError),
    (apply_rotary_emb_torch, {"cos": COS[:9]}, "cos and sin must have a row for each token of x", RuntimeError),
    (apply_rotary_emb_torch, {"cos": 1.0}, f"{KIND}: cos must be a torch.Tensor, got float", TypeError),
    (rotate_half, {"x": torch.randn(2, 3)}, "x must have an even last axis, got shape (2, 3)", RuntimeError),
    (rotate_half, {"x": [1.0, 2.0]}, f"{KIND}: x must be a torch.Tensor, got list", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("function", "changed", "words", "kind"), WRONG)
def test_wrong_arguments(function, changed, words, kind):
    right = {name: x.clone() for name, x in RIGHT[function].items()}
    function(**right)
    expect_refusal(function, right | changed, words, kind)


def test_gradients():
    x = torch.randn(1, 4, 2, 24, dtype=torch.double, requires_grad=True)
    cos, sin = COS[:4].double(), SIN[:4].double()
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb_torch(x, cos, sin, True), x)
    for function, x in ((apply_rotary_emb_qkv_, QKV), (apply_rotary_emb_kv_, KV)):
        x = x.clone().requires_grad_()
        name = next(iter(RIGHT[function]))
        expect_refusal(function, RIGHT[function] | {name: x}, f"{name} requires a gradient", NotImplementedError)
        with torch.no_grad():
            assert function(x, COS, SIN) is x
