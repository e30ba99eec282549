"""torch.compile(fullgraph=True) over the gated delta rule and its shims, and the operators' own rules."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
from flashport import fla, sglang  # noqa: E402
from flashport.torch import gated_delta  # noqa: E402, F401
from helpers import needs_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling

HEADS, VALUE_HEADS, KEYS, VALUES = 2, 4, 64, 32


def make(batch=3, tokens=4, packed=False):
    """Random arguments by name: inputs, a pool of five states, and buffers that a call writes, poisoned."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    bf16 = torch.bfloat16
    lens = [tokens - 1, 0, tokens + 1] if packed else [tokens] * batch
    rows = (1, sum(lens)) if packed else (batch, tokens)
    states = (VALUE_HEADS, VALUES, KEYS)
    return {
        "q": random(*rows, HEADS, KEYS, dtype=bf16),
        "k": random(*rows, HEADS, KEYS, dtype=bf16),
        "v": random(*rows, VALUE_HEADS, VALUES, dtype=bf16),
        "a": random(*rows, VALUE_HEADS),
        "b": random(*rows, VALUE_HEADS),
        "A_log": random(VALUE_HEADS),
        "dt_bias": random(VALUE_HEADS),
        "state": random(batch + 2, *states),
        "slots": torch.randperm(batch + 2, generator=generator)[:batch].int(),
        "cu_seqlens": torch.tensor([0, *lens]).cumsum(0).int() if packed else None,
        "intermediate": torch.full((batch, tokens + 1, *states), torch.nan),
        "kept": torch.tensor([1, -1, 0, *range(2, batch - 1)], dtype=torch.int32)[:batch],
        "parents": torch.zeros(batch, tokens + 1, dtype=torch.int64),
        "out": torch.full((*rows, VALUE_HEADS, VALUES), torch.nan, dtype=bf16),
        "final": torch.full((batch, *states), torch.nan),
    }


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def equal(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def check(step, backend="aot_eager", **options):
    """A compiled step does what it does uncompiled: to its results, and to every tensor that it was given."""
    compiled, plain = make(**options), make(**options)
    given = make(**options)
    got = torch.compile(step, fullgraph=True, backend=backend)(compiled)
    wanted = step(plain)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        equal(one, other)
    changed = set()
    for name, x in compiled.items():
        if x is not None:
            equal(x, plain[name])
            if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(given[name])):
                changed.add(name)
    return changed


def update(x, **rest):
    return flashport.gated_delta_update(
        x["q"] * 2, x["k"], x["v"], x["a"], x["b"], x["A_log"], x["dt_bias"], x["state"], x["slots"],
        use_qk_l2norm=True, cu_seqlens=x["cu_seqlens"], **rest,
    )  # fmt: skip


def chunk(x, **rest):
    return flashport.gated_delta_chunk(
        x["q"] * 2, x["k"], x["v"], -x["a"].abs(), x["b"], x["state"], x["slots"], use_qk_l2norm=True,
        beta_sigmoid=True, cu_seqlens=x["cu_seqlens"], **rest,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_update(packed):
    def step(x):
        first = update(x)
        return first, update(x) + 1, x["state"] * 2  # the second starts from what the first left

    assert check(step, packed=packed) == {"state"}


def test_draft_tree_in_place():
    def step(x):
        tree = {"intermediate_indices": x["kept"], "parent_tokens": x["parents"]}
        out = update(x, out=x["out"], intermediate_states=x["intermediate"], update_state=False, **tree)
        return out + 1, x["intermediate"] * 2

    assert check(step) == {"out", "intermediate"}


@pytest.mark.parametrize("packed", [False, True])
def test_chunk(packed):
    def step(x):
        out = chunk(x, final_states=x["final"])
        return out + 1, x["final"] * 2, update(x)

    assert check(step, tokens=70, packed=packed) == {"state", "final"}


def test_chunk_with_workspace_and_own_gate():
    shapes = {name: x for name, x in make(tokens=70).items() if name in ("q", "k", "v")}
    count = flashport.gated_delta_chunk_workspace_size(**shapes, g=make(tokens=70)["a"], beta=make(tokens=70)["b"])

    def step(x):
        workspace = torch.zeros(count, dtype=torch.uint8)
        gate = {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
        return (chunk(x, out=x["out"], workspace=workspace, **gate),)

    assert check(step, tokens=70) == {"state", "out"}


@needs_compiler
def test_inductor():
    def step(x):
        return chunk(x, final_states=x["final"]) + 1, update(x) * 2

    assert check(step, backend="inductor", tokens=70) == {"state", "final"}


def test_other_lengths_need_no_other_graph():
    """Slots and cu_seqlens are data; a length that varies is a symbol."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(lambda x: update(x), fullgraph=True, backend=count, dynamic=True)
    for tokens in (4, 5, 9):
        equal(step(make(tokens=tokens, packed=True)), update(make(tokens=tokens, packed=True)))
    assert len(graphs) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_sglangs_update(packed):
    def step(x):
        out = sglang.fused_sigmoid_gating_delta_rule_update(
            x["A_log"], x["a"], x["dt_bias"], 1.0, 20.0, x["q"], x["k"], x["v"], x["b"], x["state"], x["slots"],
            use_qk_l2norm_in_kernel=True, cu_seqlens=x["cu_seqlens"], intermediate_states_buffer=x["intermediate"],
            intermediate_state_indices=x["kept"],
        )  # fmt: skip
        return (out + 1,)

    assert check(step, packed=packed) == {"state", "intermediate"}


def packed_decode(x):
    """Arguments of SGLang's usual decode."""
    mixed_qkv = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], dim=1)
    gates = (x[name].flatten(0, 1) for name in ("a", "b"))
    return (mixed_qkv, *gates, x["A_log"], x["dt_bias"], 0.5, x["state"], x["out"], x["slots"], True)


def test_sglangs_packed_decode():
    def step(x):
        out, state = sglang.fused_recurrent_gated_delta_rule_packed_decode(*packed_decode(x))
        return (out.transpose(0, 1) + 1, state * 2)

    assert check(step, tokens=1) == {"state", "out"}


@pytest.mark.parametrize("packed", [False, True])
def test_sglangs_gating_and_update(packed):
    """In tensors whose neighbours lie apart, of which copies are made."""

    def step(x):
        gates = (x[name].flatten(0, 1) for name in ("a", "b"))
        g, beta = sglang.fused_gdn_gating(x["A_log"], *gates, x["dt_bias"])
        q = x["q"].transpose(-1, -2).contiguous().transpose(-1, -2)
        out = sglang.fused_recurrent_gated_delta_rule_update(
            q, x["k"], x["v"], g.view(x["a"].shape), beta.view(x["b"].shape), None, x["state"], x["slots"],
            x["cu_seqlens"], True, False, False, x["intermediate"], x["kept"], x["intermediate"].shape[1],
        )  # fmt: skip
        return (out + 1,)

    assert check(step, packed=packed) == {"state", "intermediate"}


@pytest.mark.parametrize(("packed", "output_h"), [(False, True), (False, False), (True, False)])
def test_sglangs_chunks(packed, output_h):
    def step(x):
        out, _, h = sglang.chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], -x["a"].abs(), x["b"].sigmoid(), None, x["state"], x["slots"], x["cu_seqlens"],
            use_qk_l2norm_in_kernel=True, output_h=output_h,
        )  # fmt: skip
        return (out + 1, h) if output_h else (out + 1,)

    assert check(step, tokens=70, packed=packed) == {"state"}


def test_sglangs_states_of_packed_chunks():
    """Their number is data, which torch.compile captures where it is told to."""

    def step(x):
        out, _, h = sglang.chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], -x["a"].abs(), x["b"].sigmoid(), None, x["state"], x["slots"], x["cu_seqlens"],
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out, h * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert check(step, tokens=70, packed=True) == {"state"}


@pytest.mark.parametrize("packed", [False, True])
def test_flas_chunks(packed):
    def step(x):
        start = x["state"][: len(x["slots"])]
        out, final = fla.chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], x["a"], x["b"], None, start, True, True, use_beta_sigmoid_in_kernel=True,
            state_v_first=True, cu_seqlens=x["cu_seqlens"], use_gate_in_kernel=True, A_log=x["A_log"],
            dt_bias=x["dt_bias"],
        )  # fmt: skip
        return out + 1, final

    assert check(step, tokens=70, packed=packed) == set()


@pytest.mark.parametrize("packed", [False, True])
def test_flas_recurrence(packed):
    def step(x):
        start = x["state"][: len(x["slots"])]
        out, final = fla.fused_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], -x["a"].abs(), beta=x["b"].sigmoid(), initial_state=start,
            output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=x["cu_seqlens"],
        )  # fmt: skip
        return out + 1, final

    assert check(step, packed=packed) == set()


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.flashport
    x = make(packed=packed)
    torch.library.opcheck(
        ops.gated_delta_update.default,
        (*(x[name] for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state", "slots")), 0.5, 1.0, 20.0, None,
         True, False, "consecutive", "vk", True, x["cu_seqlens"], x["intermediate"], x["kept"], x["parents"],
         *[None] * 4, False, None, x["out"]),
        test_utils=tests,
    )  # fmt: skip
    x = make(packed=packed)
    rows = x["v"].shape[:2]
    gk, gv = (-torch.rand(*rows, VALUE_HEADS, width) for width in (KEYS, VALUES))
    beta = torch.rand(*rows, VALUE_HEADS, VALUES)
    torch.library.opcheck(
        ops.gated_delta_update.default,
        (x["q"], x["k"], x["v"], None, None, None, None, x["state"], x["slots"], 0.5, None, None, None, True, False,
         "modulo", "vk", True, x["cu_seqlens"], None, None, None, -x["a"].abs(), gk, gv, beta, False, x["final"],
         x["out"]),
        test_utils=tests,
    )  # fmt: skip
    mixed_qkv, a, b, A_log, dt_bias, scale, state, out, slots, _ = packed_decode(make(tokens=1))  # noqa: N806
    torch.library.opcheck(
        ops.gated_delta_packed_decode.default,
        (mixed_qkv, a, b, A_log, dt_bias, state, slots, scale, True, "vk", out),
        test_utils=tests,
    )
    x = make(tokens=70, packed=packed)
    inputs = tuple(x[name] for name in ("q", "k", "v", "a", "b", "state", "slots"))
    chunks = torch.zeros(len(x["q"]), 4 if packed else 2, VALUE_HEADS, VALUES, KEYS, dtype=torch.bfloat16)
    workspace = torch.zeros(
        flashport.gated_delta_chunk_workspace_size(*inputs[:5], cu_seqlens=x["cu_seqlens"]), dtype=torch.uint8
    )
    torch.library.opcheck(
        ops.gated_delta_chunk.default,
        (*inputs, 0.5, True, True, False, x["A_log"], x["dt_bias"], "consecutive", "vk", True, x["cu_seqlens"],
         x["final"], chunks, workspace, x["out"]),
        test_utils=tests,
    )  # fmt: skip


def test_the_operators_declare_what_they_write():
    def written(operator):
        return {x.name for x in operator.default._schema.arguments if x.alias_info and x.alias_info.is_write}

    ops = torch.ops.flashport
    assert written(ops.gated_delta_update) == {"state", "out", "intermediate_states", "final_states"}
    assert written(ops.gated_delta_packed_decode) == {"initial_state", "out"}
    assert written(ops.gated_delta_chunk) == {"state", "out", "final_states", "chunk_states", "workspace"}


@pytest.mark.parametrize("function", [flashport.gated_delta_update, flashport.gated_delta_chunk])
def test_the_operators_take_what_the_functions_take(function):
    """In their order, but for the stream."""
    operator = getattr(torch.ops.flashport, function.__name__).default
    names = [name for name in inspect.signature(function).parameters if name != "stream"]
    assert [x.name for x in operator._schema.arguments] == names


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """Without torch.compile's tracer, tensors that stand for others run through the functions themselves."""

    class Step(torch.nn.Module):
        def forward(self, q, k, v, state, out):
            flashport.gated_delta_update(q, k, v, state=state, out=out)
            return out + 1

    x = make()
    given = tuple(x[name] for name in ("q", "k", "v", "state", "out"))
    program = torch.export.export(Step(), given, strict=strict)
    assert any("gated_delta_update" in str(node.target) for node in program.graph.nodes)
    copies = tuple(tensor.clone() for tensor in given)
    assert torch.equal(program.module()(*given), Step()(*copies))
    assert torch.equal(given[3], copies[3])


SCRIPT = """
import sys
import flashport
assert "torch" not in sys.modules, "the package imported torch"
import torch
step = torch.compile(lambda *x: flashport.gated_delta_update(*x), fullgraph=True, backend="aot_eager")
x, f = torch.randn(1, 3, 1, 16), torch.randn(1, 3, 1)
state = torch.zeros(1, 1, 16, 16)
out = step(x, x, x, f, f, f[0, 0], f[0, 0], state)
assert state.any()
assert torch.equal(out, flashport.gated_delta_update(x, x, x, f, f, f[0, 0], f[0, 0]))
"""


def test_operators_register_themselves_when_torch_comes_later():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
