"""flashport doctor: what is installed, what devices there are, and why a backend was not opened."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import click
from rich.table import Table

from flashport import _core, devices
from flashport.cli.common import console, show

_LIBRARIES = ("numpy", "torch", "cupy", "jax", "ml_dtypes", "matplotlib")
_VARIABLES = (
    "FLASHPORT_BACKEND_PATH", "FLASHPORT_CPU_TARGET", "FLASHPORT_NUM_THREADS", "FLASHPORT_CHECK",
    "FLASHPORT_LOG",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


@click.command()
def doctor() -> None:
    """Show backends and devices, and why a backend was not opened."""
    console.print(f"flashport {devices.version()}, Python {platform.python_version()}, {platform.platform()}")
    console.print(f"module {_core.__file__}", soft_wrap=True)
    for name in _VARIABLES:
        if name in os.environ:
            console.print(f"{name}={os.environ[name]}", soft_wrap=True)
    console.print("array libraries: " + ", ".join(_versions()))
    table = Table()
    for heading in ("backend", "compiled targets", "devices", "detail"):
        table.add_column(heading, overflow="fold")
    for backend in devices.backends():
        found = [
            f"{device.device}: {device.name}, {device.memory_bytes / 2**30:.0f} GiB, "
            + (f"target {_target_in_use(device.target)}" if device.target else "no compiled target serves it")
            for device in backend.devices
        ]
        mark = "[green]yes[/]" if backend.available else "[yellow]no[/]"
        table.add_row(
            f"{backend.name}: {mark}", "\n".join(backend.targets) or "-", "\n".join(found) or "-", backend.detail
        )
    show(table)


def _target_in_use(target: str) -> str:
    """The name, and which of several compiled targets it stands for, as the CPU's does."""
    compiled = _core.kernel_keys(target)[0].rpartition("/")[2]  # its own kernels come before those of its base
    return target if compiled == target else f"{target}, here {compiled}"


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name in sys.modules:
                found.append(name)
    return found
