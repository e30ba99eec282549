"""benchmarks/run.py and benchmarks/attention.py: their bars name rows, and rows are judged as their figures say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from flashport.benchmarks import append, attention, cascade, decode, gated_delta, harness

run_script = pytest.importorskip("run", reason="not run from the source tree")
attention_script = pytest.importorskip("attention", reason="not run from the source tree")
BARS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _one_call_a_reading(monkeypatch):
    """No test looks at how precise a time is."""
    monkeypatch.setattr(harness, "_CLOCK_SECONDS", 0.0)


@pytest.fixture(name="run")
def load_run():
    return run_script


@pytest.fixture(name="study")
def load_study():
    return attention_script


def test_rows_of_attention_are_those_of_its_results(study):
    cases = {study.row_name(case): case for case in attention.cases(study=True)}
    assert len(cases) == len(attention.cases(study=True))
    results = json.loads((BARS / "results/nvidia-h200-attention.json").read_text())["rows"]
    for row in results:
        case = cases[row["name"]]
        bar = study.TIME_BARS.get(row["name"], study.BARS.get(row["name"]))
        assert (bar, study.held_against(case)) == (row["bar"], row["against"]), row["name"]
        assert (row["name"] in study.TIME_BARS) == row["of_time"]
        if not row["of_time"]:  # causal counts half of the square there
            assert case.flops == pytest.approx(row["tflops"] * row["seconds"] * 1e12, rel=2e-3), row["name"]
    assert {*study.BARS, *study.TIME_BARS} <= cases.keys()
    assert {study.held_against(case) for case in cases.values()} <= cases.keys() | {"cudnn"}


@pytest.mark.parametrize("change", [{}, {"causal": False}, {"pages": 16}, {"window": 20}, {"lens": ((70, 70), (9, 9))}])
def test_a_row_of_attention_is_checked_and_judged(study, change, monkeypatch):
    torch = pytest.importorskip("torch")
    dense = {"lens": ((70, 70),) * 2, "dims": (64, 64), "heads": (4, 2)}
    case = attention.AttentionCase("name", **dense | change)
    if case.packed:  # held against a large one
        monkeypatch.setattr(study, "other_case", lambda case: attention.AttentionCase("name", **dense))
    row = study.measure(torch, case, "cpu", 1)
    assert 0 < row["error"] < 0.02
    assert row["tflops"] == pytest.approx(case.flops / row["seconds"] * 1e-12)
    assert row["host_seconds"] is None  # a GPU's alone
    study.judge([row])
    assert row["name"] in study.page([row], {})
    if not case.packed and not case.pages:
        row["host_seconds"] = study.host_times(torch, case, "cpu")
        assert f"Host time of a call, {row['name']}: out= " in study.page([row], {})


def test_every_bar_names_a_case_and_is_judged(run):
    names = {case.name for case in [*decode.cases(), *append.cases(), *cascade.cases(), *gated_delta.cases()]} | {
        decode.STAGE2
    }
    grid = run.grid_shapes.select()
    rows = [
        {"name": shape.name, "title": shape.title, "seconds": 1e-6, "ratio": 1.0, "classes": shape.classes}
        for shape in grid
    ]
    names |= {row["name"] for row in [*rows, *run.grid_report.class_rows(grid, rows)]}
    with (BARS / "bars.csv").open(newline="") as file:
        bars = list(csv.DictReader(file))
    assert {bar["name"] for bar in bars} <= names
    assert {bar["against"] for bar in bars} - {""} <= names

    def result(seconds):
        rows = []
        for name in names:
            row = harness.Row(name, name, 1000, seconds=seconds, read_seconds=1e-6, host_seconds=seconds)
            row.peers = {"peer": 1e-6}
            rows.append({**vars(row), "ratio": row.ratio, "share": row.share})
        return {"rows": rows}

    absolute = ("ratio", "seconds", "host_seconds", "bytes_per_second")
    slow, fast = ({**result(seconds), "device": {}} for seconds in (1e-3, 1e-12))
    assert len(run.judge(slow)) == len(bars)
    assert not any(verdict.met for verdict in run.judge(slow) if verdict.figure in absolute)
    assert all(verdict.met for verdict in run.judge(fast) if verdict.figure in absolute)
    lines = run.table(slow, run.judge(slow)).splitlines()
    assert len(lines) == 2 + len(names)
    assert sum(line.count("**missed**") for line in lines) == sum(not verdict.met for verdict in run.judge(slow))


@pytest.mark.parametrize(
    ("name", "value", "met", "text"),
    [
        ("bytes_per_second", 4.2e12, True, "4.20 TB/s (at least 4: met)"),
        ("bytes_per_second", 3.9e12, False, "3.90 TB/s (at least 4: **missed**)"),
        ("time_of", 0.54, True, "0.540 of the time of the other (at most 0.55: met)"),
        ("time_of", 0.56, False, "0.560 of the time of the other (at most 0.55: **missed**)"),
        ("rate_of", 0.96, True, "96.0% of the rate of the other (at least 95: met)"),
        ("rate_of", 0.94, False, "94.0% of the rate of the other (at least 95: **missed**)"),
        ("speedup_of", 1.9, True, "1.90 times as fast as the other (at least 1.85: met)"),
        ("speedup_of", 1.8, False, "1.80 times as fast as the other (at least 1.85: **missed**)"),
    ],
)
def test_figures(run, name, value, met, text):
    bars = {"bytes_per_second": 4e12, "time_of": 0.55, "rate_of": 0.95, "speedup_of": 1.85}
    row, other = {"bytes": 4200, "seconds": 3e-6}, {"bytes": 8400, "seconds": 4e-6}
    values = {"bytes_per_second": 1.4e9, "time_of": 0.75, "rate_of": 2 / 3, "speedup_of": 4 / 3}
    assert run.figure(name, row, other) == pytest.approx(values[name])
    assert run.figure(name, {**row, "seconds": None}, other) is None
    if name != "bytes_per_second":
        assert run.figure(name, row) is None
        assert run.figure(name, row, {**other, "seconds": None}) is None
    verdict = run.Verdict("row", name, value, bars[name], "", "the other")
    assert verdict.met == met
    assert verdict.text() == text


def test_the_table_names_peers_and_those_that_failed(run):
    row = harness.Row("name", "title", 4, seconds=1e-6, peers={"A": 2e-6}, peers_failed={"B": "ImportError: no C"})
    row = {**vars(row), "ratio": row.ratio, "share": row.share}
    assert "| title | 1.0 | A 2.0, B failed | - |" in run.table({"rows": [row]}, [])
