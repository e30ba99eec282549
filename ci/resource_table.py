"""Tables of what each compiled kernel costs and holds, and the rules by which a build is held against them.

A table is text: comment lines, one naming the compiler that made it, then one row per kernel. Figures are held by
direction: more registers or shared memory, or fewer blocks, matrix instructions or wide loads than the table says are
red. With another compiler than the table's such differences are printed; red are those of memory order, and what breaks
a rule that needs no table (spills, scratch, missing matrix instructions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Column:
    """A figure of a kernel; `worse` is +1 where more is worse, -1 where less is worse, 0 where it is only shown.

    Where `any_compiler` is true a worse figure is red whatever compiler made the table.
    """

    name: str
    worse: int
    any_compiler: bool = False


# The figures of ci/memory_order.py.
ORDER_COLUMNS = [
    Column("signals", -1, any_compiler=True),
    Column("releases", -1, any_compiler=True),
    Column("acquires", -1, any_compiler=True),
    Column("bare", 1, any_compiler=True),
]


@dataclass
class Report:
    """What a comparison found: `errors` fail the run, `notes` are printed."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_table(path: Path, title: str, compiler: str, columns: list[Column], rows: dict[str, dict[str, int]]) -> None:
    """Writes the table of `rows`, kernels in their given order."""
    name_width = max(len(name) for name in rows)
    lines = [f"# {title}", f"# compiler: {compiler}", "# " + "kernel".ljust(name_width - 2) + header(columns)]
    lines += [name.ljust(name_width) + figures(columns, row) for name, row in rows.items()]
    path.write_text("\n".join(lines) + "\n")


def header(columns: list[Column]) -> str:
    """The column names, aligned with figures()."""
    return "".join(f"  {column.name}" for column in columns)


def figures(columns: list[Column], row: dict[str, int]) -> str:
    """The figures of one row under header()."""
    return "".join(f"  {row[column.name]:>{len(column.name)}}" for column in columns)


def read_table(path: Path, columns: list[Column]) -> tuple[str, dict[str, dict[str, int]]]:
    """The compiler that made the table, and its rows."""
    compiler = ""
    rows = {}
    for line in path.read_text().splitlines():
        if line.startswith("# compiler: "):
            compiler = line.removeprefix("# compiler: ")
        if not line or line.startswith("#"):
            continue
        name, *values = line.split()
        rows[name] = dict(zip((column.name for column in columns), map(int, values), strict=True))
    return compiler, rows


def compare(path: Path, compiler: str, columns: list[Column], rows: dict[str, dict[str, int]]) -> Report:
    """Holds `rows` against the table at `path`."""
    report = Report()
    if not path.exists():
        report.errors.append(f"{path} is missing; write it with --update")
        return report
    table_compiler, table = read_table(path, columns)
    same_compiler = table_compiler == compiler
    if not same_compiler:
        report.notes.append(f"{path} was made with '{table_compiler}', this is '{compiler}': differences are notes")
    report.errors += [f"{name}: in the table but not built" for name in table if name not in rows]
    report.errors += [f"{name}: built but not in the table; add it with --update" for name in rows if name not in table]
    for name in (name for name in rows if name in table):
        for column in columns:
            got, expected = rows[name][column.name], table[name][column.name]
            if got == expected or column.worse == 0:
                continue
            text = f"{name}: {column.name} is {got}, the table says {expected}"
            is_worse = (got - expected) * column.worse > 0
            if is_worse and (same_compiler or column.any_compiler):
                report.errors.append(text)
            else:
                report.notes.append(text + ("" if is_worse else " (better: --update the table)"))
    return report


def finish(label: str, report: Report, columns: list[Column], rows: dict[str, dict[str, int]]) -> bool:
    """Prints the figures and the findings; true when nothing is red."""
    width = max(len(name) for name in rows)
    print(f"{label}\n{'kernel'.ljust(width)}{header(columns)}")
    for name, row in rows.items():
        print(name.ljust(width) + figures(columns, row))
    for note in report.notes:
        print(f"note: {note}")
    for error in report.errors:
        print(f"error: {error}")
    print(f"{label}: {len(rows)} kernels, {len(report.errors)} errors")
    return not report.errors
