"""flashport demo mixed: a decode loop over an fp16 cache and over a mixed one, checked and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashport import _core, _mixed_cache, decode, devices
from flashport.benchmarks import harness
from flashport.cli.common import ChosenDevice, choose_device, console, device_option, show
from flashport.cli.serve.arrays import Arrays, NumpyArrays, TorchArrays
from flashport.testing import oracle

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B
PROMPT, QUICK_PROMPT, NEW, QUICK_NEW = 4096, 512, 128, 48
CHECKED_SEQUENCES = 2
COUNT = click.IntRange(min=1)


@click.command()
@device_option
@click.option("--quick", is_flag=True, help=f"A prompt of {QUICK_PROMPT} tokens, and {QUICK_NEW} new ones.")
@click.option("--batch", default=4, show_default=True, type=COUNT, help="Sequences.")
@click.option("--layers", default=2, show_default=True, type=COUNT)
@click.option("--prompt", type=COUNT, help=f"Tokens before the loop. [default: {PROMPT}]")
@click.option("--new", type=COUNT, help=f"Tokens of the loop. [default: {NEW}]")
@click.option("--hot", default=256, show_default=True, type=COUNT, help="Newest tokens that stay fp16.")
@click.option("--sinks", default=4, show_default=True, type=click.IntRange(min=0), help="First tokens that stay fp16.")
@click.option("--k-format", default="q8_0", show_default=True, help="What older keys are stored in.")
@click.option("--v-format", default="q8_0", show_default=True, help="What older values are stored in.")
def mixed(
    device_name: str | None, quick: bool, batch: int, layers: int, prompt: int | None, new: int | None, hot: int,
    sinks: int, k_format: str, v_format: str,
) -> None:  # fmt: skip
    """A decode loop over a cache whose older tokens are quantised, and the same over one of fp16.

    Layers in Llama-3.1-8B's shape append a token's keys and attend to all of them. Each output of the last token must
    be as near to fp64 on what its cache stores as a plain fp16 implementation is; else the exit status is 1.
    """
    device = choose_device(device_name)
    arrays = _arrays(device)
    prompt, new = prompt or (QUICK_PROMPT if quick else PROMPT), new or (QUICK_NEW if quick else NEW)
    console.print(f"[bold]flashport {devices.version()}[/] on {device.title}, with {arrays.name}")
    console.print(
        f"{batch} sequences of {prompt} tokens and {new} new ones, {layers} layers; {HEADS} query and {KV_HEADS} "
        f"key-value heads of {HEAD_DIM}; the newest {hot} tokens and the first {sinks} in fp16, others "
        f"{k_format}/{v_format}"
    )
    data = _Data(arrays, batch, layers, prompt)
    try:
        caches = {
            "fp16": [_PlainCache(arrays, batch, prompt + new) for _ in range(layers)],
            "mixed": [
                _mixed_cache.MixedKVCache(
                    data.k[0], batch, KV_HEADS, HEAD_DIM, max_tokens=prompt + new, hot_tokens=hot, sink_tokens=sinks,
                    k_format=k_format, v_format=v_format,  # type: ignore[arg-type]
                )
                for _ in range(layers)
            ],
        }  # fmt: skip
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = {}
    with Progress(*columns, console=console, transient=True) as progress:
        for name, own in caches.items():
            task = progress.add_task(f"tokens over {name} caches", total=new)
            try:
                found[name] = data.decode(own, new, lambda task=task: progress.advance(task), device)
            except NotImplementedError as error:
                raise click.ClickException(str(error)) from error
        task = progress.add_task("the last token in fp64 on the host", total=2)
        rows = []
        for name, own in caches.items():
            seconds, out = found[name]
            rows.append(_checked(name, own[-1], data, seconds, out, new))
            progress.advance(task)
    _report(rows, batch, _relative(found["mixed"][1], found["fp16"][1]))


def _arrays(device: ChosenDevice) -> Arrays:
    if device.is_cpu:
        return NumpyArrays("fp16")
    torch = harness.find_torch(device.device)
    if torch is None:
        raise click.ClickException(
            f"a cache on {device.device} needs torch, which is missing or does not see the device"
        )
    return TorchArrays(torch, device.device, "fp16")


class _Data:
    """Queries, keys and values of the loop, the same for both caches: drawn once, and shifted from token to token."""

    def __init__(self, arrays: Arrays, batch: int, layers: int, prompt: int) -> None:
        self.arrays, self.prompt, self.layers = arrays, prompt, layers
        rng = np.random.default_rng(0)

        def drawn(heads: int, tokens: int) -> Any:
            values = rng.standard_normal((batch, tokens, heads, HEAD_DIM), np.float32).astype(np.float16)
            return arrays.put(values)

        self.q = [drawn(HEADS, 16) for _ in range(layers)]
        self.k, self.v = ([drawn(KV_HEADS, prompt) for _ in range(layers)] for _ in "kv")

    def decode(
        self, caches: list[Any], new: int, advance: Callable[[], Any], device: ChosenDevice
    ) -> tuple[float, Any]:
        """(seconds of the loop, output of its last token in the last layer)."""
        for cache, k, v in zip(caches, self.k, self.v, strict=True):
            cache.append(k, v)
        caches[0].attend(self.q[0][:, 0])  # the first call of a kernel is not timed
        _core.synchronize(device.device)
        begin, out = time.perf_counter(), None
        for step in range(new):
            for layer, cache in enumerate(caches):
                token = step % self.prompt
                cache.append(self.k[layer][:, token], self.v[layer][:, token])
                out = cache.attend(self.q[layer][:, step % 16])
            advance()
        _core.synchronize(device.device)
        return time.perf_counter() - begin, self.arrays.to_host(out)


class _PlainCache:
    """fp16 keys and values of one layer, one after the other."""

    def __init__(self, arrays: Arrays, batch: int, tokens: int) -> None:
        shape = (batch, tokens, KV_HEADS, HEAD_DIM)
        self.k, self.v = (arrays.full(shape, 0, arrays.kv_type) for _ in "kv")
        self.length = arrays.put(np.zeros(batch, np.int32))
        self._begin = arrays.put(np.arange(batch, dtype=np.int64)[:, None] * tokens)
        self._arrays = arrays

    def append(self, k: Any, v: Any) -> None:
        k, v = (x[:, None] if len(x.shape) == 3 else x for x in (k, v))
        rows = self._arrays.put(np.arange(k.shape[1], dtype=np.int64)) if k.shape[1] > 1 else 0
        slots = self._begin + self.length[:, None] + rows
        flat = [x.reshape(-1, KV_HEADS, HEAD_DIM) for x in (k, v)]
        decode.append_kv(*flat, self.k, self.v, slots.reshape(-1))
        self.length += k.shape[1]

    def attend(self, q: Any) -> Any:
        return decode.flash_decode(q, self.k, self.v, self.length)

    def stored(self, b: int) -> tuple[Any, Any]:
        """fp32 keys and values of a sequence."""
        count = int(self.length[b])
        return tuple(self._arrays.to_host(x[b, :count]) for x in (self.k, self.v))  # type: ignore[return-value]

    @property
    def used_bytes(self) -> float:
        """Bytes of a token."""
        return 2 * KV_HEADS * HEAD_DIM * 2


def _stored(cache: Any, data: _Data, b: int) -> tuple[np.ndarray, np.ndarray]:
    """fp32 keys and values of a sequence as its cache has them."""
    if isinstance(cache, _PlainCache):
        return cache.stored(b)
    found: list[list[np.ndarray]] = [[], []]
    for segment in cache.segments():
        count = int(segment.seqlens[b])
        if count == 0:
            continue
        sides = ((segment.k, segment.k_format, segment.k_scale), (segment.v, segment.v_format, segment.v_scale))
        for side, (x, fmt, scale) in enumerate(sides):
            own = x[b, :count]
            is_block = "uint8" in str(own.dtype)
            if is_block or scale is not None:
                own = _widened(own, fmt, None if scale is None else scale[b, :count])
            found[side].append(data.arrays.to_host(own))
    return np.concatenate(found[0]), np.concatenate(found[1])


def _widened(rows: Any, fmt: str, scale: Any) -> Any:
    from flashport._quantize import dequantize_kv

    return dequantize_kv(rows, fmt, scale=scale)  # type: ignore[arg-type]


def _bytes_per_token(cache: Any) -> float:
    if isinstance(cache, _PlainCache):
        return cache.used_bytes
    total = 0.0
    for segment in cache.segments():
        given = (segment.k, segment.v, segment.k_scale, segment.v_scale)
        row = sum(x.nbytes / (x.shape[0] * x.shape[1]) for x in given if x is not None)
        total += row * float(segment.seqlens[0])
    return total / float(cache.lengths[0])


def _checked(name: str, cache: Any, data: _Data, seconds: float, out: np.ndarray, new: int) -> tuple[Any, ...]:
    """(name, tokens a second of each sequence, bytes of a token, errors compared with fp64)."""
    q = data.arrays.to_host(data.q[-1])[:, (new - 1) % 16]
    checked = range(min(CHECKED_SEQUENCES, len(out)))
    requests = [oracle.Request(q[b][None], *_stored(cache, data, b)) for b in checked]
    truth = np.stack([oracle.attend(one)[0][0] for one in requests])
    plain = np.stack([oracle.attend(one, np.float32, math_type="fp16", out_type="fp16")[0][0] for one in requests])
    compared = oracle.compare(out[: len(checked)], truth, plain, name)
    return name, new / seconds, _bytes_per_token(cache), compared


def _relative(out: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(out - other).max() / np.abs(other).max())


def _report(rows: list[tuple[Any, ...]], batch: int, apart: float) -> None:
    table = Table(caption="error: of the last token, against fp64 on what the cache stores")
    for heading in ("cache", "tokens/s", "bytes a token", "error", "plain fp16"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    failures = []
    for name, rate, size, compared in rows:
        failures += [compared.problem] if compared.problem else []
        numbers = (f"{rate * batch:,.0f}", f"{size:,.0f}", f"{compared.error:.2e}", f"{compared.plain_error:.2e}")
        table.add_row(name, *numbers)
    show(table)
    if failures:
        console.print("[bold red]wrong:[/] " + "; ".join(failures))
        raise SystemExit(1)
    console.print(
        "[bold green]correct:[/] both are as near to fp64 as a plain fp16 implementation; quantisation moves outputs "
        f"by {apart:.1e} of the largest one"
    )
