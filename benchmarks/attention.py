#!/usr/bin/env python3
"""Times attention forward of an installed flashport beside torch's SDPA by cuDNN and by flash, in bf16.

    python benchmarks/attention.py [--device cuda:0] [--rounds 7] [--revision TEXT] [--shapes REGEX] [--list]

The cases are those of flashport.benchmarks.attention. It writes results/<device>-attention.json and a page beside it,
and prints the page. All candidates of a row run in interleaved rounds by graph replay, and so do a row and the one of
ours that it is held against: the card's clock follows its power, so that rates a minute apart differ by some 5%. A
figure is a median, a ratio one of medians. TFLOP/s count 2 (D + DV) for each query, head and key that the mask lets it
see. Each result of ours without options and fp8 is held against a reference in fp64 on some rows before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import flashport
from flashport.benchmarks import attention, harness
from flashport.benchmarks.attention import AttentionCase
from verdict import slug

HERE = Path(__file__).resolve().parent
# What a row is held against: cuDNN's rate, and where cuDNN does not run the case or a part of it is asked about, one of
# our own rows.
DENSE, LONG = "4 x 4096, 32/8 D128 causal", "1 x 16384, 32/8 D128 full"
BARS = {  # a ratio of rates is at least the bar
    **{f"{size}, 32/8 D128 {mask}": 0.95 for size in ("4 x 4096", "1 x 16384") for mask in ("causal", "full")},
    **{f"{size}, 32/8 D64 {mask}": 0.92 for size in ("4 x 4096", "1 x 16384") for mask in ("causal", "full")},
    **{f"{size}, 16/4 D256 {mask}": 0.97 for size in ("4 x 4096", "1 x 16384") for mask in ("causal", "full")},
    "4 x 4096, 32/8 D96 causal": 0.90,
    "16 x 1024, 32/8 D128 causal": 0.90,
    "4 x 4096, 16/16 D192/128 causal": 0.85,
    "64 packed, 128 to 8k, 32/8 D128 causal": 0.90,
    "8 x 128 on 65536, 32/8 D128 full": 0.75,
    **{f"{DENSE}, pages of {size}": bar for size, bar in ((1, 0.60), (16, 0.88), (64, 0.88), (256, 0.88))},
    **{f"{DENSE}, {kv}": 0.80 for kv in ("fp8 kv", "q8_0 kv", "q4_0 kv", "q5_1 kv")},
    **{f"{DENSE}, pages of 16, {kv}": 0.80 for kv in ("q8_0 kv", "q4_0 kv", "q5_1 kv")},
    **{
        f"4 x 4096, {heads} {mask}, {option}": 0.60
        for heads in ("32/8 D64", "32/8 D96", "32/8 D128", "16/16 D192/128", "16/4 D256")
        for mask in ("causal", "full")
        for option in (
            "softcap 50.0",
            "alibi slopes",
            "bias bf16",
            "bias fp32",
            "bias bf16 of odd rows",
            "dropout_p 0.1",
        )
    },
}
HOST_BAR = 7e-6  # seconds of host time of a call
TIME_BARS = {"1 x 16384, 32/8 D128 causal, window (1023, -1)": 0.20}  # a ratio of times is at most the bar
OPTIONS = {
    "softcap": "softcap 50.0",
    "ALiBi": "alibi slopes",
    "bias": "bias of heads bf16",
    "shared bias": "bias bf16",
    "float bias": "bias fp32",
    "odd bias": "bias bf16 of odd rows",
    "dropout": "dropout_p 0.1",
}
PEERS = {"SDPA cuDNN": "cudnn", "SDPA flash": "flash"}  # names of the package, and of a row


def row_name(case: AttentionCase) -> str:
    """The name of a case's row."""
    q_len, kv_len = case.lens[0]
    if case.packed:
        size = f"{len(case.lens)} packed, {min(case.lens)[0]} to {max(case.lens)[0] // 1024}k"
    else:
        size = f"{len(case.lens)} x {q_len}" + f" on {kv_len}" * (q_len != kv_len)
    dims = f"D{case.dims[0]}" + f"/{case.dims[1]}" * (case.dims[0] != case.dims[1])
    options = f", window ({case.window}, -1)" * (case.window >= 0)
    options += f", {OPTIONS[case.option]}" if case.option else ""
    options += f", pages of {case.pages}" * bool(case.pages) + f", fp8 {case.fp8}" * bool(case.fp8)
    options += f", {case.cache} kv" * bool(case.cache)
    return f"{size}, {case.heads[0]}/{case.heads[1]} {dims} {'causal' if case.causal else 'full'}{options}"


def held_against(case: AttentionCase) -> str:
    """Gives "cudnn", or the name of the row that a case is held against."""
    if case.packed or (case.dims[0] != case.dims[1] and not case.option):
        return DENSE
    if case.lens[0][0] != case.lens[0][1]:
        return LONG
    plain = row_name(dataclasses.replace(case, window=-1, option="", pages=0, fp8="", cache=""))
    return "cudnn" if plain == row_name(case) else plain


def other_case(case: AttentionCase) -> AttentionCase | None:
    """The case of ours that a case is held against; None where it is held against cuDNN."""
    name = held_against(case)
    return next((each for each in attention.cases(study=True) if row_name(each) == name), None)


def error_of(torch: Any, case: AttentionCase, arguments: dict[str, Any]) -> float:
    """The largest error of 64 sampled rows of the first sequence and head; cases without options and formats."""
    flashport.attention(**arguments)
    q_len, kv_len = case.lens[0]
    q, k, v, out = (arguments[name] if case.packed else arguments[name][0] for name in ("q", "k", "v", "out"))
    if case.pages:
        table = arguments["block_table"][0].long()
        k, v = (arguments[name][table].flatten(0, 1) for name in ("k", "v"))
    rows = torch.linspace(0, q_len - 1, 64, device=q.device).long()
    logits = q[rows, 0].double() @ k[:kv_len, 0].double().T / math.sqrt(case.dims[0])
    distance = rows[:, None] + kv_len - q_len - torch.arange(kv_len, device=q.device)
    hidden = (distance < 0) & case.causal | (distance > case.window) & (case.window >= 0)
    weights = torch.softmax(logits.masked_fill(hidden, -math.inf), -1)
    return float((weights @ v[:kv_len, 0].double() - out[rows, 0].double()).abs().max())


def target_of(device: str) -> str:
    """The target of a backend's first device."""
    return device.partition(":")[0]


def measure(torch: Any, case: AttentionCase, device: str, rounds: int) -> dict[str, Any]:
    """One row."""
    name = row_name(case)
    checked = not case.option and not case.fp8 and not case.cache
    error = error_of(torch, case, attention.make_arguments(torch, case, device)) if checked else None
    row = attention.run_case(case, device, target_of(device), rounds)
    against = other_case(case)
    if against is not None:
        pair = [attention.make_arguments(torch, each, device) for each in (case, against)]
        calls = [functools.partial(flashport.attention, **arguments) for arguments in pair]
        harness.measure(row, torch, device, calls[0], {"against": calls[1]}, rounds, read=False)
    rate = lambda seconds: case.flops / seconds * 1e-12 if seconds else None  # noqa: E731
    return {
        "name": name,
        "seconds": row.seconds,
        "tflops": rate(row.seconds),
        "peers": {PEERS[peer]: rate(seconds) for peer, seconds in row.peers.items() if peer in PEERS},
        "peers_failed": {PEERS.get(peer, peer): why for peer, why in row.peers_failed.items()},
        "error": error,
        "bar": TIME_BARS.get(name, BARS.get(name)),
        "against": held_against(case),
        "against_seconds": row.peers.get("against"),
        "against_tflops": None if against is None else against.flops / row.peers["against"] * 1e-12,
        "of_time": name in TIME_BARS,
        "host_seconds": host_times(torch, case, device) if row.host_seconds is not None else None,
    }


def host_times(torch: Any, case: AttentionCase, device: str) -> dict[str, float]:
    """Host time of an asynchronous call: ours with a given and with a new output, torch's SDPA, torch's smallest."""
    arguments = attention.make_arguments(torch, case, device)
    new_output = {name: value for name, value in arguments.items() if name != "out"}
    heads_first = [arguments[name].transpose(1, 2) for name in "qkv"]
    sdpa = functools.partial(torch.nn.functional.scaled_dot_product_attention, *heads_first)
    calls = {
        "out=": functools.partial(flashport.attention, **arguments),
        "new output": functools.partial(flashport.attention, **new_output),
        "torch SDPA": functools.partial(sdpa, is_causal=case.causal, enable_gqa=True),
        "Tensor.zero_": arguments["out"].zero_,
    }
    return {name: harness.host_seconds(call, device) for name, call in calls.items()}


def judge(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its ratio to what it is held against."""
    for row in rows:
        if row["against"] == "cudnn":
            other_rate = row["peers"].get("cudnn")
            row["ratio"] = row["tflops"] / other_rate if other_rate else None
        elif row["against_seconds"] is None:
            row["ratio"] = None
        elif row["of_time"]:
            row["ratio"] = row["seconds"] / row["against_seconds"]
        else:
            row["ratio"] = row["tflops"] / row["against_tflops"]


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
    for row in rows:
        if row["host_seconds"]:
            times = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in row["host_seconds"].items())
            missed = "" if row["host_seconds"]["out="] <= HOST_BAR else ", missed"
            bar = f"bar for out=: at most {HOST_BAR * 1e6:.0f} us{missed}"
            text += ["", f"Host time of a call, {row['name']}: {times} ({bar})."]
    return "\n".join(text) + "\n"


def main() -> int:
    """Runs the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--revision", default="", metavar="TEXT", help="what the page calls the revision it is of")
    parser.add_argument("--shapes", default="", metavar="REGEX")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    wanted = [case for case in attention.cases(study=True) if re.search(arguments.shapes, row_name(case))]
    if arguments.list:
        print(*(row_name(case) for case in wanted), sep="\n")
        return 0
    support = [flashport.supports("attention", target=target_of(arguments.device), **case.query) for case in wanted]
    for case, answer in zip(wanted, support, strict=True):
        if not answer:
            print(f"skipped {row_name(case)}: {answer.reason}")
    wanted = [case for case, answer in zip(wanted, support, strict=True) if answer]
    torch = harness.find_torch(arguments.device)
    rows = [measure(torch, case, arguments.device, arguments.rounds) for case in wanted]
    judge(rows)
    where = harness.environment(arguments.device) | {"revision": arguments.revision or "not given"}
    name = slug(torch.cuda.get_device_name(arguments.device))
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
