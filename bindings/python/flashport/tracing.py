"""Whether torch.compile traces the caller, without importing torch."""

from __future__ import annotations

import sys


def _look_for_torch() -> bool:
    """Stands in for torch.compiler.is_compiling until torch has been imported by somebody."""
    global is_compiling
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_compiling = torch.compiler.is_compiling
    return torch.compiler.is_compiling()


is_compiling = _look_for_torch  # call it as an attribute of this module: it is replaced
