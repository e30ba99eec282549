"""The command line: ``flashport demo``, ``bench``, ``trace``, ``support``, ``doctor`` and ``selftest``."""

from __future__ import annotations

import os
import signal
import sys

import click

from flashport.cli.bench import bench
from flashport.cli.demo import demo
from flashport.cli.doctor import doctor
from flashport.cli.selftest import selftest
from flashport.cli.support import support
from flashport.cli.trace import trace
from flashport.devices import version


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="flashport")
def main() -> None:
    """Portable attention kernels for LLM serving."""


for command in (demo, bench, trace, support, doctor, selftest):
    main.add_command(command)


def run() -> None:
    """The program: ends like any other of a pipeline, without a word, where nobody reads its output."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # here, where an error still has a message
    except OSError as error:  # a full disk, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what could not be written
        sys.exit(f"flashport: {error}")
