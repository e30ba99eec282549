"""The page of the chunked gated delta rule: its NumPy is the rule, and its figures are those of its formulas."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import flashport
from flashport.testing import gated_delta_oracle as oracle

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "gated-delta.md").read_text()
CODE = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def page():
    """What the page's example defines."""
    names: dict = {"__name__": "example"}
    exec(compile(CODE, "gated-delta.md", "exec"), names)
    return names


def inputs(tokens, keys, values, seed):
    """One sequence and value head in fp64: q, k, v, g, beta and the state [K, V] that it begins with."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, tokens, keys))
    v = rng.standard_normal((tokens, values))
    return q, k, v, -0.3 * rng.random(tokens), rng.random(tokens), rng.standard_normal((keys, values))


@pytest.mark.parametrize("chunk", [1, 16, 64, 100])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_the_example_is_the_recurrence(page, tokens, chunk):
    q, k, v, g, beta, state = inputs(tokens, 24, 40, tokens)
    out, final = page["sequence"](q, k, v, g, beta, state, scale=0.3, chunk=chunk)
    truth = oracle.chunk(
        *(x[None, :, None] for x in (q, k, v, g, beta)),
        state=state[None, None],
        state_layout="kv",
        rule=oracle.Rule(scale=0.3, use_qk_l2norm=True),
    )
    np.testing.assert_allclose(out, truth.out[0, :, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(final, truth.state[0, 0], rtol=0, atol=1e-12)


def test_an_extreme_gate_makes_no_number_infinite(page):
    q, k, v, g, beta, state = inputs(64, 16, 16, 7)
    g[20] = -800
    out, final = page["sequence"](q, k, v, g, beta, state, scale=1.0)
    assert np.isfinite(out).all()
    assert np.isfinite(final).all()


def test_the_wy_vectors_give_the_same_rows(page):
    q, k, v, g, beta, state = inputs(64, 24, 40, 3)
    T, _, (learn, recall, *_) = page["prepare"](q, k, g, beta, 1.0)  # noqa: N806
    new = T @ (learn[:, None] * v - recall[:, None] * (k @ state))
    U, W = T @ (learn[:, None] * v), T @ (recall[:, None] * k)  # noqa: N806
    np.testing.assert_allclose(U - W @ state, new, rtol=0, atol=1e-12)


def test_a_chunks_inverse_is_joined_from_blocks(page):
    q, k, _, g, beta, _ = inputs(64, 24, 8, 5)
    T = page["prepare"](q, k, g, beta, 1.0)[0]  # noqa: N806
    A = np.linalg.inv(T) - np.eye(64)  # noqa: N806
    for half in (16, 32):
        for top in range(0, 64, 2 * half):
            first, second = slice(top, top + half), slice(top + half, top + 2 * half)
            joined = -T[second, second] @ (A[second, first] @ T[first, first])
            np.testing.assert_allclose(joined, T[second, first], rtol=0, atol=1e-12)


def table(header):
    """The rows below a header, as lists of cells; numbers as integers."""
    lines = PAGE[PAGE.index(header) :].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: next(i for i, x in enumerate(lines) if not x)]]
    return [[int(cell) if cell.isdigit() else cell for cell in row] for row in rows]


def lower_elements(c):
    """Elements of a triangle [c, c] in blocks of 16 x 16 up to the diagonal's."""
    return sum(16 * 16 for row in range(c // 16) for column in range(row + 1))


def test_costs_follow_from_the_shapes():
    K = V = 128  # noqa: N806
    c, lower = 64, lower_elements(64)
    products = {row[0]: row[2] for row in table("| product | FLOP a token |")}
    assert list(products.values()) == [6 * K * V, 2 * 2 * lower * V // c, 2 * 2 * lower * K // c]
    assert f"{lower} of {c * c} elements" in (DOCS / "gated-delta-tiles.svg").read_text()
    figures = [row[1:] for row in table("| c | FLOP of the chain a token |")]
    for c, (flop, triangles, chunks, stage) in zip((32, 64, 128), figures, strict=True):
        lower = lower_elements(c)
        assert flop == 6 * K * V + 2 * 2 * lower * V // c
        assert triangles == 2 * lower * 2 // c
        assert chunks == 16384 // c
        assert stage == f"{(2 * c * K + 2 * c * c + c * 64) * 2 // 1024} KB"


def test_bytes_follow_from_the_shape():
    heads, value_heads, dim = 16, 32, 128
    factors = 4 * (4 * 64 + 4)
    assert f"{factors} bytes of factors" in PAGE
    parts = [
        2 * 2 * heads * dim * 2,
        2 * value_heads * dim * 2,
        2 * 2 * value_heads * lower_elements(64) * 2 // 64,
        2 * value_heads * factors // 64,
    ]
    cells = [row[1] for row in table("| | bytes a token |")]
    assert cells == [*parts, f"**{sum(parts)}**"]
    flop = value_heads * (6 * dim * dim + 2 * 80 * dim) + heads * 2 * 80 * dim
    assert f"{flop / 1e6:.1f} MFLOP and {sum(parts) / 1e3:.0f} KB a token" in PAGE
    assert f"{flop * 16384 / 1e9:.1f} GFLOP and {sum(parts) * 16384 / 1e6:.0f} MB for 16384 tokens" in PAGE


def test_the_workspace_is_what_the_page_says():
    tokens, value_heads, dim = 300, 4, 32
    q = k = np.zeros((1, tokens, 2, dim), np.float32)
    v = np.zeros((1, tokens, value_heads, dim), np.float32)
    g = beta = np.zeros((1, tokens, value_heads), np.float32)
    size = flashport.gated_delta_chunk_workspace_size(q, k, v, g, beta)
    assert size == 5 * value_heads * (2 * 64 * 64 * 4 + 1040 + 4)  # fp32 on a CPU


@pytest.mark.parametrize("name", sorted(x.name for x in DOCS.glob("*.svg")))
def test_figures_are_shown_and_readable_on_dark_pages(name):
    root = ElementTree.parse(DOCS / name).getroot()
    ground = root.find(f"{SVG}rect")
    assert ground.attrib == {"width": root.get("width"), "height": root.get("height"), "fill": "#ffffff"}
    assert root.find(f"{SVG}title").text
    assert any(f"]({name})" in page.read_text() for page in DOCS.glob("*.md"))
