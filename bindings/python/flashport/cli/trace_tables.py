"""Tables and the plot of ``flashport trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from flashport.cli.common import console
from flashport.trace._statistics import statistics


def _number(value: float) -> str:
    return f"{value:.4g}"


def print_tensors(step: Any, tensors: list[Any]) -> None:
    """A table of a step's tensors, three lines each: what it is, how it lies, and what its values are like."""
    softcap = f", softcap {step.softcap:g}" if step.softcap else ""
    bias = f", max_bias {step.max_bias:g}" if step.max_bias else ""
    scale = "scale 1/sqrt(D)" if step.scale is None else f"scale {step.scale:g}"
    called = f", {step.operation}({step.options})" if step.operation else ""
    title = f"step {step.number}, layer {step.layer}, {step.kind}, {scale}{softcap}{bias}{called}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    for tensor in tensors:
        nb = "undecided" if tensor.nb is None else str(list(tensor.nb))
        role = tensor.role if tensor.is_operand else f"{tensor.role}, earlier link"
        one = f"  {role}: {tensor.name}  [{tensor.chain}]  {tensor.type}"
        two = f"    ne {list(tensor.ne)}, NumPy {tensor.shape}, nb {nb}"
        found = statistics(tensor.values())
        names = ("mean", "std", "min", "max", "sum")
        three = "    " + ", ".join(f"{name} {_number(getattr(found, name))}" for name in names)
        three += f", NaN {found.nan_count}, infinite {found.inf_count}"
        for line in (one, two, three):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def comparison(name: str) -> Table:
    """The table of compare and test, without rows."""
    table = Table(
        title=f"{name}: against the fp64 reference", caption="relative: max abs over the reference's largest value"
    )
    table.add_column("step")
    table.add_column("result")
    for heading in ("max abs", "relative", "cosine", "sum", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("keys and values")
    return table


def add_refused(table: Table, step: Any, what: str, reason: str) -> None:
    """A row of an operator that did not run."""
    table.add_row(_step_text(step), what, "", "", "", "", "", reason)


def add_comparison(table: Table, step: Any, what: str, way: str, apart: Any, allowed: float) -> None:
    """A row of a result."""
    numbers = (_number(apart.max_abs), _number(apart.relative), f"{apart.cosine:.7f}", _number(apart.sum))
    style = None if apart.within(allowed) else "red"
    table.add_row(_step_text(step), what, *numbers, _number(allowed), way, style=style)


def _step_text(step: Any) -> str:
    return f"{step.number}, layer {step.layer}, {step.kind}"


def difference(first: str, second: str) -> Table:
    """The table of diff, without rows."""
    table = Table(title=f"{first} and {second}")
    table.add_column("step")
    table.add_column("tensor")
    table.add_column("operations")
    for heading in ("max abs", "relative", "cosine", "sum"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def add_difference(table: Table, step: Any, tensor: Any, parting: Any, apart: Any) -> None:
    """A row of a tensor of both traces."""
    style = None if parting is None else "red"
    numbers = ("", "", "", "")
    if apart is not None:
        numbers = (_number(apart.max_abs), _number(apart.relative), f"{apart.cosine:.7f}", _number(apart.sum))
    table.add_row(_step_text(step), tensor.role, tensor.chain, *numbers, style=style)


def plot_endings() -> list[str]:
    """The endings of files that matplotlib can write."""
    from matplotlib.backend_bases import FigureCanvasBase

    return [f".{kind}" for kind in sorted(FigureCanvasBase.get_supported_filetypes())]


def plot(errors: list[tuple[Any, Any]], name: str, path: Path) -> None:
    """Draws the largest error of each step and head; needs matplotlib."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure  # no display, no global state

    heads = max(len(row) for _, row in errors)
    grid = np.full((len(errors), heads), np.nan)
    for place, (_, row) in enumerate(errors):
        grid[place, : len(row)] = row
    finite = grid[np.isfinite(grid) & (grid > 0)]
    norm = LogNorm(finite.min(), max(finite.max(), finite.min() * 10)) if finite.size else None
    figure = Figure(figsize=(2.5 + 0.3 * heads, 1.5 + 0.25 * len(errors)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.where(grid > 0, grid, np.nan), aspect="auto", norm=norm)
    axes.set_yticks(range(len(errors)), [f"{step.number} (layer {step.layer})" for step, _ in errors], fontsize=8)
    axes.set_xlabel("head")
    axes.set_ylabel("step")
    axes.set_title(f"{name}: largest error of the recorded output", fontsize=10)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=150)
