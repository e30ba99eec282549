"""What the commands share: the console and its tables, the choice of a device, and numbers as text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console, ConsoleDimensions
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table

from flashport import devices
from flashport.testing import oracle

_TABLE_WIDTH = 80  # what the tables are laid out for
_FILE_WIDTH = 160  # what the widest of them takes


class _Console(Console):
    """A console whose lines are long where its output is a pipe or a file, which have no width, and COLUMNS is none."""

    @property
    def size(self) -> ConsoleDimensions:
        """As Console."""
        found = super().size
        if self._width is not None or self.is_terminal or os.environ.get("COLUMNS", "").isdigit():
            return found
        return ConsoleDimensions(_FILE_WIDTH, found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


# With NO_COLOR no escape code at all: rich alone would keep those of bold and dim.
console = _Console(color_system=None if os.environ.get("NO_COLOR") else "auto")


def show(table: Table, names: int = 1) -> None:
    """Prints a table; on a terminal too narrow for it its rows as lists, headed by what is in so many first columns."""
    least = Measurement.get(console, console.options.update(width=10 * _FILE_WIDTH), table).minimum
    if console.width >= max(_TABLE_WIDTH, least):
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="bold", highlight=False)
    headings = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        labelled = [f"{heading} {cell}".strip() for heading, cell in zip(headings, row, strict=True)]
        console.print(", ".join(labelled[:names]) if names > 1 else row[0], highlight=False)
        rest = [f"{heading}: {cell}" for heading, cell in zip(headings[names:], row[names:], strict=True) if cell]
        console.print(Padding("; ".join(rest), (0, 0, 0, 2), expand=False), highlight=False)
    if table.caption:
        console.print(table.caption, style="dim", highlight=False)


class _OutputFile(click.Path):
    """A file to write in a folder that is there: whoever waits for the figures learns of a wrong path before them."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """As click.Path."""
        path = super().convert(value, param, ctx)
        folder = path.absolute().parent
        if not os.access(folder, os.W_OK):
            self.fail(f"{path} cannot be written: no folder {folder} that may be written to", param, ctx)
        return path


OUTPUT_FILE = _OutputFile()


@dataclass(frozen=True)
class ChosenDevice:
    """A device that a target serves."""

    device: str
    name: str
    target: str
    multiprocessors: int

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host."""
        return self.device == "cpu"

    @property
    def title(self) -> str:
        """Name and target in one line."""
        unit = "threads" if self.is_cpu else "multiprocessors"
        return f"{self.name} ({self.device}, target {self.target}, {self.multiprocessors} {unit})"


def served_devices() -> list[ChosenDevice]:
    """All devices that a target of this build serves, GPUs first; there is at least one."""
    backends = devices.backends()
    found = [
        ChosenDevice(device.device, device.name, device.target, device.multiprocessors)
        for backend in backends
        for device in backend.devices
        if device.target
    ]
    if not found:
        reasons = "".join(f"\n  {backend.name}: {backend.detail}" for backend in backends)
        raise click.ClickException(f"there is no device to run on:{reasons}")
    return sorted(found, key=lambda device: device.is_cpu)


def choose_device(name: str | None) -> ChosenDevice:
    """The device named, or the first GPU, or the CPU."""
    found = served_devices()
    if name is None:
        return found[0]
    wanted = name if ":" in name or name == "cpu" else f"{name}:0"
    for device in found:
        if device.device == wanted:
            return device
    known = ", ".join(device.device for device in found)
    raise click.BadParameter(f"no such device: {name}; there are {known} (flashport doctor says why others are not)")


device_option = click.option(
    "--device", "device_name", metavar="NAME", help="cpu, cuda:0, hip:0, ... [default: a GPU, else the CPU]"
)


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def rate_text(count: float, seconds: float) -> str:
    """Bytes over seconds, in GB/s."""
    return f"{count / seconds / 1e9:.1f}"


def share_text(seconds: float, ceiling: float | None) -> str:
    """How much of the read rate a call of this time reaches."""
    return "no read kernel" if ceiling is None else f"{100 * ceiling / seconds:.0f} %"


class Report:
    """A demo's table, and what of it is wrong."""

    def __init__(self, table: Table, failures: list[str], scope: str) -> None:
        """``scope`` says over what the errors were taken."""
        self._table = table
        self._failed = bool(failures)
        self._verdict = (
            "[bold red]wrong:[/] " + "; ".join(failures)
            if failures
            else f"[bold green]correct:[/] every error is at most {oracle.ERROR_RATIO} times that of a plain bf16 "
            f"implementation, both against fp64 over {scope}"
        )

    def print(self) -> None:
        """Prints both; where anything is wrong the command fails."""
        show(self._table)
        console.print(self._verdict)
        if self._failed:
            raise SystemExit(1)
