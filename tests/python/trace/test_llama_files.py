"""Files as the trace tools of llama.cpp's forks write them, made by a writer that knows nothing of ours."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import ggml_trace
from flashport import trace
from flashport.trace import _layout, _reference
from ggml_trace import T


def relative(step):
    """The error of the recorded output against the reference."""
    return _reference.differences(step.out, _reference.reference(step)).relative


def check(path, written, limit=1e-3, **parameters):
    """Holds a loaded trace against what was written, element by element, and its outputs against the reference."""
    loaded = trace.load(path, **parameters)
    assert [step.number for step in loaded] == [step.number for step in written]
    assert [step.layer for step in loaded] == [step.layer for step in written]
    for step, truth in zip(loaded, written, strict=True):
        assert np.array_equal(step.q, truth.q[None])
        for role in ("k", "v", "k_quant", "v_quant"):
            expected = getattr(truth, role)
            found = getattr(step, role)
            assert (found is None) == (expected is None)
            assert expected is None or np.array_equal(found.astype(np.float32), expected[None]), role
        assert (step.mask is None) == (truth.mask is None)
        if truth.mask is not None:
            assert np.allclose(step.mask, truth.mask[None, None], rtol=1e-3, atol=0)
        assert np.array_equal(step.out, truth.out[None])
        assert relative(step) < (limit or _reference.tolerance(step))
    return loaded


@pytest.mark.parametrize("kind", [T.F16, T.F32, T.BF16])
@pytest.mark.parametrize("scheme", ["names", "sources"])
def test_standard_cache(tmp_path, kind, scheme):
    written = ggml_trace.write(tmp_path / "t.gguf", kind=kind, scheme=scheme, kv_heads=4)
    loaded = check(tmp_path / "t.gguf", written)
    assert (loaded.tensor_count, len(loaded)) == (25, 5)
    assert all(step.kind == "standard" and not step.notes for step in loaded)
    assert [tensor.role for tensor in loaded[0].tensors] == ["out", "q", "k", "v", "mask"]


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1])
def test_standard_cache_of_blocks(tmp_path, kind):
    written = ggml_trace.write(tmp_path / "t.gguf", kind=kind, head_dim=128)
    loaded = check(tmp_path / "t.gguf", written, limit=None)
    assert loaded[0].find("k").is_quantised
    assert loaded[0].find("k").type == kind.name
    assert all(1e-3 < _reference.tolerance(step) < 3e-2 for step in loaded)
    assert all(relative(step) > 1e-4 for step in loaded)  # the queries that were rounded


@pytest.mark.parametrize("kind", [T.Q8_0, T.Q4_0, T.Q5_1])
@pytest.mark.parametrize("scheme", ["names", "sources"])
def test_mixed_cache(tmp_path, kind, scheme):
    written = ggml_trace.write(tmp_path / "t.gguf", older=64, older_kind=kind, scheme=scheme, head_dim=128)
    loaded = check(tmp_path / "t.gguf", written, limit=None)
    assert (loaded.tensor_count, len(loaded)) == (35, 5)
    assert all(step.kind == "mixed" and not step.mask_is_hot_first for step in loaded)
    assert [tensor.role for tensor in loaded[0].tensors] == ["out", "q", "k", "v", "mask", "k_quant", "v_quant"]


def test_mixed_cache_whose_mask_has_the_hot_columns_first(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", older=64, hot_first=True, calls=12)
    loaded = check(tmp_path / "t.gguf", written, limit=None)
    *hiding, last = loaded
    assert all(step.mask_is_hot_first for step in hiding)
    assert all("hot keys first, which reproduces kqv_out" in step.notes[0] for step in hiding)
    assert not last.notes  # its mask hides nothing


def test_mixed_cache_with_two_masks(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", older=64, two_masks=True)
    loaded = check(tmp_path / "t.gguf", written, limit=None)
    assert loaded.tensor_count == 40
    assert loaded[0].find("mask_quant") is not None


def test_steps_count_over_layers_and_tokens_together(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", layers=3, calls=2)
    loaded = check(tmp_path / "t.gguf", written)
    assert [(step.number, step.layer) for step in loaded] == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 2)]
    assert [step.number for step in loaded.select(layer=1)] == [2, 5]
    assert [step.layer for step in loaded.select(step=6)] == [2]


@pytest.mark.parametrize("mask", [T.F16, T.F32, None])
def test_masks(tmp_path, mask):
    written = ggml_trace.write(tmp_path / "t.gguf", mask=mask, tokens=7, q_heads=6, kv_heads=3)
    loaded = check(tmp_path / "t.gguf", written)
    assert loaded.tensor_count == (20 if mask is None else 25)
    without = ggml_trace.write(tmp_path / "m.gguf", mask=mask, older=32)
    assert check(tmp_path / "m.gguf", without, limit=None).tensor_count == (30 if mask is None else 35)


@pytest.mark.parametrize("q_heads", [8, 6])
def test_scale_softcap_and_max_bias(tmp_path, q_heads):
    given = {"scale": 0.3, "softcap": 5.0, "max_bias": 8.0}
    written = ggml_trace.write(tmp_path / "t.gguf", tokens=3, q_heads=q_heads, mask=T.F32, **given)
    check(tmp_path / "t.gguf", written, **given)
    assert relative(trace.load(tmp_path / "t.gguf")[0]) > 0.05


def test_head_dims_that_differ(tmp_path):
    check(tmp_path / "t.gguf", ggml_trace.write(tmp_path / "t.gguf", head_dim=64, head_dim_v=32, tokens=2))


@pytest.mark.parametrize("link", ["(view) (permuted) (copy)", "(view) (permuted) (cont)"])
def test_copies_are_dense(tmp_path, link):
    loaded = check(tmp_path / "t.gguf", ggml_trace.write(tmp_path / "t.gguf", link=link))
    k = loaded[0].find("k")
    assert k.ne == (64, 48, 2, 1)
    assert k.nb == (2, 128, 48 * 128, 2 * 48 * 128)
    assert k.chain.startswith("VIEW > PERMUTE > C")


def test_all_links_of_a_chain(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", chain=True, head_dim=128, kv_heads=8, hot=256, calls=2)
    loaded = check(tmp_path / "t.gguf", written)
    keys = [tensor for tensor in loaded[0].tensors if tensor.role == "k"]
    assert [tensor.chain for tensor in keys] == ["VIEW", "VIEW > PERMUTE", "VIEW > PERMUTE > CPY"]
    assert [tensor.ne for tensor in keys] == [(128, 8, 256, 1), (128, 256, 8, 1), (128, 256, 8, 1)]
    assert [tensor.is_operand for tensor in keys] == [False, False, True]
    assert np.array_equal(keys[1].values(), keys[2].values())


def test_all_links_of_the_chains_of_a_mixed_cache(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", chain=True, kv_heads=4, older=64, older_kind=T.Q8_0, calls=2)
    loaded = check(tmp_path / "t.gguf", written, limit=None)
    assert [step.kind for step in loaded] == ["mixed", "mixed"]
    roles = ["out", "q", *("k",) * 3, *("v",) * 3, "mask", *("k_quant",) * 3, *("v_quant",) * 3]
    assert [tensor.role for tensor in loaded[0].tensors] == roles
    assert [tensor.chain for tensor in loaded[0].tensors if tensor.role == "k_quant"][-1] == "VIEW > PERMUTE > CPY"
    assert not loaded[0].notes


@pytest.mark.parametrize("link", ["(view)", "", "(view) (permuted) (reshaped)"])
def test_a_name_that_does_not_tell_is_decided_by_the_output(tmp_path, link):
    loaded = check(tmp_path / "t.gguf", ggml_trace.write(tmp_path / "t.gguf", link=link))
    for step in loaded:
        said = [note for note in step.notes if "bytes as ne has them reproduce kqv_out" in note]
        assert len(said) == (0 if "reshaped" in link else 2)


def test_bytes_of_a_parent_under_a_name_that_does_not_tell(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(older=32))
    file.tensors = [(name.replace(" (permuted)", ""), rows, kind) for name, rows, kind in file.tensors]
    file.save(tmp_path / "t.gguf")
    loaded = check(tmp_path / "t.gguf", file.steps, limit=None)
    assert all("in the order of its parent reproduce" in note for step in loaded for note in step.notes)
    assert [len(step.notes) for step in loaded] == [4] * 5  # keys and values; one query has one order


@pytest.mark.parametrize(("length", "end"), [(32, "(permuted)_step_1"), (36, "(permuted)_st"), (44, "(perm")])
def test_names_that_were_cut(tmp_path, length, end):
    """63 characters end within the links, or within the step."""
    written = ggml_trace.write(tmp_path / "t.gguf", prefix="c" * length, calls=1, layers=12)
    names = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "t.gguf").tensors]
    assert max(map(len, names)) == 63
    assert names[5 * 11 + 2].endswith(f"_k_l11 (view) {end}")
    loaded = check(tmp_path / "t.gguf", written)
    assert bool(loaded[11].notes) == (end == "(perm")


def test_a_cut_name_of_a_second_layout(tmp_path):
    written = ggml_trace.write(tmp_path / "t.gguf", prefix="c" * 50, calls=1)
    loaded = check(tmp_path / "t.gguf", written)
    assert loaded[0].find("k").name == "c" * 50 + "_k_l0 (view) "
    assert len(loaded[0].notes) == 2


def test_what_the_output_does_not_tell_is_refused(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(link="(view)", calls=1))
    name, rows, kind = file.tensors[0]
    file.tensors[0] = name, np.random.default_rng(0).permutation(rows.reshape(-1, 4)).reshape(rows.shape), kind
    file.save(tmp_path / "t.gguf")
    step = trace.load(tmp_path / "t.gguf")[0]
    with pytest.raises(trace.TraceError, match=r"t\.gguf: step 1: the names do not tell .* no order reproduces kqv"):
        _ = step.k
    # Queries of zeros take the mean of the values, whatever the keys are.
    name_q, rows_q, kind_q = file.tensors[1]
    file.tensors[1] = name_q, np.zeros_like(rows_q), kind_q
    mean = np.repeat(file.steps[0].v.mean(axis=0), 4, axis=0)
    file.tensors[0] = name, np.ascontiguousarray(mean).view(np.uint8).reshape(rows.shape), kind
    file.save(tmp_path / "u.gguf")
    with pytest.raises(trace.TraceError, match="several orders reproduce kqv_out"):
        _ = trace.load(tmp_path / "u.gguf")[0].v


def test_keys_in_the_order_of_the_cache(tmp_path):
    """[D, heads, n_kv] is no operand of the attention; its heads are those that divide the queries'."""
    file = ggml_trace.make(ggml_trace.Shape(head_dim=128, kv_heads=8, hot=256, q_heads=8, calls=1, link="(view)"))
    for i in (2, 3):
        name, rows, kind = file.tensors[i]
        cache = np.ascontiguousarray(rows.swapaxes(1, 2))  # dense bytes were (heads, n_kv)
        file.tensors[i] = name + "", cache, kind
    file.tensors[2:4] = [
        (name.replace("(view)", "(view) (cont)"), rows, kind) for name, rows, kind in file.tensors[2:4]
    ]
    file.save(tmp_path / "t.gguf")
    loaded = check(tmp_path / "t.gguf", file.steps)
    assert loaded[0].notes == [
        f"{role} 'cache_{role}_l0 (view) (cont)_step_1' has its heads before its tokens: [128, 8, 256, 1]"
        for role in "kv"
    ]


def test_torch_on_request(tmp_path):
    torch = pytest.importorskip("torch")
    written = ggml_trace.write(tmp_path / "t.gguf")
    step = trace.load(tmp_path / "t.gguf", arrays="torch")[0]
    assert isinstance(step.q, torch.Tensor)
    assert step.k.dtype == torch.float16
    assert np.array_equal(step.v.float().numpy(), written[0].v[None])


def test_an_output_alone_is_listed_and_not_read(tmp_path):
    file = ggml_trace.make(ggml_trace.Shape(calls=2))
    file.tensors = [file.tensors[0], file.tensors[5]]
    file.save(tmp_path / "t.gguf")
    loaded = trace.load(tmp_path / "t.gguf")
    assert [step.kind for step in loaded] == ["output", "output"]
    with pytest.raises(trace.TraceError, match="step 1 has no q; its tensors are 'kqv_out-0_step_1'"):
        _ = loaded[0].out


def test_names_are_taken_apart():
    name = _layout.parse_name("src1_cache_k_l12 (view) (permuted) (copy of KQ)_step_3")
    assert (name.base, name.source, name.step, name.layer) == ("cache_k_l12", 1, 3, 12)
    assert name.links == ("view", "permuted", "copy")
    assert name.chain == "VIEW > PERMUTE > CPY"
    assert _layout.parse_name("kqv_out-7_step_2").layer == 7
    assert _layout.parse_name("kqv_out_kqv_out-7_step_2").is_output
    assert not _layout.parse_name("src0_Qcur-7_step_2").is_output
