"""fla's signatures over the gated delta rule: returns, types, layouts and options, from NumPy and from torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

import flashport
from chunk_call import check_chunk
from fla_chunk_call import CALLS, CHUNK, make
from flashport import fla
from helpers import from_torch, same, to_torch


def test_the_signature_is_flas():
    parameters = inspect.signature(CHUNK).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
        "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
        "chunk_indices", "cp_context", "kwargs",
    ]  # fmt: skip
    assert fla.chunk_gdn is CHUNK
    text = inspect.getdoc(CHUNK)
    assert not [name for name in parameters if f"{name}:" not in text]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_name", [False, True])
def test_numpy(name, by_name):
    call, positional, keywords = make(name)
    check_chunk(call)
    if by_name:
        keywords |= dict(zip(inspect.signature(CHUNK).parameters, positional, strict=False))
        positional = []
    before = None if call.arguments.get("state") is None else call["state"].copy()
    o, final_state = CHUNK(*positional, **keywords)
    assert type(o) is type(final_state) is np.ndarray
    assert o.dtype == call["q"].dtype
    assert final_state.dtype == np.float32
    same(o, call["out"])
    same(final_state, call["final_states"])
    if before is not None:  # the initial state is never written
        same(call["state"], before)


@pytest.mark.parametrize("name", CALLS)
def test_torch(name):
    torch = pytest.importorskip("torch")

    call, positional, keywords = make(name)
    o, final_state = CHUNK(*map(to_torch, positional), **{key: to_torch(x) for key, x in keywords.items()})
    call.run()
    assert final_state.dtype is torch.float32
    same(final_state.numpy(), call["final_states"])
    same(from_torch(o), call["out"])


def test_what_is_not_asked_for_is_none():
    call, positional, keywords = make("dense")
    positional[7] = False
    o, final_state = CHUNK(*positional, **keywords)
    assert final_state is None
    call.run()
    same(o, call["out"])


def test_a_sequence_without_tokens_ends_as_it_starts():
    call, positional, keywords = make("packed")
    _, final_state = CHUNK(*positional, **keywords)
    same(final_state[1], call["state"][1])
    positional[6] = None
    _, final_state = CHUNK(*positional, **keywords)
    assert not final_state[1].any()


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_the_chunk_size_changes_nothing(chunk_size):
    call, positional, keywords = make("dense")
    call.run()
    o, _ = CHUNK(*positional, **keywords, chunk_size=chunk_size, cu_seqlens_cpu=object(), chunk_indices=object())
    same(o, call["out"])


def test_the_older_name_of_state_v_first():
    call, positional, keywords = make("v first")
    call.run()
    del keywords["state_v_first"]
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        _, final_state = CHUNK(*positional, **keywords, transpose_state_layout=True)
    same(final_state, call["final_states"])
    with pytest.raises(ValueError, match="must not both be given"):
        CHUNK(*positional, **keywords, state_v_first=True, transpose_state_layout=True)


def test_the_gate_of_the_layer_is_not_read_unless_asked_for():
    call, positional, keywords = make("dense")
    call.run()
    o, _ = CHUNK(*positional, **keywords, A_log=np.ones(4, np.float32), dt_bias=np.ones(4, np.float32))
    same(o, call["out"])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"cp_context": object()}, NotImplementedError, "cp_context must be None"),
        ({"head_first": False}, DeprecationWarning, "head_first was removed"),
        ({"chunk_size": 128}, ValueError, "chunk_size must be 16, 32 or 64, got 128"),
        ({"use_gate_in_kernel": True}, ValueError, "use_gate_in_kernel needs A_log"),
        ({"output_states": True, "a": 1}, TypeError, "has no argument a, output_states"),
    ],
)
def test_refusals(changes, error, text):
    _, positional, keywords = make("dense")
    with pytest.raises(error, match=f"^chunk_gated_delta_rule: {text}"):
        CHUNK(*positional, **keywords | changes)


def test_errors_that_the_original_has_too():
    call, positional, keywords = make("dense")
    with pytest.raises(ValueError, match=r"^gated_delta_chunk: allow_neg_eigval needs beta_sigmoid"):
        CHUNK(*positional, **keywords | {"allow_neg_eigval": True})
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: initial_state must have a state for each of the 2"):
        CHUNK(*positional[:6], np.concatenate([call["state"]] * 2), *positional[7:], **keywords)
    with pytest.raises(ValueError, match=r"^gated_delta_chunk: q must have batch 1 with cu_seqlens"):
        CHUNK(*positional[:6], None, True, **keywords | {"cu_seqlens": np.array([0, 130, 260])})
    with pytest.raises(ValueError, match=r"^gated_delta_chunk: num_v_heads must be a multiple of num_heads"):
        CHUNK(*(np.concatenate([x, x[:, :, :1]], 2) for x in positional[:2]), *positional[2:], **keywords)


@pytest.mark.parametrize("index", [0, 4, 6])
def test_a_gradient_is_refused(index):
    torch = pytest.importorskip("torch")
    _, positional, keywords = make("fp32")
    positional = [torch.tensor(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in positional]
    positional[index].requires_grad_()
    name = list(inspect.signature(CHUNK).parameters)[index]
    with pytest.raises(NotImplementedError, match=rf"^chunk_gated_delta_rule: {name} requires a gradient"):
        CHUNK(*positional, **keywords)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert not CHUNK(*positional, **keywords)[0].requires_grad


def test_arrays_of_the_library_itself():
    """DeviceArray has no strides and no arithmetic; results are of it too."""
    call, positional, keywords = make("fp32")
    call.run()

    def own(x):
        if not isinstance(x, np.ndarray):
            return x
        array = flashport.DeviceArray(x.shape, "float32")
        array.copy_from(np.ascontiguousarray(x))
        return array

    o, final_state = CHUNK(*map(own, positional), **keywords)
    for got, wanted in ((o, call["out"]), (final_state, call["final_states"])):
        assert isinstance(got, flashport.DeviceArray)
        host = np.empty(wanted.shape, np.float32)
        got.copy_to(host)
        same(host, np.ascontiguousarray(wanted))


def test_other_objects_are_refused():
    _, positional, keywords = make("fp32")

    class Foreign:
        def __init__(self, x):
            self.x, self.shape = x, x.shape

    text = (
        r"chunk_gated_delta_rule: q must be an array of torch.*, got Foreign; convert it, or call .* outputs of yours"
    )
    with pytest.raises(TypeError, match=f"^{text}$"):
        CHUNK(Foreign(positional[0]), *positional[1:], **keywords)


def test_torch_is_not_imported():
    code = (
        "import sys, numpy as np\n"
        "from flashport.fla import chunk_gdn\n"
        "x, f = np.ones((1, 1, 1, 16), np.float32), np.ones((1, 1, 1), np.float32)\n"
        "o, state = chunk_gdn(x, x, x, -f, f, output_final_state=True)\n"
        "assert o.shape == x.shape and state.shape == (1, 1, 16, 16) and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
