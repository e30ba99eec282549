"""A decode loop over a mixed cache: a small model with random weights, in NumPy, whose keys and values are quantised
once they are old. The same loop runs over a plain fp16 cache, and its tokens are fed to both.

    python examples/mixed_decode.py --k-format q4_0 --tokens 64
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

import flashport


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, which is Llama's in small."""

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512


class StandardCache:
    """Keys and values of one layer in fp16, one after the other: what the mixed cache is held against."""

    def __init__(self, shape: Shape, max_tokens: int) -> None:
        self.k, self.v = (np.zeros((1, max_tokens, shape.kv_heads, shape.head_dim), np.float16) for _ in range(2))
        self.length = np.zeros(1, np.int32)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds (1, tokens, heads, head dim)."""
        positions = self.length[0] + np.arange(k.shape[1], dtype=np.int64)
        flashport.append_kv(k[0], v[0], self.k, self.v, positions)
        self.length += k.shape[1]

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Attention of (1, tokens, heads, head dim)."""
        return flashport.flash_decode_mixed(q, self.k, self.v, hot_seqlens=self.length)  # nothing is quantised


class Model:
    """Weights, and the step of a decode loop."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weights(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) * 1.5 * rows**-0.5).astype(np.float32)

        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.embedding = rng.standard_normal((shape.vocab, shape.hidden)).astype(np.float32)
        self.layers = [
            {
                "q": weights(shape.hidden, width), "k": weights(shape.hidden, kv_width),
                "v": weights(shape.hidden, kv_width), "o": weights(width, shape.hidden),
                "up": weights(shape.hidden, 2 * shape.hidden), "down": weights(2 * shape.hidden, shape.hidden),
            }
            for _ in range(shape.layers)
        ]  # fmt: skip
        self.head = weights(shape.hidden, shape.vocab)

    def step(self, tokens: np.ndarray, first: int, caches: list) -> np.ndarray:
        """(tokens, vocab) logits of up to 16 new tokens from position ``first`` on; their keys go into the caches."""
        x = self.embedding[tokens]
        positions = first + np.arange(len(tokens))
        for layer, cache in zip(self.layers, caches, strict=True):
            own = _normed(x)
            q, k, v = (self._heads(own @ layer[name]) for name in "qkv")
            q, k = _rotated(q, positions), _rotated(k, positions)
            cache.append(k[None].astype(np.float16), v[None].astype(np.float16))
            x = x + cache.attend(q[None]).reshape(len(tokens), -1) @ layer["o"]
            x = x + np.maximum(_normed(x) @ layer["up"], 0) @ layer["down"]
        return _normed(x) @ self.head

    def _heads(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1, self.shape.head_dim)


def _normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def _rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(np.float32)


def mixed_caches(shape: Shape, max_tokens: int, **options: object) -> list[flashport.MixedKVCache]:
    """One for each layer."""
    like = np.zeros(0, np.float16)
    return [
        flashport.MixedKVCache(like, 1, shape.kv_heads, shape.head_dim, max_tokens=max_tokens, **options)
        for _ in range(shape.layers)
    ]


def standard_caches(shape: Shape, max_tokens: int) -> list[StandardCache]:
    """One for each layer."""
    return [StandardCache(shape, max_tokens) for _ in range(shape.layers)]


def run(model: Model, caches: list, tokens: np.ndarray, first: int = 0) -> np.ndarray:
    """(tokens, vocab) logits, one token after the other."""
    return np.concatenate([model.step(tokens[i : i + 1], first + i, caches) for i in range(len(tokens))])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hot-tokens", type=int, default=64)
    parser.add_argument("--sink-tokens", type=int, default=4)
    parser.add_argument("--k-format", default="q8_0")
    parser.add_argument("--v-format", default="q8_0")
    given = parser.parse_args()
    shape = Shape()
    model = Model(shape)
    tokens = np.random.default_rng(1).integers(0, shape.vocab, given.tokens)
    mixed = mixed_caches(
        shape, given.tokens, hot_tokens=given.hot_tokens, spill_tokens=16, sink_tokens=given.sink_tokens,
        k_format=given.k_format, v_format=given.v_format,
    )  # fmt: skip
    logits = {}
    for name, caches in (("fp16 cache", standard_caches(shape, given.tokens)), ("mixed cache", mixed)):
        begin = time.perf_counter()
        logits[name] = run(model, caches, tokens)
        print(f"{name}: {len(tokens) / (time.perf_counter() - begin):,.0f} tokens/s")
    apart = np.abs(logits["mixed cache"] - logits["fp16 cache"]).max() / np.abs(logits["fp16 cache"]).max()
    same = (logits["mixed cache"].argmax(-1) == logits["fp16 cache"].argmax(-1)).mean()
    print(
        f"{int(mixed[0].quantised_lengths[0])} of {len(tokens)} tokens are {given.k_format}/{given.v_format}; logits "
        f"differ by {apart:.2e} of the largest one, and {100 * same:.0f} % of the likeliest tokens are the same"
    )


if __name__ == "__main__":
    main()
