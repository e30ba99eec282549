"""flashport demo serve: continuous batching of a random model, whose bits are those of each request served alone.

The server itself is in serve/, in the order in which its ``__init__`` names the files.
"""

from __future__ import annotations

from collections.abc import Callable

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashport import devices
from flashport.benchmarks import harness
from flashport.cli.common import ChosenDevice, choose_device, console, device_option, seconds_text, served_devices, show
from flashport.cli.serve import check
from flashport.cli.serve.arrays import NUMPY_TYPES, TORCH_TYPES, Arrays, NumpyArrays, TorchArrays
from flashport.cli.serve.cache import PAGE_SIZE, PagedCache
from flashport.cli.serve.engine import Engine, Served
from flashport.cli.serve.model import Model, Shape
from flashport.cli.serve.scheduler import Request
from flashport.cli.serve.workload import make_requests

REQUESTS, QUICK_REQUESTS = 24, 6
COUNT = click.IntRange(min=1)


@click.command()
@device_option
@click.option("--quick", is_flag=True, help=f"{QUICK_REQUESTS} requests unless --requests says how many.")
@click.option(
    "--backend",
    type=click.Choice(["numpy", "torch"]),
    help="What computes all but attention. [default: numpy on the CPU, torch on a GPU]",
)
@click.option(
    "--dtype", "fmt", type=click.Choice(list(TORCH_TYPES)), help="[default: fp32 with numpy, bf16 with torch]"
)
@click.option("--requests", "count", type=COUNT, help=f"How many there are. [default: {REQUESTS}]")
@click.option("--max-prompt", default=400, show_default=True, type=COUNT, help="Tokens of the longest prompt.")
@click.option("--max-new", default=24, show_default=True, type=COUNT, help="New tokens of a request, at most.")
@click.option("--token-budget", default=64, show_default=True, type=COUNT, help="Tokens of a step.")
@click.option("--pages", type=COUNT, help="Pages of the cache. [default: for a third of all requests]")
@click.option("--check", "checked", type=click.IntRange(min=0), help="Requests to serve alone, too. [default: all]")
@click.option("--layers", default=Shape.layers, show_default=True, type=COUNT)
@click.option("--hidden", default=Shape.hidden, show_default=True, type=COUNT)
@click.option("--heads", default=Shape.heads, show_default=True, type=COUNT)
@click.option("--kv-heads", default=Shape.kv_heads, show_default=True, type=COUNT)
@click.option("--head-dim", default=Shape.head_dim, show_default=True, type=COUNT)
@click.option("--vocab", default=Shape.vocab, show_default=True, type=COUNT)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
def serve(
    device_name: str | None,
    quick: bool,
    backend: str | None,
    fmt: str | None,
    count: int | None,
    max_prompt: int,
    max_new: int,
    token_budget: int,
    pages: int | None,
    checked: int | None,
    seed: int,
    **sizes: int,
) -> None:
    """Serve requests that come and go with a random model in Llama's shape, then each of them alone.

    Prompts are prefilled in chunks beside requests that decode, from one paged cache. Tokens and logits must be those
    of each request served alone, in other chunks and on other pages, bit for bit; else the exit status is 1.
    """
    device, arrays, fmt = _choose(device_name, backend, fmt)
    shape = Shape(**sizes)
    kernels = _kernels(device, shape, fmt)
    requests = make_requests(count or (QUICK_REQUESTS if quick else REQUESTS), max_prompt, max_new, shape.vocab, seed)
    largest = max(request.pages for request in requests)
    pages = pages or max(largest, sum(request.pages for request in requests) // 3)
    if pages < largest:
        raise click.BadParameter(f"the longest request needs {largest} pages, got {pages}", param_hint="--pages")
    console.print(f"[bold]flashport {devices.version()}[/] on {device.title}, with {arrays.name}")
    console.print(
        f"{_text(requests)}; {shape.layers} layers, hidden {shape.hidden}, {shape.heads} query and {shape.kv_heads} "
        f"key-value heads of {shape.head_dim}, {fmt}; at most {token_budget} tokens a step; {pages} pages of "
        f"{PAGE_SIZE}; those without an owner hold NaN"
    )
    engine = Engine(arrays, Model(arrays, shape, max_prompt + max_new, seed), PagedCache(arrays, shape, pages))
    alone_too = check.sample(requests, checked, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        first = Request(0, 0, requests[0].prompt[:1], new_tokens=2)
        engine.serve([first], token_budget)  # the first call of each kernel is not timed
        task = progress.add_task("tokens, all together", total=_tokens(requests))
        together = engine.serve(requests, token_budget, _advance(progress, task))
        most_used = engine.cache.most_used
        task = progress.add_task("tokens, each request alone", total=_tokens(alone_too))
        alone = check.serve_alone(engine, alone_too, seed, _advance(progress, task))
    failures = check.differences(together.results, alone.results)
    if engine.cache.free_pages != pages:
        failures.append(f"{pages - engine.cache.free_pages} pages were not given back")
    if not engine.model.rows_are_independent(seed):
        failures.append(f"rows of a tile depend on each other in {arrays.name} here, whatever attention does")
    caption = (
        f"tokens: of prompts and new ones; {together.mixed_steps} of the {together.steps} steps together held both; "
        f"attention: its share of the time; at most {most_used} pages in use"
    )
    _report(kernels, together, alone, caption, failures)


def _choose(name: str | None, backend: str | None, fmt: str | None) -> tuple[ChosenDevice, Arrays, str]:
    """The device that was named, or the first one on which the arrays can be, and the arrays."""
    found = [choose_device(name)] if name is not None else served_devices()
    reasons = []
    for device in found:
        library = backend or ("numpy" if device.is_cpu else "torch")
        torch = harness.find_torch(device.device) if library == "torch" else None
        if library == "numpy" and device.is_cpu:
            types = NUMPY_TYPES
        elif torch is not None:
            types = TORCH_TYPES
        else:
            needed = "NumPy has arrays on the CPU only" if library == "numpy" else "torch is missing or does not see it"
            reasons.append(f"{device.device}: {needed}")
            continue
        fmt = fmt or ("fp32" if library == "numpy" else "bf16")
        if fmt not in types:
            raise click.BadParameter(f"{library} has no {fmt}; it has {', '.join(types)}", param_hint="--dtype")
        for reason in reasons:
            console.print(f"without {reason}", style="dim", highlight=False)
        return device, NumpyArrays(fmt) if torch is None else TorchArrays(torch, device.device, fmt), fmt
    raise click.UsageError(f"no device for the model: {'; '.join(reasons)}")


def _kernels(device: ChosenDevice, shape: Shape, fmt: str) -> str:
    """Those of both calls, or the reason why there are none."""
    if shape.heads % shape.kv_heads:
        raise click.BadParameter(f"{shape.heads} is no multiple of --kv-heads {shape.kv_heads}", param_hint="--heads")
    same = {"head_dim": shape.head_dim, "target": device.target}
    try:
        return " and ".join(
            (
                devices.which_kernel("attention", dtype=fmt, paged=True, causal=True, **same),
                devices.which_kernel(
                    "decode", q_dtype=fmt, k_format=fmt, v_format=fmt, group_size=shape.heads // shape.kv_heads, **same
                ),
            )
        )
    except NotImplementedError as error:
        raise click.ClickException(str(error)) from error


def _text(requests: list[Request]) -> str:
    prompts = [len(request.prompt) for request in requests]
    return (
        f"{len(requests)} requests with prompts of {min(prompts)} to {max(prompts)} tokens, {sum(prompts):,} in all, "
        f"and {sum(request.new_tokens for request in requests):,} new tokens"
    )


def _tokens(requests: list[Request]) -> int:
    """Those that steps compute; the last new one of a request goes through no step."""
    return sum(len(request.prompt) + request.new_tokens - 1 for request in requests)


def _advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda tokens: progress.advance(task, tokens)


def _report(kernels: str, together: Served, alone: Served, caption: str, failures: list[str]) -> None:
    table = Table(title=f"kernels {kernels}", caption=caption)
    for heading in ("", "requests", "tokens", "steps", "time", "tokens/s", "attention"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, served in (("together", together), ("alone", alone)):
        if served.results:
            table.add_row(
                name,
                f"{len(served.results)}",
                f"{served.tokens:,}",
                f"{served.steps:,}",
                seconds_text(served.seconds),
                f"{served.tokens / served.seconds:,.0f}",
                f"{100 * served.attention_seconds / served.seconds:.0f} %",
            )
    show(table)
    if failures:
        console.print("[bold red]wrong:[/] " + "; ".join(failures))
        raise SystemExit(1)
    compared = f"{len(alone.results)} of {len(together.results)} requests were served alone, too"
    if alone.results:
        console.print(
            f"[bold green]all tokens equal:[/] {compared}, in other chunks and on other pages, and gave the same "
            "tokens, each by the same bits of its logits"
        )
    else:
        console.print(f"{compared}: nothing was compared")
