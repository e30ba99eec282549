#!/usr/bin/env python3
"""Runs the benchmark of an installed flashport, writes benchmarks/results/<device>.json and judges it by bars.csv.

The table beside it, <device>.md, has each row with its figures, bars and whether they are met.

    python benchmarks/run.py [--device cuda:0] [--rounds 9] [--match TEXT] [--plot]

The harness is flashport.benchmarks; this script adds where results lie and what they are held against. bars.csv names a
row and one of its figures: `ratio` (our time over the best peer's), `seconds`, `host_seconds`, `inverse_share` (our
time over the plain read's) and `time_of` (over that of another row, `against`) are at most the bar; `share` (of the
plain read's rate), `bytes_per_second`, `rate_of` and `speedup_of` (bytes a second, and time, against another row) at
least. The bars are for one NVIDIA H200.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
AT_LEAST = ("bytes_per_second", "share", "rate_of", "speedup_of")
# How the table says a figure: words around it and the row that it is against, its factor, its digits.
SPELLED = {
    "ratio": ("{} of the best peer's time", 1, 3),
    "seconds": ("{} us", 1e6, 1),
    "host_seconds": ("{} us of host time", 1e6, 1),
    "inverse_share": ("{} of the read's time", 1, 3),
    "share": ("{}% of the read rate", 100, 1),
    "bytes_per_second": ("{} TB/s", 1e-12, 2),
    "rate_of": ("{}% of the rate of {}", 100, 1),
    "speedup_of": ("{} times as fast as {}", 1, 2),
    "time_of": ("{} of the time of {}", 1, 3),
}


def figure(name: str, row: dict, against: dict | None = None) -> float | None:
    """A figure of a row, or None where it was not measured."""
    if name in ("rate_of", "speedup_of", "time_of"):
        if not row["seconds"] or against is None or not against["seconds"]:
            return None
        time = row["seconds"] / against["seconds"]
        return {"rate_of": row["bytes"] / against["bytes"] / time, "speedup_of": 1 / time, "time_of": time}[name]
    if name == "bytes_per_second":
        return row["bytes"] / row["seconds"] if row["seconds"] else None
    if name == "inverse_share":
        return 1 / row["share"] if row["share"] else None
    return row[name]


@dataclass
class Verdict:
    """A figure beside its bar."""

    row: str
    figure: str
    value: float
    bar: float
    why: str
    against: str = ""  # title of the row that the figure is against

    @property
    def at_least(self) -> bool:
        """Whether larger is better."""
        return self.figure in AT_LEAST

    @property
    def met(self) -> bool:
        """Whether the bar is."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def text(self) -> str:
        """As the table has it."""
        words, scale, digits = SPELLED[self.figure]
        limit = f"{'at least' if self.at_least else 'at most'} {self.bar * scale:g}"
        said = words.format(f"{self.value * scale:.{digits}f}", self.against)
        return f"{said} ({limit}: {'met' if self.met else '**missed**'})"


def judge(result: dict) -> list[Verdict]:
    """The bars of the rows that were measured."""
    rows = {row["name"]: row for row in result["rows"]}
    verdicts = []
    with (HERE / "bars.csv").open(newline="") as file:
        for bar in csv.DictReader(file):
            row, against = rows.get(bar["name"]), rows.get(bar["against"])
            value = figure(bar["figure"], row, against) if row and not row["skipped"] else None
            if value is not None:
                title = against["title"] if against else ""
                verdicts.append(Verdict(bar["name"], bar["figure"], value, float(bar["bar"]), bar["why"], title))
    return verdicts


def table(result: dict, verdicts: list[Verdict]) -> str:
    """The rows as Markdown."""

    def microseconds(seconds: float | None) -> str:
        return f"{seconds * 1e6:.1f}" if seconds else "-"

    head = ["batch x keys, heads, head_dim, types, cache", "ours (us)", "peers (us)", "of read rate"]
    head.append("held against its bar")
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in result["rows"]:
        if row["skipped"]:
            continue
        peers = [f"{name} {microseconds(seconds)}" for name, seconds in row["peers"].items()]
        peers += [f"{name} failed" for name in row["peers_failed"]]
        cells = [row["title"], microseconds(row["seconds"]), ", ".join(peers) or "-"]
        cells.append(f"{row['share']:.1%}" if row["share"] else "-")
        cells.append("; ".join(verdict.text() for verdict in verdicts if verdict.row == row["name"]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
    verdicts = judge(result) if result["device"]["target"] == "sm90a" else []
    path.with_suffix(".md").write_text(table(result, verdicts))
    print(f"results: {path}")
    for verdict in verdicts:
        sign = ">=" if verdict.at_least else "<="
        mark = "met " if verdict.met else "MISS"
        print(f"{mark} {verdict.figure:>16} {verdict.value:9.4g} {sign} {verdict.bar:<7g} {verdict.why}")
    if not all(verdict.met for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
