"""flashport demo gdn: prompts by chunks and then decoding, by the gated delta rule over a pool, checked and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashport import _core, gated_delta
from flashport.benchmarks import timing
from flashport.cli.common import ChosenDevice, Report, console, rate_text, seconds_text
from flashport.testing import gated_delta_oracle as oracle
from flashport.testing import numerics
from flashport.testing.cases import HostArray, to_host

HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128  # Qwen3-Next; keys and values have the same dim
PROMPTS = (512, 150, 64, 1)
GPU_PROMPTS = (2048, *(150, 64, 1) * 21)
STEPS = 16
CHECKED = 16000  # most tokens times query and key heads that the host's oracle goes through: some ten seconds
STATE_BYTES = VALUE_HEADS * HEAD_DIM * HEAD_DIM * 4
RULE = oracle.Rule(use_qk_l2norm=True)


@dataclass
class _Data:
    """Inputs of all tokens, prompts one behind the other and then the steps; bf16 values as fp32."""

    prompts: tuple[int, ...]
    q: np.ndarray  # [tokens, H, K], as k
    k: np.ndarray
    v: np.ndarray  # [tokens, HV, V]
    a: np.ndarray  # [tokens, HV], as b
    b: np.ndarray
    A_log: np.ndarray  # [HV], as dt_bias
    dt_bias: np.ndarray
    slots: np.ndarray  # [N]: where each sequence has its state

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts)

    def rows(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the prompt and the steps of sequence n lie."""
        first = sum(self.prompts[:n])
        steps = self.prompt_tokens + np.arange(STEPS) * len(self.prompts) + n
        return np.arange(first, first + self.prompts[n]), steps

    def on(self, rows: slice, shape: tuple[int, int], device: str) -> list[Any]:
        """q, k, v, a and b of some tokens, in rows and tokens of the batch, on a device."""
        return [
            HostArray(numerics.encode(x[rows].reshape(*shape, *x.shape[1:]), "bf16"), "bfloat16").on(device)
            for x in (self.q, self.k, self.v, self.a, self.b)
        ]


def _make_data(prompts: tuple[int, ...], seed: int = 0) -> _Data:
    rng = np.random.default_rng(seed)
    tokens = sum(prompts) + STEPS * len(prompts)

    def random(*shape: int) -> np.ndarray:
        return numerics.rounded(rng.standard_normal((tokens, *shape), np.float32), "bf16")

    # Gates as models of this kind begin: steps of 1e-3 to 0.1, of which softplus is the inverse.
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), VALUE_HEADS))
    return _Data(
        prompts,
        *(random(HEADS, HEAD_DIM) for _ in range(2)),
        random(VALUE_HEADS, HEAD_DIM),
        *(random(VALUE_HEADS) for _ in range(2)),
        np.log(rng.uniform(1, 16, VALUE_HEADS)).astype(np.float32),
        np.log(np.expm1(steps)).astype(np.float32),
        rng.permutation(len(prompts) + 1)[: len(prompts)].astype(np.int32),
    )


@dataclass
class _Results:
    """Outputs and states of all sequences, of all value heads or the first ones, in fp32 or fp64."""

    prefill: np.ndarray  # [prompt tokens, heads, V]
    prefilled: np.ndarray  # [N, heads, V, K]: states behind the prompts
    decode: np.ndarray  # [steps * N, heads, V]
    decoded: np.ndarray  # states in the end


def run(device: ChosenDevice, quick: bool) -> None:
    """Prefills and decodes on the device, holds it against the oracle, and prints the table."""
    prompts = PROMPTS if device.is_cpu else GPU_PROMPTS
    prompts = tuple(max(1, length // 8) for length in prompts) if quick else prompts
    count = len(prompts)
    console.print(
        f"prompts of {', '.join(map(str, prompts[:8]))}{', ...' if count > 8 else ''} tokens, then {STEPS} steps of "
        f"{count} sequences; {HEADS} query and key and {VALUE_HEADS} value heads of {HEAD_DIM} (Qwen3-Next), bf16, "
        f"states fp32: {count * STATE_BYTES / 1e6:.0f} MB"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        data = _make_data(prompts)
        task = progress.add_task(f"prefill and {STEPS} steps on {device.device}", total=None)
        try:
            results, prefill_seconds, step_seconds, ceiling = _on_device(data, device)
        except NotImplementedError as error:
            raise click.ClickException(str(error)) from error
        heads = max(1, min(HEADS, CHECKED // len(data.q)))
        progress.update(task, description=f"computing {heads} heads in fp64 on the host", total=2 * len(data.q))
        truth, plain = _on_host(data, heads, lambda tokens: progress.advance(task, tokens))
    report = _report(data, heads, (results, truth, plain), prefill_seconds, step_seconds, ceiling)
    report.print()


def _on_device(data: _Data, device: ChosenDevice) -> tuple[_Results, float, float, float | None]:
    """Results; seconds of the prefill, of a step, and of plain reads of as many bytes as a step moves."""
    name, count = device.device, len(data.prompts)
    shape = (VALUE_HEADS, HEAD_DIM)
    pool = HostArray(np.full((count + 1, VALUE_HEADS, HEAD_DIM, HEAD_DIM), np.nan, np.float32), "float32")
    pool.bits[data.slots] = 0
    pool, slots = pool.on(name), HostArray(data.slots, "int32").on(name)
    gates = [HostArray(x, "float32").on(name) for x in (data.A_log, data.dt_bias)]
    offsets = np.cumsum([0, *data.prompts], dtype=np.int32)
    prompts = data.on(slice(data.prompt_tokens), (1, data.prompt_tokens), name)
    prompt_out = _core.DeviceArray((1, data.prompt_tokens, *shape), "bfloat16", name)
    prefill = {
        "use_qk_l2norm": True, "beta_sigmoid": True, "A_log": gates[0], "dt_bias": gates[1],
        "cu_seqlens": HostArray(offsets, "int32").on(name), "out": prompt_out,
    }  # fmt: skip
    steps = []
    for first in range(data.prompt_tokens, len(data.q), count):
        out = _core.DeviceArray((count, 1, *shape), "bfloat16", name)
        steps.append((data.on(slice(first, first + count), (count, 1), name), out))

    def step(inputs: list[Any], out: Any) -> None:
        gated_delta.gated_delta_update(*inputs, *gates, pool, slots, use_qk_l2norm=True, out=out)

    gated_delta.gated_delta_chunk(*prompts, pool, slots, **prefill)
    prefilled = to_host(pool, "fp32")[data.slots]
    for inputs, out in steps:
        step(inputs, out)
    results = _Results(
        to_host(prompt_out, "bf16")[0],
        prefilled,
        np.concatenate([to_host(out, "bf16")[:, 0] for _, out in steps]),
        to_host(pool, "fp32")[data.slots],
    )
    prefill_seconds = timing.call_seconds(
        lambda: gated_delta.gated_delta_chunk(*prompts, pool, slots, update_state=False, **prefill), name
    )
    step_seconds = timing.call_seconds(lambda: step(*steps[0]), name)
    read = timing.read_seconds([pool], name)  # of one state more than a step reads and writes
    return results, prefill_seconds, step_seconds, None if read is None else 2 * read * count / (count + 1)


def _on_host(data: _Data, heads: int, advance: Any) -> tuple[_Results, _Results]:
    """The truth in fp64, and the results of a plain bf16 implementation: WY form, then the recurrence in fp32.

    Both of the first ``heads`` query and key heads, and the value heads that read them.
    """
    own = slice(heads * VALUE_HEADS // HEADS)
    gates = data.A_log[own], data.dt_bias[own]
    inputs = [*(x[:, :heads] for x in (data.q, data.k)), *(x[:, own] for x in (data.v, data.a, data.b))]
    places = [data.rows(n) for n in range(len(data.prompts))]
    found = []
    for plain in (None, "bf16"):
        dtype = np.float64 if plain is None else np.float32
        out = np.empty((len(data.q), own.stop, HEAD_DIM), dtype)
        states = []
        for prompt, steps in places:
            zero = np.zeros((1, own.stop, HEAD_DIM, HEAD_DIM), dtype)
            first = oracle.chunk(
                *(x[None, prompt] for x in inputs), zero, beta_sigmoid=True, A_log=gates[0], dt_bias=gates[1],
                plain=plain, rule=RULE,
            )  # fmt: skip
            then = oracle.update(
                *(x[None, steps] for x in inputs), *gates, first.state, dtype=dtype, out_type="bf16", rule=RULE
            )
            out[prompt], out[steps] = first.out[0], then.out[0]
            states.append((first.state[0], then.state[0]))
            advance(len(prompt) + len(steps))
        prefilled, decoded = (np.stack(x) for x in zip(*states, strict=True))
        found.append(_Results(out[: data.prompt_tokens], prefilled, out[data.prompt_tokens :], decoded))
    return found[0], found[1]


def _report(
    data: _Data,
    heads: int,
    found: tuple[_Results, _Results, _Results],
    prefill_seconds: float,
    step_seconds: float,
    ceiling: float | None,
) -> Report:
    count = len(data.prompts)
    moved = 2 * count * STATE_BYTES  # by a step: states are read and written once
    times = {
        "prefill": (seconds_text(prefill_seconds), f"{data.prompt_tokens / prefill_seconds:,.0f}", ""),
        "decode": (
            seconds_text(step_seconds),
            f"{count / step_seconds:,.0f}",
            rate_text(moved, step_seconds),
        ),
    }
    titles = {
        "prefill": "prefill by chunks of 64",
        "prefilled": "states after prompts",
        "decode": f"decode, {STEPS} steps",
        "decoded": "states in the end",
    }
    table = Table(caption="decode: time of one step; GB/s of states, read and written")
    for heading in ("", "error", "plain bf16", "time", "tokens/s", "GB/s"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=bool(heading))
    failures = []
    own = slice(heads * VALUE_HEADS // HEADS)
    for name, title in titles.items():
        got, truth, plain = (getattr(results, name) for results in found)
        fmt = "bf16" if name in ("prefill", "decode") else "fp32"
        compared = oracle.compare(got[:, own], truth, plain, fmt, title)
        failures += [compared.problem] if compared.problem else []
        row = times.get(name, ("",) * 3)
        table.add_row(title, f"{compared.error:.2e}", f"{compared.plain_error:.2e}", *row)
    if ceiling is not None:
        row = (seconds_text(ceiling), "", rate_text(moved, ceiling))
        table.add_row("plain reads, same bytes", "", "", *row, style="dim")
    scope = f"all tokens and {'all' if heads == HEADS else f'{heads} of the {HEADS} query and key'} heads"
    return Report(table, failures, scope)
