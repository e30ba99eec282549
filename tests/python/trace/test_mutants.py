"""Readers that are wrong as readers of traces have been: each fails a comparison that the right one passes."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import ggml_trace
from flashport import trace
from flashport.cli import main
from flashport.trace import _layout, _reference, _steps
from ggml_trace import T


def exit_code(path):
    return CliRunner().invoke(main, ["trace", "compare", str(path)]).exit_code


def worst(path):
    """The largest relative error of a file's outputs."""
    return max(_reference.differences(s.out, _reference.reference(s)).relative for s in trace.load(path))


CASES = {
    "standard": {"kv_heads": 4, "tokens": 3},
    "q8_0": {"kind": T.Q8_0},
    "mixed": {"older": 64, "tokens": 2},
}


@pytest.fixture(params=CASES)
def path(request, tmp_path):
    """A trace that the right reader reads."""
    ggml_trace.write(tmp_path / "t.gguf", calls=2, **CASES[request.param])
    assert exit_code(tmp_path / "t.gguf") == 0
    assert worst(tmp_path / "t.gguf") < 0.02
    return tmp_path / "t.gguf"


@pytest.fixture
def own(tmp_path):
    """A trace of ours, whose strides are in its metadata."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, n, h, 64)).astype(np.float32) for n, h in ((3, 4), (24, 2), (24, 2)))
    with trace.Writer(tmp_path / "own.gguf") as writer:
        step = _steps.Step("", 1, 0, [])
        writer.add(q, k, v, _reference.attend(q, k, v, None, step))
    assert exit_code(tmp_path / "own.gguf") == 0
    return tmp_path / "own.gguf"


def test_a_reader_that_takes_all_tensors_for_dense(path, monkeypatch):
    monkeypatch.setattr(_layout, "told_strides", lambda entry, name: [_layout.dense_strides(entry)])
    assert exit_code(path) == 1
    assert worst(path) > 0.1


def test_a_reader_that_ignores_strides(own, monkeypatch):
    values = _layout.values
    monkeypatch.setattr(_layout, "values", lambda entry, nb: values(entry, _layout.dense_strides(entry)))
    assert exit_code(own) == 1
    assert worst(own) > 0.1


def test_a_reader_that_takes_heads_for_tokens(path, monkeypatch):
    """Axes 1 and 2 of the output in the wrong order."""
    decide = _steps._decide
    right = decide.output

    def swapped(step):
        out = right(step)
        return out.reshape(out.shape[0], out.shape[2], out.shape[1], -1).swapaxes(1, 2)

    monkeypatch.setattr(decide, "output", swapped)
    tokens = trace.load(path)[0].need("q").ne[1]
    assert exit_code(path) == (1 if tokens > 1 else 0)  # of one token both are the same


def test_a_reader_that_swaps_the_axes_of_keys(path, monkeypatch):
    values = _layout.values

    def swapped(entry, nb):
        found = values(entry, nb)
        return found.reshape(found.shape[0], found.shape[2], found.shape[1], -1).swapaxes(1, 2)

    monkeypatch.setattr(_layout, "values", swapped)
    assert exit_code(path) == 1
    assert worst(path) > 0.1


def test_a_reader_that_exchanges_nibbles(tmp_path, monkeypatch):
    ggml_trace.write(tmp_path / "t.gguf", older=64, calls=1)
    assert exit_code(tmp_path / "t.gguf") == 0
    rows = _layout.rows

    def exchanged(entry, nb):
        found = np.array(rows(entry, nb), order="C")
        if entry.type.name == "Q4_0":
            blocks = found.reshape(-1, 18)
            blocks[:, 2:] = blocks[:, 2:] << 4 | blocks[:, 2:] >> 4
        return found

    monkeypatch.setattr(_layout, "rows", exchanged)
    assert exit_code(tmp_path / "t.gguf") == 1
    assert worst(tmp_path / "t.gguf") > 0.1


def test_a_reader_that_puts_hot_keys_first(tmp_path, monkeypatch):
    ggml_trace.write(tmp_path / "t.gguf", older=64, calls=9)
    joined = _reference.joined
    monkeypatch.setattr(_reference, "joined", lambda older, newer: joined(newer, older) if older is not None else newer)
    assert exit_code(tmp_path / "t.gguf") == 1


@pytest.mark.parametrize("wrong", ["scale", "softcap", "max_bias"])
def test_parameters_that_are_not_those_of_the_run(tmp_path, wrong):
    ggml_trace.write(tmp_path / "t.gguf", mask=T.F32, tokens=2, calls=1, scale=0.3, softcap=4.0, max_bias=8.0)
    given = {"scale": 0.3, "softcap": 4.0, "max_bias": 8.0}
    options = [text for key, value in given.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    command = ["trace", "compare", str(tmp_path / "t.gguf")]
    assert CliRunner().invoke(main, command + options).exit_code == 0
    options[2 * list(given).index(wrong) + 1] = "0.1"
    assert CliRunner().invoke(main, command + options).exit_code == 1
