"""flashport trace on the command line, end to end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

import flashport
import ggml_trace
from flashport import trace
from flashport.cli import common, main
from flashport.trace import _operators, _statistics
from ggml_trace import T


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(common.console, "width", 240)


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["trace", *map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


@pytest.fixture
def standard(tmp_path):
    ggml_trace.write(tmp_path / "standard.gguf", layers=2, calls=2, tokens=3)
    return tmp_path / "standard.gguf"


@pytest.fixture
def mixed(tmp_path):
    ggml_trace.write(tmp_path / "mixed.gguf", older=64, calls=2)
    return tmp_path / "mixed.gguf"


def rows(output):
    """Cells of the table's rows."""
    return [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in output.splitlines() if "│" in line]


def test_show(standard):
    output = run("show", standard)
    assert re.findall(r"^step (\d)", output, re.MULTILINE) == ["1", "2", "3", "4"]
    assert "step 2, layer 1, standard, scale 1/sqrt(D)" in output
    assert "k: cache_k_l1 (view) (permuted)_step_2  [VIEW > PERMUTE]  F16" in output
    assert "ne [64, 48, 2, 1], NumPy (1, 2, 48, 64), nb [2, 256, 128, 12288]" in output
    assert "infinite " in output
    assert "NaN 0" in output


def test_show_selects(standard):
    output = run("show", standard, "--layer", 1, "--name", "cache_k*")
    names = re.findall(r"\w+: (\S+) \(", output)
    assert names == ["cache_k_l1", "cache_k_l1"]
    assert "step 2," in output
    assert "step 4," in output
    assert re.findall(r"(\w+): KQ", run("show", standard, "--step", 3, "--name", "mask")) == ["mask"]
    assert "no tensor matches 'nothing'" in run("show", standard, "--name", "nothing", code=2)
    assert "has no such step" in run("show", standard, "--step", 9, code=2)


def test_show_gives_statistics_of_the_values(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(calls=1, kind=T.F32))
    file.steps[0].k.reshape(-1)[:2] = np.nan, np.inf
    name, _, kind = file.tensors[2]
    k = np.ascontiguousarray(file.steps[0].k)
    file.tensors[2] = name, k.view(np.uint8).reshape(1, 2, 48, 256), kind
    file.save(tmp_path / "t.gguf")
    found = _statistics.statistics(trace.load(tmp_path / "t.gguf")[0].k)
    finite = k[np.isfinite(k)].astype(np.float64)
    assert (found.nan_count, found.inf_count) == (1, 1)
    assert np.allclose([found.mean, found.std, found.sum], [finite.mean(), finite.std(), finite.sum()], rtol=1e-12)
    assert (found.min, found.max) == (finite.min(), finite.max())
    output = run("show", tmp_path / "t.gguf", "--name", "k")
    assert f"mean {finite.mean():.4g}, std {finite.std():.4g}, min {finite.min():.4g}" in output
    assert "NaN 1, infinite 1" in output


def test_show_of_every_link(tmp_path):
    ggml_trace.write(tmp_path / "t.gguf", chain=True, calls=1)
    output = run("show", tmp_path / "t.gguf", "--name", "cache_k")
    assert re.findall(r"\[(VIEW[^]]*)\]", output) == ["VIEW", "VIEW > PERMUTE", "VIEW > PERMUTE > CPY"]
    assert output.count("k, earlier link: ") == 2
    assert len(set(re.findall("mean (.*), min", output))) == 1


def test_compare(standard):
    found = rows(run("compare", standard, "--device", "cpu"))
    assert [row[1] for row in found[:3]] == ["recorded", "attention on cpu", "flash_decode on cpu"]
    assert {row[0] for row in found} == {f"{n}, layer {(n - 1) % 2}, standard" for n in range(1, 5)}
    for row in found:
        max_abs, relative, cosine, total, allowed = map(float, row[2:7])
        assert 0 <= relative < 1e-6
        assert max_abs < 1e-5
        assert abs(total) < 1e-3
        assert cosine > 0.9999999
        assert allowed == 1e-3
    native = flashport.supports("attention", target="cpu", dtype="float32", k_format="fp16", v_format="fp16", bias=True)
    assert {row[7] for row in found if row[1] == "attention on cpu"} == {"fp16/fp16 natively" if native else "as fp32"}


def test_compare_of_a_mixed_cache(mixed):
    found = rows(run("compare", mixed, "--device", "cpu"))
    assert {row[0] for row in found} == {"1, layer 0, mixed", "2, layer 0, mixed"}
    assert [row[1] for row in found[:3]] == ["recorded", "attention on cpu", "flash_decode_segments on cpu"]
    ways = ["", "F16/Q4_0 dequantised to fp32", "q4_0/q4_0 + fp16/fp16 natively"]
    assert [row[7] for row in found[:3]] == ways
    assert float(found[2][3]) < 1e-5
    assert 1e-4 < float(found[0][3]) < float(found[0][6]) < 0.05
    assert float(found[1][3]) < 1e-5


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0])
def test_compare_says_which_way_keys_went(tmp_path, kind):
    ggml_trace.write(tmp_path / "t.gguf", kind=kind, calls=1, tokens=2)
    found = rows(run("compare", tmp_path / "t.gguf", "--device", "cpu"))
    fmt = kind.name.lower()
    assert flashport.supports(
        "attention", target="cpu", dtype="float32", head_dim=64, k_format=fmt, v_format=fmt, bias=True
    )
    assert found[1][7] == f"{fmt}/{fmt} natively"
    assert found[1][1] == "attention on cpu"


def test_compare_fails_past_the_tolerance(mixed, standard, tmp_path):
    output = run("compare", mixed, "--tolerance", 1e-4, code=1)
    assert "past the tolerance: step 1 recorded" in output
    run("compare", standard, "--tolerance", 1e-4)
    file = ggml_trace.make(ggml_trace.Shape(calls=3))
    name, out, kind = file.tensors[5]
    file.tensors[5] = name, (out.view(np.float32) * np.float32(1.01)).view(np.uint8), kind
    file.save(tmp_path / "t.gguf")
    output = run("compare", tmp_path / "t.gguf", code=1)
    assert "past the tolerance: step 2 recorded\n" in output
    run("compare", tmp_path / "t.gguf", "--step", 1)
    run("compare", tmp_path / "t.gguf", "--step", 2, code=1)
    run("test", tmp_path / "t.gguf", "--step", 2)  # the operators alone are right


def test_a_wrong_operator_fails(standard, monkeypatch):
    right = _operators._attention

    def wrong(*arguments):
        result = right(*arguments)
        result.out[..., 5] += 0.01
        return result

    wrong.__name__ = "_attention"
    monkeypatch.setattr(_operators, "_attention", wrong)
    assert "past the tolerance: step 1 attention on cpu" in run("test", standard, "--device", "cpu", code=1)
    run("compare", standard, code=1)


def test_nan_fails(standard, tmp_path):
    data = bytearray(standard.read_bytes())
    tensor = gguf.GGUFReader(standard).tensors[0]
    data[tensor.data_offset : tensor.data_offset + 4] = b"\x00\x00\xc0\x7f"
    (tmp_path / "n.gguf").write_bytes(data)
    assert "step 1 recorded" in run("compare", tmp_path / "n.gguf", code=1)


def test_samples_follow_the_seed(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(calls=1, tokens=40))
    name, out, kind = file.tensors[0]
    values = out.view(np.float32).copy()
    values[0, 0, 17] += 1  # one query is wrong
    file.tensors[0] = name, values.view(np.uint8), kind
    file.save(tmp_path / "t.gguf")
    run("compare", tmp_path / "t.gguf", code=1)
    codes = []
    for seed in range(12):
        result = CliRunner().invoke(
            main, ["trace", "compare", str(tmp_path / "t.gguf"), "--sample", "8", "--seed", str(seed)]
        )
        codes.append(result.exit_code)
        rows_of = np.random.default_rng([seed, 1]).choice(40, 8, replace=False)
        assert result.exit_code == int(17 in rows_of)
    assert set(codes) == {0, 1}


def test_test(standard, mixed):
    for path in (standard, mixed):
        output = run("test", path, "--device", "cpu")
        assert "recorded" not in output
        assert "attention on cpu" in output
        assert "every error is within the tolerance" in output
    assert "no such device" in run("test", standard, "--device", "cuda:99", code=2)


@pytest.mark.parametrize("head_dim", [20, 640])
@pytest.mark.parametrize("command", ["compare", "test"])
def test_what_no_operator_takes_fails(tmp_path, command, head_dim):
    ggml_trace.write(tmp_path / "t.gguf", head_dim=head_dim, calls=2)
    output = run(command, tmp_path / "t.gguf", code=1)
    assert output.count("refused: attention: head_dim must be") == 2
    assert "within the tolerance" not in output
    what = {"compare": "no operator ran: only the recorded outputs were checked", "test": "nothing was checked"}
    assert f"{what[command]}, every operator refused every step\n" in output


def test_steps_that_no_operator_takes_are_named(tmp_path):
    rng = np.random.default_rng(0)
    with trace.Writer(tmp_path / "t.gguf") as writer:
        for head_dim in (64, 20, 64):
            q, k, v = rng.standard_normal((3, 1, 5, 2, head_dim), np.float32)
            weights = np.exp(np.einsum("bthd,bjhd->bhtj", q, k) * head_dim**-0.5)
            out = np.einsum("bhtj,bjhd->bthd", weights / weights.sum(-1, keepdims=True), v)
            writer.add(q, k, v, out)
    output = run("test", tmp_path / "t.gguf")
    assert "every error is within the tolerance\nno operator ran on step 2\n" in output
    run("test", tmp_path / "t.gguf", "--step", 2, code=1)
    assert "no operator ran" not in run("test", tmp_path / "t.gguf", "--step", 3)


def test_dropout_leaves_compare_the_recorded_outputs_and_test_nothing(tmp_path):
    q, k = np.ones((2, 1, 4, 2, 32), np.float32)
    with trace.Writer(tmp_path / "t.gguf") as writer:
        writer.add(q, k, k, np.full_like(q, 2), kept=np.ones((1, 2, 4, 4), np.int8), dropout_p=0.5)
    assert "every error is within the tolerance\nno operator ran on step 1\n" in run("compare", tmp_path / "t.gguf")
    assert "nothing was checked" in run("test", tmp_path / "t.gguf", code=1)


@pytest.mark.parametrize("command", ["compare", "test"])
def test_a_name_selects_steps(tmp_path, command):
    ggml_trace.write(tmp_path / "t.gguf", layers=2, calls=2)
    run_of = {pattern: rows(run(command, tmp_path / "t.gguf", "--name", pattern)) for pattern in ("k", "cache_k_l1*")}
    assert {row[0][0] for row in run_of["k"]} == {"1", "2", "3", "4"}
    assert {row[0][0] for row in run_of["cache_k_l1*"]} == {"2", "4"}
    assert {row[0][0] for row in rows(run(command, tmp_path / "t.gguf", "--name", "Qcur-0", "--step", 3))} == {"3"}
    assert "no tensor matches 'nothing'" in run(command, tmp_path / "t.gguf", "--name", "nothing", code=2)


@pytest.mark.parametrize(
    "option",
    [
        ("--softcap", "-1"), ("--softcap", "nan"), ("--softcap", "inf"), ("--max-bias", "-8"), ("--max-bias", "nan"),
        ("--scale", "nan"), ("--scale", "inf"), ("--scale", "a"), ("--tolerance", "nan"), ("--tolerance", "-1"),
    ],
    ids="=".join,
)  # fmt: skip
@pytest.mark.parametrize("command", ["show", "compare", "test", "diff"])
def test_numbers_that_are_none(standard, command, option):
    if command == "show" and option[0] == "--tolerance":
        return
    output = run(command, standard, *([standard] if command == "diff" else []), *option, code=2)
    assert f"Invalid value for '{option[0]}': " in output


def piped(*arguments, **environment):
    """What a command writes to a pipe."""
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")} | environment
    command = [sys.executable, "-m", "flashport", "trace", *map(str, arguments)]
    return subprocess.run(command, env=given, check=True, text=True, capture_output=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("columns", [None, 80, 100, 200])
def test_a_pipe_gets_whole_numbers(mixed, columns):
    """A table where it fits, else lists; 80 and 100 columns are too few for it."""
    wide = rows(run("compare", mixed, "--device", "cpu"))
    for command, place in (("compare", 3), ("test", 3)):
        expected = [row[place] for row in wide if command == "compare" or row[1] != "recorded"]
        options = {} if columns is None else {"COLUMNS": str(columns)}
        output = piped(command, mixed, "--device", "cpu", **options).stdout
        assert max(map(len, output.splitlines())) <= (columns or 160)
        is_table = columns in (None, 200)
        found = [row[place] for row in rows(output) if row[0]] if is_table else re.findall(r"relative: (\S+);", output)
        assert found == expected
        assert "…" not in output
    output = piped("diff", mixed, mixed).stdout
    assert len(rows(output)) == 2 * 7


def test_parameters_of_files_that_do_not_store_them(tmp_path):
    ggml_trace.write(tmp_path / "t.gguf", scale=0.3, softcap=4.0, max_bias=8.0, mask=T.F32, calls=1, tokens=2)
    options = ["--scale", 0.3, "--softcap", 4, "--max-bias", 8]
    run("compare", tmp_path / "t.gguf", *options)
    run("test", tmp_path / "t.gguf", *options)
    run("compare", tmp_path / "t.gguf", code=1)
    assert "scale 0.3, softcap 4, max_bias 8" in run("show", tmp_path / "t.gguf", *options)


def test_notes_are_shown(tmp_path):
    ggml_trace.write(tmp_path / "t.gguf", link="(view)", calls=1)
    note = (
        "step 1: k 'cache_k_l0 (view)_step_1': the name does not tell the order; bytes as ne has them reproduce kqv_out"
    )
    assert note in run("compare", tmp_path / "t.gguf")
    assert note.removeprefix("step 1: ") in run("show", tmp_path / "t.gguf")


def test_diff_of_equal_traces(standard, tmp_path):
    (tmp_path / "copy.gguf").write_bytes(standard.read_bytes())
    output = run("diff", standard, tmp_path / "copy.gguf")
    assert "no tensor differs" in output
    assert all(row[3] == "0" for row in rows(output))


def test_diff_names_the_first_link_that_differs(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(chain=True, calls=3, kind=T.F32))
    file.save(tmp_path / "a.gguf")
    per_step = len(file.tensors) // 3
    for place in (per_step + 4, 2 * per_step + 1):  # the copy of step 2's keys, and step 3's queries
        name, values, kind = file.tensors[place]
        changed = values.copy()
        changed.view(np.float32)[0, 1, 0, 3] += 0.5
        file.tensors[place] = name, changed, kind
    file.save(tmp_path / "b.gguf")
    output = run("diff", tmp_path / "a.gguf", tmp_path / "b.gguf", code=1)
    link = "(view) (permuted) (copy)"
    text = f"they part at step 2 (layer 0), k 'cache_k_l0 {link}_step_2', VIEW > PERMUTE > CPY: it differs by 0.5"
    assert text in output
    assert "at (0, 1, 0, 3)" in output
    by_link = {row[2]: row[3] for row in rows(output) if row[0].startswith("2,") and row[1] == "k"}
    assert by_link == {"VIEW": "0", "VIEW > PERMUTE": "0", "VIEW > PERMUTE > CPY": "0.5"}
    run("diff", tmp_path / "a.gguf", tmp_path / "b.gguf", "--step", 1)
    run("diff", tmp_path / "a.gguf", tmp_path / "b.gguf", "--name", "v")
    run("diff", tmp_path / "a.gguf", tmp_path / "b.gguf", "--tolerance", 1)


def test_diff_of_traces_of_other_shapes(standard, mixed, tmp_path):
    output = run("diff", standard, mixed, code=1)
    assert "standard.gguf has 4 steps" in " ".join(output.split())
    assert "they part at step 1 (layer 0), q" in output
    assert "has ne [64, 3, 8, 1] and [64, 1, 8, 1]" in output


def test_a_recording_and_its_copy_in_another_layout(tmp_path):
    """A chain with other links: an operand is held against the operand."""
    for name, link in (("a", "(view) (permuted)"), ("b", "(view) (permuted) (copy)")):
        ggml_trace.write(tmp_path / f"{name}.gguf", link=link, calls=2)
    assert "no tensor differs" in run("diff", tmp_path / "a.gguf", tmp_path / "b.gguf")


def test_plot(standard, tmp_path):
    pytest.importorskip("matplotlib")
    run("compare", standard, "--plot", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", ["p.xyz", "p", "p.png.gz"])
def test_a_plot_that_matplotlib_cannot_write(standard, tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_operators, "run_all", None)  # nothing is computed
    output = run("compare", standard, "--plot", tmp_path / name, code=2)
    assert re.search(rf"{re.escape(name)} must end with one of .*\.pdf, .*\.png, ", " ".join(output.split()))
    assert not (tmp_path / name).exists()


def test_plot_without_matplotlib(standard, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert "--plot needs matplotlib" in run("compare", standard, "--plot", tmp_path / "p.png", code=2)


PROGRAM = """
import sys
import numpy as np
import flashport
q = np.ones((1, 4, 64), np.float32)
for i in range(int(sys.argv[1])):
    flashport.flash_decode(q, q[:, None], q[:, None], np.ones(1, np.int32))
sys.exit(int(sys.argv[2]))
"""


def test_save(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    output = run("save", "--layers", 2, tmp_path / "t.gguf", script, 4, 0)
    assert "4 steps, 20 tensors" in output
    assert [step.layer for step in trace.load(tmp_path / "t.gguf")] == [0, 1, 0, 1]
    run("compare", tmp_path / "t.gguf")
    run("save", tmp_path / "t.gguf", sys.executable, script, 2, 3, code=3)
    assert len(trace.load(tmp_path / "t.gguf")) == 2
    assert "1 steps, 5 tensors" in run("save", tmp_path / "t.gguf", "--", script, 1, 0)
    assert "there is no PROGRAM after --" in run("save", tmp_path / "t.gguf", "--", code=2)
    assert "made no call that was recorded; it ended with exit status 0" in run(
        "save", tmp_path / "t.gguf", script, 0, 0, code=1
    )
    assert "No such file" in run("save", tmp_path / "t.gguf", tmp_path / "nothing", code=1)


def test_without_gguf(standard, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'flashport[trace]'" in run("show", standard, code=1)


def test_the_page_of_the_docs_lists_the_commands():
    page = (Path(__file__).parents[3] / "docs/traces.md").read_text()
    for command in main.commands["trace"].commands.values():
        assert f"flashport trace {command.name}" in page
        for option in command.params:
            if option.opts[0].startswith("--"):
                assert f"`{option.opts[0]}" in page, (command.name, option.opts)
