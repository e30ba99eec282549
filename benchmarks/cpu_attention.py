#!/usr/bin/env python3
"""Times attention on the CPU beside torch's scaled_dot_product_attention: one sequence of 2k and 8k, 32/8 heads.

    FLASHPORT_NUM_THREADS=2 python benchmarks/cpu_attention.py [--rounds 9] [--dtypes bfloat16] [--lengths 2048]

Both take turns in one process; the ratio is the median over the rounds of torch's time by ours. torch has the layout
that it likes best, (batch, heads, tokens, dim), with the kv heads shared (enable_gqa). Its threads wait asleep: by
default they go on spinning for milliseconds behind a call, on the cores that the other's turn is timed on.

Other work on the machine disturbs both. --threads 1 --processor-time, with FLASHPORT_NUM_THREADS=1, counts only the
time in which the process ran.
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

QUERY_HEADS, KV_HEADS = 32, 8
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of one call."""
    start = clock()
    call()
    return clock() - start


def compare(
    dtype: torch.dtype, length: int, head_dim: int, causal: bool, rounds: int, clock: Callable[[], float]
) -> None:
    """Measures one case and prints its row."""
    q = torch.randn(1, length, QUERY_HEADS, head_dim).to(dtype)
    k, v = (torch.randn(1, length, KV_HEADS, head_dim).to(dtype) for _ in range(2))
    out = torch.empty_like(q)
    of_torch = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def ours() -> object:
        return flashport.attention(q, k, v, causal=causal, out=out)

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(*of_torch, is_causal=causal, enable_gqa=True)

    ours()
    torch.testing.assert_close(out, torchs().transpose(1, 2), atol=TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])
    times = [(seconds(ours, clock), seconds(torchs, clock)) for _ in range(rounds)]
    mine, theirs = ([pair[i] for pair in times] for i in range(2))
    ratio = statistics.median(b / a for a, b in times)
    flops = 4 * QUERY_HEADS * length * length * head_dim * (0.5 if causal else 1)
    name, mask = str(dtype).removeprefix("torch."), "causal" if causal else "full"
    print(
        f"{name} {length} D{head_dim} {mask}: ours {statistics.median(mine) * 1e3:.1f} ms "
        f"({flops / statistics.median(mine) / 1e9:.0f} GFLOP/s; best {min(mine) * 1e3:.1f}), torch "
        f"{statistics.median(theirs) * 1e3:.1f} ms (best {min(theirs) * 1e3:.1f}), ratio {ratio:.2f}",
        flush=True,
    )


def main() -> None:
    """Measures every type, length, head_dim and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.processor_time else time.perf_counter
    print(flashport.which_kernel("attention", target="cpu", dtype="bfloat16"), "torch", torch.__version__)
    for dtype in arguments.dtypes:
        for length in arguments.lengths:
            for head_dim in (64, 128):
                for causal in (True, False):
                    compare(getattr(torch, dtype), length, head_dim, causal, arguments.rounds, clock)


if __name__ == "__main__":
    main()
