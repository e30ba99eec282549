"""flashport: portable attention kernels for LLM serving, on AMD GPUs, NVIDIA GPUs and the CPU.

Arrays come in through DLPack, so NumPy, PyTorch, CuPy and JAX arrays all work, and results have the type of the query.
Kernels run on the current stream of the query's library and device, and a call returns when they are launched; only
with GPU arrays of other libraries than PyTorch and CuPy, whose memory might be given away too early, it waits. Wrong
arguments raise ``ValueError`` or ``TypeError`` with a text that names the argument, what was expected and what came; a
request that no kernel serves raises ``NotImplementedError`` with the reason that :func:`supports`
gives.
"""

import os as _os

from flashport._attention import attention, attention_workspace_size, dropout_mask
from flashport._core import DeviceArray
from flashport._explain import (
    AttentionSchedule,
    DecodeSchedule,
    GatedDeltaChunkSchedule,
    GatedDeltaSchedule,
    LaunchSchedule,
    explain,
)
from flashport._mixed import (
    KvSegment,
    flash_decode_mixed,
    flash_decode_segments,
    mixed_workspace_size,
    spill_kv,
)
from flashport._mixed_cache import MixedKVCache
from flashport._quantize import dequantize_kv, quantize_kv
from flashport._shims import InstalledShims, install_shims
from flashport.cascade import CascadeLevel, cascade_decode, cascade_workspace_size
from flashport.decode import (
    append_kv,
    decode_workspace_size,
    flash_decode,
    flash_decode_stage1,
    flash_decode_stage2,
    merge_state,
    merge_states,
    num_splits_heuristic,
)
from flashport.devices import (
    Support,
    backends,
    supports,
    version,
    which_kernel,
)
from flashport.gated_delta import gated_delta_chunk, gated_delta_chunk_workspace_size, gated_delta_update

__version__ = version()

__all__ = [
    "AttentionSchedule",
    "CascadeLevel",
    "DecodeSchedule",
    "DeviceArray",
    "GatedDeltaChunkSchedule",
    "GatedDeltaSchedule",
    "InstalledShims",
    "KvSegment",
    "LaunchSchedule",
    "MixedKVCache",
    "Support",
    "append_kv",
    "attention",
    "attention_workspace_size",
    "backends",
    "cascade_decode",
    "cascade_workspace_size",
    "decode_workspace_size",
    "dequantize_kv",
    "dropout_mask",
    "explain",
    "flash_decode",
    "flash_decode_mixed",
    "flash_decode_segments",
    "flash_decode_stage1",
    "flash_decode_stage2",
    "gated_delta_chunk",
    "gated_delta_chunk_workspace_size",
    "gated_delta_update",
    "install_shims",
    "merge_state",
    "merge_states",
    "mixed_workspace_size",
    "num_splits_heuristic",
    "quantize_kv",
    "spill_kv",
    "supports",
    "version",
    "which_kernel",
]

if _os.environ.get("FLASHPORT_TRACE"):
    from flashport.trace import _record

    _record.start_from_environment()
