"""flash-attn 2.8.4 on flashport's kernels, the forward half, under the same names::

    import flashport.flash_attn as flash_attn

or, for programs that import flash_attn themselves, :func:`flashport.install_shims`. Wrong arguments raise errors that
are both ValueError and RuntimeError, with flash-attn's words. A call that would need a gradient raises
NotImplementedError. docs/flash_attn.md says what is served, and what differs. Importing this package imports torch, and
registers its operators in torch.ops.flash_attn unless they are there.
"""

from flashport.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
