"""flashport bench: the bench tier of the case list, with peers where they are installed."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import click
from rich.progress import track
from rich.table import Table

from flashport.benchmarks import append, attention, cascade, decode, gated_delta, harness, mixed
from flashport.cli.common import (
    OUTPUT_FILE,
    ChosenDevice,
    choose_device,
    console,
    device_option,
    rate_text,
    seconds_text,
    share_text,
    show,
)

_CPU_BYTES, _CPU_FLOPS = 300e6, 2e10  # a CPU's run leaves larger cases out unless one is named


@click.command()
@device_option
@click.option("--match", default="", metavar="TEXT", help="Only cases whose name or shape contains this.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=1), help="Interleaved rounds.")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the figures here.")
@click.option("--plot", "plot_path", type=OUTPUT_FILE, help="Draw them to a PNG file.")
def bench(device_name: str | None, match: str, rounds: int, json_path: Path | None, plot_path: Path | None) -> None:
    """Time attention, flash decoding and the gated delta rule beside peers, and what reads most beside a plain read.

    Peers are torch's attention, SGLang and flash-linear-attention, where they are installed.
    """
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'flashport[bench]'")
    device = choose_device(device_name)
    console.print(f"[bold]{device.title}[/]")
    largest, most = (_CPU_BYTES, _CPU_FLOPS) if device.is_cpu and not match else (float("inf"),) * 2
    where = device.device, device.target, rounds
    runs = [partial(decode.run_case, case, *where, largest) for case in decode.cases(match)]
    if match in decode.STAGE2 or match in decode.STAGE2_TITLE:
        runs.append(partial(decode.run_stage2, *where))
    runs += [partial(append.run_case, case, *where, largest) for case in append.cases(match)]
    runs += [partial(mixed.run_case, case, *where, largest) for case in mixed.cases(match)]
    runs += [partial(cascade.run_case, case, *where, largest) for case in cascade.cases(match)]
    runs += [partial(gated_delta.run_case, case, *where, largest) for case in gated_delta.cases(match)]
    runs += [partial(attention.run_case, case, *where, most) for case in attention.cases(match, device.is_cpu)]
    rows = [run() for run in track(runs, description="cases", console=console, transient=True)]
    if not rows:
        raise click.BadParameter(f"no case contains {match!r}", param_hint="--match")
    show(_table(rows))
    for row in rows:
        if row.skipped:
            console.print(f"skipped {row.title}: {row.skipped}", style="dim", highlight=False, soft_wrap=True)
        for name, reason in row.peers_failed.items():
            text = f"no figure of {name} for {row.title}: {reason}"
            console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
    if json_path is not None:
        json_path.write_text(json.dumps(_result(device, rounds, rows), indent=1) + "\n")
    if plot_path is not None:
        harness.plot(rows, device.title, str(plot_path))


def _table(rows: list[harness.Row]) -> Table:
    table = Table(caption="ratio: our time over the best peer's, medians of interleaved rounds")
    table.add_column("requests, q/kv heads, head dim, types, cache or mask")
    for heading in ("time", "GB/s", "TFLOP/s", "of read rate", "peers", "ratio", "host"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.seconds is None:
            continue
        table.add_row(
            row.title,
            seconds_text(row.seconds),
            "" if row.flops else rate_text(row.bytes, row.seconds),
            f"{row.flops / row.seconds / 1e12:.3g}" if row.flops else "",
            "" if row.read_seconds is None else share_text(row.seconds, row.read_seconds),
            "\n".join(f"{name} {seconds_text(seconds)}" for name, seconds in row.peers.items()),
            "" if row.ratio is None else f"{row.ratio:.3f}",
            "" if row.host_seconds is None else seconds_text(row.host_seconds),
        )
    return table


def _result(device: ChosenDevice, rounds: int, rows: list[harness.Row]) -> dict[str, object]:
    return {
        "device": vars(device),
        "environment": harness.environment(device.device),
        "rounds": rounds,
        "rows": [{**vars(row), "ratio": row.ratio, "share": row.share} for row in rows],
    }
