"""Types of the compiled half. Operations take all arguments by position, in the order of the package's functions of the
same names.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flashport.typing import (
    Array,
    CacheFormat,
    DTypeLike,
    HeadMap,
    KvLayout,
    Operation,
    QuantisedFormat,
    StateLayout,
    StreamLike,
    SupportsDLPack,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])

class DeviceArray:
    """A contiguous, uninitialised array on a device such as "cpu", "cuda:0" or "hip:0"; speaks DLPack."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike, device: str = "cpu") -> None: ...
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
def direct(function: _Function) -> _Function: ...
def run_kernel(name: str, *arguments: Any) -> Any: ...
def backends() -> list[BackendStatus]: ...
def kernel_keys(target: str) -> list[str]: ...
def set_multiprocessor_limit(count: int) -> None: ...
def synchronize(device: str, stream: int = 0) -> None: ...
def read_memory(array: SupportsDLPack, stream: StreamLike | None = None) -> None: ...
def check_apart(
    function: str, outputs: dict[str, SupportsDLPack | None], inputs: dict[str, SupportsDLPack | None]
) -> None: ...
def tensors_form(tensors: tuple[Any, ...], /) -> bytes | None: ...
def num_splits_heuristic(batch_nheads_mblocks: int, num_SMs: int, num_n_blocks: int, max_splits: int, /) -> int: ...
def supports(operation: Operation, options: dict[str, Any], /) -> tuple[bool, str]: ...
def which_kernel(operation: Operation, options: dict[str, Any], /) -> str: ...
def explain(operation: Operation, options: dict[str, Any], /) -> tuple[str | int | bool, ...]: ...
def kv_format_blocks() -> dict[CacheFormat, tuple[int, int]]: ...
def flash_decode(
    q: Array,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    seqlens: SupportsDLPack | None,
    block_table: SupportsDLPack | None,
    token_table: SupportsDLPack | None,
    request_index: SupportsDLPack | None,
    kv_indptr: SupportsDLPack | None,
    kv_indices: SupportsDLPack | None,
    kv_last_page_len: SupportsDLPack | None,
    kv_layout: KvLayout,
    cu_seqlens_q: SupportsDLPack | None,
    max_q_len: int | None,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    tree_mask: SupportsDLPack | None,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    num_splits: int | None,
    out: Array | None,
    lse: Array | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array | tuple[Array, Array]: ...
def decode_workspace_size(
    q: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    seqlens: SupportsDLPack | None,
    block_table: SupportsDLPack | None,
    token_table: SupportsDLPack | None,
    request_index: SupportsDLPack | None,
    kv_indptr: SupportsDLPack | None,
    kv_indices: SupportsDLPack | None,
    kv_last_page_len: SupportsDLPack | None,
    kv_layout: KvLayout,
    cu_seqlens_q: SupportsDLPack | None,
    max_q_len: int | None,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    tree_mask: SupportsDLPack | None,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    num_splits: int | None,
    out: SupportsDLPack | None,
    lse: SupportsDLPack | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> int: ...
def flash_decode_segments(
    q: Array,
    segments: Sequence[tuple[Any, ...]],
    mask: SupportsDLPack | None,
    mask_slopes: SupportsDLPack | None,
    cu_seqlens_q: SupportsDLPack | None,
    max_q_len: int | None,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    by_segment: bool,
    out: Array | None,
    lse: Array | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array | tuple[Array, Array]: ...
def mixed_workspace_size(
    q: SupportsDLPack,
    segments: Sequence[tuple[Any, ...]],
    mask: SupportsDLPack | None,
    mask_slopes: SupportsDLPack | None,
    cu_seqlens_q: SupportsDLPack | None,
    max_q_len: int | None,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    by_segment: bool,
    out: SupportsDLPack | None,
    lse: SupportsDLPack | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> int: ...
def flash_decode_mixed(
    q: Array,
    k_hot: SupportsDLPack,
    v_hot: SupportsDLPack,
    mask: SupportsDLPack | None,
    k_quant: SupportsDLPack | None,
    v_quant: SupportsDLPack | None,
    hot_seqlens: SupportsDLPack | None,
    quant_seqlens: SupportsDLPack | None,
    k_quant_format: CacheFormat | None,
    v_quant_format: CacheFormat | None,
    k_quant_scale: SupportsDLPack | None,
    v_quant_scale: SupportsDLPack | None,
    kv_layout: KvLayout,
    mask_slopes: SupportsDLPack | None,
    cu_seqlens_q: SupportsDLPack | None,
    max_q_len: int | None,
    softmax_scale: float | None,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    by_segment: bool,
    out: Array | None,
    lse: Array | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array | tuple[Array, Array]: ...
def flash_decode_stage1(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    Req_to_tokens: SupportsDLPack,
    B_req_idx: SupportsDLPack,
    B_Seqlen: SupportsDLPack,
    max_len_in_batch: int,
    mid_out: SupportsDLPack,
    mid_out_logsumexp: SupportsDLPack,
    block_seq: int,
    sm_scale: float | None,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    stream: StreamLike | None,
    /,
) -> None: ...
def flash_decode_stage2(
    mid_out: SupportsDLPack,
    mid_out_logexpsum: SupportsDLPack,
    B_Seqlen: SupportsDLPack,
    Out: SupportsDLPack,
    block_seq: int,
    lse: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> None: ...
def append_kv(
    k: SupportsDLPack,
    v: SupportsDLPack,
    k_cache: SupportsDLPack,
    v_cache: SupportsDLPack,
    positions: SupportsDLPack,
    kv_layout: KvLayout,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    stream: StreamLike | None,
    /,
) -> None: ...
def quantize_kv(
    x: Array,
    format: QuantisedFormat,
    out: Array | None,
    scale: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array: ...
def dequantize_kv(
    x: Array,
    format: QuantisedFormat,
    dtype: DTypeLike | None,
    out: Array | None,
    scale: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array: ...
def merge_state(
    o_a: Array,
    lse_a: SupportsDLPack,
    o_b: SupportsDLPack,
    lse_b: SupportsDLPack,
    lse_base: float | None,
    out: Array | None,
    out_lse: Array | None,
    stream: StreamLike | None,
    /,
) -> tuple[Array, Array]: ...
def merge_states(
    o: Array,
    lse: SupportsDLPack,
    lse_base: float | None,
    out: Array | None,
    out_lse: Array | None,
    stream: StreamLike | None,
    /,
) -> tuple[Array, Array]: ...
def gated_delta_update(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    a: SupportsDLPack | None,
    b: SupportsDLPack | None,
    A_log: SupportsDLPack | None,
    dt_bias: SupportsDLPack | None,
    state: SupportsDLPack | None,
    state_indices: SupportsDLPack | None,
    scale: float | None,
    softplus_beta: float,
    softplus_threshold: float,
    lower_bound: float | None,
    use_qk_l2norm: bool,
    is_kda: bool,
    head_map: HeadMap,
    state_layout: StateLayout,
    update_state: bool,
    cu_seqlens: SupportsDLPack | None,
    intermediate_states: SupportsDLPack | None,
    intermediate_indices: SupportsDLPack | None,
    parent_tokens: SupportsDLPack | None,
    g: SupportsDLPack | None,
    gk: SupportsDLPack | None,
    gv: SupportsDLPack | None,
    beta: SupportsDLPack | None,
    allow_neg_eigval: bool,
    final_states: SupportsDLPack | None,
    out: Array | None,
    stream: StreamLike | None,
    /,
) -> Array: ...
def gated_delta_packed_decode(
    mixed_qkv: SupportsDLPack,
    a: SupportsDLPack,
    b: SupportsDLPack,
    A_log: SupportsDLPack,
    dt_bias: SupportsDLPack,
    initial_state: SupportsDLPack,
    ssm_state_indices: SupportsDLPack,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    state_layout: StateLayout,
    out: Array,
    stream: StreamLike | None,
    /,
) -> Array: ...
def gated_delta_chunk(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    state: SupportsDLPack | None,
    state_indices: SupportsDLPack | None,
    scale: float | None,
    use_qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    A_log: SupportsDLPack | None,
    dt_bias: SupportsDLPack | None,
    head_map: HeadMap,
    state_layout: StateLayout,
    update_state: bool,
    cu_seqlens: SupportsDLPack | None,
    final_states: SupportsDLPack | None,
    chunk_states: SupportsDLPack | None,
    workspace: SupportsDLPack | None,
    out: Array | None,
    stream: StreamLike | None,
    /,
) -> Array: ...
def gated_delta_chunk_workspace_size(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    g: SupportsDLPack,
    beta: SupportsDLPack,
    state: SupportsDLPack | None,
    state_indices: SupportsDLPack | None,
    scale: float | None,
    use_qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    A_log: SupportsDLPack | None,
    dt_bias: SupportsDLPack | None,
    head_map: HeadMap,
    state_layout: StateLayout,
    update_state: bool,
    cu_seqlens: SupportsDLPack | None,
    final_states: SupportsDLPack | None,
    chunk_states: SupportsDLPack | None,
    workspace: SupportsDLPack | None,
    out: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> int: ...
def attention(
    q: Array,
    k: SupportsDLPack,
    v: SupportsDLPack,
    cu_seqlens_q: SupportsDLPack | None,
    cu_seqlens_k: SupportsDLPack | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: SupportsDLPack | None,
    seqused_k: SupportsDLPack | None,
    leftpad_k: SupportsDLPack | None,
    block_table: SupportsDLPack | None,
    token_table: SupportsDLPack | None,
    request_index: SupportsDLPack | None,
    kv_indptr: SupportsDLPack | None,
    kv_indices: SupportsDLPack | None,
    kv_last_page_len: SupportsDLPack | None,
    kv_layout: KvLayout,
    k_new: SupportsDLPack | None,
    v_new: SupportsDLPack | None,
    cu_seqlens_k_new: SupportsDLPack | None,
    rotary_cos: SupportsDLPack | None,
    rotary_sin: SupportsDLPack | None,
    rotary_interleaved: bool,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    bias: SupportsDLPack | None,
    dropout_p: float,
    rng_state: SupportsDLPack | None,
    q_scale: SupportsDLPack | None,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    num_splits: int | None,
    out: Array | None,
    lse: Array | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> Array | tuple[Array, Array]: ...
def attention_workspace_size(
    q: SupportsDLPack,
    k: SupportsDLPack,
    v: SupportsDLPack,
    cu_seqlens_q: SupportsDLPack | None,
    cu_seqlens_k: SupportsDLPack | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: SupportsDLPack | None,
    seqused_k: SupportsDLPack | None,
    leftpad_k: SupportsDLPack | None,
    block_table: SupportsDLPack | None,
    token_table: SupportsDLPack | None,
    request_index: SupportsDLPack | None,
    kv_indptr: SupportsDLPack | None,
    kv_indices: SupportsDLPack | None,
    kv_last_page_len: SupportsDLPack | None,
    kv_layout: KvLayout,
    k_new: SupportsDLPack | None,
    v_new: SupportsDLPack | None,
    cu_seqlens_k_new: SupportsDLPack | None,
    rotary_cos: SupportsDLPack | None,
    rotary_sin: SupportsDLPack | None,
    rotary_interleaved: bool,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: SupportsDLPack | None,
    sinks: SupportsDLPack | None,
    bias: SupportsDLPack | None,
    dropout_p: float,
    rng_state: SupportsDLPack | None,
    q_scale: SupportsDLPack | None,
    k_scale: SupportsDLPack | None,
    v_scale: SupportsDLPack | None,
    k_format: CacheFormat | None,
    v_format: CacheFormat | None,
    num_splits: int | None,
    out: SupportsDLPack | None,
    lse: SupportsDLPack | None,
    return_lse: bool,
    workspace: SupportsDLPack | None,
    stream: StreamLike | None,
    /,
) -> int: ...
def dropout_mask(
    shape: Sequence[int],
    rng_state: Array,
    dropout_p: float,
    mask: Array | None,
    stream: StreamLike | None,
    /,
) -> Array: ...
