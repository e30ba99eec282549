"""The fp64 reference of a step, and how far a result is from it.

One softmax over quantised and hot keys, in the order of the sequence. ggml's mask is added to the scores after scale
and softcap, times the head's slope where max_bias gives one. The sums are those of flashport.testing's oracle, which
shares no code with the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from flashport.ggml._layout import slopes
from flashport.testing import attention_oracle, numerics

if TYPE_CHECKING:
    from flashport.trace._steps import Step

Values = np.ndarray[Any, Any]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def any_values(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function without warnings of arithmetic: the bits of a trace may be any."""

    @functools.wraps(function)
    def quiet(*args: _P.args, **options: _P.kwargs) -> _R:
        with np.errstate(all="ignore"):
            return function(*args, **options)

    return quiet


# Relative error of a trace whose keys and values are not quantised: fp32 queries as ggml has them, and own calls, whose
# output has the queries' type.
_TOLERANCES = {"F16": 4e-3, "BF16": 3e-2}
STANDARD_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Differences:
    """Errors of a result against another: all are 0 (the cosine 1) where they are equal, NaN where one of them is."""

    max_abs: float
    relative: float  # max_abs over the largest absolute value of the other
    cosine: float
    sum: float  # sum of the result less that of the other
    where: tuple[int, ...]  # of the largest difference

    def within(self, tolerance: float) -> bool:
        """Whether the relative error is at most this; not where anything is NaN."""
        return self.relative <= tolerance


@any_values
def differences(result: Values, other: Values, equal_nan: bool = False) -> Differences:
    """Those of arrays of one shape; equal infinities, and if asked for NaN in both, are no difference."""
    a, b = (np.asarray(x, np.float64) for x in (result, other))
    if a.size == 0:
        return Differences(0.0, 0.0, 1.0, 0.0, ())
    equal = (a == b) | (np.isnan(a) & np.isnan(b)) if equal_nan else a == b
    apart = np.where(equal, 0.0, np.abs(a - b))
    place = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    largest, height = float(apart.flat[place]), float(np.abs(b).max(initial=0, where=np.isfinite(b)))
    relative = 0.0 if largest == 0 else largest / height if height > 0 else np.inf
    kept = ~equal | np.isfinite(a)
    a, b = a[kept], b[kept]
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float((a * b).sum()) / lengths if lengths > 0 else float(largest == 0)
    total = float(a.sum() - b.sum())
    return Differences(largest, relative, cosine, total, tuple(int(i) for i in np.unravel_index(place, apart.shape)))


@any_values
def by_head(result: Values, other: Values) -> Values:
    """[heads] the largest difference of outputs in each head."""
    return np.asarray(np.abs(result.astype(np.float64) - other).max(axis=(0, 1, 3)))


@any_values
def joined(parts: Sequence[Values | None]) -> Values:
    """Keys or values along their tokens, from parts in the order of the sequence."""
    given = [part for part in parts if part is not None]
    return given[0] if len(given) == 1 else np.concatenate([part.astype(np.float32) for part in given], axis=1)


@any_values
def bias(mask: Values | None, heads: int, max_bias: float) -> Values | None:
    """(batch or 1, heads or 1, tokens, keys) fp32: what is added to the scores."""
    if mask is None or max_bias <= 0:
        return mask
    return np.asarray(mask * np.array(slopes(heads, max_bias))[:, None, None], np.float32)


@any_values
def attend(q: Values, k: Values, v: Values, mask: Values | None, step: Step, kept: Values | None = None) -> Values:
    """(batch, tokens, heads, head dim of values) in fp64; operands in the axes of Step's."""
    batch, tokens, heads, _ = q.shape
    rule = attention_oracle.Rule(softmax_scale=step.scale, softcap=step.softcap, dropout_p=step.dropout_p)
    added = bias(mask, heads, step.max_bias)
    if added is not None:
        added = np.broadcast_to(added, (batch, heads, tokens, k.shape[1]))
    sinks = step.find("sinks")
    sink_values = None if sinks is None else sinks.values().reshape(-1).astype(np.float64)
    found = [
        attention_oracle.attend(
            q[b], k[b], v[b], rule, bias=None if added is None else added[b], sinks=sink_values,
            kept=None if kept is None else kept[b],
        )[0]
        for b in range(batch)
    ]  # fmt: skip
    return np.stack(found)


@any_values
def reference(step: Step, rows: Values | None = None, quantise_queries: bool = False) -> Values:
    """The attention of a step in fp64; of some query rows, and as a tool that rounds queries to q8_0, if asked for."""
    q, mask, dropout = step.array("q"), _numpy_mask(step), step.find("kept")
    assert q is not None
    kept = None if dropout is None else dropout.values()
    if rows is not None:
        q, mask = q[:, rows], None if mask is None else mask[:, :, rows]
        kept = None if kept is None else kept[:, :, rows]
    if quantise_queries:
        q = numerics.rounded(np.ascontiguousarray(q, np.float32), "q8_0")
    k, v = (joined([step.array(part[side]) for part in step.parts]) for side in (0, 1))
    return attend(q, k, v, mask, step, kept)


def _numpy_mask(step: Step) -> Values | None:
    from flashport.trace import _decide

    return _decide.mask(step)


def tolerance(step: Step, rows: Values | None = None) -> float:
    """The relative error that a right trace may have.

    1e-3 for fp32 queries and plain keys. The CPU kernels of ggml round queries to q8_0 where keys are quantised, so the
    bound is then this and twice what that rounding does to this very step.
    """
    plain = _TOLERANCES.get(step.need("q").type, STANDARD_TOLERANCE) if step.is_own else STANDARD_TOLERANCE
    if not any(step.need(keys).is_quantised for keys, _ in step.parts) or step.need("q").ne[0] % numerics.BLOCK_VALUES:
        return plain
    rounded = differences(reference(step, rows, quantise_queries=True), reference(step, rows)).relative
    return plain + (2 * rounded if np.isfinite(rounded) else 0.0)
