"""Which figures of a kernel are red against the table, and which are notes."""

from __future__ import annotations

import pytest
from resource_table import ORDER_COLUMNS, Column, compare, write_table

COLUMNS = [Column("registers", 1), Column("matrix", -1), *ORDER_COLUMNS]
TABLED = {"registers": 100, "matrix": 4, "signals": 2, "releases": 1, "acquires": 1, "bare": 0}


def report(path, compiler, **changed):
    write_table(path, "Figures of one kernel.", "clang 1", COLUMNS, {"kernel": TABLED})
    return compare(path, compiler, COLUMNS, {"kernel": TABLED | changed})


@pytest.mark.parametrize("compiler", ["clang 1", "clang 2"])
@pytest.mark.parametrize(("name", "got"), [("signals", 1), ("releases", 0), ("acquires", 0), ("bare", 1)])
def test_memory_order_is_red_with_any_compiler(tmp_path, compiler, name, got):
    tabled = TABLED[name]
    found = report(tmp_path / "table.txt", compiler, **{name: got})
    assert found.errors == [f"kernel: {name} is {got}, the table says {tabled}"]


def test_other_figures_are_red_with_the_compiler_of_the_table(tmp_path):
    assert report(tmp_path / "table.txt", "clang 1", registers=101, matrix=3).errors == [
        "kernel: registers is 101, the table says 100",
        "kernel: matrix is 3, the table says 4",
    ]
    found = report(tmp_path / "table.txt", "clang 2", registers=101, matrix=3)
    assert found.errors == []
    assert found.notes[1:] == [
        "kernel: registers is 101, the table says 100",
        "kernel: matrix is 3, the table says 4",
    ]


def test_better_figures_are_notes(tmp_path):
    found = report(tmp_path / "table.txt", "clang 1", registers=90, acquires=2)
    assert found.errors == []
    assert found.notes == [
        "kernel: registers is 90, the table says 100 (better: --update the table)",
        "kernel: acquires is 2, the table says 1 (better: --update the table)",
    ]
