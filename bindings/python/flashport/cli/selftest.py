"""flashport selftest: the shipped correctness cases on every device, and one report file."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from pathlib import Path

import click
import numpy as np
from rich.progress import track

from flashport import devices
from flashport.cli.common import OUTPUT_FILE, choose_device, console, served_devices
from flashport.testing import selfcheck


@click.command()
@click.option("--device", "device_name", metavar="NAME", help="cpu, cuda:0, hip:0, ... [default: every one here]")
@click.option("--full", is_flag=True, help="Every case of the list; takes some minutes.")
@click.option("--match", default="", metavar="TEXT", help="Only checks whose name contains this.")
@click.option(
    "--report",
    type=OUTPUT_FILE,
    default=Path("flashport-selftest.json"),
    show_default=True,
    help="The file to write.",
)
def selftest(device_name: str | None, full: bool, match: str, report: Path) -> None:
    """Run the shipped correctness cases on every device here (or one), and write a report to send."""
    chosen = [choose_device(device_name)] if device_name else served_devices()
    tiers = ("emulator", "full") if full else ("emulator",)
    result = {
        "flashport": devices.version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "backends": [
            {"name": b.name, "available": b.available, "targets": b.targets, "detail": b.detail}
            for b in devices.backends()
        ],
        "tiers": tiers,
        "devices": [],
    }
    checks_of = {
        device.device: [check for check in selfcheck.checks(device.device, device.target, tiers) if match in check.name]
        for device in chosen
    }
    if not any(checks_of.values()):
        raise click.BadParameter(f"no check contains {match!r}", param_hint="--match")
    failed = 0
    for device in chosen:
        console.print(f"[bold]{device.title}[/]")
        checks = checks_of[device.device]
        start = time.perf_counter()
        outcomes = [check.run() for check in track(checks, description=device.device, console=console, transient=True)]
        counts = {status: sum(o.status == status for o in outcomes) for status in ("passed", "unsupported", "failed")}
        for outcome in outcomes:
            if outcome.status == "failed":
                console.print(f"  [red]failed[/] {outcome.name}: {outcome.detail}", soft_wrap=True)
        seconds = time.perf_counter() - start
        console.print(
            "  " + ", ".join(f"{count} {status}" for status, count in counts.items()) + f" in {seconds:.0f} s"
        )
        result["devices"].append(
            {
                "device": device.device,
                "name": device.name,
                "target": device.target,
                "multiprocessors": device.multiprocessors,
                "counts": counts,
                "seconds": round(seconds, 1),
                "checks": [vars(outcome) for outcome in outcomes],
            }
        )
        declined = Counter(outcome.detail for outcome in outcomes if outcome.status == "unsupported")
        for reason, count in declined.items():
            console.print(f"  {count} unsupported: {reason}", soft_wrap=True, highlight=False)
        failed += counts["failed"]
    report.write_text(json.dumps(result, indent=1, default=str) + "\n")
    console.print(f"report: {report}", soft_wrap=True)
    if failed:
        raise SystemExit(1)
