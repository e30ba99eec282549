"""The command line, end to end on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import flashport
from flashport import _core, devices
from flashport.benchmarks import harness
from flashport.cli import demo_attention, demo_gated_delta, demo_mixed, main


def run(*arguments, code=0):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_version_and_help():
    assert flashport.__version__ in run("--version")
    for command in ("demo", "bench", "trace", "support", "doctor", "selftest"):
        assert command in run("--help")
        assert "--help" in run(command, "--help")


def test_demo():
    output = run("demo", "--device", "cpu", "--quick")
    assert "correct" in output
    assert "two stages" in output
    assert "one call" in output
    assert "%" in output


def test_demo_of_attention():
    output = " ".join(run("demo", "attention", "--device", "cpu", "--quick").split())
    assert "correct" in output
    assert "64 queries of each sequence and all heads" in output
    for text in ("one prompt", "two packed", "TFLOP/s", "of torch.matmul", "plain bf16", "187 and 68"):
        assert text in output


def test_demo_of_attention_without_torch(monkeypatch):
    monkeypatch.setattr(harness, "find_torch", lambda device: None)
    assert "not measured" in run("demo", "attention", "--device", "cpu", "--quick")


def test_demo_of_attention_says_what_is_wrong(monkeypatch):
    right = demo_attention._on_device

    def wrong(batch, device):
        out, seconds = right(batch, device)
        out[-1, 31, 127] += 0.1
        return out, seconds

    monkeypatch.setattr(demo_attention, "_on_device", wrong)
    output = " ".join(run("demo", "attention", "--device", "cpu", "--quick", code=1).split())
    assert "wrong: one prompt: error" in output
    assert "two packed: error" in output
    assert "correct" not in output


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


MIXED = ("demo", "mixed", "--device", "cpu", "--prompt", "120", "--new", "10", "--batch", "2", "--hot", "32")


@pytest.mark.parametrize(
    "formats", [("q8_0", "q8_0"), ("q4_0", "fp16"), ("int8", "int4"), ("fp8_e4m3", "fp8_e5m2")], ids="-".join
)
def test_demo_of_a_mixed_cache(formats):
    output = " ".join(run(*MIXED, "--k-format", formats[0], "--v-format", formats[1]).split())
    assert f"the newest 32 tokens and the first 4 in fp16, others {'/'.join(formats)}" in output
    assert "correct: both are as near to fp64 as a plain fp16 implementation" in output
    sizes = {"q8_0": 34 / 32, "q4_0": 18 / 32, "fp16": 2, "int8": 1 + 2 / 8, "int4": 1 / 2 + 2 / 8}
    sizes |= {"fp8_e4m3": 1, "fp8_e5m2": 1}
    quantised = (130 - 4 - 32) // 64 * 64
    expected = 8 * 128 * (2 * 2 * (130 - quantised) + sum(sizes[fmt] for fmt in formats) * quantised) / 130
    found = re.search(r"│ mixed │ *[\d,]+ │ *([\d,]+) │", output)
    assert int(found[1].replace(",", "")) == round(expected)
    moved = float(re.search(r"moves outputs by (\S+) of the largest one", output)[1])
    assert 1e-4 < moved < 0.2


def test_demo_of_a_mixed_cache_says_what_is_wrong(monkeypatch):
    attend = demo_mixed._mixed_cache.MixedKVCache.attend
    monkeypatch.setattr(
        demo_mixed._mixed_cache.MixedKVCache, "attend", lambda self, q: attend(self, q) * np.float16(1.01)
    )
    assert "wrong: mixed" in run(*MIXED, code=1)
    assert "k_format must be one of" in run(*MIXED, "--k-format", "q3_k", code=2)


def test_unknown_demo():
    assert "'decode', 'attention', 'gdn'" in run("demo", "prefill", code=2)


def test_doctor_and_support():
    output = run("doctor")
    for name in ("cpu", "cuda", "hip"):
        assert name in output
    output = run("support", "--why")
    assert "yes" in output
    target = flashport.backends()[0].targets[0]
    output = run("support", "--target", target, "--why")
    assert f"gated delta rule on {target}" in output
    rows = [line for line in output.splitlines() if " ALiBi " in line]
    assert [row.count("yes") for row in rows] == [8, 8, 8]
    assert f"attention on {target}" in output
    rows = [line.split() for line in output.splitlines() if "gated_delta" in line]
    served = {tuple(row[1:6:2]): tuple(row[7:12:2]) for row in rows if len(row) == 13}
    queries, states = ("fp32", "fp16", "bf16"), ("fp32", "bf16")
    assert served == {
        **{("gated_delta", q, state): ("256", "256", "256") for q in queries for state in states},
        **{("gated_delta_chunk", q, state): ("256", "-", "-") for q in queries for state in states},
    }
    assert "- gated_delta_chunk takes one gate for each head; gated_delta_update takes others" in output
    assert f"decode_stage2/{target}" in run("support", "--target", target, "--kernels")
    assert "not compiled in" in run("support", "--target", "vax", code=2)


def test_selftest_says_what_is_declined_and_why(tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    right = devices.supports

    def without_chunks(operation, **options):
        no = devices.Support(False, "no chunks here")
        return no if operation == "gated_delta_chunk" else right(operation, **options)

    monkeypatch.setattr(devices, "supports", without_chunks)
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


def command(*arguments, stdout=subprocess.PIPE, **variables):
    """``python -m flashport`` in a process of its own, under these variables of the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPORT_")}
    return subprocess.run(
        [sys.executable, "-m", "flashport", *arguments],
        env=environment | variables, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip


def test_the_package_is_the_command():
    result = command("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert flashport.__version__ in result.stdout


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1e9", "4096"])
def test_a_wrong_number_of_threads(value, tmp_path):
    text = "FLASHPORT_NUM_THREADS must be a whole number from 1 to 1024 (not set: one thread for each processor), "
    text += f'got "{value}"'
    for arguments in (("demo", "--quick"), ("selftest", "--report", str(tmp_path / "report.json"))):
        result = command(*arguments, FLASHPORT_NUM_THREADS=value, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
        assert result.returncode == 1
        assert result.stderr.startswith("Error: there is no device to run on:\n")
        assert text in result.stderr
        assert "Traceback" not in result.stderr
    output = command("doctor", FLASHPORT_NUM_THREADS=value).stdout
    assert f"FLASHPORT_NUM_THREADS={value}" in output
    code = "import numpy, flashport; a = numpy.zeros((1, 1, 64), 'f4'); flashport.merge_states(a, a[..., 0])"
    environment = os.environ | {"FLASHPORT_NUM_THREADS": value}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert f"RuntimeError: merge_states: o is on cpu, which cannot be used: {text}" in result.stderr


def test_cpu_stands_for_its_variants():
    variants = next(backend.targets for backend in flashport.backends() if backend.name == "cpu")
    assert "cpu_generic" in variants
    both = run("support", "--target", "cpu")
    assert both == "".join(run("support", "--target", variant) for variant in variants)
    assert run("support", "--target", "cpu", "--target", "cpu_generic") == both
    in_use = _core.kernel_keys("cpu")[0].rpartition("/")[2]
    best = command("doctor", FLASHPORT_CPU_TARGET="cpu", COLUMNS="200").stdout
    assert "target cpu, here " + in_use in best
    generic = command("doctor", FLASHPORT_CPU_TARGET="cpu_generic", COLUMNS="200").stdout
    assert "target cpu, here cpu_generic" in generic
    wrong = command("demo", FLASHPORT_CPU_TARGET="avx", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="").stderr
    assert "FLASHPORT_CPU_TARGET must be cpu (the best) or a target that is compiled and runs on this" in wrong


@pytest.mark.parametrize("arguments", [("support", "--target", "cpu_generic"), ("doctor",), ("demo", "--quick")])
def test_a_narrow_terminal(arguments):
    """Nothing is cut off: rows are lists, each named by what would be its first cells."""
    result = command(*arguments, COLUMNS="40")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert "\u2026" not in text
    assert "\u2502" not in text
    joined = " ".join(text.split())
    if arguments[0] == "support":
        assert (
            "q bf16, cache q8_0 64: yes; 80: -; 96: yes; 128: yes; 192: yes; 256: yes; 512: yes; 192/128: yes" in joined
        )
        assert "operation gated_delta_chunk, q fp16, states bf16 gate: head: 256; gate: key: -; gate: any: -" in joined
    elif arguments[0] == "doctor":
        assert "cpu: yes compiled targets: cpu_generic" in joined
        assert "detail: built in" in joined
    else:
        for part in ("two stages, token table error: ", "; plain bf16: ", "; of read rate: "):
            assert part in joined


def test_no_color_is_no_escape_code():
    def on_a_terminal(**variables):
        ours, theirs = pty.openpty()
        result = command("doctor", stdout=theirs, TERM="xterm-256color", **variables)
        os.close(theirs)
        assert result.returncode == 0
        text = b""
        try:
            while part := os.read(ours, 1 << 16):
                text += part
        except OSError:  # what Linux says at the end of a terminal's output
            pass
        os.close(ours)
        return text

    assert b"\x1b[" in on_a_terminal(NO_COLOR="")
    plain = on_a_terminal(NO_COLOR="1")
    assert b"cpu" in plain
    assert b"\x1b" not in plain


@pytest.mark.parametrize("arguments", [("support",), ("support", "--kernels"), ("doctor",), ("--help",)])
def test_an_output_that_nobody_reads(arguments):
    """As of other programs: it ends by SIGPIPE, and says nothing."""
    read, write = os.pipe()
    os.close(read)
    result = command(*arguments, stdout=write)
    os.close(write)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("arguments", [("support", "--kernels"), ("support", "--target", "cpu"), ("--version",)])
def test_an_output_that_is_full(arguments):
    """Whether it is longer than the buffer of the output or not."""
    with Path("/dev/full").open("w") as full:
        result = command(*arguments, stdout=full)
    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "flashport: [Errno 28] No space left on device"
