"""The classes FlashAttn*Func of flash-attn's interface, whose ``apply`` its functions call there: the forward half.

Arguments go by position, and none has a default. ``deterministic`` and ``is_grad_enabled`` are the backward's, and not
read: a call that needs a gradient raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

from flashport.flash_attn import _calls as calls
from flashport.torch.gradients import refuse_gradients


class FlashAttnFunc:
    """Attention of a dense batch."""

    @staticmethod
    def apply(
        q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any,
        softcap: float, alibi_slopes: Any, deterministic: bool, return_softmax: bool, is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_func`."""
        name = "FlashAttnFunc"
        refuse_gradients(name, "q k v", q, k, v)
        return calls.dense(
            name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        )


class FlashAttnKVPackedFunc:
    """The same of keys and values in one tensor."""

    @staticmethod
    def apply(
        q: Any, kv: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float,
        alibi_slopes: Any, deterministic: bool, return_softmax: bool, is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_kvpacked_func`."""
        name = "FlashAttnKVPackedFunc"
        refuse_gradients(name, "q kv", q, kv)
        k, v = calls.unpacked(name, "kv", kv, 2, calls.DENSE_KV)
        return calls.dense(
            name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        )


class FlashAttnQKVPackedFunc:
    """The same of queries, keys and values in one tensor."""

    @staticmethod
    def apply(
        qkv: Any, dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float,
        alibi_slopes: Any, deterministic: bool, return_softmax: bool, is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_qkvpacked_func`."""
        name = "FlashAttnQKVPackedFunc"
        refuse_gradients(name, "qkv", qkv)
        q, k, v = calls.unpacked(name, "qkv", qkv, 3, calls.DENSE_QKV)
        return calls.dense(
            name, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
        )


class FlashAttnVarlenFunc:
    """Attention of packed sequences, or of packed queries over paged keys."""

    @staticmethod
    def apply(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float,
        alibi_slopes: Any, deterministic: bool, return_softmax: bool, block_table: Any, is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_varlen_func`."""
        name = "FlashAttnVarlenFunc"
        refuse_gradients(name, "q k v", q, k, v)
        return calls.varlen(
            name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, return_softmax, block_table,
        )  # fmt: skip


class FlashAttnVarlenKVPackedFunc:
    """The same of keys and values in one tensor."""

    @staticmethod
    def apply(
        q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
        softmax_scale: float | None, causal: bool, window_size: Any, softcap: float, alibi_slopes: Any,
        deterministic: bool, return_softmax: bool, is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_varlen_kvpacked_func`."""
        name = "FlashAttnVarlenKVPackedFunc"
        refuse_gradients(name, "q kv", q, kv)
        k, v = calls.unpacked(name, "kv", kv, 2, calls.VARLEN_KV)
        return calls.varlen(
            name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, return_softmax, None,
        )  # fmt: skip


class FlashAttnVarlenQKVPackedFunc:
    """The same of queries, keys and values in one tensor."""

    @staticmethod
    def apply(
        qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float, softmax_scale: float | None, causal: bool,
        window_size: Any, softcap: float, alibi_slopes: Any, deterministic: bool, return_softmax: bool,
        is_grad_enabled: bool, /,
    ) -> Any:  # fmt: skip
        """As :func:`flashport.flash_attn.flash_attn_varlen_qkvpacked_func`."""
        name = "FlashAttnVarlenQKVPackedFunc"
        refuse_gradients(name, "qkv", qkv)
        q, k, v = calls.unpacked(name, "qkv", qkv, 3, calls.VARLEN_QKV)
        return calls.varlen(
            name, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, return_softmax, None,
        )  # fmt: skip
