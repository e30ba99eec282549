"""MixedKVCache on a GPU: the bits of other splits, and captured graphs that are replayed as the cache grows."""

from __future__ import annotations

import pytest

import flashport

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

KV_HEADS, HEADS, DIM = 2, 8, 128


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half().cuda()


def made(pieces=(), **options):
    """(cache, keys, values): what the pieces have appended."""
    k, v = (random(2, 400, KV_HEADS, DIM, seed=seed) for seed in (1, 2))
    given = {"max_tokens": 400, "hot_tokens": 32, "spill_tokens": 16, "sink_tokens": 4} | options
    cache, begin = flashport.MixedKVCache(k, 2, KV_HEADS, DIM, **given), 0
    for piece in pieces:
        cache.append(k[:, begin : begin + piece], v[:, begin : begin + piece])
        begin += piece
        if not cache.auto_spill:
            cache.spill()
    return cache, k, v


def captured(*steps):
    """A graph of each step, after all have run once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    for step in steps:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            step()
    return graphs


@pytest.mark.parametrize(
    "formats",
    [("q8_0", "q8_0"), ("q4_0", "q5_1"), ("fp8_e4m3", "fp16"), ("int8", "int4"), ("fp8_e5m2", "int8")],
    ids="-".join,
)
def test_calls_do_not_matter(formats):
    options = dict(zip(("k_format", "v_format"), formats, strict=True))
    q = random(2, HEADS, DIM, seed=3)
    outputs = [made(pieces, **options)[0].attend(q) for pieces in ([130], [1] * 130, [7, 60, 50, 13])]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    options |= {"max_tokens": 400, "hot_tokens": 32, "spill_tokens": 16, "sink_tokens": 4}
    host = flashport.MixedKVCache(q.cpu(), 2, KV_HEADS, DIM, **options)
    host.append(*(random(2, 400, KV_HEADS, DIM, seed=seed)[:, :130].cpu() for seed in (1, 2)))
    assert (outputs[0].cpu().float() - host.attend(q.cpu()).float()).abs().max() < 2e-3


def test_a_graph_of_attend_follows_the_cache():
    cache, k, v = made([100])
    q, out = random(2, HEADS, DIM, seed=3), torch.empty(2, HEADS, DIM, dtype=torch.float16, device="cuda")
    (graph,) = captured(lambda: cache.attend(q, out=out))
    for token in range(100, 180):
        cache.append(k[:, token], v[:, token])
        graph.replay()
        assert torch.equal(out, cache.attend(q))


def test_graphs_of_append_and_spill():
    """Replayed, they make the cache that appends make which spill by themselves."""
    cache, k, v = made([10] * 10, auto_spill=False)
    automatic, _, _ = made([100])
    q, out = random(2, HEADS, DIM, seed=3), torch.empty(2, HEADS, DIM, dtype=torch.float16, device="cuda")
    new_k, new_v = k[:, 100].clone(), v[:, 100].clone()
    before = [segment.seqlens.clone() for segment in cache.segments()]

    def step():
        cache.append(new_k, new_v)
        cache.attend(q, out=out)

    graph, spill = captured(step, cache.spill)
    for segment, length in zip(cache.segments(), before, strict=True):
        segment.seqlens.copy_(length)
    for token in range(100, 180):
        new_k.copy_(k[:, token])
        new_v.copy_(v[:, token])
        graph.replay()
        if token % 16 == 0:
            spill.replay()
        automatic.append(k[:, token], v[:, token])
        assert torch.equal(cache.lengths, automatic.lengths)
    spill.replay()
    assert torch.equal(cache.quantised_lengths, automatic.quantised_lengths)
    assert torch.equal(cache.attend(q), automatic.attend(q))
