"""Calls of the package's functions that run without the frame of the Python function, and those that need it.

Python 3.11 inlines calls of Python functions unless their arguments are starred, as all of these are.
"""

from __future__ import annotations

import ctypes
import inspect
import sys

import numpy as np
import pytest

import flashport
from chunk_call import make_chunk
from delta_call import make_delta
from flashport import decode
from flashport.torch import tracing

DIRECT = [
    flashport.append_kv,
    flashport.attention,
    flashport.dequantize_kv,
    flashport.dropout_mask,
    flashport.flash_decode,
    flashport.flash_decode_mixed,
    flashport.flash_decode_segments,
    flashport.flash_decode_stage1,
    flashport.flash_decode_stage2,
    flashport.gated_delta_chunk,
    flashport.gated_delta_update,
    flashport.merge_state,
    flashport.merge_states,
    flashport.quantize_kv,
]


class EnteredError(Exception):
    """The body of a Python function ran."""


@pytest.fixture(autouse=True)
def _interpreter_evaluates_frames():
    """The interpreter runs all frames itself: a torch.compile that fails leaves torch's evaluator in its place."""
    python = ctypes.pythonapi
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    python._PyInterpreterState_GetEvalFrameFunc.restype = ctypes.c_void_p
    interpreter = ctypes.c_void_p(python.PyInterpreterState_Get())
    before = ctypes.c_void_p(python._PyInterpreterState_GetEvalFrameFunc(interpreter))
    python._PyInterpreterState_SetEvalFrameFunc(interpreter, python._PyEval_EvalFrameDefault)
    yield
    python._PyInterpreterState_SetEvalFrameFunc(interpreter, before)


@pytest.fixture
def _closed(monkeypatch):
    """The bodies of all these functions raise EnteredError."""

    def enter():
        raise EnteredError

    monkeypatch.setattr(tracing, "is_compiling", enter)


def arguments(function):
    """NumPy arrays for it, with all that is written."""
    if function is flashport.gated_delta_update:
        return make_delta(batch=2, keys=64, values=32).arguments
    if function is flashport.gated_delta_chunk:
        return make_chunk(lens=(70, 3), keys=64, values=32).arguments
    rng = np.random.default_rng(5)

    def random(*shape):
        return rng.standard_normal(shape, np.float32)

    if function is flashport.attention:
        return {
            "q": random(2, 9, 4, 32),
            "k": random(2, 12, 2, 32),
            "v": random(2, 12, 2, 48),
            "causal": True,
            "out": np.full((2, 9, 4, 48), np.nan, np.float32),
        }
    if function is flashport.flash_decode:
        return {
            "q": random(2, 4, 64),
            "k_cache": random(2, 40, 2, 64),
            "v_cache": random(2, 40, 2, 64),
            "seqlens": np.array([40, 7], np.int32),
            "out": np.full((2, 4, 64), np.nan, np.float32),
        }
    return {
        "o": random(3, 5, 64),
        "lse": random(3, 5),
        "out": np.full((5, 64), np.nan, np.float32),
        "out_lse": np.full(5, np.nan, np.float32),
    }


COMPARED = [
    flashport.attention,
    flashport.flash_decode,
    flashport.gated_delta_chunk,
    flashport.gated_delta_update,
    flashport.merge_states,
]


def undecorated(function):
    """The same code as a function of its own, whose calls nobody takes."""
    copy = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@pytest.mark.parametrize("function", COMPARED)
def test_both_ways_give_the_same_bits(function):
    directly, by_body = arguments(function), arguments(function)
    function(**directly)
    undecorated(function)(**by_body)
    for name, array in directly.items():
        if isinstance(array, np.ndarray):
            assert array.tobytes() == by_body[name].tobytes(), name
    assert np.isfinite(directly["out"].astype(np.float32)).all()


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("function", COMPARED)
def test_the_body_is_not_entered(function):
    given = arguments(function)
    assert function(**given) is given["out"] or function is flashport.merge_states
    positional = [given.pop(name) for name in list(inspect.signature(function).parameters)[:2]]
    assert function(*positional, **given) is not None


@pytest.mark.parametrize("function", COMPARED)
def test_names_that_were_made_at_run_time_are_names(function):
    given = {"".join(list(name)): x for name, x in arguments(function).items()}
    function(**given)
    assert np.isfinite(given["out"].astype(np.float32)).all()


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("function", [flashport.gated_delta_chunk, flashport.gated_delta_update])
def test_the_body_makes_the_output(function):
    with pytest.raises(EnteredError):
        function(**arguments(function) | {"out": None})


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize("function", DIRECT)
def test_the_body_is_entered_by_none_but_those_who_need_it(function):
    names = list(inspect.signature(function).parameters)
    nothing = dict.fromkeys(names) | ({"out": 0} if "out" in names else {})
    with pytest.raises(TypeError, match=function.__name__):
        function(**nothing)
    for watch in (sys.setprofile, sys.settrace):
        before = {sys.setprofile: sys.getprofile, sys.settrace: sys.gettrace}[watch]()
        watch(lambda *_: None)
        try:
            with pytest.raises(EnteredError):
                function(**nothing)
        finally:
            watch(before)


@pytest.mark.usefixtures("_closed")
def test_a_function_that_somebody_has_changed_is_what_he_made_of_it(monkeypatch):
    function = flashport.merge_states
    monkeypatch.setattr(function, "__kwdefaults__", function.__kwdefaults__ | {"lse_base": 3})
    with pytest.raises(EnteredError):
        function(**arguments(function))


@pytest.mark.parametrize("function", COMPARED)
def test_every_parameter_is_the_argument_of_its_name(function):
    for name in inspect.signature(function).parameters:
        with pytest.raises(TypeError, match=rf"^{function.__name__}: {name}\b"):
            function(**arguments(function) | {name: object()})


@pytest.mark.parametrize("function", DIRECT)
def test_a_call_that_does_not_fit_the_signature_is_reported_as_python_does(function):
    names = list(inspect.signature(function).parameters)
    for positional, keywords in (
        ([], {}),
        ([None] * (len(names) + 1), {}),
        ([None] * 2, {names[0]: None}),
        ([None] * 2, {"no_such": None}),
    ):
        texts = []
        for each in (function, undecorated(function)):
            with pytest.raises(TypeError) as caught:
                each(*positional, **keywords)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]
        assert function.__name__ in texts[0]


def test_only_functions_of_operations_are_taken():
    for wrong in (len, lambda: None, undecorated(decode.num_splits_heuristic)):
        with pytest.raises(TypeError, match="direct: "):
            flashport._core.direct(wrong)

    def flash_decode(q, k):
        return q, k

    with pytest.raises(TypeError, match='no operation "flash_decode" of 2 arguments'):
        flashport._core.direct(flash_decode)
