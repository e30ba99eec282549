"""Arguments of gated_delta_chunk with everything around them poisoned, and the oracle's judgement of what it did."""

from __future__ import annotations

import numpy as np

import flashport
from delta_call import FORMAT, Call, hold, make_pool, off_by_one
from flashport.testing import gated_delta_oracle as oracle
from helpers import BF16

RULE = ("scale", "use_qk_l2norm", "head_map")
OUTPUTS = ("out", "state", "final_states", "chunk_states")


class ChunkCall(Call):
    """The same of gated_delta_chunk."""

    def run(self):
        """Writes states in place, as the library does; returns out."""
        return flashport.gated_delta_chunk(**self.arguments)


def make_chunk(
    *,
    batch=2,
    tokens=65,
    lens=None,
    heads=1,
    group=2,
    keys=64,
    values=64,
    dtype=BF16,
    gate_dtype=np.float32,
    state_dtype=np.float32,
    final_dtype=None,
    index_dtype=np.int32,
    layout="vk",
    slots="permuted",
    chunks=False,
    gap=16,
    seed=0,
    update_state=True,
    own_gate=None,
    **rest,
):
    """Random arguments. q, k, v are slices of one projection, g and beta of another; both begin one element off.

    ``lens`` packs sequences of these lengths; ``slots`` is "permuted", "padded" (every other sequence has -1) or None;
    ``final_dtype`` asks for final states, ``chunks`` for entering ones; ``own_gate`` is "A_log" or "dt_bias": the gate
    is made by the call.
    """
    rng = np.random.default_rng(seed)
    count = batch if lens is None else len(lens)
    if lens is not None:
        batch, tokens = 1, sum(lens)
    value_heads = heads * group
    widths = (heads * keys, heads * keys, value_heads * values)
    projection = off_by_one((batch, tokens, sum(widths)), dtype)
    projection[...] = rng.standard_normal(projection.shape)
    q, k, v = np.split(projection, np.cumsum(widths)[:-1], axis=-1)
    if not rest.get("use_qk_l2norm"):
        k /= np.asarray(np.sqrt(keys), dtype)  # else the state grows without bound
    gates = off_by_one((batch, tokens, 2 * value_heads), gate_dtype)
    gates[..., :value_heads] = -rng.uniform(0, 0.5, (batch, tokens, value_heads))
    gates[..., value_heads:] = rng.uniform(0, 1, (batch, tokens, value_heads))
    arguments = {
        "q": q.reshape(batch, tokens, heads, keys),
        "k": k.reshape(batch, tokens, heads, keys),
        "v": v.reshape(batch, tokens, value_heads, values),
        "g": gates[..., :value_heads],
        "beta": gates[..., value_heads:],
        "out": np.full((batch, tokens, value_heads, values), np.nan, dtype),
        "state_layout": layout,
        "update_state": update_state,
        **rest,
    }
    if rest.get("beta_sigmoid"):
        gates[..., value_heads:] = 3 * rng.standard_normal((batch, tokens, value_heads))
    if own_gate is not None:
        gates[..., :value_heads] = rng.standard_normal((batch, tokens, value_heads))
        arguments["A_log"] = np.log(rng.uniform(0.05, 1, value_heads)).astype(np.float32)
    if own_gate == "dt_bias":
        arguments["dt_bias"] = rng.standard_normal((1, value_heads)).astype(np.float32)
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
    if chunks:
        entering = -(-tokens // 64) if lens is None else sum(-(-length // 64) for length in lens) + 1
        memory["chunk_states"], arguments["chunk_states"] = make_pool(
            rng, batch, (entering, *inner), dtype, layout, gap
        )
    if lens is not None:
        arguments["cu_seqlens"] = np.concatenate([[0], np.cumsum(lens)]).astype(index_dtype)
    return ChunkCall(arguments, memory)


def expected(arguments, plain=None):
    """The oracle's answer: fp64, or the plain WY form with operands of type ``plain``."""
    not_read = ("out", "final_states", "chunk_states", "workspace", *RULE)
    given = {name: value for name, value in arguments.items() if name not in not_read}
    types = {
        f"{name}_type": FORMAT[arguments[array].dtype]
        for name, array in (("state", "state"), ("final", "final_states"))
        if arguments.get(array) is not None
    }
    rule = oracle.Rule(**{name: arguments[name] for name in RULE if name in arguments})
    return oracle.chunk(**given, **types, plain=plain, rule=rule)


def check_chunk(call):
    """Runs the call; outputs and states are in tolerance, every other byte is as it was."""
    arguments = call.arguments
    fmt = FORMAT[call["q"].dtype]
    truth, plain = expected(arguments), expected(arguments, fmt)
    before = {name: array.copy() for name, array in call.memory.items()}
    inputs = {name: x.tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray) and name not in OUTPUTS}
    out = call.run()
    assert out is arguments["out"]
    assert {name: arguments[name].tobytes() for name in inputs} == inputs

    lens = call.lens
    rows = sum(lens)
    own = [x.reshape(-1, *out.shape[2:])[:rows] for x in (out, truth.out, plain.out)]
    if rows:
        hold(*own, fmt, "out")
    assert np.isnan(out.reshape(-1, *out.shape[2:])[rows:].astype(np.float32)).all()
    written = {
        "state": [
            (slot,)
            for slot, length in zip(arguments.get("state_indices", ()), lens, strict=False)
            if slot >= 0 and length and arguments["update_state"]
        ],
        "final_states": [(n,) for n in range(len(lens))],
        "chunk_states": [
            (row, i) for row in range(len(truth.chunk_states)) for i in range(truth.chunk_states.shape[1])
        ],
    }
    for name, places in written.items():
        if name not in arguments:
            continue
        after = arguments[name]
        for place in places:
            wanted, usual = (getattr(x, name)[place] for x in (truth, plain))
            hold(after[place], wanted, usual, FORMAT[after.dtype], f"{name}[{place}]")
        # What was written is taken out of the comparison; the rest is held bit for bit.
        old = before[name][:, : after[:1].size].reshape(after.shape)
        for place in places:
            old[place] = after[place]
        assert before[name].tobytes() == call.memory[name].tobytes(), f"{name} was written outside of its slots"
    return out
