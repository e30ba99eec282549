"""What is said of a measured grid: statistics of classes, pairs of rows, tables, and the heat map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from decode_grid.shapes import Shape

Row = dict[str, Any]
SOFTWARE = ("flashport", "torch", "cuda", "cudnn", "flashinfer-python", "flash-attn")  # of the environment
_FIGURES = ("geomean", "p90", "worst")


@dataclass(frozen=True)
class Statistics:
    """Ratios of our time to the best peer's over the shapes of a class."""

    shapes: int
    geomean: float
    p90: float  # nearest rank: nine tenths of the shapes are at or below it
    worst: float
    worst_title: str


def statistics(ratios: dict[str, float]) -> Statistics:
    """Of at least one ratio by its title."""
    ordered = sorted(ratios.items(), key=lambda item: item[1])
    values = [value for _, value in ordered]
    geomean = math.exp(math.fsum(map(math.log, values)) / len(values))
    title, worst = ordered[-1]
    return Statistics(len(values), geomean, values[math.ceil(0.9 * len(values)) - 1], worst, title)


def class_statistics(rows: list[Row]) -> dict[str, Statistics]:
    """Statistics of each class that has a ratio, in the order in which rows name them."""
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        for name in row["classes"]:
            if row["ratio"]:
                ratios.setdefault(name, {})[row["title"]] = row["ratio"]
    return {name: statistics(values) for name, values in ratios.items()}


def pairs(shapes: list[Shape], rows: list[Row]) -> list[tuple[str, Row, Row]]:
    """What is compared, and the row with its base: other pages, caches of bytes, several new tokens."""
    by_name = {row["name"]: row for row in rows if row["seconds"]}
    found = []
    for shape in shapes:
        if not shape.in_grid:
            base, what = shape.base, "page 1" if shape.page == 1 else shape.kv_format
        elif shape.q_len > 1:
            base, what = shape.with_one_token, f"q_len {shape.q_len}"
        else:
            continue
        if shape.name in by_name and base.name in by_name:
            found.append((what, by_name[shape.name], by_name[base.name]))
    return found


def class_rows(shapes: list[Shape], rows: list[Row]) -> list[Row]:
    """Rows that bars.csv can name for a class: its ratios, and the pair of pages 1 and 16 that is furthest apart."""
    empty = {"seconds": None, "bytes": None, "share": None, "host_seconds": None, "ratio": None, "skipped": ""}
    found = []
    for name, of_class in class_statistics(rows).items():
        slug = "".join(c if c.isalnum() else "_" for c in name.lower()).replace("__", "_")
        for figure in _FIGURES:
            title = f"{name}: {figure}"
            found.append({**empty, "name": f"grid_{slug}_{figure}", "title": title, "ratio": getattr(of_class, figure)})
    paged = [(row, base) for what, row, base in pairs(shapes, rows) if what == "page 1"]
    if paged:
        row, base = max(paged, key=lambda pair: pair[0]["seconds"] / pair[1]["seconds"])
        found += [{**row, "name": "grid_page_1_worst"}, {**base, "name": "grid_page_16_worst"}]
    return found


def line(row: Row) -> str:
    """One row as the terminal has it while the grid runs."""
    if not row["seconds"]:
        return f"{row['title']}: {row['wrong'] or row['skipped']}"
    peers = "".join(f", {name} {_us(seconds)}" for name, seconds in row["peers"].items())
    failed = "".join(f", {name} failed" for name in row["peers_failed"])
    ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
    return f"{ratio:>6}  {row['title']}: {_us(row['seconds'])} us{peers}{failed}"


def statistics_table(rows: list[Row]) -> str:
    """Statistics as Markdown."""
    lines = ["| class | shapes | geometric mean | 90th percentile | worst |", "| --- | --- | --- | --- | --- |"]
    for name, of_class in class_statistics(rows).items():
        figures = f"{of_class.geomean:.3f} | {of_class.p90:.3f} | {of_class.worst:.3f} ({of_class.worst_title})"
        lines.append(f"| {name} | {of_class.shapes} | {figures} |")
    return "\n".join(lines) + "\n"


def rows_table(rows: list[Row]) -> str:
    """All rows as Markdown."""
    lines = ["| shape | ours (us) | best peer (us) | ratio | other peers (us) | of read rate |"]
    lines.append("| --- " * 6 + "|")
    for row in rows:
        if not row["seconds"]:
            why = row["wrong"] or row["skipped"]
            lines.append(f"| {row['title']} | - | - | - | {why.replace('|', '/')} | - |")
            continue
        peers = [f"{name} {_us(seconds)}" for name, seconds in sorted(row["peers"].items(), key=lambda item: item[1])]
        failed = [f"{name} failed" for name in row["peers_failed"]]
        ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
        share = f"{row['share']:.1%}" if row["share"] else "-"
        others = ", ".join(peers[1:] + failed) or "-"
        cells = [row["title"], _us(row["seconds"]), *(peers[:1] or ["-"]), ratio, others, share]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def pairs_table(shapes: list[Shape], rows: list[Row]) -> str:
    """Rows beside their bases as Markdown."""
    lines = ["| shape | what | time (us) | of its base (us) | of the base's time |", "| --- | --- | --- | --- | --- |"]
    for what, row, base in pairs(shapes, rows):
        times = f"{_us(row['seconds'])} | {_us(base['seconds'])} | {row['seconds'] / base['seconds']:.3f}"
        lines.append(f"| {base['title']} | {what} | {times} |")
    return "\n".join(lines) + "\n"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def heat_map(shapes: list[Shape], rows: list[Row], title: str, path: str) -> None:
    """Draws ratios by head shape and batch, a panel for each count of new tokens; needs matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure  # no display, no global state

    ratios = {row["name"]: row["ratio"] for row in rows}
    shown = [shape for shape in shapes if shape.in_grid and ratios.get(shape.name)]
    by_size = sorted(shown, key=lambda shape: (shape.ragged, len(shape.lens), shape.lens[0]))
    columns = list(dict.fromkeys(shape.batch for shape in by_size))
    panels = {}
    for shape in shown:
        panels.setdefault(shape.q_len, {}).setdefault(shape.head_shape, {})[shape.batch] = ratios[shape.name]
    heights = [len(panel) for panel in panels.values()] or [1]
    # Text stays text, and equal figures give equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grid"}):
        figure = Figure(figsize=(3 + 0.62 * len(columns), 2.4 + 0.28 * sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for place, (q_len, panel) in zip(axes, panels.items(), strict=False):
            cells = [[own.get(column, math.nan) for column in columns] for own in panel.values()]
            mesh = place.pcolormesh(
                [[math.log2(value) for value in line] for line in cells], cmap="RdBu_r", vmin=-1, vmax=1, edgecolors="w"
            )
            for i, line in enumerate(cells):
                for j, value in enumerate(line):
                    if not math.isnan(value):
                        colour = "white" if abs(math.log2(value)) > 0.6 else "black"
                        place.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
            place.set_yticks([i + 0.5 for i in range(len(panel))], list(panel), fontsize=8)
            place.set_xticks([j + 0.5 for j in range(len(columns))], columns, fontsize=8, rotation=45, ha="right")
            place.invert_yaxis()
            place.set_title(f"q_len {q_len}", fontsize=9, loc="left")
            if place is not axes[len(panels) - 1]:
                place.tick_params(labelbottom=False)
        if panels:
            bar = figure.colorbar(mesh, ax=axes, shrink=0.6, ticks=[-1, 0, 1])
            bar.ax.set_yticklabels(["0.5", "1", "2"])
            bar.set_label("our time over the best peer's", fontsize=8)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
