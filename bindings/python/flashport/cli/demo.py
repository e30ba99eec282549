"""flashport demo: a batch of decode requests, by two stages and in one call, checked and timed.

The demos of other operations are in demo_attention.py, demo_gated_delta.py and demo_mixed.py, the small server in
demo_serve.py.
"""

from __future__ import annotations

from typing import Any

import click
import numpy as np
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashport import _core, decode, devices
from flashport.benchmarks import timing
from flashport.cli import demo_attention, demo_gated_delta, demo_mixed, demo_serve
from flashport.cli.common import (
    ChosenDevice,
    Report,
    choose_device,
    console,
    device_option,
    rate_text,
    seconds_text,
    share_text,
)
from flashport.testing import oracle
from flashport.testing.cases import DecodeCase, DecodeData, make_data, to_host

LENGTHS = (8192, 6144, 4096, 3000, 2048, 1024, 517, 100)
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16  # Llama-3.1-8B
BLOCK_SEQ = 256


def demo_case(lengths: tuple[int, ...] = LENGTHS) -> DecodeCase:
    """The demo's batch as a row of the case list."""
    return DecodeCase(
        name="demo", tier="demo", q="bf16", k_format="bf16", v_format="bf16", dk=HEAD_DIM, dv=HEAD_DIM, hq=HEADS,
        hkv=KV_HEADS, q_len=1, q_form="token", layout="block_nhd", page=PAGE, lens=lengths, window=(-1, -1),
        softcap=0.0, alibi="none",
        sinks=False, tree=False, scales="none", index="i32", out="same", lse=False, strides="dense", splits=-1,
    )  # fmt: skip


class _Demos(click.Group):
    """Commands that are named after an operation; an unknown one is answered with all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click.Group."""
        if args[0] not in self.commands:
            ctx.fail(f"{args[0]!r} is not one of {', '.join(map(repr, self.commands))}.")
        return super().resolve_command(ctx, args)


_quick_option = click.option(
    "--quick", is_flag=True, help="Requests of a sixteenth of the length, prompts of an eighth."
)


@click.group(cls=_Demos, invoke_without_command=True)
@device_option
@_quick_option
@click.pass_context
def demo(ctx: click.Context, device_name: str | None, quick: bool) -> None:
    """Run a model's shape on the device that is there, check and time it.

    Without a command, decode. Options may stand before a command or after it.
    """
    ctx.default_map = {name: {"device_name": device_name, "quick": quick} for name in demo.commands}
    if ctx.invoked_subcommand is None:
        ctx.invoke(_decode, device_name=device_name, quick=quick)


@demo.command("decode")
@device_option
@_quick_option
def _decode(device_name: str | None, quick: bool) -> None:
    """Eight requests of up to 8k tokens in Llama-3.1-8B's shape (the default)."""
    _run_decode(_chosen(device_name), quick)


@demo.command("attention")
@device_option
@_quick_option
def _attention(device_name: str | None, quick: bool) -> None:
    """A prompt and two packed ones in Llama-3.1-8B's shape."""
    demo_attention.run(_chosen(device_name), quick)


@demo.command("gdn")
@device_option
@_quick_option
def _gated_delta(device_name: str | None, quick: bool) -> None:
    """The gated delta rule in Qwen3-Next's shape, prompts and then decoding."""
    demo_gated_delta.run(_chosen(device_name), quick)


demo.add_command(demo_mixed.mixed)
demo.add_command(demo_serve.serve)


def _chosen(device_name: str | None) -> ChosenDevice:
    device = choose_device(device_name)
    console.print(f"[bold]flashport {devices.version()}[/] on {device.title}")
    return device


def _run_decode(device: ChosenDevice, quick: bool) -> None:
    case = demo_case(tuple(max(1, length // 16) for length in LENGTHS) if quick else LENGTHS)
    console.print(
        f"{len(case.lens)} requests of {', '.join(map(str, case.lens))} tokens; {HEADS} query and {KV_HEADS} "
        f"key-value heads of {HEAD_DIM}, bf16, pages of {PAGE}: {case.kv_bytes / 1e6:.0f} MB of keys and values"
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("filling the paged cache")
        data = make_data(case)
        progress.update(task, description="computing the answer in fp64 on the host, all heads")
        truth = data.rows([oracle.attend(request)[0] for request in data.requests])
        plain = data.rows(
            [oracle.attend(request, np.float32, math_type="bf16", out_type="bf16")[0] for request in data.requests]
        )
        progress.update(task, description=f"decoding on {device.device}")
        rows, ceiling = _run(case, data, device)
    _report(case, device, rows, ceiling, truth, plain).print()


def _run(case: DecodeCase, data: DecodeData, device: ChosenDevice) -> tuple[list[tuple[str, Any, float]], float | None]:
    """(name, output, seconds) of the one call and of the two stages; seconds of the plain read."""
    arguments = data.on(device.device)
    shape = data.out_shape
    out = _core.DeviceArray(shape, "bfloat16", device.device)
    staged = _core.DeviceArray(shape, "bfloat16", device.device)

    def one_call() -> None:
        decode.flash_decode(**arguments, out=out)

    # The two stages see the same pages as a pool of tokens.
    table = data.arguments["block_table"].bits
    max_len = max(case.lens)
    slots = (table[:, :, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(len(table), -1)[:, :max_len]
    req_to_tokens = _on(slots, "int32", device)
    requests = _on(np.arange(len(table), dtype=np.int32), "int32", device)
    tokens = arguments["k_cache"].nbytes // (KV_HEADS * HEAD_DIM * 2)
    pools = [arguments[name].reshape((tokens, KV_HEADS, HEAD_DIM)) for name in ("k_cache", "v_cache")]
    blocks = -(-max_len // BLOCK_SEQ)
    mid_out = _core.DeviceArray((len(table), HEADS, blocks, HEAD_DIM), "float32", device.device)
    mid_lse = _core.DeviceArray((len(table), HEADS, blocks), "float32", device.device)

    def two_stages() -> None:
        decode.flash_decode_stage1(
            arguments["q"], *pools, req_to_tokens, requests, arguments["seqlens"], max_len, mid_out, mid_lse, BLOCK_SEQ
        )
        decode.flash_decode_stage2(mid_out, mid_lse, arguments["seqlens"], staged, BLOCK_SEQ)

    rows = [
        ("two stages, token table", staged, timing.call_seconds(two_stages, device.device)),
        ("one call, block table", out, timing.call_seconds(one_call, device.device)),
    ]
    # The caches hold a few pages more than the requests use.
    stored = arguments["k_cache"].nbytes + arguments["v_cache"].nbytes
    read = timing.read_seconds([arguments["k_cache"], arguments["v_cache"]], device.device)
    return rows, None if read is None else read * case.kv_bytes / stored


def _on(values: np.ndarray, dtype: str, device: ChosenDevice) -> Any:
    array = _core.DeviceArray(values.shape, dtype, device.device)
    array.copy_from(np.ascontiguousarray(values))
    return array


def _report(
    case: DecodeCase,
    device: ChosenDevice,
    rows: list[tuple[str, Any, float]],
    ceiling: float | None,
    truth: np.ndarray,
    plain: np.ndarray,
) -> Report:
    kernel = devices.which_kernel("decode", head_dim=HEAD_DIM, group_size=HEADS // KV_HEADS, target=device.target)
    table = Table(title=f"kernel {kernel}")
    for heading in ("", "error", "plain bf16", "time", "GB/s", "of read rate"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=bool(heading))
    failures = []
    for name, result, seconds in rows:
        compared = oracle.compare(to_host(result, "bf16"), truth, plain, name)
        failures += [compared.problem] if compared.problem else []
        table.add_row(
            name,
            f"{compared.error:.2e}",
            f"{compared.plain_error:.2e}",
            seconds_text(seconds),
            rate_text(case.kv_bytes, seconds),
            share_text(seconds, ceiling),
        )
    if ceiling is not None:
        rate = rate_text(case.kv_bytes, ceiling)
        table.add_row("plain read, same bytes", "", "", seconds_text(ceiling), rate, "100 %", style="dim")
    return Report(table, failures, "all requests and heads")
