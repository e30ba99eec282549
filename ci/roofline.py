#!/usr/bin/env python3
"""Writes docs/roofline.md: what bounds each decode kernel on the AMD devices, estimated from data sheets alone.

    python3 ci/roofline.py [--check]

--check compares instead of writing, and fails where the page is not what the kernel table gives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "roofline.md"
LEAF_KEYS = 64
LEAVES = 64 * 8 * 8192 // LEAF_KEYS  # of 64 requests of 8k keys, 8 kv heads


@dataclass(frozen=True)
class Device:
    """A device that a target serves, with the peak rates of its data sheet."""

    name: str
    memory: float  # bytes a second
    units: int  # compute units
    clock: float  # Hz
    flops: int  # a clock and compute unit: dense fp16 and bf16 products of K = 16

    @property
    def matrix(self) -> float:
        """Matrix operations a second."""
        return self.units * self.clock * self.flops


DEVICES = {
    "gfx942": Device("MI300X", 5.3e12, 304, 2.1e9, 2048),
    "gfx950": Device("MI355X", 8.0e12, 256, 2.4e9, 2048),
    "gfx11": Device("RX 7900 XTX", 0.96e12, 96, 2.5e9, 512),
}


def row_bytes(kv: str, dim: int) -> int:
    """Bytes of a stored row of `dim` elements."""
    return dim // 32 * 34 if kv == "q8_0" else dim * (1 if "fp8" in kv else 2)


def instances(target: str) -> list[tuple[str, str, int, int, int]]:
    """(math, kv, head_dim_qk, head_dim_v, rows) of each kernel of a target."""
    found = []
    for line in (ROOT / "cmake" / "decode_instances.txt").read_text().splitlines():
        fields = line.partition("#")[0].split()
        if fields and target in fields[5].split(","):
            found.append((fields[0], fields[1], int(fields[2]), int(fields[3]), int(fields[4])))
    return found


def table(target: str) -> list[str]:
    """The rows of one device's table."""
    device = DEVICES[target]
    lines = [
        f"## {device.name} (`{target}`)",
        "",
        f"{device.memory / 1e12:g} TB/s; {device.units} CUs, {device.clock / 1e9:g} GHz, {device.flops} operations a "
        f"clock and CU: {device.matrix / 1e12:.0f} TFLOP/s.",
        "",
        "| cache | head dims | rows | KB a leaf | MFLOP a leaf | memory (us) | products (us) | products / memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for _math, kv, dk, dv, rows in instances(target):
        size = LEAF_KEYS * (row_bytes(kv, dk) + row_bytes(kv, dv))
        work = 2 * LEAF_KEYS * rows * (dk + dv)
        memory, matrix = LEAVES * size / device.memory, LEAVES * work / device.matrix
        dims = str(dk) if dk == dv else f"{dk}/{dv}"
        figures = (
            f"{size / 1024:g} | {work / 1e6:.2f} | {memory * 1e6:.0f} | {matrix * 1e6:.0f} | {matrix / memory:.0%}"
        )
        lines.append(f"| {kv} | {dims} | {rows} | {figures} |")
    return lines


INTRODUCTION = f"""# Roofline estimates for AMD

**Estimates, not measurements**: no AMD card has run this code. `ci/roofline.py` writes this page from
`cmake/decode_instances.txt` and the peak rates of data sheets. A kernel's estimate is the larger of its two times,
which no kernel reaches.

The times are those of {LEAVES} leaves of {LEAF_KEYS} keys: 64 requests of 8k keys and 8 kv heads. *Memory* reads keys
and values once. *Products* are Q K^T and P V of all rows of the tile, padding included, at the rate of matrix
instructions with K = 16 (half of CDNA4's peak, which wants K = 32). Softmax and the widening of byte caches are vector
work beside them and not counted. Every kernel is bound by memory; those of byte caches with 64 rows are on RDNA3 by
both.

CUs are those of ROCm's [GPU specifications](https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html), rates of
memory and peak clocks those of AMD's data sheets.
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join("\n" + "\n".join(table(target)) + "\n" for target in DEVICES)


def main() -> None:
    """Writes the page, or checks it."""
    wanted = page()
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif not PAGE.exists() or PAGE.read_text() != wanted:
        sys.exit("docs/roofline.md is not what ci/roofline.py writes: run it and commit the result")


if __name__ == "__main__":
    main()
