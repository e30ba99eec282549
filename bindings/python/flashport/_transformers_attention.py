"""What :func:`flashport.transformers.register` gives to Transformers: an attention function and its masks.

A mask is None where causality and window say everything; spans, an int32 tensor (2, B, 1, 1) with the first key of each
sequence and the end of its keys, where in addition keys at the ends do not exist; or a tensor (B or 1, Hq or 1, Sq, Sk)
of booleans, true where a query sees a key, or of numbers to add. The last form has causality and window in it.
Transformers may make masks of masks, and leaves those of four dimensions alone: so spans have as many.
"""

from __future__ import annotations

import inspect
from typing import Any

from flashport._attention import attention

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register(name: str) -> None:
    """Under ``name`` in both registries."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "register: needs a Transformers with AttentionInterface and AttentionMaskInterface; install a newer one"
        ) from error
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("register: needs a Transformers whose masks are told q_offset, which is 5.0; install it")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> Any:
    """The mask of a forward pass, under Transformers' names.

    It lets a mask be left out only where ``mask_function`` is that of the plain pattern, with a window of
    ``local_size``, and asks for all others.
    """
    import torch

    causal = allow_is_causal_skip and _is_window(local_size, config)
    full = allow_is_bidirectional_skip and local_size is None
    static = not isinstance(q_offset, torch.Tensor) and not torch.compiler.is_compiling()
    # Causality and windows go by the last key in use: a static cache has room for more keys.
    end = q_offset + q_length - kv_offset if causal else kv_length
    if static and (causal or full) and end <= kv_length:
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
        spans = _spans(attention_mask, batch_size, kv_offset, end, options.get("device", "cpu"))
        if spans is not None and (full or bool((spans[1] == end).all())):
            is_whole = end == kv_length and bool((spans[1] - spans[0] == end).all())
            return None if is_whole else spans
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **options,
    )  # fmt: skip


def _is_window(local_size: int | None, config: Any) -> bool:
    """Whether a local mask is that of a window, and not of chunks, which look alike here."""
    if local_size is None:
        return True
    return local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)


def _spans(present: Any, batch: int, kv_offset: int, end: int, device: Any) -> Any:
    """Spans of the first ``end`` keys of which ``present`` (B, tokens seen) has no gap; None if it has one."""
    import torch

    if present is None:
        return (
            torch.tensor([[0], [end]], dtype=torch.int32, device=device).expand(2, batch).contiguous()[..., None, None]
        )
    present = present[:, kv_offset : kv_offset + end]
    present = torch.nn.functional.pad(present, (0, end - present.shape[1]))  # keys that nobody has spoken of
    first = present.int().argmax(1)
    last = first + present.sum(1)
    keys = torch.arange(end, device=present.device)
    without_gap = (keys >= first[:, None]) & (keys < last[:, None])
    return torch.stack([first, last]).int()[..., None, None] if torch.equal(present, without_gap) else None


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **others: Any,
) -> tuple[Any, None]:
    """(out (B, Sq, Hq, DV), None) of query (B, Hq, Sq, D), key and value (B, Hkv, Sk, D), under Transformers' names."""
    import torch

    q, k, v = (_unit_rows(x.transpose(1, 2)) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    if dropout > 0:
        options["dropout_p"] = dropout
        options["rng_state"] = torch.randint(-(1 << 63), (1 << 63) - 1, (2,), device=q.device)
    window = _window(causal, sliding_window)
    packed: list[Any] = [others.get(name) for name in _PACKED]
    is_own_mask = attention_mask is None or attention_mask.dtype in (torch.bool, torch.int32)
    if len(q) == 1 and is_own_mask and position_bias is None and all(x is not None for x in packed):
        options |= {"cu_seqlens_q": packed[0].int(), "cu_seqlens_k": packed[1].int()}
        options |= {"max_seqlen_q": int(packed[2]), "max_seqlen_k": int(packed[3])}
        return attention(q[0], k[0], v[0], causal=causal, window=window, **options)[None], None
    is_spans = attention_mask is not None and attention_mask.dtype == torch.int32
    if is_spans and position_bias is not None:  # a bias takes no lengths beside it
        attention_mask, is_spans = _visible(attention_mask, q.shape[1], k.shape[1], causal, window), False
    if is_spans:
        first, end = attention_mask.reshape(2, -1)
        options |= {"leftpad_k": first, "seqused_k": end}
    if attention_mask is None or is_spans:
        options |= {"causal": causal, "window": window}
        bias = position_bias
    else:
        bias = _additive(attention_mask[..., : k.shape[1]], q.dtype)
        bias = bias if position_bias is None else bias + position_bias
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.to(q.dtype)
    return attention(q, k, v, bias=bias, **options), None


def _unit_rows(x: Any) -> Any:
    """``x``, or a copy where neighbours along its last axis are none in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _window(causal: bool, sliding_window: int | None) -> tuple[int, int]:
    """Transformers counts a causal window with the query's own key, and one to both sides without."""
    if sliding_window is None:
        return -1, -1
    return (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)


def _additive(mask: Any, dtype: Any) -> Any:
    """A mask of booleans as numbers to add; one of numbers as it is."""
    import torch

    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _visible(spans: Any, q_len: int, kv_len: int, causal: bool, window: tuple[int, int]) -> Any:
    """[B, 1, Sq, Sk]: which keys of spans a query sees; the last query stands at the end of its span."""
    import torch

    first, last = spans[:, :, None]
    keys = torch.arange(kv_len, device=spans.device)
    position = torch.arange(q_len, device=spans.device)[:, None] + last - q_len
    seen = (keys >= first) & (keys < last)
    left, right = window
    if left >= 0:
        seen = seen & (keys >= position - left)
    if causal or right >= 0:
        seen = seen & (keys <= position + (0 if causal else right))
    return seen.expand(-1, -1, q_len, -1)
