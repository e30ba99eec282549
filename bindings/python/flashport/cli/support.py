"""flashport support: what runs where."""

from __future__ import annotations

import itertools
from typing import Literal

import click
from rich.table import Table

from flashport import _core, devices
from flashport.cli.common import console, show
from flashport.typing import GateForm, StateLayout

_DeltaOperation = Literal["gated_delta", "gated_delta_chunk"]
_HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (512, 512), (192, 128))
_QUERIES = ("fp32", "fp16", "bf16")
_FORMATS = ("native", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0")
_OPTIONS: dict[str, dict[str, bool]] = {
    "no other": {},
    "softcap": {"softcap": True},
    "ALiBi": {"alibi": True},
    "bias": {"bias": True},
    "dropout": {"dropout": True},
    "all": {"softcap": True, "alibi": True, "bias": True, "dropout": True},
}
_STATES = ("fp32", "bf16")
_GATES: tuple[GateForm, ...] = ("head", "key", "any")
_LAYOUTS: tuple[StateLayout, ...] = ("vk", "kv")
_DELTA_OPERATIONS: tuple[_DeltaOperation, ...] = ("gated_delta", "gated_delta_chunk")
_DELTA_HEAD_DIMS = (256, 128, 64)  # what of K the tiles cover, the widest first


@click.command()
@click.option(
    "--target",
    "names",
    multiple=True,
    metavar="NAME",
    help="Show this target only, or those of a backend: cpu, cuda, hip; may be repeated.",
)
@click.option("--why", is_flag=True, help="Also print the reason of each no.")
@click.option("--kernels", is_flag=True, help="List the kernels instead.")
def support(names: tuple[str, ...], why: bool, kernels: bool) -> None:
    """Show which head dims, types and targets attention, flash_decode and the gated delta rule serve."""
    targets_of = {backend.name: backend.targets for backend in devices.backends()}
    compiled = list(itertools.chain(*targets_of.values()))
    targets_of.update({target: [target] for target in compiled})
    for name in names:
        if not targets_of.get(name):
            raise click.BadParameter(f"target {name} is not compiled in; there are {', '.join(compiled)}")
    for target in dict.fromkeys(itertools.chain(*map(targets_of.get, names))) if names else compiled:
        if kernels:
            for key in _core.kernel_keys(target):
                console.print(key, soft_wrap=True, highlight=False)
        else:
            reasons = {**_show_attention(target), **_show_decode(target), **_show_gated_delta(target)}
            for reason in reasons if why else ():
                console.print(f"- {reason}", soft_wrap=True, highlight=False)


def _add_head_dims(table: Table) -> None:
    for head_dim, head_dim_v in _HEAD_DIMS:
        table.add_column(str(head_dim) if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}", justify="center")


def _show_attention(target: str) -> dict[str, None]:
    """Prints the table; returns the reasons of each no."""
    table = Table(title=f"attention on {target}, with causal masks, windows, sinks and")
    table.add_column("q, k, v")
    table.add_column("option")
    _add_head_dims(table)
    reasons: dict[str, None] = {}
    for query, (text, options) in itertools.product(_QUERIES, _OPTIONS.items()):
        answers = [
            devices.supports("attention", dtype=query, head_dim=dim, head_dim_v=dim_v, target=target, **options)
            for dim, dim_v in _HEAD_DIMS
        ]
        table.add_row(query, text, *("[green]yes[/]" if answer else "[dim]-[/]" for answer in answers))
        reasons.update(dict.fromkeys(answer.reason for answer in answers if not answer))
    show(table, names=2)
    return reasons


def _show_decode(target: str) -> dict[str, None]:
    """The same of flash_decode."""
    table = Table(title=f"flash_decode on {target}, q_len 1 to 16, query heads per kv head 1 to 128")
    table.add_column("q")
    table.add_column("cache")
    _add_head_dims(table)
    reasons: dict[str, None] = {}
    for query in _QUERIES:
        for cache in _FORMATS:
            kv = query if cache == "native" else cache
            answers = [
                devices.supports(
                    "decode", q_dtype=query, k_format=kv, v_format=kv, head_dim=dim, head_dim_v=dim_v, target=target
                )
                for dim, dim_v in _HEAD_DIMS
            ]
            table.add_row(query, kv, *("[green]yes[/]" if answer else "[dim]-[/]" for answer in answers))
            reasons.update(dict.fromkeys(answer.reason for answer in answers if not answer))
    show(table, names=2)
    return reasons


def _show_gated_delta(target: str) -> dict[str, None]:
    """The same of gated_delta_update and gated_delta_chunk, whose K and V are multiples of 8."""
    table = Table(title=f"gated delta rule on {target}", caption="largest K, of states [V, K] and [K, V] alike")
    for heading in ("operation", "q", "states"):
        table.add_column(heading)
    for gate in _GATES:
        table.add_column(f"gate: {gate}", justify="center")
    reasons: dict[str, None] = {}
    for operation, query, state in itertools.product(_DELTA_OPERATIONS, _QUERIES, _STATES):
        cells = []
        for gate in _GATES:
            largest, reason = _largest_key_dim(operation, query, state, gate, target)
            cells.append(f"[green]{largest}[/]" if largest else "[dim]-[/]")
            reasons.update({reason: None} if reason else {})
        table.add_row(operation, query, state, *cells)
    show(table, names=3)
    return reasons


def _largest_key_dim(
    operation: _DeltaOperation, query: str, state: str, gate: GateForm, target: str
) -> tuple[int, str]:
    """The largest K that is served with states of both layouts, or 0; and why not 256, if it is less."""
    reason = ""
    for head_dim in _DELTA_HEAD_DIMS:
        answers = [
            devices.supports(
                operation,
                q_dtype=query,
                state_dtype=state,
                head_dim_k=head_dim,
                state_layout=layout,
                gate=gate,
                target=target,
            )
            for layout in _LAYOUTS
        ]
        if all(answers):
            return head_dim, reason
        reason = reason or next(answer.reason for answer in answers if not answer)
    return 0, reason
