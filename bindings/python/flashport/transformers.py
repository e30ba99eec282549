"""The kernels in models of Hugging Face Transformers: attention by its registries, and the gated delta rule.

Transformers asks one registry for attention functions and another one for the masks that they are given; with the
first alone a model would get no mask, and lose causality. :func:`register` fills both.

Transformers has no registry for the gated delta rule of Qwen3-Next and its relatives. Up to 5.14 a layer holds its
functions as the attributes ``chunk_gated_delta_rule`` and ``recurrent_gated_delta_rule``; from 5.15 on it calls what
its model's module has as ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``, and ignores such
attributes. Both are served here. This module imports neither torch nor Transformers by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashport import _transformers_attention, fla

__all__ = ["gated_delta_rule", "register"]


def register(name: str = "portable_attention") -> None:
    """Makes :func:`flashport.attention` an attention implementation of Transformers, with its masks::

        import flashport.transformers

        flashport.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="portable_attention")

    or ``model.set_attn_implementation("portable_attention")``. Causal masks, windows of sliding layers and padding on
    one side become arguments of the call. Any other mask (chunks, prefixes, packed sequences without ``cu_seq_lens_q``,
    padding inside, masks made while torch compiles) becomes a bias of all queries and keys, which takes memory for
    each pair. Softcap, sinks, position biases, dropout and ``cu_seq_lens_q`` with its relatives are taken, too. Rows
    of padding get other values than in eager attention, where they mean nothing either.

    There is no backward: generate() turns gradients off, a forward pass of one's own wants torch.no_grad().

    Args:
        name: What models call the implementation; a second call with the same name changes nothing. Transformers takes
            every name with "flash" in it for a build of the package flash-attn, and one with "/" for a kernel to fetch.

    Raises:
        TypeError: ``name`` is no str.
        ValueError: ``name`` has "flash" or "/" in it, or is that of one of Transformers' own implementations.
        ImportError: Transformers is not there, or one without a registry of masks that has offsets of queries.

    Source:
        bindings/python/flashport/_transformers_attention.py.
    """
    if not isinstance(name, str):
        raise TypeError(f"register: name must be a str, got {type(name).__name__}")
    if "flash" in name or "/" in name or name in ("", "eager", "sdpa", "flex_attention"):
        raise ValueError(
            'register: name must be none of Transformers\' own and have neither "flash" nor "/" in it, which '
            f'Transformers takes for other packages, got "{name}"'
        )
    _transformers_attention.register(name)


@contextmanager
def gated_delta_rule(model: Any) -> Iterator[None]:
    """Within the ``with`` statement, linear attention layers of ``model`` run on this library's kernels.

    Prompts go by :func:`flashport.fla.chunk_gated_delta_rule`, single tokens by
    :func:`flashport.fla.fused_recurrent_gated_delta_rule`::

        import flashport.transformers

        with flashport.transformers.gated_delta_rule(model):
            model.generate(**inputs)

    There is no backward: generate() turns gradients off, a forward pass of one's own wants torch.no_grad().

    From Transformers 5.15 on, the functions belong to the module of the model's class, so all models of that class have
    ours meanwhile, in every thread. Kernels of the package ``kernels``, for which one has to ask, are not looked for.

    Args:
        model: A torch.nn.Module with such layers, on any device that :func:`flashport.gated_delta_chunk` serves, in a
            type that it serves there.

    Yields:
        Nothing. On exit, also by an exception, the model has its own functions again.

    Raises:
        TypeError: ``model`` is no torch.nn.Module.
        ValueError: ``model`` has no layer of the gated delta rule.
        NotImplementedError: From the forward pass, where a gradient is asked for or no kernel serves the model.

    Source:
        bindings/python/flashport/transformers.py.
    """
    if not callable(getattr(model, "modules", None)):
        raise TypeError(f"gated_delta_rule: model must be a torch.nn.Module, got {type(model).__name__}")
    places = _places(model)
    if not places:
        raise ValueError(
            "gated_delta_rule: model must have layers of the gated delta rule, as Qwen3NextForCausalLM has, got "
            f"{type(model).__name__}"
        )
    before = [(place, name, place[name]) for place, names in places for name in names]
    try:
        for place, (chunk, recurrent) in places:
            place |= {chunk: _chunk, recurrent: _recurrent}
        yield
    finally:
        for place, name, function in before:
            place[name] = function


def _places(model: Any) -> list[tuple[dict[str, Any], tuple[str, str]]]:
    """Namespaces in which layers find their functions, and the two names there, by chunks first."""
    found = {}
    for layer in model.modules():
        forward = inspect.unwrap(type(layer).forward)
        for place, prefix in ((vars(layer), ""), (getattr(forward, "__globals__", {}), "torch_")):
            names = (f"{prefix}chunk_gated_delta_rule", f"{prefix}recurrent_gated_delta_rule")
            if all(name in place for name in names):
                found[id(place)] = (place, names)
                break  # a layer with attributes calls these
    return list(found.values())


def _chunk(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    chunk_size: int = 64,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **_: Any,
) -> tuple[Any, Any]:
    """Under Transformers' names. ``chunk_size`` changes no result; what else a forward pass hands on is not ours."""
    # Layers hand over slices of a convolution's result, whose innermost axis may be the tokens: fla's functions copy.
    return fla.chunk_gated_delta_rule(
        query, key, value, g, beta, None, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def _recurrent(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **_: Any,
) -> tuple[Any, Any]:
    """As :func:`_chunk`, token by token."""
    return fla.fused_recurrent_gated_delta_rule(
        query, key, value, g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip
