"""flashport demo attention: a prompt and two packed ones in Llama-3.1-8B's shape, checked on sampled rows and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashport import _attention, _core, devices
from flashport.benchmarks import harness, timing
from flashport.benchmarks.attention import pairs
from flashport.cli.common import ChosenDevice, Report, console, seconds_text
from flashport.testing import attention_oracle, numerics, oracle
from flashport.testing.cases import HostArray, to_host

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # Llama-3.1-8B
PROMPT, PACKED = 2048, (1500, 548)
GPU_PROMPT, GPU_PACKED = 16384, (12000, 4384)
CHECKED = 64  # queries of each sequence
MATRIX, CPU_MATRIX = 8192, 1024  # rows and columns of the product whose rate stands beside ours
CAUSAL = attention_oracle.Rule(causal=True)


@dataclass
class _Batch:
    """Sequences one after the other, as the values of bf16."""

    name: str
    lens: tuple[int, ...]
    values: dict[str, np.ndarray]  # q [tokens, Hq, D], k and v [tokens, Hkv, D]

    @property
    def ends(self) -> np.ndarray:
        """The first token of each sequence, and the end of the last one."""
        return np.cumsum([0, *self.lens], dtype=np.int32)

    @property
    def flops(self) -> float:
        """Of both products, over the pairs of queries and keys that a causal mask leaves."""
        return sum(4.0 * HEADS * HEAD_DIM * pairs(length, length, causal=True) for length in self.lens)

    def arguments(self, device: str) -> dict[str, Any]:
        """Those of attention: dense for one sequence, packed for several."""
        single = len(self.lens) == 1
        given: dict[str, Any] = {
            name: HostArray(numerics.encode(x[None] if single else x, "bf16"), "bfloat16").on(device)
            for name, x in self.values.items()
        }
        if not single:
            ends = HostArray(self.ends, "int32").on(device)
            given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            given |= {"max_seqlen_q": max(self.lens), "max_seqlen_k": max(self.lens)}
        return {**given, "causal": True}


def _make(name: str, lens: tuple[int, ...]) -> _Batch:
    rng = np.random.default_rng(sum(lens))
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    shapes = {part: (sum(lens), count, HEAD_DIM) for part, count in heads.items()}
    values = {x: numerics.rounded(rng.standard_normal(shape, np.float32), "bf16") for x, shape in shapes.items()}
    return _Batch(name, lens, values)


def run(device: ChosenDevice, quick: bool) -> None:
    """Computes on the device, holds sampled rows against the oracle, and prints the table."""
    prompt, packed = (PROMPT, PACKED) if device.is_cpu else (GPU_PROMPT, GPU_PACKED)
    part = 8 if quick else 1
    lens = tuple(length // part for length in packed)
    batches = [_make("one prompt", (prompt // part,)), _make("two packed", lens)]
    console.print(
        f"a prompt of {prompt // part} tokens, then two packed ones of {lens[0]} and {lens[1]}; {HEADS} query and "
        f"{KV_HEADS} key-value heads of {HEAD_DIM} (Llama-3.1-8B), bf16, causal"
    )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows, failures = [], []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("a product of matrices")
        product = _matmul_rate(device.device, quick)
        for batch in batches:
            progress.update(task, description=f"{batch.name} on {device.device}")
            try:
                got, seconds = _on_device(batch, device.device)
            except NotImplementedError as error:
                raise click.ClickException(str(error)) from error
            progress.update(task, description=f"{batch.name}: {CHECKED} queries of each sequence in fp64 on the host")
            compared = _compare(batch, got)
            failures += [compared.problem] if compared.problem else []
            rows.append((batch, seconds, compared))
    _report(device, rows, product, failures).print()


def _on_device(batch: _Batch, device: str) -> tuple[np.ndarray, float]:
    """(out [tokens, Hq, D], seconds of a call)."""
    arguments = batch.arguments(device)
    out = _core.DeviceArray(arguments["q"].shape, "bfloat16", device)
    seconds = timing.call_seconds(lambda: _attention.attention(**arguments, out=out), device)
    return to_host(out, "bf16").reshape(-1, HEADS, HEAD_DIM), seconds


def _compare(batch: _Batch, got: np.ndarray) -> oracle.Comparison:
    """Of sampled queries of each sequence, the first and the last ones among them, all heads."""
    rng = np.random.default_rng(1)
    found: list[list[np.ndarray]] = [[], [], []]
    for start, length in zip(batch.ends, batch.lens, strict=False):
        count = min(CHECKED, length)
        rows = np.unique([0, length - 1, *rng.choice(length, count, replace=False)])
        own = [x[start : start + length] for x in batch.values.values()]
        found[0].append(got[start + rows])
        for place, plain in ((1, None), (2, "bf16")):
            found[place].append(attention_oracle.attend(*own, CAUSAL, rows=rows, plain=plain)[0])
    return oracle.compare(*map(np.concatenate, found), batch.name)


def _matmul_rate(device: str, quick: bool) -> float | None:
    """FLOP/s of torch's product of two matrices of bf16; None where torch is not there or does not see the device."""
    torch = harness.find_torch(device)
    if torch is None:
        return None
    size = (CPU_MATRIX if device == "cpu" else MATRIX) // (2 if quick else 1)
    a, b = (harness.random_tensor(torch, (size, size), "bf16", harness.torch_device(device)) for _ in range(2))
    return 2.0 * size**3 / timing.call_seconds(lambda: torch.matmul(a, b), device, budget=0.5)


def _report(
    device: ChosenDevice,
    rows: list[tuple[_Batch, float, oracle.Comparison]],
    product: float | None,
    failures: list[str],
) -> Report:
    kernel = devices.which_kernel("attention", head_dim=HEAD_DIM, causal=True, target=device.target)
    table = Table(title=f"kernel {kernel}", caption="FLOP of both products where the mask leaves them")
    for heading in ("", "error", "plain bf16", "time", "TFLOP/s", "of torch.matmul"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=bool(heading))
    for batch, seconds, compared in rows:
        rate = batch.flops / seconds
        table.add_row(
            batch.name,
            f"{compared.error:.2e}",
            f"{compared.plain_error:.2e}",
            seconds_text(seconds),
            f"{rate / 1e12:.3g}",
            "not measured" if product is None else f"{100 * rate / product:.0f} %",
        )
    if product is not None:
        table.add_row("torch.matmul", "", "", "", f"{product / 1e12:.3g}", "100 %", style="dim")
    return Report(table, failures, f"{CHECKED} queries of each sequence and all heads")
