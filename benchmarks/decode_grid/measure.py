"""Times the shapes of the grid: ours and its peers in interleaved rounds, by the harness of flashport.benchmarks.

On a GPU a candidate is a captured graph of many calls on the same inputs, so keys and values below the size of L2 are
read from L2, for ours and for every peer alike. Ours has a figure where its results before and after it is timed are
the reference's, a peer where its first one is. Whatever comes of a peer, the row says it and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from decode_grid.inputs import Inputs, Reference
from decode_grid.peers import Candidate, Maker, peers_of
from decode_grid.shapes import Shape
from flashport import decode, devices
from flashport.benchmarks import harness

Peers = Callable[[Shape, str], dict[str, Maker]]


def run(
    shapes: list[Shape], device: str, target: str, rounds: int, seconds: float, peers: Peers = peers_of
) -> Iterator[dict[str, Any]]:
    """Rows of the shapes, as JSON has them: :class:`harness.Row`, the classes of the shape, and ``wrong``.

    ``wrong`` says why ours has no figure although a kernel serves the shape. No shape is begun after so many
    ``seconds``: its row says that it is left out.
    """
    torch = harness.find_torch(device)
    if torch is None:
        raise RuntimeError(f"the grid needs torch, and none is installed that sees {device}")
    start, broken = time.monotonic(), ""
    for shape in shapes:
        row, wrong = harness.Row(shape.name, shape.title, shape.bytes), ""
        if broken:
            row.skipped = broken
        elif time.monotonic() - start > seconds:
            row.skipped = f"left out: {seconds:g} s were over"
        else:
            try:
                _measure(torch, row, shape, device, target, rounds, peers)
            except Exception as error:  # the other rows are worth having
                wrong, row.seconds = harness.failure(error), None
            broken = _broken(torch, device, row)
        yield {
            **vars(row), "ratio": row.ratio, "share": row.share, "classes": shape.classes, "wrong": wrong,
        }  # fmt: skip


def _measure(torch: Any, row: harness.Row, shape: Shape, device: str, target: str, rounds: int, peers: Peers) -> None:
    query = {
        "q_dtype": "bf16", "k_format": shape.kv_format, "v_format": shape.kv_format, "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim, "group_size": shape.group, "q_len": shape.q_len,
    }  # fmt: skip
    support = devices.supports("decode", target=target, **query)
    if not support:
        row.skipped = support.reason
        return
    row.kernel = devices.which_kernel("decode", target=target, **query)
    x = Inputs(torch, shape, device)
    reference, out = Reference(x), torch.full_like(x.q, float("nan"))
    q, rows = (tensor.squeeze(1) if shape.q_len == 1 else tensor for tensor in (x.q, out))

    def ours() -> None:
        decode.flash_decode(
            q, x.k_cache, x.v_cache, x.lens, block_table=x.table, k_format=shape.kv_format, v_format=shape.kv_format,
            out=rows,
        )  # fmt: skip

    ours()
    reference.check(out)
    calls = _agreeing(peers(shape, device), x, reference, row)
    out.fill_(float("nan"))
    harness.measure(row, torch, device, ours, calls, rounds)
    reference.check(out)  # of the last replay


def _agreeing(makers: dict[str, Maker], x: Inputs, reference: Reference, row: harness.Row) -> dict[str, harness.Call]:
    """The calls of the peers whose results are the reference's; ``row`` says what is wrong with others."""
    calls: dict[str, harness.Call] = {}
    for name, make in makers.items():
        try:
            candidate: Candidate = make(x)
            reference.check(candidate.output(candidate.call()))
        except Exception as error:  # of whatever kind: it is the row's to tell
            row.peers_failed[name] = harness.failure(error)
        else:
            calls[name] = candidate.call
    return calls


def _broken(torch: Any, device: str, row: harness.Row) -> str:
    """Why nothing more can be measured, where a fault has stopped the device; gives back the memory of this row."""
    if device == "cpu":
        return ""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        return f"left out: the device failed at {row.title}: {harness.failure(error)}"
    return ""
