"""Drop-ins for flash-linear-attention (fla), under its names and signatures.

``from flashport.fla import chunk_gated_delta_rule`` in place of fla.ops.gated_delta_rule's. Tensors may be torch's,
NumPy's, CuPy's or :class:`flashport.DeviceArray`; torch is imported only by a caller that hands in its tensors. There
is no backward: an argument that asks for a gradient is refused. Arguments after ``use_qk_l2norm_in_kernel``, which
releases order differently, go by keyword. Flags may be anything that has a truth value.

fla makes all that comes in contiguous. Here arguments that are not stay as they are where kernels read their strides,
which is the usual case, and are copied else: queries, keys and values whose neighbours along the last axis lie apart,
initial states that are not contiguous each by itself, and ``cu_seqlens``, ``A_log`` and ``dt_bias``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from flashport.arrays import contiguous, contiguous_rows, contiguous_slots, new_array, new_output, rank
from flashport.gated_delta import gated_delta_chunk, gated_delta_update
from flashport.torch.gradients import refuse_gradients
from flashport.typing import Array, SupportsDLPack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        """Arguments of both functions that go by keyword."""

        use_gate_in_kernel: bool
        A_log: SupportsDLPack | None
        dt_bias: SupportsDLPack | None
        use_beta_sigmoid_in_kernel: bool
        allow_neg_eigval: bool
        state_v_first: bool
        transpose_state_layout: bool
        cu_seqlens: SupportsDLPack | None

    class _ChunkOptions(_Options, total=False):
        """What the chunked form has on top."""

        cu_seqlens_cpu: Any
        chunk_indices: Any
        chunk_size: Literal[16, 32, 64]
        cp_context: None


__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]


@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_ChunkOptions],
) -> tuple[Array, None]: ...  # fmt: skip
@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, *, output_final_state: Literal[True],
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_ChunkOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack,
    scale: float | None, initial_state: SupportsDLPack | None, output_final_state: Literal[True],
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_ChunkOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def chunk_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack, beta: SupportsDLPack,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_ChunkOptions],
) -> tuple[Array, Array | None]: ...  # fmt: skip
def chunk_gated_delta_rule(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    scale: float | None = None,
    initial_state: SupportsDLPack | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: SupportsDLPack | None = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Array, Array | None]:
    """:func:`flashport.gated_delta_chunk` under fla's names.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_chunk`.

    Args:
        q: (B, T, H, K) fp16, bf16 or, on CPUs, fp32; any strides.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the gate, or with ``use_gate_in_kernel`` its input; fp32, fp16 or bf16.
        beta: (B, T, HV), rate at which the state learns; fp32, fp16 or bf16.
        scale: Factor on the queries, above 0; default K ** -0.5.
        initial_state: (N, HV, K, V), with ``state_v_first`` (N, HV, V, K); fp32, bf16 or fp16; not written. Default:
            zeros.
        output_final_state: Give the states that sequences end with.
        use_qk_l2norm_in_kernel: Normalise q and k.
        use_beta_sigmoid_in_kernel: ``beta`` is a logit.
        allow_neg_eigval: Twice its sigmoid; needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: States are (N, HV, V, K).
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        cu_seqlens_cpu: Taken and not used: nothing is needed of it.
        chunk_indices: Taken and not used, as ``cu_seqlens_cpu``.
        cp_context: Must be None.
        kwargs: ``use_gate_in_kernel`` with ``A_log`` (HV) and ``dt_bias`` (HV, or None): g is -exp(A_log) *
            softplus(g + dt_bias). ``chunk_size``: 16, 32 or 64, which give the same result. ``transpose_state_layout``:
            the older name of ``state_v_first``.

    Returns:
        (o, final_state): o (B, T, HV, V) of the type of ``q``; final_state fp32 in the shape of ``initial_state``, of a
        sequence without tokens its initial state, or None where it was not asked for.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.gated_delta_chunk`, whose names the texts use.
            ValueError also for another number of initial states than sequences, ``use_gate_in_kernel`` without
            ``A_log``, and another ``chunk_size``; TypeError for a keyword that is not named above.
        DeprecationWarning: ``head_first``, as in fla.
        NotImplementedError: ``cp_context``; a tensor that asks for a gradient while torch records them; and as
            :func:`flashport.gated_delta_chunk`.

    Source:
        bindings/python/flashport/fla.py over that function; the signature is fla-core 0.6.0's, from
        fla/ops/gated_delta_rule/chunk.py.
    """
    name = "chunk_gated_delta_rule"
    if cp_context is not None:
        raise NotImplementedError(f"{name}: cp_context must be None; a sequence lies on one device")
    if "head_first" in kwargs:
        raise DeprecationWarning(f"{name}: head_first was removed; pass (batch, tokens, heads, ...)")
    state_v_first = _state_v_first(name, state_v_first, kwargs)
    chunk_size = kwargs.pop("chunk_size", 64)
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"{name}: chunk_size must be 16, 32 or 64, got {chunk_size}")
    uses_gate = kwargs.pop("use_gate_in_kernel", False)
    gate = {key: kwargs.pop(key, None) for key in ("A_log", "dt_bias")}
    if kwargs:
        raise TypeError(f"{name}: has no argument {', '.join(sorted(kwargs))}")
    if uses_gate and gate["A_log"] is None:
        raise ValueError(f"{name}: use_gate_in_kernel needs A_log")
    if not uses_gate:
        gate = dict.fromkeys(gate)
    refuse_gradients(name, "q k v g beta initial_state A_log dt_bias", q, k, v, g, beta, initial_state, *gate.values())
    q, k, v, cu_seqlens = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous(cu_seqlens)
    final_state = _final_state(name, q, v, initial_state, output_final_state, state_v_first, cu_seqlens)
    out = gated_delta_chunk(
        q, k, v, g, beta, contiguous_slots(initial_state), scale=scale, use_qk_l2norm=bool(use_qk_l2norm_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel), allow_neg_eigval=bool(allow_neg_eigval),
        A_log=contiguous(gate["A_log"]), dt_bias=contiguous(gate["dt_bias"]),
        state_layout="vk" if state_v_first else "kv", update_state=False, cu_seqlens=cu_seqlens,
        final_states=final_state, out=new_output(q, v, name),
    )  # fmt: skip
    return out, final_state


@overload
def fused_recurrent_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack | None = None, gk: SupportsDLPack | None = None,
    gv: SupportsDLPack | None = None, beta: SupportsDLPack | None = None,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, output_final_state: Literal[False] = False,
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_Options],
) -> tuple[Array, None]: ...  # fmt: skip
@overload
def fused_recurrent_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack | None = None, gk: SupportsDLPack | None = None,
    gv: SupportsDLPack | None = None, beta: SupportsDLPack | None = None,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, *, output_final_state: Literal[True],
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_Options],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def fused_recurrent_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack | None, gk: SupportsDLPack | None,
    gv: SupportsDLPack | None, beta: SupportsDLPack | None,
    scale: float | None, initial_state: SupportsDLPack | None, output_final_state: Literal[True],
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_Options],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def fused_recurrent_gated_delta_rule(
    q: Array, k: SupportsDLPack, v: SupportsDLPack, g: SupportsDLPack | None = None, gk: SupportsDLPack | None = None,
    gv: SupportsDLPack | None = None, beta: SupportsDLPack | None = None,
    scale: float | None = None, initial_state: SupportsDLPack | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, **options: Unpack[_Options],
) -> tuple[Array, Array | None]: ...  # fmt: skip
def fused_recurrent_gated_delta_rule(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack | None = None,
    gk: SupportsDLPack | None = None,
    gv: SupportsDLPack | None = None,
    beta: SupportsDLPack | None = None,
    scale: float | None = None,
    initial_state: SupportsDLPack | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    A_log: SupportsDLPack | None = None,  # noqa: N803 - the field's name
    dt_bias: SupportsDLPack | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: SupportsDLPack | None = None,
    **kwargs: Any,
) -> tuple[Array, Array | None]:
    """:func:`flashport.gated_delta_update` under fla's names, with gates and rates as they are given.

    Symbols, and what is not said here, are those of :func:`flashport.gated_delta_update`.

    Args:
        q: (B, T, H, K) fp16, bf16 or fp32; any strides.
        k: (B, T, H, K), as ``q``.
        v: (B, T, HV, V), as ``q``.
        g: (B, T, HV), logarithm of the gate, or with ``use_gate_in_kernel`` its input; fp32, fp16 or bf16, any strides,
            as are the other gates. Default: the state does not decay.
        gk: (B, T, HV, K), logarithms of gates on the rows of a state, on top of ``g``.
        gv: (B, T, HV, V), logarithms of gates on the columns of a state, on top of ``g`` and ``gk``.
        beta: (B, T, HV), rate at which the state learns, or (B, T, HV, V), of each column. Default: 1.
        scale: Factor on the queries, above 0; default K ** -0.5.
        initial_state: (N, HV, K, V), with ``state_v_first`` (N, HV, V, K); fp32, bf16 or fp16; not written. Default:
            zeros.
        output_final_state: Give the states that sequences end with.
        use_qk_l2norm_in_kernel: Normalise q and k.
        use_gate_in_kernel: The logarithm of the gate is -exp(A_log) * softplus(g + dt_bias).
        A_log: HV elements, fp32, fp16 or bf16. Not read without ``use_gate_in_kernel``.
        dt_bias: HV elements, fp32, fp16 or bf16; default zeros. Not read without ``use_gate_in_kernel``.
        use_beta_sigmoid_in_kernel: ``beta`` is a logit, which must be given (fla takes 1 for it).
        allow_neg_eigval: Twice its sigmoid; needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: States are (N, HV, V, K).
        cu_seqlens: (N + 1) int32 or int64, with B = 1.
        kwargs: ``transpose_state_layout``, the older name of ``state_v_first``.

    Returns:
        (o, final_state): o (B, T, HV, V) of the type of ``v``; final_state fp32 in the shape of ``initial_state``, of a
        sequence without tokens its initial state, or None where it was not asked for.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`flashport.gated_delta_update`, whose names the texts use.
            ValueError also for another number of initial states than sequences, ``use_gate_in_kernel`` without ``g``
            or ``A_log``, ``use_beta_sigmoid_in_kernel`` without ``beta``, and ``allow_neg_eigval`` without that;
            TypeError for a keyword that is not named above.
        NotImplementedError: A tensor that asks for a gradient while torch records them; and as
            :func:`flashport.gated_delta_update`.

    Source:
        bindings/python/flashport/fla.py over that function; the signature is fla-core 0.6.0's, from
        fla/ops/gated_delta_rule/fused_recurrent.py.
    """
    name = "fused_recurrent_gated_delta_rule"
    state_v_first = _state_v_first(name, state_v_first, kwargs)
    if kwargs:
        raise TypeError(f"{name}: has no argument {', '.join(sorted(kwargs))}")
    if use_gate_in_kernel and (g is None or A_log is None):
        raise ValueError(f"{name}: use_gate_in_kernel needs {'A_log' if A_log is None else 'g, the input of the gate'}")
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError(f"{name}: use_beta_sigmoid_in_kernel needs beta, whose sigmoid it takes")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{name}: allow_neg_eigval needs use_beta_sigmoid_in_kernel, whose result it doubles")
    if not use_gate_in_kernel:
        A_log = dt_bias = None  # noqa: N806
    refuse_gradients(
        name, "q k v g gk gv beta initial_state A_log dt_bias",
        q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias,
    )  # fmt: skip
    q, k, v, cu_seqlens = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous(cu_seqlens)
    final_state = _final_state(name, q, v, initial_state, output_final_state, state_v_first, cu_seqlens)
    a, g = (g, None) if use_gate_in_kernel else (None, g)
    b, beta = (beta, None) if use_beta_sigmoid_in_kernel else (None, beta)
    out = gated_delta_update(
        q, k, v, a, b, contiguous(A_log), contiguous(dt_bias), contiguous_slots(initial_state), scale=scale,
        use_qk_l2norm=bool(use_qk_l2norm_in_kernel), state_layout="vk" if state_v_first else "kv", update_state=False,
        cu_seqlens=cu_seqlens, g=g, gk=gk, gv=gv, beta=beta, allow_neg_eigval=bool(allow_neg_eigval),
        final_states=final_state, out=new_output(q, v, name),
    )  # fmt: skip
    return out, final_state


def _final_state(
    name: str, q: Any, v: Any, initial_state: Any, wanted: bool, state_v_first: bool, cu_seqlens: Any
) -> Any:
    """An array for the final states, or None; refuses another number of initial states than sequences."""
    if rank(q) != 4 or rank(v) != 4 or (cu_seqlens is not None and rank(cu_seqlens) != 1):
        return None  # the library says what does not fit
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if rank(initial_state) == 4 and initial_state.shape[0] != count:
        raise ValueError(
            f"{name}: initial_state must have a state for each of the {count} sequences, got shape "
            f"{tuple(initial_state.shape)}"
        )
    if not wanted:
        return None
    inner = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return new_array(name, "q", q, (count, v.shape[2], *inner), "float32")


def _state_v_first(name: str, state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """``state_v_first``, or what its older name says; taken out of ``kwargs``."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{name}: state_v_first and transpose_state_layout, its older name, must not both be given")
    warnings.warn(
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=3
    )
    return bool(kwargs.pop("transpose_state_layout"))


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
