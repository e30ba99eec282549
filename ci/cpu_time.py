#!/usr/bin/env python3
"""Compiler launcher that notes what each kernel source costs to compile, and holds the sums against the budget.

As launcher (CMAKE_CXX_COMPILER_LAUNCHER and its like) it runs the compiler and appends "<cpu seconds> <output>" to the
log; CPU time, so that a busy machine does not count. As reporter it adds the log up by target: an output belongs to the
target whose folder kernels/<target>/ its path goes through. If an output was compiled again, the last figure counts.

usage: ci/cpu_time.py LOG COMPILER ARGUMENTS...
       ci/cpu_time.py --report LOG     (exit status 1 where a target or a translation unit is over the budget)
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

OPERATION_MINUTES = {"decode": 4.0, "attention": 3.5}  # of one target's translation units of an operation
TARGET_MINUTES = 15.0
UNIT_SECONDS = 60.0


def launch(log: Path, command: list[str]) -> int:
    """Runs a compiler and logs its CPU time."""
    status = subprocess.run(command, check=False).returncode
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status == 0 and "-o" in command:
        output = command[command.index("-o") + 1]
        with log.open("a") as lines:
            lines.write(f"{usage.ru_utime + usage.ru_stime:.2f} {output}\n")
    return status


def report(log: Path) -> int:
    """Prints core-minutes per target and the slowest unit of each."""
    seconds: dict[str, float] = {}
    for line in log.read_text().splitlines():
        cost, output = line.split(" ", 1)
        seconds[output] = float(cost)
    targets: dict[str, dict[str, float]] = {}
    for output, cost in seconds.items():
        if match := re.search(r"kernels/(\w+)/([^/]+)$", output):
            targets.setdefault(match[1], {})[match[2]] = cost
    over = False
    for target, units in sorted(targets.items()):
        total = sum(units.values()) / 60
        operations = {
            name: sum(cost for unit, cost in units.items() if unit.startswith(name)) / 60 for name in OPERATION_MINUTES
        }
        slowest = max(units, key=units.__getitem__)
        over |= total > TARGET_MINUTES or units[slowest] > UNIT_SECONDS
        over |= any(operations[name] > most for name, most in OPERATION_MINUTES.items())
        print(
            f"compile time {target}: {total:.2f} core-minutes in {len(units)} units (budget {TARGET_MINUTES:g}), "
            + "".join(f"{name} {operations[name]:.2f} (budget {most:g}), " for name, most in OPERATION_MINUTES.items())
            + f"slowest {slowest} {units[slowest]:.0f} s (budget {UNIT_SECONDS:g})"
        )
    if over:
        print("error: over the compile-time budget")
    return 1 if over else 0


def main() -> int:
    """Command line."""
    if sys.argv[1] == "--report":
        return report(Path(sys.argv[2]))
    return launch(Path(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
