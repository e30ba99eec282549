"""The benchmark harness: a case's candidates, ours and peers, beside the plain read of equal bytes.

All candidates of a case run in one process in interleaved rounds; a ratio is one of medians. On a GPU each candidate is
a captured graph of several calls, so neither host time nor launches are in the figures (this needs torch). On the CPU,
and on a GPU without torch, calls are timed by the host clock. The cases are those of ``attention``, ``decode`` and
``gated_delta``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashport import _core, _quantize, devices
from flashport.testing import numerics

Call = Callable[[], object]
_HOST_BYTES = 16e6  # host time is measured of cases below
_CLOCK_SECONDS = 0.05  # of calls that one reading of the host's clock takes together


@dataclass
class Row:
    """Figures of one case. Times are medians in seconds; None where there is no such candidate."""

    name: str
    title: str
    bytes: int
    kernel: str = ""
    seconds: float | None = None
    read_seconds: float | None = None
    peers: dict[str, float] = dataclasses.field(default_factory=dict)
    peers_failed: dict[str, str] = dataclasses.field(default_factory=dict)  # installed, and why there is no figure
    host_seconds: float | None = None
    skipped: str = ""
    flops: float = 0.0  # of what is bound by products; 0: it is bound by the bytes

    @property
    def ratio(self) -> float | None:
        """Our time over the best peer's."""
        return self.seconds / min(self.peers.values()) if self.peers and self.seconds else None

    @property
    def share(self) -> float | None:
        """Of the plain read's rate."""
        return self.read_seconds / self.seconds if self.read_seconds and self.seconds else None


def environment(device: str) -> dict[str, Any]:
    """What a reader needs to place the figures."""
    found = {
        "flashport": devices.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    torch = find_torch(device)
    if torch is not None:
        found["torch"] = torch.__version__
        if device != "cpu":
            found["cuda"] = torch.version.cuda or torch.version.hip
            found["cudnn"] = torch.backends.cudnn.version()
        else:
            found["threads"] = torch.get_num_threads()
    for peer in ("triton", "fla-core", "sglang", "flashinfer-python", "flash-attn"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[peer] = importlib.metadata.version(peer)
    return found


def too_large(count: int) -> str:
    """Why a case of so many bytes is skipped."""
    return f"{count / 1e6:.0f} MB is too large for this device's run"


def on(values: np.ndarray, device: str) -> Any:
    """A copy on a device, without torch."""
    array = _core.DeviceArray(values.shape, values.dtype.name, device)
    array.copy_from(values)
    return array


def find_torch(device: str) -> Any:
    """torch, where it is installed and sees the device."""
    try:
        import torch
    except ImportError:
        return None
    return torch if device == "cpu" or torch.cuda.is_available() else None


def torch_device(device: str) -> str:
    """torch's name of a device."""
    return device.replace("hip", "cuda")  # of AMD GPUs, too


def random_tensor(torch: Any, shape: tuple[int, ...], fmt: str, where: str) -> Any:
    """Normally distributed values in an element format."""
    if fmt == "q8_0":
        blocks = shape[-1] // numerics.BLOCK_VALUES
        quants = torch.randint(-127, 128, (*shape[:-1], blocks, numerics.BLOCK_VALUES), dtype=torch.int8, device=where)
        scale = torch.full((*shape[:-1], blocks, 1), 0.02, dtype=torch.float16, device=where)
        return torch.cat([scale.view(torch.uint8), quants.view(torch.uint8)], dim=-1).reshape(*shape[:-1], -1)
    if fmt in _core.kv_format_blocks() and _core.kv_format_blocks()[fmt][0] > 1:
        values = torch.randn(shape[1:], device=where)  # of one page, for all of them
        rows = _quantize.quantize_kv(values, fmt)
        return rows.expand(shape[0], *rows.shape).contiguous()
    types = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
    cache = torch.empty(shape, dtype=types[fmt], device=where)
    for part in torch.split(cache, max(1, 2**27 // math.prod(shape[1:]))):  # no fp32 copy of the whole
        part.copy_(torch.randn(part.shape, device=where))
    return cache


def run_in_torch(
    row: Row,
    operation: str,
    query: dict[str, Any],
    where: tuple[str, str, int],
    size: int,
    largest: float,
    why_torch: str,
    candidates: Callable[[Any], tuple[Call, dict[str, Call]]],
) -> None:
    """Fills the row of a case whose ``candidates``, ours and peers, need torch; else says why it is skipped.

    ``where`` is the device, its target and the rounds; ``size`` is held against ``largest``, both in bytes.
    """
    device, target, rounds = where
    torch = find_torch(device)
    support = devices.supports(operation, target=target, **query)
    if not support:
        row.skipped = support.reason
    elif size > largest:
        row.skipped = too_large(size)
    elif not torch:
        row.skipped = f"needs torch, {why_torch}"
    if row.skipped:
        return
    row.kernel = devices.which_kernel(operation, target=target, **query)
    measure(row, torch, device, *candidates(torch), rounds, read=False)


def measure(
    row: Row, torch: Any, device: str, ours: Call, peers: dict[str, Call], rounds: int, read: bool = True
) -> None:
    """Interleaved rounds of our call, the peers, and with ``read`` the plain read of as many bytes; our host time."""
    timers = {"ours": timer(torch, device, ours)}
    for name, call in peers.items():
        try:
            timers[name] = timer(torch, device, call)
        except Exception as error:  # whatever comes of a peer, ours is measured
            row.peers_failed[name] = failure(error)
    if read:
        with contextlib.suppress(NotImplementedError):
            timers["read"] = timer(torch, device, _read(torch, device, row.bytes // 4))
    medians = {name: statistics.median(values) for name, values in interleaved(timers, rounds).items()}
    row.seconds = medians.pop("ours")
    row.read_seconds = medians.pop("read", None)
    row.peers = medians
    if row.bytes < _HOST_BYTES and device != "cpu":
        row.host_seconds = host_seconds(ours, device)


def interleaved(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each timer says in each round."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, one in timers.items():
            samples[name].append(one())
    return samples


def failure(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _read(torch: Any, device: str, words: int) -> Call:
    """A plain read of a buffer; NotImplementedError where the target has no such kernel."""
    if torch:
        buffer = torch.zeros(words, dtype=torch.int32, device=torch_device(device))
    else:
        buffer = _core.DeviceArray((words,), "int32", device)
        buffer.fill_zero()
    _core.read_memory(buffer)
    return lambda: _core.read_memory(buffer)


def timer(torch: Any, device: str, call: Call) -> Callable[[], float]:
    """What times one call, by graph replay on a GPU with torch, else by the host's clock."""
    return _graph_timer(torch, call) if torch and device != "cpu" else _clock_timer(call, device)


def _clock_timer(call: Call, device: str) -> Callable[[], float]:
    def reading() -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        _core.synchronize(device)
        return (time.perf_counter() - start) / count

    count = 2
    reading()
    count = max(1, min(200, round(_CLOCK_SECONDS / reading())))
    return reading


def _graph_timer(torch: Any, call: Call) -> Callable[[], float]:
    """A captured graph of as many calls as make a millisecond, at most 200, timed by events around its replay.

    A short graph says how many: outside of one, a call with much host time would get few, and the start of the graph
    would show in its figure.
    """
    torch.cuda.synchronize()  # the inputs were made on another stream
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def capture(count: int) -> Any:
        with torch.cuda.stream(stream):
            call()  # a graph keeps the workspace that it captures, and only calls outside make another one ready
            stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(count):
                call()
        replay(graph)
        return graph

    def replay(graph: Any) -> float:
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return start.elapsed_time(end)

    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    few = 3
    count = max(1, min(200, math.ceil(few / max(replay(capture(few)), 1e-3))))
    graph = capture(count)
    return lambda: replay(graph) / 1e3 / count


def host_seconds(call: Call, device: str, count: int = 200) -> float:
    """Host time of one asynchronous call: the mean of ``count``, the best of five."""
    found = []
    for _ in range(5):
        _core.synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count)
    _core.synchronize(device)
    return min(found)


def plot(rows: list[Row], title: str, path: str) -> None:
    """Draws every candidate's share of the plain read's rate as bars; needs matplotlib."""
    from matplotlib.figure import Figure  # no display, no global state

    shown = [row for row in rows if row.seconds and row.read_seconds]
    names = ["flashport", *dict.fromkeys(name for row in shown for name in row.peers)]
    figure = Figure(figsize=(11, 0.55 * len(shown) * max(1, len(names) / 2) + 1.6), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        times = [row.seconds if name == "flashport" else row.peers.get(name) for row in shown]
        shares = [100 * row.read_seconds / value if value else 0 for row, value in zip(shown, times, strict=True)]
        bars = axes.barh([y + i * height for y in range(len(shown))], shares, height, label=name)
        axes.bar_label(bars, [f"{share:.0f}" if share else "" for share in shares], padding=2, fontsize=8)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(shown))], [row.title for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(100, color="gray", linewidth=1, linestyle=":")
    axes.set_xlabel("rate of key, value and state bytes, in % of a plain read of as many bytes")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
