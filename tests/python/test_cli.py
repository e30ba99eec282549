"""The command line, end to end on the CPU."""

from __future__ import annotations

import importlib.util
import json

import pytest
from click.testing import CliRunner

import flashport
from flashport import devices
from flashport.cli import demo_gated_delta, main


def run(*arguments, code=0):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_version_and_help():
    assert flashport.__version__ in run("--version")
    for command in ("demo", "bench", "support", "doctor", "selftest"):
        assert command in run("--help")
        assert "--help" in run(command, "--help")


def test_demo():
    output = run("demo", "--device", "cpu", "--quick")
    assert "correct" in output
    assert "two stages" in output
    assert "one call" in output
    assert "%" in output


def test_demo_of_the_gated_delta_rule():
    output = run("demo", "gdn", "--device", "cpu", "--quick")
    assert "correct" in output
    assert "all tokens and all heads" in " ".join(output.split())
    for text in ("prefill by chunks", "decode, 16 steps", "states in the end", "tokens/s", "GB/s", "plain bf16"):
        assert text in output


def test_demo_of_the_gated_delta_rule_says_what_is_wrong(monkeypatch):
    right = demo_gated_delta._on_host

    def wrong(*arguments):
        truth, plain = right(*arguments)
        for results in (truth, plain):
            results.decode[3, 1] += 0.1
        return truth, plain

    monkeypatch.setattr(demo_gated_delta, "_on_host", wrong)
    output = run("demo", "gdn", "--device", "cpu", "--quick", code=1)
    assert "wrong: decode, 16 steps: error" in " ".join(output.split())
    assert "correct" not in output


def test_unknown_demo():
    assert "'decode', 'gdn'" in run("demo", "prefill", code=2)


def test_doctor_and_support():
    output = run("doctor")
    for name in ("cpu", "cuda", "hip"):
        assert name in output
    output = run("support", "--why")
    assert "yes" in output
    target = flashport.backends()[0].targets[0]
    output = run("support", "--target", target, "--why")
    assert f"gated delta rule on {target}" in output
    rows = [line.split() for line in output.splitlines() if "update" in line or "chunk" in line]
    served = {tuple(row[1:6:2]): tuple(row[7:12:2]) for row in rows if len(row) == 13}
    queries, states = ("fp32", "fp16", "bf16"), ("fp32", "bf16")
    assert served == {
        **{("update", q, state): ("256", "256", "256") for q in queries for state in states},
        **{("chunk", q, state): ("256", "-", "-") for q in queries for state in states},
    }
    assert "- gated_delta_chunk takes one gate for each head; gated_delta_update takes others" in output
    assert f"decode_stage2/{target}" in run("support", "--target", target, "--kernels")
    assert "not compiled in" in run("support", "--target", "vax", code=2)


def test_selftest_says_what_is_declined_and_why(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    right = devices.supports_gated_delta

    def without_chunks(operation, *query, target):
        return (
            devices.Support(False, "no chunks here")
            if operation == "chunk"
            else right(operation, *query, target=target)
        )

    monkeypatch.setattr(devices, "supports_gated_delta", without_chunks)
    output = run("selftest", "--device", "cpu", "--match", "gated_delta", "--report", str(report))
    (device,) = json.loads(report.read_text())["devices"]
    declined = [check for check in device["checks"] if check["status"] == "unsupported"]
    assert declined
    assert all(check["name"].startswith("gated_delta_chunk_") for check in declined)
    assert {check["detail"] for check in declined} == {"no chunks here"}
    assert f"{len(declined)} unsupported: no chunks here" in output
    assert device["counts"] == {
        "passed": len(device["checks"]) - len(declined),
        "unsupported": len(declined),
        "failed": 0,
    }


def test_selftest_writes_one_report(tmp_path):
    report = tmp_path / "report.json"
    output = run("selftest", "--device", "cpu", "--match", "d128", "--report", str(report))
    assert "0 failed" in output
    found = json.loads(report.read_text())
    assert found["flashport"] == flashport.__version__
    (device,) = found["devices"]
    assert device["counts"]["passed"] > 0
    assert {check["status"] for check in device["checks"]} <= {"passed", "unsupported"}


def test_bench_writes_json_and_png(tmp_path):
    arguments = ["bench", "--device", "cpu", "--rounds", "1", "--match", "1 x 1024"]
    figures = tmp_path / "bench.json"
    plot = tmp_path / "bench.png"
    drawn = importlib.util.find_spec("matplotlib") is not None
    output = run(*arguments, "--json", str(figures), *(["--plot", str(plot)] if drawn else []))
    assert "GB/s" in output
    rows = json.loads(figures.read_text())["rows"]
    assert rows
    assert all(row["seconds"] > 0 and row["read_seconds"] > 0 for row in rows)
    if drawn:
        assert plot.read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib" in run(*arguments, "--plot", str(plot), code=2)


def test_unknown_device():
    assert "no such device" in run("demo", "--device", "cuda:99", code=2)


@pytest.mark.parametrize(("command", "what"), [("bench", "case"), ("selftest", "check")])
def test_no_case(command, what):
    assert f"no {what} contains" in run(command, "--device", "cpu", "--match", "nothing at all", code=2)


@pytest.mark.parametrize("arguments", [("bench", "--json"), ("bench", "--plot"), ("selftest", "--report")])
def test_a_file_that_cannot_be_written_is_refused_at_once(arguments, tmp_path):
    command, option = arguments
    path = tmp_path / "missing" / "file"
    text = run(command, "--device", "cpu", "--match", "nothing at all", option, str(path), code=2)
    assert "cannot be written" in text
