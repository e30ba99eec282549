"""Which tokens of which requests a step computes: continuous batching with chunked prefill.

Requests wait in the order in which they arrive. The first one is admitted when there are pages for all of its tokens,
so that none must be thrown out midway. A step has a budget of tokens: each request that decodes takes one, and what is
left goes to prompts in the order of their admission, cut where the budget ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flashport.cli.serve.cache import PagedCache, pages_for


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    number: int
    arrival: int  # the step before which it arrives
    prompt: np.ndarray  # token numbers
    new_tokens: int  # how many it wants, 1 or more

    @property
    def pages(self) -> int:
        """What its tokens need; the last new one is never written into the cache."""
        return pages_for(len(self.prompt) + self.new_tokens - 1)


@dataclass
class Running:
    """A request that has its pages."""

    request: Request
    pages: list[int]
    cached: int = 0  # tokens whose keys and values are in the cache
    output: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether the whole prompt is in the cache."""
        return self.cached >= len(self.request.prompt)

    @property
    def is_finished(self) -> bool:
        """Whether all new tokens are there."""
        return len(self.output) == self.request.new_tokens


@dataclass(frozen=True)
class Work:
    """The next ``count`` tokens of a request: one that decodes, or a chunk of its prompt."""

    running: Running
    count: int

    @property
    def tokens(self) -> np.ndarray:
        """Their numbers."""
        first, prompt = self.running.cached, self.running.request.prompt
        return np.array(self.running.output[-1:]) if self.running.decodes else prompt[first : first + self.count]

    @property
    def kv_len(self) -> int:
        """Tokens of the request that are in the cache after this step."""
        return self.running.cached + self.count

    @property
    def gives_token(self) -> bool:
        """Whether the logits of its last token choose a new one."""
        return self.kv_len >= len(self.running.request.prompt)


class Scheduler:
    """The queue, and the requests that run."""

    def __init__(self, requests: Iterable[Request], cache: PagedCache, token_budget: int) -> None:
        self._waiting = deque(sorted(requests, key=lambda request: (request.arrival, request.number)))
        self._running: list[Running] = []
        self._cache = cache
        self._token_budget = token_budget
        self._now = 0
        for request in self._waiting:
            if request.pages > cache.pages:
                raise ValueError(
                    f"request {request.number} needs {request.pages} pages for {len(request.prompt)} prompt and "
                    f"{request.new_tokens} new tokens, and the cache has {cache.pages}"
                )

    def next_step(self) -> list[Work]:
        """What the next step computes, requests that decode first; empty when every request is finished."""
        if not self._running and self._waiting:
            self._now = max(self._now, self._waiting[0].arrival)  # nothing to do until then
        self._admit()
        self._now += 1
        step = [Work(running, 1) for running in self._running if running.decodes]
        left = self._token_budget - len(step)
        for running in self._running:
            if left > 0 and not running.decodes:
                step.append(Work(running, min(left, len(running.request.prompt) - running.cached)))
                left -= step[-1].count
        return step

    def _admit(self) -> None:
        """No more requests than the budget has tokens, so that every one that decodes goes on in every step."""
        while self._waiting and self._waiting[0].arrival <= self._now and len(self._running) < self._token_budget:
            pages = self._cache.take(self._waiting[0].pages)
            if pages is None:
                return
            self._running.append(Running(self._waiting.popleft(), pages))

    def finish(self, running: Running) -> None:
        """Takes a request out and its pages back."""
        self._running.remove(running)
        self._cache.give_back(running.pages)
