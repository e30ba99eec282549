"""The examples run as they stand, and say what they are to say."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example, as its folder's scripts import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = {path.stem for path in FOLDER.glob("*.py")}
    yield importlib.import_module
    for name in names & set(sys.modules):
        del sys.modules[name]


def run(module, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    module.main()
    return capsys.readouterr().out


def test_the_decode_loop(example, monkeypatch, capsys):
    out = run(example("mixed_decode"), monkeypatch, capsys, "--tokens", "120", "--hot-tokens", "32")
    assert re.search(r"^fp16 cache: [\d,]+ tokens/s$", out, re.MULTILINE)
    found = re.search(
        r"^(\d+) of 120 tokens are q8_0/q8_0; logits differ by (\S+) of the largest one", out, re.MULTILINE
    )
    assert found[1] == str((120 - 4 - 32) // 16 * 16)
    assert 1e-5 < float(found[2]) < 0.05


@pytest.mark.parametrize("formats", [("int8", "int4"), ("fp16", "q8_0"), ("fp16", "fp16")], ids="-".join)
def test_comparison_counts_the_keys_that_are_quantised(example, monkeypatch, capsys, tmp_path, formats):
    """100 tokens and up to five: 4 sinks, 64 that left the hot window in spills of 16, and the hot ones."""
    arguments = ["--folder", str(tmp_path), "--k-format", formats[0], "--v-format", formats[1]]
    out = run(example("compare_traces"), monkeypatch, capsys, *arguments)
    found = [tuple(re.findall(r"\S+", row)[2:4]) for row in out.replace("│", " ").splitlines() if "e-0" in row]
    expected = "0" if formats == ("fp16", "fp16") else "64"
    assert found == [(str(100 + i), expected) for i in range(1, 6)]


@pytest.mark.parametrize("formats", [("q8_0", "q8_0"), ("q4_0", "q5_1")], ids="-".join)
def test_comparison_of_traces(example, monkeypatch, capsys, tmp_path, formats):
    """25 tensors of a standard cache over five steps, 35 of a mixed one; both as the reference has them."""
    module = example("compare_traces")
    arguments = ["--folder", str(tmp_path), "--k-format", formats[0], "--v-format", formats[1]]
    out = run(module, monkeypatch, capsys, *arguments)
    assert "every figure is within its bound" in out
    loaded = [module.trace.load(tmp_path / f"{name}.gguf") for name in ("standard", "mixed")]
    assert [(len(each), each.tensor_count) for each in loaded] == [(5, 25), (5, 35)]
    for standard, mixed in zip(*loaded, strict=True):
        for step in (standard, mixed):
            assert np.abs(step.out[0] - module.reference(step)).max() < 1e-3 * np.abs(step.out).max()
        apart = np.abs(standard.out - mixed.out)[0]
        assert (apart <= module.bound(standard, mixed) + 1e-5).all()
        assert apart.max() > 1e-4
        assert [mixed.find(role).type.lower() for role in ("k_quant", "v_quant")] == list(formats)
        assert (standard.kind, mixed.kind) == ("standard", "mixed")


def test_comparison_fails_where_an_output_is_wrong(example, capsys, tmp_path):
    """The bounds are no formality: an output that is off by 1 % of its size, and keys in another order, are found."""
    module = example("compare_traces")
    console = module.Console()
    shape = module.Shape(layers=1)
    model, tokens = module.Model(shape), np.arange(90) % shape.vocab
    caches = [module.standard_caches(shape, 90), module.mixed_caches(shape, 90, hot_tokens=32, spill_tokens=16)]
    traces = [
        module.record(tmp_path / f"{i}.gguf", model, each, tokens[:88], tokens[88:]) for i, each in enumerate(caches)
    ]
    assert module.compare(*traces, console) == []
    changed = tmp_path / "changed.gguf"
    with module.trace.Writer(changed) as writer:
        for step in traces[1]:
            parts = {role: step.array(role) for part in step.parts for role in part}
            parts["k"] = parts["k"][:, ::-1]
            writer.add(step.q, out=step.out, mask=step.mask, scale=step.scale, **parts)
    found = module.compare(traces[0], module.trace.load(changed), console)
    assert [text.split(":")[0] for text in found] == ["step 1 of the mixed cache", "step 2 of the mixed cache"]
    capsys.readouterr()


@pytest.mark.filterwarnings("ignore")  # Transformers' own
def test_divergence_of_formats(example, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module = example("format_kl")
    formats = [
        ("fp16", "fp16", None), ("q8_0", "q8_0", None), ("q4_0", "q4_0", None), ("int8", "int8", 8),
        ("int8", "int8", 64), ("int4", "int4", 8), ("fp8_e5m2", "fp8_e5m2", None), ("fp8_e4m3", "fp8_e4m3", None),
    ]  # fmt: skip
    rows = module.measure(1, 80, 3, formats)
    capsys.readouterr()
    means = {(row[0], row[1]) if row[3] in "-8" else (row[0], row[1], row[3]): float(row[4]) for row in rows}
    everything, window = module.WINDOWS
    assert abs(means[everything, "fp16"]) < 1e-9
    assert 0 < means[everything, "q8_0"] < means[everything, "q4_0"] < 1
    assert means[everything, "q8_0"] < 1e-2
    assert 0 < means[everything, "int8"] < means[everything, "int8", "64"] < means[everything, "int4"] < 1
    assert means[everything, "fp8_e4m3"] < means[everything, "fp8_e5m2"] < 1
    assert set(formats) < set(module.FORMATS)
    assert means[window, "q4_0"] < means[everything, "q4_0"]
