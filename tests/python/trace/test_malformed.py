"""Damaged files are a TraceError with the place, never a crash, a hang or an enormous allocation."""

from __future__ import annotations

import functools
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggml_trace
from flashport import trace
from flashport.cli import main
from flashport.trace import _reference, _statistics

ROLES = ["q", "k", "v", "mask", "k_quant", "v_quant", "sinks", "kept", "out"]


@functools.cache
def sound(name):
    """The bytes of a file of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.gguf")
        small = {"head_dim": 32, "hot": 6, "calls": 2, "q_heads": 4, "padded": 8}
        if name == "own":
            rng = np.random.default_rng(0)
            q, k = rng.standard_normal((2, 1, 6, 2, 32)).astype(np.float32)
            options = {"mask": np.zeros((1, 1, 6, 6), np.float16), "sinks": q[0, 0, :, 0]}
            options |= {"kept": np.ones((1, 2, 6, 6), np.int8), "dropout_p": 0.25}
            with trace.Writer(path) as writer:
                for layer in range(2):
                    writer.add(q, k, k, q, layer=layer, **options)
        else:
            ggml_trace.write(
                path, older=3 if name == "mixed" else 0, link="(view)" if name == "open" else "(permuted)", **small
            )
        return path.read_bytes()


KINDS = ["standard", "mixed", "open", "own"]


def load_all(path):
    """Reads everything; what was refused, or nothing."""
    try:
        loaded = trace.load(path)
        for step in loaded:
            for role in ROLES:
                getattr(step, role)
            _reference.differences(step.out, _reference.reference(step))
            for tensor in step.tensors:
                _statistics.statistics(tensor.values())
    except trace.TraceError as error:
        return str(error)
    return ""


def check(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.gguf")
        path.write_bytes(data)
        tracemalloc.start()
        try:
            refused = load_all(path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64e6 + 400 * len(data)
        assert not refused or refused.startswith((str(path), "tensor "))
        return not refused


def place_of(data, needle, skip=0):
    return data.index(needle) + len(needle) + skip


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_read(kind):
    assert check(sound(kind))


LARGE = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 31, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_of_the_header_that_are_wrong(kind, data):
    whole = bytearray(sound(kind))
    header = whole.rindex(b"_step_2") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=9), LARGE.map(lambda x: struct.pack("<Q", x))))
        whole[at : at + len(new)] = new
    check(bytes(whole))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_numbers_of_tensors_that_are_wrong(kind, data):
    """Axes, extents, type and offset of one tensor, each replaced by a number that is possible elsewhere."""
    whole = bytearray(sound(kind))
    count = whole.count(b"_step_")
    at = 0
    for _ in range(data.draw(st.integers(1, count))):
        at = whole.index(b"_step_", at) + len(b"_step_1")
    dims = struct.unpack_from("<I", whole, at)[0]
    if dims > 4:  # a name within the metadata
        return
    field = data.draw(st.integers(0, dims + 2))
    if field == 0:
        struct.pack_into("<I", whole, at, data.draw(st.integers(0, 2**32 - 1)))
    elif field <= dims:
        struct.pack_into("<Q", whole, at + 4 + 8 * (field - 1), data.draw(LARGE))
    elif field == dims + 1:
        struct.pack_into("<I", whole, at + 4 + 8 * dims, data.draw(st.integers(0, 45)))
    else:
        struct.pack_into("<Q", whole, at + 8 + 8 * dims, data.draw(LARGE))
    check(bytes(whole))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_that_are_wrong(kind, data):
    """NaN, infinities and any other bits in the data are read, and compared without a warning."""
    whole = bytearray(sound(kind))
    begin = whole.rindex(b"_step_2") + 100
    for _ in range(5):
        at = data.draw(st.integers(begin, len(whole) - 4))
        whole[at : at + 4] = data.draw(
            st.sampled_from([b"\xff" * 4, b"\x00\x00\x80\x7f", b"\x00\x7c\x00\xfc", b"\xff\x7b" * 2])
        )
    check(bytes(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_truncation_at_every_place(kind):
    data = sound(kind)
    header = data.rindex(b"_step_2") + 40
    for length in [*range(0, header, 7), header, len(data) // 2, len(data) - 64]:
        assert not check(data[:length]), length


def message(tmp_path, data):
    (tmp_path / "t.gguf").write_bytes(data)
    return load_all(tmp_path / "t.gguf").removeprefix(f"{tmp_path / 't.gguf'}: ")


def test_messages(tmp_path):
    data = sound("standard")
    assert message(tmp_path, b"") == "the file is empty"
    assert message(tmp_path, b"GGML" + data[4:]).startswith("no GGUF file: it begins with b'GGML', expected b'GGUF'")
    assert message(tmp_path, data[:4] + struct.pack("<I", 9) + data[8:]).startswith("GGUF version 9, expected 2 or 3")
    assert message(tmp_path, data[:4] + struct.pack(">I", 3) + data[8:]).startswith("a big-endian file")
    assert "tensors do not fit into the" in message(tmp_path, data[:8] + struct.pack("<Q", 2**60) + data[16:])
    assert "metadata entries do not fit into the" in message(tmp_path, data[:16] + struct.pack("<Q", 2**60) + data[24:])
    assert message(tmp_path, data[:2]).startswith("the file ends within the magic number: 4 bytes expected, 2 left")
    assert "takes" in message(tmp_path, data[:-64])
    assert "and the file has" in message(tmp_path, data[:-64])
    at = place_of(data, b"kqv_trace.tensor_count", 4)
    wrong = data[:at] + struct.pack("<i", 12) + data[at + 4 :]
    assert message(tmp_path, wrong) == "kqv_trace.tensor_count is 12, and the file has 10"
    at = place_of(data, b"kqv_trace.total_steps", 4)
    wrong = data[:at] + struct.pack("<i", 7) + data[at + 4 :]
    assert message(tmp_path, wrong) == "kqv_trace.total_steps is 7, and the file has 2"
    wrong = data.replace(b"kqv_out-0", b"kqv_aut-0")
    assert "comes before any kqv_out" in message(tmp_path, wrong)
    wrong = data.replace(b"KQ_mask (copy)_step_2", b"KQ_mask (copy)_step_1")
    assert "two tensors have the name" in message(tmp_path, wrong)
    wrong = data.replace(b"Qcur-0 (permuted)_step_2", b"Qcur-0 (permuted)_step_3").replace(
        b"(view) (permuted)_step_2", b"(view) (permuted)_step_3"
    )
    assert "stands among those of step 2" in message(tmp_path, wrong)


def test_messages_of_our_own_files(tmp_path):
    data = sound("own")
    at = place_of(data, b"flashport.trace.tensor.nb", 4 + 4 + 8)
    for place, value in ((1, 2**40), (2, 3), (0, 8), (3, 2**63)):
        wrong = bytearray(data)
        struct.pack_into("<Q", wrong, at + 8 * (4 + place), value)  # of q
        assert "which lead out of its" in message(tmp_path, bytes(wrong)), place
    at = place_of(data, b"flashport.trace.version", 4)
    assert "flashport.trace.version is 2, expected 1" in message(tmp_path, data[:at] + b"\x02" + data[at + 1 :])
    at = place_of(data, b"flashport.trace.tensor.step", 4 + 4 + 8)
    assert "must have every number from 1 on" in message(tmp_path, data[:at] + b"\x09" + data[at + 1 :])
    at = place_of(data, b"flashport.trace.step.scale", 4 + 4 + 8)
    wrong = data[:at] + struct.pack("<d", np.nan) + data[at + 8 :]
    assert "flashport.trace.step.scale must be finite" in message(tmp_path, wrong)


@pytest.mark.parametrize("name", ["softcap", "max_bias"])
def test_parameters_of_our_own_files(tmp_path, name):
    data = sound("own")
    at = place_of(data, b"flashport.trace.step." + name.encode(), 4 + 4 + 8)
    for value, text in ((-1.0, "must be at least 0, got [0.0, -1.0]"), (np.inf, "must be finite, got [0.0, inf]")):
        wrong = data[: at + 8] + struct.pack("<d", value) + data[at + 16 :]
        assert message(tmp_path, wrong) == f"flashport.trace.step.{name} {text}"


@pytest.mark.parametrize("kind", ["standard", "own"])
@pytest.mark.parametrize(("key", "count"), [("tensor_count", {"standard": 10, "own": 14}), ("total_steps", 2)])
def test_counts(tmp_path, kind, key, count):
    data = sound(kind)
    count = count if isinstance(count, int) else count[kind]
    at = place_of(data, b"kqv_trace." + key.encode())
    assert data[at : at + 8] == struct.pack("<Ii", 5, count)
    for other, said in (
        (struct.pack("<Ii", 5, count + 1), count + 1),
        (struct.pack("<Ii", 5, -count), -count),
        (struct.pack("<If", 6, count), float(count)),
    ):
        wrong = data[:at] + other + data[at + 8 :]
        assert message(tmp_path, wrong) == f"kqv_trace.{key} is {said!r}, and the file has {count}"


NO_PARAMETERS = {
    "text": ({"scale": "a"}, TypeError, "scale must be a number, got 'a'"),
    "bool": ({"softcap": True}, TypeError, "softcap must be a number, got True"),
    "none": ({"max_bias": None}, TypeError, "max_bias must be a number, got None"),
    "nan": ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "inf": ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
    "softcap": ({"softcap": -1}, ValueError, "softcap must be at least 0, got -1"),
    "max_bias": ({"max_bias": -0.5}, ValueError, "max_bias must be at least 0, got -0.5"),
}


@pytest.mark.parametrize(("options", "kind", "text"), NO_PARAMETERS.values(), ids=NO_PARAMETERS)
def test_parameters_that_are_none(tmp_path, options, kind, text):
    path = tmp_path / "t.gguf"
    path.write_bytes(sound("standard"))
    with pytest.raises(kind, match=f"^trace.load: {text}$") as raised:
        trace.load(path, **options)
    assert not isinstance(raised.value, trace.TraceError)
    q = np.ones((1, 2, 2, 32), np.float32)
    with trace.Writer(tmp_path / "w.gguf") as writer:
        with pytest.raises(kind, match=f"^trace.Writer.add: {text}$"):
            writer.add(q, q, q, q, **options)
        assert writer.steps == 0
    assert trace.load(path, scale=np.float32(0.5), softcap=2, max_bias=np.float64(8))[0].softcap == 2


@pytest.mark.parametrize("kind", [np.int32, np.int8, np.float64])
def test_masks_of_other_types(tmp_path, kind):
    q = np.ones((1, 2, 2, 32), np.float32)
    with trace.Writer(tmp_path / "t.gguf") as writer:
        writer.add(q, q, q, q, mask=np.zeros((1, 1, 2, 2), kind))
    step = trace.load(tmp_path / "t.gguf")[0]
    for read in (lambda: step.mask, lambda: step.out):
        with pytest.raises(trace.TraceError, match=r"mask .* must have fp16 or fp32 values and no [IF]\d+, got ne"):
            read()


def test_other_gguf_files(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(trace.TraceError, match="comes before any kqv_out"):
        trace.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("command", ["show", "compare", "test", "diff"])
def test_the_command_line_says_what_is_wrong(tmp_path, command):
    path = tmp_path / "t.gguf"
    path.write_bytes(sound("standard")[:200])
    result = CliRunner().invoke(main, ["trace", command, str(path), *([str(path)] if command == "diff" else [])])
    assert result.exit_code == 1
    assert "Error: " in result.output
    assert "Traceback" not in result.output
    assert "left" in result.output
