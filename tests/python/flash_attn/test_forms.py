"""Calls of one form are checked once; each wrong one is refused every time."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashport import flash_attn  # noqa: E402
from flashport.flash_attn import _cache, _checks, _dense  # noqa: E402


def tensors(head_dim=32):
    q = torch.randn(2, 1, 4, head_dim).half()
    k, v = (torch.randn(2, 16, 2, head_dim).half() for _ in "kv")
    return q, k, v


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(_checks, "_passed", set())
    seen = []
    for module in (_cache, _dense):
        check = module._check
        monkeypatch.setattr(module, "_check", lambda *given, check=check: seen.append(given[0]) or check(*given))
    return seen


@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, flash_attn.flash_attn_func])
def test_a_form_is_checked_once(function, checked):
    for _ in range(3):
        function(*tensors())
    assert len(checked) == 1
    function(*tensors(64))
    function(*tensors(), softcap=1.0)
    q, k, v = tensors()
    function(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    assert len(checked) == 4


@pytest.mark.parametrize("function", [flash_attn.flash_attn_with_kvcache, flash_attn.flash_attn_func])
def test_a_wrong_form_is_refused_every_time(function, checked):
    q, k, v = tensors()
    for _ in range(2):
        function(q, k, v)
        with pytest.raises(RuntimeError, match="same dtype"):
            function(q, k.float(), v)
    assert len(checked) == 3


def test_lengths_are_no_part_of_a_form(checked):
    q, k, v = tensors()
    right, wrong = torch.tensor([3, 16]).int(), torch.tensor([3, 17]).int()
    flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=right)
    with pytest.raises(ValueError, match="seqlen of the KV cache"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=wrong)
    assert len(checked) == 1


def test_forms_are_forgotten_in_time(monkeypatch, checked):
    monkeypatch.setattr(_checks, "_MOST_FORMS", 2)
    for head_dim in (16, 24, 32, 40):
        flash_attn.flash_attn_func(*tensors(head_dim))
    assert len(_checks._passed) <= 2


def test_what_has_no_hash_is_checked(checked):
    q, k, v = tensors()
    for _ in range(2):
        with pytest.raises(TypeError):
            flash_attn.flash_attn_with_kvcache(q, k, v, cache_leftpad=[1, 2])
    assert len(checked) == 2


def test_a_tensor_in_place_of_a_number_is_its_number(checked):
    q, k, v = tensors()
    flash_attn.flash_attn_func(q, k, v, softcap=torch.tensor(0.0), dropout_p=0.5)
    with pytest.raises(RuntimeError, match="Softcapping does not support dropout"):
        flash_attn.flash_attn_func(q, k, v, softcap=torch.tensor(30.0), dropout_p=0.5)
    flash_attn.flash_attn_func(q, k, v, softcap=0.0, dropout_p=0.5)
    assert len(checked) == 2


@pytest.mark.parametrize("shared", ["itself", "the other cache"])
def test_padded_caches_that_share_memory_are_not_written(shared):
    """Head dims that are padded go through copies, which the kernels would not refuse."""
    q, new = torch.randn(1, 1, 4, 60), torch.randn(1, 1, 2, 60)
    k = torch.randn(1, 8, 2, 60)
    v = torch.randn(1, 8, 1, 60).expand(1, 8, 2, 60) if shared == "itself" else k
    before = k.clone()
    with pytest.raises(ValueError, match="share"):
        flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3)
    assert torch.equal(k, before)


def test_a_form_is_told_by_all_that_checks_look_at():
    tensors = [
        torch.zeros(4, 6), torch.zeros(6, 4), torch.zeros(24), torch.zeros(6, 4).t(), torch.zeros(4, 6).half(),
        torch.zeros(4, 6).bfloat16(), torch.zeros(4, 6, dtype=torch.int32), torch.zeros(4, 12)[:, ::2],
        torch.zeros(4, 6, device="meta"), None,
    ]  # fmt: skip
    forms = [_checks.form_of("f", (one, None), ()) for one in tensors]
    forms += [_checks.form_of("f", (None, tensors[0]), ()), _checks.form_of("g", (tensors[0], None), ())]
    forms += [_checks.form_of("f", (tensors[0], None), (1,)), _checks.form_of("f", (tensors[0], None), (1.0,))]
    assert len(set(forms)) == len(forms)
    assert _checks.form_of("f", (torch.ones(4, 6), None), ()) == forms[0]
