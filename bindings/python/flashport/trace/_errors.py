"""The one exception of malformed and undecidable traces, and the way to the package that knows ggml's types."""

from __future__ import annotations

from typing import Any


class TraceError(ValueError):
    """A file that is no trace, is damaged, or does not say what a reader must know; the text names file and place."""


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
