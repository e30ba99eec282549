"""flashport support: what runs where."""

from __future__ import annotations

import click
from rich.table import Table

from flashport import _core, devices
from flashport.cli.common import console

_HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (512, 512), (192, 128))
_QUERIES = ("fp32", "fp16", "bf16")
_CACHES = ("native", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0")


@click.command()
@click.option("--target", "targets", multiple=True, metavar="NAME", help="Show this target only; may be repeated.")
@click.option("--why", is_flag=True, help="Also print the reason of each no.")
@click.option("--kernels", is_flag=True, help="List the kernels instead.")
def support(targets: tuple[str, ...], why: bool, kernels: bool) -> None:
    """Show which head dims, types and targets flash_decode serves."""
    compiled = [target for backend in devices.backends() for target in backend.targets]
    for target in targets or compiled:
        if target not in compiled:
            raise click.BadParameter(f"target {target} is not compiled in; there are {', '.join(compiled)}")
        if kernels:
            for key in _core.kernel_keys(target):
                console.print(key, soft_wrap=True, highlight=False)
        else:
            _show(target, why)


def _show(target: str, why: bool) -> None:
    table = Table(title=f"flash_decode on {target}, q_len 1 to 16, query heads per kv head 1 to 128")
    table.add_column("q")
    table.add_column("cache")
    for head_dim, head_dim_v in _HEAD_DIMS:
        table.add_column(str(head_dim) if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}", justify="center")
    reasons: dict[str, None] = {}
    for query in _QUERIES:
        for cache in _CACHES:
            kv = query if cache == "native" else cache
            answers = [devices.supports(query, kv, *dims, target=target) for dims in _HEAD_DIMS]
            table.add_row(query, kv, *("[green]yes[/]" if answer else "[dim]-[/]" for answer in answers))
            reasons.update(dict.fromkeys(answer.reason for answer in answers if not answer))
    console.print(table)
    if why:
        for reason in reasons:
            console.print(f"- {reason}", soft_wrap=True, highlight=False)
