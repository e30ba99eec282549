#!/usr/bin/env python3
"""Times attention forward of an installed flashport beside torch's SDPA by cuDNN and by flash, in bf16.

    python benchmarks/attention.py [--device cuda:0] [--rounds 7] [--shapes REGEX] [--list]

Writes results/<device>-attention.json and a page beside it, and prints the page. All candidates of a row run
in interleaved rounds by graph replay; a figure is a median, a ratio one of medians. TFLOP/s count 2 (D + DV) for each
query, head and key that the mask lets it see: causal counts half of the square, as papers do. Each result of ours is
held against a reference in fp64 on some rows before it is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flashport
from flashport.benchmarks import harness

HERE = Path(__file__).resolve().parent
PACKED = tuple(int(128 * 64 ** (i / 63)) for i in range(64))  # log-uniform lengths from 128 to 8k


@dataclass(frozen=True)
class Case:
    """One row. `against` names the row that its TFLOP/s, or with `of_time` its time, is held against; else cuDNN's."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dim_v: int = 0
    causal: bool = False
    options: tuple[tuple[str, Any], ...] = field(default=())
    packed: bool = False
    pages: int = 0  # keys lie on pages of so many tokens, in random order
    fp8: str = ""  # which of q, k and v are e4m3: "kv" or "qkv"
    bar: float | None = None
    against: str = ""
    of_time: bool = False

    @property
    def name(self) -> str:
        size = (
            f"{len(PACKED)} packed, 128 to 8k"
            if self.packed
            else f"{self.batch} x {self.q_len}" + (f" on {self.kv_len}" if self.kv_len != self.q_len else "")
        )
        dims = f"D{self.dim}" + (f"/{self.dim_v}" if self.dim_v else "")
        options = "".join(f", {key} {value}" for key, value in self.options)
        options += f", pages of {self.pages}" * bool(self.pages) + f", fp8 {self.fp8}" * bool(self.fp8)
        return f"{size}, {self.q_heads}/{self.kv_heads} {dims} {'causal' if self.causal else 'full'}{options}"

    @property
    def flops(self) -> float:
        lengths = PACKED if self.packed else (self.q_len,) * self.batch
        keys = sum(n * (n if self.packed else self.kv_len) for n in lengths) * (0.5 if self.causal else 1.0)
        return 2.0 * keys * self.q_heads * (self.dim + (self.dim_v or self.dim))


def cases() -> list[Case]:
    """The rows that have bars, and sizes in between."""
    rows: list[Case] = []
    for causal in (True, False):
        rows += [Case(4, 4096, 4096, causal=causal, bar=0.95), Case(1, 16384, 16384, causal=causal, bar=0.95)]
        for dim, heads, bar in ((64, (32, 8), 0.92), (256, (16, 4), 0.97)):
            rows += [Case(b, n, n, *heads, dim, causal=causal, bar=bar) for b, n in ((4, 4096), (1, 16384))]
        rows.append(Case(4, 4096, 4096, dim=96, causal=causal, bar=0.90 if causal else None))
        rows.append(Case(16, 1024, 1024, causal=causal, bar=0.90 if causal else None))
        for dim, heads in ((64, (32, 8)), (128, (32, 8)), (128, (28, 4)), (128, (8, 1)), (256, (16, 4))):
            rows += [Case(b, n, n, *heads, dim, causal=causal) for b, n in ((32, 512), (8, 2048), (2, 8192), (3, 3000))]
    dense, long = Case(4, 4096, 4096, causal=True).name, Case(1, 16384, 16384).name
    rows.append(Case(4, 4096, 4096, dim=192, dim_v=128, causal=True, bar=0.85, against=dense))
    rows.append(Case(1, 0, 0, causal=True, packed=True, bar=0.90, against=dense))
    rows += [Case(8, 128, 65536, bar=0.75, against=long), Case(1, 512, 32768, against=long)]
    rows += [Case(n, 128, 65536, against=long) for n in (1, 2, 4)]
    for size, bar in ((1, 0.60), (16, 0.88), (64, 0.88), (256, 0.88)):
        rows.append(Case(4, 4096, 4096, causal=True, pages=size, bar=bar, against=dense))
    for dim, heads in ((64, (32, 8)), (256, (16, 4))):
        rows += [
            Case(
                4,
                4096,
                4096,
                *heads,
                dim,
                causal=True,
                pages=16,
                against=Case(4, 4096, 4096, *heads, dim, causal=True).name,
            )
        ]
    rows += [Case(1, 16384, 16384, fp8=which, against=long) for which in ("qkv", "kv")]
    rows.append(Case(4, 4096, 4096, causal=True, pages=16, fp8="kv", against=dense))
    whole = Case(1, 16384, 16384, causal=True).name
    rows.append(
        Case(1, 16384, 16384, causal=True, options=(("window", (1023, -1)),), bar=0.20, against=whole, of_time=True)
    )
    for dim, heads in ((128, (32, 8)), (64, (32, 8)), (256, (16, 4))):
        for causal in (True, False):
            plain = Case(4, 4096, 4096, *heads, dim, causal=causal).name
            for option in (("softcap", 50.0), ("alibi", "slopes"), ("bias", "bf16"), ("dropout_p", 0.1)):
                rows.append(
                    Case(
                        4,
                        4096,
                        4096,
                        *heads,
                        dim,
                        causal=causal,
                        options=(option,),
                        bar=0.60 if dim == 128 else None,
                        against=plain,
                    )
                )
    return rows


def inputs(torch: Any, case: Case, device: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v and the keyword arguments of ours."""
    torch.manual_seed(0)
    dim_v = case.dim_v or case.dim
    lead_q, lead_k = ((sum(PACKED),),) * 2 if case.packed else ((case.batch, case.q_len), (case.batch, case.kv_len))
    make = lambda lead, heads, dim: torch.randn(*lead, heads, dim, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = (
        make(lead_q, case.q_heads, case.dim),
        make(lead_k, case.kv_heads, case.dim),
        make(lead_k, case.kv_heads, dim_v),
    )
    options: dict[str, Any] = {"causal": case.causal}
    if case.packed:
        offsets = torch.tensor([0, *PACKED], device=device).cumsum(0).int()
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": max(PACKED)}
        options["max_seqlen_k"] = max(PACKED)
    if case.pages:
        count = case.kv_len // case.pages
        table = torch.randperm(case.batch * count, device=device).int().view(case.batch, count)
        for name in "kv":
            rows = (k if name == "k" else v).view(case.batch * count, case.pages, case.kv_heads, -1)
            pages = torch.empty_like(rows)
            pages[table.flatten().long()] = rows
            options[f"{name}_pages"] = pages
        options |= {"block_table": table, "seqused_k": torch.full((case.batch,), case.kv_len, device=device).int()}
    for key, value in case.options:
        if key == "alibi":
            options["alibi_slopes"] = torch.rand(case.q_heads, device=device)
        elif key == "bias":
            options["bias"] = torch.randn(1, 1, case.q_len, case.kv_len, device=device, dtype=torch.bfloat16)
        else:
            options[key] = value
        if key == "dropout_p":
            options["rng_state"] = torch.tensor([1, 2], device=device)
    return q, k, v, options


def error_of(torch: Any, case: Case, out: Any, q: Any, k: Any, v: Any) -> float:
    """The largest error of 64 sampled rows of the first sequence and head; plain and window cases."""
    length = PACKED[0] if case.packed else case.q_len
    keys = PACKED[0] if case.packed else case.kv_len
    first = (lambda x: x[:length]) if case.packed else (lambda x: x[0])
    rows = torch.linspace(0, length - 1, 64, device=q.device).long()
    logits = first(q)[rows, 0].double() @ first(k)[:keys, 0].double().T / math.sqrt(case.dim)
    distance = rows[:, None] + keys - length - torch.arange(keys, device=q.device)
    window = dict(case.options).get("window", (-1, -1))
    hidden = (distance < 0) & case.causal | (distance > window[0]) & (window[0] >= 0)
    weights = torch.softmax(logits.masked_fill(hidden, -math.inf), -1)
    return float((weights @ first(v)[:keys, 0].double() - first(out)[rows, 0].double()).abs().max())


def peers(torch: Any, case: Case, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """SDPA by cuDNN and by flash, where they take the case."""
    if case.packed or case.options or case.pages or case.fp8 or case.q_len != case.kv_len or case.dim_v:
        return {}
    from torch.nn.attention import SDPBackend, sdpa_kernel

    transposed = [x.transpose(1, 2) for x in (q, k, v)]

    def by(backend: Any) -> Any:
        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *transposed, is_causal=case.causal, enable_gqa=True
                )

        return call

    return {"cudnn": by(SDPBackend.CUDNN_ATTENTION), "flash": by(SDPBackend.FLASH_ATTENTION)}


def measure(torch: Any, case: Case, device: str, rounds: int) -> dict[str, Any]:
    """One row."""
    q, k, v, options = inputs(torch, case, device)
    out = torch.empty(*q.shape[:-1], v.shape[-1], device=device, dtype=q.dtype)
    ours = {"q": q, "k": options.pop("k_pages", k), "v": options.pop("v_pages", v), "out": out, **options}
    for name in case.fp8:
        ours[name] = ours[name].to(torch.float8_e4m3fn)
    flashport.attention(**ours)
    plain = not case.options or case.options[0][0] == "window"
    checked = plain and not case.fp8
    error = error_of(torch, case, out, q, k, v) if checked else None
    row = harness.Row(case.name, case.name, bytes=1 << 30)
    harness.measure(
        row,
        torch,
        device,
        lambda: flashport.attention(**ours),
        peers(torch, case, q, k, v),
        rounds,
        read=False,
    )
    rate = lambda seconds: case.flops / seconds * 1e-12 if seconds else None  # noqa: E731
    return {
        "name": case.name,
        "seconds": row.seconds,
        "tflops": rate(row.seconds),
        "peers": {name: rate(seconds) for name, seconds in row.peers.items()},
        "peers_failed": row.peers_failed,
        "error": error,
        "bar": case.bar,
        "against": case.against or "cudnn",
        "of_time": case.of_time,
    }


def judge(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its ratio to what it is held against."""
    known = {row["name"]: row for row in rows}
    for row in rows:
        other = known.get(row["against"])
        if row["against"] == "cudnn":
            other_rate = row["peers"].get("cudnn")
            row["ratio"] = row["tflops"] / other_rate if other_rate else None
        elif other is None:
            row["ratio"] = None
        else:
            row["ratio"] = row["seconds"] / other["seconds"] if row["of_time"] else row["tflops"] / other["tflops"]


def page(rows: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """The rows as a table of Markdown."""
    text = [
        f"Attention forward, bf16, {where}",
        "",
        "| case | TFLOP/s | cuDNN | flash | ratio | bar |",
        "|" + " --- |" * 6,
    ]
    spell = lambda x, digits: "" if x is None else f"{x:.{digits}f}"  # noqa: E731
    for row in rows:
        bar = "" if row["bar"] is None else f"{'at most' if row['of_time'] else 'at least'} {row['bar']:.2f}"
        if row["bar"] is not None and row["ratio"] is not None:
            met = row["ratio"] <= row["bar"] if row["of_time"] else row["ratio"] >= row["bar"]
            bar += "" if met else ", missed"
        against = "" if row["against"] == "cudnn" else f" of {row['against']}"
        cells = [row["name"], spell(row["tflops"], 0), *(spell(row["peers"].get(n), 0) for n in ("cudnn", "flash"))]
        text.append("| " + " | ".join([*cells, spell(row["ratio"], 3) + against, bar]) + " |")
    return "\n".join(text) + "\n"


def main() -> int:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", default="", metavar="REGEX")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    wanted = [case for case in cases() if re.search(arguments.shapes, case.name)]
    if arguments.list:
        print(*(case.name for case in wanted), sep="\n")
        return 0
    torch = harness.find_torch(arguments.device)
    rows = [measure(torch, case, arguments.device, arguments.rounds) for case in wanted]
    judge(rows)
    where = harness.environment(arguments.device)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(arguments.device).lower()).strip("-")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}-attention.json").write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")
    (results / f"{name}-attention.md").write_text(page(rows, where))
    print(page(rows, where))
    wrong = [row["name"] for row in rows if row["error"] is not None and not row["error"] < 0.02]
    print(*(f"wrong: {name}" for name in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
