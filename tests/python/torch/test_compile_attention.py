"""torch.compile(fullgraph=True) over attention and its dropout mask."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
from helpers import needs_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def make(*tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*tokens, heads, 64, generator=generator).to(torch.bfloat16) for heads in (4, 2, 2)]


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def expect_same(function, *arguments, **options):
    got, wanted = compiled(function, **options)(*arguments), function(*arguments)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_functional():
    def step(q, k, v, sinks, state):
        out, lse = flashport.attention(q * 2, k, v, causal=True, window=(9, 0), sinks=sinks, return_lse=True)
        dropped = flashport.attention(out, k, v, softcap=5.0, dropout_p=0.2, rng_state=state)
        return dropped + 1, lse, flashport.dropout_mask((2, 4, 20, 20), state, 0.2)

    expect_same(step, *make(2, 20), torch.randn(4), torch.tensor([7, 8]))


def test_packed():
    def step(q, k, v, offsets):
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 13, "max_seqlen_k": 13}
        return flashport.attention(q, k, v, **options, causal=True, return_lse=True)

    expect_same(step, *make(20), torch.tensor([0, 13, 20], dtype=torch.int32))


def test_the_function_alone():
    arguments = make(2, 20)
    assert torch.equal(compiled(flashport.attention)(*arguments), flashport.attention(*arguments))


def test_views_of_a_projection():
    def step(x, weight):
        q, k, v = (x @ weight).reshape(2, 20, 8, 32).split([4, 2, 2], dim=2)
        return (flashport.attention(q, k, v, causal=True).flatten(2) @ weight[:128],)

    expect_same(step, torch.randn(2, 20, 128), torch.randn(128, 256) / 10)


def test_one_graph_for_many_lengths():
    step = compiled(lambda q, k, v: flashport.attention(q, k, v, causal=True, return_lse=True), dynamic=True)
    for tokens in (20, 33, 70):
        arguments = make(2, tokens, seed=tokens)
        with torch.compiler.set_stance("default" if tokens == 20 else "fail_on_recompile"):
            got = step(*arguments)
        for one, other in zip(got, flashport.attention(*arguments, causal=True, return_lse=True), strict=True):
            assert torch.equal(one, other)


def test_in_place():
    def step(q, k, v, out, lse, mask, state):
        flashport.attention(q, k, v, out=out, lse=lse)
        flashport.dropout_mask((2, 4, 20, 20), state, 0.2, mask=mask)
        return out + 1, lse * 2, mask + 1

    q, k, v = make(2, 20)
    outputs = [
        [torch.full_like(q, 9), torch.zeros(2, 4, 20), torch.zeros(2, 4, 20, 20, dtype=torch.uint8)] for _ in range(2)
    ]
    state = torch.tensor([7, 8])
    for function, own in zip((compiled(step), step), outputs, strict=True):
        function(q, k, v, *own, state)
    assert all(map(torch.equal, *outputs))


def test_given_only_one_of_the_outputs():
    def step(q, k, v, out, lse):
        first = flashport.attention(q, k, v, out=out, return_lse=True)
        second = flashport.attention(q, k, v, lse=lse)
        return *first, *second

    q, k, v = make(2, 20)
    expect_same(step, q, k, v, torch.zeros_like(q), torch.zeros(2, 4, 20))


@needs_compiler
def test_inductor():
    def step(q, k, v):
        return flashport.attention(q * 2, k, v, causal=True).float().sum(-1)

    arguments = make(2, 20)
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


def test_fake_tensors_have_the_shapes_of_results():
    shapes = {"dense": ((2, 9), (2, 12)), "packed": ((9,), (12,))}
    offsets = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 12], dtype=torch.int32)
    for form, (q_tokens, k_tokens) in shapes.items():
        q, k, v = torch.randn(*q_tokens, 4, 32), torch.randn(*k_tokens, 2, 32), torch.randn(*k_tokens, 2, 48)
        options = {}
        if form == "packed":
            names = ("cu_seqlens_q", "cu_seqlens_k")
            options = {"max_seqlen_q": 9, "max_seqlen_k": 12, **dict(zip(names, offsets, strict=True))}
        wanted = flashport.attention(q, k, v, return_lse=True, **options)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(x) for x in (q, k, v)]
            got = flashport.attention(*fakes, return_lse=True, **options)
            alone = flashport.attention(*fakes, **options)
        assert [(x.shape, x.dtype, x.stride()) for x in got] == [(x.shape, x.dtype, x.stride()) for x in wanted]
        assert alone.shape == wanted[0].shape
