"""The shipped correctness cases of the gated delta rule, against its NumPy oracle, on one device.

Whatever a call is to leave alone holds NaN or a state before it, and has to hold the same after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from flashport import devices, gated_delta
from flashport.testing import gated_delta_oracle as oracle
from flashport.testing import numerics
from flashport.testing.cases import HostArray, to_host
from flashport.testing.outcomes import CheckOf, Outcome, guarded, judge

_NORMED = oracle.Rule(use_qk_l2norm=True)  # as models of this kind have it


@dataclass(frozen=True)
class DeltaCase:
    """One call of gated_delta_update, or by chunks."""

    name: str
    chunk: bool = False
    tier: str = "emulator"
    q: str = "bf16"
    gates: str = "bf16"  # type of what decays and rates are made of
    state: str = "fp32"
    layout: str = "vk"
    keys: int = 128
    values: int = 128
    heads: int = 2
    value_heads: int = 4
    lens: tuple[int, ...] = (1, 1, 1)
    packed: bool = False  # in one row with cu_seqlens, and a token behind them that is nobody's
    slots: tuple[int, ...] | None = (4, -1, 2)  # of a pool of 5; None: there is no pool
    update_state: bool = True
    gate: str = "head"  # as flashport.supports has it; of a chunked call "any" is given as a logarithm
    steps: bool = False  # states after each token, of all sequences but the second
    tree: bool = False  # each token starts from one before it
    final: str = ""  # type of final states; "": there are none
    entering: bool = False  # states that enter chunks
    rule: oracle.Rule = _NORMED

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return sum(self.lens) + 1 if self.packed else self.lens[0]

    @property
    def operation(self) -> Literal["gated_delta", "gated_delta_chunk"]:
        """What :func:`flashport.supports` is asked about."""
        return "gated_delta_chunk" if self.chunk else "gated_delta"

    @property
    def query(self) -> dict[str, Any]:
        """And with which options."""
        return {
            "q_dtype": self.q, "state_dtype": self.state, "head_dim_k": self.keys, "head_dim_v": self.values,
            "state_layout": self.layout, "gate": "head" if self.chunk else self.gate,
        }  # fmt: skip


def load_cases(*tiers: str) -> list[DeltaCase]:
    """The cases of some tiers ("emulator", "full")."""
    return [case for case in (*_named_cases(), *_update_kernels(), *_chunk_kernels()) if case.tier in tiers]


def _named_cases() -> list[DeltaCase]:
    lens, slots = (0, 1, 5, 0, 17), (0, 4, 2, 3, -1)
    prompts = {"chunk": True, "lens": (65, 65, 65)}
    packed = {"chunk": True, "packed": True, "lens": (0, 1, 64, 65, 130), "slots": slots}
    key_gates = oracle.Rule(use_qk_l2norm=True, is_kda=True, lower_bound=-5.0)
    return [
        DeltaCase("gated_delta_update_decode"),
        DeltaCase("gated_delta_update_kv_bf16_states", layout="kv", state="bf16", lens=(5, 5, 5)),
        DeltaCase("gated_delta_update_fp16_states", state="fp16", lens=(5, 5, 5)),
        DeltaCase("gated_delta_update_kda", gate="key", gates="fp32", lens=(7, 7, 7), rule=key_gates),
        DeltaCase("gated_delta_update_any_gates", gate="any", state="bf16", final="bf16", lens=(7, 7, 7), values=80),
        DeltaCase("gated_delta_update_no_pool", gate="any", final="fp32", lens=(3, 3), slots=None, layout="kv"),
        DeltaCase(
            "gated_delta_update_packed", q="fp16", gates="fp16", packed=True, lens=lens, slots=slots, keys=64,
            rule=oracle.Rule(use_qk_l2norm=True, head_map="modulo"),
        ),
        DeltaCase("gated_delta_update_steps", steps=True, lens=(4, 4, 4)),
        DeltaCase(
            "gated_delta_update_tree", steps=True, tree=True, lens=(6, 6, 6), slots=(0, 3, -1), update_state=False
        ),
        DeltaCase(
            "gated_delta_update_fp32", q="fp32", gates="fp32", keys=16, values=24, lens=(9, 9, 9),
            rule=oracle.Rule(scale=0.7),
        ),
        DeltaCase("gated_delta_update_k256", keys=256, values=256, heads=1, value_heads=1),
        DeltaCase("gated_delta_chunk_prompts", **prompts),
        DeltaCase("gated_delta_chunk_log_gates", gate="any", gates="fp32", final="fp32", **prompts),
        DeltaCase("gated_delta_chunk_packed", final="bf16", entering=True, layout="kv", state="bf16", **packed),
        DeltaCase("gated_delta_chunk_fp16", q="fp16", gates="fp16", state="fp16", keys=64, values=40, **packed),
        DeltaCase("gated_delta_chunk_fp32", q="fp32", gates="fp32", heads=1, value_heads=2, **prompts),
        DeltaCase("gated_delta_chunk_k256", keys=256, heads=1, value_heads=2, **prompts),
    ]  # fmt: skip


def _update_kernels() -> Iterator[DeltaCase]:
    """Every kernel that a target may have, and a layer of Qwen3-Next."""
    for keys, state, layout, gate in itertools.product(
        (64, 128, 256), ("fp32", "bf16", "fp16"), ("vk", "kv"), ("head", "key", "any")
    ):
        yield DeltaCase(
            f"gated_delta_update_k{keys}_{state}_{layout}_{gate}", tier="full", keys=keys, state=state, layout=layout,
            gate=gate, lens=(19, 19, 19), rule=oracle.Rule(use_qk_l2norm=True, is_kda=gate == "key"),
        )  # fmt: skip
    yield DeltaCase("gated_delta_update_qwen3_next", tier="full", heads=16, value_heads=32)


def _chunk_kernels() -> Iterator[DeltaCase]:
    for q, keys, layout in itertools.product(("bf16", "fp16", "fp32"), (64, 128, 256), ("vk", "kv")):
        yield DeltaCase(
            f"gated_delta_chunk_{q}_k{keys}_{layout}", chunk=True, tier="full", q=q, keys=keys, layout=layout,
            packed=True, lens=(200, 1, 63, 129), slots=(1, 4, -1, 0), final="fp32", entering=True,
        )  # fmt: skip
    yield DeltaCase(
        "gated_delta_chunk_qwen3_next", chunk=True, tier="full", heads=16, value_heads=32, lens=(300,), slots=(3,)
    )


def checks(device: str, target: str, tiers: tuple[str, ...]) -> Iterator[CheckOf]:
    """All checks for a device, in order."""
    for case in load_cases(*tiers):
        yield guarded(case.name, partial(check, case, device, target))
    for chunk in (False, True):
        name = f"gated_delta_{'chunk' if chunk else 'update'}_invariance"
        yield guarded(name, partial(check_invariance, name, chunk, device, target))


@dataclass
class _Data:
    """Arguments of one call: values as stored, and bits of the arrays that it is given."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    arrays: dict[str, HostArray] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, values: np.ndarray, fmt: str) -> None:
        bits = numerics.encode(values, fmt)
        self.values[name] = numerics.decode(bits, fmt)
        self.arrays[name] = HostArray(bits, numerics.DTYPE[fmt])

    def add_indices(self, name: str, values: Any) -> None:
        self.values[name] = np.asarray(values, np.int32)
        self.arrays[name] = HostArray(self.values[name], "int32")

    def run(self, case: DeltaCase, device: str) -> dict[str, Any]:
        """All arrays on the device, after the call."""
        arrays = {name: array.on(device) for name, array in self.arrays.items()}
        function = gated_delta.gated_delta_chunk if case.chunk else gated_delta.gated_delta_update
        function(**arrays, **self.options)
        return arrays


def make_data(case: DeltaCase) -> _Data:
    """Random arguments; slots that no sequence names, and outputs, hold NaN."""
    rng = np.random.default_rng([*case.name.encode()])
    data, count = _Data(), len(case.lens)
    rows = (1 if case.packed else count, case.tokens)
    normal = partial(rng.standard_normal, dtype=np.float32)
    shapes = {"q": (case.heads, case.keys), "k": (case.heads, case.keys), "v": (case.value_heads, case.values)}
    for name, shape in shapes.items():
        # Without normalisation the state would grow without bound.
        size = case.keys**-0.5 if name == "k" and not case.rule.use_qk_l2norm else 1
        data.add(name, size * normal((*rows, *shape)), case.q)
    _add_gates(case, data, rows, rng)
    inner = (case.value_heads, case.values, case.keys)
    inner = inner if case.layout == "vk" else (inner[0], inner[2], inner[1])
    nan = partial(np.full, fill_value=np.nan, dtype=np.float32)
    data.add("out", nan((*rows, case.value_heads, case.values)), case.q)
    if case.slots is not None:
        pool = nan((5, *inner))
        named = [slot for slot in case.slots if slot >= 0]
        pool[named] = normal((len(named), *inner))
        data.add("state", pool, case.state)
        data.add_indices("state_indices", case.slots)
    if case.packed:
        data.add_indices("cu_seqlens", np.cumsum([0, *case.lens]))
    if case.steps:
        data.add("intermediate_states", nan((count + 1, case.tokens, *inner)), case.state)
        data.add_indices("intermediate_indices", [-1 if n == 1 else count - n for n in range(count)])
    if case.tree:
        data.add_indices("parent_tokens", [[rng.integers(0, max(t, 1)) for t in range(case.tokens)]] * count)
    if case.final:
        data.add("final_states", nan((count, *inner)), case.final)
    if case.entering:
        chunks = sum(-(-length // oracle.CHUNK) for length in case.lens)
        data.add("chunk_states", nan((1, chunks, *inner) if case.packed else (count, chunks // count, *inner)), case.q)
    names = ("use_qk_l2norm", "head_map", "scale") + (() if case.chunk else ("is_kda", "lower_bound"))
    data.options |= {name: getattr(case.rule, name) for name in names}
    data.options |= {"state_layout": case.layout, "update_state": case.update_state}
    return data


def _add_gates(case: DeltaCase, data: _Data, rows: tuple[int, int], rng: Any) -> None:
    heads = case.value_heads

    def uniform(low: float, high: float, *inner: int) -> np.ndarray:
        return rng.uniform(low, high, (*rows, heads, *inner)).astype(np.float32)

    if case.gate == "any":
        data.add("g", uniform(-0.3, 0), case.gates)
        data.add("beta", uniform(0, 1, *(() if case.chunk else (case.values,))), case.gates)
        if not case.chunk:
            data.add("gk", uniform(-0.3, 0, case.keys), case.gates)
            data.add("gv", uniform(-0.3, 0, case.values), case.gates)
        return
    channels = (case.keys,) if case.gate == "key" else ()
    data.add("g" if case.chunk else "a", uniform(-2, 2, *channels), case.gates)
    data.add("beta" if case.chunk else "b", uniform(-2, 2), case.gates)
    data.add("A_log", np.log(rng.uniform(0.05, 4, heads)).astype(np.float32), "fp32")
    data.add("dt_bias", rng.uniform(-4, 0, (heads, *channels)).astype(np.float32), "fp32")
    if case.chunk:
        data.options["beta_sigmoid"] = True


def _expected(case: DeltaCase, data: _Data, plain: bool) -> Any:
    """The oracle's answer, in fp64 or of a plain implementation."""
    outputs = ("out", "final_states", "chunk_states")
    given = {name: value for name, value in data.values.items() if name not in outputs}
    options = {
        "state_layout": case.layout, "update_state": case.update_state, "rule": case.rule, "state_type": case.state,
        "final_type": case.final or "fp32",
    }  # fmt: skip
    if case.chunk:
        made = data.options.get("beta_sigmoid", False)
        return oracle.chunk(**given, **options, beta_sigmoid=made, plain=case.q if plain else None)
    dtype = np.float32 if plain else np.float64
    return oracle.update(**given, **options, dtype=dtype, out_type=case.q, intermediate_type=case.state)


def _written(case: DeltaCase, data: _Data) -> dict[str, list[Any]]:
    """Places of each output that a call writes, one sequence, slot, step or chunk each."""
    first = np.cumsum([0, *case.lens]) if case.packed else None
    places: dict[str, list[Any]] = {
        "out": [(n,) if first is None else (0, slice(first[n], first[n + 1])) for n in range(len(case.lens))],
        "final_states": [(n,) for n in range(len(case.lens))],
        "state": [
            (slot,)
            for slot, length in zip(case.slots or (), case.lens, strict=False)
            if slot >= 0 and length > 0 and case.update_state
        ],
    }
    if case.steps:
        kept = [slot for slot in data.values["intermediate_indices"] if slot >= 0]
        places["intermediate_states"] = [(slot, t) for slot in kept for t in range(case.tokens)]
    if case.entering:
        places["chunk_states"] = list(np.ndindex(data.values["chunk_states"].shape[:2]))
    return places


_FIELD = {"intermediate_states": "intermediate"}  # of the oracle's answer


def check(case: DeltaCase, device: str, target: str) -> Outcome:
    """One case: outputs and states in tolerance, and everything else as it was."""
    support = devices.supports(case.operation, target=target, **case.query)
    if not support:
        return Outcome(case.name, "unsupported", support.reason)
    data = make_data(case)
    arrays = data.run(case, device)
    truth, plain = (_expected(case, data, plain) for plain in (False, True))
    formats = {"out": case.q, "final_states": case.final, "state": case.state, "intermediate_states": case.state}
    formats["chunk_states"] = case.q
    compared = []
    for name, places in _written(case, data).items():
        if name not in arrays:
            continue
        fmt = formats[name]
        got, before = to_host(arrays[name], fmt), data.values[name]
        for place in places:
            wanted, usual = (getattr(x, _FIELD.get(name, name))[place] for x in (truth, plain))
            compared.append(oracle.compare(got[place], wanted, usual, fmt, name))
            before[place] = got[place]
        if not np.array_equal(before, got, equal_nan=True):
            compared.append(oracle.Comparison(problem=f"{name} was written where no sequence has a part of it"))
    return judge(case.name, devices.which_kernel(case.operation, target=target, **case.query), *compared)


def check_invariance(name: str, chunk: bool, device: str, target: str) -> Outcome:
    """A sequence's bits in a batch, again, and alone."""
    lens = (70, 3, 0, 130, 64) if chunk else (1, 3, 0, 17, 2)
    case = DeltaCase(name, chunk=chunk, packed=True, lens=lens, slots=(4, 2, 0, 3, 1))
    support = devices.supports(case.operation, target=target, **case.query)
    if not support:
        return Outcome(name, "unsupported", support.reason)
    kernel = devices.which_kernel(case.operation, target=target, **case.query)
    data = make_data(case)
    first, again = (_results(data.run(case, device), case) for _ in range(2))
    if not all(map(_same, first, again)):
        return Outcome(name, "failed", "bits differ repeated", kernel)
    offsets = data.values["cu_seqlens"]
    for n, slot in enumerate(case.slots or ()):
        alone = _Data(options=data.options, arrays=dict(data.arrays))
        own = slice(offsets[n], offsets[n + 1])
        for part in ("q", "k", "v", "g" if chunk else "a", "beta" if chunk else "b", "out"):
            array = data.arrays[part]
            alone.arrays[part] = HostArray(array.bits[:, own], array.dtype)
        alone.add_indices("cu_seqlens", [0, lens[n]])
        alone.add_indices("state_indices", [slot])
        out, state = _results(alone.run(case, device), case)
        if not (_same(out, first[0][:, own]) and _same(state[slot], first[1][slot])):
            return Outcome(name, "failed", f"bits of sequence {n} differ alone", kernel)
    return Outcome(name, "passed", "", kernel)


def _results(arrays: dict[str, Any], case: DeltaCase) -> tuple[np.ndarray, np.ndarray]:
    return to_host(arrays["out"], case.q), to_host(arrays["state"], case.state)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=True)
