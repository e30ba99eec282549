#!/usr/bin/env python3
"""Writes docs/roofline.md: what bounds each kernel on the AMD devices, estimated from data sheets alone.

    python3 ci/roofline.py [--check]

--check compares instead of writing, and fails where the page is not what the kernel table gives.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from decode_grid import shapes  # noqa: E402 - the list that benchmarks/run.py --grid times
from decode_grid.shapes import Shape, row_bytes  # noqa: E402

PAGE = ROOT / "docs" / "roofline.md"
LEAF_KEYS = 64
LEAVES = 64 * 8 * 8192 // LEAF_KEYS  # of 64 requests of 8k keys, 8 kv heads
# The gated delta rule in Qwen3-Next's shape: heads, value heads, columns of V; tokens of a chunk, chunks of 16k tokens.
HEADS, VALUE_HEADS, VALUES, CHUNK, CHUNKS = 16, 32, 128, 64, 256
DECODED = 256  # sequences


@dataclass(frozen=True)
class Device:
    """A device that a target serves, with the peak rates of its data sheet."""

    name: str
    memory: float  # bytes a second
    units: int  # compute units
    clock: float  # Hz
    flops: int  # a clock and compute unit: dense fp16 and bf16 products of K = 16
    simds: int  # of a compute unit

    @property
    def matrix(self) -> float:
        """Matrix operations a second."""
        return self.units * self.clock * self.flops


DEVICES = {
    "gfx942": Device("MI300X", 5.3e12, 304, 2.1e9, 2048, 4),
    "gfx950": Device("MI355X", 8.0e12, 256, 2.4e9, 2048, 4),
    "gfx11": Device("RX 7900 XTX", 0.96e12, 96, 2.5e9, 512, 2),
}


def instances(target: str) -> list[tuple[str, str, int, int, int]]:
    """(k_format, v_format, head_dim_qk, head_dim_v, rows) of each kernel of a target that reads one format."""
    found = []
    for line in (ROOT / "cmake" / "decode_instances.txt").read_text().splitlines():
        fields = line.partition("#")[0].split()
        if fields and fields[1] != "any" and target in fields[6].split(","):
            found.append((fields[1], fields[2], int(fields[3]), int(fields[4]), int(fields[5])))
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
    for k_format, v_format, dk, dv, rows in instances(target):
        size = LEAF_KEYS * (row_bytes(k_format, dk) + row_bytes(v_format, dv))
        kv = k_format if k_format == v_format else f"{k_format}/{v_format}"
        work = 2 * LEAF_KEYS * rows * (dk + dv)
        memory, matrix = LEAVES * size / device.memory, LEAVES * work / device.matrix
        dims = str(dk) if dk == dv else f"{dk}/{dv}"
        figures = (
            f"{size / 1024:g} | {work / 1e6:.2f} | {memory * 1e6:.0f} | {matrix * 1e6:.0f} | {matrix / memory:.0%}"
        )
        lines.append(f"| {kv} | {dims} | {rows} | {figures} |")
    return lines


def grid_seconds(target: str, shape: Shape) -> tuple[float, float]:
    """Memory and products of one shape of the grid, in tiles of the fewest rows that hold a group's new tokens."""
    device, wanted = DEVICES[target], shape.group * shape.q_len
    tiles = [rows for kv, _, dk, dv, rows in instances(target) if (kv, dk, dv) == ("bf16", *(shape.head_dim,) * 2)]
    rows = min((rows for rows in tiles if rows >= wanted), default=max(tiles))
    leaves = sum(-(-length // LEAF_KEYS) for length in shape.lens) * shape.kv_heads
    work = leaves * -(-wanted // rows) * 2 * LEAF_KEYS * rows * 2 * shape.head_dim
    return shape.bytes / device.memory, work / device.matrix


def grid_table(target: str) -> list[str]:
    """The rows of one device's table of the grid: a head shape with its new tokens, by batches."""
    grid = [shape for shape in shapes.grid() if not shape.between]
    batches = list(dict.fromkeys(s.batch for s in sorted(grid, key=lambda s: (s.ragged, len(s.lens), s.lens[0]))))
    cells: dict[str, dict[str, str]] = {}
    for shape in grid:
        memory, products = grid_seconds(target, shape)
        figure = max(memory, products) * 1e6
        text = f"{figure:.0f}" if figure >= 9.95 else f"{figure:.1f}" if figure >= 0.95 else f"{figure:.2f}"
        heads = shape.head_shape + (f", q_len {shape.q_len}" if shape.q_len > 1 else "")
        cells.setdefault(heads, {})[shape.batch] = text + "*" * (products > memory)
    single = [math.log(max(grid_seconds(target, shape))) for shape in grid if shape.q_len == 1]
    mean = math.exp(math.fsum(single) / len(single)) * 1e6
    return [
        f"The decode grid in us; geometric mean of its {len(single)} shapes with one new token: {mean:.1f} us.",
        "",
        "| heads | " + " | ".join(batches) + " |",
        "| --- " * (len(batches) + 1) + "|",
        *(f"| {heads} | " + " | ".join(own.get(batch, "") for batch in batches) + " |" for heads, own in cells.items()),
    ]


def gated_delta_table(target: str) -> list[str]:
    """The rows of one device's table of the gated delta rule."""
    device = DEVICES[target]
    lines = [
        "| head_dim_k | decode: memory (us) | prefill: memory (us) | prefill: products (us) "
        "| one chain: products (us) |",
        "| --- | --- | --- | --- | --- |",
    ]
    lower = CHUNK * CHUNK * 10 // 16  # elements up to the diagonal's blocks of 16 x 16
    for dk in (64, 128, 256):
        decode = 2 * DECODED * VALUE_HEADS * dk * VALUES * 4
        # q, k and both products of a head; v, o, and the inverse, P and factors in and out of a value head
        of_head = 2 * (2 * CHUNK * dk * 2), 2 * (2 * lower * dk)
        of_value_head = 2 * CHUNK * VALUES * 2 + 2 * (2 * lower * 2 + 1040), 2 * VALUES * (3 * CHUNK * dk + 2 * lower)
        size, work = (CHUNKS * (HEADS * a + VALUE_HEADS * b) for a, b in zip(of_head, of_value_head, strict=True))
        keys = min(dk, 128) if target == "gfx11" else dk  # of a wave
        of_wave = CHUNKS * 2 * 16 * (3 * CHUNK * keys + 2 * lower)
        times = (
            decode / device.memory,
            size / device.memory,
            work / device.matrix,
            of_wave / (device.flops / device.simds * device.clock),
        )
        lines.append(f"| {dk} | " + " | ".join(f"{time * 1e6:.0f}" for time in times) + " |")
    return lines


INTRODUCTION = f"""# Roofline estimates for AMD

**Estimates, not measurements**: no AMD card has run this code. `ci/roofline.py` writes this page from
`cmake/decode_instances.txt` and the peak rates of data sheets. A kernel's estimate is the larger of its two times,
and no kernel reaches it.

The times are those of {LEAVES} leaves of {LEAF_KEYS} keys: 64 requests of 8k keys and 8 kv heads. *Memory* is the time
to read keys and values once. *Products* is that of Q K^T and P V for all rows of the tile, padding included, at the
rate of matrix instructions with K = 16 (half of CDNA4's peak, which wants K = 32). Softmax and the widening of codes
are vector work beside them and not counted. Memory bounds every kernel of 16 rows. With 64 rows it bounds those of 16
bits; products bound those of four bits on MI350X and RDNA3, and take as long as memory for eight bits on RDNA3.

The number of CUs comes from ROCm's [GPU
specifications](https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html), memory rates and peak clocks from AMD's
data sheets.

The second tables are for the gated delta rule with {HEADS} heads, {VALUE_HEADS} value heads and V = {VALUES}. *Decode*
reads and writes the fp32 states of {DECODED} sequences. *Prefill* has 4 x {CHUNKS * CHUNK // 4} tokens in chunks: it
moves queries, keys, values and outputs in bf16, and what the first kernel leaves for the second ([how
much](gated-delta.md#what-it-costs)). *One chain* is what no number of CUs shortens: the products of one wave's 16
columns over {CHUNKS} chunks in a row. Barriers, LDS and the rounding of operands come on top.

The third tables have the shapes that `benchmarks/run.py --grid` times on a card (`benchmarks/decode_grid/shapes.py`):
bf16, but for lengths between powers of two. They have the larger of the two times of a shape, * where that is the
products'. They count neither a launch nor the time until the first keys arrive, which are most of a small shape's time,
and take all CUs for busy.
"""


def page() -> str:
    """The whole page."""
    tables = [[*table(target), "", *gated_delta_table(target), "", *grid_table(target)] for target in DEVICES]
    return INTRODUCTION + "".join("\n" + "\n".join(lines) + "\n" for lines in tables)


def main() -> None:
    """Writes the page, or checks it."""
    wanted = page()
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif not PAGE.exists() or PAGE.read_text() != wanted:
        sys.exit("docs/roofline.md is not what ci/roofline.py writes: run it and commit the result")


if __name__ == "__main__":
    main()
