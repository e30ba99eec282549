"""What the package is to PyTorch: operators with fake kernels, gradients that are refused, programs that are traced.

This package, ``tracing`` and ``gradients`` import no torch, and so every call may ask them; ``library``, ``attention``,
``decode``, ``gated_delta`` and ``quantize`` do, and are imported when torch first compiles, traces or transforms a
program. Nothing here is part of the interface but the operators, ``torch.ops.flashport``.
"""
