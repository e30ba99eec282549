"""ggml's attention on ggml's tensors: what they are described by goes in, and results come back in ggml's order.

A :class:`Tensor` is memory with ggml's extents ``ne`` and byte strides ``nb``, fastest axis first; views and
permutations are taken as they are. docs/ggml.md shows both operations and how the axes lie.
"""

from flashport.ggml._operators import flash_attn_ext, mixed_attention, slopes
from flashport.ggml._tensor import Tensor

__all__ = ["Tensor", "flash_attn_ext", "mixed_attention", "slopes"]
