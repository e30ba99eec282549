"""Our own files: what llama.cpp's tools write and list, and beside it in metadata what these leave out.

    flashport.trace.version                1
    flashport.trace.tensor.role, .step     of each tensor: "q", "k", ..., and the place of its step
    flashport.trace.tensor.nb              of each tensor four byte strides, as ggml's nb
    flashport.trace.step.layer, .operation, .options, .scale, .softcap, .max_bias, .dropout_p    of each step

Tensors have ne in the order that ggml's attention takes and the bytes of their parent, as a permuted view has them, and
names that say so: whoever goes by names reads them right, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from flashport.trace import _layout
from flashport.trace._errors import TraceError, check_parameters, gguf_package
from flashport.trace._steps import Role, Step, Tensor, check_counts

if TYPE_CHECKING:
    from types import TracebackType

    from flashport.trace._container import Container, Entry

    Values = np.ndarray[Any, Any]

_VERSION = 1
_NAMES: dict[Role, str] = {
    "out": "kqv_out-{layer}_step_{step}",
    "q": "Qcur-{layer} (view) (permuted)_step_{step}",
    "k": "cache_k_l{layer} (view) (permuted)_step_{step}",
    "v": "cache_v_l{layer} (view) (permuted)_step_{step}",
    "mask": "KQ_mask (copy)_step_{step}",
    "k_quant": "cache_k_quant_l{layer} (view) (permuted)_step_{step}",
    "v_quant": "cache_v_quant_l{layer} (view) (permuted)_step_{step}",
    "k_first": "cache_k_first_l{layer} (view) (permuted)_step_{step}",
    "v_first": "cache_v_first_l{layer} (view) (permuted)_step_{step}",
    "sinks": "attn_sinks-{layer}_step_{step}",
    "kept": "attn_dropout-{layer}_step_{step}",
}


class Writer:
    """Writes a trace; a context manager. Tensors wait in a temporary file, and ``close`` makes the trace of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens no file yet, but finds out whether there is a folder to write it to.

        Args:
            path: The file to write; one of that name is replaced.

        Raises:
            ModuleNotFoundError: The package gguf is missing.
            FileNotFoundError: The folder is missing.
        """
        self._gguf = gguf_package()
        self.path = Path(path)
        folder = self.path.absolute().parent
        if not folder.is_dir():
            raise FileNotFoundError(f"trace.Writer: path must be in a folder that exists, got {os.fspath(path)!r}")
        self.steps = 0
        self._partial = folder / f".{self.path.name}.{os.getpid()}"
        self._writer = self._gguf.GGUFWriter(self._partial, "flashport-trace", use_temp_file=True)
        self._tensors: dict[str, list[Any]] = {"role": [], "step": [], "nb": []}
        self._steps: dict[str, list[Any]] = {
            name: [] for name in ("layer", "operation", "options", "scale", "softcap", "max_bias", "dropout_p")
        }
        self._is_open = True

    def add(
        self,
        q: Values,
        k: Values,
        v: Values,
        out: Values,
        *,
        mask: Values | None = None,
        k_quant: Values | None = None,
        v_quant: Values | None = None,
        k_first: Values | None = None,
        v_first: Values | None = None,
        sinks: Values | None = None,
        kept: Values | None = None,
        types: dict[str, str] | None = None,
        layer: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        max_bias: float = 0.0,
        dropout_p: float = 0.0,
        operation: str = "",
        options: str = "",
    ) -> int:
        """Adds a step.

        Args:
            q: (batch, tokens, heads, head dim).
            k: (batch, keys, key-value heads, head dim), in a mixed step the hot part.
            v: As ``k``.
            out: (batch, tokens, heads, head dim of values).
            mask: (batch or 1, heads or 1, tokens, keys) fp16 or fp32, added to scores, in the order of the sequence.
            k_quant, v_quant: The older keys and values of a mixed step.
            k_first, v_first: Those before them.
            sinks: (heads) fp32.
            kept: (batch, heads, tokens, keys) int8, with ``dropout_p``: 1 where the dropout kept a weight, else 0.
            types: ggml's type ("BF16", "Q8_0", "Q4_0") of an operand whose array has only its bits: uint16 for BF16,
                and uint8 for blocks, with the bytes of a row in place of the head dim.
            layer, scale, softcap, max_bias, dropout_p: As :class:`Step` has them; no scale is 1 / sqrt(head dim).
            operation, options: What was called, for the reader.

        Returns:
            The number of the step.

        Raises:
            ValueError: The trace is closed, operands do not fit each other, ``scale``, ``softcap`` or ``max_bias`` is
                not finite, or one of the last two is negative.
            TypeError: One of these three is no number.
        """
        if not self._is_open:
            raise ValueError(f"trace.Writer.add: {os.fspath(self.path)!r} is closed")
        check_parameters("trace.Writer.add", scale, softcap, max_bias)
        operands: dict[Role, Values | None] = {
            "out": np.asarray(out, np.float32), "q": q, "k": k, "v": v, "mask": mask, "k_quant": k_quant,
            "v_quant": v_quant, "k_first": k_first, "v_first": v_first, "sinks": sinks, "kept": kept,
        }  # fmt: skip
        for role, array in operands.items():
            axes = 1 if role == "sinks" else 4
            if array is not None and array.ndim != axes:
                raise ValueError(
                    f"trace.Writer.add: {role} must have {axes} dimensions, got {array.ndim}: {array.shape}"
                )
        for name, kind in (types or {}).items():
            if name not in operands or kind not in self._gguf.GGMLQuantizationType.__members__:
                raise ValueError(f"trace.Writer.add: types must name operands and ggml's types, got {name!r}: {kind!r}")
        if out.shape[:3] != q.shape[:3] or k.shape[:3] != v.shape[:3]:
            raise ValueError(
                "trace.Writer.add: out must have the batch, tokens and heads of q, and v those of k, got out "
                f"{out.shape}, q {q.shape}, k {k.shape} and v {v.shape}"
            )
        keys = sum(x.shape[1] for x in (k, k_quant, k_first) if x is not None)
        weights = (q.shape[0], q.shape[2], q.shape[1], keys)
        if kept is not None and kept.shape != weights:
            raise ValueError(
                f"trace.Writer.add: kept must be (batch, heads, tokens, keys) = {weights}, got {kept.shape}"
            )
        if (kept is None) == (dropout_p > 0):
            raise ValueError("trace.Writer.add: kept and dropout_p must come together")
        self.steps += 1
        for role, array in operands.items():
            if array is not None:
                self._add(role, array, (types or {}).get(role), layer)
        row = {
            "layer": layer, "operation": operation, "options": options, "softcap": float(softcap),
            "max_bias": float(max_bias), "dropout_p": float(dropout_p),
            "scale": float(q.shape[-1] ** -0.5 if scale is None else scale),
        }  # fmt: skip
        for name, value in row.items():
            self._steps[name].append(value)
        return self.steps

    def _add(self, role: Role, array: Values, kind: str | None, layer: int) -> None:
        array = np.ascontiguousarray(array)
        name = _NAMES[role].format(layer=layer, step=self.steps)
        raw = None if kind is None else self._gguf.GGMLQuantizationType[kind]
        shape = array.shape
        row = array.strides[-2] if array.ndim > 1 else array.nbytes
        unit = array.itemsize if raw is None else self._gguf.GGML_QUANT_SIZES[raw][1]
        if role == "sinks":
            shape = (1, 1, 1, len(array))
            nb = [unit, row, row, row]
        elif role in ("mask", "kept"):
            nb = [unit, row, row * shape[2], row * shape[1] * shape[2]]
        elif role == "out":  # heads and head dim in one row, as the tools have it
            shape = (1, 1, shape[0] * shape[1], shape[2] * shape[3])
            row *= array.shape[2]
            nb = [unit, row, row * shape[2], row * shape[2]]
        else:  # (batch, tokens, heads, row) in memory, (batch, heads, tokens, row) by ne
            shape = (shape[0], shape[2], shape[1], shape[3])
            nb = [unit, row * shape[1], row, row * shape[1] * shape[2]]
        self._writer.add_tensor(name, array, raw_shape=shape, raw_dtype=raw)
        self._tensors["role"].append(role)
        self._tensors["step"].append(self.steps)
        self._tensors["nb"] += nb

    def close(self) -> None:
        """Writes the file; one without steps is not written."""
        if not self._is_open:
            return
        self._is_open = False
        if self.steps == 0:
            return
        kinds = self._gguf.GGUFValueType
        self._writer.add_string("kqv_trace.description", "calls of flashport")
        for key, value in (
            ("total_steps", self.steps),
            ("target_layer", -1),
            ("tensor_count", len(self._tensors["role"])),
        ):
            self._writer.add_int32(f"kqv_trace.{key}", value)
        self._writer.add_uint32("flashport.trace.version", _VERSION)
        types = {"nb": kinds.UINT64, "step": kinds.INT32, "layer": kinds.INT32}
        for group, columns in (("tensor", self._tensors), ("step", self._steps)):
            for name, values in columns.items():
                default = kinds.STRING if isinstance(values[0], str) else kinds.FLOAT64
                kind = types.get(name, default)
                self._writer.add_key_value(f"flashport.trace.{group}.{name}", values, kinds.ARRAY, sub_type=kind)
        try:
            self._writer.write_header_to_file()
            self._writer.write_kv_data_to_file()
            self._writer.write_tensors_to_file()
            self._writer.close()
            self._partial.replace(self.path)
        finally:
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Writer:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it, also after an error: the steps before it are what one wants to see."""
        self.close()


def steps(container: Container) -> list[Step]:
    """The steps of a file that Writer made, with all that its metadata says held against the tensors."""
    path, tensors = container.path, len(container.entries)
    version = container.metadata["flashport.trace.version"]
    if version != _VERSION:
        raise TraceError(f"{path}: flashport.trace.version is {version!r}, expected {_VERSION}")
    roles = _column(container, "tensor.role", str, tensors)
    numbers = _column(container, "tensor.step", int, tensors)
    nb = _column(container, "tensor.nb", int, 4 * tensors)
    total = max(numbers, default=0)
    if total > tensors or sorted(set(numbers)) != list(range(1, total + 1)):
        raise TraceError(f"{path}: flashport.trace.tensor.step must have every number from 1 on, got up to {total}")
    check_counts(container, total)
    found: list[list[Tensor]] = [[] for _ in range(total)]
    for i, entry in enumerate(container.entries):
        found[numbers[i] - 1].append(_tensor(path, entry, roles[i], nb[4 * i : 4 * i + 4]))
    texts = {name: _column(container, f"step.{name}", str, total) for name in ("operation", "options")}
    floats = {name: _column(container, f"step.{name}", float, total) for name in ("scale", "softcap", "max_bias")}
    for name in ("softcap", "max_bias"):
        if min(floats[name], default=0) < 0:
            raise TraceError(f"{path}: flashport.trace.step.{name} must be at least 0, got {floats[name][:8]}")
    layers = _column(container, "step.layer", int, total)
    dropped = [0.0] * total  # of files from before it
    if "flashport.trace.step.dropout_p" in container.metadata:
        dropped = _column(container, "step.dropout_p", float, total)
    made = []
    for i, own in enumerate(found):
        operands = [tensor.role for tensor in own]
        if len(set(operands)) != len(operands) or not {"out", "q", "k", "v"} <= set(operands):
            raise TraceError(f"{path}: step {i + 1} has the operands {operands}, expected out, q, k, v, each once")
        made.append(
            Step(
                path, i + 1, layers[i], own, texts["operation"][i], floats["scale"][i], floats["softcap"][i],
                floats["max_bias"][i], is_own=True, options=texts["options"][i], dropout_p=dropped[i],
            )
        )  # fmt: skip
        _check_dropout(made[-1])
    return made


def _check_dropout(step: Step) -> None:
    kept = step.find("kept")
    if (kept is None) == (step.dropout_p > 0) or not 0 <= step.dropout_p < 1:
        has = "no" if kept is None else "a"
        raise TraceError(f"{step.path}: step {step.number} has the dropout_p {step.dropout_p} and {has} kept")


def _column(container: Container, name: str, kind: type, count: int) -> list[Any]:
    key = f"flashport.trace.{name}"
    values = container.metadata.get(key)
    if not isinstance(values, list) or len(values) != count or not all(type(value) is kind for value in values):
        got = f"{len(values)} values" if isinstance(values, list) else repr(values)[:80]
        raise TraceError(f"{container.path}: {key} must be {count} values of type {kind.__name__}, got {got}")
    if kind is float and not np.isfinite(values).all():
        raise TraceError(f"{container.path}: {key} must be finite, got {values[:8]}")
    return values


def _tensor(path: str, entry: Entry, role: str, nb: Sequence[int]) -> Tensor:
    if role not in get_args(Role):
        raise TraceError(f"{path}: tensor {entry.name!r} has the unknown role {role!r}")
    strides = (nb[0], nb[1], nb[2], nb[3])
    _layout.check_strides(path, entry, strides)
    return Tensor(role, entry.name, entry, [strides])  # type: ignore[arg-type]
