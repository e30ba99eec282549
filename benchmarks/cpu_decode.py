#!/usr/bin/env python3
"""Times flash_decode on the CPU beside torch's scaled_dot_product_attention, and over blocks beside fp16.

4 x 8k, 32/8 heads, head_dim 128; over blocks with the heads of a token side by side (NHD), and the tokens of a head.

    FLASHPORT_NUM_THREADS=2 python benchmarks/cpu_decode.py [--rounds 31]

Both take turns in one process; the ratio is the median over the rounds of torch's time by ours. torch's threads wait
asleep: by default they go on spinning for milliseconds behind a call, on the cores that the other's turn is timed on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

import flashport

BATCH, QUERY_HEADS, KV_HEADS, LENGTH, HEAD_DIM = 4, 32, 8, 8192, 128


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclasses.dataclass
class Turns:
    """The times in seconds of two calls that took turns."""

    ours: list[float]
    others: list[float]

    def ratio(self) -> float:
        """The median over the rounds of the other's time by ours."""
        return statistics.median(other / own for own, other in zip(self.ours, self.others, strict=True))


def take_turns(ours: Callable[[], object], other: Callable[[], object], rounds: int) -> Turns:
    """Times both calls in turn."""
    times = [(seconds(ours), seconds(other)) for _ in range(rounds)]
    return Turns([own for own, _ in times], [other for _, other in times])


def milliseconds(times: list[float]) -> str:
    """Their median and the best of them."""
    return f"{statistics.median(times) * 1e3:.1f} ms (best {min(times) * 1e3:.1f})"


def compare(dtype: torch.dtype, rounds: int) -> None:
    """Measures one element type and prints its row."""
    q = torch.randn(BATCH, QUERY_HEADS, 1, HEAD_DIM).to(dtype)
    k, v = (torch.randn(BATCH, KV_HEADS, LENGTH, HEAD_DIM).to(dtype) for _ in range(2))
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    rows, out = q[:, :, 0], torch.empty_like(q[:, :, 0])

    def ours() -> object:
        return flashport.flash_decode(rows, k, v, lengths, kv_layout="HND", out=out)

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    ours()
    torch.testing.assert_close(out, torchs()[:, :, 0], atol=2e-3, rtol=2e-2)
    turns = take_turns(ours, torchs, rounds)
    rate = 2 * k.numel() * k.element_size() / statistics.median(turns.ours) / 1e9
    print(
        f"{str(dtype).removeprefix('torch.')}: ours {milliseconds(turns.ours)}, {rate:.1f} GB/s, torch "
        f"{milliseconds(turns.others)}, ratio {turns.ratio():.2f}"
    )


def compare_formats(layout: str, rounds: int) -> None:
    """Measures caches in ggml's blocks beside one in fp16, and prints a row each."""
    q = torch.randn(BATCH, QUERY_HEADS, HEAD_DIM).half()
    shape = (BATCH, LENGTH, KV_HEADS, HEAD_DIM) if layout == "NHD" else (BATCH, KV_HEADS, LENGTH, HEAD_DIM)
    k, v = (torch.randn(shape).half() for _ in range(2))
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    plain, out = torch.empty_like(q), torch.empty_like(q)

    def fp16() -> object:
        return flashport.flash_decode(q, k, v, lengths, kv_layout=layout, out=plain)

    for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"):
        k_blocks, v_blocks = (flashport.quantize_kv(x, name) for x in (k, v))

        def blocks(k: torch.Tensor = k_blocks, v: torch.Tensor = v_blocks, name: str = name) -> object:
            return flashport.flash_decode(q, k, v, lengths, kv_layout=layout, k_format=name, v_format=name, out=out)

        fp16()
        blocks()
        torch.testing.assert_close(out, plain, atol=2e-2, rtol=0.2)  # keys and values were rounded to 4 bits and more
        turns = take_turns(blocks, fp16, rounds)
        beside = f"fp16 {milliseconds(turns.others)}, ratio {turns.ratio():.2f}"
        print(f"{name}, {layout}: {milliseconds(turns.ours)}, {beside}")


def main() -> None:
    """Measures fp32 and bf16 beside torch, and the formats of blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(2)
    for dtype in (torch.float32, torch.bfloat16):
        compare(dtype, rounds)
    for layout in ("NHD", "HND"):
        compare_formats(layout, rounds)


if __name__ == "__main__":
    main()
