"""The harness times what the case list says: every case of the bench tier, made small, runs through every route."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

import flashport
from flashport import bench, numerics

CASES = [dataclasses.replace(case, lens=(70, 70, 5) if len(set(case.lens)) > 1 else (70, 70)) for case in bench.cases()]


def served(case):
    return flashport.supports(case.q, case.kv, case.dk, case.dv, case.hq // case.hkv, target="cpu")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_candidates_run(case, library, monkeypatch):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(bench, "_torch", lambda device: None)
    if not served(case):
        row = bench.run_case(case, "cpu", "cpu", 1)
        assert row.skipped
        assert row.seconds is None
        return
    row = bench.run_case(case, "cpu", "cpu", 1)
    assert row.seconds > 0
    assert row.read_seconds > 0
    assert row.bytes == sum(case.lens) * case.hkv * (numerics.row_bytes(case.dk, case.kv) * 2)
    comparable = library == "torch" and len(set(case.lens)) == 1 and case.kv == case.q
    assert bool(row.peers) == comparable
    assert (row.ratio is not None) == comparable


def test_large_cases_are_left_out_with_a_reason():
    row = bench.run_case(bench.cases()[0], "cpu", "cpu", 1, largest=1e6)
    assert "too large" in row.skipped


BARS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(not BARS.exists(), reason="not run from the source tree")
def test_every_bar_names_a_case_and_is_judged():
    spec = importlib.util.spec_from_file_location("benchmark_run", BARS / "run.py")
    run = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = run  # where its dataclass looks for its module
    spec.loader.exec_module(run)
    names = {case.name for case in bench.cases()} | {bench.STAGE2}
    with (BARS / "bars.csv").open(newline="") as file:
        bars = list(csv.DictReader(file))
    assert {bar["name"] for bar in bars} <= names

    def result(seconds):
        rows = []
        for name in names:
            row = bench.Row(name, name, 1000, seconds=seconds, read_seconds=1e-6, host_seconds=seconds)
            row.peers = {"peer": 1e-6}
            rows.append({**vars(row), "ratio": row.ratio, "share": row.share})
        return {"rows": rows}

    for bar in bars:
        values = {row["name"]: row for row in result(1e-6)["rows"]}
        assert run.figure(bar["figure"], values[bar["name"]], values) is not None
    slow, fast = ({**result(seconds), "device": {}} for seconds in (1e-3, 1e-12))
    assert len(run.judge(slow)) == len(bars)
    assert not any(verdict.met for verdict in run.judge(slow) if verdict.figure in ("ratio", "seconds", "host_seconds"))
    assert all(verdict.met for verdict in run.judge(fast) if verdict.figure in ("ratio", "seconds", "host_seconds"))
    lines = run.table(slow, run.judge(slow)).splitlines()
    assert len(lines) == 2 + len(names)
    assert sum(line.count("**missed**") for line in lines) == sum(not verdict.met for verdict in run.judge(slow))
