"""How functions of the package become operators of torch: torch.ops.flashport.*, with fake kernels.

An operator's kernel is the compiled half's function of the same name. Operators refuse to lose a gradient, as that
does; where it runs as under torch.no_grad(), so do they. Importing this module imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from flashport import _core
from flashport.torch.gradients import refusal

_NUMBER = re.compile(r"\b(float|int|SymInt)\b").search  # in the text of a schema's type
OPERATORS = {}  # by name; an operator lives as long as its library object
_OTHERS = {}  # the same of drop-ins, by namespace and name


def register(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None = None,
    no_grad: bool = False,
    namespace: str = "flashport",
    tags: tuple[Any, ...] = (),
    function: str = "",
) -> Callable[..., Any]:
    """Makes torch.ops.flashport.<name> on every device; gives what runs it, with the checks that torch does not make.

    ``kernel`` takes the operator's arguments by position. Default: the compiled half's function of that name, which
    writes its results, without a stream: it runs on torch's current one. Drop-ins have operators in other namespaces.
    Errors name ``function``, which is the operator's name without "_out" unless it is given.
    """

    def compiled(*arguments: Any) -> None:
        _core.run_kernel(name, *arguments, None)

    function = function or name.removesuffix("_out")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, kernel or compiled, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    operator = getattr(getattr(torch.ops, namespace), name).default
    if no_grad:
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    else:
        library.impl(name, _refusing(function, operator), "Autograd", with_keyset=True)
    if namespace == "flashport":
        OPERATORS[name] = library
    else:
        _OTHERS[namespace, name] = library
    kinds = [(place, x.name, str(x.type)) for place, x in enumerate(operator._schema.arguments)]
    flags = [(place, x) for place, x, kind in kinds if "bool" in kind]
    numbers = [(place, x, "a number" if "float" in kind else "an integer") for place, x, kind in kinds if _NUMBER(kind)]

    def run(stream: Any, *arguments: Any) -> Any:
        if stream is not None:
            raise ValueError(
                f"{function}: stream must be None while torch compiles or traces the call, which then runs on torch's "
                f"current stream, got {type(stream).__name__}; call it under torch.cuda.stream()"
            )
        for place, flag in flags:
            if arguments[place] is not None:
                check_boolean(function, flag, arguments[place])
        for place, number, kind in numbers:
            check_number(function, number, arguments[place], kind)
        return operator(*arguments)

    return run


def check_boolean(function: str, name: str, value: Any) -> None:
    """As the compiled half has it: torch takes numbers, too."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be True or False, got {type(value).__name__}")


def check_number(function: str, name: str, value: Any, kind: str) -> None:
    """As the compiled half has it: torch takes booleans, too."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be {kind}, got bool")


def check_window(function: str, window: Any) -> None:
    """As the compiled half has it: torch takes other sequences and booleans, too."""
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"{function}: window must be a tuple (left, right), got {window!r}")
    for place, keys in enumerate(window):
        check_number(function, f"window[{place}]", keys, "an integer")


def writes_nothing_else(*_: Any, **__: Any) -> None:
    """Fake kernel of the operators that write in place and return nothing."""


def _refusing(function: str, operator: Any) -> Callable[..., Any]:
    """An operator's kernel for autograd: an error where a gradient would be lost, else the kernel below."""
    tensors = [
        (place, x.name, x.alias_info is not None and x.alias_info.is_write)
        for place, x in enumerate(operator._schema.arguments)
        if "Tensor" in str(x.type)
    ]

    def kernel(keyset: Any, *arguments: Any) -> Any:
        recorded = torch.is_grad_enabled()
        for place, name, written in tensors:
            given = arguments[place] if place < len(arguments) else None  # torch leaves out defaults at the end
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if tensor is not None and ((recorded and tensor.requires_grad) or _has_tangent(tensor)):
                    raise refusal(function, name, tensor, written)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows it."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
