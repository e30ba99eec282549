"""What SGLang 0.5.10's backend does layer by layer, on torch tensors of a CPU, each call held against the oracle.

The order of calls and their arguments are those of layers/attention/linear/gdn_backend.py, kernels/gdn_triton.py and
kernels/kda_triton.py there; the convolution, which is no part of the rule, is left out.
"""

from __future__ import annotations

import numpy as np
import pytest

import chunk_call
import delta_call
from delta_call import FORMAT, hold
from flashport import sglang
from helpers import from_torch, to_torch

torch = pytest.importorskip("torch")

SLOTS, H, HV, K, V = 7, 2, 4, 64, 32
QKV = [H * K, H * K, HV * V]


class Layer:
    """Parameters and pools of a layer, and what its backend makes of projections."""

    def __init__(self, model, pool, draft_tokens=4, is_kda=False):
        torch.manual_seed(7)
        self.model = model
        self.is_kda = is_kda
        self.A_log = torch.rand(1, 1, HV, 1) if is_kda else torch.rand(HV)
        self.dt_bias = torch.randn(HV * K if is_kda else HV)
        # A layer's pools are slices of those of all layers.
        self.ssm_states = torch.randn(2, SLOTS, HV, V, K).div(4).to(pool)[1]
        self.intermediate_ssm = torch.full((2, SLOTS, draft_tokens, HV, V, K), torch.nan, dtype=pool)[1]

    def project(self, tokens):
        """(mixed_qkv, a, b) of random activations, a and b slices of one projection."""
        keys = HV * K if self.is_kda else HV
        gates = torch.randn(tokens, keys + HV).to(self.model)
        a, b = gates.split([keys, HV], dim=-1)
        return torch.randn(tokens, sum(QKV)).to(self.model), a, b

    def heads(self, mixed_qkv):
        """q, k and v as [1, tokens, heads, dim], views of ``mixed_qkv``."""
        q, k, v = torch.split(mixed_qkv, QKV, dim=-1)
        tokens = q.shape[0]
        return q.view(1, tokens, H, K), k.view(1, tokens, H, K), v.view(1, tokens, HV, V)

    def packed_decode(self, mixed_qkv, a, b, cache_indices):
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], 1, HV, V)
        sglang.fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed_qkv, a=a, b=b, A_log=self.A_log, dt_bias=self.dt_bias, scale=K**-0.5,
            initial_state=self.ssm_states, out=out, ssm_state_indices=cache_indices, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out.transpose(0, 1)

    def decode(self, mixed_qkv, a, b, cache_indices, query_start_loc):
        q, k, v = self.heads(mixed_qkv)
        kda = {"is_kda": True} if self.is_kda else {}
        return sglang.fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log, dt_bias=self.dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=self.ssm_states,
            initial_state_indices=cache_indices, cu_seqlens=query_start_loc, use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0, softplus_threshold=20.0, **kda,
        )  # fmt: skip

    def extend(self, mixed_qkv, a, b, cache_indices, query_start_loc):
        q, k, v = self.heads(mixed_qkv)
        g, beta = sglang.fused_gdn_gating(self.A_log, a, b, self.dt_bias)
        return sglang.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=self.ssm_states, cu_seqlens=query_start_loc, head_first=False,
            use_qk_l2norm_in_kernel=True, initial_state_indices=cache_indices,
        )  # fmt: skip

    def verify(self, mixed_qkv, a, b, cache_indices, query_start_loc, retrieve_parent_token):
        q, k, v = self.heads(mixed_qkv)
        return sglang.fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log, dt_bias=self.dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=self.ssm_states,
            initial_state_indices=cache_indices, cu_seqlens=query_start_loc, use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0, softplus_threshold=20.0, is_kda=False, disable_state_update=True,
            intermediate_states_buffer=self.intermediate_ssm,
            intermediate_state_indices=torch.arange(cache_indices.shape[0], dtype=torch.int32),
            cache_steps=self.intermediate_ssm.shape[1], retrieve_parent_token=retrieve_parent_token,
        )  # fmt: skip

    def inputs(self, mixed_qkv, a, b, before, cache_indices, query_start_loc, **more):
        """The same call for the oracle, with the states before it."""
        q, k, v = (from_torch(x.contiguous()) for x in self.heads(mixed_qkv))
        return {
            "q": q, "k": k, "v": v, "a": from_torch(a.contiguous()), "b": from_torch(b.contiguous()),
            "A_log": from_torch(self.A_log), "dt_bias": from_torch(self.dt_bias), "state": from_torch(before),
            "state_indices": from_torch(cache_indices), "cu_seqlens": from_torch(query_start_loc),
            "use_qk_l2norm": True, "is_kda": self.is_kda, **more,
        }  # fmt: skip


def hold_tensor(got, truth, plain, what):
    got = from_torch(got.contiguous())
    hold(got, truth, plain, FORMAT[got.dtype], what)


def hold_update(layer, out, before, arguments, live=slice(None)):
    """Outputs of these tokens and all states are the oracle's."""
    truth, plain = (delta_call.expected(arguments, dtype) for dtype in (np.float64, np.float32))
    hold_tensor(out[:, live], truth.out[:, live], plain.out[:, live], "out")
    if arguments.get("update_state", True):
        hold_tensor(layer.ssm_states, truth.state, plain.state, "state")
    else:
        assert torch.equal(layer.ssm_states, before)
    return truth, plain


def starts(*lens):
    return torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)


TYPES = [
    pytest.param(torch.bfloat16, torch.float32, id="bf16-fp32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16-bf16"),
    pytest.param(torch.float16, torch.float16, id="fp16-fp16"),
    pytest.param(torch.bfloat16, torch.float16, id="bf16-fp16"),
]


@pytest.mark.parametrize(("model", "pool"), TYPES)
def test_prompts_then_tokens(model, pool):
    """Extend, prefix caching from h, the packed decode with a padded batch, and the one that is not packed."""
    layer = Layer(model, pool)
    cache_indices, lens = torch.tensor([4, 1, 6], dtype=torch.int32), (70, 3, 130)
    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(sum(lens))
    out, final, h = layer.extend(mixed_qkv, a, b, cache_indices, starts(*lens))
    assert final is None
    arguments = layer.inputs(mixed_qkv, a, b, before, cache_indices, starts(*lens))
    g, beta = sglang.fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
    del arguments["a"], arguments["b"], arguments["A_log"], arguments["dt_bias"], arguments["is_kda"]
    arguments |= {"g": from_torch(g), "beta": from_torch(beta), "use_qk_l2norm": True}
    truth, plain = (chunk_call.expected(arguments, x) for x in (None, FORMAT[arguments["q"].dtype]))
    hold_tensor(out, truth.out, plain.out, "out")
    hold_tensor(layer.ssm_states, truth.state, plain.state, "state")
    hold_tensor(h, truth.chunk_states, plain.chunk_states, "h")

    # The state at the last multiple of 64 tokens of each long prompt goes to a slot of the prefix cache.
    assert h.shape == (1, 2 + 1 + 3, HV, V, K)
    layer.ssm_states[torch.tensor([0, 5])] = h.squeeze(0)[torch.tensor([1, 5])].to(pool, copy=False)

    cache_indices = torch.tensor([4, 1, 6, 5, -1], dtype=torch.int32)
    for _ in range(3):
        before = layer.ssm_states.clone()
        mixed_qkv, a, b = layer.project(5)
        mixed_qkv[4] = torch.nan  # what a captured graph's padding may hold
        out = layer.packed_decode(mixed_qkv, a, b, cache_indices)
        assert torch.equal(out[:, 4], torch.zeros(1, HV, V, dtype=model))
        arguments = layer.inputs(mixed_qkv, a, b, before, cache_indices, starts(1, 1, 1, 1, 1))
        hold_update(layer, out, before, arguments, slice(4))

    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(5)
    out = layer.decode(mixed_qkv, a, b, cache_indices, starts(1, 1, 1, 1, 1))
    hold_update(layer, out, before, layer.inputs(mixed_qkv, a, b, before, cache_indices, starts(1, 1, 1, 1, 1)))


@pytest.mark.parametrize(("model", "pool"), TYPES)
@pytest.mark.parametrize("parents", [None, [[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 0]]], ids=["chain", "tree"])
def test_drafts(model, pool, parents):
    """Verifying of drafts, and the accepted states' way back to the pool."""
    layer = Layer(model, pool)
    cache_indices, query_start_loc = torch.tensor([4, 1, 6], dtype=torch.int32), starts(4, 4, 4)
    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(12)
    tree = None if parents is None else torch.tensor(parents)
    out = layer.verify(mixed_qkv, a, b, cache_indices, query_start_loc, tree)
    arguments = layer.inputs(
        mixed_qkv, a, b, before, cache_indices, query_start_loc, update_state=False,
        intermediate_states=np.zeros((SLOTS, 4, HV, V, K), from_torch(before).dtype),
        intermediate_indices=np.arange(3, dtype=np.int32),
    )  # fmt: skip
    if tree is not None:
        arguments["parent_tokens"] = from_torch(tree)
    truth, plain = hold_update(layer, out, before, arguments)
    hold_tensor(layer.intermediate_ssm[:3], truth.intermediate[:3], plain.intermediate[:3], "intermediate states")
    assert layer.intermediate_ssm[3:].isnan().all()

    accepted = torch.tensor([3, 0, 2])  # the last step of each
    layer.ssm_states[cache_indices.long()] = layer.intermediate_ssm[torch.arange(3), accepted]
    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(3)
    out = layer.packed_decode(mixed_qkv, a, b, cache_indices)
    hold_update(layer, out, before, layer.inputs(mixed_qkv, a, b, before, cache_indices, starts(1, 1, 1)))


@pytest.mark.parametrize(("model", "pool"), TYPES)
@pytest.mark.parametrize("shape", [(5, HV * K), (1, 5, HV * K), (5, HV, K), (1, 5, HV, K)])
def test_tokens_of_kimi(model, pool, shape):
    """Its gates in each shape: two axes from its projection, three and four for those who have parted the heads."""
    layer = Layer(model, pool, is_kda=True)
    cache_indices, query_start_loc = torch.tensor([4, 1, 6, 5, -1], dtype=torch.int32), starts(1, 1, 1, 1, 1)
    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(5)
    out = layer.decode(mixed_qkv, a.view(shape), b.unsqueeze(0), cache_indices, query_start_loc)
    hold_update(layer, out, before, layer.inputs(mixed_qkv, a, b, before, cache_indices, query_start_loc))


def test_gates_of_jet_nemotron():
    """Gates in fp32 and rates in the model's type, without tokens' states: models/jet_nemotron.py."""
    layer = Layer(torch.bfloat16, torch.float32)
    cache_indices, query_start_loc = torch.tensor([4, 1, 6], dtype=torch.int32), starts(5, 1, 2)
    before = layer.ssm_states.clone()
    mixed_qkv, a, b = layer.project(8)
    g = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias)
    q, k, v = (x.squeeze(0) for x in layer.heads(mixed_qkv))
    out = sglang.fused_recurrent_gated_delta_rule_update(
        q=q.unsqueeze(0), k=k.unsqueeze(0), v=v.unsqueeze(0), g=g.unsqueeze(0), beta=b.sigmoid().unsqueeze(0),
        initial_state_source=layer.ssm_states, initial_state_indices=cache_indices, cu_seqlens=query_start_loc,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    arguments = layer.inputs(mixed_qkv, a, b, before, cache_indices, query_start_loc)
    del arguments["a"], arguments["b"], arguments["A_log"], arguments["dt_bias"]
    arguments |= {"g": from_torch(g)[None], "beta": from_torch(b.sigmoid().contiguous())[None]}
    hold_update(layer, out, before, arguments)


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("model", [torch.bfloat16, torch.float16, torch.float32])
def test_gating(library, model):
    layer = Layer(model, torch.float32)
    _, a, b = layer.project(9)
    a[0, 0], b[0, :2] = 60.0, torch.tensor([-200.0, 200.0])
    given = [layer.A_log, a, b, layer.dt_bias]
    wanted = [from_torch(x.contiguous()).astype(np.float64) for x in given]
    if library == "numpy":
        given = [from_torch(x.contiguous()) for x in given]
    g, beta = sglang.fused_gdn_gating(*given)
    A_log, a, b, dt_bias = wanted  # noqa: N806
    assert type(g) is type(beta) is type(given[0])
    g, beta = (to_torch(x) for x in (g, beta))
    assert g.shape == beta.shape == (1, 9, HV)
    assert g.dtype is beta.dtype is torch.float32
    np.testing.assert_allclose(g[0].numpy(), -np.exp(A_log) * np.logaddexp(0, a + dt_bias), rtol=1e-6)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}[model]
    np.testing.assert_allclose(beta[0].numpy(), 1 / (1 + np.exp(-b)), rtol=rounding, atol=1e-7)
    assert torch.equal(beta, beta.to(model).float())  # SGLang rounds it so
    _, beta = sglang.fused_gdn_gating(*given, beta=2.0, threshold=5.0)
    scaled, _ = sglang.fused_gdn_gating(*given, 2.0, 5.0)
    x = 2.0 * (a + dt_bias)
    inside = np.where(x <= 5.0, np.logaddexp(0, x) / 2.0, x / 2.0)
    np.testing.assert_allclose(to_torch(scaled)[0].numpy(), -np.exp(A_log) * inside, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"a": [1.0]}, TypeError, "a must be an array of torch, NumPy or CuPy, got list"),
        ({"A_log": torch.zeros(HV)}, TypeError, "A_log must be an array of torch, NumPy or CuPy, got Tensor"),
        ({"a": np.zeros((1, 3, HV))}, ValueError, r"a must have 2 dimensions \(tokens, value heads\), got shape"),
        ({"b": np.zeros((3, 1))}, ValueError, r"b must have the shape of a \(3, 4\), got shape \(3, 1\)"),
        ({"dt_bias": np.zeros(3)}, ValueError, r"dt_bias must have 4 elements, got shape \(3,\)"),
    ],
)
def test_what_gating_refuses(changes, error, text):
    given = {"A_log": np.zeros(HV), "a": np.zeros((3, HV)), "b": np.zeros((3, HV)), "dt_bias": np.zeros(HV)}
    with pytest.raises(error, match=f"^fused_gdn_gating: {text}"):
        sglang.fused_gdn_gating(**given | changes)
