#!/usr/bin/env python3
"""Counts the hot loop of attention's plain kernels in AMD code objects, by a small table of clocks.

The hot loop is the innermost loop with the most matrix instructions. For each kernel: clocks of the matrix unit and of
the vector unit on one SIMD, their quotient, the bytes that a wave reads from LDS for 64 matrix instructions of 32x32x8
(or as much work), and barriers. Rows of BARS are red if they are missed. The claim is that a loop is no worse than that
of a peer whose speed is known (docs/roofline.md), never a speed.

Clocks: CDNA3 ISA 7.6 (a 16-bit MFMA does 512 floating-point operations a clock and SIMD; CDNA4's wide shapes 1024), a
vector instruction takes 4, a transcendental 16; RDNA3 ISA 7.9: WMMA 32, vector 1, transcendental 4.

usage: ci/loop_audit.py [--tools FOLDER] TARGET FOLDER_OF_CODE_OBJECTS
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s+(\S+)(.*?)//\s*([0-9A-F]+):\s*([0-9A-F]{8})")
MFMA = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)")
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
WORK = 64 * 2 * 32 * 32 * 8  # floating-point operations of 64 MFMA of 32x32x8

# (target, head dim) of kernels in bf16: the quotient of vector and matrix clocks is at most this, LDS KB too; for gfx11
# the share of the matrix unit is at least.
BARS = {"gfx942": (0.88, 32.0), "gfx950": (1.0, None), "gfx11": (None, None)}
LEAST_MATRIX_SHARE = {"gfx11": 0.45}


@dataclass
class Loop:
    """Figures of one loop."""

    matrix: float = 0.0
    vector: float = 0.0
    flops: float = 0.0
    lds_bytes: int = 0
    transposed_reads: int = 0
    barriers: int = 0

    def add(self, name: str, target: str) -> None:
        """Counts one instruction."""
        rdna = target == "gfx11"
        if name.startswith(("v_mfma", "v_wmma")):
            flops, clocks = matrix_cost(name, target)
            self.flops += flops
            self.matrix += clocks
        elif TRANSCENDENTAL.match(name):
            self.vector += 4 if rdna else 16
        elif name.startswith("v_"):
            self.vector += 1 if rdna else 4
        elif name.startswith(("ds_read", "ds_load")):
            self.lds_bytes += (32 if rdna else 64) * read_bytes(name)
            self.transposed_reads += "_tr_" in name
        elif name == "s_barrier":
            self.barriers += 1


def matrix_cost(name: str, target: str) -> tuple[float, float]:
    """Floating-point operations and clocks of a matrix instruction."""
    if target == "gfx11":
        return 2.0 * 16 * 16 * 16, 32.0
    rows, columns, inner = map(int, MFMA.match(name).groups())
    flops = 2.0 * rows * columns * inner
    wide = target == "gfx950" and inner >= (16 if rows == 32 else 32)
    return flops, flops / (1024 if wide else 512)


def read_bytes(name: str) -> int:
    """Bytes of a lane that a read from LDS brings."""
    width = re.search(r"_[bu](\d+)", name)
    return (2 if "read2" in name or "load_2" in name else 1) * int(width[1]) // 8


def kernels(text: str) -> dict[str, list[tuple[int, str, int]]]:
    """(address, instruction, first word) of each kernel of a disassembly."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    current: list[tuple[int, str, int]] = []
    for line in text.splitlines():
        if symbol := re.match(r"^[0-9a-f]+ <(\w+)>:", line):
            current = found.setdefault(symbol[1], [])
        elif match := INSTRUCTION.match(line):
            current.append((int(match[3], 16), match[1], int(match[4], 16)))
    return found


def hot_loop(rows: list[tuple[int, str, int]], target: str) -> Loop | None:
    """The innermost loop with the most matrix instructions."""
    index = {address: i for i, (address, _, _) in enumerate(rows)}
    loops = []
    for end, (address, name, word) in enumerate(rows):
        if not name.startswith(("s_cbranch", "s_branch")):
            continue
        offset = word & 0xFFFF
        begin = index.get(address + 4 + 4 * (offset - 0x10000 if offset > 0x7FFF else offset))
        if begin is None or begin > end:
            continue
        count = sum(row[1].startswith(("v_mfma", "v_wmma")) for row in rows[begin:end])
        if count:
            loops.append((begin, end, count))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    if not inner:
        return None
    # Loops with masks are as long in products and longer in all else.
    begin, end, _ = min(inner, key=lambda a: (-a[2], a[1] - a[0]))
    loop = Loop()
    for _, name, _ in rows[begin : end + 1]:
        loop.add(name, target)
    return loop


def main() -> int:
    """Prints the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default="", metavar="FOLDER", help="where llvm-objdump is; default: PATH")
    parser.add_argument("target", choices=sorted(BARS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    objdump = str(Path(arguments.tools) / "llvm-objdump") if arguments.tools else "llvm-objdump"
    most_quotient, most_kilobytes = BARS[arguments.target]
    missed = []
    print(f"{'kernel':44} matrix vector quotient  share  LDS KB  transposed  barriers")
    for path in sorted(arguments.folder.glob("attention_*.co")):
        text = subprocess.run([objdump, "-d", str(path)], check=True, capture_output=True, text=True).stdout
        for symbol, rows in kernels(text).items():
            if not symbol.endswith("_plain"):
                continue
            loop = hot_loop(rows, arguments.target)
            name = symbol.removeprefix(f"flashport_{arguments.target}_")
            if loop is None:
                missed.append(f"{name}: no loop with matrix instructions")
                continue
            quotient, share = loop.vector / loop.matrix, loop.matrix / (loop.matrix + loop.vector)
            kilobytes = loop.lds_bytes / 1024 * WORK / loop.flops
            print(
                f"{name:44} {loop.matrix:6.0f} {loop.vector:6.0f} {quotient:8.2f} {share:6.2f} {kilobytes:7.1f}"
                f"  {loop.transposed_reads:10}  {loop.barriers:8}"
            )
            if "bf16_128x128" not in name:
                continue
            if most_quotient is not None and quotient > most_quotient:
                missed.append(
                    f"{name}: {quotient:.2f} vector clocks for one of the matrix unit, at most {most_quotient}"
                )
            if most_kilobytes is not None and kilobytes > most_kilobytes:
                missed.append(f"{name}: {kilobytes:.1f} KB from LDS, at most {most_kilobytes}")
            least = LEAST_MATRIX_SHARE.get(arguments.target)
            if least is not None and share < least:
                missed.append(f"{name}: the matrix unit has {share:.2f} of the clocks, at least {least}")
    for text in missed:
        print(text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
