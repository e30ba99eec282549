"""torch.compile(fullgraph=True) over the functions of the package, and the operators' own rules."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
from flashport.torch import decode  # noqa: E402, F401
from helpers import needs_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling

LENS = (40, 7, 1)


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    seqlens = torch.tensor(LENS, dtype=torch.int32)
    return random(3, 8, 128), random(3, 40, 2, 128), random(3, 40, 2, 128), seqlens


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_functional_decode():
    def step(q, k, v, seqlens):
        out, lse = flashport.flash_decode(q * 2, k, v, seqlens, return_lse=True, softcap=20.0, window=(30, -1))
        alone = flashport.flash_decode(q, k, v, seqlens)
        return out + alone, lse

    arguments = make()
    for got, wanted in zip(compiled(step)(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, wanted)


def test_a_function_of_the_package_alone():
    arguments = make()
    assert torch.equal(compiled(flashport.flash_decode)(*arguments), flashport.flash_decode(*arguments))


def test_export_of_a_program_that_holds_its_query():
    q, k, v, seqlens = make()

    class Step(torch.nn.Module):
        def forward(self, k, v, seqlens):
            return flashport.flash_decode(q, k, v, seqlens)

    program = torch.export.export(Step(), (k, v, seqlens), strict=False)
    assert any("flash_decode" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(k, v, seqlens), flashport.flash_decode(q, k, v, seqlens))


def test_decode_in_place():
    def step(q, k, v, seqlens, out):
        flashport.flash_decode(q, k, v, seqlens, out=out)
        return out + 1

    q, k, v, seqlens = make()
    outs = [torch.full_like(q, float("nan")) for _ in range(2)]
    assert torch.equal(compiled(step)(q, k, v, seqlens, outs[0]), step(q, k, v, seqlens, outs[1]))
    assert torch.equal(*outs)


def test_stages_append_and_merge():
    def step(q, k, v, seqlens, table, mid_out, mid_lse, out, cache):
        flashport.append_kv(k[:, 0], v[:, 0], *cache, seqlens)
        rows = torch.arange(3, dtype=torch.int32)
        flashport.flash_decode_stage1(
            q, k.reshape(120, 2, 128), v.reshape(120, 2, 128), table, rows, seqlens, 40, mid_out, mid_lse, 16
        )
        flashport.flash_decode_stage2(mid_out, mid_lse, seqlens, out, 16)
        whole, lse = flashport.flash_decode(q, k, v, seqlens, return_lse=True)
        merged = flashport.merge_state(out, lse, whole, lse)
        stacked = flashport.merge_states(torch.stack([out, whole]), torch.stack([lse, lse]))
        return *merged, *stacked, out, *cache

    def run(function):
        q, k, v, seqlens = make()
        table = torch.arange(120, dtype=torch.int32).reshape(3, 40)
        mid_out, mid_lse = torch.zeros(3, 8, 3, 128), torch.zeros(3, 8, 3)
        cache = [torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
        return function(q, k, v, seqlens, table, mid_out, mid_lse, torch.zeros_like(q), cache)

    for got, wanted in zip(run(compiled(step)), run(step), strict=True):
        assert torch.equal(got, wanted)


def blocks(values):
    """q8_0 bytes of a tensor."""
    from flashport.testing import numerics

    return torch.from_numpy(numerics.encode(values.float().numpy(), "q8_0"))


def test_formats_by_name():
    named = {"k_format": "q8_0", "v_format": "q8_0"}

    def step(q, k, v, seqlens, new, caches, table, mid_out, mid_lse):
        flashport.append_kv(new, new, *caches, seqlens, **named)
        rows = torch.arange(3, dtype=torch.int32)
        pools = (x.reshape(120, 2, 136) for x in (k, v))
        flashport.flash_decode_stage1(q, *pools, table, rows, seqlens, 40, mid_out, mid_lse, 16, **named)
        out, lse = flashport.flash_decode(q, k, v, seqlens, return_lse=True, **named)
        inplace = torch.zeros_like(q)
        flashport.flash_decode(q, k, v, seqlens, out=inplace, **named)
        fresh, _ = flashport.flash_decode(q, k, v, seqlens, lse=torch.zeros_like(lse), **named)
        return out, lse, inplace, fresh, mid_out, mid_lse, *caches

    def run(function):
        q, k, v, seqlens = make()
        caches = [torch.zeros(4, 16, 2, 136, dtype=torch.uint8) for _ in range(2)]
        mid_out, mid_lse = torch.zeros(3, 8, 3, 128), torch.zeros(3, 8, 3)
        table = torch.arange(120, dtype=torch.int32).reshape(3, 40)
        return function(q, blocks(k), blocks(v), seqlens, k[:, 0], caches, table, mid_out, mid_lse)

    for got, wanted in zip(run(compiled(step)), run(step), strict=True):
        assert torch.equal(got, wanted)


def test_wrong_formats_while_torch_traces():
    q, k, v, seqlens = make()
    arguments = (q, blocks(k), blocks(v), seqlens)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in arguments]
        assert flashport.flash_decode(*fake, k_format="q8_0", v_format="q8_0").shape == (3, 8, 128)
    for v_format, text in (
        (None, "v_format must say what v_cache of uint8 stores, got none"),
        ("q9", 'v_format must be "fp32", .*, got "q9"'),
    ):
        torch.compiler.reset()
        step = compiled(lambda *x, v_format=v_format: flashport.flash_decode(*x, k_format="q8_0", v_format=v_format))
        with pytest.raises(ValueError, match=f"^flash_decode: {text}"):
            step(*arguments)


@needs_compiler
def test_inductor():
    def step(q, k, v, seqlens, out):
        flashport.flash_decode(q * 2, k, v, seqlens, out=out)
        return out.float().sum(-1)

    q, k, v, seqlens = make()
    outs = [torch.zeros_like(q) for _ in range(2)]
    got = torch.compile(step, fullgraph=True)(q, k, v, seqlens, outs[0])
    torch.testing.assert_close(got, step(q, k, v, seqlens, outs[1]))
    assert torch.equal(*outs)


def test_opcheck():
    q, k, v, seqlens = make()
    none = None
    inputs = (q, k, v, seqlens, none, none, none, none, none, none, "NHD", none, none, none, -1, -1, 0.0,
              none, none, none, none, none, none, none, none)  # fmt: skip
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashport.flash_decode.default, (*inputs, True), test_utils=tests)
    torch.library.opcheck(
        torch.ops.flashport.flash_decode_out.default,
        (*inputs, torch.zeros_like(q), torch.zeros(3, 8), None),
        test_utils=tests,
    )
    o, lse = torch.randn(2, 3, 8, 64), torch.randn(2, 3, 8)
    torch.library.opcheck(torch.ops.flashport.merge_states.default, (o, lse, None), test_utils=tests)
    torch.library.opcheck(torch.ops.flashport.merge_state.default, (o[0], lse[0], o[1], lse[1], 2.0), test_utils=tests)


SCRIPT = """
import sys
import flashport
assert "torch" not in sys.modules, "the package imported torch"
import torch
step = torch.compile(lambda *x: flashport.flash_decode(*x), fullgraph=True, backend="aot_eager")
q = torch.randn(1, 4, 128, dtype=torch.bfloat16)
k = torch.randn(1, 5, 4, 128, dtype=torch.bfloat16)
seqlens = torch.tensor([5], dtype=torch.int32)
assert torch.equal(step(q, k, k, seqlens), flashport.flash_decode(q, k, k, seqlens))
"""


def test_operators_register_themselves_when_torch_comes_later():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
