"""The list of decode shapes that benchmarks/run.py --grid times and ci/roofline.py estimates.

A shape is a head shape (query heads, kv heads, head_dim) with new tokens per request and the keys of each request. Head
shapes are those of models at the tensor-parallel sizes that serve them. A row beside the grid repeats one of its shapes
with other pages or another cache format, and is compared with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

LARGE = 500_000_000  # bytes of keys and values from which a shape counts as large
_LARGEST = 4_500_000_000  # bytes; shapes above are left out: inputs lie in memory twice, in pages and contiguous

# Query heads, kv heads and head_dim of models, and the tensor-parallel sizes that the grid has of each.
MODELS = {
    "Llama 3 8B": ((32, 8, 128), (1, 2, 8)),
    "Llama 3 70B": ((64, 8, 128), (1, 2, 4, 8)),
    "Qwen2.5 7B": ((28, 4, 128), (1, 2, 4)),
    "Qwen3 14B": ((40, 8, 128), (1, 4)),
    "Llama 2 7B": ((32, 32, 128), (1, 8)),
    "Llama 3.2 1B": ((32, 8, 64), (1, 2)),
    "gpt-oss 120B": ((64, 8, 64), (1, 8)),
    "Falcon 7B": ((71, 1, 64), (1,)),
    "Gemma 2 9B": ((16, 8, 256), (1,)),
    "Qwen3-Next 80B": ((16, 2, 256), (1, 2)),
}
# Large groups on one kv head that no model above has.
_MULTI_QUERY = ((64, 1, 64), (64, 1, 128), (71, 1, 128))
# Head shapes that take all sizes, ragged batches, several new tokens, and lengths between powers of two.
_MAIN = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (16, 2, 128), (8, 1, 128), (32, 8, 64), (16, 2, 256))
_RAGGED = ((32, 8, 128), (8, 1, 128), (28, 4, 128), (32, 8, 64), (8, 1, 256))
_SEVERAL = ((32, 8, 128), (64, 8, 128), (8, 1, 128), (32, 8, 64), (16, 2, 256))
_BETWEEN = ((32, 8, 128), (16, 2, 128), (32, 8, 64))

# Requests and keys of each.
_SIZES = ((1, 512), (1, 4096), (4, 2048), (16, 1024), (64, 2048))
_MORE_SIZES = (
    (1, 1024), (1, 8192), (1, 16384), (1, 131072), (8, 4096), (32, 512), (64, 4096), (64, 8192), (256, 512),
)  # fmt: skip
_SEVERAL_SIZES = ((1, 4096), (8, 4096), (64, 4096))
_BETWEEN_SIZES = ((1, 1000), (1, 10240), (1, 12288), (3, 10000), (4, 1000), (4, 9000), (8, 5000), (8, 9000))
_MIXES = {
    "1 long + 63 short": (131072, *[200] * 63),
    "32 mixed": tuple(512 + (k * 2_654_435_761) % 7681 for k in range(32)),  # 512 to 8192, by Knuth's hash
    "8 uneven": (2048, 1, 17, 1000, 333, 2047, 128, 16384),
}


@dataclass(frozen=True)
class Shape:
    """One row: what is decoded, and how the cache lies."""

    heads: int
    kv_heads: int
    head_dim: int
    lens: tuple[int, ...]
    q_len: int = 1
    size: str = ""  # name of the batch; empty where all requests have as many keys
    page: int = 16
    kv_format: str = "bf16"

    @property
    def ragged(self) -> bool:
        """Whether lengths differ."""
        return len(set(self.lens)) > 1

    @property
    def between(self) -> bool:
        """Whether all requests have as many keys, which are no power of two."""
        return not self.ragged and self.lens[0].bit_count() > 1

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def in_grid(self) -> bool:
        """Whether this is a shape of the grid, and no row beside it."""
        return self == self.base

    @property
    def base(self) -> Shape:
        """The shape of the grid that a row beside it is compared with: bf16, pages of 16."""
        return replace(self, page=16, kv_format="bf16")

    @property
    def with_one_token(self) -> Shape:
        """The shape with one new token for each request."""
        return replace(self, q_len=1)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        return sum(self.lens) * self.kv_heads * 2 * row_bytes(self.kv_format, self.head_dim)

    @property
    def batch(self) -> str:
        """The requests, as in "64 x 2k"."""
        return self.size or f"{len(self.lens)} x {count(self.lens[0])}"

    @property
    def head_shape(self) -> str:
        """The heads, as in "32/8 D128"."""
        return f"{self.heads}/{self.kv_heads} D{self.head_dim}"

    @property
    def title(self) -> str:
        """The shape in a few words."""
        parts = [self.batch, self.head_shape]
        parts += [f"q_len {self.q_len}"] * (self.q_len > 1)
        parts += [f"page {self.page}"] * (self.page != 16) + [self.kv_format] * (self.kv_format != "bf16")
        return ", ".join(parts)

    @property
    def name(self) -> str:
        """The title in letters, digits and underscores, which bars.csv and --shapes go by."""
        return "grid_" + re.sub(r"[^a-z0-9]+", "_", self.title.lower().replace("/", "h")).strip("_")

    @property
    def classes(self) -> list[str]:
        """The classes that statistics are taken of."""
        if not self.in_grid:
            return []
        found = ["all", f"q_len {self.q_len}"]
        if self.bytes >= LARGE:
            found += ["500 MB and more"] + ["q_len 1, 500 MB and more"] * (self.q_len == 1)
        if self.group >= 64:
            found.append("64 and 71 heads on one")
        if self.ragged:
            found.append("ragged")
        if self.between:
            found.append("between powers of two")
        return found


# Bytes of 32 values as stored: blocks with their scale, int8 with a factor of fp16 for each eight.
_BYTES_OF_32 = {
    "fp16": 64,
    "bf16": 64,
    "fp8_e4m3": 32,
    "fp8_e4m3fnuz": 32,
    "q8_0": 34,
    "q4_0": 18,
    "iq4_nl": 18,
    "int8": 40,
}


def row_bytes(fmt: str, head_dim: int) -> int:
    """Bytes of a stored row, with the scales of its blocks or the factors of its groups."""
    return head_dim * _BYTES_OF_32[fmt] // 32


def count(number: int) -> str:
    """1024 as 1k."""
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def head_shapes() -> list[tuple[int, int, int]]:
    """Query heads, kv heads and head_dim of all models at their tensor-parallel sizes, each once."""
    found = [
        (heads // ranks, kv_heads // ranks, head_dim)
        for (heads, kv_heads, head_dim), sizes in MODELS.values()
        for ranks in sizes
    ]
    return list(dict.fromkeys([*found, *_MULTI_QUERY]))


def grid() -> list[Shape]:
    """The shapes of the grid."""
    found = []
    for shape in head_shapes():
        sizes = [*_SIZES, *(_MORE_SIZES if shape in _MAIN else ()), *(_BETWEEN_SIZES if shape in _BETWEEN else ())]
        found += [Shape(*shape, lens=(keys,) * requests) for requests, keys in sorted(sizes)]
        if shape in _RAGGED:
            found += [Shape(*shape, lens=lens, size=size) for size, lens in _MIXES.items()]
    for q_len in (2, 4, 8):
        for shape in _SEVERAL:
            found += [Shape(*shape, lens=(keys,) * requests, q_len=q_len) for requests, keys in _SEVERAL_SIZES]
        found.append(Shape(*_RAGGED[0], lens=_MIXES["32 mixed"], q_len=q_len, size="32 mixed"))
    return [shape for shape in found if shape.bytes <= _LARGEST]


def beside_the_grid() -> list[Shape]:
    """Shapes of the grid once more: with pages of one token, and with caches of bytes."""
    batches = ("1 x 1k", "1 x 16k", "8 x 4k", "32 x 512", "64 x 8k")
    paged = [
        replace(shape, page=1)
        for shape in grid()
        if shape.q_len == 1
        and shape.head_shape in ("32/8 D128", "8/1 D128", "32/8 D64", "16/2 D256")
        and shape.batch in batches
    ]
    bytes_caches = [
        Shape(32, 8, 128, lens=(keys,) * requests, kv_format=kv_format)
        for kv_format in ("fp8_e4m3", "q8_0")
        for requests, keys in ((64, 8192), (1, 8192), (8, 4096))
    ]
    return paged + bytes_caches


def select(pattern: str = "", limit: int | None = None) -> list[Shape]:
    """The grid and the rows beside it: those whose name or title the regular expression is found in, the first few.

    What a row is compared with comes with it.
    """
    chosen = [s for s in [*grid(), *beside_the_grid()] if re.search(pattern, s.name) or re.search(pattern, s.title)]
    chosen = chosen[:limit]
    wanted = {*chosen, *(shape.base if shape.q_len == 1 else shape.with_one_token for shape in chosen)}
    return [shape for shape in [*grid(), *beside_the_grid()] if shape in wanted]
