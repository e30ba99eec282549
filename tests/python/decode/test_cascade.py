"""Cascades of shared levels against the oracle over whole sequences: layouts, groups, options, bits, errors."""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

import flashport
from flashport import CascadeLevel
from flashport.testing import oracle
from helpers import BF16, assert_close, from_torch, same, to_torch

HEADS, KV_HEADS, DIM = 8, 2, 64
SUFFIXES = (3, 40, 0, 7, 12, 65)
BATCH = len(SUFFIXES)
FP8 = ml_dtypes.float8_e4m3fn


class Pool:
    """A cache of pages, poisoned where no key lies, that gives out levels in every layout."""

    def __init__(self, dtype=np.float32, dim_v=DIM, seed=0):
        self.rng = np.random.default_rng(seed)
        self.dtype, self.dims = dtype, (DIM, dim_v)

    def rows(self, length):
        """New keys and values of a group: (length, Hkv, D) and (length, Hkv, DV)."""
        return [self.rng.standard_normal((length, KV_HEADS, dim)).astype(self.dtype) for dim in self.dims]

    def level(self, groups, layout="NHD", how="contiguous", page_size=16, **more):
        """A level over groups of rows."""
        lens = [len(k) for k, _ in groups]
        if how == "token_table":
            page_size = 1
        counts = [-(-length // page_size) for length in lens]
        pages = sum(counts) + 2
        order = self.rng.permutation(pages)
        longest = max([1, *lens])
        shape = (len(groups), longest + 3) if how == "contiguous" else (pages, page_size)
        caches = [np.full((*shape, KV_HEADS, dim), np.nan, self.dtype) for dim in self.dims]
        lists = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
        for g, group in enumerate(groups):
            for cache, rows in zip(caches, group, strict=True):
                if how == "contiguous":
                    cache[g, : len(rows)] = rows
                else:
                    for t, row in enumerate(rows):
                        cache[lists[g][t // page_size], t % page_size] = row
        seqlens = np.array(lens, np.int32)
        if how == "csr":
            more |= {
                "kv_indptr": np.cumsum([0, *counts], dtype=np.int32),
                "kv_indices": np.concatenate(lists).astype(np.int32),
                "kv_last_page_len": (np.maximum(seqlens, 1) - 1) % page_size + 1,
            }
            seqlens = None
        elif how != "contiguous":
            table = np.full((len(groups), max([1, *counts]) + 1), pages - 1, np.int32)
            for g, one in enumerate(lists):
                table[g, : len(one)] = one
            more["block_table" if how == "block_table" else "token_table"] = table
        if how == "token_table":
            caches = [cache[:, 0] for cache in caches]
        elif layout == "HND":
            caches = [np.ascontiguousarray(cache.swapaxes(1, 2)) for cache in caches]
        return CascadeLevel(*caches, seqlens, kv_layout=layout, **more)


@dataclasses.dataclass
class Cascade:
    """A call, and the keys and values of each request in the order of its levels."""

    q: np.ndarray
    levels: list
    keys: list
    options: dict = dataclasses.field(default_factory=dict)

    def truth(self, scales=(1, 1)):
        """(out, lse) of the oracle in fp64."""
        parts = []
        for b, parts_of in enumerate(self.keys):
            k, v = (np.concatenate(one).astype(np.float32) for one in zip(*parts_of, strict=True))
            request = oracle.Request(
                self.q[b : b + 1].astype(np.float32), k, v, self.options.get("softmax_scale"),
                softcap=self.options.get("softcap", 0.0), sinks=self.options.get("sinks"),
                k_scale=np.full(KV_HEADS, scales[0]), v_scale=np.full(KV_HEADS, scales[1]),
            )  # fmt: skip
            parts.append(oracle.attend(request))
        return tuple(np.concatenate(one) for one in zip(*parts, strict=True))

    def run(self, **more):
        return flashport.cascade_decode(self.q, self.levels, **self.options, **more)


def make(groupings=((6,),), lengths=((300,),), dtype=np.float32, dim_v=DIM, cache=None, seed=0, **layout):
    """``groupings`` has the sizes of each shared level's groups, ``lengths`` the keys of each."""
    pool = Pool(cache or dtype, dim_v, seed)
    keys = [[] for _ in range(BATCH)]
    levels = []
    for sizes, lens in zip((*groupings, (1,) * BATCH), (*lengths, SUFFIXES), strict=True):
        groups = [pool.rows(length) for length in lens]
        for b, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
            keys[b].append(groups[group])
        more = {}
        if len(levels) < len(groupings) and len(sizes) > 1:
            more["qo_indptr"] = np.cumsum([0, *sizes], dtype=np.int32)
        levels.append(pool.level(groups, **layout, **more))
    q = pool.rng.standard_normal((BATCH, HEADS, DIM)).astype(dtype)
    return Cascade(q, levels, keys)


GROUPS = {
    "no shared level": ((), ()),
    "one prefix": (((6,),), ((300,),)),
    "a long prefix, in pieces": (((6,),), ((5000,),)),
    "groups": (((2, 3, 1),), ((100, 257, 64),)),
    "groups without requests or keys": (((2, 0, 4),), ((0, 31, 129),)),
    "three levels": (((6,), (2, 1, 3)), ((200,), (64, 0, 65))),
    "four levels": (((6,), (4, 2), (2, 2, 2)), ((1,), (64, 130), (5, 0, 99))),
    "nothing but suffixes": (((6,),), ((0,),)),
}


@pytest.mark.parametrize("how", ["contiguous", "block_table", "csr", "token_table"])
@pytest.mark.parametrize("name", GROUPS)
def test_levels(name, how):
    x = make(*GROUPS[name], how=how)
    out, lse = x.run(return_lse=True)
    truth, truth_lse = x.truth()
    assert_close(out, truth, 2e-5)
    assert_close(lse, truth_lse, 2e-5)
    same(x.run(), out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_types_and_pages(dtype, page_size, layout):
    x = make(*GROUPS["three levels"], dtype=dtype, how="block_table", page_size=page_size, layout=layout)
    out, lse = x.run(return_lse=True)
    assert out.dtype == dtype
    assert_close(out, x.truth()[0], 0.02)
    assert_close(lse, x.truth()[1], 1e-4)


def test_values_of_another_head_dim():
    x = make(*GROUPS["groups"], dim_v=128)
    assert_close(x.run(), x.truth()[0], 2e-5)


def test_options():
    x = make(*GROUPS["three levels"], dtype=BF16)
    x.options = {
        "softmax_scale": 0.3, "softcap": 2.0, "sinks": np.linspace(-1, 3, HEADS).astype(np.float32),
    }  # fmt: skip
    out, lse = x.run(return_lse=True)
    assert_close(out, x.truth()[0], 0.02)
    assert_close(lse, x.truth()[1], 1e-4)


def test_quantised_caches():
    x = make(*GROUPS["groups"], dtype=BF16, cache=FP8, how="block_table")
    scales = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array([2.0], np.float32)}
    x.levels = [dataclasses.replace(level, **scales) for level in x.levels]
    assert_close(x.run(), x.truth((0.5, 2.0))[0], 0.03)


def test_requests_without_keys():
    x = make(((6,),), ((0,),))
    out, lse = x.run(return_lse=True)
    empty = SUFFIXES.index(0)
    assert not out[empty].any()
    assert (lse[empty] == -np.inf).all()
    assert np.isfinite(np.delete(out, empty, 0)).all()


def test_a_shared_level_of_all_of_its_keys():
    x = make(((6,),), ((300,),))
    k, v = (np.ascontiguousarray(cache[:, :300]) for cache in (x.levels[0].k_cache, x.levels[0].v_cache))
    x.levels[0] = CascadeLevel(k, v)
    assert_close(x.run(), x.truth()[0], 2e-5)


def test_requests_past_the_last_group_are_nobodys():
    x = make(*GROUPS["groups"])
    want = x.run()
    offsets = x.levels[0].qo_indptr.copy()
    offsets[-1] -= 1  # the last request has left: its place in a captured graph remains
    x.levels[0] = dataclasses.replace(x.levels[0], qo_indptr=offsets)
    assert_close(x.run()[:-1], want[:-1], 2e-5)


def test_the_longest_group_may_be_said():
    x = make(*GROUPS["groups"])
    want = x.run()
    x.levels[0] = dataclasses.replace(x.levels[0], max_group_len=3)
    same(x.run(), want)
    x.levels[0] = dataclasses.replace(x.levels[0], max_group_len=2)
    with pytest.raises(ValueError, match=r"^cascade_decode: levels\[0\]: qo_indptr"):
        x.run()


def test_given_outputs():
    x = make(*GROUPS["three levels"], dtype=BF16)
    want, want_lse = x.run(return_lse=True)
    wide = np.full((BATCH, 2 * HEADS, DIM), np.nan, BF16)
    out, lse = wide[:, 1::2], np.full((BATCH, HEADS), np.nan, np.float32)
    got = x.run(out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    same(out, want)
    same(lse, want_lse)
    assert np.isnan(wide[:, ::2].astype(np.float32)).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_workspace(library):
    x = make(((6,), (2, 1, 3)), ((20000,), (64, 0, 65)), dtype=BF16)
    want = x.run()
    size = flashport.cascade_workspace_size(x.q, x.levels)
    assert size > 0
    workspace = np.zeros(size + 64, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 16 :][:size]
    levels, q = x.levels, x.q
    if library == "torch":
        torch = pytest.importorskip("torch")
        levels, q, workspace = [on_torch(level) for level in levels], to_torch(q), torch.from_numpy(workspace)
    for _ in range(2):  # a workspace is left as it was found
        out = flashport.cascade_decode(q, levels, workspace=workspace)
        same(from_torch(out) if library == "torch" else out, want)
    for wrong, text in ((workspace[:-1], f"{size} bytes or more"), (workspace.reshape(1, -1), "got shape")):
        with pytest.raises(ValueError, match=rf"^cascade_decode: workspace must have .*{text}"):
            flashport.cascade_decode(q, levels, workspace=wrong)


def on_torch(level, device="cpu"):
    torch = pytest.importorskip("torch")
    values = {field.name: to_torch(getattr(level, field.name)) for field in dataclasses.fields(level)}
    return CascadeLevel(**{n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in values.items()})


@pytest.mark.parametrize("name", GROUPS)
def test_torch(name):
    pytest.importorskip("torch")
    x = make(*GROUPS[name], dtype=BF16, how="block_table")
    want, want_lse = x.run(return_lse=True)
    out, lse = flashport.cascade_decode(to_torch(x.q), [on_torch(level) for level in x.levels], return_lse=True)
    same(from_torch(out), want)
    same(from_torch(lse), want_lse)


def test_torch_compiles_it_whole():
    torch = pytest.importorskip("torch")
    x = make(*GROUPS["three levels"], dtype=BF16, how="block_table")
    want = x.run()
    levels = [on_torch(level) for level in x.levels]
    call = torch.compile(lambda q: flashport.cascade_decode(q, levels), fullgraph=True, backend="aot_eager")
    same(from_torch(call(to_torch(x.q))), want)


@pytest.fixture
def gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return torch


@pytest.mark.parametrize("name", GROUPS)
def test_a_gpu(name, gpu):
    x = make(*GROUPS[name], dtype=BF16, how="block_table")
    levels = [on_torch(level, "cuda") for level in x.levels]
    out, lse = flashport.cascade_decode(to_torch(x.q).cuda(), levels, return_lse=True)
    assert_close(from_torch(out.cpu()), x.truth()[0], 0.02)
    assert_close(from_torch(lse.cpu()), x.truth()[1], 1e-4)


def test_a_graph_is_replayed_with_other_lengths(gpu):
    torch = gpu
    x = make(*GROUPS["three levels"], dtype=BF16, how="block_table")
    levels = [on_torch(level, "cuda") for level in x.levels]
    q = to_torch(x.q).cuda()
    call = functools.partial(flashport.cascade_decode, q, levels)
    side = torch.cuda.Stream()
    first = call(stream=side)  # also on a stream that is not torch's own
    side.synchronize()
    same(from_torch(first.cpu()), from_torch(call().cpu()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    levels[1].seqlens.clamp_(max=33)
    levels[2].seqlens.clamp_(max=5)
    graph.replay()
    for parts in x.keys:
        parts[1:] = [[rows[:most] for rows in part] for part, most in zip(parts[1:], (33, 5), strict=True)]
    assert_close(from_torch(out.cpu()), x.truth()[0], 0.02)


def test_levels_have_the_same_heads():
    x = make(((6,),), ((50,),), dtype=BF16)
    shared = x.levels[0]
    one = CascadeLevel(shared.k_cache[..., :1, :], shared.v_cache[..., :1, :], shared.seqlens)
    with pytest.raises(ValueError, match=r"levels\[0\].k_cache must have the num_kv_heads of the last level, 2, got 1"):
        flashport.cascade_decode(x.q, [one, x.levels[1]])


def test_bits_do_not_depend_on_what_others_hold():
    """Other queries, other suffixes, another place in the batch: the same bits; with one piece also other groups."""
    x = make(((6,),), ((5000,),), dtype=BF16)
    want = x.run()
    turned = [5, 0, 1, 2, 3, 4]
    last = x.levels[1]
    moved = CascadeLevel(last.k_cache[turned], last.v_cache[turned], last.seqlens[turned])
    same(flashport.cascade_decode(x.q[turned], [x.levels[0], moved]), want[turned])
    others = x.q.copy()
    others[1:] *= -3
    lens = np.where(np.arange(BATCH) == 0, SUFFIXES, 1).astype(np.int32)
    k, v = (np.nan_to_num(cache.astype(np.float32)).astype(BF16) for cache in (last.k_cache, last.v_cache))
    same(flashport.cascade_decode(others, [x.levels[0], CascadeLevel(k, v, lens)])[0], want[0])

    uncut = dataclasses.replace(x.levels[0], num_splits=1)
    want = flashport.cascade_decode(x.q, [uncut, last])
    for b in range(BATCH):
        alone = CascadeLevel(last.k_cache[b : b + 1], last.v_cache[b : b + 1], last.seqlens[b : b + 1])
        same(flashport.cascade_decode(x.q[b : b + 1], [uncut, alone])[0], want[b])


def test_an_empty_batch():
    x = make()
    last = x.levels[-1]
    none = CascadeLevel(last.k_cache[:0], last.v_cache[:0], last.seqlens[:0])
    out, lse = flashport.cascade_decode(x.q[:0], [x.levels[0], none], return_lse=True)
    assert out.shape == (0, HEADS, DIM)
    assert lse.shape == (0, HEADS)


def of_level(i, **changes):
    def change(x):
        x.levels[i] = dataclasses.replace(x.levels[i], **changes)

    return change


def of_call(**changes):
    def change(x):
        for name, value in changes.items():
            if hasattr(x, name):
                setattr(x, name, value)
            else:
                x.options[name] = value

    return change


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


WRONG = [
    (of_call(q=[1]), TypeError, "q must be a tensor of torch, or an array of NumPy or CuPy, got list"),
    (of_call(q=zeros(6, 1, HEADS, DIM)), ValueError, r"q must have 3 dimensions \(batch, .*\), got 4"),
    (of_call(q=zeros(5, HEADS, DIM)), ValueError, r"levels\[\d\]: "),
    (of_call(q=zeros(6, HEADS, DIM, dtype=np.int8)), TypeError, r"levels\[0\]: q must be"),
    (of_call(levels=[]), ValueError, "levels must have one level or more, the last of a request each, got none"),
    (of_call(levels=None), TypeError, "levels must be a list of CascadeLevel, got NoneType"),
    (of_call(levels=[3]), TypeError, r"levels must be a list of CascadeLevel, got \['int'\]"),
    (of_level(-1, qo_indptr=np.arange(7, dtype=np.int32)), ValueError, r"levels\[2\].qo_indptr must be None, since"),
    (of_level(-1, max_group_len=1), ValueError, r"levels\[2\].max_group_len must be None"),
    (of_level(0, max_group_len=1), ValueError, r"levels\[0\].max_group_len must be None without qo_indptr, got 1"),
    (of_level(0, k_cache=3), TypeError, r"levels\[0\].k_cache must be an array with axes, got int"),
    (of_level(1, v_cache=None), TypeError, r"levels\[1\].v_cache must be an array with axes, got NoneType"),
    (of_level(0, v_cache=zeros(1, 303, KV_HEADS, 8)), ValueError, r"levels\[0\].v_cache must have the head_dim_v"),
    (of_level(0, k_cache=zeros(9, 9)), ValueError, r"levels\[0\]: k_cache must have 4 dimensions"),
    (of_level(0, k_cache=zeros(1, 203, 3, DIM)), ValueError, r"levels\[0\]: "),
    (of_level(0, k_cache=zeros(1, 203, KV_HEADS, DIM, dtype=np.float64)), TypeError, r"levels\[0\]: k_cache must be"),
    (of_level(2, k_cache=zeros(9, 9)), ValueError, r"levels\[2\]: k_cache must have"),
    (of_level(0, seqlens=zeros(1)), TypeError, r"levels\[0\]: seqlens must be int32"),
    (of_level(0, seqlens=np.array([999], np.int32)), ValueError, r"levels\[0\]: seqlens"),
    (of_level(1, seqlens=np.array([1], np.int32)), ValueError, r"levels\[1\]: seqlens must have shape"),
    (of_level(2, seqlens=None), TypeError, r"levels\[2\]: seqlens may be None only with"),
    (of_level(1, qo_indptr=np.array([0, 2, 3, 7], np.int32)), ValueError, r"levels\[1\]: qo_indptr"),
    (of_level(1, qo_indptr=np.array([0, 2, 6], np.int32)), ValueError, r"levels\[1\]: "),
    (of_level(1, qo_indptr=zeros(4)), TypeError, r"levels\[1\]: qo_indptr must be int32"),
    (of_level(1, max_group_len=0), ValueError, r"levels\[1\]: max_group_len must be 1 or more with qo_indptr, got 0"),
    (of_level(1, max_group_len="3"), TypeError, r"levels\[1\]: max_group_len must be"),
    (of_level(0, block_table=zeros(1, 2)), TypeError, r"levels\[0\]: block_table must be int32"),
    (of_level(2, token_table=zeros(1, 2)), ValueError, r"levels\[2\]: "),
    (of_level(0, kv_indptr=np.zeros(2, np.int32)), ValueError, r"levels\[0\]: "),
    (of_level(0, kv_layout="HDN"), ValueError, r'levels\[0\]: kv_layout must be "NHD" or "HND"'),
    (of_level(0, k_scale=zeros(3)), ValueError, r"levels\[0\]: k_scale must have"),
    (of_level(2, v_scale=zeros(1)), ValueError, r"levels\[2\]: v_scale"),
    (of_level(0, k_format="fp4"), ValueError, r"levels\[0\]: k_format must be"),
    (of_level(2, v_format="fp4"), ValueError, r"levels\[2\]: v_format must be"),
    (of_level(0, num_splits=-1), ValueError, r"levels\[0\]: num_splits must be"),
    (of_call(softmax_scale=float("nan")), ValueError, r"levels\[0\]: softmax_scale must be"),
    (of_call(softcap=-1.0), ValueError, r"levels\[0\]: softcap must be"),
    (of_call(sinks=zeros(3)), ValueError, r"levels\[2\]: sinks must have shape"),
    (of_call(out=[1]), TypeError, "out must be"),
    (of_call(out=zeros(6, HEADS, 8)), ValueError, "out must have shape"),
    (of_call(out=zeros(6, HEADS, DIM, dtype=np.float64)), TypeError, "out must be"),
    (of_call(lse=zeros(6, 3)), ValueError, "lse must have shape"),
    (of_call(lse=zeros(6, HEADS, dtype=np.float16)), TypeError, "lse must be float32, got float16"),
    (of_call(workspace=3), TypeError, "workspace must be a tensor of torch, or an array of NumPy or CuPy, got int"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_argument_is_named_and_nothing_is_written(case):
    change, error, text = WRONG[case]
    x = make(((6,), (2, 1, 3)), ((200,), (64, 3, 65)))
    x.options = {"out": zeros(BATCH, HEADS, DIM) + 5, "lse": zeros(BATCH, HEADS) + 5}
    given = list(x.options.values())
    change(x)
    with pytest.raises(error, match=f"^cascade_decode: {text}"):
        x.run()
    assert all((one == 5).all() for one in given)


@pytest.mark.parametrize("other", ["q", "k_cache of 0", "v_cache of 1", "k_cache of 2", "lse"])
def test_outputs_share_memory_with_nothing(other):
    x = make(((6,), (2, 1, 3)), ((200,), (64, 3, 65)))
    out = np.zeros((BATCH, HEADS, DIM), np.float32)
    if other == "q":
        x.q = out[::-1]
    elif other == "lse":
        x.options["lse"] = out[:, :, 0]
    else:
        name, _, i = other.split()
        cache = getattr(x.levels[int(i)], name)
        out = cache.reshape(-1)[: out.size].reshape(out.shape)
    before = out.copy()
    name = {"q": "out must not share memory with q", "lse": "lse must not share memory with out"}.get(
        other, f"out must not share memory with levels.{other[-1]}..{other.split()[0]}"
    )
    with pytest.raises(ValueError, match=f"^cascade_decode: {name}; pass another tensor"):
        x.run(out=out)
    same(out, before)


def test_arrays_of_other_libraries_are_refused():
    array = flashport.DeviceArray((6, HEADS, DIM), "float32")
    with pytest.raises(TypeError, match=r"^cascade_decode: q must be .*, got DeviceArray"):
        flashport.cascade_decode(array, make().levels)
