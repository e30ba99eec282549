"""S_dmask, which flash-attn's tests read: what the softmax adds up, and by its sign which weights dropout drops.

flash-attn writes it from within its kernel, where a weight is still relative to the maximum of the key blocks so far,
taken from the last block on. Its readers therefore ask _get_block_size_n for the size of these blocks. Ours says that
all keys are one block, so that weights are relative to the final maximum of their row: +-exp(s - m), negative where
dropped and 0 where masked. A second pass in operations of torch makes it, in memory for all pairs; the kernels have
nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport._attention import dropout_mask

ONE_BLOCK = 1 << 30
_MULTIPLE = 128  # of both lengths, but not in AMD's build


def shape_of(batch: int, heads: int, q_len: int, kv_len: int) -> tuple[int, int, int, int]:
    """The shape of S_dmask."""
    if torch.version.hip is not None:
        return batch, heads, q_len, kv_len
    return batch, heads, -(-q_len // _MULTIPLE) * _MULTIPLE, -(-kv_len // _MULTIPLE) * _MULTIPLE


def dense(
    q: Any, k: Any, rng_state: Any, dropout_p: float, scale: float, window: tuple[int, int], alibi_slopes: Any,
    q_lens: Any = None, kv_lens: Any = None,
) -> Any:  # fmt: skip
    """S_dmask [B, Hq, Sq, Sk], both lengths rounded up, of q [B, Sq, Hq, D] and k [B, Sk, Hkv, D].

    ``q_lens`` and ``kv_lens`` [B] are the tokens in use.
    """
    batch, q_len, heads, _ = q.shape
    kv_len, group = k.shape[1], heads // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float().repeat_interleave(group, 2)) * scale
    rows = torch.arange(q_len, device=q.device)[:, None]
    keys = torch.arange(kv_len, device=q.device)
    if q_lens is None:
        position = rows + kv_len - q_len
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    else:
        position = rows + (kv_lens - q_lens)[:, None, None, None]
        seen = (rows < q_lens[:, None, None, None]) & (keys < kv_lens[:, None, None, None])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(-1, heads, 1, 1) * (position - keys).abs()
    left, right = window
    if left >= 0:
        seen = seen & (keys >= position - left)
    if right >= 0:
        seen = seen & (keys <= position + right)
    scores = scores.masked_fill(~seen, -torch.inf)
    maximum = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores - maximum).to(q.dtype)
    kept = dropout_mask((batch, heads, q_len, kv_len), rng_state, dropout_p).bool()
    result = q.new_zeros(shape_of(batch, heads, q_len, kv_len))
    result[:, :, :q_len, :kv_len] = torch.where(kept, weights, -weights)
    return result


def packed(
    q: Any, k: Any, rng_state: Any, dropout_p: float, scale: float, window: tuple[int, int], alibi_slopes: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, seqused_k: Any, leftpad_k: Any,
) -> Any:  # fmt: skip
    """S_dmask [B, Hq, max_q, max_k], both rounded up, of q [Tq, Hq, D] and k [Tk, Hkv, D].

    Keys of a sequence count from the first one after its ``leftpad_k``, as those of the output and of dropout do.
    """
    firsts, kv_lens = cu_seqlens_k[:-1], cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if leftpad_k is not None:
        firsts, kv_lens = firsts + leftpad_k, kv_lens - leftpad_k
    return dense(
        _rows(q, cu_seqlens_q[:-1], max_seqlen_q), _rows(k, firsts, max_seqlen_k), rng_state, dropout_p, scale, window,
        alibi_slopes, cu_seqlens_q.diff(), kv_lens,
    )  # fmt: skip


def _rows(x: Any, firsts: Any, longest: int) -> Any:
    """Packed sequences [T, ...] one below the other [B, longest, ...]; rows past a sequence are those of any."""
    rows = firsts[:, None] + torch.arange(longest, device=x.device)
    return x[rows.clamp(max=max(0, x.shape[0] - 1)).long()]
