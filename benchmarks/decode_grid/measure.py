"""Times the shapes of the grid: ours and its peers in interleaved rounds, by the harness of flashport.benchmarks.

On a GPU a candidate is a captured graph of many calls on the same inputs, so keys and values below the size of L2 are
read from L2, for ours and for every peer alike. Ours has a figure where its results before and after it is timed are
the reference's, a peer where its first one is. Whatever comes of a peer, the row says it and the run goes on: a process
of its own measures, and another takes over where a fault has stopped the device for it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from decode_grid.inputs import Inputs, Reference
from decode_grid.peers import Maker, peers_of
from decode_grid.shapes import Shape
from flashport import decode, devices
from flashport.benchmarks import harness

Peers = Callable[[Shape, str], dict[str, Maker]]


class Worker:
    """The process that measures; a new one after a fault."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def measure(self, shape: Shape, *arguments: Any) -> dict[str, Any]:
        """:func:`measure` in that process."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            row = self._pool.submit(measure, shape, *arguments).result()
        except BrokenProcessPool:
            row = {**_row(shape), "fault": "the process that measured it died"}
        if row["fault"]:
            self.close()
        return row

    def close(self) -> None:
        """Ends the process."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def run(
    shapes: list[Shape], device: str, target: str, rounds: int, seconds: float, worker: Worker | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of :func:`measure`; no shape is begun after so many ``seconds``, and its row says that it is left out.

    A shape at which the device failed is measured once more without the peers that failed there.
    """
    worker, start = worker or Worker(), time.monotonic()
    try:
        for shape in shapes:
            if time.monotonic() - start > seconds:
                yield {**_row(shape), "skipped": f"left out: {seconds:g} s were over"}
                continue
            row = worker.measure(shape, device, target, rounds)
            if row["fault"]:
                blamed = row["peers_failed"] or dict.fromkeys(peers_of(shape, device), row["fault"])
                row = worker.measure(shape, device, target, rounds, tuple(blamed))
                row["peers_failed"] = blamed | row["peers_failed"]
                row["wrong"] = row["wrong"] or row["fault"]
            yield row
    finally:
        worker.close()


def measure(
    shape: Shape, device: str, target: str, rounds: int, without: tuple[str, ...] = (), peers: Peers = peers_of
) -> dict[str, Any]:
    """One row, as JSON has it: :class:`harness.Row` and the classes of the shape, beside all peers but some.

    ``wrong`` says why ours has no figure although a kernel serves the shape, ``fault`` why nothing more can be measured
    in this process.
    """
    torch = harness.find_torch(device)
    row, wrong = harness.Row(shape.name, shape.title, shape.bytes), ""
    try:
        if torch is None:
            raise RuntimeError(f"the grid needs torch, and none is installed that sees {device}")
        makers = {name: make for name, make in peers(shape, device).items() if name not in without}
        _measure(torch, row, shape, device, target, rounds, makers)
    except Exception as error:  # the other rows are worth having
        wrong, row.seconds = harness.failure(error), None
    return {**_row(shape, row), "wrong": wrong, "fault": _fault(torch, device)}


def _row(shape: Shape, row: harness.Row | None = None) -> dict[str, Any]:
    row = row or harness.Row(shape.name, shape.title, shape.bytes)
    found = {**vars(row), "ratio": row.ratio, "share": row.share, "classes": shape.classes}
    return {**found, "wrong": "", "fault": ""}


def _measure(
    torch: Any, row: harness.Row, shape: Shape, device: str, target: str, rounds: int, makers: dict[str, Maker]
) -> None:
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

    arrays = q, x.k_cache, x.v_cache, x.lens
    options = {"block_table": x.table, "k_format": shape.kv_format, "v_format": shape.kv_format, "out": rows}
    # One for all graphs of the row: each would else keep one of its own for as long as the process lives.
    size = decode.decode_workspace_size(*arrays, **options)
    workspace = torch.zeros(size, dtype=torch.uint8, device=x.device) if size else None

    def ours() -> None:
        decode.flash_decode(*arrays, workspace=workspace, **options)

    ours()
    reference.check(out)
    calls = _agreeing(makers, x, reference, row, device)
    out.fill_(float("nan"))
    harness.measure(row, torch, device, ours, calls, rounds)
    reference.check(out)  # of the last replay


def _agreeing(
    makers: dict[str, Maker], x: Inputs, reference: Reference, row: harness.Row, device: str
) -> dict[str, harness.Call]:
    """The calls of the peers whose results are the reference's; ``row`` says what is wrong with others."""
    calls: dict[str, harness.Call] = {}
    for name, make in makers.items():
        try:
            candidate = make(x)
            reference.check(candidate.output(candidate.call()))
        except Exception as error:  # of whatever kind: it is the row's to tell
            row.peers_failed[name] = harness.failure(error)
            if fault := _fault(x.torch, device):  # the peers after it must not be blamed
                raise RuntimeError(f"{name}: {fault}") from error
        else:
            calls[name] = candidate.call
    return calls


def _fault(torch: Any, device: str) -> str:
    """Why nothing more can be measured, where a fault has stopped the device for this process."""
    if torch is None or device == "cpu":
        return ""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the last shape had
    except Exception as error:
        return f"the device failed: {harness.failure(error)}"
    return ""
