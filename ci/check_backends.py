#!/usr/bin/env python3
"""Checks that backend libraries link nothing that could load a second runtime, and export one function alone.

usage: ci/check_backends.py LIBRARY...
"""

from __future__ import annotations

import re
import subprocess
import sys

ALLOWED = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so|ld-linux")
ENTRY = "flashport_backend"


def output_of(*command: str) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Command line."""
    status = 0
    for library in sys.argv[1:]:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-dW", library))
        shown = [line.split(" ")[0] for line in output_of("nm", "-D", "--defined-only", "-P", library).splitlines()]
        wrong = [f"links {name}" for name in needed if not ALLOWED.match(name)]
        wrong += [f"shows {name}" for name in shown if name != ENTRY]
        if ENTRY not in shown:
            wrong.append(f"does not show {ENTRY}")
        print(*(f"error: {library}: {text}" for text in wrong), sep="\n", end="\n" if wrong else "")
        print(f"{library}: links {', '.join(needed)}")
        status |= bool(wrong)
    return status


if __name__ == "__main__":
    sys.exit(main())
