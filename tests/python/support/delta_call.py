"""Arguments of gated_delta_update with everything around them poisoned, and the oracle's judgement of what it did."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import flashport
from flashport.testing import gated_delta_oracle as oracle
from helpers import BF16

FORMAT = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16", np.dtype(BF16): "bf16"}
RULE = tuple(oracle.Rule.__dataclass_fields__)


@dataclass
class Call:
    """Keywords of gated_delta_update, and the memory that its pools are views of."""

    arguments: dict
    memory: dict  # name of a pool -> all bytes around it

    def __getitem__(self, name):
        return self.arguments[name]

    @property
    def lens(self):
        """Tokens of each sequence."""
        batch, tokens = self["q"].shape[:2]
        cu_seqlens = self.arguments.get("cu_seqlens")
        return [tokens] * batch if cu_seqlens is None else np.diff(cu_seqlens).tolist()

    def run(self):
        """Writes pools in place, as the library does; returns out."""
        return flashport.gated_delta_update(**self.arguments)


def make_pool(rng, slots, inner, dtype, layout, gap):
    """(bytes, view [slots, *inner]): slots of NaN with ``gap`` elements of NaN between them."""
    inner = inner if layout == "kv" else (*inner[:-2], inner[-1], inner[-2])
    size = int(np.prod(inner))
    memory = np.full((slots, size + gap), np.nan, dtype)
    return memory, memory[:, :size].reshape(slots, *inner)


def make_delta(
    *,
    batch=2,
    tokens=1,
    lens=None,
    heads=2,
    group=2,
    keys=64,
    values=64,
    dtype=BF16,
    gate_dtype=None,
    state_dtype=np.float32,
    index_dtype=np.int32,
    layout="vk",
    a_form="flat",
    slots="permuted",
    steps=0,
    intermediate_dtype=np.float32,
    tree=False,
    gap=16,
    seed=0,
    update_state=True,
    gate="made",
    rate="logit",
    key_gates=False,
    column_gates=False,
    final_dtype=None,
    **rule,
):
    """Random arguments. q, k, v are slices of one projection, a and b of another; both begin two bytes off.

    ``lens`` packs sequences of these lengths; ``slots`` is "permuted", "padded" (every other sequence has -1) or None;
    ``steps`` above 0 asks for intermediate states; ``tree`` for parents. ``gate`` is "made", "without bias", "log" or
    None; ``rate`` is "logit", "logits", "rate", "rates" (plural: of each column) or None.
    """
    rng = np.random.default_rng(seed)
    count = batch if lens is None else len(lens)
    if lens is not None:
        batch, tokens = 1, sum(lens)
    value_heads = heads * group
    is_kda = rule.get("is_kda", False)
    widths = (heads * keys, heads * keys, value_heads * values)
    projection = off_by_one((batch, tokens, sum(widths)), dtype)
    projection[...] = rng.standard_normal(projection.shape)
    q, k, v = np.split(projection, np.cumsum(widths)[:-1], axis=-1)
    if not rule.get("use_qk_l2norm"):
        k /= np.asarray(np.sqrt(keys), dtype)  # else the state grows without bound
    channels = keys if is_kda else 1
    gate_dtype = dtype if gate_dtype is None else gate_dtype
    gates = off_by_one((batch, tokens, value_heads * (channels + 1)), gate_dtype)
    gates[...] = rng.standard_normal(gates.shape)
    a, b = gates[..., : value_heads * channels], gates[..., value_heads * channels :]
    if a_form == "flat":
        a, b = (x.reshape(batch * tokens, x.shape[-1]) for x in (a, b))
    elif a_form == "channels" and is_kda:
        a = a.reshape(batch, tokens, value_heads, keys)
    arguments = {
        "q": q.reshape(batch, tokens, heads, keys),
        "k": k.reshape(batch, tokens, heads, keys),
        "v": v.reshape(batch, tokens, value_heads, values),
        "out": np.full((batch, tokens, value_heads, values), np.nan, dtype),
        "state_layout": layout,
        "update_state": update_state,
        **rule,
    }

    def other(width, low, high):
        """Gates that lie apart, two bytes off."""
        x = off_by_one((batch, tokens, 2, value_heads, width), gate_dtype)
        x[...] = rng.uniform(low, high, x.shape)
        return x[:, :, 1]

    if gate in ("made", "without bias"):
        arguments |= {"a": a, "A_log": np.log(rng.uniform(0.05, 4, value_heads)).astype(np.float32)}
        if gate == "made":
            arguments["dt_bias"] = rng.standard_normal(value_heads * channels).astype(np.float32) - 2
    elif gate == "log":
        arguments["g"] = other(1, -0.3, 0.01)[..., 0]
    if key_gates:
        arguments["gk"] = other(keys, -0.3, 0.01)
    if column_gates:
        arguments["gv"] = other(values, -0.3, 0.01)
    if rate == "logit":
        arguments["b"] = b
    elif rate is not None:
        of_columns = other(values, 0, 1 if "rate" in rate else 4)
        arguments["beta" if "rate" in rate else "b"] = of_columns[..., 0] if rate == "rate" else of_columns
    memory = {}
    inner = (value_heads, keys, values)
    if slots is not None:
        indices = rng.permutation(count + 2)[:count].astype(index_dtype)
        if slots == "padded":
            indices[::2] = -1
        memory["state"], pool = make_pool(rng, count + 2, inner, state_dtype, layout, gap)
        named = indices[indices >= 0]
        pool[named] = rng.standard_normal((len(named), *pool.shape[1:]))
        arguments |= {"state": pool, "state_indices": indices}
    if final_dtype is not None:
        memory["final_states"], arguments["final_states"] = make_pool(rng, count, inner, final_dtype, layout, gap)
    if lens is not None:
        arguments["cu_seqlens"] = np.concatenate([[0], np.cumsum(lens)]).astype(index_dtype)
    if steps:
        kept = rng.permutation(count + 1)[:count].astype(index_dtype)
        if count > 2:
            kept[1] = -1
        memory["intermediate_states"], arguments["intermediate_states"] = make_pool(
            rng, count + 1, (steps, *inner), intermediate_dtype, layout, gap
        )
        arguments["intermediate_indices"] = kept
    if tree:
        parents = np.full((count, max(steps, 1) + 1), -7, index_dtype)  # what is not read may be anything
        for t in range(1, max(steps, 1)):
            parents[:, t] = rng.integers(0, t, count)
        arguments["parent_tokens"] = parents
    return Call(arguments, memory)


def off_by_one(shape, dtype):
    """Memory that begins one element after where an allocator would put it."""
    return np.empty(int(np.prod(shape)) + 1, dtype)[1:].reshape(shape)


def expected(arguments, dtype):
    """The oracle's answer."""
    outputs = ("out", "final_states")
    given = {name: value for name, value in arguments.items() if name not in RULE and name not in outputs}
    types = {
        f"{name}_type": FORMAT[arguments[array].dtype]
        for name, array in (
            ("state", "state"),
            ("intermediate", "intermediate_states"),
            ("final", "final_states"),
            ("out", "q"),
        )
        if arguments.get(array) is not None
    }
    rule = oracle.Rule(**{name: arguments[name] for name in RULE if name in arguments})
    return oracle.update(**given, **types, dtype=dtype, rule=rule)


def check(call):
    """Runs the call; out, states and intermediate states are in tolerance, every other byte is as it was."""
    arguments = call.arguments
    truth, plain = (expected(arguments, dtype) for dtype in (np.float64, np.float32))
    before = {name: array.copy() for name, array in call.memory.items()}
    inputs = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and _is_input(name)}
    out = call.run()
    assert out is arguments["out"]
    assert {name: arguments[name].tobytes() for name in inputs} == inputs

    lens = call.lens
    rows = sum(lens)
    own = [x.reshape(-1, *out.shape[2:])[:rows] for x in (out, truth.out, plain.out)]
    if rows:
        hold(*own, FORMAT[out.dtype], "out")
    assert np.isnan(out.reshape(-1, *out.shape[2:])[rows:].astype(np.float32)).all()
    written = {"state": [], "intermediate_states": [], "final_states": [(n,) for n in range(len(lens))]}
    for n, length in enumerate(lens):
        slot = arguments["state_indices"][n] if "state" in arguments else -1
        if slot >= 0 and length and arguments["update_state"]:
            written["state"].append((slot,))
        kept = arguments["intermediate_indices"][n] if "intermediate_states" in arguments else -1
        written["intermediate_states"] += [(kept, t) for t in range(length) if kept >= 0]
    for name, results in (
        ("state", (truth.state, plain.state)),
        ("intermediate_states", (truth.intermediate, plain.intermediate)),
        ("final_states", (truth.final_states, plain.final_states)),
    ):
        if name not in arguments:
            continue
        after = arguments[name]
        for place in written[name]:
            hold(after[place], *(x[place] for x in results), FORMAT[after.dtype], f"{name}[{place}]")
        # What was written is taken out of the comparison; the rest is held bit for bit.
        old = before[name][:, : after[0].size].reshape(after.shape)
        for place in written[name]:
            old[place] = after[place]
        assert before[name].tobytes() == call.memory[name].tobytes(), f"{name} was written outside of its slots"
    return out


def _is_input(name):
    return name not in ("state", "intermediate_states", "final_states", "out")


def hold(got, truth, plain, fmt, what):
    """Fails where the oracle finds a result too far from the truth."""
    problem = oracle.compare(got, truth, plain, fmt, what).problem
    assert not problem, problem


def pairs_of(options, seed=0):
    """Combinations of options in which every pair of values of two options occurs: greedy, always the same."""
    rng = np.random.default_rng(seed)
    names = list(options)
    left = {
        (i, x, j, y)
        for i in range(len(names))
        for j in range(i + 1, len(names))
        for x in range(len(options[names[i]]))
        for y in range(len(options[names[j]]))
    }
    rows = []
    while left:
        best, most, some = None, -1, sorted(left)
        for _ in range(40):
            i, x, j, y = some[rng.integers(len(some))]
            row = [int(rng.integers(len(options[name]))) for name in names]
            row[i], row[j] = x, y
            gain = len(_pairs(row) & left)
            if gain > most:
                best, most = row, gain
        left -= _pairs(best)
        rows.append({name: options[name][x] for name, x in zip(names, best, strict=True)})
    return rows


def _pairs(row):
    return {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i + 1, len(row))}
