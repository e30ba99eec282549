#!/usr/bin/env python3
"""Calls over a cache: times them, what a paged cache costs prompts, and the host time of drop-in functions, in one run.

    python benchmarks/cache.py [--device cuda:0] [--rounds 9] [--revision TEXT] [--shapes REGEX] [--list]

It prints a page, and writes it and its figures to results/<device>-cache.md and .json; with --shapes it only prints it,
so that those files are never of several runs. Cases of calls that append, of few queries and of cascades are
those of flashport.benchmarks, prompts on pages those of flashport.benchmarks.attention. A call and its peers run in
interleaved rounds: times are medians, a difference is the median of the differences of each round, a ratio one of
medians. Calls are timed by graph replay on a GPU, but rows of host time by the host's clock: of an asynchronous call,
the best of five means of 200. Before it is timed a call is held against the peer that computes the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

import flashport
from attention import BARS as PROMPT_BARS
from attention import row_name
from decode_grid.report import SOFTWARE
from flashport import vllm
from flashport.benchmarks import append, attention, cascade, harness
from flashport.benchmarks.append import CacheCase
from flashport.benchmarks.attention import AttentionCase
from flashport.benchmarks.cascade import CascadeCase
from flashport.cli.common import choose_device
from verdict import Verdict, slug

HERE = Path(__file__).resolve().parent
Candidates = tuple[harness.Call, dict[str, harness.Call]]  # our call, and its peers
WITHOUT, DENSE, WHOLE, BELOW = "without new keys", "contiguous keys", "decode of whole sequences", "attention, out="
PAGED = [attention.cases(f"attention_d128_pages_{size}_4x4k", study=True)[0] for size in (1, 16, 64, 256)]
# The drop-in functions whose host time is measured: FlashAttention 2's, but where 3 is said.
PROMPT_CALLS = (
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func", "flash_attn_varlen_func",
    "flash_attn_3.flash_attn_func",
)  # fmt: skip
CACHE_CALLS = (
    "flash_attn_with_kvcache", "flash_attn_with_kvcache, block_table",
    "flash_attn_with_kvcache, new keys and rotary", "flash_attn_3.flash_attn_with_kvcache",
)  # fmt: skip
SMALLEST = "Tensor.zero_"  # torch's smallest call, beside them
BARS = {  # of a row: the peer, a figure as verdict.py names it, the bar
    "append_64x1_on_8k": (WITHOUT, "difference", 3e-6),
    "append_4x512_on_8k": (WITHOUT, "time_of", 1.05),
    "cascade_64x512_after_16k": (WHOLE, "speedup_of", 8),
    **{case.name: (DENSE, "rate_of", PROMPT_BARS[row_name(case)]) for case in PAGED},
    **{f"host {call}": (BELOW, "host_seconds", 25e-6) for call in (*PROMPT_CALLS, *CACHE_CALLS)},
}
LARGEST_ERROR = 0.02  # of the largest value


@dataclass(frozen=True)
class Case:
    """A row: ``make`` gives its candidates from torch and a device; ``same`` is the peer with the same results."""

    name: str
    title: str
    make: Callable[[Any, str], Candidates]
    query: tuple[str, dict[str, Any]] | None = None  # operation and options of flashport.supports
    same: str = ""
    on_host: bool = False


def case_of_cache(case: CacheCase) -> Case:
    """A call that appends, or one of few queries."""
    return Case(
        case.name,
        case.title,
        lambda torch, device: append.make_candidates(torch, case, device),
        ("attention", case.query),
        same="" if case.appends else "packed",  # one that appends turns its queries
    )


def case_of_cascade(case: CascadeCase) -> Case:
    """A cascade beside plain decode of the same pages and of requests that share no page."""

    def make(torch: Any, device: str) -> Candidates:
        ours, peers = cascade.make_candidates(torch, case, device)
        whole, _ = cascade.make_candidates(torch, dataclasses.replace(case, is_cascade=False), device)
        return ours, {**peers, WHOLE: whole}

    return Case(case.name, case.title, make, ("decode", case.query), same="flash_decode")


def case_of_pages(case: AttentionCase) -> Case:
    """Prompts whose keys lie on pages beside the same ones with contiguous keys."""

    def make(torch: Any, device: str) -> Candidates:
        paged = attention.make_arguments(torch, case, device)
        dense = attention.make_arguments(torch, dataclasses.replace(case, pages=0), device)
        dense["q"].copy_(paged["q"])
        for name in ("k", "v"):
            keys = paged[name][paged["block_table"].long()].flatten(1, 2)
            dense[name].copy_(keys[:, : dense[name].shape[1]])
        return partial(flashport.attention, **paged), {DENSE: partial(flashport.attention, **dense)}

    return Case(case.name, case.title, make, ("attention", case.query), same=DENSE)


def case_of_vllm(batch: int = 64, keys: int = 4096, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> Case:
    """vLLM's paged_attention_rocm, which copies all blocks that a call names, beside decode that reads them."""
    size, x = 16, 8  # tokens of a block, and elements of a key that lie together

    def make(torch: Any, device: str) -> Candidates:
        where = harness.torch_device(device)
        blocks = batch * -(-keys // size)
        q, out, other_out = (harness.random_tensor(torch, (batch, heads, dim), "bf16", where) for _ in range(3))
        k, v = (harness.random_tensor(torch, (blocks, size, kv_heads, dim), "bf16", where) for _ in "kv")
        key_cache = k.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
        value_cache = v.permute(0, 2, 3, 1).contiguous()
        table = torch.randperm(blocks, device=where).int().view(batch, -1)
        lens = torch.full((batch,), keys, dtype=torch.int32, device=where)

        def ours() -> object:
            vllm.paged_attention_rocm(
                out, None, None, None, q, key_cache, value_cache, kv_heads, dim**-0.5, table, lens, None, size, keys,
                None, "auto", None, None,
            )  # fmt: skip
            return out

        return ours, {"flash_decode": partial(flashport.flash_decode, q, k, v, lens, block_table=table, out=other_out)}

    title = f"vllm.paged_attention_rocm, {batch} x 1 on {keys}, {heads}/{kv_heads}, {dim}, bf16, blocks of {size}"
    query = {"q_dtype": "bf16", "head_dim": dim, "group_size": heads // kv_heads}
    return Case("vllm_paged_attention_rocm", title, make, ("decode", query), same="flash_decode")


def make_host_calls(
    torch: Any, device: str, prompt: int, keys: int, heads: int, kv_heads: int, dim: int
) -> dict[str, Candidates]:
    """Small calls of drop-in functions, each beside the call of attention that it comes to, with an output given."""
    from flashport import flash_attn, flash_attn_3  # these import torch

    where, size = harness.torch_device(device), 16

    def random(*shape: int) -> Any:
        return harness.random_tensor(torch, shape, "bf16", where)

    def beside(call: harness.Call, q: Any, k: Any, v: Any, **options: Any) -> Candidates:
        return call, {BELOW: partial(flashport.attention, q, k, v, out=torch.empty_like(q), **options)}

    q, kv, qkv = random(1, prompt, heads, dim), random(1, prompt, 2, kv_heads, dim), random(1, prompt, 3, heads, dim)
    k, v = (x.contiguous() for x in kv.unbind(2))
    offsets = torch.tensor([0, prompt], dtype=torch.int32, device=where)
    packed = q[0], k[0], v[0]
    starts = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": prompt, "max_seqlen_k": prompt}
    token, token_k, token_v = random(1, 1, heads, dim), random(1, 1, kv_heads, dim), random(1, 1, kv_heads, dim)
    cache = random(1, keys, kv_heads, dim), random(1, keys, kv_heads, dim)
    pages = tuple(x.view(-1, size, kv_heads, dim) for x in cache)
    table = torch.randperm(keys // size, device=where).int()[None]
    full, before = (torch.tensor([length], dtype=torch.int32, device=where) for length in (keys, keys - 1))
    rotary = {"rotary_cos": random(keys, dim // 2), "rotary_sin": random(keys, dim // 2), "rotary_interleaved": True}

    func, with_cache = flash_attn.flash_attn_func, flash_attn.flash_attn_with_kvcache
    pairs = (
        beside(partial(func, q, k, v, causal=True), q, k, v, causal=True),
        beside(partial(flash_attn.flash_attn_qkvpacked_func, qkv, causal=True), *qkv.unbind(2), causal=True),
        beside(partial(flash_attn.flash_attn_kvpacked_func, q, kv, causal=True), q, *kv.unbind(2), causal=True),
        beside(
            partial(flash_attn.flash_attn_varlen_func, *packed, *starts.values(), causal=True),
            *packed, causal=True, **starts,
        ),
        beside(partial(flash_attn_3.flash_attn_func, q, k, v, causal=True), q, k, v, causal=True),
        beside(partial(with_cache, token, *cache, cache_seqlens=full, causal=True), token, *cache, seqused_k=full),
        beside(
            partial(with_cache, token, *pages, cache_seqlens=full, block_table=table, causal=True),
            token, *pages, seqused_k=full, block_table=table,
        ),
        beside(
            partial(with_cache, token, *cache, token_k, token_v, cache_seqlens=before, causal=True, **rotary),
            token, *cache, seqused_k=before, k_new=token_k, v_new=token_v, **rotary,
        ),
        beside(
            partial(flash_attn_3.flash_attn_with_kvcache, token, *cache, cache_seqlens=full, causal=True),
            token, *cache, seqused_k=full,
        ),
    )  # fmt: skip
    calls = dict(zip((*PROMPT_CALLS, *CACHE_CALLS), pairs, strict=True))
    return calls | {SMALLEST: (torch.empty_like(q).zero_, {})}


def host_cases(prompt: int = 256, keys: int = 1024, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> list[Case]:
    """The host time of each of these calls."""
    sizes = dict.fromkeys(PROMPT_CALLS, f", 1 x {prompt}") | dict.fromkeys(CACHE_CALLS, f", 1 x 1 on {keys}")

    def case(call: str) -> Case:
        heads_of_keys = heads if call == "flash_attn_qkvpacked_func" else kv_heads
        shape = f"{sizes[call]}, {heads}/{heads_of_keys}, {dim}, bf16" if call in sizes else ""
        return Case(
            f"host {call}",
            f"host time of {call}{shape}",
            lambda torch, device: make_host_calls(torch, device, prompt, keys, heads, kv_heads, dim)[call],
            same=BELOW if call in sizes else "",
            on_host=True,
        )

    return [case(call) for call in (*sizes, SMALLEST)]


def all_cases() -> list[Case]:
    """The rows of the page."""
    return [
        *map(case_of_cache, append.cases()),
        *(case_of_cascade(case) for case in cascade.cases() if case.is_cascade),
        *map(case_of_pages, PAGED),
        case_of_vllm(),
        *host_cases(),
    ]


def error_of(ours: harness.Call, peer: harness.Call) -> float:
    """How far our result is from the peer's, of its largest value."""
    result, other = (call().double() for call in (ours, peer))
    return float((result.flatten() - other.flatten()).abs().max() / other.abs().max())


def measure(torch: Any, case: Case, device: str, target: str, rounds: int) -> dict[str, Any]:
    """One row, as JSON has it; ``failed`` says why there are no figures, ``skipped`` that no kernel serves the case."""
    row: dict[str, Any] = {"name": case.name, "title": case.title, "on_host": case.on_host, "kernel": ""}
    row |= {"seconds": None, "peers": {}, "error": None, "skipped": "", "failed": ""}
    if case.query is not None:
        operation, options = case.query
        support = flashport.supports(operation, target=target, **options)
        if not support:
            return row | {"skipped": support.reason}
        row["kernel"] = flashport.which_kernel(operation, target=target, **options)

    def timer(call: harness.Call) -> Callable[[], float]:
        return partial(harness.host_seconds, call, device) if case.on_host else harness.timer(torch, device, call)

    try:
        ours, peers = case.make(torch, device)
        row["error"] = error_of(ours, peers[case.same]) if case.same else None
        samples = harness.interleaved({name: timer(call) for name, call in {"": ours, **peers}.items()}, rounds)
    except Exception as error:  # the other rows are worth having
        return row | {"failed": harness.failure(error)}
    own = samples.pop("")
    row["seconds"] = statistics.median(own)
    for name, others in samples.items():
        seconds = statistics.median(others)
        difference = statistics.median([one - other for one, other in zip(own, others, strict=True)])
        row["peers"][name] = {"seconds": seconds, "difference": difference, "ratio": row["seconds"] / seconds}
    return row


def judge(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Verdict]:
    """The bars of the rows that were measured, by the row's name and the peer's."""
    verdicts = {}
    for row in rows:
        if row["name"] in BARS and row["seconds"]:
            peer, figure, bar = BARS[row["name"]]
            pair = row["peers"][peer]
            faster = 1 / pair["ratio"]
            value = {
                "difference": pair["difference"], "time_of": pair["ratio"], "rate_of": faster, "speedup_of": faster,
                "host_seconds": row["seconds"],
            }[figure]  # fmt: skip
            verdicts[row["name"], peer] = Verdict(row["name"], figure, value, bar, "", "the peer")
    return verdicts


def page(result: dict[str, Any]) -> str:
    """The results as Markdown; the bars are for NVIDIA Hopper."""
    found, rows = result["environment"], result["rows"]
    versions = ", ".join(f"{name} {found[name]}" for name in (*SOFTWARE, "python") if name in found)
    verdicts = judge(rows) if result["device"]["target"] == "sm90a" else {}
    text = [
        f"# Calls over a cache, {result['device']['name']}",
        "",
        f"`{found['command']}`, {found['time']}, revision {result['revision'] or 'not given'}, {versions}; rounds: "
        f"{result['rounds']}.",
        "Figures are of one run, by graph replay on a GPU, rows of host time by the host's clock. Times are medians of "
        "interleaved rounds, a difference is the median of the rounds' differences, a ratio one of medians. "
        "[What the cases are](../README.md#caches).",
        "",
        "| case | ours (us) | peer | peer (us) | difference (us) | ratio | bar |",
        "|" + " --- |" * 7,
    ]
    for row in rows:
        if not row["seconds"]:
            continue
        ours = f"{row['seconds'] * 1e6:.1f}"
        for name, pair in row["peers"].items():
            figures = f"{pair['seconds'] * 1e6:.1f}", f"{pair['difference'] * 1e6:+.1f}", f"{pair['ratio']:.3f}"
            cells = (
                row["title"],
                ours,
                name,
                *figures,
                verdicts[row["name"], name].text() if (row["name"], name) in verdicts else "",
            )
            text.append(f"| {' | '.join(cells)} |")
        if not row["peers"]:
            text.append(f"| {row['title']} | {ours} | - | - | - | - |  |")
    for row in rows:
        for why in ("skipped", "failed"):
            if row[why]:
                text += ["", f"{why.capitalize()}: {row['title']}: {row[why]}"]
        if is_wrong(row):
            text += ["", f"**Wrong** by {row['error']:.2g} of the largest value: {row['title']}"]
    return "\n".join(text) + "\n"


def is_wrong(row: dict[str, Any]) -> bool:
    """Whether our result is not the peer's, which NaN is not either."""
    return row["error"] is not None and not row["error"] < LARGEST_ERROR


def main() -> int:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu, cuda:0, hip:0 [default: a GPU, else the CPU]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--revision", default="", metavar="TEXT", help="what the page calls the revision it is of")
    parser.add_argument("--shapes", default="", metavar="REGEX", help="only rows whose name or title it is found in")
    parser.add_argument("--list", action="store_true", help="print the rows that it would time")
    arguments = parser.parse_args()
    wanted = [case for case in all_cases() if any(re.search(arguments.shapes, x) for x in (case.name, case.title))]
    if arguments.list:
        print(*(f"{case.name}: {case.title}" for case in wanted), sep="\n")
        return 0
    try:
        device = choose_device(arguments.device)
    except click.ClickException as error:
        parser.error(error.format_message())
    torch = harness.find_torch(device.device)
    if torch is None:
        parser.error(f"the cases need torch, and none is installed that sees {device.device}")
    rows = [measure(torch, case, device.device, device.target, arguments.rounds) for case in wanted]
    environment = harness.environment(device.device)
    environment["command"] = shlex.join(["python", "benchmarks/cache.py", *sys.argv[1:]])
    result = {"device": vars(device), "environment": environment, "revision": arguments.revision}
    result |= {"rounds": arguments.rounds, "rows": rows}
    if not arguments.shapes:
        path = HERE / "results" / f"{slug(device.name)}-cache.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(page(result))
    print(page(result))
    return 1 if any(row["failed"] or is_wrong(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
