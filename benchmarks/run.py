#!/usr/bin/env python3
"""Runs the benchmark of an installed flashport, writes benchmarks/results/<device>.json and judges it by bars.csv.

The table beside it, <device>.md, has each row with its figures, bars and whether they are met.

    python benchmarks/run.py [--device cuda:0] [--rounds 9] [--match TEXT] [--plot]
    python benchmarks/run.py --grid [--device cuda:0] [--rounds 7] [--shapes REGEX] [--limit N] [--list]

With --grid it times the decode shapes of decode_grid/shapes.py beside all peers that are installed, and writes
<device>-grid.json, .md and, as a heat map, .svg.

The harness is flashport.benchmarks; this script adds where results lie and what they are held against. bars.csv names a
row, which may be a shape or a class of the grid, and one of its figures: `ratio` (our time over the best peer's),
`seconds`, `host_seconds`, `inverse_share` (our time over the plain read's) and `time_of` (over that of another row,
`against`) are at most the bar; `share` (of the plain read's rate), `bytes_per_second`, `rate_of` and `speedup_of`
(bytes a second, and time, against another row) at least. The bars are for one NVIDIA H200.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from decode_grid import report as grid_report
from decode_grid import shapes as grid_shapes
from decode_grid.shapes import Shape
from verdict import Verdict, slug

HERE = Path(__file__).resolve().parent


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


def print_verdicts(verdicts: list[Verdict]) -> None:
    """One line for each."""
    for verdict in verdicts:
        sign = ">=" if verdict.at_least else "<="
        mark = "met " if verdict.met else "MISS"
        print(f"{mark} {verdict.figure:>16} {verdict.value:9.4g} {sign} {verdict.bar:<7g} {verdict.why}")


def list_grid(chosen: list[Shape]) -> str:
    """The shapes that --grid would time, and how many there are."""
    lines = [f"{s.name:<44} {s.bytes / 1e6:9.1f} MB  {'; '.join(s.classes) or 'beside'}" for s in chosen]
    in_grid = sum(shape.in_grid for shape in chosen)
    return "\n".join([*lines, f"{in_grid} shapes of the grid and {len(chosen) - in_grid} beside it"])


def grid_page(result: dict, chosen: list[Shape], verdicts: list[Verdict], picture: str) -> str:
    """The grid's results as Markdown."""
    found, rows = result["environment"], result["rows"]
    versions = ", ".join(f"{name} {found[name]}" for name in grid_report.SOFTWARE if name in found)
    parts = [
        f"# The decode grid on {result['device']['name']}",
        f"`{found['command']}`, {found['time']}, {versions}; rounds: {result['rounds']}. Ratios are our time over the "
        "best peer's.",
        grid_report.statistics_table(rows),
        f"![Heat map of the ratios]({picture})",
    ]
    if verdicts:
        lines = [f"| {verdict.why} | {verdict.text()} |" for verdict in verdicts]
        parts.append("\n".join(["| bar | figure |", "| --- | --- |", *lines]) + "\n")
    parts += ["## Beside their bases", grid_report.pairs_table(chosen, rows)]
    parts += ["## All shapes", grid_report.rows_table(rows)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def run_grid(arguments: argparse.Namespace, chosen: list[Shape]) -> None:
    """Times the grid, writes its results and judges them."""
    import click

    from decode_grid import measure  # these need flashport, which --list does not
    from flashport.benchmarks import harness
    from flashport.cli.common import choose_device

    try:
        device, rounds = choose_device(arguments.device), int(arguments.rounds or 7)
    except click.ClickException as error:
        raise SystemExit(error.format_message()) from None
    rows = []
    for row in measure.run(chosen, device.device, device.target, rounds, arguments.seconds):
        rows.append(row)
        print(grid_report.line(row), flush=True)
    result = {"device": vars(device), "environment": harness.environment(device.device), "rounds": rounds, "rows": rows}
    result["environment"]["command"] = "python benchmarks/run.py " + " ".join(sys.argv[1:])
    path = arguments.out or HERE / "results" / f"{slug(device.name)}-grid.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    picture = path.with_suffix(".svg")
    grid_report.heat_map(chosen, rows, f"decode, our time over the best peer's: {device.title}", str(picture))
    # A class is judged as a whole.
    of_classes = grid_report.class_rows(chosen, rows) if chosen == grid_shapes.select() else []
    verdicts = judge({"rows": [*rows, *of_classes]}) if device.target == "sm90a" else []
    path.with_suffix(".md").write_text(grid_page(result, chosen, verdicts, picture.name))
    print(f"results: {path}\n\n{grid_report.statistics_table(rows)}")
    print_verdicts(verdicts)
    without = sum(shape.in_grid and not row["ratio"] for shape, row in zip(chosen, rows, strict=True))
    if without:
        print(f"{without} shapes of the grid have no ratio: the page and the JSON say why")
    wrong = [row["title"] for row in rows if row["wrong"]]
    if wrong:
        print(f"WRONG or failed: {'; '.join(wrong)}")
    if wrong or not all(verdict.met for verdict in verdicts):
        raise SystemExit(1)


def main() -> None:
    """Runs the benchmark and judges it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    parser.add_argument("--rounds", help="interleaved rounds [default: 9, and 7 with --grid]")
    parser.add_argument("--match", default="")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path, help="the results file [default: by the device's name]")
    grid = parser.add_argument_group("the grid")
    grid.add_argument("--grid", action="store_true", help="time the grid of decode shapes")
    grid.add_argument("--list", action="store_true", help="print the shapes that --grid would time; needs no device")
    grid.add_argument("--shapes", default="", metavar="REGEX", help="only those whose name or title it is found in")
    grid.add_argument("--limit", type=int, metavar="N", help="only the first N of them")
    grid.add_argument("--seconds", type=float, default=330, help="begin no shape later than this [default: 330]")
    arguments = parser.parse_args()
    if arguments.grid or arguments.list:
        try:
            chosen = grid_shapes.select(arguments.shapes, arguments.limit)
        except re.error as error:
            parser.error(f"--shapes: {arguments.shapes!r} is no regular expression: {error}")
        if not chosen:
            parser.error(f"--shapes: {arguments.shapes!r} is in no name or title of a shape; --list has all")
        if arguments.list:
            print(list_grid(chosen))
        elif importlib.util.find_spec("matplotlib") is None:
            parser.error("--grid draws a heat map, which needs matplotlib: pip install 'flashport[bench]'")
        else:
            run_grid(arguments, chosen)
        return

    results = HERE / "results"
    results.mkdir(exist_ok=True)
    fresh = results / "latest.json"
    command = [sys.executable, "-c", "from flashport.cli import main; main()", "bench", "--json", str(fresh)]
    command += ["--rounds", arguments.rounds or "9", "--match", arguments.match]
    command += ["--device", arguments.device] if arguments.device else []
    if arguments.plot:
        command += ["--plot", str(fresh.with_suffix(".png"))]
    subprocess.run(command, check=True)

    result = json.loads(fresh.read_text())
    result["environment"]["command"] = "python benchmarks/run.py " + " ".join(sys.argv[1:])
    path = arguments.out or results / f"{slug(result['device']['name'])}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    fresh.unlink()
    if arguments.plot:
        fresh.with_suffix(".png").rename(path.with_suffix(".png"))
    verdicts = judge(result) if result["device"]["target"] == "sm90a" else []
    path.with_suffix(".md").write_text(table(result, verdicts))
    print(f"results: {path}")
    print_verdicts(verdicts)
    if not all(verdict.met for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
