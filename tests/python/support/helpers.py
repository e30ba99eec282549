"""What the suites share of arrays: comparisons, tensors of torch, arguments that overlap."""

from __future__ import annotations

import re
import shutil

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16


def assert_close(got, truth, tolerance=0.01):
    """Within the rounding of a 16-bit output."""
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), truth, rtol=tolerance, atol=tolerance)


def same(a, b):
    """Equal bit for bit."""
    np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (a, b)))


def to_torch(x):
    """A torch tensor of its own of an array; anything else as it is."""
    torch = pytest.importorskip("torch")
    if not isinstance(x, np.ndarray):
        return x
    x = np.ascontiguousarray(x)
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) if x.dtype == BF16 else torch.tensor(x)


def from_torch(tensor):
    """The array of a torch tensor of a CPU."""
    import torch

    return tensor.view(torch.int16).numpy().view(BF16) if tensor.dtype is torch.bfloat16 else tensor.numpy()


def over(x):
    """A torch tensor over the memory of an array; anything else as it is."""
    torch = pytest.importorskip("torch")
    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler for inductor"
)


def expect_refusal(function, arguments, outputs, error, text):
    """The call fails so, by its own name, and leaves those of its outputs that were given as they were."""
    given = [arguments[name] for name in outputs if isinstance(arguments.get(name), np.ndarray)]
    before = [x.tobytes() for x in given]
    with pytest.raises(error, match=rf"^{function.__name__}: {text}"):
        function(**arguments)
    assert [x.tobytes() for x in given] == before


def expect_words(function, arguments, library, words, kind):
    """A shim refuses arrays of NumPy, or tensors of torch, in another library's words and class, and writes nothing."""
    before = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    given = {name: over(x) for name, x in arguments.items()} if library == "torch" else arguments
    with pytest.raises(kind, match=f"^{function.__name__}: {re.escape(words)}") as raised:
        function(**given)
    assert isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, (ValueError, NotImplementedError))  # as all of flashport
    assert {name: arguments[name].tobytes() for name in before} == before


def share_memory(arguments, output, other, sixteenth):
    """Lays two of the arguments into one buffer: ``other`` begins so many times 16 bytes behind ``output``."""
    ours, theirs = arguments[output], arguments[other]
    room = np.zeros(ours.nbytes + theirs.nbytes + 32, np.uint8)
    room = room[-room.ctypes.data % 16 :]
    arguments[output] = room[: ours.nbytes].view(ours.dtype).reshape(ours.shape)
    behind = room[16 * sixteenth :]
    arguments[other] = behind[: theirs.nbytes].view(theirs.dtype).reshape(theirs.shape)
