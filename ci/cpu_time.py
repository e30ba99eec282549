#!/usr/bin/env python3
"""Compiler launcher that notes what each kernel source costs to compile, and holds the sums against the budget.

As launcher (CMAKE_CXX_COMPILER_LAUNCHER and its like) it runs the compiler. Where the output's path goes through a
folder kernels/<target>/, it appends "<cpu seconds> <slowness> <output>" to the log; CPU time, so that a busy machine
does not count. Slowness is how many times its seconds a reference takes, a small unit that is compiled for the purpose
before and after a kernel source, at most once in REFERENCE_AGE: beside busy neighbours a compile takes up to half as
long again, and that changes within a minute. As reporter it adds the log up by target; if an output was compiled again,
the last figure counts. A compile fails where ptxas says that it serializes wgmma: such a kernel is right, and several
times slower.

The budgets hold for a machine that compiles the references in their seconds. Where the machine is slower, a unit's time
is divided by its slowness. nvcc has a reference of its own: on one machine that took 0.95 of another's time for g++'s,
nvcc took 1.22 times as long for all of decode. References are small: on processors of other kinds large units, which
need more cache, take up to a fifth longer than their slowness says, so machines at SLOW or above may take SLOW_SHARE of
the budgets.

usage: ci/cpu_time.py LOG COMPILER ARGUMENTS...
       ci/cpu_time.py --report LOG     (exit status 1 where a target or a translation unit is over the budget)
       ci/cpu_time.py --is-slow LOG    (exit status 0 where this machine is SLOW, which it says)
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

OPERATION_MINUTES = {"decode": 4.0, "attention": 3.5}  # of one target's translation units of an operation
TARGET_MINUTES = 15.0
UNIT_SECONDS = 60.0
SLOW = 1.6  # times the seconds of a reference
SLOW_SHARE = 1.2  # of the budgets, on such a machine

# ptxas says so as mere information: "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
# due to ...", with another number for each reason.
SERIALIZED = re.compile(rb"\bC7510\b|\bwgmma.*\bserialized\b")

KERNEL = re.compile(r"kernels/(\w+)/([^/]+)$")  # target and unit


@dataclass(frozen=True)
class Reference:
    """A small unit, the command that compiles it, and in how many seconds."""

    name: str
    seconds: float
    flags: tuple[str, ...]
    source: str


GCC = Reference(
    "gcc",
    0.43,
    ("-std=c++20", "-O2", "-x", "c++"),
    """
#include <functional>
#include <map>
#include <string>
std::map<std::string, std::function<int(int)>> table() { return {{"a", [](int x) { return x + 1; }}}; }
""",
)
NVCC = Reference(
    "nvcc",
    1.04,
    ("-std=c++20", "-O3", "-arch=sm_90a", "-x", "cu"),
    """
template <int kCount>
__device__ void multiply(float (&c)[kCount][4], const unsigned* a, const unsigned* b) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
        : "r"(a[4 * i]), "r"(a[4 * i + 1]), "r"(a[4 * i + 2]), "r"(a[4 * i + 3]), "r"(b[i]), "r"(b[i + 1]));
  }
}
__global__ void reference(const unsigned* a, const unsigned* b, float* out, int steps) {
  float sums[16][4] = {};
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < 8; ++i) multiply(sums, a + 64 * (8 * step + i), b + 32 * i + threadIdx.x);
    for (auto& c : sums) {
      for (float& x : c) x = exp2f(x) + __shfl_xor_sync(~0u, x, 4);
    }
  }
  for (int i = 0; i < 64; ++i) out[64 * threadIdx.x + i] = sums[i / 4][i % 4];
}
""",
)
REFERENCE_AGE = 10.0  # seconds after which it is compiled again


def children_seconds() -> float:
    """CPU time of this process's children so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def slowness(log: Path, compiler: str) -> float:
    """How many times its seconds a reference takes here and now, or took by a file beside ``log`` that is not old."""
    reference = NVCC if Path(compiler).name == "nvcc" else GCC
    known = log.with_suffix(f".{reference.name}")
    if known.exists() and time.time() - known.stat().st_mtime < REFERENCE_AGE:
        return float(known.read_text())
    command = [compiler if reference is NVCC else "g++", *reference.flags, "-c", "-o", os.devnull]
    before = children_seconds()
    with tempfile.NamedTemporaryFile("w", suffix=".cu") as unit:  # nvcc does not read the source from a pipe
        unit.write(reference.source)
        unit.flush()
        subprocess.run([*command, unit.name], check=True)
    slow = (children_seconds() - before) / reference.seconds
    new = known.with_suffix(f".{os.getpid()}")
    new.write_text(f"{slow:.3f}")
    new.replace(known)  # at once, as other launchers read it
    return slow


def run_compiler(command: list[str]) -> tuple[int, bytes]:
    """Runs a compiler, whose stderr is passed on as it comes; its exit status, and what it said there."""
    said = bytearray()
    with subprocess.Popen(command, stderr=subprocess.PIPE) as compiler:
        assert compiler.stderr is not None
        while piece := os.read(compiler.stderr.fileno(), 1 << 16):
            said += piece
            sys.stderr.buffer.write(piece)
            sys.stderr.buffer.flush()
    return compiler.returncode, bytes(said)


def launch(log: Path, command: list[str]) -> int:
    """Runs a compiler and logs its CPU time; 1 where wgmma is serialized."""
    output = Path(command[command.index("-o") + 1]) if "-o" in command else None
    is_kernel = output is not None and KERNEL.search(str(output)) is not None
    before = slowness(log, command[0]) if is_kernel else 0.0
    already = children_seconds()
    status, said = run_compiler(command)
    cost = children_seconds() - already
    if status != 0:
        return status
    if SERIALIZED.search(said):
        print(f"error: ptxas serializes wgmma in {output or 'what was compiled'}", file=sys.stderr)
        if output:
            output.unlink(missing_ok=True)  # as compilers do: else a second build takes it for good
        return 1
    if is_kernel:
        slow = (before + slowness(log, command[0])) / 2
        with log.open("a") as lines:
            lines.write(f"{cost:.2f} {slow:.3f} {output}\n")
    return status


def report(log: Path) -> int:
    """Prints core-minutes per target and the slowest unit of each."""
    measured: dict[str, dict[str, float]] = {}
    counted: dict[str, dict[str, float]] = {}
    for line in log.read_text().splitlines():
        cost, slow, output = line.split(" ", 2)
        if match := KERNEL.search(output):
            measured.setdefault(match[1], {})[match[2]] = float(cost)
            counted.setdefault(match[1], {})[match[2]] = float(cost) / float(slow)
    over = False
    for target, units in sorted(counted.items()):
        times = sum(measured[target].values()) / sum(units.values())
        if times < 1:
            units, times = measured[target], 1.0
        total = sum(units.values()) / 60
        operations = {
            name: sum(cost for unit, cost in units.items() if unit.startswith(name)) / 60 for name in OPERATION_MINUTES
        }
        slowest = max(units, key=units.__getitem__)
        share = SLOW_SHARE if times >= SLOW else 1.0
        over |= total > share * TARGET_MINUTES or units[slowest] > share * UNIT_SECONDS
        over |= any(operations[name] > share * most for name, most in OPERATION_MINUTES.items())
        print(
            f"compile time {target}: {total:.2f} core-minutes in {len(units)} units (budget {TARGET_MINUTES:g}), "
            + "".join(f"{name} {operations[name]:.2f} (budget {most:g}), " for name, most in OPERATION_MINUTES.items())
            + f"slowest {slowest} {units[slowest]:.0f} s (budget {UNIT_SECONDS:g}); "
            f"compiling took {times:.2f} times as long here"
            + (f", so {share:g} times the budgets are let pass" if share > 1 else "")
        )
    if over:
        print("error: over the compile-time budget")
    return 1 if over else 0


def is_slow(log: Path) -> int:
    """Says whether this machine is slow; 0 if it is."""
    slow = min(slowness(log.with_suffix(f".{i}.log"), "g++") for i in range(3))
    print(f"a reference takes g++ {slow:.2f} times its seconds here; from {SLOW:g} on a machine is slow")
    return 0 if slow >= SLOW else 1


def main() -> int:
    """Command line."""
    if sys.argv[1] == "--report":
        return report(Path(sys.argv[2]))
    if sys.argv[1] == "--is-slow":
        return is_slow(Path(sys.argv[2]))
    return launch(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
