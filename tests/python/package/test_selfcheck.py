"""The self-checks of the gated delta rule and of attention run every kernel, and find what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import flashport
from flashport import _core, backends, devices, gated_delta
from flashport.testing import numerics, selfcheck, selfcheck_attention, selfcheck_gated_delta
from flashport.testing.cases import to_host
from flashport.testing.selfcheck_gated_delta import load_cases

CASES = {case.name: case for case in load_cases("emulator", "full")}


def test_names_are_unique_and_all_checks_are_there():
    assert len(CASES) == len(load_cases("emulator", "full"))
    names = [check.name for check in selfcheck.checks("cpu", "cpu", ("emulator", "full"))]
    assert len(set(names)) == len(names)
    assert {*CASES, "gated_delta_update_invariance", "gated_delta_chunk_invariance"} < set(names)


def test_the_cases_reach_every_kernel():
    for target in (target for backend in backends() for target in backend.targets):
        queries = [(case.operation, {**case.query, "target": target}) for case in CASES.values()]
        served = [query for query in queries if devices.supports(query[0], **query[1])]
        reached = {devices.which_kernel(operation, **options) for operation, options in served}
        families = ("gated_delta_update/", "gated_delta_chunk/")
        assert reached == {key for key in _core.kernel_keys(target) if key.startswith(families)}


def one_off(array, fmt, place):
    """Changes one element of an array of fp32."""
    values = to_host(array, fmt)
    values[place] = 1.0 if np.isnan(values[place]) else values[place] + 0.1
    array.copy_from(values)


@pytest.mark.parametrize(
    ("name", "array", "place", "text"),
    [
        ("gated_delta_update_decode", "state", (4, 3, 127, 127), "state: error"),
        ("gated_delta_update_decode", "state", (0, 0, 0, 0), "state was written where no sequence"),
        ("gated_delta_update_steps", "intermediate_states", (3, 3, 0, 5, 5), "intermediate_states: error"),
        ("gated_delta_update_steps", "intermediate_states", (0, 0, 0, 0, 0), "intermediate_states was written where"),
        ("gated_delta_update_no_pool", "final_states", (1, 0, 0, 0), "final_states: error"),
        ("gated_delta_update_fp32", "out", (2, 8, 0, 23), "out: error"),
        ("gated_delta_chunk_fp32", "out", (0, 64, 1, 0), "out: error"),
        ("gated_delta_chunk_log_gates", "final_states", (2, 0, 0, 0), "final_states: error"),
        ("gated_delta_chunk_prompts", "state", (4, 3, 127, 127), "state: error"),
        ("gated_delta_chunk_prompts", "state", (1, 0, 0, 0), "state was written where no sequence"),
    ],
)
def test_a_wrong_element_is_found(name, array, place, text, monkeypatch):
    case = CASES[name]
    function = "gated_delta_chunk" if case.chunk else "gated_delta_update"
    right = getattr(gated_delta, function)

    def wrong(**arguments):
        right(**arguments)
        one_off(arguments[array], "fp32", place)

    assert selfcheck_gated_delta.check(case, "cpu", "cpu").status == "passed"
    monkeypatch.setattr(gated_delta, function, wrong)
    outcome = selfcheck_gated_delta.check(case, "cpu", "cpu")
    assert outcome.status == "failed"
    assert text in outcome.detail
    assert outcome.kernel.startswith(function + "/")


def test_surplus_tokens_are_nobodys(monkeypatch):
    case = CASES["gated_delta_update_packed"]
    right = gated_delta.gated_delta_update

    def wrong(**arguments):
        right(**arguments)
        out = arguments["out"]
        bits = np.empty(out.shape, np.float16)
        out.copy_to(bits)
        bits[0, -1] = 1
        out.copy_from(bits)

    monkeypatch.setattr(gated_delta, "gated_delta_update", wrong)
    outcome = selfcheck_gated_delta.check(case, "cpu", "cpu")
    assert outcome.detail == "out was written where no sequence has a part of it"


@pytest.mark.parametrize("chunk", [False, True])
def test_other_bits_are_found(chunk, monkeypatch):
    function = "gated_delta_chunk" if chunk else "gated_delta_update"
    right = getattr(gated_delta, function)

    def wrong(**arguments):
        """As if the grid of a batch of one were another."""
        right(**arguments)
        if arguments["state_indices"].shape == (1,):
            one_off(arguments["state"], "fp32", (3, 0, 0, 0))

    monkeypatch.setattr(gated_delta, function, wrong)
    outcome = selfcheck_gated_delta.check_invariance("bits", chunk, "cpu", "cpu")
    assert (outcome.status, outcome.detail) == ("failed", "bits of sequence 3 differ alone")


def test_what_is_declined_has_the_reason(monkeypatch):
    monkeypatch.setattr(devices, "supports", lambda *_, **__: devices.Support(False, "no such kernel"))
    checks = list(selfcheck_gated_delta.checks("cpu", "cpu", ("emulator",)))
    outcomes = [check.run() for check in checks]
    assert {(outcome.status, outcome.detail) for outcome in outcomes} == {("unsupported", "no such kernel")}


ATTENTION = {case.name: case for case in selfcheck_attention.load_cases("emulator", "full")}


def test_the_cases_of_attention_reach_every_kernel():
    names = [check.name for check in selfcheck.checks("cpu", "cpu", ("emulator", "full"))]
    assert {*ATTENTION, "attention_invariance", "dropout_mask"} < set(names)
    for target in (target for backend in backends() for target in backend.targets):
        queries = [{**case.query, "target": target} for case in ATTENTION.values()]
        reached = {
            devices.which_kernel("attention", **query) for query in queries if devices.supports("attention", **query)
        }
        assert reached == {key for key in _core.kernel_keys(target) if key.startswith("attention/")}


@pytest.mark.parametrize(
    ("name", "array", "place", "text"),
    [
        ("attention_packed", "out", (69, 3, 127), "out: error"),
        ("attention_packed", "lse", (3, 69), "lse: error"),
        ("attention_packed", "out", (76, 0, 0), "out was written where no sequence has a query"),
        ("attention_lengths_in_use", "lse", (1, 0, 5), "lse was written where no sequence has a query"),
        ("attention_all_options", "out", (1, 112, 0, 0), "out: error"),
    ],
)
def test_a_wrong_element_of_attention_is_found(name, array, place, text, monkeypatch):
    right = flashport.attention

    def wrong(**arguments):
        right(**arguments)
        fmt = "bf16" if array == "out" else "fp32"
        values = to_host(arguments[array], fmt)
        values[place] = 1.0 if np.isnan(values[place]) else values[place] + 0.1
        arguments[array].copy_from(numerics.encode(values, fmt))

    assert selfcheck_attention.check(ATTENTION[name], "cpu", "cpu").status == "passed"
    monkeypatch.setattr(flashport, "attention", wrong)
    outcome = selfcheck_attention.check(ATTENTION[name], "cpu", "cpu")
    assert outcome.status == "failed"
    assert outcome.detail.startswith(text)


@pytest.mark.parametrize("part", ["q", "v"])
def test_attention_whose_bits_follow_the_batch_is_found(part, monkeypatch):
    right = flashport.attention

    def wrong(**arguments):
        if len(to_host(arguments["out"], "bf16")) < 100:  # a part of the batch alone
            values = to_host(arguments[part], "bf16")
            values[0] += 0.5
            arguments[part].copy_from(numerics.encode(values, "bf16"))
        right(**arguments)

    monkeypatch.setattr(flashport, "attention", wrong)
    outcome = selfcheck_attention.check_invariance("attention_invariance", "cpu", "cpu")
    assert outcome.status == "failed"
    assert outcome.detail.startswith("bits differ of ")
