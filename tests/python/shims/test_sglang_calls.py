"""flashport.sglang against sglang_calls.csv, what SGLang's backends import and call: positions, shapes, types."""

from __future__ import annotations

import ast
import csv
import inspect
import pathlib
from collections import namedtuple

import numpy as np
import pytest

from flashport import sglang
from helpers import BF16

Row = namedtuple("Row", "kind file kernels function arguments")
TABLE = pathlib.Path(__file__).with_name("sglang_calls.csv")
ROWS = [Row(*row) for row in csv.reader(line for line in TABLE.read_text().splitlines() if not line.startswith("#"))]
SIZES = {"B": 3, "N": 3, "T": 70, "D": 4, "S": 5, "H": 2, "HV": 4, "K": 64, "V": 32, "QKV": 2 * 2 * 64 + 4 * 32}
TYPES = {"float32": np.float32, "int32": np.int32, "int64": np.int64}


def rows(*kinds):
    return [pytest.param(row, id=f"{i}-{row.function}") for i, row in enumerate(ROWS) if row.kind in kinds]


def split(text):
    """The arguments, which spaces part but within brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == " " and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def alternatives(text):
    """(names or None, values as the table has them), one pair for each form that a call may have."""
    arguments = [part.split("=", 1) if "=" in part else (None, part) for part in split(text)]
    most = max(len(value.split("|")) for _, value in arguments)
    for i in range(most):
        yield [(name, value.split("|")[min(i, value.count("|"))]) for name, value in arguments]


def value_of(text, name, model, pool):
    """A literal, or an array of the type and shape that the table has."""
    if "[" not in text:
        return SIZES[text] if text in SIZES else ast.literal_eval(text)
    kind, extents = text.rstrip("]").split("[")
    shape = tuple(eval(extent, {}, SIZES) for extent in extents.split())
    dtype = {"model": model, "pool": pool, **TYPES}[kind]
    random = np.random.default_rng(len(name or ""))
    if np.dtype(dtype).kind == "i":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype) % (shape[-1] if len(shape) > 1 else 5)
    return (random.standard_normal(shape) / 4).astype(dtype)


def bound(row, model=BF16, pool=np.float32):
    """The calls that the row stands for, bound to our signature."""
    function = getattr(sglang, row.function)
    for arguments in alternatives(row.arguments):
        values = [(name, value_of(text, name, model, pool)) for name, text in arguments]
        positional = [value for name, value in values if name is None]
        call = inspect.signature(function).bind(*positional, **{name: value for name, value in values if name})
        given = call.arguments
        if "cu_seqlens" in given:  # sequences of the tokens that there are
            tokens = given["q"].shape[1]
            given["cu_seqlens"] = np.linspace(0, tokens, len(given["cu_seqlens"])).astype(np.int32)
        if given.get("retrieve_parent_token") is not None:
            given["retrieve_parent_token"] = np.maximum(given["retrieve_parent_token"] - 1, 0)
        yield function, call


@pytest.mark.parametrize("row", rows("import"))
def test_every_import_is_here(row):
    assert row.function in sglang.__all__
    assert hasattr(sglang, row.function)


def test_nothing_else_is_here():
    """What is exported is in the table, and every function in it has its signature there."""
    assert {row.function for row in ROWS if row.kind == "import"} == set(sglang.__all__)
    functions = {name for name in sglang.__all__ if callable(getattr(sglang, name))}
    assert {row.function for row in ROWS if row.kind == "signature"} == functions
    assert {row.function for row in ROWS if row.kind in ("call", "missing")} == functions


@pytest.mark.parametrize("row", rows("signature"))
def test_positions_and_defaults_are_sglangs(row):
    parameters = inspect.signature(getattr(sglang, row.function)).parameters.values()
    ours = [
        x.name if x.default is x.empty else f"{x.name}={x.default}"
        for x in parameters
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    theirs = [name for name in row.arguments.split() if not name.startswith("**")]
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == (["inplace_update=True"] if row.function == "chunk_gated_delta_rule" else [])


@pytest.mark.parametrize("row", rows("call"))
@pytest.mark.parametrize("model", [BF16, np.float16])
@pytest.mark.parametrize("pool", [np.float32, BF16, np.float16])
def test_every_call_is_served(row, model, pool):
    for function, call in bound(row, model, pool):
        result = function(*call.args, **call.kwargs)
        outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
        assert outputs
        assert all(np.isfinite(x.astype(np.float32)).all() for x in outputs)


@pytest.mark.parametrize("row", rows("missing"))
def test_what_is_missing_says_so(row):
    for function, call in bound(row):
        text = r"there is no chunked form with a gate for each key \(Kimi linear attention\); keep SGLang's own"
        with pytest.raises(NotImplementedError, match=f"^{row.function}: {text}"):
            function(*call.args, **call.kwargs)
