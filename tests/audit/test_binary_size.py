"""A target's files are held against the budget together."""

from __future__ import annotations

import sys

import binary_size
import pytest


@pytest.mark.parametrize(("last", "status"), [(8_000_000, 0), (8_000_001, 1)])
def test_files_count_together(tmp_path, monkeypatch, capsys, last, status):
    for name, size in (("a.co", 12_000_000), ("b.co", last)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    monkeypatch.setattr(sys, "argv", ["binary_size.py", "gfx942", *map(str, sorted(tmp_path.glob("*.co")))])
    assert binary_size.main() == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "binary size gfx942: 20.0 MB (budget 20)"
    assert lines[1:] == ["error: over the budget of a target's binary"] * status
