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
    between = [shape for shape in grid if "between powers of two" in shape.classes]
    assert len(between) == 3 * 8
    assert {1000, 9000, 10240} <= {shape.lens[0] for shape in between}
    assert {shape.q_len for shape in between} == {1}
    single = [shape for shape in grid if shape.q_len == 1 and shape not in between]
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
    assert Shape(8, 1, 64, lens=(1000,) * 4).classes == ["all", "q_len 1", "between powers of two"]


def test_select():
    assert shapes.select() == [*shapes.grid(), *shapes.beside_the_grid()]
    assert [s.title for s in shapes.select("q8_0", 1)] == ["64 x 8k, 32/8 D128", "64 x 8k, 32/8 D128, q8_0"]
    assert [s.title for s in shapes.select(r"8 x 4k, 32/8 D128, q_len 8")] == [
        "8 x 4k, 32/8 D128",
        "8 x 4k, 32/8 D128, q_len 8",
    ]
    assert len(shapes.select(limit=7)) == 7


def test_the_roofline_page_estimates_every_shape():
    tables = (ROOT / "docs/roofline.md").read_text().split("The decode grid in us")[1:]
    assert len(tables) == 3
    for text in tables:
        lines = [line for line in text.split("\n\n")[1].splitlines() if line.startswith("|")]
        batches = [cell.strip() for cell in lines[0].split("|")[2:-1]]
        cells = {
            (fields[0].strip(), batch): figure.strip()
            for fields in (line.split("|")[1:-1] for line in lines[2:])
            for batch, figure in zip(batches, fields[1:], strict=True)
            if figure.strip()
        }
        tokens = {1: "", 2: ", q_len 2", 4: ", q_len 4", 8: ", q_len 8"}
        wanted = [shape for shape in shapes.grid() if not shape.between]
        assert set(cells) == {(shape.head_shape + tokens[shape.q_len], shape.batch) for shape in wanted}
        if text is tables[0]:  # 64 * 8192 keys of 8 heads, 512 bytes each, at 5.3 TB/s
            assert cells["32/8 D128", "64 x 8k"] == "405"


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


def test_an_unknown_device_is_named():
    found = run_script("--grid", "--shapes", "71/1", "--device", "cuda:99")
    assert found.returncode == 1
    assert "no such device: cuda:99" in found.stderr
    assert "Traceback" not in found.stderr


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

    return [measure.measure(shape, "cpu", "cpu", 1, **options) for shape in chosen]


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
    for row in measured([SMALL, SMALL]):
        assert row["seconds"] is row["ratio"] is None
        start = "ValueError: rows of request 0, heads 0 to 1, differ from the fp64 reference by up to 0."
        assert row["wrong"].startswith(start)


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


def test_a_package_that_cannot_be_loaded_is_tried_once(monkeypatch, tmp_path):
    from decode_grid import peers

    (tmp_path / "flashinfer.py").write_text(
        "from pathlib import Path\nwith Path(__file__).with_suffix('.log').open('a') as log:\n    log.write('x')\n"
        "raise ImportError('no driver')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    peers._import.cache_clear()
    makers = peers.peers_of(SMALL, "cuda:0")
    assert list(makers)[-2:] == ["FlashInfer", "FlashInfer TC"]
    rows = measured([SMALL, SMALL], peers=lambda shape, device: dict(list(makers.items())[-2:]))
    peers._import.cache_clear()
    assert all(set(row["peers_failed"].values()) == {"ImportError: no driver"} for row in rows)
    assert (tmp_path / "flashinfer.log").read_text() == "x"


def test_peers_of_a_shape(monkeypatch):
    from decode_grid import peers

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    dense = ["SDPA cuDNN", "SDPA flash", "FlashAttention 2", "FlashAttention 3"]
    assert list(peers.peers_of(SMALL, "cuda:0")) == [*dense, "FlashInfer", "FlashInfer TC"]
    assert list(peers.peers_of(Shape(7, 1, 128, lens=(9,)), "cuda:0")) == [*dense, "FlashInfer TC"]
    assert list(peers.peers_of(replace(SMALL, q_len=2), "cuda:0")) == [*dense, "FlashInfer TC", "FlashInfer prefill"]
    ragged = ["flash varlen", "FlashInfer", "FlashInfer TC"]
    assert list(peers.peers_of(replace(SMALL, lens=(7, 9)), "cuda:0")) == ragged
    assert peers.peers_of(replace(SMALL, page=1), "cuda:0") == {}


def test_shapes_after_the_time_limit_are_left_out():
    from decode_grid import measure

    (row,) = measure.run([SMALL], "cpu", "cpu", 1, -1)
    assert row["skipped"] == "left out: -1 s were over"
    assert row["seconds"] is None
    assert row["classes"] == ["all", "q_len 1", "between powers of two"]


class FakeWorker:
    """Stands in for the process that measures: a device that some peers stop."""

    def __init__(self, stops, ours_stops=False):
        self.stops, self.ours_stops, self.calls, self.closed = stops, ours_stops, [], False

    def measure(self, shape, device, target, rounds, without=()):
        self.calls.append(without)
        stopped = {name: "Error: illegal access" for name in self.stops if name not in without}
        (row,) = fake_rows([shape])
        fault = "the device failed" if stopped or self.ours_stops else ""
        return {**row, "peers_failed": stopped, "fault": fault, "wrong": fault}

    def close(self):
        self.closed = True


def test_after_a_fault_a_shape_is_measured_without_the_peer_that_failed():
    from decode_grid import measure

    worker = FakeWorker(["A"])
    rows = list(measure.run([SMALL, SMALL], "cuda:0", "sm90a", 1, 60, worker))
    assert worker.calls == [(), ("A",)] * 2
    assert worker.closed
    for row in rows:
        assert row["peers_failed"] == {"A": "Error: illegal access"}
        assert not row["wrong"]


def test_a_fault_of_ours_is_the_rows_and_the_run_goes_on():
    from decode_grid import measure

    rows = list(measure.run([SMALL, SMALL], "cpu", "cpu", 1, 60, FakeWorker([], ours_stops=True)))
    assert [row["wrong"] for row in rows] == ["the device failed"] * 2
    assert rows[0]["peers_failed"] == {"torch SDPA": "the device failed"}


def test_the_worker_measures_in_another_process_and_is_replaced_when_it_dies():
    pytest.importorskip("torch")
    import os

    from decode_grid import measure

    worker = measure.Worker()
    row = worker.measure(SMALL, "cpu", "no_such_target", 1)
    assert row["name"] == SMALL.name
    assert "no_such_target" in row["wrong"] + row["skipped"]
    process = next(iter(worker._pool._processes.values()))
    assert process.pid != os.getpid()
    process.kill()
    process.join()
    assert worker.measure(SMALL, "cpu", "cpu", 1)["fault"] == "the process that measured it died"
    row = worker.measure(SMALL, "cpu", "no_such_target", 1)
    assert not row["fault"]
    worker.close()


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
