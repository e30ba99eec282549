"""The one exception of malformed and undecidable traces, and the way to the package that knows ggml's types."""

from __future__ import annotations

import math
import numbers
from typing import Any


class TraceError(ValueError):
    """A file that is no trace, is damaged, or does not say what a reader must know; the text names file and place."""


def check_parameters(function: str, scale: float | None, softcap: float, max_bias: float) -> None:
    """Raises TypeError or ValueError, in the name of a function, unless these can be a step's."""
    for name, value in (("scale", scale), ("softcap", softcap), ("max_bias", max_bias)):
        if name == "scale" and value is None:
            continue
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{function}: {name} must be finite, got {value!r}")
        if name != "scale" and value < 0:
            raise ValueError(f"{function}: {name} must be at least 0, got {value!r}")


def gguf_package() -> Any:
    """The ``gguf`` package, which only traces need."""
    try:
        import gguf
    except ImportError as error:
        raise ModuleNotFoundError(
            "flashport.trace: needs the package gguf, which is not installed; pip install 'flashport[trace]'",
            name="gguf",
        ) from error
    return gguf
