#!/usr/bin/env python3
"""Holds the size of a target's device code, as it is shipped, against the budget.

usage: ci/binary_size.py TARGET FILE...     (exit status 1 where the files are over the budget together)
"""

from __future__ import annotations

import sys
from pathlib import Path

TARGET_MEGABYTES = 20.0


def main() -> int:
    """Command line."""
    target, *files = sys.argv[1:]
    megabytes = sum(Path(file).stat().st_size for file in files) / 1e6
    print(f"binary size {target}: {megabytes:.1f} MB (budget {TARGET_MEGABYTES:g})")
    if megabytes > TARGET_MEGABYTES:
        print("error: over the budget of a target's binary")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
