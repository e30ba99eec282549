"""One paged cache for all requests: the keys and values of each layer, and the list of free pages.

Pages are [pages, page_size, kv_heads, head_dim]; a request has the same pages in every layer. Pages without an owner
hold NaN: whatever reads a token that nobody wrote makes a NaN of a logit, which the check finds.
"""

from __future__ import annotations

import numpy as np

from flashport.cli.serve.arrays import Arrays
from flashport.cli.serve.model import Shape

PAGE_SIZE = 16


def pages_for(tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


class PagedCache:
    """Pages are taken when a request is admitted and given back when it is finished."""

    def __init__(self, arrays: Arrays, shape: Shape, pages: int) -> None:
        size = (pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
        self.pages = pages
        self.most_used = 0
        self.layers = [
            tuple(arrays.full(size, float("nan"), arrays.kv_type) for _ in ("keys", "values"))
            for _ in range(shape.layers)
        ]
        self._free = list(range(pages))

    @property
    def free_pages(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many pages, the one that was given back last first; None, and none taken, if there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self.most_used = max(self.most_used, self.pages - len(self._free))
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Makes pages free, and NaN of what is on them."""
        for keys, values in self.layers:
            keys[pages] = float("nan")
            values[pages] = float("nan")
        self._free += pages

    def shuffle(self, rng: np.random.Generator) -> None:
        """Gives the free pages another order."""
        self._free = [self._free[n] for n in rng.permutation(len(self._free))]
