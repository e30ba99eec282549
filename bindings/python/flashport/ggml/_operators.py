"""ggml's attention: FLASH_ATTN_EXT with its four inputs, and the operation of a mixed cache with six."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from flashport import _attention, _mixed, arrays, decode, devices
from flashport.ggml import _layout
from flashport.ggml._tensor import Tensor, library
from flashport.typing import StreamLike

_MOST_DECODE_TOKENS = 16


def slopes(num_heads: int, max_bias: float) -> list[float]:
    """What ggml multiplies the mask of each query head by: ALiBi's slopes, as ``mask_slopes`` of decode takes them.

    Args:
        num_heads: Query heads.
        max_bias: The operation's parameter; 0 is off, and every slope is then 1.

    Returns:
        ``num_heads`` numbers.

    Raises:
        ValueError: No head, or a ``max_bias`` that is negative or no finite number.

    Source:
        bindings/python/flashport/ggml/_layout.py; the rule is that of ggml's soft_max_ext and flash_attn_ext.
    """
    if num_heads < 1:
        raise ValueError(f"ggml.slopes: num_heads must be at least 1, got {num_heads}")
    if not 0 <= max_bias < float("inf"):
        raise ValueError(f"ggml.slopes: max_bias must be 0 or more, and finite, got {max_bias}")
    return _layout.slopes(num_heads, max_bias)


def flash_attn_ext(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
    stream: StreamLike | None = None,
) -> Tensor:
    """ggml_flash_attn_ext: softmax(softcap(scale * q k^T) + slope * mask) v.

    Query head h reads key-value head h // (heads of q / heads of k). The mask alone decides what a query sees; without
    one it sees every key. Up to 16 tokens run the kernels of :func:`flashport.flash_decode`, more those of
    :func:`flashport.attention`. docs/ggml.md says to what type queries of f32 are rounded.

    Args:
        q: ne (D, n_tokens, n_heads, batch), f32, f16 or bf16, any strides but nb[0].
        k: ne (D, n_kv, n_kv_heads, batch), any type of :class:`Tensor` that a kernel reads, any strides but nb[0].
        v: As ``k`` with its own D; not the transposed cache that ggml keeps where flash attention is off.
        mask: ne (n_kv, n_tokens or more, 1 or n_heads, 1 or batch), f16 or f32; -inf hides a key.
        scale: Factor on the products; default 1 / sqrt(D).
        max_bias: ALiBi's, as in :func:`slopes`; needs a mask. Above 16 tokens a mask for each head is made in memory.
        logit_softcap: Scores become cap * tanh(score / cap); 0 is off.
        sinks: ne (n_heads), f32, a logit of each head that joins the softmax's denominator.
        stream: As in :func:`flashport.flash_decode`.

    Returns:
        ne (D of v, n_heads, n_tokens, batch), f32: heads and tokens are swapped against ``q``.

    Raises:
        ValueError: Extents or strides that do not fit; the text names the operand.
        TypeError: An operand that is no :class:`Tensor`, or of a type that it must not have.
        NotImplementedError: No kernel of the device's target serves the call.

    Source:
        bindings/python/flashport/ggml/_operators.py; the signature is that of ggml_flash_attn_ext.
    """
    given = {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks}
    return _Call("flash_attn_ext", given, scale, max_bias, logit_softcap, stream).run()


def mixed_attention(
    q: Tensor,
    k_hot: Tensor,
    v_hot: Tensor,
    mask: Tensor | None,
    k_quant: Tensor,
    v_quant: Tensor,
    *,
    scale: float | None = None,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    sinks: Tensor | None = None,
    stream: StreamLike | None = None,
) -> Tensor:
    """The same over a mixed cache: one softmax over quantised older keys and hot newer ones.

    Up to 16 tokens run :func:`flashport.flash_decode_segments`, which reads both parts in their own types. More tokens
    run :func:`flashport.attention` over each part, and the parts are merged by their lse.

    Args:
        q: As in :func:`flash_attn_ext`.
        k_hot: As k of :func:`flash_attn_ext`, the newer keys.
        v_hot: As ``k_hot`` with its own D.
        mask: As in :func:`flash_attn_ext`, over all keys in the order of the sequence: quantised ones first.
        k_quant: The older keys, of any type, with the heads and D of ``k_hot``.
        v_quant: The older values.
        scale, max_bias, logit_softcap, sinks, stream: As in :func:`flash_attn_ext`.

    Returns:
        As :func:`flash_attn_ext`.

    Raises:
        ValueError, TypeError, NotImplementedError: As :func:`flash_attn_ext`.

    Source:
        bindings/python/flashport/ggml/_operators.py.
    """
    given = {"q": q, "k": k_hot, "v": v_hot, "mask": mask, "sinks": sinks, "k_quant": k_quant, "v_quant": v_quant}
    return _Call("mixed_attention", given, scale, max_bias, logit_softcap, stream).run()


_NAMES = {"mixed_attention": {"k": "k_hot", "v": "v_hot"}}  # of roles, where arguments have others


class _Call:
    """One call, checked."""

    def __init__(
        self,
        function: str,
        given: dict[str, Tensor | None],
        scale: float | None,
        max_bias: float,
        logit_softcap: float,
        stream: StreamLike | None,
    ) -> None:
        self.function, self.names = function, _NAMES.get(function, {})
        self.options: dict[str, Any] = {"softmax_scale": scale, "softcap": logit_softcap, "stream": stream}
        self.max_bias = max_bias
        needed = [role for role in given if role not in ("mask", "sinks")]
        for role, tensor in given.items():
            if not isinstance(tensor, Tensor) and (tensor is not None or role in needed):
                self._fail(role, f"a ggml.Tensor, got {type(tensor).__name__}", TypeError)
        tensors = {role: tensor for role, tensor in given.items() if tensor is not None}
        found = _layout.misfit({role: tensor.ne for role, tensor in tensors.items()})
        if found is not None:
            self._fail(found[0], f"{found[1]}, got ne {list(tensors[found[0]].ne)}")
        allowed = {"q": ("f32", "f16", "bf16"), "mask": ("f16", "f32"), "sinks": ("f32",)}
        for role, tensor in tensors.items():
            if tensor.type not in allowed.get(role, (tensor.type,)):
                self._fail(role, f"the type {' or '.join(allowed[role])}, got {tensor.type}", TypeError)
            dense = _layout.dense_strides(tensor.ne, *tensor.block)[0]
            if tensor.nb[0] != dense:
                self._fail(
                    role, f"nb[0] {dense}, rows whose elements are neighbours, got nb {list(tensor.nb)}: copy it into "
                    "such rows first, as ggml_cont does"
                )  # fmt: skip
        if max_bias < 0 or (max_bias > 0 and "mask" not in tensors):
            raise ValueError(
                f"ggml.{function}: max_bias must be 0, or more where there is a mask for its slopes, got {max_bias}"
            )
        self.tensors = tensors
        self.xp = library(tensors["q"].data)
        for role, tensor in tensors.items():
            if library(tensor.data) is not self.xp:
                got = library(tensor.data).__name__
                self._fail(role, f"memory of the library of q, {self.xp.__name__}, got {got}", TypeError)

    def _fail(self, role: str, problem: str, kind: type[Exception] = ValueError) -> NoReturn:
        raise kind(f"ggml.{self.function}: {self.names.get(role, role)} must have {problem}")

    def run(self) -> Tensor:
        """The result."""
        tokens = self.tensors["q"].ne[1]
        if "sinks" in self.tensors:
            self.options["sinks"] = self.tensors["sinks"].array().reshape(-1)
        out = self._decode() if tokens <= _MOST_DECODE_TOKENS else self._attention()
        return Tensor.of(self._cast(out, "float32"))

    def _rows(self, role: str) -> Any:
        """(batch, tokens, heads, row) of an operand."""
        return self.tensors[role].array().swapaxes(1, 2)

    def _cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.xp, dtype)) if self._is_torch else x.astype(dtype, copy=False)

    @property
    def _is_torch(self) -> bool:
        return bool(self.xp.__name__ == "torch")

    @property
    def _is_cpu(self) -> bool:
        data = self.tensors["q"].data
        return bool(data.device.type == "cpu" if self._is_torch else self.xp.__name__ == "numpy")

    def _new(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        q = self.tensors["q"].data
        if self._is_torch:
            return self.xp.full(shape, value, dtype=getattr(self.xp, dtype), device=q.device)
        return self.xp.full(shape, value, dtype)

    def _queries(self, in_fp32: bool) -> Any:
        """(batch, tokens, heads, head dim) in the type that is computed in."""
        q = self._rows("q")
        if self.tensors["q"].type != "f32" or (in_fp32 and self._is_cpu):
            return q
        keys = [tensor.type for role, tensor in self.tensors.items() if role[0] in "kv"]
        return self._cast(q, "bfloat16" if "bf16" in keys else "float16")

    def _mask(self) -> Any:
        """(batch or 1, heads or 1, tokens, keys), without padded tokens; None without."""
        mask = self.tensors.get("mask")
        return None if mask is None else mask.array()[:, :, : self.tensors["q"].ne[1]]

    def _slopes(self) -> Any:
        """(heads) fp32, or None where all are 1."""
        if self.max_bias == 0:
            return None
        values = slopes(self.tensors["q"].ne[2], self.max_bias)
        if self._is_torch:
            return self.xp.tensor(values, dtype=self.xp.float32, device=self.tensors["q"].data.device)
        return self.xp.asarray(values, "float32")

    def _decode(self) -> Any:
        q, mask = self._queries(in_fp32=True), self._mask()
        batch, tokens, heads, _ = q.shape
        parts = [("k_quant", "v_quant"), ("k", "v")] if "k_quant" in self.tensors else [("k", "v")]
        segments = [self._segment(k, v) for k, v in parts if self.tensors[k].ne[1] > 0]
        if mask is None and tokens > 1:  # decode's own rule is causal
            keys = sum(self.tensors[k].ne[1] for k, _ in parts)
            mask = self._new((1, 1, tokens, keys), 0.0, "float16")
        out = arrays.new_array(
            f"ggml.{self.function}", "q", q, (batch, tokens, heads, self.tensors["v"].ne[0]), "float32"
        )
        _mixed.flash_decode_segments(q, segments, mask=mask, mask_slopes=self._slopes(), out=out, **self.options)
        return out

    def _segment(self, k: str, v: str) -> _mixed.KvSegment:
        return _mixed.KvSegment(
            self._rows(k),
            self._rows(v),
            k_format=self.tensors[k].format,
            v_format=self.tensors[v].format,
        )

    def _attention(self) -> Any:
        mask, own_slopes = self._mask(), self._slopes()
        if own_slopes is not None:
            mask = self._cast(mask, "float32") * own_slopes[:, None, None]
        older = self.tensors["k_quant"].ne[1] if "k_quant" in self.tensors else 0
        parts = [("k_quant", "v_quant", slice(0, older)), ("k", "v", slice(older, None))]
        parts = [part for part in parts if part[0] in self.tensors and self.tensors[part[0]].ne[1] > 0]
        q = self._queries(in_fp32=all(self._attends_in_fp32(k, v) for k, v, _ in parts))
        if mask is not None and mask.dtype != q.dtype:
            mask = self._cast(mask, "float32")
        found: list[Any] = []
        for k, v, columns in parts:
            found.append(self._attend(q, k, v, None if mask is None else mask[..., columns], len(parts) > 1))
            self.options.pop("sinks", None)  # a logit that one part has
        if len(found) == 1:
            return found[0]
        (o_a, lse_a), (o_b, lse_b) = ((o, arrays.contiguous(lse.swapaxes(1, 2))) for o, lse in found)
        return decode.merge_state(o_a, lse_a, o_b, lse_b, stream=self.options["stream"])[0]

    def _attends_in_fp32(self, k: str, v: str) -> bool:
        keys, values = self.tensors[k], self.tensors[v]
        return _attends_in_fp32(keys.format, values.format, keys.ne[0], values.ne[0])

    def _attend(self, q: Any, k: str, v: str, mask: Any, return_lse: bool) -> Any:
        attend: Any = _attention.attention
        return attend(
            q, self._rows(k), self._rows(v), k_format=self.tensors[k].format, v_format=self.tensors[v].format,
            bias=mask, return_lse=return_lse, **self.options,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _attends_in_fp32(k_format: str, v_format: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether attention on a CPU takes fp32 queries beside such keys."""
    return bool(
        devices.supports(
            "attention", target="cpu", dtype="float32", head_dim=head_dim, head_dim_v=head_dim_v, bias=True,
            k_format=k_format, v_format=v_format,
        )
    )  # fmt: skip
