"""Records the same decode loop twice, over an fp16 cache and over a mixed one, and compares both traces with the fp64
reference and with each other. Needs the package gguf.

    python examples/compare_traces.py --k-format q4_0 --folder /tmp

The same tokens go into both loops. A step of either must have the reference's output on what its own cache stores.
The two outputs of a step differ by what quantisation did to keys and values, and by what it did before to the queries:
where the differences of scores lie in an interval of length r, weights differ by a factor of at most exp(r), and so
outputs by at most

    max_j |v'_j - v_j| + (exp(r) - 1) sum_j w_j |v_j - out|

in each dim. The exit status is 1 where any figure is past its bound.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flashport import trace
from flashport.testing import attention_oracle
from mixed_decode import Model, Shape, mixed_caches, run, standard_caches

TOLERANCE = 1e-3  # of a step against the reference on its own cache, relative to the largest value


def record(path: Path, model: Model, caches: list, prompt: np.ndarray, tokens: np.ndarray) -> trace.Trace:
    """The trace of the loop over ``tokens``, after ``prompt``."""
    run(model, caches, prompt)
    with trace.record(path, layers=model.shape.layers):
        run(model, caches, tokens, len(prompt))
    return trace.load(path)


def operands(step: trace.Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, heads, dim) queries, and all keys and values in the order of the sequence, repeated for query heads."""
    q = step.q[0].astype(np.float64)
    found = []
    for side in (0, 1):
        whole = np.concatenate([step.array(part[side])[0].astype(np.float64) for part in step.parts])
        found.append(np.repeat(whole, q.shape[1] // whole.shape[1], axis=1))
    return q, found[0], found[1]


def reference(step: trace.Step) -> np.ndarray:
    """(tokens, heads, dim) in fp64 on what the step's cache stores."""
    rule = attention_oracle.Rule(softmax_scale=step.scale, causal=True)
    return attention_oracle.attend(*operands(step), rule)[0]


def bound(standard: trace.Step, mixed: trace.Step) -> np.ndarray:
    """(tokens, heads, dim): how far apart the two outputs may be."""
    (q, k, v), (q_other, k_other, v_other) = operands(standard), operands(mixed)
    scores, others = (np.einsum("thd,jhd->thj", *x) * standard.scale for x in ((q, k), (q_other, k_other)))
    apart = np.ptp(others - scores, axis=-1)[..., None]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    spread = np.einsum("thj,thjd->thd", weights, np.abs(v.swapaxes(0, 1)[None] - reference(standard)[:, :, None]))
    return np.abs(v_other - v).max(axis=0) + np.expm1(apart) * spread


def quantised_keys(step: trace.Step) -> int:
    """Keys before the hot ones that are stored in another type; a trace has int8, int4 and fp8 as their fp32 values."""
    if step.find("k_quant") is None:
        return 0
    is_other = any(step.need(f"{side}_quant").type != step.need(side).type for side in "kv")
    return step.need("k_quant").ne[1] if is_other else 0


def compare(standard: trace.Trace, mixed: trace.Trace, console: Console) -> list[str]:
    """Prints the table; what is past its bound."""
    table = Table(title="the same loop over an fp16 cache and over a mixed one")
    for heading in ("step", "layer", "keys", "quantised", "fp16: error", "mixed: error", "apart", "bound"):
        table.add_column(heading, justify="right")
    failures = []
    for a, b in zip(standard, mixed, strict=True):
        errors = [np.abs(x.out[0] - reference(x)).max() / np.abs(x.out).max() for x in (a, b)]
        apart, limit = np.abs(b.out - a.out)[0], bound(a, b)
        names = ("the fp16 cache", "the mixed cache")
        failures += [
            f"step {x.number} of {name}: {error:.2e} from the reference"
            for x, name, error in zip((a, b), names, errors, strict=True)
            if not error <= TOLERANCE
        ]
        if not (apart <= limit + 2 * TOLERANCE * np.abs(a.out).max()).all():
            failures.append(f"step {a.number}: outputs {apart.max():.2e} apart, past what quantisation explains")
        keys = sum(b.need(part[0]).ne[1] for part in b.parts)
        quantised = quantised_keys(b)
        row = (a.number, a.layer, keys, quantised, *(f"{x:.1e}" for x in (*errors, apart.max(), limit.max())))
        table.add_row(*map(str, row))
    console.print(table)
    for trace_of, name in ((standard, "fp16"), (mixed, "mixed")):
        console.print(
            f"{name}: {len(trace_of)} steps, {trace_of.tensor_count} tensors in {trace_of.path}", soft_wrap=True
        )
    return failures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=100, help="tokens before those that are recorded")
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--k-format", default="q8_0")
    parser.add_argument("--v-format", default="q8_0")
    parser.add_argument("--folder", type=Path, help="where the traces stay; default: they are removed")
    given = parser.parse_args()
    shape = Shape(layers=given.layers)
    model = Model(shape)
    total = given.prompt + given.tokens
    tokens = np.random.default_rng(1).integers(0, shape.vocab, total)
    formats = {"k_format": given.k_format, "v_format": given.v_format}
    caches = {
        "standard": standard_caches(shape, total),
        "mixed": mixed_caches(shape, total, hot_tokens=32, spill_tokens=16, **formats),
    }
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        traces = [
            record(folder / f"{name}.gguf", model, each, tokens[: given.prompt], tokens[given.prompt :])
            for name, each in caches.items()
        ]
        failures = compare(*traces, console)
    for failure in failures:
        console.print(failure, style="bold red", soft_wrap=True)
    if failures:
        raise SystemExit(1)
    console.print("every figure is within its bound", style="bold green")


if __name__ == "__main__":
    main()
