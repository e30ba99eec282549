"""The grid of decode shapes: its list, how it is measured on a CPU, and what is said of made-up results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
report = pytest.importorskip("decode_grid.report", reason="not run from the source tree")
shapes = pytest.importorskip("decode_grid.shapes", reason="not run from the source tree")
Shape = shapes.Shape
SMALL = Shape(4, 2, 64, lens=(70, 70))


def test_the_grid_covers_what_servers_run():
    grid = shapes.grid()
    assert len(grid) >= 100
    assert len({shape.name for shape in [*grid, *shapes.beside_the_grid()]}) == len(grid) + 26
    single = [shape for shape in grid if shape.q_len == 1]
    assert len(single) >= 100
    assert {shape.head_dim for shape in single} == {64, 128, 256}
    assert {len(shape.lens) for shape in single if not shape.ragged} == {1, 4, 8, 16, 32, 64, 256}
    assert {min(shape.lens) for shape in single if not shape.ragged} == {512, 1024, 2048, 4096, 8192, 16384, 131072}
    assert {shape.q_len for shape in grid} == {1, 2, 4, 8}
    assert sum(shape.ragged for shape in grid) >= 10
    heads = "32/8 D128,64/8 D128,28/4 D128,16/2 D128,8/1 D128,40/8 D128,71/1 D64,64/1 D64,32/8 D64,16/2 D256,8/1 D256"
    assert set(heads.split(",")) <= {shape.head_shape for shape in single}
    assert {ranks for _, sizes in shapes.MODELS.values() for ranks in sizes} == {1, 2, 4, 8}
    large = [shape for shape in single if shape.bytes >= 500e6]
    assert len(large) >= 15
    assert max(shape.bytes for shape in grid) < 5e9


def test_every_shape_is_one_that_the_library_takes():
    for shape in [*shapes.grid(), *shapes.beside_the_grid()]:
        assert shape.heads % shape.kv_heads == 0
        assert 1 <= shape.group <= 128
        assert min(shape.lens) >= 1
        if not shape.in_grid:
            assert shape.base in shapes.grid()
            assert not shape.classes


def test_sizes_names_and_classes():
    shape = Shape(32, 8, 128, lens=(8192,) * 64)
    assert shape.bytes == 64 * 8192 * 8 * 128 * 2 * 2
    assert replace(shape, kv_format="fp8_e4m3").bytes == shape.bytes / 2
    assert replace(shape, kv_format="q8_0").bytes == shape.bytes / 2 * 34 / 32
    assert shape.title == "64 x 8k, 32/8 D128"
    assert shape.name == "grid_64_x_8k_32h8_d128"
    assert replace(shape, page=1).title == "64 x 8k, 32/8 D128, page 1"
    assert shape.classes == ["all", "q_len 1", "500 MB and more", "q_len 1, 500 MB and more"]
    assert Shape(71, 1, 64, lens=(512,), q_len=4).classes == ["all", "q_len 4", "64 and 71 heads on one"]
    assert Shape(8, 1, 64, lens=(5, 9), size="mix").classes == ["all", "q_len 1", "ragged"]


def test_select():
    assert shapes.select() == [*shapes.grid(), *shapes.beside_the_grid()]
    assert [s.title for s in shapes.select("q8_0", 1)] == ["64 x 8k, 32/8 D128", "64 x 8k, 32/8 D128, q8_0"]
    assert [s.title for s in shapes.select(r"8 x 4k, 32/8 D128, q_len 8")] == [
        "8 x 4k, 32/8 D128",
        "8 x 4k, 32/8 D128, q_len 8",
    ]
    assert len(shapes.select(limit=7)) == 7


def run_script(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_list_is_printed_without_a_device():
    # -S and -E leave out every installed package: the list needs none.
    command = [sys.executable, "-S", "-E", str(ROOT / "benchmarks/run.py"), "--list", "--shapes", "71/1 D64"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[0].split() == "grid_1_x_512_71h1_d64 0.1 MB all; q_len 1; 64 and 71 heads on one".split()
    assert printed[-1] == "5 shapes of the grid and 0 beside it"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("9/9", "--shapes: '9/9' is in no name or title of a shape; --list has all"),
        ("(", "--shapes: '(' is no regular expression: missing ), unterminated subpattern at position 0"),
    ],
)
def test_patterns_that_choose_nothing(pattern, message):
    found = run_script("--grid", "--shapes", pattern)
    assert found.returncode == 2
    assert message in found.stderr


def test_statistics():
    ratios = {"a": 0.5, "b": 2.0, "c": 1.0, "d": 4.0}
    found = report.statistics(ratios)
    assert found == report.Statistics(4, pytest.approx(2**0.5), 4.0, 4.0, "d")
    of_ten = report.statistics({str(n): float(n) for n in range(1, 11)})
    assert (of_ten.p90, of_ten.worst) == (9.0, 10.0)
    assert report.statistics({"only": 1.5}) == report.Statistics(1, pytest.approx(1.5), 1.5, 1.5, "only")


def fake_rows(chosen):
    """Rows whose ratio is 2 for one new token, and 0.5 for more; rows beside the grid take 1.25 times their base."""
    rows = []
    for shape in chosen:
        seconds = 4e-6 if shape.in_grid else 5e-6
        peers = {"A": 2e-6 * (1 if shape.q_len == 1 else 4), "B": 9e-6} if shape.in_grid else {}
        rows.append(
            {
                "name": shape.name,
                "title": shape.title,
                "bytes": shape.bytes,
                "kernel": "k",
                "seconds": seconds,
                "read_seconds": 1e-6,
                "peers": peers,
                "peers_failed": {},
                "host_seconds": None,
                "skipped": "",
                "ratio": seconds / min(peers.values()) if peers else None,
                "share": 0.25,
                "classes": shape.classes,
                "wrong": "",
            }
        )
    return rows


def test_statistics_of_classes_and_pairs():
    chosen = shapes.select()
    rows = fake_rows(chosen)
    found = report.class_statistics(rows)
    single = found["q_len 1"]
    assert (single.geomean, single.p90, single.worst) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))
    assert found["q_len 8"].geomean == pytest.approx(0.5)
    count = len(shapes.grid())
    assert found["all"].shapes == count
    assert found["all"].geomean == pytest.approx(2 ** ((single.shapes - (count - single.shapes)) / count))
    whats = [what for what, _, _ in report.pairs(chosen, rows)]
    assert {what: whats.count(what) for what in dict.fromkeys(whats)} == {
        "q_len 2": 16, "q_len 4": 16, "q_len 8": 16, "page 1": 20, "fp8_e4m3": 3, "q8_0": 3,
    }  # fmt: skip
    of_classes = {row["name"]: row for row in report.class_rows(chosen, rows)}
    assert of_classes["grid_q_len_1_geomean"]["ratio"] == pytest.approx(2)
    assert of_classes["grid_page_1_worst"]["seconds"] / of_classes["grid_page_16_worst"]["seconds"] == pytest.approx(
        1.25
    )


def test_a_row_without_a_figure_says_why_and_counts_nowhere():
    rows = fake_rows([SMALL, replace(SMALL, heads=8)])
    rows[0].update(seconds=None, ratio=None, wrong="ValueError: a | b")
    rows[1]["peers_failed"] = {"C": "RuntimeError: no"}
    assert "| 2 x 70, 4/2 D64 | - | - | - | ValueError: a / b | - |" in report.rows_table(rows)
    assert "| 2 x 70, 8/2 D64 | 4.0 | A 2.0 | 2.000 | B 9.0, C failed | 25.0% |" in report.rows_table(rows)
    assert report.class_statistics(rows)["all"].shapes == 1
    assert report.line(rows[0]) == "2 x 70, 4/2 D64: ValueError: a | b"
    assert report.line(rows[1]) == " 2.000  2 x 70, 8/2 D64: 4.0 us, A 2.0, B 9.0, C failed"


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_heat_map_has_every_shape(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    chosen = shapes.select()
    path = tmp_path / f"map.{suffix}"
    report.heat_map(chosen, fake_rows(chosen), "a title", str(path))
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    assert len(re.findall(r">2\.00<", text)) == sum(shape.q_len == 1 for shape in shapes.grid())
    assert len(re.findall(r">0\.50<", text)) == sum(shape.q_len > 1 for shape in shapes.grid())
    for word in ("a title", "71/1 D64", "256 x 512", "1 long + 63 short", "q_len 8"):
        assert f">{word}<" in text
    report.heat_map(chosen, fake_rows(chosen), "a title", str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_bytes() == content


def test_a_heat_map_of_nothing_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report.heat_map([SMALL], fake_rows([replace(SMALL, page=1)]), "nothing", str(tmp_path / "map.svg"))
    assert ">nothing<" in (tmp_path / "map.svg").read_text()


MEASURED = [
    SMALL,
    replace(SMALL, q_len=4),
    replace(SMALL, lens=(70, 1, 33), size="3 mixed"),
    replace(SMALL, page=1),
    replace(SMALL, kv_format="fp8_e4m3"),
    replace(SMALL, kv_format="q8_0"),
    Shape(71, 1, 64, lens=(70,)),
    Shape(2, 1, 256, lens=(70,)),
]


def measured(chosen, **options):
    pytest.importorskip("torch")
    from decode_grid import measure

    return list(measure.run(chosen, "cpu", "cpu", 1, 60, **options))


@pytest.mark.parametrize("shape", MEASURED, ids=lambda shape: shape.name)
def test_a_shape_is_measured_beside_its_peers(shape):
    (row,) = measured([shape])
    if row["skipped"]:
        assert "fp8_e4m3" in row["skipped"] or "q8_0" in row["skipped"]
        return
    assert not row["wrong"]
    assert row["seconds"] > 0
    assert row["kernel"]
    assert list(row["peers"]) == (["torch SDPA"] if shape.in_grid and not shape.ragged else [])
    assert not row["peers_failed"]
    json.dumps(row)


def test_a_wrong_result_has_no_figure(monkeypatch):
    from flashport import decode

    real = decode.flash_decode

    def wrong(*arguments, out, **options):
        real(*arguments, out=out, **options)
        out[0, 0] *= 1.1

    monkeypatch.setattr(decode, "flash_decode", wrong)
    first, second = measured([SMALL, SMALL])
    assert first["seconds"] is first["ratio"] is None
    assert first["wrong"].startswith(
        "ValueError: rows of request 0, heads 0 to 1, differ from the fp64 reference by up to"
    )
    assert second["wrong"] == first["wrong"]


def test_a_peer_that_fails_or_is_wrong_is_a_blank():
    from decode_grid.peers import Candidate, peers_of

    def broken(x):
        raise RuntimeError("no kernel\nfor this")

    def wrong(x):
        return Candidate(lambda: x.q, lambda out: out)

    def makers(shape, device):
        return {**peers_of(shape, device), "broken": broken, "wrong": wrong}

    (row,) = measured([SMALL], peers=makers)
    assert list(row["peers"]) == ["torch SDPA"]
    assert row["peers_failed"]["broken"] == "RuntimeError: no kernel for this"
    assert "differ from the fp64 reference" in row["peers_failed"]["wrong"]


def test_shapes_after_the_time_limit_are_left_out():
    from decode_grid import measure

    pytest.importorskip("torch")
    (row,) = measure.run([SMALL], "cpu", "cpu", 1, -1)
    assert row["skipped"] == "left out: -1 s were over"
    assert row["seconds"] is None


def test_the_script_writes_its_results(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    out = tmp_path / "found.json"
    found = run_script("--grid", "--device", "cpu", "--shapes", "1 x 512, 8/1 D64", "--rounds", "1", "--out", str(out))
    assert found.returncode == 0, found.stderr
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    assert row["title"] == "1 x 512, 8/1 D64"
    assert row["ratio"] == pytest.approx(row["seconds"] / row["peers"]["torch SDPA"])
    page = out.with_suffix(".md").read_text()
    assert "![Heat map of the ratios](found.svg)" in page
    assert f"| 1 x 512, 8/1 D64 | {row['seconds'] * 1e6:.1f} | torch SDPA" in page
    assert f">{row['ratio']:.2f}<" in out.with_suffix(".svg").read_text()
    last = found.stdout.rstrip().splitlines()[-1]
    assert last.startswith("| q_len 1 | 1 |")
