"""What the self-check's parts share: a check that waits to be run, its outcome, and how one is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashport.testing import numerics, oracle
from flashport.testing.cases import HostArray


@dataclass(frozen=True)
class Outcome:
    """Result of one check: "passed", "failed" or "unsupported", and why if not passed."""

    name: str
    status: str
    detail: str = ""
    kernel: str = ""
    error: float = 0.0
    plain_error: float = 0.0


@dataclass(frozen=True)
class CheckOf:
    """A check that waits to be run."""

    name: str
    run: Callable[[], Outcome]


def guarded(name: str, check: Callable[[], Outcome]) -> CheckOf:
    """A check whose exceptions are outcomes, too: the report must hold whatever a driver brings up."""

    def run() -> Outcome:
        try:
            return check()
        except NotImplementedError as error:
            return Outcome(name, "unsupported", str(error))
        except Exception as error:
            return Outcome(name, "failed", f"{type(error).__name__}: {error}")

    return CheckOf(name, run)


def judge(name: str, kernel: str, *compared: oracle.Comparison) -> Outcome:
    """Passed if every comparison is; the errors are those of the first."""
    problems = "; ".join(one.problem for one in compared if one.problem)
    first = compared[0]
    return Outcome(name, "failed" if problems else "passed", problems, kernel, first.error, first.plain_error)


def poisoned(shape: tuple[int, ...], fmt: str, device: str) -> Any:
    """An array on a device that is NaN throughout."""
    return HostArray(numerics.nan_bits(shape, fmt), numerics.DTYPE[fmt]).on(device)
