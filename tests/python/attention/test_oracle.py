"""The oracle itself, on cases whose answer is known by hand or from elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from flashport.testing import attention_oracle as oracle

PLAIN = oracle.Rule()


def test_by_hand():
    """One key: its value; two equal keys: the mean; a sink takes a third; the window hides."""
    k = np.zeros((2, 1, 4), np.float32)
    v = np.stack([np.zeros((1, 4)), np.full((1, 4), 6.0)]).astype(np.float32)
    q = np.ones((1, 2, 4), np.float32)
    out, lse = oracle.attend(q, k, v, PLAIN)
    np.testing.assert_allclose(out, 3)
    np.testing.assert_allclose(lse, np.log(2))
    out, lse = oracle.attend(q, k, v, PLAIN, sinks=np.zeros(2))
    np.testing.assert_allclose(out, 2)
    np.testing.assert_allclose(lse, np.log(3))
    out, lse = oracle.attend(q, k, v, oracle.Rule(window=(0, 0)))
    np.testing.assert_allclose(out, 6)
    out, lse = oracle.attend(q, k[:0], v[:0], PLAIN)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    out, lse = oracle.attend(q, k, v, PLAIN, bias=np.array([[[0, -np.inf]], [[-np.inf, -np.inf]]]))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, [[0], [-np.inf]])
    out, _ = oracle.attend(q, k, v, oracle.Rule(dropout_p=0.5), kept=np.array([[[True, False]], [[False, True]]]))
    np.testing.assert_allclose(out[0, :, 0], [0, 6])  # half of twice the value


def test_order_of_what_modifies_a_logit():
    """Scale, then softcap, then ALiBi and bias."""
    q, k, v = np.full((1, 1, 1), 4.0), np.full((2, 1, 1), 3.0), np.zeros((2, 1, 1))
    rule = oracle.Rule(softmax_scale=0.5, softcap=2.0)
    _, lse = oracle.attend(q, k, v, rule, slopes=np.array([0.25]), bias=np.array([[[1.0, 0.0]]]))
    capped = 2 * np.tanh(6 / 2)
    np.testing.assert_allclose(lse, np.logaddexp(capped - 0.25 + 1, capped))


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (oracle.Rule(causal=True), ["11100", "11110", "11111"]),
        (oracle.Rule(causal=True, window=(1, 7)), ["01100", "00110", "00011"]),
        (oracle.Rule(window=(-1, 1)), ["11110", "11111", "11111"]),
        (oracle.Rule(window=(0, 0)), ["00100", "00010", "00001"]),
    ],
)
def test_masks_are_aligned_to_the_last_key(rule, wanted):
    seen = oracle.visible(rule, np.arange(3), 3, 5)
    assert ["".join(map(str, row.astype(int))) for row in seen] == wanted


def test_more_queries_than_keys():
    seen = oracle.visible(oracle.Rule(causal=True), np.arange(4), 4, 2)
    assert seen.astype(int).tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers of the generator's authors (Random123, kat_vectors)
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox(counter, key, words):
    low, high = (int(word, 16) for word in key.split())
    found = oracle.philox(tuple(np.array(int(word, 16)) for word in counter.split()), high << 32 | low)
    assert [f"{int(word):08x}" for word in found] == words.split()


def test_rows_of_a_sequence():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 2, 8)) for _ in range(3))
    rows = np.array([7, 0, 3])
    whole, part = (oracle.attend(q, k, v, oracle.Rule(causal=True), rows=each) for each in (None, rows))
    np.testing.assert_allclose(part[0], whole[0][rows], rtol=1e-14)
    np.testing.assert_allclose(part[1], whole[1][:, rows], rtol=1e-14)
