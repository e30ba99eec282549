"""Types of the compiled half. Arrays are anything that speaks DLPack; arguments of operations go by position, those of
the gated delta rule behind ``out`` also by keyword.
"""

from collections.abc import Sequence
from typing import Any

class DeviceArray:
    """A contiguous, uninitialised array on a device such as "cpu", "cuda:0" or "hip:0"; speaks DLPack."""

    def __init__(self, shape: Sequence[int], dtype: str, device: str = "cpu") -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def reshape(self, shape: Sequence[int]) -> DeviceArray: ...
    def copy_from(self, array: Any) -> None: ...
    def copy_to(self, array: Any) -> None: ...
    def fill_zero(self) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: Any = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class DeviceProperties:
    """A device that a backend found."""

    @property
    def device(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

class BackendStatus:
    """A backend of this build, or why it is not available."""

    @property
    def name(self) -> str: ...
    @property
    def available(self) -> bool: ...
    @property
    def detail(self) -> str: ...
    @property
    def targets(self) -> list[str]: ...
    @property
    def devices(self) -> list[DeviceProperties]: ...

def version() -> str: ...
def backends() -> list[BackendStatus]: ...
def kernel_keys(target: str) -> list[str]: ...
def set_multiprocessor_limit(count: int) -> None: ...
def synchronize(device: str, stream: int = 0) -> None: ...
def read_memory(array: Any, stream: Any = None) -> None: ...
def num_splits_heuristic(batch_nheads_mblocks: int, num_sms: int, num_n_blocks: int, max_splits: int, /) -> int: ...
def supports(
    target: str, q_dtype: str, kv: str, head_dim_qk: int, head_dim_v: int, group_size: int, q_len: int, /
) -> tuple[bool, str]: ...
def which_kernel(
    target: str, q_dtype: str, kv: str, head_dim_qk: int, head_dim_v: int, group_size: int, q_len: int, /
) -> str: ...
def supports_gated_delta(
    target: str,
    operation: str,
    q_dtype: str,
    state_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    state_layout: str,
    gate: str,
    /,
) -> tuple[bool, str]: ...
def which_gated_delta_kernel(
    target: str,
    operation: str,
    q_dtype: str,
    state_dtype: str,
    head_dim_k: int,
    head_dim_v: int,
    state_layout: str,
    gate: str,
    /,
) -> str: ...
def flash_decode(*arguments: Any) -> Any: ...
def decode_workspace_size(*arguments: Any) -> int: ...
def flash_decode_stage1(*arguments: Any) -> None: ...
def flash_decode_stage2(*arguments: Any) -> None: ...
def append_kv(*arguments: Any) -> None: ...
def merge_state(*arguments: Any) -> tuple[Any, Any]: ...
def merge_states(*arguments: Any) -> tuple[Any, Any]: ...
def gated_delta_update(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    A_log: Any,  # noqa: N803
    dt_bias: Any,
    state: Any,
    state_indices: Any,
    out: Any,
    /,
    scale: float | None = None,
    softplus_beta: float | None = None,
    softplus_threshold: float | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm: bool | None = None,
    is_kda: bool | None = None,
    head_map: str | None = None,
    state_layout: str | None = None,
    update_state: bool | None = None,
    cu_seqlens: Any = None,
    intermediate_states: Any = None,
    intermediate_indices: Any = None,
    parent_tokens: Any = None,
    stream: Any = None,
    g: Any = None,
    gk: Any = None,
    gv: Any = None,
    beta: Any = None,
    allow_neg_eigval: bool | None = None,
    final_states: Any = None,
) -> None: ...
def gated_delta_chunk(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    state_indices: Any,
    out: Any,
    /,
    scale: float | None = None,
    use_qk_l2norm: bool | None = None,
    beta_sigmoid: bool | None = None,
    allow_neg_eigval: bool | None = None,
    A_log: Any = None,  # noqa: N803
    dt_bias: Any = None,
    head_map: str | None = None,
    state_layout: str | None = None,
    update_state: bool | None = None,
    cu_seqlens: Any = None,
    final_states: Any = None,
    chunk_states: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> None: ...
def gated_delta_chunk_workspace_size(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    state_indices: Any,
    out: Any,
    /,
    scale: float | None = None,
    use_qk_l2norm: bool | None = None,
    beta_sigmoid: bool | None = None,
    allow_neg_eigval: bool | None = None,
    A_log: Any = None,  # noqa: N803
    dt_bias: Any = None,
    head_map: str | None = None,
    state_layout: str | None = None,
    update_state: bool | None = None,
    cu_seqlens: Any = None,
    final_states: Any = None,
    chunk_states: Any = None,
    workspace: Any = None,
    stream: Any = None,
) -> int: ...
