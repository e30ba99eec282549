"""What a tensor's values are like, in numbers that two traces can be held against each other by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flashport.trace import _reference

if TYPE_CHECKING:
    from flashport.trace._steps import Step, Tensor


@dataclass(frozen=True)
class Statistics:
    """Statistics of the finite values, and how many are not; NaN where there is no finite value."""

    mean: float
    std: float
    min: float
    max: float
    sum: float
    nan_count: int
    inf_count: int


@_reference.any_values
def statistics(values: np.ndarray[Any, Any]) -> Statistics:
    """Those of an array of any shape, in fp64."""
    wide = np.asarray(values, np.float64)
    finite = wide[np.isfinite(wide)]
    nan, inf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    if finite.size == 0:
        return Statistics(np.nan, np.nan, np.nan, np.nan, 0.0, nan, inf)
    numbers = (float(finite.mean()), float(finite.std()), float(finite.min()), float(finite.max()))
    return Statistics(*numbers, float(finite.sum()), nan, inf)


@dataclass(frozen=True)
class Parting:
    """A tensor of two traces that differs: ``text`` says how."""

    step: int
    layer: int
    role: str
    name: str
    chain: str
    text: str
    differences: _reference.Differences | None


def compared(a: Step, b: Step, tolerance: float) -> list[tuple[Tensor, Parting | None, _reference.Differences | None]]:
    """Each tensor of step ``a`` beside that of ``b``, inputs first, in the order of their chains, the output last."""
    found = []
    pairs, missing = _pairs(a, b)
    for own, other in pairs:
        text, apart = "", None
        if other is None:
            text = "is missing in the second trace"
        elif own.ne != other.ne:
            text = f"has ne {list(own.ne)} and {list(other.ne)}"
        else:
            apart = _reference.differences(own.values(), other.values(), equal_nan=True)
            if not apart.within(tolerance):
                text = f"differs by {apart.max_abs:.3g} (relative {apart.relative:.3g}) at {apart.where}"
        parting = Parting(a.number, a.layer, own.role, own.name, own.chain, text, apart) if text else None
        found.append((own, parting, apart))
    for other in missing:
        text = "is missing in the first trace"
        found.append((other, Parting(b.number, b.layer, other.role, other.name, other.chain, text, None), None))
    return found


def _pairs(a: Step, b: Step) -> tuple[list[tuple[Tensor, Tensor | None]], list[Tensor]]:
    for step in (a, b):
        if step.kind != "output":
            step.decide()
    others = {(tensor.role, tensor.chain): tensor for tensor in b.tensors}
    operands = {tensor.role: (tensor.role, tensor.chain) for tensor in b.tensors if tensor.is_operand}
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for tensor in sorted(a.tensors, key=lambda tensor: tensor.role == "out"):
        key: Any = (tensor.role, tensor.chain)
        if key not in others and tensor.is_operand:  # the same operand with another history
            key = operands.get(tensor.role)
        pairs.append((tensor, others.pop(key, None)))
    return pairs, list(others.values())
