"""The harness times what the case list says: every case of the bench tier, made small, runs through every route."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import sys
import types

import pytest

import flashport
from flashport.benchmarks import append, attention, cascade, decode, gated_delta, harness
from flashport.testing import numerics

GATED_DELTA = [dataclasses.replace(c, batch=2, tokens=min(c.tokens, 70)) for c in gated_delta.cases()]
CASES = [
    dataclasses.replace(case, lens=(70, 70, 5) if len(set(case.lens)) > 1 else (70, 70)) for case in decode.cases()
]


@pytest.fixture(autouse=True)
def _one_call_a_reading(monkeypatch):
    """No test looks at how precise a time is, and hundreds of cases take one."""
    monkeypatch.setattr(harness, "_CLOCK_SECONDS", 0.0)


def served(case):
    return flashport.supports("decode", target="cpu", **case.query)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_candidates_run(case, library, monkeypatch):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(harness, "find_torch", lambda device: None)
    if not served(case):
        row = decode.run_case(case, "cpu", "cpu", 1)
        assert row.skipped
        assert row.seconds is None
        return
    row = decode.run_case(case, "cpu", "cpu", 1)
    assert row.seconds > 0
    assert row.read_seconds > 0
    assert row.bytes == sum(case.lens) * case.hkv * (numerics.row_bytes(case.dk, case.k_format) * 2)
    comparable = library == "torch" and len(set(case.lens)) == 1 and case.k_format == case.q
    assert bool(row.peers) == comparable
    assert (row.ratio is not None) == comparable


CASCADES = [dataclasses.replace(c, batch=3, prefix=64, suffix=5, heads=(4, 2)) for c in cascade.cases()]


@pytest.mark.parametrize("case", CASCADES, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_cascades_run(case, library, monkeypatch):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(harness, "find_torch", lambda device: None)
    row = cascade.run_case(case, "cpu", "cpu", 1)
    assert row.bytes == (64 * (1 if case.is_cascade else 3) + 3 * 5) * 2 * 128 * 2 * 2
    assert bool(row.skipped) == (library == "none")
    assert (row.seconds or 0) > 0 or row.skipped.startswith("needs torch")
    assert list(row.peers) == (["flash_decode"] if case.is_cascade and library == "torch" else [])
    assert "too" in cascade.run_case(case, "cpu", "cpu", 1, largest=1e3).skipped


CACHES = [
    dataclasses.replace(case, batch=2, q_len=min(case.q_len, 20), context=70, heads=(4, 2))
    for case in append.cases()
    if case.heads == (32, 8) and case.batch != 1
]


@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
def test_calls_over_a_cache_run_and_agree(case):
    torch = pytest.importorskip("torch")
    row = append.run_case(case, "cpu", "cpu", 1)
    assert row.seconds > 0
    assert row.kernel.startswith("decode/" if case.q_len <= 16 else "attention/")
    assert "too" in append.run_case(case, "cpu", "cpu", 1, largest=1e3).skipped
    ours, peers = append.make_candidates(torch, case, "cpu")
    (peer,) = peers.values()
    if not case.appends:  # else queries are turned
        torch.testing.assert_close(ours(), peer().view_as(ours()), rtol=0.02, atol=0.02)


def test_both_ways_of_a_cascade_agree():
    torch = pytest.importorskip("torch")
    ours, peers = cascade.make_candidates(torch, CASCADES[0], "cpu")
    torch.testing.assert_close(ours(), peers["flash_decode"](), rtol=0.02, atol=0.02)


ATTENTION = [
    dataclasses.replace(c, lens=tuple((min(q, 70), min(k, 90 if q < k else 70)) for q, k in c.lens[:3]), heads=(4, 2))
    for c in [*attention.cases(study=True), *attention.cases(cpu=True)]
]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_attention_runs(case, library, monkeypatch):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(harness, "find_torch", lambda device: None)
    row = attention.run_case(case, "cpu", "cpu", 1)
    if library == "none" and case.option == "odd bias":
        assert row.skipped == "its bias is a view, which needs torch"
        return
    assert row.seconds > 0
    assert row.read_seconds is None
    assert row.kernel == flashport.which_kernel("attention", target="cpu", **case.query)
    (q_len, kv_len), *_ = case.lens
    beyond_sdpa = case.option or case.packed or case.window >= 0 or case.pages or case.fp8 or case.cache
    comparable = not beyond_sdpa and q_len == kv_len
    assert list(row.peers) == (["torch SDPA"] if library == "torch" and comparable else [])
    skipped = attention.run_case(case, "cpu", "cpu", 1, 1.0)
    assert skipped.skipped.endswith("GFLOP are too many for this device's run")


def test_flops_are_those_of_pairs_that_a_mask_leaves():
    for q_len, kv_len, causal, window, wanted in (
        (3, 5, False, -1, 15),
        (3, 5, True, -1, 12),
        (5, 3, True, -1, 6),
        (4, 4, True, 1, 7),
        (4, 4, False, 1, 13),
        (0, 3, True, -1, 0),
    ):
        assert attention.pairs(q_len, kv_len, causal, window) == wanted
    case = attention.AttentionCase("name", ((2, 2), (1, 3)), dims=(64, 32), heads=(3, 1))
    assert case.flops == 2 * (64 + 32) * 3 * (3 + 3)
    assert case.bytes == 2 * (64 + 32) * (3 * 3 + 5)
    case = attention.AttentionCase("name", ((2, 3),), dims=(64, 32), heads=(3, 1), fp8="kv")
    assert case.bytes == 2 * 3 * 2 * (64 + 32) + 3 * (64 + 32)
    assert len({c.name for c in ATTENTION}) == len(ATTENTION)


@pytest.mark.parametrize("case", GATED_DELTA, ids=lambda case: case.name)
@pytest.mark.parametrize("library", ["torch", "none"])
def test_gated_delta_runs(case, library, monkeypatch):
    if library == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(harness, "find_torch", lambda device: None)
    row = gated_delta.run_case(case, "cpu", "cpu", 1)
    assert row.seconds > 0
    options = {"state_dtype": numerics.DTYPE[case.state], "target": "cpu"}
    assert row.kernel == flashport.which_kernel(case.operation, **options)
    assert (row.read_seconds is not None) == case.decodes
    if case.decodes:
        assert row.bytes == 2 * 2 * 32 * 128 * 128 * {"fp32": 4, "bf16": 2}[case.state]
    else:
        assert row.bytes == 2 * 70 * (2 * 16 + 2 * 32) * 128 * 2
    assert not row.peers
    assert not row.peers_failed


def test_large_cases_are_left_out_with_a_reason():
    row = decode.run_case(decode.cases()[0], "cpu", "cpu", 1, largest=1e6)
    assert "too large" in row.skipped
    row = gated_delta.run_case(gated_delta.cases()[0], "cpu", "cpu", 1, largest=1e6)
    assert "too large" in row.skipped


def test_a_target_without_kernels_is_left_out_with_a_reason(monkeypatch):
    def chunk(*arguments, **options):
        raise NotImplementedError("no kernels here")

    monkeypatch.setattr(gated_delta.gated_delta, "gated_delta_chunk", chunk)
    row = gated_delta.run_case(GATED_DELTA[-1], "cpu", "cpu", 1)
    assert row.skipped == "no kernels here"
    assert row.seconds is None


@pytest.mark.parametrize("case", GATED_DELTA, ids=lambda case: case.name)
def test_a_peer_is_timed_only_if_it_agrees(case):
    torch = pytest.importorskip("torch")
    x = gated_delta.make_inputs(torch, case, "cpu")
    start = x.pool.clone()

    def peer(x, out=lambda out: out, states=lambda states: states):
        ours = gated_delta.our_call(x, x.pool.clone())
        return gated_delta.Candidate(
            lambda: (out(ours.call()[0].clone()), None), lambda _: states(x.pool * 0 + moved)[x.slots]
        )

    moved = start.clone()
    gated_delta.our_call(x, moved).call()

    def missing(x):
        raise ImportError("no module\nof this name")

    makers = {
        "good": peer,
        "scaled": lambda x: peer(x, out=lambda out: out * 1.1),
        "NaN": lambda x: peer(x, out=lambda out: out * float("nan")),
        "flat": lambda x: peer(x, out=lambda out: out.flatten()),
        "transposed": lambda x: peer(x, states=lambda states: states.mT),
        "missing": missing,
    }
    row = harness.Row(case.name, case.title, case.bytes)
    peers = {name: ("json", make) for name, make in makers.items()} | {"absent": ("no_such_package", missing)}
    calls = gated_delta.agreeing_peers(peers, x, row)
    assert list(calls) == ["good"]
    assert torch.equal(x.pool, start)
    assert list(row.peers_failed) == ["scaled", "NaN", "flat", "transposed", "missing"]
    assert "outputs differ" in row.peers_failed["scaled"]
    assert "outputs differ" in row.peers_failed["NaN"]
    assert "shape" in row.peers_failed["flat"]
    assert "states differ" in row.peers_failed["transposed"]
    assert row.peers_failed["missing"] == "ImportError: no module of this name"


SGLANG = {
    "new": ("kernels.ops.attention.linear.fused_sigmoid_gating_recurrent", "kernels.ops.attention.fla.fused_recurrent",
            "kernels.ops.attention.fla.chunk"),
    "old": tuple(f"srt.layers.attention.fla.{name}" for name in ("fused_sigmoid_gating_recurrent", "fused_recurrent",
                                                                 "chunk")),
}  # fmt: skip


def stand_in_for_sglang(monkeypatch, x, versions):
    """Modules named as those of some versions of SGLang, whose functions do what ours do; returns who was called."""
    called = []

    def ours(pool, out=None):
        x.out = x.v * 0 if out is None else out
        return gated_delta.our_call(x, pool).call()[0]

    def make(version):
        def update(**given):
            called.append(version)
            return ours(given["initial_state_source"])

        def packed(**given):
            called.append(version)
            return ours(given["initial_state"], given["out"]), given["initial_state"]

        def chunk(**given):
            called.append(version)
            return ours(given["initial_state"]), None, None

        functions = (update, packed, chunk)
        names = (
            "fused_sigmoid_gating_delta_rule_update",
            "fused_recurrent_gated_delta_rule_packed_decode",
            "chunk_gated_delta_rule",
        )
        for path, name, function in zip(SGLANG[version], names, functions, strict=True):
            parts = ["sglang", *path.split(".")]
            for end in range(1, len(parts) + 1):
                module = ".".join(parts[:end])
                if module not in sys.modules:
                    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
                    sys.modules[module].__path__ = []
                    sys.modules[module].__spec__ = importlib.machinery.ModuleSpec(module, None, is_package=True)
            setattr(sys.modules[".".join(parts)], name, function)

    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for version in versions:
        make(version)
    return called


@pytest.mark.parametrize("case", [GATED_DELTA[0], GATED_DELTA[-1]], ids=lambda case: case.name)
@pytest.mark.parametrize(("versions", "chosen"), [(("old",), "old"), (("new",), "new"), (("old", "new"), "new")])
def test_sglang_is_found_where_its_versions_have_it(case, versions, chosen, monkeypatch):
    torch = pytest.importorskip("torch")
    x = gated_delta.make_inputs(torch, case, "cpu")
    called = stand_in_for_sglang(monkeypatch, x, versions)
    row = harness.Row(case.name, case.title, case.bytes)
    peers = {name: peer for name, peer in gated_delta.peers_of(case).items() if peer[0] == "sglang"}
    calls = gated_delta.agreeing_peers(peers, x, row)
    assert not row.peers_failed
    assert list(calls) == (["SGLang", "SGLang packed"] if case.decodes else ["SGLang"])
    assert called == [chosen] * len(calls)


def test_a_new_sglang_that_lacks_a_package_is_told_so(monkeypatch):
    """And not that there is no old module."""
    torch = pytest.importorskip("torch")
    case = GATED_DELTA[-1]
    x = gated_delta.make_inputs(torch, case, "cpu")
    stand_in_for_sglang(monkeypatch, x, ("old",))
    load = importlib.import_module

    def lacks(name):
        if name.startswith("sglang.kernels"):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        return load(name)

    monkeypatch.setattr(importlib, "import_module", lacks)
    row = harness.Row(case.name, case.title, case.bytes)
    gated_delta.agreeing_peers({"SGLang": gated_delta.peers_of(case)["SGLang"]}, x, row)
    assert row.peers_failed == {"SGLang": "ModuleNotFoundError: No module named 'triton'"}


def test_a_peer_that_fails_when_it_is_timed_is_told():
    def fails():
        raise RuntimeError("not in a graph")

    row = harness.Row("name", "title", 4000)
    harness.measure(row, None, "cpu", lambda: None, {"good": lambda: None, "bad": fails}, 1)
    assert list(row.peers) == ["good"]
    assert row.peers_failed == {"bad": "RuntimeError: not in a graph"}


class FakeGpu:
    """What the timer of graphs uses of torch; a call takes ``host`` seconds outside of a graph, ``device`` in one."""

    def __init__(self, host, device, start):
        self.clock, self.captured, self.replayed = 0.0, None, []
        self.host, self.device, self.start = host, device, start
        self.cuda, self.ready = self, False

    def call(self):
        if self.captured is None:
            self.clock += self.host
            self.ready = True
        else:
            self.captured += 1

    def synchronize(self):
        pass

    def Stream(self):  # noqa: N802 - torch's names
        return self

    def stream(self, stream):
        return contextlib.nullcontext()

    def Event(self, enable_timing):  # noqa: N802
        gpu = self

        class Event:
            def record(self):
                self.time = gpu.clock

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.time - self.time) * 1e3

        return Event()

    def CUDAGraph(self):  # noqa: N802
        gpu = self

        class Graph:
            calls = 0

            def replay(self):
                gpu.replayed.append(self.calls)
                gpu.clock += gpu.start + self.calls * gpu.device

        return Graph()

    @contextlib.contextmanager
    def graph(self, graph, stream):
        assert self.ready, "no workspace is ready: run the call once before each capture"
        self.captured, self.ready = 0, False
        yield
        graph.calls, self.captured = self.captured, None


@pytest.mark.parametrize(
    ("host", "device", "calls"),
    [(5e-6, 4e-6, 200), (60e-6, 4e-6, 200), (60e-6, 20e-6, 48), (5e-6, 2e-3, 1)],
)
def test_a_graph_is_as_long_whatever_a_call_costs_the_host(host, device, calls):
    gpu = FakeGpu(host, device, start=3e-6)
    timer = harness._graph_timer(gpu, gpu.call)
    seconds = timer()
    assert gpu.replayed[-1] == calls
    assert seconds == pytest.approx(device + 3e-6 / calls)
