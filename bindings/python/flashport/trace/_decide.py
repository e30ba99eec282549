"""Layouts that names do not tell: every order that is possible is tried, and the one that reproduces kqv_out taken.

Also what a step's operands have to be to each other, and the mask in the order of the sequence.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from flashport.ggml import _layout as ggml_layout
from flashport.trace import _reference
from flashport.trace._errors import TraceError

if TYPE_CHECKING:
    from flashport.ggml._layout import Strides
    from flashport.trace._steps import Role, Step, Tensor, Values

REPRODUCED = 0.03  # error over the output's largest value that rounding and quantised queries may make
_APART = 4.0  # how many times worse the next order has to be
_TRIED_ROWS = 8


@_reference.any_values
def decide(step: Step) -> None:
    """Settles the strides of every operand and the order of the mask's columns."""
    check_shapes(step)
    open_tensors = [tensor for tensor in step.tensors if tensor.is_operand and len(tensor.candidates) > 1]
    mixed_mask = step.kind == "mixed" and step.find("mask") and not step.find("mask_quant") and not step.is_own
    if not open_tensors and not mixed_mask:
        return
    errors: dict[tuple[Any, ...], float] = {}
    for strides in itertools.product(*(tensor.candidates for tensor in open_tensors)):
        given = {id(tensor): nb for tensor, nb in zip(open_tensors, strides, strict=True)}
        for hot_first in (False, True) if mixed_mask else (False,):
            tried = (*strides, hot_first)
            errors[tried] = _error(step, given, hot_first)
    best, *others = sorted(errors, key=lambda tried: errors[tried])
    if not open_tensors:  # a mask alone: no order is wrong where all of its columns are alike
        step.mask_is_hot_first = errors[best] < REPRODUCED and errors[False,] > max(_APART * errors[best], 1e-3)
        if step.mask_is_hot_first:
            step.notes.append("the mask has the columns of the hot keys first, which reproduces kqv_out")
        return
    # Another order of the mask's columns is no other layout.
    rivals = [errors[tried] for tried in others if tried[:-1] != best[:-1]]
    names = ", ".join(f"{tensor.role} {tensor.name!r}" for tensor in open_tensors)
    where = f"{step.path}: step {step.number}: the names do not tell in which order the bytes lie of {names}"
    if not errors[best] < REPRODUCED:
        raise TraceError(
            f"{where}; no order reproduces kqv_out, the best one has a relative error of {errors[best]:.3g}"
        )
    if rivals and rivals[0] < max(_APART * errors[best], 1e-3):
        raise TraceError(
            f"{where}; several orders reproduce kqv_out, with relative errors of {errors[best]:.3g} and {rivals[0]:.3g}"
        )
    for tensor, nb in zip(open_tensors, best[:-1], strict=True):
        order = "as ne has them" if nb == tensor.candidates[0] else "in the order of its parent"
        step.notes.append(
            f"{tensor.role} {tensor.name!r}: the name does not tell the order; bytes {order} reproduce kqv_out "
            f"(relative error {errors[best]:.2g}, the other orders from {min(rivals):.2g})"
        )
        tensor.candidates = [nb]
    step.mask_is_hot_first = bool(best[-1])


def check_shapes(step: Step) -> None:
    """Raises TraceError unless the operands are those of one attention."""
    roles: tuple[Role, ...] = (
        "q", "k", "v", "k_quant", "v_quant", "k_first", "v_first", "mask", "mask_quant", "sinks",
    )  # fmt: skip
    tensors = {role: tensor for role in roles if (tensor := step.find(role)) is not None}
    q, _, v = (step.need(role) for role in roles[:3])
    for _, values in step.parts:
        step.need(values)

    def fail(tensor: Tensor, expected: str) -> None:
        raise TraceError(
            f"{step.path}: step {step.number}: {tensor.role} {tensor.name!r} must have {expected}, "
            f"got ne {list(tensor.ne)}"
        )

    found = ggml_layout.misfit({role: tensor.ne for role, tensor in tensors.items()})
    if found is not None:
        fail(step.need(found[0]), found[1])  # type: ignore[arg-type]
    for mask in (tensors.get("mask"), tensors.get("mask_quant")):
        if mask is not None and mask.type not in ("F16", "F32"):
            fail(mask, f"fp16 or fp32 values and no {mask.type}")
    kept = step.find("kept")
    keys = sum(step.need(part[0]).ne[1] for part in step.parts)
    if kept is not None and (kept.ne != (keys, *q.ne[1:]) or kept.type != "I8"):
        fail(kept, f"int8 values, ne {[keys, *q.ne[1:]]} as keys and queries have it")
    out = step.need("out")
    if out.is_quantised or np.prod(out.ne, dtype=object) != v.ne[0] * q.ne[1] * q.ne[2] * q.ne[3]:
        fail(out, f"{v.ne[0]} x {q.ne[2]} heads x {q.ne[1]} tokens x {q.ne[3]} sequences")


@_reference.any_values
def output(step: Step) -> Values:
    """The recorded output as Step.out has it."""
    check_shapes(step)
    q, v, out = step.need("q"), step.need("v"), step.need("out")
    values: Values = out.values().astype(np.float32).reshape(q.ne[3], q.ne[1], q.ne[2], v.ne[0])
    return values


@_reference.any_values
def mask(step: Step) -> Values | None:
    """The mask as Step.mask has it."""
    step.decide()
    return _mask(step, step.mask_is_hot_first)


def _mask(step: Step, hot_first: bool) -> Values | None:
    tensor, other = step.find("mask"), step.find("mask_quant")
    if tensor is None:
        return None
    tokens, hot = step.need("q").ne[1], step.need("k").ne[1]
    values: Values = tensor.values()[:, :, :tokens].astype(np.float32)
    if other is not None:
        return np.concatenate([other.values()[:, :, :tokens].astype(np.float32), values], axis=-1)
    return np.concatenate([values[..., hot:], values[..., :hot]], axis=-1) if hot_first else values


def _error(step: Step, given: dict[int, Strides], hot_first: bool) -> float:
    """The error of the reference with these strides, over the output's largest value, on some rows."""

    def operand(role: Any) -> Values | None:
        tensor = step.find(role)
        return None if tensor is None else tensor.values(given.get(id(tensor))).transpose(0, 2, 1, 3)

    k, v = ([operand(part[side]) for part in step.parts] for side in (0, 1))
    q = operand("q")
    assert q is not None
    rows = np.unique(np.linspace(0, q.shape[1] - 1, _TRIED_ROWS).astype(int))
    own_mask = _mask(step, hot_first)
    found = _reference.attend(
        q[:, rows],
        _reference.joined(k),
        _reference.joined(v),
        None if own_mask is None else own_mask[:, :, rows],
        step,
    )
    recorded = output(step)[:, rows].astype(np.float64)
    error = _reference.differences(recorded, found)
    return error.relative if np.isfinite(error.relative) else np.inf
