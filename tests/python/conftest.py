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

    def unexpected_reason(self, report):
        if not report.skipped or hasattr(report, "wasxfail"):
            return None
        reason = report.longrepr[2].removeprefix("Skipped: ")
        return None if reason.startswith(self.expected) else reason

    def pytest_runtest_logreport(self, report):
        if reason := self.unexpected_reason(report):
            self.unexpected.append(f"{report.nodeid}: {reason}")

    # A module that is skipped as a whole: workers of pytest-xdist tell of it only where it fails.
    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        if reason := self.unexpected_reason(report):
            report.outcome, report.longrepr = "failed", f"UNEXPECTED SKIP {collector.nodeid}: {reason}"
        return report

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
