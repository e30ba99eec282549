"""A second writer of traces, on gguf-py alone: files as the trace tools of llama.cpp's forks write them.

Nothing of flashport is used. Caches lie in memory as llama.cpp has them, and a tensor of the file is what those tools
make of it: ne of the view, and the bytes that the view spans. Attention is computed here in fp64 on dequantised values,
queries rounded to q8_0 where keys are quantised, as ggml's CPU kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

T = gguf.GGMLQuantizationType
LONGEST = 63


@dataclass
class Written:
    """What a step has, in the axes (tokens, heads, head dim), keys in the order of the sequence."""

    number: int
    layer: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None
    out: np.ndarray
    k_quant: np.ndarray | None = None
    v_quant: np.ndarray | None = None


@dataclass
class Shape:
    """What to write."""

    head_dim: int = 64
    head_dim_v: int | None = None
    q_heads: int = 8
    kv_heads: int = 2
    hot: int = 48  # tokens of the cache's view, of which a mask hides those that are not there yet
    older: int = 0  # of the quantised part
    kind: T = T.F16
    older_kind: T = T.Q4_0
    layers: int = 1
    calls: int = 5  # tokens that are decoded, each over all layers
    tokens: int = 1  # new tokens of a call
    mask: T | None = T.F16
    padded: int = 64  # rows of the mask
    scheme: str = "names"  # or "sources": src0_..., kqv_out_...
    link: str = "(view) (permuted)"  # of keys and values
    prefix: str = "cache"  # of their names
    hot_first: bool = False  # columns of the mask
    two_masks: bool = False
    counts: bool = True
    chain: bool = False  # all links of keys
    scale: float | None = None
    softcap: float = 0.0
    max_bias: float = 0.0
    seed: int = 0


def encoded(values: np.ndarray, kind: T) -> np.ndarray:
    """Bytes of rows."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == T.F32:
        return values.view(np.uint8)
    if kind == T.F16:
        return values.astype(np.float16).view(np.uint8)
    return np.asarray(gguf.quants.quantize(values, kind)).view(np.uint8)


def decoded(rows: np.ndarray, kind: T) -> np.ndarray:
    """fp32 values of bytes."""
    return np.asarray(gguf.quants.dequantize(np.ascontiguousarray(rows), kind), np.float32)


def slope(head: int, heads: int, max_bias: float) -> float:
    """ALiBi's slope of ggml's softmax."""
    if max_bias <= 0:
        return 1.0
    power = 2 ** int(np.floor(np.log2(heads)))
    if head < power:
        return (2.0 ** (-max_bias / power)) ** (head + 1)
    return (2.0 ** (-(max_bias / 2) / power)) ** (2 * (head - power) + 1)


def attention(shape: Shape, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """(tokens, q heads, head dim of values) in fp64: ggml's operation, one query at a time."""
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    scale = head_dim**-0.5 if shape.scale is None else shape.scale
    out = np.zeros((tokens, heads, v.shape[2]))
    for t in range(tokens):
        for head in range(heads):
            scores = k[:, head // group].astype(np.float64) @ q[t, head].astype(np.float64) * scale
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            if mask is not None:
                scores = scores + slope(head, heads, shape.max_bias) * mask[t]
            weights = np.exp(scores - scores.max())
            out[t, head] = weights / weights.sum() @ v[:, head // group].astype(np.float64)
    return out


@dataclass
class File:
    """Tensors of a file that is to be, and what was written."""

    shape: Shape
    tensors: list[tuple[str, np.ndarray, T]] = field(default_factory=list)
    steps: list[Written] = field(default_factory=list)

    def add(self, name: str, ne: tuple[int, ...], memory: np.ndarray, kind: T) -> None:
        """A tensor with extents ``ne`` and the bytes of ``memory``, whatever their order is."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = np.ascontiguousarray(memory).view(np.uint8).reshape(*ne[:0:-1], ne[0] // block * size)
        self.tensors.append((name[:LONGEST], rows, kind))

    def save(self, path: Path, **metadata: int) -> list[Written]:
        writer = gguf.GGUFWriter(path, "kqv-trace")
        writer.add_string("kqv_trace.description", "KQV output tensors and their inputs")
        counts = {"total_steps": len(self.steps), "target_layer": -1, "tensor_count": len(self.tensors)}
        for key, value in (counts | metadata if self.shape.counts else metadata).items():
            writer.add_int32(f"kqv_trace.{key}", value)
        for name, rows, kind in self.tensors:
            writer.add_tensor(name, rows, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.steps


def make(shape: Shape) -> File:
    """Decodes ``calls`` times over all layers."""
    rng = np.random.default_rng(shape.seed)
    file, dim_v = File(shape), shape.head_dim_v or shape.head_dim
    total = shape.older + shape.hot
    for call in range(shape.calls):
        for layer in range(shape.layers):
            number = len(file.steps) + 1
            q = rng.standard_normal((shape.tokens, shape.q_heads, shape.head_dim)).astype(np.float32)
            memory = {}  # of caches: (tokens, heads, bytes of a row)
            for name, dim in (("k", shape.head_dim), ("v", dim_v)):
                values = rng.standard_normal((total, shape.kv_heads, dim)).astype(np.float32)
                memory[name] = encoded(values[shape.older :], shape.kind)
                memory[f"{name}_quant"] = encoded(values[: shape.older], shape.older_kind) if shape.older else None
            mask = None
            if shape.mask is not None:
                filled = total - shape.calls - shape.tokens + call + 1  # the rest of the view is not there yet
                position = filled + np.arange(shape.tokens)[:, None]
                mask = np.where(np.arange(total) <= position, 0.0, -np.inf)
                if shape.max_bias:
                    mask = mask - np.abs(np.arange(total) - position)
            _add_step(file, number, layer, q, memory, mask)
    return file


def _add_step(file: File, number: int, layer: int, q, memory, mask) -> None:
    shape = file.shape
    kinds = {"k": shape.kind, "v": shape.kind, "k_quant": shape.older_kind, "v_quant": shape.older_kind}
    values = {name: None if rows is None else decoded(rows, kinds[name]) for name, rows in memory.items()}

    def joined(name):
        older = values[f"{name}_quant"]
        return values[name] if older is None else np.concatenate([older, values[name]])

    quantised = any(gguf.GGML_QUANT_SIZES[kinds[name]][0] > 1 for name in ("k", "k_quant") if values[name] is not None)
    rounded = decoded(encoded(q, T.Q8_0), T.Q8_0) if quantised else q
    out = attention(shape, rounded, joined("k"), joined("v"), mask).astype(np.float32)
    written = Written(number, layer, q, values["k"], values["v"], mask, out, values["k_quant"], values["v_quant"])
    file.steps.append(written)

    sources = iter(range(10))

    def add(base, ne, array, kind, is_out=False):
        name = base
        if shape.scheme == "sources":
            name = f"kqv_out_{base}" if is_out else f"src{next(sources)}_{base}"
        file.add(f"{name}_step_{number}", ne, array, kind)

    tokens, heads = q.shape[:2]
    add(f"kqv_out-{layer}", (out.shape[1] * out.shape[2], tokens, 1, 1), out, T.F32, is_out=True)
    add(f"Qcur-{layer} (view) (permuted)", (shape.head_dim, tokens, heads, 1), q, T.F32)

    def add_cache(name, label):
        rows = memory[name]
        n_kv, kv_heads = rows.shape[:2]
        dim = values[name].shape[2]
        base = f"{shape.prefix}_{label}_l{layer}"
        dense = np.ascontiguousarray(rows.transpose(1, 0, 2))
        if shape.chain:
            add(f"{base} (view)", (dim, kv_heads, n_kv, 1), rows, kinds[name])
            add(f"{base} (view) (permuted)", (dim, n_kv, kv_heads, 1), rows, kinds[name])
            add(f"{base} (view) (permuted) (copy)", (dim, n_kv, kv_heads, 1), dense, kinds[name])
            return
        is_dense = not shape.link.endswith("(permuted)")
        add(f"{base} {shape.link}".strip(), (dim, n_kv, kv_heads, 1), dense if is_dense else rows, kinds[name])

    add_cache("k", "k")
    add_cache("v", "v")

    def add_mask(name, columns):
        padded = np.full((shape.padded, columns.shape[1]), -np.inf)
        padded[:tokens] = columns
        add(name, (columns.shape[1], shape.padded, 1, 1), encoded(padded, shape.mask), shape.mask)

    if mask is not None:
        split = shape.older
        if shape.two_masks:
            add_mask("KQ_mask (copy)", mask[:, split:])
        elif shape.hot_first:
            add_mask("KQ_mask (copy)", np.concatenate([mask[:, split:], mask[:, :split]], axis=1))
        else:
            add_mask("KQ_mask (copy)", mask)
    if shape.older:
        add_cache("k_quant", "k_quant")
        add_cache("v_quant", "v_quant")
        if shape.two_masks:
            add_mask("KQ_mask_quant (copy)", mask[:, : shape.older])


def write(path: Path, **options) -> list[Written]:
    """Writes a trace of :class:`Shape` and says what is in it."""
    return make(Shape(**options)).save(path)
