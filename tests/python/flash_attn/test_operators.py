"""torch.ops.flash_attn, and torch.compile(fullgraph=True) over the drop-in."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32, offsets, random_tensors  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402
from flashport.flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: E402
from helpers import needs_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def expect_same(function, *arguments, **options):
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    got, wanted = compiled(function, **options)(*arguments), function(*copies)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(arguments, copies, strict=True):  # caches
        assert not isinstance(one, torch.Tensor) or torch.equal(one, other)


def dense(dim=32, q_len=20):
    return random_tensors(0, (2, q_len, 4, dim), (2, 33, 2, dim), (2, 33, 2, dim))


@pytest.mark.parametrize(("dim", "q_len"), [(32, 20), (59, 20), (32, 1), (59, 5)])
def test_dense(dim, q_len):
    def step(q, k, v, slopes):
        options = {"causal": True, "window_size": (30, 5), "alibi_slopes": slopes, "return_attn_probs": True}
        out, lse, s_dmask = flash_attn.flash_attn_func(q * 2, k, v, **options)
        return out + 1, lse, s_dmask, flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), softcap=2.0)

    expect_same(step, *dense(dim, q_len), torch.rand(2, 4))


def test_packed():
    def step(qkv, cu_seqlens):
        options = {"causal": True, "return_attn_probs": True}
        return flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 13, **options)

    expect_same(step, *random_tensors(1, (20, 3, 4, 40)), offsets([13, 7]))


def test_numbers_of_other_types():
    def step(q, k, v):
        one = flash_attn.flash_attn_func(q, k, v, 0, 1, causal=1, window_size=[9, -1], softcap=2)
        return one, flash_attn.flash_attn_with_kvcache(q, k, v, softmax_scale=1, causal=1, rotary_interleaved=None)

    expect_same(step, *dense())


def test_pages():
    def step(q, k, v, cu_q, cu_k, table):
        return (flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 30, 16, causal=True, block_table=table),)

    q, k, v = random_tensors(1, (33, 4, 32), (4, 8, 2, 32), (4, 8, 2, 32))
    expect_same(step, q, k, v, offsets([30, 3]), offsets([9, 16]), int32(2, 0, 3, 1).reshape(2, 2))


@pytest.mark.parametrize("q_len", [1, 20])
def test_a_cache_is_written(q_len):
    def step(q, k_cache, v_cache, k, v, cos, sin, seqlens):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, seqlens, causal=True, return_softmax_lse=True
        )
        return out, lse, k_cache.sum((1, 2, 3))

    shapes = (2, q_len, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32), (2, 3, 2, 32), (2, 3, 2, 32), (64, 8), (64, 8)
    expect_same(step, *random_tensors(2, *shapes), int32(9, 30))


def test_one_graph_for_many_lengths():
    step = compiled(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), dynamic=True)
    for tokens in (20, 33, 70):
        arguments = random_tensors(tokens, *[(2, tokens, 4, 32)] * 3)
        with torch.compiler.set_stance("default" if tokens == 20 else "fail_on_recompile"):
            got = step(*arguments)
        assert torch.equal(got, flash_attn.flash_attn_func(*arguments, causal=True))


def test_dropout_draws_anew_in_each_call():
    def step(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, 0.5), flash_attn.flash_attn_func(q, k, v, 0.5)

    one, other = compiled(step)(*dense())
    assert not torch.equal(one, other)


def test_the_graph_has_the_operators():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def step(q, k, v, packed, cu):
        out = flash_attn.flash_attn_func(q, k, v)
        return out, flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu, 9)

    torch.compile(step, fullgraph=True, backend=keep)(*dense(), torch.randn(9, 3, 4, 32), offsets([9]))
    targets = {str(node.target) for node in graphs[0].graph.nodes}
    assert {f"flash_attn._flash_attn_{name}.default" for name in ("forward", "varlen_forward")} <= targets


def test_rotary():
    def step(x, cos, sin, first, cu_seqlens):
        turned = apply_rotary_emb(x, cos, sin, seqlen_offsets=first)
        return turned, apply_rotary_emb(turned[0], cos, sin, True, cu_seqlens=cu_seqlens, max_seqlen=6)

    expect_same(step, *random_tensors(3, (2, 9, 4, 32), (20, 8), (20, 8)), int32(3, 0), offsets([6, 3]))


def test_rotary_of_a_module():
    rotary = RotaryEmbedding(16, interleaved=True)

    def step(qkv, q, kv, first):
        return rotary(qkv, seqlen_offset=3), *rotary(q, kv, seqlen_offset=first, max_seqlen=40)

    with torch.no_grad():
        expect_same(step, *random_tensors(3, (2, 9, 3, 4, 32), (2, 9, 4, 32), (2, 9, 2, 2, 32)), int32(3, 0))


@needs_compiler
def test_inductor():
    def step(q, k, v):
        return flash_attn.flash_attn_func(q * 2, k, v, causal=True).float().sum(-1)

    arguments = dense()
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(*arguments), step(*arguments))


FORWARD = [
    {},
    {"causal": True, "alibi_slopes": torch.rand(4)},
    {"q_len": 1},
    {"q_len": 5, "dim": 8},
    {"dropout_p": 0.2, "return_softmax": True},
]
VARLEN = [
    {},
    {"causal": True, "zero_tensors": True, "window_size_left": 3},
    {"seqused_k": int32(3, 5), "leftpad_k": int32(1, 0)},
    {"paged": True},
    {"paged": True, "max_seqlen_q": 16},
    {"dropout_p": 0.2, "return_softmax": True},
]
# With dropout two runs of an operator differ, as they should.
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL_UTILITIES = (*UTILITIES, "test_aot_dispatch_dynamic")


def forward_arguments(q_len=20, dim=32, causal=False, alibi_slopes=None, dropout_p=0.0, return_softmax=False):
    return (*dense(dim, q_len), dropout_p, 0.2, causal, -1, 4, 0.0, alibi_slopes, return_softmax)


def varlen_arguments(paged=False, max_seqlen_q=20, causal=False, dropout_p=0.0, **named):
    q, k, v = random_tensors(4, (17, 4, 32), (24, 2, 32), (24, 2, 32))
    if paged:
        k, v = (x.reshape(6, 4, 2, 32) for x in (k, v))
        named["block_table"] = int32(0, 5, 2, 1, 3, 4).reshape(2, 3)
    cu = offsets([9, 7]), offsets([12, 10])
    return (q, k, v, *cu, max_seqlen_q, 12, dropout_p, 0.2, causal), named


@pytest.mark.parametrize("options", FORWARD)
def test_opcheck_of_the_dense_form(options):
    utilities = UTILITIES if "dropout_p" in options else ALL_UTILITIES
    operator = torch.ops.flash_attn._flash_attn_forward.default
    torch.library.opcheck(operator, forward_arguments(**options), test_utils=utilities)


@pytest.mark.parametrize("options", VARLEN)
def test_opcheck_of_the_packed_form(options):
    utilities = UTILITIES if "dropout_p" in options else ALL_UTILITIES
    operator = torch.ops.flash_attn._flash_attn_varlen_forward.default
    if not options.get("zero_tensors"):  # rows of no sequence hold anything
        arguments, named = varlen_arguments(**options)
        arguments = (arguments[0][:16], *arguments[1:])
    else:
        arguments, named = varlen_arguments(**options)
    torch.library.opcheck(operator, arguments, named, test_utils=utilities)


@pytest.mark.parametrize("return_softmax", [False, True])
def test_fakes_by_their_private_names(return_softmax):
    drop = {"dropout_p": 0.2, "return_softmax": return_softmax}
    packed, named = varlen_arguments(**drop)
    for name, arguments, options in (
        ("_flash_attn_forward", forward_arguments(**drop), {}),
        ("_flash_attn_varlen_forward", packed, named),
    ):
        real = getattr(interface, name)(*arguments, **options)
        fake = getattr(interface, f"{name}_fake")(*arguments, **options)
        assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]
    with pytest.raises(NotImplementedError, match="no backward yet"):
        interface._flash_attn_backward_fake(*([None] * 17))


def test_operators_and_functions_are_the_same():
    wanted = interface._flash_attn_forward(*forward_arguments())
    assert all(map(torch.equal, torch.ops.flash_attn._flash_attn_forward(*forward_arguments()), wanted))
    arguments, named = varlen_arguments(zero_tensors=True)
    wanted = interface._flash_attn_varlen_forward(*arguments, **named)
    assert all(map(torch.equal, torch.ops.flash_attn._flash_attn_varlen_forward(*arguments, **named), wanted))


def test_an_operator_refuses_to_lose_a_gradient():
    q, *others = forward_arguments()
    with pytest.raises(NotImplementedError, match="_flash_attn_forward: q requires a gradient"):
        torch.ops.flash_attn._flash_attn_forward(q.requires_grad_(), *others)
    with torch.no_grad():
        assert not torch.ops.flash_attn._flash_attn_forward(q, *others)[0].requires_grad


REAL = """
import torch

library = torch.library.Library("flash_attn", "FRAGMENT")
library.define("_flash_attn_forward(Tensor q) -> Tensor")
library.impl("_flash_attn_forward", lambda q: q + 7, "CompositeExplicitAutograd")
import flashport.flash_attn as flash_attn
from flashport.flash_attn import _operators

assert not _operators.REGISTERED
assert torch.ops.flash_attn._flash_attn_forward(torch.zeros(1)) == 7
q = torch.randn(1, 20, 2, 32)
wanted = flash_attn.flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
step = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
got = step(q, q, q, causal=True, return_attn_probs=True)
assert all(torch.equal(a, b) for a, b in zip(got, wanted))
"""


def test_the_operators_of_a_real_flash_attn_stay():
    subprocess.run([sys.executable, "-W", "ignore", "-c", REAL], check=True)


def test_nothing_is_registered_before_the_package_is_imported():
    code = (
        "import flashport, torch; flashport.attention; assert not hasattr(torch.ops.flash_attn, '_flash_attn_forward')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
