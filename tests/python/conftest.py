"""Options of all suites, and the fixture that most of them share; what else they share is in support/."""

from __future__ import annotations

import collections
import os
import pathlib

import pytest

from decode_call import make_decode

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU that others use, too


class SkipWatch:
    """Fails a run in which a test is skipped for a reason that nobody has written down."""

    def __init__(self, expected):
        self.expected, self.unexpected = expected, []

    def pytest_runtest_logreport(self, report):
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(self.expected):
                self.unexpected.append(f"{report.nodeid}: {reason}")

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self, session):
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.unexpected:
            terminalreporter.write_line(f"UNEXPECTED SKIP {line}", red=True)


class Sample:
    """Runs every Nth case of tests of kernels that have more than two times N, and says how many that leaves out.

    So many cases of a test in these folders vary what kernels are given, which no release of a library changes. N is
    best a prime that is no count of a parameter's values, or cases of some of these are never run.
    """

    FOLDERS = ("attention", "decode", "gated_delta")

    def __init__(self, step):
        self.step, self.count, self.left_out = step, 0, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        tests = [item.nodeid.split("[")[0] for item in items]
        cases, seen, kept, left_out = collections.Counter(tests), collections.Counter(), [], []
        for test, item in zip(tests, items, strict=True):
            many = item.path.parent.name in self.FOLDERS and cases[test] > 2 * self.step
            (left_out if many and seen[test] % self.step else kept).append(item)
            seen[test] += 1
        self.count, self.left_out = len(items), len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"LEFT OUT {self.left_out} of {self.count} cases: --sample={self.step} runs one of {self.step} where a "
            f"test of {', '.join(self.FOLDERS)} has more than {2 * self.step}"
        )


def pytest_addoption(parser):
    text = "fail if a test is skipped for a reason that does not begin with a line of FILE"
    parser.addoption("--expected-skips", metavar="FILE", type=pathlib.Path, help=text)
    text = "of tests of kernels that have more than 2 N cases, run the first one and every Nth after it"
    parser.addoption("--sample", metavar="N", type=int, default=1, help=text)


def pytest_configure(config):
    if file := config.getoption("--expected-skips"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        config.pluginmanager.register(SkipWatch(tuple(lines)))
    if (step := config.getoption("--sample")) > 1:
        config.pluginmanager.register(Sample(step))


@pytest.fixture
def x():
    """A small batch in bf16."""
    return make_decode()
