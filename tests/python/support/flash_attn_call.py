"""What the suites of flash_attn share: attention of one sequence in fp64 by operations of torch, and tolerances."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def reference(
    q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None, scale=None, kept=None, dropout_p=0.0, sinks=None
):
    """(out [Sq, Hq, DV], lse [Hq, Sq], weights exp(s - m) [Hq, Sq, Sk]) of q [Sq, Hq, D] and k [Sk, Hkv, D], in fp64.

    The last query stands at the last key; ``slopes`` are [Hq], ``kept`` [Hq, Sq, Sk]. A row that sees nothing has
    output 0 and lse +inf.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k.shape[0])
    distance = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - keys
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sink], -1)
    lse = scores.logsumexp(-1) if scores.shape[-1] else torch.full(scores.shape[:2], -torch.inf)
    probabilities = torch.exp(scores - lse[..., None]).nan_to_num(0)[..., : k.shape[0]]
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0) if scores.shape[-1] else scores
    if kept is not None:
        probabilities = probabilities * kept / (1 - dropout_p)
    out = torch.einsum("hij,jhd->ihd", probabilities, v)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), weights


def expect_close(got, wanted, dtype):
    """Within rounding to ``dtype``; equal where infinite."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def random_tensors(seed, *shapes, dtype=torch.float32):
    """Normal ones, reproducible."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def offsets(lengths):
    """cu_seqlens."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def int32(*numbers):
    """A tensor of them."""
    return torch.tensor(numbers, dtype=torch.int32)
