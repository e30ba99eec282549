"""Wrong arguments raise errors that are both ValueError and RuntimeError, in flash-attn's words, and write nothing."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

import flashport.flash_attn as flash_attn  # noqa: E402
from flash_attn_call import int32, offsets, random_tensors  # noqa: E402
from flashport.flash_attn import flash_attn_2_cuda as compiled  # noqa: E402
from flashport.flash_attn import flash_attn_interface as interface  # noqa: E402

HALF = torch.float16


def tensor(*shape, dtype=HALF):
    return random_tensors(0, shape, dtype=dtype)[0]


def apart(*shape):
    """A tensor whose last axis is not contiguous."""
    return tensor(*shape[:-1], 2 * shape[-1])[..., ::2]


def expect_refusal(function, arguments, error, words):
    """The call fails so, and leaves all its tensors as they were."""
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=re.escape(words)) as raised:
        function(**arguments)
    if error is not NotImplementedError:
        assert isinstance(raised.value, ValueError)
        assert isinstance(raised.value, RuntimeError)
        assert str(raised.value).startswith(f"{function.__name__}: ")
    for name, x in before.items():
        assert torch.equal(arguments[name], x), name


TYPE = "FlashAttention only support fp16 and bf16 data type"
LAST = "Input tensor must have contiguous last dimension"
DIVIDE = "Number of heads in key/value must divide number of heads in query"
DIM = "FlashAttention forward only supports head dimension at most 512"
SLOPES = "ALiBi slopes"
GENERATOR = "the RNG `generator` argument is no longer supported and must be None"
MULTIPLE = "query, key, value, and out_ must have a head_size that is a multiple of 8"
TABLE = {"block_table": int32(1, 0).reshape(2, 1)}
# What differs from a right call, and words of the error.
OPTIONS = [
    ({"dropout_p": 1.0}, "Expected p_dropout < 1.f to be true, but got false"),
    ({"dropout_p": 0.1, "softcap": 3.0}, "Softcapping does not support dropout for now"),
    ({"alibi_slopes": tensor(4)}, f"{SLOPES} must have dtype fp32"),
    ({"alibi_slopes": torch.rand(8)[::2]}, f"{SLOPES} tensor must have contiguous last dimension"),
    ({"alibi_slopes": torch.rand(3)}, "Expected alibi_slopes.sizes()"),
    ({"alibi_slopes": torch.rand(1, 4)}, "Expected alibi_slopes.sizes()"),
    ({"softmax_scale": float("nan")}, "softmax_scale"),
]


DENSE = [
    *OPTIONS,
    ({"q": tensor(2, 5, 4, 32, dtype=torch.float64)}, TYPE),
    ({"k": tensor(2, 9, 2, 32, dtype=torch.bfloat16)}, "query and key must have the same dtype"),
    ({"v": tensor(2, 9, 2, 32, dtype=torch.float32)}, "query and value must have the same dtype"),
    ({"q": tensor(5, 4, 32)}, "q must have shape (batch_size, seqlen_q, num_heads, head_size)"),
    ({"k": tensor(9, 2, 32)}, "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"),
    ({"k": tensor(3, 9, 2, 32)}, "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"),
    ({"k": tensor(2, 9, 2, 40)}, "k must have shape (batch_size, seqlen_k, num_heads_k, head_size)"),
    ({"v": tensor(2, 8, 2, 32)}, "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)"),
    ({"q": tensor(0, 5, 4, 32), "k": tensor(0, 9, 2, 32)}, "batch size must be positive"),
    ({"k": tensor(2, 9, 3, 32), "v": tensor(2, 9, 3, 32)}, DIVIDE),
    ({"k": tensor(2, 9, 0, 32), "v": tensor(2, 9, 0, 32)}, DIVIDE),
    ({name: tensor(2, 9, 4, 520) for name in "qkv"}, DIM),
    ({"k": torch.empty(2, 9, 2, 32, dtype=HALF, device="meta")}, "must be on CUDA"),
]  # fmt: skip


COMPILED_HALF = [
    ({"gen": torch.Generator()}, GENERATOR),
    ({"q": tensor(2, 5, 4, 30), "k": tensor(2, 9, 2, 30), "v": tensor(2, 9, 2, 30)}, MULTIPLE),
    ({"q": apart(2, 5, 4, 32)}, LAST),
    ({"v": apart(2, 9, 2, 32)}, LAST),
    ({"out": tensor(2, 5, 4, 32, dtype=torch.float32)}, "Output must have the same dtype as inputs"),
    ({"out": tensor(2, 4, 4, 32)}, "out must have shape (batch_size, seqlen_q, num_heads, head_size)"),
    ({"out": apart(2, 5, 4, 32)}, "Output tensor must have contiguous last dimension"),
    ({"return_softmax": True}, "return_softmax is only supported when p_dropout > 0.0"),
]


class TestDense:
    def make(self):
        return {"q": tensor(2, 5, 4, 32), "k": tensor(2, 9, 2, 32), "v": tensor(2, 9, 2, 32)}

    @pytest.mark.parametrize(("changed", "words"), DENSE)
    def test_function(self, changed, words):
        if any(isinstance(x, torch.Tensor) and x.device.type == "meta" for x in changed.values()):
            with pytest.raises(RuntimeError, match=words):
                flash_attn.flash_attn_func(**self.make() | changed)
            return
        expect_refusal(flash_attn.flash_attn_func, self.make() | changed, RuntimeError, words)

    @pytest.mark.parametrize("shape", [(2, 9, 3, 2, 32), (2, 9, 2, 32)])
    def test_packed_keys(self, shape):
        words = "kv must have shape (batch_size, seqlen_k, 2, num_heads_k, head_size)"
        expect_refusal(
            flash_attn.flash_attn_kvpacked_func, {"q": tensor(2, 5, 4, 32), "kv": tensor(*shape)}, ValueError, words
        )

    def test_packed_projection(self):
        words = "qkv must have shape (batch_size, seqlen, 3, num_heads, head_size)"
        expect_refusal(flash_attn.flash_attn_qkvpacked_func, {"qkv": tensor(2, 9, 2, 4, 32)}, RuntimeError, words)

    @pytest.mark.parametrize(("changed", "words"), COMPILED_HALF)
    def test_compiled_half(self, changed, words):
        arguments = self.make() | {
            "out": tensor(2, 5, 4, 32), "alibi_slopes": None, "p_dropout": 0.0, "softmax_scale": 0.1, "is_causal": True,
            "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "return_softmax": False, "gen": None,
        }  # fmt: skip
        expect_refusal(compiled.fwd, arguments | changed, RuntimeError, words)

    def test_an_output_over_an_input(self):
        x = self.make()
        scale = (None, 0.0, 0.1, True, -1, -1, 0.0, False, None)
        with pytest.raises(RuntimeError, match=r"^fwd: .*out"):
            compiled.fwd(x["q"], x["k"], x["v"], x["q"], *scale)


VARLEN = [
    *OPTIONS,
    ({"q": tensor(8, 4, 32, dtype=torch.float64)}, TYPE),
    ({"q": tensor(1, 8, 4, 32)}, "q must have shape (total_q, num_heads, head_size)"),
    ({"k": tensor(14, 2, 40)}, "k must have shape (total_k, num_heads_k, head_size)"),
    ({"v": tensor(13, 2, 32)}, "v must have shape (total_k, num_heads_k, head_size)"),
    ({"k": tensor(14, 3, 32), "v": tensor(14, 3, 32)}, DIVIDE),
    ({"cu_seqlens_q": offsets([5, 3]).long()}, "cu_seqlens_q must have dtype int32"),
    ({"cu_seqlens_k": offsets([9, 5]).long()}, "cu_seqlens_k must have dtype int32"),
    ({"cu_seqlens_k": offsets([9, 5, 0])}, "cu_seqlens_k must have shape (batch_size + 1)"),
    ({"cu_seqlens_q": int32(0, 9, 5, 9, 8, 9)[::2]}, "cu_seqlens_q must be contiguous"),
    ({"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}, "batch size must be positive"),
    ({"cu_seqlens_q": int32(0, 5, 3)}, "cu_seqlens_q"),
    ({"cu_seqlens_k": int32(0, 9, 15)}, "cu_seqlens_k"),
]  # fmt: skip


PAGED = [
    ({"block_table": int32(0, 1, 2, 3).reshape(2, 2).long()}, "block_table must have dtype torch.int32"),
    ({"block_table": int32(0, 1, 2, 3)}, "block_table must have shape (batch_size, max_num_blocks_per_seq)"),
    ({"block_table": int32(0, 1, 2).reshape(3, 1)}, "block_table must have shape (batch_size,"),
    ({"block_table": int32(*range(8)).reshape(2, 4)[:, ::2]}, "block_table must have contiguous last dimension"),
    ({"block_table": int32(0, 1).reshape(2, 1)}, "exceeds the capacity addressable by block_table"),
    ({"block_table": int32(0, 9, 2, 3).reshape(2, 2)}, "block_table must have page numbers from 0 to 3"),
    ({"k": tensor(32, 2, 32)}, "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)"),
    ({"num_splits": 2}, "num_splits > 1 is not supported for varlen paged KV"),
    ({"leftpad_k": int32(0, 1)}, "We don't support Paged KV and leftpad_k running at the same time yet"),
    ({"seqused_k": int32(1, 2).long()}, "seqused_k must have dtype int32"),
    ({"seqused_k": int32(1, 2, 3)}, "seqused_k must have shape (batch_size)"),
]  # fmt: skip


class TestVarlen:
    def make(self):
        return {
            "q": tensor(8, 4, 32), "k": tensor(14, 2, 32), "v": tensor(14, 2, 32), "cu_seqlens_q": offsets([5, 3]),
            "cu_seqlens_k": offsets([9, 5]), "max_seqlen_q": 5, "max_seqlen_k": 9,
        }  # fmt: skip

    @pytest.mark.parametrize(("changed", "words"), VARLEN)
    def test_function(self, changed, words):
        expect_refusal(flash_attn.flash_attn_varlen_func, self.make() | changed, RuntimeError, words)

    @pytest.mark.parametrize(("changed", "words"), PAGED)
    def test_pages(self, changed, words):
        arguments = self.make() | {"k": tensor(4, 8, 2, 32), "v": tensor(4, 8, 2, 32), "dropout_p": 0.0}
        arguments |= {"softmax_scale": 0.1, "causal": True, "block_table": int32(0, 1, 2, 3).reshape(2, 2)}
        expect_refusal(interface._flash_attn_varlen_forward, arguments | changed, RuntimeError, words)

    def test_too_many_splits_of_single_queries(self):
        arguments = self.make() | {"q": tensor(2, 4, 32), "cu_seqlens_q": offsets([1, 1]), "max_seqlen_q": 1}
        arguments |= {"dropout_p": 0.0, "softmax_scale": 0.1, "causal": True}
        run = interface._flash_attn_varlen_forward
        assert run(**arguments, num_splits=128)[0].shape == (2, 4, 32)
        expect_refusal(run, arguments | {"num_splits": 129}, ValueError, "num_splits > 128 not supported")


CACHE = [
    *(case for case in OPTIONS if "dropout_p" not in case[0]),
    ({"q": tensor(2, 3, 4, 32, dtype=torch.float64)}, TYPE),
    ({"k_cache": tensor(2, 16, 2, 32, dtype=torch.bfloat16)}, "query and key must have the same dtype"),
    ({"v_cache": tensor(2, 16, 2, 32, dtype=torch.bfloat16)}, "query and value must have the same dtype"),
    ({"k_cache": tensor(1, 16, 2, 32), "v_cache": tensor(1, 16, 2, 32)}, "k_cache must have shape (batch_size_c,"),
    ({"k_cache": tensor(2, 16, 2, 40)}, "k_cache must have shape (batch_size_c, seqlen_k, num_heads_k, head_size)"),
    ({"v_cache": tensor(2, 15, 2, 32)}, "v_cache must have shape (batch_size_c, seqlen_k, num_heads_k, head_size)"),
    ({"q": tensor(2, 3, 3, 32)}, DIVIDE),
    ({"v": None}, "If key is supplied, value must also be passed in"),
    ({"cache_seqlens": None}, "If key is supplied, seqlens_k must also be passed in"),
    ({"q": tensor(2, 17, 4, 32)}, "If key is supplied, it must have seqlen <= the seqlen of the KV cache"),
    ({"k": tensor(2, 3, 2, 32, dtype=torch.bfloat16)}, "Key must have the same dtype as query"),
    ({"v": tensor(2, 3, 2, 32, dtype=torch.bfloat16)}, "Value must have the same dtype as query"),
    ({"k": tensor(2, 3, 1, 32)}, "k must have shape (batch_size, seqlen_knew, num_heads_k, head_size)"),
    ({"v": tensor(2, 2, 2, 32)}, "v must have shape (batch_size, seqlen_knew, num_heads_k, head_size)"),
    ({"cache_seqlens": int32(4, 9).long()}, "seqlens_k must have dtype int32"),
    ({"cache_seqlens": int32(4, 9, 1)}, "seqlens_k must have shape (batch_size)"),
    ({"cache_seqlens": int32(4, 14)}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_seqlens": int32(4, -1)}, "seqlens_k must be at least 0, got -1"),
    ({"cache_seqlens": 14}, "must be at most the seqlen of the KV cache, 16, got 17"),
    ({"cache_leftpad": int32(1, 1).long()}, "leftpad_k must have dtype int32"),
    ({"cache_leftpad": int32(1, 13)}, "leftpad_k must be from 0 to the keys of each sequence"),
    ({"cache_batch_idx": int32(0, 1).long()}, "cache_batch_idx must have dtype int32"),
    ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx must be from 0 to 1"),
    ({"cache_batch_idx": int32(0, 1), **TABLE}, "Paged KVcache does not support cache_batch_idx"),
    ({"cache_leftpad": int32(0, 1), **TABLE}, "We don't support Paged KV and leftpad_k running at the same time yet"),
    ({"block_table": int32(0, 1).reshape(2, 1).long()}, "block_table must have dtype torch.int32"),
    ({"cache_seqlens": int32(4, 14), **TABLE}, "max(seqlens_k) + seqlen_knew (= 17) exceeds the capacity addressable"),
    ({"block_table": int32(0, 2).reshape(2, 1)}, "block_table must have page numbers from 0 to 1, got 0 to 2"),
    ({"k": None, "v": None}, "If rotary cos/sin are provided, new key / value to be appended to KV cache must also"),
    ({"rotary_sin": None}, "If rotary cos is provided, rotary sin must also be provided"),
    ({"rotary_cos": tensor(16, 24)}, "rotary_dim must be <= headdim"),
    ({"rotary_cos": tensor(16, 4)}, "Only rotary dimensions divisible by 16 are currently supported"),
    ({"rotary_cos": tensor(15, 8)}, "cos/sin seqlen must be at least the seqlen of KV cache"),
    ({"rotary_cos": tensor(16, 8, dtype=torch.float32)}, "rotary_cos must have the same dtype as query"),
    ({"rotary_cos": tensor(32, 8)[::2]}, "rotary_cos must be contiguous"),
    ({"rotary_sin": tensor(17, 8)}, "rotary_sin must have shape (seqlen_ro, rotary_dim / 2)"),
    ({"num_splits": 129}, "num_splits > 128 not supported"),
]  # fmt: skip


class TestCache:
    def make(self, **changed):
        """A right call with new keys, in one sequence of pages where there is a table."""
        arguments = {
            "q": tensor(2, 3, 4, 32), "k_cache": tensor(2, 16, 2, 32), "v_cache": tensor(2, 16, 2, 32),
            "k": tensor(2, 3, 2, 32), "v": tensor(2, 3, 2, 32), "rotary_cos": tensor(16, 8),
            "rotary_sin": tensor(16, 8), "cache_seqlens": int32(4, 9),
        }  # fmt: skip
        return arguments | changed

    @pytest.mark.parametrize(("changed", "words"), CACHE)
    def test_function(self, changed, words):
        expect_refusal(flash_attn.flash_attn_with_kvcache, self.make(**changed), RuntimeError, words)

    def test_the_right_call_is_right(self):
        for changed in ({}, TABLE, {"cache_leftpad": int32(0, 2)}, {"cache_batch_idx": int32(1, 0)}):
            assert flash_attn.flash_attn_with_kvcache(**self.make(**changed)).isfinite().all()

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_a_cache_that_lies_apart(self, name):
        arguments = self.make(**{name: apart(2, 16, 2, 32)})
        words = f"{name} must have contiguous last dimension"
        expect_refusal(flash_attn.flash_attn_with_kvcache, arguments, AssertionError, words)

    def test_an_output_over_the_cache(self):
        cache = tensor(2, 16, 2, 32)
        q, k = tensor(2, 3, 2, 32), tensor(2, 3, 2, 32)
        before = cache.clone()
        with pytest.raises(RuntimeError, match=r"^fwd_kvcache: .*out"):
            compiled.fwd_kvcache(
                q, cache, tensor(2, 16, 2, 32), k, k, int32(2, 3), None, None, None, None, None, None, cache[:, :3],
                0.1, True, -1, -1, 0.0, True, 0,
            )  # fmt: skip
        assert torch.equal(cache, before)


class TestBackward:
    """There is none: a call that needs a gradient says so, and under no_grad there is no need."""

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_dense(self, name):
        arguments = TestDense().make()
        arguments[name].requires_grad_()
        expect_refusal(flash_attn.flash_attn_func, arguments, NotImplementedError, f"{name} requires a gradient")
        with torch.no_grad():
            assert not flash_attn.flash_attn_func(**arguments).requires_grad

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_varlen(self, name):
        arguments = TestVarlen().make()
        arguments[name].requires_grad_()
        expect_refusal(flash_attn.flash_attn_varlen_func, arguments, NotImplementedError, f"{name} requires a gradient")

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
    def test_cache(self, name):
        arguments = TestCache().make()
        arguments[name].requires_grad_()
        expect_refusal(
            flash_attn.flash_attn_with_kvcache, arguments, NotImplementedError, f"{name} requires a gradient"
        )

    def test_packed(self):
        qkv = tensor(2, 9, 3, 4, 32).requires_grad_()
        with pytest.raises(NotImplementedError, match="flash_attn_qkvpacked_func: qkv requires a gradient"):
            flash_attn.flash_attn_qkvpacked_func(qkv)
        with pytest.raises(NotImplementedError, match="flash_attn_kvpacked_func: kv requires a gradient"):
            flash_attn.flash_attn_kvpacked_func(tensor(2, 9, 4, 32), qkv[:, :, :2])
        with pytest.raises(NotImplementedError, match="flash_attn_varlen_qkvpacked_func: qkv requires a gradient"):
            flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], offsets([9]), 9)
        with pytest.raises(NotImplementedError, match="flash_attn_varlen_kvpacked_func: kv requires a gradient"):
            flash_attn.flash_attn_varlen_kvpacked_func(tensor(9, 4, 32), qkv[0, :, :2], *[offsets([9])] * 2, 9, 9)

    def test_the_compiled_half(self):
        x, none = tensor(1, 1, 2, 8), None
        dense = (x, x, x, x, x, x, none, none, none, none, 0.0, 0.1, True, -1, -1, 0.0, False)
        varlen = (*dense[:9], none, none, none, 1, 1, 0.0, 0.1, False, True, -1, -1, 0.0, False)
        for function, arguments in ((compiled.bwd, dense), (compiled.varlen_bwd, varlen)):
            with pytest.raises(NotImplementedError, match=f"{function.__name__}: there is no backward yet"):
                function(*arguments, none, none)
            with pytest.raises(RuntimeError, match=GENERATOR) as raised:
                function(*arguments, torch.Generator(), none)
            assert isinstance(raised.value, ValueError)
        for function in (interface._flash_attn_backward, interface._flash_attn_varlen_backward):
            with pytest.raises(NotImplementedError, match="there is no backward yet"):
                function(*dense)
