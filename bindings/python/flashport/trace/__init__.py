"""Traces of attention: what went into each call and what came out, in a GGUF file; needs the package ``gguf``.

:func:`load` reads the files of this module and those of the trace tools of llama.cpp's forks, :func:`record` writes
calls of :func:`flashport.attention` and :func:`flashport.flash_decode`, and so does FLASHPORT_TRACE=FILE in the
environment. docs/traces.md shows how ggml's tensors lie in such a file. A file that is damaged or does not say enough
raises :class:`TraceError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashport.trace import _container, _steps
from flashport.trace._errors import TraceError, check_parameters
from flashport.trace._own import Writer
from flashport.trace._record import record
from flashport.trace._steps import Role, Step, Tensor

__all__ = ["Role", "Step", "Tensor", "Trace", "TraceError", "Writer", "load", "record"]


@dataclass(frozen=True)
class Trace:
    """A file's steps, in its order; values are read when they are asked for."""

    path: str
    steps: list[Step]
    metadata: dict[str, object]
    tensor_count: int

    def __len__(self) -> int:
        """How many steps there are."""
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        """The steps."""
        return iter(self.steps)

    def __getitem__(self, place: int) -> Step:
        """A step by its place in the file, from 0."""
        return self.steps[place]

    def select(self, *, layer: int | None = None, step: int | None = None) -> list[Step]:
        """The steps of a layer, or that of a number; all without either."""
        return [
            each
            for each in self.steps
            if (layer is None or each.layer == layer) and (step is None or each.number == step)
        ]


def load(
    path: str | os.PathLike[str],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    max_bias: float = 0.0,
    arrays: Literal["numpy", "torch"] = "numpy",
) -> Trace:
    """Opens a trace. The file is mapped, and a tensor's values are read when they are asked for.

    Files of llama.cpp's tools have no strides: the last link of a tensor's name tells how it lies. Where it does not
    (a view, a name that was cut at 63 characters), every order is tried when the step is first read, the one that
    reproduces kqv_out is taken, and the step's ``notes`` say so; where none or several do, :class:`TraceError` is
    raised.

    Args:
        path: The file.
        scale: What such tools do not store: the factor on scores; default 1 / sqrt(head dim).
        softcap: The same: scores become cap * tanh(score / cap); 0 is off.
        max_bias: The same: ALiBi's, whose slopes multiply the mask; 0 is off.
        arrays: Whether steps give NumPy arrays or tensors of torch.

    Returns:
        A :class:`Trace`, a sequence of :class:`Step`.

    Raises:
        TraceError: The file is damaged or no trace; the text names the place.
        ModuleNotFoundError: The package gguf is missing.
        OSError: The file cannot be opened.
        ValueError: ``scale``, ``softcap`` or ``max_bias`` is not finite, or one of the last two is negative.
        TypeError: One of these three is no number.

    Source:
        bindings/python/flashport/trace/_container.py, bindings/python/flashport/trace/_layout.py (rules of layouts),
        bindings/python/flashport/trace/_decide.py (orders that are tried).
    """
    if arrays not in ("numpy", "torch"):
        raise ValueError(f'trace.load: arrays must be "numpy" or "torch", got {arrays!r}')
    check_parameters("trace.load", scale, softcap, max_bias)
    container = _container.read(path)
    steps = _steps.steps(container)
    for step in steps:
        step.library = arrays
        if not step.is_own:
            step.scale, step.softcap, step.max_bias = scale, softcap, max_bias
    return Trace(container.path, steps, container.metadata, len(container.entries))
