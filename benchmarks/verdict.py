"""A figure beside its bar, as the pages of run.py and cache.py say it, and a device's name as their files have it."""

from __future__ import annotations

import re
from dataclasses import dataclass

AT_LEAST = ("bytes_per_second", "share", "rate_of", "speedup_of")
# How a page says a figure: words around it and the row that it is against, its factor, its digits.
SPELLED = {
    "ratio": ("{} of the best peer's time", 1, 3),
    "seconds": ("{} us", 1e6, 1),
    "host_seconds": ("{} us of host time", 1e6, 1),
    "inverse_share": ("{} of the read's time", 1, 3),
    "share": ("{}% of the read rate", 100, 1),
    "bytes_per_second": ("{} TB/s", 1e-12, 2),
    "rate_of": ("{}% of the rate of {}", 100, 1),
    "speedup_of": ("{} times as fast as {}", 1, 2),
    "time_of": ("{} of the time of {}", 1, 3),
    "difference": ("{} us more than {}", 1e6, 1),
}


@dataclass
class Verdict:
    """A figure beside its bar."""

    row: str
    figure: str
    value: float
    bar: float
    why: str
    against: str = ""  # title of the row that the figure is against

    @property
    def at_least(self) -> bool:
        """Whether larger is better."""
        return self.figure in AT_LEAST

    @property
    def met(self) -> bool:
        """Whether the bar is."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def text(self) -> str:
        """As the table has it."""
        words, scale, digits = SPELLED[self.figure]
        limit = f"{'at least' if self.at_least else 'at most'} {self.bar * scale:g}"
        said = words.format(f"{self.value * scale:.{digits}f}", self.against)
        return f"{said} ({limit}: {'met' if self.met else '**missed**'})"


def slug(device: str) -> str:
    """A device's name as file names have it."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
