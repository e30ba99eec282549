"""torch.library operators of the gated delta rule, with fake kernels; :mod:`flashport.torch.decode` has decode's.

While torch compiles, traces or transforms a program, the functions below stand in for those of the same names in the
compiled half and take the same arguments by position. Their callers allocate what a call returns, so the operators
return nothing and declare all that a call may write, the pool of states also where ``update_state`` is False.
"""

from __future__ import annotations

from typing import Any

from flashport.torch.library import register, writes_nothing_else

_UPDATE = (
    "Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? A_log, Tensor? dt_bias, Tensor(a!)? state, "
    "Tensor? state_indices, float? scale, float? softplus_beta, float? softplus_threshold, float? lower_bound, "
    "bool use_qk_l2norm, bool is_kda, str? head_map, str? state_layout, bool update_state, Tensor? cu_seqlens, "
    "Tensor(b!)? intermediate_states, Tensor? intermediate_indices, Tensor? parent_tokens, Tensor? g, Tensor? gk, "
    "Tensor? gv, Tensor? beta, bool allow_neg_eigval, Tensor(c!)? final_states, Tensor(d!) out"
)
_PACKED_DECODE = (
    "Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) initial_state, "
    "Tensor ssm_state_indices, float? scale, bool use_qk_l2norm_in_kernel, str state_layout, Tensor(b!) out"
)
_CHUNK = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!)? state, Tensor? state_indices, float? scale, "
    "bool use_qk_l2norm, bool beta_sigmoid, bool allow_neg_eigval, Tensor? A_log, Tensor? dt_bias, str? head_map, "
    "str? state_layout, bool update_state, Tensor? cu_seqlens, Tensor(b!)? final_states, Tensor(c!)? chunk_states, "
    "Tensor(d!)? workspace, Tensor(e!) out"
)


def _define(name: str, arguments: str) -> Any:
    """Registers the operator, which has no ``stream``; gives the function that takes it and returns ``out``."""
    operator = register(name, f"({arguments}) -> ()", writes_nothing_else)

    def run(*given: Any) -> Any:
        *passed, out, stream = given
        operator(stream, *passed, out)
        return out

    return run


gated_delta_update = _define("gated_delta_update", _UPDATE)
gated_delta_packed_decode = _define("gated_delta_packed_decode", _PACKED_DECODE)
gated_delta_chunk = _define("gated_delta_chunk", _CHUNK)
