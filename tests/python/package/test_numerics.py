"""The codecs, the oracle and the comparison by which the package judges itself, and its self-check, are right."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashport.testing import numerics, oracle, selfcheck


@pytest.mark.parametrize(
    ("kv", "dtype", "largest"),
    [
        ("bf16", ml_dtypes.bfloat16, 1e30),
        ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448),
        ("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 240),
        ("fp8_e5m2", ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_codecs(kv, dtype, largest):
    rng = np.random.default_rng(0)
    values = np.concatenate([scale * rng.standard_normal(4000) for scale in (1e-3, 1, 50)]).astype(np.float32)
    codes = np.arange(1 << 8 * np.dtype(dtype).itemsize).astype(numerics.CARRIER[kv])
    exact = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(numerics.decode(codes, kv), exact)
    finite = np.sort(exact[np.isfinite(exact)])
    with np.errstate(over="ignore"):
        middles = (finite[:-1] + finite[1:]) / 2  # ties go to even
    values = np.clip(np.concatenate([values, finite, middles]), -largest, largest)
    np.testing.assert_array_equal(numerics.encode(values, kv), values.astype(dtype).view(codes.dtype))
    assert np.isnan(numerics.decode(numerics.nan_bits((3,), kv), kv)).all()


def test_q8_0_codec():
    values = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    values[2, 32:64] = 0
    bits = numerics.encode(values, "q8_0")
    assert bits.shape == (5, 102)
    largest = np.abs(values).reshape(5, 3, 32).max(-1).repeat(32, axis=-1)
    assert (np.abs(numerics.decode(bits, "q8_0") - values) <= largest / 127 * 0.51 + 1e-7).all()


def test_oracle_by_hand():
    """One key: its value; two equal keys: the mean; a sink takes a third; the window hides."""
    k = np.zeros((2, 1, 4), np.float32)
    v = np.stack([np.zeros((1, 4)), np.full((1, 4), 6.0)]).astype(np.float32)
    q = np.ones((1, 2, 4), np.float32)
    out, lse = oracle.attend(oracle.Request(q, k, v))
    np.testing.assert_allclose(out, 3)
    np.testing.assert_allclose(lse, np.log(2))
    out, lse = oracle.attend(oracle.Request(q, k, v, sinks=np.zeros(2, np.float32)))
    np.testing.assert_allclose(out, 2)
    np.testing.assert_allclose(lse, np.log(3))
    out, _ = oracle.attend(oracle.Request(q, k, v, window=(0, 0)))
    np.testing.assert_allclose(out, 6)
    out, lse = oracle.attend(oracle.Request(q, k[:0], v[:0]))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    tree = np.array([0b01, 0b11], np.uint32)
    out, _ = oracle.attend(oracle.Request(np.ones((2, 1, 4), np.float32), k, v, tree=tree))
    np.testing.assert_allclose(out[:, 0, 0], [0, 3])


def test_a_wrong_result_is_called_wrong():
    truth = np.ones((2, 3))
    plain = truth + 0.01
    assert not oracle.compare(truth + 0.0149, truth, plain).problem
    assert oracle.compare(truth + 0.02, truth, plain).problem
    spoiled = truth.copy()
    spoiled[0, 0] = np.nan
    assert oracle.compare(spoiled, truth, plain).problem


CHECKS = list(selfcheck.checks("cpu", "cpu", ("emulator",)))


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_selfcheck(check):
    outcome = check.run()
    if outcome.status == "unsupported":
        pytest.skip(outcome.detail)
    assert outcome.status == "passed", outcome.detail
