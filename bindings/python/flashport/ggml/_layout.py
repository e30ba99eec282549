"""Facts about tensors as ggml describes them, which the adapters and the traces share: strides, shapes, slopes.

``ne`` counts elements of four axes and ``nb`` the bytes between their neighbours, fastest axis first; the elements of a
quantised row come in blocks, and ``nb[0]`` is then the bytes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Extents = tuple[int, int, int, int]
Strides = tuple[int, int, int, int]

LARGEST_STRIDE = 1 << 62  # also along an axis of one element


def row_bytes(ne: Sequence[int], block_values: int, block_bytes: int) -> int:
    """Bytes of a row along the fastest axis."""
    return ne[0] // block_values * block_bytes


def dense_strides(ne: Sequence[int], block_values: int, block_bytes: int) -> Strides:
    """Those of elements that lie in the order of ne."""
    row = row_bytes(ne, block_values, block_bytes)
    return block_bytes, row, row * ne[1], row * ne[1] * ne[2]


def permuted_strides(ne: Sequence[int], block_values: int, block_bytes: int) -> Strides:
    """Those of a permutation (0, 2, 1, 3), to these extents, of elements that lie in their parent's order."""
    row = row_bytes(ne, block_values, block_bytes)
    return block_bytes, row * ne[2], row, row * ne[1] * ne[2]


def span(ne: Sequence[int], nb: Sequence[int], block_values: int, block_bytes: int) -> int:
    """Bytes from the first element to the end of the last one."""
    if 0 in ne:
        return 0
    steps = sum((extent - 1) * stride for extent, stride in zip(ne[1:], nb[1:], strict=True))
    return row_bytes(ne, block_values, block_bytes) + steps


def strides_fit(ne: Sequence[int], nb: Sequence[int], block_values: int, block_bytes: int, size: int) -> bool:
    """Whether strides lead to whole elements of so many bytes."""
    if 0 in ne:
        return True
    unit = 1 if block_values > 1 else block_bytes
    is_apart = any(stride < 0 or stride % unit or stride > LARGEST_STRIDE for stride in nb)
    return nb[0] == block_bytes and not is_apart and span(ne, nb, block_values, block_bytes) <= size


def slopes(heads: int, max_bias: float) -> list[float]:
    """What ggml multiplies the mask of each head by: 1 without max_bias, else ALiBi's geometric row."""
    if max_bias <= 0:
        return [1.0] * heads
    power = 1 << (heads.bit_length() - 1)
    exponents = [(h + 1) / power if h < power else (2 * (h - power) + 1) / (2 * power) for h in range(heads)]
    return [2.0 ** (-max_bias * exponent) for exponent in exponents]


def misfit(ne: Mapping[str, Extents]) -> tuple[str, str] | None:
    """(role, what its tensor must have) of the first operand that is not one of an attention, or None.

    Roles are q, k, v, and those that there are of k_quant, v_quant, k_first, v_first, mask, mask_quant and sinks.
    """
    q, k, v = ne["q"], ne["k"], ne["v"]
    if 0 in q:
        return "q", "elements"
    pairs = [(f"k{part}", f"v{part}") for part in ("", "_quant", "_first") if f"k{part}" in ne]
    for name, other in pairs:
        keys, values = ne[name], ne[other]
        if keys[0] != q[0]:
            return name, f"ne[0] {q[0]}, as q"
        if values[1:] != keys[1:]:
            return other, f"ne[1:] {list(keys[1:])}, as the keys"
        if keys[2] == 0 or q[2] % keys[2]:
            return name, f"a number of heads ne[2] that divides {q[2]}, that of q"
        if keys[2] != k[2] or values[0] != v[0]:
            return name, "the heads and head dims of the hot part"
        if keys[3] != q[3]:
            return name, f"ne[3] {q[3]}, as q"
    total = sum(ne[name][1] for name, _ in pairs)
    if total == 0 or v[0] == 0:
        return "k", "elements"
    columns = [k[1], ne["k_quant"][1]] if "mask_quant" in ne else [total]
    for role, expected in zip(("mask", "mask_quant"), columns, strict=False):
        mask = ne.get(role)
        if mask is None:
            continue
        if mask[0] != expected or mask[1] < q[1]:
            return role, f"ne [{expected}, at least {q[1]}], keys and padded tokens, in fp16 or fp32"
        if mask[2] not in (1, q[2]) or mask[3] not in (1, q[3]):
            return role, f"1 or {q[2]} heads and 1 or {q[3]} sequences"
    if "sinks" in ne and ne["sinks"] != (q[2], 1, 1, 1):
        return "sinks", f"ne [{q[2]}], the heads of q"
    return None
