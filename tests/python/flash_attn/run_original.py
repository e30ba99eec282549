"""Runs a seeded sample of flash-attn's own tests over our drop-in: forward and kvcache functions.

    python tests/python/flash_attn/run_original.py test_flash_attn.py --device cpu --cases 300

The file is test_flash_attn.py among the tests of flash-attn 2.8.4, which the user fetches; it needs pytest and
einops. Every function gets an equal share of the cases, or all that it has; cases that it skips do not count. On the
CPU "cuda" means the CPU, and cases that --max-tokens rules out are not drawn, as the reference takes memory and time
for all pairs. There is no backward: tests run under torch.no_grad(), and gradients are zeros on both sides. The last
lines count cases by function, with the seed. Functions that repeat a large call 250 times run on GPUs alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import os
import random
import sys
import time
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import flashport

FUNCTIONS = [
    "test_flash_attn_qkvpacked",
    "test_flash_attn_varlen_qkvpacked",
    "test_flash_attn_output",
    "test_flash_attn_varlen_output",
    "test_flash_attn_causal",
    "test_flash_attn_varlen_causal",
    "test_flash_attn_splitkv",
    "test_flash_attn_kvcache",
    "test_flash_attn_varlen_paged_kv_num_splits",
    "test_flash_attn_kvcache_paged_block_table_bounds",
    "test_flash_attn_generator_arg_must_be_none",
]
ON_GPUS = ["test_flash_attn_race_condition"]
FACTORIES = ["arange", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"]
LENGTHS = ("seqlen", "seqlen_q", "seqlen_k")


def on_the_cpu():
    """Patches under which the device "cuda" is the CPU."""

    def moved(factory):
        def make(*arguments, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return factory(*arguments, **options)

        return make

    stack = contextlib.ExitStack()
    for name in FACTORIES:
        stack.enter_context(mock.patch.object(torch, name, moved(getattr(torch, name))))
    stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
    card = SimpleNamespace(total_memory=80 << 30)
    stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=card))
    return stack


def without_backward():
    """Patches under which gradients are zeros."""

    def zeros(outputs, inputs, *_, **__):
        one = isinstance(inputs, torch.Tensor)
        return tuple(torch.zeros_like(x) for x in ([inputs] if one else inputs))

    return mock.patch.object(torch.autograd, "grad", zeros)


def load(path):
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("original_tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(function):
    """(names, values) of each of its parametrize marks; values are tuples."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            axes.append((names, [value if len(names) > 1 else (value,) for value in mark.args[1]]))
    return axes


def shuffled(axes, generator, max_tokens):
    """All cases of at most so many tokens in random order, as arguments by name."""
    total = math.prod(len(values) for _, values in axes)
    for place in generator.sample(range(total), total):
        arguments = {}
        for names, values in axes:
            place, index = divmod(place, len(values))
            arguments.update(zip(names, values[index], strict=True))
        if max([0, *(arguments[name] for name in LENGTHS if name in arguments)]) <= max_tokens:
            yield arguments


def run(function, arguments):
    """How it ended, passed, skipped or failed, and the text of a failure."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            function(**arguments)
    except pytest.skip.Exception:
        return "skipped", ""
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""


def main():
    """Prints counts; exits with 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="tests/test_flash_attn.py of flash-attn")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=3000, help="of all functions together")
    parser.add_argument("--max-tokens", type=int, help="of a sequence; default 512 on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="NAME", help="one function")
    options = parser.parse_args()
    functions = FUNCTIONS + (ON_GPUS if options.device == "cuda" else [])
    functions = [name for name in functions if options.only in (None, name)]
    if not functions:
        parser.error(f"--only must name a function that runs on {options.device}, got {options.only}")
    max_tokens = options.max_tokens or (512 if options.device == "cpu" else sys.maxsize)
    generator = random.Random(options.seed)
    begin, failures, counts = time.monotonic(), [], {}
    with contextlib.ExitStack() as stack:
        if options.device == "cpu":
            stack.enter_context(on_the_cpu())
        stack.enter_context(without_backward())
        stack.enter_context(flashport.install_shims("flash_attn"))
        module = load(options.path)
        left = options.cases
        # Functions with few cases first, whose surplus share goes to the others.
        functions.sort(key=lambda name: math.prod(len(x) for _, x in parameters(getattr(module, name))))
        for number, name in enumerate(functions):
            function, tally = getattr(module, name), dict.fromkeys(("passed", "skipped", "failed"), 0)
            # The original refuses lengths that a table has no room for, and waits for the device to see them.
            checks = mock.patch.dict(os.environ, FLASHPORT_CHECK="1") if "bounds" in name else contextlib.nullcontext()
            share = -(-left // (len(functions) - number))
            for arguments in shuffled(parameters(function), generator, max_tokens):
                if tally["passed"] + tally["failed"] == share:
                    break
                with checks:
                    state, text = run(function, arguments)
                tally[state] += 1
                if state == "failed":
                    failures.append((name, arguments))
                    print(f"FAILED {name} {arguments}\n{text}", flush=True)
            left -= tally["passed"] + tally["failed"]
            counts[name] = tally
            print(f"{name}: {tally}", flush=True)
    total = {state: sum(tally[state] for tally in counts.values()) for state in ("passed", "skipped", "failed")}
    print(f"\nseed {options.seed}, {options.device}, at most {max_tokens} tokens: {total}")
    print(f"{time.monotonic() - begin:.0f} s, torch {torch.__version__}, flashport {flashport.__version__}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
