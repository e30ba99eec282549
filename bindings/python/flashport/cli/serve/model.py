"""A random model in Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Attention is a function that the caller brings; all else works on rows, a row being a token. For a request's bits to be
its own, a row's result must not depend on how many rows a step has. Libraries do not promise that: a product of
matrices, and on a GPU even a sum along rows, picks its kernel, and with it the order of its sums, by the number of
rows. So the rows of a step are cut into tiles of one fixed size, the last one filled up with rows that nobody reads,
and every function of rows sees this one shape, alone and in any batch: the same kernel runs, and it computes each row
from that row. ``rows_are_independent`` checks the latter, in which a library could still differ, on the device that is
used. It costs the products of some unused rows, in place of kernels of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashport.cli.serve.arrays import Arrays

EPSILON = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 2
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 1000

    @property
    def intermediate(self) -> int:
        """Width of SwiGLU: 8/3 of the hidden size, rounded up to whole 64s."""
        return -(-8 * self.hidden // (3 * 64)) * 64


class Model:
    """Weights that follow from a seed, and what they do to the rows of a step."""

    def __init__(self, arrays: Arrays, shape: Shape, max_len: int, seed: int) -> None:
        self.shape = shape
        self._arrays, self._xp = arrays, arrays.xp
        rng = np.random.default_rng(seed)

        def random(rows: int, columns: int, scale: float) -> Any:
            return arrays.weights(rng.standard_normal((rows, columns), np.float32) * np.float32(scale))

        hidden, width = shape.hidden, shape.heads * shape.head_dim
        packed = width + 2 * shape.kv_heads * shape.head_dim
        self._embedding = random(shape.vocab, hidden, 1.0)
        self._layers = [
            {
                "qkv": random(hidden, packed, hidden**-0.5),
                "out": random(width, hidden, width**-0.5),
                "gate_up": random(hidden, 2 * shape.intermediate, hidden**-0.5),
                "down": random(shape.intermediate, hidden, shape.intermediate**-0.5),
            }
            for _ in range(shape.layers)
        ]
        self._head = random(hidden, shape.vocab, hidden**-0.5)
        half = np.arange(shape.head_dim // 2) * (2 / shape.head_dim)
        angles = np.arange(max_len)[:, None] * ROTARY_BASE**-half
        self._cos, self._sin = (arrays.weights(f(angles)[:, None]) for f in (np.cos, np.sin))  # [max_len, 1, D / 2]

    def logits(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        attend: Callable[[int, Any, Any, Any], Any],
        rows: np.ndarray,
    ) -> np.ndarray:
        """Logits [len(rows), vocab] in fp32 of some rows of a step.

        ``attend(layer, q, k, v)`` gives attention's output of all rows, [rows, heads, head_dim].
        """
        tokens, places = (self._arrays.put(self._filled(x.astype(np.int64))) for x in (tokens, positions))
        x = self._tiles(self._embedding[tokens])
        turns = list(zip(self._tiles(self._cos[places]), self._tiles(self._sin[places]), strict=True))
        for layer, weights in enumerate(self._layers):
            parts = [self._before_attention(weights, *tile) for tile in zip(x, turns, strict=True)]
            q, k, v = (self._xp.concatenate(part)[: len(positions)] for part in zip(*parts, strict=True))
            attended = self._tiles(self._filled(attend(layer, q, k, v)))
            x = [self._after_attention(weights, *tile) for tile in zip(x, attended, strict=True)]
        if len(rows) == 0:
            return np.empty((0, self.shape.vocab), np.float32)
        chosen = self._filled(self._xp.concatenate(x)[self._arrays.put(rows.astype(np.int64))])
        logits = self._xp.concatenate([self._to_logits(tile) for tile in self._tiles(chosen)])
        return self._arrays.to_host(logits[: len(rows)])

    # What follows takes and gives tiles of rows, [row_tile, ...].

    def _before_attention(self, weights: dict[str, Any], x: Any, turn: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        shape = self.shape
        packed = (self._norm(x) @ weights["qkv"]).reshape(len(x), -1, shape.head_dim)
        q, k, v = (
            packed[:, : shape.heads],
            packed[:, shape.heads : -shape.kv_heads],
            packed[:, -shape.kv_heads :],
        )
        # The one place of rotary positions. Attention that turns q and k (``rotary_cos``) takes them as they are here.
        q, k = (self._rotate(part, *turn) for part in (q, k))
        return tuple(self._arrays.cast(part, self._arrays.kv_type) for part in (q, k, v))

    def _after_attention(self, weights: dict[str, Any], x: Any, attended: Any) -> Any:
        attended = self._arrays.cast(attended.reshape(len(x), -1), self._arrays.model_type)
        x = x + attended @ weights["out"]
        gate_up = self._norm(x) @ weights["gate_up"]
        gate, up = gate_up[:, : self.shape.intermediate], gate_up[:, self.shape.intermediate :]
        return x + (gate / (1 + self._xp.exp(-gate)) * up) @ weights["down"]

    def _to_logits(self, x: Any) -> Any:
        return self._norm(x) @ self._head

    def _norm(self, x: Any) -> Any:
        """RMSNorm; its weights, of a random model, are 1."""
        wide = self._arrays.cast(x, self._xp.float32)
        wide = wide / self._xp.sqrt((wide * wide).mean(axis=-1, keepdims=True) + EPSILON)
        return self._arrays.cast(wide, self._arrays.model_type)

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """Turns pairs of the halves of each head, [row_tile, heads, D], by the angles of its row's position."""
        half = self.shape.head_dim // 2
        a, b = x[..., :half], x[..., half:]
        return self._xp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    # How rows become tiles.

    def _filled(self, x: Any) -> Any:
        """Rows and as many of zeros as whole tiles need; of NumPy's arrays and of the model's."""
        missing = -len(x) % self._arrays.row_tile
        if missing == 0:
            return x
        if isinstance(x, np.ndarray):
            return np.concatenate((x, np.zeros((missing, *x.shape[1:]), x.dtype)))
        return self._xp.concatenate((x, self._arrays.full((missing, *x.shape[1:]), 0, x.dtype)))

    def _tiles(self, x: Any) -> list[Any]:
        return [x[start : start + self._arrays.row_tile] for start in range(0, len(x), self._arrays.row_tile)]

    def rows_are_independent(self, seed: int) -> bool:
        """Whether a row of a tile has the same bits at another place and beside other rows, in every function of rows.

        Where it does not, tokens may differ for reasons that are not attention's.
        """
        rng = np.random.default_rng(seed)
        size, shape = self._arrays.row_tile, self.shape
        order = rng.permutation(size)
        turn = (self._cos[:1], self._sin[:1])
        x = rng.standard_normal((size, shape.hidden), np.float32)
        attended = rng.standard_normal((size, shape.heads, shape.head_dim), np.float32)

        def results(rows: np.ndarray) -> list[np.ndarray]:
            """All functions over those rows, one that is -1 being zeros."""
            mask = (rows >= 0).astype(np.float32)
            tile = self._arrays.weights(x[rows] * mask[:, None])
            heads = self._arrays.weights(attended[rows] * mask[:, None, None])
            found = [*self._before_attention(self._layers[0], tile, turn), self._to_logits(tile)]
            return [self._arrays.to_host(y) for y in (*found, self._after_attention(self._layers[0], tile, heads))]

        all_rows, moved = results(np.arange(size)), results(order)
        alone = results(np.where(np.arange(size) == 0, order[0], -1))
        return all(
            a[order].tobytes() == b.tobytes() and b[0].tobytes() == c[0].tobytes()
            for a, b, c in zip(all_rows, moved, alone, strict=True)
        )
