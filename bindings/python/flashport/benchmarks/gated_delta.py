"""Benchmark cases of the gated delta rule, in the shape of Qwen3-Next, beside SGLang's kernels and those of FLA.

Decode brings each sequence one token, with the gates made in the kernel; prefill is by chunks, with given gates. A peer
is called as its project calls it, on contiguous q, k and v (packed ones where it takes nothing else). SGLang's kernels
find states in a pool by slots, as ours do, random ones or in order; those of FLA take and return an array of them. A
peer is timed where its package is installed and its results agree with ours; where they do not, or it fails, the row
says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from flashport import devices, gated_delta
from flashport.arrays import new_output
from flashport.benchmarks import harness
from flashport.testing import numerics
from flashport.testing.cases import HostArray

HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128  # Qwen3-Next; keys and values have the same dim
TOLERANCE = 0.03  # of a peer's results: rounding gives about 0.01, a wrong argument more than 0.1


@dataclass(frozen=True)
class GatedDeltaCase:
    """Sequences of as many new tokens each: one is decode, more are prefill."""

    name: str
    batch: int
    tokens: int = 1
    state: str = "fp32"
    slots: str = "random"  # or "in order"

    @property
    def decodes(self) -> bool:
        """Whether this is decode."""
        return self.tokens == 1

    @property
    def title(self) -> str:
        """The shape in a few words."""
        what = "decode" if self.decodes else "prefill"
        shape = f"{self.batch} x {self.tokens}, {HEADS}/{VALUE_HEADS}, {HEAD_DIM}"
        ordered = ", slots in order" if self.slots == "in order" else ""
        return f"gated delta rule, {what}, {shape}, bf16, states {self.state}{ordered}"

    @property
    def operation(self) -> Literal["gated_delta", "gated_delta_chunk"]:
        """Which of ours this is, as :func:`flashport.which_kernel` has it."""
        return "gated_delta" if self.decodes else "gated_delta_chunk"

    @property
    def bytes(self) -> int:
        """What must be moved: states in and out in decode; q, k, v and outputs in prefill."""
        if self.decodes:
            return 2 * self.batch * VALUE_HEADS * HEAD_DIM * numerics.row_bytes(HEAD_DIM, self.state)
        return self.batch * self.tokens * 2 * (HEADS + VALUE_HEADS) * numerics.row_bytes(HEAD_DIM, "bf16")


_CASES = (
    GatedDeltaCase("gdn_decode_256_fp32", 256),
    GatedDeltaCase("gdn_decode_64_fp32", 64),
    GatedDeltaCase("gdn_decode_256_ordered", 256, slots="in order"),
    GatedDeltaCase("gdn_decode_64_ordered", 64, slots="in order"),
    GatedDeltaCase("gdn_decode_1_fp32", 1),
    GatedDeltaCase("gdn_decode_256_bf16", 256, state="bf16"),
    GatedDeltaCase("gdn_prefill_1x16384_fp32", 1, 16384),
    GatedDeltaCase("gdn_prefill_4x4096_fp32", 4, 4096),
)


@dataclass(frozen=True)
class Candidate:
    """A call that returns outputs and its array of states, and how that array becomes states [N, HV, V, K]."""

    call: Callable[[], tuple[Any, Any]]
    states: Callable[[Any], Any]


def cases(match: str = "") -> list[GatedDeltaCase]:
    """The cases; ``match`` selects by name or title."""
    return [case for case in _CASES if match in case.name or match in case.title]


def run_case(case: GatedDeltaCase, device: str, target: str, rounds: int = 9, largest: float = math.inf) -> harness.Row:
    """Times one case on a device; ``largest`` limits its bytes.

    Prefill is bound by a chain of products and not by memory, so that it is not held against a read.
    """
    row = harness.Row(case.name, case.title, case.bytes)
    if case.bytes > largest:
        row.skipped = harness.too_large(case.bytes)
        return row
    torch = harness.find_torch(device)
    x = make_inputs(torch, case, device)
    try:
        peers = agreeing_peers(peers_of(case), x, row) if torch and device != "cpu" else {}
        ours = our_call(x, x.pool)
        ours.call()
    except NotImplementedError as error:
        row.skipped = str(error)
        return row
    row.kernel = devices.which_kernel(
        case.operation, state_dtype=numerics.DTYPE[case.state], head_dim_k=HEAD_DIM, target=target
    )
    harness.measure(row, torch, device, ours.call, peers, rounds, read=case.decodes)
    return row


def make_inputs(torch: Any, case: GatedDeltaCase, device: str) -> SimpleNamespace:
    """Random inputs on a device, as tensors of torch if it is given. States are in slots of ``pool``."""
    rng = np.random.default_rng(0)

    def random(*shape: int, fmt: str = "bf16") -> Any:
        if torch:
            return harness.random_tensor(torch, shape, fmt, harness.torch_device(device))
        bits = numerics.encode(rng.standard_normal(shape, np.float32), fmt)
        return HostArray(bits, numerics.DTYPE[fmt]).on(device)

    def place(values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(harness.torch_device(device)) if torch else harness.on(values, device)

    rows = (case.batch, case.tokens)
    A_log = np.log(rng.uniform(1, 16, VALUE_HEADS)).astype(np.float32)  # noqa: N806 - the field's name
    dt_bias = np.full(VALUE_HEADS, -4, np.float32)
    permuted = rng.permutation(case.batch).astype(np.int32)
    x = SimpleNamespace(
        decodes=case.decodes,
        q=random(*rows, HEADS, HEAD_DIM),
        k=random(*rows, HEADS, HEAD_DIM),
        v=random(*rows, VALUE_HEADS, HEAD_DIM),
        pool=random(case.batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM, fmt=case.state),
        slots=place(np.arange(case.batch, dtype=np.int32) if case.slots == "in order" else permuted),
    )
    x.out = new_output(x.q, x.v)
    if case.decodes:
        x.a, x.b = (random(case.batch, VALUE_HEADS) for _ in range(2))
        x.A_log, x.dt_bias = place(A_log), place(dt_bias)
    else:
        a, b = (rng.standard_normal((*rows, VALUE_HEADS), np.float32) for _ in range(2))
        x.g = place(-np.exp(A_log) * np.log1p(np.exp(a + dt_bias)))
        x.beta = place(1 / (1 + np.exp(-b)))
    return x


def our_call(x: SimpleNamespace, pool: Any) -> Candidate:
    """Ours, which updates ``pool``. Its arguments are at hand, so that the host time of a call is the call's."""
    q, k, v, slots, out = x.q, x.k, x.v, x.slots, x.out
    if x.decodes:
        a, b, A_log, dt_bias, update = x.a, x.b, x.A_log, x.dt_bias, gated_delta.gated_delta_update  # noqa: N806
        return _in_pool(
            x, lambda: (update(q, k, v, a, b, A_log, dt_bias, pool, slots, use_qk_l2norm=True, out=out), pool)
        )
    g, beta, chunk = x.g, x.beta, gated_delta.gated_delta_chunk
    return _in_pool(x, lambda: (chunk(q, k, v, g, beta, pool, slots, use_qk_l2norm=True, out=out), pool))


def _in_pool(x: SimpleNamespace, call: Callable[[], tuple[Any, Any]]) -> Candidate:
    """A call that leaves the states in the slots of a pool like ours."""
    return Candidate(call, lambda pool: pool[x.slots])


def agreeing_peers(
    peers: dict[str, tuple[str, Callable[[SimpleNamespace], Candidate]]], x: SimpleNamespace, row: harness.Row
) -> dict[str, harness.Call]:
    """The calls of those whose package is installed and whose results are ours; ``row`` says what is wrong with others.

    ``x.pool`` is left as it is.
    """
    installed = {name: make for name, (package, make) in peers.items() if importlib.util.find_spec(package)}
    if not installed:
        return {}
    ours = our_call(x, x.pool.clone())
    out, pool = ours.call()
    expected = {"outputs": out.clone(), "states": ours.states(pool)}
    calls = {}
    for name, make in installed.items():
        try:
            candidate = make(x)
            out, states = candidate.call()
            found = {"outputs": out, "states": candidate.states(states)}
            for what, values in found.items():
                _check(what, values, expected[what])
        except Exception as error:  # of whatever kind: it is the row's to tell
            row.peers_failed[name] = harness.failure(error)
        else:
            calls[name] = candidate.call
    return calls


def _check(what: str, values: Any, expected: Any) -> None:
    if values.shape != expected.shape:
        raise ValueError(f"{what} of shape {tuple(values.shape)}, ours have {tuple(expected.shape)}")
    expected = expected.float()
    error = ((values.float() - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:  # nor NaN
        raise ValueError(f"{what} differ from ours by {error:.2g} of their norm")


def peers_of(case: GatedDeltaCase) -> dict[str, tuple[str, Callable[[SimpleNamespace], Candidate]]]:
    """Name, package and maker of the peers of a case."""
    if not case.decodes:
        return {"SGLang": ("sglang", _sglang_chunk), "FLA": ("fla", _fla_chunk)}
    peers = {"SGLang": ("sglang", _sglang_update), "SGLang packed": ("sglang", _sglang_packed)}
    if case.state == "fp32":  # FLA returns no other states
        peers["FLA"] = ("fla", lambda x: _fla_update(x, state_v_first=False))
        peers["FLA V first"] = ("fla", lambda x: _fla_update(x, state_v_first=True))
    return peers


def _sglang(function: str, folder: str, module: str) -> Any:
    """A function of SGLang's, whose modules move between its versions."""
    newer = f"sglang.kernels.ops.attention.{folder}.{module}"
    try:
        found = importlib.import_module(newer)
    except ModuleNotFoundError as error:
        if not f"{newer}.".startswith(f"{error.name}."):  # it is there, and lacks something else
            raise
        found = importlib.import_module(f"sglang.srt.layers.attention.fla.{module}")
    return getattr(found, function)


def _sglang_update(x: SimpleNamespace) -> Candidate:
    function = _sglang("fused_sigmoid_gating_delta_rule_update", "linear", "fused_sigmoid_gating_recurrent")
    pool = x.pool.clone()

    def call() -> tuple[Any, Any]:
        out = function(
            A_log=x.A_log,
            a=x.a,
            dt_bias=x.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=x.q,
            k=x.k,
            v=x.v,
            b=x.b,
            initial_state_source=pool,
            initial_state_indices=x.slots,
            use_qk_l2norm_in_kernel=True,
        )
        return out, pool

    return _in_pool(x, call)


def _sglang_packed(x: SimpleNamespace) -> Candidate:
    import torch

    function = _sglang("fused_recurrent_gated_delta_rule_packed_decode", "fla", "fused_recurrent")
    packed = torch.cat([part.flatten(1) for part in (x.q, x.k, x.v)], dim=1)
    pool, out = x.pool.clone(), torch.empty_like(x.v)

    def call() -> tuple[Any, Any]:
        return function(
            mixed_qkv=packed,
            a=x.a,
            b=x.b,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            scale=HEAD_DIM**-0.5,
            initial_state=pool,
            out=out,
            ssm_state_indices=x.slots,
            use_qk_l2norm_in_kernel=True,
        )

    return _in_pool(x, call)


def _sglang_chunk(x: SimpleNamespace) -> Candidate:
    function = _sglang("chunk_gated_delta_rule", "fla", "chunk")
    pool = x.pool.clone()

    def call() -> tuple[Any, Any]:
        out, _, _ = function(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=pool,
            initial_state_indices=x.slots,
            use_qk_l2norm_in_kernel=True,
        )
        return out, pool

    return _in_pool(x, call)


def _fla_update(x: SimpleNamespace, state_v_first: bool) -> Candidate:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    states = x.pool[x.slots]
    states = states if state_v_first else states.mT.contiguous()

    def call() -> tuple[Any, Any]:
        return fused_recurrent_gated_delta_rule(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.a.unsqueeze(1),
            beta=x.b.unsqueeze(1),
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=x.A_log,
            dt_bias=x.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=state_v_first,
        )

    return Candidate(call, lambda states: states if state_v_first else states.mT)


def _fla_chunk(x: SimpleNamespace) -> Candidate:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    states = x.pool[x.slots].mT.contiguous()

    def call() -> tuple[Any, Any]:
        return chunk_gated_delta_rule(
            q=x.q,
            k=x.k,
            v=x.v,
            g=x.g,
            beta=x.beta,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    return Candidate(call, lambda states: states.mT)
