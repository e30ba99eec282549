#!/usr/bin/env python3
"""Times the gated delta rule on the CPU beside a plain recurrence in torch: 16/32 heads, K = V = 128, fp32 states.

    FLASHPORT_NUM_THREADS=2 python benchmarks/cpu_gated_delta.py [--rounds 15]

Decoding steps are gated_delta_update on a pool, prompts are gated_delta_chunk. Both sides take turns in one process;
the ratio is the median over the rounds of torch's time by ours. torch's threads wait asleep: by default they go on
spinning for milliseconds behind a call, on the cores that the other's turn is timed on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import flashport

HEADS, VALUE_HEADS, DIM = 16, 32, 128
CASES = ((1, 1), (16, 1), (64, 1), (1, 512))  # sequences, tokens of each


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - the field's name
    dt_bias: torch.Tensor,
    S: torch.Tensor,  # noqa: N803
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [B, T, HV, V], S [B, HV, K, V]): token by token in fp32, as models without kernels have it."""
    dtype = q.dtype
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(VALUE_HEADS // HEADS, 2) for x in (q, k))
    q = q * DIM**-0.5
    decay = torch.exp(-A_log.exp() * F.softplus(a.float() + dt_bias))
    v, beta = v.float(), b.float().sigmoid()
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, None, None]  # noqa: N806
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(-2))
        S = S + k[:, t, :, :, None] * u[:, :, None]  # noqa: N806
        out[:, t] = (S * q[:, t, :, :, None]).sum(-2)
    return out.to(dtype), S


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(batch: int, tokens: int, dtype: torch.dtype, rounds: int) -> None:
    """Measures one case and prints its row."""
    q, k = (torch.randn(batch, tokens, HEADS, DIM).to(dtype) for _ in range(2))
    v = torch.randn(batch, tokens, VALUE_HEADS, DIM).to(dtype)
    a, b = (torch.randn(batch, tokens, VALUE_HEADS).to(dtype) for _ in range(2))
    gate = {"A_log": torch.empty(VALUE_HEADS).uniform_(1, 16).log(), "dt_bias": torch.full((VALUE_HEADS,), -4.0)}
    start = torch.randn(batch, VALUE_HEADS, DIM, DIM)  # [.., K, V]
    pool = start.transpose(-1, -2).contiguous()
    kept = [start]

    def ours() -> torch.Tensor:
        if tokens == 1:
            return flashport.gated_delta_update(q, k, v, a, b, **gate, state=pool, use_qk_l2norm=True)
        return flashport.gated_delta_chunk(q, k, v, a, b, pool, **gate, beta_sigmoid=True, use_qk_l2norm=True)

    def torchs() -> torch.Tensor:
        out, kept[0] = recurrence(q, k, v, a, b, **gate, S=kept[0])
        return out

    torch.testing.assert_close(ours(), torchs(), atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(pool.transpose(-1, -2), kept[0], atol=2e-4, rtol=2e-4)
    times = [(seconds(ours), seconds(torchs)) for _ in range(rounds)]
    mine, theirs = ([pair[i] for pair in times] for i in range(2))
    ratio = statistics.median(theirs / mine for mine, theirs in times)
    median = statistics.median(mine)
    rate = f"{2 * pool.nbytes / median / 1e9:.1f} GB/s" if tokens == 1 else f"{batch * tokens / median:,.0f} tokens/s"
    print(
        f"{batch} x {tokens}, {str(dtype).removeprefix('torch.')}: ours {median * 1e3:.2f} ms ({rate}; best "
        f"{min(mine) * 1e3:.2f}), torch {statistics.median(theirs) * 1e3:.2f} ms (best {min(theirs) * 1e3:.2f}), "
        f"ratio {ratio:.1f}",
        flush=True,
    )


def main() -> None:
    """Measures fp32 and bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for batch, tokens in CASES:
            compare(batch, tokens, dtype, rounds)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
