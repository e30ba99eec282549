"""What the suites share: random decode inputs as NumPy arrays, and the oracle's answer to them."""

from __future__ import annotations

import os
import pathlib
import shutil
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flashport import oracle

BF16 = ml_dtypes.bfloat16
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU that others use, too


class SkipWatch:
    """Fails a run in which a test is skipped for a reason that nobody has written down."""

    def __init__(self, expected):
        self.expected, self.unexpected = expected, []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(self.expected):
                self.unexpected.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session):
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.unexpected:
            terminalreporter.write_line(f"UNEXPECTED SKIP {line}", red=True)


def pytest_addoption(parser):
    text = "fail if a test is skipped for a reason that does not begin with a line of FILE"
    parser.addoption("--expected-skips", metavar="FILE", type=pathlib.Path, help=text)


def pytest_configure(config):
    if file := config.getoption("--expected-skips"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        config.pluginmanager.register(SkipWatch(tuple(lines)))


def make_decode(lens=(100, 37, 1), heads=8, kv_heads=2, head_dim=128, dtype=BF16, seed=0):
    """One new token a request over a contiguous cache, rows past a length NaN."""
    rng = np.random.default_rng(seed)
    batch, extent = len(lens), max([1, *lens])
    q = rng.standard_normal((batch, heads, head_dim)).astype(dtype)
    k = rng.standard_normal((batch, extent, kv_heads, head_dim)).astype(dtype)
    v = rng.standard_normal((batch, extent, kv_heads, head_dim)).astype(dtype)
    for b, length in enumerate(lens):
        k[b, length:] = np.nan
        v[b, length:] = np.nan
    return SimpleNamespace(q=q, k=k, v=v, seqlens=np.array(lens, np.int32), lens=lens, head_dim=head_dim)


def answer(x):
    """(out, lse) of the oracle, fp64."""
    parts = [
        oracle.attend(
            oracle.Request(
                x.q[b : b + 1].astype(np.float32),
                x.k[b, :length].astype(np.float32),
                x.v[b, :length].astype(np.float32),
            )
        )
        for b, length in enumerate(x.lens)
    ]
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])


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


def share_memory(arguments, output, other, sixteenth):
    """Lays two of the arguments into one buffer: ``other`` begins so many times 16 bytes behind ``output``."""
    ours, theirs = arguments[output], arguments[other]
    room = np.zeros(ours.nbytes + theirs.nbytes + 32, np.uint8)
    room = room[-room.ctypes.data % 16 :]
    arguments[output] = room[: ours.nbytes].view(ours.dtype).reshape(ours.shape)
    behind = room[16 * sixteenth :]
    arguments[other] = behind[: theirs.nbytes].view(theirs.dtype).reshape(theirs.shape)


@pytest.fixture
def x():
    """A small batch in bf16."""
    return make_decode()
