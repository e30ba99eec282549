"""The loop: steps of a scheduler through a model until every request has its tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from flashport.cli.serve.arrays import Arrays
from flashport.cli.serve.attention import StepAttention
from flashport.cli.serve.cache import PagedCache
from flashport.cli.serve.model import Model
from flashport.cli.serve.scheduler import Request, Scheduler


@dataclass
class Result:
    """A request's tokens, and of each a digest of the logits that chose it; an empty one stands for logits of NaN."""

    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


@dataclass
class Served:
    """What serving some requests gave and took."""

    results: dict[int, Result] = field(default_factory=dict)
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    mixed_steps: int = 0  # those that held both tokens of prompts and requests that decode
    seconds: float = 0.0
    attention_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Those of prompts and new ones."""
        return self.prompt_tokens + self.new_tokens

    def add(self, other: Served) -> None:
        """Adds what serving other requests gave and took."""
        self.results |= other.results
        for name in ("prompt_tokens", "new_tokens", "steps", "mixed_steps", "seconds", "attention_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Engine:
    """A model and its cache."""

    arrays: Arrays
    model: Model
    cache: PagedCache

    def serve(
        self, requests: Iterable[Request], token_budget: int, advance: Callable[[int], None] = lambda tokens: None
    ) -> Served:
        """Serves requests together; ``advance`` hears of the tokens of each step."""
        scheduler = Scheduler(requests, self.cache, token_budget)
        clock = self.arrays.clock()
        served = Served()
        start = time.perf_counter()
        while step := scheduler.next_step():
            tokens = np.concatenate([work.tokens for work in step])
            positions = np.concatenate([np.arange(work.running.cached, work.kv_len) for work in step])
            ends = np.cumsum([work.count for work in step])
            giving = [(work, end - 1) for work, end in zip(step, ends, strict=True) if work.gives_token]
            attend = StepAttention(self.arrays, self.cache, step, clock)
            logits = self.model.logits(tokens, positions, attend, np.array([row for _, row in giving], int))
            served.steps += 1
            served.mixed_steps += len({work.running.decodes for work in step}) == 2
            served.prompt_tokens += sum(work.count for work in step if not work.running.decodes)
            served.new_tokens += len(giving)
            for work in step:
                work.running.cached = work.kv_len
            for (work, _), row in zip(giving, logits, strict=True):
                running = work.running
                result = served.results.setdefault(running.request.number, Result())
                _choose(result, row)
                running.output.append(result.tokens[-1])
                if running.is_finished:
                    scheduler.finish(running)
            advance(len(tokens))
        served.attention_seconds = clock.seconds()
        served.seconds = time.perf_counter() - start
        return served


def _choose(result: Result, logits: np.ndarray) -> None:
    """Greedily, the first of equal ones."""
    result.tokens.append(int(logits.argmax()))
    digest = b"" if np.isnan(logits).any() else hashlib.blake2b(logits.tobytes(), digest_size=16).digest()
    result.digests.append(digest)
