"""benchmarks/cache.py: its cases made small run on the CPU, and its page says what made-up rows say."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from flashport.benchmarks import append, attention, cascade, harness

cache = pytest.importorskip("cache", reason="not run from the source tree")
verdict = pytest.importorskip("verdict", reason="not run from the source tree")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = {"prompt": 20, "keys": 32, "heads": 4, "kv_heads": 2, "dim": 64}


@pytest.fixture(autouse=True)
def _one_call_a_reading(monkeypatch):
    """No test looks at how precise a time is."""
    monkeypatch.setattr(harness, "_CLOCK_SECONDS", 0.0)
    count = harness.host_seconds
    monkeypatch.setattr(harness, "host_seconds", lambda call, device: count(call, device, 1))


def small_cases():
    """A case of each kind; those of names with bars keep these."""
    appends, few = append.cases()[0], append.cases("few_16x4")[0]
    paged = [dataclasses.replace(case, lens=((70, 70),) * 2, heads=(4, 2)) for case in cache.PAGED]
    return [
        *(cache.case_of_cache(dataclasses.replace(c, batch=2, context=70, heads=(4, 2))) for c in (appends, few)),
        cache.case_of_cascade(dataclasses.replace(cascade.cases()[0], batch=3, prefix=64, suffix=5, heads=(4, 2))),
        *map(cache.case_of_pages, paged),
        cache.case_of_vllm(batch=2, keys=40, heads=4, kv_heads=2, dim=64),
        *cache.host_cases(**SMALL),
    ]


def test_every_bar_names_a_case_and_agrees_with_other_lists():
    names = [case.name for case in cache.all_cases()]
    assert len(set(names)) == len(names)
    assert cache.BARS.keys() <= set(names)
    assert {figure for _, figure, _ in cache.BARS.values()} <= verdict.SPELLED.keys()
    assert {case.name for case in cache.all_cases() if case.on_host} - cache.BARS.keys() == {"host Tensor.zero_"}
    assert [cache.BARS[case.name][2] for case in cache.PAGED] == [0.6, 0.88, 0.88, 0.88]
    (dense,) = attention.cases("attention_d128_causal_4x4k")
    for case in cache.PAGED:
        assert dataclasses.replace(case, name=dense.name, pages=0, tier=dense.tier) == dense
    with (BENCHMARKS / "bars.csv").open(newline="") as file:
        bars = {bar["name"]: float(bar["bar"]) for bar in csv.DictReader(file)}
    for name in ("append_4x512_on_8k", "cascade_64x512_after_16k"):
        assert bars[name] == cache.BARS[name][2]


@pytest.mark.parametrize("index", range(len(small_cases())), ids=[case.name for case in small_cases()])
def test_a_case_runs_and_is_judged(index):
    torch = pytest.importorskip("torch")
    case = small_cases()[index]
    row = cache.measure(torch, case, "cpu", "cpu", 2)
    assert not row["failed"]
    assert not row["skipped"]
    assert row["seconds"] > 0
    assert bool(row["kernel"]) == (case.query is not None)
    assert not cache.is_wrong(row)
    assert (row["error"] is None) == (not case.same)
    assert case.same in {*row["peers"], ""}
    for pair in row["peers"].values():
        assert pair["ratio"] == pytest.approx(row["seconds"] / pair["seconds"])
        assert pair["difference"] == pytest.approx(row["seconds"] - pair["seconds"])  # both are means of two rounds
    assert len(cache.judge([row])) == (case.name in cache.BARS)


def test_calls_of_the_host_are_those_that_are_named():
    torch = pytest.importorskip("torch")
    calls = cache.make_host_calls(torch, "cpu", **SMALL)
    assert [f"host {name}" for name in calls] == [case.name for case in cache.host_cases(**SMALL)]
    for name, (call, _) in calls.items():
        function = getattr(getattr(call, "func", call), "__name__", "")
        assert function == name.partition(",")[0].rpartition(".")[2]


def test_what_fails_is_wrong_or_is_not_served_is_said(monkeypatch):
    torch = pytest.importorskip("torch")
    ones = torch.ones(3)

    def case(peer, query=None):
        return cache.Case("name", "title", lambda torch, device: (lambda: ones, {"peer": peer}), query, same="peer")

    def fails():
        raise RuntimeError("no\ngraph")

    def row(*arguments):
        return cache.measure(torch, case(*arguments), "cpu", "cpu", 1)

    assert not cache.is_wrong(row(lambda: ones))
    assert cache.is_wrong(row(lambda: ones * 1.1))
    assert cache.is_wrong(row(lambda: ones * float("nan")))
    failed, skipped = row(fails), row(lambda: ones, ("attention", {"head_dim": 7}))
    assert failed["failed"] == "RuntimeError: no graph"
    assert "head_dim" in skipped["skipped"]
    assert failed["seconds"] is skipped["seconds"] is None
    text = cache.page(result_of([failed, skipped, row(lambda: ones * 2)]))
    assert "Failed: title: RuntimeError: no graph\n" in text
    assert f"Skipped: title: {skipped['skipped']}\n" in text
    assert "**Wrong** by 0.5 of the largest value: title\n" in text


def result_of(rows, target="sm90a"):
    found = {"flashport": "0.1.0", "torch": "2.11", "command": "the command", "time": "2026-11-28", "python": "3.12"}
    return {
        "device": {"name": "A card", "target": target},
        "environment": found,
        "revision": "abc",
        "rounds": 9,
        "rows": rows,
    }


def made_up(name, seconds, **peers):
    """A row whose peers take so long; a difference is not that of the medians."""
    pairs = {
        peer: {"seconds": other, "difference": seconds - other + 1e-7, "ratio": seconds / other}
        for peer, other in peers.items()
    }
    row = {"name": name, "title": f"the title of {name}", "on_host": False, "kernel": "", "seconds": seconds}
    return {**row, "peers": pairs, "error": None, "skipped": "", "failed": ""}


@pytest.mark.parametrize(
    ("name", "seconds", "other", "line"),
    [
        ("append_64x1_on_8k", 502.7e-6, 500e-6, "| +2.8 | 1.005 | 2.8 us more than the peer (at most 3: met) |"),
        ("append_64x1_on_8k", 503e-6, 500e-6, "| +3.1 | 1.006 | 3.1 us more than the peer (at most 3: **missed**) |"),
        ("append_4x512_on_8k", 420e-6, 401e-6, "1.047 of the time of the peer (at most 1.05: met) |"),
        ("append_4x512_on_8k", 424e-6, 401e-6, "1.057 of the time of the peer (at most 1.05: **missed**) |"),
        ("cascade_64x512_after_16k", 10e-6, 81e-6, "8.10 times as fast as the peer (at least 8: met) |"),
        ("cascade_64x512_after_16k", 10e-6, 79e-6, "7.90 times as fast as the peer (at least 8: **missed**) |"),
        ("attention_d128_pages_1_4x4k", 10e-6, 6.1e-6, "61.0% of the rate of the peer (at least 60: met) |"),
        ("attention_d128_pages_64_4x4k", 10e-6, 8.7e-6, "87.0% of the rate of the peer (at least 88: **missed**) |"),
        ("host flash_attn_func", 24e-6, 8e-6, "24.0 us of host time (at most 25: met) |"),
        ("host flash_attn_func", 26e-6, 8e-6, "26.0 us of host time (at most 25: **missed**) |"),
        ("few_1x1_on_8k_32_8", 2e-6, 4e-6, "| 2.0 | the peer | 4.0 | -1.9 | 0.500 |  |"),
    ],
)
def test_the_page_judges_a_row(name, seconds, other, line):
    peer = cache.BARS.get(name, ("the peer",))[0]
    row = made_up(name, seconds, **{peer: other, "another": 1.0})
    (found,) = [x for x in cache.page(result_of([row])).splitlines() if f"| {peer} |" in x]
    assert found.startswith(f"| the title of {name} | ")
    assert found.endswith(line)
    text = cache.page(result_of([row]))
    assert text.count("met)") + text.count("**missed**") == (name in cache.BARS)
    assert "`the command`, 2026-11-28, revision abc, flashport 0.1.0, torch 2.11, python 3.12; rounds: 9." in text
    text = cache.page(result_of([row], "cpu"))
    assert "met)" not in text  # the bars are for Hopper
    assert "missed" not in text


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["cache.py", "--device", "cpu", "--rounds", "1", *arguments])
    return cache.main()


def test_a_run_writes_a_page_of_its_figures_and_a_part_of_one_none(monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    monkeypatch.setattr(cache, "HERE", tmp_path)
    monkeypatch.setattr(cache, "all_cases", small_cases)
    assert run_main(monkeypatch, "--shapes", "zero_|64x1") == 0
    assert capsys.readouterr().out.count("| - | - | - | - |") == 1
    assert not list(tmp_path.iterdir())
    assert run_main(monkeypatch, "--revision", "a b") == 0
    text = capsys.readouterr().out
    pages = {path.suffix: path for path in (tmp_path / "results").iterdir()}
    assert pages.keys() == {".json", ".md"}
    assert pages[".json"].stem.endswith("-cache")
    result = json.loads(pages[".json"].read_text())
    assert [row["name"] for row in result["rows"]] == [case.name for case in small_cases()]
    assert result["environment"]["command"].endswith("benchmarks/cache.py --device cpu --rounds 1 --revision 'a b'")
    assert pages[".md"].read_text() == cache.page(result)
    assert text == cache.page(result) + "\n"


def test_the_page_of_the_results_is_that_of_their_figures():
    for path in (BENCHMARKS / "results").glob("*-cache.json"):
        assert path.with_suffix(".md").read_text() == cache.page(json.loads(path.read_text()))
