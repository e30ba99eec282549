"""torch.library operators of the gated delta rule, with fake kernels; what :mod:`flashport.torch_ops` says holds here.

While torch.compile traces, the functions below stand in for those of the same names in the compiled half and take the
same arguments by position. Their callers allocate what a call returns, so the operators return nothing and declare all
that a call may write, the pool of states also where ``update_state`` is False.
"""

from __future__ import annotations

from typing import Any

import torch

from flashport import _core
from flashport.torch_ops import register, writes_nothing_else

_UPDATE = (
    "Tensor q, Tensor k, Tensor v, Tensor? a, Tensor? b, Tensor? A_log, Tensor? dt_bias, Tensor(a!)? state, "
    "Tensor? state_indices, Tensor(b!) out, float? scale=None, float? softplus_beta=None, "
    "float? softplus_threshold=None, float? lower_bound=None, bool? use_qk_l2norm=None, bool? is_kda=None, "
    "str? head_map=None, str? state_layout=None, bool? update_state=None, Tensor? cu_seqlens=None, "
    "Tensor(c!)? intermediate_states=None, Tensor? intermediate_indices=None, Tensor? parent_tokens=None"
)
_UPDATE_BEHIND = (
    "Tensor? g=None, Tensor? gk=None, Tensor? gv=None, Tensor? beta=None, bool? allow_neg_eigval=None, "
    "Tensor(d!)? final_states=None"
)
_CHUNK = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!)? state, Tensor? state_indices, Tensor(b!) out, "
    "float? scale=None, bool? use_qk_l2norm=None, bool? beta_sigmoid=None, bool? allow_neg_eigval=None, "
    "Tensor? A_log=None, Tensor? dt_bias=None, str? head_map=None, str? state_layout=None, bool? update_state=None, "
    "Tensor? cu_seqlens=None, Tensor(c!)? final_states=None, Tensor(d!)? chunk_states=None, Tensor(e!)? workspace=None"
)


def _define(name: str, before: str, behind: str = "") -> Any:
    """Registers the operator, which has no ``stream`` between its arguments; gives the function that takes it."""
    compiled, place = getattr(_core, name), before.count(",") + 1

    def kernel(*given: Any) -> None:
        compiled(*given[:place], *([None, *given[place:]] if len(given) > place else []))

    register(name, f"({before}{', ' if behind else ''}{behind}) -> ()", kernel, writes_nothing_else)
    operator = getattr(torch.ops.flashport, name)

    def run(*given: Any) -> None:
        operator(*given[:place], *given[place + 1 :])

    return run


gated_delta_update = _define("gated_delta_update", _UPDATE, _UPDATE_BEHIND)
gated_delta_chunk = _define("gated_delta_chunk", _CHUNK)
