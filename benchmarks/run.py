#!/usr/bin/env python3
"""Runs the benchmark of an installed flashport, writes benchmarks/results/<device>.json and judges it by bars.csv.

    python benchmarks/run.py [--device cuda:0] [--rounds 9] [--match TEXT] [--plot]

The harness is flashport.bench; this script adds where results lie and what they are held against. bars.csv names a
row and one of its figures: `ratio` (our time over the best peer's), `seconds`, `host_seconds` and `inverse_share` (our
time over the plain read's) are at most the bar; `share` (of the plain read's rate), `rate_of_b000` and
`speedup_of_b000` (bytes a second, and time, against the first row) at least. The bars are for one NVIDIA H200.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
AT_LEAST = ("share", "rate_of_b000", "speedup_of_b000")


def figure(name: str, row: dict, rows: dict[str, dict]) -> float | None:
    """A figure of a row, or None where it was not measured."""
    first = next((other for other in rows.values() if other["name"].startswith("b000_")), None)
    if name == "inverse_share":
        return 1 / row["share"] if row["share"] else None
    if name.endswith("_of_b000"):
        if not row["seconds"] or first is None or not first["seconds"]:
            return None
        speedup = first["seconds"] / row["seconds"]
        return speedup if name.startswith("speedup") else speedup * row["bytes"] / first["bytes"]
    return row[name]


def judge(result: dict) -> bool:
    """Prints each bar beside its figure; whether none is missed."""
    rows = {row["name"]: row for row in result["rows"]}
    good = True
    with (HERE / "bars.csv").open(newline="") as file:
        for bar in csv.DictReader(file):
            row = rows.get(bar["name"])
            value = figure(bar["figure"], row, rows) if row and not row["skipped"] else None
            if value is None:
                continue
            limit = float(bar["bar"])
            met = value >= limit if bar["figure"] in AT_LEAST else value <= limit
            good = good and met
            sign = ">=" if bar["figure"] in AT_LEAST else "<="
            print(f"{'met ' if met else 'MISS'} {bar['figure']:>16} {value:9.4g} {sign} {limit:<7g} {bar['why']}")
    return good


def main() -> None:
    """Runs the benchmark and judges it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--rounds", default="9")
    parser.add_argument("--match", default="")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, help="the results file [default: by the device's name]")
    arguments = parser.parse_args()

    results = HERE / "results"
    results.mkdir(exist_ok=True)
    fresh = results / "latest.json"
    command = [sys.executable, "-c", "from flashport.cli import main; main()", "bench", "--json", str(fresh)]
    command += ["--rounds", arguments.rounds, "--match", arguments.match]
    command += ["--device", arguments.device] if arguments.device else []
    if arguments.plot:
        command += ["--plot", str(fresh.with_suffix(".png"))]
    subprocess.run(command, check=True)

    result = json.loads(fresh.read_text())
    result["environment"]["command"] = "python benchmarks/run.py " + " ".join(sys.argv[1:])
    slug = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    path = arguments.out or results / f"{slug}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    fresh.unlink()
    if arguments.plot:
        fresh.with_suffix(".png").rename(path.with_suffix(".png"))
    print(f"results: {path}")
    if result["device"]["target"] == "sm90a" and not judge(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
