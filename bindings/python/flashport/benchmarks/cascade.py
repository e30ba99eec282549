"""Benchmark cases of cascade_decode: a prefix that all requests share, beside plain decode of whole sequences.

Plain decode stands for itself twice: as a peer of the cascade on the same pages, those of the prefix in the table of
each request, as a server with a prefix cache has them; and as a row of its own on requests that share no page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flashport import cascade, decode
from flashport.benchmarks import harness
from flashport.testing import numerics


@dataclass(frozen=True)
class CascadeCase:
    """``batch`` requests of ``suffix`` tokens each after a prefix of ``prefix`` tokens, on pages of 16."""

    name: str
    batch: int
    prefix: int
    suffix: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    fmt: str = "bf16"
    page_size: int = 16
    is_cascade: bool = True  # else plain decode of whole sequences, each on pages of its own

    @property
    def title(self) -> str:
        """The shape in a few words."""
        how = "cascade" if self.is_cascade else "decode of whole sequences"
        shape = f"{self.batch} x {self.suffix} after a prefix of {self.prefix}"
        return f"{how}, {shape}, {'/'.join(map(str, self.heads))}, {self.head_dim}, {self.fmt}"

    @property
    def kv_bytes(self) -> int:
        """The keys and values on all pages."""
        return self._bytes(1 if self.is_cascade else self.batch)

    @property
    def plain_bytes(self) -> int:
        """What plain decode reads."""
        return self._bytes(self.batch)

    def _bytes(self, prefixes: int) -> int:
        tokens = self.batch * self.suffix + self.prefix * prefixes
        return tokens * self.heads[1] * self.head_dim * 2 * np.dtype(numerics.CARRIER[self.fmt]).itemsize

    @property
    def query(self) -> dict[str, Any]:
        """The options of :func:`flashport.supports` of the last level."""
        return {"q_dtype": self.fmt, "head_dim": self.head_dim, "group_size": self.heads[0] // self.heads[1]}


_CASES = (
    CascadeCase("cascade_64x512_after_16k", 64, 16384, 512),
    CascadeCase("cascade_64x512_after_16k_whole", 64, 16384, 512, is_cascade=False),
)


def cases(match: str = "") -> list[CascadeCase]:
    """All cases; ``match`` selects by name or title."""
    return [case for case in _CASES if match in case.name or match in case.title]


def run_case(case: CascadeCase, device: str, target: str, rounds: int = 9, largest: float = math.inf) -> harness.Row:
    """Times one case on a device; ``largest`` limits the bytes that plain decode reads."""
    row = harness.Row(case.name, case.title, case.kv_bytes)
    candidates = partial(make_candidates, case=case, device=device)
    where = device, target, rounds
    harness.run_in_torch(
        row,
        "decode",
        case.query,
        where,
        case.plain_bytes,
        largest,
        "in whose arrays partial results are merged",
        candidates,
    )
    return row


def make_candidates(torch: Any, case: CascadeCase, device: str) -> tuple[harness.Call, dict[str, harness.Call]]:
    """Our call and its peer, for whole sequences none; ``torch`` makes the cache on the device."""
    where = harness.torch_device(device)
    prefix, suffix = (-(-length // case.page_size) for length in (case.prefix, case.suffix))
    copies = 1 if case.is_cascade else case.batch
    pages = copies * prefix + case.batch * suffix
    shape = (pages, case.page_size, case.heads[1], case.head_dim)
    k, v = (harness.random_tensor(torch, shape, case.fmt, where) for _ in "kv")
    q, out = (harness.random_tensor(torch, (case.batch, case.heads[0], case.head_dim), case.fmt, where) for _ in "qo")
    order = np.random.default_rng(0).permutation(pages).astype(np.int32)
    shared, own = order[: copies * prefix].reshape(copies, prefix), order[copies * prefix :].reshape(case.batch, suffix)
    whole = np.concatenate([np.broadcast_to(shared, (case.batch, prefix)), own], axis=1)

    def place(values: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(where)

    # Whole sequences are tables without a gap: the prefix ends where a page does.
    lens, table = place([prefix * case.page_size + case.suffix] * case.batch), place(whole)
    plain_out = torch.empty_like(out)

    def plain() -> object:
        return decode.flash_decode(q, k, v, lens, block_table=table, out=plain_out)

    if not case.is_cascade:
        return plain, {}
    levels = [
        cascade.CascadeLevel(k, v, place([prefix * case.page_size]), block_table=place(shared)),
        cascade.CascadeLevel(k, v, place([case.suffix] * case.batch), block_table=place(own)),
    ]
    return lambda: cascade.cascade_decode(q, levels, out=out), {"flash_decode": plain}
