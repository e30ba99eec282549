"""flashport trace: record calls of attention into a file, and look at such files, ours and llama.cpp's."""

from __future__ import annotations

import fnmatch
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np

from flashport.cli import trace_tables as tables
from flashport.cli.common import OUTPUT_FILE, choose_device, console, show

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Finite(click.FloatRange):
    """A number that is neither infinite nor NaN, which lies in every range."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click.FloatRange."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_NUMBER, _NOT_NEGATIVE = _Finite(), _Finite(min=0)


@click.group()
def trace() -> None:
    """Traces of attention: record calls, list tensors, compare with the reference and with each other."""


def _selection(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--max-bias", default=0.0, type=_NOT_NEGATIVE, help="ALiBi's max_bias, for files that do not store it."
        ),
        click.option("--softcap", default=0.0, type=_NOT_NEGATIVE, help="Softcap, for files that do not store it."),
        click.option("--scale", type=_NUMBER, help="Factor on scores, where a file has none.  [default: 1/sqrt(D)]"),
        click.option("--step", type=click.IntRange(min=1), help="Only the step of this number."),
        click.option("--layer", type=int, help="Only steps of this layer."),
    ):
        command = option(command)
    return command


def _load(path: Path, scale: float | None, softcap: float, max_bias: float) -> Any:
    from flashport import trace as traces

    try:
        return traces.load(path, scale=scale, softcap=softcap, max_bias=max_bias)
    except (traces.TraceError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def _name_option(what: str) -> Callable[..., Any]:
    return click.option(
        "--name",
        metavar="PATTERN",
        help=f"Only {what} of this role (k, v, mask, ...), or whose name has this, as cache_k*.",
    )


def _matches(tensor: Any, name: str | None) -> bool:
    from flashport.trace import Role

    if name is None or name in get_args(Role):
        return name is None or tensor.role == name
    return fnmatch.fnmatchcase(tensor.name, name if any(sign in name for sign in "*?[") else f"*{name}*")


def _need_match(steps: list[Any], name: str | None) -> list[Any]:
    """The steps that have a tensor of this name; it is an error that there is none."""
    found = [step for step in steps if any(_matches(tensor, name) for tensor in step.tensors)]
    if not found:
        raise click.BadParameter(f"no tensor matches {name!r}", param_hint="--name")
    return found


def _selected(path: Path, layer: int | None, step: int | None, **parameters: Any) -> list[Any]:
    found = _load(path, **parameters).select(layer=layer, step=step)
    if not found:
        raise click.BadParameter(f"{path} has no such step", param_hint="--layer, --step")
    return list(found)


@trace.command(context_settings={"allow_interspersed_args": False})
@click.argument("file", type=OUTPUT_FILE)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--layers", default=1, show_default=True, type=click.IntRange(min=1), help="Layers that call in turn.")
def save(file: Path, program: tuple[str, ...], layers: int) -> None:
    """Run PROGRAM, a Python script or a command, and record its calls of attention and flash_decode to FILE.

    A "--" before PROGRAM may stand there or not.
    """
    program = program[1:] if program[0] == "--" else program
    if not program:
        raise click.UsageError("there is no PROGRAM after --")
    if importlib.util.find_spec("gguf") is None:
        raise click.UsageError("traces need the package gguf: pip install 'flashport[trace]'")
    command = [sys.executable, *program] if program[0].endswith(".py") else list(program)
    variables = {"FLASHPORT_TRACE": str(file.absolute()), "FLASHPORT_TRACE_LAYERS": str(layers)}
    before = file.stat().st_mtime_ns if file.exists() else None
    try:
        code = subprocess.run(command, env=os.environ | variables, check=False).returncode
    except OSError as error:
        raise click.ClickException(f"{command[0]}: {error.strerror}") from error
    if not file.exists() or file.stat().st_mtime_ns == before:
        raise click.ClickException(f"{program[0]} made no call that was recorded; it ended with exit status {code}")
    found = _load(file, None, 0.0, 0.0)
    console.print(f"{file}: {len(found)} steps, {found.tensor_count} tensors", soft_wrap=True, highlight=False)
    if code:
        raise SystemExit(code)


@trace.command(name="show")
@click.argument("file", type=_FILE)
@_name_option("tensors")
@_selection
def show_command(file: Path, name: str | None, layer: int | None, step: int | None, **parameters: Any) -> None:
    """List the tensors of FILE: name, operations, type, shape, strides and statistics of each link of a chain."""
    from flashport.trace import TraceError

    steps = _selected(file, layer, step, **parameters)
    _need_match(steps, name)
    for each in steps:
        tensors = [tensor for tensor in each.tensors if _matches(tensor, name)]
        if not tensors:
            continue
        undecided = ""
        try:
            if each.kind != "output":
                each.decide()
        except TraceError as error:
            undecided = str(error)
        tables.print_tensors(each, tensors)
        for note in [*each.notes, undecided]:
            if note:
                console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)


def _checking(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--seed", default=0, show_default=True, help="Which queries --sample takes."),
        click.option("--sample", type=click.IntRange(min=1), help="Check so many queries of a step, not all."),
        click.option(
            "--tolerance", type=_NOT_NEGATIVE, help="Relative error.  [default: 1e-3, more for quantised keys]"
        ),
        click.option(
            "--device", "device_name", metavar="NAME", help="cpu, cuda:0, hip:0, ...  [default: every one here]"
        ),
    ):
        command = option(command)
    return _name_option("steps with a tensor")(_selection(command))


def _rows(step: Any, sample: int | None, seed: int) -> Any:
    tokens = step.need("q").ne[1]
    if sample is None or sample >= tokens:
        return None
    return np.sort(np.random.default_rng([seed, step.number]).choice(tokens, sample, replace=False))


def _check(
    file: Path, name: str | None, layer: int | None, step: int | None, device_name: str | None,
    tolerance: float | None, sample: int | None, seed: int, with_output: bool, plot: Path | None, **parameters: Any,
) -> None:  # fmt: skip
    """Both of compare and test: rows of a table, a verdict, the exit status."""
    from flashport.trace import TraceError, _decide, _operators, _reference

    device = None if device_name is None else choose_device(device_name).device
    steps = _need_match(_selected(file, layer, step, **parameters), name)
    table, failures, errors, unserved = tables.comparison(file.name), [], [], []
    for each in steps:
        try:
            rows = _rows(each, sample, seed)
            truth = _reference.reference(each, rows)
            recorded = _decide.output(each) if rows is None else _decide.output(each)[:, rows]
            limit = _reference.tolerance(each, rows) if tolerance is None else tolerance
            results = _operators.run_all(each, rows, device)
        except TraceError as error:
            raise click.ClickException(str(error)) from error
        if all(result.out is None for result in results):
            unserved.append(each)
        outputs = [("recorded", "", recorded, limit)] if with_output else []
        for result in results:
            own_limit = max(limit, result.rounding) if tolerance is None else limit
            outputs.append((f"{result.operator} on {result.device}", result.way, result.out, own_limit))
        for what, way, out, allowed in outputs:
            if out is None:
                tables.add_refused(table, each, what, way)
                continue
            apart = _reference.differences(out, truth)
            tables.add_comparison(table, each, what, way, apart, allowed)
            failures += [] if apart.within(allowed) else [f"step {each.number} {what}"]
        errors.append((each, _reference.by_head(recorded, truth)))
    show(table, names=2)
    for each in steps:
        for note in each.notes:
            console.print(f"step {each.number}: {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        tables.plot(errors, file.name, plot)
        console.print(f"plot: {plot}", soft_wrap=True, highlight=False)
    if failures:
        text = f"past the tolerance: {', '.join(failures[:8])}{' ...' if len(failures) > 8 else ''}"
        console.print(text, style="bold red", highlight=False, soft_wrap=True)
        raise SystemExit(1)
    # No operator takes dropout that was recorded: there compare has checked all that can be.
    expected = [each for each in unserved if with_output and each.dropout_p > 0]
    if len(unserved) == len(steps) > len(expected):
        text = "no operator ran: only the recorded outputs were checked" if with_output else "nothing was checked"
        console.print(f"{text}, every operator refused every step", style="bold red", highlight=False, soft_wrap=True)
        raise SystemExit(1)
    console.print("every error is within the tolerance", style="bold green")
    if unserved:
        numbers = [str(each.number) for each in unserved]
        text = f"no operator ran on step {', '.join(numbers[:8])}{' ...' if len(numbers) > 8 else ''}"
        console.print(text, style="bold yellow", highlight=False, soft_wrap=True)


@trace.command()
@click.argument("file", type=_FILE)
@click.option(
    "--plot", type=OUTPUT_FILE, help="Draw the recorded output's error per step and head to a PNG file, or another."
)
@_checking
def compare(file: Path, plot: Path | None, **options: Any) -> None:
    """Hold the outputs in FILE, and those of our operators, against the fp64 reference; exit 1 past the tolerance."""
    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise click.UsageError("--plot needs matplotlib: pip install 'flashport[bench]'")
        endings = tables.plot_endings()
        if plot.suffix.lower() not in endings:
            raise click.BadParameter(f"{plot} must end with one of {', '.join(endings)}", param_hint="--plot")
    _check(file, with_output=True, plot=plot, **options)


@trace.command()
@click.argument("file", type=_FILE)
@_checking
def test(file: Path, **options: Any) -> None:
    """Run our operators alone on the inputs in FILE, against the fp64 reference; exit 1 past the tolerance."""
    _check(file, with_output=False, plot=None, **options)


@trace.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
@_name_option("tensors")
@click.option(
    "--tolerance", default=0.0, show_default=True, type=_NOT_NEGATIVE, help="Relative error that is no difference."
)
@_selection
def diff(
    first: Path,
    second: Path,
    name: str | None,
    tolerance: float,
    layer: int | None,
    step: int | None,
    **parameters: Any,
) -> None:
    """Hold two traces against each other by tensors, and name the first link that differs; exit 1 if one does."""
    from flashport.trace import TraceError, _statistics

    ours, theirs = (_selected(path, layer, step, **parameters) for path in (first, second))
    table, partings = tables.difference(first.name, second.name), []
    for a, b in zip(ours, theirs, strict=False):
        try:
            pairs = _statistics.compared(a, b, tolerance)
        except TraceError as error:
            raise click.ClickException(str(error)) from error
        for tensor, parting, apart in pairs:
            if _matches(tensor, name):
                tables.add_difference(table, a, tensor, parting, apart)
                partings += [parting] if parting else []
    show(table, names=2)
    if len(ours) != len(theirs):
        console.print(f"{first} has {len(ours)} steps, {second} {len(theirs)}", highlight=False, soft_wrap=True)
    if partings:
        one = partings[0]
        text = f"they part at step {one.step} (layer {one.layer}), {one.role} {one.name!r}, {one.chain}: it {one.text}"
        console.print(text, style="bold red", highlight=False, markup=False, soft_wrap=True)
    if partings or len(ours) != len(theirs):
        raise SystemExit(1)
    console.print("no tensor differs", style="bold green")
