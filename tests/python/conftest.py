"""Options of all suites, and the fixture that most of them share; what else they share is in support/."""

from __future__ import annotations

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


def pytest_addoption(parser):
    text = "fail if a test is skipped for a reason that does not begin with a line of FILE"
    parser.addoption("--expected-skips", metavar="FILE", type=pathlib.Path, help=text)


def pytest_configure(config):
    if file := config.getoption("--expected-skips"):
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        config.pluginmanager.register(SkipWatch(tuple(lines)))


@pytest.fixture
def x():
    """A small batch in bf16."""
    return make_decode()
