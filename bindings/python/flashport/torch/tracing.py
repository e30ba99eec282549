"""Whether calls belong to the operators of torch, torch.ops.flashport, without importing torch.

They do while torch.compile or torch.export traces the caller, which the functions of the package ask here; and while
other parts of torch trace or transform it (make_fx, fake tensors, torch.func), which the compiled half finds out.
"""

from __future__ import annotations

import sys
from typing import Any


def _look_for_torch() -> bool:
    """Stands in for torch.compiler.is_compiling until torch has been imported by somebody."""
    global is_compiling
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    is_compiling = torch.compiler.is_compiling
    return torch.compiler.is_compiling()


is_compiling = _look_for_torch  # call it as an attribute of this module: it is replaced


def run_operator(name: str, *arguments: Any) -> Any:
    """Runs the operator of a function of the package, with its arguments by position; called by the compiled half."""
    from flashport.torch import attention, decode, gated_delta, mixed, quantize

    module = next(each for each in (attention, gated_delta, decode, mixed, quantize) if hasattr(each, name))
    return getattr(module, name)(*arguments)
