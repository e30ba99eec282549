"""fla's recurrent signature over the gated delta rule: returns, types, layouts, gates and options."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

import flashport
from fla_recurrent_call import CALLS, RECURRENT, judged, make
from flashport import fla
from helpers import from_torch, same, to_torch


def test_the_signature_is_flas():
    parameters = inspect.signature(RECURRENT).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state", "output_final_state",
        "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval", "state_v_first", "cu_seqlens", "kwargs",
    ]  # fmt: skip
    assert fla.fused_recurrent_gdn is RECURRENT
    text = inspect.getdoc(RECURRENT)
    assert not [name for name in parameters if f"{name}:" not in text]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_name", [False, True])
def test_numpy(name, by_name):
    call, positional, keywords = make(name)
    if by_name:
        keywords |= dict(zip(inspect.signature(RECURRENT).parameters, positional, strict=False))
        positional = []
    before = {key: x.tobytes() for key, x in call.arguments.items() if isinstance(x, np.ndarray)}
    o, final_state = RECURRENT(*positional, **keywords)
    assert {key: call[key].tobytes() for key in before} == before  # inputs are never written, nor the initial state
    assert type(o) is type(final_state) is np.ndarray
    assert (o.dtype, o.shape) == (call["v"].dtype, call["v"].shape)
    assert final_state.dtype == np.float32
    judged(call)
    rows = sum(call.lens)
    same(o.reshape(-1, *o.shape[2:])[:rows], call["out"].reshape(-1, *o.shape[2:])[:rows])
    same(final_state, call["final_states"])


@pytest.mark.parametrize("name", CALLS)
def test_torch(name):
    torch = pytest.importorskip("torch")

    call, positional, keywords = make(name)
    tensors = [to_torch(x) for x in positional]
    o, final_state = RECURRENT(*tensors, **{key: to_torch(x) for key, x in keywords.items()})
    judged(call)
    assert final_state.dtype is torch.float32
    same(final_state.numpy(), call["final_states"])
    same(from_torch(o), call["out"])
    if tensors[8] is not None:
        assert torch.equal(tensors[8], to_torch(call["state"]))


def test_torch_views():
    """Gates and inputs as slices of one projection, of which only the last axis of q, k and v is contiguous."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    packed = torch.randn(2, 6, 4, 3 * 32 + 2 * 32 + 2)
    q, k, v, gk, gv, g, beta = packed.split((32, 32, 32, 32, 32, 1, 1), -1)
    gates = {"g": g[..., 0], "gk": gk, "gv": gv, "beta": beta[..., 0]}
    options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "output_final_state": True}
    packed[..., 96:161] = -packed[..., 96:161].abs()
    got = RECURRENT(q, k, v, **gates, **options)
    dense = RECURRENT(*(x.contiguous() for x in (q, k, v)), **{n: x.contiguous() for n, x in gates.items()}, **options)
    assert all(torch.equal(*pair) for pair in zip(got, dense, strict=True))


def test_what_is_not_asked_for_is_none():
    call, positional, keywords = make("dense")
    positional[9] = False
    o, final_state = RECURRENT(*positional, **keywords)
    assert final_state is None
    call.run()
    same(o, call["out"])


def test_a_sequence_without_tokens_ends_as_it_starts():
    call, positional, keywords = make("packed")
    _, final_state = RECURRENT(*positional, **keywords)
    same(final_state[1], call["state"][1])
    positional[8] = None
    _, final_state = RECURRENT(*positional, **keywords)
    assert not final_state[1].any()
    assert final_state[0].any()


def test_steps_go_on_from_final_states():
    """Token by token, each from the state before, is the call of all tokens bit for bit."""
    _, positional, keywords = make("all")
    first = [x[:, :7] if isinstance(x, np.ndarray) and i < 7 else x for i, x in enumerate(positional)]
    keywords["cu_seqlens"] = None
    first[8] = first[8][:1]
    whole, end = RECURRENT(*first, **keywords)
    state = first[8]
    for t in range(7):
        token = [x[:, t : t + 1] if isinstance(x, np.ndarray) and i < 7 else x for i, x in enumerate(first)]
        token[8] = state
        o, state = RECURRENT(*token, **keywords)
        same(o[:, 0], whole[:, t])
    same(state, end)


def test_the_chunked_form_agrees():
    _, positional, keywords = make("fp32")
    o, end = RECURRENT(*positional, **keywords)
    chunk = fla.chunk_gated_delta_rule(*positional[:4], *positional[6:], **keywords)
    for got, wanted in zip(chunk, (o, end), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_the_older_name_of_state_v_first():
    call, positional, keywords = make("v first")
    judged(call)
    del keywords["state_v_first"]
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        _, final_state = RECURRENT(*positional, **keywords, transpose_state_layout=True)
    same(final_state, call["final_states"])
    with pytest.raises(ValueError, match="must not both be given"):
        RECURRENT(*positional, **keywords, state_v_first=True, transpose_state_layout=True)


def test_the_gate_of_the_layer_is_not_read_unless_asked_for():
    call, positional, keywords = make("dense")
    call.run()
    o, _ = RECURRENT(*positional, **keywords, A_log=np.ones(4, np.float32), dt_bias=np.ones(4, np.float32))
    same(o, call["out"])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"use_gate_in_kernel": True}, ValueError, "use_gate_in_kernel needs A_log"),
        (
            {"use_gate_in_kernel": True, "A_log": np.ones(4, np.float32), "g": None},
            ValueError,
            "use_gate_in_kernel needs g, the input of the gate",
        ),
        ({"beta": None, "use_beta_sigmoid_in_kernel": True}, ValueError, "use_beta_sigmoid_in_kernel needs beta"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
        ({"output_states": True, "head_first": False}, TypeError, "has no argument head_first, output_states"),
    ],
)
def test_refusals(changes, error, text):
    _, positional, keywords = make("dense")
    given = dict(zip(inspect.signature(RECURRENT).parameters, positional, strict=False)) | keywords
    with pytest.raises(error, match=f"^fused_recurrent_gated_delta_rule: {text}"):
        RECURRENT(**given | changes)


def test_errors_that_the_original_has_too():
    call, positional, keywords = make("dense")
    with pytest.raises(
        ValueError, match=r"^fused_recurrent_gated_delta_rule: initial_state must have a state for each of the 2"
    ):
        RECURRENT(*positional[:8], np.concatenate([call["state"]] * 2), *positional[9:], **keywords)
    with pytest.raises(ValueError, match=r"^gated_delta_update: q must have batch 1 with cu_seqlens"):
        RECURRENT(*positional[:8], None, True, **keywords | {"cu_seqlens": np.array([0, 5, 10])})
    with pytest.raises(ValueError, match=r"^gated_delta_update: num_v_heads must be a multiple of num_heads"):
        RECURRENT(*(np.concatenate([x, x[:, :, :1]], 2) for x in positional[:2]), *positional[2:], **keywords)
    with pytest.raises(
        ValueError, match=r"^gated_delta_update: gv must have shape \(batch, tokens, num_v_heads, head_"
    ):
        RECURRENT(*positional[:5], np.zeros((2, 5, 4, 8), np.float32), *positional[6:], **keywords)


@pytest.mark.parametrize("index", [0, 3, 6, 8])
def test_a_gradient_is_refused(index):
    torch = pytest.importorskip("torch")
    _, positional, keywords = make("fp32")
    positional = [torch.tensor(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in positional]
    positional[index].requires_grad_()
    name = list(inspect.signature(RECURRENT).parameters)[index]
    with pytest.raises(NotImplementedError, match=rf"^fused_recurrent_gated_delta_rule: {name} requires a gradient"):
        RECURRENT(*positional, **keywords)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert not RECURRENT(*positional, **keywords)[0].requires_grad


def test_arrays_of_the_library_itself():
    """DeviceArray has no strides and no arithmetic; results are of it too."""
    call, positional, keywords = make("fp32")
    judged(call)

    def own(x):
        if not isinstance(x, np.ndarray):
            return x
        array = flashport.DeviceArray(x.shape, "float32")
        array.copy_from(np.ascontiguousarray(x))
        return array

    o, final_state = RECURRENT(*map(own, positional), **keywords)
    for got, wanted in ((o, call["out"]), (final_state, call["final_states"])):
        assert isinstance(got, flashport.DeviceArray)
        host = np.empty(wanted.shape, np.float32)
        got.copy_to(host)
        same(host, np.ascontiguousarray(wanted))


def test_torch_is_not_imported():
    code = (
        "import sys, numpy as np\n"
        "from flashport.fla import fused_recurrent_gdn\n"
        "x, f = np.ones((1, 1, 1, 16), np.float32), np.ones((1, 1, 1), np.float32)\n"
        "o, state = fused_recurrent_gdn(x, x, x, -f, beta=f, output_final_state=True)\n"
        "assert o.shape == x.shape and state.shape == (1, 1, 16, 16) and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
