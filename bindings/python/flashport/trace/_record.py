"""Recording of real calls: the functions below get another body while somebody records.

A function of the package whose code object is not the one it was made with runs in Python (bindings/python/
direct_calls.cpp), so that recording costs nothing while it is off: nothing is looked at in a call.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from flashport import _attention, _core, _mixed, decode
from flashport.torch import tracing
from flashport.trace._gather import NotRecordedError, sequences
from flashport.trace._own import Writer


def _recording_body(name: str, signature: inspect.Signature) -> CodeType:
    """The code of a function that hands its arguments to :func:`run`.

    It has the parameters of the function whose body it becomes: torch's compiler remembers those of a function.
    """
    parameters = list(signature.parameters.values())
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    arguments = ", ".join(f"{one!r}: {one}" for one in positional + keywords)
    text = (
        f"def recorded_{name}({', '.join([*positional, '*', *keywords])}):\n"
        "    from flashport.trace import _record\n"
        f"    return _record.run({name!r}, {{{arguments}}})\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(text, __file__, "exec"), namespace)
    code: CodeType = namespace[f"recorded_{name}"].__code__
    return code


class _Recorded:
    """A function of the package, and a copy of it that calls still reach while it has another body."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.code: CodeType = function.__code__
        self.body = _recording_body(function.__name__, inspect.signature(function))
        self.original = FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__)
        self.original.__kwdefaults__ = function.__kwdefaults__


_functions = {
    "attention": _Recorded(_attention.attention),
    "flash_decode": _Recorded(decode.flash_decode),
    "flash_decode_segments": _Recorded(_mixed.flash_decode_segments),
    "flash_decode_mixed": _Recorded(_mixed.flash_decode_mixed),
}
_lock = threading.RLock()
_recorders: list[_Recorder] = []


class _Recorder:
    """Where calls go, and which layer the next one is of."""

    def __init__(self, path: str | os.PathLike[str], layers: int) -> None:
        self.writer, self.layers, self.calls = Writer(path), layers, 0

    def add(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            self.writer.add(**step, layer=self.calls % self.layers)
        self.calls += 1


def _start(path: str | os.PathLike[str], layers: int) -> _Recorder:
    if type(layers) is not int or layers < 1:
        raise ValueError(f"trace.record: layers must be a positive int, got {layers!r}")
    recorder = _Recorder(path, layers)
    with _lock:
        _recorders.append(recorder)
        for each in _functions.values():
            each.function.__code__ = each.body
    return recorder


def _stop(recorder: _Recorder) -> None:
    with _lock:
        _recorders.remove(recorder)
        if not _recorders:
            for each in _functions.values():
                each.function.__code__ = each.code
    recorder.writer.close()
    if recorder.writer.steps == 0:
        warnings.warn(f"trace.record: no call was recorded, {recorder.writer.path} is not written", stacklevel=3)


@contextmanager
def record(path: str | os.PathLike[str], *, layers: int = 1) -> Iterator[Writer]:
    """Writes the calls that the process makes in this context into a trace.

    They are those of ``attention``, ``flash_decode``, ``flash_decode_segments`` and ``flash_decode_mixed``, also by
    other functions of the package. A call of several sequences makes a step of each. Arrays of GPUs are copied to the
    host, which waits for them. Calls inside of a graph that torch.compile made or that is being captured are not
    recorded: a warning says so.

    Args:
        path: The file to write, in a folder that exists; it is written when the context ends, unless no call was
            recorded.
        layers: How many layers of a model call in turn: the layer of a step is the number of its call modulo this.

    Yields:
        The :class:`Writer`, which takes more steps by ``add``.

    Raises:
        ValueError: ``layers`` is no positive int.
        ModuleNotFoundError: The package gguf is missing.
        FileNotFoundError: The folder is missing.

    Source:
        bindings/python/flashport/trace/_record.py, bindings/python/flashport/trace/_gather.py (what becomes of a call).
    """
    recorder = _start(path, layers)
    try:
        yield recorder.writer
    finally:
        _stop(recorder)


def start_from_environment() -> None:
    """Records until the program ends, as FLASHPORT_TRACE and FLASHPORT_TRACE_LAYERS say."""
    layers = os.environ.get("FLASHPORT_TRACE_LAYERS", "1")
    if not layers.isdecimal() or int(layers) < 1:
        raise ValueError(f"FLASHPORT_TRACE_LAYERS must be a positive number, got {layers!r}")
    recorder = _start(os.environ["FLASHPORT_TRACE"], int(layers))
    atexit.register(_stop, recorder)


def run(name: str, arguments: dict[str, Any]) -> Any:
    """The call itself, and then its trace."""
    result = _functions[name].original(**arguments)
    if tracing.is_compiling():
        return result
    try:
        _await(arguments)
        steps = list(sequences(name, arguments, result))
        with _lock:
            for recorder in _recorders:
                recorder.add(steps)
    except Exception as error:  # a program that is looked at goes on
        kind = "" if isinstance(error, NotRecordedError) else f"{type(error).__name__}: "
        warnings.warn(f"trace.record: a call of {name} is not recorded: {kind}{error}", RuntimeWarning, stacklevel=3)
    return result


def _await(arguments: dict[str, Any]) -> None:
    """Waits for a call on a GPU."""
    torch = sys.modules.get("torch")
    is_gpu = torch is not None and isinstance(arguments["q"], torch.Tensor) and arguments["q"].is_cuda
    if torch is not None and is_gpu and torch.cuda.is_current_stream_capturing():
        raise NotRecordedError("a graph is being captured")
    stream: Any = arguments.get("stream")
    if stream is None:
        return
    kind, index = arguments["q"].__dlpack_device__()
    if kind in (2, 10):  # CUDA's and ROCm's
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        if hasattr(stream, "__cuda_stream__"):
            handle = stream.__cuda_stream__()[1]
        _core.synchronize(f"{'cuda' if kind == 2 else 'hip'}:{index}", int(handle))
