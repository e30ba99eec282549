"""NumPy on the host, or torch on a CPU or GPU, under the names that both libraries share.

The model and the cache use ``xp`` for what NumPy and torch spell alike, and these two classes for what they do not.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from flashport.benchmarks import harness

NUMPY_TYPES = {"fp32": "float32", "fp16": "float16"}
TORCH_TYPES = {**NUMPY_TYPES, "bf16": "bfloat16"}


class Clock:
    """Adds up the seconds of ``with`` blocks on the host."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def seconds(self) -> float:
        """What all blocks have taken."""
        return self._seconds


class _StreamClock:
    """The same of what blocks put on the current stream of a GPU: events, so that no step waits for its attention."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._events: list[Any] = []

    def __enter__(self) -> None:
        self._record()

    def __exit__(self, *_: object) -> None:
        self._record()

    def _record(self) -> None:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> float:
        """What all blocks have taken."""
        self._torch.cuda.synchronize()
        starts, ends = self._events[::2], self._events[1::2]
        return sum(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)) / 1e3


def _independent_rows() -> int:
    """Rows of a product in which each has the same bits wherever it stands.

    OpenBLAS's kernels for AVX2 give 16 rows of some shapes two kinds of sums.
    """
    rng = np.random.default_rng(1)
    for size in (16, 8, 4):
        order = rng.permutation(size)
        for inner, columns in ((64, 96), (64, 384), (172, 64), (512, 1000)):
            weights = rng.standard_normal((inner, columns), np.float32)
            x = rng.standard_normal((size, inner), np.float32)
            if (x @ weights)[order].tobytes() != (x[order] @ weights).tobytes():
                break
        else:
            return size
    return 1


class NumpyArrays:
    """Arrays of the host. The model computes in fp32; queries, keys and values have the type that was asked for."""

    name = "NumPy"

    def __init__(self, fmt: str) -> None:
        self.xp: Any = np
        self.row_tile = _independent_rows()
        self.kv_type = np.dtype(NUMPY_TYPES[fmt])
        self.model_type = np.dtype(np.float32)  # NumPy's products in fp16 are no faster

    def put(self, values: np.ndarray) -> Any:
        """An array of integers or indices."""
        return values

    def weights(self, values: np.ndarray) -> Any:
        """An array of the model's type."""
        return values.astype(self.model_type)

    def cast(self, x: Any, dtype: Any) -> Any:
        """``x`` in another type."""
        return x.astype(dtype, copy=False)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Any:
        """A new array of one value."""
        return np.full(shape, value, dtype)

    def to_host(self, x: Any) -> np.ndarray:
        """As a NumPy array in fp32."""
        return np.ascontiguousarray(x, np.float32)

    def clock(self) -> Clock:
        """A clock for work on this device."""
        return Clock()


class TorchArrays:
    """Tensors of one device. The model computes in the type of queries, keys and values, norms in fp32."""

    name = "torch"

    def __init__(self, torch: Any, device: str, fmt: str) -> None:
        self.xp: Any = torch
        self.row_tile = 16 if device == "cpu" else 64
        self._device = harness.torch_device(device)
        self.kv_type = self.model_type = getattr(torch, TORCH_TYPES[fmt])
        if self._device != "cpu":
            torch.cuda.set_device(self._device)  # whose stream the clock's events are on

    def put(self, values: np.ndarray) -> Any:
        """A tensor of integers or indices."""
        return self.xp.from_numpy(values).to(self._device)

    def weights(self, values: np.ndarray) -> Any:
        """A tensor of the model's type."""
        return self.put(values).to(self.model_type)

    def cast(self, x: Any, dtype: Any) -> Any:
        """``x`` in another type."""
        return x.to(dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: Any) -> Any:
        """A new tensor of one value."""
        return self.xp.full(shape, value, dtype=dtype, device=self._device)

    def to_host(self, x: Any) -> np.ndarray:
        """As a NumPy array in fp32."""
        return x.float().cpu().contiguous().numpy()

    def clock(self) -> Any:
        """A clock for work on this device."""
        return Clock() if self._device == "cpu" else _StreamClock(self.xp)


Arrays = NumpyArrays | TorchArrays
