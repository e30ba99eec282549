"""What is said where torch would lose a gradient: there is no backward, and a result that silently left the graph would
train nothing. The compiled half and the operators of torch ask for the same texts.
"""

from __future__ import annotations

import sys
from typing import Any


def refusal(function: str, name: str, tensor: Any, written: bool) -> Exception:
    """What to raise where ``tensor``, the argument ``name`` of ``function``, asks for a gradient that torch records."""
    if written and tensor.is_leaf:
        return RuntimeError(
            f"{function}: {name} is written, and a leaf Variable that requires grad is being used in an in-place "
            "operation; call it under torch.no_grad(), or pass what its detach() gives"
        )
    return NotImplementedError(
        f"{function}: {name} requires a gradient and there is no backward yet; call it under torch.no_grad() or "
        "torch.inference_mode(), or pass what its detach() gives"
    )


def refuse_gradients(function: str, names: str, *arrays: Any) -> None:
    """For shims, whose names of arguments differ: ``names`` has those of ``arrays``, apart by spaces.

    Raises as :func:`refusal` has it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for place, array in enumerate(arrays):
        if getattr(array, "requires_grad", False):
            raise refusal(function, names.split()[place], array, False)
